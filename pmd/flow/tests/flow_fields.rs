//! Values of all fields of the rule language in frames of every header stack, compared with tshark.

#[path = "../../wire/tests/wire/stacks.rs"]
mod stacks;

use fastrand::Rng;
use wirepath_flow::{Field, HeaderType, Key, KeyKind, Metadata, header_type, packet_value};
use wirepath_testlab::{Requirement, oracle, require};
use wirepath_wire::{Parsed, parse};

/// tshark's name of a field, our fields, and how to convert its value: shift right, then mask.
const NAMES: &[(&str, &[Field], u32, u128)] = &[
    ("eth.dst", &[Field::EthDst], 0, u128::MAX),
    ("eth.src", &[Field::EthSrc], 0, u128::MAX),
    ("mpls.label", &[Field::MplsLabel], 0, u128::MAX),
    ("mpls.exp", &[Field::MplsTc], 0, u128::MAX),
    ("mpls.bottom", &[Field::MplsBos], 0, u128::MAX),
    ("mpls.ttl", &[Field::MplsTtl], 0, u128::MAX),
    ("arp.opcode", &[Field::ArpOp], 0, u128::MAX),
    ("arp.src.hw_mac", &[Field::ArpSha], 0, u128::MAX),
    ("arp.src.proto_ipv4", &[Field::ArpSpa], 0, u128::MAX),
    ("arp.dst.hw_mac", &[Field::ArpTha], 0, u128::MAX),
    ("arp.dst.proto_ipv4", &[Field::ArpTpa], 0, u128::MAX),
    ("ip.src", &[Field::Ipv4Src], 0, u128::MAX),
    ("ip.dst", &[Field::Ipv4Dst], 0, u128::MAX),
    ("ip.proto", &[Field::Ipv4Proto], 0, u128::MAX),
    ("ip.dsfield.dscp", &[Field::Ipv4Dscp], 0, u128::MAX),
    ("ip.dsfield.ecn", &[Field::Ipv4Ecn], 0, u128::MAX),
    ("ip.ttl", &[Field::Ipv4Ttl], 0, u128::MAX),
    ("ip.hdr_len", &[Field::Ipv4Ihl], 2, u128::MAX),
    ("ip.id", &[Field::Ipv4Id], 0, u128::MAX),
    ("ip.flags.df", &[Field::Ipv4Df], 0, u128::MAX),
    ("ip.flags.mf", &[Field::Ipv4Mf], 0, u128::MAX),
    ("ip.frag_offset", &[Field::Ipv4Offset], 0, u128::MAX),
    ("ipv6.src", &[Field::Ipv6Src], 0, u128::MAX),
    ("ipv6.dst", &[Field::Ipv6Dst], 0, u128::MAX),
    ("ipv6.nxt", &[Field::Ipv6Next], 0, u128::MAX),
    ("ipv6.tclass.dscp", &[Field::Ipv6Dscp], 0, u128::MAX),
    ("ipv6.tclass.ecn", &[Field::Ipv6Ecn], 0, u128::MAX),
    ("ipv6.flow", &[Field::Ipv6Flow], 0, u128::MAX),
    ("ipv6.hlim", &[Field::Ipv6Hops], 0, u128::MAX),
    ("tcp.srcport", &[Field::TcpSrc], 0, u128::MAX),
    ("tcp.dstport", &[Field::TcpDst], 0, u128::MAX),
    ("tcp.seq_raw", &[Field::TcpSeq], 0, u128::MAX),
    ("tcp.ack_raw", &[Field::TcpAck], 0, u128::MAX),
    ("tcp.flags", &[Field::TcpFlags], 0, 0x1ff),
    ("tcp.window_size_value", &[Field::TcpWindow], 0, u128::MAX),
    ("udp.srcport", &[Field::UdpSrc], 0, u128::MAX),
    ("udp.dstport", &[Field::UdpDst], 0, u128::MAX),
    ("icmp.type", &[Field::IcmpType], 0, u128::MAX),
    ("icmp.code", &[Field::IcmpCode], 0, u128::MAX),
    ("icmp.ident", &[Field::IcmpId], 0, u128::MAX),
    ("icmp.seq", &[Field::IcmpSeq], 0, u128::MAX),
    ("icmpv6.type", &[Field::Icmpv6Type], 0, u128::MAX),
    ("icmpv6.code", &[Field::Icmpv6Code], 0, u128::MAX),
    ("icmpv6.echo.identifier", &[Field::Icmpv6Id], 0, u128::MAX),
    ("icmpv6.echo.sequence_number", &[Field::Icmpv6Seq], 0, u128::MAX),
    ("esp.spi", &[Field::EspSpi], 0, u128::MAX),
    ("esp.sequence", &[Field::EspSeq], 0, u128::MAX),
    ("gre.flags_and_version", &[Field::GreFlags], 0, u128::MAX),
    ("gre.proto", &[Field::GreProto], 0, u128::MAX),
    ("gre.key", &[Field::GreKey], 0, u128::MAX),
    ("vxlan.vni", &[Field::VxlanVni, Field::GpeVni], 0, u128::MAX),
    ("vxlan.next_proto", &[Field::GpeNext], 0, u128::MAX),
    ("vlan.id", &[Field::VlanVid], 0, u128::MAX),
    ("vlan.priority", &[Field::VlanPcp], 0, u128::MAX),
    ("vlan.dei", &[Field::VlanDei], 0, u128::MAX),
    ("geneve.vni", &[Field::GeneveVni], 0, u128::MAX),
    ("geneve.proto_type", &[Field::GeneveProto], 0, u128::MAX),
    ("geneve.flags.oam", &[Field::GeneveOam], 0, u128::MAX),
    ("geneve.flags.critical", &[Field::GeneveCritical], 0, u128::MAX),
];

/// Parses numbers, addresses and booleans as tshark writes them.
fn number(text: &str) -> u128 {
    if let Some(hex) = text.strip_prefix("0x") {
        return u128::from_str_radix(hex, 16).unwrap();
    }
    if let Ok(mac) = text.parse::<wirepath_wire::MacAddr>() {
        return mac.to_u64().into();
    }
    if let Ok(ip) = text.parse::<std::net::Ipv4Addr>() {
        return ip.to_bits().into();
    }
    if let Ok(ip) = text.parse::<std::net::Ipv6Addr>() {
        return ip.to_bits();
    }
    match text {
        "True" => 1,
        "False" => 0,
        number => number.parse().unwrap_or_else(|_| panic!("{number}")),
    }
}

fn ours(parsed: &Parsed, bytes: &[u8], fields: &[Field]) -> Vec<u128> {
    let max_count = fields[0].spec().item.spec().max_count;
    let keys = (0..2).flat_map(|level| {
        let nths = (0..max_count).flat_map(move |nth| fields.iter().map(move |&field| (nth, field)));
        nths.map(move |(nth, field)| Key { level, nth, kind: KeyKind::Field(field) })
    });
    keys.filter_map(|key| packet_value(parsed, bytes, Metadata::default(), key)).collect()
}

#[test]
fn tshark_reads_the_same_values() {
    require!(Requirement::Program("tshark"));
    let mut frames = Vec::new();
    for (i, spec) in stacks::all_specs(40).into_iter().enumerate() {
        frames.extend((0..12).map(|seed| stacks::frame(&mut Rng::with_seed(i as u64 * 1000 + seed), spec)));
    }
    let bytes: Vec<&[u8]> = frames.iter().map(|made| &made.bytes[..]).collect();
    // tshark must be told that Ethernet follows the label. Fragments must not be reassembled.
    let arguments = ["-d", "mpls.label==500,pwethnocw", "-o", "ip.defragment:FALSE", "-o", "ipv6.defragment:FALSE"];
    let names: Vec<&str> = NAMES.iter().map(|(name, ..)| *name).collect();
    let rows = oracle::fields_with(&arguments, &bytes, &names);
    let mut compared = vec![0; NAMES.len()];
    for (made, row) in frames.iter().zip(&rows) {
        let parsed = parse(&made.bytes).unwrap();
        // tshark also dissects what follows the second stack, and fragments.
        let deeper = made.fragment || parsed.tunnel_of(1) != wirepath_wire::Tunnel::None;
        for (at, (&(name, fields, shift, mask), text)) in NAMES.iter().zip(row).enumerate() {
            // tshark has other field names for service tags.
            let service = ours(&parsed, &made.bytes, &[Field::VlanTpid]).iter().any(|tpid| *tpid != 0x8100);
            if name.starts_with("vlan.") && service {
                continue;
            }
            if name.starts_with("mpls.") {
                // tshark dissects the labels at both positions, and more than four.
                let both = (0..2)
                    .any(|level| header_type(&parsed, level, HeaderType::Mpls).is_some_and(|f| f.count_ones() > 1));
                if both {
                    continue;
                }
            }
            let dissected: Vec<u128> =
                text.split(',').filter(|t| !t.is_empty()).map(|t| number(t) >> shift & mask).collect();
            let ours = ours(&parsed, &made.bytes, fields);
            let same = dissected.starts_with(&ours) && (deeper || dissected.len() == ours.len());
            assert!(same, "{name}: {ours:x?}, tshark {dissected:x?} ({text})\n{parsed:?}\n{:02x?}", made.bytes);
            compared[at] += ours.len();
        }
    }
    for ((name, ..), count) in NAMES.iter().zip(compared) {
        assert!(count > 0, "{name} was never there");
    }
}
