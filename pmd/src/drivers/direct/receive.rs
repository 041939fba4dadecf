//! The worker's end of a receive queue, and the buffers that are posted to the device.

use std::any::Any;
use std::fmt;
use std::mem::take;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::exchange::Exchange;
use super::fault::Fault;
use super::graves::Ending;
use crate::counters::QueueCounters;
use crate::drops::DropReason;
use crate::packet::{BATCH, Batch, Blank, DATA_ROOM, Hand, Packet, Pool};
use crate::port::ReceiveQueue;

/// What all receive queues of a port have in common: the rules and queue pairs that spread packets over them, and with these the work
/// queues. As long as those are there, the device may write to every buffer that was posted, so that the buffers of queues that go before
/// are kept here.
pub(crate) struct Spread {
    ending: Mutex<Ending>,
    kept: Mutex<Vec<Box<[Packet]>>>,
}

impl Spread {
    /// `ending` holds what must be gone before the device lets go of posted buffers.
    pub(crate) fn new(ending: Ending) -> Arc<Self> {
        Arc::new(Self { ending: Mutex::new(ending), kept: Mutex::default() })
    }
}

impl Drop for Spread {
    fn drop(&mut self) {
        let kept = take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        let count = kept.iter().map(|packets| packets.len()).sum();
        self.ending.get_mut().unwrap_or_else(PoisonError::into_inner).release(kept, count);
    }
}

impl fmt::Debug for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spread").finish_non_exhaustive()
    }
}

/// The buffers of every work request, in order; the device writes to them. To be the last field of a ring: what keeps the hardware's queue
/// goes first.
pub(crate) struct Posted {
    packets: Box<[Packet]>,
    spread: Arc<Spread>,
}

impl Posted {
    /// So many fresh buffers.
    pub(crate) fn take(wanted: usize, pool: &Pool, blank: &Blank, spread: Arc<Spread>) -> Result<Self, PoolDry> {
        let mut packets = Vec::with_capacity(wanted);
        while packets.len() < wanted {
            let mut batch = Batch::new();
            if pool.take_batch_like(wanted - packets.len(), &mut batch, blank) == 0 {
                return Err(PoolDry { pool: pool.name().to_owned(), wanted });
            }
            batch.drain_front(BATCH, |packet| packets.push(packet));
        }
        Ok(Self { packets: packets.into(), spread })
    }
}

impl Deref for Posted {
    type Target = [Packet];

    #[inline(always)]
    fn deref(&self) -> &[Packet] {
        &self.packets
    }
}

impl DerefMut for Posted {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Packet] {
        &mut self.packets
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        self.spread.kept.lock().unwrap_or_else(PoisonError::into_inner).push(take(&mut self.packets));
    }
}

/// Buffers that a frame of this length needs.
pub(crate) const fn buffers_for(frame: usize) -> usize {
    frame.div_ceil(DATA_ROOM)
}

/// Makes a packet of `len` bytes of as many of the filled buffers `slots` as it takes, and puts fresh ones in their place; all or, if the
/// pool has too few, none.
pub(crate) fn take_out(hand: &Hand<'_>, slots: &mut [Packet], len: u32) -> Option<Packet> {
    let wanted = buffers_for(len as usize);
    if slots.len() < wanted || !hand.has(wanted) {
        return None;
    }
    let (mut whole, mut left): (Option<Packet>, u32) = (None, len);
    for slot in &mut slots[..wanted] {
        let here = left.min(DATA_ROOM as u32);
        left -= here;
        let segment = hand.exchange(slot, here)?;
        match &mut whole {
            None => whole = Some(segment),
            Some(whole) => whole.append_segment(segment).ok()?,
        }
    }
    whole
}

/// The pool had too few buffers to fill a ring.
#[derive(Debug, thiserror::Error)]
#[error(
    "a receive ring takes {wanted} buffers, which pool '{pool}' does not have left; a smaller `depth` or `mtu` needs fewer"
)]
pub(crate) struct PoolDry {
    pool: String,
    /// Buffers that the ring takes.
    wanted: usize,
}

/// Where buffers come from, and what is counted.
pub(crate) struct Supply<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) blank: &'a Blank,
    pub(crate) counters: &'a QueueCounters,
}

impl Supply<'_> {
    /// Counts a packet whose buffer stays posted.
    #[cold]
    pub(crate) fn drop_one(&self, reason: DropReason) {
        self.counters.drops.add(reason, 1);
    }
}

/// A hardware's receive queue. All its work requests are posted all the time: whoever takes a filled buffer out puts a fresh one in its
/// place, or leaves it where it is.
pub(crate) trait ReceiveRing: Send + 'static {
    /// Whether nothing has come: then nothing else is asked. A ring that has to look deeper at times says no, and is asked to receive.
    #[inline(always)]
    fn is_idle(&mut self) -> bool {
        false
    }

    /// Appends what has arrived to the batch and posts as many buffers anew. Returns packets and bytes; an error is about what came behind
    /// them.
    fn receive(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>);

    /// Has the device announce the next packet. What is returned becomes readable then; `None` if nobody would be woken, or there is
    /// something already.
    fn wait(&mut self) -> Option<BorrowedFd<'_>>;
}

/// Receives packets for one worker.
pub(crate) struct Receiver<R> {
    ring: Option<R>,
    exchange: Arc<Exchange<R>>,
    counters: Arc<QueueCounters>,
    pool: Pool,
    blank: Blank,
}

impl<R: ReceiveRing> Receiver<R> {
    /// Receives by the ring that waits in `exchange`, whose buffers come from `pool`.
    pub(crate) fn new(exchange: Arc<Exchange<R>>, pool: Pool, blank: Blank) -> Self {
        let mut ring = None;
        exchange.visit(&mut ring);
        Self { ring, exchange, counters: Arc::default(), pool, blank }
    }

    #[inline(never)]
    fn burst(&mut self, batch: &mut Batch) {
        let Some(ring) = &mut self.ring else { return };
        let supply = Supply { pool: &self.pool, blank: &self.blank, counters: &self.counters };
        let (packets, bytes, result) = ring.receive(batch, &supply);
        self.counters.count_burst(packets, bytes);
        if let Err(fault) = result {
            self.give_up(fault);
        }
    }

    #[cold]
    fn give_up(&mut self, fault: Fault) {
        self.counters.drops.add(DropReason::BadDescriptor, 1);
        self.exchange.give_up(&mut self.ring, fault);
    }
}

impl<R: ReceiveRing> ReceiveQueue for Receiver<R> {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        if self.exchange.calls() {
            self.exchange.visit(&mut self.ring);
        }
        // A poll in vain is a few instructions, and none of the state of a burst.
        if self.ring.as_mut().is_none_or(ReceiveRing::is_idle) { self.counters.empty.add(1) } else { self.burst(batch) }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        // Whoever looks after the port waits for an answer.
        if self.exchange.calls() { None } else { self.ring.as_mut()?.wait() }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
