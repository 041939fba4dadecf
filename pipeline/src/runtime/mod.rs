//! The runtime: opens ports, starts workers and stops them.

mod config;
mod control;
mod memory_limit;
mod opening;
mod ports;
mod running;
mod stepped;
mod summary;

use std::sync::Arc;
use std::thread;

use crossbeam_queue::ArrayQueue;
use wirepath_flow::Rule;
use wirepath_packet::{Batch, Pool, PoolError};
use wirepath_pmd::drivers::{KeySpans, OnLoss};
use wirepath_pmd::port::{
    Capabilities, ConfiguredPort, KernelRule, MacAddr, Offloads, Port, PortError, PortId, RxQueue, TxQueue,
};
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{ConfigError, Span};
use wirepath_wire::Parser;

pub use config::{HugePages, POOL, RuntimeConfig, WORKERS};
pub use control::{Control, ControlPlane};
pub use opening::{CheckedPorts, OpenedPort, PortOpener};
pub use ports::NewPort;
pub use running::{RunOptions, Running};
pub use stepped::SteppedRuntime;
pub(crate) use summary::total;
pub use summary::{PacketBalance, PortRates, PortSummary, Rates, Summary, WorkerSummary};

use crate::clock::{self, Clock};
use crate::context::{Output, WorkerState};
use crate::epoch::{Domain, Shared};
use crate::events::ControlQueues;
use crate::mailbox::Mailbox;
use crate::measure::Accounting;
use crate::observe::{CaptureReader, CaptureSpec, ObserveError, Observers, Tap};
use crate::registry::Management;
use crate::stage::Stage;
use crate::stage_timers::StageTimers;
use crate::worker::{Input, Worker};

/// Capacity of each worker's job queue.
const JOBS: usize = 64;
/// Maximum number of ports of a program. Each worker keeps one batch per port.
const MAX_PORTS: usize = 1024;

/// Error at the start of a program.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A port could not be opened or configured. The text includes the position in the configuration.
    #[error("{at}: {source}")]
    Open {
        /// Name of the port, with the position of the value that it refused.
        at: Box<ConfigError>,
        /// The cause.
        source: Box<PortError>,
    },
    /// A port could not be started.
    #[error("{at}: {source}")]
    Start {
        /// Name of the port, with the position of the value that it refused.
        at: Box<ConfigError>,
        /// The cause.
        source: Box<PortError>,
    },
    /// Packet memory could not be mapped.
    #[error("packet memory: {0}; with huge_pages = \"prefer\" and fewer buffers in [pool] the program may start")]
    Memory(#[from] PoolError),
    /// The configuration has no port.
    #[error("there is no port; a configuration needs at least one [[port]]")]
    NoPorts,
    /// The configuration has too many ports.
    #[error("{0} ports; at most {MAX_PORTS} are possible")]
    TooManyPorts(usize),
    /// The configuration has no worker.
    #[error("there is no worker")]
    NoWorkers,
    /// More workers than receive queues.
    #[error(
        "{}{workers} workers, but the ports have only {queues} receive queues; give a port more queues, or name fewer \
         cores in [workers]",
        at(.position)
    )]
    IdleWorkers {
        /// Number of workers.
        workers: usize,
        /// Number of receive queues of all ports.
        queues: usize,
        /// Position of the first core that is too many, if it comes from a configuration.
        position: Option<Span>,
    },
    /// A core that the program may not use.
    #[error("{}core {core} cannot be used; this program may run on {}", at(.position), list(.allowed))]
    NoCore {
        /// The configured core.
        core: usize,
        /// The cores that the program may use.
        allowed: Vec<usize>,
        /// Position of the core in the configuration, if it comes from one.
        position: Option<Span>,
    },
    /// A new port of a running program would leave the other ports without packet buffers.
    #[error(
        "port '{port}' may need {needed} packet buffers for its rings (queues x depth), and {free} are free; give the \
         port a smaller depth, or restart the program with more buffers in [pool]"
    )]
    NoBuffers {
        /// Name of the port.
        port: String,
        /// Buffers that the rings of the port may hold.
        needed: u32,
        /// Buffers that are free.
        free: u32,
    },
    /// The function of [`Runtime::set_before_workers`] refused to go on.
    #[error("{0}")]
    BeforeWorkers(String),
    /// The operating system did not provide a descriptor or a thread.
    #[error("{what}: {source}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
}

impl RuntimeError {
    /// Returns whether the configuration asks for more than this machine has. Other errors are failures at
    /// run time.
    pub fn is_configuration(&self) -> bool {
        match self {
            // The configuration asks for more than the device has, so only a different configuration helps.
            Self::Open { source, .. } => matches!(**source, PortError::Unsupported { .. }),
            Self::NoPorts
            | Self::TooManyPorts(_)
            | Self::NoWorkers
            | Self::IdleWorkers { .. }
            | Self::NoBuffers { .. }
            | Self::NoCore { .. } => true,
            Self::Start { .. } | Self::Memory(_) | Self::BeforeWorkers(_) | Self::System { .. } => false,
        }
    }
}

/// Returns a position as the beginning of a message.
fn at(position: &Option<Span>) -> String {
    position.as_ref().map_or_else(String::new, |position| format!("{position}: "))
}

fn list(cores: &[usize]) -> String {
    let cores: Vec<String> = cores.iter().map(usize::to_string).collect();
    format!("cores {}", cores.join(", "))
}

/// Properties of an opened port.
#[derive(Clone, Debug)]
pub struct PortInfo {
    /// Port number, as carried by packets and passed to [`crate::Context::send`]. At the start, ports are numbered
    /// from 0 in configuration order. A port that is added later takes a number that no port has.
    pub id: PortId,
    /// Name.
    pub name: String,
    /// Link-layer address, if the port has one.
    pub mac: Option<MacAddr>,
    /// Largest layer-3 packet in bytes.
    pub mtu: u16,
    /// Number of receive queues, and of transmit queues.
    pub queues: u16,
    /// Reaction to the loss of the device.
    pub on_loss: OnLoss,
    /// Capabilities of the device.
    pub capabilities: Capabilities,
    /// Buffer pool of the port's packets.
    pub pool: Pool,
    /// True if the port was removed while the program runs. Another port may take the number later.
    pub is_removed: bool,
}

/// Properties of a worker, for the creation of its stages.
#[derive(Clone, Debug)]
pub struct WorkerInfo {
    /// Index of the worker, from 0.
    pub index: usize,
    /// Number of workers.
    pub workers: usize,
    /// Core to which the worker is pinned.
    pub core: Option<usize>,
    /// Receive queues that the worker polls: port and queue index.
    pub rx_queues: Vec<(PortId, u16)>,
}

/// Opened and configured ports with mapped packet memory. Nothing is started yet.
pub struct Runtime {
    config: RuntimeConfig,
    ports: Vec<ConfiguredPort>,
    info: Vec<PortInfo>,
    /// Positions of the ports' keys in the configuration.
    spans: Vec<KeySpans>,
    domain: Domain,
    pools: Vec<Pool>,
    opener: PortOpener,
    observers: Arc<Observers>,
    management: Option<Box<dyn Management>>,
    before_workers: Option<BeforeWorkers>,
}

/// Function that runs between the start of the ports and that of the workers.
type BeforeWorkers = Box<dyn FnOnce(CapabilitySet) -> Result<(), String> + Send>;

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime").field("ports", &self.info).finish_non_exhaustive()
    }
}

impl Runtime {
    /// Returns the ports in configuration order. The index of a port is its number.
    pub fn ports(&self) -> &[PortInfo] {
        &self.info
    }

    /// Returns the port with this name.
    pub fn port(&self, name: &str) -> Option<&PortInfo> {
        self.info.iter().find(|port| port.name == name)
    }

    /// Returns the epoch domain of the workers, in which [`crate::epoch::Shared`] values are created.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Creates a value that the control thread replaces and workers read without locks. One clone of the `Arc` goes to
    /// the control, one to each stage ([`crate::epoch::Shared`]).
    pub fn share<T: Send + Sync + 'static>(&self, value: T) -> Arc<Shared<T>> {
        Arc::new(Shared::new(&self.domain, value))
    }

    /// Returns the packet pools, one for each NUMA node that has a port.
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// Returns the settings of the workers and of packet memory.
    pub fn config(&self) -> &RuntimeConfig {
        &self.config
    }

    /// Begins a capture, from the first packet on.
    ///
    /// # Errors
    /// As [`ControlPlane::start_capture`].
    pub fn start_capture(&self, spec: CaptureSpec, parser: Parser) -> Result<CaptureReader, ObserveError> {
        self.observers.start_capture(spec, parser)
    }

    /// Serves operators while the program runs. [`Management::serve`] is called on the control thread.
    pub fn set_management(&mut self, management: Box<dyn Management>) {
        self.management = Some(management);
    }

    /// Calls a function when all ports are started and no worker is: nothing has looked at a packet yet. It gets the
    /// capabilities that the process must keep for the ports ([`wirepath_pmd::port::Port::privileges`]). Its error ends
    /// the start.
    pub fn set_before_workers(&mut self, function: impl FnOnce(CapabilitySet) -> Result<(), String> + Send + 'static) {
        self.before_workers = Some(Box::new(function));
    }

    /// Passes the flow rules to all ports before they are started
    /// ([`wirepath_pmd::port::PuntToKernel::set_rules`]). Returns for each port the result of each rule with the
    /// action `kernel`.
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<Vec<Vec<KernelRule>>, RuntimeError> {
        let mut all = Vec::with_capacity(self.ports.len());
        for ((port, info), spans) in self.ports.iter_mut().zip(&self.info).zip(&self.spans) {
            all.push(port.set_rules(rules).map_err(|error| not_started(spans, &info.name, error))?);
        }
        Ok(all)
    }

    /// Returns the worker that polls each receive queue, by port and queue.
    pub fn queue_workers(&self) -> Vec<Vec<usize>> {
        let (mut next, workers) = (0.., self.config.workers.len());
        let queues = self
            .info
            .iter()
            .map(|port| (0..port.queues).filter_map(|_| next.next()).map(|i| owner(i, workers)).collect());
        queues.collect()
    }

    /// Starts the ports and the workers. `make` creates the stages of each worker.
    pub fn start<S: Stage + 'static>(self, mut make: impl FnMut(&WorkerInfo) -> S) -> Result<Running<S>, RuntimeError> {
        let system = |what| move |e: rustix::io::Errno| RuntimeError::System { what, source: e.into() };
        let n = self.config.workers.len();
        let mailboxes: Arc<[Mailbox]> =
            (0..n).map(|_| Mailbox::new()).collect::<Result<_, _>>().map_err(system("cannot make an eventfd"))?;
        let control = Arc::new(ControlQueues::new().map_err(system("cannot make an eventfd"))?);
        self.observers.started(&mailboxes);
        clock::tick_hz();

        let mut ports = Vec::with_capacity(self.ports.len());
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        let superframes = |port: &PortInfo| port.capabilities.offloads.contains(Offloads::RX_SUPERFRAMES);
        let any_superframes = self.info.iter().any(superframes);
        for ((mut port, info), spans) in self.ports.into_iter().zip(&self.info).zip(&self.spans) {
            if any_superframes {
                port.segment_superframes();
            }
            match port.start() {
                Ok(started) => {
                    log_started(&started.port);
                    ports.push(started.port);
                    rx.push(started.rx);
                    tx.push(started.tx);
                }
                Err(error) => {
                    stop_ports(ports, rx.into_iter().flatten().collect(), tx.into_iter().flatten().collect());
                    return Err(not_started(spans, &info.name, error));
                }
            }
        }
        if let Some(function) = self.before_workers {
            let needed = ports.iter().fold(CapabilitySet::empty(), |all, port| all | port.privileges());
            if let Err(why) = function(needed) {
                stop_ports(ports, rx.into_iter().flatten().collect(), tx.into_iter().flatten().collect());
                return Err(RuntimeError::BeforeWorkers(why));
            }
        }
        let can_wait: Vec<bool> = ports.iter().map(|port| port.capabilities().can_wait).collect();
        let inputs = assign_rx_queues(rx, n);
        let (outputs, spare) = assign_tx_queues(tx, n);

        let shared = (Arc::clone(&mailboxes), Arc::clone(&control), Tap::of_control(&self.observers));
        let mut running = Running::new(ports, self.info, self.opener, spare, shared, self.domain);
        running.set_management(self.management);
        for (index, (inputs, outputs)) in inputs.into_iter().zip(outputs).enumerate() {
            let core = self.config.workers[index];
            let info = WorkerInfo {
                index,
                workers: n,
                core,
                rx_queues: inputs.iter().map(|queue| (queue.port(), queue.index())).collect(),
            };
            let jobs = Arc::new(ArrayQueue::new(JOBS));
            let stage = make(&info);
            let tap = Tap::new(Arc::clone(&self.observers), index);
            let (mailboxes, queues) = (Arc::clone(&mailboxes), Arc::clone(&control));
            let state = WorkerState::new(index, clock::precise(), outputs, mailboxes, queues, tap);
            let counters = Arc::clone(&state.counters);
            let mut worker = Worker {
                state,
                inputs: inputs
                    .into_iter()
                    .map(|queue| Input { can_wait: can_wait[queue.port().index()], queue })
                    .collect(),
                stage,
                reader: running.domain().join(),
                jobs: Arc::clone(&jobs),
                idle: self.config.idle,
                clock: Clock::new(),
                accounting: Accounting::default(),
                timers: StageTimers::default(),
                next_timer: 0,
            };
            let control = Arc::clone(&control);
            let thread = thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                if let Some(core) = core
                    && !core_affinity::set_for_current(core_affinity::CoreId { id: core })
                {
                    tracing::warn!("worker {index} could not be pinned to core {core} and runs on any core");
                }
                let result = worker.run();
                worker.state.mailboxes[index].close();
                // The notification makes the control thread check its threads.
                control.notifier.notify();
                let Worker { state, inputs, stage, .. } = worker;
                drop(stage);
                let mut tx = Vec::new();
                for output in state.outputs {
                    if let Output::Own { queue, pending } = output {
                        state.counters.drops.add(wirepath_packet::drops::DropReason::Stopping, pending.len() as u64);
                        tx.push(queue);
                    }
                }
                running::WorkerExit { result, rx: inputs.into_iter().map(|input| input.queue).collect(), tx }
            });
            match thread {
                Ok(thread) => running.add(thread, counters, jobs, info),
                Err(source) => {
                    running.stop(&mut ());
                    return Err(RuntimeError::System { what: "cannot start a worker thread", source });
                }
            }
        }
        Ok(running)
    }

    /// Starts, runs until `options` end the run, stops, and returns the summary. Most programs need only this
    /// call.
    pub fn run<S: Stage + 'static>(
        self,
        make: impl FnMut(&WorkerInfo) -> S,
        control: &mut impl Control,
        options: &RunOptions,
    ) -> Result<Summary, RuntimeError> {
        let mut running = self.start(make)?;
        running.run(control, options);
        Ok(running.stop(control))
    }
}

/// Returns the position of the value that a port refused, and the error.
fn position(spans: &KeySpans, name: &str, error: PortError) -> (Box<ConfigError>, Box<PortError>) {
    (Box::new(spans.of_error(&error).error(format!("port '{name}'"))), Box::new(error))
}

/// Logs what a port has become.
fn log_started(port: &Port) {
    let capabilities = port.capabilities();
    let device = if capabilities.device.is_empty() { String::new() } else { format!(" on {}", capabilities.device) };
    tracing::info!("port {}: {}{device}: {}", port.name(), capabilities.driver, capabilities.mode);
    for note in &capabilities.notes {
        tracing::info!("port {}: {note}", port.name());
    }
}

fn not_started(spans: &KeySpans, name: &str, error: PortError) -> RuntimeError {
    let (at, source) = position(spans, name, error);
    RuntimeError::Start { at, source }
}

/// Returns the worker of a receive queue, by the queue's number over all ports.
fn owner(queue: usize, workers: usize) -> usize {
    queue % workers
}

/// Assigns the receive queues to the workers round-robin, over the queues of all ports.
fn assign_rx_queues(rx: Vec<Vec<RxQueue>>, workers: usize) -> Vec<Vec<RxQueue>> {
    let mut inputs: Vec<Vec<RxQueue>> = (0..workers).map(|_| Vec::new()).collect();
    for (i, queue) in rx.into_iter().flatten().enumerate() {
        inputs[owner(i, workers)].push(queue);
    }
    inputs
}

/// Assigns the transmit queues of all ports to the workers, as [`assign_outputs`] does for one port.
fn assign_tx_queues(tx: Vec<Vec<TxQueue>>, workers: usize) -> (Vec<Vec<Output>>, Vec<TxQueue>) {
    let mut spare = Vec::new();
    let mut outputs: Vec<Vec<Output>> = (0..workers).map(|_| Vec::with_capacity(tx.len())).collect();
    for (id, queues) in tx.into_iter().enumerate() {
        for (worker, output) in assign_outputs(id, queues, workers, &mut spare).into_iter().enumerate() {
            outputs[worker].push(output);
        }
    }
    (outputs, spare)
}

/// Assigns a transmit queue of a port to each worker. If the port has fewer queues than there are workers, the other
/// workers hand their packets to a worker that owns a queue. This costs performance, but every worker can send to
/// every port.
///
/// Queues that no worker needs are added to `spare`. They must be kept until the port is stopped.
fn assign_outputs(id: usize, queues: Vec<TxQueue>, workers: usize, spare: &mut Vec<TxQueue>) -> Vec<Output> {
    let n = queues.len().min(workers);
    if n < workers && n > 0 {
        let name = queues[0].port_name();
        tracing::info!(
            "port {name}: {n} transmit queues for {workers} workers; the other workers hand their packets to the owners"
        );
    }
    // The queues of different ports start at different workers.
    let owner = |queue: usize| (queue + id) % workers;
    let mut row: Vec<Output> = (0..workers).map(|_| Output::Absent).collect();
    for (i, queue) in queues.into_iter().enumerate() {
        if i < workers {
            row[owner(i)] = Output::Own { queue, pending: Batch::new() };
        } else {
            spare.push(queue);
        }
    }
    for (worker, output) in row.iter_mut().enumerate().filter(|_| n > 0) {
        if matches!(output, Output::Absent) {
            *output = Output::Worker(owner(worker % n));
        }
    }
    row
}

/// Stops ports with their queues and returns the errors.
fn stop_ports(ports: Vec<Port>, rx: Vec<RxQueue>, tx: Vec<TxQueue>) -> Vec<String> {
    let (mut rx, mut tx, mut problems) = (rx, tx, Vec::new());
    for port in ports {
        let id = port.id();
        let mut own_rx: Vec<RxQueue> = rx.extract_if(.., |queue| queue.port() == id).collect();
        let mut own_tx: Vec<TxQueue> = tx.extract_if(.., |queue| queue.port() == id).collect();
        own_rx.sort_by_key(RxQueue::index);
        own_tx.sort_by_key(TxQueue::index);
        if let Err(error) = port.stop(own_rx, own_tx) {
            problems.push(error.to_string());
        }
    }
    problems
}
