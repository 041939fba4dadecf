//! Superframes in UDP tunnels as datagrams that the kernel cuts (`VIRTIO_NET_HDR_GSO_UDP_L4`, Linux 6.2).
//!
//! A packet socket has no form for a superframe in a tunnel. But the packets of a tunnel superframe are UDP
//! datagrams of one length with equal headers, apart from the last one, which may be shorter. Their payloads in
//! sequence are the payload of one long datagram. The kernel cuts it into datagrams again, at the end of the path
//! at the latest. Inner headers and inner checksums are written here, payload is not copied. The
//! outer UDP checksum is always computed, because this form cannot leave it out.

use wirepath_packet::superframe::parts_from;
use wirepath_packet::{HEADROOM, Packet};
use wirepath_wire::checksum::{self, Sum, Transport};
use wirepath_wire::segment::Segmenter;
use wirepath_wire::{HeaderOffsets, L3Type, L4Type, Parsed, checksum_offload};

use super::vnet_hdr::{self, VirtioNetHdr};

/// Longest IP packet in bytes.
const MAX_IP: usize = 65_535;
/// Most datagrams of one frame (`UDP_MAX_SEGMENTS` of linux/udp.h before Linux 6.10).
const MAX_DATAGRAMS: usize = 64;
/// Most buffers that hold the payload of one segment. A segment of 9 KiB in full buffers has six.
const MAX_PARTS: usize = 16;

/// A part of the frames for the kernel, in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// Begins a frame with this virtio header.
    Frame([u8; vnet_hdr::HEADER]),
    /// Bytes of the frame.
    Bytes(&'a [u8]),
}

/// Returns whether [`write`] can convert the packet, with `scratch` bytes for headers and `parts` parts at most.
pub(crate) fn fits(packet: &Packet, parsed: &Parsed, scratch: usize, parts: usize) -> bool {
    let Some((base, segments)) = start(packet, parsed) else { return false };
    let count = segments.remaining();
    // Each frame has its own outer headers.
    let headers = (count + count / MAX_DATAGRAMS + 3) * segments.header_len();
    let per_frame = most_datagrams(base, parsed.outer(), segments.header_len() - base + usize::from(packet.mss()));
    // If the kernel refuses one of several frames, all are sent again. TCP ignores what it has, but UDP does not.
    let fits = per_frame >= count || per_frame > 0 && parsed.innermost().l4_type() == L4Type::Tcp;
    fits && headers <= scratch && 2 * count + 2 * packet.segment_count() + 8 <= parts
}

/// Returns how many datagrams with `size` bytes of payload a frame may have. `base` is the length of the outer headers.
fn most_datagrams(base: usize, outer: &HeaderOffsets, size: usize) -> usize {
    ((MAX_IP - (base - outer.l3())) / size).min(MAX_DATAGRAMS)
}

/// Returns the length of the outer headers with UDP, and the segmenter of the inner packet.
fn start<'a>(packet: &'a Packet, parsed: &Parsed) -> Option<(usize, Segmenter<'a>)> {
    let (outer, inner) = (parsed.outer(), parsed.inner()?);
    let is_segmented = matches!(inner.l4_type(), L4Type::Tcp | L4Type::Udp);
    if outer.l4_type() != L4Type::Udp || !is_segmented || outer.l4() + 8 > HEADROOM {
        return None;
    }
    let segments = Segmenter::new(packet.data(), parsed, inner.l4(), packet.mss()).ok()?;
    Some((outer.l4() + 8, segments))
}

/// Writes the headers of all frames to `scratch`, and passes the parts of the frames to `push`. Returns the rest
/// of `scratch`; `None` if the packet does not fit ([`fits`]) or `push` returns `None`.
pub(crate) fn write<'a>(
    packet: &'a Packet,
    parsed: &Parsed,
    mut scratch: &'a mut [u8],
    mut push: impl FnMut(Part<'a>) -> Option<()>,
) -> Option<&'a mut [u8]> {
    let (base, mut segments) = start(packet, parsed)?;
    let outer = parsed.outer();
    let (header_len, count) = (segments.header_len(), segments.remaining());
    let size = header_len - base + usize::from(packet.mss());
    let most = most_datagrams(base, outer, size);
    // Frames of about the same length, so that none has a superframe's cost for a few segments.
    let per_frame = count.div_ceil(count.div_ceil(most.max(1)));
    let mut payload = parts_from(packet, parsed.innermost().payload());
    let mut rest: &[u8] = &[];
    let mut in_frame = 0;
    while let Some(range) = segments.next_payload() {
        if in_frame == 0 {
            let here = segments.remaining().min(per_frame);
            // All segments have the full size, but for the last one of the superframe.
            let missing = if here == segments.remaining() { last_gap(&segments, packet.mss()) } else { 0 };
            let (headers, others) = scratch.split_at_mut_checked(base)?;
            scratch = others;
            headers.copy_from_slice(packet.data().get(..base)?);
            set_lengths(headers, outer, here * size - missing)?;
            push(Part::Frame(VirtioNetHdr::of_datagrams(outer.l4(), size)?))?;
            push(Part::Bytes(headers))?;
        }
        let (headers, others) = scratch.split_at_mut_checked(header_len)?;
        scratch = others;
        // Few buffers hold the payload of a segment: they are noted for their sum, since the headers go in front.
        let (mut parts, mut used) = ([&[][..]; MAX_PARTS], 0);
        let (mut sum, mut at) = (Sum::ZERO, 0);
        while at < range.len() {
            if rest.is_empty() {
                rest = payload.next()?;
            }
            let (now, later) = rest.split_at(rest.len().min(range.len() - at));
            sum = sum.and_at(at, checksum::sum(now));
            at += now.len();
            rest = later;
            *parts.get_mut(used)? = now;
            used += 1;
        }
        segments.next_with(headers, |_| sum)?.ok()?;
        push(Part::Bytes(&headers[base..]))?;
        for part in &parts[..used] {
            push(Part::Bytes(part))?;
        }
        in_frame = (in_frame + 1) % per_frame;
    }
    Some(scratch)
}

/// Returns the bytes that the last segment is shorter than `mss`, which the others have.
fn last_gap(segments: &Segmenter<'_>, mss: u16) -> usize {
    let mut last = segments.clone();
    last.skip(last.remaining().saturating_sub(1));
    usize::from(mss).saturating_sub(last.next_payload().map_or(0, |payload| payload.len()))
}

/// Writes the lengths of outer IP and UDP for a datagram with `len` bytes of payload. Adds the IPv4 checksum and
/// the sum of the pseudo header.
fn set_lengths(headers: &mut [u8], outer: &HeaderOffsets, len: usize) -> Option<()> {
    let (l3, l4) = (outer.l3(), outer.l4());
    let datagram = u16::try_from(8 + len).ok()?;
    let mut put = |at: usize, value: u16| -> Option<()> {
        headers.get_mut(at..at + 2)?.copy_from_slice(&value.to_be_bytes());
        Some(())
    };
    put(l4 + 4, datagram)?;
    match outer.l3_type() {
        L3Type::Ipv4 => {
            put(l3 + 2, u16::try_from(l4 - l3 + 8 + len).ok()?)?;
            put(l3 + 10, 0)?;
            let sum = checksum::sum(headers.get(l3..l4)?).checksum();
            headers.get_mut(l3 + 10..l3 + 12)?.copy_from_slice(&sum.to_be_bytes());
        }
        _ => put(l3 + 4, u16::try_from(l4 - l3 - 40 + 8 + len).ok()?)?,
    }
    let pseudo = checksum_offload::pseudo(headers, outer, Transport::Udp.protocol(), datagram.into())?;
    headers.get_mut(l4 + 6..l4 + 8)?.copy_from_slice(&pseudo.fold().to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_packet::superframe;
    use wirepath_packet::{Pool, offload::Flags};

    /// Returns an IPv4 datagram with these payload bytes, and `trailer` bytes of the IP packet behind it.
    fn datagram(port: u16, payload: &[u8], trailer: usize) -> Vec<u8> {
        let udp = 8 + payload.len() as u16;
        let mut packet = vec![0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 7];
        packet[2..4].copy_from_slice(&(20 + udp + trailer as u16).to_be_bytes());
        packet.extend([port, udp, 1].iter().flat_map(|field| field.to_be_bytes()));
        packet.extend(payload);
        packet.resize(packet.len() + trailer, 0xee);
        packet
    }

    #[test]
    fn lengths_are_those_of_the_segments() {
        let pool = Pool::new("datagrams", 8).unwrap();
        let ethernet = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        // The inner datagram fills its IP packet, or is shorter.
        for (payload, trailer) in [(1000, 0), (1000, 3), (999, 1), (700, 300), (701, 1000)] {
            let inner = datagram(99, &vec![5; payload], trailer);
            let inner = [&[8, 0, 0, 0, 0, 0, 42, 0][..], &ethernet, &inner].concat();
            let frame = [&ethernet[..], &datagram(4789, &inner, 0)].concat();
            let mut packet = pool.take().unwrap();
            assert!(packet.extend_from_slice(&frame, &pool));
            packet.set_flags(Flags::TX_SEGMENT);
            packet.set_mss(300);
            let parsed = superframe::parse(&packet, None).unwrap();
            assert!(fits(&packet, &parsed, 4096, 64));
            let (mut scratch, mut frames) = (vec![0; 4096], Vec::new());
            let rest = write(&packet, &parsed, &mut scratch, |part| {
                match part {
                    Part::Frame(_) => frames.push(Vec::new()),
                    Part::Bytes(bytes) => frames.last_mut()?.extend_from_slice(bytes),
                }
                Some(())
            });
            assert!(rest.is_some());
            let [frame] = &frames[..] else { panic!("{} frames", frames.len()) };
            let segments = payload.div_ceil(300);
            assert_eq!(frame.len(), 42 + segments * (8 + 14 + 28) + payload);
            let field = |at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
            assert_eq!((field(16), field(38)), (frame.len() - 14, frame.len() - 34), "{payload} {trailer}");
        }
    }
}
