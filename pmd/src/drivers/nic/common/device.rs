//! Life cycle of a port whose queues this program owns: starts and stops it, and recreates broken queues at
//! run time.

use std::fmt::Display;
use std::mem::{replace, take};
use std::sync::Arc;
use std::time::{Duration, Instant};

use wirepath_verbs::{Cause, Element, Error, EventKind, ObjectId, PortState, Result};

use super::log_limit::LogLimit;
use super::nic::{Direction, NewRing, NewRxQueues, Nic, QueueContext};
use super::open_device::OpenDevice;
use super::port_counter::PortCounter;
use super::probe::{Claim, DeviceSelector, RdmaPort};
use super::quarantine::Quarantine;
use super::queue_fault::QueueFault;
use super::ring_handoff::RingHandoff;
use super::rx_queue::{NicRxQueue, RssGroup};
use super::shared_nic::SharedNic;
use super::tx_queue::{NicTxQueue, TxRing};
use crate::drivers::kernel::common::link::Interface;
use crate::drivers::kernel::common::link_monitor::LinkMonitor;
use crate::drivers::kernel::common::netlink::Netlink;
use crate::ipc::{AttachRequest, AttachServer, PoolStatus, QueueStatus, RxSharing, ServeContext, Status};
use crate::port::{
    Bifurcation, Capabilities, Device, DeviceLink, DeviceStatistics, Link, LinkState, PortConfig, PortError, PortEvent,
    Queues, RuleHardware, RxDriver, TxDriver, VlanTags,
};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{MetaTemplate, Packet};

/// Reason why a port cannot be offered to clients.
const NOT_SHARED: &str = "its packets are not in shared memory; set `shared = true` in `[pool]`";
/// Time that packets in flight have to complete when a port stops.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// Time that a worker has to notice its broken queue, before the queue is recalled.
const WORKER_FAULT_TIMEOUT: Duration = Duration::from_millis(200);
/// Resets of a queue without a packet between them after which the port has failed, and the time that they must
/// span. Several faults within a shorter time can have one cause that passes.
const MAX_FUTILE_RESETS: u32 = 16;
const MIN_FUTILE_TIME: Duration = Duration::from_secs(1);
/// Consecutive stalls of a transmit queue without a completion between them after which the device counts as lost.
/// A new queue did not help, so the device is opened again. Each stall takes `tx_timeout`.
const MAX_STALLS: u32 = 2;

/// Time between two attempts to find the kernel's interface of a port.
const INTERFACE_INTERVAL: Duration = Duration::from_secs(1);

/// An open port.
pub(crate) struct NicDevice<N: SharedNic> {
    selector: DeviceSelector,
    rdma_port: RdmaPort,
    _claim: Claim,
    nic: N,
    /// `None` while the device is away.
    opened: Option<OpenDevice<N::Verbs>>,
    running: Option<Running<N>>,
    /// Packets for which the device had no receive buffer; `None` if it does not count them.
    out_of_buffer: Option<PortCounter>,
    /// Counters of the transmit queues and of the receive queues. They outlive the loss of the device.
    counters: [Vec<Arc<QueueCounters>>; 2],
    health: Health,
    link: LinkState,
    resets: ResetCounts,
    quarantine: Quarantine,
    /// Serves clients while the port is started.
    server: Option<AttachServer>,
    /// The kernel's interface of a port that is shared with the kernel.
    interface: KernelInterface,
}

/// The kernel's interface of a port that is shared with the kernel. The port has its Ethernet address and its MTU.
#[derive(Default)]
struct KernelInterface {
    monitor: Option<LinkMonitor>,
    /// Time of the last attempt to find it.
    tried: Option<Instant>,
    /// MTU that the port has reported. The address is that of [`RdmaPort`].
    mtu: Option<u32>,
}

impl KernelInterface {
    fn new(rdma_port: &RdmaPort) -> Self {
        Self { mtu: rdma_port.mtu(), ..Self::default() }
    }

    /// Reports a changed address or MTU, also a change that happened while the device or the interface was away.
    fn follow(&mut self, rdma_port: &mut RdmaPort, events: &mut Vec<PortEvent>) {
        if self.monitor.as_ref().is_none_or(LinkMonitor::is_lost)
            && self.tried.is_none_or(|tried| tried.elapsed() >= INTERFACE_INTERVAL)
        {
            self.tried = Some(Instant::now());
            self.monitor = monitor(rdma_port);
        }
        let Some(monitor) = self.monitor.as_mut() else { return };
        // The device itself reports its link and its loss.
        monitor.events();
        if monitor.is_lost() {
            return;
        }
        if let Some(mac) = monitor.mac().filter(|mac| rdma_port.mac != Some(*mac)) {
            rdma_port.mac = Some(mac);
            events.push(PortEvent::Address(mac));
        }
        let mtu = monitor.mtu();
        if self.mtu.replace(mtu) != Some(mtu) {
            events.push(PortEvent::Mtu(mtu));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Healthy,
    /// The device reported a fatal error, calls fail as after one, or a transmit queue stalls again and again.
    /// `port::reattach` closes the device and opens it again.
    Away,
    /// A queue does not work in spite of resets. The port does not return.
    Failed,
}

/// State of a started port.
struct Running<N: Nic> {
    config: PortConfig,
    template: MetaTemplate,
    tx: Vec<RingSlot<N::Tx>>,
    rx: Vec<RingSlot<N::Rx>>,
    rss_group: Option<Arc<RssGroup>>,
    memory: Option<N::Memory>,
    sharing: RxSharing<N::RxQueueSpans>,
    /// Queues that the device reported as broken. Their workers usually notice first, with a more precise
    /// fault, unless they do not poll.
    suspects: Vec<(ObjectId, Instant)>,
}

/// A queue of a started port, whose ring moves between device and worker.
struct RingSlot<R> {
    handoff: Arc<RingHandoff<R>>,
    /// ID of the queue in asynchronous events.
    id: Option<ObjectId>,
    /// Counters of the worker.
    counters: Arc<QueueCounters>,
    /// Completed bursts at the last check, and the time of the last change.
    completed: u32,
    since: Instant,
    futile: FutileResets,
    /// Packets that the previous ring did not send, for the next one.
    unsent: Vec<Packet>,
}

/// Consecutive resets of a queue without a packet between them.
struct FutileResets {
    count: u32,
    since: Instant,
    /// Received packets at the last reset.
    received: u64,
}

impl FutileResets {
    /// Counts a reset; `moved`: packets have passed since the previous one. Returns the number of consecutive
    /// resets if the queue is to be given up.
    fn count(&mut self, moved: bool) -> Option<u32> {
        if moved || self.count == 0 {
            (self.count, self.since) = (0, Instant::now());
        }
        self.count += 1;
        (self.count >= MAX_FUTILE_RESETS && self.since.elapsed() >= MIN_FUTILE_TIME).then_some(self.count)
    }
}

#[derive(Default)]
struct ResetCounts {
    queues: u64,
    device: u64,
    stalls: u64,
    log: LogLimit,
    /// Why the port is to be given up.
    failure: Option<String>,
    /// Why the device is to be closed and opened again.
    stalled: Option<String>,
}

impl ResetCounts {
    /// Counts and logs the reset of a queue. `futile`: the result of [`FutileResets::count`].
    fn count(&mut self, queue: &dyn Display, fault: QueueFault, futile: Option<u32>) {
        self.queues += 1;
        self.stalls += u64::from(fault == QueueFault::Stalled);
        if let Some(suppressed) = self.log.permit() {
            let more = match suppressed {
                0 => String::new(),
                _ => format!(" ({suppressed} earlier resets are not logged)"),
            };
            tracing::warn!("{queue} is reset: {fault}{more}");
        }
        if let (Some(times), None) = (futile, &self.failure) {
            self.failure =
                Some(format!("{queue} was reset {times} times without a packet between; last reason: {fault}"));
        }
    }
}

impl<R> RingSlot<R> {
    fn new(counters: &Arc<QueueCounters>) -> Self {
        let (handoff, counters) = (Arc::new(RingHandoff::new()), Arc::clone(counters));
        let futile = FutileResets { count: 0, since: Instant::now(), received: 0 };
        Self { handoff, id: None, counters, completed: 0, since: Instant::now(), futile, unsent: Vec::new() }
    }

    fn hand_off(&mut self, created: NewRing<R>) {
        self.id = Some(created.id);
        // The worker has no ring, so that nobody else writes this.
        self.handoff.set_progress((0, 0));
        self.handoff.hand_off(created.ring);
    }

    /// Counts a reset of a transmit queue, see [`FutileResets::count`].
    fn count_tx_reset(&mut self) -> Option<u32> {
        self.futile.count(self.handoff.progress().0 > 0)
    }

    /// Counts a reset of a receive queue, see [`FutileResets::count`].
    fn count_rx_reset(&mut self) -> Option<u32> {
        let received = self.counters.packets.get();
        let before = replace(&mut self.futile.received, received);
        self.futile.count(received != before)
    }

    /// Requests a stall check by the worker, if packets are in flight and nothing completed for `timeout`.
    fn check_stall(&mut self, timeout: Duration) {
        let (completed, posted) = self.handoff.progress();
        if completed == posted || completed != self.completed || self.handoff.is_returned() {
            (self.completed, self.since) = (completed, Instant::now());
        } else if self.since.elapsed() >= timeout {
            self.handoff.request_stall_check();
        }
    }
}

impl<N: Nic> Running<N> {
    fn recall(&self) {
        self.tx.iter().for_each(|slot| slot.handoff.recall());
        self.recall_rx();
    }

    fn recall_rx(&self) {
        self.rx.iter().for_each(|slot| slot.handoff.recall());
    }

    /// Recalls the queues that the device reported as broken and whose workers did not return them in time.
    fn recall_suspects(&mut self) {
        let Self { tx, rx, suspects, .. } = self;
        suspects.retain(|(id, since)| {
            if since.elapsed() < WORKER_FAULT_TIMEOUT {
                return true;
            }
            // A queue that was recreated meanwhile has another ID.
            tx.iter().filter(|slot| slot.id == Some(*id)).for_each(|slot| slot.handoff.recall());
            rx.iter().filter(|slot| slot.id == Some(*id)).for_each(|slot| slot.handoff.recall());
            false
        });
    }

    fn all_returned(&self) -> bool {
        self.tx.iter().all(|slot| slot.handoff.is_returned()) && self.rx.iter().all(|slot| slot.handoff.is_returned())
    }

    /// Destroys the returned rings and everything that they share.
    fn tear_down(&mut self) {
        self.tx.iter().for_each(|slot| drop(slot.handoff.take_returned()));
        self.rx.iter().for_each(|slot| drop(slot.handoff.take_returned()));
        self.drop_rss_group();
        self.memory = None;
    }

    /// Drops the RSS group and the leases that depend on it. All rings must have been returned.
    fn drop_rss_group(&mut self) {
        self.sharing.drop_queues();
        self.rss_group = None;
        self.sharing.end_leases();
    }

    /// Tells the workers that their rings will not return.
    fn mark_lost(&self) {
        self.tx.iter().filter(|slot| slot.handoff.is_returned()).for_each(|slot| slot.handoff.mark_lost());
        self.rx.iter().filter(|slot| slot.handoff.is_returned()).for_each(|slot| slot.handoff.mark_lost());
    }

    fn install_rx(&mut self, created: NewRxQueues<N>) {
        self.rss_group = Some(created.rss_group);
        self.sharing.rebuilt(created.shared);
        self.rx.iter_mut().zip(created.queues).for_each(|(slot, queue)| slot.hand_off(queue));
    }
}

fn open<N: Nic>(selector: &DeviceSelector, rdma_port: &RdmaPort) -> Result<OpenDevice<N::Verbs>> {
    // Clients map the memory of their queues, so that it must be shareable.
    OpenDevice::open(N::open(&rdma_port.device)?, rdma_port, selector.attach.is_some(), N::verbs)
}

impl<N: SharedNic> NicDevice<N> {
    pub(crate) fn open(selector: DeviceSelector, options: N::Options) -> std::result::Result<Self, PortError> {
        let rdma_port = N::PROBE.find(&selector)?;
        let Some(claim) = Claim::new(&rdma_port) else {
            let reason =
                format!("port {} of {} is already open in this process", rdma_port.port, rdma_port.device.name());
            return Err(PortError::Refused { driver: N::PROBE.driver, device: selector.device, reason });
        };
        let opened = open::<N>(&selector, &rdma_port).and_then(|opened| {
            let nic = N::probe(options, &opened)?;
            let state = opened.port()?.state;
            Ok((opened, nic, state))
        });
        let (opened, nic, state) = opened.map_err(|error| N::PROBE.refused(&selector.device, error))?;
        let interface = KernelInterface::new(&rdma_port);
        Ok(Self {
            selector,
            rdma_port,
            _claim: claim,
            nic,
            opened: Some(opened),
            running: None,
            out_of_buffer: None,
            counters: Default::default(),
            health: Health::Healthy,
            link: link_state(state),
            resets: ResetCounts::default(),
            quarantine: Quarantine::default(),
            server: None,
            interface,
        })
    }

    /// Returns the NIC.
    pub(crate) fn nic(&self) -> &N {
        &self.nic
    }

    /// Creates all queues and hands them to the workers that own them.
    fn build(&mut self) -> Result<()> {
        let Self { nic, rdma_port, quarantine, opened, running, .. } = self;
        let (Some(opened), Some(running)) = (opened, running) else { return Ok(()) };
        let memory = nic.register(opened, &running.config.pool)?;
        let Running { config, template, .. } = &*running;
        let context = QueueContext { opened, rdma_port, memory: &memory, config, template, quarantine };
        // Send queues first: creating one claims the port on NICs where ports are claimed.
        let send = (0..running.tx.len()).map(|index| nic.create_tx(&context, index)).collect::<Result<Vec<_>>>()?;
        let receive = if running.rx.is_empty() { None } else { Some(nic.create_rx(&context, 0)?) };
        running.memory = Some(memory);
        if let Some(created) = receive {
            running.install_rx(created);
        }
        running.tx.iter_mut().zip(send).for_each(|(slot, created)| slot.hand_off(created));
        Ok(())
    }

    /// Recreates broken queues. Send queues are recreated one by one. Receive queues are restarted in place
    /// if possible; otherwise all are recreated, because they share the RSS objects.
    fn repair(&mut self) -> Result<()> {
        let Self { nic, rdma_port, quarantine, resets, selector, .. } = self;
        let (Some(opened), Some(running)) = (&self.opened, &mut self.running) else { return Ok(()) };
        running.recall_suspects();
        if self.link == LinkState::Up && selector.tx_timeout > Duration::ZERO {
            running.tx.iter_mut().for_each(|slot| slot.check_stall(selector.tx_timeout));
        }
        let name = &selector.device;
        for index in 0..running.tx.len() {
            let slot = &mut running.tx[index];
            if !slot.handoff.is_returned() {
                continue;
            }
            let ring = slot.handoff.take_returned();
            if let Some(fault) = slot.handoff.take_fault() {
                resets.count(&format_args!("{name}: transmit queue {index}"), fault, slot.count_tx_reset());
                if fault == QueueFault::Stalled && slot.futile.count >= MAX_STALLS {
                    resets.stalled = Some(format!("transmit queue {index} stalled again after its reset: {fault}"));
                }
                nic.adapt_to_fault(fault, Direction::Transmit);
                slot.unsent = ring.map(|ring| ring.take_unsent(fault)).unwrap_or_default();
            } else {
                drop(ring);
            }
            let Some(memory) = &running.memory else { return Ok(()) };
            let Running { config, template, .. } = &*running;
            let mut created =
                nic.create_tx(&QueueContext { opened, rdma_port, memory, config, template, quarantine }, index)?;
            let slot = &mut running.tx[index];
            created.ring.set_backlog(take(&mut slot.unsent));
            slot.hand_off(created);
        }
        for (index, slot) in running.rx.iter_mut().enumerate() {
            // Happens once per fault: a taken ring is not there at the next call.
            if let Some(fault) = slot.handoff.fault()
                && let Some(ring) = slot.handoff.take_returned()
                && let Some(ring) = nic.restart(ring, fault)
            {
                resets.count(&format_args!("{name}: receive queue {index}"), fault, slot.count_rx_reset());
                slot.handoff.hand_off(ring);
            }
        }
        let broken = running.rx.iter().any(|slot| slot.handoff.is_returned());
        if broken && !running.sharing.rebuild_due && running.sharing.requested > 0 {
            // Shared queues are part of the same RSS objects and end with them.
            if let Some(server) = &mut self.server {
                server.evict(&mut running.sharing);
            }
        }
        if running.sharing.rebuild_due && !broken && !running.rx.is_empty() {
            let Running { config, template, sharing, memory: Some(memory), .. } = running else { return Ok(()) };
            let shared = usize::from(sharing.requested);
            let created = match nic
                .update_rss(&QueueContext { opened, rdma_port, memory, config, template, quarantine }, shared)
            {
                Some(Err(error)) if shared > 0 => {
                    tracing::warn!("{name}: receive queues for a client could not be created: {error}");
                    Some(Vec::new())
                }
                Some(Err(error)) => {
                    tracing::warn!("{name}: the receive queues are recreated: {error}");
                    None
                }
                Some(Ok(created)) => Some(created),
                None => None,
            };
            if let Some(created) = created {
                // RSS no longer delivers to the queues that were shared before.
                sharing.drop_queues();
                sharing.end_leases();
                sharing.rebuilt(created);
            }
        }
        if running.sharing.rebuild_due || broken {
            running.recall_rx();
        }
        let some = running.sharing.rebuild_due || !running.rx.is_empty();
        if some && running.rx.iter().all(|slot| slot.handoff.is_returned()) {
            for (index, slot) in running.rx.iter_mut().enumerate() {
                if let Some(fault) = slot.handoff.take_fault() {
                    resets.count(&format_args!("{name}: receive queue {index}"), fault, slot.count_rx_reset());
                    nic.adapt_to_fault(fault, Direction::Receive);
                }
                drop(slot.handoff.take_returned());
            }
            running.drop_rss_group();
            let Some(memory) = &running.memory else { return Ok(()) };
            let Running { config, template, sharing, .. } = &*running;
            let context = QueueContext { opened, rdma_port, memory, config, template, quarantine };
            let shared = usize::from(sharing.requested);
            let created = match shared {
                0 if running.rx.is_empty() => None,
                0 => Some(nic.create_rx(&context, 0)?),
                _ => match nic.create_rx(&context, shared) {
                    Ok(created) => Some(created),
                    Err(error) => {
                        tracing::warn!("{name}: receive queues for a client could not be created: {error}");
                        if running.rx.is_empty() { None } else { Some(nic.create_rx(&context, 0)?) }
                    }
                },
            };
            match created {
                Some(created) => running.install_rx(created),
                None => running.sharing.rebuilt(Vec::new()),
            }
        }
        Ok(())
    }

    /// Serves the attached clients.
    fn serve_clients(&mut self) {
        let Self {
            nic,
            rdma_port,
            quarantine,
            selector,
            opened: Some(opened),
            running: Some(running),
            server: Some(server),
            ..
        } = self
        else {
            return;
        };
        let Running { config, template, memory: Some(memory), sharing, tx, rx, .. } = running else { return };
        let status = Status {
            device: selector.device.clone(),
            driver: N::PROBE.driver.to_owned(),
            mode: nic.capabilities(Capabilities::plain(N::PROBE.driver, &selector.device)).mode,
            port: config.id.number(),
            mtu: config.mtu,
            process: std::process::id(),
            tx: tx.iter().map(|slot| QueueStatus::of(&slot.counters)).collect(),
            rx: rx.iter().map(|slot| QueueStatus::of(&slot.counters)).collect(),
            pool: PoolStatus {
                name: config.pool.name().to_owned(),
                buffers: config.pool.capacity(),
                free: config.pool.available(),
            },
            offered: AttachRequest { tx_queues: 0, rx_queues: 0, buffers: 0 },
            attached: 0,
            attached_ever: 0,
            lost: 0,
        };
        let context = QueueContext { opened, rdma_port, memory, config, template, quarantine };
        server.serve(&mut ServeContext { nic, context, sharing, status: &status });
    }

    /// Reads asynchronous events of the device. Returns true if the device is broken.
    fn read_events(&mut self, events: &mut Vec<PortEvent>) -> bool {
        let Some(opened) = &mut self.opened else { return false };
        let mut look = false;
        loop {
            match opened.events.next_event() {
                Ok(Some(event)) => match (event.kind, event.element) {
                    (EventKind::DeviceFatal, _) => return true,
                    (EventKind::PortActive | EventKind::PortDown, Element::Port(port))
                        if port == self.rdma_port.port =>
                    {
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
                        // All rings are recalled. Searching for the affected one is not worth it: such a CQ
                        // never works again, and the event is rare.
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
            tracing::info!("{}: link {}", self.selector.device, Link { state: self.link, speed: None });
        }
        false
    }

    /// Reports the device as lost. `port::reattach` takes the queues back, stops the device and starts it again.
    fn lose(&mut self, why: &str, events: &mut Vec<PortEvent>) {
        (self.health, self.link) = (Health::Away, LinkState::Down);
        if let (Some(server), Some(running)) = (&mut self.server, &mut self.running) {
            server.end(&mut running.sharing, &format!("the device {why}; attach again after its recovery"));
        }
        let (device, name) = (&self.selector.device, self.rdma_port.device.name());
        let (driver, port) = (N::PROBE.driver, self.rdma_port.port);
        events.push(PortEvent::Lost(format!("{driver} port {device} (port {port} of {name}): the device {why}")));
    }

    /// Ends the port: a queue does not work in spite of resets.
    fn give_up(&mut self, why: &str, events: &mut Vec<PortEvent>) {
        self.health = Health::Failed;
        if let (Some(server), Some(running)) = (&mut self.server, &mut self.running) {
            server.end(&mut running.sharing, "the port has failed");
        }
        if self.link == LinkState::Up {
            self.link = LinkState::Down;
            events.push(PortEvent::Link(Link::DOWN));
        }
        events.push(PortEvent::Lost(format!("{} port {why}", N::PROBE.driver)));
        if let Some(running) = &self.running {
            running.recall();
        }
    }

    /// Opens the device if it is closed, creates all queues and returns the workers' ends of them.
    fn begin(&mut self, config: &PortConfig) -> std::result::Result<Queues, PortError> {
        if self.opened.is_none() {
            let reported = self.rdma_port.mac;
            self.rdma_port = N::PROBE.find(&self.selector)?;
            if self.interface.monitor.is_some() {
                // Changes are compared with what was reported before the device went away.
                self.rdma_port.mac = reported;
            }
            let opened = open::<N>(&self.selector, &self.rdma_port).map_err(|error| self.failed(error))?;
            self.link = link_state(opened.port().map_err(|error| self.failed(error))?.state);
            self.opened = Some(opened);
        }
        let template = config.pool.meta_template().in_port(config.id);
        let [send, receive] = &self.counters;
        self.running = Some(Running {
            config: config.clone(),
            template,
            tx: send.iter().map(RingSlot::new).collect(),
            rx: receive.iter().map(RingSlot::new).collect(),
            memory: None,
            rss_group: None,
            sharing: RxSharing::default(),
            suspects: Vec::new(),
        });
        if let Err(error) = self.build() {
            self.running = None;
            return Err(self.failed(error));
        }
        if let (Some(offer), None) = (&self.selector.attach, &self.server) {
            let shared = config.pool.region().descriptor().is_some();
            let listening = if shared { AttachServer::listen(offer) } else { Err(std::io::Error::other(NOT_SHARED)) };
            self.server = Some(listening.map_err(|error| {
                self.running = None;
                let reason = format!("cannot listen for clients on {}: {error}", offer.socket.display());
                PortError::Refused { driver: N::PROBE.driver, device: self.selector.device.clone(), reason }
            })?);
        }
        self.health = Health::Healthy;
        let Some(running) = &self.running else { return Ok(Queues::default()) };
        let mut queues = Queues::default();
        for slot in &running.tx {
            let mut sender = NicTxQueue::new(Arc::clone(&slot.handoff), config.pool.clone(), config.mtu);
            sender.set_counters(Arc::clone(&slot.counters));
            queues.tx.push(Box::new(sender));
        }
        for slot in &running.rx {
            let mut receiver = NicRxQueue::new(Arc::clone(&slot.handoff), config.pool.clone(), template);
            receiver.set_counters(Arc::clone(&slot.counters));
            queues.rx.push(Box::new(receiver));
        }
        Ok(queues)
    }

    fn failed(&self, error: Error) -> PortError {
        if self.health == Health::Away && is_device_gone(&error) {
            let hint = error.to_string();
            return PortError::NoDevice { driver: N::PROBE.driver, device: self.selector.device.clone(), hint };
        }
        N::PROBE.refused(&self.selector.device, error)
    }
}

/// Starts to monitor the kernel's interface of a port. `None` if there is no such interface in this namespace.
fn monitor(rdma_port: &RdmaPort) -> Option<LinkMonitor> {
    let name = rdma_port.interface()?.name;
    LinkMonitor::new(&Interface::by_name(&name, &mut Netlink::route().ok()?)?).ok()
}

fn link_state(state: PortState) -> LinkState {
    if state == PortState::Active { LinkState::Up } else { LinkState::Down }
}

/// Returns true if a call failed because the device is gone.
fn is_device_gone(error: &Error) -> bool {
    matches!(error, Error::Call(call) if call.cause == Cause::DeviceLost)
}

impl<N: SharedNic> Device for NicDevice<N> {
    fn capabilities(&self) -> Capabilities {
        let interface = self.rdma_port.interface();
        let mut caps = self.nic.capabilities(Capabilities {
            mac: self.rdma_port.mac,
            mtu: interface.as_ref().and_then(|interface| interface.mtu),
            interface: interface.map(|interface| interface.name),
            numa_node: self.rdma_port.device.numa_node(),
            vlan_tags: VlanTags::Kept,
            ..Capabilities::plain(N::PROBE.driver, &self.selector.device)
        });
        if let (Some(running), Some(opened)) = (&self.running, &self.opened) {
            let bytes: usize = opened.allocator.usage().iter().map(|usage| usage.bytes).sum();
            let [send, receive] = self.nic.depths(&running.config);
            caps.mode +=
                &format!(", {send} transmit and {receive} receive descriptors, {} KiB of queue memory", bytes >> 10);
            if let Some(region) = opened.allocator.regions().unwrap_or_default().first() {
                caps.mode += &format!(" in {}", region.backing);
            }
            if let Some(bifurcation) = &running.config.bifurcation {
                caps.mode += ", tunnel packets only";
                if bifurcation.later_fragments {
                    caps.notes
                        .push("fragments of UDP tunnel packets stay with the kernel: flow rules compare ports".into());
                }
            }
        }
        caps
    }

    fn check(&mut self, config: &PortConfig) -> std::result::Result<(), PortError> {
        let limits = self.capabilities();
        config.check(&limits)?;
        if config.bifurcation.is_some() && limits.interface.is_none() {
            let reason = "the kernel has no interface on this port to which other packets could be left".to_owned();
            return Err(PortError::Refused { driver: limits.driver, device: limits.device, reason });
        }
        Ok(())
    }

    fn start(&mut self, config: &PortConfig) -> std::result::Result<Queues, PortError> {
        (self.health, self.resets) = (Health::Healthy, ResetCounts::default());
        self.counters = [config.tx_queues, config.rx_queues].map(|n| (0..n).map(|_| Arc::default()).collect());
        self.nic.reset_state();
        self.out_of_buffer = PortCounter::out_of_buffer(&self.rdma_port.device.sysfs(), self.rdma_port.port);
        self.begin(config)
    }

    fn can_return(&self) -> bool {
        self.health != Health::Failed
    }

    /// Keeps the rules, which the new queues get, and the server for clients.
    fn restart(&mut self, config: &PortConfig) -> std::result::Result<Queues, PortError> {
        let started = self.begin(config);
        match &started {
            Ok(_) => self.resets.device += 1,
            // What was opened may be as broken as before.
            Err(_) => self.opened = None,
        }
        started
    }

    fn stop(&mut self, queues: Queues) -> std::result::Result<(), PortError> {
        // Waits until accepted packets are sent, up to the timeout. The others are dropped.
        let healthy = self.health == Health::Healthy;
        let reason = if healthy { DropReason::Stopping } else { DropReason::DeviceLost };
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        for queue in queues.tx {
            if let Ok(mut sender) = queue.into_any().downcast::<NicTxQueue<N::Tx>>() {
                while healthy && !sender.is_idle() && Instant::now() < deadline {
                    std::thread::yield_now();
                }
                sender.count_in_flight(reason);
            }
        }
        for slot in self.running.iter_mut().flat_map(|running| &mut running.tx) {
            // No new ring took them.
            let unsent = take(&mut slot.unsent);
            let bytes = unsent.iter().map(|packet| packet.len() as u64).sum();
            slot.counters.count_unsent(reason, unsent.len() as u64, bytes);
        }
        // Rings drop with the workers' queues and the handoffs. The last of them, or the RSS group, destroys
        // the hardware queue.
        drop(queues.rx);
        if let Some(running) = &mut self.running {
            // Clients of a lost device know, and may attach again when it is back.
            if let Some(mut server) = self.server.take_if(|_| self.health != Health::Away) {
                server.end(&mut running.sharing, "the port was stopped");
            }
            running.drop_rss_group();
        }
        self.running = None;
        if self.health != Health::Healthy {
            self.opened = None;
        }
        Ok(())
    }

    fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> std::result::Result<(), PortError> {
        // Queues that are created later have the packets of their configuration, also after an error.
        let Some(running) = &mut self.running else { return Ok(()) };
        running.config.bifurcation = Some(bifurcation.clone());
        if running.rss_group.is_none() || self.health != Health::Healthy {
            return Ok(());
        }
        match self.nic.set_bifurcation(bifurcation) {
            Err(error) if !is_device_gone(&error) => Err(N::PROBE.refused(&self.selector.device, error)),
            _ => Ok(()),
        }
    }

    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.nic.rules()
    }

    fn read_clock(&mut self) -> Option<u64> {
        let opened = self.opened.as_ref().filter(|_| self.health == Health::Healthy)?;
        self.nic.read_clock(opened)
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }
}

impl<N: SharedNic> DeviceLink for NicDevice<N> {
    fn link(&mut self) -> Link {
        match self.opened.as_ref().filter(|_| self.health == Health::Healthy).map(OpenDevice::port) {
            Some(Ok(port)) => Link { state: link_state(port.state), speed: port.speed },
            _ => Link::DOWN,
        }
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let mut events = Vec::new();
        match self.health {
            Health::Healthy => {
                let broken = self.read_events(&mut events)
                    || self.repair().is_err_and(|error| {
                        if self.resets.log.permit().is_some() {
                            tracing::warn!("{}: a queue could not be recreated: {error}", self.selector.device);
                        }
                        is_device_gone(&error)
                    });
                if broken {
                    self.lose("reported a fatal error", &mut events);
                } else if let Some(why) = self.resets.stalled.take() {
                    self.lose(&format!("does not send: {why}"), &mut events);
                } else if let Some(why) = self.resets.failure.take() {
                    self.give_up(&why, &mut events);
                } else {
                    self.serve_clients();
                    if self.running.as_ref().is_some_and(|running| running.config.bifurcation.is_some()) {
                        self.interface.follow(&mut self.rdma_port, &mut events);
                    }
                }
            }
            Health::Away => {}
            Health::Failed => {
                if let Some(running) = &mut self.running {
                    // Without rules the kernel gets the packets.
                    if running.all_returned() {
                        running.tear_down();
                    }
                    running.mark_lost();
                }
            }
        }
        events
    }
}

impl<N: SharedNic> DeviceStatistics for NicDevice<N> {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let ResetCounts { queues, device, stalls, .. } = self.resets;
        let mut figures = vec![
            ("queue_resets", queues),
            ("device_resets", device),
            ("queue_stalls", stalls),
            ("buried_packets", self.quarantine.count()),
        ];
        if let Some(server) = &self.server {
            let [attached, ever, lost] = server.counts();
            figures.extend([("attached_processes", attached), ("attachments", ever), ("attachments_lost", lost)]);
        }
        figures
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        self.out_of_buffer.iter_mut().map(|counter| (DropReason::RxFull, counter.read())).collect()
    }

    fn uncounted_drops(&self) -> Vec<DropReason> {
        if self.out_of_buffer.is_some() { Vec::new() } else { vec![DropReason::RxFull] }
    }
}
