//! `wirepath capture`: packets of a running program as pcapng.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use wirepath::cli::{self, Failure, Stop, print_error, print_json};
use wirepath::control_socket::SocketArgument;

/// Captures packets of a running program in a pcapng file
///
/// Received packets, sent packets and drops are captured, or those of them that --rx, --tx and --drops name. Each port
/// is an interface of the file. A dropped packet has its drop reason as a comment. The program goes on whether or not
/// the file takes the packets: what it leaves out is counted, shown at the end, and stored as interface statistics.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// File to write, or - for standard output
    #[arg(short, long, value_name = "FILE")]
    write: PathBuf,

    /// Capture received packets, as the ports delivered them
    #[arg(long)]
    rx: bool,

    /// Capture packets that the devices of output ports accepted
    #[arg(long)]
    tx: bool,

    /// Capture dropped packets, or those dropped for this reason, such as no_neighbour
    #[arg(long, value_name = "REASON", num_args = 0..=1, require_equals = true)]
    drops: Option<Option<String>>,

    /// Capture packets of this port only: the output port of sent packets, else the input port
    #[arg(long, value_name = "PORT")]
    port: Option<String>,

    /// Capture the frames that enter this segment, without tunnel headers, until it is removed
    #[arg(long, value_name = "NAME", conflicts_with_all = ["rx", "tx", "drops"])]
    segment: Option<String>,

    /// Capture packets that match this pattern only, as in the text of a flow rule
    #[arg(long = "rule", value_name = "PATTERN")]
    pattern: Option<String>,

    /// Store at most this number of bytes of each packet
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    snaplen: Option<u64>,

    /// Capture at most this number of packets per second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rate: Option<u64>,

    /// End after this number of packets
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// End before the packets exceed this number of bytes of the file
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    bytes: Option<u64>,

    /// End after this time
    #[arg(long, value_name = "N", value_parser = cli::seconds)]
    seconds: Option<Duration>,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
With --json: an object with `captured`, `left_out` and `end`, after the end.

Examples:
  wirepath capture -w all.pcapng                       # until Ctrl-C
  wirepath capture -w - --drops | tshark -r -          # why are packets dropped? live
  wirepath capture -w blue.pcapng --segment blue       # frames of a segment of tunnel-gateway, without tunnel headers
  wirepath capture -w dns.pcapng --rx --rule 'udp dst 53' -n 100
  wirepath capture -w wan.pcapng --port wan --snaplen 128 --rate 10000 --seconds 60
  wirepath capture -w late.pcapng --drops=no_neighbour --bytes 10000000";

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or refuses, or the file cannot be written.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let to_stdout = options.write.as_os_str() == "-";
    if to_stdout && json {
        return Err(Failure::usage("--json and \"--write -\" both use standard output"));
    }
    if to_stdout && io::stdout().is_terminal() {
        return Err(Failure::usage("standard output is a terminal; pipe it to a program such as \"tshark -r -\""));
    }
    let stop = Stop::on_signals()?;
    let mut client = options.socket.connect()?;
    client.subscribe(&options.request())?;
    // The file is created when the program accepts the request.
    let Some(_) = client.next_line(&stop)? else { return Ok(()) };
    let name = options.write.display();
    let failed = |error: io::Error| Failure::failed(format!("{name}: {error}"));
    let mut out: Box<dyn Write> =
        if to_stdout { Box::new(io::stdout()) } else { Box::new(File::create(&options.write).map_err(failed)?) };
    loop {
        let line = match client.next_line(&stop)? {
            Some(line) => line,
            None => return Err(Failure::failed("the program has ended the capture without its figures")),
        };
        if let Some(bytes) = line["bytes"].as_u64() {
            let Some(part) = client.next_bytes(bytes, &stop)? else {
                return Err(Failure::failed("the program has ended the capture without its figures"));
            };
            match out.write_all(&part).and_then(|()| out.flush()) {
                Ok(()) => {}
                // As of `| head`: the reader has what it wants.
                Err(error) if to_stdout && error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(failed(error)),
            }
        }
        if line["more"] != true {
            return report(&line, json);
        }
    }
}

impl Options {
    fn request(&self) -> Value {
        let mut request = json!({ "request": "capture" });
        let points = [("rx", self.rx), ("tx", self.tx), ("drops", self.drops.is_some())];
        let points: Vec<&str> = points.iter().filter(|(_, wanted)| *wanted).map(|(name, _)| *name).collect();
        if !points.is_empty() {
            request["points"] = points.into();
        }
        let texts = [("reason", self.drops.clone().flatten()), ("port", self.port.clone())];
        let others = [("segment", self.segment.clone()), ("pattern", self.pattern.clone())];
        for (key, value) in texts.into_iter().chain(others) {
            if let Some(value) = value {
                request[key] = value.into();
            }
        }
        let numbers = [("snap", self.snaplen), ("rate", self.rate), ("count", self.count), ("bytes", self.bytes)];
        for (key, value) in numbers {
            if let Some(value) = value {
                request[key] = value.into();
            }
        }
        if let Some(seconds) = self.seconds {
            request["seconds"] = seconds.as_secs_f64().into();
        }
        request
    }
}

/// Shows the figures of a capture.
fn report(line: &Value, json: bool) -> Result<(), Failure> {
    if json {
        return print_json(line);
    }
    let reasons = [("queue_full", "queue full"), ("rate", "over the rate"), ("no_packet", "drops without a packet")];
    let left_out: Vec<(u64, &str)> =
        reasons.iter().map(|(key, name)| (line["left_out"][key].as_u64().unwrap_or(0), *name)).collect();
    let total: u64 = left_out.iter().map(|(n, _)| n).sum();
    let mut text = format!("{} packets captured, {total} left out", line["captured"]);
    if total > 0 {
        let parts: Vec<String> =
            left_out.iter().filter(|(n, _)| *n > 0).map(|(n, name)| format!("{n} {name}")).collect();
        text += &format!(" ({})", parts.join(", "));
    }
    if line["end"] == "segment_removed" {
        text += "; the segment was removed";
    }
    print_error(&(text + "\n"));
    Ok(())
}
