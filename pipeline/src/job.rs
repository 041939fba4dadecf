//! Jobs: functions that the control thread sends to workers.

use std::any::{Any, TypeId, type_name};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use thiserror::Error;

use crate::context::Context;
use crate::mailbox::Mailbox;
use crate::stage::Stage;

/// The stages of a worker, for jobs that do not know their type.
pub(crate) trait Stages {
    /// Returns the stage of this type ([`Stage::find_stage`]).
    fn find(&mut self, stage: TypeId) -> Option<&mut dyn Any>;
}

impl<S: Stage + 'static> Stages for S {
    fn find(&mut self, stage: TypeId) -> Option<&mut dyn Any> {
        self.find_stage(stage)
    }
}

/// A job in the mailbox of a worker.
pub(crate) type MailboxJob = Box<dyn FnOnce(&mut dyn Stages, &mut Context<'_>) + Send>;

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
    /// The worker has no stage of the type that the job needs.
    #[error("worker {worker} has no stage of the type {stage}")]
    NoStage {
        /// Index of the worker.
        worker: usize,
        /// Name of the type.
        stage: &'static str,
    },
}

/// A job that a worker runs or has run. Without this value, the job runs and its result is lost.
#[derive(Debug)]
pub struct WorkerJob<T> {
    worker: usize,
    result: Option<Receiver<Result<T, JobError>>>,
}

impl<T> WorkerJob<T> {
    /// Returns the result, once; `None` before the job has run and after the result was taken. Never waits: an
    /// application asks in [`Control::tick`](crate::Control::tick).
    ///
    /// # Errors
    /// [`JobError::Ended`] if the worker has ended before the end of the job. [`JobError::NoStage`] if it has no stage
    /// of the type that the job needs.
    pub fn try_take(&mut self) -> Option<Result<T, JobError>> {
        let outcome = match self.result.as_ref()?.try_recv() {
            Ok(result) => result,
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
    job: impl FnOnce(&mut dyn Stages, &mut Context<'_>) -> Result<T, JobError> + Send + 'static,
) -> Result<WorkerJob<T>, JobError> {
    let (sender, result) = sync_channel(1);
    let job: MailboxJob = Box::new(move |stages, context| {
        // The control thread may have given the handle up. There is room for the only result.
        let _ = sender.try_send(job(stages, context));
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

/// Returns the stage of the type `S` of a worker.
pub(crate) fn stage_of<S: 'static>(stages: &mut dyn Stages, worker: usize) -> Result<&mut S, JobError> {
    let found = stages.find(TypeId::of::<S>()).and_then(|stage| stage.downcast_mut());
    found.ok_or(JobError::NoStage { worker, stage: type_name::<S>() })
}
