//! The tables `[underlay]` and `[[segment]]` of a gateway's configuration, which [`UNDERLAY`] and [`SEGMENT`] describe.
//!
//! All checks that need no open port are done here, including those of cross references.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use wirepath_flow::Rule;
use wirepath_pmd::port::Bifurcation;
use wirepath_settings::{
    Choice, ConfigError, ConfigTable, DeValue, Flag, FromValue, Integer, Key, List, Parsed, Required, Settings, Span,
    Text, Value, WithDefault, Written,
};
use wirepath_wire::build::OuterChecksum;
use wirepath_wire::vlan::MAX_ID;
use wirepath_wire::{IpProtocol, MacAddr, Tunnels, Vni};

use super::bfd::config::{BACKUPS, BFD, BackupConfig, BfdConfig, check_backups, read_backups};
use super::filter::{SEGMENT_FILTER, read_filter};
use super::headers::{ETHERNET_LEN, VLAN_TAG_LEN};
use super::kinds::mpls::Service;
use super::kinds::{self, Carrier, HeaderTemplate, KINDS, Payload, Sids, TunnelKind};
use super::learning::{self, AttachmentRules, LearnRules};
use super::mirror::MIRROR;
use super::move_damping;
use super::mss::CLAMP_MSS;
use super::outer::TunnelId;
use super::outer_fragments::{MAX_INNER_MTU, OUTER_FRAGMENTATION};
use super::reassembly::REASSEMBLY;
use super::router::config::{ROUTER_MAC, RouterConfig, RoutingConfig, SEGMENT_ADDRESSES, SEGMENT_VRF, check_networks};
use super::storm_control::{self, StormLimits};
use super::suppression::{self, SuppressionConfig};
use super::underlay::{Prefix, is_host_address};

/// Maximum number of segments of a gateway.
pub const MAX_SEGMENTS: usize = 4096;
/// Ethernet address that stands for the other end of a layer-3 tunnel while the router processes its packets. It is in
/// no packet on the wire.
pub const TUNNEL_PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
/// Maximum number of configured remotes over all segments.
pub const MAX_REMOTES: usize = 131_072;

pub(super) type Result<T> = std::result::Result<T, ConfigError>;

const IP_ADDRESS: &str = "an IP address";
const PREFIX: &str = "an address with its prefix length, such as \"10.9.0.1/24\"";

const UNDERLAY_PORT: Key<Required<Text>> =
    Key::text("port", "name of a port").required().about("Port that carries the tunnel packets.");
const ADDRESSES: Key<List<Parsed<Prefix>>> =
    Key::parsed("addresses", PREFIX).list().absent("an error: at least one address is needed").about(
        "Addresses of the gateway in the underlay (VTEP addresses), at most 64. The kernel must not have them; with \
         control = \"kernel\" it must.",
    );
const GATEWAYS: Key<List<Parsed<IpAddr>>> = Key::parsed("gateways", IP_ADDRESS)
    .list()
    .absent("remotes must be in the networks of `addresses`")
    .about("Next hops for remotes in other networks, at most one for each IP version.");
const UNDERLAY_CONTROL: Key<WithDefault<Choice<UnderlayControl>>> = Key::choice(
    "control",
    &[
        ("static", UnderlayControl::Static, "the gateway, with ARP and ND of its own and the next hops in `gateways`"),
        (
            "kernel",
            UnderlayControl::Kernel,
            "the kernel, with its routes and neighbours; the port takes only tunnel packets to `addresses`, and the \
             kernel keeps all others, such as BGP, BFD and ssh; for driver = \"af_packet\", \"af_xdp\", \
             \"mlx5\" and \"verbs\"",
        ),
    ],
)
.default_word("static")
.about("Owner of the addresses, and source of the next hops to remotes.");
const UNDERLAY_VLAN: Key<Integer<u16>> =
    Key::integer("vlan", 1..=MAX_ID as i64).absent("frames without a tag").about("VLAN ID of the underlay.");
const KIND: Key<Choice<&TunnelKind>> =
    Key::choice_of("kind", default_kinds).same_as("\"vxlan\"").about("Kind of the tunnels.");
const SEGMENT_KIND: Key<Choice<&TunnelKind>> =
    Key::choice_of("kind", all_kinds).absent("`kind` of the underlay").about("Kind of the segment's tunnels.");
const PAYLOAD: Key<Choice<Payload>> = Key::choice(
    "payload",
    &[
        ("ethernet", Payload::Ethernet, "Ethernet frames"),
        ("ip", Payload::Ip, "IPv4 and IPv6 packets: the segment is a routed tunnel to its only remote"),
    ],
)
.absent("\"ethernet\"; for kind = \"gre\" and \"ipip\", which carry nothing else, \"ip\"")
.needs(&[("ip", "kind = \"gre\"")])
.about("Payload of the segment's tunnels.");
const UDP_PORT: Key<Integer<u16>> = Key::integer("udp_port", 1..=65_535)
    .absent("the registered port of the kind, such as 4789 for VXLAN")
    .about("UDP destination port of tunnels of the underlay's kind, in both directions.");
const SOURCE_PORTS: Key<Text> = Key::text("source_ports", "two ports, such as \"49152-65535\"")
    .same_as("\"49152-65535\"")
    .about("Range of the outer UDP source ports. The flow inside the tunnel chooses one.");
const TTL: Key<WithDefault<Integer<u8>>> =
    Key::integer("ttl", 1..=255).default(64).about("Outer TTL (IPv4) or hop limit (IPv6).");
const DSCP: Key<Value<Dscp>> = Key::value("dscp")
    .same_as("0")
    .about("Outer DSCP; \"copy\" takes that of the inner packet. ECN is always copied (RFC 6040).");
const UDP_CHECKSUM: Key<WithDefault<Choice<OuterChecksum>>> = Key::choice(
    "udp_checksum",
    &[
        ("standard", OuterChecksum::Standard, "zero over IPv4, computed over IPv6"),
        ("always", OuterChecksum::Always, "computed over IPv4 and IPv6"),
        ("zero", OuterChecksum::Zero, "zero over IPv4 and IPv6 (RFC 6935)"),
    ],
)
.default_word("standard")
.about("Outer UDP checksum of sent tunnel packets.");

/// Description of the table `[underlay]`.
pub static UNDERLAY: ConfigTable = ConfigTable {
    name: "underlay",
    about: "The network that carries the tunnel packets.",
    absent: "an error",
    keys: &[
        &UNDERLAY_PORT,
        &ADDRESSES,
        &UNDERLAY_CONTROL,
        &GATEWAYS,
        &UNDERLAY_VLAN,
        &KIND,
        &UDP_PORT,
        &SOURCE_PORTS,
        &TTL,
        &DSCP,
        &UDP_CHECKSUM,
        &REASSEMBLY,
    ],
    example: "[underlay]\nport = \"wan\"\naddresses = [\"10.9.0.1/24\", \"fd00:9::1/64\"]\n\
              gateways = [\"10.9.0.254\"]\n",
    ..ConfigTable::EMPTY
};

const ATTACHED_PORT: Key<Required<Text>> =
    Key::text("port", "name of a port").required().about("Port with hosts of the segment.");
const ATTACHED_VLAN: Key<Integer<u16>> = Key::integer("vlan", 1..=MAX_ID as i64)
    .absent("frames without a tag")
    .about("VLAN ID of the segment on this port.");

static PORTS: ConfigTable = ConfigTable {
    name: "ports",
    written: Written::InlineList,
    about: "Local ports of the segment. A port and VLAN belong to one segment.",
    absent: "an error, unless the segment has a router",
    keys: &[&ATTACHED_PORT, &ATTACHED_VLAN, &learning::PORT_MAC_LIMIT, &learning::STICKY, &learning::ISOLATED],
    example: "ports = [{ port = \"lan\" }, { port = \"lan2\", vlan = 100 }]\n",
    ..ConfigTable::EMPTY
};

const STATIC_MAC: Key<Required<Parsed<MacAddr>>> =
    Key::parsed("mac", "an Ethernet address such as \"02:00:00:00:00:01\"")
        .required()
        .about("Unicast address of a host.");
const STATIC_REMOTE: Key<Parsed<IpAddr>> = Key::parsed("remote", IP_ADDRESS)
    .absent("the host is behind `port`")
    .about("Remote behind which the host is, one of `remotes`. It excludes `port`.");
const STATIC_PORT: Key<Text> = Key::text("port", "name of a port")
    .absent("the host is behind `remote`")
    .about("Local port behind which the host is, one of `ports`.");
const STATIC_VLAN: Key<Integer<u16>> = Key::integer("vlan", 1..=MAX_ID as i64)
    .when("port = \"lan2\"")
    .absent("frames without a tag")
    .about("VLAN ID of the host on that port, as in `ports`.");

static STATIC: ConfigTable = ConfigTable {
    name: "static",
    written: Written::InlineList,
    about: "Hosts at fixed places. Learning never overrides them.",
    absent: "none",
    keys: &[&STATIC_MAC, &STATIC_REMOTE, &STATIC_PORT, &STATIC_VLAN],
    alternatives: true,
    example: "static = [{ mac = \"02:00:00:00:00:01\", remote = \"10.9.0.2\" }]\n",
    ..ConfigTable::EMPTY
};

const SEGMENT_NAME: Key<Text> = Key::text("name", "any text without control characters")
    .absent("\"vni\" and the number, such as vni42; without number the kind")
    .about("Name of the segment in displays.");
const VNI: Key<Integer<u32>> =
    Key::integer("vni", 0..=Vni::MAX as i64).absent("an error; for GRE packets without a key").about(
        "Network identifier in tunnel headers: VNI, VSID of NVGRE, MPLS label from 16 to 1048575, or key of GRE, which \
         has up to 32 bits. Each segment of a kind has another one.",
    );
const LOCAL: Key<List<Parsed<IpAddr>>> = Key::parsed("local", IP_ADDRESS)
    .list()
    .absent("the first of the underlay's addresses, for each IP version")
    .about("Addresses of the gateway for the segment, at most one for each IP version.");
const REMOTES: Key<List<Parsed<IpAddr>>> = Key::parsed("remotes", IP_ADDRESS)
    .list()
    .absent("an error, unless control = \"kernel\", accept_unknown_remotes = true or the segment has a router")
    .about("VTEPs of the segment. Broadcast, multicast and unknown unicast frames go to each of them.");
const CONTROL: Key<WithDefault<Choice<SegmentControl>>> = Key::choice(
    "control",
    &[
        ("static", SegmentControl::Static, "this configuration, and learning from tunnel packets"),
        (
            "kernel",
            SegmentControl::Kernel,
            "the kernel's tables, which a routing daemon such as FRR writes by EVPN (RFC 7432, RFC 8365); only for \
             kind = \"vxlan\"",
        ),
    ],
)
.default_word("static")
.about("Source of the remotes, and of the addresses behind them.");
const LEARNING: Key<WithDefault<Flag>> =
    Key::flag("learning").default(true).about("Learns behind which port or remote a source address is.");
const AGEING: Key<WithDefault<Integer<u32>>> = Key::integer("ageing", 0..=1_000_000)
    .unit("seconds")
    .default(300)
    .about("Time after which a learned address that sends nothing is removed. 0: never.");
const SEGMENT_MTU: Key<Integer<u16>> = Key::integer("mtu", 68..=MAX_INNER_MTU as i64)
    .unit("bytes")
    .absent("what the headers of the tunnel leave of the underlay port's MTU; 9202 with outer_fragmentation")
    .about("Largest IP packet inside the tunnel. The sender of a larger one gets an ICMP error.");
const ACCEPT_UNKNOWN_REMOTES: Key<WithDefault<Flag>> = Key::flag("accept_unknown_remotes")
    .default(false)
    .about("Accepts frames from VTEPs that are not in `remotes`, and learns up to 1024 of them. Unused ones expire.");
const INNER_VLANS: Key<WithDefault<Choice<InnerVlans>>> = Key::choice(
    "inner_vlans",
    &[
        ("discard", InnerVlans::Discard, "drops and counts them"),
        ("carry", InnerVlans::Carry, "carries them in both directions"),
    ],
)
.default_word("discard")
.about("Treatment of frames with a VLAN tag inside the tunnel (RFC 7348 section 6.1).");

/// Description of a table `[[segment]]`.
pub static SEGMENT: ConfigTable = ConfigTable {
    name: "segment",
    written: Written::Repeated,
    about: "A layer-2 network of local ports and tunnels, or a layer-3 tunnel (`payload`), at most 4096 of them.",
    absent: "an error: at least one segment is needed",
    keys: &[
        &SEGMENT_NAME,
        &VNI,
        &SEGMENT_KIND,
        &PAYLOAD,
        &LOCAL,
        &CONTROL,
        &REMOTES,
        &LEARNING,
        &AGEING,
        &SEGMENT_MTU,
        &ACCEPT_UNKNOWN_REMOTES,
        &INNER_VLANS,
        &CLAMP_MSS,
        &SEGMENT_FILTER,
        &OUTER_FRAGMENTATION,
        &SEGMENT_VRF,
        &SEGMENT_ADDRESSES,
        &ROUTER_MAC,
        &storm_control::BROADCAST_LIMIT,
        &storm_control::MULTICAST_LIMIT,
        &storm_control::UNKNOWN_UNICAST_LIMIT,
        &learning::MAC_LIMIT,
        &learning::REMOTE_MAC_LIMIT,
        &move_damping::MOVE_LIMIT,
        &move_damping::MOVE_WINDOW,
        &move_damping::FREEZE_TIME,
        &suppression::SUPPRESSION,
        &MIRROR,
    ],
    tables: || {
        let of_kinds = KINDS.iter().filter_map(|kind| Some(kind.settings.as_ref()?.table));
        let mut tables = vec![&PORTS, &STATIC, &BACKUPS, &suppression::NEIGHBOURS];
        tables.extend(of_kinds);
        tables.dedup_by_key(|table| table.name);
        tables
    },
    example: "[[segment]]\nname = \"blue\"\nvni = 42\nremotes = [\"10.9.0.2\", \"10.9.0.3\"]\n\
              ports = [{ port = \"lan\" }]\n",
    ..ConfigTable::EMPTY
};

/// Settings of the underlay.
#[derive(Clone, Debug)]
pub struct UnderlayConfig {
    /// Index of the port in the list of ports.
    pub port: usize,
    /// Position of `port` in the configuration.
    pub port_span: Span,
    /// VTEP addresses.
    pub addresses: Vec<Prefix>,
    /// Position of `addresses` in the configuration.
    pub addresses_span: Span,
    /// Owner of the addresses, and source of the next hops.
    pub control: UnderlayControl,
    /// Position of `control` in the configuration, or where it would be.
    pub control_span: Span,
    /// Next hops.
    pub gateways: Vec<IpAddr>,
    /// VLAN ID of the underlay.
    pub vlan: Option<u16>,
    /// Kind of the tunnels of segments that name no other one.
    pub kind: &'static TunnelKind,
    /// UDP destination port of the tunnels of this kind; 0 without UDP.
    pub udp_port: u16,
    /// Range of the outer source ports, inclusive.
    pub source_ports: (u16, u16),
    /// Outer TTL or hop limit.
    pub ttl: u8,
    /// Outer DSCP; `None`: copied from the inner packet.
    pub dscp: Option<u8>,
    /// Handling of the outer UDP checksum.
    pub checksum: OuterChecksum,
    /// If true, fragments of tunnel packets are joined.
    pub reassembly: bool,
}

/// Owner of the addresses of the underlay, and source of the next hops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnderlayControl {
    /// The gateway.
    #[default]
    Static,
    /// The kernel.
    Kernel,
}

impl UnderlayConfig {
    /// Returns the UDP destination port of a kind of tunnels; `None` without UDP.
    pub fn port_of(&self, kind: &TunnelKind) -> Option<u16> {
        let own = (kind == self.kind).then_some(self.udp_port);
        kind.default_port().map(|port| own.unwrap_or(port))
    }

    /// Returns the UDP ports on which flow rules find tunnels.
    pub fn rule_tunnels(&self) -> Tunnels {
        // The default kind has its port alone.
        let own = self.port_of(self.kind);
        let port =
            |kind: &'static TunnelKind| self.port_of(kind).filter(|port| kind == self.kind || Some(*port) != own);
        let [vxlan, gpe, geneve, mpls] =
            [&kinds::vxlan::KIND, &kinds::vxlan_gpe::KIND, &kinds::geneve::KIND, &kinds::mpls::UDP].map(port);
        Tunnels::default().with_vxlan(vxlan).with_vxlan_gpe(gpe).with_geneve(geneve).with_mpls(mpls)
    }
}

/// Handling of VLAN tags inside the tunnel (RFC 7348 section 6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum InnerVlans {
    /// Drop frames with a tag.
    #[default]
    Discard,
    /// Carry tagged frames in both directions.
    Carry,
}

impl InnerVlans {
    /// Bytes that a VLAN tag may add to an inner frame.
    pub(super) fn tag_len(self) -> usize {
        if self == Self::Carry { VLAN_TAG_LEN } else { 0 }
    }
}

/// An attachment of a segment to a port.
#[derive(Clone, Debug)]
pub struct AttachmentConfig {
    /// Index of the port.
    pub port: usize,
    /// VLAN on that port; `None`: frames without a tag.
    pub vlan: Option<u16>,
    /// Rules for its hosts.
    pub rules: AttachmentRules,
    /// Position in the configuration.
    pub port_span: Span,
}

/// Destination of a static entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaticDestination {
    /// Index in [`SegmentConfig::remotes`].
    Remote(usize),
    /// Index in [`SegmentConfig::attachments`].
    Attachment(usize),
}

/// A remote VTEP of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Address of the remote.
    pub address: IpAddr,
    /// The gateway's address towards the remote.
    pub local: IpAddr,
    /// If true, the remote gets the frames that are flooded.
    pub flood: bool,
}

/// Source of the remotes of a segment and of the addresses behind them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SegmentControl {
    /// The configuration, and learning from received packets.
    #[default]
    Static,
    /// The tables of the kernel, which a routing daemon writes.
    Kernel,
}

/// Settings of a segment.
#[derive(Clone, Debug)]
pub struct SegmentConfig {
    /// Name in displays.
    pub name: String,
    /// Network identifier in tunnel headers, if they have one.
    pub vni: Option<u32>,
    /// Kind of the segment's tunnels.
    pub kind: &'static TunnelKind,
    /// Payload of the segment's tunnels.
    pub payload: Payload,
    /// Options of sent tunnel headers, in the form of the kind.
    pub options: Box<[u8]>,
    /// The gateway's addresses for the segment, at most one per IP version.
    pub locals: Vec<IpAddr>,
    /// Source of the remotes and of the addresses behind them.
    pub control: SegmentControl,
    /// Remotes; without those of the kernel when the configuration was only read.
    pub remotes: Vec<RemoteConfig>,
    /// Local attachments.
    pub attachments: Vec<AttachmentConfig>,
    /// If true, addresses are learned.
    pub learning: bool,
    /// Seconds after which an unseen address is removed; 0: never.
    pub ageing: u32,
    /// Largest inner IP packet in bytes; `None`: what remains of the underlay's MTU.
    pub mtu: Option<u16>,
    /// Position of `mtu` in the configuration, or where it would be.
    pub mtu_span: Span,
    /// If true, frames from VTEPs that are not in the list are accepted.
    pub accept_unknown_remotes: bool,
    /// Handling of VLAN tags inside the tunnel.
    pub inner_vlans: InnerVlans,
    /// If true, the MSS of TCP connections through the tunnels is lowered.
    pub clamp_mss: bool,
    /// Flow rules for the frames that enter the segment.
    pub filter: Vec<Rule>,
    /// If true, tunnel packets that are longer than the path takes are sent as fragments.
    pub outer_fragmentation: bool,
    /// Limits of flooded frames from local ports.
    pub storm_limits: StormLimits,
    /// Rules for learned addresses.
    pub learn_rules: LearnRules,
    /// Suppression of ARP and ND requests.
    pub suppression: SuppressionConfig,
    /// Index of the port that gets copies of all frames.
    pub mirror: Option<usize>,
    /// Static entries, which are never overridden.
    pub statics: Vec<(MacAddr, StaticDestination)>,
    /// Remotes that carry frames only while another one is down.
    pub backups: Vec<BackupConfig>,
    /// Router of the segment.
    pub router: Option<RouterConfig>,
}

impl SegmentConfig {
    /// Returns the segment's identifier in tunnel headers.
    pub fn tunnel_id(&self) -> TunnelId {
        TunnelId { kind: self.kind.number(), id: self.vni, sid: self.sids().map(|sids| sids.local) }
    }

    /// Returns whether remotes come and go while the program runs, or are configured.
    pub fn has_tunnels(&self) -> bool {
        !self.remotes.is_empty() || self.accept_unknown_remotes || self.control == SegmentControl::Kernel
    }

    /// Returns the SIDs of the segment, if its kind has SIDs.
    pub fn sids(&self) -> Option<Sids> {
        (self.kind.sids?)(&self.options)
    }

    /// Returns what follows the segment's label, if its kind has labels.
    pub(super) fn service(&self) -> Option<Service> {
        self.kind.service.map(|service| service(self.payload, &self.options))
    }

    /// Returns the destination address of packets to a remote: its address, or the first SID of the path to it.
    pub fn destination(&self, remote: IpAddr) -> IpAddr {
        self.sids().map_or(remote, |sids| sids.first.into())
    }

    /// Returns what the segment has in common with itself in another configuration: the identifier in tunnel headers or
    /// the SID with the payload, and without both the name.
    pub(super) fn identity(&self) -> (TunnelId, Payload, Option<&str>) {
        let id = self.tunnel_id();
        (id, self.payload, (id.id.is_none() && id.sid.is_none()).then_some(&self.name))
    }

    /// Returns whether the segment is a layer-3 tunnel.
    pub fn is_routed_tunnel(&self) -> bool {
        self.payload == Payload::Ip
    }

    /// Returns the tunnel header of the segment's packets.
    pub(super) fn header(&self) -> HeaderTemplate {
        (self.kind.write)(self.vni, self.payload, &self.options)
    }

    /// Bytes in front of an inner IP packet that belong to the payload: its Ethernet header with the tags that the
    /// segment carries.
    pub fn link_len(&self) -> usize {
        match self.payload {
            Payload::Ethernet => ETHERNET_LEN + self.inner_vlans.tag_len(),
            Payload::Ip => 0,
        }
    }

    /// Length of the longest frame that the segment's tunnels carry in fragments; 0 if they send none. Frames to the
    /// router of a layer-3 tunnel have an Ethernet header.
    pub(super) fn longest_fragmented(&self) -> usize {
        let mtu = usize::from(self.mtu.unwrap_or(MAX_INNER_MTU));
        if self.outer_fragmentation { mtu + self.link_len().max(ETHERNET_LEN) } else { 0 }
    }

    /// Returns a counter for the sequence numbers of a remote; `None` if the tunnel headers have none.
    pub(super) fn new_sequence(&self) -> Option<Arc<AtomicU32>> {
        self.header().variable.sequence.map(|_| Arc::default())
    }

    /// Bytes of the underlay's MTU that the outer headers towards `remote` use, without Ethernet.
    pub fn overhead(&self, remote: IpAddr) -> usize {
        self.kind.overhead(self.header().bytes.len(), remote)
    }
}

/// The gateway's part of a configuration.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// The underlay.
    pub underlay: UnderlayConfig,
    /// Segments.
    pub segments: Vec<SegmentConfig>,
    /// VRFs and routes.
    pub routing: RoutingConfig,
    /// BFD sessions with the remotes.
    pub bfd: Option<BfdConfig>,
}

struct Reader<'p> {
    ports: &'p [&'p str],
    /// `None` if the underlay has errors: what depends on it is not checked.
    underlay: Option<&'p UnderlayConfig>,
    vnis: HashMap<TunnelId, String>,
    /// Segment of each SID of the gateway.
    sids: HashMap<Ipv6Addr, String>,
    /// Kinds of tunnels of the segments so far.
    kinds: Vec<&'static TunnelKind>,
    /// Segment of each remote whose packets have no identifier.
    without_id: HashMap<(u8, IpAddr), String>,
    /// Segment without identifier that accepts unknown remotes, of each kind.
    accepting: HashMap<u8, String>,
    names: HashSet<String>,
    /// VRFs; `None` if they have errors.
    routing: Option<&'p RoutingConfig>,
    /// Segment of each port and VLAN.
    attached: HashMap<(usize, Option<u16>), String>,
    /// Ports that mirror segments, with the positions of the keys.
    mirrors: Vec<(usize, Span)>,
    remotes: usize,
}

impl GatewayConfig {
    /// Reads the gateway's tables. `ports` are the names of the ports in the same configuration.
    pub fn read(root: &Settings<'_>, ports: &[&str]) -> Result<Self> {
        // It is read last. An error before must not make it an unknown key.
        let _ = root.subtable(&BFD);
        let underlay = match root.subtable(&UNDERLAY) {
            Ok(Some(table)) => table.complete(|table| read_underlay(table, ports)),
            Ok(None) => Err(root.error_in(&UNDERLAY, "missing, expected a table [underlay] with port and addresses")),
            Err(error) => Err(error),
        };
        let underlay = root.collect(underlay);
        let tables = root.subtables(&SEGMENT)?;
        if tables.is_empty() {
            return Err(root.error_in(&SEGMENT, "missing, expected at least one table [[segment]]"));
        }
        if tables.len() > MAX_SEGMENTS {
            let message = format!("found {} segments, expected at most {MAX_SEGMENTS}", tables.len());
            return Err(root.error_in(&SEGMENT, message));
        }
        let routing = root.collect(RoutingConfig::read_vrfs(root, ports));
        let mut reader = Reader {
            ports,
            routing: routing.as_ref().ok(),
            underlay: underlay.as_ref().ok(),
            vnis: HashMap::new(),
            sids: HashMap::new(),
            kinds: Vec::new(),
            without_id: HashMap::new(),
            accepting: HashMap::new(),
            names: HashSet::new(),
            attached: HashMap::new(),
            mirrors: Vec::new(),
            remotes: 0,
        };
        let segments = root.read_tables(&SEGMENT, |table| reader.segment(table));
        for (port, span) in &reader.mirrors {
            let name = ports.get(*port).copied().unwrap_or_default();
            if reader.underlay.is_some_and(|underlay| underlay.port == *port) {
                root.record(span.error(format!("\"{name}\" is the underlay port, expected a port of its own")));
            } else if let Some((_, other)) = reader.attached.iter().find(|((attached, _), _)| attached == port) {
                let message = format!("port \"{name}\" belongs to segment \"{other}\", expected a port of its own");
                root.record(span.error(message));
            }
        }
        let (segments, mut routing) = (segments?, routing?);
        check_networks(root, &segments);
        routing.read_routes(root, &segments)?;
        let underlay = underlay?;
        let bfd = BfdConfig::read(root, &underlay, &segments)?;
        check_underlay_control(root, &underlay, &segments, bfd.as_ref());
        check_backups(root, bfd.as_ref(), &segments)?;
        Ok(Self { segments, underlay, routing, bfd })
    }

    /// Returns the packets that the underlay port takes if the kernel has the addresses; `None`: all.
    pub fn bifurcation(&self) -> Option<Bifurcation> {
        if self.underlay.control != UnderlayControl::Kernel {
            return None;
        }
        let (mut udp_ports, mut protocols) = (BTreeSet::new(), BTreeSet::new());
        for segment in self.segments.iter().filter(|segment| segment.has_tunnels()) {
            match segment.kind.carrier {
                Carrier::Udp(_) => udp_ports.extend(self.underlay.port_of(segment.kind)),
                Carrier::Ip(protocol) => _ = protocols.insert(protocol.0),
                Carrier::IpInIp => protocols.extend([IpProtocol::IPV4.0, IpProtocol::IPV6.0]),
                // Refused when the configuration was read.
                Carrier::Srv6 => {}
            }
        }
        Some(Bifurcation {
            addresses: self.underlay.addresses.iter().map(|prefix| prefix.address).collect(),
            later_fragments: self.underlay.reassembly && !udp_ports.is_empty(),
            udp_ports: udp_ports.into_iter().collect(),
            protocols: protocols.into_iter().collect(),
        })
    }

    /// Returns the SIDs of the gateway, in the order of the segments.
    pub fn local_sids(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.segments.iter().filter_map(SegmentConfig::sids).map(|sids| sids.local)
    }

    /// Returns the segment with this identifier in tunnel headers and this configured remote.
    pub fn segment(&self, id: TunnelId, remote: IpAddr) -> Option<&SegmentConfig> {
        let has_remote = |segment: &SegmentConfig| segment.remotes.iter().any(|it| it.address == remote);
        self.segments.iter().find(|segment| segment.tunnel_id() == id && has_remote(segment))
    }

    /// Returns the largest inner IP packet of a segment in bytes, for an underlay with the MTU `underlay`.
    ///
    /// It is the smallest over the remotes. Without a list of them, remotes of each IP version of the gateway count.
    pub fn inner_mtu(&self, segment: &SegmentConfig, underlay: u16) -> u16 {
        if segment.outer_fragmentation {
            return segment.mtu.unwrap_or(MAX_INNER_MTU);
        }
        let listed = segment.remotes.iter().map(|remote| remote.address);
        let own = segment.locals.iter().copied().filter(|_| segment.remotes.is_empty());
        let room = |remote| {
            let taken = segment.overhead(remote) + segment.link_len();
            usize::from(underlay).saturating_sub(taken) as u16
        };
        let left = listed.chain(own).map(room).min().unwrap_or_default();
        segment.mtu.map_or(left, |mtu| mtu.min(left))
    }

    /// Checks that the underlay's MTU has room for the MTU of each segment. `underlay` is that of its port.
    pub fn check_mtus(&self, underlay: u16) -> Result<()> {
        let underlay = usize::from(underlay);
        for segment in &self.segments {
            for remote in &segment.remotes {
                let taken = segment.overhead(remote.address) + segment.link_len();
                let left = underlay.saturating_sub(taken);
                // Longer packets are sent as fragments.
                let needed = segment.mtu.filter(|_| !segment.outer_fragmentation);
                let wanted = needed.map_or(68, usize::from);
                if wanted > left {
                    let message = format!(
                        "found {wanted}, but {underlay} bytes of the underlay port less {taken} of headers towards \
                         {} leave {left}; expected at most that, or a larger mtu of the underlay port",
                        remote.address
                    );
                    return Err(segment.mtu_span.error(message));
                }
            }
        }
        Ok(())
    }
}

/// Checks that all packets of the gateway to its addresses are tunnel packets if the kernel has the addresses.
fn check_underlay_control(
    root: &Settings<'_>,
    underlay: &UnderlayConfig,
    segments: &[SegmentConfig],
    bfd: Option<&BfdConfig>,
) {
    if underlay.control != UnderlayControl::Kernel {
        return;
    }
    if bfd.is_some_and(|bfd| !bfd.is_in_tunnels()) {
        let message = "found beside control = \"kernel\" of the underlay, which leaves BFD packets to the kernel; \
                       expected management_vni, or another daemon for BFD";
        root.record(root.error_in(&BFD, message));
    }
    if let Some(segment) = segments.iter().find(|segment| segment.kind.carrier == Carrier::Srv6) {
        let message = format!(
            "segment \"{}\" of kind \"{}\" has packets to SIDs, but with control = \"kernel\" the underlay port \
             takes packets to \"addresses\" only",
            segment.name, segment.kind.name
        );
        root.record(underlay.control_span.error(message));
    }
}

/// Returns the index of the port that a key names.
fn port_index(settings: &Settings<'_>, key: &'static str, name: &str, ports: &[&str]) -> Result<usize> {
    ports.iter().position(|port| *port == name).ok_or_else(|| {
        let near = wirepath_settings::nearest(name, ports);
        let hint = match near {
            Some(near) => format!("did you mean \"{near}\"?"),
            None if ports.is_empty() => "there is none; write a table [[port]]".to_owned(),
            None => format!("there are \"{}\"", ports.join("\", \"")),
        };
        settings.error_in(key, format!("found \"{name}\", expected the name of a port; {hint}"))
    })
}

fn read_underlay(table: &Settings<'_>, ports: &[&str]) -> Result<UnderlayConfig> {
    let port = table.read(&UNDERLAY_PORT).and_then(|name| port_index(table, "port", &name, ports));
    let port = table.collect(port);
    let listed = table.read(&ADDRESSES)?;
    if listed.len() > 64 {
        return Err(table.error_in(&ADDRESSES, format!("found {} addresses, expected at most 64", listed.len())));
    }
    let no_address = listed.is_empty();
    let mut addresses: Vec<Prefix> = Vec::new();
    for prefix in listed {
        if !is_host_address(prefix.value.address) {
            table.record(prefix.error(format!("found {}, expected a unicast host address", prefix.value)));
        } else if prefix.value.is_reserved(prefix.value.address) {
            let message =
                format!("found {}, the network itself or its broadcast address; expected {PREFIX}", prefix.value);
            table.record(prefix.error(message));
        } else if addresses.iter().any(|other| other.address == prefix.value.address) {
            table.record(prefix.error(format!("{} is listed twice", prefix.value.address)));
        }
        addresses.push(prefix.value);
    }
    let mut gateways: Vec<IpAddr> = Vec::new();
    for gateway in table.read(&GATEWAYS)? {
        let ip = gateway.value;
        if gateways.iter().any(|other| other.is_ipv4() == ip.is_ipv4()) {
            table.record(gateway.error("a second gateway of this IP version; expected at most one of each"));
            continue;
        }
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let on_link = link_local || addresses.iter().any(|prefix| prefix.contains(ip));
        let reserved = addresses.iter().any(|prefix| prefix.is_reserved(ip));
        if !is_host_address(ip) || reserved || !on_link || addresses.iter().any(|prefix| prefix.address == ip) {
            let message = format!("found {ip}, expected another host in one of the networks of \"addresses\"");
            table.record(gateway.error(message));
        }
        gateways.push(ip);
    }
    let range = |text: String| {
        let (low, high) = text.split_once('-')?;
        let range: (u16, u16) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
        (0 < range.0 && range.0 <= range.1).then_some(range)
    };
    let source_ports = match table.read(&SOURCE_PORTS)? {
        None => (0xc000, 0xffff),
        Some(text) => range(text.clone()).unwrap_or_else(|| {
            let message = format!("found \"{text}\", expected two ports such as \"49152-65535\"");
            table.record(table.error_in(&SOURCE_PORTS, message));
            (0xc000, 0xffff)
        }),
    };
    let dscp = table.read(&DSCP)?.unwrap_or(Dscp(Some(0))).0;
    let checksum = table.read(&UDP_CHECKSUM)?;
    let reassembly = table.read(&REASSEMBLY)?;
    let kind = table.read(&KIND)?.unwrap_or(KINDS[0]);
    let (port_span, addresses_span) = (table.span(&UNDERLAY_PORT), table.span(&ADDRESSES));
    let (control, control_span) = (table.read(&UNDERLAY_CONTROL)?, table.span(&UNDERLAY_CONTROL));
    let vlan = table.read(&UNDERLAY_VLAN)?;
    if control == UnderlayControl::Kernel {
        if !gateways.is_empty() {
            let message = "found beside control = \"kernel\", which takes the next hops from the kernel's routes";
            table.record(table.error_in(&GATEWAYS, message));
        }
        if vlan.is_some() {
            let message = "found beside control = \"kernel\"; expected a port on the VLAN device of the kernel instead";
            table.record(table.error_in(&UNDERLAY_VLAN, message));
        }
    }
    let udp_port = table.read(&UDP_PORT)?.or(kind.default_port()).unwrap_or(0);
    let ttl = table.read(&TTL)?;
    if no_address {
        let missing = || table.error_in(&ADDRESSES, format!("missing, expected at least {PREFIX}"));
        return Err(table.misspelt(&ADDRESSES).unwrap_or_else(missing));
    }
    Ok(UnderlayConfig {
        port: port?,
        port_span,
        addresses,
        addresses_span,
        control,
        control_span,
        gateways,
        vlan,
        kind,
        udp_port,
        source_ports,
        ttl,
        dscp,
        checksum,
        reassembly,
    })
}

/// Outer DSCP; `None`: copied from the inner packet.
struct Dscp(Option<u8>);

impl FromValue for Dscp {
    const EXPECTED: &'static str = "an integer from 0 to 63 or \"copy\"";

    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        match value.as_str() {
            Some("copy") => Some(Self(None)),
            _ => u8::try_from(i64::from_value(value)?).ok().filter(|dscp| *dscp <= 63).map(|dscp| Self(Some(dscp))),
        }
    }
}

impl Reader<'_> {
    fn segment(&mut self, table: &Settings<'_>) -> Result<SegmentConfig> {
        let kind = self.kind(table)?;
        let payload = payload(table, kind)?;
        let options = options(table, kind, payload)?;
        let name = table.read(&SEGMENT_NAME)?;
        let locals = self.locals(table)?;
        let control = table.read(&CONTROL)?;
        let remotes = self.remotes(table, &locals)?;
        let accept_unknown_remotes = table.read(&ACCEPT_UNKNOWN_REMOTES)?;
        if control == SegmentControl::Kernel {
            check_kernel_control(table, kind, accept_unknown_remotes);
        }
        let learning = table.read(&LEARNING)?;
        let ageing = table.read(&AGEING)?;
        let (mtu, mtu_span) = (table.read(&SEGMENT_MTU)?, table.span(&SEGMENT_MTU));
        let inner_vlans = table.read(&INNER_VLANS)?;
        let clamp_mss = table.read(&CLAMP_MSS)?;
        let filter = read_filter(table, &SEGMENT_FILTER, self.ports)?;
        let outer_fragmentation = table.read(&OUTER_FRAGMENTATION)?;
        if outer_fragmentation && kind.sids.is_some() {
            // Every fragment would need the segment routing header (RFC 8200 section 4.5).
            let message = format!("found in a segment of kind \"{}\", whose packets are not fragmented", kind.name);
            table.record(table.error_in(&OUTER_FRAGMENTATION, message));
        }
        let router = match self.routing {
            Some(routing) => routing.read_router(table)?,
            None => RoutingConfig::none().read_router(table).unwrap_or_default(),
        };
        let storm_limits = StormLimits::read(table)?;
        let learn_rules = LearnRules::read(table)?;
        let suppression = SuppressionConfig::read(table)?;
        let mirror = table.read(&MIRROR)?;
        let mirror = mirror.map(|name| port_index(table, MIRROR.name(), &name, self.ports)).transpose()?;
        self.mirrors.extend(mirror.map(|port| (port, table.span(&MIRROR))));
        let (vni_span, name_span) = (table.span(&VNI), table.span(&SEGMENT_NAME));
        table.has(&STATIC);
        table.has(&BACKUPS);
        // Without tunnels, the router alone connects the segment.
        let has_other_remotes = accept_unknown_remotes || control == SegmentControl::Kernel;
        let is_local = router.is_some() && remotes.is_empty() && !has_other_remotes;
        let vni = identifier(table, kind, is_local);
        let name = name.unwrap_or_else(|| match vni {
            Ok(Some(vni)) => format!("vni{vni}"),
            Ok(None) if !is_local => kind.name.to_owned(),
            Ok(None) | Err(_) => table.path().to_owned(),
        });
        let attachments = table.collect(self.attachments(table, &name, router.is_some()));
        if payload == Payload::Ip {
            check_routed_tunnel(table, router.is_some(), remotes.len());
        }
        let vni = vni?;
        let sids = kind.sids.and_then(|sids| sids(&options));
        if kind.carrier == Carrier::Srv6 && (sids.is_some() || !is_local) {
            self.check_sids(table, &name, sids, &locals, &remotes);
        }
        match vni {
            Some(vni) => {
                let id = TunnelId { kind: kind.number(), id: Some(vni), sid: None };
                if let Some(other) = self.vnis.insert(id, name.clone()) {
                    let message = format!("{vni} is the {} of segment \"{other}\" already", kind.id_name);
                    table.record(vni_span.error(message));
                }
            }
            None if sids.is_some() => {}
            None => self.without_identifier(table, kind, &name, &remotes, accept_unknown_remotes),
        }
        if name.chars().any(char::is_control) {
            table.record(name_span.error(format!("found {name:?}, expected a name without control characters")));
        }
        if !self.names.insert(name.clone()) {
            table.record(name_span.error(format!("another segment is called \"{name}\" already")));
        }
        if remotes.is_empty() && !has_other_remotes && router.is_none() {
            let message = "missing, expected at least one remote (or accept_unknown_remotes = true, or a router)";
            table.record(table.misspelt(&REMOTES).unwrap_or_else(|| table.error_in(&REMOTES, message)));
        }
        let attachments = attachments?;
        // Static entries refer to the rest of the segment.
        table.check_keys()?;
        let mut statics = statics(table, self.ports, &remotes, &attachments)?;
        if payload == Payload::Ip {
            statics.push((TUNNEL_PEER, StaticDestination::Remote(0)));
        }
        let backups = read_backups(table, &remotes)?;
        Ok(SegmentConfig {
            name,
            vni,
            kind,
            payload,
            options,
            locals,
            control,
            remotes,
            attachments,
            learning: learning && payload == Payload::Ethernet,
            ageing,
            mtu,
            mtu_span,
            accept_unknown_remotes,
            inner_vlans,
            clamp_mss,
            filter,
            outer_fragmentation,
            storm_limits,
            learn_rules,
            suppression,
            mirror,
            statics,
            backups,
            router,
        })
    }

    /// Returns the kind of a segment's tunnels.
    fn kind(&mut self, table: &Settings<'_>) -> Result<&'static TunnelKind> {
        let named = table.read(&SEGMENT_KIND)?;
        let Some(underlay) = self.underlay else { return Ok(named.unwrap_or(KINDS[0])) };
        let kind = named.unwrap_or(underlay.kind);
        let port = underlay.port_of(kind);
        if kind != underlay.kind && port.is_some() && port == underlay.port_of(underlay.kind) {
            let (name, other) = (kind.name, underlay.kind.name);
            let message = format!(
                "found {name:?}, but underlay.udp_port gives the port of {name} to {other}; expected another udp_port"
            );
            table.record(table.error_in(&SEGMENT_KIND, message));
        }
        let other = [underlay.kind].into_iter().chain(self.kinds.iter().copied()).find(|it| it.conflicts_with(kind));
        if let Some(other) = other {
            let (name, other) = (kind.name, other.name);
            let message = format!("found {name:?} beside {other:?}; received packets of both are alike, so choose one");
            table.record(table.error_in(&SEGMENT_KIND, message));
        }
        self.kinds.push(kind);
        Ok(kind)
    }

    /// Checks the SIDs of a segment and its remotes. The packets to all of its remotes take the same path, so a
    /// segment has one.
    fn check_sids(
        &mut self,
        table: &Settings<'_>,
        name: &str,
        sids: Option<Sids>,
        locals: &[IpAddr],
        remotes: &[RemoteConfig],
    ) {
        let Some(Sids { local, first, .. }) = sids else {
            let missing = || table.error_in("srv6", "missing, expected a table with \"local_sid\" and \"segs\"");
            return table.record(table.misspelt("srv6").unwrap_or_else(missing));
        };
        if let Some(other) = self.sids.insert(local, name.to_owned()) {
            let message = format!("local_sid {local} is that of segment \"{other}\" already");
            table.record(table.error_in("srv6", message));
        }
        if let Some(v4) = remotes.iter().find(|remote| remote.address.is_ipv4()) {
            let message = format!("found {}, expected an IPv6 address: SIDs are IPv6 addresses", v4.address);
            table.record(table.error_in(&REMOTES, message));
        }
        if remotes.len() > 1 {
            let message = format!("found {} remotes, expected one: \"segs\" is the path to one remote", remotes.len());
            table.record(table.error_in(&REMOTES, message));
        }
        let Some(underlay) = self.underlay else { return };
        if underlay.addresses.iter().any(|prefix| prefix.address == local) {
            let message = format!("local_sid {local} is an address of the underlay, expected another address");
            table.record(table.error_in("srv6", message));
        }
        if remotes.iter().any(|remote| remote.address == local) {
            table.record(
                table.error_in(&REMOTES, format!("{local} is the local SID, expected the address of a remote")),
            );
        }
        if let Err(message) = check_remote(underlay, locals, first.into(), "IPv6") {
            table.record(table.error_in("srv6", format!("segs: {message}")));
        }
    }

    /// Checks that packets of a segment without identifier can be told apart from those of others: by their source.
    fn without_identifier(
        &mut self,
        table: &Settings<'_>,
        kind: &TunnelKind,
        name: &str,
        remotes: &[RemoteConfig],
        accepts_unknown: bool,
    ) {
        let id_name = kind.id_name;
        for RemoteConfig { address, .. } in remotes {
            if let Some(other) = self.without_id.insert((kind.number(), *address), name.to_owned()) {
                let message = format!("{address} is a remote of segment \"{other}\", which has no {id_name} either");
                table.record(table.error_in(&REMOTES, message));
            }
        }
        if accepts_unknown && let Some(other) = self.accepting.insert(kind.number(), name.to_owned()) {
            let message =
                format!("segment \"{other}\", which has no {id_name} either, accepts unknown remotes already");
            table.record(table.error_in(&ACCEPT_UNKNOWN_REMOTES, message));
        }
    }

    /// Returns the gateway's addresses for a segment: the configured ones, or the first address of each IP
    /// version.
    fn locals(&self, table: &Settings<'_>) -> Result<Vec<IpAddr>> {
        let mut locals: Vec<IpAddr> = Vec::new();
        let named = table.read(&LOCAL)?;
        let Some(UnderlayConfig { addresses: ours, .. }) = self.underlay else { return Ok(locals) };
        let restricts = !named.is_empty();
        for local in named {
            if !ours.iter().any(|prefix| prefix.address == local.value) {
                let list: Vec<String> = ours.iter().map(|prefix| prefix.address.to_string()).collect();
                let message = format!("found {}, expected one of underlay.addresses: {}", local.value, list.join(", "));
                table.record(local.error(message));
            } else if locals.iter().any(|other| other.is_ipv4() == local.value.is_ipv4()) {
                table.record(local.error("a second local address of this IP version; expected at most one of each"));
            }
            locals.push(local.value);
        }
        if !restricts {
            for v4 in [true, false] {
                locals.extend(ours.iter().map(|p| p.address).find(|address| address.is_ipv4() == v4));
            }
        }
        Ok(locals)
    }

    fn remotes(&mut self, table: &Settings<'_>, locals: &[IpAddr]) -> Result<Vec<RemoteConfig>> {
        let mut remotes: Vec<RemoteConfig> = Vec::new();
        let mut seen = HashSet::new();
        for remote in table.read(&REMOTES)? {
            let ip = remote.value;
            let version = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
            if !seen.insert(ip) {
                table.record(remote.error(format!("{ip} is listed twice")));
                continue;
            }
            let local = self.underlay.map_or(Ok(ip), |underlay| check_remote(underlay, locals, ip, version));
            // The rest of the segment is checked with a wrong remote too.
            let local = local.unwrap_or_else(|message| {
                table.record(remote.error(message));
                ip
            });
            self.remotes += 1;
            if self.remotes > MAX_REMOTES {
                return Err(remote.error(format!("more than {MAX_REMOTES} remotes in all segments")));
            }
            remotes.push(RemoteConfig { address: ip, local, flood: true });
        }
        Ok(remotes)
    }

    fn attachments(&mut self, table: &Settings<'_>, segment: &str, has_router: bool) -> Result<Vec<AttachmentConfig>> {
        table.renamed("attach", "ports")?;
        let attachments = table.read_tables(&PORTS, |at| {
            let port = at.collect(at.read(&ATTACHED_PORT).and_then(|name| port_index(at, "port", &name, self.ports)));
            let vlan = at.read(&ATTACHED_VLAN)?;
            let port_span = at.span(&ATTACHED_PORT);
            let rules = AttachmentRules::read(at)?;
            let port = port?;
            // A misspelt VLAN would claim the untagged frames.
            at.check_keys()?;
            let name = self.ports.get(port).copied().unwrap_or_default();
            if self.underlay.is_some_and(|underlay| underlay.port == port) {
                let message = format!("\"{name}\" is the underlay port, expected a port for local hosts");
                return Err(at.error_in(&ATTACHED_PORT, message));
            }
            if let Some(other) = self.attached.insert((port, vlan), segment.to_owned()) {
                let what = vlan.map_or("without tag".to_owned(), |vlan| format!("with VLAN {vlan}"));
                let key = if vlan.is_some() { ATTACHED_VLAN.name() } else { ATTACHED_PORT.name() };
                let message = format!("frames {what} on port \"{name}\" belong to segment \"{other}\" already");
                return Err(at.error_in(key, message));
            }
            Ok(AttachmentConfig { port, vlan, rules, port_span })
        })?;
        if attachments.is_empty() && !has_router {
            let missing = "missing, expected at least one port, as in [{ port = \"lan\" }]";
            return Err(table.misspelt(&PORTS).unwrap_or_else(|| table.error_in(&PORTS, missing)));
        }
        Ok(attachments)
    }
}

/// Checks the keys beside `control = "kernel"`.
fn check_kernel_control(table: &Settings<'_>, kind: &TunnelKind, accepts_unknown: bool) {
    if kind != &kinds::vxlan::KIND {
        let message = format!("found \"kernel\" in a segment of kind {:?}, expected only for \"vxlan\"", kind.name);
        table.record(table.error_in(&CONTROL, message));
    }
    let from_kernel =
        "found beside control = \"kernel\", which takes the remotes from the kernel; expected one of the two";
    if table.has(&REMOTES) {
        table.record(table.error_in(&REMOTES, from_kernel));
    }
    if accepts_unknown {
        table.record(table.error_in(&ACCEPT_UNKNOWN_REMOTES, from_kernel));
    }
}

/// Returns the identifier in a segment's tunnel headers.
fn identifier(table: &Settings<'_>, kind: &TunnelKind, is_local: bool) -> Result<Option<u32>> {
    let ids = &kind.ids;
    if *ids == (0..=0) {
        if table.has(&VNI) {
            let message = format!("found in a segment of kind {:?}, whose packets have no identifier", kind.name);
            table.record(table.error_in(&VNI, message));
        }
        return Ok(None);
    }
    // The range of the kind, which may be wider than that of the key.
    let vni = table.integer(VNI.name(), i64::from(*ids.start())..=i64::from(*ids.end()))?;
    if vni.is_none() && kind.needs_id && !is_local && !table.has_error(&VNI) {
        let missing =
            || table.error_in(&VNI, format!("missing, expected an integer from {} to {}", ids.start(), ids.end()));
        return Err(table.misspelt(&VNI).unwrap_or_else(missing));
    }
    Ok(vni)
}

/// Returns the kinds of tunnels: word, value and description.
fn all_kinds() -> Vec<(&'static str, &'static TunnelKind, &'static str)> {
    KINDS.iter().map(|kind| (kind.name, *kind, kind.about)).collect()
}

/// Returns the kinds of tunnels that carry Ethernet frames and need no table in each segment: word, value and
/// description.
fn default_kinds() -> Vec<(&'static str, &'static TunnelKind, &'static str)> {
    let is_default = |kind: &TunnelKind| kind.carries(Payload::Ethernet) && kind.sids.is_none();
    all_kinds().into_iter().filter(|(_, kind, _)| is_default(kind)).collect()
}

/// Returns the payload of a segment's tunnels.
fn payload(table: &Settings<'_>, kind: &TunnelKind) -> Result<Payload> {
    let default = if kind.carries(Payload::Ethernet) { Payload::Ethernet } else { Payload::Ip };
    let payload = table.read(&PAYLOAD)?.unwrap_or(default);
    if !kind.carries(payload) {
        let (found, carried) = match payload {
            Payload::Ethernet => ("ethernet", "IP packets"),
            Payload::Ip => ("ip", "Ethernet frames"),
        };
        let hint = if *kind == super::kinds::gre::GRETAP { "; kind = \"gre\" carries IP packets" } else { "" };
        let message = format!("found \"{found}\", but tunnels of kind {:?} carry {carried}{hint}", kind.name);
        table.record(table.error_in(&PAYLOAD, message));
        return Ok(default);
    }
    Ok(payload)
}

/// Checks the keys of a layer-3 tunnel: it has a router and one remote, and nothing of a layer-2 network.
fn check_routed_tunnel(table: &Settings<'_>, has_router: bool, remotes: usize) {
    if !has_router {
        let message = "missing, but a tunnel with IP packets needs a router: write \"addresses\", \"vrf\" or both";
        table.record(table.error_in(&SEGMENT_ADDRESSES, message));
    }
    if remotes != 1 {
        let message = format!("found {remotes} remotes, expected one: a tunnel with IP packets has two ends");
        table.record(table.misspelt(&REMOTES).unwrap_or_else(|| table.error_in(&REMOTES, message)));
    }
    let of_networks = [
        PORTS.name,
        STATIC.name,
        suppression::NEIGHBOURS.name,
        LEARNING.name(),
        AGEING.name(),
        ACCEPT_UNKNOWN_REMOTES.name(),
        INNER_VLANS.name(),
        ROUTER_MAC.name(),
        storm_control::BROADCAST_LIMIT.name(),
        storm_control::MULTICAST_LIMIT.name(),
        storm_control::UNKNOWN_UNICAST_LIMIT.name(),
        learning::MAC_LIMIT.name(),
        learning::REMOTE_MAC_LIMIT.name(),
        move_damping::MOVE_LIMIT.name(),
        move_damping::MOVE_WINDOW.name(),
        move_damping::FREEZE_TIME.name(),
        suppression::SUPPRESSION.name(),
    ];
    for key in of_networks.into_iter().filter(|key| table.has(*key)) {
        table.record(table.error_in(key, "found in a tunnel with IP packets, which has no Ethernet addresses"));
    }
}

/// Returns the options of a segment's tunnel headers.
fn options(table: &Settings<'_>, kind: &TunnelKind, payload: Payload) -> Result<Box<[u8]>> {
    let mut options = Box::default();
    let own = kind.settings.as_ref().map(|settings| settings.table.name);
    let mut others: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for known in KINDS {
        let Some(settings) = &known.settings else { continue };
        if known == kind {
            options = (settings.read)(table, payload)?;
        } else if own != Some(settings.table.name) && table.has(settings.table) {
            others.entry(settings.table.name).or_default().push(format!("{:?}", known.name));
        }
    }
    for (key, kinds) in others {
        let message = format!("found in a segment of kind {:?}, expected only for {}", kind.name, kinds.join(" and "));
        table.record(table.error_in(key, message));
    }
    Ok(options)
}

/// Returns the gateway's address towards a remote, or the reason why there is none.
fn check_remote(
    underlay: &UnderlayConfig,
    locals: &[IpAddr],
    ip: IpAddr,
    version: &str,
) -> std::result::Result<IpAddr, String> {
    if !is_host_address(ip) || underlay.addresses.iter().any(|prefix| prefix.is_reserved(ip)) {
        return Err(format!("found {ip}, expected a unicast host address"));
    }
    if underlay.addresses.iter().any(|prefix| prefix.address == ip) {
        return Err(format!("{ip} is an address of this gateway, expected that of another"));
    }
    let Some(&local) = locals.iter().find(|local| local.is_ipv4() == ip.is_ipv4()) else {
        let message = format!("{ip} is {version}, but there is no {version} address to reach it from");
        return Err(format!("{message}; expected one in underlay.addresses (and in \"local\")"));
    };
    let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let on_link = link_local || underlay.addresses.iter().any(|prefix| prefix.contains(ip));
    let has_routes = underlay.control == UnderlayControl::Kernel;
    if !on_link && !has_routes && !underlay.gateways.iter().any(|gateway| gateway.is_ipv4() == ip.is_ipv4()) {
        let message = format!("{ip} is in no network of underlay.addresses");
        return Err(format!("{message}; expected an {version} address in underlay.gateways"));
    }
    Ok(local)
}

fn statics(
    table: &Settings<'_>,
    ports: &[&str],
    remotes: &[RemoteConfig],
    attachments: &[AttachmentConfig],
) -> Result<Vec<(MacAddr, StaticDestination)>> {
    let mut seen = HashSet::new();
    table.read_tables(&STATIC, |entry| {
        for key in [STATIC_REMOTE.name(), STATIC_PORT.name(), STATIC_VLAN.name()] {
            entry.has(key);
        }
        let mac = entry.read(&STATIC_MAC)?;
        if !mac.is_unicast() {
            return Err(entry.error_in(&STATIC_MAC, format!("found {mac}, expected a unicast host address")));
        }
        if !seen.insert(mac) {
            return Err(entry.error_in(&STATIC_MAC, format!("{mac} is listed twice")));
        }
        let destination = match entry.read(&STATIC_REMOTE)? {
            Some(_) if entry.has(&STATIC_PORT) => {
                return Err(entry.error_in(&STATIC_PORT, "found besides \"remote\", expected one of the two"));
            }
            Some(ip) => {
                let at = remotes.iter().position(|remote| remote.address == ip);
                let message =
                    || entry.error_in(&STATIC_REMOTE, format!("found {ip}, expected one of this segment's remotes"));
                StaticDestination::Remote(at.ok_or_else(message)?)
            }
            None if entry.has(&STATIC_REMOTE) => return Err(entry.error_in(&STATIC_REMOTE, "expected an IP address")),
            None if !entry.has(&STATIC_PORT) => {
                return Err(entry.error("neither \"remote\" nor \"port\", expected one of the two"));
            }
            None => {
                let name = entry.read(&STATIC_PORT)?;
                let name = name.ok_or_else(|| entry.error_in(&STATIC_PORT, "expected the name of a port"))?;
                let port = port_index(entry, "port", &name, ports)?;
                let vlan = entry.read(&STATIC_VLAN)?;
                let at = attachments.iter().position(|a| a.port == port && a.vlan == vlan);
                let message = || entry.error_in(&STATIC_PORT, "expected a port and VLAN of this segment's \"ports\"");
                StaticDestination::Attachment(at.ok_or_else(message)?)
            }
        };
        Ok((mac, destination))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_settings::Source;

    const UNDERLAY: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n";

    fn read(text: &str) -> Result<GatewayConfig> {
        let source = Source::new("c.toml", text);
        source.parse()?.read(|root| GatewayConfig::read(root, &["wan", "lan", "lan2"]))
    }

    fn refused(segments: &str) -> String {
        read(&format!("{UNDERLAY}{segments}")).unwrap_err().to_string()
    }

    #[test]
    fn every_key_is_read() {
        let text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\ngateways = \
        ['10.9.0.254']\nvlan = 7\n\
            udp_port = 8472\nsource_ports = '1024-2047'\nttl = 9\ndscp = 'copy'\nudp_checksum = 'always'\n\
            [[segment]]\nname = 'blue'\nvni = 42\nremotes = ['10.9.0.2', '192.0.2.1', 'fd00:9::2']\n\
            ports = [{ port = 'lan' }, { port = 'lan2', vlan = 100 }]\nlearning = false\nageing = 0\nmtu = 1400\n\
            inner_vlans = 'carry'\nstatic = [{ mac = '02:00:00:00:00:01', remote = '10.9.0.2' },\
            { mac = '02:00:00:00:00:02', port = 'lan2', vlan = 100 }]\n\
            [[segment]]\nvni = 43\naccept_unknown_remotes = true\nports = [{ port = 'lan2' }]\n";
        let config = read(text).unwrap();
        let u = &config.underlay;
        assert_eq!(
            (u.port, u.vlan, u.udp_port, u.source_ports, u.ttl, u.dscp),
            (0, Some(7), 8472, (1024, 2047), 9, None)
        );
        let [blue, other] = &config.segments[..] else { panic!() };
        assert_eq!((blue.vni, blue.learning, blue.ageing, blue.mtu), (Some(42), false, 0, Some(1400)));
        let locals: Vec<String> = blue.remotes.iter().map(|r| r.local.to_string()).collect();
        assert_eq!(locals, ["10.9.0.1", "10.9.0.1", "fd00:9::1"]);
        let destinations: Vec<StaticDestination> = blue.statics.iter().map(|(_, destination)| *destination).collect();
        assert_eq!(destinations, [StaticDestination::Remote(0), StaticDestination::Attachment(1)]);
        assert_eq!((other.name.as_str(), other.accept_unknown_remotes, other.ageing), ("vni43", true, 300));
    }

    #[test]
    fn an_underlay_of_the_kernel_takes_tunnel_packets_only() {
        let underlay = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/32']\ncontrol = 'kernel'\n";
        let segment =
            |kind: &str| format!("[[segment]]\nremotes = ['192.0.2.1']\nports = [{{ port = 'lan' }}]\n{kind}\n");
        let with = |keys: &str, segments: &str| read(&format!("{underlay}{keys}\n{segments}"));
        // Other networks need no gateway.
        let vxlan = with("", &segment("vni = 1")).unwrap().bifurcation();
        let addresses = vec!["10.9.0.1".parse().unwrap()];
        let expected = Bifurcation { addresses, udp_ports: vec![4789], protocols: vec![], later_fragments: true };
        assert_eq!(vxlan, Some(expected.clone()));
        let ports = [("vni = 1", "lan"), ("vni = 2\nkind = 'geneve'", "lan2")];
        let both = ports.map(|(keys, port)| segment(keys).replace("'lan'", &format!("'{port}'"))).concat();
        let taken = with("udp_port = 8472\nreassembly = false", &both).unwrap().bifurcation();
        assert_eq!(
            taken,
            Some(Bifurcation { udp_ports: vec![6081, 8472], later_fragments: false, ..expected.clone() })
        );
        let taken = with("", &segment("kind = 'gretap'\nvni = 1")).unwrap().bifurcation();
        assert_eq!(
            taken,
            Some(Bifurcation { udp_ports: vec![], protocols: vec![47], later_fragments: false, ..expected })
        );
        let own = underlay.replace("control = 'kernel'", "").replace("/32", "/8").replace("10.9.0.1", "192.0.2.9");
        assert_eq!(read(&format!("{own}{}", segment("vni = 1"))).unwrap().bifurcation(), None);
        let vxlan = segment("vni = 1");
        for (keys, segments, message) in [
            ("gateways = ['10.9.0.2']", vxlan.clone(), "takes the next hops from the kernel's routes"),
            ("vlan = 7", vxlan.clone(), "expected a port on the VLAN device"),
            ("", format!("{vxlan}[bfd]\n"), "leaves BFD packets to the kernel"),
        ] {
            let underlay = underlay.replace("/32", "/24");
            let error = read(&format!("{underlay}{keys}\n{segments}")).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        assert!(with("", &format!("{vxlan}[bfd]\nmanagement_vni = 9\n")).is_ok());
    }

    #[test]
    fn contradictions_are_reported_at_their_position() {
        let cases = [
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lam' }]",
                "c.toml:7:19: segment[0].ports[0].port: found \"lam\", expected the name of a port; did you mean \
                \"lan\"?",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'wan' }]",
                "\"wan\" is the underlay port, expected a port for local hosts",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n[[segment]]\nvni = 1\n",
                "c.toml:9:7: segment[1].vni: 1 is the VNI of segment \"vni1\" already",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan', vlan = 5 }]\n\
              [[segment]]\nvni = 2\nremotes = ['10.9.0.2']\nports = [{ port = 'lan', vlan = 5 }]",
                "c.toml:11:33: segment[1].ports[0].vlan: frames with VLAN 5 on port \"lan\" belong to segment \
                \"vni1\" already",
            ),
            (
                "[[segment]]\nvni = 1\nlocal = 'fd00:9::1'\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]",
                "c.toml:7:12: segment[0].remotes[0]: 10.9.0.2 is IPv4, but there is no IPv4 address to reach it from",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['192.0.2.1']\nports = [{ port = 'lan' }]",
                "expected an IPv4 address in underlay.gateways",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.1']\nports = [{ port = 'lan' }]",
                "is an address of this gateway",
            ),
            ("[[segment]]\nvni = 1\nremotes = ['10.9.0.2', '10.9.0.2']\nports = [{ port = 'lan' }]", "is listed twice"),
            ("[[segment]]\nvni = 1\nremotes = ['224.0.0.1']\nports = [{ port = 'lan' }]", "unicast host address"),
            ("[[segment]]\nvni = 1\nremotes = ['10.9.0.255']\nports = [{ port = 'lan' }]", "unicast host address"),
            (
                "[[segment]]\nvni = 1\nlocal = '10.9.0.7'\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]",
                "found 10.9.0.7, expected one of underlay.addresses: 10.9.0.1, fd00:9::1",
            ),
            ("[[segment]]\nvni = 1\nports = [{ port = 'lan' }]", "segment[0].remotes: missing"),
            ("[[segment]]\nvni = 1\nremotes = ['10.9.0.2']", "segment[0].ports: missing"),
            ("[[segment]]\nremotes = ['10.9.0.2']", "segment[0].vni: missing"),
            ("[[segment]]\nvni = 16777216", "found 16777216, expected an integer from 0 to 16777215"),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n\
              static = [{ mac = '02:00:00:00:00:01', remote = '10.9.0.3' }]",
                "expected one of this segment's remotes",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n\
              static = [{ mac = '03:00:00:00:00:01', remote = '10.9.0.2' }]",
                "expected a unicast host address",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\nageeing = 3",
                "segment[0].ageeing: unknown key; did you mean \"ageing\"?",
            ),
            (
                "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nattach = [{ port = 'lan' }]",
                "c.toml:7:1: segment[0].attach: this key is now called \"ports\"",
            ),
            (
                "[[segment]]\nvni = 1\ncontrol = 'kernel'\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]",
                "c.toml:7:11: segment[0].remotes: found beside control = \"kernel\"",
            ),
            (
                "[[segment]]\nvni = 1\ncontrol = 'kernel'\naccept_unknown_remotes = true\nports = [{ port = 'lan' }]",
                "segment[0].accept_unknown_remotes: found beside control = \"kernel\"",
            ),
            (
                "[[segment]]\nkind = 'geneve'\nvni = 1\ncontrol = 'kernel'\nports = [{ port = 'lan' }]",
                "found \"kernel\" in a segment of kind \"geneve\", expected only for \"vxlan\"",
            ),
            ("[[segment]]\ncontrol = 'kernel'\nports = [{ port = 'lan' }]", "segment[0].vni: missing"),
            ("", "segment: missing, expected at least one table [[segment]]"),
        ];
        for (text, message) in cases {
            let found = refused(text);
            assert!(found.contains(message), "{text}\n  gave {found}\n  not  {message}");
        }
    }

    #[test]
    fn kinds_of_gre() {
        let segment = |keys: &str, vlan: u16| {
            format!("[[segment]]\nports = [{{ port = 'lan', vlan = {vlan} }}]\nkind = 'gretap'\n{keys}\n")
        };
        let read = |segments: &str| read(&(UNDERLAY.to_owned() + segments));
        let two = segment("remotes = ['10.9.0.2']", 1) + &segment("remotes = ['10.9.0.3']\nname = 'b'", 2);
        let config = read(&two).unwrap();
        let found = |remote: &str| {
            let segment = config.segment(config.segments[0].tunnel_id(), remote.parse().unwrap());
            segment.map(|segment| segment.name.as_str())
        };
        assert_eq!((found("10.9.0.2"), found("10.9.0.3"), found("10.9.0.4")), (Some("gretap"), Some("b"), None));
        let largest = read(&segment("vni = 4294967295\nremotes = ['10.9.0.2']", 1)).unwrap();
        assert_eq!((largest.segments[0].vni, largest.segments[0].name.as_str()), (Some(u32::MAX), "vni4294967295"));
        let with = |keys: &str| segment(&format!("remotes = ['10.9.0.2']\n{keys}"), 1);
        for (segments, message) in [
            (
                with("") + &segment("name = 'b'\nremotes = ['10.9.0.2']", 2),
                "10.9.0.2 is a remote of segment \"gretap\"",
            ),
            (
                segment("accept_unknown_remotes = true", 1) + &segment("accept_unknown_remotes = true\nname = 'b'", 2),
                "segment \"gretap\", which has no key either, accepts unknown remotes already",
            ),
            (
                with("vni = 7") + &segment("vni = 7\nremotes = ['10.9.0.3']", 2),
                "7 is the key of segment \"vni7\" already",
            ),
            (with("vni = 4294967296"), "found 4294967296, expected an integer from 0 to 4294967295"),
            (with("gre = { checksums = true }"), "segment[0].gre.checksums: unknown key; did you mean \"checksum\"?"),
            (with("").replace("gretap", "geneve"), "segment[0].vni: missing, expected an integer from 0 to 16777215"),
            (
                with("vni = 5\ngre = { checksum = true }").replace("gretap", "nvgre"),
                "found in a segment of kind \"nvgre\", expected only for \"gretap\" and \"gre\"",
            ),
            (
                with("") + &segment("vni = 7\nremotes = ['10.9.0.3']", 2).replace("gretap", "nvgre"),
                "found \"nvgre\" beside \"gretap\"; received packets of both are alike",
            ),
        ] {
            let found = read(&segments).unwrap_err().to_string();
            assert!(found.contains(message), "{segments}\n  gave {found}\n  not  {message}");
        }
    }

    #[test]
    fn a_table_of_several_other_kinds_is_reported_once() {
        let segment = "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
        for (table, kinds) in [("mpls", "\"mpls-udp\" and \"mpls-gre\""), ("gre", "\"gretap\" and \"gre\"")] {
            let found = refused(&format!("{segment}{table} = {{}}\n"));
            let message = format!("found in a segment of kind \"vxlan\", expected only for {kinds}");
            assert_eq!(found, format!("c.toml:8:{}: segment[0].{table}: {message}", table.len() + 4));
        }
    }

    #[test]
    fn segments_must_fit_the_underlay() {
        let segment = "[[segment]]\nvni = 1\nremotes = ['10.9.0.2', 'fd00:9::2']\nports = [{ port = 'lan' }]\nmtu = ";
        let check = |mtu: u16| read(&format!("{UNDERLAY}{segment}{mtu}\n")).unwrap().check_mtus(1500);
        assert!(check(1430).is_ok());
        let error = check(1431).unwrap_err().to_string();
        assert!(error.starts_with("c.toml:8:7: segment[0].mtu: found 1431, but 1500 bytes"), "{error}");
        assert!(error.contains("towards fd00:9::2 leave 1430"), "{error}");
    }

    #[test]
    fn underlay_errors() {
        let segment = "[[segment]]\nvni = 1\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
        for (underlay, message) in [
            ("", "underlay: missing"),
            ("[underlay]\nport = 'wan'\n", "underlay.addresses: missing"),
            (
                "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1']\n",
                "c.toml:3:14: underlay.addresses[0]: found '10.9.0.1'",
            ),
            ("[underlay]\nport = 'wan'\naddresses = ['127.0.0.1/8']\n", "unicast host address"),
            ("[underlay]\nport = 'wan'\naddresses = ['10.9.0.0/24']\n", "the network itself or its broadcast address"),
            (
                "[underlay]\nport = 'wan'\naddresses = ['10.9.0.255/24']\n",
                "the network itself or its broadcast address",
            ),
            (
                "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\ngateways = ['10.9.0.255']\n",
                "another host in one of the networks",
            ),
            (
                "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\ngateways = ['10.8.0.1']\n",
                "another host in one of the networks",
            ),
            ("[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\nsource_ports = '5-4'\n", "expected two ports"),
            ("[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\nkind = 'vxlam'\n", "did you mean \"vxlan\"?"),
            (
                "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\ndscp = 64\n",
                "an integer from 0 to 63 or \"copy\"",
            ),
            (
                "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\ndscp = 'x'\n",
                "found 'x', expected an integer from 0 to 63 or \"copy\"",
            ),
        ] {
            let found = read(&format!("{underlay}{segment}")).unwrap_err().to_string();
            assert!(found.contains(message), "{underlay}\n  gave {found}");
        }
    }
}
