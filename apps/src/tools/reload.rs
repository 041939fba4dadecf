//! `wirepath reload`: makes a running program read its configuration again.

use clap::Args;
use serde_json::{Value, json};

use wirepath::cli::{Failure, print, print_json};
use wirepath::control_socket::SocketArgument;

/// Makes a running program read its configuration file again
///
/// The differences are listed. All of them are applied, or none: what needs a restart is said before anything
/// changes. Segments, ports and remotes that do not differ lose no packet. Objects that were added while the
/// program ran stay in force. SIGHUP does the same.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:\n  wirepath reload --dry-run\n  wirepath reload")]
pub struct Options {
    /// List the differences and change nothing; new ports are not opened
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    socket: SocketArgument,
}

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or refuses the configuration.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let mut client = options.socket.connect()?;
    let answer = client.ask(&json!({ "request": "reload", "dry_run": options.dry_run }))?;
    if json { print_json(&answer) } else { print(describe(&answer)) }
}

/// Describes the outcome of a change of the configuration.
pub(super) fn describe(answer: &Value) -> String {
    let list = |key: &str| answer[key].as_array().cloned().unwrap_or_default();
    let mut text = String::new();
    for difference in list("differences") {
        let path = difference["path"].as_str().unwrap_or_default();
        text += &match (difference["before"].as_str(), difference["after"].as_str()) {
            (None, Some(after)) => format!("+ {path} = {after}\n"),
            (Some(before), None) => format!("- {path} = {before}\n"),
            (before, after) => format!("~ {path} = {} -> {}\n", before.unwrap_or("?"), after.unwrap_or("?")),
        };
    }
    match answer["omitted"].as_u64() {
        None | Some(0) => {}
        Some(n) => text += &format!("and {n} other differences\n"),
    }
    for note in list("notes") {
        text += &format!("note: {}\n", note.as_str().unwrap_or_default());
    }
    let same = list("differences").is_empty() && list("notes").is_empty();
    text += match (same, answer["applied"] == true) {
        (true, _) => "the configuration does not differ\n",
        (false, true) => "applied\n",
        (false, false) => "not applied: this was a dry run\n",
    };
    text
}
