//! Queues of a running port in another process.
//!
//! A port that offers it listens on a UNIX socket. A process that attaches gets queues of its own, made for it by the first, and a part of the
//! packet buffers; it maps the memory of the queues, the packets and the page of doorbells, and transmits and receives without the first,
//! which keeps all objects of the hardware and goes on with its own queues.
//!
//! ```text
//! process with the port                       process that attaches
//!                            <- attach ------ so many queues, so many buffers
//! makes queues, sets buffers aside
//!   -- description, files: device, packets, queue memory, lease ->
//!                                             maps them, posts buffers, works
//!                            <- done -------- (or nothing, if it was killed)
//! ends the queues
//!   -- ended ----------------------------->   frees what was posted
//!                                             unmaps the packets, when none is left
//! takes the buffers back    <- closes -------
//! ```
//!
//! Either may die at any time. The first sees that the socket is closed, destroys the queues of whoever is gone, and has its buffers again:
//! not before, since even a free buffer is written to, by whoever's it is. The other sees it by [`Attached::is_live`], and hears why from
//! [`Attached::why_ended`] (the device failed, the port stopped).
//!
//! Queues that only send disturb nobody. Receive queues take part in how packets are spread. An mlx5 spreads them by rules, so that queues are
//! made beside those that run and new rules take the place of the old ones: the first loses nothing, and keeps what flow rules of its own are
//! about. A MANA has one queue pair for a port that spreads over queues and cannot be changed (linux: drivers/infiniband/hw/mana/qp.c): all
//! receive queues are made anew when some are lent and when they come back, and what arrives meanwhile is lost. So it is with an mlx5 whose
//! queues had to be made anew while some were lent and that takes flow rules, as these spread packets over what is lent then.
//!
//! # Whom this trusts
//!
//! Every message names the protocol and its version, and is checked whole: before anything is mapped, and by what the kernel says of the
//! imported device, domain and registration where the provider can import (libmlx5). Whoever sends something else, too much or nothing is
//! ended, and nobody else notices.
//!
//! The memory of all queues of the port is mapped in both processes. Words that the other writes there, into rings, completions and doorbell
//! records of either, are for the first what a device that lies writes: they lead it nowhere outside its buffers. They may cost it a queue,
//! which is made anew with what was on its way, as often as they are written.
//!
//! Not protected, so that whoever attaches is to be trusted like the first process itself:
//!
//! * The packets: the region of the pool is mapped whole, with the metadata of every packet and the lists of free ones, which are not
//!   checked on the way of packets. Whoever writes beyond what was lent can make the first read and write anywhere.
//! * Where the device reads and writes: descriptors in the memory of queues name addresses and keys, and the keys of all that the port has
//!   registered are valid in them.
//! * The device's file: by it, the kernel takes commands about every object that the first has made.
//!
//! The socket is therefore for the user of the first process only (mode 0600, and the peer's user is looked at). A process that is not to be
//! trusted gets a port, a pool and a copy of its own.

mod borrower;
mod lender;
mod message;

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use borrower::Attached;
pub(crate) use borrower::{Invitation, Views};
pub use lender::Offer;
pub(crate) use lender::{Lender, Spreading, Turn};
pub(crate) use message::At;
#[cfg(any(test, fuzzing))]
pub use message::hostile;
pub use message::{AttachError, PoolStatus, QueueStatus, Status, VERSION, Wanted};
use serde::Serialize;
use serde::de::DeserializeOwned;
use wirepath_verbs::mlx5::var::{ImportedVar, Var};
use wirepath_verbs::{Context, Fate, Result};

use super::device::{Nic, Parts};
use super::graves::Ending;
use super::keys::Keys;
use super::receive::{PoolDry, Spread};
use crate::packet::{Blank, Pool};
use crate::port::PortConfig;

/// A hardware's queue that another process works with: what keeps it, and how it is seen to be gone.
pub(crate) struct Lent<A> {
    pub(crate) keep: Box<dyn Any + Send + Sync>,
    pub(crate) fate: Fate,
    /// Where it lies.
    pub(crate) at: A,
}

/// What receive queues of another process work with here.
pub(crate) struct Borrow<'a> {
    pub(crate) keys: &'a Keys,
    pub(crate) pool: &'a Pool,
    pub(crate) blank: &'a Blank,
}

/// A NIC whose queues can be in another process.
pub(crate) trait Lend: Nic {
    /// What all queues have in common.
    type Common: Serialize + DeserializeOwned;
    /// Where a send queue lies.
    type SendAt: Serialize + DeserializeOwned;
    /// The device in the process that works with its queues.
    type Visitor;

    /// What all queues have in common.
    fn common(&self, memory: &Self::Memory, config: &PortConfig) -> Self::Common;

    /// Makes a send queue without packets.
    fn lend_send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Lent<Self::SendAt>>;

    /// The key of the port's packets.
    fn lkey(memory: &Self::Memory) -> u32;

    /// The kernel's name of their registration, where another process can import it.
    fn registration(memory: &Self::Memory) -> Option<u32>;

    /// A page of virtio doorbells for another process.
    fn var(verbs: &Self::Verbs) -> Result<Var>;

    /// A page of virtio doorbells of another process.
    fn import_var(visitor: &Self::Visitor, bytes: &[u8], lease: &OwnedFd) -> Result<ImportedVar>;

    /// Comes to the device whose open file was passed; the context, if the provider can import it.
    fn visit(device: OwnedFd) -> Result<(Self::Visitor, Option<Context>)>;

    /// A send queue of another process. `None`: there is none.
    fn borrow_send(
        visitor: &Self::Visitor,
        common: &Self::Common,
        at: &Self::SendAt,
        views: &Views,
        keys: &Arc<Keys>,
        ending: Ending,
    ) -> Result<Option<Self::Tx>>;

    /// A receive queue of another process. `None`: there is none.
    fn borrow_receive(
        visitor: &Self::Visitor,
        common: &Self::Common,
        at: &Self::ReceiveAt,
        views: &Views,
        around: &Borrow<'_>,
        spread: Arc<Spread>,
    ) -> std::result::Result<Option<Self::Rx>, PoolDry>;

    /// Largest layer-3 packet, if everything that is described is possible.
    fn mtu(common: &Self::Common) -> Option<u16>;
}
