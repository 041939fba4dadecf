//! Limit of the rate of messages.

use std::mem::take;
use std::time::{Duration, Instant};

/// Messages that are logged in each interval.
const LINES: u32 = 4;
const INTERVAL: Duration = Duration::from_secs(10);

/// Limit for messages whose causes repeat quickly. Each user has its own.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    /// Start of the interval.
    start: Option<Instant>,
    /// Messages logged in the interval.
    lines: u32,
    /// Messages suppressed since the last one that was logged.
    suppressed: u64,
}

impl LogLimit {
    /// Returns whether a message may be logged now: `Some` with the number of messages suppressed before it.
    pub(crate) fn permit(&mut self) -> Option<u64> {
        self.permit_at(Instant::now())
    }

    fn permit_at(&mut self, now: Instant) -> Option<u64> {
        if self.start.is_none_or(|start| now.duration_since(start) >= INTERVAL) {
            (self.start, self.lines) = (Some(now), 0);
        }
        if self.lines == LINES {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_messages_are_limited_and_counted() {
        let (mut limit, start) = (LogLimit::default(), Instant::now());
        let logged: Vec<_> = (0..10).map(|_| limit.permit_at(start)).collect();
        assert_eq!(logged, [[Some(0); 4].as_slice(), &[None; 6]].concat());
        assert_eq!(limit.permit_at(start + INTERVAL - Duration::from_millis(1)), None);
        assert_eq!(limit.permit_at(start + INTERVAL), Some(7));
        assert_eq!(limit.permit_at(start + INTERVAL), Some(0));
    }
}
