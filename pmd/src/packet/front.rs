// UNSAFETY: reads a packet's metadata line by words, and says which packets may be freed without a look at theirs.
#![allow(unsafe_code)]

use std::mem::offset_of;

use super::Packet;
use super::batch::Batch;
use super::meta::{Meta, NO_SEGMENT, shift};
use super::offload::Flags;
use super::pool::Pool;

/// The word of a metadata line that says whether there is more to a packet than an address and a length.
pub(super) const WORD: usize = offset_of!(Meta, next) / 8;
const _: () = assert!(shift(offset_of!(Meta, next), WORD) == 0);
pub(super) const POOL_SHIFT: u32 = shift(offset_of!(Meta, pool), WORD);
const FLAGS_SHIFT: u32 = shift(offset_of!(Meta, flags), WORD);

/// What plain packets are: of one segment, from one pool, without some flags. One masked comparison tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    mask: u64,
    wanted: u64,
    pub(super) pool: u8,
}

impl Plain {
    /// Packets of `pool` with none of `flags`.
    #[inline(always)]
    pub(crate) fn of(pool: &Pool, flags: Flags) -> Self {
        let pool = pool.id();
        let mask = u64::from(u32::MAX) | 0xff << POOL_SHIFT | u64::from(flags.bits()) << FLAGS_SHIFT;
        Self { mask, wanted: u64::from(NO_SEGMENT) | u64::from(pool) << POOL_SHIFT, pool }
    }

    #[inline(always)]
    fn is(self, packet: &Packet) -> bool {
        // SAFETY: the packet's own metadata, initialised and aligned to 64; the word is inside.
        let word = unsafe { packet.meta.as_ptr().cast::<u64>().add(WORD).read() };
        word & self.mask == self.wanted
    }
}

/// The packets at the front of a batch, on their way to a device: gone through one by one, then taken by [`super::Held::take`].
#[derive(Debug)]
pub(crate) struct Front<'a> {
    batch: &'a mut Batch,
    plain: Plain,
    /// Packets that were gone through.
    taken: usize,
    /// How many may be.
    most: usize,
    /// Whether all of those were plain.
    pub(super) all_plain: bool,
}

impl<'a> Front<'a> {
    /// Of `batch`, `most` packets or all that there are.
    #[inline(always)]
    pub(crate) fn new(batch: &'a mut Batch, most: usize, plain: Plain) -> Self {
        let most = most.min(batch.len());
        Self { batch, plain, taken: 0, most, all_plain: true }
    }

    /// Packets that were gone through.
    #[inline(always)]
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// Packets that are left.
    #[inline(always)]
    pub(crate) fn left(&self) -> usize {
        self.most - self.taken
    }

    /// Goes through plain packets, at most so many, as long as `describe` accepts the address and length of their data; returns how many.
    #[inline(always)]
    pub(crate) fn plain(&mut self, most: usize, mut describe: impl FnMut(u64, usize) -> bool) -> usize {
        let packets = &self.batch.as_slice()[self.taken..self.most];
        let packets = &packets[..most.min(packets.len())];
        let mut count = 0;
        for packet in packets {
            if !self.plain.is(packet) {
                break;
            }
            let data = packet.data();
            if !describe(data.as_ptr() as u64, data.len()) {
                break;
            }
            count += 1;
        }
        self.taken += count;
        count
    }

    /// The next packet, whatever it is; `describe` may change it, and accepts it by `Some`. Returns what it said, with the packet's length.
    #[inline(always)]
    pub(crate) fn any<T, E>(
        &mut self,
        describe: impl FnOnce(&mut Packet) -> Result<Option<T>, E>,
    ) -> Result<Option<(T, u64)>, E> {
        let Some(packet) = self.batch.as_mut_slice()[..self.most].get_mut(self.taken) else { return Ok(None) };
        let Some(described) = describe(packet)? else { return Ok(None) };
        self.all_plain = false;
        self.taken += 1;
        Ok(Some((described, packet.len() as u64)))
    }

    /// The batch, of whose front [`Self::taken`] packets are to be moved out, and the pool of all of these if they are plain.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (&'a mut Batch, usize, Option<u8>) {
        (self.batch, self.taken, self.all_plain.then_some(self.plain.pool))
    }
}
