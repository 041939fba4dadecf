//! Actions of rules, compiled once into a [`Program`], which runs on each packet that matched the rule.
//!
//! Adjacent `set` and `dec-ttl` actions become one masked write per header, with the constant part of the
//! checksums precomputed. Tunnel headers become templates. Only lengths, identification, source port and
//! checksums are filled per packet.
//!
//! # Semantics of the actions
//! Actions run in order, each on the result of the one before it. Details that the rule language leaves open
//! are defined here:
//!
//! - **set** writes into the outermost header of its kind (after a `decap`: of the decapsulated packet).
//!   `dscp` leaves ECN unchanged. Authentication of addresses (AH, a TCP MD5 option) breaks, as with every
//!   address translator.
//! - **Checksums** of IPv4, TCP, UDP, UDP-Lite, DCCP and ICMPv6 are updated by the difference (RFC 1624). A
//!   right checksum stays right, and a wrong one stays wrong. An absent UDP checksum stays absent. A UDP
//!   checksum of 0 is sent as 0xffff. Later fragments have no checksum to update. The checksum covers
//!   the final destination, which a routing header with segments left holds (RFC 8200 section 8.1). It covers
//!   the source of a home address option, if there is one (RFC 6275 section 6.3).
//! - **dec-ttl** drops packets that arrive with TTL or hop limit 1 or 0 (`hop_limit`). The application may
//!   send the ICMP error.
//! - **VLAN tags**: a stripped tag counts as the outermost one. `push-vlan` writes into the frame. A third tag
//!   is refused (`too_many_headers`), because no parser follows it.
//! - **decap** removes the tunnel headers as RFC 6040 section 4.2 requires. The outer ECN field is merged into
//!   the inner IP header. Congestion marked on a packet without ECN support drops it (`bad_ecn`). Inner DSCP
//!   and TTL are unchanged. Bytes behind the tunnel payload are removed: Ethernet padding, and bytes behind the
//!   UDP length. `decap l3` also trims to the inner IP length. Outer UDP and GRE checksums are not computed, as
//!   NICs do not either. A checksum that the NIC reports as wrong drops the packet. Fragments of tunnel packets
//!   are dropped (`outer_fragment`).
//! - **encap** writes the header bytes of the rule, except for these fields. Lengths and the IPv4 header
//!   checksum are filled. The IPv4 identification of headers without DF is incremented per packet. A UDP source
//!   port of **0** is replaced by entropy of the packet (49152 to 65535, equal for all fragments of a packet). A
//!   UDP checksum **other than 0** is computed. So DSCP, ECN and TTL are those of the rule. ECN 0 is the
//!   compatibility mode of RFC 6040 section 4.1. Over IPv6, a checksum of 0 is the choice of RFC 6935.
//! - **encap l2** carries the whole frame, with padding and a stripped tag. **encap l3** carries the IP packet
//!   alone. Pending checksum offloads are completed first. A segmentation request is kept, and the metadata
//!   gets the new header lengths.
//! - **limit** is one token bucket per rule for all workers, full at the start. A packet costs the length
//!   that it has here. A packet longer than `burst` never passes. Excess packets are dropped
//!   (`meter_exceeded`).
//! - **count** counts packets with the length that they have here. **mark** sets [`Packet::set_mark`].
//! - **mirror** sends a copy of the packet as it is here. Up to 512 bytes are copied; longer packets share
//!   their payload ([`Packet::clone_shared`]). Without a free buffer the copy is lost and counted
//!   (`no_buffer`), and the packet continues.
//! - **rss** computes the Toeplitz hash over the selected fields that are present, in the order source,
//!   destination, ports or SPI. It stores the hash ([`Packet::set_rss_hash`]) and selects `queues[(hash mod
//!   512) mod n]`. Fragments are hashed by addresses only. A packet without any of the fields goes to the
//!   first queue.
//!
//! A packet that lacks the header that an action changes is dropped as `rule_mismatch`. A packet whose
//! headers are not in the first segment is dropped as `truncated`. Nothing panics.

mod decap;
mod encap;
mod meter;
mod rewrite;
mod rss;
#[cfg(test)]
mod tests;
mod vlan_tags;

use std::ops::Deref;

use wirepath_flow::{Action, FieldSet, ReformatKind, Rule};
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{HeaderLengths, Packet, Pool, PtypeL3, PtypeL4};
use wirepath_wire::{HeaderOffsets, L3Type, L4Type, Parsed, Tag, Tunnel, Tunnels};

use decap::Decap;
use encap::Encap;
use meter::Meter;
use rewrite::Rewrite;
use rss::RssAction;
pub use rss::{DEFAULT_RSS_KEY, RSS_KEY_LEN, Toeplitz};
pub(in crate::rules) use vlan_tags::insert_stripped_tag;

/// Outcome of a packet after its program has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The packet continues as without a rule: to the next stage at ingress, out of the port at egress.
    Next,
    /// The packet is dropped for this reason.
    Drop(DropReason),
    /// The packet is sent out of this port.
    Redirect(PortId),
    /// The packet goes to this receive queue of its input port.
    Queue(u16),
    /// The packet goes to the kernel's network stack.
    Kernel,
}

/// Services that a program needs from its caller. An engine implements them over its
/// [`Context`](crate::Context), with static dispatch.
pub trait Environment {
    /// Returns the time in nanoseconds of a clock that all workers share.
    fn now(&self) -> u64;

    /// Returns the pool for the buffers of mirror copies.
    fn pool(&self) -> Option<&Pool>;

    /// Returns the port's receive hash, for rules without a key of their own.
    fn toeplitz(&self) -> &Toeplitz;

    /// Counts a packet of this length for the action `count`.
    fn count(&mut self, bytes: usize);

    /// Sends a copy of the packet out of `port`.
    fn mirror(&mut self, port: PortId, copy: Packet);

    /// Counts a mirror copy that could not be made.
    fn mirror_failed(&mut self, reason: DropReason);
}

/// Longest packet in bytes that is copied for a mirror. A copy is cheaper than reference counts and a second
/// segment for the NIC to gather.
const COPY_MAX: usize = 512;
/// Private bytes of each copy of a longer packet: headers that later actions and stages may change.
const PRIVATE_HEADERS: usize = 256;

/// The compiled actions of one rule.
#[derive(Debug)]
pub struct Program {
    steps: Steps,
    final_action: FinalAction,
}

/// Steps of a program. A single step, which most rules have, is stored inline and saves a cache miss per
/// packet.
#[derive(Debug)]
enum Steps {
    One(Step),
    Many(Box<[Step]>),
}

impl Steps {
    fn heap_bytes(&self) -> usize {
        let list = if let Self::Many(steps) = self { size_of_val(&**steps) } else { 0 };
        list + self.iter().map(Step::heap_bytes).sum::<usize>()
    }
}

impl From<Vec<Step>> for Steps {
    fn from(steps: Vec<Step>) -> Self {
        match <[Step; 1]>::try_from(steps) {
            Ok([step]) => Self::One(step),
            Err(steps) => Self::Many(steps.into()),
        }
    }
}

impl Deref for Steps {
    type Target = [Step];

    #[inline(always)]
    fn deref(&self) -> &[Step] {
        match self {
            Self::One(step) => std::slice::from_ref(step),
            Self::Many(steps) => steps,
        }
    }
}

/// A step that runs before the final action. Two words.
#[derive(Debug)]
enum Step {
    Rewrite(Box<Rewrite>),
    PushVlan(Tag),
    PopVlan,
    Decap(Box<Decap>),
    Encap(Box<Encap>),
    Mirror(PortId),
    Count,
    Mark(u32),
    Limit(Box<Meter>),
}

#[derive(Debug)]
enum FinalAction {
    Fixed(Outcome),
    Rss(Box<RssAction>),
}

impl Program {
    /// Compiles the actions of a rule. The rule is already checked, so this cannot fail.
    pub fn compile(rule: &Rule) -> Self {
        let (mut steps, mut final_action) = (Vec::new(), FinalAction::Fixed(Outcome::Next));
        // Computed only if needed: collecting the fields costs more than the rest, and most rules do not need
        // them.
        let set = std::cell::LazyCell::new(|| rule.fields());
        let mut decapsulated = false;
        for action in rule.actions() {
            match action {
                Action::Set { field, value } => rewrite_for(&mut steps, false).set(*field, *value),
                Action::DecTtl => rewrite_for(&mut steps, true).dec_ttl(ip_version(&set, decapsulated)),
                Action::PushVlan(tag) => steps.push(Step::PushVlan(*tag)),
                Action::PopVlan => steps.push(Step::PopVlan),
                Action::Reformat(reformat) => match reformat.kind() {
                    ReformatKind::L2TunnelToL2 | ReformatKind::L3TunnelToL2 => {
                        decapsulated = true;
                        steps.push(Step::Decap(Box::new(Decap::new(reformat, &set))));
                    }
                    ReformatKind::L2ToL2Tunnel | ReformatKind::L2ToL3Tunnel => {
                        steps.extend(Encap::new(reformat).map(|encap| Step::Encap(Box::new(encap))));
                    }
                },
                Action::Mirror(port) => steps.push(Step::Mirror(*port)),
                Action::Count => steps.push(Step::Count),
                Action::Mark(mark) => steps.push(Step::Mark(*mark)),
                Action::Limit(limit) => steps.push(Step::Limit(Box::new(Meter::new(limit)))),
                Action::Queue(queue) => final_action = FinalAction::Fixed(Outcome::Queue(*queue)),
                Action::Rss(rss) => final_action = FinalAction::Rss(Box::new(RssAction::new(rss))),
                Action::Drop => final_action = FinalAction::Fixed(Outcome::Drop(DropReason::RuleDrop)),
                Action::Kernel => final_action = FinalAction::Fixed(Outcome::Kernel),
                Action::Redirect(port) => final_action = FinalAction::Fixed(Outcome::Redirect(*port)),
                // A new action must be added here. Until then its rules drop all packets.
                _ => final_action = FinalAction::Fixed(Outcome::Drop(DropReason::RuleDrop)),
            }
        }
        Self { steps: steps.into(), final_action }
    }

    /// Compiles actions that use no headers, for packets that matched their rule in a NIC.
    pub(super) fn from_actions(actions: &[Action]) -> Self {
        let steps = actions.iter().filter_map(|action| match action {
            Action::Count => Some(Step::Count),
            Action::Mark(mark) => Some(Step::Mark(*mark)),
            _ => None,
        });
        Self { steps: steps.collect::<Vec<_>>().into(), final_action: FinalAction::Fixed(Outcome::Next) }
    }

    /// Returns whether a packet must be cut before the program runs on it. It is a superframe whose new UDP port would
    /// hide its tunnel, or name one that it does not have ([`wirepath_packet::superframe`]). `parsed` is as in
    /// [`Self::run`].
    #[inline]
    pub fn must_cut(&self, packet: &Packet, parsed: &Parsed) -> bool {
        if !packet.flags().contains(Flags::TX_SEGMENT) {
            return false;
        }
        let is_udp = |layers: &HeaderOffsets| layers.l4_type() == L4Type::Udp;
        let is_tunnel = parsed.inner().is_some() && is_udp(parsed.outer());
        let new_ports = self.steps.iter().filter_map(|step| match step {
            Step::Rewrite(rewrite) => rewrite.udp_dst(),
            _ => None,
        });
        let mut new_ports = new_ports.map(|port| Tunnels::ALL.on_port(port) != Tunnel::None);
        new_ports.any(|is_named| is_tunnel || is_named && is_udp(parsed.innermost()))
    }

    /// Runs the program on a packet. `parsed` is the parser's result for the packet in its present state.
    #[inline]
    pub fn run(&self, packet: &mut Packet, parsed: &Parsed, env: &mut impl Environment) -> Outcome {
        match (&self.steps[..], &self.final_action) {
            ([], FinalAction::Fixed(outcome)) => *outcome,
            _ => self.run_steps(packet, parsed, env),
        }
    }

    /// Returns the heap memory of the program in bytes, including the tables of RSS keys.
    pub fn heap_bytes(&self) -> usize {
        let final_action = if let FinalAction::Rss(spread) = &self.final_action { spread.heap_bytes() } else { 0 };
        self.steps.heap_bytes() + final_action
    }

    #[inline(never)]
    fn run_steps<E: Environment>(&self, packet: &mut Packet, parsed: &Parsed, env: &mut E) -> Outcome {
        let mut headers = Headers { outer: Some(*parsed.outer()), inner: parsed.inner().copied() };
        for step in &*self.steps {
            let done = match step {
                Step::Rewrite(rewrite) => rewrite.run(packet, &headers, env.pool()),
                Step::PushVlan(tag) => vlan_tags::push(packet, &mut headers, *tag),
                Step::PopVlan => vlan_tags::pop(packet, &mut headers),
                Step::Decap(decap) => decap.run(packet, &mut headers, parsed, env.pool()),
                Step::Encap(encap) => encap.run(packet, &mut headers, env.pool()),
                Step::Mirror(port) => {
                    mirror(packet, &headers, *port, env);
                    Ok(())
                }
                Step::Count => {
                    env.count(frame_len(packet));
                    Ok(())
                }
                Step::Mark(mark) => {
                    packet.set_mark(*mark);
                    Ok(())
                }
                Step::Limit(meter) => meter.run(frame_len(packet), env.now()),
            };
            if let Err(reason) = done {
                return Outcome::Drop(reason);
            }
        }
        match &self.final_action {
            FinalAction::Fixed(outcome) => *outcome,
            FinalAction::Rss(spread) => Outcome::Queue(spread.run(packet, &headers, env.toeplitz())),
        }
    }
}

impl Step {
    fn heap_bytes(&self) -> usize {
        match self {
            Self::Rewrite(rewrite) => size_of_val(&**rewrite),
            Self::Decap(decap) => decap.heap_bytes(),
            Self::Encap(encap) => encap.heap_bytes(),
            Self::Limit(meter) => size_of_val(&**meter),
            Self::PushVlan(_) | Self::PopVlan | Self::Mirror(_) | Self::Count | Self::Mark(_) => 0,
        }
    }
}

/// Returns the rewrite that another change can be merged into. A step that may drop packets (`dec-ttl`) stays
/// behind the steps that count them.
fn rewrite_for(steps: &mut Vec<Step>, may_drop: bool) -> &mut Rewrite {
    let aside = |step: &Step| !may_drop && matches!(step, Step::Count | Step::Mark(_));
    let last = steps.iter().rposition(|step| !aside(step)).filter(|&i| matches!(steps[i], Step::Rewrite(_)));
    let index = last.unwrap_or_else(|| {
        steps.push(Step::Rewrite(Box::default()));
        steps.len() - 1
    });
    match &mut steps[index] {
        Step::Rewrite(rewrite) => rewrite,
        _ => unreachable!("the index is that of a rewriting"),
    }
}

/// Returns the version of the outermost IP header at this point, as the pattern gives it.
fn ip_version(set: &FieldSet, decapsulated: bool) -> u8 {
    use wirepath_flow::{HeaderType, Key};
    set.get(Key::header_type(decapsulated.into(), HeaderType::Network)).map_or(0, |bits| bits.value as u8)
}

/// Header offsets while a program runs.
struct Headers {
    /// Headers of the frame itself; `None` if they are not known any more. The Ethernet header is at the
    /// start of the packet in any case.
    outer: Option<HeaderOffsets>,
    /// Headers inside the tunnel.
    inner: Option<HeaderOffsets>,
}

impl Headers {
    /// Updates the offsets after bytes were inserted or removed behind the Ethernet addresses.
    fn retagged(&mut self, by: i32) {
        self.outer = self.outer.and_then(|layers| layers.retagged(by));
        self.inner = self.inner.and_then(|layers| layers.moved(by));
    }

    /// Returns the frame's own IP header if it has this version.
    fn ip(&self, kind: L3Type) -> Result<&HeaderOffsets, DropReason> {
        self.outer.as_ref().filter(|layers| layers.l3_type() == kind).ok_or(DropReason::RuleMismatch)
    }
}

/// Returns the frame length in bytes, including a stripped VLAN tag.
#[inline(always)]
pub(super) fn frame_len(packet: &Packet) -> usize {
    packet.len() + if packet.vlan().is_some() { 4 } else { 0 }
}

const CHECKSUMS: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM);
const OUTER_CHECKSUMS: Flags = Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM);

/// Updates the header lengths for the transmitting NIC, if an offload needs them.
fn update_tx_layers(packet: &mut Packet, headers: &Headers) {
    if !packet.flags().intersects(CHECKSUMS.with(Flags::TX_SEGMENT)) {
        return;
    }
    let lengths = || {
        let innermost = headers.inner.or(headers.outer)?;
        let byte = |length: usize| u8::try_from(length).ok();
        let mut it = HeaderLengths::default();
        let start = headers.inner.map_or(0, |inner| inner.l2());
        it.l2_len = byte(innermost.l3().checked_sub(start)?)?;
        it.l3_len = byte(innermost.l4().checked_sub(innermost.l3())?)?;
        it.l4_len = byte(innermost.payload().checked_sub(innermost.l4())?)?;
        let mut outer_l3 = PtypeL3::Other;
        if let (Some(outer), Some(inner)) = (headers.outer, headers.inner) {
            it.outer_len = byte(inner.l2())?;
            it.outer_l2_len = byte(outer.l3())?;
            outer_l3 = l3(&outer);
        }
        Some(it.with_types(l3(&innermost), l4(&innermost), outer_l3))
    };
    packet.set_header_lengths(lengths().unwrap_or_default());
}

fn l3(layers: &HeaderOffsets) -> PtypeL3 {
    match layers.l3_type() {
        L3Type::Ipv4 => PtypeL3::Ipv4,
        L3Type::Ipv6 => PtypeL3::Ipv6,
        _ => PtypeL3::Other,
    }
}

fn l4(layers: &HeaderOffsets) -> PtypeL4 {
    match layers.l4_type() {
        L4Type::Tcp => PtypeL4::Tcp,
        L4Type::Udp => PtypeL4::Udp,
        _ => PtypeL4::Other,
    }
}

/// Makes the first `n` bytes contiguous and writable. A shared segment is copied.
fn pull_up_writable(packet: &mut Packet, n: usize, pool: Option<&Pool>) -> Result<(), DropReason> {
    if packet.data().len() >= n || packet.pull_up(n) {
        return Ok(());
    }
    if packet.len() >= n {
        let copy = pool.and_then(|pool| packet.duplicate(pool)).ok_or(DropReason::NoBuffer)?;
        *packet = copy;
    }
    if packet.data().len() >= n { Ok(()) } else { Err(DropReason::Truncated) }
}

/// Trims the packet to `end` bytes. A shared payload is copied first.
fn trim_end(packet: &mut Packet, end: usize, pool: Option<&Pool>) -> Result<(), DropReason> {
    if !packet.truncate(end) {
        let copy = pool.and_then(|pool| packet.duplicate(pool)).ok_or(DropReason::NoBuffer)?;
        *packet = copy;
        packet.truncate(end);
    }
    Ok(())
}

#[cold]
fn mirror(packet: &mut Packet, headers: &Headers, port: PortId, env: &mut impl Environment) {
    // A padded packet is copied, because a later action may have to trim it.
    let padded = headers.outer.is_none_or(|layers| layers.end() != packet.len());
    let deepest = headers.inner.or(headers.outer).map_or(0, |layers| layers.payload());
    let copy = env.pool().and_then(|pool| match packet.len() <= COPY_MAX || padded {
        true => packet.duplicate(pool),
        false => packet.clone_shared(PRIVATE_HEADERS.max(deepest), pool),
    });
    match copy {
        Some(copy) => env.mirror(port, copy),
        None => env.mirror_failed(DropReason::NoBuffer),
    }
}
