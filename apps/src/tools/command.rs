//! `wirepath command`: commands of the application in a running program.

use clap::Args;
use serde_json::{Value, json};

use super::change::{arguments_text, named_values};
use wirepath::cli::{Failure, print, print_json};
use wirepath::control_socket::SocketArgument;

/// Gives a running program one of the commands of its application
///
/// Without NAME, the commands of the program and their arguments are listed. The program says who may give commands
/// (key `change` of its table `[control]`), and logs each of them.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:\n  wirepath command                          # lists the commands\n  \
    wirepath command forget address=10.0.0.1  # a command of some program")]
pub struct Options {
    /// Name of the command; without it, the commands are listed
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Arguments of the command
    #[arg(value_name = "KEY=VALUE")]
    arguments: Vec<String>,

    #[command(flatten)]
    socket: SocketArgument,
}

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or refuses the command.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let mut client = options.socket.connect()?;
    let Some(name) = &options.name else {
        let commands = client.ask(&json!({ "request": "commands" }))?;
        return if json { print_json(&commands) } else { print(describe(&commands)) };
    };
    let arguments = named_values(&options.arguments)?;
    let answer = client.ask(&json!({ "request": "command", "name": name, "arguments": arguments }))?;
    if json { print_json(&answer) } else { print(result_text(&answer["result"])) }
}

fn describe(commands: &Value) -> String {
    let list = commands["commands"].as_array().map(Vec::as_slice).unwrap_or_default();
    if list.is_empty() {
        return "this program has no commands\n".to_owned();
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let described = list
        .iter()
        .map(|it| format!("{}: {}\n{}", text(&it["name"]), text(&it["about"]), arguments_text(&it["arguments"])));
    described.collect()
}

/// Returns a result for people: the members of an object, the lines of a list, a text as it is.
fn result_text(result: &Value) -> String {
    match result {
        Value::Null => String::new(),
        Value::Object(members) => members.iter().map(|(key, value)| format!("{key}: {}\n", one_line(value))).collect(),
        Value::Array(entries) => entries.iter().map(|entry| one_line(entry) + "\n").collect(),
        Value::String(text) => text.lines().map(|line| format!("{line}\n")).collect(),
        other => format!("{other}\n"),
    }
}

/// Returns a value in one line. Texts with line feeds are quoted, so that they do not look like other lines.
fn one_line(value: &Value) -> String {
    match value {
        Value::String(text) if !text.contains(char::is_control) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_lines() {
        let text = |value: Value| result_text(&value);
        assert_eq!(text(json!({ "a": 1, "b": "x\nc: 2", "c": [1, "y"] })), "a: 1\nb: \"x\\nc: 2\"\nc: [1,\"y\"]\n");
        assert_eq!(text(json!(["x", { "y": 2 }])), "x\n{\"y\":2}\n");
        assert_eq!((text(json!("one\ntwo")), text(Value::Null)), ("one\ntwo\n".into(), String::new()));
        assert_eq!(text(json!(7)), "7\n");
    }

    #[test]
    fn commands_are_listed_with_their_arguments() {
        let argument = json!({ "name": "address", "about": "IPv4 address", "kind": "text", "required": false });
        let commands = json!({ "commands": [{ "name": "forget", "about": "Forgets", "arguments": [argument] }] });
        assert_eq!(describe(&commands), "forget: Forgets\n    address=<text> IPv4 address (optional)\n");
        assert_eq!(describe(&json!({ "commands": [] })), "this program has no commands\n");
    }
}
