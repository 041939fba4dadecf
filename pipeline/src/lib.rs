//! Worker loop, stages, tables and tunnels.

pub mod clock;
mod context;
pub mod epoch;
mod events;
mod mailbox;
mod parsed;
mod runtime;
mod stage;
mod sync;
pub mod table;
pub mod tunnel;
pub mod wheel;
mod worker;

pub use context::{Context, WorkerCounters};
pub use events::{Learn, Punt};
pub use parsed::ParsedBatch;
pub use runtime::{
    Control, ControlPlane, HugePages, PortInfo, PortRates, PortSummary, Rates, RunOptions, Running, Runtime,
    RuntimeConfig, RuntimeError, Summary, WorkerInfo, WorkerSummary,
};
pub use stage::Stage;
pub use worker::Idle;
