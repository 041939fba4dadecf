//! The clock of all threads of a run.

use std::time::Instant;

use wirepath_pipeline::clock::{tick_hz, ticks, ticks_between, ticks_ordered};

/// Nanoseconds since its creation, by the time-stamp counter. All copies agree: it is never set again, so differences
/// of times have no steps. Its frequency is exact to about 10 ppm.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    base: u64,
    /// Nanoseconds per tick, multiplied by 2^32.
    scale: u64,
}

impl Clock {
    /// Starts a clock.
    pub fn start() -> Self {
        let scale = (1e9 / tick_hz() * (1u64 << 32) as f64) as u64;
        Self { base: ticks(), scale }
    }

    /// Returns the time in nanoseconds.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.at(ticks())
    }

    /// Returns the time in nanoseconds after all earlier instructions and before all later ones. It costs more than
    /// [`Self::now`].
    pub fn now_ordered(&self) -> u64 {
        self.at(ticks_ordered())
    }

    #[inline(always)]
    fn at(&self, ticks: u64) -> u64 {
        ((u128::from(ticks_between(self.base, ticks)) * u128::from(self.scale)) >> 32) as u64
    }

    /// Measures the nanoseconds that a read of the clock takes.
    pub fn read_cost(&self) -> f64 {
        const READS: u32 = 10_000;
        let start = Instant::now();
        let last = (0..READS).fold(0, |last: u64, _| last.max(self.now()));
        std::hint::black_box(last);
        start.elapsed().as_nanos() as f64 / f64::from(READS)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn agrees_with_the_clock_of_the_system() {
        let (clock, start) = (Clock::start(), Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        let (found, expected) = (clock.now() as f64, start.elapsed().as_nanos() as f64);
        assert!((found - expected).abs() < expected / 100.0, "{found} and {expected}");
        assert!(clock.read_cost() > 0.0);
    }
}
