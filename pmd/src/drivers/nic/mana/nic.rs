//! Capabilities of MANA, and the verbs objects of its queues.

use std::sync::Arc;

use wirepath_memory::{BufferAllocator, Doorbell};
use wirepath_nic_defs::mana::{DOORBELL_CQ, DOORBELL_RQ, DOORBELL_SQ};
use wirepath_verbs::mana::Mana;
use wirepath_verbs::{
    CompletionQueue, CompletionQueueOptions, DestroyedFlag, Error, HashFields, ObjectId, ParentDomain,
    ProtectionDomain, Provider, RawPacketQp, RawPacketQpOptions, Result, RssQp, WorkQueue, WorkQueueOptions,
};

use super::cq::Positions;
use super::rx::{RxQueueMemory, RxRing, Waker};
use super::tx::{TxQueueMemory, TxRing};
use super::wqe::MAX_SEGMENTS;
use super::{NAME, queue_spans};
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::nic::{Direction, NewRing, NewRxQueues, Nic, QueueContext};
use crate::drivers::nic::common::open_device::{self, ring_size_mismatch};
use crate::drivers::nic::common::probe::ProbeSpec;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::rx_interrupt::RxInterrupt;
use crate::drivers::nic::common::rx_queue::{RssGroup, buffers_for};
use crate::drivers::nic::common::steering::indirection_table;
use crate::drivers::nic::common::{RSS_KEY, max_frame_len, ring_depth};
use crate::port::{Capabilities, Offloads, PortConfig};
use wirepath_packet::Pool;

/// Maximum number of queues in each direction, and of entries of an indirection table (linux:
/// drivers/infiniband/hw/mana/qp.c).
const MAX_QUEUES: u32 = 64;
/// Largest MTU (dpdk: drivers/net/mana/mana.h). Linux asks the device, for which there is no verb.
pub(super) const MAX_MTU: u16 = 9000;
/// Most entries of a ring.
const MAX_DEPTH: u32 = 1 << 15;
/// Most entries of a ring in libmana of rdma-core 44.
const OLD_LIBRARY: u32 = 256;
/// Segments per packet for which a send ring is sized. Packets with more segments take more room.
const SEGMENTS: u32 = 3;
/// Number of out-of-order faults after which positions are ignored: then the driver's understanding of
/// positions is wrong, not the device.
const MAX_POSITION_FAULTS: u32 = 3;

/// Direct verbs of an open MANA.
pub(super) struct ManaVerbs {
    mana: Mana,
    domain: ParentDomain,
}

pub(super) type OpenDevice = open_device::OpenDevice<ManaVerbs>;

/// A MANA NIC.
pub(super) struct ManaNic {
    queues: u16,
    /// Most entries of a ring.
    depth: u32,
    /// True if the library, not the device, limits the depth.
    by_library: bool,
    /// True if the kernel forwards completion events. Early kernels attach no event queue to completion
    /// queues and report one vector; others report the real number (linux:
    /// drivers/infiniband/hw/mana/device.c, qp.c).
    has_interrupts: bool,
    /// Number of out-of-order faults.
    out_of_order: u32,
}

/// Memory of a new queue, its ID in events, and its destroyed flag.
pub(super) struct NewQueue<P> {
    pub(super) memory: P,
    pub(super) id: ObjectId,
    pub(super) destroyed: DestroyedFlag,
}

/// Fails if no queue pair can be created: for lack of a privilege, or because the kernel holds the port.
/// Returns the most entries of a ring, if the library limits them.
fn probe_queue_pair(opened: &OpenDevice) -> Result<Option<u32>> {
    let completions = |entries| CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(entries, "probe"));
    RawPacketQp::new(&opened.verbs.domain, &RawPacketQpOptions::send(&completions(64)?, 64, 1, "probe"))?;
    // libmana of rdma-core 44 refuses more, regardless of the device; later versions do not.
    match completions(2 * OLD_LIBRARY) {
        Err(error) if error.errno() == Some(libc::EINVAL) => Ok(Some(OLD_LIBRARY)),
        _ => Ok(None),
    }
}

/// Creates send queue `index`. It lives as long as the views of its memory.
pub(super) fn create_tx_queue(opened: &OpenDevice, index: usize, depth: u32) -> Result<NewQueue<TxQueueMemory>> {
    let owner = opened.owner("transmit", index);
    let ManaVerbs { mana, domain } = &opened.verbs;
    let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(depth, &*owner))?;
    let pair = RawPacketQp::new(domain, &RawPacketQpOptions::send(&completions, depth, SEGMENTS, &*owner))?;
    let queue = mana.send_queue(&pair)?;
    let entries = mana.completion_queue(&completions)?;
    let memory = TxQueueMemory {
        doorbell: Doorbell::new(&queue.doorbells, DOORBELL_SQ),
        ring: queue.ring,
        completions: entries.ring,
        sq: queue.id,
        cq: entries.id,
        vport: queue.vport_offset,
    };
    Ok(NewQueue { memory, id: pair.id(), destroyed: pair.destroyed_flag() })
}

/// Receive queues, with the wakers of their workers.
type RxQueuesAndWakers = Vec<(NewQueue<RxQueueMemory>, Option<Waker>)>;

/// Creates receive queues without buffers, and RSS over them. The first `waking` queues have an interrupt.
fn create_rx_queues(
    opened: &OpenDevice,
    number: usize,
    waking: usize,
    depth: u32,
    buffers: usize,
) -> Result<(RssQp, RxQueuesAndWakers)> {
    let ManaVerbs { mana, domain } = &opened.verbs;
    let mut queues = Vec::new();
    for index in 0..number {
        let owner = opened.owner("receive", index);
        let options = CompletionQueueOptions::new(depth, &*owner);
        let (interrupt, options) = RxInterrupt::for_queue(&opened.context, index, waking, options)?;
        let completions = CompletionQueue::new(&opened.context, &options)?;
        let options =
            WorkQueueOptions { segments: buffers as u32, ..WorkQueueOptions::new(&completions, depth, &*owner) };
        queues.push((completions, WorkQueue::new(domain, &options)?, interrupt));
    }
    let work_queues: Vec<_> = queues.iter().map(|(_, queue, _)| queue.clone()).collect();
    let table = indirection_table(&work_queues)?;
    let fields = HashFields::IPV4 | HashFields::IPV6 | HashFields::TCP | HashFields::UDP;
    let rss = RssQp::new(domain, &table, fields, &RSS_KEY)?;
    let mut created = Vec::new();
    for (completions, work_queue, interrupt) in queues {
        let queue = mana.receive_queue(&work_queue)?;
        let entries = mana.completion_queue(&completions)?;
        let doorbell = Doorbell::new(&queue.doorbells, DOORBELL_CQ);
        let waker = interrupt.map(|interrupt| Waker { interrupt, cq: entries.id, doorbell });
        let memory = RxQueueMemory {
            doorbell: Doorbell::new(&queue.doorbells, DOORBELL_RQ),
            ring: queue.ring,
            completions: entries.ring,
            rq: queue.id,
        };
        created.push((NewQueue { memory, id: work_queue.id(), destroyed: work_queue.destroyed_flag() }, waker));
    }
    Ok((rss, created))
}

/// Returns the buffers of a work request.
pub(super) fn buffers(mtu: u16) -> usize {
    buffers_for(max_frame_len(mtu))
}

impl ManaNic {
    fn positions(&self) -> Positions {
        if self.out_of_order < MAX_POSITION_FAULTS { Positions::UNKNOWN } else { Positions::UNUSED }
    }

    /// Returns the work requests of a receive ring. The number of buffers is about the same for short and
    /// long frames.
    fn receive_depth(&self, config: &PortConfig) -> u32 {
        ring_depth(config.depth / buffers(config.mtu) as u32, self.depth)
    }

    pub(super) fn send_depth(&self, config: &PortConfig) -> u32 {
        ring_depth(config.depth, self.depth)
    }
}

impl Nic for ManaNic {
    const PROBE: ProbeSpec =
        ProbeSpec { driver: NAME, module: "mana_ib", since: "6.2", prefix: "mana", provider: Provider::Mana };
    type Options = ();
    type Verbs = ManaVerbs;
    type Memory = Arc<MrTable>;
    type Tx = TxRing;
    type Rx = RxRing;
    type RxQueueSpans = queue_spans::RxQueueSpans;

    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, port: u8) -> Result<ManaVerbs> {
        let mana = Mana::from_context(domain.context())?;
        mana.set_allocator(allocator)?;
        Ok(ManaVerbs { domain: mana.parent_domain(domain, port)?, mana })
    }

    fn probe((): (), opened: &OpenDevice) -> Result<Self> {
        let library = probe_queue_pair(opened)?;
        let attributes = opened.attributes()?;
        let max_queues = attributes.max_queue_pairs.min(attributes.max_completion_queues / 2).clamp(1, MAX_QUEUES);
        let depth = attributes.max_work_requests.min(attributes.max_completions).min(MAX_DEPTH);
        Ok(Self {
            queues: max_queues as u16,
            // Rounded down to a power of two.
            depth: 1 << depth.min(library.unwrap_or(depth)).max(1).ilog2(),
            by_library: library.is_some(),
            has_interrupts: opened.context.completion_vectors() > 1,
            out_of_order: 0,
        })
    }

    fn capabilities(&self, plain: Capabilities) -> Capabilities {
        let mut notes = vec![
            "no flow rules in the device: all rules run in software".to_owned(),
            format!("the MTU is at most {MAX_MTU}: no verb reports the limit of the network"),
            "only frames for the port's MAC address are received: the device has no promiscuous mode".to_owned(),
            "received VLAN tags have no priority (PCP, DEI): completions contain only the VLAN ID".to_owned(),
        ];
        if self.by_library {
            notes.push(format!(
                "rings have at most {} entries, the limit of libmana in rdma-core 44; later versions allow more",
                self.depth
            ));
        }
        if self.positions() == Positions::UNUSED {
            notes.push("positions in completions are ignored after repeated mismatches".to_owned());
        }
        Capabilities {
            mode: "raw-packet queue pairs, direct verbs".to_owned(),
            notes,
            max_rx_queues: self.queues,
            max_tx_queues: self.queues,
            max_mtu: MAX_MTU,
            // Deeper settings are reduced to what the device supports; a note reports a low limit.
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
            can_wait: self.has_interrupts,
            ..plain
        }
    }

    fn depths(&self, config: &PortConfig) -> [usize; 2] {
        [self.send_depth(config) as usize, self.receive_depth(config) as usize]
    }

    fn register(&self, opened: &OpenDevice, pool: &Pool) -> Result<Arc<MrTable>> {
        let (primary, registration) = opened.register(pool.region())?;
        Ok(Arc::new(MrTable::new(primary, Vec::new(), Box::new(registration))))
    }

    fn create_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<NewRing<TxRing>> {
        let NewQueue { memory, id, destroyed } =
            create_tx_queue(context.opened, index, self.send_depth(context.config))?;
        // The queue memory holds the queue.
        let teardown = QueueTeardown::new(Box::new(()), vec![destroyed], context.quarantine);
        TxRing::new(teardown, Arc::clone(context.memory), memory, self.positions())
            .map(|ring| NewRing { ring, id })
            .ok_or_else(|| ring_size_mismatch(&context.opened.owner("transmit", index)))
    }

    fn create_rx(&self, context: &QueueContext<'_, Self>, shared: usize) -> Result<NewRxQueues<Self>> {
        let (config, mrs) = (context.config, context.memory);
        let (depth, buffers) = (self.receive_depth(config), buffers(config.mtu));
        let own = usize::from(config.rx_queues);
        let waking = if self.has_interrupts { own } else { 0 };
        let (rss, created) = create_rx_queues(context.opened, own + shared, waking, depth, buffers)?;
        let destroyed_flags = created.iter().map(|(placed, _)| placed.destroyed.clone()).collect();
        // Drop order: no memory is deregistered while the device may still write to it.
        let rss_group =
            RssGroup::new(QueueTeardown::new(Box::new((rss, Arc::clone(mrs))), destroyed_flags, context.quarantine));
        let (mut queues, mut others) = (Vec::new(), Vec::new());
        for (index, (placed, waker)) in created.into_iter().enumerate() {
            if index >= own {
                others.push(queue_spans::share_rx(context.opened, placed.memory, placed.destroyed)?);
                continue;
            }
            let NewQueue { memory, id, .. } = placed;
            let rss_group = Arc::clone(&rss_group);
            let ring = RxRing::new(rss_group, mrs, memory, &config.pool, context.template, buffers, self.positions());
            let ring = ring.map_err(|dry| Error::InvalidRequest(dry.to_string()))?;
            let mut ring = ring.ok_or_else(|| ring_size_mismatch(&context.opened.owner("receive", index)))?;
            ring.set_waker(waker);
            queues.push(NewRing { ring, id });
        }
        Ok(NewRxQueues { rss_group, queues, shared: others })
    }

    fn adapt_to_fault(&mut self, fault: QueueFault, _: Direction) {
        self.out_of_order += u32::from(fault == QueueFault::OutOfOrder);
    }

    fn reset_state(&mut self) {
        self.out_of_order = 0;
    }
}
