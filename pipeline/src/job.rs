//! Jobs: functions that the control thread sends to workers.

use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use thiserror::Error;

use crate::context::Context;
use crate::mailbox::Mailbox;

/// A job in the mailbox of a worker.
pub(crate) type MailboxJob = Box<dyn FnOnce(&mut Context<'_>) + Send>;

/// Reason why a job has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum JobError {
    /// There is no worker with this index.
    #[error("there is no worker {0}")]
    NoWorker(usize),
    /// The worker has not run the jobs before this one yet.
    #[error("worker {0} has too many jobs that it has not run yet")]
    Full(usize),
    /// The worker has ended, by a panic or because the program stops, before the job had a result.
    #[error("worker {0} has ended")]
    Ended(usize),
}

/// A job that a worker runs or has run. Without this value, the job runs and its result is lost.
#[derive(Debug)]
pub struct WorkerJob<T> {
    worker: usize,
    result: Option<Receiver<T>>,
}

impl<T> WorkerJob<T> {
    /// Returns the result, once; `None` before the job has run and after the result was taken. Never waits: an
    /// application asks in [`Control::tick`](crate::Control::tick).
    ///
    /// # Errors
    /// [`JobError::Ended`] if the worker has ended before the end of the job.
    pub fn try_take(&mut self) -> Option<Result<T, JobError>> {
        let outcome = match self.result.as_ref()?.try_recv() {
            Ok(result) => Ok(result),
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => Err(JobError::Ended(self.worker)),
        };
        self.result = None;
        Some(outcome)
    }
}

/// A job that all workers run or have run.
#[derive(Debug)]
pub struct WorkerJobs<T> {
    jobs: Vec<WorkerJob<T>>,
    outcomes: Vec<Option<Result<T, JobError>>>,
}

impl<T> WorkerJobs<T> {
    pub(crate) fn new(jobs: impl Iterator<Item = Result<WorkerJob<T>, JobError>>) -> Self {
        let refused = |worker, error| (WorkerJob { worker, result: None }, Some(Err(error)));
        let jobs =
            jobs.enumerate().map(|(worker, job)| job.map_or_else(|error| refused(worker, error), |it| (it, None)));
        let (jobs, outcomes) = jobs.unzip();
        Self { jobs, outcomes }
    }

    /// Returns the results in the order of the workers, once; `None` before all have run the job. A worker that was
    /// not given the job has the error as its result. Never waits.
    pub fn try_take(&mut self) -> Option<Vec<Result<T, JobError>>> {
        for (job, outcome) in self.jobs.iter_mut().zip(&mut self.outcomes) {
            if outcome.is_none() {
                *outcome = job.try_take();
            }
        }
        if self.outcomes.is_empty() || self.outcomes.iter().any(Option::is_none) {
            return None;
        }
        Some(self.outcomes.drain(..).flatten().collect())
    }
}

/// Gives a job to the worker of a mailbox.
pub(crate) fn give<T: Send + 'static>(
    mailbox: &Mailbox,
    worker: usize,
    job: impl FnOnce(&mut Context<'_>) -> T + Send + 'static,
) -> Result<WorkerJob<T>, JobError> {
    let (sender, result) = sync_channel(1);
    let job: MailboxJob = Box::new(move |context| {
        // The control thread may have given the handle up. There is room for the only result.
        let _ = sender.try_send(job(context));
    });
    mailbox.jobs.push(job).map_err(|_| JobError::Full(worker))?;
    mailbox.notifier.notify();
    // If the worker ends at this moment, one of both threads sees what the other one did.
    if mailbox.is_closed() {
        mailbox.discard_jobs();
        return Err(JobError::Ended(worker));
    }
    Ok(WorkerJob { worker, result: Some(result) })
}
