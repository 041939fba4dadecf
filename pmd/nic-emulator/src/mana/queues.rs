//! Work queues and completion queues.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeTail, RxFlags, WQE_UNIT};

use super::TailUpdate;
use crate::device::{ContextId, Event, EventTarget, ObjectId};
use crate::faults::CqeCorruption;
use crate::host::Region;

/// State that send and receive queues have in common.
#[derive(Debug)]
pub(super) struct WorkQueue<R> {
    pub(super) ring: R,
    /// Size of the ring in bytes, a power of two.
    pub(super) bytes: u32,
    /// Number of consumed units, free-running.
    pub(super) head: u32,
    /// Number of posted units, free-running.
    pub(super) tail: u32,
    /// Tail in bytes, as doorbells count it.
    tail_bytes: u32,
    pub(super) stopped: bool,
    pub(super) context: ContextId,
    pub(super) pd: ObjectId,
    pub(super) doorbells: u64,
}

impl<R: Region> WorkQueue<R> {
    pub(super) fn new(ring: R, bytes: u32, context: ContextId, pd: ObjectId) -> Self {
        Self { ring, bytes, head: 0, tail: 0, tail_bytes: 0, stopped: false, context, pd, doorbells: 0 }
    }

    /// Returns the number of units that are posted and not consumed.
    #[inline]
    pub(super) fn posted(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Returns the ring offset of the byte at `bytes` behind the head.
    #[inline]
    pub(super) fn at(&self, bytes: u32) -> u64 {
        u64::from(self.head.wrapping_mul(WQE_UNIT).wrapping_add(bytes) & (self.bytes - 1))
    }

    /// Prefetches the line at `bytes` behind the head, which is fetched soon, and cleared in scan mode.
    #[inline]
    pub(super) fn prefetch_write(&self, bytes: u32) {
        self.ring.prefetch_write(self.at(bytes));
    }

    /// Handles a doorbell.
    pub(super) fn advance(&mut self, tail: TailUpdate) -> Result<(), String> {
        let now = match tail {
            TailUpdate::Absolute(bytes) => bytes,
            TailUpdate::Increment(bytes) => self.tail_bytes.wrapping_add(bytes),
        };
        if now % WQE_UNIT != 0 {
            return Err(format!("tail {now} is not a multiple of {WQE_UNIT} bytes"));
        }
        if self.stopped {
            return Err("the queue is stopped after an error".to_owned());
        }
        let grown = now.wrapping_sub(self.tail_bytes);
        let posted = self.posted() * WQE_UNIT;
        if grown > self.bytes - posted {
            return Err(format!(
                "tail {now} is {grown} bytes ahead, with {posted} posted and a ring of {}: backwards, or an overrun",
                self.bytes
            ));
        }
        self.tail_bytes = now;
        self.tail = self.tail.wrapping_add(grown / WQE_UNIT);
        Ok(())
    }

    /// Consumes `units`. With `clear`, in scan mode, it zeroes them, so that the next pass of the ring is
    /// recognised.
    #[inline]
    pub(super) fn consume(&mut self, units: u32, clear: bool) {
        if clear {
            for unit in 0..units {
                let _ = self.ring.write(self.at(unit * WQE_UNIT), &[0; WQE_UNIT as usize]);
            }
            self.tail = self.head.wrapping_add(units);
            self.tail_bytes = self.tail.wrapping_mul(WQE_UNIT);
        }
        let line = (self.head & !1).wrapping_mul(WQE_UNIT);
        self.head = self.head.wrapping_add(units);
        // The head has moved to another cache line.
        if clear && line != (self.head & !1).wrapping_mul(WQE_UNIT) {
            self.ring.demote(u64::from(line & (self.bytes - 1)));
        }
    }
}

/// A send queue.
#[derive(Debug)]
pub(super) struct Sq<R> {
    pub(super) number: u32,
    pub(super) work: WorkQueue<R>,
    pub(super) cq: ObjectId,
    pub(super) cq_number: u32,
    pub(super) port: usize,
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
    pub(super) errors: u64,
    pub(super) completions: u64,
}

/// A receive queue.
#[derive(Debug)]
pub(super) struct Rq<R> {
    /// Hardware number, assigned when an RSS queue pair uses the queue.
    pub(super) number: Option<u32>,
    pub(super) work: WorkQueue<R>,
    pub(super) cq: ObjectId,
    pub(super) owner: EventTarget,
    pub(super) max_sge: u32,
    /// Number of queue pairs whose table names the queue.
    pub(super) users: u32,
    pub(super) pending: PendingCqe,
    pub(super) received: u64,
    pub(super) received_bytes: u64,
    pub(super) no_buffer: u64,
    pub(super) truncated: u64,
    pub(super) errors: u64,
}

/// Received packets whose completion waits for further packets in the same entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PendingCqe {
    pub(super) count: u32,
    pub(super) flags: u32,
    pub(super) packets: [(u16, u32); 4],
    pub(super) wqe: u32,
}

/// A completion entry except its last word, in pairs of words. Loads that are wider than the preceding stores
/// would wait for these stores, so entries are built in wide stores.
pub(super) type Entry = [u64; 8];

/// Combines two words of an entry.
#[inline(always)]
pub(super) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Returns the bits that change if correct checksums are called wrong, and wrong ones correct.
fn inverted_checksums(flags: RxFlags) -> RxFlags {
    let (ip, tcp, udp) =
        (flags.ip_ok() | flags.ip_bad(), flags.tcp_ok() | flags.tcp_bad(), flags.udp_ok() | flags.udp_bad());
    let all = RxFlags::default().with_ip_ok(ip).with_ip_bad(ip).with_tcp_ok(tcp).with_tcp_bad(tcp);
    all.with_udp_ok(udp).with_udp_bad(udp)
}

/// Maximum number of entries that are published together.
const MAX_UNPUBLISHED: u32 = 32;
/// Prefetch distance in bytes.
pub(super) const PREFETCH_BYTES: u32 = 256;

/// A completion queue.
///
/// The first entry of a burst is written last ([`Self::publish`]). A driver that waits for it then finds all
/// entries, and does not take cache lines away from the device in the meantime.
#[derive(Debug)]
pub(super) struct Cq<R> {
    /// Hardware number, assigned when a queue that reports here is created.
    pub(super) number: Option<u32>,
    /// True if the queue has served a work queue. Its memory then belongs to that queue, and no other can use
    /// it.
    pub(super) used: bool,
    pub(super) owner: EventTarget,
    ring: R,
    pub(super) entries: u32,
    /// Index of the next entry, and the number of the current pass of the ring. The first pass has number 1.
    index: u32,
    pass: u32,
    /// Number of entries that the application has consumed, as its doorbells report.
    taken: u32,
    armed: bool,
    pub(super) produced: u64,
    /// The first unpublished entry with its index, and the number of unpublished entries.
    first: (u32, Entry, CqeTail),
    unpublished: u32,
}

impl<R: Region> Cq<R> {
    pub(super) fn new(ring: R, entries: u32, owner: EventTarget) -> Self {
        Self {
            number: None,
            used: false,
            owner,
            ring,
            entries,
            index: 0,
            pass: 1,
            taken: 0,
            armed: true,
            produced: 0,
            first: (0, [0; 8], CqeTail::default()),
            unpublished: 0,
        }
    }

    /// Writes an entry; it is visible to the driver after [`Self::publish`].
    #[inline(always)]
    pub(super) fn complete(&mut self, entry: &Entry, tail: CqeTail, events: &mut Vec<Event>) {
        let tail = tail.with_owner(self.pass);
        if self.unpublished == MAX_UNPUBLISHED.min(self.entries / 2) {
            self.publish();
        }
        if self.unpublished == 0 {
            self.first = (self.index, *entry, tail);
        } else {
            self.put(self.index, entry, tail);
        }
        self.unpublished += 1;
        self.ring.prefetch_write(u64::from(self.index) * u64::from(defs::CQE_BYTES) + u64::from(PREFETCH_BYTES));
        self.index += 1;
        if self.index == self.entries {
            self.index = 0;
            self.pass = self.pass.wrapping_add(1);
        }
        self.produced += 1;
        if self.armed {
            self.armed = false;
            events.push(Event::Completion(self.owner));
        }
    }

    /// Publishes all entries.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.unpublished > 0 {
            let (index, entry, tail) = &self.first;
            self.put(*index, entry, *tail);
            self.unpublished = 0;
        }
    }

    /// Writes an entry; its last word is written last.
    #[inline(always)]
    fn put(&self, index: u32, entry: &Entry, tail: CqeTail) {
        let at = u64::from(index) * u64::from(defs::CQE_BYTES);
        let [front @ .., last] = *entry;
        let last = last | pair(0, tail.0);
        self.ring.store_line(at, &std::array::from_fn(|i| front.get(i).copied().unwrap_or(last).to_le()));
        self.ring.demote(at);
    }

    /// Writes a corrupt entry.
    pub(super) fn complete_corrupted(
        &mut self,
        entry: &Entry,
        tail: CqeTail,
        corruption: CqeCorruption,
        events: &mut Vec<Event>,
    ) {
        self.publish();
        let mut entry = *entry;
        let mut tail = tail;
        let transmit = tail.is_sq() == 1;
        match corruption {
            CqeCorruption::Missing => return,
            CqeCorruption::Owner => {
                self.put(self.index, &entry, tail.with_owner(self.pass.wrapping_add(3)));
                return;
            }
            CqeCorruption::Queue => tail = tail.with_queue(0xff_fff0),
            CqeCorruption::Kind => tail = tail.with_is_sq(1 - tail.is_sq()),
            CqeCorruption::Length => entry[1] |= 0xffff,
            CqeCorruption::ZeroLength => entry[1] &= !0xffff,
            CqeCorruption::Duplicate => self.complete(&entry, tail, events),
            CqeCorruption::Type => entry[0] |= 0x3f,
            CqeCorruption::Position if transmit => entry[1] |= pair(u32::MAX, 0),
            CqeCorruption::Position => entry[7] |= pair(u32::MAX, 0),
            CqeCorruption::Timestamp => {}
            CqeCorruption::Checksum => entry[0] ^= pair(0, inverted_checksums(RxFlags((entry[0] >> 32) as u32)).0),
        }
        self.complete(&entry, tail, events);
        self.publish();
    }

    /// Handles a doorbell: updates the tail and arms the queue, as OpenVMM's `gdma` does.
    pub(super) fn update_tail(&mut self, tail: TailUpdate, arm: bool, events: &mut Vec<Event>) -> Result<(), String> {
        let modulus = 8 * self.entries;
        let produced =
            ((u64::from(self.pass) * u64::from(self.entries) + u64::from(self.index)) % u64::from(modulus)) as u32;
        let tail = match tail {
            TailUpdate::Absolute(tail) => tail % modulus,
            TailUpdate::Increment(entries) => (self.taken + entries) % modulus,
        };
        let unread = (produced + modulus - tail) % modulus;
        if unread > self.entries {
            return Err(format!("tail {tail} leaves {unread} entries unread, but the ring has {}", self.entries));
        }
        self.taken = tail;
        self.armed = arm && unread == 0;
        if arm && unread > 0 {
            events.push(Event::Completion(self.owner));
        }
        Ok(())
    }
}
