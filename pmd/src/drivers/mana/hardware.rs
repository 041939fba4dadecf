//! The verbs objects of an open port, and the queues made from them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use wirepath_memory::{BufferAllocator, Doorbell, Region};
use wirepath_nic_defs::mana::{DOORBELL_RQ, DOORBELL_SQ};
use wirepath_verbs::mana::Mana;
use wirepath_verbs::{
    Access, AsyncEvents, CompletionQueue, CompletionQueueOptions, Context, DeviceAttributes, Error, HashFields,
    IndirectionTable, MemoryRegion, ParentDomain, PortAttributes, ProtectionDomain, RawPacketQp, RawPacketQpOptions,
    Result, RssQp, WorkQueue, WorkQueueOptions,
};

use super::cq::Positions;
use super::find::Found;
use super::keys::{Key, Keys};
use super::rx::{ReceivePlace, ReceiveRing, Spread, Spreader};
use super::tx::{SendPlace, SendRing};
use crate::packet::{Blank, Pool};

/// Segments that the size of a send ring reckons with: room for as many packets of this many segments as it is deep. Packets of more take
/// more room and are as welcome.
const SEGMENTS: u32 = 3;
/// Most entries of a ring in libmana of rdma-core 44.
const OLD_LIBRARY: u32 = 256;
/// Most entries of an indirection table (linux: drivers/infiniband/hw/mana/qp.c).
const TABLE: usize = 64;
/// The hash key of Microsoft's specification of receive-side scaling.
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];

/// An open port.
pub(super) struct Hardware {
    context: Context,
    mana: Mana,
    base: ProtectionDomain,
    domain: ParentDomain,
    events: AsyncEvents,
    allocator: Arc<BufferAllocator>,
    port: u8,
}

/// What the receive queues of a port are made of.
#[derive(Debug)]
pub(super) struct ReceivePlan<'a> {
    pub(super) pool: &'a Pool,
    pub(super) blank: &'a Blank,
    /// Number of queues.
    pub(super) queues: usize,
    /// Work requests of each, a power of two.
    pub(super) depth: u32,
    /// Buffers of each work request.
    pub(super) buffers: usize,
}

impl Hardware {
    /// Opens the device and claims nothing yet. `shared`: queue memory that another process can map.
    pub(super) fn open(found: &Found, shared: bool) -> Result<Self> {
        let context = found.device.open()?;
        let mana = Mana::of(&context)?;
        let mut builder = BufferAllocator::builder();
        if let Some(node) = found.device.numa_node() {
            builder = builder.numa_node(node);
        }
        let allocator = Arc::new(if shared { builder.shared() } else { builder }.build());
        mana.set_allocator(Arc::clone(&allocator) as _)?;
        let base = ProtectionDomain::new(&context)?;
        let domain = mana.parent_domain(&base, found.port)?;
        let events = context.events()?;
        Ok(Self { context, mana, base, domain, events, allocator, port: found.port })
    }

    /// Says now what stands in the way of a queue pair: a capability, or the kernel, which holds the port. Returns most entries of a
    /// ring, where it is the library that sets a limit.
    pub(super) fn probe(&self) -> Result<Option<u32>> {
        let completions = |entries| CompletionQueue::new(&self.context, &CompletionQueueOptions::new(entries, "probe"));
        RawPacketQp::new(&self.domain, &RawPacketQpOptions::send(&completions(64)?, 64, 1, "probe"))?;
        // libmana of rdma-core 44 refuses more, whatever the device can do; later ones do not.
        match completions(2 * OLD_LIBRARY) {
            Err(error) if error.errno() == Some(libc::EINVAL) => Ok(Some(OLD_LIBRARY)),
            _ => Ok(None),
        }
    }

    pub(super) fn attributes(&self) -> Result<DeviceAttributes> {
        self.context.attributes()
    }

    pub(super) fn port(&self) -> Result<PortAttributes> {
        self.context.port(self.port)
    }

    pub(super) fn events(&mut self) -> &mut AsyncEvents {
        &mut self.events
    }

    /// Memory of the queues.
    pub(super) fn allocator(&self) -> &Arc<BufferAllocator> {
        &self.allocator
    }

    /// Registers the region of the port's pool.
    pub(super) fn register(&self, pool: &Pool) -> Result<Arc<Keys>> {
        self.register_region(pool.region())
    }

    /// Registers a region of packets.
    pub(super) fn register_region(&self, region: &Arc<Region>) -> Result<Arc<Keys>> {
        let registration = MemoryRegion::register(&self.base, region, Access::PACKETS)?;
        let home = Key::new(region, registration.lkey());
        Ok(Arc::new(Keys::new(home, Vec::new(), Box::new(registration))))
    }

    fn queue(&self, direction: &str, index: usize) -> String {
        format!("{} port {} {direction} queue {index}", self.context.device().name(), self.port)
    }

    /// Makes send queue `index`.
    pub(super) fn send(&self, index: usize, depth: u32, keys: &Arc<Keys>, positions: Positions) -> Result<SendRing> {
        let place = self.send_place(index, depth)?;
        // The place keeps the queue.
        SendRing::new(Box::new(()), Arc::clone(keys), place, positions)
            .ok_or_else(|| odd(&self.queue("transmit", index)))
    }

    /// Makes send queue `index`, which lives as long as the views of its memory.
    pub(super) fn send_place(&self, index: usize, depth: u32) -> Result<SendPlace> {
        let owner = self.queue("transmit", index);
        let completions = CompletionQueue::new(&self.context, &CompletionQueueOptions::new(depth, &*owner))?;
        let pair = RawPacketQp::new(&self.domain, &RawPacketQpOptions::send(&completions, depth, SEGMENTS, &*owner))?;
        let queue = self.mana.send_queue(&pair)?;
        let entries = self.mana.completion_queue(&completions)?;
        Ok(SendPlace {
            doorbell: Doorbell::new(&queue.doorbells, DOORBELL_SQ),
            ring: queue.ring,
            completions: entries.ring,
            sq: queue.id,
            cq: entries.id,
            vport: queue.vport_offset,
        })
    }

    /// Makes all receive queues and what spreads packets over them. Packets come from here on.
    pub(super) fn receive(
        &self,
        plan: &ReceivePlan<'_>,
        keys: &Arc<Keys>,
        positions: Positions,
    ) -> Result<(Arc<Spread>, Vec<ReceiveRing>)> {
        let (rss, places) = self.receive_places(plan.queues, plan.depth, plan.buffers)?;
        // In this order: nothing is unregistered that the device may still write.
        let spread = Spread::new(Box::new(Rss(rss, Arc::clone(keys))));
        let mut rings = Vec::new();
        for (index, place) in places.into_iter().enumerate() {
            let ring =
                ReceiveRing::new(Arc::clone(&spread), keys, place, plan.pool, plan.blank, plan.buffers, positions);
            let ring = ring.map_err(|dry| Error::Request(dry.to_string()))?;
            rings.push(ring.ok_or_else(|| odd(&self.queue("receive", index)))?);
        }
        Ok((spread, rings))
    }

    /// Makes receive queues without buffers, and what spreads packets over them.
    pub(super) fn receive_places(
        &self,
        number: usize,
        depth: u32,
        buffers: usize,
    ) -> Result<(RssQp, Vec<ReceivePlace>)> {
        let mut queues = Vec::new();
        for index in 0..number {
            let owner = self.queue("receive", index);
            let completions = CompletionQueue::new(&self.context, &CompletionQueueOptions::new(depth, &*owner))?;
            let options =
                WorkQueueOptions { segments: buffers as u32, ..WorkQueueOptions::new(&completions, depth, &*owner) };
            queues.push((completions, WorkQueue::new(&self.domain, &options)?));
        }
        // A power of two of entries, so that every queue gets as much as another where their number is one.
        let entries = if number.is_power_of_two() { number } else { TABLE };
        let table: Vec<_> = queues.iter().map(|(_, queue)| queue.clone()).cycle().take(entries).collect();
        let table = IndirectionTable::new(&table)?;
        let fields = HashFields::IPV4 | HashFields::IPV6 | HashFields::TCP | HashFields::UDP;
        let rss = RssQp::new(&self.domain, &table, fields, &KEY)?;
        let mut places = Vec::new();
        for (completions, queue) in &queues {
            let queue = self.mana.receive_queue(queue)?;
            let entries = self.mana.completion_queue(completions)?;
            places.push(ReceivePlace {
                doorbell: Doorbell::new(&queue.doorbells, DOORBELL_RQ),
                ring: queue.ring,
                completions: entries.ring,
                rq: queue.id,
            });
        }
        Ok((rss, places))
    }

    /// The open device file, by which another process maps the registers.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.context.descriptor()
    }
}

/// The queue pair in front of receive queues, and the registrations that it needs.
struct Rss(RssQp, Arc<Keys>);

impl Spreader for Rss {
    fn end(self: Box<Self>) -> bool {
        let Self(rss, keys) = *self;
        drop(rss);
        drop(keys);
        true
    }
}

fn odd(owner: &str) -> Error {
    Error::Request(format!("{owner}: the ring that libmana made is not of the size that was asked for"))
}
