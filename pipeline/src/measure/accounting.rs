//! Cycles of busy and idle turns, always on.

use crate::clock::ticks_between;
use crate::context::WorkerCounters;

/// Nanoseconds between two samples of queues. A sample reads memory that devices write.
const SAMPLE_INTERVAL: u64 = 1_000_000;
/// Nanoseconds over which the load of a worker is measured.
const LOAD_INTERVAL: u64 = 10_000_000;

/// Turns since the last read of the clock. The clock is read every few turns, because a read costs about as much as
/// ten packets.
///
/// A window in which all turns found packets counts as busy, and one in which none did as idle. In a window that mixes
/// both, each idle turn counts with the mean cycles of the last idle windows. Busy turns took the rest.
#[derive(Debug, Default)]
pub(crate) struct Accounting {
    pub(crate) turns: u32,
    pub(crate) idle_turns: u32,
    pub(crate) packets: u64,
    /// Time-stamp counter at the start of the window.
    start: u64,
    /// Cycles of a turn that finds nothing, multiplied by 256 and averaged over the last idle windows.
    idle_turn: u64,
    next_sample: u64,
    load_since: u64,
    /// Packets since `load_since`.
    load_packets: u64,
    /// Packets per second in the last [`LOAD_INTERVAL`].
    load: u64,
}

impl Accounting {
    pub(crate) fn new(ticks: u64) -> Self {
        Self { start: ticks, ..Self::default() }
    }

    /// Ends the window at `ticks` and begins the next one. Returns the cycles of the window.
    pub(crate) fn end_window(&mut self, ticks: u64, counters: &WorkerCounters) -> u64 {
        let cycles = ticks_between(std::mem::replace(&mut self.start, ticks), ticks);
        let (turns, idle_turns) = (u64::from(self.turns), u64::from(self.idle_turns));
        let idle = if idle_turns == turns {
            if let Some(turn) = (cycles << 8).checked_div(turns) {
                self.idle_turn = match self.idle_turn {
                    0 => turn,
                    // A worker that lost its core for a while must not raise the mean much.
                    mean if turn > mean => mean + (turn - mean).min(mean) / 8,
                    mean => mean - (mean - turn) / 8,
                };
            }
            cycles
        } else {
            (self.idle_turn.saturating_mul(idle_turns) >> 8).min(cycles)
        };
        counters.turns.add(turns);
        counters.idle_turns.add(idle_turns);
        counters.packets.add(self.packets);
        counters.busy_cycles.add(cycles - idle);
        counters.idle_cycles.add(idle);
        self.load_packets += self.packets;
        (self.turns, self.idle_turns, self.packets) = (0, 0, 0);
        cycles
    }

    /// Begins a window after a sleep.
    pub(crate) fn end_sleep(&mut self, ticks: u64, counters: &WorkerCounters) {
        counters.sleep_cycles.add(ticks_between(std::mem::replace(&mut self.start, ticks), ticks));
    }

    /// Returns true if queues shall be sampled, and measures the load. `now` is in nanoseconds.
    #[inline(always)]
    pub(crate) fn is_sample_due(&mut self, now: u64) -> bool {
        now >= self.next_sample && self.sample(now)
    }

    #[cold]
    fn sample(&mut self, now: u64) -> bool {
        self.next_sample = now + SAMPLE_INTERVAL;
        let passed = now.saturating_sub(self.load_since);
        if passed >= LOAD_INTERVAL {
            self.load = (u128::from(self.load_packets) * 1_000_000_000 / u128::from(passed)) as u64;
            (self.load_since, self.load_packets) = (now, 0);
        }
        true
    }

    /// Packets per second in the last 10 ms or more.
    pub(crate) fn load(&self) -> u64 {
        self.load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_as_busy_or_idle() {
        let counters = WorkerCounters::default();
        let mut accounting = Accounting::new(1000);
        let mut window = |turns, idle_turns, packets, ticks| {
            (accounting.turns, accounting.idle_turns, accounting.packets) = (turns, idle_turns, packets);
            accounting.end_window(ticks, &counters);
            (counters.busy_cycles.get(), counters.idle_cycles.get())
        };
        // Without an idle window before, all cycles of a mixed one are busy.
        assert_eq!(window(8, 4, 100, 1400), (400, 0));
        assert_eq!(window(8, 8, 0, 2200), (400, 800), "100 cycles for each idle turn");
        assert_eq!(window(8, 0, 8 * 64, 12_200), (10_400, 800));
        assert_eq!(window(8, 6, 64, 15_200), (12_800, 1400), "6 of the 8 turns were idle");
        assert_eq!(window(8, 7, 1, 15_300), (12_800, 1500), "never more than the window has");
        assert_eq!((counters.turns.get(), counters.idle_turns.get(), counters.packets.get()), (40, 25, 677));
        accounting.end_sleep(1_015_300, &counters);
        assert_eq!(counters.sleep_cycles.get(), 1_000_000);
        let sum = counters.busy_cycles.get() + counters.idle_cycles.get() + counters.sleep_cycles.get();
        assert_eq!(sum, 1_015_300 - 1000, "every cycle counts once");
    }

    #[test]
    fn a_lost_core_hardly_changes_the_cost_of_an_idle_turn() {
        let counters = WorkerCounters::default();
        let mut accounting = Accounting::new(0);
        let mut window = |idle_turns, ticks| {
            (accounting.turns, accounting.idle_turns) = (8, idle_turns);
            accounting.end_window(ticks, &counters);
            counters.busy_cycles.get()
        };
        assert_eq!(window(8, 800), 0);
        assert_eq!(window(8, 50_000_800), 0);
        assert_eq!(window(4, 50_002_800), 2000 - 450, "100 cycles and an eighth");
        assert_eq!(window(8, 50_002_800 + 8 * 72), 2000 - 450);
        assert_eq!(window(4, 50_005_376), 2 * 2000 - 450 - 429, "it falls again");
        assert_eq!(window(0, 7), 2 * 2000 - 450 - 429, "a counter that goes back counts nothing");
    }

    #[test]
    fn the_load_is_that_of_the_last_interval() {
        let counters = WorkerCounters::default();
        let mut accounting = Accounting::new(0);
        let mut at = |milliseconds: u64, packets| {
            accounting.packets = packets;
            accounting.end_window(0, &counters);
            (accounting.is_sample_due(milliseconds * 1_000_000), accounting.load())
        };
        assert_eq!(at(5, 100), (true, 0));
        assert_eq!(at(5, 100), (false, 0), "once in a millisecond");
        assert_eq!(at(10, 100), (true, 30_000));
        assert_eq!(at(15, 0), (true, 30_000));
        assert_eq!(at(1010, 10), (true, 10), "also over a long sleep");
    }
}
