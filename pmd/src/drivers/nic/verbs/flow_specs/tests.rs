//! Comparison with bytes of libibverbs, and translations in both directions.

use super::*;
use wirepath_flow::Reason;
use wirepath_rule_oracle::{Rng, generate};

fn hex(text: &str) -> Vec<u8> {
    let digits = text.replace([' ', '|'], "");
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

fn of(kind: u32, inner: bool) -> Spec {
    Spec::empty(kind, inner).unwrap()
}

fn none(_: usize) -> Option<Action> {
    None
}

/// The manual page's example, corrected: destination address 66:11:22:33:44:55, source address 11.134.200.6.
/// The bytes were produced by libibverbs itself.
#[test]
#[cfg(target_endian = "little")]
fn bytes_as_libibverbs_has_them() {
    let rule: Rule = "ingress prio 0: eth dst 66:11:22:33:44:55 / ipv4 src 11.134.200.6 => queue 0".parse().unwrap();
    let Translation { attr, specs, objects, destination } = to_verbs(&rule, 1).unwrap();
    assert_eq!((objects, destination), (vec![], Some(Action::Queue(0))));
    let user = hex("00000000 00000000 54000000 02010000 00000000
         20000000 28006611 22334455 00000000 00000000 0000ffff ffffffff 00000000 00000000 00000000
         30000000 18000000 0b86c806 00000000 ffffffff 00000000"
        .replace('\n', "")
        .as_str());
    assert_eq!(user.len(), 84);
    assert_eq!(encode(&attr, &specs), user);
    let kernel = hex("00000000 0f000000 | 00000000 4000 0000 02000001 00000000
         20000000 28000000 66112233 44550000 00000000 00000000 ffffffff ffff0000 00000000 00000000
         30000000 18000000 0b86c806 00000000 ffffffff 00000000"
        .replace('\n', "")
        .as_str());
    assert_eq!(kernel.len(), 88);
    assert_eq!(kernel_command(&attr, &specs, 0x0f), kernel);
    assert_eq!(decode(&user), Ok((attr, specs.clone())));
    assert_eq!(from_verbs(&attr, &specs, Some(Action::Queue(0)), none), Ok(rule));
}

#[test]
fn sizes_of_the_manual() {
    let sizes = [
        (0x20, 40),
        (0x30, 24),
        (0x31, 88),
        (0x32, 32),
        (0x34, 24),
        (0x40, 16),
        (0x41, 16),
        (0x50, 16),
        (0x51, 24),
        (0x60, 16),
    ];
    assert_eq!(LAYOUTS.iter().map(|l| (l.kind, l.size)).collect::<Vec<_>>(), sizes);
    for layout in LAYOUTS {
        assert!(
            layout.value + layout.filter == layout.mask
                && layout.mask + layout.filter <= layout.size
                && layout.size % 4 == 0
        );
    }
    // The bytes passed to the kernel for specs with another layout there: eth, ipv4_ext, tcp, tag.
    let attr = FlowAttr { flow_type: FlowType::NORMAL, priority: 0, port: 1, flags: 0 };
    let size = |spec| kernel_command(&attr, &[spec], 0).len() - 24;
    assert_eq!(
        [size(of(ETH, false)), size(of(IPV4_EXT, true)), size(of(TCP, false)), size(Spec::Tag(1))],
        [40, 32, 16, 16]
    );
    assert_eq!(kernel_command(&attr, &[of(IPV4_EXT, true)], 0)[24..28], (0x30 | INNER).to_ne_bytes());
}

#[test]
fn every_spec_translates() {
    let cases: &[(&str, &[u32])] = &[
        ("eth src 02:00:00:00:00:01 type 0x0800 / vlan vid 5 pcp 3 dei 1", &[0x20]),
        ("vlan vid 1 mask 0x001", &[0x20]),
        ("ipv4 src 10.0.0.0/8 dst 10.0.0.1", &[0x30]),
        ("ipv4 proto 47 dscp 46 ecn 1 ttl 3 df 1 mf 0", &[0x32]),
        ("ipv6 src fd00::/8 dst ::1 next 17 dscp 1 ecn 2 flow 0x12345 hops 7", &[0x31]),
        ("ipv4 / esp spi 0x00000001 seq 2", &[0x30, 0x34]),
        ("tcp src 1 dst 2", &[0x40]),
        (
            "udp dst 4789 / vxlan vni 42 / eth dst 02:00:00:00:00:01 / ipv6 / tcp dst 80",
            &[0x41, 0x50, 0x120, 0x131, 0x140],
        ),
        ("ipv4 / gre flags key proto 0x0800 key 7 / ipv4 dst 10.0.0.1 / udp", &[0x30, 0x51, 0x130, 0x141]),
        ("eth / mpls label 5 tc 1 bos 1 ttl 9 / ipv4", &[0x20, 0x60, 0x30]),
        ("udp dst 6635 / mpls label 5 / ipv4", &[0x41, 0x60, 0x130]),
        ("gre / mpls label 5 / inner mpls label 6", &[0x51, 0x60, 0x160]),
    ];
    for (pattern, kinds) in cases {
        let rule: Rule = format!("egress prio 15: {pattern} => count, mark 9, drop").parse().unwrap();
        let t = to_verbs(&rule, 2).unwrap_or_else(|e| panic!("{pattern}: {e}"));
        let found: Vec<u32> = t.specs.iter().map(Spec::kind).collect();
        assert_eq!(found, [kinds, &[COUNT, TAG, DROP][..]].concat(), "{pattern}");
        assert_eq!((t.attr.flags, t.attr.priority, t.attr.port), (EGRESS, 15, 2));
        let back = from_verbs(&t.attr, &t.specs, None, none).unwrap_or_else(|e| panic!("{pattern}: {e}"));
        assert_eq!(back.fields(), rule.fields(), "{pattern}: {back}");
        assert_eq!(back.actions(), rule.actions());
    }
}

#[test]
fn default_flows() {
    for (flow_type, text) in [
        (FlowType::ALL_DEFAULT, "ingress prio 65537: any => queue 1"),
        (FlowType::MC_DEFAULT, "ingress prio 65536: eth dst 01:00:00:00:00:00 mask 01:00:00:00:00:00 => queue 1"),
    ] {
        let rule: Rule = text.parse().unwrap();
        let t = to_verbs(&rule, 1).unwrap();
        assert_eq!((t.attr.flow_type, t.specs.len()), (flow_type, 0));
        assert_eq!(from_verbs(&t.attr, &t.specs, t.destination, none), Ok(rule));
    }
}

#[test]
fn untranslatable_rules_are_errors() {
    let to = |text: &str| to_verbs(&text.parse().unwrap(), 1).unwrap_err().to_string();
    let cases = [
        ("ingress: port id 1 => drop", "item 1: no flow spec matches port"),
        ("ingress: eth tags none => drop", "item 1: the flow spec has no field for eth tags"),
        ("ingress: eth / vlan => drop", "item 2: a flow spec can require a VLAN tag only by a mask on its fields"),
        ("ingress: vlan vid 1 / vlan vid 2 => drop", "item 2: no flow spec matches a second vlan"),
        ("ingress: tcp flags syn => drop", "item 1: the flow spec has no field for tcp flags"),
        ("ingress: geneve vni 1 => drop", "item 1: no flow spec matches geneve"),
        ("ingress: vxlan / udp / vxlan => drop", "item 3: no flow spec matches inner vxlan"),
        ("ingress: any => kernel", "action 1: no flow spec has the action kernel"),
        ("ingress prio 65536: any => drop", "priority 65536 is above 65535"),
    ];
    for (text, expected) in cases {
        assert_eq!(to(text), expected);
    }
    let attr = |flow_type, flags| FlowAttr { flow_type, priority: 0, port: 1, flags };
    let from = |attr: FlowAttr, specs: &[Spec]| from_verbs(&attr, specs, Some(Action::Drop), none);
    assert_eq!(from(attr(FlowType::SNIFFER, 0), &[]), Err(TranslateError::FlowType(3)));
    assert_eq!(from(attr(FlowType::NORMAL, DONT_TRAP), &[]), Err(TranslateError::Flags(2)));
    let normal = attr(FlowType::NORMAL, 0);
    assert_eq!(from(normal, &[Spec::Handle(5)]), Err(TranslateError::UnknownHandle { index: 0 }));
    let wide = Spec::Vxlan { inner: false, value: TunnelFilter::default(), mask: TunnelFilter { tunnel_id: u32::MAX } };
    assert_eq!(
        from(normal, &[wide]),
        Err(TranslateError::MaskBits { index: 0, field: "tunnel_id", bits: 0xff00_0000 })
    );
    assert!(matches!(from(normal, &[of(ETH, false), of(ETH, false)]), Err(TranslateError::Rule(_))));
    assert!(matches!(from(normal, &[of(IPV4, false), of(IPV6, false)]), Err(TranslateError::Rule(_))));
}

#[test]
fn specs_in_any_order() {
    let rule: Rule =
        "ingress prio 1: eth / ipv4 / udp dst 4789 / vxlan vni 1 / eth / ipv4 / tcp dst 80 => drop".parse().unwrap();
    let t = to_verbs(&rule, 1).unwrap();
    let mut specs = t.specs.clone();
    specs.reverse();
    assert_eq!(from_verbs(&t.attr, &specs, None, none), Ok(rule));
}

#[test]
fn random_rules_round_trip() {
    let mut translated = 0;
    for seed in 0..60_000 {
        let rule = generate::rule(&mut Rng::new(seed), &[]);
        let Ok(t) = to_verbs(&rule, 1) else { continue };
        translated += 1;
        assert_eq!(decode(&encode(&t.attr, &t.specs)), Ok((t.attr, t.specs.clone())), "seed {seed}: {rule}");
        let object = |at| t.objects.iter().find(|(i, _)| *i == at).map(|(_, action)| action.clone());
        let back = from_verbs(&t.attr, &t.specs, t.destination.clone(), object)
            .unwrap_or_else(|e| panic!("seed {seed}: {rule}: {e}"));
        assert_eq!(back.fields(), rule.fields(), "seed {seed}: {rule}\n{back}");
        assert_eq!(
            (back.actions(), back.priority(), back.direction()),
            (rule.actions(), rule.priority(), rule.direction()),
            "seed {seed}: {rule}"
        );
        let again = to_verbs(&back, 1).unwrap();
        assert_eq!((again.attr, again.specs), (t.attr, t.specs), "seed {seed}: {rule}");
    }
    assert!(translated > 500, "{translated}");
}

/// Returns a flow of one spec with these mask and value bytes in its filters.
fn one_spec(layout: &SpecLayout, inner: bool, mask: &[u8], value: &[u8]) -> Vec<u8> {
    let attr = FlowAttr { flow_type: FlowType::NORMAL, priority: 3, port: 1, flags: 0 };
    let mut bytes = encode(&attr, &[of(layout.kind, inner)]);
    bytes[ATTR_LEN + layout.mask..][..mask.len()].copy_from_slice(mask);
    bytes[ATTR_LEN + layout.value..][..value.len()].copy_from_slice(value);
    bytes
}

/// Converts the bytes of a flow to a rule and back.
fn through_a_rule(bytes: &[u8]) -> Result<Vec<u8>, TranslateError> {
    let (attr, specs) = decode(bytes).unwrap();
    let rule = from_verbs(&attr, &specs, Some(Action::Drop), none)?;
    let text: Rule = rule.to_string().parse().unwrap();
    assert_eq!(text, rule);
    let mut back = to_verbs(&text, attr.port).unwrap();
    assert_eq!(back.specs.pop(), Some(Spec::Drop));
    Ok(encode(&back.attr, &back.specs))
}

/// Replaces a long IPv4 spec that uses none of its extra fields by the short one; all other bytes stay.
fn canonical(bytes: &[u8]) -> Vec<u8> {
    let (attr, mut specs) = decode(bytes).unwrap();
    for spec in &mut specs {
        if let Spec::Ipv4Ext { inner, value, mask } = *spec
            && (mask.proto, mask.tos, mask.ttl, mask.flags) == (0, 0, 0, 0)
        {
            *spec = Spec::Ipv4 {
                inner,
                value: Ipv4Filter { src_ip: value.src_ip, dst_ip: value.dst_ip },
                mask: Ipv4Filter { src_ip: mask.src_ip, dst_ip: mask.dst_ip },
            };
        }
    }
    encode(&attr, &specs)
}

#[test]
fn every_spec_bit_round_trips() {
    for layout in LAYOUTS {
        for inner in [false, true] {
            if inner && !layout.inner {
                continue;
            }
            let mut known = vec![0u8; layout.filter];
            let mut strange = 0;
            for bit in 0..layout.filter * 8 {
                let mut mask = vec![0u8; layout.filter];
                mask[bit / 8] = 1 << (bit % 8);
                for value in [vec![0u8; layout.filter], mask.clone()] {
                    let bytes = one_spec(layout, inner, &mask, &value);
                    match through_a_rule(&bytes) {
                        Ok(back) => {
                            assert_eq!(back, canonical(&bytes), "type {:#x}, bit {bit}", layout.kind);
                            known[bit / 8] |= mask[bit / 8];
                        }
                        Err(TranslateError::MaskBits { .. }) => strange += 1,
                        Err(other) => panic!("type {:#x}, bit {bit}: {other}", layout.kind),
                    }
                }
            }
            // Bits without a meaning: beyond the 20 of a flow label, in the byte of the three IPv4 flags,
            // beyond the 24 of a VNI; and filler.
            let filler =
                layout.filter * 8 - of(layout.kind, inner).fields().iter().map(|f| usize::from(f.bits)).sum::<usize>();
            let headerless = match layout.kind {
                IPV6 => 12,
                IPV4_EXT => 6,
                VXLAN => 8,
                _ => 0,
            };
            let silent = strange / 2;
            assert!(silent == headerless || silent == headerless + filler, "type {:#x}: {silent}", layout.kind);
            let mut random = Rng::new(u64::from(layout.kind));
            for _ in 0..500 {
                let sparse = random.one_in(2);
                let mask: Vec<u8> = known
                    .iter()
                    .map(|k| k & random.next() as u8 & if sparse { random.next() as u8 } else { 0xff })
                    .collect();
                let value: Vec<u8> = mask.iter().map(|m| m & random.next() as u8).collect();
                let bytes = one_spec(layout, inner, &mask, &value);
                match through_a_rule(&bytes) {
                    Ok(back) => assert_eq!(back, canonical(&bytes), "type {:#x}", layout.kind),
                    // Two fields that exclude each other.
                    Err(TranslateError::Rule(error)) => assert_eq!(error.reason, Reason::Contradiction, "{error}"),
                    Err(other) => panic!("type {:#x}: {other}", layout.kind),
                }
            }
        }
    }
}

#[test]
fn any_bytes_do_no_harm() {
    for seed in 0..20_000 {
        let mut random = Rng::new(seed);
        let rule = generate::rule(&mut random, &[]);
        let Ok(t) = to_verbs(&rule, 1) else { continue };
        let mut bytes = encode(&t.attr, &t.specs);
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.next() as u8;
        }
        if random.one_in(4) {
            bytes.truncate(random.below(bytes.len() as u64) as usize);
        }
        if let Ok((attr, specs)) = decode(&bytes) {
            assert_eq!(decode(&encode(&attr, &specs)), Ok((attr, specs.clone())));
            let _ = from_verbs(&attr, &specs, Some(Action::Queue(0)), none);
        }
    }
}
