//! Registered drop reasons, counters and commands of an application: the example `blocklist` and the tool `wirepath`.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use serde_json::Value;
use tempfile::TempDir;
use wirepath::cli::{Common, RunArguments};
use wirepath::{App, AppArguments};
use wirepath_pipeline::Summary;
use wirepath_testlab::{Requirement, eventually, require};

use crate::running::WAIT_LIMIT;

#[path = "../../examples/blocklist.rs"]
#[expect(dead_code, reason = "the test calls `run`, not `main`")]
mod blocklist;

/// The application in a thread, with its socket in a folder of its own.
struct Application {
    folder: TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Summary>>,
}

impl Drop for Application {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

impl Application {
    fn start(control: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "[[port]]\nname = 'wan'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 10\n\
             [control]\nsocket = 'a.sock'\n{control}"
        );
        std::fs::write(folder.path().join("a.toml"), text).unwrap();
        let run = RunArguments { config: Some(folder.path().join("a.toml")), ..RunArguments::default() };
        let arguments = AppArguments { run, common: Common::default() };
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let app = App::start("blocklist", &arguments, "").unwrap().with_stop(flag).without_output();
            blocklist::run(app).unwrap().expect("a run")
        });
        let it = Self { folder, stop, thread: Some(thread) };
        assert!(eventually(WAIT_LIMIT, || it.path("a.sock").exists()), "it listens");
        it
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::join(self.folder.path(), name)
    }

    /// Runs `wirepath NAME --socket ... ARGUMENTS`. Returns the exit code, and the output or the error.
    fn tool(&self, name: &str, arguments: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        let output = command.arg(name).arg("--socket").arg(self.path("a.sock")).args(arguments).output().unwrap();
        let text = if output.status.success() { output.stdout } else { output.stderr };
        (output.status.code().unwrap(), String::from_utf8(text).unwrap())
    }

    #[track_caller]
    fn done(&self, name: &str, arguments: &[&str]) -> String {
        let (code, text) = self.tool(name, arguments);
        assert_eq!(code, 0, "{name} {arguments:?}: {text}");
        text
    }

    fn stop(mut self) -> Summary {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

#[test]
fn operators_see_reasons_and_counters_and_give_commands() {
    let program = Application::start("");
    let listed = program.done("command", &[]);
    let expected = "block: Drops datagrams to a port\n    port=<number> UDP destination port\n\
        unblock: Returns datagrams to a port again\n    port=<number> UDP destination port\n\
        blocked: Lists the blocked ports\n";
    assert_eq!(listed, expected);

    // The counter, before and after the command.
    let value = |program: &Application, table: &str| -> Vec<(Value, u64)> {
        let rows: Value = serde_json::from_str(&program.done("show", &[table, "--json"])).unwrap();
        let rows = rows["rows"].as_array().unwrap_or_else(|| panic!("{rows}")).clone();
        let rows = rows.iter().filter(|row| row["counter"] == "datagrams_returned");
        rows.map(|row| (row["worker"].clone(), row["value"].as_u64().unwrap())).collect()
    };
    assert!(eventually(WAIT_LIMIT, || value(&program, "counters")[0].1 > 1000));
    let by_worker = value(&program, "worker_counters");
    assert!(by_worker[0].1 > 1000 && by_worker[0].0 == 0, "{by_worker:?}");
    assert_eq!(by_worker[1], ("control".into(), 0));
    let metrics = program.done("metrics", &[]);
    assert!(metrics.contains("\n# TYPE wirepath_app_datagrams_returned_total counter\n"), "{metrics}");
    assert!(metrics.contains("\nwirepath_app_datagrams_returned_total{worker=\"0\"} "), "{metrics}");

    // All datagrams of the generator go to port 2000.
    assert_eq!(program.done("command", &["blocked"]), "ports: []\n");
    assert_eq!(program.done("command", &["block", "port=9"]), "changed: true\nports: [9]\n");
    assert_eq!(program.done("command", &["block", "port=2000"]), "changed: true\nports: [9,2000]\n");
    let json: Value = serde_json::from_str(&program.done("command", &["blocked", "--json"])).unwrap();
    assert_eq!(json["result"]["ports"], serde_json::json!([9, 2000]));
    let pcapng = program.path("blocked.pcapng");
    program.done("capture", &["--drops=blocked_port", "-n", "3", "-w", pcapng.to_str().unwrap()]);
    let bytes = std::fs::read(pcapng).unwrap();
    assert_eq!(bytes.windows(12).filter(|part| part == b"blocked_port").count(), 3, "a comment for each packet");
    let drops = program.done("show", &["drops", "--where", "reason=blocked_port"]);
    assert!(drops.contains("the destination port is blocked"), "{drops}");
    assert!(program.done("trace", &["-n", "1"]).contains("blocked_port"));
    let drops = || program.done("metrics", &[]);
    let sample = "\nwirepath_drop_packets_total{place=\"worker\",name=\"0\",queue=\"\",reason=\"blocked_port\"} ";
    assert!(drops().contains(sample), "{}", drops());

    let summary = program.stop();
    let (json, text) = (summary.to_json(), summary.to_string());
    assert!(json["counters"]["datagrams_returned"].as_u64().unwrap() > 1000, "{text}");
    assert!(json["drops"]["blocked_port"].as_u64().unwrap() >= 3, "{text}");
    assert!(text.contains(": the destination port is blocked (blocked_port)\n"), "{text}");
    assert!(text.contains(" packets: Datagrams returned to their senders (datagrams_returned)\n"), "{text}");
    assert_eq!(summary.balance().in_flight(), 0, "{text}");
}

#[test]
fn wrong_commands_are_refused_with_the_reason() {
    let program = Application::start("");
    let refused = |arguments: &[&str], expected: &str| {
        let (code, text) = program.tool("command", arguments);
        assert_eq!((code, text.contains(expected)), (2, true), "{arguments:?}: {text}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
    };
    refused(&["blok", "port=1"], "no command \"blok\"; did you mean \"block\"?");
    refused(&["x\u{1b}[2J\n\"", "port=1"], "no command \"x\\u{1b}[2J\\n\\\"\"");
    refused(&["block"], "block: the argument \"port\" is missing: UDP destination port");
    refused(&["block", "prot=1"], "block: unknown argument \"prot\"; did you mean \"port\"?");
    refused(&["block", "port=1", "port=2"], "the argument \"port\" is given twice");
    refused(&["block", "port"], "expected NAME=VALUE");
    refused(&["block", "port=many"], "port: found \"many\", expected a number");
    refused(&["block", "port=70000"], "port: found 70000, expected at most 65535");
    refused(&["blocked", "port=1"], "blocked: unknown argument \"port\"; there are none");
    assert_eq!(program.done("command", &["blocked"]), "ports: []\n");
    let (code, text) = program.tool("capture", &["--drops=blocked_prot", "-n", "1", "-w", "-"]);
    assert_eq!((code, text.contains("did you mean \"blocked_port\"?")), (2, true), "{text}");
    program.stop();
}

#[test]
fn commands_need_the_right_to_change_the_program() {
    require!(Requirement::Root);
    let program = Application::start("mode = 0o666\n");
    std::fs::set_permissions(program.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let tool = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        command.arg("command").arg("--socket").arg(program.path("a.sock")).args(arguments).uid(65534).gid(65534);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(tool(&[]).0, Some(0), "who may connect may list commands");
    let (code, error) = tool(&["block", "port=9"]);
    assert_eq!((code, error.contains("user 65534 may not change this program")), (Some(2), true), "{error}");
    assert_eq!(program.done("command", &["blocked"]), "ports: []\n");
    program.stop();
}
