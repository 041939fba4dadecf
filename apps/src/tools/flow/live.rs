use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::{Failure, Table, print, print_json};
use crate::rules::send_request;

/// The running program.
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

    /// The rule as text, with the port names of the program's configuration
    #[arg(value_name = "RULE")]
    rule: String,
}

/// Arguments of `remove`.
#[derive(Debug, Args)]
pub struct RemoveArguments {
    #[command(flatten)]
    socket: SocketArguments,

    /// Numbers of rules, as `list` and `add` print them
    #[arg(value_name = "ID", required = true)]
    ids: Vec<u64>,
}

pub(super) fn list(arguments: &SocketArguments, json: bool) -> Result<(), Failure> {
    let answer = send_request(&arguments.socket, &json!({ "list": true }))?;
    if json {
        return print_json(&answer);
    }
    let mut table = Table::new(["ID", "PACKETS", "BYTES", "WHERE", "RULE"]);
    for rule in answer["rules"].as_array().into_iter().flatten() {
        let locations = rule["ports"].as_array().into_iter().flatten();
        let mut locations: Vec<&str> = locations.filter_map(|location| location["where"].as_str()).collect();
        locations.sort_unstable();
        locations.dedup();
        let locations = locations.join(", ");
        let text = |key: &str| match &rule[key] {
            _ if key == "where" => locations.clone(),
            // The text with port names; programs of an earlier version send numbers only.
            Value::String(text) if key == "rule" => rule["text"].as_str().unwrap_or(text).to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        table.row(["id", "packets", "bytes", "where", "rule"].map(text));
    }
    print(table)
}

pub(super) fn add(arguments: &AddArguments, json: bool) -> Result<(), Failure> {
    let answer = send_request(&arguments.socket.socket, &json!({ "add": arguments.rule }))?;
    if json { print_json(&answer) } else { print(format_args!("{}\n", answer["id"])) }
}

pub(super) fn remove(arguments: &RemoveArguments, json: bool) -> Result<(), Failure> {
    for id in &arguments.ids {
        send_request(&arguments.socket.socket, &json!({ "remove": id }))?;
    }
    if json { print_json(&json!({ "ok": true })) } else { Ok(()) }
}
