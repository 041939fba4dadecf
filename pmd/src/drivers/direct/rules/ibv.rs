//! Rules by plain `ibv_create_flow`: for devices without direct steering verbs, and for those whose are not to be used.
//!
//! The specs have no words for fragments and tags, and mlx5 takes few of the fields that they do have: what is offered is what its kernel
//! driver takes (Linux `drivers/infiniband/hw/mlx5/fs.c`). A transport header is looked for where a port that is not 0 is compared: a
//! device finds no ports in a fragment.

use std::collections::BTreeMap;

use wirepath_verbs::flow::{Counted, Counters, Flow, FlowTarget, Spec};
use wirepath_verbs::{Context, FlowRule};

use super::demand::{self, Demand, Want};
use super::{Backend, Place, refused, unsupported};
use crate::flow::verbs::{self as specs, add};
use crate::flow::{Action, Bits, Direction, Fact, Field, FieldSet, ItemKind, Rule, What};
use crate::port::hardware::{
    CountingCapabilities, FateKind, HardwareCount, HardwareRule, ItemCapability, Masks, RuleBackend, RuleCapabilities,
    RuleFate, RuleRefusal, TAG_BITS, TableCapabilities,
};

/// Rules of an open device.
pub(crate) struct Ibv {
    context: Context,
    port: u8,
    /// Rules of another way, above all of these, take the fragments.
    whole: bool,
}

/// A rule in the device.
pub(crate) struct Live {
    // Before what they count in.
    _flows: Vec<FlowRule>,
    counters: Option<Counters>,
}

impl Ibv {
    pub(crate) fn new(context: &Context, port: u8) -> Self {
        Self { context: context.clone(), port, whole: false }
    }

    /// Beside another way of the same port, which takes fragments before they come to these rules.
    pub(crate) fn beside(context: &Context, port: u8) -> Self {
        Self { context: context.clone(), port, whole: true }
    }
}

/// Fields of an item, and under which masks.
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

/// Rules that count; nothing tells how many a device has.
const COUNTERS: u32 = 1 << 16;

/// What can be compared; `whole`: what a pattern with a transport header must demand for fragments to stay away.
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

/// What rules that count can do [beside](Ibv::beside) another way that has no counters; `None`: the kernel makes none here either.
pub(crate) fn counting(context: &Context) -> Option<CountingCapabilities> {
    Counters::new(context, &COUNTED).ok()?;
    Some(CountingCapabilities { counters: COUNTERS, items: items(""), fates: vec![FateKind::Drop] })
}

/// What is counted, in this order.
const COUNTED: [Counted; 2] = [Counted::Packets, Counted::Bytes];

/// What `ibv_create_flow` can do on the device of a port called `device`. Nothing is asked of the device: what it refuses is refused when
/// it is installed.
pub(crate) fn capabilities(driver: &str, device: &str) -> RuleCapabilities {
    let items = items("ipv4 frag no");
    let mut ingress = TableCapabilities { levels: 1, counters: COUNTERS, items, ..TableCapabilities::default() };
    ingress.actions.fates = vec![FateKind::Next, FateKind::Queue, FateKind::Drop];
    let mut can = RuleCapabilities::none(driver, device, RuleBackend::Ibv);
    can.tag_bits = TAG_BITS;
    can.ingress = Some(ingress);
    can.notes.push("no tunnels: ibv_create_flow does not compare the flags of their headers".to_owned());
    can.notes.push("no rules for what is sent, and none that change packets: ibv_create_flow has none".to_owned());
    can
}

/// Whether a rule itself wants a transport header, or a packet that is no fragment: then a fragment must not fit. What was added to it to
/// spread its packets may be fitted by fragments as well: they go to another queue.
fn tells_fragments(rule: &HardwareRule) -> bool {
    let pattern = Rule::new(rule.direction, 0, rule.pattern.clone(), vec![Action::Count]);
    pattern.is_ok_and(|rule| {
        rule.fields().list().iter().any(|(key, bits)| match key.what {
            What::Fact(fact) => fact == Fact::Transport && bits.value != 0,
            What::Field(field) => matches!(field, Field::Ipv4Frag | Field::Ipv6Frag),
        })
    })
}

/// The specs that a closed list becomes; `strict`: no fragment may fit.
fn of(set: &FieldSet, strict: bool) -> Result<Vec<Spec>, String> {
    let demands = demand::of(set)?;
    // By stack and layer.
    let mut all: BTreeMap<(u8, u8), Spec> = BTreeMap::new();
    let known = |level: u8, field: Field| demands.iter().find(|d| d.level == level && d.want == Want::Field(field));
    let port = |level: u8| {
        [Field::TcpSrc, Field::TcpDst, Field::UdpSrc, Field::UdpDst]
            .into_iter()
            .any(|field| known(level, field).is_some_and(|demand| demand.bits.value & demand.bits.mask != 0))
    };
    for demand in &demands {
        let &Demand { level, nth, want, bits } = demand;
        let no = |what: String| Err(format!("comparing {what} by ibv_create_flow"));
        let kind = match want {
            Want::TunnelWord => return no("flags of tunnel headers".to_owned()),
            Want::IpVersion if bits.value == 4 => specs::IPV4_EXT,
            Want::IpVersion => specs::IPV6,
            // No ports are found in a fragment.
            Want::Fragment if bits.value == 0 && (port(level) || !strict) => continue,
            Want::Field(Field::GreFlags)
                if bits == (Bits { value: 0x2000, mask: 0x2000 })
                    && known(level, Field::GreKey).is_some_and(|key| key.bits.value & key.bits.mask != 0) =>
            {
                continue;
            }
            Want::Field(field) if nth == 0 => match field.spec().item {
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
        let Some(empty) = empty else { return no("that in a tunnel".to_owned()) };
        let spec = all.entry((level, layer)).or_insert(empty);
        if let Want::Field(field) = want {
            // The device looks behind extension headers.
            let added = match field {
                Field::Ipv6Proto => spec.compare("next_hdr", bits.value, bits.mask),
                field => add(spec, field, bits),
            };
            if !added {
                return no(format!("{} {}", field.spec().item.spec().name, field.name()));
            }
        }
    }
    Ok(all.into_values().collect())
}

/// Whether the kernel puts a rule behind all others, whatever its priority (`flow_is_multicast_only`: by the first spec).
fn is_of_groups(specs: &[Spec]) -> bool {
    match specs.first() {
        Some(Spec::Eth { value, mask, .. }) => value.dst_mac[0] & mask.dst_mac[0] & 1 != 0,
        Some(Spec::Ipv4 { value, mask, .. }) => (value.dst_ip & mask.dst_ip) >> 28 == 0xe,
        Some(Spec::Ipv4Ext { value, mask, .. }) => (value.dst_ip & mask.dst_ip) >> 28 == 0xe,
        _ => false,
    }
}

impl Backend for Ibv {
    type Live = Live;

    fn tells(&self, rule: &HardwareRule, fields: &FieldSet) -> Result<(), String> {
        of(fields, !self.whole && tells_fragments(rule)).map(drop)
    }

    fn install(&mut self, rule: &HardwareRule, places: &[Place]) -> Result<Live, RuleRefusal> {
        if rule.in_order
            || rule.direction == Direction::Egress
            || !rule.actions.is_empty()
            || rule.fate == RuleFate::Kernel
        {
            return Err(unsupported("that by ibv_create_flow"));
        }
        let counters = match rule.count {
            true => Some(Counters::new(&self.context, &COUNTED).map_err(|error| refused(&error))?),
            false => None,
        };
        let strict = !self.whole && tells_fragments(rule);
        let mut flows = Vec::new();
        for place in places {
            let specs = of(&place.fields, strict).map_err(unsupported)?;
            if is_of_groups(&specs) {
                return Err(unsupported("rules of group addresses alone: the kernel puts them behind all others"));
            }
            let Some(target) = place.target.clone() else { return Err(unsupported("a rule without a queue pair")) };
            let mut flow = specs.into_iter().fold(Flow::normal(self.port, place.priority), Flow::with);
            if let Some(counters) = &counters {
                flow = flow.count(counters);
            }
            if let Some(tag) = rule.tag {
                flow = flow.with(Spec::Tag(tag));
            }
            if rule.fate == RuleFate::Drop {
                flow = flow.with(Spec::Drop);
            }
            flows.push(FlowRule::new(target, &flow).map_err(|error| refused(&error))?);
        }
        Ok(Live { _flows: flows, counters })
    }

    fn count(&mut self, live: &Live) -> Option<HardwareCount> {
        match live.counters.as_ref()?.read().ok()?[..] {
            [packets, bytes] => Some(HardwareCount { packets, bytes }),
            _ => None,
        }
    }
}

/// How many priorities the device has for programs: 16 since Linux 5.7, 8 before; found out with rules that no frame fits.
pub(crate) fn priorities(target: &FlowTarget, port: u8) -> u16 {
    let broadcast = specs::EthFilter { src_mac: [0xff; 6], ..specs::EthFilter::default() };
    let nobody = broadcast.under(broadcast);
    let works = |number: &u16| {
        let flow = Flow::normal(port, number - 1).with(nobody).with(Spec::Drop);
        FlowRule::new(target.clone(), &flow).is_ok()
    };
    [16, 8].into_iter().find(works).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(pattern: &str) -> Result<Vec<u32>, String> {
        let rule: Rule = format!("ingress: {pattern} => count").parse().unwrap();
        of(&rule.fields(), true).map(|specs| specs.iter().map(Spec::kind).collect())
    }

    #[test]
    fn lists_become_specs() {
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
