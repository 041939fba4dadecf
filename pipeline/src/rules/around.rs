//! Rules around the stages of a program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::Action;
use wirepath_pmd::packet::offload::Flags;
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::{PortId, ToKernel};
use wirepath_wire::{Parsed, Parser};

use super::hardware::{Tagged, Tags};
use super::program::tag_into_frame;
use super::{CacheStats, Environment, Hit, Outcome, RuleLookup, RuleTable, Toeplitz};
use crate::context::Context;
use crate::parsed::ParsedBatch;
use crate::runtime::PortInfo;
use crate::stage::Stage;

/// [`crate::Punt::code`] of packets that a rule passes to the kernel's network stack: the control thread hands them on.
pub const PUNT_TO_KERNEL: u32 = 0x6b65_726e;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// What every worker's [`Ruled`] stage knows of the ports.
#[derive(Debug)]
pub struct Around {
    /// How packets get to the kernel, for each port: a [`Way`]. It is certain only when the port runs.
    to_kernel: Box<[AtomicU8]>,
    /// Where copies for a mirror are made.
    pools: Box<[Pool]>,
    /// Worker of each receive queue, by port and queue.
    workers: Vec<Vec<usize>>,
    /// What is taken for a tunnel.
    parser: Parser,
    /// What packets say that have met a rule in their device, where there are devices that have rules.
    tags: Option<Arc<Tags>>,
    /// Whether a port's device has rules (of ingress or egress), for each port.
    in_device: Box<[AtomicBool]>,
    /// Longest frames that ports send.
    longest: Box<[usize]>,
}

impl Around {
    /// For ports that may exist on paper only. `workers` has the worker of each receive queue, by port and queue.
    pub fn new(ports: &[PortInfo], workers: Vec<Vec<usize>>, parser: Parser) -> Self {
        Self {
            to_kernel: ports.iter().map(|port| Way::number(port.capabilities.to_kernel).into()).collect(),
            pools: ports.iter().map(|port| port.pool.clone()).collect(),
            workers,
            // Whether a header checksum is right is for whoever the packet is addressed to.
            parser: Parser { verify_ipv4: false, ..parser },
            tags: None,
            in_device: ports.iter().map(|_| AtomicBool::new(false)).collect(),
            longest: ports.iter().map(|port| usize::from(port.mtu) + ETHERNET).collect(),
        }
    }

    /// With packets that have met rules in devices.
    pub(super) fn with_tags(mut self, tags: Arc<Tags>) -> Self {
        self.tags = Some(tags);
        self
    }

    /// From here on, marks of received packets are tags.
    pub(super) fn has_device(&self, port: PortId) {
        if let Some(flag) = self.in_device.get(usize::from(port)) {
            flag.store(true, Ordering::Release);
        }
    }

    /// The tags of a port whose device may have rules.
    #[inline(always)]
    fn tags_of(&self, port: PortId) -> Option<&Tags> {
        let tags = self.tags.as_deref()?;
        self.in_device.get(usize::from(port))?.load(Ordering::Acquire).then_some(tags)
    }

    /// Once the ports are started: how their packets get to the kernel.
    pub(super) fn started(&self, ports: &[PortInfo]) {
        for (port, way) in ports.iter().zip(&self.to_kernel) {
            way.store(Way::number(port.capabilities.to_kernel), Ordering::Relaxed);
        }
    }
}

/// Numbers of [`Around::to_kernel`].
struct Way;

impl Way {
    const NONE: u8 = 0;
    const BESIDE: u8 = 1;
    const BACK: u8 = 2;
    const INJECT: u8 = 3;

    fn number(to_kernel: ToKernel) -> u8 {
        match to_kernel {
            ToKernel::Beside => Self::BESIDE,
            ToKernel::Back => Self::BACK,
            ToKernel::InFront => Self::INJECT,
            ToKernel::No(_) | ToKernel::InFrontOnly(_) => Self::NONE,
        }
    }
}

/// Flow rules around a stage: what came in by a port meets the rules of ingress, what is left goes through the stage, and what that
/// sends meets the rules of egress.
///
/// - While there are rules of a direction, packets whose headers are wrong are dropped there with the reason: nobody could say which
///   rule they fit. (IPv4 header checksums are not looked at.) Without rules of a direction, nothing is parsed.
/// - A VLAN tag that the device left beside the frame ([`Packet::vlan`]) is written into it first.
/// - A packet that a rule gives to a queue of another worker goes on there, behind the rules of ingress.
/// - What a rule redirects at ingress meets the rules of egress of its new port. Copies of a mirror meet no rule.
/// - What the control thread sends ([`crate::ControlPlane::send`]: answers to ARP, say) meets no rule of egress.
/// - All of a packet's way through one worker is under the rules of one moment. A packet that is handed over meets those of egress
///   at the other worker, a turn later: a change in between holds for that half of its way.
#[derive(Debug)]
pub struct Ruled<S> {
    stage: S,
    ingress: RuleLookup,
    egress: RuleLookup,
    parsed: ParsedBatch,
    toeplitz: Toeplitz,
    around: Arc<Around>,
    worker: usize,
}

impl<S> Ruled<S> {
    /// Around the stage of a worker: `table` belongs to whoever changes it, which [`super::RuleControl`] does for a whole list.
    pub fn new(stage: S, table: &mut RuleTable, around: Arc<Around>, worker: usize) -> Self {
        let (ingress, egress) = table.lookups();
        Self { stage, ingress, egress, parsed: ParsedBatch::new(), toeplitz: Toeplitz::default(), around, worker }
    }

    /// The stage inside.
    pub fn inner(&mut self) -> &mut S {
        &mut self.stage
    }

    /// What the caches did, at ingress and at egress.
    pub fn stats(&self) -> [CacheStats; 2] {
        [self.ingress.stats(), self.egress.stats()]
    }
}

impl<S: Stage> Stage for Ruled<S> {
    #[inline]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        // The version first, for both directions: whoever sees the rules of a change sees that there are some.
        self.ingress.pin(context.guard());
        let egress = self.egress.has_rules(context.guard());
        context.core.holding = egress;
        if let Some(port) = context.in_port() {
            if self.around.tags_of(port).is_some() {
                self.at_device_ingress(context, batch);
            } else if self.ingress.has_rules(context.guard()) {
                self.at_ingress(context, batch);
            }
        }
        if !batch.is_empty() {
            self.stage.process(context, batch);
        }
        if egress {
            // What the stage left leaves by its output port.
            context.forward(batch);
            context.core.holding = false;
            self.at_egress(context);
        }
    }
}

impl<S> Ruled<S> {
    fn at_ingress(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let Self { ingress, parsed, toeplitz, around, worker, .. } = self;
        tags_into_frames(context, batch);
        parsed.parse(&around.parser, context, batch);
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..batch.len()];
        ingress.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        if found.iter().all(Option::is_none) {
            return;
        }
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let i = at;
            at += 1;
            let Some(hit) = found[i] else { return Some(packet) };
            let pool = around.pools.get(usize::from(packet.in_port()));
            let outcome = run(context, &mut packet, &parsed.as_slice()[i], pool, toeplitz, hit);
            enter(context, around, *worker, packet, outcome)
        });
    }

    /// The same where some packets have met their rule in the device: these say so, and nothing is looked up for them. All keep their
    /// order.
    #[cold]
    #[inline(never)]
    fn at_device_ingress(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        if batch.iter().all(|packet| packet.mark().is_none()) {
            if self.ingress.has_rules(context.guard()) {
                self.at_ingress(context, batch);
            }
            return;
        }
        tags_into_frames(context, batch);
        let Self { ingress, egress, parsed, toeplitz, around, worker, .. } = self;
        let guard = context.guard();
        let Some(tags) = around.tags.as_deref() else { return };
        let rules = ingress.has_rules(guard);
        // In their order: packets that have met their rule, and places for those that have not.
        let mut packets: [Option<Packet>; BATCH] = std::array::from_fn(|_| None);
        let mut known: [Option<&Tagged>; BATCH] = [None; BATCH];
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let mut places = [0; BATCH];
        let mut apart = Batch::new();
        let mut count = 0;
        batch.filter_map(|mut packet| {
            let tag = packet.mark().and_then(|tag| tags.get(guard, tag));
            // A tag is no mark.
            packet.set_flags(packet.flags().without(Flags::MARK));
            known[count] = tag;
            if tag.is_some() {
                packets[count] = Some(packet);
            } else {
                if rules && let Err(error) = around.parser.parse_chain(packet.data(), packet.len()) {
                    context.drop(packet, DropReason::from(error));
                    return None;
                }
                places[apart.len()] = count;
                let _ = apart.push(packet);
            }
            count += 1;
            None
        });
        if rules && !apart.is_empty() {
            // None is dropped here: they were looked at.
            parsed.parse(&around.parser, context, &mut apart);
            ingress.find(guard, context.now(), apart.as_slice(), parsed.as_slice(), &mut found[..apart.len()]);
        }
        let mut at = 0;
        apart.drain_front(apart.len(), |packet| {
            packets[places[at]] = Some(packet);
            at += 1;
        });
        let mut at = 0;
        for (packet, known) in packets.into_iter().zip(known) {
            let Some(mut packet) = packet else { continue };
            let outcome = match known {
                // Both directions have the same records.
                Some(entry) => met(context, around, egress, toeplitz, &mut packet, entry),
                None => {
                    let (hit, headers) = (found[at], &parsed.as_slice().get(at));
                    at += 1;
                    let pool = around.pools.get(usize::from(packet.in_port()));
                    match (hit, headers) {
                        (Some(hit), Some(headers)) => run(context, &mut packet, headers, pool, toeplitz, hit),
                        _ => Outcome::Next,
                    }
                }
            };
            if let Some(packet) = enter(context, around, *worker, packet, outcome) {
                // There is room: it came from there.
                let _ = batch.push(packet);
            }
        }
    }

    fn at_egress(&mut self, context: &mut Context<'_>) {
        let mut held = std::mem::take(&mut context.core.held);
        let mut batch = Batch::new();
        let mut packets = held.drain(..).peekable();
        while packets.peek().is_some() {
            while !batch.is_full()
                && let Some(packet) = packets.next()
            {
                // There is room.
                let _ = batch.push(packet);
            }
            self.leave(context, &mut batch);
        }
        drop(packets);
        // Its memory is kept.
        context.core.held = held;
    }

    /// A batch of packets that leave by their output ports.
    fn leave(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let Self { ingress, egress, parsed, toeplitz, around, .. } = self;
        tags_into_frames(context, batch);
        parsed.parse(&around.parser, context, batch);
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..batch.len()];
        egress.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let i = at;
            at += 1;
            let Some(hit) = found[i] else { return Some(packet) };
            if around.tags_of(packet.out_port()).is_some() && to_device(context, around, ingress, &mut packet, hit) {
                return Some(packet);
            }
            let pool = around.pools.get(usize::from(packet.out_port()));
            match run(context, &mut packet, &parsed.as_slice()[i], pool, toeplitz, hit) {
                // Queues are of receiving; rules of egress have none.
                Outcome::Next | Outcome::Queue(_) => return Some(packet),
                Outcome::Drop(reason) => context.drop(packet, reason),
                Outcome::Redirect(port) => {
                    packet.set_out_port(port);
                    return Some(packet);
                }
                Outcome::Kernel => to_kernel(context, around, packet),
            }
            None
        });
        context.forward(batch);
    }
}

#[inline]
fn run(
    context: &mut Context<'_>,
    packet: &mut Packet,
    parsed: &Parsed,
    pool: Option<&Pool>,
    toeplitz: &Toeplitz,
    hit: Hit<'_>,
) -> Outcome {
    hit.program().run(packet, parsed, &mut Surroundings { context, pool, toeplitz, hit })
}

/// What becomes of a packet that a rule at ingress has decided about; `Some`: it goes on here.
#[inline]
fn enter(
    context: &mut Context<'_>,
    around: &Around,
    worker: usize,
    packet: Packet,
    outcome: Outcome,
) -> Option<Packet> {
    match outcome {
        Outcome::Next => return Some(packet),
        Outcome::Drop(reason) => context.drop(packet, reason),
        Outcome::Redirect(port) => context.send(port, packet),
        Outcome::Kernel => to_kernel(context, around, packet),
        Outcome::Queue(queue) => {
            let queues = around.workers.get(usize::from(packet.in_port()));
            // Of a queue that is not there, the packet stays here: such rules are refused.
            let to = queues.and_then(|queues| queues.get(usize::from(queue))).copied().unwrap_or(worker);
            if to == worker {
                return Some(packet);
            }
            context.hand_over(to, packet);
        }
    }
    None
}

/// What is left to do with a packet that has met a rule in its device.
fn met(
    context: &mut Context<'_>,
    around: &Around,
    lookup: &RuleLookup,
    toeplitz: &Toeplitz,
    packet: &mut Packet,
    entry: &Tagged,
) -> Outcome {
    let Some(record) = entry.record else {
        packet.set_mark(entry.own);
        return Outcome::Next;
    };
    // Its record is kept as long as packets may carry the tag.
    let Some(hit) = lookup.met(context.guard(), context.now(), record) else { return Outcome::Next };
    let mut parsed = Parsed::default();
    if entry.looks {
        match around.parser.parse_chain(packet.data(), packet.len()) {
            Ok(headers) => parsed = headers,
            Err(error) => return Outcome::Drop(DropReason::from(error)),
        }
    }
    if entry.counts {
        hit.count(packet.len());
    }
    let pool = around.pools.get(usize::from(packet.in_port()));
    let program = entry.rest.as_ref().unwrap_or_else(|| hit.program());
    program.run(packet, &parsed, &mut Surroundings { context, pool, toeplitz, hit })
}

/// Tells the device of a packet's output port what to do with it instead of doing it; whether that is so.
#[cold]
fn to_device(context: &Context<'_>, around: &Around, lookup: &RuleLookup, packet: &mut Packet, hit: Hit<'_>) -> bool {
    let number = lookup.egress_number(context.guard(), hit);
    let flags = packet.flags().without(Flags::TX_METADATA);
    packet.set_flags(flags);
    if number == 0 {
        return false;
    }
    let mut header = 0;
    let mut counts = false;
    for action in hit.rule().actions() {
        match action {
            Action::Reformat(reformat) => header = reformat.bytes().len(),
            Action::Count => counts = true,
            _ => {}
        }
    }
    // What the device would do twice, and what would be too long: software knows what to do with that.
    let longest = around.longest.get(usize::from(packet.out_port())).copied().unwrap_or_default();
    if packet.vlan().is_some() || flags.intersects(UNFINISHED) || packet.len() + header > longest {
        return false;
    }
    if counts {
        hit.count(packet.len());
    }
    packet.set_mark(number);
    packet.set_flags(packet.flags().with(Flags::TX_METADATA));
    true
}

/// What a sender has left to be done behind the rules.
const UNFINISHED: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM)
    .with(Flags::TX_SEGMENT);

#[cold]
fn to_kernel(context: &mut Context<'_>, around: &Around, packet: Packet) {
    let way = around.to_kernel.get(usize::from(packet.in_port()));
    match way.map_or(Way::NONE, |way| way.load(Ordering::Relaxed)) {
        Way::BESIDE => context.core.counters.to_kernel.add(1),
        Way::BACK => {
            context.core.counters.to_kernel.add(1);
            context.core.transmit(packet.in_port(), packet);
        }
        Way::INJECT => context.punt(packet, PUNT_TO_KERNEL),
        _ => context.drop(packet, DropReason::NoKernel),
    }
}

/// What the programs of a batch's rules work with.
struct Surroundings<'a, 'c, 'g> {
    context: &'a mut Context<'c>,
    pool: Option<&'a Pool>,
    toeplitz: &'a Toeplitz,
    hit: Hit<'g>,
}

impl Environment for Surroundings<'_, '_, '_> {
    fn now(&self) -> u64 {
        self.context.now()
    }

    fn pool(&self) -> Option<&Pool> {
        self.pool
    }

    fn toeplitz(&self) -> &Toeplitz {
        self.toeplitz
    }

    fn count(&mut self, bytes: usize) {
        self.hit.count(bytes);
    }

    fn mirror(&mut self, port: PortId, copy: Packet) {
        // Copies meet no rule.
        self.context.core.transmit(port, copy);
    }

    fn lost_copy(&mut self, reason: DropReason) {
        self.context.count_drops(reason, 1);
    }
}

/// Rules and the parser see every tag, also one that the device left beside the frame.
#[inline]
fn tags_into_frames(context: &mut Context<'_>, batch: &mut Batch) {
    if batch.iter().any(|packet| packet.vlan().is_some()) {
        batch.filter_map(|mut packet| match tag_into_frame(&mut packet) {
            Ok(()) => Some(packet),
            Err(reason) => {
                context.drop(packet, reason);
                None
            }
        });
    }
}
