//! The stage that applies flow rules before and after the stages of a program.

use std::any::{Any, TypeId};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wirepath_flow::{Action, Ports};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::Cutter;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::{KernelPunt, PortId};
use wirepath_wire::{Parsed, Parser};

use super::actions::insert_stripped_tag;
use super::offload::{TagEntry, TagTable};
use super::{Environment, FlowCacheStats, Hit, Outcome, RuleLookup, RuleTable, Toeplitz};
use crate::context::Context;
use crate::epoch::{Domain, Guard, Shared};
use crate::observe::TraceEnd;
use crate::parsed::{ParsedBatch, parse_packet};
use crate::runtime::PortInfo;
use crate::stage::Stage;
use crate::stage_timers::StageTimers;

/// [`crate::Punt::code`] of packets that a rule passes to the kernel's network stack. The control thread
/// injects them.
pub const PUNT_TO_KERNEL: u32 = 0x6b65_726e;

/// Length of an Ethernet header in bytes.
const ETHERNET: usize = 14;

/// Port data that the [`RuleStage`] of every worker uses.
#[derive(Debug)]
pub struct RulePorts {
    /// The ports by number. Workers read them.
    ports: Shared<Arc<[RulePort]>>,
    /// The same, for the control thread.
    current: Mutex<Arc<[RulePort]>>,
    /// Parser, with the UDP ports of tunnels.
    parser: Parser,
    /// Meaning of the tags that packets carry after they matched a rule in the NIC; `None` without rule
    /// hardware.
    tags: Option<Arc<TagTable>>,
}

/// Properties of a port that rules need.
#[derive(Debug)]
struct RulePort {
    /// [`PuntPath`]: how its packets reach the kernel. The value is final only when the port runs.
    to_kernel: AtomicU8,
    /// Pool that provides the buffers of mirror copies.
    pool: Pool,
    /// Worker of each receive queue.
    workers: Vec<usize>,
    /// True if the NIC of the port may hold rules of ingress or egress.
    offloaded: AtomicBool,
    /// Longest frame in bytes that the port sends.
    max_frame_len: usize,
}

impl RulePort {
    fn new(port: &PortInfo, workers: Vec<usize>, offloaded: bool) -> Self {
        Self {
            to_kernel: PuntPath::number(port.capabilities.kernel_punt).into(),
            pool: port.pool.clone(),
            workers,
            offloaded: offloaded.into(),
            max_frame_len: usize::from(port.mtu) + ETHERNET,
        }
    }
}

impl RulePorts {
    /// Creates the data of these ports, which need not be opened. `workers` is the worker of each receive
    /// queue, by port and queue. `domain` is that of the workers.
    pub fn new(domain: &Domain, ports: &[PortInfo], workers: Vec<Vec<usize>>, parser: Parser) -> Self {
        let workers = workers.into_iter().chain(std::iter::repeat_with(Vec::new));
        let list: Arc<[RulePort]> =
            ports.iter().zip(workers).map(|(port, workers)| RulePort::new(port, workers, false)).collect();
        Self {
            ports: Shared::new(domain, Arc::clone(&list)),
            current: Mutex::new(list),
            // The destination of a packet verifies the header checksum, not a forwarder.
            parser: Parser { verify_ipv4: false, ..parser },
            tags: None,
        }
    }

    /// Adds the tag table of NICs that hold rules.
    pub(super) fn with_tags(mut self, tags: Arc<TagTable>) -> Self {
        self.tags = Some(tags);
        self
    }

    fn current(&self) -> MutexGuard<'_, Arc<[RulePort]>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks of packets received on this port are tags from now on.
    pub(super) fn set_offloaded(&self, port: PortId) {
        if let Some(port) = self.current().get(port.index()) {
            port.offloaded.store(true, Ordering::Release);
        }
    }

    /// Takes over the ports of a running program. `workers` is the worker of each receive queue, by port and queue.
    pub(super) fn set_ports(&self, ports: &[PortInfo], workers: Vec<Vec<usize>>) {
        let mut current = self.current();
        let list = ports.iter().zip(workers).map(|(port, workers)| {
            let old = current.get(port.id.index()).filter(|_| !port.is_removed);
            RulePort::new(port, workers, old.is_some_and(|old| old.offloaded.load(Ordering::Acquire)))
        });
        *current = list.collect();
        self.ports.replace(Arc::clone(&current));
    }

    /// Returns a port by its index.
    #[inline(always)]
    fn port<'g>(&'g self, guard: Guard<'g>, index: usize) -> Option<&'g RulePort> {
        self.ports.read(guard).get(index)
    }

    /// Returns the pool of a port by its index.
    #[inline(always)]
    fn pool<'g>(&'g self, guard: Guard<'g>, index: usize) -> Option<&'g Pool> {
        self.port(guard, index).map(|port| &port.pool)
    }

    /// Returns the tag table if the NIC of this port may hold rules.
    #[inline(always)]
    fn tags_of_port<'g>(&'g self, guard: Guard<'g>, port: PortId) -> Option<&'g TagTable> {
        let tags = self.tags.as_deref()?;
        self.port(guard, port.index())?.offloaded.load(Ordering::Acquire).then_some(tags)
    }

    /// Updates the punt paths when the ports have started.
    pub(super) fn started(&self, ports: &[PortInfo]) {
        for (port, path) in ports.iter().zip(self.current().iter()) {
            path.to_kernel.store(PuntPath::number(port.capabilities.kernel_punt), Ordering::Relaxed);
        }
    }
}

/// Values of [`RulePort::to_kernel`].
struct PuntPath;

impl PuntPath {
    const NONE: u8 = 0;
    const COPY: u8 = 1;
    const LOOPBACK: u8 = 2;
    const INJECT: u8 = 3;

    fn number(to_kernel: KernelPunt) -> u8 {
        match to_kernel {
            KernelPunt::Copy => Self::COPY,
            KernelPunt::Loopback => Self::LOOPBACK,
            KernelPunt::XdpPass => Self::INJECT,
            KernelPunt::No(_) | KernelPunt::XdpPassOnly(_) => Self::NONE,
        }
    }
}

/// A stage that applies flow rules around another stage: ingress rules to received packets, then the inner
/// stage, then egress rules to the packets that it sends.
///
/// - While a direction has rules, a packet with malformed headers is dropped there with the reason, because
///   no rule can be matched reliably. IPv4 header checksums are not verified. Without rules for a direction,
///   nothing is parsed.
/// - A VLAN tag that the device stripped ([`Packet::vlan`]) is inserted into the frame first.
/// - A packet whose rule names a queue of another worker continues there, after the ingress rules.
/// - A packet that an ingress rule redirects meets the egress rules of its new port. Mirror copies meet no
///   rule.
/// - A packet that the control thread sends ([`crate::ControlPlane::send`], ARP replies for example) meets no
///   egress rule.
/// - A packet sees one version of the rules on its whole path through one worker. A packet enqueued to
///   another worker sees the version of that worker at egress, one iteration later. A change may take effect
///   between the two.
#[derive(Debug)]
pub struct RuleStage<S> {
    stage: S,
    ingress: RuleLookup,
    egress: RuleLookup,
    parsed: ParsedBatch,
    toeplitz: Toeplitz,
    rule_ports: Arc<RulePorts>,
    worker: usize,
}

impl<S> RuleStage<S> {
    /// Wraps the stage of a worker. `table` belongs to the code that changes rules; [`super::RuleControl`]
    /// does that for a rule list.
    pub fn new(stage: S, table: &mut RuleTable, rule_ports: Arc<RulePorts>, worker: usize) -> Self {
        let (ingress, egress) = table.lookups();
        Self { stage, ingress, egress, parsed: ParsedBatch::new(), toeplitz: Toeplitz::default(), rule_ports, worker }
    }

    /// Returns the inner stage.
    pub fn inner(&mut self) -> &mut S {
        &mut self.stage
    }

    /// Returns the flow cache statistics of ingress and egress.
    pub fn stats(&self) -> [FlowCacheStats; 2] {
        [self.ingress.stats(), self.egress.stats()]
    }
}

impl<S: Stage> Stage for RuleStage<S> {
    #[inline]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        // Both directions pin the version first: a worker that sees the rules of a change also sees that
        // rules exist.
        self.ingress.pin(context.guard());
        let egress = self.egress.has_rules(context.guard());
        context.state.collect_egress = egress;
        if let Some(port) = context.in_port() {
            let mut cut = Vec::new();
            if self.rule_ports.tags_of_port(context.guard(), port).is_some() {
                cut = self.process_offloaded_ingress(context, batch);
                context.end_part("ingress rules");
            } else if self.ingress.has_rules(context.guard()) {
                cut = self.process_ingress(context, batch);
                context.end_part("ingress rules");
            }
            if !cut.is_empty() {
                return cut.iter_mut().for_each(|batch| {
                    self.process(context, batch);
                    // The caller sends only the packets that remain in its own batch.
                    context.forward(batch);
                });
            }
        }
        if !batch.is_empty() {
            self.stage.process(context, batch);
            context.state.end_part(|| self.stage.name());
        }
        if egress {
            // Packets that the stage left in the batch go to their output ports.
            context.forward(batch);
            context.state.collect_egress = false;
            self.process_egress(context);
            context.end_part("egress rules");
        }
    }

    #[inline]
    fn idle(&mut self, context: &mut Context<'_>) {
        context.state.collect_egress = true;
        self.stage.idle(context);
        self.end_hook(context);
    }

    fn run_timers(&mut self, timers: &mut StageTimers, context: &mut Context<'_>) {
        context.state.collect_egress = true;
        self.stage.run_timers(timers, context);
        self.end_hook(context);
    }

    fn find_stage(&mut self, stage: TypeId) -> Option<&mut dyn Any>
    where
        Self: Sized + 'static,
    {
        if stage == TypeId::of::<Self>() { Some(self) } else { self.stage.find_stage(stage) }
    }

    fn name(&self) -> &'static str {
        ""
    }
}

impl<S> RuleStage<S> {
    /// Sends what a timer or an idle stage has sent, by the egress rules if there are any.
    #[inline(always)]
    fn end_hook(&mut self, context: &mut Context<'_>) {
        context.state.collect_egress = false;
        if !context.state.egress_packets.is_empty() {
            self.send_collected(context);
        }
    }

    #[cold]
    #[inline(never)]
    fn send_collected(&mut self, context: &mut Context<'_>) {
        self.ingress.pin(context.guard());
        if self.egress.has_rules(context.guard()) {
            return self.process_egress(context);
        }
        let mut packets = std::mem::take(&mut context.state.egress_packets);
        packets.drain(..).for_each(|packet| context.state.send_by_out_port(packet));
        context.state.egress_packets = packets;
    }

    /// Applies ingress rules. If one needs superframes cut, none has run: the batch is empty, and the returned batches
    /// have its packets with these frames.
    fn process_ingress(&mut self, context: &mut Context<'_>, batch: &mut Batch) -> Vec<Batch> {
        let Self { ingress, parsed, toeplitz, rule_ports, worker, .. } = self;
        insert_stripped_tags(context, batch);
        parsed.parse(&rule_ports.parser, context, batch);
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..batch.len()];
        ingress.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        if context.is_tracing() {
            report_hit(context, "ingress rules", found.first().copied().flatten());
        }
        if found.iter().all(Option::is_none) {
            return Vec::new();
        }
        if let Some(chosen) = must_cut(batch, found, parsed.as_slice()) {
            return cut_superframes(context, rule_ports, batch, chosen);
        }
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let i = at;
            at += 1;
            let Some(hit) = found[i] else { return Some(packet) };
            let pool = rule_ports.pool(context.guard(), index_or_first(packet.in_port()));
            let outcome = run(context, &mut packet, &parsed.as_slice()[i], pool, toeplitz, hit);
            report_outcome(context, "ingress rules", &packet, outcome);
            apply_ingress_outcome(context, rule_ports, *worker, packet, outcome)
        });
        Vec::new()
    }

    /// Applies ingress rules where some packets have already matched a rule in the NIC. Those packets carry a
    /// tag and are not looked up. The order of the packets is kept. Returns what [`Self::process_ingress`] returns.
    #[cold]
    #[inline(never)]
    fn process_offloaded_ingress(&mut self, context: &mut Context<'_>, batch: &mut Batch) -> Vec<Batch> {
        if batch.iter().all(|packet| packet.mark().is_none()) {
            let has_rules = self.ingress.has_rules(context.guard());
            return if has_rules { self.process_ingress(context, batch) } else { Vec::new() };
        }
        insert_stripped_tags(context, batch);
        let Self { ingress, egress, parsed, toeplitz, rule_ports, worker, .. } = self;
        let guard = context.guard();
        let Some(tags) = rule_ports.tags.as_deref() else { return Vec::new() };
        let rules = ingress.has_rules(guard);
        // Tagged packets stay at their index. Untagged packets are collected in `unmatched`, and `places`
        // holds their index.
        let mut packets: [Option<Packet>; BATCH] = std::array::from_fn(|_| None);
        let mut tagged: [Option<&TagEntry>; BATCH] = [None; BATCH];
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let mut marks = [None; BATCH];
        let mut places = [0; BATCH];
        let mut unmatched = Batch::new();
        let mut count = 0;
        batch.filter_map(|mut packet| {
            marks[count] = packet.mark();
            let tag = marks[count].and_then(|tag| tags.get(guard, tag));
            // A tag is not a mark of the user.
            packet.set_flags(packet.flags().without(Flags::MARK));
            tagged[count] = tag;
            if tag.is_some() {
                packets[count] = Some(packet);
            } else {
                if rules && let Err(error) = parse_packet(&rule_ports.parser, &mut packet) {
                    context.drop(packet, DropReason::from(error));
                    return None;
                }
                places[unmatched.len()] = count;
                let _ = unmatched.push(packet);
            }
            count += 1;
            None
        });
        if rules && !unmatched.is_empty() {
            // No packet is dropped here, because the parser accepted all of them above.
            parsed.parse(&rule_ports.parser, context, &mut unmatched);
            ingress.find(guard, context.now(), unmatched.as_slice(), parsed.as_slice(), &mut found[..unmatched.len()]);
        }
        let cuts = must_cut(&unmatched, &found, parsed.as_slice()).unwrap_or(0);
        let (mut chosen, mut at) = (0, 0);
        unmatched.drain_front(unmatched.len(), |packet| {
            chosen |= (cuts >> at & 1) << places[at];
            packets[places[at]] = Some(packet);
            at += 1;
        });
        for (i, (packet, entry)) in packets.iter_mut().zip(tagged).enumerate() {
            if let Some((packet, entry)) = packet.as_mut().zip(entry) {
                chosen |= u64::from(tagged_must_cut(context, rule_ports, egress, packet, entry)) << i;
            }
        }
        if chosen != 0 {
            // The frames are matched again, with the tags of the packets.
            for (packet, mark) in packets.into_iter().zip(marks) {
                let Some(mut packet) = packet else { continue };
                mark.into_iter().for_each(|mark| packet.set_mark(mark));
                let _ = batch.push(packet);
            }
            return cut_superframes(context, rule_ports, batch, chosen);
        }
        let mut at = 0;
        for (packet, tagged) in packets.into_iter().zip(tagged) {
            let Some(mut packet) = packet else { continue };
            if context.is_tracing() {
                report_tag(context, egress, tagged);
            }
            let outcome = match tagged {
                // Both directions share the records.
                Some(entry) => finish_offloaded(context, rule_ports, egress, toeplitz, &mut packet, entry),
                None => {
                    let (hit, headers) = (found[at], &parsed.as_slice().get(at));
                    at += 1;
                    if context.is_tracing() && rules {
                        report_hit(context, "ingress rules", hit);
                    }
                    let pool = rule_ports.pool(context.guard(), index_or_first(packet.in_port()));
                    match (hit, headers) {
                        (Some(hit), Some(headers)) => run(context, &mut packet, headers, pool, toeplitz, hit),
                        _ => Outcome::Next,
                    }
                }
            };
            report_outcome(context, "ingress rules", &packet, outcome);
            if let Some(packet) = apply_ingress_outcome(context, rule_ports, *worker, packet, outcome) {
                // The push succeeds, because the packet came from this batch.
                let _ = batch.push(packet);
            }
        }
        Vec::new()
    }

    fn process_egress(&mut self, context: &mut Context<'_>) {
        let mut held = std::mem::take(&mut context.state.egress_packets);
        let mut batch = Batch::new();
        let mut packets = held.drain(..).peekable();
        while packets.peek().is_some() {
            while !batch.is_full()
                && let Some(packet) = packets.next()
            {
                // The push succeeds, because the batch is not full.
                let _ = batch.push(packet);
            }
            self.egress_batch(context, &mut batch);
        }
        drop(packets);
        // The vector is returned to keep its allocation.
        context.state.egress_packets = held;
    }

    /// Applies egress rules to a batch of packets that leave by their output ports.
    fn egress_batch(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let Self { ingress, egress, parsed, toeplitz, rule_ports, .. } = self;
        insert_stripped_tags(context, batch);
        parsed.parse(&rule_ports.parser, context, batch);
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..batch.len()];
        egress.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        if let Some(chosen) = must_cut(batch, found, parsed.as_slice()) {
            let mut cut = cut_superframes(context, rule_ports, batch, chosen);
            return cut.iter_mut().for_each(|batch| self.egress_batch(context, batch));
        }
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let i = at;
            at += 1;
            if context.is_tracing() {
                report_hit(context, "egress rules", found[i]);
            }
            let Some(hit) = found[i] else { return Some(packet) };
            if packet.out_port().is_some_and(|port| rule_ports.tags_of_port(context.guard(), port).is_some())
                && offload_to_device(context, rule_ports, ingress, &mut packet, hit)
            {
                context.trace("egress rules", |text| text.write_str("the NIC carries the actions out"));
                return Some(packet);
            }
            let pool = rule_ports.pool(context.guard(), packet.out_port().map_or(usize::MAX, PortId::index));
            let outcome = run(context, &mut packet, &parsed.as_slice()[i], pool, toeplitz, hit);
            report_outcome(context, "egress rules", &packet, outcome);
            match outcome {
                // Receive queues exist only at ingress; the language refuses egress rules with a queue.
                Outcome::Next | Outcome::Queue(_) => return Some(packet),
                Outcome::Drop(reason) => context.drop(packet, reason),
                Outcome::Redirect(port) => {
                    packet.set_out_port(port);
                    return Some(packet);
                }
                Outcome::Kernel => to_kernel(context, rule_ports, packet),
            }
            None
        });
        context.forward(batch);
    }
}

/// Returns the packets that must be cut before their rules run, as bits; `None` if there are none.
#[inline]
fn must_cut(batch: &Batch, found: &[Option<Hit<'_>>], parsed: &[Parsed]) -> Option<u64> {
    let any = batch.iter().fold(false, |any, packet| any | packet.flags().contains(Flags::TX_SEGMENT));
    let chosen = || {
        let packets = batch.iter().zip(found).zip(parsed).enumerate();
        packets.fold(0, |chosen, (i, ((packet, hit), parsed))| {
            let cuts = hit.is_some_and(|hit| hit.program().must_cut(packet, parsed));
            chosen | u64::from(cuts) << i
        })
    };
    Some(if any { chosen() } else { 0 }).filter(|chosen| *chosen != 0)
}

/// Returns whether a packet with a tag must be cut before the actions of its rule. Only a rule of which the NIC leaves
/// all actions to workers may change headers.
fn tagged_must_cut(
    context: &Context<'_>,
    rule_ports: &RulePorts,
    lookup: &RuleLookup,
    packet: &mut Packet,
    entry: &TagEntry,
) -> bool {
    if !packet.flags().contains(Flags::TX_SEGMENT) || entry.rest.is_some() {
        return false;
    }
    let hit = entry.record.and_then(|record| lookup.hit_of_record(context.guard(), context.now(), record));
    let parsed = parse_packet(&rule_ports.parser, packet);
    hit.zip(parsed.ok()).is_some_and(|(hit, parsed)| hit.program().must_cut(packet, &parsed))
}

/// Empties the batch. Returns its packets in order, with frames in place of the chosen superframes.
#[cold]
#[inline(never)]
fn cut_superframes(context: &mut Context<'_>, rule_ports: &RulePorts, batch: &mut Batch, chosen: u64) -> Vec<Batch> {
    let mut all = vec![Batch::new()];
    let mut keep = |packet| {
        if all.last().is_none_or(Batch::is_full) {
            all.push(Batch::new());
        }
        // The push succeeds, because the batch is not full.
        if let Some(batch) = all.last_mut() {
            let _ = batch.push(packet);
        }
    };
    let mut at = 0;
    batch.drain_front(batch.len(), |packet| {
        let is_chosen = chosen >> at & 1 == 1;
        at += 1;
        if !is_chosen {
            return keep(packet);
        }
        let Some(pool) = rule_ports.pool(context.guard(), index_or_first(packet.in_port())) else {
            return context.drop(packet, DropReason::NoBuffer);
        };
        let mut cutter = match Cutter::new(packet, None) {
            Ok(cutter) => cutter,
            Err((packet, reason)) => return context.drop(packet, reason),
        };
        // One of the frames stands for the superframe.
        context.count_copies(cutter.remaining().saturating_sub(1));
        while let Some(frame) = cutter.next_frame(pool) {
            match frame {
                Ok(frame) => keep(frame),
                Err(reason) => context.count_drops(reason, 1),
            }
        }
    });
    all
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
    hit.program().run(packet, parsed, &mut ActionContext { context, pool, toeplitz, hit })
}

/// Reports the rule of the traced packet.
#[cold]
fn report_hit(context: &mut Context<'_>, stage: &'static str, hit: Option<Hit<'_>>) {
    let rule = hit.map(|hit| rule_text(context, hit));
    context.trace(stage, |text| match rule {
        Some(rule) => text.write_str(&rule),
        None => text.write_str("no rule matches"),
    });
}

/// Returns the number and the text of a rule, with the names of ports.
#[cold]
pub(crate) fn rule_text(context: &Context<'_>, hit: Hit<'_>) -> String {
    let ports = context.state.tap.observers().ports();
    let ports: Vec<(&str, PortId)> = (0..).zip(&ports).map(|(id, name)| (&**name, PortId::new(id))).collect();
    format!("rule {}: {}", hit.id(), hit.rule().named(Ports(&ports)))
}

/// Reports the tag with which the NIC marked the traced packet.
#[cold]
fn report_tag(context: &mut Context<'_>, lookup: &RuleLookup, tag: Option<&TagEntry>) {
    let Some(entry) = tag else { return };
    let (guard, now) = (context.guard(), context.now());
    let hit = entry.record.and_then(|record| lookup.hit_of_record(guard, now, record));
    let rule = hit.map(|hit| rule_text(context, hit));
    context.trace("NIC rules", |text| match rule {
        Some(rule) => write!(text, "matched {rule}"),
        None => write!(text, "matched a rule of the program itself, mark {:#x}", entry.implicit_mark),
    });
}

/// Reports what the actions of a rule made of the traced packet.
#[inline(always)]
fn report_outcome(context: &mut Context<'_>, stage: &'static str, packet: &Packet, outcome: Outcome) {
    if context.is_tracing() {
        report_traced_outcome(context, stage, packet, outcome);
    }
}

#[cold]
#[inline(never)]
fn report_traced_outcome(context: &mut Context<'_>, stage: &'static str, packet: &Packet, outcome: Outcome) {
    context.state.tap.trace_packet(stage, packet);
    match outcome {
        Outcome::Next => context.trace(stage, |text| text.write_str("the packet continues")),
        Outcome::Drop(_) => {}
        Outcome::Redirect(port) => {
            let name = context.port_name(port);
            context.trace(stage, |text| write!(text, "redirected to port {name}"));
        }
        Outcome::Queue(queue) => context.trace(stage, |text| write!(text, "to receive queue {queue}")),
        Outcome::Kernel => context.trace(stage, |text| text.write_str("to the kernel")),
    }
}

/// Applies the outcome of an ingress rule. Returns the packet if it continues on this worker.
#[inline]
fn apply_ingress_outcome(
    context: &mut Context<'_>,
    rule_ports: &RulePorts,
    worker: usize,
    packet: Packet,
    outcome: Outcome,
) -> Option<Packet> {
    match outcome {
        Outcome::Next => return Some(packet),
        Outcome::Drop(reason) => context.drop(packet, reason),
        Outcome::Redirect(port) => context.send(port, packet),
        Outcome::Kernel => to_kernel(context, rule_ports, packet),
        Outcome::Queue(queue) => {
            let queues = rule_ports.port(context.guard(), index_or_first(packet.in_port())).map(|port| &port.workers);
            // A rule that names a missing queue is refused earlier. If one appears anyway, the packet stays
            // on this worker.
            let to = queues.and_then(|queues| queues.get(usize::from(queue))).copied().unwrap_or(worker);
            if to == worker {
                return Some(packet);
            }
            context.enqueue_to_worker(to, packet);
        }
    }
    None
}

/// Runs the actions that the NIC left to software for a packet that matched a rule there.
fn finish_offloaded(
    context: &mut Context<'_>,
    rule_ports: &RulePorts,
    lookup: &RuleLookup,
    toeplitz: &Toeplitz,
    packet: &mut Packet,
    entry: &TagEntry,
) -> Outcome {
    let Some(record) = entry.record else {
        packet.set_mark(entry.implicit_mark);
        return Outcome::Next;
    };
    // The record is pinned as long as packets may carry the tag.
    let Some(hit) = lookup.hit_of_record(context.guard(), context.now(), record) else { return Outcome::Next };
    let mut parsed = Parsed::default();
    if entry.needs_headers {
        match parse_packet(&rule_ports.parser, packet) {
            Ok(headers) => parsed = headers,
            Err(error) => return Outcome::Drop(DropReason::from(error)),
        }
    }
    if entry.counts {
        hit.count(packet.len());
    }
    let pool = rule_ports.pool(context.guard(), index_or_first(packet.in_port()));
    let program = entry.rest.as_ref().unwrap_or_else(|| hit.program());
    program.run(packet, &parsed, &mut ActionContext { context, pool, toeplitz, hit })
}

/// Leaves the actions of an egress rule to the NIC of the output port by setting the transmit metadata.
/// Returns true if the NIC does them.
#[cold]
fn offload_to_device(
    context: &Context<'_>,
    rule_ports: &RulePorts,
    lookup: &RuleLookup,
    packet: &mut Packet,
    hit: Hit<'_>,
) -> bool {
    let number = lookup.tx_metadata(context.guard(), hit);
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
    // Software handles packets that the NIC would process twice and packets that would become too long.
    let max_frame_len = rule_ports
        .port(context.guard(), packet.out_port().map_or(usize::MAX, PortId::index))
        .map_or(0, |port| port.max_frame_len);
    if packet.vlan().is_some() || flags.intersects(UNFINISHED) || packet.len() + header > max_frame_len {
        return false;
    }
    if counts {
        hit.count(packet.len());
    }
    packet.set_mark(number);
    packet.set_flags(packet.flags().with(Flags::TX_METADATA));
    true
}

/// Transmit offloads that the sender requested and that are still to be done.
const UNFINISHED: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM)
    .with(Flags::TX_SEGMENT);

/// Returns the index of a port in the lists of [`RulePorts`]. A packet without an input port is treated as one
/// of the first port.
fn index_or_first(port: Option<PortId>) -> usize {
    port.map_or(0, PortId::index)
}

#[cold]
fn to_kernel(context: &mut Context<'_>, rule_ports: &RulePorts, packet: Packet) {
    let path = rule_ports.port(context.guard(), index_or_first(packet.in_port()));
    match path.map_or(PuntPath::NONE, |path| path.to_kernel.load(Ordering::Relaxed)) {
        PuntPath::COPY => {
            context.state.counters.to_kernel.add(1);
            if context.is_tracing() {
                context.state.tap.end(TraceEnd::Kernel);
            }
        }
        PuntPath::LOOPBACK => {
            let Some(port) = packet.in_port() else { return context.drop(packet, DropReason::NoKernel) };
            context.state.counters.to_kernel.add(1);
            context.state.counters.looped_back.add(1);
            context.state.transmit(port, packet);
        }
        PuntPath::INJECT => context.punt(packet, PUNT_TO_KERNEL),
        _ => context.drop(packet, DropReason::NoKernel),
    }
}

/// [`Environment`] of the actions of one packet.
struct ActionContext<'a, 'c, 'g> {
    context: &'a mut Context<'c>,
    pool: Option<&'a Pool>,
    toeplitz: &'a Toeplitz,
    hit: Hit<'g>,
}

impl Environment for ActionContext<'_, '_, '_> {
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
        self.context.count_copies(1);
        // Mirror copies meet no rule.
        self.context.state.transmit(port, copy);
    }

    fn mirror_failed(&mut self, reason: DropReason) {
        self.context.count_copies(1);
        self.context.count_drops(reason, 1);
    }
}

/// Inserts stripped VLAN tags into the frames, so that rules and the parser see every tag.
#[inline]
fn insert_stripped_tags(context: &mut Context<'_>, batch: &mut Batch) {
    if batch.iter().any(|packet| packet.vlan().is_some()) {
        batch.filter_map(|mut packet| match insert_stripped_tag(&mut packet) {
            Ok(()) => Some(packet),
            Err(reason) => {
                context.drop(packet, reason);
                None
            }
        });
    }
}
