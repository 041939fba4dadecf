use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use serde_json::json;
use wirepath::control_socket::Client;
use wirepath_testlab::{Frame, Namespace, Veth, oracle};

use crate::program::CABLE;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, host_address, pings, remote_address};

/// Keys of an underlay whose address is the kernel's.
pub(crate) const SHARED: &str = "control = \"kernel\"\n";

/// Gives the kernel beside the gateway the address of the gateway, on the interface of its port.
///
/// The kernel's interface of an emulated NIC is a TAP device, and the cable of the NIC has a name of its own
/// ([`CABLE`]). The kernel takes no part in what the cable carries.
pub(crate) fn share(gateway: &Namespace, variant: Variant) {
    if variant.is_emulated() {
        gateway.ip("link set wan down");
        gateway.ip(&format!("link set wan name {CABLE}wan arp off"));
        gateway.ip(&format!("link set {CABLE}wan up"));
        gateway.ip("tuntap add dev wan mode tap");
        gateway.ip("link set wan up");
    }
    let (address, prefix, nodad) = (variant.vtep(), variant.prefix(), if variant.ipv6 { " nodad" } else { "" });
    if variant.ipv6 {
        gateway.ipv6("wan");
    }
    gateway.ip(&format!("addr add {address}/{prefix} dev wan{nodad}"));
}

/// Adds a router to the underlay, with the address of host `n`.
pub(crate) fn plug_router(world: &World, n: usize) -> Namespace {
    let (variant, name) = (world.variant, format!("router{n}"));
    let router = world.lab.namespace(&name);
    Veth::new((&router, "eth0"), (&world.net, &name)).plug();
    world.net.ip(&format!("link set {name} master br0"));
    for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        router.sysctl(key, "1");
    }
    // It sends packets back to the network from which they came, and tells nobody.
    for key in ["all", "eth0"] {
        router.sysctl(&format!("net/ipv4/conf/{key}/send_redirects"), "0");
        world.gateway.sysctl(&format!("net/ipv4/conf/{key}/accept_redirects"), "0");
    }
    world.gateway.sysctl("net/ipv4/conf/wan/accept_redirects", "0");
    world.gateway.sysctl("net/ipv6/conf/wan/accept_redirects", "0");
    let nodad = if variant.ipv6 { " nodad" } else { "" };
    if variant.ipv6 {
        router.ipv6("eth0");
    }
    router.ip(&format!("addr add {}/{} dev eth0{nodad}", variant.address(n), variant.prefix()));
    router
}

/// The address of the gateway is the kernel's, which answers everything but tunnel packets. The remote is behind a
/// router, to which the kernel's route leads.
pub(crate) fn the_kernel_keeps_all_but_tunnels(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let (host, remote, kernel) = (&world.hosts[0], &world.remotes[0], &world.gateway);
    share(kernel, variant);
    let version = if variant.ipv6 { "ipv6" } else { "ipv4" };
    for (key, value) in [("base_reachable_time_ms", "1000"), ("delay_first_probe_time", "1")] {
        kernel.sysctl(&format!("net/{version}/neigh/wan/{key}"), value);
    }
    let routers = [33, 34].map(|n| plug_router(&world, n));
    let (to, own) = (variant.remote(0).to_string(), variant.vtep().to_string());
    let len = if variant.ipv6 { 128 } else { 32 };
    let config = world.ports()
        + SHARED
        + "[control]\nsocket = 'operators.sock'\n"
        + &world.segment("blue", VNI, &["{ port = \"lan0\" }".to_owned()]);
    let mut gateway = world.start_with(&config);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let socket = gateway.path("operators.sock");
    let next_hop = || {
        let table = Client::connect(&socket).expect("a socket").show("remotes", &[], None).expect("a table");
        let at = |name| table.columns.iter().position(|it| it == name).expect("a column");
        (table.rows[0][at("next_hop")].clone(), table.rows[0][at("mac")].clone())
    };
    for router in &routers {
        let (via, mac) = (router.ip("-o addr show dev eth0 scope global"), colons(router.mac("eth0")));
        let via = via.split_whitespace().nth(3).and_then(|prefix| prefix.split('/').next()).expect("an address");
        kernel.ip(&format!("route replace {to}/{len} via {via} dev wan"));
        assert!(
            wirepath_testlab::eventually(WAIT_LIMIT, || next_hop() == (via.into(), mac.as_str().into())),
            "{via} at {mac}: {:?}",
            next_hop()
        );
        let before = router.statistic("eth0", "rx_packets");
        assert!(pings(host, &remote_address(0), 56, 50) && pings(remote, &host_address(0), 1000, 50));
        assert!(router.statistic("eth0", "rx_packets") >= before + 100, "the packets pass {via}");
    }
    // The kernel sends nothing to the router now, and asks for it all the same before its entry gets stale.
    let mut wire = routers[1].frames("eth0");
    let (asker, asked) = (kernel.mac("wan"), routers[1].mac("eth0"));
    let is_probe = |frame: &Frame| {
        let bytes = &frame.bytes;
        let solicits = if variant.ipv6 { bytes[20] == 58 && bytes[54] == 135 } else { bytes[12..14] == [8, 6] };
        solicits && bytes[..6] == asked && bytes[6..12] == asker
    };
    for round in 0..3 {
        wire.drain();
        assert!(wire.receive_where(WAIT_LIMIT, is_probe).is_some(), "round {round}: the kernel does not ask");
    }
    // Echo requests, and datagrams and connections to sockets of the kernel.
    assert!(pings(remote, &own, 56, 50) && pings(kernel, &to, 1400, 50));
    let server = kernel.inside(|| UdpSocket::bind((variant.vtep(), 7000)).expect("a socket"));
    let listener = kernel.inside(|| TcpListener::bind((variant.vtep(), 7000)).expect("a socket"));
    server.set_read_timeout(Some(WAIT_LIMIT)).expect("a limit");
    let client = remote.inside(|| UdpSocket::bind((variant.remote(0), 0)).expect("a socket"));
    client.send_to(b"datagram", (variant.vtep(), 7000)).expect("sent");
    let mut buffer = [0; 64];
    let (len, from) = server.recv_from(&mut buffer).expect("a datagram");
    assert_eq!((&buffer[..len], from.ip()), (&b"datagram"[..], variant.remote(0)));
    remote.inside(|| TcpStream::connect((variant.vtep(), 7000)).expect("a connection"));
    drop(listener);
    // A new kind of tunnels: its packets reach the kernel, which refuses them, only before the reload.
    let is_refused = || {
        let socket = remote.inside(|| UdpSocket::bind((variant.remote(0), 0)).expect("a socket"));
        remote.inside(|| socket.connect((variant.vtep(), 6081)).expect("an address"));
        socket.set_read_timeout(Some(Duration::from_millis(500))).expect("a limit");
        socket.send(b"datagram").expect("sent");
        socket.recv(&mut [0; 64]).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    };
    assert!(is_refused(), "the kernel has UDP port 6081");
    let geneve = format!("[[segment]]\nname = \"red\"\nvni = 43\nkind = \"geneve\"\nremotes = [\"{to}\"]\n");
    let reload = |config: &str| {
        gateway.write_config(config);
        let answer = Client::connect(&socket).expect("a socket").ask(&json!({ "request": "reload" }));
        assert!(answer.is_ok_and(|answer| answer["applied"] == true), "the reload");
    };
    let with_geneve = format!("{config}{geneve}ports = [{{ port = \"lan0\", vlan = 43 }}]\n");
    // Tunnels that stay lose nothing meanwhile, and neither does the kernel.
    std::thread::scope(|scope| {
        let flows = [(host, remote_address(0)), (remote, own.clone())].map(|(from, to)| {
            scope.spawn(move || from.run(&["ping", "-n", "-i", "0.005", "-w", "30", "-c", "500", &to]))
        });
        for round in 0..3 {
            reload(&with_geneve);
            assert!(!is_refused(), "round {round}: the gateway has UDP port 6081");
            reload(&config);
            assert!(is_refused(), "round {round}: the kernel has UDP port 6081 again");
        }
        reload(&with_geneve);
        for flow in flows {
            let outcome = flow.join().expect("an end");
            assert!(outcome.stdout.contains(" 0% packet loss"), "{}", outcome.stdout);
        }
    });
    assert!(!is_refused(), "the gateway has UDP port 6081");
    // The tunnel packets have the address that an operator gives the interface. The others ask for it again.
    let changed = [2, 0, 0, 0, 0x77, 1];
    kernel.ip(&format!("link set wan address {}", colons(changed)));
    for other in [remote, &routers[1]] {
        other.ip("neigh flush all");
    }
    world.wait_for(&mut gateway, host, &remote_address(0));
    wire.drain();
    assert!(pings(host, &remote_address(0), 56, 50) && pings(remote, &host_address(0), 1000, 50));
    let is_tunnel = |frame: &&Frame| {
        let udp = if variant.ipv6 { 54 } else { 34 };
        frame.bytes[..6] == asked && frame.bytes.get(udp + 2..udp + 4) == Some(&[0x12, 0xb5])
    };
    let sources: Vec<[u8; 6]> =
        wire.drain().iter().filter(is_tunnel).map(|frame| frame.bytes[6..12].try_into().expect("6 bytes")).collect();
    assert!(sources.len() >= 100 && sources.iter().all(|source| *source == changed), "{sources:02x?}");
    if variant.is_emulated() {
        // A device that was lost returns with the packets of the last reload.
        gateway.reset_nic("wan");
        world.wait_for(&mut gateway, host, &remote_address(0));
        assert!(!is_refused(), "the gateway has UDP port 6081 after the reset");
        // The kernel sees the link of the NIC.
        for up in [false, true] {
            gateway.set_nic_link("wan", up);
            let has_carrier = || !kernel.ip("-o link show dev wan").contains("NO-CARRIER");
            assert!(wirepath_testlab::eventually(WAIT_LIMIT, || has_carrier() == up), "the carrier with the link {up}");
        }
        world.wait_for(&mut gateway, host, &remote_address(0));
    }
    assert!(pings(host, &remote_address(0), 56, 50) && pings(remote, &own, 56, 20));
    // The gateway itself has answered nothing.
    let summary = gateway.stop();
    assert_eq!(summary.number("generated"), 0, "{}", summary.json);
}

/// The gateway answers for its VTEP address once, with the port's link-layer address. The kernel below it,
/// which does not have the address, does not answer and does not respond to tunnel packets.
pub(crate) fn answers_for_its_address_alone(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let remote = &world.remotes[0];
    let mut wire = remote.frames("eth0");
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let mac = world.gateway.mac("wan");
    let frames = wire.drain();
    for frame in &frames {
        // ICMP type 3 (IPv4) or ICMPv6 type 1 from the gateway's machine: "port unreachable" for a tunnel
        // packet.
        let unreachable = match variant.vtep() {
            IpAddr::V4(_) => frame.bytes[12..14] == [8, 0] && frame.bytes[23] == 1 && frame.bytes[34] == 3,
            IpAddr::V6(_) => frame.bytes[12..14] == [0x86, 0xdd] && frame.bytes[20] == 58 && frame.bytes[54] == 1,
        };
        assert!(!unreachable, "the kernel answers tunnel packets: {:02x?}", frame.bytes);
    }
    // The request comes from an otherwise unused host address.
    let none: [&[u8]; 0] = [];
    let vtep = variant.vtep();
    let question = match vtep {
        IpAddr::V4(_) => format!(
            "emit(Ether(src='02:00:00:00:55:01', dst='ff:ff:ff:ff:ff:ff')/ARP(op=1, hwsrc='02:00:00:00:55:01', \
            psrc='10.9.0.200', pdst='{vtep}'))"
        ),
        IpAddr::V6(_) => format!(
            "
sol = in6_getnsma(inet_pton(socket.AF_INET6, '{vtep}'))
mac = in6_getnsmac(sol)
emit(Ether(src='02:00:00:00:55:01', dst=mac)/IPv6(src='fd00:9::200', dst=inet_ntop(socket.AF_INET6, sol), hlim=255)\
/ICMPv6ND_NS(tgt='{vtep}')/ICMPv6NDOptSrcLLAddr(lladdr='02:00:00:00:55:01'))"
        ),
    };
    let question = oracle::scapy(&none, &question).frames.remove(0);
    let mut padded = question;
    padded.resize(padded.len().max(60), 0);
    wire.send(&padded).expect("sent");
    let ours = |frame: &wirepath_testlab::Frame| frame.bytes[..6] == [2, 0, 0, 0, 0x55, 1];
    let answer = wire.receive_where(WAIT_LIMIT, ours).expect("an answer").bytes;
    assert!(wire.receive_where(Duration::from_millis(500), ours).is_none(), "a second answer");
    oracle::assert_clean(&[&answer]);
    assert_eq!(answer[6..12], mac);
    let text = match vtep {
        IpAddr::V4(_) => "p = Ether(frames[0]); print(p[ARP].op, p[ARP].psrc, p[ARP].hwsrc)",
        IpAddr::V6(_) => {
            "p = Ether(frames[0]); print(p[ICMPv6ND_NA].type, p[ICMPv6ND_NA].tgt, p[ICMPv6NDOptDstLLAddr].lladdr)"
        }
    };
    let kind = if variant.ipv6 { 136 } else { 2 };
    let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(oracle::scapy(&[&answer], text).lines, [format!("{kind} {vtep} {}", mac.join(":"))]);
    gateway.stop();
}
