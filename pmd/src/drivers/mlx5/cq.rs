//! Completion queues: which entry is new.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use wirepath_memory::{DeviceMemory, Slots, View};
use wirepath_nic_defs::mlx5::{
    Arm, CONSUMED_MASK, CQE_BYTES, CQE_FRESH, CQE_INVALID, CqeFlags, CqeOwner, FORMAT_COMPRESSED, MINIS_PER_ENTRY,
    RECORD_ARM, RECORD_CONSUMED,
};

use crate::drivers::direct::fault::Fault;

/// Words of an entry.
const WORDS: usize = CQE_BYTES / 4;
/// The word with the owner bit, which the device writes last.
const LAST: usize = WORDS - 1;
/// The last word of an entry that nobody owns, in memory.
const FRESH: u32 = (CQE_FRESH as u32).to_be();

/// The entries of one completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    entries: Slots<Whole>,
    /// The same memory as arrays of mini entries.
    arrays: Slots<[AtomicU64; MINIS_PER_ENTRY]>,
    records: DeviceMemory,
    /// Logarithm of the number of entries.
    shift: u32,
    /// Free-running counter of the entry that is looked at next.
    next: u32,
}

/// Last eight bytes of an entry: what it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail(u64);

impl Tail {
    /// Opcode and format together: `opcode << 4 | format << 2`.
    #[inline(always)]
    pub(super) fn kind(self) -> u8 {
        self.0 as u8 & 0xfc
    }

    /// The opcode alone.
    pub(super) fn opcode(self) -> u8 {
        CqeOwner(self.0 as u8).opcode()
    }

    /// Counter of a descriptor.
    #[inline(always)]
    pub(super) fn position(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Of an entry whose last word, as it lies in memory, was read already.
    #[inline(always)]
    fn of(whole: &Whole, last: u32) -> Self {
        let before = u32::from_be(whole[LAST - 1].load(Ordering::Relaxed));
        Self(u64::from(before) << 32 | u64::from(u32::from_be(last)))
    }

    /// Sent: number of the queue. Received: flow tag.
    #[inline(always)]
    pub(super) fn low24(self) -> u32 {
        (self.0 >> 32) as u32 & 0xff_ffff
    }
}

/// [`Tail::kind`] of an entry of its own, and of the title of a compressed session.
pub(super) const fn kind(opcode: u8, format: u8) -> u8 {
    CqeOwner(0).with_opcode(opcode).with_format(format).0
}

/// An entry in memory, filled or not.
pub(super) type Whole = [AtomicU32; WORDS];

/// An entry that the device has filled.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a>(&'a Whole);

impl<'a> Entry<'a> {
    /// The entry, if the device has filled it and its last word has in the bits of [`Self::COMPARED`] what is expected.
    #[inline(always)]
    pub(super) fn expect(whole: &'a Whole, expected: u32) -> Option<Self> {
        // Acquire: the other words are read after the one that says that they are there.
        let last = u32::from_be(whole[LAST].load(Ordering::Acquire));
        if last & Self::COMPARED == expected { Some(Self(whole)) } else { None }
    }

    /// Of the last word: counter, opcode, format and owner.
    pub(super) const COMPARED: u32 = 0xffff_0000 | CqeOwner(0xff).with_solicited(0).0 as u32;

    /// An entry that was found filled before.
    #[inline(always)]
    pub(super) fn again(whole: &'a Whole) -> (Self, Tail) {
        (Self(whole), Tail::of(whole, whole[LAST].load(Ordering::Relaxed)))
    }

    /// Work request of a packet in a striding queue.
    #[inline(always)]
    pub(super) fn request(self) -> u16 {
        self.word::<0x00>() as u16
    }

    /// RSS hash of a received packet, if [`Self::is_hashed`].
    #[inline(always)]
    pub(super) fn hash(self) -> u32 {
        self.word::<0x0c>()
    }

    /// Whether there is a hash type.
    #[inline(always)]
    pub(super) fn is_hashed(self) -> bool {
        self.word::<0x10>() >> 24 != 0
    }

    /// `CqeFlags` of a received packet, and below them the VLAN tag that was taken off.
    #[inline(always)]
    pub(super) fn described(self) -> u32 {
        self.word::<0x1c>()
    }

    /// Whether the flags of [`Self::described`] in `mask` are `flags`.
    #[inline(always)]
    pub(super) fn has_flags(self, mask: CqeFlags, flags: CqeFlags) -> bool {
        let word = self.0[0x1c / 4].load(Ordering::Relaxed);
        word & (u32::from(mask.0) << 16).to_be() == (u32::from(flags.0) << 16).to_be()
    }

    /// Bytes of a packet, with strides in a striding queue; packets of a session.
    #[inline(always)]
    pub(super) fn byte_count(self) -> u32 {
        self.word::<0x2c>()
    }

    /// The device's clock, in ticks.
    #[inline(always)]
    pub(super) fn time(self) -> u64 {
        u64::from(self.word::<0x30>()) << 32 | u64::from(self.word::<0x34>())
    }

    /// Something else than 0 if there is a flow tag.
    #[inline(always)]
    pub(super) fn tagged(self) -> u32 {
        self.0[0x38 / 4].load(Ordering::Relaxed) & 0xff_ffffu32.to_be()
    }

    /// The word at an offset, a multiple of 4.
    #[inline(always)]
    fn word<const OFFSET: usize>(self) -> u32 {
        const { assert!(OFFSET.is_multiple_of(4) && OFFSET < CQE_BYTES) };
        u32::from_be(self.0[OFFSET / 4].load(Ordering::Relaxed))
    }

    /// The device's report of an error.
    #[cold]
    pub(super) fn failure(self, tail: Tail) -> Fault {
        let word = self.word::<0x34>();
        Fault::Refused { syndrome: word as u8, vendor: (word >> 8) as u8, position: tail.position() }
    }
}

impl CompletionQueue {
    /// An empty queue; `None` if the number of entries is no power of two. Clears the entries: nothing may have been posted yet.
    pub(super) fn new(ring: &DeviceMemory, records: &DeviceMemory) -> Option<Self> {
        let (entries, arrays) = (Slots::<Whole>::new(ring)?, Slots::new(ring)?);
        let shift = entries.count().trailing_zeros();
        let this = Self { entries, arrays, records: records.clone(), shift, next: 0 };
        this.clear();
        Some(this)
    }

    /// Makes all entries nobody's and tells the device what was consumed, while the device writes none.
    pub(super) fn clear(&self) {
        self.invalidate(self.count());
        self.publish();
    }

    /// Passes over everything that the device has written.
    pub(super) fn skip(&mut self) {
        for _ in 0..self.count() {
            let Some((entry, tail)) = self.look() else { break };
            // A session has an entry for each of its packets.
            let compressed = CqeOwner(tail.0 as u8).format() == FORMAT_COMPRESSED;
            let count = if compressed { entry.byte_count().clamp(1, self.count()) } else { 1 };
            self.advance(count);
        }
    }

    /// The next entry, if the device has filled it.
    #[inline(always)]
    pub(super) fn look(&self) -> Option<(Entry<'_>, Tail)> {
        self.reader().look()
    }

    /// Whether an entry behind the next is filled although the next is not: that was written over. Not the one right behind it only, where
    /// the first array of a session may be whose title is lost.
    #[cold]
    pub(super) fn is_torn(&self) -> bool {
        let behind = |i| Reader { next: self.next.wrapping_add(i), ..self.reader() };
        // In this order: the device may fill both meanwhile.
        (1..self.count()).any(|i| behind(i).look().is_some()) && self.look().is_none()
    }

    /// The queue as a value, to be read in a loop; [`Self::resume`] then says how far it was.
    #[inline(always)]
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader { entries: self.entries.view(), shift: self.shift, next: self.next }
    }

    /// The arrays of the session whose title is the next entry.
    #[inline(always)]
    pub(super) fn minis(&self) -> MiniArrays<'_> {
        MiniArrays { arrays: self.arrays.view(), title: self.next }
    }

    /// Counter of the entry that is looked at next.
    #[inline(always)]
    pub(super) fn position(&self) -> u32 {
        self.next
    }

    /// Goes on by `count` entries.
    #[inline(always)]
    pub(super) fn advance(&mut self, count: u32) {
        self.next = self.next.wrapping_add(count);
    }

    /// Takes ownership from `count` entries from the next on, of which most were not written as entries.
    #[inline(always)]
    pub(super) fn invalidate(&self, count: u32) {
        let (run, count) = (self.entries.view().run(self.next), count as usize);
        let here = run.len().min(count);
        let fresh = |entry: &Whole| entry[LAST].store(FRESH, Ordering::Relaxed);
        // As many as a work request has strides: most sessions of such queues.
        if let Some(sixteen) = run.first_chunk::<16>()
            && count == 16
        {
            return sixteen.iter().for_each(fresh);
        }
        run[..here].iter().for_each(fresh);
        // Over the end of the ring, which devices do not do.
        (here..count).for_each(|i| fresh(self.entries.at(self.next.wrapping_add(i as u32))));
    }

    /// The entry that a session began with, which is the next until all of it is read.
    #[inline(always)]
    pub(super) fn title(&self) -> &Whole {
        self.entries.at(self.next)
    }

    /// The entries from the next to the end of the ring, and what the last word of each that is of `kind` has in the bits that
    /// [`Entry::expect`] looks at.
    #[inline(always)]
    pub(super) fn rest(&self, kind: u8) -> (&[Whole], u32) {
        let owner = (self.next >> self.shift) & 1;
        (self.entries.view().run(self.next), u32::from(kind) | owner)
    }

    /// Tells the device what was consumed.
    #[inline(always)]
    pub(super) fn publish(&self) {
        self.records.store32_release(4 * RECORD_CONSUMED, (self.next & CONSUMED_MASK).to_be());
    }

    /// Asks, in the record, for an announcement of the next entry; what is returned asks for it in the register of queue `number`.
    /// `announced` counts what the queue announced so far.
    pub(super) fn arm(&self, announced: u32, number: u32) -> u64 {
        let arm = Arm::default().with_sequence(announced).with_consumed(self.next).0;
        self.records.store32_release(4 * RECORD_ARM, arm.to_be());
        (u64::from(arm) << 32 | u64::from(number)).to_be()
    }

    /// Number of entries.
    #[inline(always)]
    pub(super) fn count(&self) -> u32 {
        self.entries.count()
    }
}

/// What a session tells of its packets, each in eight bytes: the first array in the entry behind the title, the others where every eighth
/// entry from the title on would be.
#[derive(Clone, Copy)]
pub(super) struct MiniArrays<'a> {
    arrays: View<'a, [AtomicU64; MINIS_PER_ENTRY]>,
    title: u32,
}

impl<'a> MiniArrays<'a> {
    /// From a packet of the session to the last of its array.
    #[inline(always)]
    pub(super) fn from(self, packet: u32) -> &'a [AtomicU64] {
        let at = packet as usize % MINIS_PER_ENTRY;
        &self.arrays.at(self.place(packet - at as u32))[at..]
    }

    /// The array that a packet is the first of, and those behind it, one after the other; `None`: it is not the first.
    #[inline(always)]
    pub(super) fn whole(self, packet: u32) -> Option<impl FnMut() -> &'a [AtomicU64; MINIS_PER_ENTRY]> {
        let (mut place, mut next) = (self.place(packet), self.title.wrapping_add(packet));
        packet.is_multiple_of(MINIS_PER_ENTRY as u32).then_some(move || {
            let array = self.arrays.at(place);
            next = next.wrapping_add(MINIS_PER_ENTRY as u32);
            place = next;
            array
        })
    }

    /// Where the array is that this packet is the first of.
    #[inline(always)]
    fn place(self, first: u32) -> u32 {
        self.title.wrapping_add(first.max(1))
    }
}

/// A look at the entries, one after the other.
pub(super) struct Reader<'a> {
    entries: View<'a, Whole>,
    shift: u32,
    /// Counter of the entry that is looked at next.
    pub(super) next: u32,
}

impl<'a> Reader<'a> {
    /// The next entry, if the device has filled it.
    #[inline(always)]
    pub(super) fn look(&self) -> Option<(Entry<'a>, Tail)> {
        let entry = self.entries.at(self.next);
        // Acquire: the other words are read after the one that says that they are there.
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
    use crate::drivers::direct::hostile::memory;

    #[test]
    fn an_entry_that_was_written_over_is_missed() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let mut queue = CompletionQueue::new(&ring, &records).unwrap();
        for counter in 0..20u32 {
            let fill = |counter: u32| {
                let owner = u64::from((counter / 8) & 1);
                ring.store64((counter % 8) as usize * 64 + 56, (0xaa12_3456_4321_0020 | owner).to_be());
            };
            assert!(!queue.is_torn());
            fill(counter + 1);
            assert!(queue.is_torn());
            fill(counter);
            assert!(!queue.is_torn());
            ring.store64((counter % 8) as usize * 64 + 56, u64::MAX);
            assert!(queue.is_torn());
            ring.store64(((counter + 1) % 8) as usize * 64 + 56, u64::MAX);
            queue.advance(1);
        }
    }

    #[test]
    fn a_session_whose_title_is_lost_is_missed() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let queue = CompletionQueue::new(&ring, &records).unwrap();
        // An array whose end is no owner of this pass, and the next title behind it.
        ring.store64(64 + 56, 0x0123_4567_89ab_cdf1u64.to_be());
        assert!(!queue.is_torn());
        ring.store64(4 * 64 + 56, 0xaa12_3456_4321_002cu64.to_be());
        assert!(queue.is_torn());
        ring.store64(56, 0xaa12_3456_4321_002cu64.to_be());
        assert!(!queue.is_torn());
    }

    #[test]
    fn entries_are_new_once_over_many_passes_and_fresh_ones_never() {
        let (ring, records) = (memory(8 * 64), memory(8));
        let mut queue = CompletionQueue::new(&ring, &records).unwrap();
        assert_eq!(queue.count(), 8);
        for counter in 0..8 * 20u32 {
            assert!(queue.look().is_none(), "{counter}");
            let owner = ((counter / 8) & 1) as u8;
            let tail = 0xaa12_3456_4321_0020 | u64::from(owner);
            ring.store64((counter % 8) as usize * 64 + 56, tail.to_be());
            let (_, tail) = queue.look().unwrap();
            assert_eq!((tail.kind(), tail.position(), tail.low24()), (0x20, 0x4321, 0x12_3456));
            queue.advance(1);
            queue.publish();
            assert_eq!(u32::from_be(records.load32(0)), counter + 1);
        }
        // Entries that minis were written over.
        for at in 0..8 {
            ring.store64(at * 64 + 56, 0x20u64.to_be() | 0x21u64.to_be());
        }
        queue.invalidate(8);
        assert!((0..16).all(|_| {
            let nothing = queue.look().is_none();
            queue.advance(1);
            nothing
        }));
    }
}
