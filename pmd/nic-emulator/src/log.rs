//! What the emulator has to say: one line for everything that it refused, with the reason. What a program does again and again is
//! written the first few times, then at every tenfold.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Lines that are written before the rest is only counted.
const MOST: u64 = 10_000;
/// Times that the same line is written one by one.
const ONE_BY_ONE: u64 = 3;
/// Different lines that are remembered.
const REMEMBERED: usize = 1024;

/// Where lines go. Cheap to clone.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    to: Target,
    lines: u64,
    written: u64,
    /// How often each line came.
    seen: HashMap<String, u64>,
    last: Option<String>,
}

enum Target {
    Stderr,
    File(File),
    Nowhere,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").finish_non_exhaustive()
    }
}

impl Log {
    fn to(to: Target) -> Self {
        Self { shared: Arc::new(Mutex::new(Shared { to, lines: 0, written: 0, seen: HashMap::new(), last: None })) }
    }

    /// To the standard error of the program.
    pub fn stderr() -> Self {
        Self::to(Target::Stderr)
    }

    /// To a file, at its end.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn file(path: &Path) -> std::io::Result<Self> {
        Ok(Self::to(Target::File(File::options().create(true).append(true).open(path)?)))
    }

    /// Nowhere; lines are counted, and the last one is kept.
    pub fn nowhere() -> Self {
        Self::to(Target::Nowhere)
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
            let end = if shared.written == MOST { " (what follows is only counted)" } else { "" };
            shared.write(&format!("wirepath-nic: {text}{again}{end}\n"));
        }
        shared.last = Some(text);
    }

    /// Lines so far, the unwritten ones included.
    pub fn lines(&self) -> u64 {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).lines
    }

    /// The last line, written or not.
    pub fn last(&self) -> Option<String> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }
}

impl Shared {
    /// How often this line has come, this time included. Of too many different ones all are forgotten.
    fn times(&mut self, text: &str) -> u64 {
        if let Some(times) = self.seen.get_mut(text) {
            *times += 1;
            return *times;
        }
        if self.seen.len() >= REMEMBERED {
            self.seen.clear();
        }
        self.seen.insert(text.to_owned(), 1);
        1
    }

    fn write(&mut self, line: &str) {
        // A log that cannot be written must not disturb the program under test.
        let _ = match &mut self.to {
            // Past the lock of the standard library, which a fork may have left taken.
            Target::Stderr => rustix::io::write(rustix::stdio::stderr(), line.as_bytes()).map(drop).map_err(Into::into),
            Target::File(file) => file.write_all(line.as_bytes()),
            Target::Nowhere => Ok(()),
        };
    }
}

fn is_power_of_ten(n: u64) -> bool {
    n.checked_ilog10().is_some_and(|log| 10u64.pow(log) == n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_again_is_written_ever_more_seldom() {
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
    }
}
