//! Probing of the rule capabilities of a device.
//!
//! The firmware reports limits ([`Mlx5::rule_limits`]). Most capabilities cannot be queried. As other drivers do, each
//! of them is tried once with a rule that no frame matches: its source is the broadcast address. What the device
//! refuses is not offered.

use wirepath_nic_defs::mlx5::header;
use wirepath_verbs::mlx5::{
    Actions, Egress, EgressDestination, FlowCounter, Ingress, IngressDestination, MatchParameters, Matcher, Mlx5,
    ModifyHeader, SteeringRule,
};

use super::{SteeringTable, commands, matcher};
use crate::drivers::nic::common::rules::ibv;
use crate::port::hardware::{
    ActionCapabilities, DestinationKind, FieldNames, ItemCapability, Masks, ReformatCapability, RuleBackend,
    RuleCapabilities, TableCapabilities, TunnelName,
};
use wirepath_flow::{self, Field, FieldSet, ItemKind, ReformatKind, Rule};

/// Numbers of priorities that kernels offer: 16 since Linux 5.7, 8 before.
const PRIORITIES: [u16; 2] = [16, 8];
/// Numbers of header modifications to try, largest first, if the firmware does not report its limit. A kernel logs each
/// refusal.
const COMMANDS: [u16; 6] = [32, 16, 8, 4, 2, 1];
/// Lengths of encapsulation headers to try, if the firmware does not report its limit. No ConnectX is known to accept
/// more than the first.
const HEADERS: [usize; 4] = [128, 96, 64, 50];
/// Assumed number of counters, which no verb reports (`max_flow_counters` of ConnectX-5: 2^24).
const COUNTERS: u32 = 1 << 24;

/// An item: kind, inner flag, maximum number of occurrences, comparable fields with masks, implied conditions, and a
/// sample pattern to try.
pub(super) type ItemProbe = (ItemKind, bool, u8, &'static [(Field, Masks)], &'static str, &'static str);

const ANY: Masks = Masks::Any;
const ETH: &[(Field, Masks)] =
    &[(Field::EthDst, ANY), (Field::EthSrc, ANY), (Field::EthType, ANY), (Field::EthTags, ANY)];
const VLAN: &[(Field, Masks)] =
    &[(Field::VlanVid, ANY), (Field::VlanPcp, ANY), (Field::VlanDei, ANY), (Field::VlanTpid, Masks::Exact)];
const IPV4: &[(Field, Masks)] = &[
    (Field::Ipv4Src, ANY),
    (Field::Ipv4Dst, ANY),
    (Field::Ipv4Proto, ANY),
    (Field::Ipv4Dscp, ANY),
    (Field::Ipv4Ecn, ANY),
    (Field::Ipv4Ttl, ANY),
    (Field::Ipv4Ihl, ANY),
    (Field::Ipv4Frag, Masks::Within(1)),
];
const IPV6: &[(Field, Masks)] = &[
    (Field::Ipv6Src, ANY),
    (Field::Ipv6Dst, ANY),
    (Field::Ipv6Proto, ANY),
    (Field::Ipv6Dscp, ANY),
    (Field::Ipv6Ecn, ANY),
    (Field::Ipv6Flow, ANY),
    (Field::Ipv6Hops, ANY),
    (Field::Ipv6Ext, Masks::Within(wirepath_flow::ext::FRAGMENT)),
    (Field::Ipv6Frag, Masks::Within(1)),
];
/// Without fields that extension headers change for a device: only outer extension headers are excluded
/// patterns.
const INNER_IPV6: &[(Field, Masks)] = &[
    (Field::Ipv6Src, ANY),
    (Field::Ipv6Dst, ANY),
    (Field::Ipv6Dscp, ANY),
    (Field::Ipv6Ecn, ANY),
    (Field::Ipv6Flow, ANY),
    (Field::Ipv6Hops, ANY),
];
const TCP: &[(Field, Masks)] =
    &[(Field::TcpSrc, ANY), (Field::TcpDst, ANY), (Field::TcpSeq, ANY), (Field::TcpAck, ANY), (Field::TcpFlags, ANY)];
const UDP: &[(Field, Masks)] = &[(Field::UdpSrc, ANY), (Field::UdpDst, ANY)];
const MPLS: &[(Field, Masks)] =
    &[(Field::MplsLabel, ANY), (Field::MplsTc, ANY), (Field::MplsBos, ANY), (Field::MplsTtl, ANY)];
const ICMP: &[(Field, Masks)] =
    &[(Field::IcmpType, ANY), (Field::IcmpCode, ANY), (Field::IcmpId, ANY), (Field::IcmpSeq, ANY)];
const ESP: &[(Field, Masks)] = &[(Field::EspSpi, ANY)];
/// With the first word of the header (DPDK `drivers/net/mlx5/hws/mlx5dr_definer.c`, `mlx5dr_definer_conv_item_gre`).
const GRE: &[(Field, Masks)] = &[(Field::GreFlags, ANY), (Field::GreProto, ANY), (Field::GreKey, ANY)];
/// Without it.
const GRE_FIELDS: &[(Field, Masks)] =
    &[(Field::GreFlags, Masks::Within(0xb000)), (Field::GreProto, ANY), (Field::GreKey, ANY)];
const VXLAN: &[(Field, Masks)] = &[(Field::VxlanFlags, ANY), (Field::VxlanVni, ANY)];
const VXLAN_GPE: &[(Field, Masks)] = &[(Field::GpeFlags, ANY), (Field::GpeNext, ANY), (Field::GpeVni, ANY)];
const GENEVE: &[(Field, Masks)] =
    &[(Field::GeneveVni, ANY), (Field::GeneveProto, ANY), (Field::GeneveOptLen, ANY), (Field::GeneveOam, ANY)];
const NOT_A_FRAGMENT: &str = "inner ipv4 frag no";

/// Items to try. ARP is missing: a device sees only the EtherType and would treat every format as ARP for
/// IPv4 (`eth type 0x0806` matches what it sees). Type and code of ICMPv6 are missing, because it is unknown
/// how a device treats messages of less than 8 bytes. Of several probes for an item, the first one that works counts.
///
/// VLAN tags are neither pushed nor popped. Without firmware objects, the kernel supports ESP, header
/// modification, decapsulation and reformat as rule actions (Linux `drivers/infiniband/hw/mlx5/fs.c`,
/// `parse_flow_flow_action`). None of the four kinds of reformat concerns tags.
#[rustfmt::skip]
pub(super) const ITEM_PROBES: &[ItemProbe] = &[
    (ItemKind::Eth, false, 1, ETH, "", "eth dst 02:00:00:00:00:01 type 0x88b5 tags none"),
    (ItemKind::Vlan, false, 2, VLAN, "", "vlan vid 1 pcp 1 dei 1 tpid 0x8100 / vlan vid 1 pcp 1 dei 1 tpid 0x8100"),
    (ItemKind::Mpls, false, 1, MPLS, "", "eth type 0x8847 / mpls label 1 tc 1 bos 1 ttl 1"),
    (ItemKind::Ipv4, false, 1, IPV4, "", "ipv4 src 10.0.0.1 dst 10.0.0.1 proto 1 dscp 1 ecn 1 ttl 1 ihl 5 frag no"),
    (ItemKind::Ipv6, false, 1, IPV6, "", "ipv6 src fd00::1 dst fd00::1 proto 1 dscp 1 ecn 1 flow 1 hops 1 frag no"),
    (ItemKind::Tcp, false, 1, TCP, "", "ipv4 / tcp src 1 dst 1 seq 1 ack 1 flags syn"),
    (ItemKind::Udp, false, 1, UDP, "", "ipv4 / udp src 1 dst 1"),
    (ItemKind::Icmp, false, 1, ICMP, "", "icmp type 1 code 1 id 1 seq 1"),
    (ItemKind::Icmpv6, false, 1, &[], "", "ipv6 / icmpv6"),
    (ItemKind::Esp, false, 1, ESP, "", "ipv4 / esp spi 1"),
    (ItemKind::Gre, false, 1, GRE, "", "ipv4 / gre flags 0x2000 proto 0x6558 key 1"),
    (ItemKind::Gre, false, 1, GRE_FIELDS, "", "ipv4 / gre proto 0x6558 key 1"),
    (ItemKind::Vxlan, false, 1, VXLAN, "udp dst 4789", "ipv4 / udp dst 4789 / vxlan vni 1"),
    (ItemKind::VxlanGpe, false, 1, VXLAN_GPE, "udp dst 4790", "ipv4 / udp dst 4790 / vxlan-gpe flags 1 next 1 vni 1"),
    (ItemKind::Geneve, false, 1, GENEVE, "udp dst 6081",
        "ipv4 / udp dst 6081 / geneve vni 1 proto 0x6558 optlen 1 oam 1"),
    (ItemKind::Eth, true, 1, ETH, "", "ipv4 / udp dst 4789 / vxlan / eth dst 02:00:00:00:00:01 type 0x88b5 tags none"),
    (ItemKind::Vlan, true, 2, VLAN, "",
        "ipv4 / udp dst 4789 / vxlan / vlan vid 1 tpid 0x8100 / vlan vid 1 tpid 0x8100"),
    (ItemKind::Ipv4, true, 1, IPV4, "",
        "ipv4 / udp dst 4789 / vxlan / ipv4 src 10.0.0.1 dscp 1 ecn 1 ttl 1 proto 1 frag no"),
    (ItemKind::Ipv6, true, 1, INNER_IPV6, "", "ipv4 / udp dst 4789 / vxlan / ipv6 src fd00::1 flow 1 hops 1"),
    (ItemKind::Tcp, true, 1, TCP, NOT_A_FRAGMENT,
        "ipv4 / udp dst 4789 / vxlan / ipv4 frag no / tcp dst 1 seq 1 flags syn"),
    (ItemKind::Udp, true, 1, UDP, NOT_A_FRAGMENT, "ipv4 / udp dst 4789 / vxlan / ipv4 frag no / udp dst 1"),
];

/// Transmit metadata, as egress rules see it.
const METADATA: ItemProbe = (ItemKind::Meta, false, 1, &[(Field::MetaData, ANY)], "", "meta data 1");

/// Fragments are recognised only as such; headers in the first one are not parsed. Nor are headers behind an
/// authentication header.
pub(super) const EXCLUDED_PATTERNS: [&str; 3] = ["ipv4 frag yes", "ipv6 ext fragment", "ipv6 ext ah"];

/// Packets whose checksum the device does not fix. It knows TCP and UDP in unfragmented packets. DCCP, ICMPv6
/// and UDP-Lite also cover the addresses. Behind a routing header, or a home address in destination options,
/// a checksum covers another address than the one in the header.
pub(super) const UNFIXED_CHECKSUMS: [&str; 9] = [
    "ipv4 proto 33",
    "ipv4 proto 136",
    "ipv4 frag yes",
    "ipv6 proto 33",
    "ipv6 proto 58",
    "ipv6 proto 136",
    "ipv6 frag yes",
    "ipv6 ext routing",
    "ipv6 ext destination",
];

/// A table under test.
struct TableProbe<'a, T: SteeringTable> {
    mlx5: &'a Mlx5,
    /// Destination of the packets, which never arrive.
    drop: T::Destination,
    /// Maximum number of header modifications, if the firmware reports it.
    max_commands: Option<u16>,
}

fn fields(pattern: &str) -> Option<FieldSet> {
    format!("egress: {pattern} => count").parse::<Rule>().ok().map(|rule| rule.fields())
}

impl<T: SteeringTable> TableProbe<'_, T> {
    /// Returns true if the device accepts a rule with this match, priority and actions.
    fn takes(&self, mask: &MatchParameters, value: &MatchParameters, priority: u16, actions: &Actions<T>) -> bool {
        let (mut mask, mut value) = (mask.clone(), value.clone());
        let broadcast = (1 << 48) - 1;
        mask.set(header::SRC_MAC, broadcast);
        value.set(header::SRC_MAC, broadcast);
        let matcher = Matcher::new(self.mlx5, priority, &mask);
        matcher.and_then(|matcher| SteeringRule::new(&matcher, &value, actions)).is_ok()
    }

    fn nothing(&self, priority: u16, destination: T::Destination) -> bool {
        let all = MatchParameters::default();
        self.takes(&all, &all, priority, &Actions::only(destination))
    }

    fn priorities(&self) -> u16 {
        PRIORITIES.into_iter().find(|number| self.nothing(number - 1, self.drop.clone())).unwrap_or(0)
    }

    fn item(&self, offer: &ItemProbe) -> Option<ItemCapability> {
        let &(kind, inner, max_count, comparable, implies, sample) = offer;
        let (mask, value) = matcher::parameters(&fields(sample)?).ok()?;
        if !self.takes(&mask, &value, 0, &Actions::only(self.drop.clone())) {
            return None;
        }
        let mut item =
            comparable.iter().fold(ItemCapability::new(kind), |item, &(field, masks)| item.with(field, masks));
        (item.inner, item.max_count) = (inner, max_count);
        item.implies = implies.parse().ok()?;
        Some(item)
    }

    /// Returns the items that the device can match.
    fn items(&self, offers: &[ItemProbe]) -> Vec<ItemCapability> {
        let mut items: Vec<ItemCapability> = Vec::new();
        for offer in offers {
            if !items.iter().any(|item| (item.kind, item.inner) == (offer.0, offer.1)) {
                items.extend(self.item(offer));
            }
        }
        items
    }

    /// Returns true if the device can match the validity of headers.
    fn can_match_integrity(&self) -> bool {
        let Some((mut mask, mut value)) = fields("ipv4 / udp").and_then(|set| matcher::parameters(&set).ok()) else {
            return false;
        };
        matcher::require_valid_headers(&mut mask, &mut value);
        self.takes(&mask, &value, 0, &Actions::only(self.drop.clone()))
    }

    /// Returns the writable fields, whether the TTL can be decremented, and the maximum number of commands of a rule.
    fn writing(&self) -> (Vec<Field>, bool, u16) {
        let works = |commands: &[_]| ModifyHeader::<T>::new(self.mlx5, commands).is_ok();
        let set = |field: Field| commands::set(field, 0).is_some_and(|all| works(&all.collect::<Vec<_>>()));
        let writable = commands::WRITABLE.iter().map(|(field, _)| *field).filter(|field| set(*field)).collect();
        let hops = works(&[commands::hop(false)]) && works(&[commands::hop(true)]);
        let tried = || COMMANDS.into_iter().find(|count| works(&vec![commands::hop(false); usize::from(*count)]));
        // A limit without support for any modification is no capability.
        let max_commands = match self.max_commands {
            Some(limit) => works(&[commands::hop(false)]).then_some(limit.min(COMMANDS[0])),
            None => tried(),
        };
        (writable, hops, max_commands.unwrap_or(0))
    }

    fn reformat(&self, kind: ReformatKind, lengths: &[usize], tunnels: &[TunnelName]) -> Option<ReformatCapability> {
        let longest = lengths.iter().find(|length| {
            let reformat = sample(kind, **length);
            reformat.and_then(|reformat| T::reformat(self.mlx5, &reformat)).is_some_and(|made| made.is_ok())
        })?;
        let in_udp = [TunnelName::Vxlan, TunnelName::VxlanGpe, TunnelName::Geneve];
        Some(ReformatCapability {
            kind,
            max_header: *longest as u16,
            tunnels: tunnels.to_vec(),
            // Linux: drivers/net/ethernet/mellanox/mlx5/core/lib/port_tun.c.
            fills_source_port: if kind.is_decap() { Vec::new() } else { in_udp.to_vec() },
            keeps_gre_key: false,
            udp_checksum: false,
            merges_ecn: false,
        })
    }

    fn table(
        &self,
        offers: &[ItemProbe],
        destinations: &[(DestinationKind, T::Destination)],
    ) -> Option<TableCapabilities> {
        let levels = self.priorities();
        if levels == 0 {
            return None;
        }
        let (set, dec_ttl, commands) = self.writing();
        let counted = FlowCounter::new(self.mlx5).is_ok();
        let destinations = destinations
            .iter()
            .filter(|(_, destination)| self.nothing(0, destination.clone()))
            .map(|(kind, _)| *kind)
            .collect();
        Some(TableCapabilities {
            levels,
            rules: None,
            counters: if counted { COUNTERS } else { 0 },
            counting: None,
            items: self.items(offers),
            can_match_integrity: self.can_match_integrity(),
            excluded_patterns: EXCLUDED_PATTERNS.iter().filter_map(|pattern| pattern.parse().ok()).collect(),
            actions: ActionCapabilities {
                // One header modification and one reformat (Linux: drivers/infiniband/hw/mlx5/fs.c).
                max_actions: 2,
                commands,
                set: FieldNames(set),
                stale_checksums: UNFIXED_CHECKSUMS.iter().filter_map(|pattern| pattern.parse().ok()).collect(),
                dec_ttl,
                destinations,
                ..ActionCapabilities::default()
            },
        })
    }
}

/// Returns encapsulation headers of this length.
fn sample(kind: ReformatKind, length: usize) -> Option<wirepath_flow::Reformat> {
    let bytes: Vec<u8> = match kind {
        ReformatKind::L2TunnelToL2 => Vec::new(),
        ReformatKind::L3TunnelToL2 => {
            let mut link = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
            if length == 18 {
                link.extend([0x81, 0, 0, 1]);
            }
            link.extend([0x08, 0x00]);
            link
        }
        ReformatKind::L2ToL2Tunnel | ReformatKind::L2ToL3Tunnel => return geneve(kind, length),
    };
    wirepath_flow::Reformat::new(kind, &bytes).ok()
}

/// Returns a GENEVE header with as many options as the length needs.
fn geneve(kind: ReformatKind, length: usize) -> Option<wirepath_flow::Reformat> {
    let options = length.checked_sub(14 + 20 + 8 + 8)? / 4 * 4;
    let protocol: [u8; 2] = if kind == ReformatKind::L2ToL2Tunnel { [0x65, 0x58] } else { [0x08, 0x00] };
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00];
    bytes.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0xc0, 0, (wirepath_flow::GENEVE_PORT >> 8) as u8, wirepath_flow::GENEVE_PORT as u8, 0, 0, 0, 0]);
    bytes.extend([(options / 4) as u8, 0, protocol[0], protocol[1], 0, 0, 1, 0]);
    // Options of experimental class 0xffff: four bytes each, without data.
    (0..options / 4).for_each(|_| bytes.extend([0xff, 0xff, 0, 0]));
    wirepath_flow::Reformat::new(kind, &bytes).ok()
}

/// Returns the mlx5dv rule capabilities of a port called `device`. `None` without any table. `flows`: the
/// device supports `ibv_create_flow`.
pub(in super::super) fn capabilities(mlx5: &Mlx5, flows: bool, driver: &str, device: &str) -> Option<RuleCapabilities> {
    use TunnelName::{Geneve, Gre, Ip, Vxlan, VxlanGpe};
    let limits = mlx5.rule_limits().ok();
    let max_commands = limits.map(|limits| limits.ingress_modifications);
    let received = TableProbe::<Ingress> { mlx5, drop: IngressDestination::Drop, max_commands };
    // Delivery to queues needs no test, because the port itself uses it.
    let destinations =
        [(DestinationKind::Drop, IngressDestination::Drop), (DestinationKind::Kernel, IngressDestination::DefaultMiss)];
    let mut ingress = received.table(ITEM_PROBES, &destinations);
    if let Some(table) = &mut ingress {
        table.actions.destinations.splice(0..0, [DestinationKind::Next, DestinationKind::Queue]);
        let has = |kind| table.items.iter().any(|item| item.kind == kind && !item.inner);
        let known = |tunnels: &[(TunnelName, ItemKind)]| -> Vec<TunnelName> {
            tunnels.iter().filter(|(_, kind)| has(*kind)).map(|(tunnel, _)| *tunnel).collect()
        };
        let (vxlan, gpe) = ((Vxlan, ItemKind::Vxlan), (VxlanGpe, ItemKind::VxlanGpe));
        let (geneve, gre) = ((Geneve, ItemKind::Geneve), (Gre, ItemKind::Gre));
        let link = known(&[vxlan, gpe, geneve, gre]);
        let packet = known(&[gpe, geneve, gre, (Ip, ItemKind::Ipv4)]);
        table.actions.reformats.extend(received.reformat(ReformatKind::L2TunnelToL2, &[0], &link));
        table.actions.reformats.extend(received.reformat(ReformatKind::L3TunnelToL2, &[18, 14], &packet));
    }
    let max_commands = limits.map(|limits| limits.egress_modifications);
    let sent = TableProbe::<Egress> { mlx5, drop: EgressDestination::Drop, max_commands };
    let offers = [ITEM_PROBES, &[METADATA]].concat();
    let mut egress = sent.table(
        &offers,
        &[(DestinationKind::Next, EgressDestination::Send), (DestinationKind::Drop, EgressDestination::Drop)],
    );
    if let Some(table) = &mut egress {
        let kinds = [
            (ReformatKind::L2ToL2Tunnel, &[Vxlan, VxlanGpe, Geneve, Gre][..]),
            (ReformatKind::L2ToL3Tunnel, &[VxlanGpe, Geneve, Gre, Ip][..]),
        ];
        // The shortest header shows whether the device supports the kind; its limit is known.
        let max_header = limits.map(|limits| limits.encap_header.min(HEADERS[0] as u16)).filter(|limit| *limit > 0);
        let lengths = if max_header.is_some() { &HEADERS[HEADERS.len() - 1..] } else { &HEADERS[..] };
        let reformats = kinds.into_iter().filter_map(|(kind, tunnels)| {
            let mut reformat = sent.reformat(kind, lengths, tunnels)?;
            reformat.max_header = max_header.unwrap_or(reformat.max_header);
            Some(reformat)
        });
        table.actions.reformats.extend(reformats);
    }
    let mut caps = RuleCapabilities::none(driver, device, RuleBackend::Dv);
    if ingress.as_ref().or(egress.as_ref())?.counters == 0 {
        // The header declares an action for counters of ibv_create_counters, but no version of libmlx5
        // accepts it (`mlx5dv_create_flow`).
        let mut note =
            "the kernel does not permit firmware objects (DevX), which libmlx5 needs for counters of mlx5dv rules: "
                .to_owned();
        if let Some(table) = ingress.as_mut().filter(|_| flows) {
            table.counting = ibv::counting_capabilities(mlx5.context());
        }
        note += match ingress.as_ref().is_some_and(|table| table.counting.is_some()) {
            true => "drop rules count if ibv_create_flow supports their match",
            false => "the device has no counters",
        };
        caps.notes.push(note);
    }
    caps.notes.push(
        "packets that are truncated inside tunnel headers, label stacks or inner headers are validated less \
         strictly than in software and may match rules"
            .to_owned(),
    );
    if let Some(table) = &ingress {
        if !table.items.iter().any(|item| item.kind == ItemKind::Vxlan) {
            caps.notes.push(
                "no VXLAN: the device cannot compare the flag for a valid VNI (words of tunnel headers, misc5)"
                    .to_owned(),
            );
        }
        if !table.can_match_integrity {
            caps.notes.push("the device cannot match on valid headers and checksums".to_owned());
        }
    }
    caps.tag_bits = if ingress.is_some() { crate::port::hardware::TAG_BITS } else { 0 };
    (caps.ingress, caps.egress) = (ingress, egress);
    Some(caps)
}
