use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_pmd::drops::{DropCounters, DropReason};
use wirepath_pmd::packet::Pool;
use wirepath_pmd::port::{Port, PortEvent, PortId, RxQueue, TxQueue};

use super::summary::{PortSummary, Rates, Snapshot, Summary, WorkerSummary};
use super::{Control, ControlPlane, PortInfo, WorkerInfo, stop_ports};
use crate::context::WorkerCounters;
use crate::epoch::Domain;
use crate::events::{ControlQueues, Phase};
use crate::mailbox::Mailbox;
use crate::worker::Job;

/// Time between two looks of the control thread at its timers and ports.
const TICK: Duration = Duration::from_millis(10);
/// Time that workers get to finish what they hand over to each other.
const DRAIN: Duration = Duration::from_millis(500);

/// When a program ends, and what it says meanwhile.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// End after this time.
    pub duration: Option<Duration>,
    /// End when this becomes true: a signal handler's flag.
    pub stop: Option<Arc<AtomicBool>>,
    /// Call [`Control::rates`] this often.
    pub report_every: Option<Duration>,
}

/// What a worker's thread returns.
pub(super) struct Ended {
    pub(super) result: Result<(), String>,
    pub(super) rx: Vec<RxQueue>,
    pub(super) tx: Vec<TxQueue>,
}

struct Thread<S> {
    handle: JoinHandle<Ended>,
    counters: Arc<WorkerCounters>,
    jobs: Arc<ArrayQueue<Job<S>>>,
    info: WorkerInfo,
}

/// Started ports and workers. The thread that holds it is the control thread: it calls [`Self::run`], or [`Self::tick`] often, and at
/// the end [`Self::stop`].
pub struct Running<S> {
    /// Why a port moves nothing any more.
    lost: Vec<Option<String>>,
    pools: Vec<Pool>,
    spare: Vec<TxQueue>,
    mailboxes: Arc<[Mailbox]>,
    control: Arc<ControlQueues>,
    domain: Domain,
    threads: Vec<Thread<S>>,
    plane: ControlPlane,
    started: Instant,
    last_tick: Instant,
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
        pools: Vec<Pool>,
        spare: Vec<TxQueue>,
        (mailboxes, control): (Arc<[Mailbox]>, Arc<ControlQueues>),
        domain: Domain,
    ) -> Self {
        let plane = ControlPlane {
            // With the capabilities that the devices really got.
            ports: info
                .into_iter()
                .zip(&ports)
                .map(|(info, port)| PortInfo { capabilities: port.capabilities(), ..info })
                .collect(),
            devices: ports,
            mailboxes: Arc::clone(&mailboxes),
            drops: DropCounters::new(),
            sent: wirepath_pmd::counters::Counter::new(),
            injected: wirepath_pmd::counters::Counter::new(),
            stop: false,
            control: Arc::clone(&control),
            stepped: None,
        };
        let now = Instant::now();
        let lost = vec![None; plane.devices.len()];
        Self { lost, pools, spare, mailboxes, control, domain, threads: vec![], plane, started: now, last_tick: now }
    }

    pub(super) fn add(
        &mut self,
        handle: JoinHandle<Ended>,
        counters: Arc<WorkerCounters>,
        jobs: Arc<ArrayQueue<Job<S>>>,
        info: WorkerInfo,
    ) {
        self.threads.push(Thread { handle, counters, jobs, info });
    }

    /// The epoch domain of the workers.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Shows what is dropped from now on to [`Control::refused`].
    pub fn capture_drops(&self) {
        self.control.capture();
    }

    /// What the control thread can do.
    pub fn plane(&mut self) -> &mut ControlPlane {
        &mut self.plane
    }

    /// Has a worker call `job` with its stages, between two batches: for changes that tables do not cover. `false`: too many jobs
    /// wait already, or there is no such worker.
    pub fn on_worker(&self, worker: usize, job: impl FnOnce(&mut S) + Send + 'static) -> bool {
        let Some(thread) = self.threads.get(worker) else { return false };
        let queued = thread.jobs.push(Box::new(job)).is_ok();
        self.mailboxes[worker].bell.ring();
        queued
    }

    /// Runs the control thread until `options`, the application or the end of a worker says stop.
    pub fn run(&mut self, control: &mut impl Control, options: &RunOptions) {
        let begin = Instant::now();
        let mut last = (begin, self.snapshot());
        while !self.plane.stop && !self.failed() {
            if options.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                break;
            }
            if options.duration.is_some_and(|duration| begin.elapsed() >= duration) {
                break;
            }
            if let Some(every) = options.report_every
                && last.0.elapsed() >= every
            {
                let (now, snapshot) = (Instant::now(), self.snapshot());
                control.rates(&Rates::between(&last.1, &snapshot, now - last.0, now - self.started));
                last = (now, snapshot);
            }
            self.tick(control);
            let left = options.duration.map_or(TICK, |duration| duration.saturating_sub(begin.elapsed()).min(TICK));
            self.wait(left);
        }
    }

    /// Waits until the workers have something for the control thread, or the time is up.
    fn wait(&self, time: Duration) {
        let bell = &self.control.bell;
        if bell.lie_down() {
            let timeout = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() };
            let _ = poll(&mut [PollFd::from_borrowed_fd(bell.descriptor(), PollFlags::IN)], Some(&timeout));
            bell.get_up();
        }
    }

    /// One round of the control thread: punted packets, learned addresses, and every ten milliseconds the ports and the application's
    /// timers. Does not wait.
    pub fn tick(&mut self, control: &mut impl Control) {
        self.control.bell.answer();
        self.take_events(control);
        if self.last_tick.elapsed() < TICK {
            return;
        }
        self.last_tick = Instant::now();
        for id in 0..self.plane.devices.len() {
            for event in self.plane.devices[id].events() {
                let port = &self.plane.devices[id];
                match &event {
                    PortEvent::Link(link) => tracing::info!("port {}: link {link}", port.name()),
                    PortEvent::Lost(why) if self.lost[id].is_none() => {
                        self.lost[id] = Some(why.clone());
                        tracing::error!("port {} is lost: {why}; the other ports go on", port.name());
                    }
                    PortEvent::Lost(_) => {}
                    PortEvent::Finished => tracing::info!("port {}: its source has ended", port.name()),
                }
                control.port_event(id as PortId, &event, &mut self.plane);
            }
        }
        control.tick(&mut self.plane);
        self.domain.collect();
    }

    fn take_events(&mut self, control: &mut impl Control) {
        // At most what fits at once: timers must come to their turn under any load.
        for _ in 0..self.control.punts.capacity() {
            let Some(punt) = self.control.punts.pop() else { break };
            control.punt(punt, &mut self.plane);
        }
        for _ in 0..self.control.learns.capacity() {
            let Some(learn) = self.control.learns.pop() else { break };
            control.learn(learn, &mut self.plane);
        }
        while let Some(refused) = self.control.refused() {
            control.refused(refused.packet, refused.reason);
        }
    }

    /// Whether a worker has ended by itself, which only a panic makes it do.
    pub fn failed(&self) -> bool {
        self.threads.iter().any(|thread| thread.handle.is_finished())
    }

    /// Counters of all queues now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            ports: self
                .plane
                .devices
                .iter()
                .map(|port| (port.name().to_owned(), port.rx_statistics(), port.tx_statistics()))
                .collect(),
            worker_drops: self.threads.iter().map(|thread| thread.counters.drops.total()).sum::<u64>()
                + self.plane.drops.total(),
        }
    }

    /// Stops receiving, lets the workers finish what is on its way between them, stops the ports, and counts what came of it all.
    pub fn stop(mut self, control: &mut impl Control) -> Summary {
        self.tick(control);
        let elapsed = self.started.elapsed();
        self.drain(control);
        self.control.set_phase(Phase::Exit);
        self.ring_all();

        let (mut failures, mut workers) = (Vec::new(), Vec::new());
        let (mut rx, mut tx) = (Vec::new(), std::mem::take(&mut self.spare));
        for Thread { handle, counters, info, .. } in std::mem::take(&mut self.threads) {
            match handle.join() {
                Ok(ended) => {
                    if let Err(panic) = ended.result {
                        failures.push(format!("worker {} panicked: {panic}", info.index));
                    }
                    rx.extend(ended.rx);
                    tx.extend(ended.tx);
                }
                // Outside of the stages: a device's queue, say, when it was dropped.
                Err(_) => failures.push(format!("worker {} panicked while it ended", info.index)),
            }
            workers.push(WorkerSummary::new(&info, &counters));
        }
        self.take_events(control);
        for mailbox in self.mailboxes.iter() {
            while let Some(packet) = mailbox.work.pop().or_else(|| mailbox.transmit.pop()) {
                self.plane.drop(packet, DropReason::Stopping);
            }
        }
        control.stop(&mut self.plane);
        while let Some(refused) = self.control.refused() {
            control.refused(refused.packet, refused.reason);
        }
        for (port, why) in self.plane.devices.iter().zip(&self.lost) {
            failures.extend(why.as_ref().map(|why| format!("port {} was lost: {why}", port.name())));
        }
        let app = control.summary();
        let ports: Vec<PortSummary> = self.plane.devices.iter_mut().map(PortSummary::new).collect();
        let control_drops = self.plane.drops.nonzero().collect();
        let injected = self.plane.injected();
        for problem in stop_ports(std::mem::take(&mut self.plane.devices), rx, tx) {
            tracing::warn!("{problem}");
        }
        let leaked: u32 = self.pools.iter().map(Pool::outstanding).sum();
        if leaked > 0 && failures.is_empty() {
            tracing::warn!("{leaked} packet buffers did not come back to their pools");
        }
        Summary { elapsed, ports, workers, control_drops, injected, leaked_buffers: leaked, failures, app }
    }

    fn drain(&mut self, control: &mut impl Control) {
        self.control.set_phase(Phase::Drain);
        self.ring_all();
        let deadline = Instant::now() + DRAIN;
        // Twice in a row idle after all others were: nothing can be under way between them any more.
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
                self.take_events(control);
                self.ring_all();
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn ring_all(&self) {
        for mailbox in self.mailboxes.iter() {
            mailbox.bell.ring();
        }
    }
}

impl<S> Drop for Running<S> {
    /// Without [`Self::stop`]: the workers end, and the ports with them.
    fn drop(&mut self) {
        self.control.set_phase(Phase::Exit);
        self.ring_all();
        for thread in self.threads.drain(..) {
            let _ = thread.handle.join();
        }
    }
}
