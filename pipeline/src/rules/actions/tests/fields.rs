//! Tests of `set` and `dec-ttl`, with the checksums over the changed fields.

use super::*;

#[test]
fn every_field_with_every_checksum() {
    let mut env = TestEnvironment::new();
    for (pattern, frame) in stacks() {
        let frame = summed(frame);
        assert_sound(&frame, pattern);
        let parsed = Parser::default().parse(&frame).unwrap();
        let (l3, l4) = (parsed.outer().l3(), parsed.outer().l4());
        let (v4, ports) = (pattern.contains("ipv4"), !pattern.ends_with("icmpv6"));
        let transport = pattern.rsplit(' ').next().unwrap();
        let mut cases: Vec<(String, usize, Vec<u8>)> = vec![
            ("set eth dst 02:aa:bb:cc:dd:ee".into(), 0, unhex("02aabbccddee")),
            ("set eth src 02:aa:bb:cc:dd:ee".into(), 6, unhex("02aabbccddee")),
        ];
        if v4 {
            cases.push(("set ipv4 src 192.168.255.254".into(), l3 + 12, vec![192, 168, 255, 254]));
            cases.push(("set ipv4 dst 1.2.3.4".into(), l3 + 16, vec![1, 2, 3, 4]));
            cases.push(("set ipv4 ttl 7".into(), l3 + 8, vec![7]));
            cases.push(("set ipv4 dscp 10".into(), l3 + 1, vec![10 << 2 | 1]));
        } else {
            cases.push(("set ipv6 src 2001:db8::ff:1".into(), l3 + 8, unhex("20010db80000000000000000 00ff0001")));
            cases.push(("set ipv6 dst 2001:db8::ff:2".into(), l3 + 24, unhex("20010db80000000000000000 00ff0002")));
            cases.push(("set ipv6 hops 7".into(), l3 + 7, vec![7]));
            cases.push(("set ipv6 dscp 10".into(), l3, vec![0x62, 0x91]));
        }
        cases.push(("dec-ttl".into(), l3 + if v4 { 8 } else { 7 }, vec![63]));
        if ports {
            cases.push((format!("set {transport} src 65535"), l4, vec![0xff, 0xff]));
            cases.push((format!("set {transport} dst 0"), l4 + 2, vec![0, 0]));
        }
        if pattern.starts_with("vlan") {
            cases.push(("set vlan vid 4000".into(), 14, vec![0x2f, 0xa0]));
            cases.push(("set vlan pcp 7".into(), 14, vec![0xe0, 5]));
            cases.push(("set vlan dei 1".into(), 14, vec![0x30, 5]));
        }
        for (action, at, value) in &cases {
            let rule = format!("ingress prio 1: eth / {pattern} => {action}");
            let out = env.next(&rule, &frame);
            assert_sound(&out, &rule);
            assert_eq!(out[*at..at + value.len()], value[..], "{rule}");
            // Only the field and the checksums change.
            let parsed = Parser::default().parse(&out).unwrap();
            let sums: Vec<usize> = [
                v4.then_some(l3 + 10),
                ChecksumSpan::of(&out, parsed.outer()).map(|cover| cover.start + cover.transport.checksum_offset()),
            ]
            .into_iter()
            .flatten()
            .flat_map(|at| [at, at + 1])
            .collect();
            for (i, (new, old)) in out.iter().zip(&frame).enumerate() {
                let expected = (*at..at + value.len()).contains(&i) || sums.contains(&i);
                assert!(new == old || expected, "{rule}: byte {i}");
            }
        }
        // All actions in one rule are merged into one write, with the same result as one after the other.
        let together: Vec<&str> = cases.iter().map(|(action, ..)| &action[..]).collect();
        let rule = |actions: &str| format!("ingress prio 1: eth / {pattern} => {actions}");
        let all = program(&rule(&together.join(", ")));
        assert_eq!(all.steps.len(), 1, "{all:?}");
        let mut packet = env.packet(&frame);
        assert_eq!(env.run(&all, &mut packet), Outcome::Next);
        let one_by_one = together.iter().fold(frame.clone(), |frame, action| env.next(&rule(action), &frame));
        assert_eq!(bytes(&packet), one_by_one, "{pattern}");
        assert_sound(&one_by_one, pattern);
    }
}

#[test]
fn checksums_that_are_absent_wrong_or_zero() {
    let mut env = TestEnvironment::new();
    let rule = "ingress prio 1: ipv4 / udp => set ipv4 src 10.9.8.7, set udp dst 53";
    // An absent checksum stays absent.
    let absent = ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1, 2, 3])));
    assert_eq!(env.next(rule, &absent)[40..42], [0, 0]);
    // A wrong checksum stays wrong by the same difference.
    let mut wrong = summed(absent.clone());
    wrong[41] ^= 0x10;
    let out = env.next(rule, &wrong);
    let cover = ChecksumSpan::of(&out, Parser::default().parse(&out).unwrap().outer()).unwrap();
    assert!(!cover.transport.verify(&out[cover.start..cover.end], cover.pseudo));
    let mut bad_header = absent.clone();
    bad_header[24] ^= 1;
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let mut packet = env.packet(&bad_header);
    let parsed = parser.parse(&bad_header).unwrap();
    assert_eq!(program(rule).run(&mut packet, &parsed, &mut env), Outcome::Next);
    assert!(!checksum::sum(&packet.data()[14..34]).is_valid());
    // A port that makes the checksum zero, which must be sent as all ones.
    let frame = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[0, 0, 9]))));
    let cover = ChecksumSpan::of(&frame, Parser::default().parse(&frame).unwrap().outer()).unwrap();
    let (port, sum) = (u16::from_be_bytes([frame[36], frame[37]]), cover.transport.field(&frame[34..]).unwrap());
    let zero = (u32::from(port) + u32::from(sum)) % 0xffff;
    let out = env.next(&format!("ingress prio 1: ipv4 / udp => set udp dst {zero}"), &frame);
    assert_eq!(out[40..42], [0xff, 0xff]);
    assert_sound(&out, "all ones");
    // The reverse change.
    assert_sound(&env.next("ingress prio 1: ipv4 / udp => set udp dst 9", &out), "back");
}

#[test]
fn a_hop_limit_expires_in_action_order() {
    let mut env = TestEnvironment::new();
    for (version, at) in [(4usize, 22usize), (6, 21)] {
        let frame = |ttl: u8| {
            let mut frame = if version == 4 {
                ethernet(0x0800, &ip4(99, &[], 0, &[1; 30]))
            } else {
                ethernet(0x86dd, &ip6(99, &[1; 30]))
            };
            frame[at] = ttl;
            if version == 4 {
                frame[24..26].fill(0);
                let sum = checksum::sum(&frame[14..34]).checksum();
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            frame
        };
        let name = if version == 4 { "ttl" } else { "hops" };
        let set = |value: u8| format!("set ipv{version} {name} {value}");
        type Expected = fn(u8) -> Option<u8>;
        let cases: Vec<(String, Expected)> = vec![
            ("dec-ttl".into(), |t| (t > 1).then(|| t - 1)),
            ("dec-ttl, dec-ttl, dec-ttl".into(), |t| (t > 3).then(|| t - 3)),
            (format!("{}, dec-ttl", set(5)), |_| Some(4)),
            (format!("dec-ttl, {}", set(5)), |t| (t > 1).then_some(5)),
            (format!("{}, dec-ttl", set(1)), |_| None),
            (format!("{}, dec-ttl, {}", set(0), set(9)), |_| None),
            (format!("dec-ttl, {}, dec-ttl", set(2)), |t| (t > 1).then_some(1)),
            (set(0), |_| Some(0)),
            (vec!["dec-ttl"; 255].join(", "), |_| None),
            (vec!["dec-ttl"; 254].join(", "), |t| (t == 255).then_some(1)),
            (vec!["dec-ttl"; 300].join(", "), |_| None),
        ];
        for (actions, expected) in cases {
            let rule = format!("ingress prio 1: ipv{version} => {actions}");
            for ttl in [0, 1, 2, 3, 4, 63, 64, 254, 255] {
                let (outcome, bytes) = env.rule(&rule, &frame(ttl));
                match expected(ttl) {
                    Some(new) => {
                        assert_eq!((outcome, bytes[at]), (Outcome::Next, new), "{rule} at {ttl}");
                        assert_sound(&bytes, &rule);
                    }
                    None => assert_eq!(outcome, Outcome::Drop(DropReason::HopLimit), "{rule} at {ttl}"),
                }
            }
        }
        // A `count` before `dec-ttl` counts dropped packets; one behind it does not.
        env.counted.clear();
        let (outcome, _) = env.rule(&format!("ingress prio 1: ipv{version} => count, dec-ttl"), &frame(1));
        assert_eq!((outcome, env.counted.len()), (Outcome::Drop(DropReason::HopLimit), 1));
        let (outcome, _) = env.rule(&format!("ingress prio 1: ipv{version} => dec-ttl, count"), &frame(1));
        assert_eq!((outcome, env.counted.len()), (Outcome::Drop(DropReason::HopLimit), 1));
    }
}

#[test]
fn later_fragments_have_no_transport_header() {
    let mut env = TestEnvironment::new();
    let rule = "ingress prio 1: ipv4 => set ipv4 dst 10.77.0.3, dec-ttl";
    let whole = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[0x5a; 64]))));
    let payload = &whole[34..];
    let (first, later) = (ip4(17, &[], 0x2000, &payload[..40]), ip4(17, &[], 5, &payload[40..]));
    let first = env.next(rule, &ethernet(0x0800, &first));
    let later_out = env.next(rule, &ethernet(0x0800, &later));
    assert_eq!(later_out[34..], payload[40..], "a piece without header is left alone");
    let together = ip4(17, &[], 0, &[&first[34..], &later_out[34..]].concat());
    let mut together = ethernet(0x0800, &together);
    together[30..34].copy_from_slice(&[10, 77, 0, 3]);
    together[24..26].fill(0);
    let sum = checksum::sum(&together[14..34]).checksum();
    together[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_sound(&together, "put together again");
    // The same for IPv6 with a fragment header.
    let rule = "ingress prio 1: ipv6 => set ipv6 dst fd00::77";
    let whole = summed(ethernet(0x86dd, &ip6(17, &udp(&[0x5a; 64]))));
    let payload = &whole[54..];
    let piece = |word: u16, bytes: &[u8]| {
        let header = [&[17, 0][..], &word.to_be_bytes(), &[0, 0, 0, 9]].concat();
        ethernet(0x86dd, &ip6(44, &[&header[..], bytes].concat()))
    };
    let first = env.next(rule, &piece(1, &payload[..40]));
    let later = env.next(rule, &piece(40, &payload[40..]));
    let mut together = ethernet(0x86dd, &ip6(17, &[&first[62..], &later[62..]].concat()));
    together[53] = 0x77;
    assert_sound(&together, "put together again");
}

#[test]
fn checksums_cover_final_destination_and_home_address() {
    let mut env = TestEnvironment::new();
    let address = |host: u8| [&[0xfd][..], &[0; 14], &[host]].concat();
    // Returns a datagram with the checksum for a pseudo header with these hosts.
    let datagram = |src: u8, dst: u8| {
        let mut datagram = udp(&[7; 21]);
        let pseudo = checksum::sum(&address(src)).and(checksum::sum(&address(dst))).word(17).word(29);
        assert!(Transport::Udp.fill(&mut datagram, pseudo));
        datagram
    };
    let routing = |left: u8| [&[17, 2, 2, left, 0, 0, 0, 0][..], &address(9)].concat();
    let home = [&[17, 2, 1, 2, 0, 0, 0xc9, 16][..], &address(8)].concat();
    let set_src = "ingress prio 1: ipv6 => set ipv6 src fd00::55";
    let set_dst = "ingress prio 1: ipv6 => set ipv6 dst fd00::66";
    let cases = [
        (43, routing(1), set_dst, (1, 9), (1, 9)),
        (43, routing(1), set_src, (1, 9), (0x55, 9)),
        (43, routing(0), set_dst, (1, 2), (1, 0x66)),
        (60, home.clone(), set_src, (8, 2), (8, 2)),
        (60, home, set_dst, (8, 2), (8, 0x66)),
    ];
    for (next, header, rule, before, after) in cases {
        let frame = |(src, dst): (u8, u8)| ethernet(0x86dd, &ip6(next, &[&header[..], &datagram(src, dst)].concat()));
        let out = env.next(rule, &frame(before));
        assert_eq!(out[54..], frame(after)[54..], "{rule}, {next}");
    }
}

#[test]
fn checksum_offload_requests_are_kept() {
    let mut env = TestEnvironment::new();
    for (pattern, frame) in stacks() {
        let frame = summed(frame);
        let cover = ChecksumSpan::of(&frame, Parser::default().parse(&frame).unwrap().outer()).unwrap();
        if cover.transport == Transport::Icmpv6 {
            continue;
        }
        let mut partial = frame.clone();
        assert!(cover.transport.set_field(&mut partial[cover.start..], cover.pseudo.fold()));
        let v = if pattern.contains("ipv4") { ("ipv4", "10.1.2.3") } else { ("ipv6", "fd00::1:2:3") };
        let transport = pattern.rsplit(' ').next().unwrap();
        let rule = format!("ingress prio 1: {pattern} => set {} dst {}, set {transport} src 77, dec-ttl", v.0, v.1);
        let wanted = env.next(&rule, &frame);
        // The field holds the pseudo header sum, or is already complete in spite of the offload request.
        for start in [&partial, &frame] {
            let mut packet = env.packet(start);
            packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
            assert_eq!(env.run(&program(&rule), &mut packet), Outcome::Next);
            assert!(packet.flags().contains(Flags::TX_L4_CHECKSUM));
            wirepath_pmd::drivers::sw_offload::apply(&mut packet).unwrap();
            assert_eq!(bytes(&packet), wanted, "{rule}");
        }
    }
}
