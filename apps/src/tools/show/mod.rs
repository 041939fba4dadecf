//! `wirepath show`: tables of a running program.

mod emulator;

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Map, Value, json};

use wirepath::cli::{Failure, Stop, Table, print, print_json};
use wirepath::control_socket::{Client, Rows, SocketArgument};

/// Shows ports, queues, workers, drops, forwarding tables and rules of a running program
///
/// Without TABLE, the tables of the program are listed. The program is the only one that runs, or the one whose
/// control socket --socket names.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// Table to show; `wirepath show` lists them. "emulator": tables of emulated NICs, with --socket and the
    /// `control` socket of their topology
    #[arg(value_name = "TABLE")]
    table: Option<String>,

    /// Show only rows for which this is true: COLUMN=VALUE, or !=, ~ (contains), !~, <, <=, >, >= instead of =
    #[arg(short = 'w', long = "where", value_name = "CONDITION")]
    conditions: Vec<String>,

    /// Show only these columns
    #[arg(short, long, value_name = "NAME,...", value_delimiter = ',')]
    columns: Vec<String>,

    /// Show at most this number of rows
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    /// Show counters per second, measured over one second or the interval of --watch
    #[arg(short, long)]
    rates: bool,

    /// Repeat every second, or every N seconds, until Ctrl-C
    #[arg(
        long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "1",
        value_parser = wirepath::cli::seconds
    )]
    watch: Option<Duration>,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
With --json: an object with `table` and `rows`, a list of objects. With --watch, one object in each line.

Examples:
  wirepath show ports                          # state and totals of each port
  wirepath show ports --rates --watch          # packets and bytes per second
  wirepath show drops --where reason=no_buffer
  wirepath show fdb -w segment=blue -w mac~02:00 -n 20
  wirepath show config                         # the configuration in force
  wirepath show queues --json --socket gateway.sock";

/// Names and kinds of the columns of a table.
struct Layout {
    names: Vec<String>,
    counters: Vec<bool>,
    numbers: Vec<bool>,
    keys: Vec<bool>,
}

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or has no such table or column.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    if options.table.as_deref() == Some("config") {
        return super::config::show(&options.socket, json);
    }
    if options.table.as_deref() == Some("emulator") {
        return emulator::run(options, json);
    }
    let mut client = options.socket.connect()?;
    let tables = client.ask(&json!({ "request": "tables" }))?;
    let Some(name) = &options.table else { return list(&tables, json) };
    let Some(table) = entries(&tables["tables"]).find(|table| table["name"] == **name) else {
        // The program's refusal names the tables.
        return client.show(name, &[], None).map(drop);
    };
    let layout = Layout::of(table);
    let shown = layout.shown(&options.columns)?;
    let stop = options.watch.map(|_| Stop::on_signals()).transpose()?;
    let interval = options.watch.unwrap_or(Duration::from_secs(1));
    let mut before = None;
    if options.rates {
        before = Some((Instant::now(), fetch(&mut client, name, options)?));
        std::thread::sleep(interval);
    }
    loop {
        let (at, rows) = (Instant::now(), fetch(&mut client, name, options)?);
        let shown_rows = match &before {
            Some((earlier, old)) => layout.rates(old, &rows, (at - *earlier).as_secs_f64()),
            None => rows.rows.clone(),
        };
        display(name, &layout, &shown, &shown_rows, options, json)?;
        let Some(stop) = &stop else { return Ok(()) };
        if options.rates {
            before = Some((at, rows));
        }
        if stop.wait(interval) {
            return Ok(());
        }
    }
}

fn fetch(client: &mut Client, table: &str, options: &Options) -> Result<Rows, Failure> {
    client.show(table, &options.conditions, options.limit)
}

fn entries(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn str_of(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(tables: &Value, json: bool) -> Result<(), Failure> {
    if json {
        return print_json(tables);
    }
    let mut text = Table::new(["TABLE", "CONTENT"]);
    for table in entries(&tables["tables"]) {
        text.row([str_of(&table["name"]).to_owned(), str_of(&table["about"]).to_owned()]);
    }
    print(text)
}

impl Layout {
    fn of(table: &Value) -> Self {
        let columns: Vec<&Value> = entries(&table["columns"]).collect();
        let are = |kinds: &[&str]| columns.iter().map(|column| kinds.contains(&str_of(&column["kind"]))).collect();
        Self {
            names: columns.iter().map(|column| str_of(&column["name"]).to_owned()).collect(),
            counters: are(&["counter"]),
            numbers: are(&["counter", "gauge"]),
            keys: are(&["key"]),
        }
    }

    /// Returns the indices of the columns to show.
    fn shown(&self, wanted: &[String]) -> Result<Vec<usize>, Failure> {
        if wanted.is_empty() {
            return Ok((0..self.names.len()).collect());
        }
        let known: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let index = |name: &String| {
            known.iter().position(|known| known == name).ok_or_else(|| {
                Failure::usage(match wirepath_settings::nearest(name, &known) {
                    Some(near) => format!("there is no column \"{name}\"; did you mean \"{near}\"?"),
                    None => format!("there is no column \"{name}\"; there are {}", known.join(", ")),
                })
            })
        };
        wanted.iter().map(index).collect()
    }

    /// Returns the rows with counters as rates per second. Rows are matched by their keys.
    fn rates(&self, before: &Rows, after: &Rows, seconds: f64) -> Vec<Vec<Value>> {
        let key = |row: &[Value]| -> String {
            let keys = row.iter().zip(&self.keys).filter(|(_, key)| **key);
            keys.map(|(value, _)| format!("{value}\n")).collect()
        };
        let old: std::collections::HashMap<String, &Vec<Value>> =
            before.rows.iter().map(|row| (key(row), row)).collect();
        let rate = |row: &Vec<Value>| {
            let earlier = old.get(&key(row));
            let cell = |(i, value): (usize, &Value)| match value.as_u64().filter(|_| self.counters[i]) {
                Some(now) => {
                    let then = earlier.and_then(|row| row.get(i)?.as_u64()).unwrap_or(0);
                    Value::from((now.saturating_sub(then) as f64 / seconds.max(1e-9)).round())
                }
                None => value.clone(),
            };
            row.iter().take(self.names.len()).enumerate().map(cell).collect()
        };
        after.rows.iter().map(rate).collect()
    }
}

fn display(
    name: &str,
    layout: &Layout,
    shown: &[usize],
    rows: &[Vec<Value>],
    options: &Options,
    json: bool,
) -> Result<(), Failure> {
    if json {
        let object = |row: &Vec<Value>| -> Value {
            let cells = shown.iter().map(|i| (layout.names[*i].clone(), row.get(*i).cloned().unwrap_or_default()));
            Value::Object(cells.collect::<Map<_, _>>())
        };
        return print_json(&json!({ "table": name, "rows": rows.iter().map(object).collect::<Vec<_>>() }));
    }
    let mut text = Table::with_columns(shown.iter().map(|i| {
        let rate = if options.rates && layout.counters[*i] { "/s" } else { "" };
        (layout.names[*i].to_uppercase() + rate, layout.numbers[*i])
    }));
    for row in rows {
        text.push(shown.iter().map(|i| cell(row.get(*i).unwrap_or(&Value::Null))));
    }
    clear_if_watched(options)?;
    print(text)
}

/// Clears the terminal before the next display of `--watch`.
fn clear_if_watched(options: &Options) -> Result<(), Failure> {
    if options.watch.is_some() && std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        // ECMA-48: cursor to the first cell, erase the display.
        wirepath::cli::print_control("\x1b[H\x1b[2J")?;
    }
    Ok(())
}

/// Returns the text of a value for a table.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            // Times of BFD and rates of rare events are below one.
            Some(real) if real.abs() < 10.0 && real.fract() != 0.0 => format!("{real:.2}"),
            Some(real) => format!("{real:.0}"),
            None => number.to_string(),
        },
        Value::Array(values) => {
            let between = if values.iter().any(Value::is_object) { ", " } else { " " };
            values.iter().map(cell).collect::<Vec<_>>().join(between)
        }
        // A port names the object: `lan where=software`.
        Value::Object(members) => {
            let rest = members.iter().filter(|(key, value)| *key != "port" && !value.is_null());
            let rest = rest.map(|(key, value)| format!("{key}={}", cell(value)));
            members.get("port").map(cell).into_iter().chain(rest).collect::<Vec<_>>().join(" ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let column = |name: &str, kind: &str| json!({ "name": name, "kind": kind });
        let columns = [column("port", "key"), column("state", "attribute"), column("packets", "counter")];
        Layout::of(&json!({ "columns": columns }))
    }

    #[test]
    fn objects_are_named_by_their_port() {
        let ports = json!([{ "port": "lan", "where": "software" }, { "port": "wan", "vlan": 5, "why": null }]);
        assert_eq!(cell(&ports), "lan where=software, wan vlan=5");
        assert_eq!(cell(&json!(["a", "b"])), "a b");
        assert_eq!(cell(&json!({ "id": 7 })), "id=7");
    }

    #[test]
    fn rates_are_those_of_the_same_row() {
        let rows = |rows: Value| Rows { columns: Vec::new(), rows: serde_json::from_value(rows).unwrap() };
        let before = rows(json!([["a", "up", 100], ["b", "up", 7]]));
        let after = rows(json!([["new", "up", 10], ["b", "down", 7], ["a", "up", 300]]));
        let rates = layout().rates(&before, &after, 2.0);
        assert_eq!(
            rates,
            vec![
                vec![json!("new"), json!("up"), json!(5.0)],
                vec![json!("b"), json!("down"), json!(0.0)],
                vec![json!("a"), json!("up"), json!(100.0)],
            ]
        );
    }

    #[test]
    fn columns_are_chosen_by_name() {
        let columns = |names: &[&str]| layout().shown(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(columns(&[]).unwrap(), [0, 1, 2]);
        assert_eq!(columns(&["packets", "port"]).unwrap(), [2, 0]);
        assert!(columns(&["packet"]).unwrap_err().to_string().contains("did you mean \"packets\"?"));
    }

    #[test]
    fn cells_are_short() {
        let values = json!([null, "", "x", true, 12, 12.4, 0.3, 5.0, ["a", 1]]);
        let texts: Vec<String> = values.as_array().unwrap().iter().map(cell).collect();
        assert_eq!(texts, ["-", "-", "x", "yes", "12", "12", "0.30", "5", "a 1"]);
    }
}
