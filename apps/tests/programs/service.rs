//! Programs as services: the log's formats and levels, and reports to a service manager. The tests need no privilege.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use wirepath_testlab::eventually;

const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
/// Generous: other programs may use the processors.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

const PORTS: &str = "[[port]]\nname = 'east'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n[[port]]\nname = \
                     'west'\ndriver = 'null'\n";

/// A program that is killed at the end.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

/// Runs `l2fwd` for a moment and returns its log, and the summary.
fn log(config: &str, arguments: &[&str], environment: &[(&str, &str)]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("l2fwd.toml");
    std::fs::write(&file, format!("{PORTS}{config}")).unwrap();
    let mut command = Command::new(L2FWD);
    command.env_remove("WIREPATH_LOG").env_remove("JOURNAL_STREAM").envs(environment.iter().copied());
    let output = command.args(["--json", "--seconds", "0.2"]).args(arguments).arg("--config").arg(&file);
    let output = output.output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{log}");
    (log, serde_json::from_slice(&output.stdout).unwrap())
}

/// True if a word is a time in UTC with microseconds.
fn is_time(word: &str) -> bool {
    let form: String = word.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    form == "0000-00-00T00:00:00.000000Z" && word > "2024"
}

#[test]
fn text_has_time_level_and_module() {
    let (log, _) = log("", &[], &[]);
    assert!(log.lines().count() >= 2, "{log}");
    for line in log.lines() {
        let mut words = line.split_ascii_whitespace();
        assert!(words.next().is_some_and(is_time), "{line}");
        assert!(["INFO", "WARN"].contains(&words.next().unwrap()), "{line}");
        assert!(words.next().unwrap().starts_with("wirepath"), "{line}");
    }
}

#[test]
fn json_has_one_object_on_each_line() {
    for (config, arguments) in [("", &["--log-format", "json"][..]), ("[log]\nformat = 'json'\n", &[])] {
        let (log, _) = log(config, arguments, &[]);
        let records: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
        assert!(records.len() >= 2, "{log}");
        for record in &records {
            assert!(is_time(record["time"].as_str().unwrap()), "{record}");
            assert!(["info", "warn"].contains(&record["level"].as_str().unwrap()), "{record}");
            assert!(record["module"].as_str().unwrap().starts_with("wirepath"), "{record}");
            assert!(!record["message"].as_str().unwrap().is_empty(), "{record}");
        }
    }
    // The last error is a record too.
    let output = Command::new(L2FWD).args(["--log-format", "json", "--config", "/none.toml"]).output().unwrap();
    let record: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((output.status.code(), &record["level"]), (Some(2), &Value::from("error")));
    assert!(record["message"].as_str().unwrap().contains("/none.toml"), "{record}");
}

#[test]
fn the_journal_gets_priorities() {
    // Standard error is the journal's stream if the variable names its device and inode.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let run = |stream: &dyn Fn(u64, u64) -> String| {
        let file = File::create(&path).unwrap();
        let about = file.metadata().unwrap();
        let status = Command::new(L2FWD)
            .args(["--json", "--seconds", "0.2"])
            .env("JOURNAL_STREAM", stream(about.dev(), about.ino()))
            .stderr(file)
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        std::fs::read_to_string(&path).unwrap()
    };
    let log = run(&|device, inode| format!("{device}:{inode}"));
    let is_record = |line: &str| line.starts_with("<6>wirepath") || line.starts_with("<4>wirepath");
    assert!(log.lines().count() >= 2 && log.lines().all(is_record), "{log}");
    let log = run(&|device, inode| format!("{device}:{}", inode + 1));
    assert!(log.lines().all(|line| is_time(line.split(' ').next().unwrap())), "{log}");
}

#[test]
fn levels_filter_by_module() {
    let modules = |config: &str, arguments: &[&str], environment: &[(&str, &str)]| {
        let arguments = [arguments, &["--log-format", "json"]].concat();
        let (log, _) = log(config, &arguments, environment);
        let record = |line: &str| {
            let record: Value = serde_json::from_str(line).unwrap();
            record["module"].as_str().unwrap().to_owned()
        };
        log.lines().map(record).collect::<Vec<_>>()
    };
    // The second module is a part of the first.
    let (outer, inner) = ("wirepath_pipeline::runtime", "wirepath_pipeline::runtime::config");
    let has = |levels: &str| {
        let records = modules("", &["--log-level", levels], &[]);
        [outer, inner].map(|module| records.iter().any(|own| own == module))
    };
    assert_eq!(has("info"), [true, true]);
    assert_eq!(has(&format!("off,{inner}=info")), [false, true]);
    assert_eq!(has(&format!("off,{outer}=trace")), [true, true]);
    assert_eq!(has(&format!("trace,{inner}=off")), [true, false]);
    assert_eq!(has(&format!("{outer}=off,{inner}=info")), [false, true]);
    // The command line goes before the environment, and both before the configuration.
    let off = "[log]\nlevel = 'off'\n";
    assert!(modules(off, &[], &[]).is_empty());
    assert!(!modules(off, &[], &[("WIREPATH_LOG", "info")]).is_empty());
    assert!(modules("", &["--log-level", "off"], &[("WIREPATH_LOG", "trace")]).is_empty());
    for (arguments, why) in
        [(["--log-level", "loud"], "found level \"loud\", expected off, error"), (["--log-format", "xml"], "journald")]
    {
        let output = Command::new(L2FWD).args(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(why), "{error}");
    }
}

#[test]
fn lost_records_are_counted() {
    for format in ["text", "json", "journald"] {
        let (log, summary) = log("", &["--log-format", format], &[]);
        assert_eq!(summary["lost_lines"], 0, "{log}");
        // Nothing can be written to this device.
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(L2FWD);
        command.args(["--json", "--seconds", "0.2", "--log-format", format]).stderr(full);
        let output = command.output().unwrap();
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(summary["lost_lines"].as_u64().unwrap() >= 2, "{format}: {summary}");
    }
}

/// A service manager that notes reports.
struct Manager {
    folder: tempfile::TempDir,
    socket: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        Self { folder, socket }
    }

    fn file(&self, name: &str, text: &str) -> std::path::PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn start(&self, program: &str, config: &Path, watchdog: Option<Duration>) -> Killed {
        let mut command = Command::new(program);
        command.arg("--json").arg("--config").arg(config).stdout(Stdio::null()).stderr(Stdio::null());
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        if let Some(time) = watchdog {
            command.env("WATCHDOG_USEC", time.as_micros().to_string());
        }
        Killed(command.spawn().unwrap())
    }

    /// Returns the next report that comes in this time.
    fn next(&self, limit: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(limit)).unwrap();
        let mut bytes = [0; 4096];
        self.socket.recv(&mut bytes).ok().map(|n| String::from_utf8_lossy(&bytes[..n]).into_owned())
    }

    /// Returns the next report that is no ping.
    fn report(&self) -> String {
        loop {
            let report = self.next(WAIT_LIMIT).expect("a report");
            if report != "WATCHDOG=1" {
                return report;
            }
        }
    }

    /// Returns the number of pings in this time.
    fn pings(&self, time: Duration) -> usize {
        let end = Instant::now() + time;
        let mut count = 0;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            count += usize::from(self.next(left).as_deref() == Some("WATCHDOG=1"));
        }
        count
    }
}

/// Checks a report of a reload that begins now.
fn assert_reloading(report: &str) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let fields: Vec<&str> = report.lines().collect();
    assert_eq!((fields[0], fields[2]), ("RELOADING=1", "STATUS=reloading"), "{report}");
    let micros: i64 = fields[1].strip_prefix("MONOTONIC_USEC=").unwrap().parse().unwrap();
    let age = now.tv_sec * 1_000_000 + now.tv_nsec / 1000 - micros;
    assert!((0..WAIT_LIMIT.as_micros() as i64).contains(&age), "{report}");
}

#[test]
fn a_service_manager_sees_the_life_of_a_program() {
    let manager = Manager::new();
    manager.file("file.rules", "");
    let rules = format!("{PORTS}[rules]\nfile = 'file.rules'\n");
    let gateway = "[underlay]\nport = 'west'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
                   remotes = ['10.9.0.2']\nports = [{ port = 'east' }]\n";
    for (program, config) in [(L2FWD, PORTS.to_owned()), (L2FWD, rules.clone()), (GATEWAY, format!("{PORTS}{gateway}"))]
    {
        let mut child = manager.start(program, &manager.file("c.toml", &config), None);
        assert_eq!(manager.report(), "READY=1\nSTATUS=2 ports");
        for round in 0..3 {
            if round == 2 {
                // A file that is refused ends the reload too.
                manager.file("file.rules", "nonsense\n");
            }
            child.signal(Signal::HUP);
            assert_reloading(&manager.report());
            assert_eq!(manager.report(), "READY=1\nSTATUS=2 ports");
        }
        child.signal(Signal::TERM);
        assert_eq!(manager.report(), "STOPPING=1\nSTATUS=stopping");
        assert!(eventually(WAIT_LIMIT, || child.0.try_wait().unwrap().is_some()));
        assert_eq!(manager.next(Duration::from_millis(100)), None, "no watchdog, no pings");
        manager.file("file.rules", "");
    }
}

#[test]
fn a_reload_ends_when_the_file_was_read() {
    let manager = Manager::new();
    let many: String = (0..40_000).map(|n| format!("ingress prio 7: udp src {} => drop\n", n % 60_000)).collect();
    manager.file("file.rules", "");
    let config =
        manager.file("c.toml", &format!("{PORTS}[rules]\nfile = 'file.rules'\n[control]\nsocket = 'rules.sock'\n"));
    let child = manager.start(L2FWD, &config, None);
    assert!(manager.report().starts_with("READY=1"));
    manager.file("file.rules", &many);
    child.signal(Signal::HUP);
    assert_reloading(&manager.report());
    assert!(manager.report().starts_with("READY=1"));
    let socket = manager.folder.path().join("rules.sock");
    let mut list = Command::new(env!("CARGO_BIN_EXE_wirepath"));
    let output = list.args(["flow", "list", "--json", "--socket"]).arg(socket).output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["rules"].as_array().unwrap().len(), 40_000, "the rules are active when it is ready");
}

#[test]
fn pings_stop_while_the_program_hangs() {
    let manager = Manager::new();
    let interval = Duration::from_secs(4);
    let child = manager.start(L2FWD, &manager.file("c.toml", PORTS), Some(interval));
    assert!(manager.report().starts_with("READY=1"));
    // The manager allows one ping in each interval. There are four.
    let pings = manager.pings(interval * 2);
    assert!((2..=9).contains(&pings), "{pings}");
    child.signal(Signal::STOP);
    manager.pings(Duration::from_millis(500));
    assert_eq!(manager.pings(interval), 0);
    child.signal(Signal::CONT);
    assert_eq!(manager.next(WAIT_LIMIT).as_deref(), Some("WATCHDOG=1"));
}
