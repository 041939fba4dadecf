use wirepath_nic_defs::mlx5::{
    CRITERIA_INNER, CRITERIA_MISC, CRITERIA_MISC5, CRITERIA_OUTER, header, misc, misc2, misc5,
};

use super::probe::{EXCLUDED_PATTERNS, ITEM_PROBES, UNFIXED_CHECKSUMS};
use super::*;
use wirepath_flow::{FieldSet, Rule};

fn fields(pattern: &str) -> FieldSet {
    format!("ingress: {pattern} => count").parse::<Rule>().unwrap_or_else(|e| panic!("{pattern}: {e}")).fields()
}

fn refused_for(pattern: &str) -> String {
    matcher::parameters(&fields(pattern)).unwrap_err()
}

#[test]
fn patterns_become_match_parameters() {
    let (mask, value) = matcher::parameters(&fields("ipv4 dst 10.0.0.0/8 / udp dst 4789 / vxlan vni 42")).unwrap();
    assert_eq!(mask.criteria(), CRITERIA_OUTER | CRITERIA_MISC | CRITERIA_MISC5);
    let both = |field| (mask.get(field), value.get(field));
    assert_eq!(both(misc5::tunnel_header(0)), (0x0800_0000, 0x0800_0000), "a VNI is there");
    assert_eq!(both(header::DST_IPV4), (0xff00_0000, 0x0a00_0000));
    assert_eq!(both(header::ETHERTYPE), (0xffff, 0x0800), "no labels in front");
    assert_eq!((both(header::IP_VERSION), both(header::IP_PROTOCOL)), ((15, 4), (0xff, 17)));
    assert_eq!((both(header::UDP_DPORT), both(misc::VXLAN_VNI)), ((0xffff, 4789), (0xff_ffff, 42)));
    assert_eq!(both(header::FRAGMENT), (1, 0));
    let (mask, value) =
        matcher::parameters(&fields("ipv4 / udp dst 4789 / vxlan / vlan tpid 0x88a8 vid 7 / ipv6 hops 3")).unwrap();
    assert_eq!(mask.criteria(), CRITERIA_OUTER | CRITERIA_INNER | CRITERIA_MISC5);
    let inner = |field: wirepath_nic_defs::mlx5::MatchField| (mask.get(field.inner()), value.get(field.inner()));
    assert_eq!((inner(header::SVLAN_TAG), inner(header::FIRST_VID)), ((1, 1), (0xfff, 7)));
    assert_eq!((inner(header::TTL), inner(header::ETHERTYPE)), ((0xff, 3), (0xffff, 0x86dd)));
    let (mask, value) = matcher::parameters(&fields("eth type 0x8847 / mpls label 5 bos 1")).unwrap();
    assert_eq!((mask.get(misc2::OUTER_MPLS), value.get(misc2::OUTER_MPLS)), (0xffff_f100, 0x0000_5100));
}

/// The flags of optional GRE fields have bits of their own. All other flags are in the first word.
#[test]
fn gre_flags_become_fields_or_a_word() {
    let both = |pattern: &str, field| {
        let (mask, value) = matcher::parameters(&fields(pattern)).unwrap();
        (mask.get(field), value.get(field))
    };
    let key = "ipv4 / gre flags 0x2000 mask 0xb000 proto 0x6558 key 7";
    assert_eq!([misc::GRE_C, misc::GRE_K, misc::GRE_S].map(|field| both(key, field)), [(1, 0), (1, 1), (1, 0)]);
    assert_eq!(both(key, misc5::tunnel_header(0)), (0, 0));
    let exact = "ipv4 / gre flags 0x2000 proto 0x6558 key 7";
    assert_eq!(both(exact, misc5::tunnel_header(0)), (0xffff_ffff, 0x2000_6558));
    assert_eq!((both(exact, misc::GRE_KEY), both(exact, misc::GRE_PROTOCOL)), ((0xffff_ffff, 7), (0xffff, 0x6558)));
}

/// A device without a word for GRE compares 0, so a word of zeros would match the packets of all GRE rules.
#[test]
fn gre_flags_of_zero_need_a_proto() {
    for pattern in ["ipv4 / gre flags 0", "ipv4 / gre flags 0 mask 0x4007", "ipv4 / gre flags 0 proto 0"] {
        assert_eq!(refused_for(pattern), "comparing gre flags of 0 without a nonzero proto", "{pattern}");
    }
    for pattern in
        ["ipv4 / gre flags 0 proto 0x6558", "ipv4 / gre flags 0 mask 0x4007 key 7", "ipv4 / gre flags 0 mask 0xb000"]
    {
        assert!(matcher::parameters(&fields(pattern)).is_ok(), "{pattern}");
    }
}

/// Only UDP and TCP have integrity bits of layer 4.
#[test]
fn valid_headers_are_those_that_exist() {
    let layer4 = [header::L4_OK, header::L4_CHECKSUM_OK];
    for (pattern, expected) in [
        ("ipv4 / udp dst 4789 / vxlan", (1, 1, 1)),
        ("ipv4 / gre proto 0x6558", (1, 1, 0)),
        ("ipv4 proto 4", (1, 1, 0)),
        ("ipv6 / gre proto 0x6558", (1, 0, 0)),
        ("ipv6 / udp dst 4789 / vxlan", (1, 0, 1)),
    ] {
        let (mut mask, mut value) = matcher::parameters(&fields(pattern)).unwrap();
        matcher::require_valid_headers(&mut mask, &mut value);
        let bits = |field| (mask.get(field), value.get(field));
        let (l3, ipv4, l4) = expected;
        assert_eq!((bits(header::L3_OK), bits(header::IPV4_CHECKSUM_OK)), ((l3, l3), (ipv4, ipv4)), "{pattern}");
        assert_eq!(layer4.map(bits), [(l4, l4); 2], "{pattern}");
    }
}

#[test]
fn unsupported_matches_are_refused() {
    for (pattern, why) in [
        ("udp dst 53", "finding out"),
        ("ipv4 / gre / ipv4", "finding out"),
        ("ipv4 / udp dst 4788 / vxlan", "the type of the tunnel"),
        ("ipv4 / udp dst 4789 / vxlan flags 0x00", "no packet matches"),
        ("ipv4 / udp dst 4790 / vxlan-gpe flags 0x1c", "no packet matches"),
        ("ipv4 id 5", "ipv4 id"),
        ("arp op 1", "arp op"),
        ("ipv4 / tcp window 1", "tcp window"),
        ("ipv4 frag later", "finding out"),
        ("ipv4 frag first", "ipv4 frag"),
    ] {
        let refused = refused_for(pattern);
        assert!(refused.contains(why), "{pattern}: {refused}");
    }
}

#[test]
fn offered_fields_can_be_compared() {
    for (kind, inner, _, comparable, implies, sample) in ITEM_PROBES {
        let all = fields(sample);
        matcher::parameters(&all).unwrap_or_else(|why| panic!("{sample}: {why}"));
        // Each field alone, with the headers of the sample.
        for (field, masks) in *comparable {
            let spec = field.spec();
            for mask in [1u128, wirepath_flow::MaskedValue::exact(0, spec.bits).mask] {
                if !masks.allow(mask, spec.bits) {
                    continue;
                }
                let text: Rule = format!("ingress: {sample} => count").parse().unwrap();
                let pattern = text.pattern().iter().map(|item| {
                    let plain = item.kind == *kind && item.inner == *inner;
                    let item_kept = if plain { wirepath_flow::Item::new(item.kind) } else { item.clone() };
                    let item_kept = if plain && *inner { item_kept.as_inner() } else { item_kept };
                    let tpid = item.get(wirepath_flow::Field::VlanTpid).filter(|_| plain);
                    let item_kept =
                        tpid.map_or(item_kept.clone(), |bits| item_kept.with(wirepath_flow::Field::VlanTpid, bits));
                    if plain {
                        item_kept.with(*field, wirepath_flow::MaskedValue { value: 0, mask })
                    } else {
                        item_kept
                    }
                });
                let rule = Rule::new(wirepath_flow::Direction::Ingress, 0, pattern.collect(), vec![Action::Count]);
                // A rule that contradicts the sample, or that matches no packet, proves nothing.
                let Ok(rule) = rule else { continue };
                if *field == wirepath_flow::Field::VlanTpid || implies.starts_with("inner") {
                    continue;
                }
                if let Err(why) = matcher::parameters(&rule.fields()) {
                    let known = ["can_match", "finding out", "no packet matches", "nonzero proto"]
                        .iter()
                        .any(|part| why.contains(part));
                    assert!(known, "{} {} under {mask:#x}: {why}", spec.item.spec().name, spec.name);
                }
            }
        }
    }
}

#[test]
fn excluded_patterns_are_valid_patterns() {
    for text in EXCLUDED_PATTERNS.iter().chain(&UNFIXED_CHECKSUMS) {
        let pattern: crate::port::hardware::PatternText =
            text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(pattern.items().len(), 1, "{text}");
    }
}

#[test]
fn multicast_rules_are_recognised() {
    let of = |pattern: &str| {
        let (mask, value) = matcher::parameters(&fields(pattern)).unwrap();
        matcher::is_multicast(&mask, &value)
    };
    assert!(of("eth dst ff:ff:ff:ff:ff:ff"));
    assert!(of("eth dst 01:00:00:00:00:00 mask 01:00:00:00:00:00"));
    assert!(!of("eth dst 02:00:00:00:00:01"));
    assert!(!of("eth dst 00:00:00:00:00:00 mask 01:00:00:00:00:00"));
}

#[test]
fn actions_become_commands() {
    let of = |text: &str, level| {
        let rule: Rule = text.parse().unwrap();
        commands::of(rule.actions(), &rule.fields(), level)
    };
    let count = |text: &str| of(text, 0).map(|commands| commands.len());
    assert_eq!(count("egress: ipv4 => set eth dst 02:00:00:00:00:01, set ipv4 ttl 9, dec-ttl"), Ok(4));
    assert_eq!(count("egress: ipv6 => set ipv6 src fd00::1"), Ok(4));
    assert_eq!(of("egress: ipv6 => dec-ttl", 0), Ok(vec![commands::hop(true)]));
    assert_eq!(
        of("ingress: ipv4 / udp dst 4789 / vxlan / ipv6 => decap l2, dec-ttl", 1),
        Ok(vec![commands::hop(true)]),
        "the hops of what is left"
    );
    assert!(count("egress: eth => push-vlan vid 5").unwrap_err().contains("push-vlan"));
}
