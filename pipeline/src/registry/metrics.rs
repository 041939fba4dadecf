//! Metrics: the numbers of the registry as text for monitoring systems.
//!
//! Two forms are known: OpenMetrics 1.0 (<https://prometheus.io/docs/specs/om/open_metrics_spec/>), and the older text
//! format 0.0.4 of Prometheus, which the textfile collector of `node_exporter` reads. They differ in the names of
//! families and in the end.
//!
//! Each table with [`TableSpec::metric`] has one family of metrics for each counter and each gauge. The keys of a row
//! are its labels. All samples of a family have to stand together, so the rows of a table are gathered first.
//!
//! Each counter of the application has a family too, `wirepath_app_NAME_total` with the label `worker`.
//!
//! The crate `prometheus-client` does not fit: its `Collector` writes all families in one call on a shared reference.
//! The rows here come from the control thread's own state, and in parts of bounded time.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::Value;

use super::{Column, ColumnKind, Filter, Listing, Registry, TableSpec, Unit};
use crate::counter;

/// Rows of a table that get metrics. Those beyond are counted in `wirepath_metrics_rows_left_out`.
pub const MAX_ROWS: usize = 10_000;
/// Longest value of a label in bytes, such as the text of a rule. The end of a longer value is left out.
const MAX_LABEL: usize = 1024;
/// Entries of one part of a listing. Some entries take a call of a device.
const ENTRIES: usize = 128;
/// Bytes after which a part of the text ends.
const PART: usize = 16 << 10;
/// Attributes that are labels of a metric `wirepath_..._info` with the value 1: table and columns.
const INFO: (&str, &[&str]) = ("ports", &["driver", "device", "mac", "state"]);

/// Forms of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format 0.0.4 of Prometheus.
    Prometheus,
}

/// Types of a family.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Counter,
    Gauge,
    Info,
}

/// The text of all metrics, made part by part.
#[derive(Debug)]
pub struct MetricsText {
    format: MetricsFormat,
    /// Tables that are still to come.
    tables: std::vec::IntoIter<&'static TableSpec>,
    stage: Stage,
    /// Rows left out of each finished table.
    left_out: Vec<(&'static str, u64)>,
}

#[derive(Debug)]
enum Stage {
    /// Labels of `wirepath_program_info`.
    Program(String),
    /// Between two tables.
    Next,
    Gather(Listing, Rows),
    /// Index of the next column, and of its next row.
    Write(Rows, usize, usize),
    End,
}

/// Gathered rows of a table.
#[derive(Debug)]
struct Rows {
    table: &'static TableSpec,
    rows: Vec<GatheredRow>,
    /// Labels of `rows`. Entries that move during the listing are listed twice, but have one sample.
    labels: HashSet<String>,
    left_out: u64,
}

#[derive(Debug)]
struct GatheredRow {
    labels: String,
    /// Labels of the metric `_info`; empty for most tables.
    info: String,
    /// Numbers as text in the order of the counters and gauges; empty: there is none.
    numbers: Vec<String>,
}

impl MetricsText {
    /// Begins the text of the metrics of a program. `program` are labels of `wirepath_program_info`.
    pub fn new(format: MetricsFormat, registry: &mut Registry<'_>, program: &[(&str, &str)]) -> Self {
        let tables = registry.tables().into_iter().chain(counter::metrics_table()).collect();
        Self::of(format, tables, program)
    }

    fn of(format: MetricsFormat, tables: Vec<&'static TableSpec>, program: &[(&str, &str)]) -> Self {
        let mut labels = String::new();
        program.iter().for_each(|(name, value)| append_label(&mut labels, name, value));
        Self { format, tables: tables.into_iter(), stage: Stage::Program(labels), left_out: Vec::new() }
    }

    /// Appends the next part of the text, of bounded length and made in a bounded time. It may be empty. Returns
    /// whether more parts follow.
    pub fn next_part(&mut self, registry: &mut Registry<'_>, out: &mut String) -> bool {
        self.part(out, |listing| registry.next_page(listing, ENTRIES))
    }

    fn part(&mut self, out: &mut String, page: impl FnOnce(&mut Listing) -> Vec<super::Row>) -> bool {
        self.stage = match std::mem::replace(&mut self.stage, Stage::End) {
            Stage::Program(labels) => {
                self.family(out, Type::Info, "wirepath_program", "The program", Unit::None);
                sample(out, "wirepath_program_info", &labels, "1");
                Stage::Next
            }
            Stage::Next => match self.tables.find(|table| table.metric.is_some()) {
                Some(table) => {
                    let rows = Rows { table, rows: Vec::new(), labels: HashSet::new(), left_out: 0 };
                    Stage::Gather(Listing::new(table, Filter::default()), rows)
                }
                None => {
                    self.end(out);
                    return false;
                }
            },
            Stage::Gather(mut listing, mut rows) => {
                page(&mut listing).into_iter().for_each(|row| rows.add(&row));
                if listing.is_done() {
                    rows.labels = HashSet::new();
                    self.left_out.push((rows.table.name, rows.left_out));
                    Stage::Write(rows, 0, 0)
                } else {
                    Stage::Gather(listing, rows)
                }
            }
            Stage::Write(rows, column, row) => self.write(rows, column, row, out),
            Stage::End => return false,
        };
        true
    }

    /// Writes samples from a row of a column on, until the part is full.
    fn write(&self, rows: Rows, column: usize, row: usize, out: &mut String) -> Stage {
        let end = out.len() + PART;
        let table = rows.table;
        let prefix = format!("wirepath_{}", table.metric.unwrap_or(table.name));
        let numbers = table.columns.iter().filter_map(|column| Some((number(column)?, column)));
        let families: Vec<((Type, Unit), &Column)> = numbers.collect();
        let info = (table.name == INFO.0).then_some(Type::Info);
        let mut from = row;
        for index in column..families.len() + info.iter().len() {
            let (kind, family, about, unit) = match families.get(index) {
                Some(((kind, unit), column)) => (*kind, format!("{prefix}_{}", column.name), column.about, *unit),
                None => (Type::Info, prefix.clone(), table.about, Unit::None),
            };
            if from == 0 {
                if out.len() >= end {
                    return Stage::Write(rows, index, 0);
                }
                self.family(out, kind, &family, about, unit);
            }
            let name = match kind {
                Type::Counter => family + "_total",
                Type::Gauge => family,
                Type::Info => family + "_info",
            };
            for (row, gathered) in rows.rows.iter().enumerate().skip(from) {
                // At least one row, so that the next part does not write the metadata again.
                if row > from && out.len() >= end {
                    return Stage::Write(rows, index, row);
                }
                match gathered.numbers.get(index) {
                    Some(number) if number.is_empty() => {}
                    Some(number) => sample(out, &name, &gathered.labels, number),
                    None => sample(out, &name, &gathered.info, "1"),
                }
            }
            from = 0;
        }
        Stage::Next
    }

    /// Writes the metadata of a family. `name` has no suffix.
    fn family(&self, out: &mut String, kind: Type, name: &str, about: &str, unit: Unit) {
        let (word, suffix) = match (kind, self.format) {
            (Type::Gauge, _) => ("gauge", ""),
            (Type::Counter, MetricsFormat::OpenMetrics) => ("counter", ""),
            (Type::Counter, MetricsFormat::Prometheus) => ("counter", "_total"),
            (Type::Info, MetricsFormat::OpenMetrics) => ("info", ""),
            (Type::Info, MetricsFormat::Prometheus) => ("gauge", "_info"),
        };
        let mut help = String::new();
        escape(&mut help, about, self.format == MetricsFormat::OpenMetrics);
        let _ = writeln!(out, "# TYPE {name}{suffix} {word}");
        // A unit has to be the end of the name (OpenMetrics 1.0, "UNIT").
        let has_unit = name.strip_suffix(unit.name()).is_some_and(|name| name.ends_with('_'));
        if self.format == MetricsFormat::OpenMetrics && unit != Unit::None && has_unit {
            let _ = writeln!(out, "# UNIT {name} {}", unit.name());
        }
        let _ = writeln!(out, "# HELP {name}{suffix} {help}");
    }

    fn end(&self, out: &mut String) {
        let name = "wirepath_metrics_rows_left_out";
        self.family(out, Type::Gauge, name, "Rows of the table beyond the limit of metrics", Unit::None);
        for (table, rows) in &self.left_out {
            let mut labels = String::new();
            append_label(&mut labels, "table", table);
            sample(out, name, &labels, &rows.to_string());
        }
        if self.format == MetricsFormat::OpenMetrics {
            out.push_str("# EOF\n");
        }
    }
}

impl Rows {
    fn add(&mut self, row: &[Value]) {
        let cells = || self.table.columns.iter().zip(row);
        let mut labels = String::new();
        for (column, value) in cells().filter(|(column, _)| column.kind == ColumnKind::Key) {
            append_label(&mut labels, column.name, &text(value));
        }
        if self.labels.contains(&labels) {
            return;
        }
        if self.rows.len() == MAX_ROWS {
            self.left_out += 1;
            return;
        }
        let mut info = String::new();
        if self.table.name == INFO.0 {
            info.clone_from(&labels);
            for (column, value) in cells().filter(|(column, _)| INFO.1.contains(&column.name)) {
                append_label(&mut info, column.name, &text(value));
            }
        }
        let number = |value: &Value| match value {
            Value::Number(_) => value.to_string(),
            Value::Bool(yes) => u8::from(*yes).to_string(),
            _ => String::new(),
        };
        let numbers = cells().filter(|(column, _)| self::number(column).is_some()).map(|(_, value)| number(value));
        let numbers = numbers.collect();
        self.labels.insert(labels.clone());
        self.rows.push(GatheredRow { labels, info, numbers });
    }
}

/// Returns the type and the unit of a column's metric.
fn number(column: &Column) -> Option<(Type, Unit)> {
    match column.kind {
        ColumnKind::Counter(unit) => Some((Type::Counter, unit)),
        ColumnKind::Gauge(unit) => Some((Type::Gauge, unit)),
        ColumnKind::Key | ColumnKind::Attribute => None,
    }
}

fn sample(out: &mut String, name: &str, labels: &str, value: &str) {
    let _ = match labels {
        "" => writeln!(out, "{name} {value}"),
        _ => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

/// Returns a cell as the value of a label. A value that does not exist is empty, which is the same as no label.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn append_label(labels: &mut String, name: &str, value: &str) {
    if !labels.is_empty() {
        labels.push(',');
    }
    let _ = write!(labels, "{name}=\"");
    escape(labels, &value[..value.floor_char_boundary(MAX_LABEL)], true);
    labels.push('"');
}

/// Appends an escaped text. The older form knows no escaped quotes outside labels. Control characters have no escapes
/// and would reach terminals, so they are replaced.
fn escape(out: &mut String, text: &str, quotes: bool) {
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' if quotes => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => out.push(char::REPLACEMENT_CHARACTER),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    static THINGS: TableSpec = TableSpec {
        name: "things",
        about: "Things",
        metric: Some("thing"),
        columns: &[
            Column::key("name", "Name"),
            Column::attribute("kind", "Kind"),
            Column::counter("rx_packets", Unit::Packets, "Packets, a \\ and \"b\""),
            Column::counter("turns", Unit::None, "Turns"),
            Column::gauge("load", Unit::Seconds, "Load"),
        ],
    };
    static SECRET: TableSpec = TableSpec { name: "secret", about: "", metric: None, columns: THINGS.columns };

    /// Returns the text of tables with these entries, and its number of parts.
    fn made(format: MetricsFormat, entries: usize, row: impl Fn(usize) -> Vec<Value>) -> (String, usize) {
        let mut text = MetricsText::of(format, vec![&SECRET, &THINGS], &[("program", "a\"b")]);
        let (mut out, mut parts, mut more) = (String::new(), 0, true);
        while more {
            let before = out.len();
            more = text.part(&mut out, |listing| {
                assert_eq!(listing.table().name, "things");
                listing.next_page(ENTRIES, |_, page| page.extend(0..entries, &row))
            });
            assert!(out.len() - before < PART + 4096, "{}", out.len() - before);
            parts += 1;
        }
        (out, parts)
    }

    #[test]
    fn families_have_types_units_and_labels() {
        let rows = [json!(["a\\\"\n\u{1b}", "x", 1, 2, null]), json!([null, "y", 3, 4, 0.5])];
        let row = |i: usize| rows[i].as_array().unwrap().clone();
        let (text, _) = made(MetricsFormat::OpenMetrics, 2, row);
        let expected = "# TYPE wirepath_program info\n# HELP wirepath_program The program\n\
            wirepath_program_info{program=\"a\\\"b\"} 1\n\
            # TYPE wirepath_thing_rx_packets counter\n# UNIT wirepath_thing_rx_packets packets\n\
            # HELP wirepath_thing_rx_packets Packets, a \\\\ and \\\"b\\\"\n\
            wirepath_thing_rx_packets_total{name=\"a\\\\\\\"\\n\u{fffd}\"} 1\n\
            wirepath_thing_rx_packets_total{name=\"\"} 3\n\
            # TYPE wirepath_thing_turns counter\n# HELP wirepath_thing_turns Turns\n\
            wirepath_thing_turns_total{name=\"a\\\\\\\"\\n\u{fffd}\"} 2\nwirepath_thing_turns_total{name=\"\"} 4\n\
            # TYPE wirepath_thing_load gauge\n# HELP wirepath_thing_load Load\n\
            wirepath_thing_load{name=\"\"} 0.5\n\
            # TYPE wirepath_metrics_rows_left_out gauge\n\
            # HELP wirepath_metrics_rows_left_out Rows of the table beyond the limit of metrics\n\
            wirepath_metrics_rows_left_out{table=\"things\"} 0\n# EOF\n";
        assert_eq!(text, expected);
        let (text, _) = made(MetricsFormat::Prometheus, 2, row);
        assert!(text.starts_with("# TYPE wirepath_program_info gauge\n"), "{text}");
        assert!(text.contains("\n# TYPE wirepath_thing_rx_packets_total counter\n"), "{text}");
        assert!(text.contains("\n# HELP wirepath_thing_rx_packets_total Packets, a \\\\ and \"b\"\n"), "{text}");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    }

    #[test]
    fn rows_beyond_the_limit_are_counted() {
        let row = |i: usize| vec![format!("thing {i}").into(), "x".into(), i.into(), i.into(), i.into()];
        let (text, parts) = made(MetricsFormat::OpenMetrics, MAX_ROWS + 321, row);
        assert!(parts > MAX_ROWS.div_ceil(ENTRIES), "{parts}");
        assert!(text.contains("\nwirepath_metrics_rows_left_out{table=\"things\"} 321\n"));
        // Each family has its metadata once, and each row exactly once, in one piece.
        let families: Vec<&str> = text.lines().map(|line| line.split(['{', ' ']).next().unwrap()).collect();
        let mut pieces = families.clone();
        pieces.dedup();
        for family in ["rx_packets_total", "turns_total", "load"].map(|name| format!("wirepath_thing_{name}")) {
            assert_eq!(families.iter().filter(|name| **name == family).count(), MAX_ROWS, "{family}");
            assert_eq!(pieces.iter().filter(|name| **name == family).count(), 1, "{family}");
        }
        let lines: HashSet<&str> = text.lines().collect();
        assert_eq!(lines.len(), text.lines().count());
    }

    #[test]
    fn parts_end_between_any_two_samples() {
        // Rows and labels of many lengths, so that parts end at the first and the last rows of families.
        for (rows, length) in (60..120).flat_map(|rows| (20..40).map(move |length| (rows, length))) {
            let name = "x".repeat(length);
            let row = |i: usize| vec![format!("{i}{name}").into(), "x".into(), i.into(), i.into(), i.into()];
            let (text, _) = made(MetricsFormat::OpenMetrics, rows, row);
            let count = |what: &str| text.lines().filter(|line| line.starts_with(what)).count();
            let found = (count("wirepath_thing_"), count("# TYPE wirepath_thing_"));
            assert_eq!(found, (3 * rows, 3), "{rows} {length}");
        }
    }

    #[test]
    fn labels_are_unique_and_bounded() {
        let long = "\u{e9}".repeat(MAX_LABEL);
        let row = |i: usize| vec![if i < 2 { "same".into() } else { long.clone().into() }, 0.into(), 1.into()];
        let (text, _) = made(MetricsFormat::OpenMetrics, 3, |i| [row(i), vec![2.into(), 3.into()]].concat());
        assert_eq!(text.matches("wirepath_thing_load{name=\"same\"} 3\n").count(), 1);
        assert_eq!(text.matches('\u{e9}').count(), 3 * MAX_LABEL / 2);
    }
}
