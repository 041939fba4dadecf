//! Rate limits of rules. All workers share the token bucket of a rule.

use wirepath_flow::{Limit, RateUnit};
use wirepath_packet::drops::DropReason;

use crate::token_bucket::TokenBucket;

/// The rate limit of a rule.
#[derive(Debug)]
pub(super) struct Meter {
    bits: bool,
    /// Each token is worth a packet or a bit.
    bucket: TokenBucket,
}

impl Meter {
    pub(super) fn new(limit: &Limit) -> Self {
        let bits = limit.unit == RateUnit::Bits;
        let burst = u128::from(limit.burst) * if bits { 8 } else { 1 };
        Self { bits, bucket: TokenBucket::new(limit.rate, burst) }
    }

    /// Takes the tokens for a packet of `length` bytes at the time `now` in nanoseconds.
    pub(super) fn run(&self, length: usize, now: u64) -> Result<(), DropReason> {
        let tokens = if self.bits { length as u64 * 8 } else { 1 };
        if self.bucket.take(tokens, now) { Ok(()) } else { Err(DropReason::MeterExceeded) }
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
        // One packet per millisecond passes in a second of requests at a thousand times the rate.
        assert_eq!(passed(&meter, 60, (0..1_000_000).map(|k| k * 1000)), 999);
        assert_eq!(passed(&meter, 60, [2_000_000_000; 20]), 5, "and no more than the burst after a pause");
        assert_eq!(passed(&meter, 60, [1_999_999_000; 20]), 0, "a worker whose clock is behind gets nothing for it");
    }

    #[test]
    fn meters_count_the_bits_of_the_frame() {
        let meter = Meter::new(&Limit { rate: 8_000_000, unit: RateUnit::Bits, burst: 1500 });
        assert_eq!(passed(&meter, 1501, [0; 3]), 0, "longer than the burst");
        assert_eq!(passed(&meter, 500, [0; 9]), 3);
        // A million bytes per second.
        assert_eq!(passed(&meter, 100, (1..=1_000_000).map(|k| k * 1000)), 10_000);
    }

    #[test]
    fn link_rates_are_exact_to_a_thousandth() {
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
    fn distant_times_do_not_block_the_meter() {
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
    fn workers_share_the_meter() {
        let meter = Meter::new(&Limit { rate: 1000, unit: RateUnit::Packets, burst: 1000 });
        let all: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| passed(&meter, 60, [5; 1000]))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert_eq!(all, 1000);
    }
}
