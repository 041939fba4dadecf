use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::{Environment, Outcome, RuleId, RuleLimits, RuleLookup, RuleTable, Timeouts, Toeplitz};
use wirepath_pmd::drivers::pcap::{FileError, Format, MAX_FRAME, Precision, Reader, Writer};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::Direction;
use wirepath_pmd::packet::{Packet, Pool};
use wirepath_pmd::port::PortId;
use wirepath_wire::{Parser, Tunnels};

use super::MatchArguments;
use super::check::complain;
use super::input::{self, Input, Program};
use crate::cli::{Failure, Table, print, print_json};
use crate::l2fwd::Mode;
use crate::rules::Entry;

pub(super) fn run(arguments: &MatchArguments, json: bool) -> Result<(), Failure> {
    let input = input::read(&arguments.config.input())?;
    complain(&input)?;
    let mut bench = Bench::new(&input, arguments)?;
    let failed = |error: FileError| Failure::failed(format!("{}: {error}", arguments.pcap.display()));
    let file = File::open(&arguments.pcap)
        .map_err(|error| Failure::usage(format!("{}: {error}", arguments.pcap.display())))?;
    let mut reader = Reader::new(file).map_err(failed)?;
    let mut out = arguments.write.as_deref().map(create).transpose()?;
    let (mut packets, mut text) = (Vec::new(), String::new());
    let mut number = 0u64;
    while let Some(record) = reader.next().map_err(failed)? {
        number += 1;
        let (time, told) = (record.timestamp, bench.pass(record.data, record.timestamp));
        if let Some(out) = &mut out {
            for leaving in &told.leaving {
                let comment = format!("packet {number}{}: {}", bench.rule_text(told.rule), leaving.how);
                let bytes = &leaving.bytes;
                out.write_with(time, std::iter::once(&bytes[..]), bytes.len(), &comment).map_err(Failure::failed)?;
            }
        }
        if json {
            packets.push(json!({
                "packet": number,
                "rule": told.rule.map(|rule| bench.index(rule)),
                "egress_rule": told.egress_rule.map(|rule| bench.index(rule)),
                "outcome": told.words,
            }));
        } else if !arguments.summary {
            text += &format!("{number:>6}  {:<9} {}\n", bench.rules_word(&told), told.words);
            if text.len() > 1 << 16 {
                print(std::mem::take(&mut text))?;
            }
        }
    }
    if let Some(out) = &mut out {
        out.flush().map_err(Failure::failed)?;
    }
    if json {
        return print_json(&json!({ "packets": packets, "rules": bench.rules_json(), "unmatched": bench.unmatched }));
    }
    print(format_args!("{text}{}", bench.report(number)))
}

fn create(path: &Path) -> Result<Writer<File>, Failure> {
    let failed = |error| Failure::failed(format!("{}: {error}", path.display()));
    let classic = path.extension().is_some_and(|suffix| suffix == "pcap");
    let format = if classic { Format::Pcap } else { Format::Pcapng };
    let file = File::create(path).map_err(failed)?;
    Writer::new(file, format, Precision::Nano, MAX_FRAME as u32, "wirepath flow match").map_err(failed)
}

/// A packet that goes somewhere.
struct Leaving {
    how: String,
    bytes: Vec<u8>,
}

/// What became of a packet.
struct Told {
    rule: Option<RuleId>,
    egress_rule: Option<RuleId>,
    words: String,
    leaving: Vec<Leaving>,
}

/// The engine without ports.
struct Bench {
    table: RuleTable,
    ingress: RuleLookup,
    egress: RuleLookup,
    domain: Domain,
    parser: Parser,
    pool: Pool,
    toeplitz: Toeplitz,
    entries: Vec<Entry>,
    ids: Vec<RuleId>,
    names: Vec<String>,
    /// Where the packets come in, or go out if only rules of egress are asked.
    port: PortId,
    direction: Direction,
    /// Ports that packets go on to, where the program says that.
    peers: Vec<PortId>,
    /// Of each rule: packets, bytes.
    counts: Vec<(u64, u64)>,
    unmatched: u64,
}

/// Where programs of rules run here.
struct Surroundings<'a> {
    now: u64,
    pool: &'a Pool,
    toeplitz: &'a Toeplitz,
    copies: Vec<(PortId, Packet)>,
    lost: Vec<DropReason>,
}

impl Environment for Surroundings<'_> {
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

    fn lost_copy(&mut self, reason: DropReason) {
        self.lost.push(reason);
    }
}

impl Bench {
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
        let names: Vec<String> = input.origin.ports.iter().map(|(name, _)| name.clone()).collect();
        let number = |name: &String| {
            let known = names.iter().position(|known| known == name).or_else(|| name.parse().ok());
            known.and_then(|n| PortId::try_from(n).ok()).ok_or_else(|| {
                Failure::usage(match names.is_empty() {
                    true => format!("found \"{name}\", expected the number of a port: rules alone give ports no names"),
                    false => format!("there is no port \"{name}\"; the ports are {}", names.join(", ")),
                })
            })
        };
        let (direction, port) = match (&arguments.port, &arguments.out) {
            (_, Some(name)) => (Direction::Egress, number(name)?),
            (Some(name), None) => (Direction::Ingress, number(name)?),
            (None, None) => (Direction::Ingress, 0),
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
            names,
            port,
            direction,
            peers,
            counts,
            unmatched: 0,
        })
    }

    fn index(&self, id: RuleId) -> usize {
        self.ids.iter().position(|known| *known == id).unwrap_or(0)
    }

    fn name(&self, port: PortId) -> String {
        self.names.get(usize::from(port)).cloned().unwrap_or_else(|| port.to_string())
    }

    fn rule_text(&self, rule: Option<RuleId>) -> String {
        rule.map_or_else(String::new, |rule| format!(", rule {}", self.index(rule)))
    }

    fn rules_word(&self, told: &Told) -> String {
        match (told.rule, told.egress_rule) {
            (None, None) => "no rule".to_owned(),
            (Some(one), None) | (None, Some(one)) => format!("rule {}", self.index(one)),
            (Some(a), Some(b)) => format!("rules {}, {}", self.index(a), self.index(b)),
        }
    }

    /// Takes a frame through the rules.
    fn pass(&mut self, frame: &[u8], now: u64) -> Told {
        let mut told = Told { rule: None, egress_rule: None, words: String::new(), leaving: Vec::new() };
        let mut words = Vec::new();
        let packet =
            self.pool.take().and_then(|mut packet| packet.extend_from_slice(frame, &self.pool).then_some(packet));
        let Some(mut packet) = packet else {
            told.words = "not looked at: longer than a packet can be".to_owned();
            return told;
        };
        packet.set_in_port(self.port);
        let mut out = self.peers.get(usize::from(self.port)).copied();
        let mut on = true;
        if self.direction == Direction::Ingress {
            (told.rule, on) = self.ask(&mut packet, &mut out, Direction::Ingress, now, &mut words, &mut told.leaving);
        } else {
            out = Some(self.port);
        }
        if let (true, Some(port)) = (on, out) {
            packet.set_out_port(port);
            (told.egress_rule, on) =
                self.ask(&mut packet, &mut out, Direction::Egress, now, &mut words, &mut told.leaving);
        }
        if on {
            let how = match out {
                Some(port) => format!("out of port {}", self.name(port)),
                None => "goes on".to_owned(),
            };
            words.push(how.clone());
            told.leaving.push(Leaving { how, bytes: bytes(&packet) });
        }
        self.unmatched += u64::from(told.rule.is_none() && told.egress_rule.is_none());
        told.words = words.join("; ");
        told
    }

    /// The rules of one direction. Which one it was, and whether the packet goes on.
    fn ask(
        &mut self,
        packet: &mut Packet,
        out: &mut Option<PortId>,
        direction: Direction,
        now: u64,
        words: &mut Vec<String>,
        leaving: &mut Vec<Leaving>,
    ) -> (Option<RuleId>, bool) {
        let parsed = match self.parser.parse_chain(packet.data(), packet.len()) {
            Ok(parsed) => parsed,
            Err(error) => {
                words.push(drop_words(DropReason::from(error)));
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
        let mut around =
            Surroundings { now, pool: &self.pool, toeplitz: &self.toeplitz, copies: Vec::new(), lost: Vec::new() };
        let before = bytes(packet);
        let outcome = hit.program().run(packet, &parsed, &mut around);
        let Surroundings { copies, lost, .. } = around;
        let place = self.index(id);
        self.counts[place].0 += 1;
        self.counts[place].1 += length;
        for (port, copy) in copies {
            let how = format!("copy out of port {}", self.name(port));
            words.push(how.clone());
            leaving.push(Leaving { how, bytes: bytes(&copy) });
        }
        words.extend(lost.into_iter().map(|reason| format!("copy lost: {}", reason.text())));
        let after = bytes(packet);
        if after != before && !matches!(outcome, Outcome::Drop(_)) {
            words.push(match after.len() as i64 - before.len() as i64 {
                0 => "rewritten".to_owned(),
                n if n > 0 => format!("rewritten, {n} bytes longer"),
                n => format!("rewritten, {} bytes shorter", -n),
            });
        }
        if let Some(mark) = packet.mark() {
            words.push(format!("mark {mark}"));
        }
        let how = match outcome {
            Outcome::Next => return (Some(id), true),
            Outcome::Redirect(port) => {
                *out = Some(port);
                return (Some(id), true);
            }
            Outcome::Drop(reason) => {
                words.push(drop_words(reason));
                return (Some(id), false);
            }
            Outcome::Queue(queue) => {
                words.push(format!("queue {queue}"));
                return (Some(id), true);
            }
            Outcome::Kernel => "to the kernel".to_owned(),
        };
        words.push(how.clone());
        leaving.push(Leaving { how, bytes: after });
        (Some(id), false)
    }

    fn report(&self, packets: u64) -> String {
        let mut table = Table::new(["RULE", "LINE", "PACKETS", "BYTES", ""]);
        for (i, (entry, (packets, bytes))) in self.entries.iter().zip(&self.counts).enumerate() {
            let line = entry.place.position().0.to_string();
            table.row([i.to_string(), line, packets.to_string(), bytes.to_string(), entry.rule.to_string()]);
        }
        format!("{packets} packets; {} fit no rule\n{table}", self.unmatched)
    }

    fn rules_json(&self) -> Vec<Value> {
        debug_assert_eq!(self.table.len(), self.entries.len());
        let one = |(entry, (packets, bytes)): (&Entry, &(u64, u64))| {
            json!({
                "rule": entry.rule.to_string(),
                "line": entry.place.position().0,
                "packets": packets,
                "bytes": bytes,
            })
        };
        self.entries.iter().zip(&self.counts).map(one).collect()
    }
}

fn drop_words(reason: DropReason) -> String {
    format!("dropped ({}): {}", reason.name(), reason.text())
}

fn bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes: Vec<u8> = packet.segments().flatten().copied().collect();
    if let Some(tci) = packet.vlan().filter(|_| bytes.len() >= 12) {
        bytes.splice(12..12, [0x81, 0x00, (tci >> 8) as u8, tci as u8]);
    }
    bytes
}
