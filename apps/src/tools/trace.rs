//! `wirepath trace`: the way of live packets through a running program.

use std::fmt::Write;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use wirepath::cli::{self, Failure, Stop, print, print_error, print_json};
use wirepath::control_socket::SocketArgument;

/// Shows the way of received packets through a running program
///
/// For each packet: its receipt and what the device reported, the rule that it matched, and what each stage consulted.
/// Then each change of its headers, and its ends: sent, dropped with the reason, or passed on.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// End after this number of packets [default: 10]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Trace packets that this port receives only
    #[arg(long, value_name = "PORT")]
    port: Option<String>,

    /// Trace packets that match this pattern at receipt only, as in the text of a flow rule
    #[arg(long = "rule", value_name = "PATTERN")]
    pattern: Option<String>,

    /// End after this time
    #[arg(long, value_name = "N", value_parser = cli::seconds)]
    seconds: Option<Duration>,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
With --json: an object for each packet, in a line of its own.

A traced packet takes its usual way, in a batch of its own. Other packets keep their order.

Examples:
  wirepath trace                                 # the next ten packets
  wirepath trace --port lan0 --rule 'ipv4 dst 10.1.0.101' -n 1
  wirepath trace --rule 'udp dst 4789 / vxlan vni 42' --seconds 10 --json";

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or refuses.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let mut request = json!({ "request": "trace" });
    if let Some(count) = options.count {
        request["count"] = count.into();
    }
    for (key, value) in [("port", &options.port), ("pattern", &options.pattern)] {
        if let Some(value) = value {
            request[key] = value.as_str().into();
        }
    }
    if let Some(seconds) = options.seconds {
        request["seconds"] = seconds.as_secs_f64().into();
    }
    let stop = Stop::on_signals()?;
    let mut client = options.socket.connect()?;
    client.subscribe(&request)?;
    let mut number = 0;
    while let Some(line) = client.next_line(&stop)? {
        let trace = &line["trace"];
        if trace.is_object() {
            number += 1;
            if json { print_json(trace)? } else { print(text(number, trace))? }
        }
        if line["more"] != true {
            let left_out = line["left_out"].as_u64().unwrap_or(0);
            if left_out > 0 {
                print_error(&format!("{left_out} packets were not traced, because there were too many at a time\n"));
            }
            break;
        }
    }
    Ok(())
}

/// Returns a trace as text.
fn text(number: u32, trace: &Value) -> String {
    let seconds = trace["time"].as_f64().unwrap_or(0.0);
    let entries = |key: &str| trace[key].as_array().cloned().unwrap_or_default();
    let str_of = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let mut out = format!("packet {number}, received at {seconds:.6}\n");
    let mut line = |stage: &str, text: &str| {
        // A string takes every write.
        let _ = writeln!(out, "  {stage:10} {text}");
    };
    for step in entries("steps") {
        line(&str_of(&step["stage"]), &str_of(&step["text"]));
    }
    let ends = entries("ends");
    for end in &ends {
        let count = match end["packets"].as_u64() {
            Some(n) if n > 1 => format!(" ({n} packets)"),
            _ => String::new(),
        };
        let text = match end["end"].as_str().unwrap_or_default() {
            "sent" => format!("sent by port {} queue {}{count}", str_of(&end["port"]), end["queue"]),
            "dropped" => format!("dropped as {}: {}{count}", str_of(&end["reason"]), str_of(&end["about"])),
            "punted" => "passed to the control thread; the trace ends here".to_owned(),
            "handed_over" => format!("passed to worker {}; the trace ends here", end["worker"]),
            "sent_by_worker" => format!(
                "passed to worker {}, which sends it by port {}; the trace ends here",
                end["worker"],
                str_of(&end["port"])
            ),
            "kernel" => "passed to the kernel".to_owned(),
            other => other.to_owned(),
        };
        line("end", &text);
    }
    if ends.is_empty() {
        line("end", "a stage keeps the packet, or has freed it without a report");
    }
    if trace["truncated"] == true {
        line("", "reports are missing, because there were too many");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_a_text() {
        let trace = json!({
            "time": 1.5,
            "steps": [{ "stage": "receive", "text": "port lan0" }],
            "ends": [
                { "end": "sent", "port": "wan", "queue": 0, "packets": 2 },
                { "end": "dropped", "reason": "no_buffer", "about": "none", "packets": 1 },
            ],
            "truncated": false,
        });
        let expected = "packet 3, received at 1.500000\n  receive    port lan0\n  end        sent by port wan queue 0 \
                        (2 packets)\n  end        dropped as no_buffer: none\n";
        assert_eq!(text(3, &trace), expected);
    }
}
