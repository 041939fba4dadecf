//! The request `perf`: a measurement of the workers.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use wirepath_control_socket::Answer;
use wirepath_pipeline::ControlPlane;
use wirepath_pipeline::measure::{Measurement, WorkerRecording};

use super::server::append;

/// Seconds of a measurement, if the request names no others, and the most.
const SECONDS: f64 = 1.0;
const MAX_SECONDS: f64 = 3600.0;

/// A measurement for a client. It ends with this value, so also if the client closes the connection.
#[derive(Debug)]
pub(super) struct PerfAnswer {
    measurement: Measurement,
    begun: Instant,
    time: Duration,
    worker: Option<usize>,
    with_turns: bool,
    /// Recordings that are not sent yet, once the measurement has ended.
    left: Option<std::vec::IntoIter<(usize, WorkerRecording)>>,
}

impl PerfAnswer {
    /// Begins a measurement.
    pub(super) fn begin(request: &Map<String, Value>, plane: &mut ControlPlane) -> Result<Self, String> {
        let number = |key: &str, range: std::ops::RangeInclusive<f64>| match request.get(key) {
            None => Ok(None),
            Some(value) => {
                let number = value.as_f64().filter(|number| range.contains(number));
                let wrong = || format!("{key}: expected a number from {} to {}", range.start(), range.end());
                number.map(Some).ok_or_else(wrong)
            }
        };
        let seconds = number("seconds", 0.01..=MAX_SECONDS)?.unwrap_or(SECONDS);
        let slow = number("slow_us", 1.0..=1e9)?.map(|limit| Duration::from_secs_f64(limit / 1e6));
        let with_turns = match request.get("turns") {
            None => false,
            Some(value) => value.as_bool().ok_or("turns: expected true or false")?,
        };
        let worker = match request.get("worker") {
            None => None,
            Some(value) => {
                let worker = value.as_u64().and_then(|worker| usize::try_from(worker).ok());
                let known = worker.filter(|worker| *worker < plane.workers());
                Some(known.ok_or_else(|| format!("worker: there are {}, from 0 on", plane.workers()))?)
            }
        };
        let measurement = plane.start_measurement(slow)?;
        let time = Duration::from_secs_f64(seconds);
        Ok(Self { measurement, begun: Instant::now(), time, worker, with_turns, left: None })
    }

    /// Appends the figures of the next worker, if the measurement has ended.
    pub(super) fn resume(mut self, plane: &mut ControlPlane, out: &mut Vec<u8>) -> Answer<Self> {
        let Some(left) = &mut self.left else {
            if self.begun.elapsed() < self.time {
                return Answer::Later(self);
            }
            let Some(recordings) = plane.end_measurement(&self.measurement) else { return Answer::Later(self) };
            let wanted = |(worker, _): &(usize, WorkerRecording)| self.worker.is_none_or(|it| it == *worker);
            let recordings: Vec<_> = recordings.into_iter().enumerate().filter(wanted).collect();
            self.left = Some(recordings.into_iter());
            return Answer::More(self);
        };
        match left.next() {
            Some((worker, recording)) => {
                let figures = recording.to_json(worker, self.with_turns);
                append(out, &json!({ "ok": true, "workers": [figures], "more": true }));
                Answer::More(self)
            }
            None => {
                append(out, &json!({ "ok": true, "seconds": self.time.as_secs_f64() }));
                Answer::Done
            }
        }
    }
}
