//! Packets that the kernel is sending.

use std::collections::VecDeque;

use super::posted_buffers::PostedBuffers;
use super::socket::BASE_MASK;
use wirepath_packet::{Batch, DmaSegment, Packet};

/// Packets in flight, found by the addresses that the kernel reports as completed.
///
/// A packet of one segment is posted by itself. For a chain, each segment is awaited, and the chain is
/// complete with its last segment.
///
/// A shared segment may be in flight in several chains at once. Each of its completions is credited to the
/// oldest of them, which may be the wrong one. That is harmless: a head is freed only after its own
/// completion, and the shared segment lives until the last chain with it is complete.
pub(super) struct TxInFlight {
    posted: PostedBuffers,
    /// Awaited chain segments: buffer offset and chain. They usually complete in order.
    awaited: VecDeque<(u64, u32)>,
    /// Chains, with the number of awaited segments.
    chains: Vec<Option<(Packet, u32)>>,
    free: Vec<u32>,
    /// Descriptors that the kernel owns.
    descriptors: u32,
}

impl TxInFlight {
    /// Allocates space for `descriptors` descriptors; nothing is allocated later.
    pub(super) fn new(posted: PostedBuffers, descriptors: u32) -> Self {
        Self {
            posted,
            awaited: VecDeque::with_capacity(descriptors as usize),
            chains: (0..descriptors).map(|_| None).collect(),
            free: (0..descriptors).rev().collect(),
            descriptors: 0,
        }
    }

    /// Returns the number of descriptors that the kernel owns.
    #[inline(always)]
    pub(super) fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// Returns the offset of the buffer that holds a segment, if it lies in the registered memory.
    pub(super) fn buffer_offset(&self, segment: &DmaSegment<'_>) -> Option<u64> {
        self.posted.buffer_offset(segment)
    }

    /// Adds a packet of one segment and returns the offset of its buffer. A packet of another region is
    /// returned as the error.
    #[inline(always)]
    pub(super) fn insert(&mut self, packet: Packet) -> Result<u64, Packet> {
        let offset = self.posted.insert(packet)?;
        self.descriptors += 1;
        Ok(offset)
    }

    /// Adds a chain whose segments lie in the buffers at `offsets`. Returns the chain as the error if there
    /// is no free slot.
    pub(super) fn insert_chain(&mut self, packet: Packet, offsets: &[u64]) -> Result<(), Packet> {
        let Some(slot) = self.free.pop() else { return Err(packet) };
        self.chains[slot as usize] = Some((packet, offsets.len() as u32));
        self.awaited.extend(offsets.iter().map(|&offset| (offset, slot)));
        self.descriptors += offsets.len() as u32;
        Ok(())
    }

    /// Handles a completion. A completed packet is pushed to `done`, which must have space. Returns `false`
    /// if no buffer at that address is in flight.
    #[inline(always)]
    pub(super) fn complete(&mut self, address: u64, done: &mut Batch) -> bool {
        let offset = address & BASE_MASK;
        let through = match self.posted.take(offset) {
            Some(packet) => Some(packet),
            None => match self.complete_segment(offset) {
                Some(through) => through,
                None => return false,
            },
        };
        self.descriptors -= 1;
        if let Some(packet) = through {
            let pushed = done.push(packet);
            debug_assert!(pushed.is_ok(), "no more completions were peeked than fit");
        }
        true
    }

    #[cold]
    fn complete_segment(&mut self, offset: u64) -> Option<Option<Packet>> {
        let at = self.awaited.iter().position(|&(awaited, _)| awaited == offset)?;
        let (_, slot) = self.awaited.remove(at)?;
        let chain = self.chains.get_mut(slot as usize)?;
        let (_, left) = chain.as_mut()?;
        *left -= 1;
        if *left > 0 {
            return Some(None);
        }
        self.free.push(slot);
        Some(chain.take().map(|(packet, _)| packet))
    }

    /// Returns the posted packets and the chains, so that they can outlive the queue.
    pub(super) fn into_parts(self) -> (PostedBuffers, Vec<Packet>) {
        (self.posted, self.chains.into_iter().flatten().map(|(packet, _)| packet).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_packet::{Pool, STRIDE};

    fn offset(packet: &Packet) -> u64 {
        packet.buffer_location().1 as u64
    }

    #[test]
    fn a_chain_ends_with_its_last_segment_whatever_the_order() {
        let pool = Pool::new("flight", 300).unwrap();
        let mut flight = TxInFlight::new(PostedBuffers::new(pool.region()), 16);
        let mut head = pool.take().unwrap();
        assert!(head.extend_from_slice(&[7; 5000], &pool));
        let offsets: Vec<u64> = head.dma_segments().map(|segment| (segment.offset / STRIDE * STRIDE) as u64).collect();
        assert_eq!(offsets.len(), 3);
        flight.insert_chain(head, &offsets).unwrap();
        assert_eq!(flight.descriptors(), 3);
        let mut done = Batch::new();
        assert!(flight.complete(offsets[2], &mut done) && flight.complete(offsets[0], &mut done));
        assert!(done.is_empty());
        assert!(!flight.complete(offsets[0], &mut done), "completed twice");
        assert!(flight.complete(offsets[1] | 320 << 48, &mut done));
        assert_eq!((done.len(), flight.descriptors()), (1, 0));
        done.clear();
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn a_shared_segment_is_in_flight_twice() {
        let pool = Pool::new("flood", 300).unwrap();
        let mut flight = TxInFlight::new(PostedBuffers::new(pool.region()), 16);
        let payload = pool.take().unwrap().into_shared();
        let mut heads = Vec::new();
        for _ in 0..2 {
            let packet = pool.take().unwrap().append_shared(&payload).unwrap();
            let offsets: Vec<u64> =
                packet.dma_segments().map(|segment| (segment.offset / STRIDE * STRIDE) as u64).collect();
            heads.push(offsets.clone());
            flight.insert_chain(packet, &offsets).unwrap();
        }
        drop(payload);
        let mut done = Batch::new();
        // The second chain completes first.
        for address in [heads[1][0], heads[1][1], heads[0][1], heads[0][0]] {
            assert!(flight.complete(address, &mut done));
        }
        assert_eq!(done.len(), 2);
        done.clear();
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn unsent_packets_are_not_completed() {
        let pool = Pool::new("nothing", 8).unwrap();
        let mut flight = TxInFlight::new(PostedBuffers::new(pool.region()), 4);
        let packet = pool.take().unwrap();
        let at = offset(&packet);
        let mut done = Batch::new();
        assert!(!flight.complete(at, &mut done) && !flight.complete(u64::MAX, &mut done));
        assert_eq!(flight.insert(packet).unwrap(), at);
        assert!(flight.complete(at, &mut done));
    }
}
