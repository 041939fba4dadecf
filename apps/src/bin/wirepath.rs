//! The program `wirepath`: diagnosis and tools for the packet programs.

use std::process::ExitCode;

use clap::Parser;
use wirepath_apps::cli;
use wirepath_apps::tools::Command;

/// Shows what this machine offers to Wirepath's packet programs.
#[derive(Debug, Parser)]
#[command(name = "wirepath", version, term_width = cli::HELP_WIDTH, after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    common: cli::Common,
}

const AFTER_HELP: &str = "\
Examples:
  wirepath doctor            can this machine run real ports?
  wirepath selftest eth1 --peer eth2
                             which features work between two ports with a cable?
  wirepath devices           values of `device` and `driver` for a configuration
  wirepath devices --json    the same for programs
  wirepath top               rates of a running program, live
  wirepath attach SOCKET     queues and counters of a port of a running program
  wirepath flow check FILE   are these flow rules valid, and does each of them run?
  wirepath flow explain CONF where would each rule run, and why?
  wirepath flow match CONF --pcap FILE
                             which rule does each packet match, with which result?
  wirepath flow items        the items of patterns
  wirepath emulate --topology configs/emulated-mlx5.toml -- ibv_devinfo -v

Exit code: 0 success, 1 failure (doctor: a FAIL), 2 invalid usage.";

fn main() -> ExitCode {
    // The processor check is skipped here, because `doctor` reports missing features.
    cli::main_unchecked(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        arguments.command.run(arguments.common.json)
    })
}
