//! Steering: what becomes of a frame that arrives, and of one that leaves.
//!
//! Each port has tables for both directions, one for each priority; a frame meets them in that order, and the first entry that it fits
//! decides. [`rules`] has the commands and the kernel's checks, [`specs`] the rules of `ibv_create_flow`, [`table`] the tables,
//! [`headers`] and [`key`] the device's parser, [`reformat`] and [`modify`] what an entry does to a frame. Sources: Linux
//! `drivers/infiniband/hw/mlx5/fs.c`, `drivers/net/ethernet/mellanox/mlx5/core/fs_core.c`.

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

use crate::connectx::Wrong;
use crate::device::ObjectId;
use crate::frame::{self, Layers, Shape};
use crate::rules::NewMatcher;
use crate::slab::Slab;
use crate::topology::SteeringSpec;
use key::{Key, Needs, Registers};
use modify::Program;
use reformat::Reformat;
use table::{Destination, Mask, Place, Table};

/// Place of rules for groups among the priorities: behind those of programs, two for each priority that a program names.
const GROUP_PRIORITY: u8 = 64;
/// Place of the defaults.
const LEFTOVERS: u8 = GROUP_PRIORITY + 1;

/// Packets and bytes.
#[derive(Debug, Default)]
pub(super) struct Counter {
    packets: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    /// Packets of one length.
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

/// What an entry does.
#[derive(Clone, Debug, Default)]
struct Action {
    drop: bool,
    /// Tables behind have the packet as well.
    next_priority: bool,
    /// The packet leaves the rules of programs: only the defaults are behind the kernel's own.
    next_space: bool,
    tag: Option<u32>,
    reformat: Option<Arc<Reformat>>,
    modify: Option<Arc<Program>>,
}

impl Action {
    /// Why one entry cannot do both, for a rule whose match is there already.
    fn contradicts(&self, new: &Self) -> Option<String> {
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

/// What becomes of a frame that arrived.
#[derive(Debug)]
pub(super) enum Verdict {
    /// It goes to this queue pair, as it is, with this tag; the counter counts it.
    Queue { qp: ObjectId, tag: u32, counter: Option<Arc<Counter>> },
    /// A rule drops it.
    Drop,
    /// No rule has it.
    Miss,
    /// [`Steering::arrived`] has what goes where.
    Several,
}

/// A frame on its way to a queue pair, in [`Arrived::bytes`].
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    pub(super) qp: ObjectId,
    pub(super) tag: u32,
    /// Register B.
    pub(super) metadata: u32,
    frame: std::ops::Range<usize>,
}

/// A frame that became several, or another.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    pub(super) deliveries: Vec<Delivery>,
    bytes: Vec<u8>,
    counters: Vec<(Arc<Counter>, usize)>,
    pub(super) dropped: bool,
}

impl Arrived {
    pub(super) fn frame(&self, delivery: &Delivery) -> &[u8] {
        &self.bytes[delivery.frame.clone()]
    }

    /// The frame is done with: what was counted counts.
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
            // A queue pair that several rules name has one copy.
            let frame = start..self.bytes.len();
            if !self.deliveries.iter().any(|other| other.qp == qp && other.frame == frame) {
                self.deliveries.push(Delivery { qp, tag, metadata, frame });
            }
        }
    }
}

/// What becomes of a frame that leaves.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It goes as it is.
    Unchanged,
    /// [`Steering::sent`] has what goes in its place.
    Changed,
    /// A rule drops it.
    Drop,
}

/// The tables of one direction of a port.
#[derive(Debug, Default)]
struct Direction {
    /// By priority.
    tables: Vec<(u8, Table)>,
    /// Parts of keys that any mask looks at.
    needs: Needs,
    /// Bits of keys that any mask looks at.
    bits: Option<Box<Key>>,
    /// The last frame that went to a queue pair as it was, as far as any mask looks at it, and what became of it. The next is often alike.
    last: Option<Plain>,
}

/// A [`Verdict::Queue`].
#[derive(Clone, Debug)]
struct Plain {
    likeness: Shape,
    /// Where the headers are of all such frames.
    layers: Layers,
    qp: ObjectId,
    tag: u32,
    counter: Option<Arc<Counter>>,
}

impl Needs {
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

    /// A mask is in a table by now.
    fn look_at(&mut self, mask: &Mask) {
        self.needs = self.needs.and(mask);
        let bits = self.bits.get_or_insert_with(|| Box::new(Key::NOTHING));
        for (at, word) in mask.words() {
            bits.0[usize::from(*at)] |= word;
        }
        self.last = None;
    }

    fn remove(&mut self, priority: u8, place: &Place, rule: ObjectId) {
        self.last = None;
        if let Ok(at) = self.tables.binary_search_by_key(&priority, |(priority, _)| *priority) {
            self.tables[at].1.remove(place, rule);
            if self.tables[at].1.is_empty() {
                self.tables.remove(at);
                let tables = std::mem::take(&mut self.tables);
                (self.needs, self.bits) = Default::default();
                tables.iter().flat_map(|(_, table)| table.masks()).for_each(|mask| self.look_at(mask));
                self.tables = tables;
            }
        }
    }
}

#[derive(Debug, Default)]
struct Port {
    ingress: Direction,
    egress: Direction,
    /// Rules that have a copy of everything, and where it goes.
    sniffers: Vec<(ObjectId, ObjectId)>,
}

/// A rule, by where its entries are.
#[derive(Debug, Default)]
struct Rule {
    port: usize,
    egress: bool,
    places: Vec<(u8, Place)>,
    /// Counters whose description it keeps.
    counters: Option<ObjectId>,
}

/// A flow action.
#[derive(Debug)]
enum FlowAction {
    Modify(Arc<Program>),
    Reformat(Arc<Reformat>),
}

/// A set of counters of verbs.
#[derive(Debug, Default)]
struct Counters {
    counter: Arc<Counter>,
    /// What each number of the set is: bytes, or packets; and where it stands.
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
    /// Flow counters of the firmware, in bulks.
    bulks: Slab<Vec<Arc<Counter>>>,
    supported: Key,
    /// Of the frame at hand.
    key: Key,
    /// Of a frame that became several.
    pub(super) arrived: Arrived,
    /// A frame that leaves changed.
    pub(super) sent: Vec<u8>,
    /// Frames that left, for those who have a copy of everything.
    overheard: Vec<(usize, Vec<u8>)>,
    /// Frames that an action does not apply to: they are dropped.
    pub(super) unfit: u64,
    /// Frames that a rule gave to the kernel, and that nobody had.
    pub(super) to_kernel: u64,
}

/// An entry to be made.
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
    /// With an error, if it is one of entries.
    fn wrong(mut self, wrong: Wrong) -> Self {
        match wrong {
            Wrong::Mask => {
                self.mask.forget_a_bit();
                self.value.keep(&self.mask);
            }
            // Two for each priority that a program names.
            Wrong::Order if self.priority < GROUP_PRIORITY => self.priority ^= 8,
            Wrong::Tag => self.action.tag = self.action.tag.map(|tag| tag ^ 1),
            Wrong::Order | Wrong::Checksum | Wrong::Length => {}
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
            arrived: Arrived::default(),
            sent: Vec::new(),
            overheard: Vec::new(),
            unfit: 0,
            to_kernel: 0,
        }
    }

    /// Rules of a port.
    pub(super) fn rules(&self, port: usize) -> usize {
        self.rules.iter().filter(|(_, rule)| rule.port == port).count()
    }

    /// Adds an entry for a rule.
    fn enter(&mut self, rule: ObjectId, new: NewEntry) -> Result<(u8, Place), (Errno, String)> {
        let invalid = |why: String| Err((Errno::INVAL, why));
        if let Some(at) = new.value.beyond(&new.mask) {
            return invalid(format!("the value has bits at byte {at:#x} that the mask does not have"));
        }
        let covered = new.mask.criteria();
        if covered & !new.criteria != 0 {
            return invalid(format!("the mask reaches into parts {covered:#x}, and {:#x} are enabled", new.criteria));
        }
        if new.criteria & !self.spec.match_parts != 0 {
            return invalid(format!(
                "parts {:#x} of the parameters; the device compares {:#x}",
                new.criteria, self.spec.match_parts
            ));
        }
        if let Some(at) = new.mask.beyond(&self.supported) {
            return invalid(format!("the device does not compare what is at byte {at:#x}"));
        }
        let new = if let Some(wrong) = self.spec.wrong { new.wrong(wrong) } else { new };
        let port = &mut self.ports[new.port];
        let direction = if new.egress { &mut port.egress } else { &mut port.ingress };
        let mask = Mask::new(&new.mask, new.criteria);
        let seen = mask.clone();
        let destination = Destination { rule, qp: new.qp, counter: new.counter };
        let size = self.spec.table_entries;
        let table = direction.table(new.priority, size);
        let place = table.add(mask, &new.value, new.action, destination);
        if table.is_empty() {
            direction.tables.retain(|(_, table)| !table.is_empty());
        }
        let place = place?;
        direction.look_at(&seen);
        Ok((new.priority, place))
    }

    /// Takes a rule out of its tables.
    fn leave(&mut self, id: ObjectId) {
        let Some(rule) = self.rules.remove(id) else { return };
        let port = &mut self.ports[rule.port];
        port.sniffers.retain(|(rule, _)| *rule != id);
        let direction = if rule.egress { &mut port.egress } else { &mut port.ingress };
        for (priority, place) in &rule.places {
            direction.remove(*priority, place, id);
        }
        if let Some(counters) = rule.counters.and_then(|counters| self.counters.get_mut(counters)) {
            counters.rules -= 1;
            if counters.rules == 0 {
                counters.described.clear();
            }
        }
    }

    /// Queue pair and tag of the first of these frames, which no rule can tell from the last one that went to a queue pair as it was, and
    /// how many of them are like it.
    #[inline]
    pub(super) fn remembered(&self, at: usize, frames: &[&[u8]]) -> Option<(usize, ObjectId, u32, &Layers)> {
        let port = &self.ports[at];
        let last = port.ingress.last.as_ref().filter(|_| port.sniffers.is_empty())?;
        let alike = last.likeness.leads(frames);
        (alike > 0).then_some((alike, last.qp, last.tag, &last.layers))
    }

    /// So many frames of [`Self::remembered`] count.
    #[inline]
    pub(super) fn count_remembered(&self, at: usize, packets: usize, length: usize) {
        if let Some(counter) = self.ports[at].ingress.last.as_ref().and_then(|last| last.counter.as_ref()) {
            counter.count(packets, length);
        }
    }

    /// Asks the rules about a frame that arrived.
    #[inline]
    pub(super) fn receive(&mut self, at: usize, frame: &[u8]) -> Verdict {
        let port = &mut self.ports[at];
        let ingress = &mut port.ingress;
        if port.sniffers.is_empty() {
            if ingress.tables.is_empty() {
                return Verdict::Miss;
            }
            self.key.fill(frame, ingress.needs, &Registers::default());
            match ingress.tables.iter().find_map(|(_, table)| table.find(&self.key)) {
                None => return Verdict::Miss,
                Some(entry) => {
                    if let [Destination { qp, counter, .. }] = &entry.destinations[..]
                        && entry.action.is_plain()
                    {
                        return match *qp {
                            Some(qp) if !entry.action.drop => {
                                let (tag, counter) = (entry.action.tag.unwrap_or(0), counter.clone());
                                let bits = ingress.bits.as_ref();
                                let likeness = bits.and_then(|bits| key::likeness(frame, ingress.needs, bits));
                                ingress.last = likeness.map(|likeness| {
                                    let layers = frame::parse(frame);
                                    Plain { likeness, layers, qp, tag, counter: counter.clone() }
                                });
                                Verdict::Queue { qp, tag, counter }
                            }
                            _ => {
                                if let Some(counter) = counter {
                                    counter.count(1, frame.len());
                                }
                                Verdict::Drop
                            }
                        };
                    }
                }
            }
        }
        self.receive_slowly(at, frame)
    }

    /// The same for frames that change, or go to several.
    fn receive_slowly(&mut self, at: usize, frame: &[u8]) -> Verdict {
        let Self { ports, arrived, spec, unfit, to_kernel, key, .. } = self;
        let port = &ports[at];
        arrived.deliveries.clear();
        arrived.bytes.clear();
        arrived.counters.clear();
        arrived.dropped = false;
        for (_, qp) in &port.sniffers {
            arrived.deliveries.push(Delivery { qp: *qp, tag: 0, metadata: 0, frame: 0..frame.len() });
        }
        if !port.sniffers.is_empty() {
            arrived.bytes.extend_from_slice(frame);
        }
        let mut packet = frame.to_vec();
        let mut registers = Registers::default();
        key.fill(&packet, port.ingress.needs, &registers);
        let mut from = 0;
        let mut left = false;
        let mut met = false;
        for (priority, table) in &port.ingress.tables {
            let Some(entry) = Some(table).filter(|_| *priority >= from).and_then(|table| table.find(key)) else {
                continue;
            };
            met = true;
            arrived.counters.extend(
                entry.destinations.iter().filter_map(|to| Some((Arc::clone(to.counter.as_ref()?), packet.len()))),
            );
            let action = &entry.action;
            if action.drop {
                arrived.dropped = true;
                break;
            }
            if action.reformat.is_some() || action.modify.is_some() {
                if change(action, &mut packet, &mut registers, spec).is_err() {
                    *unfit += 1;
                    arrived.dropped = true;
                    break;
                }
                key.fill(&packet, port.ingress.needs, &registers);
            }
            arrived.deliver(entry, &packet, registers.b);
            left = action.next_space;
            if left {
                from = LEFTOVERS;
            } else if !action.next_priority {
                break;
            }
        }
        if arrived.deliveries.is_empty() && !arrived.dropped {
            if !met {
                return Verdict::Miss;
            }
            *to_kernel += u64::from(left);
        }
        Verdict::Several
    }

    /// Whether frames that leave a port concern any rule.
    #[inline]
    pub(super) fn watches(&self, port: usize) -> bool {
        !self.ports[port].egress.tables.is_empty() || !self.ports[port].sniffers.is_empty()
    }

    /// Asks the rules about a frame that leaves, with what its descriptor said.
    pub(super) fn transmit(&mut self, at: usize, frame: &[u8], queue: u32, metadata: u32) -> Sent {
        let Self { ports, sent, spec, unfit, overheard, key, .. } = self;
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
            return Sent::Drop;
        }
        if !port.sniffers.is_empty() {
            overheard.push((at, if changed { sent.clone() } else { frame.to_vec() }));
        }
        if changed { Sent::Changed } else { Sent::Unchanged }
    }

    /// Frames that left, and queue pairs that have a copy of them.
    pub(super) fn take_overheard(&mut self) -> Vec<(usize, Vec<u8>, Vec<ObjectId>)> {
        let frames = std::mem::take(&mut self.overheard);
        let to = |port: usize| self.ports[port].sniffers.iter().map(|(_, qp)| *qp).collect();
        frames.into_iter().map(|(port, frame)| (port, frame, to(port))).collect()
    }
}

/// What an entry does to a packet: at ingress headers go first, at egress they come last.
fn change(
    action: &Action,
    packet: &mut Vec<u8>,
    registers: &mut Registers,
    spec: &SteeringSpec,
) -> Result<(), reformat::Unfit> {
    let reformat = action.reformat.as_ref();
    if let Some(reformat) = reformat.filter(|reformat| reformat.takes_off()) {
        reformat.apply(packet, spec.entropy)?;
    }
    if let Some(program) = &action.modify {
        program.apply(packet, registers);
        if spec.wrong == Some(Wrong::Checksum) {
            turn_over(packet, 11);
        }
    }
    if let Some(reformat) = reformat.filter(|reformat| !reformat.takes_off()) {
        reformat.apply(packet, spec.entropy)?;
        if spec.wrong == Some(Wrong::Length) {
            turn_over(packet, 3);
        }
    }
    Ok(())
}

/// The last bit of a byte of the outer IPv4 header, for errors on order.
fn turn_over(packet: &mut [u8], at: usize) {
    let outer = headers::outer(packet);
    if outer.version == 4 {
        packet[outer.l3 + at] ^= 1;
    }
}

/// Whether a mask looks at the bits that say whether layers are in order, which cost a sum over the packet.
fn looks_at_checks(mask: &Key) -> bool {
    key::ORDER.iter().any(|field| field.get(mask.bytes()) != 0 || field.inner().get(mask.bytes()) != 0)
}
