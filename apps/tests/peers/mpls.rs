//! MPLS over UDP and over GRE with Ethernet frames, with scapy as the remote and tshark as the checker.

use wirepath_testlab::oracle;

use crate::scapy_remote::{Receiver, outgoing_with};
use crate::world::{Variant, World};

/// Headers of tunnel packets to the gateway. `over` is the kind.
const PREAMBLE: &str = "
from scapy.contrib.mpls import MPLS
def ip(nh, source=None):
    source = source or remote
    return Ether(src=peer, dst=gw)/(IPv6(src=source, dst=vtep, nh=nh) if version == 6 else \
        IP(src=source, dst=vtep, proto=nh))
def head(source=None, proto=0x8847, **f):
    if over == 'mpls-udp':
        return ip(17, source)/UDP(**{'sport': 50000, 'dport': 6635, **f})
    return ip(47, source)/GRE(proto=proto, **f)
L = lambda label=42, s=1, ttl=64, cos=0: Raw(bytes(MPLS(label=label, s=s, ttl=ttl, cos=cos)))
W = Raw(bytes(4))
";

fn scapy(world: &World, kind: &str, code: &str) -> Vec<Vec<u8>> {
    crate::scapy_remote::scapy(world, &format!("over = '{kind}'\n{PREAMBLE}"), code)
}

/// tshark finds label, control word and frame in sent packets, and no error.
fn outgoing_are_valid(variant: Variant, kind: &str) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    for (keys, label, form) in
        [("vni = 42", "42", "pwethcw"), ("vni = 1048575\nmpls = { control_word = false }", "1048575", "pwethnocw")]
    {
        // A label stack does not tell what follows.
        let follows = ["-d", &format!("mpls.label=={label},{form}")];
        let outer = outgoing_with(&follows, &world, kind, keys);
        let names = [
            "mpls.label",
            "mpls.bottom",
            "mpls.ttl",
            "udp.dstport",
            "gre.proto",
            "pweth.cw.sequence_number",
            "eth.dst",
        ];
        for row in oracle::fields_with(&follows, &outer, &names) {
            assert_eq!([&row[0], &row[2]], [label, "64"], "{row:?}");
            assert!(row[1] == "1" || row[1] == "True", "{row:?}");
            match kind {
                "mpls-udp" => assert_eq!(row[3].split(',').next(), Some("6635"), "{row:?}"),
                _ => assert_eq!(row[4], "0x8847", "{row:?}"),
            }
            assert_eq!(row[5], if form == "pwethcw" { "0" } else { "" }, "{row:?}");
            assert_eq!(row[6].split(',').nth(1), Some("02:00:00:00:20:09"), "{row:?}");
        }
    }
}

pub(crate) fn udp_out(variant: Variant) {
    outgoing_are_valid(variant, "mpls-udp");
}

pub(crate) fn gre_out(variant: Variant) {
    outgoing_are_valid(variant, "mpls-gre");
}

/// The host gets the frames of valid packets unchanged, and all others are counted by their reason.
fn incoming_are_checked(variant: Variant, kind: &str) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let good = scapy(
        &world,
        kind,
        "
for f in inner:
    emit(head()/L()/W/f)
    emit(head()/L(ttl=2, cos=5)/W/f)
    emit(head()/L(0, s=0)/L()/W/f)
    emit(head()/L(2, s=0, ttl=255)/L(ttl=255)/Raw(bytes([0, 0, 1, 2]))/f)
",
    );
    let mut receiver = Receiver::start(&world, kind, "vni = 42", &good);
    assert_eq!(receiver.each, 4);
    let bad = scapy(
        &world,
        kind,
        "
f = inner[1]
emit(head()/L(43)/W/f)
emit(head()/L(s=0)/L(43)/W/f)
emit(head()/L(99, s=0)/L()/W/f)
emit(head()/L(s=0))
emit(head()/L(0, s=0))
emit(head()/L(1, s=0)/L()/W/f)
emit(head()/L(0)/W/f)
emit(head()/L(3)/W/f)
emit(head()/L(ttl=0)/W/f)
emit(head()/L(ttl=1)/W/f)
emit(head()/L(0, s=0, ttl=1)/L()/W/f)
emit(head()/L()/Raw(bytes([0x10, 0, 0, 0x21]))/f)
emit(head()/L()/IP(src='10.1.0.50', dst='10.1.0.51')/b'x')
emit(head()/L()/IPv6(src='fd00:1::50', dst='fd00:1::51')/b'x')
emit(head()/L()/Raw(b'\\0\\0'))
emit(head()/L()/W/Raw(b'z' * 13))
emit(head('fd00:9::77' if version == 6 else '10.9.0.77')/L()/W/f)
",
    );
    // A packet that is cut off at every length, without those that are just shorter frames.
    let [first, inner] = &receiver.first;
    let cut = (14..first.len() - inner.len()).map(|len| first[..len].to_vec());
    receiver.send_bad(&bad.into_iter().chain(cut).collect::<Vec<_>>());
    receiver.stop(&[
        ("unknown_vni", 1),
        ("label_stack", 3),
        ("reserved_label", 3),
        ("label_ttl", 3),
        ("tunnel_control", 1),
        ("control_word", 2),
        ("bad_tunnel_header", 2),
        ("too_short", 1),
        ("unknown_remote", 1),
    ]);
}

pub(crate) fn udp_in(variant: Variant) {
    incoming_are_checked(variant, "mpls-udp");
}

pub(crate) fn gre_in(variant: Variant) {
    incoming_are_checked(variant, "mpls-gre");
}
