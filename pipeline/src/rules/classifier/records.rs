//! Rule records that workers read, and the counters that they write.

use std::ops::Range;
use std::sync::Arc;

use wirepath_flow::{Action, Rule};
use wirepath_packet::counters::Counter;

use crate::epoch::{Domain, Guard, Shared};
use crate::rules::{Program, RuleId};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Index that stands for no record.
pub(crate) const NO_RECORD: u32 = u32::MAX;
/// Value of [`Record::valid_from`] and [`Record::valid_until`] that is not reached.
pub(crate) const NEVER: u64 = u64::MAX;
/// Indices per chunk, and the most records of a chunk.
const CHUNK: usize = 1024;
/// Records of the smallest chunk.
const SMALLEST_CHUNK: usize = 16;

/// A rule as workers read it. One cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct InstalledRule {
    pub(crate) id: RuleId,
    pub(crate) rule: Arc<Rule>,
    pub(crate) program: Program,
    /// Index of the rule's record.
    pub(crate) record: u32,
}

/// Version data of a rule. One cache line, written by the control thread.
///
/// Records are reused and never freed while the table lives. A rule is valid in version *v* if `valid_from <=
/// v < valid_until`.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Record {
    valid_from: AtomicU64,
    valid_until: AtomicU64,
    /// Order among rules of equal priority.
    sequence: AtomicU64,
    priority: AtomicU32,
    /// True if the rule's action `count` counts packets and bytes.
    has_count_action: AtomicBool,
    /// Next record with the same masked key, later in matching order; [`NO_RECORD`] at the end.
    next: AtomicU32,
    /// Transmit metadata of an egress rule whose actions run in a NIC; 0: they run in software.
    tx_metadata: AtomicU32,
    installed: Shared<Option<InstalledRule>>,
}

impl Record {
    fn new(domain: &Domain) -> Self {
        Self {
            valid_from: AtomicU64::new(NEVER),
            valid_until: AtomicU64::new(NEVER),
            sequence: AtomicU64::new(0),
            priority: AtomicU32::new(0),
            has_count_action: AtomicBool::new(false),
            next: AtomicU32::new(NO_RECORD),
            tx_metadata: AtomicU32::new(0),
            installed: Shared::new(domain, None),
        }
    }

    /// Returns true if the rule is valid in this version.
    #[inline(always)]
    pub(crate) fn is_valid_in(&self, version: u64) -> bool {
        self.valid_from.load(Ordering::Acquire) <= version && version < self.valid_until.load(Ordering::Acquire)
    }

    /// Returns true if the rule is valid in `version` and was the same rule in the earlier version `before`.
    #[inline(always)]
    pub(crate) fn is_still_valid(&self, before: u64, version: u64) -> bool {
        self.valid_from.load(Ordering::Acquire) <= before && version < self.valid_until.load(Ordering::Acquire)
    }

    /// Returns the matching order; a lower value is matched first.
    #[inline(always)]
    pub(crate) fn order(&self) -> u128 {
        u128::from(self.priority.load(Ordering::Relaxed)) << 64 | u128::from(self.sequence.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(crate) fn has_count_action(&self) -> bool {
        self.has_count_action.load(Ordering::Relaxed)
    }

    /// Returns true if the record has no rule in the newest version. Writer only.
    pub(crate) fn is_retired(&self) -> bool {
        self.valid_until.load(Ordering::Relaxed) != NEVER || self.valid_from.load(Ordering::Relaxed) == NEVER
    }

    pub(crate) fn priority(&self) -> u32 {
        self.priority.load(Ordering::Relaxed)
    }

    pub(crate) fn tx_metadata(&self) -> u32 {
        self.tx_metadata.load(Ordering::Acquire)
    }

    pub(crate) fn set_tx_metadata(&self, number: u32) {
        self.tx_metadata.store(number, Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn next(&self) -> u32 {
        self.next.load(Ordering::Acquire)
    }

    pub(crate) fn set_next(&self, next: u32) {
        self.next.store(next, Ordering::Release);
    }

    pub(crate) fn installed(&self) -> &Shared<Option<InstalledRule>> {
        &self.installed
    }

    /// Assigns the record to a rule that is valid from version `valid_from` on. No worker may use the record:
    /// it is new, or its last rule is reclaimed. Returns the old contents, which must be retired.
    pub(crate) fn activate(
        &self,
        installed: InstalledRule,
        valid_from: u64,
        priority: u32,
        sequence: u64,
    ) -> Box<dyn Send> {
        let has_count_action = installed.rule.actions().contains(&Action::Count);
        self.has_count_action.store(has_count_action, Ordering::Relaxed);
        let old = self.installed.swap(Some(installed));
        self.priority.store(priority, Ordering::Relaxed);
        self.sequence.store(sequence, Ordering::Relaxed);
        self.next.store(NO_RECORD, Ordering::Relaxed);
        self.tx_metadata.store(0, Ordering::Relaxed);
        // `valid_from` is stored first. Otherwise a worker could see the new end with the old beginning.
        self.valid_from.store(valid_from, Ordering::Release);
        self.valid_until.store(NEVER, Ordering::Release);
        old
    }

    pub(crate) fn retire_at(&self, valid_until: u64) {
        self.valid_until.store(valid_until, Ordering::Release);
    }

    /// Makes the rule invalid in all versions.
    pub(crate) fn cancel(&self) {
        self.valid_from.store(NEVER, Ordering::Release);
    }

    /// Removes the rule when no worker uses the record any more. Returns the contents, which must be retired.
    pub(crate) fn clear(&self) -> Box<dyn Send> {
        self.valid_from.store(NEVER, Ordering::Release);
        self.installed.swap(None)
    }
}

const _: () = assert!(size_of::<Option<InstalledRule>>() == 64);

/// Counters of one worker for one rule.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(crate) struct WorkerCounters {
    pub(crate) packets: Counter,
    pub(crate) bytes: Counter,
    pub(crate) last_hit: Counter,
}

/// All records, and the counters of each worker. The slab never shrinks.
///
/// The first chunks of a small table have fewer records than indices. Each other chunk has as many as all before it.
#[derive(Clone, Debug)]
pub(crate) struct Slab {
    records: Vec<Arc<[Record]>>,
    counts: Vec<Vec<Arc<[WorkerCounters]>>>,
    /// Records of the first chunk.
    first_chunk: usize,
}

/// The records as a worker uses them in one iteration.
#[derive(Clone, Copy)]
pub(crate) struct Records<'g> {
    slab: &'g Slab,
    shared: &'g Shared<Slab>,
    guard: Guard<'g>,
}

impl<'g> Records<'g> {
    pub(crate) fn read(shared: &'g Shared<Slab>, guard: Guard<'g>) -> Self {
        Self { slab: shared.read(guard), shared, guard }
    }

    #[inline(always)]
    pub(crate) fn record(self, index: u32) -> &'g Record {
        match self.slab.records.get(index as usize / CHUNK) {
            Some(chunk) => &chunk[index as usize % CHUNK],
            None => self.record_in_newer_slab(index),
        }
    }

    /// Returns a record that was created after this iteration began. Tables change while a worker searches
    /// them. The record belongs to a later version, but a record behind it in the chain may belong to this
    /// one. A worker that finds the index also finds the slab that contains it.
    #[cold]
    fn record_in_newer_slab(self, index: u32) -> &'g Record {
        self.shared.read(self.guard).record(index)
    }

    /// Returns the worker's counters of a rule that is valid in the version of this iteration.
    #[inline(always)]
    pub(crate) fn count(self, worker: usize, index: u32) -> &'g WorkerCounters {
        self.slab.count(worker, index)
    }
}

fn counts(len: usize) -> Arc<[WorkerCounters]> {
    (0..len).map(|_| WorkerCounters::default()).collect()
}

impl Slab {
    /// Creates the slab of a table with this maximum number of rules.
    pub(crate) fn new(rules: usize) -> Self {
        let first_chunk = (rules / 512).clamp(SMALLEST_CHUNK, CHUNK);
        Self { records: Vec::new(), counts: Vec::new(), first_chunk }
    }

    /// Returns the number of records.
    pub(crate) fn len(&self) -> usize {
        self.records.iter().map(|chunk| chunk.len()).sum()
    }

    #[inline(always)]
    pub(crate) fn record(&self, index: u32) -> &Record {
        &self.records[index as usize / CHUNK][index as usize % CHUNK]
    }

    #[inline(always)]
    pub(crate) fn count(&self, worker: usize, index: u32) -> &WorkerCounters {
        &self.counts[worker][index as usize / CHUNK][index as usize % CHUNK]
    }

    /// Returns the counters of all workers for one record.
    pub(crate) fn counts(&self, index: u32) -> impl Iterator<Item = &WorkerCounters> {
        self.counts.iter().map(move |chunks| &chunks[index as usize / CHUNK][index as usize % CHUNK])
    }

    pub(crate) fn workers(&self) -> usize {
        self.counts.len()
    }

    /// Adds a chunk of records. Returns their indices.
    pub(crate) fn grow(&mut self, domain: &Domain) -> Range<u32> {
        let (first, len) = (self.records.len() * CHUNK, self.len().clamp(self.first_chunk, CHUNK));
        self.records.push((0..len).map(|_| Record::new(domain)).collect());
        self.counts.iter_mut().for_each(|chunks| chunks.push(counts(len)));
        first as u32..(first + len) as u32
    }

    /// Adds the counters of one more worker.
    pub(crate) fn add_worker(&mut self) {
        self.counts.push(self.records.iter().map(|chunk| counts(chunk.len())).collect());
    }

    /// Returns the bytes that one rule takes here.
    pub(crate) fn bytes_per_rule(&self) -> usize {
        size_of::<Record>() + size_of::<Option<InstalledRule>>() + self.counts.len() * size_of::<WorkerCounters>()
    }
}
