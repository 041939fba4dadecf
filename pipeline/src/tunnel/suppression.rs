//! ARP and ND suppression: workers answer requests of local hosts for known addresses, instead of flooding them
//! (RFC 9161 section 3; Linux: `bridge link set ... neigh_suppress on`).
//!
//! Workers watch ARP and ND messages from local ports and tunnels. A message that confirms a binding marks it as seen.
//! All others go to the control thread as a [`Claim`]. The control thread publishes the bindings to the workers.
//!
//! A worker answers a request from a local port if all of this holds, and floods it otherwise:
//! - The request is sent to a group. A host that asks one host wants to know whether it is there.
//! - Its target has a binding to another host than the asker.
//! - The host is in the forwarding database and at another place, or the binding is static.
//! - For ND, its router flag is known. A wrong one would remove a default router from the asker's list (RFC 4861
//!   section 7.2.5).
//!
//! Announcements and probes for duplicates (RFC 5227, RFC 4862) are flooded. The host that has the address answers.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use wirepath_packet::Packet;
use wirepath_packet::offload::ChecksumStatus;
use wirepath_settings::{ConfigTable, Flag, Key as ConfigKey, Parsed, Required, Settings, WithDefault, Written};
use wirepath_wire::build::{NDP_FRAME_LEN, arp_reply, neighbor_advertisement};
use wirepath_wire::{EtherType, IpProtocol, L3Type, L4Type, MacAddr, Parser, arp, icmpv6, ndp};

use super::bindings::{Binding, BindingOrigin, Claim, Claimed};
use super::config::Result;
use super::control::GatewayControl;
use super::encap::TX_OFFLOADS;
use super::report::STAGE;
use super::stage::{StageState, View};
use super::tables::Destination;
use super::underlay::is_host_address;
use crate::Context;
use crate::table::{FdbWriter, Key, NO_DESTINATION};
use crate::token_bucket::TokenBucket;

/// Length of the queue of claims, and the most that the control thread processes in a tick.
pub(super) const CLAIMS: usize = 1024;
/// Claims of one worker per second, and their burst.
const CLAIM_RATE: (u64, u128) = (1000, 500);
/// Maximum number of static bindings of a segment.
const MAX_STATIC: usize = 4096;

pub(super) const SUPPRESSION: ConfigKey<WithDefault<Flag>> = ConfigKey::flag("neighbour_suppression")
    .default(false)
    .about("Answers ARP and ND requests of local hosts for known addresses, instead of flooding them (RFC 9161).");
const ADDRESS: ConfigKey<Required<Parsed<IpAddr>>> =
    ConfigKey::parsed("address", "an IP address").required().about("IP address of a host.");
const MAC: ConfigKey<Required<Parsed<MacAddr>>> =
    ConfigKey::parsed("mac", "an Ethernet address such as \"02:00:00:00:00:01\"")
        .required()
        .about("Its unicast Ethernet address.");
const ROUTER: ConfigKey<WithDefault<Flag>> = ConfigKey::flag("router")
    .default(false)
    .about("Marks the host as a router in neighbour advertisements (RFC 4861 section 4.4).");

pub(super) static NEIGHBOURS: ConfigTable = ConfigTable {
    name: "neighbours",
    written: Written::InlineList,
    about: "Fixed Ethernet addresses of IP addresses, at most 4096, for `neighbour_suppression`.",
    absent: "none",
    keys: &[&ADDRESS, &MAC, &ROUTER],
    example: "neighbours = [{ address = \"10.1.0.1\", mac = \"02:00:00:00:00:01\" }]\n",
    ..ConfigTable::EMPTY
};

/// A static binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticBinding {
    /// IP address of the host.
    pub address: IpAddr,
    /// Its Ethernet address.
    pub mac: MacAddr,
    /// True if it is an IPv6 router.
    pub is_router: bool,
}

/// Settings of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuppressionConfig {
    /// If true, workers answer requests.
    pub enabled: bool,
    /// Static bindings.
    pub bindings: Vec<StaticBinding>,
}

impl SuppressionConfig {
    pub(super) fn read(table: &Settings<'_>) -> Result<Self> {
        let enabled = table.read(&SUPPRESSION)?;
        let mut seen = HashSet::new();
        let bindings = table.read_tables(&NEIGHBOURS, |entry| {
            let (address, mac, is_router) = (entry.read(&ADDRESS)?, entry.read(&MAC)?, entry.read(&ROUTER)?);
            if !is_host_address(address) {
                return Err(entry.error_in(&ADDRESS, format!("found {address}, expected a unicast host address")));
            }
            if !mac.is_unicast() {
                return Err(entry.error_in(&MAC, format!("found {mac}, expected a unicast host address")));
            }
            if !seen.insert(address) {
                return Err(entry.error_in(&ADDRESS, format!("{address} is listed twice")));
            }
            Ok(StaticBinding { address, mac, is_router })
        })?;
        if bindings.len() > MAX_STATIC {
            let message = format!("found {} addresses, expected at most {MAX_STATIC}", bindings.len());
            return Err(table.error_in(&NEIGHBOURS, message));
        }
        if !enabled && !bindings.is_empty() {
            return Err(table.error_in(&NEIGHBOURS, "has an effect only with neighbour_suppression = true"));
        }
        Ok(Self { enabled, bindings })
    }
}

/// Returns the limit of the claims of a worker.
pub(super) fn claim_limiter() -> TokenBucket {
    TokenBucket::new(CLAIM_RATE.0, CLAIM_RATE.1)
}

/// Returns whether a frame is an ARP packet, or a neighbour solicitation or advertisement.
#[inline(never)]
fn is_neighbour_message(ethertype: u16, frame: &[u8]) -> bool {
    match EtherType(ethertype) {
        EtherType::ARP => true,
        // Extension headers before a message would need fragments or options, which no host uses there.
        EtherType::IPV6 => {
            let kind = frame.get(54).map(|kind| icmpv6::Type(*kind));
            frame.get(20) == Some(&IpProtocol::ICMPV6.0)
                && matches!(kind, Some(icmpv6::Type::NEIGHBOR_SOLICITATION | icmpv6::Type::NEIGHBOR_ADVERTISEMENT))
        }
        _ => false,
    }
}

/// Content of an ARP or ND message.
struct Message {
    /// Ethernet source of the frame.
    source: MacAddr,
    /// Binding that the sender claims: IP address, Ethernet address and router flag.
    claim: Option<(IpAddr, MacAddr, Option<bool>)>,
    request: Option<Request>,
}

/// A request that a worker may answer.
enum Request {
    Arp(arp::Repr),
    Nd { target: Ipv6Addr, asker: MacAddr, from: Ipv6Addr },
}

impl Request {
    fn target(&self) -> IpAddr {
        match self {
            Self::Arp(request) => request.target_ip.into(),
            Self::Nd { target, .. } => (*target).into(),
        }
    }

    fn asker(&self) -> MacAddr {
        match self {
            Self::Arp(request) => request.sender_mac,
            Self::Nd { asker, .. } => *asker,
        }
    }

    /// Returns whether the router flag must be known for a reply.
    fn needs_router_flag(&self) -> bool {
        matches!(self, Self::Nd { .. })
    }
}

impl Message {
    /// Reads a message; `None` if it is malformed.
    fn read(parser: &Parser, packet: &Packet) -> Option<Self> {
        let frame = packet.data();
        let source = MacAddr(*frame.get(6..12)?.first_chunk()?);
        let to_group = MacAddr(*frame.first_chunk()?).is_multicast();
        let layers = parser.parse_stack(frame, 0, packet.len()).ok()?;
        let message = match (layers.l3_type(), layers.l4_type()) {
            (L3Type::Arp, _) => Self::of_arp(source, &arp::Repr::parse(&layers.arp(frame)?)),
            (L3Type::Ipv6, L4Type::Icmpv6) if !layers.is_fragment() => {
                let ip = layers.ipv6(frame)?;
                Self::of_nd(ip.src(), source, &ndp::Repr::parse(&ip).ok()??)
            }
            _ => return None,
        };
        Some(Self { request: message.request.filter(|_| to_group), ..message })
    }

    fn of_arp(source: MacAddr, packet: &arp::Repr) -> Self {
        let arp::Repr { operation, sender_mac, sender_ip, target_ip, .. } = *packet;
        let is_sender = sender_mac.is_unicast() && is_host_address(sender_ip.into());
        // A probe has no sender, and an announcement asks for its sender (RFC 5227).
        let is_request = operation == arp::Operation::REQUEST && is_sender && sender_ip != target_ip;
        Self {
            source,
            claim: is_sender.then_some((sender_ip.into(), sender_mac, None)),
            request: is_request.then_some(Request::Arp(*packet)),
        }
    }

    fn of_nd(from: Ipv6Addr, source: MacAddr, message: &ndp::Repr) -> Self {
        let claim = |ip: Ipv6Addr, mac: Option<MacAddr>, is_router| {
            mac.filter(|mac| mac.is_unicast() && is_host_address(ip.into())).map(|mac| (ip.into(), mac, is_router))
        };
        match *message {
            // A solicitation from the unspecified address looks for duplicates (RFC 4862 section 5.4.2).
            ndp::Repr::Solicitation { target, source: option } => Self {
                source,
                claim: claim(from, option, None),
                request: is_host_address(from.into()).then_some(Request::Nd {
                    target,
                    asker: option.unwrap_or(source),
                    from,
                }),
            },
            // Without the override flag, several hosts may have the address (RFC 4861 section 7.2.7).
            ndp::Repr::Advertisement { target, flags, address } => {
                let overrides = flags & ndp::FLAG_OVERRIDE != 0;
                let is_router = Some(flags & ndp::FLAG_ROUTER != 0);
                Self { source, claim: claim(target, address.filter(|_| overrides), is_router), request: None }
            }
        }
    }
}

impl View<'_> {
    /// Returns whether a frame without tag may be an ARP or ND message that is watched.
    #[inline(always)]
    pub(super) fn is_watched(&self, ethertype: u16, frame: &[u8]) -> bool {
        self.layout.watches_neighbours && is_neighbour_message(ethertype, frame)
    }

    /// Learns the binding of a watched message. Answers it if it is a request from a local port whose answer is
    /// known. Otherwise returns the packet.
    #[cold]
    #[inline(never)]
    pub(super) fn watch_neighbours(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        mut packet: Packet,
        segment: u16,
        from: Destination,
    ) -> Option<Packet> {
        if !self.layout.segments.get(usize::from(segment)).is_some_and(|it| it.neighbour_suppression) {
            return Some(packet);
        }
        let Some(message) = Message::read(&state.parser, &packet) else { return Some(packet) };
        let known = self.bindings.read(context.guard()).get(&segment);
        if let Some((ip, mac, is_router)) = message.claim {
            let is_local = matches!(from, Destination::Attachment(_));
            let is_own = message.source == mac;
            // Another control plane advertises what it gets. So it gets claims of local hosts for themselves only.
            let overrides = self.layout.segments.get(usize::from(segment)).is_some_and(|it| it.follows_claims);
            if !overrides || is_local && is_own {
                let claim = Claim { segment, ip, mac, is_router, overrides };
                self.report_claim(state, context, claim, known.and_then(|it| it.get(&ip)));
            }
        }
        let (Destination::Attachment(index), Some(request)) = (from, message.request) else { return Some(packet) };
        let binding = known.and_then(|known| known.get(&request.target()));
        let Some(binding) = binding.filter(|it| self.can_answer(context, &request, it, segment, index)) else {
            return Some(packet);
        };
        if !write_reply(&mut packet, &request, binding) {
            return Some(packet);
        }
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.neighbour_replies.add(1);
        }
        context.trace(STAGE, |text| write!(text, "answered: {} is at {}", request.target(), binding.mac));
        self.deliver(state, context, packet, index);
        None
    }

    /// Marks a binding as seen, or reports the claim to the control thread.
    fn report_claim(&self, state: &StageState, context: &Context<'_>, claim: Claim, known: Option<&Arc<Binding>>) {
        let holds = |known: &&Arc<Binding>| !(claim.overrides && known.origin == BindingOrigin::External);
        match known.filter(holds) {
            Some(known)
                if known.mac == claim.mac && (claim.is_router.is_none() || known.is_router == claim.is_router) =>
            {
                known.touch(context.seconds());
            }
            Some(known) if known.origin != BindingOrigin::Learned => {}
            // A claim that finds no room is repeated by the next message.
            _ if state.claim_limiter.take(1, context.now()) => _ = self.claims.push(claim),
            _ => {}
        }
    }

    /// Returns whether a binding may answer a request from this attachment.
    fn can_answer(&self, context: &Context<'_>, request: &Request, binding: &Binding, segment: u16, from: u32) -> bool {
        if binding.mac == request.asker() || request.needs_router_flag() && binding.is_router.is_none() {
            return false;
        }
        let place = self.fdb.table(context.guard()).lookup(Key::new(segment, binding.mac));
        if place == NO_DESTINATION {
            return binding.origin == BindingOrigin::Static;
        }
        match Destination::unpack(place) {
            // The host hears the request itself, or must not be reached.
            Destination::Attachment(index) => index != from && !self.layout.are_isolated(from, index),
            Destination::Remote(_) | Destination::Group(_) => true,
            // The router answers itself.
            Destination::Router => false,
        }
    }
}

/// Turns a request into its reply. Returns false, and changes nothing, if that is not possible.
fn write_reply(packet: &mut Packet, request: &Request, binding: &Binding) -> bool {
    let mut reply = [0; NDP_FRAME_LEN];
    let written = match request {
        Request::Arp(request) => arp_reply(&mut reply, request, binding.mac),
        Request::Nd { target, asker, from } => {
            let router = if binding.is_router == Some(true) { ndp::FLAG_ROUTER } else { 0 };
            let flags = router | ndp::FLAG_OVERRIDE;
            neighbor_advertisement(&mut reply, binding.mac, *target, Some((*asker, *from)), flags)
        }
    };
    let Some(reply) = written.ok().and_then(|len| reply.get(..len)) else { return false };
    if packet.is_chain() || packet.flags().intersects(TX_OFFLOADS) {
        return false;
    }
    let have = packet.len();
    let fits =
        if have < reply.len() { packet.append(reply.len() - have).is_some() } else { packet.truncate(reply.len()) };
    if fits {
        packet.data_mut().copy_from_slice(reply);
        packet.set_checksum_status(ChecksumStatus::NONE);
    }
    fits
}

/// Returns whether an address is behind a local port.
pub(super) fn is_local_host(fdb: &mut FdbWriter, key: Key) -> bool {
    let entry = fdb.get(key).filter(|entry| !entry.external);
    entry.is_some_and(|entry| matches!(Destination::unpack(entry.destination), Destination::Attachment(_)))
}

impl GatewayControl {
    /// Returns whether an address belongs to the gateway or to a remote, so that no host of the segment can have it.
    fn is_infrastructure(&self, segment: u16, ip: IpAddr) -> bool {
        let Some(config) = self.segment_config(segment) else { return false };
        let of_router = config.router.iter().flat_map(|router| &router.addresses);
        let of_gateway = of_router.chain(&self.config.underlay.addresses);
        of_gateway.into_iter().any(|prefix| prefix.address == ip) || config.remotes.iter().any(|it| it.address == ip)
    }

    /// Processes the claims of the workers, and publishes changed bindings.
    pub(super) fn update_bindings(&mut self, now: u32) {
        let claims = Arc::clone(&self.tables.claims);
        for mut claim in std::iter::from_fn(|| claims.pop()).take(CLAIMS) {
            // The segment may have been removed since.
            let is_there = self.segment_config(claim.segment).is_some_and(|segment| segment.suppression.enabled);
            let is_infrastructure = self.is_infrastructure(claim.segment, claim.ip);
            let Some(stats) = self.learns.get_mut(usize::from(claim.segment)).filter(|_| is_there) else { continue };
            // The other control plane learns of the move of the host itself first.
            claim.overrides &= is_local_host(&mut self.fdb, Key::new(claim.segment, claim.mac));
            if is_infrastructure {
                stats.bindings_refused += 1;
                continue;
            }
            match self.bindings.claim(claim, now) {
                Claimed::New => stats.bindings_learned += 1,
                Claimed::Moved => {
                    stats.bindings_moved += 1;
                    tracing::debug!("{} moved to {}", claim.ip, claim.mac);
                }
                Claimed::Refused => stats.bindings_refused += 1,
                Claimed::Known => {}
            }
        }
        self.publish_bindings();
    }

    /// Passes changed bindings to the workers.
    pub(super) fn publish_bindings(&mut self) {
        if let Some(bindings) = self.bindings.take_changed() {
            self.tables.bindings.replace(bindings);
        }
    }

    /// Removes bindings that no message confirmed for the ageing time.
    pub(super) fn age_bindings(&mut self, now: u32) {
        let Self { bindings, places, config, .. } = self;
        let segment = |index| places.position(index).and_then(|at| config.segments.get(at));
        bindings.age(now, |index| segment(index).map_or(1, |segment| segment.ageing));
        // A message after this one must teach the binding anew, not confirm one that is gone.
        self.publish_bindings();
    }

    /// Brings the static bindings up to date, and removes those of segments without suppression.
    pub(super) fn sync_bindings(&mut self) {
        let Self { bindings, places, config, .. } = self;
        let segments = || config.segments.iter().zip(&places.segments).filter(|(it, _)| it.suppression.enabled);
        let enabled: HashSet<u16> = segments().map(|(_, place)| place.index).collect();
        let wanted: HashSet<(u16, IpAddr)> = segments()
            .flat_map(|(it, place)| it.suppression.bindings.iter().map(|binding| (place.index, binding.address)))
            .collect();
        bindings.remove_all(|index, ip, binding| {
            !enabled.contains(&index) || binding.origin == BindingOrigin::Static && !wanted.contains(&(index, ip))
        });
        for (segment, place) in segments() {
            for StaticBinding { address, mac, is_router } in &segment.suppression.bindings {
                bindings.set(place.index, *address, *mac, *is_router, BindingOrigin::Static);
            }
        }
        if let Some(bindings) = bindings.take_changed() {
            self.tables.bindings.replace(bindings);
        }
    }

    /// Sets a binding from another source than messages and the configuration, such as a routing protocol. It replaces
    /// a learned binding, and holds until [`Self::remove_binding`]. Workers see it after the next tick.
    ///
    /// # Errors
    /// If there is no segment of this name, or it has no `neighbour_suppression`.
    pub fn set_binding(
        &mut self,
        segment: &str,
        ip: IpAddr,
        mac: MacAddr,
        is_router: bool,
    ) -> std::result::Result<(), String> {
        let index = self.segment_index(segment)?;
        if !self.segment_config(index).is_some_and(|it| it.suppression.enabled) {
            return Err(format!("segment \"{segment}\" has no neighbour_suppression"));
        }
        self.bindings.set(index, ip, mac, is_router, BindingOrigin::External);
        Ok(())
    }

    /// Removes a binding that [`Self::set_binding`] has set.
    ///
    /// # Errors
    /// If there is no segment of this name.
    pub fn remove_binding(&mut self, segment: &str, ip: IpAddr) -> std::result::Result<(), String> {
        let index = self.segment_index(segment)?;
        self.bindings.remove(index, ip, BindingOrigin::External);
        Ok(())
    }
}
