//! Explicit congestion notification through tunnels (RFC 6040), for IP packets and for IP in Ethernet.

use wirepath_wire::checksum;
use wirepath_wire::ip::ecn::{CE, ECT_0, ECT_1, NOT_ECT};

/// Returns the ECN field of the inner packet after decapsulation; `None`: the packet must be dropped (RFC
/// 6040 section 4.2, figure 4).
#[inline]
pub fn decapsulate(outer: u8, inner: u8) -> Option<u8> {
    match (outer & 3, inner & 3) {
        // A router marked a packet whose sender does not support ECN. Only packet loss can inform that
        // sender.
        (CE, NOT_ECT) => None,
        (CE, _) => Some(CE),
        (ECT_1, ECT_0) => Some(ECT_1),
        (_, inner) => Some(inner),
    }
}

/// Returns the offset and the version of the IP header in `frame` (Ethernet with at most two tags).
fn ip_header(frame: &[u8]) -> Option<(usize, u8)> {
    let mut at = 12;
    for _ in 0..3 {
        let ethertype = u16::from_be_bytes(*frame.get(at..)?.first_chunk()?);
        let version = frame.get(at + 2)? >> 4;
        match (ethertype, version) {
            (0x0800, 4) if frame.len() >= at + 22 => return Some((at + 2, 4)),
            (0x86dd, 6) if frame.len() >= at + 42 => return Some((at + 2, 6)),
            (0x8100 | 0x88a8, _) => at += 4,
            _ => return None,
        }
    }
    None
}

/// Returns the traffic class of the IP packet in a frame; `None` if there is no IP packet.
#[inline]
pub fn traffic_class(frame: &[u8]) -> Option<u8> {
    let (at, version) = ip_header(frame)?;
    if version == 4 { Some(frame[at + 1]) } else { Some(frame[at] << 4 | frame[at + 1] >> 4) }
}

/// Returns the traffic class of an IP packet without Ethernet header; `None` if it is no IP packet.
fn packet_class(packet: &[u8]) -> Option<u8> {
    match *packet {
        [first, second, ..] if first >> 4 == 4 && packet.len() >= 20 => Some(second),
        [first, second, ..] if first >> 4 == 6 && packet.len() >= 40 => Some(first << 4 | second >> 4),
        _ => None,
    }
}

/// Applies the outer header's mark to the inner frame. Returns `false` if the frame must be dropped.
pub fn apply(outer: u8, frame: &mut [u8]) -> bool {
    let packet = ip_header(frame).and_then(|(at, _)| frame.get_mut(at..));
    packet.is_none_or(|packet| apply_to_packet(outer, packet))
}

/// Applies the outer header's mark to an IP packet without Ethernet header. Packets that are not IP pass
/// unchanged.
pub fn apply_to_packet(outer: u8, packet: &mut [u8]) -> bool {
    let Some(class) = packet_class(packet) else { return true };
    let Some(ecn) = decapsulate(outer, class) else { return false };
    let new = class & !3 | ecn;
    if new == class {
        return true;
    }
    if packet[0] >> 4 == 4 {
        let word = |class| u16::from_be_bytes([packet[0], class]);
        let (old, new_word) = (word(class), word(new));
        let sum = u16::from_be_bytes([packet[10], packet[11]]);
        let sum = checksum::update(sum, old, new_word).to_be_bytes();
        packet[10..12].copy_from_slice(&sum);
        packet[1] = new;
    } else {
        packet[0] = packet[0] & 0xf0 | new >> 4;
        packet[1] = packet[1] & 0x0f | new << 4;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_wire::{IpProtocol, ipv4, ipv6};

    #[test]
    fn rfc6040_figure_4() {
        // Rows: inner mark. Columns: outer mark Not-ECT, ECT(0), ECT(1), CE.
        let outer = [NOT_ECT, ECT_0, ECT_1, CE];
        let table = [
            (NOT_ECT, [Some(NOT_ECT), Some(NOT_ECT), Some(NOT_ECT), None]),
            (ECT_0, [Some(ECT_0), Some(ECT_0), Some(ECT_1), Some(CE)]),
            (ECT_1, [Some(ECT_1), Some(ECT_1), Some(ECT_1), Some(CE)]),
            (CE, [Some(CE), Some(CE), Some(CE), Some(CE)]),
        ];
        for (inner, row) in table {
            for (outer, want) in outer.into_iter().zip(row) {
                assert_eq!(decapsulate(outer, inner), want, "outer {outer}, inner {inner}");
            }
        }
    }

    fn frame4(class: u8) -> Vec<u8> {
        let mut frame = vec![0xa5; 14 + 4 + 20];
        frame[12..18].copy_from_slice(&[0x81, 0, 0, 5, 8, 0]);
        let ip = ipv4::Repr {
            src: [10, 0, 0, 1].into(),
            dst: [10, 0, 0, 2].into(),
            protocol: IpProtocol::UDP,
            payload_len: 0,
            ttl: 64,
            traffic_class: class,
            ident: 1,
            fragment_word: 0,
        };
        ip.emit(&mut frame[18..]).unwrap();
        frame
    }

    #[test]
    fn marks_update_the_checksum() {
        let mut frame = frame4(0xb8 | ECT_0);
        assert_eq!(traffic_class(&frame), Some(0xb8 | ECT_0));
        assert!(apply(CE, &mut frame));
        let view = ipv4::View::new(&frame[18..]).unwrap();
        assert_eq!((view.traffic_class(), view.checksum_is_valid()), (0xb8 | CE, true));
        assert!(!apply(CE, &mut frame4(0)));
        let mut six = vec![0; 14 + 40];
        six[12..14].copy_from_slice(&[0x86, 0xdd]);
        let ip = ipv6::Repr {
            src: "fd00::1".parse().unwrap(),
            dst: "fd00::2".parse().unwrap(),
            next_header: IpProtocol::UDP,
            payload_len: 0,
            hop_limit: 64,
            traffic_class: ECT_1,
            flow_label: 0xabcde,
        };
        ip.emit(&mut six[14..]).unwrap();
        assert!(apply(CE, &mut six));
        let view = ipv6::View::new(&six[14..]).unwrap();
        assert_eq!((view.traffic_class(), view.flow_label()), (CE, 0xabcde));
    }

    #[test]
    fn non_ip_frames_pass() {
        for len in 0..38 {
            let mut frame = frame4(0)[..len].to_vec();
            assert!(apply(CE, &mut frame), "{len} bytes");
        }
        let mut arp = vec![0; 60];
        arp[12..14].copy_from_slice(&[8, 6]);
        assert!(apply(CE, &mut arp));
    }
}
