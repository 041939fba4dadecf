//! The tables `[[vrf]]` with their routes, and the keys of a segment that belong to its router.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use wirepath_flow::Rule;
use wirepath_settings::{
    Choice, ConfigError, ConfigTable, Integer, Key, List, Parsed, Required, Settings, Text, WithDefault, Written,
    nearest,
};
use wirepath_wire::MacAddr;

use crate::route::NetworkPrefix;
use crate::tunnel::config::{SegmentConfig, StaticDestination, TUNNEL_PEER};
use crate::tunnel::filter::{VRF_FILTER, read_filter};
use crate::tunnel::underlay::{Prefix, is_host_address};

/// Name of the VRF of segments and routes that name no other one. It exists without a table.
pub const DEFAULT_VRF: &str = "default";
/// Maximum number of VRFs of a gateway.
pub const MAX_VRFS: usize = 4096;
/// Maximum number of next hops of one route.
pub const MAX_NEXT_HOPS: usize = 64;

type Result<T> = std::result::Result<T, ConfigError>;

const ADDRESS: &str = "an address with its prefix length, such as \"10.1.0.1/24\"";
const NETWORK: &str = "a network without host bits, such as \"10.2.0.0/16\" or \"::/0\"";

const VRF_NAME: Key<Required<Text>> =
    Key::text("name", "any text without control characters").required().about("Name of the VRF.");
const SOURCE_CHECK: Key<WithDefault<Choice<SourceCheck>>> = Key::choice(
    "source_check",
    &[
        ("off", SourceCheck::Off, "every unicast source is accepted"),
        ("loose", SourceCheck::Loose, "there must be a route to the source"),
        ("strict", SourceCheck::Strict, "the route to the source must lead back to the segment of the packet"),
    ],
)
.default_word("off")
.about("Check of the source addresses of packets to be routed (uRPF, RFC 3704).");

/// Description of a table `[[vrf]]`.
pub static VRF: ConfigTable = ConfigTable {
    name: "vrf",
    written: Written::Repeated,
    about: "A routing table for the segments whose router uses it, at most 4096 of them. The VRF \"default\" exists \
            without a table.",
    absent: "only the VRF \"default\", without routes of its own",
    keys: &[&VRF_NAME, &SOURCE_CHECK, &VRF_FILTER],
    tables: || vec![&ROUTES],
    example: "[[vrf]]\nname = \"red\"\nsource_check = \"strict\"\n\
              routes = [{ to = \"10.2.0.0/16\", via = [\"10.1.0.9\"] }]\n",
    ..ConfigTable::EMPTY
};

const TO: Key<Required<Parsed<NetworkPrefix>>> =
    Key::parsed("to", NETWORK).required().about("Destinations of the route. The longest network that matches wins.");
const VIA: Key<List<Parsed<IpAddr>>> =
    Key::parsed("via", "an IP address").list().absent("the route has `next_hops`, `lookup` or `discard`").about(
        "Neighbours that packets are sent to, each in a network of a segment of the VRF. Flows are spread over them.",
    );
const LOOKUP: Key<Text> = Key::text("lookup", "name of a VRF")
    .absent("the route has `via`, `next_hops` or `discard`")
    .about("VRF whose routes decide instead.");
const DISCARD: Key<Choice<Discard>> = Key::choice(
    "discard",
    &[
        ("blackhole", Discard::Blackhole, "drops the packets silently"),
        ("unreachable", Discard::Unreachable, "drops them, and the sender gets ICMP \"network unreachable\""),
        ("prohibit", Discard::Prohibit, "drops them, and the sender gets ICMP \"administratively prohibited\""),
    ],
)
.absent("the route has `via`, `next_hops` or `lookup`")
.about("Drops packets to these destinations.");

const HOP_VIA: Key<Parsed<IpAddr>> = Key::parsed("via", "an IP address")
    .absent("the next hop has `segment`, `remote` and `mac`")
    .about("Neighbour in a network of a segment of the VRF.");
const HOP_SEGMENT: Key<Text> = Key::text("segment", "name of a segment").absent("the next hop has `via`").about(
    "Segment of the VRF that is a layer-3 tunnel, or that leads to the router of a remote (symmetric IRB, RFC 9135).",
);
const HOP_REMOTE: Key<Parsed<IpAddr>> = Key::parsed("remote", "an IP address")
    .absent("the next hop has `via`, or its segment is a layer-3 tunnel")
    .about("Remote of that segment behind which the router is.");
const HOP_MAC: Key<Parsed<MacAddr>> = Key::parsed("mac", "an Ethernet address such as \"02:00:00:00:00:01\"")
    .absent("the next hop has `via`, or its segment is a layer-3 tunnel")
    .about("Ethernet address of the router behind the remote.");
const WEIGHT: Key<WithDefault<Integer<u16>>> =
    Key::integer("weight", 1..=256).default(1).about("Share of the flows, relative to the other next hops.");

static NEXT_HOPS: ConfigTable = ConfigTable {
    name: "next_hops",
    written: Written::InlineList,
    about: "Next hops with weights, at most 64 with those of `via`. A flow keeps its next hop while that one lives.",
    absent: "the route has `via`, `lookup` or `discard`",
    keys: &[&HOP_VIA, &HOP_SEGMENT, &HOP_REMOTE, &HOP_MAC, &WEIGHT],
    alternatives: true,
    example: "next_hops = [{ via = \"10.1.0.8\" }, { via = \"10.1.0.9\", weight = 2 }]\n",
    ..ConfigTable::EMPTY
};

static ROUTES: ConfigTable = ConfigTable {
    name: "routes",
    written: Written::InlineList,
    about: "Static routes. The networks of `addresses` of segments have routes without an entry here.",
    absent: "only routes to the networks of the segments",
    keys: &[&TO, &VIA, &LOOKUP, &DISCARD],
    tables: || vec![&NEXT_HOPS],
    alternatives: true,
    example: "routes = [{ to = \"10.2.0.0/16\", via = [\"10.1.0.9\"] }, \
              { to = \"10.3.0.0/16\", discard = \"blackhole\" }]\n",
    ..ConfigTable::EMPTY
};

/// Key `vrf` of a segment.
pub(in crate::tunnel) const SEGMENT_VRF: Key<Text> = Key::text("vrf", "name of a VRF")
    .absent("\"default\" for a segment with `addresses`; without them, the segment has no router")
    .about("VRF of the segment's router. Frames to the router's Ethernet address are routed there.");
/// Key `addresses` of a segment.
pub(in crate::tunnel) const SEGMENT_ADDRESSES: Key<List<Parsed<Prefix>>> = Key::parsed("addresses", ADDRESS)
    .list()
    .absent("the router has no address in the segment")
    .about("Addresses of the router in the segment, at most 16, with the networks of its hosts.");
/// Key `router_mac` of a segment.
pub(in crate::tunnel) const ROUTER_MAC: Key<Parsed<MacAddr>> =
    Key::parsed("router_mac", "an Ethernet address such as \"02:00:00:00:00:01\"")
        .absent("the Ethernet address of the underlay port")
        .about("Ethernet address of the segment's router. Gateways that share `addresses` share it too.");

/// Check of source addresses (RFC 3704).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceCheck {
    /// No check.
    #[default]
    Off,
    /// A route to the source must exist.
    Loose,
    /// The route to the source must lead to the segment that the packet came from.
    Strict,
}

/// Kinds of routes that drop packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Discard {
    /// Silently.
    Blackhole,
    /// With the ICMP error "network unreachable".
    Unreachable,
    /// With the ICMP error "administratively prohibited".
    Prohibit,
}

/// Settings of a VRF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VrfConfig {
    /// Name in displays.
    pub name: String,
    /// Check of source addresses.
    pub source_check: SourceCheck,
    /// Flow rules for the packets that the VRF's routers take.
    pub filter: Vec<Rule>,
}

/// Settings of a segment's router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// Index in [`RoutingConfig::vrfs`].
    pub vrf: usize,
    /// Addresses in the segment, with the networks of its hosts.
    pub addresses: Vec<Prefix>,
    /// Ethernet address; `None`: that of the underlay port.
    pub mac: Option<MacAddr>,
}

/// Target of a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RouteTarget {
    /// Next hops with their weights.
    NextHops(Vec<(HopConfig, u16)>),
    /// Index of another VRF.
    Lookup(usize),
    /// The packets are dropped.
    Discard(Discard),
}

/// Next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HopConfig {
    /// A neighbour in a network of the segment with this index in the configuration.
    Neighbour {
        /// Index of the segment in the configuration.
        segment: usize,
        /// Address of the neighbour.
        address: IpAddr,
    },
    /// The router behind a remote of a segment.
    Router {
        /// Index of the segment in the configuration.
        segment: usize,
        /// Index of the remote in the segment.
        remote: usize,
        /// Ethernet address of the router.
        mac: MacAddr,
    },
}

/// A static route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteConfig {
    /// Index in [`RoutingConfig::vrfs`].
    pub vrf: usize,
    /// Destinations.
    pub to: NetworkPrefix,
    /// Target.
    pub target: RouteTarget,
}

/// VRFs and routes of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingConfig {
    /// VRFs; the first one is [`DEFAULT_VRF`].
    pub vrfs: Vec<VrfConfig>,
    /// Static routes.
    pub routes: Vec<RouteConfig>,
}

impl RoutingConfig {
    /// Returns the routing of a gateway without VRFs and routes.
    pub fn none() -> Self {
        let default = VrfConfig { name: DEFAULT_VRF.to_owned(), source_check: SourceCheck::Off, filter: Vec::new() };
        Self { vrfs: vec![default], routes: Vec::new() }
    }

    /// Reads the tables `[[vrf]]`.
    pub(in crate::tunnel) fn read_vrfs(root: &Settings<'_>, ports: &[&str]) -> Result<Self> {
        let mut routing = Self::none();
        let mut seen = HashSet::new();
        let tables = root.subtables(&VRF)?.len();
        if tables > MAX_VRFS {
            return Err(root.error_in(&VRF, format!("found {tables} VRFs, expected at most {MAX_VRFS}")));
        }
        let vrfs = root.read_tables(&VRF, |table| {
            // The routes refer to segments, which are not read yet.
            table.has(&ROUTES);
            let source_check = table.read(&SOURCE_CHECK)?;
            let name = table.read(&VRF_NAME)?;
            if name.chars().any(char::is_control) {
                let message = format!("found {name:?}, expected a name without control characters");
                return Err(table.error_in(&VRF_NAME, message));
            }
            if !seen.insert(name.clone()) {
                return Err(table.error_in(&VRF_NAME, format!("another VRF is called \"{name}\" already")));
            }
            let filter = read_filter(table, &VRF_FILTER, ports)?;
            Ok(VrfConfig { name, source_check, filter })
        })?;
        for vrf in vrfs {
            match routing.vrfs.iter_mut().find(|known| known.name == vrf.name) {
                Some(default) => *default = vrf,
                None => routing.vrfs.push(vrf),
            }
        }
        Ok(routing)
    }

    /// Iterates over the next hops of all routes.
    pub(in crate::tunnel) fn next_hops(&self) -> impl Iterator<Item = &HopConfig> {
        let hops = self.routes.iter().filter_map(|route| match &route.target {
            RouteTarget::NextHops(hops) => Some(hops),
            RouteTarget::Lookup(_) | RouteTarget::Discard(_) => None,
        });
        hops.flatten().map(|(hop, _)| hop)
    }

    /// Returns the index of a VRF that the key `key` names.
    fn vrf(&self, table: &Settings<'_>, key: &'static str, name: &str) -> Result<usize> {
        self.vrfs.iter().position(|vrf| vrf.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.vrfs.iter().map(|vrf| vrf.name.as_str()).collect();
            let hint = match nearest(name, &names) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => "write a table [[vrf]]".to_owned(),
            };
            table.error_in(key, format!("found \"{name}\", expected the name of a VRF; {hint}"))
        })
    }

    /// Reads the keys of a segment's router.
    pub(in crate::tunnel) fn read_router(&self, table: &Settings<'_>) -> Result<Option<RouterConfig>> {
        let vrf = table.read(&SEGMENT_VRF)?;
        let listed = table.read(&SEGMENT_ADDRESSES)?;
        let mac = table.read(&ROUTER_MAC)?;
        if vrf.is_none() && listed.is_empty() {
            if mac.is_some() {
                return Err(table.error_in(&ROUTER_MAC, "found without \"vrf\" or \"addresses\", which make a router"));
            }
            return Ok(None);
        }
        if let Some(mac) = mac
            && !mac.is_unicast()
        {
            return Err(table.error_in(&ROUTER_MAC, format!("found {mac}, expected a unicast address")));
        }
        if listed.len() > 16 {
            let message = format!("found {} addresses, expected at most 16", listed.len());
            return Err(table.error_in(&SEGMENT_ADDRESSES, message));
        }
        let vrf = self.vrf(table, SEGMENT_VRF.name(), vrf.as_deref().unwrap_or(DEFAULT_VRF))?;
        let mut addresses: Vec<Prefix> = Vec::new();
        for prefix in listed {
            let found = prefix.value;
            let link_local = matches!(found.address, IpAddr::V6(ip) if ip.is_unicast_link_local());
            if !is_host_address(found.address) || found.is_reserved(found.address) || link_local {
                table.record(prefix.error(format!("found {found}, expected a unicast host address")));
            } else if addresses.iter().any(|other| other.contains(found.address) || found.contains(other.address)) {
                table.record(prefix.error(format!("the network of {found} is in the list already")));
            }
            addresses.push(found);
        }
        Ok(Some(RouterConfig { vrf, addresses, mac }))
    }

    /// Reads the routes of the tables `[[vrf]]`.
    pub(in crate::tunnel) fn read_routes(&mut self, root: &Settings<'_>, segments: &[SegmentConfig]) -> Result<()> {
        let mut routes = Vec::new();
        root.read_tables(&VRF, |table| {
            table.has(&SOURCE_CHECK);
            table.has(&VRF_FILTER);
            let vrf = self.vrf(table, VRF_NAME.name(), &table.read(&VRF_NAME)?)?;
            let mut seen: HashSet<NetworkPrefix> = HashSet::new();
            let found = table.read_tables(&ROUTES, |route| {
                let route = self.route(route, segments, vrf, &mut seen)?;
                Ok(route)
            })?;
            routes.extend(found);
            Ok(())
        })?;
        self.routes = routes;
        self.check_routers(root, segments)
    }

    /// Checks that no Ethernet address is the router behind two remotes of a segment.
    fn check_routers(&self, root: &Settings<'_>, segments: &[SegmentConfig]) -> Result<()> {
        let mut known: HashMap<(usize, MacAddr), usize> = HashMap::new();
        for hop in self.next_hops() {
            let HopConfig::Router { segment, remote, mac } = *hop else { continue };
            if *known.entry((segment, mac)).or_insert(remote) != remote {
                let name = segments.get(segment).map_or("", |segment| segment.name.as_str());
                let message = format!("routes lead to {mac} behind two remotes of segment \"{name}\", expected one");
                return Err(root.error_in(&VRF, message));
            }
        }
        Ok(())
    }

    /// Reads a route.
    fn route(
        &self,
        table: &Settings<'_>,
        segments: &[SegmentConfig],
        vrf: usize,
        seen: &mut HashSet<NetworkPrefix>,
    ) -> Result<RouteConfig> {
        let to = table.read(&TO)?;
        let lookup = table.read(&LOOKUP)?;
        let discard = table.read(&DISCARD)?;
        let mut hops = Vec::new();
        for via in table.read(&VIA)? {
            let hop = neighbour(segments, vrf, via.value).map_err(|message| via.error(message))?;
            hops.push((hop, 1));
        }
        hops.extend(table.read_tables(&NEXT_HOPS, |hop| self.next_hop(hop, segments, vrf))?);
        let targets = [!hops.is_empty(), lookup.is_some(), discard.is_some()];
        if targets.iter().filter(|given| **given).count() != 1 {
            return Err(table.error("expected one of \"via\" or \"next_hops\", \"lookup\", \"discard\""));
        }
        if hops.len() > MAX_NEXT_HOPS {
            let message = format!("found {} next hops, expected at most {MAX_NEXT_HOPS}", hops.len());
            return Err(table.error(message));
        }
        if hops.iter().enumerate().any(|(at, (hop, _))| hops.iter().take(at).any(|(other, _)| other == hop)) {
            return Err(table.error("a next hop is listed twice; give it a weight"));
        }
        if !seen.insert(to) {
            return Err(table.error_in(&TO, format!("the VRF has a route to {to} already")));
        }
        let target = match (lookup, discard) {
            (Some(name), _) => {
                let other = self.vrf(table, LOOKUP.name(), &name)?;
                if other == vrf {
                    return Err(table.error_in(&LOOKUP, "found the VRF of the route, expected another one"));
                }
                RouteTarget::Lookup(other)
            }
            (_, Some(discard)) => RouteTarget::Discard(discard),
            _ => RouteTarget::NextHops(hops),
        };
        Ok(RouteConfig { vrf, to, target })
    }

    /// Returns whether the Ethernet address of a router belongs to another place of its segment: a static host, another
    /// next hop, or the segment's own router.
    fn is_elsewhere(segments: &[SegmentConfig], hop: &HopConfig) -> bool {
        let HopConfig::Router { segment, remote, mac } = *hop else { return false };
        let Some(config) = segments.get(segment) else { return false };
        let is_own = config.router.as_ref().is_some_and(|router| router.mac == Some(mac));
        let differs = |place: &StaticDestination| *place != StaticDestination::Remote(remote);
        is_own || config.statics.iter().any(|(host, place)| *host == mac && differs(place))
    }

    /// Reads a next hop.
    fn next_hop(&self, table: &Settings<'_>, segments: &[SegmentConfig], vrf: usize) -> Result<(HopConfig, u16)> {
        let weight = table.read(&WEIGHT)?;
        let (via, segment) = (table.read(&HOP_VIA)?, table.read(&HOP_SEGMENT)?);
        let (remote, mac) = (table.read(&HOP_REMOTE)?, table.read(&HOP_MAC)?);
        let hop = match (via, segment, remote, mac) {
            (Some(via), None, None, None) => {
                neighbour(segments, vrf, via).map_err(|message| table.error_in(&HOP_VIA, message))?
            }
            (None, Some(name), None, None) => {
                let segment = segment_of_vrf(table, segments, vrf, &name)?;
                if !segments.get(segment).is_some_and(SegmentConfig::is_routed_tunnel) {
                    let message = format!("\"{name}\" is a layer-2 network, expected \"remote\" and \"mac\" too");
                    return Err(table.error_in(&HOP_SEGMENT, message));
                }
                HopConfig::Router { segment, remote: 0, mac: TUNNEL_PEER }
            }
            (None, Some(name), Some(address), Some(mac)) => {
                let segment = segment_of_vrf(table, segments, vrf, &name)?;
                if segments.get(segment).is_some_and(SegmentConfig::is_routed_tunnel) {
                    let message = "found in a layer-3 tunnel, which has one remote and no Ethernet addresses";
                    return Err(table.error_in(&HOP_MAC, message));
                }
                let remotes = segments.get(segment).map(|segment| segment.remotes.as_slice()).unwrap_or_default();
                let remote = remotes.iter().position(|remote| remote.address == address).ok_or_else(|| {
                    table.error_in(&HOP_REMOTE, format!("found {address}, expected one of the segment's remotes"))
                })?;
                if !mac.is_unicast() {
                    return Err(table.error_in(&HOP_MAC, format!("found {mac}, expected a unicast address")));
                }
                let hop = HopConfig::Router { segment, remote, mac };
                if Self::is_elsewhere(segments, &hop) {
                    let message = format!("{mac} is behind another remote or port of \"{name}\" already");
                    return Err(table.error_in(&HOP_MAC, message));
                }
                hop
            }
            _ => {
                let message = "expected \"via\", or \"segment\" alone, or \"segment\", \"remote\" and \"mac\"";
                return Err(table.error(message));
            }
        };
        Ok((hop, weight))
    }
}

/// Returns the index of a segment whose router is in the VRF.
fn segment_of_vrf(table: &Settings<'_>, segments: &[SegmentConfig], vrf: usize, name: &str) -> Result<usize> {
    let is_meant = |it: &SegmentConfig| it.name == name && it.router.as_ref().is_some_and(|router| router.vrf == vrf);
    segments.iter().position(is_meant).ok_or_else(|| {
        let message = format!("found \"{name}\", expected the name of a segment whose router is in the VRF");
        table.error_in(&HOP_SEGMENT, message)
    })
}

/// Finds the segment of a neighbour: the one of the VRF that has it in a network.
fn neighbour(segments: &[SegmentConfig], vrf: usize, address: IpAddr) -> std::result::Result<HopConfig, String> {
    let has = |segment: &SegmentConfig| {
        let router = segment.router.as_ref().filter(|router| router.vrf == vrf);
        router.is_some_and(|router| router.addresses.iter().any(|prefix| prefix.contains(address)))
    };
    let own = |segment: &SegmentConfig| {
        let addresses = segment.router.iter().flat_map(|router| &router.addresses);
        addresses.into_iter().any(|prefix| prefix.address == address || prefix.is_reserved(address))
    };
    match segments.iter().position(has) {
        Some(segment) if !segments.get(segment).is_some_and(own) => {
            Ok(match segments.get(segment).is_some_and(SegmentConfig::is_routed_tunnel) {
                true => HopConfig::Router { segment, remote: 0, mac: TUNNEL_PEER },
                false => HopConfig::Neighbour { segment, address },
            })
        }
        Some(_) => Err(format!("found {address}, expected the address of another host")),
        None => Err(format!("{address} is in no network of a segment of this VRF")),
    }
}

/// Checks that no two segments of a VRF have overlapping networks.
pub(in crate::tunnel) fn check_networks(root: &Settings<'_>, segments: &[SegmentConfig]) {
    let mut known: Vec<(usize, Prefix, &str)> = Vec::new();
    for segment in segments {
        let Some(router) = &segment.router else { continue };
        for prefix in &router.addresses {
            let overlaps = |(vrf, other, _): &&(usize, Prefix, &str)| {
                *vrf == router.vrf && (other.contains(prefix.address) || prefix.contains(other.address))
            };
            if let Some((_, other, name)) = known.iter().find(overlaps) {
                let message = format!(
                    "segment \"{}\": the network of {prefix} overlaps that of {other} in segment \"{name}\" of the \
                     same VRF",
                    segment.name
                );
                root.record(root.error(message));
            }
            known.push((router.vrf, *prefix, &segment.name));
        }
    }
}
