use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::Failure;

/// The flag of the stop request that signals make.
static STOP_FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Returns whether a signal has requested a stop.
pub(super) fn is_requested() -> bool {
    STOP_FLAG.get().is_some_and(|flag| flag.load(Ordering::SeqCst))
}

/// Returns the flag that SIGHUP sets. From the first call on, SIGHUP does not end the program.
pub fn hangup_flag() -> Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let flag = FLAG.get_or_init(|| {
        let flag = Arc::default();
        // This fails only for signals that no program can handle.
        let _ = signal_hook::flag::register(SIGHUP, Arc::clone(&flag));
        flag
    });
    Arc::clone(flag)
}

/// A stop request, made by SIGINT, by SIGTERM or by the program itself.
#[derive(Debug)]
pub struct Stop {
    flag: Arc<AtomicBool>,
    wake_rx: UnixStream,
    wake_tx: UnixStream,
}

impl Stop {
    /// Handles SIGINT and SIGTERM. The first signal requests a stop. The second ends the program with exit
    /// code 1, in case the stop hangs.
    pub fn on_signals() -> Result<Self, Failure> {
        let stop = Self::manual()?;
        let signals = |e| Failure::failed(format!("cannot handle signals: {e}"));
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the flag is not set yet when the first signal passes the check.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop.flag)).map_err(signals)?;
            signal_hook::flag::register(signal, Arc::clone(&stop.flag)).map_err(signals)?;
            let wake_tx = stop.wake_tx.try_clone().map_err(signals)?;
            signal_hook::low_level::pipe::register(signal, wake_tx).map_err(signals)?;
        }
        let _ = STOP_FLAG.set(Arc::clone(&stop.flag));
        Ok(stop)
    }

    /// Creates a stop request that only [`Self::request`] sets.
    pub fn manual() -> Result<Self, Failure> {
        let (wake_rx, wake_tx) =
            UnixStream::pair().map_err(|e| Failure::failed(format!("cannot make a socket pair: {e}")))?;
        Ok(Self { flag: Arc::default(), wake_rx, wake_tx })
    }

    /// Requests a stop.
    pub fn request(&self) {
        self.flag.store(true, Ordering::SeqCst);
        // The buffer holds more than the single byte that is ever needed.
        let _ = (&self.wake_tx).write(&[0]);
    }

    /// Returns whether a stop was requested.
    pub fn requested(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// Returns the flag, for threads that poll it.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Sleeps for `duration` or until a stop is requested. Returns whether a stop was requested.
    pub fn wait(&self, duration: Duration) -> bool {
        let end = Instant::now() + duration;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if self.requested() || left.is_zero() {
                return self.requested();
            }
            if self.wake_rx.set_read_timeout(Some(left)).is_err() {
                std::thread::sleep(left.min(Duration::from_millis(50)));
                continue;
            }
            match (&self.wake_rx).read(&mut [0]) {
                Err(e) if e.kind() == ErrorKind::Interrupted || e.kind() == ErrorKind::WouldBlock => {}
                _ => return self.requested(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_ends_every_wait() {
        let stop = Stop::manual().unwrap();
        assert!(!stop.wait(Duration::from_millis(1)));
        let flag = stop.flag();
        std::thread::scope(|s| {
            s.spawn(|| stop.request());
            while !stop.wait(Duration::from_secs(3600)) {}
        });
        assert!(flag.load(Ordering::SeqCst) && stop.wait(Duration::from_secs(3600)), "and the next one too");
    }

    #[test]
    fn signals_set_the_flag() {
        let stop = Stop::on_signals().unwrap();
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert!(stop.wait(Duration::from_secs(3600)));
    }
}
