//! Receive queues. Each polls one or several sockets in turn.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::posted_buffers::PostedBuffers;
use super::ring::Descriptor;
use super::socket::{BASE_MASK, CONTINUED, MIN_FRAME, OFFSET_SHIFT, RxRings, Socket};
use super::umem_chunks::UmemChunks;
use crate::drivers::kernel::common::checksums;
use crate::port::{PortId, RxDriver};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, METADATA, Packet, Pool};

/// Maximum number of buffers that are posted at once.
const REFILL_BURST: u32 = 32;
/// Bytes of two VLAN tags, which the MTU does not count.
const MAX_TAG_BYTES: usize = 8;
/// Prefetch distance in packets.
const PREFETCH_AHEAD: u32 = 4;

/// Memory of received frames.
pub(super) enum RxBuffers {
    /// Packets that the kernel fills. `None` only while the queue is being dropped.
    Pool(Option<PostedBuffers>),
    /// Chunks from which frames are copied.
    Separate(UmemChunks),
}

/// Receive side of one socket.
pub(super) struct SocketRx {
    // Dropped before the socket. A mapped ring keeps the socket open, which must be closed when its
    // `free_on_close` is dropped.
    rings: RxRings,
    socket: Arc<Socket>,
    buffers: RxBuffers,
    /// Number of buffers that the fully refilled kernel owns.
    target: u32,
    /// The kernel sets a flag when it needs a wakeup. Without this, it never needs one.
    need_wakeup: bool,
    /// First part of a frame whose remaining fragments have not arrived.
    partial: Option<Packet>,
    /// Discard the remaining fragments of the current frame.
    discard: bool,
    /// The pool was empty at the last refill.
    starved: bool,
}

/// A receive queue.
pub(super) struct Receiver {
    channels: Vec<SocketRx>,
    /// Index of the socket that is polled next.
    next_socket: usize,
    common: Common,
    /// Wakes on any of several sockets.
    epoll: Option<OwnedFd>,
    /// A descriptor that never becomes readable, for a queue whose device is lost.
    never_ready: Option<OwnedFd>,
}

/// Work that the kernel of a local sender may leave undone in received frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingOffloads {
    /// TCP and UDP checksums, which the port completes.
    pub(super) checksums: bool,
    /// Segmentation. XDP does not report the segment size, so superframes cannot be segmented: frames beyond
    /// the MTU are dropped.
    pub(super) superframes: bool,
}

/// State shared by all sockets of a queue.
struct Common {
    pool: Pool,
    port: PortId,
    counters: Arc<QueueCounters>,
    scratch: Batch,
    pending_offloads: PendingOffloads,
    busy_poll: bool,
}

impl SocketRx {
    pub(super) fn new(socket: Arc<Socket>, rings: RxRings, buffers: RxBuffers, target: u32, need_wakeup: bool) -> Self {
        let target = target.min(rings.fill.entries());
        Self { socket, rings, buffers, target, need_wakeup, partial: None, discard: false, starved: false }
    }

    fn receive(&mut self, batch: &mut Batch, common: &mut Common) {
        let peeked = self.rings.rx.peek(batch.space() as u32);
        let n = peeked.len();
        if n == 0 {
            self.refill(common);
            self.wake(common);
            return;
        }
        let start = batch.len();
        let (mut bad, mut short, mut dry, mut undone, mut bytes) = (0, 0, 0, 0, 0);
        let longest = match common.pending_offloads.superframes {
            true => self.socket.shared.frame_limit.load(Ordering::Relaxed) as usize + MAX_TAG_BYTES,
            false => usize::MAX,
        };
        for at in 0..n {
            if let RxBuffers::Pool(Some(posted)) = &self.buffers
                && at + PREFETCH_AHEAD < n
            {
                posted.prefetch(peeked.get(at + PREFETCH_AHEAD).address & BASE_MASK);
            }
            let descriptor = peeked.get(at);
            let (more, discarded) = (descriptor.options & CONTINUED != 0, self.discard);
            let taken = match &mut self.buffers {
                RxBuffers::Pool(posted) => {
                    posted.as_mut().ok_or(DropReason::BadDescriptor).and_then(|it| from_pool(it, descriptor))
                }
                RxBuffers::Separate(chunks) => from_chunk(chunks, descriptor, &common.pool),
            };
            let packet = match (self.partial.take(), taken) {
                _ if discarded => None,
                (None, Ok(packet)) => Some(packet),
                (Some(mut head), Ok(part)) => match head.append_segment(part) {
                    Ok(()) => Some(head),
                    Err(_) => {
                        bad += 1;
                        None
                    }
                },
                (_, Err(reason)) => {
                    if reason == DropReason::NoBuffer {
                        dry += 1;
                    } else {
                        bad += 1;
                    }
                    None
                }
            };
            match packet {
                Some(packet) if more => self.partial = Some(packet),
                Some(packet) if packet.len() < MIN_FRAME => short += 1,
                Some(packet) if packet.len() > longest => undone += 1,
                Some(mut packet) => {
                    packet.set_in_port(common.port);
                    bytes += packet.len() as u64;
                    let pushed = batch.push(packet);
                    debug_assert!(pushed.is_ok(), "no more descriptors were peeked than fit");
                }
                None => {}
            }
            // A frame with a bad fragment is discarded up to its end.
            self.discard = more && (discarded || self.partial.is_none());
        }
        peeked.release();
        let counters = &common.counters;
        let received = batch.len() - start;
        if common.pending_offloads.checksums {
            let completed = batch.as_mut_slice()[start..].iter_mut().filter_map(checksums::complete).count();
            if completed > 0 {
                counters.completed_checksums.add(completed as u64);
            }
        }
        if received > 0 {
            counters.packets.add(received as u64);
            counters.bytes.add(bytes);
            counters.bursts.add(1);
            if matches!(self.buffers, RxBuffers::Separate(_)) {
                counters.copied.add(received as u64);
            }
        }
        bad += self.rings.rx.take_invalid_indices();
        for (reason, n) in [
            (DropReason::BadDescriptor, bad),
            (DropReason::TooShort, short),
            (DropReason::NoBuffer, dry),
            (DropReason::KernelOffload, undone),
        ] {
            if n > 0 {
                counters.drops.add(reason, n);
            }
        }
        self.refill(common);
        self.wake(common);
    }

    fn posted(&self) -> u32 {
        match &self.buffers {
            RxBuffers::Pool(posted) => posted.as_ref().map_or(0, PostedBuffers::count),
            RxBuffers::Separate(chunks) => chunks.outstanding(),
        }
    }

    /// Posts buffers until the kernel owns `target` of them, in bursts.
    fn refill(&mut self, common: &mut Common) {
        let mut missing = self.target.saturating_sub(self.posted());
        while missing >= REFILL_BURST.min(self.target) && missing > 0 {
            let mut reserved = self.rings.fill.reserve(missing.min(REFILL_BURST));
            let want = reserved.space() as usize;
            match &mut self.buffers {
                RxBuffers::Pool(None) => return,
                RxBuffers::Pool(Some(posted)) => {
                    common.pool.take_batch(want, &mut common.scratch);
                    common.scratch.drain_front(want, |packet| {
                        if let Ok(offset) = posted.insert(packet) {
                            reserved.push(offset);
                        }
                    });
                }
                RxBuffers::Separate(chunks) => {
                    while reserved.space() > 0
                        && let Some(address) = chunks.post()
                    {
                        reserved.push(address);
                    }
                }
            }
            let got = reserved.commit();
            missing -= got;
            if (got as usize) < want || got == 0 {
                if (got as usize) < want {
                    self.starved = true;
                    self.socket.shared.pool_was_empty.store(true, Ordering::Relaxed);
                }
                return;
            }
        }
        self.starved = false;
    }

    /// Wakes the kernel's receive side if it sleeps for lack of buffers.
    fn wake(&mut self, common: &Common) {
        if (self.need_wakeup && self.rings.fill.needs_wakeup()) || common.busy_poll {
            self.socket.kick_rx();
        }
    }
}

/// Returns the packet of a descriptor.
#[inline(always)]
fn from_pool(posted: &mut PostedBuffers, descriptor: Descriptor) -> Result<Packet, DropReason> {
    let (base, offset) = (descriptor.address & BASE_MASK, (descriptor.address >> OFFSET_SHIFT) as usize);
    let mut packet = posted.take(base).ok_or(DropReason::BadDescriptor)?;
    // The data must start behind the metadata; `set_data` checks that it ends inside the buffer.
    match offset.checked_sub(METADATA) {
        Some(headroom) if packet.set_data(headroom, descriptor.len as usize) => Ok(packet),
        _ => Err(DropReason::BadDescriptor),
    }
}

/// Returns a packet with a copy of the descriptor's chunk.
fn from_chunk(chunks: &mut UmemChunks, descriptor: Descriptor, pool: &Pool) -> Result<Packet, DropReason> {
    let copy = |bytes: &[u8]| {
        let mut packet = pool.take()?;
        packet.extend_from_slice(bytes, pool).then_some(packet)
    };
    match chunks.complete(descriptor.address, descriptor.len as usize, copy) {
        Some(packet) => packet.ok_or(DropReason::NoBuffer),
        None => Err(DropReason::BadDescriptor),
    }
}

impl Drop for SocketRx {
    fn drop(&mut self) {
        // The kernel may write to posted buffers until the socket is closed, and the transmit queue may still
        // hold the socket.
        if let RxBuffers::Pool(posted) = &mut self.buffers
            && let Some(posted) = posted.take()
        {
            self.socket.free_on_close(posted, Vec::new());
        }
    }
}

impl Receiver {
    /// Creates a queue on these sockets and posts their buffers.
    pub(super) fn new(
        channels: Vec<SocketRx>,
        pool: Pool,
        port: PortId,
        pending_offloads: PendingOffloads,
        busy_poll: bool,
    ) -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, epoll, eventfd};
        let mut common =
            Common { pool, port, counters: Arc::default(), scratch: Batch::new(), pending_offloads, busy_poll };
        let mut channels = channels;
        for channel in &mut channels {
            channel.refill(&mut common);
        }
        let epoll = if channels.len() > 1 {
            let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            for channel in &channels {
                epoll::add(&set, &*channel.socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            }
            Some(set)
        } else {
            None
        };
        let never_ready = Some(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(Self { channels, next_socket: 0, common, epoll, never_ready })
    }

    /// Returns the number of buffers that the kernel owns.
    pub(super) fn posted(&self) -> u32 {
        self.channels.iter().map(SocketRx::posted).sum()
    }
}

impl RxDriver for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        for _ in 0..self.channels.len() {
            self.channels[self.next_socket].receive(batch, &mut self.common);
            self.next_socket += 1;
            if self.next_socket == self.channels.len() {
                self.next_socket = 0;
            }
            if batch.is_full() {
                break;
            }
        }
        if batch.len() == before {
            self.common.counters.empty.add(1);
        }
    }

    fn waiting(&mut self) -> Option<u32> {
        Some(self.channels.iter_mut().fold(0, |sum, channel| sum.saturating_add(channel.rings.rx.available())))
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.common.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.common.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        for channel in &mut self.channels {
            channel.refill(&mut self.common);
            channel.wake(&self.common);
            if channel.starved {
                // Buffers may become free before frames arrive, so the worker must keep polling.
                return None;
            }
            if !channel.rings.rx.is_empty() {
                return None;
            }
            // A socket whose interface is gone stays readable for ever.
            if channel.socket.is_lost() || channel.socket.shared.lost.load(Ordering::Relaxed) {
                return self.never_ready.as_ref().map(AsFd::as_fd);
            }
        }
        match &self.epoll {
            Some(set) => Some(set.as_fd()),
            None => self.channels.first().map(|channel| channel.socket.as_fd()),
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::ring::{Consumer, Producer, SharedDescriptor, fake};
    use super::*;
    use wirepath_packet::HEADROOM;

    /// Returns a queue with 64 posted buffers, and the kernel's side of its rings.
    fn queue(
        pool: &Pool,
        pending_offloads: PendingOffloads,
    ) -> (Receiver, Producer<SharedDescriptor>, Consumer<AtomicU64>) {
        let ((kernel_rx, rx), (fill, kernel_fill)) = (fake::pair(64), fake::pair(64));
        let buffers = RxBuffers::Pool(Some(PostedBuffers::new(pool.region())));
        let channel = SocketRx::new(Socket::fake(), RxRings { rx, fill }, buffers, 64, true);
        let queue = Receiver::new(vec![channel], pool.clone(), PortId::new(3), pending_offloads, false);
        (queue.unwrap(), kernel_rx, kernel_fill)
    }

    const NOTHING: PendingOffloads = PendingOffloads { checksums: false, superframes: false };
    const START: u64 = ((METADATA + HEADROOM) as u64) << OFFSET_SHIFT;

    fn deliver(ring: &mut Producer<SharedDescriptor>, descriptors: &[(u64, u32, u32)]) {
        let mut reserved = ring.reserve(64);
        for &(address, len, options) in descriptors {
            assert!(reserved.push(Descriptor { address, len, options }));
        }
        reserved.commit();
    }

    /// Returns the addresses that the queue has posted, in order.
    fn posted(ring: &mut Consumer<AtomicU64>) -> Vec<u64> {
        let peeked = ring.peek(64);
        let addresses = (0..peeked.len()).map(|i| peeked.get(i)).collect();
        peeked.release();
        addresses
    }

    #[test]
    fn descriptors_of_unposted_buffers_are_counted() {
        let pool = Pool::new("hostile", 300).unwrap();
        let (mut queue, mut kernel, mut fill) = queue(&pool, NOTHING);
        let at = posted(&mut fill);
        assert_eq!(at.len(), 64);
        let region = pool.region().bytes() as u64;
        deliver(
            &mut kernel,
            &[
                ((at[0] + 1) | START, 100, 0),
                (region | START, 100, 0),
                (BASE_MASK | START, 100, 0),
                // Data in the metadata; data behind the buffer; more bytes than the buffer has.
                (at[1] | 63 << OFFSET_SHIFT, 100, 0),
                (at[2] | 0xffff << OFFSET_SHIFT, 1, 0),
                (at[3] | START, u32::MAX, 0),
                (at[4] | START, 100, 0),
                (at[4] | START, 100, 0),
            ],
        );
        let mut batch = Batch::new();
        queue.receive(&mut batch);
        assert_eq!(batch.len(), 1, "one of them was right");
        assert_eq!((batch.as_slice()[0].len(), batch.as_slice()[0].in_port()), (100, Some(PortId::new(3))));
        assert_eq!(queue.counters().drops.get(DropReason::BadDescriptor), 7);
        drop((batch, queue));
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn fragments_of_several_bursts_form_one_frame() {
        let pool = Pool::new("parts", 300).unwrap();
        let (mut queue, mut kernel, mut fill) = queue(&pool, NOTHING);
        let at = posted(&mut fill);
        let mut batch = Batch::new();
        deliver(&mut kernel, &[(at[0] | START, 2048, CONTINUED), (at[1] | START, 2048, CONTINUED)]);
        queue.receive(&mut batch);
        assert!(batch.is_empty());
        deliver(&mut kernel, &[(at[2] | START, 7, 0), (at[3] | START, 64, 0)]);
        queue.receive(&mut batch);
        assert_eq!(batch.iter().map(|p| (p.len(), p.segment_count())).collect::<Vec<_>>(), [(4103, 3), (64, 1)]);

        // A bad fragment invalidates its whole frame, but no later frame.
        let bad = pool.region().bytes() as u64;
        deliver(
            &mut kernel,
            &[(at[4] | START, 2048, CONTINUED), (bad, 2048, CONTINUED), (at[5] | START, 9, 0), (at[6] | START, 65, 0)],
        );
        batch.clear();
        queue.receive(&mut batch);
        assert_eq!(batch.iter().map(Packet::len).collect::<Vec<_>>(), [65]);
        assert_eq!(queue.counters().drops.get(DropReason::BadDescriptor), 1);
        drop((batch, queue));
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn short_frames_and_superframes_are_dropped_by_reason() {
        let pool = Pool::new("lengths", 300).unwrap();
        let (mut queue, mut kernel, mut fill) = queue(&pool, PendingOffloads { checksums: true, superframes: true });
        queue.channels[0].socket.shared.frame_limit.store(1514, Ordering::Relaxed);
        let at = posted(&mut fill);
        deliver(&mut kernel, &[(at[0] | START, 13, 0), (at[1] | START, 1522, 0), (at[2] | START, 1523, 0)]);
        let mut batch = Batch::new();
        queue.receive(&mut batch);
        assert_eq!(batch.iter().map(Packet::len).collect::<Vec<_>>(), [1522]);
        let drops: Vec<_> = queue.counters().drops.nonzero().collect();
        assert_eq!(drops, [(DropReason::TooShort, 1), (DropReason::KernelOffload, 1)]);
    }

    #[test]
    fn buffers_are_posted_again_and_a_dry_pool_is_survived() {
        let pool = Pool::new("dry", 64).unwrap();
        let (mut queue, mut kernel, mut fill) = queue(&pool, NOTHING);
        let at = posted(&mut fill);
        let mut batch = Batch::new();
        deliver(&mut kernel, &at.iter().map(|at| (at | START, 60, 0)).collect::<Vec<_>>());
        queue.receive(&mut batch);
        assert_eq!(batch.len(), 64);
        queue.receive(&mut Batch::new());
        assert!(posted(&mut fill).is_empty(), "no buffer was free");
        drop(batch);
        queue.receive(&mut Batch::new());
        assert_eq!(posted(&mut fill).len(), 64);
    }
}
