//! Flow rules with `kernel` on `af_xdp`: decided in the XDP program, changed while the port runs, and frames injected by software.

mod common;

use std::time::Duration;

use wirepath_pmd::flow::Rule;
use wirepath_pmd::packet::Batch;
use wirepath_pmd::port::{StartedPort, ToKernel};
use wirepath_testlab::{FramePort, Lab, Namespace, Need, Veth, VlanTagger, eventually, judge, require};

/// A machine with the address 192.0.2.9 and a cable to a peer, and frames that its kernel answers.
struct Pair {
    dut: Namespace,
    peer: Namespace,
    /// An ARP request and a datagram to a closed port.
    questions: [Vec<u8>; 2],
    _lab: Lab,
}

impl Pair {
    fn new(name: &str) -> Self {
        let lab = Lab::new(name);
        let (dut, peer) = (lab.namespace("dut"), lab.namespace("peer"));
        Veth::new((&dut, "eth0"), (&peer, "eth0")).plug();
        dut.ip("addr add 192.0.2.9/24 dev eth0");
        dut.ip("neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent");
        // Answers of ICMP are rationed otherwise.
        dut.sysctl("net.ipv4.icmp_ratelimit", "0");
        let mac = dut.mac("eth0").map(|byte| format!("{byte:02x}")).join(":");
        let script = format!(
            "emit(Ether(dst='ff:ff:ff:ff:ff:ff', src='02:00:00:00:00:01')/ARP(op=1, hwsrc='02:00:00:00:00:01', psrc='192.0.2.1', pdst='192.0.2.9'))\n\
             emit(Ether(dst='{mac}', src='02:00:00:00:00:01')/IP(src='192.0.2.1', dst='192.0.2.9')/UDP(sport=1234, dport=9)/b'x')"
        );
        let frames = judge::scapy::<Vec<u8>>(&[], &script).frames;
        let questions = [frames[0].clone(), frames[1].clone()];
        Self { dut, peer, questions, _lab: lab }
    }

    /// Whether the kernel answers each question, by what comes back on the wire.
    fn answers(&self, wire: &mut FramePort) -> [bool; 2] {
        wire.drain();
        self.questions.iter().for_each(|frame| wire.send(frame).unwrap());
        answered(wire)
    }
}

fn answered(wire: &mut FramePort) -> [bool; 2] {
    let mut answers = [false; 2];
    while let Some(frame) = wire.receive(Duration::from_millis(300)) {
        answers[0] |= frame.bytes[12..14] == [8, 6] && frame.bytes[21] == 2;
        answers[1] |= frame.bytes[12..14] == [8, 0] && frame.bytes[23] == 1;
    }
    answers
}

fn rules(texts: &[&str]) -> Vec<Rule> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// What came for us.
fn received(it: &mut StartedPort) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    for queue in &mut it.rx {
        let mut batch = Batch::new();
        queue.receive(&mut batch);
        got.extend(batch.iter().map(|packet| packet.segments().flatten().copied().collect::<Vec<u8>>()));
    }
    got
}

#[test]
fn rules_are_decided_in_front_of_the_port_and_change_while_it_runs() {
    require!(all Need::LAB, Need::Scapy, Need::Kernel(5, 18));
    let pair = Pair::new("rules");
    let pool = common::pool();
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        for how in ["", "mode = \"generic\"\n", "attach_by_link = false\n"] {
            let table = format!("driver = \"af_xdp\"\ndevice = \"eth0\"\n[port.af_xdp]\n{how}");
            let mut it = common::start(&table, &pool).unwrap();
            assert_eq!(pair.answers(&mut wire), [false, false], "{how}: all frames are ours");
            let arp = "ingress prio 5: arp => count, kernel";
            for (list, expected) in [
                (&[arp][..], [true, false]),
                (&["ingress prio 4: arp op 1 => drop", arp, "ingress prio 6: udp dst 9 => kernel"], [false, true]),
                (&["ingress: udp dst 4789 / vxlan => drop", arp, "ingress prio 7: udp => kernel"], [true, false]),
                (&["ingress: any => kernel"], [true, true]),
                (&["egress: any => drop"], [false, false]),
                (&[arp], [true, false]),
            ] {
                it.port.set_rules(&rules(list)).unwrap();
                received(&mut it);
                assert_eq!(pair.answers(&mut wire), expected, "{how}: {list:?}");
                let ours = received(&mut it);
                for (question, answered) in pair.questions.iter().zip(expected) {
                    assert_eq!(ours.contains(question), !answered, "{how}: {list:?}");
                }
            }
            // Told three times with rests between: in force, hidden by another rule, in force, gone; and then anew.
            assert_eq!(it.port.rule_counters(&rules(&[arp])[0]), Some((1, 42)), "{how}");
            assert_eq!(it.port.rule_counters(&rules(&["ingress: any => kernel"])[0]), None);
            let kept = it.port.set_rules(&rules(&[arp, "ingress: ipv4 / inner ipv4 => kernel"])).unwrap();
            assert_eq!((kept[0].rule, kept[0].decided.is_ok()), (0, true));
            assert!(kept[1].decided.as_ref().is_err_and(|why| why.contains("inside a tunnel")), "{kept:?}");
            assert_eq!(it.port.rule_counters(&rules(&[arp])[0]), Some((1, 42)), "{how}: the rule stayed");
            it.port.stop(it.rx, it.tx).unwrap();
        }
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn what_software_decides_is_injected() {
    require!(all Need::LAB, Need::Scapy, Need::Kernel(5, 18));
    let pair = Pair::new("inject");
    let pool = common::pool();
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let mut it = common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n", &pool).unwrap();
        assert_eq!(it.port.capabilities().to_kernel, ToKernel::InFront);
        pair.questions.iter().for_each(|frame| wire.send(frame).unwrap());
        let mut ours = Vec::new();
        assert!(eventually(Duration::from_secs(20), || {
            ours.extend(received(&mut it));
            pair.questions.iter().all(|question| ours.contains(question))
        }));
        wire.drain();
        ours.iter().filter(|frame| pair.questions.contains(frame)).for_each(|frame| it.port.inject(frame).unwrap());
        assert_eq!(answered(&mut wire), [true, true]);
        assert!(received(&mut it).iter().all(|frame| !pair.questions.contains(frame)), "it does not come back");
        // Too short and too long for the kernel: an error, no harm.
        assert!(it.port.inject(&[0; 5]).is_err() && it.port.inject(&[0; 9000]).is_err());
        it.port.stop(it.rx, it.tx).unwrap();

        let mut it =
            common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n[port.af_xdp]\nmode = \"generic\"\n", &pool)
                .unwrap();
        assert!(matches!(it.port.capabilities().to_kernel, ToKernel::InFrontOnly(_)));
        assert!(it.port.inject(&pair.questions[0]).is_err());
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_tag_beside_the_frame_is_looked_at_and_not_doubled() {
    require!(all Need::LAB, Need::Scapy, Need::Kernel(6, 8));
    let pair = Pair::new("ruletag");
    let _tagger = VlanTagger::new(&pair.peer, "eth0", 100);
    let pool = common::pool();
    let wire = pair.peer.frames("eth0");
    // What the kernel gets.
    let mut kernel = pair.dut.frames("eth0");
    pair.dut.inside(|| {
        let mut it = common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n", &pool).unwrap();
        let [arp, datagram] = &pair.questions;
        let tagged = |frame: &[u8]| [&frame[..12], &[0x81, 0, 0, 100], &frame[12..]].concat();
        let rules = rules(&["ingress: vlan vid 100 / arp => kernel", "ingress: vlan vid 101 / udp => kernel"]);
        it.port.set_rules(&rules).unwrap();
        kernel.drain();
        wire.send(arp).unwrap();
        wire.send(datagram).unwrap();
        let mut ours = Vec::new();
        assert!(eventually(Duration::from_secs(20), || {
            ours.extend(received(&mut it));
            ours.contains(&tagged(datagram))
        }));
        assert!(!ours.contains(&tagged(arp)));
        let theirs: Vec<_> = kernel.drain().into_iter().map(|frame| frame.bytes).collect();
        assert!(theirs.contains(&tagged(arp)) && !theirs.contains(&tagged(datagram)), "{theirs:02x?}");
        assert_eq!(it.port.rule_counters(&rules[0]), Some((1, 46)), "the tag counts");
        it.port.stop(it.rx, it.tx).unwrap();
    });
}
