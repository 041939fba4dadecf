use wirepath_testlab::oracle;

use crate::world::{Variant, World, colons, pings, remote_address};

/// Malformed frames from both sides: truncated at every length, with flipped bits, wrong lengths, overlapping
/// fragments, endless header chains, nested tunnels, and random bytes. The gateway survives, counts the drops
/// and forwards valid frames.
pub(crate) fn survives_and_counts(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));

    let none: [&[u8]; 0] = [];
    let (wan, peer) = (world.gateway.mac("wan"), remote.mac("eth0"));
    let script = format!(
        "
gw, peer = '{}', '{}'
version, remote, vtep = {}, '{}', '{}'
def ip(**fields):
    return IPv6(src=remote, dst=vtep, **fields) if version == 6 else IP(src=remote, dst=vtep, **fields)
H = Ether(src=peer, dst=gw)
I = Ether(src='02:00:00:00:66:01', dst='ff:ff:ff:ff:ff:ff')/IP(src='10.1.0.66', dst='10.1.0.1')/UDP(\
            sport=1, dport=2)/(b'i' * 60)
V = UDP(sport=50000, dport=4789)/VXLAN(vni=42, flags='Instance')
whole = bytes(H/ip()/V/I)
emit(whole)
# Tunnels in tunnels.
deep = I
for n in range(8): deep = Ether(src=peer, dst=gw)/ip()/V/deep
emit(H/ip()/V/deep)
# Fragments of a tunnel packet: first, overlapping, beyond 64 KiB.
payload = bytes(V/I)
if version == 4:
    emit(H/IP(src=remote, dst=vtep, proto=17, flags='MF')/payload[:40])
    emit(H/IP(src=remote, dst=vtep, proto=17, frag=1)/payload[:40])
    emit(H/IP(src=remote, dst=vtep, proto=17, frag=8191)/payload)
    emit(H/IP(src=remote, dst=vtep, options=[IPOption(b'\\x07\\x27\\x04' + b'\\0' * 36)])/V/I)
    emit(H/IP(src=remote, dst=vtep, ihl=15)/V/I)
    emit(H/IP(src=remote, dst=vtep, ihl=1)/V/I)
    emit(H/IP(src=remote, dst=vtep, version=6)/V/I)
    emit(H/IP(src=remote, dst=vtep, len=65535)/V/I)
    emit(H/IP(src=remote, dst=vtep, chksum=1)/V/I)
else:
    chain = IPv6(src=remote, dst=vtep)
    for n in range(100): chain = chain/IPv6ExtHdrDestOpt()
    emit(H/chain/V/I)
    emit(H/IPv6(src=remote, dst=vtep)/IPv6ExtHdrFragment(m=1)/payload[:40])
    emit(H/IPv6(src=remote, dst=vtep)/IPv6ExtHdrFragment(offset=8191)/payload)
    emit(H/IPv6(src=remote, dst=vtep, plen=65535)/V/I)
    emit(H/IPv6(src=remote, dst=vtep, plen=1)/V/I)
    emit(H/IPv6(src=remote, dst=vtep, nh=17)/UDP(sport=1, dport=4789, chksum=0)/VXLAN(vni=42, flags='Instance')/I)
for n in range(1, 6):
    tagged = H
    for _ in range(n): tagged = tagged/Dot1Q(vlan=n)
    emit(tagged/ip()/V/I)
emit(H/ip()/UDP(sport=1, dport=4789, len=0)/VXLAN(vni=42)/I)
emit(H/ip()/UDP(sport=1, dport=4789, len=65535)/VXLAN(vni=42)/I)
emit(Ether(src=peer, dst=gw)/ARP(op=2, hwlen=200, plen=200))
emit(Ether(src=peer, dst='ff:ff:ff:ff:ff:ff')/ARP(op=1, psrc=('0.0.0.0'), pdst='255.255.255.255'))
emit(Ether(src=peer, dst=gw)/ARP(op=2, hwsrc='ff:ff:ff:ff:ff:ff', psrc='10.9.0.1', pdst='10.9.0.1'))
emit(Ether(src=peer, dst=gw)/IPv6(src='fe80::1', dst=vtep if version == 6 else 'fe80::2', hlim=255)/ICMPv6ND_NS(\
            tgt='::')/Raw(b'\\1\\0' * 20))
emit(Ether(src=peer, dst=gw)/IPv6(src='fe80::1', dst='ff02::1', hlim=1)/ICMPv6ND_NA(tgt='ff02::1')/Raw(b'\\2\\0'))
",
        colons(wan),
        colons(peer),
        if variant.ipv6 { 6 } else { 4 },
        variant.remote(0),
        variant.vtep(),
    );
    let made = oracle::scapy(&none, &script).frames;
    let mut frames: Vec<Vec<u8>> = made.clone();
    // Each frame truncated at every length.
    frames.extend(made.iter().flat_map(|whole| (14..whole.len()).map(|len| whole[..len].to_vec())));
    // Frames with flipped bits, from a fixed seed.
    let mut random = fastrand::Rng::with_seed(0x2545_f491_4f6c_dd1d);
    for _ in 0..10_000 {
        let mut frame = made[random.usize(..made.len())].clone();
        for _ in 0..=random.usize(..4) {
            // The Ethernet addresses stay valid, or the frame would be ignored.
            let at = 12 + random.usize(..frame.len() - 12);
            frame[at] ^= 1 << random.usize(..8);
        }
        frames.push(frame);
    }
    for _ in 0..2_000 {
        let mut frame = [&wan[..], &peer].concat();
        frame.extend((0..2 + random.usize(..1400)).map(|_| random.u8(..)));
        frames.push(frame);
    }
    // Longest frame for the cables of both sides.
    frames.retain(|frame| frame.len() <= world.inner_mtu() as usize + 14);

    let (outside, inside) = (remote.frames("eth0"), host.frames("eth0"));
    for (n, frame) in frames.iter().enumerate() {
        outside.send(frame).expect("sent");
        inside.send(frame).expect("sent");
        // Paced, so that every frame is processed.
        if n % 64 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(gateway.running(), "the gateway has ended around frame {n}: {frame:02x?}");
        }
    }
    // Some mutated frames are valid and move addresses. The real hosts are learned again, and traffic works.
    world.wait_for(&mut gateway, host, &remote_address(0));
    world.wait_for(&mut gateway, remote, &crate::world::host_address(0));
    assert!(pings(host, &remote_address(0), 1200, 20), "traffic goes on");
    let summary = gateway.stop();
    let drops = summary.json["drops"].as_object().expect("an object");
    let reasons = drops.values().filter(|n| n.as_u64() > Some(0)).count();
    assert!(reasons >= 5, "reasons: {drops:?}");
    let counted: u64 = drops.values().filter_map(|n| n.as_u64()).sum();
    assert!(
        counted as usize > frames.len() / 4,
        "{counted} of {} frames dropped and counted: {drops:?}",
        2 * frames.len()
    );
}
