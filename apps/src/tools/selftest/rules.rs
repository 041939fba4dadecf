//! Tests of a NIC's flow rules: every item and field that the device offers, and every action. The software engine is
//! the judge, since rules must have the same effect in both.

use wirepath_flow::{
    Action, Direction, Field, FieldSet, Item, ItemKind, Key, KeyKind, MaskedValue, Metadata, Reformat, ReformatKind,
    Rule, packet_value,
};
use wirepath_packet::Pool;
use wirepath_pmd::port::MacAddr;
use wirepath_pmd::port::hardware::{
    DestinationKind, HardwareRule, HardwareRuleId, ItemCapability, Masks, RefusalKind, RuleCapabilities,
    RuleDestination, RuleHardware, TableCapabilities, TunnelName,
};
use wirepath_wire::{L4Type, Tag, Tunnels, geneve, parse, vxlan, vxlan_gpe};

use super::bench::{Bench, Received, with_metadata};
use super::checks::{difference, verify_checksums, without_identification};
use super::frames::{self, SOURCE, Sample};
use super::{Outcome, Verdict, hex};
use wirepath::rules::engine::{RuleEngine, frame_bytes};

/// Mark of the packets of the tested rule.
const TAG: u32 = 0xabcd;
/// Transmit metadata of the packets of the tested egress rule.
const DATA: u32 = 5;
/// Level of the tested rule. Level 0 holds the patterns that the device parses differently.
const LEVEL: u16 = 1;

/// Rules of one item after which further samples add none. It bounds the time of the test.
const ENOUGH_RULES: usize = 400;

/// A device's rules under test.
struct RuleTest<'a> {
    bench: &'a mut Bench,
    /// Buffers of the software engine.
    pool: Pool,
    capabilities: RuleCapabilities,
    samples: Vec<Sample>,
    /// Patterns that the device parses differently. Their packets get no mark.
    excluded: Vec<FieldSet>,
}

/// Tests all rules that the device offers. Returns one line for each item and each action.
pub(super) fn test(bench: &mut Bench) -> Vec<(String, Outcome)> {
    let none = |reason: &str| vec![("rules".to_owned(), Ok(Verdict::Skip(reason.to_owned())))];
    let Some(hardware) = bench.port().port.rule_hardware() else {
        return none("the port has no hardware for rules: the workers apply them");
    };
    let capabilities = hardware.capabilities();
    if bench.directions().len() > 1 {
        // Rules of the port under test apply to what it sends and to what it receives.
        return none("rules are tested through a loop-back only");
    }
    let samples = frames::samples(bench.address_of_receiver(0));
    bench.shorten_quiet_time();
    let pool = match Pool::new("engine", 64) {
        Ok(pool) => pool,
        Err(error) => return vec![("rules".to_owned(), Err(error.to_string()))],
    };
    let mut test = RuleTest { bench, pool, capabilities, samples, excluded: Vec::new() };
    match test.baseline() {
        Ok(()) => test.run(),
        Err(error) => vec![("rules".to_owned(), Err(error))],
    }
}

impl RuleTest<'_> {
    fn hardware(&mut self) -> Result<&mut dyn RuleHardware, String> {
        self.bench.port().port.rule_hardware().ok_or_else(|| "the rule hardware is gone".to_owned())
    }

    /// Installs a rule. Returns `None` if the device supports its parts, but not together. The hardware stage
    /// leaves such a rule to software.
    fn install_if_supported(&mut self, rule: &HardwareRule) -> Result<Option<HardwareRuleId>, String> {
        match self.hardware()?.install(rule) {
            Ok(id) => Ok(Some(id)),
            Err(refusal) if refusal.kind == RefusalKind::Unsupported => Ok(None),
            Err(refusal) => Err(format!("the device refuses the rule: {refusal}")),
        }
    }

    fn install(&mut self, rule: &HardwareRule) -> Result<HardwareRuleId, String> {
        self.hardware()?
            .install(rule)
            .map_err(|refusal| format!("the device offers this rule and refuses it: {refusal}"))
    }

    fn remove(&mut self, id: HardwareRuleId) -> Result<u64, String> {
        let count = self.hardware()?.remove(id).map_err(|refusal| format!("the rule cannot be removed: {refusal}"))?;
        Ok(count.packets)
    }

    fn send_samples(&mut self) -> Result<Vec<Received>, String> {
        let frames: Vec<_> = self.samples.iter().map(|sample| sample.bytes.clone()).collect();
        let expected = frames.len();
        self.bench.exchange_frames(0, &frames, expected)
    }

    /// Without rules, all samples arrive unchanged and unmarked.
    fn baseline(&mut self) -> Result<(), String> {
        let received = self.send_samples()?;
        for sample in &self.samples {
            match received.iter().filter(|got| got.bytes == sample.bytes).collect::<Vec<_>>()[..] {
                [one] if one.mark.is_none() => {}
                [one] => return Err(format!("{} has mark {:?} without a rule", sample.name, one.mark)),
                ref many => {
                    return Err(format!(
                        "{} arrived {} times without a rule: {}",
                        sample.name,
                        many.len(),
                        hex(&sample.bytes)
                    ));
                }
            }
        }
        Ok(())
    }

    fn run(&mut self) -> Vec<(String, Outcome)> {
        let mut lines = Vec::new();
        if let Some(table) = self.capabilities.ingress.clone() {
            let excluded = self.install_excluded(&table);
            match excluded {
                Err(error) => return vec![("rules: excluded patterns".to_owned(), Err(error))],
                Ok(ids) => {
                    for item in &table.items {
                        let inner = if item.inner { "inner " } else { "" };
                        lines.push((format!("rules: match {inner}{}", item.kind.spec().name), self.item(&table, item)));
                    }
                    lines.push(("rules: drop".to_owned(), self.drop_rule(&table)));
                    lines.push(("rules: queue".to_owned(), self.queue_rule(&table)));
                    lines.extend(self.actions(Direction::Ingress, &table));
                    for id in ids {
                        if let Err(error) = self.remove(id) {
                            lines.push(("rules: excluded patterns".to_owned(), Err(error)));
                        }
                    }
                }
            }
        }
        if let Some(table) = self.capabilities.egress.clone() {
            lines.extend(self.actions(Direction::Egress, &table));
        }
        // No rule is left behind.
        lines.push((
            "rules: removal".to_owned(),
            self.baseline().map(|()| Verdict::Pass("packets are unchanged after all rules were removed".to_owned())),
        ));
        lines
    }

    fn install_excluded(&mut self, table: &TableCapabilities) -> Result<Vec<HardwareRuleId>, String> {
        let mut ids = Vec::new();
        self.excluded.clear();
        for pattern in &table.excluded_patterns {
            let items = pattern.items().to_vec();
            self.excluded.extend(fields_of(&items));
            let rule = hardware_rule(Direction::Ingress, 0, items, Vec::new(), RuleDestination::Next, None);
            ids.push(self.install(&rule)?);
        }
        Ok(ids)
    }

    /// True if a rule with these fields applies to a frame.
    fn matches(&self, fields: &FieldSet, frame: &[u8]) -> bool {
        let Ok(parsed) = parse(frame) else { return false };
        let applies = |set: &FieldSet| set.matches(|key| packet_value(&parsed, frame, Metadata::default(), key));
        applies(fields) && !self.excluded.iter().any(applies)
    }

    /// Tests an item: without fields, and with each field of each sample that has the header.
    fn item(&mut self, table: &TableCapabilities, item: &ItemCapability) -> Outcome {
        let mut rules = Vec::new();
        for sample in &self.samples {
            let Some(before) = headers_before(&sample.name, item) else { continue };
            let Ok(parsed) = parse(&sample.bytes) else { continue };
            let plain = item_of(item.kind, item.inner);
            let mut targets = vec![plain.clone()];
            for (field, masks) in &item.fields {
                let key = Key { level: item.inner.into(), nth: 0, kind: KeyKind::Field(*field) };
                let Some(value) = packet_value(&parsed, &sample.bytes, Metadata::default(), key) else { continue };
                targets.extend(
                    masks_to_test(*masks, field.spec().bits)
                        .map(|mask| plain.clone().with(*field, MaskedValue { value: value & mask, mask })),
                );
            }
            for target in targets {
                let pattern = pattern(table, item, &before, &target, &sample.bytes);
                if !rules.contains(&pattern) {
                    rules.push(pattern);
                }
            }
            if rules.len() >= ENOUGH_RULES {
                break;
            }
        }
        let (mut tested, mut hits, mut refused) = (0, 0, 0);
        for items in rules {
            // A pattern that the language refuses cannot reach the device.
            let Ok(rule) = Rule::new(Direction::Ingress, 0, items.clone(), vec![Action::Mark(TAG)]) else { continue };
            match self.marks(table, &rule).map_err(|error| format!("{rule}: {error}"))? {
                Some(n) => (tested, hits) = (tested + 1, hits + n),
                None => refused += 1,
            }
        }
        match (tested, refused) {
            (0, 0) => Ok(Verdict::Skip("no sample has this header".to_owned())),
            (0, n) => Err(format!("the device offers this item and refuses all {n} rules with it")),
            (tested, 0) => Ok(Verdict::Pass(format!("{tested} rules, {hits} hits"))),
            (tested, n) => {
                Ok(Verdict::Pass(format!("{tested} rules, {hits} hits; {n} combinations are not supported")))
            }
        }
    }

    /// Installs a rule that marks (or drops, if the device has no marks), and compares which samples it hits with the
    /// meaning of the rule. Returns the number of hits, or `None` if the device does not support the combination.
    fn marks(&mut self, table: &TableCapabilities, rule: &Rule) -> Result<Option<u64>, String> {
        let has_marks = self.capabilities.tag_bits > 0;
        let (destination, tag) = match has_marks {
            true => (RuleDestination::Next, Some(TAG & self.capabilities.max_tag())),
            false => (RuleDestination::Drop, None),
        };
        let mut hardware =
            hardware_rule(Direction::Ingress, LEVEL, rule.pattern().to_vec(), Vec::new(), destination, tag);
        hardware.count = table.counters > 0;
        let fields = rule.fields();
        let Some(id) = self.install_if_supported(&hardware)? else { return Ok(None) };
        let frames: Vec<_> = self.samples.iter().map(|sample| sample.bytes.clone()).collect();
        let hits: Vec<bool> = frames.iter().map(|frame| self.matches(&fields, frame)).collect();
        let expected = if has_marks { frames.len() } else { hits.iter().filter(|hit| !**hit).count() };
        let received = self.bench.exchange_frames(0, &frames, expected);
        let counted = self.remove(id)?;
        let received = received?;
        for (sample, hit) in self.samples.iter().zip(&hits) {
            let got = received.iter().find(|got| got.bytes == sample.bytes);
            let wrong = match (has_marks, got) {
                (true, Some(got)) => got.mark != if *hit { tag } else { None },
                (true, None) => true,
                (false, got) => got.is_some() == *hit,
            };
            if wrong {
                let should = if *hit { "must hit" } else { "must not hit" };
                let mark = got.map(|got| got.mark);
                return Err(format!("the rule {should} {}; mark {mark:?}, frame {}", sample.name, hex(&sample.bytes)));
            }
        }
        let hits = hits.iter().filter(|hit| **hit).count() as u64;
        if hardware.count && counted != hits {
            return Err(format!("{hits} packets hit the rule, its counter says {counted}"));
        }
        Ok(Some(hits))
    }

    /// A rule that matches IPv4 packets, for tests of actions.
    fn ipv4(&self, table: &TableCapabilities) -> Option<Rule> {
        table.item(ItemKind::Ipv4, false)?;
        Rule::new(Direction::Ingress, 0, vec![Item::new(ItemKind::Ipv4)], vec![Action::Count]).ok()
    }

    fn drop_rule(&mut self, table: &TableCapabilities) -> Outcome {
        let Some(rule) = self.ipv4(table).filter(|_| table.actions.destinations.contains(&DestinationKind::Drop))
        else {
            return Ok(Verdict::Skip("the device does not offer it".to_owned()));
        };
        let hardware =
            hardware_rule(Direction::Ingress, LEVEL, rule.pattern().to_vec(), Vec::new(), RuleDestination::Drop, None);
        let id = self.install(&hardware)?;
        let fields = rule.fields();
        let frames: Vec<_> = self.samples.iter().map(|sample| sample.bytes.clone()).collect();
        let kept: Vec<_> = frames.iter().filter(|frame| !self.matches(&fields, frame)).collect();
        let received = self.bench.exchange_frames(0, &frames, kept.len());
        self.remove(id)?;
        let received = received?;
        if received.len() != kept.len() || kept.iter().any(|frame| received.iter().all(|got| got.bytes != **frame)) {
            return Err(format!("{} frames arrived, {} should; the others match {rule}", received.len(), kept.len()));
        }
        Ok(Verdict::Pass(format!("{} of {} frames dropped", frames.len() - kept.len(), frames.len())))
    }

    fn queue_rule(&mut self, table: &TableCapabilities) -> Outcome {
        let offered = table.actions.destinations.contains(&DestinationKind::Queue);
        let queues = self.bench.port().rx.len() as u16;
        let Some(rule) = self.ipv4(table).filter(|_| offered && queues > 1) else {
            return Ok(Verdict::Skip("the device does not offer it, or has one queue".to_owned()));
        };
        let fields = rule.fields();
        for queue in 0..queues {
            let destination = RuleDestination::Queue(queue);
            let pattern = rule.pattern().to_vec();
            let id = self.install(&hardware_rule(Direction::Ingress, LEVEL, pattern, Vec::new(), destination, None))?;
            let received = self.send_samples();
            self.remove(id)?;
            for got in received? {
                if self.matches(&fields, &got.bytes) && got.queue != usize::from(queue) {
                    return Err(format!(
                        "queue {queue} was asked for, {} came to queue {}",
                        hex(&got.bytes),
                        got.queue
                    ));
                }
            }
        }
        Ok(Verdict::Pass(format!("each of {queues} queues")))
    }

    /// Tests each action that changes packets.
    fn actions(&mut self, direction: Direction, table: &TableCapabilities) -> Vec<(String, Outcome)> {
        let mut lines = Vec::new();
        let name = direction.name();
        let can = &table.actions;
        for field in &can.set.0 {
            let item = field.spec().item;
            let stale: Vec<FieldSet> =
                can.stale_checksums.iter().filter_map(|pattern| fields_of(pattern.items())).collect();
            let outcome = self.action(direction, table, |sample| {
                let parsed = parse(&sample.bytes).ok()?;
                // The hardware stage leaves packets to software whose checksums the device does not update.
                let value = |key| packet_value(&parsed, &sample.bytes, Metadata::default(), key);
                if stale.iter().any(|set| set.matches(value)) {
                    return None;
                }
                let key = Key::field(0, *field);
                let old = packet_value(&parsed, &sample.bytes, Metadata::default(), key)?;
                let all = MaskedValue::exact(0, field.spec().bits).mask;
                headers(&sample.name).iter().any(|(kind, inner)| *kind == item && !inner).then_some(())?;
                // A group address or a version must stay as it is: only low bits change.
                Some(vec![Action::Set { field: *field, value: (old ^ 1) & all }])
            });
            lines.push((format!("rules: {name} set {} {}", item.spec().name, field.name()), outcome));
        }
        let is_ip = |sample: &Sample| has(&sample.name, "ipv4") || has(&sample.name, "ipv6");
        if can.dec_ttl {
            let outcome = self.action(direction, table, |sample| is_ip(sample).then(|| vec![Action::DecTtl]));
            lines.push((format!("rules: {name} dec-ttl"), outcome));
        }
        if can.push_vlan {
            let tag = Tag { tpid: wirepath_wire::EtherType::VLAN, tci: 0x6123 };
            let outcome = self.action(direction, table, |sample| {
                (!sample.name.starts_with("vlan")).then(|| vec![Action::PushVlan(tag)])
            });
            lines.push((format!("rules: {name} push-vlan"), outcome));
        }
        if can.pop_vlan {
            let outcome =
                self.action(direction, table, |sample| sample.name.starts_with("vlan").then(|| vec![Action::PopVlan]));
            lines.push((format!("rules: {name} pop-vlan"), outcome));
        }
        let to = self.bench.address_of_receiver(0);
        for capability in &can.reformats {
            for tunnel in &capability.tunnels {
                let word = tunnel_word(*tunnel);
                let (verb, kind) = capability.kind.words();
                let outcome = match capability.kind {
                    ReformatKind::L2ToL2Tunnel | ReformatKind::L2ToL3Tunnel => {
                        self.encap(direction, table, capability.kind, word, usize::from(capability.max_header))
                    }
                    ReformatKind::L2TunnelToL2 | ReformatKind::L3TunnelToL2 => {
                        self.decap(direction, table, capability.kind, word, to)
                    }
                };
                lines.push((format!("rules: {name} {verb} {kind} {word}"), outcome));
            }
        }
        lines
    }

    fn encap(
        &mut self,
        direction: Direction,
        table: &TableCapabilities,
        kind: ReformatKind,
        tunnel: &str,
        longest: usize,
    ) -> Outcome {
        let to = self.bench.address_of_receiver(0);
        let l2 = kind == ReformatKind::L2ToL2Tunnel;
        let mut tested = Vec::new();
        for (name, with_ethernet, v6, header) in frames::tunnel_headers(to) {
            if name != tunnel || with_ethernet != l2 || header.len() > longest {
                continue;
            }
            let reformat = Reformat::new(kind, &header).map_err(|error| error.to_string())?;
            let outcome = self.action(direction, table, |sample| {
                // An encapsulation without Ethernet header takes IPv4 packets only: its header names the protocol.
                let fits = l2 || (sample.name.starts_with("ipv4/") && !sample.name.contains("vlan"));
                fits.then(|| vec![Action::Reformat(reformat.clone())])
            })?;
            match outcome {
                Verdict::Pass(text) => tested.push(format!("IPv{}: {text}", if v6 { 6 } else { 4 })),
                skip @ Verdict::Skip(_) => return Ok(skip),
            }
        }
        match tested.is_empty() {
            true => Ok(Verdict::Skip("no test header for this tunnel".to_owned())),
            false => Ok(Verdict::Pass(tested.join("; "))),
        }
    }

    fn decap(
        &mut self,
        direction: Direction,
        table: &TableCapabilities,
        kind: ReformatKind,
        tunnel: &str,
        to: MacAddr,
    ) -> Outcome {
        let l2 = kind == ReformatKind::L2TunnelToL2;
        self.action(direction, table, |sample| {
            let (outer, inner) = split(&sample.name)?;
            let is_kind = match tunnel {
                "ip" => outer.len() == 1,
                tunnel => outer.last() == Some(&tunnel),
            };
            let first = *inner.first()?;
            if !is_kind || l2 != (first == "eth") || outer.contains(&"vlan") {
                return None;
            }
            let header = match first {
                "ipv4" => [&to.0[..], &SOURCE.0, &[0x08, 0x00]].concat(),
                "ipv6" => [&to.0[..], &SOURCE.0, &[0x86, 0xdd]].concat(),
                _ => Vec::new(),
            };
            Some(vec![Action::Reformat(Reformat::new(kind, &header).ok()?)])
        })
    }

    /// Tests an action on every sample for which `actions` returns one. The result must equal that of the engine.
    fn action(
        &mut self,
        direction: Direction,
        table: &TableCapabilities,
        actions: impl Fn(&Sample) -> Option<Vec<Action>>,
    ) -> Outcome {
        let (mut tested, mut refused, mut why) = (0, 0, "no sample fits".to_owned());
        for sample in self.samples.clone() {
            let Some(actions) = actions(&sample) else { continue };
            let Some(pattern) = self.exact_pattern(direction, table, &sample) else {
                why = "the device matches no transmit metadata".to_owned();
                continue;
            };
            let rule = match Rule::new(direction, 0, pattern, actions) {
                Ok(rule) => rule,
                Err(error) => {
                    why = format!("{}: {error}", sample.name);
                    continue;
                }
            };
            if direction == Direction::Ingress && !self.matches(&rule.fields(), &sample.bytes) {
                continue;
            }
            match self.one_action(&rule, &sample).map_err(|error| format!("{rule}: {}: {error}", sample.name))? {
                true => tested += 1,
                false => refused += 1,
            }
        }
        match (tested, refused) {
            (0, 0) => Ok(Verdict::Skip(why)),
            (0, n) => Err(format!("the device offers this action and refuses all {n} rules with it")),
            (tested, 0) => Ok(Verdict::Pass(format!("{tested} packets equal those of the software engine"))),
            (tested, n) => Ok(Verdict::Pass(format!(
                "{tested} packets equal those of the software engine; {n} combinations are not supported"
            ))),
        }
    }

    /// Tests a rule on one sample. Returns false if the device does not support the rule.
    fn one_action(&mut self, rule: &Rule, sample: &Sample) -> Result<bool, String> {
        let direction = rule.direction();
        let pool = self.pool.clone();
        let mut engine = RuleEngine::new([rule], Tunnels::default(), pool).map_err(|error| error.to_string())?;
        let packet = engine.packet(&sample.bytes).ok_or("the frame is too long")?;
        let mut packet = if direction == Direction::Egress { with_metadata(packet, DATA) } else { packet };
        let hit = engine.apply(&mut packet, direction, 0).map_err(|reason| reason.text().to_owned())?;
        if hit.is_none() {
            return Err("the software engine finds no match".to_owned());
        }
        let expected = frame_bytes(&packet);
        let tag = (direction == Direction::Ingress && self.capabilities.tag_bits > 0).then_some(TAG);
        let hardware = hardware_rule(
            direction,
            if direction == Direction::Ingress { LEVEL } else { 0 },
            rule.pattern().to_vec(),
            rule.actions().to_vec(),
            RuleDestination::Next,
            tag,
        );
        let Some(id) = self.install_if_supported(&hardware)? else { return Ok(false) };
        let sent = self.bench.packet(&sample.bytes)?;
        let sent = if direction == Direction::Egress { with_metadata(sent, DATA) } else { sent };
        let received = self.bench.exchange(0, vec![sent], 1);
        self.remove(id)?;
        let received = received?;
        let [got] = &received[..] else {
            return Err(format!("{} packets arrived instead of 1; expected {}", received.len(), hex(&expected)));
        };
        verify_checksums(&got.bytes)?;
        let (expected, bytes) = (without_entropy(&expected), without_entropy(&got.bytes));
        if expected != bytes {
            return Err(difference(&expected, &bytes));
        }
        if tag.is_some() && got.mark != tag {
            return Err(format!("the mark is {:?}", got.mark));
        }
        Ok(true)
    }

    /// Returns a pattern for a sample: its headers, as far as the device matches them. `None` if rules of this
    /// direction cannot select a packet.
    fn exact_pattern(&self, direction: Direction, table: &TableCapabilities, sample: &Sample) -> Option<Vec<Item>> {
        let mut items: Vec<Item> = Vec::new();
        if direction == Direction::Egress {
            let meta = table.item(ItemKind::Meta, false)?;
            meta.field(Field::MetaData)?;
            items.push(Item::new(ItemKind::Meta).exact(Field::MetaData, DATA.into()));
        }
        for (kind, inner) in headers(&sample.name) {
            if let Some(capability) = table.item(kind, inner)
                && !items.iter().any(|item| item.kind == kind && item.inner == inner)
            {
                let mut item = with_payload_type(table, item_of(kind, inner), &sample.bytes);
                // Devices merge no ECN: only packets without a congestion mark are decapsulated there.
                let ecn = if kind == ItemKind::Ipv4 { Field::Ipv4Ecn } else { Field::Ipv6Ecn };
                if matches!(kind, ItemKind::Ipv4 | ItemKind::Ipv6) && !inner && capability.field(ecn).is_some() {
                    item = item.exact(ecn, 0);
                }
                merge(&mut items, capability.implies.items());
                items.push(item);
            }
        }
        Some(items)
    }
}

/// Returns the conditions of a pattern. `None` if the language refuses it.
fn fields_of(items: &[Item]) -> Option<FieldSet> {
    Rule::new(Direction::Ingress, 0, items.to_vec(), vec![Action::Count]).ok().map(|rule| rule.fields())
}

/// Creates an item without fields.
fn item_of(kind: ItemKind, inner: bool) -> Item {
    if inner { Item::new(kind).as_inner() } else { Item::new(kind) }
}

/// Creates a rule for the device.
fn hardware_rule(
    direction: Direction,
    level: u16,
    pattern: Vec<Item>,
    actions: Vec<Action>,
    destination: RuleDestination,
    tag: Option<u32>,
) -> HardwareRule {
    HardwareRule { direction, level, pattern, actions, destination, tag, count: false, require_integrity: false }
}

/// Adds conditions to the items of a pattern. Items that it does not have come last.
fn merge(items: &mut Vec<Item>, conditions: &[Item]) {
    for condition in conditions {
        match items.iter_mut().find(|item| item.kind == condition.kind && item.inner == condition.inner) {
            Some(item) => {
                for (field, bits) in condition.fields() {
                    *item = item.clone().with(*field, *bits);
                }
            }
            None => items.push(condition.clone()),
        }
    }
}

/// Masks with which a field is tested.
fn masks_to_test(masks: Masks, bits: u8) -> impl Iterator<Item = u128> {
    let all = MaskedValue::exact(0, bits).mask;
    let prefix = all & !(all >> bits.div_ceil(2));
    let list = match masks {
        Masks::Exact => vec![all],
        Masks::Any | Masks::Prefix => vec![all, prefix],
        Masks::Within(these) => vec![these & all],
    };
    list.into_iter().filter(|mask| *mask != 0)
}

/// Headers of a sample after the outer Ethernet header, with the stack that they belong to.
fn headers(name: &str) -> Vec<(ItemKind, bool)> {
    let Some((outer, inner)) = split(name) else {
        return name.split('/').filter_map(ItemKind::from_name).map(|kind| (kind, false)).collect();
    };
    let kinds = |names: &[&str], inner: bool| -> Vec<(ItemKind, bool)> {
        names.iter().filter_map(|name| ItemKind::from_name(name)).map(|kind| (kind, inner)).collect()
    };
    // The language names the packet inside of IP in IP by the protocol field alone.
    if outer.iter().all(|name| matches!(*name, "ipv4" | "ipv6")) {
        return kinds(&outer, false);
    }
    [kinds(&outer, false), kinds(&inner, true)].concat()
}

/// Splits the name of a tunnelled sample after its tunnel header.
fn split(name: &str) -> Option<(Vec<&str>, Vec<&str>)> {
    let parts: Vec<&str> = name.split('/').collect();
    let is_ip = |part: &&str| matches!(*part, "ipv4" | "ipv6");
    let tunnel = parts.iter().position(|part| matches!(*part, "vxlan" | "vxlan-gpe" | "geneve" | "gre"));
    let at = tunnel.or_else(|| parts.windows(2).position(|pair| pair.iter().all(is_ip)))? + 1;
    Some((parts[..at].to_vec(), parts[at..].to_vec()))
}

fn has(name: &str, header: &str) -> bool {
    let outer = split(name).map_or_else(|| name.split('/').collect(), |(outer, _)| outer);
    outer.contains(&header)
}

/// Headers of a sample before that of an item, if the sample has it.
fn headers_before(name: &str, item: &ItemCapability) -> Option<Vec<(ItemKind, bool)>> {
    let all = headers(name);
    if item.kind == ItemKind::Eth && !item.inner {
        return Some(Vec::new());
    }
    let at = all.iter().position(|(kind, inner)| *kind == item.kind && *inner == item.inner)?;
    Some(all[..at].to_vec())
}

/// Builds the pattern of an item: the headers before it that the device matches, its conditions, and the item.
fn pattern(
    table: &TableCapabilities,
    item: &ItemCapability,
    before: &[(ItemKind, bool)],
    target: &Item,
    frame: &[u8],
) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    for (kind, inner) in before {
        if table.item(*kind, *inner).is_some() && !items.iter().any(|item| item.kind == *kind && item.inner == *inner) {
            items.push(with_payload_type(table, item_of(*kind, *inner), frame));
        }
    }
    for capability in before.iter().filter_map(|(kind, inner)| table.item(*kind, *inner)).chain([item]) {
        merge(&mut items, capability.implies.items());
    }
    merge(&mut items, std::slice::from_ref(target));
    items
}

/// Adds the payload type to a tunnel item. Some devices match what is behind a tunnel header only with it.
fn with_payload_type(table: &TableCapabilities, item: Item, frame: &[u8]) -> Item {
    let (field, tunnels) = match item.kind {
        ItemKind::Gre => (Field::GreProto, None),
        ItemKind::Geneve => (Field::GeneveProto, None),
        ItemKind::VxlanGpe => (Field::GpeNext, None),
        // IP in IP has no tunnel header.
        ItemKind::Ipv4 => (Field::Ipv4Proto, Some([4, 41])),
        ItemKind::Ipv6 => (Field::Ipv6Proto, Some([4, 41])),
        _ => return item,
    };
    let can = table.item(item.kind, item.inner).is_some_and(|capability| capability.field(field).is_some());
    let Ok(parsed) = parse(frame) else { return item };
    let key = Key::field(item.inner.into(), field);
    let is_payload = |value: &u128| tunnels.is_none_or(|tunnels: [u128; 2]| tunnels.contains(value));
    match packet_value(&parsed, frame, Metadata::default(), key).filter(|value| can && is_payload(value)) {
        Some(value) => item.exact(field, value),
        None => item,
    }
}

/// Clears what devices may choose: IPv4 identification, and source port and checksum of an outer UDP header.
fn without_entropy(frame: &[u8]) -> Vec<u8> {
    let mut cleared = without_identification(frame);
    if let Ok(parsed) = parse(frame)
        && parsed.outer().l4_type() == L4Type::Udp
    {
        let at = parsed.outer().l4();
        let is_tunnel = |port: &[u8]| {
            [vxlan::PORT, vxlan_gpe::PORT, geneve::PORT].map(u16::to_be_bytes).iter().any(|known| port == known)
        };
        if frame.len() >= at + 8 && is_tunnel(&frame[at + 2..at + 4]) {
            cleared[at..at + 2].fill(0);
            cleared[at + 6..at + 8].fill(0);
        }
    }
    cleared
}

/// Name of a tunnel in patterns.
fn tunnel_word(tunnel: TunnelName) -> &'static str {
    match tunnel {
        TunnelName::Vxlan => "vxlan",
        TunnelName::VxlanGpe => "vxlan-gpe",
        TunnelName::Geneve => "geneve",
        TunnelName::Gre => "gre",
        TunnelName::Mpls => "mpls",
        TunnelName::Ip => "ip",
    }
}
