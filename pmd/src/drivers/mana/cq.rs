//! Completion queues: which entry is new, and what is wrong with it.

use std::sync::atomic::{AtomicU32, Ordering};

use wirepath_memory::{DeviceMemory, Slots, View};
use wirepath_nic_defs::mana::{CQE_BYTES, CQE_TAIL, CqeHead, CqeTail, OWNER_VALUES, WQE_UNIT};

use crate::drivers::direct::fault::Fault;

/// Words of an entry.
const WORDS: usize = CQE_BYTES as usize / 4;

/// The entries of one completion queue that one work queue writes to. Owner bits say which pass of the ring an entry belongs to, so
/// that nobody has to clear it; the device fills the last word last.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    entries: Slots<Whole>,
    /// Logarithm of the number of entries.
    shift: u32,
    /// Free-running counter of the entry that is looked at next. It starts one pass in: zeroed memory then is one pass old.
    next: u32,
    /// Queue number and kind that every entry must carry.
    from: u32,
}

/// An entry in memory, filled or not.
pub(super) type Whole = [AtomicU32; WORDS];

/// Bits of the last word that have a meaning here: not the reserved ones.
const KNOWN: u32 = CqeTail(0).with_queue(u32::MAX).with_is_sq(1).with_owner(u32::MAX).0;

/// An entry that the device has filled.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a>(&'a Whole);

impl<'a> Entry<'a> {
    /// The entry, if the device has filled it, and its last word is as expected ([`CompletionQueue::rest`]).
    #[inline(always)]
    pub(super) fn expect(whole: &'a Whole, expected: u32) -> Option<Self> {
        // Acquire: the other words are read after the one that says that they are there.
        let tail = whole[CQE_TAIL as usize / 4].load(Ordering::Acquire);
        if tail & KNOWN == expected { Some(Self(whole)) } else { None }
    }

    /// An entry that was found filled before.
    #[inline(always)]
    pub(super) fn again(whole: &'a Whole) -> Self {
        Self(whole)
    }

    /// The word at this offset, below 64.
    #[inline(always)]
    pub(super) fn word(self, offset: u32) -> u32 {
        self.0[offset as usize / 4 % WORDS].load(Ordering::Relaxed)
    }

    /// What happened.
    #[inline(always)]
    pub(super) fn cqe_type(self) -> u32 {
        CqeHead(self.word(0)).cqe_type()
    }
}

impl CompletionQueue {
    /// The entries of send queue or receive queue `queue`; `None` if their number is no power of two.
    pub(super) fn new(memory: &DeviceMemory, queue: u32, is_sq: bool) -> Option<Self> {
        let entries = Slots::new(memory)?;
        let from = CqeTail::default().with_queue(queue).with_is_sq(is_sq.into()).0;
        let count = entries.count();
        Some(Self { entries, shift: count.trailing_zeros(), next: count, from })
    }

    /// The queue as a value, to be read in a loop; [`Self::resume`] then says how far it was.
    #[inline(always)]
    pub(super) fn reader(&self) -> Reader<'_> {
        let mut reader =
            Reader { entries: self.entries.view(), shift: self.shift, next: self.next, from: self.from, expected: 0 };
        reader.expect();
        reader
    }

    /// The entries from the next to the end of the ring, and the known bits of their last words.
    #[inline(always)]
    pub(super) fn rest(&self) -> (&[Whole], u32) {
        (self.entries.view().run(self.next), self.reader().expected)
    }

    /// Goes on by `count` entries.
    #[inline(always)]
    pub(super) fn advance(&mut self, count: u32) {
        self.next = self.next.wrapping_add(count);
    }

    /// Goes on where a reader ended.
    #[inline(always)]
    pub(super) fn resume(&mut self, next: u32) {
        self.next = next;
    }

    /// Entries that were taken so far, as doorbells count them: modulo all passes that owner bits tell apart.
    pub(super) fn taken(&self) -> u32 {
        self.next & (self.count() * OWNER_VALUES - 1)
    }

    /// Number of entries.
    pub(super) fn count(&self) -> u32 {
        self.entries.count()
    }
}

/// A look at the entries, one after the other.
pub(super) struct Reader<'a> {
    entries: View<'a, Whole>,
    shift: u32,
    next: u32,
    from: u32,
    /// The known bits of the last word of an entry of this pass.
    expected: u32,
}

impl<'a> Reader<'a> {
    /// Notes what entries of the pass that begins say.
    #[inline(always)]
    fn expect(&mut self) {
        self.expected = self.from | (self.next >> self.shift) << (u32::BITS - OWNER_VALUES.ilog2());
    }

    /// The next entry, if the device has filled it.
    #[inline(always)]
    pub(super) fn look(&self) -> Result<Option<Entry<'a>>, Fault> {
        let entry = self.entries.at(self.next);
        // Once, since the device may write it meanwhile. Acquire: the other words are read after the one that says that they are there.
        let tail = entry[CQE_TAIL as usize / 4].load(Ordering::Acquire);
        if tail & KNOWN == self.expected {
            return Ok(Some(Entry(entry)));
        }
        let turn = self.next >> self.shift;
        let owner = CqeTail(tail).owner();
        if owner == turn.wrapping_sub(1) % OWNER_VALUES {
            Ok(None)
        } else if owner == turn % OWNER_VALUES {
            Err(Fault::ForeignQueue)
        } else {
            Err(Fault::OwnerOutOfTurn)
        }
    }

    /// Goes on to the next entry.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
        if self.next & self.entries.mask() == 0 {
            self.expect();
        }
    }

    /// The counter to go on with.
    #[inline(always)]
    pub(super) fn next(&self) -> u32 {
        self.next
    }
}

/// Compares the position that a completion names with the one whose turn it is.
///
/// Work queues complete in order, so the position adds nothing, except that it gives away a completion that comes twice: the buffer of
/// a packet would be handed to the program while the device still writes it. Sources disagree on its unit (openvmm: bytes in its device,
/// units in its driver; rdma-core: bytes), so the unit is learned from the first completions that tell it. A device that follows
/// neither is taken at its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Positions {
    unit: Unit,
    /// What takes the device's number to units, and which bits of it count: none until the unit is known.
    shift: u32,
    mask: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Unknown,
    Known,
    Unused,
}

impl Positions {
    /// To be learned.
    pub(super) const UNKNOWN: Self = Self { unit: Unit::Unknown, shift: 0, mask: 0 };
    /// Not looked at.
    pub(super) const UNUSED: Self = Self { unit: Unit::Unused, shift: 0, mask: 0 };

    /// Whether `said` can be a position from `at` on, but not `size` units further. Positions count modulo the ring, whose number of units
    /// is `mask + 1`.
    #[inline(always)]
    pub(super) fn fits(&mut self, said: u32, at: u32, size: u32, mask: u32) -> bool {
        if self.unit == Unit::Unknown {
            self.learn(said, at, mask);
        }
        (said >> self.shift).wrapping_sub(at) & self.mask < size
    }

    /// How far behind `from` the position lies, of at most `size` units; `None`: nobody can say. While the unit is not known, a position
    /// counts that makes sense in one of them only.
    pub(super) fn place(&self, said: u32, from: u32, size: u32, mask: u32) -> Option<u32> {
        let behind = |shift: u32| Some((said >> shift).wrapping_sub(from) & mask).filter(|behind| *behind < size);
        let bytes = WQE_UNIT.ilog2();
        match self.unit {
            Unit::Known => behind(self.shift),
            // The start of a ring and silence look the same.
            Unit::Unknown if said == 0 => None,
            Unit::Unknown => match (behind(0), behind(bytes).filter(|_| said.is_multiple_of(WQE_UNIT))) {
                (Some(_), Some(_)) => None,
                (units, bytes) => units.or(bytes),
            },
            Unit::Unused => None,
        }
    }

    #[cold]
    fn learn(&mut self, said: u32, at: u32, mask: u32) {
        // The start of the ring looks the same in every unit; and a device that does not tell says nothing but zero.
        if at & mask == 0 || said == 0 {
            return;
        }
        let bytes = WQE_UNIT.ilog2();
        *self = if (said ^ at) & mask == 0 {
            Self { unit: Unit::Known, shift: 0, mask }
        } else if said.is_multiple_of(WQE_UNIT) && ((said >> bytes) ^ at) & mask == 0 {
            Self { unit: Unit::Known, shift: bytes, mask }
        } else {
            Self::UNUSED
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::direct::hostile::memory;

    fn write(memory: &DeviceMemory, counter: u32, count: u32, queue: u32, is_sq: u32) {
        let tail = CqeTail::default()
            .with_queue(queue)
            .with_is_sq(is_sq)
            .with_owner(wirepath_nic_defs::mana::owner(counter, count));
        memory.store32((counter % count) as usize * 64 + 60, tail.0);
    }

    #[test]
    fn entries_are_new_once_over_many_passes() {
        let memory = memory(8 * 64);
        let mut queue = CompletionQueue::new(&memory, 0x12_3456, true).unwrap();
        assert_eq!(queue.count(), 8);
        for counter in 8..8 * 40 {
            assert!(queue.reader().look().unwrap().is_none(), "{counter}");
            write(&memory, counter, 8, 0x12_3456, 1);
            let mut reader = queue.reader();
            assert!(reader.look().unwrap().is_some(), "{counter}");
            reader.advance();
            let next = reader.next();
            queue.resume(next);
        }
    }

    #[test]
    fn what_no_device_writes_is_seen() {
        let memory = memory(8 * 64);
        let queue = CompletionQueue::new(&memory, 7, false).unwrap();
        write(&memory, 8, 8, 8, 0);
        assert_eq!(queue.reader().look().err(), Some(Fault::ForeignQueue));
        write(&memory, 8, 8, 7, 1);
        assert_eq!(queue.reader().look().err(), Some(Fault::ForeignQueue), "a send queue");
        for pass in 2..8 {
            write(&memory, 8 * pass, 8, 7, 0);
            assert_eq!(queue.reader().look().err(), Some(Fault::OwnerOutOfTurn), "pass {pass}");
        }
        write(&memory, 8, 8, 7, 0);
        memory.store32(60, memory.load32(60) | 0xf << 25);
        assert!(queue.reader().look().unwrap().is_some(), "reserved bits mean nothing");
    }

    #[test]
    fn the_unit_of_positions_is_learned() {
        for unit in [1, 32] {
            let mut positions = Positions::UNKNOWN;
            for at in 0..40u32 {
                assert!(positions.fits(at * unit, at, 1, 127), "{at}");
            }
            assert!(!positions.fits(40 * unit, 41, 1, 127), "twice");
            assert!(!positions.fits(43 * unit, 42, 1, 127), "one left out");
            assert!(positions.fits(45 * unit, 42, 4, 127), "one of four");
            // Counted on for ever or modulo the ring.
            assert!(positions.fits(130 * unit, 130, 1, 127) && positions.fits(3 * unit, 131, 1, 127));
        }
        let mut known = Positions::UNKNOWN;
        assert!(known.fits(5, 5, 1, 127));
        assert_eq!((known.place(7, 5, 4, 127), known.place(9, 5, 4, 127)), (Some(2), None));
        let unknown = Positions::UNKNOWN;
        assert_eq!((unknown.place(7, 5, 4, 127), unknown.place(7 << 5, 5, 4, 127)), (Some(2), Some(2)));
        assert_eq!((unknown.place(0, 0, 4, 127), unknown.place(32, 0, 64, 127)), (None, None), "either way");
        assert_eq!(Positions::UNUSED.place(7, 5, 4, 127), None);
        let mut silent = Positions::UNKNOWN;
        assert!((0..40).all(|at| silent.fits(0, at, 1, 127)));
        let mut odd = Positions::UNKNOWN;
        assert!((0..40).all(|at| odd.fits(at * 7, at, 1, 127)));
        assert_eq!(odd, Positions::UNUSED);
    }
}
