//! Capabilities of mlx5, and the verbs objects of its queues.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use wirepath_memory::{BufferAllocator, Doorbell};
use wirepath_nic_defs::mlx5::{ETH_L2_INLINE, UAR_ARM};
use wirepath_verbs::mlx5::Mlx5;
use wirepath_verbs::{
    CompletionQueue, CompletionQueueOptions, Context, DestroyedFlag, Device, Error, ObjectId, ProtectionDomain,
    Provider, RawPacketQp, RawPacketQpOptions, Result, RssQp, WorkQueue, WorkQueueOptions,
};

use super::cqe::nanoseconds;
use super::modes::{MAX_MTU, Modes};
use super::offload::MAX_TSO_HEADER;
use super::queue_spans::{self, Registers};
use super::rules::AnyBackend;
use super::rx::{Layout, RxQueueMemory, RxRing, Waker};
use super::tx::{self, TxQueueMemory, TxRing};
use super::wqe::MAX_PIECES;
use super::{NAME, Options};
use crate::drivers::nic::common::nic::{Direction, NewRing, NewRxQueues, Nic, QueueContext, SharedQueue};
use crate::drivers::nic::common::open_device::{self, ring_size_mismatch};
use crate::drivers::nic::common::post_probe;
use crate::drivers::nic::common::probe::ProbeSpec;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::registered_memory::RegisteredMemory;
use crate::drivers::nic::common::rules::{CreateRssQp, Rules};
use crate::drivers::nic::common::rx_interrupt::RxInterrupt;
use crate::drivers::nic::common::rx_queue::RssGroup;
use crate::drivers::nic::common::steering::{RxFilter, Steering, install_steering};
use crate::drivers::nic::common::{MIN_DEPTH, RSS_KEY, ring_depth};
use crate::port::hardware::RuleBackend;
use crate::port::{Bifurcation, Capabilities, Offloads, PortConfig, RuleHardware};
use wirepath_packet::{DATA_ROOM, Pool};

/// Most queues offered in each direction.
const MAX_QUEUES: u32 = 256;
/// Most entries of a ring. The doorbell record of a larger receive ring would overflow.
pub(super) const MAX_DEPTH: u32 = 1 << 15;
/// Basic blocks of a send ring for each packet of its depth. Packets with inline headers or several segments
/// take more than one.
const BLOCKS: u32 = 2;
/// Bytes of a basic block.
const BLOCK: u32 = 64;
/// Smallest number of basic blocks of a send ring.
const MIN_BLOCKS: u32 = 64;
/// Log2 of the bytes of a stride.
const STRIDE_LOG: u32 = DATA_ROOM.ilog2();
const _: () = assert!(DATA_ROOM.is_power_of_two());
/// Most bytes that a frame can have beyond the MTU of the interface: Ethernet header, tags and what Linux
/// adds for encryption (linux: drivers/net/ethernet/mellanox/mlx5/core/en.h, `MLX5E_ETH_HARD_MTU`), with a
/// margin.
const MTU_OVERHEAD: u32 = 128;

pub(super) type OpenDevice = open_device::OpenDevice<Mlx5>;

/// An mlx5 NIC.
pub(super) struct Mlx5Nic {
    queues: u16,
    /// Most entries of a ring.
    depth: u32,
    pub(super) modes: Modes,
    /// Flow rules in the device, and the interface for them.
    rules: Option<(Rules<AnyBackend>, RuleBackend)>,
    /// Users of the doorbell registers at an address.
    registers: Mutex<HashMap<usize, Weak<()>>>,
    /// True if clients can have receive queues.
    shares_rx: bool,
    /// Steering of the receive queues, while they exist.
    rx_steering: Mutex<Weak<Mutex<RxSteering>>>,
}

/// Steering of packets to the receive queues.
struct RxSteering {
    steering: Steering,
    /// Work queues of this process.
    own: Vec<WorkQueue>,
    /// True if flow rules of the application deliver to shared queues too. These rules are not updated in
    /// place.
    rules_share: bool,
}

/// Verbs objects of a receive queue, without buffers.
struct ReceiveQueue {
    completions: CompletionQueue,
    work: WorkQueue,
    interrupt: Option<RxInterrupt>,
}

impl ReceiveQueue {
    /// Returns the memory of the queue, and a function that builds its waker from the interrupt.
    fn queue_memory(&self, opened: &OpenDevice) -> Result<(RxQueueMemory, impl FnOnce(RxInterrupt) -> Waker + use<>)> {
        let queue = opened.verbs.receive_queue(&self.work)?;
        let entries = opened.verbs.completion_queue(&self.completions)?;
        let queue_memory = RxQueueMemory {
            ring: queue.ring,
            records: queue.records,
            entries: queue.entries,
            stride: queue.stride,
            completions: entries.ring,
            completion_records: entries.records,
        };
        let (number, doorbell) = (entries.number, Doorbell::new(&entries.registers, UAR_ARM));
        Ok((queue_memory, move |interrupt| Waker { interrupt, number, doorbell, announced: 0 }))
    }

    /// Shares the queue with a client.
    fn share(self, opened: &OpenDevice) -> Result<SharedQueue<queue_spans::RxQueueSpans>> {
        let (queue_memory, _) = self.queue_memory(opened)?;
        queue_spans::share_rx(opened, queue_memory, self.work.destroyed_flag())
    }
}

/// A new send queue, its ID in events, and its destroyed flag.
pub(super) struct NewTxQueue {
    pub(super) queue_memory: TxQueueMemory,
    pub(super) id: ObjectId,
    pub(super) destroyed: DestroyedFlag,
    pub(super) registers: Registers,
}

/// Returns true if work requests need a sink: at this MTU of the kernel's interface, frames may exceed their
/// buffers. The device drops frames that the kernel does not admit. Without a sink it fetches half as much
/// for each packet.
fn needs_sink(mtu: Option<u32>, layout: Layout) -> bool {
    let fits = |mtu: u32| mtu.saturating_add(MTU_OVERHEAD) as usize <= layout.buffers() * DATA_ROOM;
    matches!(layout, Layout::Linear { .. }) && !mtu.is_some_and(fits)
}

/// Returns true if the device needs the Ethernet header in every descriptor. Fails if no queue pair can be created,
/// for example for lack of a privilege.
///
/// The kernel asks the firmware and tells libmlx5, which has no function for it. libmlx5 copies 18 bytes into the
/// descriptor if they are needed, and then refuses shorter frames (rdma-core: providers/mlx5/qp.c,
/// `copy_eth_inline_headers`; linux: drivers/net/ethernet/mellanox/mlx5/core/vport.c, `mlx5_query_min_inline`).
fn probe_inline_header(opened: &OpenDevice) -> Result<bool> {
    let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(63, "probe"))?;
    let pair = RawPacketQp::new(&opened.domain, &RawPacketQpOptions::send(&completions, 64, 1, "probe"))?;
    Ok(post_probe::refusal(&pair, opened.port, ETH_L2_INLINE as u32 - 1, false)?.is_some())
}

/// Checks that the time of timestamps is known: the clock has a frequency and can be read.
fn check_clock(opened: &OpenDevice, khz: u64) -> Result<()> {
    let refused = |why: &str| Err(Error::InvalidRequest(format!("timestamps = true is not possible: {why}")));
    if khz == 0 {
        return refused("the device does not report the frequency of its clock");
    }
    // Without an answer, the user of a wrong stamp finds it far from the time of the clock.
    if opened.verbs.has_only_real_time_stamps().unwrap_or(false) {
        return refused("the NIC stamps packets only with the time of day (rq_ts_format), not with the mapped clock");
    }
    match opened.context.read_clock() {
        Ok(_) => Ok(()),
        Err(error) => refused(&format!("its clock cannot be read, because the kernel does not map it ({error})")),
    }
}

impl Mlx5Nic {
    /// Lists the offloads of the device.
    pub(super) fn abilities(&self) -> String {
        let (checksums, send) = (self.modes.checksums, &self.modes.send);
        let segments = send.max_tso > 0;
        let words = [
            ("checksums", checksums),
            ("VLAN", true),
            ("segmentation", segments),
            ("RSS", true),
            ("checksums in tunnels", send.tunnels != 0),
            ("segmentation in tunnels", segments && (send.tunnels != 0 || send.sw_parser)),
        ];
        let words: Vec<_> = words.iter().filter(|(_, can)| *can).map(|(word, _)| *word).collect();
        words.join(", ")
    }

    /// Returns the token that all users of the registers at this address share.
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
        ring_depth(config.depth, self.depth)
    }

    /// Creates send queue `index`. It lives as long as the views of its memory.
    pub(super) fn create_tx_queue(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<NewTxQueue> {
        let QueueContext { opened, .. } = context;
        let (mode, depth) = (self.modes.send, self.send_depth(context.config));
        let owner = opened.owner("transmit", index);
        let blocks = (depth * BLOCKS).max(MIN_BLOCKS).next_power_of_two();
        // Bytes of a TSO request, including the headers (rdma-core: providers/mlx5/verbs.c).
        let header = MAX_TSO_HEADER.next_multiple_of(16) as u32;
        let request = (16 + 32 + header + 16).div_ceil(BLOCK);
        // The library rounds the ring up to a power of two of entries.
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
        let queue_memory = TxQueueMemory {
            registers: tx::Registers::new(&queue.registers, queue.register, queue.blue_flame, users),
            ring: queue.ring,
            records: queue.records,
            completions: entries.ring,
            completion_records: entries.records,
            number: queue.number,
        };
        let registers = Registers { at: queue.uar_mmap_offset, register: queue.register, blue_flame: queue.blue_flame };
        Ok(NewTxQueue { queue_memory, id: pair.id(), destroyed: pair.destroyed_flag(), registers })
    }

    /// Creates receive queue `index` without buffers. Queues of this process have an interrupt.
    fn receive_queue(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<ReceiveQueue> {
        let QueueContext { opened, config, .. } = context;
        let (mode, depth) = (self.modes.receive(config), self.receive_depth(config));
        let entries = match mode.layout {
            Layout::Linear { .. } => depth,
            Layout::Striding { log } => depth << log,
        };
        let owner = opened.owner("receive", index);
        // Buffers of a partly read session are reposted before its entries count as consumed.
        let completions = if mode.format.is_some() { 2 * entries } else { entries };
        let options = CompletionQueueOptions::new(completions - 1, &*owner);
        let (interrupt, options) =
            RxInterrupt::for_queue(&opened.context, index, usize::from(config.rx_queues), options)?;
        let completions = match mode.format {
            Some(format) => opened.verbs.completion_queue_with(&options, format)?,
            None => CompletionQueue::new(&opened.context, &options)?,
        };
        let options = WorkQueueOptions {
            segments: mode.layout.buffers() as u32 + u32::from(needs_sink(context.rdma_port.mtu(), mode.layout)),
            vlan_strip: self.modes.strip,
            ..WorkQueueOptions::new(&completions, depth, &*owner)
        };
        let work = match mode.layout {
            Layout::Linear { .. } => WorkQueue::new(&opened.domain, &options)?,
            Layout::Striding { log } => opened.verbs.striding_queue(&opened.domain, &options, STRIDE_LOG, log)?,
        };
        // Before any buffer is posted, because this clears the doorbell record.
        work.start()?;
        Ok(ReceiveQueue { completions, work, interrupt })
    }

    /// Returns the work requests of a receive ring.
    fn receive_depth(&self, config: &PortConfig) -> u32 {
        self.modes.receive_depth(config).min(self.depth)
    }
}

impl Nic for Mlx5Nic {
    const PROBE: ProbeSpec =
        ProbeSpec { driver: NAME, module: "mlx5_ib", since: "3.11", prefix: "mlx5", provider: Provider::Mlx5 };
    type Options = Options;
    type Verbs = Mlx5;
    type Memory = RegisteredMemory;
    type Tx = TxRing;
    type Rx = RxRing;
    type RxQueueSpans = queue_spans::RxQueueSpans;

    /// Opens the device with DevX, which flow counters need.
    fn open(device: &Device) -> Result<Context> {
        Ok(Mlx5::open(device)?.context().clone())
    }

    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, _: u8) -> Result<Mlx5> {
        let mlx5 = Mlx5::from_context(domain.context())?;
        mlx5.set_allocator(allocator)?;
        Ok(mlx5)
    }

    fn probe(options: Options, opened: &OpenDevice) -> Result<Self> {
        let needs_inline_header = probe_inline_header(opened)?;
        let attributes = opened.attributes()?;
        if options.timestamps {
            check_clock(opened, attributes.clock_khz)?;
        }
        let queues = attributes
            .max_queue_pairs
            .min(attributes.max_completion_queues / 2)
            .min(attributes.max_receive_work_queues);
        // A send ring has more basic blocks than packets.
        let depth = (attributes.max_work_requests / 2).min(attributes.max_completions).clamp(MIN_DEPTH, MAX_DEPTH);
        let caps = options.rules.capabilities(&opened.verbs, attributes.flow_steering, NAME, &options.selector.device);
        let mut modes = Modes::choose(&options, &opened.verbs.capabilities()?, &attributes, needs_inline_header);
        modes.notes.push(match &caps {
            Some(caps) => format!("flow rules are installed by {}", caps.backend.name()),
            None => "no flow rules in the device: all rules run in software".to_owned(),
        });
        Ok(Self {
            rules: caps.map(|caps| (caps.backend, caps)).map(|(backend, caps)| (Rules::new(caps), backend)),
            queues: queues.clamp(1, MAX_QUEUES) as u16,
            // Rounded down to a power of two.
            depth: 1 << depth.ilog2(),
            modes,
            registers: Mutex::default(),
            shares_rx: options.selector.attach.is_some_and(|offer| offer.rx_queues > 0),
            rx_steering: Mutex::default(),
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
        // The driver computes the checksums that the device cannot.
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
            // Deeper settings are reduced to what the device supports.
            max_depth: MAX_DEPTH,
            offloads,
            max_tx_segments: MAX_PIECES as u16,
            can_wait: true,
            can_bifurcate: true,
            ..plain
        }
    }

    fn depths(&self, config: &PortConfig) -> [usize; 2] {
        let buffers = self.modes.layout(config).buffers();
        [self.send_depth(config) as usize, self.receive_depth(config) as usize * buffers]
    }

    fn register(&self, opened: &OpenDevice, pool: &Pool) -> Result<RegisteredMemory> {
        let backend_for = |backend| AnyBackend::new(backend, &opened.verbs, opened.port);
        let rules = self.rules.as_ref().map(|(rules, backend)| rules.open(backend_for(*backend)));
        Ok(RegisteredMemory::new(opened, pool)?.keep_alive(rules))
    }

    fn create_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<NewRing<TxRing>> {
        let (mode, depth) = (self.modes.send, self.send_depth(context.config));
        let NewTxQueue { queue_memory, id, destroyed, .. } = self.create_tx_queue(context, index)?;
        // The queue memory holds the queue pair.
        let teardown = QueueTeardown::new(Box::new(()), vec![destroyed], context.quarantine);
        let ring = TxRing::new(teardown, Arc::clone(&context.memory.mrs), queue_memory, mode, depth);
        ring.map(|ring| NewRing { ring: ring.resending(self.modes.adapts()), id })
            .ok_or_else(|| ring_size_mismatch(&context.opened.owner("transmit", index)))
    }

    fn create_rx(&self, context: &QueueContext<'_, Self>, shared: usize) -> Result<NewRxQueues<Self>> {
        let QueueContext { opened, memory, config, .. } = context;
        let (mode, own) = (self.modes.receive(config), usize::from(config.rx_queues));
        let queues = (0..own + shared).map(|index| self.receive_queue(context, index));
        let mut queues = queues.collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = queues.iter().map(|queue| queue.work.clone()).collect();
        let destroyed_flags = all.iter().map(WorkQueue::destroyed_flag).collect();
        let (verbs, domain, tunnels) = (opened.verbs.clone(), opened.domain.clone(), self.modes.send.tunnels);
        let create_qp: CreateRssQp = Arc::new(move |table, fields| match tunnels {
            // The device refuses unknown tunnel types.
            0 => RssQp::new(&domain, table, fields, &RSS_KEY),
            _ => verbs.rss_qp_with_tunnel_offloads(&domain, table, fields, &RSS_KEY),
        });
        let filter = RxFilter::new(context.rdma_port.mac, config);
        let (steering, default_rss) = install_steering(&create_qp, &all, opened.port, filter, self.shares_rx)?;
        let rules = self.rules.as_ref().map(|(rules, _)| rules.receive(default_rss));
        let mut own_queues = all.clone();
        own_queues.truncate(own);
        // A port with a bifurcation has no ingress rules.
        let rules_share = rules.is_some() && shared > 0 && config.bifurcation.is_none();
        let rx_steering = Arc::new(Mutex::new(RxSteering { steering, own: own_queues, rules_share }));
        *self.rx_steering.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&rx_steering);
        // Drop order: no memory is deregistered while the device may still write to it.
        let hardware = Box::new((rules, rx_steering, all, Arc::clone(&memory.mrs)));
        let rss_group = RssGroup::new(QueueTeardown::new(hardware, destroyed_flags, context.quarantine));
        let others = queues.split_off(own).into_iter().map(|queue| queue.share(opened)).collect::<Result<Vec<_>>>()?;
        let mut created = Vec::new();
        for (index, queue) in queues.into_iter().enumerate() {
            let (queue_memory, waker) = queue.queue_memory(opened)?;
            let ReceiveQueue { work, interrupt, .. } = queue;
            let id = work.id();
            let rss_group = Arc::clone(&rss_group);
            let ring =
                RxRing::new(rss_group, &memory.mrs, memory.sink, queue_memory, &config.pool, context.template, mode);
            let ring = ring.map_err(|dry| Error::InvalidRequest(dry.to_string()))?;
            let mut ring = ring.ok_or_else(|| ring_size_mismatch(&opened.owner("receive", index)))?;
            ring.set_hardware(work, interrupt.map(waker));
            created.push(NewRing { ring, id });
        }
        Ok(NewRxQueues { rss_group, queues: created, shared: others })
    }

    fn update_rss(
        &self,
        context: &QueueContext<'_, Self>,
        shared: usize,
    ) -> Option<Result<Vec<SharedQueue<queue_spans::RxQueueSpans>>>> {
        let rx_steering =
            self.rx_steering.lock().unwrap_or_else(PoisonError::into_inner).upgrade().filter(|_| self.shares_rx)?;
        let mut rx_steering = rx_steering.lock().unwrap_or_else(PoisonError::into_inner);
        let RxSteering { steering, own, rules_share: false } = &mut *rx_steering else { return None };
        let others = (own.len()..own.len() + shared).map(|index| self.receive_queue(context, index));
        Some(others.collect::<Result<Vec<_>>>().and_then(|others| {
            let all: Vec<_> = own.iter().chain(others.iter().map(|queue| &queue.work)).cloned().collect();
            let shared = others.into_iter().map(|queue| queue.share(context.opened)).collect::<Result<_>>()?;
            // Last, so that no packet goes to a queue without a client.
            steering.update_rss(&all)?;
            Ok(shared)
        }))
    }

    fn set_bifurcation(&self, packets: &Bifurcation) -> Result<()> {
        let rx_steering = self.rx_steering.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let Some(rx_steering) = rx_steering else { return Ok(()) };
        rx_steering.lock().unwrap_or_else(PoisonError::into_inner).steering.set_bifurcation(packets)
    }

    fn read_clock(&self, opened: &OpenDevice) -> Option<u64> {
        let tick = self.modes.tick;
        let ticks = (tick != 0).then(|| opened.context.read_clock().ok())??;
        Some(nanoseconds(ticks, tick))
    }

    fn restart(&self, ring: RxRing, fault: QueueFault) -> Option<RxRing> {
        // After a violation of the interface, the state of the queue is unknown.
        if matches!(fault, QueueFault::ErrorCqe { .. }) { ring.restart() } else { None }
    }

    fn reset_state(&mut self) {
        if let Some((rules, _)) = &self.rules {
            rules.clear();
        }
    }

    fn rules(&mut self) -> Option<&mut dyn RuleHardware> {
        self.rules.as_mut().map(|(rules, _)| rules as &mut dyn RuleHardware)
    }

    fn adapt_to_fault(&mut self, fault: QueueFault, queue: Direction) {
        if queue == Direction::Transmit {
            self.modes.adapt_to_fault(fault);
        }
    }
}
