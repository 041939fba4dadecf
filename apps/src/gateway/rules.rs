//! The gateway's forwarding expressed as flow rules.

use std::net::IpAddr;

use wirepath_flow::{Action, Direction, Field, Item, ItemKind, MaskedValue, Reformat, ReformatKind, Rule, RuleError};
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_wire::build::OuterChecksum;
use wirepath_wire::{MacAddr, vxlan};

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
            let vni = segment.vni.get();
            let mut add = |rule| {
                let segment = segment.name.clone();
                rules.push(GatewayRule { segment, remote: remote.address, tag, rule });
            };
            add(decap_rule(config, remote.local, remote.address, vni, tag, hop)?);
            if let Some(rule) = encap_rule(config, remote.local, remote.address, vni, tag, hop)? {
                add(rule);
            }
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

/// Returns the rule that decapsulates packets from a remote with a segment's VNI and marks them with `tag`.
pub fn decap_rule(
    config: &GatewayConfig,
    local: IpAddr,
    remote: IpAddr,
    vni: u32,
    tag: u32,
    hop: Hop<'_>,
) -> Result<Rule, RuleError> {
    let underlay = &config.underlay;
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
    pattern.push(Item::new(ItemKind::Udp).exact(Field::UdpDst, underlay.udp_port.into()));
    pattern.push(Item::new(ItemKind::Vxlan).exact(Field::VxlanVni, vni.into()));
    let decap = Reformat::new(ReformatKind::L2TunnelToL2, &[]).map_err(bad_header)?;
    Rule::new(Direction::Ingress, PRIORITY, pattern, vec![Action::Reformat(decap), Action::Mark(tag)])
}

/// Returns the rule that encapsulates packets whose data is `tag`; `None` if the outer DSCP is copied from
/// the inner one, which no rule can express.
pub fn encap_rule(
    config: &GatewayConfig,
    local: IpAddr,
    remote: IpAddr,
    vni: u32,
    tag: u32,
    hop: Hop<'_>,
) -> Result<Option<Rule>, RuleError> {
    let underlay = &config.underlay;
    let Some(dscp) = underlay.dscp else { return Ok(None) };
    let (us, next) = hop(remote);
    let mut header = [next.octets(), us.octets()].concat();
    if let Some(vid) = underlay.vlan {
        header.extend([0x81, 0x00]);
        header.extend(vid.to_be_bytes());
    }
    // The lengths, the IPv4 checksum, the source port (0) and a UDP checksum other than 0 are filled in for
    // each packet.
    let checksum: u16 = match (underlay.checksum, local) {
        (OuterChecksum::Always, _) => 1,
        (OuterChecksum::Standard, IpAddr::V6(_)) => 1,
        _ => 0,
    };
    match (local, remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            header.extend([0x08, 0x00, 0x45, dscp << 2, 0, 0, 0, 0, 0x40, 0, underlay.ttl, 17, 0, 0]);
            header.extend(local.octets());
            header.extend(remote.octets());
        }
        (IpAddr::V6(local), IpAddr::V6(remote)) => {
            header.extend([0x86, 0xdd]);
            header.extend((6u32 << 28 | u32::from(dscp) << 22).to_be_bytes());
            header.extend([0, 0, 17, underlay.ttl]);
            header.extend(local.octets());
            header.extend(remote.octets());
        }
        // The configuration guarantees that a remote's local address has the same IP version.
        _ => return Ok(None),
    }
    header.extend([0, 0]);
    header.extend(underlay.udp_port.to_be_bytes());
    header.extend([0, 0]);
    header.extend(checksum.to_be_bytes());
    header.extend([vxlan::FLAG_VNI, 0, 0, 0]);
    header.extend((vni << 8).to_be_bytes());
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
