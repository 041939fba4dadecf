//! Fuzzes the HTTP server of metrics with the bytes of a scrape. Each complete head gets a well-formed answer. It has
//! metrics if and only if the head asks for them. A head in parts gets the same answer.
//!
//! The first byte chooses the parts, the second one a beginning. The rest is appended to it.

#![no_main]

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use serde_json::Value;

mod gateway_program;

use gateway_program::Program;

const BEGINNINGS: [&str; 10] = [
    "",
    "GET /metrics HTTP/1.1\r\n",
    "HEAD /metrics HTTP/1.0\r\n",
    "GET /metrics?x=1 HTTP/1.1\r\nAccept: ",
    "GET http://host:9464/metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=",
    "POST /metrics HTTP/1.1\r\nContent-Length: ",
    "GET /",
    "GET /metrics HTTP/",
    "GET /metrics HTTP/1.1\r\nAccept: text/plain;q=",
    "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
];
const WAIT_LIMIT: Duration = Duration::from_secs(60);

struct Lab {
    program: Program,
    address: SocketAddr,
}

impl Lab {
    fn new() -> Self {
        let mut program = Program::new(true);
        let mut client = program.connect();
        client.write_all(b"{\"request\": \"status\"}\n").expect("room");
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            program.serve();
            let mut bytes = [0; 4096];
            line.extend(client.read(&mut bytes).map_or(&[][..], |n| &bytes[..n]));
        }
        let status: Value = serde_json::from_slice(&line).expect("JSON");
        let address = status["metrics"].as_str().and_then(|it| it.parse().ok()).expect("an address");
        Self { program, address }
    }

    /// Sends parts of a request and returns the answer.
    fn ask(&mut self, parts: &[&[u8]]) -> Vec<u8> {
        let mut client = TcpStream::connect(self.address).expect("the server listens");
        client.set_nodelay(true).expect("a socket");
        for part in parts {
            if client.write_all(part).is_err() {
                // The server has answered and closed the connection.
                break;
            }
            // The server reads the parts one by one, if its thread gets a turn now.
            self.program.serve();
            std::thread::yield_now();
        }
        let _ = client.shutdown(Shutdown::Write);
        client.set_read_timeout(Some(Duration::from_millis(1))).expect("a socket");
        let (mut answer, mut bytes, begin) = (Vec::new(), [0; 16 << 10], Instant::now());
        loop {
            self.program.serve();
            match client.read(&mut bytes) {
                Ok(0) => return answer,
                Ok(n) => answer.extend_from_slice(&bytes[..n]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return answer,
                Err(error) => panic!("{error}"),
            }
            assert!(begin.elapsed() < WAIT_LIMIT, "no end of the answer");
        }
    }
}

/// Returns whether a complete head asks for metrics.
fn is_scrape(head: &[u8]) -> bool {
    let Ok(head) = std::str::from_utf8(head) else { return false };
    let mut lines = head.split("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or("").split(' ').collect();
    let [method, target, version] = words[..] else { return false };
    let target = target.strip_prefix("http://").map_or(target, |rest| rest.find('/').map_or("", |at| &rest[at..]));
    (method == "GET" || method == "HEAD")
        && (target == "/metrics" || target.starts_with("/metrics?"))
        && version.starts_with("HTTP/1.")
        && lines.all(|line| line.contains(':'))
}

/// Checks an answer and returns its status and fields.
fn check(answer: &[u8], is_head: bool) -> (u16, String) {
    let end = answer.windows(4).position(|it| it == b"\r\n\r\n").expect("the end of the head");
    let head = std::str::from_utf8(&answer[..end]).expect("text");
    let body = &answer[end + 4..];
    let status = head.strip_prefix("HTTP/1.1 ").and_then(|it| it.get(..3)).and_then(|it| it.parse().ok());
    let field = |name: &str| {
        let lines = head.split("\r\n").skip(1).filter_map(|line| line.split_once(": "));
        let found: Vec<&str> = lines.filter(|(it, _)| *it == name).map(|(_, value)| value).collect();
        assert!(found.len() <= 1, "{head}");
        found.first().map(|it| (*it).to_owned())
    };
    let len: usize = field("Content-Length").and_then(|it| it.parse().ok()).expect("a length");
    assert_eq!(field("Connection").as_deref(), Some("close"));
    assert_eq!(body.len(), if is_head { 0 } else { len }, "{head}");
    let kind = field("Content-Type").unwrap_or_default();
    if kind.starts_with("application/openmetrics-text") && !is_head {
        assert!(body.ends_with(b"# EOF\n"));
    }
    (status.expect("a status"), kind)
}

thread_local! {
    static LAB: RefCell<Lab> = RefCell::new(Lab::new());
}

fuzz_target!(|data: &[u8]| {
    let [how, beginning, rest @ ..] = data else { return };
    let beginning = BEGINNINGS[usize::from(*beginning) % BEGINNINGS.len()];
    let mut request = [beginning.as_bytes(), rest].concat();
    match how % 8 {
        0..4 => request.extend_from_slice(b"\r\n\r\n"),
        4 => request.resize(request.len() + 9000, b'x'),
        _ => {}
    }
    let end = request.windows(4).position(|it| it == b"\r\n\r\n").filter(|end| end + 4 <= 8 << 10);
    LAB.with_borrow_mut(|lab| {
        let whole = lab.ask(&[&request]);
        if whole.is_empty() {
            // Bytes that follow a long request may reset the connection before its answer is read.
            assert!(end.is_none() || request.len() > 8 << 10, "no answer to {}", String::from_utf8_lossy(&request));
            return;
        }
        let is_head = request.starts_with(b"HEAD ");
        let (status, kind) = check(&whole, is_head && end.is_some());
        match end {
            Some(end) if is_scrape(&request[..end]) => assert_eq!(status, 200),
            Some(_) => assert!([400, 404, 405, 505].contains(&status), "{status}"),
            None => assert!(status == 431 && request.len() >= 8 << 10, "{status}"),
        }
        if how & 0x80 != 0 && request.len() < 4096 {
            let parts: Vec<&[u8]> = request.chunks(1 + usize::from(how >> 3 & 15) * 7).collect();
            assert_eq!(check(&lab.ask(&parts), is_head && end.is_some()), (status, kind));
        }
    });
});
