//! Keeps the headers of TSO requests away from the end of libmlx5's send ring.
//!
//! libmlx5 writes these headers into the ring. If they continue at its start, libmlx5 puts the data segments 32 bytes
//! too far behind them (rdma-core: providers/mlx5/qp.c, `set_tso_eth_seg` ends its pointer behind the headers, and its
//! callers add the Ethernet segment once more). The device would read old bytes as addresses. So no TSO request may
//! start in the last block of the ring. A request that would end in front of that block gets more segments for the same
//! bytes, so that it fills the block.

use wirepath_memory::DeviceMemory;
use wirepath_nic_defs::mlx5::{
    CONTROL_BYTES, ETH_BYTES, ETH_INLINE_DATA, ETH_INLINE_OFFSET, RECORD_SEND, SEGMENT, SEGMENTS_PER_BLOCK, SEND_BLOCK,
};
use wirepath_verbs::Segment;
use wirepath_verbs::mlx5::SendQueue;

use super::tx::MAX_TSO_HEADER;

/// Bytes of a control segment and of an Ethernet segment without inline headers, which follow it.
const BEFORE_HEADERS: usize = CONTROL_BYTES + ETH_INLINE_DATA;
// The headers of a TSO request reach into its second block, and no further.
const _: () = assert!(BEFORE_HEADERS + MAX_TSO_HEADER <= 2 * SEND_BLOCK as usize);
const _: () = assert!(ETH_INLINE_OFFSET + 2 == ETH_INLINE_DATA && ETH_INLINE_DATA + 2 == ETH_BYTES);

/// End of the send ring of a queue pair of libmlx5.
pub(super) struct RingEnd {
    records: DeviceMemory,
    /// Blocks of the ring minus one. The ring has a power of two of them.
    last: u32,
    /// Bytes of each packet without TSO that libmlx5 copies into its request.
    inline: usize,
}

impl RingEnd {
    /// Reads the ring of a queue pair. `inline`: bytes that libmlx5 copies of each packet without TSO, 0 or 18.
    pub(super) fn new(queue: &SendQueue, inline: usize) -> Self {
        Self { records: queue.records.clone(), last: (queue.ring.bytes() / SEND_BLOCK as usize) as u32 - 1, inline }
    }

    /// Returns the position of the next request in blocks. libmlx5 writes it to the doorbell record when it posts.
    pub(super) fn position(&self) -> u32 {
        u32::from_be(self.records.load32(4 * RECORD_SEND))
    }

    /// Returns true if no TSO request may start at a position.
    pub(super) fn is_last_block(&self, position: u32) -> bool {
        position & self.last == self.last
    }

    /// Returns the position behind a request with these segments, which are divided further if the request would else
    /// end in front of the last block. `header`: bytes of headers of a TSO request. `most`: most segments of a request.
    pub(super) fn place(&self, position: u32, header: Option<usize>, segments: &mut Vec<Segment>, most: usize) -> u32 {
        let units = self.units(header, segments);
        let mut end = position.wrapping_add(units.div_ceil(SEGMENTS_PER_BLOCK));
        if self.is_last_block(end) {
            let more = units.next_multiple_of(SEGMENTS_PER_BLOCK) + 1 - units;
            let inline = if header.is_some() { 0 } else { self.inline };
            if segments.len() + more as usize <= most && divide(segments, more, inline as u32) {
                end = end.wrapping_add(1);
            }
        }
        end
    }

    /// Returns the length of a request in units of [`SEGMENT`] bytes, as libmlx5 computes it (`_mlx5_post_send`).
    fn units(&self, header: Option<usize>, segments: &[Segment]) -> u32 {
        let (fixed, mut inline) = match header {
            Some(header) => (BEFORE_HEADERS + header, 0),
            None => (CONTROL_BYTES + (ETH_BYTES + self.inline) / SEGMENT as usize * SEGMENT as usize, self.inline),
        };
        // Segments whose bytes are all inline have no data segment.
        let data = segments.iter().filter(|segment| {
            let rest = segment.bytes as usize > inline;
            inline = inline.saturating_sub(segment.bytes as usize);
            rest
        });
        (fixed.div_ceil(SEGMENT as usize) + data.count()) as u32
    }
}

/// Divides the longest segment into `more` further ones, of which the last ones have one byte each. Returns false if
/// it is too short, where the first `inline` bytes of the packet do not count.
fn divide(segments: &mut Vec<Segment>, more: u32, inline: u32) -> bool {
    let longest = segments.iter().enumerate().max_by_key(|(_, segment)| segment.bytes).map(|(at, _)| at);
    let Some(at) = longest.filter(|at| segments[*at].bytes > inline + more) else { return false };
    let first = &mut segments[at];
    first.bytes -= more;
    let Segment { address, bytes, key } = *first;
    for n in 0..more {
        let address = address + u64::from(bytes + n);
        segments.insert(at + 1 + n as usize, Segment { address, bytes: 1, key });
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::nic::common::test_support::memory;

    fn ring_end(inline: usize) -> RingEnd {
        RingEnd { records: memory(8), last: 63, inline }
    }

    fn segment(address: u64, bytes: u32) -> Segment {
        Segment { address, bytes, key: 5 }
    }

    #[test]
    fn requests_have_the_length_that_libmlx5_computes() {
        let (plain, inline) = (ring_end(0), ring_end(18));
        assert_eq!(plain.units(None, &[segment(0, 60)]), 3);
        assert_eq!(inline.units(None, &[segment(0, 60)]), 4);
        assert_eq!(inline.units(None, &[segment(0, 18), segment(0, 9)]), 4, "the first one is inline");
        assert_eq!(inline.units(None, &[segment(0, 10), segment(0, 8)]), 3, "both are inline");
        // Control segment, 14 bytes of the Ethernet segment, headers.
        for (header, units) in [(54, 6), (66, 6), (67, 7), (74, 7), (98, 8)] {
            assert_eq!(inline.units(Some(header), &[segment(0, 60)]), units + 1, "{header}");
        }
    }

    #[test]
    fn no_request_ends_in_front_of_the_last_block() {
        let end = ring_end(18);
        for position in 0..64 {
            for pieces in 1..9 {
                for header in [None, Some(54), Some(90)] {
                    let mut segments: Vec<_> = (0..pieces).map(|n| segment(1000 * n, 100)).collect();
                    let before = end.units(header, &segments);
                    let next = end.place(position, header, &mut segments, 30);
                    assert!(!end.is_last_block(next));
                    assert_eq!(next, position + end.units(header, &segments).div_ceil(4));
                    let is_longer = (position + before.div_ceil(4)) % 64 == 63;
                    assert_eq!(segments.len() as u64 > pieces, is_longer, "{position} {pieces}");
                    let bytes: Vec<u64> =
                        segments.iter().flat_map(|it| it.address..it.address + u64::from(it.bytes)).collect();
                    let expected: Vec<u64> = (0..pieces).flat_map(|n| 1000 * n..1000 * n + 100).collect();
                    assert_eq!(bytes, expected);
                }
            }
        }
    }

    #[test]
    fn requests_that_cannot_be_longer_stay() {
        let end = ring_end(18);
        let mut short = vec![segment(0, 19)];
        assert!(end.is_last_block(end.place(62, None, &mut short, 30)));
        let mut full: Vec<_> = (0..5).map(|n| segment(n, 100)).collect();
        assert!(end.is_last_block(end.place(61, None, &mut full, 5)));
        assert_eq!((short.len(), full.len()), (1, 5));
    }
}
