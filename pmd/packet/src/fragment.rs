//! Fragmentation of IP packets.
//!
//! A router divides IPv4 packets for a network with a smaller MTU (RFC 791 section 3.2). The source of a packet divides
//! IPv4 and IPv6 packets (RFC 8200 section 4.5).

#![deny(unsafe_code)]

use wirepath_wire::{HeaderOffsets, IpProtocol, L3Type, checksum, ipv4, ipv6};

use crate::drops::DropReason;
use crate::offload::Flags;
use crate::superframe::parts_from;
use crate::{Packet, Pool};

/// Requests of a packet that are impossible for its fragments, because only the whole packet has the checksum.
const UNFINISHED: Flags = Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM);
/// Flag MF in the word of flags and offset: more fragments follow.
const MORE_FRAGMENTS: u16 = 0x2000;
/// Bits of the fragment offset, which counts units of 8 bytes.
const OFFSET: u16 = 0x1fff;
/// Bit of an option's type: all fragments have a copy of the option (RFC 791 section 3.1).
const COPIED: u8 = 0x80;
/// Option "end of option list" and option "no operation", which have no length.
const END: u8 = 0;
const NO_OPERATION: u8 = 1;
/// Maximum length of the headers of a fragment in bytes: those of IPv4 with options. IPv6 has 48 with its Fragment
/// header.
const MAX_HEADER: usize = 60;
/// Offset of the Fragment header of IPv6, and of offset and flag M in an IPv6 header with it.
const FRAGMENT_HEADER: usize = ipv6::HEADER_LEN;
const FRAGMENT_WORD: usize = FRAGMENT_HEADER + 2;
/// Flag M in the Fragment header.
const MORE_FRAGMENTS6: u16 = 1;

/// Divides one IP packet into fragments, one at a time.
#[derive(Debug)]
pub struct Fragmenter {
    packet: Packet,
    /// Offset of the IP header.
    l3: usize,
    /// Offset of the payload.
    payload: usize,
    /// Offset behind the payload.
    end: usize,
    /// Word of flags and fragment offset of the packet, in the form of IPv4.
    word: u16,
    is_ipv6: bool,
    /// IP headers of the first fragment.
    first: Header,
    /// IP headers of the others: with the copied options only.
    rest: Header,
    /// Largest IP packet in bytes.
    mtu: usize,
    /// Bytes of payload that are done.
    done: usize,
}

/// IP headers with their length.
type Header = ([u8; MAX_HEADER], usize);

impl Fragmenter {
    /// Prepares to divide `packet` into fragments of at most `mtu` bytes, without the header of the link. `layers` are
    /// the offsets in it; the headers lie in the first buffer.
    ///
    /// Returns the packet and the reason of its drop if it cannot be divided. It is no IPv4 packet, has the flag DF, or
    /// requests a checksum over its whole payload. Or `mtu` has no room for 8 bytes of payload.
    pub fn new(packet: Packet, layers: &HeaderOffsets, mtu: usize) -> Result<Self, (Packet, DropReason)> {
        let (l3, payload, end) = (layers.l3(), layers.l4(), layers.end());
        let header = layers.ipv4_header(packet.data()).filter(|_| layers.l3_type() == L3Type::Ipv4);
        let word = header.map(|h| u16::from_be_bytes([h[6], h[7]]));
        let Some(word) = word.filter(|word| word & ipv4::DONT_FRAGMENT == 0) else {
            return Err((packet, DropReason::TooBigForMtu));
        };
        if packet.flags().intersects(UNFINISHED) {
            return Err((packet, DropReason::KernelOffload));
        }
        let Some(header) =
            packet.data().get(l3..payload).filter(|it| (ipv4::HEADER_LEN..=MAX_HEADER).contains(&it.len()))
        else {
            return Err((packet, DropReason::Truncated));
        };
        if end > packet.len() || mtu < header.len() + 8 {
            return Err((packet, DropReason::TooBigForMtu));
        }
        let (first, rest) = (copied(header), without_first_options(header));
        Ok(Self { packet, l3, payload, end, word, is_ipv6: false, first, rest, mtu, done: 0 })
    }

    /// Prepares to divide a packet that this machine itself sends. Its IP header is at `l3` in the first buffer, has no
    /// options or extension headers, and is the last one of the packet. The fragments have the flag DF cleared and this
    /// identification: its lower half over IPv4, all of it in the Fragment header of IPv6.
    ///
    /// Returns the packet and the reason of its drop as [`Self::new`] does.
    pub fn of_own(packet: Packet, l3: usize, mtu: usize, identification: u32) -> Result<Self, (Packet, DropReason)> {
        if packet.flags().intersects(UNFINISHED) {
            return Err((packet, DropReason::KernelOffload));
        }
        let header = packet.data().get(l3..).unwrap_or_default();
        let (first, is_ipv6, header_len) = match header.first() {
            Some(0x45) => (own_header4(header, identification), false, ipv4::HEADER_LEN),
            Some(byte) if byte >> 4 == 6 => (own_header6(header, identification), true, ipv6::HEADER_LEN),
            _ => (None, false, 0),
        };
        let Some(first) = first else { return Err((packet, DropReason::Truncated)) };
        let (payload, end) = (l3 + header_len, packet.len());
        if mtu < first.1 + 8 {
            return Err((packet, DropReason::TooBigForMtu));
        }
        Ok(Self { packet, l3, payload, end, word: 0, is_ipv6, first, rest: first, mtu, done: 0 })
    }

    /// Length of the IP headers of the next fragment.
    fn header_len(&self) -> usize {
        if self.done == 0 { self.first.1 } else { self.rest.1 }
    }

    /// Returns the number of fragments that are left.
    pub fn remaining(&self) -> usize {
        let room = |header: usize| (self.mtu - header) & !7;
        let mut left = self.end - self.payload - self.done.min(self.end - self.payload);
        let mut count = 0;
        let mut header = self.header_len();
        while left > 0 {
            count += 1;
            // The last fragment may have any length.
            left = if left <= self.mtu - header { 0 } else { left - room(header) };
            header = self.rest.1;
        }
        count
    }

    /// Returns the next fragment, in buffers of `pool`, with the metadata of the packet. `Err` gives the reason why
    /// this fragment is lost; the one behind it is next. `None` after the last one.
    pub fn next_fragment(&mut self, pool: &Pool) -> Option<Result<Packet, DropReason>> {
        let left = (self.end - self.payload).checked_sub(self.done).filter(|left| *left > 0)?;
        let header_len = self.header_len();
        let room = self.mtu - header_len;
        let len = if left <= room { left } else { room & !7 };
        let made = self.make(pool, header_len, len, len == left);
        self.done += len;
        Some(made)
    }

    fn make(&self, pool: &Pool, header_len: usize, len: usize, is_last: bool) -> Result<Packet, DropReason> {
        let head = self.packet.data();
        let link = head.get(..self.l3).ok_or(DropReason::Truncated)?;
        let ip = if self.done == 0 { &self.first.0 } else { &self.rest.0 };
        let ip = ip.get(..header_len).ok_or(DropReason::Truncated)?;
        let offset = usize::from(self.word & OFFSET) + self.done / 8;
        let offset = u16::try_from(offset).ok().filter(|offset| *offset <= OFFSET).ok_or(DropReason::Truncated)?;
        let more = if is_last { self.word & MORE_FRAGMENTS } else { MORE_FRAGMENTS };
        // IPv6 does not count its own header.
        let counted = if self.is_ipv6 { header_len - ipv6::HEADER_LEN } else { header_len };
        let total = u16::try_from(counted + len).map_err(|_| DropReason::TooLong)?;

        let mut fragment = pool.take().ok_or(DropReason::NoBuffer)?;
        let room = fragment.append(link.len() + ip.len()).ok_or(DropReason::NoBuffer)?;
        let (room_link, room_ip) = room.split_at_mut(link.len());
        room_link.copy_from_slice(link);
        room_ip.copy_from_slice(ip);
        if self.is_ipv6 {
            let header = room_ip.first_chunk_mut::<{ FRAGMENT_HEADER + 8 }>().ok_or(DropReason::Truncated)?;
            let word = offset << 3 | if more != 0 { MORE_FRAGMENTS6 } else { 0 };
            header[4..6].copy_from_slice(&total.to_be_bytes());
            header[FRAGMENT_WORD..][..2].copy_from_slice(&word.to_be_bytes());
        } else {
            let header = room_ip.first_chunk_mut::<{ ipv4::HEADER_LEN }>().ok_or(DropReason::Truncated)?;
            header[0] = 0x40 | (header_len / 4) as u8;
            header[2..4].copy_from_slice(&total.to_be_bytes());
            header[6..8].copy_from_slice(&(offset | more).to_be_bytes());
            header[10..12].fill(0);
            let sum = checksum::sum(room_ip).checksum();
            if let Some(field) = room_ip.get_mut(10..12) {
                field.copy_from_slice(&sum.to_be_bytes());
            }
        }
        let mut left = len;
        for part in parts_from(&self.packet, self.payload + self.done) {
            let part = part.get(..left.min(part.len())).unwrap_or_default();
            if !fragment.extend_from_slice(part, pool) {
                return Err(DropReason::NoBuffer);
            }
            left -= part.len();
            if left == 0 {
                break;
            }
        }
        if left > 0 {
            return Err(DropReason::Truncated);
        }
        fragment.copy_metadata(&self.packet);
        // The checksum of the header is complete.
        fragment.set_flags(self.packet.flags().without(Flags::TX_L3_CHECKSUM));
        Ok(fragment)
    }
}

/// Copies a header of at most [`MAX_HEADER`] bytes.
fn copied(header: &[u8]) -> Header {
    let mut out = [0; MAX_HEADER];
    let len = header.len().min(MAX_HEADER);
    out[..len].copy_from_slice(&header[..len]);
    (out, len)
}

/// Returns the header of the fragments of an own IPv4 packet.
fn own_header4(packet: &[u8], identification: u32) -> Option<Header> {
    let mut header = copied(packet.get(..ipv4::HEADER_LEN)?);
    header.0[4..6].copy_from_slice(&(identification as u16).to_be_bytes());
    Some(header)
}

/// Returns the headers of the fragments of an own IPv6 packet.
fn own_header6(packet: &[u8], identification: u32) -> Option<Header> {
    let (mut bytes, _) = copied(packet.get(..ipv6::HEADER_LEN)?);
    bytes[FRAGMENT_HEADER] = std::mem::replace(&mut bytes[6], IpProtocol::FRAGMENT.0);
    bytes[FRAGMENT_HEADER + 4..][..4].copy_from_slice(&identification.to_be_bytes());
    Some((bytes, FRAGMENT_HEADER + 8))
}

/// Returns the header of further fragments and its length: options without the bit "copied" are left out.
fn without_first_options(header: &[u8]) -> Header {
    let mut rest = [0; MAX_HEADER];
    let (fixed, mut options) = header.split_at(ipv4::HEADER_LEN);
    rest[..ipv4::HEADER_LEN].copy_from_slice(fixed);
    let mut len = ipv4::HEADER_LEN;
    while let [kind, behind @ ..] = options {
        let size = match (*kind, behind) {
            (END, _) => break,
            (NO_OPERATION, _) => 1,
            (_, [size, ..]) if usize::from(*size) >= 2 && usize::from(*size) <= options.len() => usize::from(*size),
            // A broken list ends here.
            _ => break,
        };
        let (option, others) = options.split_at(size);
        if kind & COPIED != 0 {
            rest[len..len + size].copy_from_slice(option);
            len += size;
        }
        options = others;
    }
    // Zero is "end of option list", which fills the last word.
    (rest, len.next_multiple_of(4))
}

#[cfg(test)]
mod tests {
    use wirepath_wire::{Parser, Tunnels};

    use super::*;

    /// Returns a frame with these options and this payload.
    fn frame(options: &[u8], word: u16, payload: usize) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        let total = (20 + options.len() + payload) as u16;
        frame.extend([0x40 | (5 + options.len() / 4) as u8, 0]);
        frame.extend(total.to_be_bytes());
        frame.extend([0x12, 0x34]);
        frame.extend(word.to_be_bytes());
        frame.extend([9, 253, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(options);
        let sum = checksum::sum(&frame[14..]).checksum();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        frame.extend((0..payload).map(|i| (i * 7 / 3) as u8));
        frame
    }

    fn fragments(pool: &Pool, frame: &[u8], mtu: usize) -> Result<Vec<Vec<u8>>, DropReason> {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(frame, pool));
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let layers = parser.parse_stack(packet.data(), 0, packet.len()).unwrap();
        let mut fragmenter = Fragmenter::new(packet, &layers, mtu).map_err(|(_, reason)| reason)?;
        let count = fragmenter.remaining();
        let mut all = Vec::new();
        while let Some(fragment) = fragmenter.next_fragment(pool) {
            assert_eq!(fragmenter.remaining(), count - all.len() - 1);
            all.push(fragment?.segments().flatten().copied().collect());
        }
        assert_eq!(all.len(), count);
        Ok(all)
    }

    /// Joins fragments. Each of them has a valid header.
    fn join(fragments: &[Vec<u8>], mtu: usize, first: u16) -> (Vec<u8>, u16) {
        let (mut joined, mut last) = (Vec::new(), 0);
        for (i, fragment) in fragments.iter().enumerate() {
            let header = usize::from(fragment[14] & 15) * 4;
            assert!(checksum::sum(&fragment[14..14 + header]).is_valid());
            let total = usize::from(u16::from_be_bytes([fragment[16], fragment[17]]));
            assert_eq!(total + 14, fragment.len());
            assert!(total <= mtu, "{total}");
            last = u16::from_be_bytes([fragment[20], fragment[21]]);
            assert_eq!(usize::from(last & OFFSET), usize::from(first & OFFSET) + joined.len() / 8);
            assert!(i + 1 == fragments.len() || last & MORE_FRAGMENTS != 0);
            assert_eq!(fragment[..14], fragments[0][..14]);
            assert_eq!((&fragment[18..20], fragment[22]), (&[0x12, 0x34][..], 9));
            joined.extend(&fragment[14 + header..]);
        }
        (joined, last)
    }

    #[test]
    fn fragments_join_to_the_packet() {
        let pool = Pool::new("fragment", 256).unwrap();
        for mtu in [68, 576, 1000, 1279, 1280] {
            for payload in [mtu - 19, 1400, 4000, 9000] {
                for word in [0, MORE_FRAGMENTS, 100, MORE_FRAGMENTS | 700] {
                    // The payload of all but the last fragment is a multiple of 8 bytes.
                    let payload = if word & MORE_FRAGMENTS == 0 { payload } else { payload & !7 };
                    if payload + 20 <= mtu {
                        continue;
                    }
                    let frame = frame(&[], word, payload);
                    let all = fragments(&pool, &frame, mtu).unwrap();
                    let (joined, last) = join(&all, mtu, word);
                    assert_eq!(joined, frame[34..]);
                    assert_eq!(last & MORE_FRAGMENTS, word & MORE_FRAGMENTS);
                    // No fewer fragments would do.
                    assert_eq!(all.len(), payload.div_ceil((mtu - 20) & !7).max(2), "{mtu} {payload}");
                }
            }
        }
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn options_are_copied_as_their_bit_says() {
        let pool = Pool::new("fragment", 64).unwrap();
        // Record route is not copied, loose source route is (RFC 791 section 3.1); no operation fills.
        let options = [7, 7, 4, 0, 0, 0, 0, 0x83, 7, 4, 10, 0, 0, 9, 1, 0];
        let all = fragments(&pool, &frame(&options, 0, 3000), 1000).unwrap();
        assert_eq!(all[0][34..50], options);
        for fragment in &all[1..] {
            assert_eq!(fragment[14], 0x47);
            assert_eq!(fragment[34..42], [0x83, 7, 4, 10, 0, 0, 9, 0]);
        }
        assert_eq!(join(&all, 1000, 0).0, frame(&options, 0, 3000)[50..]);
        // Broken lists end, whatever follows.
        for broken in [[7, 0, 0, 0], [0x83, 9, 1, 1], [0x83, 1, 1, 1], [1, 1, 1, 0x83]] {
            let all = fragments(&pool, &frame(&broken, 0, 3000), 1000).unwrap();
            assert!(all[1..].iter().all(|it| it[14] == 0x45), "{broken:?}");
        }
    }

    /// Own packets of both versions, with a tag in front. Another implementation joins them: the parser and the sums
    /// here, the kernel and scapy in the tests of the gateway.
    #[test]
    fn own_packets_are_divided() {
        let pool = Pool::new("fragment", 256).unwrap();
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        for v6 in [false, true] {
            for (mtu, payload) in [(576, 1400), (1280, 1300), (1280, 9000), (1500, 1481), (1499, 3000)] {
                let mut whole = frame(&[], ipv4::DONT_FRAGMENT, payload);
                if v6 {
                    whole.truncate(12);
                    whole.extend([0x86, 0xdd, 0x6b, 0x9a, 0xbc, 0xde]);
                    whole.extend((payload as u16).to_be_bytes());
                    whole.extend([47, 64]);
                    whole.extend([0x20; 16]);
                    whole.extend([0x21; 16]);
                    whole.extend((0..payload).map(|i| (i * 7 / 3) as u8));
                }
                whole.splice(12..12, [0x81, 0, 0, 9]);
                let l3 = 18;
                let mut packet = pool.take().unwrap();
                assert!(packet.extend_from_slice(&whole, &pool));
                let mut fragments = Fragmenter::of_own(packet, l3, mtu, 0x1234_5678).unwrap();
                let (count, mut joined) = (fragments.remaining(), Vec::<u8>::new());
                for n in 1..=count {
                    let fragment = fragments.next_fragment(&pool).unwrap().unwrap();
                    let bytes: Vec<u8> = fragment.segments().flatten().copied().collect();
                    assert!(bytes.len() <= l3 + mtu && bytes[..l3] == whole[..l3]);
                    let layers = parser.parse_stack(&bytes, 0, bytes.len()).unwrap();
                    assert!(layers.is_fragment() && layers.end() == bytes.len());
                    let (at, word, more) = if v6 {
                        assert_eq!((bytes[l3 + 6], &bytes[l3 + 40..l3 + 42]), (44, &[47, 0][..]));
                        assert_eq!(bytes[l3 + 44..l3 + 48], [0x12, 0x34, 0x56, 0x78]);
                        assert_eq!(
                            (&bytes[l3..l3 + 4], &bytes[l3 + 7..l3 + 40]),
                            (&whole[l3..l3 + 4], &whole[l3 + 7..l3 + 40])
                        );
                        let word = u16::from_be_bytes([bytes[l3 + 42], bytes[l3 + 43]]);
                        (48, word >> 3, word & 1 != 0)
                    } else {
                        assert_eq!(
                            (&bytes[l3 + 4..l3 + 6], &bytes[l3 + 12..l3 + 20]),
                            (&[0x56, 0x78][..], &whole[l3 + 12..l3 + 20])
                        );
                        let word = u16::from_be_bytes([bytes[l3 + 6], bytes[l3 + 7]]);
                        assert_eq!(word & ipv4::DONT_FRAGMENT, 0);
                        (20, word & OFFSET, word & MORE_FRAGMENTS != 0)
                    };
                    assert_eq!((usize::from(word) * 8, more), (joined.len(), n < count));
                    joined.extend(&bytes[l3 + at..]);
                }
                assert!(fragments.next_fragment(&pool).is_none());
                assert_eq!(joined, whole[whole.len() - payload..], "{v6} {mtu} {payload}");
                let room = (mtu - if v6 { 48 } else { 20 }) & !7;
                assert!(count >= payload.div_ceil(room + 7) && count <= payload.div_ceil(room), "{count}");
            }
        }
        for (bytes, l3) in [(&[0x45; 10][..], 0), (&[0x60; 39], 0), (&[0x46; 60], 0), (&[], 0), (&[0x45; 40], 60)] {
            let mut packet = pool.take().unwrap();
            assert!(packet.extend_from_slice(bytes, &pool));
            assert_eq!(Fragmenter::of_own(packet, l3, 1500, 0).unwrap_err().1, DropReason::Truncated);
        }
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn packets_that_cannot_be_divided() {
        let pool = Pool::new("fragment", 16).unwrap();
        let too_big = Err(DropReason::TooBigForMtu);
        assert_eq!(fragments(&pool, &frame(&[], ipv4::DONT_FRAGMENT, 1000), 500), too_big);
        assert_eq!(fragments(&pool, &frame(&[], 0, 1000), 27), too_big);
        assert_eq!(fragments(&pool, &frame(&[], 0, 16), 28).unwrap().len(), 2);
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&frame(&[], 0, 1400), &pool));
        let layers = Parser::default().parse_stack(packet.data(), 0, packet.len()).unwrap();
        let mut fragmenter = Fragmenter::new(packet, &layers, 500).unwrap();
        let others: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(fragmenter.next_fragment(&pool).unwrap().unwrap_err(), DropReason::NoBuffer);
        drop(others);
        assert!(fragmenter.next_fragment(&pool).unwrap().is_ok());
        drop(fragmenter);
        assert_eq!(pool.outstanding(), 0);
    }
}
