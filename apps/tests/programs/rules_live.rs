//! Rules of a running program, shown and changed from the command line. The tests need no privilege.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use wirepath_testlab::eventually;

const WAIT_LIMIT: Duration = Duration::from_secs(20);

const CONFIG: &str = "[[port]]\nname = 'east'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n[[port]]\nname = \
            'west'\ndriver = 'null'\n\
                      [control]\nsocket = 'rules.sock'\n[[rule]]\nrule = 'ingress prio 7: port id west => drop'\n";

fn start(folder: &Path, config: &str, json: bool) -> Child {
    let file = folder.join("l2fwd.toml");
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_l2fwd"));
    command.arg("--config").arg(file).stdout(Stdio::piped()).stderr(Stdio::piped());
    if json {
        command.arg("--json");
    }
    command.spawn().unwrap()
}

fn end(child: Child) -> Output {
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait_with_output().unwrap()
}

fn flow(arguments: &[&str], socket: &Path) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_wirepath"))
        .arg("flow")
        .args(arguments)
        .arg("--socket")
        .arg(socket)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text)
}

fn rules(socket: &Path) -> Vec<(u64, String, u64)> {
    let (code, text) = flow(&["list", "--json"], socket);
    assert_eq!(code, Some(0), "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let rule = |it: &Value| {
        (it["id"].as_u64().unwrap(), it["rule"].as_str().unwrap().to_owned(), it["packets"].as_u64().unwrap())
    };
    answer["rules"].as_array().unwrap().iter().map(rule).collect()
}

#[test]
fn listed_added_and_removed_while_packets_flow() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("rules.sock");
    let child = start(folder.path(), CONFIG, true);
    assert!(eventually(WAIT_LIMIT, || socket.exists() && flow(&["list"], &socket).0 == Some(0)));
    let own = rules(&socket);
    assert_eq!((own.len(), own[0].1.as_str()), (1, "ingress prio 7: port id west => drop"));

    let (code, id) = flow(&["add", "ingress prio 3: port id east / udp => count, drop"], &socket);
    assert_eq!(code, Some(0), "{id}");
    let id: u64 = id.trim().parse().unwrap();
    assert!(eventually(WAIT_LIMIT, || rules(&socket).iter().any(|(own, _, packets)| *own == id && *packets > 1000)));
    let (code, text) = flow(&["list"], &socket);
    assert!(code == Some(0) && text.starts_with("ID") && text.contains("port id east / udp => count, drop"), "{text}");
    assert!(text.contains("ingress prio 7: port id west => drop"), "{text}");

    for (arguments, why) in [
        (&["add", "ingress: udpp => drop"][..], "did you mean \"udp\"?"),
        (&["add", "ingress: any => redirect 9"], "there is no port 9"),
        (&["add", "ingress: any => kernel"], "\"kernel\" cannot be done on port \"east\" (driver null)"),
        (&["remove", "999"], "there is no rule 999"),
    ] {
        let (code, text) = flow(arguments, &socket);
        assert!(code == Some(2) && text.contains(why), "{text}");
        assert_eq!(rules(&socket).len(), 2, "nothing has changed");
    }
    assert_eq!(flow(&["remove", &id.to_string()], &socket).0, Some(0));
    assert_eq!(rules(&socket).len(), 1);
    assert_eq!(flow(&["remove", &own[0].0.to_string()], &socket).0, Some(0));
    assert!(rules(&socket).is_empty());
    let output = end(child);
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &summary["app"]["rules"]), (Some(0), &Value::Array(Vec::new())));
    assert!(summary["drops"]["rule_drop"].as_u64().unwrap() > 1000, "{summary}");
    assert_eq!(summary["leaked_buffers"], 0);
    assert!(!socket.exists(), "taken away");
    assert_eq!(flow(&["list"], &socket).0, Some(1), "the program has ended");
}

#[test]
fn reloaded_rules_keep_their_order() {
    const MANY: usize = 2000;
    let folder = tempfile::tempdir().unwrap();
    let (socket, file) = (folder.path().join("rules.sock"), folder.path().join("many.rules"));
    let of_file = |n: usize| format!("ingress prio 7: port id west / ipv4 / udp dst {n} => drop");
    let many: String = (1..=MANY).map(|n| of_file(n) + "\n").collect();
    std::fs::write(&file, &many).unwrap();
    let child = start(folder.path(), &CONFIG.replace("[[rule]]\n", "[rules]\nfile = 'many.rules'\n[[rule]]\n"), true);
    assert!(eventually(WAIT_LIMIT, || socket.exists() && flow(&["list"], &socket).0 == Some(0)));
    let before = rules(&socket);
    assert_eq!((before.len(), &before[1].1, &before[MANY].1), (MANY + 1, &of_file(1), &of_file(MANY)));

    // After one addition and two removals, the other rules keep their numbers and order. The added rule is
    // last.
    let (code, added) = flow(&["add", "ingress prio 7: port id west / ipv4 / udp src 9 => drop"], &socket);
    assert_eq!(code, Some(0), "{added}");
    let added: u64 = added.trim().parse().unwrap();
    let removed = [before[0].0.to_string(), before[5].0.to_string()];
    assert_eq!(flow(&["remove", &removed[0], &removed[1]], &socket).0, Some(0));
    let after = rules(&socket);
    let expected: Vec<u64> =
        before.iter().enumerate().filter(|(i, _)| ![0, 5].contains(i)).map(|(_, it)| it.0).chain([added]).collect();
    assert_eq!(after.iter().map(|it| it.0).collect::<Vec<_>>(), expected);

    // The file is read again with one more rule. The rule from the socket stays last. The removed rules of the
    // configuration and the file are there again.
    std::fs::write(&file, many + &of_file(MANY + 1) + "\n").unwrap();
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    let texts = || rules(&socket).into_iter().map(|(_, text, _)| text).collect::<Vec<_>>();
    assert!(eventually(WAIT_LIMIT, || rules(&socket).len() == MANY + 3));
    let by_socket = "ingress prio 7: port id west / ipv4 / udp src 9 => drop".to_owned();
    let of_config = [before[0].1.clone()];
    let expected: Vec<String> = of_config.into_iter().chain((1..=MANY + 1).map(of_file)).chain([by_socket]).collect();
    assert_eq!(texts(), expected);
    let output = end(child);
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let last = &summary["app"]["rules"][MANY + 2];
    assert_eq!((output.status.code(), last["ports"][0]["where"].as_str()), (Some(0), Some("software")), "{last}");
}

#[test]
fn shown_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("rules.sock");
    let child =
        start(folder.path(), &(CONFIG.to_owned() + "[[rule]]\nrule = 'egress: port id west / udp => count'\n"), false);
    assert!(eventually(WAIT_LIMIT, || socket.exists() && flow(&["list"], &socket).0 == Some(0)));
    assert!(eventually(WAIT_LIMIT, || rules(&socket)[1].2 > 100));
    let output = end(child);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text.contains("PACKETS") && text.contains("egress prio 0: port id west / udp => count"), "{text}");
}

#[test]
fn unsupported_rules_are_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    for (rule, why) in [
        (
            "ingress: port id west / ipv4 => kernel",
            "14:8: rule[1].rule: \"kernel\" cannot be done on port \"west\" (driver null): the port is not connected",
        ),
        ("ingress: any => queue 2", "port \"east\" has no queue 2; it has 1"),
        ("ingress: any => mirror 5", "there is no port 5"),
    ] {
        let config = format!("{CONFIG}[[rule]]\nrule = '{rule}'\n");
        let child = start(folder.path(), &config, true);
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(why), "{error}");
        assert!(!folder.path().join("rules.sock").exists());
    }
}

#[test]
fn a_queue_of_another_worker_gets_its_packets() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[[port]]\nname = 'east'\ndriver = 'null'\nqueues = 2\n[port.null]\nsource = 'udp4'\nflows = 64\n\
                  [[port]]\nname = 'west'\ndriver = 'null'\nqueues = 2\n[workers]\ncores = [0, 1]\n\
                  [[rule]]\nrule = 'ingress prio 1: port id east / udp => queue 1'\n";
    let file = folder.path().join("l2fwd.toml");
    let run = |config: &str| -> Value {
        std::fs::write(&file, config).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_l2fwd"))
            .args(["--json", "--seconds", "1", "--config"])
            .arg(&file)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let summary = run(config);
    let handed = |summary: &Value, worker: usize| summary["workers"][worker]["handed_over"].as_u64().unwrap();
    // Queue 0 of east belongs to worker 0, queue 1 to worker 1.
    assert!(handed(&summary, 0) > 1000 && handed(&summary, 1) == 0, "{summary}");
    let dropped: u64 = summary["drops"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    let (rx, tx) = (summary["rx_packets"].as_u64().unwrap(), summary["tx_packets"].as_u64().unwrap());
    assert_eq!((rx, summary["leaked_buffers"].as_u64()), (tx + dropped, Some(0)), "{summary}");
    let spread = run(&config.replace("queue 1", "rss queues 0-1"));
    assert!(handed(&spread, 0) > 100 && handed(&spread, 1) > 100, "{spread}");
}
