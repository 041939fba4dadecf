//! The port: starts and stops its queues, and mends them while it runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wirepath_nic_defs::mlx5::{ETH_L2_INLINE, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH};
use wirepath_verbs::mlx5::Mlx5Capabilities;
use wirepath_verbs::{Cause, DeviceAttributes, Element, Error, EventKind, ObjectId, PortState};

use super::fault::Fault;
use super::find::{Found, find, refused};
use super::hardware::{Hardware, ReceivePlan, Registered};
use super::rx::{Layout, ReceiveMode, ReceiveRing, Receiver, Spread, buffers_for};
use super::steering::Whose;
use super::tx::{SendMode, SendRing, Sender};
use super::wqe::MAX_PIECES;
use super::{Compress, Exchange, NAME, Options, Receive};
use crate::packet::{Blank, DATA_ROOM, MAX_PACKET};
use crate::port::{
    Capabilities, Device, Link, LinkState, MacAddress, Offloads, PortConfig, PortError, PortEvent, Queues, VlanTags,
};

/// Most queues each way that are offered.
const MAX_QUEUES: u32 = 256;
/// Largest MTU (linux: drivers/net/ethernet/mellanox/mlx5/core/en_main.c takes what firmware takes, about 9978).
const MAX_MTU: u16 = 9900;
/// Fewest and most entries of a ring. A receive ring of more would count beyond its doorbell record.
const MIN_DEPTH: u32 = 64;
const MAX_DEPTH: u32 = 1 << 15;
/// Headers and tags on top of the MTU.
const OVERHEAD: usize = 14 + 8;
/// Strides of a work request, as a logarithm: as many as its largest size has room for segments, less the first.
const MAX_LOG_STRIDES: u32 = 4;
/// Part numbers of ConnectX-4 and ConnectX-4 Lx, physical and virtual, which want the link-layer header in every descriptor
/// (dpdk: drivers/net/mlx5/mlx5.c, mlx5_set_min_inline).
const WANT_INLINE: std::ops::RangeInclusive<u32> = 0x1013..=0x1016;

/// What was chosen of what the device can do, and what was not and why.
#[derive(Clone, Debug)]
struct Modes {
    send: SendMode,
    layout: Receive,
    /// Strides of a work request, logarithm.
    log_strides: u32,
    format: Option<u8>,
    tick: u64,
    strip: bool,
    checksums: bool,
    notes: Vec<String>,
}

impl Modes {
    fn choose(options: &Options, can: &Mlx5Capabilities, attributes: &DeviceAttributes) -> Self {
        let mut notes = vec![
            "no flow rules in this hardware yet: all of them run in software".to_owned(),
            format!("frames end at an MTU of {MAX_MTU}, or where the kernel's interface ends them"),
        ];
        let wants = if WANT_INLINE.contains(&attributes.part_id) { ETH_L2_INLINE } else { 0 };
        let inline_minimum = options.min_inline.unwrap_or(wants);
        if options.multi_packet && !can.multi_packet {
            notes.push("one send descriptor for each packet: the device has no multi-packet descriptors".to_owned());
        }
        let mut layout = options.receive;
        let mut log_strides = 0;
        if layout == Receive::Striding {
            let fits = can.striding.as_ref().filter(|can| can.log_bytes.contains(&DATA_ROOM.ilog2()));
            let least = fits.map(|can| *can.log_strides.start()).filter(|least| *least <= MAX_LOG_STRIDES);
            match (least, fits) {
                (Some(least), Some(can)) => log_strides = MAX_LOG_STRIDES.min(*can.log_strides.end()).max(least),
                _ => {
                    notes.push(format!(
                        "linear receive queue: the device has no work requests of up to {} strides of {DATA_ROOM} bytes",
                        1 << MAX_LOG_STRIDES
                    ));
                    layout = Receive::Linear;
                }
            }
        }
        let formats = can.compression.map_or(0, |can| can.formats);
        let wanted = match (options.compress, layout) {
            _ if options.timestamps => None,
            (Compress::Off, _) => None,
            (_, Receive::Striding) => Some(MINI_FORMAT_CSUM_STRIDE),
            (Compress::Checksum, _) => Some(MINI_FORMAT_CSUM),
            _ => Some(MINI_FORMAT_HASH),
        };
        let format = wanted.filter(|format| formats & u32::from(*format) != 0);
        if wanted != format {
            notes.push("one completion for each packet: the device cannot compress them in this format".to_owned());
        }
        let tick = if options.timestamps && attributes.clock_khz > 0 {
            // Nanoseconds of a tick in 32.32 bits.
            (1_000_000u64 << 32) / attributes.clock_khz
        } else {
            0
        };
        if options.timestamps && tick == 0 {
            notes.push("no timestamps: the device does not tell how fast its clock runs".to_owned());
        }
        if !attributes.raw_packet.vlan_strip {
            notes.push("VLAN tags stay in received frames: the device does not take them off".to_owned());
        }
        Self {
            send: SendMode {
                inline_minimum,
                inline: options.inline,
                multi_packet: options.multi_packet && can.multi_packet && inline_minimum == 0 && options.inline == 0,
                max_tso: (attributes.max_tso as usize).min(MAX_PACKET),
                tunnels: can.tunnels,
            },
            layout,
            log_strides,
            format,
            tick,
            strip: attributes.raw_packet.vlan_strip,
            checksums: attributes.raw_checksum,
            notes,
        }
    }

    /// The hash of a compressed completion is there in one format only.
    fn has_hash(&self) -> bool {
        self.format.is_none_or(|format| format == MINI_FORMAT_HASH)
    }

    /// In words.
    fn text(&self) -> String {
        let receive = match self.layout {
            Receive::Linear => "linear receive".to_owned(),
            Receive::Striding => format!("striding receive ({} strides of {DATA_ROOM} bytes)", 1 << self.log_strides),
        };
        let completions = match self.format {
            None => "plain completions",
            Some(MINI_FORMAT_HASH) => "completions compressed by hash",
            Some(MINI_FORMAT_CSUM) => "completions compressed by checksum",
            Some(_) => "completions compressed by stride",
        };
        let send = match self.send {
            SendMode { multi_packet: true, .. } => "multi-packet send".to_owned(),
            SendMode { inline_minimum: 0, inline: 0, .. } => "send by pointer".to_owned(),
            SendMode { inline_minimum, inline, .. } => {
                format!("send with {} bytes inline", inline.max(inline_minimum))
            }
        };
        format!("direct verbs, {receive}, {completions}, {send}")
    }
}

/// A port that was opened.
pub(super) struct Mlx5Device {
    options: Options,
    found: Found,
    /// `None` while the device is away.
    hardware: Option<Hardware>,
    limits: Limits,
    modes: Modes,
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
    memory: Option<Registered>,
    /// Which queue pair each transmit queue has, and which work queue each receive queue.
    pairs: Vec<ObjectId>,
    work_queues: Vec<ObjectId>,
    /// Queues that the device says are broken. Their workers see it, and know more of it, unless they never look.
    suspects: Vec<(ObjectId, Instant)>,
}

#[derive(Default)]
struct Resets {
    queues: u64,
    device: u64,
}

impl Running {
    fn longest(&self) -> usize {
        usize::from(self.config.mtu) + OVERHEAD
    }

    fn layout(&self, modes: &Modes) -> Layout {
        match modes.layout {
            Receive::Linear => Layout::Linear { buffers: buffers_for(self.longest()) },
            Receive::Striding => Layout::Striding { log: modes.log_strides },
        }
    }

    /// Work requests: a ring of long frames holds about as many buffers as one of short frames.
    fn receive_depth(&self, modes: &Modes) -> u32 {
        let buffers = self.layout(modes).buffers() as u32;
        let least = match modes.layout {
            Receive::Linear => MIN_DEPTH,
            // More than one at a time, so that the next is there when one is used up.
            Receive::Striding => (MIN_DEPTH >> modes.log_strides).max(4),
        };
        (self.config.depth / buffers).max(least).next_power_of_two().min(self.most)
    }

    fn send_depth(&self) -> u32 {
        self.config.depth.max(MIN_DEPTH).next_power_of_two().min(self.most)
    }

    fn plan(&self, modes: &Modes, mac: Option<MacAddress>) -> ReceivePlan<'_> {
        ReceivePlan {
            pool: &self.config.pool,
            blank: &self.blank,
            queues: self.config.rx_queues.into(),
            depth: self.receive_depth(modes),
            mode: ReceiveMode {
                layout: self.layout(modes),
                format: modes.format,
                tick: modes.tick,
                longest: self.longest() as u32,
            },
            whose: match mac {
                Some(mac) if !self.config.promiscuous => Whose::Ours(mac.octets()),
                _ => Whose::Everybodys,
            },
            strip: modes.strip,
        }
    }

    fn recall(&self) {
        self.tx.iter().for_each(|exchange| exchange.recall());
        self.recall_receivers();
    }

    /// Calls back the queues whose workers have not brought them, although the device said long ago that they are broken.
    fn suspect(&mut self) {
        let Self { tx, rx, pairs, work_queues, suspects, .. } = self;
        suspects.retain(|(id, since)| {
            if since.elapsed() < PATIENCE_WITH_WORKERS {
                return true;
            }
            // Of queues that were made anew meanwhile, nothing is known by that name.
            if let Some(exchange) = pairs.iter().position(|pair| pair == id).and_then(|at| tx.get(at)) {
                exchange.recall();
            }
            if work_queues.contains(id) {
                rx.iter().for_each(|exchange| exchange.recall());
            }
            false
        });
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
        self.memory = None;
    }
}

impl Mlx5Device {
    pub(super) fn open(options: Options) -> Result<Self, PortError> {
        let found = find(&options.device, options.port)?;
        let opened = Hardware::open(&found).and_then(|hardware| {
            hardware.probe()?;
            let attributes = hardware.attributes()?;
            let modes = Modes::choose(&options, &hardware.capabilities()?, &attributes);
            let state = hardware.port()?.state;
            Ok((hardware, attributes, modes, state))
        });
        let (hardware, attributes, modes, state) = opened.map_err(|error| refused(&options.device, error))?;
        let queues = attributes
            .max_queue_pairs
            .min(attributes.max_completion_queues / 2)
            .min(attributes.max_receive_work_queues);
        // A send ring has more blocks than packets.
        let depth = (attributes.max_work_requests / 2).min(attributes.max_completions).clamp(MIN_DEPTH, MAX_DEPTH);
        let limits = Limits {
            queues: queues.clamp(1, MAX_QUEUES) as u16,
            // The power of two below.
            depth: 1 << depth.ilog2(),
        };
        Ok(Self {
            options,
            found,
            hardware: Some(hardware),
            limits,
            modes,
            running: None,
            health: Health::Well,
            link: link_state(state),
            resets: Resets::default(),
        })
    }

    /// What the device takes over, in words.
    pub(super) fn abilities(&self) -> String {
        let mut words = vec!["VLAN", "segmentation", "RSS"];
        if self.modes.checksums {
            words.insert(0, "checksums");
        }
        if self.modes.send.tunnels != 0 {
            words.push("checksums in tunnels");
        }
        words.join(", ")
    }

    /// Makes all queues and gives them to the workers, to whom they belong.
    fn build(&mut self) -> Result<(), Error> {
        let (Some(hardware), Some(running)) = (&self.hardware, &mut self.running) else { return Ok(()) };
        let memory = hardware.register(&running.config.pool)?;
        let mut send = Vec::new();
        for index in 0..running.tx.len() {
            send.push(hardware.send(index, running.send_depth(), &memory, self.modes.send)?);
        }
        running.pairs = send.iter().map(|(_, id)| *id).collect();
        if !running.rx.is_empty() {
            let made = hardware.receive(&running.plan(&self.modes, self.found.mac), &memory)?;
            running.spread = Some(made.spread);
            running.work_queues = made.ids;
            running.rx.iter().zip(made.rings).for_each(|(exchange, ring)| exchange.hand_out(ring));
        }
        running.tx.iter().zip(send).for_each(|(exchange, (ring, _))| exchange.hand_out(ring));
        running.memory = Some(memory);
        Ok(())
    }

    /// Makes broken queues anew: a send queue by itself, receive queues all together, because they share rules and tables.
    fn mend(&mut self) -> Result<(), Error> {
        let (Some(hardware), Some(running)) = (&self.hardware, &mut self.running) else { return Ok(()) };
        running.suspect();
        let Some(memory) = &running.memory else { return Ok(()) };
        for (index, exchange) in running.tx.iter().enumerate().filter(|(_, exchange)| exchange.is_back()) {
            if let Some(fault) = exchange.fault() {
                tracing::warn!("{}: transmit queue {index} is made anew: {fault}", self.options.device);
                self.resets.queues += 1;
                learn(&self.options, &mut self.modes, fault);
            }
            drop(exchange.collect());
            let (ring, id) = hardware.send(index, running.send_depth(), memory, self.modes.send)?;
            if let Some(place) = running.pairs.get_mut(index) {
                *place = id;
            }
            exchange.hand_out(ring);
        }
        if running.rx.iter().any(|exchange| exchange.is_back()) {
            running.recall_receivers();
        }
        if !running.rx.is_empty() && running.rx.iter().all(|exchange| exchange.is_back()) {
            for (index, fault) in running.rx.iter().enumerate().filter_map(|(i, exchange)| Some((i, exchange.fault()?)))
            {
                tracing::warn!("{}: the receive queues are made anew: queue {index} had {fault}", self.options.device);
                self.resets.queues += 1;
            }
            running.rx.iter().for_each(|exchange| drop(exchange.collect()));
            running.spread = None;
            let made = hardware.receive(&running.plan(&self.modes, self.found.mac), memory)?;
            running.spread = Some(made.spread);
            running.work_queues = made.ids;
            running.rx.iter().zip(made.rings).for_each(|(exchange, ring)| exchange.hand_out(ring));
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
        let hardware = Hardware::open(&found).map_err(text)?;
        self.link = link_state(hardware.port().map_err(text)?.state);
        (self.found, self.hardware) = (found, Some(hardware));
        self.build().map_err(text)
    }

    fn failed(&self, error: Error) -> PortError {
        refused(&self.options.device, error)
    }
}

/// Draws a conclusion from an error: some devices want the link-layer header in every descriptor, which no verb tells.
fn learn(options: &Options, modes: &mut Modes, fault: Fault) {
    if fault.is_malformed() && options.min_inline.is_none() && modes.send.inline_minimum == 0 {
        modes.send.inline_minimum = ETH_L2_INLINE;
        modes.send.multi_packet = false;
        modes.notes.push(format!(
            "{ETH_L2_INLINE} bytes of each packet lie in its send descriptor: the device refused one without"
        ));
    }
}

fn link_state(state: PortState) -> LinkState {
    if state == PortState::Active { LinkState::Up } else { LinkState::Down }
}

/// Whether a call failed because the device is broken.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Call(call) if call.cause == Cause::DeviceGone)
}

impl Device for Mlx5Device {
    fn capabilities(&self) -> Capabilities {
        let modes = &self.modes;
        let mut mode = modes.text();
        if let (Some(running), Some(hardware)) = (&self.running, &self.hardware) {
            let bytes: usize = hardware.allocator().usage().iter().map(|usage| usage.bytes).sum();
            let regions = hardware.allocator().regions().unwrap_or_default();
            mode += &format!(
                ", rings of {} to send and {} to receive, {} KiB of queue memory",
                running.send_depth(),
                running.receive_depth(modes) as usize * running.layout(modes).buffers(),
                bytes >> 10
            );
            if let Some(region) = regions.first() {
                mode += &format!(" in {}", region.backing);
            }
        }
        let mut offloads = Offloads::RX_MARK
            .with(Offloads::RX_CHAINS)
            .with(Offloads::TX_VLAN_INSERT)
            .with(Offloads::TX_CHAINS)
            .with(Offloads::TX_METADATA);
        let mut more = |condition: bool, offload| {
            if condition {
                offloads = offloads.with(offload);
            }
        };
        more(modes.checksums, Offloads::RX_L3_CHECKSUM.with(Offloads::RX_L4_CHECKSUM));
        // What the device cannot do for a packet, the driver does.
        more(true, Offloads::TX_L3_CHECKSUM.with(Offloads::TX_L4_CHECKSUM));
        more(modes.send.tunnels != 0, Offloads::TX_TUNNEL_CHECKSUM);
        more(modes.strip, Offloads::RX_VLAN_STRIP);
        more(modes.has_hash(), Offloads::RX_HASH);
        more(modes.tick != 0, Offloads::RX_TIMESTAMP);
        more(modes.send.max_tso > 0, Offloads::TX_SEGMENT);
        Capabilities {
            mode,
            notes: modes.notes.clone(),
            mac: self.found.mac,
            max_rx_queues: self.limits.queues,
            max_tx_queues: self.limits.queues,
            max_mtu: MAX_MTU,
            // Rings that are asked to be deeper get as deep as they can.
            max_depth: MAX_DEPTH,
            offloads,
            max_tx_segments: MAX_PIECES as u16,
            numa_node: self.found.device.numa_node(),
            vlan_tags: VlanTags::Kept,
            ..Capabilities::plain(NAME, &self.options.device)
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        if self.hardware.is_none() {
            self.found = find(&self.options.device, self.options.port)?;
            self.hardware = Some(Hardware::open(&self.found).map_err(|error| self.failed(error))?);
        }
        (self.health, self.resets) = (Health::Well, Resets::default());
        let blank = config.pool.blank().in_port(config.id);
        self.running = Some(Running {
            config: config.clone(),
            blank,
            most: self.limits.depth,
            tx: (0..config.tx_queues).map(|_| Arc::new(Exchange::new())).collect(),
            rx: (0..config.rx_queues).map(|_| Arc::new(Exchange::new())).collect(),
            memory: None,
            spread: None,
            pairs: Vec::new(),
            work_queues: Vec::new(),
            suspects: Vec::new(),
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

/// How long a worker has to notice that its queue is broken, until it is asked for it.
const PATIENCE_WITH_WORKERS: Duration = Duration::from_millis(200);
/// How long a device is waited for after a fatal error, unless the configuration says otherwise.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
