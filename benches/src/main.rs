//! `wirepath-bench`: what moving and encapsulating packets costs, in cycles per packet.
//!
//! Figures of one machine at one time mean little. Run the peer and this in turn, on a quiet machine, and compare the ratios; see
//! `benches/README.md`.

mod forward;
mod hardware;
mod measure;
mod nic;
mod rules;
mod table;
mod tunnel;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wirepath_apps::cli;

#[derive(Parser)]
#[command(
    name = "wirepath-bench",
    version,
    about = "Measures what moving and encapsulating packets costs",
    after_help = "Cycles are those of the time-stamp counter. Each figure includes packet source, sink and statistics.\n\
                  A figure counts only beside that of a peer, taken in turn on the same quiet machine."
)]
struct Arguments {
    #[command(flatten)]
    common: cli::Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Forward between two ports in both directions, on one core
    Forward(forward::Arguments),
    /// Put frames into tunnels, take them out, or both, on one core
    Tunnel(tunnel::Arguments),
    /// Send and receive by a NIC's driver alone, on an emulated NIC or one that is there
    Nic(nic::Arguments),
    /// Find the rule of each packet, among many and while they change
    Rules(rules::Arguments),
    /// Put many rules into a NIC, explain them, change them beside a worker that forwards, and take them out
    Hardware(hardware::Arguments),
    /// Look exact keys up in the rule engine's hash table, and put them in
    Table(table::Arguments),
}

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        let json = arguments.common.json;
        match arguments.command {
            Command::Forward(arguments) => forward::run(&arguments)?.print(json),
            Command::Tunnel(arguments) => tunnel::run(&arguments)?.print(json),
            Command::Nic(arguments) => nic::run(&arguments)?.map_or(Ok(()), |figures| figures.print(json)),
            Command::Rules(arguments) => rules::run(&arguments)?.print(json),
            Command::Hardware(arguments) => hardware::run(&arguments)?.map_or(Ok(()), |figures| figures.print(json)),
            Command::Table(arguments) => table::run(&arguments)?.print(json),
        }
    })
}
