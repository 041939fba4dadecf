//! Three leaves in one fabric: two gateways and a leaf with the kernel's VXLAN device. All have FRR. The kernel leaf
//! reflects the routes of the others.
//!
//! ```text
//! host0 --- lan0 | gateway 1 | wan ---|
//! host1 --- lan0 | gateway 2 | wan ---|--- bridge
//! far  --- port | kernel leaf | eth0 -|
//! ```

use std::cell::Cell;

use wirepath_testlab::{FramePort, Namespace, Veth, eventually};

use crate::evpn::{Fabric, Frr, Gateway, blue_segment, is_missing, wait_for_entry};
use crate::underlay::SHARED;
use crate::world::{VNI, Variant, WAIT_LIMIT, colons, ethernet, host_address, pings, remote_address};

/// Number of the second gateway among the hosts of the underlay.
pub(crate) const SECOND: usize = 3;

/// Returns the lines for a further neighbour of bgpd, and those for its EVPN address family.
pub(crate) fn neighbour_lines(peer: &str) -> [String; 2] {
    let base =
        format!(" neighbor {peer} remote-as 65000\n neighbor {peer} timers 2 9\n neighbor {peer} timers connect 1\n");
    [base, format!("  neighbor {peer} activate\n")]
}

/// Connects the second gateway and its host. Returns their namespaces.
pub(crate) fn plug_second(fabric: &Fabric) -> [Namespace; 2] {
    let (world, variant) = (&fabric.world, fabric.world.variant);
    let second = world.lab.namespace("gw2");
    Veth::new((&second, "wan"), (&world.net, "gw2")).mtu(1500).plug();
    world.net.ip("link set gw2 master br0");
    second.ip(&format!("addr add {}/{} dev wan", variant.address(SECOND), variant.prefix()));
    let host = world.lab.namespace("host1");
    Veth::new((&second, "lan0"), (&host, "eth0")).mtu(world.inner_mtu()).plug();
    host.ip(&format!("addr add {}/24 dev eth0", host_address(1)));
    [second, host]
}

/// Starts the second gateway, with the kernel's address on its port, keys of the underlay and further tables.
pub(crate) fn start_second(fabric: &Fabric, namespace: &Namespace, text: &str) -> Gateway {
    let variant = fabric.world.variant;
    let mtu = fabric.world.inner_mtu();
    let ports = variant.port(0, "wan", "mtu = 1500\n") + &variant.port(1, "lan0", &format!("mtu = {mtu}\n"));
    let (address, prefix) = (variant.address(SECOND), variant.prefix());
    let underlay = format!("[underlay]\nport = \"wan\"\naddresses = [\"{address}/{prefix}\"]\n");
    Gateway::start(namespace, &(ports + &underlay + text))
}

/// Counts the frames with a mark that wait at a port.
fn count(port: &mut FramePort, mark: &str) -> usize {
    let has_mark = |bytes: &[u8]| bytes.windows(mark.len()).any(|window| window == mark.as_bytes());
    port.drain().iter().filter(|frame| has_mark(&frame.bytes)).count()
}

/// Flood lists, addresses, frames to all and pings between all pairs, and a host that moves between the gateways while
/// another one sends to it.
pub(crate) fn two_gateways_and_a_kernel_leaf(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::shared(variant);
    let (world, leaf, far) = (&fabric.world, fabric.leaf(), &fabric.far);
    let [second, host1] = plug_second(&fabric);
    let host0 = fabric.host();

    let vteps @ [first_vtep, second_vtep, leaf_vtep] =
        &[variant.vtep(), variant.address(SECOND), variant.remote(0)].map(|vtep| vtep.to_string());
    let _daemons = [(&world.gateway, first_vtep), (&second, second_vtep)]
        .map(|(namespace, own)| Frr::start(namespace, own, leaf_vtep));
    let [base, activate] = neighbour_lines(second_vtep);
    let clients: String =
        [first_vtep, second_vtep].map(|vtep| format!("  neighbor {vtep} route-reflector-client\n")).concat();
    let _reflector = Frr::routing(leaf, leaf_vtep, first_vtep, "", &base, &(activate + &clients));
    let text = SHARED.to_owned() + &blue_segment(&["lan0"], "neighbour_suppression = true");
    let gateways = [fabric.gateway_of(&text), start_second(&fabric, &second, &text)];

    // Type-3 routes make the flood lists of all.
    for (gateway, own) in gateways.iter().zip(vteps) {
        let mut others: Vec<String> = vteps.iter().filter(|vtep| *vtep != own).cloned().collect();
        others.sort_unstable();
        gateway.wait_for_remotes(&others);
        wait_for_entry(leaf, &format!("vx{VNI}"), "00:00:00:00:00:00", Some(&format!("dst {own} ")));
    }
    let hosts = [(host0, host_address(0)), (&host1, host_address(1)), (far, remote_address(0))];
    let ping_all = || {
        for (from, own) in &hosts {
            for (_, to) in hosts.iter().filter(|(_, to)| to != own) {
                assert!(eventually(WAIT_LIMIT, || pings(from, to, 56, 1)), "{own} does not reach {to}");
                assert!(pings(from, to, 1400, 20), "{own} to {to}");
            }
        }
    };
    ping_all();

    // Type-2 routes make the addresses of all.
    let macs = hosts.each_ref().map(|(namespace, _)| colons(namespace.mac("eth0")));
    for (n, gateway) in gateways.iter().enumerate() {
        for (mac, vtep) in macs.iter().zip(vteps) {
            let place = if *mac == macs[n] { ("lan0", "learned") } else { (vtep.as_str(), "external") };
            gateway.wait_for_mac(mac, Some(place));
        }
        wait_for_entry(leaf, &format!("vx{VNI}"), &macs[n], Some(&format!("dst {} ", vteps[n])));
    }

    // A frame to all from each host is at each other one once.
    let mut ports = hosts.each_ref().map(|(namespace, _)| namespace.frames("eth0"));
    for from in 0..hosts.len() {
        ports.iter_mut().for_each(|port| _ = port.drain());
        let mark = format!("to all from {from}");
        ports[from].send(&ethernet([0xff; 6], hosts[from].0.mac("eth0"), &mark)).expect("sent");
        let mut counts = [0; 3];
        let all = eventually(WAIT_LIMIT, || {
            (0..3).filter(|n| *n != from).for_each(|n| counts[n] += count(&mut ports[n], &mark));
            (0..3).all(|n| n == from || counts[n] > 0)
        });
        ping_all();
        (0..3).filter(|n| *n != from).for_each(|n| counts[n] += count(&mut ports[n], &mark));
        let expected: [usize; 3] = std::array::from_fn(|n| usize::from(n != from));
        assert!(all && counts == expected, "{mark}: {counts:?}");
    }

    // A host moves from one gateway to the other and back, while another one sends to it all the time.
    let (mac, roaming) = ("02:00:00:00:77:09", [2, 0, 0, 0, 0x77, 9]);
    let sent = Cell::new(0);
    let send = |mark: &str| {
        far.frames("eth0").send(&ethernet(roaming, far.mac("eth0"), mark)).expect("sent");
        sent.set(sent.get() + 1);
    };
    for (round, at) in [0, 1, 0].into_iter().enumerate() {
        let announce = || {
            hosts[at].0.frames("eth0").send(&ethernet([0xff; 6], roaming, "here")).expect("sent");
            send("meanwhile");
        };
        gateways[at].wait_for_sender(mac, Some(("lan0", "learned")), announce);
        gateways[1 - at].wait_for_sender(mac, Some((&vteps[at], "external")), || send("meanwhile"));
        wait_for_entry(leaf, &format!("vx{VNI}"), mac, Some(&format!("dst {} ", vteps[at])));
        ports.iter_mut().for_each(|port| _ = port.drain());
        let mark = format!("round {round}");
        (0..100).for_each(|_| send(&mark));
        let mut arrived = 0;
        let all = eventually(WAIT_LIMIT, || {
            arrived += count(&mut ports[at], &mark);
            arrived >= 100
        });
        ping_all();
        arrived += count(&mut ports[at], &mark);
        assert!(all && arrived == 100, "{mark}: {arrived} of 100 frames");
        assert_eq!(count(&mut ports[1 - at], &mark), 0, "{mark}: frames at the place that the host left");
    }
    assert!(sent.get() > 300, "{} frames", sent.get());
    for (namespace, gateway) in [&world.gateway, &second].into_iter().zip(gateways) {
        for statistic in ["rx_packets", "tx_packets"] {
            assert_eq!(namespace.statistic(&format!("wpvx{VNI}"), statistic), 0, "{statistic} of the shadow device");
        }
        gateway.program.stop();
    }
    wait_for_entry(leaf, &format!("vx{VNI}"), "00:00:00:00:00:00", None);
}
