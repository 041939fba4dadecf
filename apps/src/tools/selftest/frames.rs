//! Frames of the self-test: plain ones of any length, and one sample of each header stack.

use std::net::{Ipv4Addr, Ipv6Addr};

use wirepath_pmd::port::MacAddr;
use wirepath_wire::checksum::{self, Transport};
use wirepath_wire::{IpProtocol, geneve, vxlan, vxlan_gpe};

/// Source address of all test frames. It is locally administered, and no other frame on the port has it.
pub(super) const SOURCE: MacAddr = MacAddr::new(0x02, 0x57, 0x50, 0x54, 0x53, 0x54);
/// Local experimental EtherType 1 (IEEE 802).
const EXPERIMENTAL: u16 = 0x88b5;

/// A frame with known headers.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// Header stack, such as `ipv4/udp/vxlan/eth/ipv4/tcp`.
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

/// Values that distinguish two samples of the same stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    /// Number from 1 that goes into addresses, ports and identifiers.
    pub(super) n: u8,
    /// Bytes of payload.
    pub(super) payload: usize,
}

/// Transport protocol of a plain packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum L4 {
    Tcp,
    Udp,
}

/// Returns a frame without a known protocol inside. `seed` selects the content.
pub(super) fn opaque(to: MacAddr, len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = ethernet(to, EXPERIMENTAL, &[]);
    bytes.extend(std::iter::repeat_with(|| random.u8(..)).take(len.saturating_sub(14)));
    bytes
}

/// Returns a TCP or UDP packet over IPv4 or IPv6 with correct checksums.
pub(super) fn plain(to: MacAddr, v6: bool, l4: L4, values: Values) -> Vec<u8> {
    let payload = pattern(values);
    ethernet(to, if v6 { 0x86dd } else { 0x0800 }, &network(v6, l4, values, &payload))
}

fn pattern(values: Values) -> Vec<u8> {
    (0..values.payload).map(|i| (i * 7) as u8 ^ values.n).collect()
}

fn network(v6: bool, l4: L4, values: Values, payload: &[u8]) -> Vec<u8> {
    let protocol = if l4 == L4::Tcp { IpProtocol::TCP } else { IpProtocol::UDP };
    let ports = [0x30, values.n, 0x10, values.n];
    let mut segment = match l4 {
        L4::Udp => [&ports[..], &(8 + payload.len() as u16).to_be_bytes(), &[0, 0], payload].concat(),
        L4::Tcp => {
            let fixed = [0, 0, 0, values.n, 0, 0, 0, 2, 0x50, 0x10 | (values.n & 1) << 3, 0x20, 0, 0, 0, 0, 0];
            [&ports[..], &fixed, payload].concat()
        }
    };
    let transport = if l4 == L4::Tcp { Transport::Tcp } else { Transport::Udp };
    let pseudo = pseudo(v6, values.n, protocol, segment.len());
    transport.fill(&mut segment, pseudo);
    ip(v6, protocol.0, values.n, &segment)
}

fn addresses4(n: u8) -> (Ipv4Addr, Ipv4Addr) {
    (Ipv4Addr::new(198, 18, n, 1), Ipv4Addr::new(198, 19, n, 2))
}

fn addresses6(n: u8) -> (Ipv6Addr, Ipv6Addr) {
    let n = u16::from(n);
    (Ipv6Addr::new(0x2001, 2, 0, n, 0, 0, 0, 1), Ipv6Addr::new(0x2001, 2, 0, 0x100 + n, 0, 0, 0, 2))
}

fn pseudo(v6: bool, n: u8, protocol: IpProtocol, len: usize) -> checksum::Sum {
    if v6 {
        let (from, to) = addresses6(n);
        checksum::pseudo6(from, to, protocol, len as u32)
    } else {
        let (from, to) = addresses4(n);
        checksum::pseudo4(from, to, protocol, len as u16)
    }
}

/// An IP packet. TTL and traffic class depend on `n`.
fn ip(v6: bool, protocol: u8, n: u8, payload: &[u8]) -> Vec<u8> {
    let class = (n & 7) << 2;
    if v6 {
        let (from, to) = addresses6(n);
        let mut header = vec![0x60 | class >> 4, class << 4, 0, n];
        header.extend((payload.len() as u16).to_be_bytes());
        header.extend([protocol, 60 + n]);
        header.extend(from.octets());
        header.extend(to.octets());
        return [&header[..], payload].concat();
    }
    let (from, to) = addresses4(n);
    let mut header = vec![0x45, class];
    header.extend((20 + payload.len() as u16).to_be_bytes());
    header.extend([0, n, 0x40, 0, 60 + n, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum::ipv4_header(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    [&header[..], payload].concat()
}

fn ethernet(to: MacAddr, ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&to.0[..], &SOURCE.0, &ethertype.to_be_bytes(), payload].concat()
}

/// A UDP datagram without checksum, as tunnels over IPv4 send it.
fn tunnel_datagram(port: u16, n: u8, payload: &[u8]) -> Vec<u8> {
    let length = (8 + payload.len() as u16).to_be_bytes();
    [&[0xc0, n][..], &port.to_be_bytes(), &length, &[0, 0], payload].concat()
}

/// Returns two samples of each header stack that rules can match. Their lengths are at least 60 bytes.
pub(super) fn samples(to: MacAddr) -> Vec<Sample> {
    let mut all = Vec::new();
    for n in [1u8, 2] {
        let values = Values { n, payload: 40 };
        let payload = pattern(values);
        let packet = |v6: bool, l4: L4| network(v6, l4, values, &payload);
        let inner = |v6: bool, l4: L4| ethernet(MacAddr([2, 0, 0, 0, 0, n]), ethertype(v6), &packet(v6, l4));
        let mut add = |name: &str, bytes: Vec<u8>| all.push(Sample { name: name.to_owned(), bytes });
        add("eth", opaque(to, 64, n.into()));
        let mut arp = vec![0, 1, 8, 0, 6, 4, 0, n];
        arp.extend(SOURCE.octets());
        arp.extend(addresses4(n).0.octets());
        arp.extend([0; 6]);
        arp.extend(addresses4(n).1.octets());
        arp.extend([0; 18]);
        add("arp", ethernet(to, 0x0806, &arp));
        for (v6, version) in [(false, "ipv4"), (true, "ipv6")] {
            for (l4, transport) in [(L4::Tcp, "tcp"), (L4::Udp, "udp")] {
                add(&format!("{version}/{transport}"), ethernet(to, ethertype(v6), &packet(v6, l4)));
                let tag = [0x20 | (n >> 4), n, (ethertype(v6) >> 8) as u8, ethertype(v6) as u8];
                let tagged = [&tag[..], &packet(v6, l4)].concat();
                add(&format!("vlan/{version}/{transport}"), ethernet(to, 0x8100, &tagged));
                let service = [&[0x10, n, 0x81, 0x00][..], &tagged].concat();
                add(&format!("vlan/vlan/{version}/{transport}"), ethernet(to, 0x88a8, &service));
            }
            let mut echo = [&[if v6 { 128 } else { 8 }, 0, 0, 0, 0, n, 0, 1][..], &payload].concat();
            let (icmp, protocol) = if v6 { ("icmpv6", 58) } else { ("icmp", 1) };
            if v6 {
                let pseudo = pseudo(true, n, IpProtocol::ICMPV6, echo.len());
                Transport::Icmpv6.fill(&mut echo, pseudo);
            }
            add(&format!("{version}/{icmp}"), ethernet(to, ethertype(v6), &ip(v6, protocol, n, &echo)));
            let esp = [&[0, 0, 1, n, 0, 0, 0, n][..], &payload].concat();
            add(&format!("{version}/esp"), ethernet(to, ethertype(v6), &ip(v6, 50, n, &esp)));
            let over = |protocol: u8, bytes: &[u8]| ethernet(to, ethertype(v6), &ip(v6, protocol, n, bytes));
            let udp = |port: u16, bytes: &[u8]| over(17, &tunnel_datagram(port, n, bytes));
            for (inner_v6, inside) in [(false, "ipv4"), (true, "ipv6")] {
                let frame = inner(inner_v6, L4::Tcp);
                let l3 = packet(inner_v6, L4::Udp);
                let [a, b] = ethertype(inner_v6).to_be_bytes();
                for (l4, transport) in [(L4::Tcp, "tcp"), (L4::Udp, "udp")] {
                    let vxlan = [&[8, 0, 0, 0, 0, 0x10, n, 0][..], &inner(inner_v6, l4)].concat();
                    add(&format!("{version}/udp/vxlan/eth/{inside}/{transport}"), udp(vxlan::PORT, &vxlan));
                }
                let [c, d] = ethertype(inner_v6).to_be_bytes();
                let mut tagged = frame.clone();
                tagged.splice(12..14, [0x81, 0x00, 0x40, n, c, d]);
                let vxlan = [&[8, 0, 0, 0, 0, 0x11, n, 0][..], &tagged].concat();
                add(&format!("{version}/udp/vxlan/eth/vlan/{inside}/tcp"), udp(vxlan::PORT, &vxlan));
                let gpe = [&[0x0c, 0, 0, 3, 0, 0x21, n, 0][..], &frame].concat();
                add(&format!("{version}/udp/vxlan-gpe/eth/{inside}/tcp"), udp(vxlan_gpe::PORT, &gpe));
                let gpe = [&[0x0c, 0, 0, if inner_v6 { 2 } else { 1 }, 0, 0x20, n, 0][..], &l3].concat();
                add(&format!("{version}/udp/vxlan-gpe/{inside}/udp"), udp(vxlan_gpe::PORT, &gpe));
                let geneve = [&[0, 0, 0x65, 0x58, 0, 0x30, n, 0][..], &frame].concat();
                add(&format!("{version}/udp/geneve/eth/{inside}/tcp"), udp(geneve::PORT, &geneve));
                let geneve = [&[0, 0, a, b, 0, 0x31, n, 0][..], &l3].concat();
                add(&format!("{version}/udp/geneve/{inside}/udp"), udp(geneve::PORT, &geneve));
                let gre = [&[0x20, 0, a, b, 0, 0, 0x40, n][..], &l3].concat();
                add(&format!("{version}/gre/{inside}/udp"), over(47, &gre));
                let nvgre = [&[0x20, 0, 0x65, 0x58, 0, 0x50, n, 0][..], &frame].concat();
                add(&format!("{version}/gre/eth/{inside}/tcp"), over(47, &nvgre));
                add(&format!("{version}/{inside}/udp"), over(if inner_v6 { 41 } else { 4 }, &l3));
                let label = (u32::from(n) + 100) << 12 | 1 << 8 | 64;
                let mpls = [&label.to_be_bytes()[..], &l3].concat();
                if !v6 {
                    add(&format!("mpls/{inside}/udp"), ethernet(to, 0x8847, &mpls));
                }
            }
        }
    }
    all
}

fn ethertype(v6: bool) -> u16 {
    if v6 { 0x86dd } else { 0x0800 }
}

/// Returns outer headers for encapsulation: `(tunnel, with inner Ethernet header, IPv6, bytes)`. Lengths and
/// checksums are 0, as the rule language wants them.
pub(super) fn tunnel_headers(to: MacAddr) -> Vec<(&'static str, bool, bool, Vec<u8>)> {
    let mut all = Vec::new();
    for v6 in [false, true] {
        let outer = |protocol: u8, rest: &[u8]| {
            let mut bytes = ethernet(to, ethertype(v6), &ip(v6, protocol, 9, rest));
            // The length of the packet is unknown.
            let lengths = if v6 { 18..20 } else { 16..18 };
            bytes[lengths].fill(0);
            if !v6 {
                bytes[24..26].fill(0);
            }
            bytes
        };
        let udp = |port: u16, header: &[u8]| {
            let [a, b] = port.to_be_bytes();
            outer(17, &[&[0xc0, 9, a, b, 0, 0, 0, 0][..], header].concat())
        };
        all.push(("vxlan", true, v6, udp(vxlan::PORT, &[8, 0, 0, 0, 0, 0, 42, 0])));
        all.push(("geneve", true, v6, udp(geneve::PORT, &[0, 0, 0x65, 0x58, 0, 0, 42, 0])));
        all.push(("geneve", false, v6, udp(geneve::PORT, &[0, 0, 0x08, 0x00, 0, 0, 42, 0])));
        all.push(("vxlan-gpe", true, v6, udp(vxlan_gpe::PORT, &[0x0c, 0, 0, 3, 0, 0, 42, 0])));
        all.push(("vxlan-gpe", false, v6, udp(vxlan_gpe::PORT, &[0x0c, 0, 0, 1, 0, 0, 42, 0])));
        all.push(("gre", true, v6, outer(47, &[0, 0, 0x65, 0x58])));
        all.push(("gre", false, v6, outer(47, &[0, 0, 0x08, 0x00])));
        all.push(("ip", false, v6, outer(4, &[])));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_wire::parse;

    #[test]
    fn samples_parse_and_differ() {
        let all = samples(MacAddr([2, 0, 0, 0, 0, 7]));
        for (i, sample) in all.iter().enumerate() {
            assert!(sample.bytes.len() >= 60, "{}", sample.name);
            parse(&sample.bytes).unwrap_or_else(|error| panic!("{}: {error}", sample.name));
            assert!(all[..i].iter().all(|other| other.bytes != sample.bytes), "{}", sample.name);
        }
    }
}
