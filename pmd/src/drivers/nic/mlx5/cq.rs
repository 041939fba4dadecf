//! Completion queues: ownership of entries.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use wirepath_memory::{DeviceMemory, Slots, SlotsView};
use wirepath_nic_defs::mlx5::{
    Arm, CONSUMED_MASK, CQE_BYTES, CQE_INVALID, CQE_OWNER_INIT, CqeFlags, CqeOwner, FORMAT_COMPRESSED, MINIS_PER_ENTRY,
    RECORD_ARM, RECORD_CONSUMED,
};

use crate::drivers::nic::common::queue_fault::QueueFault;

/// Words of an entry.
const WORDS: usize = CQE_BYTES / 4;
/// The word with the owner bit, which the device writes last.
const LAST: usize = WORDS - 1;
/// Last word of an entry in its initial, invalid state, in memory byte order.
const INVALID_LAST: u32 = (CQE_OWNER_INIT as u32).to_be();

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    entries: Slots<RawCqe>,
    /// The same memory as arrays of mini CQEs.
    arrays: Slots<[AtomicU64; MINIS_PER_ENTRY]>,
    records: DeviceMemory,
    /// Log2 of the number of entries.
    shift: u32,
    /// Free-running counter of the next entry.
    next: u32,
}

/// Last eight bytes of a CQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail(u64);

impl Tail {
    /// Returns opcode and format: `opcode << 4 | format << 2`.
    #[inline(always)]
    pub(super) fn kind(self) -> u8 {
        self.0 as u8 & 0xfc
    }

    /// Returns the opcode.
    pub(super) fn opcode(self) -> u8 {
        CqeOwner(self.0 as u8).opcode()
    }

    /// Returns true for the title of a session.
    fn is_compressed(self) -> bool {
        CqeOwner(self.0 as u8).format() == FORMAT_COMPRESSED
    }

    /// Returns the WQE counter.
    #[inline(always)]
    pub(super) fn position(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Reads the tail of an entry whose last word is `last`, in memory byte order.
    #[inline(always)]
    fn of(whole: &RawCqe, last: u32) -> Self {
        let before = u32::from_be(whole[LAST - 1].load(Ordering::Relaxed));
        Self(u64::from(before) << 32 | u64::from(u32::from_be(last)))
    }

    /// Returns the queue number of a send completion, or the flow tag of a received packet.
    #[inline(always)]
    pub(super) fn low24(self) -> u32 {
        (self.0 >> 32) as u32 & 0xff_ffff
    }
}

/// Returns the [`Tail::kind`] of an entry with this opcode and format.
pub(super) const fn kind(opcode: u8, format: u8) -> u8 {
    CqeOwner(0).with_opcode(opcode).with_format(format).0
}

/// An entry in memory, valid or not.
pub(super) type RawCqe = [AtomicU32; WORDS];

/// A valid entry, which the device has written.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a>(&'a RawCqe);

impl<'a> Entry<'a> {
    /// Returns the entry if its last word is `expected` in the bits of [`Self::COMPARED`].
    #[inline(always)]
    pub(super) fn expect(whole: &'a RawCqe, expected: u32) -> Option<Self> {
        // Acquire: the other words must be read after the owner bit.
        let last = u32::from_be(whole[LAST].load(Ordering::Acquire));
        if last & Self::COMPARED == expected { Some(Self(whole)) } else { None }
    }

    /// WQE counter, opcode, format and owner bit in the last word.
    pub(super) const COMPARED: u32 = 0xffff_0000 | CqeOwner(0xff).with_solicited(0).0 as u32;

    /// Returns an entry that was found valid before.
    #[inline(always)]
    pub(super) fn reread(whole: &'a RawCqe) -> (Self, Tail) {
        (Self(whole), Tail::of(whole, whole[LAST].load(Ordering::Relaxed)))
    }

    /// Returns the work request of a packet in a striding queue.
    #[inline(always)]
    pub(super) fn request(self) -> u16 {
        self.word::<0x00>() as u16
    }

    /// Returns the RSS hash of a received packet, if [`Self::is_hashed`].
    #[inline(always)]
    pub(super) fn hash(self) -> u32 {
        self.word::<0x0c>()
    }

    /// Returns true if the entry has an RSS hash.
    #[inline(always)]
    pub(super) fn is_hashed(self) -> bool {
        self.word::<0x10>() >> 24 != 0
    }

    /// Returns the `CqeFlags` of a received packet in the high half, and the stripped VLAN tag in the low
    /// half.
    #[inline(always)]
    pub(super) fn flags_and_vlan(self) -> u32 {
        self.word::<0x1c>()
    }

    /// Returns true if the flags of [`Self::flags_and_vlan`] equal `flags` in the bits of `mask`.
    #[inline(always)]
    pub(super) fn has_flags(self, mask: CqeFlags, flags: CqeFlags) -> bool {
        let word = self.0[0x1c / 4].load(Ordering::Relaxed);
        word & (u32::from(mask.0) << 16).to_be() == (u32::from(flags.0) << 16).to_be()
    }

    /// Returns the length of a packet, with the number of strides in a striding queue. In a title: the number
    /// of packets.
    #[inline(always)]
    pub(super) fn byte_count(self) -> u32 {
        self.word::<0x2c>()
    }

    /// Returns the timestamp in ticks of the device clock.
    #[inline(always)]
    pub(super) fn time(self) -> u64 {
        u64::from(self.word::<0x30>()) << 32 | u64::from(self.word::<0x34>())
    }

    /// Returns a value other than 0 if the packet has a flow tag.
    #[inline(always)]
    pub(super) fn tagged(self) -> u32 {
        self.0[0x38 / 4].load(Ordering::Relaxed) & 0xff_ffffu32.to_be()
    }

    /// Returns the word at an offset, a multiple of 4.
    #[inline(always)]
    fn word<const OFFSET: usize>(self) -> u32 {
        const { assert!(OFFSET.is_multiple_of(4) && OFFSET < CQE_BYTES) };
        u32::from_be(self.0[OFFSET / 4].load(Ordering::Relaxed))
    }

    /// Returns the error that the entry reports.
    #[cold]
    pub(super) fn failure(self, tail: Tail) -> QueueFault {
        let word = self.word::<0x34>();
        QueueFault::ErrorCqe { syndrome: word as u8, vendor: (word >> 8) as u8, position: tail.position() }
    }
}

impl CompletionQueue {
    /// Creates a queue and invalidates its entries; nothing may have been posted yet. `None` if the number of
    /// entries is not a power of two.
    pub(super) fn new(ring: &DeviceMemory, records: &DeviceMemory) -> Option<Self> {
        let (entries, arrays) = (Slots::<RawCqe>::new(ring)?, Slots::new(ring)?);
        let shift = entries.count().trailing_zeros();
        let this = Self { entries, arrays, records: records.clone(), shift, next: 0 };
        this.clear();
        Some(this)
    }

    /// Invalidates all entries and publishes the consumer index, while the device writes none.
    pub(super) fn clear(&self) {
        self.invalidate(self.count());
        self.publish();
    }

    /// Consumes all entries that the device has written.
    pub(super) fn skip(&mut self) {
        for _ in 0..self.count() {
            let Some((entry, tail)) = self.peek() else { break };
            // A session takes one entry for each of its packets.
            let count = if tail.is_compressed() { entry.byte_count().clamp(1, self.count()) } else { 1 };
            self.advance(count);
        }
    }

    /// Returns the next entry, if it is valid.
    #[inline(always)]
    pub(super) fn peek(&self) -> Option<(Entry<'_>, Tail)> {
        self.reader().peek()
    }

    /// Returns the number of packets whose completions the device has written. It reads one entry for each completion
    /// or session.
    pub(super) fn waiting(&self) -> u32 {
        let (mut reader, mut waiting) = (self.reader(), 0);
        while waiting < self.count()
            && let Some((entry, tail)) = reader.peek()
        {
            let left = self.count() - waiting;
            let step = if tail.is_compressed() { entry.byte_count().clamp(1, left) } else { 1 };
            waiting += step;
            reader.next = reader.next.wrapping_add(step);
        }
        waiting
    }

    /// Returns true if a later entry is valid although the next one is not: the next one was overwritten. The
    /// entry right behind it is not sufficient, because it may be the first mini array of a session whose
    /// title is lost.
    #[cold]
    pub(super) fn has_gap(&self) -> bool {
        let later = |i| Reader { next: self.next.wrapping_add(i), ..self.reader() };
        // In this order, because the device may write both meanwhile.
        (1..self.count()).any(|i| later(i).peek().is_some()) && self.peek().is_none()
    }

    /// Returns a copy of the queue's state for reading in a loop.
    #[inline(always)]
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader { entries: self.entries.view(), shift: self.shift, next: self.next }
    }

    /// Returns the mini arrays of the session whose title is the next entry.
    #[inline(always)]
    pub(super) fn minis(&self) -> MiniArrays<'_> {
        MiniArrays { arrays: self.arrays.view(), title: self.next }
    }

    /// Returns the counter of the next entry.
    #[inline(always)]
    pub(super) fn position(&self) -> u32 {
        self.next
    }

    /// Advances by `count` entries.
    #[inline(always)]
    pub(super) fn advance(&mut self, count: u32) {
        self.next = self.next.wrapping_add(count);
    }

    /// Invalidates `count` entries starting with the next one. Most of them hold no CQE but part of a
    /// session.
    #[inline(always)]
    pub(super) fn invalidate(&self, count: u32) {
        let (run, count) = (self.entries.view().run(self.next), count as usize);
        let contiguous = run.len().min(count);
        let invalidate_entry = |entry: &RawCqe| entry[LAST].store(INVALID_LAST, Ordering::Relaxed);
        // The number of strides of a work request, and of most sessions in striding queues.
        if let Some(sixteen) = run.first_chunk::<16>()
            && count == 16
        {
            return sixteen.iter().for_each(invalidate_entry);
        }
        run[..contiguous].iter().for_each(invalidate_entry);
        // Wraps around the end of the ring, which devices do not do.
        (contiguous..count).for_each(|i| invalidate_entry(self.entries.at(self.next.wrapping_add(i as u32))));
    }

    /// Returns the title of the open session. It remains the next entry until the session is read.
    #[inline(always)]
    pub(super) fn title(&self) -> &RawCqe {
        self.entries.at(self.next)
    }

    /// Returns the entries from the next one to the end of the ring, and the expected last word of entries of
    /// `kind`. It contains the bits that [`Entry::expect`] compares, except the WQE counter.
    #[inline(always)]
    pub(super) fn rest(&self, kind: u8) -> (&[RawCqe], u32) {
        let owner = (self.next >> self.shift) & 1;
        (self.entries.view().run(self.next), u32::from(kind) | owner)
    }

    /// Publishes the consumer index.
    #[inline(always)]
    pub(super) fn publish(&self) {
        self.records.store32_release(4 * RECORD_CONSUMED, (self.next & CONSUMED_MASK).to_be());
    }

    /// Arms the queue in its doorbell record. Returns the value for the doorbell register of queue `number`.
    /// `announced` is the number of events of the queue so far.
    pub(super) fn arm(&self, announced: u32, number: u32) -> u64 {
        let arm = Arm::default().with_sequence(announced).with_consumed(self.next).0;
        self.records.store32_release(4 * RECORD_ARM, arm.to_be());
        (u64::from(arm) << 32 | u64::from(number)).to_be()
    }

    /// Returns the number of entries.
    #[inline(always)]
    pub(super) fn count(&self) -> u32 {
        self.entries.count()
    }
}

/// Mini CQEs of a session, eight bytes for each packet. The first array is in the entry after the title. The
/// others are in every eighth entry, counted from the title.
#[derive(Clone, Copy)]
pub(super) struct MiniArrays<'a> {
    arrays: SlotsView<'a, [AtomicU64; MINIS_PER_ENTRY]>,
    title: u32,
}

impl<'a> MiniArrays<'a> {
    /// Returns the mini CQEs from a packet to the end of its array.
    #[inline(always)]
    pub(super) fn from(self, packet: u32) -> &'a [AtomicU64] {
        let at = packet as usize % MINIS_PER_ENTRY;
        &self.arrays.at(self.array_index(packet - at as u32))[at..]
    }

    /// Returns an iterator over whole arrays, starting with the array of `packet`. `None` unless the packet
    /// is the first of its array.
    #[inline(always)]
    pub(super) fn whole(self, packet: u32) -> Option<impl FnMut() -> &'a [AtomicU64; MINIS_PER_ENTRY]> {
        let (mut index, mut next) = (self.array_index(packet), self.title.wrapping_add(packet));
        packet.is_multiple_of(MINIS_PER_ENTRY as u32).then_some(move || {
            let array = self.arrays.at(index);
            next = next.wrapping_add(MINIS_PER_ENTRY as u32);
            index = next;
            array
        })
    }

    /// Returns the entry of the array that begins with this packet.
    #[inline(always)]
    fn array_index(self, first: u32) -> u32 {
        self.title.wrapping_add(first.max(1))
    }
}

/// Reads entries in order.
pub(super) struct Reader<'a> {
    entries: SlotsView<'a, RawCqe>,
    shift: u32,
    /// Counter of the next entry.
    pub(super) next: u32,
}

impl<'a> Reader<'a> {
    /// Returns the next entry, if it is valid.
    #[inline(always)]
    pub(super) fn peek(&self) -> Option<(Entry<'a>, Tail)> {
        let entry = self.entries.at(self.next);
        // Acquire: the other words must be read after the owner bit.
        let memory = entry[LAST].load(Ordering::Acquire);
        let (last, owner) = (u32::from_be(memory), self.next >> self.shift);
        if (last ^ owner) & 1 != 0 || last as u8 >= CQE_INVALID << 4 {
            return None;
        }
        Some((Entry(entry), Tail::of(entry, memory)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::nic::common::test_support::memory;

    #[test]
    fn overwritten_entries_are_detected() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let mut queue = CompletionQueue::new(&ring, &records).unwrap();
        for counter in 0..20u32 {
            let fill = |counter: u32| {
                let owner = u64::from((counter / 8) & 1);
                ring.store64((counter % 8) as usize * 64 + 56, (0xaa12_3456_4321_0020 | owner).to_be());
            };
            assert!(!queue.has_gap());
            fill(counter + 1);
            assert!(queue.has_gap());
            fill(counter);
            assert!(!queue.has_gap());
            ring.store64((counter % 8) as usize * 64 + 56, u64::MAX);
            assert!(queue.has_gap());
            ring.store64(((counter + 1) % 8) as usize * 64 + 56, u64::MAX);
            queue.advance(1);
        }
    }

    #[test]
    fn waiting_packets_are_counted() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let mut queue = CompletionQueue::new(&ring, &records).unwrap();
        for counter in 0..40u32 {
            assert_eq!(queue.waiting(), 0);
            for ahead in 0..5 {
                let (at, owner) = (counter + ahead, u64::from(((counter + ahead) / 8) & 1));
                ring.store64((at % 8) as usize * 64 + 56, (0xaa12_3456_4321_0020 | owner).to_be());
                assert_eq!(queue.waiting(), ahead + 1);
            }
            // A session of three packets in front of the last two.
            let owner = u64::from((counter / 8) & 1);
            ring.store64((counter % 8) as usize * 64 + 56, (0xaa12_3456_4321_002c | owner).to_be());
            ring.store32((counter % 8) as usize * 64 + 0x2c, 3u32.to_be());
            assert_eq!(queue.waiting(), 5);
            queue.invalidate(5);
            queue.advance(1);
        }
    }

    #[test]
    fn lost_titles_are_detected() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let queue = CompletionQueue::new(&ring, &records).unwrap();
        // An array whose last byte is no valid owner, and the next title behind it.
        ring.store64(64 + 56, 0x0123_4567_89ab_cdf1u64.to_be());
        assert!(!queue.has_gap());
        ring.store64(4 * 64 + 56, 0xaa12_3456_4321_002cu64.to_be());
        assert!(queue.has_gap());
        ring.store64(56, 0xaa12_3456_4321_002cu64.to_be());
        assert!(!queue.has_gap());
    }

    #[test]
    fn entries_are_new_once_per_pass() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let mut queue = CompletionQueue::new(&ring, &records).unwrap();
        assert_eq!(queue.count(), 8);
        for counter in 0..8 * 20u32 {
            assert!(queue.peek().is_none(), "{counter}");
            let owner = ((counter / 8) & 1) as u8;
            let tail = 0xaa12_3456_4321_0020 | u64::from(owner);
            ring.store64((counter % 8) as usize * 64 + 56, tail.to_be());
            let (_, tail) = queue.peek().unwrap();
            assert_eq!((tail.kind(), tail.position(), tail.low24()), (0x20, 0x4321, 0x12_3456));
            queue.advance(1);
            queue.publish();
            assert_eq!(u32::from_be(records.load32(0)), counter + 1);
        }
        // Entries that were overwritten by mini CQEs.
        for at in 0..8 {
            ring.store64(at * 64 + 56, 0x20u64.to_be() | 0x21u64.to_be());
        }
        queue.invalidate(8);
        assert!((0..16).all(|_| {
            let nothing = queue.peek().is_none();
            queue.advance(1);
            nothing
        }));
    }
}
