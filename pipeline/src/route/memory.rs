// UNSAFETY: readers follow indices that the writer published, without bounds checks.
#![allow(unsafe_code)]

//! Memory of the routing tables: one array of cells, which the writer divides into blocks.

use std::collections::BTreeMap;
use std::fmt;

use crate::epoch::Domain;
use crate::sync::{Arc, AtomicU32, Mutex, Ordering};
use crate::zeroed_memory::{Zeroable, Zeroed};

/// Cells of one unit, in which blocks are measured: 16 bytes.
pub(super) const UNIT_CELLS: usize = 4;

/// Units of a cache line.
const LINE_UNITS: u32 = 4;

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
        /// A published entry has 30 bits for a unit.
        const MOST: u32 = (1 << 30) / LINE_UNITS;
        u32::try_from(self.0.len()).map_or(MOST, |lines| lines.min(MOST)) * LINE_UNITS
    }

    /// Returns a cell.
    #[inline(always)]
    pub(super) fn cell(&self, index: usize) -> &AtomicU32 {
        &self.0[index / 16].0[index % 16]
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

    /// Returns the first two cells of a block as one number, the first cell lowest.
    ///
    /// # Safety
    /// `unit` must be that of a block which the writer allocated. No thread may write these cells at the same time.
    #[inline(always)]
    pub(super) unsafe fn pair(self, unit: u32) -> u64 {
        let first = unit as usize * UNIT_CELLS;
        #[cfg(all(not(loom), target_endian = "little"))]
        {
            // SAFETY: both cells are in the array, as the caller guarantees, and a unit is aligned to 16 bytes. The
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
/// A block of up to 64 bytes lies in one cache line. Freed blocks are reused for blocks of the same size; they are not
/// joined.
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
const LARGE: u32 = 41;

/// Units that are retired together.
const RETIRE_UNITS: u32 = 4096;

/// Returns the size of the block that holds `units`.
pub(super) const fn rounded(units: u32) -> u32 {
    match units {
        0..=1 => 1,
        2 => 2,
        _ => units.next_multiple_of(LINE_UNITS),
    }
}

impl Allocator {
    /// Creates the allocator of an array. The first line stays zero.
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

    /// Number of bytes of all blocks, retired ones included.
    pub(super) fn bytes(&self) -> usize {
        self.used * UNIT_CELLS * size_of::<u32>()
    }

    /// Number of bytes that were never used.
    pub(super) fn unused_bytes(&self) -> usize {
        (self.end - self.next) as usize * UNIT_CELLS * size_of::<u32>()
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
    /// Panics if the array is full. Insertions stop long before.
    pub(super) fn allocate(&mut self, units: u32) -> u32 {
        let units = rounded(units);
        self.used += units as usize;
        if let Some(block) = self.free_list(units).pop() {
            return block;
        }
        self.take_returned();
        if let Some(block) = self.free_list(units).pop() {
            return block;
        }
        let whole = units.next_multiple_of(LINE_UNITS);
        assert!(self.end - self.next >= whole, "the address space of the routing tables is exhausted");
        let block = self.next;
        self.next += whole;
        // The rest of a line becomes blocks of the same size.
        for rest in (block + units..block + whole).step_by(units as usize) {
            self.free_list(units).push(rest);
        }
        block
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
