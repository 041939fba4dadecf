//! The context of a stage: sending, dropping and punting packets.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use wirepath_packet::PortId;
use wirepath_packet::counters::Counter;
use wirepath_packet::drops::{DropCounters, DropReason};
use wirepath_packet::{BATCH, Batch, Packet};
use wirepath_pmd::port::TxQueue;
use wirepath_wire::{Parsed, Parser};

use crate::clock::ticks;
use crate::counter::{CounterId, CounterValues};
use crate::epoch::Guard;
use crate::events::{ControlQueues, Learn, Punt};
use crate::mailbox::Mailbox;
use crate::measure::Recording;
use crate::observe::{Tap, TraceEnd, TraceText};
use crate::parsed::parse_packet;
use crate::table::Key;

/// Attempts to transmit on a full queue before its packets are dropped as `tx_full`. Each attempt also
/// reclaims completed descriptors. A stuck queue must not stop the other ports.
pub(crate) const TX_RETRIES: u32 = 16;
/// Minimum batch length that is sent to the device at once instead of being collected until the end of the
/// turn.
const MIN_DIRECT_BATCH: usize = 16;

/// Counters of one worker, except those of its queues. The worker writes them; any thread may read them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerCounters {
    /// Packets dropped by stages and by the worker.
    pub drops: DropCounters,
    /// Iterations over all queues.
    pub turns: Counter,
    /// Iterations that found no packets.
    pub idle_turns: Counter,
    /// Packets that the receive queues and other threads passed to the worker.
    pub packets: Counter,
    /// Cycles of the time-stamp counter in iterations that found packets ([`crate::measure`]).
    pub busy_cycles: Counter,
    /// Cycles in iterations that found none.
    pub idle_cycles: Counter,
    /// Cycles during sleep.
    pub sleep_cycles: Counter,
    /// Number of times that the worker slept.
    pub sleeps: Counter,
    /// Packets handed over to other workers.
    pub handed_over: Counter,
    /// Packets passed to the control thread.
    pub punted: Counter,
    /// Learn events sent.
    pub learned: Counter,
    /// Learn events dropped because the queue was full. The next packet from the same address repeats the
    /// event.
    pub learns_lost: Counter,
    /// Batches sent as a whole, without touching individual packets.
    pub direct: Counter,
    /// Packets that a rule passed to the kernel.
    pub to_kernel: Counter,
    /// Packets in [`Self::to_kernel`] that also left through a transmit queue, because their port returns them
    /// to the kernel in that way.
    pub looped_back: Counter,
    /// Copies of packets: replicated and mirrored ones. The original is not a copy.
    pub copies: Counter,
    /// Fragments that a stage has joined to packets or holds for that. The packets are [`Self::generated`].
    pub joined: Counter,
    /// Packets that a stage made itself, such as ICMP errors.
    pub generated: Counter,
    /// Counters of the application.
    pub application: CounterValues,
}

/// Destination of the packets for one port.
#[expect(
    clippy::large_enum_variant,
    reason = "one for each port, and nearly all are the large one; a box would cost every send"
)]
pub(crate) enum Output {
    /// The worker's own transmit queue and the packets collected for it in this turn.
    Own { queue: TxQueue, pending: Batch },
    /// Index of the worker that owns the transmit queue.
    Worker(usize),
    /// The port cannot transmit.
    Absent,
    /// The port does not exist any more.
    Removed,
}

/// State of a worker without its receive queues and stages. A [`Context`] operates on it.
pub(crate) struct WorkerState {
    pub(crate) index: usize,
    pub(crate) now: u64,
    pub(crate) in_port: Option<PortId>,
    pub(crate) counters: Arc<WorkerCounters>,
    pub(crate) outputs: Vec<Output>,
    /// Ports with pending packets: bit *n* stands for all ports with number *n* modulo 64.
    pub(crate) pending: u64,
    pub(crate) mailboxes: Arc<[Mailbox]>,
    /// Workers to notify at the end of the turn, as a bit mask like `pending`.
    pub(crate) notify_workers: u64,
    pub(crate) control: Arc<ControlQueues>,
    pub(crate) notify_control: bool,
    pub(crate) filter: LearnFilter,
    /// If true, packets that are sent go to `egress_packets` with their output port set, where egress rules
    /// process them.
    pub(crate) collect_egress: bool,
    pub(crate) egress_packets: Vec<Packet>,
    /// Captures and traces.
    pub(crate) tap: Tap,
    /// The recording that the worker fills, while an operator wants one.
    pub(crate) recording: Option<Box<Recording>>,
}

/// Access to a worker's outputs, counters and clock during one stage call.
pub struct Context<'a> {
    pub(crate) state: &'a mut WorkerState,
    pub(crate) guard: Guard<'a>,
}

impl<'a> Context<'a> {
    /// Index of this worker, from 0.
    #[inline(always)]
    pub fn worker(&self) -> usize {
        self.state.index
    }

    /// Nanoseconds since the program started. The worker updates this value every few turns.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.state.now
    }

    /// Seconds since the program started. Tables use this as their ageing tick.
    #[inline(always)]
    pub fn seconds(&self) -> u32 {
        (self.state.now / 1_000_000_000) as u32
    }

    /// Returns the guard for reading shared tables during this call. The guard is a copy and does not borrow
    /// the context.
    #[inline(always)]
    pub fn guard(&self) -> Guard<'a> {
        self.guard
    }

    /// Port that received the batch; `None` if another worker handed it over.
    #[inline(always)]
    pub fn in_port(&self) -> Option<PortId> {
        self.state.in_port
    }

    /// This worker's counters.
    #[inline(always)]
    pub fn counters(&self) -> &WorkerCounters {
        &self.state.counters
    }

    /// Ends a part of a stage: the cycles since the end of the part before are displayed under this name
    /// (`wirepath perf`). Without a measurement it does nothing. [`Stage::name`](crate::Stage::name) covers the rest of
    /// the stage.
    #[inline(always)]
    pub fn end_part(&mut self, name: &'static str) {
        self.state.end_part(|| name);
    }

    /// Drops a packet.
    #[inline(always)]
    pub fn drop(&mut self, packet: Packet, reason: DropReason) {
        self.state.counters.drops.add(reason, 1);
        self.state.discard(packet, reason);
    }

    /// Drops a whole batch.
    #[inline(always)]
    pub fn drop_batch(&mut self, batch: &mut Batch, reason: DropReason) {
        self.state.counters.drops.add(reason, batch.len() as u64);
        if self.state.tap.wants_dropped() {
            batch.drain_front(BATCH, |packet| self.state.discard(packet, reason));
        }
        batch.clear();
    }

    /// Counts a drop of `n` packets that the caller frees.
    #[inline(always)]
    pub fn count_drops(&mut self, reason: DropReason, n: usize) {
        self.state.counters.drops.add(reason, n as u64);
        if self.state.tap.wants_dropped() {
            self.state.tap.dropped_without_packet(reason, n);
        }
    }

    /// Returns true if the packet of the present batch is traced ([`crate::observe`]). The batch then has no other
    /// packet.
    #[inline(always)]
    pub fn is_tracing(&self) -> bool {
        self.state.tap.is_tracing()
    }

    /// Returns true if the stages have to report each packet, so that their fast paths leave it to slower ones: it is
    /// traced, or a capture wants the frames of a segment.
    #[inline(always)]
    pub(crate) fn is_watched(&self) -> bool {
        self.state.tap.wants_slow_path()
    }

    /// Shows a frame that enters a segment to the captures that want it.
    pub(crate) fn entered_segment(&mut self, packet: &Packet, segment: u16) {
        if self.is_watched() {
            let now = self.now();
            self.state.tap.entered_segment(packet, segment, now);
        }
    }

    /// Adds a report of a stage to the trace of a packet. If the packet is not traced, `write` is not called.
    ///
    /// ```
    /// # use std::fmt::Write;
    /// # use wirepath_pipeline::{Context, Stage};
    /// # use wirepath_packet::{Batch, drops::DropReason};
    /// fn at_most(bytes: usize) -> impl Stage {
    ///     move |context: &mut Context<'_>, batch: &mut Batch| {
    ///         batch.filter_map(|packet| {
    ///             context.trace("at_most", |text| write!(text, "{} of {bytes} bytes", packet.len()));
    ///             if packet.len() <= bytes {
    ///                 return Some(packet);
    ///             }
    ///             context.drop(packet, DropReason::TooLong);
    ///             None
    ///         });
    ///     }
    /// }
    /// ```
    ///
    /// A stage that processes a batch in several passes tests [`Self::is_tracing`] once for each batch, and reports in
    /// a slower path. The ends of the packet and changes of its headers need no report.
    #[inline(always)]
    pub fn trace(&mut self, stage: &'static str, write: impl FnOnce(&mut TraceText<'_>) -> fmt::Result) {
        if self.is_tracing() {
            self.state.tap.trace(stage, write);
        }
    }

    /// Ends a stage for those who observe: its cycles, and its changes of the traced packet of this batch.
    #[inline(always)]
    pub(crate) fn end_stage(&mut self, stage: impl FnOnce() -> &'static str, batch: &Batch) {
        if self.state.is_observed() {
            self.report_stage(stage(), batch);
        }
    }

    #[cold]
    #[inline(never)]
    fn report_stage(&mut self, stage: &'static str, batch: &Batch) {
        self.state.end_part(|| stage);
        if self.is_tracing() {
            batch.iter().for_each(|packet| self.state.tap.trace_packet(stage, packet));
        }
    }

    /// Returns the name of a port, for reports.
    #[cold]
    pub fn port_name(&self, port: PortId) -> Arc<str> {
        self.state.tap.port_name(port)
    }

    /// Parses each packet and passes it with its headers to `decide`, which returns the packet to keep it in the batch.
    /// Packets with invalid headers are dropped and counted. Headers that lie in several segments are moved into the
    /// first one. Nothing is allocated, so a plain function can parse:
    ///
    /// ```
    /// use wirepath_pipeline::Context;
    /// use wirepath_packet::{Batch, drops::DropReason};
    /// use wirepath_wire::L4Type;
    ///
    /// /// Lets nothing but UDP pass.
    /// fn udp_only(context: &mut Context<'_>, batch: &mut Batch) {
    ///     context.parse_each(batch, |context, packet, headers| {
    ///         if headers.outer().l4_type() == L4Type::Udp {
    ///             return Some(packet);
    ///         }
    ///         context.drop(packet, DropReason::RuleDrop);
    ///         None
    ///     });
    /// }
    /// ```
    ///
    /// A stage that passes over a batch several times keeps the headers in a [`ParsedBatch`](crate::ParsedBatch).
    #[inline]
    pub fn parse_each(&mut self, batch: &mut Batch, decide: impl FnMut(&mut Self, Packet, &Parsed) -> Option<Packet>) {
        self.parse_each_with(&Parser::default(), batch, decide);
    }

    /// Does the same as [`Self::parse_each`] with the settings of a parser: UDP ports of tunnels, checksums.
    #[inline]
    pub fn parse_each_with(
        &mut self,
        parser: &Parser,
        batch: &mut Batch,
        mut decide: impl FnMut(&mut Self, Packet, &Parsed) -> Option<Packet>,
    ) {
        batch.prefetch_data();
        batch.filter_map(|mut packet| match parser.parse_chain(packet.data(), packet.len()) {
            Ok(parsed) => decide(self, packet, &parsed),
            Err(_) => match parse_packet(parser, &mut packet) {
                Ok(parsed) => decide(self, packet, &parsed),
                Err(error) => {
                    self.drop(packet, DropReason::from(error));
                    None
                }
            },
        });
    }

    /// Queues a packet for a port. The packet is sent at the end of the turn or when a batch is full. Packets
    /// that one worker sends to one port keep their order.
    #[inline]
    pub fn send(&mut self, port: PortId, packet: Packet) {
        self.state.send(port, packet);
    }

    /// Sends a whole batch to one port without touching the packets. This is the cheapest way to send.
    #[inline]
    pub fn send_batch(&mut self, port: PortId, batch: &mut Batch) {
        self.state.send_batch(port, batch);
    }

    /// Sends each packet to its own output port. The worker does the same with the packets that remain after
    /// the last stage.
    #[inline]
    pub fn forward(&mut self, batch: &mut Batch) {
        self.state.forward(batch);
    }

    /// Sends a packet to its output port.
    pub(crate) fn send_by_out_port(&mut self, packet: Packet) {
        self.state.send_by_out_port(packet);
    }

    /// Hands a packet to another worker, whose first stage then receives it. A worker may hand a packet to
    /// itself.
    #[inline]
    pub fn enqueue_to_worker(&mut self, worker: usize, packet: Packet) {
        self.state.enqueue_to_worker(worker, packet);
    }

    /// Adds `n` to a counter of the application.
    #[inline(always)]
    pub fn count(&mut self, counter: CounterId, n: u64) {
        self.state.counters.application.add(counter, n);
    }

    /// Counts `n` copies of a packet, made in addition to the original. Call this also for copies that find no
    /// buffer and whose drop is counted.
    #[inline(always)]
    pub fn count_copies(&mut self, n: usize) {
        self.state.counters.copies.add(n as u64);
    }

    /// Counts a packet that the stage made itself.
    #[inline(always)]
    pub fn count_generated(&mut self) {
        self.state.counters.generated.add(1);
    }

    /// Counts a fragment whose data the stage holds or has joined to a packet. The packet counts as generated, and so
    /// do fragments that are dropped later.
    pub(crate) fn count_joined(&mut self) {
        self.state.counters.joined.add(1);
    }

    /// Passes a packet to the control thread. `code` states the reason.
    pub fn punt(&mut self, packet: Packet, code: u32) {
        self.punt_to(|queues| &queues.punts, packet, code);
    }

    /// Passes a packet to the control thread like [`Self::punt`], but before all packets that were punted
    /// without priority.
    pub fn punt_first(&mut self, packet: Packet, code: u32) {
        self.punt_to(|queues| &queues.priority_punts, packet, code);
    }

    #[inline]
    fn punt_to(&mut self, queue: impl Fn(&ControlQueues) -> &ArrayQueue<Punt>, packet: Packet, code: u32) {
        let state = &mut *self.state;
        match queue(&state.control).push(Punt { packet, code, worker: state.index }) {
            Ok(()) => {
                state.counters.punted.add(1);
                state.notify_control = true;
                if state.tap.is_tracing() {
                    state.tap.end(TraceEnd::Punted { code });
                }
            }
            Err(punt) => {
                state.counters.drops.add(DropReason::QueueFull, 1);
                state.discard(punt.packet, DropReason::QueueFull);
            }
        }
    }

    /// Reports a source address to the control thread. Recently reported addresses are not reported again.
    #[inline]
    pub fn learn(&mut self, key: Key, destination: u32) {
        let state = &mut *self.state;
        if state.tap.is_tracing() {
            let (segment, mac) = (key.segment(), key.mac());
            state.tap.trace("learn", |text| write!(text, "source {mac} of segment {segment} is new here or has moved"));
        }
        if !state.filter.is_new(key, destination, state.now) {
            return;
        }
        match state.control.learns.push(Learn { key, destination }) {
            Ok(()) => {
                state.counters.learned.add(1);
                state.notify_control = true;
            }
            Err(_) => state.counters.learns_lost.add(1),
        }
    }
}

impl WorkerState {
    /// Creates the state of the worker `index` at the time `now`.
    pub(crate) fn new(
        index: usize,
        now: u64,
        outputs: Vec<Output>,
        mailboxes: Arc<[Mailbox]>,
        control: Arc<ControlQueues>,
        tap: Tap,
    ) -> Self {
        Self {
            index,
            now,
            in_port: None,
            counters: Arc::default(),
            outputs,
            pending: 0,
            mailboxes,
            notify_workers: 0,
            control,
            notify_control: false,
            filter: LearnFilter::new(),
            collect_egress: false,
            egress_packets: Vec::new(),
            tap,
            recording: None,
        }
    }

    /// Returns true if packets are captured or traced, or cycles recorded. All of that is off the fast paths, which
    /// test this once for each batch.
    #[inline(always)]
    pub(crate) fn is_observed(&self) -> bool {
        self.tap.is_active() | self.recording.is_some()
    }

    /// Attributes the cycles since the last call to a stage, if a recording is made.
    #[inline(always)]
    pub(crate) fn end_part(&mut self, name: impl FnOnce() -> &'static str) {
        if self.recording.is_some() {
            self.record_part(name());
        }
    }

    #[cold]
    #[inline(never)]
    fn record_part(&mut self, name: &'static str) {
        // A stage that is made of others has recorded them already.
        if let Some(recording) = &mut self.recording
            && !name.is_empty()
        {
            recording.lap(name);
        }
    }

    #[inline(never)]
    fn collect_for_egress(&mut self, port: PortId, mut packet: Packet) {
        packet.set_out_port(port);
        self.egress_packets.push(packet);
    }

    #[inline]
    pub(crate) fn send(&mut self, port: PortId, packet: Packet) {
        if self.collect_egress { self.collect_for_egress(port, packet) } else { self.transmit(port, packet) }
    }

    /// Sends a packet like [`Self::send`], but bypasses the egress rules.
    #[inline]
    pub(crate) fn transmit(&mut self, port: PortId, packet: Packet) {
        if self.tap.is_tracing() {
            self.tap.trace_sent(port, &packet);
        }
        match self.outputs.get_mut(port.index()) {
            Some(Output::Own { queue, pending }) => {
                self.pending |= 1 << (port.index() % 64);
                if let Err(packet) = pending.push(packet) {
                    transmit(queue, pending, &mut self.tap, &mut self.recording, self.now);
                    // The batch was just emptied, by sending or by dropping.
                    let _ = pending.push(packet);
                }
            }
            Some(Output::Worker(worker)) => {
                let worker = *worker;
                self.transmit_via_worker(worker, port, packet);
            }
            other => {
                let removed = matches!(other, Some(Output::Removed));
                let reason = if removed { DropReason::DeviceLost } else { DropReason::TxError };
                self.counters.drops.add(reason, 1);
                self.discard(packet, reason);
            }
        }
    }

    #[inline]
    pub(crate) fn send_batch(&mut self, port: PortId, batch: &mut Batch) {
        if self.collect_egress | self.is_observed() {
            return self.send_batch_slowly(port, batch);
        }
        match self.outputs.get_mut(port.index()) {
            Some(Output::Own { queue, pending }) => {
                if pending.is_empty() && batch.len() >= MIN_DIRECT_BATCH {
                    queue.transmit(batch);
                    self.counters.direct.add(1);
                    if batch.is_empty() {
                        return;
                    }
                }
                self.pending |= 1 << (port.index() % 64);
                while !batch.is_empty() {
                    if pending.is_full() {
                        transmit(queue, pending, &mut self.tap, &mut self.recording, self.now);
                    }
                    pending.append(batch);
                }
            }
            _ => batch.drain_front(BATCH, |packet| self.send(port, packet)),
        }
    }

    /// Sends a batch to egress rules, or to a port while the program is observed.
    #[inline(never)]
    fn send_batch_slowly(&mut self, port: PortId, batch: &mut Batch) {
        if self.collect_egress {
            return batch.drain_front(BATCH, |packet| self.collect_for_egress(port, packet));
        }
        if self.tap.is_tracing() {
            return batch.drain_front(BATCH, |packet| self.transmit(port, packet));
        }
        if let Some(Output::Own { queue, pending }) = self.outputs.get_mut(port.index())
            && pending.is_empty()
            && batch.len() >= MIN_DIRECT_BATCH
        {
            if self.tap.wants_sent() {
                self.tap.try_transmit(queue, batch, self.now);
            } else {
                transmit_once(queue, batch, &mut self.recording);
            }
            self.counters.direct.add(1);
        }
        batch.drain_front(BATCH, |packet| self.transmit(port, packet));
    }

    #[inline]
    pub(crate) fn forward(&mut self, batch: &mut Batch) {
        let Some(first) = batch.as_slice().first() else { return };
        let port = first.out_port();
        // Most batches have one output port. Comparing all packets is cheaper than an early exit with a
        // branch per packet.
        let others = batch.iter().fold(false, |others, packet| others | (packet.out_port() != port));
        match port {
            Some(port) if !others => self.send_batch(port, batch),
            _ => batch.drain_front(BATCH, |packet| self.send_by_out_port(packet)),
        }
    }

    /// Sends a packet by the output port in its metadata; drops a packet without one.
    #[inline]
    pub(crate) fn send_by_out_port(&mut self, packet: Packet) {
        match packet.out_port() {
            Some(port) => self.send(port, packet),
            None => {
                self.counters.drops.add(DropReason::NoOutputPort, 1);
                self.discard(packet, DropReason::NoOutputPort);
            }
        }
    }

    fn transmit_via_worker(&mut self, worker: usize, port: PortId, mut packet: Packet) {
        packet.set_out_port(port);
        self.notify_workers |= 1 << (worker % 64);
        match self.mailboxes[worker].transmit.push(packet) {
            Ok(()) => {
                self.counters.handed_over.add(1);
                if self.tap.is_tracing() {
                    self.tap.end(TraceEnd::SentByWorker { worker, port });
                }
            }
            Err(packet) => {
                self.counters.drops.add(DropReason::QueueFull, 1);
                self.discard(packet, DropReason::QueueFull);
            }
        }
    }

    fn enqueue_to_worker(&mut self, worker: usize, packet: Packet) {
        let pushed = match self.mailboxes.get(worker) {
            Some(mailbox) => mailbox.work.push(packet),
            None => Err(packet),
        };
        match pushed {
            Ok(()) => {
                self.notify_workers |= 1 << (worker % 64);
                self.counters.handed_over.add(1);
                if self.tap.is_tracing() {
                    self.tap.end(TraceEnd::HandedOver { worker });
                }
            }
            Err(packet) => {
                self.counters.drops.add(DropReason::QueueFull, 1);
                self.discard(packet, DropReason::QueueFull);
            }
        }
    }

    /// Ends the turn: sends the pending batches and notifies the workers and the control thread that got
    /// work.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.pending != 0 {
            self.flush_outputs();
        }
        if self.notify_workers != 0 {
            for (i, mailbox) in self.mailboxes.iter().enumerate() {
                if self.notify_workers & (1 << (i % 64)) != 0 {
                    mailbox.notifier.notify();
                }
            }
            self.notify_workers = 0;
        }
        if self.notify_control {
            self.notify_control = false;
            self.control.notifier.notify();
        }
    }

    fn flush_outputs(&mut self) {
        for (port, output) in self.outputs.iter_mut().enumerate() {
            if self.pending & (1 << (port % 64)) != 0
                && let Output::Own { queue, pending } = output
            {
                transmit(queue, pending, &mut self.tap, &mut self.recording, self.now);
            }
        }
        self.pending = 0;
    }

    /// Installs the output of a port. `room` is an empty list with room for all outputs up to that one.
    pub(crate) fn set_output(&mut self, port: PortId, output: Output, mut room: Vec<Output>) {
        if let Some(place) = self.outputs.get_mut(port.index()) {
            *place = output;
            return;
        }
        room.append(&mut self.outputs);
        room.resize_with(port.index(), || Output::Removed);
        room.push(output);
        self.outputs = room;
    }

    /// Takes the transmit queue of a removed port. Its pending packets are sent before. Packets that come later are
    /// dropped.
    pub(crate) fn take_output(&mut self, port: PortId) -> Option<TxQueue> {
        let output = std::mem::replace(self.outputs.get_mut(port.index())?, Output::Removed);
        let Output::Own { mut queue, mut pending } = output else { return None };
        if !pending.is_empty() {
            transmit(&mut queue, &mut pending, &mut self.tap, &mut self.recording, self.now);
        }
        Some(queue)
    }

    /// Gives the transmit queues of lost devices back, and takes those of returned devices.
    pub(crate) fn sync_outputs(&mut self) {
        for output in &mut self.outputs {
            if let Output::Own { queue, .. } = output {
                queue.sync();
            }
        }
    }

    /// Copies the fill of the transmit queues to their counters.
    pub(crate) fn sample_outputs(&self) {
        for output in &self.outputs {
            if let Output::Own { queue, .. } = output {
                queue.sample();
            }
        }
    }

    /// Returns true if a device still holds packets. Some devices need calls to send them.
    pub(crate) fn is_sending(&self) -> bool {
        let holds = |output: &Output| matches!(output, Output::Own { queue, .. } if queue.in_flight() > Some(0));
        self.outputs.iter().any(holds)
    }

    /// Lets the devices free completed packets and start transmissions that are still queued.
    pub(crate) fn reclaim(&mut self) {
        for output in &mut self.outputs {
            if let Output::Own { queue, .. } = output {
                queue.reclaim();
            }
        }
    }
}

/// Sends the whole batch. Drops what the queue does not accept after [`TX_RETRIES`] attempts.
#[inline]
fn transmit(queue: &mut TxQueue, batch: &mut Batch, tap: &mut Tap, recording: &mut Option<Box<Recording>>, now: u64) {
    if tap.is_active() | recording.is_some() {
        return transmit_observed(queue, batch, tap, recording, now);
    }
    queue.transmit(batch);
    if !batch.is_empty() {
        retry_transmit(queue, batch, recording);
    }
}

#[cold]
#[inline(never)]
fn transmit_observed(
    queue: &mut TxQueue,
    batch: &mut Batch,
    tap: &mut Tap,
    recording: &mut Option<Box<Recording>>,
    now: u64,
) {
    if tap.wants_transmit() {
        return tap.transmit(queue, batch, now);
    }
    transmit_once(queue, batch, recording);
    if !batch.is_empty() {
        retry_transmit(queue, batch, recording);
    }
}

/// Sends packets from the front of the batch, as many as the queue accepts.
fn transmit_once(queue: &mut TxQueue, batch: &mut Batch, recording: &mut Option<Box<Recording>>) {
    match recording {
        None => _ = queue.transmit(batch),
        Some(recording) => transmit_recorded(queue, batch, recording),
    }
}

#[cold]
#[inline(never)]
fn transmit_recorded(queue: &mut TxQueue, batch: &mut Batch, recording: &mut Recording) {
    let begin = ticks();
    queue.transmit(batch);
    recording.transmitted(begin);
}

#[cold]
fn retry_transmit(queue: &mut TxQueue, batch: &mut Batch, recording: &mut Option<Box<Recording>>) {
    let begin = recording.as_ref().map(|_| ticks());
    let mut tries = 0;
    while !batch.is_empty() && tries < TX_RETRIES {
        std::hint::spin_loop();
        queue.reclaim();
        tries = if queue.transmit(batch) > 0 { 0 } else { tries + 1 };
    }
    if let Some((recording, begin)) = recording.as_mut().zip(begin) {
        recording.transmitted(begin);
        recording.dropped(batch.len());
    }
    queue.count_drops(DropReason::TxFull, batch.len());
    batch.clear();
}

/// Recently reported addresses, so that a burst of packets from a new address produces one learn event
/// instead of hundreds.
pub(crate) struct LearnFilter {
    recent: Box<[(u64, u32); Self::SIZE]>,
    cleared: u64,
}

impl LearnFilter {
    const SIZE: usize = 256;
    /// Nanoseconds after which an address is reported again, because the control thread may have had no room
    /// for the event.
    const CLEAR_INTERVAL: u64 = 250_000_000;

    pub(crate) fn new() -> Self {
        Self { recent: Box::new([(u64::MAX, 0); Self::SIZE]), cleared: 0 }
    }

    fn is_new(&mut self, key: Key, destination: u32, now: u64) -> bool {
        if now.wrapping_sub(self.cleared) > Self::CLEAR_INTERVAL {
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
    use wirepath_wire::MacAddr;

    #[test]
    fn learn_filter_expires_and_reports_moves() {
        let mut filter = LearnFilter::new();
        let key = Key::new(7, MacAddr::new(2, 0, 0, 0, 0, 1));
        assert!(filter.is_new(key, 1, 0));
        assert!(!filter.is_new(key, 1, 1000));
        assert!(filter.is_new(key, 2, 1000), "moved");
        assert!(filter.is_new(key, 2, LearnFilter::CLEAR_INTERVAL + 1), "forgotten");
    }
}
