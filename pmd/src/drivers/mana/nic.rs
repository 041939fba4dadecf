//! What a MANA can do, and the verbs objects of its queues.

use std::sync::Arc;

use wirepath_memory::{BufferAllocator, Doorbell};
use wirepath_nic_defs::mana::{DOORBELL_CQ, DOORBELL_RQ, DOORBELL_SQ};
use wirepath_verbs::mana::Mana;
use wirepath_verbs::{
    CompletionQueue, CompletionQueueOptions, Error, Fate, HashFields, IndirectionTable, ObjectId, ParentDomain,
    ProtectionDomain, Provider, RawPacketQp, RawPacketQpOptions, Result, RssQp, WorkQueue, WorkQueueOptions,
};

use super::cq::Positions;
use super::rx::{ReceivePlace, ReceiveRing, Waker};
use super::tx::{SendPlace, SendRing};
use super::wqe::MAX_SEGMENTS;
use super::{NAME, lent};
use crate::drivers::direct::bell::Bell;
use crate::drivers::direct::device::{Direction, Made, Nic, Parts, Receivers};
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::find::Who;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::opened::{self, odd_ring};
use crate::drivers::direct::receive::{Spread, buffers_for};
use crate::drivers::direct::{MIN_DEPTH, RSS_KEY, longest_frame};
use crate::packet::Pool;
use crate::port::{Capabilities, Offloads, PortConfig};

/// Most queues each way, and most entries of an indirection table (linux: drivers/infiniband/hw/mana/qp.c).
const MAX_QUEUES: u32 = 64;
/// Largest MTU (dpdk: drivers/net/mana/mana.h; linux asks the device, which no verb does).
pub(super) const MAX_MTU: u16 = 9000;
/// Most entries of a ring.
const MAX_DEPTH: u32 = 1 << 15;
/// Most entries of a ring in libmana of rdma-core 44.
const OLD_LIBRARY: u32 = 256;
/// Segments that the size of a send ring reckons with: room for as many packets of this many segments as it is deep. Packets of more take
/// more room and are as welcome.
const SEGMENTS: u32 = 3;
/// Resets of queues for completions out of order, after which positions are no longer looked at: then it is not the device that is wrong,
/// but what we think of its positions.
const PATIENCE_WITH_POSITIONS: u32 = 3;

/// The direct verbs of an open MANA.
pub(super) struct ManaVerbs {
    mana: Mana,
    domain: ParentDomain,
}

pub(super) type Opened = opened::Opened<ManaVerbs>;

/// A MANA.
pub(super) struct ManaNic {
    queues: u16,
    /// Most entries of a ring.
    depth: u32,
    /// The library, not the device, sets the limit.
    by_library: bool,
    /// Whether the kernel passes on what completion queues announce. Early ones attached no event queue to them, and told of one vector;
    /// those that do tell of as many as there are (linux: drivers/infiniband/hw/mana/device.c, qp.c).
    wakes: bool,
    /// Resets for completions out of order.
    out_of_order: u32,
}

/// A queue of a place, and how it is seen to be gone.
pub(super) struct Placed<P> {
    pub(super) place: P,
    pub(super) id: ObjectId,
    pub(super) fate: Fate,
}

/// Says what stands in the way of a queue pair: a capability, or the kernel, which holds the port. Returns most entries of a ring, where it
/// is the library that sets a limit.
fn probe(opened: &Opened) -> Result<Option<u32>> {
    let completions = |entries| CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(entries, "probe"));
    RawPacketQp::new(&opened.verbs.domain, &RawPacketQpOptions::send(&completions(64)?, 64, 1, "probe"))?;
    // libmana of rdma-core 44 refuses more, whatever the device can do; later ones do not.
    match completions(2 * OLD_LIBRARY) {
        Err(error) if error.errno() == Some(libc::EINVAL) => Ok(Some(OLD_LIBRARY)),
        _ => Ok(None),
    }
}

/// Makes send queue `index`, which lives as long as the views of its memory.
pub(super) fn send_place(opened: &Opened, index: usize, depth: u32) -> Result<Placed<SendPlace>> {
    let owner = opened.owner("transmit", index);
    let ManaVerbs { mana, domain } = &opened.verbs;
    let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(depth, &*owner))?;
    let pair = RawPacketQp::new(domain, &RawPacketQpOptions::send(&completions, depth, SEGMENTS, &*owner))?;
    let queue = mana.send_queue(&pair)?;
    let entries = mana.completion_queue(&completions)?;
    let place = SendPlace {
        doorbell: Doorbell::new(&queue.doorbells, DOORBELL_SQ),
        ring: queue.ring,
        completions: entries.ring,
        sq: queue.id,
        cq: entries.id,
        vport: queue.vport_offset,
    };
    Ok(Placed { place, id: pair.id(), fate: pair.fate() })
}

/// Receive queues, and how those are woken that sleep at them.
type Receives = Vec<(Placed<ReceivePlace>, Option<Waker>)>;

/// Makes receive queues without buffers, and what spreads packets over them. The first `waking` can wake whoever sleeps.
fn receive_places(
    opened: &Opened,
    number: usize,
    waking: usize,
    depth: u32,
    buffers: usize,
) -> Result<(RssQp, Receives)> {
    let ManaVerbs { mana, domain } = &opened.verbs;
    let mut queues = Vec::new();
    for index in 0..number {
        let owner = opened.owner("receive", index);
        let options = CompletionQueueOptions::new(depth, &*owner);
        let (bell, options) = Bell::of_queue(&opened.context, index, waking, options)?;
        let completions = CompletionQueue::new(&opened.context, &options)?;
        let options =
            WorkQueueOptions { segments: buffers as u32, ..WorkQueueOptions::new(&completions, depth, &*owner) };
        queues.push((completions, WorkQueue::new(domain, &options)?, bell));
    }
    // A power of two of entries, so that every queue gets as much as another where their number is one.
    let entries = if number.is_power_of_two() { number } else { MAX_QUEUES as usize };
    let table: Vec<_> = queues.iter().map(|(_, queue, _)| queue.clone()).cycle().take(entries).collect();
    let table = IndirectionTable::new(&table)?;
    let fields = HashFields::IPV4 | HashFields::IPV6 | HashFields::TCP | HashFields::UDP;
    let rss = RssQp::new(domain, &table, fields, &RSS_KEY)?;
    let mut places = Vec::new();
    for (completions, work_queue, bell) in queues {
        let queue = mana.receive_queue(&work_queue)?;
        let entries = mana.completion_queue(&completions)?;
        let doorbell = Doorbell::new(&queue.doorbells, DOORBELL_CQ);
        let waker = bell.map(|bell| Waker { bell, cq: entries.id, doorbell });
        let place = ReceivePlace {
            doorbell: Doorbell::new(&queue.doorbells, DOORBELL_RQ),
            ring: queue.ring,
            completions: entries.ring,
            rq: queue.id,
        };
        places.push((Placed { place, id: work_queue.id(), fate: work_queue.fate() }, waker));
    }
    Ok((rss, places))
}

/// Buffers of a work request.
pub(super) fn buffers(mtu: u16) -> usize {
    buffers_for(longest_frame(mtu))
}

impl ManaNic {
    fn positions(&self) -> Positions {
        if self.out_of_order < PATIENCE_WITH_POSITIONS { Positions::UNKNOWN } else { Positions::UNUSED }
    }

    /// Work requests of a receive ring: one of long frames holds about as many buffers as one of short frames.
    fn receive_depth(&self, config: &PortConfig) -> u32 {
        (config.depth / buffers(config.mtu) as u32).max(MIN_DEPTH).next_power_of_two().min(self.depth)
    }

    pub(super) fn send_depth(&self, config: &PortConfig) -> u32 {
        config.depth.max(MIN_DEPTH).next_power_of_two().min(self.depth)
    }
}

impl Nic for ManaNic {
    const WHO: Who = Who { driver: NAME, module: "mana_ib", since: "6.2", prefix: "mana", provider: Provider::Mana };
    type Options = ();
    type Verbs = ManaVerbs;
    type Memory = Arc<Keys>;
    type Tx = SendRing;
    type Rx = ReceiveRing;
    type ReceiveAt = lent::ReceiveAt;

    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, port: u8) -> Result<ManaVerbs> {
        let mana = Mana::of(domain.context())?;
        mana.set_allocator(allocator)?;
        Ok(ManaVerbs { domain: mana.parent_domain(domain, port)?, mana })
    }

    fn meet((): (), opened: &Opened) -> Result<Self> {
        let library = probe(opened)?;
        let attributes = opened.attributes()?;
        let most = attributes.max_queue_pairs.min(attributes.max_completion_queues / 2).clamp(1, MAX_QUEUES);
        let depth = attributes.max_work_requests.min(attributes.max_completions).min(MAX_DEPTH);
        Ok(Self {
            queues: most as u16,
            // The power of two below.
            depth: 1 << depth.min(library.unwrap_or(depth)).max(1).ilog2(),
            by_library: library.is_some(),
            wakes: opened.context.completion_vectors() > 1,
            out_of_order: 0,
        })
    }

    fn capabilities(&self, plain: Capabilities) -> Capabilities {
        let mut notes = vec![
            "no flow rules in this hardware: all of them run in software".to_owned(),
            format!("frames end at an MTU of {MAX_MTU}: no verb tells what the network allows"),
            "frames for other MAC addresses do not arrive: the hardware has no promiscuous mode".to_owned(),
            "VLAN tags are received without priority (PCP, DEI): completions have the number only".to_owned(),
        ];
        if self.by_library {
            notes.push(format!(
                "rings have at most {} entries: libmana of rdma-core 44 takes no more, later ones do",
                self.depth
            ));
        }
        if self.positions() == Positions::UNUSED {
            notes.push("positions in completions are not checked: they did not fit several times".to_owned());
        }
        Capabilities {
            mode: "raw-packet queue pairs, direct verbs".to_owned(),
            notes,
            max_rx_queues: self.queues,
            max_tx_queues: self.queues,
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
            can_wait: self.wakes,
            ..plain
        }
    }

    fn depths(&self, config: &PortConfig) -> [usize; 2] {
        [self.send_depth(config) as usize, self.receive_depth(config) as usize]
    }

    fn register(&self, opened: &Opened, pool: &Pool) -> Result<Arc<Keys>> {
        let (home, registration) = opened.register(pool.region())?;
        Ok(Arc::new(Keys::new(home, Vec::new(), Box::new(registration))))
    }

    fn send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Made<SendRing>> {
        let Placed { place, id, fate } = send_place(parts.opened, index, self.send_depth(parts.config))?;
        // The place keeps the queue.
        let ending = Ending::new(Box::new(()), vec![fate], parts.graves);
        SendRing::new(ending, Arc::clone(parts.memory), place, self.positions())
            .map(|ring| Made { ring, id })
            .ok_or_else(|| odd_ring(&parts.opened.owner("transmit", index)))
    }

    fn receive(&self, parts: &Parts<'_, Self>, lent: usize) -> Result<Receivers<Self>> {
        let (config, keys) = (parts.config, parts.memory);
        let (depth, buffers) = (self.receive_depth(config), buffers(config.mtu));
        let own = usize::from(config.rx_queues);
        let waking = if self.wakes { own } else { 0 };
        let (rss, places) = receive_places(parts.opened, own + lent, waking, depth, buffers)?;
        let fates = places.iter().map(|(placed, _)| placed.fate.clone()).collect();
        // In this order: nothing is unregistered that the device may still write.
        let spread = Spread::new(Ending::new(Box::new((rss, Arc::clone(keys))), fates, parts.graves));
        let (mut queues, mut others) = (Vec::new(), Vec::new());
        for (index, (placed, waker)) in places.into_iter().enumerate() {
            if index >= own {
                others.push(lent::receive(parts.opened, placed)?);
                continue;
            }
            let Placed { place, id, .. } = placed;
            let spread = Arc::clone(&spread);
            let ring = ReceiveRing::new(spread, keys, place, &config.pool, parts.blank, buffers, self.positions());
            let ring = ring.map_err(|dry| Error::Request(dry.to_string()))?;
            let mut ring = ring.ok_or_else(|| odd_ring(&parts.opened.owner("receive", index)))?;
            ring.wakes_by(waker);
            queues.push(Made { ring, id });
        }
        Ok(Receivers { spread, queues, lent: others })
    }

    fn learn(&mut self, fault: Fault, _: Direction) {
        self.out_of_order += u32::from(fault == Fault::OutOfOrder);
    }

    fn forget(&mut self) {
        self.out_of_order = 0;
    }
}
