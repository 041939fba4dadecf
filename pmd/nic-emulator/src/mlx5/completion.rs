//! Completion queues, with compression.

use std::sync::atomic::{Ordering, fence};

use wirepath_nic_defs::mlx5::{
    self as defs, Arm, CQE_BYTES, CqeOwner, FORMAT_COMPRESSED, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE,
    MINI_FORMAT_HASH, MINIS_PER_ENTRY, RECORD_ARM, RECORD_CONSUMED,
};
use wirepath_nic_defs::uverbs::EVENT_CQ_ERR;

use crate::device::{Event, Owner};
use crate::faults::Lie;
use crate::host::Region;

/// Most packets of a compressed session.
pub(super) const MOST_MINIS: usize = 64;

/// Entries that are published at once at most.
const MOST_UNPUBLISHED: u32 = 32;

/// How far ahead of their use lines of memory are asked for, in bytes.
const AHEAD: u64 = 256;

/// A whole entry before its last byte.
pub(super) type Entry = [u8; CQE_BYTES];

/// The same by words, in the order of memory. What is put together byte by byte and read by words has to wait for the last byte.
type Words = [u64; CQE_BYTES / 8];

fn words(entry: &Entry) -> Words {
    std::array::from_fn(|i| u64::from_ne_bytes(entry.as_chunks::<8>().0[i]))
}

/// What the entry of a received packet says.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    pub(super) packet_info: u8,
    /// Of the descriptor, if it has strides.
    pub(super) request: u16,
    pub(super) hash: u32,
    pub(super) hash_type: u8,
    pub(super) checksum: u16,
    /// [`defs::CqeFlags`], and below them the VLAN tag that was taken off.
    pub(super) described: u32,
    pub(super) user_index: u32,
    pub(super) metadata: u32,
    /// Bytes, or what is told instead.
    pub(super) count: u32,
    pub(super) time: u64,
    pub(super) tag: u32,
    /// Descriptor or stride.
    pub(super) position: u16,
}

impl Told {
    #[inline(always)]
    fn words(&self) -> Words {
        let pair = |first: u32, second: u32| (u64::from(first) << 32 | u64::from(second)).to_be();
        let high = |byte: u8| u32::from(byte) << 24;
        [
            pair(high(self.packet_info) | u32::from(self.request), 0),
            pair(0, self.hash),
            pair(high(self.hash_type), u32::from(self.checksum) << 16),
            pair(0, self.described),
            pair(self.user_index, self.metadata),
            pair(0, self.count),
            self.time.to_be(),
            pair(self.tag, u32::from(self.position) << 16),
        ]
    }

    /// By bytes, for those who change some.
    pub(super) fn entry(&self) -> Entry {
        let mut entry = [0; CQE_BYTES];
        let words = self.words();
        entry.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_ne_bytes());
        entry
    }

    /// What a mini entry says of the packet.
    #[inline]
    fn mini(&self, format: u8) -> u64 {
        let first = match format {
            MINI_FORMAT_CSUM => u32::from(self.checksum) << 16,
            MINI_FORMAT_CSUM_STRIDE => u32::from(self.checksum) << 16 | u32::from(self.position),
            _ => self.hash,
        };
        u64::from(first) << 32 | u64::from(self.count)
    }

    /// Whether all that the mini entry of this packet, `behind` that of a title, does not tell is as in the title. The hash, which only one
    /// format tells, need not be: Linux's driver takes it for unknown where minis do not tell it (mlx5/core/en_rx.c,
    /// `mlx5e_decompress_cqe_no_hash`).
    #[inline]
    fn is_like(&self, title: &Self, behind: usize, format: u8) -> bool {
        // The counter goes up by one for each packet, which only linear queues do.
        let counted = self.position == title.position.wrapping_add(behind as u16);
        let told = match format {
            MINI_FORMAT_CSUM_STRIDE => self.request == title.request,
            _ => counted,
        };
        told && self.hash_type == title.hash_type
            && self.packet_info == title.packet_info
            && self.described == title.described
            && self.user_index == title.user_index
            && self.metadata == title.metadata
            && self.tag == title.tag
    }

    /// Takes from a mini entry what it tells, and the hash, for a packet that gets an entry of its own after all.
    fn with(&self, (mini, hash): (u64, u32), format: u8) -> Self {
        let (first, count) = ((mini >> 32) as u32, mini as u32);
        let it = Self { hash, count, ..*self };
        match format {
            MINI_FORMAT_CSUM => Self { checksum: (first >> 16) as u16, ..it },
            MINI_FORMAT_CSUM_STRIDE => Self { checksum: (first >> 16) as u16, position: first as u16, ..it },
            _ => it,
        }
    }
}

/// A completion queue.
///
/// Of the entries of a burst the first is written last ([`Self::publish`]): a driver that waits for it finds all of them, and takes no
/// lines away from the device meanwhile.
#[derive(Debug)]
pub(super) struct Cq<R> {
    pub(super) number: u32,
    pub(super) owner: Owner,
    ring: R,
    record: R,
    log_entries: u32,
    /// Entries written, free-running.
    produced: u32,
    /// What the record said when it was last looked at: only if that leaves no room, it is worth another look.
    consumed: u32,
    /// The first entry that is not published, with its counter, and how many there are with it.
    first: (u32, Words, CqeOwner),
    unpublished: u32,
    /// One of `MINI_FORMAT_*`, if receive completions may be compressed.
    compress: Option<u8>,
    /// The first packet of a session that is being gathered, and what the mini entries of all of its packets say.
    title: Told,
    held: [u64; MOST_MINIS],
    /// Their hashes, which not every format tells.
    hashes: [u32; MOST_MINIS],
    gathered: usize,
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
            consumed: 0,
            first: (0, Words::default(), CqeOwner::default()),
            unpublished: 0,
            compress,
            title: Told::default(),
            held: [0; MOST_MINIS],
            hashes: [0; MOST_MINIS],
            gathered: 0,
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

    /// Whether `count` more entries fit. Drivers publish 24 bits or 16, so only what both have is compared.
    #[inline]
    fn has_room(&mut self, count: u32, events: &mut Vec<Event>) -> bool {
        if self.overrun {
            return false;
        }
        let lacks = |this: &Self| {
            let unread = this.produced.wrapping_sub(this.consumed) & 0xffff;
            this.log_entries < 16 && unread + count > this.entries()
        };
        if lacks(self) {
            self.consumed = u32::from_be(self.record.load(4 * RECORD_CONSUMED as u64));
            if lacks(self) {
                self.overrun = true;
                events.push(Event::Object(self.owner, EVENT_CQ_ERR));
                return false;
            }
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

    /// The next entry, which may have to be published.
    #[inline]
    fn add(&mut self, words: &Words, owner: CqeOwner, events: &mut Vec<Event>) {
        let owner = owner.with_owner(defs::cqe_owner(self.produced, self.log_entries));
        if self.unpublished == MOST_UNPUBLISHED.min(self.entries() / 2) {
            self.publish(events);
        }
        if self.unpublished == 0 {
            self.first = (self.produced, *words, owner);
        } else {
            self.put(self.produced, words, owner);
        }
        self.unpublished += 1;
    }

    /// All entries that were completed can be seen from now on.
    #[inline]
    pub(super) fn publish(&mut self, events: &mut Vec<Event>) {
        if self.unpublished > 0 {
            let (counter, words, owner) = &self.first;
            self.put(*counter, words, *owner);
            self.unpublished = 0;
            self.notify(events);
        }
    }

    /// Writes an entry at `counter`, the last word last.
    #[inline]
    fn put(&self, counter: u32, words: &Words, owner: CqeOwner) {
        let at = self.offset(counter);
        let mut words = *words;
        words[CQE_BYTES / 8 - 1] |= u64::from(owner.0).to_be();
        self.ring.store_line(at, &words);
        self.ring.release(at);
        self.ring.expect(at + AHEAD);
    }

    /// An entry of its own. `owner` has the opcode.
    pub(super) fn complete(&mut self, entry: &Entry, owner: CqeOwner, events: &mut Vec<Event>) {
        self.tell(&words(entry), owner, events);
    }

    #[inline]
    fn tell(&mut self, words: &Words, owner: CqeOwner, events: &mut Vec<Event>) {
        self.flush(events);
        if !self.has_room(1, events) {
            return;
        }
        self.add(words, owner, events);
        self.produced = self.produced.wrapping_add(1);
        self.completions += 1;
    }

    fn notify(&mut self, events: &mut Vec<Event>) {
        if let Some(before) = &mut self.asked {
            // A driver asks, looks for entries once more, and sleeps: either it sees them, or it is seen to have asked.
            fence(Ordering::SeqCst);
            let asked = self.record.load(4 * RECORD_ARM as u64);
            self.armed |= std::mem::replace(before, asked) != asked;
        }
        if self.armed {
            self.armed = false;
            events.push(Event::Completion(self.owner));
        }
    }

    /// A received packet, which may be held back to share entries with others.
    #[inline(always)]
    pub(super) fn receive(&mut self, told: &Told, events: &mut Vec<Event>) {
        let Some(format) = self.compress else {
            self.tell(&told.words(), CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND), events);
            return;
        };
        let behind = self.gathered;
        if behind > 0 && (behind == MOST_MINIS || !told.is_like(&self.title, behind, format)) {
            self.flush(events);
        }
        if self.gathered == 0 {
            self.title = *told;
            (0..MOST_MINIS as u32).step_by(MINIS_PER_ENTRY).chain([1]).for_each(|slot| {
                self.ring.expect(self.offset(self.produced.wrapping_add(slot)));
            });
        }
        self.held[self.gathered % MOST_MINIS] = told.mini(format);
        self.hashes[self.gathered % MOST_MINIS] = told.hash;
        self.gathered += 1;
    }

    /// What was held back goes out.
    #[inline]
    pub(super) fn flush(&mut self, events: &mut Vec<Event>) {
        if self.gathered > 0 {
            self.flush_held(events);
        }
    }

    fn flush_held(&mut self, events: &mut Vec<Event>) {
        let held = self.held;
        let (mut title, format) = (self.title, self.compress.unwrap_or(MINI_FORMAT_HASH));
        let all = std::mem::take(&mut self.gathered);
        let mut rest = &held[..all];
        while !rest.is_empty() {
            let at = self.produced & (self.entries() - 1);
            // A session does not cross the end of the ring, and arrays of minis lie within it.
            let fits = (self.entries() - at) as usize;
            let n = rest.len().min(fits);
            if !self.has_room(n as u32, events) {
                break;
            }
            title = title.with((rest[0], self.hashes[all - rest.len()]), format);
            let owner = CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND);
            if n < 2 {
                self.add(&title.words(), owner, events);
            } else {
                self.arrays(&rest[..n]);
                self.add(&Told { count: n as u32, ..title }.words(), owner.with_format(FORMAT_COMPRESSED), events);
                self.sessions += 1;
            }
            self.produced = self.produced.wrapping_add(n as u32);
            self.completions += n as u64;
            title.position = title.position.wrapping_add(n as u16);
            rest = &rest[n..];
        }
    }

    /// Arrays of mini entries: the first in the entry behind the title, the others where every eighth entry from the title would be. They
    /// are no entries: their last byte is no owner.
    fn arrays(&self, minis: &[u64]) {
        for (i, chunk) in minis.chunks(MINIS_PER_ENTRY).enumerate() {
            let slot = if i == 0 { 1 } else { 8 * i as u32 };
            let mut words = Words::default();
            words.iter_mut().zip(chunk).for_each(|(word, mini)| *word = mini.to_be());
            self.ring.store_line(self.offset(self.produced.wrapping_add(slot)), &words);
        }
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
                self.publish(events);
                let wrong = defs::cqe_owner(self.produced, self.log_entries) ^ 1;
                self.put(self.produced, &words(&entry), owner.with_owner(wrong));
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
