//! The tables of both directions, as workers see them.

use std::sync::Arc;

use wirepath_pmd::flow::Direction;

use super::extract::Plan;
use super::log::Log;
use super::records::{NONE, Slab};
use super::slots::SlotTable;
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

#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) sides: [Side; 2],
}

/// The tables of one direction.
#[derive(Clone, Debug, Default)]
pub(super) struct Side {
    pub(super) plan: Arc<Plan>,
    /// Sorted by priority.
    pub(super) tables: Vec<TableView>,
    /// Index in `tables` for each table's number; `u16::MAX` if there is none.
    pub(super) places: Vec<u16>,
}

/// The rules of one mask.
#[derive(Clone, Debug)]
pub(super) struct TableView {
    /// Even at ingress, odd at egress. Stays the same when the table is replaced by a larger one with the same hashes.
    pub(super) number: u32,
    /// No rule in it has a lower one.
    pub(super) priority: u32,
    pub(super) slots: Arc<SlotTable>,
    /// Column of a row and mask, for each word of the key.
    pub(super) columns: Arc<[(u8, u64)]>,
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

impl TableView {
    /// Hash of the key of a packet in this table.
    #[inline(always)]
    pub(super) fn hash(&self, row: &[u64]) -> u32 {
        // The usual lengths without a loop.
        #[inline(always)]
        fn of<const N: usize>(table: &TableView, columns: &[(u8, u64); N], row: &[u64]) -> u32 {
            table.slots.secret().hash(columns.iter().map(|&(column, mask)| row[usize::from(column)] & mask))
        }
        match &*self.columns {
            [a] => of(self, &[*a], row),
            [a, b] => of(self, &[*a, *b], row),
            [a, b, c] => of(self, &[*a, *b, *c], row),
            [a, b, c, d] => of(self, &[*a, *b, *c, *d], row),
            all => self.slots.secret().hash(all.iter().map(|&(column, mask)| row[usize::from(column)] & mask)),
        }
    }

    /// The first rule of the table that a packet fits in this version: index of its record.
    #[inline(always)]
    pub(super) fn find(&self, slab: &Slab, version: u64, hash: u32, row: &[u64]) -> Option<u32> {
        let columns = &*self.columns;
        let head = self.slots.find(hash, |i| {
            let (column, mask) = columns[i];
            row[usize::from(column)] & mask
        })?;
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
}
