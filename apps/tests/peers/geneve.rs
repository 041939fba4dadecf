//! GENEVE with scapy as the remote and tshark as the checker.

use wirepath_testlab::oracle;

use crate::scapy_remote::{Receiver, outgoing};
use crate::world::{Variant, World};

/// Headers of tunnel packets to the gateway.
const PREAMBLE: &str = "
from scapy.contrib.geneve import GENEVE, GeneveOptions
def head(**fields):
    ip = IPv6(src=remote, dst=vtep) if version == 6 else IP(src=remote, dst=vtep)
    return Ether(src=peer, dst=gw)/ip/UDP(**{'sport': 50000, 'dport': 6081, **fields})
G = lambda **f: GENEVE(**{'vni': 42, 'proto': 0x6558, **f})
O = lambda kind, data=b'': GeneveOptions(classid=0x0102, type=kind, data=data)
";

fn scapy(world: &World, code: &str) -> Vec<Vec<u8>> {
    crate::scapy_remote::scapy(world, PREAMBLE, code)
}

/// Packets that the gateway sends have no error for tshark, the expected header, and the frame unchanged.
pub(crate) fn outgoing_are_valid(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let keys = "vni = 42\ngeneve_options = [{ class = 0x0102, type = 3, data = \"0a0b0c0d\" }]";
    let outer = outgoing(&world, "geneve", keys);
    let names = [
        "geneve.vni",
        "udp.dstport",
        "geneve.version",
        "geneve.flags.oam",
        "geneve.proto_type",
        "geneve.option.class",
        "geneve.option.type",
    ];
    for row in oracle::fields(&outer, &names) {
        let first: Vec<&str> = row.iter().map(|value| value.split(',').next().unwrap_or_default()).collect();
        assert_eq!(first[..2], ["0x00002a", "6081"], "{row:?}");
        assert_eq!(first[2..], ["0", "0", "0x6558", "0x0102", "0x03"], "{row:?}");
    }
}

/// The host gets the frames of valid packets unchanged, and all others are counted by their reason.
pub(crate) fn incoming_are_checked(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let good = scapy(
        &world,
        "
for f in inner:
    long = G(optionlen=63, options=[O(2, bytes(120)), O(3, bytes(124))])
    for g in [G(), G(options=[O(1, b'abcd'), O(0x7f)]), long, G(critical=1)]:
        emit(head()/g/f)
        if version == 4: emit(head(chksum=0)/g/f)
",
    );
    let mut receiver = Receiver::start(&world, "geneve", "vni = 42", &good);
    let bad = scapy(
        &world,
        "
f = inner[1]
emit(head()/G(version=1)/f)
emit(head()/G(oam=1)/f)
emit(head()/G(critical=1, options=[O(0x81)])/f)
emit(head()/G(options=[O(1), O(0xff, b'abcd')])/f)
emit(head()/G(proto=0x0800)/f)
emit(head()/G(vni=43)/f)
emit(head()/G(optionlen=63)/f)
emit(head(chksum=0x1234)/G()/f)
",
    );
    receiver.send_bad(&bad);
    receiver.stop(&[
        ("tunnel_version", 1),
        ("tunnel_control", 1),
        ("critical_option", 2),
        ("tunnel_payload", 1),
        ("unknown_vni", 1),
        ("bad_tunnel_header", 1),
        ("bad_l4_checksum", 1),
    ]);
}
