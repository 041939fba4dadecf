// UNSAFETY: swaps posted buffers for free ones in the thread's cache of the pool.
#![allow(unsafe_code)]

//! The worker's side of a receive queue, and the buffers that are posted to the device.

use std::any::Any;
use std::fmt;
use std::mem::take;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::quarantine::QueueTeardown;
use super::queue_fault::QueueFault;
use super::ring_handoff::RingHandoff;
use crate::port::RxDriver;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::driver::PoolCacheHandle;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, DATA_ROOM, MetaTemplate, Packet, Pool};

/// Hardware objects that all receive queues of a port share: the rules and queue pairs of RSS, which hold the
/// work queues. While these exist, the device may write to every posted buffer. Therefore the buffers of
/// dropped rings are kept here.
pub(crate) struct RssGroup {
    teardown: Mutex<QueueTeardown>,
    retired: Mutex<Vec<Box<[Packet]>>>,
}

impl RssGroup {
    /// `teardown` holds the objects that must be destroyed before posted buffers are free.
    pub(crate) fn new(teardown: QueueTeardown) -> Arc<Self> {
        Arc::new(Self { teardown: Mutex::new(teardown), retired: Mutex::default() })
    }
}

impl Drop for RssGroup {
    fn drop(&mut self) {
        let retired = take(self.retired.get_mut().unwrap_or_else(PoisonError::into_inner));
        let count = retired.iter().map(|packets| packets.len()).sum();
        self.teardown.get_mut().unwrap_or_else(PoisonError::into_inner).release(retired, count);
    }
}

impl fmt::Debug for RssGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RssGroup").finish_non_exhaustive()
    }
}

/// Posted buffers in the order of their work requests; the device writes to them. This must be the last field
/// of a ring, so that the owner of the hardware queue is dropped first.
pub(crate) struct PostedBuffers {
    packets: Box<[Packet]>,
    rss_group: Arc<RssGroup>,
}

impl PostedBuffers {
    /// Allocates `wanted` free buffers.
    pub(crate) fn allocate(
        wanted: usize,
        pool: &Pool,
        template: &MetaTemplate,
        rss_group: Arc<RssGroup>,
    ) -> Result<Self, PoolExhausted> {
        let mut packets = Vec::with_capacity(wanted);
        while packets.len() < wanted {
            let mut batch = Batch::new();
            if pool.take_batch_from_template(wanted - packets.len(), &mut batch, template) == 0 {
                return Err(PoolExhausted { pool: pool.name().to_owned(), wanted });
            }
            batch.drain_front(BATCH, |packet| packets.push(packet));
        }
        Ok(Self { packets: packets.into(), rss_group })
    }
}

impl Deref for PostedBuffers {
    type Target = [Packet];

    #[inline(always)]
    fn deref(&self) -> &[Packet] {
        &self.packets
    }
}

impl DerefMut for PostedBuffers {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Packet] {
        &mut self.packets
    }
}

impl Drop for PostedBuffers {
    fn drop(&mut self) {
        self.rss_group.retired.lock().unwrap_or_else(PoisonError::into_inner).push(take(&mut self.packets));
    }
}

/// Returns the number of buffers for a frame of `frame` bytes.
pub(crate) const fn buffers_for(frame: usize) -> usize {
    frame.div_ceil(DATA_ROOM)
}

/// Swaps received buffers for free ones. Returns a packet of `len` bytes made of the first buffers of
/// `slots`. If the pool has too few free buffers, nothing is swapped.
pub(crate) fn swap_received(cache: &PoolCacheHandle<'_>, slots: &mut [Packet], len: u32) -> Option<Packet> {
    let wanted = buffers_for(len as usize);
    if slots.len() < wanted || !cache.has_free(wanted) {
        return None;
    }
    let (mut whole, mut left): (Option<Packet>, u32) = (None, len);
    for slot in &mut slots[..wanted] {
        let here = left.min(DATA_ROOM as u32);
        left -= here;
        let segment = cache.swap(slot, here)?;
        match &mut whole {
            None => whole = Some(segment),
            Some(whole) => whole.append_segment(segment).ok()?,
        }
    }
    whole
}

/// The pool has too few buffers to fill a ring.
#[derive(Debug, thiserror::Error)]
#[error(
    "a receive ring needs {wanted} buffers, more than pool '{pool}' has free; \
     reduce `depth` or `mtu`, or enlarge the pool"
)]
pub(crate) struct PoolExhausted {
    pool: String,
    /// Number of buffers for the ring.
    wanted: usize,
}

/// Source of buffers, and counters, for a receive ring.
pub(crate) struct RxResources<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) template: &'a MetaTemplate,
    pub(crate) counters: &'a QueueCounters,
}

impl RxResources<'_> {
    /// Returns the calling thread's cache of the pool, for one call of a ring.
    ///
    /// Rings keep handle and burst in local variables and pass packets of [`PostedBuffers`] only. They do not use the
    /// pool in another way during a burst.
    #[inline(always)]
    pub(crate) fn cache_handle(&self) -> Option<PoolCacheHandle<'_>> {
        // SAFETY: `PostedBuffers` takes its packets from the queue's pool, and only swaps change them. All rings are in
        // this module tree and keep to the rule above: the handle is dropped before the call ends, and a burst has the
        // cache to itself.
        unsafe { self.pool.cache_handle(self.template) }
    }

    /// Counts a dropped packet, whose buffers stay posted.
    #[cold]
    pub(crate) fn count_drop(&self, reason: DropReason) {
        self.counters.drops.add(reason, 1);
    }
}

/// A receive ring. All its work requests are always posted: a received buffer is either swapped for a free
/// one, or stays in place.
pub(crate) trait RxRing: Send + 'static {
    /// Returns true if there is nothing to receive; then [`Self::receive`] is not called. A ring that needs
    /// an occasional check returns false.
    #[inline(always)]
    fn is_idle(&mut self) -> bool {
        false
    }

    /// Appends received packets to the batch and reposts their work requests. Returns packets and bytes. An
    /// error concerns what follows these packets.
    fn receive(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64, Result<(), QueueFault>);

    /// Returns the number of packets that wait, if the completion queue tells it; see [`RxDriver::waiting`].
    fn waiting(&self) -> Option<u32> {
        None
    }

    /// Arms the interrupt of the queue. The descriptor becomes readable at the next packet. `None` if the
    /// queue has no interrupt, or if packets are already waiting.
    fn arm_interrupt(&mut self) -> Option<BorrowedFd<'_>>;
}

/// Receive queue of one worker.
pub(crate) struct NicRxQueue<R> {
    ring: Option<R>,
    handoff: Arc<RingHandoff<R>>,
    counters: Arc<QueueCounters>,
    pool: Pool,
    template: MetaTemplate,
}

impl<R: RxRing> NicRxQueue<R> {
    /// Creates a queue for the ring that waits in `handoff`; its buffers come from `pool`.
    pub(crate) fn new(handoff: Arc<RingHandoff<R>>, pool: Pool, template: MetaTemplate) -> Self {
        let mut ring = None;
        handoff.poll(&mut ring);
        Self { ring, handoff, counters: Arc::default(), pool, template }
    }

    #[inline(never)]
    fn burst(&mut self, batch: &mut Batch) {
        let Some(ring) = &mut self.ring else { return };
        let resources = RxResources { pool: &self.pool, template: &self.template, counters: &self.counters };
        let (packets, bytes, result) = ring.receive(batch, &resources);
        self.counters.count_burst(packets, bytes);
        if let Err(fault) = result {
            self.return_broken(fault);
        }
    }

    #[cold]
    fn return_broken(&mut self, fault: QueueFault) {
        self.counters.drops.add(DropReason::BadDescriptor, 1);
        self.handoff.return_broken(&mut self.ring, fault);
    }
}

impl<R: RxRing> RxDriver for NicRxQueue<R> {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        if self.handoff.needs_poll() {
            self.handoff.poll(&mut self.ring);
        }
        // An empty poll takes a few instructions and touches no burst state.
        if self.ring.as_mut().is_none_or(RxRing::is_idle) { self.counters.empty.add(1) } else { self.burst(batch) }
    }

    fn waiting(&mut self) -> Option<u32> {
        self.ring.as_ref()?.waiting()
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        // The control thread waits for the worker, which therefore must not sleep.
        if self.handoff.needs_poll() { None } else { self.ring.as_mut()?.arm_interrupt() }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
