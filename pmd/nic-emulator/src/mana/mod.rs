//! The Microsoft Azure Network Adapter.
//!
//! Sources for what it does: rdma-core `providers/mana`, Linux `drivers/infiniband/hw/mana` and `drivers/net/ethernet/microsoft/mana`,
//! openvmm `vm/devices/net/gdma`, DPDK `drivers/net/mana`.

mod control;
mod queues;
mod receive;
mod transmit;

use std::collections::HashMap;

use wirepath_nic_defs::mana as defs;

use crate::device::{ContextId, Env, ObjectId, Owner, Store, VECTORS};
use crate::frame::{Layers, Shape, Toeplitz};
use crate::host::{Host, Region};
use crate::keys::Keys;
use crate::slab::{Apart, Numbers, Slab};
use crate::topology::{DeviceSpec, Doorbells};
use queues::{Cq, Rq, Sq};

use transmit::Wqe;

/// Entries of the device's own indirection table; smaller ones are repeated.
const TABLE: usize = 64;
/// Most scatter-gather entries that a queue pair may ask for (Linux: `max_send_sge`).
const MAX_SEND_SGE: u32 = 30;
/// Most of a receive queue.
const MAX_RECV_SGE: u32 = 15;

/// The device.
#[derive(Debug)]
pub struct Mana<H: Host> {
    spec: DeviceSpec,
    ports: Vec<Port>,
    keys: Keys<H::Region>,
    pds: Slab<ContextId>,
    cqs: Slab<Cq<H::Region>>,
    sqs: Slab<Sq<H::Region>>,
    rqs: Slab<Rq<H::Region>>,
    tables: Slab<Vec<ObjectId>>,
    qps: Slab<Qp>,
    sq_numbers: Numbers,
    rq_numbers: Numbers,
    cq_numbers: Numbers,
    by_sq: HashMap<u32, ObjectId>,
    by_rq: HashMap<u32, ObjectId>,
    by_cq: HashMap<u32, ObjectId>,
    /// Open contexts, and whether the device was reset under them.
    contexts: HashMap<ContextId, bool>,
    /// Scratch of the transmit path.
    wqe: Box<Apart<Wqe>>,
    /// Send queue that is served first next time.
    turn: usize,
    /// Doorbells that no queue answers to.
    stray_doorbells: u64,
    resets: u64,
    vectors: u32,
}

/// A port, with its virtual port of the fabric.
#[derive(Debug, Default)]
struct Port {
    up: bool,
    /// What the kernel says if its own driver holds the port.
    held: Option<rustix::io::Errno>,
    /// Protection domain that sends here, and how many queue pairs it has.
    claim: Option<(ObjectId, u32)>,
    /// Queue pair whose table spreads what arrives.
    steering: Option<ObjectId>,
    /// Virtual port that packets must name.
    vport: u32,
    /// The last frame that arrived, and where its headers are. The next is often alike.
    last: Option<(Shape, Layers)>,
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
    Rss(Box<Apart<Rss>>),
}

#[derive(Debug)]
struct Rss {
    port: usize,
    table: [ObjectId; TABLE],
    /// The queue, if the table names one alone.
    only: Option<ObjectId>,
    hash: Toeplitz,
    fields: u64,
}

impl<H: Host> Mana<H> {
    /// A device as the topology wants it. Whoever looks at queues and sees no doorbells (`scan`) does not see what arms a completion queue:
    /// such a device has no interrupts to offer, as a kernel without event queues.
    pub fn new(spec: DeviceSpec, scan: bool) -> Self {
        let port = |at: usize| Port { up: true, vport: 5 + 3 * at as u32, ..Port::default() };
        Self {
            ports: (0..spec.ports.len()).map(port).collect(),
            spec,
            keys: Keys::default(),
            pds: Slab::default(),
            cqs: Slab::default(),
            sqs: Slab::default(),
            rqs: Slab::default(),
            tables: Slab::default(),
            qps: Slab::default(),
            // Ranges apart, so that a number used for the wrong kind of queue is found out; all within the 12 bits of short doorbells,
            // send queues beyond the 10 bits that the OOB leaves out.
            sq_numbers: Numbers::new(1040..2040),
            rq_numbers: Numbers::new(2050..3050),
            cq_numbers: Numbers::new(3060..4090),
            by_sq: HashMap::new(),
            by_rq: HashMap::new(),
            by_cq: HashMap::new(),
            contexts: HashMap::new(),
            wqe: Box::new(Apart(Wqe::default())),
            turn: 0,
            stray_doorbells: 0,
            resets: 0,
            vectors: if scan { 1 } else { VECTORS },
        }
    }

    fn name(&self) -> &str {
        &self.spec.name
    }

    /// A store to the doorbell page.
    fn ring(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) {
        match (store.offset, store.size) {
            (defs::DOORBELL_SQ, 8) => {
                let bell = defs::SqDoorbell(store.value);
                self.post(env, context, true, bell.id() as u32, Tail::Is(bell.tail() as u32));
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
                self.post(env, context, false, bell.id() as u32, Tail::Is(bell.tail() as u32));
            }
            (defs::DOORBELL_CQ, 8) => {
                let bell = defs::CqDoorbell(store.value);
                self.arm(env, context, bell.id() as u32, Tail::Is(bell.tail() as u32), bell.arm() == 1);
            }
            (defs::DOORBELL_SQ_SHORT | defs::DOORBELL_RQ_SHORT, 4) => {
                let bell = defs::ShortDoorbell(store.value as u32);
                self.post(
                    env,
                    context,
                    store.offset == defs::DOORBELL_SQ_SHORT,
                    bell.id(),
                    Tail::Grows(bell.increment()),
                );
            }
            (defs::DOORBELL_CQ_SHORT, 4) => {
                let bell = defs::ShortDoorbell(store.value as u32);
                self.arm(env, context, bell.id(), Tail::Grows(bell.increment()), bell.arm() == 1);
            }
            // Event queues belong to the kernel; what user space writes there says nothing.
            (defs::DOORBELL_EQ, 8) | (defs::DOORBELL_EQ_SHORT, 4) => {}
            (offset, size) => {
                self.stray_doorbells += 1;
                env.log.line(format_args!(
                    "{}: a store of {size} bytes at {offset:#x} of the doorbell page is no doorbell",
                    self.name()
                ));
            }
        }
    }

    /// New tail of a work queue.
    fn post(&mut self, env: &mut Env<'_>, context: ContextId, send: bool, number: u32, tail: Tail) {
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

    /// A completion queue's tail, and whether an event is wanted.
    fn arm(&mut self, env: &mut Env<'_>, context: ContextId, number: u32, tail: Tail, arm: bool) {
        let Some(cq) =
            self.by_cq.get(&number).and_then(|id| self.cqs.get_mut(*id)).filter(|cq| cq.owner.context == context)
        else {
            self.stray_doorbells += 1;
            env.log.line(format_args!("{}: doorbell for cq {number}, which this context does not have", self.name()));
            return;
        };
        if let Err(why) = cq.announce(tail, arm, env.events) {
            env.log.line(format_args!("{} cq {number}: doorbell ignored: {why}", self.spec.name));
        }
    }

    /// The device is reset: queues stop, keys are gone, contexts are dead.
    fn reset(&mut self) {
        self.resets += 1;
        self.keys = Keys::default();
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

/// What a doorbell says about a tail.
#[derive(Clone, Copy, Debug)]
enum Tail {
    /// It is this.
    Is(u32),
    /// It grows by this (short doorbells).
    Grows(u32),
}

/// Where events of a work queue go, for queues that stop.
fn owner_of<R: Region>(rq: &Rq<R>) -> Owner {
    rq.owner
}
