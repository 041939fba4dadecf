//! The pipeline: a runtime that turns ports into a packet application.
//!
//! # Writing a program
//! The configuration defines the ports and the program supplies the stages. [`Runtime`] does the rest:
//!
//! ```
//! use std::time::Duration;
//! use wirepath_pipeline::{Context, RunOptions, Runtime, RuntimeConfig};
//! use wirepath_packet::Batch;
//! use wirepath_settings::Source;
//!
//! let source = Source::new("example", r#"
//!     [[port]]
//!     name = "generator"
//!     driver = "null"         # or "auto" and an interface; the program does not change
//!     [port.null]
//!     source = "udp4"
//! "#);
//! let document = source.parse()?;
//! let ports = RuntimeConfig::ports_from_settings(&document.settings())?;
//! let config = RuntimeConfig::from_settings(&document.settings())?;
//!
//! let runtime = Runtime::open(ports, config)?;             // memory mapped, ports opened, nothing moves yet
//! let stage = |_: &_| {                                    // called once for each worker
//!     |context: &mut Context<'_>, batch: &mut Batch| {     // called for each batch
//!         if let Some(port) = context.in_port() {
//!             context.send_batch(port, batch);
//!         }
//!     }
//! };
//! let options = RunOptions { duration: Some(Duration::from_millis(50)), ..RunOptions::default() };
//! let summary = runtime.run(stage, &mut (), &options)?;
//! assert_eq!(summary.rx().packets, summary.tx().packets);
//! println!("{summary}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `apps/examples` contains two complete programs. `l2fwd` and `tunnel-gateway` are two more.
//!
//! # One iteration of a worker
//! Each worker is one thread, pinned to a core if the configuration names one. It runs to completion. In
//! every iteration ("turn") it does the following:
//!
//! 1. It polls each of its receive queues once.
//! 2. It passes the received packets (up to 64 per queue) through all stages to the transmit queues.
//! 3. It processes the packets that other workers handed over.
//! 4. It flushes the pending transmit batches.
//!
//! There are no queues between stages, and no stage waits for a fuller batch.
//!
//! ```text
//!  rx queues --> Batch --> stage --> stage --> what is left, by out_port --> one pending batch per port --> tx queues
//!                            |         |                                          (flushed every turn)
//!        drop(reason) <------+         +----> enqueue_to_worker: another worker's stages
//!        punt: control thread <--------+----> learn: control thread
//! ```
//!
//! - **[`Stage`]**: one step of the pipeline. Closures and tuples of stages are stages. A stage is called
//!   once per batch. The compiler inlines the whole chain.
//! - **[`Context`]**: the operations that a stage can use: send, drop with a reason, enqueue to a worker,
//!   punt and learn. It also has the coarse clock.
//! - **Sending.** [`Context::send_batch`] sends a whole batch to one port without touching the packets.
//!   [`Context::send`] sends one packet. Packets that remain after the last stage leave by their `out_port`.
//!   Packets without one are dropped as `no_output_port`. Packets that one worker sends to one port keep
//!   their order. A full transmit queue is retried a few times. Then its packets are dropped as `tx_full`, so
//!   that one stuck port does not stop the others.
//! - **Every packet is counted.** A dropped packet has a [`DropReason`](wirepath_packet::drops::DropReason). At
//!   the end, packets received, copied and generated equal packets sent, dropped, passed to the kernel and
//!   consumed by the control thread ([`Summary::balance`]). An application registers reasons of its own
//!   ([`DropReason::register`](wirepath_packet::drops::DropReason::register)), and counters ([`CounterId`]).
//! - **Idle.** A `"busy"` worker polls continuously. An `"adaptive"` worker sleeps after a few hundred empty
//!   turns. A queue's descriptor, another worker or the control thread wakes it. Queues without a descriptor
//!   are polled at least every millisecond. A `"sleep"` worker sleeps after the first empty turn while it
//!   receives few packets (`sleep_below`).
//!
//! - **Timers.** A stage with [`Stage::timer_interval`] is called by [`Stage::timer`] about each interval, and with
//!   [`Stage::idle`] in each turn without packets. Both may send packets. They cost nothing per packet.
//! - **Jobs.** The control thread runs a function on a worker by [`ControlPlane::run_on_worker`], between two batches.
//!
//! # Queues and workers
//! Receive queues are assigned to the workers round-robin. Every worker can send to every port. A port with
//! one transmit queue per worker gives each worker its own queue. If a port has fewer queues, the other
//! workers hand their packets to a worker that owns a queue. This costs performance, and the log reports it.
//! A worker without any receive queue is an error, unless the program distributes packets itself
//! ([`RuntimeConfig::workers_without_queues`]).
//!
//! # The control thread
//! The thread that calls [`Runtime::run`] (or [`Running::run`]) becomes the control thread. It calls the
//! program's [`Control`] for punted packets, learned addresses, port events and rates, and every ten
//! milliseconds for timers ([`wheel::TimerWheel`] manages many timers). It sends its own packets with
//! [`ControlPlane::send`]. If a port fails, the failure is logged and the other ports continue.
//!
//! # Shared tables
//! Workers read without locks what the control thread writes. An [`epoch::Shared`] value is always replaced
//! as a whole. The old value is freed when every worker has finished its current batch. The [`table::Fdb`]
//! maps a segment and an address to a destination and is updated in place:
//!
//! ```
//! use wirepath_pipeline::{epoch::Domain, table::{FdbLimits, FdbWriter, Key, NO_DESTINATION}};
//! use wirepath_wire::MacAddr;
//!
//! let domain = Domain::new();                              // in a program: runtime.domain()
//! let mut writer = FdbWriter::new(&domain, FdbLimits::default(), 0);
//! writer.learn(Key::new(7, MacAddr::new(2, 0, 0, 0, 0, 1)), 3, 0);     // on the control thread
//! let fdb = writer.fdb();                                  // an Arc, for the stages
//! let reader = domain.join();                              // in a stage: context.guard()
//! let table = fdb.table(reader.guard());
//! assert_eq!(table.lookup(Key::new(7, MacAddr::new(2, 0, 0, 0, 0, 1))), 3);
//! assert_eq!(table.lookup(Key::new(8, MacAddr::new(2, 0, 0, 0, 0, 1))), NO_DESTINATION);
//! ```
//!
//! # Shutdown
//! The workers stop receiving when `--seconds` expires, when a signal handler sets the stop flag, or on
//! [`ControlPlane::stop`]. They finish the packets in flight between them and return their queues. Then the
//! ports are stopped. [`Summary`] reports the totals as text or JSON. They include the number of packet
//! buffers that were not returned; a value other than 0 is a bug. A panic in a stage ends its worker, and the
//! program shuts down cleanly. [`Summary::failures`] contains the panic message, and the program's exit code
//! is 1.

pub mod clock;
mod context;
mod counter;
pub mod epoch;
mod events;
mod job;
mod mailbox;
pub mod measure;
pub mod observe;
mod parsed;
pub mod registry;
pub mod route;
pub mod rules;
mod runtime;
mod stage;
mod stage_timers;
mod sync;
pub mod table;
mod token_bucket;
pub mod tunnel;
pub mod wheel;
mod worker;
mod zeroed_memory;

/// Descriptions of the tables of a configuration that this crate reads. Those of ports are in
/// [`wirepath_pmd::drivers`].
pub mod tables {
    pub use crate::runtime::{POOL, WORKERS};
    pub use crate::tunnel::bfd::config::BFD;
    pub use crate::tunnel::config::{SEGMENT, UNDERLAY};
    pub use crate::tunnel::router::config::VRF;
}

pub use context::{Context, WorkerCounters};
pub use counter::{CounterId, CounterValues};
pub use events::{ControlWaker, Learn, Punt};
pub use job::{JobError, WorkerJob, WorkerJobs};
pub use parsed::{ParsedBatch, parse_packet};
pub use runtime::{
    CheckedPorts, Control, ControlPlane, HugePages, NewPort, OpenedPort, PacketBalance, PortInfo, PortOpener,
    PortRates, PortSummary, Rates, RunOptions, Running, Runtime, RuntimeConfig, RuntimeError, SteppedRuntime, Summary,
    WorkerInfo, WorkerSummary,
};
pub use stage::Stage;
pub use stage_timers::StageTimers;
pub use token_bucket::TokenBucket;
pub use worker::Idle;
