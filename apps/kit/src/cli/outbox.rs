//! Standard output and standard error behind a bounded queue and a thread each.
//!
//! The threads that forward packets only append to the queue. Only the writing thread waits for a terminal, a
//! pipe or a disk. A line for which the queue has no room, or that the system refuses, is lost and counted.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::stop;

/// Bytes that wait in a queue at most, results excluded.
const MAX_WAITING: usize = 1 << 20;
/// Bytes of one write. It is short, so that the progress of a long text is seen.
const MAX_WRITE: usize = 64 << 10;
/// Time without progress after which a program that forwards, or that was asked to stop, gives up its output.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The queue of standard output.
pub(super) static STDOUT: Outbox = Outbox::new(Target::Stdout);
/// The queue of standard error.
pub(super) static STDERR: Outbox = Outbox::new(Target::Stderr);
/// True if no output may hold the program for ever. Otherwise a slow reader, such as a pager, holds its end.
static IMPATIENT: AtomicBool = AtomicBool::new(false);

/// Returns the number of lines that could not be written.
pub fn lost_lines() -> u64 {
    STDOUT.state().lost + STDERR.state().lost
}

/// Makes the program end although nobody reads its output.
pub(super) fn be_impatient() {
    IMPATIENT.store(true, Ordering::Relaxed);
}

/// Writes what waits, when it is dropped.
pub(super) struct FlushAtEnd;

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        let _ = STDOUT.flush();
        let _ = STDERR.flush();
    }
}

#[derive(Clone, Copy, Debug)]
enum Target {
    Stdout,
    Stderr,
}

impl Target {
    fn write(self, bytes: &[u8]) -> Result<usize, Errno> {
        match self {
            Self::Stdout => rustix::io::write(io::stdout().as_fd(), bytes),
            Self::Stderr => rustix::io::write(io::stderr().as_fd(), bytes),
        }
    }

    /// Waits until a descriptor that does not block has room.
    fn wait(self) {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let descriptor = match self {
            Self::Stdout => stdout.as_fd(),
            Self::Stderr => stderr.as_fd(),
        };
        let _ = poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::OUT)], None);
    }
}

/// The queue of one output.
#[derive(Debug)]
pub(super) struct Outbox {
    target: Target,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// Bytes that wait.
    bytes: usize,
    /// True if the thread runs.
    started: bool,
    /// True while the thread writes a text that waits no longer.
    writing: bool,
    /// Number of writes, as a sign of progress.
    writes: u64,
    lost: u64,
    /// The part of `lost` that the log has named.
    reported: u64,
    /// True if the last write ended inside a line.
    torn: bool,
    /// True if a write has taken too long.
    abandoned: bool,
    /// The last error of a write.
    error: Option<Errno>,
}

impl Outbox {
    const fn new(target: Target) -> Self {
        let state = State {
            waiting: VecDeque::new(),
            bytes: 0,
            started: false,
            writing: false,
            writes: 0,
            lost: 0,
            reported: 0,
            torn: false,
            abandoned: false,
            error: None,
        };
        Self { target, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends lines if the queue has room, else counts them as lost.
    pub(super) fn offer(&'static self, text: &[u8]) {
        if !self.try_offer(text) {
            self.state().lost += lines(text);
        }
    }

    /// Appends text if the queue has room, and returns whether it has.
    pub(super) fn try_offer(&'static self, text: &[u8]) -> bool {
        let state = self.state();
        let has_room = state.bytes + text.len() <= MAX_WAITING;
        if has_room {
            self.append(state, text.to_vec());
        }
        has_room
    }

    /// Returns whether everything is written.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        !state.writing && state.waiting.is_empty()
    }

    fn append(&'static self, mut state: MutexGuard<'_, State>, text: Vec<u8>) {
        if !state.started {
            let name = format!("wirepath-{:?}", self.target).to_lowercase();
            if std::thread::Builder::new().name(name).spawn(|| self.run()).is_err() {
                state.lost += lines(&text);
                return;
            }
            state.started = true;
        }
        state.bytes += text.len();
        state.waiting.push_back(text);
        self.changed.notify_all();
    }

    /// Writes a result of any length, and returns when it is written. Fails if it cannot be written; a closed
    /// pipe (`| head`) is not an error.
    pub(super) fn deliver(&'static self, text: Vec<u8>) -> io::Result<()> {
        let mut state = self.state();
        state.error = None;
        self.append(state, text);
        self.flush()?;
        match self.state().error.take() {
            None | Some(Errno::PIPE) => Ok(()),
            Some(error) => Err(error.into()),
        }
    }

    /// Waits until everything is written. A program that forwards, or that was asked to stop, gives up when
    /// nothing has been written for some time.
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut state = self.state();
        let mut last = (state.writes, Instant::now());
        while state.started && (state.writing || !state.waiting.is_empty()) {
            state =
                self.changed.wait_timeout(state, Duration::from_millis(50)).unwrap_or_else(PoisonError::into_inner).0;
            if state.writes != last.0 {
                last = (state.writes, Instant::now());
                state.abandoned = false;
            }
            let may_end = stop::is_requested() || IMPATIENT.load(Ordering::Relaxed);
            if may_end && (state.abandoned || last.1.elapsed() > END_LIMIT) {
                state.abandoned = true;
                let waiting = std::mem::take(&mut state.waiting);
                state.lost += waiting.iter().map(|text| lines(text)).sum::<u64>();
                state.bytes = 0;
                return Err(io::Error::new(io::ErrorKind::TimedOut, "nobody reads it"));
            }
        }
        Ok(())
    }

    /// Writes texts for ever.
    fn run(&self) {
        let mut state = self.state();
        loop {
            let Some(text) = state.waiting.pop_front() else {
                state.writing = false;
                self.changed.notify_all();
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.writing = true;
            let torn = std::mem::take(&mut state.torn);
            drop(state);
            // The rest of a line that the system took a part of is lost. The next record begins on a line of its own.
            let done = if torn { self.write(b"\n").map_err(|(error, _)| (error, &text[..])) } else { Ok(()) };
            let done = done.and_then(|()| self.write(&text));
            state = self.state();
            state.bytes = state.bytes.saturating_sub(text.len());
            match done {
                Ok(()) => state = self.report_lost(state),
                Err((error, rest)) => {
                    state.torn =
                        if rest.len() < text.len() { !text[..text.len() - rest.len()].ends_with(b"\n") } else { torn };
                    state.error = Some(error);
                    state.lost += lines(rest);
                }
            }
        }
    }

    /// Logs how many lines of the log are lost, once lines can be written again.
    fn report_lost<'s>(&'s self, mut state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        if matches!(self.target, Target::Stdout) || state.lost == state.reported || !state.waiting.is_empty() {
            return state;
        }
        let (lines, error) = (state.lost - state.reported, state.error.take());
        state.reported = state.lost;
        drop(state);
        let why = error.map_or_else(|| "nobody read it in time".to_owned(), |error| io::Error::from(error).to_string());
        super::log::write(tracing::Level::WARN, module_path!(), format!("{lines} lines of the log are lost: {why}"));
        self.state()
    }

    /// Writes a text. On error, returns also what was not written.
    fn write<'t>(&self, text: &'t [u8]) -> Result<(), (Errno, &'t [u8])> {
        let mut rest = text;
        while !rest.is_empty() {
            match self.target.write(&rest[..rest.len().min(MAX_WRITE)]) {
                Ok(n) => rest = &rest[n..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.target.wait(),
                Err(error) => return Err((error, rest)),
            }
            self.state().writes += 1;
        }
        Ok(())
    }
}

/// Number of lines of a text; the last one may lack its line feed.
fn lines(text: &[u8]) -> u64 {
    let whole = text.iter().filter(|byte| **byte == b'\n').count();
    whole as u64 + u64::from(text.last().is_some_and(|byte| *byte != b'\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted() {
        assert_eq!([&b""[..], b"a", b"a\n", b"a\nb", b"\n\n"].map(lines), [0, 1, 1, 2, 2]);
    }
}
