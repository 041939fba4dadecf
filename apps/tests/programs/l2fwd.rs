//! The program `l2fwd` from the command line, and its bridge on in-memory cables.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath::{AppSettings, Config};
use wirepath_apps::l2fwd::{Bridge, Mode};
use wirepath_packet::Pool;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::{Runtime, RuntimeConfig};
use wirepath_pmd::drivers::r#virtual::memory::Endpoint;
use wirepath_pmd::port::PortConfig;
use wirepath_settings::Source;

const WAIT_LIMIT: Duration = Duration::from_secs(60);

fn l2fwd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_l2fwd")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_demonstration_ends_by_itself_with_one_line_of_json() {
    let output = l2fwd(&["--seconds", "0.3", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert_eq!(out.lines().count(), 1);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(json["rx_packets"].as_u64().unwrap() > 1000);
    assert_eq!(json["rx_packets"], json["tx_packets"]);
    assert!(json["pps"].as_f64().unwrap() > 0.0 && json["drops"].is_object());
    assert_eq!(json["leaked_buffers"], 0);
}

#[test]
fn a_configuration_for_another_machine_is_checked_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    let port = |name: &str| format!("[[port]]\nname = \"{name}\"\ndevice = \"no-such-device\"\n");
    std::fs::write(&path, port("a") + &port("b").replace("no-such", "nor-such")).unwrap();
    let output = l2fwd(&["--config", path.to_str().unwrap(), "--check=file", "--json"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "{\"ok\":true,\"ports\":2}\n"));
    std::fs::write(&path, port("a") + "[l2fwd]\npairs = [['a', 'b']]\n").unwrap();
    assert_eq!(l2fwd(&["--config", path.to_str().unwrap(), "--check"]).status.code(), Some(2));
}

#[test]
fn a_pipe_gets_a_summary_and_no_rates() {
    let output = l2fwd(&["--seconds", "2.5"]);
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    assert!(out.starts_with("Demonstration") && out.contains("received"), "{out}");
    assert!(!out.contains("RX pps") && !out.contains('\u{1b}') && !out.contains("  rx "), "{out}");
}

#[test]
fn usage_errors_end_with_code_2_and_failures_with_1() {
    assert_eq!(l2fwd(&["--no-such-option"]).status.code(), Some(2));
    assert_eq!(l2fwd(&["--seconds", "-1"]).status.code(), Some(2));
    assert_eq!(l2fwd(&["--version"]).status.code(), Some(0));
    assert!(text(&l2fwd(&["--help"]).stdout).contains("[l2fwd]"));
    let output = l2fwd(&["--config", "/nonexistent.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/nonexistent.toml"));

    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let output = l2fwd(&["--config", &write("mtu.toml", "[[port]]\nname = 'a'\ndriver = 'null'\nmtu = 1\n")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("mtu.toml:4:7: port[0].mtu: found 1, expected an integer from 68"));
    let core = "[[port]]\nname = 'a'\ndriver = 'null'\n[workers]\ncores = [1023]\n";
    let output = l2fwd(&["--config", &write("core.toml", core)]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("core 1023 cannot be used"));
    // An error of the device is a failure of the machine, not of the configuration.
    let missing = "[[port]]\nname = 'a'\ndriver = 'pcap'\ndevice = '/nonexistent.pcap'\n";
    assert_eq!(l2fwd(&["--config", &write("missing.toml", missing)]).status.code(), Some(1));
}

#[test]
fn a_signal_stops_it_cleanly() {
    for signal in ["-INT", "-TERM"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_l2fwd"))
            .args(["--seconds", "600"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // The worker starts after the signal handlers are installed.
        let tasks = format!("/proc/{}/task", child.id());
        let started = || {
            let names = std::fs::read_dir(&tasks).unwrap().flatten();
            let mut names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
            names.any(|name| name.contains("worker"))
        };
        assert!(wirepath_testlab::eventually(std::time::Duration::from_secs(60), started));
        let mut out = child.stdout.take().unwrap();
        let mut all = String::new();
        let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        std::io::Read::read_to_string(&mut out, &mut all).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(all.contains("received"), "the summary: {all}");
    }
}

#[test]
fn example_configurations_are_valid() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.starts_with("l2fwd-") || !name.ends_with(".toml") {
            continue;
        }
        let (_, mode) = Config::read(&Source::load(&path).unwrap(), Config::tables::<Mode>(), Mode::read)
            .unwrap_or_else(|e| panic!("{e}"));
        match name.as_str() {
            "l2fwd-bridge.toml" => assert_eq!(mode, Mode::Bridge { ageing: 300 }),
            _ => assert!(matches!(mode, Mode::Pairs { .. }), "{name}"),
        }
        seen += 1;
    }
    assert!(seen >= 3);
}

fn frame(destination: u8, source: u8) -> Vec<u8> {
    let mut frame = vec![0; 60];
    let host = |n: u8| if n == 0xff { [0xff; 6] } else { [2, 0, 0, 0, 0, n] };
    frame[..6].copy_from_slice(&host(destination));
    frame[6..12].copy_from_slice(&host(source));
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

#[test]
fn the_bridge_floods_learns_and_follows_moves() {
    let ports: String = ["a", "b", "c"]
        .map(|name| format!("[[port]]\nname = '{name}'\ndriver = 'memory'\ndevice = 'bridge-{name}'\n"))
        .concat();
    let source = Source::new("test", ports);
    let document = source.parse().unwrap();
    let ports = RuntimeConfig::ports_from_settings(&document.settings()).unwrap();
    let runtime = Runtime::open(ports, RuntimeConfig { buffers: 1024, ..RuntimeConfig::default() }).unwrap();
    let pool = Pool::new("hosts", 1024).unwrap();
    let mut ends = ["a", "b", "c"].map(|name| {
        Endpoint::named(&format!("bridge-{name}"), &PortConfig::new(PortId::new(9), pool.clone())).unwrap()
    });
    let (bridge, mut control) = Bridge::new(runtime.domain(), runtime.ports(), 300);
    let mut running = runtime.start(|_| bridge.clone()).unwrap();

    // Sends a frame by port `by` until it arrives at exactly the ports `at`, because learning takes a moment.
    let mut until = |destination, source, by: usize, at: &[usize]| {
        let begin = Instant::now();
        loop {
            assert!(begin.elapsed() < WAIT_LIMIT, "{source} to {destination} by {by} does not arrive at {at:?} alone");
            assert!(ends[by].send_bytes(&frame(destination, source)));
            let first = at.first().map(|&port| ends[port].receive_within(Duration::from_secs(10)).expect("arrives"));
            assert!(first.is_none_or(|packet| packet.data() == frame(destination, source)));
            running.tick(&mut control);
            std::thread::sleep(Duration::from_millis(2));
            let others: Vec<usize> = (0..3).filter(|&port| ends[port].receive().is_some()).collect();
            if others == at.get(1..).unwrap_or_default() {
                return;
            }
            ends.iter_mut().for_each(|end| while end.receive().is_some() {});
        }
    };
    until(2, 1, 0, &[1, 2]); // 2 is unknown
    until(1, 2, 1, &[0]); // 1 is not
    until(2, 1, 0, &[1]);
    until(0xff, 1, 0, &[1, 2]);
    until(1, 2, 2, &[0]); // 2 has moved to c
    until(2, 1, 0, &[2]);
    // Frames to the own port, to a reserved address, and with a group address as source.
    let send = |frame: &[u8], ends: &mut [Endpoint; 3]| assert!(ends[0].send_bytes(frame));
    send(&frame(1, 1), &mut ends);
    let mut reserved = frame(1, 1);
    reserved[..6].copy_from_slice(&[1, 0x80, 0xc2, 0, 0, 0]);
    send(&reserved, &mut ends);
    send(&frame(2, 0xff), &mut ends);
    send(&frame(2, 1), &mut ends);
    assert!(ends[2].receive_within(WAIT_LIMIT).is_some(), "the last one passes, so the others are through");
    let summary = running.stop(&mut control);
    let drops = summary.drops();
    for reason in [DropReason::SamePort, DropReason::LinkLocalMulticast, DropReason::BadSource] {
        assert_eq!(drops.get(&reason), Some(&1), "{reason:?} in {drops:?}");
    }
    assert_eq!(summary.app.unwrap()["addresses"], 2);
    assert_eq!(summary.leaked_buffers, 0);
    drop(ends);
    assert_eq!(pool.outstanding(), 0);
}
