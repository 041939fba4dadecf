//! Helpers that all test programs of ports share.

#![allow(dead_code)]

use wirepath_packet::PortId;
use wirepath_packet::{Packet, Pool};
use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_pmd::port::{OpenPort, PortConfig, PortError, StartedPort};
use wirepath_settings::Source;

/// Reads a `[[port]]` table, given without the key `name`.
pub(crate) fn settings(table: &str) -> PortSettings {
    let source = Source::new("test.toml", format!("[[port]]\nname = \"port\"\n{table}"));
    let document = source.parse().unwrap_or_else(|error| panic!("{error}"));
    let port = document.settings().tables("port").expect("one port").remove(0);
    drivers::plan(port).unwrap_or_else(|error| panic!("{error}"))
}

/// Opens and starts the port of a `[[port]]` table in the calling thread's namespace.
pub(crate) fn start(table: &str, pool: &Pool) -> Result<StartedPort, PortError> {
    start_with(table, pool, |_| {})
}

/// Like [`start`], with changes that a table cannot express.
pub(crate) fn start_with(
    table: &str,
    pool: &Pool,
    change: impl FnOnce(&mut PortConfig),
) -> Result<StartedPort, PortError> {
    let settings = settings(table);
    let mut config = settings.config(PortId::new(0), pool.clone());
    change(&mut config);
    OpenPort::open("port", settings.plan)?.configure(config)?.start()
}

/// Returns a pool for a test.
pub(crate) fn pool() -> Pool {
    Pool::new("test", 8192).expect("memory for a pool")
}

/// Returns a packet with these bytes, in as many segments as it needs.
pub(crate) fn packet(pool: &Pool, bytes: &[u8]) -> Packet {
    let mut packet = pool.take().expect("a free buffer");
    assert!(packet.extend_from_slice(bytes, pool), "free buffers");
    packet
}

/// Returns the bytes of a packet.
pub(crate) fn bytes(packet: &Packet) -> Vec<u8> {
    let bytes = packet.segments().collect::<Vec<_>>().concat();
    assert_eq!(bytes.len(), packet.len());
    bytes
}
