use wirepath_testlab::{FramePort, oracle};

use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, remote_address};

/// Scapy code for the inner frames of both directions: every kind of packet, short and long.
const INNER: &str = "
E = lambda: Ether(src='02:00:00:00:10:01', dst=TO)
inner = [
    E()/ARP(psrc='10.1.0.50', pdst='10.1.0.51'),
    E()/IP(src='10.1.0.50', dst='10.1.0.51')/UDP(sport=1000, dport=2000)/b'x',
    E()/IP(src='10.1.0.50', dst='10.1.0.51', tos=0xb8, ttl=3)/UDP(sport=1000, dport=2000)/(b'y' * 1381),
    E()/IP(src='10.1.0.50', dst='10.1.0.51', options=[IPOption_Router_Alert()])/TCP(sport=5, dport=6, flags='S')/b'z',
    E()/IP(src='10.1.0.50', dst='10.1.0.51', flags='MF')/UDP(sport=1, dport=2)/(b'f' * 800),
    E()/IP(src='10.1.0.50', dst='10.1.0.51', frag=101)/(b'g' * 99),
    E()/IPv6(src='fd00:1::50', dst='fd00:1::51', tc=3)/TCP(sport=7, dport=8)/(b'w' * 333),
    E()/IPv6(src='fd00:1::50', dst='fd00:1::51')/IPv6ExtHdrDestOpt()/UDP(sport=9, dport=10)/b'odd',
    Ether(src='02:00:00:00:10:01', dst=TO, type=0x88b5)/(b'q' * 46),
]
inner = [bytes(p) + bytes(max(0, 60 - len(p))) for p in inner]
";

/// Checks the packets that the gateway sends into the tunnel: tshark finds no error at any layer, scapy
/// builds the same bytes, the inner frames are unchanged, and the flow determines the source port.
pub(crate) fn outgoing_are_valid(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let (host, mut wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    let none: [&[u8]; 0] = [];
    let inner = oracle::scapy(&none, &format!("TO = '02:00:00:00:20:02'{INNER}[emit(f) for f in inner]")).frames;
    let mut outer = Vec::new();
    for (n, frame) in inner.iter().enumerate() {
        host.send(frame).expect("sent");
        let found = wire.receive_where(WAIT_LIMIT, |seen| seen.bytes.ends_with(frame));
        outer.push(found.unwrap_or_else(|| panic!("frame {n} does not come out of the tunnel")).bytes);
    }
    oracle::assert_clean(&outer);
    let (ip, udp) = if variant.ipv6 { ("ipv6", "fd00:9::1") } else { ("ip", "10.9.0.1") };
    let source = if ip == "ip" { "ip.src" } else { "ipv6.src" };
    for row in oracle::fields(&outer, &["vxlan.vni", "udp.dstport", "udp.srcport", source, "vxlan.flags"]) {
        let first = |column: usize| row[column].split(',').next().unwrap_or_default().to_owned();
        assert_eq!((first(0), first(1), first(3)), (VNI.to_string(), "4789".to_owned(), udp.to_owned()), "{row:?}");
        assert!(
            first(2).parse::<u32>().is_ok_and(|port| port >= 49152),
            "entropy in the dynamic ports (RFC 7348): {row:?}"
        );
    }
    // Scapy rebuilds each frame from its free fields and must produce the same bytes.
    let rebuilt = oracle::scapy(
        &outer,
        "
for f in frames:
    p = Ether(f)
    u = p[UDP]
    ip6 = p.haslayer(IPv6) and p.type == 0x86dd
    zero = u.chksum == 0
    inner = Raw(bytes(p[VXLAN].payload))
    head = Ether(src=p.src, dst=p.dst)
    if ip6:
        head /= IPv6(src=p[IPv6].src, dst=p[IPv6].dst, hlim=p[IPv6].hlim, tc=p[IPv6].tc, fl=p[IPv6].fl)
        assert not zero, 'an IPv6 datagram has a checksum'
    else:
        head /= IP(src=p[IP].src, dst=p[IP].dst, ttl=p[IP].ttl, tos=p[IP].tos, id=p[IP].id, flags=p[IP].flags)
    again = head/UDP(sport=u.sport, dport=4789, **({'chksum': 0} if zero else {}))/VXLAN(\
    vni=p[VXLAN].vni, flags='Instance')/inner
    assert bytes(again) == f, bytes(again).hex() + ' ' + f.hex()
    print('same')
",
    );
    assert_eq!(rebuilt.lines.len(), outer.len());
    gateway.stop();
}

/// Checks packets as scapy and the kernel send them: the gateway delivers the inner frames to the host
/// unchanged and drops invalid outer headers with a reason.
pub(crate) fn incoming_are_checked(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let (mut host, wire) = (world.hosts[0].frames("eth0"), world.remotes[0].frames("eth0"));
    let start = format!(
        "
TO = '{}'
{INNER}
version = {}
remote, vtep, stranger = '{}', '{}', '{}'
def head(source=remote, **fields):
    e = Ether(src='{}', dst='{}')
    return e/IPv6(src=source, dst=vtep, **fields) if version == 6 else e/IP(src=source, dst=vtep, **fields)
",
        colons(world.hosts[0].mac("eth0")),
        if variant.ipv6 { 6 } else { 4 },
        variant.remote(0),
        variant.vtep(),
        variant.address(99),
        colons(world.remotes[0].mac("eth0")),
        colons(world.gateway.mac("wan")),
    );
    let none: [&[u8]; 0] = [];
    let good = oracle::scapy(
        &none,
        &(start.clone()
            + "
for n, f in enumerate(inner):
    emit(head()/UDP(sport=50000 + n, dport=4789)/VXLAN(vni=42, flags='Instance')/Raw(f))
    if version == 4:
        emit(head()/UDP(sport=50000 + n, dport=4789, chksum=0)/VXLAN(vni=42, flags='Instance')/Raw(f))
    # Reserved fields are ignored on receipt (RFC 7348 section 5).
    emit(head()/UDP(sport=50000 + n, dport=4789)/VXLAN(vni=42, flags='Instance', reserved2=7)/Raw(f))
"),
    )
    .frames;
    oracle::assert_clean(&good);
    for (n, outer) in good.iter().enumerate() {
        wire.send(outer).expect("sent");
        // The inner frame follows the outer headers.
        let inner = &outer[if variant.ipv6 { 70 } else { 50 }..];
        expect(&mut host, inner, n);
    }
    // Each of these packets has one error.
    let bad = oracle::scapy(
        &none,
        &(start
            + "
f = Raw(inner[1])
V = lambda **fields: VXLAN(**{'vni': 42, 'flags': 'Instance', **fields})
U = lambda **fields: UDP(**{'sport': 50000, 'dport': 4789, **fields})
emit(head()/U()/V(vni=43)/f)
emit(head()/U()/V(flags=0)/f)
emit(head(source=stranger)/U()/V()/f)
emit(head()/U(chksum=0x1234)/V()/f)
emit(head()/U()/V()/Raw(inner[1][:13]))
emit(head()/U(len=9)/V()/f)
"),
    )
    .frames;
    host.drain();
    for outer in &bad {
        let mut outer = outer.clone();
        outer.resize(outer.len().max(60), 0);
        wire.send(&outer).expect("sent");
    }
    let last = &good[0];
    wire.send(last).expect("sent");
    let inner = last[if variant.ipv6 { 70 } else { 50 }..].to_vec();
    let mut others = 0;
    let came = host.receive_where(WAIT_LIMIT, |frame| {
        others += usize::from(frame.bytes != inner && frame.bytes[6..12] == [2, 0, 0, 0, 0x10, 1]);
        frame.bytes == inner
    });
    assert!(came.is_some(), "a good frame still passes");
    assert_eq!(others, 0, "bad frames came through");
    let summary = gateway.stop();
    for reason in ["unknown_vni", "bad_tunnel_header", "unknown_remote", "bad_l4_checksum"] {
        assert!(summary.drops(reason) >= 1, "nothing counted as {reason}: {}", summary.json["drops"]);
    }
    let counted: u64 = summary.json["drops"].as_object().expect("an object").values().filter_map(|n| n.as_u64()).sum();
    // A NIC that decapsulates drops an inner frame that is too short without counting it.
    let uncounted = u64::from(variant.driver == "mlx5" && !variant.ipv6);
    assert!(counted + uncounted >= bad.len() as u64, "{}", summary.json["drops"]);
}

/// The host must receive exactly this frame, without padding.
fn expect(host: &mut FramePort, inner: &[u8], n: usize) {
    let came = host.receive_where(WAIT_LIMIT, |frame| frame.bytes[6..12] == [2, 0, 0, 0, 0x10, 1]);
    let came = came.unwrap_or_else(|| panic!("frame {n} does not come out of the tunnel"));
    assert!(came.bytes == inner, "frame {n}:\n{:02x?}\nexpected\n{inner:02x?}", came.bytes);
}
