//! The control socket for the rules of a running program: a Unix socket with one JSON object per line in each
//! direction. A connection may carry several requests.
//!
//! | Request | Answer |
//! |---|---|
//! | `{"list": true}` | `{"ok": true, "rules": [{"id": 3, "rule": "...", "text": "...", "packets": 0, "bytes": 0}]}` |
//! | `{"add": "ingress: any => drop"}` | `{"ok": true, "id": 4}`: behind those of its priority |
//! | `{"remove": 3}` | `{"ok": true}` |
//! | anything that cannot be done | `{"ok": false, "error": "why"}` |
//!
//! A list is not a snapshot: each rule is listed as it is when its part of the answer is made.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use wirepath_control_socket::{Listener, connect};

use super::config::SocketSettings;
use crate::cli::Failure;

/// Longest wait of a client for the next part of an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);

/// A request to the running program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    List,
    Add(String),
    Remove(u64),
}

impl Request {
    pub(super) fn read(line: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(line).map_err(|error| format!("no JSON: {error}"))?;
        let expected = || "expected one of {\"list\": true}, {\"add\": \"RULE\"}, {\"remove\": ID}".to_owned();
        let Value::Object(object) = value else { return Err(expected()) };
        match object.iter().next() {
            Some((key, Value::Bool(true))) if object.len() == 1 && key == "list" => Ok(Self::List),
            Some((key, Value::String(text))) if object.len() == 1 && key == "add" => Ok(Self::Add(text.clone())),
            Some((key, Value::Number(id))) if object.len() == 1 && key == "remove" => {
                id.as_u64().map(Self::Remove).ok_or_else(expected)
            }
            _ => Err(expected()),
        }
    }
}

/// Listens on the socket of a configuration.
pub(super) fn listen(settings: &SocketSettings) -> Result<Listener, Failure> {
    Listener::bind(&settings.path, &settings.access).map_err(|error| not_listening(settings, &error))
}

/// Finds why [`listen`] would fail, without making the socket.
pub(super) fn check_socket(settings: &SocketSettings) -> Result<(), Failure> {
    Listener::check(&settings.path).map_err(|error| not_listening(settings, &error))
}

fn not_listening(settings: &SocketSettings, error: &io::Error) -> Failure {
    let text = format!("{}: {error}", settings.path.display());
    if error.kind() == ErrorKind::AddrInUse { Failure::usage(text) } else { Failure::failed(text) }
}

/// Sends a request to a running program and returns its answer.
pub fn send_request(path: &Path, request: &Value) -> Result<Value, Failure> {
    let failed = |error: io::Error| match error.kind() {
        ErrorKind::WouldBlock => {
            let limit = CLIENT_TIMEOUT.as_secs();
            Failure::failed(format!("{}: the program does not answer within {limit} s", path.display()))
        }
        _ => Failure::failed(format!("{}: {error}", path.display())),
    };
    let mut stream = connect(path, CLIENT_TIMEOUT).map_err(|error| {
        let hint = "; is it the `socket` of the program's [rules], and does the program run?";
        Failure::failed(format!("{}: {error}{hint}", path.display()))
    })?;
    stream.write_all(format!("{request}\n").as_bytes()).map_err(failed)?;
    let mut text = Vec::new();
    BufReader::with_capacity(64 << 10, stream).read_until(b'\n', &mut text).map_err(failed)?;
    let answer: Value = serde_json::from_slice(&text)
        .map_err(|error| Failure::failed(format!("{}: the answer is no JSON: {error}", path.display())))?;
    match answer["error"].as_str() {
        Some(error) => Err(Failure::usage(error)),
        None => Ok(answer),
    }
}

/// The answer to a request that cannot be done.
pub(super) fn refusal(why: &str) -> Value {
    json!({ "ok": false, "error": why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        let read = |text: &str| Request::read(text.as_bytes());
        assert_eq!(read("{\"list\": true}"), Ok(Request::List));
        assert_eq!(read("{\"add\": \"x\"}"), Ok(Request::Add("x".to_owned())));
        assert_eq!(read("{\"remove\": 7}"), Ok(Request::Remove(7)));
        for wrong in
            ["", "7", "{}", "{\"list\": false}", "{\"remove\": -1}", "{\"add\": \"x\", \"list\": true}", "\u{0}"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
