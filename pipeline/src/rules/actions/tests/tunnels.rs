//! Tests of encapsulation and decapsulation.

use super::*;

#[test]
fn tunnel_entropy_depends_on_the_flow() {
    let mut env = TestEnvironment::new();
    let program = program(&format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, 0x4000, 0, 0xffff))));
    let mut port = |frame: &[u8]| {
        let mut packet = env.packet(frame);
        assert_eq!(env.run(&program, &mut packet), Outcome::Next);
        let out = bytes(&packet);
        // The checksum covers the source port.
        assert_sound(&out, "with entropy");
        assert_ne!(out[40..42], [0, 0]);
        u16::from_be_bytes([out[34], out[35]])
    };
    let flow = |n: u16, fragment: u16| {
        let mut datagram = udp(&[0x77; 48]);
        datagram[..2].copy_from_slice(&n.to_be_bytes());
        ethernet(0x0800, &ip4(17, &[], fragment, if fragment & 0x1fff == 0 { &datagram } else { &datagram[8..] }))
    };
    let ports: Vec<u16> = (0..1000).map(|n| port(&flow(n, 0))).collect();
    assert!(ports.iter().all(|port| *port >= 49152));
    let different: std::collections::HashSet<_> = ports.iter().collect();
    assert!(different.len() > 900, "{} ports for 1000 flows", different.len());
    assert_eq!(port(&flow(1, 0)), ports[1]);
    // Later fragments have no ports, so the first fragment must not use its ports either.
    let pieces: Vec<u16> = [0x2000, 7, 0x2007].map(|fragment| port(&flow(9, fragment))).into();
    assert!(pieces.iter().all(|port| *port == pieces[0]), "{pieces:?}");
    port(&ethernet(0x88b5, &[1; 46]));
}

#[test]
fn outer_ipv4_identifications_increase() {
    let mut env = TestEnvironment::new();
    for (fragment, expected) in [(0x4000, [0x1234u16, 0x1234, 0x1234]), (0, [0x1234, 0x1235, 0x1236])] {
        let program =
            program(&format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, fragment, 9999, 0))));
        for id in expected {
            let mut packet = env.packet(&ethernet(0x88b5, &[1; 46]));
            assert_eq!(env.run(&program, &mut packet), Outcome::Next);
            assert_sound(packet.data(), "outer");
            assert_eq!(packet.data()[18..20], id.to_be_bytes());
        }
    }
}

#[test]
fn oversized_encapsulations_are_dropped() {
    let mut env = TestEnvironment::new();
    let encap = |v6| program(&format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(v6, 0, 1, 1))));
    let big = |len: usize| [ethernet(0x88b5, &[1; 46]), vec![2; len - 60]].concat();
    for (v6, max_len) in [(false, 65535 - 36), (true, 65535 - 16)] {
        let program = encap(v6);
        let mut packet = env.packet(&big(max_len));
        assert_eq!(env.run(&program, &mut packet), Outcome::Next);
        assert_sound(&bytes(&packet), "the longest");
        let mut packet = env.packet(&big(max_len + 1));
        assert_eq!(env.run(&program, &mut packet), Outcome::Drop(DropReason::TooLong));
    }
    // A packet without headroom.
    let mut packet = env.pool.take().unwrap();
    let frame = ethernet(0x88b5, &[1; 46]);
    assert!(packet.set_data(49, frame.len()));
    packet.data_mut().copy_from_slice(&frame);
    assert_eq!(env.run(&encap(false), &mut packet), Outcome::Drop(DropReason::NoHeadroom));
    assert_eq!(bytes(&packet), frame);
    assert!(packet.set_data(3, frame.len()));
    packet.data_mut().copy_from_slice(&frame);
    let push = program("egress prio 1: any => push-vlan vid 1");
    assert_eq!(env.run(&push, &mut packet), Outcome::Drop(DropReason::NoHeadroom));
    // MPLS labels have no length field that could overflow.
    let wire = [&MACS[..], &[0x88, 0x47, 0, 0, 0x51, 64]].concat();
    let labels = program(&format!("egress prio 1: any => encap l2 {}", hex(&wire)));
    let mut packet = env.packet(&big(70_000));
    assert_eq!(env.run(&labels, &mut packet), Outcome::Next);
    assert_eq!(packet.len(), 70_018);
}

#[test]
fn pending_offloads_run_before_encapsulation() {
    let mut env = TestEnvironment::new();
    let inner = summed(ethernet(0x0800, &ip4(6, &[], 0x4000, &tcp(&[5; 900]))));
    let cover = ChecksumSpan::of(&inner, Parser::default().parse(&inner).unwrap().outer()).unwrap();
    let mut partial = inner.clone();
    cover.transport.set_field(&mut partial[cover.start..], cover.pseudo.fold());
    let header = vxlan_header(true, 0, 0, 0xffff);
    for (kind, start, end) in [("l2", 0, "vxlan"), ("l3", 14, "gpe")] {
        let mut header = header.clone();
        if end == "gpe" {
            header[56..58].copy_from_slice(&4790u16.to_be_bytes());
            header[62..66].copy_from_slice(&[0x0c, 0, 0, 1]);
        }
        let rule = format!("egress prio 1: ipv4 / tcp => encap {kind} {}", hex(&header));
        let wanted = env.next(&rule, &inner);
        assert_sound(&wanted, &rule);
        let mut packet = env.packet(&partial);
        packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
        assert_eq!(env.run(&program(&rule), &mut packet), Outcome::Next);
        assert!(packet.flags().is_empty());
        assert_eq!(bytes(&packet), wanted);
        // With a stripped tag: `l2` carries it inside, `l3` drops it with the Ethernet header.
        let mut packet = env.packet(&partial);
        packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
        packet.set_vlan(5);
        packet.set_flags(packet.flags().with(Flags::VLAN_SERVICE));
        assert_eq!(env.run(&program(&rule), &mut packet), Outcome::Next);
        let out = bytes(&packet);
        assert!(packet.flags().is_empty());
        assert_sound(&out, &rule);
        let tagged = [&inner[..12], &[0x88, 0xa8, 0, 5], &inner[12..]].concat();
        assert_eq!(out[header.len()..], if start == 0 { tagged } else { inner[14..].to_vec() });
    }
    // A segmentation request is kept, with the new header lengths.
    for (kind, l2_len) in [("l2", 14), ("l3", 0)] {
        let mut header = header.clone();
        if kind == "l3" {
            header[56..58].copy_from_slice(&4790u16.to_be_bytes());
            header[62..66].copy_from_slice(&[0x0c, 0, 0, 1]);
        }
        let mut packet = env.packet(&partial);
        packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_SEGMENT));
        packet.set_mss(100);
        let rule = format!("egress prio 1: ipv4 / tcp => dec-ttl, encap {kind} {}", hex(&header));
        assert_eq!(env.run(&program(&rule), &mut packet), Outcome::Next);
        let (flags, layers) = (packet.flags(), packet.header_lengths());
        assert!(flags.contains(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_OUTER_L4_CHECKSUM)));
        assert_eq!((layers.outer_len, layers.outer_l2_len), (header.len() as u8, 14));
        assert_eq!((layers.l2_len, layers.l3_len, layers.l4_len), (l2_len, 20, 20));
        assert_eq!((layers.l3(), layers.l4(), layers.outer_l3()), (PtypeL3::Ipv4, PtypeL4::Tcp, PtypeL3::Ipv6));
        assert_eq!(packet.mss(), 100);
        let frame = packet.data();
        let cover =
            ChecksumSpan::of(frame, Parser::default().parse_chain(frame, packet.len()).unwrap().outer()).unwrap();
        assert_eq!(cover.transport.field(&frame[cover.start..]), Some(cover.pseudo.fold()));
        // After decapsulation, the request applies to the inner packet again.
        if kind == "l2" {
            let decap = program("ingress prio 1: vxlan vni 42 => decap l2");
            assert_eq!(env.run(&decap, &mut packet), Outcome::Next);
            assert_eq!(packet.flags(), Flags::TX_L4_CHECKSUM.with(Flags::TX_SEGMENT));
            let layers = packet.header_lengths();
            assert_eq!((layers.outer_len, layers.outer_l2_len, layers.l2_len), (0, 0, 14));
            assert_eq!((layers.l3_len, layers.l4_len, layers.outer_l3()), (20, 20, PtypeL3::Other));
        }
    }
    // The metadata cannot describe segmentation of a tunnel inside a tunnel.
    let once = env.next(&format!("egress prio 1: any => encap l2 {}", hex(&header)), &inner);
    let mut packet = env.packet(&once);
    packet.set_flags(Flags::TX_SEGMENT);
    let twice = program(&format!("egress prio 1: any => encap l2 {}", hex(&header)));
    assert_eq!(env.run(&twice, &mut packet), Outcome::Drop(DropReason::KernelOffload));
}

#[test]
fn tunnels_are_decapsulated() {
    use wirepath_packet::offload::ChecksumStatus;
    let mut env = TestEnvironment::new();
    let inner = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[3; 20]))));
    let encap = format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, 0x4000, 0, 0)));
    let decap = "ingress prio 1: ipv4 / udp / vxlan vni 42 => decap l2";
    let outer = env.next(&encap, &inner);
    assert_eq!(env.next(decap, &outer), inner);
    // Bytes of the IP packet behind the datagram do not belong to the frame.
    let mut longer = outer.clone();
    longer.extend([0xcc; 4]);
    let total = u16::from_be_bytes([longer[16], longer[17]]) + 4;
    longer[16..18].copy_from_slice(&total.to_be_bytes());
    longer[24..26].fill(0);
    let sum = checksum::sum(&longer[14..34]).checksum();
    longer[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(env.next(decap, &longer), inner);
    // The payload may be anything with an Ethernet header, which is mandatory.
    for malformed in
        [&inner[..14], &inner[..20], &[&inner[..14], &[0xff; 60]].concat(), &[&inner[..12], &[0x81; 14]].concat()]
    {
        let mut outer = env.next(&encap, &ethernet(0x88b5, &vec![0; malformed.len() - 14]));
        outer[50..].copy_from_slice(malformed);
        assert_eq!(env.next(decap, &outer), malformed);
    }
    let mut runt = outer[..outer.len() - inner.len() + 13].to_vec();
    let total = (runt.len() - 14) as u16;
    runt[16..18].copy_from_slice(&total.to_be_bytes());
    runt[38..40].copy_from_slice(&(total - 20).to_be_bytes());
    runt[24..26].fill(0);
    let sum = checksum::sum(&runt[14..34]).checksum();
    runt[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(env.rule(decap, &runt).0, Outcome::Drop(DropReason::TooShort));
    // `decap l3` requires a valid IP packet of the version that the tunnel announces.
    let gre = |payload: &[u8]| ethernet(0x0800, &ip4(47, &[], 0, &[&[0, 0, 8, 0][..], payload].concat()));
    let l3 = format!("ingress prio 1: gre proto 0x0800 => decap l3 {}0800", hex(&MACS));
    assert_eq!(env.next(&l3, &gre(&inner[14..])), [&MACS[..], &inner[12..]].concat());
    assert_eq!(env.rule(&l3, &gre(&inner[14..30])).0, Outcome::Drop(DropReason::Truncated));
    assert_eq!(env.rule(&l3, &gre(&ip6(59, &[]))).0, Outcome::Drop(DropReason::BadVersion));
    // Outer congestion: dropped for a packet without ECN support, copied to one with it.
    let mut congested = env.next(&encap, &inner);
    congested[15] |= 3;
    congested[24..26].fill(0);
    let sum = checksum::sum(&congested[14..34]).checksum();
    congested[24..26].copy_from_slice(&sum.to_be_bytes());
    let (outcome, out) = env.rule(decap, &congested);
    assert_eq!(outcome, Outcome::Next, "ECT(1) inside");
    assert_eq!(out[15] & 3, 3);
    assert_sound(&out, "marked");
    let mut packet = env.packet(&congested);
    packet.data_mut()[65] &= 0xfc;
    packet.data_mut()[74..76].fill(0);
    let sum = checksum::sum(&packet.data()[64..84]).checksum();
    packet.data_mut()[74..76].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(env.run(&program(decap), &mut packet), Outcome::Drop(DropReason::BadEcn));
    // The checksum status of the NIC is about the inner headers only if the NIC parsed the tunnel.
    let good = ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD);
    for (checksum_status, expected) in [
        (good, Ok(ChecksumStatus::NONE)),
        (good.with(ChecksumStatus::OUTER_L3_GOOD), Ok(good)),
        (good.with(ChecksumStatus::OUTER_L4_BAD), Err(DropReason::BadL4Checksum)),
        (good.with(ChecksumStatus::OUTER_L3_BAD), Err(DropReason::BadChecksum)),
    ] {
        let mut packet = env.packet(&outer);
        packet.set_checksum_status(checksum_status);
        packet.set_vlan(9);
        let outcome = env.run(&program(decap), &mut packet);
        match expected {
            Ok(left) => assert_eq!((outcome, packet.checksum_status(), packet.vlan()), (Outcome::Next, left, None)),
            Err(reason) => assert_eq!(outcome, Outcome::Drop(reason)),
        }
    }
    // IP in IP is matched by its protocol number, which fragments have too.
    let piece = ethernet(0x0800, &ip4(4, &[], 0x2000, &inner[14..54]));
    let rule = format!("ingress prio 1: ipv4 proto 4 => decap l3 {}0800", hex(&MACS));
    assert_eq!(env.rule(&rule, &piece).0, Outcome::Drop(DropReason::OuterFragment));
}
