//! Rule stages: outcomes of packets, and changes while packets flow.

use wirepath_flow::Rule;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::Cutter;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::{
    ListEntry, RuleControl, RuleControlError, RuleId, RuleLimits, RuleStage, RuleTableError, priority_order,
};
use wirepath_pipeline::{Context, ControlPlane, PortInfo, Punt, Stage, SteppedRuntime, WorkerInfo};
use wirepath_pmd::port::KernelPunt;
use wirepath_wire::Parser;

/// Forwards from port 0 to 1, and from all other ports to 0.
fn cross(context: &mut Context<'_>, batch: &mut Batch) {
    let port = context.in_port().or_else(|| batch.iter().next().and_then(|packet| packet.in_port()));
    context.send_batch(PortId::new(u16::from(port.is_none_or(|port| port.number() == 0))), batch);
}

/// Leaves all packets in the batch, with port 1 as their output port.
fn leave(_: &mut Context<'_>, batch: &mut Batch) {
    batch.iter_mut().for_each(|packet| packet.set_out_port(PortId::new(1)));
}

struct Bench<S> {
    stepped: SteppedRuntime<S>,
    rules: RuleControl,
    pool: Pool,
}

type Inner = fn(&mut Context<'_>, &mut Batch);

fn bench(to_kernel: KernelPunt) -> Bench<RuleStage<Inner>> {
    bench_of(to_kernel, cross)
}

fn bench_of(to_kernel: KernelPunt, inner: Inner) -> Bench<RuleStage<Inner>> {
    bench_with(to_kernel, |_| inner)
}

fn bench_with<S: Stage + 'static>(to_kernel: KernelPunt, inner: impl FnOnce(&Pool) -> S) -> Bench<RuleStage<S>> {
    let (domain, pool) = (Domain::new(), Pool::new("test", 512).unwrap());
    let ports: Vec<PortInfo> = (0..3)
        .map(|id| {
            let mut port = PortInfo::simulated(PortId::new(id), &format!("p{id}"), None, 1500, &pool);
            port.capabilities.kernel_punt = to_kernel;
            port
        })
        .collect();
    let workers = vec![vec![0]; 3];
    let mut rules = RuleControl::for_ports(&domain, ports.clone(), workers, Parser::default(), RuleLimits::default());
    let info = WorkerInfo {
        index: 0,
        workers: 1,
        core: None,
        rx_queues: vec![(PortId::new(0), 0), (PortId::new(1), 0), (PortId::new(2), 0)],
    };
    let stage = rules.stage(&info, inner(&pool));
    Bench { stepped: SteppedRuntime::new(ports, &domain, stage).unwrap(), rules, pool }
}

fn list(texts: &[&str]) -> Vec<Rule> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Returns an IPv4 datagram with these last bytes of the addresses, and these ports.
fn datagram(from: u8, to: u8, sport: u16, dport: u16) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0];
    frame.extend([0x45, 0, 0, 48, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, from, 10, 0, 0, to]);
    let sum = frame[14..34].chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame.extend(sport.to_be_bytes());
    frame.extend(dport.to_be_bytes());
    frame.extend([0, 28, 0, 0]);
    frame.extend([7; 20]);
    frame
}

struct Kernel;

impl wirepath_pipeline::Control for Kernel {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        assert!(RuleControl::punt(punt, plane).is_none(), "only what is for the kernel is punted here");
    }
}

impl<S: Stage + 'static> Bench<S> {
    fn set(&mut self, texts: &[&str]) {
        let Self { stepped, rules, .. } = self;
        stepped.with_plane(|plane| rules.replace(plane, &list(texts)).unwrap());
    }

    /// Sends frames into a port. Returns the sent frames with their ports, sorted by port.
    fn pass(&mut self, port: u16, frames: &[Vec<u8>]) -> Vec<(u16, Vec<u8>)> {
        self.pass_superframes(port, frames, |_| None)
    }

    /// Does the same with superframes: those for which `mss` returns a segment size.
    fn pass_superframes(
        &mut self,
        port: u16,
        frames: &[Vec<u8>],
        mss: impl Fn(usize) -> Option<u16>,
    ) -> Vec<(u16, Vec<u8>)> {
        let sent = self.process_superframes(port, frames, mss);
        let bytes = |packet: &Packet| packet.segments().flatten().copied().collect();
        let mut out: Vec<_> = sent.iter().map(|it| (it.out_port().unwrap().number(), bytes(it))).collect();
        out.sort_by_key(|(port, _)| *port);
        out
    }

    /// Does the same, and returns the sent packets in order.
    fn process_superframes(
        &mut self,
        port: u16,
        frames: &[Vec<u8>],
        mss: impl Fn(usize) -> Option<u16>,
    ) -> Vec<Packet> {
        let mut batch = Batch::new();
        for (i, frame) in frames.iter().enumerate() {
            let mut packet = self.pool.take().unwrap();
            packet.append(frame.len()).unwrap().copy_from_slice(frame);
            packet.set_in_port(PortId::new(port));
            if let Some(mss) = mss(i) {
                packet.set_mss(mss);
                packet.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM));
            }
            assert!(batch.push(packet).is_ok());
        }
        self.stepped.process(Some(PortId::new(port)), &mut batch);
        self.stepped.control(&mut Kernel);
        std::iter::from_fn(|| self.stepped.next_sent()).collect()
    }

    fn dropped(&self, reason: DropReason) -> u64 {
        self.stepped.drops().get(&reason).copied().unwrap_or(0)
    }

    fn counts(&self) -> Vec<u64> {
        self.rules.active_rules(None).into_iter().map(|it| it.counters.packets).collect()
    }
}

fn ports(out: &[(u16, Vec<u8>)]) -> Vec<u16> {
    out.iter().map(|(port, _)| *port).collect()
}

/// Returns `frame` in VXLAN.
fn in_vxlan(frame: &[u8]) -> Vec<u8> {
    let mut outer = datagram(8, 9, 50_000, 4789);
    outer.truncate(42);
    outer[16..18].copy_from_slice(&(36 + frame.len() as u16).to_be_bytes());
    outer[38..40].copy_from_slice(&(16 + frame.len() as u16).to_be_bytes());
    outer.extend([8, 0, 0, 0, 0, 0, 42, 0]);
    outer.extend(frame);
    outer
}

/// A superframe of UDP to the port of a tunnel would be taken for one in this tunnel. A superframe in a tunnel to
/// another port might be taken for one of UDP.
#[test]
fn superframes_are_cut_before_their_udp_port_changes() {
    let other = datagram(1, 3, 5, 55);
    let cases = [("ingress", cross as Inner), ("egress", cross), ("ingress", leave), ("egress", leave)];
    for (direction, inner) in cases {
        // The new port, and the frames of both superframes that leave: datagrams of 7, 7 and 6 bytes.
        for (port, frames) in [(4789, [3, 3]), (6635, [3, 3]), (99, [1, 3])] {
            let mut bench = bench_of(KernelPunt::No("paper"), inner);
            bench.set(&[&format!("{direction} prio 1: ipv4 / udp src 6 => set udp dst {port}, count")]);
            let plain = datagram(1, 2, 6, 53);
            let mut tunnel = in_vxlan(&datagram(1, 2, 6, 53));
            tunnel[34..36].copy_from_slice(&6u16.to_be_bytes());
            let sent = [plain.clone(), other.clone(), tunnel, other.clone()];
            let out = bench.pass_superframes(0, &sent, |i| [Some(7), None][i % 2]);
            let all: Vec<&[u8]> = out.iter().map(|(_, frame)| &frame[..]).collect();
            let [first, second] = frames;
            assert_eq!(all.len(), first + second + 2, "{direction} {port}: {all:02x?}");
            assert_eq!((all[first], all[first + 1 + second]), (&other[..], &other[..]), "{direction} {port}");
            let payload = |frames: &[&[u8]], skip: usize| frames.iter().flat_map(|it| it[skip..].to_vec()).count();
            assert_eq!(payload(&all[..first], 42), 20);
            assert_eq!(payload(&all[first + 1..first + 1 + second], 50 + 42), 20);
            for frame in all.iter().filter(|frame| **frame != other) {
                assert_eq!(frame[36..38], u16::to_be_bytes(port), "{direction}");
                let end = 14 + usize::from(u16::from_be_bytes([frame[16], frame[17]]));
                assert_eq!(end, frame.len(), "{direction} {port}");
            }
            assert_eq!(bench.counts(), [first as u64 + second as u64]);
        }
    }
}

/// Returns the sum of big-endian words in one's complement (RFC 1071).
fn sum(bytes: &[u8]) -> u32 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    bytes.chunks(2).map(word).fold(0, |sum, word| (sum + word) % 0xffff)
}

/// Returns an IPv4 packet of TCP or UDP from port 6 to 53, whose checksum is that of its pseudo header.
fn unfinished(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let (header, at) = if protocol == 6 { (20, 50) } else { (8, 40) };
    let len = header + payload.len() as u16;
    let mut frame = datagram(1, 2, 6, 53);
    frame.truncate(38);
    frame[16..18].copy_from_slice(&(20 + len).to_be_bytes());
    frame[23] = protocol;
    match protocol {
        6 => frame.extend([0, 0, 0, 0, 0, 0, 0, 9, 0x50, 0x10, 0x20, 0, 0, 0, 0, 0]),
        _ => frame.extend([len.to_be_bytes(), [0, 0]].concat()),
    }
    let pseudo = (sum(&frame[26..34]) + u32::from(protocol) + u32::from(len)) % 0xffff;
    frame[at..at + 2].copy_from_slice(&(pseudo as u16).to_be_bytes());
    frame.extend(payload);
    frame
}

/// Both rules meet the whole superframe or its frames, and each frame has the mark of the first and the port of the
/// second.
#[test]
fn frames_of_superframes_have_the_mark_and_the_new_port() {
    const SIZE: u16 = 7;
    let payload: Vec<u8> = (1..=50).collect();
    let other = datagram(1, 3, 5, 55);
    let rules = |l4: &str, port: u16| {
        [
            vec![format!("ingress prio 1: ipv4 / {l4} src 6 => mark 3, set {l4} dst {port}")],
            vec![format!("ingress prio 1: ipv4 / {l4} src 6 => set {l4} dst {port}, mark 3")],
            vec![
                format!("ingress prio 1: ipv4 / {l4} src 6 => mark 3"),
                format!("egress prio 1: meta mark 3 / ipv4 / {l4} => set {l4} dst {port}"),
            ],
        ]
    };
    // Only UDP to the port of a tunnel is cut by the stage. The test cuts the others as a port does.
    for (l4, protocol, port, sent) in [("udp", 17, 4789, 9), ("udp", 17, 99, 2), ("tcp", 6, 4789, 2)] {
        for rules in rules(l4, port) {
            let mut bench = bench(KernelPunt::No("paper"));
            bench.set(&rules.iter().map(String::as_str).collect::<Vec<_>>());
            let frames = [unfinished(protocol, &payload), other.clone()];
            let mut out = bench.process_superframes(0, &frames, |i| [Some(SIZE), None][i]);
            assert_eq!(out.len(), sent, "{rules:?}");
            let last = out.pop().unwrap();
            assert_eq!((last.mark(), last.data()), (None, &other[..]), "{rules:?}");
            if out.len() == 1 {
                let mut cutter = Cutter::new(out.remove(0), None).unwrap();
                out.extend(std::iter::from_fn(|| cutter.next_frame(&bench.pool)).map(Result::unwrap));
            }
            let start = if protocol == 6 { 54 } else { 42 };
            let parts: Vec<&[u8]> = out.iter().map(|it| &it.data()[start..]).collect();
            assert_eq!(parts, payload.chunks(SIZE.into()).collect::<Vec<_>>(), "{rules:?}");
            for (n, packet) in (0..).zip(&out) {
                let frame = packet.data();
                assert_eq!((packet.mark(), &frame[34..38]), (Some(3), &[0, 6, port.to_be_bytes()[0], port as u8][..]));
                assert!(!packet.flags().intersects(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM)), "{rules:?}");
                let len = (frame.len() - 34) as u32;
                assert_eq!(u32::from(frame[16]) << 8 | u32::from(frame[17]), 20 + len, "{rules:?}");
                assert_eq!(sum(&frame[14..34]), 0, "{rules:?}");
                assert_eq!((sum(&frame[26..]) + u32::from(protocol) + len) % 0xffff, 0, "{rules:?}, frame {n}");
                if protocol == 6 {
                    assert_eq!(frame[38..42], (u32::from(SIZE) * n).to_be_bytes(), "{rules:?}");
                }
            }
        }
    }
}

#[test]
fn ingress_rules_apply_before_the_stage() {
    let mut bench = bench(KernelPunt::No("paper"));
    let frames = [datagram(1, 2, 5, 53), datagram(1, 2, 5, 54), datagram(1, 3, 5, 55), datagram(1, 4, 5, 56)];
    assert_eq!(ports(&bench.pass(0, &frames)), [1, 1, 1, 1], "without rules");
    bench.set(&[
        "ingress prio 1: udp dst 53 => drop",
        "ingress prio 2: udp dst 54 => redirect 2",
        "ingress prio 3: ipv4 dst 10.0.0.3 / udp => set udp dst 99, count",
        "ingress prio 3: port id 0 / ipv4 dst 10.0.0.4 => mirror 2, mark 7",
    ]);
    let out = bench.pass(0, &frames);
    assert_eq!(ports(&out), [1, 1, 2, 2], "by port, each in order: {out:02x?}");
    assert_eq!(out[0].1[36..38], 99u16.to_be_bytes());
    assert_eq!((&out[1].1, &out[2].1, &out[3].1), (&frames[3], &frames[1], &frames[3]));
    assert_eq!(bench.dropped(DropReason::RuleDrop), 1);
    assert_eq!(bench.counts(), [1, 1, 1, 1]);
    // The rule names another port.
    assert_eq!(ports(&bench.pass(1, &frames[3..])), [0]);
}

#[test]
fn egress_rules_apply_to_transmitted_packets() {
    let mut bench = bench(KernelPunt::No("paper"));
    bench.set(&[
        "ingress prio 1: udp dst 54 => redirect 2",
        "ingress prio 2: udp dst 57 => mark 3",
        "egress prio 1: port id 1 / udp dst 53 => drop",
        "egress prio 2: port id 2 => push-vlan vid 9",
        "egress prio 3: meta mark 3 => mirror 2, drop",
        "egress prio 4: udp dst 58 => mirror 2",
    ]);
    let frames = [53, 54, 55, 57, 58].map(|port| datagram(1, 2, 5, port));
    let out = bench.pass(0, &frames);
    assert_eq!(ports(&out), [1, 1, 2, 2, 2], "{out:02x?}");
    assert_eq!((&out[0].1, &out[1].1), (&frames[2], &frames[4]));
    let two: Vec<&Vec<u8>> = out[2..].iter().map(|(_, frame)| frame).collect();
    let tagged = [&frames[1][..12], &[0x81, 0, 0, 9], &frames[1][12..]].concat();
    assert!(two.contains(&&tagged), "redirected at ingress, asked at egress");
    assert!(two.contains(&&frames[3]), "copied, and dropped itself");
    assert!(two.contains(&&frames[4]), "a copy is not asked");
    assert_eq!(bench.dropped(DropReason::RuleDrop), 2);
    // More than a batch leaves in order.
    let many: Vec<Vec<u8>> = (0..64).map(|n| datagram(1, 2, n, 60)).collect();
    assert_eq!(bench.pass(0, &many).into_iter().map(|(_, frame)| frame).collect::<Vec<_>>(), many);
}

#[test]
fn malformed_packets_are_dropped_before_rules() {
    let mut bench = bench(KernelPunt::No("paper"));
    let mut malformed = datagram(1, 2, 5, 53);
    malformed[14] = 0x42;
    assert_eq!(ports(&bench.pass(0, std::slice::from_ref(&malformed))), [1], "without rules nobody looks");
    bench.set(&["ingress: arp => drop"]);
    assert!(bench.pass(0, &[malformed]).is_empty());
    assert_eq!(bench.dropped(DropReason::BadHeaderLength), 1);
    let mut sum = datagram(1, 2, 5, 53);
    sum[24] ^= 1;
    assert_eq!(ports(&bench.pass(0, &[sum])), [1], "the rules do not check checksums");
}

#[test]
fn a_change_is_atomic_with_and_without_kernel_rules() {
    // Rules for the kernel, and with them all others, are set on the ports. Without such rules, no rule is.
    for others in ["ingress prio 9: udp dst 99 => drop", "ingress prio 9: udp dst 99 => kernel"] {
        let mut bench = bench(KernelPunt::Loopback);
        bench.set(&["ingress: udp dst 1 => drop", others, "ingress: udp dst 2 => drop"]);
        let Bench { stepped, rules, .. } = &mut bench;
        let texts = |rules: &RuleControl| rules.rules().map(|(_, rule)| rule.to_string()).collect::<Vec<_>>();
        let ids: Vec<RuleId> = rules.rules().map(|(id, _)| id).collect();
        assert_eq!(rules.locations(ids[1]).ports.len(), 3, "on each port");
        let before = texts(rules);
        stepped.with_plane(|plane| {
            let mut refused = |gone: &[RuleId], new: &[&str]| {
                let error = rules.change(plane, gone, list(new)).unwrap_err();
                assert_eq!(texts(rules), before, "nothing has changed");
                error
            };
            assert_eq!(refused(&[ids[0], RuleId::of_number(999)], &[]).to_string(), "there is no rule 999");
            assert!(matches!(refused(&[ids[0], ids[0]], &[]), RuleControlError::Table(_)), "it can go only once");
            // The index refers to the resulting list.
            let error = refused(&[ids[0]], &["ingress: any => drop", "ingress: any => redirect 7"]);
            assert!(matches!(error, RuleControlError::Refused(it) if it.rule == 3));
            let id = rules.add(plane, "ingress: udp dst 3 => drop".parse().unwrap()).unwrap();
            rules.remove(plane, ids[0]).unwrap();
            assert!(
                rules.rules().map(|(id, _)| id).eq([ids[1], ids[2], id]),
                "the others keep their numbers and their order"
            );
            assert_eq!((rules.locations(ids[0]).ports.len(), rules.locations(id).ports.len()), (0, 3));
        });
    }
}

#[test]
fn kernel_packets_use_the_punt_path_of_the_port() {
    let rule = "ingress: udp dst 53 => count, kernel";
    let frames = [datagram(1, 2, 5, 53), datagram(1, 2, 5, 54)];
    for (to_kernel, out, dropped) in [
        (KernelPunt::Copy, vec![1], 0),
        (KernelPunt::Loopback, vec![0, 1], 0),
        // No kernel receives packets from a simulated port.
        (KernelPunt::XdpPass, vec![1], 1),
    ] {
        let mut bench = bench(to_kernel);
        bench.set(&[rule, "egress: port id 0 => drop"]);
        assert_eq!(ports(&bench.pass(0, &frames)), out, "{to_kernel:?}");
        assert_eq!((bench.dropped(DropReason::NoKernel), bench.counts()), (dropped, vec![1, 0]), "{to_kernel:?}");
    }
    let mut bench = bench(KernelPunt::No("paper has no kernel"));
    let refused = bench.stepped.with_plane(|plane| bench.rules.replace(plane, &list(&["ingress: any => drop", rule])));
    let text = refused.unwrap_err().to_string();
    assert!(
        text.starts_with("rule 1: \"kernel\" cannot be done on port \"p0\"") && text.contains("paper has no kernel"),
        "{text}"
    );
    assert!(bench.rules.rules().next().is_none(), "nothing has changed");
}

#[test]
fn rules_that_ports_cannot_run_are_refused() {
    let mut bench = bench(KernelPunt::Copy);
    for (rule, why) in [
        ("ingress: any => redirect 3", "there is no port 3; the ports are numbered 0 to 2"),
        ("ingress: any => mirror 9, count", "there is no port 9"),
        ("ingress: port id 5 => drop", "there is no port 5"),
        ("ingress: any => queue 1", "port \"p0\" has no queue 1; it has 1"),
        ("ingress: port id 2 => rss queues 0-3", "port \"p2\" has no queue 3"),
        ("ingress: ipv4 => dec-ttl, kernel", "\"kernel\" behind \"dec-ttl\" cannot be done on port \"p0\""),
    ] {
        let refused = bench.stepped.with_plane(|plane| bench.rules.replace(plane, &list(&[rule])));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(why), "{rule}: {text}");
    }
}

#[test]
fn tag_rules_are_refused_on_ports_that_lose_tags() {
    use wirepath_pipeline::rules::check;
    use wirepath_pmd::port::VlanTags;
    let pool = Pool::new("test", 64).unwrap();
    let mut ports: Vec<PortInfo> =
        (0..2).map(|id| PortInfo::simulated(PortId::new(id), &format!("p{id}"), None, 1500, &pool)).collect();
    ports[1].capabilities.vlan_tags = VlanTags::Lost;
    let refused = |text: &str| check(&text.parse().unwrap(), &ports);
    for rule in
        ["ingress: vlan vid 7 => drop", "ingress: eth tags none => drop", "ingress: port id 1 / vlan / ipv4 => drop"]
    {
        assert!(
            refused(rule).is_some_and(|why| why.contains("port \"p1\"") && why.contains("loses the VLAN tags")),
            "{rule}"
        );
    }
    for rule in
        ["ingress: port id 0 / vlan vid 7 => drop", "egress: vlan vid 7 => drop", "ingress: port id 1 / ipv4 => drop"]
    {
        assert_eq!(refused(rule), None, "{rule}");
    }
}

#[test]
fn kept_rules_keep_counters_and_list_order() {
    let mut bench = bench(KernelPunt::Copy);
    let (a, b) = ("ingress: udp dst 53 => drop", "ingress: udp => redirect 2");
    let c = "ingress: ipv4 / udp => set udp dst 1";
    let frames = [datagram(1, 2, 5, 53), datagram(1, 2, 5, 54)];
    bench.set(&[a, b]);
    assert_eq!(ports(&bench.pass(0, &frames)), [2]);
    assert_eq!(bench.counts(), [1, 1]);
    // A rule is appended: the others keep their place.
    bench.set(&[a, b, c]);
    bench.pass(0, &frames);
    assert_eq!(bench.counts(), [2, 2, 0]);
    // A rule is inserted at the front: the rules behind it are reordered and keep their counters.
    bench.set(&[c, a, b]);
    let out = bench.pass(0, &frames);
    assert_eq!(ports(&out), [1, 1]);
    assert_eq!(bench.counts()[0], 2);
    for _ in 1..4 {
        bench.stepped.advance(2_000_000_000);
        bench.pass(0, &[]);
        let Bench { stepped, rules, .. } = &mut bench;
        stepped.with_plane(|plane| rules.tick(plane));
    }
    assert_eq!(bench.counts(), [2, 2, 2]);
    bench.set(&[a]);
    assert_eq!(bench.counts(), [2]);
    bench.set(&[]);
    assert_eq!(ports(&bench.pass(0, &frames)), [1, 1]);
    assert_eq!(bench.rules.rules().len(), 0);
    assert_eq!(priority_order(&list(&[b, "ingress prio 1: any => drop", a])), [0, 2, 1]);
}

/// Returns a datagram over IPv6 behind destination options of `options` bytes, a multiple of 8.
fn with_options(options: usize, dport: u16) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0];
    frame.extend(((options + 28) as u16).to_be_bytes());
    frame.extend([60, 64]);
    frame.extend([0xfd; 32]);
    frame.extend([17, (options / 8 - 1) as u8]);
    let mut left = options - 2;
    while left > 0 {
        // PadN options of at most 257 bytes, and Pad1 for a single byte (RFC 8200 section 4.2).
        let n = left.min(257);
        frame.extend(if n == 1 { vec![0] } else { [vec![1, (n - 2) as u8], vec![0; n - 2]].concat() });
        left -= n;
    }
    frame.extend([0, 9]);
    frame.extend(dport.to_be_bytes());
    frame.extend([0, 28, 0, 0]);
    frame.extend([7; 20]);
    frame
}

#[test]
fn headers_in_several_segments_meet_their_rule() {
    let mut bench = bench(KernelPunt::No("test"));
    bench.set(&["ingress prio 1: ipv6 / udp dst 53 => count, redirect 2"]);
    for (options, first) in [(800, 100), (800, 512), (1600, 1000), (1904, 600)] {
        let frame = with_options(options, 53);
        // The datagram's ports lie in the second segment.
        let mut packet = bench.pool.take().unwrap();
        packet.append(first).unwrap().copy_from_slice(&frame[..first]);
        let mut rest = bench.pool.take().unwrap();
        assert!(rest.extend_from_slice(&frame[first..], &bench.pool));
        assert!(packet.append_segment(rest).is_ok());
        let mut batch: Batch = [packet].into_iter().collect();
        bench.stepped.process(Some(PortId::new(0)), &mut batch);
        let sent = bench.stepped.next_sent();
        assert!(sent.is_some(), "{options} {first}: {:?}", bench.stepped.drops());
        let sent = sent.unwrap();
        assert_eq!(sent.segments().flatten().copied().collect::<Vec<u8>>(), frame);
        assert_eq!(sent.out_port(), Some(PortId::new(2)));
    }
    assert_eq!(bench.counts(), [4]);
}

/// Counts the packets that a stage punted.
struct Punts(usize);

impl wirepath_pipeline::Control for Punts {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        self.0 += 1;
        plane.drop(punt.packet, DropReason::NoOutputPort);
    }
}

#[test]
fn a_long_change_does_not_hold_punted_packets() {
    const RULES: usize = 5_000;
    let many = |port: usize| -> Vec<ListEntry> {
        let text = |n: usize| format!("ingress prio 7: ipv4 / udp src {} dst {port} => drop", n + 1);
        (0..RULES).map(|n| ListEntry::New(text(n).parse().unwrap())).collect()
    };
    let mut bench = bench_of(KernelPunt::No("paper"), |context, batch| {
        batch.filter_map(|packet| {
            context.punt(packet, 9);
            None
        });
    });
    let mut batch = Batch::new();
    for _ in 0..40 {
        let mut packet = bench.pool.take().unwrap();
        packet.append(60).unwrap().fill(0);
        assert!(batch.push(packet).is_ok());
    }
    bench.stepped.process(Some(PortId::new(0)), &mut batch);
    let Bench { stepped, rules, .. } = &mut bench;
    let (mut punts, mut after) = (Punts(0), Vec::new());
    let ids = stepped
        .with_plane(|plane| {
            rules.rearrange_in_parts(plane, many(1), &mut |plane| {
                plane.serve(&mut punts);
                after.push(punts.0);
                true
            })
        })
        .unwrap();
    // Every rule is judged, compared with the old ones and added, and all of this is divided.
    let calls = after.len();
    assert!((after[0], calls >= 3 * (RULES / 256)) == (40, true), "{after:?}");
    // A change of many rules has even more parts, because the old rules are removed.
    for last in [1, calls / 2, calls] {
        let mut left = last;
        let given_up = stepped.with_plane(|plane| {
            rules.rearrange_in_parts(plane, many(2), &mut |_| {
                left -= 1;
                left > 0
            })
        });
        assert!(matches!(given_up, Err(RuleControlError::Table(RuleTableError::GivenUp))), "{given_up:?}");
        assert_eq!(rules.rules().map(|(id, _)| id).collect::<Vec<_>>(), ids, "given up in part {last}");
    }
    // The old rules still match, and the new ones do not.
    let packet = |port: u16| {
        let mut packet = bench.pool.take().unwrap();
        packet.append(62).unwrap().copy_from_slice(&datagram(1, 2, 77, port));
        packet
    };
    let mut batch: Batch = [packet(1), packet(2)].into_iter().collect();
    bench.stepped.process(Some(PortId::new(0)), &mut batch);
    assert_eq!((bench.dropped(DropReason::RuleDrop), bench.stepped.punted()), (1, 41));
}

/// Sends a datagram to port 1 by its timer each second, and one when it is idle.
struct Sender(Pool);

impl Sender {
    fn send(&self, context: &mut Context<'_>, dport: u16) {
        let (mut packet, frame) = (self.0.take().unwrap(), datagram(1, 2, 5, dport));
        packet.append(frame.len()).unwrap().copy_from_slice(&frame);
        context.count_generated();
        context.send(PortId::new(1), packet);
    }
}

impl Stage for Sender {
    fn process(&mut self, _: &mut Context<'_>, _: &mut Batch) {}

    fn timer_interval(&self) -> Option<std::time::Duration> {
        Some(std::time::Duration::from_secs(1))
    }

    fn timer(&mut self, context: &mut Context<'_>) {
        self.send(context, 53);
    }

    fn idle(&mut self, context: &mut Context<'_>) {
        self.send(context, 54);
    }
}

#[test]
fn egress_rules_apply_to_packets_of_timers_and_idle_stages() {
    let mut bench = bench_with(KernelPunt::No("paper"), |pool| Sender(pool.clone()));
    let sent = |bench: &mut Bench<_>, seconds: u64| -> Vec<u16> {
        bench.stepped.advance(seconds * 1_000_000_000);
        let packets = std::iter::from_fn(|| bench.stepped.next_sent());
        packets.map(|packet| u16::from_be_bytes([packet.data()[36], packet.data()[37]])).collect()
    };
    assert_eq!(sent(&mut bench, 2), [53, 53, 54], "without rules");
    bench.set(&["egress: port id 1 / udp dst 53 => drop"]);
    assert_eq!(sent(&mut bench, 3), [54]);
    assert_eq!((bench.dropped(DropReason::RuleDrop), bench.stepped.balance().in_flight()), (3, 0));
    bench.set(&[]);
    assert_eq!(sent(&mut bench, 1), [53, 54], "the rules are gone");
}
