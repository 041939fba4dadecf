use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use wirepath_control_socket::Peer;
use wirepath_pipeline::observe::CaptureReader;

use super::pcapng::{CaptureLimits, EndReason, Pcapng};

/// Time between two looks for packets.
const INTERVAL: Duration = Duration::from_millis(5);
/// Time without progress after which a client that does not read loses its capture.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// The same when the program stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait for the workers to take part.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A capture for a client of the control socket, in a thread of its own.
///
/// The answer has several parts. Each is a line with a JSON object; if it has `bytes`, that number of bytes follows:
/// whole blocks of a pcapng file. The last line has the figures of the capture. The client ends the capture when it
/// shuts its side of the connection down.
#[derive(Debug)]
pub(crate) struct SocketCapture {
    thread: JoinHandle<()>,
}

impl SocketCapture {
    /// Starts a capture. `None`: no thread can be started, and the client was told so.
    pub(crate) fn start(
        peer: &Peer,
        stream: UnixStream,
        reader: CaptureReader,
        limits: CaptureLimits,
        ports: &[String],
    ) -> Option<Self> {
        let (peer, capture) = (peer.to_string(), Pcapng::new(reader, limits, ports));
        // The thread gets the connection by a shared place, so that a client is answered if there is no thread.
        let place = Arc::new(Mutex::new(Some(stream)));
        let take = |place: &Mutex<Option<UnixStream>>| place.lock().unwrap_or_else(PoisonError::into_inner).take();
        let of_thread = Arc::clone(&place);
        let run = move || {
            let Some(stream) = take(&of_thread) else { return };
            let mut client = Client { stream, capture };
            let result = client.run();
            let summary = client.capture.summary();
            match result {
                Ok(()) => tracing::info!("capture by {peer} has ended: {summary}"),
                Err(error) => tracing::warn!("capture by {peer} has ended: {error}; {summary}"),
            }
        };
        let thread = std::thread::Builder::new().name("capture".to_owned()).spawn(run);
        match thread {
            Ok(thread) => Some(Self { thread }),
            Err(error) => {
                let why = crate::cli::no_thread(&error);
                tracing::error!("capture: {why}");
                if let Some(mut stream) = take(&place) {
                    // The socket has room for the only line of the answer.
                    let _ = stream.write_all(format!("{}\n", json!({ "ok": false, "error": why })).as_bytes());
                }
                None
            }
        }
    }

    /// Returns true if the thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end of the thread. The program must have stopped, which ends the capture.
    pub(crate) fn join(self) {
        let _ = self.thread.join();
    }
}

/// The client of a capture.
struct Client {
    stream: UnixStream,
    capture: Pcapng,
}

impl Client {
    fn run(&mut self) -> io::Result<()> {
        let begin = Instant::now();
        while !self.capture.reader().has_begun() && begin.elapsed() < BEGIN_TIMEOUT && !self.is_over(INTERVAL) {}
        self.line(&json!({ "ok": true, "format": "pcapng", "more": true }))?;
        let mut out = Vec::new();
        self.capture.append_head(&mut out);
        loop {
            let ended = self.capture.append_packets(&mut out);
            if ended {
                self.capture.append_statistics(&mut out);
            }
            let idle = out.is_empty();
            if !idle {
                self.line(&json!({ "ok": true, "bytes": out.len(), "more": true }))?;
                self.write(&out)?;
                out.clear();
            }
            if ended {
                let mut summary = self.capture.summary();
                summary["ok"] = true.into();
                return self.line(&summary);
            }
            if self.is_over(if idle { INTERVAL } else { Duration::ZERO }) {
                self.capture.end(EndReason::Client);
            }
        }
    }

    /// Waits, and returns true if the client has ended its side of the connection.
    fn is_over(&mut self, time: Duration) -> bool {
        let timeout = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        let readable = poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&timeout)).is_ok_and(|n| n > 0);
        // Bytes of the client have no meaning here.
        readable
            && match self.stream.read(&mut [0; 4096]) {
                Ok(n) => n == 0,
                Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            }
    }

    fn line(&mut self, value: &Value) -> io::Result<()> {
        self.write(format!("{value}\n").as_bytes())
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let mut last = Instant::now();
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => {
                    bytes = &bytes[n..];
                    last = Instant::now();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let limit = if self.capture.reader().has_ended() { STOP_TIMEOUT } else { CLIENT_TIMEOUT };
                    if last.elapsed() >= limit {
                        return Err(io::Error::new(ErrorKind::TimedOut, "the client does not read"));
                    }
                    let timeout = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                    let _ = poll(&mut [PollFd::new(&self.stream, PollFlags::OUT)], Some(&timeout));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
