use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};

use super::Failure;

/// The wish to stop: by SIGINT, SIGTERM, or the program itself.
#[derive(Debug)]
pub struct Stop {
    flag: Arc<AtomicBool>,
    woken: UnixStream,
    wake: UnixStream,
}

impl Stop {
    /// Takes SIGINT and SIGTERM over. The first one asks to stop; the second ends the program with exit code 1, should the stop
    /// hang.
    pub fn on_signals() -> Result<Self, Failure> {
        let stop = Self::by_hand()?;
        let signals = |e| Failure::failed(format!("cannot handle signals: {e}"));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the flag is not set yet when the first signal passes the check.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop.flag)).map_err(signals)?;
            signal_hook::flag::register(signal, Arc::clone(&stop.flag)).map_err(signals)?;
            let wake = stop.wake.try_clone().map_err(signals)?;
            signal_hook::low_level::pipe::register(signal, wake).map_err(signals)?;
        }
        Ok(stop)
    }

    /// Stops by [`Self::request`] only.
    pub fn by_hand() -> Result<Self, Failure> {
        let (woken, wake) =
            UnixStream::pair().map_err(|e| Failure::failed(format!("cannot make a socket pair: {e}")))?;
        Ok(Self { flag: Arc::default(), woken, wake })
    }

    /// Asks to stop.
    pub fn request(&self) {
        self.flag.store(true, Ordering::SeqCst);
        // The buffer holds more than the one byte that is ever needed.
        let _ = (&self.wake).write(&[0]);
    }

    /// Whether to stop.
    pub fn requested(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// The flag, for threads that look at it between their turns.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Sleeps for `duration` or until it is time to stop, whichever comes first; tells whether to stop.
    pub fn wait(&self, duration: Duration) -> bool {
        let end = Instant::now() + duration;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if self.requested() || left.is_zero() {
                return self.requested();
            }
            if self.woken.set_read_timeout(Some(left)).is_err() {
                std::thread::sleep(left.min(Duration::from_millis(50)));
                continue;
            }
            match (&self.woken).read(&mut [0]) {
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
        let stop = Stop::by_hand().unwrap();
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
