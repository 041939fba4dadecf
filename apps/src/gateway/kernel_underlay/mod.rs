//! Next hops of an underlay whose addresses are the kernel's (`control = "kernel"` in `[underlay]`).
//!
//! ```text
//! control thread: destinations ──> thread: routes, neighbours <──> kernel
//!                 next hops    <──
//! ```
//!
//! A thread of its own asks the kernel for the route to each destination, so the control thread never waits for it. It
//! follows the neighbour entries of the next hops. It also keeps them alive, because the kernel does not see the tunnel
//! packets that use them.

mod table;
mod thread;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use wirepath::cli::Failure;
use wirepath_pipeline::registry::{Column, Row, TableSpec, Unit};
use wirepath_pipeline::tunnel::GatewayControl;
use wirepath_pipeline::tunnel::config::{GatewayConfig, UnderlayControl};
use wirepath_pipeline::{ControlPlane, ControlWaker};

use super::exchange::{Lag, Outbox, lock};
use thread::{Orders, Shared, Thread};

/// Most changes in each direction that one tick takes.
const CHANGES: usize = 4096;

/// The table of this module.
pub(super) static TABLE: TableSpec = TableSpec {
    name: "underlay_sync",
    about: "Next hops of the underlay from the kernel",
    metric: Some("underlay_sync"),
    columns: &[
        Column::key("device", "Interface of the underlay port"),
        Column::attribute("state", "ready, or interface: it is missing"),
        Column::gauge("destinations", Unit::None, "Remotes whose next hop is needed"),
        Column::gauge("next_hops", Unit::None, "Next hops of the kernel's routes to them"),
        Column::counter("messages", Unit::None, "Messages of the kernel"),
        Column::counter("malformed", Unit::None, "Messages that could not be read"),
        Column::counter("overflows", Unit::None, "Times that the kernel dropped messages (ENOBUFS)"),
        Column::counter("lookups", Unit::None, "Lookups of a route"),
        Column::counter("kept", Unit::None, "Times that a next hop was reported to the kernel as in use"),
        Column::counter("errors", Unit::None, "Requests that the kernel refused"),
        Column::counter("applied", Unit::None, "Changed next hops that the gateway has taken"),
        Column::gauge("pending", Unit::None, "Routes that wait to be looked up"),
        Column::gauge("lag_us", Unit::None, "Microseconds from the message to the gateway's tables, last change"),
        Column::gauge("max_lag_us", Unit::None, "The longest of these times since the start"),
    ],
};

/// Returns whether the next hops of the underlay come from the kernel.
pub(super) fn is_needed(config: &GatewayConfig) -> bool {
    config.underlay.control == UnderlayControl::Kernel
}

fn refused(error: io::Error) -> Failure {
    Failure::failed(format!("control = \"kernel\" of the underlay: {error}"))
}

/// The control thread's end of the exchange with the kernel.
pub(super) struct KernelUnderlay {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    device: String,
    applied: u64,
    lag: Lag,
}

impl std::fmt::Debug for KernelUnderlay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelUnderlay").field("device", &self.device).finish_non_exhaustive()
    }
}

impl KernelUnderlay {
    /// Starts the exchange for the interface `device`, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// If the kernel refuses a socket.
    pub(super) fn start(device: &str, control: ControlWaker) -> Result<Self, Failure> {
        let orders = Orders { device: Some(device.to_owned()), ..Orders::default() };
        let shared = Shared::new(orders, control).map_err(refused)?;
        let thread = Thread::new(Arc::clone(&shared)).map_err(refused)?;
        let thread =
            std::thread::Builder::new().name("underlay".to_owned()).spawn(move || thread.run()).map_err(refused)?;
        Ok(Self { shared, thread: Some(thread), device: device.to_owned(), applied: 0, lag: Lag::default() })
    }

    /// Exchanges changes with the thread. `device` is the interface of the underlay port.
    pub(super) fn tick(&mut self, device: &str, gateway: &mut GatewayControl, plane: &mut ControlPlane) {
        let requests = gateway.take_next_hop_requests(CHANGES);
        let is_other = self.device != device;
        if is_other || !requests.is_empty() {
            self.shared.order(|orders| {
                orders.requests.extend(requests);
                if is_other {
                    orders.device = Some(device.to_owned());
                }
            });
            device.clone_into(&mut self.device);
        }
        let Outbox { changes, since } = self.shared.take_changes();
        if changes.is_empty() {
            return;
        }
        self.applied += changes.len() as u64;
        gateway.set_kernel_next_hops(changes, plane);
        since.into_iter().for_each(|since| self.lag.record(since));
    }

    /// Returns the rows of [`TABLE`].
    pub(super) fn rows(&self) -> Vec<Row> {
        let status = *lock(&self.shared.status);
        let [lag_us, max_lag_us] = self.lag.columns();
        vec![vec![
            self.device.clone().into(),
            if status.has_interface { "ready" } else { "interface" }.into(),
            status.destinations.into(),
            status.next_hops.into(),
            status.messages.into(),
            status.malformed.into(),
            status.overflows.into(),
            status.lookups.into(),
            status.kept.into(),
            status.errors.into(),
            self.applied.into(),
            status.pending.into(),
            lag_us,
            max_lag_us,
        ]]
    }
}

impl Drop for KernelUnderlay {
    fn drop(&mut self) {
        self.shared.order(|orders| orders.stop = true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of control = \"kernel\" of the underlay panicked");
        }
    }
}
