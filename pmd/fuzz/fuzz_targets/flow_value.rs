//! Any frame: what it says to rules fits the fields, and follows the rules of closing that patterns rely on.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::flow::{
    Action, Bits, Direction, FIELDS, Fact, Field, Item, ItemKind, Key, Outside, Rule, What, fact, mpls, value,
};
use wirepath_wire::{Parsed, Parser};

/// The pattern of all headers of a stack with all their values.
fn items(parsed: &Parsed, data: &[u8], level: u8, kinds: &[ItemKind]) -> Vec<Item> {
    let mut items = Vec::new();
    for &kind in kinds {
        for nth in 0..kind.spec().most {
            let mut item = if level == 1 { Item::new(kind).inside() } else { Item::new(kind) };
            let mut there = kind.spec().facts.iter().all(|&(which, code)| fact(parsed, level, which) == Some(code));
            for &field in kind.spec().fields {
                match value(parsed, data, Outside::default(), Key { level, nth, what: What::Field(field) }) {
                    Some(value) => item = item.with(field, Bits::exact(value, field.spec().bits)),
                    // Not every GRE header has a key.
                    None => there &= field == Field::GreKey,
                }
            }
            if there {
                items.push(item);
            }
        }
    }
    items
}

fuzz_target!(|data: &[u8]| {
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let Ok(parsed) = parser.parse(data) else { return };
    for level in 0..3 {
        for which in [Fact::Link, Fact::Mpls, Fact::Network, Fact::Transport, Fact::Tunnel] {
            assert_eq!(fact(&parsed, level, which).is_some(), parsed.stack(level.into()).is_some());
        }
        for spec in FIELDS {
            for nth in 0..5 {
                let found = value(&parsed, data, Outside::default(), Key { level, nth, what: What::Field(spec.field) });
                assert!(found.is_none_or(|v| spec.bits == 128 || v >> spec.bits == 0), "{spec:?} {found:?}");
            }
        }
    }
    // The pattern of the whole frame is possible, and the frame fits it. Frames with labels at two places of a stack have none:
    // the keys are those of the first.
    use ItemKind::*;
    let mut pattern = Vec::new();
    for level in 0..2 {
        let places = fact(&parsed, level, Fact::Mpls).unwrap_or(0);
        let all: &[ItemKind] = match places {
            0 | mpls::BEHIND_LINK => {
                &[Eth, Vlan, Mpls, Arp, Ipv4, Ipv6, Tcp, Udp, Icmp, Icmpv6, Esp, Gre, Vxlan, VxlanGpe, Geneve]
            }
            mpls::BEHIND_UDP | mpls::BEHIND_GRE => &[Eth, Vlan, Ipv4, Ipv6, Udp, Gre, Mpls],
            _ => return,
        };
        pattern.extend(items(&parsed, data, level, all));
    }
    let rule = Rule::new(Direction::Ingress, 0, pattern.clone(), vec![Action::Drop]);
    let rule = rule.unwrap_or_else(|error| panic!("{error}: {pattern:?} of {parsed:?}"));
    let fits = rule.fields().matches(|key| value(&parsed, data, Outside::default(), key));
    assert!(fits, "{rule} of {parsed:?}");
});
