//! `wirepath-bench`: cost of forwarding and encapsulating packets, in cycles per packet.
//!
//! Figures of a single run on one machine mean little. Run a peer and this program alternately on a quiet
//! machine and compare the ratios; see `benches/README.md`.

mod forward;
mod hardware;
mod measure;
mod nic;
mod route;
mod router;
mod rules;
mod table;
mod tunnel;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wirepath::cli;

#[derive(Parser)]
#[command(
    name = "wirepath-bench",
    version,
    about = "Measures what moving and encapsulating packets costs",
    after_help = "Cycles are those of the time-stamp counter.\n\
                  Each figure includes packet source, sink and statistics.\n\
                  Compare a figure only with that of a peer, measured alternately on the same quiet machine."
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
    /// Encapsulate frames, decapsulate them, or both, on one core
    Tunnel(tunnel::Arguments),
    /// Send and receive with a NIC's driver alone, on an emulated or a real NIC
    Nic(nic::Arguments),
    /// Find the rule of each packet among many, also while rules change
    Rules(rules::Arguments),
    /// Insert many rules into a NIC, explain them, change them while a worker forwards, and remove them
    Hardware(hardware::Arguments),
    /// Look up exact keys in the rule engine's hash table, and insert them
    Table(table::Arguments),
    /// Route packets with the gateway stage, on one core
    Router(router::Arguments),
    /// Look up addresses in the routing tables, and insert routes
    Route(route::Arguments),
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
            Command::Router(arguments) => router::run(&arguments)?.print(json),
            Command::Route(arguments) => route::run(&arguments)?.map_or(Ok(()), |figures| figures.print(json)),
        }
    })
}
