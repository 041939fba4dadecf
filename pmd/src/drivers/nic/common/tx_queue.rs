//! The worker's side of a transmit queue, and its packets in flight.

use std::any::Any;
use std::mem::replace;
use std::sync::Arc;

use super::max_frame_len;
use super::quarantine::QueueTeardown;
use super::queue_fault::QueueFault;
use super::ring_handoff::RingHandoff;
use crate::port::{TunnelTso, TxDriver};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::driver::InFlight;
use wirepath_packet::driver::TxBurst;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, Packet, Pool};

/// A posted burst. Only its last descriptor requests a completion, which covers the whole burst.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PostedBurst {
    pub(crate) packets: u32,
    /// Positions of the last descriptor and of the one after it, in the units of the ring.
    pub(crate) last: u32,
    pub(crate) end: u32,
}

/// Packets in flight, by burst. This must be the last field of a ring, so that the owner of the hardware
/// queue is dropped before the packets.
#[derive(Debug)]
pub(crate) struct TxInFlight {
    packets: InFlight,
    /// Ring of bursts, a power of two; `first` is the oldest.
    bursts: Box<[PostedBurst]>,
    first: u32,
    end: u32,
    /// Free-running positions of the next descriptor and of the oldest one in flight.
    pub(crate) next: u32,
    pub(crate) oldest: u32,
    teardown: QueueTeardown,
}

impl TxInFlight {
    /// Creates an empty record for up to `packets` packets and `bursts` bursts.
    pub(crate) fn new(packets: u32, bursts: u32, teardown: QueueTeardown) -> Self {
        let bursts = vec![PostedBurst::default(); bursts.next_power_of_two() as usize].into();
        Self { packets: InFlight::with_capacity(packets), bursts, first: 0, end: 0, next: 0, oldest: 0, teardown }
    }

    /// Returns the number of packets in flight.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns the number of packets that can be added.
    #[inline(always)]
    pub(crate) fn room(&self) -> usize {
        self.packets.room()
    }

    /// Returns the capacity in bursts.
    #[inline(always)]
    pub(crate) fn max_bursts(&self) -> usize {
        self.bursts.len()
    }

    /// Returns the number of positions in use.
    #[inline(always)]
    pub(crate) fn used(&self) -> u32 {
        self.next.wrapping_sub(self.oldest)
    }

    #[inline(always)]
    fn slot(&self, counter: u32) -> usize {
        counter as usize & (self.bursts.len() - 1)
    }

    /// Returns the burst that completes next.
    #[inline(always)]
    pub(crate) fn oldest_burst(&self) -> Option<PostedBurst> {
        (self.first != self.end).then(|| self.bursts[self.slot(self.first)])
    }

    /// Records that the oldest burst has been sent. [`Self::free`] frees its packets.
    #[inline(always)]
    pub(crate) fn complete_oldest(&mut self, burst: PostedBurst) {
        self.oldest = burst.end;
        self.first = self.first.wrapping_add(1);
    }

    /// Frees the oldest packets.
    #[inline(always)]
    pub(crate) fn free(&mut self, packets: usize) {
        self.packets.free_front(packets);
    }

    /// Moves the packets of a burst from the front of a batch. There must be room.
    #[inline(always)]
    pub(crate) fn post_batch(&mut self, batch: &mut Batch, burst: PostedBurst) {
        self.record(burst);
        self.packets.push_from(batch, burst.packets as usize);
    }

    /// Moves the packets that `burst` has passed. The last one is described at `last`; the next descriptor is
    /// at `end`. There must be room.
    #[inline(always)]
    pub(crate) fn post_burst(&mut self, burst: TxBurst<'_>, last: u32, end: u32) {
        self.record(PostedBurst { packets: burst.taken() as u32, last, end });
        self.packets.push_burst(burst);
    }

    #[inline(always)]
    fn record(&mut self, burst: PostedBurst) {
        let slot = self.slot(self.end);
        self.bursts[slot] = burst;
        self.end = self.end.wrapping_add(1);
        self.next = burst.end;
    }

    /// Returns the newest `count` packets and frees the others. The owner of the hardware queue must have been
    /// dropped. If the queue could not be destroyed, all packets are leaked and none is returned.
    pub(crate) fn take_newest(mut self, count: usize) -> Vec<Packet> {
        if !self.teardown.destroy() {
            return Vec::new();
        }
        self.packets.free_front(self.packets.len().saturating_sub(count));
        self.packets.take_all()
    }

    /// Returns the number of packets in flight and the sum of their lengths.
    fn totals(&self) -> (u64, u64) {
        (self.packets.len() as u64, self.packets.front_bytes(self.packets.len()))
    }

    /// Returns completed and posted bursts, as free-running counters.
    #[inline(always)]
    fn progress(&self) -> (u32, u32) {
        (self.first, self.end)
    }
}

impl Drop for TxInFlight {
    fn drop(&mut self) {
        let count = self.packets.len();
        self.teardown.release(replace(&mut self.packets, InFlight::with_capacity(0)), count);
    }
}

/// A send ring with its packets in flight. Dropping it destroys the hardware queue, then frees the packets.
pub(crate) trait TxRing: Send + 'static {
    /// Returns the packets in flight.
    fn in_flight(&self) -> &TxInFlight;

    /// Processes completions and frees the sent packets.
    fn complete(&mut self, counters: &QueueCounters) -> Result<(), QueueFault>;

    /// Posts packets from the front of the batch. Returns their number and bytes. An error concerns the next
    /// packet, which can never be sent.
    fn post(&mut self, batch: &mut Batch, limits: &TxLimits<'_>) -> (usize, u64, Result<(), DropReason>);

    /// Returns the number of newest packets in flight that the device has not sent because of this fault, and that
    /// another ring can send.
    fn unsent(&self, fault: QueueFault) -> usize {
        let _ = fault;
        0
    }

    /// Destroys the hardware queue and returns the packets that [`Self::unsent`] counts.
    fn take_unsent(self, fault: QueueFault) -> Vec<Packet>
    where
        Self: Sized,
    {
        let _ = fault;
        Vec::new()
    }

    /// Does [`TxDriver::tunnel_tso`]. `longest`: bytes of the longest frame.
    fn tunnel_tso(&self, packet: &Packet, longest: usize) -> TunnelTso {
        let _ = (packet, longest);
        TunnelTso::No
    }

    /// Sets packets that go before all others. They are from an earlier ring.
    fn set_backlog(&mut self, packets: Vec<Packet>) {
        debug_assert!(packets.is_empty(), "a ring that returns none gets none");
    }

    /// Takes these packets.
    fn take_backlog(&mut self) -> Vec<Packet> {
        Vec::new()
    }

    /// Rings the doorbell: tells the device how far the ring is filled.
    fn ring_doorbell(&mut self);

    /// Returns what [`TxDriver::segments`] returns.
    fn segments(&self, packet: &Packet) -> Option<bool> {
        let _ = packet;
        None
    }
}

/// Limits of a port, and the pool for copies.
pub(crate) struct TxLimits<'a> {
    /// Bytes of the longest frame.
    pub(crate) longest: usize,
    pub(crate) pool: &'a Pool,
    pub(crate) counters: &'a QueueCounters,
}

/// Transmit queue of one worker.
pub(crate) struct NicTxQueue<R> {
    ring: Option<R>,
    handoff: Arc<RingHandoff<R>>,
    counters: Arc<QueueCounters>,
    pool: Pool,
    longest: usize,
    /// The packets in flight are counted as dropped: the ring will not be used again.
    in_flight_counted: bool,
}

impl<R: TxRing> NicTxQueue<R> {
    /// Creates a queue for the ring that waits in `handoff`. Packets outside registered memory are copied
    /// into `pool`.
    pub(crate) fn new(handoff: Arc<RingHandoff<R>>, pool: Pool, mtu: u16) -> Self {
        let mut ring = None;
        handoff.poll(&mut ring);
        Self { ring, handoff, counters: Arc::default(), pool, longest: max_frame_len(mtu), in_flight_counted: false }
    }

    /// Returns the number of packets in flight.
    fn len(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.in_flight().len())
    }

    /// Processes completions and returns true if no packets are in flight.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.reclaim();
        self.len() == 0
    }

    /// Counts the packets in flight as dropped instead of sent, once. The ring is not used afterwards.
    #[cold]
    pub(crate) fn count_in_flight(&mut self, reason: DropReason) {
        if let Some(ring) = self.ring.as_ref().filter(|_| !replace(&mut self.in_flight_counted, true)) {
            let (packets, bytes) = ring.in_flight().totals();
            self.counters.count_unsent(reason, packets, bytes);
        }
    }

    /// Returns a broken ring. Packets in flight of which it is unknown whether they were sent count as errors, and no
    /// longer as sent.
    #[cold]
    fn return_broken(&mut self, fault: QueueFault) {
        if let Some(ring) = &self.ring {
            let packets = &ring.in_flight().packets;
            let lost = packets.len().saturating_sub(ring.unsent(fault));
            self.counters.count_unsent(DropReason::TxError, lost as u64, packets.front_bytes(lost));
            self.handoff.set_progress(ring.in_flight().progress());
        }
        self.handoff.return_broken(&mut self.ring, fault);
    }

    /// Carries out a request of the device. Returns false if it is lost.
    #[cold]
    fn poll_handoff(&mut self) -> bool {
        if self.handoff.is_stall_check_requested()
            && let Some(ring) = &mut self.ring
        {
            // The device saw no progress. Processing completions shows whether there is none, or the worker
            // did not poll.
            let before = ring.in_flight().progress();
            match ring.complete(&self.counters) {
                Ok(()) if ring.in_flight().progress() == before && ring.in_flight().len() > 0 => {
                    self.return_broken(QueueFault::Stalled);
                }
                Ok(()) => self.handoff.clear_stall_check(),
                Err(fault) => self.return_broken(fault),
            }
            return true;
        }
        let lost = self.ring.as_ref().map_or((0, 0), |ring| ring.in_flight().totals());
        let living = self.handoff.poll(&mut self.ring);
        if self.ring.is_none() {
            self.counters.count_unsent(DropReason::DeviceLost, lost.0, lost.1);
        }
        self.post_backlog();
        living
    }

    /// Posts the packets that the previous ring did not send. An empty ring has room for them, unless they are
    /// chains of many segments.
    fn post_backlog(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        let mut packets = ring.take_backlog().into_iter();
        let limits = TxLimits { longest: self.longest, pool: &self.pool, counters: &self.counters };
        loop {
            let mut batch: Batch = packets.by_ref().take(BATCH).collect();
            if batch.is_empty() {
                return;
            }
            while !batch.is_empty() {
                let (posted, _, result) = ring.post(&mut batch, &limits);
                if posted == 0 {
                    // No room, or a packet that can never be sent. The previous ring counted it as sent.
                    let bytes = batch.as_slice().first().map_or(0, |packet| packet.len() as u64);
                    self.counters.count_unsent(result.err().unwrap_or(DropReason::TxError), 1, bytes);
                    batch.free_front(1);
                }
            }
            ring.ring_doorbell();
            self.handoff.set_progress(ring.in_flight().progress());
        }
    }
}

impl<R: TxRing> TxDriver for NicTxQueue<R> {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        if self.handoff.needs_poll() && !self.poll_handoff() {
            self.counters.drops.add(DropReason::DeviceLost, batch.len() as u64);
            batch.clear();
            return;
        }
        let Some(ring) = &mut self.ring else { return self.counters.empty.add(1) };
        if let Err(fault) = ring.complete(&self.counters) {
            self.return_broken(fault);
            return self.counters.empty.add(1);
        }
        let limits = TxLimits { longest: self.longest, pool: &self.pool, counters: &self.counters };
        let (mut packets, mut bytes) = (0, 0);
        loop {
            let (n, sum, result) = ring.post(batch, &limits);
            packets += n as u64;
            bytes += sum;
            match result {
                Ok(()) => break,
                Err(reason) => {
                    self.counters.drops.add(reason, 1);
                    batch.free_front(1);
                }
            }
        }
        if packets > 0 {
            ring.ring_doorbell();
        }
        self.handoff.set_progress(ring.in_flight().progress());
        self.counters.count_burst(packets, bytes);
    }

    fn reclaim(&mut self) {
        if self.handoff.needs_poll() {
            self.poll_handoff();
        }
        let Some(ring) = &mut self.ring else { return };
        match ring.complete(&self.counters) {
            Ok(()) => self.handoff.set_progress(ring.in_flight().progress()),
            Err(fault) => self.return_broken(fault),
        }
    }

    fn segments(&self, packet: &Packet) -> Option<bool> {
        self.ring.as_ref().and_then(|ring| ring.segments(packet))
    }

    fn in_flight(&self) -> Option<u32> {
        u32::try_from(self.len()).ok()
    }

    fn tunnel_tso(&self, packet: &Packet) -> TunnelTso {
        self.ring.as_ref().map_or(TunnelTso::No, |ring| ring.tunnel_tso(packet, self.longest))
    }

    fn count_lost(&mut self) {
        self.count_in_flight(DropReason::DeviceLost);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
