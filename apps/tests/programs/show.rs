//! The tables of running programs and changes of them, by the control socket. The tests need no privilege.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use wirepath_testlab::eventually;

use crate::running::Running;

pub(super) use crate::running::WAIT_LIMIT;
pub(super) const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
pub(super) const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");

/// Two ports that send and receive, as the ports of every test.
pub(super) const PORTS: &str = "[[port]]\nname = 'east'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n\
     [[port]]\nname = 'west'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n";

/// A running program.
pub(super) struct Program(Running);

impl Program {
    /// Starts a program with the socket `control.sock` in its folder.
    pub(super) fn start(binary: &str, config: &str) -> Self {
        Self::start_with(binary, config, "")
    }

    /// Does the same with more keys of `[control]`.
    pub(super) fn start_with(binary: &str, config: &str, control: &str) -> Self {
        // A path with characters that need escapes in displays.
        let folder = tempfile::Builder::new().prefix("a\\b \"c\n").tempdir().unwrap();
        let text = format!("{config}[control]\nsocket = 'control.sock'\n{control}\n");
        Self(Running::start(folder, binary, &text, "control.sock"))
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.0.socket()
    }

    /// Runs `wirepath` with the socket, and returns its exit code and output.
    pub(super) fn wirepath(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let socket = self.socket();
        wirepath(&[arguments, &["--socket", socket.to_str().unwrap()]].concat(), self.0.folder())
    }

    pub(super) fn rows(&self, arguments: &[&str]) -> Vec<Value> {
        let (code, text) = self.wirepath(&[&["show", "--json"], arguments].concat());
        assert_eq!(code, Some(0), "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        answer["rows"].as_array().unwrap().clone()
    }

    /// Sends lines, and returns as many answers.
    pub(super) fn ask(&self, lines: &[&str]) -> Vec<Value> {
        let stream = wirepath_control_socket::connect(&self.socket(), WAIT_LIMIT).unwrap();
        (&stream).write_all((lines.join("\n") + "\n").as_bytes()).unwrap();
        let answers = BufReader::new(stream).lines().take(lines.len());
        answers.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
    }

    /// Stops the program and returns its summary.
    pub(super) fn stop(self) -> Value {
        self.0.stop()
    }
}

fn wirepath(arguments: &[&str], runtime: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
    let output = command.args(arguments).env("XDG_RUNTIME_DIR", runtime).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text)
}

fn sum(rows: &[Value], column: &str) -> u64 {
    rows.iter().map(|row| row[column].as_u64().unwrap()).sum()
}

#[test]
fn tables_and_summary_have_equal_totals() {
    // Both sources are finite, so that the figures stand still.
    let config = PORTS.replace("flows = 100", "flows = 100\ncount = 40000")
        + "[[rule]]\nrule = 'ingress prio 1: port id east / udp src 1024 => drop'\n";
    let program = Program::start(L2FWD, &config);
    assert!(eventually(WAIT_LIMIT, || sum(&program.rows(&["ports"]), "rx_packets") == 80_000));
    let mut last = Value::Null;
    assert!(eventually(WAIT_LIMIT, || {
        let now = program.rows(&["balance"])[0].clone();
        std::mem::replace(&mut last, now.clone()) == now && now["in_flight"] == 0
    }));
    let [ports, queues, workers, drops, balance, rules] =
        ["ports", "queues", "workers", "drops", "balance", "rules"].map(|table| program.rows(&[table]));
    let summary = program.stop();
    for (direction, packets, bytes) in [("rx", "rx_packets", "rx_bytes"), ("tx", "tx_packets", "tx_bytes")] {
        let of: Vec<Value> = queues.iter().filter(|row| row["direction"] == direction).cloned().collect();
        for (own, key, of_queues) in [(packets, packets, "packets"), (bytes, bytes, "bytes")] {
            assert_eq!(sum(&ports, own), summary[key].as_u64().unwrap(), "{own}");
            assert_eq!(sum(&of, of_queues), summary[key].as_u64().unwrap(), "{own}");
        }
    }
    let by_reason = |reason: &str| {
        let rows: Vec<Value> = drops.iter().filter(|row| row["reason"] == reason).cloned().collect();
        sum(&rows, "packets")
    };
    let reasons = summary["drops"].as_object().unwrap();
    for (reason, n) in reasons {
        assert_eq!(by_reason(reason), n.as_u64().unwrap(), "{reason}");
    }
    assert_eq!(sum(&drops, "packets"), reasons.values().map(|n| n.as_u64().unwrap()).sum::<u64>());
    assert!(by_reason("rule_drop") > 0, "{drops:?}");
    assert_eq!(sum(&workers, "drops"), by_reason("rule_drop"));
    assert_eq!(balance[0]["received"], summary["rx_packets"]);
    assert_eq!(balance[0]["sent"], summary["tx_packets"]);
    assert_eq!(rules[0]["packets"], summary["app"]["rules"][0]["packets"]);
    assert_eq!(
        (rules[0]["packets"].as_u64().unwrap(), &rules[0]["origin"]),
        (by_reason("rule_drop"), &json!("configuration"))
    );
}

#[test]
fn tables_are_filtered_limited_and_shown_to_people() {
    let program = Program::start(L2FWD, PORTS);
    let (code, tables) = program.wirepath(&["show"]);
    assert!(code == Some(0) && tables.starts_with("TABLE"), "{tables}");
    for table in ["ports", "queues", "workers", "drops", "balance", "memory"] {
        assert!(tables.lines().any(|line| line.starts_with(table)), "{table}: {tables}");
        assert_eq!(program.wirepath(&["show", table]).0, Some(0), "{table}");
    }
    let east = program.rows(&["queues", "--where", "port=east", "-w", "direction=rx"]);
    assert_eq!((east.len(), &east[0]["port"]), (1, &json!("east")));
    assert_eq!(program.rows(&["queues", "-n", "3"]).len(), 3);
    assert_eq!(program.rows(&["queues", "-w", "packets<0"]).len(), 0);
    let (_, text) = program.wirepath(&["show", "ports", "--columns", "port,state,driver"]);
    assert_eq!(text, "PORT  STATE  DRIVER\neast  up     null\nwest  up     null\n");
    let rates = program.rows(&["ports", "--rates"]);
    let (rate, total) = (rates[0]["rx_packets"].as_f64().unwrap(), program.rows(&["ports"])[0]["rx_packets"].as_f64());
    assert!(rate > 1000.0 && rate < total.unwrap(), "{rates:?}");
    for (arguments, why) in [
        (&["show", "port"][..], "there is no table \"port\"; did you mean \"ports\"?"),
        (&["show", "ports", "-c", "sate"], "there is no column \"sate\"; did you mean \"state\"?"),
        (&["show", "ports", "-w", "sate=up"], "table ports has no column \"sate\"; did you mean \"state\"?"),
        (&["show", "ports", "-w", "state"], "expected COLUMN=VALUE"),
        (&["show", "ports", "-n", "0"], "0 is not in 1.."),
    ] {
        let (code, text) = program.wirepath(arguments);
        assert!(code == Some(2) && text.contains(why), "{arguments:?}: {text}");
    }
    // The tables end with the program.
    let socket = program.socket();
    program.stop();
    assert!(!socket.exists());
}

#[test]
fn the_bridge_and_the_gateway_have_tables_of_their_own() {
    let program = Program::start(L2FWD, &(PORTS.to_owned() + "[l2fwd]\nmode = 'bridge'\n"));
    assert!(eventually(WAIT_LIMIT, || !program.rows(&["fdb"]).is_empty()));
    let fdb = program.rows(&["fdb", "-n", "1"]);
    assert!(["east", "west"].map(Value::from).contains(&fdb[0]["to"]), "{fdb:?}");
    program.stop();
    let config = PORTS.to_owned()
        + "[underlay]\nport = 'east'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
           remotes = ['10.9.0.2', '10.9.0.3']\nports = [{ port = 'west', vlan = 7 }]\n\
           static = [{ mac = '02:00:00:00:00:77', remote = '10.9.0.3' }]\n";
    let program = Program::start(GATEWAY, &config);
    let segments = program.rows(&["segments"]);
    assert_eq!((&segments[0]["segment"], &segments[0]["vni"]), (&json!("blue"), &json!(42)));
    assert_eq!((&segments[0]["ports"], &segments[0]["remotes"]), (&json!("west.7"), &json!(2)));
    let fdb = program.rows(&["fdb", "-w", "kind=static"]);
    assert_eq!(
        fdb,
        [json!({
            "segment": "blue", "mac": "02:00:00:00:00:77", "to": "10.9.0.3", "kind": "static", "age": null,
        })]
    );
    let remotes = program.rows(&["remotes"]);
    assert_eq!(remotes.iter().map(|row| row["remote"].clone()).collect::<Vec<_>>(), ["10.9.0.2", "10.9.0.3"]);
    assert_eq!((&remotes[0]["origin"], &remotes[0]["local"]), (&json!("configured"), &json!("10.9.0.1")));
    assert!(eventually(WAIT_LIMIT, || program.rows(&["neighbours"]).len() == 2));
    program.stop();
}

#[test]
fn forwarding_entries_are_added_and_removed() {
    let config = PORTS.to_owned()
        + "[underlay]\nport = 'east'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
           remotes = ['10.9.0.2', '10.9.0.3']\nports = [{ port = 'west' }]\n";
    let program = Program::start(GATEWAY, &config);
    // The source behind west is one address, which is learned again after its removal.
    assert!(eventually(WAIT_LIMIT, || program.rows(&["fdb"]).len() == 1));
    let learned = program.rows(&["fdb"])[0]["mac"].as_str().unwrap().to_owned();
    let mac = "mac=02:00:00:00:00:77";
    for (operation, place) in [("add", "remote=10.9.0.2"), ("set", "port=west"), ("set", "remote=10.9.0.3")] {
        // The other place is taken away.
        let other = if place.starts_with("port") { "remote=" } else { "port=" };
        let (code, text) = program.wirepath(&[operation, "static", "segment=blue", mac, place, other]);
        assert_eq!(code, Some(0), "{text}");
        let rows = program.rows(&["fdb", "-w", "kind=static"]);
        let to = place.split_once('=').unwrap().1;
        assert_eq!((rows.len(), &rows[0]["to"], &rows[0]["age"]), (1, &json!(to), &Value::Null), "{rows:?}");
    }
    for (arguments, why) in [
        (
            &["add", "static", "segment=blu", mac, "port=west"][..],
            "there is no segment \"blu\"; did you mean \"blue\"?",
        ),
        (&["add", "static", "segment=blue", mac, "port=west"], "the static 02:00:00:00:00:77 exists already"),
        (&["add", "static", "segment=blue", "mac=02:00:00:00:00:99"], "segment[0].static[1]"),
        (&["set", "static", "segment=blue", mac, "port=west"], "segment[0].static[0]"),
        (&["set", "static", "segment=blue", mac, "remote=10.9.0.4"], "segment[0].static[0].remote"),
        (&["add", "static", "segment=blue", "mac=03:00:00:00:00:01", "port=west"], "unicast"),
        (&["add", "static", "segment=blue", "mac=2", "port=west"], "segment[0].static[1].mac"),
        (&["add", "static", "segment=blue", "port=west"], "the argument \"mac\" is missing"),
        (&["remove", "static", "segment=blue", "mac=02:00:00:00:00:78"], "there is no static 02:00:00:00:00:78"),
        (&["remove", "fdb", "segment=green"], "there is no segment \"green\""),
    ] {
        let (code, text) = program.wirepath(arguments);
        assert!(code == Some(2) && text.contains(why), "{arguments:?}: {text}");
    }
    // A flush leaves static entries alone, and what is seen again is learned again.
    let (code, text) = program.wirepath(&["remove", "fdb", "segment=blue", &format!("mac={learned}")]);
    assert_eq!((code, text.as_str()), (Some(0), "removed: 1\n"));
    assert_eq!(program.rows(&["fdb", "-w", "kind=static"]).len(), 1);
    assert!(eventually(WAIT_LIMIT, || program.rows(&["segments"])[0]["learned"] == 2));
    assert_eq!(program.wirepath(&["remove", "static", "segment=blue", mac]).0, Some(0));
    assert!(program.rows(&["fdb", "-w", "kind=static"]).is_empty());
    program.stop();
}

#[test]
fn rules_are_added_and_removed() {
    let program = Program::start(L2FWD, &(PORTS.to_owned() + "[rules]\n"));
    let (code, help) = program.wirepath(&["add"]);
    assert!(
        code == Some(0) && help.contains("add rule: A flow rule") && help.contains("rule=<text> the rule as text"),
        "{help}"
    );
    let rule = "rule=ingress prio 1: port id east / udp => drop";
    assert_eq!(program.wirepath(&["add", "rule", rule]), (Some(0), "id: 0\n".to_owned()));
    assert!(eventually(WAIT_LIMIT, || program.rows(&["rules"])[0]["packets"].as_u64().unwrap() > 100));
    for (arguments, why) in [
        (&["add", "rule", "rule=ingress: udpp => drop"][..], "did you mean \"udp\"?"),
        (&["add", "rule"], "rule: the argument \"rule\" is missing"),
        (&["add", "rule", "rul=x"], "unknown argument \"rul\"; did you mean \"rule\"?"),
        (&["set", "rule", "id=0"], "rule: \"set\" is not possible, only add, remove"),
        (&["add", "port", "name=x"], "this program has no \"port\" that can be changed"),
        (&["remove", "rule", "id=7"], "there is no rule 7"),
        (&["remove", "rule", "id=x"], "found \"x\", expected a number"),
        (&["remove", "rule", "id"], "\"id\": expected NAME=VALUE"),
    ] {
        let (code, text) = program.wirepath(arguments);
        assert!(code == Some(2) && text.contains(why), "{arguments:?}: {text}");
    }
    assert_eq!(program.wirepath(&["remove", "rule", "id=0"]), (Some(0), "applied\n".to_owned()));
    assert!(program.rows(&["rules"]).is_empty());
    // A program whose configuration knows no rules cannot get some.
    let other = Program::start(L2FWD, PORTS);
    let (code, text) = other.wirepath(&["add", "rule", rule]);
    assert!(code == Some(2) && text.contains("an empty table [rules] in its configuration allows rules"), "{text}");
}

#[test]
fn levels_of_the_log_change() {
    let program = Program::start(L2FWD, &(PORTS.to_owned() + "[rules]\n"));
    assert_eq!(program.wirepath(&["log"]), (Some(0), "info\n".to_owned()));
    assert_eq!(program.wirepath(&["log", "debug", "wirepath_pmd"]), (Some(0), "info,wirepath_pmd=debug\n".to_owned()));
    assert_eq!(program.wirepath(&["log", "error"]), (Some(0), "error,wirepath_pmd=debug\n".to_owned()));
    let (code, text) = program.wirepath(&["log", "loud"]);
    assert!(code == Some(2) && text.contains("invalid value 'loud'"), "{text}");
    let (code, text) = program.wirepath(&["log", "debug", "no module"]);
    assert_eq!(code, Some(2), "{text}");
    // A change that the level hides is not logged, and others are.
    let add = |port: u16| format!("rule=ingress prio 1: port id east / udp dst {port} => drop");
    assert_eq!(program.wirepath(&["add", "rule", &add(7)]).0, Some(0));
    assert_eq!(program.wirepath(&["log", "info"]).0, Some(0));
    assert_eq!(program.wirepath(&["add", "rule", &add(8)]).0, Some(0));
    // A thread of its own writes the log, in order.
    eventually(WAIT_LIMIT, || program.0.log().contains("udp dst 8"));
    let log = program.0.log();
    assert!(!log.contains("udp dst 7") && log.contains("udp dst 8"), "{log}");
    assert!(log.contains("the levels of the log are info,wirepath_pmd=debug now, by uid "), "{log}");
}

#[test]
fn requests_that_cannot_be_answered_are_refused() {
    let program = Program::start(L2FWD, PORTS);
    let deep = "[".repeat(60_000);
    let requests = [
        ("7", "expected a JSON object"),
        ("{\"request\": 7}", "expected the key \"request\""),
        ("{}", "expected the key \"request\""),
        ("{\"request\": \"shwo\"}", "unknown request \"shwo\""),
        ("{\"request\": \"status\", \"version\": 2}", "version 2 is unknown"),
        ("{\"request\": \"status\", \"tabel\": 1}", "unknown key \"tabel\""),
        ("{\"request\": \"show\"}", "expected the key \"table\""),
        ("{\"request\": \"show\", \"table\": \"ports\", \"where\": 7}", "where: expected a list"),
        ("{\"request\": \"show\", \"table\": \"ports\", \"where\": [7]}", "where: expected a list"),
        ("{\"request\": \"show\", \"table\": \"ports\", \"limit\": 0}", "limit: expected a number from 1 on"),
        ("{\"request\": \"log\", \"level\": \"loud\"}", "expected off, error, warn, info, debug or trace"),
        ("{\"request\": \"log\", \"module\": \"x\"}", "expected the key \"level\""),
        ("{\"request\": \"add\"}", "expected the key \"object\""),
        (&deep, "recursion limit"),
        ("\u{0}", "no JSON"),
    ];
    let lines: Vec<&str> = requests.iter().map(|(line, _)| *line).chain(["{\"request\": \"status\"}"]).collect();
    let answers = program.ask(&lines);
    for ((line, why), answer) in requests.iter().zip(&answers) {
        let error = answer["error"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(answer["ok"] == false && error.contains(why), "{:.40}: {error}", line);
    }
    let status = &answers[requests.len()];
    assert_eq!((&status["ok"], &status["program"], &status["version"]), (&json!(true), &json!("l2fwd"), &json!(1)));
    assert!(status["configuration"].as_str().unwrap().ends_with("/config.toml"), "{status}");
}

#[test]
fn without_a_socket_the_only_program_is_taken() {
    // Programs of other tests and of the machine run at the same time. So all are in a folder of this test, which
    // only programs without access to /run/wirepath take.
    let folder = tempfile::tempdir().unwrap();
    let (code, none) = wirepath(&["show", "--socket", "none.sock"], folder.path());
    assert!(code == Some(1) && none.contains("does the program run?"), "{none}");
    let runtime = folder.path().join("wirepath");
    std::fs::create_dir(&runtime).unwrap();
    let [a, b] = ["a.sock", "b.sock"].map(|name| {
        let config = format!("{PORTS}[control]\nsocket = '{}'\n", runtime.join(name).display());
        let file = folder.path().join(format!("{name}.toml"));
        std::fs::write(&file, config).unwrap();
        let child = Command::new(L2FWD).arg("--config").arg(file).arg("--json").stdout(Stdio::null()).spawn().unwrap();
        assert!(eventually(WAIT_LIMIT, || UnixStream::connect(runtime.join(name)).is_ok()));
        child
    });
    let (code, list) = wirepath(&["show", "ports"], folder.path());
    assert_eq!(code, Some(2), "{list}");
    for name in ["a.sock", "b.sock"] {
        let line = format!("--socket {}: l2fwd, pid ", runtime.join(name).display());
        assert!(list.contains(&line) && list.contains(&format!("{name}.toml")), "{list}");
    }
    for mut child in [a, b] {
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        child.wait().unwrap();
    }
}
