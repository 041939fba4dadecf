//! Completion queues, with compression.

use wirepath_nic_defs::mlx5::{
    self as defs, Arm, CQE_BYTES, CQE_OWNER, CqeOwner, FORMAT_COMPRESSED, MINI_BYTES, MINI_FORMAT_CSUM,
    MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH, MINIS_PER_ENTRY, RECORD_ARM, RECORD_CONSUMED,
};
use wirepath_nic_defs::uverbs::EVENT_CQ_ERR;

use crate::device::{Event, Owner};
use crate::faults::Lie;
use crate::host::Region;

/// Most packets of a compressed session.
pub(super) const MOST_MINIS: usize = 64;

/// How far ahead of their use lines of memory are asked for, in bytes.
const AHEAD: u64 = 256;

/// A whole entry before its last byte.
pub(super) type Entry = [u8; CQE_BYTES];

/// What a mini entry says of its packet.
#[derive(Clone, Copy, Debug, Default)]
struct Mini {
    hash: u32,
    checksum: u16,
    stride: u16,
    byte_count: u32,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq<R> {
    pub(super) number: u32,
    pub(super) owner: Owner,
    ring: R,
    record: R,
    log_entries: u32,
    /// Entries written, free-running.
    produced: u32,
    /// One of `MINI_FORMAT_*`, if receive completions may be compressed.
    compress: Option<u8>,
    /// The first packet of a session that is being gathered, and all of its packets.
    title: Entry,
    held: Vec<Mini>,
    armed: bool,
    /// In scan mode, what the record said when it was last looked at.
    asked: Option<u32>,
    overrun: bool,
    pub(super) completions: u64,
    pub(super) sessions: u64,
}

impl<R: Region> Cq<R> {
    pub(super) fn new(
        number: u32,
        ring: R,
        record: R,
        log_entries: u32,
        compress: Option<u8>,
        owner: Owner,
        scan: bool,
    ) -> Self {
        Self {
            number,
            owner,
            ring,
            record,
            log_entries,
            produced: 0,
            compress,
            title: [0; CQE_BYTES],
            held: Vec::with_capacity(MOST_MINIS),
            // In the record, the first time that it is armed looks like a fresh one.
            armed: scan,
            asked: scan.then_some(0),
            overrun: false,
            completions: 0,
            sessions: 0,
        }
    }

    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    fn consumed(&self) -> u32 {
        u32::from_be(self.record.load(4 * RECORD_CONSUMED as u64))
    }

    /// Whether `count` more entries fit. Drivers publish 24 bits or 16, so only what both have is compared.
    fn has_room(&mut self, count: u32, events: &mut Vec<Event>) -> bool {
        if self.overrun {
            return false;
        }
        let unread = self.produced.wrapping_sub(self.consumed()) & 0xffff;
        if self.log_entries < 16 && unread + count > self.entries() {
            self.overrun = true;
            events.push(Event::Object(self.owner, EVENT_CQ_ERR));
            return false;
        }
        true
    }

    pub(super) fn is_overrun(&self) -> bool {
        self.overrun
    }

    #[inline]
    fn offset(&self, counter: u32) -> u64 {
        u64::from(counter & (self.entries() - 1)) * CQE_BYTES as u64
    }

    /// Writes an entry at `counter`, the last word last.
    #[inline]
    fn put(&self, counter: u32, entry: &Entry, owner: CqeOwner) {
        let at = self.offset(counter);
        let _ = self.ring.write(at, &entry[..CQE_OWNER - 3]);
        let last = [entry[CQE_OWNER - 3], entry[CQE_OWNER - 2], entry[CQE_OWNER - 1], owner.0];
        self.ring.store(at + CQE_OWNER as u64 - 3, u32::from_ne_bytes(last));
        self.ring.release(at);
        self.ring.expect(at + AHEAD);
    }

    /// An entry of its own. `owner` has the opcode.
    #[inline]
    pub(super) fn complete(&mut self, entry: &Entry, owner: CqeOwner, events: &mut Vec<Event>) {
        self.flush(events);
        if !self.has_room(1, events) {
            return;
        }
        self.put(self.produced, entry, owner.with_owner(defs::cqe_owner(self.produced, self.log_entries)));
        self.produced = self.produced.wrapping_add(1);
        self.completions += 1;
        self.notify(events);
    }

    fn notify(&mut self, events: &mut Vec<Event>) {
        if let Some(before) = &mut self.asked {
            let asked = self.record.load(4 * RECORD_ARM as u64);
            self.armed |= std::mem::replace(before, asked) != asked;
        }
        if self.armed {
            self.armed = false;
            events.push(Event::Completion(self.owner));
        }
    }

    /// A received packet, which may be held back to share entries with others.
    #[inline]
    pub(super) fn receive(&mut self, entry: &Entry, events: &mut Vec<Event>) {
        let owner = CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND);
        let Some(format) = self.compress else {
            self.complete(entry, owner, events);
            return;
        };
        if !self.held.is_empty() && (!self.alike(entry, format) || self.held.len() == MOST_MINIS) {
            self.flush(events);
        }
        if self.held.is_empty() {
            self.title = *entry;
        }
        let half = |at: usize| u16::from_be_bytes([entry[at], entry[at + 1]]);
        let word = |at: usize| u32::from_be_bytes(entry[at..at + 4].try_into().expect("four bytes"));
        self.held.push(Mini {
            hash: word(defs::CQE_RX_HASH),
            checksum: half(defs::CQE_CHECKSUM),
            stride: half(0x3c),
            byte_count: word(0x2c),
        });
    }

    /// Whether all that the mini entries do not tell is as in the title.
    fn alike(&self, entry: &Entry, format: u8) -> bool {
        let same = |range: std::ops::Range<usize>| self.title[range.clone()] == entry[range];
        // The counter goes up by one for each packet, which only linear queues do.
        let counter = |entry: &Entry| u16::from_be_bytes([entry[0x3c], entry[0x3d]]);
        let told = match format {
            MINI_FORMAT_CSUM_STRIDE => same(0x02..0x04) && same(0x0c..0x11),
            MINI_FORMAT_CSUM => {
                same(0x0c..0x11) && counter(entry) == counter(&self.title).wrapping_add(self.held.len() as u16)
            }
            _ => counter(entry) == counter(&self.title).wrapping_add(self.held.len() as u16) && same(0x10..0x11),
        };
        told && same(0x00..0x02) && same(0x1c..0x24) && same(0x38..0x3c)
    }

    /// What was held back goes out.
    #[inline]
    pub(super) fn flush(&mut self, events: &mut Vec<Event>) {
        if self.held.is_empty() {
            return;
        }
        self.flush_held(events);
    }

    fn flush_held(&mut self, events: &mut Vec<Event>) {
        let held = std::mem::take(&mut self.held);
        let title = self.title;
        let owner = CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND);
        let mut rest = &held[..];
        let mut title = title;
        while !rest.is_empty() {
            let at = self.produced & (self.entries() - 1);
            // A session does not cross the end of the ring, and arrays of minis lie within it.
            let fits = (self.entries() - at) as usize;
            let n = rest.len().min(fits);
            if n < 2 {
                self.plain(&mut title, rest[0], owner, events);
                rest = &rest[1..];
                continue;
            }
            if !self.has_room(n as u32, events) {
                break;
            }
            self.session(&title, &rest[..n]);
            self.completions += n as u64;
            self.sessions += 1;
            self.notify(events);
            let counter = u16::from_be_bytes([title[0x3c], title[0x3d]]).wrapping_add(n as u16);
            title[0x3c..0x3e].copy_from_slice(&counter.to_be_bytes());
            rest = &rest[n..];
        }
        self.held = held;
        self.held.clear();
    }

    /// A packet by itself.
    fn plain(&mut self, title: &mut Entry, mini: Mini, owner: CqeOwner, events: &mut Vec<Event>) {
        let mut entry = *title;
        entry[0x2c..0x30].copy_from_slice(&mini.byte_count.to_be_bytes());
        entry[defs::CQE_RX_HASH..defs::CQE_RX_HASH + 4].copy_from_slice(&mini.hash.to_be_bytes());
        entry[defs::CQE_CHECKSUM..defs::CQE_CHECKSUM + 2].copy_from_slice(&mini.checksum.to_be_bytes());
        entry[0x3c..0x3e].copy_from_slice(&mini.stride.to_be_bytes());
        if !self.has_room(1, events) {
            return;
        }
        self.put(self.produced, &entry, owner.with_owner(defs::cqe_owner(self.produced, self.log_entries)));
        self.produced = self.produced.wrapping_add(1);
        self.completions += 1;
        self.notify(events);
        let counter = u16::from_be_bytes([title[0x3c], title[0x3d]]).wrapping_add(1);
        title[0x3c..0x3e].copy_from_slice(&counter.to_be_bytes());
    }

    /// Title and arrays: the first array in the next entry, the others where every eighth entry from the title would be.
    fn session(&mut self, title: &Entry, minis: &[Mini]) {
        let format = self.compress.unwrap_or(MINI_FORMAT_HASH);
        for (i, chunk) in minis.chunks(MINIS_PER_ENTRY).enumerate() {
            let mut array = [0; CQE_BYTES];
            for (mini, bytes) in chunk.iter().zip(array.chunks_exact_mut(MINI_BYTES)) {
                match format {
                    MINI_FORMAT_CSUM => bytes[..2].copy_from_slice(&mini.checksum.to_be_bytes()),
                    MINI_FORMAT_CSUM_STRIDE => {
                        bytes[..2].copy_from_slice(&mini.checksum.to_be_bytes());
                        bytes[2..4].copy_from_slice(&mini.stride.to_be_bytes());
                    }
                    _ => bytes[..4].copy_from_slice(&mini.hash.to_be_bytes()),
                }
                bytes[4..].copy_from_slice(&mini.byte_count.to_be_bytes());
            }
            let slot = if i == 0 { 1 } else { 8 * i as u32 };
            // Not an entry: its last byte is no owner.
            let _ = self.ring.write(self.offset(self.produced.wrapping_add(slot)), &array);
        }
        let mut entry = *title;
        entry[0x2c..0x30].copy_from_slice(&(minis.len() as u32).to_be_bytes());
        let owner = CqeOwner::default()
            .with_opcode(defs::CQE_RESPONDER_SEND)
            .with_format(FORMAT_COMPRESSED)
            .with_owner(defs::cqe_owner(self.produced, self.log_entries));
        self.put(self.produced, &entry, owner);
        self.produced = self.produced.wrapping_add(minis.len() as u32);
    }

    /// The register that arms was written.
    pub(super) fn arm(&mut self, arm: Arm, events: &mut Vec<Event>) {
        // Completions that are there already count as an event at once.
        if self.produced & defs::CONSUMED_MASK == arm.consumed() || self.produced & 0xffff == arm.consumed() {
            self.armed = true;
        } else {
            events.push(Event::Completion(self.owner));
        }
    }

    /// Writes an entry that lies.
    pub(super) fn lie(&mut self, entry: &Entry, owner: CqeOwner, lie: Lie, events: &mut Vec<Event>) {
        let (mut entry, mut owner) = (*entry, owner);
        match lie {
            Lie::Nothing => return,
            Lie::Owner => {
                self.flush(events);
                let wrong = defs::cqe_owner(self.produced, self.log_entries) ^ 1;
                self.put(self.produced, &entry, owner.with_owner(wrong));
                return;
            }
            Lie::Queue => {
                entry[0x21..0x24].fill(0xff);
                entry[0x39..0x3c].fill(0xff);
            }
            Lie::Kind => {
                let other =
                    if owner.opcode() == defs::CQE_REQUEST { defs::CQE_RESPONDER_SEND } else { defs::CQE_REQUEST };
                owner = owner.with_opcode(other);
            }
            Lie::Length => entry[0x2c..0x30].fill(0x7f),
            Lie::Empty => entry[0x2c..0x30].fill(0),
            Lie::Twice => self.complete(&entry, owner, events),
            Lie::Type => owner = owner.with_opcode(9),
            Lie::Position => entry[0x3c..0x3e].fill(0xee),
        }
        self.complete(&entry, owner, events);
    }
}
