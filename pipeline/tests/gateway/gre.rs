//! GRE with Ethernet frames: "gretap" and "nvgre".

use wirepath_packet::Batch;
use wirepath_packet::drops::DropReason;
use wirepath_wire::build::{OuterConfig, OuterHeaders, Transport, VariableFields};
use wirepath_wire::{EtherType, IpProtocol, MacAddr, checksum, ethernet, gre, ipv4, ipv6, tcp};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, US, WAN, frame};

/// Returns a gateway with a segment of the kind "gretap".
fn gretap(keys: &str) -> Lab {
    let segment = format!("[[segment]]\nname = 'blue'\nkind = 'gretap'\nports = [{{ port = 'lan' }}]\n{keys}\n");
    let mut lab = Lab::of_segments("", &segment).with_peer();
    lab.settle();
    lab
}

/// Returns an IP packet to the gateway with this content.
fn outer(from: &str, header: &[u8], inner: &[u8]) -> Vec<u8> {
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
        transport: Transport::Protocol(IpProtocol::GRE),
        tunnel_header: header,
        variable: VariableFields::default(),
    })
    .unwrap();
    let mut out = vec![0; outer.len()];
    outer.emit(&mut out, &outer.fields(inner.len(), 0)).unwrap();
    out.extend_from_slice(inner);
    out
}

/// Returns a GRE packet to the gateway; a checksum is valid.
fn packet(from: &str, header: gre::Repr, inner: &[u8]) -> Vec<u8> {
    let mut bytes = [&vec![0; header.header_len()], inner].concat();
    let len = header.emit(&mut bytes).unwrap();
    outer(from, &bytes[..len], inner)
}

fn header(key: Option<u32>) -> gre::Repr {
    gre::Repr { protocol: EtherType::TRANSPARENT_ETHERNET, checksum: false, key, sequence: None }
}

/// Returns the GRE header and the IP header of a frame that the gateway sends to the underlay for each frame of the
/// local host.
#[track_caller]
fn sent(lab: &mut Lab, inner: &[u8]) -> (gre::Repr, Vec<u8>) {
    lab.send(LAN, inner);
    let sent = lab.settle();
    let found = sent.into_iter().find(|(port, bytes)| *port == WAN && bytes.ends_with(inner));
    let bytes = found.unwrap_or_else(|| panic!("nothing was sent: {:?}", lab.stepped.drops())).1;
    let ip_len = if bytes[12] == 8 { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN };
    let view = gre::View::new(&bytes[14 + ip_len..]).unwrap();
    assert!(view.checksum_is_valid());
    assert_eq!(view.payload(), inner);
    (gre::Repr::parse(&view), bytes[14..14 + ip_len].to_vec())
}

#[test]
fn gretap_in_both_directions() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        for (key, vni) in [(None, ""), (Some(0), "vni = 0\n"), (Some(0xfedc_ba98), "vni = 0xfedcba98\n")] {
            for source in [format!("remotes = ['{remote}']\n"), "accept_unknown_remotes = true\n".to_owned()] {
                for (checksum, sequence) in [(false, false), (true, false), (false, true), (true, true)] {
                    let options = format!("gre = {{ checksum = {checksum}, sequence = {sequence} }}\n");
                    let mut lab = gretap(&(source.clone() + vni + &options));
                    // Optional fields need not be those of the gateway itself.
                    for (checksum, sequence) in [(false, None), (true, None), (false, Some(9)), (true, Some(7))] {
                        let inner = frame(HOST, FAR);
                        lab.send(WAN, &packet(remote, gre::Repr { checksum, sequence, ..header(key) }, &inner));
                        assert_eq!(lab.settle(), [(LAN, inner)], "{remote} {:?}", lab.stepped.drops());
                    }
                    let mut labels = Vec::new();
                    for count in 0..3 {
                        // Another EtherType is another flow.
                        let mut inner = frame(FAR, HOST);
                        inner[13] = count as u8;
                        let (found, ip) = sent(&mut lab, &inner);
                        let sequence = sequence.then_some(count);
                        assert_eq!(found, gre::Repr { checksum, sequence, ..header(key) });
                        labels.extend((!remote.contains('.')).then(|| ip[1..4].to_vec()));
                        if remote.contains('.') {
                            assert_eq!((ip[6], ip[9]), (0x40, 47), "DF and the protocol");
                        } else {
                            assert_eq!(ip[6], 47);
                        }
                    }
                    labels.dedup();
                    assert_eq!(labels.len(), if remote.contains('.') { 0 } else { 3 }, "RFC 6438");
                }
            }
        }
    }
}

#[test]
fn gretap_headers_are_dropped_by_reason() {
    let inner = frame(HOST, FAR);
    for key in [None, Some(7)] {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let vni = key.map_or(String::new(), |key| format!("vni = {key}\n"));
            let mut lab = gretap(&format!("remotes = ['10.9.0.2', 'fd00:9::2']\n{vni}"));
            let good = packet(remote, header(key), &inner);
            let at = good.len() - inner.len() - header(key).header_len();
            let flags = |set: u16| {
                let mut bytes = good.clone();
                let old = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
                bytes[at..at + 2].copy_from_slice(&(old | set).to_be_bytes());
                bytes
            };
            let mut wrong_sum = packet(remote, gre::Repr { checksum: true, ..header(key) }, &inner);
            *wrong_sum.last_mut().unwrap() ^= 1;
            let other_type = gre::Repr { protocol: EtherType::IPV4, ..header(key) };
            let stranger = if remote.contains('.') { "10.9.0.3" } else { "fd00:9::3" };
            let cases = [
                (flags(0x4000), DropReason::TunnelFlags),
                (flags(0x0800), DropReason::TunnelFlags),
                (flags(0x0001), DropReason::TunnelVersion),
                (wrong_sum, DropReason::BadL4Checksum),
                (packet(remote, header(Some(8)), &inner), DropReason::UnknownVni),
                (packet(remote, header(key.xor(Some(7))), &inner), DropReason::UnknownVni),
                (packet(remote, other_type, &inner), DropReason::TunnelPayload),
                (packet(stranger, header(key), &inner), DropReason::UnknownRemote),
                (packet(remote, header(key), &inner[..13]), DropReason::TooShort),
                (outer(remote, &[0x20, 0, 0x65], &[]), DropReason::BadTunnelHeader),
            ];
            for (bytes, reason) in cases {
                let before = lab.dropped(reason);
                lab.send(WAN, &bytes);
                assert_eq!(lab.settle(), [], "{reason:?}");
                assert_eq!(lab.dropped(reason), before + 1, "{reason:?} {:?}", lab.stepped.drops());
            }
            // Bits 6 to 12 are ignored (RFC 2784 section 2.3).
            lab.send(WAN, &flags(0x03f8));
            assert_eq!(lab.settle(), [(LAN, inner.clone())]);
        }
    }
}

/// A checksum covers all buffers of a packet, without the padding behind it.
#[test]
fn checksums_cover_long_packets() {
    let mut lab = gretap("remotes = ['10.9.0.2']");
    let mut inner = frame(HOST, FAR);
    inner.extend((0..1400u32).map(|i| (i * 7) as u8));
    for odd in [0, 1] {
        inner.truncate(inner.len() - odd);
        let mut padded = packet("10.9.0.2", gre::Repr { checksum: true, ..header(None) }, &inner);
        padded.extend([0xa5; 5]);
        // The buffer ends behind the headers, within the frame, or behind it.
        for room in [100, 701, 2048] {
            let mut batch = Batch::new();
            let mut packet = lab.pool.take().unwrap();
            let skipped = packet.tailroom().saturating_sub(room);
            assert!(packet.extend_from_slice(&vec![0; skipped], &lab.pool) && packet.trim_front(skipped));
            assert!(packet.extend_from_slice(&padded, &lab.pool));
            assert_eq!(packet.is_chain(), room < padded.len());
            batch.push(packet).unwrap();
            lab.stepped.process(Some(WAN), &mut batch);
            assert_eq!(lab.settle(), [(LAN, inner.clone())], "{room} {:?}", lab.stepped.drops());
        }
    }
}

/// Tunnels without a key are distinguished by their remotes.
#[test]
fn segments_without_key() {
    let segment = |name: &str, port: &str, rest: &str| {
        format!("[[segment]]\nname = '{name}'\nkind = 'gretap'\nports = [{{ port = 'lan'{port} }}]\n{rest}\n")
    };
    let segments = segment("a", "", "remotes = ['10.9.0.2']")
        + &segment("b", ", vlan = 5", "remotes = ['10.9.0.3']")
        + &segment("c", ", vlan = 6", "accept_unknown_remotes = true")
        + &segment("d", ", vlan = 7", "remotes = ['10.9.0.2']\nvni = 7");
    let mut lab = Lab::of_segments("", &segments).with_peer();
    lab.settle();
    let inner = frame(MacAddr([0xff; 6]), FAR);
    let tagged = |vlan: u8| [&inner[..12], &[0x81, 0, 0, vlan], &inner[12..]].concat();
    for (from, key, expected) in [
        ("10.9.0.2", None, inner.clone()),
        ("10.9.0.3", None, tagged(5)),
        ("10.9.0.4", None, tagged(6)),
        ("10.9.0.2", Some(7), tagged(7)),
    ] {
        for _ in 0..2 {
            lab.send(WAN, &packet(from, header(key), &inner));
            assert_eq!(lab.settle(), [(LAN, expected.clone())], "{from} {:?}", lab.stepped.drops());
        }
    }
}

#[test]
fn nvgre_in_both_directions() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        for source in [format!("remotes = ['{remote}']\n"), "accept_unknown_remotes = true\n".to_owned()] {
            let segment = format!("[[segment]]\nvni = 0x123456\nports = [{{ port = 'lan' }}]\n{source}");
            let mut lab = Lab::of_segments("kind = 'nvgre'", &segment).with_peer();
            lab.settle();
            for flow in [0, 0x5a, 0xff] {
                let inner = frame(HOST, FAR);
                lab.send(WAN, &packet(remote, header(Some(0x1234_5600 | flow)), &inner));
                assert_eq!(lab.settle(), [(LAN, inner)], "{remote} {:?}", lab.stepped.drops());
            }
            let mut flows = Vec::new();
            for n in 0..32 {
                let mut inner = frame(FAR, HOST);
                inner[13] = n;
                let (found, _) = sent(&mut lab, &inner);
                let key = found.key.unwrap();
                assert_eq!((found, key >> 8), (header(Some(key)), 0x12_3456));
                assert_eq!(sent(&mut lab, &inner).0.key, Some(key), "a flow keeps its FlowID");
                flows.push(key as u8);
            }
            flows.sort_unstable();
            flows.dedup();
            assert!(flows.len() > 20, "{flows:?}");
            let mut checksum = header(Some(0x1234_5600));
            (checksum.checksum, checksum.sequence) = (true, None);
            let sequence = gre::Repr { checksum: false, sequence: Some(1), ..checksum };
            let cases = [
                (packet(remote, checksum, &frame(HOST, FAR)), DropReason::TunnelFlags),
                (packet(remote, sequence, &frame(HOST, FAR)), DropReason::TunnelFlags),
                (packet(remote, header(None), &frame(HOST, FAR)), DropReason::TunnelFlags),
                (packet(remote, header(Some(0x1234_5700)), &frame(HOST, FAR)), DropReason::UnknownVni),
            ];
            for (bytes, reason) in cases {
                let before = lab.dropped(reason);
                lab.send(WAN, &bytes);
                assert_eq!((lab.settle(), lab.dropped(reason)), (vec![], before + 1), "{:?}", lab.stepped.drops());
            }
        }
    }
}

/// The headers and the longest inner packet fill the underlay's MTU.
#[test]
fn optional_fields_count_for_the_mtu() {
    for (keys, fields) in [
        ("", 0),
        ("vni = 1", 4),
        ("gre = { checksum = true }", 4),
        ("vni = 1\ngre = { checksum = true, sequence = true }", 12),
    ] {
        for (remote, ip) in [("10.9.0.2", 20), ("fd00:9::2", 40)] {
            let mut lab = gretap(&format!("remotes = ['{remote}']\n{keys}"));
            for (len, fits) in [(1500 - ip - 4 - fields, true), (1500 - ip - 4 - fields + 1, false)] {
                let mut inner = frame(FAR, HOST);
                inner.resize(len, 0);
                lab.send(LAN, &inner);
                assert_eq!(lab.settle().iter().any(|(_, bytes)| bytes.ends_with(&inner)), fits, "{keys} {len}");
            }
        }
    }
}

/// Frames of a superframe have headers of their own if a field of the header differs between them.
#[test]
fn superframes_are_cut() {
    let payload: Vec<u8> = (0..4000u32).map(|i| (i * 5) as u8).collect();
    let mut inner = vec![0; 54];
    ethernet::Repr { dst: FAR, src: HOST, ethertype: EtherType::IPV4 }.emit(&mut inner).unwrap();
    let ip = ipv4::Repr {
        src: [10, 1, 0, 1].into(),
        dst: [10, 1, 0, 2].into(),
        protocol: IpProtocol::TCP,
        payload_len: (tcp::HEADER_LEN + payload.len()) as u16,
        ttl: 64,
        traffic_class: 0,
        ident: 1,
        fragment_word: ipv4::DONT_FRAGMENT,
    };
    ip.emit(&mut inner[14..]).unwrap();
    inner[34..38].copy_from_slice(&[0, 1, 0, 2]);
    inner[46] = 0x50;
    let pseudo = checksum::pseudo4(ip.src, ip.dst, IpProtocol::TCP, ip.payload_len).fold();
    inner[50..52].copy_from_slice(&pseudo.to_be_bytes());
    inner.extend_from_slice(&payload);
    for (options, cut) in [("", false), ("checksum = true", true), ("sequence = true", true)] {
        let mut lab = gretap(&format!("remotes = ['10.9.0.2']\ngre = {{ {options} }}"));
        // The next hop is known afterwards, and the remote of the address.
        lab.send(WAN, &packet("10.9.0.2", header(None), &frame(HOST, FAR)));
        lab.settle();
        lab.send_superframe(LAN, &inner, 1000);
        let sent: Vec<_> = lab.settle().into_iter().filter(|(port, _)| *port == WAN).collect();
        if !cut {
            assert_eq!(sent.len(), 1);
            assert!(sent[0].1.ends_with(&payload));
            continue;
        }
        assert_eq!(sent.len(), 4, "{:?}", lab.stepped.drops());
        for (n, (_, bytes)) in sent.iter().enumerate() {
            assert!(bytes.ends_with(&payload[n * 1000..(n + 1) * 1000]));
            let view = gre::View::new(&bytes[34..]).unwrap();
            assert!(view.checksum_is_valid());
            assert!(view.sequence().is_none_or(|sequence| sequence == n as u32));
            let segment = &view.payload()[34..];
            let pseudo = checksum::pseudo4(ip.src, ip.dst, IpProtocol::TCP, segment.len() as u16);
            assert!(checksum::Transport::Tcp.verify(segment, pseudo));
        }
    }
}

/// Frames of a batch take different paths through the gateway, and leave in the order of their sequence numbers.
#[test]
fn sequence_numbers_are_in_order() {
    let mut lab = gretap("remotes = ['10.9.0.2']\ngre = { sequence = true }");
    lab.send(WAN, &packet("10.9.0.2", header(None), &frame(HOST, FAR)));
    lab.settle();
    let all = MacAddr([0xff; 6]);
    let frames = [frame(all, HOST), frame(FAR, HOST), frame(all, HOST), frame(FAR, HOST), frame(FAR, HOST)];
    lab.send_all(LAN, frames.iter().map(Vec::as_slice));
    let sent: Vec<_> = lab.sent().into_iter().filter(|(port, _)| *port == WAN).map(|(_, bytes)| bytes).collect();
    let numbers: Vec<_> = sent.iter().map(|bytes| gre::View::new(&bytes[34..]).unwrap().sequence()).collect();
    assert_eq!(numbers, [Some(0), Some(1), Some(2), Some(3), Some(4)]);
    for (bytes, inner) in sent.iter().zip(&frames) {
        assert!(bytes.ends_with(inner), "frames keep their order");
    }
}
