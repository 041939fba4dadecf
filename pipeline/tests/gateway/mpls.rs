//! MPLS over UDP and over GRE: pseudowires with Ethernet frames, hostile packets, and MPLS beside other kinds.
//! IP packets behind labels are among the tunnels of `ip_payload.rs`.

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_settings::Source;
use wirepath_testlab::oracle;
use wirepath_wire::build::{OuterChecksum, OuterConfig, OuterHeaders, Transport, VariableFields};
use wirepath_wire::{IpProtocol, MacAddr, checksum, mpls};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, US, WAN, frame};

const KINDS: [&str; 2] = ["mpls-udp", "mpls-gre"];
const REMOTES: [&str; 2] = ["10.9.0.2", "fd00:9::2"];

/// Returns a label stack entry.
fn label(label: u32, bottom: bool, ttl: u8) -> Vec<u8> {
    let mut bytes = vec![0; mpls::HEADER_LEN];
    mpls::Repr { label, traffic_class: 0, bottom, ttl }.emit(&mut bytes).unwrap();
    bytes
}

/// Returns a tunnel packet to the gateway. `header` begins with the label stack.
fn packet(kind: &str, from: &str, header: &[u8], inner: &[u8]) -> Vec<u8> {
    let gre = [&[0, 0, 0x88, 0x47], header].concat();
    let is_udp = kind == "mpls-udp";
    raw(is_udp, from, if is_udp { header } else { &gre }, inner)
}

/// Returns a packet to the gateway over UDP or GRE.
fn raw(is_udp: bool, from: &str, header: &[u8], inner: &[u8]) -> Vec<u8> {
    let outer = OuterHeaders::new(&OuterConfig {
        src_mac: PEER,
        dst_mac: US,
        tags: &[],
        src: from.parse().unwrap(),
        dst: if from.contains('.') { "10.9.0.1" } else { "fd00:9::1" }.parse().unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        transport: match is_udp {
            true => Transport::Udp { dst_port: mpls::PORT, checksum: OuterChecksum::Standard },
            false => Transport::Protocol(IpProtocol::GRE),
        },
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

/// Returns the keys of a segment with or without control word, and what is between label and frame.
fn forms() -> [(&'static str, &'static [u8]); 2] {
    [("", &[0, 0, 0, 0]), ("mpls = { control_word = false }", &[])]
}

#[test]
fn pseudowires_in_both_directions() {
    let mut all = Vec::new();
    for kind in KINDS {
        for remote in REMOTES {
            for (keys, word) in forms() {
                for segment in [format!("remotes = ['{remote}']"), "accept_unknown_remotes = true".to_owned()] {
                    let mut lab = Lab::of(&format!("kind = '{kind}'"), &format!("{segment}\n{keys}")).with_peer();
                    lab.settle();
                    let own = [&label(42, true, 64)[..], word].concat();
                    let below_null = [&label(2, false, 9)[..], &label(42, true, 255), word].concat();
                    for header in [&own, &own, &below_null] {
                        let inner = frame(HOST, FAR);
                        lab.send(WAN, &packet(kind, remote, header, &inner));
                        assert_eq!(lab.settle(), [(LAN, inner)], "{kind} {remote} {:?}", lab.stepped.drops());
                    }
                    let inner = frame(FAR, HOST);
                    lab.send(LAN, &inner);
                    let sent = lab.settle();
                    let (_, outer) = sent.iter().find(|(port, it)| *port == WAN && it.ends_with(&inner)).unwrap();
                    let header = outer.len() - inner.len() - own.len();
                    assert_eq!(outer[header..][..own.len()], own);
                    match kind {
                        "mpls-udp" => assert_eq!(outer[header - 6..header - 4], mpls::PORT.to_be_bytes()),
                        _ => assert_eq!(outer[header - 4..header], [0, 0, 0x88, 0x47]),
                    }
                    all.push(outer.clone());
                    // The headers and the longest inner packet fill the underlay's MTU.
                    let ip = if remote.contains('.') { 20 } else { 40 };
                    let front = if kind == "mpls-udp" { 8 } else { 4 };
                    lab.assert_longest_frame(1500 - ip - front - own.len());
                    lab.assert_balanced();
                }
            }
        }
    }
    oracle::assert_clean(&all);
}

#[test]
fn hostile_packets_are_dropped_by_reason() {
    let word = [0; 4];
    let with_word = |stack: Vec<u8>| [&stack[..], &word].concat();
    let two = |first, second| with_word([label(first, false, 64), label(second, true, 64)].concat());
    let cases = [
        (with_word(label(43, true, 64)), DropReason::UnknownVni),
        (with_word(label(42, false, 64)), DropReason::LabelStack),
        (two(43, 42), DropReason::LabelStack),
        (two(1, 42), DropReason::ReservedLabel),
        (two(7, 42), DropReason::ReservedLabel),
        (with_word(label(0, true, 64)), DropReason::ReservedLabel),
        (with_word(label(3, true, 64)), DropReason::ReservedLabel),
        (with_word(label(42, true, 0)), DropReason::LabelTtl),
        (with_word(label(42, true, 1)), DropReason::LabelTtl),
        ([&label(42, true, 64)[..], &[0x10, 0, 0, 0x21]].concat(), DropReason::TunnelControl),
        ([&label(42, true, 64)[..], &[0x45, 0, 0, 0x21]].concat(), DropReason::ControlWord),
    ];
    for kind in KINDS {
        let remotes = "remotes = ['10.9.0.2', 'fd00:9::2']";
        let mut lab = Lab::of(&format!("kind = '{kind}'"), remotes);
        lab.settle();
        for remote in REMOTES {
            let mut refuse = |bytes: &[u8], reason| {
                let before = lab.dropped(reason);
                lab.send(WAN, bytes);
                assert_eq!(lab.settle(), [], "{kind} {reason:?}");
                assert_eq!(lab.dropped(reason), before + 1, "{kind} {reason:?} {:?}", lab.stepped.drops());
            };
            for (header, reason) in &cases {
                refuse(&packet(kind, remote, header, &frame(HOST, FAR)), *reason);
            }
            // Stack, control word and frame that are cut off.
            let own = with_word(label(42, true, 64));
            for cut in 0..own.len() {
                refuse(&packet(kind, remote, &own[..cut], &[]), DropReason::BadTunnelHeader);
            }
            refuse(&packet(kind, remote, &own, &[2; 13]), DropReason::TooShort);
            let stranger = remote.replace("::2", "::7").replace(".2", ".7");
            refuse(&packet(kind, &stranger, &own, &frame(HOST, FAR)), DropReason::UnknownRemote);
            if kind == "mpls-gre" {
                let gre = |front: &[u8]| raw(false, remote, &[front, &own].concat(), &frame(HOST, FAR));
                refuse(&gre(&[0, 0, 0x88, 0x48]), DropReason::TunnelPayload);
                refuse(&gre(&[0, 0, 0x65, 0x58]), DropReason::TunnelPayload);
                refuse(&gre(&[0x20, 0, 0x88, 0x47, 0, 0, 0, 42]), DropReason::TunnelFlags);
                refuse(&gre(&[0x40, 0, 0x88, 0x47]), DropReason::TunnelFlags);
                refuse(&gre(&[0x80, 0, 0x88, 0x47, 1, 2, 0, 0]), DropReason::BadL4Checksum);
            }
        }
        lab.assert_balanced();
    }
}

/// GRE with frames, GRE with labels and labels over UDP have segments with the same number in one gateway.
#[test]
fn mpls_beside_other_kinds() {
    for [default, others @ ..] in
        [["gretap", "mpls-gre", "mpls-udp"], ["mpls-gre", "nvgre", "mpls-udp"], ["mpls-udp", "mpls-gre", "nvgre"]]
    {
        let segment = |vlan: usize, kind: &str| {
            format!(
                "\n[[segment]]\nname = '{kind}'\nkind = '{kind}'\nvni = 42\nremotes = ['10.9.0.2']\n\
                 ports = [{{ port = 'lan', vlan = {vlan} }}]"
            )
        };
        let more: String = others.iter().enumerate().map(|(n, kind)| segment(n + 5, kind)).collect();
        let mut lab = Lab::of(&format!("kind = '{default}'"), &format!("remotes = ['10.9.0.2']{more}")).with_peer();
        lab.settle();
        let inner = frame(MacAddr([0xff; 6]), FAR);
        for _ in 0..2 {
            for (n, kind) in [default, others[0], others[1]].into_iter().enumerate() {
                let own = [&label(42, true, 64)[..], &[0; 4]].concat();
                let bytes = match kind {
                    "gretap" => raw(false, "10.9.0.2", &[0x20, 0, 0x65, 0x58, 0, 0, 0, 42], &inner),
                    "nvgre" => raw(false, "10.9.0.2", &[0x20, 0, 0x65, 0x58, 0, 0, 42, 9], &inner),
                    _ => packet(kind, "10.9.0.2", &own, &inner),
                };
                lab.send(WAN, &bytes);
                let expected = match n {
                    0 => inner.clone(),
                    _ => [&inner[..12], &[0x81, 0, 0, n as u8 + 4], &inner[12..]].concat(),
                };
                assert_eq!(lab.settle(), [(LAN, expected)], "{default} {kind} {:?}", lab.stepped.drops());
            }
        }
    }
}

#[test]
fn configurations_are_checked() {
    let read = |segment: &str| {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nremotes = ['10.9.0.2']\n{segment}\n"
        );
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        document.read(|root| GatewayConfig::read(root, &["wan", "lan"])).map_err(|error| error.to_string())
    };
    for kind in KINDS {
        let ports = "ports = [{ port = 'lan' }]\n";
        let good = format!("kind = '{kind}'\n{ports}");
        for vni in [16, 1_048_575] {
            assert_eq!(read(&format!("{good}vni = {vni}")).unwrap().segments[0].vni, Some(vni));
        }
        let packets = good.replace(ports, "payload = 'ip'\naddresses = ['10.255.0.1/30']\nvni = 16\n");
        assert!(read(&packets).unwrap().segments[0].is_routed_tunnel());
        for (segment, message) in [
            (good.clone(), "segment[0].vni: missing, expected an integer from 16 to 1048575"),
            (format!("{good}vni = 15"), "found 15, expected an integer from 16 to 1048575"),
            (format!("{good}vni = 1048576"), "found 1048576, expected an integer from 16 to 1048575"),
            (
                format!("{packets}mpls = {{ control_word = true }}"),
                "segment[0].mpls.control_word: found in a segment with IP packets, expected in one with Ethernet",
            ),
            (
                format!("vni = 42\n{ports}mpls = {{ control_word = true }}"),
                "mpls: found in a segment of kind \"vxlan\", expected only for \"mpls-udp\"",
            ),
        ] {
            let found = read(&segment).unwrap_err();
            assert!(found.contains(message), "{segment}\n  gave {found}\n  not  {message}");
        }
    }
}
