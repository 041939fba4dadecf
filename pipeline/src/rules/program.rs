//! What a rule does, made ready once: a [`Program`] runs on each packet that its rule has matched.
//!
//! Neighbouring `set` and `dec-ttl` actions become one masked write per header, with the part of the checksums that is known
//! beforehand; tunnel headers become templates of which only lengths, identification, source port and checksums are left to fill.
//!
//! # What actions mean
//! Actions run in order, each on the packet as the one before left it. What the language leaves open is settled here:
//!
//! - **set** writes into the outermost header of its kind (behind a `decap`: of what came out). IPv4, TCP, UDP, UDP-Lite, DCCP and
//!   ICMPv6 checksums change by the difference (RFC 1624): a right one stays right, a wrong one stays wrong, an absent UDP checksum
//!   stays absent, and a UDP checksum that comes out as 0 is sent as 0xffff. `dscp` leaves ECN alone. Later fragments have no
//!   checksum to mend. The checksum of a packet with a routing header that has segments left covers the last of them and not the
//!   destination in the IPv6 header (RFC 8200 section 8.1), and with a home address option that one and not the source (RFC 6275
//!   section 6.3). What authenticates addresses (AH, a TCP MD5 option) breaks, as with every translator.
//! - **dec-ttl** drops packets that arrive with TTL or hop limit 1 or 0 (`hop_limit`). Telling the sender is the application's.
//! - **VLAN tags**: a tag that the device left beside the frame is the outermost. `push-vlan` writes into the frame; a third tag is
//!   refused (`too_many_headers`), since nothing parses it.
//! - **decap** ends the tunnel as RFC 6040 section 4.2 asks: the outer ECN field is merged into the inner IP header, and congestion
//!   marked on a packet that does not understand it drops it (`bad_ecn`). Inner DSCP and TTL stay. What lies behind the tunnel's
//!   payload (Ethernet padding, bytes behind the UDP length) goes; `decap l3` also cuts to the inner IP length. Outer UDP and GRE
//!   checksums are not computed, as by no NIC; a device's verdict that one is wrong counts. Fragments of tunnel packets are dropped
//!   (`outer_fragment`).
//! - **encap** sends the header bytes as they are written but for: lengths; the IPv4 header checksum; the IPv4 identification of
//!   headers without DF, which is counted up; a UDP source port of **0**, which becomes entropy of the packet (49152 to 65535, equal
//!   for all fragments of a packet); a UDP checksum **other than 0**, which is computed. So DSCP, ECN (0 is the compatibility mode of
//!   RFC 6040 section 4.1) and TTL are those written, and over IPv6 a written checksum of 0 is the choice of RFC 6935. `encap l2`
//!   takes the frame whole, its padding and a tag beside it included; `encap l3` takes the IP packet alone. What the sender left to
//!   hardware (checksums) is finished first; a request for segmentation stays, and the metadata says where the headers went.
//! - **limit** is one bucket for the rule, whichever workers see its packets, full at first. A packet is counted with the length that
//!   it has here; one that is longer than `burst` never passes. Excess is dropped as `over_rate`.
//! - **count** counts packets that come to it, with the length that they have here. **mark** sets [`Packet::set_mark`].
//! - **mirror** sends a copy of the packet as it is here. Up to 512 bytes are copied; longer packets share their payload
//!   ([`Packet::share`]). If there is no buffer the copy is lost and counted (`no_buffer`), and the packet itself goes on.
//! - **rss** computes the Toeplitz hash over what is named and there, in the order source, destination, ports or SPI; notes it
//!   ([`Packet::set_rss_hash`]) and takes `queues[(hash mod 512) mod n]`. Fragments are hashed by addresses only. What has none of
//!   the fields goes to the first queue.
//!
//! A packet that lacks what an action changes does not fit the rule and is dropped as `rule_mismatch`; headers that do not lie in the
//! first segment, as `truncated`. Nothing panics.

mod decap;
mod encap;
mod limit;
mod rewrite;
mod rss;
mod tags;
#[cfg(test)]
mod tests;

use std::ops::Deref;

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::{Action, FieldSet, ReformatKind, Rule};
use wirepath_pmd::packet::offload::Flags;
use wirepath_pmd::packet::{L3 as MetaL3, L4 as MetaL4, Layers as MetaLayers, Packet, Pool};
use wirepath_pmd::port::PortId;
use wirepath_wire::{L3, L4, Layers, Parsed, Tag};

use decap::Decap;
use encap::Encap;
use limit::Meter;
use rewrite::Rewrite;
use rss::Spread;
pub use rss::{DEFAULT_RSS_KEY, RSS_KEY_LEN, Toeplitz};
pub(super) use tags::tag_into_frame;

/// What becomes of a packet when its program has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It goes on as if there had been no rule: at ingress to the next stage, at egress out of the port.
    Next,
    /// Nowhere, for this reason.
    Drop(DropReason),
    /// Out of this port.
    Redirect(PortId),
    /// To this receive queue of the port that it came in by.
    Queue(u16),
    /// To the kernel's own network stack.
    Kernel,
}

/// What a program needs from where it runs. Static dispatch: an engine implements it over its [`Context`](crate::Context).
pub trait Environment {
    /// Nanoseconds, of a clock that all workers share.
    fn now(&self) -> u64;

    /// Where the buffers of mirrored packets come from.
    fn pool(&self) -> Option<&Pool>;

    /// The receive hash of the port, for rules without a key of their own.
    fn toeplitz(&self) -> &Toeplitz;

    /// The rule's `count` saw a packet of so many bytes.
    fn count(&mut self, bytes: usize);

    /// A copy of the packet goes out of `port`.
    fn mirror(&mut self, port: PortId, copy: Packet);

    /// A copy could not be made.
    fn lost_copy(&mut self, reason: DropReason);
}

/// Packets up to this length are copied for a mirror: cheaper than counted references and a second segment for the device to gather.
const COPIED: usize = 512;
/// Bytes of longer packets that each copy has for itself: headers that later actions and stages change.
const PRIVATE: usize = 256;

/// The actions of one rule, compiled.
#[derive(Debug)]
pub struct Program {
    steps: Steps,
    fate: Fate,
}

/// A single step, as most rules have, lies in the program itself: one line of memory less for each packet.
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

/// What runs before the packet's fate. Two words.
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
enum Fate {
    Fixed(Outcome),
    Rss(Box<Spread>),
}

impl Program {
    /// Compiles a rule's actions. A rule is checked, so there is nothing to refuse.
    pub fn compile(rule: &Rule) -> Self {
        let (mut steps, mut fate) = (Vec::new(), Fate::Fixed(Outcome::Next));
        // Closing a pattern costs more than all the rest, and most rules need it for nothing here.
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
                Action::Queue(queue) => fate = Fate::Fixed(Outcome::Queue(*queue)),
                Action::Rss(rss) => fate = Fate::Rss(Box::new(Spread::new(rss))),
                Action::Drop => fate = Fate::Fixed(Outcome::Drop(DropReason::Ruled)),
                Action::Kernel => fate = Fate::Fixed(Outcome::Kernel),
                Action::Redirect(port) => fate = Fate::Fixed(Outcome::Redirect(*port)),
                // Whoever adds an action adds it here; until then its rules let nothing pass.
                _ => fate = Fate::Fixed(Outcome::Drop(DropReason::Ruled)),
            }
        }
        Self { steps: steps.into(), fate }
    }

    /// Of actions that look at no header, for packets whose rule has been found elsewhere.
    pub(super) fn of_actions(actions: &[Action]) -> Self {
        let steps = actions.iter().filter_map(|action| match action {
            Action::Count => Some(Step::Count),
            Action::Mark(mark) => Some(Step::Mark(*mark)),
            _ => None,
        });
        Self { steps: steps.collect::<Vec<_>>().into(), fate: Fate::Fixed(Outcome::Next) }
    }

    /// Runs on a packet. `parsed` is what the parser said of it as it is now.
    #[inline]
    pub fn run(&self, packet: &mut Packet, parsed: &Parsed, env: &mut impl Environment) -> Outcome {
        match (&self.steps[..], &self.fate) {
            ([], Fate::Fixed(outcome)) => *outcome,
            _ => self.run_steps(packet, parsed, env),
        }
    }

    /// Whether the program leaves headers and length of packets alone, so that what was parsed stays true.
    pub fn keeps_headers(&self) -> bool {
        let keeps = |step: &Step| matches!(step, Step::Mirror(_) | Step::Count | Step::Mark(_) | Step::Limit(_));
        self.steps.iter().all(keeps)
    }

    /// Heap memory that it takes, bytes. The tables of keys that rules bring themselves included.
    pub fn heap_bytes(&self) -> usize {
        let fate = if let Fate::Rss(spread) = &self.fate { spread.heap_bytes() } else { 0 };
        self.steps.heap_bytes() + fate
    }

    #[inline(never)]
    fn run_steps<E: Environment>(&self, packet: &mut Packet, parsed: &Parsed, env: &mut E) -> Outcome {
        let mut headers = Headers { outer: Some(*parsed.outer()), inner: parsed.inner().copied() };
        for step in &*self.steps {
            let done = match step {
                Step::Rewrite(rewrite) => rewrite.run(packet, &headers, env.pool()),
                Step::PushVlan(tag) => tags::push(packet, &mut headers, *tag),
                Step::PopVlan => tags::pop(packet, &mut headers),
                Step::Decap(decap) => decap.run(packet, &mut headers, parsed, env.pool()),
                Step::Encap(encap) => encap.run(packet, &mut headers, env.pool()),
                Step::Mirror(port) => {
                    mirror(packet, &headers, *port, env);
                    Ok(())
                }
                Step::Count => {
                    env.count(length(packet));
                    Ok(())
                }
                Step::Mark(mark) => {
                    packet.set_mark(*mark);
                    Ok(())
                }
                Step::Limit(meter) => meter.run(length(packet), env.now()),
            };
            if let Err(reason) = done {
                return Outcome::Drop(reason);
            }
        }
        match &self.fate {
            Fate::Fixed(outcome) => *outcome,
            Fate::Rss(spread) => Outcome::Queue(spread.run(packet, &headers, env.toeplitz())),
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

/// The rewriting that a further change can be part of. One that may drop packets (`dec-ttl`) stays behind what counts them.
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

/// What the pattern says of the outermost IP header at this point.
fn ip_version(set: &FieldSet, decapsulated: bool) -> u8 {
    use wirepath_pmd::flow::{Fact, Key};
    set.get(Key::fact(decapsulated.into(), Fact::Network)).map_or(0, |bits| bits.value as u8)
}

/// Where the headers are while a program runs.
struct Headers {
    /// The frame's own; `None` if that is not known any more (its Ethernet header begins with the packet all the same).
    outer: Option<Layers>,
    /// Those inside its tunnel.
    inner: Option<Layers>,
}

impl Headers {
    /// Notes that bytes were put between the Ethernet addresses and what follows them, or taken out.
    fn retagged(&mut self, by: i32) {
        self.outer = self.outer.and_then(|layers| layers.retagged(by));
        self.inner = self.inner.and_then(|layers| layers.moved(by));
    }

    /// The frame's own IP header, if it is of this kind.
    fn ip(&self, kind: L3) -> Result<&Layers, DropReason> {
        self.outer.as_ref().filter(|layers| layers.l3_kind() == kind).ok_or(DropReason::RuleMismatch)
    }
}

/// Bytes of the frame with a tag beside it.
#[inline(always)]
pub(super) fn length(packet: &Packet) -> usize {
    packet.len() + if packet.vlan().is_some() { 4 } else { 0 }
}

const CHECKSUMS: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM);
const OUTER_CHECKSUMS: Flags = Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM);

/// Tells the transmitting device where the headers are now, if it is asked for something that needs them.
fn note_layers(packet: &mut Packet, headers: &Headers) {
    if !packet.flags().intersects(CHECKSUMS.with(Flags::TX_SEGMENT)) {
        return;
    }
    let noted = || {
        let own = headers.inner.or(headers.outer)?;
        let byte = |length: usize| u8::try_from(length).ok();
        let mut it = MetaLayers::default();
        let start = headers.inner.map_or(0, |inner| inner.l2());
        it.l2_len = byte(own.l3().checked_sub(start)?)?;
        it.l3_len = byte(own.l4().checked_sub(own.l3())?)?;
        it.l4_len = byte(own.payload().checked_sub(own.l4())?)?;
        let mut outer_l3 = MetaL3::Other;
        if let (Some(outer), Some(inner)) = (headers.outer, headers.inner) {
            it.outer_len = byte(inner.l2())?;
            it.outer_l2_len = byte(outer.l3())?;
            outer_l3 = l3(&outer);
        }
        Some(it.with_kinds(l3(&own), l4(&own), outer_l3))
    };
    packet.set_layers(noted().unwrap_or_default());
}

fn l3(layers: &Layers) -> MetaL3 {
    match layers.l3_kind() {
        L3::Ipv4 => MetaL3::Ipv4,
        L3::Ipv6 => MetaL3::Ipv6,
        _ => MetaL3::Other,
    }
}

fn l4(layers: &Layers) -> MetaL4 {
    match layers.l4_kind() {
        L4::Tcp => MetaL4::Tcp,
        L4::Udp => MetaL4::Udp,
        _ => MetaL4::Other,
    }
}

/// Makes the first `n` bytes contiguous and writable, those of a shared segment by a copy.
fn reach(packet: &mut Packet, n: usize, pool: Option<&Pool>) -> Result<(), DropReason> {
    if packet.data().len() >= n || packet.pull_up(n) {
        return Ok(());
    }
    if packet.len() >= n {
        let copy = pool.and_then(|pool| packet.duplicate(pool)).ok_or(DropReason::NoBuffer)?;
        *packet = copy;
    }
    if packet.data().len() >= n { Ok(()) } else { Err(DropReason::Truncated) }
}

/// Cuts off what lies behind `end`. What is shared is copied first.
fn cut(packet: &mut Packet, end: usize, pool: Option<&Pool>) -> Result<(), DropReason> {
    if !packet.truncate(end) {
        let copy = pool.and_then(|pool| packet.duplicate(pool)).ok_or(DropReason::NoBuffer)?;
        *packet = copy;
        packet.truncate(end);
    }
    Ok(())
}

#[cold]
fn mirror(packet: &mut Packet, headers: &Headers, port: PortId, env: &mut impl Environment) {
    // What a later action may have to cut off must not be shared.
    let padded = headers.outer.is_none_or(|layers| layers.end() != packet.len());
    let deepest = headers.inner.or(headers.outer).map_or(0, |layers| layers.payload());
    let copy = env.pool().and_then(|pool| match packet.len() <= COPIED || padded {
        true => packet.duplicate(pool),
        false => packet.share(PRIVATE.max(deepest), pool),
    });
    match copy {
        Some(copy) => env.mirror(port, copy),
        None => env.lost_copy(DropReason::NoBuffer),
    }
}
