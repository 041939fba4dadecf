//! `wirepath trace` on a program that generates traffic as fast as it can.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use wirepath_testlab::{Requirement, require};

use super::capture::{Program, run};

fn trace(program: &Program, arguments: &[&str]) -> Vec<Value> {
    let (code, out, error) = run(&mut program.tool("trace", &[arguments, &["--json"]].concat()));
    assert_eq!(code, Some(0), "{error}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn text(trace: &Value) -> String {
    let steps = trace["steps"].as_array().unwrap().iter();
    steps.map(|step| format!("{}: {}\n", step["stage"].as_str().unwrap(), step["text"].as_str().unwrap())).collect()
}

#[test]
fn packets_are_traced_from_port_to_port() {
    let program = Program::start("");
    let traces = trace(&program, &["-n", "100", "--rule", "port id east / udp dst 2000"]);
    assert_eq!(traces.len(), 100);
    for trace in &traces {
        let ends = json!([{ "end": "sent", "port": "west", "queue": 0, "packets": 1 }]);
        assert_eq!((&trace["ends"], &trace["port"], &trace["truncated"]), (&ends, &json!("east"), &json!(false)));
        let text = text(trace);
        for part in ["udp 1024 > 2000", "pairs: port east is joined with port west", "transmit: port west, 64 bytes"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    // Nothing matches: the request ends with its time.
    assert_eq!(trace(&program, &["--rule", "tcp", "--seconds", "0.3"]).len(), 0);
    assert_eq!(trace(&program, &["--port", "west", "--seconds", "0.3"]).len(), 0);
    let (code, out, _) = run(&mut program.tool("trace", &["-n", "1"]));
    assert_eq!(code, Some(0));
    assert!(out.contains("  end        sent by port west queue 0\n"), "{out}");
    program.stop();
}

#[test]
fn the_rule_of_a_dropped_packet_is_named() {
    let rules =
        "[[rule]]\nrule = 'ingress: udp dst 7 => count'\n[[rule]]\nrule = 'ingress prio 3: udp dst 2000 => drop'\n";
    let program = Program::start(rules);
    let (code, out, _) = run(&mut program.tool("show", &["rules", "--json"]));
    assert_eq!(code, Some(0));
    let rows: Value = serde_json::from_str(&out).unwrap();
    let dropping = |row: &&Value| row["rule"].as_str().unwrap().contains("drop");
    let id = rows["rows"].as_array().unwrap().iter().find(dropping).unwrap()["id"].clone();
    let traces = trace(&program, &["-n", "10"]);
    for trace in &traces {
        assert_eq!((&trace["ends"][0]["end"], &trace["ends"][0]["reason"]), (&json!("dropped"), &json!("rule_drop")));
        let expected = format!("ingress rules: rule {id}: ingress prio 3: udp dst 2000 => drop\n");
        assert!(text(trace).contains(&expected), "{expected}{}", text(trace));
    }
    let summary = program.stop();
    assert!(summary["drops"]["rule_drop"].as_u64().unwrap() >= 10);
    assert_eq!(summary["tx_packets"], 0, "{summary}");
}

/// The NIC drops some packets by a rule, and marks others for the worker, which traces them.
#[test]
fn the_mark_of_a_nic_is_traced() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    let program = Program::on_nic(
        "[[rule]]\nrule = 'ingress prio 1: port id east / udp src 1024 => count, drop'\n\
         [[rule]]\nrule = 'ingress prio 2: port id east / udp dst 9 => mark 7, limit 100k pps'\n",
    );
    let (_, out, _) = run(&mut program.tool("show", &["rules", "--columns", "id,where"]));
    assert_eq!(out.split_whitespace().collect::<Vec<_>>(), ["ID", "WHERE", "0", "hardware", "1", "split"]);
    // Behind the packets that came before the NIC had the rules.
    program.assert_forwards();
    let traces = trace(&program, &["-n", "100"]);
    assert_eq!(traces.len(), 100);
    for trace in &traces {
        let text = text(trace);
        for part in [" of the device\n", "NIC rules: matched rule 1: ingress prio 2: ", "ingress rules: mark 7; "] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("udp 1024 >"), "the NIC has dropped it: {text}");
        let end = &trace["ends"][0];
        assert!(end["end"] == "sent" || end["reason"] == "meter_exceeded", "{end}");
    }
    let file = program.socket().with_file_name("nic.pcapng");
    let (code, _, error) = run(program.tool("capture", &["--drops", "-n", "200", "-w"]).arg(&file));
    assert_eq!(code, Some(0), "{error}");
    let captured = std::fs::read(&file).unwrap();
    assert!(String::from_utf8_lossy(&captured).matches("meter_exceeded").count() >= 200, "{error}");
    let summary = program.stop();
    let hits = |at: usize| summary["app"]["rules"][at]["packets"].as_u64().unwrap_or_else(|| panic!("{summary}"));
    assert!(hits(0) > 0 && hits(1) > 0, "{summary}");
    assert!(summary["ports"][0]["device_drops"]["rule_drop"].as_u64() > Some(0), "{summary}");
    let drops = summary["drops"].as_object().unwrap();
    assert!(drops.keys().all(|reason| ["meter_exceeded", "rule_drop"].contains(&reason.as_str())), "{summary}");
}

#[test]
fn wrong_requests_are_refused_and_dead_clients_end() {
    let program = Program::start("");
    let ask = |request: &Value| {
        let mut stream = wirepath_control_socket::connect(&program.socket(), Duration::from_secs(60)).unwrap();
        stream.write_all(format!("{request}\n").as_bytes()).unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        (serde_json::from_str::<Value>(&line).unwrap(), stream)
    };
    for (key, value, why) in [
        ("count", json!(0), "count: found 0, expected a number from 1 to 10000"),
        ("count", json!(u64::MAX), "count: found 18446744073709551615"),
        ("seconds", json!(0), "seconds: found 0"),
        ("port", json!(7), "expected the key \"port\" with a text"),
        ("pattern", json!(""), "pattern: column 1: "),
        ("points", json!(["rx"]), "trace: unknown key \"points\""),
    ] {
        let mut request = json!({ "request": "trace" });
        request[key] = value;
        let (answer, _) = ask(&request);
        assert!(answer["error"].as_str().is_some_and(|error| error.contains(why)), "{answer}");
    }
    let slow = json!({ "request": "trace", "pattern": "tcp" });
    let four: Vec<BufReader<UnixStream>> = (0..4).map(|_| ask(&slow).1).collect();
    let (answer, _) = ask(&slow);
    assert_eq!(answer["error"], "4 traces run already, and no more may run at a time");
    drop(four);
    // Clients that ask for much and leave.
    let mut begun = 0;
    for _ in 0..200 {
        begun += u32::from(ask(&json!({ "request": "trace", "count": 10_000 })).0["ok"] == true);
    }
    assert!(begun >= 50, "{begun}");
    assert!(wirepath_testlab::eventually(Duration::from_secs(60), || trace(&program, &["-n", "3"]).len() == 3));
    let summary = program.stop();
    assert_eq!((&summary["leaked_buffers"], &summary["in_flight"]), (&json!(0), &json!(0)));
}
