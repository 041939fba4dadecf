//! The command-line contract that every program keeps.
//!
//! - Exit code 0 on success, 1 on failure, 2 on bad usage or configuration.
//! - What was asked for goes to standard output, everything else (log, errors) to standard error.
//! - With `--json`, standard output is one JSON object on one line.
//! - SIGINT and SIGTERM stop cleanly; a second one ends the program at once.
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

mod cpu;
mod failure;
mod output;
mod stop;

use std::io::IsTerminal;
use std::process::ExitCode;

pub use cpu::missing_cpu_features;
pub use failure::Failure;
pub use output::{Rate, Table, print, print_check, print_json};
pub use stop::Stop;
use tracing_subscriber::EnvFilter;

/// Runs a program: checks the processor, runs `body`, prints its error and gives its exit code.
pub fn main(body: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    main_unchecked(|| cpu::check().and_then(|()| body()))
}

/// [`main()`] without the look at the processor, for programs that say themselves what it lacks.
pub fn main_unchecked(body: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    match body() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.report();
            failure.exit_code()
        }
    }
}

/// Options that every program has.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Common {
    /// Print results as one JSON object on one line of standard output
    #[arg(long, global = true)]
    pub json: bool,

    /// Say more on standard error; twice: everything. The variable WIREPATH_LOG sets it per module, as in
    /// WIREPATH_LOG=wirepath_pmd=debug
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,

    /// Say only what went wrong
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

impl Common {
    /// Sends the log to standard error. Without options: what an operator needs to know (which driver and mode each port got, what
    /// was passed over and why), but no progress.
    pub fn start_logging(&self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => "error",
            (false, 0) => "info",
            (false, 1) => "debug",
            (false, _) => "trace",
        };
        let filter = EnvFilter::try_from_env("WIREPATH_LOG").unwrap_or_else(|_| EnvFilter::new(level));
        // Fails only where a test has set another one before.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(self.verbose > 0)
            .without_time()
            .try_init();
    }
}
