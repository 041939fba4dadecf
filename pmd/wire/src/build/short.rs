//! Outer headers in short form: without VLAN tags, and with nothing to compute over the tunnel header.
//!
//! Nearly all tunnels have such headers. [`OuterHeaders::emit`] writes all others.

use super::encap::{OuterHeaders, PayloadType, Version, next_protocol, payload_ethertype};
use crate::checksum::{self, Sum};
use crate::field::put;
use crate::{ethernet, ipv4, ipv6, udp};

/// Headers are copied in pieces of this length, bytes.
const PIECE: usize = 32;
const IPV4_END: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN;
const IPV6_END: usize = ethernet::HEADER_LEN + ipv6::HEADER_LEN;

/// Fields of headers in short form that differ from packet to packet.
#[derive(Clone, Copy, Debug)]
pub struct ShortFields {
    /// Length of the inner frame, bytes. The packet is at most as long as IP allows.
    pub inner_len: u16,
    /// UDP source port; see [`crate::tuple::source_port`].
    pub source_port: u16,
    /// Hash of the inner packet's flow.
    pub entropy: u32,
    /// True if the inner packet is IPv6, false if it is IPv4, for tunnels that carry both.
    pub carries_ipv6: bool,
    /// Sum of the whole inner frame. It is used only if [`OuterHeaders::needs_sum`] is true.
    pub inner_sum: Sum,
}

/// Values of the short form that depend on the version of the inner packet.
#[derive(Clone, Copy, Debug, Default)]
struct Typed {
    /// Two bytes of the headers with the type of the payload.
    bytes: [u8; 2],
    /// Sum of the IPv4 header without its length, folded, in the machine's byte order.
    ip_sum: u16,
    /// Word that the type adds to the UDP checksum.
    udp_word: u16,
}

/// Fields of the short form, besides the template.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortForm {
    /// 0 if the headers have the short form, else 0xff.
    not_short: u8,
    /// Offset of [`Typed::bytes`]; 0: the type is the same in all packets.
    type_at: u8,
    /// For inner IPv4 and IPv6 packets.
    typed: [Typed; 2],
}

impl ShortForm {
    /// Headers that do not have the short form.
    pub(super) const NONE: Self =
        Self { not_short: 0xff, type_at: 0, typed: [Typed { bytes: [0; 2], ip_sum: 0, udp_word: 0 }; 2] };

    /// Returns the short form of headers.
    pub(super) fn of(headers: &OuterHeaders) -> Self {
        Self::find(headers).unwrap_or(Self::NONE)
    }

    fn find(headers: &OuterHeaders) -> Option<Self> {
        let variable = headers.variable();
        let is_short = headers.l3() == ethernet::HEADER_LEN
            && headers.version != Version::None
            && usize::from(headers.l4) == if headers.is_ipv4() { IPV4_END } else { IPV6_END }
            && (IPV4_END..=3 * PIECE).contains(&headers.len())
            && !variable.differ_in_superframes();
        if !is_short {
            return None;
        }
        // Each type is one of two bytes at an even offset of the packet.
        let type_at = match variable.payload_type {
            None | Some(PayloadType::InnerVersion) => 0,
            Some(PayloadType::IpProtocol) if headers.is_ipv4() => ethernet::HEADER_LEN + 8,
            Some(PayloadType::IpProtocol) => ethernet::HEADER_LEN + 6,
            Some(PayloadType::EtherType(at) | PayloadType::NextHeader(at) | PayloadType::NextProtocol(at)) => {
                headers.tunnel() + usize::from(at & !1)
            }
        };
        let mut typed = [Typed::default(); 2];
        for (carries_ipv6, typed) in [false, true].into_iter().zip(&mut typed) {
            let mut copy = headers.bytes;
            let copy = copy.get_mut(..headers.len())?;
            headers.write_payload_type(copy, carries_ipv6);
            typed.bytes = *copy.get(type_at..)?.first_chunk()?;
            if headers.is_ipv4() {
                let header: &mut [u8; ipv4::HEADER_LEN] = copy.get_mut(headers.l3()..)?.first_chunk_mut()?;
                put::<10, 2, 20>(header, [0, 0]);
                typed.ip_sum = checksum::sum(header).fold().to_be();
            }
            typed.udp_word = match variable.payload_type {
                Some(PayloadType::EtherType(_)) => payload_ethertype(carries_ipv6).0,
                Some(PayloadType::NextProtocol(_)) => next_protocol(carries_ipv6).0.into(),
                _ => 0,
            };
        }
        Some(Self { not_short: 0, type_at: type_at as u8, typed })
    }
}

impl OuterHeaders {
    /// Returns whether [`Self::emit_short`] can write these headers for a packet that adds the bits of `class` to the
    /// template's traffic class.
    #[inline(always)]
    pub fn is_short_with(&self, class: u8) -> bool {
        self.short.not_short | class == 0
    }

    /// Writes headers of the short form to `out`, which has [`Self::len`] bytes. Traffic class and TTL are the
    /// template's. The template must be [`Self::is_short_with`].
    ///
    /// Returns `None`, and leaves `out` undefined, if `out` has another length.
    #[inline(always)]
    pub fn emit_short(&self, out: &mut [u8], fields: &ShortFields) -> Option<()> {
        let len = self.len();
        let bytes = self.bytes.get(..len)?;
        if out.len() != len {
            return None;
        }
        // The pieces overlap, so that their lengths are constants.
        *out.first_chunk_mut::<PIECE>()? = *bytes.first_chunk::<PIECE>()?;
        if len > 2 * PIECE {
            *out.get_mut(PIECE..)?.first_chunk_mut::<PIECE>()? = *bytes.get(PIECE..)?.first_chunk::<PIECE>()?;
        }
        *out.last_chunk_mut::<PIECE>()? = *bytes.last_chunk::<PIECE>()?;

        let typed = &self.short.typed[usize::from(fields.carries_ipv6)];
        let behind_ethernet = fields.inner_len.wrapping_add((len - ethernet::HEADER_LEN) as u16);
        let behind_ip = if self.is_ipv4() {
            let header = out.first_chunk_mut::<IPV4_END>()?;
            put::<16, 2, IPV4_END>(header, behind_ethernet.to_be_bytes());
            let sum = u32::from(typed.ip_sum) + u32::from(behind_ethernet.to_be());
            put::<24, 2, IPV4_END>(header, (!((sum + (sum >> 16)) as u16)).to_ne_bytes());
            behind_ethernet.wrapping_sub(ipv4::HEADER_LEN as u16)
        } else {
            let header = out.first_chunk_mut::<IPV6_END>()?;
            let behind_ip = behind_ethernet.wrapping_sub(ipv6::HEADER_LEN as u16);
            put::<18, 2, IPV6_END>(header, behind_ip.to_be_bytes());
            if self.varies() && self.variable().flow_label {
                // A label of 0 would mean that the packet has none (RFC 6437 section 2).
                let label = (fields.entropy >> 12).max(1).to_be_bytes();
                header[15] = header[15] & 0xf0 | label[1];
                put::<16, 2, IPV6_END>(header, [label[2], label[3]]);
            }
            behind_ip
        };
        if self.varies() {
            self.write_short_fields(out, typed, fields.entropy)?;
        }
        if self.udp {
            let header: &mut [u8; udp::HEADER_LEN] = out.get_mut(usize::from(self.l4)..)?.first_chunk_mut()?;
            put::<0, 2, 8>(header, fields.source_port.to_be_bytes());
            put::<4, 2, 8>(header, behind_ip.to_be_bytes());
            if self.needs_sum() {
                let inner = fields.inner_sum.word(typed.udp_word);
                put::<6, 2, 8>(header, self.udp_checksum(behind_ip, fields.source_port, inner).to_be_bytes());
            }
        }
        Some(())
    }

    /// Writes the fields of the tunnel header that differ from packet to packet.
    #[inline(always)]
    fn write_short_fields(&self, out: &mut [u8], typed: &Typed, entropy: u32) -> Option<()> {
        if self.short.type_at != 0 {
            *out.get_mut(usize::from(self.short.type_at)..)?.first_chunk_mut::<2>()? = typed.bytes;
        }
        if let Some(at) = self.variable().flow_id {
            *out.get_mut(self.tunnel() + usize::from(at))? = (entropy >> 24) as u8;
        }
        Some(())
    }
}
