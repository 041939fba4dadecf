//! VXLAN-GPE with scapy as the remote and tshark as the checker.

use wirepath_testlab::oracle;

use crate::scapy_remote::{Receiver, assert_drops, exchange, outgoing, start_layer3};
use crate::world::{Variant, World};

/// Headers of tunnel packets to the gateway. `P` has IP versions: next protocol, header, and the addresses of a host
/// behind the remote and of the local host.
const PREAMBLE: &str = "
def head(source=None, **fields):
    source = source or remote
    ip = IPv6(src=source, dst=vtep) if version == 6 else IP(src=source, dst=vtep)
    return Ether(src=peer, dst=gw)/ip/UDP(**{'sport': 50000, 'dport': 4790, **fields})
G = lambda next=3, **f: VXLAN(**{'vni': 42, 'flags': 'Instance+NextProtocol', 'NextProtocol': next, **f})
R = Raw(bytes(range(200)))
P = [(1, lambda ttl, **f: IP(proto=253, ttl=ttl, **f), '10.2.0.5', '10.1.0.1'),
    (2, lambda ttl, **f: IPv6(nh=253, hlim=ttl, **f), 'fd00:2::5', 'fd00:1::1')]
";
/// A segment with IP packets.
const LAYER3: &str = "kind = \"vxlan-gpe\"\nvni = 42\npayload = \"ip\"";

fn scapy(world: &World, code: &str) -> Vec<Vec<u8>> {
    crate::scapy_remote::scapy(world, PREAMBLE, code)
}

/// Starts a gateway between the local host and a layer-3 tunnel to the remote.
fn layer3(variant: Variant) -> (World, crate::program::Program) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    world.hosts[0].ipv6("eth0");
    world.hosts[0].ip("addr add fd00:1::1/64 dev eth0 nodad");
    let gateway = start_layer3(&world, LAYER3);
    (world, gateway)
}

/// tshark finds the header of the draft in sent packets: version 0, no control packet, VNI and this next protocol.
fn check_header(outer: &[Vec<u8>], next: &str) {
    oracle::assert_clean(outer);
    let names =
        ["vxlan.vni", "udp.dstport", "vxlan.next_proto", "vxlan.ver", "vxlan.i_bit", "vxlan.p_bit", "vxlan.o_bit"];
    for row in oracle::fields(outer, &names) {
        let first: Vec<&str> = row.iter().map(|value| value.split(',').next().unwrap_or_default()).collect();
        assert_eq!(first, ["42", "4790", next, "0", "1", "1", "0"], "{row:?}");
    }
}

/// Frames of the host leave unchanged, behind a valid header.
pub(crate) fn frames_out(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    check_header(&outgoing(&world, "vxlan-gpe", "vni = 42"), "3");
}

/// The host gets the frames of valid packets unchanged, and all others are counted by their reason.
pub(crate) fn frames_in(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    // The B flag and reserved bits are ignored.
    let good = scapy(
        &world,
        "
for f in inner:
    for g in [G(), G(flags=0x0e), G(flags=0x4c), G(reserved0=0xffff, reserved2=0xff)]:
        emit(head()/g/f)
        if version == 4: emit(head(chksum=0)/g/f)
",
    );
    let mut receiver = Receiver::start(&world, "vxlan-gpe", "vni = 42", &good);
    let bad = scapy(
        &world,
        "
f = inner[1]
[emit(head()/G(flags=0x0c | v << 4)/f) for v in [1, 2, 3]]
emit(head()/G(flags=0x0d)/f)
emit(head()/G(flags='Instance')/f)
emit(head()/G(flags='NextProtocol')/f)
[emit(head()/Raw(bytes([12, 0, 0, next, 0, 0, 42, 0]))/f) for next in [0, 4, 5, 6, 255]]
emit(head()/G(1)/IP(src='10.1.0.50', dst='10.1.0.51')/R)
emit(head()/G(2)/IPv6(src='fd00:1::50', dst='fd00:1::51')/R)
emit(head()/G(vni=43)/f)
emit(head()/Raw(bytes([12, 0, 0, 3, 0, 0, 42])))
emit(head(chksum=0x1234)/G()/f)
emit(head('fd00:9::77' if version == 6 else '10.9.0.77')/G()/f)
",
    );
    receiver.send_bad(&bad);
    receiver.stop(&[
        ("tunnel_version", 3),
        ("tunnel_control", 1),
        ("tunnel_flags", 2),
        ("tunnel_payload", 7),
        ("unknown_vni", 1),
        ("bad_tunnel_header", 1),
        ("bad_l4_checksum", 1),
        ("unknown_remote", 1),
    ]);
}

/// IP packets of the host leave behind a header with their own next protocol.
pub(crate) fn packets_out(variant: Variant) {
    let (world, gateway) = layer3(variant);
    let (host, mut wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    let code = "
for _, I, far, near in P:
    emit(Ether(src=host, dst=gw)/I(64, src=near, dst=far)/R)
    emit(Raw(bytes(I(63, src=near, dst=far)/R)))
";
    let frames = scapy(&world, code);
    for (pair, next) in frames.chunks(2).zip(["1", "2"]) {
        let outer = exchange(&host, &mut wire, &pair[0], &pair[1]);
        check_header(&[outer], next);
    }
    gateway.stop();
}

/// The host gets the packets of valid tunnel packets, and all others are counted by their reason.
pub(crate) fn packets_in(variant: Variant) {
    let (world, gateway) = layer3(variant);
    let (mut host, wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    let code = "
for next, I, far, near in P:
    emit(head()/G(next)/I(64, src=far, dst=near)/R)
    emit(Ether(src=gw, dst=host)/I(63, src=far, dst=near)/R)
";
    let good = scapy(&world, code);
    for pair in good.chunks(2) {
        oracle::assert_clean(&pair[..1]);
        assert_eq!(exchange(&wire, &mut host, &pair[0], &pair[1]), pair[1]);
    }
    let bad = scapy(
        &world,
        "
(_, I, far, near), (_, J, far6, near6) = P
v4, v6 = I(64, src=far, dst=near)/R, J(64, src=far6, dst=near6)/R
emit(head()/G(1, flags=0x1c)/v4)
emit(head()/G(2, flags=0x0d)/v6)
emit(head()/G(flags='Instance')/v4)
emit(head()/G(3)/inner[1])
[emit(head()/Raw(bytes([12, 0, 0, next, 0, 0, 42, 0]))/v4) for next in [0, 4, 5]]
emit(head()/G(1)/Raw(bytes(v6)))
emit(head()/G(2)/Raw(bytes(v4)))
emit(head()/G(1, vni=43)/v4)
",
    );
    host.drain();
    bad.iter().for_each(|frame| wire.send(frame).expect("sent"));
    exchange(&wire, &mut host, &good[0], &good[1]);
    assert_drops(
        gateway,
        &[
            ("tunnel_version", 1),
            ("tunnel_control", 1),
            ("tunnel_flags", 1),
            ("tunnel_payload", 4),
            ("bad_version", 2),
            ("unknown_vni", 1),
        ],
    );
}
