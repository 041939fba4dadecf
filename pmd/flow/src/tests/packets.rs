//! Closed lists on random packets. A packet is a map from keys to values, consistent like real headers.

use std::collections::BTreeMap;

use super::super::masked_value::ones;
use super::super::*;
use super::random::RuleGenerator;

type Packet = BTreeMap<Key, u128>;

struct PacketBuilder<'a> {
    random: &'a mut RuleGenerator,
    set: &'a FieldSet,
    packet: Packet,
    broken: bool,
}

impl PacketBuilder<'_> {
    /// Returns the bits that the list requires; the others are random.
    fn value(&mut self, key: Key) -> u128 {
        let bits = self.set.get(key).unwrap_or(MaskedValue { value: 0, mask: 0 });
        let rest = if self.random.one_in(2) { self.random.wide() } else { u128::from(self.random.below(3)) };
        rest & ones(key.bits()) & !bits.mask | bits.value
    }

    fn put(&mut self, key: Key) -> u128 {
        let value = self.value(key);
        self.packet.insert(key, value);
        value
    }

    /// Chooses a value that the list allows, if one does.
    fn choose(&mut self, key: Key, from: &[u128]) -> u128 {
        let bits = self.set.get(key).unwrap_or(MaskedValue { value: 0, mask: 0 });
        let fitting: Vec<u128> = from.iter().copied().filter(|&v| bits.matches(v)).collect();
        let value = if fitting.is_empty() { self.random.pick(from) } else { self.random.pick(&fitting) };
        self.packet.insert(key, value);
        value
    }

    fn header(&mut self, level: u8, kind: ItemKind, nth: u8) {
        for &field in kind.spec().fields {
            self.put(Key { level, nth, kind: KeyKind::Field(field) });
        }
    }

    /// Adds a header stack. `link` and `version` are what the tunnel announces.
    fn stack(&mut self, level: u8, link: bool, version: Option<u128>) {
        let fact = |fact| Key::header_type(level, fact);
        let field = |field| Key::field(level, field);
        if level > 0 {
            self.packet.insert(fact(HeaderType::Link), link.into());
        }
        let plain = if version.is_some() { 0 } else { self.choose(fact(HeaderType::Mpls), &[0, 0, 0, 1, 2, 4]) & 1 };
        let networks: &[u128] = match version {
            Some(4) => &[4],
            Some(_) => &[6],
            None if link && plain == 0 => &[0, 1, 4, 6],
            None => &[0, 4, 6],
        };
        // These values only guide the choice: the finished packet is checked.
        let wanted = self.set.get(fact(HeaderType::Transport)).map_or(0, |bits| bits.value);
        let inner = self.set.list().iter().any(|(key, _)| key.level > level);
        let networks: Vec<u128> =
            networks.iter().copied().filter(|&n| wanted == 0 || n >= 4 || networks.len() == 1).collect();
        let network = self.choose(fact(HeaderType::Network), &networks);
        let protocols: &[u128] = match (wanted, inner) {
            (0, false) => &[1, 4, 6, 17, 17, 17, 41, 47, 47, 50, 58, 99],
            (0, true) => &[4, 41, 17, 17, 47],
            _ => &[wanted],
        };
        if link {
            self.header(level, ItemKind::Eth, 0);
            let tags = self.choose(field(Field::EthTags), &[0, 1, 3]);
            for nth in 0..tags.count_ones() as u8 {
                self.header(level, ItemKind::Vlan, nth);
            }
            let known = match network {
                1 => Some(0x0806),
                4 => Some(0x0800),
                6 => Some(0x86dd),
                _ => None,
            };
            if plain == 1 {
                self.choose(field(Field::EthType), &[0x8847, 0x8848]);
            } else if let Some(known) = known {
                self.packet.insert(field(Field::EthType), known);
            }
        }
        let mut labels = plain;
        let mut inside: Option<(bool, Option<u128>)> = None;
        let (mut transport, mut tunnel) = (0, 0);
        if plain == 1 {
            self.labels(level);
            if network == 0 {
                inside = Some((true, None));
            }
        }
        if network == 1 {
            self.header(level, ItemKind::Arp, 0);
        }
        if network == 4 || network == 6 {
            let (protocol, later) = self.ip(level, network == 4, protocols);
            let known = [6, 17, 47, 50, if network == 4 { 1 } else { 58 }];
            if known.contains(&protocol) && !later {
                transport = protocol;
            }
            if (protocol == 4 || protocol == 41) && !later {
                inside = Some((false, Some(if protocol == 4 { 4 } else { 6 })));
            }
        }
        let kind = match transport {
            1 => Some(ItemKind::Icmp),
            6 => Some(ItemKind::Tcp),
            17 => Some(ItemKind::Udp),
            47 => Some(ItemKind::Gre),
            50 => Some(ItemKind::Esp),
            58 => Some(ItemKind::Icmpv6),
            _ => None,
        };
        if let Some(kind) = kind {
            self.header(level, kind, 0);
        }
        let by_type = |ethertype| match ethertype {
            0x6558 => Some((true, None)),
            0x0800 => Some((false, Some(4))),
            0x86dd => Some((false, Some(6))),
            _ => None,
        };
        if transport == 47 {
            tunnel = 4;
            if self.packet[&field(Field::GreFlags)] & 0x2000 == 0 {
                self.packet.remove(&field(Field::GreKey));
            }
            let proto = self.protocol(&[field(Field::GreProto)], &[0x6558, 0x0800, 0x86dd, 0x8847, 0x8848]);
            inside = by_type(proto);
            if proto == 0x8847 || proto == 0x8848 {
                labels |= 4;
                // The keys refer to the first label stack.
                if plain == 0 {
                    self.labels(level);
                }
                inside = Some((self.link_inside(), None));
            }
        }
        if transport == 17 {
            tunnel = self.choose(fact(HeaderType::Tunnel), &[0, 1, 2, 3]);
            inside = match tunnel {
                1 => {
                    self.header(level, ItemKind::Vxlan, 0);
                    Some((true, None))
                }
                2 => {
                    self.header(level, ItemKind::VxlanGpe, 0);
                    match self.protocol(&[field(Field::GpeNext)], &[1, 2, 3]) {
                        3 => Some((true, None)),
                        1 => Some((false, Some(4))),
                        2 => Some((false, Some(6))),
                        _ => None,
                    }
                }
                3 => {
                    self.header(level, ItemKind::Geneve, 0);
                    let proto = self.protocol(&[field(Field::GeneveProto)], &[0x6558, 0x0800, 0x86dd]);
                    by_type(proto)
                }
                _ if plain == 0 && self.choose(fact(HeaderType::Mpls), &[0, 2]) == 2 => {
                    labels |= 2;
                    self.labels(level);
                    Some((self.link_inside(), None))
                }
                _ => None,
            };
        }
        self.packet.insert(fact(HeaderType::Mpls), labels);
        self.packet.insert(fact(HeaderType::Transport), transport);
        self.packet.insert(fact(HeaderType::Tunnel), tunnel);
        if let Some((link, version)) = inside.filter(|_| level == 0) {
            self.stack(1, link, version);
        }
    }

    /// True if the inner stack starts with Ethernet, where the tunnel header does not tell.
    fn link_inside(&mut self) -> bool {
        let wanted = self.set.get(Key::header_type(1, HeaderType::Link));
        wanted.map_or(self.random.one_in(2), |bits| bits.value == 1)
    }

    /// Gives these keys the same value: a known protocol, or the value that the list requires.
    fn protocol(&mut self, keys: &[Key], known: &[u128]) -> u128 {
        let wanted = keys
            .iter()
            .filter_map(|key| self.set.get(*key))
            .try_fold(MaskedValue { value: 0, mask: 0 }, MaskedValue::and);
        let Some(bits) = wanted else { return self.impossible().0 };
        let fitting: Vec<u128> = known.iter().copied().filter(|&v| bits.matches(v)).collect();
        let value = match fitting.is_empty() {
            true => self.random.wide() & ones(keys[0].bits()) & !bits.mask | bits.value,
            false => self.random.pick(&fitting),
        };
        self.packet.extend(keys.iter().map(|key| (*key, value)));
        value
    }

    /// Marks the packet as impossible.
    fn impossible(&mut self) -> (u128, bool) {
        self.broken = true;
        (255, false)
    }

    fn labels(&mut self, level: u8) {
        let count = 1 + self.random.below(4) as u8;
        for nth in 0..count {
            self.header(level, ItemKind::Mpls, nth);
            let bottom = u128::from(nth + 1 == count);
            self.packet.insert(Key { level, nth, kind: KeyKind::Field(Field::MplsBos) }, bottom);
        }
    }

    /// Adds an IP header. Returns its protocol, and whether it is a later fragment.
    fn ip(&mut self, level: u8, v4: bool, protocols: &[u128]) -> (u128, bool) {
        let field = |field| Key::field(level, field);
        if v4 {
            self.header(level, ItemKind::Ipv4, 0);
            let frag = self.choose(field(Field::Ipv4Frag), &[0, 0, 0, 1, 3]);
            let offset = self.value(field(Field::Ipv4Offset));
            let more = self.value(field(Field::Ipv4Mf));
            let (offset, more) = match frag {
                0 => (0, 0),
                1 => (0, 1),
                _ => (offset.max(1), more),
            };
            self.packet.extend([(field(Field::Ipv4Offset), offset), (field(Field::Ipv4Mf), more)]);
            return (self.protocol(&[field(Field::Ipv4Proto)], protocols), frag == 3);
        }
        self.header(level, ItemKind::Ipv6, 0);
        let mut ext = self.value(field(Field::Ipv6Ext));
        if self.set.get(field(Field::Ipv6Ext)).is_none() && self.random.one_in(2) {
            ext = 0;
        }
        let numbers = [(0, 1), (43, 2), (44, 4), (60, 8), (51, 16)];
        let present: Vec<u128> = numbers.iter().filter(|(_, bit)| ext & bit != 0).map(|(number, _)| *number).collect();
        let frag = if ext & 4 != 0 { self.choose(field(Field::Ipv6Frag), &[0, 1, 3]) } else { 0 };
        let proto = if present.is_empty() {
            self.protocol(&[field(Field::Ipv6Proto), field(Field::Ipv6Next)], protocols)
        } else {
            self.choose(field(Field::Ipv6Next), &present);
            self.protocol(&[field(Field::Ipv6Proto)], protocols)
        };
        if frag != 3 && numbers.iter().any(|(number, _)| *number == proto) {
            // The value is not a protocol but another extension header.
            return self.impossible();
        }
        self.packet.extend([(field(Field::Ipv6Ext), ext), (field(Field::Ipv6Frag), frag)]);
        (proto, frag == 3)
    }
}

/// Creates a packet that matches the list, if possible.
fn packet(random: &mut RuleGenerator, set: &FieldSet) -> Packet {
    for _ in 0..20 {
        let mut maker = PacketBuilder { random, set, packet: Packet::new(), broken: false };
        maker.header(0, ItemKind::Port, 0);
        maker.header(0, ItemKind::Meta, 0);
        maker.stack(0, true, None);
        if !maker.broken {
            return maker.packet;
        }
    }
    Packet::new()
}

fn fits(set: &FieldSet, packet: &Packet) -> bool {
    set.matches(|key| packet.get(&key).copied())
}

/// Returns a packet that matches the list.
fn witness(random: &mut RuleGenerator, set: &FieldSet) -> Option<Packet> {
    (0..1000).map(|_| packet(random, set)).find(|packet| fits(set, packet))
}

fn list(random: &mut RuleGenerator) -> (Vec<Item>, FieldSet) {
    loop {
        let pattern = random.pattern();
        if let Ok(rule) = Rule::new(Direction::Ingress, 0, pattern.clone(), vec![Action::Drop]) {
            return (pattern, rule.fields());
        }
    }
}

fn text(pattern: &[Item]) -> String {
    Rule::new(Direction::Ingress, 0, pattern.to_vec(), vec![Action::Drop]).unwrap().to_string()
}

#[test]
fn every_valid_pattern_matches_some_packet() {
    let mut without = Vec::new();
    for seed in 0..1_500 {
        let random = &mut RuleGenerator::new(seed);
        let (pattern, set) = list(random);
        if witness(random, &set).is_none() {
            without.push(format!("seed {seed}: {}\n{set:?}", text(&pattern)));
        }
    }
    assert!(without.is_empty(), "{}", without.join("\n"));
}

#[test]
fn closed_lists_match_what_their_items_match() {
    // Consequences follow from the items, so they must not exclude a packet.
    let mut hits = 0;
    for seed in 0..3_000 {
        let random = &mut RuleGenerator::new(seed);
        let (pattern, set) = list(random);
        for _ in 0..40 {
            let packet = packet(random, &set);
            let mut nth = BTreeMap::new();
            let plain = pattern.iter().all(|item| {
                let level = u8::from(item.inner);
                let n = nth.entry((level, item.kind)).or_insert(0u8);
                let here = *n;
                *n += 1;
                let has = |fact, code: u8| {
                    level == 0 && fact == HeaderType::Link
                        || packet.get(&Key::header_type(level, fact)) == Some(&code.into())
                };
                item.kind.spec().header_types.iter().all(|&(fact, code)| has(fact, code))
                    && item.fields().iter().all(|&(field, bits)| {
                        packet
                            .get(&Key { level, nth: here, kind: KeyKind::Field(field) })
                            .is_some_and(|v| bits.matches(*v))
                    })
                    && (item.kind != ItemKind::Vlan
                        || packet.contains_key(&Key { level, nth: here, kind: KeyKind::Field(Field::VlanVid) }))
            });
            // Labels must not be skipped, which the items alone do not express.
            let labels = [0, 1]
                .iter()
                .any(|&level| packet.get(&Key::header_type(level, HeaderType::Mpls)).is_some_and(|v| *v != 0));
            if plain && !labels && !pattern.iter().any(|item| item.kind == ItemKind::Mpls) {
                assert!(fits(&set, &packet), "seed {seed}: {}\n{set:?}\n{packet:?}", text(&pattern));
                hits += 1;
            }
        }
    }
    assert!(hits > 10_000, "{hits}");
}

#[test]
fn overlap_and_cover_agree_with_packets() {
    let (mut overlapping, mut covering, mut apart) = (0, 0, 0);
    let mut without: Vec<String> = Vec::new();
    for seed in 0..3_000 {
        let random = &mut RuleGenerator::new(seed);
        let (pa, a) = list(random);
        // Half of the patterns are relatives of the first one, with fewer or other fields.
        let (pb, b) = if random.one_in(2) {
            list(random)
        } else {
            let mut pattern = pa.clone();
            for item in &mut pattern {
                for (field, _) in item.clone().fields() {
                    match random.below(4) {
                        0 => *item = item.clone().with(*field, MaskedValue { value: 0, mask: 0 }),
                        1 => *item = item.clone().with(*field, random.bits(*field)),
                        _ => {}
                    }
                }
            }
            match Rule::new(Direction::Ingress, 0, pattern.clone(), vec![Action::Drop]) {
                Ok(rule) => (pattern, rule.fields()),
                Err(_) => list(random),
            }
        };
        let show = || format!("seed {seed}\n{}\n{}\n{a:?}\n{b:?}", text(&pa), text(&pb));
        assert!(covers(&a, &a) && overlaps(&a, &a), "{}", show());
        assert_eq!(overlaps(&a, &b), overlaps(&b, &a), "{}", show());
        match a.and(&b) {
            Some(both) => {
                overlapping += 1;
                let Some(found) = witness(random, &both) else {
                    without.push(show());
                    continue;
                };
                assert!(fits(&a, &found) && fits(&b, &found), "{}", show());
                assert!(covers(&a, &both) && covers(&b, &both), "{}", show());
            }
            None => {
                apart += 1;
                for guide in [&a, &b] {
                    for _ in 0..30 {
                        let packet = packet(random, guide);
                        assert!(!(fits(&a, &packet) && fits(&b, &packet)), "{}\n{packet:?}", show());
                    }
                }
            }
        }
        if covers(&a, &b) {
            covering += 1;
            assert!(overlaps(&a, &b));
            for _ in 0..30 {
                let packet = packet(random, &b);
                assert!(!fits(&b, &packet) || fits(&a, &packet), "{}\n{packet:?}", show());
            }
        }
    }
    assert!(without.is_empty(), "{}", without.join("\n"));
    assert!(overlapping > 500 && covering > 200 && apart > 500, "{overlapping} {covering} {apart}");
}

#[test]
fn covers_finds_known_relations() {
    let set = |text: &str| format!("ingress: {text} => drop").parse::<Rule>().unwrap().fields();
    let yes = [
        ("any", "udp dst 53"),
        ("ipv4", "ipv4 / udp"),
        ("eth type 0x0800", "ipv4 dst 10.0.0.1"),
        ("ipv4 proto 17", "ipv4 / udp dst 53"),
        ("ipv4 dst 10.0.0.0/8", "ipv4 dst 10.1.0.0/16 / tcp"),
        ("udp", "ipv4 / vxlan vni 5"),
        ("gre flags key", "gre key 5"),
        ("eth tags any", "vlan / vlan"),
        ("gre proto 0x6558", "gre / eth"),
        ("ipv6 proto 58", "ipv6 next 58"),
        ("vxlan / eth", "vxlan / ipv4"),
    ];
    for (a, b) in yes {
        assert!(covers(&set(a), &set(b)) && !covers(&set(b), &set(a)), "{a} / {b}");
    }
    let apart = [
        ("ipv4", "ipv6"),
        ("tcp", "ipv4 proto 17"),
        ("eth tags none", "vlan vid 5"),
        ("ipv4 frag later", "udp"),
        ("vxlan", "tcp"),
        ("vxlan", "udp / mpls"),
        ("eth / mpls", "eth / ipv4"),
        ("eth / ipv4", "eth type 0x0806"),
        ("gre proto 0x0800", "gre / inner eth"),
    ];
    for (a, b) in apart {
        assert!(!overlaps(&set(a), &set(b)), "{a} / {b}");
    }
}
