//! Privileges of programs whose ports need none. The tests run with and without root.

use std::process::Command;
use std::time::Duration;

use rustix::io::Errno;
use wirepath::prelude::*;
use wirepath::{AppArguments, cli};

use crate::running::Running;

const PORTS: &str = "\
[[port]]
name = 'a'
driver = 'null'
[port.null]
source = 'udp4'
[[port]]
name = 'b'
driver = 'null'
[control]
socket = 'control.sock'
";

/// Returns a field of `/proc/PID/status`.
fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.unwrap_or_else(|| panic!("no {name}: {status}")).trim()
}

#[test]
fn ports_without_devices_need_no_privilege() {
    for binary in [env!("CARGO_BIN_EXE_l2fwd"), env!("CARGO_BIN_EXE_tunnel-gateway")] {
        let gateway = "[underlay]\nport = 'b'\naddresses = ['10.9.0.1/24']\n[[segment]]\nvni = 1\n\
                       remotes = ['10.9.0.2']\nports = [{ port = 'a' }]\n";
        let text = if binary.ends_with("l2fwd") { PORTS.to_owned() } else { format!("{PORTS}{gateway}") };
        let program = Running::start(tempfile::tempdir().unwrap(), binary, &text, "control.sock");
        // The socket listens before the ports are started.
        assert!(wirepath_testlab::eventually(crate::running::WAIT_LIMIT, || {
            field(&status(&program), "Seccomp") == "2"
        }));
        let status = status(&program);
        let none = "0000000000000000";
        for (name, value) in [("CapPrm", none), ("CapEff", none), ("CapAmb", none), ("NoNewPrivs", "1")] {
            assert_eq!(field(&status, name), value, "{binary}: {name}");
        }
        assert!(wirepath_testlab::eventually(crate::running::WAIT_LIMIT, || program
            .log()
            .contains("privileges: none")));
        let summary = program.stop();
        assert_eq!(summary["in_flight"], 0, "{summary}");
    }
}

fn status(program: &Running) -> String {
    std::fs::read_to_string(format!("/proc/{}/status", program.id())).unwrap()
}

/// Variable that makes the test play the program.
const ROLE: &str = "WIREPATH_TEST_REFUSED_CALLS";

/// A control that calls what no packet program needs.
struct Caller {
    calls: u64,
}

impl Control for Caller {
    fn tick(&mut self, _: &mut ControlPlane) {
        assert_eq!(rustix::system::sethostname(b"wirepath"), Err(Errno::PERM));
        self.calls += 1;
    }

    fn summary(&mut self) -> Option<Value> {
        Some(serde_json::json!({ "calls": self.calls }))
    }
}

/// The program: its control thread and its workers make calls that are refused.
fn run_caller() -> Result<(), Failure> {
    let run = cli::RunArguments { seconds: Some(Duration::from_millis(300)), ..Default::default() };
    let arguments = AppArguments { run, common: cli::Common { json: true, ..Default::default() } };
    let text = PORTS.replace("'control.sock'", "'off'");
    let app = App::<()>::start("caller", &arguments, &text)?;
    let stage = |_: &WorkerInfo| {
        |_: &mut Context<'_>, _: &mut Batch| {
            assert_eq!(rustix::thread::set_thread_uid(rustix::process::Uid::ROOT), Err(Errno::PERM));
        }
    };
    app.run(move |_, _| Ok((stage, Caller { calls: 0 }))).map(drop)
}

#[test]
fn refused_system_calls_are_logged_by_name() {
    if std::env::var_os(ROLE).is_some() {
        return run_caller().unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "privileges::refused_system_calls_are_logged_by_name", "--nocapture"])
        .env(ROLE, "1")
        .output()
        .unwrap();
    let (summary, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{summary}\n{log}");
    for call in ["sethostname", "setuid"] {
        let times: Vec<&str> =
            log.lines().filter(|line| line.contains(&format!("the system call {call} was refused ("))).collect();
        // At once, and the total at the end.
        assert_eq!(times.len(), 2, "{log}");
    }
    let json = summary.lines().find(|line| line.starts_with('{')).unwrap();
    let json: Value = serde_json::from_str(json).unwrap();
    let calls = json["app"]["calls"].as_u64().unwrap();
    assert!(calls > 2 && log.contains(&format!("sethostname was refused ({calls} times)")), "{calls}: {log}");
}
