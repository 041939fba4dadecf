// UNSAFETY: packets that the kernel owns are stored as addresses.
#![allow(unsafe_code)]

//! The packets that the kernel owns. Addresses that the kernel returns are accepted only if they belong to
//! one of these.

use std::sync::Arc;

use wirepath_memory::Region;

use wirepath_packet::{DmaSegment, Packet, STRIDE};

/// Packets of one region that one ring has posted to the kernel, each at most once.
///
/// Dropping this value returns the packets to their pools. The owner guarantees that the kernel no longer
/// writes to them then, because the socket is closed.
pub(super) struct PostedBuffers {
    region: Arc<Region>,
    /// One bit for each buffer of the region, indexed by its offset in strides.
    bits: Box<[u64]>,
    count: u32,
}

impl PostedBuffers {
    pub(super) fn new(region: &Arc<Region>) -> Self {
        let buffers = region.bytes() / STRIDE;
        Self { region: Arc::clone(region), bits: vec![0; buffers.div_ceil(64)].into(), count: 0 }
    }

    /// Returns the number of packets that the kernel owns.
    #[inline(always)]
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Returns the offset of the buffer that holds a segment, if the segment lies in this region.
    pub(super) fn buffer_offset(&self, segment: &DmaSegment<'_>) -> Option<u64> {
        // A pool starts at the begin of its region and is divided into whole strides.
        let index = segment.offset / STRIDE;
        (Arc::ptr_eq(segment.region, &self.region) && index < self.bits.len() * 64).then_some((index * STRIDE) as u64)
    }

    /// Returns the index of the buffer at this offset, if the offset is valid.
    #[inline(always)]
    fn index(&self, offset: u64) -> Option<usize> {
        let index = offset / STRIDE as u64;
        (index * STRIDE as u64 == offset && index < self.bits.len() as u64 * 64).then_some(index as usize)
    }

    /// Adds a packet and returns the offset of its buffer in the region. A packet of another region is
    /// returned as the error.
    #[inline(always)]
    pub(super) fn insert(&mut self, packet: Packet) -> Result<u64, Packet> {
        let (region, offset) = packet.buffer_location();
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

    /// Removes the packet whose buffer starts at this offset of the region. `None` if there is none.
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
        // SAFETY: the bit shows that this packet was added with `into_raw` and not removed since. Region and
        // offset give the address that `into_raw` returned. The kernel has returned the buffer, or can no
        // longer write to it because the socket is closed.
        Some(unsafe { Packet::from_raw(self.region.base().add(offset as usize)) })
    }

    /// Prefetches the metadata and the first data of a buffer that will be removed soon.
    #[inline(always)]
    pub(super) fn prefetch(&self, offset: u64) {
        if (offset as usize) < self.region.bytes() {
            let at = self.region.base().as_ptr().wrapping_add(offset as usize);
            wirepath_packet::driver::prefetch(at);
            wirepath_packet::driver::prefetch(at.wrapping_add(wirepath_packet::METADATA + wirepath_packet::HEADROOM));
        }
    }
}

impl Drop for PostedBuffers {
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
    use wirepath_packet::Pool;

    #[test]
    fn only_posted_buffers_come_back_and_once() {
        let pool = Pool::new("posted", 300).unwrap();
        let mut posted = PostedBuffers::new(pool.region());
        let offset = posted.insert(pool.take().unwrap()).unwrap();
        let other = posted.insert(pool.take().unwrap()).unwrap();
        assert_eq!(posted.count(), 2);
        for wrong in [offset + 1, offset + STRIDE as u64 - 1, u64::MAX, pool.region().bytes() as u64, 1 << 48] {
            assert!(posted.take(wrong).is_none(), "{wrong}");
        }
        let packet = posted.take(offset).unwrap();
        assert_eq!(packet.buffer_location().1 as u64, offset);
        assert!(posted.take(offset).is_none(), "posted once, taken twice");
        drop(packet);
        assert_ne!(offset, other);
        drop(posted);
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn packets_of_another_region_are_refused() {
        let (pool, other) = (Pool::new("ours", 8).unwrap(), Pool::new("theirs", 8).unwrap());
        let mut posted = PostedBuffers::new(pool.region());
        assert!(posted.insert(other.take().unwrap()).is_err());
        assert_eq!((posted.count(), other.outstanding()), (0, 0));
    }
}
