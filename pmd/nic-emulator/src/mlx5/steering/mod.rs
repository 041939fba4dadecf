//! Flow steering: applies flow rules to received and sent frames.
//!
//! Each port has tables for both directions, one for each priority. A frame is looked up in order of
//! priority, and the first matching entry decides.
//!
//! - [`rules`]: commands, and the checks of the kernel
//! - [`specs`]: rules of `ibv_create_flow`
//! - [`table`]: flow tables
//! - [`headers`], [`key`]: the parser of the device
//! - [`reformat`], [`modify`]: changes of a packet
//!
//! Sources: Linux `drivers/infiniband/hw/mlx5/fs.c`, `drivers/net/ethernet/mellanox/mlx5/core/fs_core.c`.

mod headers;
mod key;
mod modify;
mod reformat;
mod rules;
mod specs;
mod table;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::connectx::SteeringBug;
use crate::device::ObjectId;
use crate::frame::{self, FramePattern, HeaderOffsets};
use crate::rules::NewMatcher;
use crate::slots::Slab;
use crate::topology::SteeringSpec;
use key::{Key, KeyParts, Registers};
use modify::Program;
use reformat::Reformat;
use table::{Destination, EntryRef, Mask, Table};

/// Internal priority of multicast rules, behind the rules of programs. Each priority that a program uses has
/// two internal ones.
const GROUP_PRIORITY: u8 = 64;
/// Internal priority of default rules.
const DEFAULT_PRIORITY: u8 = GROUP_PRIORITY + 1;

/// A flow counter of packets and bytes.
#[derive(Debug, Default)]
pub(super) struct Counter {
    packets: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    /// Counts packets of equal length.
    pub(super) fn count(&self, packets: usize, length: usize) {
        self.packets.fetch_add(packets as u64, Ordering::Relaxed);
        self.bytes.fetch_add((packets * length) as u64, Ordering::Relaxed);
    }

    fn clear(&self) {
        self.packets.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
    }

    fn read(&self) -> (u64, u64) {
        (self.packets.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

/// Action of a table entry.
#[derive(Clone, Debug, Default)]
struct Action {
    drop: bool,
    /// True if the lookup continues with the following priorities.
    next_priority: bool,
    /// True if the packet skips all other rules of programs, so that only default rules follow.
    next_space: bool,
    tag: Option<u32>,
    reformat: Option<Arc<Reformat>>,
    modify: Option<Arc<Program>>,
}

impl Action {
    /// Returns the reason why one entry cannot have both actions, for a new rule with an existing match.
    fn conflict_with(&self, new: &Self) -> Option<String> {
        fn differs<T>(ours: &Option<Arc<T>>, new: &Option<Arc<T>>) -> bool {
            match (ours, new) {
                (None, None) => false,
                (Some(ours), Some(new)) => !Arc::ptr_eq(ours, new),
                _ => true,
            }
        }
        if self.drop != new.drop || differs(&self.reformat, &new.reformat) || differs(&self.modify, &new.modify) {
            return Some("has other actions".to_owned());
        }
        let tag = self.tag.unwrap_or(0);
        new.tag.filter(|new| *new != tag).map(|new| format!("has tag {tag:#x}, not {new:#x}"))
    }

    fn join(&mut self, new: &Self) {
        self.next_priority |= new.next_priority;
        self.next_space |= new.next_space;
    }

    fn is_plain(&self) -> bool {
        !self.next_priority && !self.next_space && self.reformat.is_none() && self.modify.is_none()
    }
}

/// Result of the lookup for a received frame.
#[derive(Debug)]
pub(super) enum RxVerdict {
    /// The frame goes unchanged to this queue pair with this tag; the counter counts it.
    Queue { qp: ObjectId, tag: u32, counter: Option<Arc<Counter>> },
    /// A rule drops the frame.
    Drop,
    /// No rule matches the frame.
    Miss,
    /// The frame is changed or copied; [`Steering::rx_actions`] has the result.
    Multiple,
}

/// Delivery of a frame in [`RxActions::bytes`] to a queue pair.
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    pub(super) qp: ObjectId,
    pub(super) tag: u32,
    /// Metadata register B.
    pub(super) metadata: u32,
    frame: std::ops::Range<usize>,
}

/// Deliveries of a frame that was changed or copied.
#[derive(Debug, Default)]
pub(super) struct RxActions {
    pub(super) deliveries: Vec<Delivery>,
    bytes: Vec<u8>,
    counters: Vec<(Arc<Counter>, usize)>,
    pub(super) dropped: bool,
    /// The frame as the rules left it, if none of them kept it from the kernel.
    pub(super) left: Option<Vec<u8>>,
}

impl RxActions {
    pub(super) fn frame(&self, delivery: &Delivery) -> &[u8] {
        &self.bytes[delivery.frame.clone()]
    }

    /// Updates the counters of the matched rules.
    pub(super) fn count(&self) {
        for (counter, length) in &self.counters {
            counter.count(1, *length);
        }
    }

    fn deliver(&mut self, entry: &table::Entry, packet: &[u8], metadata: u32) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(packet);
        let tag = entry.action.tag.unwrap_or(0);
        for qp in entry.destinations.iter().filter_map(|destination| destination.qp) {
            // A queue pair that several rules name receives one copy.
            let frame = start..self.bytes.len();
            if !self.deliveries.iter().any(|other| other.qp == qp && other.frame == frame) {
                self.deliveries.push(Delivery { qp, tag, metadata, frame });
            }
        }
    }
}

/// Result of the lookup for a sent frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TxVerdict {
    /// The frame is sent unchanged.
    Unchanged,
    /// The frame in [`Steering::sent`] is sent instead.
    Changed,
    /// A rule drops the frame.
    Drop,
}

/// Flow tables of one direction of a port.
#[derive(Debug, Default)]
struct Direction {
    /// Tables with their priority, in ascending order.
    tables: Vec<(u8, Table)>,
    /// Parts that any mask compares.
    needs: KeyParts,
    /// Union of all masks.
    bits: Option<Box<Key>>,
    /// Pattern and result of the last frame that was delivered unchanged. The next frame often matches.
    last: Option<CachedVerdict>,
}

/// A cached [`RxVerdict::Queue`].
#[derive(Clone, Debug)]
struct CachedVerdict {
    pattern: FramePattern,
    /// Header offsets of all matching frames.
    layers: HeaderOffsets,
    qp: ObjectId,
    tag: u32,
    counter: Option<Arc<Counter>>,
}

impl KeyParts {
    fn and(self, mask: &Mask) -> Self {
        Self { parts: self.parts | mask.criteria, checks: self.checks || mask.checks }
    }
}

impl Direction {
    fn table(&mut self, priority: u8, size: u32) -> &mut Table {
        let at = match self.tables.binary_search_by_key(&priority, |(priority, _)| *priority) {
            Ok(at) => at,
            Err(at) => {
                self.tables.insert(at, (priority, Table::new(size)));
                at
            }
        };
        &mut self.tables[at].1
    }

    /// Records the mask of a new entry.
    fn add_mask(&mut self, mask: &Mask) {
        self.needs = self.needs.and(mask);
        let bits = self.bits.get_or_insert_with(|| Box::new(Key::NOTHING));
        for (at, word) in mask.words() {
            bits.0[usize::from(*at)] |= word;
        }
        self.last = None;
    }

    fn remove(&mut self, priority: u8, entry_ref: &EntryRef, rule: ObjectId) {
        self.last = None;
        if let Ok(at) = self.tables.binary_search_by_key(&priority, |(priority, _)| *priority) {
            self.tables[at].1.remove(entry_ref, rule);
            if self.tables[at].1.is_empty() {
                self.tables.remove(at);
                let tables = std::mem::take(&mut self.tables);
                (self.needs, self.bits) = Default::default();
                tables.iter().flat_map(|(_, table)| table.masks()).for_each(|mask| self.add_mask(mask));
                self.tables = tables;
            }
        }
    }
}

#[derive(Debug, Default)]
struct Port {
    ingress: Direction,
    egress: Direction,
    /// Sniffer rules, which receive a copy of every packet, and their queue pairs.
    sniffers: Vec<(ObjectId, ObjectId)>,
}

/// A rule and its table entries.
#[derive(Debug, Default)]
struct Rule {
    port: usize,
    egress: bool,
    entries: Vec<(u8, EntryRef)>,
    /// Counter set whose description this rule keeps alive.
    counters: Option<ObjectId>,
}

/// A flow action object.
#[derive(Debug)]
enum FlowAction {
    Modify(Arc<Program>),
    Reformat(Arc<Reformat>),
}

/// A counter set of verbs.
#[derive(Debug, Default)]
struct Counters {
    counter: Arc<Counter>,
    /// Description of each number of the set: true for bytes, false for packets, and its index.
    described: Vec<(bool, usize)>,
    rules: u32,
}

/// All tables and rules of a device.
#[derive(Debug)]
pub(super) struct Steering {
    spec: SteeringSpec,
    ports: Vec<Port>,
    rules: Slab<Rule>,
    matchers: Slab<NewMatcher>,
    actions: Slab<FlowAction>,
    counters: Slab<Counters>,
    /// Flow counters of the firmware, grouped in bulks.
    bulks: Slab<Vec<Arc<Counter>>>,
    supported: Key,
    /// Match parameters of the current frame.
    key: Key,
    /// Deliveries of the current frame, if it was changed or copied.
    pub(super) rx_actions: RxActions,
    /// The current sent frame, if it was changed.
    pub(super) sent: Vec<u8>,
    /// Copies of sent frames for sniffer rules, with their port.
    sniffed: Vec<(usize, Vec<u8>)>,
    /// Number of frames that were dropped because an action is not applicable.
    pub(super) unfit: u64,
    /// Number of frames that a rule passed to the kernel and that no default rule received.
    pub(super) to_kernel: u64,
}

/// Parameters of a new table entry.
#[derive(Debug)]
struct NewEntry {
    port: usize,
    egress: bool,
    priority: u8,
    mask: Key,
    criteria: u8,
    value: Key,
    action: Action,
    qp: Option<ObjectId>,
    counter: Option<Arc<Counter>>,
}

impl NewEntry {
    /// Applies a deliberate bug that concerns entries.
    fn with_bug(mut self, wrong: SteeringBug) -> Self {
        match wrong {
            SteeringBug::Mask => {
                self.mask.clear_last_bit();
                self.value.mask_with(&self.mask);
            }
            // Each priority of a program has two internal ones, so 8 corresponds to 4.
            SteeringBug::Order if self.priority < GROUP_PRIORITY => self.priority ^= 8,
            SteeringBug::Tag => self.action.tag = self.action.tag.map(|tag| tag ^ 1),
            SteeringBug::Order | SteeringBug::Checksum | SteeringBug::Length => {}
        }
        self
    }
}

impl Steering {
    pub(super) fn new(spec: SteeringSpec, ports: usize) -> Self {
        Self {
            spec,
            ports: (0..ports).map(|_| Port::default()).collect(),
            rules: Slab::default(),
            matchers: Slab::default(),
            actions: Slab::default(),
            counters: Slab::default(),
            bulks: Slab::default(),
            supported: key::supported(spec.integrity),
            key: key::supported(true),
            rx_actions: RxActions::default(),
            sent: Vec::new(),
            sniffed: Vec::new(),
            unfit: 0,
            to_kernel: 0,
        }
    }

    /// Returns the number of rules of a port.
    pub(super) fn rules(&self, port: usize) -> usize {
        self.rules.iter().filter(|(_, rule)| rule.port == port).count()
    }

    /// Adds an entry for a rule.
    fn insert_entry(&mut self, rule: ObjectId, new: NewEntry) -> Result<(u8, EntryRef), (Errno, String)> {
        let invalid = |why: String| Err((Errno::INVAL, why));
        if let Some(at) = new.value.first_byte_outside(&new.mask) {
            return invalid(format!("the value has bits at byte {at:#x} that the mask does not have"));
        }
        let covered = new.mask.criteria();
        if covered & !new.criteria != 0 {
            return invalid(format!("the mask covers parts {covered:#x}, but {:#x} are enabled", new.criteria));
        }
        if new.criteria & !self.spec.match_parts != 0 {
            return invalid(format!(
                "parts {:#x} are enabled; the device compares {:#x}",
                new.criteria, self.spec.match_parts
            ));
        }
        if let Some(at) = new.mask.first_byte_outside(&self.supported) {
            return invalid(format!("the device does not compare what is at byte {at:#x}"));
        }
        let new = if let Some(wrong) = self.spec.bug { new.with_bug(wrong) } else { new };
        let port = &mut self.ports[new.port];
        let direction = if new.egress { &mut port.egress } else { &mut port.ingress };
        let mask = Mask::new(&new.mask, new.criteria);
        let seen = mask.clone();
        let destination = Destination { rule, qp: new.qp, counter: new.counter };
        let size = self.spec.table_entries;
        let table = direction.table(new.priority, size);
        let entry_ref = table.add(mask, &new.value, new.action, destination);
        if table.is_empty() {
            direction.tables.retain(|(_, table)| !table.is_empty());
        }
        let entry_ref = entry_ref?;
        direction.add_mask(&seen);
        Ok((new.priority, entry_ref))
    }

    /// Removes a rule and its entries.
    fn remove_rule(&mut self, id: ObjectId) {
        let Some(rule) = self.rules.remove(id) else { return };
        let port = &mut self.ports[rule.port];
        port.sniffers.retain(|(rule, _)| *rule != id);
        let direction = if rule.egress { &mut port.egress } else { &mut port.ingress };
        for (priority, entry_ref) in &rule.entries {
            direction.remove(*priority, entry_ref, id);
        }
        if let Some(counters) = rule.counters.and_then(|counters| self.counters.get_mut(counters)) {
            counters.rules -= 1;
            if counters.rules == 0 {
                counters.described.clear();
            }
        }
    }

    /// Looks up the cached verdict. Returns the number of leading frames that match it, queue pair, tag and
    /// header offsets.
    #[inline]
    pub(super) fn cached_verdict(&self, at: usize, frames: &[&[u8]]) -> Option<(usize, ObjectId, u32, &HeaderOffsets)> {
        let port = &self.ports[at];
        let last = port.ingress.last.as_ref().filter(|_| port.sniffers.is_empty())?;
        let alike = last.pattern.matching_prefix(frames);
        (alike > 0).then_some((alike, last.qp, last.tag, &last.layers))
    }

    /// Counts frames of [`Self::cached_verdict`].
    #[inline]
    pub(super) fn count_cached(&self, at: usize, packets: usize, length: usize) {
        if let Some(counter) = self.ports[at].ingress.last.as_ref().and_then(|last| last.counter.as_ref()) {
            counter.count(packets, length);
        }
    }

    /// Looks up the rules for a received frame.
    #[inline]
    pub(super) fn receive(&mut self, at: usize, frame: &[u8]) -> RxVerdict {
        let port = &mut self.ports[at];
        let ingress = &mut port.ingress;
        if port.sniffers.is_empty() {
            if ingress.tables.is_empty() {
                return RxVerdict::Miss;
            }
            self.key.fill(frame, ingress.needs, &Registers::default());
            match ingress.tables.iter().find_map(|(_, table)| table.find(&self.key)) {
                None => return RxVerdict::Miss,
                Some(entry) => {
                    if let [Destination { qp, counter, .. }] = &entry.destinations[..]
                        && entry.action.is_plain()
                    {
                        return match *qp {
                            Some(qp) if !entry.action.drop => {
                                let (tag, counter) = (entry.action.tag.unwrap_or(0), counter.clone());
                                let bits = ingress.bits.as_ref();
                                let pattern = bits.and_then(|bits| key::pattern(frame, ingress.needs, bits));
                                ingress.last = pattern.map(|pattern| {
                                    let layers = frame::parse(frame);
                                    CachedVerdict { pattern, layers, qp, tag, counter: counter.clone() }
                                });
                                RxVerdict::Queue { qp, tag, counter }
                            }
                            _ => {
                                if let Some(counter) = counter {
                                    counter.count(1, frame.len());
                                }
                                RxVerdict::Drop
                            }
                        };
                    }
                }
            }
        }
        self.receive_slow_path(at, frame)
    }

    /// Looks up the rules for a frame that may be changed or copied.
    fn receive_slow_path(&mut self, at: usize, frame: &[u8]) -> RxVerdict {
        let Self { ports, rx_actions, spec, unfit, to_kernel, key, .. } = self;
        let port = &ports[at];
        rx_actions.deliveries.clear();
        rx_actions.bytes.clear();
        rx_actions.counters.clear();
        rx_actions.dropped = false;
        rx_actions.left = None;
        for (_, qp) in &port.sniffers {
            rx_actions.deliveries.push(Delivery { qp: *qp, tag: 0, metadata: 0, frame: 0..frame.len() });
        }
        if !port.sniffers.is_empty() {
            rx_actions.bytes.extend_from_slice(frame);
        }
        let mut packet = frame.to_vec();
        let mut registers = Registers::default();
        key.fill(&packet, port.ingress.needs, &registers);
        let mut from = 0;
        let mut left = false;
        // True once a rule lets no later one have the frame, and not the kernel either.
        let mut ended = false;
        let mut met = false;
        for (priority, table) in &port.ingress.tables {
            let Some(entry) = Some(table).filter(|_| *priority >= from).and_then(|table| table.find(key)) else {
                continue;
            };
            met = true;
            rx_actions.counters.extend(
                entry.destinations.iter().filter_map(|to| Some((Arc::clone(to.counter.as_ref()?), packet.len()))),
            );
            let action = &entry.action;
            if action.drop {
                (rx_actions.dropped, ended) = (true, true);
                break;
            }
            if action.reformat.is_some() || action.modify.is_some() {
                if change(action, &mut packet, &mut registers, spec).is_err() {
                    *unfit += 1;
                    (rx_actions.dropped, ended) = (true, true);
                    break;
                }
                key.fill(&packet, port.ingress.needs, &registers);
            }
            rx_actions.deliver(entry, &packet, registers.b);
            left = action.next_space;
            if left {
                from = DEFAULT_PRIORITY;
            } else if !action.next_priority {
                ended = true;
                break;
            }
        }
        if rx_actions.deliveries.is_empty() && !rx_actions.dropped {
            if !met {
                return RxVerdict::Miss;
            }
            *to_kernel += u64::from(left);
        }
        // Sniffers have copies, and a rule may let later ones have the frame too (DONT_TRAP).
        rx_actions.left = (!ended).then_some(packet);
        RxVerdict::Multiple
    }

    /// Returns true if any rule applies to sent frames of a port.
    #[inline]
    pub(super) fn has_egress_rules(&self, port: usize) -> bool {
        !self.ports[port].egress.tables.is_empty() || !self.ports[port].sniffers.is_empty()
    }

    /// Looks up the rules for a sent frame; `queue` and `metadata` come from its descriptor.
    pub(super) fn transmit(&mut self, at: usize, frame: &[u8], queue: u32, metadata: u32) -> TxVerdict {
        let Self { ports, sent, spec, unfit, sniffed, key, .. } = self;
        let port = &ports[at];
        let mut registers = Registers { a: metadata, queue, ..Registers::default() };
        key.fill(frame, port.egress.needs, &registers);
        let mut changed = false;
        let mut dropped = false;
        for (_, table) in &port.egress.tables {
            let Some(entry) = table.find(key) else { continue };
            let action = &entry.action;
            let length = if changed { sent.len() } else { frame.len() };
            for counter in entry.destinations.iter().filter_map(|to| to.counter.as_ref()) {
                counter.count(1, length);
            }
            if action.drop {
                dropped = true;
                break;
            }
            if action.reformat.is_some() || action.modify.is_some() {
                if !changed {
                    sent.clear();
                    sent.extend_from_slice(frame);
                    changed = true;
                }
                if change(action, sent, &mut registers, spec).is_err() {
                    *unfit += 1;
                    dropped = true;
                    break;
                }
                key.fill(sent, port.egress.needs, &registers);
            }
            if !action.next_priority {
                break;
            }
        }
        if dropped {
            return TxVerdict::Drop;
        }
        if !port.sniffers.is_empty() {
            sniffed.push((at, if changed { sent.clone() } else { frame.to_vec() }));
        }
        if changed { TxVerdict::Changed } else { TxVerdict::Unchanged }
    }

    /// Returns the copies of sent frames with the queue pairs that receive them.
    pub(super) fn take_sniffed(&mut self) -> Vec<(usize, Vec<u8>, Vec<ObjectId>)> {
        let frames = std::mem::take(&mut self.sniffed);
        let to = |port: usize| self.ports[port].sniffers.iter().map(|(_, qp)| *qp).collect();
        frames.into_iter().map(|(port, frame)| (port, frame, to(port))).collect()
    }
}

/// Applies the action of an entry to a packet. Headers are removed before other changes, and added after
/// them.
fn change(
    action: &Action,
    packet: &mut Vec<u8>,
    registers: &mut Registers,
    spec: &SteeringSpec,
) -> Result<(), reformat::NotApplicable> {
    let reformat = action.reformat.as_ref();
    if let Some(reformat) = reformat.filter(|reformat| reformat.is_decap()) {
        reformat.apply(packet, spec.entropy)?;
    }
    if let Some(program) = &action.modify {
        program.apply(packet, registers);
        if spec.bug == Some(SteeringBug::Checksum) {
            flip_last_bit(packet, 11);
        }
    }
    if let Some(reformat) = reformat.filter(|reformat| !reformat.is_decap()) {
        reformat.apply(packet, spec.entropy)?;
        if spec.bug == Some(SteeringBug::Length) {
            flip_last_bit(packet, 3);
        }
    }
    Ok(())
}

/// Inverts the last bit of a byte of the outer IPv4 header, for a deliberate bug.
fn flip_last_bit(packet: &mut [u8], at: usize) {
    let outer = headers::outer(packet);
    if outer.version == 4 {
        packet[outer.l3 + at] ^= 1;
    }
}

/// Returns true if a mask compares integrity bits, which requires a checksum of the packet.
fn matches_integrity_bits(mask: &Key) -> bool {
    key::ORDER.iter().any(|field| field.get(mask.bytes()) != 0 || field.inner().get(mask.bytes()) != 0)
}
