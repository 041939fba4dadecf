//! Flow rules by `ibv_create_flow`, for devices without direct steering verbs, or where these are disabled.
//!
//! The flow specs have no fields for fragments and tags. Of the other fields, mlx5 supports few: the offered
//! fields are those that its kernel driver accepts (Linux `drivers/infiniband/hw/mlx5/fs.c`). Only a
//! comparison with a port other than 0 implies a transport header, because a device parses no ports in
//! fragments.

use std::collections::BTreeMap;

use wirepath_verbs::flow::{CounterKind, Counters, Flow, FlowTarget, Spec};
use wirepath_verbs::{Context, FlowRule};

use super::match_fields::{self, FieldMatch, MatchTarget};
use super::{Backend, SteeringEntry, refused, unsupported};
use crate::drivers::nic::verbs::flow_specs::{self as specs, add};
use crate::port::hardware::{
    CountingCapabilities, DestinationKind, HardwareCount, HardwareRule, ItemCapability, Masks, RuleBackend,
    RuleCapabilities, RuleDestination, RuleRefusal, TAG_BITS, TableCapabilities,
};
use wirepath_flow::{Action, Direction, Field, FieldSet, HeaderType, ItemKind, KeyKind, MaskedValue, Rule};

/// Flow rules of an open device.
pub(crate) struct IbvBackend {
    context: Context,
    port: u8,
    /// True if rules of another backend, of higher priority, take all fragments.
    whole: bool,
}

/// An installed rule.
pub(crate) struct InstalledRule {
    // Dropped before the counters that the flows use.
    _flows: Vec<FlowRule>,
    counters: Option<Counters>,
}

impl IbvBackend {
    pub(crate) fn new(context: &Context, port: u8) -> Self {
        Self { context: context.clone(), port, whole: false }
    }

    /// Creates a backend beside another one of the same port, whose rules take fragments first.
    pub(crate) fn for_counting(context: &Context, port: u8) -> Self {
        Self { context: context.clone(), port, whole: true }
    }
}

/// Fields of an item with their supported masks.
type Fields = &'static [(Field, Masks)];

const ETH: Fields = &[(Field::EthDst, Masks::Any), (Field::EthSrc, Masks::Any), (Field::EthType, Masks::Exact)];
const IPV4: Fields = &[
    (Field::Ipv4Src, Masks::Any),
    (Field::Ipv4Dst, Masks::Any),
    (Field::Ipv4Proto, Masks::Exact),
    (Field::Ipv4Dscp, Masks::Any),
    (Field::Ipv4Ecn, Masks::Any),
    (Field::Ipv4Frag, Masks::Within(1)),
];
const IPV6: Fields = &[
    (Field::Ipv6Src, Masks::Any),
    (Field::Ipv6Dst, Masks::Any),
    (Field::Ipv6Dscp, Masks::Any),
    (Field::Ipv6Ecn, Masks::Any),
    (Field::Ipv6Flow, Masks::Any),
];
const TCP: Fields = &[(Field::TcpSrc, Masks::Any), (Field::TcpDst, Masks::Any)];
const UDP: Fields = &[(Field::UdpSrc, Masks::Any), (Field::UdpDst, Masks::Any)];

/// Number of rules that can count. No verb reports the real limit.
const COUNTERS: u32 = 1 << 16;

/// Returns the supported items. `whole`: the condition that a pattern with a transport header needs to
/// exclude fragments.
fn items(whole: &str) -> Vec<ItemCapability> {
    let item = |kind, fields: Fields, implies: &str| {
        let item = fields.iter().fold(ItemCapability::new(kind), |item, &(field, masks)| item.with(field, masks));
        ItemCapability { implies: implies.parse().unwrap_or_default(), ..item }
    };
    vec![
        item(ItemKind::Eth, ETH, ""),
        item(ItemKind::Ipv4, IPV4, ""),
        item(ItemKind::Ipv6, IPV6, ""),
        item(ItemKind::Tcp, TCP, whole),
        item(ItemKind::Udp, UDP, whole),
    ]
}

/// Returns the capabilities of counting rules [beside](IbvBackend::for_counting) a backend without counters.
/// `None` if the kernel has no such counters either.
pub(crate) fn counting_capabilities(context: &Context) -> Option<CountingCapabilities> {
    Counters::new(context, &COUNTED).ok()?;
    Some(CountingCapabilities { counters: COUNTERS, items: items(""), destinations: vec![DestinationKind::Drop] })
}

/// The counters of a rule, in this order.
const COUNTED: [CounterKind; 2] = [CounterKind::Packets, CounterKind::Bytes];

/// Returns the capabilities of `ibv_create_flow` for a port called `device`. The device is not queried: what
/// it does not support fails at installation.
pub(crate) fn capabilities(driver: &str, device: &str) -> RuleCapabilities {
    let items = items("ipv4 frag no");
    let mut ingress = TableCapabilities { levels: 1, counters: COUNTERS, items, ..TableCapabilities::default() };
    ingress.actions.destinations = vec![DestinationKind::Next, DestinationKind::Queue, DestinationKind::Drop];
    let mut caps = RuleCapabilities::none(driver, device, RuleBackend::Ibv);
    caps.tag_bits = TAG_BITS;
    caps.ingress = Some(ingress);
    caps.notes.push("no tunnels: ibv_create_flow cannot compare the flags of their headers".to_owned());
    caps.notes.push("no egress rules and no packet modification: ibv_create_flow does not support them".to_owned());
    caps
}

/// Returns true if the rule itself requires a transport header or excludes fragments: then no fragment may
/// match. Conditions that were added for RSS may match fragments as well, which then go to another queue.
fn excludes_fragments(rule: &HardwareRule) -> bool {
    let pattern = Rule::new(rule.direction, 0, rule.pattern.clone(), vec![Action::Count]);
    pattern.is_ok_and(|rule| {
        rule.fields().list().iter().any(|(key, bits)| match key.kind {
            KeyKind::HeaderType(fact) => fact == HeaderType::Transport && bits.value != 0,
            KeyKind::Field(field) => matches!(field, Field::Ipv4Frag | Field::Ipv6Frag),
        })
    })
}

/// Converts a complete field set into flow specs. `strict`: no fragment may match.
fn specs_for(set: &FieldSet, strict: bool) -> Result<Vec<Spec>, String> {
    let matches = match_fields::from_set(set)?;
    // Keyed by header stack and layer.
    let mut all: BTreeMap<(u8, u8), Spec> = BTreeMap::new();
    let known =
        |level: u8, field: Field| matches.iter().find(|d| d.level == level && d.target == MatchTarget::Field(field));
    let port = |level: u8| {
        [Field::TcpSrc, Field::TcpDst, Field::UdpSrc, Field::UdpDst].into_iter().any(|field| {
            known(level, field).is_some_and(|field_match| field_match.bits.value & field_match.bits.mask != 0)
        })
    };
    for field_match in &matches {
        let &FieldMatch { level, nth, target, bits } = field_match;
        let no = |what: String| Err(format!("comparing {what} by ibv_create_flow"));
        let kind = match target {
            MatchTarget::TunnelWord => return no("flags of tunnel headers".to_owned()),
            MatchTarget::IpVersion if bits.value == 4 => specs::IPV4_EXT,
            MatchTarget::IpVersion => specs::IPV6,
            // Ports never match in a fragment.
            MatchTarget::Fragment if bits.value == 0 && (port(level) || !strict) => continue,
            MatchTarget::Field(Field::GreFlags)
                if bits == (MaskedValue { value: 0x2000, mask: 0x2000 })
                    && known(level, Field::GreKey).is_some_and(|key| key.bits.value & key.bits.mask != 0) =>
            {
                continue;
            }
            MatchTarget::Field(field) if nth == 0 => match field.spec().item {
                ItemKind::Eth if field != Field::EthTags => specs::ETH,
                ItemKind::Ipv4 => specs::IPV4_EXT,
                ItemKind::Ipv6 => specs::IPV6,
                ItemKind::Tcp => specs::TCP,
                ItemKind::Udp => specs::UDP,
                ItemKind::Gre => specs::GRE,
                item => return no(item.spec().name.to_owned()),
            },
            _ => return no("fragments, tags and labels".to_owned()),
        };
        let layer = match kind {
            specs::ETH => 0,
            specs::IPV4_EXT | specs::IPV6 => 1,
            specs::TCP | specs::UDP | specs::GRE => 2,
            _ => 3,
        };
        let empty = Spec::empty(kind, level > 0).filter(|_| layer < 2 || level == 0 || kind != specs::GRE);
        let Some(empty) = empty else { return no("such inner headers".to_owned()) };
        let spec = all.entry((level, layer)).or_insert(empty);
        if let MatchTarget::Field(field) = target {
            // The device skips extension headers.
            let added = match field {
                Field::Ipv6Proto => spec.add_match("next_hdr", bits.value, bits.mask),
                field => add(spec, field, bits),
            };
            if !added {
                return no(format!("{} {}", field.spec().item.spec().name, field.name()));
            }
        }
    }
    Ok(all.into_values().collect())
}

/// Returns true if the kernel puts the rule behind all others, whatever its priority
/// (`flow_is_multicast_only`: by the first spec).
fn is_multicast(specs: &[Spec]) -> bool {
    match specs.first() {
        Some(Spec::Eth { value, mask, .. }) => value.dst_mac[0] & mask.dst_mac[0] & 1 != 0,
        Some(Spec::Ipv4 { value, mask, .. }) => (value.dst_ip & mask.dst_ip) >> 28 == 0xe,
        Some(Spec::Ipv4Ext { value, mask, .. }) => (value.dst_ip & mask.dst_ip) >> 28 == 0xe,
        _ => false,
    }
}

impl Backend for IbvBackend {
    type InstalledRule = InstalledRule;

    fn can_match(&self, rule: &HardwareRule, fields: &FieldSet) -> Result<(), String> {
        specs_for(fields, !self.whole && excludes_fragments(rule)).map(drop)
    }

    fn install(&mut self, rule: &HardwareRule, entries: &[SteeringEntry]) -> Result<InstalledRule, RuleRefusal> {
        if rule.require_integrity
            || rule.direction == Direction::Egress
            || !rule.actions.is_empty()
            || rule.destination == RuleDestination::Kernel
        {
            return Err(unsupported("such a rule by ibv_create_flow"));
        }
        let counters = match rule.count {
            true => Some(Counters::new(&self.context, &COUNTED).map_err(|error| refused(&error))?),
            false => None,
        };
        let strict = !self.whole && excludes_fragments(rule);
        let mut flows = Vec::new();
        for entry in entries {
            let specs = specs_for(&entry.fields, strict).map_err(unsupported)?;
            if is_multicast(&specs) {
                return Err(unsupported(
                    "rules that match only multicast addresses: the kernel puts them behind all others",
                ));
            }
            let Some(target) = entry.target.clone() else { return Err(unsupported("a rule without a queue pair")) };
            let mut flow = specs.into_iter().fold(Flow::normal(self.port, entry.priority), Flow::with);
            if let Some(counters) = &counters {
                flow = flow.count(counters);
            }
            if let Some(tag) = rule.tag {
                flow = flow.with(Spec::Tag(tag));
            }
            if rule.destination == RuleDestination::Drop {
                flow = flow.with(Spec::Drop);
            }
            flows.push(FlowRule::new(target, &flow).map_err(|error| refused(&error))?);
        }
        Ok(InstalledRule { _flows: flows, counters })
    }

    fn count(&mut self, installed: &InstalledRule) -> Option<HardwareCount> {
        match installed.counters.as_ref()?.read().ok()?[..] {
            [packets, bytes] => Some(HardwareCount { packets, bytes }),
            _ => None,
        }
    }
}

/// Returns the number of priorities that the device offers: 16 since Linux 5.7, 8 before. Determined by
/// installing rules that no frame matches.
pub(crate) fn priorities(target: &FlowTarget, port: u8) -> u16 {
    let broadcast = specs::EthFilter { src_mac: [0xff; 6], ..specs::EthFilter::default() };
    let no_frame = broadcast.with_mask(broadcast);
    let works = |number: &u16| {
        let flow = Flow::normal(port, number - 1).with(no_frame).with(Spec::Drop);
        FlowRule::new(target.clone(), &flow).is_ok()
    };
    [16, 8].into_iter().find(works).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(pattern: &str) -> Result<Vec<u32>, String> {
        let rule: Rule = format!("ingress: {pattern} => count").parse().unwrap();
        specs_for(&rule.fields(), true).map(|specs| specs.iter().map(Spec::kind).collect())
    }

    #[test]
    fn field_sets_become_specs() {
        let (eth, ipv4, udp) = (specs::ETH, specs::IPV4_EXT, specs::UDP);
        assert_eq!(kinds("eth dst 02:00:00:00:00:01"), Ok(vec![eth]));
        assert_eq!(kinds("ipv4 dst 10.0.0.0/8"), Ok(vec![eth, ipv4]), "labels are excluded by the EtherType");
        assert_eq!(kinds("ipv4 / udp dst 53"), Ok(vec![eth, ipv4, udp]));
        for (pattern, why) in [
            ("vlan vid 1 tpid 0x8100", "vlan"),
            ("ipv4 / udp", "fragments"),
            ("ipv4 frag yes", "fragments"),
            ("ipv4 / udp dst 4789 / vxlan vni 7", "flags of tunnel headers"),
            ("ipv4 id 5", "ipv4 id"),
            ("ipv4 / tcp flags syn dst 1", "tcp flags"),
        ] {
            let error = kinds(pattern).unwrap_err();
            assert!(error.contains(why), "{pattern}: {error}");
        }
    }
}
