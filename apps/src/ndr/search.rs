//! Multiple loss ratio search (MLRsearch, RFC 9971): the loads and durations of the trials, and what they show.
//!
//! [`Search`] knows nothing of ports. It asks for trials ([`Search::next_trial`]) and takes their loss
//! ([`Search::record`]). So it keeps a lower and an upper bound for each goal. Trials count for all goals. Coarse
//! bounds are found with short trials and then refined, because most of the time goes to trials of full length.

use std::time::Duration;

/// Coarser targets before that of the goal itself. Each has half the precision of the next one.
const PRECEDING_TARGETS: i32 = 2;
/// Tolerance of comparisons with sums and products of fractions.
const EPSILON: f64 = 1e-9;
/// Limits of the relative width of a goal.
pub const WIDTH_LIMITS: (f64, f64) = (0.0001, 0.5);

/// A search goal (RFC 9971): a loss ratio, and the certainty of the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Highest loss ratio of a good trial, from 0 to below 1.
    pub loss_ratio: f64,
    /// Highest share of bad trials at a lower bound, by duration, from 0 to below 1.
    pub exceed_ratio: f64,
    /// Largest distance of the bounds, relative to the upper one.
    pub width: f64,
    /// Duration of the shortest trials.
    pub initial_duration: Duration,
    /// Duration of the longest trials. Shorter ones count only in part.
    pub final_duration: Duration,
    /// Sum of the durations of the trials that decide about a load.
    pub duration_sum: Duration,
}

impl Goal {
    /// Checks the values.
    ///
    /// # Errors
    /// The value that is not possible, with its limit.
    pub fn check(&self) -> Result<(), String> {
        let percent = |ratio: f64| ratio * 100.0;
        if !(0.0..1.0).contains(&self.loss_ratio) {
            return Err(format!("a loss ratio of {} %; at least 0 % and below 100 %", percent(self.loss_ratio)));
        }
        if !(0.0..1.0).contains(&self.exceed_ratio) {
            return Err(format!("an exceed ratio of {} %; at least 0 % and below 100 %", percent(self.exceed_ratio)));
        }
        let (least, most) = WIDTH_LIMITS;
        if !(least..=most).contains(&self.width) {
            let (width, least, most) = (percent(self.width), percent(least), percent(most));
            return Err(format!("a width of {width} %; from {least} % to {most} % are possible"));
        }
        let seconds = |time: Duration| time.as_secs_f64();
        if self.initial_duration.is_zero() || self.initial_duration > self.final_duration {
            return Err(format!(
                "an initial trial duration of {} s; above 0 and at most the final one of {} s",
                seconds(self.initial_duration),
                seconds(self.final_duration)
            ));
        }
        if self.duration_sum < self.final_duration {
            return Err(format!(
                "a duration sum of {} s; at least the final trial duration of {} s",
                seconds(self.duration_sum),
                seconds(self.final_duration)
            ));
        }
        Ok(())
    }

    /// Returns the targets that lead to the goal, the coarsest first and the goal itself last.
    fn targets(&self, grid: Grid) -> Vec<Target> {
        let (initial, sum) = (self.initial_duration.as_secs_f64(), self.duration_sum.as_secs_f64());
        let shrink = (initial / sum).powf(1.0 / f64::from(PRECEDING_TARGETS));
        let target = |step: i32| {
            let sum = match step {
                0 => self.duration_sum,
                PRECEDING_TARGETS => self.initial_duration,
                step => Duration::from_secs_f64(sum * shrink.powi(step)),
            };
            Target {
                loss_ratio: self.loss_ratio,
                exceed_ratio: self.exceed_ratio,
                width: grid.steps(self.width) << step,
                duration: self.final_duration.min(sum),
                sum,
            }
        };
        (0..=PRECEDING_TARGETS).rev().map(target).collect()
    }
}

/// A trial that the search needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Load in the units of the limits, such as packets per second.
    pub load: f64,
    /// Duration.
    pub duration: Duration,
}

/// State of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The bounds are as close as the goal asks.
    Reached,
    /// The highest load is a lower bound, so the device can do at least that.
    AtLeast,
    /// The lowest load is an upper bound, so the device cannot even do that.
    Below,
    /// The search has ended before. The bounds are the best known ones, perhaps of short trials.
    Unfinished,
}

/// Result for a goal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GoalResult {
    /// The goal.
    pub goal: Goal,
    /// How far the search came.
    pub state: State,
    /// Relevant lower bound: the highest load below the upper bound that satisfies the goal.
    pub lower: Option<f64>,
    /// Relevant upper bound: the lowest load that does not satisfy the goal.
    pub upper: Option<f64>,
    /// Conditional throughput: the lower bound less the loss there.
    pub throughput: Option<f64>,
}

impl GoalResult {
    /// Returns the distance of the bounds relative to the upper one.
    pub fn width(&self) -> Option<f64> {
        self.lower.zip(self.upper).map(|(lower, upper)| (upper - lower) / upper)
    }
}

/// A goal, or a coarser version of it.
#[derive(Clone, Copy, Debug)]
struct Target {
    loss_ratio: f64,
    exceed_ratio: f64,
    /// Largest distance of the bounds in steps of the grid.
    width: u64,
    /// Duration of trials of full length.
    duration: Duration,
    sum: Duration,
}

/// The loads that may have trials, in steps of equal ratio. Goals meet at the same loads, so that they share trials.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Grid {
    min: f64,
    max: f64,
    /// Number of the highest load; the lowest one is 0.
    top: u64,
    /// Natural logarithm of the ratio of neighbours.
    step: f64,
}

impl Grid {
    /// Creates a grid whose neighbours are at most a width apart.
    fn new((min, max): (f64, f64), width: f64) -> Self {
        let all = (max / min).ln();
        let top = (all / -(1.0 - width).ln()).ceil().max(1.0);
        Self { min, max, top: top as u64, step: all / top }
    }

    /// Returns the steps that are within a width.
    fn steps(self, width: f64) -> u64 {
        ((-(1.0 - width).ln() / self.step + EPSILON) as u64).max(1)
    }

    fn load(self, index: u64) -> f64 {
        // The limits are exact.
        match index {
            0 => self.min,
            index if index == self.top => self.max,
            index => self.min * (self.step * index as f64).exp(),
        }
    }

    /// Returns the highest load of the grid that is not above a load.
    fn below(self, load: f64) -> u64 {
        // Below the lowest load the logarithm is negative, and the conversion gives 0.
        (((load / self.min).ln() / self.step + EPSILON) as u64).min(self.top)
    }
}

/// Trials at one load.
#[derive(Clone, Debug)]
struct Load {
    /// Number of the load in the grid.
    index: u64,
    /// Duration and loss ratio of each trial.
    trials: Vec<(Duration, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Lower,
    Upper,
    Undecided,
}

impl Load {
    /// Decides whether the load is a bound (RFC 9971, load classification). It is undecided as long as further trials
    /// could change the verdict.
    fn classify(&self, target: &Target) -> Verdict {
        let (mut good, mut bad, mut short_good, mut short_bad) = (0.0, 0.0, 0.0, 0.0);
        for (duration, loss) in &self.trials {
            let is_full = *duration >= target.duration;
            let sum = match (is_full, *loss <= target.loss_ratio) {
                (true, true) => &mut good,
                (true, false) => &mut bad,
                (false, true) => &mut short_good,
                (false, false) => &mut short_bad,
            };
            *sum += duration.as_secs_f64();
        }
        // Bad short trials count only as far as good ones of the same length do not make up for them.
        let balance = target.exceed_ratio / (1.0 - target.exceed_ratio);
        let bad = bad + (short_bad - short_good * balance).max(0.0);
        let whole = (good + bad).max(target.sum.as_secs_f64());
        let allowed = whole * (target.exceed_ratio + EPSILON);
        if bad > allowed {
            Verdict::Upper
        } else if whole - good <= allowed {
            Verdict::Lower
        } else {
            Verdict::Undecided
        }
    }

    /// Returns the loss ratio that a share of the trials does not exceed. The share is one less the exceed ratio, and
    /// trials that are missing count as lost.
    fn loss_quantile(&self, target: &Target) -> f64 {
        let mut full: Vec<(f64, f64)> = self
            .trials
            .iter()
            .filter(|(duration, _)| *duration >= target.duration)
            .map(|(duration, loss)| (*loss, duration.as_secs_f64()))
            .collect();
        full.sort_by(|a, b| a.0.total_cmp(&b.0));
        let whole = full.iter().map(|(_, time)| time).sum::<f64>().max(target.sum.as_secs_f64());
        let needed = whole * (1.0 - target.exceed_ratio - EPSILON);
        let mut sum = 0.0;
        for (loss, time) in full {
            sum += time;
            if sum >= needed {
                return loss;
            }
        }
        1.0
    }

    /// Returns the time of the trials of full length.
    fn full_time(&self, target: &Target) -> Duration {
        self.trials.iter().filter(|(duration, _)| *duration >= target.duration).map(|(duration, _)| duration).sum()
    }
}

/// The bounds for a target.
#[derive(Clone, Copy, Debug, Default)]
struct Bounds<'a> {
    lower: Option<&'a Load>,
    upper: Option<&'a Load>,
}

impl<'a> Bounds<'a> {
    /// Finds the lowest upper bound, and the highest lower bound below it. So good trials at a higher load than bad
    /// ones do not count (loss inversion).
    fn find(loads: &'a [Load], target: &Target) -> Self {
        let mut bounds = Self::default();
        for load in loads {
            match load.classify(target) {
                Verdict::Lower => bounds.lower = Some(load),
                Verdict::Upper => {
                    bounds.upper = Some(load);
                    break;
                }
                Verdict::Undecided => {}
            }
        }
        bounds
    }

    /// Returns the numbers of the loads.
    fn indices(&self) -> Indices {
        (self.lower.map(|load| load.index), self.upper.map(|load| load.index))
    }
}

/// Numbers of a lower and an upper bound in the grid.
type Indices = (Option<u64>, Option<u64>);

/// Chooses the trials of one goal.
#[derive(Clone, Debug)]
struct Selector {
    goal: Goal,
    targets: Vec<Target>,
    /// Number of reached targets.
    reached: usize,
    /// Bounds of the target before.
    before: Indices,
    /// Length of the next step away from a known bound.
    step: u64,
}

impl Selector {
    fn new(goal: Goal, grid: Grid) -> Self {
        let targets = goal.targets(grid);
        Self { goal, step: targets[0].width, targets, reached: 0, before: (None, None) }
    }

    /// Returns the load and the duration of the next trial for the current target; `None` if all targets are reached.
    fn nominate(&mut self, loads: &[Load], grid: Grid) -> Option<(u64, Duration)> {
        while let Some(target) = self.targets.get(self.reached) {
            let bounds = Bounds::find(loads, target);
            if let Some(index) = self.candidate(target, bounds, loads, grid) {
                return Some((index, target.duration));
            }
            self.before = bounds.indices();
            self.reached += 1;
            self.step = self.targets.get(self.reached).map_or(0, |next| next.width);
        }
        None
    }

    /// Returns the load that brings the bounds of a target closer together; `None` if they are close enough.
    fn candidate(&self, target: &Target, bounds: Bounds<'_>, loads: &[Load], grid: Grid) -> Option<u64> {
        let (lower, upper) = bounds.indices();
        let is_close = match (lower, upper) {
            (Some(lower), None) => lower == grid.top,
            (None, Some(upper)) => upper == 0,
            (Some(lower), Some(upper)) => upper - lower <= target.width,
            (None, None) => false,
        };
        if is_close {
            return None;
        }
        // The bounds of the target before are the best guess, as long as nothing shows that they are wrong.
        let inside = |index: &u64| lower.is_none_or(|it| *index > it) && upper.is_none_or(|it| *index < it);
        match (self.before.0.filter(inside), self.before.1.filter(inside)) {
            // The middle becomes one of the bounds, so one of the old ones suffices.
            (Some(lower), Some(upper)) if upper - lower > target.width => return Some(lower + (upper - lower) / 2),
            (Some(known), _) | (None, Some(known)) => return Some(known),
            (None, None) => {}
        }
        Some(match (lower, bounds.upper) {
            (None, None) => grid.top,
            (Some(lower), None) => {
                let up = lower + self.step;
                // A last interval that is narrower than asked costs a trial and gives nothing.
                if up + target.width >= grid.top { grid.top } else { up }
            }
            (None, Some(upper)) => {
                let down = upper.index.saturating_sub(self.step).min(grid.below(forwarded(upper, target, grid)));
                if down <= target.width { 0 } else { down }
            }
            (Some(lower), Some(upper)) => self.between(target, (lower, upper.index - lower), loads),
        })
    }

    /// Returns a load between a lower bound and an upper one at a distance.
    fn between(&self, target: &Target, (lower, width): (u64, u64), loads: &[Load]) -> u64 {
        // Trials that another goal has made near the middle need not be made again.
        let middle = (lower + width.div_ceil(4))..=(lower + width - width.div_ceil(4));
        let known = loads.iter().filter(|load| middle.contains(&load.index) && !load.full_time(target).is_zero());
        match known.max_by_key(|load| load.full_time(target)) {
            Some(load) => load.index,
            None => lower + self.step.min(width / 2),
        }
    }

    /// Makes the next step longer, if the last one has moved a bound and not found the other one.
    fn moved(&mut self, before: Indices, after: Indices, grid: Grid) {
        let is_up = before.0.is_some() && after.0 > before.0;
        let is_down = before.1.is_some() && after.1 < before.1 && after.0.is_none();
        if is_up || is_down {
            self.step = (self.step * 2).min(grid.top);
        }
    }

    /// Returns the bounds of the current target.
    fn indices(&self, loads: &[Load]) -> Indices {
        self.targets.get(self.reached).map_or((None, None), |target| Bounds::find(loads, target).indices())
    }
}

/// Returns the load that the device forwarded at an upper bound, in the best trial and with the allowed loss.
fn forwarded(upper: &Load, target: &Target, grid: Grid) -> f64 {
    let loss = upper.trials.iter().map(|(_, loss)| *loss).fold(1.0, f64::min);
    grid.load(upper.index) * (1.0 - loss) / (1.0 - target.loss_ratio)
}

/// A search between two loads for several goals.
#[derive(Clone, Debug)]
pub struct Search {
    grid: Grid,
    selectors: Vec<Selector>,
    /// Loads with trials, in ascending order.
    loads: Vec<Load>,
}

impl Search {
    /// Creates a search between a lowest and a highest load.
    ///
    /// # Errors
    /// A goal or limits that are not possible.
    pub fn new(goals: &[Goal], (min, max): (f64, f64)) -> Result<Self, String> {
        if goals.is_empty() {
            return Err("a search needs a goal".to_owned());
        }
        goals.iter().try_for_each(Goal::check)?;
        if !(min > 0.0 && min < max && max.is_finite()) {
            return Err(format!("loads from {min} to {max}; the lowest must be above 0 and below the highest"));
        }
        let grid = Grid::new((min, max), goals.iter().map(|goal| goal.width).fold(1.0, f64::min));
        let selectors = goals.iter().map(|goal| Selector::new(*goal, grid)).collect();
        Ok(Self { grid, selectors, loads: Vec::new() })
    }

    /// Returns the next trial; `None` if all goals are reached. Without [`Self::record`] between, it is the same one.
    pub fn next_trial(&mut self) -> Option<Request> {
        let Self { grid, selectors, loads } = self;
        // Coarse targets of all goals go first: their trials are short, and each may help the other goals.
        let mut requests: Vec<(usize, (u64, Duration))> = selectors
            .iter_mut()
            .filter_map(|selector| selector.nominate(loads, *grid).map(|request| (selector.reached, request)))
            .collect();
        requests.sort_by_key(|(reached, _)| *reached);
        requests.first().map(|(_, (index, duration))| Request { load: grid.load(*index), duration: *duration })
    }

    /// Takes the result of a trial: the share of the intended packets that did not arrive.
    pub fn record(&mut self, trial: Request, loss_ratio: f64) {
        let index = self.grid.below(trial.load);
        let at = self.loads.partition_point(|load| load.index < index);
        if self.loads.get(at).is_none_or(|load| load.index != index) {
            self.loads.insert(at, Load { index, trials: Vec::new() });
        }
        let before: Vec<Indices> = self.selectors.iter().map(|selector| selector.indices(&self.loads)).collect();
        self.loads[at].trials.push((trial.duration, loss_ratio));
        for (selector, before) in self.selectors.iter_mut().zip(before) {
            let after = selector.indices(&self.loads);
            selector.moved(before, after, self.grid);
        }
    }

    /// Makes trials until all goals are reached, or until `measure` returns `None`.
    pub fn run(&mut self, mut measure: impl FnMut(Request) -> Option<f64>) {
        while let Some(trial) = self.next_trial() {
            let Some(loss_ratio) = measure(trial) else { break };
            self.record(trial, loss_ratio);
        }
    }

    /// Returns the results of the goals so far, in the order of [`Self::new`].
    pub fn results(&self) -> Vec<GoalResult> {
        self.selectors.iter().map(|selector| self.result(selector)).collect()
    }

    fn result(&self, selector: &Selector) -> GoalResult {
        let is_done = selector.reached == selector.targets.len();
        let mut found = selector.targets.iter().rev().map(|target| (target, Bounds::find(&self.loads, target)));
        let of_goal = found.next();
        // Bounds of short trials are better than none.
        let best = of_goal.filter(|(_, it)| is_done || (it.lower.is_some() && it.upper.is_some())).or_else(|| {
            let known: Vec<_> = of_goal.into_iter().chain(found).collect();
            let both = known.iter().find(|(_, it)| it.lower.is_some() && it.upper.is_some());
            both.or_else(|| known.iter().find(|(_, it)| it.lower.is_some() || it.upper.is_some())).copied()
        });
        let bounds = best.map_or_else(Bounds::default, |(_, bounds)| bounds);
        let throughput = best.and_then(|(target, bounds)| {
            bounds.lower.map(|load| self.grid.load(load.index) * (1.0 - load.loss_quantile(target)))
        });
        let load = |bound: Option<&Load>| bound.map(|load| self.grid.load(load.index));
        let state = match (is_done, bounds.lower, bounds.upper) {
            (false, ..) => State::Unfinished,
            (true, Some(_), Some(_)) => State::Reached,
            (true, Some(_), None) => State::AtLeast,
            (true, None, _) => State::Below,
        };
        GoalResult { goal: selector.goal, state, lower: load(bounds.lower), upper: load(bounds.upper), throughput }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const GRID: Grid = Grid { min: 1.0, max: 2.0, top: 10, step: 0.07 };

    fn goal(loss_ratio: f64) -> Goal {
        Goal {
            loss_ratio,
            exceed_ratio: 0.5,
            width: 0.005,
            initial_duration: SECOND,
            final_duration: SECOND,
            duration_sum: 21 * SECOND,
        }
    }

    /// Searches for two goals, and returns the results and the requests.
    fn search(goals: &[Goal], mut loss: impl FnMut(Request) -> f64) -> (Vec<GoalResult>, Vec<Request>) {
        let mut search = Search::new(goals, (1e3, 1e6)).unwrap();
        let mut requests = Vec::new();
        search.run(|request| {
            requests.push(request);
            assert!(requests.len() < 5000, "the search does not end");
            assert!((1e3..=1e6).contains(&request.load), "{request:?}");
            Some(loss(request))
        });
        (search.results(), requests)
    }

    /// Returns the loss of a device with a capacity. Less than a packet in 10^9 is none.
    fn capacity(capacity: f64, load: f64) -> f64 {
        let loss = 1.0 - capacity / load;
        if loss > 1e-9 { loss } else { 0.0 }
    }

    /// Asserts that the bounds enclose a load.
    #[track_caller]
    fn assert_encloses(result: &GoalResult, truth: f64) {
        let (lower, upper) = (result.lower.unwrap(), result.upper.unwrap());
        assert!(lower <= truth * (1.0 + 2e-9) && truth <= upper * (1.0 + 2e-9), "{truth}: {result:?}");
    }

    #[test]
    fn bounds_enclose_the_capacity_within_the_width() {
        for true_rate in [1001.0, 5e3, 123_456.7, 1e6 / 3.0, 9.9e5] {
            let (results, requests) = search(&[goal(0.0), goal(0.005)], |it| capacity(true_rate, it.load));
            for (result, truth) in results.iter().zip([true_rate, true_rate / 0.995]) {
                assert_eq!(result.state, State::Reached, "{true_rate}: {result:?}");
                assert_encloses(result, truth);
                assert!(result.width().unwrap() <= 0.005 + 1e-9, "{result:?}");
            }
            assert_eq!(results[0].throughput, results[0].lower);
            assert_eq!(requests[0], Request { load: 1e6, duration: SECOND });
        }
    }

    #[test]
    fn a_device_without_loss_can_do_at_least_the_limit() {
        let (results, requests) = search(&[goal(0.0), goal(0.005)], |_| 0.0);
        for result in results {
            assert_eq!((result.state, result.lower, result.upper), (State::AtLeast, Some(1e6), None));
            assert_eq!(result.throughput, Some(1e6));
        }
        assert!(requests.iter().all(|it| it.load == 1e6));
        // Eleven good trials of 21 decide, whatever the others are.
        assert_eq!(requests.len(), 11);
    }

    #[test]
    fn a_device_that_always_loses_is_below_the_limit() {
        let (results, _) = search(&[goal(0.0), goal(0.005)], |_| 0.3);
        for result in results {
            assert_eq!((result.state, result.lower, result.upper), (State::Below, None, Some(1e3)));
            assert_eq!(result.throughput, None);
        }
    }

    #[test]
    fn constant_loss_decides_by_the_ratio() {
        // The goal of 0.5 % tolerates 0.2 %, the goal of no loss does not.
        let (results, _) = search(&[goal(0.0), goal(0.005)], |it| capacity(2e5, it.load).max(0.002));
        assert_eq!(results[0].state, State::Below);
        let found = results[1];
        assert_encloses(&found, 2e5 / 0.995);
        assert!((found.throughput.unwrap() / (found.lower.unwrap() * 0.998) - 1.0).abs() < 0.003, "{found:?}");
    }

    #[test]
    fn a_few_bad_trials_do_not_count() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let noisy = |it: Request| capacity(2e5, it.load).max(if random.f64() < 0.15 { 0.1 } else { 0.0 });
            let (results, _) = search(&[goal(0.0)], noisy);
            assert_eq!(results[0].state, State::Reached, "{seed}");
            assert_encloses(&results[0], 2e5);
        }
        // Without an exceed ratio each bad trial counts. The trial at the lowest load is bad too.
        let strict = Goal { exceed_ratio: 0.0, ..goal(0.0) };
        let mut n = 0;
        let (results, _) = search(&[strict], |_| {
            n += 1;
            if n % 3 == 0 { 0.1 } else { 0.0 }
        });
        assert_eq!(results[0].state, State::Below);
    }

    #[test]
    fn good_trials_above_bad_ones_do_not_count() {
        let loads = [(1, 0.0), (2, 0.1), (3, 0.0)].map(|(index, loss)| {
            let trials = vec![(21 * SECOND, loss)];
            Load { index, trials }
        });
        assert_eq!(Bounds::find(&loads, &goal(0.0).targets(GRID)[2]).indices(), (Some(1), Some(2)));
    }

    #[test]
    fn an_interrupted_search_has_the_bounds_so_far() {
        let mut search = Search::new(&[goal(0.0), goal(0.005)], (1e3, 1e6)).unwrap();
        assert_eq!(search.results()[0].state, State::Unfinished);
        assert_eq!((search.results()[0].lower, search.results()[0].upper), (None, None));
        let mut n = 0;
        search.run(|it| {
            n += 1;
            (n <= 6).then(|| capacity(2e5, it.load))
        });
        for result in search.results() {
            assert_eq!(result.state, State::Unfinished);
            let (lower, upper) = (result.lower.unwrap(), result.upper.unwrap());
            assert!(lower <= 2e5 / 0.995 && 2e5 <= upper && lower < upper, "{result:?}");
        }
        // It can go on.
        search.run(|it| Some(capacity(2e5, it.load)));
        assert!(search.results().iter().all(|it| it.state == State::Reached));
    }

    #[test]
    fn short_trials_come_first() {
        let long = Goal { final_duration: 4 * SECOND, duration_sum: 16 * SECOND, ..goal(0.0) };
        let (results, requests) = search(&[long], |it| capacity(3e5, it.load));
        assert_eq!(results[0].state, State::Reached);
        let seconds: Vec<u64> = requests.iter().map(|it| it.duration.as_secs()).collect();
        assert!(seconds.is_sorted() && seconds[0] == 1 && seconds.last() == Some(&4), "{seconds:?}");
        // Bounds of the goal itself need trials of full length: two good ones of four seconds, or more bad ones.
        let (lower, upper) = (results[0].lower.unwrap(), results[0].upper.unwrap());
        for bound in [lower, upper] {
            assert!(requests.iter().any(|it| it.load == bound && it.duration == 4 * SECOND), "{bound}");
        }
    }

    #[test]
    fn short_trials_overestimate_and_are_corrected() {
        // A queue takes what is too much for a while, so that short trials see no loss.
        let long = Goal { final_duration: 4 * SECOND, duration_sum: 4 * SECOND, ..goal(0.0) };
        let queue = |it: Request| capacity(3e5 + 3e5 / it.duration.as_secs_f64(), it.load);
        let (results, _) = search(&[long], queue);
        assert_encloses(&results[0], 3.75e5);
        assert!(results[0].width().unwrap() <= 0.005 + 1e-9, "{results:?}");
    }

    #[test]
    fn loads_are_classified_as_the_rfc_says() {
        let target = goal(0.01).targets(GRID)[2];
        let verdict = |target: &Target, trials: &[(u64, f64)]| {
            let trials = trials.iter().map(|(time, loss)| (Duration::from_secs(*time), *loss)).collect();
            Load { index: 1, trials }.classify(target)
        };
        assert_eq!(verdict(&target, &[]), Verdict::Undecided);
        assert_eq!(verdict(&target, &[(1, 0.01); 10]), Verdict::Undecided);
        assert_eq!(verdict(&target, &[(1, 0.01); 11]), Verdict::Lower);
        assert_eq!(verdict(&target, &[(1, 0.02); 10]), Verdict::Undecided);
        assert_eq!(verdict(&target, &[(1, 0.02); 11]), Verdict::Upper);
        let long = Target { duration: Duration::from_secs(2), sum: Duration::from_secs(4), ..target };
        // Good short trials decide nothing, and make up for bad short ones.
        assert_eq!(verdict(&long, &[(1, 0.0); 9]), Verdict::Undecided);
        assert_eq!(verdict(&long, &[(1, 0.5), (1, 0.5), (1, 0.5)]), Verdict::Upper);
        assert_eq!(verdict(&long, &[(1, 0.5), (1, 0.5), (1, 0.5), (1, 0.0)]), Verdict::Undecided);
        // Bad short trials add to the whole, so one full trial no longer is half of it.
        assert_eq!(verdict(&long, &[(2, 0.0)]), Verdict::Lower);
        assert_eq!(verdict(&long, &[(2, 0.0), (1, 0.5), (1, 0.5), (1, 0.5)]), Verdict::Upper);
    }

    #[test]
    fn throughput_counts_the_loss_at_the_bound() {
        let target = goal(0.5).targets(GRID)[2];
        let at = |losses: &[f64]| {
            Load { index: 1, trials: losses.iter().map(|loss| (SECOND, *loss)).collect() }.loss_quantile(&target)
        };
        // 21 trials are needed. With eleven good ones, the worst of them is the median.
        let mut losses: Vec<f64> = (0..11).map(|n| f64::from(n) / 100.0).collect();
        assert_eq!(at(&losses), 0.1);
        losses.extend([0.9; 10]);
        assert_eq!(at(&losses), 0.1);
        losses.push(0.0);
        assert_eq!(at(&losses), 0.09);
        assert_eq!(at(&losses[..5]), 1.0);
    }

    #[test]
    fn the_grid_has_the_limits_and_the_width() {
        let grid = Grid::new((1e3, 1e6), 0.005);
        assert_eq!((grid.load(0), grid.load(grid.top), grid.steps(0.005)), (1e3, 1e6, 1));
        for index in 0..grid.top {
            let (lower, upper) = (grid.load(index), grid.load(index + 1));
            assert!(lower < upper && (upper - lower) / upper <= 0.005 + 1e-12, "{index}");
            assert_eq!((grid.below(lower), grid.below((lower + upper) / 2.0)), (index, index));
        }
        assert_eq!((grid.below(0.0), grid.below(1e9)), (0, grid.top));
        assert_eq!((grid.steps(0.01), grid.steps(0.001)), (2, 1));
    }

    #[test]
    fn impossible_goals_are_refused_with_the_limit() {
        let refused = |goal: Goal| Search::new(&[goal], (1.0, 2.0)).unwrap_err();
        assert!(refused(Goal { loss_ratio: 1.0, ..goal(0.0) }).contains("below 100 %"));
        assert!(refused(Goal { loss_ratio: f64::NAN, ..goal(0.0) }).contains("below 100 %"));
        assert!(refused(Goal { exceed_ratio: -0.1, ..goal(0.0) }).contains("at least 0 %"));
        assert!(refused(Goal { width: 0.0, ..goal(0.0) }).contains("from 0.01 % to 50 %"));
        assert!(refused(Goal { final_duration: SECOND / 2, ..goal(0.0) }).contains("at most the final one of 0.5 s"));
        assert!(refused(Goal { duration_sum: SECOND / 2, ..goal(0.0) }).contains("final trial duration of 1 s"));
        assert!(Search::new(&[goal(0.0)], (2.0, 2.0)).unwrap_err().contains("below the highest"));
        assert!(Search::new(&[], (1.0, 2.0)).is_err());
    }
}
