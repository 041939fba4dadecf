//! Rate limits: one token bucket for all workers, as the time until which it is spoken for (GCRA, ITU-T I.371).

use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::{Limit, RateUnit};

/// Parts of a nanosecond that times are counted in, so that the rates of fast links are right to a thousandth.
const PARTS: u64 = 1024;
/// Longest time that a burst is worth: two weeks.
const LONGEST: u64 = 1 << 60;
/// By how much the clocks of workers may differ.
const SLACK: i64 = (1_000_000_000 * PARTS) as i64;

/// The bucket of a rule. The time of an empty bucket lies a burst ahead, that of a full one in the past.
#[derive(Debug)]
pub(super) struct Meter {
    /// Rate per second, in packets or bits.
    rate: u64,
    bits: bool,
    /// How far ahead the time may lie.
    burst: u64,
    /// Modulo 2^64 parts: half a year. What lies further ahead than it can is what was long ago.
    spoken_for: AtomicU64,
}

impl Meter {
    pub(super) fn new(limit: &Limit) -> Self {
        let bits = limit.unit == RateUnit::Bits;
        let units = u128::from(limit.burst) * if bits { 8 } else { 1 };
        let burst = units * u128::from(1_000_000_000 * PARTS) / u128::from(limit.rate.max(1));
        Self {
            rate: limit.rate.max(1),
            bits,
            burst: u64::try_from(burst).unwrap_or(LONGEST).min(LONGEST),
            spoken_for: AtomicU64::new(0),
        }
    }

    /// Takes what a packet of `length` bytes costs at `now` nanoseconds.
    pub(super) fn run(&self, length: usize, now: u64) -> Result<(), DropReason> {
        let units = if self.bits { length as u64 * 8 } else { 1 };
        let cost = units.saturating_mul(1_000_000_000 * PARTS) / self.rate;
        let cost = cost.min(LONGEST);
        let now = now.wrapping_mul(PARTS);
        let mut spoken_for = self.spoken_for.load(Ordering::Relaxed);
        loop {
            let ahead = spoken_for.wrapping_sub(now) as i64;
            let ahead = if (0..=self.burst as i64 + SLACK).contains(&ahead) { ahead as u64 } else { 0 };
            if ahead + cost > self.burst {
                return Err(DropReason::OverRate);
            }
            let then = now.wrapping_add(ahead + cost);
            match self.spoken_for.compare_exchange_weak(spoken_for, then, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(other) => spoken_for = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(meter: &Meter, length: usize, times: impl IntoIterator<Item = u64>) -> usize {
        times.into_iter().filter(|&now| meter.run(length, now).is_ok()).count()
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let meter = Meter::new(&Limit { rate: 1000, unit: RateUnit::Packets, burst: 5 });
        assert_eq!(passed(&meter, 60, [0; 20]), 5);
        // One in a millisecond; a second that is asked a thousand times as often gives as much.
        assert_eq!(passed(&meter, 60, (0..1_000_000).map(|k| k * 1000)), 999);
        assert_eq!(passed(&meter, 60, [2_000_000_000; 20]), 5, "and no more than the burst after a pause");
        assert_eq!(passed(&meter, 60, [1_999_999_000; 20]), 0, "a worker whose clock is behind gets nothing for it");
    }

    #[test]
    fn bits_are_those_of_the_frames() {
        let meter = Meter::new(&Limit { rate: 8_000_000, unit: RateUnit::Bits, burst: 1500 });
        assert_eq!(passed(&meter, 1501, [0; 3]), 0, "longer than the burst");
        assert_eq!(passed(&meter, 500, [0; 9]), 3);
        // A million bytes a second.
        assert_eq!(passed(&meter, 100, (1..=1_000_000).map(|k| k * 1000)), 10_000);
    }

    #[test]
    fn rates_of_links_are_kept_to_a_thousandth() {
        for (rate, length) in
            [(1_000_000_000u64, 64usize), (10_000_000_000, 64), (100_000_000_000, 64), (400_000_000_000, 1500)]
        {
            let meter = Meter::new(&Limit { rate, unit: RateUnit::Bits, burst: length as u64 * 4 });
            let (step, seconds) = (1.0 / (rate as f64 / 8.0 / length as f64) / 3.0 * 1e9, 0.002);
            let count = (seconds * 1e9 / step) as u64;
            let packets = passed(&meter, length, (0..count).map(|k| (k as f64 * step) as u64)) as f64;
            let wanted = rate as f64 / 8.0 / length as f64 * seconds;
            assert!((packets - wanted).abs() < wanted / 1000.0 + 5.0, "{rate}: {packets}, not {wanted}");
        }
    }

    #[test]
    fn times_that_are_long_ago_or_far_ahead_do_not_lock_the_bucket() {
        let meter = Meter::new(&Limit { rate: 1, unit: RateUnit::Packets, burst: 1 });
        let day = 86_400_000_000_000u64;
        for now in [0, 10 * day, 200 * day, 400 * day, 3 * day] {
            assert_eq!(passed(&meter, 60, [now; 3]), 1, "{now}");
        }
        for limit in [(1, u64::MAX), (u64::MAX, 1), (u64::MAX, u64::MAX)] {
            for unit in [RateUnit::Packets, RateUnit::Bits] {
                let meter = Meter::new(&Limit { rate: limit.0, unit, burst: limit.1 });
                let _ = meter.run(1 << 18, u64::MAX);
                let _ = meter.run(usize::MAX >> 8, 0);
            }
        }
    }

    #[test]
    fn workers_share_it() {
        let meter = Meter::new(&Limit { rate: 1000, unit: RateUnit::Packets, burst: 1000 });
        let all: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| passed(&meter, 60, [5; 1000]))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert_eq!(all, 1000);
    }
}
