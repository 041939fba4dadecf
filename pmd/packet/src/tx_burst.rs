// UNSAFETY: reads a word of a packet's metadata line.
#![allow(unsafe_code)]

use std::mem::offset_of;

use super::Packet;
use super::batch::Batch;
use super::meta::{Meta, NO_SEGMENT, shift};
use super::offload::Flags;
use super::pool::Pool;

/// Word of the metadata line with next segment, pool and flags: enough to recognise a packet for the fast path.
pub(super) const WORD: usize = offset_of!(Meta, next) / 8;
const _: () = assert!(shift(offset_of!(Meta, next), WORD) == 0);
pub(super) const POOL_SHIFT: u32 = shift(offset_of!(Meta, pool), WORD);
const FLAGS_SHIFT: u32 = shift(offset_of!(Meta, flags), WORD);

/// Filter for packets of the fast path: one segment, from one pool, without certain flags.
///
/// A packet is tested with one masked comparison.
#[derive(Clone, Copy, Debug)]
pub struct FastPathFilter {
    mask: u64,
    wanted: u64,
    pub(super) pool: u8,
}

impl FastPathFilter {
    /// A filter for packets of `pool` that have one segment and none of `flags`.
    #[inline(always)]
    pub fn new(pool: &Pool, flags: Flags) -> Self {
        let pool = pool.id();
        let mask = u64::from(u32::MAX) | 0xff << POOL_SHIFT | u64::from(flags.bits()) << FLAGS_SHIFT;
        Self { mask, wanted: u64::from(NO_SEGMENT) | u64::from(pool) << POOL_SHIFT, pool }
    }

    #[inline(always)]
    fn matches(self, packet: &Packet) -> bool {
        // SAFETY: a packet owns its metadata line, which is initialised, aligned to 64 and longer than `WORD` words.
        let word = unsafe { packet.meta.as_ptr().cast::<u64>().add(WORD).read() };
        word & self.mask == self.wanted
    }
}

/// Transmit burst: packets at the front of a batch for which a driver writes descriptors.
///
/// [`InFlight::push_burst`](super::driver::InFlight::push_burst) then moves the described packets out of the batch.
#[derive(Debug)]
pub struct TxBurst<'a> {
    batch: &'a mut Batch,
    filter: FastPathFilter,
    /// Packets described so far.
    taken: usize,
    /// Most packets of the burst.
    limit: usize,
    /// True if all described packets passed the filter.
    all_fast: bool,
}

impl<'a> TxBurst<'a> {
    /// Begins a burst of at most `limit` packets of `batch`.
    #[inline(always)]
    pub fn new(batch: &'a mut Batch, limit: usize, filter: FastPathFilter) -> Self {
        let limit = limit.min(batch.len());
        Self { batch, filter, taken: 0, limit, all_fast: true }
    }

    /// Number of packets described so far.
    #[inline(always)]
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Number of packets of the burst that are not described yet.
    #[inline(always)]
    pub fn remaining(&self) -> usize {
        self.limit - self.taken
    }

    /// Describes up to `max_packets` packets of the fast path; returns how many.
    ///
    /// `describe` gets address and length of a packet's data. It ends with the first packet that the filter
    /// or `describe` rejects.
    #[inline(always)]
    pub fn describe_fast(&mut self, max_packets: usize, mut describe: impl FnMut(u64, usize) -> bool) -> usize {
        let packets = &self.batch.as_slice()[self.taken..self.limit];
        let packets = &packets[..max_packets.min(packets.len())];
        let mut count = 0;
        for packet in packets {
            if !self.filter.matches(packet) {
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

    /// Describes the next packet, whether it is one of the fast path or not.
    ///
    /// `describe` may change the packet, and accepts it with `Some`. Returns the value in `Some` and the
    /// length of the packet.
    #[inline(always)]
    pub fn describe_any<T, E>(
        &mut self,
        describe: impl FnOnce(&mut Packet) -> Result<Option<T>, E>,
    ) -> Result<Option<(T, u64)>, E> {
        let Some(packet) = self.batch.as_mut_slice()[..self.limit].get_mut(self.taken) else { return Ok(None) };
        let Some(described) = describe(packet)? else { return Ok(None) };
        self.all_fast = false;
        self.taken += 1;
        Ok(Some((described, packet.len() as u64)))
    }

    /// Splits the burst into its batch, the number of described packets, and their pool if all of them passed
    /// the filter.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (&'a mut Batch, usize, Option<u8>) {
        (self.batch, self.taken, self.all_fast.then_some(self.filter.pool))
    }
}
