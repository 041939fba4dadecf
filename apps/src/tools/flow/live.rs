use clap::Args;
use serde_json::{Map, Value, json};

use wirepath::cli::{Failure, Table, print, print_json};
use wirepath::control_socket::SocketArgument;

/// The running program.
#[derive(Debug, Args)]
pub struct SocketArguments {
    #[command(flatten)]
    socket: SocketArgument,
}

/// Arguments of `add`.
#[derive(Debug, Args)]
pub struct AddArguments {
    #[command(flatten)]
    socket: SocketArgument,

    /// The rule as text, with the port names of the program's configuration
    #[arg(value_name = "RULE")]
    rule: String,
}

/// Arguments of `remove`.
#[derive(Debug, Args)]
pub struct RemoveArguments {
    #[command(flatten)]
    socket: SocketArgument,

    /// Numbers of rules, as `list` and `add` print them
    #[arg(value_name = "ID", required = true)]
    ids: Vec<u64>,
}

pub(super) fn list(arguments: &SocketArguments, json: bool) -> Result<(), Failure> {
    let rows = arguments.socket.connect()?.show("rules", &[], None)?;
    let object = |row: Vec<Value>| rows.columns.iter().cloned().zip(row).collect::<Map<_, _>>();
    let rules: Vec<Map<String, Value>> = rows.rows.into_iter().map(object).collect();
    if json {
        return print_json(&json!({ "ok": true, "rules": rules }));
    }
    let mut table = Table::new(["ID", "PACKETS", "BYTES", "WHERE", "RULE"]);
    for rule in rules {
        let text = |key: &str| match rule.get(key) {
            Some(Value::String(text)) => text.clone(),
            other => other.map(Value::to_string).unwrap_or_default(),
        };
        table.row(["id", "packets", "bytes", "where", "rule"].map(text));
    }
    print(table)
}

pub(super) fn add(arguments: &AddArguments, json: bool) -> Result<(), Failure> {
    let request = json!({ "request": "add", "object": "rule", "arguments": { "rule": arguments.rule } });
    let answer = arguments.socket.connect()?.ask(&request)?;
    if json { print_json(&answer) } else { print(format_args!("{}\n", answer["id"])) }
}

pub(super) fn remove(arguments: &RemoveArguments, json: bool) -> Result<(), Failure> {
    let mut client = arguments.socket.connect()?;
    for id in &arguments.ids {
        client.ask(&json!({ "request": "remove", "object": "rule", "arguments": { "id": id } }))?;
    }
    if json { print_json(&json!({ "ok": true })) } else { Ok(()) }
}
