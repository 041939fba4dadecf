//! Measurement of the workers: the cycles of turns and stages.
//!
//! Two mechanisms measure it:
//!
//! - `Accounting` always runs. It attributes the time between two reads of the clock, a window of a few turns, to
//!   busy turns, idle turns and sleep. So it costs nothing per packet.
//! - A [`Recording`] is made while an operator asks for one ([`crate::ControlPlane::start_measurement`]). Then the
//!   worker reads the time-stamp counter in every turn and after every stage.
//!
//! A recording is memory that one thread owns at a time. The control thread makes an empty one and passes it to the
//! worker. The worker fills it until the next order arrives, and passes it back. Nobody waits, and no thread reads what
//! another one writes.

mod accounting;
mod control;
mod histogram;
mod recording;
mod report;

pub(crate) use accounting::Accounting;
pub(crate) use control::MeasurementControl;
pub use control::{Measurement, WorkerRecording};
pub use histogram::Histogram;
pub use recording::Recording;
pub(crate) use recording::{MAILBOX, RECEIVE, TIMERS, TurnCounters};
