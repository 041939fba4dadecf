//! Each kind of tunnel in an emulated ConnectX, with scapy as the remote and tshark as the checker.
//!
//! [`CELLS`] has the tunnels and what a NIC does with them. Frames pass in both directions, and their content is
//! compared. All of them pass the NIC's encapsulation and decapsulation, or none.

use std::path::PathBuf;

use wirepath::control_socket::Client;
use wirepath_testlab::{FramePort, eventually, oracle};

use crate::program::Program;
use crate::scapy_remote::{exchange, routed};
use crate::world::{Variant, WAIT_LIMIT, World};

/// A tunnel to a remote.
struct Cell {
    name: &'static str,
    /// Keys of the segment.
    segment: &'static str,
    /// Scapy's tunnel header behind the outer IP header. `e` is the type of the payload.
    header: &'static str,
    /// Protocol number of the outer IP header. `n` is that of an inner IP packet.
    protocol: &'static str,
    /// True if the tunnel carries IP packets, so that the gateway routes.
    routed: bool,
    /// True if the NIC adds the outer headers, or removes them.
    encap: bool,
    decap: bool,
    /// Field of tshark and its value in sent packets, for Ethernet or IPv4 inside.
    field: [&'static str; 2],
    /// Offset of bytes behind the outer IP header that the NIC may choose, and their number: the source port and a
    /// FlowID.
    free: (usize, usize),
}

const CELL: Cell = Cell {
    name: "",
    segment: "",
    header: "",
    protocol: "47",
    routed: false,
    encap: true,
    decap: true,
    field: ["gre.proto", "0x6558"],
    free: (0, 0),
};
const VXLAN: Cell = Cell {
    name: "vxlan",
    segment: "kind = \"vxlan\"\nvni = 42",
    header: "UDP(sport=50000, dport=4789, chksum=0)/VXLAN(vni=42, flags=8)",
    protocol: "17",
    field: ["vxlan.vni", "42"],
    free: (0, 2),
    ..CELL
};
const GENEVE: Cell = Cell {
    name: "geneve",
    segment: "kind = \"geneve\"\nvni = 42",
    header: "UDP(sport=50000, dport=6081, chksum=0)/GENEVE(vni=42, proto=e)",
    protocol: "17",
    field: ["geneve.vni", "0x00002a"],
    free: (0, 2),
    ..CELL
};
const GENEVE_IP: Cell = Cell {
    name: "geneve with IP packets",
    segment: "kind = \"geneve\"\nvni = 42\npayload = \"ip\"",
    routed: true,
    ..GENEVE
};
const GPE: Cell = Cell {
    name: "vxlan-gpe",
    segment: "kind = \"vxlan-gpe\"\nvni = 42",
    header: "UDP(sport=50000, dport=4790, chksum=0)/Raw(bytes([12, 0, 0, {4: 1, 41: 2}.get(n, 3), 0, 0, 42, 0]))",
    field: ["udp.dstport", "4790"],
    ..VXLAN
};
const GPE_IP: Cell = Cell {
    name: "vxlan-gpe with IP packets",
    segment: "kind = \"vxlan-gpe\"\nvni = 42\npayload = \"ip\"",
    routed: true,
    ..GPE
};
const GRETAP: Cell = Cell { name: "gretap", segment: "kind = \"gretap\"", header: "GRE(proto=e)", ..CELL };
/// The NIC may write entropy into the key.
const GRETAP_KEY: Cell = Cell {
    name: "gretap with a key",
    segment: "kind = \"gretap\"\nvni = 0xfedcba98",
    header: "GRE(proto=e, key_present=1, key=0xfedcba98)",
    encap: false,
    field: ["gre.key", "0xfedcba98"],
    ..CELL
};
const GRETAP_SEQUENCE: Cell = Cell {
    name: "gretap with sequence numbers",
    segment: "kind = \"gretap\"\ngre = { sequence = true }",
    header: "GRE(proto=e, seqnum_present=1, sequence_number=3)",
    encap: false,
    decap: false,
    ..CELL
};
const NVGRE: Cell = Cell {
    name: "nvgre",
    segment: "kind = \"nvgre\"\nvni = 0x123456",
    header: "GRE(proto=e, key_present=1, key=0x12345677)",
    field: ["gre.flags_and_version", "0x2000"],
    free: (7, 1),
    ..CELL
};
const GRE: Cell = Cell {
    name: "gre",
    segment: "kind = \"gre\"",
    header: "GRE(proto=e)",
    routed: true,
    field: ["gre.proto", "0x0800"],
    ..CELL
};
const GRE_KEY: Cell = Cell {
    name: "gre with a key",
    segment: "kind = \"gre\"\nvni = 7",
    header: "GRE(proto=e, key_present=1, key=7)",
    encap: false,
    field: ["gre.key", "0x00000007"],
    ..GRE
};
const IPIP: Cell = Cell {
    name: "ipip",
    segment: "kind = \"ipip\"",
    header: "Raw(b'')",
    protocol: "n",
    routed: true,
    field: ["ip.proto", "4"],
    ..CELL
};
/// No rule matches labels, and no NIC adds them.
const MPLS_UDP: Cell = Cell {
    name: "mpls-udp",
    segment: "kind = \"mpls-udp\"\nvni = 42",
    header: "UDP(sport=50000, dport=6635, chksum=0)/Raw(bytes([0, 2, 0xa1, 64, 0, 0, 0, 0]))",
    encap: false,
    decap: false,
    field: ["mpls.label", "42"],
    ..VXLAN
};
const MPLS_GRE_IP: Cell = Cell {
    name: "mpls-gre with IP packets",
    segment: "kind = \"mpls-gre\"\nvni = 42\npayload = \"ip\"",
    header: "GRE(proto=0x8847)/Raw(bytes([0, 2, 0xa1, 64]))",
    encap: false,
    decap: false,
    field: ["mpls.label", "42"],
    ..GRE
};
const CELLS: &[Cell] = &[
    VXLAN,
    GENEVE,
    GENEVE_IP,
    GPE,
    GPE_IP,
    GRETAP,
    GRETAP_KEY,
    GRETAP_SEQUENCE,
    NVGRE,
    GRE,
    GRE_KEY,
    IPIP,
    MPLS_UDP,
    MPLS_GRE_IP,
];
/// Over IPv6, workers write the flow label of tunnels without UDP.
const CELLS_IPV6: &[Cell] = &[
    VXLAN,
    GENEVE,
    GENEVE_IP,
    GPE,
    GPE_IP,
    Cell { encap: false, ..GRETAP },
    GRETAP_KEY,
    Cell { encap: false, ..NVGRE },
    Cell { encap: false, ..GRE },
    GRE_KEY,
    Cell { encap: false, field: ["ipv6.nxt", "4"], ..IPIP },
];

/// Makes tshark accept UDP over IPv6 without a checksum (RFC 6935), which the gateway uses here.
const ZERO_CHECKSUM: [&str; 2] = ["-o", "udp.ignore_ipv6_zero_checksum:TRUE"];
/// Frames of each direction and inner IP version.
const FRAMES: u32 = 1000;
/// Frames on their way at the same time.
const WINDOW: u32 = 20;

/// Frames of a cell and an inner IP version. The last four bytes of each frame are its number.
struct Frames {
    /// A tunnel packet to the gateway, and the frame that the host gets.
    inwards: [Vec<u8>; 2],
    /// A frame of the host, and the packet that the gateway puts into the tunnel.
    outwards: [Vec<u8>; 2],
}

fn frames(world: &World, cell: &Cell) -> Vec<Frames> {
    let inside = "
R = Raw(bytes(64))
def emit_all(e, n, inside, far, near, put):
    outer = IPv6(src=remote, dst=vtep, nh=PROTOCOL) if version == 6 else IP(src=remote, dst=vtep, proto=PROTOCOL)
    emit(Ether(src=peer, dst=gw)/outer/HEADER/Raw(bytes(inside)))
    emit(Raw(bytes(far)))
    emit(Raw(bytes(near)))
    emit(Raw(bytes(put)))
";
    let inside = inside.replace("PROTOCOL", cell.protocol).replace("HEADER", cell.header);
    let cases = if cell.routed {
        "
for (e, n, I, far, near) in [(0x0800, 4, lambda t, **f: IP(proto=253, ttl=t, **f), '10.2.0.5', '10.1.0.1'), \
    (0x86dd, 41, lambda t, **f: IPv6(nh=253, hlim=t, **f), 'fd00:2::5', 'fd00:1::1')]:
    to, back = {'src': far, 'dst': near}, {'src': near, 'dst': far}
    emit_all(e, n, I(64, **to)/R, Ether(src=gw, dst=host)/I(63, **to)/R, Ether(src=host, dst=gw)/I(64, **back)/R, \
        I(63, **back)/R)
"
    } else {
        "
far = Ether(src='02:00:00:00:10:01', dst=host, type=0x88b5)/R
near = Ether(src=host, dst='02:00:00:00:10:01', type=0x88b5)/R
emit_all(0x6558, 0, far, far, near, near)
"
    };
    let preamble = format!("from scapy.contrib.geneve import GENEVE\n{inside}");
    let all = crate::scapy_remote::scapy(world, &preamble, cases);
    let frame = |[outer, inner, host, put]: &[Vec<u8>; 4]| Frames {
        inwards: [outer.clone(), inner.clone()],
        outwards: [host.clone(), put.clone()],
    };
    let (all, rest) = all.as_chunks();
    assert!(rest.is_empty() && all.len() == if cell.routed { 2 } else { 1 });
    all.iter().map(frame).collect()
}

fn numbered(frame: &[u8], number: u32) -> Vec<u8> {
    let (front, _) = frame.split_at(frame.len() - 4);
    [front, &number.to_be_bytes()].concat()
}

/// Sends numbered frames. Returns what arrives, which ends with the other frame of the pair under the same number.
fn send([sent, seen]: &[Vec<u8>; 2], from: &FramePort, to: &mut FramePort, first: u32, what: &str) -> Vec<Vec<u8>> {
    let mut arrived = Vec::new();
    for start in (first..first + FRAMES).step_by(WINDOW as usize) {
        let window = start..start + WINDOW;
        window.clone().for_each(|number| from.send(&numbered(sent, number)).expect("sent"));
        for number in window {
            let expected = numbered(seen, number);
            // Frames of the test end with zeros and a number; those of the kernels do not.
            let wanted = |frame: &wirepath_testlab::Frame| {
                frame.bytes.len() >= expected.len() && frame.bytes[..frame.bytes.len() - 4].ends_with(&[0; 40])
            };
            let frame =
                to.receive_where(WAIT_LIMIT, wanted).unwrap_or_else(|| panic!("{what}: frame {number} is lost"));
            assert!(frame.bytes.ends_with(&expected), "{what} {number}: {:02x?}", frame.bytes);
            arrived.push(frame.bytes);
        }
    }
    arrived
}

/// The gateway with one tunnel.
struct Gateway {
    program: Program,
    socket: PathBuf,
}

impl Gateway {
    fn start(world: &World, cell: &Cell, more: &str) -> Self {
        let remote = world.variant.remote(0);
        let checksum = if world.variant.ipv6 { "udp_checksum = \"zero\"\n" } else { "" };
        let [lan, routes] = if cell.routed { routed() } else { [String::new(), String::new()] };
        let config = format!(
            "{}{checksum}[[segment]]\nname = \"blue\"\n{}\nremotes = [\"{remote}\"]\n{lan}\
             ports = [{{ port = \"lan0\" }}]\n{routes}[control]\nsocket = 'control.sock'\n{more}",
            world.ports(),
            cell.segment,
        );
        let program = world.start_with(&config);
        let socket = program.path("control.sock");
        assert!(eventually(WAIT_LIMIT, || Client::connect(&socket).is_ok()), "no control socket");
        Self { program, socket }
    }

    /// Returns a value of the only row of a table in which the first column has this value.
    fn value(&mut self, table: &str, condition: &str, column: &str) -> serde_json::Value {
        // The gateway closes the connections of clients that are silent for 10 s.
        let mut client = Client::connect(&self.socket).expect("a connection");
        let table = client.show(table, &[condition.to_owned()], None).expect("a table");
        assert_eq!(table.rows.len(), 1, "{table:?}");
        let at = table.columns.iter().position(|name| name == column).unwrap_or_else(|| panic!("no {column}"));
        table.rows[0][at].clone()
    }

    /// Returns the frames of both directions, and those of them that the NIC handled.
    fn counts(&mut self) -> [u64; 4] {
        ["overlay_rx_packets", "nic_decapsulated", "overlay_tx_packets", "nic_encapsulated"]
            .map(|column| self.value("segments", "segment=blue", column).as_u64().expect("a number"))
    }
}

/// Returns a copy of a sent tunnel packet without the bytes that the NIC may choose.
fn comparable(frame: &[u8], cell: &Cell, ipv6: bool) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let (at, len) = cell.free;
    let start = 14 + if ipv6 { 40 } else { 20 } + at;
    frame[start..start + len].fill(0);
    frame
}

/// Sends frames of each kind in both directions. The NIC handles all of them that it can.
pub(crate) fn each_kind(variant: Variant) {
    let mut world = World::new(variant, 1, 0, 1500);
    world.plug_remote();
    world.hosts[0].ipv6("eth0");
    world.hosts[0].ip("addr add fd00:1::1/64 dev eth0 nodad");
    for cell in if variant.ipv6 { CELLS_IPV6 } else { CELLS } {
        let all = frames(&world, cell);
        let mut gateway = Gateway::start(&world, cell, "");
        let (mut host, mut wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
        // The gateway learns the addresses and resolves its next hops.
        for Frames { inwards, outwards } in &all {
            exchange(&wire, &mut host, &inwards[0], &inwards[1]);
            exchange(&host, &mut wire, &outwards[0], &outwards[1]);
        }
        let remote = format!("remote={}", variant.remote(0));
        let state = if cell.encap { "in_nic" } else { "ready" };
        let reached = eventually(WAIT_LIMIT, || gateway.value("remotes", &remote, "state") == state);
        assert!(reached, "{}: {}", cell.name, gateway.value("remotes", &remote, "state"));
        // A rule for the tunnel is in the NIC if there is one, also if the packets of the cell do not match it.
        let has_rule = !cell.segment.contains("mpls");
        for (takes, direction) in [(cell.encap, "encap"), (has_rule, "decap")] {
            let place = if takes { "hardware" } else { "software" };
            let shown = eventually(WAIT_LIMIT, || gateway.value("remotes", &remote, direction) == place);
            let why = gateway.value("remotes", &remote, &format!("{direction}_why"));
            assert!(shown, "{}: {direction}: {why}", cell.name);
            let names = |why: &str| why.starts_with(&format!("{direction}: "));
            assert!(takes || why.as_str().is_some_and(names), "{}: {why}", cell.name);
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
        let before = gateway.counts();
        let mut sent = Vec::new();
        for (n, Frames { inwards, outwards }) in (1..).zip(&all) {
            oracle::assert_clean_with(&ZERO_CHECKSUM, &inwards[..1]);
            host.drain();
            let arrived = send(inwards, &wire, &mut host, n << 16, cell.name);
            assert_eq!(arrived.last(), Some(&numbered(&inwards[1], (n << 16) + FRAMES - 1)), "{}", cell.name);
            wire.drain();
            sent.push(send(outwards, &host, &mut wire, n << 16, cell.name));
        }
        let counted =
            eventually(WAIT_LIMIT, || gateway.counts()[2] >= before[2] + all.len() as u64 * u64::from(FRAMES));
        let after = gateway.counts();
        let [received, decapsulated, put, encapsulated] = std::array::from_fn(|at| after[at] - before[at]);
        let count = all.len() as u64 * u64::from(FRAMES);
        assert!(counted && received == count, "{}: {received} received, {put} sent", cell.name);
        // The host's kernel answers some packets.
        assert!(put >= count, "{}: {put} sent", cell.name);
        let expected = |takes: bool, all: u64| if takes { all } else { 0 };
        assert_eq!(decapsulated, expected(cell.decap, received), "{}: decapsulated by the NIC", cell.name);
        assert_eq!(encapsulated, expected(cell.encap, put), "{}: encapsulated by the NIC", cell.name);

        let sample: Vec<&[u8]> = sent.iter().flat_map(|frames| &frames[..20]).map(Vec::as_slice).collect();
        oracle::assert_clean_with(&ZERO_CHECKSUM, &sample);
        for row in oracle::fields(&sample[..20], &[cell.field[0]]) {
            assert_eq!(row[0].split(',').next(), Some(cell.field[1]), "{}: {row:?}", cell.name);
        }
        check_damaged(cell, &all, gateway, (&wire, &mut host));
        if cell.encap {
            same_as_workers(&world, cell, &all, &sent);
        }
    }
}

/// Tunnel packets that the NIC must not decapsulate are dropped and counted, or arrive by the workers.
fn check_damaged(cell: &Cell, all: &[Frames], mut gateway: Gateway, (wire, host): (&FramePort, &mut FramePort)) {
    let l3 = 14;
    let ipv4 = all[0].inwards[0][l3] >> 4 == 4;
    let l4 = l3 + if ipv4 { 20 } else { 40 };
    let before = gateway.counts();
    let [outer, inner] = &all[0].inwards;
    if ipv4 {
        // An outer congestion mark: ECT(0).
        let mut marked = outer.clone();
        marked[l3 + 1] |= 2;
        let sum = u16::from_be_bytes([outer[l3 + 10], outer[l3 + 11]]);
        marked[l3 + 10..l3 + 12].copy_from_slice(&(sum - 2).to_be_bytes());
        host.drain();
        assert_eq!(exchange(wire, host, &numbered(&marked, 7), &numbered(inner, 7)), numbered(inner, 7));
        let after = gateway.counts();
        assert_eq!((after[0] - before[0], after[1]), (1, before[1]), "{}: a marked packet", cell.name);
    }
    let gre = cell.protocol == "47";
    if gre {
        // A routing field (RFC 1701), a reserved bit that must be zero, and version 1.
        for (at, bit) in [(l4, 0x40), (l4, 0x08), (l4 + 1, 1)] {
            let mut other = outer.clone();
            other[at] ^= bit;
            wire.send(&other).expect("sent");
        }
    }
    let swapped = cell.routed && cell.protocol != "n" && !cell.segment.contains("mpls");
    if swapped {
        // The other version inside than the header announces.
        let at = outer.len() - (inner.len() - 14);
        let mut other = outer.clone();
        other[at] = 0x60 | other[at] & 15;
        wire.send(&other).expect("sent");
    }
    // Packets in between have been handled when this one arrives.
    exchange(wire, host, &numbered(outer, 9), &numbered(inner, 9));
    let summary = gateway.program.stop();
    for (reason, count) in [
        ("tunnel_flags", if gre { 2 } else { 0 }),
        ("tunnel_version", u64::from(gre)),
        ("bad_version", u64::from(swapped)),
    ] {
        assert_eq!(summary.drops(reason), count, "{}: {reason}: {}", cell.name, summary.json["drops"]);
    }
}

/// Workers send the same packets, except for the bytes that the NIC may choose.
fn same_as_workers(world: &World, cell: &Cell, all: &[Frames], sent: &[Vec<Vec<u8>>]) {
    let gateway = Gateway::start(world, cell, "[rules]\nhardware = \"off\"\n");
    let (mut host, mut wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    for (frames, sent) in all.iter().zip(sent) {
        exchange(&wire, &mut host, &frames.inwards[0], &frames.inwards[1]);
        let number = u32::from_be_bytes(*sent[0].last_chunk().expect("a frame"));
        let [from, to] = frames.outwards.each_ref().map(|frame| numbered(frame, number));
        let by_workers = exchange(&host, &mut wire, &from, &to);
        let ipv6 = world.variant.ipv6;
        assert_eq!(comparable(&sent[0], cell, ipv6), comparable(&by_workers, cell, ipv6), "{}", cell.name);
    }
    gateway.program.stop();
}
