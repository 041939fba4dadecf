//! `wirepath perf` and the figures of workers of running programs. The tests need no privilege.

use std::io::Write;
use std::time::Duration;

use serde_json::{Value, json};
use wirepath_testlab::eventually;

use crate::show::{GATEWAY, L2FWD, PORTS, Program, WAIT_LIMIT};

/// Rules of both directions for a program with the ports `east` and `west`.
const RULES: &str = "[[rule]]\nrule = 'ingress: udp => count'\n[[rule]]\nrule = 'egress: udp => count'\n";

fn names(worker: &Value) -> Vec<&str> {
    worker["stages"].as_array().unwrap().iter().map(|stage| stage["name"].as_str().unwrap()).collect()
}

fn is_measuring(program: &Program) -> bool {
    program.rows(&["workers"]).iter().any(|worker| worker["measuring"] == true)
}

#[test]
fn perf_shows_the_cycles_of_each_stage() {
    let program = Program::start(L2FWD, &(PORTS.to_owned() + RULES));
    let (code, text) = program.wirepath(&["perf", "--seconds", "0.3", "--turns", "--json"]);
    assert_eq!(code, Some(0), "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let worker = &answer["workers"][0];
    assert_eq!((answer["workers"].as_array().unwrap().len(), &worker["answered"]), (1, &true.into()));
    assert_eq!(names(worker), ["receive", "ingress rules", "Pairs", "egress rules", "transmit", "other"]);
    for key in ["busy_turns", "packets", "batches", "cycles_per_packet", "cycles_per_turn"] {
        assert!(worker[key].as_f64() > Some(0.0), "{key}: {worker}");
    }
    assert_eq!(worker["turns"].as_array().unwrap().len(), 1000, "a generator fills more turns than this");
    let share: f64 = worker["stages"].as_array().unwrap().iter().map(|it| it["share"].as_f64().unwrap()).sum();
    assert!((share - 1.0).abs() < 0.001, "{share}");
    assert!(eventually(WAIT_LIMIT, || !is_measuring(&program)), "the workers stop to measure");

    let (code, text) = program.wirepath(&["perf", "--seconds", "0.1", "--worker", "0"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("worker 0\n") && text.contains("egress rules") && text.contains("CYCLES/TURN"), "{text}");
    let (code, text) = program.wirepath(&["perf", "--worker", "1"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("worker: there are 1, from 0 on"), "{text}");
    let answers = program.ask(&[r#"{"request": "perf", "seconds": 0}"#, r#"{"request": "perf", "turns": 1}"#]);
    assert_eq!(answers[0]["error"], "seconds: expected a number from 0.01 to 3600");
    assert_eq!(answers[1]["error"], "turns: expected true or false");
    let summary = program.stop();
    assert_eq!(summary["failures"], json!([]));
}

#[test]
fn a_measurement_ends_with_its_client() {
    let program = Program::start(L2FWD, PORTS);
    assert!(!is_measuring(&program));
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = wirepath_control_socket::connect(&program.socket(), WAIT_LIMIT).unwrap();
            stream.write_all(b"{\"request\": \"perf\", \"seconds\": 3600}\n").unwrap();
            stream
        })
        .collect();
    assert!(eventually(WAIT_LIMIT, || is_measuring(&program)));
    let mut clients = clients.into_iter();
    drop(clients.next());
    std::thread::sleep(Duration::from_millis(50));
    assert!(is_measuring(&program), "others want it");
    drop(clients);
    assert!(eventually(WAIT_LIMIT, || !is_measuring(&program)), "nobody wants it");
    // A stop during a measurement.
    let mut stream = wirepath_control_socket::connect(&program.socket(), WAIT_LIMIT).unwrap();
    stream.write_all(b"{\"request\": \"perf\", \"seconds\": 3600}\n").unwrap();
    assert!(eventually(WAIT_LIMIT, || is_measuring(&program)));
    assert_eq!(program.stop()["leaked_buffers"], 0);
}

#[test]
fn the_gateway_has_named_stages() {
    let config = PORTS.to_owned()
        + "[underlay]\nport = 'east'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
           remotes = ['10.9.0.2']\nports = [{ port = 'west' }]\n";
    let program = Program::start(GATEWAY, &config);
    let answer = program.ask(&[r#"{"request": "perf", "seconds": 0.2, "worker": 0}"#]).remove(0);
    assert!(names(&answer["workers"][0]).contains(&"Gateway"), "{answer}");
}
