//! Inner headers of tunnel packets, as far as a NIC parses them.

use crate::frame::{self, HeaderOffsets, Network, TCP, UDP};

const GRE: u8 = 47;
const VXLAN_PORT: u16 = 4789;
const GENEVE_PORT: u16 = 6081;
const TRANSPARENT_BRIDGING: u16 = 0x6558;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// Returns the offset of the Ethernet frame inside VXLAN, GENEVE or GRE, and its header offsets relative to
/// that. Returns `None` for tunnels whose payload has no Ethernet header.
#[inline]
pub fn inner(frame: &[u8], outer: &HeaderOffsets) -> Option<(usize, HeaderOffsets)> {
    let port = || frame.get(outer.l4 + 2..outer.l4 + 4).map(|port| u16::from_be_bytes([port[0], port[1]]));
    match outer.protocol {
        TCP => None,
        UDP if !matches!(port(), Some(VXLAN_PORT | GENEVE_PORT)) => None,
        _ => match payload(frame, outer)? {
            (start, TRANSPARENT_BRIDGING) => Some((start, frame::parse(&frame[start..outer.end.min(frame.len())]))),
            _ => None,
        },
    }
}

/// Returns the offset of the IP header inside VXLAN, GENEVE or GRE, which may follow an Ethernet header.
pub fn inner_l3(frame: &[u8], outer: &HeaderOffsets) -> Option<usize> {
    match payload(frame, outer)? {
        (start, TRANSPARENT_BRIDGING) => {
            let l3 = frame::parse(&frame[start..outer.end.min(frame.len())]).l3;
            (l3 > 0).then_some(start + l3)
        }
        (start, IPV4 | IPV6) => Some(start),
        _ => None,
    }
}

/// Returns the offset and the EtherType of the payload of a tunnel. An Ethernet header is complete.
fn payload(frame: &[u8], outer: &HeaderOffsets) -> Option<(usize, u16)> {
    let half = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let (start, kind) = match outer.protocol {
        TCP => return None,
        UDP => {
            let header = outer.l4 + 8;
            match half(outer.l4 + 2)? {
                VXLAN_PORT => (header + 8, TRANSPARENT_BRIDGING),
                GENEVE_PORT => (header + 8 + 4 * usize::from(*frame.get(header)? & 0x3f), half(header + 2)?),
                _ => return None,
            }
        }
        _ => {
            let carries_gre = match outer.network? {
                Network::V4 => frame.get(outer.l3 + 9) == Some(&GRE) && half(outer.l3 + 6)? & 0x3fff == 0,
                Network::V6 => frame.get(outer.l3 + 6) == Some(&GRE),
            };
            let flags = half(outer.l4)?;
            if !carries_gre || flags & 7 != 0 {
                return None;
            }
            let words = [0x8000, 0x2000, 0x1000].iter().filter(|bit| flags & **bit != 0).count();
            (outer.l4 + 4 + 4 * words, half(outer.l4 + 2)?)
        }
    };
    let least = if kind == TRANSPARENT_BRIDGING { frame::ETHERNET } else { 0 };
    (start + least <= outer.end.min(frame.len())).then_some((start, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_in_vxlan_are_found_unless_truncated() {
        let mut inner_frame = vec![0u8; 60];
        inner_frame[12..14].copy_from_slice(&[8, 0]);
        inner_frame[14] = 0x45;
        inner_frame[17] = 28;
        inner_frame[23] = UDP;
        let mut packet = vec![0u8; 50];
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14] = 0x45;
        packet[16..18].copy_from_slice(&(36u16 + 60).to_be_bytes());
        packet[23] = UDP;
        packet[36..38].copy_from_slice(&VXLAN_PORT.to_be_bytes());
        packet.extend(&inner_frame);
        let (start, layers) = inner(&packet, &frame::parse(&packet)).unwrap();
        assert_eq!((start, layers.protocol, layers.l4), (50, UDP, 34));
        for length in 0..64 {
            assert!(inner(&packet[..length], &frame::parse(&packet[..length])).is_none());
        }
    }
}
