//! Transmit queues. Each uses one socket.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ring::{Descriptor, Reserved, SharedDescriptor};
use super::socket::{CONTINUED, Kick, MIN_FRAME, OFFSET_SHIFT, PortState, Socket, TxRings};
use super::tx_in_flight::TxInFlight;
use super::umem_chunks::{CHUNK, UmemChunks};
use crate::drivers::sw_offload;
use crate::port::TxDriver;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, DATA_ROOM, HEADROOM, METADATA, Packet, Pool};

/// Maximum number of descriptors of one frame: the default of the kernel's `MAX_SKB_FRAGS`.
pub(super) const MAX_SEGMENTS: usize = 17;
/// Length of the longest frame in one buffer. Such a frame has no headroom.
pub(super) const MAX_SINGLE_BUFFER: usize = HEADROOM + DATA_ROOM;
/// Maximum number of wakeups in one burst. In copy mode each moves at least 32 packets; the rest goes with
/// the next burst.
const MAX_KICKS: usize = 8;

/// Memory of transmitted frames.
pub(super) enum TxFrames {
    /// Packets of the registered region. `None` only while the queue is being dropped.
    Pool(Option<TxInFlight>),
    /// Chunks into which frames are copied.
    Separate(UmemChunks),
}

/// A transmit queue.
pub(super) struct Sender {
    // Dropped before the socket. A mapped ring keeps the socket open, which must be closed when its
    // `free_on_close` is dropped.
    rings: TxRings,
    socket: Arc<Socket>,
    frames: TxFrames,
    counters: Arc<QueueCounters>,
    /// Provides buffers for copies of packets from other regions.
    pool: Pool,
    /// A frame may have several descriptors.
    fragments: bool,
    /// The kernel sets a flag when it needs a wakeup.
    need_wakeup: bool,
    done: Batch,
    /// The packets that the kernel never took are counted.
    unsent_counted: bool,
}

impl Sender {
    pub(super) fn new(
        socket: Arc<Socket>,
        rings: TxRings,
        frames: TxFrames,
        pool: Pool,
        fragments: bool,
        need_wakeup: bool,
    ) -> Self {
        let counters = Arc::default();
        Self {
            socket,
            rings,
            frames,
            counters,
            pool,
            fragments,
            need_wakeup,
            done: Batch::new(),
            unsent_counted: false,
        }
    }

    /// Frees the packets that the kernel has sent.
    fn reap_completions(&mut self) {
        loop {
            let peeked = self.rings.completion.peek(BATCH as u32);
            let (n, mut bad) = (peeked.len(), 0);
            for at in 0..n {
                let known = match &mut self.frames {
                    TxFrames::Pool(Some(flight)) => flight.complete(peeked.get(at), &mut self.done),
                    TxFrames::Pool(None) => true,
                    TxFrames::Separate(chunks) => chunks.complete(peeked.get(at), 0, |_| ()).is_some(),
                };
                bad += u64::from(!known);
            }
            peeked.release();
            self.done.clear();
            bad += self.rings.completion.take_invalid_indices();
            if bad > 0 {
                self.counters.drops.add(DropReason::BadDescriptor, bad);
            }
            if n < BATCH as u32 {
                return;
            }
        }
    }

    /// Returns the number of descriptors that may be posted: at most as many as the completion ring can
    /// complete.
    fn free_descriptors(&self) -> u32 {
        self.rings.tx.entries().saturating_sub(self.with_kernel())
    }

    /// Returns the number of descriptors that the kernel has not completed.
    fn with_kernel(&self) -> u32 {
        match &self.frames {
            TxFrames::Pool(flight) => flight.as_ref().map_or(0, TxInFlight::descriptors),
            TxFrames::Separate(chunks) => chunks.outstanding(),
        }
    }

    /// Wakes the kernel until it has taken all descriptors or makes no progress.
    fn kick(&mut self) {
        if self.need_wakeup && !self.rings.tx.needs_wakeup() {
            return;
        }
        let mut pending = self.rings.tx.pending();
        for _ in 0..MAX_KICKS {
            if pending == 0 {
                return;
            }
            let kick = self.socket.kick_tx();
            let left = self.rings.tx.pending();
            // Stopping loses nothing: pending descriptors stay in the ring until the next burst or `reclaim`.
            if kick != Kick::Again || left == pending {
                return;
            }
            pending = left;
        }
    }

    /// Counts the packets that the kernel never took as dropped instead of sent, once.
    pub(super) fn count_unsent(&mut self, reason: DropReason) {
        if std::mem::replace(&mut self.unsent_counted, true) {
            return;
        }
        let (mut packets, mut bytes) = (0, 0);
        self.rings.tx.each_pending(|descriptor| {
            packets += u64::from(descriptor.options & CONTINUED == 0);
            bytes += u64::from(descriptor.len);
        });
        self.counters.count_unsent(reason, packets, bytes);
    }

    /// Returns whether the kernel has sent everything.
    pub(super) fn is_idle(&self) -> bool {
        self.free_descriptors() == self.rings.tx.entries()
    }
}

/// Returns the maximum number of descriptors for a packet, sent in place or as a copy.
#[inline(always)]
fn descriptors_of(packet: &Packet) -> u32 {
    let copied = packet.len().div_ceil(DATA_ROOM).max(1);
    let own = if packet.is_chain() { packet.segment_count() } else { 1 };
    // A chain with more segments than the kernel accepts is copied into fewer.
    if own > MAX_SEGMENTS { copied as u32 } else { own.max(copied) as u32 }
}

/// Returns the length of the longest frame that may be sent. VLAN tags do not count into the MTU.
fn frame_limit_of(shared: &PortState, head: &[u8]) -> u64 {
    let is_tag = |at: usize| matches!(head.get(at..at + 2), Some([0x81, 0x00] | [0x88, 0xa8]));
    let tags = if !is_tag(12) {
        0
    } else if !is_tag(16) {
        4
    } else {
        8
    };
    shared.frame_limit.load(Ordering::Relaxed) + tags
}

/// Posts a packet of the pool's region, or a copy of another one. Returns whether it was copied.
#[inline(always)]
fn post(
    packet: Packet,
    flight: &mut TxInFlight,
    reserved: &mut Reserved<'_, SharedDescriptor>,
    pool: &Pool,
    fragments: bool,
) -> Result<bool, DropReason> {
    let packet = if packet.is_chain() {
        packet
    } else {
        match post_single_buffer(packet, flight, reserved) {
            Ok(()) => return Ok(false),
            Err(packet) => packet,
        }
    };
    post_slow_path(packet, flight, reserved, pool, fragments)
}

#[inline(always)]
fn post_single_buffer(
    packet: Packet,
    flight: &mut TxInFlight,
    reserved: &mut Reserved<'_, SharedDescriptor>,
) -> Result<(), Packet> {
    let (offset, len) = ((METADATA + packet.headroom()) as u64, packet.len() as u32);
    let base = flight.insert(packet)?;
    let pushed = reserved.push(Descriptor { address: base | offset << OFFSET_SHIFT, len, options: 0 });
    debug_assert!(pushed, "room was looked at");
    Ok(())
}

/// Slow path: chains, and packets of other regions.
#[cold]
fn post_slow_path(
    packet: Packet,
    flight: &mut TxInFlight,
    reserved: &mut Reserved<'_, SharedDescriptor>,
    pool: &Pool,
    fragments: bool,
) -> Result<bool, DropReason> {
    let packet = if fragments && packet.is_chain() {
        match post_chain(packet, flight, reserved) {
            Ok(()) => return Ok(false),
            Err(packet) => packet,
        }
    } else {
        packet
    };
    let copy = if packet.len() <= MAX_SINGLE_BUFFER {
        let mut copy = pool.take().ok_or(DropReason::NoBuffer)?;
        let headroom = if packet.len() > DATA_ROOM { 0 } else { HEADROOM };
        if !copy.set_data(headroom, packet.len()) {
            return Err(DropReason::TooLong);
        }
        packet.copy_to(copy.data_mut());
        copy
    } else if fragments {
        packet.duplicate(pool).ok_or(DropReason::NoBuffer)?
    } else {
        return Err(DropReason::TooLong);
    };
    drop(packet);
    let posted =
        if copy.is_chain() { post_chain(copy, flight, reserved) } else { post_single_buffer(copy, flight, reserved) };
    // This fails only if even the copy has too many segments.
    posted.map(|()| true).map_err(|_| DropReason::TooLong)
}

/// Posts the segments of a chain in place, if they lie in the UMEM and are few enough.
fn post_chain(
    packet: Packet,
    flight: &mut TxInFlight,
    reserved: &mut Reserved<'_, SharedDescriptor>,
) -> Result<(), Packet> {
    let mut descriptors = [Descriptor::default(); MAX_SEGMENTS];
    let mut offsets = [0; MAX_SEGMENTS];
    let (mut n, mut reachable) = (0, true);
    for segment in packet.dma_segments().filter(|segment| segment.len > 0) {
        let (Some(base), true) = (flight.buffer_offset(&segment), n < MAX_SEGMENTS) else {
            reachable = false;
            break;
        };
        let address = base | (segment.offset as u64 - base) << OFFSET_SHIFT;
        offsets[n] = base;
        descriptors[n] = Descriptor { address, len: segment.len as u32, options: CONTINUED };
        n += 1;
    }
    if !reachable || n == 0 || reserved.space() < n as u32 {
        return Err(packet);
    }
    descriptors[n - 1].options = 0;
    flight.insert_chain(packet, &offsets[..n])?;
    for descriptor in &descriptors[..n] {
        reserved.push(*descriptor);
    }
    Ok(())
}

/// Posts a copy in chunks of the separate UMEM.
fn post_copy(
    packet: &Packet,
    chunks: &mut UmemChunks,
    reserved: &mut Reserved<'_, SharedDescriptor>,
    fragments: bool,
) -> Result<bool, DropReason> {
    if packet.len() > CHUNK * if fragments { MAX_SEGMENTS } else { 1 } {
        return Err(DropReason::TooLong);
    }
    let mut left = packet.len();
    let mut segments = packet.segments();
    let mut rest: &[u8] = &[];
    while left > 0 {
        let room = left.min(CHUNK);
        let mut filled = 0;
        // Yields the parts of this chunk: the rest of a segment, then further segments.
        let mut parts = std::iter::from_fn(|| {
            if filled == room {
                return None;
            }
            if rest.is_empty() {
                rest = segments.by_ref().find(|segment| !segment.is_empty())?;
            }
            let (now, later) = rest.split_at(rest.len().min(room - filled));
            filled += now.len();
            rest = later;
            Some(now)
        });
        let (address, n) = chunks.post_copy(&mut parts, room).ok_or(DropReason::TxFull)?;
        left -= room;
        let options = if left > 0 { CONTINUED } else { 0 };
        reserved.push(Descriptor { address, len: n as u32, options });
    }
    Ok(true)
}

impl TxDriver for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        let counters = &*self.counters;
        if self.socket.shared.lost.load(Ordering::Relaxed) {
            counters.drops.add(DropReason::DeviceLost, batch.len() as u64);
            batch.clear();
            return;
        }
        self.reap_completions();
        let room = self.free_descriptors();
        let counters = &*self.counters;
        let mut reserved = self.rings.tx.reserve(room);
        // Number of packets for which all descriptors fit.
        let (mut fit, mut left) = (0, reserved.space());
        for packet in batch.iter() {
            let need = match self.frames {
                TxFrames::Pool(_) => descriptors_of(packet),
                TxFrames::Separate(_) => packet.len().div_ceil(CHUNK).max(1) as u32,
            };
            if need > left {
                break;
            }
            left -= need;
            fit += 1;
        }
        let (shared, pool, fragments, frames) = (&self.socket.shared, &self.pool, self.fragments, &mut self.frames);
        let plain = shared.frame_limit.load(Ordering::Relaxed);
        let (mut packets, mut bytes, mut copied) = (0u64, 0u64, 0u64);
        batch.drain_front(fit, |mut packet| {
            if let Err(reason) = sw_offload::apply(&mut packet) {
                return counters.drops.add(reason, 1);
            }
            let len = packet.len();
            if len < MIN_FRAME {
                return counters.drops.add(DropReason::TooShort, 1);
            }
            if len as u64 > plain && len as u64 > frame_limit_of(shared, packet.data()) {
                return counters.drops.add(DropReason::TooLong, 1);
            }
            let posted = match frames {
                TxFrames::Pool(Some(flight)) => post(packet, flight, &mut reserved, pool, fragments),
                TxFrames::Pool(None) => Err(DropReason::TxError),
                TxFrames::Separate(chunks) => post_copy(&packet, chunks, &mut reserved, fragments),
            };
            match posted {
                Ok(was_copied) => {
                    packets += 1;
                    bytes += len as u64;
                    copied += u64::from(was_copied);
                }
                Err(reason) => counters.drops.add(reason, 1),
            }
        });
        reserved.commit();
        if packets > 0 {
            counters.packets.add(packets);
            counters.bytes.add(bytes);
            counters.bursts.add(1);
            if copied > 0 {
                counters.copied.add(copied);
            }
        } else {
            counters.empty.add(1);
        }
        self.kick();
    }

    fn reclaim(&mut self) {
        self.reap_completions();
        self.kick();
    }

    fn in_flight(&self) -> Option<u32> {
        Some(self.with_kernel())
    }

    fn count_lost(&mut self) {
        self.count_unsent(DropReason::DeviceLost);
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

impl Drop for Sender {
    fn drop(&mut self) {
        // The kernel may read packets in flight until the socket is closed, and the receive queue may still
        // hold the socket.
        if let TxFrames::Pool(flight) = &mut self.frames
            && let Some(flight) = flight.take()
        {
            let (posted, chains) = flight.into_parts();
            self.socket.free_on_close(posted, chains);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::posted_buffers::PostedBuffers;
    use super::super::ring::{Consumer, Producer, fake};
    use super::*;

    /// Returns a queue of 8 descriptors, and the kernel's side of its rings.
    fn queue(pool: &Pool, fragments: bool) -> (Sender, Consumer<SharedDescriptor>, Producer<AtomicU64>) {
        let ((tx, kernel_tx), (kernel_completion, completion)) = (fake::pair(8), fake::pair(8));
        let flight = TxInFlight::new(PostedBuffers::new(pool.region()), 8);
        let socket = Socket::fake();
        socket.shared.frame_limit.store(9014, Ordering::Relaxed);
        let frames = TxFrames::Pool(Some(flight));
        let queue = Sender::new(socket, TxRings { tx, completion }, frames, pool.clone(), fragments, true);
        (queue, kernel_tx, kernel_completion)
    }

    fn packet(pool: &Pool, len: usize) -> Packet {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&vec![7; len], pool));
        packet
    }

    fn sent(ring: &mut Consumer<SharedDescriptor>) -> Vec<Descriptor> {
        let peeked = ring.peek(8);
        let descriptors = (0..peeked.len()).map(|i| peeked.get(i)).collect();
        peeked.release();
        descriptors
    }

    fn complete(ring: &mut Producer<AtomicU64>, addresses: &[u64]) {
        let mut reserved = ring.reserve(8);
        addresses.iter().for_each(|&address| assert!(reserved.push(address)));
        reserved.commit();
    }

    #[test]
    fn transmit_stops_at_a_full_ring() {
        let pool = Pool::new("fits", 300).unwrap();
        let (mut queue, mut kernel, mut completions) = queue(&pool, true);
        let mut batch: Batch = (0..10).map(|_| packet(&pool, 100)).collect();
        queue.transmit(&mut batch);
        assert_eq!(batch.len(), 2);
        let first = sent(&mut kernel);
        assert_eq!(first.len(), 8);
        queue.transmit(&mut batch);
        assert_eq!(batch.len(), 2, "the kernel has taken them, but not sent");
        complete(&mut completions, &[first[3].address, first[0].address]);
        queue.transmit(&mut batch);
        assert_eq!((batch.len(), sent(&mut kernel).len()), (0, 2));
        assert_eq!(pool.outstanding(), 8);
        drop(queue);
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn completions_of_unsent_packets_are_counted() {
        let pool = Pool::new("lies", 300).unwrap();
        let (mut queue, mut kernel, mut completions) = queue(&pool, true);
        let mut batch: Batch = [packet(&pool, 100)].into_iter().collect();
        queue.transmit(&mut batch);
        let address = sent(&mut kernel)[0].address;
        complete(&mut completions, &[address + 64, u64::MAX, 0x1234 << 20, address, address]);
        queue.reclaim();
        assert_eq!(queue.counters().drops.get(DropReason::BadDescriptor), 4);
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn chains_go_out_in_place_or_as_copies_or_not_at_all() {
        let pool = Pool::new("chains", 300).unwrap();
        let (mut with, mut kernel, _completions) = queue(&pool, true);
        let mut batch: Batch = [packet(&pool, 5000)].into_iter().collect();
        with.transmit(&mut batch);
        let descriptors = sent(&mut kernel);
        assert_eq!(descriptors.iter().map(|d| d.len).collect::<Vec<_>>(), [2048, 2048, 904]);
        assert_eq!(descriptors.iter().map(|d| d.options).collect::<Vec<_>>(), [CONTINUED, CONTINUED, 0]);
        // More segments than the kernel accepts: the bytes are copied into fewer.
        let mut many = packet(&pool, 20);
        for _ in 0..MAX_SEGMENTS {
            assert!(many.append_segment(packet(&pool, 20)).is_ok());
        }
        batch.push(many).unwrap();
        with.transmit(&mut batch);
        assert_eq!(sent(&mut kernel).iter().map(|d| (d.len, d.options)).collect::<Vec<_>>(), [(360, 0)]);
        assert_eq!(with.counters().copied.get(), 1);

        let (mut without, mut kernel, _completions) = queue(&pool, false);
        let mut short_chain = packet(&pool, 1500);
        assert!(short_chain.append_segment(packet(&pool, 700)).is_ok());
        batch.extend([short_chain, packet(&pool, 5000)]);
        without.transmit(&mut batch);
        assert_eq!(sent(&mut kernel).iter().map(|d| (d.len, d.options)).collect::<Vec<_>>(), [(2200, 0)]);
        assert_eq!(without.counters().drops.get(DropReason::TooLong), 1);
        drop((with, without));
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn unsendable_packets_are_dropped_by_reason() {
        let pool = Pool::new("reasons", 300).unwrap();
        let (mut queue, mut kernel, _completions) = queue(&pool, true);
        queue.socket.shared.frame_limit.store(1514, Ordering::Relaxed);
        let mut tagged = packet(&pool, 1518);
        tagged.data_mut()[12..14].copy_from_slice(&[0x81, 0]);
        let mut batch: Batch =
            [packet(&pool, 13), packet(&pool, 1515), packet(&pool, 1514), tagged].into_iter().collect();
        queue.transmit(&mut batch);
        assert_eq!(sent(&mut kernel).iter().map(|d| d.len).collect::<Vec<_>>(), [1514, 1518]);
        let drops: Vec<_> = queue.counters().drops.nonzero().collect();
        assert_eq!(drops, [(DropReason::TooLong, 1), (DropReason::TooShort, 1)]);
    }
}
