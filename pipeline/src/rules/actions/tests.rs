//! Tests of programs. Every checksum is verified by full computation.

use wirepath_packet::PortId;
use wirepath_wire::Parser;
use wirepath_wire::checksum;
use wirepath_wire::checksum::Transport;
use wirepath_wire::checksum_offload::ChecksumSpan;

use super::*;

mod fields;
mod malformed;
mod tunnels;

/// [`Environment`] that records the effects of a program.
pub(super) struct TestEnvironment {
    pub(super) pool: Pool,
    pub(super) now: u64,
    pub(super) toeplitz: Toeplitz,
    pub(super) counted: Vec<usize>,
    pub(super) mirrored: Vec<(PortId, Packet)>,
    pub(super) lost: usize,
}

impl TestEnvironment {
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

    /// Runs a rule on a frame. Returns the outcome and the resulting bytes.
    pub(super) fn rule(&mut self, rule: &str, frame: &[u8]) -> (Outcome, Vec<u8>) {
        let mut packet = self.packet(frame);
        let outcome = self.run(&program(rule), &mut packet);
        (outcome, bytes(&packet))
    }

    /// Runs a rule that lets the packet continue. Returns the resulting bytes.
    pub(super) fn next(&mut self, rule: &str, frame: &[u8]) -> Vec<u8> {
        let (outcome, bytes) = self.rule(rule, frame);
        assert_eq!(outcome, Outcome::Next, "{rule}");
        bytes
    }
}

impl Environment for TestEnvironment {
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
    fn mirror_failed(&mut self, _: DropReason) {
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

/// Returns an IPv4 packet with its header checksum.
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

/// Returns an IPv6 packet. `payload` starts with extension headers, if there are any.
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

/// Returns a UDP datagram from port 1000 to 2000 without checksum.
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

/// Fills the layer 4 checksums of a frame, inner and outer.
fn summed(mut frame: Vec<u8>) -> Vec<u8> {
    let parsed = Parser::default().parse(&frame).unwrap();
    for layers in [parsed.innermost(), parsed.outer()] {
        if let Some(cover) = ChecksumSpan::of(&frame, layers) {
            cover.transport.fill(&mut frame[cover.start..cover.end], cover.pseudo);
        }
    }
    frame
}

/// Checks all lengths (by parsing) and checksums of a frame. An absent UDP checksum over IPv4 is valid.
#[track_caller]
fn assert_sound(frame: &[u8], what: &str) {
    let parsed = Parser::default().parse(frame).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(parsed.tunnel_error(), None, "{what}");
    for layers in [parsed.outer(), parsed.innermost()] {
        if let Some(cover) = ChecksumSpan::of(frame, layers) {
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

/// Returns Ethernet, IP, UDP and VXLAN headers with this source port and checksum field.
fn vxlan_header(v6: bool, fragment: u16, source: u16, checksum: u16) -> Vec<u8> {
    let udp = [&source.to_be_bytes()[..], &4789u16.to_be_bytes(), &[0, 0], &checksum.to_be_bytes()].concat();
    let end = [&udp[..], &[8, 0, 0, 0, 0, 0, 42, 0]].concat();
    if v6 { ethernet(0x86dd, &ip6(17, &end)) } else { ethernet(0x0800, &ip4(17, &[], fragment, &end)) }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn vlan_tags_are_pushed_and_popped() {
    let mut env = TestEnvironment::new();
    let plain = ethernet(0x0800, &ip4(99, &[], 0, &[1; 30]));
    let tag = |bytes: [u8; 4], frame: &[u8]| [&frame[..12], &bytes, &frame[12..]].concat();
    let once = tag([0x81, 0, 0xf0, 42], &plain);
    let twice = tag([0x88, 0xa8, 0, 7], &once);
    assert_eq!(env.next("ingress prio 1: any => push-vlan vid 42 pcp 7 dei 1", &plain), once);
    assert_eq!(env.next("ingress prio 1: any => push-vlan vid 7 tpid 0x88a8", &once), twice);
    let rule = "ingress prio 1: ipv4 => push-vlan vid 42 pcp 7 dei 1, push-vlan vid 7 tpid 0x88a8, set ipv4 ttl 64";
    assert_eq!(env.next(rule, &plain), twice, "and IP is found behind");
    let (outcome, _) = env.rule("ingress prio 1: any => push-vlan vid 3", &twice);
    assert_eq!(outcome, Outcome::Drop(DropReason::TooManyHeaders));
    assert_eq!(env.next("ingress prio 1: vlan => pop-vlan", &twice), once);
    assert_eq!(env.next("ingress prio 1: vlan / vlan => pop-vlan, pop-vlan", &twice), plain);
    assert_eq!(env.next("ingress prio 1: vlan / vlan / ipv4 => pop-vlan, pop-vlan, set ipv4 ttl 64", &twice), plain);
    let swap = "ingress prio 1: vlan => pop-vlan, push-vlan vid 42 pcp 7 dei 1";
    assert_eq!(env.next(swap, &once), once);
    // The caller may run a program on a packet without the tag that the pattern requires.
    let (outcome, _) = env.rule("ingress prio 1: vlan => pop-vlan", &plain);
    assert_eq!(outcome, Outcome::Drop(DropReason::RuleMismatch));
    let (outcome, _) = env.rule("ingress prio 1: vlan => set vlan vid 1", &plain);
    assert_eq!(outcome, Outcome::Drop(DropReason::RuleMismatch));
}

#[test]
fn a_stripped_vlan_tag_is_the_outermost() {
    let mut env = TestEnvironment::new();
    let plain = ethernet(0x0800, &ip4(99, &[], 0, &[1; 30]));
    let inside = |tags: &[[u8; 4]]| [&plain[..12], &tags.concat(), &plain[12..]].concat();
    let mut run = |rule: &str, frame: &[u8], service: bool| {
        let mut packet = env.packet(frame);
        packet.set_vlan(0x2005);
        if service {
            packet.set_flags(packet.flags().with(Flags::VLAN_SERVICE));
        }
        env.counted.clear();
        let outcome = env.run(&program(rule), &mut packet);
        (outcome, packet.vlan(), bytes(&packet), env.counted.first().copied())
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
fn outcomes_and_marks() {
    let mut env = TestEnvironment::new();
    let frame = ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1; 30])));
    let outcomes = [
        ("queue 7", Outcome::Queue(7)),
        ("drop", Outcome::Drop(DropReason::RuleDrop)),
        ("kernel", Outcome::Kernel),
        ("redirect 3", Outcome::Redirect(PortId::new(3))),
        ("count", Outcome::Next),
    ];
    for (action, outcome) in outcomes {
        assert_eq!(env.rule(&format!("ingress prio 1: any => {action}"), &frame), (outcome, frame.clone()));
    }
    assert_eq!(env.counted, [frame.len()]);
    let mut packet = env.packet(&frame);
    let limited = program("ingress prio 1: any => limit 10 pps burst 2, mark 77, count, queue 1");
    assert_eq!(env.run(&limited, &mut packet), Outcome::Queue(1));
    assert_eq!(packet.mark(), Some(77));
    assert_eq!(env.run(&limited, &mut packet), Outcome::Queue(1));
    assert_eq!(env.run(&limited, &mut packet), Outcome::Drop(DropReason::MeterExceeded));
    assert_eq!(env.counted.len(), 3, "what is over the rate is not counted behind");
    env.now = 100_000_000;
    assert_eq!(env.run(&limited, &mut packet), Outcome::Queue(1));
    assert!(limited.heap_bytes() < 200);
}

#[test]
fn rss_distribution() {
    let mut env = TestEnvironment::new();
    // The first published vector, as a TCP packet.
    let mut ip = ip4(6, &[], 0, &tcp(&[]));
    ip[12..20].copy_from_slice(&[66, 9, 149, 187, 161, 142, 100, 80]);
    ip[20..24].copy_from_slice(&[0x0a, 0xea, 0x06, 0xe6]);
    ip[10..12].fill(0);
    let sum = checksum::sum(&ip[..20]).checksum();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let frame = ethernet(0x0800, &ip);
    let mut hash = |rule: &str, frame: &[u8]| {
        let mut packet = env.packet(frame);
        let outcome = env.run(&program(rule), &mut packet);
        (outcome, packet.rss_hash())
    };
    let (hash4, hash2) = (0x51cc_c178u32, 0x323e_8fc2u32);
    let all = "ingress prio 1: any => rss queues 0-7";
    assert_eq!(hash(all, &frame), (Outcome::Queue((hash4 % 8) as u16), Some(hash4)));
    let three = "ingress prio 1: any => rss queues 4+9+2 on src+dst";
    let expected = [4, 9, 2][(hash2 % 512 % 3) as usize];
    assert_eq!(hash(three, &frame), (Outcome::Queue(expected), Some(hash2)));
    // All fragments go to the same queue, and packets that are not IP go to the first queue.
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
    // Another key gives another hash. Addresses that an earlier action set are hashed.
    let key = "11".repeat(40);
    assert_ne!(hash(&format!("ingress prio 1: any => rss queues 0-7 key {key}"), &frame).1, Some(hash4));
    let mut moved = frame.clone();
    moved[26..30].copy_from_slice(&[1, 1, 1, 1]);
    let set = hash("ingress prio 1: ipv4 => set ipv4 src 1.1.1.1, rss queues 0-7 on src+dst", &frame);
    let input: Vec<u8> = moved[26..34].to_vec();
    assert_eq!(set.1, Some(Toeplitz::default().hash(&input)));
}

#[test]
fn mirrors_copy_the_packet_at_their_position() {
    let mut env = TestEnvironment::new();
    for len in [60, 300, 600, 1500, 2100, 5000] {
        let frame = summed(ethernet(0x0800, &ip4(17, &[], 0, &udp(&vec![0x33; len - 42]))));
        let rule = "ingress prio 1: ipv4 / udp => mirror 4, set ipv4 dst 10.3.3.3, dec-ttl, mirror 5, mirror 6, mark 3";
        let mut packet = env.packet(&frame);
        assert_eq!(env.run(&program(rule), &mut packet), Outcome::Next, "{len}");
        let mirrored: Vec<_> = env.mirrored.drain(..).collect();
        assert_eq!(mirrored.iter().map(|(port, _)| port.number()).collect::<Vec<_>>(), [4, 5, 6]);
        assert_eq!(bytes(&mirrored[0].1), frame, "{len}");
        let now = bytes(&packet);
        assert_sound(&now, "after");
        assert_ne!(now, frame);
        assert!(mirrored[1..].iter().all(|(_, copy)| bytes(copy) == now));
        assert_eq!((packet.mark(), mirrored[2].1.mark()), (Some(3), None));
        // Long payloads are shared.
        let last = |packet: &Packet| packet.dma_segments().last().map(|segment| segment.offset);
        assert!(mirrored.iter().all(|(_, copy)| (last(copy) == last(&packet)) == (len > COPY_MAX)), "{len}");
        drop((packet, mirrored));
        assert_eq!(env.pool.available(), env.pool.capacity());
    }
    // One more copy than there are free buffers.
    let mut packet = env.packet(&ethernet(0x0800, &ip4(17, &[], 0, &udp(&[1; 1000]))));
    let before = bytes(&packet);
    let held: Vec<_> = std::iter::from_fn(|| env.pool.take()).collect();
    assert_eq!(env.run(&program("ingress prio 1: any => mirror 4, queue 2"), &mut packet), Outcome::Queue(2));
    assert_eq!((env.lost, env.mirrored.len(), bytes(&packet) == before), (1, 0, true));
    drop(held);
}
