//! Encapsulation and decapsulation with the gateway stage: packet source, VXLAN, packet sink.

use std::net::IpAddr;

use clap::ValueEnum;
use wirepath::cli::Failure;
use wirepath_pipeline::table::{FdbLimits, Key};
use wirepath_pipeline::tunnel::tables::Destination;
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_pmd::drivers::r#virtual::null::{FrameSpec, Options, TunnelSpec};
use wirepath_settings::Source;
use wirepath_wire::MacAddr;

use crate::measure::{self, Common, Figures, PacketLimit};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Tunnel to measure
    #[arg(long, value_enum, default_value_t = Kind::Vxlan)]
    kind: Kind,

    /// Direction of the packets
    #[arg(long, value_enum, default_value_t = Direction::Encap)]
    direction: Direction,

    /// Number of flows, each to a host of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4_000_000))]
    flows: u32,

    /// Length of the inner frame in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(64..=8192))]
    size: u16,

    /// Use an IPv6 underlay
    #[arg(long)]
    ipv6: bool,

    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    limit: PacketLimit,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// VXLAN (RFC 7348)
    Vxlan,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Direction {
    /// From a local port into the tunnel
    Encap,
    /// From the tunnel to a local port
    Decap,
    /// Both directions, with every host address learned, as in a running gateway
    Both,
}

/// Host addresses on the local side and behind the remote.
const LOCAL: MacAddr = MacAddr([2, 0x11, 0x22, 0, 0, 0]);
const DISTANT: MacAddr = MacAddr([2, 0x66, 0x77, 0, 0, 0]);
/// The remote's address on the underlay.
const REMOTE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x99]);
/// The gateway's address on the underlay.
const OUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

fn host_address(base: MacAddr, i: u32) -> MacAddr {
    MacAddr::from_u64(base.to_u64() | u64::from(i))
}

pub(crate) fn run(arguments: &Arguments) -> Result<Figures, Failure> {
    let Kind::Vxlan = arguments.kind;
    let (ours, theirs) = if arguments.ipv6 { ("fd00:9::1", "fd00:9::2") } else { ("10.9.0.1", "10.9.0.2") };
    let net = if arguments.ipv6 { 64 } else { 24 };
    let text = format!(
        "[[port]]\nname = \"local\"\ndriver = \"null\"\nmtu = 9000\n\
         [[port]]\nname = \"underlay\"\ndriver = \"null\"\nmtu = 9100\n\
         [underlay]\nport = \"underlay\"\naddresses = [\"{ours}/{net}\"]\n\
         [[segment]]\nname = \"s\"\nvni = 10\nremotes = [\"{theirs}\"]\nports = [{{ port = \"local\" }}]\nageing = 0\n"
    );
    let source = Source::new("wirepath-bench", text.as_str());
    let document = source.parse().map_err(Failure::usage)?;
    let config = GatewayConfig::read(&document.settings(), &["local", "underlay"]).map_err(Failure::usage)?;
    let mut ports = measure::ports(&text)?;

    let (flows, direction) = (arguments.flows, arguments.direction);
    let [theirs, ours]: [IpAddr; 2] = [theirs, ours].map(|a| a.parse().expect("an address"));
    // Both directions: frames from all hosts to all hosts. One direction: from one host to all.
    let frames = |source_mac, destination_mac, tunnel| FrameSpec {
        size: arguments.size.into(),
        flows,
        source_mac,
        vary_source_mac: direction == Direction::Both,
        destination_mac,
        vary_destination_mac: true,
        tunnel,
        ..FrameSpec::default()
    };
    let plan = |wanted: bool, spec: FrameSpec, mac| -> Result<Box<Options>, Failure> {
        let source = if wanted { Some(spec.build().map_err(Failure::usage)?) } else { None };
        Ok(Box::new(Options { source, mac, ring: arguments.common.ring(), count: None }))
    };
    let tunnel =
        TunnelSpec { vni: 10, source_mac: REMOTE_MAC, destination_mac: OUR_MAC, source: theirs, destination: ours };
    ports[0].plan = plan(direction != Direction::Decap, frames(LOCAL, DISTANT, None), None)?;
    ports[1].plan = plan(direction != Direction::Encap, frames(DISTANT, LOCAL, Some(tunnel)), Some(OUR_MAC))?;
    measure::run(ports, &arguments.common, &arguments.limit, move |runtime| {
        let mut control = GatewayControl::new(&config, runtime.ports(), runtime.domain(), 1, 0);
        control.fdb().set_limits(FdbLimits { entries: 1 << 24, per_segment: 1 << 24, ..FdbLimits::default() });
        control.set_next_hop(theirs, REMOTE_MAC);
        for i in 0..flows {
            control.fdb().learn(Key::new(0, host_address(DISTANT, i)), Destination::Remote(0).pack(), 0);
            control.fdb().learn(Key::new(0, host_address(LOCAL, i)), Destination::Attachment(0).pack(), 0);
        }
        Ok(Box::new(move |worker| control.stage(worker)))
    })
}
