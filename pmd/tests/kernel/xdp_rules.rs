//! Flow rules with the action `kernel` on `af_xdp`: decided in the XDP program, changed while the port runs,
//! and frames injected by software.

use std::time::Duration;

use wirepath_flow::Rule;
use wirepath_packet::Batch;
use wirepath_pmd::port::{KernelPunt, StartedPort};
use wirepath_testlab::{Requirement, VlanTagger, eventually, require};

use crate::common;
use crate::topology::{Pair, Requests, answers};

fn rules(texts: &[&str]) -> Vec<Rule> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Returns the frames that the port received.
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
fn xdp_rules_change_while_the_port_runs() {
    require!(all Requirement::LAB, Requirement::Scapy, Requirement::Kernel(5, 18));
    let pair = Pair::new("rules", 1500, 1);
    let requests = Requests::to(&pair.dut);
    let pool = common::pool();
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        for how in ["", "mode = \"generic\"\n", "attach_by_link = false\n"] {
            let table = format!("driver = \"af_xdp\"\ndevice = \"eth0\"\n[port.af_xdp]\n{how}");
            let mut it = common::start(&table, &pool).unwrap();
            assert_eq!(requests.answered(&mut wire), [false, false], "{how}: all frames go to the port");
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
                assert_eq!(requests.answered(&mut wire), expected, "{how}: {list:?}");
                let ours = received(&mut it);
                for (request, answered) in requests.0.iter().zip(expected) {
                    assert_eq!(ours.contains(request), !answered, "{how}: {list:?}");
                }
            }
            // Installed three times: matching, hidden by another rule, matching, removed; and then again.
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
fn frames_for_the_kernel_are_injected_by_software() {
    require!(all Requirement::LAB, Requirement::Scapy, Requirement::Kernel(5, 18));
    let pair = Pair::new("inject", 1500, 1);
    let requests = Requests::to(&pair.dut);
    let pool = common::pool();
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let mut it = common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n", &pool).unwrap();
        assert_eq!(it.port.capabilities().kernel_punt, KernelPunt::XdpPass);
        requests.0.iter().for_each(|frame| wire.send(frame).unwrap());
        let mut ours = Vec::new();
        assert!(eventually(Duration::from_secs(20), || {
            ours.extend(received(&mut it));
            requests.0.iter().all(|request| ours.contains(request))
        }));
        wire.drain();
        ours.iter().filter(|frame| requests.0.contains(frame)).for_each(|frame| it.port.inject(frame).unwrap());
        assert_eq!(answers(&mut wire), [true, true]);
        assert!(received(&mut it).iter().all(|frame| !requests.0.contains(frame)), "it does not come back");
        // Too short and too long for the kernel: an error without consequences.
        assert!(it.port.inject(&[0; 5]).is_err() && it.port.inject(&[0; 9000]).is_err());
        it.port.stop(it.rx, it.tx).unwrap();

        let mut it =
            common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n[port.af_xdp]\nmode = \"generic\"\n", &pool)
                .unwrap();
        assert!(matches!(it.port.capabilities().kernel_punt, KernelPunt::XdpPassOnly(_)));
        assert!(it.port.inject(&requests.0[0]).is_err());
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn stripped_vlan_tags_are_matched_and_counted_once() {
    require!(all Requirement::LAB, Requirement::Scapy, Requirement::Kernel(6, 8));
    let pair = Pair::new("ruletag", 1500, 1);
    let requests = Requests::to(&pair.dut);
    let _tagger = VlanTagger::new(&pair.peer, "eth0", 100);
    let pool = common::pool();
    let wire = pair.peer.frames("eth0");
    // Frames that the kernel gets.
    let mut kernel = pair.dut.frames("eth0");
    pair.dut.inside(|| {
        let mut it = common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n", &pool).unwrap();
        let [arp, datagram] = &requests.0;
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
