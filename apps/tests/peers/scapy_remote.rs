//! Scapy as the remote of tunnels with Ethernet frames: packets for both directions, and their exchange.

use wirepath_testlab::{FramePort, oracle};

use crate::program::{Program, Summary};
use crate::world::{WAIT_LIMIT, World, colons};

/// Runs scapy code that emits frames. Before it come the frames `inner`, the names of all ends, and `preamble` with the
/// headers of a kind of tunnels.
pub(crate) fn scapy(world: &World, preamble: &str, code: &str) -> Vec<Vec<u8>> {
    let variant = world.variant;
    let script = format!(
        "
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
{preamble}
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

/// Starts a gateway with a segment of this kind.
pub(crate) fn start(world: &World, kind: &str, keys: &str) -> Program {
    let remote = world.variant.remote(0);
    let segment = format!(
        "[[segment]]\nname = \"blue\"\nkind = \"{kind}\"\nremotes = [\"{remote}\"]\n\
         ports = [{{ port = \"lan0\" }}]\n{keys}\n"
    );
    world.start_with(&(world.ports() + &segment))
}

/// Returns the last keys of a segment with a layer-3 tunnel, followed by a segment of the local host without its ports;
/// and a VRF with routes into the tunnel, to `10.2.0.0/24` and `fd00:2::/64`.
pub(crate) fn routed() -> [String; 2] {
    let hop = "next_hops = [{ segment = \"blue\" }]";
    [
        "addresses = [\"10.255.0.1/30\", \"fd00:ff::1/64\"]\n[[segment]]\nname = \"lan\"\n\
         addresses = [\"10.1.0.254/24\", \"fd00:1::fe/64\"]\n"
            .to_owned(),
        format!(
            "[[vrf]]\nname = \"default\"\nroutes = [{{ to = \"10.2.0.0/24\", {hop} }}, \
             {{ to = \"fd00:2::/64\", {hop} }}]\n"
        ),
    ]
}

/// Starts a gateway that routes between the local host and a layer-3 tunnel. `keys` are those of its segment.
pub(crate) fn start_layer3(world: &World, keys: &str) -> Program {
    let (remote, [lan, vrf]) = (world.variant.remote(0), routed());
    let segments = format!(
        "[[segment]]\nname = \"blue\"\n{keys}\nremotes = [\"{remote}\"]\n{lan}\
         ports = [{{ port = \"lan0\" }}]\n{vrf}"
    );
    world.start_with(&(world.ports() + &segments))
}

/// Sends a frame until it arrives, and returns what arrived. The first ones wait for the gateway.
pub(crate) fn exchange(from: &FramePort, to: &mut FramePort, frame: &[u8], ends_with: &[u8]) -> Vec<u8> {
    for _ in 0..40 {
        from.send(frame).expect("sent");
        let found = to.receive_where(WAIT_LIMIT / 40, |seen| seen.bytes.ends_with(ends_with));
        if let Some(found) = found {
            return found.bytes;
        }
    }
    panic!("the frame does not arrive: {frame:02x?}");
}

/// A gateway with a segment of Ethernet frames, to which the remote sends tunnel packets.
pub(crate) struct Receiver {
    gateway: Program,
    host: FramePort,
    wire: FramePort,
    /// A tunnel packet, and the frame in it.
    pub(crate) first: [Vec<u8>; 2],
    /// Tunnel packets for each of the frames.
    pub(crate) each: usize,
}

impl Receiver {
    /// Starts the gateway and sends tunnel packets, which tshark finds valid. There are as many for each of the frames
    /// `inner`, in their order. The host gets each of these frames unchanged.
    pub(crate) fn start(world: &World, kind: &str, keys: &str, good: &[Vec<u8>]) -> Self {
        let gateway = start(world, kind, keys);
        let (mut host, wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
        oracle::assert_clean(good);
        let inner = scapy(world, "", "[emit(Ether(bytes(f))) for f in inner]");
        assert_eq!((good.len() % inner.len(), good.is_empty()), (0, false));
        let each = good.len() / inner.len();
        for (n, outer) in good.iter().enumerate() {
            let inner = &inner[n / each];
            assert_eq!(exchange(&wire, &mut host, outer, inner), *inner, "frame {n}");
        }
        let first = [good[0].clone(), inner[0].clone()];
        Self { gateway, host, wire, first, each }
    }

    /// Sends packets that the gateway drops, and waits until it has read all of them.
    pub(crate) fn send_bad(&mut self, packets: &[Vec<u8>]) {
        self.host.drain();
        packets.iter().for_each(|packet| self.wire.send(packet).expect("sent"));
        let [outer, inner] = &self.first;
        exchange(&self.wire, &mut self.host, outer, inner);
    }

    /// Stops the gateway, which has dropped as many packets for each reason.
    pub(crate) fn stop(self, reasons: &[(&str, u64)]) -> Summary {
        assert_drops(self.gateway, reasons)
    }
}

/// Stops a gateway, which has dropped as many packets for each reason.
pub(crate) fn assert_drops(gateway: Program, reasons: &[(&str, u64)]) -> Summary {
    let summary = gateway.stop();
    for (reason, count) in reasons {
        assert_eq!(summary.drops(reason), *count, "{reason}: {}", summary.json["drops"]);
    }
    summary
}

/// Returns the tunnel packets of the gateway for frames to a host behind the remote, which is not known.
pub(crate) fn outgoing(world: &World, kind: &str, keys: &str) -> Vec<Vec<u8>> {
    outgoing_with(&[], world, kind, keys)
}

/// Does the same with additional arguments for tshark, which checks the packets.
pub(crate) fn outgoing_with(more: &[&str], world: &World, kind: &str, keys: &str) -> Vec<Vec<u8>> {
    let gateway = start(world, kind, keys);
    let (host, mut wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    let frames = scapy(world, "", "[emit(Ether(bytes.fromhex('020000002009') + bytes(f)[6:])) for f in inner]");
    let outer: Vec<Vec<u8>> = frames.iter().map(|frame| exchange(&host, &mut wire, frame, frame)).collect();
    oracle::assert_clean_with(more, &outer);
    gateway.stop();
    outer
}
