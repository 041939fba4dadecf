//! `wirepath pktgen receive`: counts the packets of generators elsewhere.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use wirepath::Config;
use wirepath::cli::{self, Failure, Stop, print, print_json};

use crate::pktgen::ports::{PortName, Role};
use crate::pktgen::receive::{ReceiveLimit, ReceiveProgress, Receiver};

/// Counts the packets that generators on other machines or in other processes send
///
/// It counts all packets and bytes of each port, their rates and their sizes. Rates are the mean between the first and
/// the last packet, and the lowest and highest of the whole seconds between them. Sizes have the classes of RFC 2819.
/// Lengths and bytes include the frame check sequence.
///
/// Packets with the signature of `wirepath pktgen` count for their run and their stream too. Each start of a generator
/// has another run number, so several generators and a restarted one are apart. Two runs have the same number with a
/// probability of 1 in 65534.
///
/// Loss is the number of gaps between the first and the highest received sequence number of each stream. The receiver
/// cannot know how many packets followed the last received one: compare `received` with `sent` of the generator. It
/// cannot know either whether packets before the first one were lost, or sent before it began. They count as `before
/// first`.
///
/// A packet is corrupt if it has the number of a run that has begun, and its signature or payload is wrong. There are
/// no delays and no jitter: the time in a signature is that of the sender's clock, which is not the receiver's.
///
/// One thread receives on all ports and keeps a processor busy. It runs until Ctrl-C, --seconds or --count, or until
/// all files are read, and prints a summary. With --json: an object with `result` and `ports`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(super) struct Options {
    /// Ports that receive: DRIVER:DEVICE such as af_xdp:eth1, a DEVICE, or the name of a port in --config
    #[arg(short, long, value_name = "PORT", required = true)]
    port: Vec<PortName>,

    /// Configuration with tables [[port]], for ports with settings of their own
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Stop after this time [default: never]
    #[arg(short, long, value_name = "N", value_parser = cli::seconds)]
    seconds: Option<Duration>,

    /// Stop after this number of packets of all ports together, with and without signature
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Follow at most this number of streams. Packets of further streams are counted as untracked
    ///
    /// 65536 streams need about 80 MB, and each further stream 300 bytes.
    #[arg(
        long, value_name = "N", default_value_t = 65536,
        value_parser = clap::value_parser!(u32).range(1..=1 << 20)
    )]
    max_streams: u32,

    /// Processor of the thread that receives
    #[arg(long, value_name = "N")]
    core: Option<usize>,
}

const HELP: &str = "\
Examples:
  wirepath pktgen receive --port eth2
                            on one machine, until Ctrl-C
  wirepath pktgen --tx eth1 --rate 100kpps --headers 'eth dst 02:00:00:00:00:02 / ipv4 / udp'
                            on another one
  wirepath --json pktgen receive --port af_xdp:eth2 --port af_xdp:eth3 --seconds 60
  wirepath pktgen receive --port pcap:trace.pcapng
                            counts the packets of a file

Exit code: 0 if it ended or was stopped by Ctrl-C, whatever was lost; 1 if a port failed; 2 for a request that is not
possible on these ports.";

pub(super) fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let configured = match &options.config {
        Some(path) => Config::load(path)?.ports,
        None => Vec::new(),
    };
    let role = Role { sends: false, receives: true };
    let mut names: Vec<(PortName, Role)> = Vec::new();
    for name in &options.port {
        if names.iter().any(|(other, _)| other == name) {
            return Err(Failure::usage(format!("--port {name} is given twice, so its packets would count twice")));
        }
        names.push((name.clone(), role));
    }
    let settings = PortName::settings(&names, configured)?;
    let limit = ReceiveLimit {
        time: options.seconds,
        packets: options.count,
        streams: usize::try_from(options.max_streams).unwrap_or(usize::MAX),
    };
    let stop = Stop::on_signals()?;
    let mut receiver = Receiver::open(settings, options.core)?;
    let described = receiver.describe();
    if !json {
        let text: String = described.iter().map(|(name, text)| format!("port {name}: {text}\n")).collect();
        // Results that are printed would end the display of rates.
        cli::show(text);
    }
    let names: Vec<String> = described.iter().map(|(name, _)| name.clone()).collect();
    let is_live = !json && cli::can_redraw();
    let mut last = ReceiveProgress::default();
    let result = receiver.run(&limit, &stop.flag(), |progress| {
        if is_live {
            cli::show_live(&progress.text(&last, &names));
        }
        last.clone_from(progress);
    })?;
    let closed = receiver.close();
    if json {
        let ports: Vec<_> = described.iter().map(|(name, text)| json!({ "name": name, "mode": text })).collect();
        print_json(&json!({ "result": result.to_json(), "ports": ports }))?;
    } else {
        print(result.text())?;
    }
    super::end(result.failure, closed)
}
