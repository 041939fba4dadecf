//! The program `tunnel-gateway` from the command line: help, checks, exit codes, the demonstration, and the
//! examples in `configs/`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use wirepath_apps::gateway::{EXAMPLE, Setup};
use wirepath_pmd::drivers::r#virtual::pcap::Reader;
use wirepath_settings::Source;

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tunnel-gateway")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn examples() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("tunnel-gateway");
    let mut found: Vec<PathBuf> = all.filter(is_ours).collect();
    found.sort();
    found
}

#[test]
fn every_example_is_valid() {
    let examples = examples();
    assert!(examples.len() >= 3, "{examples:?}");
    for path in examples {
        let output = run(&["--config", path.to_str().unwrap(), "--check=file"]);
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        assert!(text(&output.stdout).starts_with("configuration is valid"));
    }
    Setup::read(&Source::new("the help's example", EXAMPLE)).unwrap().check_ports_used().unwrap();
}

#[test]
fn config_errors_name_the_line_and_exit_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.toml");
    for (from, to, message) in [
        ("vni = 42", "vni = 42000000", ":15:7: segment[0].vni: found 42000000, expected an integer from 0 to 16777215"),
        ("port = \"lan\"", "port = \"lam\"", "did you mean \"lan\"?"),
        ("ports = [{ port = \"lan\" }]", "ports = [{ port = \"wan\" }]", "is the underlay port"),
        ("name = \"blue\"", "nam = \"blue\"", "unknown key; did you mean \"name\"?"),
        ("device = \"eth0\"", "device = \"eth0\"\nmtu = 117", "but 117 bytes of the underlay port less 50 of headers"),
        (
            "[underlay]",
            "[[port]]\nname = \"third\"\ndevice = \"eth2\"\n[underlay]",
            "neither the underlay's nor attached",
        ),
        ("[[segment]]", "[[segment", ": "),
    ] {
        assert!(EXAMPLE.contains(from));
        std::fs::write(&path, EXAMPLE.replacen(from, to, 1)).unwrap();
        let output = run(&["--config", path.to_str().unwrap(), "--check"]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{to}: {error}");
        assert!(error.contains("bad.toml:") && error.contains(message), "{to} gave {error}");
    }
    let output = run(&["--config", "/does/not/exist.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/does/not/exist.toml"));
    assert_eq!(run(&["--check"]).status.code(), Some(2), "nothing to check");
    assert_eq!(run(&["--seconds", "0"]).status.code(), Some(2));
    let output = run(&["--seconds", "x"]);
    assert!(text(&output.stderr).contains("expected a number of seconds"), "{output:?}");
}

#[test]
fn help_shows_a_configuration_that_works() {
    let output = run(&["--help"]);
    let help = text(&output.stdout);
    assert!(output.status.success());
    for line in EXAMPLE.lines() {
        assert!(help.contains(line), "{line}");
    }
    assert!(help.contains("Exit codes"));
    assert!(run(&["--version"]).status.success());
}

#[test]
fn drops_are_captured_with_their_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (config, capture) = (folder.path().join("c.toml"), folder.path().join("drops.pcapng"));
    // Frames with a VNI that belongs to no segment.
    let text = "[[port]]\nname = 'wan'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\ncount = 100\nmac = \
    '02:00:00:00:00:01'\n\
        [port.null.vxlan]\nvni = 7\nsource_mac = '02:00:00:00:00:02'\ndestination_mac = '02:00:00:00:00:01'\n\
        source = '10.9.0.2'\ndestination = '10.9.0.1'\n\
        [[port]]\nname = 'lan'\ndriver = 'null'\n\
        [underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
        [[segment]]\nvni = 42\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
    std::fs::write(&config, text).unwrap();
    let (config, file) = (config.to_str().unwrap(), capture.to_str().unwrap());
    let output = run(&["--config", config, "--seconds", "1", "--json", "--capture-drops", file]);
    assert!(output.status.success(), "{}", text_of(&output));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["drops"]["unknown_vni"], &summary["leaked_buffers"]), (&100.into(), &0.into()), "{summary}");
    let bytes = std::fs::read(&capture).unwrap();
    let comments = bytes.windows(11).filter(|window| window == b"unknown_vni").count();
    assert_eq!(comments, 100);
    let mut reader = Reader::new(std::io::Cursor::new(bytes)).unwrap();
    let mut frames = 0;
    while let Some(record) = reader.next().unwrap() {
        assert_eq!(wirepath_wire::parse(record.data).unwrap().vni().unwrap().get(), 7);
        frames += 1;
    }
    assert_eq!(frames, 100);
    // If the file cannot be created, the program ends before anything is started.
    let output = run(&["--config", config, "--capture-drops", "/does/not/exist/x.pcapng"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_port_may_be_only_the_target_of_a_mirror() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.toml");
    let port = |name: &str, more: &str| format!("[[port]]\nname = '{name}'\ndriver = 'null'\n{more}");
    let text = port("wan", "[port.null]\nmac = '02:00:00:00:00:01'\n")
        + &port("lan", "[port.null]\nsource = 'udp4'\ncount = 100\n")
        + &port("copies", "")
        + "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
           [[segment]]\nname = 'blue'\nvni = 42\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
    let run = |text: &str| {
        std::fs::write(&config, text).unwrap();
        run(&["--config", config.to_str().unwrap(), "--seconds", "1", "--json"])
    };
    let unused = run(&text);
    assert_eq!(unused.status.code(), Some(2), "{}", text_of(&unused));
    assert!(text_of(&unused).contains("port \"copies\" is neither"), "{}", text_of(&unused));
    let output = run(&(text + "[[rule]]\nrule = 'ingress: port id lan => mirror copies'\n"));
    assert!(output.status.success(), "{}", text_of(&output));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let ports = summary["ports"].as_array().unwrap();
    let copies = ports.iter().find(|port| port["name"] == "copies").unwrap();
    assert_eq!(copies["tx_packets"], 100, "{summary}");
    // The names of ports stand beside their numbers.
    let rule = &summary["app"]["rules"][0];
    assert_eq!(rule["rule"], "ingress prio 0: port id 1 => mirror 2");
    assert_eq!(rule["text"], "ingress prio 0: port id lan => mirror copies");
    // What a start takes for the MTU is in the log.
    let log = text_of(&output);
    assert!(log.contains("port wan: MTU 1500, the default; the device has none"), "{log}");
    assert!(log.contains("segment blue: inner MTU 1450"), "{log}");
}

fn text_of(output: &Output) -> String {
    text(&output.stderr)
}

#[test]
fn the_demonstration_forwards_both_ways_with_a_summary() {
    let output = run(&["--seconds", "2", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    for key in ["rx_packets", "tx_packets", "pps"] {
        assert!(summary[key].as_f64().unwrap() > 0.0, "{key}: {summary}");
    }
    assert!(summary["drops"].is_object());
    assert_eq!(summary["leaked_buffers"], 0);
    let segment = &summary["app"]["segments"][0];
    for key in ["local_rx", "overlay_tx", "overlay_rx", "local_tx"] {
        assert!(segment[key]["packets"].as_u64().unwrap() > 0, "{key}: {segment}");
    }
    // Two addresses for each of the thousand flows, or as many as two seconds allow.
    assert!(segment["learned"].as_u64().unwrap() > 1);
    let live = run(&["--seconds", "3"]);
    let shown = text(&live.stdout);
    assert!(shown.contains("received") && shown.matches("INTO TUNNELS").count() == 1, "no rates: {shown}");
    assert!(!shown.contains("RULE"), "there are none: {shown}");
}
