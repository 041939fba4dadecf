//! The worker's end of a transmit queue, and the packets that are on their way.

use std::any::Any;
use std::mem::replace;
use std::sync::Arc;

use super::exchange::Exchange;
use super::fault::Fault;
use super::graves::Ending;
use super::longest_frame;
use crate::counters::QueueCounters;
use crate::drops::DropReason;
use crate::packet::front::Front;
use crate::packet::{Batch, Held, Pool};
use crate::port::TransmitQueue;

/// Packets of one burst: only its last descriptor gets a completion, which stands for all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Burst {
    pub(crate) packets: u32,
    /// Position of the last descriptor, and of what follows it, in the units of the ring.
    pub(crate) last: u32,
    pub(crate) end: u32,
}

/// Packets on their way, burst by burst. To be the last field of a ring: what keeps the hardware's queue goes first, then the packets.
#[derive(Debug)]
pub(crate) struct Flight {
    held: Held,
    /// `first` is the eldest; a power of two of slots.
    bursts: Box<[Burst]>,
    first: u32,
    end: u32,
    /// Positions, counted for ever: of the next descriptor, and of the eldest that is on its way.
    pub(crate) next: u32,
    pub(crate) eldest: u32,
    ending: Ending,
}

impl Flight {
    /// Nothing, with room for so many packets and bursts.
    pub(crate) fn new(packets: u32, bursts: u32, ending: Ending) -> Self {
        let bursts = vec![Burst::default(); bursts.next_power_of_two() as usize].into();
        Self { held: Held::with_room_for(packets), bursts, first: 0, end: 0, next: 0, eldest: 0, ending }
    }

    /// Packets.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// How many more packets there is room for.
    #[inline(always)]
    pub(crate) fn room(&self) -> usize {
        self.held.room()
    }

    /// Most bursts.
    #[inline(always)]
    pub(crate) fn most_bursts(&self) -> usize {
        self.bursts.len()
    }

    /// Positions in use.
    #[inline(always)]
    pub(crate) fn used(&self) -> u32 {
        self.next.wrapping_sub(self.eldest)
    }

    #[inline(always)]
    fn slot(&self, counter: u32) -> usize {
        counter as usize & (self.bursts.len() - 1)
    }

    /// The burst whose completion is next.
    #[inline(always)]
    pub(crate) fn eldest_burst(&self) -> Option<Burst> {
        (self.first != self.end).then(|| self.bursts[self.slot(self.first)])
    }

    /// The eldest burst has been sent: its packets are to be freed with [`Self::free`].
    #[inline(always)]
    pub(crate) fn landed(&mut self, burst: Burst) {
        self.eldest = burst.end;
        self.first = self.first.wrapping_add(1);
    }

    /// Frees the eldest packets.
    #[inline(always)]
    pub(crate) fn free(&mut self, packets: usize) {
        self.held.free_front(packets);
    }

    /// Takes in the packets of a burst from the front of a batch. There must be room.
    #[inline(always)]
    pub(crate) fn launch(&mut self, batch: &mut Batch, burst: Burst) {
        self.note(burst);
        self.held.take_front(batch, burst.packets as usize);
    }

    /// Takes in the packets that were gone through, the last of which is described at `last`; what follows them is at `end`. There must be
    /// room.
    #[inline(always)]
    pub(crate) fn launch_front(&mut self, front: Front<'_>, last: u32, end: u32) {
        self.note(Burst { packets: front.taken() as u32, last, end });
        self.held.take(front);
    }

    #[inline(always)]
    fn note(&mut self, burst: Burst) {
        let slot = self.slot(self.end);
        self.bursts[slot] = burst;
        self.end = self.end.wrapping_add(1);
        self.next = burst.end;
    }

    /// Bursts that were sent and that were given to the device, counted for ever.
    #[inline(always)]
    fn progress(&self) -> (u32, u32) {
        (self.first, self.end)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let count = self.held.len();
        self.ending.release(replace(&mut self.held, Held::with_room_for(0)), count);
    }
}

/// A hardware's send queue with the packets that are on their way. Dropped, it first destroys the hardware's queue, then frees the packets.
pub(crate) trait SendRing: Send + 'static {
    /// What is on its way.
    fn flight(&self) -> &Flight;

    /// Takes note of what the device has sent, and frees it.
    fn complete(&mut self, counters: &QueueCounters) -> Result<(), Fault>;

    /// Describes packets from the front of the batch to the device, and takes them in. Returns how many, with their bytes; an error is
    /// about the packet behind them, which can never be sent.
    fn post(&mut self, batch: &mut Batch, limits: &Limits<'_>) -> (usize, u64, Result<(), DropReason>);

    /// Tells the device how far the ring is filled.
    fn ring_doorbell(&mut self);
}

/// What a port lets through, and where copies come from.
pub(crate) struct Limits<'a> {
    /// Bytes of the longest frame.
    pub(crate) longest: usize,
    pub(crate) pool: &'a Pool,
    pub(crate) counters: &'a QueueCounters,
}

/// Sends packets of one worker.
pub(crate) struct Sender<R> {
    ring: Option<R>,
    exchange: Arc<Exchange<R>>,
    counters: Arc<QueueCounters>,
    pool: Pool,
    longest: usize,
}

impl<R: SendRing> Sender<R> {
    /// Sends by the ring that waits in `exchange`; copies of packets that the device cannot reach come from `pool`.
    pub(crate) fn new(exchange: Arc<Exchange<R>>, pool: Pool, mtu: u16) -> Self {
        let mut ring = None;
        exchange.visit(&mut ring);
        Self { ring, exchange, counters: Arc::default(), pool, longest: longest_frame(mtu) }
    }

    /// Packets on their way.
    fn len(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.flight().len())
    }

    /// Whether nothing is on its way any more, after a look.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.reclaim();
        self.len() == 0
    }

    /// What is on its way will not arrive: nobody knows which of it did.
    #[cold]
    fn give_up(&mut self, fault: Fault) {
        self.counters.drops.add(DropReason::TxError, self.len() as u64);
        self.exchange.give_up(&mut self.ring, fault);
    }

    /// Does what the device asks for. `false`: it is lost.
    #[cold]
    fn visit(&mut self) -> bool {
        if self.exchange.is_doubted()
            && let Some(ring) = &mut self.ring
        {
            // The device saw no progress; whether there is none, or nobody looked, is known after a look.
            let before = ring.flight().progress();
            match ring.complete(&self.counters) {
                Ok(()) if ring.flight().progress() == before && ring.flight().len() > 0 => self.give_up(Fault::Stalled),
                Ok(()) => self.exchange.trust(),
                Err(fault) => self.give_up(fault),
            }
            return true;
        }
        let lost = self.len();
        let living = self.exchange.visit(&mut self.ring);
        if self.ring.is_none() {
            self.counters.drops.add(DropReason::DeviceLost, lost as u64);
        }
        living
    }
}

impl<R: SendRing> TransmitQueue for Sender<R> {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        if self.exchange.calls() && !self.visit() {
            self.counters.drops.add(DropReason::DeviceLost, batch.len() as u64);
            batch.clear();
            return;
        }
        let Some(ring) = &mut self.ring else { return self.counters.empty.add(1) };
        if let Err(fault) = ring.complete(&self.counters) {
            self.give_up(fault);
            return self.counters.empty.add(1);
        }
        let limits = Limits { longest: self.longest, pool: &self.pool, counters: &self.counters };
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
        self.exchange.note(ring.flight().progress());
        self.counters.count_burst(packets, bytes);
    }

    fn reclaim(&mut self) {
        if self.exchange.calls() {
            self.visit();
        }
        let Some(ring) = &mut self.ring else { return };
        match ring.complete(&self.counters) {
            Ok(()) => self.exchange.note(ring.flight().progress()),
            Err(fault) => self.give_up(fault),
        }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
