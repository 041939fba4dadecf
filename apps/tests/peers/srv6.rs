//! SRv6 with scapy as the remote and tshark as the checker.

use wirepath_testlab::oracle;

use crate::scapy_remote::{Receiver, outgoing};
use crate::world::{Variant, World};

/// Headers of tunnel packets to the gateway's SID, which is in the network of the link.
const PREAMBLE: &str = "
from scapy.layers.inet6 import IPv6ExtHdrSegmentRouting, IPv6ExtHdrSegmentRoutingTLV, \
    IPv6ExtHdrSegmentRoutingTLVPadN
SID = 'fd00:9::100'
def head(nh, source=None):
    return Ether(src=peer, dst=gw)/IPv6(src=source or remote, dst=SID, nh=nh)
def S(left=0, path=(), nh=143, **f):
    addresses = [SID, *path]
    return IPv6ExtHdrSegmentRouting(**{
        'nh': nh, 'addresses': addresses, 'segleft': left, 'lastentry': len(addresses) - 1, **f})
";

/// Returns the table of a segment whose path begins at the remote.
fn table(segs: &str, keys: &str) -> String {
    format!("srv6 = {{ local_sid = \"fd00:9::100\", segs = [\"fd00:9::2\"{segs}]{keys} }}")
}

fn scapy(world: &World, code: &str) -> Vec<Vec<u8>> {
    crate::scapy_remote::scapy(world, PREAMBLE, code)
}

/// tshark finds the path of the policy in sent packets, and no error.
pub(crate) fn outgoing_are_valid(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let second = ", \"fc00:2::100\"";
    for (segs, keys, header) in [
        ("", "", ["0", "fd00:9::2"]),
        ("", ", mode = \"encaps_red\"", ["", ""]),
        (second, "", ["1", "fc00:2::100,fd00:9::2"]),
        (second, ", mode = \"encaps_red\"", ["1", "fc00:2::100"]),
    ] {
        let outer = outgoing(&world, "srv6", &table(segs, keys));
        let names = ["ipv6.dst", "ipv6.routing.segleft", "ipv6.routing.srh.addr", "ipv6.flow"];
        let mut flows = Vec::new();
        for row in oracle::fields(&outer, &names) {
            assert_eq!(row[0].split(',').next(), Some("fd00:9::2"), "{row:?}");
            assert_eq!(row[1..3], header, "{row:?}");
            flows.push(row[3].clone());
        }
        flows.dedup();
        assert!(flows.len() > 1, "{flows:?}");
    }
}

/// The host gets the frames of valid packets unchanged, and all others are counted by their reason. The remote finds
/// the SID by neighbour discovery.
pub(crate) fn incoming_are_checked(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let good = scapy(
        &world,
        "
for f in inner:
    emit(head(143)/f)
    emit(head(43)/S()/f)
    emit(head(43)/S(path=['fc00:6::1', 'fc00:5::1'], tag=7)/f)
    emit(head(43)/S(tlv_objects=[IPv6ExtHdrSegmentRoutingTLV(type=5, len=38, value=b'h' * 38)])/f)
    emit(head(43)/S(tlv_objects=[IPv6ExtHdrSegmentRoutingTLVPadN(len=6, padding=b'\\0' * 6)])/f)
    emit(head(60)/IPv6ExtHdrDestOpt(nh=43)/S()/f)
    emit(head(43)/IPv6ExtHdrRouting(nh=143, type=253, segleft=0)/f)
",
    );
    let mut receiver = Receiver::start(&world, "srv6", &table("", ""), &good);
    assert_eq!(receiver.each, 7);
    let bad = scapy(
        &world,
        "
f = inner[1]
emit(head(43)/S(left=1, path=['fc00:5::1'])/f)
emit(head(43)/S(left=1)/f)
emit(head(43)/S(lastentry=1)/f)
emit(head(43)/S(len=0)/f)
emit(head(43)/S(left=3, path=['fc00:5::1'])/f)
emit(head(43)/S(len=3)/Raw(bytes([5, 7, 0, 0, 0, 0, 0, 0]))/f)
emit(head(43)/IPv6ExtHdrRouting(nh=143, type=253, segleft=1)/f)
emit(head(43)/IPv6ExtHdrRouting(nh=143, type=0, addresses=['fc00:5::1'], segleft=1)/f)
emit(head(47)/GRE(proto=0x6558)/f)
emit(head(43)/S(nh=4)/IP(src='10.1.0.50', dst='10.1.0.51')/b'x')
emit(head(58)/ICMPv6EchoRequest())
emit(head(17)/UDP(sport=4789, dport=4789)/VXLAN(vni=42)/f)
emit(head(43, 'fd00:9::77')/S()/f)
emit(head(143)/Raw(b'z' * 13))
",
    );
    receiver.send_bad(&bad);
    // The kernel of the remote resolves the SID. What it sends to the SID is no tunnel packet.
    assert!(!crate::world::pings(&world.remotes[0], "fd00:9::100", 56, 1));
    let neighbours = world.remotes[0].run(&["ip", "-6", "neighbour", "show", "fd00:9::100"]).expect();
    let mac = crate::world::colons(world.gateway.mac("wan"));
    assert!(variant.is_emulated() || neighbours.contains(&mac), "{neighbours}");
    assert!(neighbours.contains("lladdr"), "{neighbours}");
    let reasons =
        [("segments_left", 2), ("bad_tunnel_header", 4), ("routing_type", 2), ("unknown_remote", 1), ("too_short", 1)];
    let summary = receiver.stop(&reasons);
    assert!(summary.drops("sid_upper_layer") >= 5, "{}", summary.json["drops"]);
}
