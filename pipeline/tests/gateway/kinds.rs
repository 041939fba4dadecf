//! Kinds of tunnels other than VXLAN, in both directions, and beside VXLAN in one gateway.

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_wire::build::{OuterChecksum, OuterConfig, OuterHeaders, Transport, VariableFields};
use wirepath_wire::{MacAddr, Tunnel, Vni, checksum, geneve, parse};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, US, WAN, frame, vxlan};

const GENEVE: &str = "kind = 'geneve'";

/// A header of VNI 42 that carries Ethernet.
fn header(flags: u8, options: &[u8]) -> Vec<u8> {
    [&[(options.len() / 4) as u8, flags, 0x65, 0x58, 0, 0, 42, 0], options].concat()
}

/// Returns a tunnel packet to the gateway.
fn packet(from: &str, header: &[u8], inner: &[u8]) -> Vec<u8> {
    let dst = if from.contains('.') { "10.9.0.1" } else { "fd00:9::1" };
    let outer = OuterHeaders::new(&OuterConfig {
        src_mac: PEER,
        dst_mac: US,
        tags: &[],
        src: from.parse().unwrap(),
        dst: dst.parse().unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        transport: Transport::Udp { dst_port: geneve::PORT, checksum: OuterChecksum::Standard },
        tunnel_header: header,
        variable: VariableFields::default(),
    })
    .unwrap();
    let mut out = vec![0; outer.len()];
    let mut fields = outer.fields(inner.len(), 50_000);
    fields.inner_sum = checksum::sum(inner);
    outer.emit(&mut out, &fields).unwrap();
    out.extend_from_slice(inner);
    out
}

/// Returns the frame that the gateway sends to the underlay for a frame of the local host.
#[track_caller]
fn sent(lab: &mut Lab, inner: &[u8]) -> Vec<u8> {
    lab.send(LAN, inner);
    let sent = lab.settle();
    let to_wan = sent.into_iter().find(|(port, bytes)| *port == WAN && bytes.ends_with(inner));
    to_wan.unwrap_or_else(|| panic!("nothing was sent: {:?}", lab.stepped.drops())).1
}

#[test]
fn geneve_in_both_directions() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        for known in ["", "accept_unknown_remotes = true\n"] {
            let segment = if known.is_empty() { format!("remotes = ['{remote}']") } else { known.to_owned() };
            let mut lab = Lab::of(GENEVE, &segment).with_peer();
            lab.settle();
            // With a checksum or options, and without both, as on the fast path.
            for options in [&[][..], &[1, 2, 3, 1, 9, 9, 9, 9]] {
                for _ in 0..2 {
                    let inner = frame(HOST, FAR);
                    lab.send(WAN, &packet(remote, &header(0x3f, options), &inner));
                    assert_eq!(lab.settle(), [(LAN, inner)], "{remote} {:?}", lab.stepped.drops());
                }
            }
            let inner = frame(FAR, HOST);
            let outer = sent(&mut lab, &inner);
            let start = outer.len() - inner.len() - 16;
            assert_eq!(outer[start + 2..start + 4], geneve::PORT.to_be_bytes());
            assert_eq!(outer[start + 8..start + 16], header(0, &[])[..]);
            let parsed = parse(&outer).unwrap();
            assert_eq!((parsed.tunnel(), parsed.vni()), (Tunnel::Geneve, Vni::new(42)));
        }
    }
}

#[test]
fn geneve_headers_are_dropped_by_reason() {
    let mut lab = Lab::of(GENEVE, "remotes = ['10.9.0.2', 'fd00:9::2']");
    lab.settle();
    let mut other_version = header(0, &[]);
    other_version[0] |= 0x40;
    let mut other_payload = header(0, &[]);
    other_payload[2..4].copy_from_slice(&[8, 0]);
    let mut other_vni = header(0, &[]);
    other_vni[6] = 43;
    let mut cut_off = header(0, &[]);
    cut_off[0] = 0x3f;
    let cases = [
        (other_version, DropReason::TunnelVersion),
        (header(geneve::FLAG_CONTROL, &[]), DropReason::TunnelControl),
        (header(geneve::FLAG_CRITICAL, &[1, 2, 0x83, 0]), DropReason::CriticalOption),
        (header(0, &[1, 2, 3, 0, 1, 2, 0x80, 0]), DropReason::CriticalOption),
        (header(0, &[1, 2, 3, 1]), DropReason::BadTunnelHeader),
        (cut_off, DropReason::BadTunnelHeader),
        (other_payload, DropReason::TunnelPayload),
        (other_vni, DropReason::UnknownVni),
    ];
    for remote in ["10.9.0.2", "fd00:9::2"] {
        for (header, reason) in &cases {
            let before = lab.dropped(*reason);
            lab.send(WAN, &packet(remote, header, &frame(HOST, FAR)));
            assert_eq!(lab.settle(), [], "{header:?}");
            assert_eq!(lab.dropped(*reason), before + 1, "{header:?} {:?}", lab.stepped.drops());
        }
    }
    // The gateway has no VXLAN segment.
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    assert_eq!((lab.settle(), lab.dropped(DropReason::NotForUs)), (vec![], 1));
}

#[test]
fn configured_options_are_sent() {
    let options = "geneve_options = [{ class = 0x0102, type = 3, data = '0a0b0c0d' }, { class = 7, type = 0x80 }]";
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let mut lab = Lab::of(GENEVE, &format!("remotes = ['{remote}']\n{options}")).with_peer();
        lab.settle();
        let inner = frame(FAR, HOST);
        let outer = sent(&mut lab, &inner);
        let expected = header(geneve::FLAG_CRITICAL, &[1, 2, 3, 1, 10, 11, 12, 13, 0, 7, 0x80, 0]);
        assert_eq!(outer[outer.len() - inner.len() - 20..outer.len() - inner.len()], expected[..]);
        // The headers and the longest inner packet fill the underlay's MTU.
        let most = if remote.contains('.') { 1500 - 20 - 8 - 20 } else { 1500 - 40 - 8 - 20 };
        lab.assert_longest_frame(most);
    }
}

/// Segments with the same number are different if their kinds are.
#[test]
fn kinds_side_by_side() {
    let other = "remotes = ['10.9.0.2']\n[[segment]]\nname = 'other'\nkind = 'geneve'\nvni = 42\n\
                 remotes = ['10.9.0.2']\nports = [{ port = 'lan', vlan = 5 }]";
    for underlay in ["", GENEVE] {
        let segments = if underlay.is_empty() { other.to_owned() } else { other.replace("'geneve'", "'vxlan'") };
        let mut lab = Lab::of(underlay, &segments).with_peer();
        lab.settle();
        let peer = lab.peer.as_ref().unwrap().addresses().clone();
        let inner = frame(MacAddr([0xff; 6]), FAR);
        let tagged = [&inner[..12], &[0x81, 0, 0, 5], &inner[12..]].concat();
        for _ in 0..2 {
            let default =
                if underlay.is_empty() { vxlan(&peer, &inner) } else { packet("10.9.0.2", &header(0, &[]), &inner) };
            lab.send(WAN, &default);
            assert_eq!(lab.settle(), [(LAN, inner.clone())], "{:?}", lab.stepped.drops());
            let other =
                if underlay.is_empty() { packet("10.9.0.2", &header(0, &[]), &inner) } else { vxlan(&peer, &inner) };
            lab.send(WAN, &other);
            assert_eq!(lab.settle(), [(LAN, tagged.clone())], "{:?}", lab.stepped.drops());
        }
        let to_far = frame(FAR, HOST);
        let port = |bytes: &[u8]| u16::from_be_bytes([bytes[36], bytes[37]]);
        let (own, others) = if underlay.is_empty() { (4789, 6081) } else { (6081, 4789) };
        assert_eq!(port(&sent(&mut lab, &to_far)), own);
        lab.send(LAN, &[&to_far[..12], &[0x81, 0, 0, 5], &to_far[12..]].concat());
        let out = lab.settle();
        assert_eq!(
            out.iter().filter(|(_, bytes)| bytes.ends_with(&to_far)).map(|(_, b)| port(b)).collect::<Vec<_>>(),
            [others]
        );
    }
}

#[test]
fn vxlan_gpe_carries_ethernet_frames() {
    let header = |flags: u8, next: u8| [flags, 0, 0, next, 0, 0, 42, 0];
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let mut lab = Lab::of("kind = 'vxlan-gpe'", &format!("remotes = ['{remote}']")).with_peer();
        lab.settle();
        let to_gateway = |header: [u8; 8]| {
            let mut bytes = packet(remote, &header, &frame(HOST, FAR));
            // The port of VXLAN-GPE in place of that of GENEVE, and a checksum that is still right over IPv6.
            let udp = if remote.contains('.') { 34 } else { 54 };
            let sum = u16::from_be_bytes([bytes[udp + 6], bytes[udp + 7]]);
            bytes[udp + 2..udp + 4].copy_from_slice(&4790u16.to_be_bytes());
            if sum != 0 {
                let sum = checksum::update(sum, geneve::PORT, 4790);
                bytes[udp + 6..udp + 8].copy_from_slice(&sum.to_be_bytes());
            }
            bytes
        };
        lab.send(WAN, &to_gateway(header(0x0c, 3)));
        assert_eq!(lab.settle(), [(LAN, frame(HOST, FAR))], "{remote} {:?}", lab.stepped.drops());
        let inner = frame(FAR, HOST);
        let outer = sent(&mut lab, &inner);
        assert_eq!(outer[outer.len() - inner.len() - 8..][..8], header(0x0c, 3));
        let parsed = parse(&outer).unwrap();
        assert_eq!((parsed.tunnel(), parsed.vni()), (Tunnel::VxlanGpe, Vni::new(42)));
        for (header, reason) in [
            (header(0x1c, 3), DropReason::TunnelVersion),
            (header(0x0d, 3), DropReason::TunnelControl),
            (header(0x08, 3), DropReason::TunnelFlags),
            (header(0x0c, 1), DropReason::TunnelPayload),
            (header(0x0c, 4), DropReason::TunnelPayload),
            ([0x0c, 0, 0, 3, 0, 0, 43, 0], DropReason::UnknownVni),
        ] {
            let before = lab.dropped(reason);
            lab.send(WAN, &to_gateway(header));
            assert_eq!((lab.settle(), lab.dropped(reason)), (vec![], before + 1), "{:?}", lab.stepped.drops());
        }
    }
}
