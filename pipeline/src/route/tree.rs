// UNSAFETY: reads the bitmaps of blocks that it allocated.
#![allow(unsafe_code)]

//! The writer's side of the trees.

use super::memory::{Allocator, Cells, UNIT_CELLS};
use crate::sync::{Arc, AtomicU32, Ordering};

/// Entry of addresses without a route.
pub(super) const NONE: u32 = 0;

/// Bits of the address that one block resolves.
pub(super) const STRIDE: u32 = 6;

/// Levels of blocks of the deepest tree: 128 bits, 6 at a time.
const LEVELS: usize = 22;

/// Key of a whole block.
const WHOLE: u32 = 1;

/// Returns whether an entry points to a block.
#[inline(always)]
pub(super) const fn is_block(entry: u32) -> bool {
    entry & 1 != 0
}

/// Returns the block that an entry points to, by its first cell.
#[inline(always)]
pub(super) const fn block_of(entry: u32) -> u32 {
    entry & !1
}

/// Returns the index of the half cell that holds a run of a block.
#[inline(always)]
pub(super) const fn half_of(block: u32, run: u32) -> usize {
    block as usize * 2 + 4 + run as usize
}

/// Returns whether a half cell leads to a whole cell of its block.
#[inline(always)]
pub(super) const fn is_long(half: u16) -> bool {
    half & 1 != 0
}

/// Returns the cell in its block that a half cell leads to.
#[inline(always)]
pub(super) const fn long_of(half: u16) -> u32 {
    half as u32 >> 1
}

/// Returns whether an entry fits in a half cell.
const fn is_short(entry: u32) -> bool {
    !is_block(entry) && entry <= u16::MAX as u32
}

/// A block whose entries are all [`NONE`]. It lies in the first line, which the allocator leaves alone.
pub(super) const EMPTY_BLOCK: u32 = 2;

const fn pointer(block: u32) -> u32 {
    block | 1
}

/// Returns the six bits of an address from bit `level * 6` on.
const fn position(bits: u128, level: usize) -> u32 {
    (bits << (level as u32 * STRIDE) >> (128 - STRIDE)) as u32
}

/// Returns the cell of the record of a block with `runs` runs. The long entries follow it.
const fn record_cell_of(runs: u32) -> u32 {
    2 + runs.div_ceil(2)
}

/// Number of units of a block with `runs` runs, of which `long` have long entries.
const fn block_units(runs: u32, long: u32) -> u32 {
    (record_cell_of(runs) + 1 + long).div_ceil(UNIT_CELLS as u32)
}

/// Number of units of a record with `routes` routes.
const fn record_units(routes: u32) -> u32 {
    (routes + 4).div_ceil(UNIT_CELLS as u32)
}

/// The routes of one VRF and one address family.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// Entry of the whole address space.
    root: u32,
    /// Value of the route with prefix length 0.
    default: u32,
    pub(super) direct: Direct,
    /// Number of routes.
    pub(super) routes: usize,
    /// Number of units of blocks, records and the direct table.
    pub(super) units: usize,
}

/// A table of the entries for the first bits of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Direct {
    /// First unit.
    pub(super) base: u32,
    /// Number of bits, a multiple of the stride.
    pub(super) bits: u32,
}

impl Direct {
    const fn cells(self) -> usize {
        1 << self.bits
    }

    const fn units(self) -> u32 {
        self.cells().div_ceil(UNIT_CELLS) as u32
    }

    /// Returns the index of an address in the table.
    const fn index(self, bits: u128) -> usize {
        match bits.checked_shr(128 - self.bits) {
            Some(index) => index as usize,
            None => 0,
        }
    }
}

/// Memory of all trees, and the operations on it.
///
/// A **block** resolves six bits of the address to 64 entries. Equal neighbours are one *run*. The block begins with a
/// bitmap of the positions at which a run begins. Half a cell for each run, the index of its record and long entries
/// follow. The half cell holds the entry of its run if that is [`NONE`] or a value below 32767. Otherwise it has bit 0
/// set, and the cell of the long entry in the upper bits. Most blocks fill half a cache line. Readers see blocks. An
/// entry is [`NONE`], a value plus one in the upper 31 bits, or the first cell of a block with bit 0 set.
///
/// A **record** holds the routes that end in a block: a bitmap of 128 bits, and values in the order
/// of the bits. Each node of a binary tree of six levels has a bit. The key of a node is 1 for the root, and `2k` and
/// `2k + 1` for the children of node `k`. Only the writer uses records.
#[derive(Debug)]
pub(super) struct Forest {
    blocks: Arc<Cells>,
    pub(super) block_memory: Allocator,
    records: Cells,
    pub(super) record_memory: Allocator,
}

impl Forest {
    pub(super) fn new(blocks: Arc<Cells>, records: Cells) -> Self {
        let (block_memory, record_memory) = (Allocator::new(&blocks), Allocator::new(&records));
        blocks.cell(EMPTY_BLOCK as usize).store(1, Ordering::Relaxed);
        Self { blocks, block_memory, records, record_memory }
    }

    // Blocks.

    fn cell(&self, block: u32, cell: u32) -> &AtomicU32 {
        self.blocks.cell((block + cell) as usize)
    }

    fn bitmap(&self, block: u32) -> u64 {
        // SAFETY: this thread allocated the block, and only this thread writes.
        unsafe { self.blocks.published().pair(block as usize) }
    }

    fn runs(&self, block: u32) -> u32 {
        self.bitmap(block).count_ones()
    }

    fn half(&self, block: u32, run: u32) -> u16 {
        // SAFETY: this thread allocated the block.
        unsafe { self.blocks.published().half(half_of(block, run), Ordering::Relaxed) }
    }

    /// Number of long entries.
    fn long_entries(&self, block: u32) -> u32 {
        (0..self.runs(block)).map(|run| u32::from(is_long(self.half(block, run)))).sum()
    }

    /// Returns the entry of a run.
    fn load(&self, block: u32, run: u32) -> u32 {
        match self.half(block, run) {
            half if is_long(half) => self.cell(block, long_of(half)).load(Ordering::Relaxed),
            half => half.into(),
        }
    }

    /// Stores an entry that is long if the old one is. Release: a reader that sees the entry sees the content of the
    /// block that it points to.
    fn store(&self, block: u32, run: u32, entry: u32) {
        match self.half(block, run) {
            half if is_long(half) => self.cell(block, long_of(half)).store(entry, Ordering::Release),
            _ => self.blocks.store_half(half_of(block, run), entry as u16, Ordering::Release),
        }
    }

    /// Returns the run that contains a position.
    fn run_of(&self, block: u32, position: u32) -> u32 {
        (self.bitmap(block) << (63 - position)).count_ones() - 1
    }

    fn entry(&self, block: u32, position: u32) -> u32 {
        self.load(block, self.run_of(block, position))
    }

    fn record_of(&self, block: u32) -> &AtomicU32 {
        self.cell(block, record_cell_of(self.runs(block)))
    }

    fn record(&self, block: u32) -> u32 {
        self.record_of(block).load(Ordering::Relaxed)
    }

    fn set_record(&self, block: u32, record: u32) {
        self.record_of(block).store(record, Ordering::Relaxed);
    }

    fn expand(&self, block: u32) -> [u32; 64] {
        let mut entries = [NONE; 64];
        let mut starts = positions(self.bitmap(block)).peekable();
        for run in 0.. {
            let Some(start) = starts.next() else { break };
            let end = starts.peek().copied().unwrap_or(64);
            entries[start..end].fill(self.load(block, run));
        }
        entries
    }

    fn create(&mut self, tree: &mut Tree, entries: &[u32; 64], bitmap: u64, record: u32) -> u32 {
        let runs = bitmap.count_ones();
        let long = positions(bitmap).map(|position| u32::from(!is_short(entries[position]))).sum();
        let units = block_units(runs, long);
        let block = self.block_memory.allocate(units) * UNIT_CELLS as u32;
        tree.units += super::memory::rounded(units) as usize;
        self.cell(block, 0).store(bitmap as u32, Ordering::Relaxed);
        self.cell(block, 1).store((bitmap >> 32) as u32, Ordering::Relaxed);
        let mut next_long = record_cell_of(runs) + 1;
        for (run, position) in (0..).zip(positions(bitmap)) {
            let entry = entries[position];
            let half = if is_short(entry) { entry } else { next_long << 1 | 1 };
            self.blocks.store_half(half_of(block, run), half as u16, Ordering::Relaxed);
            if !is_short(entry) {
                self.cell(block, next_long).store(entry, Ordering::Release);
                next_long += 1;
            }
        }
        self.set_record(block, record);
        block
    }

    fn retire(&mut self, tree: &mut Tree, block: u32) {
        let units = block_units(self.runs(block), self.long_entries(block));
        tree.units -= super::memory::rounded(units) as usize;
        self.block_memory.retire(block / UNIT_CELLS as u32, units);
    }

    /// Gives a block new entries: in place if its runs and its long entries are the same, else in a new block.
    fn rebuild(&mut self, tree: &mut Tree, block: u32, entries: &[u32; 64]) -> u32 {
        let (old, new) = (self.bitmap(block), runs(entries));
        let is_same_form =
            |(run, position): (u32, usize)| is_long(self.half(block, run)) != is_short(entries[position]);
        if old == new && (0..).zip(positions(new)).all(is_same_form) {
            for (run, position) in (0..).zip(positions(new)) {
                if self.load(block, run) != entries[position] {
                    self.store(block, run, entries[position]);
                }
            }
            return block;
        }
        let record = self.record(block);
        let next = self.create(tree, entries, new, record);
        self.retire(tree, block);
        next
    }

    /// Sets the entries in the range of `key` which no longer route of the block covers, and those below them.
    fn apply(&mut self, tree: &mut Tree, block: u32, key: u32, value: u32) -> u32 {
        let affected = range(key) & !self.covered(self.record(block), key);
        if affected == 0 {
            return block;
        }
        let mut entries = self.expand(block);
        for position in positions(affected) {
            let entry = &mut entries[position];
            *entry = if is_block(*entry) { pointer(self.apply(tree, block_of(*entry), WHOLE, value)) } else { value };
        }
        self.rebuild(tree, block, &entries)
    }

    // Records.

    fn record_cell(&self, record: u32, cell: u32) -> &AtomicU32 {
        self.records.cell(record as usize * UNIT_CELLS + cell as usize)
    }

    fn keys(&self, record: u32) -> u128 {
        // The record 0 has no routes.
        (0..4).fold(0, |keys, i| keys | u128::from(self.record_cell(record, i).load(Ordering::Relaxed)) << (32 * i))
    }

    fn value(&self, record: u32, keys: u128, key: u32) -> u32 {
        let rank = (keys & ((1 << key) - 1)).count_ones();
        self.record_cell(record, 4 + rank).load(Ordering::Relaxed)
    }

    /// Returns the value of the longest route of a record that covers `key`, which may be that of `key` itself.
    fn longest(&self, record: u32, key: u32) -> Option<u32> {
        let keys = self.keys(record);
        let mut key = key;
        while key > WHOLE {
            if keys >> key & 1 != 0 {
                return Some(self.value(record, keys, key));
            }
            key >>= 1;
        }
        None
    }

    /// Returns the positions that routes longer than `key` cover.
    fn covered(&self, record: u32, key: u32) -> u64 {
        let keys = self.keys(record);
        let mut covered = 0;
        let (mut first, mut count) = (key * 2, 2);
        while first < 128 {
            let longer = (keys >> first) as u64 & (u64::MAX >> (64 - count));
            for longer in positions(longer) {
                covered |= range(first + longer as u32);
            }
            (first, count) = (first * 2, count * 2);
        }
        covered
    }

    /// Sets or removes (`NONE`) the value of a key. Returns the record and the old value.
    fn set_value(&mut self, tree: &mut Tree, record: u32, key: u32, value: u32) -> (u32, u32) {
        let keys = self.keys(record);
        let rank = (keys & ((1 << key) - 1)).count_ones();
        let old = if keys >> key & 1 != 0 { self.value(record, keys, key) } else { NONE };
        let count = keys.count_ones();
        let (next_keys, next_count) = match (old != NONE, value != NONE) {
            (true, true) => {
                self.record_cell(record, 4 + rank).store(value, Ordering::Relaxed);
                return (record, old);
            }
            (false, false) => return (record, NONE),
            (false, true) => (keys | 1 << key, count + 1),
            (true, false) => (keys & !(1 << key), count - 1),
        };
        let size = |count| if count == 0 { 0 } else { super::memory::rounded(record_units(count)) };
        let next = match (size(count), size(next_count)) {
            (old, new) if old == new => record,
            (_, 0) => 0,
            (_, new) => self.record_memory.allocate(new),
        };
        let copy = |forest: &Self, from: u32, to: u32| {
            let value = forest.record_cell(record, 4 + from).load(Ordering::Relaxed);
            forest.record_cell(next, 4 + to).store(value, Ordering::Relaxed);
        };
        if next != 0 {
            if next != record {
                (0..rank).for_each(|i| copy(self, i, i));
            }
            if value != NONE {
                (rank..count).rev().for_each(|i| copy(self, i, i + 1));
                self.record_cell(next, 4 + rank).store(value, Ordering::Relaxed);
            } else {
                (rank + 1..count).for_each(|i| copy(self, i, i - 1));
            }
            for i in 0..4 {
                self.record_cell(next, i).store((next_keys >> (32 * i)) as u32, Ordering::Relaxed);
            }
        }
        if next != record {
            tree.units += size(next_count) as usize;
            tree.units -= size(count) as usize;
            if record != 0 {
                self.record_memory.free(record, size(count));
            }
        }
        (next, old)
    }

    // Trees.

    /// Sets or removes (`NONE`) the value of a route, and returns the old one.
    pub(super) fn set(&mut self, tree: &mut Tree, bits: u128, len: u8, value: u32) -> u32 {
        let old = match len {
            0 => self.set_default(tree, value),
            _ => self.set_route(tree, bits, len.into(), value),
        };
        if old == value {
            return old;
        }
        tree.routes += usize::from(old == NONE);
        tree.routes -= usize::from(value == NONE);
        self.update_direct(tree, bits, len.into());
        old
    }

    fn set_default(&mut self, tree: &mut Tree, value: u32) -> u32 {
        let old = std::mem::replace(&mut tree.default, value);
        if old != value {
            tree.root = match tree.root {
                root if is_block(root) => pointer(self.apply(tree, block_of(root), WHOLE, value)),
                _ => value,
            };
        }
        old
    }

    fn set_route(&mut self, tree: &mut Tree, bits: u128, len: u32, value: u32) -> u32 {
        let target = ((len - 1) / STRIDE) as usize;
        let key = key_of(bits, len, target);
        // Blocks above the target, with the positions of the route in them.
        let mut path = [(0, 0); LEVELS];
        let (mut level, mut entry, mut inherited) = (0, tree.root, tree.default);
        while level < target && is_block(entry) {
            let (block, position) = (block_of(entry), position(bits, level));
            path[level] = (block, position);
            inherited = self.longest(self.record(block), 64 + position).unwrap_or(inherited);
            entry = self.entry(block, position);
            level += 1;
        }
        let (mut next, old) = if is_block(entry) {
            let block = block_of(entry);
            let (record, old) = self.set_value(tree, self.record(block), key, value);
            if old == value {
                return old;
            }
            self.set_record(block, record);
            let effective = if value == NONE { self.longest(record, key).unwrap_or(inherited) } else { value };
            let block = self.apply(tree, block, key, effective);
            (self.collapse(tree, block, inherited), old)
        } else if value == NONE {
            return NONE;
        } else {
            let mut entries = [inherited; 64];
            positions(range(key)).for_each(|position| entries[position] = value);
            let (record, _) = self.set_value(tree, 0, key, value);
            let mut next = pointer(self.create(tree, &entries, runs(&entries), record));
            for level in (level..target).rev() {
                let mut entries = [inherited; 64];
                entries[position(bits, level) as usize] = next;
                next = pointer(self.create(tree, &entries, runs(&entries), 0));
            }
            (next, NONE)
        };
        while level > 0 {
            level -= 1;
            let (block, position) = path[level];
            let run = self.run_of(block, position);
            let before = self.load(block, run);
            if before == next {
                return old;
            }
            if is_block(before) && is_block(next) {
                self.store(block, run, next);
                return old;
            }
            let mut entries = self.expand(block);
            entries[position as usize] = next;
            let block = self.rebuild(tree, block, &entries);
            // A block without routes and blocks below it has the same entry at all positions.
            next = self.collapse(tree, block, entries[0]);
        }
        tree.root = next;
        old
    }

    /// Returns the entry that points to a block, or retires a block without routes and blocks below it and returns
    /// `inherited`.
    fn collapse(&mut self, tree: &mut Tree, block: u32, inherited: u32) -> u32 {
        if self.record(block) != 0 || self.bitmap(block) != 1 || is_block(self.load(block, 0)) {
            return pointer(block);
        }
        self.retire(tree, block);
        inherited
    }

    /// Returns the value of a route.
    pub(super) fn get(&self, tree: &Tree, bits: u128, len: u8) -> u32 {
        let len = u32::from(len);
        if len == 0 {
            return tree.default;
        }
        let target = ((len - 1) / STRIDE) as usize;
        let mut entry = tree.root;
        for level in 0..target {
            if !is_block(entry) {
                return NONE;
            }
            entry = self.entry(block_of(entry), position(bits, level));
        }
        if !is_block(entry) {
            return NONE;
        }
        let record = self.record(block_of(entry));
        let (keys, key) = (self.keys(record), key_of(bits, len, target));
        if keys >> key & 1 != 0 { self.value(record, keys, key) } else { NONE }
    }

    // Direct tables.

    fn store_direct(&self, direct: Direct, cell: usize, entry: u32) {
        let cell = self.blocks.cell(direct.base as usize * UNIT_CELLS + cell);
        if cell.load(Ordering::Relaxed) != entry {
            cell.store(entry, Ordering::Release);
        }
    }

    /// Publishes the entries of a network.
    fn update_direct(&mut self, tree: &Tree, bits: u128, len: u32) {
        let direct = tree.direct;
        let first = direct.index(bits);
        if len < direct.bits {
            let last = first + (1 << (direct.bits - len));
            self.fill(direct, tree.root, 0, 0, first..last);
            return;
        }
        let mut entry = tree.root;
        for level in 0..(direct.bits / STRIDE) as usize {
            if !is_block(entry) {
                break;
            }
            entry = self.entry(block_of(entry), position(bits, level));
        }
        self.store_direct(direct, first, entry);
    }

    /// Fills the cells within `wanted` from an entry that covers `2^(bits - depth)` cells from `first` on.
    fn fill(&self, direct: Direct, entry: u32, depth: u32, first: usize, wanted: std::ops::Range<usize>) {
        let end = first + (1 << (direct.bits - depth));
        if depth == direct.bits || !is_block(entry) {
            for cell in first.max(wanted.start)..end.min(wanted.end) {
                self.store_direct(direct, cell, entry);
            }
            return;
        }
        let step = 1 << (direct.bits - depth - STRIDE);
        for (first, entry) in (first..).step_by(step).zip(self.expand(block_of(entry))) {
            if first < wanted.end && first + step > wanted.start {
                self.fill(direct, entry, depth + STRIDE, first, wanted.clone());
            }
        }
    }

    /// Creates the direct table of a tree with this number of bits. The caller publishes it, and then retires the
    /// old one.
    pub(super) fn new_direct(&mut self, tree: &mut Tree, bits: u32) -> Direct {
        let mut direct = Direct { base: 0, bits };
        direct.base = self.block_memory.allocate(direct.units());
        tree.units += super::memory::rounded(direct.units()) as usize;
        self.fill(direct, tree.root, 0, 0, 0..direct.cells());
        direct
    }

    /// Retires a direct table that is no longer published.
    pub(super) fn retire_direct(&mut self, tree: &mut Tree, direct: Direct) {
        tree.units -= super::memory::rounded(direct.units()) as usize;
        self.block_memory.retire(direct.base, direct.units());
    }

    /// Retires all blocks of a tree that is no longer published.
    pub(super) fn retire_tree(&mut self, tree: &mut Tree) {
        self.retire_entry(tree, tree.root);
        self.retire_direct(tree, tree.direct);
        *tree = Tree::default();
    }

    fn retire_entry(&mut self, tree: &mut Tree, entry: u32) {
        if !is_block(entry) {
            return;
        }
        let block = block_of(entry);
        for run in 0..self.runs(block) {
            self.retire_entry(tree, self.load(block, run));
        }
        let record = self.record(block);
        if record != 0 {
            let units = super::memory::rounded(record_units(self.keys(record).count_ones()));
            tree.units -= units as usize;
            self.record_memory.free(record, units);
        }
        self.retire(tree, block);
    }
}

/// Returns the key of a route in its block.
const fn key_of(bits: u128, len: u32, level: usize) -> u32 {
    let relative = len - level as u32 * STRIDE;
    1 << relative | position(bits, level) >> (STRIDE - relative)
}

/// Returns the positions of a block that a key covers.
const fn range(key: u32) -> u64 {
    // The highest bit of the key says how many bits follow.
    let width = key.leading_zeros() - (31 - STRIDE);
    let first = (key << width) & 63;
    (u64::MAX >> (64 - (1 << width))) << first
}

/// Returns the positions at which a run begins.
fn runs(entries: &[u32; 64]) -> u64 {
    let mut bitmap = 1;
    for position in 1..64 {
        bitmap |= u64::from(entries[position] != entries[position - 1]) << position;
    }
    bitmap
}

/// Iterates over the bits of a number that are set, from the lowest on.
#[inline(always)]
pub(super) fn positions(mut bitmap: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let position = bitmap.trailing_zeros();
        bitmap &= bitmap.wrapping_sub(1);
        (position < 64).then_some(position as usize)
    })
}

/// Iterates over the routes of a tree, ordered by address and then by prefix length.
#[derive(Debug)]
pub(super) struct Routes<'f> {
    forest: &'f Forest,
    default: u32,
    /// Blocks on the way.
    stack: Vec<Visit>,
}

/// A block that is being visited.
#[derive(Debug)]
struct Visit {
    block: u32,
    level: usize,
    /// Bits of the address in front of the block.
    front: u128,
    /// Key to visit next; 0 after the last one.
    key: u32,
}

impl Forest {
    /// Iterates over the routes behind `after`, or over all.
    pub(super) fn routes(&self, tree: &Tree, after: Option<(u128, u8)>) -> Routes<'_> {
        let mut routes = Routes { forest: self, default: NONE, stack: vec![] };
        let Some((bits, len)) = after.filter(|(_, len)| *len > 0) else {
            routes.default = if after.is_none() { tree.default } else { NONE };
            routes.push(tree.root, 0, 0);
            return routes;
        };
        let target = ((u32::from(len) - 1) / STRIDE) as usize;
        let (mut entry, mut level, mut front) = (tree.root, 0, 0);
        while is_block(entry) && level <= target {
            let (block, at) = (block_of(entry), position(bits, level));
            let key = if level == target { key_of(bits, len.into(), level) } else { 64 + at };
            if key < 64 {
                routes.stack.push(Visit { block, level, front, key: key * 2 });
                return routes;
            }
            // The block below this position comes before the next key.
            routes.stack.push(Visit { block, level, front, key: next_key(key) });
            entry = self.entry(block, at);
            front |= front_of(at, level);
            level += 1;
        }
        if level > target {
            routes.push(entry, level, front);
        }
        routes
    }
}

/// Returns the bits of a position of a block.
const fn front_of(position: u32, level: usize) -> u128 {
    (position as u128) << (128 - STRIDE) >> (level as u32 * STRIDE)
}

/// Returns the key behind a key and all below it; 0 after the last one.
const fn next_key(key: u32) -> u32 {
    match key >> key.trailing_ones() {
        0 => 0,
        left => left + 1,
    }
}

impl Routes<'_> {
    fn push(&mut self, entry: u32, level: usize, front: u128) {
        if is_block(entry) {
            self.stack.push(Visit { block: block_of(entry), level, front, key: WHOLE });
        }
    }
}

impl Iterator for Routes<'_> {
    /// Address bits, prefix length and stored value.
    type Item = (u128, u8, u32);

    fn next(&mut self) -> Option<Self::Item> {
        if self.default != NONE {
            return Some((0, 0, std::mem::replace(&mut self.default, NONE)));
        }
        loop {
            let visit = self.stack.last_mut()?;
            let (block, level, front, key) = (visit.block, visit.level, visit.front, visit.key);
            if key == 0 {
                self.stack.pop();
                continue;
            }
            if key < 64 {
                visit.key = key * 2;
            } else {
                let at = key - 64;
                visit.key = next_key(key);
                self.push(self.forest.entry(block, at), level + 1, front | front_of(at, level));
            }
            let record = self.forest.record(block);
            let keys = self.forest.keys(record);
            if keys >> key & 1 != 0 {
                let relative = 31 - key.leading_zeros();
                let at = (key << (STRIDE - relative)) & 63;
                let len = level as u32 * STRIDE + relative;
                return Some((front | front_of(at, level), len as u8, self.forest.value(record, keys, key)));
            }
        }
    }
}
