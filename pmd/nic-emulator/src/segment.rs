//! Cutting large TCP packets into segments.

use crate::frame::{self, Layers, Network, TCP};

/// Most bytes of headers that are looked at.
const HEADERS: usize = 512;

/// Headers of a packet that is longer than its IP length field can say: the field counts for nothing.
pub fn layers_of_large(packet: &[u8]) -> Layers {
    let mut copy = packet[..packet.len().min(HEADERS)].to_vec();
    // Where the IP header is does not depend on its length field; make the field fit what is looked at.
    if let Some(l3) = ip_header(packet)
        && copy.len() > l3 + 40
    {
        let rest = (copy.len() - l3) as u16;
        match copy[l3] >> 4 {
            4 => copy[l3 + 2..l3 + 4].copy_from_slice(&rest.to_be_bytes()),
            6 => copy[l3 + 4..l3 + 6].copy_from_slice(&(rest - 40).to_be_bytes()),
            _ => {}
        }
    }
    frame::parse(&copy)
}

fn ip_header(packet: &[u8]) -> Option<usize> {
    let l3 = frame::parse(packet).l3;
    (l3 > 0).then_some(l3)
}

/// Cuts a packet whose headers end at `header` into segments with at most `mss` bytes of payload, each with its lengths, identification,
/// sequence number, flags and checksums.
///
/// # Errors
/// Why it cannot be cut.
pub fn cut(packet: &[u8], header: usize, mss: usize, mut take: impl FnMut(&[u8])) -> Result<(), String> {
    let layers = layers_of_large(packet);
    if layers.protocol != TCP {
        return Err("segmentation of what is not TCP".to_owned());
    }
    let end = layers.l4 + usize::from(packet[layers.l4 + 12] >> 4) * 4;
    if end != header || header > packet.len() {
        return Err(format!("the headers have {end} bytes, and the descriptor says {header}"));
    }
    let payload = &packet[header..];
    let pieces = payload.len().div_ceil(mss).max(1);
    let (l3, l4) = (layers.l3, layers.l4);
    let mut segment = Vec::with_capacity(header + mss);
    for i in 0..pieces {
        let piece = &payload[(i * mss).min(payload.len())..((i + 1) * mss).min(payload.len())];
        segment.clear();
        segment.extend_from_slice(&packet[..header]);
        segment.extend_from_slice(piece);
        let length = segment.len();
        if layers.network == Some(Network::V4) {
            segment[l3 + 2..l3 + 4].copy_from_slice(&((length - l3) as u16).to_be_bytes());
            let id = u16::from_be_bytes([packet[l3 + 4], packet[l3 + 5]]).wrapping_add(i as u16);
            segment[l3 + 4..l3 + 6].copy_from_slice(&id.to_be_bytes());
            segment[l3 + 10..l3 + 12].fill(0);
            let checksum = !frame::fold(frame::sum(&segment[l3..l3 + usize::from(segment[l3] & 0xf) * 4]));
            segment[l3 + 10..l3 + 12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            segment[l3 + 4..l3 + 6].copy_from_slice(&((length - l3 - 40) as u16).to_be_bytes());
        }
        let sequence =
            u32::from_be_bytes(packet[l4 + 4..l4 + 8].try_into().expect("four bytes")).wrapping_add((i * mss) as u32);
        segment[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
        if i + 1 < pieces {
            segment[l4 + 13] &= !0x09; // FIN and PSH belong to the last segment
        }
        if i > 0 {
            segment[l4 + 13] &= !0x80; // CWR to the first
        }
        segment[l4 + 16..l4 + 18].fill(0);
        let sum = layers.pseudo_header(&segment, length - l4) + frame::sum(&segment[l4..length]);
        segment[l4 + 16..l4 + 18].copy_from_slice(&(!frame::fold(sum)).to_be_bytes());
        take(&segment);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_carry_the_whole_payload_in_order_with_good_checksums() {
        let mut packet = vec![0u8; 54];
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14] = 0x45;
        packet[23] = TCP;
        packet[38..42].copy_from_slice(&0xffff_ff00u32.to_be_bytes());
        packet[46] = 0x50;
        packet[47] = 0x99; // CWR, ACK, PSH, FIN
        packet.extend((0..2500u32).map(|i| i as u8));
        let mut segments = Vec::new();
        cut(&packet, 54, 1000, |segment| segments.push(segment.to_vec())).unwrap();
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
}
