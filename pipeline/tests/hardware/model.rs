//! A simple model of a NIC with rules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use wirepath_flow::{Action, Direction, FIELDS, Field, ITEMS, Item, ItemKind, ReformatKind, Rule};
use wirepath_nic_emulator::frame;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, Pool};
use wirepath_pmd::port::hardware::{
    ActionCapabilities, CountingCapabilities, DestinationKind, FieldNames, HardwareCount, HardwareRule, HardwareRuleId,
    ItemCapability, Masks, ReformatCapability, RefusalKind, RuleBackend, RuleCapabilities, RuleDestination,
    RuleHardware, RuleRefusal, TableCapabilities, TunnelName,
};
use wirepath_pmd::port::{
    Capabilities, Device, DeviceLink, Link, OpenPort, Port, PortConfig, PortError, PortEvent, PortId, PortSpec, Queues,
};
use wirepath_rule_oracle::{Fault, PacketMetadata, Rng, Verdict};

use crate::bench::{self, Nic, Received, reference};

/// Result of a received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Arrived {
    Packet { frame: Vec<u8>, tag: Option<u32>, queue: Option<u16> },
    Dropped,
}

/// A model shared by the port and the test.
pub(crate) type Shared = Arc<Mutex<Model>>;

pub(crate) struct Model {
    can: RuleCapabilities,
    /// Installed rules: as given, as equivalent rules of the reference, and their counters.
    rules: BTreeMap<u64, (HardwareRule, Vec<Rule>, HardwareCount)>,
    /// Counters of lost rules that have not been removed.
    lost: BTreeMap<u64, HardwareCount>,
    next: u64,
    epoch: u64,
    /// Refuses all rules with this kind.
    pub(crate) refuse: Option<RefusalKind>,
    /// Refuses random rules as if the device were full.
    pub(crate) random_refusals: Option<Rng>,
    /// Planted error in matching and actions.
    pub(crate) fault: Fault,
}

impl Model {
    /// Returns a model and its started port.
    pub(crate) fn port(can: RuleCapabilities, id: PortId, pool: &Pool) -> (Shared, Port) {
        let model = Self {
            can,
            rules: BTreeMap::new(),
            lost: BTreeMap::new(),
            next: 0,
            epoch: 0,
            refuse: None,
            random_refusals: None,
            fault: Fault::None,
        };
        let model = Arc::new(Mutex::new(model));
        let plan = ModelPlan(Arc::clone(&model));
        let open = OpenPort::open(format!("p{id}"), Box::new(plan)).unwrap();
        let config = PortConfig { rx_queues: 0, tx_queues: 0, ..PortConfig::new(id, pool.clone()) };
        (model, open.configure(config).unwrap().start().unwrap().port)
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules.len()
    }

    /// Loses all rules, as a device reset does.
    pub(crate) fn lose(&mut self) {
        self.lost.extend(std::mem::take(&mut self.rules).into_iter().map(|(id, (.., count))| (id, count)));
        self.epoch += 1;
    }

    /// Returns the first matching rule. Two matching rules on one level are an error.
    fn first(&self, direction: Direction, frame: &[u8], metadata: &PacketMetadata) -> Result<Option<u64>, String> {
        let mut best: Option<(u16, u64)> = None;
        for (id, (rule, plain, _)) in &self.rules {
            if rule.direction != direction || best.is_some_and(|(level, _)| level < rule.level) {
                continue;
            }
            let reference = reference(plain).with(self.fault);
            if reference.classify(direction, frame, metadata).is_none() || rule.require_integrity && !is_in_order(frame)
            {
                continue;
            }
            if let Some((level, other)) = best
                && level == rule.level
            {
                // Rules of excluded patterns have no tag and are equivalent.
                if rule.tag.is_some() || self.rules[&other].0.tag.is_some() {
                    return Err(format!(
                        "two rules of level {level} fit: {} and {}",
                        plain[0], self.rules[&other].1[0]
                    ));
                }
            }
            best = Some((rule.level, *id));
        }
        let last_first = self.fault == Fault::LastAddedFirst;
        if last_first && best.is_some() {
            // The planted error: the lowest matching rule wins.
            let fits = |plain: &[Rule]| reference(plain).classify(direction, frame, metadata).is_some();
            let all = self.rules.iter().filter(|(_, (rule, plain, _))| rule.direction == direction && fits(plain));
            return Ok(all.max_by_key(|(_, (rule, ..))| rule.level).map(|(id, _)| *id));
        }
        Ok(best.map(|(_, id)| id))
    }

    pub(crate) fn receive(&mut self, frame: &[u8]) -> Result<Arrived, String> {
        let metadata = PacketMetadata::default();
        let plain = Arrived::Packet { frame: frame.to_vec(), tag: None, queue: None };
        let Some(id) = self.first(Direction::Ingress, frame, &metadata)? else { return Ok(plain) };
        let (rule, doing, count) = self.rules.get_mut(&id).unwrap();
        let mut reference = reference(doing).with(self.fault);
        let outcome = reference.run(Direction::Ingress, frame, &metadata, 0);
        if rule.count {
            count.packets += 1;
            count.bytes += frame.len() as u64;
        }
        let queue = match (&outcome.verdict, &rule.destination) {
            (Verdict::Dropped(_), RuleDestination::Drop) | (Verdict::Kernel, _) => return Ok(Arrived::Dropped),
            (Verdict::Dropped(cause), _) => {
                return Err(format!("a NIC does not know that a packet is to be dropped: {cause:?} by {}", doing[0]));
            }
            (Verdict::Queue(queue), _) => Some(*queue),
            _ => None,
        };
        Ok(Arrived::Packet { frame: outcome.frame.bytes, tag: rule.tag, queue })
    }

    /// Returns the frame on the wire, or `None` if it was dropped.
    fn send(&mut self, packet: &Packet) -> Option<Vec<u8>> {
        let frame = bench::bytes(packet);
        let metadata = if packet.flags().contains(Flags::TX_METADATA) { packet.mark().unwrap_or(0) } else { 0 };
        let metadata = PacketMetadata { data: metadata, ..PacketMetadata::default() };
        let id = self.first(Direction::Egress, &frame, &metadata).unwrap();
        let Some(id) = id else { return Some(frame) };
        let (_, doing, _) = self.rules.get(&id).unwrap();
        let mut reference = reference(doing).with(self.fault);
        let outcome = reference.run(Direction::Egress, &frame, &metadata, 0);
        if matches!(outcome.verdict, Verdict::Dropped(_)) {
            return None;
        }
        let mut bytes = outcome.frame.bytes;
        if let Some(on) = outcome.frame.outer_headers
            && let Some(udp) = on.udp.filter(|_| on.any_port)
        {
            bytes[udp..udp + 2].copy_from_slice(&50_000u16.to_be_bytes());
        }
        Some(bytes)
    }
}

impl Nic for Shared {
    fn receive(&mut self, frames: &[&[u8]], _: &[bool], pool: &Pool) -> Result<Vec<Received>, String> {
        let mut received = Vec::new();
        for frame in frames {
            if let Arrived::Packet { frame, tag, queue } = self.lock().unwrap().receive(frame)? {
                received.push((queue, bench::packet(pool, &frame, tag)));
            }
        }
        Ok(received)
    }

    fn send(&mut self, packets: Vec<Packet>) -> Result<Vec<Vec<u8>>, String> {
        Ok(packets.iter().filter_map(|packet| self.lock().unwrap().send(packet)).collect())
    }
}

struct ModelPlan(Arc<Mutex<Model>>);

impl std::fmt::Debug for ModelPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("model")
    }
}

impl PortSpec for ModelPlan {
    fn driver(&self) -> &'static str {
        "model"
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(ModelDevice(Handle(self.0))))
    }
}

struct ModelDevice(Handle);
struct Handle(Arc<Mutex<Model>>);

impl Device for ModelDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities::plain("model", "nic")
    }

    fn start(&mut self, _: &PortConfig) -> Result<Queues, PortError> {
        Ok(Queues::default())
    }

    fn stop(&mut self, _: Queues) -> Result<(), PortError> {
        Ok(())
    }

    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        Some(&mut self.0)
    }
}

impl DeviceLink for ModelDevice {
    fn link(&mut self) -> Link {
        Link::UP
    }

    fn events(&mut self) -> Vec<PortEvent> {
        Vec::new()
    }
}

impl RuleHardware for Handle {
    fn capabilities(&self) -> RuleCapabilities {
        self.0.lock().unwrap().can.clone()
    }

    fn install(&mut self, rule: &HardwareRule) -> Result<HardwareRuleId, RuleRefusal> {
        let mut model = self.0.lock().unwrap();
        let random_refusals =
            model.random_refusals.as_mut().is_some_and(|rng| rng.one_in(4)).then_some(RefusalKind::Full);
        if let Some(kind) = model.refuse.or(random_refusals) {
            return Err(RuleRefusal { kind, errno: Some(28), reason: "the model refuses".to_owned() });
        }
        let table = model.can.table(rule.direction).expect("a table");
        assert!(rule.level < table.levels, "level {} of {}", rule.level, table.levels);
        if let Some(tag) = rule.tag {
            assert!(tag > 0 && tag < 0xff_ffff && tag <= model.can.max_tag(), "tag {tag}");
        }
        assert!(rule.actions.len() <= usize::from(table.actions.max_actions.max(8)));
        if rule.count {
            assert!(table.most_counters() > 0, "a rule counts where none can");
        }
        if let Some(counting) = table.counting.as_ref().filter(|_| rule.count) {
            assert!(rule.actions.is_empty() && counting.destinations.contains(&rule.destination.kind()), "{rule:?}");
            for item in &rule.pattern {
                let can = counting.items.iter().find(|can| (can.kind, can.inner) == (item.kind, item.inner));
                let can = can.unwrap_or_else(|| panic!("{:?} in a rule that counts", item.kind));
                for (field, bits) in item.fields() {
                    let allowed = can.field(*field).is_some_and(|masks| masks.allow(bits.mask, field.spec().bits));
                    assert!(allowed, "{} {bits:?} in a rule that counts", field.name());
                }
            }
        }
        let mut actions = rule.actions.clone();
        match &rule.destination {
            RuleDestination::Next => {}
            RuleDestination::Queue(queue) => actions.push(Action::Queue(*queue)),
            RuleDestination::Rss(rss) => actions.push(Action::Rss(rss.clone())),
            RuleDestination::Drop => actions.push(Action::Drop),
            RuleDestination::Kernel => actions.push(Action::Kernel),
        }
        if actions.is_empty() {
            actions.push(Action::Count);
        }
        let plain = match Rule::new(rule.direction, 0, rule.pattern.clone(), actions.clone()) {
            Ok(plain) => vec![plain],
            // An encapsulation of IP packets at egress does not match the IP version here, because the
            // workers have already matched the rule.
            Err(_) => {
                let of = |kind| [rule.pattern.clone(), vec![Item::new(kind)]].concat();
                let of = |kind| Rule::new(rule.direction, 0, of(kind), actions.clone()).ok();
                let plain: Vec<Rule> = [ItemKind::Ipv4, ItemKind::Ipv6].into_iter().filter_map(of).collect();
                assert!(!plain.is_empty(), "{rule:?}");
                plain
            }
        };
        let id = model.next;
        model.next += 1;
        model.rules.insert(id, (rule.clone(), plain, HardwareCount::default()));
        Ok(HardwareRuleId(id))
    }

    fn remove(&mut self, id: HardwareRuleId) -> Result<HardwareCount, RuleRefusal> {
        let mut model = self.0.lock().unwrap();
        let lost = model.lost.remove(&id.0);
        Ok(lost.unwrap_or_else(|| model.rules.remove(&id.0).expect("it is there").2))
    }

    fn count(&mut self, id: HardwareRuleId) -> Option<HardwareCount> {
        let model = self.0.lock().unwrap();
        model.rules.get(&id.0).map(|it| it.2).or_else(|| model.lost.get(&id.0).copied())
    }

    fn epoch(&self) -> u64 {
        self.0.lock().unwrap().epoch
    }
}

/// Returns true if outer lengths and checksums are right.
fn is_in_order(frame: &[u8]) -> bool {
    let layers = frame::parse(frame);
    let length = frame.get(layers.l4 + 4..layers.l4 + 6).map(|b| usize::from(u16::from_be_bytes([b[0], b[1]])));
    let whole = layers.protocol != frame::UDP || length == Some(layers.end - layers.l4);
    whole && layers.ip_checksum_ok(frame) != Some(false) && layers.transport_checksum_ok(frame) != Some(false)
}

/// Returns the capabilities of a NIC that supports everything.
pub(crate) fn everything() -> RuleCapabilities {
    let mut items = Vec::new();
    for spec in ITEMS {
        for inner in [false, true] {
            if matches!(spec.kind, ItemKind::Port | ItemKind::Meta) {
                continue;
            }
            let mut item = ItemCapability::new(spec.kind);
            item.inner = inner;
            item.max_count = spec.max_count;
            item.fields = spec.fields.iter().map(|field| (*field, Masks::Any)).collect();
            items.push(item);
        }
    }
    let tunnels = vec![
        TunnelName::Vxlan,
        TunnelName::VxlanGpe,
        TunnelName::Geneve,
        TunnelName::Gre,
        TunnelName::Mpls,
        TunnelName::Ip,
    ];
    let reformat = |kind| ReformatCapability {
        kind,
        max_header: 128,
        tunnels: tunnels.clone(),
        fills_source_port: vec![TunnelName::Vxlan],
        keeps_gre_key: false,
        udp_checksum: false,
        merges_ecn: false,
    };
    let set: Vec<Field> = FIELDS.iter().filter(|spec| spec.settable).map(|spec| spec.field).collect();
    let ingress = TableCapabilities {
        levels: 12,
        rules: None,
        counters: 1000,
        counting: None,
        items,
        // A NIC cannot see the inner headers or the tunnel of a fragment.
        excluded_patterns: vec!["ipv4 frag yes".parse().unwrap(), "ipv6 frag yes".parse().unwrap()],
        can_match_integrity: true,
        actions: ActionCapabilities {
            max_actions: 2,
            commands: 16,
            set: FieldNames(set),
            stale_checksums: Vec::new(),
            dec_ttl: true,
            push_vlan: false,
            pop_vlan: true,
            reformats: vec![reformat(ReformatKind::L2TunnelToL2), reformat(ReformatKind::L3TunnelToL2)],
            destinations: vec![
                DestinationKind::Next,
                DestinationKind::Queue,
                DestinationKind::Rss,
                DestinationKind::Drop,
            ],
        },
    };
    let egress = TableCapabilities {
        levels: 4,
        rules: None,
        counters: 0,
        counting: None,
        items: vec![ItemCapability::new(ItemKind::Meta).with(Field::MetaData, Masks::Any)],
        excluded_patterns: Vec::new(),
        can_match_integrity: true,
        actions: ActionCapabilities {
            max_actions: 2,
            reformats: vec![reformat(ReformatKind::L2ToL2Tunnel), reformat(ReformatKind::L2ToL3Tunnel)],
            destinations: vec![DestinationKind::Next, DestinationKind::Drop],
            ..ActionCapabilities::default()
        },
    };
    RuleCapabilities {
        tag_bits: 24,
        ingress: Some(ingress),
        egress: Some(egress),
        ..RuleCapabilities::none("model", "nic", RuleBackend::Dv)
    }
}

/// Returns random capabilities.
pub(crate) fn some(rng: &mut Rng) -> RuleCapabilities {
    let mut can = everything();
    if rng.one_in(3) {
        return can;
    }
    let table = can.ingress.as_mut().unwrap();
    table.levels = 2 + rng.below(8) as u16;
    let less = rng.pick(&[5, 20, 50]);
    table.items.retain(|_| !rng.percent(less));
    for item in &mut table.items {
        item.fields.retain(|_| !rng.percent(less));
        for (_, masks) in &mut item.fields {
            *masks = rng.pick(&[Masks::Any, Masks::Any, Masks::Exact, Masks::Prefix]);
        }
    }
    table.actions.destinations.retain(|kind| *kind == DestinationKind::Next || !rng.percent(less));
    table.actions.set.0.retain(|_| !rng.percent(less));
    table.actions.dec_ttl = !rng.percent(less);
    table.actions.reformats.retain(|_| !rng.percent(less));
    table.counters = rng.pick(&[0, 1, 1000]);
    if rng.one_in(3) {
        let mut counting = CountingCapabilities {
            counters: table.counters,
            items: table.items.clone(),
            destinations: vec![DestinationKind::Drop],
        };
        counting.items.retain(|_| !rng.percent(less));
        table.counters = 0;
        table.counting = Some(counting);
    }
    table.rules = rng.pick(&[None, None, Some(6)]);
    table.can_match_integrity = !rng.percent(less);
    if rng.percent(less) {
        can.tag_bits = rng.pick(&[0, 2, 16]);
    }
    can
}
