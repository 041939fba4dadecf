//! Tunnels that carry IP packets: their templates, judged by scapy and tshark.

use wirepath_pipeline::tunnel::kinds::{KINDS, Payload, TunnelKind};
use wirepath_pipeline::tunnel::{GatewayConfig, outer_headers};
use wirepath_settings::Source;
use wirepath_testlab::oracle;
use wirepath_wire::build::{EncapFields, OuterHeaders};
use wirepath_wire::checksum;

use crate::lab::{PEER, US};

fn kind(name: &str) -> &'static TunnelKind {
    KINDS.iter().find(|kind| kind.name == name).unwrap()
}

/// Returns the template of a tunnel that carries IP packets. Options are those of the kind.
fn template(name: &str, vni: Option<u32>, options: &[u8], remote: &str) -> OuterHeaders {
    let text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\nudp_checksum = 'always'\n\
                [[segment]]\nvni = 1\nkind = 'geneve'\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
    let source = Source::new("test", text.to_owned());
    let document = source.parse().unwrap();
    let mut config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
    let segment = &mut config.segments[0];
    (segment.kind, segment.vni, segment.payload) = (kind(name), vni, Payload::Ip);
    segment.options = options.into();
    let local = if remote.contains('.') { "10.9.0.1" } else { "fd00:9::1" };
    let ends = (local.parse().unwrap(), remote.parse().unwrap());
    outer_headers(&config.underlay, segment, (US, PEER), ends).unwrap()
}

/// Returns a tunnel packet with this inner packet.
fn packet(template: &OuterHeaders, inner: &[u8]) -> Vec<u8> {
    let fields = EncapFields {
        carries_ipv6: inner[0] >> 4 == 6,
        entropy: 0xabcd_e123,
        sequence: 5,
        inner_sum: checksum::sum(inner),
        traffic_class: 0xb9,
        ..template.fields(inner.len(), 50_000)
    };
    let mut bytes = vec![0; template.len()];
    template.emit(&mut bytes, &fields).unwrap();
    bytes.extend_from_slice(inner);
    bytes
}

/// All bytes are those that scapy writes.
#[test]
fn scapy_writes_the_same_packets() {
    let none: [&[u8]; 0] = [];
    let inner = oracle::scapy(
        &none,
        "
emit(IP(src='10.1.0.5', dst='10.1.0.6')/UDP(sport=1, dport=2)/b'abc')
emit(IPv6(src='fd00:1::5', dst='fd00:1::6')/UDP(sport=1, dport=2)/b'abcd')
",
    )
    .frames;
    let kinds: [(&str, Option<u32>, &[u8], &str); 7] = [
        ("geneve", Some(42), &[], "UDP(sport=50000, dport=6081)/GENEVE(vni=42, proto=proto)"),
        ("gre", None, &[], "GRE(proto=proto)"),
        ("gre", Some(7), &[], "GRE(proto=proto, key_present=1, key=7)"),
        ("gre", None, &[0x80], "GRE(proto=proto, chksum_present=1)"),
        ("gre", Some(0), &[0x10], "GRE(proto=proto, key_present=1, key=0, seqnum_present=1, sequence_number=5)"),
        (
            "gre",
            Some(0xfedc_ba98),
            &[0x90],
            "GRE(proto=proto, chksum_present=1, key_present=1, key=0xfedcba98, seqnum_present=1, sequence_number=5)",
        ),
        ("ipip", None, &[], ""),
    ];
    let (mut ours, mut script) = (Vec::new(), "from scapy.contrib.geneve import GENEVE\n".to_owned());
    script +=
        &format!("inner = [bytes.fromhex(x) for x in {:?}]\n", inner.iter().map(|it| hex(it)).collect::<Vec<_>>());
    for (name, vni, options, header) in kinds {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let template = template(name, vni, options, remote);
            assert!(template.varies());
            for (n, packet) in inner.iter().map(|inner| packet(&template, inner)).enumerate() {
                ours.push(packet);
                // Without UDP ports, the flow label is entropy (RFC 6438).
                let label = if name == "geneve" { 0 } else { 0xa_bcde };
                script += &format!(
                    "proto, protocol = {}\n\
                     outer = IPv6(src='fd00:9::1', dst='fd00:9::2', hlim=64, tc=0xb9, fl={label}, nh=protocol) if {} \
                     else IP(src='10.9.0.1', dst='10.9.0.2', id=0, flags='DF', ttl=64, tos=0xb9, proto=protocol)\n\
                     emit(Ether(src='{US}', dst='{PEER}')/outer/{header}Raw(inner[{n}]))\n",
                    match (name, n) {
                        ("geneve", 0) => "0x0800, 17",
                        ("geneve", _) => "0x86dd, 17",
                        ("gre", 0) => "0x0800, 47",
                        ("gre", _) => "0x86dd, 47",
                        (_, 0) => "0, 4",
                        _ => "0, 41",
                    },
                    if remote.contains('.') { "False" } else { "True" },
                    header = if header.is_empty() { String::new() } else { format!("{header}/") },
                );
            }
        }
    }
    let theirs = oracle::scapy(&none, &script).frames;
    assert_eq!(ours.len(), 28);
    for (n, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert_eq!(hex(ours), hex(theirs), "packet {n}");
    }
    oracle::assert_clean(&ours);
    for row in oracle::fields(&ours, &["ip.src", "ipv6.src", "udp.dstport"]) {
        assert!(row.iter().any(|field| field.contains("10.1.0.5") || field.contains("fd00:1::5")), "{row:?}");
        assert!(row[2].ends_with('2'), "{row:?}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
