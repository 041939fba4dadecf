//! What every emulated NIC offers to the kernel side ([`crate::uverbs`]) and to the wire.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::{ioctl, write};

use crate::faults::{Orders, What};
use crate::host::Host;
use crate::log::Log;
use crate::rules::FlowRules;
use crate::topology::{DeviceSpec, Doorbells};
use crate::uverbs::{Attributes, QpCap};
use crate::wire::Outbox;

/// An open context of a device: it owns a doorbell page and objects.
pub type ContextId = u32;

/// Number that a device gave one of its objects.
pub type ObjectId = u32;

/// Where events of an object go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Context.
    pub context: ContextId,
    /// Handle within the context.
    pub handle: u32,
}

/// Something that the application may want to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A completion queue that was armed has a completion.
    Completion(Owner),
    /// Of an object: `EVENT_*`.
    Object(Owner, u32),
    /// Of a port, for all contexts of the device: `EVENT_*`.
    Port(u8, u32),
    /// Of the device, for all contexts.
    Device(u32),
}

/// A command on its way to the device.
#[derive(Debug)]
pub struct Call<'c, H> {
    /// Memory of the application.
    pub host: &'c H,
    /// For refusals.
    pub log: &'c Log,
    /// Who asks.
    pub context: ContextId,
    /// Driver part of the request.
    pub input: &'c [u8],
    /// Room for the driver part of the reply.
    pub room: usize,
    /// Driver part of the reply.
    pub output: Vec<u8>,
    /// The refusal is one that every program meets and lives with: it is not logged.
    pub quiet: bool,
}

impl<H: Host> Call<'_, H> {
    /// Refuses the command as a NIC without the feature would, which is no mistake of the program.
    pub fn decline(&mut self, errno: Errno) -> Errno {
        self.quiet = true;
        errno
    }

    /// Refuses the command, and says why.
    pub fn refuse(&self, errno: Errno, why: impl std::fmt::Display) -> Errno {
        self.log.line(why);
        errno
    }
}

/// What the device works with while packets move.
#[derive(Debug)]
pub struct Env<'e> {
    /// For refusals.
    pub log: &'e Log,
    /// Events go here.
    pub events: &'e mut Vec<Event>,
    /// Frames go here.
    pub outbox: &'e mut Outbox,
    /// Faults on order.
    pub orders: &'e mut Orders,
    /// Which device this is.
    pub device: usize,
    /// First port of the device among all ports.
    pub first_port: usize,
    /// How doorbells are seen.
    pub doorbells: Doorbells,
}

/// A store to the doorbell page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// Offset in the page; behind it in the context's file, where a device has several pages.
    pub offset: usize,
    /// Bytes: 1, 2, 4 or 8.
    pub size: usize,
    /// Value.
    pub value: u64,
}

/// A completion queue to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewCq {
    /// Entries.
    pub entries: u32,
    /// Where events go.
    pub owner: Owner,
}

/// A queue pair to be made, objects by the device's numbers.
#[derive(Clone, Copy, Debug)]
pub struct NewQp {
    /// Protection domain.
    pub pd: ObjectId,
    /// Completions of what is sent.
    pub send_cq: Option<ObjectId>,
    /// Completions of what is received.
    pub recv_cq: Option<ObjectId>,
    /// Indirection table.
    pub table: Option<ObjectId>,
    /// `QPT_*`.
    pub kind: u32,
    /// Flags.
    pub flags: u32,
    /// Sizes.
    pub cap: QpCap,
    /// Where events go.
    pub owner: Owner,
}

/// A work queue to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewWq {
    /// Protection domain.
    pub pd: ObjectId,
    /// Completions.
    pub cq: ObjectId,
    /// Work requests.
    pub max_wr: u32,
    /// Scatter entries for each.
    pub max_sge: u32,
    /// `WQ_FLAGS_*`.
    pub flags: u32,
    /// Where events go.
    pub owner: Owner,
}

/// Walks over frames that arrive: `take` says of those that are left how many at their start it has looked at, and how many of these were
/// taken. How many were in all; if they are only `offered`, up to the first that was not.
#[inline]
pub(crate) fn take_runs(frames: &[&[u8]], offered: bool, mut take: impl FnMut(&[&[u8]]) -> (usize, usize)) -> usize {
    let (mut taken, mut rest) = (0, frames);
    while !rest.is_empty() {
        let (seen, now) = take(rest);
        taken += now;
        if offered && now < seen {
            break;
        }
        rest = &rest[seen..];
    }
    taken
}

/// Completion vectors of a device.
pub(crate) const VECTORS: u32 = 64;

/// An emulated NIC.
///
/// Objects are made and destroyed in an order that the kernel side has checked; numbers that it passes are the device's own.
#[allow(clippy::missing_errors_doc, reason = "the kernel's errors: see the manual page of each call")]
pub trait Device<H: Host>: Send {
    /// Which driver it wants: `DRIVER_*`.
    fn driver(&self) -> u32;

    /// ABI version of that driver.
    fn abi(&self) -> u64;

    /// What it was made from.
    fn spec(&self) -> &DeviceSpec;

    /// Completion vectors.
    fn vectors(&self) -> u32 {
        VECTORS
    }

    /// Limits and capabilities.
    fn query(&self) -> write::ExtendedQueryDeviceReply;

    /// Driver part of the limits, at most `room` bytes.
    fn query_driver_part(&self, room: usize) -> Vec<u8> {
        let _ = room;
        Vec::new()
    }

    /// State of a port, from 1.
    fn query_port(&self, port: u8) -> Option<ioctl::QueryPortReply>;

    /// Entries of the GID tables.
    fn gids(&self) -> Vec<ioctl::GidEntry>;

    /// A context was opened.
    fn open(&mut self, call: &mut Call<'_, H>) -> Result<(), Errno>;

    /// What an open context is like, for a program that imports it.
    fn query_context(&self, call: &mut Call<'_, H>) -> Result<(), Errno> {
        Err(call.refuse(Errno::OPNOTSUPP, format_args!("{}: contexts cannot be imported", self.spec().name)))
    }

    /// What a process that imports the context needs to know of it, as a number that [`Self::adopt`] takes.
    fn facts(&self, context: ContextId) -> Option<u64> {
        let _ = context;
        None
    }

    /// A context that another process has open, imported here.
    fn adopt(&mut self, context: ContextId, facts: u64) -> Result<(), Errno> {
        let _ = (context, facts);
        Err(Errno::OPNOTSUPP)
    }

    /// Number on the wire of a protection domain.
    fn pd_number(&self, pd: ObjectId) -> Option<u32> {
        let _ = pd;
        None
    }

    /// A context is gone, and its objects with it.
    fn close(&mut self, context: ContextId);

    /// The application maps `length` bytes of the device at `offset`: bytes of the context's file that show it.
    fn map(&mut self, log: &Log, context: ContextId, offset: u64, length: usize) -> Result<u64, Errno>;

    /// New protection domain.
    fn alloc_pd(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno>;
    /// Protection domain gone.
    fn dealloc_pd(&mut self, pd: ObjectId);
    /// New memory region: its number, and its keys.
    fn reg_mr(
        &mut self,
        call: &mut Call<'_, H>,
        pd: ObjectId,
        region: H::Region,
        iova: u64,
        access: u32,
    ) -> Result<(ObjectId, u32, u32), Errno>;
    /// Keys and length.
    fn query_mr(&self, mr: ObjectId) -> Option<(u32, u32, u64)>;
    /// Memory region gone.
    fn dereg_mr(&mut self, mr: ObjectId);
    /// New completion queue, and the entries that it really has.
    fn create_cq(&mut self, call: &mut Call<'_, H>, cq: &NewCq) -> Result<(ObjectId, u32), Errno>;
    /// Completion queue gone.
    fn destroy_cq(&mut self, cq: ObjectId);
    /// New queue pair: its number for the kernel, its number on the wire, and the sizes that it really has.
    fn create_qp(&mut self, call: &mut Call<'_, H>, qp: &NewQp) -> Result<(ObjectId, u32, QpCap), Errno>;
    /// New state.
    fn modify_qp(&mut self, call: &mut Call<'_, H>, qp: ObjectId, mask: u32, state: u8, port: u8) -> Result<(), Errno>;
    /// Queue pair gone.
    fn destroy_qp(&mut self, qp: ObjectId);
    /// New work queue, and its number on the wire.
    fn create_wq(&mut self, call: &mut Call<'_, H>, wq: &NewWq) -> Result<(ObjectId, u32), Errno>;
    /// New state.
    fn modify_wq(&mut self, call: &mut Call<'_, H>, wq: ObjectId, mask: u32, state: u32) -> Result<(), Errno>;
    /// Work queue gone.
    fn destroy_wq(&mut self, wq: ObjectId);
    /// New indirection table.
    fn create_table(&mut self, call: &mut Call<'_, H>, wqs: &[ObjectId]) -> Result<ObjectId, Errno>;
    /// Indirection table gone.
    fn destroy_table(&mut self, table: ObjectId);

    /// Flow rules, if the hardware has them.
    fn rules(&mut self) -> Option<&mut dyn FlowRules<H>> {
        None
    }

    /// A method of the driver's own.
    fn method(&mut self, call: &mut Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        let _ = (call, attributes);
        Err(Errno::PROTONOSUPPORT)
    }

    /// A doorbell rang. True if there is more to do than fitted into the outbox: [`Self::work`] goes on.
    fn doorbell(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) -> bool;

    /// Goes on with what is posted; in scan mode looks for it. True if there may be more.
    fn work(&mut self, env: &mut Env<'_>) -> bool;

    /// Frames arrived at a port (from 0), one behind the other: how many were taken. If they are only `offered`, the first that is not taken
    /// is the last that is looked at, and does not count as dropped.
    fn receive(&mut self, env: &mut Env<'_>, port: usize, frames: &[&[u8]], offered: bool) -> usize;

    /// A burst of arriving frames is over: completions that were held back go out.
    fn flush(&mut self, env: &mut Env<'_>);

    /// A fault was ordered that does not wait for a packet.
    fn fault(&mut self, env: &mut Env<'_>, what: &What);

    /// Whether the device was reset since the context was opened.
    fn is_dead(&self, context: ContextId) -> bool;

    /// Counters of ports and queues.
    fn counters(&self) -> serde_json::Value;
}
