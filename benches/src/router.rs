//! Routing with the gateway stage: packet source, router, packet sink.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::ValueEnum;
use wirepath::cli::Failure;
use wirepath_packet::Batch;
use wirepath_pipeline::table::Key;
use wirepath_pipeline::tunnel::tables::Destination;
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_pipeline::{Context, Stage};
use wirepath_pmd::drivers::r#virtual::null::{FrameSpec, Options};
use wirepath_pmd::port::PortId;
use wirepath_settings::Source;
use wirepath_wire::MacAddr;

use crate::measure::{self, Common, Figures, PacketLimit, Work};
use crate::real::{Offered, RealPorts};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of destination networks, each with a route and one flow; at most 65 000 with IPv6
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    destinations: u32,

    /// Route IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,

    /// Place of the next hop
    #[arg(long, value_enum, default_value_t = To::Port)]
    to: To,

    /// Length of the frame in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(64..=8192))]
    size: u16,

    /// Read the packets from a capture file in a loop; its packets are for the Ethernet address 02:00:00:00:00:01
    #[arg(long, value_name = "FILE", conflicts_with = "through")]
    read: Option<PathBuf>,

    #[command(flatten)]
    real: RealPorts,

    #[command(flatten)]
    pub(crate) common: Common,

    #[command(flatten)]
    limit: PacketLimit,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum To {
    /// At another local port
    Port,
    /// Behind a VXLAN tunnel
    Tunnel,
    /// Nowhere: the packets cross to the other port unchanged, for the cost of the ports
    Nothing,
}

const ROUTER: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const NEXT_HOP: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x42]);
const REMOTE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x99]);

/// Returns the network of a flow, as the null port makes them.
fn network(ipv6: bool, i: u32) -> String {
    if ipv6 {
        format!("2001:db8:2:{i:x}::/64")
    } else {
        format!("{}.{}.{}.0/24", 11 + (i >> 16), i >> 8 & 255, i & 255)
    }
}

fn configuration(arguments: &Arguments) -> String {
    let next_hop = next_hop(arguments);
    let mut text = format!(
        "[[port]]\nname = \"local\"\ndriver = \"null\"\nmtu = 9000\n\
         [[port]]\nname = \"other\"\ndriver = \"null\"\nmtu = 9000\n\
         [[port]]\nname = \"underlay\"\ndriver = \"null\"\nmtu = 9100\n\
         [underlay]\nport = \"underlay\"\naddresses = [\"10.9.0.1/24\"]\n\
         [[segment]]\nname = \"in\"\nvni = 10\nports = [{{ port = \"local\" }}]\nageing = 0\n\
         addresses = [\"192.168.1.254/24\", \"2001:db8:1::ffff/64\"]\nrouter_mac = \"{ROUTER}\"\n\
         [[segment]]\nname = \"out\"\nvni = 11\nports = [{{ port = \"other\" }}]\nremotes = [\"10.9.0.2\"]\n\
         ageing = 0\naddresses = [\"10.0.0.1/24\", \"fd00::1/64\"]\nrouter_mac = \"{ROUTER}\"\n\
         [[vrf]]\nname = \"default\"\nroutes = [\n"
    );
    for i in 0..arguments.destinations {
        let _ = writeln!(text, "{{ to = \"{}\", via = [\"{next_hop}\"] }},", network(arguments.ipv6, i));
    }
    text.push_str("]\n");
    if let Some(path) = &arguments.read {
        let read = format!("driver = \"pcap\"\npcap = {{ read = {path:?}, loop = 0 }}\n");
        text = text.replacen("driver = \"null\"\n", &read, 1);
    }
    text
}

fn next_hop(arguments: &Arguments) -> IpAddr {
    let text = if arguments.ipv6 { "fd00::2" } else { "10.0.0.2" };
    text.parse().expect("an address")
}

pub(crate) fn run(arguments: &Arguments) -> Result<Option<Figures>, Failure> {
    if arguments.ipv6 && arguments.destinations > 65_000 {
        return Err(Failure::usage("--destinations: at most 65000 with --ipv6"));
    }
    let text = configuration(arguments);
    let source = Source::new("wirepath-bench", text.as_str());
    let document = source.parse().map_err(Failure::usage)?;
    let config = GatewayConfig::read(&document.settings(), &["local", "other", "underlay"]).map_err(Failure::usage)?;
    let mut ports = measure::ports(&text)?;
    let spec = FrameSpec {
        size: arguments.size.into(),
        flows: arguments.destinations,
        ipv6: arguments.ipv6,
        destination_mac: ROUTER,
        vary_destination_mac: false,
        vary_network: true,
        ..FrameSpec::default()
    };
    let frames = || spec.build().map_err(Failure::usage);
    let real = &arguments.real;
    let mut offered = Offered::default();
    let (out, name) = if arguments.to == To::Tunnel { (2, "underlay") } else { (1, "other") };
    if let Some([local, other]) = real.settings(["local", name], 1)? {
        (ports[0], ports[out]) = (local, other);
        if real.needs_frames() {
            offered[0] = Some(frames()?);
        }
    } else if arguments.read.is_none() {
        let source = Some(frames()?);
        ports[0].plan = Box::new(Options { source, mac: None, ring: arguments.common.ring(), count: None });
    }
    if arguments.to == To::Nothing {
        return measure::run(ports, &arguments.common, &arguments.limit, real, |_| {
            Ok(Work { stages: Box::new(|_| cross()), offered })
        });
    }
    let (to, next_hop) = (arguments.to, next_hop(arguments));
    measure::run(ports, &arguments.common, &arguments.limit, real, move |runtime| {
        let mut control = GatewayControl::new(&config, runtime.ports(), runtime.domain(), 1, 0);
        control.set_next_hop("10.9.0.2".parse().expect("an address"), REMOTE_MAC);
        control.set_neighbour(1, next_hop, NEXT_HOP);
        let place = if to == To::Tunnel { Destination::Remote(0) } else { Destination::Attachment(1) };
        control.fdb().learn(Key::new(1, NEXT_HOP), place.pack(), 0);
        Ok(Work { stages: Box::new(move |worker| control.stage(worker)), offered })
    })
}

/// Sends the packets of the first port to the second one.
fn cross() -> impl Stage {
    |context: &mut Context<'_>, batch: &mut Batch| context.send_batch(PortId::new(1), batch)
}
