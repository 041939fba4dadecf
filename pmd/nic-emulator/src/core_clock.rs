//! The core clock of emulated ConnectX NICs, and the two pages by which programs read it.
//!
//! The clock counts from 1970, so all processes that share a device see the same time. The preload library traps loads
//! from the pages, so that each of them gets the content of its moment.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use wirepath_nic_defs::uverbs::mlx5::ClockInfo;
use zerocopy::{FromZeros, IntoBytes};

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;
/// Factor of [`ClockInfo::mult`], as a shift (Linux drivers/net/ethernet/mellanox/mlx5/core/lib/clock.c,
/// `MLX5_CYCLES_SHIFT`).
const SHIFT: u32 = 23;
/// Bits of the counter that conversions use (`CLOCKSOURCE_MASK(41)` there).
const MASK: u64 = (1 << 41) - 1;

/// Returns the nanoseconds since 1970. The clock is set at the first call, and never goes back. All processes agree but
/// for the error of this setting, which is below a microsecond.
pub(crate) fn monotonic() -> u64 {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    let (start, time) = START.get_or_init(|| {
        // The reading of the wall clock that took the shortest time.
        let readings = (0..16).map(|_| {
            let before = Instant::now();
            let wall = SystemTime::now();
            (before.elapsed(), before, wall)
        });
        let (took, before, wall) = readings.min_by_key(|(took, ..)| *took).expect("several readings");
        (before + took / 2, wall.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64)
    });
    time.wrapping_add(start.elapsed().as_nanos() as u64)
}

/// A free-running counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreClock {
    khz: u32,
}

impl CoreClock {
    /// Creates a counter of this frequency.
    pub fn new(khz: u32) -> Self {
        Self { khz: khz.max(1) }
    }

    /// Returns the current value.
    pub fn now(self) -> u64 {
        self.at(monotonic())
    }

    /// Returns the time stamp of a completion.
    pub(crate) fn stamp(self, format: StampFormat) -> u64 {
        match format {
            StampFormat::FreeRunning => self.now(),
            StampFormat::RealTime => {
                let now = monotonic();
                ((now / SECOND) << 32) | (now % SECOND)
            }
        }
    }

    /// Returns the value at a time in nanoseconds.
    fn at(self, nanoseconds: u64) -> u64 {
        (u128::from(nanoseconds) * u128::from(self.khz) / 1_000_000) as u64
    }
}

/// Formats of the time stamps in completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StampFormat {
    /// Ticks of the core clock.
    FreeRunning,
    /// Time of day, with seconds and nanoseconds in 32 bits each.
    RealTime,
}

/// A page that a program maps to read the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockPage {
    /// The counter as 64 bits in big-endian order, from offset 0 on (`MLX5_IB_MMAP_CORE_CLOCK`).
    Counter(CoreClock),
    /// [`ClockInfo`], by which counts are converted to wall-clock time (`MLX5_IB_MMAP_CLOCK_INFO`).
    Info(CoreClock),
}

impl ClockPage {
    /// Prepares the state that [`Self::load`] needs, so that a signal handler can call it.
    pub fn prepare(self) {
        monotonic();
    }

    /// Returns the current content from `offset` on. Bytes without a meaning are zero.
    pub fn load(self, offset: usize) -> [u8; 16] {
        match self {
            Self::Counter(clock) => part(&clock.now().to_be_bytes(), offset),
            Self::Info(clock) => part(info(clock, monotonic()).as_bytes(), offset),
        }
    }

    /// Returns a number other than 0 from which [`Self::from_number`] makes the page again.
    pub fn to_number(self) -> u64 {
        match self {
            Self::Counter(clock) => u64::from(clock.khz) << 1,
            Self::Info(clock) => u64::from(clock.khz) << 1 | 1,
        }
    }

    /// Returns the page of a number of [`Self::to_number`]; `None` for 0.
    pub fn from_number(number: u64) -> Option<Self> {
        let clock = CoreClock { khz: (number >> 1) as u32 };
        (number != 0).then_some(if number & 1 == 0 { Self::Counter(clock) } else { Self::Info(clock) })
    }
}

fn part(bytes: &[u8], offset: usize) -> [u8; 16] {
    let mut part = [0; 16];
    let rest = bytes.get(offset..).unwrap_or_default();
    part.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
    part
}

/// Returns the information that the kernel published last. It publishes once a second, so that several loads within a
/// second belong together. The sequence number shows loads of different seconds.
fn info(clock: CoreClock, now: u64) -> ClockInfo {
    let published = now / SECOND * SECOND;
    let mult = ((1_000_000u64 << SHIFT) + u64::from(clock.khz) / 2) / u64::from(clock.khz);
    let longest = ((u64::MAX >> 1) / mult.max(1)).min(MASK >> 1);
    ClockInfo {
        // Bit 0 would say that the kernel is writing.
        sign: ((now / SECOND) as u32) << 1,
        nsec: published,
        cycles: clock.at(published),
        mult: mult as u32,
        shift: SHIFT,
        mask: MASK,
        overflow_period: ((u128::from(longest) * u128::from(mult)) >> SHIFT) as u64,
        ..ClockInfo::new_zeroed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_has_the_frequency_and_big_endian_halves() {
        let clock = CoreClock::new(156_250);
        assert_eq!(clock.at(64_000), 10_000);
        assert_eq!(clock.at(u64::MAX), (u128::from(u64::MAX) * 156_250 / 1_000_000) as u64);
        let page = ClockPage::Counter(clock);
        let before = clock.now();
        let read = u64::from_be_bytes(page.load(0)[..8].try_into().unwrap());
        assert!((before..=clock.now()).contains(&read));
        assert_eq!(page.load(8), [0; 16], "nothing behind the counter");
        assert_eq!(page.load(4)[4..], [0; 12]);
        for page in [page, ClockPage::Info(clock)] {
            assert_eq!(ClockPage::from_number(page.to_number()), Some(page));
        }
        assert_eq!(ClockPage::from_number(0), None);
    }

    #[test]
    fn information_converts_counts_to_time() {
        let clock = CoreClock::new(156_250);
        for now in [5 * SECOND, 5 * SECOND + 999_999_999, 7_000_000 * SECOND + 1] {
            let info = info(clock, now);
            assert_eq!(info.sign % 2, 0);
            let ticks = clock.at(now) - info.cycles;
            assert!(ticks < 156_250_000 && info.mask > ticks);
            let found = info.nsec + ((ticks * u64::from(info.mult)) >> info.shift);
            let expected = now;
            // A tick has 6.4 ns, and the factor an error of 1e-8.
            assert!(found.abs_diff(expected) <= 20, "{found} {expected}");
            assert!(info.overflow_period > SECOND);
        }
        assert_ne!(info(clock, SECOND - 1).sign, info(clock, SECOND).sign);
    }
}
