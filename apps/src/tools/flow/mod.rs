//! `wirepath flow`: flow rules without ports.

mod check;
mod explain;
mod input;
mod lint;
mod live;
mod matches;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
pub use input::{Origin, Program};
pub use lint::{Warning, warnings};
pub use live::{AddArguments, RemoveArguments, SocketArguments};
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

    /// Says where each rule of a configuration would run, and what stood in the way of running nearer to the wire
    ///
    /// Nothing is opened. `software`: in the engine of the workers. `xdp`: in the XDP program of an AF_XDP port, before packets reach it
    /// (rules with the action kernel). `injected`: decided by the workers, packets given to the kernel one by one. `refused`: the program
    /// would not start with this rule. Of a tunnel-gateway its own tunnels are shown as rules too. Exit code: 0, or 2 if a rule is wrong or
    /// refused. With --json: an object with `ok`, `rules` (rule, file, line, ports: id, port, driver, where, why) and `gateway`.
    ///
    /// What a NIC takes over depends on the NIC: --port asks one of this machine (real or emulated), --capabilities reads what one has
    /// said before. `hardware`: matched and done in the NIC. `split`: the NIC does a part (matches and marks, say) and the workers the
    /// rest. The reason names the item, field, action or rule that stands in the way.
    #[command(after_help = EXPLAIN_HELP)]
    Explain(ExplainArguments),

    /// Shows which rule each packet of a capture meets and what becomes of it
    ///
    /// The packets come in by a port (--port; default: the first) and meet its rules of ingress; where the configuration says which port
    /// they go on to (l2fwd in pairs, or a rule's redirect), they meet the rules of egress there. With --out they only leave by that port.
    /// The time of rate limits is that of the capture. At the end: packets and bytes of each rule.
    #[command(after_help = MATCH_HELP)]
    Match(MatchArguments),

    /// Lists the rules of a running program, with their numbers and what they counted
    List(SocketArguments),

    /// Adds a rule to a running program, behind those of its priority; prints its number
    Add(AddArguments),

    /// Removes rules from a running program
    Remove(RemoveArguments),

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

    /// Print the rules as tables of TOML
    #[arg(long, conflicts_with = "json")]
    toml: bool,

    /// Take warnings for errors
    #[arg(long)]
    strict: bool,
}

/// Which configuration.
#[derive(Debug, Args)]
pub struct ConfigArguments {
    /// Configuration of l2fwd or tunnel-gateway; for match also a file of rules
    #[arg(value_name = "CONFIG")]
    config: PathBuf,
}

impl ConfigArguments {
    fn input(&self) -> InputArguments {
        InputArguments { file: self.config.clone(), form: None, ports: Vec::new() }
    }
}

const EXPLAIN_HELP: &str = "\
Examples:
  wirepath flow explain configs/l2fwd-acl.toml
  wirepath flow explain configs/l2fwd-acl.toml --port mlx5:eth1
  wirepath devices --rules mlx5:eth1 > nic.json
  wirepath flow explain configs/l2fwd-acl.toml --capabilities nic.json --json";

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArguments {
    #[command(flatten)]
    config: ConfigArguments,

    /// Ask the rule hardware of this device, as if the ports that could be it were it
    #[arg(long, value_name = "DRIVER:DEVICE", conflicts_with = "capabilities")]
    port: Option<String>,

    /// The same, with what such a device has said before
    #[arg(long, value_name = "FILE")]
    capabilities: Option<PathBuf>,
}

/// Arguments of `match`.
#[derive(Debug, Args)]
pub struct MatchArguments {
    #[command(flatten)]
    config: ConfigArguments,

    /// Capture to read: pcap or pcapng
    #[arg(long, value_name = "FILE")]
    pcap: PathBuf,

    /// Write what leaves, as it leaves, to this file: pcapng with a comment at each packet, or pcap if it ends so
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,

    /// Port that the packets come in by: a name, or a number
    #[arg(long, value_name = "PORT", conflicts_with = "out")]
    port: Option<String>,

    /// Port that the packets leave by: only rules of egress are asked
    #[arg(long, value_name = "PORT")]
    out: Option<String>,

    /// Only the figures of each rule, not of each packet
    #[arg(long)]
    summary: bool,
}

const MATCH_HELP: &str = "\
Examples:
  wirepath flow match configs/l2fwd-acl.toml --pcap trace.pcapng
  wirepath flow match acl.rules --pcap trace.pcap --summary
  wirepath flow match gateway.toml --pcap wan.pcap --port wan --write out.pcapng --json";

/// [`Form`] as an argument.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormName {
    /// One rule on each line
    Text,
    /// Tables of TOML
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
        FlowCommand::Explain(arguments) => explain::run(arguments, json),
        FlowCommand::Match(arguments) => matches::run(arguments, json),
        FlowCommand::List(arguments) => live::list(arguments, json),
        FlowCommand::Add(arguments) => live::add(arguments, json),
        FlowCommand::Remove(arguments) => live::remove(arguments, json),
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
