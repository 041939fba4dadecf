//! `wirepath flow`: flow rules without ports.

mod check;
mod explain;
mod input;
mod lint;
mod live;
mod matches;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
pub use input::{PortNames, Program};
pub use lint::{Warning, warnings};
pub use live::{AddArguments, RemoveArguments, SocketArguments};
use serde_json::json;
use wirepath_flow::rule_file::FileFormat;
use wirepath_flow::{ACTIONS, ITEMS, actions_reference, items_reference};

use wirepath::cli::{Failure, print, print_json};

/// Checks flow rules, shows where they run and what they do with a capture, and explains the language
#[derive(Debug, Args)]
pub struct Options {
    #[command(subcommand)]
    command: FlowCommand,
}

/// Operations on flow rules.
#[derive(Debug, Subcommand)]
pub enum FlowCommand {
    /// Checks every rule of a file, reports the errors, and prints the rules in canonical form
    ///
    /// An error names the file, line and column, shows the word, and suggests a correction. Warnings report
    /// rules that never run because an earlier rule takes all their packets. They also report duplicate
    /// rules, rules that no packet can match, and ports and queues that do not exist. The rest of a
    /// configuration is checked like its program would check it. Exit code: 0 if the file is valid, otherwise
    /// 2. With --strict, warnings count as errors.
    #[command(after_help = CHECK_HELP)]
    Check(CheckArguments),

    /// Shows where each rule of a configuration would run, and why it does not run closer to the wire
    ///
    /// Nothing is opened. `software`: in the workers' rule engine. `xdp`: in the XDP program of an AF_XDP
    /// port, before packets reach the port (rules with the action kernel). `injected`: the workers match the
    /// rule and inject each packet into the kernel. `refused`: the program would not start with this rule.
    /// The tunnels of a tunnel-gateway are also shown as rules. Exit code: 0, or 2 if a rule is invalid or
    /// refused. With --json: an object with `ok`, `rules` (rule, file, line, ports: id, port, driver, where,
    /// why) and `gateway`.
    ///
    /// The capabilities of the NIC decide what it can run. --port queries a NIC of this machine (real or
    /// emulated), and --capabilities reads recorded capabilities. `hardware`: the NIC matches and acts.
    /// `split`: the NIC does a part (for example match and mark) and the workers do the rest. The reason
    /// names the item, field, action or rule that prevents more.
    #[command(after_help = EXPLAIN_HELP)]
    Explain(ExplainArguments),

    /// Shows which rule each packet of a capture matches, and the result
    ///
    /// The packets enter by a port (--port; default: the first) and pass its ingress rules. If the
    /// configuration defines their output port (l2fwd in pairs, or a rule's redirect), they also pass the
    /// egress rules there. With --out they only pass the egress rules of that port. Rate limits use the time
    /// of the capture. At the end, the packets and bytes of each rule are shown.
    #[command(after_help = MATCH_HELP)]
    Match(MatchArguments),

    /// Lists the rules of a running program, with their numbers and counters
    List(SocketArguments),

    /// Adds a rule to a running program, after the rules of the same priority, and prints its number
    Add(AddArguments),

    /// Removes rules from a running program
    Remove(RemoveArguments),

    /// Lists the items of patterns, their fields and how values are written
    Items,

    /// Lists the actions and their arguments
    Actions,
}

const CHECK_HELP: &str = "\
FILE: a configuration of l2fwd or tunnel-gateway (TOML with [[rule]] tables), or a rule file: text with one rule
per line, TOML, or a JSON array. `-`: standard input.

Examples:
  wirepath flow check configs/l2fwd-acl.toml
  echo 'ingress: ipv4 dst 10.0.0.0/8 / udp dst 53 => drop' | wirepath flow check -
  wirepath flow check acl.rules --ports lan,wan --toml     # names of ports are known; rules as [[rule]] tables
  wirepath flow check acl.rules --json                     # the same for programs";

/// The input file and its format.
#[derive(Debug, Args)]
pub struct InputArguments {
    /// Configuration or rule file; `-` is standard input
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,

    /// Format of the file [default: by its name, otherwise by its content]
    #[arg(long, value_name = "FORM")]
    pub(super) form: Option<FormName>,

    /// Names of ports 0, 1, ... for a rule file without a configuration
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(super) ports: Vec<String>,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArguments {
    #[command(flatten)]
    input: InputArguments,

    /// Print the rules as TOML tables
    #[arg(long, conflicts_with = "json")]
    toml: bool,

    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
}

/// The configuration file.
#[derive(Debug, Args)]
pub struct ConfigArguments {
    /// Configuration of l2fwd or tunnel-gateway; for match also a rule file
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

    /// Query the rule hardware of this device, for all ports that could use it
    #[arg(long, value_name = "DRIVER:DEVICE", conflicts_with = "capabilities")]
    port: Option<String>,

    /// Use recorded capabilities of such a device
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

    /// Write the packets that leave to this file: pcapng with a comment per packet, or pcap if the name ends
    /// so
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,

    /// Input port of the packets: a name or a number
    #[arg(long, value_name = "PORT", conflicts_with = "out")]
    port: Option<String>,

    /// Output port of the packets; only egress rules are evaluated
    #[arg(long, value_name = "PORT")]
    out: Option<String>,

    /// Print only the counters of each rule, not each packet
    #[arg(long)]
    summary: bool,
}

const MATCH_HELP: &str = "\
Examples:
  wirepath flow match configs/l2fwd-acl.toml --pcap trace.pcapng
  wirepath flow match acl.rules --pcap trace.pcap --summary
  wirepath flow match gateway.toml --pcap wan.pcap --port wan --write out.pcapng --json";

/// [`FileFormat`] as a command-line argument.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormName {
    /// One rule per line
    Text,
    /// TOML tables
    Toml,
    /// JSON array
    Json,
}

impl From<FormName> for FileFormat {
    fn from(name: FormName) -> Self {
        match name {
            FormName::Text => Self::Text,
            FormName::Toml => Self::Toml,
            FormName::Json => Self::Json,
        }
    }
}

/// Runs the subcommand.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    match &options.command {
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
    let field = |field: &wirepath_flow::Field| {
        let spec = field.spec();
        json!({
            "name": spec.name,
            "bits": spec.bits,
            "about": spec.about,
            "values": spec.format.expected(spec.bits),
            "settable": spec.settable,
        })
    };
    let item = |item: &wirepath_flow::ItemSpec| {
        let fields: Vec<_> = item.fields.iter().map(field).collect();
        json!({ "name": item.name, "about": item.about, "most": item.max_count, "fields": fields })
    };
    json!({ "items": ITEMS.iter().map(item).collect::<Vec<_>>() })
}

fn actions_json() -> serde_json::Value {
    let action = |action: &wirepath_flow::ActionSpec| {
        json!({
            "name": action.name,
            "about": action.about,
            "arguments": action.positional,
            "named": action.named,
        })
    };
    json!({ "actions": ACTIONS.iter().map(action).collect::<Vec<_>>() })
}
