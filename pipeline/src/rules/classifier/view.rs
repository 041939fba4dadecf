//! The tables of both directions, as workers see them.

use std::sync::Arc;

use wirepath_flow::Direction;
use wirepath_packet::BATCH;

use super::extract::KeyLayout;
use super::hash_seed::HashSeed;
use super::hash_table::{ConcurrentTable, product};
use super::records::{NO_RECORD, Records, Slab};
use crate::epoch::Shared;
use crate::rules::control::change_log::ChangeLog;

/// State that the control thread and the workers share.
///
/// **Order of publication:** the control thread writes records, tables, slab and view first, and the version
/// last. A worker reads the version first. So everything that belongs to the version is visible to the
/// worker. Anything newer is not valid in that version ([`super::records::Record::is_valid_in`]).
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) log: ChangeLog,
    pub(crate) view: Shared<View>,
    pub(crate) slab: Shared<Slab>,
}

#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) directions: [DirectionView; 2],
}

/// The tables of one direction.
#[derive(Clone, Debug)]
pub(crate) struct DirectionView {
    pub(crate) layout: Arc<KeyLayout>,
    pub(crate) seed: Arc<HashSeed>,
    /// Products that the hashes of all tables are sums of.
    pub(crate) products: Arc<[Product]>,
    /// Tables sorted by priority.
    pub(crate) tables: Vec<TableView>,
    /// Index in `tables` by table number; `u16::MAX` if there is none.
    pub(crate) table_indices: Vec<u16>,
}

/// The rules of one mask.
#[derive(Clone, Debug)]
pub(crate) struct TableView {
    /// Number of the table: even at ingress, odd at egress. It does not change when the table is resized.
    pub(crate) number: u32,
    /// Lowest priority number among the rules of the table.
    pub(crate) priority: u32,
    pub(crate) slots: Arc<ConcurrentTable>,
    pub(crate) columns: Arc<[Column]>,
    /// Products whose sum is the hash of a key.
    pub(crate) terms: Arc<[u16]>,
}

/// One word of a table's key: the column of the row, the mask, and the hash factors of the two halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    pub(crate) column: u8,
    pub(crate) mask: u64,
    pub(crate) factors: [u64; 2],
}

/// Half a masked word, times a factor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) column: u8,
    /// Shift of the half: 0 or 32.
    pub(crate) shift: u32,
    pub(crate) mask: u32,
    pub(crate) factor: u64,
}

pub(crate) const fn direction_index(direction: Direction) -> usize {
    match direction {
        Direction::Ingress => 0,
        Direction::Egress => 1,
    }
}

impl DirectionView {
    pub(crate) fn table(&self, number: u32) -> Option<&TableView> {
        self.tables.get(usize::from(*self.table_indices.get(number as usize)?))
    }
}

impl Product {
    /// Computes the product for some rows of a batch, each of `width` words.
    #[inline(always)]
    fn fill(&self, rows: &[u64], width: usize, which: &[u8], out: &mut [u64; BATCH]) {
        let (column, mask) = (usize::from(self.column), u64::from(self.mask));
        for (&i, out) in which.iter().zip(out) {
            let word = rows[usize::from(i) * width + column];
            *out = (word >> self.shift & mask).wrapping_mul(self.factor);
        }
    }
}

impl DirectionView {
    /// Computes all products for some rows of a batch, each of `width` words.
    pub(crate) fn fill_products(&self, rows: &[u64], width: usize, which: &[u8], out: &mut [[u64; BATCH]]) {
        for (product, out) in self.products.iter().zip(out) {
            product.fill(rows, width, which, out);
        }
    }
}

impl TableView {
    /// Returns the hash of a packet's key in this table.
    pub(crate) fn hash(&self, seed: &HashSeed, row: &[u64]) -> u32 {
        let products =
            self.columns.iter().map(|column| product(column.factors, row[usize::from(column.column)] & column.mask));
        seed.sum(products.fold(0, u64::wrapping_add))
    }

    /// Computes the hashes of the packets in `which`, in that order. Packets that pass the filter are written
    /// to the beginning of `pending`; returns their number.
    #[inline(always)]
    pub(crate) fn hash_batch(
        &self,
        seed: &HashSeed,
        products: &[[u64; BATCH]],
        which: &[u8],
        pending: (&mut [u8], &mut [u32]),
    ) -> usize {
        /// Computes the hashes with a constant number of terms, so that the compiler unrolls the inner loop.
        #[inline(always)]
        fn of<const N: usize>(
            (slots, seed): (&ConcurrentTable, &HashSeed),
            products: [&[u64; BATCH]; N],
            which: &[u8],
            pending: (&mut [u8], &mut [u32]),
        ) -> usize {
            let hashes = which.iter().map(|&j| {
                let product = |all: &[u64; BATCH]| all[usize::from(j) % BATCH];
                (j, seed.sum(products.iter().fold(0, |sum: u64, all| sum.wrapping_add(product(all)))))
            });
            keep(slots, hashes, pending)
        }
        /// Keeps the packets that pass the filter. There is no branch, because its direction would not be
        /// predictable.
        #[inline(always)]
        fn keep(
            slots: &ConcurrentTable,
            hashes: impl Iterator<Item = (u8, u32)>,
            (which, kept): (&mut [u8], &mut [u32]),
        ) -> usize {
            let mut n = 0;
            for (j, hash) in hashes {
                (which[n], kept[n]) = (j, hash);
                n += usize::from(slots.may_contain(hash));
            }
            n
        }
        let get = |k: u16| &products[usize::from(k)];
        let with = (&*self.slots, seed);
        match *self.terms {
            [a] => of(with, [a].map(get), which, pending),
            [a, b] => of(with, [a, b].map(get), which, pending),
            [a, b, c] => of(with, [a, b, c].map(get), which, pending),
            [a, b, c, d] => of(with, [a, b, c, d].map(get), which, pending),
            [a, b, c, d, e] => of(with, [a, b, c, d, e].map(get), which, pending),
            [a, b, c, d, e, f] => of(with, [a, b, c, d, e, f].map(get), which, pending),
            ref all => {
                let hashes = which.iter().map(|&j| {
                    let product = |k: &u16| get(*k)[usize::from(j) % BATCH];
                    (j, seed.sum(all.iter().map(product).fold(0, u64::wrapping_add)))
                });
                keep(&self.slots, hashes, pending)
            }
        }
    }

    /// Prefetches the cache lines where searches for these hashes start.
    #[inline(always)]
    pub(crate) fn prefetch(&self, hashes: &[u32]) {
        let words = self.columns.len();
        hashes.iter().for_each(|hash| self.slots.prefetch(words, *hash));
    }

    /// Searches the keys of the rows `misses[j]`, for `j` in `which`. Calls `found` with `j` and the first
    /// record of each key that is found.
    #[inline(always)]
    pub(crate) fn find_batch(
        &self,
        packets: (&[u64], usize, &[u8]),
        pending: (&[u8], &[u32]),
        mut found: impl FnMut(u8, u32),
    ) {
        /// Searches with a constant key length, so that the compiler unrolls the inner loops.
        #[inline(always)]
        fn of(
            (slots, columns, words): (&ConcurrentTable, &[Column], usize),
            (rows, width, misses): (&[u64], usize, &[u8]),
            (which, hashes): (&[u8], &[u32]),
            found: &mut impl FnMut(u8, u32),
        ) {
            for (&j, &hash) in which.iter().zip(hashes) {
                let key = |i: usize| {
                    let Column { column, mask, .. } = columns[i];
                    rows[usize::from(misses[usize::from(j)]) * width + usize::from(column)] & mask
                };
                if let Some(head) = slots.find(words, hash, key) {
                    found(j, head);
                }
            }
        }
        let (slots, columns) = (&*self.slots, &*self.columns);
        match columns.len() {
            1 => of((slots, columns, 1), packets, pending, &mut found),
            2 => of((slots, columns, 2), packets, pending, &mut found),
            3 => of((slots, columns, 3), packets, pending, &mut found),
            4 => of((slots, columns, 4), packets, pending, &mut found),
            words => of((slots, columns, words), packets, pending, &mut found),
        }
    }

    /// Returns the record of the first rule in the table that a packet matches in this version.
    pub(crate) fn find(&self, slab: Records<'_>, version: u64, hash: u32, row: &[u64]) -> Option<u32> {
        let word = |i: usize| {
            let Column { column, mask, .. } = self.columns[i];
            row[usize::from(column)] & mask
        };
        let found = self.slots.may_contain(hash).then(|| self.slots.find(self.columns.len(), hash, word))??;
        first_valid(slab, version, found)
    }
}

/// Returns the first record of a chain that is valid in this version.
#[inline(always)]
pub(crate) fn first_valid(slab: Records<'_>, version: u64, head: u32) -> Option<u32> {
    let mut index = head;
    while index != NO_RECORD {
        let record = slab.record(index);
        if record.is_valid_in(version) {
            return Some(index);
        }
        index = record.next();
    }
    None
}
