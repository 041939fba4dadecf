//! A kernel router with a smaller MTU between the gateway and its remote, the kernel's `vxlan` device.
//!
//! ```text
//! host0 --- gateway --- bridge --- router --- (MTU 1400) --- far: vx0
//! ```

use wirepath::control_socket::Client;
use wirepath_testlab::{FramePort, Namespace, Veth, eventually, oracle};

use crate::program::Program;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, host_address, pings, remote_address};

/// MTU of the network behind the router.
const SMALL: u32 = 1400;
/// Bytes of each connection.
const BYTES: u64 = 8 << 20;

/// The underlay with its router.
pub(crate) struct Routed {
    pub(crate) world: World,
    /// Namespace with the VXLAN device, in the network behind the router.
    pub(crate) far: Namespace,
}

impl Routed {
    /// Creates the networks. The VXLAN device behind the router has this MTU and ignores that of its network.
    pub(crate) fn new(variant: Variant, mtu: u32) -> Self {
        let mut world = World::new(variant, 1, 0, 1500);
        world.plug_remote();
        let far = world.lab.namespace("far");
        let router = &world.remotes[0];
        Veth::new((router, "eth1"), (&far, "eth0")).mtu(SMALL).plug();
        let (own, remote, gateway, prefix) = if variant.ipv6 {
            ("fd00:8::1", "fd00:8::2", "fd00:9::2", 64)
        } else {
            ("10.8.0.1", "10.8.0.2", "10.9.0.2", 24)
        };
        if variant.ipv6 {
            router.ipv6("eth1");
            far.ipv6("eth0");
            router.sysctl("net/ipv6/conf/all/forwarding", "1");
        } else {
            router.sysctl("net/ipv4/ip_forward", "1");
        }
        assert_eq!(variant.remote(0).to_string(), gateway);
        let nodad = if variant.ipv6 { " nodad" } else { "" };
        router.ip(&format!("addr add {own}/{prefix} dev eth1{nodad}"));
        far.ip(&format!("addr add {remote}/{prefix} dev eth0{nodad}"));
        far.ip(&format!("route add default via {own}"));
        let vtep = variant.vtep();
        far.ip(&format!("link add vx0 type vxlan id {VNI} local {remote} remote {vtep} dstport 4789 df unset"));
        far.ip(&format!("link set vx0 mtu {mtu} up"));
        let source = remote_address(0);
        far.ip(&format!("addr add {source}/24 dev vx0"));
        // The remote does not announce what its own network takes, so only ICMP errors tell the host.
        let mss = world.inner_mtu() - 40;
        far.ip(&format!("route replace 10.1.0.0/24 dev vx0 src {source} advmss {mss}"));
        Self { world, far }
    }

    pub(crate) fn remote(&self) -> &'static str {
        if self.world.variant.ipv6 { "fd00:8::2" } else { "10.8.0.2" }
    }

    /// Starts the gateway with a route to the remote and these keys of its segment.
    pub(crate) fn start(&self, ports: &str, keys: &str) -> (Program, Client) {
        let router = self.world.variant.remote(0);
        let program = self.world.start_with(&format!(
            "{ports}gateways = [\"{router}\"]\n[control]\nsocket = 'operators.sock'\n[[segment]]\nvni = {VNI}\n\
             remotes = [\"{}\"]\nports = [{{ port = \"lan0\" }}]\n{keys}\n",
            self.remote()
        ));
        let socket = program.path("operators.sock");
        assert!(eventually(WAIT_LIMIT, || Client::connect(&socket).is_ok()), "no control socket");
        (program, Client::connect(&socket).expect("a connection"))
    }

    /// Returns the largest inner IP packet that passes the router.
    fn fits(&self) -> u32 {
        SMALL - self.world.variant.overhead()
    }
}

/// Returns a number of the row of the only remote in `wirepath show remotes`.
pub(crate) fn shown(client: &mut Client, column: &str) -> u64 {
    let table = client.show("remotes", &[], None).expect("a table");
    let at = table.columns.iter().position(|name| name == column).expect("a column");
    table.rows[0][at].as_u64().expect("a number")
}

/// The gateway learns the MTU from the kernel's ICMP error, and the host from that of the gateway.
pub(crate) fn a_router_reports_its_mtu(variant: Variant) {
    let routed = Routed::new(variant, SMALL - variant.overhead());
    let (world, far) = (&routed.world, &routed.far);
    let (mut gateway, mut client) = routed.start(&world.ports(), "");
    let (host, router) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let (mut to_router, mut from_router) = (router.frames("eth0"), world.net.frames("r0"));
    assert_eq!(shown(&mut client, "path_mtu"), 1500);
    // The host sends segments as long as its own network takes, and the connection finds the MTU by itself.
    let (sent, received) = crate::tcp::transfer(host, far, &remote_address(0), BYTES);
    assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum");
    assert_eq!(
        (shown(&mut client, "path_mtu"), shown(&mut client, "max_frame")),
        (1400, u64::from(routed.fits()) + 14)
    );
    let messages = shown(&mut client, "too_big_messages");
    assert!(messages >= 1);
    // Superframes have no IP packet of their length, so only short frames are judged.
    let short = |wire: &mut FramePort| -> Vec<Vec<u8>> {
        wire.drain().into_iter().map(|frame| frame.bytes).filter(|bytes| bytes.len() <= 1514).collect()
    };
    let mtu = if variant.ipv6 { "icmpv6.mtu" } else { "icmp.mtu" };
    let reports = oracle::fields(&short(&mut from_router), &[mtu]);
    let reports = reports.into_iter().filter(|row| row[0] == SMALL.to_string()).count() as u64;
    assert!(reports >= messages, "{reports} messages of the kernel, {messages} of them valid");
    short(&mut to_router);
    // The kernel of the host has learned it too.
    assert!(pings(host, &remote_address(0), routed.fits() - 28, 5), "{} bytes fit", routed.fits());
    assert!(!pings(host, &remote_address(0), routed.fits() - 27, 1), "{} bytes do not", routed.fits() + 1);
    let fragments = ["ping", "-n", "-M", "dont", "-s", "3000", "-i", "0.01", "-w", "5", "-c", "5", &remote_address(0)];
    let outcome = host.run(&fragments);
    assert!(outcome.stdout.contains(" 0% packet loss"), "{}{}", outcome.stdout, outcome.stderr);
    // What the streams carry looks like protocols to tshark. The pings are judged.
    let pinged = short(&mut to_router);
    assert!(pinged.len() >= 15, "{} frames", pinged.len());
    oracle::assert_clean(&pinged);
    let (sent, received) = crate::tcp::transfer(far, host, &host_address(0), BYTES);
    assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum of the other direction");
    let summary = gateway.stop();
    assert_eq!(summary.drops("bad_icmp_quote"), 0, "{}", summary.json);
    assert!(summary.drops("too_big") >= 1, "{}", summary.json);
    let paths = &summary.json["app"]["path_mtus"];
    assert_eq!((&paths["now"], &paths["lowered"]), (&1.into(), &1.into()), "{paths}");
}

/// Messages of scapy that quote no packet of the gateway change nothing. Of a true packet, they do.
pub(crate) fn forged_messages_are_refused(variant: Variant) {
    let routed = Routed::new(variant, SMALL - variant.overhead());
    let world = &routed.world;
    let (mut gateway, mut client) = routed.start(&world.ports(), "");
    let (host, router) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let script = format!(
        "
v6, vtep, remote = {}, '{}', '{}'
E = Ether(src='{}', dst='{}')
def outer(**f):
    base = dict(src=vtep, dst=remote)
    return IPv6(**{{**base, **f}}) if v6 else IP(**{{**base, 'flags': 'DF', **f}})
def quote(ip={{}}, udp={{}}, vni={VNI}, size=1500):
    head = outer(**ip)/UDP(**{{'sport': 50000, 'dport': 4789, **udp}})/VXLAN(flags=8, vni=vni)
    head /= Ether(src='02:00:00:00:00:05', dst='02:00:00:00:00:06', type=0x88b5)
    return bytes(head/Raw(bytes(size - len(head))))
def message(q, mtu=1300, source=None, cut=1200 if v6 else 500):
    source = source or ('2001:db8::9' if v6 else '192.0.2.9')
    if v6:
        return E/IPv6(src=source, dst=vtep)/ICMPv6PacketTooBig(mtu=mtu)/Raw(q[:cut])
    return E/IP(src=source, dst=vtep)/ICMP(type=3, code=4, nexthopmtu=mtu)/Raw(q[:cut])
other, third = ('fd00:9::77', 'fd00:8::77') if v6 else ('10.9.0.77', '10.8.0.77')
for m in [
    message(quote(ip={{'src': other}})),
    message(quote(ip={{'dst': third}})),
    message(quote(ip={{'src': remote, 'dst': vtep}})),
    message(quote(udp={{'dport': 4790}})),
    message(quote(udp={{'sport': 4789}})),
    message(quote(vni=43)),
    message(quote(size=1300)),
    message(quote(), mtu=1500),
    message(quote(), cut=27),
    message(bytes(outer()/TCP(sport=50000, dport=4789)/Raw(bytes(1400)))),
    message(b''),
    message(bytes(64)),
]: emit(m)
if v6:
    emit(message(quote(), mtu=1279))
else:
    emit(message(quote(ip={{'flags': 0}})))
emit(message(quote(), mtu=1350))
",
        if variant.ipv6 { "True" } else { "False" },
        variant.vtep(),
        routed.remote(),
        colons(router.mac("eth0")),
        colons(world.gateway.mac("wan")),
    );
    let none: [&[u8]; 0] = [];
    let mut frames = oracle::scapy(&none, &script).frames;
    let valid = frames.pop().expect("the last message");
    oracle::assert_clean(&[&valid]);
    let wire = router.frames("eth0");
    for frame in &frames {
        wire.send(frame).expect("sent");
    }
    let dropped = |client: &mut Client| {
        let table = client.show("drops", &["reason=bad_icmp_quote".to_owned()], None).expect("a table");
        let at = table.columns.iter().position(|name| name == "packets").expect("a column");
        table.rows.iter().map(|row| row[at].as_u64().expect("a number")).sum::<u64>()
    };
    assert!(eventually(WAIT_LIMIT, || dropped(&mut client) == 13), "{} of 13 are dropped", dropped(&mut client));
    assert_eq!((shown(&mut client, "path_mtu"), shown(&mut client, "too_big_messages")), (1500, 0));
    wire.send(&valid).expect("sent");
    assert!(eventually(WAIT_LIMIT, || shown(&mut client, "path_mtu") == 1350), "the valid message counts");
    let summary = gateway.stop();
    assert_eq!((frames.len(), summary.drops("bad_icmp_quote")), (13, 13), "{}", summary.json);
}

/// Frames as long as the hosts' networks take pass the router as fragments. The kernel joins those of the gateway.
pub(crate) fn the_kernel_joins_fragments(variant: Variant) {
    let routed = Routed::new(variant, SMALL - variant.overhead());
    let (world, far) = (&routed.world, &routed.far);
    let (host, router) = (&world.hosts[0], &world.remotes[0]);
    host.ip("link set eth0 mtu 1500");
    world.gateway.ip("link set lan0 mtu 1500");
    let ports = world.ports().replace(&format!("mtu = {}\n", world.inner_mtu()), "mtu = 1500\n");
    let (mut gateway, mut client) = routed.start(&ports, "outer_fragmentation = true");
    world.wait_for(&mut gateway, host, &remote_address(0));
    let mut to_router = router.frames("eth0");
    let mss = 1500 - 40;
    far.ip(&format!("route replace 10.1.0.0/24 dev vx0 src {} advmss {mss}", remote_address(0)));
    // The answers are as long, so the remote sends them as fragments of the inner packet.
    let ping = |size: &str| {
        let outcome =
            host.run(&["ping", "-n", "-M", "do", "-s", size, "-i", "0.01", "-w", "10", "-c", "5", &remote_address(0)]);
        outcome.stdout.contains(" 0% packet loss")
    };
    // Fragments of the first packets are as long as the gateway's own network takes. A packet of it that is not
    // fragmented makes the router report its MTU.
    assert!(eventually(WAIT_LIMIT, || {
        pings(host, &remote_address(0), world.inner_mtu() - 28, 1);
        shown(&mut client, "path_mtu") == u64::from(SMALL)
    }));
    to_router.drain();
    assert!(ping("1472"), "1500 bytes with DF");
    let fragments: Vec<Vec<u8>> = to_router.drain().into_iter().map(|frame| frame.bytes).collect();
    oracle::assert_clean(&fragments);
    assert!(fragments.iter().all(|bytes| bytes.len() <= 1414));
    let first = if variant.ipv6 { "ipv6.fraghdr.more" } else { "ip.flags.mf" };
    let is_first = |row: &Vec<String>| row[0].split(',').next().is_some_and(|it| it == "1" || it == "True");
    let found = oracle::fields(&fragments, &[first]).iter().filter(|row| is_first(row)).count();
    assert_eq!(found, 5, "first fragments");
    // Superframes are cut first.
    let (sent, received) = crate::tcp::transfer(host, far, &remote_address(0), BYTES);
    assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum");
    assert!(shown_segment(&mut client, "outer_fragments") > 2 * (BYTES / 1500));
    let summary = gateway.stop();
    assert_eq!(summary.drops("too_big"), 0, "{}", summary.json);
}

/// Returns a number of the only row of `wirepath show segments`.
fn shown_segment(client: &mut Client, column: &str) -> u64 {
    let table = client.show("segments", &[], None).expect("a table");
    let at = table.columns.iter().position(|name| name == column).expect("a column");
    table.rows[0][at].as_u64().expect("a number")
}

/// The kernel's VXLAN device sends outer fragments (`df unset`), which the gateway joins. The kernel joins those of the
/// gateway.
pub(crate) fn fragments_of_the_kernel_are_joined(variant: Variant) {
    let routed = Routed::new(variant, 1500);
    let (world, far) = (&routed.world, &routed.far);
    let host = &world.hosts[0];
    host.ip("link set eth0 mtu 1500");
    world.gateway.ip("link set lan0 mtu 1500");
    if variant.ipv6 {
        // The VXLAN device sends no fragments over IPv6.
        return fragments_of_scapy_are_joined(&routed);
    }
    // The kernel would tell its own hosts the MTU of the path, as the gateway does.
    far.ip(&format!("route replace 10.1.0.0/24 dev vx0 src {} mtu lock 1500", remote_address(0)));
    let ports = world.ports().replace(&format!("mtu = {}\n", world.inner_mtu()), "mtu = 1500\n");
    let (mut gateway, _client) = routed.start(&ports, "outer_fragmentation = true");
    world.wait_for(&mut gateway, host, &remote_address(0));
    let mut from_router = world.net.frames("r0");
    // The path MTU is found, and known hosts are published.
    assert!(eventually(WAIT_LIMIT, || pings(host, &remote_address(0), 1472, 5)), "1500 bytes with DF");
    from_router.drain();
    for (from, to) in [(host, remote_address(0)), (far, host_address(0))] {
        assert!(pings(from, &to, 1472, 20), "1500 bytes with DF to {to}");
    }
    let fragments: Vec<Vec<u8>> = from_router.drain().into_iter().map(|frame| frame.bytes).collect();
    oracle::assert_clean(&fragments);
    let more = if variant.ipv6 { "ipv6.fraghdr.more" } else { "ip.flags.mf" };
    let is_first = |row: &Vec<String>| row[0].split(',').next().is_some_and(|it| it == "1" || it == "True");
    let found = oracle::fields(&fragments, &[more]).iter().filter(|row| is_first(row)).count();
    assert_eq!(found, 40, "first fragments of the kernel");
    for (from, to, address) in [(far, host, host_address(0)), (host, far, remote_address(0))] {
        let (sent, received) = crate::tcp::transfer(from, to, &address, BYTES);
        assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum to {address}");
    }
    let summary = gateway.stop();
    for reason in ["fragment_overlap", "fragment_duplicate", "outer_fragment", "bad_fragment", "bad_l4_checksum"] {
        assert_eq!(summary.drops(reason), 0, "{reason}: {}", summary.json);
    }
}

/// Scapy sends the fragments of a long tunnel packet over IPv6, in the order of their names and the other way round.
fn fragments_of_scapy_are_joined(routed: &Routed) {
    let world = &routed.world;
    let host = &world.hosts[0];
    let ports = world.ports().replace(&format!("mtu = {}\n", world.inner_mtu()), "mtu = 1500\n");
    let (mut gateway, _client) = routed.start(&ports, "");
    world.wait_for(&mut gateway, host, &remote_address(0));
    let inner = crate::world::ethernet(host.mac("eth0"), [2, 0, 0, 0, 0x77, 1], &"fragments ".repeat(148));
    let script = format!(
        "
ip = IPv6(src='{}', dst='{}')
body = bytes((IPv6(bytes(ip/UDP(sport=50000, dport=4789)/VXLAN(flags=8, vni={VNI})/Raw(frames[0])))).payload)
for n in (1, 2):
    parts = [ip/IPv6ExtHdrFragment(nh=17, id=n, offset=at // 8, m=int(at + 512 < len(body)))/Raw(body[at:at + 512])
             for at in range(0, len(body), 512)]
    [emit(Ether(src='{}', dst='{}')/p) for p in (parts if n == 1 else reversed(parts))]
",
        routed.remote(),
        world.variant.vtep(),
        colons(world.remotes[0].mac("eth0")),
        colons(world.gateway.mac("wan")),
    );
    let frames = oracle::scapy(&[&inner], &script).frames;
    assert_eq!(frames.len(), 6);
    let (wire, mut seen) = (world.remotes[0].frames("eth0"), host.frames("eth0"));
    for frame in &frames {
        wire.send(frame).expect("sent");
    }
    for _ in 0..2 {
        assert!(seen.receive_where(WAIT_LIMIT, |frame| frame.bytes == inner).is_some(), "the frame arrives");
    }
    gateway.stop();
}
