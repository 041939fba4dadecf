//! Outer headers of tunnels: a template per remote, copied and completed for each packet.
//!
//! A template consists of Ethernet with VLAN tags, IP, and what follows it: UDP and a tunnel header, or a tunnel
//! header directly, or nothing. A tunnel kind contributes only the bytes of its tunnel header.

use core::fmt;
use core::net::IpAddr;

use super::short::ShortForm;
use crate::checksum::{self, Sum};
use crate::ethernet::{EtherType, MacAddr};
use crate::field::put;
use crate::ip::IpProtocol;
use crate::vlan::Tag;
use crate::vxlan::Vni;
use crate::{ethernet, ipv4, ipv6, udp, vxlan, vxlan_gpe};

/// Maximum length of outer headers, bytes. It leaves room in the headroom of a buffer for a VLAN tag and for headers
/// of the inner packet.
pub const MAX_ENCAP_LEN: usize = 192;

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

/// Length of the most common outer headers, bytes: IPv4 without tags, UDP, and a tunnel header of 8 bytes.
pub const PLAIN_LEN: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN + udp::HEADER_LEN + vxlan::HEADER_LEN;

/// Protocol between the outer IP header and the tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// UDP to this destination port.
    Udp {
        /// UDP destination port.
        dst_port: u16,
        /// Mode of the UDP checksum.
        checksum: OuterChecksum,
    },
    /// The tunnel header follows the IP header, which has this protocol number.
    Protocol(IpProtocol),
}

/// Place of the type of the payload, for tunnels that carry IPv4 and IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadType {
    /// EtherType at this offset of the tunnel header.
    EtherType(u8),
    /// Protocol number of the outer IP header: 4 (RFC 2003) or 41 (RFC 2473).
    IpProtocol,
    /// The same number at this offset of the tunnel header, which is an IPv6 extension header.
    NextHeader(u8),
    /// Next protocol of VXLAN-GPE at this offset of the tunnel header, with the numbers of
    /// [`vxlan_gpe::NextProtocol`]. The offset is odd.
    NextProtocol(u8),
    /// No field: the version in the inner header names it, as behind an MPLS label (RFC 4928 section 2).
    InnerVersion,
}

/// Fields of a tunnel header that differ from packet to packet. Offsets count from the start of the tunnel header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VariableFields {
    /// Offset of a checksum of two bytes over tunnel header and inner packet, as in GRE (RFC 2784 section 2.1).
    pub checksum: Option<u8>,
    /// Offset of a sequence number of four bytes, as in GRE (RFC 2890 section 2.2).
    pub sequence: Option<u8>,
    /// Offset of a byte of entropy, as the FlowID of NVGRE (RFC 7637 section 3.2).
    pub flow_id: Option<u8>,
    /// The IPv6 flow label is entropy too (RFC 6438), for tunnels without UDP ports.
    pub flow_label: bool,
    /// Type of the payload; `None`: it is the same in all packets.
    pub payload_type: Option<PayloadType>,
}

impl VariableFields {
    /// Returns whether two frames of one superframe need different headers.
    pub fn differ_in_superframes(&self) -> bool {
        self.checksum.is_some() || self.sequence.is_some()
    }
}

/// Contents of the outer headers of a tunnel to one remote.
#[derive(Clone, Copy, Debug)]
pub struct OuterConfig<'a> {
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
    /// TTL or hop limit.
    pub ttl: u8,
    /// DSCP and ECN, the default of [`EncapFields`].
    pub traffic_class: u8,
    /// IPv6 flow label, low 20 bits.
    pub flow_label: u32,
    /// Protocol between IP and the tunnel header.
    pub transport: Transport,
    /// The tunnel header with its options; empty if the inner packet follows the IP header.
    pub tunnel_header: &'a [u8],
    /// Fields of the tunnel header that differ from packet to packet. They are zero in `tunnel_header`.
    pub variable: VariableFields,
}

/// Contents of the outer headers of a VXLAN tunnel to one remote.
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
    /// The outer headers are longer than [`MAX_ENCAP_LEN`].
    TooManyHeaders,
}

impl fmt::Display for EncapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EncapError::MixedVersions => "the addresses of the two VTEPs are of different IP versions",
            EncapError::TooManyTags => "more than two VLAN tags",
            EncapError::NoHeadroom => "not enough headroom for the outer headers",
            EncapError::TooLong => "the encapsulated packet would be longer than IP allows",
            EncapError::TooManyHeaders => "the outer headers have more than 192 bytes",
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
    /// IPv4 identification; `None`: that of the template, which is not used if DF is set (RFC 6864 section 4.1).
    pub identification: Option<u16>,
    /// Hash of the inner packet's flow, for [`VariableFields::flow_id`] and [`VariableFields::flow_label`].
    pub entropy: u32,
    /// Sequence number, for [`VariableFields::sequence`].
    pub sequence: u32,
    /// True if the inner packet is IPv6, false if it is IPv4, for [`VariableFields::payload_type`].
    pub carries_ipv6: bool,
    /// Sum of the whole inner frame. It is used only if [`OuterHeaders::needs_sum`] is true.
    pub inner_sum: Sum,
    /// If true, the UDP checksum field gets the sum of the pseudo header only, which a device completes.
    pub partial_sum: bool,
}

/// IP version of outer headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// No IP header, such as labels directly after Ethernet.
    None,
    V4,
    V6,
}

/// Template of the outer headers to one remote.
///
/// The headers come last, so that those of usual length share few cache lines with the fields.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OuterHeaders {
    /// Sum of addresses, protocol, destination port and tunnel header.
    udp_sum: Sum,
    pub(super) short: ShortForm,
    /// Sum of the IPv4 header without its length, folded, in the machine's byte order.
    ip_sum: u16,
    /// UDP source port; 0: it differs between packets.
    source_port: u16,
    variable: VariableFields,
    len: u8,
    /// Offset of the IP header.
    l3: u8,
    /// Offset of what follows the IP header.
    pub(super) l4: u8,
    pub(super) version: Version,
    pub(super) udp: bool,
    /// 0 if [`OuterHeaders::emit_plain`] can write the headers, else 0xff.
    not_plain: u8,
    traffic_class: u8,
    ttl: u8,
    needs_sum: bool,
    /// True if `variable` names a field.
    varies: bool,
    /// Lengths, checksums and the UDP source port are zero.
    pub(super) bytes: [u8; MAX_ENCAP_LEN],
}

impl OuterHeaders {
    /// Builds the template.
    pub fn new(config: &OuterConfig<'_>) -> Result<OuterHeaders, EncapError> {
        if config.tags.len() > 2 {
            return Err(EncapError::TooManyTags);
        }
        let mut out = Writer { bytes: [0; MAX_ENCAP_LEN], at: 0 };
        out.bytes(&config.dst_mac.0)?;
        out.bytes(&config.src_mac.0)?;
        for tag in config.tags {
            out.bytes(&tag.bytes())?;
        }
        let v4 = config.dst.is_ipv4();
        out.bytes(&(if v4 { EtherType::IPV4 } else { EtherType::IPV6 }).0.to_be_bytes())?;
        let l3 = out.at;
        let protocol = match config.transport {
            Transport::Udp { .. } => IpProtocol::UDP,
            Transport::Protocol(protocol) => protocol,
        };
        match (config.src, config.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                // The packet is never fragmented, so the identification is not used (RFC 6864 section 4.1).
                let fragment = ipv4::DONT_FRAGMENT.to_be_bytes();
                out.bytes(&[0x45, config.traffic_class, 0, 0, 0, 0, fragment[0], fragment[1]])?;
                out.bytes(&[config.ttl, protocol.0, 0, 0])?;
                out.bytes(&src.octets())?;
                out.bytes(&dst.octets())?;
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let class = u32::from(config.traffic_class) << 20;
                out.bytes(&(6 << 28 | class | config.flow_label & 0xf_ffff).to_be_bytes())?;
                out.bytes(&[0, 0, protocol.0, config.ttl])?;
                out.bytes(&src.octets())?;
                out.bytes(&dst.octets())?;
            }
            _ => return Err(EncapError::MixedVersions),
        }
        let l4 = out.at;
        if let Transport::Udp { dst_port, checksum } = config.transport {
            let computed = match checksum {
                OuterChecksum::Standard => !v4,
                OuterChecksum::Always => true,
                OuterChecksum::Zero => false,
            };
            out.bytes(&[0, 0])?;
            out.bytes(&dst_port.to_be_bytes())?;
            out.bytes(&[0, 0, 0, u8::from(computed)])?;
        }
        out.bytes(config.tunnel_header)?;
        let headers = out.bytes.get(..out.at).ok_or(EncapError::TooManyHeaders)?;
        let headers = Self::from_bytes(headers, l3, l4, if v4 { 4 } else { 6 }).ok_or(EncapError::TooManyHeaders)?;
        Ok(headers.with_variable(config.variable))
    }

    /// Returns whether the payload is an IPv4 or IPv6 packet without Ethernet header.
    #[inline]
    pub fn carries_packets(&self) -> bool {
        self.variable.payload_type.is_some()
    }

    /// Sets the fields of the tunnel header that differ from packet to packet.
    fn with_variable(self, variable: VariableFields) -> Self {
        if variable == VariableFields::default() {
            return self;
        }
        let needs_sum = self.needs_sum || variable.checksum.is_some();
        let headers = Self { variable, varies: true, not_plain: 0xff, needs_sum, ..self };
        Self { short: ShortForm::of(&headers), ..headers }
    }

    /// Builds the template of a VXLAN tunnel (RFC 7348).
    pub fn vxlan(config: &VxlanConfig<'_>) -> Result<OuterHeaders, EncapError> {
        let VxlanConfig { src_mac, dst_mac, tags, src, dst, ttl, traffic_class, flow_label, .. } = *config;
        let transport = Transport::Udp { dst_port: config.dst_port, checksum: config.checksum };
        let mut header = [0; vxlan::HEADER_LEN];
        header[0] = vxlan::FLAG_VNI;
        put::<4, 4, 8>(&mut header, (config.vni.get() << 8).to_be_bytes());
        Self::new(&OuterConfig {
            src_mac,
            dst_mac,
            tags,
            src,
            dst,
            ttl,
            traffic_class,
            flow_label,
            transport,
            tunnel_header: &header,
            variable: VariableFields::default(),
        })
    }

    /// Builds the template from header bytes. The IP header of version `version` lies from `l3` to `l4`; without one,
    /// `version` is 0. Lengths and the IPv4 checksum in the bytes are ignored. If the UDP checksum is not 0, it is
    /// computed for each packet. A UDP source port of 0 differs between packets.
    ///
    /// Returns `None` if the offsets do not fit the bytes, or for more than [`MAX_ENCAP_LEN`] bytes.
    pub fn from_bytes(headers: &[u8], l3: usize, l4: usize, version: u8) -> Option<OuterHeaders> {
        let mut bytes = [0; MAX_ENCAP_LEN];
        bytes.get_mut(..headers.len())?.copy_from_slice(headers);
        let mut out = OuterHeaders {
            bytes,
            len: headers.len() as u8,
            l3: u8::try_from(l3).ok()?,
            l4: u8::try_from(l4).ok()?,
            version: Version::None,
            udp: false,
            not_plain: 0xff,
            traffic_class: 0,
            ttl: 0,
            needs_sum: false,
            varies: false,
            variable: VariableFields::default(),
            ip_sum: 0,
            source_port: 0,
            udp_sum: Sum::ZERO,
            short: ShortForm::NONE,
        };
        let (head, rest) = out.bytes.get_mut(..headers.len())?.split_at_mut_checked(l4)?;
        let ip = head.get_mut(l3..)?;
        let (protocol, addresses) = match version {
            4 => {
                let header: &mut [u8; ipv4::HEADER_LEN] = ip.first_chunk_mut()?;
                put::<2, 2, 20>(header, [0, 0]);
                put::<10, 2, 20>(header, [0, 0]);
                if header[6] & (ipv4::DONT_FRAGMENT >> 8) as u8 == 0 {
                    put::<4, 2, 20>(header, [0, 0]);
                }
                (out.version, out.traffic_class, out.ttl) = (Version::V4, header[1], header[8]);
                let (protocol, addresses) = (header[9], checksum::sum(&header[12..]));
                out.ip_sum = checksum::sum(ip).fold().to_be();
                (protocol, addresses)
            }
            6 => {
                let header: &mut [u8; ipv6::HEADER_LEN] = ip.first_chunk_mut()?;
                put::<4, 2, 40>(header, [0, 0]);
                (out.version, out.traffic_class, out.ttl) = (Version::V6, header[0] << 4 | header[1] >> 4, header[7]);
                (header[6], checksum::sum(&header[8..]))
            }
            _ => return Some(out),
        };
        if protocol == IpProtocol::UDP.0 {
            let header: &mut [u8; udp::HEADER_LEN] = rest.first_chunk_mut()?;
            out.udp = true;
            out.source_port = u16::from_be_bytes([header[0], header[1]]);
            out.needs_sum = header[6..] != [0, 0];
            put::<0, 2, 8>(header, [0, 0]);
            put::<4, 4, 8>(header, [0; 4]);
            out.udp_sum = addresses.word(u16::from(protocol)).and(checksum::sum(rest));
        }
        let plain = out.udp
            && version == 4
            && (l3, l4, headers.len()) == (ethernet::HEADER_LEN, ethernet::HEADER_LEN + ipv4::HEADER_LEN, PLAIN_LEN)
            && !out.needs_sum;
        out.not_plain = if plain { 0 } else { 0xff };
        out.short = ShortForm::of(&out);
        Some(out)
    }

    /// Returns the headers. Lengths, checksums and the UDP source port are zero.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len()).unwrap_or_default()
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

    /// Returns the offset of the IP header, bytes.
    #[inline]
    pub fn l3(&self) -> usize {
        usize::from(self.l3)
    }

    /// Returns the offset of the UDP header; `None` without UDP.
    #[inline]
    pub fn udp_offset(&self) -> Option<usize> {
        self.udp.then_some(usize::from(self.l4))
    }

    /// True if the underlay is IPv4.
    #[inline]
    pub fn is_ipv4(&self) -> bool {
        self.version == Version::V4
    }

    /// True if the underlay is IPv6.
    #[inline]
    pub fn is_ipv6(&self) -> bool {
        self.version == Version::V6
    }

    /// Returns the UDP source port of all packets; `None` if it differs between packets or if there is no UDP.
    #[inline]
    pub fn source_port(&self) -> Option<u16> {
        (self.source_port != 0).then_some(self.source_port)
    }

    /// True if a checksum of UDP or of the tunnel header covers the inner frame, so that [`EncapFields::inner_sum`] is
    /// needed.
    #[inline]
    pub fn needs_sum(&self) -> bool {
        self.needs_sum
    }

    /// Returns the fields of the tunnel header that differ from packet to packet.
    #[inline]
    pub fn variable(&self) -> &VariableFields {
        &self.variable
    }

    /// True if [`Self::variable`] names a field.
    #[inline]
    pub fn varies(&self) -> bool {
        self.varies
    }

    /// Returns fields with the template's traffic class and TTL, and no sum.
    #[inline]
    pub fn fields(&self, inner_len: usize, source_port: u16) -> EncapFields {
        EncapFields {
            inner_len,
            source_port,
            traffic_class: self.traffic_class,
            ttl: self.ttl,
            identification: None,
            entropy: 0,
            sequence: 0,
            carries_ipv6: false,
            inner_sum: Sum::ZERO,
            partial_sum: false,
        }
    }

    /// True if [`Self::emit_plain`] can write these headers: IPv4 without tags, UDP without checksum, and a tunnel
    /// header of 8 bytes.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.is_plain_with(0)
    }

    /// True if [`Self::emit_plain`] can write these headers for a packet that adds the bits of `class` to the
    /// template's traffic class.
    #[inline(always)]
    pub fn is_plain_with(&self, class: u8) -> bool {
        self.not_plain | class == 0
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

    /// Writes the headers to the last [`OuterHeaders::len`] bytes of `headroom`. The inner frame follows them.
    ///
    /// Nothing is written if an error is returned.
    pub fn emit(&self, headroom: &mut [u8], patch: &EncapFields) -> Result<(), EncapError> {
        let (l3, l4) = (usize::from(self.l3), usize::from(self.l4));
        let behind_ip = self.len() - l4 + patch.inner_len;
        // IPv4 counts its own header, IPv6 does not.
        let ip_len = match self.version {
            Version::None => 0,
            Version::V4 => behind_ip + l4 - l3,
            Version::V6 => behind_ip,
        };
        let ip_len = u16::try_from(ip_len).map_err(|_| EncapError::TooLong)?;
        let start = headroom.len().checked_sub(self.len()).ok_or(EncapError::NoHeadroom)?;
        let out = headroom.get_mut(start..).ok_or(EncapError::NoHeadroom)?;
        out.copy_from_slice(self.bytes());
        let ip = out.get_mut(l3..).ok_or(EncapError::NoHeadroom)?;
        match self.version {
            Version::None => return Ok(()),
            Version::V4 => self.ipv4(ip.first_chunk_mut().ok_or(EncapError::NoHeadroom)?, ip_len, patch),
            Version::V6 => {
                let ip: &mut [u8; ipv6::HEADER_LEN] = ip.first_chunk_mut().ok_or(EncapError::NoHeadroom)?;
                ip[0] = 0x60 | patch.traffic_class >> 4;
                ip[1] = patch.traffic_class << 4 | ip[1] & 0xf;
                put::<4, 2, 40>(ip, ip_len.to_be_bytes());
                ip[7] = patch.ttl;
            }
        }
        if self.udp {
            // It is not longer than the IP packet, whose length was checked.
            let len = behind_ip as u16;
            let sum = if self.varies { self.variable_udp_sum(len, patch) } else { self.udp_sum_field(len, patch) };
            let udp: &mut [u8; udp::HEADER_LEN] =
                out.get_mut(l4..).and_then(|b| b.first_chunk_mut()).ok_or(EncapError::NoHeadroom)?;
            put::<0, 2, 8>(udp, patch.source_port.to_be_bytes());
            put::<4, 2, 8>(udp, len.to_be_bytes());
            put::<6, 2, 8>(udp, sum.to_be_bytes());
        }
        if self.varies {
            self.write_variable(out, patch);
        }
        Ok(())
    }

    /// Returns the value of the UDP checksum field of a packet with a type of the payload that is zero in the template.
    #[inline(never)]
    fn variable_udp_sum(&self, len: u16, p: &EncapFields) -> u16 {
        let word = match self.variable.payload_type {
            Some(PayloadType::EtherType(_)) => payload_ethertype(p.carries_ipv6).0,
            Some(PayloadType::NextProtocol(_)) => next_protocol(p.carries_ipv6).0.into(),
            _ => 0,
        };
        self.udp_sum_field(len, &EncapFields { inner_sum: p.inner_sum.word(word), ..*p })
    }

    /// Writes the fields of the tunnel header that differ from packet to packet.
    #[inline(never)]
    fn write_variable(&self, out: &mut [u8], p: &EncapFields) {
        let VariableFields { checksum, sequence, flow_id, flow_label, .. } = self.variable;
        self.write_payload_type(out, p.carries_ipv6);
        if flow_label
            && self.is_ipv6()
            && let Some(word) = out.get_mut(self.l3()..).and_then(|ip| ip.first_chunk_mut::<4>())
        {
            // A label of 0 would mean that the packet has none (RFC 6437 section 2).
            let label = (p.entropy >> 12).max(1);
            *word = (u32::from_be_bytes(*word) & 0xfff0_0000 | label).to_be_bytes();
        }
        let Some(header) = out.get_mut(self.tunnel()..) else { return };
        write_at(header, sequence, &p.sequence.to_be_bytes());
        write_at(header, flow_id, &[(p.entropy >> 24) as u8]);
        if checksum.is_some() {
            let sum = checksum::sum(header).and_at(header.len(), p.inner_sum).checksum();
            write_at(header, checksum, &sum.to_be_bytes());
        }
    }

    /// Writes the type of the payload to a copy of the headers, if the headers carry IP packets.
    pub fn write_payload_type(&self, headers: &mut [u8], carries_ipv6: bool) {
        let Some(payload_type) = self.variable.payload_type else { return };
        let protocol = if carries_ipv6 { IpProtocol::IPV6 } else { IpProtocol::IPV4 };
        if payload_type == PayloadType::IpProtocol {
            return self.write_protocol(headers, protocol);
        }
        let Some(header) = headers.get_mut(self.tunnel()..) else { return };
        match payload_type {
            PayloadType::EtherType(at) => {
                write_at(header, Some(at), &payload_ethertype(carries_ipv6).0.to_be_bytes());
            }
            PayloadType::NextHeader(at) => write_at(header, Some(at), &[protocol.0]),
            PayloadType::NextProtocol(at) => write_at(header, Some(at), &[next_protocol(carries_ipv6).0]),
            PayloadType::IpProtocol | PayloadType::InnerVersion => {}
        }
    }

    /// Returns the offset of the tunnel header.
    pub(super) fn tunnel(&self) -> usize {
        usize::from(self.l4) + if self.udp { udp::HEADER_LEN } else { 0 }
    }

    /// Writes the protocol number of the outer IP header.
    fn write_protocol(&self, out: &mut [u8], protocol: IpProtocol) {
        let Some(ip) = out.get_mut(self.l3()..) else { return };
        if self.is_ipv6() {
            write_at(ip, Some(6), &[protocol.0]);
        } else if let Some(header) = ip.first_chunk_mut::<{ ipv4::HEADER_LEN }>() {
            header[9] = protocol.0;
            put::<10, 2, 20>(header, [0, 0]);
            let sum = checksum::sum(header).checksum();
            put::<10, 2, 20>(header, sum.to_be_bytes());
        }
    }

    #[inline(always)]
    fn ipv4(&self, ip: &mut [u8; ipv4::HEADER_LEN], total: u16, p: &EncapFields) {
        ip[1] = p.traffic_class;
        ip[8] = p.ttl;
        put::<2, 2, 20>(ip, total.to_be_bytes());
        let id = p.identification.unwrap_or(0);
        if p.identification.is_some() {
            put::<4, 2, 20>(ip, id.to_be_bytes());
        }
        // Seven words need only two folds. The complements remove the template's class and TTL from the sum.
        let word = |class: u8, ttl: u8| [u16::from(class), u16::from(ttl) << 8];
        let ([class, ttl], [old_class, old_ttl]) = (word(p.traffic_class, p.ttl), word(self.traffic_class, self.ttl));
        let words = [class, ttl, !old_class, !old_ttl, total, id];
        let sum = words.iter().fold(u32::from(self.ip_sum), |sum, word| sum + u32::from(word.to_be()));
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        put::<10, 2, 20>(ip, (!(sum as u16)).to_ne_bytes());
    }

    /// Returns the value of the UDP checksum field.
    #[inline(always)]
    fn udp_sum_field(&self, len: u16, p: &EncapFields) -> u16 {
        match (self.needs_sum, p.partial_sum) {
            (false, _) => 0,
            (true, false) => self.udp_checksum(len, p.source_port, p.inner_sum),
            (true, true) => self.pseudo_header_sum(len),
        }
    }

    #[inline(never)]
    pub(super) fn udp_checksum(&self, len: u16, source_port: u16, inner: Sum) -> u16 {
        // The length counts twice: in the pseudo header and in the UDP header.
        self.udp_sum.word(len).word(len).word(source_port).and(inner).udp_checksum()
    }

    #[cold]
    fn pseudo_header_sum(&self, len: u16) -> u16 {
        let l3 = usize::from(self.l3);
        let addresses = if self.is_ipv4() { l3 + 12..l3 + 20 } else { l3 + 8..l3 + 40 };
        let addresses = self.bytes.get(addresses).unwrap_or_default();
        checksum::sum(addresses).word(u16::from(IpProtocol::UDP.0)).word(len).fold()
    }
}

/// Returns the EtherType of the inner packet.
pub(super) fn payload_ethertype(carries_ipv6: bool) -> EtherType {
    if carries_ipv6 { EtherType::IPV6 } else { EtherType::IPV4 }
}

/// Returns the protocol of the inner packet in VXLAN-GPE.
pub(super) fn next_protocol(carries_ipv6: bool) -> vxlan_gpe::NextProtocol {
    if carries_ipv6 { vxlan_gpe::NextProtocol::IPV6 } else { vxlan_gpe::NextProtocol::IPV4 }
}

/// Writes a field at an offset, if there is one.
fn write_at(header: &mut [u8], at: Option<u8>, value: &[u8]) {
    let field = at.and_then(|at| header.get_mut(usize::from(at)..)?.get_mut(..value.len()));
    if let Some(field) = field {
        field.copy_from_slice(value);
    }
}

struct Writer {
    bytes: [u8; MAX_ENCAP_LEN],
    at: usize,
}

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) -> Result<(), EncapError> {
        let room = self.bytes.get_mut(self.at..self.at + bytes.len()).ok_or(EncapError::TooManyHeaders)?;
        room.copy_from_slice(bytes);
        self.at += bytes.len();
        Ok(())
    }
}
