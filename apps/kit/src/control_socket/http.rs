//! HTTP for metrics: `GET /metrics` (HTTP/1.1, RFC 9112).
//!
//! A thread of its own serves all connections. It asks the control thread for a text, at most one at a time, and gives
//! it to all clients that wait. So no client costs the control thread more than the others.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_pipeline::registry::MetricsFormat;

/// Connections at a time.
const CLIENTS: usize = 16;
/// Bytes of a request.
const REQUEST_BYTES: usize = 8 << 10;
/// Time from the connection to the end of the request, from there to the text, and from there to the end of the answer.
const TIME: Duration = Duration::from_secs(5);
/// Time that a connection has for its request even if others wait.
const MIN_TIME: Duration = Duration::from_secs(1);
/// Time for which a text answers further requests. It bounds the load of the control thread.
const REUSE: Duration = Duration::from_millis(200);
/// Time and bytes for which a closed connection is read, so that the client gets the answer before a reset.
const LINGER: (Duration, usize) = (Duration::from_secs(1), 256 << 10);

/// The server. Its thread ends with it.
#[derive(Debug)]
pub(super) struct MetricsServer {
    address: SocketAddr,
    requests: Receiver<MetricsFormat>,
    /// `None` only while the server ends.
    answers: Option<SyncSender<String>>,
    /// Wakes the thread: a byte means an answer, the end means the end.
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Finds why [`Self::open`] would fail.
    pub(super) fn check(address: SocketAddr) -> io::Result<()> {
        TcpListener::bind(address).map(drop)
    }

    /// Listens on an address.
    pub(super) fn open(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let (asks, requests) = sync_channel(1);
        let (answers, texts) = sync_channel(1);
        let server = Server { listener, woken, asks, texts, clients: Vec::new(), asked: None, recent: None };
        let thread = std::thread::Builder::new().name("metrics".to_owned()).spawn(move || server.run())?;
        Ok(Self { address, requests, answers: Some(answers), wake: Some(wake), thread: Some(thread) })
    }

    /// Returns the address, with the port that the kernel chose if the settings say 0.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the form of a text that the thread needs. The next call returns `None` until [`Self::answer`] was called
    /// and another text is needed.
    pub(super) fn request(&self) -> Option<MetricsFormat> {
        self.requests.try_recv().ok()
    }

    /// Answers the last request. It never blocks, because the thread has at most one request.
    pub(super) fn answer(&mut self, text: String) {
        let sent = self.answers.as_ref().is_some_and(|answers| answers.try_send(text).is_ok());
        if let Some(mut wake) = self.wake.as_ref().filter(|_| sent) {
            let _ = wake.write(&[0]);
        }
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        drop((self.answers.take(), self.wake.take()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's part.
struct Server {
    listener: TcpListener,
    woken: UnixStream,
    asks: SyncSender<MetricsFormat>,
    texts: Receiver<String>,
    clients: Vec<Client>,
    /// Form of the text that the control thread makes now.
    asked: Option<MetricsFormat>,
    /// The last text, for [`REUSE`].
    recent: Option<(Instant, MetricsFormat, Arc<str>)>,
}

struct Client {
    stream: TcpStream,
    state: State,
    /// Start of the state.
    since: Instant,
}

enum State {
    Request(Vec<u8>),
    /// Waits for a text; `true`: for its length only.
    Waiting(MetricsFormat, bool),
    /// Head, text and written bytes.
    Answer(String, Arc<str>, usize),
    /// The answer is written. Bytes that were read and ignored since.
    Closing(usize),
}

impl Server {
    fn run(mut self) {
        loop {
            let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            for client in &self.clients {
                fds.push(PollFd::new(&client.stream, client.state.waits_for()));
            }
            let busy = !self.clients.is_empty() || self.recent.is_some();
            let timeout = busy.then_some(Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
            let polled = poll(&mut fds, timeout.as_ref());
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if polled.is_err() {
                // Interrupted, or out of memory.
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if ready[0] && !self.take_texts() {
                return;
            }
            let mut ready_clients = ready[2..].iter();
            self.clients.retain_mut(|client| {
                let ready = *ready_clients.next().unwrap_or(&false);
                (!ready || client.step()) && client.is_in_time()
            });
            if ready[1] {
                self.accept();
            }
            self.supply();
        }
    }

    /// Takes the text that is ready. Returns false if the program ends.
    fn take_texts(&mut self) -> bool {
        let mut bytes = [0; 16];
        match self.woken.read(&mut bytes) {
            Ok(0) => return false,
            Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return false,
            _ => {}
        }
        if let Ok(text) = self.texts.try_recv()
            && let Some(format) = self.asked.take()
        {
            self.recent = Some((Instant::now(), format, text.into()));
        }
        true
    }

    fn accept(&mut self) {
        // More than these wait for the next turn, so that a flood of connections does not hold the others.
        for _ in 0..CLIENTS {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => continue,
                Err(_) => {
                    // Out of file descriptors or memory: the connection would be reported again at once.
                    std::thread::sleep(Duration::from_millis(100));
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.clients.len() >= CLIENTS && !self.evict() {
                let _ = (&stream).write(head("503 Service Unavailable", "", 0).as_bytes());
                continue;
            }
            let state = State::Request(Vec::new());
            self.clients.push(Client { stream, state, since: Instant::now() });
        }
    }

    /// Ends a connection that is closing, or else the one that needs the longest time for its request.
    fn evict(&mut self) -> bool {
        let age = |client: &Client| match client.state {
            State::Closing(_) => Some(Duration::MAX),
            State::Request(_) => Some(client.since.elapsed()).filter(|age| *age >= MIN_TIME),
            _ => None,
        };
        let oldest = self.clients.iter().enumerate().filter_map(|(i, client)| Some((age(client)?, i))).max();
        oldest.map(|(_, i)| self.clients.swap_remove(i)).is_some()
    }

    /// Gives the recent text to the clients that wait for it, and asks for another one if clients still wait.
    fn supply(&mut self) {
        self.recent = self.recent.take().filter(|(at, ..)| at.elapsed() < REUSE);
        let mut wanted = None;
        for client in &mut self.clients {
            let State::Waiting(format, head_only) = client.state else { continue };
            match &self.recent {
                Some((_, recent, text)) if *recent == format => {
                    let head = head("200 OK", content_type(format), text.len());
                    client.answer(head, if head_only { "".into() } else { text.clone() });
                }
                _ => wanted = wanted.or(Some(format)),
            }
        }
        // A recent text of the other form counts as well, so that two clients do not double the load.
        if self.asked.is_none() && self.recent.is_none() && wanted.is_some_and(|it| self.asks.try_send(it).is_ok()) {
            self.asked = wanted;
        }
    }
}

impl State {
    fn waits_for(&self) -> PollFlags {
        match self {
            Self::Request(_) | Self::Closing(_) => PollFlags::IN,
            Self::Waiting(..) => PollFlags::empty(),
            Self::Answer(..) => PollFlags::OUT,
        }
    }
}

impl Client {
    fn enter(&mut self, state: State) {
        (self.state, self.since) = (state, Instant::now());
    }

    fn answer(&mut self, head: String, body: Arc<str>) {
        self.enter(State::Answer(head, body, 0));
    }

    /// Returns false if the connection has reached its time limit.
    fn is_in_time(&mut self) -> bool {
        let age = self.since.elapsed();
        match self.state {
            State::Closing(_) => age < LINGER.0,
            State::Request(_) | State::Answer(..) => age < TIME,
            State::Waiting(..) => {
                if age >= TIME {
                    self.answer(head("503 Service Unavailable", "", 0), "".into());
                }
                true
            }
        }
    }

    /// Reads or writes once. Returns false at the end of the connection.
    fn step(&mut self) -> bool {
        let mut bytes = [0; 4096];
        let moved = match &mut self.state {
            State::Request(_) | State::Closing(_) => self.stream.read(&mut bytes),
            State::Answer(head, body, written) => {
                let parts = [head.as_bytes(), body.as_bytes()];
                let rest =
                    if *written < head.len() { &parts[0][*written..] } else { &parts[1][*written - head.len()..] };
                self.stream.write(rest)
            }
            // Only an error or a hang-up is reported here.
            State::Waiting(..) => return false,
        };
        let n = match moved {
            Ok(0) => return false,
            Ok(n) => n,
            Err(error) => return matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        };
        match &mut self.state {
            State::Request(request) => {
                request.extend_from_slice(&bytes[..n]);
                if let Some(reply) = reply_to(request) {
                    match reply {
                        Reply::Metrics { format, head_only } => self.enter(State::Waiting(format, head_only)),
                        Reply::Refusal(head) => self.answer(head, "".into()),
                    }
                }
            }
            State::Answer(head, body, written) => {
                *written += n;
                if *written == head.len() + body.len() {
                    let _ = self.stream.shutdown(Shutdown::Write);
                    self.enter(State::Closing(0));
                }
            }
            State::Closing(ignored) => {
                *ignored += n;
                return *ignored < LINGER.1;
            }
            State::Waiting(..) => {}
        }
        true
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Metrics { format: MetricsFormat, head_only: bool },
    Refusal(String),
}

fn head(status: &str, fields: &str, length: usize) -> String {
    format!("HTTP/1.1 {status}\r\n{fields}Content-Length: {length}\r\nConnection: close\r\n\r\n")
}

fn content_type(format: MetricsFormat) -> &'static str {
    match format {
        MetricsFormat::OpenMetrics => {
            "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\nVary: Accept\r\n"
        }
        MetricsFormat::Prometheus => "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\nVary: Accept\r\n",
    }
}

/// Returns the reply to a request, or `None` if its head is not complete.
fn reply_to(request: &[u8]) -> Option<Reply> {
    let refusal = |status: &str| Some(Reply::Refusal(head(status, "", 0)));
    let end = request.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let Some(end) = end.filter(|end| end + 4 <= REQUEST_BYTES) else {
        let too_long = request.len() >= REQUEST_BYTES;
        return if too_long { refusal("431 Request Header Fields Too Large") } else { None };
    };
    let Ok(text) = std::str::from_utf8(&request[..end]) else { return refusal("400 Bad Request") };
    let mut lines = text.split("\r\n");
    let parts: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = parts[..] else { return refusal("400 Bad Request") };
    if !version.starts_with("HTTP/1.") {
        return refusal(if version.starts_with("HTTP/") {
            "505 HTTP Version Not Supported"
        } else {
            "400 Bad Request"
        });
    }
    let mut accept = String::new();
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { return refusal("400 Bad Request") };
        if name.eq_ignore_ascii_case("accept") {
            accept.push_str(value);
            accept.push(',');
        }
    }
    // The absolute form names the server as well (RFC 9112, section 3.2.2).
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |slash| &rest[slash..]),
        None => target,
    };
    if path.split('?').next() != Some("/metrics") {
        return refusal("404 Not Found");
    }
    match method {
        "GET" | "HEAD" => Some(Reply::Metrics { format: preferred(&accept), head_only: method == "HEAD" }),
        _ => Some(Reply::Refusal(head("405 Method Not Allowed", "Allow: GET, HEAD\r\n", 0))),
    }
}

/// Returns the form that a field `Accept` prefers (RFC 9110, section 12.5.1). Both forms are plain text, so any other
/// wish gets the older one.
fn preferred(accept: &str) -> MetricsFormat {
    let (mut open, mut plain) = (0.0, 0.0);
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let (mut quality, mut known) = (1.0, true);
        for part in parts {
            match part.split_once('=') {
                Some(("q", value)) => quality = value.parse().unwrap_or(0.0),
                Some(("version", value)) => known = ["1.0.0", "0.0.1", "0.0.4"].contains(&value.trim_matches('"')),
                _ => {}
            }
        }
        match kind.as_str() {
            "application/openmetrics-text" if known => open = f32::max(open, quality),
            "text/plain" if known => plain = f32::max(plain, quality),
            _ => {}
        }
    }
    if open > 0.0 && open >= plain { MetricsFormat::OpenMetrics } else { MetricsFormat::Prometheus }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_judged() {
        let status = |request: &str| match reply_to(request.as_bytes()) {
            None => "more".to_owned(),
            Some(Reply::Metrics { format, head_only }) => format!("{format:?} {head_only}"),
            Some(Reply::Refusal(head)) => head.split(' ').nth(1).unwrap().to_owned(),
        };
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(REQUEST_BYTES));
        for (request, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "Prometheus false"),
            ("HEAD /metrics?x=1 HTTP/1.0\r\n\r\n", "Prometheus true"),
            ("GET http://a:9400/metrics HTTP/1.1\r\nACCEPT: application/openmetrics-text\r\n\r\n", "OpenMetrics false"),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n", "more"),
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("GET /metricsx HTTP/1.1\r\n\r\n", "404"),
            ("GET http://a HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /metrics HTTP/2.0\r\n\r\n", "505"),
            ("GET  /metrics HTTP/1.1\r\n\r\n", "400"),
            ("GET /metrics HTTP/1.1\r\nHost\r\n\r\n", "400"),
            ("\r\n\r\n", "400"),
            (&long, "431"),
        ] {
            assert_eq!(status(request), expected, "{:.60}", request);
        }
        assert!(matches!(reply_to(b"GET /metrics HTTP/1.1\r\n\xff: 1\r\n\r\n"), Some(Reply::Refusal(_))));
    }

    #[test]
    fn the_accepted_form_is_chosen() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
            text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, open) in [
            (prometheus, true),
            ("", false),
            ("*/*", false),
            ("text/plain, application/openmetrics-text; q=0.5", false),
            ("application/openmetrics-text; q=0", false),
            ("application/openmetrics-text; version=7.0.0", false),
            ("application/openmetrics-text; q=x", false),
        ] {
            assert_eq!(preferred(accept) == MetricsFormat::OpenMetrics, open, "{accept}");
        }
    }
}
