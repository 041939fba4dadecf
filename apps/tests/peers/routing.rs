//! Routing between segments, with Linux hosts, a kernel VXLAN device and a kernel router behind one as peers.
//!
//! ```text
//! host0 10.1.0.2 --- segment one ─┐          ┌─ segment far (VNI 42): vx0 10.3.0.101 of remote0
//!                                 ├─ router ─┤
//! host1 10.2.0.2 --- segment two ─┘          └─ segment transit (VNI 900): vx900, router of remote0 to 10.4.0.0/24
//! ```

use wirepath_testlab::{Namespace, eventually, oracle};

use crate::program::Program;
use crate::world::{Variant, WAIT_LIMIT, World, colons, pings};

/// Ethernet address of the gateway's routers.
const ROUTER: &str = "02:00:5e:00:00:01";
/// Addresses of all peers: other hosts, and the router behind the tunnel.
const V4: [&str; 4] = ["10.1.0.2", "10.2.0.2", "10.3.0.101", "10.4.0.1"];
const V6: [&str; 4] = ["fd01::2", "fd02::2", "fd03::101", "fd04::1"];

/// Gives hosts and remote their addresses and routes, and starts the gateway.
fn start(world: &World) -> Program {
    let (hosts, remote) = (&world.hosts, &world.remotes[0]);
    for (n, host) in hosts.iter().enumerate() {
        host.ip("addr flush dev eth0");
        host.ipv6("eth0");
        host.ip(&format!("addr add {}/24 dev eth0", V4[n]));
        host.ip(&format!("addr add {}/64 dev eth0 nodad", V6[n]));
        host.ip(&format!("route add default via 10.{}.0.1", n + 1));
        host.ip(&format!("-6 route add default via fd0{}::1", n + 1));
    }
    let (local, vtep) = (world.variant.remote(0), world.variant.vtep());
    remote.ip("addr flush dev vx0");
    remote.ipv6("vx0");
    remote.ip(&format!("addr add {}/24 dev vx0", V4[2]));
    remote.ip(&format!("addr add {}/64 dev vx0 nodad", V6[2]));
    remote.ip(&format!("link add vx900 type vxlan id 900 local {local} remote {vtep} dev eth0 dstport 4789"));
    remote.ipv6("vx900");
    remote.ip("link set vx900 up");
    // The kernel as router of symmetric IRB: a neighbour entry has the Ethernet address of the gateway's router.
    remote.ip("link add inside type veth peer name outside");
    remote.ipv6("inside");
    remote.ip("link set inside up");
    remote.ip("link set outside up");
    remote.ip(&format!("addr add {}/24 dev inside", V4[3]));
    remote.ip(&format!("addr add {}/64 dev inside nodad", V6[3]));
    remote.ip(&format!("neigh add 169.254.0.1 lladdr {ROUTER} dev vx900 nud permanent"));
    remote.ip(&format!("neigh add fe80::9 lladdr {ROUTER} dev vx900 nud permanent"));
    for n in [1, 2] {
        // Packets from 10.3.0.101 to the hosts go through its segment.
        remote.ip(&format!("route add 10.{n}.0.0/24 via 10.3.0.1 dev vx0"));
        remote.ip(&format!("-6 route add fd0{n}::/64 via fd03::1 dev vx0"));
        remote.ip(&format!("route add 10.{n}.0.0/24 via 169.254.0.1 dev vx900 onlink table 900"));
        remote.ip(&format!("-6 route add fd0{n}::/64 via fe80::9 dev vx900 onlink table 900"));
    }
    remote.ip("rule add from 10.4.0.0/24 lookup 900");
    remote.ip("-6 rule add from fd04::/64 lookup 900");
    remote.sysctl("net/ipv4/conf/all/rp_filter", "0");
    remote.sysctl("net/ipv4/conf/vx900/rp_filter", "0");
    let far = colons(remote.mac("vx900"));
    let segment = |name: &str, keys: &str, n: u32| {
        format!(
            "[[segment]]\nname = \"{name}\"\naddresses = [\"10.{n}.0.1/24\", \"fd0{n}::1/64\"]\n\
             router_mac = \"{ROUTER}\"\n{keys}\n"
        )
    };
    let hop = format!("{{ segment = \"transit\", remote = \"{local}\", mac = \"{far}\" }}");
    let config = world.ports()
        + &segment("one", "ports = [{ port = \"lan0\" }]", 1)
        + &segment("two", "ports = [{ port = \"lan1\" }]", 2)
        + &segment("far", &format!("vni = 42\nremotes = [\"{local}\"]"), 3)
        + &format!(
            "[[segment]]\nname = \"transit\"\nvni = 900\nvrf = \"default\"\nremotes = [\"{local}\"]\n\
             router_mac = \"{ROUTER}\"\n\
             [[vrf]]\nname = \"default\"\nroutes = [\n  {{ to = \"10.4.0.0/24\", next_hops = [{hop}] }},\n  \
             {{ to = \"fd04::/64\", next_hops = [{hop}] }},\n  \
             {{ to = \"10.66.0.0/16\", discard = \"prohibit\" }},\n]\n"
        );
    world.start_with(&config)
}

/// Returns the error that `ping` prints for one request.
fn error(from: &Namespace, arguments: &[&str]) -> String {
    let command = [&["ping", "-n", "-c", "1", "-W", "5"], arguments].concat();
    let outcome = from.run(&command);
    format!("{}{}", outcome.stdout, outcome.stderr)
}

/// Hosts of all segments reach each other, and frames on the wire have no error for tshark.
pub(crate) fn reaches_every_segment(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let mut gateway = start(&world);
    let mut wire = world.remotes[0].frames("eth0");
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    for addresses in [V4, V6] {
        for to in &addresses[1..] {
            world.wait_for(&mut gateway, host, to);
            for size in [56, 1300] {
                assert!(pings(host, to, size, 20), "{size} bytes to {to}");
            }
        }
        world.wait_for(&mut gateway, remote, addresses[1]);
        assert!(pings(remote, addresses[1], 56, 20), "from the remote to {}", addresses[1]);
    }
    // Packets without DF that are too long for the tunnel leave the router as fragments.
    let long = ["ping", "-n", "-M", "dont", "-s", "1472", "-i", "0.01", "-w", "5", "-c", "5", V4[2]];
    let outcome = host.run(&long);
    assert!(outcome.stdout.contains(" 0% packet loss"), "{}{}", outcome.stdout, outcome.stderr);
    let seen: Vec<Vec<u8>> = wire.drain().into_iter().map(|frame| frame.bytes).collect();
    let from_router = |row: &Vec<String>| row[0].contains(V4[0]) && row[1].contains('1');
    let first = oracle::fields(&seen, &["ip.src", "ip.flags.mf"]).into_iter().filter(from_router).count();
    assert_eq!(first, 5, "first fragments of the host's packets");
    assert!(seen.len() > 200, "{} frames", seen.len());
    oracle::assert_clean(&seen);
    let summary = gateway.stop();
    for reason in ["no_route", "hop_limit", "bad_source", "split_horizon"] {
        assert_eq!(summary.drops(reason), 0, "{reason}: {}", summary.json);
    }
}

/// A TCP stream of 32 MiB arrives unharmed through each kind of route, in both directions.
pub(crate) fn tcp_unharmed(variant: Variant) {
    const BYTES: u64 = 32 << 20;
    let world = World::new(variant, 2, 1, 1500);
    let mut gateway = start(&world);
    let (host, other, remote) = (&world.hosts[0], &world.hosts[1], &world.remotes[0]);
    for addresses in [V4, V6] {
        for (from, to, address) in [
            (host, other, addresses[1]),
            (host, remote, addresses[2]),
            (host, remote, addresses[3]),
            (remote, host, addresses[0]),
        ] {
            world.wait_for(&mut gateway, from, address);
            let (sent, received) = crate::tcp::transfer(from, to, address, BYTES);
            assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum to {address}");
        }
    }
    gateway.stop();
}

/// The kernel understands the errors of the router.
pub(crate) fn errors_are_understood(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let mut gateway = start(&world);
    let host = &world.hosts[0];
    for (addresses, none, unused, router) in
        [(V4, "10.77.0.1", "10.2.0.77", "10.1.0.1"), (V6, "fd77::1", "fd02::77", "fd01::1")]
    {
        let v6 = router.contains(':');
        world.wait_for(&mut gateway, host, addresses[2]);
        let cases: [(&[&str], &str); 4] = [
            (&["-t", "1", addresses[1]], if v6 { "Hop limit" } else { "Time to live exceeded" }),
            (&[none], if v6 { "No route" } else { "Net Unreachable" }),
            (&[unused], if v6 { "Address unreachable" } else { "Host Unreachable" }),
            (&["-M", "do", "-s", "1440", addresses[2]], if v6 { "Packet too big: mtu=" } else { "Frag needed" }),
        ];
        for (arguments, expected) in cases {
            let mut text = String::new();
            let found = eventually(WAIT_LIMIT, || {
                text = error(host, arguments);
                // The kernel knows the path MTU from then on.
                text.contains(expected) || arguments.len() > 2 && text.contains("message too long, mtu")
            });
            assert!(found, "{arguments:?}: {text}");
        }
        // The path to the closed port of the router itself, as traceroute sees it.
        assert!(pings(host, router, 56, 5), "the router answers");
    }
    let text = error(host, &["10.66.0.1"]);
    assert!(text.contains("Packet filtered"), "{text}");
    let summary = gateway.stop();
    assert!(summary.drops("hop_limit") >= 2 && summary.drops("prohibited") >= 1, "{}", summary.json);
}
