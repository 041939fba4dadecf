// UNSAFETY: readers follow indices that the writer published, without bounds checks.
#![allow(unsafe_code)]

//! Routing tables: the longest matching prefix of an address, by VRF.
//!
//! [`RouteTables`] has an IPv4 and an IPv6 table for each VRF. The control thread holds the [`RouteWriter`], and the
//! workers look up addresses without locks:
//!
//! ```
//! use wirepath_pipeline::{epoch::Domain, route::{NO_ROUTE, RouteLimits, RouteWriter}};
//!
//! let domain = Domain::new();                              // in a program: runtime.domain()
//! let mut writer = RouteWriter::new(&domain, RouteLimits::default());
//! writer.insert(7, "10.0.0.0/8".parse()?, 1)?;             // on the control thread
//! writer.insert(7, "10.9.0.0/16".parse()?, 2)?;
//! let tables = writer.tables();                            // an Arc, for the stages
//! let reader = domain.join();                              // in a stage: context.guard()
//! let view = tables.view(reader.guard());
//! assert_eq!(view.lookup4(7, 0x0a09_0001), 2);
//! assert_eq!(view.lookup4(7, 0x0a08_0001), 1);
//! assert_eq!(view.lookup4(8, 0x0a08_0001), NO_ROUTE);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Structure
//! A table is a tree of blocks, each of which resolves six bits of the address (`tree.rs`). A block holds its runs of
//! equal entries only, so most blocks fill one cache line or half of one. The memory of a table therefore grows with
//! its routes. A *direct table* replaces the first 12 or 18 bits of the tree for readers when there are many routes.
//!
//! # Why concurrent reads are consistent
//! A change makes new blocks and publishes each with one store, or stores single entries in place. The longest match of
//! one address changes by one of these stores. A reader therefore finds the old or the new one. Replaced blocks are
//! used again when all readers have been quiescent.

mod group;
mod memory;
mod prefix;
#[cfg(all(test, not(loom)))]
mod tests;
mod tree;

use std::fmt;

use wirepath_packet::BATCH;

use crate::epoch::{Domain, Guard};
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::zeroed_memory::{Line, Pages, Zeroed};
pub use group::{GroupMember, NextHopGroup};
use memory::{Cells, Published, UNIT_CELLS};
pub use prefix::{NetworkPrefix, PrefixError};
use tree::{Direct, EMPTY_BLOCK, Forest, NONE, STRIDE, Tree, block_of, half_of, is_block, is_long, long_of, positions};

/// Result of a lookup that finds no route.
pub const NO_ROUTE: u32 = u32::MAX;

/// Largest value of a route.
pub const MAX_VALUE: u32 = (1 << 31) - 2;

/// Number of VRFs.
const VRFS: usize = if cfg!(loom) { 4 } else { 1 << 16 };

/// Number of bits of the direct tables, and the number of routes from which on a table has it. They then take 128 bytes
/// for each route. The last one fills the second-level cache of many processors. One block more answers nearly all
/// lookups of IPv4.
const DIRECT_BITS: [(u32, usize); 3] = [(0, 0), (12, 128), (18, 8192)];

/// Limits of the routing tables.
#[derive(Clone, Copy, Debug)]
pub struct RouteLimits {
    /// Bytes of all tables. Insertions beyond it fail. Free memory that the tables keep for later does not count. After
    /// many changes it is at most some times as much, and insertions may fail earlier.
    pub bytes: usize,
}

impl Default for RouteLimits {
    /// 2 GiB, enough for about 60 million IPv4 routes in one VRF, and for about half as many in many large VRFs.
    fn default() -> Self {
        Self { bytes: 2 << 30 }
    }
}

/// Error of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The value is larger than [`MAX_VALUE`].
    #[error("{0} is not the value of a route; the largest one is {MAX_VALUE}")]
    Value(u32),
    /// The tables have reached the limit of their memory.
    #[error("the routing tables take {bytes} bytes, which is their limit")]
    Full {
        /// Bytes in use.
        bytes: usize,
    },
}

/// The routing tables of all VRFs, as the workers see them.
pub struct RouteTables {
    cells: Arc<Cells>,
    /// Direct table of each VRF: first unit in the upper half, number of bits in the lower. Two numbers for each VRF:
    /// IPv4, IPv6. Zero, which all have at first, is a table of one entry, [`NONE`].
    directs: Zeroed<Line>,
    domain: Domain,
}

impl RouteTables {
    /// Returns the tables for the lifetime of the guard.
    ///
    /// # Panics
    /// Panics if the guard belongs to another domain.
    #[inline(always)]
    pub fn view<'g>(&'g self, guard: Guard<'g>) -> RouteView<'g> {
        guard.assert_domain(&self.domain);
        RouteView { tables: self, _guard: guard }
    }

    #[inline(always)]
    fn direct(&self, vrf: u16, family: usize) -> &AtomicU64 {
        let index = usize::from(vrf) % VRFS * 2 + family;
        // SAFETY: `directs` has two numbers for each VRF, eight in a line.
        unsafe { &self.directs.get_unchecked(index / 8).0[index % 8] }
    }
}

impl fmt::Debug for RouteTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouteTables").finish_non_exhaustive()
    }
}

/// Indices of `RouteTables::direct`.
const V4: usize = 0;
const V6: usize = 1;

/// The routing tables while a guard protects them.
#[derive(Clone, Copy, Debug)]
pub struct RouteView<'g> {
    tables: &'g RouteTables,
    _guard: Guard<'g>,
}

/// An address, from the most significant bit on.
trait Address: Copy {
    /// Index in `RouteTables::direct`.
    const FAMILY: usize;

    /// Returns the index in a direct table of `bits` bits.
    fn index(self, bits: u32) -> usize;

    /// Returns a number whose lowest six bits are those of the address behind the first `bits`. Behind its end are
    /// zeros.
    fn position(self, bits: u32) -> u32;
}

impl Address for u32 {
    const FAMILY: usize = V4;

    #[inline(always)]
    fn index(self, bits: u32) -> usize {
        (u64::from(self) >> (32 - bits)) as usize
    }

    #[inline(always)]
    fn position(self, bits: u32) -> u32 {
        (u64::from(self) << 4 >> (30 - bits)) as u32
    }
}

impl Address for u128 {
    const FAMILY: usize = V6;

    #[inline(always)]
    fn index(self, bits: u32) -> usize {
        // Two shifts, because a table may have 0 bits.
        ((self >> 64) as u64 >> 1 >> (63 - bits)) as usize
    }

    #[inline(always)]
    fn position(self, bits: u32) -> u32 {
        (self << bits >> (128 - STRIDE)) as u32
    }
}

/// Returns the value of an entry that is not a block.
#[inline(always)]
const fn decode(entry: u32) -> u32 {
    (entry >> 1).wrapping_sub(1)
}

const _: () = assert!(decode(NONE) == NO_ROUTE && decode(encode(MAX_VALUE)) == MAX_VALUE);

const fn encode(value: u32) -> u32 {
    (value + 1) << 1
}

impl RouteView<'_> {
    /// Returns the value of the longest route to an IPv4 address in a VRF, or [`NO_ROUTE`].
    #[inline]
    pub fn lookup4(&self, vrf: u16, address: u32) -> u32 {
        self.lookup(vrf, address)
    }

    /// Returns the value of the longest route to an IPv6 address in a VRF, or [`NO_ROUTE`].
    #[inline]
    pub fn lookup6(&self, vrf: u16, address: u128) -> u32 {
        self.lookup(vrf, address)
    }

    /// Stores the result of [`Self::lookup4`] in one VRF for each address.
    ///
    /// # Panics
    /// Panics if there are more than [`BATCH`] addresses, or if `values` has another length.
    #[inline]
    pub fn lookup4_batch(&self, vrf: u16, addresses: &[u32], values: &mut [u32]) {
        let direct = self.direct::<u32>(vrf);
        self.lookup_batch::<_, false>(|_| direct, |i| addresses[i], addresses.len(), values);
    }

    /// Stores the result of [`Self::lookup6`] in one VRF for each address.
    ///
    /// # Panics
    /// Panics if there are more than [`BATCH`] addresses, or if `values` has another length.
    #[inline]
    pub fn lookup6_batch(&self, vrf: u16, addresses: &[u128], values: &mut [u32]) {
        let direct = self.direct::<u128>(vrf);
        self.lookup_batch::<_, false>(|_| direct, |i| addresses[i], addresses.len(), values);
    }

    /// Stores the result of [`Self::lookup4`] for each pair of VRF and address.
    ///
    /// # Panics
    /// Panics if there are more than [`BATCH`] addresses, or if a slice has another length.
    #[inline]
    pub fn lookup4_vrfs(&self, vrfs: &[u16], addresses: &[u32], values: &mut [u32]) {
        let count = addresses.len();
        let vrfs = &vrfs[..count];
        let directs = self.directs::<u32>(vrfs);
        self.lookup_batch::<_, true>(|i| directs[i % BATCH], |i| addresses[i], count, values);
    }

    /// Stores the result of [`Self::lookup6`] for each pair of VRF and address.
    ///
    /// # Panics
    /// Panics if there are more than [`BATCH`] addresses, or if a slice has another length.
    #[inline]
    pub fn lookup6_vrfs(&self, vrfs: &[u16], addresses: &[u128], values: &mut [u32]) {
        let count = addresses.len();
        let vrfs = &vrfs[..count];
        let directs = self.directs::<u128>(vrfs);
        self.lookup_batch::<_, true>(|i| directs[i % BATCH], |i| addresses[i], count, values);
    }

    #[inline(always)]
    fn direct<A: Address>(&self, vrf: u16) -> Direct {
        let direct = self.tables.direct(vrf, A::FAMILY).load(Ordering::Acquire);
        Direct { base: (direct >> 32) as u32, bits: direct as u32 & 31 }
    }

    /// Returns the direct tables of VRFs. Each is read once, because the writer may replace it meanwhile.
    #[inline(always)]
    fn directs<A: Address>(&self, vrfs: &[u16]) -> [Direct; BATCH] {
        let mut directs = [Direct::default(); BATCH];
        directs.iter_mut().zip(vrfs).for_each(|(direct, vrf)| *direct = self.direct::<A>(*vrf));
        directs
    }

    #[inline(always)]
    fn lookup<A: Address>(&self, vrf: u16, address: A) -> u32 {
        let (cells, direct) = (self.tables.cells.published(), self.direct::<A>(vrf));
        let mut entry = load(cells, direct.base as usize * UNIT_CELLS + address.index(direct.bits));
        let mut bits = direct.bits;
        while is_block(entry) {
            entry = entry_in(cells, block_of(entry), address.position(bits));
            bits += STRIDE;
        }
        decode(entry)
    }

    /// Looks up a batch. Each level of the trees is a pass over all addresses, so that the cache misses overlap. A pass
    /// prefetches the blocks of the next one. With `PREFETCH`, the addresses have several direct tables, whose entries
    /// are prefetched too.
    ///
    /// The first two passes handle all addresses. With many routes, most entries of a direct table lead to blocks, and
    /// few entries of these lead to others.
    #[inline(always)]
    fn lookup_batch<A: Address, const PREFETCH: bool>(
        &self,
        direct: impl Fn(usize) -> Direct,
        address: impl Fn(usize) -> A,
        count: usize,
        values: &mut [u32],
    ) {
        assert!(count <= BATCH && values.len() == count, "a batch of addresses and one value for each");
        let cells = self.tables.cells.published();
        let cell = |i: usize| {
            let direct = direct(i);
            direct.base as usize * UNIT_CELLS + address(i).index(direct.bits)
        };
        if PREFETCH {
            (0..count).for_each(|i| cells.prefetch(cell(i)));
        }
        for (i, value) in values.iter_mut().enumerate() {
            *value = load(cells, cell(i));
            prefetch_block(cells, *value);
        }
        // Addresses that are not resolved yet: their entries are blocks.
        let mut open = 0u64;
        for (i, value) in values.iter_mut().enumerate() {
            let block = if is_block(*value) { block_of(*value) } else { EMPTY_BLOCK };
            let below = entry_in(cells, block, address(i).position(direct(i).bits));
            *value = if is_block(*value) { below } else { *value };
            open |= u64::from(is_block(*value)) << i;
            prefetch_block(cells, *value);
        }
        let mut level = 1;
        while open != 0 {
            for i in positions(std::mem::take(&mut open)) {
                let position = address(i).position(direct(i).bits + level * STRIDE);
                values[i] = entry_in(cells, block_of(values[i]), position);
                prefetch_block(cells, values[i]);
                open |= u64::from(is_block(values[i])) << i;
            }
            level += 1;
        }
        values.iter_mut().for_each(|value| *value = decode(*value));
    }
}

/// Returns the entry of a cell that the writer published.
#[inline(always)]
fn load(cells: Published<'_>, cell: usize) -> u32 {
    // SAFETY: all callers take the index from a published direct table or block. The guard keeps both allocated.
    // Acquire makes the content of a block visible that the entry points to.
    unsafe { cells.cell(cell) }.load(Ordering::Acquire)
}

/// Returns the entry of an address in a block.
#[inline(always)]
fn entry_in(cells: Published<'_>, block: u32, position: u32) -> u32 {
    // SAFETY: all callers take the block from a published entry. The bitmap does not change after that.
    let bitmap = unsafe { cells.pair(block as usize) };
    // The bit of position 0 is always set, so the count is at least 1.
    let run = bitmap.wrapping_shl(!position).count_ones() - 1;
    // SAFETY: the block has a half cell for each run.
    let half = unsafe { cells.half(half_of(block, run), Ordering::Acquire) };
    if is_long(half) { load(cells, (block + long_of(half)) as usize) } else { half.into() }
}

/// Prefetches the block of an entry, if it is one.
#[inline(always)]
fn prefetch_block(cells: Published<'_>, entry: u32) {
    cells.prefetch(if is_block(entry) { entry as usize } else { 0 });
}

const _: () = assert!(BATCH == u64::BITS as usize);

/// The only writer of [`RouteTables`], on the control thread.
#[derive(Debug)]
pub struct RouteWriter {
    tables: Arc<RouteTables>,
    forest: Forest,
    /// Trees of each VRF: IPv4, IPv6.
    vrfs: Vec<Option<Box<[Tree; 2]>>>,
    limits: RouteLimits,
}

impl RouteWriter {
    /// Creates empty tables and their writer.
    pub fn new(domain: &Domain, limits: RouteLimits) -> Self {
        // Retired blocks, free blocks of other sizes and removals need room too. Addresses cost nothing.
        let reserve = |share: usize| limits.bytes.saturating_mul(share).min(16 << 30);
        Self::with_memory(domain, limits, Cells::reserve(reserve(6)), Cells::reserve(reserve(2)))
    }

    fn with_memory(domain: &Domain, limits: RouteLimits, blocks: Cells, records: Cells) -> Self {
        let cells = Arc::new(blocks);
        let forest = Forest::new(Arc::clone(&cells), records);
        let directs = Zeroed::new(VRFS * 2 / 8, Pages::Small);
        let tables = Arc::new(RouteTables { cells, directs, domain: domain.clone() });
        Self { tables, forest, vrfs: vec![], limits }
    }

    /// Returns the tables that the workers read.
    pub fn tables(&self) -> Arc<RouteTables> {
        Arc::clone(&self.tables)
    }

    /// Inserts a route or changes its value. Returns the old value.
    ///
    /// # Errors
    /// The value is larger than [`MAX_VALUE`], or the tables have reached the limit of their memory.
    pub fn insert(&mut self, vrf: u16, prefix: NetworkPrefix, value: u32) -> Result<Option<u32>, RouteError> {
        if value > MAX_VALUE {
            return Err(RouteError::Value(value));
        }
        let bytes = self.memory();
        let (blocks, records) = (&self.forest.block_memory, &self.forest.record_memory);
        if bytes >= self.limits.bytes || !blocks.keeps_room_for_copies(0) || records.unused_bytes() < records.bytes() {
            return Err(RouteError::Full { bytes });
        }
        let index = usize::from(vrf);
        if self.vrfs.len() <= index {
            self.vrfs.resize_with(index + 1, || None);
        }
        if self.vrfs[index].is_none() {
            let trees = [V4, V6].map(|family| {
                let mut tree = Tree::default();
                tree.direct = self.forest.new_direct(&mut tree, 0);
                publish(&self.tables, vrf, family, tree.direct);
                tree
            });
            self.vrfs[index] = Some(Box::new(trees));
        }
        Ok(self.set(vrf, prefix, encode(value)))
    }

    /// Removes a route. Returns its value.
    pub fn remove(&mut self, vrf: u16, prefix: NetworkPrefix) -> Option<u32> {
        self.set(vrf, prefix, NONE)
    }

    fn set(&mut self, vrf: u16, prefix: NetworkPrefix, value: u32) -> Option<u32> {
        let family = usize::from(prefix.is_ipv6());
        let tree = &mut self.vrfs.get_mut(usize::from(vrf))?.as_mut()?[family];
        let old = self.forest.set(tree, prefix.bits(), prefix.len(), value);
        // A table keeps its direct table until it has much fewer routes.
        let bits = |routes: usize| DIRECT_BITS.iter().rev().find(|(_, from)| routes >= *from).map_or(0, |it| it.0);
        let wanted = bits(tree.routes).max(tree.direct.bits.min(bits(tree.routes * 4)));
        // Half of the memory stays for routes.
        let (blocks, table) = (&self.forest.block_memory, size_of::<u32>() << wanted);
        let in_use = blocks.bytes() + self.forest.record_memory.bytes();
        let has_room = in_use + table <= self.limits.bytes / 2 && blocks.keeps_room_for_copies(table);
        if wanted < tree.direct.bits || (wanted > tree.direct.bits && has_room) {
            let before = tree.direct;
            tree.direct = self.forest.new_direct(tree, wanted);
            publish(&self.tables, vrf, family, tree.direct);
            self.forest.retire_direct(tree, before);
        }
        self.forest.block_memory.flush(&self.tables.domain);
        (old != NONE).then(|| decode(old))
    }

    fn tree(&self, vrf: u16, is_ipv6: bool) -> Option<&Tree> {
        Some(&self.vrfs.get(usize::from(vrf))?.as_ref()?[usize::from(is_ipv6)])
    }

    /// Returns the value of a route with exactly this prefix.
    pub fn get(&self, vrf: u16, prefix: NetworkPrefix) -> Option<u32> {
        let value = self.forest.get(self.tree(vrf, prefix.is_ipv6())?, prefix.bits(), prefix.len());
        (value != NONE).then(|| decode(value))
    }

    /// Iterates over the routes of a VRF in the order of their prefixes.
    pub fn iter(&self, vrf: u16) -> impl Iterator<Item = (NetworkPrefix, u32)> {
        self.iter_after(vrf, None)
    }

    /// Iterates over the routes of a VRF whose prefixes follow `after`, which need not exist. A listing in several
    /// parts continues with this.
    pub fn iter_after(&self, vrf: u16, after: Option<NetworkPrefix>) -> impl Iterator<Item = (NetworkPrefix, u32)> {
        [false, true].into_iter().filter(move |is_v6| after.is_none_or(|after| !after.is_ipv6() || *is_v6)).flat_map(
            move |is_v6| {
                let after = after.filter(|after| after.is_ipv6() == is_v6);
                let routes = self
                    .tree(vrf, is_v6)
                    .map(|tree| self.forest.routes(tree, after.map(|after| (after.bits(), after.len()))));
                routes
                    .into_iter()
                    .flatten()
                    .map(move |(bits, len, value)| (NetworkPrefix::from_bits(is_v6, bits, len), decode(value)))
            },
        )
    }

    /// Number of routes of a VRF: IPv4, IPv6.
    pub fn route_count(&self, vrf: u16) -> (usize, usize) {
        let count = |is_v6| self.tree(vrf, is_v6).map_or(0, |tree| tree.routes);
        (count(false), count(true))
    }

    /// Removes all routes of a VRF. Returns whether it had tables.
    pub fn remove_vrf(&mut self, vrf: u16) -> bool {
        let Some(mut trees) = self.vrfs.get_mut(usize::from(vrf)).and_then(Option::take) else { return false };
        for (family, tree) in trees.iter_mut().enumerate() {
            publish(&self.tables, vrf, family, Direct::default());
            self.forest.retire_tree(tree);
        }
        self.forest.block_memory.flush(&self.tables.domain);
        true
    }

    /// Iterates over the VRFs that have tables.
    pub fn vrfs(&self) -> impl Iterator<Item = u16> {
        (0..=u16::MAX).zip(&self.vrfs).filter(|(_, trees)| trees.is_some()).map(|(vrf, _)| vrf)
    }

    /// Memory of the tables of a VRF in bytes.
    pub fn vrf_memory(&self, vrf: u16) -> usize {
        let units = |is_v6| self.tree(vrf, is_v6).map_or(0, |tree| tree.units);
        (units(false) + units(true)) * UNIT_CELLS * size_of::<u32>()
    }

    /// Takes back the memory of replaced blocks that no worker uses any more. The control thread may call this
    /// periodically; changes do it too.
    pub fn reclaim(&mut self) {
        self.forest.block_memory.reclaim(&self.tables.domain);
    }

    /// Memory of all tables in bytes, with that of replaced blocks which workers may still use. Free blocks do not
    /// count.
    pub fn memory(&self) -> usize {
        self.forest.block_memory.bytes() + self.forest.record_memory.bytes()
    }
}

fn publish(tables: &RouteTables, vrf: u16, family: usize, direct: Direct) {
    let number = u64::from(direct.base) << 32 | u64::from(direct.bits);
    tables.direct(vrf, family).store(number, Ordering::Release);
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    /// While the writer inserts nested routes, changes and removes them, a reader finds a route that covers its
    /// address. The route has a value that it had at some time. Blocks are made, replaced and changed in place.
    #[test]
    fn readers_find_the_old_or_the_new_route() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let domain = Domain::new();
            let mut writer = RouteWriter::new(&domain, RouteLimits { bytes: 1 << 11 });
            let tables = writer.tables();
            let route = |text: &str| text.parse::<NetworkPrefix>().unwrap();
            writer.insert(1, route("128.0.0.0/1"), 10).unwrap();
            let mut reader = domain.join();
            let worker = thread::spawn(move || {
                for _ in 0..2 {
                    let view = tables.view(reader.guard());
                    let found = view.lookup4(1, 0x8000_0001);
                    assert!([10, 20, 30, 31].contains(&found), "{found}");
                    let found = view.lookup4(1, 0xf000_0001);
                    assert!([10, 20].contains(&found), "{found}");
                    reader.quiescent();
                }
            });
            writer.insert(1, route("128.0.0.0/8"), 30).unwrap();
            writer.insert(1, route("128.0.0.0/8"), 31).unwrap();
            writer.insert(1, route("128.0.0.0/1"), 20).unwrap();
            writer.reclaim();
            writer.remove(1, route("128.0.0.0/8"));
            worker.join().unwrap();
            writer.reclaim();
        });
    }
}
