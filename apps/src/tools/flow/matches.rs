//! `wirepath flow match`: applies rules to the packets of a capture file.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};
use wirepath_flow::Direction;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::{Environment, Outcome, RuleId, RuleLimits, RuleLookup, RuleTable, Timeouts, Toeplitz};
use wirepath_pmd::drivers::r#virtual::pcap::{FileError, Format, MAX_FRAME, Precision, Reader, Writer};
use wirepath_wire::{Parser, Tunnels};

use super::MatchArguments;
use super::check::report_errors;
use super::input::{self, Input, Program};
use crate::cli::{Failure, Table, print, print_json};
use crate::l2fwd::Mode;
use crate::rules::Entry;

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
                "rule": result.rule.map(|rule| replay.rule_index(rule)),
                "egress_rule": result.egress_rule.map(|rule| replay.rule_index(rule)),
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
    rule: Option<RuleId>,
    egress_rule: Option<RuleId>,
    /// Effects of the rules as text, separated by semicolons.
    outcome: String,
    outputs: Vec<OutputPacket>,
}

/// The rule engine without ports, for packets of a capture.
struct RuleReplay {
    table: RuleTable,
    ingress: RuleLookup,
    egress: RuleLookup,
    domain: Domain,
    parser: Parser,
    pool: Pool,
    toeplitz: Toeplitz,
    /// Rules in the order of the input.
    entries: Vec<Entry>,
    /// Identifier of each rule of `entries` in the table.
    ids: Vec<RuleId>,
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

/// Environment in which rule programs run: it collects the copies of one packet.
struct MatchEnvironment<'a> {
    now: u64,
    pool: &'a Pool,
    toeplitz: &'a Toeplitz,
    /// Mirrored packets with their output ports.
    copies: Vec<(PortId, Packet)>,
    /// Reasons of mirror actions that failed.
    mirror_failures: Vec<DropReason>,
}

impl Environment for MatchEnvironment<'_> {
    fn now(&self) -> u64 {
        self.now
    }

    fn pool(&self) -> Option<&Pool> {
        Some(self.pool)
    }

    fn toeplitz(&self) -> &Toeplitz {
        self.toeplitz
    }

    fn count(&mut self, _: usize) {}

    fn mirror(&mut self, port: PortId, copy: Packet) {
        self.copies.push((port, copy));
    }

    fn mirror_failed(&mut self, reason: DropReason) {
        self.mirror_failures.push(reason);
    }
}

impl RuleReplay {
    fn new(input: &Input, arguments: &MatchArguments) -> Result<Self, Failure> {
        let domain = Domain::new();
        let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
        let mut ids = Vec::with_capacity(input.entries.len());
        table
            .change(|change| {
                for entry in &input.entries {
                    ids.push(change.add(entry.rule.clone(), Timeouts::NONE)?);
                }
                Ok(())
            })
            .map_err(Failure::failed)?;
        let (ingress, egress) = table.lookups();
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
            Some(Program::L2fwd(config)) => {
                if let Mode::Pairs { peers: known, .. } = &config.mode {
                    peers.clone_from(known);
                }
            }
            Some(Program::Gateway(setup)) => tunnels = tunnels.with_vxlan(Some(setup.gateway.underlay.udp_port)),
            None => {}
        }
        let parser = Parser { tunnels, verify_ipv4: false };
        let counts = vec![(0, 0); ids.len()];
        let pool = Pool::new("capture", 1024)?;
        Ok(Self {
            table,
            ingress,
            egress,
            domain,
            parser,
            pool,
            toeplitz: Toeplitz::default(),
            entries: input.entries.clone(),
            ids,
            port_names: names,
            port,
            direction,
            peers,
            counts,
            unmatched: 0,
        })
    }

    /// Returns the index of a rule in the rule list.
    fn rule_index(&self, id: RuleId) -> usize {
        self.ids.iter().position(|known| *known == id).unwrap_or(0)
    }

    fn port_name(&self, port: PortId) -> String {
        self.port_names.get(port.index()).cloned().unwrap_or_else(|| port.to_string())
    }

    /// Returns the rule for the comment of an output packet.
    fn rule_suffix(&self, rule: Option<RuleId>) -> String {
        rule.map_or_else(String::new, |rule| format!(", rule {}", self.rule_index(rule)))
    }

    /// Returns the matched rules for a line of the output.
    fn matched_rules_text(&self, result: &MatchResult) -> String {
        match (result.rule, result.egress_rule) {
            (None, None) => "no rule".to_owned(),
            (Some(one), None) | (None, Some(one)) => format!("rule {}", self.rule_index(one)),
            (Some(a), Some(b)) => format!("rules {}, {}", self.rule_index(a), self.rule_index(b)),
        }
    }

    /// Applies the ingress rules, then the egress rules of the output port, to a frame.
    fn run_packet(&mut self, frame: &[u8], now: u64) -> MatchResult {
        let mut result = MatchResult { rule: None, egress_rule: None, outcome: String::new(), outputs: Vec::new() };
        let mut effects = Vec::new();
        let packet =
            self.pool.take().and_then(|mut packet| packet.extend_from_slice(frame, &self.pool).then_some(packet));
        let Some(mut packet) = packet else {
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
    ) -> (Option<RuleId>, bool) {
        let parsed = match self.parser.parse_chain(packet.data(), packet.len()) {
            Ok(parsed) => parsed,
            Err(error) => {
                effects.push(drop_text(DropReason::from(error)));
                return (None, false);
            }
        };
        let reader = self.domain.join();
        let lookup = if direction == Direction::Ingress { &mut self.ingress } else { &mut self.egress };
        let mut found = [None];
        lookup.find(reader.guard(), now, std::slice::from_ref(packet), &[parsed], &mut found);
        let Some(hit) = found[0] else { return (None, true) };
        let id = hit.id();
        let length = packet.len() as u64;
        let mut environment = MatchEnvironment {
            now,
            pool: &self.pool,
            toeplitz: &self.toeplitz,
            copies: Vec::new(),
            mirror_failures: Vec::new(),
        };
        let before = frame_bytes(packet);
        let outcome = hit.program().run(packet, &parsed, &mut environment);
        let MatchEnvironment { copies, mirror_failures, .. } = environment;
        let index = self.rule_index(id);
        self.counts[index].0 += 1;
        self.counts[index].1 += length;
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
            Outcome::Next => return (Some(id), true),
            Outcome::Redirect(port) => {
                *out = Some(port);
                return (Some(id), true);
            }
            Outcome::Drop(reason) => {
                effects.push(drop_text(reason));
                return (Some(id), false);
            }
            Outcome::Queue(queue) => {
                effects.push(format!("queue {queue}"));
                return (Some(id), true);
            }
            Outcome::Kernel => "to the kernel".to_owned(),
        };
        effects.push(destination.clone());
        outputs.push(OutputPacket { destination, bytes: after });
        (Some(id), false)
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
        debug_assert_eq!(self.table.len(), self.entries.len());
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

/// Returns the frame as bytes, with the VLAN tag of the metadata inserted.
fn frame_bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes: Vec<u8> = packet.segments().flatten().copied().collect();
    if let Some(tci) = packet.vlan().filter(|_| bytes.len() >= 12) {
        bytes.splice(12..12, [0x81, 0x00, (tci >> 8) as u8, tci as u8]);
    }
    bytes
}
