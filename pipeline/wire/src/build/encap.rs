//! Outer headers of VXLAN: made once per remote, copied and patched per packet.

use core::fmt;
use core::net::IpAddr;

use crate::checksum::{self, Sum};
use crate::ethernet::{EtherType, MacAddr};
use crate::field::put;
use crate::ip::IpProtocol;
use crate::vlan::Tag;
use crate::vxlan::Vni;
use crate::{ethernet, ipv4, ipv6, udp, vxlan};

/// Longest outer headers: Ethernet, two tags, IPv6, UDP, VXLAN.
pub const MAX_ENCAP_LEN: usize = 78;

/// What becomes of the outer UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OuterChecksum {
    /// None over IPv4 (RFC 7348 section 4.1: SHOULD be zero), computed over IPv6 (RFC 8200 section 8.1).
    #[default]
    Standard,
    /// Computed over either.
    Always,
    /// None over either. Over IPv6 only where the operator has decided that RFC 6935 and 6936 allow it.
    Zero,
}

/// Bytes of outer headers over IPv4 without tag.
pub const PLAIN_LEN: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN + udp::HEADER_LEN + vxlan::HEADER_LEN;

/// What the outer headers to one remote are made of.
#[derive(Clone, Copy, Debug)]
pub struct VxlanConfig<'a> {
    /// Address of the underlay port.
    pub src_mac: MacAddr,
    /// Address of the next hop.
    pub dst_mac: MacAddr,
    /// Tags of the underlay, the outermost first; at most two.
    pub tags: &'a [Tag],
    /// Local VTEP.
    pub src: IpAddr,
    /// Remote VTEP; of the same version.
    pub dst: IpAddr,
    /// Destination port, as a rule [`vxlan::PORT`].
    pub dst_port: u16,
    /// Overlay segment.
    pub vni: Vni,
    /// TTL or hop limit.
    pub ttl: u8,
    /// DSCP and ECN where [`Patch`] does not say otherwise.
    pub traffic_class: u8,
    /// IPv6 flow label, low 20 bits.
    pub flow_label: u32,
    /// What becomes of the UDP checksum.
    pub checksum: OuterChecksum,
}

/// Why outer headers cannot be made or written.
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

/// What differs from packet to packet.
#[derive(Clone, Copy, Debug)]
pub struct Patch {
    /// Length of the inner frame, bytes.
    pub inner_len: usize,
    /// UDP source port; see [`crate::tuple::source_port`].
    pub source_port: u16,
    /// DSCP and ECN (RFC 6040, RFC 2983).
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Sum of the whole inner frame; not looked at unless [`VxlanEncap::needs_sum`].
    pub inner_sum: Sum,
}

/// Outer headers to one remote, ready to be copied in front of an inner frame.
#[derive(Clone, Copy, Debug)]
pub struct VxlanEncap {
    bytes: [u8; MAX_ENCAP_LEN],
    len: u8,
    traffic_class: u8,
    ttl: u8,
    needs_sum: bool,
    /// IPv4 header without length; folded, in the byte order of the machine.
    ip_sum: u16,
    /// Addresses, protocol, destination port and VXLAN header.
    udp_sum: Sum,
}

impl VxlanEncap {
    /// Makes the headers.
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
                // Never fragmented, so the identification means nothing (RFC 6864 section 4.1).
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
        // The usual class and TTL in place, so that only what differs from them is left to be patched.
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

    /// Length of the outer headers, bytes.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Never: there is always an Ethernet header.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What the headers add to the inner frame within the underlay's MTU, which does not count Ethernet: IP, UDP, VXLAN.
    #[inline]
    pub fn ip_overhead(&self) -> usize {
        let udp_vxlan = udp::HEADER_LEN + vxlan::HEADER_LEN;
        if self.is_ipv4() { ipv4::HEADER_LEN + udp_vxlan } else { ipv6::HEADER_LEN + udp_vxlan }
    }

    /// Whether the underlay is IPv4.
    #[inline]
    pub fn is_ipv4(&self) -> bool {
        self.len() < ethernet::HEADER_LEN + ipv6::HEADER_LEN + udp::HEADER_LEN + vxlan::HEADER_LEN
    }

    /// Whether [`Patch::inner_sum`] is needed: the UDP checksum covers the inner frame.
    #[inline]
    pub fn needs_sum(&self) -> bool {
        self.needs_sum
    }

    /// A patch with the template's own traffic class and TTL, and no sum.
    #[inline]
    pub fn patch(&self, inner_len: usize, source_port: u16) -> Patch {
        Patch { inner_len, source_port, traffic_class: self.traffic_class, ttl: self.ttl, inner_sum: Sum::ZERO }
    }

    /// Whether [`Self::emit_plain`] can write these headers: IPv4 without tag, and no UDP checksum.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.len as usize == PLAIN_LEN && !self.needs_sum
    }

    /// [`Self::emit`] for the headers of most packets: [`Self::is_plain`], the template's own traffic class and TTL, and an inner frame of
    /// at most 65 499 bytes.
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

    /// Writes the headers into the last [`VxlanEncap::len`] bytes of `headroom`, behind which the inner frame lies.
    ///
    /// Nothing is written if an error is returned.
    #[inline(always)]
    pub fn emit(&self, headroom: &mut [u8], patch: &Patch) -> Result<(), EncapError> {
        if self.len == 50 { self.emit4::<50>(headroom, patch) } else { self.emit_longer(headroom, patch) }
    }

    /// All but the common case, out of its way.
    #[inline(never)]
    fn emit_longer(&self, headroom: &mut [u8], patch: &Patch) -> Result<(), EncapError> {
        match self.len {
            54 => self.emit4::<54>(headroom, patch),
            58 => self.emit4::<58>(headroom, patch),
            70 => self.emit6::<70>(headroom, patch),
            74 => self.emit6::<74>(headroom, patch),
            _ => self.emit6::<78>(headroom, patch),
        }
    }

    /// Copies the template's `N` bytes; the rest of this file counts from their end.
    #[inline(always)]
    fn place<'h, const N: usize>(&self, headroom: &'h mut [u8]) -> Result<&'h mut [u8; N], EncapError> {
        const { assert!(N <= MAX_ENCAP_LEN) }
        let out = headroom.last_chunk_mut::<N>().ok_or(EncapError::NoHeadroom)?;
        out.copy_from_slice(&self.bytes[..N]);
        Ok(out)
    }

    #[inline(always)]
    fn emit4<const N: usize>(&self, headroom: &mut [u8], p: &Patch) -> Result<(), EncapError> {
        let total = u16::try_from(p.inner_len + 36).map_err(|_| EncapError::TooLong)?;
        let out = self.place::<N>(headroom)?;
        let ip: &mut [u8; 36] = out.last_chunk_mut().ok_or(EncapError::NoHeadroom)?;
        ip[1] = p.traffic_class;
        ip[8] = p.ttl;
        put::<2, 2, 36>(ip, total.to_be_bytes());
        // Six words: two folds are enough. The template's own class and TTL go out by their complements.
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
    fn emit6<const N: usize>(&self, headroom: &mut [u8], p: &Patch) -> Result<(), EncapError> {
        let payload = u16::try_from(p.inner_len + 16).map_err(|_| EncapError::TooLong)?;
        let out = self.place::<N>(headroom)?;
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
    fn udp(&self, out: &mut [u8; 16], len: u16, p: &Patch) {
        put::<0, 2, 16>(out, p.source_port.to_be_bytes());
        put::<4, 2, 16>(out, len.to_be_bytes());
        if self.needs_sum {
            put::<6, 2, 16>(out, self.udp_checksum(len, p.source_port, p.inner_sum).to_be_bytes());
        }
    }

    #[inline(never)]
    fn udp_checksum(&self, len: u16, source_port: u16, inner: Sum) -> u16 {
        // The length counts twice: in the pseudo header and in the header.
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
