//! Subcommands of the program `wirepath`: devices, diagnosis, flow rules, ports of running programs, and
//! emulated NICs.

pub mod attach;
pub mod change;
pub mod devices;
pub mod doctor;
pub mod emulate;
pub mod flow;
pub mod metrics;
pub mod selftest;
pub mod show;

use crate::cli::Failure;

/// Registers the subcommands of `wirepath`, one line each. The module of a subcommand has a type `Options`, whose
/// documentation is the help text, and a function `run`.
macro_rules! subcommands {
    ($($name:ident: $($module:ident)::+;)*) => {
        /// The subcommands of `wirepath`.
        #[derive(Debug, clap::Subcommand)]
        #[allow(missing_docs, reason = "a comment here would replace the help text of the options")]
        pub enum Command {
            $($name($($module)::+::Options),)*
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
    Show: show;
    Metrics: metrics;
    Add: change::add;
    Set: change::set;
    Remove: change::remove;
    Attach: attach;
    Flow: flow;
    Emulate: emulate;
}
