//! `wirepath selftest` and `wirepath doctor --collect` on emulated NICs and interfaces: good ports pass, planted faults
//! are found.

use std::process::Command;

use serde_json::Value;
use wirepath_nic_emulator::launch;
use wirepath_testlab::{Lab, Requirement, require};

const MLX5: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");
const MANA: Requirement = Requirement::File("/etc/libibverbs.d/mana.driver");

/// Runs the self-test and returns its exit code and its report.
fn report(mut command: Command, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = command.args(["-q", "--json", "selftest"]).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}{errors}")))
}

/// Runs the self-test on emulated NICs.
fn emulated(topology: &str, arguments: &[&str]) -> (Option<i32>, Value) {
    let nics = launch::prepare(topology);
    report(nics.command(env!("CARGO_BIN_EXE_wirepath")), arguments)
}

/// Returns the features of a report with this result, and their details.
fn with_result<'r>(report: &'r Value, result: &str) -> Vec<(&'r str, &'r str)> {
    let lines = report["results"].as_array().unwrap().iter().filter(|line| line["result"] == result);
    lines.map(|line| (line["feature"].as_str().unwrap(), line["detail"].as_str().unwrap())).collect()
}

fn assert_passes(code: Option<i32>, report: &Value, passed: usize) {
    assert_eq!((code, &report["passed"]), (Some(0), &Value::Bool(true)), "{:?}", with_result(report, "fail"));
    let names: Vec<_> = with_result(report, "pass").into_iter().map(|(feature, _)| feature).collect();
    assert!(names.len() >= passed, "{} features: {names:?}", names.len());
}

const LOOPED_MLX5: &str =
    "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\nsteering = { devx = true }\n[[device.port]]\nlink = 'loop'\n";

#[test]
fn an_emulated_connectx_passes_every_feature() {
    require!(MLX5);
    let (code, report) = emulated(LOOPED_MLX5, &["mlx5:mlx50"]);
    assert_passes(code, &report, 80);
    let skipped: Vec<_> = with_result(&report, "skip").into_iter().map(|(feature, _)| feature).collect();
    assert_eq!(skipped, ["link-flap"], "the device has every feature, but no interface");
    let passed = with_result(&report, "pass");
    for feature in [
        "tso",
        "rss",
        "modes: rx_mode = 'striding', cqe_compression = 'stride'",
        "rules: match inner tcp",
        "rules: queue",
        "rules: ingress decap l3 gre",
        "rules: egress encap l2 vxlan",
        "restart",
    ] {
        assert!(passed.iter().any(|(name, _)| *name == feature), "{feature}: {passed:?}");
    }
}

#[test]
fn other_nics_pass_and_lack_features() {
    require!(MLX5, MANA);
    let mana = "[[device]]\nkind = 'mana'\nname = 'mana0'\n[[device.port]]\nlink = 'loop'\n";
    let (code, report) = emulated(mana, &["mana:mana0"]);
    assert_passes(code, &report, 8);
    assert_eq!(with_result(&report, "skip").len(), 2, "rules, link-flap: {report}");
    let (code, report) = emulated(LOOPED_MLX5, &["verbs:mlx50", "--only", "frames,tso,modes,rules"]);
    assert_passes(code, &report, 8);
    for passed in ["modes: checksums = false", "tso"] {
        assert!(with_result(&report, "pass").iter().any(|(feature, _)| *feature == passed), "{passed}: {report}");
    }
}

#[test]
fn two_ports_of_a_cable_pass_in_both_directions() {
    require!(MLX5, MANA);
    let cable = "[[device]]\nkind = 'mana'\nname = 'mana0'\n[[device.port]]\nlink = 'cable:a'\n\
        [[device]]\nkind = 'mlx5'\nname = 'mlx50'\n[[device.port]]\nlink = 'cable:a'\n";
    let (code, report) = emulated(cable, &["mlx5:mlx50", "--peer", "mana:mana0", "--mtu", "4000"]);
    assert_passes(code, &report, 12);
}

#[test]
fn interfaces_of_the_kernel_pass() {
    require!(all Requirement::LAB);
    let lab = Lab::new("selftest");
    let host = lab.namespace("host");
    host.ip("link add west type veth peer name east");
    host.ip("link set west up");
    host.ip("link set east up");
    for driver in ["af_packet", "af_xdp"] {
        let (code, report) = host.inside(|| {
            report(
                Command::new(env!("CARGO_BIN_EXE_wirepath")),
                &[&format!("{driver}:west"), "--peer", &format!("{driver}:east")],
            )
        });
        assert_passes(code, &report, 6);
        assert!(with_result(&report, "pass").iter().any(|(feature, _)| *feature == "link-flap"), "{report}");
    }
}

#[test]
fn planted_faults_are_found_with_a_counter_example() {
    require!(MLX5, MANA);
    let looped = |kind: &str, impairment: &str| {
        format!("[[device]]\nkind = '{kind}'\nname = 'nic0'\n[[device.port]]\nlink = 'loop'\n{impairment}\n")
    };
    for (impairment, word) in [
        ("corrupt = 0.02", "differs from byte"),
        ("lose = 0.05", "frame"),
        ("duplicate = 0.05", "frame"),
        ("reorder = 0.05", "differs from byte"),
    ] {
        for kind in ["mlx5", "mana"] {
            let (code, report) = emulated(&looped(kind, impairment), &[&format!("{kind}:nic0"), "--only", "frames"]);
            let failed = with_result(&report, "fail");
            assert_eq!((code, &report["passed"]), (Some(1), &Value::Bool(false)), "{kind} {impairment}");
            assert!(
                matches!(failed[..], [("frames", detail)] if detail.contains(word)),
                "{kind} {impairment}: {failed:?}"
            );
        }
    }
    // A device that calls correct checksums wrong; and one that calls wrong ones correct, after the frame of the link
    // test and the 32 correct ones. MANA may report several frames in one completion.
    for (kind, after, word) in
        [("mlx5", 0, "correct"), ("mana", 0, "correct"), ("mlx5", 33, "wrong transport checksum")]
    {
        let fault =
            format!("[[fault]]\nkind = 'hostile'\nqueue = 'rx'\nwhat = 'checksum'\nafter = {after}\ncount = 100000");
        let arguments = [&format!("{kind}:nic0"), "--only", "rx-checksums"];
        let (code, report) = emulated(&looped(kind, &fault), &arguments);
        let failed = with_result(&report, "fail");
        assert_eq!(code, Some(1), "{kind}: {report}");
        let detail = format!("{word}: the port reports");
        assert!(
            matches!(failed[..], [("rx-checksums", found)] if found.starts_with(&detail)),
            "{kind} after {after}: {failed:?}"
        );
    }
    // Rules that the kernel refuses, though the device offers them.
    let refusing = format!("{LOOPED_MLX5}[[fault]]\nkind = 'refuse'\ncommand = 'create_flow'\nafter = 40\n");
    let (code, report) = emulated(&refusing, &["verbs:mlx50", "--only", "rules"]);
    let failed = with_result(&report, "fail");
    assert_eq!(code, Some(1), "{report}");
    assert!(failed.iter().all(|(feature, _)| feature.starts_with("rules")), "{failed:?}");
    // A cable that is not plugged in.
    let (code, report) = emulated(&looped("mana", "").replace("'loop'", "'none'"), &["mana:nic0"]);
    assert_eq!(code, Some(1));
    assert!(with_result(&report, "fail")[0].0 == "link" && with_result(&report, "fail").len() == 1, "{report}");
}

#[test]
fn wrong_ports_are_refused_with_the_reason() {
    for (arguments, words) in [
        (&["nothing:eth0"][..], "there is no driver \"nothing\""),
        (&["mlx5:"], "expected a device"),
        (&["af_packet:no_such_interface"], "no_such_interface"),
        (&["a", "--only", "tso,sto"], "sto"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_wirepath")).arg("selftest").args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(words), "{arguments:?}: {errors}");
    }
}

#[test]
fn the_archive_for_a_bug_report_has_every_part() {
    require!(MANA);
    let nic = "[[device]]\nkind = 'mana'\nname = 'mana0'\n[[device.port]]\nnetdev = 'eth7'\n";
    for (topology, usable) in [(nic.to_owned(), true), (format!("{nic}[[fault]]\nkind = 'port-held'\n"), false)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.tar.gz");
        let config = folder.path().join("gateway.toml");
        std::fs::write(&config, "cores = [1]\n").unwrap();
        let nics = launch::prepare(&topology);
        let run = || {
            let mut command = nics.command(env!("CARGO_BIN_EXE_wirepath"));
            command.env("WIREPATH_SECRET", "do-not-collect").args(["doctor", "--collect"]).arg(&path);
            command.arg("--add").arg(&config).output().unwrap()
        };
        let output = run();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // A reader that is not ours.
        let show = |name: &str| {
            let name = format!("wirepath-report/{name}");
            let output = Command::new("tar").arg("-xzOf").arg(&path).arg(name).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let devices: Value = serde_json::from_str(show("devices.json").lines().next().unwrap()).unwrap();
        let offers = devices["devices"].as_array().unwrap();
        let offer = offers.iter().find(|offer| offer["driver"] == "mana" && offer["device"] == "eth7").unwrap();
        assert_eq!(offer["usable"], usable, "{offer}");
        assert!(show("doctor.json").contains("RDMA libraries"));
        assert!(show("version.txt").starts_with("wirepath "));
        assert!(show("machine/proc/version").starts_with("Linux version"));
        assert!(show("machine/sys/class/net/lo/statistics/rx_packets").trim().parse::<u64>().is_ok());
        assert_eq!(show("files/0-gateway.toml"), "cores = [1]\n");
        let all = Command::new("tar").arg("-xzOf").arg(&path).output().unwrap().stdout;
        assert!(!String::from_utf8_lossy(&all).contains("do-not-collect"));
        // Nothing is overwritten.
        let again = run();
        assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("exists"));
    }
}
