//! The command-line conventions of all programs.
//!
//! - Exit code 0 on success, 1 on failure, 2 on invalid usage or configuration.
//! - Results go to standard output. The log and errors go to standard error.
//! - With `--json`, standard output is one JSON object on one line.
//! - SIGINT and SIGTERM stop the program cleanly. A second signal ends it at once.
//!
//! ```no_run
//! use clap::Parser;
//! use wirepath_apps::cli::{self, Failure};
//!
//! #[derive(Parser)]
//! #[command(version, about = "Counts packets.")]
//! struct Arguments {
//!     #[command(flatten)]
//!     common: cli::Common,
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     cli::main(|| {
//!         let arguments = Arguments::parse();
//!         arguments.common.start_logging();
//!         let stop = cli::Stop::on_signals()?;
//!         while !stop.wait(std::time::Duration::from_secs(1)) {}
//!         Ok(())
//!     })
//! }
//! ```

mod check;
mod cpu;
mod failure;
mod output;
mod stop;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

pub use check::{CheckScope, CheckedPort, MachineCheck, report_check};
pub use cpu::missing_cpu_features;
pub use failure::Failure;
pub use output::{Rate, Table, print, print_json};
pub use stop::Stop;
use tracing_subscriber::EnvFilter;

/// Runs a program: checks the processor, runs `body`, prints its error and returns its exit code.
pub fn main(body: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    main_unchecked(|| cpu::check().and_then(|()| body()))
}

/// Runs a program like [`main()`], but without the processor check. It serves programs that report missing
/// processor features themselves.
pub fn main_unchecked(body: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    match body() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.report();
            failure.exit_code()
        }
    }
}

/// Width of help texts in columns. It does not depend on the terminal, because a wrapped example could not be pasted.
/// Lines of examples must be shorter.
pub const HELP_WIDTH: usize = 100;

/// Parses the time of `--seconds`.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("expected a number of seconds above 0".to_owned()),
    }
}

/// Options of every program.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Common {
    /// Print results as one JSON object on one line of standard output
    #[arg(long, global = true)]
    pub json: bool,

    /// Log more to standard error; twice: log everything. The variable WIREPATH_LOG sets the level per
    /// module, as in WIREPATH_LOG=wirepath_pmd=debug
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,

    /// Log only errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

impl Common {
    /// Sends the log to standard error. The default level contains what an operator needs to know. Examples
    /// are the driver and mode of each port, and the rejected drivers with the reason. It contains no progress
    /// messages.
    pub fn start_logging(&self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => "error",
            (false, 0) => "info",
            (false, 1) => "debug",
            (false, _) => "trace",
        };
        let filter = EnvFilter::try_from_env("WIREPATH_LOG").unwrap_or_else(|_| EnvFilter::new(level));
        // This fails only if a test has installed another subscriber before.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(self.verbose > 0)
            .without_time()
            .try_init();
    }
}
