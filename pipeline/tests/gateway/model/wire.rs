//! Frames and tunnel headers, written and read byte by byte, without the code of the gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_wire::MacAddr;

pub(crate) mod icmp;
pub(crate) mod packets;
pub(crate) mod resolution;

use packets::{ICMPV6, ipv4, ipv6, sum, sum6};

/// Ethernet address of the gateway on the underlay, and of its routers.
pub(crate) const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const OUR_V4: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const OUR_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 1);
/// SID of the gateway.
pub(crate) const OUR_SID: Ipv6Addr = Ipv6Addr::new(0xfc00, 1, 0, 0, 0, 0, 0, 0x100);

pub(crate) const IPV4: u16 = 0x0800;
pub(crate) const IPV6: u16 = 0x86dd;
pub(crate) const ARP: u16 = 0x0806;
pub(crate) const VLAN: u16 = 0x8100;
const ETHERNET: u16 = 0x6558;
const MPLS: u16 = 0x8847;

const GRE_KEY: u16 = 0x2000;

/// Kinds of tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Vxlan,
    Geneve,
    VxlanGpe,
    Gretap,
    Nvgre,
    MplsUdp,
    MplsGre,
    Srv6,
    /// GRE with IP packets.
    Gre,
    Ipip,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan",
            Self::Geneve => "geneve",
            Self::VxlanGpe => "vxlan-gpe",
            Self::Gretap => "gretap",
            Self::Nvgre => "nvgre",
            Self::MplsUdp => "mpls-udp",
            Self::MplsGre => "mpls-gre",
            Self::Srv6 => "srv6",
            Self::Gre => "gre",
            Self::Ipip => "ipip",
        }
    }

    /// Returns whether the tunnel carries IP packets in place of Ethernet frames.
    pub(crate) fn carries_ip(self) -> bool {
        matches!(self, Self::Gre | Self::Ipip)
    }

    /// Returns the UDP port, or the IP protocol, for this payload.
    fn carrier(self, payload: &[u8]) -> Result<u16, u8> {
        match self {
            Self::Vxlan => Ok(4789),
            Self::Geneve => Ok(6081),
            Self::VxlanGpe => Ok(4790),
            Self::MplsUdp => Ok(6635),
            Self::Gretap | Self::Nvgre | Self::MplsGre | Self::Gre => Err(47),
            Self::Ipip if ethertype_of(payload) == IPV6 => Err(41),
            Self::Ipip => Err(4),
            Self::Srv6 => Err(143),
        }
    }

    /// Returns the length of the headers in front of the payload in a packet to this address, without Ethernet.
    pub(crate) fn overhead(self, id: Option<u32>, to: IpAddr) -> usize {
        let ip = if to.is_ipv4() { 20 } else { 40 };
        let udp = if self.carrier(&[]).is_ok() { 8 } else { 0 };
        ip + udp + self.header(id, &[]).len()
    }

    /// Returns the header between UDP or IP and this payload.
    fn header(self, id: Option<u32>, payload: &[u8]) -> Vec<u8> {
        let number = id.unwrap_or(0);
        let label = (number << 12 | 1 << 8 | 64).to_be_bytes();
        let gre = |flags: u16, protocol: u16| [flags.to_be_bytes(), protocol.to_be_bytes()].concat();
        match self {
            Self::Vxlan => [&[8, 0, 0, 0][..], &(number << 8).to_be_bytes()].concat(),
            Self::Geneve => [&[0, 0, 0x65, 0x58][..], &(number << 8).to_be_bytes()].concat(),
            Self::VxlanGpe => [&[0x0c, 0, 0, 3][..], &(number << 8).to_be_bytes()].concat(),
            Self::Gretap => match id {
                Some(key) => [gre(GRE_KEY, ETHERNET), key.to_be_bytes().to_vec()].concat(),
                None => gre(0, ETHERNET),
            },
            Self::Nvgre => [gre(GRE_KEY, ETHERNET), (number << 8).to_be_bytes().to_vec()].concat(),
            Self::MplsUdp => [label, [0; 4]].concat(),
            Self::MplsGre => [gre(0, MPLS), label.to_vec(), vec![0; 4]].concat(),
            Self::Gre => [gre(GRE_KEY, ethertype_of(payload)), number.to_be_bytes().to_vec()].concat(),
            Self::Ipip | Self::Srv6 => Vec::new(),
        }
    }
}

/// A tunnel packet that the gateway sent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tunnelled {
    pub(crate) kind: Kind,
    pub(crate) id: Option<u32>,
    pub(crate) to: IpAddr,
    /// Ethernet address of the next hop.
    pub(crate) mac: MacAddr,
    pub(crate) payload: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn long(bytes: &[u8], at: usize) -> u32 {
    u32::from(word(bytes, at)) << 16 | u32::from(word(bytes, at + 2))
}

pub(crate) fn destination(frame: &[u8]) -> MacAddr {
    MacAddr(*frame.first_chunk().unwrap())
}

pub(crate) fn source(frame: &[u8]) -> MacAddr {
    MacAddr(*frame[6..].first_chunk().unwrap())
}

pub(crate) fn ethertype(frame: &[u8]) -> u16 {
    word(frame, 12)
}

/// Returns the EtherType of an IP packet.
pub(crate) fn ethertype_of(packet: &[u8]) -> u16 {
    if packet.first().is_some_and(|first| first >> 4 == 6) { IPV6 } else { IPV4 }
}

/// Returns a frame with this content.
pub(crate) fn ethernet(dst: MacAddr, src: MacAddr, ethertype: u16, content: &[u8]) -> Vec<u8> {
    [&dst.0[..], &src.0, &ethertype.to_be_bytes(), content].concat()
}

fn address6(bytes: &[u8], at: usize) -> Ipv6Addr {
    Ipv6Addr::from_octets(*bytes[at..].first_chunk().unwrap())
}

/// Returns the frame with an 802.1Q tag.
pub(crate) fn tagged(frame: &[u8], id: u16) -> Vec<u8> {
    [&frame[..12], &VLAN.to_be_bytes(), &id.to_be_bytes(), &frame[12..]].concat()
}

/// Returns the VLAN ID of a frame, and the frame without its tag.
pub(crate) fn untagged(frame: &[u8]) -> Option<(u16, Vec<u8>)> {
    let is_tagged = frame.len() >= 18 && ethertype(frame) == VLAN;
    is_tagged.then(|| (word(frame, 14) & 0xfff, [&frame[..12], &frame[16..]].concat()))
}

/// Returns a tunnel packet from a remote to the gateway.
pub(crate) fn to_gateway(kind: Kind, id: Option<u32>, from: IpAddr, mac: MacAddr, payload: &[u8]) -> Vec<u8> {
    let content = [&kind.header(id, payload), payload].concat();
    let (protocol, mut content) = match kind.carrier(payload) {
        Ok(port) => {
            let len = 8 + content.len() as u16;
            let header = [[0xc3, 0x50], port.to_be_bytes(), len.to_be_bytes(), [0, 0]].concat();
            (17, [header, content].concat())
        }
        Err(protocol) => (protocol, content),
    };
    match from {
        IpAddr::V4(from) => ethernet(US, mac, IPV4, &ipv4(from, OUR_V4, protocol, 64, &content)),
        IpAddr::V6(from) => {
            if protocol == 17 {
                let checksum = !sum6(from, OUR_V6, 17, &content);
                content[6..8].copy_from_slice(&if checksum == 0 { 0xffff } else { checksum }.to_be_bytes());
            }
            let to = if kind == Kind::Srv6 { OUR_SID } else { OUR_V6 };
            ethernet(US, mac, IPV6, &ipv6(from, to, protocol, 64, &content))
        }
    }
}

/// Reads a tunnel packet of the gateway. With `nvgre`, GRE with Ethernet frames and a key is NVGRE. `None`: the frame
/// is no tunnel packet.
pub(crate) fn from_gateway(frame: &[u8], nvgre: bool) -> Option<Tunnelled> {
    assert_eq!(source(frame), US, "{frame:x?}");
    let (to, protocol, content, pseudo): (IpAddr, u8, &[u8], Vec<u8>) = match ethertype(frame) {
        IPV4 => {
            assert_eq!(sum(&[&frame[14..34]]), 0xffff, "checksum of {frame:x?}");
            assert_eq!((word(frame, 16), frame[14]), (frame.len() as u16 - 14, 0x45), "length of {frame:x?}");
            assert_eq!(long(frame, 26), OUR_V4.to_bits(), "source of {frame:x?}");
            (Ipv4Addr::from_bits(long(frame, 30)).into(), frame[23], &frame[34..], frame[26..34].to_vec())
        }
        // ICMPv6 of the gateway itself.
        IPV6 if frame[20] == ICMPV6 => return None,
        IPV6 => {
            assert_eq!(word(frame, 18), frame.len() as u16 - 54, "length of {frame:x?}");
            assert_eq!(frame[22..38], OUR_V6.octets(), "source of {frame:x?}");
            (address6(frame, 38).into(), frame[20], &frame[54..], frame[22..54].to_vec())
        }
        _ => return None,
    };
    let (kind, id, header) = match protocol {
        17 => {
            let (port, len, checksum) = (word(content, 2), word(content, 4), word(content, 6));
            assert_eq!(usize::from(len), content.len(), "UDP length of {frame:x?}");
            if to.is_ipv6() || checksum != 0 {
                let of_len = u32::from(len).to_be_bytes();
                assert_eq!(sum(&[&pseudo, &of_len, &[0, 0, 0, 17], content]), 0xffff, "UDP checksum of {frame:x?}");
            }
            let kinds = [Kind::Vxlan, Kind::Geneve, Kind::VxlanGpe, Kind::MplsUdp];
            let kind = kinds.into_iter().find(|kind| kind.carrier(&[]) == Ok(port))?;
            let id = if kind == Kind::MplsUdp { long(content, 8) >> 12 } else { long(content, 12) >> 8 };
            (kind, Some(id), 8)
        }
        47 => match (word(content, 0), word(content, 2)) {
            (GRE_KEY, ETHERNET) if nvgre => (Kind::Nvgre, Some(long(content, 4) >> 8), 0),
            (GRE_KEY, ETHERNET) => (Kind::Gretap, Some(long(content, 4)), 0),
            (0, ETHERNET) => (Kind::Gretap, None, 0),
            (GRE_KEY, IPV4 | IPV6) => (Kind::Gre, Some(long(content, 4)), 0),
            (0, MPLS) => (Kind::MplsGre, Some(long(content, 4) >> 12), 0),
            other => panic!("{other:x?}: no GRE header of the gateway in {frame:x?}"),
        },
        4 | 41 => (Kind::Ipip, None, 0),
        143 => (Kind::Srv6, None, 0),
        _ => return None,
    };
    let (found, payload) = content[header..].split_at(kind.header(id, &[]).len());
    let expected = kind.header(id, payload);
    assert!(kind.carrier(payload).err().is_none_or(|expected| expected == protocol), "protocol of {frame:x?}");
    // The last byte of NVGRE is the FlowID.
    let fixed = expected.len() - usize::from(kind == Kind::Nvgre);
    assert_eq!(found[..fixed], expected[..fixed], "tunnel header of {frame:x?}");
    Some(Tunnelled { kind, id, to, mac: destination(frame), payload: payload.to_vec() })
}
