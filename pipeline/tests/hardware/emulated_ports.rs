//! Ports of emulated ConnectX devices, for tests of rule offload.

use std::time::{Duration, Instant};

use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_pmd::port::{OpenPort, PortConfig, PortId, RxQueue, StartedPort};
use wirepath_settings::Source;
use wirepath_testlab::Requirement;
use wirepath_wire::{L4Type, Parser, Tunnel};

pub(crate) const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");

/// Maximum time to wait for packets. A passing test does not reach it.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the settings of a port with this rule backend.
pub(crate) fn settings(device: &str, backend: &str) -> PortSettings {
    let text =
        format!("[[port]]\nname = 'dut'\ndriver = 'mlx5'\ndevice = '{device}'\n[port.mlx5]\nrules = '{backend}'\n");
    let source = Source::new("test.toml", text);
    let document = source.parse().unwrap_or_else(|error| panic!("{error}"));
    let port = document.settings().tables("port").expect("one port").remove(0);
    drivers::plan(port).unwrap_or_else(|error| panic!("{error}"))
}

/// Starts a port with this rule backend.
pub(crate) fn start(id: PortId, pool: &Pool, device: &str, backend: &str, queues: u16) -> StartedPort {
    let plan = settings(device, backend).plan;
    let open = OpenPort::open(device, plan).unwrap_or_else(|error| panic!("{error}"));
    let config = PortConfig { mtu: 9000, rx_queues: queues, depth: 256, ..PortConfig::new(id, pool.clone()) };
    open.configure(config).and_then(|port| port.start()).unwrap_or_else(|error| panic!("{error}"))
}

/// Receives packets from these queues: at least `least`, unless the time expires.
pub(crate) fn receive(queues: &mut [RxQueue], least: usize) -> Vec<(u16, Packet)> {
    let mut all = Vec::new();
    let mut start = Instant::now();
    loop {
        let before = all.len();
        for queue in &mut *queues {
            let number = queue.index();
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            batch.drain_front(usize::MAX, |packet| all.push((number, packet)));
        }
        if all.len() > before {
            start = Instant::now();
        } else if all.len() >= least || start.elapsed() > TIMEOUT {
            return all;
        }
    }
}

/// Returns true if all headers are valid, including those of a tunnel and inside it. A device checks them
/// less strictly than the rule language, for which a malformed tunnel or inner header does not exist.
pub(crate) fn is_sound(frame: &[u8]) -> bool {
    let Ok(parsed) = Parser::default().parse(frame) else { return false };
    let Some(layers) = parsed.stack(0) else { return false };
    let port = || frame.get(layers.l4() + 2..layers.l4() + 4).map(|port| u16::from_be_bytes([port[0], port[1]]));
    let tunnelled = match layers.l4_type() {
        L4Type::Gre => true,
        L4Type::Udp => matches!(port(), Some(4789 | 4790 | 6081 | 6635)),
        _ => parsed.tunnel_of(0) != Tunnel::None,
    };
    let labelled = matches!(layers.ethertype().0, 0x8847 | 0x8848);
    let cut_off = layers.protocol().0 == 47 && layers.l4_type() != L4Type::Gre;
    // A tunnel header whose flags deny the tunnel is handled alike by the device. It does not read behind the
    // IP packet.
    let flags = frame.get(layers.l4() + 8).copied().unwrap_or(0);
    let disowned = match port() {
        Some(4789) => flags & 8 == 0,
        Some(4790) => flags & 0x30 != 0,
        Some(6081) => flags & 0xc0 != 0,
        _ => false,
    };
    let disowned = disowned && layers.l4_type() == L4Type::Udp && layers.end() >= layers.l4() + 16;
    (!tunnelled || parsed.stack(1).is_some() || disowned) && (!labelled || layers.has_labels()) && !cut_off
}
