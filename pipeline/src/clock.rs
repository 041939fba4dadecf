// UNSAFETY: reads the time-stamp counter with an intrinsic.
#![allow(unsafe_code)]

//! A coarse clock that is cheap enough to read in every turn of a worker.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns the processor's time-stamp counter, or nanoseconds on processors without one.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has the `rdtsc` instruction.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        start().elapsed().as_nanos() as u64
    }
}

/// Returns [`ticks`] after all earlier instructions have ended and before later ones begin. [`ticks`] itself may be
/// read before an earlier load has its value.
pub fn ticks_ordered() -> u64 {
    let fence = || {
        // Intel SDM, RDTSC: LFENCE before it waits for earlier loads, and behind it delays later instructions.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has the `lfence` instruction, and it accesses no memory.
        unsafe {
            std::arch::x86_64::_mm_lfence();
        }
    };
    fence();
    let ticks = ticks();
    fence();
    ticks
}

/// Returns the ticks between two results of [`ticks`]; 0 if the counter went back. It may do so where the counters of
/// processors differ and a thread moves.
#[inline(always)]
pub fn ticks_between(from: u64, to: u64) -> u64 {
    let passed = to.wrapping_sub(from);
    if passed > u64::MAX / 2 { 0 } else { passed }
}

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Frequency of [`ticks`] in hertz, measured once against the operating system's clock. The first call takes
/// 10 ms.
pub fn tick_hz() -> f64 {
    static HZ: OnceLock<f64> = OnceLock::new();
    *HZ.get_or_init(|| {
        let (from, ticks_from) = (Instant::now(), ticks());
        std::thread::sleep(Duration::from_millis(10));
        let (elapsed, passed) = (from.elapsed(), ticks().wrapping_sub(ticks_from));
        (passed as f64 / elapsed.as_secs_f64()).max(1.0)
    })
}

/// Nanoseconds since the first call, read from the operating system.
pub fn precise() -> u64 {
    start().elapsed().as_nanos() as u64
}

/// Converts [`ticks`] to nanoseconds on the same scale as [`precise`]. The time never goes back.
#[derive(Clone, Debug)]
pub struct Clock {
    base_ticks: u64,
    base: u64,
    /// Nanoseconds per tick, multiplied by 2³².
    scale: u64,
    /// Ticks after which the clock is synchronised again. The counter drifts, and stands still in some
    /// suspended machines.
    resync: u64,
    last: u64,
}

impl Clock {
    /// Creates a clock that is synchronised with the operating system's clock.
    pub fn new() -> Self {
        let hz = tick_hz();
        let scale = (1e9 / hz * (1u64 << 32) as f64) as u64;
        let now = precise();
        Self { base_ticks: ticks(), base: now, scale, resync: (hz / 4.0) as u64, last: now }
    }

    /// Returns the current time in nanoseconds.
    #[inline]
    pub fn now(&mut self) -> u64 {
        self.at(ticks())
    }

    /// Returns the time in nanoseconds at which [`ticks`] returned `ticks`, a moment ago.
    #[inline]
    pub(crate) fn at(&mut self, ticks: u64) -> u64 {
        let passed = ticks.wrapping_sub(self.base_ticks);
        let now = if passed > self.resync {
            self.base_ticks = crate::clock::ticks();
            self.base = precise();
            self.base
        } else {
            self.base + ((u128::from(passed) * u128::from(self.scale)) >> 32) as u64
        };
        self.last = self.last.max(now);
        self.last
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordered_ticks_are_between_others() {
        let (before, ordered, after) = (ticks(), ticks_ordered(), ticks());
        assert!(before <= ordered && ordered <= after, "{before} {ordered} {after}");
    }

    #[test]
    fn agrees_with_the_system_and_never_goes_back() {
        let mut clock = Clock::new();
        let mut last = 0;
        for _ in 0..10_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
        let before = precise();
        clock.resync = 0;
        assert!(clock.now() >= before, "resynchronised");
    }
}
