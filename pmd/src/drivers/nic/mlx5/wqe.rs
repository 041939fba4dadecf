//! Encoding of send descriptors (WQEs).

use std::sync::atomic::AtomicU64;

use wirepath_memory::Slots;
use wirepath_nic_defs::mlx5::{
    CONTROL_BYTES, CONTROL_COMPLETE, ControlDs, ControlOpcode, ETH_BYTES, ETH_INLINE_DATA, ETH_INLINE_OFFSET,
    ETH_INSERT_VLAN, OPCODE_SEND, OPCODE_TSO, SEGMENT, SEGMENTS_PER_BLOCK,
};

use crate::drivers::nic::common::tso::Tso;

/// Bytes of a segment.
const SEGMENT_BYTES: usize = SEGMENT as usize;
/// Most segments of a descriptor: DPDK's limit, of the 63 that the field can hold.
pub(super) const MAX_SEGMENTS: usize = 60;
/// Basic blocks of the longest descriptor.
pub(super) const MAX_BLOCKS: u32 = (MAX_SEGMENTS as u32).div_ceil(SEGMENTS_PER_BLOCK);
/// Segments in front of the first data segment.
const LEAD: usize = (CONTROL_BYTES + ETH_BYTES) / SEGMENT_BYTES;
/// Most data segments of a packet without inline headers.
pub(super) const MAX_PIECES: usize = MAX_SEGMENTS - LEAD;
/// Most inline bytes of a packet.
pub(super) const MAX_INLINE: usize = (MAX_SEGMENTS - LEAD) * SEGMENT_BYTES;
/// Most bytes of a descriptor that is written to the BlueFlame buffer: the buffer size of all known devices.
pub(super) const MAX_BLUE_FLAME: usize = 256;
/// Second word of a control segment that requests a completion, in memory byte order.
pub(super) const COMPLETE: u64 = ((CONTROL_COMPLETE as u64) << 32).to_be();

/// A segment in a ring.
pub(super) type Segment = [AtomicU64; SEGMENT_BYTES / 8];
/// A send ring as segments.
pub(super) type Segments = Slots<Segment>;

/// Returns the first word of a control segment, in memory byte order. `index` counts basic blocks.
#[inline(always)]
pub(super) const fn control(opcode: u8, index: u32, queue: u32, segments: u32) -> u64 {
    let first = ControlOpcode(0).with_opcode(opcode as u32).with_index(index).0;
    let second = ControlDs(0).with_queue(queue).with_segments(segments).0;
    ((first as u64) << 32 | second as u64).to_be()
}

/// Returns opcode and number of segments from the first word of a control segment.
pub(super) const fn opcode_and_segments(word: u64) -> (u8, u32) {
    let word = u64::from_be(word);
    (ControlOpcode((word >> 32) as u32).opcode() as u8, ControlDs(word as u32).segments())
}

/// Returns a data segment, in memory byte order.
#[inline(always)]
pub(super) const fn pointer(address: u64, key: u32, bytes: u32) -> [u64; 2] {
    [((bytes as u64) << 32 | key as u64).to_be(), address.to_be()]
}

/// Returns the basic blocks of a descriptor.
#[inline(always)]
pub(super) const fn blocks(segments: u32) -> u32 {
    segments.div_ceil(SEGMENTS_PER_BLOCK)
}

/// Offloads of a packet, as requested from the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TxOffloads {
    /// `ETH_*_CSUM` flags.
    pub(super) checksums: u8,
    /// VLAN tag to insert.
    pub(super) tag: Option<u16>,
    /// Value of register A for egress rules.
    pub(super) metadata: u32,
    /// TCP segmentation, if requested.
    pub(super) segment: Option<Tso>,
    /// Where the headers are, if the device does not find them.
    pub(super) sw_parser: SwParser,
}

/// Fields of the software parser. All zero: the device finds the headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SwParser {
    /// Offsets of outer L4, outer L3, inner L4 and inner L3, in units of two bytes. 0: no such header.
    pub(super) offsets: [u8; 4],
    /// `SWP_*` flags.
    pub(super) flags: u8,
}

/// A descriptor of one packet under construction.
pub(super) struct Wqe {
    bytes: [u8; MAX_SEGMENTS * SEGMENT_BYTES],
    segments: usize,
    opcode: u8,
}

impl Wqe {
    /// Begins a descriptor with these offloads and the first packet bytes `inline`. `None` if they do not
    /// fit, or if a tag is to be inserted as well: both use the same field.
    pub(super) fn new(offloads: &TxOffloads, inline: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_SEGMENTS * SEGMENT_BYTES];
        let ethernet = &mut bytes[CONTROL_BYTES..];
        ethernet[..4].copy_from_slice(&offloads.sw_parser.offsets);
        ethernet[4] = offloads.checksums;
        ethernet[5] = offloads.sw_parser.flags;
        ethernet[8..12].copy_from_slice(&offloads.metadata.to_be_bytes());
        let mut opcode = OPCODE_SEND;
        if let Some(tso) = offloads.segment {
            opcode = OPCODE_TSO;
            ethernet[6..8].copy_from_slice(&tso.mss.to_be_bytes());
        }
        let mut segments = LEAD;
        if let Some(tag) = offloads.tag {
            if !inline.is_empty() {
                return None;
            }
            ethernet[ETH_INLINE_OFFSET..ETH_BYTES].copy_from_slice(&(ETH_INSERT_VLAN | u32::from(tag)).to_be_bytes());
        } else if !inline.is_empty() {
            ethernet[ETH_INLINE_OFFSET..ETH_INLINE_DATA].copy_from_slice(&(inline.len() as u16).to_be_bytes());
            ethernet.get_mut(ETH_INLINE_DATA..ETH_INLINE_DATA + inline.len())?.copy_from_slice(inline);
            segments = (CONTROL_BYTES + ETH_INLINE_DATA + inline.len()).div_ceil(SEGMENT_BYTES);
        }
        Some(Self { bytes, segments, opcode })
    }

    /// Appends a data segment. Returns false if there is no room.
    #[must_use]
    pub(super) fn push(&mut self, address: u64, key: u32, bytes: usize) -> bool {
        let (segments, _) = self.bytes.as_chunks_mut::<SEGMENT_BYTES>();
        let Some(segment) = segments.get_mut(self.segments) else { return false };
        let [first, second] = pointer(address, key, bytes as u32);
        segment[..8].copy_from_slice(&first.to_ne_bytes());
        segment[8..].copy_from_slice(&second.to_ne_bytes());
        self.segments += 1;
        true
    }

    /// Writes the descriptor at a block counter, without requesting a completion. Returns its number of
    /// blocks.
    pub(super) fn write(&self, ring: &Segments, at: u32, queue: u32) -> u32 {
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        let (segments, _) = self.bytes.as_chunks::<SEGMENT_BYTES>();
        for (i, segment) in segments[..self.segments].iter().enumerate().skip(1) {
            let words = [0, 8].map(|at| u64::from_ne_bytes(*segment[at..].first_chunk().expect("half a segment")));
            ring.write(first.wrapping_add(i as u32), words);
        }
        ring.write(first, [control(self.opcode, at, queue, self.segments as u32), 0]);
        blocks(self.segments as u32)
    }
}

const _: () = assert!(LEAD == 2 && MAX_BLOCKS == 15);
