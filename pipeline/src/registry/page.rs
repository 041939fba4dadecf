use std::any::Any;

use serde_json::Value;

use super::{Filter, TableSpec};

/// Cells of a row, in the order of the columns. `Null` is a value that does not exist.
pub type Row = Vec<Value>;

/// A listing of a table, made page by page. Entries that are added or removed meanwhile may be missing or listed
/// twice.
#[derive(Debug)]
pub struct Listing {
    table: &'static TableSpec,
    filter: Filter,
    /// Position of the next entry; `None` at the end.
    cursor: Option<u64>,
    state: Option<Box<dyn Any + Send>>,
}

impl Listing {
    /// Begins a listing of the rows that the filter accepts.
    pub fn new(table: &'static TableSpec, filter: Filter) -> Self {
        Self { table, filter, cursor: Some(0), state: None }
    }

    /// Returns the table.
    pub fn table(&self) -> &'static TableSpec {
        self.table
    }

    /// Returns whether all entries are listed.
    pub fn is_done(&self) -> bool {
        self.cursor.is_none()
    }

    /// Lets `fill` append the rows of the next `entries` entries, and returns the rows.
    pub fn next_page(&mut self, entries: usize, fill: impl FnOnce(&'static TableSpec, &mut Page<'_>)) -> Vec<Row> {
        let Some(cursor) = self.cursor else { return Vec::new() };
        let mut page = Page {
            filter: &self.filter,
            state: &mut self.state,
            cursor,
            left: entries.max(1),
            rows: Vec::new(),
            next: None,
        };
        fill(self.table, &mut page);
        let Page { rows, next, .. } = page;
        self.cursor = next;
        rows
    }
}

/// A part of a table: the rows of a bounded number of entries.
#[derive(Debug)]
pub struct Page<'l> {
    filter: &'l Filter,
    state: &'l mut Option<Box<dyn Any + Send>>,
    cursor: u64,
    /// Entries that the page may still contain.
    left: usize,
    rows: Vec<Row>,
    next: Option<u64>,
}

impl Page<'_> {
    /// Appends a row for each entry from the cursor on, until the page is full. `entries` are all entries of the
    /// table, in an order that stays the same between pages.
    pub fn extend<T>(&mut self, entries: impl IntoIterator<Item = T>, mut row: impl FnMut(T) -> Row) {
        let from = usize::try_from(self.cursor).unwrap_or(usize::MAX);
        let entries = (self.cursor..).zip(entries.into_iter().skip(from));
        self.extend_from(entries, |entry| Some(row(entry)));
    }

    /// Appends rows of entries that carry their own position. `entries` begin at [`Self::cursor`]. A position is
    /// larger than those before it. `row` returns `None` for an entry that is empty.
    pub fn extend_from<T>(
        &mut self,
        entries: impl IntoIterator<Item = (u64, T)>,
        mut row: impl FnMut(T) -> Option<Row>,
    ) {
        for (position, entry) in entries {
            if self.left == 0 {
                self.next = Some(position);
                return;
            }
            self.left -= 1;
            self.rows.extend(row(entry).filter(|row| self.filter.accepts(row)));
        }
    }

    /// Position of the first entry of this page.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Takes what [`Self::keep_state`] kept on the page before, such as a list of all keys; `None` on the first page.
    pub fn take_state<T: Any>(&mut self) -> Option<T> {
        self.state.take()?.downcast().ok().map(|state| *state)
    }

    /// Keeps a value for the next page of this listing.
    pub fn keep_state<T: Any + Send>(&mut self, state: T) {
        *self.state = Some(Box::new(state));
    }
}

#[cfg(test)]
mod tests {
    use super::super::TABLES;
    use super::*;

    #[test]
    fn pages_have_all_entries_once() {
        for entries in 1..12 {
            let mut listing = Listing::new(TABLES[0], Filter::default());
            let (mut all, mut pages) = (Vec::new(), 0);
            while !listing.is_done() {
                all.append(&mut listing.next_page(entries, |_, page| page.extend(0..10, |n| vec![n.into()])));
                pages += 1;
            }
            assert_eq!(all, (0..10).map(|n| vec![Value::from(n)]).collect::<Vec<_>>());
            assert_eq!(pages, 10usize.div_ceil(entries));
            assert!(listing.next_page(1, |_, page| page.extend([0], |_| vec![])).is_empty());
        }
    }

    #[test]
    fn a_listing_keeps_its_state() {
        let mut listing = Listing::new(TABLES[0], Filter::default());
        let mut first = true;
        while !listing.is_done() {
            let rows = listing.next_page(2, |_, page| {
                let names = page.take_state::<Vec<&'static str>>();
                assert_eq!(names.is_none(), first);
                let names = names.unwrap_or_else(|| vec!["a", "b", "c"]);
                page.extend(&names, |name| vec![(*name).into()]);
                page.keep_state(names);
            });
            assert_eq!(rows.len(), if first { 2 } else { 1 });
            first = false;
        }
    }
}
