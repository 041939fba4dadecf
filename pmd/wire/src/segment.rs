//! Cuts superframes into frames: TCP segmentation (TSO) and UDP segmentation (USO), inside tunnels too.
//!
//! A kernel delivers frames of up to 64 KiB whose segmentation it left to a NIC (`virtio_net_hdr` with a
//! `gso_size`). All frames cut from one superframe have the same headers, except for lengths, IPv4
//! identifications, TCP sequence number and flags, and checksums. This includes the outer headers.
//! [`Segmenter`] writes these headers and returns the payload range that follows; it copies no payload.

use core::fmt;
use core::ops::Range;

use crate::checksum::{self, Sum, Transport};
use crate::field::{be16, get, put};
use crate::parse::{HeaderOffsets, L3Type, L4Type, Parsed};
use crate::tcp::flags;
use crate::{checksum_offload, gre, ipv4, ipv6, tcp, udp};

/// Maximum number of frames that are cut from one superframe. 64 KiB with the smallest TCP segment size of
/// Linux (88) make 745.
pub const MAX_SEGMENTS: usize = 1024;

/// Maximum number of datagrams that are cut from one superframe of UDP: `UDP_MAX_SEGMENTS` of linux/udp.h, beyond which
/// the kernel refuses a superframe too.
pub const MAX_DATAGRAMS: usize = 128;

/// Reasons why a frame cannot be segmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentError {
    /// The segment size is zero.
    NoSize,
    /// No TCP or UDP header at the given offset.
    NotTransport,
    /// The packet, or the outer packet of its tunnel, is a fragment.
    Fragment,
    /// Not all headers lie in the first buffer.
    HeaderSplit,
    /// More than [`MAX_SEGMENTS`] frames, or [`MAX_DATAGRAMS`] of UDP.
    TooMany,
    /// A frame would be longer than IP allows.
    TooLong,
    /// The buffer for headers is too short.
    BufferTooShort,
}

impl fmt::Display for SegmentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SegmentError::NoSize => "the segment size is zero",
            SegmentError::NotTransport => "no TCP or UDP header where segmentation is asked for",
            SegmentError::Fragment => "a fragment cannot be segmented",
            SegmentError::HeaderSplit => "the headers are not all in the first buffer",
            SegmentError::TooMany => "the segment size would make too many frames",
            SegmentError::TooLong => "a segment would be longer than IP allows",
            SegmentError::BufferTooShort => "the buffer is too short for the headers",
        })
    }
}

impl core::error::Error for SegmentError {}

/// A frame cut from a superframe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Length of the written headers, bytes. It is the same for all segments of a superframe.
    pub header_len: usize,
    /// Payload range in the superframe that follows the headers.
    pub payload: Range<usize>,
}

/// Segments one superframe.
#[derive(Clone, Debug)]
pub struct Segmenter<'a> {
    headers: &'a [u8],
    /// The outer stack, if the inner stack is segmented.
    outer: Option<HeaderOffsets>,
    /// The stack whose payload is segmented.
    inner: HeaderOffsets,
    payload_len: usize,
    size: usize,
    next: usize,
    count: usize,
}

impl<'a> Segmenter<'a> {
    /// Prepares to cut the payload after the layer-4 header at `l4` (`csum_start` of a `virtio_net_hdr`) into
    /// segments of `size` bytes.
    ///
    /// `head` is the superframe or its first buffer, which must hold all headers. `l4` selects the outer or
    /// the inner stack: either the VXLAN datagram itself is repeated, or the packet in it is.
    pub fn new(head: &'a [u8], parsed: &Parsed, l4: usize, size: u16) -> Result<Self, SegmentError> {
        let (outer, inner) = match parsed.inner() {
            Some(inner) if inner.l4() == l4 => (Some(*parsed.outer()), *inner),
            _ if parsed.outer().l4() == l4 => (None, *parsed.outer()),
            _ => return Err(SegmentError::NotTransport),
        };
        // Every frame would need another GRE checksum or sequence number.
        let rewritten = gre::FLAG_CHECKSUM | gre::FLAG_SEQUENCE;
        // The payload may continue in further buffers, so that the header has no view.
        let gre_flags = |o: &HeaderOffsets| head.get(o.l4()..)?.first_chunk().map(|flags| u16::from_be_bytes(*flags));
        let is_rewritten = |o: &HeaderOffsets| gre_flags(o).is_none_or(|flags| flags & rewritten != 0);
        if outer.is_some_and(|o| o.l4_type() == L4Type::Gre && is_rewritten(&o)) {
            return Err(SegmentError::NotTransport);
        }
        if inner.is_fragment() || outer.is_some_and(|o| o.is_fragment()) {
            return Err(SegmentError::Fragment);
        }
        if !matches!(inner.l4_type(), L4Type::Tcp | L4Type::Udp) {
            return Err(SegmentError::NotTransport);
        }
        if size == 0 {
            return Err(SegmentError::NoSize);
        }
        let headers = head.get(..inner.payload()).ok_or(SegmentError::HeaderSplit)?;
        // A datagram may be shorter than its packet.
        let end = match inner.udp_end(head) {
            Some(end) => end,
            None => inner.end(),
        };
        let payload_len = end.checked_sub(inner.payload()).ok_or(SegmentError::NotTransport)?;
        let size = usize::from(size);
        let count = payload_len.div_ceil(size).max(1);
        let most = if inner.l4_type() == L4Type::Tcp { MAX_SEGMENTS } else { MAX_DATAGRAMS };
        if count > most {
            return Err(SegmentError::TooMany);
        }
        // The outermost IP header has the largest length field.
        let first = outer.as_ref().unwrap_or(&inner);
        if headers.len() - first.l3() + size.min(payload_len) > usize::from(u16::MAX) {
            return Err(SegmentError::TooLong);
        }
        Ok(Segmenter { headers, outer, inner, payload_len, size, next: 0, count })
    }

    /// Returns the length of the headers of each frame, bytes.
    pub fn header_len(&self) -> usize {
        self.headers.len()
    }

    /// Returns the number of frames that are left.
    pub fn remaining(&self) -> usize {
        self.count - self.next
    }

    /// Skips the next `n` frames, for a receiver that resumes a superframe after it took the first ones.
    pub fn skip(&mut self, n: usize) {
        self.next = self.next.saturating_add(n).min(self.count);
    }

    /// Returns the payload range of the next frame in the superframe; `None` after the last frame.
    pub fn next_payload(&self) -> Option<Range<usize>> {
        let start = self.next * self.size;
        let at = self.inner.payload() + start;
        (self.next < self.count).then(|| at..at + self.size.min(self.payload_len - start))
    }

    /// Writes the next frame's headers; see [`Segmenter::next_with`]. The superframe lies in one buffer.
    pub fn next_into(&mut self, out: &mut [u8], frame: &[u8]) -> Option<Result<Segment, SegmentError>> {
        self.next_with(out, |payload| checksum::sum(frame.get(payload).unwrap_or(&[])))
    }

    /// Writes the headers of the next frame to the front of `out` and returns its payload range. Returns
    /// `None` after the last frame.
    ///
    /// `payload_sum` returns the sum of a byte range of the superframe, as if the range started at an even
    /// offset. After an error the same frame is next.
    pub fn next_with(
        &mut self,
        out: &mut [u8],
        payload_sum: impl FnOnce(Range<usize>) -> Sum,
    ) -> Option<Result<Segment, SegmentError>> {
        let payload = self.next_payload()?;
        let start = self.next * self.size;
        let written = out
            .get_mut(..self.headers.len())
            .and_then(|out| self.write(out, start, payload.len(), payload_sum(payload.clone())));
        if written.is_none() {
            return Some(Err(SegmentError::BufferTooShort));
        }
        self.next += 1;
        Some(Ok(Segment { header_len: self.headers.len(), payload }))
    }

    /// Writes the headers of the segment with `len` bytes of payload at `start` of the superframe's payload.
    /// Returns `None` only if the offsets do not belong to the headers.
    fn write(&self, out: &mut [u8], start: usize, len: usize, payload: Sum) -> Option<()> {
        out.copy_from_slice(self.headers);
        let l4 = self.inner.l4();
        let l4_len = out.len() - l4 + len;
        let transport = match self.inner.l4_type() {
            L4Type::Tcp => {
                let h: &mut [u8; tcp::HEADER_LEN] = out.get_mut(l4..)?.first_chunk_mut()?;
                let seq = u32::from_be_bytes(get::<4, 4, 20>(h)).wrapping_add(start as u32);
                put::<4, 4, 20>(h, seq.to_be_bytes());
                if self.next + 1 != self.count {
                    h[13] &= !(flags::FIN | flags::PSH);
                }
                if self.next != 0 {
                    // RFC 3168 section 6.1.2: CWR is set once per window reduction, so only in the first
                    // segment.
                    h[13] &= !flags::CWR;
                }
                Transport::Tcp
            }
            _ => {
                let h: &mut [u8; udp::HEADER_LEN] = out.get_mut(l4..)?.first_chunk_mut()?;
                put::<4, 2, 8>(h, (l4_len as u16).to_be_bytes());
                Transport::Udp
            }
        };
        self.ip(out, &self.inner, len)?;
        seal(out, &self.inner, transport, l4_len, payload)?;
        if let Some(outer) = &self.outer {
            let l4 = outer.l4();
            let l4_len = out.len() - l4 + len;
            if outer.is_ip() {
                self.ip(out, outer, len)?;
            }
            if outer.l4_type() == L4Type::Udp {
                let h: &mut [u8; udp::HEADER_LEN] = out.get_mut(l4..)?.first_chunk_mut()?;
                put::<4, 2, 8>(h, (l4_len as u16).to_be_bytes());
                seal(out, outer, Transport::Udp, l4_len, payload)?;
            }
        }
        Some(())
    }

    /// Writes length, identification and checksum of an IP header.
    fn ip(&self, out: &mut [u8], layers: &HeaderOffsets, len: usize) -> Option<()> {
        let l3 = layers.l3();
        let total = out.len() - l3 + len;
        match layers.l3_type() {
            L3Type::Ipv4 => {
                let header = out.get_mut(l3..layers.l4())?;
                let h: &mut [u8; ipv4::HEADER_LEN] = header.first_chunk_mut()?;
                put::<2, 2, 20>(h, (total as u16).to_be_bytes());
                let ident = be16::<4, 20>(h).wrapping_add(self.next as u16);
                put::<4, 2, 20>(h, ident.to_be_bytes());
                put::<10, 2, 20>(h, [0, 0]);
                let checksum = checksum::sum(header).checksum();
                put::<10, 2, 20>(header.first_chunk_mut()?, checksum.to_be_bytes());
            }
            _ => {
                let h: &mut [u8; ipv6::HEADER_LEN] = out.get_mut(l3..)?.first_chunk_mut()?;
                put::<4, 2, 40>(h, ((total - ipv6::HEADER_LEN) as u16).to_be_bytes());
            }
        }
        Some(())
    }
}

/// Writes the layer-4 checksum over headers and payload. An absent UDP checksum stays absent.
fn seal(out: &mut [u8], layers: &HeaderOffsets, transport: Transport, l4_len: usize, payload: Sum) -> Option<()> {
    let pseudo = checksum_offload::pseudo(out, layers, transport.protocol(), l4_len)?;
    let segment = out.get_mut(layers.l4()..)?;
    if transport == Transport::Udp && transport.field(segment)? == 0 {
        return Some(());
    }
    transport.set_field(segment, 0);
    // All headers have an even length. `and_at` would handle an odd one as well.
    let total = pseudo.and(checksum::sum(segment)).and_at(segment.len(), payload);
    transport.set_field(segment, transport.encode(total));
    Some(())
}
