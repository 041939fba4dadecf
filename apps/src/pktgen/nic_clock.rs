//! Relation of the clock of a NIC to that of the run, by which receive timestamps become times of the run.
//!
//! A follower reads the NIC's clock between two readings of the run's clock, again and again. So it follows the
//! drift of both. The half of the bracket is the uncertainty of a reading. Before a new reading replaces an old
//! relation, the two are compared: their difference and the half of the bracket together are a bound for the error of
//! the old one at this moment. The largest of these bounds is the reported uncertainty.
//!
//! Timestamps are those of a device, which may be wrong or hostile. A time before the packet was sent, or after it was
//! polled, is counted and not used.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use hdrhistogram::Histogram;

use super::clock::Clock;
use super::signature::Signature;
use super::tracker::{LONGEST, histogram};

/// Readings of which the first relation takes the best.
const FIRST: usize = 32;
/// Readings of which each later relation takes the best.
const AGAIN: usize = 4;
/// Brackets so many times as long as the shortest one are not used, unless the relation becomes old.
const LONG: u64 = 4;
/// Age at which a relation takes any bracket, in nanoseconds.
const OLD: u64 = 1_000_000_000;
/// Readings that the history has at most, and the time between two of them in nanoseconds.
const HISTORY: (usize, u64) = (20, 100_000_000);
/// Largest difference between the rates of the clocks. Quartz oscillators are within 0.0001 of their frequency.
const MAX_DRIFT: f64 = 1e-3;
/// Error of a measured rate above which the nominal rate is better.
const MAX_RATE_ERROR: f64 = 2e-5;
/// Largest uncertainty that excuses a timestamp before the packet was sent or after it was polled, in nanoseconds.
/// A NIC whose clock was set has a far larger one, and its timestamps of that moment mean nothing.
const MAX_TOLERANCE: u64 = 1_000_000;
/// Distance from its reading within which a relation holds, in nanoseconds.
const RANGE: u64 = LONGEST;

/// A reading of a NIC's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    /// Time of the NIC.
    nic: u64,
    /// Time of the run: the middle of the bracket.
    at: u64,
    /// Half of the bracket, rounded up.
    half: u64,
}

impl Reading {
    /// Reads the clock `count` times and returns the reading with the shortest bracket. `None` if there is no clock.
    fn best(count: usize, clock: impl Fn() -> u64, mut read: impl FnMut() -> Option<u64>) -> Option<Self> {
        let mut best: Option<Self> = None;
        for _ in 0..count {
            let before = clock();
            let nic = read()?;
            let bracket = clock().saturating_sub(before);
            let half = bracket.div_ceil(2);
            if best.is_none_or(|best| half < best.half) {
                best = Some(Self { nic, at: before.saturating_add(bracket / 2), half });
            }
        }
        best
    }
}

/// How times of a NIC become times of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Relation {
    reading: Reading,
    /// Nanoseconds of the run in a nanosecond of the NIC.
    rate: f64,
    /// Largest error that is known so far, in nanoseconds.
    uncertainty: u64,
}

impl Relation {
    /// Returns the time of the run; `None` if the time is too far from the reading.
    #[inline]
    fn time_of(&self, nic: u64) -> Option<u64> {
        let passed = nic.wrapping_sub(self.reading.nic).cast_signed();
        if passed.unsigned_abs() > RANGE {
            return None;
        }
        // Both factors are small enough for exact nanoseconds.
        self.reading.at.checked_add_signed((passed as f64 * self.rate) as i64)
    }
}

/// The relation that a [`Follower`] publishes.
#[derive(Debug)]
struct Published {
    /// Number of changes.
    version: AtomicU32,
    relation: Mutex<Relation>,
}

/// Use of the timestamps of a port. Further copies of packets count too.
#[derive(Clone, Debug, PartialEq)]
pub struct StampCounts {
    /// Packets whose delay ends with their timestamp.
    pub used: u64,
    /// Packets without a timestamp. Their delay ends when they were polled.
    pub missing: u64,
    /// Packets with a timestamp before they were sent, or after they were polled. Their delay ends when they were
    /// polled.
    pub invalid: u64,
    /// Times from a used timestamp until the packet was polled, in nanoseconds.
    pub waits: Histogram<u64>,
}

impl Default for StampCounts {
    fn default() -> Self {
        Self { used: 0, missing: 0, invalid: 0, waits: histogram() }
    }
}

/// Follows the clock of a NIC.
#[derive(Debug)]
pub(super) struct Follower {
    published: Arc<Published>,
    relation: Relation,
    /// Shortest half of a bracket.
    shortest: u64,
    /// Old readings, by which the rate is measured.
    history: VecDeque<Reading>,
}

impl Follower {
    /// Reads the clock for the first time. `None` if there is no clock.
    pub(super) fn start(clock: Clock, read: impl FnMut() -> Option<u64>) -> Option<Self> {
        Reading::best(FIRST, || clock.now_ordered(), read).map(Self::new)
    }

    fn new(reading: Reading) -> Self {
        let relation = Relation { reading, rate: 1.0, uncertainty: reading.half };
        let published = Arc::new(Published { version: AtomicU32::new(0), relation: Mutex::new(relation) });
        Self { published, relation, shortest: reading.half, history: VecDeque::from([reading]) }
    }

    /// Returns the end that applies the relation.
    pub(super) fn stamps(&self) -> Stamps {
        let published = Arc::clone(&self.published);
        let version = published.version.load(Ordering::Acquire);
        Stamps { published, version, relation: self.relation, counts: StampCounts::default() }
    }

    /// Reads the clock again. A clock that has gone leaves the old relation.
    pub(super) fn update(&mut self, clock: Clock, read: impl FnMut() -> Option<u64>) {
        if let Some(reading) = Reading::best(AGAIN, || clock.now_ordered(), read) {
            self.take(reading);
        }
    }

    fn take(&mut self, reading: Reading) {
        let old = self.relation;
        let age = reading.at.saturating_sub(old.reading.at);
        self.shortest = self.shortest.min(reading.half);
        if reading.half > self.shortest.saturating_mul(LONG) && age < OLD {
            return;
        }
        let deviation = old.time_of(reading.nic).map_or(LONGEST, |time| time.abs_diff(reading.at));
        let uncertainty = old.uncertainty.max(deviation.saturating_add(reading.half)).min(LONGEST);
        if deviation.saturating_sub(reading.half) > MAX_TOLERANCE {
            // The clock was set, so older readings say nothing about its rate.
            self.history.clear();
        }
        if self.history.back().is_none_or(|last| reading.at.saturating_sub(last.at) >= HISTORY.1) {
            self.history.push_back(reading);
            if self.history.len() > HISTORY.0 {
                self.history.pop_front();
            }
        }
        let rate = self.history.front().and_then(|first| rate(first, &reading)).unwrap_or(1.0);
        self.relation = Relation { reading, rate, uncertainty };
        *self.published.relation.lock().unwrap_or_else(PoisonError::into_inner) = self.relation;
        self.published.version.fetch_add(1, Ordering::Release);
    }

    /// Returns the largest known error of the relation so far, in nanoseconds.
    pub(super) fn uncertainty(&self) -> u64 {
        self.relation.uncertainty
    }
}

/// Returns the nanoseconds of the run in a nanosecond of the NIC between two readings. `None` if they are too close to
/// each other, or the clocks are too different.
fn rate(first: &Reading, last: &Reading) -> Option<f64> {
    let passed = last.at.checked_sub(first.at)? as f64;
    let nic = last.nic.wrapping_sub(first.nic).cast_signed() as f64;
    let error = (first.half + last.half) as f64;
    let rate = passed / nic;
    (error < passed * MAX_RATE_ERROR && (rate - 1.0).abs() < MAX_DRIFT).then_some(rate)
}

/// Applies the relation of a port to its packets.
#[derive(Debug)]
pub(super) struct Stamps {
    published: Arc<Published>,
    version: u32,
    relation: Relation,
    pub(super) counts: StampCounts,
}

impl Stamps {
    /// Takes the last relation of the follower.
    #[inline]
    pub(super) fn refresh(&mut self) {
        let version = self.published.version.load(Ordering::Acquire);
        // A relation that is being written is taken the next time.
        if version != self.version
            && let Ok(relation) = self.published.relation.try_lock()
        {
            (self.version, self.relation) = (version, *relation);
        }
    }

    /// Returns the time of the run at which a packet arrived: that of its timestamp, or else `now`, when it was polled.
    /// It is neither before the packet was sent nor after `now`.
    #[inline]
    pub(super) fn arrival(&mut self, timestamp: Option<u64>, packet: &Signature, now: u64) -> u64 {
        let Some(timestamp) = timestamp else {
            self.counts.missing += 1;
            return now;
        };
        let tolerance = self.relation.uncertainty.min(MAX_TOLERANCE);
        let valid = self.relation.time_of(timestamp).and_then(|time| {
            // A time may be beyond a limit by the error of the relation.
            let back = now.saturating_sub(time);
            let age = packet.age(now);
            let fits = time.saturating_sub(now) <= tolerance && back.saturating_sub(age) <= tolerance;
            fits.then(|| now - back.min(age))
        });
        match valid {
            Some(time) => {
                self.counts.used += 1;
                self.counts.waits.saturating_record(now - time);
                time
            }
            None => {
                self.counts.invalid += 1;
                now
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn reading(nic: u64, at: u64, half: u64) -> Reading {
        Reading { nic, at, half }
    }

    fn numbers(stamps: &Stamps) -> (u64, u64, u64) {
        (stamps.counts.used, stamps.counts.missing, stamps.counts.invalid)
    }

    fn packet(time: u64) -> Signature {
        Signature { payload_len: 18, stream: 0, sequence: 0, time }
    }

    #[test]
    fn the_best_reading_has_the_shortest_bracket() {
        let (time, step, nic) = (Cell::new(100), Cell::new(0), Cell::new(5000));
        // Brackets of 9, 3 and 7.
        let clock = || {
            let now = time.get();
            time.set(now + [9, 1, 3, 1, 7, 1][step.get() % 6]);
            step.set(step.get() + 1);
            now
        };
        let read = || {
            nic.set(nic.get() + 1);
            Some(nic.get())
        };
        assert_eq!(Reading::best(3, clock, read), Some(reading(5002, 111, 2)));
        assert_eq!(Reading::best(3, || 0, || None), None);
        // A counter that goes back, as those of different processors can.
        time.set(50);
        let backwards = || {
            time.set(time.get() - 1);
            time.get()
        };
        assert_eq!(Reading::best(1, backwards, || Some(1)).unwrap().half, 0);
    }

    #[test]
    fn the_relation_follows_the_drift_of_both_clocks() {
        // The NIC is faster by 50 ppm, and a reading is up to 40 ns away from the truth.
        let nic_at = |at: u64| at + at / 20_000 + 7_000 * SECOND;
        let mut random = fastrand::Rng::with_seed(5);
        let mut read = |at: u64| reading(nic_at(at + random.u64(0..=80) - 40), at, 40);
        let mut follower = Follower::new(read(SECOND));
        let mut stamps = follower.stamps();
        for step in 1..=500 {
            let at = SECOND + step * 10_000_000;
            follower.take(read(at));
            stamps.refresh();
            let bound = follower.uncertainty();
            // 50 ppm of 10 ms are 500 ns, as long as the rate is not known.
            assert!((40..700).contains(&bound), "{step}: {bound}");
            if step > 30 {
                assert!((follower.relation.rate - 1.0 / 1.00005).abs() < 1e-6, "{step}: {:?}", follower.relation);
            }
            for (time, delay) in [(at + 9_000_000, 3_000), (at - 20_000_000, 5_000)] {
                let found = stamps.arrival(Some(nic_at(time)), &packet(time - delay), time + 10_000);
                assert!(found.abs_diff(time) <= bound, "{step}: {found} {time} {bound}");
            }
        }
        assert_eq!(numbers(&stamps), (1000, 0, 0));
    }

    #[test]
    fn long_brackets_are_used_only_if_the_relation_becomes_old() {
        let mut follower = Follower::new(reading(0, 0, 100));
        follower.take(reading(10_000_000, 10_000_000, 401));
        assert_eq!(follower.relation.reading, reading(0, 0, 100));
        follower.take(reading(20_000_000, 20_000_100, 400));
        assert_eq!((follower.relation.reading.half, follower.uncertainty()), (400, 500));
        follower.take(reading(30_000_000 + SECOND, 30_000_000 + SECOND, 5_000));
        assert_eq!((follower.relation.reading.half, follower.uncertainty()), (5_000, 5_100));
    }

    #[test]
    fn wrong_timestamps_are_counted_and_not_used() {
        let follower = Follower::new(reading(u64::MAX - 5, 10 * SECOND, 100));
        let mut stamps = follower.stamps();
        let (now, sent) = (10 * SECOND + 50_000, packet(10 * SECOND + 20_000));
        // The NIC's clock has wrapped meanwhile: 10 s + 1000 ns of the run are 994 there.
        let at = |time: u64| time.wrapping_sub(10 * SECOND).wrapping_add(u64::MAX - 5);
        let mut arrival = |timestamp| stamps.arrival(timestamp, &sent, now);
        assert_eq!(arrival(Some(at(10 * SECOND + 30_000))), 10 * SECOND + 30_000);
        // Within the uncertainty, the time is that of the sending or of the poll.
        assert_eq!(arrival(Some(at(10 * SECOND + 20_000 - 100))), 10 * SECOND + 20_000);
        assert_eq!(arrival(Some(at(now + 100))), now);
        for wrong in [at(10 * SECOND + 20_000 - 101), at(now + 101), 0, 1 << 63, at(0), at(now).wrapping_add(RANGE)] {
            assert_eq!(arrival(Some(wrong)), now, "{wrong:#x}");
        }
        assert_eq!(arrival(None), now);
        assert_eq!(numbers(&stamps), (3, 1, 6));
        // Rounded to a thousandth.
        let waits = &stamps.counts.waits;
        assert_eq!((waits.len(), waits.min(), waits.max()), (3, 0, 30_015));
    }

    #[test]
    fn a_clock_that_was_set_is_followed_from_there() {
        let mut follower = Follower::new(reading(SECOND, SECOND, 50));
        let mut stamps = follower.stamps();
        let mut step = |at: u64, offset: u64| {
            follower.take(reading(at + offset, at, 50));
            stamps.refresh();
            // A packet that was stamped before the clock was set, and another one.
            for nic in [at, at + offset] {
                stamps.arrival(Some(nic - 1_000), &packet(at - 3_000), at);
            }
            (follower.uncertainty(), stamps.counts.used, stamps.counts.invalid)
        };
        assert_eq!(step(2 * SECOND, 0), (50, 2, 0));
        assert_eq!(step(3 * SECOND, 10 * SECOND), (10 * SECOND + 50, 3, 1));
        assert_eq!(step(4 * SECOND, 10 * SECOND), (10 * SECOND + 50, 4, 2));
        assert_eq!(follower.history.len(), 2, "only those of the clock that was set");
    }

    #[test]
    fn any_clock_and_any_timestamp_is_survived() {
        let mut random = fastrand::Rng::with_seed(9);
        let mut value = || [0, 1, u64::MAX, 1 << 63, random.u64(..), random.u64(..1 << 40)][random.usize(..6)];
        for _ in 0..2_000 {
            let mut follower = Follower::new(reading(value(), value(), value() >> 1));
            let mut stamps = follower.stamps();
            for _ in 0..20 {
                follower.take(reading(value(), value(), value() >> 1));
                stamps.refresh();
                let now = value();
                let sent = packet(value());
                let time = stamps.arrival(Some(value()), &sent, now);
                assert!(time <= now && now - time <= sent.age(now), "{time} {now}");
                assert!(follower.uncertainty() <= u64::MAX >> 1);
            }
        }
    }
}
