//! Tests of the header bytes of encapsulations.

use super::super::action::unhex;
use super::super::*;
use super::random::RuleGenerator;

const MACS: &str = "020000000002020000000001";
pub(crate) const IP4: &str = "0800450000000000000040XX00000a0000010a000002";
/// Ethernet, IPv4, UDP and VXLAN headers with VNI 42.
pub(crate) const VXLAN: &str =
    "0200000000020200000000010800450000000000000040110000c0a80001c0a80002ddd512b5000000000800000000002a00";

fn ip4(protocol: &str) -> String {
    format!("{MACS}{}", IP4.replace("XX", protocol))
}

fn ip6(next: &str) -> String {
    format!("{MACS}86dd600000000000{next}40fd000000000000000000000000000001fd000000000000000000000000000002")
}

/// IP protocol and remaining header bytes of tunnels for Ethernet frames.
fn l2_ends() -> Vec<(&'static str, String)> {
    vec![
        ("11", "ddd512b5000000000800000000002a00".into()),
        ("11", "ddd512b6000000000c00000300002a00".into()),
        ("11", "ddd517c10000000000006558 00002a00".replace(' ', "")),
        ("11", "ddd517c10000000002006558 00002a00 0102030100000001".replace(' ', "")),
        ("2f", "20006558 00002a00".replace(' ', "")),
        ("11", "ddd519eb000000000002a1ff".into()),
    ]
}

fn l3_ends() -> Vec<(&'static str, String)> {
    vec![
        ("11", "ddd512b6000000000c00000100002a00".into()),
        ("11", "ddd517c100000000000086dd 00002a00".replace(' ', "")),
        ("2f", "00000800".into()),
        ("2f", "000088470002a0ff0002a1ff".into()),
        ("04", String::new()),
        ("29", String::new()),
    ]
}

fn stacks(ends: Vec<(&'static str, String)>) -> Vec<Vec<u8>> {
    let full = ends.iter().flat_map(|(protocol, end)| [ip4(protocol) + end, ip6(protocol) + end]);
    full.chain([format!("{MACS}810000058847 0002a1ff").replace(' ', "")]).map(|hex| unhex(&hex).unwrap()).collect()
}

pub(crate) fn any(random: &mut RuleGenerator) -> Reformat {
    let (kind, choices) = match random.below(4) {
        0 => (ReformatKind::L2TunnelToL2, vec![Vec::new()]),
        1 => (
            ReformatKind::L3TunnelToL2,
            vec![unhex(&format!("{MACS}0800")).unwrap(), unhex(&format!("{MACS}8100000586dd")).unwrap()],
        ),
        2 => (ReformatKind::L2ToL2Tunnel, stacks(l2_ends())),
        _ => (ReformatKind::L2ToL3Tunnel, stacks(l3_ends())),
    };
    let bytes = &choices[random.below(choices.len() as u64) as usize];
    Reformat::new(kind, bytes).unwrap_or_else(|e| panic!("{kind:?} {bytes:02x?}: {e}"))
}

#[test]
fn header_stacks_must_be_complete_and_fit_the_kind() {
    for (kind, own, other) in
        [(ReformatKind::L2ToL2Tunnel, l2_ends(), l3_ends()), (ReformatKind::L2ToL3Tunnel, l3_ends(), l2_ends())]
    {
        for bytes in stacks(own) {
            let reformat = Reformat::new(kind, &bytes).unwrap_or_else(|e| panic!("{kind:?} {bytes:02x?}: {e}"));
            assert_eq!(reformat.bytes(), bytes);
            // Every shorter stack is incomplete, and every longer one has extra bytes.
            for cut in 0..bytes.len() {
                let shorter = Reformat::new(kind, &bytes[..cut]);
                // An IPv4 header alone is no tunnel either.
                assert!(shorter.is_err(), "{kind:?} {:02x?}", &bytes[..cut]);
            }
            assert!(Reformat::new(kind, &[&bytes[..], &[0]].concat()).is_err());
        }
        for bytes in stacks(other).iter().filter(|bytes| !bytes.ends_with(&[0x02, 0xa1, 0xff])) {
            assert!(Reformat::new(kind, bytes).unwrap_err().message.contains("carries"), "{kind:?} {bytes:02x?}");
        }
    }
}

#[test]
fn layout_of_a_vxlan_header() {
    let reformat = Reformat::new(ReformatKind::L2ToL2Tunnel, &unhex(VXLAN).unwrap()).unwrap();
    let expected = HeaderLayout { tags: 0, ip_version: 4, l3: 14, l4: 34, tunnel: 42, end: HeaderEnd::Vxlan };
    assert_eq!(reformat.layout(), Some(expected));
    assert_eq!(reformat.carried_version(), None);
}

#[test]
fn header_errors_name_the_byte() {
    let error = |kind, hex: &str| {
        let e = Reformat::new(kind, &unhex(&hex.replace(' ', "")).unwrap()).unwrap_err();
        format!("{e}")
    };
    use ReformatKind::*;
    let cases = [
        (error(L2TunnelToL2, "00"), "byte 0: decap l2 takes no header"),
        (error(L3TunnelToL2, &format!("{MACS}0806")), "byte 12: the EtherType"),
        (error(L3TunnelToL2, &format!("{MACS}080045")), "byte 14: decap l3 takes"),
        (
            error(L3TunnelToL2, &format!("{MACS}0800").replace("020000000001", "010000000001")),
            "byte 6: 01:00:00:00:00:01 is not a source",
        ),
        (
            error(L2ToL2Tunnel, &VXLAN.replace("0800000000002a00", "0000000000002a00")),
            "byte 42: the VXLAN header has no valid VNI",
        ),
        (
            error(L2ToL2Tunnel, &(VXLAN.to_owned() + "ff")),
            "byte 50: the header stack ends here, but 1 more bytes follow",
        ),
        (error(L2ToL2Tunnel, &VXLAN.replace("4500", "6500")), "byte 14: the version in an IPv4 header is not 4"),
        (error(L2ToL2Tunnel, &VXLAN.replace("0000000040110000", "0000200040110000")), "byte 14: "),
        (error(L2ToL2Tunnel, &VXLAN.replace("401100", "400600")), "byte 14: the packet ends inside the TCP header"),
        (error(L2ToL3Tunnel, VXLAN), "byte 42: the tunnel carries Ethernet"),
        (error(L2ToL2Tunnel, &(ip4("2f") + "80006558")), "byte 34: GRE flags 0x8000"),
        (
            error(L2ToL2Tunnel, &(ip4("11") + "ddd517c10000000001006558 00002a00 01020301")),
            "byte 50: a GENEVE option exceeds",
        ),
        (error(L2ToL2Tunnel, &(ip6("2c") + "2f00000000000000 00006558")), "byte 54: extension headers"),
        (error(L2ToL2Tunnel, &"02".repeat(193)), "byte 192: 193 bytes"),
    ];
    for (found, expected) in cases {
        assert!(found.starts_with(expected), "{found} / {expected}");
    }
}

#[test]
fn random_bytes_do_not_panic() {
    for seed in 0..20_000 {
        let mut random = RuleGenerator::new(seed);
        let reformat = any(&mut random);
        let mut bytes = reformat.bytes().to_vec();
        for _ in 0..random.below(4) {
            let at = random.below(bytes.len() as u64 + 1) as usize;
            match random.below(3) {
                0 => bytes.insert(at, random.next() as u8),
                1 => bytes.truncate(at),
                _ if at < bytes.len() => bytes[at] = random.next() as u8,
                _ => {}
            }
        }
        if let Ok(read) = Reformat::new(reformat.kind(), &bytes) {
            assert_eq!(read.bytes(), bytes);
            read.carried_version();
        }
    }
}
