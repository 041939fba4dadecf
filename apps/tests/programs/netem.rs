//! `wirepath pktgen` and `wirepath ndr` measure a network whose faults are known: tc-netem(8) in a guest.
//!
//! ```text
//! pktgen east --- TAP --- eth0 | bridge of the guest | eth1 (netem) --- TAP --- west pktgen
//! ```
//!
//! netem counts what it drops and sends, so counts are compared exactly. Its random choices are compared with their
//! mean, within five standard deviations.

use serde_json::Value;
use wirepath_testlab::{Lab, LinuxGuest, Namespace, Requirement, require};

use crate::ndr::BUCKET;

const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");
/// Packets of a run.
const COUNT: f64 = 4000.0;

/// A bridge in a guest, between interfaces of one namespace.
struct Network {
    _lab: Lab,
    host: Namespace,
    guest: LinuxGuest,
}

/// Counters of netem.
struct Counts {
    sent: f64,
    dropped: f64,
}

impl Network {
    fn new(name: &str) -> Self {
        let lab = Lab::new(name);
        let host = lab.namespace("host");
        for tap in ["east", "west"] {
            host.ip(&format!("tuntap add {tap} mode tap"));
            // Room for the packets of some seconds, in which the guest may have no processor.
            host.ip(&format!("link set {tap} txqueuelen 10000 up"));
        }
        let mut guest = LinuxGuest::boot(&host, &["east", "west"], &["tc"]);
        // Nothing but the packets of the test passes.
        guest.sh("
            modprobe ipv6
            sysctl -w net.ipv6.conf.all.disable_ipv6=1
            ip link add br0 type bridge forward_delay 0 mcast_snooping 0
            for port in eth0 eth1; do ip link set $port master br0 up; done
            ip link set br0 up");
        Self { _lab: lab, host, guest }
    }

    /// Makes the network do this, and nothing that it did before.
    fn set(&mut self, options: &str) {
        self.guest.sh(&format!(
            "tc qdisc del dev eth1 root 2>/dev/null; tc qdisc add dev eth1 root netem limit 10000 {options}"
        ));
    }

    fn counts(&mut self) -> Counts {
        let json: Value = serde_json::from_str(&self.guest.sh("tc -s -j qdisc show dev eth1")).expect("JSON of tc");
        let number = |key: &str| json[0][key].as_f64().unwrap_or_else(|| panic!("{key}: {json}"));
        Counts { sent: number("packets"), dropped: number("drops") }
    }

    /// Sends packets through the network, and returns what was measured.
    fn measure(&self, more: &[&str]) -> Value {
        let ports = ["--tx", "af_packet:east", "--rx", "af_packet:west", "--no-self-check"];
        let load = ["--rate", "1000", "--count", "4000", "--drain", "2"];
        let run = self.host.run(&[&[WIREPATH, "--json", "-q", "pktgen"], &ports[..], &load, more].concat());
        let json: Value = serde_json::from_str(&run.expect()).expect("JSON of pktgen");
        let result = json["result"].clone();
        assert_eq!(number(&result, "sent"), COUNT, "{result}");
        result
    }
}

#[track_caller]
fn number(json: &Value, key: &str) -> f64 {
    json[key].as_f64().unwrap_or_else(|| panic!("{key}: {json}"))
}

/// Asserts that this share of all packets was chosen.
#[track_caller]
fn assert_share(chosen: f64, share: f64, result: &Value) {
    let deviation = (COUNT * share * (1.0 - share)).sqrt();
    assert!((chosen - COUNT * share).abs() < 5.0 * deviation, "{chosen} of {COUNT}, expected {share}: {result}");
}

#[test]
fn guest_netem_is_measured() {
    require!(all Requirement::GUEST);
    let mut network = Network::new("netem");

    network.set("");
    let plain = network.measure(&[]);
    let faults = |result: &Value| ["lost", "duplicates", "reordered", "corrupt"].map(|key| number(result, key));
    assert_eq!(faults(&plain), [0.0; 4], "{plain}");
    assert_eq!(network.counts().sent, COUNT);

    network.set("loss 5%");
    let result = network.measure(&[]);
    let counts = network.counts();
    let expected = [counts.dropped, 0.0, 0.0, 0.0];
    assert_eq!((faults(&result), number(&result, "received")), (expected, counts.sent), "{result}");
    assert_share(counts.dropped, 0.05, &result);

    network.set("duplicate 10%");
    let result = network.measure(&[]);
    let copies = network.counts().sent - COUNT;
    assert_eq!(faults(&result), [0.0, copies, 0.0, 0.0], "{result}");
    assert_share(copies, 0.1, &result);

    // Each packet waits for 40 ms. The guest itself needs the time of the first run.
    network.set("delay 40ms");
    let result = network.measure(&[]);
    let delay = |result: &Value, key: &str| number(&result["latency_ns"], key) / 1e6;
    assert_eq!(faults(&result), [0.0; 4], "{result}");
    assert!(delay(&result, "min") >= 40.0, "{result}");
    let added = delay(&result, "min") - delay(&plain, "min");
    assert!((39.0..46.0).contains(&added), "{added} ms: {result}, {plain}");

    // A quarter overtakes the packets of the last 200 ms. RFC 4737 counts those that arrive after a later one.
    network.set("delay 200ms reorder 25%");
    let result = network.measure(&["--reorder-threshold", "1000"]);
    assert_eq!(faults(&result)[..2], [0.0; 2], "{result}");
    assert_share(number(&result, "reordered"), 0.75, &result);
    // Those that overtake are early, and the others are late (RFC 5236).
    let density = &result["reorder_density"];
    let entries = density["density"].as_array().expect("a density").iter();
    let early = entries.filter(|entry| number(entry, "displacement") < 0.0);
    assert_share(early.map(|entry| number(entry, "packets")).sum(), 0.25, &result);
    assert_eq!(density["left_out"], 0, "{result}");
}

#[test]
fn guest_rate_of_netem_is_found() {
    require!(all Requirement::GUEST);
    let mut network = Network::new("ndr-netem");
    // netem counts 1000 bytes of each frame. Besides the rate, it passes the 100 packets of its queue in each trial.
    network.set("rate 8mbit limit 100");
    let goals = ["--allow-noise", "--loss-ratio", "0", "--loss-ratio", "20%", "--latency-seconds", "0.5"];
    let passed = 1000.0 + 100.0 / 0.5;
    let mut last = Value::Null;
    // A guest without a processor for 0.1 s loses packets, so a search may fail on a busy machine.
    let is_found = (0..4).any(|_| {
        let run = network.host.run(&[&[WIREPATH], &BUCKET[..], &goals].concat());
        last = serde_json::from_str(&run.expect()).expect("JSON of ndr");
        let found = last["searches"][0]["goals"].as_array().expect("goals").iter().zip([passed, passed / 0.8]);
        found.clone().count() == 2
            && found.into_iter().all(|(goal, truth)| {
                goal["state"] == "reached"
                    && number(goal, "width") <= 0.04 + 1e-9
                    && number(goal, "lower_pps") <= truth * 1.04
                    && number(goal, "upper_pps") >= truth * 0.96
            })
    });
    assert!(is_found, "{passed}: {last}");
}
