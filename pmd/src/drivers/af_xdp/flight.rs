//! Packets that the kernel is sending.

use std::collections::VecDeque;

use super::posted::Posted;
use super::socket::BASE_MASK;
use crate::packet::{Batch, Packet, SegmentPlace};

/// Packets on their way out, found again by the addresses that the kernel reports as sent.
///
/// A packet of one segment is posted by itself. Of a chain every segment is awaited, and the chain ends when the last one has come.
/// A frozen segment may be on its way in several chains at once; each of its completions is put down to the eldest of them. That may
/// be the wrong one, but does no harm: a head is freed only after its own completion, and a frozen segment lives until the last chain
/// that holds it has seen one.
pub(super) struct Flight {
    posted: Posted,
    /// Chain segments that are awaited: offset of the buffer, and the chain. Mostly they come in order.
    awaited: VecDeque<(u64, u32)>,
    /// Chains, with the number of segments still awaited.
    chains: Vec<Option<(Packet, u32)>>,
    free: Vec<u32>,
    /// Descriptors with the kernel.
    descriptors: u32,
}

impl Flight {
    /// Room for `descriptors` descriptors: nothing is allocated later.
    pub(super) fn new(posted: Posted, descriptors: u32) -> Self {
        Self {
            posted,
            awaited: VecDeque::with_capacity(descriptors as usize),
            chains: (0..descriptors).map(|_| None).collect(),
            free: (0..descriptors).rev().collect(),
            descriptors: 0,
        }
    }

    /// Descriptors with the kernel.
    #[inline(always)]
    pub(super) fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// Offset of the buffer that holds a segment, if the kernel can reach it.
    pub(super) fn buffer_of(&self, place: &SegmentPlace<'_>) -> Option<u64> {
        self.posted.buffer_of(place)
    }

    /// Takes in a packet of one segment; returns the offset of its buffer. A packet from elsewhere comes back.
    #[inline(always)]
    pub(super) fn insert(&mut self, packet: Packet) -> Result<u64, Packet> {
        let offset = self.posted.insert(packet)?;
        self.descriptors += 1;
        Ok(offset)
    }

    /// Takes in a chain whose segments' buffers start at `offsets`. It comes back if there is no room.
    pub(super) fn insert_chain(&mut self, packet: Packet, offsets: &[u64]) -> Result<(), Packet> {
        let Some(slot) = self.free.pop() else { return Err(packet) };
        self.chains[slot as usize] = Some((packet, offsets.len() as u32));
        self.awaited.extend(offsets.iter().map(|&offset| (offset, slot)));
        self.descriptors += offsets.len() as u32;
        Ok(())
    }

    /// Notes a completion; a packet that is through goes into `done`, which must have room. `false`: nothing with that address is on
    /// its way.
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

    /// Takes the packets apart from the queue, so that they can outlive it: those of one segment, and the chains.
    pub(super) fn into_parts(self) -> (Posted, Vec<Packet>) {
        (self.posted, self.chains.into_iter().flatten().map(|(packet, _)| packet).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Pool, STRIDE};

    fn offset(packet: &Packet) -> u64 {
        packet.place().1 as u64
    }

    #[test]
    fn a_chain_ends_with_its_last_segment_whatever_the_order() {
        let pool = Pool::new("flight", 300).unwrap();
        let mut flight = Flight::new(Posted::new(pool.region()), 16);
        let mut head = pool.take().unwrap();
        assert!(head.extend_from_slice(&[7; 5000], &pool));
        let offsets: Vec<u64> = head.segment_places().map(|place| (place.offset / STRIDE * STRIDE) as u64).collect();
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
    fn a_frozen_payload_on_its_way_twice() {
        let pool = Pool::new("flood", 300).unwrap();
        let mut flight = Flight::new(Posted::new(pool.region()), 16);
        let payload = pool.take().unwrap().freeze();
        let mut heads = Vec::new();
        for _ in 0..2 {
            let packet = pool.take().unwrap().attach(&payload).unwrap();
            let offsets: Vec<u64> =
                packet.segment_places().map(|place| (place.offset / STRIDE * STRIDE) as u64).collect();
            heads.push(offsets.clone());
            flight.insert_chain(packet, &offsets).unwrap();
        }
        drop(payload);
        let mut done = Batch::new();
        // The second chain first.
        for address in [heads[1][0], heads[1][1], heads[0][1], heads[0][0]] {
            assert!(flight.complete(address, &mut done));
        }
        assert_eq!(done.len(), 2);
        done.clear();
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn what_was_never_sent_is_not_completed() {
        let pool = Pool::new("nothing", 8).unwrap();
        let mut flight = Flight::new(Posted::new(pool.region()), 4);
        let packet = pool.take().unwrap();
        let at = offset(&packet);
        let mut done = Batch::new();
        assert!(!flight.complete(at, &mut done) && !flight.complete(u64::MAX, &mut done));
        assert_eq!(flight.insert(packet).unwrap(), at);
        assert!(flight.complete(at, &mut done));
    }
}
