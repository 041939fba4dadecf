//! Counters that an application registers, and their values on one thread.

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use wirepath_packet::counters::Counter;
use wirepath_packet::registered::{RegisterError, check_name, check_text};

use crate::registry::{Column, TableSpec, Unit};

/// A counter of the application. Workers add to it by [`Context::count`](crate::Context::count), the control thread by
/// [`ControlPlane::count`](crate::ControlPlane::count).
///
/// The sum is in the summary and in the table `counters`, the value of each worker in the table `worker_counters`.
/// Each counter has a family of metrics of its own: `packets_echoed` is `wirepath_app_packets_echoed_total`, with the
/// label `worker`, an index or `control`. No other code is necessary.
///
/// ```
/// use wirepath_pipeline::{Context, CounterId, Stage, registry::Unit};
/// use wirepath_packet::Batch;
///
/// fn counted() -> Result<impl Stage, wirepath_packet::registered::RegisterError> {
///     let seen = CounterId::register("batches_seen", Unit::None, "Batches that passed the stage")?;
///     Ok(move |context: &mut Context<'_>, _: &mut Batch| context.count(seen, 1))
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CounterId(u8);

/// Name, unit and text of a counter.
#[derive(Debug)]
struct Description {
    name: &'static str,
    unit: Unit,
    about: &'static str,
}

/// The registered counters, in the order of registration.
static REGISTERED: [OnceLock<Description>; CounterId::MAX_REGISTERED] =
    [const { OnceLock::new() }; CounterId::MAX_REGISTERED];

impl CounterId {
    /// Maximum number of counters that an application can register.
    pub const MAX_REGISTERED: usize = 1 << u8::BITS;

    /// Registers a counter for the whole process, or returns the one with the same name, unit and text. A program
    /// registers its counters at the start: the call takes a lock, and its texts stay in memory.
    ///
    /// `name` has at most [`MAX_NAME`](wirepath_packet::registered::MAX_NAME) lower-case letters, digits and `_`, and
    /// begins with a letter. `about` is one line for operators.
    ///
    /// # Errors
    /// If the name or the text is not valid, if another counter has the name, or if there are
    /// [`Self::MAX_REGISTERED`] counters.
    pub fn register(name: &str, unit: Unit, about: &str) -> Result<Self, RegisterError> {
        static LOCK: Mutex<()> = Mutex::new(());
        const WHAT: &str = "counter";
        check_name(WHAT, name)?;
        check_text(WHAT, name, about)?;
        let _lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        for (id, known) in descriptions() {
            if known.name == name {
                let same = known.unit == unit && known.about == about;
                let taken =
                    || RegisterError::Taken { what: WHAT, name: name.to_owned(), about: known.about.to_owned() };
                return same.then_some(id).ok_or_else(taken);
            }
            count += 1;
        }
        let place = REGISTERED.get(count).ok_or_else(|| RegisterError::TooMany {
            what: WHAT,
            name: name.to_owned(),
            most: Self::MAX_REGISTERED,
        })?;
        place.get_or_init(|| Description { name: String::from(name).leak(), unit, about: String::from(about).leak() });
        Ok(Self(count as u8))
    }

    /// Returns all counters, in the order of registration.
    pub fn all() -> impl Iterator<Item = Self> {
        descriptions().map(|(id, _)| id)
    }

    /// Name.
    pub fn name(self) -> &'static str {
        self.description().map_or("", |known| known.name)
    }

    /// Unit.
    pub fn unit(self) -> Unit {
        self.description().map_or(Unit::None, |known| known.unit)
    }

    /// Description in one line.
    pub fn about(self) -> &'static str {
        self.description().map_or("", |known| known.about)
    }

    fn description(self) -> Option<&'static Description> {
        REGISTERED[usize::from(self.0)].get()
    }
}

fn descriptions() -> impl Iterator<Item = (CounterId, &'static Description)> {
    REGISTERED.iter().enumerate().map_while(|(index, known)| Some((CounterId(index as u8), known.get()?)))
}

impl fmt::Debug for CounterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Values of all counters on one thread. There is one for each index, so that an access needs no check of bounds.
#[derive(Debug)]
pub struct CounterValues([Counter; CounterId::MAX_REGISTERED]);

impl CounterValues {
    /// Adds `n`. Single writer.
    #[inline(always)]
    pub fn add(&self, id: CounterId, n: u64) {
        self.0[usize::from(id.0)].add(n);
    }

    /// Returns a value.
    pub fn get(&self, id: CounterId) -> u64 {
        self.0[usize::from(id.0)].get()
    }

    /// Returns all counters with their values.
    pub fn all(&self) -> impl Iterator<Item = (CounterId, u64)> {
        CounterId::all().map(|id| (id, self.get(id)))
    }
}

impl Default for CounterValues {
    /// Values of zero.
    fn default() -> Self {
        Self([const { Counter::new() }; CounterId::MAX_REGISTERED])
    }
}

/// Name of the table of [`metrics_table`]. No operator can write it.
pub(crate) const METRICS_TABLE: &str = "counters by worker";

/// Returns the table whose metrics are those of the counters: a row for each thread, a column for each counter. There
/// is none without a counter. Displays of single counters use other tables, because a program may have many of them.
pub(crate) fn metrics_table() -> Option<&'static TableSpec> {
    // A table is made again only after further registrations, so few stay in memory.
    static TABLE: Mutex<Option<&'static TableSpec>> = Mutex::new(None);
    let count = CounterId::all().count();
    let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    if count == 0 {
        return None;
    }
    Some(match *table {
        Some(table) if table.columns.len() == count + 1 => table,
        _ => {
            let worker = Column::key("worker", "Index of the worker, or control: the control thread");
            let column = |(_, known): (CounterId, &Description)| Column::counter(known.name, known.unit, known.about);
            let columns: Vec<Column> = std::iter::once(worker).chain(descriptions().map(column)).collect();
            let spec = TableSpec {
                name: METRICS_TABLE,
                about: "Counters of the application by worker",
                metric: Some("app"),
                columns: columns.leak(),
            };
            table.insert(Box::leak(Box::new(spec)))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_meaning() {
        let id = CounterId::register("test_bytes", Unit::Bytes, "Bytes of a test").unwrap();
        assert_eq!(CounterId::register("test_bytes", Unit::Bytes, "Bytes of a test"), Ok(id));
        assert_eq!((id.name(), id.unit(), id.about()), ("test_bytes", Unit::Bytes, "Bytes of a test"));
        let error = |unit, about| CounterId::register("test_bytes", unit, about).unwrap_err().to_string();
        let expected = "the counter \"test_bytes\" exists already: \"Bytes of a test\"";
        assert_eq!([error(Unit::None, "Bytes of a test"), error(Unit::Bytes, "other")], [expected; 2]);
        for name in ["rm -rf", "a\u{1b}[2J", "\"", &"a".repeat(100)] {
            assert!(matches!(CounterId::register(name, Unit::None, "text"), Err(RegisterError::Name { .. })));
        }
        assert!(matches!(CounterId::register("x", Unit::None, "a\nb"), Err(RegisterError::Text { .. })));
        let values = CounterValues::default();
        values.add(id, 7);
        assert_eq!((values.get(id), values.all().find(|(other, _)| *other == id)), (7, Some((id, 7))));
    }
}
