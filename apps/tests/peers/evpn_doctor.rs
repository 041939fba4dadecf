//! `wirepath doctor` beside a gateway and a VXLAN device with wrong settings.

use serde_json::Value;
use wirepath_testlab::Namespace;

use crate::evpn::Fabric;
use crate::world::{VNI, Variant};

/// Returns what is found about EVPN devices, each with its remedy.
fn findings(namespace: &Namespace) -> Vec<(String, String)> {
    let outcome = namespace.run(&[env!("CARGO_BIN_EXE_wirepath"), "doctor", "--json"]);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome:?}"));
    let all = report["findings"].as_array().expect("findings").iter();
    let found = all.filter(|finding| finding["check"] == "EVPN devices" && finding["level"] == "WARN");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    found.map(|finding| (text(&finding["found"]), text(&finding["remedy"]))).collect()
}

/// Devices of the gateway have no problems. Those of somebody else have some, and the commands that the findings name
/// solve them.
pub(crate) fn wrong_devices_are_found(variant: Variant) {
    let fabric = Fabric::new(variant);
    let near = &fabric.world.gateway;
    near.sysctl("net/ipv6/conf/default/disable_ipv6", "0");
    let gateway = fabric.gateway("");
    gateway.wait("evpn", "the devices", |rows| rows[0]["state"] == "ready");
    assert_eq!(findings(near), []);
    near.ip("link add br43 type bridge");
    near.ip("link add vx43 type vxlan id 43 dstport 4789 local 10.9.0.77");
    near.ip("link set vx43 master br43 up");
    near.sysctl("net/ipv6/conf/br43/disable_ipv6", "1");
    let expected = [
        "ip link set vx43 type vxlan nolearning".to_owned(),
        "bridge link set dev vx43 learning off".to_owned(),
        "bridge link set dev vx43 neigh_suppress on".to_owned(),
        format!("ip link set vx43 type vxlan local {}", variant.vtep()),
        "sysctl net.ipv6.conf.br43.disable_ipv6=0".to_owned(),
    ];
    let found = findings(near);
    assert!(found.iter().map(|(_, remedy)| remedy).eq(&expected), "{found:?}");
    // Each command solves its problem and no other one.
    for solved in 1..=expected.len() {
        let command: Vec<&str> = expected[solved - 1].split(' ').collect();
        near.run(&command).expect();
        let left: Vec<String> = findings(near).into_iter().map(|(_, remedy)| remedy).collect();
        assert_eq!(left, expected[solved..], "after {command:?}");
    }
    // A bridge port that passes what the kernel receives, as that of a device that somebody else made. Without the
    // first of the two commands, Linux would let it pass frames again after 30 s.
    let vxlan = format!("wpvx{VNI}");
    near.ip(&format!("link set wpbr{VNI} type bridge forward_delay 1500"));
    near.run(&["bridge", "link", "set", "dev", &vxlan, "state", "3"]).expect();
    let found = findings(near);
    assert_eq!(found.len(), 1, "{found:?}");
    near.run(&["sh", "-c", &found[0].1]).expect();
    assert_eq!(findings(near), []);
    assert!(near.ip(&format!("-d -o link show wpbr{VNI}")).contains("forward_delay 0 "));
    gateway.program.stop();
}
