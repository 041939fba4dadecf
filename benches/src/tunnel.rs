//! Encapsulation and decapsulation with the gateway stage: packet source, tunnel, packet sink.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;
use wirepath::cli::Failure;
use wirepath_pipeline::table::{FdbLimits, Key};
use wirepath_pipeline::tunnel::tables::Destination;
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl, outer_headers};
use wirepath_pmd::drivers::r#virtual::null::{FrameSpec, Options};
use wirepath_settings::Source;
use wirepath_wire::MacAddr;

use crate::measure::{self, Common, Figures, PacketLimit, Work};
use crate::real::{Offered, RealPorts};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Tunnel to measure
    #[arg(long, value_enum, default_value_t = Kind::Vxlan)]
    kind: Kind,

    /// Direction of the packets
    #[arg(long, value_enum, default_value_t = Direction::Encap)]
    direction: Direction,

    /// Number of flows, each to a host of its own; flows of tunnels with IP packets have a network of their own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4_000_000))]
    flows: u32,

    /// Number of segments, which the flows have in turn; several have a VLAN each on the local port
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4000))]
    segments: u32,

    /// Number of remotes, which the flows have in turn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    remotes: u32,

    /// Length of the inner frame in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(64..=8192))]
    size: u16,

    /// Use an IPv6 underlay
    #[arg(long)]
    ipv6: bool,

    #[command(flatten)]
    real: RealPorts,

    #[command(flatten)]
    pub(crate) common: Common,

    #[command(flatten)]
    limit: PacketLimit,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Kind {
    /// VXLAN (RFC 7348)
    Vxlan,
    /// VXLAN behind a router, which rewrites the frames (RFC 9135)
    VxlanRouted,
    /// VXLAN-GPE with Ethernet frames
    VxlanGpe,
    /// VXLAN-GPE with IP packets
    VxlanGpeIp,
    /// GENEVE with Ethernet frames (RFC 8926)
    Geneve,
    /// GENEVE with IP packets
    GeneveIp,
    /// GRE with Ethernet frames (RFC 2784)
    Gretap,
    /// NVGRE (RFC 7637)
    Nvgre,
    /// GRE with IP packets
    Gre,
    /// IP in IP (RFC 2003, RFC 2473)
    Ipip,
    /// MPLS over UDP with Ethernet frames and control word (RFC 7510)
    MplsUdp,
    /// MPLS over UDP with IP packets
    MplsUdpIp,
    /// MPLS over GRE with Ethernet frames and control word (RFC 4023)
    MplsGre,
    /// MPLS over GRE with IP packets
    MplsGreIp,
}

impl Kind {
    /// Returns whether the tunnel carries IP packets, so that the gateway routes.
    fn is_routed(self) -> bool {
        self.has_payload_key() || matches!(self, Self::VxlanRouted | Self::Gre | Self::Ipip)
    }

    /// Returns whether IP packets are not the only payload of the kind.
    fn has_payload_key(self) -> bool {
        matches!(self, Self::VxlanGpeIp | Self::GeneveIp | Self::MplsUdpIp | Self::MplsGreIp)
    }

    /// Returns whether tunnel headers name a segment.
    fn has_id(self) -> bool {
        !matches!(self, Self::Gretap | Self::Gre | Self::Ipip)
    }

    /// Returns the keys of a segment with this identifier.
    fn keys(self, id: u32) -> String {
        let name = match self {
            Self::Vxlan | Self::VxlanRouted => "vxlan",
            Self::VxlanGpe | Self::VxlanGpeIp => "vxlan-gpe",
            Self::Geneve | Self::GeneveIp => "geneve",
            Self::Gretap => "gretap",
            Self::Nvgre => "nvgre",
            Self::Gre => "gre",
            Self::Ipip => "ipip",
            Self::MplsUdp | Self::MplsUdpIp => "mpls-udp",
            Self::MplsGre | Self::MplsGreIp => "mpls-gre",
        };
        let payload = if self.has_payload_key() { "payload = \"ip\"\n" } else { "" };
        let vni = if self.has_id() { format!("vni = {id}\n") } else { String::new() };
        format!("kind = \"{name}\"\n{vni}{payload}")
    }
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

/// Host addresses on the local side and behind the remotes.
const LOCAL: MacAddr = MacAddr([2, 0x11, 0x22, 0, 0, 0]);
const DISTANT: MacAddr = MacAddr([2, 0x66, 0x77, 0, 0, 0]);
/// Address of the next hop to all remotes.
const REMOTE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x99]);
/// The gateway's address on the underlay.
const OUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
/// The gateway's address in the segment of local hosts, for tunnels that carry IP packets.
const ROUTER: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// The gateway's address as a router behind VXLAN.
const TUNNEL_ROUTER: MacAddr = MacAddr([2, 0, 0, 0, 0, 3]);
/// First segment identifier.
const FIRST_ID: u32 = 16;

fn host_address(base: MacAddr, i: u32) -> MacAddr {
    MacAddr::from_u64(base.to_u64() | u64::from(i))
}

/// Addresses of the underlay: the gateway with the length of its network, the next hop, and the first remote.
struct Underlay {
    ours: IpAddr,
    len: u8,
    next_hop: IpAddr,
    first: IpAddr,
}

impl Underlay {
    fn new(ipv6: bool) -> Self {
        let (ours, len, next_hop, first) = if ipv6 {
            ("fd00:9::1", 64, "fd00:9::fe", "fd00:a::1")
        } else {
            ("10.9.0.1", 24, "10.9.0.254", "10.10.0.1")
        };
        let address = |text: &str| text.parse().expect("an address");
        Self { ours: address(ours), len, next_hop: address(next_hop), first: address(first) }
    }

    fn remote(&self, i: u32) -> IpAddr {
        match self.first {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + i).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + u128::from(i)).into(),
        }
    }
}

/// Returns the number of pairs of segment and remote, which the flows have in turn.
fn pairs(segments: u32, remotes: u32) -> u32 {
    let (mut a, mut b) = (segments, remotes);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    segments / a * remotes
}

/// Returns the configuration, and for each pair of segment and remote the position of the remote among those of all
/// segments.
fn configuration(arguments: &Arguments, underlay: &Underlay) -> (String, Vec<u32>) {
    let (segments, remotes) = (arguments.segments, arguments.remotes);
    let mut text = format!(
        "[[port]]\nname = \"local\"\ndriver = \"null\"\nmtu = 9000\n\
         [[port]]\nname = \"underlay\"\ndriver = \"null\"\nmtu = 9200\n\
         [underlay]\nport = \"underlay\"\naddresses = [\"{}/{}\"]\ngateways = [\"{}\"]\n",
        underlay.ours, underlay.len, underlay.next_hop
    );
    let pairs = pairs(segments, remotes);
    let mut positions = vec![0; pairs as usize];
    let mut position = 0;
    for segment in 0..segments {
        let mut list = String::new();
        for pair in (segment..pairs).step_by(segments as usize) {
            let _ = write!(list, "\"{}\", ", underlay.remote(pair % remotes));
            positions[pair as usize] = position;
            position += 1;
        }
        let keys = arguments.kind.keys(FIRST_ID + segment);
        let _ = write!(text, "[[segment]]\nname = \"s{segment}\"\n{keys}remotes = [{list}]\n");
        let vlan = if segments > 1 { format!(", vlan = {}", segment + 1) } else { String::new() };
        if arguments.kind.is_routed() {
            let (router_mac, next_hop) = if arguments.kind == Kind::VxlanRouted {
                let (remote, mac) = (underlay.remote(0), DISTANT);
                let next_hop = format!("segment = \"s0\", remote = \"{remote}\", mac = \"{mac}\"");
                (format!("vrf = \"default\"\nrouter_mac = \"{TUNNEL_ROUTER}\"\n"), next_hop)
            } else {
                ("addresses = [\"10.255.0.1/24\"]\n".into(), "segment = \"s0\"".into())
            };
            let _ = write!(
                text,
                "{router_mac}[[segment]]\nname = \"local\"\nageing = 0\n\
                 router_mac = \"{ROUTER}\"\naddresses = [\"192.168.1.254/24\"]\n\
                 ports = [{{ port = \"local\"{vlan} }}]\n[[vrf]]\nname = \"default\"\n\
                 routes = [{{ to = \"0.0.0.0/0\", {} }}]\n",
                match arguments.direction {
                    Direction::Decap => "via = [\"192.168.1.2\"]".into(),
                    _ => format!("next_hops = [{{ {next_hop} }}]"),
                }
            );
        } else {
            let _ = write!(text, "ports = [{{ port = \"local\"{vlan} }}]\nageing = 0\n");
        }
    }
    (text, positions)
}

pub(crate) fn run(arguments: &Arguments) -> Result<Option<Figures>, Failure> {
    let (kind, direction, flows) = (arguments.kind, arguments.direction, arguments.flows);
    let (segments, remotes) = (arguments.segments, arguments.remotes);
    if kind.is_routed() && direction == Direction::Both {
        return Err(Failure::usage("--direction both: tunnels with IP packets have no hosts to learn"));
    }
    if segments > 1 && (kind.is_routed() || !kind.has_id()) {
        return Err(Failure::usage("--segments: the tunnel has no segment identifier, or carries IP packets"));
    }
    if remotes > 1 && kind.is_routed() {
        return Err(Failure::usage("--remotes: tunnels with IP packets have one remote"));
    }
    let underlay = Underlay::new(arguments.ipv6);
    let (text, positions) = configuration(arguments, &underlay);
    let source = Source::new("wirepath-bench", text.as_str());
    let document = source.parse().map_err(Failure::usage)?;
    let config = GatewayConfig::read(&document.settings(), &["local", "underlay"]).map_err(Failure::usage)?;
    let mut ports = measure::ports(&text)?;

    let real = &arguments.real;
    if let Some(real) = real.settings(["local", "underlay"], 1)? {
        ports = real.into();
    } else {
        let plan = |source, mac| Box::new(Options { source, mac, ring: arguments.common.ring(), count: None });
        let [local, distant] = frames(arguments, &config, &underlay, positions.len() as u32, OUR_MAC)?;
        (ports[0].plan, ports[1].plan) = (plan(local, None), plan(distant, Some(OUR_MAC)));
    }
    measure::run(ports, &arguments.common, &arguments.limit, real, move |runtime| {
        let mut offered = Offered::default();
        if real.needs_frames() {
            let ours = runtime.port("underlay").and_then(|port| port.mac).unwrap_or(OUR_MAC);
            offered = frames(arguments, &config, &underlay, positions.len() as u32, ours)?;
        }
        let mut control = GatewayControl::new(&config, runtime.ports(), runtime.domain(), 1, 0);
        control.fdb().set_limits(FdbLimits { entries: 1 << 24, per_segment: 1 << 24, ..FdbLimits::default() });
        control.set_next_hop(underlay.next_hop, REMOTE_MAC);
        if kind.is_routed() {
            let host = host_address(LOCAL, 0);
            control.set_neighbour(1, IpAddr::from([192, 168, 1, 2]), host);
            control.fdb().learn(Key::new(1, host), Destination::Attachment(0).pack(), 0);
        } else {
            for i in 0..flows {
                let segment = i % segments;
                let remote = positions[i as usize % positions.len()];
                let fdb = control.fdb();
                fdb.learn(Key::new(segment as u16, host_address(DISTANT, i)), Destination::Remote(remote).pack(), 0);
                fdb.learn(Key::new(segment as u16, host_address(LOCAL, i)), Destination::Attachment(segment).pack(), 0);
            }
        }
        Ok(Work { stages: Box::new(move |worker| control.stage(worker)), offered })
    })
}

/// Returns the frames from local hosts and those from remotes, as far as the direction has them. `ours` is the address
/// of the underlay port.
fn frames(
    arguments: &Arguments,
    config: &GatewayConfig,
    underlay: &Underlay,
    pairs: u32,
    ours: MacAddr,
) -> Result<Offered, Failure> {
    let Arguments { kind, direction, flows, segments, remotes, .. } = *arguments;
    // The headers of the packets from remotes. Routed kinds have one tunnel, that of the first segment.
    let tunnels = (0..pairs).map(|pair| {
        let ends = (underlay.remote(pair % remotes), underlay.ours);
        outer_headers(&config.underlay, &config.segments[(pair % segments) as usize], (REMOTE_MAC, ours), ends)
    });
    let tunnels = tunnels.collect::<Result<Vec<_>, _>>().map_err(Failure::failed)?;
    // Both directions, and several remotes or segments: frames from all hosts to all hosts, each of which has one
    // place. One direction: from one host to all.
    let is_varied = direction == Direction::Both || tunnels.len() > 1;
    let spec = |source_mac, destination_mac, tunnels| FrameSpec {
        size: arguments.size.into(),
        flows,
        source_mac,
        vary_source_mac: is_varied,
        destination_mac,
        vary_destination_mac: !kind.is_routed(),
        vary_network: kind.is_routed(),
        tunnels,
        ..FrameSpec::default()
    };
    let build = |wanted: bool, spec: FrameSpec| wanted.then(|| spec.build().map_err(Failure::usage)).transpose();
    let mut local = spec(LOCAL, if kind.is_routed() { ROUTER } else { DISTANT }, Vec::new());
    if segments > 1 {
        (local.vlan, local.vlans) = (Some(1), segments as u16);
    }
    let inner = if kind == Kind::VxlanRouted { TUNNEL_ROUTER } else { LOCAL };
    Ok([
        build(direction != Direction::Decap, local)?,
        build(direction != Direction::Encap, spec(DISTANT, inner, tunnels))?,
    ])
}
