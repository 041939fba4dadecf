use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use wirepath_flow::Rule;
use wirepath_packet::counters::Counter;
use wirepath_packet::drops::{DropCounters, DropReason};
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, Pool};
use wirepath_pmd::port::{Bifurcation, KernelRule, Port, PortError, PortEvent, PortId, RuleHardware};
use wirepath_wire::Parser;

use super::ports::PortChanges;
use super::running::Presence;
use super::summary::{PortSummary, WorkerSummary};
use super::{PortInfo, Rates, Summary, WorkerInfo};
use crate::clock;
use crate::context::{Context, WorkerCounters};
use crate::counter::{CounterId, CounterValues};
use crate::events::{ControlQueues, ControlWaker, Learn, Punt};
use crate::job::{self, JobError, Stages, WorkerJob, WorkerJobs};
use crate::mailbox::Mailbox;
use crate::measure::MeasurementControl;
use crate::observe::{CaptureReader, CaptureSpec, FollowedSegment, ObserveError, Tap, TraceReader, TraceSpec};
use crate::registry::{Change, Changed, Command, CommandSpec, ObjectSpec, Page, PendingChange, TableSpec};
use crate::rules::offload::{Devices, RingCounters};
use crate::stage::Stage;

/// The application's part of the control thread. The control thread calls the methods one at a time. Every
/// method has a default, so that `&mut ()` serves programs that need no control.
///
/// A control that adds something to another one returns that one from [`Self::inner`]. The defaults of all other
/// methods then call it.
pub trait Control {
    /// Returns the control that this one wraps.
    fn inner(&mut self) -> Option<&mut dyn Control> {
        None
    }

    /// Handles a packet that a stage punted. The default drops it as `no_output_port`.
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        match self.inner() {
            Some(inner) => inner.punt(punt, plane),
            None => plane.drop(punt.packet, DropReason::NoOutputPort),
        }
    }

    /// Handles an address that a stage reported.
    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.learn(learn, plane);
        }
    }

    /// Runs timers. Called about every ten milliseconds, or less often if [`Self::tick_interval`] allows it.
    fn tick(&mut self, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.tick(plane);
        }
    }

    /// Returns the time until the next tick, unless a worker, another thread or an operator wakes the control thread
    /// before. The default is ten milliseconds. A program at rest saves processor time by a longer one.
    fn tick_interval(&mut self) -> Duration {
        self.inner().map_or(Duration::ZERO, Control::tick_interval)
    }

    /// Takes work that another thread has announced by [`ControlPlane::waker`].
    fn woken(&mut self, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.woken(plane);
        }
    }

    /// Handles a port event. The runtime has already logged it.
    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.port_event(port, event, plane);
        }
    }

    /// Reports the rates of the last interval ([`super::RunOptions::report_every`]).
    fn rates(&mut self, rates: &Rates) {
        if let Some(inner) = self.inner() {
            inner.rates(rates);
        }
    }

    /// Returns the parser that finds the application's tunnels, for the patterns of captures and traces.
    fn parser(&mut self) -> Parser {
        self.inner().map_or_else(Parser::default, Control::parser)
    }

    /// Follows a segment by its name, for captures of its frames. The application updates its index at each change.
    ///
    /// # Errors
    /// If there is no such segment, or the application has none.
    fn follow_segment(&mut self, name: &str) -> Result<FollowedSegment, String> {
        match self.inner() {
            Some(inner) => inner.follow_segment(name),
            None => Err("this program has no segments".to_owned()),
        }
    }

    /// Returns the application's tables, for operators ([`crate::registry`]).
    fn tables(&mut self) -> Vec<&'static TableSpec> {
        self.inner().map(Control::tables).unwrap_or_default()
    }

    /// Appends the next rows of one of the application's tables to a page.
    fn list(&mut self, table: &'static TableSpec, page: &mut Page<'_>, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.list(table, page, plane);
        }
    }

    /// Returns the kinds of objects of the application that operators can change.
    fn objects(&mut self) -> Vec<&'static ObjectSpec> {
        self.inner().map(Control::objects).unwrap_or_default()
    }

    /// Carries out a change of one of [`Self::objects`], or changes nothing and returns the reason.
    fn change(&mut self, change: &Change<'_>, plane: &mut ControlPlane) -> Result<Changed, String> {
        match self.inner() {
            Some(inner) => inner.change(change, plane),
            None => Err(change.unknown()),
        }
    }

    /// Returns the commands of the application, for operators (`wirepath command`).
    fn commands(&mut self) -> Vec<&'static CommandSpec> {
        self.inner().map(Control::commands).unwrap_or_default()
    }

    /// Carries out one of [`Self::commands`], and returns its result for the operator, or the reason why not. The
    /// control thread does nothing else meanwhile, so a command does not wait. A control that adds commands to those
    /// of [`Self::inner`] passes others on.
    fn command(&mut self, command: &Command<'_>, plane: &mut ControlPlane) -> Result<Value, String> {
        match self.inner() {
            Some(inner) => inner.command(command, plane),
            None => Err(command.unknown()),
        }
    }

    /// Reads the configuration again and applies the differences, or only lists them. `origin` is the user that asks.
    fn reload(&mut self, dry_run: bool, origin: &str) -> Result<Changed, String> {
        match self.inner() {
            Some(inner) => inner.reload(dry_run, origin),
            None => Err("this program cannot read its configuration again".to_owned()),
        }
    }

    /// Begins to write the configuration in force as a text from which the program starts to the same state. The
    /// outcome is a list of the parts of the text. `origin` is the user that asks.
    fn configuration(&mut self, origin: &str) -> Result<PendingChange, String> {
        match self.inner() {
            Some(inner) => inner.configuration(origin),
            None => Err("this program has no configuration".to_owned()),
        }
    }

    /// Called before the workers stop. Packets that it sends still leave.
    fn before_stop(&mut self, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.before_stop(plane);
        }
    }

    /// Called when the workers have stopped and the ports have not. The application must release the packets
    /// that it holds.
    fn stop(&mut self, plane: &mut ControlPlane) {
        if let Some(inner) = self.inner() {
            inner.stop(plane);
        }
    }

    /// Returns the application's part of the final summary, stored under the key `"app"`.
    fn summary(&mut self) -> Option<Value> {
        self.inner()?.summary()
    }
}

impl Control for () {}

impl Devices for ControlPlane {
    fn rule_hardware(&mut self, port: PortId) -> Option<&mut dyn RuleHardware> {
        Self::rule_hardware(self, port)
    }

    fn receive_rings(&self, port: PortId) -> Vec<RingCounters> {
        self.devices.get(port.index()).and_then(Option::as_ref).map(RingCounters::of).unwrap_or_default()
    }
}

/// Operations of the control thread.
#[derive(Debug)]
pub struct ControlPlane {
    pub(crate) ports: Vec<PortInfo>,
    /// The started ports; `None` for removed ones, and empty if the ports are only simulated.
    pub(crate) devices: Vec<Option<Port>>,
    /// Relation of each device to its port.
    pub(super) presence: Vec<Presence>,
    /// Number of times that each port lost its device.
    pub(crate) losses: Vec<u64>,
    /// The workers and their counters.
    pub(crate) workers: Vec<(WorkerInfo, Arc<WorkerCounters>)>,
    pub(crate) mailboxes: Arc<[Mailbox]>,
    pub(super) changes: PortChanges,
    pub(crate) drops: DropCounters,
    pub(super) sent: Counter,
    pub(super) injected: Counter,
    /// Packets that [`Self::count_generated`] counted.
    pub(super) generated: Counter,
    /// Counters of the application on this thread.
    pub(crate) application: CounterValues,
    /// Packets that [`Self::consume`] took, by kind.
    pub(super) consumed: BTreeMap<&'static str, u64>,
    /// Packets that the device of each port dropped by rules.
    pub(crate) rule_drops: Vec<u64>,
    pub(super) stop: bool,
    /// Set from outside to stop the program ([`super::RunOptions::stop`]).
    pub(super) stop_flag: Option<Arc<AtomicBool>>,
    pub(super) control: Arc<ControlQueues>,
    /// Captures of what this thread drops, and all sessions.
    pub(super) tap: Tap,
    pub(crate) measurements: MeasurementControl,
    /// Simulated time in nanoseconds; `None` if the time comes from a clock.
    pub(super) simulated_time: Option<u64>,
}

impl ControlPlane {
    /// Returns what another thread wakes the control thread with.
    pub fn waker(&self) -> ControlWaker {
        ControlWaker(Arc::clone(&self.control))
    }

    /// Passes punted packets and learned addresses to `control`, at most as many as the queues hold.
    /// An application calls this between the parts of a long change, so that its packets do not wait for the end.
    pub fn serve(&mut self, control: &mut impl Control) {
        let queues = Arc::clone(&self.control);
        // Limited to the queue capacity, so that timers run under any load.
        for _ in 0..queues.punts.capacity() {
            let Some(punt) = queues.next_punt() else { break };
            control.punt(punt, self);
        }
        for _ in 0..queues.learns.capacity() {
            let Some(learn) = queues.learns.pop() else { break };
            control.learn(learn, self);
        }
    }

    /// Begins a capture. The reader gets copies of the packets; see [`crate::observe`].
    ///
    /// # Errors
    /// If too many captures run, or the engine refuses the pattern.
    pub fn start_capture(&mut self, spec: CaptureSpec, parser: Parser) -> Result<CaptureReader, ObserveError> {
        let reader = self.tap.observers().start_capture(spec, parser)?;
        self.tap.refresh();
        Ok(reader)
    }

    /// Begins traces of received packets.
    ///
    /// # Errors
    /// If too many requests for traces run, or the engine refuses the pattern.
    pub fn start_trace(&mut self, spec: TraceSpec, parser: Parser) -> Result<TraceReader, ObserveError> {
        let reader = self.tap.observers().start_trace(spec, parser)?;
        self.tap.refresh();
        Ok(reader)
    }

    /// Removes captures and traces that have ended.
    pub(super) fn collect_observers(&mut self) {
        self.tap.observers().collect();
        self.tap.refresh();
    }

    /// Returns whether a capture or trace runs.
    pub(super) fn is_observed(&self) -> bool {
        self.tap.is_active()
    }

    /// Returns true if the program is to stop. A long change should give up then.
    pub fn is_stopping(&self) -> bool {
        self.stop || self.stop_flag.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// Nanoseconds since the program started.
    pub fn now(&self) -> u64 {
        self.simulated_time.unwrap_or_else(clock::precise)
    }

    /// Seconds since the program started. Tables use this as their ageing tick.
    pub fn seconds(&self) -> u32 {
        (self.now() / 1_000_000_000) as u32
    }

    /// Returns the ports. The index of a port is its number. Removed ports stay in the list
    /// ([`PortInfo::is_removed`]).
    pub fn ports(&self) -> &[PortInfo] {
        &self.ports
    }

    /// Returns the port with this name.
    pub fn port(&self, name: &str) -> Option<&PortInfo> {
        self.ports.iter().find(|port| port.name == name && !port.is_removed)
    }

    /// Returns the workers, with the receive queues that they poll.
    pub fn worker_infos(&self) -> impl Iterator<Item = &WorkerInfo> {
        self.workers.iter().map(|(info, _)| info)
    }

    /// Returns the worker that polls each receive queue, by port and queue.
    pub fn queue_workers(&self) -> Vec<Vec<usize>> {
        let mut all: Vec<Vec<usize>> = self.ports.iter().map(|port| vec![0; port.queues.into()]).collect();
        for (worker, (info, _)) in self.workers.iter().enumerate() {
            for (port, queue) in &info.rx_queues {
                if let Some(place) = all.get_mut(port.index()).and_then(|of| of.get_mut(usize::from(*queue))) {
                    *place = worker;
                }
            }
        }
        all
    }

    fn device(&mut self, port: PortId) -> Option<&mut Port> {
        self.devices.get_mut(port.index())?.as_mut()
    }

    /// Returns the state of a port whose device is not present.
    pub(crate) fn port_state(&self, index: usize) -> Option<&'static str> {
        match self.presence.get(index)? {
            Presence::Present => None,
            Presence::Away { .. } => Some("away"),
            Presence::Failed(_) => Some("failed"),
        }
    }

    /// Returns the figures of the run up to now. Counters that change meanwhile may disagree by a few packets.
    pub fn summary(&mut self) -> Summary {
        let elapsed = std::time::Duration::from_nanos(self.now());
        let ports = self.devices.iter_mut().zip(&self.losses).zip(&self.rule_drops);
        let live = ports.filter_map(|((port, losses), drops)| Some(PortSummary::new(port.as_mut()?, *losses, *drops)));
        let mut ports: Vec<PortSummary> = live.collect();
        ports.extend(self.removed_ports());
        Summary {
            elapsed,
            ports,
            workers: self.workers.iter().map(|(info, counters)| WorkerSummary::new(info, counters)).collect(),
            control_drops: self.drops.nonzero().collect(),
            injected: self.injected(),
            generated: self.generated.get(),
            consumed: self.consumed.clone(),
            control_counters: self.application.all().collect(),
            leaked_buffers: 0,
            failures: Vec::new(),
            app: None,
        }
    }

    /// Returns the buffer pool for packets of a port.
    pub fn pool(&self, port: PortId) -> Option<&Pool> {
        self.ports.get(port.index()).map(|port| &port.pool)
    }

    /// Passes all flow rules to a port, in evaluation order. The port may itself apply some of the rules that
    /// pass packets to the kernel. Returns the result for each of the port's rules with that action
    /// ([`wirepath_pmd::port::PuntToKernel::set_rules`]).
    pub fn set_rules(&mut self, port: PortId, rules: &[Rule]) -> Result<Vec<KernelRule>, PortError> {
        self.device(port).map_or(Ok(Vec::new()), |port| port.set_rules(rules))
    }

    /// Replaces the packets that a port takes from an interface which it shares with the kernel.
    ///
    /// # Errors
    /// If the device refuses them. The old ones stay in force until the device is lost and returns.
    pub fn set_bifurcation(&mut self, port: PortId, bifurcation: &Bifurcation) -> Result<(), PortError> {
        self.device(port).map_or(Ok(()), |port| port.set_bifurcation(bifurcation))
    }

    /// Returns the packets and bytes of a rule that the port applies itself.
    pub fn rule_counters(&mut self, port: PortId, rule: &Rule) -> Option<(u64, u64)> {
        self.device(port)?.rule_counters(rule)
    }

    /// Returns the port's rule hardware, if it has any.
    pub fn rule_hardware(&mut self, port: PortId) -> Option<&mut dyn RuleHardware> {
        self.device(port)?.rule_hardware()
    }

    /// Sets the number of packets that the device of a port dropped by rules, for the summary.
    pub fn set_rule_drops(&mut self, port: PortId, n: u64) {
        if let Some(drops) = self.rule_drops.get_mut(port.index()) {
            *drops = n;
        }
    }

    /// Injects a packet into the kernel's receive path, as if it had just arrived on the interface of its
    /// input port. If the port cannot do this or the kernel rejects the packet, the packet is dropped as
    /// `no_kernel`.
    pub fn inject(&mut self, packet: Packet) {
        let mut frame: Vec<u8> = packet.segments().flatten().copied().collect();
        if let Some(tci) = packet.vlan().filter(|_| frame.len() >= 12) {
            let service = packet.flags().contains(Flags::VLAN_SERVICE);
            let [high, low] = tci.to_be_bytes();
            let tag = if service { [0x88, 0xa8, high, low] } else { [0x81, 0x00, high, low] };
            frame.splice(12..12, tag);
        }
        let port = packet.in_port().and_then(|port| self.device(port));
        match port.map(|port| port.inject(&frame)) {
            Some(Ok(())) => self.injected.add(1),
            _ => self.drop(packet, DropReason::NoKernel),
        }
    }

    /// Number of packets that [`Self::inject`] passed to the kernel.
    pub fn injected(&self) -> u64 {
        self.injected.get()
    }

    /// Sends a packet of the control thread to a port, through a worker. Packets to one port keep their
    /// order. The egress rules do not apply.
    pub fn send(&mut self, port: PortId, mut packet: Packet) {
        packet.set_out_port(port);
        // Any worker can send to any port. Using the same worker for each port keeps the order.
        let mailbox = &self.mailboxes[port.index() % self.mailboxes.len()];
        match mailbox.transmit.push(packet) {
            Ok(()) => {
                self.sent.add(1);
                mailbox.notifier.notify();
            }
            Err(packet) => self.drop(packet, DropReason::QueueFull),
        }
    }

    /// Hands a packet to a worker, whose first stage then receives it.
    pub fn enqueue_to_worker(&mut self, worker: usize, packet: Packet) {
        match self.mailboxes.get(worker) {
            Some(mailbox) => match mailbox.work.push(packet) {
                Ok(()) => mailbox.notifier.notify(),
                Err(packet) => self.drop(packet, DropReason::QueueFull),
            },
            None => self.drop(packet, DropReason::QueueFull),
        }
    }

    /// Makes a worker run `job` between two batches. The job can send, drop and count by its [`Context`], whose
    /// [`Context::in_port`] is `None`. The egress rules do not apply to what it sends, as for [`Self::send`]. Jobs of a
    /// worker run in their order. While a job runs, the worker receives nothing, so it must be short. A job that panics
    /// ends its worker, as a stage does.
    ///
    /// Jobs that were given before the stop of the program run. A worker that has ended runs none: the handle reports
    /// it. The handle may be dropped.
    ///
    /// ```no_run
    /// # use wirepath_pipeline::{ControlPlane, JobError, WorkerJob};
    /// # fn example(plane: &mut ControlPlane) -> Result<(), JobError> {
    /// let mut job: WorkerJob<u64> = plane.run_on_worker(0, |context| context.counters().turns.get())?;
    /// // Later, for example at the next tick:
    /// if let Some(turns) = job.try_take() {
    ///     println!("worker 0 was in turn {}", turns?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If there is no such worker, if it has ended, or if 64 jobs wait for it.
    pub fn run_on_worker<T: Send + 'static>(
        &self,
        worker: usize,
        job: impl FnOnce(&mut Context<'_>) -> T + Send + 'static,
    ) -> Result<WorkerJob<T>, JobError> {
        job::give(self.worker_mailbox(worker)?, worker, |_, context| Ok(job(context)))
    }

    fn worker_mailbox(&self, worker: usize) -> Result<&Mailbox, JobError> {
        let mailbox = self.mailboxes.get(worker).filter(|_| worker < self.workers.len());
        mailbox.ok_or(JobError::NoWorker(worker))
    }

    /// Does the same as [`Self::run_on_worker`] for a job that also needs the worker's stage of the type `S`. The stage
    /// may stand in a tuple of stages or between flow rules. Of several stages of one type it is the first.
    ///
    /// ```no_run
    /// # use wirepath_packet::Batch;
    /// # use wirepath_pipeline::{Context, ControlPlane, JobError, Stage, WorkerJob};
    /// struct Count(u64);
    ///
    /// impl Stage for Count {
    ///     fn process(&mut self, _: &mut Context<'_>, batch: &mut Batch) {
    ///         self.0 += batch.len() as u64;
    ///     }
    /// }
    ///
    /// # fn example(plane: &mut ControlPlane) -> Result<(), JobError> {
    /// // Takes the count of worker 0; the stage begins again from zero.
    /// let job = plane.run_on_stage(0, |count: &mut Count, _| std::mem::take(&mut count.0))?;
    /// # let _: WorkerJob<u64> = job;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Self::run_on_worker`]. The handle returns [`JobError::NoStage`] if the worker has no stage of this type.
    pub fn run_on_stage<S: Stage + 'static, T: Send + 'static>(
        &self,
        worker: usize,
        job: impl FnOnce(&mut S, &mut Context<'_>) -> T + Send + 'static,
    ) -> Result<WorkerJob<T>, JobError> {
        let with_stage = move |stages: &mut dyn Stages, context: &mut Context<'_>| {
            job::stage_of(stages, worker).map(|stage| job(stage, context))
        };
        job::give(self.worker_mailbox(worker)?, worker, with_stage)
    }

    /// Makes every worker run a clone of `job`, as [`Self::run_on_worker`] does. A worker that refuses it has the error
    /// as its result.
    pub fn run_on_workers<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Context<'_>) -> T + Clone + Send + 'static,
    ) -> WorkerJobs<T> {
        WorkerJobs::new((0..self.workers.len()).map(|worker| self.run_on_worker(worker, job.clone())))
    }

    /// Frees a packet that the control thread has processed and that causes no further packet. `kind` names
    /// the protocol in the summary.
    pub fn consume(&mut self, packet: Packet, kind: &'static str) {
        *self.consumed.entry(kind).or_default() += 1;
        drop(packet);
    }

    /// Counts a packet that the control thread makes itself. Call this also if there is no buffer for the
    /// packet and the drop is counted.
    pub fn count_generated(&self) {
        self.generated.add(1);
    }

    /// Adds `n` to a counter of the application.
    pub fn count(&self, counter: CounterId, n: u64) {
        self.application.add(counter, n);
    }

    /// Returns a counter of the application: the sum over the workers and the control thread.
    pub fn counter(&self, counter: CounterId) -> u64 {
        let workers = self.workers.iter().map(|(_, counters)| counters.application.get(counter));
        workers.sum::<u64>() + self.application.get(counter)
    }

    /// Drops a packet.
    pub fn drop(&mut self, packet: Packet, reason: DropReason) {
        self.drops.add(reason, 1);
        if self.tap.wants_dropped() {
            let now = self.now();
            self.tap.dropped(&packet, reason, now);
        }
        drop(packet);
    }

    /// Counts a drop of `n` packets that were never allocated or that the caller frees.
    pub fn count_drops(&self, reason: DropReason, n: u64) {
        self.drops.add(reason, n);
    }

    /// Returns the drop counters of the control thread.
    pub fn drops(&self) -> &DropCounters {
        &self.drops
    }

    /// Stops the program, like a signal.
    pub fn stop(&mut self) {
        self.stop = true;
    }
}
