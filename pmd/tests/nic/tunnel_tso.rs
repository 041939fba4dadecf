//! TCP in tunnels on an emulated ConnectX. The device and the software cutter make the same frames of superframes. All
//! requested checksums of other packets are right.

use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::Cutter;
use wirepath_packet::{HeaderLengths, Packet, Pool};
use wirepath_pmd::port::{OpenPort, PortConfig, StartedPort};
use wirepath_testlab::{Requirement, require};

use crate::common::{self, bytes};
use crate::emulated::{EmulatedNic, Nics, finish, receive, send, under};
use wirepath_packet::PortId;
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::{HeaderOffsets, L3Type, Parsed, Parser};

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");
const MLX5: EmulatedNic = EmulatedNic { driver: "mlx5", device: "mlx50", modes: &[""] };

const TCP: u8 = 6;
const UDP: u8 = 17;
const GRE: u8 = 47;

/// Headers between the outer IP header and the payload of a tunnel.
struct Tunnel {
    name: &'static str,
    /// UDP port, or else the protocol is GRE or that of IP in IP.
    port: Option<u16>,
    /// The header. `E` and `E + 1` stand for the EtherType of an IP payload, `N` for its VXLAN-GPE number.
    header: &'static [u16],
    ethernet: bool,
    /// True if the device finds the inner headers without offsets in the descriptor.
    parsed: bool,
}

const E: u16 = 0x100;
const N: u16 = 0x200;
const BASE: Tunnel = Tunnel { name: "", port: None, header: &[], ethernet: true, parsed: false };
const TUNNELS: [Tunnel; 12] = [
    Tunnel { name: "vxlan", port: Some(4789), header: &[8, 0, 0, 0, 0, 0, 42, 0], parsed: true, ..BASE },
    Tunnel { name: "vxlan, port 8472", port: Some(8472), header: &[8, 0, 0, 0, 0, 0, 42, 0], ..BASE },
    Tunnel { name: "geneve", port: Some(6081), header: &[0, 0, 0x65, 0x58, 0, 0, 42, 0], ..BASE },
    Tunnel {
        name: "geneve, option",
        port: Some(6081),
        header: &[2, 0, 0x65, 0x58, 0, 0, 42, 0, 1, 2, 3, 1, 9, 9, 9, 9],
        ..BASE
    },
    Tunnel { name: "geneve, IP", port: Some(6081), header: &[0, 0, E, E + 1, 0, 0, 42, 0], ethernet: false, ..BASE },
    Tunnel { name: "gpe", port: Some(4790), header: &[12, 0, 0, 3, 0, 0, 42, 0], ..BASE },
    Tunnel { name: "gpe, IP", port: Some(4790), header: &[12, 0, 0, N, 0, 0, 42, 0], ethernet: false, ..BASE },
    Tunnel { name: "gretap", header: &[0, 0, 0x65, 0x58], parsed: true, ..BASE },
    Tunnel { name: "nvgre", header: &[0x20, 0, 0x65, 0x58, 0, 0, 42, 7], parsed: true, ..BASE },
    Tunnel { name: "gre", header: &[0, 0, E, E + 1], ethernet: false, parsed: true, ..BASE },
    Tunnel { name: "gre, key", header: &[0x20, 0, E, E + 1, 1, 2, 3, 4], ethernet: false, parsed: true, ..BASE },
    Tunnel { name: "ip in ip", ethernet: false, ..BASE },
];

/// A superframe.
#[derive(Clone, Copy, Debug)]
struct Case {
    outer6: bool,
    inner6: bool,
    payload: usize,
    mss: u16,
    tcp_flags: u8,
    /// Bytes of TCP options.
    options: usize,
    /// Content of the outer UDP checksum field.
    udp_checksum: u16,
    tag: Option<u16>,
    /// Another packet has the same payload, as in flooded ones.
    shared: bool,
}

const CASE: Case = Case {
    outer6: false,
    inner6: false,
    payload: 4001,
    mss: 1000,
    tcp_flags: 0x10,
    options: 12,
    udp_checksum: 0,
    tag: None,
    shared: false,
};

/// The flag CWR (RFC 3168 section 6.1.2).
const CWR: u8 = 0x80;

fn ethertype(is_ipv6: bool) -> [u8; 2] {
    if is_ipv6 { [0x86, 0xdd] } else { [8, 0] }
}

/// Returns an IP header in front of `payload`. The checksum of IPv4 is wrong.
fn ip(is_ipv6: bool, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u16;
    let header = if is_ipv6 {
        let [high, low] = length.to_be_bytes();
        let addresses = [[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0xfd; 16]].concat();
        [&[0x60, 0, 0, 7, high, low, protocol, 64][..], &addresses].concat()
    } else {
        let [high, low] = (20 + length).to_be_bytes();
        [0x45, 0, high, low, 0xff, 0xfe, 0x40, 0, 64, protocol, 0xde, 0xad, 198, 18, 0, 1, 198, 18, 0, 2].to_vec()
    };
    [&header[..], payload].concat()
}

/// Returns the bytes of a superframe. The TCP checksum is wrong.
fn superframe(tunnel: &Tunnel, case: &Case) -> Vec<u8> {
    let words = (20 + case.options) as u8 / 4;
    let mut tcp =
        vec![0x30, 0x39, 0, 9, 0xff, 0xff, 0xff, 0, 0, 0, 0, 2, words << 4, case.tcp_flags, 32, 0, 0x12, 0x34];
    tcp.extend([0, 0]);
    tcp.extend(vec![1; case.options]);
    tcp.extend((0..case.payload).map(|i| (i * 7 + i / 256) as u8));
    let mut inner = ip(case.inner6, TCP, &tcp);
    if tunnel.ethernet {
        inner = [&[2, 0, 0, 0, 9, 1, 2, 0, 0, 0, 9, 2], &ethertype(case.inner6)[..], &inner].concat();
    }
    let [high, low] = ethertype(case.inner6);
    let header = tunnel.header.iter().map(|byte| match *byte {
        E => high,
        0x101 => low,
        N => 1 + u8::from(case.inner6),
        byte => byte as u8,
    });
    let mut carried: Vec<u8> = header.chain(inner).collect();
    let protocol = match tunnel.port {
        Some(port) => {
            let fields = [50_000, port, 8 + carried.len() as u16, case.udp_checksum];
            carried = fields.iter().flat_map(|field| field.to_be_bytes()).chain(carried).collect();
            UDP
        }
        None if tunnel.header.is_empty() => {
            if case.inner6 {
                41
            } else {
                4
            }
        }
        None => GRE,
    };
    [&[2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9], &ethertype(case.outer6)[..], &ip(case.outer6, protocol, &carried)].concat()
}

fn packet(pool: &Pool, frame: &[u8], case: &Case) -> Packet {
    let mut packet = common::packet(pool, frame);
    if case.shared {
        // All headers stay in a buffer of the packet's own.
        packet = packet.clone_shared(160, pool).expect("a free buffer");
    }
    if let Some(tag) = case.tag {
        packet.set_vlan(tag);
    }
    packet.set_mss(case.mss);
    packet.set_flags(packet.flags().with(Flags::TX_SEGMENT).with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM));
    packet
}

/// Starts a port that cuts in software what the device does not segment.
fn start(device: &str, pool: &Pool, settings: &str) -> StartedPort {
    let config = PortConfig { mtu: 9000, depth: 512, ..PortConfig::new(PortId::new(3), pool.clone()) };
    let open = OpenPort::open("dut", MLX5.plan(device, settings)).unwrap_or_else(|error| panic!("{error}"));
    let mut port = open.configure(config).unwrap_or_else(|error| panic!("{error}"));
    port.segment_superframes();
    port.start().unwrap_or_else(|error| panic!("{error}"))
}

/// Sends a superframe and compares each frame with that of the software cutter. Returns whether the device made them.
fn is_segmented_by_device(port: &mut StartedPort, pool: &Pool, tunnel: &Tunnel, case: &Case) -> bool {
    let frame = superframe(tunnel, case);
    let what = format!("{}: {case:?}", tunnel.name);
    let Ok(mut cutter) = Cutter::new(packet(pool, &frame, case), None) else { panic!("{what} cannot be cut") };
    let wanted: Vec<_> = std::iter::from_fn(|| cutter.next_frame(pool))
        .map(|frame| frame.map(|frame| (bytes(&frame), frame.vlan())).expect("a frame"))
        .collect();
    assert_eq!(wanted.len(), case.payload.div_ceil(case.mss.into()), "{what}");
    let cut = |port: &StartedPort| port.tx[0].counters().segmented.get();
    let before = cut(port);
    send(port, [packet(pool, &frame, case)]);
    let mut got = Vec::new();
    while got.len() < wanted.len() {
        // Frames that software cut may wait for room in the ring.
        port.tx[0].reclaim();
        got.extend(receive(port, 1).iter().map(|frame| (bytes(frame), frame.vlan())));
    }
    for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        assert_eq!(got, wanted, "{what}: frame {i}");
    }
    cut(port) == before
}

fn both_versions() -> impl Iterator<Item = Case> {
    [false, true].into_iter().flat_map(|outer6| [false, true].map(|inner6| Case { outer6, inner6, ..CASE }))
}

/// Returns the sum of a counter over the send queues of all devices.
fn sent(nics: &Nics, name: &str) -> u64 {
    let all: serde_json::Value = serde_json::from_str(&nics.request("counters")).expect("counters");
    let devices = all["devices"].as_array().expect("devices").iter();
    let queues = devices.flat_map(|device| device["send_queues"].as_array().expect("send queues"));
    queues.map(|queue| queue[name].as_u64().expect("a number")).sum()
}

#[test]
fn the_device_makes_the_frames_of_the_software_cutter() {
    require!(RDMA);
    MLX5.under("tunnel_tso::the_device_makes_the_frames_of_the_software_cutter", "", |nics| {
        let pool = Pool::new("tso", 4096).expect("memory");
        let mut port = start("mlx50", &pool, "");
        let sizes = [(60, 1), (701, 7), (1000, 500), (300, 1000), (9001, 536), (60_003, 1400), (60_003, 8001)];
        let mut whole = 0;
        for tunnel in &TUNNELS {
            for case in both_versions() {
                for (payload, mss) in sizes {
                    let case = Case { payload, mss, ..case };
                    assert!(is_segmented_by_device(&mut port, &pool, tunnel, &case), "{}: {case:?}", tunnel.name);
                    whole += 1;
                }
                for (tcp_flags, options) in [(0x19, 0), (0x11, 32), (0x18, 4)] {
                    let case = Case { tcp_flags, options, tag: Some(0x2123), ..case };
                    assert!(is_segmented_by_device(&mut port, &pool, tunnel, &case), "{}: {case:?}", tunnel.name);
                    whole += 1;
                }
                let marked = Case { tcp_flags: 0x18 | CWR, ..case };
                assert!(!is_segmented_by_device(&mut port, &pool, tunnel, &marked), "{}: {marked:?}", tunnel.name);
            }
        }
        assert_eq!((nics.violations(), sent(nics, "segmented_in_tunnels")), (Vec::new(), whole));
        finish(port, &pool);
    });
}

#[test]
fn capabilities_of_the_device_decide() {
    require!(RDMA);
    let device = |name: &str, keys: &str| {
        format!("[[device]]\nkind = 'mlx5'\nname = '{name}'\n{keys}\n[[device.port]]\nlink = 'loop'\n")
    };
    let topology = device("both", "")
        + &device("parser", "sw_parser = false")
        + &device("offsets", "tunnels = false")
        + &device("none", "tunnels = false\nsw_parser = false");
    under("tunnel_tso::capabilities_of_the_device_decide", &topology, |nics| {
        let pool = Pool::new("tso", 4096).expect("memory");
        for (device, settings, parser, offsets) in [
            ("both", "", true, true),
            ("both", "tunnels = false", false, false),
            ("both", "min_inline = '18'\ntx_inline = 200", true, true),
            ("parser", "", true, false),
            ("offsets", "", false, true),
            ("none", "", false, false),
        ] {
            let mut port = start(device, &pool, settings);
            let notes = port.port.capabilities().notes;
            let is_noted = notes.iter().any(|note| note.contains("superframes in tunnels"));
            assert_eq!(is_noted, !offsets && settings.is_empty(), "{device}: {notes:?}");
            for tunnel in &TUNNELS {
                for case in both_versions() {
                    let wanted = offsets || parser && tunnel.parsed;
                    let is_whole = is_segmented_by_device(&mut port, &pool, tunnel, &case);
                    assert_eq!(is_whole, wanted, "{device}, {settings}: {} {case:?}", tunnel.name);
                }
            }
            finish(port, &pool);
        }
        assert_eq!(nics.violations(), [""; 0]);
    });
}

#[test]
fn outer_checksums_are_right_in_each_frame() {
    require!(RDMA);
    MLX5.under("tunnel_tso::outer_checksums_are_right_in_each_frame", "", |nics| {
        let pool = Pool::new("tso", 4096).expect("memory");
        let mut port = start("mlx50", &pool, "");
        let mut whole = 0;
        for tunnel in TUNNELS.iter().filter(|tunnel| tunnel.port.is_some()) {
            for case in both_versions() {
                // The last frame is shorter, or as long as the others, or there are too few.
                let sizes = [(4001, 1000), (4000, 1000), (60_003, 1401), (3, 1), (701, 7), (1001, 1000), (700, 1000)];
                for (payload, mss) in sizes {
                    for tcp_flags in [0x10, 0x19] {
                        let case = Case { payload, mss, tcp_flags, udp_checksum: 0x1234, ..case };
                        let is_whole = is_segmented_by_device(&mut port, &pool, tunnel, &case);
                        assert_eq!(is_whole, payload > 2 * usize::from(mss), "{}: {case:?}", tunnel.name);
                        whole += u64::from(is_whole);
                    }
                }
            }
        }
        // The last frame cannot be taken from a payload that is shared, which need not be done without a checksum.
        for (udp_checksum, payload, is_whole) in [(0x1234, 4001, false), (0x1234, 4000, true), (0, 4001, true)] {
            let case = Case { udp_checksum, payload, shared: true, ..CASE };
            assert_eq!(is_segmented_by_device(&mut port, &pool, &TUNNELS[0], &case), is_whole, "{case:?}");
            whole += u64::from(is_whole);
        }
        assert_eq!((nics.violations(), sent(nics, "segmented_in_tunnels")), (Vec::new(), whole));
        finish(port, &pool);
    });
}

#[test]
fn software_cuts_what_the_device_would_not_do_right() {
    require!(RDMA);
    MLX5.under("tunnel_tso::software_cuts_what_the_device_would_not_do_right", "", |nics| {
        let pool = Pool::new("tso", 4096).expect("memory");
        let mut port = start("mlx50", &pool, "");
        let mut header = vec![25, 0, 0x65, 0x58, 0, 0, 42, 0, 1, 2, 3, 24];
        header.resize(8 + 4 * 25, 9);
        let long = Tunnel { name: "long geneve", port: Some(6081), header: header.leak(), ..BASE };
        // 14 + 20 + 8 + 108 + 14 + 20 + 20 bytes are more than the limit.
        for udp_checksum in [0, 0x1234] {
            let case = Case { options: 0, udp_checksum, ..CASE };
            assert!(!is_segmented_by_device(&mut port, &pool, &long, &case), "{case:?}");
        }
        assert_eq!((nics.violations(), sent(nics, "segmented_in_tunnels")), (Vec::new(), 0));
        finish(port, &pool);
    });
}

/// Returns a frame in which the checksums with these requests are still to be computed.
fn without_checksums(right: &[u8], parsed: &Parsed, requests: Flags) -> Vec<u8> {
    let mut frame = right.to_vec();
    let mut open = |layers: &HeaderOffsets, l3: Flags, l4: Flags| {
        if requests.contains(l3) && layers.l3_type() == L3Type::Ipv4 {
            frame[layers.l3() + 10..layers.l3() + 12].fill(0xaa);
        }
        if let Some(span) = ChecksumSpan::of(right, layers).filter(|_| requests.contains(l4)) {
            let segment = &mut frame[layers.l4()..];
            // An absent checksum stays absent.
            if span.transport.field(segment) != Some(0) {
                span.transport.set_field(segment, span.pseudo.fold());
            }
        }
    };
    open(parsed.innermost(), Flags::TX_L3_CHECKSUM, Flags::TX_L4_CHECKSUM);
    open(parsed.outer(), Flags::TX_OUTER_L3_CHECKSUM, Flags::TX_OUTER_L4_CHECKSUM);
    frame
}

#[test]
fn all_requested_checksums_are_right() {
    require!(RDMA);
    MLX5.under("tunnel_tso::all_requested_checksums_are_right", "", |nics| {
        let pool = Pool::new("tso", 4096).expect("memory");
        let all =
            [Flags::TX_L3_CHECKSUM, Flags::TX_L4_CHECKSUM, Flags::TX_OUTER_L3_CHECKSUM, Flags::TX_OUTER_L4_CHECKSUM];
        for settings in ["", "tunnels = false", "tx_inline = 200"] {
            let mut port = start("mlx50", &pool, settings);
            let mut both = 0;
            for tunnel in &TUNNELS {
                // The last one takes several buffers.
                for (case, payload) in both_versions().flat_map(|case| [(case, 8), (case, 301), (case, 6001)]) {
                    let case = Case { payload, mss: payload as u16, udp_checksum: 0x1234, ..case };
                    let whole = packet(&pool, &superframe(tunnel, &case), &case);
                    let Ok(mut cutter) = Cutter::new(whole, None) else { panic!("{} cannot be cut", tunnel.name) };
                    let right = bytes(&cutter.next_frame(&pool).expect("one frame").expect("a frame"));
                    let parsed = Parser::default().parse(&right).expect("headers");
                    if parsed.inner().is_none() {
                        continue;
                    }
                    for subset in 0..16 {
                        let chosen = all.iter().enumerate().filter(|(i, _)| subset >> i & 1 == 1);
                        let requests = chosen.fold(Flags::NONE, |requests, (_, flag)| requests.with(*flag));
                        let mut sent = common::packet(&pool, &without_checksums(&right, &parsed, requests));
                        sent.set_header_lengths(HeaderLengths::from(&parsed));
                        sent.set_flags(requests);
                        send(&mut port, [sent]);
                        let got = bytes(&receive(&mut port, 1)[0]);
                        assert_eq!(got, right, "{settings}: {}: {case:?}, {requests:?}", tunnel.name);
                        both += usize::from(subset & 0b1010 == 0b1010);
                    }
                }
            }
            assert!(both > 200, "{both}");
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
    });
}
