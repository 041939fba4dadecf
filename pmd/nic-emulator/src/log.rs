//! The emulator's log: one line with the reason for everything that was refused. A repeated line is written
//! the first few times, then at each power of ten.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Number of lines that are written; further ones are only counted.
const MOST: u64 = 10_000;
/// Number of times that the same line is written before it is only written at powers of ten.
const ONE_BY_ONE: u64 = 3;
/// Number of different lines that are remembered.
const REMEMBERED: usize = 1024;

/// The log. Clones share one target.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    to: Target,
    lines: u64,
    written: u64,
    /// Lines that could not be written.
    lost: u64,
    occurrences: HashMap<String, Occurrences>,
    last: Option<String>,
}

/// Occurrences of a line.
struct Occurrences {
    times: u64,
    /// Value of [`Shared::lines`] at the last one.
    last: u64,
}

enum Target {
    Stderr,
    File(File),
    Discard,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").finish_non_exhaustive()
    }
}

impl Log {
    fn to(to: Target) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Shared {
                to,
                lines: 0,
                written: 0,
                lost: 0,
                occurrences: HashMap::new(),
                last: None,
            })),
        }
    }

    /// Creates a log that writes to standard error.
    pub fn stderr() -> Self {
        Self::to(Target::Stderr)
    }

    /// Creates a log that appends to a file.
    ///
    /// # Errors
    /// If the file cannot be opened, or is a pipe that nobody reads.
    pub fn file(path: &Path) -> std::io::Result<Self> {
        // A pipe without a reader would block the program under test.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        Ok(Self::to(Target::File(File::options().create(true).append(true).custom_flags(flags).open(path)?)))
    }

    /// Creates a log that discards its lines. Lines are counted, and the last one is kept.
    pub fn discard() -> Self {
        Self::to(Target::Discard)
    }

    /// Writes a line.
    pub fn line(&self, text: impl fmt::Display) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.lines += 1;
        let text = text.to_string();
        let times = shared.times(&text);
        if shared.written < MOST && (times <= ONE_BY_ONE || is_power_of_ten(times)) {
            shared.written += 1;
            let again = if times > ONE_BY_ONE { format!(" ({times} times so far)") } else { String::new() };
            let end = if shared.written == MOST { " (further lines are only counted)" } else { "" };
            shared.write(&format!("wirepath-nic: {text}{again}{end}\n"));
        }
        shared.last = Some(text);
    }

    /// Returns the number of lines, including those that were not written.
    pub fn lines(&self) -> u64 {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).lines
    }

    /// Returns the number of lines that could not be written.
    pub fn lost(&self) -> u64 {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).lost
    }

    /// Returns the lines that occurred last, at most `most`, each with the number of its occurrences. The latest is
    /// the last one.
    pub fn recent(&self, most: usize) -> Vec<(String, u64)> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines: Vec<_> = shared.occurrences.iter().collect();
        lines.sort_unstable_by_key(|(_, seen)| seen.last);
        lines.drain(..lines.len().saturating_sub(most));
        lines.into_iter().map(|(text, seen)| (text.clone(), seen.times)).collect()
    }

    /// Returns the last line, even if it was not written.
    pub fn last(&self) -> Option<String> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }
}

impl Shared {
    /// Counts a line and returns the number of its occurrences. If too many different lines are remembered,
    /// all are forgotten first.
    fn times(&mut self, text: &str) -> u64 {
        if let Some(seen) = self.occurrences.get_mut(text) {
            seen.times += 1;
            seen.last = self.lines;
            return seen.times;
        }
        if self.occurrences.len() >= REMEMBERED {
            self.occurrences.clear();
        }
        self.occurrences.insert(text.to_owned(), Occurrences { times: 1, last: self.lines });
        1
    }

    fn write(&mut self, line: &str) {
        // A log that cannot be written must not disturb the program under test. rustix bypasses the lock of the
        // standard library, which may be locked for ever in a process after fork.
        let written = match &self.to {
            Target::Stderr => write_now(rustix::stdio::stderr(), line.as_bytes()),
            Target::File(file) => write_now(file.as_fd(), line.as_bytes()),
            Target::Discard => true,
        };
        self.lost += u64::from(!written);
    }
}

/// Bytes that a pipe takes at once if it has room (`PIPE_BUF`, pipe(7)).
const PIPE_BUF: usize = 4096;

/// Writes a line if it can be written without waiting. A pipe without a reader gets no line, because the write
/// would end the program by SIGPIPE.
fn write_now(to: BorrowedFd<'_>, line: &[u8]) -> bool {
    let mut ready = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let room = poll(&mut ready, Some(&now)).is_ok() && ready[0].revents() == PollFlags::OUT;
    let line = &line[..line.len().min(PIPE_BUF)];
    room && rustix::io::write(to, line).is_ok_and(|written| written == line.len())
}

fn is_power_of_ten(n: u64) -> bool {
    n.checked_ilog10().is_some_and(|log| 10u64.pow(log) == n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_lines_are_written_less_often() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = Log::file(file.path()).unwrap();
        for _ in 0..25 {
            log.line("port 1 is held");
            log.line("so is port 2");
        }
        let text = std::fs::read_to_string(file.path()).unwrap();
        let expected: String = ["", "", "", " (10 times so far)"]
            .iter()
            .map(|again| format!("wirepath-nic: port 1 is held{again}\nwirepath-nic: so is port 2{again}\n"))
            .collect();
        assert_eq!((text, log.lines()), (expected, 50));
        log.line("port 1 is held");
        let line = |text: &str, times| (text.to_owned(), times);
        assert_eq!(log.recent(8), [line("so is port 2", 25), line("port 1 is held", 26)]);
        assert_eq!(log.recent(1), [line("port 1 is held", 26)]);
    }

    #[test]
    fn a_full_or_closed_pipe_loses_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(Log::file(&path).is_err(), "nobody reads it");
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut reader = File::options().read(true).custom_flags(flags).open(&path).unwrap();
        let log = Log::file(&path).unwrap();
        (0..5000).for_each(|n| log.line(format_args!("{n}: {}", "x".repeat(100))));
        let mut text = Vec::new();
        // The writer is still there, so the read ends with an error and not with the end of the file.
        let _ = std::io::Read::read_to_end(&mut reader, &mut text);
        let read = text.iter().filter(|byte| **byte == b'\n').count() as u64;
        assert!(read > 100 && log.lost() > 100, "{read}");
        assert_eq!((log.lines(), log.lost()), (5000, 5000 - read));
        drop(reader);
        // A program that another test starts has a copy of the reader until it executes.
        let is_lost = || {
            std::thread::sleep(std::time::Duration::from_millis(1));
            log.line("nobody reads this");
            log.lost() > 5000 - read
        };
        assert!((0..5000).any(|_| is_lost()));
        let full = Log::file(Path::new("/dev/full")).unwrap();
        full.line("no room");
        assert_eq!(full.lost(), 1);
    }
}
