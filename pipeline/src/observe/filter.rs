//! Selection of packets by the pattern of a flow rule.

use std::sync::Mutex;

use wirepath_flow::{Direction, Ports, Rule, TextError};
use wirepath_packet::{BATCH, Packet};
use wirepath_wire::{Parsed, Parser};

use crate::epoch::{Domain, Reader};
use crate::rules::{RuleLimits, RuleLookup, RuleTable, RuleTableError, Timeouts};

/// Flows that the cache of a filter remembers for each thread.
const FLOWS: usize = 1024;

/// The pattern of a flow rule, without direction and actions.
#[derive(Clone, Debug)]
pub struct Pattern {
    ingress: Rule,
    egress: Rule,
}

impl Pattern {
    /// Parses a pattern such as `ipv4 src 10.0.0.1 / udp`, with these names of ports.
    ///
    /// # Errors
    /// If the text is no pattern.
    pub fn parse(text: &str, ports: Ports<'_>) -> Result<Self, TextError> {
        Ok(Self {
            ingress: Rule::of_pattern(Direction::Ingress, text, ports)?,
            egress: Rule::of_pattern(Direction::Egress, text, ports)?,
        })
    }
}

/// Finds the packets that match a pattern, for one thread. The rule engine does the work.
#[derive(Debug)]
pub(super) struct Filter {
    parser: Parser,
    reader: Reader,
    ingress: RuleLookup,
    egress: RuleLookup,
    parsed: Box<[Parsed; BATCH]>,
}

impl Filter {
    /// Returns a bit for each packet that matches. `direction` says whether the item `port` is compared with the input
    /// port or with the output port. A packet with malformed headers matches no pattern.
    pub(super) fn matches(&mut self, direction: Direction, now: u64, packets: &[Packet]) -> u64 {
        let Self { parser, reader, ingress, egress, parsed } = self;
        let mut malformed = 0u64;
        for (i, (packet, parsed)) in packets.iter().zip(parsed.iter_mut()).enumerate() {
            *parsed = parser.parse_chain(packet.data(), packet.len()).unwrap_or_else(|_| {
                malformed |= 1 << i;
                Parsed::default()
            });
        }
        let lookup = if direction == Direction::Ingress { ingress } else { egress };
        let mut found = [None; BATCH];
        let found = &mut found[..packets.len()];
        lookup.find(reader.guard(), now, packets, &parsed[..packets.len()], found);
        let matching = found.iter().enumerate().filter(|(_, hit)| hit.is_some());
        matching.fold(0, |mask, (i, _)| mask | 1 << i) & !malformed
    }
}

/// The filters of all threads of a program, until the threads take them.
#[derive(Debug)]
pub(super) struct Filters {
    of_threads: Box<[Mutex<Option<Filter>>]>,
    /// Holds the rules.
    _table: Option<Mutex<RuleTable>>,
}

impl Filters {
    /// Creates filters for `threads` threads; none if there is no pattern.
    pub(super) fn new(pattern: Option<&Pattern>, parser: Parser, threads: usize) -> Result<Self, RuleTableError> {
        let Some(pattern) = pattern else { return Ok(Self { of_threads: Box::new([]), _table: None }) };
        let domain = Domain::new();
        let limits = RuleLimits { rules: 2, masks: 2, duplicates: 1, pending_removals: 16, flows: FLOWS };
        let mut table = RuleTable::new(&domain, limits, 0);
        table.add(pattern.ingress.clone(), Timeouts::NONE)?;
        table.add(pattern.egress.clone(), Timeouts::NONE)?;
        let mut filter = || {
            let (ingress, egress) = table.lookups();
            let (reader, parser) = (domain.join(), Parser { verify_ipv4: false, ..parser });
            Filter { parser, reader, ingress, egress, parsed: Box::new([Parsed::default(); BATCH]) }
        };
        let of_threads = (0..threads).map(|_| Mutex::new(Some(filter()))).collect();
        Ok(Self { of_threads, _table: Some(Mutex::new(table)) })
    }

    /// Takes the filter of a thread. Never waits.
    pub(super) fn take(&self, thread: usize) -> Option<Filter> {
        self.of_threads.get(thread)?.try_lock().ok()?.take()
    }

    /// Returns the filter of a thread, so that the control thread frees it.
    pub(super) fn put_back(&self, thread: usize, filter: Option<Filter>) {
        if let Some(mut slot) = self.of_threads.get(thread).and_then(|slot| slot.try_lock().ok()) {
            *slot = filter;
        }
    }

    /// Returns true if every packet is selected.
    pub(super) fn is_empty(&self) -> bool {
        self.of_threads.is_empty()
    }
}
