//! Figures of the live view: the rows of each pane, made from two samples.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use super::sample::Sample;
use wirepath::cli::Rate;
use wirepath::control_socket::Rows;

/// A pane: one kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pane {
    Ports,
    Workers,
    Drops,
    Queues,
    Segments,
    Rules,
}

impl Pane {
    /// All panes, in the order of their keys.
    pub(super) const ALL: [Self; 6] =
        [Self::Ports, Self::Workers, Self::Drops, Self::Queues, Self::Segments, Self::Rules];

    /// Name of its table.
    pub(super) const fn table(self) -> &'static str {
        match self {
            Self::Ports => "ports",
            Self::Workers => "workers",
            Self::Drops => "drops",
            Self::Queues => "queues",
            Self::Segments => "segments",
            Self::Rules => "rules",
        }
    }
}

/// Restriction of a pane after a key has opened a row of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// All rows; drops are summed by reason.
    All,
    /// The queues of a port.
    Port(String),
    /// The places of drops with a reason.
    Reason(String),
}

/// A column of a pane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Columns with a larger number are left out first; 0: always shown.
    pub(super) priority: u8,
    pub(super) is_number: bool,
}

/// A cell.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Text(String),
    /// A rate per second, or another number with a prefix.
    Rate(f64),
    /// A number with one decimal.
    Ratio(f64),
    Count(u64),
    Percent(f64),
    /// A value that does not exist, or not yet.
    None,
}

/// A row of a pane.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) cells: Vec<Cell>,
    /// Pane that Enter opens on this row.
    pub(super) opens: Option<(Pane, Scope)>,
}

/// The rows of a pane.
#[derive(Clone, Debug, Default)]
pub(super) struct Grid {
    pub(super) columns: Vec<Column>,
    pub(super) lines: Vec<Line>,
    /// Index of the column by which the pane is sorted until the user chooses another one.
    pub(super) sorted_by: usize,
}

/// Rates of the whole program; `None` before the second sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) rx_pps: Option<f64>,
    pub(super) rx_bps: Option<f64>,
    pub(super) tx_pps: Option<f64>,
    pub(super) tx_bps: Option<f64>,
    pub(super) drop_pps: Option<f64>,
}

impl Cell {
    /// Text on the screen.
    pub(super) fn text(&self) -> String {
        match self {
            // A name may come from a device or a file, so it may contain anything.
            Self::Text(text) if !text.is_empty() => {
                text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
            }
            Self::Text(_) | Self::None => "-".to_owned(),
            Self::Rate(rate) => Rate(*rate).to_string().trim_end().to_owned(),
            Self::Ratio(ratio) => format!("{ratio:.1}"),
            Self::Count(count) => count.to_string(),
            Self::Percent(percent) => format!("{percent:.0}%"),
        }
    }

    fn number(&self) -> Option<f64> {
        match self {
            Self::Rate(number) | Self::Ratio(number) | Self::Percent(number) => Some(*number),
            Self::Count(count) => Some(*count as f64),
            Self::Text(_) | Self::None => None,
        }
    }

    /// Order of an ascending list. Numbers come after what has no number.
    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(a), Self::Text(b)) => natural(a, b),
            _ => match (self.number(), other.number()) {
                (Some(a), Some(b)) => a.total_cmp(&b),
                (a, b) => a.is_some().cmp(&b.is_some()),
            },
        }
    }
}

/// Order of texts by which `port9` comes before `port10`.
fn natural(a: &str, b: &str) -> Ordering {
    let split = |text: &str| {
        let digits = text.chars().rev().take_while(char::is_ascii_digit).count();
        let (name, number) = text.split_at(text.len() - digits);
        (name.to_owned(), number.parse::<u64>().ok())
    };
    split(a).cmp(&split(b)).then_with(|| a.cmp(b))
}

impl Grid {
    /// Keeps the rows of which a cell contains the text, in any case.
    pub(super) fn filter(&mut self, text: &str) {
        let text = text.to_lowercase();
        self.lines.retain(|line| line.cells.iter().any(|cell| cell.text().to_lowercase().contains(&text)));
    }

    /// Sorts the rows: numbers with the highest first, texts in ascending order, or the reverse.
    pub(super) fn sort(&mut self, column: usize, reverse: bool) {
        let Some(is_number) = self.columns.get(column).map(|column| column.is_number) else { return };
        let none = Cell::None;
        self.lines.sort_by(|a, b| {
            let (a, b) = (a.cells.get(column).unwrap_or(&none), b.cells.get(column).unwrap_or(&none));
            if is_number != reverse { b.order(a) } else { a.order(b) }
        });
    }

    /// Returns the indices of the columns that fit into a width, with two blanks between columns.
    pub(super) fn fitting(&self, widths: &[usize], width: usize) -> Vec<usize> {
        let mut shown: Vec<usize> = (0..self.columns.len().min(widths.len())).collect();
        while shown.iter().map(|i| widths[*i] + 2).sum::<usize>() > width + 2 {
            // Of equal priorities, the last column is left out.
            let Some(worst) = shown.iter().copied().max_by_key(|i| (self.columns[*i].priority, *i)) else { break };
            if self.columns[worst].priority == 0 {
                break;
            }
            shown.retain(|i| *i != worst);
        }
        shown
    }
}

/// A table at two times.
struct Table<'s> {
    new: &'s Rows,
    old: Option<HashMap<String, &'s Vec<Value>>>,
    seconds: f64,
    keys: &'static [&'static str],
}

/// A row of a [`Table`].
#[derive(Clone, Copy)]
struct Entry<'s, 't> {
    table: &'t Table<'s>,
    row: &'s Vec<Value>,
    old: Option<&'s Vec<Value>>,
}

impl<'s> Table<'s> {
    fn of(before: Option<&'s Sample>, now: &'s Sample, name: &str, keys: &'static [&'static str]) -> Option<Self> {
        let (at, new) = now.0.get(name)?;
        let mut table = Self { new, old: None, seconds: 0.0, keys };
        if let Some((earlier, rows)) = before.and_then(|before| before.0.get(name)) {
            table.seconds = at.saturating_duration_since(*earlier).as_secs_f64().max(1e-9);
            table.old = Some(rows.rows.iter().map(|row| (table.key(row), row)).collect());
        }
        Some(table)
    }

    fn column(&self, name: &str) -> Option<usize> {
        self.new.columns.iter().position(|column| column == name)
    }

    fn key(&self, row: &[Value]) -> String {
        let cell = |name: &&str| self.column(name).and_then(|i| row.get(i));
        self.keys.iter().map(|name| format!("{}\n", cell(name).unwrap_or(&Value::Null))).collect()
    }

    fn entries(&self) -> impl Iterator<Item = Entry<'s, '_>> {
        self.new.rows.iter().map(|row| {
            let old = self.old.as_ref().and_then(|old| old.get(&self.key(row)).copied());
            Entry { table: self, row, old }
        })
    }

    /// Sum of the rates of all rows; `None` before the second sample.
    fn total(&self, column: &str) -> Option<f64> {
        self.old.as_ref()?;
        Some(self.entries().filter_map(|entry| entry.rate(column)).sum())
    }
}

impl Entry<'_, '_> {
    fn value(&self, column: &str) -> &Value {
        self.table.column(column).and_then(|i| self.row.get(i)).unwrap_or(&Value::Null)
    }

    fn text(&self, column: &str) -> String {
        match self.value(column) {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }

    fn count(&self, column: &str) -> Option<u64> {
        self.value(column).as_u64()
    }

    /// Growth since the sample before; `None` if there is none. A row that is new began with 0.
    fn growth(&self, column: &str) -> Option<u64> {
        self.table.old.as_ref()?;
        let now = self.count(column)?;
        let index = self.table.column(column)?;
        Some(now.saturating_sub(self.old.and_then(|row| row.get(index)?.as_u64()).unwrap_or(0)))
    }

    /// Growth per second.
    fn rate(&self, column: &str) -> Option<f64> {
        Some(self.growth(column)? as f64 / self.table.seconds)
    }

    fn rate_cell(&self, column: &str) -> Cell {
        self.rate(column).map_or(Cell::None, Cell::Rate)
    }

    fn bits_cell(&self, column: &str) -> Cell {
        self.rate(column).map_or(Cell::None, |bytes| Cell::Rate(bytes * 8.0))
    }

    fn count_cell(&self, column: &str) -> Cell {
        self.count(column).map_or(Cell::None, Cell::Count)
    }

    fn sum_of_rates(&self, columns: &[&str]) -> Option<f64> {
        columns.iter().map(|column| self.rate(column)).sum()
    }
}

/// Quotient of two growths; none if nothing happened.
fn quotient(part: Option<u64>, whole: Option<u64>) -> Option<f64> {
    let whole = whole.filter(|whole| *whole > 0)?;
    Some(part? as f64 / whole as f64)
}

const fn text(title: &'static str, priority: u8) -> Column {
    Column { title, priority, is_number: false }
}

const fn number(title: &'static str, priority: u8) -> Column {
    Column { title, priority, is_number: true }
}

const PORT_KEYS: &[&str] = &["port"];
const QUEUE_KEYS: &[&str] = &["port", "direction", "queue"];
const DROP_KEYS: &[&str] = &["place", "name", "queue", "reason"];

/// Returns the rates of the whole program.
pub(super) fn totals(before: Option<&Sample>, now: &Sample) -> Totals {
    let ports = Table::of(before, now, "ports", PORT_KEYS);
    let total = |column: &str| ports.as_ref().and_then(|ports| ports.total(column));
    let drops = Table::of(before, now, "drops", DROP_KEYS);
    Totals {
        rx_pps: total("rx_packets"),
        rx_bps: total("rx_bytes").map(|bytes| bytes * 8.0),
        tx_pps: total("tx_packets"),
        tx_bps: total("tx_bytes").map(|bytes| bytes * 8.0),
        drop_pps: drops.and_then(|drops| drops.total("packets")),
    }
}

/// Returns the rows of a pane, not sorted. The sample before may lack.
pub(super) fn grid(pane: Pane, scope: &Scope, before: Option<&Sample>, now: &Sample) -> Grid {
    match pane {
        Pane::Ports => ports(before, now),
        Pane::Workers => workers(before, now),
        Pane::Drops => drops(scope, before, now),
        Pane::Queues => queues(scope, before, now),
        Pane::Segments => segments(before, now),
        Pane::Rules => rules(before, now),
    }
}

fn ports(before: Option<&Sample>, now: &Sample) -> Grid {
    let columns = vec![
        text("PORT", 0),
        text("STATE", 1),
        number("RX pps", 1),
        number("RX bit/s", 2),
        number("TX pps", 1),
        number("TX bit/s", 2),
        number("DROPS/s", 1),
        text("DRIVER", 3),
        number("RX TOTAL", 4),
        number("TX TOTAL", 4),
        text("DEVICE", 5),
        text("MODE", 6),
    ];
    let Some(table) = Table::of(before, now, "ports", PORT_KEYS) else { return Grid::default() };
    let line = |port: Entry<'_, '_>| {
        let drops = port.sum_of_rates(&["rx_drops", "tx_drops", "device_drops"]);
        let name = port.text("port");
        Line {
            cells: vec![
                Cell::Text(name.clone()),
                Cell::Text(port.text("state")),
                port.rate_cell("rx_packets"),
                port.bits_cell("rx_bytes"),
                port.rate_cell("tx_packets"),
                port.bits_cell("tx_bytes"),
                drops.map_or(Cell::None, Cell::Rate),
                Cell::Text(port.text("driver")),
                port.count_cell("rx_packets"),
                port.count_cell("tx_packets"),
                Cell::Text(port.text("device")),
                Cell::Text(port.text("mode")),
            ],
            opens: Some((Pane::Queues, Scope::Port(name))),
        }
    };
    Grid { columns, lines: table.entries().map(line).collect(), sorted_by: 0 }
}

/// Returns the sum of a value over the receive queues of a worker, such as `east/0 west/0`; `None` if that of one is
/// unknown.
fn received(names: &str, queues: &Table<'_>, value: impl Fn(&Entry<'_, '_>) -> Option<u64>) -> Option<u64> {
    let of_queue = |name: &str| {
        let (port, index) = name.rsplit_once('/')?;
        let is_it =
            |it: &Entry<'_, '_>| it.text("port") == port && it.text("queue") == index && it.text("direction") == "rx";
        value(&queues.entries().find(is_it)?)
    };
    names.split_whitespace().map(of_queue).sum()
}

fn workers(before: Option<&Sample>, now: &Sample) -> Grid {
    let columns = vec![
        text("WORKER", 0),
        text("CORE", 1),
        number("LOAD", 1),
        number("TURNS/s", 4),
        number("SLEEPS/s", 2),
        number("PKTS/TURN", 2),
        number("CYC/PKT", 1),
        number("FILL", 2),
        number("WAITING", 2),
        number("DROPS/s", 3),
        number("HANDED/s", 5),
        number("PUNTS/s", 5),
        text("QUEUES", 6),
    ];
    let Some(table) = Table::of(before, now, "workers", &["worker"]) else { return Grid::default() };
    let queues = Table::of(before, now, "queues", QUEUE_KEYS);
    let line = |worker: Entry<'_, '_>| {
        let (turns, idle) = (worker.growth("turns"), worker.growth("idle_turns"));
        let busy = turns.zip(idle).map(|(turns, idle)| turns.saturating_sub(idle));
        let names = worker.text("queues");
        let sum = |value: fn(&Entry<'_, '_>) -> Option<u64>| {
            queues.as_ref().filter(|_| !names.is_empty()).and_then(|queues| received(&names, queues, value))
        };
        let packets = sum(|queue| queue.growth("packets"));
        Line {
            cells: vec![
                Cell::Text(worker.text("worker")),
                Cell::Text(worker.text("core")),
                quotient(busy, turns).map_or(Cell::None, |load| Cell::Percent(load * 100.0)),
                worker.rate_cell("turns"),
                worker.rate_cell("sleeps"),
                quotient(packets, busy).map_or(Cell::None, Cell::Ratio),
                quotient(worker.growth("busy_cycles"), worker.growth("packets")).map_or(Cell::None, Cell::Ratio),
                quotient(packets, sum(|queue| queue.growth("bursts"))).map_or(Cell::None, Cell::Ratio),
                sum(|queue| queue.count("waiting")).map_or(Cell::None, Cell::Count),
                worker.rate_cell("drops"),
                worker.rate_cell("handed_over"),
                worker.rate_cell("punted"),
                Cell::Text(names),
            ],
            opens: None,
        }
    };
    Grid { columns, lines: table.entries().map(line).collect(), sorted_by: 0 }
}

fn drops(scope: &Scope, before: Option<&Sample>, now: &Sample) -> Grid {
    let Some(table) = Table::of(before, now, "drops", DROP_KEYS) else { return Grid::default() };
    if let Scope::Reason(reason) = scope {
        let columns = vec![
            text("PLACE", 0),
            text("NAME", 0),
            text("QUEUE", 1),
            number("DROPS/s", 1),
            number("TOTAL", 2),
            text("REASON", 3),
        ];
        let line = |drop: Entry<'_, '_>| Line {
            cells: vec![
                Cell::Text(drop.text("place")),
                Cell::Text(drop.text("name")),
                Cell::Text(drop.text("queue")),
                drop.rate_cell("packets"),
                drop.count_cell("packets"),
                Cell::Text(drop.text("reason")),
            ],
            opens: None,
        };
        let lines = table.entries().filter(|drop| drop.text("reason") == *reason).map(line).collect();
        return Grid { columns, lines, sorted_by: 3 };
    }
    let columns = vec![text("REASON", 0), number("DROPS/s", 1), number("TOTAL", 1), text("MEANING", 2)];
    let mut reasons: BTreeMap<String, (Option<f64>, u64, String)> = BTreeMap::new();
    for drop in table.entries() {
        let sum = reasons.entry(drop.text("reason")).or_insert_with(|| (None, 0, drop.text("text")));
        if let Some(rate) = drop.rate("packets") {
            sum.0 = Some(sum.0.unwrap_or(0.0) + rate);
        }
        sum.1 = sum.1.saturating_add(drop.count("packets").unwrap_or(0));
    }
    let line = |(reason, (rate, total, about)): (String, (Option<f64>, u64, String))| Line {
        cells: vec![
            Cell::Text(reason.clone()),
            rate.map_or(Cell::None, Cell::Rate),
            Cell::Count(total),
            Cell::Text(about),
        ],
        opens: Some((Pane::Drops, Scope::Reason(reason))),
    };
    Grid { columns, lines: reasons.into_iter().map(line).collect(), sorted_by: 1 }
}

fn queues(scope: &Scope, before: Option<&Sample>, now: &Sample) -> Grid {
    let columns = vec![
        text("PORT", 0),
        text("DIR", 0),
        number("QUEUE", 0),
        number("PACKETS/s", 1),
        number("BIT/s", 4),
        number("BURSTS/s", 2),
        number("FILL", 1),
        number("WAITING", 2),
        number("EMPTY/s", 5),
        number("DROPS/s", 3),
        number("TOTAL", 6),
    ];
    let Some(table) = Table::of(before, now, "queues", QUEUE_KEYS) else { return Grid::default() };
    let line = |queue: Entry<'_, '_>| Line {
        cells: vec![
            Cell::Text(queue.text("port")),
            Cell::Text(queue.text("direction")),
            queue.count_cell("queue"),
            queue.rate_cell("packets"),
            queue.bits_cell("bytes"),
            queue.rate_cell("bursts"),
            quotient(queue.growth("packets"), queue.growth("bursts")).map_or(Cell::None, Cell::Ratio),
            queue.count_cell("waiting"),
            queue.rate_cell("empty"),
            queue.rate_cell("drops"),
            queue.count_cell("packets"),
        ],
        opens: None,
    };
    let is_shown = |queue: &Entry<'_, '_>| match scope {
        Scope::Port(port) => queue.text("port") == *port,
        _ => true,
    };
    Grid { columns, lines: table.entries().filter(is_shown).map(line).collect(), sorted_by: 3 }
}

fn segments(before: Option<&Sample>, now: &Sample) -> Grid {
    let columns = vec![
        text("SEGMENT", 0),
        text("VNI", 2),
        number("ENCAP pps", 1),
        number("ENCAP bit/s", 3),
        number("DECAP pps", 1),
        number("DECAP bit/s", 3),
        number("FLOODED/s", 2),
        number("REMOTES", 4),
        text("PORTS", 5),
    ];
    let Some(table) = Table::of(before, now, "segments", &["segment", "vni"]) else { return Grid::default() };
    let line = |segment: Entry<'_, '_>| Line {
        cells: vec![
            Cell::Text(segment.text("segment")),
            Cell::Text(segment.text("vni")),
            segment.rate_cell("overlay_tx_packets"),
            segment.bits_cell("overlay_tx_bytes"),
            segment.rate_cell("overlay_rx_packets"),
            segment.bits_cell("overlay_rx_bytes"),
            segment.rate_cell("flooded"),
            segment.count_cell("remotes"),
            Cell::Text(segment.text("ports")),
        ],
        opens: None,
    };
    Grid { columns, lines: table.entries().map(line).collect(), sorted_by: 2 }
}

fn rules(before: Option<&Sample>, now: &Sample) -> Grid {
    let columns = vec![
        number("ID", 2),
        number("PACKETS/s", 0),
        number("BIT/s", 3),
        number("TOTAL", 2),
        text("WHERE", 4),
        text("RULE", 0),
    ];
    let Some(table) = Table::of(before, now, "rules", &["id"]) else { return Grid::default() };
    let line = |rule: Entry<'_, '_>| Line {
        cells: vec![
            rule.count_cell("id"),
            rule.rate_cell("packets"),
            rule.bits_cell("bytes"),
            rule.count_cell("packets"),
            Cell::Text(rule.text("where")),
            Cell::Text(rule.text("rule")),
        ],
        opens: None,
    };
    Grid { columns, lines: table.entries().map(line).collect(), sorted_by: 1 }
}
