//! A stage between two ports without devices, and frames.

use std::net::Ipv4Addr;

use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use wirepath::packet::Pool;
use wirepath::pipeline::{PortInfo, SteppedRuntime};
use wirepath::prelude::*;
use wirepath::settings::Source;

pub(crate) const A: PortId = PortId::new(0);
pub(crate) const B: PortId = PortId::new(1);
pub(crate) const MS: u64 = 1_000_000;
const PORTS: &str = "[[port]]\nname = 'a'\ndriver = 'null'\n[[port]]\nname = 'b'\ndriver = 'null'\n";

/// A pipeline of one stage.
pub(crate) struct Lab<S> {
    pub(crate) runtime: SteppedRuntime<S>,
    pool: Pool,
}

impl<S: Stage + 'static> Lab<S> {
    pub(crate) fn new(domain: &Domain, stage: S) -> Self {
        let pool = Pool::new("test", 1024).unwrap();
        let port = |id, name| PortInfo::simulated(id, name, None, 1500, &pool);
        Self { runtime: SteppedRuntime::new(vec![port(A, "a"), port(B, "b")], domain, stage).unwrap(), pool }
    }

    /// Passes frames through the stage as one batch. Returns the sent frames and their ports.
    pub(crate) fn pass(&mut self, port: PortId, frames: &[Vec<u8>]) -> Vec<(PortId, Vec<u8>)> {
        let mut batch = Batch::new();
        for frame in frames {
            let mut packet = self.pool.take().unwrap();
            assert!(packet.extend_from_slice(frame, &self.pool));
            batch.push(packet).unwrap();
        }
        self.runtime.process(Some(port), &mut batch);
        let sent = std::iter::from_fn(|| self.runtime.next_sent());
        sent.map(|packet| (packet.out_port().unwrap(), packet.data().to_vec())).collect()
    }

    /// Number of drops with a reason. Nothing else was dropped, and nothing is lost.
    #[track_caller]
    pub(crate) fn drops(&self, reason: &str) -> u64 {
        assert_eq!(self.runtime.balance().in_flight(), 0);
        let drops = self.runtime.drops();
        assert!(drops.keys().all(|it| it.name() == reason), "{drops:?}");
        drops.values().sum()
    }

    pub(crate) fn counter(&mut self, counter: CounterId) -> u64 {
        self.runtime.with_plane(|plane| plane.counter(counter))
    }
}

/// Reads the tables of an application from a configuration with two ports.
pub(crate) fn read<T: AppSettings>(text: &str) -> Result<T, String> {
    let source = Source::new("c.toml", format!("{PORTS}{text}"));
    Config::parse_with::<T>(&source).map(|(_, own)| own).map_err(|error| error.to_string())
}

pub(crate) const CLIENT: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const SERVER: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn ipv4(src: [u8; 4], dst: [u8; 4]) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    PacketBuilder::ethernet2(CLIENT, SERVER).ipv4(src, dst, 64)
}

/// A datagram with its number as payload.
pub(crate) fn udp(src: ([u8; 4], u16), dst: ([u8; 4], u16), number: u32) -> Vec<u8> {
    let mut frame = Vec::new();
    ipv4(src.0, dst.0).udp(src.1, dst.1).write(&mut frame, &number.to_be_bytes()).unwrap();
    frame
}

/// A TCP segment: `S` is a SYN, `A` acknowledges.
pub(crate) fn tcp(src: ([u8; 4], u16), dst: ([u8; 4], u16), flags: &str, seq: u32, ack: u32) -> Vec<u8> {
    let mut step = ipv4(src.0, dst.0).tcp(src.1, dst.1, seq, 1024);
    step = if flags.contains('S') { step.syn() } else { step };
    step = if flags.contains('A') { step.ack(ack) } else { step };
    let mut frame = Vec::new();
    step.write(&mut frame, &[]).unwrap();
    frame
}

/// Addresses and ports of a frame whose checksums are right.
#[track_caller]
pub(crate) fn checked(frame: &[u8]) -> ((Ipv4Addr, u16), (Ipv4Addr, u16)) {
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(etherparse::NetSlice::Ipv4(ip)) = &sliced.net else { panic!("not IPv4") };
    let header = ip.header().to_header();
    assert_eq!(header.header_checksum, header.calc_header_checksum());
    let (src, dst) = (header.source, header.destination);
    let ports = match &sliced.transport {
        Some(TransportSlice::Udp(udp)) => {
            let sum = udp.to_header().calc_checksum_ipv4_raw(src, dst, udp.payload()).unwrap();
            assert_eq!(udp.checksum(), sum);
            (udp.source_port(), udp.destination_port())
        }
        Some(TransportSlice::Tcp(tcp)) => {
            assert_eq!(tcp.checksum(), tcp.calc_checksum_ipv4(src, dst).unwrap());
            (tcp.source_port(), tcp.destination_port())
        }
        other => panic!("{other:?}"),
    };
    ((src.into(), ports.0), (dst.into(), ports.1))
}
