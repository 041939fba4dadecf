//! What the emulator has to say: one line for everything that it refused, with the reason.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Lines that are written before the rest is only counted.
const MOST: u64 = 10_000;

/// Where lines go. Cheap to clone.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    to: Target,
    lines: u64,
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
        Self { shared: Arc::new(Mutex::new(Shared { to, lines: 0, last: None })) }
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
        if shared.lines > MOST {
            return;
        }
        let text = text.to_string();
        let end = if shared.lines == MOST { " (what follows is only counted)" } else { "" };
        let line = format!("wirepath-nic: {text}{end}\n");
        // A log that cannot be written must not disturb the program under test.
        let _ = match &mut shared.to {
            // Past the lock of the standard library, which a fork may have left taken.
            Target::Stderr => rustix::io::write(rustix::stdio::stderr(), line.as_bytes()).map(drop).map_err(Into::into),
            Target::File(file) => file.write_all(line.as_bytes()),
            Target::Nowhere => Ok(()),
        };
        shared.last = Some(text);
    }

    /// Lines so far, the unwritten ones included.
    pub fn lines(&self) -> u64 {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).lines
    }

    /// The last line that was written.
    pub fn last(&self) -> Option<String> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }
}
