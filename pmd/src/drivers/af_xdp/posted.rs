// UNSAFETY: packets that the kernel holds are kept as addresses.
#![allow(unsafe_code)]

//! Which packets the kernel holds. An address that it hands back counts only if it is one of these.

use std::sync::Arc;

use wirepath_memory::Region;

use crate::packet::{Packet, STRIDE, SegmentPlace};

/// Packets of one region that were given to the kernel by one ring, at most once each.
///
/// When it is dropped, the packets return to their pools. The owner sees to it that the kernel does not write to them any more then:
/// that the socket is closed.
pub(super) struct Posted {
    region: Arc<Region>,
    /// A bit for each buffer of the region, by its offset in strides.
    bits: Box<[u64]>,
    count: u32,
}

impl Posted {
    pub(super) fn new(region: &Arc<Region>) -> Self {
        let buffers = region.bytes() / STRIDE;
        Self { region: Arc::clone(region), bits: vec![0; buffers.div_ceil(64)].into(), count: 0 }
    }

    /// How many the kernel holds.
    #[inline(always)]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Offset of the buffer that holds a segment, if it is one of this region.
    pub(super) fn buffer_of(&self, place: &SegmentPlace<'_>) -> Option<u64> {
        // Pools are cut from the start of a region on in whole strides.
        let index = place.offset / STRIDE;
        (Arc::ptr_eq(place.region, &self.region) && index < self.bits.len() * 64).then_some((index * STRIDE) as u64)
    }

    /// Index of the buffer that starts at this offset of the region, if one can.
    #[inline(always)]
    fn index(&self, offset: u64) -> Option<usize> {
        let index = offset / STRIDE as u64;
        (index * STRIDE as u64 == offset && index < self.bits.len() as u64 * 64).then_some(index as usize)
    }

    /// Takes in a packet; returns the offset of its buffer in the region. A packet from elsewhere comes back.
    #[inline(always)]
    pub(super) fn insert(&mut self, packet: Packet) -> Result<u64, Packet> {
        let (region, offset) = packet.place();
        if !Arc::ptr_eq(region, &self.region) {
            return Err(packet);
        }
        let offset = offset as u64;
        let Some(index) = self.index(offset) else { return Err(packet) };
        let (word, bit) = (index / 64, 1 << (index % 64));
        debug_assert_eq!(self.bits[word] & bit, 0, "a packet has one owner");
        self.bits[word] |= bit;
        self.count += 1;
        let _ = packet.into_raw();
        Ok(offset)
    }

    /// Takes out the packet whose buffer starts at this offset of the region; `None` if there is none.
    #[inline(always)]
    pub(super) fn take(&mut self, offset: u64) -> Option<Packet> {
        let index = self.index(offset)?;
        let (word, bit) = (index / 64, 1 << (index % 64));
        let bits = self.bits.get_mut(word)?;
        if *bits & bit == 0 {
            return None;
        }
        *bits &= !bit;
        self.count -= 1;
        // SAFETY: the bit says that this buffer's packet was taken in and not given out since. `into_raw` gave the address of the
        // buffer's start, which is what region and offset name. The kernel has given the buffer back, or can no longer write.
        Some(unsafe { Packet::from_raw(self.region.base().add(offset as usize)) })
    }

    /// Asks the processor to fetch the lines of a buffer that will soon be taken out: metadata and first data.
    #[inline(always)]
    pub(super) fn prefetch(&self, offset: u64) {
        if (offset as usize) < self.region.bytes() {
            let at = self.region.base().as_ptr().wrapping_add(offset as usize);
            crate::packet::prefetch(at);
            crate::packet::prefetch(at.wrapping_add(crate::packet::METADATA + crate::packet::HEADROOM));
        }
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        for word in 0..self.bits.len() {
            while self.bits[word] != 0 {
                let index = word * 64 + self.bits[word].trailing_zeros() as usize;
                drop(self.take((index * STRIDE) as u64));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Pool;

    #[test]
    fn only_what_was_posted_comes_out_and_only_once() {
        let pool = Pool::new("posted", 300).unwrap();
        let mut posted = Posted::new(pool.region());
        let offset = posted.insert(pool.take().unwrap()).unwrap();
        let other = posted.insert(pool.take().unwrap()).unwrap();
        assert_eq!(posted.count(), 2);
        for wrong in [offset + 1, offset + STRIDE as u64 - 1, u64::MAX, pool.region().bytes() as u64, 1 << 48] {
            assert!(posted.take(wrong).is_none(), "{wrong}");
        }
        let packet = posted.take(offset).unwrap();
        assert_eq!(packet.place().1 as u64, offset);
        assert!(posted.take(offset).is_none(), "posted once, taken twice");
        drop(packet);
        assert_ne!(offset, other);
        drop(posted);
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn packets_of_another_region_are_refused() {
        let (pool, other) = (Pool::new("ours", 8).unwrap(), Pool::new("theirs", 8).unwrap());
        let mut posted = Posted::new(pool.region());
        assert!(posted.insert(other.take().unwrap()).is_err());
        assert_eq!((posted.count(), other.outstanding()), (0, 0));
    }
}
