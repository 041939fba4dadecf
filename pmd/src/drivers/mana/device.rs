//! The port: starts and stops its queues, and mends them while it runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wirepath_verbs::{Cause, Element, Error, EventKind, PortState};

use super::cq::Positions;
use super::exchange::Exchange;
use super::fault::Fault;
use super::find::{Found, find, refused};
use super::hardware::{Hardware, ReceivePlan};
use super::keys::Keys;
use super::rx::{ReceiveRing, Receiver, Spread, buffers_for};
use super::tx::{SendRing, Sender};
use super::wqe::MAX_SEGMENTS;
use super::{NAME, Options};
use crate::packet::Blank;
use crate::port::{
    Capabilities, Device, Link, LinkState, Offloads, PortConfig, PortError, PortEvent, Queues, VlanTags,
};

/// Most queues each way: entries of the indirection table.
const MAX_QUEUES: u32 = 64;
/// Largest MTU (dpdk: drivers/net/mana/mana.h; linux asks the device, which no verb does).
const MAX_MTU: u16 = 9000;
/// Fewest and most entries of a ring.
const MIN_DEPTH: u32 = 64;
const MAX_DEPTH: u32 = 1 << 15;
/// Resets of queues for completions out of order, after which positions are no longer looked at: then it is not the device that is wrong,
/// but what we think of its positions.
const PATIENCE_WITH_POSITIONS: u32 = 3;

/// A port that was opened.
pub(super) struct ManaDevice {
    options: Options,
    found: Found,
    /// `None` while the device is away.
    hardware: Option<Hardware>,
    limits: Limits,
    running: Option<Running>,
    health: Health,
    link: LinkState,
    resets: Resets,
}

/// What the device said when it was opened.
#[derive(Clone, Copy)]
struct Limits {
    queues: u16,
    depth: u32,
    /// The library, not the device, sets the limit.
    by_library: bool,
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
struct Running {
    config: PortConfig,
    blank: Blank,
    /// Most entries of a ring.
    most: u32,
    tx: Vec<Arc<Exchange<SendRing>>>,
    rx: Vec<Arc<Exchange<ReceiveRing>>>,
    spread: Option<Arc<Spread>>,
    keys: Option<Arc<Keys>>,
}

#[derive(Default)]
struct Resets {
    queues: u64,
    device: u64,
    out_of_order: u32,
}

impl Running {
    fn buffers(&self) -> usize {
        buffers_for(usize::from(self.config.mtu) + 14 + 8)
    }

    /// A ring of long frames holds about as many buffers as one of short frames.
    fn receive_depth(&self) -> u32 {
        let wanted = (self.config.depth / self.buffers() as u32).max(MIN_DEPTH);
        wanted.next_power_of_two().min(self.most)
    }

    fn send_depth(&self) -> u32 {
        self.config.depth.max(MIN_DEPTH).next_power_of_two().min(self.most)
    }

    fn plan(&self) -> ReceivePlan<'_> {
        ReceivePlan {
            pool: &self.config.pool,
            blank: &self.blank,
            queues: self.config.rx_queues.into(),
            depth: self.receive_depth(),
            buffers: self.buffers(),
        }
    }

    fn recall(&self) {
        self.tx.iter().for_each(|exchange| exchange.recall());
        self.recall_receivers();
    }

    fn recall_receivers(&self) {
        self.rx.iter().for_each(|exchange| exchange.recall());
    }

    fn all_back(&self) -> bool {
        self.tx.iter().all(|exchange| exchange.is_back()) && self.rx.iter().all(|exchange| exchange.is_back())
    }

    /// Destroys what the workers brought, and everything that the rings have in common.
    fn tear_down(&mut self) {
        self.tx.iter().for_each(|exchange| drop(exchange.collect()));
        self.rx.iter().for_each(|exchange| drop(exchange.collect()));
        self.spread = None;
        self.keys = None;
    }
}

impl Resets {
    fn positions(&self) -> Positions {
        if self.out_of_order < PATIENCE_WITH_POSITIONS { Positions::UNKNOWN } else { Positions::UNUSED }
    }

    fn count(&mut self, fault: Fault) {
        self.queues += 1;
        self.out_of_order += u32::from(fault == Fault::OutOfOrder);
    }
}

impl ManaDevice {
    pub(super) fn open(options: Options) -> Result<Self, PortError> {
        let found = find(&options.device, options.port)?;
        let opened = Hardware::open(&found, options.shared).and_then(|hardware| {
            let library = hardware.probe()?;
            let attributes = hardware.attributes()?;
            let state = hardware.port()?.state;
            Ok((hardware, library, attributes, state))
        });
        let (hardware, library, attributes, state) = opened.map_err(|error| refused(&options.device, error))?;
        let most = [attributes.max_queue_pairs, attributes.max_completion_queues / 2, MAX_QUEUES].into_iter().min();
        let depth = attributes.max_work_requests.min(attributes.max_completions).min(MAX_DEPTH);
        let limits = Limits {
            queues: most.unwrap_or(1).max(1) as u16,
            // The power of two below.
            depth: 1 << depth.min(library.unwrap_or(depth)).max(1).ilog2(),
            by_library: library.is_some(),
        };
        Ok(Self {
            options,
            found,
            hardware: Some(hardware),
            limits,
            running: None,
            health: Health::Well,
            link: link_state(state),
            resets: Resets::default(),
        })
    }

    /// Makes all queues and gives them to the workers, to whom they belong.
    fn build(&mut self) -> Result<(), Error> {
        let (Some(hardware), Some(running)) = (&self.hardware, &mut self.running) else { return Ok(()) };
        let positions = self.resets.positions();
        let keys = hardware.register(&running.config.pool)?;
        // Those that send first: they claim the port.
        let mut send = Vec::new();
        for index in 0..running.tx.len() {
            send.push(hardware.send(index, running.send_depth(), &keys, positions)?);
        }
        if !running.rx.is_empty() {
            let (spread, receive) = hardware.receive(&running.plan(), &keys, positions)?;
            running.spread = Some(spread);
            running.rx.iter().zip(receive).for_each(|(exchange, ring)| exchange.hand_out(ring));
        }
        running.tx.iter().zip(send).for_each(|(exchange, ring)| exchange.hand_out(ring));
        running.keys = Some(keys);
        Ok(())
    }

    /// Makes broken queues anew: a send queue by itself, receive queues all together, because one queue pair is in front of them all.
    fn mend(&mut self) -> Result<(), Error> {
        let (Some(hardware), Some(running)) = (&self.hardware, &mut self.running) else { return Ok(()) };
        let Some(keys) = running.keys.clone() else { return Ok(()) };
        for (index, exchange) in running.tx.iter().enumerate().filter(|(_, exchange)| exchange.is_back()) {
            if let Some(fault) = exchange.fault() {
                tracing::warn!("{}: transmit queue {index} is made anew: {fault}", self.options.device);
                self.resets.count(fault);
            }
            drop(exchange.collect());
            exchange.hand_out(hardware.send(index, running.send_depth(), &keys, self.resets.positions())?);
        }
        if running.rx.iter().any(|exchange| exchange.is_back()) {
            running.recall_receivers();
        }
        if !running.rx.is_empty() && running.rx.iter().all(|exchange| exchange.is_back()) {
            for (index, fault) in running.rx.iter().enumerate().filter_map(|(i, exchange)| Some((i, exchange.fault()?)))
            {
                tracing::warn!("{}: the receive queues are made anew: queue {index} had {fault}", self.options.device);
                self.resets.count(fault);
            }
            running.rx.iter().for_each(|exchange| drop(exchange.collect()));
            running.spread = None;
            let (spread, receive) = hardware.receive(&running.plan(), &keys, self.resets.positions())?;
            running.spread = Some(spread);
            running.rx.iter().zip(receive).for_each(|(exchange, ring)| exchange.hand_out(ring));
        }
        Ok(())
    }

    /// Reads what the device reports; `true`: it is broken.
    fn listen(&mut self, events: &mut Vec<PortEvent>) -> bool {
        let Some(hardware) = &mut self.hardware else { return false };
        let mut look = false;
        loop {
            match hardware.events().next_event() {
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
                    (EventKind::CompletionQueueError | EventKind::QueuePairFatal | EventKind::WorkQueueFatal, _) => {
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
            tracing::info!("{}: link {}", self.options.device, Link { state: self.link, speed: None });
        }
        false
    }

    /// The device is broken: nothing of it can be used any more. Its queues are called back.
    fn goes_away(&mut self, events: &mut Vec<PortEvent>) {
        tracing::warn!("{}: the device reports a fatal error; it is closed and waited for", self.options.device);
        self.health = Health::Away { since: Instant::now() };
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
            self.hardware = None;
            match self.reopen() {
                Ok(()) => {
                    tracing::info!("{}: the device is back", self.options.device);
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
                    self.hardware = None;
                    tracing::debug!("{}: not back yet: {why}", self.options.device);
                }
            }
        }
        if since.elapsed() >= self.options.patience {
            self.health = Health::Lost;
            let name = self.found.device.name();
            events.push(PortEvent::Lost(format!(
                "{NAME} port {} (port {} of {name}) reported a fatal error and did not come back within {} s",
                self.options.device,
                self.found.port,
                self.options.patience.as_secs()
            )));
        }
    }

    fn reopen(&mut self) -> Result<(), String> {
        let found = find(&self.options.device, self.options.port).map_err(|error| error.to_string())?;
        let text = |error: Error| error.to_string();
        let hardware = Hardware::open(&found, self.options.shared).map_err(text)?;
        self.link = link_state(hardware.port().map_err(text)?.state);
        (self.found, self.hardware) = (found, Some(hardware));
        self.build().map_err(text)
    }

    fn failed(&self, error: Error) -> PortError {
        refused(&self.options.device, error)
    }
}

fn link_state(state: PortState) -> LinkState {
    if state == PortState::Active { LinkState::Up } else { LinkState::Down }
}

/// Whether a call failed because the device is broken.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Call(call) if call.cause == Cause::DeviceGone)
}

impl Device for ManaDevice {
    fn capabilities(&self) -> Capabilities {
        let mut mode = "raw-packet queue pairs, direct verbs".to_owned();
        if let (Some(running), Some(hardware)) = (&self.running, &self.hardware) {
            let bytes: usize = hardware.allocator().usage().iter().map(|usage| usage.bytes).sum();
            let regions = hardware.allocator().regions().unwrap_or_default();
            mode += &format!(
                ", rings of {} to send and {} to receive, {} KiB of queue memory",
                running.send_depth(),
                running.receive_depth(),
                bytes >> 10
            );
            if let Some(region) = regions.first() {
                mode += &format!(" in {}", region.backing);
            }
        }
        let mut notes = vec![
            "no flow rules in this hardware: all of them run in software".to_owned(),
            format!("frames end at an MTU of {MAX_MTU}: no verb tells what the network allows"),
            "frames for other MAC addresses do not arrive: the hardware has no promiscuous mode".to_owned(),
            "VLAN tags are received without priority (PCP, DEI): completions have the number only".to_owned(),
        ];
        if self.limits.by_library {
            let most = self.limits.depth;
            notes.push(format!(
                "rings have at most {most} entries: libmana of rdma-core 44 takes no more, later ones do"
            ));
        }
        if self.resets.positions() == Positions::UNUSED {
            notes.push("positions in completions are not checked: they did not fit several times".to_owned());
        }
        Capabilities {
            mode,
            notes,
            mac: self.found.mac,
            max_rx_queues: self.limits.queues,
            max_tx_queues: self.limits.queues,
            max_mtu: MAX_MTU,
            // Rings that are asked to be deeper get as deep as they can; a note says so where that is shallow.
            max_depth: MAX_DEPTH,
            offloads: Offloads::RX_L3_CHECKSUM
                .with(Offloads::RX_L4_CHECKSUM)
                .with(Offloads::RX_VLAN_STRIP)
                .with(Offloads::RX_HASH)
                .with(Offloads::RX_CHAINS)
                .with(Offloads::TX_L3_CHECKSUM)
                .with(Offloads::TX_L4_CHECKSUM)
                .with(Offloads::TX_VLAN_INSERT)
                .with(Offloads::TX_SEGMENT)
                .with(Offloads::TX_CHAINS),
            max_tx_segments: MAX_SEGMENTS as u16,
            numa_node: self.found.device.numa_node(),
            vlan_tags: VlanTags::Kept,
            ..Capabilities::plain(NAME, &self.options.device)
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        if self.hardware.is_none() {
            self.found = find(&self.options.device, self.options.port)?;
            let hardware = Hardware::open(&self.found, self.options.shared).map_err(|error| self.failed(error))?;
            self.hardware = Some(hardware);
        }
        (self.health, self.resets) = (Health::Well, Resets::default());
        let blank = config.pool.blank().in_port(config.id);
        self.running = Some(Running {
            config: config.clone(),
            blank,
            most: self.limits.depth,
            tx: (0..config.tx_queues).map(|_| Arc::new(Exchange::new())).collect(),
            rx: (0..config.rx_queues).map(|_| Arc::new(Exchange::new())).collect(),
            keys: None,
            spread: None,
        });
        if let Err(error) = self.build() {
            self.running = None;
            return Err(self.failed(error));
        }
        let Some(running) = &self.running else { return Ok(Queues::default()) };
        let mut queues = Queues::default();
        for exchange in &running.tx {
            queues.tx.push(Box::new(Sender::new(Arc::clone(exchange), config.pool.clone(), config.mtu)));
        }
        for exchange in &running.rx {
            queues.rx.push(Box::new(Receiver::new(Arc::clone(exchange), config.pool.clone(), blank)));
        }
        Ok(queues)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        // What was accepted is sent, as far as the device does so in time.
        if matches!(self.health, Health::Well) {
            let deadline = Instant::now() + DRAIN;
            for queue in queues.tx {
                if let Ok(mut sender) = queue.into_any().downcast::<Sender>() {
                    while !sender.is_idle() && Instant::now() < deadline {
                        std::thread::yield_now();
                    }
                }
            }
        }
        // The rings go with the workers' ends and the exchanges; the last of them, or the spreader, stops the hardware.
        drop(queues.rx);
        self.running = None;
        if !matches!(self.health, Health::Well) {
            self.hardware = None;
        }
        Ok(())
    }

    fn link(&mut self) -> Link {
        match self.hardware.as_ref().filter(|_| matches!(self.health, Health::Well)).map(Hardware::port) {
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
                        tracing::warn!("{}: a queue could not be made anew: {error}", self.options.device);
                        is_gone(&error)
                    });
                if broken {
                    self.goes_away(&mut events);
                }
            }
            Health::Away { since } => self.return_from(since, &mut events),
            Health::Lost => {
                if let Some(running) = &mut self.running {
                    running.tx.iter().filter(|exchange| exchange.is_back()).for_each(|exchange| exchange.lose());
                    running.rx.iter().filter(|exchange| exchange.is_back()).for_each(|exchange| exchange.lose());
                }
            }
        }
        events
    }

    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        vec![("queue_resets", self.resets.queues), ("device_resets", self.resets.device)]
    }
}

/// How long packets that are on their way are waited for when a port stops.
const DRAIN: Duration = Duration::from_millis(200);

/// How long a device is waited for after a fatal error, unless the configuration says otherwise.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
