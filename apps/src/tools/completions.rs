//! `wirepath completions`: prints completions of command lines for shells, for packages.

use clap::Args;
use clap_complete::{Shell, generate};

use super::programs;
use wirepath::cli::{Failure, print};

/// Prints a shell's completions of a program's command line
#[derive(Debug, Args)]
pub struct Options {
    /// The shell
    shell: Shell,

    /// The program
    #[arg(default_value = "wirepath", value_parser = ["wirepath", "l2fwd", "tunnel-gateway"])]
    program: String,
}

/// Prints the completions.
pub fn run(options: &Options, _: bool) -> Result<(), Failure> {
    let mut script = Vec::new();
    for mut program in programs().into_iter().filter(|program| program.get_name() == options.program) {
        generate(options.shell, &mut program, &options.program, &mut script);
    }
    print(String::from_utf8_lossy(&script))
}
