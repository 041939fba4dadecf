//! The life of a port whose queues are ours: it starts and stops them, and mends them while the program runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use wirepath_memory::BufferAllocator;
use wirepath_verbs::{Cause, Context, Element, Error, EventKind, ObjectId, PortState, ProtectionDomain, Result};

use super::attach::{Lend, Lender, Lent, PoolStatus, QueueStatus, Spreading, Status, Turn, Wanted};
use super::exchange::Exchange;
use super::fault::Fault;
use super::find::{Claim, Found, Which, Who};
use super::graves::Graves;
use super::opened::Opened;
use super::receive::{ReceiveRing, Receiver, Spread};
use super::send::{SendRing, Sender};
use crate::counters::QueueCounters;
use crate::packet::{Blank, Pool};
use crate::port::{
    Capabilities, Device, Link, LinkState, PortConfig, PortError, PortEvent, Queues, ReceiveQueue, RuleHardware,
    TransmitQueue, VlanTags,
};

/// Why a port cannot be offered to other processes.
const NOT_SHARED: &str = "its packets are not in memory that can be shared (`[pool] shared = true`)";
/// How long packets that are on their way are waited for when a port stops.
const DRAIN: Duration = Duration::from_millis(200);
/// How long a worker has to notice that its queue is broken, until it is asked for it.
const PATIENCE_WITH_WORKERS: Duration = Duration::from_millis(200);

/// A kind of NIC: what a port of it can do, and how its queues are made. It outlives the device's resets.
pub(crate) trait Nic: Sized + Send + 'static {
    /// How its devices are found.
    const WHO: Who;
    /// What the configuration says beyond [`Which`].
    type Options;
    /// The direct verbs of an open device.
    type Verbs: Send;
    /// Registered memory of a started port.
    type Memory: Send;
    /// A send queue.
    type Tx: SendRing;
    /// A receive queue.
    type Rx: ReceiveRing;
    /// Where a receive queue lies, for another process.
    type ReceiveAt: Serialize + DeserializeOwned + Send + 'static;

    /// Opens a device.
    fn open(device: &wirepath_verbs::Device) -> Result<Context> {
        device.open()
    }

    /// The direct verbs of an open device, which take queue memory from `allocator`.
    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, port: u8) -> Result<Self::Verbs>;

    /// Asks the device what it can do, and says now what stands in the way of a queue, such as a missing capability.
    fn meet(options: Self::Options, opened: &Opened<Self::Verbs>) -> Result<Self>;

    /// What the NIC can do, over what is the same for all.
    fn capabilities(&self, plain: Capabilities) -> Capabilities;

    /// Packets that a send ring and a receive ring of a started port have room for.
    fn depths(&self, config: &PortConfig) -> [usize; 2];

    /// Registers the memory of the port's pool.
    fn register(&self, opened: &Opened<Self::Verbs>, pool: &Pool) -> Result<Self::Memory>;

    /// Makes send queue `index`.
    fn send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Made<Self::Tx>>;

    /// Makes all receive queues, and `lent` more for another process, and what spreads packets over them. Packets come from here on.
    fn receive(&self, parts: &Parts<'_, Self>, lent: usize) -> Result<Receivers<Self>>;

    /// Makes `lent` receive queues for another process beside those that are there, instead of those that were lent before, and spreads
    /// packets over all of them from here on, while those go on. `None`: this is not possible, and all are to be made anew.
    fn respread(&self, parts: &Parts<'_, Self>, lent: usize) -> Option<Result<Vec<Lent<Self::ReceiveAt>>>> {
        let _ = (parts, lent);
        None
    }

    /// Makes a broken receive queue work again by itself, where the hardware allows it and the fault leaves it in a state that is known.
    fn revive(&self, ring: Self::Rx, fault: Fault) -> Option<Self::Rx> {
        drop(ring);
        let _ = fault;
        None
    }

    /// Draws a conclusion from a fault of a queue.
    fn learn(&mut self, fault: Fault, queue: Direction);

    /// Forgets the conclusions that may have been due to what was started before.
    fn forget(&mut self) {}

    /// The rules in the device.
    fn rules(&mut self) -> Option<&mut dyn RuleHardware> {
        None
    }
}

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Transmit,
    Receive,
}

/// What queues are made of.
pub(crate) struct Parts<'a, N: Nic> {
    pub(crate) opened: &'a Opened<N::Verbs>,
    pub(crate) found: &'a Found,
    pub(crate) memory: &'a N::Memory,
    pub(crate) config: &'a PortConfig,
    pub(crate) blank: &'a Blank,
    pub(crate) graves: &'a Graves,
}

/// A ring, and the name of its queue in events.
pub(crate) struct Made<R> {
    pub(crate) ring: R,
    pub(crate) id: ObjectId,
}

/// All receive queues of a port.
pub(crate) struct Receivers<N: Nic> {
    pub(crate) spread: Arc<Spread>,
    pub(crate) queues: Vec<Made<N::Rx>>,
    /// Those for another process.
    pub(crate) lent: Vec<Lent<N::ReceiveAt>>,
}

/// A port that was opened.
pub(crate) struct DirectDevice<N: Lend> {
    which: Which,
    found: Found,
    _claim: Claim,
    nic: N,
    /// `None` while the device is away.
    opened: Option<Opened<N::Verbs>>,
    running: Option<Running<N>>,
    health: Health,
    link: LinkState,
    resets: Resets,
    graves: Graves,
    /// For other processes, while the port is started.
    lender: Option<Lender>,
}

enum Health {
    Well,
    /// The device reported a fatal error, or calls fail as if it had: it is waited for.
    Away {
        since: Instant,
    },
    /// It did not come back.
    Lost,
}

/// What a started port holds beside its queues.
struct Running<N: Nic> {
    config: PortConfig,
    blank: Blank,
    tx: Vec<Desk<N::Tx>>,
    rx: Vec<Desk<N::Rx>>,
    spread: Option<Arc<Spread>>,
    memory: Option<N::Memory>,
    spreading: Spreading<N::ReceiveAt>,
    /// Queues that the device says are broken. Their workers see it, and know more of it, unless they never look.
    suspects: Vec<(ObjectId, Instant)>,
}

/// Where a queue's ring goes between the device and the worker.
struct Desk<R> {
    exchange: Arc<Exchange<R>>,
    /// The queue's name in events.
    id: Option<ObjectId>,
    /// The worker's.
    counters: Arc<QueueCounters>,
    /// Bursts that had landed when it was last looked at, and since when there were no others.
    landed: u32,
    since: Instant,
}

#[derive(Default)]
struct Resets {
    queues: u64,
    device: u64,
    stalls: u64,
}

impl Resets {
    fn count(&mut self, fault: Fault) {
        self.queues += 1;
        self.stalls += u64::from(fault == Fault::Stalled);
    }
}

impl<R> Desk<R> {
    fn new() -> Self {
        let (exchange, counters) = (Arc::new(Exchange::new()), Arc::default());
        Self { exchange, id: None, counters, landed: 0, since: Instant::now() }
    }

    fn hand_out(&mut self, made: Made<R>) {
        self.id = Some(made.id);
        self.exchange.hand_out(made.ring);
    }

    /// Has the worker look after its ring if nothing has come back for so long, although something is on its way.
    fn watch(&mut self, patience: Duration) {
        let (landed, launched) = self.exchange.progress();
        if landed == launched || landed != self.landed || self.exchange.is_back() {
            (self.landed, self.since) = (landed, Instant::now());
        } else if self.since.elapsed() >= patience {
            self.exchange.doubt();
        }
    }
}

impl<N: Nic> Running<N> {
    fn recall(&self) {
        self.tx.iter().for_each(|desk| desk.exchange.recall());
        self.recall_receivers();
    }

    fn recall_receivers(&self) {
        self.rx.iter().for_each(|desk| desk.exchange.recall());
    }

    /// Calls back the queues whose workers have not brought them, although the device said long ago that they are broken.
    fn suspect(&mut self) {
        let Self { tx, rx, suspects, .. } = self;
        suspects.retain(|(id, since)| {
            if since.elapsed() < PATIENCE_WITH_WORKERS {
                return true;
            }
            // Of queues that were made anew meanwhile, nothing is known by that name.
            tx.iter().filter(|desk| desk.id == Some(*id)).for_each(|desk| desk.exchange.recall());
            rx.iter().filter(|desk| desk.id == Some(*id)).for_each(|desk| desk.exchange.recall());
            false
        });
    }

    fn all_back(&self) -> bool {
        self.tx.iter().all(|desk| desk.exchange.is_back()) && self.rx.iter().all(|desk| desk.exchange.is_back())
    }

    /// Destroys what the workers brought, and everything that the rings have in common.
    fn tear_down(&mut self) {
        self.tx.iter().for_each(|desk| drop(desk.exchange.collect()));
        self.rx.iter().for_each(|desk| drop(desk.exchange.collect()));
        self.end_spread();
        self.memory = None;
    }

    /// Ends what spreads packets over the queues here and elsewhere, whose rings are back.
    fn end_spread(&mut self) {
        self.spreading.let_go();
        self.spread = None;
        self.spreading.gone();
    }

    /// Tells the workers that there is nothing to wait for.
    fn lose(&self) {
        self.tx.iter().filter(|desk| desk.exchange.is_back()).for_each(|desk| desk.exchange.lose());
        self.rx.iter().filter(|desk| desk.exchange.is_back()).for_each(|desk| desk.exchange.lose());
    }

    fn receivers_made(&mut self, made: Receivers<N>) {
        self.spread = Some(made.spread);
        self.spreading.made(made.lent);
        self.rx.iter_mut().zip(made.queues).for_each(|(desk, queue)| desk.hand_out(queue));
    }
}

fn open<N: Nic>(which: &Which, found: &Found) -> Result<Opened<N::Verbs>> {
    // Whoever attaches maps the memory of its queues.
    Opened::open(N::open(&found.device)?, found, which.attach.is_some(), N::verbs)
}

impl<N: Lend> DirectDevice<N> {
    pub(crate) fn open(which: Which, options: N::Options) -> std::result::Result<Self, PortError> {
        let found = N::WHO.find(&which)?;
        let Some(claim) = Claim::new(&found) else {
            let reason = format!("port {} of {} is open in this program already", found.port, found.device.name());
            return Err(PortError::Refused { driver: N::WHO.driver, device: which.device, reason });
        };
        let opened = open::<N>(&which, &found).and_then(|opened| {
            let nic = N::meet(options, &opened)?;
            let state = opened.port()?.state;
            Ok((opened, nic, state))
        });
        let (opened, nic, state) = opened.map_err(|error| N::WHO.refused(&which.device, error))?;
        Ok(Self {
            which,
            found,
            _claim: claim,
            nic,
            opened: Some(opened),
            running: None,
            health: Health::Well,
            link: link_state(state),
            resets: Resets::default(),
            graves: Graves::default(),
            lender: None,
        })
    }

    /// The NIC.
    pub(crate) fn nic(&self) -> &N {
        &self.nic
    }

    /// Makes all queues and gives them to the workers, to whom they belong.
    fn build(&mut self) -> Result<()> {
        let Self { nic, found, graves, opened, running, .. } = self;
        let (Some(opened), Some(running)) = (opened, running) else { return Ok(()) };
        let memory = nic.register(opened, &running.config.pool)?;
        let Running { config, blank, .. } = &*running;
        let parts = Parts { opened, found, memory: &memory, config, blank, graves };
        // Those that send first: where a port is claimed, they claim it.
        let send = (0..running.tx.len()).map(|index| nic.send(&parts, index)).collect::<Result<Vec<_>>>()?;
        let receive = if running.rx.is_empty() { None } else { Some(nic.receive(&parts, 0)?) };
        running.memory = Some(memory);
        if let Some(made) = receive {
            running.receivers_made(made);
        }
        running.tx.iter_mut().zip(send).for_each(|(desk, made)| desk.hand_out(made));
        Ok(())
    }

    /// Makes broken queues anew: a send queue by itself, a receive queue too if it can be; otherwise all of them, because they share what
    /// spreads packets over them.
    fn mend(&mut self) -> Result<()> {
        let Self { nic, found, graves, resets, which, .. } = self;
        let (Some(opened), Some(running)) = (&self.opened, &mut self.running) else { return Ok(()) };
        running.suspect();
        if self.link == LinkState::Up && which.stall > Duration::ZERO {
            running.tx.iter_mut().for_each(|desk| desk.watch(which.stall));
        }
        let name = &which.device;
        for index in 0..running.tx.len() {
            let exchange = &running.tx[index].exchange;
            if !exchange.is_back() {
                continue;
            }
            if let Some(fault) = exchange.take_fault() {
                tracing::warn!("{name}: transmit queue {index} is made anew: {fault}");
                resets.count(fault);
                nic.learn(fault, Direction::Transmit);
            }
            drop(exchange.collect());
            let Some(memory) = &running.memory else { return Ok(()) };
            let Running { config, blank, .. } = &*running;
            let made = nic.send(&Parts { opened, found, memory, config, blank, graves }, index)?;
            running.tx[index].hand_out(made);
        }
        for (index, desk) in running.rx.iter().enumerate() {
            // Once: whoever was collected here does not lie there the next time.
            if let Some(fault) = desk.exchange.fault()
                && let Some(ring) = desk.exchange.collect()
                && let Some(ring) = nic.revive(ring, fault)
            {
                tracing::warn!("{name}: receive queue {index} is started anew: {fault}");
                resets.count(fault);
                desk.exchange.hand_out(ring);
            }
        }
        let broken = running.rx.iter().any(|desk| desk.exchange.is_back());
        if broken && !running.spreading.due && running.spreading.lent > 0 {
            // Queues in another process are spread over along with these, and go with them.
            if let Some(lender) = &mut self.lender {
                lender.evict(&mut running.spreading);
            }
        }
        if running.spreading.due && !broken && !running.rx.is_empty() {
            let Running { config, blank, spreading, memory: Some(memory), .. } = running else { return Ok(()) };
            let lent = usize::from(spreading.lent);
            let made = match nic.respread(&Parts { opened, found, memory, config, blank, graves }, lent) {
                Some(Err(error)) if lent > 0 => {
                    tracing::warn!("{name}: no receive queues for another process: {error}");
                    Some(Vec::new())
                }
                Some(Err(error)) => {
                    tracing::warn!("{name}: the receive queues are made anew: {error}");
                    None
                }
                Some(Ok(made)) => Some(made),
                None => None,
            };
            if let Some(made) = made {
                // Nothing is spread over what was lent before.
                spreading.let_go();
                spreading.gone();
                spreading.made(made);
            }
        }
        if running.spreading.due || broken {
            running.recall_receivers();
        }
        let some = running.spreading.due || !running.rx.is_empty();
        if some && running.rx.iter().all(|desk| desk.exchange.is_back()) {
            for (index, desk) in running.rx.iter().enumerate() {
                if let Some(fault) = desk.exchange.take_fault() {
                    tracing::warn!("{name}: the receive queues are made anew: queue {index} had {fault}");
                    resets.count(fault);
                    nic.learn(fault, Direction::Receive);
                }
                drop(desk.exchange.collect());
            }
            running.end_spread();
            let Some(memory) = &running.memory else { return Ok(()) };
            let Running { config, blank, spreading, .. } = &*running;
            let parts = Parts { opened, found, memory, config, blank, graves };
            let lent = usize::from(spreading.lent);
            let made = match lent {
                0 if running.rx.is_empty() => None,
                0 => Some(nic.receive(&parts, 0)?),
                _ => match nic.receive(&parts, lent) {
                    Ok(made) => Some(made),
                    Err(error) => {
                        tracing::warn!("{name}: no receive queues for another process: {error}");
                        if running.rx.is_empty() { None } else { Some(nic.receive(&parts, 0)?) }
                    }
                },
            };
            match made {
                Some(made) => running.receivers_made(made),
                None => running.spreading.made(Vec::new()),
            }
        }
        Ok(())
    }

    /// Looks after the processes that are attached.
    fn lend(&mut self) {
        let Self {
            nic, found, graves, which, opened: Some(opened), running: Some(running), lender: Some(lender), ..
        } = self
        else {
            return;
        };
        let Running { config, blank, memory: Some(memory), spreading, tx, rx, .. } = running else { return };
        let status = Status {
            device: which.device.clone(),
            driver: N::WHO.driver.to_owned(),
            mode: nic.capabilities(Capabilities::plain(N::WHO.driver, &which.device)).mode,
            port: config.id,
            mtu: config.mtu,
            process: std::process::id(),
            tx: tx.iter().map(|desk| QueueStatus::of(&desk.counters)).collect(),
            rx: rx.iter().map(|desk| QueueStatus::of(&desk.counters)).collect(),
            pool: PoolStatus {
                name: config.pool.name().to_owned(),
                buffers: config.pool.capacity(),
                free: config.pool.available(),
            },
            offered: Wanted { tx_queues: 0, rx_queues: 0, buffers: 0 },
            attached: 0,
            attached_ever: 0,
            lost: 0,
        };
        let parts = Parts { opened, found, memory, config, blank, graves };
        lender.turn(&mut Turn { nic, parts, spreading, status: &status });
    }

    /// Reads what the device reports; `true`: it is broken.
    fn listen(&mut self, events: &mut Vec<PortEvent>) -> bool {
        let Some(opened) = &mut self.opened else { return false };
        let mut look = false;
        loop {
            match opened.events.next_event() {
                Ok(Some(event)) => match (event.kind, event.element) {
                    (EventKind::DeviceFatal, _) => return true,
                    (EventKind::PortActive | EventKind::PortDown, Element::Port(port)) if port == self.found.port => {
                        let state = if event.kind == EventKind::PortActive { LinkState::Up } else { LinkState::Down };
                        if state != self.link {
                            self.link = state;
                            events.push(PortEvent::Link(Link { state, speed: None }));
                        }
                        look = true;
                    }
                    (EventKind::QueuePairFatal | EventKind::WorkQueueFatal, Element::Queue(id)) => {
                        if let Some(running) = &mut self.running {
                            running.suspects.push((id, Instant::now()));
                        }
                    }
                    (EventKind::CompletionQueueError, _) => {
                        // It does not pay to look for the one: such a queue never works again, and this never happens twice.
                        if let Some(running) = &self.running {
                            running.recall();
                        }
                    }
                    _ => {}
                },
                Ok(None) => break,
                Err(_) => return true,
            }
        }
        if look {
            tracing::info!("{}: link {}", self.which.device, Link { state: self.link, speed: None });
        }
        false
    }

    /// The device is broken: nothing of it can be used any more. Its queues are called back.
    fn goes_away(&mut self, events: &mut Vec<PortEvent>) {
        tracing::warn!("{}: the device reports a fatal error; it is closed and waited for", self.which.device);
        self.health = Health::Away { since: Instant::now() };
        if let (Some(lender), Some(running)) = (&mut self.lender, &mut self.running) {
            lender.end(&mut running.spreading, "its device reports a fatal error; attach again once it is back");
        }
        if self.link == LinkState::Up {
            self.link = LinkState::Down;
            events.push(PortEvent::Link(Link::DOWN));
        }
        if let Some(running) = &self.running {
            running.recall();
        }
    }

    /// Closes the device once all queues are back, then tries to open it again.
    fn return_from(&mut self, since: Instant, events: &mut Vec<PortEvent>) {
        let back = self.running.as_ref().is_none_or(Running::all_back);
        if back {
            if let Some(running) = &mut self.running {
                running.tear_down();
            }
            self.opened = None;
            match self.reopen() {
                Ok(()) => {
                    tracing::info!("{}: the device is back", self.which.device);
                    self.resets.device += 1;
                    self.health = Health::Well;
                    if self.link == LinkState::Up {
                        events.push(PortEvent::Link(Link::UP));
                    }
                    return;
                }
                Err(why) => {
                    // Half of the queues may have been made.
                    if let Some(running) = &mut self.running {
                        running.recall();
                        running.tear_down();
                    }
                    self.opened = None;
                    tracing::debug!("{}: not back yet: {why}", self.which.device);
                }
            }
        }
        if since.elapsed() >= self.which.patience {
            self.health = Health::Lost;
            let name = self.found.device.name();
            events.push(PortEvent::Lost(format!(
                "{} port {} (port {} of {name}) reported a fatal error and did not come back within {} s",
                N::WHO.driver,
                self.which.device,
                self.found.port,
                self.which.patience.as_secs()
            )));
        }
    }

    fn reopen(&mut self) -> std::result::Result<(), String> {
        let found = N::WHO.find(&self.which).map_err(|error| error.to_string())?;
        let text = |error: Error| error.to_string();
        let opened = open::<N>(&self.which, &found).map_err(text)?;
        self.link = link_state(opened.port().map_err(text)?.state);
        (self.found, self.opened) = (found, Some(opened));
        self.build().map_err(text)
    }

    fn failed(&self, error: Error) -> PortError {
        N::WHO.refused(&self.which.device, error)
    }
}

fn link_state(state: PortState) -> LinkState {
    if state == PortState::Active { LinkState::Up } else { LinkState::Down }
}

/// Whether a call failed because the device is broken.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Call(call) if call.cause == Cause::DeviceGone)
}

impl<N: Lend> Device for DirectDevice<N> {
    fn capabilities(&self) -> Capabilities {
        let mut can = self.nic.capabilities(Capabilities {
            mac: self.found.mac,
            numa_node: self.found.device.numa_node(),
            vlan_tags: VlanTags::Kept,
            ..Capabilities::plain(N::WHO.driver, &self.which.device)
        });
        if let (Some(running), Some(opened)) = (&self.running, &self.opened) {
            let bytes: usize = opened.allocator.usage().iter().map(|usage| usage.bytes).sum();
            let [send, receive] = self.nic.depths(&running.config);
            can.mode +=
                &format!(", rings of {send} to send and {receive} to receive, {} KiB of queue memory", bytes >> 10);
            if let Some(region) = opened.allocator.regions().unwrap_or_default().first() {
                can.mode += &format!(" in {}", region.backing);
            }
        }
        can
    }

    fn start(&mut self, config: &PortConfig) -> std::result::Result<Queues, PortError> {
        if self.opened.is_none() {
            self.found = N::WHO.find(&self.which)?;
            let opened = open::<N>(&self.which, &self.found).map_err(|error| self.failed(error))?;
            self.opened = Some(opened);
        }
        (self.health, self.resets) = (Health::Well, Resets::default());
        self.nic.forget();
        let blank = config.pool.blank().in_port(config.id);
        self.running = Some(Running {
            config: config.clone(),
            blank,
            tx: (0..config.tx_queues).map(|_| Desk::new()).collect(),
            rx: (0..config.rx_queues).map(|_| Desk::new()).collect(),
            memory: None,
            spread: None,
            spreading: Spreading::default(),
            suspects: Vec::new(),
        });
        if let Err(error) = self.build() {
            self.running = None;
            return Err(self.failed(error));
        }
        if let Some(offer) = &self.which.attach {
            let shared = config.pool.region().descriptor().is_some();
            let listening = if shared { Lender::listen(offer) } else { Err(std::io::Error::other(NOT_SHARED)) };
            self.lender = Some(listening.map_err(|error| {
                self.running = None;
                let reason = format!("it cannot be offered on {}: {error}", offer.socket.display());
                PortError::Refused { driver: N::WHO.driver, device: self.which.device.clone(), reason }
            })?);
        }
        let Some(running) = &mut self.running else { return Ok(Queues::default()) };
        let mut queues = Queues::default();
        for desk in &mut running.tx {
            let sender = Sender::new(Arc::clone(&desk.exchange), config.pool.clone(), config.mtu);
            desk.counters = Arc::clone(sender.counters());
            queues.tx.push(Box::new(sender));
        }
        for desk in &mut running.rx {
            let receiver = Receiver::new(Arc::clone(&desk.exchange), config.pool.clone(), blank);
            desk.counters = Arc::clone(receiver.counters());
            queues.rx.push(Box::new(receiver));
        }
        Ok(queues)
    }

    fn stop(&mut self, queues: Queues) -> std::result::Result<(), PortError> {
        // What was accepted is sent, as far as the device does so in time.
        if matches!(self.health, Health::Well) {
            let deadline = Instant::now() + DRAIN;
            for queue in queues.tx {
                if let Ok(mut sender) = queue.into_any().downcast::<Sender<N::Tx>>() {
                    while !sender.is_idle() && Instant::now() < deadline {
                        std::thread::yield_now();
                    }
                }
            }
        }
        // The rings go with the workers' ends and the exchanges; the last of them, or the spreader, stops the hardware.
        drop(queues.rx);
        if let (Some(mut lender), Some(running)) = (self.lender.take(), &mut self.running) {
            lender.end(&mut running.spreading, "the port stops");
            running.end_spread();
        }
        self.running = None;
        if !matches!(self.health, Health::Well) {
            self.opened = None;
        }
        Ok(())
    }

    fn link(&mut self) -> Link {
        match self.opened.as_ref().filter(|_| matches!(self.health, Health::Well)).map(Opened::port) {
            Some(Ok(port)) => Link { state: link_state(port.state), speed: port.speed },
            _ => Link::DOWN,
        }
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let mut events = Vec::new();
        match self.health {
            Health::Well => {
                let broken = self.listen(&mut events)
                    || self.mend().is_err_and(|error| {
                        tracing::warn!("{}: a queue could not be made anew: {error}", self.which.device);
                        is_gone(&error)
                    });
                if broken {
                    self.goes_away(&mut events);
                } else {
                    self.lend();
                }
            }
            Health::Away { since } => self.return_from(since, &mut events),
            Health::Lost => {
                if let Some(running) = &self.running {
                    running.lose();
                }
            }
        }
        events
    }

    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.nic.rules()
    }

    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let Resets { queues, device, stalls } = self.resets;
        let mut figures = vec![
            ("queue_resets", queues),
            ("device_resets", device),
            ("queue_stalls", stalls),
            ("buried_packets", self.graves.count()),
        ];
        if let Some(lender) = &self.lender {
            let [attached, ever, lost] = lender.counts();
            figures.extend([("attached_processes", attached), ("attachments", ever), ("attachments_lost", lost)]);
        }
        figures
    }
}
