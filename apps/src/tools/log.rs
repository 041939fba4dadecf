//! `wirepath log`: levels of the log of a running program.

use clap::Args;
use serde_json::json;

use wirepath::cli::{Failure, print, print_json};
use wirepath::control_socket::SocketArgument;

/// Shows or changes the levels of the log of a running program
///
/// Without LEVEL, the levels in force are shown in the form that `--log-level` takes. The change ends with the
/// program; the table `[log]` of its configuration stays.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// off, error, warn, info, debug or trace; reset: the level of the start or the last reload
    #[arg(value_name = "LEVEL", value_parser = ["off", "error", "warn", "info", "debug", "trace", "reset"])]
    level: Option<String>,

    /// Module with the modules inside it, such as wirepath_pmd; without it, all modules that have no level of their own
    #[arg(value_name = "MODULE", requires = "level")]
    module: Option<String>,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
Examples:
  wirepath log                                   # the levels in force
  wirepath log debug                             # more of everything
  wirepath log trace wirepath_pipeline::tunnel   # everything about the gateway
  wirepath log reset                             # the levels of the configuration";

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or refuses the change.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let mut request = json!({ "request": "log" });
    for (key, value) in [("level", &options.level), ("module", &options.module)] {
        if let Some(value) = value {
            request[key] = value.as_str().into();
        }
    }
    let answer = options.socket.connect()?.ask(&request)?;
    if json {
        return print_json(&answer);
    }
    print(format_args!("{}\n", answer["levels"].as_str().unwrap_or_default()))
}
