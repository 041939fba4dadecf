//! `wirepath flow match`: applies rules to the packets of a capture file.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};
use wirepath_flow::Direction;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool, PortId};
use wirepath_pipeline::rules::Outcome;
use wirepath_pmd::drivers::r#virtual::pcap::{FileError, Format, MAX_FRAME, Precision, Reader, Writer};
use wirepath_wire::Tunnels;

use super::MatchArguments;
use super::check::report_errors;
use super::input::{self, Input, Program};
use crate::l2fwd::Mode;
use wirepath::cli::{Failure, Table, print, print_json};
use wirepath::rules::Entry;
use wirepath::rules::engine::{RuleEngine, RuleHit, frame_bytes};

pub(super) fn run(arguments: &MatchArguments, json: bool) -> Result<(), Failure> {
    let input = input::read(&arguments.config.input())?;
    report_errors(&input)?;
    let mut replay = RuleReplay::new(&input, arguments)?;
    let failed = |error: FileError| Failure::failed(format!("{}: {error}", arguments.pcap.display()));
    let file = File::open(&arguments.pcap)
        .map_err(|error| Failure::usage(format!("{}: {error}", arguments.pcap.display())))?;
    let mut reader = Reader::new(file).map_err(failed)?;
    let mut out = arguments.write.as_deref().map(create_capture).transpose()?;
    let (mut packets, mut text) = (Vec::new(), String::new());
    let mut number = 0u64;
    while let Some(record) = reader.next().map_err(failed)? {
        number += 1;
        let (time, result) = (record.timestamp, replay.run_packet(record.data, record.timestamp));
        if let Some(out) = &mut out {
            for output in &result.outputs {
                let comment = format!("packet {number}{}: {}", replay.rule_suffix(result.rule), output.destination);
                let bytes = &output.bytes;
                out.write_with_comment(time, std::iter::once(&bytes[..]), bytes.len(), &comment)
                    .map_err(Failure::failed)?;
            }
        }
        if json {
            packets.push(json!({
                "packet": number,
                "rule": result.rule,
                "egress_rule": result.egress_rule,
                "outcome": result.outcome,
            }));
        } else if !arguments.summary {
            text += &format!("{number:>6}  {:<9} {}\n", replay.matched_rules_text(&result), result.outcome);
            if text.len() > 1 << 16 {
                print(std::mem::take(&mut text))?;
            }
        }
    }
    if let Some(out) = &mut out {
        out.flush().map_err(Failure::failed)?;
    }
    if json {
        return print_json(&json!({ "packets": packets, "rules": replay.rules_json(), "unmatched": replay.unmatched }));
    }
    print(format_args!("{text}{}", replay.report(number)))
}

/// Creates the capture file for output packets: pcap if the name ends with `.pcap`, else pcapng.
fn create_capture(path: &Path) -> Result<Writer<File>, Failure> {
    let failed = |error| Failure::failed(format!("{}: {error}", path.display()));
    let classic = path.extension().is_some_and(|suffix| suffix == "pcap");
    let format = if classic { Format::Pcap } else { Format::Pcapng };
    let file = File::create(path).map_err(failed)?;
    Writer::new(file, format, Precision::Nano, MAX_FRAME as u32, "wirepath flow match").map_err(failed)
}

/// A packet that the rules send, copy or pass on, for the output capture.
struct OutputPacket {
    /// Destination as text, such as `out of port a`.
    destination: String,
    bytes: Vec<u8>,
}

/// Result of the rules for one packet.
struct MatchResult {
    /// Index of the matching ingress rule.
    rule: Option<usize>,
    /// Index of the matching egress rule.
    egress_rule: Option<usize>,
    /// Effects of the rules as text, separated by semicolons.
    outcome: String,
    outputs: Vec<OutputPacket>,
}

/// Applies the rules of an input to the packets of a capture.
struct RuleReplay {
    engine: RuleEngine,
    /// Rules in the order of the input.
    entries: Vec<Entry>,
    /// Names of the ports.
    port_names: Vec<String>,
    /// Input port of the packets, or their output port if only egress rules are evaluated.
    port: PortId,
    direction: Direction,
    /// Output port for each input port, if the program defines it.
    peers: Vec<PortId>,
    /// Packets and bytes of each rule.
    counts: Vec<(u64, u64)>,
    /// Number of packets that match no rule.
    unmatched: u64,
}

impl RuleReplay {
    fn new(input: &Input, arguments: &MatchArguments) -> Result<Self, Failure> {
        let names: Vec<String> = input.ports.ports.iter().map(|(name, _)| name.clone()).collect();
        let number = |name: &String| {
            let known = names.iter().position(|known| known == name).or_else(|| name.parse().ok());
            known.and_then(PortId::checked).ok_or_else(|| {
                Failure::usage(match names.is_empty() {
                    true => format!("found \"{name}\", expected the number of a port: a rule file does not name ports"),
                    false => format!("there is no port \"{name}\"; the ports are {}", names.join(", ")),
                })
            })
        };
        let (direction, port) = match (&arguments.port, &arguments.out) {
            (_, Some(name)) => (Direction::Egress, number(name)?),
            (Some(name), None) => (Direction::Ingress, number(name)?),
            (None, None) => (Direction::Ingress, PortId::new(0)),
        };
        let (mut peers, mut tunnels) = (Vec::new(), Tunnels::default());
        match &input.program {
            Some(Program::L2fwd(program)) => {
                if let Mode::Pairs { peers: known, .. } = &program.1 {
                    peers.clone_from(known);
                }
            }
            Some(Program::Gateway(setup)) => tunnels = setup.gateway.underlay.rule_tunnels(),
            None => {}
        }
        let engine =
            RuleEngine::new(input.entries.iter().map(|entry| &entry.rule), tunnels, Pool::new("capture", 1024)?)?;
        let counts = vec![(0, 0); engine.len()];
        let entries = input.entries.clone();
        Ok(Self { engine, entries, port_names: names, port, direction, peers, counts, unmatched: 0 })
    }

    fn port_name(&self, port: PortId) -> String {
        self.port_names.get(port.index()).cloned().unwrap_or_else(|| port.to_string())
    }

    /// Returns the rule for the comment of an output packet.
    fn rule_suffix(&self, rule: Option<usize>) -> String {
        rule.map_or_else(String::new, |rule| format!(", rule {rule}"))
    }

    /// Returns the matched rules for a line of the output.
    fn matched_rules_text(&self, result: &MatchResult) -> String {
        match (result.rule, result.egress_rule) {
            (None, None) => "no rule".to_owned(),
            (Some(one), None) | (None, Some(one)) => format!("rule {one}"),
            (Some(a), Some(b)) => format!("rules {a}, {b}"),
        }
    }

    /// Applies the ingress rules, then the egress rules of the output port, to a frame.
    fn run_packet(&mut self, frame: &[u8], now: u64) -> MatchResult {
        let mut result = MatchResult { rule: None, egress_rule: None, outcome: String::new(), outputs: Vec::new() };
        let mut effects = Vec::new();
        let Some(mut packet) = self.engine.packet(frame) else {
            result.outcome = "not evaluated: longer than the maximum packet".to_owned();
            return result;
        };
        packet.set_in_port(self.port);
        let mut out = self.peers.get(self.port.index()).copied();
        let mut continues = true;
        if self.direction == Direction::Ingress {
            (result.rule, continues) =
                self.apply_rules(&mut packet, &mut out, Direction::Ingress, now, &mut effects, &mut result.outputs);
        } else {
            out = Some(self.port);
        }
        if let (true, Some(port)) = (continues, out) {
            packet.set_out_port(port);
            (result.egress_rule, continues) =
                self.apply_rules(&mut packet, &mut out, Direction::Egress, now, &mut effects, &mut result.outputs);
        }
        if continues {
            let destination = match out {
                Some(port) => format!("out of port {}", self.port_name(port)),
                None => "continues to the program".to_owned(),
            };
            effects.push(destination.clone());
            result.outputs.push(OutputPacket { destination, bytes: frame_bytes(&packet) });
        }
        self.unmatched += u64::from(result.rule.is_none() && result.egress_rule.is_none());
        result.outcome = effects.join("; ");
        result
    }

    /// Applies the rules of one direction. Returns the matching rule and whether the packet continues.
    fn apply_rules(
        &mut self,
        packet: &mut Packet,
        out: &mut Option<PortId>,
        direction: Direction,
        now: u64,
        effects: &mut Vec<String>,
        outputs: &mut Vec<OutputPacket>,
    ) -> (Option<usize>, bool) {
        let (before, length) = (frame_bytes(packet), packet.len() as u64);
        let hit = match self.engine.apply(packet, direction, now) {
            Ok(Some(hit)) => hit,
            Ok(None) => return (None, true),
            Err(reason) => {
                effects.push(drop_text(reason));
                return (None, false);
            }
        };
        let RuleHit { rule, outcome, copies, mirror_failures } = hit;
        self.counts[rule].0 += 1;
        self.counts[rule].1 += length;
        for (port, copy) in copies {
            let destination = format!("copy out of port {}", self.port_name(port));
            effects.push(destination.clone());
            outputs.push(OutputPacket { destination, bytes: frame_bytes(&copy) });
        }
        effects.extend(mirror_failures.into_iter().map(|reason| format!("copy lost: {}", reason.text())));
        let after = frame_bytes(packet);
        if after != before && !matches!(outcome, Outcome::Drop(_)) {
            effects.push(match after.len() as i64 - before.len() as i64 {
                0 => "rewritten".to_owned(),
                n if n > 0 => format!("rewritten, {n} bytes longer"),
                n => format!("rewritten, {} bytes shorter", -n),
            });
        }
        if let Some(mark) = packet.mark() {
            effects.push(format!("mark {mark}"));
        }
        let destination = match outcome {
            Outcome::Next => return (Some(rule), true),
            Outcome::Redirect(port) => {
                *out = Some(port);
                return (Some(rule), true);
            }
            Outcome::Drop(reason) => {
                effects.push(drop_text(reason));
                return (Some(rule), false);
            }
            Outcome::Queue(queue) => {
                effects.push(format!("queue {queue}"));
                return (Some(rule), true);
            }
            Outcome::Kernel => "to the kernel".to_owned(),
        };
        effects.push(destination.clone());
        outputs.push(OutputPacket { destination, bytes: after });
        (Some(rule), false)
    }

    fn report(&self, packets: u64) -> String {
        let mut table = Table::new(["RULE", "LINE", "PACKETS", "BYTES", ""]);
        for (i, (entry, (packets, bytes))) in self.entries.iter().zip(&self.counts).enumerate() {
            let line = entry.span.position().0.to_string();
            table.row([i.to_string(), line, packets.to_string(), bytes.to_string(), entry.rule.to_string()]);
        }
        format!("{packets} packets; {} match no rule\n{table}", self.unmatched)
    }

    fn rules_json(&self) -> Vec<Value> {
        debug_assert_eq!(self.engine.len(), self.entries.len());
        let one = |(entry, (packets, bytes)): (&Entry, &(u64, u64))| {
            json!({
                "rule": entry.rule.to_string(),
                "line": entry.span.position().0,
                "packets": packets,
                "bytes": bytes,
            })
        };
        self.entries.iter().zip(&self.counts).map(one).collect()
    }
}

fn drop_text(reason: DropReason) -> String {
    format!("dropped ({}): {}", reason.name(), reason.text())
}
