//! Observation of a running program by operators: captures and traces of packets.
//!
//! A *capture* ([`CaptureSpec`], [`CaptureReader`]) gets copies of packets at receipt, at transmission and at drops. A
//! *trace* ([`TraceSpec`], [`TraceReader`]) records the way of single packets through the stages.
//! [`crate::ControlPlane::start_capture`] and [`crate::ControlPlane::start_trace`] begin them. They end when their
//! reader is dropped.
//!
//! Each thread that forwards has a `Tap` with its own list of the sessions. The control thread changes the shared
//! list and notifies the workers, which update their taps between two batches. A program without sessions tests one
//! byte in the worker's memory for each burst, batch and drop.
//!
//! A worker never waits for a reader: all queues and all memory of a session have a fixed size. What finds no room is
//! left out and counted.

mod capture;
mod filter;
mod headers;
mod tap;
mod trace;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use capture::CaptureSession;
pub use capture::{CaptureReader, CaptureSpec, CapturedPacket, FollowedSegment, LeftOut, Point, WallClock};
use filter::Filters;
pub use filter::Pattern;
pub(crate) use tap::Tap;
use trace::TraceSession;
pub use trace::{MAX_TRACES, Trace, TraceEnd, TraceReader, TraceSpec, TraceStep, TraceText};
use wirepath_packet::PortId;
use wirepath_wire::Parser;

use crate::mailbox::Mailbox;
use crate::rules::RuleTableError;

/// Captures, and traces, of a program at a time.
pub const MAX_SESSIONS: usize = 4;

/// Reason why a capture or trace cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// Too many captures or traces.
    #[error("{MAX_SESSIONS} {0} run already, and no more may run at a time")]
    TooMany(&'static str),
    /// The engine refuses the pattern.
    #[error("pattern: {0}")]
    Pattern(#[from] RuleTableError),
}

/// All captures and traces of a program.
#[derive(Debug)]
pub(crate) struct Observers {
    /// Names of the ports.
    ports: RwLock<Vec<Arc<str>>>,
    /// Number of workers. The control thread is the thread behind the last one.
    workers: usize,
    sessions: Mutex<Sessions>,
    /// Number of changes of `sessions`.
    generation: AtomicU64,
    /// Workers to notify; empty before the start.
    mailboxes: OnceLock<Arc<[Mailbox]>>,
}

#[derive(Debug, Default)]
struct Sessions {
    captures: Vec<Arc<CaptureSession>>,
    traces: Vec<Arc<TraceSession>>,
    /// Sessions that have ended, until no worker refers to them. The control thread frees them, not a worker.
    old_captures: Vec<Arc<CaptureSession>>,
    old_traces: Vec<Arc<TraceSession>>,
}

impl Observers {
    /// Creates the list of a program with these ports.
    pub(crate) fn new<'n>(ports: impl Iterator<Item = &'n str>, workers: usize) -> Self {
        Self {
            ports: RwLock::new(ports.map(Arc::from).collect()),
            workers,
            sessions: Mutex::default(),
            generation: AtomicU64::new(0),
            mailboxes: OnceLock::new(),
        }
    }

    /// Returns the names of the ports, by number.
    pub(crate) fn ports(&self) -> Vec<Arc<str>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the name of a port.
    pub(crate) fn port(&self, port: PortId) -> Option<Arc<str>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).get(port.index()).cloned()
    }

    /// Sets the name of a port that was added. Workers read names only for traces.
    pub(crate) fn set_port(&self, port: PortId, name: &str) {
        let mut ports = self.ports.write().unwrap_or_else(PoisonError::into_inner);
        let len = ports.len().max(port.index() + 1);
        ports.resize(len, "?".into());
        ports[port.index()] = name.into();
    }

    /// Sets the workers that are notified of changes.
    pub(crate) fn started(&self, mailboxes: &Arc<[Mailbox]>) {
        let _ = self.mailboxes.set(Arc::clone(mailboxes));
    }

    pub(crate) fn start_capture(&self, spec: CaptureSpec, parser: Parser) -> Result<CaptureReader, ObserveError> {
        let mut sessions = self.sessions();
        if sessions.captures.iter().filter(|it| !it.ended.load(Ordering::Acquire)).count() >= MAX_SESSIONS {
            return Err(ObserveError::TooMany("captures"));
        }
        sessions.retire();
        let filters = Filters::new(spec.pattern.as_ref(), parser, self.workers + 1)?;
        let session = Arc::new(CaptureSession::new(spec, filters, self.ports().len(), self.workers + 1));
        sessions.captures.push(Arc::clone(&session));
        self.changed(sessions);
        Ok(CaptureReader::new(session))
    }

    pub(crate) fn start_trace(&self, spec: TraceSpec, parser: Parser) -> Result<TraceReader, ObserveError> {
        let mut sessions = self.sessions();
        if sessions.traces.iter().filter(|it| !it.ended.load(Ordering::Acquire)).count() >= MAX_SESSIONS {
            return Err(ObserveError::TooMany("traces"));
        }
        sessions.retire();
        let filters = Filters::new(spec.pattern.as_ref(), parser, self.workers + 1)?;
        let session = Arc::new(TraceSession::new(spec, filters, parser, self.workers + 1));
        sessions.traces.push(Arc::clone(&session));
        self.changed(sessions);
        Ok(TraceReader::new(session))
    }

    /// Removes sessions that have ended, and frees those to which no worker refers. The control thread calls this
    /// every few milliseconds.
    pub(crate) fn collect(&self) {
        let mut sessions = self.sessions();
        sessions.old_captures.retain(|it| Arc::strong_count(it) > 1);
        sessions.old_traces.retain(|it| Arc::strong_count(it) > 1);
        if sessions.retire() {
            self.changed(sessions);
        }
    }

    /// Ends all sessions, because the program stops.
    pub(crate) fn end(&self) {
        let sessions = self.sessions();
        sessions.captures.iter().for_each(|it| it.ended.store(true, Ordering::Release));
        sessions.traces.iter().for_each(|it| it.ended.store(true, Ordering::Release));
    }

    fn changed(&self, sessions: MutexGuard<'_, Sessions>) {
        self.generation.fetch_add(1, Ordering::Release);
        drop(sessions);
        for mailbox in self.mailboxes.get().iter().flat_map(|mailboxes| mailboxes.iter()) {
            mailbox.notifier.notify();
        }
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sessions {
    /// Moves sessions that have ended to the old ones. Returns true if there are any.
    fn retire(&mut self) -> bool {
        let old = self.old_captures.len() + self.old_traces.len();
        self.old_captures.extend(self.captures.extract_if(.., |it| it.ended.load(Ordering::Acquire)));
        self.old_traces.extend(self.traces.extract_if(.., |it| it.ended.load(Ordering::Acquire)));
        self.old_captures.len() + self.old_traces.len() > old
    }
}
