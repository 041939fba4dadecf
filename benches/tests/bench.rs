//! `wirepath-bench` as a program: its results, the machine and the disturbances in them, and what it refuses.

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use wirepath_testlab::{Lab, Requirement, require};

const BENCH: &str = env!("CARGO_BIN_EXE_wirepath-bench");
/// Options of the shortest measurement with two rounds.
const SHORT: [&str; 6] = ["--seconds", "0.04", "--rounds", "2", "--warm-up", "0.01"];

fn output(arguments: &[&str]) -> Output {
    Command::new(BENCH).arg("-q").args(arguments).output().unwrap()
}

/// Runs a short measurement and returns its result.
#[track_caller]
fn result(arguments: &[&str]) -> Value {
    let output = output(&[arguments, &SHORT, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn number(result: &Value, key: &str) -> f64 {
    result[key].as_f64().unwrap_or_else(|| panic!("{key} in {result}"))
}

/// Asserts that a result names the machine, and what disturbed the run.
#[track_caller]
fn assert_has_conditions(result: &Value) {
    assert!(number(result, "tsc_hz") > 1e8);
    let machine = &result["machine"];
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap().matches("processor\t:").count();
    assert_eq!(machine["processors"], processors);
    assert_eq!(machine["kernel"], std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim());
    assert!(number(machine, "memory_bytes") > 0.0 && !machine["processor"].as_str().unwrap().is_empty());
    assert!(number(result, "others") >= 0.0 && number(result, "steal") >= 0.0);
    for disturbance in result["disturbed"].as_array().unwrap() {
        assert!(
            !disturbance["cause"].as_str().unwrap().is_empty() && !disturbance["remedy"].as_str().unwrap().is_empty()
        );
    }
}

#[test]
fn every_result_has_rounds_and_the_machine() {
    let of_packets = ["pps", "ns_per_packet", "cycles_per_packet", "packets", "own_cycles_per_packet", "cpu_share"];
    for (arguments, keys, rounds) in [
        (&["forward", "--workers", "2"][..], &of_packets[..], "cycles"),
        (&["tunnel", "--kind", "geneve", "--direction", "decap", "--flows", "10"], &of_packets, "cycles"),
        (&["router", "--destinations", "10"], &of_packets, "cycles"),
        (
            &["rules", "--rules", "20", "--flows", "10"],
            &["one_rule_cycles", "cycles", "ratio", "miss_cycles", "bytes_per_rule", "packets"],
            "cached_cycles",
        ),
        (
            &["table", "--flows", "1000"],
            &["lookup_cycles", "insert_cycles", "worst_insert_cycles", "growing_insert_cycles", "bytes_per_key"],
            "lookup",
        ),
        (&["route", "--routes", "1000"], &["lookup_cycles", "insert_cycles", "slow_insert_cycles", "bytes"], "lookup"),
    ] {
        let result = result(arguments);
        for key in keys {
            assert!(number(&result, key) > 0.0, "{arguments:?}: {key} in {result}");
        }
        let spread = &result[rounds];
        assert_eq!(spread["rounds"], 2, "{result}");
        let [min, median, max] = ["min", "median", "max"].map(|key| number(spread, key));
        assert!(min <= median && median <= max, "{result}");
        assert!((number(spread, "spread") - (max - min) / median).abs() < 1e-9, "{result}");
        assert_has_conditions(&result);
    }
}

#[test]
fn a_disturbed_run_says_so() {
    // Two programs share one core.
    let core = ["--core", "0", "--seconds", "0.5", "--rounds", "2"];
    let mut other = Command::new(BENCH);
    let mut other = other.args(["-q", "forward"]).args(core).stdout(Stdio::null()).spawn().unwrap();
    let output = output(&[&["forward"], &core[..]].concat());
    other.wait().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(" in 2 rounds)") && text.contains("\nmachine: "), "{text}");
    let disturbed: Vec<&str> = text.lines().filter(|line| line.starts_with("disturbed: ")).collect();
    assert!(disturbed.iter().any(|line| line.contains("the program had its core for ")), "{text}");
    assert!(disturbed.iter().all(|line| line.contains("; ")), "{text}");
}

#[test]
fn packets_replace_time_and_rounds() {
    let output = output(&["forward", "--mode", "io", "--packets", "1000", "--json"]);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(number(&result, "packets") >= 1000.0 && result["cycles"]["rounds"] == 1, "{result}");
    let rules = ["rules", "--rules", "20", "--flows", "100", "--cache", "64", "--packets", "1000", "--json"];
    let rules: Value = serde_json::from_slice(&self::output(&rules).stdout).unwrap();
    assert!(number(&rules, "packets") >= 1000.0 && number(&rules, "one_rule_cycles") == 0.0, "{rules}");
}

#[test]
fn the_latency_of_stages_grows_with_their_work() {
    let p50 = |arguments: &[&str]| {
        let result = result(&[&["latency"], arguments].concat());
        assert_has_conditions(&result);
        assert_eq!(result["p50_ns"]["rounds"], 2);
        let latency = &result["latency_ns"];
        let values = ["min", "p50", "p90", "p99", "p99.9", "p99.99", "max"].map(|key| number(latency, key));
        assert!(values.is_sorted() && number(latency, "n") > 0.0, "{result}");
        number(latency, "p50")
    };
    let (io, tunnel) = (p50(&["forward", "--mode", "io"]), p50(&["tunnel", "--kind", "vxlan", "--flows", "100"]));
    assert!(tunnel > io, "{tunnel} and {io}");
}

#[test]
fn ports_of_the_kernel_are_measured_under_load() {
    require!(all Requirement::LAB);
    let lab = Lab::new("benchforward");
    let (sender, dut) = (lab.namespace("sender"), lab.namespace("dut"));
    for (near, far) in [("p0", "e0"), ("p1", "e1")] {
        lab.veth((&sender, near), (&dut, far));
    }
    let port = sender.frames("p0");
    let frames: Vec<Vec<u8>> = (0..64u8)
        .map(|flow| {
            let [mut frame, ip] =
                [vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0], vec![0x45, 0, 0, 46, 0, 0, 0, 0, 64]];
            frame.extend([&ip[..], &[17, 0, 0, 10, 0, 0, 1, 10, 0, 0, flow], &[0; 26]].concat());
            frame
        })
        .collect();
    let scale = [&["-q", "scale", "cores", "--values", "1,2", "--json", "--"][..], &SHORT].concat();
    let through = ["--through", "af_packet:e0,af_packet:e1", "--mode", "mac"];
    let mut bench = dut.spawn(&[&[BENCH], &scale[..], &through].concat());
    let mut arrived = sender.frames("p1");
    let mut has_arrived = false;
    while bench.running() {
        // A full queue refuses some of them.
        frames.iter().for_each(|frame| _ = port.send(frame));
        let changed = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        has_arrived |= arrived.drain().iter().any(|frame| frame.bytes.starts_with(&changed));
    }
    let text = bench.wait(std::time::Duration::from_secs(10)).expect();
    let result: Value = serde_json::from_str(&text).unwrap();
    let points = result["points"].as_array().unwrap();
    assert_eq!(points.len(), 2, "{result}");
    assert!(points.iter().all(|point| number(point, "pps") > 1000.0), "{result}");
    assert!(has_arrived, "frames leave at the other port");
}

#[test]
fn cabled_ports_are_measured_with_the_generator() {
    let cabled = ["--through", "memory:a,memory:b", "--generator", "memory:a,memory:b"];
    for (arguments, dropped) in [
        (&["forward", "--mode", "macswap"][..], None),
        (&["tunnel", "--flows", "100", "--segments", "2", "--remotes", "3"], Some(0)),
        (&["tunnel", "--kind", "geneve", "--direction", "decap", "--flows", "100", "--ipv6"], Some(0)),
        (&["tunnel", "--kind", "gre", "--direction", "decap"], Some(0)),
        (&["tunnel", "--direction", "both", "--flows", "100"], None),
        (&["router", "--destinations", "100", "--to", "tunnel"], Some(0)),
        (&["latency", "router", "--destinations", "100"], None),
    ] {
        let result = result(&[arguments, &cabled].concat());
        assert!(number(&result, "pps") > 1000.0, "{arguments:?}: {result}");
        // What the other end has no room for is dropped, and a generator beside the worker may fall behind.
        if let Some(dropped) = dropped {
            let allowed = number(&result, "packets") / 100.0;
            assert!(number(&result, "dropped") <= f64::from(dropped) + allowed, "{arguments:?}: {result}");
            let (busy, idle) = (number(&result, "busy_cycles_per_packet"), number(&result, "idle_share"));
            assert!(busy > 1.0 && (0.0..1.0).contains(&idle), "{arguments:?}: {result}");
        }
    }
}

#[test]
fn frames_for_a_generator_elsewhere_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("frames");
    let arguments = ["tunnel", "--kind", "gre", "--direction", "decap", "--flows", "7", "--through", "null:,null:"];
    let output = output(&[&arguments[..], &["--capture", prefix.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let file = folder.path().join("frames-b.pcap");
    let command = format!("for null:: wirepath pktgen --tx PORT --pcap {} --rate max --seconds 60\n", file.display());
    assert_eq!(text, command, "only frames from the remote");
    // The headers of the file and of each packet, and IPv4 in GRE in place of the Ethernet header of 64 bytes.
    let bytes = std::fs::read(file).unwrap();
    assert_eq!(bytes.len(), 24 + 7 * (16 + 64 - 14 + 14 + 20 + 4));
    let gre = 24 + 16 + 14;
    assert_eq!(
        (&bytes[gre - 2..gre + 1], bytes[gre + 9], &bytes[gre + 20..gre + 24]),
        (&[8, 0, 0x45][..], 47, &[0, 0, 8, 0][..])
    );
    assert!(!folder.path().join("frames-a.pcap").exists());
}

/// Asserts that ports carry what the generator sends, and that its delays are known.
#[track_caller]
fn assert_ports_are_measured(arguments: &[&str]) {
    let all = [&["latency", "ports", "--rate", "20000", "--seconds", "0.4", "--json"], arguments].concat();
    let output = output(&all);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (packets, lost) = (number(&result, "packets"), number(&result, "lost"));
    // A sender that is late leaves a part of its schedule out.
    assert!(packets > 100.0 && packets + lost <= 20_000.0 * 0.4 + 5.0, "{result}");
    assert!(lost < packets, "{result}");
    assert_eq!(result["ports"].as_array().unwrap().len(), 4, "{result}");
    assert_eq!(result["p50_ns"]["rounds"], 5, "{result}");
    assert!(number(&result["own_error_ns"], "p50") > 0.0, "{result}");
    assert!(number(&result["latency_ns"], "min") > 0.0, "{result}");
    assert_has_conditions(&result);
}

#[test]
fn the_latency_of_cables_in_memory_is_measured() {
    assert_ports_are_measured(&[]);
    assert_ports_are_measured(&["--idle", "sleep", "--flows", "100", "--size", "512"]);
    let cables = ["--generator", "memory:a,memory:b", "--through", "memory:a,memory:b"];
    assert_ports_are_measured(&cables);
}

#[test]
fn the_latency_of_veth_ports_is_measured() {
    require!(Requirement::Root, Requirement::Program("ip"), Requirement::Program("unshare"));
    assert_ports_are_measured(&["--driver", "af-packet"]);
    assert_ports_are_measured(&["--driver", "af-xdp"]);
}

#[test]
fn the_cost_by_size_has_a_row_for_each_value() {
    let scale = |what: &str, values: &str, more: &[&str]| {
        let quick = ["--", "--seconds", "0.02", "--rounds", "1", "--warm-up", "0"];
        let output = output(&[&["scale", what, "--values", values, "--json"], &quick[..], more].concat());
        assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_has_conditions(&result);
        let points = result["points"].as_array().unwrap();
        assert!(points.iter().all(|point| number(point, "cycles_per_packet") > 0.0), "{result}");
        assert_eq!(number(&points[0], "ratio"), 1.0);
        points.iter().map(|point| point["value"].to_string()).collect::<Vec<_>>().join(",")
    };
    for (what, values, more) in [
        ("cores", "1,2", &["--mode", "io"][..]),
        ("queues", "1,4", &[]),
        ("flows", "1,100", &["--kind", "gretap"]),
        ("tunnels", "1,10", &["--flows", "100"]),
        ("segments", "1,10", &["--flows", "100"]),
        ("routes", "1,100", &["--ipv6"]),
        ("rules", "1,100", &["--flows", "100"]),
    ] {
        assert_eq!(scale(what, values, more), values, "{what}");
    }
}

#[test]
fn impossible_measurements_are_refused() {
    for (arguments, error) in [
        (&["forward", "--rounds", "0"][..], "0 is not in 1..=1000"),
        (&["forward", "--seconds", "0"], "expected a number from 0.01 to 3600"),
        (&["forward", "--warm-up", "61"], "expected a number from 0 to 60"),
        (&["forward", "--packets", "5", "--rounds", "2"], "cannot be used with"),
        (&["forward", "--workers", "200", "--queues", "2"], "400 queues; at most 256 are possible"),
        (&["forward", "--through", "null:"], "--through: expected two ports"),
        (&["forward", "--through", "nul:a,nul:b"], "there is no driver \"nul\""),
        (&["forward", "--through", "null:,null:", "--driver", "null"], "cannot be used with"),
        (&["tunnel", "--through", "null:,null:", "--generator", "null:"], "--generator: expected two ports"),
        (&["tunnel", "--generator", "null:,null:"], "--through"),
        (
            &["router", "--through", "null:,null:", "--generator", "null:,null:", "--packets", "5"],
            "cannot be used with",
        ),
        (&["router", "--capture", "/tmp/none"], "--through"),
        (&["scale", "flows", "--", "--through", "null:,null:", "--capture", "/nowhere/x"], "/nowhere/x-a.pcap"),
        (&["forward", "--core", "1000"], "core 1000"),
        (&["latency", "forward", "--packets", "5"], "latency is measured for a time"),
        (&["latency", "ports", "--generator", "memory:a,memory:b"], "--through"),
        (&["latency", "ports", "--generator", "memory:a", "--through", "memory:b"], "two ports each"),
        (&["latency", "ports", "--generator", "nul:a,nul:b", "--through", "nul:a,nul:b"], "there is no driver \"nul\""),
        (&["latency", "ports", "--rate", "0"], "expected `max`, or a number above 0"),
        (&["scale", "flows", "--values", "0"], "0 is not in 1.."),
        (&["scale", "flows", "--values", "5000000"], "5000000 is not in 1..=4000000"),
        (&["scale", "flows", "--", "--flow", "5"], "unexpected argument '--flow'"),
    ] {
        let output = output(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(error), "{arguments:?}: {text}");
    }
}
