//! What a stage can do with packets.

use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::drops::{DropCounters, DropReason};
use wirepath_pmd::packet::{BATCH, Batch, Packet};
use wirepath_pmd::port::{NO_PORT, PortId, TxQueue};

use crate::epoch::Guard;
use crate::events::{ControlQueues, Learn, Punt};
use crate::mailbox::Mailbox;
use crate::table::Key;

/// Times that a full transmit queue is tried again before its packets are dropped as `tx_full`. Enough for a device that frees
/// descriptors while it is looked at; a queue that is stuck must not stop the others.
const RETRIES: u32 = 16;
/// Packets from which on a batch goes to the device at once instead of being gathered until the end of the turn.
const DIRECT: usize = 16;

/// What a worker did, beside its queues. Written by the worker, read by anybody.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerCounters {
    /// Packets dropped by stages and by the worker.
    pub drops: DropCounters,
    /// Rounds over all queues.
    pub turns: Counter,
    /// Rounds that found nothing.
    pub idle_turns: Counter,
    /// Times that the worker slept.
    pub sleeps: Counter,
    /// Packets handed over to other workers.
    pub handed_over: Counter,
    /// Packets given to the control thread.
    pub punted: Counter,
    /// Learn events sent.
    pub learned: Counter,
    /// Learn events for which there was no room; the address is seen again.
    pub learns_lost: Counter,
    /// Batches sent without touching the packets one by one.
    pub direct: Counter,
    /// Packets that ended here because the kernel has them too, or that were sent into it.
    pub to_kernel: Counter,
}

/// Where packets for a port go.
#[expect(
    clippy::large_enum_variant,
    reason = "one for each port, and nearly all are the large one; a box would cost every send"
)]
pub(crate) enum Output {
    /// The worker's own queue, and what is gathered for it in this turn.
    Own { queue: TxQueue, pending: Batch },
    /// Another worker owns the queue.
    Worker(usize),
    /// There is no such port, or it sends nothing.
    Absent,
}

/// A worker without its receive queues and stages: what a [`Context`] works on.
pub(crate) struct Core {
    pub(crate) index: usize,
    pub(crate) now: u64,
    pub(crate) in_port: Option<PortId>,
    pub(crate) counters: Arc<WorkerCounters>,
    pub(crate) outputs: Box<[Output]>,
    /// Ports with pending packets: bit *n* for port *n* mod 64.
    pub(crate) pending: u64,
    pub(crate) mailboxes: Arc<[Mailbox]>,
    /// Workers whose bell is to be rung at the end of the turn, as `pending`.
    pub(crate) ring: u64,
    pub(crate) control: Arc<ControlQueues>,
    pub(crate) ring_control: bool,
    pub(crate) filter: LearnFilter,
    /// What is sent is kept in `held`, its output port set: for rules at egress.
    pub(crate) holding: bool,
    pub(crate) held: Vec<Packet>,
}

/// Access to a worker's outputs, counters and clock, for the length of one call.
pub struct Context<'a> {
    pub(crate) core: &'a mut Core,
    pub(crate) guard: Guard<'a>,
}

impl<'a> Context<'a> {
    /// Index of this worker, from 0.
    #[inline(always)]
    pub fn worker(&self) -> usize {
        self.core.index
    }

    /// Nanoseconds since the program started, as of the last time that the worker looked at the clock (a few turns ago at most).
    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.core.now
    }

    /// Seconds since the program started: the tick of tables that age.
    #[inline(always)]
    pub fn seconds(&self) -> u32 {
        (self.core.now / 1_000_000_000) as u32
    }

    /// Leave to read shared tables during this call. A copy: it does not borrow the context.
    #[inline(always)]
    pub fn guard(&self) -> Guard<'a> {
        self.guard
    }

    /// Port that the batch was received by; `None` if another worker handed it over.
    #[inline(always)]
    pub fn in_port(&self) -> Option<PortId> {
        self.core.in_port
    }

    /// What this worker counts.
    #[inline(always)]
    pub fn counters(&self) -> &WorkerCounters {
        &self.core.counters
    }

    /// Drops a packet.
    #[inline(always)]
    pub fn drop(&mut self, packet: Packet, reason: DropReason) {
        self.core.counters.drops.add(reason, 1);
        self.core.control.bury(packet, reason);
    }

    /// Drops a whole batch.
    #[inline(always)]
    pub fn drop_batch(&mut self, batch: &mut Batch, reason: DropReason) {
        self.core.counters.drops.add(reason, batch.len() as u64);
        if self.core.control.is_capturing() {
            batch.drain_front(BATCH, |packet| self.core.control.bury(packet, reason));
        }
        batch.clear();
    }

    /// Counts a drop of `n` packets that the caller frees.
    #[inline(always)]
    pub fn count_drops(&mut self, reason: DropReason, n: usize) {
        self.core.counters.drops.add(reason, n as u64);
    }

    /// Sends a packet by a port, at the end of the turn or when a batch is full. Packets sent by one worker to one port keep their
    /// order.
    #[inline]
    pub fn send(&mut self, port: PortId, packet: Packet) {
        self.core.send(port, packet);
    }

    /// Sends a whole batch by one port: the cheapest way out, which touches no packet.
    #[inline]
    pub fn send_batch(&mut self, port: PortId, batch: &mut Batch) {
        self.core.send_batch(port, batch);
    }

    /// Sends each packet by its own output port, as the worker does with what the last stage leaves.
    #[inline]
    pub fn forward(&mut self, batch: &mut Batch) {
        self.core.forward(batch);
    }

    /// Gives a packet to another worker, which takes it through its own stages from the first on. A worker may hand over to itself.
    #[inline]
    pub fn hand_over(&mut self, worker: usize, packet: Packet) {
        self.core.hand_over(worker, packet);
    }

    /// Gives a packet to the control thread; `code` tells it why.
    pub fn punt(&mut self, packet: Packet, code: u32) {
        let core = &mut *self.core;
        match core.control.punts.push(Punt { packet, code, worker: core.index }) {
            Ok(()) => {
                core.counters.punted.add(1);
                core.ring_control = true;
            }
            Err(punt) => {
                core.counters.drops.add(DropReason::QueueFull, 1);
                drop(punt);
            }
        }
    }

    /// Tells the control thread that an address was seen as a source. What was told a moment ago is not told again.
    #[inline]
    pub fn learn(&mut self, key: Key, destination: u32) {
        let core = &mut *self.core;
        if !core.filter.is_new(key, destination, core.now) {
            return;
        }
        match core.control.learns.push(Learn { key, destination }) {
            Ok(()) => {
                core.counters.learned.add(1);
                core.ring_control = true;
            }
            Err(_) => core.counters.learns_lost.add(1),
        }
    }
}

impl Core {
    #[inline(never)]
    fn hold(&mut self, port: PortId, mut packet: Packet) {
        packet.set_out_port(port);
        self.held.push(packet);
    }

    #[inline]
    pub(crate) fn send(&mut self, port: PortId, packet: Packet) {
        if self.holding { self.hold(port, packet) } else { self.transmit(port, packet) }
    }

    /// As [`Self::send`], past the rules of egress.
    #[inline]
    pub(crate) fn transmit(&mut self, port: PortId, packet: Packet) {
        match self.outputs.get_mut(usize::from(port)) {
            Some(Output::Own { queue, pending }) => {
                self.pending |= 1 << (port % 64);
                if let Err(packet) = pending.push(packet) {
                    transmit(queue, pending);
                    // Emptied just now, by sending or by dropping.
                    let _ = pending.push(packet);
                }
            }
            Some(Output::Worker(worker)) => {
                let worker = *worker;
                self.transmit_by(worker, port, packet);
            }
            Some(Output::Absent) | None => {
                self.counters.drops.add(if port == NO_PORT { DropReason::NoStage } else { DropReason::TxError }, 1);
            }
        }
    }

    #[inline]
    pub(crate) fn send_batch(&mut self, port: PortId, batch: &mut Batch) {
        if self.holding {
            return batch.drain_front(BATCH, |packet| self.hold(port, packet));
        }
        match self.outputs.get_mut(usize::from(port)) {
            Some(Output::Own { queue, pending }) => {
                if pending.is_empty() && batch.len() >= DIRECT {
                    queue.transmit(batch);
                    self.counters.direct.add(1);
                    if batch.is_empty() {
                        return;
                    }
                }
                self.pending |= 1 << (port % 64);
                while !batch.is_empty() {
                    if pending.is_full() {
                        transmit(queue, pending);
                    }
                    pending.append(batch);
                }
            }
            _ => batch.drain_front(BATCH, |packet| self.send(port, packet)),
        }
    }

    #[inline]
    pub(crate) fn forward(&mut self, batch: &mut Batch) {
        let Some(first) = batch.as_slice().first() else { return };
        let port = first.out_port();
        // Most batches go one way. No early exit: comparing all of them is cheaper than branching on each.
        let others = batch.iter().fold(0, |others, packet| others | (packet.out_port() ^ port));
        if others == 0 {
            self.send_batch(port, batch);
        } else {
            batch.drain_front(BATCH, |packet| self.send(packet.out_port(), packet));
        }
    }

    fn transmit_by(&mut self, worker: usize, port: PortId, mut packet: Packet) {
        packet.set_out_port(port);
        self.ring |= 1 << (worker % 64);
        match self.mailboxes[worker].transmit.push(packet) {
            Ok(()) => self.counters.handed_over.add(1),
            Err(packet) => {
                self.counters.drops.add(DropReason::QueueFull, 1);
                drop(packet);
            }
        }
    }

    fn hand_over(&mut self, worker: usize, packet: Packet) {
        let pushed = match self.mailboxes.get(worker) {
            Some(mailbox) => mailbox.work.push(packet),
            None => Err(packet),
        };
        match pushed {
            Ok(()) => {
                self.ring |= 1 << (worker % 64);
                self.counters.handed_over.add(1);
            }
            Err(packet) => {
                self.counters.drops.add(DropReason::QueueFull, 1);
                drop(packet);
            }
        }
    }

    /// The end of a turn: sends what was gathered, and wakes whom it concerns.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.pending != 0 {
            self.flush_outputs();
        }
        if self.ring != 0 {
            for (i, mailbox) in self.mailboxes.iter().enumerate() {
                if self.ring & (1 << (i % 64)) != 0 {
                    mailbox.bell.ring();
                }
            }
            self.ring = 0;
        }
        if self.ring_control {
            self.ring_control = false;
            self.control.bell.ring();
        }
    }

    fn flush_outputs(&mut self) {
        for (port, output) in self.outputs.iter_mut().enumerate() {
            if self.pending & (1 << (port % 64)) != 0
                && let Output::Own { queue, pending } = output
            {
                transmit(queue, pending);
            }
        }
        self.pending = 0;
    }

    /// Lets the devices free what they have sent, and start what they have not.
    pub(crate) fn reclaim(&mut self) {
        for output in &mut self.outputs {
            if let Output::Own { queue, .. } = output {
                queue.reclaim();
            }
        }
    }
}

/// Sends the whole batch, or drops what the queue does not take after a few tries.
#[inline]
fn transmit(queue: &mut TxQueue, batch: &mut Batch) {
    queue.transmit(batch);
    if !batch.is_empty() {
        transmit_again(queue, batch);
    }
}

#[cold]
fn transmit_again(queue: &mut TxQueue, batch: &mut Batch) {
    let mut tries = 0;
    while !batch.is_empty() && tries < RETRIES {
        std::hint::spin_loop();
        queue.reclaim();
        tries = if queue.transmit(batch) > 0 { 0 } else { tries + 1 };
    }
    queue.count_drops(DropReason::TxFull, batch.len());
    batch.clear();
}

/// What was reported a moment ago, so that a burst of new packets makes one learn event, not hundreds.
pub(crate) struct LearnFilter {
    recent: Box<[(u64, u32); Self::SIZE]>,
    cleared: u64,
}

impl LearnFilter {
    const SIZE: usize = 256;
    /// Nanoseconds after which an address is reported again: the control thread may have had no room for it.
    const FORGET: u64 = 250_000_000;

    pub(crate) fn new() -> Self {
        Self { recent: Box::new([(u64::MAX, 0); Self::SIZE]), cleared: 0 }
    }

    fn is_new(&mut self, key: Key, destination: u32, now: u64) -> bool {
        if now.wrapping_sub(self.cleared) > Self::FORGET {
            self.recent.fill((u64::MAX, 0));
            self.cleared = now;
        }
        let slot = &mut self.recent[key.hash() as usize % Self::SIZE];
        let this = (key.to_u64(), destination);
        let new = *slot != this;
        *slot = this;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learn_filter_forgets_after_a_while_and_tells_moves_apart() {
        let mut filter = LearnFilter::new();
        let key = Key::new(7, [2, 0, 0, 0, 0, 1]);
        assert!(filter.is_new(key, 1, 0));
        assert!(!filter.is_new(key, 1, 1000));
        assert!(filter.is_new(key, 2, 1000), "moved");
        assert!(filter.is_new(key, 2, LearnFilter::FORGET + 1), "forgotten");
    }
}
