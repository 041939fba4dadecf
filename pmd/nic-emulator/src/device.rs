//! The interface of an emulated NIC to the kernel side ([`crate::uverbs`]) and to the links.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::{EVENT_PORT_ACTIVE, EVENT_PORT_ERR, QPT_RAW_PACKET, ioctl, write};

use crate::attributes::Attributes;
use crate::core_clock::ClockPage;
use crate::faults::{FaultKind, PendingFaults};
use crate::host::Host;
use crate::identity;
use crate::links::KernelPort;
use crate::log::Log;
use crate::outbox::Outbox;
use crate::rules::FlowRules;
use crate::topology::{DeviceSpec, Doorbells};

pub use crate::call::{Call, ContextId, Event, EventTarget, ObjectId};

/// State that a device uses while it processes packets and doorbells.
#[derive(Debug)]
pub struct Env<'e> {
    /// Log for refused descriptors and doorbells.
    pub log: &'e Log,
    /// Events to be delivered to applications.
    pub events: &'e mut Vec<Event>,
    /// Frames to be sent over the links.
    pub outbox: &'e mut Outbox,
    /// Faults that are injected and have not happened yet.
    pub faults: &'e mut PendingFaults,
    /// The kernel's interfaces of all ports; `None` for ports without one.
    pub(crate) kernel_ports: &'e mut [Option<KernelPort>],
    /// Index of this device.
    pub device: usize,
    /// Index of the device's first port among all ports.
    pub first_port: usize,
    /// Mode in which doorbells are observed.
    pub doorbells: Doorbells,
}

impl Env<'_> {
    /// Passes a received frame that no flow rule takes to the kernel's interface of a port of this device. Returns
    /// false if the port has none.
    pub(crate) fn leave_to_kernel(&mut self, port: usize, frame: &[u8]) -> bool {
        let Some(Some(kernel)) = self.kernel_ports.get_mut(self.first_port + port) else { return false };
        kernel.receive(frame);
        true
    }
}

/// A store to a doorbell page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// Offset in the doorbell page. For devices with several pages it is the offset in the context's file.
    pub offset: usize,
    /// Size in bytes: 1, 2, 4 or 8.
    pub size: usize,
    /// Value that is stored.
    pub value: u64,
}

/// Parameters of a new completion queue.
#[derive(Clone, Copy, Debug)]
pub struct NewCq {
    /// Number of entries.
    pub entries: u32,
    /// Event target of the new queue.
    pub owner: EventTarget,
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of ibv_qp_cap")]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

/// Parameters of a new queue pair. Objects are named by the device's numbers.
#[derive(Clone, Copy, Debug)]
pub struct NewQp {
    /// Protection domain.
    pub pd: ObjectId,
    /// Completion queue of the send queue.
    pub send_cq: Option<ObjectId>,
    /// Completion queue of the receive queue.
    pub recv_cq: Option<ObjectId>,
    /// Receive indirection table.
    pub table: Option<ObjectId>,
    /// Queue-pair type, `QPT_*`.
    pub kind: u32,
    /// Creation flags.
    pub flags: u32,
    /// Requested sizes.
    pub cap: QpCap,
    /// Event target of the new queue pair.
    pub owner: EventTarget,
}

impl NewQp {
    /// Refuses queue pairs of a type other than raw packet.
    pub(crate) fn check_raw_packet<H: Host>(&self, call: &Call<'_, H>, device: &str) -> Result<(), Errno> {
        if self.kind == QPT_RAW_PACKET {
            return Ok(());
        }
        let why =
            format_args!("{device}: unsupported queue pair type {}; expected raw packet ({QPT_RAW_PACKET})", self.kind);
        Err(call.refuse(Errno::OPNOTSUPP, why))
    }
}

/// Parameters of a new work queue.
#[derive(Clone, Copy, Debug)]
pub struct NewWq {
    /// Protection domain.
    pub pd: ObjectId,
    /// Completion queue.
    pub cq: ObjectId,
    /// Number of work requests.
    pub max_wr: u32,
    /// Scatter entries of each work request.
    pub max_sge: u32,
    /// Creation flags, `WQ_FLAGS_*`.
    pub flags: u32,
    /// Event target of the new queue.
    pub owner: EventTarget,
}

/// Passes received frames to `take` run by run, and returns the number of accepted frames.
///
/// `take` gets the remaining frames. It returns how many of them, from the start, it has processed and how
/// many of these it accepted. With `lossless` the walk ends at the first frame that is not accepted.
#[inline]
pub(crate) fn receive_runs(
    frames: &[&[u8]],
    lossless: bool,
    mut take: impl FnMut(&[&[u8]]) -> (usize, usize),
) -> usize {
    let (mut taken, mut rest) = (0, frames);
    while !rest.is_empty() {
        let (seen, now) = take(rest);
        taken += now;
        if lossless && now < seen {
            break;
        }
        rest = &rest[seen..];
    }
    taken
}

/// Sets the link state of a port, and reports a change of it.
pub(crate) fn set_link(state: &mut bool, port: u8, up: bool, events: &mut Vec<Event>) {
    if std::mem::replace(state, up) != up {
        events.push(Event::Port(port, if up { EVENT_PORT_ACTIVE } else { EVENT_PORT_ERR }));
    }
}

/// Part of a device that a program maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// Doorbells, at this offset of the context's file.
    Doorbells(u64),
    /// A page by which programs read the clock. It can only be read.
    Clock(ClockPage),
}

/// Number of completion vectors of a device.
pub(crate) const VECTORS: u32 = 64;

/// An emulated NIC.
///
/// The kernel side has checked that objects are created and destroyed in a valid order. It names objects by
/// the device's own numbers.
#[allow(clippy::missing_errors_doc, reason = "the kernel's errors: see the manual page of each call")]
pub trait Device<H: Host>: Send {
    /// Returns the driver that the device needs, `DRIVER_*`.
    fn driver(&self) -> u32;

    /// Returns the ABI version of that driver.
    fn abi(&self) -> u64;

    /// Returns the specification that the device was created from.
    fn spec(&self) -> &DeviceSpec;

    /// Returns the number of completion vectors.
    fn vectors(&self) -> u32 {
        VECTORS
    }

    /// Returns limits and capabilities.
    fn query(&self) -> write::ExtendedQueryDeviceReply;

    /// Returns the driver part of limits and capabilities, at most `room` bytes.
    fn query_driver_part(&self, room: usize) -> Vec<u8> {
        let _ = room;
        Vec::new()
    }

    /// Returns the state of a port; ports are numbered from 1.
    fn query_port(&self, port: u8) -> Option<ioctl::QueryPortReply>;

    /// Returns the entries of the GID tables of all ports.
    fn gids(&self) -> Vec<ioctl::GidEntry> {
        identity::gids(self.spec())
    }

    /// Opens a context.
    fn open(&mut self, call: &mut Call<'_, H>) -> Result<(), Errno>;

    /// Writes the properties of an open context to the reply, for a program that imports it.
    fn query_context(&self, call: &mut Call<'_, H>) -> Result<(), Errno> {
        Err(call.refuse(Errno::OPNOTSUPP, format_args!("{}: contexts cannot be imported", self.spec().name)))
    }

    /// Returns what a process that imports the context must know, encoded for [`Self::import_context`].
    fn export_context(&self, context: ContextId) -> Option<u64> {
        let _ = context;
        None
    }

    /// Imports a context that another process has open.
    fn import_context(&mut self, context: ContextId, export_state: u64) -> Result<(), Errno> {
        let _ = (context, export_state);
        Err(Errno::OPNOTSUPP)
    }

    /// Returns the hardware number of a protection domain.
    fn pd_number(&self, pd: ObjectId) -> Option<u32> {
        let _ = pd;
        None
    }

    /// Closes a context; its objects are destroyed already.
    fn close(&mut self, context: ContextId);

    /// Maps `length` bytes of the device at `offset`; returns what these bytes are.
    fn map(&mut self, log: &Log, context: ContextId, offset: u64, length: usize) -> Result<Mapping, Errno>;

    /// Creates a protection domain.
    fn alloc_pd(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno>;
    /// Destroys a protection domain.
    fn dealloc_pd(&mut self, pd: ObjectId);
    /// Registers a memory region; returns its number, local key and remote key.
    fn reg_mr(
        &mut self,
        call: &mut Call<'_, H>,
        pd: ObjectId,
        region: H::Region,
        iova: u64,
        access: u32,
    ) -> Result<(ObjectId, u32, u32), Errno>;
    /// Returns local key, remote key and length of a memory region.
    fn query_mr(&self, mr: ObjectId) -> Option<(u32, u32, u64)>;
    /// Deregisters a memory region.
    fn dereg_mr(&mut self, mr: ObjectId);
    /// Creates a completion queue; returns its number and its actual number of entries.
    fn create_cq(&mut self, call: &mut Call<'_, H>, cq: &NewCq) -> Result<(ObjectId, u32), Errno>;
    /// Destroys a completion queue.
    fn destroy_cq(&mut self, cq: ObjectId);
    /// Creates a queue pair; returns its number, its hardware number and its actual sizes.
    fn create_qp(&mut self, call: &mut Call<'_, H>, qp: &NewQp) -> Result<(ObjectId, u32, QpCap), Errno>;
    /// Changes the state of a queue pair.
    fn modify_qp(&mut self, call: &mut Call<'_, H>, qp: ObjectId, mask: u32, state: u8, port: u8) -> Result<(), Errno>;
    /// Destroys a queue pair.
    fn destroy_qp(&mut self, qp: ObjectId);
    /// Creates a work queue; returns its number and its hardware number.
    fn create_wq(&mut self, call: &mut Call<'_, H>, wq: &NewWq) -> Result<(ObjectId, u32), Errno>;
    /// Changes the state of a work queue.
    fn modify_wq(&mut self, call: &mut Call<'_, H>, wq: ObjectId, mask: u32, state: u32) -> Result<(), Errno>;
    /// Destroys a work queue.
    fn destroy_wq(&mut self, wq: ObjectId);
    /// Creates a receive indirection table.
    fn create_table(&mut self, call: &mut Call<'_, H>, wqs: &[ObjectId]) -> Result<ObjectId, Errno>;
    /// Destroys a receive indirection table.
    fn destroy_table(&mut self, table: ObjectId);

    /// Returns the flow-rule interface, if the hardware has one.
    fn rules(&mut self) -> Option<&mut dyn FlowRules<H>> {
        None
    }

    /// Runs a driver-specific ioctl method.
    fn method(&mut self, call: &mut Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        let _ = (call, attributes);
        Err(Errno::PROTONOSUPPORT)
    }

    /// Handles a doorbell. Returns true if work is left because the outbox is full; [`Self::work`] continues
    /// it.
    fn doorbell(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) -> bool;

    /// Continues to process posted descriptors; in scan mode it looks for them. Returns true if work may be
    /// left.
    fn work(&mut self, env: &mut Env<'_>) -> bool;

    /// Receives frames at a port (counted from 0) and returns the number of accepted frames. With `lossless`
    /// the device stops at the first frame that it cannot accept, and does not count it as dropped.
    fn receive(&mut self, env: &mut Env<'_>, port: usize, frames: &[&[u8]], lossless: bool) -> usize;

    /// Ends a burst of received frames: the device writes completions that it has held back.
    fn flush(&mut self, env: &mut Env<'_>);

    /// Applies an injected fault that does not wait for a packet.
    fn fault(&mut self, env: &mut Env<'_>, kind: &FaultKind);

    /// Returns true if the device was reset after the context was opened.
    fn is_dead(&self, context: ContextId) -> bool;

    /// Returns for each port the number of packets without a receive buffer, if the kernel shows it in sysfs.
    fn out_of_buffer(&self, port: usize) -> Option<u64> {
        let _ = port;
        None
    }

    /// Returns the counters of ports and queues.
    fn counters(&self) -> serde_json::Value;
}
