//! Receive queues: one or several sockets, polled in turn.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::chunks::Chunks;
use super::posted::Posted;
use super::ring::Descriptor;
use super::socket::{BASE_MASK, CONTINUED, OFFSET_SHIFT, ReceiveRings, SHORTEST, Socket};
use crate::counters::QueueCounters;
use crate::drivers::kernel::checksums;
use crate::drops::DropReason;
use crate::packet::{Batch, METADATA, Packet, Pool};
use crate::port::{PortId, ReceiveQueue};

/// Buffers that are posted at once.
const REFILL: u32 = 32;
/// Bytes of two VLAN tags, which the MTU does not count.
const TAGS: usize = 8;
/// How far ahead of the packet at work the processor fetches.
const AHEAD: u32 = 4;

/// The frames' memory, on the receiving side.
pub(super) enum Buffers {
    /// Packets that the kernel fills. `None` only while the queue is being dropped.
    Pool(Option<Posted>),
    /// Chunks that frames are copied from.
    Own(Chunks),
}

/// The receiving side of one socket.
pub(super) struct Channel {
    // Before the socket: a mapped ring keeps it open, and it must be closed when its `left` goes.
    rings: ReceiveRings,
    socket: Arc<Socket>,
    buffers: Buffers,
    /// Buffers that are with the kernel when the channel is full.
    target: u32,
    /// The kernel says when it has to be woken; without, it never has to.
    need_wakeup: bool,
    /// First part of a frame whose rest is not there yet.
    partial: Option<Packet>,
    /// The rest of the frame at work is thrown away.
    discard: bool,
    /// The pool was dry at the last refill.
    starved: bool,
    /// Frames that the kernel dropped for want of buffers, as far as they are counted.
    starved_counted: u64,
}

/// A receive queue.
pub(super) struct Receive {
    channels: Vec<Channel>,
    /// The channel whose turn it is.
    turn: usize,
    common: Common,
    /// For sleeping on several sockets.
    epoll: Option<OwnedFd>,
    /// Never readable: what a queue without a device sleeps on.
    never: Option<OwnedFd>,
}

/// What the kernel of a local sender may leave undone in received frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaves {
    /// TCP and UDP checksums: completed.
    pub(super) checksums: bool,
    /// Segmentation. XDP does not tell the size of the segments, so that nobody can make it good: frames beyond the MTU are dropped.
    pub(super) superframes: bool,
}

/// What all channels of a queue use.
struct Common {
    pool: Pool,
    port: PortId,
    counters: Arc<QueueCounters>,
    scratch: Batch,
    leaves: Leaves,
    busy_poll: bool,
}

impl Channel {
    pub(super) fn new(
        socket: Arc<Socket>,
        rings: ReceiveRings,
        buffers: Buffers,
        target: u32,
        need_wakeup: bool,
    ) -> Self {
        let target = target.min(rings.fill.entries());
        Self {
            socket,
            rings,
            buffers,
            target,
            need_wakeup,
            partial: None,
            discard: false,
            starved: false,
            starved_counted: 0,
        }
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
        let longest = match common.leaves.superframes {
            true => self.socket.shared.frame_limit.load(Ordering::Relaxed) as usize + TAGS,
            false => usize::MAX,
        };
        for at in 0..n {
            if let Buffers::Pool(Some(posted)) = &self.buffers
                && at + AHEAD < n
            {
                posted.prefetch(peeked.get(at + AHEAD).address & BASE_MASK);
            }
            let descriptor = peeked.get(at);
            let (more, discarded) = (descriptor.options & CONTINUED != 0, self.discard);
            let taken = match &mut self.buffers {
                Buffers::Pool(posted) => {
                    posted.as_mut().ok_or(DropReason::BadDescriptor).and_then(|it| from_pool(it, descriptor))
                }
                Buffers::Own(chunks) => from_chunk(chunks, descriptor, &common.pool),
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
                Some(packet) if packet.len() < SHORTEST => short += 1,
                Some(packet) if packet.len() > longest => undone += 1,
                Some(mut packet) => {
                    packet.set_in_port(common.port);
                    bytes += packet.len() as u64;
                    let pushed = batch.push(packet);
                    debug_assert!(pushed.is_ok(), "no more descriptors were peeked than fit");
                }
                None => {}
            }
            // A frame of which a part is bad is thrown away to its end.
            self.discard = more && (discarded || self.partial.is_none());
        }
        peeked.release();
        let counters = &common.counters;
        let received = batch.len() - start;
        if common.leaves.checksums {
            let completed = batch.as_mut_slice()[start..].iter_mut().filter_map(checksums::complete).count();
            if completed > 0 {
                counters.completed_checksums.add(completed as u64);
            }
        }
        if received > 0 {
            counters.packets.add(received as u64);
            counters.bytes.add(bytes);
            counters.bursts.add(1);
            if matches!(self.buffers, Buffers::Own(_)) {
                counters.copied.add(received as u64);
            }
        }
        bad += self.rings.rx.take_impossible();
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
            Buffers::Pool(posted) => posted.as_ref().map_or(0, Posted::count),
            Buffers::Own(chunks) => chunks.count(),
        }
    }

    /// Gives the kernel as many buffers as it has lost, in bunches.
    fn refill(&mut self, common: &mut Common) {
        let mut missing = self.target.saturating_sub(self.posted());
        while missing >= REFILL.min(self.target) && missing > 0 {
            let mut reserved = self.rings.fill.reserve(missing.min(REFILL));
            let want = reserved.space() as usize;
            match &mut self.buffers {
                Buffers::Pool(None) => return,
                Buffers::Pool(Some(posted)) => {
                    common.pool.take_batch(want, &mut common.scratch);
                    common.scratch.drain_front(want, |packet| {
                        if let Ok(offset) = posted.insert(packet) {
                            reserved.push(offset);
                        }
                    });
                }
                Buffers::Own(chunks) => {
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
                if (got as usize) < want && !self.starved {
                    self.starved = true;
                    self.starved_counted = self.socket.starved();
                }
                return;
            }
        }
        if self.starved {
            self.starved = false;
            self.count_starved(common);
        }
    }

    /// Counts the frames that the kernel dropped while the pool was dry. A system call, made only after such a time.
    fn count_starved(&mut self, common: &Common) {
        let starved = self.socket.starved();
        common.counters.drops.add(DropReason::NoBuffer, starved.saturating_sub(self.starved_counted));
        self.starved_counted = starved;
    }

    /// Wakes the kernel's receiving side if it went to sleep for want of buffers.
    fn wake(&mut self, common: &Common) {
        if (self.need_wakeup && self.rings.fill.needs_wakeup()) || common.busy_poll {
            self.socket.kick_receive();
        }
    }
}

/// The packet that a descriptor names.
#[inline(always)]
fn from_pool(posted: &mut Posted, descriptor: Descriptor) -> Result<Packet, DropReason> {
    let (base, offset) = (descriptor.address & BASE_MASK, (descriptor.address >> OFFSET_SHIFT) as usize);
    let mut packet = posted.take(base).ok_or(DropReason::BadDescriptor)?;
    // The data cannot start in the metadata line, nor end behind the buffer: `set_data` looks at the latter.
    match offset.checked_sub(METADATA) {
        Some(headroom) if packet.set_data(headroom, descriptor.len as usize) => Ok(packet),
        _ => Err(DropReason::BadDescriptor),
    }
}

/// A packet with a copy of the chunk that a descriptor names.
fn from_chunk(chunks: &mut Chunks, descriptor: Descriptor, pool: &Pool) -> Result<Packet, DropReason> {
    let copy = |bytes: &[u8]| {
        let mut packet = pool.take()?;
        packet.extend_from_slice(bytes, pool).then_some(packet)
    };
    match chunks.take(descriptor.address, descriptor.len as usize, copy) {
        Some(packet) => packet.ok_or(DropReason::NoBuffer),
        None => Err(DropReason::BadDescriptor),
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // The kernel may write to what is posted until the socket is closed, which the transmit queue may still hold.
        if let Buffers::Pool(posted) = &mut self.buffers
            && let Some(posted) = posted.take()
        {
            self.socket.keep(posted, Vec::new());
        }
    }
}

impl Receive {
    /// A queue over these sockets, with their buffers posted.
    pub(super) fn new(
        channels: Vec<Channel>,
        pool: Pool,
        port: PortId,
        leaves: Leaves,
        busy_poll: bool,
    ) -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, epoll, eventfd};
        let mut common = Common { pool, port, counters: Arc::default(), scratch: Batch::new(), leaves, busy_poll };
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
        let never = Some(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(Self { channels, turn: 0, common, epoll, never })
    }

    /// Buffers with the kernel.
    pub(super) fn posted(&self) -> u32 {
        self.channels.iter().map(Channel::posted).sum()
    }
}

impl ReceiveQueue for Receive {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        for _ in 0..self.channels.len() {
            self.channels[self.turn].receive(batch, &mut self.common);
            self.turn += 1;
            if self.turn == self.channels.len() {
                self.turn = 0;
            }
            if batch.is_full() {
                break;
            }
        }
        if batch.len() == before {
            self.common.counters.empty.add(1);
        }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.common.counters
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        for channel in &mut self.channels {
            channel.refill(&mut self.common);
            channel.wake(&self.common);
            if channel.starved {
                // Buffers may be there again before frames are: somebody has to look.
                channel.count_starved(&self.common);
                return None;
            }
            if !channel.rings.rx.is_empty() {
                return None;
            }
            // A socket without its interface is readable for ever.
            if channel.socket.is_lost() || channel.socket.shared.lost.load(Ordering::Relaxed) {
                return self.never.as_ref().map(AsFd::as_fd);
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
    use crate::packet::HEADROOM;

    /// A queue with 64 buffers posted, and the kernel's side of its rings.
    fn queue(pool: &Pool, leaves: Leaves) -> (Receive, Producer<SharedDescriptor>, Consumer<AtomicU64>) {
        let ((kernel_rx, rx), (fill, kernel_fill)) = (fake::pair(64), fake::pair(64));
        let buffers = Buffers::Pool(Some(Posted::new(pool.region())));
        let channel = Channel::new(Socket::fake(), ReceiveRings { rx, fill }, buffers, 64, true);
        let queue = Receive::new(vec![channel], pool.clone(), 3, leaves, false);
        (queue.unwrap(), kernel_rx, kernel_fill)
    }

    const NOTHING: Leaves = Leaves { checksums: false, superframes: false };
    const START: u64 = ((METADATA + HEADROOM) as u64) << OFFSET_SHIFT;

    fn deliver(ring: &mut Producer<SharedDescriptor>, descriptors: &[(u64, u32, u32)]) {
        let mut reserved = ring.reserve(64);
        for &(address, len, options) in descriptors {
            assert!(reserved.push(Descriptor { address, len, options }));
        }
        reserved.commit();
    }

    /// Addresses that the queue has posted, in order.
    fn posted(ring: &mut Consumer<AtomicU64>) -> Vec<u64> {
        let peeked = ring.peek(64);
        let addresses = (0..peeked.len()).map(|i| peeked.get(i)).collect();
        peeked.release();
        addresses
    }

    #[test]
    fn descriptors_of_what_was_never_posted_are_counted_and_touch_nothing() {
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
                // Data in the metadata line; behind the buffer; of more bytes than it has.
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
        assert_eq!((batch.as_slice()[0].len(), batch.as_slice()[0].in_port()), (100, 3));
        assert_eq!(queue.counters().drops.get(DropReason::BadDescriptor), 7);
        drop((batch, queue));
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn a_frame_of_several_buffers_comes_whole_even_if_its_parts_come_apart() {
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

        // One bad part spoils the whole frame and nothing behind it.
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
        let (mut queue, mut kernel, mut fill) = queue(&pool, Leaves { checksums: true, superframes: true });
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
