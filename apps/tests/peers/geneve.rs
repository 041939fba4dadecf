//! GENEVE with scapy as the remote and tshark as the checker.

use wirepath_testlab::{FramePort, oracle};

use crate::world::{Variant, WAIT_LIMIT, World};

/// Scapy code for the frames inside the tunnel and for a remote.
fn scapy(world: &World, code: &str) -> Vec<Vec<u8>> {
    let variant = world.variant;
    let script = format!(
        "
from scapy.contrib.geneve import GENEVE, GeneveOptions
version, remote, vtep = {}, '{}', '{}'
peer, gw, host = '{}', '{}', '{}'
E = lambda **f: Ether(**{{'src': '02:00:00:00:10:01', 'dst': host, **f}})
inner = [
    E()/ARP(psrc='10.1.0.50', pdst='10.1.0.51'),
    E()/IP(src='10.1.0.50', dst='10.1.0.51')/UDP(sport=1000, dport=2000)/b'x',
    E()/IP(src='10.1.0.50', dst='10.1.0.51', tos=0xb8)/TCP(sport=5, dport=6, flags='S')/(b'z' * 1000),
    E()/IPv6(src='fd00:1::50', dst='fd00:1::51', tc=3)/UDP(sport=7, dport=8)/(b'w' * 333),
    E(type=0x88b5)/(b'q' * 46),
]
inner = [Raw(bytes(p) + bytes(max(0, 60 - len(p)))) for p in inner]
def head(**fields):
    ip = IPv6(src=remote, dst=vtep) if version == 6 else IP(src=remote, dst=vtep)
    return Ether(src=peer, dst=gw)/ip/UDP(**{{'sport': 50000, 'dport': 6081, **fields}})
G = lambda **f: GENEVE(**{{'vni': 42, 'proto': 0x6558, **f}})
O = lambda kind, data=b'': GeneveOptions(classid=0x0102, type=kind, data=data)
{code}",
        if variant.ipv6 { 6 } else { 4 },
        variant.remote(0),
        variant.vtep(),
        colons(world.remotes[0].mac("eth0")),
        colons(world.gateway.mac("wan")),
        colons(world.hosts[0].mac("eth0")),
    );
    let none: [&[u8]; 0] = [];
    oracle::scapy(&none, &script).frames
}

fn colons(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Starts a gateway with a segment of GENEVE tunnels.
fn start(world: &World, keys: &str) -> crate::program::Program {
    let remote = world.variant.remote(0);
    let segment = format!(
        "[[segment]]\nname = \"blue\"\nvni = 42\nkind = \"geneve\"\nremotes = [\"{remote}\"]\n\
         ports = [{{ port = \"lan0\" }}]\n{keys}\n"
    );
    world.start_with(&(world.ports() + &segment))
}

/// Sends a frame until it arrives, and returns what arrived. The first ones wait for the gateway.
fn exchange(from: &FramePort, to: &mut FramePort, frame: &[u8], ends_with: &[u8]) -> Vec<u8> {
    for _ in 0..40 {
        from.send(frame).expect("sent");
        let found = to.receive_where(WAIT_LIMIT / 40, |seen| seen.bytes.ends_with(ends_with));
        if let Some(found) = found {
            return found.bytes;
        }
    }
    panic!("the frame does not arrive: {frame:02x?}");
}

/// Packets that the gateway sends have no error for tshark, the expected header, and the frame unchanged.
pub(crate) fn outgoing_are_valid(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let gateway = start(&world, "geneve_options = [{ class = 0x0102, type = 3, data = \"0a0b0c0d\" }]");
    let (host, mut wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    // To a host behind the remote, which is not known.
    let frames = scapy(&world, "[emit(Ether(bytes.fromhex('020000002009') + bytes(f)[6:])) for f in inner]");
    let outer: Vec<Vec<u8>> = frames.iter().map(|frame| exchange(&host, &mut wire, frame, frame)).collect();
    oracle::assert_clean(&outer);
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
    gateway.stop();
}

/// The host gets the frames of valid packets unchanged, and all others are counted by their reason.
pub(crate) fn incoming_are_checked(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    let gateway = start(&world, "");
    let (mut host, wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
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
    oracle::assert_clean(&good);
    let inner = scapy(&world, "[emit(Ether(bytes(f))) for f in inner]");
    let each = good.len() / inner.len();
    for (n, outer) in good.iter().enumerate() {
        let inner = &inner[n / each];
        let arrived = exchange(&wire, &mut host, outer, inner);
        assert_eq!(arrived, *inner, "frame {n}");
    }
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
    host.drain();
    bad.iter().for_each(|frame| wire.send(frame).expect("sent"));
    exchange(&wire, &mut host, &good[0], &inner[0]);
    let summary = gateway.stop();
    let reasons = [
        ("tunnel_version", 1),
        ("tunnel_control", 1),
        ("critical_option", 2),
        ("tunnel_payload", 1),
        ("unknown_vni", 1),
        ("bad_tunnel_header", 1),
        ("bad_l4_checksum", 1),
    ];
    for (reason, count) in reasons {
        assert_eq!(summary.drops(reason), count, "{reason}: {}", summary.json["drops"]);
    }
}
