//! Tests of whole rules, chosen and random.

mod bytes;
mod errors;
mod packets;
pub(crate) mod random;
mod reformats;

use super::*;
use random::RuleGenerator;

#[test]
fn canonical_text_of_rules() {
    let same = [
        "ingress prio 10: eth / ipv4 dst 10.0.0.0/8 / udp dst 4789 / vxlan vni 42 => decap l2, mark 7, queue 3",
        "ingress prio 0: any => drop",
        "egress prio 4294967295: port id 3 / meta mark 5 data 0x0000beef => count",
        "ingress prio 1: eth dst 01:00:00:00:00:00 mask 01:00:00:00:00:00 tags none => kernel",
        "ingress prio 1: eth / vlan vid 5 tpid 0x88a8 / vlan vid 6 pcp 3 / arp op 1 spa 10.0.0.1 \
         => mirror 2, redirect 1",
        "ingress prio 1: ipv4 proto 4 / inner ipv4 dst 10.0.0.1 / tcp dst 80 flags syn+!ack \
         => count, rss queues 0-3+6 on src+dst+sport+dport",
        "ingress prio 1: ipv6 src fd00::/8 dst 2001:db8::1 flow 0x12345 hops 255 ext routing+!fragment \
         / esp spi 0x00000100 => drop",
        "ingress prio 1: ipv6 frag later => drop",
        "ingress prio 1: ipv4 src 10.0.0.5 mask 255.0.0.255 dscp 46 ecn 3 frag not-later / icmp type 8 code 0 \
         => limit 10k pps burst 64",
        "ingress prio 1: eth / mpls label 16 tc 1 / mpls bos 1 ttl 64 / ipv4 => dec-ttl, set eth dst 02:00:00:00:00:01",
        "ingress prio 1: udp / mpls label 3 / ipv6 => count",
        "ingress prio 1: ipv4 / gre flags key proto 0x6558 key 0x2a00 mask 0xffffff00 / eth / vlan vid 7 \
         => decap l2, pop-vlan",
        "ingress prio 1: gre / mpls label 3 / inner mpls label 5 => count",
        "ingress prio 1: geneve vni 9 proto 0x6558 optlen 0 oam 0 critical 0 / eth type 0x88cc => mark 16777215",
        "ingress prio 1: vxlan-gpe vni 9 next 2 flags 0x0c / ipv6 / icmpv6 type 135 => drop",
        "ingress prio 1: udp src 53 dst 53 / inner eth src 02:00:00:00:00:01 \
         => set udp dst 54, set eth src 02:00:00:00:00:02",
        "ingress prio 1: ipv4 => push-vlan vid 100 pcp 7 dei 1 tpid 0x88a8, set ipv4 ttl 9, limit 25G bps burst 150k",
    ];
    for text in same {
        let rule: Rule = text.parse().unwrap_or_else(|e: TextError| panic!("{text}\n{e}"));
        let printed = rule.to_string();
        assert_eq!(
            printed.split(' ').collect::<Vec<_>>().len(),
            text.split(' ').collect::<Vec<_>>().len(),
            "{printed}"
        );
        assert_eq!(printed.parse::<Rule>().unwrap(), rule);
    }
    assert_eq!(same[0].parse::<Rule>().unwrap().to_string(), same[0]);
    let canonical = [
        ("ingress: eth=>drop,", None),
        ("  ingress\tprio 3 :\n any=>count,drop ", Some("ingress prio 3: any => count, drop")),
        ("ingress: ipv4 dst 10.0.0.0 mask 255.0.0.0 => drop", Some("ingress prio 0: ipv4 dst 10.0.0.0/8 => drop")),
        ("ingress: ipv4 dst 0.0.0.0/0 src 1.2.3.4/32 => drop", Some("ingress prio 0: ipv4 src 1.2.3.4 => drop")),
        ("ingress: udp dst 0x35 / vxlan / inner eth => drop", Some("ingress prio 0: udp dst 53 / vxlan / eth => drop")),
        (
            "ingress: tcp flags 0x2 mask 0x12 => limit 1000 pps",
            Some("ingress prio 0: tcp flags syn+!ack => limit 1k pps burst 100"),
        ),
        (
            "ingress: tcp dst 80 src 90 => rss queues 0+1+2+2",
            Some("ingress prio 0: tcp src 90 dst 80 => rss queues 0-2+2 on src+dst+sport+dport"),
        ),
    ];
    for (text, canonical) in canonical {
        assert_eq!(text.parse::<Rule>().ok().map(|r| r.to_string()).as_deref(), canonical, "{text}");
    }
}

#[test]
fn ports_by_name() {
    let ports = Ports(&[("lan", wirepath_packet::PortId::new(3)), ("wan", wirepath_packet::PortId::new(4))]);
    let rule = Rule::parse("ingress: port id lan / eth => mirror 9, redirect wan", ports).unwrap();
    assert_eq!(rule.to_string(), "ingress prio 0: port id 3 / eth => mirror 9, redirect 4");
    let error = Rule::parse("ingress: any => redirect lam", ports).unwrap_err();
    assert_eq!(
        (error.reason, error.message.as_str()),
        (Reason::UnknownPort, "no port is called \"lam\"; did you mean \"lan\"?")
    );
}

#[test]
fn text_round_trip_of_random_rules() {
    let mut kinds = std::collections::BTreeSet::new();
    for seed in 0..20_000 {
        let rule = RuleGenerator::new(seed).rule();
        let text = rule.to_string();
        let read: Rule = text.parse().unwrap_or_else(|e: TextError| panic!("seed {seed}: {text}\n{e}"));
        assert_eq!(read, rule, "seed {seed}: {text}");
        assert_eq!(read.to_string(), text, "seed {seed}");
        kinds.extend(rule.pattern().iter().map(|item| (item.kind.spec().name, item.inner)));
        kinds.extend(rule.actions().iter().map(|action| (action.spec().name, false)));
    }
    let all =
        ITEMS.iter().flat_map(|i| [(i.name, false), (i.name, true)]).chain(ACTIONS.iter().map(|a| (a.name, false)));
    for kind in all.filter(|kind| ![("port", true), ("meta", true)].contains(kind)) {
        assert!(kinds.contains(&kind), "{kind:?} was never made");
    }
}

#[test]
fn mutated_texts_do_not_panic() {
    let words: Vec<&str> = ITEMS
        .iter()
        .map(|i| i.name)
        .chain(ACTIONS.iter().map(|a| a.name))
        .chain(["/", "=>", ",", ":", "mask", "é", "inner", "0x", "+", "::"])
        .collect();
    let mut refused = 0;
    for seed in 0..20_000 {
        let mut random = RuleGenerator::new(seed);
        let mut text: Vec<char> = random.rule().to_string().chars().collect();
        for _ in 0..=random.below(4) {
            let at = random.below(text.len() as u64 + 1) as usize;
            match random.below(3) {
                0 => drop(text.splice(at..at, format!(" {} ", random.pick(&words)).chars())),
                1 => text.truncate(at),
                _ => drop(text.splice(at..(at + 1).min(text.len()), [char::from(random.below(256) as u8)])),
            }
        }
        let text: String = text.into_iter().collect();
        match text.parse::<Rule>() {
            Ok(rule) => assert_eq!(rule.to_string().parse::<Rule>().unwrap(), rule, "seed {seed}"),
            Err(error) => {
                assert!(text.get(error.span.clone()).is_some(), "seed {seed}: {error:?} in {text}");
                assert!(!error.message.is_empty());
                refused += 1;
            }
        }
    }
    assert!(refused > 5_000);
}

#[test]
fn direction_makes_rules_software_only() {
    let bar = |text: &str| text.parse::<Rule>().unwrap().software_only();
    assert_eq!(bar("ingress: vxlan => count, decap l2"), None);
    assert_eq!(bar("egress: vxlan => count, decap l2"), Some((1, SoftwareOnly::DecapAtEgress)));
    let encap = format!("any => encap l2 {}", reformats::VXLAN);
    assert_eq!(bar(&format!("egress: {encap}")), None);
    assert_eq!(bar(&format!("ingress: {encap}")), Some((0, SoftwareOnly::EncapAtIngress)));
}

#[test]
fn references_list_all_items_fields_and_actions() {
    let (items, actions) = (items_reference(), actions_reference());
    assert!(
        FIELDS.iter().all(|field| items.contains(field.about)) && ITEMS.iter().all(|item| items.contains(item.about))
    );
    assert!(ACTIONS.iter().all(|action| actions.contains(action.about)));
}
