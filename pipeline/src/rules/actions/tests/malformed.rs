//! Tests with packets cut into segments at any offset, and with malformed packets.

use super::*;

#[test]
fn headers_in_several_segments() {
    let mut env = TestEnvironment::new();
    let inner = ethernet(0x0800, &ip4(136, &[], 0, &[[0, 1, 0, 2, 0, 8, 0x12, 0x34], [9; 8]].concat()));
    let encap = format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, 0x4000, 5, 0)));
    let outer = env.next(&encap, &inner);
    let cases = [
        ("ingress prio 1: ipv4 / udp / vxlan => decap l2", outer),
        ("ingress prio 1: ipv4 => set ipv4 src 10.8.7.6", inner),
    ];
    for (rule, frame) in cases {
        let (outcome, whole) = env.rule(rule, &frame);
        assert_eq!(outcome, Outcome::Next);
        let mut passed = 0;
        for cut in 14..frame.len() {
            for shared in [false, true] {
                let (front, rest) = frame.split_at(cut);
                let (mut packet, rest) = (env.packet(front), env.packet(rest));
                if shared {
                    packet = packet.append_shared(&rest.into_shared()).unwrap();
                } else {
                    packet.append_segment(rest).unwrap();
                }
                // The parser refuses packets whose outer headers it cannot read.
                let Ok(parsed) = Parser::default().parse_chain(packet.data(), packet.len()) else { continue };
                passed += 1;
                assert_eq!(program(rule).run(&mut packet, &parsed, &mut env), Outcome::Next, "{rule} cut at {cut}");
                assert_eq!(bytes(&packet), whole, "{rule} cut at {cut}");
            }
        }
        assert!(passed >= 30, "{passed}");
    }
    assert_eq!(env.pool.available(), env.pool.capacity());
}

#[test]
fn random_packets_and_metadata_do_not_panic() {
    let header = |v6| hex(&vxlan_header(v6, 0, 0, 0xffff));
    let gpe = {
        let mut header = vxlan_header(true, 0, 0, 0xffff);
        header[56..58].copy_from_slice(&4790u16.to_be_bytes());
        header[62..66].copy_from_slice(&[0x0c, 0, 0, 1]);
        hex(&header)
    };
    let macs = hex(&MACS);
    let rules = [
        "any => set eth dst 02:00:00:00:00:09, push-vlan vid 1, push-vlan vid 2, rss queues 0-3".to_owned(),
        "vlan / vlan => pop-vlan, set vlan vid 3, pop-vlan, rss queues 0-3 on inner+src+dport".to_owned(),
        "ipv4 / udp => set ipv4 src 1.2.3.4, dec-ttl, set udp dst 7, mirror 3, rss queues 0-3".to_owned(),
        "ipv6 / tcp => set ipv6 dst fd00::5, dec-ttl, set tcp src 7, mirror 3, rss queues 0-3".to_owned(),
        "ipv6 / icmpv6 => set ipv6 src fd00::5, limit 1M pps, count".to_owned(),
        "vxlan vni 42 => mirror 4, decap l2, push-vlan vid 4, mirror 5, rss queues 0-3".to_owned(),
        "gre proto 0x6558 => decap l2, set eth src 02:00:00:00:00:01".to_owned(),
        "udp / mpls / eth => decap l2, pop-vlan".replace(", pop-vlan", ""),
        format!("gre proto 0x0800 => mirror 4, decap l3 {macs}0800, push-vlan vid 3"),
        format!("ipv4 proto 41 => decap l3 {macs}8100000786dd, pop-vlan"),
        format!("ipv4 => mirror 2, set ipv4 ttl 9, encap l3 {gpe}, mirror 7, rss queues 0-3 on inner+src"),
        format!("any => encap l2 {}, mirror 1, rss queues 0-3 on src+sport", header(false)),
        format!("vxlan => decap l2, encap l2 {}, mirror 1", header(true)),
    ];
    let programs: Vec<Program> = rules.iter().map(|rule| program(&format!("ingress prio 1: {rule}"))).collect();
    let mut env = TestEnvironment::new();
    let inner = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1; 600]))));
    let mut frames: Vec<Vec<u8>> = stacks().into_iter().map(|(_, frame)| summed(frame)).collect();
    frames.push(env.next(&format!("egress prio 1: any => encap l2 {}", header(false)), &inner));
    frames.push(ethernet(0x0800, &ip4(47, &[], 0, &[&[0, 0, 8, 0][..], &inner[14..]].concat())));
    frames.push(ethernet(
        0x0800,
        &ip4(47, &[], 0, &[&[0xb0, 0, 0x65, 0x58, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2][..], &inner].concat()),
    ));
    frames.push(ethernet(0x86dd, &ip6(17, &[&[0, 1, 0x19, 0xeb, 2, 147, 0, 0, 0, 0, 0x11, 9][..], &inner].concat())));
    frames.push(ethernet(0x0800, &ip4(41, &[], 0, &ip6(17, &udp(&[1; 30])))));
    // A packet whose TTL expires.
    let mut expiring = inner.clone();
    expiring[22] = 1;
    frames.push(expiring);
    let mut rng = fastrand::Rng::with_seed(1);
    let mut random = |n: usize| rng.usize(..n.max(1));
    let mut ends = std::collections::HashMap::<String, u32>::new();
    for _ in 0..60_000 {
        let mut frame = frames[random(frames.len())].clone();
        for _ in 0..random(4) {
            let at = random(frame.len().min(120));
            match random(4) {
                0 => frame.truncate(at.max(14)),
                1 => frame[at] ^= 1 << random(8),
                _ => frame[at] = random(256) as u8,
            }
        }
        let cut = 14 + random(frame.len() - 13);
        let mut packet = env.packet(&frame[..cut]);
        if cut < frame.len() {
            let rest = env.packet(&frame[cut..]);
            match random(2) {
                0 => packet.append_segment(rest).unwrap(),
                _ => packet = packet.append_shared(&rest.into_shared()).unwrap(),
            }
        }
        if random(3) == 0 {
            packet.set_vlan(random(0x10000) as u16);
        }
        let all = [
            Flags::TX_L4_CHECKSUM,
            Flags::TX_L3_CHECKSUM,
            Flags::TX_SEGMENT,
            Flags::TX_OUTER_L4_CHECKSUM,
            Flags::TX_OUTER_L3_CHECKSUM,
            Flags::VLAN_SERVICE,
        ];
        let flags = all.into_iter().filter(|_| random(6) == 0).fold(packet.flags(), Flags::with);
        packet.set_flags(flags);
        // Checksums are not verified, and the parsed packet need not match the rule.
        let parser = Parser { verify_ipv4: false, ..Parser::default() };
        let Ok(parsed) = parser.parse_chain(packet.data(), packet.len()) else { continue };
        let outcome = programs[random(programs.len())].run(&mut packet, &parsed, &mut env);
        let name = format!("{outcome:?}");
        *ends.entry(name.split_inclusive('(').take(2).collect()).or_default() += 1;
        assert_eq!(bytes(&packet).len(), packet.len());
        env.mirrored.clear();
        env.counted.clear();
    }
    assert_eq!((env.pool.available(), env.lost), (env.pool.capacity(), 0));
    for end in
        ["Next", "Queue(3)", "Drop(rule_mismatch)", "Drop(hop_limit)", "Drop(too_many_headers)", "Drop(outer_fragment)"]
    {
        assert!(ends.contains_key(end), "never {end}: {ends:?}");
    }
}
