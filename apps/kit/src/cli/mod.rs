//! The command-line conventions of all programs.
//!
//! - Exit code 0 on success, 1 on failure, 2 on invalid usage or configuration.
//! - Results go to standard output. The log and errors go to standard error.
//! - With `--json`, standard output is one JSON object on one line.
//! - SIGINT and SIGTERM stop the program cleanly. A second signal ends it at once.
//! - SIGHUP never ends a program that forwards; it reads its configuration again, if it has a file.
//! - The log has the format and the levels of `--log-format`, `--log-level` and the table `[log]`: [`log`].
//! - A program that systemd starts with `Type=notify` reports its state: [`Service`].
//! - Rates are redrawn in place on a terminal. Elsewhere a program that forwards prints only its summary.
//! - No output ends or blocks a program that forwards. Lines that cannot be written are counted.
//!
//! ```no_run
//! use clap::Parser;
//! use wirepath::cli::{self, Failure};
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
mod live;
pub mod log;
mod outbox;
mod output;
mod service;
mod stop;

use std::backtrace::BacktraceStatus;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

pub use check::{CheckScope, CheckedPort, check_machine, check_same_ports, report_check};
pub use cpu::missing_cpu_features;
pub use failure::Failure;
pub use live::{can_redraw, rates_table, show_live};
pub use outbox::lost_lines;
pub use output::{Rate, Table, print, print_json, print_summary, show};
pub use output::{print_control, print_error};
pub use service::{ReloadGuard, Service};
pub use stop::{Stop, hangup_flag};
use tracing::level_filters::LevelFilter;

use log::{Format, Levels, LogSettings};

/// Runs a program that forwards: checks the processor, runs `body`, prints its error and returns its exit code. A
/// result such as the summary of [`App::run`](crate::App::run) is not used. From here on, SIGHUP does not end the
/// program, and it ends although nobody reads its output.
pub fn main<T>(body: impl FnOnce() -> Result<T, Failure>) -> ExitCode {
    // The order matters: a thread that sees the flag of the service also sees this one.
    hangup_flag();
    service::start();
    outbox::be_impatient();
    main_unchecked(|| cpu::check().and_then(|()| body().map(drop)))
}

/// Runs a tool: like [`main()`], but SIGHUP ends it, it waits for the readers of its output, and the processor is
/// not checked. It serves programs that report missing processor features themselves.
pub fn main_unchecked(body: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    let _flush = outbox::FlushAtEnd;
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

/// Says why a thread cannot be started, and what to do.
pub(crate) fn no_thread(error: &std::io::Error) -> String {
    format!(
        "cannot start a thread: {error}; the limit of threads may be reached (TasksMax= of systemd.resource-control, \
         or prlimit --nproc)"
    )
}

/// Options of the programs that forward.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RunArguments {
    /// Configuration file (TOML); see below for an example
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check the configuration, and whether this machine has what it asks for, without starting anything
    ///
    /// --check=file checks the configuration only, for use on another machine. Errors and the exit
    /// code are those of the start.
    #[arg(
        long, requires = "config", value_name = "SCOPE", num_args = 0..=1, require_equals = true,
        default_missing_value = "machine"
    )]
    pub check: Option<CheckScope>,

    /// Stop after this time [default: 10 in the demonstration, otherwise never]
    #[arg(short, long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<Duration>,
}

/// Options of every program.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Common {
    /// Print results as one JSON object on one line of standard output
    #[arg(long, global = true)]
    pub json: bool,

    /// Log more to standard error; twice: log everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,

    /// Log only errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,

    /// Log at this level (off, error, warn, info, debug, trace), or at one for a module and its parts, as in
    /// warn,wirepath_pmd=debug. The variable WIREPATH_LOG does the same
    #[arg(long, value_name = "LEVELS", global = true, conflicts_with_all = ["verbose", "quiet"])]
    pub log_level: Option<Levels>,

    /// Form of the log [default: journald if systemd reads it, else text]
    #[arg(long, value_name = "FORMAT", global = true)]
    pub log_format: Option<Format>,
}

impl Common {
    /// Sends the log to standard error. The default level contains what an operator needs to know. Examples
    /// are the driver and mode of each port, and the rejected drivers with the reason. It contains no progress
    /// messages.
    pub fn start_logging(&self) {
        self.configure_log(&LogSettings::default());
        // The default hook would block a thread that panics, if nobody reads standard error.
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current();
            let (name, trace) = (thread.name().unwrap_or("?"), std::backtrace::Backtrace::capture());
            let trace = if trace.status() == BacktraceStatus::Captured { format!("\n{trace}") } else { String::new() };
            log::write(tracing::Level::ERROR, "panic", format!("thread '{name}' {panic}{trace}"));
        }));
    }

    /// Applies the table `[log]` of a configuration where the command line and the environment say nothing.
    pub fn configure_log(&self, table: &LogSettings) {
        // An unreadable variable is ignored, because it may belong to another version.
        let from_environment = || std::env::var("WIREPATH_LOG").ok()?.parse().ok();
        let from_flags = match (self.quiet, self.verbose) {
            (true, _) => Some(LevelFilter::ERROR),
            (false, 0) => None,
            (false, 1) => Some(LevelFilter::DEBUG),
            (false, _) => Some(LevelFilter::TRACE),
        };
        let levels = self.log_level.clone().or_else(from_environment).or(from_flags.map(Levels::all));
        let levels = levels.or_else(|| table.levels.clone()).unwrap_or_default();
        log::start(self.log_format.or(table.format).unwrap_or_else(Format::detect), levels);
    }
}
