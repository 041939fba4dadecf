//! Values of keys in any frame. They fit their fields and follow the implications that closed lists rely on.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_flow::{
    Action, Direction, FIELDS, Field, HeaderType, Item, ItemKind, Key, KeyKind, MaskedValue, Metadata, Rule,
    header_type, mpls, packet_value,
};
use wirepath_wire::{Parsed, Parser};

/// Returns items for all headers of a stack, with all their values.
fn items(parsed: &Parsed, data: &[u8], level: u8, kinds: &[ItemKind]) -> Vec<Item> {
    let mut items = Vec::new();
    for &kind in kinds {
        for nth in 0..kind.spec().max_count {
            let mut item = if level == 1 { Item::new(kind).as_inner() } else { Item::new(kind) };
            let mut there =
                kind.spec().header_types.iter().all(|&(which, code)| header_type(parsed, level, which) == Some(code));
            for &field in kind.spec().fields {
                match packet_value(parsed, data, Metadata::default(), Key { level, nth, kind: KeyKind::Field(field) }) {
                    Some(value) => item = item.with(field, MaskedValue::exact(value, field.spec().bits)),
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
        for which in
            [HeaderType::Link, HeaderType::Mpls, HeaderType::Network, HeaderType::Transport, HeaderType::Tunnel]
        {
            assert_eq!(header_type(&parsed, level, which).is_some(), parsed.stack(level.into()).is_some());
        }
        for spec in FIELDS {
            for nth in 0..5 {
                let found = packet_value(
                    &parsed,
                    data,
                    Metadata::default(),
                    Key { level, nth, kind: KeyKind::Field(spec.field) },
                );
                assert!(found.is_none_or(|v| spec.bits == 128 || v >> spec.bits == 0), "{spec:?} {found:?}");
            }
        }
    }
    // The pattern of the whole frame is possible, and the frame matches it. Frames with labels at two
    // positions of a stack are skipped: the keys refer to the first.
    use ItemKind::*;
    let mut pattern = Vec::new();
    for level in 0..2 {
        let positions = header_type(&parsed, level, HeaderType::Mpls).unwrap_or(0);
        let all: &[ItemKind] = match positions {
            0 | mpls::AFTER_ETHERNET => {
                &[Eth, Vlan, Mpls, Arp, Ipv4, Ipv6, Tcp, Udp, Icmp, Icmpv6, Esp, Gre, Vxlan, VxlanGpe, Geneve]
            }
            mpls::AFTER_UDP | mpls::AFTER_GRE => &[Eth, Vlan, Ipv4, Ipv6, Udp, Gre, Mpls],
            _ => return,
        };
        pattern.extend(items(&parsed, data, level, all));
    }
    let rule = Rule::new(Direction::Ingress, 0, pattern.clone(), vec![Action::Drop]);
    let rule = rule.unwrap_or_else(|error| panic!("{error}: {pattern:?} of {parsed:?}"));
    let fits = rule.fields().matches(|key| packet_value(&parsed, data, Metadata::default(), key));
    assert!(fits, "{rule} of {parsed:?}");
});
