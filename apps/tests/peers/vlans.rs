use wirepath_testlab::{Requirement, Veth, VlanTagger, skip_or_fail};

use crate::world::{Variant, WAIT_LIMIT, World, pings};

/// One cable carries an untagged network and two VLANs. Each is a segment with its own VNI. Each host reaches
/// its counterpart and no other host. The tags are in packet metadata, as the kernel's VLAN devices send
/// them.
pub(crate) fn each_vlan_its_segment(variant: Variant) {
    if let Err(why) = Requirement::Kernel(6, 6).check() {
        return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
    }
    const NETWORKS: [(Option<u16>, u32); 3] = [(None, 1000), (Some(100), 1100), (Some(200), 1200)];
    let mut world = World::new(variant, 0, 1, 1500);
    let mtu = world.inner_mtu();
    let switch = world.lab.namespace("switch");
    switch.ip("link add br0 type bridge mcast_snooping 0");
    switch.ip("link set br0 up");
    Veth::new((&world.gateway, "lan0"), (&switch, "gw")).mtu(mtu).plug();
    switch.ip("link set gw master br0");
    let mut taggers = Vec::new();
    for (n, (vlan, vni)) in NETWORKS.into_iter().enumerate() {
        let host = world.lab.namespace(&format!("host{n}"));
        let port = format!("h{n}");
        Veth::new((&host, "eth0"), (&switch, &port)).mtu(mtu).plug();
        switch.ip(&format!("link set {port} master br0"));
        // All networks use the same addresses and must not mix.
        host.ip("addr add 10.2.0.1/24 dev eth0");
        taggers.extend(vlan.map(|vlan| VlanTagger::new(&host, "eth0", vlan)));
        world.vxlan(0, &format!("vx{vni}"), vni);
        world.hosts.push(host);
    }
    let ports = |vlan: Option<u16>| match vlan {
        None => "{ port = \"lan0\" }".to_owned(),
        Some(vlan) => format!("{{ port = \"lan0\", vlan = {vlan} }}"),
    };
    // `ports` creates one port per host. Here the hosts share the first port.
    let shared = world.hosts.split_off(1);
    let mut config = world.ports();
    world.hosts.extend(shared);
    for (vlan, vni) in NETWORKS {
        config += &world.segment(&format!("net{vni}"), vni, &[ports(vlan)]);
    }
    let mut gateway = world.start_with(&config);
    let remote = &world.remotes[0];
    for (n, (vlan, vni)) in NETWORKS.into_iter().enumerate() {
        let address = format!("10.2.0.{}", 100 + n);
        remote.ip(&format!("addr add {address}/24 dev vx{vni}"));
        let host = &world.hosts[n];
        // The remote has the same network on three devices. Replies must leave by the device of this host.
        remote.ip(&format!("route replace 10.2.0.1/32 dev vx{vni} src {address}"));
        world.wait_for(&mut gateway, host, &address);
        assert!(pings(host, &address, 1200, 20), "VLAN {vlan:?}");
        // All pings run at the same time, because each waits for answers that must not come.
        let strangers: Vec<_> = (0..world.hosts.len())
            .filter(|other| *other != n)
            .map(|other| {
                (other, world.hosts[other].spawn(&["ping", "-n", "-c", "2", "-i", "0.2", "-W", "1", &address]))
            })
            .collect();
        for (other, ping) in strangers {
            assert!(!ping.wait(WAIT_LIMIT).success, "host{other} reaches {address}, which is in VLAN {vlan:?}");
        }
    }
    gateway.stop();
    drop(taggers);
}
