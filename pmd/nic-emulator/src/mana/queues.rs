//! Rings: work queues and completion queues.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeTail, WQE_UNIT};

use super::Tail;
use crate::device::{ContextId, Event, ObjectId, Owner};
use crate::faults::Lie;
use crate::host::Region;

/// What send and receive queues have in common.
#[derive(Debug)]
pub(super) struct Work<R> {
    pub(super) ring: R,
    /// Bytes, a power of two.
    pub(super) bytes: u32,
    /// Units consumed, free-running.
    pub(super) head: u32,
    /// Units posted, free-running.
    pub(super) tail: u32,
    /// Bytes as the doorbells count them.
    tail_bytes: u32,
    pub(super) stopped: bool,
    pub(super) context: ContextId,
    pub(super) pd: ObjectId,
    pub(super) doorbells: u64,
}

impl<R: Region> Work<R> {
    pub(super) fn new(ring: R, bytes: u32, context: ContextId, pd: ObjectId) -> Self {
        Self { ring, bytes, head: 0, tail: 0, tail_bytes: 0, stopped: false, context, pd, doorbells: 0 }
    }

    /// Units posted and not consumed.
    #[inline]
    pub(super) fn posted(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Offset in the ring of `bytes` behind the head.
    #[inline]
    pub(super) fn at(&self, bytes: u32) -> u64 {
        u64::from(self.head.wrapping_mul(WQE_UNIT).wrapping_add(bytes) & (self.bytes - 1))
    }

    /// What lies so many bytes behind the head will soon be fetched, and cleared in scan mode.
    #[inline]
    pub(super) fn expect(&self, bytes: u32) {
        self.ring.expect(self.at(bytes));
    }

    /// A doorbell.
    pub(super) fn advance(&mut self, tail: Tail) -> Result<(), String> {
        let now = match tail {
            Tail::Is(bytes) => bytes,
            Tail::Grows(bytes) => self.tail_bytes.wrapping_add(bytes),
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
                "tail {now} is {grown} bytes ahead of the last one, {posted} are posted already, and the ring has {}: backwards, or an overrun",
                self.bytes
            ));
        }
        self.tail_bytes = now;
        self.tail = self.tail.wrapping_add(grown / WQE_UNIT);
        Ok(())
    }

    /// Takes `units` away; in scan mode clears them, so that the next pass is seen.
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
        // The line is left.
        if clear && line != (self.head & !1).wrapping_mul(WQE_UNIT) {
            self.ring.release(u64::from(line & (self.bytes - 1)));
        }
    }
}

/// A send queue.
#[derive(Debug)]
pub(super) struct Sq<R> {
    pub(super) number: u32,
    pub(super) work: Work<R>,
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
    /// Told when a queue pair spreads packets over it.
    pub(super) number: Option<u32>,
    pub(super) work: Work<R>,
    pub(super) cq: ObjectId,
    pub(super) owner: Owner,
    pub(super) max_sge: u32,
    /// Queue pairs whose table names it.
    pub(super) users: u32,
    pub(super) held: Held,
    pub(super) received: u64,
    pub(super) received_bytes: u64,
    pub(super) no_buffer: u64,
    pub(super) truncated: u64,
    pub(super) errors: u64,
}

/// Completions of packets that wait to share an entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) count: u32,
    pub(super) flags: u32,
    pub(super) packets: [(u16, u32); 4],
    pub(super) wqe: u32,
}

/// A completion entry but for its last word, in pairs of words: what is put together in small stores and read in large ones waits for all
/// stores before.
pub(super) type Entry = [u64; 8];

/// Two words of an entry.
#[inline(always)]
pub(super) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Entries that are published at once at most.
const MOST_UNPUBLISHED: u32 = 32;
/// How far ahead of their use lines of memory are asked for, in bytes.
pub(super) const AHEAD: u32 = 256;

/// A completion queue.
///
/// Of the entries of a burst the first is written last ([`Self::publish`]): a driver that waits for it finds all of them, and takes no
/// lines away from the device meanwhile.
#[derive(Debug)]
pub(super) struct Cq<R> {
    /// Told when a queue is made that reports to it.
    pub(super) number: Option<u32>,
    /// A queue has reported to it: its memory went to that one, and no other can have it.
    pub(super) spent: bool,
    pub(super) owner: Owner,
    ring: R,
    pub(super) entries: u32,
    /// Entry that is written next, and the pass of the ring that it belongs to. The first pass has number 1.
    index: u32,
    pass: u32,
    /// Entries that the application said it has taken.
    taken: u32,
    armed: bool,
    pub(super) produced: u64,
    /// The first entry that is not published, with its index, and how many there are with it.
    first: (u32, Entry, CqeTail),
    unpublished: u32,
}

impl<R: Region> Cq<R> {
    pub(super) fn new(ring: R, entries: u32, owner: Owner) -> Self {
        Self {
            number: None,
            spent: false,
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

    /// Writes an entry, which may have to be published.
    #[inline(always)]
    pub(super) fn complete(&mut self, entry: &Entry, tail: CqeTail, events: &mut Vec<Event>) {
        let tail = tail.with_owner(self.pass);
        if self.unpublished == MOST_UNPUBLISHED.min(self.entries / 2) {
            self.publish();
        }
        if self.unpublished == 0 {
            self.first = (self.index, *entry, tail);
        } else {
            self.put(self.index, entry, tail);
        }
        self.unpublished += 1;
        self.ring.expect(u64::from(self.index) * u64::from(defs::CQE_BYTES) + u64::from(AHEAD));
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

    /// All entries that were completed can be seen from now on.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.unpublished > 0 {
            let (index, entry, tail) = &self.first;
            self.put(*index, entry, *tail);
            self.unpublished = 0;
        }
    }

    /// The last word last.
    #[inline(always)]
    fn put(&self, index: u32, entry: &Entry, tail: CqeTail) {
        let at = u64::from(index) * u64::from(defs::CQE_BYTES);
        let [front @ .., last] = *entry;
        let last = last | pair(0, tail.0);
        self.ring.store_line(at, &std::array::from_fn(|i| front.get(i).copied().unwrap_or(last).to_le()));
        self.ring.release(at);
    }

    /// Writes an entry that lies.
    pub(super) fn lie(&mut self, entry: &Entry, tail: CqeTail, lie: Lie, events: &mut Vec<Event>) {
        self.publish();
        let mut entry = *entry;
        let mut tail = tail;
        let transmit = tail.is_sq() == 1;
        match lie {
            Lie::Nothing => return,
            Lie::Owner => {
                self.put(self.index, &entry, tail.with_owner(self.pass.wrapping_add(3)));
                return;
            }
            Lie::Queue => tail = tail.with_queue(0xff_fff0),
            Lie::Kind => tail = tail.with_is_sq(1 - tail.is_sq()),
            Lie::Length => entry[1] |= 0xffff,
            Lie::Empty => entry[1] &= !0xffff,
            Lie::Twice => self.complete(&entry, tail, events),
            Lie::Type => entry[0] |= 0x3f,
            Lie::Position if transmit => entry[1] |= pair(u32::MAX, 0),
            Lie::Position => entry[7] |= pair(u32::MAX, 0),
        }
        self.complete(&entry, tail, events);
        self.publish();
    }

    /// A doorbell: openvmm's `gdma` model of arming.
    pub(super) fn announce(&mut self, tail: Tail, arm: bool, events: &mut Vec<Event>) -> Result<(), String> {
        let modulus = 8 * self.entries;
        let produced =
            ((u64::from(self.pass) * u64::from(self.entries) + u64::from(self.index)) % u64::from(modulus)) as u32;
        let tail = match tail {
            Tail::Is(tail) => tail % modulus,
            Tail::Grows(entries) => (self.taken + entries) % modulus,
        };
        let unread = (produced + modulus - tail) % modulus;
        if unread > self.entries {
            return Err(format!("tail {tail} leaves {unread} entries unread, and the ring has {}", self.entries));
        }
        self.taken = tail;
        self.armed = arm && unread == 0;
        if arm && unread > 0 {
            events.push(Event::Completion(self.owner));
        }
        Ok(())
    }
}
