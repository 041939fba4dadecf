//! `wirepath flow`: flow rules without ports.

mod check;
mod input;
mod lint;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
pub use input::{Origin, Program};
pub use lint::{Warning, warnings};
use serde_json::json;
use wirepath_pmd::flow::list::Form;
use wirepath_pmd::flow::{ACTIONS, ITEMS, actions_reference, items_reference};

use crate::cli::{Failure, print, print_json};

/// What to do with rules.
#[derive(Debug, Subcommand)]
pub enum FlowCommand {
    /// Reads every rule of a file, says what is wrong with each, and prints them in their canonical form
    ///
    /// An error names file, line and column, shows the word, and says what would be right. Warnings: a rule that never runs because an
    /// earlier one takes all its packets, a rule that is there twice, a rule that no packet fits, ports and queues that do not exist.
    /// Of a configuration everything else is checked too, as the program that it is for would. Exit code: 0 in order, 2 if not; with
    /// --strict, warnings count as errors.
    #[command(after_help = CHECK_HELP)]
    Check(CheckArguments),

    /// Lists the items that patterns are made of, their fields and how values are written
    Items,

    /// Lists the actions and their arguments
    Actions,
}

const CHECK_HELP: &str = "\
FILE: a configuration of l2fwd or tunnel-gateway (TOML with [[rule]] tables), or rules alone: text with one rule on each line, TOML, or
JSON (an array). `-`: standard input.

Examples:
  wirepath flow check configs/l2fwd-acl.toml
  echo 'ingress: ipv4 dst 10.0.0.0/8 / udp dst 53 => drop' | wirepath flow check -
  wirepath flow check acl.rules --ports lan,wan --toml     # names of ports are known; rules as [[rule]] tables
  wirepath flow check acl.rules --json                     # the same for programs";

/// Which file, and how to read it.
#[derive(Debug, Args)]
pub struct InputArguments {
    /// Configuration, or file of rules; `-` is standard input
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,

    /// How the file is written [default: by its name, else by how it begins]
    #[arg(long, value_name = "FORM")]
    pub(super) form: Option<FormName>,

    /// Names of the ports 0, 1, ... that a file of rules alone may use
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(super) ports: Vec<String>,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArguments {
    #[command(flatten)]
    input: InputArguments,

    /// Print the rules as [[rule]] tables
    #[arg(long, conflicts_with = "json")]
    toml: bool,

    /// Take warnings for errors
    #[arg(long)]
    strict: bool,
}

/// [`Form`] as an argument.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormName {
    /// One rule on each line
    Text,
    /// [[rule]] tables
    Toml,
    /// An array
    Json,
}

impl From<FormName> for Form {
    fn from(name: FormName) -> Self {
        match name {
            FormName::Text => Self::Text,
            FormName::Toml => Self::Toml,
            FormName::Json => Self::Json,
        }
    }
}

/// Does it.
pub fn run(command: &FlowCommand, json: bool) -> Result<(), Failure> {
    match command {
        FlowCommand::Check(arguments) => check::run(arguments, json),
        FlowCommand::Items if json => print_json(&items_json()),
        FlowCommand::Items => print(items_reference()),
        FlowCommand::Actions if json => print_json(&actions_json()),
        FlowCommand::Actions => print(actions_reference()),
    }
}

fn items_json() -> serde_json::Value {
    let field = |field: &wirepath_pmd::flow::Field| {
        let spec = field.spec();
        json!({
            "name": spec.name,
            "bits": spec.bits,
            "about": spec.about,
            "values": spec.format.expected(spec.bits),
            "settable": spec.settable,
        })
    };
    let item = |item: &wirepath_pmd::flow::ItemSpec| {
        let fields: Vec<_> = item.fields.iter().map(field).collect();
        json!({ "name": item.name, "about": item.about, "most": item.most, "fields": fields })
    };
    json!({ "items": ITEMS.iter().map(item).collect::<Vec<_>>() })
}

fn actions_json() -> serde_json::Value {
    let action = |action: &wirepath_pmd::flow::ActionSpec| json!({ "name": action.name, "about": action.about, "arguments": action.positional, "named": action.named });
    json!({ "actions": ACTIONS.iter().map(action).collect::<Vec<_>>() })
}
