//! A uverbs command on its way to a device: the command, the numbers that name objects, and events.

use rustix::io::Errno;

use crate::host::Host;
use crate::log::Log;

/// Identifies an open context of a device. A context owns doorbell pages and objects.
pub type ContextId = u32;

/// The device's number for one of its objects.
pub type ObjectId = u32;

/// The object that an event is reported for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTarget {
    /// Context that owns the object.
    pub context: ContextId,
    /// Handle of the object within the context.
    pub handle: u32,
}

/// An event that the application may want to be notified of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An armed completion queue has a new completion.
    Completion(EventTarget),
    /// Asynchronous event of an object, with its `EVENT_*` code.
    Object(EventTarget, u32),
    /// Asynchronous event of a port, sent to all contexts of the device: port number and `EVENT_*` code.
    Port(u8, u32),
    /// Asynchronous event of the device, sent to all its contexts: `EVENT_*` code.
    Device(u32),
}

/// A uverbs command on its way to the device.
#[derive(Debug)]
pub struct Call<'c, H> {
    /// Memory of the application.
    pub host: &'c H,
    /// Log for refused commands.
    pub log: &'c Log,
    /// Context that issued the command.
    pub context: ContextId,
    /// Driver part of the request.
    pub input: &'c [u8],
    /// Capacity for the driver part of the reply, in bytes.
    pub room: usize,
    /// Driver part of the reply.
    pub output: Vec<u8>,
    /// True if every program meets this refusal and handles it; such a refusal is not logged.
    pub quiet: bool,
}

impl<H: Host> Call<'_, H> {
    /// Refuses the command as a NIC without the feature does. This is no mistake of the program, so nothing
    /// is logged.
    pub fn decline(&mut self, errno: Errno) -> Errno {
        self.quiet = true;
        errno
    }

    /// Refuses the command and logs the reason.
    pub fn refuse(&self, errno: Errno, why: impl std::fmt::Display) -> Errno {
        self.log.line(why);
        errno
    }
}
