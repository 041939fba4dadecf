use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_packet::Pool;
use wirepath_packet::drops::{DropCounters, DropReason};
use wirepath_pmd::drivers::OnLoss;
use wirepath_pmd::port::{Port, PortEvent, PortId, RxQueue, TxQueue};

use super::ports::PortChanges;
use super::summary::{Rates, Snapshot, Summary};
use super::{Control, ControlPlane, PortInfo, PortOpener, WorkerInfo, stop_ports};
use crate::context::WorkerCounters;
use crate::epoch::Domain;
use crate::events::{ControlQueues, Phase};
use crate::mailbox::Mailbox;
use crate::observe::Tap;
use crate::registry::Management;
use crate::worker::Job;

/// Interval at which the control thread runs its timers and polls the ports for events.
const TICK: Duration = Duration::from_millis(10);
/// Pause after the control thread has served operators, as a multiple of the time that it took. Clients that flood
/// the program get a fifth of the control thread's time.
const MANAGEMENT_PAUSE: u32 = 4;
/// Time for workers to finish the packets that they handed to each other.
const DRAIN: Duration = Duration::from_millis(500);

/// Stop conditions and reporting interval of a run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Stop after this time.
    pub duration: Option<Duration>,
    /// Stop when this flag is set, usually by a signal handler.
    pub stop: Option<Arc<AtomicBool>>,
    /// Interval between two calls of [`Control::rates`].
    pub report_every: Option<Duration>,
}

/// Result of a worker thread.
pub(super) struct WorkerExit {
    pub(super) result: Result<(), String>,
    pub(super) rx: Vec<RxQueue>,
    pub(super) tx: Vec<TxQueue>,
}

struct WorkerThread<S> {
    handle: JoinHandle<WorkerExit>,
    counters: Arc<WorkerCounters>,
    jobs: Arc<ArrayQueue<Job<S>>>,
    info: WorkerInfo,
}

/// Relation of a port to its device.
#[derive(Clone, Debug)]
pub(super) enum Presence {
    Present,
    /// The port waits for its device.
    Away {
        since: Instant,
        why: String,
    },
    /// The port has failed for good, for this reason.
    Failed(String),
}

/// Started ports and workers. The thread that holds this value is the control thread. It calls [`Self::run`],
/// or [`Self::tick`] often, and finally [`Self::stop`].
pub struct Running<S> {
    mailboxes: Arc<[Mailbox]>,
    control: Arc<ControlQueues>,
    domain: Domain,
    threads: Vec<WorkerThread<S>>,
    plane: ControlPlane,
    management: Option<Box<dyn Management>>,
    /// The descriptor of the management is watched from this time on.
    management_from: Instant,
    /// True if an operator waits.
    management_waits: bool,
    started: Instant,
    last_tick: Instant,
    /// Time from one tick to the next.
    interval: Duration,
}

impl<S> fmt::Debug for Running<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("ports", &self.plane.devices)
            .field("workers", &self.threads.len())
            .finish_non_exhaustive()
    }
}

impl<S> Running<S> {
    pub(super) fn new(
        ports: Vec<Port>,
        info: Vec<PortInfo>,
        opener: PortOpener,
        spare: Vec<TxQueue>,
        (mailboxes, control, tap): (Arc<[Mailbox]>, Arc<ControlQueues>, Tap),
        domain: Domain,
    ) -> Self {
        let plane = ControlPlane {
            // Uses the capabilities of the started devices.
            ports: info
                .into_iter()
                .zip(&ports)
                .map(|(info, port)| PortInfo { capabilities: port.capabilities(), ..info })
                .collect(),
            rule_drops: vec![0; ports.len()],
            presence: vec![Presence::Present; ports.len()],
            losses: vec![0; ports.len()],
            workers: Vec::new(),
            devices: ports.into_iter().map(Some).collect(),
            mailboxes: Arc::clone(&mailboxes),
            changes: PortChanges::new(opener, spare),
            drops: DropCounters::new(),
            sent: wirepath_packet::counters::Counter::new(),
            injected: wirepath_packet::counters::Counter::new(),
            generated: wirepath_packet::counters::Counter::new(),
            application: Default::default(),
            consumed: BTreeMap::new(),
            stop: false,
            stop_flag: None,
            control: Arc::clone(&control),
            tap,
            measurements: Default::default(),
            simulated_time: None,
        };
        let now = Instant::now();
        Self {
            mailboxes,
            control,
            domain,
            threads: vec![],
            plane,
            management: None,
            management_from: now,
            management_waits: false,
            started: now,
            last_tick: now,
            interval: TICK,
        }
    }

    pub(super) fn add(
        &mut self,
        handle: JoinHandle<WorkerExit>,
        counters: Arc<WorkerCounters>,
        jobs: Arc<ArrayQueue<Job<S>>>,
        info: WorkerInfo,
    ) {
        self.plane.workers.push((info.clone(), Arc::clone(&counters)));
        self.threads.push(WorkerThread { handle, counters, jobs, info });
    }

    pub(super) fn set_management(&mut self, management: Option<Box<dyn Management>>) {
        self.management = management;
    }

    /// Returns the epoch domain of the workers.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Returns the operations of the control thread.
    pub fn plane(&mut self) -> &mut ControlPlane {
        &mut self.plane
    }

    /// Makes a worker run `job` with its stages between two batches, for changes that shared tables do not
    /// cover. Returns `false` if the job queue is full or there is no such worker.
    pub fn on_worker(&self, worker: usize, job: impl FnOnce(&mut S) + Send + 'static) -> bool {
        let Some(thread) = self.threads.get(worker) else { return false };
        let queued = thread.jobs.push(Box::new(job)).is_ok();
        self.mailboxes[worker].notifier.notify();
        queued
    }

    /// Runs the control thread until `options`, the application or the end of a worker stops it.
    pub fn run(&mut self, control: &mut impl Control, options: &RunOptions) {
        let begin = Instant::now();
        let mut last = (begin, self.snapshot_with_devices());
        self.plane.stop_flag.clone_from(&options.stop);
        while !self.plane.is_stopping() && !self.failed() {
            if options.duration.is_some_and(|duration| begin.elapsed() >= duration) {
                break;
            }
            if let Some(every) = options.report_every
                && last.0.elapsed() >= every
            {
                let (now, snapshot) = (Instant::now(), self.snapshot_with_devices());
                control.rates(&Rates::between(&last.1, &snapshot, now - last.0, now - self.started));
                last = (now, snapshot);
            }
            self.tick(control);
            let interval = self.interval;
            let left = options.duration.map_or(interval, |duration| duration.saturating_sub(begin.elapsed()));
            self.wait(left.min(interval));
        }
    }

    /// Waits for a notification from the workers or an operator, or until the time is up.
    fn wait(&mut self, mut time: Duration) {
        let notifier = &self.control.notifier;
        if !notifier.prepare_sleep() {
            return;
        }
        let operators = self.management.as_ref().and_then(|management| management.descriptor());
        let pause = self.management_from.saturating_duration_since(Instant::now());
        if operators.is_some() && !pause.is_zero() {
            time = time.min(pause);
        }
        let of_workers = PollFd::from_borrowed_fd(notifier.descriptor(), PollFlags::IN);
        let mut fds = [of_workers.clone(), of_workers];
        let mut n = 1;
        if let Some(operators) = operators.filter(|_| pause.is_zero()) {
            fds[1] = PollFd::from_borrowed_fd(operators, PollFlags::IN);
            n = 2;
        }
        let timeout = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() };
        let polled = poll(&mut fds[..n], Some(&timeout)).is_ok();
        self.management_waits = polled && n == 2 && !fds[1].revents().is_empty();
        notifier.wake();
    }

    /// Serves operators, and determines when they are served next.
    fn serve_management(&mut self, control: &mut impl Control) {
        let waits = std::mem::replace(&mut self.management_waits, false);
        let Some(management) = &mut self.management else { return };
        let begin = Instant::now();
        let moved = management.serve(control, &mut self.plane);
        let pause = match (moved, waits) {
            (true, _) => begin.elapsed().saturating_mul(MANAGEMENT_PAUSE).min(TICK),
            // The descriptor may stay readable: a limit of the management holds the work back.
            (false, true) => TICK,
            (false, false) => Duration::ZERO,
        };
        self.management_from = Instant::now() + pause;
    }

    /// Runs one iteration of the control thread without waiting: punted packets, learned addresses,
    /// operators that wait, and every ten milliseconds the port events and the application's timers. The application
    /// may rest longer ([`Control::tick_interval`]) while nothing happens.
    pub fn tick(&mut self, control: &mut impl Control) {
        if self.control.notifier.take_notification() {
            // What follows from the work of now should not wait for the end of a rest.
            self.interval = TICK;
        }
        self.plane.serve(control);
        if self.control.take_woken() {
            control.woken(&mut self.plane);
        }
        self.plane.advance_ports();
        if self.last_tick.elapsed() < self.interval {
            if self.management_waits {
                self.serve_management(control);
            }
            return;
        }
        self.last_tick = Instant::now();
        for id in 0..self.plane.devices.len() {
            let Some(port) = &mut self.plane.devices[id] else { continue };
            if matches!(self.plane.presence[id], Presence::Failed(_)) && port.is_away() {
                // The port has waited long enough. A device that returns now stays unused.
                continue;
            }
            for event in port.events() {
                self.log_event(id, &event);
                control.port_event(PortId::new(id as u16), &event, &mut self.plane);
            }
            if let (Presence::Away { since, why }, OnLoss::FailAfter(limit)) =
                (&self.plane.presence[id], self.plane.ports[id].on_loss)
                && since.elapsed() >= limit
            {
                let why = format!("{why} and did not return within {} s", limit.as_secs());
                self.fail(id, why);
            }
        }
        // Queues without a worker: they notice here that their device is lost or back.
        self.plane.changes.spare.iter_mut().for_each(TxQueue::sync);
        control.tick(&mut self.plane);
        self.plane.collect_observers();
        self.plane.measurements.poll(&self.mailboxes);
        self.serve_management(control);
        self.domain.collect();
        let is_watched = self.plane.is_observed() || self.plane.measuring() > 0;
        self.interval = if is_watched { TICK } else { control.tick_interval().max(TICK) };
    }

    /// Logs an event and applies it to the state of the port.
    fn log_event(&mut self, id: usize, event: &PortEvent) {
        let (Some(port), info) = (&self.plane.devices[id], &mut self.plane.ports[id]) else { return };
        let name = &info.name;
        match event {
            PortEvent::Link(link) => tracing::info!("port {name}: link {link}"),
            PortEvent::Address(mac) => {
                tracing::info!("port {name}: the address is {mac} now");
                info.mac = Some(*mac);
                info.capabilities.mac = Some(*mac);
            }
            PortEvent::Mtu(mtu) if *mtu < u32::from(info.mtu) => tracing::warn!(
                "port {name}: the MTU of its interface is {mtu} now, below the configured {}; \
                 longer frames are dropped",
                info.mtu
            ),
            PortEvent::Mtu(mtu) => tracing::info!("port {name}: the MTU of its interface is {mtu} now"),
            PortEvent::Finished => tracing::info!("port {name}: its source is exhausted"),
            PortEvent::Lost(_) if matches!(self.plane.presence[id], Presence::Failed(_)) => {}
            PortEvent::Lost(why) => {
                self.plane.losses[id] += 1;
                if !port.is_away() || info.on_loss == OnLoss::Exit {
                    self.fail(id, why.clone());
                } else {
                    let limit = match info.on_loss {
                        OnLoss::FailAfter(limit) => format!(" for at most {} s", limit.as_secs()),
                        _ => String::new(),
                    };
                    tracing::warn!("port {name} is lost: {why}; it waits for its return{limit}");
                    self.plane.presence[id] = Presence::Away { since: Instant::now(), why: why.clone() };
                }
                // Workers give the queues of the lost device back.
                self.notify_all();
            }
            PortEvent::Returned => {
                let seconds = match &self.plane.presence[id] {
                    Presence::Away { since, .. } => since.elapsed().as_secs_f64(),
                    _ => 0.0,
                };
                tracing::warn!("port {name} is back after {seconds:.1} s");
                info.capabilities = port.capabilities();
                self.plane.presence[id] = Presence::Present;
                self.notify_all();
            }
        }
    }

    /// Marks a port as failed for good.
    fn fail(&mut self, id: usize, why: String) {
        let info = &self.plane.ports[id];
        if info.on_loss == OnLoss::Exit {
            tracing::error!("port {} has failed: {why}; the program stops (on_loss = \"exit\")", info.name);
            self.plane.stop = true;
        } else {
            tracing::error!("port {} has failed: {why}; the other ports continue", info.name);
        }
        self.plane.presence[id] = Presence::Failed(why);
    }

    /// Returns whether a worker has ended, which only a panic causes before the stop.
    pub fn failed(&self) -> bool {
        self.threads.iter().any(|thread| thread.handle.is_finished())
    }

    /// Returns the current counters of all queues and devices. Devices take system calls.
    fn snapshot_with_devices(&mut self) -> Snapshot {
        let device_drops = |port: &mut Port| port.device_drops().iter().map(|(_, n)| n).sum();
        let devices = self.plane.devices.iter_mut().flatten();
        Snapshot { device_drops: devices.map(device_drops).collect(), ..self.snapshot() }
    }

    /// Returns the current counters of all queues.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            device_drops: Vec::new(),
            ports: self
                .plane
                .devices
                .iter()
                .flatten()
                .map(|port| (port.name().to_owned(), port.rx_statistics(), port.tx_statistics()))
                .collect(),
            worker_drops: self.threads.iter().map(|thread| thread.counters.drops.total()).sum::<u64>()
                + self.plane.drops.total(),
            cycles: self.threads.iter().fold((0, 0), |(busy, idle), thread| {
                (busy + thread.counters.busy_cycles.get(), idle + thread.counters.idle_cycles.get())
            }),
        }
    }

    /// Stops receiving, lets the workers finish the packets in flight between them, stops the ports, and
    /// returns the totals.
    pub fn stop(mut self, control: &mut impl Control) -> Summary {
        self.tick(control);
        control.before_stop(&mut self.plane);
        let elapsed = self.started.elapsed();
        self.drain(control);
        self.control.set_phase(Phase::Exit);
        self.notify_all();

        let mut failures = Vec::new();
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        for WorkerThread { handle, info, .. } in std::mem::take(&mut self.threads) {
            match handle.join() {
                Ok(ended) => {
                    if let Err(panic) = ended.result {
                        failures.push(format!("worker {} panicked: {panic}", info.index));
                    }
                    rx.extend(ended.rx);
                    tx.extend(ended.tx);
                }
                // The panic was outside the stages, for example in the drop of a device's queue.
                Err(_) => failures.push(format!("worker {} panicked while it ended", info.index)),
            }
        }
        self.plane.serve(control);
        for mailbox in self.mailboxes.iter() {
            while let Some(packet) = mailbox.work.pop().or_else(|| mailbox.transmit.pop()) {
                self.plane.drop(packet, DropReason::Stopping);
            }
        }
        control.stop(&mut self.plane);
        self.plane.end_port_changes(&mut rx, &mut tx);
        self.plane.tap.observers().end();
        let devices = self.plane.devices.iter().zip(&self.plane.presence);
        for (port, presence) in devices.filter_map(|(port, presence)| Some((port.as_ref()?, presence))) {
            match presence {
                Presence::Present => {}
                Presence::Away { why, .. } => tracing::warn!("port {} was away at the stop: {why}", port.name()),
                Presence::Failed(why) => failures.push(format!("port {} failed: {why}", port.name())),
            }
        }
        let pools = self.plane.port_opener().map(|opener| opener.pools()).unwrap_or_default();
        let mut summary = Summary { elapsed, failures, app: control.summary(), ..self.plane.summary() };
        let devices: Vec<Port> = std::mem::take(&mut self.plane.devices).into_iter().flatten().collect();
        let counters: Vec<_> = devices.iter().map(Port::queue_counters).collect();
        for problem in stop_ports(devices, rx, tx) {
            tracing::warn!("{problem}");
        }
        // Ports also send and drop packets while they stop.
        for (port, [rx, tx]) in summary.ports.iter_mut().zip(counters) {
            port.rx = rx.iter().map(|queue| queue.snapshot()).collect();
            port.tx = tx.iter().map(|queue| queue.snapshot()).collect();
        }
        summary.leaked_buffers = pools.iter().map(Pool::outstanding).sum();
        if summary.leaked_buffers > 0 && summary.failures.is_empty() {
            tracing::warn!("{} packet buffers were not returned to their pools", summary.leaked_buffers);
        }
        summary
    }

    fn drain(&mut self, control: &mut impl Control) {
        self.control.set_phase(Phase::Drain);
        self.notify_all();
        let deadline = Instant::now() + DRAIN;
        // After two consecutive rounds in which every worker was idle, no packet can be in flight between
        // workers.
        for _ in 0..2 {
            let before: Vec<u64> = self.mailboxes.iter().map(|m| m.drained.load(Ordering::Acquire)).collect();
            loop {
                let quiet = self.threads.iter().all(|thread| {
                    let at = thread.info.index;
                    thread.handle.is_finished() || self.mailboxes[at].drained.load(Ordering::Acquire) > before[at]
                });
                if quiet || Instant::now() > deadline {
                    break;
                }
                self.plane.serve(control);
                self.notify_all();
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn notify_all(&self) {
        for mailbox in self.mailboxes.iter() {
            mailbox.notifier.notify();
        }
    }
}

impl<S> Drop for Running<S> {
    /// Stops the workers if [`Self::stop`] was not called. The ports are dropped with them.
    fn drop(&mut self) {
        // The threads of captures wait for this end.
        self.plane.tap.observers().end();
        self.control.set_phase(Phase::Exit);
        self.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.handle.join();
        }
    }
}
