//! Refused rules: the reason, and the word that the error marks.

use super::super::*;

/// Returns the word that the error marks, its reason, and the message.
fn refused(text: &str) -> (String, Reason, String) {
    let error = text.parse::<Rule>().map(|rule| rule.to_string()).expect_err(text);
    (text[error.span].to_owned(), error.reason, error.message)
}

#[test]
fn errors_mark_the_wrong_word() {
    use Reason::*;
    let cases = [
        // Syntax.
        ("", "", Missing, "the text ends here, expected \"ingress\" or \"egress\""),
        ("inress: any => drop", "inress", UnknownWord, "did you mean \"ingress\"?"),
        ("ingress any => drop", "any", Syntax, "expected \"prio\""),
        ("ingress prio: any => drop", ":", Missing, "expected a priority"),
        ("ingress prio x: any => drop", "x", OutOfRange, "expected a priority from 0 to 4294967295"),
        ("ingress prio 4294967296: any => drop", "4294967296", OutOfRange, "priority"),
        ("ingress: => drop", "=>", Missing, "expected an item"),
        ("ingress: ipv5 => drop", "ipv5", UnknownWord, "did you mean \"ipv4\"?"),
        ("ingress: eth/ipv4 => drop", "eth/ipv4", Syntax, "blanks"),
        (
            "ingress: ipv4 dest 1.2.3.4 => drop",
            "dest",
            UnknownWord,
            "unknown field of ipv4 \"dest\"; did you mean \"dst\"?",
        ),
        ("ingress: ipv4 frobnicate 1 => drop", "frobnicate", UnknownWord, "known here: src, dst, proto"),
        ("ingress: ipv4 dst => drop", "=>", Missing, "a value for dst"),
        ("ingress: ipv4 drop", "drop", UnknownWord, "unknown field of ipv4"),
        ("ingress: ipv4 dst 1.2.3 => drop", "1.2.3", BadValue, "an IPv4 address"),
        ("ingress: ipv4 ttl 256 => drop", "256", OutOfRange, "0 to 255"),
        ("ingress: tcp flags syn+sin => drop", "syn+sin", UnknownWord, "did you mean \"fin\"?"),
        ("ingress: ipv4 dst 10.0.0.1/8 => drop", "10.0.0.1/8", ValueOutsideMask, "write 10.0.0.0/8"),
        ("ingress: vlan vid 16 mask 0x1000 => drop", "0x1000", MaskOutsideField, "12 bits"),
        ("ingress: vlan vid 16 mask 15 => drop", "16", ValueOutsideMask, "outside its mask"),
        ("ingress: ipv4 ttl 3 ttl 4 => drop", "ttl", Twice, "given twice"),
        ("ingress: ipv4", "", Syntax, "the text ends here, expected \"/\" and an item"),
        ("ingress: ipv4 =>", "", Missing, "expected an action"),
        ("ingress: ipv4 => drp", "drp", UnknownWord, "did you mean \"drop\"?"),
        ("ingress: ipv4 => drop drop", "drop", UnknownWord, "takes no"),
        ("ingress: ipv4 => queue", "queue", Missing, "needs id"),
        ("ingress: ipv4 => queue 70000", "70000", BadValue, "0 to 65535"),
        ("ingress: ipv4 => mark 16777216", "16777216", OutOfRange, "16777215"),
        ("ingress: ipv4 => redirect lan", "lan", UnknownPort, "write its number"),
        ("ingress: ipv4 => rss queues 3-1", "3-1", BadValue, "queues"),
        ("ingress: ipv4 => rss queues 1 on inner", "rss", Missing, "to hash"),
        ("ingress: ipv4 => set ipv4 proto 3", "set", NotSettable, "settable fields of ipv4: src, dst, dscp, ttl"),
        ("ingress: ipv4 => set ipv4 dst 10.0.0.0/8", "10.0.0.0/8", BadValue, "without a mask"),
        ("ingress: ipv4 => limit 0 pps", "limit", OutOfRange, "above 0"),
        ("ingress: ipv4 => limit 5 pqs", "pqs", UnknownWord, "did you mean \"pps\"?"),
        ("ingress: ipv4 => push-vlan vid 4095", "push-vlan", OutOfRange, "reserved"),
        ("ingress: ipv4 => push-vlan vid 5 tpid 0x0800", "push-vlan", OutOfRange, "0x8100"),
        ("ingress: ipv4 => encap l2 0", "0", BadValue, "hexadecimal"),
        ("ingress: ipv4 => encap l2 00", "00", BadHeader, "ends inside the Ethernet header"),
        ("ingress: ipv4 => encap l2", "encap", Missing, "needs header"),
        // Impossible stacks.
        ("ingress: ipv4 / eth => drop", "eth", ImpossibleStack, "write \"inner eth\""),
        ("ingress: ipv4 / ipv4 => drop", "ipv4", TooMany, "write \"inner ipv4\""),
        ("ingress: ipv4 / mpls => drop", "mpls", ImpossibleStack, "must follow eth, udp or gre"),
        ("ingress: eth / meta mark 3 => drop", "meta", ImpossibleStack, "before the headers"),
        ("ingress: vxlan / meta mark 3 => drop", "meta", ImpossibleStack, "not inside a tunnel"),
        ("ingress: tcp / inner ipv4 => drop", "ipv4", ImpossibleStack, "\"tcp\" carries no headers"),
        ("ingress: vlan / vlan / vlan => drop", "vlan", TooMany, "at most 2"),
        ("ingress: vxlan / eth / ipv4 / udp / vxlan / eth => drop", "eth", TooDeep, "inside a tunnel already"),
        ("ingress: mpls / ipv4 / udp / mpls => drop", "mpls", TooMany, "second label stack"),
        // Contradictions.
        ("ingress: eth type 0x88cc / inner ipv4 => drop", "ipv4", Contradiction, "eth type would have to be"),
        ("ingress: ipv6 next 6 mask 0x8e proto 17 => drop", "17", Contradiction, "ipv6 next would have to be"),
        ("ingress: eth type 0x0800 / ipv6 => drop", "ipv6", Contradiction, "eth type cannot be both 0x0800 and 0x86dd"),
        (
            "ingress: eth type 0x0806 / udp => drop",
            "udp",
            Contradiction,
            "eth type would have to be 0x0800 or 0x86dd, but is 0x0806",
        ),
        ("ingress: ipv4 proto 17 / tcp => drop", "tcp", Contradiction, "ipv4 proto cannot be both 17 and 6"),
        ("ingress: tcp / vxlan => drop", "vxlan", Contradiction, "layer 4 cannot be both tcp and udp"),
        ("ingress: ipv4 / icmpv6 => drop", "icmpv6", Contradiction, "layer 3 cannot be both ipv4 and ipv6"),
        ("ingress: arp / udp => drop", "udp", Contradiction, "carries no layer 4"),
        (
            "ingress: ipv4 frag later / udp => drop",
            "udp",
            Contradiction,
            "ipv4 frag cannot be both later and not-later",
        ),
        ("ingress: ipv4 frag no offset 3 => drop", "3", Contradiction, "frag"),
        ("ingress: ipv6 next 6 / udp => drop", "udp", Contradiction, "ipv6 next would have to be"),
        ("ingress: ipv6 ext !fragment frag later => drop", "!fragment", Contradiction, "frag"),
        ("ingress: eth tags none / vlan => drop", "vlan", Contradiction, "eth tags"),
        ("ingress: gre flags !key key 5 => drop", "5", Contradiction, "gre flags"),
        ("ingress: gre proto 0x0800 / eth => drop", "eth", Contradiction, "gre proto"),
        ("ingress: vxlan-gpe next 1 / ipv6 => drop", "ipv6", Contradiction, "vxlan-gpe next"),
        ("ingress: mpls bos 1 / mpls => drop", "mpls", Contradiction, "mpls bos"),
        (
            "ingress: ipv4 proto 6 / inner ipv4 => drop",
            "ipv4",
            Contradiction,
            "ipv4 proto would have to be 17 or 47 or 4",
        ),
        ("ingress: eth type 0x0800 / mpls => drop", "mpls", Contradiction, "0x8847 or 0x8848"),
        ("ingress: mpls / arp => drop", "arp", Contradiction, "MPLS cannot be both present and absent"),
        // Actions.
        ("ingress: any => queue 1, drop", "drop", SecondTerminating, "\"queue\" already decides"),
        ("ingress: any => drop, count", "count", AfterTerminating, "never runs"),
        ("egress: any => queue 1", "queue", WrongDirection, "ingress"),
        ("ingress: any => count, count", "count", Twice, "twice"),
        ("ingress: any => dec-ttl", "dec-ttl", NoSuchHeader, "add \"ipv4\""),
        ("ingress: ipv4 => set udp dst 3", "set", NoSuchHeader, "add \"udp\""),
        ("ingress: eth / vlan => pop-vlan, pop-vlan", "pop-vlan", NoSuchHeader, "VLAN"),
        ("ingress: any => decap l2", "decap", NoSuchHeader, "add the tunnel"),
        ("ingress: geneve => decap l2", "decap", NoSuchHeader, "\"eth\" after it"),
        ("ingress: vxlan => decap l3 0200000000020200000000010800", "decap", NoSuchHeader, "an IP packet"),
        (
            "ingress: gre proto 0x86dd => decap l3 0200000000020200000000010800",
            "decap",
            Contradiction,
            "the inner packet is IPv6",
        ),
        ("ingress: vxlan / eth => decap l2, decap l2", "decap", TooDeep, "only one"),
        ("ingress: vxlan / eth / udp => decap l2, set tcp dst 5", "set", NoSuchHeader, "tcp"),
    ];
    for (text, word, reason, part) in cases {
        let (found, why, message) = refused(text);
        assert_eq!((found.as_str(), why), (word, reason), "{text}\n{message}");
        assert!(message.contains(part), "{text}\n{message}");
    }
}

#[test]
fn columns_are_in_characters() {
    let text = "ingress: ipv4 é 3 => drop";
    let error = text.parse::<Rule>().unwrap_err();
    assert_eq!(error.column, 15);
    let twice = "ingress: ipv4 ttl 3 ttl 4 => drop".parse::<Rule>().unwrap_err();
    assert_eq!((twice.column, twice.to_string().as_str()), (21, "column 21: ttl is given twice"));
}

#[test]
fn actions_before_and_after_encapsulation() {
    let vxlan = super::reformats::VXLAN;
    assert!(format!("egress: ipv4 => dec-ttl, encap l2 {vxlan}").parse::<Rule>().is_ok());
    assert_eq!(refused(&format!("egress: ipv4 => encap l2 {vxlan}, dec-ttl")).1, Reason::Order);
    let gre = "020000000002020000000001080045000000000000004 02f00000a0000010a00000200000800".replace(' ', "");
    assert!(format!("egress: ipv4 => encap l3 {gre}").parse::<Rule>().is_ok());
    assert_eq!(refused(&format!("egress: ipv6 => encap l3 {gre}")).1, Reason::Contradiction);
    assert_eq!(refused(&format!("egress: any => encap l3 {gre}")).1, Reason::NoSuchHeader);
    assert!("ingress: geneve / eth / ipv4 / tcp => decap l2, set ipv4 ttl 3, set tcp dst 5".parse::<Rule>().is_ok());
}

#[test]
fn errors_of_rules_built_in_code() {
    let rule =
        |item: Item, action: Action| Rule::new(Direction::Ingress, 0, vec![item], vec![action]).unwrap_err().reason;
    let ttl = |bits| Item::new(ItemKind::Ipv4).with(Field::Ipv4Ttl, bits);
    assert_eq!(rule(ttl(MaskedValue { value: 1, mask: 0x100 }), Action::Drop), Reason::MaskOutsideField);
    assert_eq!(rule(ttl(MaskedValue { value: 3, mask: 1 }), Action::Drop), Reason::ValueOutsideMask);
    assert_eq!(rule(ttl(MaskedValue { value: 1, mask: 0 }), Action::Drop), Reason::ValueOutsideMask);
    assert_eq!(rule(Item::new(ItemKind::Udp).exact(Field::TcpDst, 1), Action::Drop), Reason::WrongField);
    let ipv4 = || Item::new(ItemKind::Ipv4);
    assert_eq!(rule(ipv4(), Action::Mark(1 << 24)), Reason::OutOfRange);
    assert_eq!(rule(ipv4(), Action::Set { field: Field::Ipv4Ttl, value: 256 }), Reason::OutOfRange);
    assert_eq!(Rule::new(Direction::Ingress, 0, vec![], vec![]).unwrap_err().reason, Reason::NoAction);
    let inside = vec![ipv4().as_inner(), Item::new(ItemKind::Udp)];
    assert_eq!(
        Rule::new(Direction::Ingress, 0, inside, vec![Action::Drop]).unwrap_err().reason,
        Reason::ImpossibleStack
    );
}
