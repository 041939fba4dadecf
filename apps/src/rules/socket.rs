//! The control socket for the rules of a running program: a Unix socket with one JSON object per line in each
//! direction.
//!
//! | Request | Answer |
//! |---|---|
//! | `{"list": true}` | `{"ok": true, "rules": [{"id": 3, "rule": "...", "text": "...", "packets": 0, "bytes": 0}]}` |
//! | `{"add": "ingress: any => drop"}` | `{"ok": true, "id": 4}`: behind those of its priority |
//! | `{"remove": 3}` | `{"ok": true}` |
//! | anything that cannot be done | `{"ok": false, "error": "why"}` |

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli::Failure;

/// Maximum number of connections.
const CONNECTIONS: usize = 16;
/// Maximum length of a request in bytes.
const MAX_REQUEST: usize = 64 << 10;
/// Maximum time from the connection to the end of the request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// A request to the running program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    List,
    Add(String),
    Remove(u64),
}

impl Request {
    fn read(line: &[u8]) -> Result<Self, String> {
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

struct Connection {
    stream: UnixStream,
    request: Vec<u8>,
    since: Instant,
}

/// The server end of the socket. Dropping it removes the socket file.
pub(super) struct Server {
    listener: UnixListener,
    path: PathBuf,
    connections: Vec<Connection>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Server {
    /// Listens on the socket; only the owner may connect. A socket file that a killed program left behind is
    /// removed.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::failed(format!("{}: {error}", path.display()));
        if UnixStream::connect(path).is_ok() {
            return Err(Failure::usage(format!("{}: another program listens there", path.display())));
        }
        let left =
            std::fs::symlink_metadata(path).is_ok_and(|it| std::os::unix::fs::FileTypeExt::is_socket(&it.file_type()));
        if left {
            std::fs::remove_file(path).map_err(failed)?;
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned(), connections: Vec::new() })
    }

    /// Serves all connections without waiting.
    pub(super) fn serve(&mut self, mut answer: impl FnMut(Request) -> Result<Value, String>) {
        while self.connections.len() < CONNECTIONS
            && let Ok((stream, _)) = self.listener.accept()
        {
            if stream.set_nonblocking(true).is_ok() {
                self.connections.push(Connection { stream, request: Vec::new(), since: Instant::now() });
            }
        }
        self.connections.retain_mut(|connection| {
            let Some(line) = connection.line() else { return connection.since.elapsed() < CONNECTION_TIMEOUT };
            let answer_text = match line.and_then(|line| Request::read(&line)).and_then(&mut answer) {
                Ok(value) => value,
                Err(error) => json!({ "ok": false, "error": error }),
            };
            // A long list takes a moment to write. A client that does not read it is not waited for any
            // longer.
            let _ = connection.stream.set_nonblocking(false);
            let _ = connection.stream.set_write_timeout(Some(Duration::from_millis(100)));
            let _ = connection.stream.write_all(format!("{answer_text}\n").as_bytes());
            false
        });
    }
}

impl Connection {
    /// Returns the request once it is complete.
    fn line(&mut self) -> Option<Result<Vec<u8>, String>> {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Some(Err("the request ends before its line does".to_owned())),
                Ok(n) => {
                    self.request.extend_from_slice(&bytes[..n]);
                    if let Some(end) = self.request.iter().position(|byte| *byte == b'\n') {
                        self.request.truncate(end);
                        return Some(Ok(std::mem::take(&mut self.request)));
                    }
                    if self.request.len() > MAX_REQUEST {
                        return Some(Err(format!("a request has at most {MAX_REQUEST} bytes")));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => return Some(Err(error.to_string())),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Sends a request to a running program and returns its answer.
pub fn send_request(path: &Path, request: &Value) -> Result<Value, Failure> {
    let failed = |error: io::Error| Failure::failed(format!("{}: {error}", path.display()));
    let mut stream = UnixStream::connect(path).map_err(|error| {
        let hint = "; is it the `socket` of the program's [rules], and does the program run?";
        Failure::failed(format!("{}: {error}{hint}", path.display()))
    })?;
    stream.set_read_timeout(Some(CONNECTION_TIMEOUT)).map_err(failed)?;
    stream.write_all(format!("{request}\n").as_bytes()).map_err(failed)?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(failed)?;
    let answer: Value = serde_json::from_str(text.trim())
        .map_err(|error| Failure::failed(format!("{}: the answer is no JSON: {error}", path.display())))?;
    match answer["error"].as_str() {
        Some(error) => Err(Failure::usage(error)),
        None => Ok(answer),
    }
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

    #[test]
    fn bad_clients_do_not_block_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rules.sock");
        let mut server = Server::open(&path).unwrap();
        assert!(Server::open(&path).is_err(), "another program listens there");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut silent = UnixStream::connect(&path).unwrap();
        silent.write_all(b"{\"li").unwrap();
        let mut long = UnixStream::connect(&path).unwrap();
        let client = std::thread::spawn({
            let path = path.clone();
            move || send_request(&path, &json!({ "add": "a rule" })).unwrap()
        });
        let mut requests = Vec::new();
        while !client.is_finished() {
            server.serve(|request| {
                requests.push(request);
                Ok(json!({ "ok": true, "id": 9 }))
            });
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((client.join().unwrap()["id"].as_u64(), requests.len()), (Some(9), 1));
        // A request that is too long gets an error, and the connection ends.
        long.set_nonblocking(true).unwrap();
        let mut answer_text = String::new();
        while answer_text.is_empty() {
            let _ = long.write(&[b'x'; 4096]);
            server.serve(|_| unreachable!("no whole request"));
            let _ = long.read_to_string(&mut answer_text);
        }
        assert!(answer_text.contains("at most"), "{answer_text}");
        drop(server);
        assert!(!path.exists());
        // A socket file that a killed program left is replaced. Another kind of file is an error.
        drop(UnixListener::bind(&path).unwrap());
        drop(Server::open(&path).unwrap());
        std::fs::write(&path, "mine").unwrap();
        assert!(Server::open(&path).is_err() && path.exists());
    }
}
