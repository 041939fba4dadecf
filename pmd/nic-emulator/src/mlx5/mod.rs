//! A ConnectX-5 / 6 Dx.
//!
//! Sources for what it does: rdma-core `providers/mlx5`, Linux `drivers/infiniband/hw/mlx5`, DPDK `drivers/net/mlx5` and
//! `drivers/common/mlx5/mlx5_prm.h`, VPP `src/plugins/rdma`.
//!
//! The authority over what is posted is the doorbell record in the application's memory; the register only tells to look. With
//! doorbells that are seen, nothing moves before the register is written, so that a missing one is found.

mod completion;
mod control;
mod queues;
mod receive;
mod steering;
mod transmit;
mod var;

use std::collections::HashMap;

use wirepath_nic_defs::mlx5 as defs;

use crate::device::{ContextId, Env, ObjectId, Owner, Store};
use crate::frame::Toeplitz;
use crate::host::{Host, Region};
use crate::keys::Keys;
use crate::slab::{Apart, Numbers, Slab};
use crate::topology::{DeviceSpec, Doorbells};
use completion::Cq;
use queues::{Rq, Sq};
use steering::Steering;

/// Bytes of a doorbell page.
const PAGE: u64 = 4096;
/// Doorbell pages of a context.
const PAGES: usize = 24;
/// Where they begin in its file: behind the page of other devices. Pages of virtio doorbells follow.
const FIRST_PAGE: u64 = 1;
const _: () = assert!((FIRST_PAGE + (PAGES + var::VARS) as u64) * PAGE <= crate::DOORBELL_BYTES);
/// Bytes between BlueFlame registers; each has two buffers of half that.
const BLUE_FLAME: usize = 512;
/// Most bytes of a send WQE.
const MAX_SEND_WQE: u16 = 1024;
/// Most bytes of a receive WQE.
const MAX_RECV_WQE: u16 = 512;
/// Most entries of an indirection table.
const MAX_TABLE: usize = 8192;

/// The device.
#[derive(Debug)]
pub struct Mlx5<H: Host> {
    spec: DeviceSpec,
    ports: Vec<Port>,
    keys: Keys<H::Region>,
    pds: Slab<ContextId>,
    cqs: Slab<Cq<H::Region>>,
    sqs: Slab<Sq<H::Region>>,
    rqs: Slab<Rq<H::Region>>,
    tables: Slab<Vec<ObjectId>>,
    qps: Slab<Qp>,
    steering: Steering,
    /// Numbers on the wire: queues of all kinds, and completion queues.
    queue_numbers: Numbers,
    cq_numbers: Numbers,
    by_sq: HashMap<u32, ObjectId>,
    by_cq: HashMap<u32, ObjectId>,
    /// What registers were told last, by context and place: queue, and first words of the descriptor.
    told: HashMap<(ContextId, usize), (u32, u64)>,
    contexts: HashMap<ContextId, Opened>,
    /// Scratch of the transmit path: the descriptor at hand.
    wqe: Box<[u8; MAX_SEND_WQE as usize]>,
    /// Send queue that is served first next time.
    turn: usize,
    /// Time of the burst that is arriving.
    arrives: Option<u64>,
    stray_doorbells: u64,
    var_doorbells: u64,
    resets: u64,
    scan: bool,
}

/// A context.
#[derive(Debug, Default)]
struct Opened {
    /// The device was reset under it.
    dead: bool,
    /// Doorbell pages are objects.
    objects: bool,
    /// Firmware objects can be made.
    firmware: bool,
    cqe_version: u8,
    /// Doorbell pages in use.
    pages: [bool; PAGES],
    /// Queues by register, where pages are not objects.
    registers: [u32; control::STATIC_REGISTERS],
    /// Pages of virtio doorbells in use.
    vars: [bool; var::VARS],
    /// Another process has it open, and knows which pages are in use.
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
    Rss(Box<Apart<Rss>>),
}

#[derive(Debug)]
struct Rss {
    number: u32,
    table: Vec<ObjectId>,
    /// The queue, if the table names one alone.
    only: Option<ObjectId>,
    hash: Option<Toeplitz>,
    fields: u64,
    /// See [`receive::tuples`].
    tuples: Option<(u8, defs::HashType)>,
    /// Whether packets are looked into that are in a tunnel.
    tunnels: bool,
}

impl<H: Host> Mlx5<H> {
    /// A device as the topology wants it. Whoever looks at queues and sees no doorbells (`scan`) learns from their records that completion
    /// queues were armed.
    pub fn new(spec: DeviceSpec, scan: bool) -> Self {
        Self {
            ports: spec.ports.iter().map(|_| Port { up: true, ..Port::default() }).collect(),
            steering: Steering::new(spec.mlx5.steering, spec.ports.len()),
            spec,
            keys: Keys::default(),
            pds: Slab::default(),
            cqs: Slab::default(),
            sqs: Slab::default(),
            rqs: Slab::default(),
            tables: Slab::default(),
            qps: Slab::default(),
            queue_numbers: Numbers::new(0x40..0x4000),
            cq_numbers: Numbers::new(0x4_0400..0x4_4000),
            by_sq: HashMap::new(),
            by_cq: HashMap::new(),
            contexts: HashMap::new(),
            wqe: Box::new([0; MAX_SEND_WQE as usize]),
            turn: 0,
            arrives: None,
            told: HashMap::new(),
            stray_doorbells: 0,
            var_doorbells: 0,
            resets: 0,
            scan,
        }
    }

    fn name(&self) -> &str {
        &self.spec.name
    }

    /// A store to a doorbell page.
    fn ring(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) {
        if store.offset as u64 / PAGE >= FIRST_PAGE + PAGES as u64 {
            // Of a queue of a virtual machine, which only firmware commands make.
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
                "{}: a store of {} bytes at {offset:#x} of a doorbell page is no doorbell",
                self.name(),
                store.size
            ));
            return;
        };
        let behind = register % (BLUE_FLAME / 2);
        let buffer = (context, store.offset - behind);
        if behind != 0 {
            self.copied(env, buffer, behind, store.value);
            return;
        }
        if store.size < 8 {
            self.stray_doorbells += 1;
            env.log.line(format_args!("{}: a doorbell of {} bytes; it is one store of 8", self.name(), store.size));
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
        self.told.insert(buffer, (second.queue(), store.value));
        if let Err(why) = sq.check_register(first, second) {
            sq.wrong_doorbells += 1;
            env.log.line(format_args!("{} sq {:#x}: {why}", self.spec.name, sq.number));
        }
    }

    /// The rest of a descriptor that is copied into a BlueFlame buffer.
    fn copied(&mut self, env: &mut Env<'_>, buffer: (ContextId, usize), behind: usize, value: u64) {
        let told = self.told.get(&buffer).copied();
        let found = told.and_then(|(number, told)| Some((*self.by_sq.get(&number)?, told)));
        let Some((sq, told)) = found.and_then(|(id, told)| Some((self.sqs.get_mut(id)?, told))) else {
            self.stray_doorbells += 1;
            env.log.line(format_args!("{}: a store {behind:#x} behind a register that was told nothing", self.name()));
            return;
        };
        sq.blue_flames += u64::from(behind == 8);
        if let Err(why) = sq.check_buffer(told, behind, value) {
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
        self.steering = Steering::new(self.spec.mlx5.steering, self.ports.len());
        self.by_sq.clear();
        self.by_cq.clear();
        self.told.clear();
        for context in self.contexts.values_mut() {
            context.dead = true;
        }
    }

    fn scans(env: &Env<'_>) -> bool {
        env.doorbells == Doorbells::Scan
    }
}

/// Where events of a work queue go, for queues that stop.
fn owner_of<R: Region>(rq: &Rq<R>) -> Owner {
    rq.owner
}
