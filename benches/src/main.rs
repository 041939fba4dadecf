//! `wirepath-bench`: cost of forwarding and encapsulating packets, in cycles per packet.
//!
//! Figures of a single run on one machine mean little. Run a peer and this program alternately on a quiet
//! machine and compare the ratios; see `benches/README.md`.

mod forward;
mod hardware;
mod latency;
mod machine;
mod measure;
mod nic;
mod real;
mod route;
mod router;
mod rules;
mod scale;
mod table;
mod tunnel;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wirepath::cli;

use crate::machine::Observer;
use crate::measure::report;

#[derive(Parser)]
#[command(
    name = "wirepath-bench",
    version,
    about = "Measures what moving and encapsulating packets costs",
    after_help = "Cycles are those of the time-stamp counter.\n\
                  Each figure includes packet source, sink and statistics. It is the median of several rounds.\n\
                  The result names the machine and what disturbed the run.\n\
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
    /// Measure delays: of stages alone, or of ports with a worker between them
    Latency(latency::Arguments),
    /// Measure how the cost grows with cores, queues, flows, tunnels, routes or rules
    Scale(scale::Arguments),
}

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        let json = arguments.common.json;
        let observer = Observer::start();
        match arguments.command {
            Command::Forward(arguments) => forward::run(&arguments)?.map_or(Ok(()), |it| report(&it, &observer, json)),
            Command::Tunnel(arguments) => tunnel::run(&arguments)?.map_or(Ok(()), |it| report(&it, &observer, json)),
            Command::Nic(arguments) => nic::run(&arguments)?.map_or(Ok(()), |it| report(&it, &observer, json)),
            Command::Rules(arguments) => report(&rules::run(&arguments)?, &observer, json),
            Command::Hardware(arguments) => {
                hardware::run(&arguments)?.map_or(Ok(()), |it| report(&it, &observer, json))
            }
            Command::Table(arguments) => report(&table::run(&arguments)?, &observer, json),
            Command::Router(arguments) => router::run(&arguments)?.map_or(Ok(()), |it| report(&it, &observer, json)),
            Command::Route(arguments) => route::run(&arguments)?.map_or(Ok(()), |it| report(&it, &observer, json)),
            Command::Latency(arguments) => latency::run(arguments)?.map_or(Ok(()), |it| report(&it, &observer, json)),
            Command::Scale(arguments) => report(&scale::run(&arguments)?, &observer, json),
        }
    })
}
