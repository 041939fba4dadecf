//! The program `wirepath`: diagnosis and tools for the packet programs.

use std::process::ExitCode;

use clap::Parser;
use wirepath::cli;
use wirepath_apps::tools::Arguments;

fn main() -> ExitCode {
    // The processor check is skipped here, because `doctor` reports missing features.
    cli::main_unchecked(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        arguments.command.run(arguments.common.json)
    })
}
