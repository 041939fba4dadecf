//! Fragments of tunnel packets to the gateway, made by scapy.

use wirepath_packet::drops::DropReason;
use wirepath_testlab::oracle;
use wirepath_wire::IpProtocol;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, vxlan};
use crate::path_mtu::udp;
use crate::routing::packet;

/// A frame to the local host with an IP packet of `len` bytes.
fn inner(len: usize) -> Vec<u8> {
    packet(HOST, FAR, "10.1.0.2", "10.1.0.1", 64, IpProtocol::UDP, &udp(len - 20))
}

/// Returns the fragments of tunnel packets with these frames, by scapy. `source` is the address of their VTEP.
fn fragments(source: &str, frames: &[Vec<u8>], size: usize) -> Vec<Vec<Vec<u8>>> {
    let v6 = source.contains(':');
    let own = if v6 { "fd00:9::1" } else { "10.9.0.1" };
    let script = format!(
        "
for n, f in enumerate(frames):
    tunnel = UDP(sport=50000, dport=4789)/VXLAN(flags=8, vni=42)/Raw(f)
    if {v6}:
        ip = IPv6(src='{source}', dst='{own}')
        whole = IPv6(bytes(ip/tunnel))
        body = bytes(whole.payload)
        step = ({size} - 48) // 8 * 8
        parts = [ip/IPv6ExtHdrFragment(nh=17, id=n + 1, offset=at // 8, m=int(at + step < len(body)))
                 /Raw(body[at:at + step]) for at in range(0, len(body), step)]
    else:
        parts = fragment(IP(src='{source}', dst='{own}', id=n + 1)/tunnel, fragsize={size} - 20)
    print(len(parts))
    [emit(Ether(src='{PEER}', dst='{US}')/p) for p in parts]
",
        v6 = if v6 { "True" } else { "False" },
    );
    let found = oracle::scapy(frames, &script);
    let mut all = found.frames.into_iter();
    found.lines.iter().map(|count| all.by_ref().take(count.parse().unwrap()).collect()).collect()
}

/// A gateway that knows the remote and has published it.
fn lab(remote: &str, underlay: &str) -> Lab {
    let mut lab = Lab::of(underlay, &format!("remotes = ['{remote}']")).with_peer();
    lab.settle();
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    lab.stepped.advance(SECOND);
    lab.settle();
    lab
}

#[test]
fn fragments_of_scapy_are_joined() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let frames: Vec<Vec<u8>> = [1451, 2000, 4000, 9000].into_iter().map(inner).collect();
        let all = fragments(remote, &frames, 1400);
        let mut lab = lab(remote, "");
        for order in 0..3 {
            for (parts, frame) in all.iter().zip(&frames) {
                let mut parts = parts.clone();
                assert!(parts.len() > 1);
                match order {
                    0 => {}
                    1 => parts.reverse(),
                    _ => parts.rotate_left(1),
                }
                let (last, first) = parts.split_last().unwrap();
                lab.send_all(WAN, first.iter().map(Vec::as_slice));
                assert_eq!(lab.settle(), []);
                lab.send(WAN, last);
                let sent = lab.settle();
                // A local port of 1500 bytes takes no more.
                let expected = if frame.len() <= 1514 { vec![(LAN, frame.clone())] } else { vec![] };
                assert_eq!(sent, expected, "{remote} {} {:?}", frame.len(), lab.stepped.drops());
            }
        }
        assert_eq!(lab.stepped.drops().len(), 1, "{:?}", lab.stepped.drops());
        assert_eq!(lab.dropped(DropReason::TooBigForMtu), 9);
        assert_eq!(lab.control.segment_stats(0).overlay_rx.0, 12);
        assert_eq!(lab.pool.outstanding(), 0);
    }
}

#[test]
fn lost_and_forged_fragments_are_counted() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let frames = [inner(1451), inner(1452)];
        let all = fragments(remote, &frames, 1000);
        let mut lab = lab(remote, "");
        // The second fragment is lost, and then comes too late.
        lab.send(WAN, &all[0][0]);
        lab.stepped.advance(6 * SECOND);
        lab.settle();
        assert_eq!(lab.dropped(DropReason::FragmentTimeout), 1, "{:?}", lab.stepped.drops());
        lab.send(WAN, &all[0][1]);
        // The fragments of two packets under one number.
        let mut other = all[1][1].clone();
        let id = if remote.contains('.') { 18..20 } else { 58..62 };
        let number = all[0][0][id.clone()].to_vec();
        other[id].copy_from_slice(&number);
        if remote.contains('.') {
            other[24..26].fill(0);
            let sum = wirepath_wire::checksum::sum(&other[14..34]).checksum();
            other[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        lab.send(WAN, &other);
        lab.send(WAN, &all[0][0]);
        lab.settle();
        assert_eq!(lab.dropped(DropReason::FragmentOverlap), 3, "{:?}", lab.stepped.drops());
        // Every part of a packet twice.
        for part in &all[1] {
            lab.send(WAN, part);
            lab.send(WAN, part);
        }
        let sent = lab.settle();
        assert_eq!(sent, [(LAN, frames[1].clone())]);
        assert_eq!(lab.dropped(DropReason::FragmentDuplicate), 1);
        // Strangers, and a packet that is complete but no tunnel packet of the segment.
        let stranger = if remote.contains('.') { "10.9.0.77" } else { "fd00:9::77" };
        lab.send_all(WAN, fragments(stranger, &frames[..1], 1000)[0].iter().map(Vec::as_slice));
        lab.settle();
        assert_eq!(lab.dropped(DropReason::UnknownRemote), 2);
        // Plain packets between the fragments are not disturbed.
        let mut peer = lab.peer.as_ref().unwrap().addresses().clone();
        peer.addresses.retain(|it| it.address.is_ipv4() == remote.contains('.'));
        lab.stepped.advance(6 * SECOND);
        lab.send(WAN, &all[0][0]);
        lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
        lab.send(WAN, &all[0][1]);
        let sent: Vec<Vec<u8>> = lab.settle().into_iter().filter(|(port, _)| *port == LAN).map(|it| it.1).collect();
        assert_eq!(sent, [frame(HOST, FAR), frames[0].clone()], "{:?}", lab.stepped.drops());
    }
}

#[test]
fn a_flood_of_fragments_keeps_its_bounds() {
    let mut lab = lab("10.9.0.2", "");
    let part = fragments("10.9.0.2", &[inner(1451)], 1000)[0][0].clone();
    for id in 0..2000u16 {
        let mut bytes = part.clone();
        bytes[18..20].copy_from_slice(&id.to_be_bytes());
        bytes[24..26].fill(0);
        let sum = wirepath_wire::checksum::sum(&bytes[14..34]).checksum();
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        lab.send(WAN, &bytes);
    }
    lab.settle();
    assert_eq!((lab.dropped(DropReason::FragmentLimit), lab.pool.outstanding()), (2000 - 64, 0));
    lab.stepped.advance(6 * SECOND);
    assert_eq!(lab.dropped(DropReason::FragmentTimeout), 64);
    lab.assert_balanced();
}

#[test]
fn without_reassembly_fragments_are_dropped() {
    let mut lab = lab("10.9.0.2", "reassembly = false");
    for part in &fragments("10.9.0.2", &[inner(1451)], 1000)[0] {
        lab.send(WAN, part);
    }
    assert_eq!((lab.settle().len(), lab.dropped(DropReason::OuterFragment)), (0, 2));
}
