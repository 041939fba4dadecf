use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::{Failure, Table, print, print_json};
use crate::rules::ask;

/// Which program.
#[derive(Debug, Args)]
pub struct SocketArguments {
    /// Socket of the program: `socket` in the table [rules] of its configuration
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
}

/// Arguments of `add`.
#[derive(Debug, Args)]
pub struct AddArguments {
    #[command(flatten)]
    socket: SocketArguments,

    /// The rule as text; ports by name as in the program's configuration
    #[arg(value_name = "RULE")]
    rule: String,
}

/// Arguments of `remove`.
#[derive(Debug, Args)]
pub struct RemoveArguments {
    #[command(flatten)]
    socket: SocketArguments,

    /// Numbers of rules, as `list` and `add` tell them
    #[arg(value_name = "ID", required = true)]
    ids: Vec<u64>,
}

pub(super) fn list(arguments: &SocketArguments, json: bool) -> Result<(), Failure> {
    let answer = ask(&arguments.socket, &json!({ "list": true }))?;
    if json {
        return print_json(&answer);
    }
    let mut table = Table::new(["ID", "PACKETS", "BYTES", "WHERE", "RULE"]);
    for rule in answer["rules"].as_array().into_iter().flatten() {
        let places = rule["ports"].as_array().into_iter().flatten();
        let mut places: Vec<&str> = places.filter_map(|place| place["where"].as_str()).collect();
        places.sort_unstable();
        places.dedup();
        let places = places.join(", ");
        let text = |key: &str| match &rule[key] {
            _ if key == "where" => places.clone(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        table.row(["id", "packets", "bytes", "where", "rule"].map(text));
    }
    print(table)
}

pub(super) fn add(arguments: &AddArguments, json: bool) -> Result<(), Failure> {
    let answer = ask(&arguments.socket.socket, &json!({ "add": arguments.rule }))?;
    if json { print_json(&answer) } else { print(format_args!("{}\n", answer["id"])) }
}

pub(super) fn remove(arguments: &RemoveArguments, json: bool) -> Result<(), Failure> {
    for id in &arguments.ids {
        ask(&arguments.socket.socket, &json!({ "remove": id }))?;
    }
    if json { print_json(&json!({ "ok": true })) } else { Ok(()) }
}
