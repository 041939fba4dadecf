//! The kinds "gretap" and "nvgre" with scapy as the remote and tshark as the checker.

use wirepath_testlab::oracle;

use crate::scapy_remote::{Receiver, outgoing};
use crate::world::{Variant, World};

/// Headers of tunnel packets to the gateway.
const PREAMBLE: &str = "
def head(source=None):
    source = source or remote
    return Ether(src=peer, dst=gw)/(IPv6(src=source, dst=vtep, nh=47) if version == 6 else \
        IP(src=source, dst=vtep, proto=47))
G = lambda **f: GRE(**{'proto': 0x6558, **f})
K = lambda key, **f: G(key_present=1, key=key, **f)
";

fn scapy(world: &World, code: &str) -> Vec<Vec<u8>> {
    crate::scapy_remote::scapy(world, PREAMBLE, code)
}

/// Packets that the gateway sends have no error for tshark, the expected header, and the frame unchanged.
pub(crate) fn gretap_out(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let all = "vni = 0xfedcba98\ngre = { checksum = true, sequence = true }";
    for (keys, flags, key) in [("", "0x0000", ""), ("vni = 7", "0x2000", "0x00000007"), (all, "0xb000", "0xfedcba98")] {
        let outer = outgoing(&world, "gretap", keys);
        let names = ["gre.flags_and_version", "gre.proto", "gre.key", "gre.checksum.status", "gre.sequence_number"];
        let mut last = None;
        for row in oracle::fields(&outer, &names) {
            assert_eq!(row[..3], [flags, "0x6558", key], "{row:?}");
            if flags == "0xb000" {
                assert!(row[3] == "1" || row[3] == "Good", "{row:?}");
                let number: u32 = row[4].parse().expect("a number");
                assert!(last.is_none_or(|last| number > last), "{number} after {last:?}");
                last = Some(number);
            }
        }
    }
}

/// The host gets the frames of valid packets unchanged, and all others are counted by their reason.
pub(crate) fn gretap_in(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let good = scapy(
        &world,
        "
for f in inner:
    for g in [K(7), K(7, chksum_present=1), K(7, seqnum_present=1, sequence_number=9), \
        K(7, chksum_present=1, seqnum_present=1, sequence_number=2)]:
        emit(head()/g/f)
",
    );
    let mut receiver = Receiver::start(&world, "gretap", "vni = 7", &good);
    let bad = scapy(
        &world,
        "
f = inner[1]
emit(head()/K(7, version=1)/f)
emit(head()/K(7, routing_present=1)/f)
emit(head()/K(7, strict_route_source=1)/f)
emit(head()/K(7, chksum_present=1, chksum=0x1234)/f)
emit(head()/K(7, proto=0x0800)/f)
emit(head()/K(8)/f)
emit(head()/G()/f)
emit(head('fd00:9::77' if version == 6 else '10.9.0.77')/K(7)/f)
emit(head()/Raw(bytes.fromhex('20006558')))
",
    );
    receiver.send_bad(&bad);
    receiver.stop(&[
        ("tunnel_version", 1),
        ("tunnel_flags", 2),
        ("bad_l4_checksum", 1),
        ("tunnel_payload", 1),
        ("unknown_vni", 2),
        ("unknown_remote", 1),
        ("bad_tunnel_header", 1),
    ]);
}

/// tshark reads the VSID in the key of sent packets. Received packets may have any FlowID.
pub(crate) fn nvgre(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let mut flows = Vec::new();
    for row in oracle::fields(&outgoing(&world, "nvgre", "vni = 0x123456"), &["gre.flags_and_version", "gre.key"]) {
        assert_eq!((row[0].as_str(), &row[1][..8]), ("0x2000", "0x123456"), "{row:?}");
        flows.push(row[1].clone());
    }
    flows.dedup();
    assert!(flows.len() > 1, "{flows:?}");
    let good = scapy(&world, "[emit(head()/K(0x12345600 | flow)/f) for f in inner for flow in [0, 255]]");
    let mut receiver = Receiver::start(&world, "nvgre", "vni = 0x123456", &good);
    let bad = scapy(
        &world,
        "
f = inner[1]
emit(head()/K(0x12345600, chksum_present=1)/f)
emit(head()/K(0x12345600, seqnum_present=1, sequence_number=1)/f)
emit(head()/G()/f)
emit(head()/K(0x12345700)/f)
",
    );
    receiver.send_bad(&bad);
    receiver.stop(&[("tunnel_flags", 3), ("unknown_vni", 1)]);
}
