use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use wirepath_control_socket::connect;

use super::VERSION;
use crate::cli::{Failure, Stop};

/// Longest wait of a client for the next part of an answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a client without a time limit looks for a stop request.
const STOP_INTERVAL: Duration = Duration::from_millis(50);
/// Longest wait for the rest of an answer after a stop request.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// The option that names the socket of a running program.
#[derive(Clone, Debug, Args)]
pub struct SocketArgument {
    /// Control socket of the program [default: that of the only running program]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl SocketArgument {
    /// Connects to the program.
    ///
    /// # Errors
    /// If the program does not answer. Without `--socket` also if no program or more than one runs; the error lists
    /// them.
    pub fn connect(&self) -> Result<Client, Failure> {
        match &self.socket {
            Some(path) => Client::connect(path),
            None => Client::find(),
        }
    }
}

/// Rows of a table.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Cells of each row.
    pub rows: Vec<Vec<Value>>,
}

/// A connection to a running program.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    /// Time until which an answer that was ended must be complete.
    deadline: Option<Instant>,
}

/// Returns the folders of default sockets, in the order of preference.
pub(super) fn folders() -> Vec<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    [Some(PathBuf::from("/run/wirepath")), own.map(|folder| Path::new(&folder).join("wirepath"))]
        .into_iter()
        .flatten()
        .collect()
}

/// Returns the sockets in a folder.
pub(super) fn sockets_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
    let mut paths: Vec<PathBuf> = sockets.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

impl Client {
    /// Connects to the program that listens on a socket.
    ///
    /// # Errors
    /// If no program listens there, or the user may not connect.
    pub fn connect(path: &Path) -> Result<Self, Failure> {
        let stream = connect(path, TIMEOUT).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => "; does the program run?",
                ErrorKind::PermissionDenied => "; the keys `mode` and `group` of [control] say who may connect",
                _ => "",
            };
            Failure::failed(format!("{}: {error}{hint}", path.display()))
        })?;
        Ok(Self { path: path.to_owned(), stream: BufReader::with_capacity(64 << 10, stream), deadline: None })
    }

    /// Connects to the only running program.
    fn find() -> Result<Self, Failure> {
        let paths: Vec<PathBuf> = folders().iter().flat_map(|folder| sockets_in(folder)).collect();
        let mut refused = Vec::new();
        let mut found: Vec<(Self, Value)> = Vec::new();
        for path in paths {
            match connect(&path, TIMEOUT) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(error) => refused.push(format!("\n  {}: {error}", path.display())),
                Ok(_) => {
                    let mut client = Self::connect(&path)?;
                    let status = client.ask(&json!({ "request": "status" }))?;
                    found.push((client, status));
                }
            }
        }
        if found.len() > 1 {
            let programs = found.iter().map(|(client, status)| {
                let configuration = status["configuration"].as_str().unwrap_or("without a configuration");
                let program = status["program"].as_str().unwrap_or("?");
                format!("\n  --socket {}: {program}, pid {}, {configuration}", client.path.display(), status["pid"])
            });
            let programs: String = programs.collect();
            return Err(Failure::usage(format!("several programs run; name one of them:{programs}")));
        }
        let looked: Vec<String> = folders().iter().map(|folder| folder.display().to_string()).collect();
        found.pop().map(|(client, _)| client).ok_or_else(|| {
            let none =
                format!("no program runs whose socket is in {}; --socket names another one", looked.join(" or "));
            Failure::failed(none + &refused.concat())
        })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&self, error: &io::Error) -> Failure {
        match error.kind() {
            ErrorKind::WouldBlock => {
                let limit = TIMEOUT.as_secs();
                Failure::failed(format!("{}: the program does not answer within {limit} s", self.path.display()))
            }
            _ => Failure::failed(format!("{}: {error}", self.path.display())),
        }
    }

    fn send(&mut self, request: &Value) -> Result<(), Failure> {
        let mut request = request.clone();
        request["version"] = VERSION.into();
        let sent = self.stream.get_mut().write_all(format!("{request}\n").as_bytes());
        sent.map_err(|error| self.failed(&error))
    }

    /// Receives the next line of an answer.
    ///
    /// # Errors
    /// If the program refuses the request, which is invalid usage, or if the connection fails.
    pub fn receive(&mut self) -> Result<Value, Failure> {
        let mut line = Vec::new();
        match self.stream.read_until(b'\n', &mut line) {
            Err(error) => return Err(self.failed(&error)),
            Ok(0) => return Err(Failure::failed(format!("{}: the program has ended", self.path.display()))),
            Ok(_) => {}
        }
        self.parse(&line)
    }

    fn parse(&self, line: &[u8]) -> Result<Value, Failure> {
        let answer: Value = serde_json::from_slice(line)
            .map_err(|error| Failure::failed(format!("{}: the answer is no JSON: {error}", self.path.display())))?;
        match answer["error"].as_str() {
            Some(error) => Err(Failure::usage(error)),
            None => Ok(answer),
        }
    }

    /// Sends a request whose answer has no time limit. [`Self::next_line`] receives it.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn subscribe(&mut self, request: &Value) -> Result<(), Failure> {
        self.stream.get_ref().set_read_timeout(Some(STOP_INTERVAL)).map_err(|error| self.failed(&error))?;
        self.send(request)
    }

    /// Waits for the next line of an answer. A stop request ends the answer: the program then sends the rest. Returns
    /// `None` if it does not within some seconds, or has ended.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn next_line(&mut self, stop: &Stop) -> Result<Option<Value>, Failure> {
        let mut line = Vec::new();
        loop {
            self.end_if_requested(stop);
            match self.stream.read_until(b'\n', &mut line) {
                Ok(_) if line.ends_with(b"\n") => return self.parse(&line).map(Some),
                Ok(_) => return Ok(None),
                Err(error) if !self.goes_on(&error)? => return Ok(None),
                Err(_) => {}
            }
        }
    }

    /// Receives bytes that follow a line, as [`Self::next_line`] does.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn next_bytes(&mut self, count: u64, stop: &Stop) -> Result<Option<Vec<u8>>, Failure> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < count {
            self.end_if_requested(stop);
            let left = count - bytes.len() as u64;
            match (&mut self.stream).take(left).read_to_end(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if !self.goes_on(&error)? => return Ok(None),
                Err(_) => {}
            }
        }
        Ok(Some(bytes))
    }

    /// Ends the answer if a stop is requested.
    fn end_if_requested(&mut self, stop: &Stop) {
        if stop.requested() && self.deadline.is_none() {
            self.deadline = Some(Instant::now() + STOP_TIMEOUT);
            // An error means that the program has closed the connection.
            let _ = self.stream.get_ref().shutdown(Shutdown::Write);
        }
    }

    /// Handles an error of a read. Returns true if the read is to be repeated.
    fn goes_on(&mut self, error: &io::Error) -> Result<bool, Failure> {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                Ok(self.deadline.is_none_or(|deadline| Instant::now() < deadline))
            }
            ErrorKind::ConnectionReset => Ok(false),
            _ => Err(self.failed(error)),
        }
    }

    /// Sends a request and returns its answer.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn ask(&mut self, request: &Value) -> Result<Value, Failure> {
        self.send(request)?;
        self.receive()
    }

    /// Returns rows of a table: those for which all conditions are true, at most `limit`.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn show(&mut self, table: &str, conditions: &[String], limit: Option<u64>) -> Result<Rows, Failure> {
        let mut request = json!({ "request": "show", "table": table, "where": conditions });
        if let Some(limit) = limit {
            request["limit"] = limit.into();
        }
        self.send(&request)?;
        let mut rows = Rows::default();
        loop {
            let mut line = self.receive()?;
            if let Value::Array(columns) = &line["columns"] {
                rows.columns = columns.iter().map(|name| name.as_str().unwrap_or_default().to_owned()).collect();
            }
            if let Value::Array(part) = line["rows"].take() {
                rows.rows.extend(part.into_iter().filter_map(|row| match row {
                    Value::Array(cells) => Some(cells),
                    _ => None,
                }));
            }
            if line["more"] != true {
                return Ok(rows);
            }
        }
    }

    /// Makes the workers measure, and returns the figures of each. `request` has the keys of the request `perf`, and
    /// `time` is that of the measurement.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn perf(&mut self, request: &Value, time: Duration) -> Result<Vec<Value>, Failure> {
        let set = self.stream.get_ref().set_read_timeout(Some(TIMEOUT + time));
        set.map_err(|error| self.failed(&error))?;
        self.send(request)?;
        let mut workers = Vec::new();
        loop {
            let mut line = self.receive()?;
            if let Value::Array(part) = line["workers"].take() {
                workers.extend(part);
            }
            if line["more"] != true {
                return Ok(workers);
            }
        }
    }

    /// Returns the text of the metrics. `format` is `openmetrics` or `prometheus`.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn metrics(&mut self, format: &str) -> Result<String, Failure> {
        self.text(&json!({ "request": "metrics", "format": format }))
    }

    /// Returns the configuration in force.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn configuration(&mut self) -> Result<String, Failure> {
        self.text(&json!({ "request": "configuration" }))
    }

    /// Sends a request that is answered by a text.
    fn text(&mut self, request: &Value) -> Result<String, Failure> {
        self.send(request)?;
        let mut text = String::new();
        loop {
            let line = self.receive()?;
            text.push_str(line["text"].as_str().unwrap_or_default());
            if line["more"] != true {
                return Ok(text);
            }
        }
    }
}
