//! The pipeline: what turns ports into a packet application.
//!
//! # A program
//! Ports come from a configuration, stages from you, everything else from [`Runtime`]:
//!
//! ```
//! use std::time::Duration;
//! use wirepath_pipeline::{Context, RunOptions, Runtime, RuntimeConfig};
//! use wirepath_pmd::{packet::Batch, settings::Source};
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
//!         let port = context.in_port().unwrap_or(0);
//!         context.send_batch(port, batch);
//!     }
//! };
//! let options = RunOptions { duration: Some(Duration::from_millis(50)), ..RunOptions::default() };
//! let summary = runtime.run(stage, &mut (), &options)?;
//! assert_eq!(summary.rx().packets, summary.tx().packets);
//! println!("{summary}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `apps/examples` has two complete programs; `l2fwd` and `tunnel-gateway` are two more.
//!
//! # A turn of a worker
//! Each worker is one thread, pinned to a core if the configuration names one. It runs to completion: in every turn it polls each of its
//! receive queues once, takes what came (up to 64 packets) through all stages to the transmit queues, takes what other workers handed
//! over, sends what is still gathered, and only then polls again. No queue lies between stages, and nothing waits for a fuller batch.
//!
//! ```text
//!  rx queues --> Batch --> stage --> stage --> what is left, by out_port --> one pending batch per port --> tx queues
//!                            |         |                                          (flushed every turn)
//!        drop(reason) <------+         +----> hand_over: another worker's stages
//!        punt: control thread <--------+----> learn: control thread
//! ```
//!
//! - **[`Stage`]**: a step. Closures are stages, and tuples of stages. Called per batch; the compiler sees through the chain.
//! - **[`Context`]**: what a stage can do with packets: send, drop with a reason, hand over, punt, learn; and the coarse clock.
//! - **Sending.** [`Context::send_batch`] sends a whole batch by one port without touching the packets. [`Context::send`] takes one
//!   packet. Packets that the last stage leaves go by their `out_port`; without one they are dropped as `no_stage`. Packets that one
//!   worker sends by one port keep their order. A transmit queue that stays full is tried a few times, then its packets are dropped as
//!   `tx_full`: one stuck port does not stop the others.
//! - **Every packet that leaves early is counted** by a [`DropReason`](wirepath_pmd::drops::DropReason). At the end: packets received
//!   are packets sent plus packets dropped, but for what the application itself made or kept.
//! - **Idle.** A `"busy"` worker spins. An `"adaptive"` one sleeps when nothing came for a few hundred turns, until a queue's descriptor,
//!   another worker or the control thread wakes it (queues that have no descriptor are looked at every millisecond at the latest).
//!
//! # Queues and workers
//! Receive queues are given to the workers in turn. Every worker reaches every port: where a port has a transmit queue for each worker
//! they own one each; where it has fewer, the others hand their packets to a worker that has one (the log says so: it costs them). A
//! worker without any receive queue is refused unless the program spreads packets itself
//! ([`RuntimeConfig::workers_without_queues`]).
//!
//! # The control thread
//! The thread that calls [`Runtime::run`] ([`Running::run`]) becomes the control thread. It calls the program's [`Control`]: punted
//! packets, learned addresses, timers every ten milliseconds ([`wheel::TimerWheel`] for many), port events, rates. It sends packets of
//! its own through [`ControlPlane::send`]. A port that is lost is logged, and the others go on.
//!
//! # Shared tables
//! Workers read what the control thread writes without locks. An [`epoch::Shared`] value is replaced whole; the old one is freed when
//! every worker has finished the batch it was in. The [`table::Fdb`] (segment and address to destination) changes in place:
//!
//! ```
//! use wirepath_pipeline::{epoch::Domain, table::{FdbLimits, FdbWriter, Key, NO_DESTINATION}};
//!
//! let domain = Domain::new();                              // in a program: runtime.domain()
//! let mut writer = FdbWriter::new(&domain, FdbLimits::default(), 0);
//! writer.learn(Key::new(7, [2, 0, 0, 0, 0, 1]), 3, 0);     // on the control thread
//! let fdb = writer.fdb();                                  // an Arc, for the stages
//! let reader = domain.join();                              // in a stage: context.guard()
//! let table = fdb.table(reader.guard());
//! assert_eq!(table.lookup(Key::new(7, [2, 0, 0, 0, 0, 1])), 3);
//! assert_eq!(table.lookup(Key::new(8, [2, 0, 0, 0, 0, 1])), NO_DESTINATION);
//! ```
//!
//! # The end
//! On `--seconds`, a signal's flag or [`ControlPlane::stop`] the workers stop receiving, finish what is on its way between them, and
//! return their queues; ports are stopped, and [`Summary`] says what happened, as text or JSON, the number of packet buffers that did
//! not come back included (0, or there is a defect). A panic in a stage ends its worker and thereby the program, cleanly; the summary
//! has its message in [`Summary::failures`], and the program's exit code is 1.

pub mod clock;
mod context;
pub mod epoch;
mod events;
mod mailbox;
mod parsed;
pub mod rules;
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
    RuntimeConfig, RuntimeError, Stepped, Summary, WorkerInfo, WorkerSummary,
};
pub use stage::Stage;
pub use worker::Idle;
