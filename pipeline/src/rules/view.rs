//! The tables of both directions, as workers see them.

use std::sync::Arc;

use wirepath_pmd::flow::Direction;
use wirepath_pmd::packet::BATCH;

use super::extract::Plan;
use super::hash::Secret;
use super::log::Log;
use super::records::{NONE, Records, Slab};
use super::slots::{SlotTable, product};
use crate::epoch::Shared;

/// What the control thread and the workers share.
///
/// **In which order things are seen:** the control thread writes records, tables, slab and view first and the version last; a worker
/// reads the version first. So whatever belongs to the version that a worker sees is there, and what is there beyond it is not for that
/// version ([`super::records::Record::is_there`]).
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) log: Log,
    pub(super) view: Shared<View>,
    pub(super) slab: Shared<Slab>,
}

#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) sides: [Side; 2],
}

/// The tables of one direction.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) plan: Arc<Plan>,
    pub(super) secret: Arc<Secret>,
    /// What the hashes of all tables are sums of.
    pub(super) products: Arc<[Product]>,
    /// Sorted by priority.
    pub(super) tables: Vec<TableView>,
    /// Index in `tables` for each table's number; `u16::MAX` if there is none.
    pub(super) places: Vec<u16>,
}

/// The rules of one mask.
#[derive(Clone, Debug)]
pub(super) struct TableView {
    /// Even at ingress, odd at egress. Stays the same when the table is replaced by a larger one.
    pub(super) number: u32,
    /// No rule in it has a lower one.
    pub(super) priority: u32,
    pub(super) slots: Arc<SlotTable>,
    pub(super) columns: Arc<[Column]>,
    /// Products that the hash of a key is the sum of.
    pub(super) terms: Arc<[u16]>,
}

/// One word of a table's key: what of which column of a row, and what its halves are multiplied with for the hash.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) column: u8,
    pub(super) mask: u64,
    pub(super) factors: [u64; 2],
}

/// Half a word under a mask, times a factor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) column: u8,
    /// 0 or 32.
    pub(super) shift: u32,
    pub(super) mask: u32,
    pub(super) factor: u64,
}

pub(super) const fn side(direction: Direction) -> usize {
    match direction {
        Direction::Ingress => 0,
        Direction::Egress => 1,
    }
}

impl Side {
    pub(super) fn table(&self, number: u32) -> Option<&TableView> {
        self.tables.get(usize::from(*self.places.get(number as usize)?))
    }
}

impl Product {
    /// Of some rows of a batch, each of `width` words.
    #[inline(always)]
    fn fill(&self, rows: &[u64], width: usize, which: &[u8], out: &mut [u64; BATCH]) {
        let (column, mask) = (usize::from(self.column), u64::from(self.mask));
        for (&i, out) in which.iter().zip(out) {
            let word = rows[usize::from(i) * width + column];
            *out = (word >> self.shift & mask).wrapping_mul(self.factor);
        }
    }
}

impl Side {
    /// All products of some rows of a batch, each of `width` words.
    pub(super) fn fill_products(&self, rows: &[u64], width: usize, which: &[u8], out: &mut [[u64; BATCH]]) {
        for (product, out) in self.products.iter().zip(out) {
            product.fill(rows, width, which, out);
        }
    }
}

impl TableView {
    /// Hash of the key of a packet in this table.
    pub(super) fn hash(&self, secret: &Secret, row: &[u64]) -> u32 {
        let products =
            self.columns.iter().map(|column| product(column.factors, row[usize::from(column.column)] & column.mask));
        secret.sum(products.fold(0, u64::wrapping_add))
    }

    /// The hashes of the rows whose products have the numbers in `which`, in its order. Those that may have a rule here are put at the
    /// beginning of `asked`; returns how many.
    #[inline(always)]
    pub(super) fn hash_batch(
        &self,
        secret: &Secret,
        products: &[[u64; BATCH]],
        which: &[u8],
        asked: (&mut [u8], &mut [u32]),
    ) -> usize {
        /// With the number of terms known, nothing is left of the inner loop.
        #[inline(always)]
        fn of<const N: usize>(
            (slots, secret): (&SlotTable, &Secret),
            products: [&[u64; BATCH]; N],
            which: &[u8],
            asked: (&mut [u8], &mut [u32]),
        ) -> usize {
            let hashes = which.iter().map(|&j| {
                let product = |all: &[u64; BATCH]| all[usize::from(j) % BATCH];
                (j, secret.sum(products.iter().fold(0, |sum: u64, all| sum.wrapping_add(product(all)))))
            });
            keep(slots, hashes, asked)
        }
        /// Without a branch: which of them are kept cannot be foreseen.
        #[inline(always)]
        fn keep(
            slots: &SlotTable,
            hashes: impl Iterator<Item = (u8, u32)>,
            (which, kept): (&mut [u8], &mut [u32]),
        ) -> usize {
            let mut n = 0;
            for (j, hash) in hashes {
                (which[n], kept[n]) = (j, hash);
                n += usize::from(slots.may_have(hash));
            }
            n
        }
        let get = |k: u16| &products[usize::from(k)];
        let with = (&*self.slots, secret);
        match *self.terms {
            [a] => of(with, [a].map(get), which, asked),
            [a, b] => of(with, [a, b].map(get), which, asked),
            [a, b, c] => of(with, [a, b, c].map(get), which, asked),
            [a, b, c, d] => of(with, [a, b, c, d].map(get), which, asked),
            [a, b, c, d, e] => of(with, [a, b, c, d, e].map(get), which, asked),
            [a, b, c, d, e, f] => of(with, [a, b, c, d, e, f].map(get), which, asked),
            ref all => {
                let hashes = which.iter().map(|&j| {
                    let product = |k: &u16| get(*k)[usize::from(j) % BATCH];
                    (j, secret.sum(all.iter().map(product).fold(0, u64::wrapping_add)))
                });
                keep(&self.slots, hashes, asked)
            }
        }
    }

    /// Asks for the lines where searches for these hashes start.
    #[inline(always)]
    pub(super) fn prefetch(&self, hashes: &[u32]) {
        let words = self.columns.len();
        hashes.iter().for_each(|hash| self.slots.prefetch(words, *hash));
    }

    /// Looks for the keys of the rows `misses[j]`, `j` in `which`: `found` gets `j` and the first record of those with the key.
    #[inline(always)]
    pub(super) fn find_batch(
        &self,
        packets: (&[u64], usize, &[u8]),
        asked: (&[u8], &[u32]),
        mut found: impl FnMut(u8, u32),
    ) {
        /// With the length of the key known, nothing is left of the inner loops.
        #[inline(always)]
        fn of(
            (slots, columns, words): (&SlotTable, &[Column], usize),
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
            1 => of((slots, columns, 1), packets, asked, &mut found),
            2 => of((slots, columns, 2), packets, asked, &mut found),
            3 => of((slots, columns, 3), packets, asked, &mut found),
            4 => of((slots, columns, 4), packets, asked, &mut found),
            words => of((slots, columns, words), packets, asked, &mut found),
        }
    }

    /// The first rule of the table that a packet fits in this version: index of its record.
    pub(super) fn find(&self, slab: Records<'_>, version: u64, hash: u32, row: &[u64]) -> Option<u32> {
        let word = |i: usize| {
            let Column { column, mask, .. } = self.columns[i];
            row[usize::from(column)] & mask
        };
        let found = self.slots.may_have(hash).then(|| self.slots.find(self.columns.len(), hash, word))??;
        first_there(slab, version, found)
    }
}

/// The first record of a chain that is there in this version.
#[inline(always)]
pub(super) fn first_there(slab: Records<'_>, version: u64, head: u32) -> Option<u32> {
    let mut index = head;
    while index != NONE {
        let record = slab.record(index);
        if record.is_there(version) {
            return Some(index);
        }
        index = record.next();
    }
    None
}
