//! The registry: what can be looked at in a running program.
//!
//! A program consists of objects: ports, queues, workers, drops, forwarding entries and so on. Each kind of object
//! has a [`TableSpec`], which names its columns once. All displays are made from the rows of these tables: `wirepath
//! show`, its JSON form, the metrics and the live view. So all of them use the same words and the same figures.
//!
//! The runtime supplies the tables of [`TABLES`]. An application adds its own by [`crate::Control::tables`] and
//! [`crate::Control::list`].
//!
//! Each kind of object that can be changed has an [`ObjectSpec`]. A [`Change`] reaches the application by
//! [`crate::Control::change`]. A [`CommandSpec`] describes anything else that operators can ask for.
//!
//! Rows are read in pages of a bounded number of entries, on the control thread. No table stops a worker, and a
//! table of a million entries does not stop the control thread.

mod change;
mod command;
mod filter;
mod metrics;
mod page;
mod runtime;

pub use change::{Argument, ArgumentKind, Change, Changed, Management, ObjectSpec, Operation, PendingChange};
pub use command::{Command, CommandSpec};
pub use filter::{Filter, FilterError};
pub use metrics::{MAX_ROWS, MetricsFormat, MetricsText};
pub use page::{Listing, Page, Row};
pub use runtime::TABLES;

use crate::counter::METRICS_TABLE;
use crate::{Control, ControlPlane};

/// Description of a table: one kind of object that can be looked at.
#[derive(Debug)]
pub struct TableSpec {
    /// Name: a plural noun in lower case.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Middle part of the names of its metrics, such as `port` in `wirepath_port_rx_packets_total`; `None`: the
    /// table has too many rows for metrics.
    pub metric: Option<&'static str>,
    /// The columns. Keys come first.
    pub columns: &'static [Column],
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Name: lower-case words joined by `_`.
    pub name: &'static str,
    /// Meaning of its values.
    pub kind: ColumnKind,
    /// Description in one line.
    pub about: &'static str,
}

/// Meaning of the values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnKind {
    /// Identifies the row, together with the other keys. A label of its metrics.
    Key,
    /// Any other property.
    Attribute,
    /// A number that only grows while the program runs.
    Counter(Unit),
    /// A number that grows and shrinks.
    Gauge(Unit),
}

/// Unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A count of things that the column names.
    None,
    /// Packets.
    Packets,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Cycles of the time-stamp counter.
    Cycles,
}

impl Unit {
    /// Name of the unit in plural; empty for a count.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Packets => "packets",
            Self::Bytes => "bytes",
            Self::Seconds => "seconds",
            Self::Cycles => "cycles",
        }
    }
}

impl Column {
    /// A column that identifies the row.
    pub const fn key(name: &'static str, about: &'static str) -> Self {
        Self { name, kind: ColumnKind::Key, about }
    }

    /// A column with a property.
    pub const fn attribute(name: &'static str, about: &'static str) -> Self {
        Self { name, kind: ColumnKind::Attribute, about }
    }

    /// A column with a number that only grows.
    pub const fn counter(name: &'static str, unit: Unit, about: &'static str) -> Self {
        Self { name, kind: ColumnKind::Counter(unit), about }
    }

    /// A column with a number that grows and shrinks.
    pub const fn gauge(name: &'static str, unit: Unit, about: &'static str) -> Self {
        Self { name, kind: ColumnKind::Gauge(unit), about }
    }
}

impl TableSpec {
    /// Returns the index of a column.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name == name)
    }
}

/// Everything that can be looked at and changed in a running program.
pub struct Registry<'a> {
    /// The application.
    pub control: &'a mut (dyn Control + 'a),
    /// The runtime.
    pub plane: &'a mut ControlPlane,
}

impl Registry<'_> {
    /// Returns the tables: those of the runtime, followed by those of the application.
    pub fn tables(&mut self) -> Vec<&'static TableSpec> {
        TABLES.iter().copied().chain(self.control.tables()).collect()
    }

    /// Returns the table with this name.
    pub fn table(&mut self, name: &str) -> Option<&'static TableSpec> {
        self.tables().into_iter().find(|table| table.name == name)
    }

    /// Returns the rows of the next `entries` entries of a listing.
    pub fn next_page(&mut self, listing: &mut Listing, entries: usize) -> Vec<Row> {
        listing.next_page(entries, |table, page| {
            let is_own = TABLES.iter().any(|own| own.name == table.name) || table.name == METRICS_TABLE;
            if is_own {
                runtime::list(self.plane, table, page);
            } else {
                self.control.list(table, page, self.plane);
            }
        })
    }

    /// Carries out a change, or changes nothing and returns the reason.
    ///
    /// # Errors
    /// If no object has this name, if it does not have this operation or argument, and if the application refuses.
    pub fn change(&mut self, change: &Change<'_>) -> Result<Changed, String> {
        let objects = self.control.objects();
        let object = objects.iter().find(|object| object.name == change.object).ok_or_else(|| change.unknown())?;
        object.check(change).map_err(|error| object.part(change, &objects).unwrap_or(error))?;
        self.control.change(change, self.plane)
    }

    /// Returns all rows of a table, for tables of moderate size.
    pub fn rows(&mut self, table: &'static TableSpec) -> Vec<Row> {
        let mut listing = Listing::new(table, Filter::default());
        let mut rows = Vec::new();
        while !listing.is_done() {
            rows.append(&mut self.next_page(&mut listing, usize::MAX));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_unique_names_and_columns_with_keys_first() {
        for (i, table) in TABLES.iter().enumerate() {
            assert!(TABLES[..i].iter().all(|other| other.name != table.name), "{}", table.name);
            for (j, column) in table.columns.iter().enumerate() {
                assert_eq!(table.column(column.name), Some(j), "{}.{}", table.name, column.name);
                let word = column.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
                assert!(word && !column.about.is_empty(), "{}.{}", table.name, column.name);
            }
            let keys = table.columns.iter().filter(|column| column.kind == ColumnKind::Key).count();
            assert!(table.columns[..keys].iter().all(|column| column.kind == ColumnKind::Key), "{}", table.name);
        }
    }
}
