//! The verbs objects of an open port, and the queues made from them.

use std::sync::Arc;

use wirepath_memory::{BufferAllocator, Doorbell, RegionBuilder};
use wirepath_verbs::mlx5::{Mlx5, Mlx5Capabilities};
use wirepath_verbs::{
    Access, AsyncEvents, CompletionQueue, CompletionQueueOptions, Context, DeviceAttributes, Error, MemoryRegion,
    ObjectId, PortAttributes, ProtectionDomain, RawPacketQp, RawPacketQpOptions, Result, WorkQueue, WorkQueueOptions,
};

use super::find::Found;
use super::offload::MAX_TSO_HEADER;
use super::rx::{Layout, ReceiveMode, ReceivePlace, ReceiveRing, Sink, Spread};
use super::steering::{Whose, spread};
use super::tx::{SendMode, SendPlace, SendRing};
use crate::drivers::direct::keys::{Key, Keys};
use crate::packet::{Blank, Pool};

/// Basic blocks of a send ring for each packet of its depth: a packet with a header inside or of several segments takes more than one.
const BLOCKS: u32 = 2;
/// Bytes of a basic block.
const BLOCK: u32 = 64;
/// Fewest basic blocks of a send ring.
const MIN_BLOCKS: u32 = 64;
/// Bytes of the memory that frames too long for the port end in: as much as the largest frame, for which a port of the kernel can be
/// configured.
const SINK: usize = 16 << 10;
/// Length of a stride.
const STRIDE_LOG: u32 = crate::packet::DATA_ROOM.ilog2();
const _: () = assert!(crate::packet::DATA_ROOM.is_power_of_two());

/// An open port.
pub(super) struct Hardware {
    context: Context,
    mlx5: Mlx5,
    domain: ProtectionDomain,
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
    pub(super) mode: ReceiveMode,
    pub(super) whose: Whose,
    /// Take VLAN tags off.
    pub(super) strip: bool,
}

/// Receive queues.
pub(super) struct Receivers {
    pub(super) spread: Arc<Spread>,
    /// Names of the work queues.
    pub(super) ids: Vec<ObjectId>,
    pub(super) rings: Vec<ReceiveRing>,
}

/// The registered memory of a port: the pool's, and a sink.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) keys: Arc<Keys>,
    sink: Sink,
}

impl Hardware {
    /// Opens the device and claims nothing yet.
    pub(super) fn open(found: &Found) -> Result<Self> {
        let context = found.device.open()?;
        let mlx5 = Mlx5::of(&context)?;
        let mut builder = BufferAllocator::builder();
        if let Some(node) = found.device.numa_node() {
            builder = builder.numa_node(node);
        }
        let allocator = Arc::new(builder.build());
        mlx5.set_allocator(Arc::clone(&allocator) as _)?;
        let domain = ProtectionDomain::new(&context)?;
        let events = context.events()?;
        Ok(Self { context, mlx5, domain, events, allocator, port: found.port })
    }

    /// Says now what stands in the way of a queue pair, such as a missing capability.
    pub(super) fn probe(&self) -> Result<()> {
        let completions = CompletionQueue::new(&self.context, &CompletionQueueOptions::new(63, "probe"))?;
        RawPacketQp::new(&self.domain, &RawPacketQpOptions::send(&completions, 64, 1, "probe")).map(drop)
    }

    pub(super) fn attributes(&self) -> Result<DeviceAttributes> {
        self.context.attributes()
    }

    pub(super) fn capabilities(&self) -> Result<Mlx5Capabilities> {
        self.mlx5.capabilities()
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
    pub(super) fn register(&self, pool: &Pool) -> Result<Registered> {
        let sink = RegionBuilder::new(SINK).huge_pages(false).map();
        let sink = Arc::new(sink.map_err(|error| Error::Request(error.to_string()))?);
        let drain = MemoryRegion::register(&self.domain, &sink, Access::PACKETS)?;
        let registration = MemoryRegion::register(&self.domain, pool.region(), Access::PACKETS)?;
        let home = Key::new(pool.region(), registration.lkey());
        let end = Sink { address: sink.base().as_ptr() as u64, lkey: drain.lkey(), bytes: SINK as u32 };
        let keys = Arc::new(Keys::new(home, Vec::new(), Box::new((registration, drain, sink))));
        Ok(Registered { keys, sink: end })
    }

    /// Makes send queue `index` for `depth` packets.
    pub(super) fn send(
        &self,
        index: usize,
        depth: u32,
        memory: &Registered,
        mode: SendMode,
    ) -> Result<(SendRing, ObjectId)> {
        let owner = format!("{} port {} transmit queue {index}", self.context.device().name(), self.port);
        let blocks = (depth * BLOCKS).max(MIN_BLOCKS).next_power_of_two();
        // A request with room for the headers of a packet that is cut takes this much (rdma-core: providers/mlx5/verbs.c).
        let header = MAX_TSO_HEADER.next_multiple_of(16) as u32;
        let request = (16 + 32 + header + 16).div_ceil(BLOCK);
        // The library makes the ring a power of two of entries.
        let completions = CompletionQueue::new(&self.context, &CompletionQueueOptions::new(blocks - 1, &*owner))?;
        let options = RawPacketQpOptions {
            max_tso_header: if mode.max_tso > 0 { MAX_TSO_HEADER as u16 } else { 0 },
            ..RawPacketQpOptions::send(
                &completions,
                if mode.max_tso > 0 { blocks / request } else { blocks },
                1,
                &*owner,
            )
        };
        let pair = RawPacketQp::new(&self.domain, &options)?;
        pair.start(self.port)?;
        let queue = self.mlx5.send_queue(&pair)?;
        let entries = self.mlx5.completion_queue(&completions)?;
        let register = |offset| Doorbell::new(&queue.registers, offset);
        let place = SendPlace {
            doorbells: [register(queue.register), register(queue.register + queue.blue_flame)],
            ring: queue.ring,
            records: queue.records,
            completions: entries.ring,
            completion_records: entries.records,
            number: queue.number,
        };
        let id = pair.id();
        let ring = SendRing::new(Box::new(pair), Arc::clone(&memory.keys), place, mode, depth);
        ring.map(|ring| (ring, id)).ok_or_else(|| odd(&owner))
    }

    /// Makes all receive queues and what spreads packets over them. Packets come from here on.
    pub(super) fn receive(&self, plan: &ReceivePlan<'_>, memory: &Registered) -> Result<Receivers> {
        let owner = |index| format!("{} port {} receive queue {index}", self.context.device().name(), self.port);
        let mut queues = Vec::new();
        let entries = match plan.mode.layout {
            Layout::Linear { .. } => plan.depth,
            Layout::Striding { log } => plan.depth << log,
        };
        for index in 0..plan.queues {
            let owner = owner(index);
            let options = CompletionQueueOptions::new(entries - 1, &*owner);
            let completions = match plan.mode.format {
                Some(format) => self.mlx5.completion_queue_with(&options, format)?,
                None => CompletionQueue::new(&self.context, &options)?,
            };
            let options = WorkQueueOptions {
                segments: plan.mode.layout.segments(),
                vlan_strip: plan.strip,
                ..WorkQueueOptions::new(&completions, plan.depth, &*owner)
            };
            let queue = match plan.mode.layout {
                Layout::Linear { .. } => WorkQueue::new(&self.domain, &options)?,
                Layout::Striding { log } => self.mlx5.striding_queue(&self.domain, &options, STRIDE_LOG, log)?,
            };
            // Clears the doorbell record, so that it comes before anything is posted.
            queue.start()?;
            queues.push((completions, queue));
        }
        let all: Vec<_> = queues.iter().map(|(_, queue)| queue.clone()).collect();
        let ids = all.iter().map(WorkQueue::id).collect();
        let rules = spread(&self.domain, &all, self.port, plan.whose)?;
        // In this order: nothing is unregistered that the device may still write.
        let spread = Spread::new(Box::new((rules, all, Arc::clone(&memory.keys))));
        let mut rings = Vec::new();
        for (index, (completions, queue)) in queues.iter().enumerate() {
            let queue = self.mlx5.receive_queue(queue)?;
            let entries = self.mlx5.completion_queue(completions)?;
            let place = ReceivePlace {
                ring: queue.ring,
                records: queue.records,
                entries: queue.entries,
                stride: queue.stride,
                completions: entries.ring,
                completion_records: entries.records,
            };
            let lkey = memory.keys.home().lkey();
            let ring =
                ReceiveRing::new(Arc::clone(&spread), lkey, memory.sink, place, plan.pool, plan.blank, plan.mode);
            rings.push(ring.map_err(|dry| Error::Request(dry.to_string()))?.ok_or_else(|| odd(&owner(index)))?);
        }
        Ok(Receivers { spread, ids, rings })
    }
}

fn odd(owner: &str) -> Error {
    Error::Request(format!("{owner}: the ring that libmlx5 made is not of the size that was asked for"))
}
