//! IP part of the parser: IPv4, IPv6 with extension headers, and the layer-4 headers.

use super::{Bytes, HeaderFields, L3Type, L4Type, Parser, extension, flag, offset, tunnel};
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::{ParseError, esp, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};

/// Maximum length of an IP packet after reassembly, bytes.
const MAX_LEN: usize = 65535;

/// True if the checksum of a 20-byte IPv4 header is right.
#[inline(always)]
pub(super) fn header_sum_is_valid(h: &[u8; 20]) -> bool {
    let a = u64::from_ne_bytes(get::<0, 8, 20>(h));
    let b = u64::from_ne_bytes(get::<8, 8, 20>(h));
    let c = u64::from(u32::from_ne_bytes(get::<16, 4, 20>(h)));
    let low = 0xffff_ffff;
    let x = (a & low) + (a >> 32) + (b & low) + (b >> 32) + c;
    let x = (x & low) + (x >> 32);
    let x = (x & 0xffff) + (x >> 16);
    let x = (x & 0xffff) + (x >> 16);
    x == 0xffff
}

impl Parser {
    pub(super) fn ipv4(&self, at: Bytes<'_>, l3: usize, layers: &mut HeaderFields) -> Result<(), ParseError> {
        let h: &[u8; ipv4::HEADER_LEN] = at.header(l3, ParseError::Ipv4Truncated)?;
        if h[0] >> 4 != 4 {
            return Err(ParseError::Ipv4BadVersion);
        }
        let header_len = usize::from(h[0] & 15) * 4;
        let total = usize::from(be16::<2, 20>(h));
        if header_len < ipv4::HEADER_LEN || total < header_len {
            return Err(ParseError::Ipv4BadHeaderLength);
        }
        if l3 + total > at.end {
            return Err(ParseError::Ipv4BadTotalLength);
        }
        let header = at.bytes(l3, header_len, ParseError::Ipv4Truncated)?;
        if self.verify_ipv4 && !crate::checksum::sum(header).is_valid() {
            return Err(ParseError::Ipv4BadChecksum);
        }
        layers.l3_type = L3Type::Ipv4;
        layers.end = (l3 + total) as u32;
        layers.protocol = h[9];
        if header_len > ipv4::HEADER_LEN {
            layers.flags |= flag::IP_OPTIONS;
        }
        let fragment = be16::<6, 20>(h);
        check_fragment(
            layers,
            fragment & 0x1fff,
            fragment & ipv4::MORE_FRAGMENTS != 0,
            total - header_len,
            total - header_len,
        )?;
        transport(Bytes { end: l3 + total, ..at }, l3 + header_len, IpProtocol(h[9]), layers)
    }
}

/// Records the fragment flags, and refuses fragments that no packet can have.
///
/// `piece` is the length of this fragment's data. `rest` is the length of everything after the headers that
/// every fragment repeats.
fn check_fragment(
    layers: &mut HeaderFields,
    units: u16,
    more: bool,
    piece: usize,
    rest: usize,
) -> Result<(), ParseError> {
    if units == 0 && !more {
        // Not fragmented, or an atomic fragment (RFC 6946).
        return Ok(());
    }
    if more && !piece.is_multiple_of(8) {
        return Err(ParseError::FragmentUnaligned);
    }
    if usize::from(units) * 8 + rest > MAX_LEN {
        return Err(ParseError::FragmentTooLong);
    }
    // RFC 3128 section 2: a TCP fragment at offset 8 could overwrite the flags in the first fragment.
    if units == 1 && IpProtocol(layers.protocol) == IpProtocol::TCP {
        return Err(ParseError::FragmentOverlap);
    }
    layers.flags |= if units == 0 { flag::FRAGMENT_FIRST } else { flag::FRAGMENT_LATER };
    Ok(())
}

pub(super) fn ipv6(at: Bytes<'_>, l3: usize, layers: &mut HeaderFields) -> Result<(), ParseError> {
    let h: &[u8; ipv6::HEADER_LEN] = at.header(l3, ParseError::Ipv6Truncated)?;
    if h[0] >> 4 != 6 {
        return Err(ParseError::Ipv6BadVersion);
    }
    let payload_len = usize::from(be16::<4, 40>(h));
    let start = l3 + ipv6::HEADER_LEN;
    let end = start + payload_len;
    if end > at.end {
        return Err(ParseError::Ipv6BadPayloadLength);
    }
    let mut next = IpProtocol(h[6]);
    if payload_len == 0 && next == IpProtocol::HOP_BY_HOP {
        // RFC 2675 section 2: the length is in the jumbo payload option.
        return Err(ParseError::Ipv6Jumbogram);
    }
    let at = Bytes { end, ..at };
    layers.l3_type = L3Type::Ipv6;
    layers.end = end as u32;
    let mut here = start;
    let mut fragmented = false;
    let mut count = 0;
    while ipv6::is_extension(next) {
        if count == ipv6::MAX_EXTENSIONS {
            return Err(ParseError::ExtensionTooMany);
        }
        let fixed: &[u8; 8] = at.header(here, ParseError::ExtensionTruncated)?;
        let len = ipv6::extension_len(next, fixed[1]);
        let bytes = at.bytes(here, len, ParseError::ExtensionTruncated)?;
        layers.extensions |= extension::of(next);
        match next {
            // RFC 8200 section 4.1: hop-by-hop options only directly after the IPv6 header.
            IpProtocol::HOP_BY_HOP if count > 0 => return Err(ParseError::ExtensionOrder),
            IpProtocol::HOP_BY_HOP | IpProtocol::DESTINATION_OPTIONS => check_options(next, bytes)?,
            // RFC 4302 section 2: the fixed part of AH is 12 bytes.
            IpProtocol::AH if len < 12 => return Err(ParseError::ExtensionMalformed),
            IpProtocol::FRAGMENT => {
                if fragmented {
                    return Err(ParseError::ExtensionOrder);
                }
                fragmented = true;
                let word = be16::<2, 8>(fixed);
                let piece = end - here - len;
                layers.protocol = fixed[0];
                // RFC 8200 section 4.5: the limit applies to the payload of the reassembled packet, including
                // extension headers.
                check_fragment(layers, word >> 3, word & 1 != 0, piece, piece + (here - start))?;
            }
            _ => {}
        }
        next = IpProtocol(fixed[0]);
        here += len;
        count += 1;
        if layers.is_later_fragment() {
            // A later fragment continues in the middle of the data.
            break;
        }
    }
    if count > 0 {
        layers.flags |= flag::IP_OPTIONS;
    }
    layers.protocol = next.0;
    transport(at, here, next, layers)
}

/// Checks that options fill their header exactly. A jumbo payload option next to a payload length is an error
/// (RFC 2675 section 3).
fn check_options(kind: IpProtocol, header: &[u8]) -> Result<(), ParseError> {
    for option in ipv6::Options::of(header) {
        let (code, _) = option?;
        if kind == IpProtocol::HOP_BY_HOP && code == ipv6::OPTION_JUMBO {
            return Err(ParseError::Ipv6Jumbogram);
        }
    }
    Ok(())
}

/// Parses the header after the IP headers.
fn transport(at: Bytes<'_>, l4: usize, protocol: IpProtocol, layers: &mut HeaderFields) -> Result<(), ParseError> {
    layers.l4 = offset(l4)?;
    layers.payload = layers.l4;
    if layers.is_later_fragment() {
        return Ok(());
    }
    let (kind, len) = match (protocol, layers.l3_type) {
        (IpProtocol::TCP, _) => {
            let h: &[u8; tcp::HEADER_LEN] = at.header(l4, ParseError::TcpTruncated)?;
            let len = usize::from(h[12] >> 4) * 4;
            if len < tcp::HEADER_LEN {
                return Err(ParseError::TcpBadOffset);
            }
            at.bytes(l4, len, ParseError::TcpTruncated)?;
            (L4Type::Tcp, len)
        }
        (IpProtocol::UDP, _) => {
            let h: &[u8; udp::HEADER_LEN] = at.header(l4, ParseError::UdpTruncated)?;
            let len = usize::from(be16::<4, 8>(h));
            // The first fragment is shorter than its datagram.
            if len < udp::HEADER_LEN || (!layers.is_fragment() && l4 + len > at.end) {
                return Err(ParseError::UdpBadLength);
            }
            (L4Type::Udp, udp::HEADER_LEN)
        }
        (IpProtocol::ICMPV4, L3Type::Ipv4) => {
            let _: &[u8; icmpv4::HEADER_LEN] = at.header(l4, ParseError::Icmpv4Truncated)?;
            (L4Type::Icmpv4, icmpv4::HEADER_LEN)
        }
        (IpProtocol::ICMPV6, L3Type::Ipv6) => {
            let _: &[u8; icmpv6::HEADER_LEN] = at.header(l4, ParseError::Icmpv6Truncated)?;
            (L4Type::Icmpv6, icmpv6::HEADER_LEN)
        }
        (IpProtocol::ESP, _) => {
            let _: &[u8; esp::HEADER_LEN] = at.header(l4, ParseError::EspTruncated)?;
            (L4Type::Esp, esp::HEADER_LEN)
        }
        (IpProtocol::GRE, _) => match tunnel::gre_len(at, l4) {
            Ok(len) => (L4Type::Gre, len),
            Err(ParseError::HeaderSplit) => return Err(ParseError::HeaderSplit),
            // An invalid GRE header is an error only for the tunnel endpoint.
            Err(_) => (L4Type::Other, 0),
        },
        _ => (L4Type::Other, 0),
    };
    layers.l4_type = kind;
    layers.payload = offset(l4 + len)?;
    Ok(())
}
