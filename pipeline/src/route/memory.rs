// UNSAFETY: readers follow indices that the writer published, without bounds checks.
#![allow(unsafe_code)]

//! Memory of the routing tables: one array of cells, which the writer divides into blocks.

use std::collections::BTreeMap;
use std::fmt;

use crate::epoch::Domain;
use crate::sync::{Arc, AtomicU32, Mutex, Ordering};
use crate::zeroed_memory::{Zeroable, Zeroed};
#[cfg(not(loom))]
use std::sync::atomic::AtomicU16;

/// Cells of one unit, in which blocks are measured: 8 bytes.
pub(super) const UNIT_CELLS: usize = 2;

/// Units of a cache line.
const LINE_UNITS: u32 = 8;

/// Cells of one cache line.
#[repr(C, align(64))]
struct CellLine([AtomicU32; 16]);

// SAFETY: zero bytes are `AtomicU32`s of value 0, which need no drop. Under loom, `Zeroed` never makes its atomics
// from bytes but calls `zero`.
unsafe impl Zeroable for CellLine {
    fn zero() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

/// An array of cells of 32 bits, all zero at first. Only written pages take memory.
pub(super) struct Cells(Zeroed<CellLine>);

impl Cells {
    /// Reserves addresses for `bytes` bytes, or for fewer if the kernel refuses.
    pub(super) fn reserve(bytes: usize) -> Self {
        /// The least that is of use. If even this is refused, it is taken from the heap.
        const MINIMUM: usize = if cfg!(loom) { 64 } else { 16 << 20 };
        let mut bytes = bytes.max(MINIMUM);
        loop {
            match Zeroed::reserve(bytes / size_of::<CellLine>()) {
                Some(lines) => return Self(lines),
                None if bytes <= MINIMUM => {
                    return Self(Zeroed::new(MINIMUM / size_of::<CellLine>(), crate::zeroed_memory::Pages::Huge));
                }
                None => bytes /= 2,
            }
        }
    }

    /// Number of units.
    fn units(&self) -> u32 {
        /// A published entry has 31 bits for a unit.
        const MOST: u32 = (1 << 31) / LINE_UNITS;
        u32::try_from(self.0.len()).map_or(MOST, |lines| lines.min(MOST)) * LINE_UNITS
    }

    /// Returns a cell.
    #[inline(always)]
    pub(super) fn cell(&self, index: usize) -> &AtomicU32 {
        &self.0[index / 16].0[index % 16]
    }

    /// Stores half a cell, whose index counts halves. Only the writer calls this.
    pub(super) fn store_half(&self, half: usize, value: u16, order: Ordering) {
        let cell = self.cell(half / 2);
        #[cfg(not(loom))]
        {
            // SAFETY: a cell is two halves, and `half % 2` is one of them. All threads access the cells of halves
            // only by halves while a block is published.
            let half = unsafe { &*std::ptr::from_ref(cell).cast::<AtomicU16>().add(half % 2) };
            half.store(value, order);
        }
        #[cfg(loom)]
        {
            let shift = half % 2 * 16;
            let other = cell.load(Ordering::Relaxed) & !(0xffff << shift);
            cell.store(other | u32::from(value) << shift, order);
        }
    }

    /// Returns the array for readers.
    #[inline(always)]
    pub(super) fn published(&self) -> Published<'_> {
        Published(&self.0)
    }
}

/// The array for readers. It is a value, so that loops over addresses keep the address of the array in a register.
#[derive(Clone, Copy)]
pub(super) struct Published<'a>(&'a [CellLine]);

impl<'a> Published<'a> {
    /// Returns a cell without a bounds check.
    ///
    /// # Safety
    /// `index` must be that of a cell in a block or table that the writer allocated.
    #[inline(always)]
    pub(super) unsafe fn cell(self, index: usize) -> &'a AtomicU32 {
        // SAFETY: the writer allocates within the array only, and the array does not shrink. The lines are contiguous
        // arrays of cells.
        unsafe { &*self.0.as_ptr().cast::<AtomicU32>().add(index) }
    }

    /// Returns half a cell, whose index counts halves.
    ///
    /// # Safety
    /// `half` must be that of a run in a block that the writer allocated.
    #[inline(always)]
    pub(super) unsafe fn half(self, half: usize, order: Ordering) -> u16 {
        #[cfg(not(loom))]
        {
            // SAFETY: the caller guarantees that the half is in the array. The cells of runs are written by halves.
            unsafe { (*self.0.as_ptr().cast::<AtomicU16>().add(half)).load(order) }
        }
        #[cfg(loom)]
        {
            // SAFETY: the caller guarantees that the cell is in the array.
            let cell = unsafe { self.cell(half / 2) };
            (cell.load(order) >> (half % 2 * 16)) as u16
        }
    }

    /// Returns the first two cells of a block as one number, the first cell lowest.
    ///
    /// # Safety
    /// `first` must be the first cell of a block which the writer allocated. No thread may write these cells at the
    /// same time.
    #[inline(always)]
    pub(super) unsafe fn pair(self, first: usize) -> u64 {
        #[cfg(all(not(loom), target_endian = "little"))]
        {
            // SAFETY: both cells are in the array, as the caller guarantees, and a unit is aligned to 8 bytes. The
            // writer has written them before it published the block, so this is no race of accesses of two sizes.
            unsafe { (*self.0.as_ptr().cast::<crate::sync::AtomicU64>().add(first / 2)).load(Ordering::Relaxed) }
        }
        #[cfg(any(loom, target_endian = "big"))]
        {
            // SAFETY: the caller guarantees that both cells are in the array.
            let (low, high) = unsafe { (self.cell(first), self.cell(first + 1)) };
            u64::from(low.load(Ordering::Relaxed)) | u64::from(high.load(Ordering::Relaxed)) << 32
        }
    }

    /// Prefetches the cache line of a cell, which need not exist.
    #[inline(always)]
    pub(super) fn prefetch(self, index: usize) {
        #[cfg(not(loom))]
        crate::table::prefetch_at(self.0.as_ptr().cast::<AtomicU32>().wrapping_add(index));
        #[cfg(loom)]
        let _ = index;
    }
}

/// Blocks that are free again after all readers have finished with them.
type Returned = Arc<Mutex<Vec<Vec<(u32, u32)>>>>;

/// Blocks that readers may still use. The epoch domain drops this when they cannot any more.
struct Retired {
    blocks: Vec<(u32, u32)>,
    returned: Returned,
}

impl Drop for Retired {
    fn drop(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        self.returned.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(blocks);
    }
}

/// The writer's allocator of blocks.
///
/// A block of up to 64 bytes lies in one cache line. Freed blocks are reused, whole or in parts; they are not joined.
pub(super) struct Allocator {
    /// First unit that was never used.
    next: u32,
    end: u32,
    /// Free blocks by their size in units.
    free: Vec<Vec<u32>>,
    /// Free blocks of larger sizes.
    large: BTreeMap<u32, Vec<u32>>,
    /// Blocks that are no longer published and not yet in the hands of the domain.
    pending: Vec<(u32, u32)>,
    pending_units: u32,
    returned: Returned,
    /// Units in use, retired ones included.
    used: usize,
}

/// Sizes in units from which on free blocks are in a map.
const LARGE: u32 = 73;

/// Units that are retired together.
const RETIRE_UNITS: u32 = 8192;

/// The smallest block.
const SMALLEST: u32 = 2;

/// Returns the size of the block that holds `units`. The rest of a line can hold another block.
pub(super) const fn rounded(units: u32) -> u32 {
    match units {
        0..=SMALLEST => SMALLEST,
        3..=6 => units,
        _ => units.next_multiple_of(LINE_UNITS),
    }
}

impl Allocator {
    /// Creates the allocator of an array. It leaves the first line alone.
    pub(super) fn new(cells: &Cells) -> Self {
        Self {
            next: LINE_UNITS,
            end: cells.units(),
            free: (0..LARGE).map(|_| vec![]).collect(),
            large: BTreeMap::new(),
            pending: vec![],
            pending_units: 0,
            returned: Returned::default(),
            used: LINE_UNITS as usize,
        }
    }

    /// Number of bytes of all blocks, retired ones included. Free ones do not count.
    pub(super) fn bytes(&self) -> usize {
        self.used * UNIT_CELLS * size_of::<u32>()
    }

    /// Number of bytes that were never used.
    pub(super) fn unused_bytes(&self) -> usize {
        (self.end - self.next) as usize * UNIT_CELLS * size_of::<u32>()
    }

    /// Returns whether the array keeps room for a copy of all blocks after an allocation of `more` bytes.
    ///
    /// A removal may copy all blocks of a table. Where it uncovers a large value, a block of 14 short entries gets as
    /// many long ones, and grows from 5 to 16 units.
    pub(super) fn keeps_room_for_copies(&self, more: usize) -> bool {
        self.unused_bytes() >= (self.bytes() + more).saturating_mul(4) + more
    }

    fn free_list(&mut self, units: u32) -> &mut Vec<u32> {
        match self.free.get_mut(units as usize) {
            Some(list) => list,
            None => self.large.entry(units).or_default(),
        }
    }

    /// Returns a block of at least `units` units, whose cells have any content.
    ///
    /// # Panics
    /// Panics if the array is full. Insertions stop long before. Removals do not stop, and need new blocks too: while a
    /// worker does not become quiescent, they fill the array with blocks that it might still read.
    pub(super) fn allocate(&mut self, units: u32) -> u32 {
        let units = rounded(units);
        self.used += units as usize;
        if let Some(block) = self.free_list(units).pop() {
            return block;
        }
        self.take_returned();
        if let Some(block) = self.free_list(units).pop().or_else(|| self.split(units)) {
            return block;
        }
        let whole = units.next_multiple_of(LINE_UNITS);
        if self.end - self.next < whole
            && let Some(block) = self.split_lines(units)
        {
            return block;
        }
        assert!(self.end - self.next >= whole, "the address space of the routing tables is exhausted");
        let block = self.next;
        self.next += whole;
        self.cut(block, whole, units)
    }

    /// Frees what a block of `units` units leaves of a larger one: the rest of its last line, and the lines behind it.
    fn cut(&mut self, block: u32, size: u32, units: u32) -> u32 {
        let whole = units.next_multiple_of(LINE_UNITS).min(size);
        for (from, to) in [(units, whole), (whole, size)] {
            if to > from {
                self.free_list(to - from).push(block + from);
            }
        }
        block
    }

    /// Takes a block from a larger free one in a line, if the rest can be a block too.
    fn split(&mut self, units: u32) -> Option<u32> {
        let larger = (units + SMALLEST..=LINE_UNITS).find(|size| !self.free[*size as usize].is_empty())?;
        let block = self.free_list(larger).pop()?;
        Some(self.cut(block, larger, units))
    }

    /// Takes a block from a free one of several lines. Those serve blocks of their own size while there is other room.
    fn split_lines(&mut self, units: u32) -> Option<u32> {
        let whole = units.next_multiple_of(LINE_UNITS);
        let of_lists = (whole + 1..LARGE).find(|size| !self.free[*size as usize].is_empty());
        let of_map = || self.large.range(whole + 1..).find(|(_, list)| !list.is_empty()).map(|(size, _)| *size);
        let larger = of_lists.or_else(of_map)?;
        let block = self.free_list(larger).pop()?;
        Some(self.cut(block, larger, units))
    }

    fn take_returned(&mut self) {
        let returned = std::mem::take(&mut *self.returned.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        for (block, units) in returned.into_iter().flatten() {
            self.free(block, units);
        }
    }

    /// Frees a block that readers never saw.
    pub(super) fn free(&mut self, block: u32, units: u32) {
        let units = rounded(units);
        self.used -= units as usize;
        self.free_list(units).push(block);
    }

    /// Frees a block when no reader can use it any more. It must not be reachable when [`Self::flush`] is called.
    pub(super) fn retire(&mut self, block: u32, units: u32) {
        self.pending.push((block, units));
        self.pending_units += rounded(units);
    }

    /// Passes retired blocks to the domain if they are many.
    pub(super) fn flush(&mut self, domain: &Domain) {
        if self.pending_units >= RETIRE_UNITS {
            self.pass_to(domain);
        }
    }

    fn pass_to(&mut self, domain: &Domain) {
        self.pending_units = 0;
        let blocks = std::mem::take(&mut self.pending);
        domain.retire(Box::new(Retired { blocks, returned: Arc::clone(&self.returned) }));
    }

    /// Frees the blocks that no reader can use any more.
    pub(super) fn reclaim(&mut self, domain: &Domain) {
        if !self.pending.is_empty() {
            self.pass_to(domain);
        }
        domain.collect();
        self.take_returned();
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocator").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Cells {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} units", self.units())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Blocks that are in use never overlap, and those of up to a line lie in one. Freed blocks are used again.
    #[test]
    fn blocks_lie_apart_and_in_one_line() {
        let cells = Cells::reserve(1 << 24);
        let (mut allocator, mut random) = (Allocator::new(&cells), fastrand::Rng::with_seed(1));
        let mut blocks: Vec<(u32, u32)> = vec![];
        let mut owners = vec![false; 1 << 16];
        for step in 0..50_000 {
            // It grows to some thousand blocks, and then changes.
            if random.u32(..100) < if step < 10_000 { 70 } else { 50 } {
                let units = if random.u8(..10) == 0 { random.u32(1..=100) } else { random.u32(1..=8) };
                let block = allocator.allocate(units);
                let used = block as usize..(block + rounded(units)) as usize;
                assert!(block >= LINE_UNITS, "the first line stays free");
                assert!(owners[used.clone()].iter().all(|owner| !owner), "{used:?} has been given out twice");
                let place = block % LINE_UNITS;
                assert!(place + units <= LINE_UNITS || place == 0, "{units} units from unit {place} of a line on");
                owners[used].fill(true);
                blocks.push((block, units));
            } else if !blocks.is_empty() {
                let (block, units) = blocks.swap_remove(random.usize(..blocks.len()));
                owners[block as usize..(block + rounded(units)) as usize].fill(false);
                allocator.free(block, units);
            }
        }
        let used: u32 = blocks.iter().map(|(_, units)| rounded(*units)).sum();
        assert_eq!(allocator.bytes(), (used + LINE_UNITS) as usize * UNIT_CELLS * size_of::<u32>());
        assert!(used * 2 > allocator.next, "{used} of {} units are in use", allocator.next);
    }

    #[test]
    fn small_blocks_lie_in_free_large_ones() {
        let cells = Cells::reserve(1 << 24);
        let mut allocator = Allocator::new(&cells);
        let take = |allocator: &mut Allocator, units: u32, until: u32| {
            let count = (until - allocator.next) / units;
            (0..count).map(|_| allocator.allocate(units)).collect::<Vec<_>>()
        };
        let end = allocator.end;
        let (large, larger) = (take(&mut allocator, 72, end / 2), take(&mut allocator, 2048, end));
        large.iter().for_each(|block| allocator.free(*block, 72));
        larger.iter().for_each(|block| allocator.free(*block, 2048));
        let mut blocks: Vec<u32> = (0..end / 8 - 300).map(|_| allocator.allocate(5)).collect();
        blocks.sort_unstable();
        assert!(blocks.windows(2).all(|pair| pair[0] + 5 <= pair[1]), "blocks overlap");
        assert!(blocks.iter().all(|block| block % LINE_UNITS <= 3), "blocks lie in one line");
    }
}
