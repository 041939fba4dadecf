use std::collections::BTreeMap;
use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::drops::{DropCounters, DropReason};
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::{Capabilities, MacAddress, Port, PortId};

use super::{Control, ControlPlane, PortInfo, RuntimeError};
use crate::context::{Context, Core, LearnFilter, Output, WorkerCounters};
use crate::epoch::{Domain, Reader};
use crate::events::ControlQueues;
use crate::mailbox::Mailbox;
use crate::stage::Stage;

/// A pipeline without threads, devices and clock, one step at a time: for tests and fuzzing, where the same input must always give the
/// same output.
///
/// Packets go in by [`Self::process`], what the stages and the control send comes out of [`Self::sent`], and time passes only by
/// [`Self::advance`].
pub struct Stepped<S> {
    stage: S,
    core: Core,
    reader: Reader,
    plane: ControlPlane,
}

impl<S> std::fmt::Debug for Stepped<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stepped").field("now", &self.core.now).finish_non_exhaustive()
    }
}

/// The one worker, and the mailbox in which everything that is sent ends up.
const OUTSIDE: usize = 1;

impl PortInfo {
    /// A port that exists on paper only, for [`Stepped`].
    pub fn on_paper(id: PortId, name: &str, mac: Option<MacAddress>, mtu: u16, pool: &Pool) -> Self {
        Self {
            id,
            name: name.to_owned(),
            mac,
            mtu,
            queues: 1,
            capabilities: Capabilities { mac, ..Capabilities::plain("paper", name) },
            pool: pool.clone(),
        }
    }
}

impl<S: Stage> Stepped<S> {
    /// At time 0. `domain` is the one of the tables that the stage reads.
    pub fn new(ports: Vec<PortInfo>, domain: &Domain, stage: S) -> Result<Self, RuntimeError> {
        let system = |e: rustix::io::Errno| RuntimeError::System { what: "cannot make an eventfd", source: e.into() };
        let mailboxes: Arc<[Mailbox]> = (0..2).map(|_| Mailbox::new()).collect::<Result<_, _>>().map_err(system)?;
        let control = Arc::new(ControlQueues::new().map_err(system)?);
        let core = Core {
            index: 0,
            now: 0,
            in_port: None,
            counters: Arc::new(WorkerCounters::default()),
            outputs: ports.iter().map(|_| Output::Worker(OUTSIDE)).collect(),
            pending: 0,
            mailboxes: Arc::clone(&mailboxes),
            ring: 0,
            control: Arc::clone(&control),
            ring_control: false,
            filter: LearnFilter::new(),
            holding: false,
            held: Vec::new(),
        };
        let plane = ControlPlane {
            ports,
            devices: Vec::new(),
            mailboxes,
            drops: DropCounters::new(),
            sent: Counter::new(),
            injected: Counter::new(),
            stop: false,
            control,
            stepped: Some(0),
        };
        Ok(Self { stage, core, reader: domain.join(), plane })
    }

    /// With started ports behind those on paper, whose control functions (flow rules in a NIC, say) the control thread calls. Their
    /// queues stay with the caller.
    pub fn devices(&mut self, devices: Vec<Port>) {
        self.plane.devices = devices;
    }

    /// Lets time pass.
    pub fn advance(&mut self, nanoseconds: u64) {
        self.core.now += nanoseconds;
        self.plane.stepped = Some(self.core.now);
    }

    /// Takes a batch through the stages as if it had come in by `port` (`None`: handed over).
    pub fn process(&mut self, port: Option<PortId>, batch: &mut Batch) {
        self.reader.quiescent();
        self.core.in_port = port;
        if let Some(port) = port {
            batch.iter_mut().for_each(|packet| packet.set_in_port(port));
        }
        let mut context = Context { core: &mut self.core, guard: self.reader.guard() };
        self.stage.process(&mut context, batch);
        self.core.forward(batch);
        self.core.flush();
    }

    /// One round of the control thread: what was punted and learned, the timers, and what it hands back.
    pub fn control(&mut self, control: &mut impl Control) {
        let queues = Arc::clone(&self.core.control);
        while let Some(punt) = queues.punts.pop() {
            control.punt(punt, &mut self.plane);
        }
        while let Some(learn) = queues.learns.pop() {
            control.learn(learn, &mut self.plane);
        }
        control.tick(&mut self.plane);
        let mut batch = Batch::new();
        for _ in 0..self.plane.mailboxes[0].work.len().min(BATCH) {
            batch.extend(self.plane.mailboxes[0].work.pop());
        }
        if !batch.is_empty() {
            self.process(None, &mut batch);
        }
    }

    /// What the control thread can do, beside [`Self::control`].
    pub fn with_plane<R>(&mut self, f: impl FnOnce(&mut ControlPlane) -> R) -> R {
        f(&mut self.plane)
    }

    /// The next packet that was sent, with its output port.
    pub fn sent(&mut self) -> Option<Packet> {
        self.plane.mailboxes.iter().find_map(|mailbox| mailbox.transmit.pop())
    }

    /// What was dropped, by stages and control.
    pub fn drops(&self) -> BTreeMap<DropReason, u64> {
        let mut sum = BTreeMap::new();
        for (reason, n) in self.core.counters.drops.nonzero().chain(self.plane.drops.nonzero()) {
            *sum.entry(reason).or_default() += n;
        }
        sum
    }

    /// Packets that the stages gave to the control thread.
    pub fn punted(&self) -> u64 {
        self.core.counters.punted.get()
    }
}
