//! Rules around the stages of a program.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::ToKernel;
use wirepath_wire::{Parsed, Parser};

use super::stage::{PUNT_TO_KERNEL, Surroundings, tags_into_frames};
use super::{Hit, Outcome, RuleLookup, Toeplitz};
use crate::context::Context;
use crate::parsed::ParsedBatch;
use crate::stage::Stage;
use crate::sync::{AtomicBool, Ordering};

/// What every worker's [`Ruled`] stage knows of the ports.
#[derive(Debug)]
pub(super) struct Shared {
    /// How packets get to the kernel, for each port: a [`Way`]. It is certain only when the port runs.
    pub(super) to_kernel: Box<[AtomicU8]>,
    /// Where copies for a mirror are made.
    pub(super) pools: Box<[Pool]>,
    /// Worker of each receive queue, by port and queue.
    pub(super) workers: Vec<Vec<usize>>,
    /// What is taken for a tunnel.
    pub(super) parser: Parser,
    /// Whether there may be rules of a direction; without, nothing is parsed. Raised before the change that brings the first rule,
    /// lowered when no worker can meet the last one any more: else a packet could meet the new rules of one direction and the old ones
    /// of the other.
    pub(super) ingress: AtomicBool,
    pub(super) egress: AtomicBool,
}

/// Numbers of [`Shared::to_kernel`].
pub(super) struct Way;

impl Way {
    const NONE: u8 = 0;
    const BESIDE: u8 = 1;
    const BACK: u8 = 2;
    const INJECT: u8 = 3;

    pub(super) fn number(to_kernel: ToKernel) -> u8 {
        match to_kernel {
            ToKernel::Beside => Self::BESIDE,
            ToKernel::Back => Self::BACK,
            ToKernel::InFront => Self::INJECT,
            ToKernel::No(_) | ToKernel::InFrontOnly(_) => Self::NONE,
        }
    }
}

/// Flow rules around a stage: what came in by a port meets the rules of ingress, what is left goes through the stage, and what that
/// sends meets the rules of egress.
///
/// - While there are rules of a direction, packets whose headers are wrong are dropped there with the reason: nobody could say which
///   rule they fit. (IPv4 header checksums are not looked at.)
/// - A packet that a rule gives to a queue of another worker goes on there, behind the rules of ingress.
/// - What a rule redirects at ingress meets the rules of egress of its new port. Copies of a mirror meet no rule.
/// - What the control thread sends (answers to ARP, say) meets no rule.
#[derive(Debug)]
pub struct Ruled<S> {
    stage: S,
    ingress: RuleLookup,
    egress: RuleLookup,
    parsed: ParsedBatch,
    toeplitz: Toeplitz,
    around: Arc<Shared>,
    worker: usize,
}

impl<S> Ruled<S> {
    pub(super) fn new(
        stage: S,
        (ingress, egress): (RuleLookup, RuleLookup),
        around: Arc<Shared>,
        worker: usize,
    ) -> Self {
        Self { stage, ingress, egress, parsed: ParsedBatch::new(), toeplitz: Toeplitz::default(), around, worker }
    }

    /// The stage inside.
    pub fn inner(&mut self) -> &mut S {
        &mut self.stage
    }
}

impl<S: Stage> Stage for Ruled<S> {
    #[inline]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        // The version first: whoever sees the rules of a change sees the flags that were raised before it.
        self.ingress.pin(context.guard());
        let egress = self.around.egress.load(Ordering::Relaxed);
        context.core.holding = egress;
        if context.in_port().is_some() && self.around.ingress.load(Ordering::Relaxed) {
            self.at_ingress(context, batch);
        }
        if !batch.is_empty() {
            self.stage.process(context, batch);
        }
        if egress {
            // What the stage left leaves by its output port.
            context.forward(batch);
            context.core.holding = false;
            self.at_egress(context);
        }
    }
}

impl<S> Ruled<S> {
    fn at_ingress(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let Self { ingress, parsed, toeplitz, around, worker, .. } = self;
        tags_into_frames(context, batch);
        parsed.parse(&around.parser, context, batch);
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..batch.len()];
        ingress.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        if found.iter().all(Option::is_none) {
            return;
        }
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let i = at;
            at += 1;
            let Some(hit) = found[i] else { return Some(packet) };
            let pool = around.pools.get(usize::from(packet.in_port()));
            let outcome = run(context, &mut packet, &parsed.as_slice()[i], pool, toeplitz, hit);
            match outcome {
                Outcome::Next => return Some(packet),
                Outcome::Drop(reason) => context.drop(packet, reason),
                Outcome::Redirect(port) => context.send(port, packet),
                Outcome::Kernel => to_kernel(context, around, packet),
                Outcome::Queue(queue) => {
                    let queues = around.workers.get(usize::from(packet.in_port()));
                    // Of a queue that is not there, the packet stays here: such rules are refused.
                    let to = queues.and_then(|queues| queues.get(usize::from(queue))).unwrap_or(worker);
                    if to == worker {
                        return Some(packet);
                    }
                    context.hand_over(*to, packet);
                }
            }
            None
        });
    }

    fn at_egress(&mut self, context: &mut Context<'_>) {
        let mut held = std::mem::take(&mut context.core.held);
        let mut batch = Batch::new();
        let mut packets = held.drain(..).peekable();
        while packets.peek().is_some() {
            while !batch.is_full()
                && let Some(packet) = packets.next()
            {
                // There is room.
                let _ = batch.push(packet);
            }
            self.leave(context, &mut batch);
        }
        drop(packets);
        // Its memory is kept.
        context.core.held = held;
    }

    /// A batch of packets that leave by their output ports.
    fn leave(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let Self { egress, parsed, toeplitz, around, .. } = self;
        tags_into_frames(context, batch);
        parsed.parse(&around.parser, context, batch);
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..batch.len()];
        egress.find(context.guard(), context.now(), batch.as_slice(), parsed.as_slice(), found);
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let i = at;
            at += 1;
            let Some(hit) = found[i] else { return Some(packet) };
            let pool = around.pools.get(usize::from(packet.out_port()));
            match run(context, &mut packet, &parsed.as_slice()[i], pool, toeplitz, hit) {
                // Queues are of receiving; rules of egress have none.
                Outcome::Next | Outcome::Queue(_) => return Some(packet),
                Outcome::Drop(reason) => context.drop(packet, reason),
                Outcome::Redirect(port) => {
                    packet.set_out_port(port);
                    return Some(packet);
                }
                Outcome::Kernel => to_kernel(context, around, packet),
            }
            None
        });
        context.forward(batch);
    }
}

#[inline]
fn run(
    context: &mut Context<'_>,
    packet: &mut Packet,
    parsed: &Parsed,
    pool: Option<&Pool>,
    toeplitz: &Toeplitz,
    hit: Hit<'_>,
) -> Outcome {
    hit.program().run(packet, parsed, &mut Surroundings { context, pool, toeplitz, hit })
}

#[cold]
fn to_kernel(context: &mut Context<'_>, around: &Shared, packet: Packet) {
    let way = around.to_kernel.get(usize::from(packet.in_port()));
    match way.map_or(Way::NONE, |way| way.load(Ordering::Relaxed)) {
        Way::BESIDE => context.core.counters.to_kernel.add(1),
        Way::BACK => {
            context.core.counters.to_kernel.add(1);
            context.core.transmit(packet.in_port(), packet);
        }
        Way::INJECT => context.punt(packet, PUNT_TO_KERNEL),
        _ => context.drop(packet, DropReason::NoKernel),
    }
}
