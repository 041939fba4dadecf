//! The gateway's own forwarding in the language of flow rules.

use std::net::IpAddr;

use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_pmd::flow::{Action, Bits, Direction, Field, Item, ItemKind, Reformat, ReformatKind, Rule, RuleError};
use wirepath_wire::build::OuterChecksum;
use wirepath_wire::{MacAddr, vxlan};

/// Priority of the gateway's own rules: behind all others.
pub const PRIORITY: u32 = u32::MAX;

/// A rule that stands for a part of the gateway's forwarding.
#[derive(Clone, Debug)]
pub struct OwnRule {
    /// Name of the segment.
    pub segment: String,
    /// The remote VTEP.
    pub remote: IpAddr,
    /// Number of the pair of segment and remote, from 1: the mark of what was decapsulated, the `meta data` of what is to be
    /// encapsulated.
    pub tag: u32,
    /// The rule.
    pub rule: Rule,
}

/// What the outer Ethernet header towards a remote is made of, as far as it is known: our address and the next hop's.
pub type Hop<'a> = &'a dyn Fn(IpAddr) -> (MacAddr, MacAddr);

/// The tunnels of a gateway as rules, two for each segment and remote:
/// - at ingress of the underlay's port, what comes from the remote with the segment's VNI is decapsulated and marked with the number of
///   the pair: what learning needs to know of the headers that are gone;
/// - at egress there, what the forwarding database has given the number of the pair (`meta data`) is encapsulated.
///
/// Between the two lies what is no rule: the forwarding database, replication of floods, ECN of the outer header, fragments and ICMP. Where
/// the DSCP of the outer header is copied from the inner one, encapsulation is not expressed.
pub fn gateway_rules(config: &GatewayConfig, hop: Hop<'_>) -> Result<Vec<OwnRule>, RuleError> {
    let mut rules = Vec::new();
    let mut tag = 0;
    for segment in &config.segments {
        for remote in &segment.remotes {
            tag += 1;
            let vni = segment.vni.get();
            let mut add = |rule| {
                let segment = segment.name.clone();
                rules.push(OwnRule { segment, remote: remote.address, tag, rule });
            };
            add(decap(config, remote.local, remote.address, vni, tag, hop)?);
            if let Some(rule) = encap(config, remote.local, remote.address, vni, tag, hop)? {
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

/// What comes from a remote with a segment's VNI is decapsulated, and marked with `tag`.
pub fn decap(
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
            pattern.push(link.with(Field::EthTags, Bits::exact(1, 2)));
            pattern.push(Item::new(ItemKind::Vlan).exact(Field::VlanVid, vid.into()));
        }
        None => pattern.push(link.with(Field::EthTags, Bits::exact(0, 2))),
    }
    // Fragments of tunnel packets are not decapsulated (RFC 7348 section 4.3).
    let whole = Bits::exact(0, 2);
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

/// What has `tag` as data is encapsulated for a remote. `None`: the outer DSCP is copied from the inner one, which no rule says.
pub fn encap(
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
    // Lengths, the IPv4 checksum and the source port (0) are filled in for each packet; so is a UDP checksum other than 0.
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
        // The configuration gives each remote an address of its own kind.
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

fn bad_header(error: wirepath_pmd::flow::HeaderError) -> RuleError {
    RuleError {
        reason: wirepath_pmd::flow::Reason::BadHeader,
        at: wirepath_pmd::flow::At::Rule,
        message: error.to_string(),
    }
}
