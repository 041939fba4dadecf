//! `wirepath pktgen`: generates traffic and measures what comes back.

mod receive;
mod reflect;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use serde_json::json;
use wirepath::cli::{self, Failure, Rate as Scaled, Stop, Table, print, print_error, print_json};

use super::generator::{GeneratorArguments, StreamArguments};
use crate::pktgen::flows::{Replay, Traffic};
use crate::pktgen::rate::Rate;
use crate::pktgen::report::SelfCheck;
use crate::pktgen::size::Sizes;
use crate::pktgen::{Limit, Progress, Trial};

/// Generates traffic on ports, and measures loss, order, duplicates and delay of what comes back
///
/// Each packet has a signature at its end with stream, sequence number and time, so that headers may change on the way.
/// Loss, duplicates, reordering (RFC 4737), corruption, delay and jitter (RFC 3550) are those of packets with the
/// signature; all others count as foreign. Before the run the tool measures its own delay over a cable in memory. The
/// clock is the time-stamp counter of the processor, read just before a packet is built and just after it was received.
/// Delays of mlx5 ports with `timestamps = true` (--config) end when the NIC received the packet.
/// With --json: an object with `result`, `self_check` and `ports`. `run` is the number in the signatures, which `pktgen
/// receive` has too.
#[derive(Debug, Args)]
#[command(after_help = HELP, args_conflicts_with_subcommands = true)]
pub struct Options {
    #[command(subcommand)]
    command: Option<PktgenCommand>,

    #[command(flatten)]
    generator: GeneratorArguments,

    #[command(flatten)]
    streams: StreamArguments,

    #[command(flatten)]
    traffic: TrafficArguments,

    /// Load of each sending port [default: 1000; for a capture its own timing]
    ///
    /// Packets per second: 1000, 1.5Mpps. Bits per second of frames with their check sequences (layer 2): 800Mbps.
    /// Bits per second on the wire, with preamble and gap (layer 1): 1Gbpsl1. A share of the link on layer 1: 50%.
    /// As much as the port accepts: max.
    #[arg(short, long, value_name = "RATE")]
    rate: Option<Rate>,

    /// Length of the sending [default: 10]
    #[arg(short, long, value_name = "N", value_parser = cli::seconds, conflicts_with_all = ["count", "passes"])]
    seconds: Option<Duration>,

    /// End the sending after this number of packets of each port
    #[arg(
        short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..),
        conflicts_with = "passes"
    )]
    count: Option<u64>,

    /// Also report how far packets are displaced, and how many packets a receiver would hold to restore the order:
    /// Reorder Density and Reorder Buffer-occupancy Density (RFC 5236)
    ///
    /// A packet that more than N packets overtake, or that overtakes more than N, is left out there. This costs some
    /// tenths of a microsecond for each packet.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096), conflicts_with = "pcap")]
    reorder_threshold: Option<u16>,

    /// Write the histograms of delays and departure intervals as an HdrHistogram log (version 2)
    #[arg(long, value_name = "FILE")]
    hlog: Option<PathBuf>,

    /// Do not measure the delay of the tool itself
    #[arg(long)]
    no_self_check: bool,
}

/// Sizes of the packets, or a capture in their place.
#[derive(Debug, Args)]
struct TrafficArguments {
    /// Lengths of the frames in bytes, with the frame check sequence [default: 64]
    ///
    /// One length: 64. Several in turn: 64,512,1518. With weights: 64:7,570:4,1518:1, which is also called imix.
    /// Random ones: 64-1518.
    #[arg(long, value_name = "SIZES", conflicts_with = "pcap")]
    size: Option<Sizes>,

    /// Send the frames of this capture (pcap or pcapng) as they are, with its own timing or at --rate
    #[arg(long, value_name = "FILE", conflicts_with_all = ["headers", "headers_file", "flows", "pick"])]
    pcap: Option<PathBuf>,

    /// Send the capture this often [default: 1, or as often as --seconds or --count take]
    #[arg(long, value_name = "N", requires = "pcap", value_parser = clap::value_parser!(u64).range(1..))]
    passes: Option<u64>,
}

/// Other modes. Their help is that of their options.
#[derive(Debug, Subcommand)]
enum PktgenCommand {
    Reflect(reflect::Options),
    Receive(receive::Options),
}

const HELP: &str = "\
A header stack is a list of headers with values, as `wirepath flow items` has them. What is not given has a default:
lengths, checksums and types follow from the stack, the Ethernet addresses from the ports. A range or list of values
makes flows; several of them make all combinations.
  ipv4 src 198.18.0.1-198.18.0.254 / udp dst 53,4789
  eth dst 02:00:00:00:00:01 / vlan vid 10-19 / ipv6 dst 2001:db8::/112 / tcp flags syn
  ipv4 / udp src 49152-65535 / vxlan vni 5001 / eth / ipv4 / udp
  ipv4 / gre key 7 / ipv4 / icmp        ipv4 / udp / geneve / eth / ipv6 / udp        mpls label 100 / ipv4 / udp

Examples:
  wirepath pktgen --tx eth1 --rx eth2 --rate 100kpps --seconds 10
                            through a device between two ports
  wirepath pktgen --port eth1 --rate 50% --size imix
                            one port, with a reflector at the other end
  wirepath pktgen reflect --port eth2
                            that reflector
  wirepath pktgen receive --port eth2
                            counts the packets of a generator elsewhere
  wirepath pktgen --tx af_xdp:eth1 --rx af_xdp:eth2 --rate max --threads 2 --hlog run.hlog
  wirepath pktgen --tx eth1 --pcap trace.pcapng --passes 10 --rate 1Mpps
  wirepath pktgen --tx pcap:out.pcap --count 1000 --headers 'ipv4 / tcp dst 80-89'
                            writes the packets to a file

Exit code: 0 if the run ended or was stopped by Ctrl-C, whatever was lost; 1 if a port failed; 2 for a request that is
not possible on these ports.";

/// Runs the subcommand.
///
/// # Errors
/// If the request is not possible, or a port fails.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    match &options.command {
        Some(PktgenCommand::Reflect(options)) => return reflect::run(options, json),
        Some(PktgenCommand::Receive(options)) => return receive::run(options, json),
        None => {}
    }
    let arguments = &options.generator;
    let ports = arguments.roles()?;
    let trial = options.trial()?;
    let hlog = options.hlog.as_deref().map(|path| create(path).map(|file| (path, file))).transpose()?;
    let stop = Stop::on_signals()?;
    let mut generator = arguments.open(&ports)?;
    generator.check(&trial)?;
    let live = !json && cli::can_redraw();
    let check = match options.no_self_check {
        true => None,
        false => Some(SelfCheck::measure(arguments.threads, arguments.cores.clone())?),
    };
    let described = generator.describe();
    if !json {
        let mut text: String = described.iter().map(|(name, text)| format!("port {name}: {text}\n")).collect();
        text.extend(check.iter().map(SelfCheck::text));
        text.extend(generator.notes().iter().map(|note| format!("note: {note}\n")));
        // Results that are printed would end the display of rates.
        cli::show(text);
    }
    let start = SystemTime::now();
    let mut last = Progress::default();
    let result = generator.run(&trial, &stop.flag(), |progress| {
        if live {
            cli::show_live(&rates(&last, progress));
        }
        last = *progress;
    })?;
    let closed = generator.close();
    if json {
        let ports: Vec<_> = described.iter().map(|(name, text)| json!({ "name": name, "mode": text })).collect();
        let check = check.as_ref().map(SelfCheck::to_json);
        print_json(&json!({ "result": result.to_json(), "self_check": check, "ports": ports }))?;
    } else {
        print(result.text())?;
    }
    // A full disk must not cost the result.
    if let Some((path, file)) = hlog {
        result.write_hlog(file, start).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
    }
    end(result.failure, closed)
}

/// Returns the failure of a run whose result is printed. An error while the ports are closed is none, and is printed.
fn end(failure: Option<String>, closed: Result<(), Failure>) -> Result<(), Failure> {
    match failure {
        Some(why) => Err(Failure::failed(why)),
        None => {
            if let Err(error) = closed {
                print_error(&format!("{error}\n"));
            }
            Ok(())
        }
    }
}

fn create(path: &Path) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

impl Options {
    fn trial(&self) -> Result<Trial, Failure> {
        let traffic = match &self.traffic.pcap {
            Some(file) => Traffic::Replay(Arc::new(Replay::load(file).map_err(Failure::usage)?)),
            None => {
                let sizes = self.traffic.size.clone().unwrap_or(Sizes::Round(vec![64]));
                Traffic::Flows(self.streams.flows(sizes)?)
            }
        };
        let is_replay = matches!(traffic, Traffic::Replay(_));
        let limit = match (self.count, self.seconds, self.traffic.passes) {
            (Some(count), _, _) => Limit::Packets(count),
            (_, Some(time), _) => Limit::Time(time),
            (_, _, passes) if is_replay => Limit::Passes(passes.unwrap_or(1)),
            _ => Limit::Time(Duration::from_secs(10)),
        };
        let rate = self.rate.or((!is_replay).then_some(Rate::Packets(1000.0)));
        Ok(Trial { traffic, rate, limit, drain: self.generator.drain, reorder_threshold: self.reorder_threshold })
    }
}

/// Returns the rates of the last second as text.
fn rates(before: &Progress, now: &Progress) -> String {
    let seconds = now.elapsed.saturating_sub(before.elapsed).as_secs_f64().max(1e-9);
    let headings = [format!("{:.0} s", now.elapsed.as_secs_f64())].into_iter();
    let headings = headings.chain(["PACKETS", "pps", "bit/s (L2)"].map(str::to_owned));
    let mut table = Table::with_columns(headings.zip([false, true, true, true]));
    for (name, now, before) in [("sent", now.sent, before.sent), ("received", now.received, before.received)] {
        let cell = |rate: f64| Scaled(rate).to_string().trim_end().to_owned();
        let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        table.push([
            name.to_owned(),
            now.0.to_string(),
            cell(per_second(now.0, before.0)),
            cell(per_second(now.1, before.1) * 8.0),
        ]);
    }
    format!("{table}longest delay of the last second: {:.1} us\n", now.max_latency as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_second() {
        let at = |seconds, sent| Progress {
            elapsed: Duration::from_secs(seconds),
            sent: (sent, sent * 64),
            received: (sent / 2, sent * 32),
            max_latency: 1500,
        };
        let text = rates(&at(1, 1000), &at(3, 5000));
        let expected = "3 s       PACKETS     pps  bit/s (L2)\n\
                        sent         5000  2.00 k      1.02 M\n\
                        received     2500  1.00 k    512.00 k\n\
                        longest delay of the last second: 1.5 us\n";
        assert_eq!(text, expected);
    }
}
