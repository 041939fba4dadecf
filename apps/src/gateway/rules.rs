//! The gateway's forwarding expressed as flow rules.

use std::net::IpAddr;

use wirepath_flow::{Action, Direction, Field, Item, ItemKind, MaskedValue, Reformat, ReformatKind, Rule, RuleError};
use wirepath_pipeline::tunnel::config::SegmentConfig;
use wirepath_pipeline::tunnel::{GatewayConfig, outer_headers};
use wirepath_wire::MacAddr;

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
    /// The rule.
    pub rule: Rule,
}

/// Returns the addresses of the outer Ethernet header towards a remote: the gateway's and the next hop's.
pub type Hop<'a> = &'a dyn Fn(IpAddr) -> (MacAddr, MacAddr);

/// Returns the tunnels of a gateway as rules, two for each segment and remote:
/// - An ingress rule on the underlay port decapsulates packets from the remote with the segment's VNI. It
///   marks them with the number of the pair, because learning needs it after the outer headers are gone.
/// - An egress rule on the underlay port encapsulates packets whose `meta data` is the number of the pair.
///
/// The rules do not express the forwarding database, flood replication, the ECN field of the outer header,
/// fragments and ICMP. If the outer DSCP is copied from the inner header, they do not express encapsulation
/// either.
pub fn gateway_rules(config: &GatewayConfig, hop: Hop<'_>) -> Result<Vec<GatewayRule>, RuleError> {
    let mut rules = Vec::new();
    let mut tag = 0;
    for segment in &config.segments {
        for remote in &segment.remotes {
            tag += 1;
            let ends = (remote.local, remote.address);
            let decap = decap_rule(config, segment, ends, tag, hop)?;
            let encap = encap_rule(config, segment, ends, tag, hop)?;
            rules.extend([decap, encap].into_iter().flatten().map(|rule| GatewayRule {
                segment: segment.name.clone(),
                remote: remote.address,
                tag,
                rule,
            }));
        }
    }
    Ok(rules)
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

/// Returns the rule that decapsulates packets of a segment from a remote and marks them with `tag`; `None` if NICs do
/// not decapsulate tunnels of the segment's kind.
pub fn decap_rule(
    config: &GatewayConfig,
    segment: &SegmentConfig,
    (local, remote): (IpAddr, IpAddr),
    tag: u32,
    hop: Hop<'_>,
) -> Result<Option<Rule>, RuleError> {
    let underlay = &config.underlay;
    if segment.is_routed_tunnel() {
        return Ok(None);
    }
    let Some(tunnel) = segment.kind.exact_item(segment.vni) else { return Ok(None) };
    let (us, _) = hop(remote);
    let link = Item::new(ItemKind::Eth).exact(Field::EthDst, mac(us));
    let mut pattern = vec![port(config)];
    match underlay.vlan {
        Some(vid) => {
            pattern.push(link.with(Field::EthTags, MaskedValue::exact(1, 2)));
            pattern.push(Item::new(ItemKind::Vlan).exact(Field::VlanVid, vid.into()));
        }
        None => pattern.push(link.with(Field::EthTags, MaskedValue::exact(0, 2))),
    }
    // Fragmented tunnel packets are not decapsulated (RFC 7348 section 4.3).
    let whole = MaskedValue::exact(0, 2);
    pattern.push(match local {
        IpAddr::V4(_) => Item::new(ItemKind::Ipv4)
            .exact(Field::Ipv4Src, number(remote))
            .exact(Field::Ipv4Dst, number(local))
            .with(Field::Ipv4Frag, whole),
        IpAddr::V6(_) => Item::new(ItemKind::Ipv6)
            .exact(Field::Ipv6Src, number(remote))
            .exact(Field::Ipv6Dst, number(local))
            .with(Field::Ipv6Frag, whole),
    });
    if let Some(port) = underlay.port_of(segment.kind) {
        pattern.push(Item::new(ItemKind::Udp).exact(Field::UdpDst, port.into()));
    }
    pattern.push(tunnel);
    let decap = Reformat::new(ReformatKind::L2TunnelToL2, &[]).map_err(bad_header)?;
    Rule::new(Direction::Ingress, PRIORITY, pattern, vec![Action::Reformat(decap), Action::Mark(tag)]).map(Some)
}

/// Returns the rule that encapsulates packets whose data is `tag`; `None` if no rule can express it: if the outer DSCP
/// is copied from the inner one, or if fields of the tunnel header differ from packet to packet.
pub fn encap_rule(
    config: &GatewayConfig,
    segment: &SegmentConfig,
    (local, remote): (IpAddr, IpAddr),
    tag: u32,
    hop: Hop<'_>,
) -> Result<Option<Rule>, RuleError> {
    let underlay = &config.underlay;
    if underlay.dscp.is_none() {
        return Ok(None);
    }
    // The configuration guarantees that a remote's local address has the same IP version.
    let Ok(template) = outer_headers(underlay, segment, hop(remote), (local, remote)) else { return Ok(None) };
    if template.varies() {
        return Ok(None);
    }
    let mut header = template.bytes().to_vec();
    // A checksum other than 0 is computed for each packet, like the lengths and the source port.
    if let Some(field) = template.udp_offset().filter(|_| template.needs_sum()).and_then(|at| header.get_mut(at + 7)) {
        *field = 1;
    }
    let encap = Reformat::new(ReformatKind::L2ToL2Tunnel, &header).map_err(bad_header)?;
    let pattern = vec![port(config), Item::new(ItemKind::Meta).exact(Field::MetaData, tag.into())];
    Rule::new(Direction::Egress, PRIORITY, pattern, vec![Action::Reformat(encap)]).map(Some)
}

fn mac(address: MacAddr) -> u128 {
    address.octets().iter().fold(0, |value, byte| value << 8 | u128::from(*byte))
}

fn bad_header(error: wirepath_flow::HeaderError) -> RuleError {
    RuleError {
        reason: wirepath_flow::Reason::BadHeader,
        at: wirepath_flow::ErrorLocation::Rule,
        message: error.to_string(),
    }
}
