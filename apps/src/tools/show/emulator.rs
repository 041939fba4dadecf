//! `wirepath show emulator`: the devices, ports, queues, links, faults and log of emulated NICs.
//!
//! The emulator runs inside the program under test and answers on the `control` socket of its topology. It is no
//! program with a registry, so its answer is one object, which becomes one table for each kind of thing.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{Options, cell, entries};
use crate::tools::emulate;
use wirepath::cli::{Failure, Stop, Table, print, print_json};

/// Columns that come first, in this order, in the tables that have them. All others follow by name.
const LEADING: [&str; 13] =
    ["name", "device", "port", "number", "kind", "to", "up", "state", "stopped", "packets", "bytes", "times", "line"];

/// A table: its name, and the cells of its rows by column.
struct Section {
    name: &'static str,
    rows: Vec<Map<String, Value>>,
}

/// Shows the tables, once or until Ctrl-C.
pub(super) fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let Options { table: _, conditions, columns, limit, rates, watch, socket } = options;
    if !conditions.is_empty() || !columns.is_empty() || limit.is_some() || *rates {
        return Err(Failure::usage("emulator: only --socket, --watch and --json are possible"));
    }
    let Some(socket) = &socket.socket else {
        return Err(Failure::usage("emulator: expected --socket FILE, the `control` socket of the topology"));
    };
    let stop = watch.map(|_| Stop::on_signals()).transpose()?;
    loop {
        let answer = emulate::ask(socket, "counters")?;
        let state = serde_json::from_str(&answer)
            .map_err(|error| Failure::failed(format!("{}: the answer is no JSON: {error}", socket.display())))?;
        display(&sections(&state), options, json)?;
        let (Some(stop), Some(interval)) = (&stop, watch) else { return Ok(()) };
        if stop.wait(*interval) {
            return Ok(());
        }
    }
}

/// Splits the answer into tables. A number, text or truth value of an object becomes a column; a list or an object
/// inside becomes rows of another table.
fn sections(state: &Value) -> Vec<Section> {
    let plain = |value: &Value| -> Map<String, Value> {
        let cells = value.as_object().into_iter().flatten();
        let cells = cells.filter(|(_, value)| !value.is_array() && !value.is_object());
        cells.map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    let inside = |device: &Value, list: &str| -> Vec<Map<String, Value>> {
        let of = |entry: &Value| {
            let mut row = plain(entry);
            row.insert("device".to_owned(), device["name"].clone());
            row
        };
        entries(&device[list]).map(of).collect()
    };
    let link = |device: &Value, port: &Value| -> Map<String, Value> {
        let mut row = plain(&port["link"]);
        row.insert("device".to_owned(), device["name"].clone());
        row.insert("port".to_owned(), port["port"].clone());
        row
    };
    let devices = || entries(&state["devices"]);
    let links = devices().flat_map(|device| entries(&device["ports"]).map(move |port| link(device, port)));
    vec![
        Section { name: "devices", rows: devices().map(plain).collect() },
        Section { name: "ports", rows: devices().flat_map(|device| inside(device, "ports")).collect() },
        Section { name: "send_queues", rows: devices().flat_map(|device| inside(device, "send_queues")).collect() },
        Section {
            name: "receive_queues",
            rows: devices().flat_map(|device| inside(device, "receive_queues")).collect(),
        },
        Section { name: "links", rows: links.collect() },
        Section { name: "faults", rows: entries(&state["faults"]).map(plain).collect() },
        Section { name: "log", rows: entries(&state["log"]).map(plain).collect() },
    ]
}

impl Section {
    /// Returns the names of all columns, in order.
    fn columns(&self) -> Vec<&str> {
        let names: BTreeSet<&str> = self.rows.iter().flat_map(|row| row.keys().map(String::as_str)).collect();
        let leading = LEADING.into_iter().filter(|name| names.contains(name));
        leading.chain(names.iter().copied().filter(|name| !LEADING.contains(name))).collect()
    }

    /// Returns the table as text under its name; empty if there are no rows.
    fn text(&self) -> String {
        let columns = self.columns();
        if columns.is_empty() {
            return String::new();
        }
        let is_number = |name: &&str| self.rows.iter().all(|row| row.get(*name).is_none_or(Value::is_number));
        let mut table = Table::with_columns(columns.iter().map(|name| (name.to_uppercase(), is_number(name))));
        for row in &self.rows {
            table.push(columns.iter().map(|name| cell(row.get(*name).unwrap_or(&Value::Null))));
        }
        format!("{}:\n{table}\n", self.name.replace('_', " "))
    }
}

fn display(sections: &[Section], options: &Options, json: bool) -> Result<(), Failure> {
    if json {
        let object = sections.iter().map(|it| (it.name.to_owned(), json!(it.rows)));
        return print_json(&Value::Object(object.collect()));
    }
    super::clear_if_watched(options)?;
    print(sections.iter().map(Section::text).collect::<String>().trim_end().to_owned() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_becomes_tables() {
        let state = json!({
            "devices": [
                { "name": "mana0", "kind": "mana", "resets": 0, "send_queues": [], "ports": [
                    { "port": 1, "up": true, "sent": 7, "link": { "to": "sink", "delivered": 7 } },
                ] },
                { "name": "mlx5_0", "kind": "mlx5", "resets": 1, "ports": [{ "port": 1, "up": false, "rules": 2 }] },
            ],
            "faults": [{ "device": "mana0", "fault": "create_qp refused: ENOMEM", "after": 2, "count": 1 }],
            "log": [{ "line": "mana0: create_qp failed: EINVAL", "times": 3 }],
            "log_lines": 3,
        });
        let sections = sections(&state);
        let text = |name: &str| sections.iter().find(|it| it.name == name).unwrap().text();
        let lines = |text: &str| -> Vec<String> {
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
        };
        assert_eq!(
            lines(&text("ports")),
            ["ports:", "DEVICE PORT UP RULES SENT", "mana0 1 yes - 7", "mlx5_0 1 no 2 -", ""]
        );
        assert_eq!(lines(&text("links"))[1..3], ["DEVICE PORT TO DELIVERED", "mana0 1 sink 7"]);
        assert_eq!(lines(&text("log"))[1..3], ["TIMES LINE", "3 mana0: create_qp failed: EINVAL"]);
        assert_eq!(text("send_queues"), "");
        assert!(self::sections(&json!(null)).iter().all(|section| section.text().is_empty()), "a hostile answer");
    }
}
