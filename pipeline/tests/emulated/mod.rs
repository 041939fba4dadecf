//! Ports of emulated ConnectX devices, for tests of rules in them.

use std::time::{Duration, Instant};

use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_pmd::packet::{Batch, Packet, Pool};
use wirepath_pmd::port::{OpenPort, PortConfig, PortId, RxQueue, StartedPort};
use wirepath_pmd::settings::Source;
use wirepath_testlab::Need;
use wirepath_wire::{L4, Parser, Tunnel};

pub(crate) const RDMA: Need = Need::File("/etc/libibverbs.d/mlx5.driver");

/// How long something that must happen may take: it only ends a hopeless wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// A port of a device with its rules put in this way.
pub(crate) fn settings(device: &str, way: &str) -> PortSettings {
    let text = format!("[[port]]\nname = 'dut'\ndriver = 'mlx5'\ndevice = '{device}'\n[port.mlx5]\nrules = '{way}'\n");
    let source = Source::new("test.toml", text);
    let document = source.parse().unwrap_or_else(|error| panic!("{error}"));
    let port = document.settings().tables("port").expect("one port").remove(0);
    drivers::plan(port).unwrap_or_else(|error| panic!("{error}"))
}

/// The same, started.
pub(crate) fn start(id: PortId, pool: &Pool, device: &str, way: &str, queues: u16) -> StartedPort {
    let plan = settings(device, way).plan;
    let open = OpenPort::open(device, plan).unwrap_or_else(|error| panic!("{error}"));
    let config = PortConfig { mtu: 9000, rx_queues: queues, depth: 256, ..PortConfig::new(id, pool.clone()) };
    open.configure(config).and_then(|port| port.start()).unwrap_or_else(|error| panic!("{error}"))
}

/// What comes by these queues: at least as many, if they come at all.
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
        } else if all.len() >= least || start.elapsed() > PATIENCE {
            return all;
        }
    }
}

/// Whether headers are as they should be, those of a tunnel and those in it too: a device looks at them less closely than the language
/// does, to which a broken tunnel header, or a broken stack in a tunnel, is not there.
pub(crate) fn is_sound(frame: &[u8]) -> bool {
    let Ok(parsed) = Parser::default().parse(frame) else { return false };
    let Some(layers) = parsed.stack(0) else { return false };
    let port = || frame.get(layers.l4() + 2..layers.l4() + 4).map(|port| u16::from_be_bytes([port[0], port[1]]));
    let tunnelled = match layers.l4_kind() {
        L4::Gre => true,
        L4::Udp => matches!(port(), Some(4789 | 4790 | 6081 | 6635)),
        _ => parsed.tunnel_of(0) != Tunnel::None,
    };
    let labelled = matches!(layers.ethertype().0, 0x8847 | 0x8848);
    let cut_off = layers.protocol().0 == 47 && layers.l4_kind() != L4::Gre;
    // Of headers that say of themselves that they are no such tunnel's, a device is told; it reads no further than the IP packet goes.
    let flags = frame.get(layers.l4() + 8).copied().unwrap_or(0);
    let disowned = match port() {
        Some(4789) => flags & 8 == 0,
        Some(4790) => flags & 0x30 != 0,
        Some(6081) => flags & 0xc0 != 0,
        _ => false,
    };
    let disowned = disowned && layers.l4_kind() == L4::Udp && layers.end() >= layers.l4() + 16;
    (!tunnelled || parsed.stack(1).is_some() || disowned) && (!labelled || layers.has_labels()) && !cut_off
}
