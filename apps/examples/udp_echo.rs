//! A packet application in forty lines: returns every UDP datagram to its sender and drops all other packets.
//!
//!     cargo run --release --example udp_echo                            # on generated traffic
//!     cargo run --release --example udp_echo -- --config my-ports.toml  # on the ports of a file

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser as _;
use wirepath::cli::{self, Failure};
use wirepath_packet::{Batch, drops::DropReason};
use wirepath_pipeline::{Context, ParsedBatch, RunOptions, Runtime, RuntimeConfig};
use wirepath_settings::Source;
use wirepath_wire::{HeadersMut, Parser};

const GENERATED: &str = "[[port]]\nname = 'generator'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n";

#[derive(clap::Parser)]
struct Arguments {
    #[arg(long)]
    config: Option<PathBuf>,
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        let generated = || Ok(Source::new("generated traffic", GENERATED));
        let source = arguments.config.as_deref().map_or_else(generated, Source::load)?;
        let document = source.parse()?;
        let ports = RuntimeConfig::ports_from_settings(&document.settings())?;
        let config = RuntimeConfig::from_settings(&document.settings())?;
        let runtime = Runtime::open(ports, config)?;

        let stage = |_: &_| {
            let mut headers = ParsedBatch::new();
            move |context: &mut Context<'_>, batch: &mut Batch| {
                headers.parse(&Parser::default(), context, batch);
                headers.filter_map(batch, |mut packet, headers| {
                    if return_to_sender(packet.headers_mut(headers)).is_none() {
                        context.drop(packet, DropReason::RuleDrop);
                        return None;
                    }
                    packet.set_out_port(packet.in_port());
                    Some(packet)
                });
            }
        };
        let duration = Some(Duration::from_secs(arguments.seconds));
        let options = RunOptions { duration, stop: Some(cli::Stop::on_signals()?.flag()), ..RunOptions::default() };
        let summary = runtime.run(stage, &mut (), &options).map_err(Failure::failed)?;
        cli::print_summary(&summary, "", false)
    })
}

/// Swaps addresses and ports. `None` if the packet is not UDP over IP.
fn return_to_sender(mut headers: HeadersMut<'_>) -> Option<()> {
    headers.udp()?.swap_ports();
    headers.ip()?.swap_addresses();
    headers.ethernet()?.swap_addresses();
    Some(())
}
