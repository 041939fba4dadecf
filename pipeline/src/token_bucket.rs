//! A token bucket rate limiter, for flow rules, for the frames that a gateway itself sends, and for applications.

use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks per nanosecond. They keep the rates of fast links exact to a thousandth.
const TICKS_PER_NS: u64 = 1024;
/// Maximum length of a burst in ticks: two weeks.
const MAX_BURST_TICKS: u64 = 1 << 60;
/// Maximum difference between the clocks of two workers, in ticks.
const CLOCK_SKEW: i64 = (1_000_000_000 * TICKS_PER_NS) as i64;

/// A token bucket that threads can share. It stores the theoretical arrival time of the generic cell rate algorithm
/// (GCRA, ITU-T I.371).
///
/// A token stands for what the caller limits: a packet, a byte or a bit. The bucket has no clock; the caller passes the
/// time, in a stage that of [`Context::now`](crate::Context::now). The cost is one compare-and-swap for each
/// [`Self::take`], and no lock. A bucket that one worker has to itself is as cheap as one of its own.
///
/// ```
/// use wirepath_pipeline::TokenBucket;
///
/// const MILLISECOND: u64 = 1_000_000;
/// let bucket = TokenBucket::new(1000, 5); // 1000 packets per second, at most 5 at once
/// let pass = |now| (0..8).filter(|_| bucket.take(1, now)).count();
/// assert_eq!(pass(0), 5, "it starts full");
/// assert_eq!(pass(2 * MILLISECOND), 2, "two milliseconds add two tokens");
/// assert_eq!(pass(1000 * MILLISECOND), 5, "and a second no more than a burst");
/// ```
///
/// The arrival time of an empty bucket is one burst ahead of the current time. That of a full bucket is in the past.
#[derive(Debug)]
pub struct TokenBucket {
    /// Tokens per second.
    rate: u64,
    /// Maximum distance of the arrival time from the current time, in ticks.
    burst: u64,
    /// Arrival time in ticks modulo 2^64, which is half a year. A time too far ahead is a time long ago.
    theoretical_arrival: AtomicU64,
}

impl TokenBucket {
    /// Creates a full bucket. `rate` is in tokens per second; 0 counts as 1. `burst` is the number of tokens that a
    /// full bucket has, and thus the most that can be taken at once. It is limited to the tokens of two weeks.
    pub fn new(rate: u64, burst: u128) -> Self {
        let rate = rate.max(1);
        let burst = burst * u128::from(1_000_000_000 * TICKS_PER_NS) / u128::from(rate);
        Self {
            rate,
            burst: u64::try_from(burst).unwrap_or(MAX_BURST_TICKS).min(MAX_BURST_TICKS),
            theoretical_arrival: AtomicU64::new(0),
        }
    }

    /// Takes `tokens` at the time `now`, in nanoseconds since any fixed moment. Returns `false`, and takes none, if
    /// there are fewer. A time before that of an earlier call adds no tokens.
    #[inline]
    pub fn take(&self, tokens: u64, now: u64) -> bool {
        let cost = tokens.saturating_mul(1_000_000_000 * TICKS_PER_NS) / self.rate;
        let cost = cost.min(MAX_BURST_TICKS);
        let now = now.wrapping_mul(TICKS_PER_NS);
        let mut arrival = self.theoretical_arrival.load(Ordering::Relaxed);
        loop {
            let ahead = arrival.wrapping_sub(now) as i64;
            let ahead = if (0..=self.burst as i64 + CLOCK_SKEW).contains(&ahead) { ahead as u64 } else { 0 };
            if ahead + cost > self.burst {
                return false;
            }
            let next = now.wrapping_add(ahead + cost);
            match self.theoretical_arrival.compare_exchange_weak(arrival, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(current) => arrival = current,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_are_followed_by_the_rate() {
        let bucket = TokenBucket::new(10, 3);
        let take = |milliseconds: u64| bucket.take(1, milliseconds * 1_000_000);
        assert_eq!((0..5).filter(|_| take(0)).count(), 3);
        assert!(!take(99));
        assert!(take(100));
        assert!(!take(100));
        assert!(!take(50), "a clock that goes back yields no tokens");
        assert_eq!((0..9).filter(|_| take(1_000_000)).count(), 3);
    }
}
