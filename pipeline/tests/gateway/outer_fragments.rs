//! Tunnel packets that leave as fragments of the outer IP packet, joined by scapy.

use wirepath_packet::drops::DropReason;
use wirepath_testlab::oracle;
use wirepath_wire::IpProtocol;

use crate::ip_payload;
use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, vxlan};
use crate::path_mtu::{reported, router, too_big, udp};
use crate::routing::packet;

/// Inner packets of different lengths, as frames to the host behind the remote.
fn inner(len: usize, v6: bool) -> Vec<u8> {
    let (src, dst, header) = if v6 { ("fd01::10", "fd02::10", 40) } else { ("10.1.0.10", "10.2.0.10", 20) };
    packet(FAR, HOST, src, dst, 64, IpProtocol::UDP, &udp(len - header))
}

/// Packets as lists of their fragments, judged together at the end.
#[derive(Default)]
struct Fragmented(Vec<Vec<Vec<u8>>>);

impl Fragmented {
    /// Adds the fragments of one packet that a path of `mtu` bytes takes.
    #[track_caller]
    fn add(&mut self, fragments: Vec<Vec<u8>>, v6: bool, mtu: usize) {
        let lengths: Vec<usize> = fragments.iter().map(Vec::len).collect();
        assert!(lengths.len() > 1 && lengths.iter().all(|len| *len <= 14 + mtu), "{lengths:?}");
        assert!(lengths[0] > 14 + mtu - 8, "the first one is as long as possible: {lengths:?}");
        assert!(fragments.iter().all(|it| Self::id(it, v6) == Self::id(&fragments[0], v6)));
        assert!(v6 || fragments.iter().all(|it| it[20] & 0x40 == 0), "DF is clear");
        self.0.push(fragments);
    }

    fn id(fragment: &[u8], v6: bool) -> &[u8] {
        if v6 { &fragment[58..62] } else { &fragment[18..20] }
    }

    /// Returns what is behind the outer IP header of each packet after scapy has joined it. Each packet has another
    /// identification, and tshark finds no error in any fragment.
    fn join(self, v6: bool) -> Vec<Vec<u8>> {
        let all: Vec<Vec<u8>> = self.0.iter().flatten().cloned().collect();
        oracle::assert_clean(&all);
        let mut ids: Vec<&[u8]> = self.0.iter().map(|packet| Self::id(&packet[0], v6)).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), self.0.len());
        let counts: Vec<usize> = self.0.iter().map(Vec::len).collect();
        let join = if v6 {
            "p = defragment6([Ether(f)[IPv6] for f in part])\n    \
             assert IPv6ExtHdrFragment not in p\n    emit(p.payload)"
        } else {
            "found = defragment([Ether(f) for f in part])\n    assert len(found) == 1, found\n    \
             emit(found[0][IP].payload)"
        };
        let script = format!("for n in {counts:?}:\n    part, frames = frames[:n], frames[n:]\n    {join}\n");
        let found = oracle::scapy(&all, &script).frames;
        assert_eq!(found.len(), counts.len());
        found
    }
}

#[test]
fn long_packets_leave_as_fragments() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let v6 = !remote.contains('.');
        let mut lab = Lab::new(&format!("remotes = ['{remote}']\nouter_fragmentation = true\nmtu = 4000")).with_peer();
        // The first frame waits for the next hop, and the control thread divides it.
        lab.send(LAN, &inner(1700, false));
        let is_tunnel = |bytes: &[u8]| {
            bytes[12..14] == if v6 { [0x86, 0xdd] } else { [8, 0] }
                && bytes.get(54) != Some(&135)
                && bytes.get(54) != Some(&136)
        };
        let fragments = |lab: &mut Lab| -> Vec<Vec<u8>> {
            let sent = lab.settle().into_iter();
            sent.filter(|(port, bytes)| *port == WAN && is_tunnel(bytes)).map(|(_, bytes)| bytes).collect()
        };
        let mut packets = Fragmented::default();
        let mut expected = vec![inner(1700, false)];
        packets.add(fragments(&mut lab), v6, 1500);
        let peer = lab.peer.as_ref().unwrap().addresses().clone();
        let mut peer = peer;
        peer.addresses.retain(|it| it.address.is_ipv6() == v6);
        lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
        lab.settle();
        lab.stepped.advance(SECOND);
        lab.settle();
        let taken = if v6 { 70 } else { 50 };
        for mtu in [1500, 1400] {
            if mtu == 1400 {
                // A packet that fits keeps DF, so a router reports its MTU.
                lab.send(LAN, &inner(1500 - taken, false));
                let whole = fragments(&mut lab);
                assert_eq!((whole.len(), whole[0].len()), (1, 1514));
                assert!(v6 || whole[0][20] & 0x40 != 0);
                lab.send(WAN, &too_big(router(remote), &whole[0], 1400));
                lab.settle();
            }
            for len in [mtu - taken + 1, 1500, 2900, 4000] {
                lab.send(LAN, &inner(len, len == 2900));
                packets.add(fragments(&mut lab), v6, mtu);
                expected.push(inner(len, len == 2900));
            }
        }
        for (whole, inner) in packets.join(v6).into_iter().zip(expected) {
            assert!(whole.ends_with(&inner), "{remote}");
            // UDP and VXLAN headers, with a checksum over IPv6.
            assert_eq!((whole.len(), u16::from_be_bytes([whole[4], whole[5]]).into()), (inner.len() + 16, whole.len()));
            assert_eq!((whole[6..8] == [0, 0], &whole[8..16]), (!v6, &[8, 0, 0, 0, 0, 0, 42, 0][..]));
        }
        // The MTU of the segment still bounds its frames.
        lab.stepped.advance(SECOND);
        lab.send(LAN, &inner(4001, false));
        let sent = lab.settle();
        let answer = sent.iter().find(|(port, _)| *port == LAN).expect("an answer");
        assert_eq!(reported(&answer.1), (3, 4000));
        assert!(lab.control.segment_stats(0).outer_fragments > 16);
        assert_eq!(lab.dropped(DropReason::TooBigForMtu), 1);
        assert_eq!(lab.pool.outstanding(), 0);
    }
}

#[test]
fn layer_3_tunnels_send_fragments() {
    for keys in [
        "kind = 'ipip'",
        "kind = 'gre'\nvni = 7",
        "kind = 'geneve'\nvni = 42\npayload = 'ip'",
        "kind = 'mpls-udp'\nvni = 42\npayload = 'ip'",
    ] {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let v6 = !remote.contains('.');
            let (mut lab, mut host) = ip_payload::tunnel_of(keys, remote, "outer_fragmentation = true");
            let (mut packets, mut expected) = (Fragmented::default(), Vec::new());
            // The first packet waits for the next hop.
            for (len, inner_v6) in [(1500, false), (1500, true), (1700, false), (3000, true)] {
                let mut routed = inner(len, inner_v6);
                routed[..6].copy_from_slice(&US.0);
                lab.send(LAN, &routed);
                let sent = ip_payload::settle(&mut lab, &mut host);
                let sent: Vec<Vec<u8>> = sent.into_iter().map(|(_, bytes)| bytes).collect();
                assert!(sent.iter().all(|it| it[..12] == [PEER.0, US.0].concat()), "{keys} {remote}");
                packets.add(sent, v6, 1500);
                // The router lowers the TTL and writes the checksum anew.
                let at = if inner_v6 { 14 + 8 } else { 14 + 12 };
                expected.push(inner(len, inner_v6).split_off(at));
            }
            for (whole, tail) in packets.join(v6).iter().zip(&expected) {
                assert!(whole.ends_with(tail), "{keys} {remote}");
            }
            assert!(lab.stepped.drops().is_empty(), "{:?}", lab.stepped.drops());
        }
    }
}

#[test]
fn without_the_key_nothing_is_fragmented() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    let peer = lab.peer.as_ref().unwrap().addresses().clone();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    lab.send(LAN, &inner(1451, false));
    let sent = lab.settle();
    assert_eq!((sent.len(), sent[0].0, reported(&sent[0].1)), (1, LAN, (3, 1450)));
    assert_eq!(lab.control.segment_stats(0).outer_fragments, 0);
}
