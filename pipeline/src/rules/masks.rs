//! The tables of all masks, as the control thread has them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::RuleTableError;
use super::extract::Plan;
use super::growing::Growing;
use super::hash::Secret;
use super::records::{NONE, Slab};
use super::slots::{Full, Hash, SlotTable};
use super::view::{Column, Product, Side, TableView, View};

/// Bits that rules compare: index of the word and mask.
pub(super) type Mask = Box<[(u8, u64)]>;

/// Keys for which a first table is made.
const FIRST: usize = 16;

/// The rules of one mask.
#[derive(Debug)]
struct Table {
    mask: Mask,
    keys: Growing,
    /// How many rules have each priority.
    priorities: BTreeMap<u32, usize>,
    /// What workers take for the lowest.
    published: u32,
    columns: Arc<[Column]>,
    terms: Arc<[u16]>,
    /// Plan that the columns follow.
    plan: u64,
}

/// All tables of both directions, and what of them the workers see.
#[derive(Debug)]
pub(super) struct Masks {
    tables: BTreeMap<u32, Table>,
    numbers: [HashMap<Mask, u32>; 2],
    plans: [Arc<Plan>; 2],
    next_plan: u64,
    /// Of the hashes in all tables.
    secret: Arc<Secret>,
    /// The workers must forget what they know of this direction.
    replan: [bool; 2],
    /// The workers' view is not what it should be.
    stale: bool,
}

impl Masks {
    pub(super) fn new() -> Self {
        Self {
            tables: BTreeMap::new(),
            numbers: [HashMap::new(), HashMap::new()],
            plans: [Arc::default(), Arc::default()],
            next_plan: 1,
            secret: Arc::new(Secret::new()),
            replan: [false; 2],
            stale: false,
        }
    }

    /// The table of a mask; a new one if need be.
    pub(super) fn number(&mut self, side: usize, mask: &Mask, limit: usize) -> Result<u32, RuleTableError> {
        if let Some(number) = self.numbers[side].get(mask) {
            return Ok(*number);
        }
        if self.numbers[side].len() >= limit {
            self.forget_empty();
        }
        if self.numbers[side].len() >= limit {
            return Err(RuleTableError::TooManyMasks { limit });
        }
        let words = mask.iter().map(|(word, _)| *word).collect();
        let slots = SlotTable::new(mask.len(), FIRST, Hash::Sums(Arc::clone(&self.secret), words));
        let table = Table {
            mask: mask.clone(),
            keys: Growing::new(slots),
            priorities: BTreeMap::new(),
            published: u32::MAX,
            columns: Arc::new([]),
            terms: Arc::new([]),
            plan: 0,
        };
        let number = self.free_number(side);
        self.tables.insert(number, table);
        self.numbers[side].insert(mask.clone(), number);
        self.stale = true;
        Ok(number)
    }

    fn free_number(&self, side: usize) -> u32 {
        // The smallest that is free: a table that went took the workers' plan along.
        (side as u32..).step_by(2).find(|number| !self.tables.contains_key(number)).unwrap_or(side as u32)
    }

    /// Puts a record among those of its key, in order. Returns the hash of the key.
    pub(super) fn link(
        &mut self,
        slab: &Slab,
        number: u32,
        key: &[u64],
        record: u32,
        alike: usize,
    ) -> Result<u32, RuleTableError> {
        let priority = slab.record(record).priority();
        let table = self.tables.get_mut(&number).expect("tables with rules stay");
        let slots = table.keys.slots();
        let hash = slots.hash(key);
        if let Some(position) = slots.position(hash, |i| key[i]) {
            let first = slots.get(position).unwrap_or(NONE);
            let head = link_into(first, slab, record, alike)?;
            if head != first {
                table.keys.set(position, hash, key, Some(head));
            }
        } else {
            self.stale |= table.keys.insert(hash, key, record).map_err(|Full| RuleTableError::Crowded)?;
        }
        *table.priorities.entry(priority).or_default() += 1;
        self.stale |= priority < table.published;
        Ok(hash)
    }

    /// Takes a record from among those of its key.
    pub(super) fn unlink(&mut self, slab: &Slab, number: u32, key: &[u64], record: u32) {
        let table = self.tables.get_mut(&number).expect("tables with rules stay");
        let slots = table.keys.slots();
        let hash = slots.hash(key);
        let next = slab.record(record).next();
        let position = slots.position(hash, |i| key[i]).expect("what was linked is there");
        let mut at = slots.get(position).unwrap_or(NONE);
        if at == record {
            table.keys.set(position, hash, key, (next != NONE).then_some(next));
        } else {
            while at != NONE && slab.record(at).next() != record {
                at = slab.record(at).next();
            }
            if at != NONE {
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

    /// Forgets tables without rules, and lets the workers know where lower priorities are gone. True if the workers' view changes.
    pub(super) fn tidy(&mut self) -> bool {
        self.forget_empty();
        self.tables.values_mut().for_each(|table| table.keys.tidy());
        self.stale |= self.tables.values().any(|table| table.lowest() != table.published);
        self.stale
    }

    fn forget_empty(&mut self) {
        for (number, table) in self.tables.extract_if(.., |_, table| table.priorities.is_empty()) {
            let side = number as usize % 2;
            self.numbers[side].remove(&table.mask);
            // Workers know tables by number: with another plan they forget what they knew.
            (self.stale, self.replan[side]) = (true, true);
        }
    }

    /// What the workers are to see, if it has changed.
    pub(super) fn view(&mut self) -> Option<View> {
        if !std::mem::take(&mut self.stale) {
            return None;
        }
        Some(self.all())
    }

    /// What the workers are to see.
    pub(super) fn all(&mut self) -> View {
        View { sides: [self.side(0), self.side(1)] }
    }

    fn side(&mut self, side: usize) -> Side {
        let of_side = |number: &u32| *number as usize % 2 == side;
        let mut words: BTreeMap<u8, u64> = BTreeMap::new();
        for (_, table) in self.tables.iter().filter(|(number, _)| of_side(number)) {
            for &(word, mask) in &table.mask {
                *words.entry(word).or_default() |= mask;
            }
        }
        let words: Box<[(u8, u64)]> = words.into_iter().collect();
        if std::mem::take(&mut self.replan[side]) || words != self.plans[side].words {
            self.next_plan += 1;
            self.plans[side] = Arc::new(Plan { id: self.next_plan, words });
        }
        let plan = Arc::clone(&self.plans[side]);
        let column = |word: u8| plan.words.iter().position(|(other, _)| *other == word).unwrap_or(0) as u8;
        let mut products = Products::default();
        let mut tables = Vec::new();
        for (&number, table) in self.tables.iter_mut().filter(|(number, _)| of_side(number)) {
            if table.plan != plan.id {
                table.plan = plan.id;
                let factors = |word| self.secret.factors(word);
                let of = |&(word, mask): &(u8, u64)| Column { column: column(word), mask, factors: factors(word) };
                table.columns = table.mask.iter().map(of).collect();
            }
            // Their numbers depend on the tables before.
            table.terms = products.of(&table.columns);
            table.published = table.lowest();
            tables.push(TableView {
                number,
                priority: table.published,
                slots: Arc::clone(table.keys.slots()),
                columns: Arc::clone(&table.columns),
                terms: Arc::clone(&table.terms),
            });
        }
        tables.sort_by_key(|table| table.priority);
        let last = tables.iter().map(|table| table.number as usize).max();
        let mut places = vec![u16::MAX; last.map_or(0, |last| last + 1)];
        for (place, table) in tables.iter().enumerate() {
            places[table.number as usize] = place as u16;
        }
        Side { plan, secret: Arc::clone(&self.secret), products: products.all.into(), tables, places }
    }

    /// Masks of one direction.
    pub(super) fn len(&self, side: usize) -> usize {
        self.numbers[side].len()
    }

    /// Bytes of all tables.
    pub(super) fn bytes(&self) -> usize {
        self.tables.values().map(|table| table.keys.bytes()).sum()
    }
}

/// The products that the hashes of all tables of one direction consist of.
#[derive(Default)]
struct Products {
    all: Vec<Product>,
    numbers: HashMap<(u8, bool, u32), u16>,
}

impl Products {
    /// Numbers of those of a key.
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
    fn lowest(&self) -> u32 {
        self.priorities.first_key_value().map_or(u32::MAX, |(priority, _)| *priority)
    }
}

/// Records whose rules are gone and that workers may still see, at most, in the chain of one key: bounds what a lookup costs while rules
/// of one pattern are replaced faster than a worker moves on.
const PASSING: usize = 4096;

/// Puts a record into the chain of its key, of which this is the first one. Returns which is the first then: readers are to find it last,
/// since who finds it finds what is behind it.
fn link_into(first: u32, slab: &Slab, record: u32, alike: usize) -> Result<u32, RuleTableError> {
    let this = slab.record(record);
    let (mut before, mut at, mut place) = (NONE, first, None);
    let (mut living, mut length) = (1, 1);
    while at != NONE {
        let other = slab.record(at);
        if place.is_none() && this.order() < other.order() {
            place = Some((before, at));
        }
        (before, at) = (at, other.next());
        living += usize::from(!other.is_over());
        length += 1;
    }
    if living > alike || length > alike.saturating_add(PASSING) {
        return Err(RuleTableError::TooManyAlike { limit: alike });
    }
    let (before, behind) = place.unwrap_or((before, NONE));
    this.set_next(behind);
    if before == NONE {
        return Ok(record);
    }
    slab.record(before).set_next(record);
    Ok(first)
}
