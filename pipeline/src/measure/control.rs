//! The control thread's part: passes recordings to the workers, and collects them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::recording::Limits;
use super::{Recording, report};
use crate::clock;
use crate::mailbox::Mailbox;
use crate::runtime::ControlPlane;

/// Measurements at a time.
const MAX_MEASUREMENTS: usize = 8;
/// Time after which a worker that does not return its recording is left out.
const WORKER_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit of a turn above which it is suspicious, if nobody names another one.
const SLOW_TURN: Duration = Duration::from_micros(100);

/// A measurement that somebody wants. Dropping it ends the measurement. Workers measure while there is one.
#[derive(Debug)]
pub struct Measurement {
    id: u64,
    _alive: Arc<()>,
}

/// A measurement, as the control thread knows it.
#[derive(Debug)]
struct Client {
    id: u64,
    alive: Arc<()>,
    /// The first epoch of the measurement, and the one after the last.
    epochs: (u64, Option<u64>),
    ended: Option<Instant>,
    recordings: Vec<Option<Box<Recording>>>,
    /// Number of epochs that each worker has returned.
    returned: Vec<u64>,
}

/// Measurements of a program.
#[derive(Debug, Default)]
pub(crate) struct MeasurementControl {
    next_id: u64,
    /// Number of the recordings that the workers fill now.
    epoch: u64,
    /// True if the workers measure.
    is_armed: bool,
    slow: Option<u64>,
    clients: Vec<Client>,
}

/// The recording of one worker; `None` if the worker did not answer.
#[derive(Debug)]
pub struct WorkerRecording(pub(super) Option<Box<Recording>>);

impl MeasurementControl {
    /// Gives all workers empty recordings, or none. They return those that they fill now.
    fn rotate(&mut self, mailboxes: &[Mailbox], is_armed: bool) {
        self.epoch += 1;
        self.is_armed = is_armed;
        let default = (clock::tick_hz() * SLOW_TURN.as_secs_f64()) as u64;
        let limits = Limits { slow: self.slow.unwrap_or(default) };
        for mailbox in mailboxes {
            let recording = is_armed.then(|| Box::new(Recording::new(self.epoch, limits)));
            // A worker that has not taken its last orders stays without this one. Its figures lack then.
            let _ = mailbox.recording_orders.push(recording);
            mailbox.notifier.notify();
        }
    }

    fn collect(&mut self, mailboxes: &[Mailbox]) {
        for (worker, mailbox) in mailboxes.iter().enumerate() {
            while let Some(recording) = mailbox.recordings.pop() {
                for client in &mut self.clients {
                    let (first, end) = client.epochs;
                    if recording.epoch < first || end.is_some_and(|end| recording.epoch >= end) {
                        continue;
                    }
                    client.returned[worker] += 1;
                    match &mut client.recordings[worker] {
                        Some(sum) => sum.append(&recording),
                        none => {
                            let mut sum = Box::new(Recording::new(recording.epoch, recording.limits));
                            sum.append(&recording);
                            *none = Some(sum);
                        }
                    }
                }
            }
        }
    }

    /// Ends measurements that nobody wants any more. Without any, the workers stop to measure.
    pub(crate) fn poll(&mut self, mailboxes: &[Mailbox]) {
        self.collect(mailboxes);
        self.clients.retain(|client| Arc::strong_count(&client.alive) > 1);
        if self.is_armed && self.clients.iter().all(|client| client.ended.is_some()) {
            self.rotate(mailboxes, false);
        }
    }
}

impl ControlPlane {
    /// Returns the number of workers that measure.
    pub fn measuring(&self) -> usize {
        self.mailboxes.iter().filter(|mailbox| mailbox.is_recording()).count()
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.mailboxes.len()
    }

    /// Makes all workers measure until the result is dropped or [`Self::end_measurement`] is called. Turns that take
    /// longer than `slow` are recorded as suspicious; the last one who measures sets this limit.
    ///
    /// # Errors
    /// If too many measurements run.
    pub fn start_measurement(&mut self, slow: Option<Duration>) -> Result<Measurement, String> {
        let (control, mailboxes) = (&mut self.measurements, &*self.mailboxes);
        control.poll(mailboxes);
        if control.clients.len() >= MAX_MEASUREMENTS {
            return Err(format!("{MAX_MEASUREMENTS} measurements run already"));
        }
        control.slow = slow.map(|slow| (slow.as_secs_f64() * clock::tick_hz()) as u64);
        control.rotate(mailboxes, true);
        let alive = Arc::new(());
        control.next_id += 1;
        control.clients.push(Client {
            id: control.next_id,
            alive: Arc::clone(&alive),
            epochs: (control.epoch, None),
            ended: None,
            recordings: mailboxes.iter().map(|_| None).collect(),
            returned: vec![0; mailboxes.len()],
        });
        Ok(Measurement { id: control.next_id, _alive: alive })
    }

    /// Ends a measurement, and returns the recordings of all workers in order when they are there. The caller repeats
    /// the call until then. A worker that does not answer is left out after a second.
    pub fn end_measurement(&mut self, measurement: &Measurement) -> Option<Vec<WorkerRecording>> {
        let (control, mailboxes) = (&mut self.measurements, &*self.mailboxes);
        control.collect(mailboxes);
        let Some(at) = control.clients.iter().position(|client| client.id == measurement.id) else {
            return Some(Vec::new());
        };
        let Some(ended) = control.clients[at].ended else {
            let others = control.clients.iter().enumerate().any(|(i, it)| i != at && it.ended.is_none());
            control.rotate(mailboxes, others);
            let client = &mut control.clients[at];
            (client.epochs.1, client.ended) = (Some(control.epoch), Some(Instant::now()));
            return None;
        };
        let client = &control.clients[at];
        let epochs = client.epochs.1.unwrap_or(control.epoch) - client.epochs.0;
        if client.returned.iter().any(|returned| *returned < epochs) && ended.elapsed() < WORKER_TIMEOUT {
            return None;
        }
        let client = control.clients.remove(at);
        Some(client.recordings.into_iter().map(WorkerRecording).collect())
    }
}

impl WorkerRecording {
    /// Returns the figures as a JSON object. With `turns`, the last busy turns are in it. `worker` is the index of the
    /// worker.
    pub fn to_json(&self, worker: usize, turns: bool) -> serde_json::Value {
        report::json(worker, self.0.as_deref(), turns)
    }
}
