//! Programs on packets built here; judged by full recomputation of every checksum.

use wirepath_wire::Parser;
use wirepath_wire::checksum;
use wirepath_wire::checksum::Transport;
use wirepath_wire::finish::Coverage;

use super::*;

/// What a program does to its surroundings.
pub(super) struct Surroundings {
    pub(super) pool: Pool,
    pub(super) now: u64,
    pub(super) toeplitz: Toeplitz,
    pub(super) counted: Vec<usize>,
    pub(super) mirrored: Vec<(PortId, Packet)>,
    pub(super) lost: usize,
}

impl Surroundings {
    pub(super) fn new() -> Self {
        let pool = Pool::new("rules", 256).unwrap();
        Self { pool, now: 0, toeplitz: Toeplitz::default(), counted: Vec::new(), mirrored: Vec::new(), lost: 0 }
    }

    pub(super) fn packet(&self, bytes: &[u8]) -> Packet {
        let mut packet = self.pool.take().unwrap();
        assert!(packet.extend_from_slice(bytes, &self.pool));
        packet
    }

    pub(super) fn run(&mut self, program: &Program, packet: &mut Packet) -> Outcome {
        let parsed = Parser::default().parse_chain(packet.data(), packet.len()).unwrap();
        program.run(packet, &parsed, self)
    }

    /// Runs a rule on a frame: what becomes of it, and its bytes.
    pub(super) fn rule(&mut self, rule: &str, frame: &[u8]) -> (Outcome, Vec<u8>) {
        let mut packet = self.packet(frame);
        let outcome = self.run(&program(rule), &mut packet);
        (outcome, bytes(&packet))
    }

    /// The same for a rule that lets the packet go on.
    pub(super) fn next(&mut self, rule: &str, frame: &[u8]) -> Vec<u8> {
        let (outcome, bytes) = self.rule(rule, frame);
        assert_eq!(outcome, Outcome::Next, "{rule}");
        bytes
    }
}

impl Environment for Surroundings {
    fn now(&self) -> u64 {
        self.now
    }
    fn pool(&self) -> Option<&Pool> {
        Some(&self.pool)
    }
    fn toeplitz(&self) -> &Toeplitz {
        &self.toeplitz
    }
    fn count(&mut self, bytes: usize) {
        self.counted.push(bytes);
    }
    fn mirror(&mut self, port: PortId, copy: Packet) {
        self.mirrored.push((port, copy));
    }
    fn lost_copy(&mut self, _: DropReason) {
        self.lost += 1;
    }
}

pub(super) fn program(rule: &str) -> Program {
    Program::compile(&rule.parse::<Rule>().unwrap_or_else(|e| panic!("{rule}: {e}")))
}

pub(super) fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().flatten().copied().collect()
}

const MACS: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter_map(|b| char::from(b).to_digit(16)).map(|d| d as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// An IPv4 packet with its header checksum.
fn ip4(protocol: u8, options: &[u8], fragment: u16, payload: &[u8]) -> Vec<u8> {
    let len = 20 + options.len();
    let mut p = vec![0x40 | (len / 4) as u8, 0xb9, 0, 0, 0x12, 0x34];
    p[2..4].copy_from_slice(&((len + payload.len()) as u16).to_be_bytes());
    p.extend(fragment.to_be_bytes());
    p.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    p.extend(options);
    let sum = checksum::sum(&p).checksum();
    p[10..12].copy_from_slice(&sum.to_be_bytes());
    p.extend(payload);
    p
}

/// An IPv6 packet; `payload` begins with extension headers, if any.
fn ip6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut p = vec![0x6b, 0x91, 0x23, 0x45];
    p.extend((payload.len() as u16).to_be_bytes());
    p.extend([next, 64]);
    for host in [1, 2] {
        p.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]);
    }
    p.extend(payload);
    p
}

/// UDP ports 1000 to 2000 without checksum.
fn udp(payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    [&[0x03, 0xe8, 0x07, 0xd0], &len.to_be_bytes()[..], &[0, 0], payload].concat()
}

fn tcp(payload: &[u8]) -> Vec<u8> {
    let mut h = vec![0x03, 0xe8, 0x07, 0xd0, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 0x20, 0, 0, 0, 0, 0];
    h.extend(payload);
    h
}

fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&MACS[..], &ethertype.to_be_bytes(), payload].concat()
}

/// A frame with its checksums of layer 4 right, inner and outer.
fn summed(mut frame: Vec<u8>) -> Vec<u8> {
    let parsed = Parser::default().parse(&frame).unwrap();
    for layers in [parsed.innermost(), parsed.outer()] {
        if let Some(cover) = Coverage::of(&frame, layers) {
            cover.transport.fill(&mut frame[cover.start..cover.end], cover.pseudo);
        }
    }
    frame
}

/// Checks all lengths (by parsing) and checksums of a frame; absent UDP checksums over IPv4 are right.
#[track_caller]
fn assert_sound(frame: &[u8], what: &str) {
    let parsed = Parser::default().parse(frame).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(parsed.tunnel_error(), None, "{what}");
    for layers in [parsed.outer(), parsed.innermost()] {
        if let Some(cover) = Coverage::of(frame, layers) {
            assert!(
                cover.transport.verify(&frame[cover.start..cover.end], cover.pseudo),
                "{what}: checksum of {layers:?}"
            );
        }
    }
}

fn stacks() -> Vec<(&'static str, Vec<u8>)> {
    let data: Vec<u8> = (0..47).collect();
    let echo6 = [&[128, 0, 0, 0, 0, 1, 0, 1][..], &data].concat();
    let destination = [17, 0, 1, 4, 0, 0, 0, 0];
    vec![
        ("ipv4 / udp", ethernet(0x0800, &ip4(17, &[], 0x4000, &udp(&data)))),
        ("ipv4 / tcp", ethernet(0x0800, &ip4(6, &[], 0x4000, &tcp(&data)))),
        ("ipv4 / udp", ethernet(0x0800, &ip4(17, &[1, 1, 1, 1, 0x94, 4, 0, 0], 0, &udp(&data)))),
        ("vlan / ipv4 / udp", ethernet(0x8100, &[&[0x20, 5, 8, 0][..], &ip4(17, &[], 0, &udp(&data))].concat())),
        ("ipv6 / udp", ethernet(0x86dd, &ip6(17, &udp(&data)))),
        ("ipv6 / tcp", ethernet(0x86dd, &ip6(6, &tcp(&data)))),
        ("ipv6 / udp", ethernet(0x86dd, &ip6(60, &[&destination[..], &udp(&data)].concat()))),
        ("ipv6 / icmpv6", ethernet(0x86dd, &ip6(58, &echo6))),
    ]
}

#[test]
fn every_field_with_every_checksum() {
    let mut around = Surroundings::new();
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
            let out = around.next(&rule, &frame);
            assert_sound(&out, &rule);
            assert_eq!(out[*at..at + value.len()], value[..], "{rule}");
            // Nothing else but checksums is touched.
            let parsed = Parser::default().parse(&out).unwrap();
            let sums: Vec<usize> = [
                v4.then_some(l3 + 10),
                Coverage::of(&out, parsed.outer()).map(|cover| cover.start + cover.transport.checksum_offset()),
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
        // All of them in one rule are one write, with the same result as one after the other.
        let together: Vec<&str> = cases.iter().map(|(action, ..)| &action[..]).collect();
        let rule = |actions: &str| format!("ingress prio 1: eth / {pattern} => {actions}");
        let all = program(&rule(&together.join(", ")));
        assert_eq!(all.steps.len(), 1, "{all:?}");
        let mut packet = around.packet(&frame);
        assert_eq!(around.run(&all, &mut packet), Outcome::Next);
        let one_by_one = together.iter().fold(frame.clone(), |frame, action| around.next(&rule(action), &frame));
        assert_eq!(bytes(&packet), one_by_one, "{pattern}");
        assert_sound(&one_by_one, pattern);
    }
}

#[test]
fn checksums_that_are_absent_wrong_or_zero() {
    let mut around = Surroundings::new();
    let rule = "ingress prio 1: ipv4 / udp => set ipv4 src 10.9.8.7, set udp dst 53";
    // Absent stays absent.
    let absent = ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1, 2, 3])));
    assert_eq!(around.next(rule, &absent)[40..42], [0, 0]);
    // Wrong stays wrong, by as much.
    let mut wrong = summed(absent.clone());
    wrong[41] ^= 0x10;
    let out = around.next(rule, &wrong);
    let cover = Coverage::of(&out, Parser::default().parse(&out).unwrap().outer()).unwrap();
    assert!(!cover.transport.verify(&out[cover.start..cover.end], cover.pseudo));
    let mut bad_header = absent.clone();
    bad_header[24] ^= 1;
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let mut packet = around.packet(&bad_header);
    let parsed = parser.parse(&bad_header).unwrap();
    assert_eq!(program(rule).run(&mut packet, &parsed, &mut around), Outcome::Next);
    assert!(!checksum::sum(&packet.data()[14..34]).is_valid());
    // A port with which the checksum comes out as zero: it must be sent as all ones.
    let frame = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[0, 0, 9]))));
    let cover = Coverage::of(&frame, Parser::default().parse(&frame).unwrap().outer()).unwrap();
    let (port, sum) = (u16::from_be_bytes([frame[36], frame[37]]), cover.transport.field(&frame[34..]).unwrap());
    let zero = (u32::from(port) + u32::from(sum)) % 0xffff;
    let out = around.next(&format!("ingress prio 1: ipv4 / udp => set udp dst {zero}"), &frame);
    assert_eq!(out[40..42], [0xff, 0xff]);
    assert_sound(&out, "all ones");
    // And back.
    assert_sound(&around.next("ingress prio 1: ipv4 / udp => set udp dst 9", &out), "back");
}

#[test]
fn hops_run_out_where_the_order_says() {
    let mut around = Surroundings::new();
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
                let (outcome, bytes) = around.rule(&rule, &frame(ttl));
                match expected(ttl) {
                    Some(new) => {
                        assert_eq!((outcome, bytes[at]), (Outcome::Next, new), "{rule} at {ttl}");
                        assert_sound(&bytes, &rule);
                    }
                    None => assert_eq!(outcome, Outcome::Drop(DropReason::HopLimit), "{rule} at {ttl}"),
                }
            }
        }
        // What counts before counts what is dropped; what counts behind does not.
        around.counted.clear();
        let (outcome, _) = around.rule(&format!("ingress prio 1: ipv{version} => count, dec-ttl"), &frame(1));
        assert_eq!((outcome, around.counted.len()), (Outcome::Drop(DropReason::HopLimit), 1));
        let (outcome, _) = around.rule(&format!("ingress prio 1: ipv{version} => dec-ttl, count"), &frame(1));
        assert_eq!((outcome, around.counted.len()), (Outcome::Drop(DropReason::HopLimit), 1));
    }
}

#[test]
fn fragments_have_their_transport_in_the_first_piece() {
    let mut around = Surroundings::new();
    let rule = "ingress prio 1: ipv4 => set ipv4 dst 10.77.0.3, dec-ttl";
    let whole = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[0x5a; 64]))));
    let payload = &whole[34..];
    let (first, later) = (ip4(17, &[], 0x2000, &payload[..40]), ip4(17, &[], 5, &payload[40..]));
    let first = around.next(rule, &ethernet(0x0800, &first));
    let later_out = around.next(rule, &ethernet(0x0800, &later));
    assert_eq!(later_out[34..], payload[40..], "a piece without header is left alone");
    let together = ip4(17, &[], 0, &[&first[34..], &later_out[34..]].concat());
    let mut together = ethernet(0x0800, &together);
    together[30..34].copy_from_slice(&[10, 77, 0, 3]);
    together[24..26].fill(0);
    let sum = checksum::sum(&together[14..34]).checksum();
    together[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_sound(&together, "put together again");
    // IPv6, the same by a fragment header.
    let rule = "ingress prio 1: ipv6 => set ipv6 dst fd00::77";
    let whole = summed(ethernet(0x86dd, &ip6(17, &udp(&[0x5a; 64]))));
    let payload = &whole[54..];
    let piece = |word: u16, bytes: &[u8]| {
        let header = [&[17, 0][..], &word.to_be_bytes(), &[0, 0, 0, 9]].concat();
        ethernet(0x86dd, &ip6(44, &[&header[..], bytes].concat()))
    };
    let first = around.next(rule, &piece(1, &payload[..40]));
    let later = around.next(rule, &piece(40, &payload[40..]));
    let mut together = ethernet(0x86dd, &ip6(17, &[&first[62..], &later[62..]].concat()));
    together[53] = 0x77;
    assert_sound(&together, "put together again");
}

#[test]
fn final_destinations_and_home_addresses_are_what_is_summed() {
    let mut around = Surroundings::new();
    let address = |host: u8| [&[0xfd][..], &[0; 14], &[host]].concat();
    // The checksum of a datagram whose pseudo header has these hosts.
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
        let out = around.next(rule, &frame(before));
        assert_eq!(out[54..], frame(after)[54..], "{rule}, {next}");
    }
}

#[test]
fn what_a_device_shall_sum_stays_its_work() {
    let mut around = Surroundings::new();
    for (pattern, frame) in stacks() {
        let frame = summed(frame);
        let cover = Coverage::of(&frame, Parser::default().parse(&frame).unwrap().outer()).unwrap();
        if cover.transport == Transport::Icmpv6 {
            continue;
        }
        let mut partial = frame.clone();
        assert!(cover.transport.set_field(&mut partial[cover.start..], cover.pseudo.fold()));
        let v = if pattern.contains("ipv4") { ("ipv4", "10.1.2.3") } else { ("ipv6", "fd00::1:2:3") };
        let transport = pattern.rsplit(' ').next().unwrap();
        let rule = format!("ingress prio 1: {pattern} => set {} dst {}, set {transport} src 77, dec-ttl", v.0, v.1);
        let wanted = around.next(&rule, &frame);
        // The field holds the pseudo header's sum, or was complete already though the device was asked.
        for start in [&partial, &frame] {
            let mut packet = around.packet(start);
            packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
            assert_eq!(around.run(&program(&rule), &mut packet), Outcome::Next);
            assert!(packet.flags().contains(Flags::TX_L4_CHECKSUM));
            wirepath_pmd::drivers::requests::fulfil(&mut packet).unwrap();
            assert_eq!(bytes(&packet), wanted, "{rule}");
        }
    }
}

#[test]
fn tags_on_and_off() {
    let mut around = Surroundings::new();
    let plain = ethernet(0x0800, &ip4(99, &[], 0, &[1; 30]));
    let tag = |bytes: [u8; 4], frame: &[u8]| [&frame[..12], &bytes, &frame[12..]].concat();
    let once = tag([0x81, 0, 0xf0, 42], &plain);
    let twice = tag([0x88, 0xa8, 0, 7], &once);
    assert_eq!(around.next("ingress prio 1: any => push-vlan vid 42 pcp 7 dei 1", &plain), once);
    assert_eq!(around.next("ingress prio 1: any => push-vlan vid 7 tpid 0x88a8", &once), twice);
    let rule = "ingress prio 1: ipv4 => push-vlan vid 42 pcp 7 dei 1, push-vlan vid 7 tpid 0x88a8, set ipv4 ttl 64";
    assert_eq!(around.next(rule, &plain), twice, "and IP is found behind");
    let (outcome, _) = around.rule("ingress prio 1: any => push-vlan vid 3", &twice);
    assert_eq!(outcome, Outcome::Drop(DropReason::TooManyHeaders));
    assert_eq!(around.next("ingress prio 1: vlan => pop-vlan", &twice), once);
    assert_eq!(around.next("ingress prio 1: vlan / vlan => pop-vlan, pop-vlan", &twice), plain);
    assert_eq!(around.next("ingress prio 1: vlan / vlan / ipv4 => pop-vlan, pop-vlan, set ipv4 ttl 64", &twice), plain);
    let swap = "ingress prio 1: vlan => pop-vlan, push-vlan vid 42 pcp 7 dei 1";
    assert_eq!(around.next(swap, &once), once);
    // A pattern may be told by who runs the program that there is a tag where there is none.
    let (outcome, _) = around.rule("ingress prio 1: vlan => pop-vlan", &plain);
    assert_eq!(outcome, Outcome::Drop(DropReason::RuleMismatch));
    let (outcome, _) = around.rule("ingress prio 1: vlan => set vlan vid 1", &plain);
    assert_eq!(outcome, Outcome::Drop(DropReason::RuleMismatch));
}

#[test]
fn a_tag_beside_the_frame_is_the_outermost() {
    let mut around = Surroundings::new();
    let plain = ethernet(0x0800, &ip4(99, &[], 0, &[1; 30]));
    let inside = |tags: &[[u8; 4]]| [&plain[..12], &tags.concat(), &plain[12..]].concat();
    let mut run = |rule: &str, frame: &[u8], service: bool| {
        let mut packet = around.packet(frame);
        packet.set_vlan(0x2005);
        if service {
            packet.set_flags(packet.flags().with(Flags::VLAN_SERVICE));
        }
        around.counted.clear();
        let outcome = around.run(&program(rule), &mut packet);
        (outcome, packet.vlan(), bytes(&packet), around.counted.first().copied())
    };
    let next = Outcome::Next;
    assert_eq!(run("ingress prio 1: vlan => pop-vlan", &plain, false), (next, None, plain.clone(), None));
    let set = "ingress prio 1: vlan => set vlan vid 9, set vlan dei 1, count";
    assert_eq!(run(set, &plain, true), (next, Some(0x3009), plain.clone(), Some(plain.len() + 4)));
    let push = "ingress prio 1: any => push-vlan vid 7 tpid 0x88a8";
    let both = inside(&[[0x88, 0xa8, 0, 7], [0x81, 0, 0x20, 5]]);
    assert_eq!(run(push, &plain, false), (next, None, both.clone(), None));
    let both_service = inside(&[[0x88, 0xa8, 0, 7], [0x88, 0xa8, 0x20, 5]]);
    assert_eq!(run(push, &plain, true), (next, None, both_service, None));
    let third = run(push, &inside(&[[0x81, 0, 0, 1]]), false);
    assert_eq!(third.0, Outcome::Drop(DropReason::TooManyHeaders));
}

#[test]
fn fates_and_notes() {
    let mut around = Surroundings::new();
    let frame = ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1; 30])));
    let fates = [
        ("queue 7", Outcome::Queue(7)),
        ("drop", Outcome::Drop(DropReason::Ruled)),
        ("kernel", Outcome::Kernel),
        ("redirect 3", Outcome::Redirect(3)),
        ("count", Outcome::Next),
    ];
    for (action, outcome) in fates {
        assert_eq!(around.rule(&format!("ingress prio 1: any => {action}"), &frame), (outcome, frame.clone()));
    }
    assert_eq!(around.counted, [frame.len()]);
    let mut packet = around.packet(&frame);
    let limited = program("ingress prio 1: any => limit 10 pps burst 2, mark 77, count, queue 1");
    assert_eq!(around.run(&limited, &mut packet), Outcome::Queue(1));
    assert_eq!(packet.mark(), Some(77));
    assert_eq!(around.run(&limited, &mut packet), Outcome::Queue(1));
    assert_eq!(around.run(&limited, &mut packet), Outcome::Drop(DropReason::OverRate));
    assert_eq!(around.counted.len(), 3, "what is over the rate is not counted behind");
    around.now = 100_000_000;
    assert_eq!(around.run(&limited, &mut packet), Outcome::Queue(1));
    assert!(limited.keeps_headers() && limited.heap_bytes() < 200);
    assert!(!program("ingress prio 1: ipv4 => dec-ttl").keeps_headers());
}

#[test]
fn spreading() {
    let mut around = Surroundings::new();
    // The first of the published vectors, as a TCP packet.
    let mut ip = ip4(6, &[], 0, &tcp(&[]));
    ip[12..20].copy_from_slice(&[66, 9, 149, 187, 161, 142, 100, 80]);
    ip[20..24].copy_from_slice(&[0x0a, 0xea, 0x06, 0xe6]);
    ip[10..12].fill(0);
    let sum = checksum::sum(&ip[..20]).checksum();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let frame = ethernet(0x0800, &ip);
    let mut hash = |rule: &str, frame: &[u8]| {
        let mut packet = around.packet(frame);
        let outcome = around.run(&program(rule), &mut packet);
        (outcome, packet.rss_hash())
    };
    let (hash4, hash2) = (0x51cc_c178u32, 0x323e_8fc2u32);
    let all = "ingress prio 1: any => rss queues 0-7";
    assert_eq!(hash(all, &frame), (Outcome::Queue((hash4 % 8) as u16), Some(hash4)));
    let three = "ingress prio 1: any => rss queues 4+9+2 on src+dst";
    let expected = [4, 9, 2][(hash2 % 512 % 3) as usize];
    assert_eq!(hash(three, &frame), (Outcome::Queue(expected), Some(hash2)));
    // Every fragment goes the same way, and what is not IP to the first.
    let mut first = frame.clone();
    first[20] = 0x20;
    first[24..26].fill(0);
    let sum = checksum::sum(&first[14..34]).checksum();
    first[24..26].copy_from_slice(&sum.to_be_bytes());
    first.extend([0; 4]);
    first[16..18].copy_from_slice(&44u16.to_be_bytes());
    first[24..26].fill(0);
    let sum = checksum::sum(&first[14..34]).checksum();
    first[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(hash(all, &first).1, Some(hash2));
    let other = ethernet(0x88b5, &[0; 50]);
    assert_eq!(hash("ingress prio 1: any => rss queues 6+7", &other), (Outcome::Queue(6), None));
    assert_eq!(hash("ingress prio 1: any => rss queues 6+7 on inner+src", &frame), (Outcome::Queue(6), None));
    // Another key gives another hash; addresses that an action before set count as set.
    let key = "11".repeat(40);
    assert_ne!(hash(&format!("ingress prio 1: any => rss queues 0-7 key {key}"), &frame).1, Some(hash4));
    let mut moved = frame.clone();
    moved[26..30].copy_from_slice(&[1, 1, 1, 1]);
    let set = hash("ingress prio 1: ipv4 => set ipv4 src 1.1.1.1, rss queues 0-7 on src+dst", &frame);
    let input: Vec<u8> = moved[26..34].to_vec();
    assert_eq!(set.1, Some(Toeplitz::default().hash(&input)));
}

#[test]
fn mirrors_are_what_the_packet_was() {
    let mut around = Surroundings::new();
    for len in [60, 300, 600, 1500, 2100, 5000] {
        let frame = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&vec![0x33; len - 42]))));
        let rule = "ingress prio 1: ipv4 / udp => mirror 4, set ipv4 dst 10.3.3.3, dec-ttl, mirror 5, mirror 6, mark 3";
        let mut packet = around.packet(&frame);
        assert_eq!(around.run(&program(rule), &mut packet), Outcome::Next, "{len}");
        let mirrored: Vec<_> = around.mirrored.drain(..).collect();
        assert_eq!(mirrored.iter().map(|(port, _)| *port).collect::<Vec<_>>(), [4, 5, 6]);
        assert_eq!(bytes(&mirrored[0].1), frame, "{len}");
        let now = bytes(&packet);
        assert_sound(&now, "after");
        assert_ne!(now, frame);
        assert!(mirrored[1..].iter().all(|(_, copy)| bytes(copy) == now));
        assert_eq!((packet.mark(), mirrored[2].1.mark()), (Some(3), None));
        // Long payloads lie there once.
        let last = |packet: &Packet| packet.segment_places().last().map(|place| place.offset);
        assert!(mirrored.iter().all(|(_, copy)| (last(copy) == last(&packet)) == (len > COPIED)), "{len}");
        drop((packet, mirrored));
        assert_eq!(around.pool.available(), around.pool.capacity());
    }
    // A copy more than there are buffers for.
    let mut packet = around.packet(&ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1; 1000]))));
    let before = bytes(&packet);
    let held: Vec<_> = std::iter::from_fn(|| around.pool.take()).collect();
    assert_eq!(around.run(&program("ingress prio 1: any => mirror 4, queue 2"), &mut packet), Outcome::Queue(2));
    assert_eq!((around.lost, around.mirrored.len(), bytes(&packet) == before), (1, 0, true));
    drop(held);
}

/// Ethernet, IP and UDP headers of a tunnel with this source port and checksum field, and a tunnel header.
fn vxlan_header(v6: bool, fragment: u16, source: u16, checksum: u16) -> Vec<u8> {
    let udp = [&source.to_be_bytes()[..], &4789u16.to_be_bytes(), &[0, 0], &checksum.to_be_bytes()].concat();
    let end = [&udp[..], &[8, 0, 0, 0, 0, 0, 42, 0]].concat();
    if v6 { ethernet(0x86dd, &ip6(17, &end)) } else { ethernet(0x0800, &ip4(17, &[], fragment, &end)) }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn entropy_is_that_of_the_flow() {
    let mut around = Surroundings::new();
    let program = program(&format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, 0x4000, 0, 0xffff))));
    let mut port = |frame: &[u8]| {
        let mut packet = around.packet(frame);
        assert_eq!(around.run(&program, &mut packet), Outcome::Next);
        let out = bytes(&packet);
        // The checksum covers the port.
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
    // Pieces of a packet have no ports to tell them apart, but for the first, which must not use them.
    let pieces: Vec<u16> = [0x2000, 7, 0x2007].map(|fragment| port(&flow(9, fragment))).into();
    assert!(pieces.iter().all(|port| *port == pieces[0]), "{pieces:?}");
    port(&ethernet(0x88b5, &[1; 46]));
}

#[test]
fn outer_identifications_are_counted_where_they_matter() {
    let mut around = Surroundings::new();
    for (fragment, expected) in [(0x4000, [0x1234u16, 0x1234, 0x1234]), (0, [0x1234, 0x1235, 0x1236])] {
        let program =
            program(&format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, fragment, 9999, 0))));
        for id in expected {
            let mut packet = around.packet(&ethernet(0x88b5, &[1; 46]));
            assert_eq!(around.run(&program, &mut packet), Outcome::Next);
            assert_sound(packet.data(), "outer");
            assert_eq!(packet.data()[18..20], id.to_be_bytes());
        }
    }
}

#[test]
fn what_is_too_much_for_an_encapsulation() {
    let mut around = Surroundings::new();
    let encap = |v6| program(&format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(v6, 0, 1, 1))));
    let big = |len: usize| [ethernet(0x88b5, &[1; 46]), vec![2; len - 60]].concat();
    for (v6, most) in [(false, 65535 - 36), (true, 65535 - 16)] {
        let program = encap(v6);
        let mut packet = around.packet(&big(most));
        assert_eq!(around.run(&program, &mut packet), Outcome::Next);
        assert_sound(&bytes(&packet), "the longest");
        let mut packet = around.packet(&big(most + 1));
        assert_eq!(around.run(&program, &mut packet), Outcome::Drop(DropReason::TooLong));
    }
    // Without headroom.
    let mut packet = around.pool.take().unwrap();
    let frame = ethernet(0x88b5, &[1; 46]);
    assert!(packet.set_data(49, frame.len()));
    packet.data_mut().copy_from_slice(&frame);
    assert_eq!(around.run(&encap(false), &mut packet), Outcome::Drop(DropReason::NoHeadroom));
    assert_eq!(bytes(&packet), frame);
    assert!(packet.set_data(3, frame.len()));
    packet.data_mut().copy_from_slice(&frame);
    let push = program("egress prio 1: any => push-vlan vid 1");
    assert_eq!(around.run(&push, &mut packet), Outcome::Drop(DropReason::NoHeadroom));
    // Labels have no length to exceed.
    let wire = [&MACS[..], &[0x88, 0x47, 0, 0, 0x51, 64]].concat();
    let labels = program(&format!("egress prio 1: any => encap l2 {}", hex(&wire)));
    let mut packet = around.packet(&big(70_000));
    assert_eq!(around.run(&labels, &mut packet), Outcome::Next);
    assert_eq!(packet.len(), 70_018);
}

#[test]
fn what_was_left_to_hardware_is_done_before_it_is_inside() {
    let mut around = Surroundings::new();
    let inner = summed(ethernet(0x0800, &ip4(6, &[], 0x4000, &tcp(&[5; 900]))));
    let cover = Coverage::of(&inner, Parser::default().parse(&inner).unwrap().outer()).unwrap();
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
        let wanted = around.next(&rule, &inner);
        assert_sound(&wanted, &rule);
        let mut packet = around.packet(&partial);
        packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
        assert_eq!(around.run(&program(&rule), &mut packet), Outcome::Next);
        assert!(packet.flags().is_empty());
        assert_eq!(bytes(&packet), wanted);
        // With a tag beside the frame, which goes inside with it, or away with its Ethernet header.
        let mut packet = around.packet(&partial);
        packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
        packet.set_vlan(5);
        packet.set_flags(packet.flags().with(Flags::VLAN_SERVICE));
        assert_eq!(around.run(&program(&rule), &mut packet), Outcome::Next);
        let out = bytes(&packet);
        assert!(packet.flags().is_empty());
        assert_sound(&out, &rule);
        let tagged = [&inner[..12], &[0x88, 0xa8, 0, 5], &inner[12..]].concat();
        assert_eq!(out[header.len()..], if start == 0 { tagged } else { inner[14..].to_vec() });
    }
    // A request for segmentation stays, with the layers where they are now.
    for (kind, l2_len) in [("l2", 14), ("l3", 0)] {
        let mut header = header.clone();
        if kind == "l3" {
            header[56..58].copy_from_slice(&4790u16.to_be_bytes());
            header[62..66].copy_from_slice(&[0x0c, 0, 0, 1]);
        }
        let mut packet = around.packet(&partial);
        packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_SEGMENT));
        packet.set_mss(100);
        let rule = format!("egress prio 1: ipv4 / tcp => dec-ttl, encap {kind} {}", hex(&header));
        assert_eq!(around.run(&program(&rule), &mut packet), Outcome::Next);
        let (flags, layers) = (packet.flags(), packet.layers());
        assert!(flags.contains(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_OUTER_L4_CHECKSUM)));
        assert_eq!((layers.outer_len, layers.outer_l2_len), (header.len() as u8, 14));
        assert_eq!((layers.l2_len, layers.l3_len, layers.l4_len), (l2_len, 20, 20));
        assert_eq!((layers.l3(), layers.l4(), layers.outer_l3()), (MetaL3::Ipv4, MetaL4::Tcp, MetaL3::Ipv6));
        assert_eq!(packet.mss(), 100);
        let frame = packet.data();
        let cover = Coverage::of(frame, Parser::default().parse_chain(frame, packet.len()).unwrap().outer()).unwrap();
        assert_eq!(cover.transport.field(&frame[cover.start..]), Some(cover.pseudo.fold()));
        // And off again: what remains is asked for the packet that was inside.
        if kind == "l2" {
            let decap = program("ingress prio 1: vxlan vni 42 => decap l2");
            assert_eq!(around.run(&decap, &mut packet), Outcome::Next);
            assert_eq!(packet.flags(), Flags::TX_L4_CHECKSUM.with(Flags::TX_SEGMENT));
            let layers = packet.layers();
            assert_eq!((layers.outer_len, layers.outer_l2_len, layers.l2_len), (0, 0, 14));
            assert_eq!((layers.l3_len, layers.l4_len, layers.outer_l3()), (20, 20, MetaL3::Other));
        }
    }
    // There are no words for the segments of a tunnel in a tunnel.
    let once = around.next(&format!("egress prio 1: any => encap l2 {}", hex(&header)), &inner);
    let mut packet = around.packet(&once);
    packet.set_flags(Flags::TX_SEGMENT);
    let twice = program(&format!("egress prio 1: any => encap l2 {}", hex(&header)));
    assert_eq!(around.run(&twice, &mut packet), Outcome::Drop(DropReason::KernelOffload));
}

#[test]
fn ends_of_tunnels() {
    use wirepath_pmd::packet::offload::Verdicts;
    let mut around = Surroundings::new();
    let inner = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[3; 20]))));
    let encap = format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, 0x4000, 0, 0)));
    let decap = "ingress prio 1: ipv4 / udp / vxlan vni 42 => decap l2";
    let outer = around.next(&encap, &inner);
    assert_eq!(around.next(decap, &outer), inner);
    // Bytes of the IP packet behind the datagram are none of the frame's.
    let mut longer = outer.clone();
    longer.extend([0xcc; 4]);
    let total = u16::from_be_bytes([longer[16], longer[17]]) + 4;
    longer[16..18].copy_from_slice(&total.to_be_bytes());
    longer[24..26].fill(0);
    let sum = checksum::sum(&longer[14..34]).checksum();
    longer[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(around.next(decap, &longer), inner);
    // What is inside may be anything with an Ethernet header, but that it must have.
    for broken in
        [&inner[..14], &inner[..20], &[&inner[..14], &[0xff; 60]].concat(), &[&inner[..12], &[0x81; 14]].concat()]
    {
        let mut outer = around.next(&encap, &ethernet(0x88b5, &vec![0; broken.len() - 14]));
        outer[50..].copy_from_slice(broken);
        assert_eq!(around.next(decap, &outer), broken);
    }
    let mut runt = outer[..outer.len() - inner.len() + 13].to_vec();
    let total = (runt.len() - 14) as u16;
    runt[16..18].copy_from_slice(&total.to_be_bytes());
    runt[38..40].copy_from_slice(&(total - 20).to_be_bytes());
    runt[24..26].fill(0);
    let sum = checksum::sum(&runt[14..34]).checksum();
    runt[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(around.rule(decap, &runt).0, Outcome::Drop(DropReason::TooShort));
    // `decap l3` wants the IP packet that the tunnel announces, in order.
    let gre = |payload: &[u8]| ethernet(0x0800, &ip4(47, &[], 0, &[&[0, 0, 8, 0][..], payload].concat()));
    let l3 = format!("ingress prio 1: gre proto 0x0800 => decap l3 {}0800", hex(&MACS));
    assert_eq!(around.next(&l3, &gre(&inner[14..])), [&MACS[..], &inner[12..]].concat());
    assert_eq!(around.rule(&l3, &gre(&inner[14..30])).0, Outcome::Drop(DropReason::Truncated));
    assert_eq!(around.rule(&l3, &gre(&ip6(59, &[]))).0, Outcome::Drop(DropReason::BadVersion));
    // Congestion outside for who does not know marks; known marks are carried on.
    let mut congested = around.next(&encap, &inner);
    congested[15] |= 3;
    congested[24..26].fill(0);
    let sum = checksum::sum(&congested[14..34]).checksum();
    congested[24..26].copy_from_slice(&sum.to_be_bytes());
    let (outcome, out) = around.rule(decap, &congested);
    assert_eq!(outcome, Outcome::Next, "ECT(1) inside");
    assert_eq!(out[15] & 3, 3);
    assert_sound(&out, "marked");
    let mut packet = around.packet(&congested);
    packet.data_mut()[65] &= 0xfc;
    packet.data_mut()[74..76].fill(0);
    let sum = checksum::sum(&packet.data()[64..84]).checksum();
    packet.data_mut()[74..76].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(around.run(&program(decap), &mut packet), Outcome::Drop(DropReason::BadEcn));
    // What a device found out: about the inner headers only if it looked into the tunnel.
    let good = Verdicts::L3_GOOD.with(Verdicts::L4_GOOD);
    for (verdicts, expected) in [
        (good, Ok(Verdicts::NONE)),
        (good.with(Verdicts::OUTER_L3_GOOD), Ok(good)),
        (good.with(Verdicts::OUTER_L4_BAD), Err(DropReason::BadL4Checksum)),
        (good.with(Verdicts::OUTER_L3_BAD), Err(DropReason::BadChecksum)),
    ] {
        let mut packet = around.packet(&outer);
        packet.set_verdicts(verdicts);
        packet.set_vlan(9);
        let outcome = around.run(&program(decap), &mut packet);
        match expected {
            Ok(left) => assert_eq!((outcome, packet.verdicts(), packet.vlan()), (Outcome::Next, left, None)),
            Err(reason) => assert_eq!(outcome, Outcome::Drop(reason)),
        }
    }
    // The language has IP in IP by protocol number, which pieces have too.
    let piece = ethernet(0x0800, &ip4(4, &[], 0x2000, &inner[14..54]));
    let rule = format!("ingress prio 1: ipv4 proto 4 => decap l3 {}0800", hex(&MACS));
    assert_eq!(around.rule(&rule, &piece).0, Outcome::Drop(DropReason::OuterFragment));
}

#[test]
fn headers_in_several_segments() {
    let mut around = Surroundings::new();
    let inner = ethernet(0x0800, &ip4(136, &[], 0, &[[0, 1, 0, 2, 0, 8, 0x12, 0x34], [9; 8]].concat()));
    let encap = format!("egress prio 1: any => encap l2 {}", hex(&vxlan_header(false, 0x4000, 5, 0)));
    let outer = around.next(&encap, &inner);
    let cases = [
        ("ingress prio 1: ipv4 / udp / vxlan => decap l2", outer),
        ("ingress prio 1: ipv4 => set ipv4 src 10.8.7.6", inner),
    ];
    for (rule, frame) in cases {
        let (outcome, whole) = around.rule(rule, &frame);
        assert_eq!(outcome, Outcome::Next);
        let mut passed = 0;
        for cut in 14..frame.len() {
            for shared in [false, true] {
                let (front, rest) = frame.split_at(cut);
                let (mut packet, rest) = (around.packet(front), around.packet(rest));
                if shared {
                    packet = packet.attach(&rest.freeze()).unwrap();
                } else {
                    packet.append_segment(rest).unwrap();
                }
                // The parser refuses what it cannot see the outer headers of.
                let Ok(parsed) = Parser::default().parse_chain(packet.data(), packet.len()) else { continue };
                passed += 1;
                assert_eq!(program(rule).run(&mut packet, &parsed, &mut around), Outcome::Next, "{rule} cut at {cut}");
                assert_eq!(bytes(&packet), whole, "{rule} cut at {cut}");
            }
        }
        assert!(passed >= 30, "{passed}");
    }
    assert_eq!(around.pool.available(), around.pool.capacity());
}

#[test]
fn any_bytes_and_any_metadata_do_no_harm() {
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
    let mut around = Surroundings::new();
    let inner = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1; 600]))));
    let mut frames: Vec<Vec<u8>> = stacks().into_iter().map(|(_, frame)| summed(frame)).collect();
    frames.push(around.next(&format!("egress prio 1: any => encap l2 {}", header(false)), &inner));
    frames.push(ethernet(0x0800, &ip4(47, &[], 0, &[&[0, 0, 8, 0][..], &inner[14..]].concat())));
    frames.push(ethernet(
        0x0800,
        &ip4(47, &[], 0, &[&[0xb0, 0, 0x65, 0x58, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2][..], &inner].concat()),
    ));
    frames.push(ethernet(0x86dd, &ip6(17, &[&[0, 1, 0x19, 0xeb, 2, 147, 0, 0, 0, 0, 0x11, 9][..], &inner].concat())));
    frames.push(ethernet(0x0800, &ip4(41, &[], 0, &ip6(17, &udp(&[1; 30])))));
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |n: usize| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 20) as usize % n.max(1)
    };
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
        let mut packet = around.packet(&frame[..cut]);
        if cut < frame.len() {
            let rest = around.packet(&frame[cut..]);
            match random(2) {
                0 => packet.append_segment(rest).unwrap(),
                _ => packet = packet.attach(&rest.freeze()).unwrap(),
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
        // Verified or not, and sometimes what was parsed is not what the rule is about.
        let parser = Parser { verify_ipv4: false, ..Parser::default() };
        let Ok(parsed) = parser.parse_chain(packet.data(), packet.len()) else { continue };
        let outcome = programs[random(programs.len())].run(&mut packet, &parsed, &mut around);
        let name = format!("{outcome:?}");
        *ends.entry(name.split_inclusive('(').take(2).collect()).or_default() += 1;
        assert_eq!(bytes(&packet).len(), packet.len());
        around.mirrored.clear();
        around.counted.clear();
    }
    assert_eq!((around.pool.available(), around.lost), (around.pool.capacity(), 0));
    for end in
        ["Next", "Queue(3)", "Drop(RuleMismatch)", "Drop(HopLimit)", "Drop(TooManyHeaders)", "Drop(OuterFragment)"]
    {
        assert!(ends.contains_key(end), "never {end}: {ends:?}");
    }
}
