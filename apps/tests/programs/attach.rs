//! The subcommand `wirepath attach` on a port of a forwarding program: the frames that it sends, and the
//! effects of killing it. The tests need no privilege.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use wirepath_nic_emulator::launch::{self, Launch};
use wirepath_pmd::drivers::r#virtual::pcap::{Format, Precision, Reader, Writer};
use wirepath_testlab::{Requirement, eventually, require};

const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// Number of forwarded frames, which are repeated.
const FLOWS: u16 = 64;

/// Writes a capture of UDP frames one millisecond apart, identified by their source ports.
fn traffic(path: &Path) {
    let mut writer = Writer::new(File::create(path).unwrap(), Format::Pcap, Precision::Nano, 2000, "test").unwrap();
    for flow in 0..FLOWS {
        let mut frame = vec![2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0];
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(flow.to_be_bytes());
        frame.extend([0x12, 0xb5, 0, 26, 0, 0]);
        frame.resize(60, 7);
        writer.write(u64::from(flow) * 1_000_000, std::iter::once(&frame[..]), frame.len()).unwrap();
    }
    writer.flush().unwrap();
}

/// Returns what left the NIC: the source ports of forwarded frames in order, and the lengths of the frames of
/// attached processes.
fn left(path: &Path) -> (Vec<u16>, Vec<usize>) {
    let mut reader = Reader::new(File::open(path).unwrap()).unwrap();
    let (mut forwarded, mut attached) = (Vec::new(), Vec::new());
    // The file is still being written, so its last frame may be incomplete.
    while let Ok(Some(record)) = reader.next() {
        match record.data[12..14] {
            [0x88, 0xb5] => attached.push(record.data.len()),
            _ => forwarded.push(u16::from_be_bytes([record.data[34], record.data[35]])),
        }
    }
    (forwarded, attached)
}

fn start(nics: &Launch, program: &str, arguments: &[&str]) -> Child {
    nics.command(program).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs the program to its end.
fn attach(nics: &Launch, socket: &Path, arguments: &[&str]) -> Output {
    let all = [&["attach", socket.to_str().unwrap()], arguments].concat();
    start(nics, env!("CARGO_BIN_EXE_wirepath"), &all).wait_with_output().unwrap()
}

fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn killed_and_attached_again(driver: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (config, socket, capture) = (file("l2fwd.toml"), file("port.sock"), file("left.pcap"));
    traffic(&file("in.pcap"));
    let nics = launch::prepare(&format!(
        "[[device]]\nkind = '{driver}'\nname = 'dut'\n[[device.port]]\nlink = 'pcap:{}'\n",
        capture.display()
    ));
    let text = format!(
        "[[port]]\nname = 'replay'\ndriver = 'pcap'\n[port.pcap]\nread = '{}'\ntiming = 'original'\nloop = 0\n\
         [[port]]\nname = 'nic'\ndriver = '{driver}'\ndevice = 'dut'\n[port.{driver}]\nattach = '{}'\n\
         attach_tx_queues = 2\n\
         attach_rx_queues = 1\n[pool]\nshared = true\n[l2fwd]\npairs = [['replay', 'nic']]\n",
        file("in.pcap").display(),
        socket.display()
    );
    std::fs::write(&config, text).unwrap();
    let l2fwd = start(&nics, env!("CARGO_BIN_EXE_l2fwd"), &["--config", config.to_str().unwrap(), "--json"]);
    assert!(eventually(WAIT_LIMIT, || socket.exists()));
    let status = || json(&attach(&nics, &socket, &["--json"]))["port"].clone();
    let forwards = || {
        let before = left(&capture).0.len();
        assert!(eventually(WAIT_LIMIT, || left(&capture).0.len() > before + 100), "it goes on");
    };
    forwards();
    let seen = attach(&nics, &socket, &[]);
    let shown = String::from_utf8_lossy(&seen.stdout).into_owned();
    let expected = format!("dut, driver {driver}, MTU 1500, of process {}", l2fwd.id());
    assert!(seen.status.success() && shown.contains(&expected), "{seen:?}");
    assert!(shown.contains("attached: 0 processes now, 0 so far, 0 of them without detaching"), "{shown}");

    // The frame limit is never reached; the process is killed while it sends.
    let forever = u64::MAX.to_string();
    let mut killed = start(
        &nics,
        env!("CARGO_BIN_EXE_wirepath"),
        &["attach", socket.to_str().unwrap(), "--transmit", &forever, "--receive", &forever],
    );
    assert!(eventually(WAIT_LIMIT, || left(&capture).1.len() > 100));
    assert_eq!(status()["attached"], 1);
    killed.kill().unwrap();
    assert_eq!(killed.wait().unwrap().code(), None);
    assert!(eventually(WAIT_LIMIT, || status()["lost"] == 1));
    forwards();
    let again = json(&attach(&nics, &socket, &["--transmit", "500", "--receive", "1", "--size", "1200", "--json"]));
    assert_eq!(again["done"]["transmitted"], 500);

    // Bytes that are not a valid message, and requests for queues that are not offered.
    for length in [1usize, 4, 100, 5000] {
        let mut stranger = UnixStream::connect(&socket).unwrap();
        let mut bytes = vec![0; length];
        fastrand::Rng::with_seed(length as u64).fill(&mut bytes);
        let _ = stranger.write_all(&bytes);
        let _ = stranger.shutdown(Shutdown::Write);
        stranger.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
        let mut answer = Vec::new();
        let end = stranger.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        assert!(!end.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "the connection stays open; {text}");
        assert!(!text.contains("Attached"), "{text}");
    }
    forwards();
    let port = status();
    let counts = ["attached", "attached_ever", "lost"].map(|name| port[name].as_u64().unwrap());
    assert_eq!(counts, [0, 2, 1], "{port}");

    kill_process(Pid::from_child(&l2fwd), Signal::TERM).unwrap();
    let output = l2fwd.wait_with_output().unwrap();
    let summary = json(&output);
    let counters = &summary["ports"][1]["device_counters"];
    for (name, value) in [("attachments", 2), ("attachments_lost", 1), ("queue_resets", 0), ("device_resets", 0)] {
        assert_eq!(counters[name], value, "{name}: {counters}");
    }
    assert_eq!((&summary["leaked_buffers"], &summary["rx_packets"]), (&Value::from(0), &summary["tx_packets"]));
    assert!(summary["drops"].as_object().unwrap().values().all(|count| *count == 0), "{summary}");
    let (forwarded, attached) = left(&capture);
    assert_eq!(summary["tx_packets"], forwarded.len(), "{summary}");
    let in_order = forwarded.iter().enumerate().all(|(n, flow)| n % usize::from(FLOWS) == usize::from(*flow));
    assert!(in_order, "a frame was lost, or came twice");
    assert_eq!(attached.iter().filter(|length| **length == 1200).count(), 500);
    assert!(!socket.exists());
    let refused = attach(&nics, &socket, &[]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}

#[test]
fn mlx5_goes_on_when_an_attached_process_is_killed() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    killed_and_attached_again("mlx5");
}

#[test]
fn mana_goes_on_when_an_attached_process_is_killed() {
    require!(Requirement::File("/etc/libibverbs.d/mana.driver"));
    killed_and_attached_again("mana");
}
