//! The kinds of tunnels: a file for each, registered by one line in [`KINDS`].
//!
//! A kind describes only its own header. All else is common to the kinds:
//!
//! - Outer headers are a template, [`OuterHeaders`](wirepath_wire::build::OuterHeaders). The gateway builds it from
//!   addresses and the bytes of `TunnelKind::write`, the action `encap` of flow rules from the bytes of the rule.
//! - The gateway checks received headers by `TunnelKind::parse`. The action `decap` uses `payload_offset`.
//! - Received packets with headers of the form `PlainHeader` are the fastest.
//! - Fields that differ from packet to packet are [`VariableFields`], which the template completes.
//! - A NIC decapsulates what [`TunnelKind::exact_item`] matches.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;

use wirepath_flow::Item;
use wirepath_packet::drops::DropReason;
use wirepath_settings::{ConfigError, ConfigTable, Settings};
use wirepath_wire::build::{PayloadType, VariableFields};
use wirepath_wire::{EtherType, IpProtocol, ipv4, ipv6, udp};

pub mod geneve;
pub mod gre;
pub mod ipip;
pub mod mpls;
pub mod nvgre;
pub mod srv6;
pub mod vxlan;
pub mod vxlan_gpe;

/// All kinds; the first one is the default.
pub static KINDS: [&TunnelKind; 10] = [
    &vxlan::KIND,
    &geneve::KIND,
    &gre::GRETAP,
    &nvgre::KIND,
    &gre::GRE,
    &ipip::KIND,
    &srv6::KIND,
    &vxlan_gpe::KIND,
    &mpls::UDP,
    &mpls::GRE,
];

/// A kind of tunnel.
pub struct TunnelKind {
    /// Value of the key `kind` in the configuration.
    pub name: &'static str,
    /// Description of one line.
    pub about: &'static str,
    /// Name of the segment identifier in displays.
    pub id_name: &'static str,
    /// Segment identifiers; `0..=0`: tunnel headers of the kind have none.
    pub ids: RangeInclusive<u32>,
    /// True if each tunnel header has an identifier.
    pub needs_id: bool,
    /// Protocol below the tunnel header.
    pub carrier: Carrier,
    /// Payloads that tunnels of the kind can carry.
    pub payloads: &'static [Payload],
    /// Length of the tunnel header without options in bytes.
    pub header_len: usize,
    /// Number of the kind in flow rules, as in [`wirepath_flow::tunnel`]; `None`: no rule matches its header.
    pub(crate) rule_tunnel: Option<u8>,
    /// Writes a tunnel header with options, which are in the form of [`KindSettings::read`].
    pub(crate) write: fn(id: Option<u32>, payload: Payload, options: &[u8]) -> HeaderTemplate,
    /// Reads and checks a received tunnel header. The bytes begin with it and end at the latest with the packet. The
    /// protocol number is that of the header in front of them.
    pub(crate) parse: fn(IpProtocol, &[u8]) -> Result<TunnelHeader, DropReason>,
    /// Returns the length of a tunnel header with its options, without further checks. The bytes are as for `parse`.
    pub(crate) length: fn(&[u8]) -> Option<usize>,
    /// The most common form of the header; `None`: it has none of that form.
    pub(crate) plain: Option<PlainHeader>,
    /// Returns the item of a flow rule for [`Self::exact_item`]; `None`: no item matches headers of the kind.
    pub(crate) match_item: Option<fn(id: Option<u32>, payload: EtherType) -> Item>,
    /// Settings of the kind in a table `[[segment]]`.
    pub(crate) settings: Option<KindSettings>,
    /// Returns the SIDs in the options of a segment. `None`: packets go to the address of the remote, and their tunnel
    /// header names the segment.
    pub(crate) sids: Option<ReadSids>,
    /// Returns the service of a segment's label, for kinds whose headers do not name their payload. `parse` then reads
    /// the label stack only, and returns [`EtherType::MPLS`].
    pub(crate) service: Option<ReadService>,
}

/// Returns the service of the label of a segment with this payload and options.
pub(crate) type ReadService = fn(Payload, options: &[u8]) -> mpls::Service;
/// Returns the SIDs in the options of a segment; `None` if it has none.
pub(crate) type ReadSids = fn(options: &[u8]) -> Option<Sids>;
/// Reads the table of a kind in that of a segment with this payload. Returns the options of the header in the form that
/// [`TunnelKind::write`] takes.
pub(crate) type ReadSettings = fn(&Settings<'_>, Payload) -> Result<Box<[u8]>, ConfigError>;

/// Segment identifiers (SIDs, RFC 8986 section 3) of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sids {
    /// SID of the gateway, the destination of received packets. It names the segment.
    pub local: Ipv6Addr,
    /// Behaviour of the gateway at that SID.
    pub behaviour: srv6::Behaviour,
    /// First SID of the path to the remote, the destination of sent packets.
    pub first: Ipv6Addr,
}

/// Payload of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// Ethernet frames.
    Ethernet,
    /// IPv4 and IPv6 packets without Ethernet header.
    Ip,
}

impl Payload {
    /// Returns the payload with this type in a received tunnel header; `None` for all others.
    pub fn of(ethertype: EtherType) -> Option<Self> {
        match ethertype {
            EtherType::TRANSPARENT_ETHERNET => Some(Self::Ethernet),
            EtherType::IPV4 | EtherType::IPV6 => Some(Self::Ip),
            _ => None,
        }
    }

    /// Returns the protocol number of the payload directly after an IP header. For IP packets it is that of IPv4, and
    /// differs from packet to packet.
    pub(crate) fn protocol(self) -> IpProtocol {
        match self {
            Self::Ethernet => IpProtocol::ETHERNET,
            Self::Ip => IpProtocol::IPV4,
        }
    }

    /// Returns the EtherType in a tunnel header to send, and its place if it differs from packet to packet. `at` is its
    /// offset in the header.
    pub(crate) fn ethertype(self, at: u8) -> (EtherType, Option<PayloadType>) {
        match self {
            Self::Ethernet => (EtherType::TRANSPARENT_ETHERNET, None),
            Self::Ip => (EtherType(0), Some(PayloadType::EtherType(at))),
        }
    }
}

/// Protocol below the tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// UDP. The number is the default destination port.
    Udp(u16),
    /// IP with this protocol number.
    Ip(IpProtocol),
    /// IP with the protocol number of the inner IP packet: 4 or 41. There is no tunnel header.
    IpInIp,
    /// IPv6 to a SID. The tunnel header is the segment routing header, if there is one. In received packets it is all
    /// extension headers.
    Srv6,
}

impl Carrier {
    /// Returns whether IP packets with this protocol number to an address of the gateway may be tunnel packets.
    pub(super) fn takes(self, protocol: IpProtocol) -> bool {
        match self {
            Self::Udp(_) => protocol == IpProtocol::UDP,
            Self::Ip(own) => protocol == own,
            Self::IpInIp => matches!(protocol, IpProtocol::IPV4 | IpProtocol::IPV6),
            Self::Srv6 => false,
        }
    }

    /// Returns the protocol number of the outer IP header of packets to send. `header` is the tunnel header. If the
    /// number differs from packet to packet, the template writes it.
    pub(crate) fn protocol(self, payload: Payload, header: &[u8]) -> IpProtocol {
        match self {
            Self::Udp(_) => IpProtocol::UDP,
            Self::Ip(own) => own,
            Self::Srv6 if !header.is_empty() => IpProtocol::ROUTING,
            Self::IpInIp | Self::Srv6 => payload.protocol(),
        }
    }
}

/// A tunnel header to send.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeaderTemplate {
    /// The header with its options.
    pub(crate) bytes: Vec<u8>,
    /// Fields of the header that differ from packet to packet.
    pub(crate) variable: VariableFields,
}

impl From<Vec<u8>> for HeaderTemplate {
    /// Returns a header that is the same in all packets.
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, ..Self::default() }
    }
}

/// Values of a received tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelHeader {
    /// Identifier of the segment, if the header has one.
    pub id: Option<u32>,
    /// Length with all options in bytes.
    pub len: usize,
    /// Type of the payload; [`EtherType::TRANSPARENT_ETHERNET`] for Ethernet frames. See [`Payload::of`]. It is
    /// [`EtherType::MPLS`] as long as only the label stack has been read.
    pub payload: EtherType,
    /// True if the header has a checksum, so that header and payload have the sum 0.
    pub has_checksum: bool,
}

/// A tunnel header of 8 bytes over UDP that can be checked by one comparison. Its identifier is in the bytes 4 to 6,
/// and its payload is an Ethernet frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainHeader {
    /// Bits to compare; the first byte of the header is the highest one.
    pub(crate) mask: u64,
    /// Their value.
    pub(crate) value: u64,
}

/// Settings of a kind in a table `[[segment]]`.
pub(crate) struct KindSettings {
    /// Description of the table.
    pub(crate) table: &'static ConfigTable,
    /// Reads the table.
    pub(crate) read: ReadSettings,
}

impl fmt::Debug for TunnelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelKind").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PartialEq for TunnelKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for TunnelKind {}

impl TunnelKind {
    /// Bytes of the underlay's MTU that the IP, UDP and tunnel headers towards `remote` use. The tunnel header has
    /// `header` bytes.
    pub fn overhead(&self, header: usize, remote: IpAddr) -> usize {
        let ip = if remote.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN };
        let udp = if matches!(self.carrier, Carrier::Udp(_)) { udp::HEADER_LEN } else { 0 };
        ip + udp + header
    }

    /// Returns whether received packets of two kinds cannot be told apart, so that a gateway cannot use both.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let alike = |payload| other.carries(payload);
        // Labels have an EtherType of their own.
        self != other
            && self.carrier == other.carrier
            && self.has_labels() == other.has_labels()
            && self.payloads.iter().any(|payload| alike(*payload))
    }

    /// Returns whether tunnels of the kind can carry this payload.
    pub fn carries(&self, payload: Payload) -> bool {
        self.payloads.contains(&payload)
    }

    /// Returns whether MPLS labels name the segments.
    pub fn has_labels(&self) -> bool {
        self.service.is_some()
    }

    /// Returns whether a received packet can be of this kind if `parse` returns this payload.
    pub(crate) fn takes(&self, payload: EtherType) -> bool {
        match self.has_labels() {
            true => payload == EtherType::MPLS,
            false => Payload::of(payload).is_some_and(|payload| self.carries(payload)),
        }
    }

    /// Returns the default UDP destination port; `None` without UDP.
    pub fn default_port(&self) -> Option<u16> {
        match self.carrier {
            Carrier::Udp(port) => Some(port),
            Carrier::Ip(_) | Carrier::IpInIp | Carrier::Srv6 => None,
        }
    }

    /// Returns the item of a flow rule that matches the headers with this identifier and payload which a NIC can
    /// remove. The gateway accepts all of them. The payload of Ethernet frames is
    /// [`EtherType::TRANSPARENT_ETHERNET`]. `None`: no item matches headers of the kind.
    pub fn exact_item(&self, id: Option<u32>, payload: EtherType) -> Option<Item> {
        self.match_item.map(|item| item(id, payload))
    }

    /// Returns the position of the kind in [`KINDS`].
    pub(super) fn number(&self) -> u8 {
        KINDS.iter().position(|kind| *kind == self).unwrap_or_default() as u8
    }
}

/// Returns the length of a tunnel header, for the action `decap`; `None` if it is not known. `tunnel` is the kind
/// as in [`wirepath_flow::tunnel`]. The bytes begin with the tunnel header.
pub(crate) fn payload_offset(tunnel: u8, header: &[u8]) -> Option<usize> {
    KINDS.iter().find(|kind| kind.rule_tunnel == Some(tunnel)).and_then(|kind| (kind.length)(header))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_reads_what_it_writes() {
        // The headers of the others need the segments to read them.
        for kind in KINDS.into_iter().filter(|kind| !kind.has_labels()) {
            let payloads = [EtherType::TRANSPARENT_ETHERNET, EtherType::IPV4, EtherType::IPV6];
            for payload in payloads.into_iter().filter(|it| Payload::of(*it).is_some_and(|it| kind.carries(it))) {
                for id in [Some(0x12_3456), None] {
                    if id.is_none() && kind.needs_id || id.is_some() && kind.ids == (0..=0) {
                        continue;
                    }
                    let carried = Payload::of(payload).unwrap();
                    let HeaderTemplate { mut bytes, variable } = (kind.write)(id, carried, &[]);
                    let len = bytes.len();
                    let mut protocol = kind.carrier.protocol(carried, &bytes);
                    if variable.payload_type == Some(PayloadType::IpProtocol) && payload == EtherType::IPV6 {
                        protocol = IpProtocol::IPV6;
                    }
                    assert!(len >= kind.header_len && (len == kind.header_len) == (kind.needs_id || id.is_none()));
                    match variable.payload_type {
                        Some(PayloadType::EtherType(at)) => {
                            bytes[usize::from(at)..][..2].copy_from_slice(&payload.0.to_be_bytes());
                        }
                        Some(PayloadType::NextProtocol(at)) => {
                            bytes[usize::from(at)] = if payload == EtherType::IPV4 { 1 } else { 2 };
                        }
                        _ => {}
                    }
                    bytes.extend([if payload == EtherType::IPV6 { 0x60 } else { 0x45 }; 40]);
                    let expected = TunnelHeader { id, len, payload, has_checksum: false };
                    assert_eq!((kind.parse)(protocol, &bytes), Ok(expected), "{}", kind.name);
                    assert_eq!((kind.length)(&bytes), Some(len), "{}", kind.name);
                    for cut in 0..len {
                        let found = (kind.parse)(protocol, &bytes[..cut]);
                        assert_eq!(found, Err(DropReason::BadTunnelHeader), "{} {cut}", kind.name);
                    }
                }
            }
        }
    }

    /// The fast path must not accept headers that the slow path drops or reads in another way.
    #[test]
    fn plain_headers_are_valid() {
        for kind in KINDS {
            let Some(plain) = kind.plain else { continue };
            assert!(matches!(kind.carrier, Carrier::Udp(_)));
            let mut random = fastrand::Rng::with_seed(7);
            for _ in 0..10_000 {
                let word = random.u64(..) & !plain.mask | plain.value & plain.mask;
                let mut bytes = word.to_be_bytes().to_vec();
                bytes.extend([0xa5; 14]);
                let id = Some((word >> 8) as u32 & 0xff_ffff);
                let payload = EtherType::TRANSPARENT_ETHERNET;
                let expected = TunnelHeader { id, len: 8, payload, has_checksum: false };
                assert_eq!((kind.parse)(IpProtocol::UDP, &bytes), Ok(expected), "{} {word:#x}", kind.name);
            }
            let own = (kind.write)(Some(1), Payload::Ethernet, &[]).bytes;
            let word = u64::from_be_bytes(*own.first_chunk().unwrap());
            assert_eq!((word ^ plain.value) & plain.mask, 0, "own packets take the fast path: {}", kind.name);
        }
    }

    #[test]
    fn kinds_differ() {
        for (i, kind) in KINDS.iter().enumerate() {
            assert_eq!(usize::from(kind.number()), i);
            assert!(KINDS[..i].iter().all(|other| other.name != kind.name));
            let udp = |kind: &TunnelKind| matches!(kind.carrier, Carrier::Udp(_));
            assert!(KINDS[..i].iter().all(|other| other.carrier != kind.carrier || !udp(kind)));
        }
    }
}
