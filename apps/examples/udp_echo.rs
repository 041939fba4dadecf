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
use wirepath_wire::{L3Type, L4Type, Parser};

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
                    let layers = headers.outer();
                    if (layers.l3_type(), layers.l4_type()) != (L3Type::Ipv4, L4Type::Udp) {
                        context.drop(packet, DropReason::RuleDrop);
                        return None;
                    }
                    // Addresses and ports are swapped, which keeps all checksums valid.
                    for (at, len) in [(layers.l2(), 6), (layers.l3() + 12, 4), (layers.l4(), 2)] {
                        let (first, second) = packet.data_mut()[at..at + 2 * len].split_at_mut(len);
                        first.swap_with_slice(second);
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
