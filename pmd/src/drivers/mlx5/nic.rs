//! What an mlx5 can do, and the verbs objects of its queues.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use wirepath_memory::{BufferAllocator, Doorbell};
use wirepath_nic_defs::mlx5::UAR_ARM;
use wirepath_verbs::mlx5::Mlx5;
use wirepath_verbs::{
    CompletionQueue, CompletionQueueOptions, Context, Device, Error, Fate, ObjectId, ProtectionDomain, Provider,
    RawPacketQp, RawPacketQpOptions, Result, RssQp, WorkQueue, WorkQueueOptions,
};

use super::lent::Registers;
use super::modes::Modes;
use super::offload::MAX_TSO_HEADER;
use super::rules::Way;
use super::rx::{Layout, ReceivePlace, ReceiveRing, Waker};
use super::tx::{self, SendPlace, SendRing};
use super::wqe::MAX_PIECES;
use super::{NAME, Options, lent};
use crate::drivers::direct::attach::Lent;
use crate::drivers::direct::bell::Bell;
use crate::drivers::direct::device::{Direction, Made, Nic, Parts, Receivers};
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::find::Who;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::opened::{self, odd_ring};
use crate::drivers::direct::receive::Spread;
use crate::drivers::direct::registered::Registered;
use crate::drivers::direct::rules::Rules;
use crate::drivers::direct::steering::{MakePair, Steering, Whose, spread};
use crate::drivers::direct::{MIN_DEPTH, RSS_KEY};
use crate::packet::{DATA_ROOM, Pool};
use crate::port::hardware::RuleBackend;
use crate::port::{Capabilities, Offloads, PortConfig, RuleHardware};

/// Most queues each way that are offered.
const MAX_QUEUES: u32 = 256;
/// Largest MTU (linux: drivers/net/ethernet/mellanox/mlx5/core/en_main.c takes what firmware takes, about 9978).
pub(super) const MAX_MTU: u16 = 9900;
/// Most entries of a ring. A receive ring of more would count beyond its doorbell record.
pub(super) const MAX_DEPTH: u32 = 1 << 15;
/// Basic blocks of a send ring for each packet of its depth: a packet with a header inside or of several segments takes more than one.
const BLOCKS: u32 = 2;
/// Bytes of a basic block.
const BLOCK: u32 = 64;
/// Fewest basic blocks of a send ring.
const MIN_BLOCKS: u32 = 64;
/// Length of a stride.
const STRIDE_LOG: u32 = DATA_ROOM.ilog2();
const _: () = assert!(DATA_ROOM.is_power_of_two());
/// Bytes of a frame beyond the interface's MTU that the device lets in at most: Ethernet header, tags, what Linux adds for encryption (linux:
/// drivers/net/ethernet/mellanox/mlx5/core/en.h, `MLX5E_ETH_HARD_MTU`), and some to spare.
const AROUND: u32 = 128;

pub(super) type Opened = opened::Opened<Mlx5>;

/// An mlx5.
pub(super) struct Mlx5Nic {
    queues: u16,
    /// Most entries of a ring.
    depth: u32,
    pub(super) modes: Modes,
    /// Rules in the device, and how they get there.
    rules: Option<(Rules<Way>, RuleBackend)>,
    /// Users of the registers at an address.
    registers: Mutex<HashMap<usize, Weak<()>>>,
    /// Whether other processes can have receive queues.
    lends: bool,
    /// While there are receive queues.
    steered: Mutex<Weak<Mutex<Steered>>>,
}

/// How packets come to the receive queues.
struct Steered {
    steering: Steering,
    /// The queues of this process.
    own: Vec<WorkQueue>,
    /// Whether rules of the application spread packets over queues that were lent, too: those are not put anew.
    rules_lend: bool,
}

/// A receive queue without buffers.
struct ReceiveQueue {
    completions: CompletionQueue,
    work: WorkQueue,
    bell: Option<Bell>,
}

impl ReceiveQueue {
    /// Where it lies, and what makes of its bell what wakes a worker.
    fn place(&self, opened: &Opened) -> Result<(ReceivePlace, impl FnOnce(Bell) -> Waker + use<>)> {
        let queue = opened.verbs.receive_queue(&self.work)?;
        let entries = opened.verbs.completion_queue(&self.completions)?;
        let place = ReceivePlace {
            ring: queue.ring,
            records: queue.records,
            entries: queue.entries,
            stride: queue.stride,
            completions: entries.ring,
            completion_records: entries.records,
        };
        let (number, doorbell) = (entries.number, Doorbell::new(&entries.registers, UAR_ARM));
        Ok((place, move |bell| Waker { bell, number, doorbell, announced: 0 }))
    }

    /// For another process.
    fn lend(self, opened: &Opened) -> Result<Lent<lent::ReceiveAt>> {
        let (place, _) = self.place(opened)?;
        lent::receive(opened, place, self.work.fate())
    }
}

/// A send queue, how it is called in events, and how it is seen to be gone.
pub(super) struct Placed {
    pub(super) place: SendPlace,
    pub(super) id: ObjectId,
    pub(super) fate: Fate,
    pub(super) registers: Registers,
}

/// Whether frames may come that are longer than the buffers of a work request, at this MTU of the kernel's interface: then a sink lies behind
/// these. The device drops what is longer than the kernel lets in, and without a sink fetches half as much for each packet.
fn needs_sink(mtu: Option<u32>, layout: Layout) -> bool {
    let fits = |mtu: u32| mtu.saturating_add(AROUND) as usize <= layout.buffers() * DATA_ROOM;
    matches!(layout, Layout::Linear { .. }) && !mtu.is_some_and(fits)
}

/// Says what stands in the way of a queue pair, such as a missing capability.
fn probe(opened: &Opened) -> Result<()> {
    let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(63, "probe"))?;
    RawPacketQp::new(&opened.domain, &RawPacketQpOptions::send(&completions, 64, 1, "probe")).map(drop)
}

impl Mlx5Nic {
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

    /// What everybody holds who has the registers at this address.
    fn users(&self, address: usize) -> Arc<()> {
        let mut all = self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, users| users.strong_count() > 0);
        all.get(&address).and_then(Weak::upgrade).unwrap_or_else(|| {
            let users = Arc::new(());
            all.insert(address, Arc::downgrade(&users));
            users
        })
    }

    pub(super) fn send_depth(&self, config: &PortConfig) -> u32 {
        config.depth.max(MIN_DEPTH).next_power_of_two().min(self.depth)
    }

    /// Makes send queue `index`, which lives as long as the views of its memory.
    pub(super) fn send_place(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Placed> {
        let Parts { opened, .. } = parts;
        let (mode, depth) = (self.modes.send, self.send_depth(parts.config));
        let owner = opened.owner("transmit", index);
        let blocks = (depth * BLOCKS).max(MIN_BLOCKS).next_power_of_two();
        // A request with room for the headers of a packet that is cut takes this much (rdma-core: providers/mlx5/verbs.c).
        let header = MAX_TSO_HEADER.next_multiple_of(16) as u32;
        let request = (16 + 32 + header + 16).div_ceil(BLOCK);
        // The library makes the ring a power of two of entries.
        let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(blocks - 1, &*owner))?;
        let (requests, max_tso_header) =
            if mode.max_tso > 0 { (blocks / request, MAX_TSO_HEADER as u16) } else { (blocks, 0) };
        let options =
            RawPacketQpOptions { max_tso_header, ..RawPacketQpOptions::send(&completions, requests, 1, &*owner) };
        let pair = RawPacketQp::new(&opened.domain, &options)?;
        pair.start(opened.port)?;
        let queue = opened.verbs.send_queue(&pair)?;
        let entries = opened.verbs.completion_queue(&completions)?;
        let users = self.users(queue.registers.base().addr().get() + queue.register);
        let place = SendPlace {
            registers: tx::Registers::new(&queue.registers, queue.register, queue.blue_flame, users),
            ring: queue.ring,
            records: queue.records,
            completions: entries.ring,
            completion_records: entries.records,
            number: queue.number,
        };
        let registers = Registers { at: queue.registers_at, register: queue.register, blue_flame: queue.blue_flame };
        Ok(Placed { place, id: pair.id(), fate: pair.fate(), registers })
    }

    /// Makes receive queue `index`, without buffers. Those of this process can wake whoever sleeps.
    fn receive_queue(&self, parts: &Parts<'_, Self>, index: usize) -> Result<ReceiveQueue> {
        let Parts { opened, config, .. } = parts;
        let (mode, depth) = (self.modes.receive(config), self.receive_depth(config));
        let entries = match mode.layout {
            Layout::Linear { .. } => depth,
            Layout::Striding { log } => depth << log,
        };
        let owner = opened.owner("receive", index);
        // Buffers of a session that is read in parts are posted before its entries count as consumed.
        let completions = if mode.format.is_some() { 2 * entries } else { entries };
        let options = CompletionQueueOptions::new(completions - 1, &*owner);
        let (bell, options) = Bell::of_queue(&opened.context, index, usize::from(config.rx_queues), options)?;
        let completions = match mode.format {
            Some(format) => opened.verbs.completion_queue_with(&options, format)?,
            None => CompletionQueue::new(&opened.context, &options)?,
        };
        let options = WorkQueueOptions {
            segments: mode.layout.buffers() as u32 + u32::from(needs_sink(parts.found.mtu(), mode.layout)),
            vlan_strip: self.modes.strip,
            ..WorkQueueOptions::new(&completions, depth, &*owner)
        };
        let work = match mode.layout {
            Layout::Linear { .. } => WorkQueue::new(&opened.domain, &options)?,
            Layout::Striding { log } => opened.verbs.striding_queue(&opened.domain, &options, STRIDE_LOG, log)?,
        };
        // Clears the doorbell record, so that it comes before anything is posted.
        work.start()?;
        Ok(ReceiveQueue { completions, work, bell })
    }

    /// Work requests of a receive ring.
    fn receive_depth(&self, config: &PortConfig) -> u32 {
        self.modes.receive_depth(config).min(self.depth)
    }
}

impl Nic for Mlx5Nic {
    const WHO: Who = Who { driver: NAME, module: "mlx5_ib", since: "3.11", prefix: "mlx5", provider: Provider::Mlx5 };
    type Options = Options;
    type Verbs = Mlx5;
    type Memory = Registered;
    type Tx = SendRing;
    type Rx = ReceiveRing;
    type ReceiveAt = lent::ReceiveAt;

    /// So that the device takes commands, for flow counters.
    fn open(device: &Device) -> Result<Context> {
        Ok(Mlx5::open(device)?.context().clone())
    }

    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, _: u8) -> Result<Mlx5> {
        let mlx5 = Mlx5::of(domain.context())?;
        mlx5.set_allocator(allocator)?;
        Ok(mlx5)
    }

    fn meet(options: Options, opened: &Opened) -> Result<Self> {
        probe(opened)?;
        let attributes = opened.attributes()?;
        let queues = attributes
            .max_queue_pairs
            .min(attributes.max_completion_queues / 2)
            .min(attributes.max_receive_work_queues);
        // A send ring has more blocks than packets.
        let depth = (attributes.max_work_requests / 2).min(attributes.max_completions).clamp(MIN_DEPTH, MAX_DEPTH);
        let can = options.rules.capabilities(&opened.verbs, attributes.flow_steering, NAME, &options.which.device);
        let mut modes = Modes::choose(&options, &opened.verbs.capabilities()?, &attributes);
        modes.notes.push(match &can {
            Some(can) => format!("flow rules get into the device by {}", can.backend.name()),
            None => "no flow rules in the device: all of them run in software".to_owned(),
        });
        Ok(Self {
            rules: can.map(|can| (can.backend, can)).map(|(backend, can)| (Rules::new(can), backend)),
            queues: queues.clamp(1, MAX_QUEUES) as u16,
            // The power of two below.
            depth: 1 << depth.ilog2(),
            modes,
            registers: Mutex::default(),
            lends: options.which.attach.is_some_and(|offer| offer.rx_queues > 0),
            steered: Mutex::default(),
        })
    }

    fn capabilities(&self, plain: Capabilities) -> Capabilities {
        let modes = &self.modes;
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
            mode: modes.text(),
            notes: modes.notes.clone(),
            max_rx_queues: self.queues,
            max_tx_queues: self.queues,
            max_mtu: MAX_MTU,
            // Rings that are asked to be deeper get as deep as they can.
            max_depth: MAX_DEPTH,
            offloads,
            max_tx_segments: MAX_PIECES as u16,
            can_wait: true,
            ..plain
        }
    }

    fn depths(&self, config: &PortConfig) -> [usize; 2] {
        let buffers = self.modes.layout(config).buffers();
        [self.send_depth(config) as usize, self.receive_depth(config) as usize * buffers]
    }

    fn register(&self, opened: &Opened, pool: &Pool) -> Result<Registered> {
        let way = |backend| Way::new(backend, &opened.verbs, opened.port);
        let rules = self.rules.as_ref().map(|(rules, backend)| rules.open(way(*backend)));
        Ok(Registered::new(opened, pool)?.with(rules))
    }

    fn send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Made<SendRing>> {
        let (mode, depth) = (self.modes.send, self.send_depth(parts.config));
        let Placed { place, id, fate, .. } = self.send_place(parts, index)?;
        // The place keeps the pair.
        let ending = Ending::new(Box::new(()), vec![fate], parts.graves);
        let ring = SendRing::new(ending, Arc::clone(&parts.memory.keys), place, mode, depth);
        ring.map(|ring| Made { ring, id }).ok_or_else(|| odd_ring(&parts.opened.owner("transmit", index)))
    }

    fn receive(&self, parts: &Parts<'_, Self>, lent: usize) -> Result<Receivers<Self>> {
        let Parts { opened, memory, config, .. } = parts;
        let (mode, own) = (self.modes.receive(config), usize::from(config.rx_queues));
        let queues = (0..own + lent).map(|index| self.receive_queue(parts, index));
        let mut queues = queues.collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = queues.iter().map(|queue| queue.work.clone()).collect();
        let fates = all.iter().map(WorkQueue::fate).collect();
        let (verbs, domain, tunnels) = (opened.verbs.clone(), opened.domain.clone(), self.modes.send.tunnels);
        let pairs: MakePair = Arc::new(move |table, fields| match tunnels {
            // The device refuses what it knows nothing of.
            0 => RssQp::new(&domain, table, fields, &RSS_KEY),
            _ => verbs.rss_into_tunnels(&domain, table, fields, &RSS_KEY),
        });
        let whose = Whose::of(parts.found.mac, config);
        let (steering, reception) = spread(&pairs, &all, opened.port, whose, self.lends)?;
        let rules = self.rules.as_ref().map(|(rules, _)| rules.receive(reception));
        let mut kept = all.clone();
        kept.truncate(own);
        let steered = Arc::new(Mutex::new(Steered { steering, own: kept, rules_lend: rules.is_some() && lent > 0 }));
        *self.steered.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&steered);
        // In this order: nothing is unregistered that the device may still write.
        let hardware = Box::new((rules, steered, all, Arc::clone(&memory.keys)));
        let spread = Spread::new(Ending::new(hardware, fates, parts.graves));
        let others = queues.split_off(own).into_iter().map(|queue| queue.lend(opened)).collect::<Result<Vec<_>>>()?;
        let mut made = Vec::new();
        for (index, queue) in queues.into_iter().enumerate() {
            let (place, waker) = queue.place(opened)?;
            let ReceiveQueue { work, bell, .. } = queue;
            let id = work.id();
            let spread = Arc::clone(&spread);
            let ring = ReceiveRing::new(spread, &memory.keys, memory.sink, place, &config.pool, parts.blank, mode);
            let ring = ring.map_err(|dry| Error::Request(dry.to_string()))?;
            let mut ring = ring.ok_or_else(|| odd_ring(&opened.owner("receive", index)))?;
            ring.belongs_to(work, bell.map(waker));
            made.push(Made { ring, id });
        }
        Ok(Receivers { spread, queues: made, lent: others })
    }

    fn respread(&self, parts: &Parts<'_, Self>, lent: usize) -> Option<Result<Vec<Lent<lent::ReceiveAt>>>> {
        let steered = self.steered.lock().unwrap_or_else(PoisonError::into_inner).upgrade().filter(|_| self.lends)?;
        let mut steered = steered.lock().unwrap_or_else(PoisonError::into_inner);
        let Steered { steering, own, rules_lend: false } = &mut *steered else { return None };
        let others = (own.len()..own.len() + lent).map(|index| self.receive_queue(parts, index));
        Some(others.collect::<Result<Vec<_>>>().and_then(|others| {
            let all: Vec<_> = own.iter().chain(others.iter().map(|queue| &queue.work)).cloned().collect();
            let lent = others.into_iter().map(|queue| queue.lend(parts.opened)).collect::<Result<_>>()?;
            // Last: no packet goes to a queue that nobody gets.
            steering.respread(&all)?;
            Ok(lent)
        }))
    }

    fn revive(&self, ring: ReceiveRing, fault: Fault) -> Option<ReceiveRing> {
        // Of one that lied, nobody knows where it stands.
        if matches!(fault, Fault::Refused { .. }) { ring.revive() } else { None }
    }

    fn forget(&mut self) {
        if let Some((rules, _)) = &self.rules {
            rules.clear();
        }
    }

    fn rules(&mut self) -> Option<&mut dyn RuleHardware> {
        self.rules.as_mut().map(|(rules, _)| rules as &mut dyn RuleHardware)
    }

    fn learn(&mut self, fault: Fault, queue: Direction) {
        if queue == Direction::Transmit {
            self.modes.learn(fault);
        }
    }
}
