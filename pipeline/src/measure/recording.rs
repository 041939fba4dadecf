//! Recording of one worker during a measurement.

use std::collections::VecDeque;

use super::Histogram;
use crate::clock::{ticks, ticks_between};

/// Names of the parts of a turn that are no stages.
pub(crate) const RECEIVE: &str = "receive";
const TRANSMIT: &str = "transmit";
pub(crate) const MAILBOX: &str = "mailbox";
pub(crate) const TIMERS: &str = "timers";
/// Part of busy turns that is in no other part: polls of empty queues and the loop of the worker.
pub(super) const OTHER: &str = "other";

/// Maximum number of parts of a turn. Further stages count as [`OTHER`].
const MAX_PARTS: usize = 24;
/// Busy turns that are kept one by one.
pub(super) const MAX_TURNS: usize = 1000;
/// Slow turns that are kept one by one.
pub(super) const MAX_SLOW_TURNS: usize = 64;
/// Laps that measure the cost of a lap.
const CALIBRATION: u32 = 64;

/// Cycles of one part of the turns, and how often it ran.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) cycles: u64,
    pub(super) runs: u64,
    /// Cycles in the present turn.
    turn: u64,
}

/// One busy turn.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    /// Nanoseconds since the program started.
    pub(super) time: u64,
    pub(super) cycles: u64,
    /// Idle turns before this one.
    pub(super) idle_before: u32,
    pub(super) packets: u32,
    pub(super) batches: u32,
    pub(super) drops: u32,
    pub(super) punts: u32,
    /// Packets that were left in receive queues; `None` if a driver cannot tell.
    pub(super) left: Option<u32>,
}

/// Totals that the worker counts anyway.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TurnCounters {
    pub(crate) drops: u64,
    pub(crate) punts: u64,
}

/// Settings of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Cycles above which a turn is suspicious.
    pub(super) slow: u64,
}

/// Recording of one worker during a measurement. All figures are cycles of the time-stamp counter, packets or turns.
#[derive(Debug)]
pub struct Recording {
    /// Identifies the recordings of all workers that were begun together.
    pub(super) epoch: u64,
    pub(super) limits: Limits,
    /// True since the first end of a turn after the start. Laps before it belong to no turn.
    running: bool,
    /// Time-stamp counter at the last lap.
    lap: u64,
    parts: Vec<Part>,
    present: Turn,
    before: TurnCounters,
    pub(super) busy_turns: u64,
    pub(super) idle_turns: u64,
    pub(super) slow_turns: u64,
    pub(super) busy_cycles: u64,
    pub(super) idle_cycles: u64,
    pub(super) packets: u64,
    pub(super) batches: u64,
    pub(super) drops: u64,
    pub(super) punts: u64,
    /// Cycles that the measurement itself took: in turns, and between them.
    pub(super) lap_cycles: u64,
    pub(super) record_cycles: u64,
    /// Cycles of the recording itself after the last turn. The present turn does not count them.
    between: u64,
    /// Laps in the present turn.
    laps: u64,
    /// Cycles of one lap, multiplied by 256.
    lap_cost: u64,
    pub(super) turn_cycles: Histogram,
    pub(super) turn_packets: Histogram,
    pub(super) packet_cycles: Histogram,
    pub(super) batch_packets: Histogram,
    pub(super) turn_punts: Histogram,
    /// The last [`MAX_TURNS`] busy turns.
    pub(super) turns: VecDeque<Turn>,
    /// The last [`MAX_SLOW_TURNS`] turns over the limit, with the part that took longest and its cycles.
    pub(super) slow: VecDeque<(Turn, &'static str, u64)>,
}

impl Recording {
    /// Creates an empty recording. All its memory is allocated here.
    pub(super) fn new(epoch: u64, limits: Limits) -> Self {
        Self {
            epoch,
            limits,
            running: false,
            lap: 0,
            parts: Vec::with_capacity(MAX_PARTS),
            present: Turn::default(),
            before: TurnCounters::default(),
            busy_turns: 0,
            idle_turns: 0,
            slow_turns: 0,
            busy_cycles: 0,
            idle_cycles: 0,
            packets: 0,
            batches: 0,
            drops: 0,
            punts: 0,
            lap_cycles: 0,
            record_cycles: 0,
            between: 0,
            laps: 0,
            lap_cost: 0,
            turn_cycles: Histogram::default(),
            turn_packets: Histogram::default(),
            packet_cycles: Histogram::default(),
            batch_packets: Histogram::default(),
            turn_punts: Histogram::default(),
            turns: VecDeque::with_capacity(MAX_TURNS),
            slow: VecDeque::with_capacity(MAX_SLOW_TURNS),
        }
    }

    /// Measures on this thread what a lap costs.
    pub(crate) fn calibrate(&mut self) {
        let begin = ticks();
        for _ in 0..CALIBRATION {
            self.lap(RECEIVE);
        }
        self.lap_cost = (ticks_between(begin, ticks()) << 8) / u64::from(CALIBRATION);
        self.parts.clear();
        self.laps = 0;
    }

    /// Attributes the cycles since the last lap to a part.
    pub(crate) fn lap(&mut self, name: &'static str) {
        let now = ticks();
        let cycles = ticks_between(std::mem::replace(&mut self.lap, now), now);
        self.add(name, cycles);
    }

    /// Attributes the cycles since `begin` to [`TRANSMIT`], and not to the part that runs.
    pub(crate) fn transmitted(&mut self, begin: u64) {
        let cycles = ticks_between(begin, ticks());
        self.lap = self.lap.wrapping_add(cycles);
        self.add(TRANSMIT, cycles);
    }

    fn add(&mut self, name: &'static str, cycles: u64) {
        self.laps += 1;
        // A name is a constant, so its address nearly always tells.
        let at = self.parts.iter().position(|part| std::ptr::eq(part.name, name) || part.name == name);
        let at = match at {
            Some(at) => at,
            None if self.parts.len() < MAX_PARTS => {
                self.parts.push(Part { name, ..Part::default() });
                self.parts.len() - 1
            }
            None => return,
        };
        self.parts[at].turn += cycles;
        self.parts[at].runs += 1;
    }

    /// Counts a batch that was received or taken from the mailbox. `left` returns the packets that wait behind a full
    /// batch.
    pub(crate) fn batch(&mut self, packets: usize, left: impl FnOnce() -> Option<u32>) {
        self.present.batches += 1;
        self.batch_packets.add(packets as u64);
        if packets == wirepath_packet::BATCH {
            self.present.left = self.present.left.zip(left()).map(|(sum, left)| sum.saturating_add(left));
        }
    }

    /// Counts packets that a full transmit queue dropped.
    pub(crate) fn dropped(&mut self, packets: usize) {
        self.present.drops += packets as u32;
    }

    /// Ends a turn that moved `packets` packets, `cycles` cycles after the end of the last one. `now` is the time of
    /// its end in nanoseconds.
    pub(crate) fn end_turn(&mut self, end: u64, now: u64, cycles: u64, packets: u64, counters: TurnCounters) {
        let before = std::mem::replace(&mut self.before, counters);
        let cycles = cycles.saturating_sub(std::mem::take(&mut self.between));
        if !std::mem::replace(&mut self.running, true) {
            self.parts.clear();
            self.begin_turn(0);
            self.batch_packets = Histogram::default();
            self.lap = ticks();
            self.between = ticks_between(end, self.lap);
            return;
        }
        let mut idle_before = 0;
        if packets == 0 {
            self.idle_turns += 1;
            self.idle_cycles += cycles;
            idle_before = self.present.idle_before.saturating_add(1);
        } else {
            let drops = counters.drops.wrapping_sub(before.drops) as u32;
            let turn = Turn {
                time: now,
                cycles,
                packets: packets as u32,
                drops: self.present.drops.saturating_add(drops),
                punts: counters.punts.wrapping_sub(before.punts) as u32,
                ..self.present
            };
            self.end_busy_turn(turn);
        }
        self.begin_turn(idle_before);
        self.lap = ticks();
        self.between = ticks_between(end, self.lap);
        self.record_cycles += self.between;
    }

    fn begin_turn(&mut self, idle_before: u32) {
        self.laps = 0;
        self.parts.iter_mut().for_each(|part| part.turn = 0);
        self.present = Turn { idle_before, left: Some(0), ..Turn::default() };
    }

    fn end_busy_turn(&mut self, turn: Turn) {
        self.busy_turns += 1;
        self.busy_cycles += turn.cycles;
        self.packets += u64::from(turn.packets);
        self.batches += u64::from(turn.batches);
        self.drops += u64::from(turn.drops);
        self.punts += u64::from(turn.punts);
        self.lap_cycles += (self.laps * self.lap_cost) >> 8;
        self.turn_cycles.add(turn.cycles);
        self.turn_packets.add(turn.packets.into());
        self.packet_cycles.add(turn.cycles / u64::from(turn.packets.max(1)));
        self.turn_punts.add(turn.punts.into());
        for part in &mut self.parts {
            part.cycles += part.turn;
        }
        push(&mut self.turns, turn, MAX_TURNS);
        if turn.cycles > self.limits.slow {
            self.slow_turns += 1;
            let known = self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.turn));
            let other = (OTHER, turn.cycles.saturating_sub(known));
            let parts = self.parts.iter().map(|part| (part.name, part.turn));
            let (name, cycles) = parts.chain([other]).max_by_key(|(_, cycles)| *cycles).unwrap_or(other);
            push(&mut self.slow, (turn, name, cycles), MAX_SLOW_TURNS);
        }
    }

    /// Sleep is in no turn.
    pub(crate) fn end_sleep(&mut self) {
        self.lap = ticks();
    }

    /// Adds what the same worker did afterwards.
    pub(super) fn append(&mut self, later: &Self) {
        self.busy_turns += later.busy_turns;
        self.idle_turns += later.idle_turns;
        self.slow_turns += later.slow_turns;
        self.busy_cycles += later.busy_cycles;
        self.idle_cycles += later.idle_cycles;
        self.packets += later.packets;
        self.batches += later.batches;
        self.drops += later.drops;
        self.punts += later.punts;
        self.lap_cycles += later.lap_cycles;
        self.record_cycles += later.record_cycles;
        for part in &later.parts {
            match self.parts.iter_mut().find(|own| own.name == part.name) {
                Some(own) => {
                    own.cycles += part.cycles;
                    own.runs += part.runs;
                }
                None => self.parts.push(*part),
            }
        }
        self.turn_cycles.append(&later.turn_cycles);
        self.turn_packets.append(&later.turn_packets);
        self.packet_cycles.append(&later.packet_cycles);
        self.batch_packets.append(&later.batch_packets);
        self.turn_punts.append(&later.turn_punts);
        later.turns.iter().for_each(|turn| push(&mut self.turns, *turn, MAX_TURNS));
        later.slow.iter().for_each(|turn| push(&mut self.slow, *turn, MAX_SLOW_TURNS));
    }

    /// Iterates over the parts of busy turns, with the remaining cycles last. The sum is that of all busy turns.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        let known: u64 = self.parts.iter().map(|part| part.cycles).sum();
        let left = self.busy_cycles.saturating_sub(known);
        let other = Part { name: OTHER, cycles: left, runs: self.busy_turns, turn: 0 };
        let of_worker = |part: &&Part| matches!(part.name, TRANSMIT | MAILBOX | TIMERS);
        let stages = self.parts.iter().filter(move |part| !of_worker(part));
        let rest = self.parts.iter().filter(of_worker);
        stages.chain(rest).copied().filter(|part| part.cycles > 0).chain([other])
    }
}

/// Appends to a list of bounded length. The oldest entry makes room.
fn push<T>(list: &mut VecDeque<T>, value: T, max: usize) {
    if list.len() >= max {
        list.pop_front();
    }
    list.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording() -> Recording {
        let mut it = Recording::new(1, Limits { slow: 1000 });
        it.calibrate();
        assert!(it.parts.is_empty() && it.lap_cost > 0);
        it
    }

    #[test]
    fn turns_are_busy_idle_or_slow() {
        let end_turn = |it: &mut Recording, now, cycles, packets, drops| {
            // Without the cycles of the recording, which are different each time.
            it.between = 0;
            it.end_turn(ticks(), now, cycles, packets, TurnCounters { drops, punts: 4 });
        };
        let mut it = recording();
        // Laps before the first end of a turn belong to no turn.
        it.lap(RECEIVE);
        it.batch(5, || unreachable!("the batch is not full"));
        end_turn(&mut it, 10, 77, 5, 3);
        assert_eq!((it.busy_turns, it.parts().count(), it.batch_packets.len()), (0, 1, 0));
        for n in 0..1200u64 {
            end_turn(&mut it, 20, 50, 0, 3 + n);
            it.lap(RECEIVE);
            it.batch(64, || Some(7));
            it.batch(10, || None);
            it.add("Stage", 5000);
            it.transmitted(ticks());
            it.dropped(2);
            end_turn(&mut it, 30 + n, if n == 1100 { 2000 } else { 900 }, 74, 4 + n);
        }
        assert_eq!((it.busy_turns, it.idle_turns, it.slow_turns), (1200, 1200, 1));
        assert_eq!((it.packets, it.batches, it.drops, it.punts), (1200 * 74, 2400, 1200 * 3, 0));
        assert_eq!((it.busy_cycles, it.idle_cycles), (1199 * 900 + 2000, 1200 * 50));
        assert_eq!((it.turns.len(), it.turns[0].time, it.turns[999].time), (MAX_TURNS, 230, 1229));
        let last = it.turns[999];
        assert_eq!((last.idle_before, last.packets, last.batches, last.drops, last.left), (1, 74, 2, 3, Some(7)));
        let (turn, name, cycles) = it.slow[0];
        assert_eq!((turn.time, name, cycles), (1130, "Stage", 5000));
        it.lap(RECEIVE);
        end_turn(&mut it, 1, 1 << 60, 1, 1203);
        assert_eq!((it.slow[1].1, it.slow_turns), (OTHER, 2), "the time was in no part");
        (it.busy_turns, it.slow_turns) = (it.busy_turns - 1, 1);
        it.slow.pop_back();
        assert_eq!(it.parts().map(|part| part.name).collect::<Vec<_>>(), [RECEIVE, "Stage", TRANSMIT, OTHER]);
        assert_eq!((it.batch_packets.len(), it.turn_cycles.percentile(50.0)), (2400, Some(1023)));
        assert!(it.lap_cycles > 0 && it.record_cycles > 0);
        let mut sum = recording();
        sum.append(&it);
        sum.append(&it);
        assert_eq!((sum.busy_turns, sum.turns.len(), sum.slow.len()), (2400, MAX_TURNS, 2));
        assert_eq!(sum.parts().find(|part| part.name == "Stage").map(|part| part.cycles), Some(2 * 1200 * 5000));
    }

    #[test]
    fn there_is_room_for_many_parts_only() {
        let mut it = recording();
        let names: Vec<&'static str> = (0..100).map(|i| &*format!("stage {i}").leak()).collect();
        names.iter().for_each(|name| it.lap(name));
        assert_eq!((it.parts.len(), it.parts.capacity()), (MAX_PARTS, MAX_PARTS));
    }
}
