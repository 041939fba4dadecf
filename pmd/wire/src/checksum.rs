//! The Internet checksum (RFC 1071), its incremental update (RFC 1624), and its use in UDP, TCP and ICMP.
//!
//! The sum does not depend on byte order (RFC 1071 section 2 (B)). Words are therefore added in the machine's
//! byte order, and the result is swapped once.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::ip::IpProtocol;

/// A ones' complement sum in progress, not complemented.
///
/// Up to 2^31 16-bit words fit without overflow; a packet has at most 2^15.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

/// Returns the sum of `data`, which starts at an even offset of the summed bytes. An odd last byte is padded
/// with zero.
#[inline]
pub fn sum(data: &[u8]) -> Sum {
    // 32-bit words in a 64-bit sum need no end-around carry, so that this compiles to vector code.
    let (words, rest) = data.as_chunks::<4>();
    let mut total: u64 = words.iter().map(|w| u64::from(u32::from_ne_bytes(*w))).sum();
    let mut last = [0; 4];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    total += u64::from(u32::from_ne_bytes(last));
    Sum(total)
}

impl Sum {
    /// The empty sum.
    pub const ZERO: Sum = Sum(0);

    /// Adds a 16-bit word.
    #[inline(always)]
    #[must_use]
    pub fn word(self, value: u16) -> Sum {
        Sum(self.0 + u64::from(value.to_be()))
    }

    /// Adds a 32-bit word.
    #[inline(always)]
    #[must_use]
    pub fn word32(self, value: u32) -> Sum {
        Sum(self.0 + u64::from(value.to_be()))
    }

    /// Adds the sum of bytes that follow at an even offset.
    #[inline(always)]
    #[must_use]
    pub fn and(self, next: Sum) -> Sum {
        Sum(fold32(self.0) + fold32(next.0))
    }

    /// Adds the sum of bytes that follow at `offset`. At an odd offset the bytes of the sum are swapped (RFC
    /// 1071 section 2 (B)).
    #[inline]
    #[must_use]
    pub fn and_at(self, offset: usize, next: Sum) -> Sum {
        if offset & 1 == 0 { self.and(next) } else { self.and(Sum(u64::from(next.native().swap_bytes()))) }
    }

    /// Subtracts the sum of bytes that lie at an even offset.
    #[inline]
    #[must_use]
    pub fn without(self, part: Sum) -> Sum {
        Sum(fold32(self.0) + u64::from(!part.native()))
    }

    /// Returns the sum modulo 2^16 - 1, not complemented.
    #[inline(always)]
    pub fn fold(self) -> u16 {
        u16::from_be(self.native())
    }

    /// Returns the checksum: the complement of the sum.
    #[inline(always)]
    pub fn checksum(self) -> u16 {
        !self.fold()
    }

    /// Returns the checksum as UDP sends it. Zero means "no checksum", so zero is sent as all ones (RFC 768).
    #[inline]
    pub fn udp_checksum(self) -> u16 {
        let c = self.checksum();
        if c == 0 { 0xffff } else { c }
    }

    /// True if bytes that contain their own checksum are intact.
    #[inline]
    pub fn is_valid(self) -> bool {
        self.native() == 0xffff
    }

    #[inline(always)]
    fn native(self) -> u16 {
        let x = fold32(self.0);
        let x = (x & 0xffff_ffff) + (x >> 32);
        let x = (x & 0xffff) + (x >> 16);
        let x = (x & 0xffff) + (x >> 16);
        ((x & 0xffff) + (x >> 16)) as u16
    }
}

/// Folds to a value below 2^33 that is congruent modulo 2^16 - 1.
#[inline(always)]
fn fold32(x: u64) -> u64 {
    (x & 0xffff_ffff) + (x >> 32)
}

/// Returns the change of a sum if the bytes `old` become `new`, which are as long: ~m + m' of RFC 1624. Both
/// start at an even offset.
#[inline(always)]
pub(crate) fn change(old: &[u8], new: &[u8]) -> Sum {
    // The complement of padding adds 0xffff, which is zero in ones' complement.
    let ((old, a), (new, b)) = (old.as_chunks::<4>(), new.as_chunks::<4>());
    let words = old.iter().map(|w| u64::from(!u32::from_ne_bytes(*w)));
    let words: u64 = words.chain(new.iter().map(|w| u64::from(u32::from_ne_bytes(*w)))).sum();
    let rest = |bytes: &[u8]| bytes.first_chunk().map_or(0, |w| u16::from_ne_bytes(*w));
    Sum(words + u64::from(!rest(a)) + u64::from(rest(b)))
}

/// Returns the checksum after a 16-bit word of the covered bytes changed (RFC 1624 equation 3: HC' = ~(~HC +
/// ~m + m')).
#[inline]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    let x = u32::from(!checksum) + u32::from(!old) + u32::from(new);
    let x = (x & 0xffff) + (x >> 16);
    !(((x & 0xffff) + (x >> 16)) as u16)
}

/// Returns the checksum of an IPv4 header after its TTL has decreased by 1. The TTL is the upper half of its word, so
/// ~m + m' of RFC 1624 equation 3 is 0xfeff for all TTLs but 0.
#[inline(always)]
pub const fn after_ttl_decrement(checksum: u16) -> u16 {
    checksum.wrapping_add(0x100).wrapping_add((checksum >= 0xfeff) as u16)
}

/// Returns the sum of the IPv4 pseudo header (RFC 768, RFC 9293 section 3.1). `len` is the length of layer-4
/// header and payload.
#[inline]
pub fn pseudo4(src: Ipv4Addr, dst: Ipv4Addr, protocol: IpProtocol, len: u16) -> Sum {
    Sum(0).word32(src.to_bits()).word32(dst.to_bits()).word(u16::from(protocol.0)).word(len)
}

/// Returns the sum of the IPv6 pseudo header (RFC 8200 section 8.1). `len` and `protocol` are those of the
/// upper layer, after all extension headers.
#[inline]
pub fn pseudo6(src: Ipv6Addr, dst: Ipv6Addr, protocol: IpProtocol, len: u32) -> Sum {
    sum(&src.octets()).and(sum(&dst.octets())).word32(len).word(u16::from(protocol.0))
}

/// Returns the checksum of an IPv4 header. Its checksum field must be zero.
#[inline]
pub fn ipv4_header(header: &[u8]) -> u16 {
    sum(header).checksum()
}

/// A layer-4 protocol whose checksum covers a pseudo header, its header and its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// UDP: zero means "no checksum".
    Udp,
    /// TCP.
    Tcp,
    /// ICMPv6.
    Icmpv6,
}

impl Transport {
    /// Returns the IP protocol number.
    pub const fn protocol(self) -> IpProtocol {
        match self {
            Transport::Udp => IpProtocol::UDP,
            Transport::Tcp => IpProtocol::TCP,
            Transport::Icmpv6 => IpProtocol::ICMPV6,
        }
    }

    /// Returns the offset of the checksum field in the header, bytes.
    pub const fn checksum_offset(self) -> usize {
        match self {
            Transport::Udp => 6,
            Transport::Tcp => 16,
            Transport::Icmpv6 => 2,
        }
    }

    /// Returns the checksum field of a segment; `None` if the segment ends before it.
    #[inline]
    pub fn field(self, segment: &[u8]) -> Option<u16> {
        segment.get(self.checksum_offset()..)?.first_chunk().map(|b| u16::from_be_bytes(*b))
    }

    /// Writes the checksum field. Returns false if the segment ends before it.
    #[inline]
    pub fn set_field(self, segment: &mut [u8], value: u16) -> bool {
        let at = self.checksum_offset();
        match segment.get_mut(at..).and_then(|s| s.first_chunk_mut()) {
            Some(field) => {
                *field = value.to_be_bytes();
                true
            }
            None => false,
        }
    }

    /// Computes and writes the checksum of `segment` (header and payload). `pseudo` is the sum of the pseudo
    /// header.
    ///
    /// Returns false if the segment ends before the field.
    #[inline]
    pub fn fill(self, segment: &mut [u8], pseudo: Sum) -> bool {
        self.set_field(segment, 0) && self.set_field(segment, self.encode(pseudo.and(sum(segment))))
    }

    /// True if the checksum of `segment` is right or, for UDP, absent. The caller decides whether it may be
    /// absent (over IPv6 only in the tunnels that RFC 6935 names).
    #[inline]
    pub fn verify(self, segment: &[u8], pseudo: Sum) -> bool {
        match self.field(segment) {
            None => false,
            Some(0) if self == Transport::Udp => true,
            Some(_) => pseudo.and(sum(segment)).is_valid(),
        }
    }

    /// Returns the state of the checksum of `segment`; see [`State`].
    #[inline]
    pub fn state(self, segment: &[u8], pseudo: Sum) -> State {
        self.state_with(segment, pseudo, || sum(segment))
    }

    /// Returns the state of a checksum if only `head`, the front of the segment, is available. `whole`
    /// returns the sum of the whole segment.
    #[inline]
    pub fn state_with(self, head: &[u8], pseudo: Sum, whole: impl FnOnce() -> Sum) -> State {
        match self.field(head) {
            None => State::Bad,
            Some(0) if self == Transport::Udp => State::Absent,
            Some(field) => {
                if pseudo.and(whole()).is_valid() {
                    State::Good
                } else if is_pseudo_header_sum(field, pseudo) {
                    State::Partial
                } else {
                    State::Bad
                }
            }
        }
    }

    /// True if the checksum of `segment` has to be completed ([`State::Partial`]). The segment is summed only
    /// if the field equals the sum of the pseudo header, so the check is cheap for most packets.
    #[inline]
    pub fn is_partial(self, segment: &[u8], pseudo: Sum) -> bool {
        match self.field(segment) {
            None => false,
            Some(0) if self == Transport::Udp => false,
            Some(field) => is_pseudo_header_sum(field, pseudo) && !pseudo.and(sum(segment)).is_valid(),
        }
    }

    /// Completes a checksum field that holds only the sum of the pseudo header ([`is_pseudo_header_sum`]).
    ///
    /// Returns false if the segment ends before the field.
    #[inline]
    pub fn complete(self, segment: &mut [u8]) -> bool {
        let checksum = self.encode(sum(segment));
        self.set_field(segment, checksum)
    }

    /// Returns the field value for a sum over pseudo header and segment.
    #[inline]
    pub fn encode(self, total: Sum) -> u16 {
        if self == Transport::Udp { total.udp_checksum() } else { total.checksum() }
    }
}

/// State of a layer-4 checksum field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The right checksum.
    Good,
    /// No checksum (UDP, field zero).
    Absent,
    /// The sum of the pseudo header, not complemented. The sender left the rest to hardware (Linux
    /// `CHECKSUM_PARTIAL`).
    Partial,
    /// A wrong checksum.
    Bad,
}

/// True if a checksum field holds only the sum of the pseudo header, not complemented.
///
/// Linux leaves this value in packets with `ip_summed == CHECKSUM_PARTIAL`
/// (Documentation/networking/checksum-offloads). One right checksum in 65536 has the same value: verify the
/// whole segment before completing it, as [`Transport::state`] does.
#[inline]
pub fn is_pseudo_header_sum(field: u16, pseudo: Sum) -> bool {
    field == pseudo.fold()
}

/// Fills the checksum of a UDP datagram over IPv4.
pub fn udp4(src: Ipv4Addr, dst: Ipv4Addr, datagram: &mut [u8]) -> bool {
    fill4(Transport::Udp, src, dst, datagram)
}

/// Fills the checksum of a UDP datagram over IPv6.
pub fn udp6(src: Ipv6Addr, dst: Ipv6Addr, datagram: &mut [u8]) -> bool {
    fill6(Transport::Udp, src, dst, datagram)
}

/// Fills the checksum of an ICMPv6 message.
pub fn icmpv6(src: Ipv6Addr, dst: Ipv6Addr, message: &mut [u8]) -> bool {
    fill6(Transport::Icmpv6, src, dst, message)
}

fn fill4(transport: Transport, src: Ipv4Addr, dst: Ipv4Addr, segment: &mut [u8]) -> bool {
    match u16::try_from(segment.len()) {
        Ok(len) => transport.fill(segment, pseudo4(src, dst, transport.protocol(), len)),
        Err(_) => false,
    }
}

fn fill6(transport: Transport, src: Ipv6Addr, dst: Ipv6Addr, segment: &mut [u8]) -> bool {
    match u32::try_from(segment.len()) {
        Ok(len) => transport.fill(segment, pseudo6(src, dst, transport.protocol(), len)),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ttl_decrement_changes_the_checksum_as_rfc_1624_says() {
        for word in [0x0106, 0x4011, 0xff06, 0x80ff, 0x0100] {
            for before in 0..=u16::MAX {
                assert_eq!(after_ttl_decrement(before), update(before, word, word - 0x100), "{before:#x}");
            }
        }
    }

    /// RFC 1071 section 4.1, word by word.
    fn naive(data: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in data.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn rfc1071_section_3_example() {
        assert_eq!(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]).fold(), 0xddf2);
    }

    #[test]
    fn rfc1624_section_4_example() {
        // HC = 0xDD2F, m = 0x5555 becomes m' = 0x3285: HC' = 0x0000, where the equation of RFC 1141 gives 0xFFFF.
        assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
    }

    #[test]
    fn longest_packet_of_all_ones_does_not_overflow() {
        let ones = std::vec![0xff; 65535 + 18];
        assert_eq!(sum(&ones).fold(), naive(&ones));
    }

    #[test]
    fn udp_zero_rules() {
        let (a, b) = (Ipv4Addr::new(0, 0, 0, 0), Ipv4Addr::new(0, 0, 0, 0));
        // The ports make the sum 0xffff, so that the checksum would be zero: 17 + 8 + 8 + ports = 0xffff.
        let mut datagram = [0xff, 0xff - 33, 0, 0, 0, 8, 0xa5, 0xa5];
        assert!(udp4(a, b, &mut datagram));
        assert_eq!(datagram[6..], [0xff, 0xff], "RFC 768: a computed zero is transmitted as all ones");
        let pseudo = pseudo4(a, b, IpProtocol::UDP, 8);
        assert_eq!(Transport::Udp.state(&datagram, pseudo), State::Good);
        datagram[6..].fill(0);
        assert_eq!(Transport::Udp.state(&datagram, pseudo), State::Absent);
    }

    #[test]
    fn segments_without_a_checksum_field() {
        for t in [Transport::Udp, Transport::Tcp, Transport::Icmpv6] {
            let mut bytes = [0u8; 17];
            let short = &mut bytes[..t.checksum_offset() + 1];
            assert!(!t.fill(short, Sum::ZERO) && !t.complete(short) && !t.verify(short, Sum::ZERO));
            assert_eq!(t.state(short, Sum::ZERO), State::Bad);
        }
    }

    proptest! {
        #[test]
        fn sum_is_the_naive_sum(data in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(sum(&data).fold(), naive(&data));
        }

        #[test]
        fn parts_combine(data in proptest::collection::vec(any::<u8>(), 0..300), at in 0usize..300) {
            let at = at.min(data.len());
            let (a, b) = data.split_at(at);
            prop_assert_eq!(sum(a).and_at(at, sum(b)).fold(), naive(&data));
            if at % 2 == 0 {
                // Both 0 and 0xffff mean zero.
                let zero = |x: u16| x.is_multiple_of(0xffff);
                let (left, right) = (sum(&data).without(sum(a)).fold(), sum(b).fold());
                prop_assert!(left == right || (zero(left) && zero(right)));
            }
        }

        #[test]
        fn updates_agree_with_a_new_computation(
            mut data in proptest::collection::vec(any::<u8>(), 8..80), at in 0usize..36, new: u16,
        ) {
            data.truncate(data.len() & !1);
            // The header must not be all zero: the two zeros of ones' complement are not distinguished (RFC
            // 1624 section 3).
            data[0] = 0x45;
            let at = 2 + (at * 2) % (data.len() - 4).max(1) / 2 * 2;
            let before = sum(&data).checksum();
            let old = u16::from_be_bytes([data[at], data[at + 1]]);
            data[at..at + 2].copy_from_slice(&new.to_be_bytes());
            prop_assert_eq!(update(before, old, new), sum(&data).checksum());
        }

        #[test]
        fn partial_is_recognised_and_completed(
            mut segment in proptest::collection::vec(any::<u8>(), 20..200),
            src: u32, dst: u32, transport in prop_oneof![Just(Transport::Udp), Just(Transport::Tcp)],
        ) {
            let pseudo = pseudo4(src.into(), dst.into(), transport.protocol(), segment.len() as u16);
            transport.set_field(&mut segment, pseudo.fold());
            prop_assume!(pseudo.fold() != 0);
            let state = transport.state(&segment, pseudo);
            // A partial field that happens to be right needs no completion.
            prop_assert!(state == State::Partial || state == State::Good);
            if state == State::Partial {
                prop_assert!(transport.complete(&mut segment));
            }
            prop_assert_eq!(transport.state(&segment, pseudo), State::Good);
            let mut anew = segment.clone();
            transport.fill(&mut anew, pseudo);
            prop_assert_eq!(&anew, &segment);
            segment[0] ^= 0x10;
            prop_assert_eq!(transport.state(&segment, pseudo), State::Bad);
        }
    }
}
