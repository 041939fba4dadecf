//! Transmit offloads in software, for ports whose device has none.

use wirepath_wire::checksum::{self, Sum};
use wirepath_wire::checksum_offload;
use wirepath_wire::{HeaderOffsets, L3Type, Parsed, Parser};

use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, superframe};

/// Checksums of the innermost headers.
pub(crate) const INNER_CHECKSUMS: Flags = Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM);
/// Checksums of the outer headers of a tunnel.
pub(crate) const OUTER_CHECKSUMS: Flags = Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM);
const CHECKSUMS: Flags = INNER_CHECKSUMS.with(OUTER_CHECKSUMS);
/// Requests of a packet that change its bytes.
pub(crate) const REQUESTS: Flags = CHECKSUMS.with(Flags::VLAN).with(Flags::TX_SEGMENT);

/// Inserts the VLAN tag and computes the checksums that the packet requests. Clears the requests, so that a
/// retried packet is not processed twice. `Err` gives the reason for which the packet must be dropped,
/// because it would be sent incomplete. Segmentation is refused: the number of packets does not change.
#[inline(always)]
pub fn apply(packet: &mut Packet) -> Result<(), DropReason> {
    if packet.flags().intersects(REQUESTS) { apply_requested(packet) } else { Ok(()) }
}

#[cold]
fn apply_requested(packet: &mut Packet) -> Result<(), DropReason> {
    let flags = packet.flags();
    if flags.contains(Flags::TX_SEGMENT) {
        return Err(DropReason::KernelOffload);
    }
    // Checksums first: the tag does not affect them, and the parser follows only two tags.
    if flags.intersects(CHECKSUMS) {
        fill_checksums(packet, flags).ok_or(DropReason::KernelOffload)?;
    }
    if let Some(tci) = packet.vlan() {
        insert_vlan_tag(packet, tci, flags.contains(Flags::VLAN_SERVICE))?;
    }
    packet.set_flags(packet.flags().without(REQUESTS).without(Flags::VLAN_SERVICE));
    Ok(())
}

/// Inserts a VLAN tag into the frame.
pub(crate) fn insert_vlan_tag(packet: &mut Packet, tci: u16, service: bool) -> Result<(), DropReason> {
    if packet.data().len() < 12 {
        return Err(DropReason::TooShort);
    }
    packet.prepend::<4>().ok_or(DropReason::NoHeadroom)?;
    let frame = packet.data_mut();
    frame.copy_within(4..16, 0);
    frame[12..14].copy_from_slice(if service { &[0x88, 0xa8] } else { &[0x81, 0x00] });
    frame[14..16].copy_from_slice(&tci.to_be_bytes());
    Ok(())
}

/// Computes the outer UDP checksum of a tunnel packet, whose inner TCP or UDP checksum the device computes later. Also
/// computes the inner IPv4 checksum, if requested. The sum of a segment with its checksum is that of its pseudo header,
/// negated. So no payload is read (linux: Documentation/networking/checksum-offloads.rst, "LCO"). `None`: the packet
/// has other headers, and is unchanged.
#[cfg(any(feature = "nic", test))]
pub(crate) fn fill_outer_udp(packet: &mut Packet) -> Option<()> {
    use wirepath_wire::checksum::Transport;
    use wirepath_wire::checksum_offload::ChecksumSpan;

    let parsed = parse(packet)?;
    let (outer, inner) = (*parsed.outer(), *parsed.innermost());
    let (whole, part) = (ChecksumSpan::of(packet.data(), &outer)?, ChecksumSpan::of(packet.data(), &inner)?);
    // The device finds the headers of one tunnel. It computes a checksum over all bytes of the inner IP packet.
    let is_plain = parsed.inner().is_some()
        && parsed.stack(2).is_none()
        && whole.transport == Transport::Udp
        && matches!(part.transport, Transport::Tcp | Transport::Udp)
        && (part.start - whole.start).is_multiple_of(2)
        && part.end == inner.end()
        && part.end <= whole.end
        && part.start <= packet.data().len();
    if !is_plain {
        return None;
    }
    let padding = sum_between(packet, part.end, whole.end);
    let needs_ipv4 = packet.flags().contains(Flags::TX_L3_CHECKSUM);
    let head = packet.data_mut();
    if needs_ipv4 {
        fill_ipv4(head, &inner)?;
    }
    let headers = head.get_mut(whole.start..part.start)?;
    whole.transport.set_field(headers, 0);
    let total = whole.pseudo.and(checksum::sum(headers)).without(part.pseudo).and_at(part.end - whole.start, padding);
    whole.transport.set_field(headers, whole.transport.encode(total)).then_some(())
}

/// Parses a packet. Header checksums are about to be computed and therefore not verified.
fn parse(packet: &Packet) -> Option<Parsed> {
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    parser.parse_chain(packet.data(), packet.len()).ok()
}

/// Returns the sum of the bytes from `start` to `end`, as if they started at an even offset.
fn sum_between(packet: &Packet, start: usize, end: usize) -> Sum {
    let (mut sum, mut at) = (Sum::ZERO, 0);
    let mut left = end.saturating_sub(start);
    for part in superframe::parts_from(packet, start) {
        let here = &part[..part.len().min(left)];
        sum = sum.and_at(at, checksum::sum(here));
        at += here.len();
        left -= here.len();
    }
    sum
}

fn fill_checksums(packet: &mut Packet, flags: Flags) -> Option<()> {
    let parsed = parse(packet)?;
    let head_len = packet.data().len();
    let tail_to = |end: usize| sum_between(packet, head_len, end);
    let outer = parsed.inner().map(|_| *parsed.outer());
    let own = *parsed.innermost();
    let tails = (tail_to(own.end()), outer.map_or(Sum::ZERO, |layers| tail_to(layers.end())));
    let head = packet.data_mut();
    // Inner before outer: the outer UDP checksum covers the inner ones. A field without the pseudo-header sum
    // is already complete.
    if flags.contains(Flags::TX_L3_CHECKSUM) {
        fill_ipv4(head, &own)?;
    }
    if flags.contains(Flags::TX_L4_CHECKSUM) {
        checksum_offload::complete_stack(head, &own, || tails.0);
    }
    if let Some(outer) = outer {
        if flags.contains(Flags::TX_OUTER_L3_CHECKSUM) {
            fill_ipv4(head, &outer)?;
        }
        if flags.contains(Flags::TX_OUTER_L4_CHECKSUM) {
            checksum_offload::complete_stack(head, &outer, || tails.1);
        }
    }
    Some(())
}

fn fill_ipv4(head: &mut [u8], layers: &HeaderOffsets) -> Option<()> {
    if layers.l3_type() != L3Type::Ipv4 {
        return Some(());
    }
    let header = head.get_mut(layers.l3()..layers.l4())?;
    header.get_mut(10..12)?.fill(0);
    let sum = checksum::sum(header).checksum();
    header.get_mut(10..12)?.copy_from_slice(&sum.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_packet::Pool;

    /// UDP datagram from 10.0.0.1 to 10.0.0.2 with `len` payload bytes; the checksum field holds `field`.
    fn udp(len: usize, field: impl Fn(Sum) -> u16) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame[16..18].copy_from_slice(&(28 + len as u16).to_be_bytes());
        frame.extend([0, 7, 0, 9, 0, 0, 0, 0]);
        frame[38..40].copy_from_slice(&(8 + len as u16).to_be_bytes());
        frame.extend((0..len).map(|i| i as u8));
        let pseudo = checksum::sum(&frame[26..34]).word(17).word(8 + len as u16);
        let value = field(pseudo);
        frame[40..42].copy_from_slice(&value.to_be_bytes());
        frame
    }

    #[test]
    fn checksums_are_filled_in_one_buffer_and_in_a_chain() {
        let pool = Pool::new("p", 8).unwrap();
        for len in [0, 1, 100, 2001, 5000, 8901] {
            let mut packet = pool.take().unwrap();
            assert!(packet.extend_from_slice(&udp(len, Sum::fold), &pool));
            packet.set_flags(Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM));
            assert_eq!(apply(&mut packet), Ok(()));
            assert!(packet.flags().is_empty());
            let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
            assert!(checksum::sum(&bytes[14..34]).is_valid(), "IPv4 header of {len}");
            let pseudo = checksum::sum(&bytes[26..34]).word(17).word(8 + len as u16);
            assert!(pseudo.and(checksum::sum(&bytes[34..])).is_valid(), "UDP of {len}");
        }
    }

    /// Returns a datagram in VXLAN over IPv6, with `padding` bytes behind its IP packet. Both UDP checksums hold the
    /// sum of the pseudo header, and the inner IPv4 checksum is wrong.
    fn in_vxlan(len: usize, padding: usize) -> Vec<u8> {
        let inner = udp(len, Sum::fold);
        let datagram = (16 + inner.len() + padding) as u16;
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0];
        frame.extend(datagram.to_be_bytes());
        frame.extend([17, 64]);
        frame.extend((0..32).map(|i| i * 7));
        let pseudo = checksum::sum(&frame[22..54]).word(17).word(datagram);
        frame.extend([0xc3, 0x50, 0x12, 0xb5]);
        frame.extend(datagram.to_be_bytes());
        frame.extend(pseudo.fold().to_be_bytes());
        frame.extend([8, 0, 0, 0, 0, 0, 42, 0]);
        frame.extend(inner);
        frame.extend((0..padding).map(|i| 0x81 + i as u8));
        frame
    }

    #[test]
    fn an_outer_checksum_is_that_of_the_complete_inner_one() {
        const OUTER: usize = 54 + 6;
        const INNER: usize = 70 + 34 + 6;
        let pool = Pool::new("p", 16).unwrap();
        for (len, padding) in [(0, 0), (0, 18), (1, 17), (101, 0), (1901, 40), (2001, 3), (5000, 0)] {
            let [software, headers] = [0, 1].map(|_| {
                let mut packet = pool.take().unwrap();
                assert!(packet.extend_from_slice(&in_vxlan(len, padding), &pool));
                packet.set_flags(INNER_CHECKSUMS.with(Flags::TX_OUTER_L4_CHECKSUM));
                packet
            });
            let (mut software, mut headers) = (software, headers);
            assert_eq!((apply(&mut software), fill_outer_udp(&mut headers)), (Ok(()), Some(())));
            let [software, mut headers] =
                [software, headers].map(|packet| packet.segments().flatten().copied().collect::<Vec<u8>>());
            assert_eq!(headers[INNER..INNER + 2], in_vxlan(len, padding)[INNER..INNER + 2], "the device's work");
            headers[INNER..INNER + 2].copy_from_slice(&software[INNER..INNER + 2]);
            assert_eq!(headers[OUTER..OUTER + 2], software[OUTER..OUTER + 2], "{len} {padding}");
            assert_eq!(headers, software);
        }
    }

    #[test]
    fn other_packets_have_no_outer_checksum() {
        let pool = Pool::new("p", 1).unwrap();
        let short = |at: usize, bytes: &[u8]| {
            let mut frame = in_vxlan(50, 0);
            frame[at..at + bytes.len()].copy_from_slice(bytes);
            frame
        };
        let plain = udp(50, Sum::fold);
        // Another UDP port, another inner protocol, an inner fragment, and an inner datagram shorter than its packet.
        for frame in [plain, short(57, &[0]), short(93, &[47]), short(90, &[0x20, 0]), short(108, &[0, 9]), vec![0; 20]]
        {
            let mut packet = pool.take().unwrap();
            assert!(packet.extend_from_slice(&frame, &pool));
            packet.set_flags(INNER_CHECKSUMS.with(Flags::TX_OUTER_L4_CHECKSUM));
            assert_eq!((fill_outer_udp(&mut packet), packet.data()), (None, &frame[..]));
        }
    }

    #[test]
    fn tags_are_inserted_once() {
        let pool = Pool::new("p", 1).unwrap();
        let mut packet = pool.take().unwrap();
        let frame = udp(20, |_| 0);
        assert!(packet.extend_from_slice(&frame, &pool));
        packet.set_vlan(0x2064);
        assert_eq!((apply(&mut packet), apply(&mut packet)), (Ok(()), Ok(())));
        let tagged = [&frame[..12], &[0x81, 0, 0x20, 0x64], &frame[12..]].concat();
        assert_eq!(packet.data(), tagged);
    }

    #[test]
    fn unsupported_requests_are_refused() {
        let pool = Pool::new("p", 1).unwrap();
        let mut packet = pool.take().unwrap();
        packet.set_flags(Flags::TX_SEGMENT);
        assert_eq!(apply(&mut packet), Err(DropReason::KernelOffload));
        packet.set_flags(Flags::TX_L4_CHECKSUM);
        assert_eq!(apply(&mut packet), Err(DropReason::KernelOffload), "no frame at all");
        packet.set_flags(Flags::NONE);
        packet.set_vlan(1);
        assert_eq!(apply(&mut packet), Err(DropReason::TooShort));
    }
}
