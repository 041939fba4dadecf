//! The gateway's forwarding expressed as flow rules.

use std::fmt::Display;
use std::net::IpAddr;

use wirepath_flow::{Action, Direction, Field, Item, ItemKind, MaskedValue, Reformat, ReformatKind, Rule};
use wirepath_pipeline::rules::offload::ImplicitEncap;
use wirepath_pipeline::tunnel::config::{SegmentConfig, TUNNEL_PEER};
use wirepath_pipeline::tunnel::kinds::{Carrier, Payload};
use wirepath_pipeline::tunnel::{GatewayConfig, outer_headers};
use wirepath_wire::build::{OuterChecksum, OuterHeaders};
use wirepath_wire::{EtherType, IpProtocol, MacAddr};

/// Priority of the gateway's own rules, after all other rules.
pub const PRIORITY: u32 = u32::MAX;

/// A rule that represents a part of the gateway's forwarding.
#[derive(Clone, Debug)]
pub struct GatewayRule {
    /// Name of the segment.
    pub segment: String,
    /// The remote VTEP.
    pub remote: IpAddr,
    /// Number of the pair of segment and remote, starting at 1. It is the mark of decapsulated packets and
    /// the `meta data` of packets to be encapsulated.
    pub tag: u32,
    /// Ingress: decapsulation. Egress: encapsulation.
    pub direction: Direction,
    /// The rule, or the reason why no rule expresses this part.
    pub rule: Result<Rule, String>,
    /// The encapsulation of the rule, if it is one.
    pub encap: Option<ImplicitEncap>,
}

/// Returns the addresses of the outer Ethernet header towards a remote: the gateway's and the next hop's.
pub type Hop<'a> = &'a dyn Fn(IpAddr) -> (MacAddr, MacAddr);

/// Returns the tunnels of a gateway as rules. Each segment and remote has at least one rule of each direction, or the
/// reason why there is none:
/// - An ingress rule on the underlay port decapsulates packets from the remote with the segment's identifier. It
///   marks them with the number of the pair, because learning needs it after the outer headers are gone.
/// - An egress rule on the underlay port encapsulates packets whose `meta data` is the number of the pair.
///
/// Layer-3 tunnels have a rule for each IP version of the inner packet.
///
/// The rules do not express the forwarding database, routes, flood replication, the ECN field of the outer header,
/// fragments and ICMP.
pub fn gateway_rules(config: &GatewayConfig, hop: Hop<'_>) -> Vec<GatewayRule> {
    let mut rules = Vec::new();
    let mut tag = 0;
    for segment in &config.segments {
        for remote in &segment.remotes {
            tag += 1;
            let ends = (remote.local, remote.address);
            let mut add = |direction, rule, encap| {
                let (segment, remote) = (segment.name.clone(), remote.address);
                rules.push(GatewayRule { segment, remote, tag, direction, rule, encap });
            };
            match decap_rules(config, segment, ends, tag, hop) {
                Ok(rules) => rules.into_iter().for_each(|rule| add(Direction::Ingress, Ok(rule), None)),
                Err(why) => add(Direction::Ingress, Err(why), None),
            }
            match encap_headers(config, segment, ends, hop) {
                Ok(headers) => {
                    for (payload, encap) in headers {
                        add(Direction::Egress, encap_rule(config, tag, payload, &encap), Some(encap));
                    }
                }
                Err(why) => add(Direction::Egress, Err(why), None),
            }
        }
    }
    rules
}

/// Returns the types of the payload of a segment's packets, as tunnel headers give them.
fn payloads(segment: &SegmentConfig) -> &'static [EtherType] {
    match segment.payload {
        Payload::Ethernet => &[EtherType::TRANSPARENT_ETHERNET],
        Payload::Ip => &[EtherType::IPV4, EtherType::IPV6],
    }
}

fn port(config: &GatewayConfig) -> Item {
    Item::new(ItemKind::Port).exact(Field::PortId, config.underlay.port as u128)
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

/// Returns the rules that decapsulate packets of a segment from a remote and mark them with `tag`: one for each type of
/// the payload. The error is the reason why a NIC does not decapsulate them.
pub fn decap_rules(
    config: &GatewayConfig,
    segment: &SegmentConfig,
    (local, remote): (IpAddr, IpAddr),
    tag: u32,
    hop: Hop<'_>,
) -> Result<Vec<Rule>, String> {
    let underlay = &config.underlay;
    let udp_port = underlay.port_of(segment.kind);
    // RFC 8200 section 8.1: a datagram without a checksum must be dropped. RFC 6935 section 5 allows it if configured.
    if local.is_ipv6() && udp_port.is_some() && underlay.checksum != OuterChecksum::Zero {
        let why = "a NIC also decapsulates UDP datagrams without a checksum, which RFC 8200 section 8.1 forbids over \
                   IPv6 unless udp_checksum is \"zero\"";
        return Err(why.to_owned());
    }
    let (us, _) = hop(remote);
    let link = Item::new(ItemKind::Eth).exact(Field::EthDst, mac(us));
    let mut front = vec![port(config)];
    match underlay.vlan {
        Some(vid) => {
            front.push(link.with(Field::EthTags, MaskedValue::exact(1, 2)));
            front.push(Item::new(ItemKind::Vlan).exact(Field::VlanVid, vid.into()));
        }
        None => front.push(link.with(Field::EthTags, MaskedValue::exact(0, 2))),
    }
    // Fragmented tunnel packets are not decapsulated (RFC 7348 section 4.3).
    let whole = MaskedValue::exact(0, 2);
    let (ip, protocol) = match local {
        IpAddr::V4(_) => (
            Item::new(ItemKind::Ipv4)
                .exact(Field::Ipv4Src, number(remote))
                .exact(Field::Ipv4Dst, number(local))
                .with(Field::Ipv4Frag, whole),
            Field::Ipv4Proto,
        ),
        IpAddr::V6(_) => (
            Item::new(ItemKind::Ipv6)
                .exact(Field::Ipv6Src, number(remote))
                .exact(Field::Ipv6Dst, number(local))
                .with(Field::Ipv6Frag, whole),
            Field::Ipv6Proto,
        ),
    };
    let rule = |payload: &EtherType| {
        let mut pattern = front.clone();
        match (segment.kind.carrier, segment.kind.exact_item(segment.vni, *payload)) {
            // IP in IP has no tunnel header. The protocol number is the type of the payload.
            (Carrier::IpInIp, _) => pattern.push(ip.clone().exact(protocol, protocol_of(*payload).0.into())),
            (_, Some(tunnel)) => {
                pattern.push(ip.clone());
                pattern.extend(udp_port.map(|port| Item::new(ItemKind::Udp).exact(Field::UdpDst, port.into())));
                pattern.push(tunnel);
            }
            (_, None) => return Err("no rule matches the tunnel headers of this kind".to_owned()),
        }
        let decap = match segment.payload {
            Payload::Ethernet => Reformat::new(ReformatKind::L2TunnelToL2, &[]),
            Payload::Ip => {
                // Packets whose inner header has another version are left to software, which counts them.
                let version = if *payload == EtherType::IPV4 { ItemKind::Ipv4 } else { ItemKind::Ipv6 };
                pattern.push(Item::new(version).as_inner());
                // The gateway replaces this header by that of its router.
                let link = [&us.octets()[..], &TUNNEL_PEER.octets(), &payload.0.to_be_bytes()].concat();
                Reformat::new(ReformatKind::L3TunnelToL2, &link)
            }
        };
        let actions = vec![Action::Reformat(decap.map_err(text)?), Action::Mark(tag)];
        Rule::new(Direction::Ingress, PRIORITY, pattern, actions).map_err(text)
    };
    payloads(segment).iter().map(rule).collect()
}

/// Returns the protocol number of an inner packet behind an outer IP header.
fn protocol_of(payload: EtherType) -> IpProtocol {
    if payload == EtherType::IPV6 { IpProtocol::IPV6 } else { IpProtocol::IPV4 }
}

/// Returns the outer headers that a NIC adds to packets of a segment to a remote, for each type of the payload. The
/// error is the reason why a NIC does not encapsulate them.
pub fn encap_headers(
    config: &GatewayConfig,
    segment: &SegmentConfig,
    (local, remote): (IpAddr, IpAddr),
    hop: Hop<'_>,
) -> Result<Vec<(EtherType, ImplicitEncap)>, String> {
    let underlay = &config.underlay;
    let never = |why: &str| Err(why.to_owned());
    if segment.kind.has_labels() {
        return never("the NIC is not known to encapsulate in MPLS");
    }
    if underlay.dscp.is_none() {
        return never("the NIC does not copy the DSCP of the inner packet");
    }
    if underlay.port_of(segment.kind).is_some() && underlay.source_ports != DYNAMIC_PORTS {
        return never("the NIC chooses source ports from all dynamic ones");
    }
    // The configuration guarantees that a remote's local address has the same IP version.
    let template = outer_headers(underlay, segment, hop(remote), (local, remote)).map_err(text)?;
    // A ConnectX writes lengths, the IPv4 header checksum, the UDP source port and the low byte of a GRE key. The
    // latter two are entropy: Linux drivers/net/ethernet/mellanox/mlx5/core/lib/port_tun.c. Header modifications
    // precede the encapsulation.
    let variable = template.variable();
    if variable.checksum.is_some() {
        return never("the NIC computes no checksum of tunnel headers");
    }
    if variable.sequence.is_some() {
        return never("the NIC writes no sequence numbers");
    }
    if variable.flow_label {
        return never("the NIC does not write the flow label, which is entropy without UDP ports (RFC 6438)");
    }
    let kind = match segment.payload {
        Payload::Ethernet => ReformatKind::L2ToL2Tunnel,
        Payload::Ip => ReformatKind::L2ToL3Tunnel,
    };
    let headers = |payload: &EtherType| {
        let header = Reformat::new(kind, &header_of(&template, *payload)).map_err(text)?;
        Ok((*payload, ImplicitEncap { header, has_flow_id: variable.flow_id.is_some() }))
    };
    payloads(segment).iter().map(headers).collect()
}

/// Returns the bytes of outer headers for packets with this payload.
fn header_of(template: &OuterHeaders, payload: EtherType) -> Vec<u8> {
    let mut header = template.bytes().to_vec();
    template.write_payload_type(&mut header, payload == EtherType::IPV6);
    // A checksum other than 0 is computed for each packet, like the lengths and the source port.
    if let Some(field) = template.udp_offset().filter(|_| template.needs_sum()).and_then(|at| header.get_mut(at + 7)) {
        *field = 1;
    }
    header
}

/// Default range of source ports (RFC 7348 section 5).
const DYNAMIC_PORTS: (u16, u16) = (49152, 65535);

/// Returns the rule of an encapsulation for packets whose data is `tag`.
fn encap_rule(config: &GatewayConfig, tag: u32, payload: EtherType, encap: &ImplicitEncap) -> Result<Rule, String> {
    let mut pattern = vec![port(config), Item::new(ItemKind::Meta).exact(Field::MetaData, tag.into())];
    match payload {
        EtherType::IPV4 => pattern.push(Item::new(ItemKind::Ipv4)),
        EtherType::IPV6 => pattern.push(Item::new(ItemKind::Ipv6)),
        _ => {}
    }
    Rule::new(Direction::Egress, PRIORITY, pattern, vec![Action::Reformat(encap.header.clone())]).map_err(text)
}

fn mac(address: MacAddr) -> u128 {
    address.octets().iter().fold(0, |value, byte| value << 8 | u128::from(*byte))
}
