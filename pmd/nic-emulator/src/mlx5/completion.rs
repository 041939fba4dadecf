//! Completion queues with CQE compression.

use std::sync::atomic::{Ordering, fence};

use wirepath_nic_defs::mlx5::{
    self as defs, Arm, CQE_BYTES, CqeFlags, CqeOwner, FORMAT_COMPRESSED, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE,
    MINI_FORMAT_HASH, MINIS_PER_ENTRY, RECORD_ARM, RECORD_CONSUMED,
};
use wirepath_nic_defs::uverbs::EVENT_CQ_ERR;

use crate::device::{Event, EventTarget};
use crate::faults::CqeCorruption;
use crate::host::Region;

/// Maximum number of packets of a compressed session.
pub(super) const MAX_MINIS: usize = 64;

/// Maximum number of entries that are published together.
const MAX_UNPUBLISHED: u32 = 32;

/// Prefetch distance in bytes.
const PREFETCH_BYTES: u64 = 256;

/// A completion entry without its last byte, which has owner bit and opcode.
pub(super) type Entry = [u8; CQE_BYTES];

/// A completion entry as words in memory order. Loads that are wider than the preceding stores would wait for
/// these stores, so entries are built in words.
type Words = [u64; CQE_BYTES / 8];

fn words(entry: &Entry) -> Words {
    std::array::from_fn(|i| u64::from_ne_bytes(entry.as_chunks::<8>().0[i]))
}

/// Content of the completion entry of a received packet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RxCqe {
    pub(super) packet_info: u8,
    /// Index of the descriptor, for striding receive queues.
    pub(super) request: u16,
    pub(super) hash: u32,
    pub(super) hash_type: u8,
    pub(super) checksum: u16,
    /// [`defs::CqeFlags`] in the upper half, and the stripped VLAN tag in the lower half.
    pub(super) flags_and_vlan: u32,
    pub(super) user_index: u32,
    pub(super) metadata: u32,
    /// Byte count, stride count or number of mini entries.
    pub(super) count: u32,
    pub(super) time: u64,
    pub(super) tag: u32,
    /// Descriptor index or stride index.
    pub(super) position: u16,
}

impl RxCqe {
    #[inline(always)]
    fn words(&self) -> Words {
        let pair = |first: u32, second: u32| (u64::from(first) << 32 | u64::from(second)).to_be();
        let high = |byte: u8| u32::from(byte) << 24;
        [
            pair(high(self.packet_info) | u32::from(self.request), 0),
            pair(0, self.hash),
            pair(high(self.hash_type), u32::from(self.checksum) << 16),
            pair(0, self.flags_and_vlan),
            pair(self.user_index, self.metadata),
            pair(0, self.count),
            self.time.to_be(),
            pair(self.tag, u32::from(self.position) << 16),
        ]
    }

    /// Returns the entry as bytes.
    pub(super) fn entry(&self) -> Entry {
        let mut entry = [0; CQE_BYTES];
        let words = self.words();
        entry.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_ne_bytes());
        entry
    }

    /// Returns the mini entry of the packet.
    #[inline]
    fn mini(&self, format: u8) -> u64 {
        let first = match format {
            MINI_FORMAT_CSUM => u32::from(self.checksum) << 16,
            MINI_FORMAT_CSUM_STRIDE => u32::from(self.checksum) << 16 | u32::from(self.position),
            _ => self.hash,
        };
        u64::from(first) << 32 | u64::from(self.count)
    }

    /// Returns true if the packet can be the mini entry at distance `behind` from a title: everything that
    /// the mini entry does not contain is equal.
    ///
    /// The hash may differ in formats that do not contain it. Linux then treats it as unknown
    /// (mlx5/core/en_rx.c, `mlx5e_decompress_cqe_no_hash`).
    #[inline]
    fn compresses_with(&self, title: &Self, behind: usize, format: u8) -> bool {
        // In linear queues the counter increases by one for each packet.
        let counted = self.position == title.position.wrapping_add(behind as u16);
        let comparable = match format {
            MINI_FORMAT_CSUM_STRIDE => self.request == title.request,
            _ => counted,
        };
        comparable
            && self.hash_type == title.hash_type
            && self.packet_info == title.packet_info
            && self.flags_and_vlan == title.flags_and_vlan
            && self.user_index == title.user_index
            && self.metadata == title.metadata
            && self.tag == title.tag
    }

    /// Returns the entry with the content of a mini entry and its hash, for a packet that gets a full entry.
    fn with_mini(&self, (mini, hash): (u64, u32), format: u8) -> Self {
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
/// The first entry of a burst is written last ([`Self::publish`]). A driver that waits for it then finds all
/// entries, and does not take cache lines away from the device in the meantime.
#[derive(Debug)]
pub(super) struct Cq<R> {
    pub(super) number: u32,
    pub(super) owner: EventTarget,
    ring: R,
    record: R,
    log_entries: u32,
    /// Number of entries written, free-running.
    produced: u32,
    /// Consumer counter as last read from the doorbell record. The record is read again only when no space is
    /// left.
    consumed: u32,
    /// The first unpublished entry with its counter, and the number of unpublished entries.
    first: (u32, Words, CqeOwner),
    unpublished: u32,
    /// Format of mini entries, `MINI_FORMAT_*`, if receive completions may be compressed.
    compress: Option<u8>,
    /// First packet of the current session, followed by the mini entries of all its packets.
    title: RxCqe,
    minis: [u64; MAX_MINIS],
    /// Hashes of the packets; not every format contains them.
    hashes: [u32; MAX_MINIS],
    mini_count: usize,
    armed: bool,
    /// Arm word as last read from the doorbell record, in scan mode.
    last_arm: Option<u32>,
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
        owner: EventTarget,
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
            title: RxCqe::default(),
            minis: [0; MAX_MINIS],
            hashes: [0; MAX_MINIS],
            mini_count: 0,
            // In the record the first arming looks like a new record.
            armed: scan,
            last_arm: scan.then_some(0),
            overrun: false,
            completions: 0,
            sessions: 0,
        }
    }

    fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    /// Returns true if `count` more entries fit. Drivers publish 24 or 16 bits of the counter, so only 16
    /// bits are compared.
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

    /// Writes the next entry; it is visible to the driver after [`Self::publish`].
    #[inline]
    fn add(&mut self, words: &Words, owner: CqeOwner, events: &mut Vec<Event>) {
        let owner = owner.with_owner(defs::cqe_owner(self.produced, self.log_entries));
        if self.unpublished == MAX_UNPUBLISHED.min(self.entries() / 2) {
            self.publish(events);
        }
        if self.unpublished == 0 {
            self.first = (self.produced, *words, owner);
        } else {
            self.put(self.produced, words, owner);
        }
        self.unpublished += 1;
    }

    /// Publishes all entries.
    #[inline]
    pub(super) fn publish(&mut self, events: &mut Vec<Event>) {
        if self.unpublished > 0 {
            let (counter, words, owner) = &self.first;
            self.put(*counter, words, *owner);
            self.unpublished = 0;
            self.notify(events);
        }
    }

    /// Writes an entry at `counter`; its last word is written last.
    #[inline]
    fn put(&self, counter: u32, words: &Words, owner: CqeOwner) {
        let at = self.offset(counter);
        let mut words = *words;
        words[CQE_BYTES / 8 - 1] |= u64::from(owner.0).to_be();
        self.ring.store_line(at, &words);
        self.ring.demote(at);
        self.ring.prefetch_write(at + PREFETCH_BYTES);
    }

    /// Writes a full entry; `owner` contains the opcode.
    pub(super) fn complete(&mut self, entry: &Entry, owner: CqeOwner, events: &mut Vec<Event>) {
        self.push(&words(entry), owner, events);
    }

    #[inline]
    fn push(&mut self, words: &Words, owner: CqeOwner, events: &mut Vec<Event>) {
        self.flush(events);
        if !self.has_room(1, events) {
            return;
        }
        self.add(words, owner, events);
        self.produced = self.produced.wrapping_add(1);
        self.completions += 1;
    }

    fn notify(&mut self, events: &mut Vec<Event>) {
        if let Some(before) = &mut self.last_arm {
            // The driver arms the queue, checks for entries once more, and sleeps. Either it sees the
            // entries, or this load sees the new arm word.
            fence(Ordering::SeqCst);
            let last_arm = self.record.load(4 * RECORD_ARM as u64);
            self.armed |= std::mem::replace(before, last_arm) != last_arm;
        }
        if self.armed {
            self.armed = false;
            events.push(Event::Completion(self.owner));
        }
    }

    /// Adds a received packet, which may wait for others to be compressed together.
    #[inline(always)]
    pub(super) fn receive(&mut self, cqe: &RxCqe, events: &mut Vec<Event>) {
        let Some(format) = self.compress else {
            self.push(&cqe.words(), CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND), events);
            return;
        };
        let behind = self.mini_count;
        if behind > 0 && (behind == MAX_MINIS || !cqe.compresses_with(&self.title, behind, format)) {
            self.flush(events);
        }
        if self.mini_count == 0 {
            self.title = *cqe;
            (0..MAX_MINIS as u32).step_by(MINIS_PER_ENTRY).chain([1]).for_each(|slot| {
                self.ring.prefetch_write(self.offset(self.produced.wrapping_add(slot)));
            });
        }
        self.minis[self.mini_count % MAX_MINIS] = cqe.mini(format);
        self.hashes[self.mini_count % MAX_MINIS] = cqe.hash;
        self.mini_count += 1;
    }

    /// Writes the packets of the current session.
    #[inline]
    pub(super) fn flush(&mut self, events: &mut Vec<Event>) {
        if self.mini_count > 0 {
            self.flush_session(events);
        }
    }

    fn flush_session(&mut self, events: &mut Vec<Event>) {
        let minis = self.minis;
        let (mut title, format) = (self.title, self.compress.unwrap_or(MINI_FORMAT_HASH));
        let all = std::mem::take(&mut self.mini_count);
        let mut rest = &minis[..all];
        while !rest.is_empty() {
            let at = self.produced & (self.entries() - 1);
            // A session does not wrap around, so that its arrays of mini entries are inside the ring.
            let fits = (self.entries() - at) as usize;
            let n = rest.len().min(fits);
            if !self.has_room(n as u32, events) {
                break;
            }
            title = title.with_mini((rest[0], self.hashes[all - rest.len()]), format);
            let owner = CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND);
            if n < 2 {
                self.add(&title.words(), owner, events);
            } else {
                self.write_mini_arrays(&rest[..n]);
                self.add(&RxCqe { count: n as u32, ..title }.words(), owner.with_format(FORMAT_COMPRESSED), events);
                self.sessions += 1;
            }
            self.produced = self.produced.wrapping_add(n as u32);
            self.completions += n as u64;
            title.position = title.position.wrapping_add(n as u16);
            rest = &rest[n..];
        }
    }

    /// Writes the arrays of mini entries. The first array is in the entry behind the title, the others in
    /// every eighth entry counted from the title. Their last byte is no owner byte.
    fn write_mini_arrays(&self, minis: &[u64]) {
        for (i, chunk) in minis.chunks(MINIS_PER_ENTRY).enumerate() {
            let slot = if i == 0 { 1 } else { 8 * i as u32 };
            let mut words = Words::default();
            words.iter_mut().zip(chunk).for_each(|(word, mini)| *word = mini.to_be());
            self.ring.store_line(self.offset(self.produced.wrapping_add(slot)), &words);
        }
    }

    /// Handles a write to the arm register.
    pub(super) fn arm(&mut self, arm: Arm, events: &mut Vec<Event>) {
        // Completions that exist already raise the event at once.
        if self.produced & defs::CONSUMED_MASK == arm.consumed() || self.produced & 0xffff == arm.consumed() {
            self.armed = true;
        } else {
            events.push(Event::Completion(self.owner));
        }
    }

    /// Writes a corrupt entry.
    pub(super) fn complete_corrupted(
        &mut self,
        entry: &Entry,
        owner: CqeOwner,
        corruption: CqeCorruption,
        events: &mut Vec<Event>,
    ) {
        let (mut entry, mut owner) = (*entry, owner);
        match corruption {
            CqeCorruption::Missing => return,
            CqeCorruption::Owner => {
                self.flush(events);
                self.publish(events);
                let wrong = defs::cqe_owner(self.produced, self.log_entries) ^ 1;
                self.put(self.produced, &words(&entry), owner.with_owner(wrong));
                return;
            }
            CqeCorruption::Queue => {
                entry[0x21..0x24].fill(0xff);
                entry[0x39..0x3c].fill(0xff);
            }
            CqeCorruption::Kind => {
                let other =
                    if owner.opcode() == defs::CQE_REQUEST { defs::CQE_RESPONDER_SEND } else { defs::CQE_REQUEST };
                owner = owner.with_opcode(other);
            }
            CqeCorruption::Length => entry[0x2c..0x30].fill(0x7f),
            CqeCorruption::ZeroLength => entry[0x2c..0x30].fill(0),
            CqeCorruption::Duplicate => self.complete(&entry, owner, events),
            CqeCorruption::Type => owner = owner.with_opcode(9),
            CqeCorruption::Position => entry[0x3c..0x3e].fill(0xee),
            CqeCorruption::Timestamp => entry[0x30..0x38].fill(0xee),
            CqeCorruption::Checksum => {
                let status = CqeFlags::default().with_l3_ok(1).with_l4_ok(1);
                let [high, low] = status.0.to_be_bytes();
                entry[defs::CQE_FLAGS] ^= high;
                entry[defs::CQE_FLAGS + 1] ^= low;
            }
        }
        self.complete(&entry, owner, events);
    }
}
