//! The Microsoft Azure Network Adapter (MANA).
//!
//! Sources of its behaviour: rdma-core `providers/mana`; Linux `drivers/infiniband/hw/mana` and
//! `drivers/net/ethernet/microsoft/mana`; OpenVMM `vm/devices/net/gdma`; DPDK `drivers/net/mana`.

mod control;
mod queues;
mod receive;
mod transmit;

use std::collections::HashMap;

use wirepath_nic_defs::mana as defs;

use crate::device::{ContextId, Env, EventTarget, ObjectId, Store, VECTORS};
use crate::frame::{FramePattern, HeaderOffsets, Toeplitz};
use crate::host::{Host, Region};
use crate::keys::MkeyTable;
use crate::slots::{CachePadded, IdAllocator, Slab};
use crate::topology::{DeviceSpec, Doorbells};
use queues::{Cq, Rq, Sq};

use transmit::Wqe;

/// Number of entries of the device's indirection table. Smaller tables are repeated.
const TABLE: usize = 64;
/// Maximum number of scatter-gather entries of a send request (Linux: `max_send_sge`).
const MAX_SEND_SGE: u32 = 30;
/// Maximum number of scatter-gather entries of a receive request.
const MAX_RECV_SGE: u32 = 15;

/// An emulated MANA device.
#[derive(Debug)]
pub struct Mana<H: Host> {
    spec: DeviceSpec,
    ports: Vec<Port>,
    keys: MkeyTable<H::Region>,
    pds: Slab<ContextId>,
    cqs: Slab<Cq<H::Region>>,
    sqs: Slab<Sq<H::Region>>,
    rqs: Slab<Rq<H::Region>>,
    tables: Slab<Vec<ObjectId>>,
    qps: Slab<Qp>,
    sq_numbers: IdAllocator,
    rq_numbers: IdAllocator,
    cq_numbers: IdAllocator,
    by_sq: HashMap<u32, ObjectId>,
    by_rq: HashMap<u32, ObjectId>,
    by_cq: HashMap<u32, ObjectId>,
    /// Open contexts; true if the device was reset after the context was opened.
    contexts: HashMap<ContextId, bool>,
    /// Scratch descriptor of the transmit path.
    wqe: Box<CachePadded<Wqe>>,
    /// Send queue that is processed first in the next round.
    next_sq: usize,
    /// Doorbells that no queue accepts.
    stray_doorbells: u64,
    resets: u64,
    vectors: u32,
}

/// A port with its virtual port.
#[derive(Debug, Default)]
struct Port {
    up: bool,
    /// Error that the kernel returns while its own driver holds the port.
    kernel_errno: Option<rustix::io::Errno>,
    /// Protection domain that may send on the port, and its number of queue pairs.
    claim: Option<(ObjectId, u32)>,
    /// RSS queue pair that distributes received frames.
    steering: Option<ObjectId>,
    /// Virtual port number that sent packets must carry.
    vport: u32,
    /// Pattern and header offsets of the last received frame. The next frame often matches.
    last: Option<(FramePattern, HeaderOffsets)>,
    counters: PortCounters,
}

#[derive(Clone, Copy, Debug, Default)]
struct PortCounters {
    received: u64,
    received_bytes: u64,
    sent: u64,
    sent_bytes: u64,
    other_address: u64,
    no_steering: u64,
    no_buffer: u64,
}

#[derive(Debug)]
enum Qp {
    Send { pd: ObjectId, port: usize, sq: ObjectId, cq: ObjectId },
    Rss(Box<CachePadded<Rss>>),
}

#[derive(Debug)]
struct Rss {
    port: usize,
    table: [ObjectId; TABLE],
    /// The queue, if all entries of the table name the same one.
    single_queue: Option<ObjectId>,
    hash: Toeplitz,
    fields: u64,
}

impl<H: Host> Mana<H> {
    /// Creates a device from its specification. With `scan` it polls queues and observes no doorbells, so it
    /// does not see completion queues being armed. Such a device offers no interrupts, like a kernel without
    /// event queues.
    pub fn new(spec: DeviceSpec, scan: bool) -> Self {
        let port = |at: usize| Port { up: true, vport: 5 + 3 * at as u32, ..Port::default() };
        Self {
            ports: (0..spec.ports.len()).map(port).collect(),
            spec,
            keys: MkeyTable::default(),
            pds: Slab::default(),
            cqs: Slab::default(),
            sqs: Slab::default(),
            rqs: Slab::default(),
            tables: Slab::default(),
            qps: Slab::default(),
            // The ranges are disjoint, so that a number of the wrong kind of queue is detected. All fit into
            // the 12 bits of short doorbells. Send queue numbers exceed the 10 bits that the short OOB
            // contains.
            sq_numbers: IdAllocator::new(1040..2040),
            rq_numbers: IdAllocator::new(2050..3050),
            cq_numbers: IdAllocator::new(3060..4090),
            by_sq: HashMap::new(),
            by_rq: HashMap::new(),
            by_cq: HashMap::new(),
            contexts: HashMap::new(),
            wqe: Box::new(CachePadded(Wqe::default())),
            next_sq: 0,
            stray_doorbells: 0,
            resets: 0,
            vectors: if scan { 1 } else { VECTORS },
        }
    }

    fn name(&self) -> &str {
        &self.spec.name
    }

    /// Handles a store to the doorbell page.
    fn ring(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) {
        match (store.offset, store.size) {
            (defs::DOORBELL_SQ, 8) => {
                let bell = defs::SqDoorbell(store.value);
                self.post(env, context, true, bell.id() as u32, TailUpdate::Absolute(bell.tail() as u32));
            }
            (defs::DOORBELL_RQ, 8) | (defs::DOORBELL_RQ_CLIENT, 8) => {
                let bell = defs::RqDoorbell(store.value);
                if bell.wqe_count() != 0 {
                    env.log.line(format_args!(
                        "{} rq {}: doorbell with a WQE count, which raw queues do not have",
                        self.name(),
                        bell.id()
                    ));
                }
                self.post(env, context, false, bell.id() as u32, TailUpdate::Absolute(bell.tail() as u32));
            }
            (defs::DOORBELL_CQ, 8) => {
                let bell = defs::CqDoorbell(store.value);
                self.arm(env, context, bell.id() as u32, TailUpdate::Absolute(bell.tail() as u32), bell.arm() == 1);
            }
            (defs::DOORBELL_SQ_SHORT | defs::DOORBELL_RQ_SHORT, 4) => {
                let bell = defs::ShortDoorbell(store.value as u32);
                self.post(
                    env,
                    context,
                    store.offset == defs::DOORBELL_SQ_SHORT,
                    bell.id(),
                    TailUpdate::Increment(bell.increment()),
                );
            }
            (defs::DOORBELL_CQ_SHORT, 4) => {
                let bell = defs::ShortDoorbell(store.value as u32);
                self.arm(env, context, bell.id(), TailUpdate::Increment(bell.increment()), bell.arm() == 1);
            }
            // Event queues belong to the kernel; writes of user space have no effect.
            (defs::DOORBELL_EQ, 8) | (defs::DOORBELL_EQ_SHORT, 4) => {}
            (offset, size) => {
                self.stray_doorbells += 1;
                env.log.line(format_args!(
                    "{}: a store of {size} bytes at {offset:#x} of the doorbell page is not a doorbell",
                    self.name()
                ));
            }
        }
    }

    /// Updates the tail of a work queue.
    fn post(&mut self, env: &mut Env<'_>, context: ContextId, send: bool, number: u32, tail: TailUpdate) {
        let (kind, found) = if send { ("sq", self.by_sq.get(&number)) } else { ("rq", self.by_rq.get(&number)) };
        let found = found.copied();
        let ring = match (send, found) {
            (true, Some(id)) => self.sqs.get_mut(id).map(|sq| &mut sq.work),
            (false, Some(id)) => self.rqs.get_mut(id).map(|rq| &mut rq.work),
            _ => None,
        };
        let Some(work) = ring.filter(|work| work.context == context) else {
            self.stray_doorbells += 1;
            env.log
                .line(format_args!("{}: doorbell for {kind} {number}, which this context does not have", self.name()));
            return;
        };
        work.doorbells += 1;
        let refusal = work.advance(tail);
        if let Err(why) = refusal {
            env.log.line(format_args!("{} {kind} {number}: doorbell dropped: {why}", self.name()));
        }
    }

    /// Updates the tail of a completion queue, and arms it if requested.
    fn arm(&mut self, env: &mut Env<'_>, context: ContextId, number: u32, tail: TailUpdate, arm: bool) {
        let Some(cq) =
            self.by_cq.get(&number).and_then(|id| self.cqs.get_mut(*id)).filter(|cq| cq.owner.context == context)
        else {
            self.stray_doorbells += 1;
            env.log.line(format_args!("{}: doorbell for cq {number}, which this context does not have", self.name()));
            return;
        };
        if let Err(why) = cq.update_tail(tail, arm, env.events) {
            env.log.line(format_args!("{} cq {number}: doorbell ignored: {why}", self.spec.name));
        }
    }

    /// Resets the device: all objects are destroyed, and all contexts are dead.
    fn reset(&mut self) {
        self.resets += 1;
        self.keys = MkeyTable::default();
        self.sqs = Slab::default();
        self.rqs = Slab::default();
        self.cqs = Slab::default();
        self.qps = Slab::default();
        self.tables = Slab::default();
        self.pds = Slab::default();
        self.by_sq.clear();
        self.by_rq.clear();
        self.by_cq.clear();
        for port in &mut self.ports {
            port.claim = None;
            port.steering = None;
        }
        for dead in self.contexts.values_mut() {
            *dead = true;
        }
    }

    fn scans(env: &Env<'_>) -> bool {
        env.doorbells == Doorbells::Scan
    }
}

/// Tail update of a doorbell.
#[derive(Clone, Copy, Debug)]
enum TailUpdate {
    /// The new tail.
    Absolute(u32),
    /// The increment of the tail (short doorbells).
    Increment(u32),
}

/// Returns the event target of a receive queue.
fn event_target<R: Region>(rq: &Rq<R>) -> EventTarget {
    rq.owner
}
