//! Changes of the headers of a packet.

use wirepath_wire::checksum::is_pseudo_header_sum;
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::edit::PendingChecksums;
use wirepath_wire::{HeaderOffsets, HeadersMut, Parsed};

use crate::Packet;
use crate::offload::Flags;

impl Packet {
    /// Gives access to the headers of the outer stack, with getters and with setters that keep all checksums
    /// right; see [`wirepath_wire::edit`]. The headers must lie in the first segment, as they do after parsing.
    ///
    /// A checksum field that a device completes ([`Flags::TX_L4_CHECKSUM`]) keeps the sum of the pseudo header.
    #[inline]
    pub fn headers_mut<'a>(&'a mut self, parsed: &'a Parsed) -> HeadersMut<'a> {
        let pending = self.pending_checksums(parsed);
        parsed.outer_mut_with(self.data_mut(), pending)
    }

    /// Gives access to the headers of the inner stack, if the packet has a tunnel with valid inner headers.
    /// Setters update the checksum of the tunnel too.
    #[inline]
    pub fn inner_headers_mut<'a>(&'a mut self, parsed: &'a Parsed) -> Option<HeadersMut<'a>> {
        let pending = self.pending_checksums(parsed);
        parsed.inner_mut_with(self.data_mut(), pending)
    }

    #[inline(always)]
    fn pending_checksums(&self, parsed: &Parsed) -> PendingChecksums {
        if self.flags().intersects(Flags::TX_L4_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM)) {
            self.find_pending_checksums(parsed)
        } else {
            PendingChecksums::default()
        }
    }

    #[cold]
    fn find_pending_checksums(&self, parsed: &Parsed) -> PendingChecksums {
        let flags = self.flags();
        let is_pending = |layers: &HeaderOffsets, request: Flags| {
            // A request does not prove that the field holds the sum: the checksum may also be complete. The sum of a
            // superframe may leave out the length.
            flags.contains(request) && (flags.contains(Flags::TX_SEGMENT) || holds_pseudo_sum(self.data(), layers))
        };
        match parsed.inner() {
            // The request for layer 4 is about the innermost headers.
            Some(inner) => PendingChecksums {
                outer: is_pending(parsed.outer(), Flags::TX_OUTER_L4_CHECKSUM),
                inner: is_pending(inner, Flags::TX_L4_CHECKSUM),
            },
            None => PendingChecksums { outer: is_pending(parsed.outer(), Flags::TX_L4_CHECKSUM), inner: false },
        }
    }
}

fn holds_pseudo_sum(frame: &[u8], layers: &HeaderOffsets) -> bool {
    ChecksumSpan::of(frame, layers).is_some_and(|span| {
        let field = frame.get(span.start..).and_then(|segment| span.transport.field(segment));
        field.is_some_and(|field| is_pseudo_header_sum(field, span.pseudo))
    })
}

#[cfg(test)]
mod tests {
    use wirepath_wire::checksum::{self, State, Transport};
    use wirepath_wire::{EtherType, IpProtocol, ethernet, ipv4, parse, udp};

    use super::*;
    use crate::Pool;

    /// Returns a packet with a UDP datagram and its right checksum.
    fn datagram(pool: &Pool) -> Packet {
        let mut bytes = [0x5a; 64];
        let link = ethernet::Repr { dst: [2; 6].into(), src: [4; 6].into(), ethertype: EtherType::IPV4 };
        link.emit(&mut bytes).unwrap();
        let (src, dst, protocol) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into(), IpProtocol::UDP);
        let ip =
            ipv4::Repr { src, dst, protocol, payload_len: 30, ttl: 9, traffic_class: 0, ident: 7, fragment_word: 0 };
        ip.emit(&mut bytes[14..]).unwrap();
        udp::Repr { src_port: 1000, dst_port: 2000, payload_len: 22 }.emit(&mut bytes[34..]).unwrap();
        checksum::udp4(src, dst, &mut bytes[34..]);
        let mut packet = pool.take().unwrap();
        packet.append(64).unwrap().copy_from_slice(&bytes);
        packet
    }

    #[test]
    fn pending_and_complete_checksums_stay_so() {
        let pool = Pool::new("headers", 4).unwrap();
        for (request, partial) in [(false, false), (true, true), (true, false)] {
            let mut packet = datagram(&pool);
            let parsed = parse(packet.data()).unwrap();
            let span = ChecksumSpan::of(packet.data(), parsed.outer()).unwrap();
            if request {
                packet.set_flags(Flags::TX_L4_CHECKSUM);
            }
            if partial {
                Transport::Udp.set_field(&mut packet.data_mut()[34..], span.pseudo.fold());
            }
            let mut headers = packet.headers_mut(&parsed);
            headers.ipv4().unwrap().set_dst([203, 0, 113, 9].into());
            headers.udp().unwrap().set_dst_port(53);
            let span = ChecksumSpan::of(packet.data(), parsed.outer()).unwrap();
            let state = if partial { State::Partial } else { State::Good };
            assert_eq!(span.state(packet.data()), state, "request {request}, partial {partial}");
        }
    }
}
