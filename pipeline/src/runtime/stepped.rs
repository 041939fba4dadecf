use std::collections::BTreeMap;
use std::sync::Arc;

use wirepath_packet::counters::Counter;
use wirepath_packet::drops::{DropCounters, DropReason};
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::drivers::OnLoss;
use wirepath_pmd::port::{Capabilities, MacAddr, Port, PortId};

use super::ports::PortChanges;
use super::running::Presence;
use super::{Control, ControlPlane, PacketBalance, PortInfo, RuntimeError, WorkerInfo};
use crate::context::{Context, Output, WorkerState};
use crate::epoch::{Domain, Reader};
use crate::events::ControlQueues;
use crate::mailbox::Mailbox;
use crate::observe::{Observers, Tap};
use crate::stage::Stage;
use crate::stage_timers::StageTimers;

/// A pipeline without threads, devices and clock, run step by step. Tests and fuzz targets use it, because
/// the same input always gives the same output.
///
/// [`Self::process`] takes input packets, [`Self::next_sent`] returns the packets that the stages and the
/// control thread sent, and only [`Self::advance`] advances the time.
pub struct SteppedRuntime<S> {
    stage: S,
    state: WorkerState,
    reader: Reader,
    timers: StageTimers,
    plane: ControlPlane,
    received: u64,
    /// Packets that the caller took from [`Self::next_sent`].
    sent: u64,
}

impl<S> std::fmt::Debug for SteppedRuntime<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SteppedRuntime").field("now", &self.state.now).finish_non_exhaustive()
    }
}

/// Index of the mailbox that receives all sent packets. The mailbox of the only worker has index 0.
const TX_MAILBOX: usize = 1;

impl PortInfo {
    /// Creates a port without a device, for [`SteppedRuntime`].
    pub fn simulated(id: PortId, name: &str, mac: Option<MacAddr>, mtu: u16, pool: &Pool) -> Self {
        Self {
            id,
            name: name.to_owned(),
            mac,
            mtu,
            queues: 1,
            on_loss: OnLoss::Wait,
            capabilities: Capabilities { mac, ..Capabilities::plain("paper", name) },
            pool: pool.clone(),
            is_removed: false,
        }
    }
}

impl<S: Stage + 'static> SteppedRuntime<S> {
    /// Creates a pipeline at time 0. `domain` is the epoch domain of the tables that the stage reads.
    pub fn new(ports: Vec<PortInfo>, domain: &Domain, stage: S) -> Result<Self, RuntimeError> {
        let system = |e: rustix::io::Errno| RuntimeError::System { what: "cannot make an eventfd", source: e.into() };
        let mailboxes: Arc<[Mailbox]> = (0..2).map(|_| Mailbox::new()).collect::<Result<_, _>>().map_err(system)?;
        let control = Arc::new(ControlQueues::new().map_err(system)?);
        let outputs = ports.iter().map(|_| Output::Worker(TX_MAILBOX)).collect();
        let observers = Arc::new(Observers::new(ports.iter().map(|port| port.name.as_str()), 1));
        observers.started(&mailboxes);
        let tap = Tap::new(Arc::clone(&observers), 0);
        let state = WorkerState::new(0, 0, outputs, Arc::clone(&mailboxes), Arc::clone(&control), tap);
        let info = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: Vec::new() };
        let plane = ControlPlane {
            rule_drops: vec![0; ports.len()],
            presence: Vec::new(),
            losses: Vec::new(),
            workers: vec![(info, Arc::clone(&state.counters))],
            ports,
            devices: Vec::new(),
            mailboxes,
            changes: PortChanges::default(),
            drops: DropCounters::new(),
            sent: Counter::new(),
            injected: Counter::new(),
            generated: Counter::new(),
            application: Default::default(),
            consumed: BTreeMap::new(),
            stop: false,
            stop_flag: None,
            control,
            tap: Tap::of_control(&observers),
            measurements: Default::default(),
            simulated_time: Some(0),
        };
        let timers = StageTimers::default();
        let mut it = Self { stage, state, reader: domain.join(), timers, plane, received: 0, sent: 0 };
        // Their first interval begins.
        it.run_timers();
        Ok(it)
    }

    /// Adds started ports behind the simulated ones. The control thread calls their control functions, for
    /// example for flow rules in a NIC. Their queues stay with the caller.
    pub fn set_devices(&mut self, devices: Vec<Port>) {
        self.plane.presence = vec![Presence::Present; devices.len()];
        self.plane.losses = vec![0; devices.len()];
        self.plane.devices = devices.into_iter().map(Some).collect();
    }

    /// Advances the time. Each timer of the stages is called at exactly the times at which it is due. At the end of the
    /// time, the stages have one turn without packets ([`Stage::idle`]), in which jobs run first.
    pub fn advance(&mut self, nanoseconds: u64) {
        let end = self.state.now + nanoseconds;
        while self.timers.next() <= end {
            self.set_time(self.timers.next().max(self.state.now));
            self.run_timers();
        }
        self.set_time(end);
        self.run_jobs();
        self.reader.quiescent();
        self.state.in_port = None;
        self.stage.idle(&mut Context { state: &mut self.state, guard: self.reader.guard() });
        self.state.flush();
    }

    fn set_time(&mut self, now: u64) {
        self.state.now = now;
        self.plane.simulated_time = Some(now);
    }

    /// Calls the timers of the stages that are due.
    fn run_timers(&mut self) {
        self.reader.quiescent();
        self.state.in_port = None;
        self.timers.begin();
        self.stage.run_timers(&mut self.timers, &mut Context { state: &mut self.state, guard: self.reader.guard() });
        self.state.flush();
    }

    /// Runs the jobs that the control thread has given to the worker.
    fn run_jobs(&mut self) {
        self.reader.quiescent();
        self.state.in_port = None;
        let mailboxes = Arc::clone(&self.state.mailboxes);
        while let Some(job) = mailboxes[self.state.index].jobs.pop() {
            job(&mut self.stage, &mut Context { state: &mut self.state, guard: self.reader.guard() });
        }
        self.state.flush();
    }

    /// Passes a batch through the stages as if `port` had received it (`None`: as if another worker had
    /// handed it over).
    pub fn process(&mut self, port: Option<PortId>, batch: &mut Batch) {
        self.reader.quiescent();
        self.state.in_port = port;
        if let Some(port) = port {
            self.received += batch.len() as u64;
            batch.iter_mut().for_each(|packet| packet.set_in_port(port));
        }
        self.plane.collect_observers();
        self.state.tap.refresh();
        if port.is_some() && self.state.tap.wants_received() {
            self.state.observe_received(batch, 0);
        }
        loop {
            let mut context = Context { state: &mut self.state, guard: self.reader.guard() };
            self.stage.process(&mut context, batch);
            self.state.forward(batch);
            if !self.state.tap.has_pieces() || !self.state.next_piece(batch) {
                break;
            }
        }
        self.state.flush();
    }

    /// Runs one iteration of the control thread: punted packets, learned addresses, timers, and the jobs and packets
    /// that it gives to the worker.
    pub fn control(&mut self, control: &mut impl Control) {
        let queues = Arc::clone(&self.state.control);
        while let Some(punt) = queues.next_punt() {
            control.punt(punt, &mut self.plane);
        }
        while let Some(learn) = queues.learns.pop() {
            control.learn(learn, &mut self.plane);
        }
        control.tick(&mut self.plane);
        self.run_jobs();
        let mut batch = Batch::new();
        for _ in 0..self.plane.mailboxes[0].work.len().min(BATCH) {
            batch.extend(self.plane.mailboxes[0].work.pop());
        }
        if !batch.is_empty() {
            self.process(None, &mut batch);
        }
    }

    /// Calls `f` with the operations of the control thread.
    pub fn with_plane<R>(&mut self, f: impl FnOnce(&mut ControlPlane) -> R) -> R {
        f(&mut self.plane)
    }

    /// Takes the next sent packet, with its output port.
    pub fn next_sent(&mut self) -> Option<Packet> {
        let packet = self.plane.mailboxes.iter().find_map(|mailbox| mailbox.transmit.pop())?;
        self.sent += 1;
        Some(packet)
    }

    /// Returns the balance of all packets so far. Packets that [`Self::next_sent`] has not returned yet count
    /// as in flight.
    pub fn balance(&self) -> PacketBalance {
        let counters = &self.state.counters;
        PacketBalance {
            received: self.received,
            copies: counters.copies.get(),
            generated: counters.generated.get() + self.plane.generated.get(),
            sent: self.sent,
            dropped: counters.drops.total() + self.plane.drops.total(),
            to_kernel: counters.to_kernel.get() - counters.looped_back.get() + self.plane.injected(),
            consumed: self.plane.consumed.values().sum(),
            joined: counters.joined.get(),
        }
    }

    /// Returns the packets that the control thread consumed, by kind.
    pub fn consumed(&self) -> &BTreeMap<&'static str, u64> {
        &self.plane.consumed
    }

    /// Returns the drops of the stages and the control thread.
    pub fn drops(&self) -> BTreeMap<DropReason, u64> {
        let mut sum = BTreeMap::new();
        for (reason, n) in self.state.counters.drops.nonzero().chain(self.plane.drops.nonzero()) {
            *sum.entry(reason).or_default() += n;
        }
        sum
    }

    /// Number of packets that the stages passed to the control thread.
    pub fn punted(&self) -> u64 {
        self.state.counters.punted.get()
    }
}
