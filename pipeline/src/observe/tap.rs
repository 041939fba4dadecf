//! The tap of a thread that forwards: the points at which captures and traces see packets.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wirepath_flow::Direction;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{BATCH, Batch, Packet, PortId};
use wirepath_pmd::port::TxQueue;

use super::capture::{CaptureSession, Copied, Point};
use super::filter::{Filter, Filters};
use super::headers::Headers;
use super::trace::{Snapshot, TraceBuffer, TraceEnd, TraceSession, TraceText};
use super::{MAX_SESSIONS, Observers};
use crate::clock;
use crate::context::{TX_RETRIES, WorkerState};

/// Bits of [`Tap::active`].
mod active {
    /// A capture wants received packets.
    pub(super) const RX: u8 = 1;
    /// A capture wants sent packets.
    pub(super) const TX: u8 = 2;
    /// A capture wants dropped packets.
    pub(super) const DROPS: u8 = 4;
    /// A trace waits for packets.
    pub(super) const TRACE: u8 = 8;
    /// The present batch is one packet, which is traced.
    pub(super) const TRACING: u8 = 16;
    /// The received packets are processed in pieces.
    pub(super) const PIECES: u8 = 32;
    /// A capture wants the frames of a segment.
    pub(super) const SEGMENTS: u8 = 64;
}

/// The captures and traces of a program as one thread sees them.
#[derive(Debug)]
pub(crate) struct Tap {
    /// Bits of [`active`]; 0 in a program that nobody observes.
    active: u8,
    cold: Box<Cold>,
}

/// The part of a [`Tap`] that only an observed program reads.
#[derive(Debug)]
struct Cold {
    observers: Arc<Observers>,
    /// Index of the worker; the number of workers for the control thread.
    thread: usize,
    generation: u64,
    captures: Vec<Member<CaptureSession>>,
    traces: Vec<Member<TraceSession>>,
    /// Copies of packets that the device has not accepted yet, each with its capture and its index in the batch.
    prepared: Vec<(usize, usize, Copied)>,
    /// Received packets that are not processed yet.
    held: Batch,
    queue: u16,
    /// Packets of `held` that each trace wants.
    wanted: [u64; MAX_SESSIONS],
    /// Buffer of each trace that wants the present packet.
    buffers: [Option<Box<TraceBuffer>>; MAX_SESSIONS],
    last: Snapshot,
}

#[derive(Debug)]
struct Member<S> {
    session: Arc<S>,
    filter: Option<Filter>,
}

impl<S> Member<S> {
    /// Returns a bit for each packet that the pattern of the session selects.
    fn selected(&mut self, direction: Direction, now: u64, packets: &[Packet]) -> u64 {
        match &mut self.filter {
            Some(filter) => filter.matches(direction, now, packets),
            None => u64::MAX.checked_shr((BATCH - packets.len()) as u32).unwrap_or(0),
        }
    }
}

impl Tap {
    /// Creates the tap of a worker, or of the control thread, whose number is that of the workers.
    pub(crate) fn new(observers: Arc<Observers>, thread: usize) -> Self {
        let cold = Cold {
            observers,
            thread,
            generation: u64::MAX,
            captures: Vec::with_capacity(MAX_SESSIONS),
            traces: Vec::with_capacity(MAX_SESSIONS),
            prepared: Vec::with_capacity(MAX_SESSIONS * BATCH),
            held: Batch::new(),
            queue: 0,
            wanted: [0; MAX_SESSIONS],
            buffers: [const { None }; MAX_SESSIONS],
            last: Snapshot::new(),
        };
        let mut tap = Self { active: 0, cold: Box::new(cold) };
        tap.refresh();
        tap
    }

    /// Creates the tap of the control thread.
    pub(crate) fn of_control(observers: &Arc<Observers>) -> Self {
        Self::new(Arc::clone(observers), observers.workers)
    }

    pub(crate) fn observers(&self) -> &Arc<Observers> {
        &self.cold.observers
    }

    /// Takes the present list of sessions. Returns false if another thread uses it at this moment. Never waits.
    pub(crate) fn refresh(&mut self) -> bool {
        let cold = &mut *self.cold;
        if cold.generation == cold.observers.generation.load(Ordering::Acquire) {
            return true;
        }
        let Ok(sessions) = cold.observers.sessions.try_lock() else { return false };
        cold.generation = cold.observers.generation.load(Ordering::Acquire);
        update(&mut cold.captures, &sessions.captures, |it| (&it.filters, &it.missing), cold.thread);
        update(&mut cold.traces, &sessions.traces, |it| (&it.filters, &it.missing), cold.thread);
        drop(sessions);
        let mut on = 0;
        for spec in cold.captures.iter().map(|it| &it.session.spec) {
            if spec.segment.is_some() {
                on |= active::SEGMENTS;
                continue;
            }
            for (wanted, bit) in [(spec.rx, active::RX), (spec.tx, active::TX), (spec.drops, active::DROPS)] {
                on |= if wanted { bit } else { 0 };
            }
        }
        on |= if cold.traces.is_empty() { 0 } else { active::TRACE };
        // A trace that has begun is finished, also if its session has ended.
        self.active = on | self.active & (active::TRACING | active::PIECES);
        true
    }

    /// Returns true if received packets must be shown to the tap.
    #[inline(always)]
    pub(crate) fn wants_received(&self) -> bool {
        self.active & (active::RX | active::TRACE) != 0
    }

    /// Returns true if anybody observes the program.
    #[inline(always)]
    pub(crate) fn is_active(&self) -> bool {
        self.active != 0
    }

    /// Returns true if the present batch is a piece of what was received.
    #[inline(always)]
    pub(crate) fn has_pieces(&self) -> bool {
        self.active & active::PIECES != 0
    }

    /// Returns true if packets to send must be shown to the tap, or those that a queue does not accept.
    #[inline(always)]
    pub(crate) fn wants_transmit(&self) -> bool {
        self.active & (active::TX | active::DROPS | active::TRACING) != 0
    }

    /// Returns true if packets to send must be shown to the tap.
    #[inline(always)]
    pub(crate) fn wants_sent(&self) -> bool {
        self.active & (active::TX | active::TRACING) != 0
    }

    /// Returns true if dropped packets must be shown to the tap.
    #[inline(always)]
    pub(crate) fn wants_dropped(&self) -> bool {
        self.active & (active::DROPS | active::TRACING) != 0
    }

    /// Returns true if the present packet is traced.
    #[inline(always)]
    pub(crate) fn is_tracing(&self) -> bool {
        self.active & active::TRACING != 0
    }

    /// Returns true if the frames of segments must be shown to the tap, or the present packet is traced.
    #[inline(always)]
    pub(crate) fn wants_slow_path(&self) -> bool {
        self.active & (active::SEGMENTS | active::TRACING) != 0
    }

    /// Shows a frame that enters a segment.
    #[cold]
    #[inline(never)]
    pub(crate) fn entered_segment(&mut self, packet: &Packet, segment: u16, now: u64) {
        let (ticks, port) = (clock::ticks(), packet.in_port());
        for member in &mut self.cold.captures {
            if member.session.wants_segment(segment, port)
                && member.selected(Direction::Ingress, now, std::slice::from_ref(packet)) != 0
            {
                member.session.deliver(member.session.copy(packet, Point::Rx, port, now, ticks), port);
            }
        }
    }

    /// Shows a packet that is dropped for this reason.
    #[cold]
    #[inline(never)]
    pub(crate) fn dropped(&mut self, packet: &Packet, reason: DropReason, now: u64) {
        let port = packet.in_port().or(packet.out_port());
        self.cold.copy(Point::Drop(reason), port, std::slice::from_ref(packet), now);
        if self.is_tracing() {
            self.trace_packet("drop", packet);
            self.end(TraceEnd::Dropped { reason, packets: 1 });
        }
    }

    /// Shows drops without a packet.
    #[cold]
    #[inline(never)]
    pub(crate) fn dropped_without_packet(&mut self, reason: DropReason, n: usize) {
        for Member { session, .. } in &self.cold.captures {
            if session.wants(Point::Drop(reason), session.spec.port) {
                session.count_without_packet(n as u64);
            }
        }
        if self.is_tracing() {
            self.end(TraceEnd::Dropped { reason, packets: n });
        }
    }

    /// Sends packets from the front of the batch as [`TxQueue::transmit`] does, and shows those that were accepted.
    #[cold]
    #[inline(never)]
    pub(crate) fn try_transmit(&mut self, queue: &mut TxQueue, batch: &mut Batch, now: u64) -> usize {
        let port = queue.port();
        // Patterns compare it.
        batch.iter_mut().for_each(|packet| packet.set_out_port(port));
        self.cold.prepare(batch.as_slice(), port, now);
        // Queues drop for built-in reasons only.
        let drops = || DropReason::BUILT_IN.iter().map(|reason| queue.counters().drops.get(*reason));
        let mut before = [0; DropReason::BUILT_IN.len()];
        drops().zip(&mut before).for_each(|(n, before)| *before = n);
        let accepted = queue.transmit(batch);
        self.cold.commit(accepted, port);
        if self.is_tracing() && accepted > 0 {
            // A queue whose device is lost accepts packets and drops them.
            let mut sent = accepted;
            for (reason, before) in DropReason::BUILT_IN.iter().zip(before) {
                let lost = queue.counters().drops.get(*reason).saturating_sub(before) as usize;
                let packets = lost.min(sent);
                sent -= packets;
                if packets > 0 {
                    self.end(TraceEnd::Dropped { reason: *reason, packets });
                }
            }
            if sent > 0 {
                self.end(TraceEnd::Sent { port, queue: queue.index(), packets: sent });
            }
        }
        accepted
    }

    /// Sends the whole batch. Drops what the queue does not accept after [`TX_RETRIES`] attempts.
    #[cold]
    #[inline(never)]
    pub(crate) fn transmit(&mut self, queue: &mut TxQueue, batch: &mut Batch, now: u64) {
        let mut tries = 0;
        self.try_transmit(queue, batch, now);
        while !batch.is_empty() && tries < TX_RETRIES {
            std::hint::spin_loop();
            queue.reclaim();
            tries = if self.try_transmit(queue, batch, now) > 0 { 0 } else { tries + 1 };
        }
        queue.count_drops(DropReason::TxFull, batch.len());
        batch.drain_front(BATCH, |packet| self.dropped(&packet, DropReason::TxFull, now));
    }

    /// Adds a report of a stage to the trace of the present packet.
    #[cold]
    #[inline(never)]
    pub(crate) fn trace(&mut self, stage: &'static str, write: impl FnOnce(&mut TraceText<'_>) -> fmt::Result) {
        if let Some(buffer) = self.cold.buffer() {
            buffer.step(stage, write);
        }
    }

    /// Reports how the packet has changed since the last report, if it has.
    #[cold]
    #[inline(never)]
    pub(crate) fn trace_packet(&mut self, stage: &'static str, packet: &Packet) {
        let Cold { buffers, last, traces, .. } = &mut *self.cold;
        if last.differs(packet)
            && let Some((buffer, trace)) = buffers.iter_mut().zip(traces).find_map(|(it, to)| Some((it.as_mut()?, to)))
        {
            buffer.step(stage, |text| last.write_change(packet, &trace.session.parser, text));
            last.take(packet);
        }
    }

    /// Reports a packet that goes to the transmit queue of a port. It may be a copy, so the next report of a change is
    /// about the same earlier packet.
    #[cold]
    #[inline(never)]
    pub(crate) fn trace_sent(&mut self, port: PortId, packet: &Packet) {
        let name = self.port_name(port);
        let Cold { buffers, last, traces, .. } = &mut *self.cold;
        if let Some((buffer, trace)) = buffers.iter_mut().zip(traces).find_map(|(it, to)| Some((it.as_mut()?, to))) {
            buffer.step("transmit", |text| {
                write!(text, "port {name}, {} bytes", packet.len())?;
                if last.differs(packet) {
                    text.write_str(": ")?;
                    last.write_change(packet, &trace.session.parser, text)?;
                }
                Ok(())
            });
        }
    }

    /// Adds an end to the trace of the present packet.
    #[cold]
    #[inline(never)]
    pub(crate) fn end(&mut self, end: TraceEnd) {
        if let Some(buffer) = self.cold.buffer() {
            buffer.end(end);
        }
    }

    pub(crate) fn port_name(&self, port: PortId) -> Arc<str> {
        self.cold.observers.port(port).unwrap_or_else(|| "?".into())
    }
}

/// Makes a tap's list of sessions equal to the shared one.
fn update<S>(
    members: &mut Vec<Member<S>>,
    sessions: &[Arc<S>],
    parts: impl Fn(&S) -> (&Filters, &AtomicUsize),
    thread: usize,
) {
    members.retain_mut(|member| {
        let kept = sessions.iter().any(|session| Arc::ptr_eq(session, &member.session));
        if !kept {
            parts(&member.session).0.put_back(thread, member.filter.take());
        }
        kept
    });
    for session in sessions {
        if members.len() < MAX_SESSIONS && !members.iter().any(|member| Arc::ptr_eq(session, &member.session)) {
            let (filters, missing) = parts(session);
            let filter = filters.take(thread);
            if filter.is_some() || filters.is_empty() {
                members.push(Member { session: Arc::clone(session), filter });
                missing.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

impl Cold {
    fn buffer(&mut self) -> Option<&mut TraceBuffer> {
        self.buffers.iter_mut().find_map(Option::as_deref_mut)
    }

    /// Passes copies of packets to the captures that want them.
    fn copy(&mut self, point: Point, port: Option<PortId>, packets: &[Packet], now: u64) {
        let ticks = clock::ticks();
        for member in &mut self.captures {
            if !member.session.wants(point, port) {
                continue;
            }
            let selected = member.selected(Direction::Ingress, now, packets);
            for (_, packet) in packets.iter().enumerate().filter(|(i, _)| selected & 1 << i != 0) {
                member.session.deliver(member.session.copy(packet, point, port, now, ticks), port);
            }
        }
    }

    /// Copies packets before they are sent, because the device may change and free them.
    fn prepare(&mut self, packets: &[Packet], port: PortId, now: u64) {
        let ticks = clock::ticks();
        for (number, member) in self.captures.iter_mut().enumerate() {
            if !member.session.wants(Point::Tx, Some(port)) {
                continue;
            }
            let selected = member.selected(Direction::Egress, now, packets);
            for (i, packet) in packets.iter().enumerate().filter(|(i, _)| selected & 1 << i != 0) {
                let copied = member.session.copy(packet, Point::Tx, Some(port), now, ticks);
                self.prepared.push((number, i, copied));
            }
        }
    }

    /// Passes the copies of the first `accepted` packets to their captures.
    fn commit(&mut self, accepted: usize, port: PortId) {
        for (number, i, copied) in self.prepared.drain(..) {
            let Some(member) = self.captures.get(number) else { continue };
            if i < accepted { member.session.deliver(copied, Some(port)) } else { member.session.discard(copied) }
        }
    }
}

impl WorkerState {
    /// Frees a packet that was counted as dropped.
    #[inline(always)]
    pub(crate) fn discard(&mut self, packet: Packet, reason: DropReason) {
        if self.tap.wants_dropped() {
            self.tap.dropped(&packet, reason, self.now);
        }
        drop(packet);
    }

    /// Shows received packets to the captures. If a trace wants some of them, leaves the first piece in the batch and
    /// holds the rest.
    #[cold]
    #[inline(never)]
    pub(crate) fn observe_received(&mut self, batch: &mut Batch, queue: u16) {
        let (Some(port), now) = (self.in_port, self.now) else { return };
        let cold = &mut *self.tap.cold;
        cold.copy(Point::Rx, Some(port), batch.as_slice(), now);
        let mut all = 0;
        for (member, wanted) in cold.traces.iter_mut().zip(&mut cold.wanted) {
            let wants = member.session.wants(port);
            *wanted = if wants { member.selected(Direction::Ingress, now, batch.as_slice()) } else { 0 };
            all |= *wanted;
        }
        if all != 0 {
            cold.queue = queue;
            cold.held.append(batch);
            self.tap.active |= active::PIECES;
            self.next_piece(batch);
        }
    }

    /// Ends the present piece and leaves the next one in the batch. Returns false if there is none.
    #[cold]
    #[inline(never)]
    pub(crate) fn next_piece(&mut self, batch: &mut Batch) -> bool {
        if self.tap.is_tracing() {
            // What the packet has caused is sent now, so that the trace has its end.
            self.flush();
            self.tap.finish_trace();
        }
        let cold = &mut *self.tap.cold;
        if cold.held.is_empty() {
            self.tap.active &= !active::PIECES;
            return false;
        }
        let all = cold.wanted.iter().fold(0, |all, wanted| all | wanted);
        let before = (all.trailing_zeros() as usize).min(cold.held.len());
        let n = before.max(1);
        let traced = if before == 0 { cold.wanted.map(|wanted| wanted & 1 != 0) } else { [false; MAX_SESSIONS] };
        cold.wanted.iter_mut().for_each(|wanted| *wanted = wanted.checked_shr(n as u32).unwrap_or(0));
        cold.held.drain_front(n, |packet| {
            // The push succeeds, because the batch is empty.
            let _ = batch.push(packet);
        });
        if let Some(packet) = batch.as_slice().first()
            && before == 0
        {
            self.flush();
            if self.tap.begin_trace(packet, traced, self.in_port, self.index) {
                self.tap.active |= active::TRACING;
            }
        }
        true
    }
}

impl Tap {
    /// Begins the traces of a packet. Returns false if none has a buffer.
    fn begin_trace(
        &mut self,
        packet: &Packet,
        traced: [bool; MAX_SESSIONS],
        port: Option<PortId>,
        worker: usize,
    ) -> bool {
        let Some(port) = port else { return false };
        let (name, ticks) = (self.port_name(port), clock::ticks());
        let Cold { traces, buffers, queue, last, .. } = &mut *self.cold;
        let mut begun = false;
        for ((member, buffer), wanted) in traces.iter().zip(buffers).zip(traced) {
            *buffer = if wanted { member.session.take() } else { None };
            // The first one records for all.
            if let Some(buffer) = buffer.as_mut().filter(|_| !begun) {
                begun = true;
                buffer.begin(ticks, worker, port, *queue);
                let parser = &member.session.parser;
                buffer.step("receive", |text| {
                    write!(text, "port {name} queue {queue} worker {worker}, {} bytes", packet.len())?;
                    write_device_report(packet, text)
                });
                let headers = Headers { frame: packet.data(), len: packet.len(), parser };
                buffer.step("receive", |text| write!(text, "{headers}"));
                last.take(packet);
            }
        }
        begun
    }

    fn finish_trace(&mut self) {
        self.active &= !active::TRACING;
        let Cold { traces, buffers, .. } = &mut *self.cold;
        let mut first: Option<usize> = None;
        for i in 0..buffers.len() {
            if buffers[i].is_none() {
                continue;
            }
            let Some(from) = first else {
                first = Some(i);
                continue;
            };
            let (before, rest) = buffers.split_at_mut(i);
            if let (Some(from), Some(to)) = (&before[from], &mut rest[0]) {
                to.copy_from(from);
            }
        }
        for (member, buffer) in traces.iter().zip(buffers) {
            if let Some(buffer) = buffer.take() {
                member.session.finish(buffer);
            }
        }
    }
}

/// Writes what the device reported about a received packet.
fn write_device_report(packet: &Packet, text: &mut TraceText<'_>) -> fmt::Result {
    if let Some(tci) = packet.vlan() {
        write!(text, ", VLAN tag {} stripped by the device", tci & 0xfff)?;
    }
    let status = packet.checksum_status();
    for (name, good, bad) in [
        ("IP", ChecksumStatus::L3_GOOD, ChecksumStatus::L3_BAD),
        ("layer 4", ChecksumStatus::L4_GOOD, ChecksumStatus::L4_BAD),
        ("outer IP", ChecksumStatus::OUTER_L3_GOOD, ChecksumStatus::OUTER_L3_BAD),
        ("outer layer 4", ChecksumStatus::OUTER_L4_GOOD, ChecksumStatus::OUTER_L4_BAD),
    ] {
        if status.intersects(good.with(bad)) {
            let verdict = if status.contains(good) { "good" } else { "wrong" };
            write!(text, ", {name} checksum {verdict} by the device")?;
        }
    }
    if let Some(mark) = packet.mark() {
        write!(text, ", mark {mark} of the device")?;
    }
    if let Some(hash) = packet.rss_hash() {
        write!(text, ", hash {hash:#010x}")?;
    }
    if packet.flags().contains(Flags::TX_L4_CHECKSUM) {
        text.write_str(", layer 4 checksum left to the device")?;
    }
    if packet.flags().contains(Flags::TX_SEGMENT) {
        write!(text, ", to be segmented to {} bytes", packet.mss())?;
    }
    Ok(())
}
