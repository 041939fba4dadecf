//! The rule engine without ports and workers, for tools that apply rules to single packets.

use wirepath_flow::{Direction, Rule};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool, PortId};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::{Environment, Outcome, RuleId, RuleLimits, RuleLookup, RuleTable, Timeouts, Toeplitz};
use wirepath_wire::{Parser, Tunnels};

use crate::cli::Failure;

/// A set of rules that is applied to one packet after the other.
pub struct RuleEngine {
    table: RuleTable,
    ingress: RuleLookup,
    egress: RuleLookup,
    domain: Domain,
    parser: Parser,
    pool: Pool,
    toeplitz: Toeplitz,
    /// Identifier of each rule in the table, in the order of the list.
    ids: Vec<RuleId>,
}

/// Effect of the rules on one packet.
#[derive(Debug)]
pub struct RuleHit {
    /// Index of the matching rule.
    pub rule: usize,
    /// Destination of the packet.
    pub outcome: Outcome,
    /// Mirrored packets with their output ports.
    pub copies: Vec<(PortId, Packet)>,
    /// Reasons of mirror actions that failed.
    pub mirror_failures: Vec<DropReason>,
}

/// Environment in which rule programs run: it collects the copies of one packet.
struct CopyCollector<'a> {
    now: u64,
    pool: &'a Pool,
    toeplitz: &'a Toeplitz,
    copies: Vec<(PortId, Packet)>,
    mirror_failures: Vec<DropReason>,
}

impl Environment for CopyCollector<'_> {
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

impl RuleEngine {
    /// Creates an engine with these rules. `pool` provides the memory of the packets.
    ///
    /// # Errors
    /// The table cannot take the rules.
    pub fn new<'a>(rules: impl IntoIterator<Item = &'a Rule>, tunnels: Tunnels, pool: Pool) -> Result<Self, Failure> {
        let domain = Domain::new();
        let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
        let mut ids = Vec::new();
        table
            .change(|change| {
                for rule in rules {
                    ids.push(change.add(rule.clone(), Timeouts::NONE)?);
                }
                Ok(())
            })
            .map_err(Failure::failed)?;
        let (ingress, egress) = table.lookups();
        let parser = Parser { tunnels, verify_ipv4: false };
        Ok(Self { table, ingress, egress, domain, parser, pool, toeplitz: Toeplitz::default(), ids })
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// True if there are no rules.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies a frame into a packet. Returns `None` if it is longer than the longest packet.
    pub fn packet(&self, frame: &[u8]) -> Option<Packet> {
        self.pool.take().and_then(|mut packet| packet.extend_from_slice(frame, &self.pool).then_some(packet))
    }

    /// Applies the rules of one direction to a packet. Returns `None` if no rule matches.
    ///
    /// # Errors
    /// The parser drops the packet for the returned reason.
    pub fn apply(
        &mut self,
        packet: &mut Packet,
        direction: Direction,
        now: u64,
    ) -> Result<Option<RuleHit>, DropReason> {
        let parsed = self.parser.parse_chain(packet.data(), packet.len()).map_err(DropReason::from)?;
        let reader = self.domain.join();
        let lookup = if direction == Direction::Ingress { &mut self.ingress } else { &mut self.egress };
        let mut found = [None];
        lookup.find(reader.guard(), now, std::slice::from_ref(packet), &[parsed], &mut found);
        let Some(hit) = found[0] else { return Ok(None) };
        let id = hit.id();
        let mut environment = CopyCollector {
            now,
            pool: &self.pool,
            toeplitz: &self.toeplitz,
            copies: Vec::new(),
            mirror_failures: Vec::new(),
        };
        let outcome = hit.program().run(packet, &parsed, &mut environment);
        let CopyCollector { copies, mirror_failures, .. } = environment;
        let rule = self.ids.iter().position(|known| *known == id).unwrap_or(0);
        Ok(Some(RuleHit { rule, outcome, copies, mirror_failures }))
    }
}

/// Returns the frame of a packet as bytes, with the VLAN tag of the metadata inserted.
pub fn frame_bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes: Vec<u8> = packet.segments().flatten().copied().collect();
    if let Some(tci) = packet.vlan().filter(|_| bytes.len() >= 12) {
        let service = packet.flags().contains(wirepath_packet::offload::Flags::VLAN_SERVICE);
        let [a, b] = if service { [0x88, 0xa8] } else { [0x81, 0x00] };
        bytes.splice(12..12, [a, b, (tci >> 8) as u8, tci as u8]);
    }
    bytes
}
