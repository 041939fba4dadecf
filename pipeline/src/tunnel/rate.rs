//! Limits for what others can make us send.

use super::neighbour::Millis;

/// So many a second, and so many at once.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    rate: u64,
    /// Thousandths of a token.
    burst: u64,
    level: u64,
    at: Millis,
}

impl TokenBucket {
    /// `rate` tokens a second, at most `burst` saved up; full at first.
    pub const fn new(rate: u64, burst: u64) -> Self {
        Self { rate, burst: burst * 1000, level: burst * 1000, at: 0 }
    }

    /// Takes a token, if there is one.
    #[inline]
    pub fn take(&mut self, now: Millis) -> bool {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        self.level = self.level.saturating_add(passed.saturating_mul(self.rate)).min(self.burst);
        let there = self.level >= 1000;
        if there {
            self.level -= 1000;
        }
        there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_then_the_rate() {
        let mut bucket = TokenBucket::new(10, 3);
        assert_eq!((0..5).filter(|_| bucket.take(0)).count(), 3);
        assert!(!bucket.take(99));
        assert!(bucket.take(100));
        assert!(!bucket.take(100));
        assert!(!bucket.take(50), "time that goes back gives nothing");
        assert_eq!((0..9).filter(|_| bucket.take(1_000_000)).count(), 3);
    }
}
