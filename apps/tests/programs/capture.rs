//! `wirepath capture`: files that capinfos and tshark read, limits, and bad clients. The program generates its own
//! traffic as fast as it can, so every test runs under full load.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use wirepath::control_socket::Client;
use wirepath_testlab::{Requirement, copy_program, eventually, require};

use crate::running::{Running, WAIT_LIMIT};

const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");
/// A running `l2fwd`.
pub(crate) struct Program(Running);

impl Program {
    /// Starts the program with a source at port `east`. `extra` is added to the configuration.
    pub(crate) fn start(extra: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        let text = "[[port]]\nname = 'east'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n\
                    [[port]]\nname = 'west'\ndriver = 'null'\n[control]\nsocket = 'a.sock'\n";
        Self(Running::start(folder, L2FWD, &format!("{text}{extra}"), "a.sock"))
    }

    /// Starts the program on an emulated NIC that receives datagrams from ports 1024 on to port 9, with port `east` on
    /// it.
    pub(crate) fn on_nic(extra: &str) -> Self {
        let topology = "[[device]]\nkind = 'mlx5'\nname = 'mlx5_0'\n[[device.port]]\nlink = 'generator'\n";
        let text = "[[port]]\nname = 'east'\ndriver = 'mlx5'\ndevice = 'mlx5_0'\n\
                    [[port]]\nname = 'west'\ndriver = 'null'\n[control]\nsocket = 'a.sock'\n";
        Self(Running::start_emulated(L2FWD, topology, &format!("{text}{extra}"), "a.sock"))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.socket()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// Returns the command `wirepath NAME --socket ...`.
    pub(crate) fn tool(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(WIREPATH);
        command.arg(name).arg("--socket").arg(self.socket()).args(arguments);
        command
    }

    /// Number of packets that port `east` has received.
    fn received(&self) -> u64 {
        let rows = Client::connect(&self.socket()).unwrap().show("ports", &["port=east".to_owned()], None).unwrap();
        let column = rows.columns.iter().position(|name| name == "rx_packets").unwrap();
        rows.rows[0][column].as_u64().unwrap()
    }

    /// Asserts that packets flow.
    #[track_caller]
    pub(crate) fn assert_forwards(&self) {
        let before = self.received();
        assert!(eventually(WAIT_LIMIT, || self.received() > before + 10_000));
    }

    /// Asserts that four captures can begin, so that no other one is left.
    #[track_caller]
    fn assert_no_capture(&self) {
        let begin = || -> Vec<UnixStream> {
            (0..4).filter_map(|_| begin(&self.socket(), &json!({ "request": "capture", "rate": 1 })).ok()).collect()
        };
        assert!(eventually(WAIT_LIMIT, || begin().len() == 4));
    }

    /// Stops the program and returns its summary.
    pub(crate) fn stop(self) -> Value {
        self.0.stop()
    }
}

/// Begins a capture by a request, and returns the connection or the error.
fn begin(socket: &Path, request: &Value) -> Result<UnixStream, String> {
    let mut stream = wirepath_control_socket::connect(socket, WAIT_LIMIT).unwrap();
    stream.write_all(format!("{request}\n").as_bytes()).unwrap();
    // One byte at a time, so that nothing behind the line is taken.
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let answer: Value = serde_json::from_slice(&line).unwrap();
    match answer["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(stream),
    }
}

pub(crate) fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr).into_owned())
}

/// Returns fields of all packets of a file, as tshark reads them.
fn tshark(file: &Path, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    command.args(["-n", "-T", "fields", "-r"]).arg(file);
    fields.iter().for_each(|field| {
        command.args(["-e", field]);
    });
    let (code, out, error) = run(&mut command);
    assert_eq!(code, Some(0), "{error}");
    out.lines().map(str::to_owned).collect()
}

fn capinfos(file: &Path) -> String {
    let (code, out, error) = run(Command::new("capinfos").arg(file));
    assert_eq!((code, error.as_str()), (Some(0), ""), "the file is whole");
    out
}

#[test]
fn files_have_ports_directions_and_statistics() {
    require!(Requirement::Program("tshark"), Requirement::Program("capinfos"));
    let program = Program::start("");
    let file = program.path("a.pcapng");
    let arguments = ["-w", file.to_str().unwrap(), "-n", "20000", "--json"];
    let (code, out, error) = run(&mut program.tool("capture", &arguments));
    assert_eq!(code, Some(0), "{error}");
    let summary: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&summary["captured"], &summary["end"]), (&json!(20_000), &json!("count")));
    let infos = capinfos(&file);
    for text in ["Wireshark/... - pcapng", "nanoseconds (9)", "Name = east", "Name = west", "Name = program"] {
        assert!(infos.contains(text), "{text}: {infos}");
    }
    assert_eq!(infos.matches("Number of stat entries = 1").count(), 3, "{infos}");
    let packets = tshark(&file, &["frame.interface_name", "frame.packet_flags_direction", "frame.len", "udp.dstport"]);
    assert_eq!(packets.len(), 20_000);
    let count = |line: &str| packets.iter().filter(|packet| *packet == line).count();
    let (rx, tx) = (count("east\t0x00000001\t64\t2000"), count("west\t0x00000002\t64\t2000"));
    assert!(rx > 100 && tx > 100 && rx + tx == 20_000, "{rx} {tx} {}", packets[0]);
    // A program that is slower than the source leaves packets out, and forwards on.
    assert!(summary["left_out"]["queue_full"].as_u64().unwrap() > 0, "{summary}");
    program.assert_forwards();
    program.stop();
}

#[test]
fn options_select_and_limit() {
    require!(Requirement::Program("tshark"), Requirement::Program("capinfos"));
    let program = Program::start("[[rule]]\nrule = 'ingress: port id east / udp src 1024 => drop'\n");
    let file = program.path("a.pcapng");
    let capture = |arguments: &[&str]| {
        let arguments = [&["-w", file.to_str().unwrap(), "--json"], arguments].concat();
        let (code, out, error) = run(&mut program.tool("capture", &arguments));
        assert_eq!(code, Some(0), "{error}");
        capinfos(&file);
        serde_json::from_str::<Value>(&out).unwrap()
    };
    // The only flow of the source is dropped by the rule.
    let summary = capture(&["--drops", "-n", "50", "--snaplen", "20"]);
    assert_eq!(summary["captured"], 50);
    let text = "east\t64\t20\trule_drop: a rule drops the packet";
    let fields = ["frame.interface_name", "frame.len", "frame.cap_len", "frame.comment"];
    assert_eq!(tshark(&file, &fields), vec![text; 50]);
    assert_eq!(capture(&["--drops=no_buffer", "--seconds", "0.2"])["captured"], 0);
    assert_eq!(capture(&["--tx", "--seconds", "0.2"])["captured"], 0);
    assert_eq!(capture(&["--rx", "--port", "west", "--seconds", "0.2"])["captured"], 0);
    assert_eq!(capture(&["--rx", "--rule", "tcp", "--seconds", "0.2"])["captured"], 0);
    assert_eq!(capture(&["--rx", "--rule", "port id east / ipv4 / udp dst 2000", "-n", "70"])["captured"], 70);
    let slow = capture(&["--rx", "--rate", "100", "--seconds", "1"]);
    let captured = slow["captured"].as_u64().unwrap();
    assert!((11..2000).contains(&captured) && slow["left_out"]["rate"].as_u64().unwrap() > 1000, "{slow}");
    let small = capture(&["--rx", "--bytes", "10000"]);
    assert_eq!(small["end"], "bytes");
    let statistics = 600;
    let len = std::fs::metadata(&file).unwrap().len();
    assert!((9_000..10_000 + statistics).contains(&len), "{len}");
    let timed = capture(&["--rx", "--seconds", "0.3", "--rate", "10"]);
    assert_eq!(timed["end"], "seconds");
    program.stop();
}

#[test]
fn a_signal_leaves_a_whole_file_and_a_pipe_is_live() {
    require!(Requirement::Program("tshark"), Requirement::Program("capinfos"));
    let program = Program::start("");
    let file = program.path("a.pcapng");
    let mut tool = program.tool("capture", &["-w", file.to_str().unwrap()]);
    let mut child = tool.stderr(Stdio::piped()).spawn().unwrap();
    assert!(eventually(WAIT_LIMIT, || std::fs::metadata(&file).is_ok_and(|data| data.len() > 100_000)));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{error}");
    assert!(error.contains(" packets captured, ") && error.contains(" left out ("), "{error}");
    assert_eq!(capinfos(&file).matches("Number of stat entries = 1").count(), 3);

    // tshark shows packets while the capture runs.
    let mut tool = program.tool("capture", &["-w", "-", "--rate", "20"]);
    let mut capture = tool.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut command = Command::new("tshark");
    command.args(["-l", "-n", "-r", "-", "-T", "fields", "-e", "frame.interface_name"]);
    command.stdin(capture.stdout.take().unwrap()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut reader = command.spawn().unwrap();
    // The command holds the other end of the pipe.
    drop(command);
    let mut lines = BufReader::new(reader.stdout.take().unwrap()).lines();
    for _ in 0..5 {
        let line = lines.next().unwrap().unwrap();
        assert!(["east", "west"].contains(&line.as_str()), "{line}");
    }
    // The end of the reader ends the capture.
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert!(eventually(WAIT_LIMIT, || capture.try_wait().unwrap().is_some()));
    assert_eq!(capture.wait().unwrap().code(), Some(0));
    program.assert_no_capture();
    program.stop();
}

#[test]
fn the_end_of_the_program_completes_the_file() {
    require!(Requirement::Program("capinfos"));
    let program = Program::start("");
    let file = program.path("a.pcapng");
    let mut child = program.tool("capture", &["-w", file.to_str().unwrap(), "--rate", "1000", "--json"]);
    let child = child.stdout(Stdio::piped()).spawn().unwrap();
    assert!(eventually(WAIT_LIMIT, || std::fs::metadata(&file).is_ok_and(|data| data.len() > 1000)));
    let keep = tempfile::tempdir().unwrap();
    let kept = keep.path().join("a.pcapng");
    std::fs::hard_link(&file, &kept).unwrap();
    let summary = program.stop();
    assert_eq!(summary["leaked_buffers"], 0);
    let output = child.wait_with_output().unwrap();
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &figures["end"]), (Some(0), &json!("stop")));
    assert_eq!(capinfos(&kept).matches("Number of stat entries = 1").count(), 3);
}

#[test]
fn clients_that_die_or_do_not_read_hold_nothing() {
    let program = Program::start("");
    let socket = program.socket();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut begun = 0;
    for _ in 0..200 {
        let points = if random.bool() { json!(["rx"]) } else { json!(["rx", "tx", "drops"]) };
        let mut request = json!({ "request": "capture", "points": points });
        if random.bool() {
            request["pattern"] = "udp".into();
        }
        // Dead clients may occupy their places for some milliseconds.
        let Ok(mut stream) = begin(&socket, &request) else { continue };
        begun += 1;
        let mut bytes = vec![0; random.usize(0..200_000)];
        stream.read_exact(&mut bytes).unwrap();
    }
    assert!(begun >= 50, "{begun}");
    program.assert_no_capture();
    // A client that does not read.
    let mut deaf = None;
    // The captures before it may occupy their places for some milliseconds.
    let is_begun = eventually(WAIT_LIMIT, || {
        deaf = begin(&socket, &json!({ "request": "capture" })).ok();
        deaf.is_some()
    });
    assert!(is_begun);
    let ended = Instant::now();
    program.assert_forwards();
    assert!(Client::connect(&socket).unwrap().show("ports", &[], None).is_ok());
    program.assert_no_capture();
    assert!(ended.elapsed() < WAIT_LIMIT);
    drop(deaf);
    let summary = program.stop();
    assert_eq!((&summary["leaked_buffers"], &summary["in_flight"]), (&json!(0), &json!(0)));
}

#[test]
fn wrong_requests_are_refused_with_the_reason() {
    let program = Program::start("");
    let socket = program.socket();
    let most = u64::MAX;
    for (key, value, why) in [
        (
            "count",
            serde_json::from_str("18446744073709551616").unwrap(),
            "count: found 1.8446744073709552e+19, expected a",
        ),
        ("count", json!(0), "count: found 0, expected a number from 1 to 18446744073709551615"),
        ("count", json!(-1), "count: found -1"),
        ("snap", json!(0), "snap: found 0, expected a number from 1 to 262144"),
        ("snap", json!(most), "snap: found 18446744073709551615"),
        ("rate", json!("x"), "rate: found \"x\""),
        ("bytes", json!(0.5), "bytes: found 0.5"),
        ("seconds", json!(1e300), "seconds: found 1e+300"),
        ("seconds", json!(-1), "seconds: found -1"),
        ("points", json!(["rx", "xt"]), "points: expected a list of \"rx\", \"tx\" and \"drops\""),
        ("points", json!([]), "points: expected a list"),
        ("reason", json!("no_bufer"), "did you mean \"no_buffer\"?"),
        ("port", json!("north"), "port: there is no port \"north\"; there are east, west"),
        ("pattern", json!("udp dst x"), "pattern: column 9: "),
        ("pattern", json!("udp => count, drop"), "pattern: column "),
        ("pattern", json!("udp".repeat(7_000)), "a rule has at most 16384 bytes"),
        ("file", json!("/etc/passwd"), "capture: unknown key \"file\""),
    ] {
        let mut request = json!({ "request": "capture" });
        request[key] = value;
        let error = begin(&socket, &request).expect_err(key);
        assert!(error.contains(why), "{key}: {error}");
    }
    let large = json!({ "request": "capture", "rate": most, "count": most, "bytes": most, "seconds": 1e6 });
    assert!(begin(&socket, &large).is_ok(), "large numbers are no error");
    let (code, _, error) = run(&mut program.tool("capture", &["-w", "-", "--json"]));
    assert!(code == Some(2) && error.contains("both use standard output"), "{error}");
    let (code, _, error) = run(&mut program.tool("capture", &["-w", "/x/y", "-n", "18446744073709551616"]));
    assert!(code == Some(2) && error.contains("18446744073709551616"), "{error}");
    let (code, _, error) = run(&mut program.tool("capture", &["-w", "/does/not/exist"]));
    assert!(code == Some(1) && error.contains("/does/not/exist: No such file"), "{error}");
    program.assert_no_capture();
    program.stop();
}

#[test]
fn four_captures_run_at_a_time() {
    let program = Program::start("");
    let request = json!({ "request": "capture", "rate": 10 });
    let four: Vec<UnixStream> = (0..4).map(|_| begin(&program.socket(), &request).unwrap()).collect();
    let error = begin(&program.socket(), &request).unwrap_err();
    assert_eq!(error, "4 captures run already, and no more may run at a time");
    program.assert_forwards();
    drop(four);
    program.assert_no_capture();
    program.stop();
}

#[test]
fn packets_are_shown_to_users_that_may_change_only() {
    require!(Requirement::Root);
    const NOBODY: u32 = 65_534;
    let program = Program::start("mode = 0o666\n");
    let tools = tempfile::tempdir().unwrap();
    std::fs::set_permissions(&tools, PermissionsExt::from_mode(0o755)).unwrap();
    let tool = tools.path().join("wirepath");
    copy_program(WIREPATH, &tool);
    let as_nobody = |arguments: &[&str]| {
        let mut command = Command::new(&tool);
        command.args(arguments).arg("--socket").arg(program.socket()).uid(NOBODY).gid(NOBODY);
        run(&mut command)
    };
    assert_eq!(as_nobody(&["show", "ports"]).0, Some(0), "it may look");
    for arguments in [&["capture", "-w", "/tmp/x.pcapng"][..], &["trace", "-n", "1"]] {
        let (code, _, error) = as_nobody(arguments);
        let why = "user 65534 may not change this program ([control] change = \"owner\")";
        assert!(code == Some(2) && error.contains(why), "{error}");
    }
    program.stop();
}
