//! Tuple space: the hash tables of all masks, as the control thread has them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::extract::KeyLayout;
use super::hash_seed::HashSeed;
use super::hash_table::{ConcurrentTable, Full, Hash};
use super::incremental_resize::ResizableTable;
use super::records::{NO_RECORD, Slab};
use super::view::{Column, DirectionView, Product, TableView, View};
use crate::rules::RuleTableError;

/// Bits that a rule compares: index and mask of each word.
pub(crate) type Mask = Box<[(u8, u64)]>;

/// Capacity of a new table.
const INITIAL_CAPACITY: usize = 16;

/// The rules of one mask.
#[derive(Debug)]
struct Table {
    mask: Mask,
    keys: ResizableTable,
    /// Number of rules of each priority.
    priorities: BTreeMap<u32, usize>,
    /// Lowest priority published to workers.
    published_priority: u32,
    columns: Arc<[Column]>,
    terms: Arc<[u16]>,
    /// Id of the key layout that the columns use.
    layout: u64,
}

/// All tables of both directions, and the view of them that the workers use.
#[derive(Debug)]
pub(crate) struct TupleSpace {
    tables: BTreeMap<u32, Table>,
    numbers: [HashMap<Mask, u32>; 2],
    layouts: [Arc<KeyLayout>; 2],
    next_layout: u64,
    /// Seed of the hashes in all tables.
    seed: Arc<HashSeed>,
    /// True for a direction whose workers must flush their caches.
    relayout: [bool; 2],
    /// True if the workers' view is out of date.
    stale: bool,
}

impl TupleSpace {
    pub(crate) fn new() -> Self {
        Self {
            tables: BTreeMap::new(),
            numbers: [HashMap::new(), HashMap::new()],
            layouts: [Arc::default(), Arc::default()],
            next_layout: 1,
            seed: Arc::new(HashSeed::new()),
            relayout: [false; 2],
            stale: false,
        }
    }

    /// Returns the number of a mask's table, and creates the table if necessary.
    pub(crate) fn number(&mut self, direction: usize, mask: &Mask, limit: usize) -> Result<u32, RuleTableError> {
        if let Some(number) = self.numbers[direction].get(mask) {
            return Ok(*number);
        }
        if self.numbers[direction].len() >= limit {
            self.remove_empty_tables();
        }
        if self.numbers[direction].len() >= limit {
            return Err(RuleTableError::TooManyMasks { limit });
        }
        let words = mask.iter().map(|(word, _)| *word).collect();
        let slots = ConcurrentTable::new(mask.len(), INITIAL_CAPACITY, Hash::Sums(Arc::clone(&self.seed), words));
        let table = Table {
            mask: mask.clone(),
            keys: ResizableTable::new(slots),
            priorities: BTreeMap::new(),
            published_priority: u32::MAX,
            columns: Arc::new([]),
            terms: Arc::new([]),
            layout: 0,
        };
        let number = self.free_number(direction);
        self.tables.insert(number, table);
        self.numbers[direction].insert(mask.clone(), number);
        self.stale = true;
        Ok(number)
    }

    fn free_number(&self, direction: usize) -> u32 {
        // The smallest free number. When a table is removed, the workers get a new key layout, so numbers can
        // be reused.
        (direction as u32..).step_by(2).find(|number| !self.tables.contains_key(number)).unwrap_or(direction as u32)
    }

    /// Links a record into the chain of its key, in matching order. Returns the hash of the key.
    pub(crate) fn link(
        &mut self,
        slab: &Slab,
        number: u32,
        key: &[u64],
        record: u32,
        duplicates: usize,
    ) -> Result<u32, RuleTableError> {
        let priority = slab.record(record).priority();
        let table = self.tables.get_mut(&number).expect("tables with rules stay");
        let slots = table.keys.slots();
        let hash = slots.hash(key);
        if let Some(position) = slots.position(hash, |i| key[i]) {
            let first = slots.get(position).unwrap_or(NO_RECORD);
            let head = link_into(first, slab, record, duplicates)?;
            if head != first {
                table.keys.set(position, hash, key, Some(head));
            }
        } else {
            self.stale |= table.keys.insert(hash, key, record).map_err(|Full| RuleTableError::HashCollisions)?;
        }
        *table.priorities.entry(priority).or_default() += 1;
        self.stale |= priority < table.published_priority;
        Ok(hash)
    }

    /// Unlinks a record from the chain of its key.
    pub(crate) fn unlink(&mut self, slab: &Slab, number: u32, key: &[u64], record: u32) {
        let table = self.tables.get_mut(&number).expect("tables with rules stay");
        let slots = table.keys.slots();
        let hash = slots.hash(key);
        let next = slab.record(record).next();
        let position = slots.position(hash, |i| key[i]).expect("what was linked is there");
        let mut at = slots.get(position).unwrap_or(NO_RECORD);
        if at == record {
            table.keys.set(position, hash, key, (next != NO_RECORD).then_some(next));
        } else {
            while at != NO_RECORD && slab.record(at).next() != record {
                at = slab.record(at).next();
            }
            if at != NO_RECORD {
                slab.record(at).set_next(next);
            }
        }
        let priority = slab.record(record).priority();
        if let Some(count) = table.priorities.get_mut(&priority) {
            *count -= 1;
            if *count == 0 {
                table.priorities.remove(&priority);
            }
        }
    }

    /// Removes tables without rules, and updates lowest priorities that have changed. Returns true if the
    /// workers' view changes.
    pub(crate) fn gc(&mut self) -> bool {
        self.remove_empty_tables();
        self.tables.values_mut().for_each(|table| table.keys.free_previous());
        self.stale |= self.tables.values().any(|table| table.lowest_priority() != table.published_priority);
        self.stale
    }

    fn remove_empty_tables(&mut self) {
        for (number, table) in self.tables.extract_if(.., |_, table| table.priorities.is_empty()) {
            let direction = number as usize % 2;
            self.numbers[direction].remove(&table.mask);
            // Workers identify tables by number. A new key layout makes them flush their caches.
            (self.stale, self.relayout[direction]) = (true, true);
        }
    }

    /// Returns the workers' view if it has changed.
    pub(crate) fn view(&mut self) -> Option<View> {
        if !std::mem::take(&mut self.stale) {
            return None;
        }
        Some(self.all())
    }

    /// Returns the workers' view.
    pub(crate) fn all(&mut self) -> View {
        View { directions: [self.direction_view(0), self.direction_view(1)] }
    }

    fn direction_view(&mut self, direction: usize) -> DirectionView {
        let of_side = |number: &u32| *number as usize % 2 == direction;
        let mut words: BTreeMap<u8, u64> = BTreeMap::new();
        for (_, table) in self.tables.iter().filter(|(number, _)| of_side(number)) {
            for &(word, mask) in &table.mask {
                *words.entry(word).or_default() |= mask;
            }
        }
        let words: Box<[(u8, u64)]> = words.into_iter().collect();
        if std::mem::take(&mut self.relayout[direction]) || words != self.layouts[direction].words {
            self.next_layout += 1;
            self.layouts[direction] = Arc::new(KeyLayout { id: self.next_layout, words });
        }
        let layout = Arc::clone(&self.layouts[direction]);
        let column = |word: u8| layout.words.iter().position(|(other, _)| *other == word).unwrap_or(0) as u8;
        let mut products = Products::default();
        let mut tables = Vec::new();
        for (&number, table) in self.tables.iter_mut().filter(|(number, _)| of_side(number)) {
            if table.layout != layout.id {
                table.layout = layout.id;
                let factors = |word| self.seed.factors(word);
                let of = |&(word, mask): &(u8, u64)| Column { column: column(word), mask, factors: factors(word) };
                table.columns = table.mask.iter().map(of).collect();
            }
            // The indices depend on the tables before this one.
            table.terms = products.of(&table.columns);
            table.published_priority = table.lowest_priority();
            tables.push(TableView {
                number,
                priority: table.published_priority,
                slots: Arc::clone(table.keys.slots()),
                columns: Arc::clone(&table.columns),
                terms: Arc::clone(&table.terms),
            });
        }
        tables.sort_by_key(|table| table.priority);
        let last = tables.iter().map(|table| table.number as usize).max();
        let mut table_indices = vec![u16::MAX; last.map_or(0, |last| last + 1)];
        for (index, table) in tables.iter().enumerate() {
            table_indices[table.number as usize] = index as u16;
        }
        DirectionView { layout, seed: Arc::clone(&self.seed), products: products.all.into(), tables, table_indices }
    }

    /// Returns the number of masks of one direction.
    pub(crate) fn len(&self, direction: usize) -> usize {
        self.numbers[direction].len()
    }

    /// Returns the memory of all tables in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.tables.values().map(|table| table.keys.bytes()).sum()
    }
}

/// The products that make up the hashes of all tables of one direction.
#[derive(Default)]
struct Products {
    all: Vec<Product>,
    numbers: HashMap<(u8, bool, u32), u16>,
}

impl Products {
    /// Returns the indices of the products of a key.
    fn of(&mut self, columns: &[Column]) -> Arc<[u16]> {
        let halves = columns.iter().flat_map(|column| {
            let half = |high: bool| (column, high, (column.mask >> (32 * u32::from(high))) as u32);
            [half(false), half(true)]
        });
        halves
            .filter(|(.., mask)| *mask != 0)
            .map(|(column, high, mask)| {
                *self.numbers.entry((column.column, high, mask)).or_insert_with(|| {
                    let shift = 32 * u32::from(high);
                    let factor = column.factors[usize::from(high)];
                    self.all.push(Product { column: column.column, shift, mask, factor });
                    (self.all.len() - 1) as u16
                })
            })
            .collect()
    }
}

impl Table {
    fn lowest_priority(&self) -> u32 {
        self.priorities.first_key_value().map_or(u32::MAX, |(priority, _)| *priority)
    }
}

/// Maximum number of removed records in the chain of one key that workers may still use. It bounds the cost
/// of a lookup while rules of one pattern are replaced faster than a worker makes progress.
const MAX_PENDING_REMOVALS: usize = 4096;

/// Links a record into the chain of its key, which starts at `first`. Returns the new first record. The
/// record is made reachable last, because a reader that finds it follows its `next`.
fn link_into(first: u32, slab: &Slab, record: u32, duplicates: usize) -> Result<u32, RuleTableError> {
    let this = slab.record(record);
    let (mut before, mut at, mut insert_at) = (NO_RECORD, first, None);
    let (mut living, mut length) = (1, 1);
    while at != NO_RECORD {
        let other = slab.record(at);
        if insert_at.is_none() && this.order() < other.order() {
            insert_at = Some((before, at));
        }
        (before, at) = (at, other.next());
        living += usize::from(!other.is_retired());
        length += 1;
    }
    if living > duplicates || length > duplicates.saturating_add(MAX_PENDING_REMOVALS) {
        return Err(RuleTableError::TooManyDuplicates { limit: duplicates });
    }
    let (before, behind) = insert_at.unwrap_or((before, NO_RECORD));
    this.set_next(behind);
    if before == NO_RECORD {
        return Ok(record);
    }
    slab.record(before).set_next(record);
    Ok(first)
}
