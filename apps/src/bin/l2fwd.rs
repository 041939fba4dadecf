//! The program `l2fwd`: joins ports in pairs or bridges all ports.

use std::process::ExitCode;

use clap::Parser;
use wirepath_apps::l2fwd::{self, Arguments};

fn main() -> ExitCode {
    wirepath::main(|| l2fwd::run(&Arguments::parse()))
}
