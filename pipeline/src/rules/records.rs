//! What workers see of each rule, and what they count.

use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::flow::{Action, Rule};

use super::{Program, RuleId};
use crate::epoch::{Domain, Guard, Shared};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// "No record."
pub(super) const NONE: u32 = u32::MAX;
/// Of [`Record::born`] and [`Record::died`]: not yet.
pub(super) const NEVER: u64 = u64::MAX;
/// Records that are made at a time.
pub(super) const CHUNK: usize = 1024;

/// A rule as a worker meets it. One cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Installed {
    pub(super) id: RuleId,
    pub(super) rule: Arc<Rule>,
    pub(super) program: Program,
    /// Where it is.
    pub(super) record: u32,
}

/// A rule's version data. One cache line, written by the control thread.
///
/// Records are used again, never freed while the table lives. A rule is there for who sees version *v* if `born <= v < died`.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Record {
    born: AtomicU64,
    died: AtomicU64,
    /// Order among rules of one priority.
    sequence: AtomicU64,
    priority: AtomicU32,
    /// Packets and bytes are counted by the rule's own `count`.
    counts_itself: AtomicBool,
    /// Next record with the same masked key, behind this one in the order; [`NONE`] at the end.
    next: AtomicU32,
    /// Of a rule at egress that is in a device: what packets are told instead of being changed; 0: there is none.
    egress: AtomicU32,
    installed: Shared<Option<Installed>>,
}

impl Record {
    fn new(domain: &Domain) -> Self {
        Self {
            born: AtomicU64::new(NEVER),
            died: AtomicU64::new(NEVER),
            sequence: AtomicU64::new(0),
            priority: AtomicU32::new(0),
            counts_itself: AtomicBool::new(false),
            next: AtomicU32::new(NONE),
            egress: AtomicU32::new(0),
            installed: Shared::new(domain, None),
        }
    }

    /// Whether the rule is there in this version.
    #[inline(always)]
    pub(super) fn is_there(&self, version: u64) -> bool {
        self.born.load(Ordering::Acquire) <= version && version < self.died.load(Ordering::Acquire)
    }

    /// Whether it is there in `version`, and is still the rule that was there in `before`, an earlier version.
    #[inline(always)]
    pub(super) fn is_still_there(&self, before: u64, version: u64) -> bool {
        self.born.load(Ordering::Acquire) <= before && version < self.died.load(Ordering::Acquire)
    }

    /// Lower goes first.
    #[inline(always)]
    pub(super) fn order(&self) -> u128 {
        u128::from(self.priority.load(Ordering::Relaxed)) << 64 | u128::from(self.sequence.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(super) fn counts_itself(&self) -> bool {
        self.counts_itself.load(Ordering::Relaxed)
    }

    /// Whether it has its rule no longer for who sees the newest version, or never had. Writer only.
    pub(super) fn is_over(&self) -> bool {
        self.died.load(Ordering::Relaxed) != NEVER || self.born.load(Ordering::Relaxed) == NEVER
    }

    pub(super) fn priority(&self) -> u32 {
        self.priority.load(Ordering::Relaxed)
    }

    pub(super) fn egress(&self) -> u32 {
        self.egress.load(Ordering::Acquire)
    }

    pub(super) fn mark_egress(&self, number: u32) {
        self.egress.store(number, Ordering::Release);
    }

    #[inline(always)]
    pub(super) fn next(&self) -> u32 {
        self.next.load(Ordering::Acquire)
    }

    pub(super) fn set_next(&self, next: u32) {
        self.next.store(next, Ordering::Release);
    }

    pub(super) fn installed(&self) -> &Shared<Option<Installed>> {
        &self.installed
    }

    /// Gives the record to a rule that is born in `born`. Nobody may be looking at it: it is new, or its last rule's time is over for
    /// every worker.
    /// Returns what is to be retired.
    pub(super) fn begin(&self, installed: Installed, born: u64, priority: u32, sequence: u64) -> Box<dyn Send> {
        let counts_itself = installed.rule.actions().contains(&Action::Count);
        self.counts_itself.store(counts_itself, Ordering::Relaxed);
        let old = self.installed.exchange(Some(installed));
        self.priority.store(priority, Ordering::Relaxed);
        self.sequence.store(sequence, Ordering::Relaxed);
        self.next.store(NONE, Ordering::Relaxed);
        self.egress.store(0, Ordering::Relaxed);
        // Not before `born`: a rule that never dies and was never born would be there.
        self.born.store(born, Ordering::Release);
        self.died.store(NEVER, Ordering::Release);
        old
    }

    pub(super) fn die(&self, died: u64) {
        self.died.store(died, Ordering::Release);
    }

    /// It never was.
    pub(super) fn undo(&self) {
        self.born.store(NEVER, Ordering::Release);
    }

    /// The end, when no worker looks at it any more. Returns what is to be retired.
    pub(super) fn end(&self) -> Box<dyn Send> {
        self.born.store(NEVER, Ordering::Release);
        self.installed.exchange(None)
    }
}

const _: () = assert!(size_of::<Option<Installed>>() == 64);

/// What one worker has counted for one rule.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct Count {
    pub(super) packets: Counter,
    pub(super) bytes: Counter,
    pub(super) last_hit: Counter,
}

/// All records, and the counters of each worker. Only ever grows.
#[derive(Clone, Debug, Default)]
pub(super) struct Slab {
    records: Vec<Arc<[Record]>>,
    counts: Vec<Vec<Arc<[Count]>>>,
}

/// The records as a worker sees them in one turn.
#[derive(Clone, Copy)]
pub(super) struct Records<'g> {
    slab: &'g Slab,
    shared: &'g Shared<Slab>,
    guard: Guard<'g>,
}

impl<'g> Records<'g> {
    pub(super) fn read(shared: &'g Shared<Slab>, guard: Guard<'g>) -> Self {
        Self { slab: shared.read(guard), shared, guard }
    }

    #[inline(always)]
    pub(super) fn record(self, index: u32) -> &'g Record {
        match self.slab.records.get(index as usize / CHUNK) {
            Some(chunk) => &chunk[index as usize % CHUNK],
            None => self.newer(index),
        }
    }

    /// Tables change while they are looked at: this record was made since the turn began. It is for a later version, but what is behind
    /// it in its chain is perhaps for this one. Who finds its number finds the slab that has it.
    #[cold]
    fn newer(self, index: u32) -> &'g Record {
        self.shared.read(self.guard).record(index)
    }

    /// The counters of a rule that is there in the turn's version.
    #[inline(always)]
    pub(super) fn count(self, worker: usize, index: u32) -> &'g Count {
        self.slab.count(worker, index)
    }
}

fn counts() -> Arc<[Count]> {
    (0..CHUNK).map(|_| Count::default()).collect()
}

impl Slab {
    /// Records that there are.
    pub(super) fn len(&self) -> usize {
        self.records.len() * CHUNK
    }

    #[inline(always)]
    pub(super) fn record(&self, index: u32) -> &Record {
        &self.records[index as usize / CHUNK][index as usize % CHUNK]
    }

    #[inline(always)]
    pub(super) fn count(&self, worker: usize, index: u32) -> &Count {
        &self.counts[worker][index as usize / CHUNK][index as usize % CHUNK]
    }

    /// The counters of all workers for one record.
    pub(super) fn counts(&self, index: u32) -> impl Iterator<Item = &Count> {
        self.counts.iter().map(move |chunks| &chunks[index as usize / CHUNK][index as usize % CHUNK])
    }

    pub(super) fn workers(&self) -> usize {
        self.counts.len()
    }

    /// Another chunk of records.
    pub(super) fn grow(&mut self, domain: &Domain) {
        self.records.push((0..CHUNK).map(|_| Record::new(domain)).collect());
        self.counts.iter_mut().for_each(|chunks| chunks.push(counts()));
    }

    /// Another worker.
    pub(super) fn add_worker(&mut self) {
        self.counts.push(self.records.iter().map(|_| counts()).collect());
    }

    /// Bytes that one rule takes here.
    pub(super) fn bytes_per_rule(&self) -> usize {
        size_of::<Record>() + size_of::<Option<Installed>>() + self.counts.len() * size_of::<Count>()
    }
}
