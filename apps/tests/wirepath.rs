//! The tool as its users run it.

use std::process::{Command, Output};

use serde_json::Value;

fn wirepath(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wirepath")).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = wirepath(arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "one object on one line");
    (output.status.code(), serde_json::from_str(&text).unwrap())
}

#[test]
fn devices_of_every_driver_are_listed() {
    let (code, report) = json(&["devices", "--json"]);
    assert_eq!(code, Some(0));
    let devices = report["devices"].as_array().unwrap();
    for driver in ["memory", "pcap"] {
        let offer = devices.iter().find(|offer| offer["driver"] == driver).unwrap();
        assert_eq!(offer["usable"], true, "needs no privilege");
    }
    for offer in devices {
        let text = if offer["usable"] == true { &offer["mode"] } else { &offer["reason"] };
        assert!(text.as_str().is_some_and(|text| !text.is_empty()), "{offer}");
    }
    assert!(report["drivers"].as_array().unwrap().iter().any(|driver| driver["driver"] == "auto"));

    let output = wirepath(&["devices"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("DEVICE") && text.contains("af_packet"), "{text}");
}

#[test]
fn doctor_s_exit_code_says_whether_anything_fails() {
    let (code, report) = json(&["doctor", "--json"]);
    let findings = report["findings"].as_array().unwrap();
    let failed = findings.iter().filter(|finding| finding["level"] == "FAIL").count();
    assert_eq!((code, &report["ok"]), (Some(i32::from(failed > 0)), &Value::Bool(failed == 0)));
    for finding in findings.iter().filter(|finding| finding["level"] != "OK") {
        assert!(finding["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{finding}");
    }
    let output = wirepath(&["doctor"]);
    assert_eq!(output.status.code(), code);
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines.lines().filter(|line| !line.trim_start().starts_with('>')).count(), findings.len(), "{lines}");
}

#[test]
fn bad_usage_is_2_and_help_teaches() {
    assert_eq!(wirepath(&["devcies"]).status.code(), Some(2));
    assert_eq!(wirepath(&[]).status.code(), Some(2));
    assert_eq!(wirepath(&["doctor", "--jsn"]).status.code(), Some(2));
    let help = wirepath(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(["devices", "doctor", "Examples:", "Exit code:"].iter().all(|word| text.contains(word)), "{text}");
    let version = String::from_utf8(wirepath(&["--version"]).stdout).unwrap();
    assert_eq!(version.trim(), concat!("wirepath ", env!("CARGO_PKG_VERSION")));
}
