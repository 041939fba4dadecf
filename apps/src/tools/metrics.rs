//! `wirepath metrics`: the numbers of a running program for monitoring systems.

use clap::Args;
use serde_json::json;

use wirepath::cli::{Failure, print, print_json};
use wirepath::control_socket::SocketArgument;

/// Prints the metrics of a running program as text
///
/// The text has the format 0.0.4 of Prometheus, which the textfile collector of node_exporter reads. The program is the
/// only one that runs, or the one whose control socket --socket names.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// Print OpenMetrics 1.0 instead
    #[arg(long)]
    openmetrics: bool,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
With --json: an object with `text`.

The key `metrics` of [control] names an address where the program itself answers GET /metrics.

Examples:
  wirepath metrics | grep '^wirepath_drop_packets_total'
  wirepath metrics >wirepath.prom.new && mv wirepath.prom.new wirepath.prom   # in the collector's folder";

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let format = if options.openmetrics { "openmetrics" } else { "prometheus" };
    let text = options.socket.connect()?.metrics(format)?;
    if json { print_json(&json!({ "text": text })) } else { print(text) }
}
