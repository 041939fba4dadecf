//! Fuzzes the control socket with the bytes of its clients. Each line gets one answer, in the order of the
//! lines, and other clients are served as before.
//!
//! The bytes choose requests of all kinds, with keys and values that the program knows or not. They also choose changes
//! of the requests, and how they are split over several writes. The server, its parser and its dispatcher are those of
//! all programs.

#![no_main]

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

mod gateway_program;

use gateway_program::Program;

/// Requests with one answer, and those that stay open, which are the last three.
const REQUESTS: [&str; 17] = [
    "status",
    "tables",
    "show",
    "metrics",
    "objects",
    "add",
    "set",
    "remove",
    "commands",
    "command",
    "reload",
    "configuration",
    "log",
    "nonsense",
    "capture",
    "trace",
    "perf",
];
const OPEN_ENDED: usize = 14;
const KEYS: [&str; 28] = [
    "version",
    "table",
    "where",
    "limit",
    "format",
    "object",
    "arguments",
    "name",
    "level",
    "module",
    "dry_run",
    "points",
    "reason",
    "port",
    "segment",
    "pattern",
    "snap",
    "rate",
    "count",
    "bytes",
    "seconds",
    "slow_us",
    "worker",
    "turns",
    "mac",
    "rule",
    "request",
    "more",
];
const WORDS: [&str; 30] = [
    "ports",
    "fdb",
    "segments",
    "remotes",
    "workers",
    "rules",
    "routes",
    "neighbours",
    "drops",
    "rule",
    "tap",
    "red",
    "wan",
    "lan",
    "port=wan",
    "mac=02:00:00:00:00:07",
    "segment=red",
    "age>0",
    "openmetrics",
    "prometheus",
    "debug",
    "reset",
    "off",
    "rx",
    "tx",
    "ipv4 / udp",
    "no_route",
    "02:00:00:00:00:07",
    "",
    "\u{1f980}\n",
];
/// Longest time in which the server answers. The machine may stop for a while.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }
}

fn value(input: &mut Input<'_>, depth: u8) -> Value {
    match input.byte() % 16 {
        0..6 => WORDS[usize::from(input.byte()) % WORDS.len()].into(),
        6 => i64::from(input.byte()).into(),
        7 => (-1).into(),
        8 => u64::MAX.into(),
        9 => json!(1e300),
        10 => Value::Null,
        11 => (input.byte() & 1 == 1).into(),
        12 | 13 if depth < 3 => (0..input.byte() % 4).map(|_| value(input, depth + 1)).collect(),
        14 if depth < 3 => Value::Object(object(input, depth + 1)),
        _ => String::from_utf8_lossy(&[input.byte(), input.byte(), b'=', input.byte()]).into_owned().into(),
    }
}

fn object(input: &mut Input<'_>, depth: u8) -> Map<String, Value> {
    let key = |input: &mut Input<'_>| KEYS[usize::from(input.byte()) % KEYS.len()].to_owned();
    (0..input.byte() % 4).map(|_| (key(input), value(input, depth))).collect()
}

/// Returns a line without its line feed, and whether its answer may stay open.
fn line(input: &mut Input<'_>) -> (Vec<u8>, bool) {
    let kind = usize::from(input.byte());
    let name = REQUESTS[kind % REQUESTS.len()];
    let mut request = Map::from_iter([("request".to_owned(), Value::from(name))]);
    // The key that the request needs most, so that many requests are valid.
    let needed = match name {
        "show" => "table",
        "add" | "set" | "remove" => "object",
        "command" => "name",
        "log" => "level",
        _ => "version",
    };
    if kind & 0x80 == 0 && needed != "version" {
        request.insert(needed.to_owned(), WORDS[usize::from(input.byte()) % WORDS.len()].into());
    }
    request.extend(object(input, 0));
    let mut bytes = Value::Object(request).to_string().into_bytes();
    let mut is_open = kind % REQUESTS.len() >= OPEN_ENDED;
    match input.byte() {
        // Other bytes anywhere.
        0..32 => {
            let at = usize::from(input.byte()) % bytes.len();
            bytes[at] = input.byte();
            is_open = true;
        }
        32..40 => bytes.truncate(usize::from(input.byte()) % (bytes.len() + 1)),
        40..44 => bytes.splice(1..1, std::iter::repeat_n(b'[', usize::from(input.byte()) * 40)).for_each(drop),
        44..48 => bytes = input.0.iter().take(40).copied().collect(),
        48 => bytes.resize(70_000, b' '),
        _ => {}
    }
    bytes.retain(|byte| *byte != b'\n');
    (bytes, is_open)
}

/// Reads what is there. Returns true at the end of the connection.
fn read(mut client: &UnixStream, answers: &mut Vec<u8>) -> bool {
    let mut bytes = [0; 16 << 10];
    loop {
        match client.read(&mut bytes) {
            Ok(0) => return true,
            Ok(n) => answers.extend_from_slice(&bytes[..n]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return true,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Returns the number of complete answers. Each line of one is an object that says so, or why not.
fn complete(answers: &[u8]) -> usize {
    let mut count = 0;
    for line in answers.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        let answer: Value = serde_json::from_slice(line).expect("an answer is JSON");
        match answer["ok"].as_bool() {
            Some(true) => assert!(answer.get("error").is_none(), "{answer}"),
            Some(false) => assert!(answer["error"].as_str().is_some_and(|it| !it.is_empty()), "{answer}"),
            None => panic!("{answer}"),
        }
        count += usize::from(answer["more"] != true);
    }
    count
}

/// Sends bytes and returns the answers, until there are so many or the server closes.
fn exchange(program: &mut Program, pieces: &[&[u8]], wanted: usize, shuts_down: bool) -> Vec<u8> {
    let client = program.connect();
    let (mut answers, begin) = (Vec::new(), Instant::now());
    let mut closed = false;
    for piece in pieces {
        let mut rest = *piece;
        while !rest.is_empty() && !closed {
            match (&client).write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The server refused a request that is too long.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => closed = true,
                Err(error) => panic!("{error}"),
            }
            program.serve();
            closed |= read(&client, &mut answers);
        }
    }
    if shuts_down {
        let _ = client.shutdown(Shutdown::Write);
    }
    while !closed && (shuts_down || complete(&answers) < wanted) {
        assert!(begin.elapsed() < WAIT_LIMIT, "{} answers of {wanted}", complete(&answers));
        program.serve();
        closed = read(&client, &mut answers);
    }
    answers
}

thread_local! {
    static PROGRAM: RefCell<Program> = RefCell::new(Program::new(false));
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let (how, piece) = (input.byte(), usize::from(input.byte()) + 1);
    let lines: Vec<_> = (0..1 + how % 6).map(|_| line(&mut input)).collect();
    let mut bytes: Vec<u8> = lines.iter().flat_map(|(line, _)| [&line[..], b"\n"].concat()).collect();
    let is_cut = how & 0x40 != 0;
    if is_cut {
        bytes.pop();
    }
    let is_open = lines.iter().any(|(_, is_open)| *is_open);
    let is_long = lines.iter().any(|(line, _)| line.len() > 60_000);
    let whole = lines.len() - usize::from(is_cut);
    let pieces: Vec<&[u8]> = match how & 0x80 {
        0 => vec![&bytes],
        _ if bytes.len() > 4096 => bytes.chunks(2048 + piece).collect(),
        _ => bytes.chunks(piece).collect(),
    };
    PROGRAM.with_borrow_mut(|program| {
        if is_open {
            // Such an answer has no end, so only the client ends the connection.
            let client = program.connect();
            for piece in pieces {
                let _ = (&client).write(piece);
                program.serve();
            }
            (0..4).for_each(|_| program.serve());
            let mut answers = Vec::new();
            read(&client, &mut answers);
            drop(client);
        } else {
            let answers = exchange(program, &pieces, whole, is_cut);
            assert!(answers.is_empty() || answers.ends_with(b"\n"));
            // A request without its line feed is refused at the end of the connection, unless it is empty.
            let refused = usize::from(is_cut && lines.last().is_some_and(|(line, _)| !line.is_empty()));
            if !is_long {
                assert_eq!(complete(&answers), whole + refused, "{}", String::from_utf8_lossy(&answers));
            }
        }
        let status = exchange(program, &[b"{\"request\": \"status\"}\n"], 1, false);
        let status: Value = serde_json::from_slice(&status).expect("JSON");
        assert_eq!((&status["ok"], &status["program"]), (&json!(true), &json!("fuzz")));
    });
});
