//! Segmentation of TCP, as NICs do it, and of UDP, which the kernel does for them.

use crate::frame::{self, HeaderOffsets, Network, TCP, UDP};
use crate::tunnel;

/// Number of header bytes that are parsed.
const HEADERS: usize = 512;

/// Headers of a packet in a tunnel. All offsets are from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelHeaders {
    /// The outer IP header.
    pub outer: HeaderOffsets,
    /// The inner IP and TCP headers.
    pub inner: HeaderOffsets,
}

/// Parses a packet that is longer than its IP length field can express. The length field is ignored.
pub fn parse_oversized(packet: &[u8]) -> HeaderOffsets {
    let layers = frame::parse(packet);
    if layers.l3 == 0 { layers } else { HeaderOffsets { vlan: layers.vlan, ..headers_at(packet, layers.l3) } }
}

/// Parses the IP header at `l3` of a packet, and the header behind it. The length field is ignored.
pub fn headers_at(packet: &[u8], l3: usize) -> HeaderOffsets {
    let mut copy = packet[l3.min(packet.len())..packet.len().min(l3 + HEADERS)].to_vec();
    let length = copy.len() as u16;
    match copy.first().map(|byte| byte >> 4) {
        Some(4) if length >= 20 => copy[2..4].copy_from_slice(&length.to_be_bytes()),
        Some(6) if length >= 40 => copy[4..6].copy_from_slice(&(length - 40).to_be_bytes()),
        _ => {}
    }
    let layers = frame::parse_ip(&copy, 0);
    HeaderOffsets { l3, l4: l3 + layers.l4, end: packet.len(), ..layers }
}

/// Cuts a packet whose headers end at `header` into segments with at most `mss` bytes of payload. Each
/// segment has its own lengths, identification, sequence number, flags and checksums.
///
/// # Errors
/// The reason why the packet cannot be segmented.
pub fn segment_tcp(packet: &[u8], header: usize, mss: usize, take: impl FnMut(&[u8])) -> Result<(), String> {
    let layers = parse_oversized(packet);
    require_tcp(&layers)?;
    cut(packet, None, &layers, header, mss, take)
}

/// Does the same inside a tunnel. Both IP headers and the outer UDP header of each segment have its lengths. An outer
/// UDP checksum stays as it is.
///
/// # Errors
/// The reason why the packet cannot be segmented.
pub fn segment_in_tunnel(
    packet: &[u8],
    tunnel: &TunnelHeaders,
    header: usize,
    mss: usize,
    take: impl FnMut(&[u8]),
) -> Result<(), String> {
    require_tcp(&tunnel.inner)?;
    cut(packet, Some(&tunnel.outer), &tunnel.inner, header, mss, take)
}

fn require_tcp(layers: &HeaderOffsets) -> Result<(), String> {
    if layers.protocol == TCP { Ok(()) } else { Err("segmentation of a packet that is not TCP".to_owned()) }
}

/// Returns the end of the TCP or UDP header.
fn header_end(packet: &[u8], layers: &HeaderOffsets) -> Result<usize, String> {
    match layers.protocol {
        TCP => match packet.get(layers.l4 + 12).ok_or("truncated headers")? >> 4 {
            words @ 5.. => Ok(layers.l4 + usize::from(words) * 4),
            words => Err(format!("a TCP header of {} bytes", words * 4)),
        },
        UDP => Ok(layers.l4 + 8),
        other => Err(format!("segmentation of a packet of protocol {other}")),
    }
}

fn cut(
    packet: &[u8],
    outer: Option<&HeaderOffsets>,
    layers: &HeaderOffsets,
    header: usize,
    mss: usize,
    mut take: impl FnMut(&[u8]),
) -> Result<(), String> {
    let end = header_end(packet, layers)?;
    if end != header || header > packet.len() {
        return Err(format!("the headers have {end} bytes, but the descriptor says {header}"));
    }
    let payload = &packet[header..];
    let pieces = payload.len().div_ceil(mss).max(1);
    let l4 = layers.l4;
    let mut segment = Vec::with_capacity(header + mss);
    for i in 0..pieces {
        let piece = &payload[(i * mss).min(payload.len())..((i + 1) * mss).min(payload.len())];
        segment.clear();
        segment.extend_from_slice(&packet[..header]);
        segment.extend_from_slice(piece);
        let length = segment.len();
        number_ip(&mut segment, layers, i as u16);
        let checksum = if layers.protocol == UDP {
            segment[l4 + 4..l4 + 6].copy_from_slice(&((length - l4) as u16).to_be_bytes());
            l4 + 6
        } else {
            write_tcp(&mut segment, packet, l4, i * mss, [i == 0, i + 1 == pieces]);
            l4 + 16
        };
        segment[checksum..checksum + 2].fill(0);
        let sum = layers.pseudo_header(&segment, length - l4) + frame::sum(&segment[l4..length]);
        // A zero checksum would mean that there is none (RFC 768).
        let sum = Some(!frame::fold(sum)).filter(|sum| *sum != 0 || layers.protocol == TCP).unwrap_or(0xffff);
        segment[checksum..checksum + 2].copy_from_slice(&sum.to_be_bytes());
        if let Some(outer) = outer {
            number_ip(&mut segment, outer, i as u16);
            if outer.protocol == UDP {
                segment[outer.l4 + 4..outer.l4 + 6].copy_from_slice(&((length - outer.l4) as u16).to_be_bytes());
            }
        }
        take(&segment);
    }
    Ok(())
}

/// Writes sequence number and flags of a segment, which is the first or the last one.
fn write_tcp(segment: &mut [u8], packet: &[u8], l4: usize, offset: usize, [is_first, is_last]: [bool; 2]) {
    let sequence = u32::from_be_bytes(packet[l4 + 4..l4 + 8].try_into().expect("four bytes"));
    segment[l4 + 4..l4 + 8].copy_from_slice(&sequence.wrapping_add(offset as u32).to_be_bytes());
    if !is_last {
        segment[l4 + 13] &= !0x09; // FIN and PSH belong to the last segment
    }
    if !is_first {
        segment[l4 + 13] &= !0x80; // CWR to the first
    }
}

/// Sets length and identification of the IP header of the `i`-th segment.
fn number_ip(segment: &mut [u8], layers: &HeaderOffsets, i: u16) {
    let (l3, length) = (layers.l3, segment.len() - layers.l3);
    if layers.network == Some(Network::V4) {
        segment[l3 + 2..l3 + 4].copy_from_slice(&(length as u16).to_be_bytes());
        let id = u16::from_be_bytes([segment[l3 + 4], segment[l3 + 5]]).wrapping_add(i);
        segment[l3 + 4..l3 + 6].copy_from_slice(&id.to_be_bytes());
        segment[l3 + 10..l3 + 12].fill(0);
        let checksum = !frame::fold(frame::sum(&segment[l3..l3 + usize::from(segment[l3] & 0xf) * 4]));
        segment[l3 + 10..l3 + 12].copy_from_slice(&checksum.to_be_bytes());
    } else {
        segment[l3 + 4..l3 + 6].copy_from_slice(&((length - 40) as u16).to_be_bytes());
    }
}

/// Segments a TCP or UDP packet of up to 64 KiB that the kernel passes to an interface with segmentation offload.
///
/// `l4` is the offset of the transport header. The packet may be inside a tunnel; each segment then gets a
/// copy of the outer headers with its own lengths and identification.
///
/// # Errors
/// The reason why the packet cannot be segmented.
pub fn segment_superframe(packet: &[u8], l4: usize, mss: usize, mut take: impl FnMut(&[u8])) -> Result<(), String> {
    let outer = frame::parse(packet);
    let inner = tunnel::inner_l3(packet, &outer).filter(|l3| *l3 < l4);
    let layers = inner.map_or_else(|| parse_oversized(packet), |l3| headers_at(packet, l3));
    if mss == 0 || layers.l4 != l4 {
        return Err(format!("a header at {l4}, segments of {mss}"));
    }
    let header = header_end(packet, &layers)?;
    if inner.is_none() {
        return cut(packet, None, &layers, header, mss, take);
    }
    let mut whole = Vec::new();
    cut(packet, Some(&outer), &layers, header, mss, |segment| {
        whole.clear();
        whole.extend_from_slice(segment);
        // A zero checksum means that the sender computes none (RFC 7348, section 5).
        if outer.protocol == UDP && whole[outer.l4 + 6..outer.l4 + 8] != [0, 0] {
            let end = whole.len();
            frame::complete(&mut whole, &HeaderOffsets { end, ..outer });
        }
        take(&whole);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_carry_the_payload_with_valid_checksums() {
        let mut packet = vec![0u8; 54];
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14] = 0x45;
        packet[23] = TCP;
        packet[38..42].copy_from_slice(&0xffff_ff00u32.to_be_bytes());
        packet[46] = 0x50;
        packet[47] = 0x99; // CWR, ACK, PSH, FIN
        packet.extend((0..2500u32).map(|i| i as u8));
        let mut segments = Vec::new();
        segment_tcp(&packet, 54, 1000, |segment| segments.push(segment.to_vec())).unwrap();
        let flags: Vec<u8> = segments.iter().map(|segment| segment[47]).collect();
        assert_eq!(flags, [0x90, 0x10, 0x19]);
        let payload: Vec<u8> = segments.iter().flat_map(|segment| segment[54..].to_vec()).collect();
        assert_eq!(payload, packet[54..]);
        for (i, segment) in segments.iter().enumerate() {
            let layers = frame::parse(segment);
            assert_eq!(layers.ip_checksum_ok(segment), Some(true));
            assert_eq!(layers.transport_checksum_ok(segment), Some(true));
            let sequence = u32::from_be_bytes(segment[38..42].try_into().unwrap());
            assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(1000 * i as u32));
        }
    }

    #[test]
    fn a_superframe_in_vxlan_becomes_whole_packets_in_vxlan() {
        in_vxlan(TCP, 54);
        in_vxlan(UDP, 42);
    }

    /// `headers` is the length of the inner headers.
    fn in_vxlan(protocol: u8, headers: usize) {
        let mut inner = vec![0u8; headers];
        inner[12..14].copy_from_slice(&[8, 0]);
        inner[14] = 0x45;
        inner[23] = protocol;
        if protocol == TCP {
            inner[46] = 0x50;
        } else {
            inner[38..40].copy_from_slice(&3008u16.to_be_bytes());
        }
        inner.extend((0..3000u32).map(|i| i as u8));
        let total = (inner.len() - 14) as u16;
        inner[16..18].copy_from_slice(&total.to_be_bytes());
        let mut packet = vec![0u8; 50];
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14] = 0x45;
        packet[16..18].copy_from_slice(&(36 + inner.len() as u16).to_be_bytes());
        packet[18..20].copy_from_slice(&7u16.to_be_bytes());
        packet[23] = UDP;
        packet[36..38].copy_from_slice(&4789u16.to_be_bytes());
        packet[38..40].copy_from_slice(&(16 + inner.len() as u16).to_be_bytes());
        packet.extend(&inner);
        for with_checksum in [false, true] {
            packet[40..42].fill(u8::from(with_checksum));
            let mut segments = Vec::new();
            segment_superframe(&packet, 50 + 34, 1400, |segment| segments.push(segment.to_vec())).unwrap();
            let lengths: Vec<_> = segments.iter().map(|segment| segment.len() - 50 - headers).collect();
            assert_eq!(lengths, [1400, 1400, 200]);
            for (i, segment) in segments.iter().enumerate() {
                let outer = frame::parse(segment);
                assert_eq!(u16::from_be_bytes([segment[18], segment[19]]), 7 + i as u16);
                assert_eq!((outer.end, outer.ip_checksum_ok(segment)), (segment.len(), Some(true)));
                assert_eq!(outer.transport_checksum_ok(segment), with_checksum.then_some(true));
                let (start, layers) = tunnel::inner(segment, &outer).unwrap();
                assert_eq!(layers.transport_checksum_ok(&segment[start..]), Some(true));
            }
        }
        if protocol == TCP {
            let mut short = packet.clone();
            short[84 + 12] = 0x40;
            assert!(segment_superframe(&short, 84, 1, |_| {}).is_err(), "a header of 16 bytes");
        }
        for (l4, mss) in [(84, 0), (4000, 100), (60, 1400), (packet.len() - 13, 1400)] {
            assert!(segment_superframe(&packet, l4, mss, |_| {}).is_err(), "{l4} {mss}");
        }
    }
}
