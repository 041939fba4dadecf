//! What the tables of a device can do.
//!
//! There is no query for most of it: as other drivers do, each thing is tried once, with a rule that no frame can fit (its source is the
//! broadcast address), and what was refused is left out.

use wirepath_nic_defs::mlx5::header;
use wirepath_verbs::mlx5::{
    Actions, Egress, EgressFate, FlowCounter, Ingress, IngressFate, MatchParameters, Matcher, Mlx5, ModifyHeader,
    SteeringRule,
};

use super::{Side, commands, compare};
use crate::drivers::direct::rules::ibv;
use crate::flow::{self, Field, FieldSet, ItemKind, ReformatKind, Rule};
use crate::port::hardware::{
    ActionCapabilities, FateKind, FieldNames, ItemCapability, Masks, ReformatCapability, RuleBackend, RuleCapabilities,
    TableCapabilities, TunnelName,
};

/// Priorities that kernels know: 16 since Linux 5.7, 8 before.
const PRIORITIES: [u16; 2] = [16, 8];
/// Header modifications that are tried, the most first.
const COMMANDS: [u16; 6] = [32, 16, 8, 4, 2, 1];
/// Lengths of headers to put on that are tried; no ConnectX is known to take more than the first.
const HEADERS: [usize; 4] = [128, 96, 64, 50];
/// Counters of a device are not told; there are many (`max_flow_counters` of ConnectX-5: 2^24).
const COUNTERS: u32 = 1 << 24;

/// An item, how its fields can be compared, what it needs, and a pattern that shows whether the device can do it.
pub(super) type Offer = (ItemKind, bool, u8, &'static [(Field, Masks)], &'static str, &'static str);

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
    (Field::Ipv6Ext, Masks::Within(crate::flow::ext::FRAGMENT)),
    (Field::Ipv6Frag, Masks::Within(1)),
];
/// Without what extension headers make different for a device: only outside are such packets aside.
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
const NOT_A_FRAGMENT: &str = "inner ipv4 frag no";

/// What is not there: ARP, of which a device sees the EtherType only and would take every format for that of IPv4 (`eth type 0x0806` says
/// what it sees); type and code of ICMPv6, as it is not known what a device makes of messages of less than 8 bytes. VLAN tags are neither
/// put on nor taken off: without firmware objects the kernel knows ESP, header modification, decapsulation and reformat as actions of rules
/// (Linux `drivers/infiniband/hw/mlx5/fs.c`, `parse_flow_flow_action`), and none of the four kinds of reformat is about tags.
#[rustfmt::skip]
pub(super) const OFFERS: &[Offer] = &[
    (ItemKind::Eth, false, 1, ETH, "", "eth dst 02:00:00:00:00:01 type 0x88b5 tags none"),
    (ItemKind::Vlan, false, 2, VLAN, "", "vlan vid 1 pcp 1 dei 1 tpid 0x8100 / vlan vid 1 pcp 1 dei 1 tpid 0x8100"),
    (ItemKind::Mpls, false, 1, &[(Field::MplsLabel, ANY), (Field::MplsTc, ANY), (Field::MplsBos, ANY), (Field::MplsTtl, ANY)], "",
        "eth type 0x8847 / mpls label 1 tc 1 bos 1 ttl 1"),
    (ItemKind::Ipv4, false, 1, IPV4, "", "ipv4 src 10.0.0.1 dst 10.0.0.1 proto 1 dscp 1 ecn 1 ttl 1 ihl 5 frag no"),
    (ItemKind::Ipv6, false, 1, IPV6, "", "ipv6 src fd00::1 dst fd00::1 proto 1 dscp 1 ecn 1 flow 1 hops 1 frag no"),
    (ItemKind::Tcp, false, 1, TCP, "", "ipv4 / tcp src 1 dst 1 seq 1 ack 1 flags syn"),
    (ItemKind::Udp, false, 1, UDP, "", "ipv4 / udp src 1 dst 1"),
    (ItemKind::Icmp, false, 1, &[(Field::IcmpType, ANY), (Field::IcmpCode, ANY), (Field::IcmpId, ANY), (Field::IcmpSeq, ANY)], "",
        "icmp type 1 code 1 id 1 seq 1"),
    (ItemKind::Icmpv6, false, 1, &[], "", "ipv6 / icmpv6"),
    (ItemKind::Esp, false, 1, &[(Field::EspSpi, ANY)], "", "ipv4 / esp spi 1"),
    (ItemKind::Gre, false, 1, &[(Field::GreFlags, Masks::Within(0xb000)), (Field::GreProto, ANY), (Field::GreKey, ANY)], "",
        "ipv4 / gre proto 0x6558 key 1"),
    (ItemKind::Vxlan, false, 1, &[(Field::VxlanFlags, ANY), (Field::VxlanVni, ANY)], "udp dst 4789", "ipv4 / udp dst 4789 / vxlan vni 1"),
    (ItemKind::VxlanGpe, false, 1, &[(Field::GpeFlags, ANY), (Field::GpeNext, ANY), (Field::GpeVni, ANY)], "udp dst 4790",
        "ipv4 / udp dst 4790 / vxlan-gpe flags 1 next 1 vni 1"),
    (ItemKind::Geneve, false, 1, &[(Field::GeneveVni, ANY), (Field::GeneveProto, ANY), (Field::GeneveOptLen, ANY), (Field::GeneveOam, ANY)],
        "udp dst 6081", "ipv4 / udp dst 6081 / geneve vni 1 proto 0x6558 optlen 1 oam 1"),
    (ItemKind::Eth, true, 1, ETH, "", "ipv4 / udp dst 4789 / vxlan / eth dst 02:00:00:00:00:01 type 0x88b5 tags none"),
    (ItemKind::Vlan, true, 2, VLAN, "", "ipv4 / udp dst 4789 / vxlan / vlan vid 1 tpid 0x8100 / vlan vid 1 tpid 0x8100"),
    (ItemKind::Ipv4, true, 1, IPV4, "", "ipv4 / udp dst 4789 / vxlan / ipv4 src 10.0.0.1 dscp 1 ecn 1 ttl 1 proto 1 frag no"),
    (ItemKind::Ipv6, true, 1, INNER_IPV6, "", "ipv4 / udp dst 4789 / vxlan / ipv6 src fd00::1 flow 1 hops 1"),
    (ItemKind::Tcp, true, 1, TCP, NOT_A_FRAGMENT, "ipv4 / udp dst 4789 / vxlan / ipv4 frag no / tcp dst 1 seq 1 flags syn"),
    (ItemKind::Udp, true, 1, UDP, NOT_A_FRAGMENT, "ipv4 / udp dst 4789 / vxlan / ipv4 frag no / udp dst 1"),
];

/// The transmit metadata, as a rule at egress sees it.
const METADATA: Offer = (ItemKind::Meta, false, 1, &[(Field::MetaData, ANY)], "", "meta data 1");

/// Fragments are known as such only: what is in the first of them is not looked at. Nor is what an authentication header is in front of.
pub(super) const ASIDE: [&str; 3] = ["ipv4 frag yes", "ipv6 ext fragment", "ipv6 ext ah"];

/// A device knows the checksums of TCP and UDP, in packets that are whole. DCCP, ICMPv6 and UDP-Lite cover the addresses too; behind a
/// routing header or the home address of destination options, checksums cover another address than the one that is written.
pub(super) const UNMENDED: [&str; 9] = [
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

/// A table being tried.
struct Trial<'a, T: Side> {
    mlx5: &'a Mlx5,
    /// The fate of packets that never come.
    drop: T::Fate,
}

fn fields(pattern: &str) -> Option<FieldSet> {
    format!("egress: {pattern} => count").parse::<Rule>().ok().map(|rule| rule.fields())
}

impl<T: Side> Trial<'_, T> {
    /// Whether a rule can be that compares this at a priority, and ends so.
    fn takes(&self, mask: &MatchParameters, value: &MatchParameters, priority: u16, actions: &Actions<T>) -> bool {
        let (mut mask, mut value) = (mask.clone(), value.clone());
        let broadcast = (1 << 48) - 1;
        mask.set(header::SRC_MAC, broadcast);
        value.set(header::SRC_MAC, broadcast);
        let matcher = Matcher::new(self.mlx5, priority, &mask);
        matcher.and_then(|matcher| SteeringRule::new(&matcher, &value, actions)).is_ok()
    }

    fn nothing(&self, priority: u16, fate: T::Fate) -> bool {
        let all = MatchParameters::default();
        self.takes(&all, &all, priority, &Actions::only(fate))
    }

    fn priorities(&self) -> u16 {
        PRIORITIES.into_iter().find(|number| self.nothing(number - 1, self.drop.clone())).unwrap_or(0)
    }

    fn item(&self, offer: &Offer) -> Option<ItemCapability> {
        let &(kind, inner, most, comparable, implies, sample) = offer;
        let (mask, value) = compare::parameters(&fields(sample)?).ok()?;
        if !self.takes(&mask, &value, 0, &Actions::only(self.drop.clone())) {
            return None;
        }
        let mut item =
            comparable.iter().fold(ItemCapability::new(kind), |item, &(field, masks)| item.with(field, masks));
        (item.inner, item.most) = (inner, most);
        item.implies = implies.parse().ok()?;
        Some(item)
    }

    /// Whether the device tells headers that are in order from others.
    fn tells_order(&self) -> bool {
        let Some((mut mask, mut value)) = fields("ipv4 / udp").and_then(|set| compare::parameters(&set).ok()) else {
            return false;
        };
        compare::demand_order(&mut mask, &mut value);
        self.takes(&mask, &value, 0, &Actions::only(self.drop.clone()))
    }

    /// Fields that can be written, whether hops can be counted, and how many commands there can be.
    fn writing(&self) -> (Vec<Field>, bool, u16) {
        let can = |commands: &[_]| ModifyHeader::<T>::new(self.mlx5, commands).is_ok();
        let set = |field: Field| commands::set(field, 0).is_some_and(|all| can(&all.collect::<Vec<_>>()));
        let writable = commands::WRITABLE.iter().map(|(field, _)| *field).filter(|field| set(*field)).collect();
        let hops = can(&[commands::hop(false)]) && can(&[commands::hop(true)]);
        let most = COMMANDS.into_iter().find(|most| can(&vec![commands::hop(false); usize::from(*most)]));
        (writable, hops, most.unwrap_or(0))
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

    fn table(&self, offers: &[Offer], fates: &[(FateKind, T::Fate)]) -> Option<TableCapabilities> {
        let levels = self.priorities();
        if levels == 0 {
            return None;
        }
        let (set, dec_ttl, commands) = self.writing();
        let counted = FlowCounter::new(self.mlx5).is_ok();
        let fates = fates.iter().filter(|(_, fate)| self.nothing(0, fate.clone())).map(|(kind, _)| *kind).collect();
        Some(TableCapabilities {
            levels,
            rules: None,
            counters: if counted { COUNTERS } else { 0 },
            counting: None,
            items: offers.iter().filter_map(|offer| self.item(offer)).collect(),
            tells_order: self.tells_order(),
            aside: ASIDE.iter().filter_map(|pattern| pattern.parse().ok()).collect(),
            actions: ActionCapabilities {
                // One header modification, one reformat (Linux: drivers/infiniband/hw/mlx5/fs.c).
                most: 2,
                commands,
                set: FieldNames(set),
                unmended: UNMENDED.iter().filter_map(|pattern| pattern.parse().ok()).collect(),
                dec_ttl,
                fates,
                ..ActionCapabilities::default()
            },
        })
    }
}

/// Headers of this length to put on: Ethernet, IPv4 or IPv6, UDP and what looks like VXLAN, and then options.
fn sample(kind: ReformatKind, length: usize) -> Option<flow::Reformat> {
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
    flow::Reformat::new(kind, &bytes).ok()
}

/// A GENEVE header with as many options as make it so long.
fn geneve(kind: ReformatKind, length: usize) -> Option<flow::Reformat> {
    let options = length.checked_sub(14 + 20 + 8 + 8)? / 4 * 4;
    let protocol: [u8; 2] = if kind == ReformatKind::L2ToL2Tunnel { [0x65, 0x58] } else { [0x08, 0x00] };
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00];
    bytes.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0xc0, 0, (flow::GENEVE_PORT >> 8) as u8, flow::GENEVE_PORT as u8, 0, 0, 0, 0]);
    bytes.extend([(options / 4) as u8, 0, protocol[0], protocol[1], 0, 0, 1, 0]);
    // Options of class 0xffff, for experiments, four bytes and no data each.
    (0..options / 4).for_each(|_| bytes.extend([0xff, 0xff, 0, 0]));
    flow::Reformat::new(kind, &bytes).ok()
}

/// What the device of a port called `device` can do by mlx5dv; `None` without a single table. `flows`: it has `ibv_create_flow`.
pub(in super::super) fn capabilities(mlx5: &Mlx5, flows: bool, driver: &str, device: &str) -> Option<RuleCapabilities> {
    use TunnelName::{Geneve, Gre, Ip, Vxlan, VxlanGpe};
    let received = Trial::<Ingress> { mlx5, drop: IngressFate::Drop };
    // Delivery is what a port does anyhow.
    let fates = [(FateKind::Drop, IngressFate::Drop), (FateKind::Kernel, IngressFate::DefaultMiss)];
    let mut ingress = received.table(OFFERS, &fates);
    if let Some(table) = &mut ingress {
        table.actions.fates.splice(0..0, [FateKind::Next, FateKind::Queue]);
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
    let sent = Trial::<Egress> { mlx5, drop: EgressFate::Drop };
    let offers = [OFFERS, &[METADATA]].concat();
    let mut egress = sent.table(&offers, &[(FateKind::Next, EgressFate::Send), (FateKind::Drop, EgressFate::Drop)]);
    if let Some(table) = &mut egress {
        let kinds = [
            (ReformatKind::L2ToL2Tunnel, &[Vxlan, VxlanGpe, Geneve, Gre][..]),
            (ReformatKind::L2ToL3Tunnel, &[VxlanGpe, Geneve, Gre, Ip][..]),
        ];
        let reformats = kinds.into_iter().filter_map(|(kind, tunnels)| sent.reformat(kind, &HEADERS, tunnels));
        table.actions.reformats.extend(reformats);
    }
    let mut can = RuleCapabilities::none(driver, device, RuleBackend::Dv);
    if ingress.as_ref().or(egress.as_ref())?.counters == 0 {
        // The header has an action for counters of ibv_create_counters; no version of libmlx5 takes it (`mlx5dv_create_flow`).
        let mut note = "the kernel lets the program make no firmware objects (DevX), and libmlx5 takes no other counters for rules of mlx5dv: "
            .to_owned();
        if let Some(table) = ingress.as_mut().filter(|_| flows) {
            table.counting = ibv::counting(mlx5.context());
        }
        note += match ingress.as_ref().is_some_and(|table| table.counting.is_some()) {
            true => "what is dropped is counted as far as ibv_create_flow has words for it",
            false => "the device does not count",
        };
        can.notes.push(note);
    }
    can.notes.push(
        "what is cut off in a tunnel's header, label stacks or headers in tunnels is looked at less closely than in software: such packets fit rules too"
            .to_owned(),
    );
    if let Some(table) = &ingress {
        if !table.items.iter().any(|item| item.kind == ItemKind::Vxlan) {
            can.notes.push(
                "no VXLAN: the device does not compare the flags that say whether there is a VNI (words of tunnel headers, misc5)".to_owned(),
            );
        }
        if !table.tells_order {
            can.notes.push("the device does not tell headers that are in order from others".to_owned());
        }
    }
    can.tag_bits = if ingress.is_some() { crate::port::hardware::TAG_BITS } else { 0 };
    (can.ingress, can.egress) = (ingress, egress);
    Some(can)
}
