use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::Direction;
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::PortId;
use wirepath_wire::Parser;

use super::program::{DEFAULT_RSS_KEY, tag_into_frame};
use super::{CacheStats, Environment, Hit, Outcome, RuleLookup, Toeplitz};
use crate::context::Context;
use crate::parsed::ParsedBatch;
use crate::stage::Stage;

/// [`crate::Punt::code`] of packets that a rule passes to the kernel's network stack: the control thread hands them on.
pub const PUNT_TO_KERNEL: u32 = 0x6b65_726e;

/// Runs the rules of one direction: first in the chain for those at ingress, last for those at egress (which look at the
/// [`out_port`](Packet::out_port) of what is left in the batch).
///
/// Packets whose headers are wrong are dropped and counted. What becomes of the others:
///
/// | Outcome | |
/// |---|---|
/// | no rule, or one that only changes | stays in the batch |
/// | `drop` | dropped, for its reason |
/// | `redirect` | sent by that port |
/// | `queue`, `rss` | to the worker of that queue of the packet's port ([`Self::queues`]); stays if that is this one, or if nobody has it |
/// | `kernel` | punted with [`PUNT_TO_KERNEL`] |
///
/// What another worker has handed over has met the rules at ingress there. A VLAN tag beside the frame ([`Packet::vlan`]) is written
/// into it first.
#[derive(Debug)]
pub struct RuleStage {
    lookup: RuleLookup,
    direction: Direction,
    parser: Parser,
    parsed: ParsedBatch,
    toeplitz: Toeplitz,
    pool: Option<Pool>,
    queues: Vec<Vec<usize>>,
}

impl RuleStage {
    /// With the default parser.
    pub fn new(lookup: RuleLookup) -> Self {
        Self {
            direction: lookup.direction(),
            lookup,
            parser: Parser::default(),
            parsed: ParsedBatch::new(),
            toeplitz: Toeplitz::new(&DEFAULT_RSS_KEY),
            pool: None,
            queues: Vec::new(),
        }
    }

    /// With another parser: tunnels on other ports, say.
    pub fn parser(mut self, parser: Parser) -> Self {
        self.parser = parser;
        self
    }

    /// With buffers for the copies that `mirror` makes.
    pub fn pool(mut self, pool: Pool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// With the worker of each receive queue, by port and queue.
    pub fn queues(mut self, workers: Vec<Vec<usize>>) -> Self {
        self.queues = workers;
        self
    }

    /// What the cache did.
    pub fn stats(&self) -> CacheStats {
        self.lookup.stats()
    }
}

/// What the programs of a batch's rules work with.
pub(super) struct Surroundings<'a, 'c, 'g> {
    pub(super) context: &'a mut Context<'c>,
    pub(super) pool: Option<&'a Pool>,
    pub(super) toeplitz: &'a Toeplitz,
    pub(super) hit: Hit<'g>,
}

impl Environment for Surroundings<'_, '_, '_> {
    fn now(&self) -> u64 {
        self.context.now()
    }

    fn pool(&self) -> Option<&Pool> {
        self.pool
    }

    fn toeplitz(&self) -> &Toeplitz {
        self.toeplitz
    }

    fn count(&mut self, bytes: usize) {
        self.hit.count(bytes);
    }

    fn mirror(&mut self, port: PortId, copy: Packet) {
        // Copies meet no rule.
        self.context.core.transmit(port, copy);
    }

    fn lost_copy(&mut self, reason: DropReason) {
        self.context.count_drops(reason, 1);
    }
}

impl Stage for RuleStage {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        if batch.is_empty() || (self.direction == Direction::Ingress && context.in_port().is_none()) {
            return;
        }
        let Self { lookup, parser, parsed, toeplitz, pool, queues, .. } = self;
        tags_into_frames(context, batch);
        parsed.parse(parser, context, batch);
        let mut found = [None; BATCH];
        let found = &mut found[..batch.len()];
        lookup.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        if found.iter().all(Option::is_none) {
            return;
        }
        for hit in found.iter().flatten() {
            hit.program().prefetch();
        }
        let mut hits = found.iter();
        parsed.filter_map(batch, |mut packet, parsed| {
            let Some(hit) = hits.next().copied().flatten() else { return Some(packet) };
            let mut surroundings = Surroundings { context, pool: pool.as_ref(), toeplitz, hit };
            match hit.program().run(&mut packet, parsed, &mut surroundings) {
                Outcome::Next => return Some(packet),
                Outcome::Drop(reason) => context.drop(packet, reason),
                Outcome::Redirect(port) => context.send(port, packet),
                Outcome::Kernel => context.punt(packet, PUNT_TO_KERNEL),
                Outcome::Queue(queue) => {
                    let workers = queues.get(usize::from(packet.in_port()));
                    match workers.and_then(|workers| workers.get(usize::from(queue))) {
                        Some(&worker) if worker != context.worker() => context.hand_over(worker, packet),
                        _ => return Some(packet),
                    }
                }
            }
            None
        });
    }
}

/// Rules and the parser see every tag, also one that the device left beside the frame.
#[inline]
pub(super) fn tags_into_frames(context: &mut Context<'_>, batch: &mut Batch) {
    if batch.iter().any(|packet| packet.vlan().is_some()) {
        batch.filter_map(|mut packet| match tag_into_frame(&mut packet) {
            Ok(()) => Some(packet),
            Err(reason) => {
                context.drop(packet, reason);
                None
            }
        });
    }
}
