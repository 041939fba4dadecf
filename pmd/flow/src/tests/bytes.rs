//! Closed lists on real frames: the values that the parser finds must match what the patterns mean.

#[path = "../../../wire/tests/wire/stacks.rs"]
mod stacks;

use std::collections::BTreeMap;

use fastrand::Rng;
use stacks::{FirstHeader, StackSpec};
use wirepath_wire::{Parsed, parse};

use super::super::masked_value::ones;
use super::super::*;

const METADATA: Metadata = Metadata { port: 7, mark: 0x12_3456, data: 0x89ab_cdef };

fn kind(name: &str) -> ItemKind {
    match name {
        "ip" => ItemKind::Ipv4,
        name => ItemKind::from_name(name).expect("an item"),
    }
}

/// Creates a pattern of some of a frame's headers, with some of their values.
fn pattern(random: &mut Rng, made: &stacks::TestFrame, parsed: &Parsed) -> Vec<Item> {
    let value = |key| packet_value(parsed, &made.bytes, METADATA, key);
    let mut items = Vec::new();
    for (kind, wanted) in [(ItemKind::Port, random.usize(..4) == 0), (ItemKind::Meta, random.usize(..4) == 0)] {
        if wanted {
            items.push(fields(random, Item::new(kind), 0, &value));
        }
    }
    let named = [random.usize(..4) == 0, random.usize(..3) == 0];
    let inner_named = !named[1] && made.marks.iter().any(|m| m.level == 1);
    for level in [0, 1] {
        if named[usize::from(level)] {
            continue;
        }
        let here: Vec<&str> = made.marks.iter().filter(|m| m.level == level).map(|m| m.name).collect();
        let mut nth = BTreeMap::new();
        let mut skipped = BTreeMap::new();
        let both = parsed.stack(level.into()).is_some_and(|l| l.has_labels()) && parsed.has_tunnel_labels(level.into());
        let mut behind_network = false;
        for name in here {
            let kind = kind(name);
            behind_network |= kind.spec().layer > Layer::Label;
            if kind == ItemKind::Mpls && behind_network && both {
                // The keys refer to the first label stack.
                continue;
            }
            // Labels must not be skipped. Of tags and labels, only the lower ones may be omitted.
            let left_out = skipped.get(name).copied().unwrap_or(false);
            let mut must = kind == ItemKind::Mpls && !left_out && !nth.contains_key(name);
            let last = items.last().filter(|item: &&Item| item.inner == (level == 1)).map(|item| item.kind);
            if kind == ItemKind::Mpls && behind_network {
                // Without an item that carries labels before it, "mpls" means labels after Ethernet.
                if !matches!(last, Some(ItemKind::Udp | ItemKind::Gre | ItemKind::Mpls)) {
                    continue;
                }
                must &= matches!(last, Some(ItemKind::Udp | ItemKind::Gre));
            }
            let bare = matches!(kind, ItemKind::Udp | ItemKind::Gre) && both && inner_named;
            if bare || left_out || (!must && random.bool()) {
                skipped.insert(name, true);
                continue;
            }
            let count = nth.entry(name).or_insert(0u8);
            let item = if level == 1 { Item::new(kind).as_inner() } else { Item::new(kind) };
            items.push(fields(random, item, *count, &value));
            *count += 1;
        }
    }
    items
}

fn fields(random: &mut Rng, mut item: Item, nth: u8, value: &impl Fn(Key) -> Option<u128>) -> Item {
    for &field in item.kind.spec().fields {
        let key = Key { level: u8::from(item.inner), nth, kind: KeyKind::Field(field) };
        let Some(value) = value(key).filter(|_| random.usize(..4) == 0) else { continue };
        let all = ones(field.spec().bits);
        let mask = if random.usize(..3) == 0 { random.u128(..) } else { all } & all;
        item = item.with(field, MaskedValue { value: value & mask, mask });
    }
    item
}

fn rule(pattern: &[Item]) -> Result<Rule, RuleError> {
    Rule::new(Direction::Ingress, 0, pattern.to_vec(), vec![Action::Drop])
}

#[test]
fn frames_match_patterns_made_from_them() {
    let mut used = std::collections::BTreeSet::new();
    for (i, spec) in stacks::all_specs(30).into_iter().enumerate() {
        for seed in 0..60 {
            let random = &mut Rng::with_seed(i as u64 * 1000 + seed);
            let made = stacks::frame(random, spec);
            let parsed = parse(&made.bytes).unwrap();
            let fits = |set: &FieldSet| set.matches(|key| packet_value(&parsed, &made.bytes, METADATA, key));
            for _ in 0..6 {
                let items = pattern(random, &made, &parsed);
                let show = || format!("{spec:?} {seed}\n{items:?}\n{parsed:?}\n{:02x?}", made.bytes);
                let rule = rule(&items).unwrap_or_else(|e| panic!("{e}\n{}", show()));
                assert!(fits(&rule.fields()), "{rule}\n{:?}\n{}", missed(&rule.fields(), &parsed, &made.bytes), show());
                used.extend(items.iter().flat_map(|item| item.fields().iter().map(|(f, _)| (item.inner, *f as u8))));
                // With one bit of one value changed, the frame no longer matches.
                let mut other = items.clone();
                let Some(item) = other.iter_mut().filter(|item| !item.fields().is_empty()).last() else { continue };
                let (field, bits) = item.fields()[random.usize(..item.fields().len())];
                let lowest = bits.mask & bits.mask.wrapping_neg();
                *item = item.clone().with(field, MaskedValue { value: bits.value ^ lowest, mask: bits.mask });
                if let Ok(other) = self::rule(&other) {
                    assert!(!fits(&other.fields()), "{other}\n{}", show());
                }
            }
        }
    }
    let all = FIELDS.iter().flat_map(|f| [(false, f.field as u8), (true, f.field as u8)]);
    let outside = [Field::PortId, Field::MetaMark, Field::MetaData].map(|f| (true, f as u8));
    let never: Vec<_> = all.filter(|f| !used.contains(f) && !outside.contains(f)).collect();
    assert!(never.is_empty(), "{never:?}");
}

fn missed(set: &FieldSet, parsed: &Parsed, bytes: &[u8]) -> Vec<(Key, MaskedValue, Option<u128>)> {
    let value = |key| packet_value(parsed, bytes, METADATA, key);
    let all = set.list().iter().map(|&(key, bits)| (key, bits, value(key)));
    all.filter(|(_, bits, value)| !value.is_some_and(|v| bits.matches(v))).collect()
}

#[test]
fn propagation_excludes_no_frame() {
    // Patterns of one frame are matched with other frames: each consequence must follow from the items for
    // every frame.
    let (mut hits, mut misses) = (0, 0);
    for (i, spec) in stacks::all_specs(30).into_iter().enumerate() {
        let random = &mut Rng::with_seed(i as u64);
        let frames: Vec<_> = (0..40).map(|_| stacks::frame(random, spec)).collect();
        let parsed: Vec<_> = frames.iter().map(|f| parse(&f.bytes).unwrap()).collect();
        for (made, own) in frames.iter().zip(&parsed) {
            let items = pattern(random, made, own);
            if items.iter().any(|item| item.kind == ItemKind::Mpls) {
                continue;
            }
            let set = rule(&items).unwrap().fields();
            for (frame, parsed) in frames.iter().zip(&parsed) {
                let value = |key| packet_value(parsed, &frame.bytes, METADATA, key);
                // Labels must not be skipped, which the items alone do not express.
                if (0..2).any(|level| header_type(parsed, level, HeaderType::Mpls).is_some_and(|bits| bits != 0)) {
                    continue;
                }
                let mut nth = BTreeMap::new();
                let plain = items.iter().all(|item| {
                    let level = u8::from(item.inner);
                    let count = nth.entry((level, item.kind)).or_insert(0u8);
                    let here = *count;
                    *count += 1;
                    let facts = item.kind.spec().header_types;
                    facts.iter().all(|&(which, code)| header_type(parsed, level, which) == Some(code))
                        && (item.kind != ItemKind::Vlan
                            || value(Key { level, nth: here, kind: KeyKind::Field(Field::VlanVid) }).is_some())
                        && item.fields().iter().all(|&(field, bits)| {
                            value(Key { level, nth: here, kind: KeyKind::Field(field) })
                                .is_some_and(|v| bits.matches(v))
                        })
                });
                assert_eq!(set.matches(value), plain, "{items:?}\n{parsed:?}\n{:02x?}", frame.bytes);
                if plain { hits += 1 } else { misses += 1 }
            }
        }
    }
    assert!(hits > 5_000 && misses > 5_000, "{hits} {misses}");
}

#[test]
fn fields_of_absent_headers_have_no_value() {
    let get = |bytes: &[u8], level, nth, field| {
        let parsed = parse(bytes).unwrap();
        packet_value(&parsed, bytes, METADATA, Key { level, nth, kind: KeyKind::Field(field) })
    };
    let mut seen = 0;
    for seed in 0..200 {
        let spec = StackSpec {
            tunnel: Some("gre"),
            inner: Some(FirstHeader::Ipv4),
            outer_ip: Some(FirstHeader::Ipv4),
            unfragmented: true,
        };
        let made = stacks::frame(&mut Rng::with_seed(seed), spec);
        let at = |name| made.marks.iter().find(|m| m.name == name && m.level == 0).unwrap().at;
        assert_eq!(get(&made.bytes, 1, 0, Field::EthDst), None);
        assert_eq!(get(&made.bytes, 1, 0, Field::EthTags), None);
        assert!(get(&made.bytes, 1, 0, Field::Ipv4Src).is_some());
        assert_eq!(get(&made.bytes, 2, 0, Field::Ipv4Src), None);
        let gre = at("gre");
        let flags = made.bytes[gre];
        let key = gre + if flags & 0x80 != 0 { 8 } else { 4 };
        let expected =
            (flags & 0x20 != 0).then(|| u32::from_be_bytes(made.bytes[key..key + 4].try_into().unwrap()).into());
        assert_eq!(get(&made.bytes, 0, 0, Field::GreKey), expected);
        assert_eq!(get(&made.bytes, 0, 0, Field::GreFlags), Some(u128::from(flags) << 8));
        seen += usize::from(expected.is_some() && flags & 0x80 != 0);
        // With all flags cleared, the header has no key.
        let mut changed = made.bytes.clone();
        changed[gre] = 0x01;
        assert_eq!(get(&changed, 0, 0, Field::GreKey), None);
    }
    assert!(seen > 10);
}
