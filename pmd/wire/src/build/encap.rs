//! Outer headers of VXLAN: a template per remote, copied and completed for each packet.

use core::fmt;
use core::net::IpAddr;

use crate::checksum::{self, Sum};
use crate::ethernet::{EtherType, MacAddr};
use crate::field::put;
use crate::ip::IpProtocol;
use crate::vlan::Tag;
use crate::vxlan::Vni;
use crate::{ethernet, ipv4, ipv6, udp, vxlan};

/// Maximum length of the outer headers: Ethernet, two tags, IPv6, UDP, VXLAN.
pub const MAX_ENCAP_LEN: usize = 78;

/// Mode of the outer UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OuterChecksum {
    /// No checksum over IPv4 (RFC 7348 section 4.1: SHOULD be zero), a computed one over IPv6 (RFC 8200
    /// section 8.1).
    #[default]
    Standard,
    /// A computed checksum over both.
    Always,
    /// No checksum over either. Over IPv6 the operator must have decided that RFC 6935 and RFC 6936 allow it.
    Zero,
}

/// Length of outer headers over IPv4 without tags, bytes.
pub const PLAIN_LEN: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN + udp::HEADER_LEN + vxlan::HEADER_LEN;

/// Contents of the outer headers to one remote.
#[derive(Clone, Copy, Debug)]
pub struct VxlanConfig<'a> {
    /// MAC address of the underlay port.
    pub src_mac: MacAddr,
    /// MAC address of the next hop.
    pub dst_mac: MacAddr,
    /// VLAN tags of the underlay, outermost first; at most two.
    pub tags: &'a [Tag],
    /// IP address of the local VTEP.
    pub src: IpAddr,
    /// IP address of the remote VTEP, of the same version.
    pub dst: IpAddr,
    /// UDP destination port, usually [`vxlan::PORT`].
    pub dst_port: u16,
    /// VNI of the overlay segment.
    pub vni: Vni,
    /// TTL or hop limit.
    pub ttl: u8,
    /// DSCP and ECN, the default of [`EncapFields`].
    pub traffic_class: u8,
    /// IPv6 flow label, low 20 bits.
    pub flow_label: u32,
    /// Mode of the UDP checksum.
    pub checksum: OuterChecksum,
}

/// Reasons why outer headers cannot be built or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncapError {
    /// The two VTEP addresses are of different IP versions.
    MixedVersions,
    /// More than two VLAN tags.
    TooManyTags,
    /// The headroom is shorter than the outer headers.
    NoHeadroom,
    /// The packet would be longer than IP allows.
    TooLong,
}

impl fmt::Display for EncapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EncapError::MixedVersions => "the addresses of the two VTEPs are of different IP versions",
            EncapError::TooManyTags => "more than two VLAN tags",
            EncapError::NoHeadroom => "not enough headroom for the outer headers",
            EncapError::TooLong => "the encapsulated packet would be longer than IP allows",
        })
    }
}

impl core::error::Error for EncapError {}

/// Fields of the outer headers that differ from packet to packet.
#[derive(Clone, Copy, Debug)]
pub struct EncapFields {
    /// Length of the inner frame, bytes.
    pub inner_len: usize,
    /// UDP source port; see [`crate::tuple::source_port`].
    pub source_port: u16,
    /// DSCP and ECN (RFC 6040, RFC 2983).
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Sum of the whole inner frame. It is used only if [`VxlanEncap::needs_sum`] is true.
    pub inner_sum: Sum,
}

/// Template of the outer headers to one remote.
#[derive(Clone, Copy, Debug)]
pub struct VxlanEncap {
    bytes: [u8; MAX_ENCAP_LEN],
    len: u8,
    traffic_class: u8,
    ttl: u8,
    needs_sum: bool,
    /// Sum of the IPv4 header without its length, folded, in the machine's byte order.
    ip_sum: u16,
    /// Sum of addresses, protocol, destination port and VXLAN header.
    udp_sum: Sum,
}

impl VxlanEncap {
    /// Builds the template.
    pub fn new(config: &VxlanConfig<'_>) -> Result<VxlanEncap, EncapError> {
        if config.tags.len() > 2 {
            return Err(EncapError::TooManyTags);
        }
        let mut out = Writer { bytes: [0; MAX_ENCAP_LEN], at: 0 };
        out.bytes(&config.dst_mac.0);
        out.bytes(&config.src_mac.0);
        for tag in config.tags {
            out.bytes(&tag.bytes());
        }
        let v4 = config.dst.is_ipv4();
        out.bytes(&(if v4 { EtherType::IPV4 } else { EtherType::IPV6 }).0.to_be_bytes());
        let ip = out.at;
        let addresses = match (config.src, config.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                // The packet is never fragmented, so the identification is not used (RFC 6864 section 4.1).
                let fragment = ipv4::DONT_FRAGMENT.to_be_bytes();
                out.bytes(&[0x45, 0, 0, 0, 0, 0, fragment[0], fragment[1], 0, IpProtocol::UDP.0, 0, 0]);
                out.bytes(&src.octets());
                out.bytes(&dst.octets());
                checksum::sum(&src.octets()).and(checksum::sum(&dst.octets()))
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                out.bytes(&(6 << 28 | config.flow_label & 0xf_ffff).to_be_bytes());
                out.bytes(&[0, 0, IpProtocol::UDP.0, 0]);
                out.bytes(&src.octets());
                out.bytes(&dst.octets());
                checksum::sum(&src.octets()).and(checksum::sum(&dst.octets()))
            }
            _ => return Err(EncapError::MixedVersions),
        };
        // The default class and TTL are in the template, so that only other values have to be written.
        if v4 {
            out.bytes[ip + 1] = config.traffic_class;
            out.bytes[ip + 8] = config.ttl;
        }
        let ip_sum = checksum::sum(&out.bytes[ip..out.at]).fold().to_be();
        let udp = out.at;
        out.bytes(&[0, 0]);
        out.bytes(&config.dst_port.to_be_bytes());
        out.bytes(&[0, 0, 0, 0]);
        out.bytes(&[vxlan::FLAG_VNI, 0, 0, 0]);
        out.bytes(&(config.vni.get() << 8).to_be_bytes());
        let udp_sum = addresses.word(u16::from(IpProtocol::UDP.0)).and(checksum::sum(&out.bytes[udp..out.at]));
        let needs_sum = match config.checksum {
            OuterChecksum::Standard => !v4,
            OuterChecksum::Always => true,
            OuterChecksum::Zero => false,
        };
        Ok(VxlanEncap {
            bytes: out.bytes,
            len: out.at as u8,
            traffic_class: config.traffic_class,
            ttl: config.ttl,
            needs_sum,
            ip_sum,
            udp_sum,
        })
    }

    /// Returns the length of the outer headers, bytes.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Always false: there is an Ethernet header.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// True if the underlay is IPv4.
    #[inline]
    pub fn is_ipv4(&self) -> bool {
        self.len() < ethernet::HEADER_LEN + ipv6::HEADER_LEN + udp::HEADER_LEN + vxlan::HEADER_LEN
    }

    /// True if the UDP checksum covers the inner frame, so that [`EncapFields::inner_sum`] is needed.
    #[inline]
    pub fn needs_sum(&self) -> bool {
        self.needs_sum
    }

    /// Returns fields with the template's traffic class and TTL, and no sum.
    #[inline]
    pub fn fields(&self, inner_len: usize, source_port: u16) -> EncapFields {
        EncapFields { inner_len, source_port, traffic_class: self.traffic_class, ttl: self.ttl, inner_sum: Sum::ZERO }
    }

    /// True if [`Self::emit_plain`] can write these headers: IPv4 without tags and without UDP checksum.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.len as usize == PLAIN_LEN && !self.needs_sum
    }

    /// Writes the headers of the most common form. The template must be [`Self::is_plain`], the inner frame
    /// at most 65 499 bytes long. Traffic class and TTL are the template's.
    #[inline(always)]
    pub fn emit_plain(&self, out: &mut [u8; PLAIN_LEN], inner_len: u16, source_port: u16) {
        let Some(template) = self.bytes.first_chunk::<PLAIN_LEN>() else { return };
        *out = *template;
        let total = inner_len.wrapping_add(36);
        put::<16, 2, PLAIN_LEN>(out, total.to_be_bytes());
        let sum = u32::from(self.ip_sum) + u32::from(total.to_be());
        put::<24, 2, PLAIN_LEN>(out, (!((sum + (sum >> 16)) as u16)).to_ne_bytes());
        put::<34, 2, PLAIN_LEN>(out, source_port.to_be_bytes());
        put::<38, 2, PLAIN_LEN>(out, inner_len.wrapping_add(16).to_be_bytes());
    }

    /// Writes the headers to the last [`VxlanEncap::len`] bytes of `headroom`. The inner frame follows them.
    ///
    /// Nothing is written if an error is returned.
    #[inline(always)]
    pub fn emit(&self, headroom: &mut [u8], patch: &EncapFields) -> Result<(), EncapError> {
        if self.len == 50 { self.emit4::<50>(headroom, patch) } else { self.emit_general(headroom, patch) }
    }

    /// All lengths but the most common one, outlined to keep the fast path small.
    #[inline(never)]
    fn emit_general(&self, headroom: &mut [u8], patch: &EncapFields) -> Result<(), EncapError> {
        match self.len {
            54 => self.emit4::<54>(headroom, patch),
            58 => self.emit4::<58>(headroom, patch),
            70 => self.emit6::<70>(headroom, patch),
            74 => self.emit6::<74>(headroom, patch),
            _ => self.emit6::<78>(headroom, patch),
        }
    }

    /// Copies the `N` bytes of the template to the end of the headroom. The writers below address fields from
    /// the end.
    #[inline(always)]
    fn copy_template<'h, const N: usize>(&self, headroom: &'h mut [u8]) -> Result<&'h mut [u8; N], EncapError> {
        const { assert!(N <= MAX_ENCAP_LEN) }
        let out = headroom.last_chunk_mut::<N>().ok_or(EncapError::NoHeadroom)?;
        out.copy_from_slice(&self.bytes[..N]);
        Ok(out)
    }

    #[inline(always)]
    fn emit4<const N: usize>(&self, headroom: &mut [u8], p: &EncapFields) -> Result<(), EncapError> {
        let total = u16::try_from(p.inner_len + 36).map_err(|_| EncapError::TooLong)?;
        let out = self.copy_template::<N>(headroom)?;
        let ip: &mut [u8; 36] = out.last_chunk_mut().ok_or(EncapError::NoHeadroom)?;
        ip[1] = p.traffic_class;
        ip[8] = p.ttl;
        put::<2, 2, 36>(ip, total.to_be_bytes());
        // Six words need only two folds. The complements remove the template's class and TTL from the sum.
        let word = |class: u8, ttl: u8| [u16::from(class), u16::from(ttl) << 8];
        let ([class, ttl], [old_class, old_ttl]) = (word(p.traffic_class, p.ttl), word(self.traffic_class, self.ttl));
        let words = [class, ttl, !old_class, !old_ttl, total];
        let sum = words.iter().fold(u32::from(self.ip_sum), |sum, word| sum + u32::from(word.to_be()));
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        put::<10, 2, 36>(ip, (!(sum as u16)).to_ne_bytes());
        let udp: &mut [u8; 16] = ip.last_chunk_mut().ok_or(EncapError::NoHeadroom)?;
        self.udp(udp, total - ipv4::HEADER_LEN as u16, p);
        Ok(())
    }

    #[inline(always)]
    fn emit6<const N: usize>(&self, headroom: &mut [u8], p: &EncapFields) -> Result<(), EncapError> {
        let payload = u16::try_from(p.inner_len + 16).map_err(|_| EncapError::TooLong)?;
        let out = self.copy_template::<N>(headroom)?;
        let ip: &mut [u8; 56] = out.last_chunk_mut().ok_or(EncapError::NoHeadroom)?;
        ip[0] |= p.traffic_class >> 4;
        ip[1] |= p.traffic_class << 4;
        put::<4, 2, 56>(ip, payload.to_be_bytes());
        ip[7] = p.ttl;
        let udp: &mut [u8; 16] = ip.last_chunk_mut().ok_or(EncapError::NoHeadroom)?;
        self.udp(udp, payload, p);
        Ok(())
    }

    #[inline(always)]
    fn udp(&self, out: &mut [u8; 16], len: u16, p: &EncapFields) {
        put::<0, 2, 16>(out, p.source_port.to_be_bytes());
        put::<4, 2, 16>(out, len.to_be_bytes());
        if self.needs_sum {
            put::<6, 2, 16>(out, self.udp_checksum(len, p.source_port, p.inner_sum).to_be_bytes());
        }
    }

    #[inline(never)]
    fn udp_checksum(&self, len: u16, source_port: u16, inner: Sum) -> u16 {
        // The length counts twice: in the pseudo header and in the UDP header.
        self.udp_sum.word(len).word(len).word(source_port).and(inner).udp_checksum()
    }
}

struct Writer {
    bytes: [u8; MAX_ENCAP_LEN],
    at: usize,
}

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}
