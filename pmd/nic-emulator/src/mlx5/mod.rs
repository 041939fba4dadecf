//! ConnectX-5 and ConnectX-6 Dx.
//!
//! Sources of their behaviour: rdma-core `providers/mlx5`; Linux `drivers/infiniband/hw/mlx5`; DPDK
//! `drivers/net/mlx5` and `drivers/common/mlx5/mlx5_prm.h`; VPP `src/plugins/rdma`.
//!
//! The doorbell record in the application's memory determines what is posted. The register only makes the
//! device read the record. In modes that observe doorbells the device does nothing before the register is
//! written, so that a missing doorbell is detected.

mod completion;
mod control;
mod firmware;
mod queues;
mod receive;
mod steering;
mod transmit;
mod virtio_doorbells;

use std::collections::HashMap;

use wirepath_nic_defs::mlx5 as defs;

use crate::core_clock::CoreClock;
use crate::device::{ContextId, Env, EventTarget, ObjectId, Store};
use crate::frame::Toeplitz;
use crate::host::{Host, Region};
use crate::keys::MkeyTable;
use crate::slots::{CachePadded, IdAllocator, Slab};
use crate::topology::{DeviceSpec, Doorbells};
use completion::Cq;
use queues::{Rq, Sq};
use steering::Steering;

/// Size of a doorbell page in bytes.
const PAGE: u64 = 4096;
/// Number of doorbell pages of a context.
const PAGES: usize = 24;
/// Index of the first doorbell page in the context's file. The page before it is used by other devices; pages
/// of virtio doorbells follow.
const FIRST_PAGE: u64 = 1;
const _: () = assert!((FIRST_PAGE + (PAGES + virtio_doorbells::VARS) as u64) * PAGE <= crate::DOORBELL_BYTES);
/// Distance between BlueFlame registers in bytes. Each register has two buffers of half that size.
const BLUE_FLAME: usize = 512;
/// Number of doorbell pages that the library maps at open, if pages are not objects.
const STATIC_PAGES: u64 = 8;
/// Number of doorbell registers in these pages.
const STATIC_REGISTERS: usize = 2 * STATIC_PAGES as usize;
/// Offset of pages that are objects, in pages; the page index is added.
const OBJECT_PAGES: u64 = 9 << 8;
/// Maximum size of a send WQE in bytes.
const MAX_SEND_WQE: u16 = 1024;
/// Maximum size of a receive WQE in bytes.
const MAX_RECV_WQE: u16 = 512;
/// Maximum number of entries of an indirection table.
const MAX_TABLE: usize = 8192;

/// An emulated ConnectX.
#[derive(Debug)]
pub struct Mlx5<H: Host> {
    spec: DeviceSpec,
    clock: CoreClock,
    ports: Vec<Port>,
    keys: MkeyTable<H::Region>,
    pds: Slab<ContextId>,
    cqs: Slab<Cq<H::Region>>,
    sqs: Slab<Sq<H::Region>>,
    rqs: Slab<Rq<H::Region>>,
    tables: Slab<Vec<ObjectId>>,
    qps: Slab<Qp>,
    steering: Steering,
    /// Firmware objects, and memory that programs have registered for them, by number.
    firmware_objects: Slab<firmware::Object>,
    umems: HashMap<u32, firmware::Umem>,
    /// Hardware numbers of work queues and queue pairs, and of completion queues.
    queue_numbers: IdAllocator,
    cq_numbers: IdAllocator,
    by_sq: HashMap<u32, ObjectId>,
    by_cq: HashMap<u32, ObjectId>,
    /// Last value of each doorbell register: queue number and first words of the descriptor. The key is
    /// context and offset.
    last_doorbells: HashMap<(ContextId, usize), (u32, u64)>,
    contexts: HashMap<ContextId, UserContext>,
    /// Scratch descriptor of the transmit path.
    wqe: Box<[u8; MAX_SEND_WQE as usize]>,
    /// Send queue that is processed first in the next round.
    next_sq: usize,
    /// Timestamp of the current burst of received frames.
    burst_time: Option<u64>,
    stray_doorbells: u64,
    var_doorbells: u64,
    resets: u64,
    scan: bool,
}

/// An open context.
#[derive(Debug, Default)]
struct UserContext {
    /// True if the device was reset after the context was opened.
    dead: bool,
    /// True if doorbell pages are objects.
    objects: bool,
    /// True if firmware objects can be created.
    firmware: bool,
    cqe_version: u8,
    /// Doorbell pages in use.
    pages: [bool; PAGES],
    /// Number of queues of each register, if pages are not objects.
    registers: [u32; STATIC_REGISTERS],
    /// Pages of virtio doorbells in use.
    vars: [bool; virtio_doorbells::VARS],
    /// True if another process has the context open. That process knows which pages are in use.
    imported: bool,
}

#[derive(Debug, Default)]
struct Port {
    up: bool,
    counters: PortCounters,
}

#[derive(Clone, Copy, Debug, Default)]
struct PortCounters {
    received: u64,
    received_bytes: u64,
    sent: u64,
    sent_bytes: u64,
    no_rule: u64,
    ruled_out: u64,
    sent_ruled_out: u64,
    too_long: u64,
    no_buffer: u64,
}

#[derive(Debug)]
enum Qp {
    Send(ObjectId),
    Rss(Box<CachePadded<Rss>>),
}

#[derive(Debug)]
struct Rss {
    number: u32,
    table: Vec<ObjectId>,
    /// The queue, if all entries of the table name the same one.
    single_queue: Option<ObjectId>,
    hash: Option<Toeplitz>,
    fields: u64,
    /// Result of [`receive::tuples`].
    tuples: Option<(u8, defs::HashType)>,
    /// True if inner headers of tunnel packets are parsed.
    tunnels: bool,
}

impl Rss {
    /// Replaces the queues.
    fn set_table(&mut self, table: Vec<ObjectId>) {
        self.single_queue = table.first().copied().filter(|first| table.iter().all(|rq| rq == first));
        self.table = table;
    }

    /// Replaces the hash and the hashed fields, `IBV_RX_HASH_*`.
    fn set_hash(&mut self, hash: Option<Toeplitz>, fields: u64) {
        (self.hash, self.fields, self.tuples) = (hash, fields, receive::tuples(fields));
    }
}

impl<H: Host> Mlx5<H> {
    /// Creates a device from its specification. With `scan` it polls queues and observes no doorbells. It
    /// then reads from the records that completion queues are armed.
    pub fn new(spec: DeviceSpec, scan: bool) -> Self {
        Self {
            ports: spec.ports.iter().map(|_| Port { up: true, ..Port::default() }).collect(),
            steering: Steering::new(spec.mlx5.steering, spec.ports.len()),
            clock: CoreClock::new(spec.mlx5.clock_khz),
            spec,
            keys: MkeyTable::default(),
            pds: Slab::default(),
            cqs: Slab::default(),
            sqs: Slab::default(),
            rqs: Slab::default(),
            tables: Slab::default(),
            qps: Slab::default(),
            firmware_objects: Slab::default(),
            umems: HashMap::new(),
            queue_numbers: IdAllocator::new(0x40..0x4000),
            cq_numbers: IdAllocator::new(0x4_0400..0x4_4000),
            by_sq: HashMap::new(),
            by_cq: HashMap::new(),
            contexts: HashMap::new(),
            wqe: Box::new([0; MAX_SEND_WQE as usize]),
            next_sq: 0,
            burst_time: None,
            last_doorbells: HashMap::new(),
            stray_doorbells: 0,
            var_doorbells: 0,
            resets: 0,
            scan,
        }
    }

    fn name(&self) -> &str {
        &self.spec.name
    }

    /// Handles a store to a doorbell page.
    fn ring(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) {
        if store.offset as u64 / PAGE >= FIRST_PAGE + PAGES as u64 {
            // The doorbell belongs to a queue of a virtual machine, which only firmware commands create.
            self.var_doorbells += 1;
            return;
        }
        let offset = store.offset % PAGE as usize;
        let word = |at: usize| {
            u32::from_be_bytes(store.value.to_le_bytes()[4 * at..4 * at + 4].try_into().expect("four bytes"))
        };
        if offset == defs::UAR_ARM && store.size >= 8 {
            self.arm(env, context, defs::Arm(word(0)), word(1));
            return;
        }
        let Some(register) = offset.checked_sub(defs::UAR_BLUE_FLAME) else {
            self.stray_doorbells += 1;
            env.log.line(format_args!(
                "{}: a store of {} bytes at {offset:#x} of a doorbell page is not a doorbell",
                self.name(),
                store.size
            ));
            return;
        };
        let behind = register % (BLUE_FLAME / 2);
        let buffer = (context, store.offset - behind);
        if behind != 0 {
            self.check_blue_flame(env, buffer, behind, store.value);
            return;
        }
        if store.size < 8 {
            self.stray_doorbells += 1;
            env.log.line(format_args!("{}: a doorbell of {} bytes; expected one store of 8", self.name(), store.size));
            return;
        }
        let (first, second) = (defs::ControlOpcode(word(0)), defs::ControlDs(word(1)));
        let found = self.by_sq.get(&second.queue()).copied();
        let Some(sq) = found.and_then(|id| self.sqs.get_mut(id)).filter(|sq| sq.context == context) else {
            self.stray_doorbells += 1;
            env.log.line(format_args!(
                "{}: doorbell for queue {:#x}, which this context does not have",
                self.spec.name,
                second.queue()
            ));
            return;
        };
        sq.doorbells += 1;
        sq.rung = true;
        self.last_doorbells.insert(buffer, (second.queue(), store.value));
        if let Err(why) = sq.check_register(first, second) {
            sq.wrong_doorbells += 1;
            env.log.line(format_args!("{} sq {:#x}: {why}", self.spec.name, sq.number));
        }
    }

    /// Checks the rest of a descriptor that is copied into a BlueFlame buffer.
    fn check_blue_flame(&mut self, env: &mut Env<'_>, buffer: (ContextId, usize), behind: usize, value: u64) {
        let last = self.last_doorbells.get(&buffer).copied();
        let found = last.and_then(|(number, register)| Some((*self.by_sq.get(&number)?, register)));
        let Some((sq, register)) = found.and_then(|(id, register)| Some((self.sqs.get_mut(id)?, register))) else {
            self.stray_doorbells += 1;
            env.log.line(format_args!(
                "{}: a store {behind:#x} behind a register that was not written before",
                self.name()
            ));
            return;
        };
        sq.blue_flames += u64::from(behind == 8);
        if let Err(why) = sq.check_buffer(register, behind, value) {
            sq.wrong_doorbells += 1;
            env.log.line(format_args!("{} sq {:#x}: {why}", self.spec.name, sq.number));
        }
    }

    fn arm(&mut self, env: &mut Env<'_>, context: ContextId, arm: defs::Arm, number: u32) {
        let cq = self.by_cq.get(&number).and_then(|id| self.cqs.get_mut(*id)).filter(|cq| cq.owner.context == context);
        match cq {
            Some(cq) => cq.arm(arm, env.events),
            None => {
                self.stray_doorbells += 1;
                env.log.line(format_args!("{}: arm of cq {number:#x}, which this context does not have", self.name()));
            }
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
        self.steering = Steering::new(self.spec.mlx5.steering, self.ports.len());
        self.firmware_objects = Slab::default();
        self.umems.clear();
        self.by_sq.clear();
        self.by_cq.clear();
        self.last_doorbells.clear();
        for context in self.contexts.values_mut() {
            context.dead = true;
        }
    }

    fn scans(env: &Env<'_>) -> bool {
        env.doorbells == Doorbells::Scan
    }
}

/// Returns the event target of a receive queue.
fn event_target<R: Region>(rq: &Rq<R>) -> EventTarget {
    rq.owner
}
