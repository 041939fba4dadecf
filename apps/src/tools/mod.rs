//! Subcommands of the program `wirepath`: devices, diagnosis, flow rules, ports of running programs, and
//! emulated NICs.

pub mod attach;
pub mod capture;
pub mod change;
pub mod command;
pub mod completions;
pub mod config;
pub mod devices;
pub mod doctor;
pub mod emulate;
pub mod flow;
mod generator;
pub mod log;
pub mod manpages;
pub mod metrics;
pub mod ndr;
pub mod perf;
pub mod pktgen;
pub mod reload;
pub mod selftest;
pub mod show;
pub mod top;
pub mod trace;

use clap::{CommandFactory, Parser};

use crate::{gateway, l2fwd};
use wirepath::cli::{self, Failure};

/// Registers the subcommands of `wirepath`, one line each. The module of a subcommand has a type `Options`, whose
/// documentation is the help text, and a function `run`.
macro_rules! subcommands {
    ($($(#[$attribute:meta])* $name:ident: $($module:ident)::+;)*) => {
        /// The subcommands of `wirepath`.
        #[derive(Debug, clap::Subcommand)]
        #[allow(missing_docs, reason = "a comment here would replace the help text of the options")]
        pub enum Command {
            $($(#[$attribute])* $name($($module)::+::Options),)*
        }

        impl Command {
            /// Runs the subcommand. With `json`, the result is one JSON object.
            pub fn run(&self, json: bool) -> Result<(), Failure> {
                match self {
                    $(Self::$name(options) => $($module)::+::run(options, json),)*
                }
            }
        }
    };
}

subcommands! {
    Devices: devices;
    Doctor: doctor;
    Selftest: selftest;
    Pktgen: pktgen;
    Ndr: ndr;
    Show: show;
    Top: top;
    Perf: perf;
    Metrics: metrics;
    Add: change::add;
    Set: change::set;
    Remove: change::remove;
    Command: command;
    Reload: reload;
    Config: config;
    Log: log;
    Capture: capture;
    Trace: trace;
    Attach: attach;
    Flow: flow;
    Emulate: emulate;
    #[command(hide = true)]
    Manpages: manpages;
    #[command(hide = true)]
    Completions: completions;
}

/// Shows what this machine offers to Wirepath's packet programs.
#[derive(Debug, Parser)]
#[command(name = "wirepath", version, term_width = cli::HELP_WIDTH, after_help = AFTER_HELP)]
pub struct Arguments {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,

    /// Options of every program.
    #[command(flatten)]
    pub common: cli::Common,
}

const AFTER_HELP: &str = "\
Examples:
  wirepath doctor            can this machine run real ports?
  wirepath selftest eth1 --peer eth2
                             which features work between two ports with a cable?
  wirepath pktgen --tx eth1 --rx eth2 --rate 100kpps
                             loss, order and delay through a device
  wirepath ndr --tx eth1 --rx eth2
                             the highest load that a device forwards without loss
  wirepath devices           values of `device` and `driver` for a configuration
  wirepath devices --json    the same for programs
  wirepath top               rates of the running program, live
  wirepath perf              cycles of each stage of the running program
  wirepath show ports        state and totals of the ports of the running program
  wirepath add rule 'rule=ingress: udp dst 53 => drop'
                             changes the running program
  wirepath command           commands of the application in the running program
  wirepath reload --dry-run  what would change if the program read its file again?
  wirepath config save       writes the configuration in force
  wirepath log debug         more lines in the log of the running program
  wirepath capture -w - --drops | tshark -r -
                             dropped packets with their reasons, live
  wirepath trace -n 1        what becomes of the next packet, and why?
  wirepath attach SOCKET     queues and counters of a port of a running program
  wirepath flow check FILE   are these flow rules valid, and does each of them run?
  wirepath flow explain CONF where would each rule run, and why?
  wirepath flow match CONF --pcap FILE
                             which rule does each packet match, with which result?
  wirepath flow items        the items of patterns
  wirepath emulate --topology configs/emulated-mlx5.toml -- ibv_devinfo -v

Exit code: 0 success, 1 failure (doctor: a FAIL), 2 invalid usage.";

/// Returns the command lines of all programs.
fn programs() -> [clap::Command; 3] {
    [Arguments::command(), l2fwd::Arguments::command(), gateway::Arguments::command()]
}
