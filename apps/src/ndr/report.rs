//! Results of a search as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use wirepath::cli::{Rate as Scaled, Table};

use super::measure::{End, Faults, Latency, Measurement, TrialRecord};
use super::qualify::{problems_json, problems_text};
use super::search::{Goal, GoalResult, State};
use crate::pktgen::report::{histogram_json, time};
use crate::pktgen::size::GAP;

/// Returns the name of a goal: NDR without loss, else PDR with the ratio (non-drop and partial drop rate).
pub fn goal_name(goal: &Goal) -> String {
    if goal.loss_ratio == 0.0 { "NDR".to_owned() } else { format!("PDR {} %", percent(goal.loss_ratio)) }
}

/// Returns a ratio in percent, without the rounding errors of the multiplication.
fn percent(ratio: f64) -> f64 {
    (ratio * 1e8).round() / 1e6
}

fn state_name(state: State) -> &'static str {
    match state {
        State::Reached => "reached",
        State::AtLeast => "at least",
        State::Below => "below",
        State::Unfinished => "unfinished",
    }
}

/// Returns packets per second with all digits that the precision needs.
fn pps(load: f64) -> String {
    if load >= 10_000.0 { format!("{load:.0}") } else { format!("{load:.2}") }
}

/// Returns the figures of the goals as they are known during a search, in one line.
pub fn brief(results: &[GoalResult]) -> String {
    let bound = |load: Option<f64>| load.map_or_else(|| "?".to_owned(), pps);
    let goal = |result: &GoalResult| {
        format!("{} {}..{} pps", goal_name(&result.goal), bound(result.lower), bound(result.upper))
    };
    results.iter().map(goal).collect::<Vec<_>>().join(", ")
}

/// Names, counts and meanings of faults.
fn faults(faults: &Faults) -> [(&'static str, u64, &'static str); 5] {
    [
        ("duplicates", faults.duplicates, "further copies of packets, which do not count"),
        ("reordered", faults.reordered, "packets after later ones (RFC 4737), which do not count as received"),
        ("corrupt", faults.corrupt, "packets with a changed payload, which do not count as received"),
        ("looped", faults.looped, "packets that came back to a port that only sends, which do not count as received"),
        ("foreign", faults.foreign, "packets of other programs or of a trial before, which do not count"),
    ]
}

/// A measurement with the size of its frames.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    /// Sizes as they were asked for.
    pub size: &'a str,
    /// Mean length of the frames with their frame check sequences.
    pub mean: f64,
    /// Result.
    pub measurement: &'a Measurement,
    /// The qualification found that the machine disturbs.
    pub is_noisy: bool,
}

impl Report<'_> {
    /// Returns true if the machine disturbed the figures.
    pub fn is_disturbed(&self) -> bool {
        self.is_noisy || self.measurement.disturbed() > 0
    }

    /// Returns true if there are figures. A machine that disturbs a search has none.
    fn has_figures(&self) -> bool {
        !matches!(self.measurement.end, End::Noise(_))
    }

    fn bits(&self, load: f64) -> (f64, f64) {
        (load * self.mean * 8.0, load * (self.mean + GAP as f64) * 8.0)
    }

    /// Returns the result as text.
    pub fn text(&self) -> String {
        let it = self.measurement;
        let mut text = format!("size {}: {} trials in {:.1} s\n", self.size, it.trials.len(), it.elapsed.as_secs_f64());
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:12} {value}");
        };
        match &it.end {
            End::Complete => {}
            End::Stopped => line("stopped", "before the end; bounds may be those of short trials".to_owned()),
            End::TimeLimit => line("time limit", "has passed; bounds may be those of short trials".to_owned()),
            End::Failed(why) => line("failed", format!("{why}; bounds may be those of short trials")),
            End::Noise(problems) => {
                line("no result", "the machine disturbed a trial and each repetition of it".to_owned());
                return text + &problems_text(problems);
            }
        }
        if self.is_disturbed() {
            let trials = it.trials.len() + it.latency.len();
            line("disturbed", format!("{} of {trials} trials; these are not figures of the device", it.disturbed()));
        }
        text += &self.table().to_string();
        for result in &it.goals {
            text += &self.notes(result);
        }
        for latency in &it.latency {
            text += &latency_text(latency);
        }
        for (name, n, about) in faults(&it.faults) {
            if n > 0 {
                let _ = writeln!(text, "{name:12} {n} {about}");
            }
        }
        if it.is_deaf() {
            text += "no packet arrived in any trial: check the cables, the addresses and the device\n";
        }
        text
    }

    fn table(&self) -> Table {
        let columns =
            ["GOAL", "RESULT", "THROUGHPUT pps", "LOWER pps", "UPPER pps", "WIDTH", "bit/s (L2)", "bit/s (L1)"];
        let mut table = Table::with_columns(columns.iter().zip(0..).map(|(name, i)| ((*name).to_owned(), i > 1)));
        for result in &self.measurement.goals {
            let load = |load: Option<f64>| load.map_or_else(|| "-".to_owned(), pps);
            let bits = result.throughput.map(|load| self.bits(load));
            let scaled = |bits: Option<f64>| bits.map_or_else(|| "-".to_owned(), |it| Scaled(it).to_string());
            let mark = if self.is_disturbed() { ", disturbed" } else { "" };
            table.push([
                goal_name(&result.goal),
                format!("{}{mark}", state_name(result.state)),
                load(result.throughput),
                load(result.lower),
                load(result.upper),
                result.width().map_or_else(|| "-".to_owned(), |width| format!("{:.3} %", width * 100.0)),
                scaled(bits.map(|(l2, _)| l2)).trim_end().to_owned(),
                scaled(bits.map(|(_, l1)| l1)).trim_end().to_owned(),
            ]);
        }
        table
    }

    /// Returns the restrictions of a figure as lines.
    fn notes(&self, result: &GoalResult) -> String {
        let name = goal_name(&result.goal);
        let mut text = match result.state {
            State::AtLeast => format!("{name}: the highest load passes, so the device can do at least that\n"),
            State::Below => format!("{name}: the lowest load fails, so the throughput lies below it\n"),
            State::Reached | State::Unfinished => String::new(),
        };
        if self.measurement.is_limited_by_sender(result) {
            let _ = writeln!(text, "{name}: the sending ports accept no more, so the device can do at least that");
        }
        text
    }

    /// Returns the result as JSON. Loads are those of each sending port.
    pub fn to_json(&self) -> Value {
        let it = self.measurement;
        let (end, why) = match &it.end {
            End::Complete => ("complete", Value::Null),
            End::Stopped => ("stopped", Value::Null),
            End::TimeLimit => ("time_limit", Value::Null),
            End::Failed(why) => ("failed", why.as_str().into()),
            End::Noise(problems) => ("noise", problems_json(problems)),
        };
        let goals: Vec<Value> = it.goals.iter().map(|result| self.goal_json(result)).collect();
        let latency: Vec<Value> = it.latency.iter().map(latency_json).collect();
        let trials: Vec<Value> = it.trials.iter().map(trial_json).collect();
        json!({
            "size": self.size,
            "mean_size": self.mean,
            "end": end,
            "why": why,
            "seconds": it.elapsed.as_secs_f64(),
            "disturbed": self.is_disturbed(),
            "disturbed_trials": it.disturbed(),
            "goals": if self.has_figures() { goals } else { Vec::new() },
            "latency": if self.has_figures() { latency } else { Vec::new() },
            "faults": faults_json(&it.faults),
            "trials": if self.has_figures() { trials } else { Vec::new() },
        })
    }

    fn goal_json(&self, result: &GoalResult) -> Value {
        let goal = &result.goal;
        let bits = result.throughput.map(|load| self.bits(load));
        json!({
            "name": goal_name(goal),
            "loss_ratio": goal.loss_ratio,
            "exceed_ratio": goal.exceed_ratio,
            "asked_width": goal.width,
            "initial_trial_seconds": goal.initial_duration.as_secs_f64(),
            "final_trial_seconds": goal.final_duration.as_secs_f64(),
            "duration_sum_seconds": goal.duration_sum.as_secs_f64(),
            "state": state_name(result.state).replace(' ', "_"),
            "disturbed": self.is_disturbed(),
            "limited_by_sender": self.measurement.is_limited_by_sender(result),
            "throughput_pps": result.throughput,
            "throughput_bps_l2": bits.map(|(l2, _)| l2),
            "throughput_bps_l1": bits.map(|(_, l1)| l1),
            "lower_pps": result.lower,
            "upper_pps": result.upper,
            "width": result.width(),
        })
    }
}

fn latency_text(latency: &Latency) -> String {
    let at = |percent: f64| time(latency.histogram.value_at_percentile(percent) as f64);
    let mark = if latency.problems.is_empty() { "" } else { " (disturbed)" };
    format!(
        "latency at {:.0} % ({} pps): p50 {}, p90 {}, p99 {}, max {}; {} of {} lost{mark}\n",
        latency.share * 100.0,
        pps(latency.load),
        at(50.0),
        at(90.0),
        at(99.0),
        time(latency.histogram.max() as f64),
        latency.lost,
        latency.sent,
    )
}

fn latency_json(latency: &Latency) -> Value {
    json!({
        "share": latency.share,
        "load_pps": latency.load,
        "sent": latency.sent,
        "lost": latency.lost,
        "latency_ns": histogram_json(&latency.histogram),
        "disturbed": !latency.problems.is_empty(),
    })
}

fn faults_json(all: &Faults) -> Value {
    faults(all).into_iter().map(|(name, n, _)| (name.to_owned(), json!(n))).collect::<serde_json::Map<_, _>>().into()
}

fn trial_json(trial: &TrialRecord) -> Value {
    json!({
        "load_pps": trial.request.load,
        "seconds": trial.request.duration.as_secs_f64(),
        "intended": trial.intended,
        "sent": trial.sent,
        "received": trial.received,
        "loss_ratio": trial.loss_ratio(),
        "counted": trial.is_counted,
        "faults": faults_json(&trial.faults),
        "problems": problems_json(&trial.problems),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::qualify::Problem;
    use super::*;

    fn result(loss_ratio: f64, state: State, lower: Option<f64>, upper: Option<f64>) -> GoalResult {
        let second = Duration::from_secs(1);
        let goal = Goal {
            loss_ratio,
            exceed_ratio: 0.5,
            width: 0.005,
            initial_duration: second,
            final_duration: second,
            duration_sum: 21 * second,
        };
        GoalResult { goal, state, lower, upper, throughput: lower }
    }

    fn measurement(goals: Vec<GoalResult>, end: End) -> Measurement {
        Measurement {
            goals,
            latency: Vec::new(),
            trials: Vec::new(),
            faults: Faults { looped: 3, ..Faults::default() },
            elapsed: Duration::from_millis(1500),
            end,
        }
    }

    fn report(measurement: &Measurement, is_noisy: bool) -> Report<'_> {
        Report { size: "64", mean: 64.0, measurement, is_noisy }
    }

    #[test]
    fn results_are_a_table_with_their_restrictions() {
        let goals = vec![
            result(0.0, State::Reached, Some(99_600.0), Some(100_000.0)),
            result(0.005, State::AtLeast, Some(1e6), None),
        ];
        let measurement = measurement(goals, End::Complete);
        let expected = "size 64: 0 trials in 1.5 s\n\
            GOAL       RESULT    THROUGHPUT pps  LOWER pps  UPPER pps    WIDTH  bit/s (L2)  bit/s (L1)\n\
            NDR        reached            99600      99600     100000  0.400 %     51.00 M     66.93 M\n\
            PDR 0.5 %  at least         1000000    1000000          -        -    512.00 M    672.00 M\n\
            PDR 0.5 %: the highest load passes, so the device can do at least that\n\
            looped       3 packets that came back to a port that only sends, which do not count as received\n";
        assert_eq!(report(&measurement, false).text(), expected);
        let json = report(&measurement, false).to_json();
        assert_eq!((&json["goals"][1]["state"], &json["disturbed"]), (&json!("at_least"), &json!(false)));
        assert_eq!(json["goals"][0]["throughput_bps_l1"], 99_600.0 * 84.0 * 8.0);
        assert_eq!(json["faults"]["looped"], 3);
    }

    #[test]
    fn a_disturbed_result_is_marked_and_noise_has_none() {
        let goals = vec![result(0.0, State::Reached, Some(99_600.0), Some(100_000.0))];
        let disturbed = measurement(goals.clone(), End::Complete);
        let text = report(&disturbed, true).text();
        assert!(text.contains("reached, disturbed") && text.contains("not figures of the device"), "{text}");
        assert_eq!(report(&disturbed, true).to_json()["goals"][0]["disturbed"], true);
        let problem = Problem { cause: "a cause".to_owned(), remedy: "a remedy".to_owned() };
        let noisy = measurement(goals, End::Noise(vec![problem]));
        let (text, json) = (report(&noisy, false).text(), report(&noisy, false).to_json());
        assert!(text.contains("noise: a cause\n  > a remedy\n") && !text.contains("99600"), "{text}");
        assert_eq!((&json["goals"], &json["why"][0]["remedy"]), (&json!([]), &json!("a remedy")));
    }

    #[test]
    fn known_bounds_are_one_line() {
        let results = [
            result(0.0, State::Unfinished, Some(1234.567), None),
            result(0.005, State::Unfinished, None, Some(20_000.4)),
        ];
        assert_eq!(brief(&results), "NDR 1234.57..? pps, PDR 0.5 % ?..20000 pps");
    }
}
