//! A search on ports: trials of the generator, judged for loss, for faults of the device and for noise of the machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use wirepath::Failure;

use super::qualify::{Problem, Qualification};
use super::search::{Goal, GoalResult, Request, Search, State};
use crate::pktgen::flows::{FlowSet, Traffic};
use crate::pktgen::rate::Rate;
use crate::pktgen::{Generator, Limit, Trial, TrialResult};

/// Shares of the throughput without loss at which the latency is measured.
pub const LATENCY_SHARES: [f64; 3] = [0.1, 0.5, 0.9];
/// Load and longest duration of the trial before the search, in which bridges learn addresses and caches fill.
const WARM_UP: (f64, Duration) = (0.1, Duration::from_secs(1));
/// Trials that are made again because the machine disturbed them, for one trial of the search.
const REPEATS: usize = 3;

/// A search for frames of one size.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Packets.
    pub traffic: FlowSet,
    /// Goals.
    pub goals: Vec<Goal>,
    /// Lowest and highest load of each sending port, in packets per second.
    pub limits: (f64, f64),
    /// Time after each trial in which packets may arrive.
    pub drain: Duration,
    /// Time after which no further trial begins.
    pub time_limit: Duration,
    /// Duration of the trials that measure the latency; `None`: none are made.
    pub latency: Option<Duration>,
    /// Counts trials that the machine disturbed.
    pub allow_noise: bool,
}

/// Packets that a device changed, copied or sent elsewhere. None of them counts as received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Further copies of packets.
    pub duplicates: u64,
    /// Packets that arrived after later ones (RFC 4737).
    pub reordered: u64,
    /// Packets with a changed payload.
    pub corrupt: u64,
    /// Packets that came back to a port that only sends.
    pub looped: u64,
    /// Packets without the signature of the trial. They may be late ones of the trial before.
    pub foreign: u64,
}

impl Faults {
    fn of(result: &TrialResult) -> Self {
        Self {
            duplicates: result.order.duplicates,
            reordered: result.order.reordered,
            corrupt: result.corrupt,
            looped: result.looped(),
            foreign: result.foreign() + result.order.unknown_stream,
        }
    }

    fn add(&mut self, other: &Self) {
        self.duplicates += other.duplicates;
        self.reordered += other.reordered;
        self.corrupt += other.corrupt;
        self.looped += other.looped;
        self.foreign += other.foreign;
    }
}

/// A trial of a search.
#[derive(Clone, Debug)]
pub struct TrialRecord {
    /// Load of each sending port, and duration.
    pub request: Request,
    /// Packets that were due.
    pub intended: u64,
    /// Packets that the ports accepted in time.
    pub sent: u64,
    /// Packets that arrived once, in order and intact.
    pub received: u64,
    /// Packets that a device changed, copied or sent elsewhere.
    pub faults: Faults,
    /// Disturbances by the machine.
    pub problems: Vec<Problem>,
    /// False if the trial was made again because of its disturbances.
    pub is_counted: bool,
}

impl TrialRecord {
    /// Judges the result of a trial. `tolerance` is the share by which a trial may last longer than intended.
    fn new(request: Request, result: &TrialResult, (senders, tolerance): (u64, f64), problems: Vec<Problem>) -> Self {
        let seconds = request.duration.as_secs_f64();
        let intended = (result.asked_pps.unwrap_or(0.0) * seconds) as u64;
        // The ends of the schedules of all senders are rounded.
        let mut sent = if result.sent + 2 * senders >= intended { result.sent.max(intended) } else { result.sent };
        let late = result.duration.as_secs_f64() / seconds;
        if late > 1.0 + tolerance {
            // The port took the packets more slowly than they were due, so the load was lower.
            sent = (sent as f64 / late) as u64;
        }
        let lost = result.sent.saturating_sub(result.order.distinct.saturating_sub(result.order.reordered));
        let received = sent.saturating_sub(lost);
        let faults = Faults::of(result);
        Self { request, intended: intended.max(sent), sent, received, faults, problems, is_counted: true }
    }

    /// Returns the share of the packets that did not arrive, or that could not be sent (RFC 9971, trial loss ratio).
    pub fn loss_ratio(&self) -> f64 {
        // A load without a packet tells nothing against it.
        (self.intended - self.received) as f64 / self.intended.max(1) as f64
    }

    /// Returns the share of the packets that the sending ports did not accept in time.
    pub fn unsent_ratio(&self) -> f64 {
        (self.intended - self.sent) as f64 / self.intended.max(1) as f64
    }
}

/// Latency at a share of the throughput.
#[derive(Clone, Debug)]
pub struct Latency {
    /// Share of the throughput.
    pub share: f64,
    /// Load of each sending port in packets per second.
    pub load: f64,
    /// Sent packets.
    pub sent: u64,
    /// Lost packets.
    pub lost: u64,
    /// Delays in nanoseconds.
    pub histogram: Histogram<u64>,
    /// Disturbances by the machine.
    pub problems: Vec<Problem>,
}

/// Reason for the end of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All goals are reached, and the latencies are measured.
    Complete,
    /// It was stopped.
    Stopped,
    /// The time limit has passed.
    TimeLimit,
    /// The machine disturbed a trial again and again.
    Noise(Vec<Problem>),
    /// A port failed.
    Failed(String),
}

/// Result of a search.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Results of the goals.
    pub goals: Vec<GoalResult>,
    /// Latencies, for those shares that were measured.
    pub latency: Vec<Latency>,
    /// All trials of the search.
    pub trials: Vec<TrialRecord>,
    /// Faults of all trials.
    pub faults: Faults,
    /// Duration of the search.
    pub elapsed: Duration,
    /// Reason for the end.
    pub end: End,
}

impl Measurement {
    /// Returns the number of counted trials that the machine disturbed.
    pub fn disturbed(&self) -> usize {
        self.trials.iter().filter(|trial| trial.is_counted && !trial.problems.is_empty()).count()
            + self.latency.iter().filter(|latency| !latency.problems.is_empty()).count()
    }

    /// Returns true if the upper bound of a goal is a limit of the sending ports: most bad trials there lack packets
    /// that could not be sent.
    pub fn is_limited_by_sender(&self, result: &GoalResult) -> bool {
        let bad = |trial: &&TrialRecord| {
            Some(trial.request.load) == result.upper && trial.is_counted && trial.loss_ratio() > result.goal.loss_ratio
        };
        let bad: Vec<&TrialRecord> = self.trials.iter().filter(bad).collect();
        let unsent = bad.iter().filter(|trial| trial.unsent_ratio() > trial.loss_ratio() / 2.0).count();
        unsent * 2 > bad.len()
    }

    /// Returns true if packets were sent and none arrived in any trial.
    pub fn is_deaf(&self) -> bool {
        self.trials.iter().any(|trial| trial.sent > 0) && self.trials.iter().all(|trial| trial.received == 0)
    }
}

/// Makes the trials of a plan on ports.
struct Runner<'a> {
    generator: &'a mut Generator,
    plan: &'a Plan,
    qualification: &'a Qualification,
    stop: &'a AtomicBool,
}

/// Result of an attempt to make a trial.
enum Outcome {
    Done(Box<TrialResult>, Vec<Problem>),
    Ended(End),
}

impl Runner<'_> {
    fn trial(&mut self, load: f64, duration: Duration) -> Result<Outcome, Failure> {
        let trial = Trial {
            traffic: Traffic::Flows(self.plan.traffic.clone()),
            rate: Some(Rate::Packets(load)),
            limit: Limit::Time(duration),
            drain: self.plan.drain,
            reorder_threshold: None,
        };
        let result = self.generator.run(&trial, self.stop, |_| {})?;
        if let Some(why) = result.failure {
            return Ok(Outcome::Ended(End::Failed(why)));
        }
        if result.is_stopped || self.stop.load(Ordering::Relaxed) {
            return Ok(Outcome::Ended(End::Stopped));
        }
        let problems = self.qualification.problems_of_trial(&result);
        Ok(Outcome::Done(Box::new(result), problems))
    }

    /// Measures the latency at shares of a throughput.
    fn latencies(&mut self, throughput: f64, duration: Duration, all: &mut Vec<Latency>) -> Result<End, Failure> {
        for share in LATENCY_SHARES {
            let load = throughput * share;
            let mut attempts = 0;
            let (result, problems) = loop {
                match self.trial(load, duration)? {
                    Outcome::Ended(end) => return Ok(end),
                    Outcome::Done(result, problems) if problems.is_empty() || self.plan.allow_noise => {
                        break (result, problems);
                    }
                    Outcome::Done(_, problems) if attempts == REPEATS => return Ok(End::Noise(problems)),
                    Outcome::Done(..) => attempts += 1,
                }
            };
            let lost = result.lost().unwrap_or(0);
            all.push(Latency { share, load, sent: result.sent, lost, histogram: result.latency, problems });
        }
        Ok(End::Complete)
    }
}

/// Searches on ports, and then measures the latency. `observe` is called after each trial.
///
/// # Errors
/// If the plan is not possible on the ports. Failures during the search are in the result.
pub fn measure(
    generator: &mut Generator,
    plan: &Plan,
    qualification: &Qualification,
    stop: &AtomicBool,
    mut observe: impl FnMut(&[TrialRecord], &Search),
) -> Result<Measurement, Failure> {
    let start = Instant::now();
    let mut search = Search::new(&plan.goals, plan.limits).map_err(Failure::usage)?;
    let senders = generator.senders() as u64;
    // Within half of the precision, a longer trial changes no verdict.
    let tolerance = plan.goals.iter().map(|goal| goal.width).fold(1.0, f64::min) / 2.0;
    let mut trials: Vec<TrialRecord> = Vec::new();
    let mut runner = Runner { generator, plan, qualification, stop };

    let initial = plan.goals.iter().map(|goal| goal.initial_duration).max().unwrap_or(WARM_UP.1);
    let warm_up = runner.trial((plan.limits.1 * WARM_UP.0).max(plan.limits.0), initial.min(WARM_UP.1))?;
    let mut end = if let Outcome::Ended(end) = warm_up { Some(end) } else { None };
    let mut repeats = 0;
    while end.is_none() {
        let Some(request) = search.next_trial() else { break };
        if start.elapsed() + request.duration > plan.time_limit {
            end = Some(End::TimeLimit);
            break;
        }
        match runner.trial(request.load, request.duration)? {
            Outcome::Ended(why) => end = Some(why),
            Outcome::Done(result, problems) => {
                let mut record = TrialRecord::new(request, &result, (senders, tolerance), problems);
                record.is_counted = record.problems.is_empty() || plan.allow_noise;
                if record.is_counted {
                    repeats = 0;
                    search.record(request, record.loss_ratio());
                } else if repeats == REPEATS {
                    end = Some(End::Noise(record.problems.clone()));
                } else {
                    repeats += 1;
                }
                trials.push(record);
                observe(&trials, &search);
            }
        }
    }
    let goals = search.results();
    let mut latency = Vec::new();
    let end = match (end, plan.latency) {
        (Some(end), _) => end,
        (None, None) => End::Complete,
        (None, Some(duration)) => {
            let least = goals.iter().min_by(|a, b| a.goal.loss_ratio.total_cmp(&b.goal.loss_ratio));
            match least.filter(|result| result.state != State::Below).and_then(|result| result.throughput) {
                Some(throughput) => runner.latencies(throughput, duration, &mut latency)?,
                None => End::Complete,
            }
        }
    };
    let mut faults = Faults::default();
    trials.iter().for_each(|trial| faults.add(&trial.faults));
    Ok(Measurement { goals, latency, trials, faults, elapsed: start.elapsed(), end })
}

#[cfg(test)]
mod tests {
    use crate::pktgen::tracker::{Order, histogram};
    use crate::pktgen::usage::ThreadUsage;

    use super::*;

    fn result(asked_pps: f64, seconds: f64, sent: u64, order: Order) -> TrialResult {
        TrialResult {
            run: None,
            asked_pps: Some(asked_pps),
            duration: Duration::from_secs_f64(seconds),
            sent,
            sent_bytes: sent * 64,
            dropped_at_port: 0,
            is_measured: true,
            order,
            density: None,
            received_bytes: order.distinct * 64,
            corrupt: 0,
            latency: histogram(),
            jitter: None,
            departures: histogram(),
            full: 0,
            no_buffers: 0,
            skipped: Duration::ZERO,
            longest_stall: Duration::ZERO,
            stalls: 0,
            usage: Some(ThreadUsage::default()),
            ports: Vec::new(),
            streams: 1,
            window: 1 << 16,
            failure: None,
            is_stopped: false,
        }
    }

    fn record(result: &TrialResult) -> TrialRecord {
        let request = Request { load: 1000.0, duration: Duration::from_secs(1) };
        TrialRecord::new(request, result, (1, 0.01), Vec::new())
    }

    #[test]
    fn what_did_not_arrive_in_order_is_lost() {
        let order = |distinct, reordered| Order { distinct, reordered, duplicates: 7, ..Order::default() };
        let loss = |sent, seconds, order| record(&result(1000.0, seconds, sent, order)).loss_ratio();
        assert_eq!(loss(1000, 1.0, order(1000, 0)), 0.0);
        assert_eq!(loss(1000, 1.0, order(990, 0)), 0.01);
        assert_eq!(loss(1000, 1.0, order(1000, 5)), 0.005);
        // The schedule may have a packet more or less than rate times duration.
        assert_eq!(loss(1001, 1.0, order(1001, 0)), 0.0);
        assert_eq!(loss(998, 1.0, order(998, 0)), 0.0);
        // What the port did not accept was not forwarded either.
        assert_eq!(loss(900, 1.0, order(900, 0)), 0.1);
        assert_eq!(loss(900, 1.0, order(850, 0)), 0.15);
        // A trial that takes a tenth more time offers a tenth less load.
        assert_eq!(loss(1000, 1.005, order(1000, 0)), 0.0);
        assert!((loss(1000, 1.1, order(1000, 0)) - 0.091).abs() < 0.001);
        let faults = record(&result(1000.0, 1.0, 1000, order(1000, 5))).faults;
        assert_eq!(faults, Faults { duplicates: 7, reordered: 5, ..Faults::default() });
    }

    #[test]
    fn a_limit_of_the_sender_is_no_limit_of_the_device() {
        let goal = Goal {
            loss_ratio: 0.0,
            exceed_ratio: 0.5,
            width: 0.01,
            initial_duration: Duration::from_secs(1),
            final_duration: Duration::from_secs(1),
            duration_sum: Duration::from_secs(1),
        };
        let upper =
            |upper| GoalResult { goal, state: State::Reached, lower: None, upper: Some(upper), throughput: None };
        let order = |distinct| Order { distinct, ..Order::default() };
        let measurement = |trial: TrialRecord| Measurement {
            goals: Vec::new(),
            latency: Vec::new(),
            trials: vec![trial],
            faults: Faults::default(),
            elapsed: Duration::ZERO,
            end: End::Complete,
        };
        let by_port = measurement(record(&result(1000.0, 1.0, 900, order(900))));
        assert!(by_port.is_limited_by_sender(&upper(1000.0)) && !by_port.is_limited_by_sender(&upper(900.0)));
        let by_device = measurement(record(&result(1000.0, 1.0, 1000, order(900))));
        assert!(!by_device.is_limited_by_sender(&upper(1000.0)) && !by_device.is_deaf());
        assert!(measurement(record(&result(1000.0, 1.0, 1000, order(0)))).is_deaf());
        assert_eq!(by_device.disturbed(), 0);
    }
}
