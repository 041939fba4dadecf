//! Times at which the timers of a worker's stages are due.

use std::time::Duration;

/// Shortest interval of a timer in nanoseconds.
const MIN_INTERVAL: u64 = 1000;

/// Timers of the stages of one worker, in the order in which [`Stage::run_timers`](crate::Stage::run_timers) asks for
/// them. The order is the same in each run.
#[derive(Debug, Default)]
pub struct StageTimers {
    /// Time in nanoseconds at which the timer of each stage is due.
    due: Vec<Option<u64>>,
    /// Index of the next stage that asks.
    at: usize,
    /// Earliest time at which a timer is due.
    next: Option<u64>,
}

impl StageTimers {
    /// Begins a run: the first stage asks next.
    pub(crate) fn begin(&mut self) {
        (self.at, self.next) = (0, None);
    }

    /// Time in nanoseconds at which the next timer is due; `u64::MAX`: there is none.
    pub(crate) fn next(&self) -> u64 {
        self.next.unwrap_or(u64::MAX)
    }

    /// Returns true if the timer of the stage that asks is due, and determines when it is due again. Its first time is
    /// one interval after the first question. A timer that is late by more than an interval is called once.
    pub fn is_due(&mut self, interval: Option<Duration>, now: u64) -> bool {
        if self.at == self.due.len() {
            self.due.push(None);
        }
        let slot = &mut self.due[self.at];
        self.at += 1;
        let Some(interval) = interval else {
            *slot = None;
            return false;
        };
        let interval = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX).max(MIN_INTERVAL);
        let latest = now.saturating_add(interval);
        let due = slot.map_or(latest, |due| due.min(latest));
        let is_due = due <= now;
        // Without drift, unless a whole interval is missed.
        let again = Some(due.saturating_add(interval)).filter(|again| is_due && *again > now);
        let due = if is_due { again.unwrap_or(latest) } else { due };
        *slot = Some(due);
        self.next = Some(self.next.map_or(due, |next| next.min(due)));
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks for two timers, and returns the outcome and the time of the next.
    fn ask(timers: &mut StageTimers, intervals: [Option<u64>; 2], now: u64) -> ([bool; 2], u64) {
        timers.begin();
        let due = intervals.map(|interval| timers.is_due(interval.map(Duration::from_nanos), now));
        (due, timers.next())
    }

    #[test]
    fn each_stage_has_its_own_interval() {
        let mut timers = StageTimers::default();
        let both = [Some(10_000), Some(25_000)];
        assert_eq!(ask(&mut timers, both, 5000), ([false, false], 15_000));
        assert_eq!(ask(&mut timers, both, 14_999), ([false, false], 15_000));
        assert_eq!(ask(&mut timers, both, 16_000), ([true, false], 25_000), "no drift");
        assert_eq!(ask(&mut timers, both, 30_000), ([true, true], 35_000));
        assert_eq!(ask(&mut timers, both, 100_000), ([true, true], 110_000), "missed times are not made up for");
    }

    #[test]
    fn an_interval_can_change() {
        let mut timers = StageTimers::default();
        assert_eq!(ask(&mut timers, [None, None], 0), ([false, false], u64::MAX));
        assert_eq!(ask(&mut timers, [None, Some(50_000)], 0), ([false, false], 50_000));
        assert_eq!(ask(&mut timers, [None, Some(20_000)], 10_000), ([false, false], 30_000), "shorter");
        assert_eq!(ask(&mut timers, [None, None], 40_000), ([false, false], u64::MAX), "off");
        assert_eq!(ask(&mut timers, [Some(0), None], 40_000), ([false, false], 41_000), "at least a microsecond");
        assert_eq!(ask(&mut timers, [Some(u64::MAX), None], 41_000), ([true, false], u64::MAX));
    }
}
