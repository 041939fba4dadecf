//! Matches and actions on real frames.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{self as device, MatchField, header, misc, misc2, misc3, misc5};
use wirepath_nic_defs::uverbs as defs;
use wirepath_nic_defs::uverbs::mlx5 as abi;
use zerocopy::IntoBytes;

use super::headers::{ESP, GRE, ICMP, ICMPV6, TCP, UDP};
use super::key::{self, Key, KeyParts, Registers, WORDS};
use super::modify::Program;
use super::reformat::Reformat;
use super::*;
use crate::connectx::{Class, SteeringSpec};
use crate::rules::FlowSpec;

const ALL: u8 = 0x5f;

fn ethernet(kind: u16, payload: &[u8]) -> Vec<u8> {
    [&[2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9], &kind.to_be_bytes()[..], payload].concat()
}

fn tagged(tags: &[(u16, u16)], kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(kind, payload);
    for (tpid, tci) in tags.iter().rev() {
        frame.splice(12..12, [tpid.to_be_bytes(), tci.to_be_bytes()].concat());
    }
    frame
}

/// Builds an IPv4 packet with valid checksums: 198.18.0.1 to 198.18.0.2, DSCP 10, ECN 1, TTL 64.
fn ipv4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0x29, 0, 0, 0, 7, 0x40, 0, 64, protocol, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2];
    packet[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
    let checksum = !frame::fold(frame::sum(&packet));
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend_from_slice(payload);
    with_transport_checksum(packet)
}

/// Builds an IPv6 packet with valid checksums: DSCP 10, ECN 1, flow label 0x12345, hop limit 63.
fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x62, 0x91, 0x23, 0x45, 0, 0, next, 63];
    packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    packet.extend((0..32u8).map(|byte| if byte % 16 == 0 { 0x20 } else { byte }));
    packet.extend_from_slice(payload);
    with_transport_checksum(packet)
}

fn with_transport_checksum(packet: Vec<u8>) -> Vec<u8> {
    let mut frame = ethernet(if packet[0] >> 4 == 4 { 0x0800 } else { 0x86dd }, &packet);
    let layers = frame::parse(&frame);
    if let Some(at) = layers.checksum_at().filter(|_| matches!(layers.protocol, TCP | UDP)) {
        let total = layers.pseudo_header(&frame, layers.end - layers.l4) + frame::sum(&frame[layers.l4..layers.end]);
        frame[at..at + 2].copy_from_slice(&(!frame::fold(total)).to_be_bytes());
    }
    frame.split_off(14)
}

fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let length = 8 + payload.len() as u16;
    [source, destination, length, 0].iter().flat_map(|half| half.to_be_bytes()).chain(payload.iter().copied()).collect()
}

/// Builds a TCP header: sequence 0x01020304, acknowledgement 0x05060708, flags NS, ACK and SYN.
fn tcp() -> Vec<u8> {
    [&[0, 80, 0x1f, 0x90, 1, 2, 3, 4, 5, 6, 7, 8, 0x51, 0x12, 0xff, 0xff, 0, 0, 0, 0][..], b"payload"].concat()
}

fn vxlan(inner: &[u8]) -> Vec<u8> {
    udp(0xc123, 4789, &[&[8, 0, 0, 0, 0x12, 0x34, 0x56, 0], inner].concat())
}

/// Builds a GRE packet with key 0xaabbccdd.
fn gre(kind: u16, inner: &[u8]) -> Vec<u8> {
    [&[0x20, 0], &kind.to_be_bytes()[..], &[0xaa, 0xbb, 0xcc, 0xdd], inner].concat()
}

/// Builds an MPLS packet: label 0x12345, traffic class 5, bottom of stack, TTL 9.
fn mpls(inner: &[u8]) -> Vec<u8> {
    [&[0x12, 0x34, 0x5b, 9], inner].concat()
}

fn key_with(frame: &[u8], registers: &Registers) -> Key {
    // The old content of the key must not be visible.
    let mut key = Key([u64::MAX; WORDS]);
    key.fill(frame, KeyParts { parts: ALL, checks: true }, registers);
    let mut outer = Key([u64::MAX; WORDS]);
    outer.fill(frame, KeyParts { parts: 1, checks: true }, registers);
    assert_eq!(outer.0[..8], key.0[..8]);
    key
}

fn key_of(frame: &[u8]) -> Key {
    key_with(frame, &Registers::default())
}

/// Checks the values of fields of a frame.
fn has(frame: &[u8], fields: &[(MatchField, u128)]) {
    let key = key_of(frame);
    for (field, value) in fields {
        assert_eq!(field.get(key.bytes()), *value, "{field:?} of {frame:x?}");
    }
}

/// Returns the integrity bits: L3 and L4 valid, IPv4 and L4 checksum valid.
fn order(frame: &[u8]) -> [u128; 4] {
    key::ORDER.map(|field| field.get(key_of(frame).bytes()))
}

#[test]
fn integrity_bits_report_invalid_layers() {
    let good = ethernet(0x0800, &ipv4(UDP, &vxlan(&ethernet(0x0806, &[0; 28]))));
    assert_eq!(order(&good), [1; 4]);
    has(&good, &[(misc5::tunnel_header(0), 0x0800_0000), (misc5::tunnel_header(1), 0x1234_5600)]);
    let with = |at: usize, bytes: [u8; 2]| {
        let mut frame = good.clone();
        frame[at..at + 2].copy_from_slice(&bytes);
        frame
    };
    assert_eq!(order(&with(24, [0x12, 0x34])), [0, 1, 0, 1], "IPv4 checksum");
    assert_eq!(order(&with(38, [0, 9])), [1, 0, 1, 0], "length that ends before the packet");
    assert_eq!(order(&with(40, [0x12, 0x34])), [1, 1, 1, 0], "checksum");
    assert_eq!(order(&with(40, [0, 0])), [1; 4], "no checksum");
    has(&with(42, [0, 0]), &[(misc5::tunnel_header(0), 0)]);
    has(&ethernet(0x0800, &ipv4(UDP, &udp(1, 53, b"12345678"))), &[(misc5::tunnel_header(0), 0)]);
}

#[test]
fn frames_matching_a_pattern_have_equal_masked_keys() {
    let fields = [
        header::DST_MAC,
        header::SRC_MAC,
        header::ETHERTYPE,
        header::IP_PROTOCOL,
        header::IP_DSCP,
        header::IP_ECN,
        header::FRAGMENT,
        header::IP_VERSION,
        header::CVLAN_TAG,
        header::FIRST_VID,
        header::TTL,
        header::IPV4_IHL,
        header::SRC_IPV6,
        header::SRC_IPV4,
        header::DST_IPV4,
        header::TCP_FLAGS,
        header::TCP_SPORT,
        header::TCP_DPORT,
        header::UDP_SPORT,
        header::UDP_DPORT,
    ];
    let mut random = fastrand::Rng::with_seed(7);
    let mut below = |limit: usize| random.usize(..limit);
    let payloads = [(TCP, tcp()), (UDP, udp(80, 8080, &[7; 20])), (ICMP, vec![8; 24])];
    let needs = KeyParts { parts: 1, checks: false };
    let (mut alike, mut others) = (0, 0);
    for _ in 0..100_000 {
        let mut bits = Key::NOTHING;
        for _ in 0..1 + below(3) {
            fields[below(fields.len())].set(bits.0.as_mut_bytes(), u128::MAX);
        }
        let (protocol, payload) = &payloads[below(payloads.len())];
        let frame = ethernet(0x0800, &ipv4(*protocol, payload));
        let pattern = key::pattern(&frame, needs, &bits).expect("plain IPv4");
        assert!(pattern.matches(&frame));
        let mut other = frame.clone();
        for _ in 0..below(3) {
            let at = below(other.len());
            other[at] ^= 1 << below(8);
        }
        if below(10) == 0 {
            other.truncate(frame.len() - below(40));
        }
        let seen = |frame: &[u8]| {
            let mut key = key_of(frame);
            key.mask_with(&bits);
            key
        };
        if pattern.matches(&other) {
            alike += u32::from(other != frame);
            assert_eq!(seen(&frame), seen(&other), "{frame:02x?} {other:02x?} {:02x?}", bits.bytes());
        } else {
            others += 1;
        }
    }
    assert!(alike > 10_000 && others > 10_000, "{alike} {others}");
    let bits = Key::NOTHING;
    let frame = ethernet(0x0800, &ipv4(TCP, &tcp()));
    assert!(key::pattern(&frame, KeyParts { parts: 1, checks: true }, &bits).is_none(), "sums are not compared");
    assert!(key::pattern(&frame, KeyParts { parts: 3, checks: false }, &bits).is_none(), "nor is the rest");
    assert!(key::pattern(&ethernet(0x86dd, &ipv6(UDP, &udp(1, 2, &[0; 9]))), needs, &bits).is_none());
}

#[test]
fn rule_changes_invalidate_the_cached_verdict() {
    let mut steering = Steering::new(SteeringSpec::of(Class::ConnectX6Dx), 1);
    let frame = ethernet(0x0800, &ipv4(UDP, &udp(1, 2, &[0; 9])));
    let ask = |steering: &mut Steering, frame: &[u8]| match steering.receive(0, frame) {
        RxVerdict::Queue { qp, tag, .. } => Some((qp, tag)),
        _ => None,
    };
    let mut cached_verdict = 0;
    let mut queue = |steering: &mut Steering| {
        let last = steering.cached_verdict(0, &[&frame]).map(|(count, qp, tag, layers)| {
            assert_eq!((count, *layers), (1, frame::parse(&frame)));
            (qp, tag)
        });
        cached_verdict += u32::from(last.is_some());
        last.or_else(|| ask(steering, &frame))
    };
    let enter = |steering: &mut Steering, priority: u8, field: MatchField, value: u128, qp: ObjectId| {
        let (mut mask, mut wanted) = (Key::NOTHING, Key::NOTHING);
        field.set(mask.0.as_mut_bytes(), u128::MAX);
        field.set(wanted.0.as_mut_bytes(), value);
        let rule = steering.rules.add(Rule::default());
        let action = Action { tag: Some(qp), ..Action::default() };
        let new = NewEntry {
            port: 0,
            egress: false,
            priority,
            mask,
            criteria: 1,
            value: wanted,
            action,
            qp: Some(qp),
            counter: None,
        };
        let entry_ref = steering.insert_entry(rule, new).expect("a rule");
        steering.rules.get_mut(rule).expect("it was just added").entries.push(entry_ref);
        rule
    };
    assert_eq!(queue(&mut steering), None);
    enter(&mut steering, 9, header::IP_VERSION, 4, 1);
    assert_eq!([queue(&mut steering), queue(&mut steering)], [Some((1, 1)); 2]);
    let before = enter(&mut steering, 3, header::UDP_DPORT, 2, 2);
    assert_eq!([queue(&mut steering), queue(&mut steering)], [Some((2, 2)); 2]);
    enter(&mut steering, 2, header::UDP_DPORT, 3, 3);
    assert_eq!([queue(&mut steering), queue(&mut steering)], [Some((2, 2)); 2]);
    steering.remove_rule(before);
    assert_eq!([queue(&mut steering), queue(&mut steering)], [Some((1, 1)); 2]);
    let mut other = frame.clone();
    other[37] = 3;
    let alike = [&frame[..], &frame, &other, &frame];
    assert_eq!(steering.cached_verdict(0, &alike).map(|(count, ..)| count), Some(2), "up to one that is not");
    assert_eq!((steering.cached_verdict(0, &[&other]).is_some(), ask(&mut steering, &other)), (false, Some((3, 3))));
    assert_eq!(queue(&mut steering), Some((1, 1)));
    assert_eq!(cached_verdict, 4, "the second of each two");
}

#[test]
fn plain_headers_are_read() {
    let inner_of = |frame: &[u8]| ethernet(0x0800, &ipv4(UDP, &vxlan(frame)));
    for (inner, wrap) in [(false, None), (true, Some(&inner_of as &dyn Fn(&[u8]) -> Vec<u8>))] {
        let at = |field: MatchField| if inner { field.inner() } else { field };
        let check = |frame: Vec<u8>, fields: &[(MatchField, u128)]| {
            let fields: Vec<_> = fields.iter().map(|(field, value)| (at(*field), *value)).collect();
            has(&wrap.map_or_else(|| frame.clone(), |wrap| wrap(&frame)), &fields);
        };
        check(
            ethernet(0x0800, &ipv4(TCP, &tcp())),
            &[
                (header::SRC_MAC, 0x0200_0000_0009),
                (header::DST_MAC, 0x0200_0000_0101),
                (header::ETHERTYPE, 0x0800),
                (header::IP_VERSION, 4),
                (header::IP_PROTOCOL, 6),
                (header::IP_DSCP, 10),
                (header::IP_ECN, 1),
                (header::TTL, 64),
                (header::IPV4_IHL, 5),
                (header::SRC_IPV4, 0xc612_0001),
                (header::DST_IPV4, 0xc612_0002),
                (header::TCP_SPORT, 80),
                (header::TCP_DPORT, 8080),
                (header::TCP_FLAGS, 0x112),
                (header::FRAGMENT, 0),
                (header::CVLAN_TAG, 0),
                (header::L3_OK, 1),
                (header::L4_OK, 1),
                (header::IPV4_CHECKSUM_OK, 1),
                (header::L4_CHECKSUM_OK, 1),
                (header::UDP_DPORT, 0),
            ],
        );
        check(
            ethernet(0x86dd, &ipv6(UDP, &udp(53, 5353, b"x"))),
            &[
                (header::IP_VERSION, 6),
                (header::IP_PROTOCOL, 17),
                (header::IP_DSCP, 10),
                (header::IP_ECN, 1),
                (header::TTL, 63),
                (header::SRC_IPV6, 0x2001_0203_0405_0607_0809_0a0b_0c0d_0e0f),
                (header::DST_IPV6, 0x2011_1213_1415_1617_1819_1a1b_1c1d_1e1f),
                (header::UDP_SPORT, 53),
                (header::UDP_DPORT, 5353),
                (header::IPV4_CHECKSUM_OK, 0),
                (header::L4_CHECKSUM_OK, 1),
            ],
        );
        check(
            tagged(&[(0x88a8, 0xa123), (0x8100, 0x5456)], 0x0806, &[0; 28]),
            &[
                (header::FIRST_PRIO, 5),
                (header::FIRST_CFI, 0),
                (header::FIRST_VID, 0x123),
                (header::SVLAN_TAG, 1),
                (header::CVLAN_TAG, 0),
                (header::ETHERTYPE, 0x0806),
                (header::IP_VERSION, 0),
            ],
        );
    }
    let double = tagged(&[(0x88a8, 0xa123), (0x8100, 0x5456)], 0x0806, &[0; 28]);
    has(
        &double,
        &[
            (misc::OUTER_SECOND_PRIO, 2),
            (misc::OUTER_SECOND_CFI, 1),
            (misc::OUTER_SECOND_VID, 0x456),
            (misc::OUTER_SECOND_CVLAN, 1),
            (misc::OUTER_SECOND_SVLAN, 0),
            (misc::INNER_SECOND_VID, 0),
        ],
    );
    let inside = ethernet(0x0800, &ipv4(UDP, &vxlan(&tagged(&[(0x8100, 1), (0x88a8, 2)], 0x86dd, &ipv6(59, &[])))));
    has(
        &inside,
        &[
            (misc::INNER_SECOND_VID, 2),
            (misc::INNER_SECOND_SVLAN, 1),
            (misc::INNER_FLOW_LABEL, 0x12345),
            (misc::OUTER_FLOW_LABEL, 0),
        ],
    );
}

#[test]
fn tunnels_are_parsed_with_their_payload() {
    let inside = ethernet(0x0800, &ipv4(TCP, &tcp()));
    let there = (header::TCP_DPORT.inner(), 8080u128);
    has(
        &ethernet(0x0800, &ipv4(UDP, &vxlan(&inside))),
        &[(misc::VXLAN_VNI, 0x12_3456), (header::UDP_DPORT, 4789), there],
    );
    has(
        &ethernet(0x86dd, &ipv6(UDP, &vxlan(&inside))),
        &[(misc::VXLAN_VNI, 0x12_3456), (misc::OUTER_FLOW_LABEL, 0x12345), there],
    );
    let gpe = [&[0x0c, 0, 0, 1, 0xab, 0xcd, 0xef, 0][..], &ipv4(TCP, &tcp())].concat();
    has(
        &ethernet(0x0800, &ipv4(UDP, &udp(1, 4790, &gpe))),
        &[
            (misc3::GPE_VNI, 0xab_cdef),
            (misc3::GPE_NEXT_PROTOCOL, 1),
            (misc3::GPE_FLAGS, 0x0c),
            (misc::VXLAN_VNI, 0),
            there,
        ],
    );
    // Options of two words, and the control bit.
    let geneve = [&[0x02, 0x80, 0x65, 0x58, 0x65, 0x43, 0x21, 0][..], &[0xee; 8], &inside].concat();
    has(
        &ethernet(0x0800, &ipv4(UDP, &udp(1, 6081, &geneve))),
        &[
            (misc::GENEVE_VNI, 0x65_4321),
            (misc::GENEVE_OPT_LEN, 2),
            (misc::GENEVE_OAM, 1),
            (misc::GENEVE_PROTOCOL, 0x6558),
            there,
        ],
    );
    has(
        &ethernet(0x0800, &ipv4(GRE, &gre(0x0800, &ipv4(TCP, &tcp())))),
        &[(misc::GRE_KEY, 0xaabb_ccdd), (misc::GRE_K, 1), (misc::GRE_C, 0), (misc::GRE_PROTOCOL, 0x0800), there],
    );
    has(&ethernet(0x0800, &ipv4(GRE, &gre(0x6558, &inside))), &[(header::SRC_MAC.inner(), 0x0200_0000_0009), there]);
    has(
        &ethernet(0x0800, &ipv4(GRE, &gre(0x8847, &mpls(&ipv4(TCP, &tcp()))))),
        &[(misc2::MPLS_OVER_GRE, 0x1234_5b09), (misc2::OUTER_MPLS, 0), there],
    );
    has(
        &ethernet(0x0800, &ipv4(UDP, &udp(1, 6635, &mpls(&ipv4(TCP, &tcp()))))),
        &[(misc2::MPLS_OVER_UDP, 0x1234_5b09), there],
    );
    has(&ethernet(0x8847, &mpls(&ipv4(TCP, &tcp()))), &[(misc2::OUTER_MPLS, 0x1234_5b09), (header::TCP_DPORT, 8080)]);
    let inner_mpls = ethernet(0x8847, &mpls(&ipv4(TCP, &tcp())));
    has(&ethernet(0x0800, &ipv4(UDP, &vxlan(&inner_mpls))), &[(misc2::INNER_MPLS, 0x1234_5b09), there]);
    has(&ethernet(0x0800, &ipv4(41, &ipv6(TCP, &tcp()))), &[(header::IP_VERSION.inner(), 6), there]);
}

#[test]
fn numbers_and_messages_are_read() {
    let outer = ethernet(0x0800, &ipv4(TCP, &tcp()));
    has(&outer, &[(misc3::OUTER_TCP_SEQ, 0x0102_0304), (misc3::OUTER_TCP_ACK, 0x0506_0708), (misc3::INNER_TCP_SEQ, 0)]);
    let inner = ethernet(0x0800, &ipv4(UDP, &vxlan(&outer)));
    has(&inner, &[(misc3::INNER_TCP_SEQ, 0x0102_0304), (misc3::INNER_TCP_ACK, 0x0506_0708), (misc3::OUTER_TCP_SEQ, 0)]);
    let echo = [8, 1, 0, 0, 0xde, 0xad, 0xbe, 0xef];
    has(
        &ethernet(0x0800, &ipv4(ICMP, &echo)),
        &[(misc3::ICMP_TYPE, 8), (misc3::ICMP_CODE, 1), (misc3::ICMP_DATA, 0xdead_beef)],
    );
    has(
        &ethernet(0x86dd, &ipv6(ICMPV6, &echo)),
        &[(misc3::ICMPV6_TYPE, 8), (misc3::ICMPV6_DATA, 0xdead_beef), (misc3::ICMP_TYPE, 0)],
    );
    let esp = ethernet(0x0800, &ipv4(ESP, &[0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 1]));
    has(&esp, &[(misc::OUTER_ESP_SPI, 0xdead_beef), (misc::INNER_ESP_SPI, 0)]);
    has(&ethernet(0x0800, &ipv4(UDP, &vxlan(&esp))), &[(misc::INNER_ESP_SPI, 0xdead_beef), (misc::OUTER_ESP_SPI, 0)]);
    let registers = Registers { a: 1, b: 2, c: [10, 11, 12, 13, 14, 15, 16, 17], queue: 0x123 };
    let key = key_with(&outer, &registers);
    let fields =
        [(misc2::REG_A, 1), (misc2::REG_B, 2), (misc2::reg_c(0), 10), (misc2::reg_c(7), 17), (misc::SOURCE_SQN, 0x123)];
    for (field, value) in fields {
        assert_eq!(field.get(key.bytes()), value, "{field:?}");
    }
}

#[test]
fn fragments_are_parsed_up_to_the_addresses() {
    let mut first = ethernet(0x0800, &ipv4(UDP, &udp(53, 53, b"x")));
    first[20] = 0x20;
    let fields = [(header::FRAGMENT, 1), (header::IP_PROTOCOL, 17), (header::UDP_DPORT, 0)];
    has(&first, &fields);
    let header = [&[UDP, 0, 0, 9, 0, 0, 0, 1][..], &udp(53, 53, b"x")].concat();
    has(&ethernet(0x86dd, &ipv6(44, &header)), &fields);
    let options = [&[UDP, 0, 1, 4, 0, 0, 0, 0][..], &udp(53, 54, b"x")].concat();
    has(&ethernet(0x86dd, &ipv6(0, &options)), &[(header::FRAGMENT, 0), (header::UDP_DPORT, 54)]);
}

#[test]
fn truncated_frames_do_not_panic() {
    let inside = tagged(&[(0x88a8, 1), (0x8100, 2)], 0x86dd, &ipv6(TCP, &tcp()));
    let whole = [
        ethernet(0x0800, &ipv4(UDP, &vxlan(&inside))),
        ethernet(0x0800, &ipv4(UDP, &udp(1, 6635, &mpls(&ipv4(TCP, &tcp()))))),
        ethernet(0x86dd, &ipv6(GRE, &gre(0x8847, &mpls(&ipv4(TCP, &tcp()))))),
        ethernet(0x0800, &ipv4(UDP, &udp(1, 6081, &[&[0x3f, 0, 0x65, 0x58, 0, 0, 0, 0][..], &inside].concat()))),
    ];
    let program = Program::read(&every_field(), 0).unwrap();
    let kinds: Vec<Reformat> = (0..4).map(|kind| reformat(kind, &[0; 14]).unwrap()).collect();
    for frame in whole {
        for length in 0..frame.len() {
            let cut = &frame[..length];
            let headers = headers::parse(cut);
            assert_eq!(headers.outer.version, 0, "{length}");
            key_of(cut);
        }
        // Any byte may be wrong.
        for at in 0..frame.len() {
            for value in [0, 1, 0x45, 0x60, 0x81, 0xff] {
                let mut frame = frame.clone();
                frame[at] = value;
                key_of(&frame);
                program.apply(&mut frame.clone(), &mut Registers::default());
                for kind in &kinds {
                    let _ = kind.apply(&mut frame.clone(), true);
                }
            }
        }
    }
}

fn spec(kind: u32, inner: bool, value: &[u8], mask: &[u8]) -> FlowSpec {
    FlowSpec::Match { kind, inner, value: value.to_vec(), mask: mask.to_vec() }
}

fn fits(specs: &[FlowSpec], frame: &[u8]) -> bool {
    let read = specs::read(specs).unwrap();
    assert_eq!(read.value.first_byte_outside(&read.mask), None, "{specs:x?}");
    assert_eq!(read.mask.first_byte_outside(&key::supported(true)), None, "{specs:x?}");
    let key = key_of(frame);
    (0..key.0.len()).all(|at| key.0[at] & read.mask.0[at] == read.value.0[at])
}

#[test]
fn each_spec_matches_only_its_header() {
    let frame = ethernet(0x0800, &ipv4(TCP, &tcp()));
    let six = ethernet(0x86dd, &ipv6(UDP, &udp(53, 5353, b"x")));
    let vlan = tagged(&[(0x8100, 0xa005)], 0x0800, &ipv4(TCP, &tcp()));
    let service = tagged(&[(0x88a8, 0xa005)], 0x0800, &ipv4(TCP, &tcp()));
    let tunnel = ethernet(0x0800, &ipv4(UDP, &vxlan(&frame)));
    let gre_packet = ethernet(0x0800, &ipv4(GRE, &gre(0x0800, &ipv4(TCP, &tcp()))));
    let in_udp = ethernet(0x0800, &ipv4(UDP, &udp(1, 6635, &mpls(&ipv4(TCP, &tcp())))));
    let labelled = ethernet(0x8847, &mpls(&ipv4(TCP, &tcp())));

    let mut mac = [0; 16];
    mac[..6].copy_from_slice(&[2, 0, 0, 0, 1, 1]);
    let all = |count: usize, of: usize| -> Vec<u8> { (0..of).map(|at| if at < count { 0xff } else { 0 }).collect() };
    assert!(fits(&[spec(defs::SPEC_ETH, false, &mac, &all(6, 16))], &frame));
    assert!(fits(&[spec(defs::SPEC_ETH, true, &mac, &all(6, 16))], &tunnel));
    mac[5] = 2;
    assert!(!fits(&[spec(defs::SPEC_ETH, false, &mac, &all(6, 16))], &frame));
    let (mut tag, mut mask) = ([0; 16], [0; 16]);
    (tag[14], tag[15], mask[14], mask[15]) = (0xa0, 5, 0xef, 0xff);
    let tag = [spec(defs::SPEC_ETH, false, &tag, &mask)];
    assert!(fits(&tag, &vlan) && !fits(&tag, &service) && !fits(&tag, &frame));

    let mut four = [0; 12];
    four[..9].copy_from_slice(&[198, 18, 0, 1, 198, 18, 0, 2, TCP]);
    four[9] = 0x29;
    let four_specs = |mask: &[u8]| [spec(defs::SPEC_IPV4, false, &four, mask)];
    assert!(fits(&four_specs(&all(10, 12)), &frame));
    assert!(!fits(&[spec(defs::SPEC_IPV4, false, &[0; 12], &[0; 12])], &six));
    assert!(fits(&[spec(defs::SPEC_IPV4, true, &four, &all(10, 12))], &tunnel));
    let wrong = |specs: &[FlowSpec]| specs::read(specs).unwrap_err().0;
    assert_eq!(wrong(&[spec(defs::SPEC_IPV4, false, &[0; 12], &all(11, 12))]), Errno::OPNOTSUPP);

    let mut seen = [0u8; 40];
    seen[..32].copy_from_slice(&six[22..54]);
    seen[32..36].copy_from_slice(&0x12345u32.to_be_bytes());
    (seen[36], seen[37]) = (UDP, 0x29);
    let mut mask = all(38, 40);
    mask[32..36].copy_from_slice(&0xf_ffffu32.to_be_bytes());
    assert!(fits(&[spec(defs::SPEC_IPV6, false, &seen, &mask)], &six));
    seen[35] ^= 1;
    assert!(!fits(&[spec(defs::SPEC_IPV6, false, &seen, &mask)], &six));
    assert_eq!(wrong(&[spec(defs::SPEC_IPV6, false, &[0; 40], &all(39, 40))]), Errno::OPNOTSUPP);

    // The destination port is first.
    assert!(fits(&[spec(defs::SPEC_TCP, false, &[0x1f, 0x90, 0, 80], &[0xff; 4])], &frame));
    assert!(fits(&[spec(defs::SPEC_UDP, false, &[0x14, 0xe9, 0, 53], &[0xff; 4])], &six));
    assert!(!fits(&[spec(defs::SPEC_UDP, false, &[0; 4], &[0; 4])], &frame));
    assert_eq!(
        wrong(&[spec(defs::SPEC_IPV4, false, &four, &all(9, 12)), spec(defs::SPEC_UDP, false, &[0; 4], &[0; 4])]),
        Errno::INVAL
    );
    let identifier = [0, 0x12, 0x34, 0x56];
    assert!(fits(&[spec(defs::SPEC_VXLAN, false, &identifier, &[0, 0xff, 0xff, 0xff])], &tunnel));
    assert!(!fits(&[spec(defs::SPEC_VXLAN, false, &identifier, &[0, 0xff, 0xff, 0xff])], &frame));
    let key = [0, 0, 8, 0, 0xaa, 0xbb, 0xcc, 0xdd];
    assert!(fits(&[spec(defs::SPEC_GRE, false, &key, &[0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff])], &gre_packet));
    assert_eq!(wrong(&[spec(defs::SPEC_GRE, false, &[0; 8], &[0x80, 0, 0, 0, 0, 0, 0, 0])]), Errno::OPNOTSUPP);
    let label = [spec(defs::SPEC_MPLS, false, &[0x12, 0x34, 0x5b, 9], &[0xff; 4])];
    assert!(fits(&label, &labelled) && !fits(&label, &in_udp));
    let over = [spec(defs::SPEC_UDP, false, &[0; 4], &[0; 4]), label[0].clone()];
    assert!(fits(&over, &in_udp) && !fits(&over, &labelled));
    assert_eq!(wrong(&[spec(defs::SPEC_ESP, false, &[0; 8], &[0; 8])]), Errno::OPNOTSUPP);
    assert_eq!(wrong(&[FlowSpec::Tag(1 << 24)]), Errno::INVAL);
    assert_eq!(wrong(&[FlowSpec::Count(1), FlowSpec::Count(2)]), Errno::INVAL);
}

#[test]
fn an_ethertype_goes_with_the_header_behind_it() {
    let ether = |kind: u16, mask: u16| {
        let (mut value, mut masks) = ([0; 16], [0; 16]);
        value[12..14].copy_from_slice(&(kind & mask).to_be_bytes());
        masks[12..14].copy_from_slice(&mask.to_be_bytes());
        spec(defs::SPEC_ETH, false, &value, &masks)
    };
    let four = spec(defs::SPEC_IPV4, false, &[0; 12], &[0; 12]);
    for (ether, right) in [
        (ether(0x0800, 0xffff), true),
        (ether(0x86dd, 0xffff), false),
        (ether(0x8847, 0xffff), true),
        (ether(0x0800, 0xff00), false),
    ] {
        assert_eq!(specs::read(&[ether.clone(), four.clone()]).is_ok(), right, "{ether:?}");
    }
}

fn reformat(kind: u8, data: &[u8]) -> Result<Reformat, Errno> {
    let table = if kind.is_multiple_of(2) { abi::TABLE_NIC_RX } else { abi::TABLE_NIC_TX };
    let data = (!data.is_empty()).then_some(data);
    Reformat::new(kind, table, data, &SteeringSpec::of(Class::ConnectX6Dx)).map_err(|(errno, _)| errno)
}

fn reformatted(kind: &Reformat, frame: &[u8]) -> Option<Vec<u8>> {
    let mut packet = frame.to_vec();
    kind.apply(&mut packet, true).ok().map(|()| packet)
}

#[test]
fn decapsulation_removes_tunnels() {
    let inside = ethernet(0x0800, &ipv4(TCP, &tcp()));
    let off = reformat(abi::REFORMAT_L2_TUNNEL_TO_L2, &[]).unwrap();
    for outer in [ipv4(UDP, &vxlan(&inside)), ipv4(GRE, &gre(0x6558, &inside))] {
        // Padding of the outer frame does not belong to the inner frame.
        let frame = [ethernet(0x0800, &outer), vec![0; 5]].concat();
        assert_eq!(reformatted(&off, &frame).unwrap(), inside);
    }
    assert_eq!(reformatted(&off, &inside), None, "no tunnel");
    let packet = ipv4(TCP, &tcp());
    let bare = ethernet(0x0800, &ipv4(GRE, &gre(0x0800, &packet)));
    assert_eq!(reformatted(&off, &bare), None, "no frame inside");
    for length in [14, 18] {
        let link = vec![7; length];
        let off = reformat(abi::REFORMAT_L3_TUNNEL_TO_L2, &link).unwrap();
        assert_eq!(reformatted(&off, &[bare.clone(), vec![0; 5]].concat()).unwrap(), [&link[..], &packet].concat());
        assert_eq!(reformatted(&off, &ethernet(0x0800, &ipv4(UDP, &vxlan(&inside)))), None, "a frame inside");
    }
    assert_eq!(reformat(abi::REFORMAT_L3_TUNNEL_TO_L2, &[0; 15]).unwrap_err(), Errno::INVAL);
    assert_eq!(reformat(abi::REFORMAT_L3_TUNNEL_TO_L2, &[]).unwrap_err(), Errno::NOENT);
    assert_eq!(reformat(4, &[1]).unwrap_err(), Errno::INVAL);
}

#[test]
fn encapsulation_sets_lengths_checksum_entropy() {
    let inside = tagged(&[(0x8100, 5)], 0x0800, &ipv4(TCP, &tcp()));
    // Lengths, checksum and source port of the template are wrong on purpose.
    let mut outer = ethernet(0x0800, &ipv4(UDP, &vxlan(&[])));
    outer[16..18].fill(0xee);
    outer[24..26].fill(0xee);
    outer[38..40].fill(0xee);
    outer[40..42].fill(0);
    let on = reformat(abi::REFORMAT_L2_TO_L2_TUNNEL, &outer).unwrap();
    let frame = reformatted(&on, &inside).unwrap();
    let layers = frame::parse(&frame);
    assert_eq!((layers.ip_checksum_ok(&frame), layers.protocol, layers.end), (Some(true), UDP, frame.len()));
    assert_eq!(&frame[50..], inside);
    assert_eq!(u16::from_be_bytes([frame[38], frame[39]]) as usize, frame.len() - 34);
    assert_eq!(frame[40..42], [0, 0], "the checksum is the data's");
    assert!(frame[34] >= 0xc0);
    let mut literal = inside.clone();
    on.apply(&mut literal, false).unwrap();
    assert_eq!(literal[34..36], outer[34..36], "without entropy");

    let outer = ethernet(0x86dd, &ipv6(GRE, &gre(0x0800, &[])));
    let on = reformat(abi::REFORMAT_L2_TO_L3_TUNNEL, &outer).unwrap();
    let frame = reformatted(&on, &inside).unwrap();
    assert_eq!(u16::from_be_bytes([frame[18], frame[19]]) as usize, frame.len() - 54);
    assert_eq!(frame[58..61], [0xaa, 0xbb, 0xcc], "the low byte of the key is entropy");
    assert_eq!(frame[62..], ipv4(TCP, &tcp()), "link header and tag are gone");
    assert_eq!(reformatted(&on, &ethernet(0x0806, &[0; 28])), None, "no IP packet");
    // Data that is not a header is added unchanged.
    for length in 1..outer.len() {
        let on = reformat(abi::REFORMAT_L2_TO_L2_TUNNEL, &outer[..length]).unwrap();
        assert_eq!(&reformatted(&on, &inside).unwrap()[length..], inside);
    }
}

#[test]
fn reformats_respect_capabilities() {
    let mut spec = SteeringSpec::of(Class::ConnectX5);
    spec.reformats = 0b1101;
    spec.encap_bytes = 10;
    let new = |kind, table, data| Reformat::new(kind, table, data, &spec).map_err(|(errno, _)| errno);
    assert_eq!(new(abi::REFORMAT_L2_TO_L2_TUNNEL, abi::TABLE_NIC_TX, Some(&[0; 5][..])).unwrap_err(), Errno::OPNOTSUPP);
    assert_eq!(new(abi::REFORMAT_L2_TO_L3_TUNNEL, abi::TABLE_NIC_TX, Some(&[0; 11][..])).unwrap_err(), Errno::INVAL);
    assert_eq!(new(abi::REFORMAT_L2_TO_L3_TUNNEL, abi::TABLE_NIC_RX, Some(&[0; 5][..])).unwrap_err(), Errno::OPNOTSUPP);
    assert!(new(abi::REFORMAT_L2_TUNNEL_TO_L2, abi::TABLE_NIC_RX, None).is_ok());
}

fn command(action: u32, field: u32, offset: u32, length: u32, data: u32) -> Vec<u8> {
    let first =
        device::Modify::default().with_action(action).with_field(field).with_offset(offset).with_length(length % 32);
    [first.0.to_be_bytes(), data.to_be_bytes()].concat()
}

fn set(field: u32, bits: u32, data: u32) -> Vec<u8> {
    command(device::MODIFY_SET, field, 0, bits, data)
}

/// Returns a command for every existing field.
fn every_field() -> Vec<u8> {
    let bits = [32, 16, 16, 32, 16, 6, 9, 16, 16, 8, 16, 16];
    let mut commands: Vec<u8> = (1..).zip(bits).flat_map(|(field, bits)| set(field, bits, 0xffff_ffff)).collect();
    commands.extend((0x0d..=0x16).flat_map(|field| set(field, 32, 0)));
    commands.extend(set(device::MODIFY_FIRST_VID, 12, 0x123));
    commands.extend((0x31..).zip(bits).flat_map(|(field, bits)| set(field, bits, 0xffff_ffff)));
    commands.extend((0x47..=0x48).flat_map(|field| set(field, 8, 1)));
    commands.extend([0x49].into_iter().chain(0x50..=0x5c).flat_map(|field| set(field, 32, 0)));
    commands
}

fn modified(commands: &[Vec<u8>], frame: &[u8]) -> Vec<u8> {
    let mut packet = frame.to_vec();
    let program = Program::read(&commands.concat(), 0).unwrap();
    program.apply(&mut packet, &mut Registers::default());
    // Valid checksums stay valid.
    let (before, after) = (frame::parse(frame), frame::parse(&packet));
    if after.network.is_none() {
        return packet;
    }
    assert_eq!(after.ip_checksum_ok(&packet), before.ip_checksum_ok(frame));
    assert_eq!(after.transport_checksum_ok(&packet), before.transport_checksum_ok(frame));
    packet
}

#[test]
fn every_field_is_modified() {
    let four = ethernet(0x0800, &ipv4(TCP, &tcp()));
    let four_udp = ethernet(0x0800, &ipv4(UDP, &udp(53, 5353, b"x")));
    let six = ethernet(0x86dd, &ipv6(TCP, &tcp()));
    let vlan = tagged(&[(0x8100, 0xa005)], 0x0800, &ipv4(TCP, &tcp()));
    /// Frame; field, bits and data of a command; changed field and its value.
    type Case<'f> = (&'f [u8], u32, u32, u32, MatchField, u128);
    let cases: &[Case<'_>] = &[
        (&four, device::MODIFY_SRC_MAC_HIGH, 32, 0x0611_2233, header::SRC_MAC, 0x0611_2233_0009),
        (&four, device::MODIFY_SRC_MAC_LOW, 16, 0x4455, header::SRC_MAC, 0x0200_0000_4455),
        (&four, device::MODIFY_DST_MAC_HIGH, 32, 0x0611_2233, header::DST_MAC, 0x0611_2233_0101),
        (&four, device::MODIFY_DST_MAC_LOW, 16, 0x4455, header::DST_MAC, 0x0200_0000_4455),
        (&vlan, device::MODIFY_ETHERTYPE, 16, 0x9999, header::ETHERTYPE, 0x9999),
        (&vlan, device::MODIFY_FIRST_VID, 12, 0x777, header::FIRST_VID, 0x777),
        (&vlan, device::MODIFY_FIRST_VID, 12, 0x777, header::FIRST_PRIO, 5),
        (&four, device::MODIFY_DSCP, 6, 0x3f, header::IP_DSCP, 0x3f),
        (&four, device::MODIFY_DSCP, 6, 0x3f, header::IP_ECN, 1),
        (&six, device::MODIFY_DSCP, 6, 0x15, header::IP_DSCP, 0x15),
        (&six, device::MODIFY_DSCP, 6, 0x15, header::IP_ECN, 1),
        (&six, device::MODIFY_DSCP, 6, 0x15, misc::OUTER_FLOW_LABEL, 0x12345),
        (&four, device::MODIFY_TCP_FLAGS, 9, 0x0ff, header::TCP_FLAGS, 0x0ff),
        (&four, device::MODIFY_TCP_SPORT, 16, 7, header::TCP_SPORT, 7),
        (&six, device::MODIFY_TCP_DPORT, 16, 7, header::TCP_DPORT, 7),
        (&four_udp, device::MODIFY_UDP_SPORT, 16, 7, header::UDP_SPORT, 7),
        (&four_udp, device::MODIFY_UDP_DPORT, 16, 7, header::UDP_DPORT, 7),
        (&four, device::MODIFY_UDP_DPORT, 16, 7, header::TCP_DPORT, 8080),
        (&four, device::MODIFY_TTL, 8, 7, header::TTL, 7),
        (&six, device::MODIFY_TTL, 8, 7, header::TTL, 63),
        (&six, device::MODIFY_HOP_LIMIT, 8, 7, header::TTL, 7),
        (&four, device::MODIFY_HOP_LIMIT, 8, 7, header::TTL, 64),
        (&four, device::MODIFY_SRC_IPV4, 32, 0x0a00_0001, header::SRC_IPV4, 0x0a00_0001),
        (&four, device::MODIFY_DST_IPV4, 32, 0x0a00_0001, header::DST_IPV4, 0x0a00_0001),
        (&six, device::MODIFY_SRC_IPV6, 32, 0xfe80_0000, header::SRC_IPV6, 0xfe80_0000_0405_0607_0809_0a0b_0c0d_0e0f),
        (&six, device::MODIFY_SRC_IPV6 + 3, 32, 1, header::SRC_IPV6, 0x2001_0203_0405_0607_0809_0a0b_0000_0001),
        (&six, device::MODIFY_DST_IPV6 + 1, 32, 1, header::DST_IPV6, 0x2011_1213_0000_0001_1819_1a1b_1c1d_1e1f),
        (&four, device::MODIFY_TCP_SEQ, 32, 0xdead_beef, misc3::OUTER_TCP_SEQ, 0xdead_beef),
        (&four, device::MODIFY_TCP_ACK, 32, 0xdead_beef, misc3::OUTER_TCP_ACK, 0xdead_beef),
    ];
    for (frame, field, bits, data, there, value) in cases {
        has(&modified(&[set(*field, *bits, *data)], frame), &[(*there, *value)]);
        // Repeats the test inside a tunnel, for fields that exist there.
        let inner_field = match *field {
            device::MODIFY_HOP_LIMIT => Some(device::MODIFY_INNER_HOP_LIMIT),
            device::MODIFY_TCP_SEQ | device::MODIFY_TCP_ACK => Some(field + 1),
            field if field <= device::MODIFY_DST_IPV4 => Some(field + device::MODIFY_INNER),
            _ => None,
        };
        if let Some(field) = inner_field.filter(|_| *there != misc::OUTER_FLOW_LABEL) {
            let mut tunnel = ethernet(0x0800, &ipv4(UDP, &vxlan(frame)));
            tunnel[40..42].fill(0); // without an outer checksum, which the device leaves alone
            let there = match *there {
                misc3::OUTER_TCP_SEQ => misc3::INNER_TCP_SEQ,
                misc3::OUTER_TCP_ACK => misc3::INNER_TCP_ACK,
                there => there.inner(),
            };
            has(&modified(&[set(field, *bits, *data)], &tunnel), &[(there, *value)]);
        }
    }
}

#[test]
fn fields_are_added_copied_and_partly_changed() {
    let frame = ethernet(0x0800, &ipv4(TCP, &tcp()));
    let add = |field, data| command(device::MODIFY_ADD, field, 0, 0, data);
    has(&modified(&[add(device::MODIFY_TTL, 0xff)], &frame), &[(header::TTL, 63)]);
    has(&modified(&[add(device::MODIFY_TCP_SEQ, 0xffff_ffff)], &frame), &[(misc3::OUTER_TCP_SEQ, 0x0102_0303)]);
    let copy = |from: u32, from_bit, to: u32, to_bit, length: u32| {
        let target = device::Modify::default().with_field(to).with_offset(to_bit);
        command(device::MODIFY_COPY, from, from_bit, length, target.0)
    };
    has(
        &modified(&[copy(device::MODIFY_DST_IPV4, 0, device::MODIFY_SRC_IPV4, 0, 32)], &frame),
        &[(header::SRC_IPV4, 0xc612_0002)],
    );
    // Copies the upper byte of the destination port to the lower byte of the source port.
    let half = copy(device::MODIFY_TCP_DPORT, 8, device::MODIFY_TCP_SPORT, 0, 8);
    has(&modified(&[half], &frame), &[(header::TCP_SPORT, 0x001f)]);
    has(
        &modified(&[command(device::MODIFY_SET, device::MODIFY_TCP_SPORT, 4, 8, 0xab)], &frame),
        &[(header::TCP_SPORT, 0x0ab0)],
    );

    // Registers keep their values from command to command.
    let mut packet = frame.clone();
    let mut registers = Registers { a: 0x1234, ..Registers::default() };
    let commands = [copy(device::MODIFY_REG_A, 0, device::MODIFY_REG_B, 0, 32), add(device::MODIFY_REG_B, 1)].concat();
    let program = Program::read(&commands, 0).unwrap();
    program.apply(&mut packet, &mut registers);
    assert_eq!((registers.b, packet == frame), (0x1235, true));

    let refused = |bytes: &[u8]| Program::read(bytes, 0).unwrap_err().0 == Errno::INVAL;
    assert!(refused(&set(device::MODIFY_TTL, 9, 0)) && refused(&set(device::MODIFY_TTL, 32, 0)));
    assert!(refused(&set(0, 8, 0)) && refused(&set(0x18, 8, 0)) && refused(&set(0xfff, 8, 0)));
    assert!(refused(&command(4, device::MODIFY_TTL, 0, 8, 0)));
    assert!(refused(&command(device::MODIFY_ADD, device::MODIFY_TTL, 1, 7, 0)));
    assert!(refused(&copy(device::MODIFY_TTL, 0, 0x18, 0, 8)));
    assert!(refused(&copy(device::MODIFY_TTL, 1, device::MODIFY_DSCP, 0, 8)));
}

#[test]
fn absent_and_wrong_udp_checksums_are_preserved() {
    let mut frame = ethernet(0x0800, &ipv4(UDP, &udp(53, 5353, b"payload")));
    frame[40..42].fill(0);
    let after = modified(&[set(device::MODIFY_SRC_IPV4, 32, 7)], &frame);
    assert_eq!(after[40..42], [0, 0]);
    frame[40..42].copy_from_slice(&[0x12, 0x34]);
    modified(&[set(device::MODIFY_SRC_IPV4, 32, 7), set(device::MODIFY_UDP_DPORT, 16, 7)], &frame);
}
