//! Contexts that another process has open: what a program that imports one may ask, and where the answers come from.
//!
//! The kernel keeps one state for all processes that have a descriptor of a context. Here it lies in the process that opened the device;
//! importers ask that process about objects, and bring only commands that say something about the device itself.

use rustix::io::Errno;

use super::objects::Kind;
use super::{Context, Objects, Request};
use crate::device::{Call, ContextId, Device};
use crate::host::Host;

/// What an importer asks the owner of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Question {
    /// Minor number of the device, and what [`Device::adopt`] wants to know.
    Context = 1,
    /// Number of a protection domain.
    Pd = 2,
    /// Local key, remote key and length of a memory region.
    Mr = 3,
}

impl Question {
    /// As it was written down by another process.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Context, Self::Pd, Self::Mr].into_iter().find(|question| *question as u32 == number)
    }
}

/// The way to the process that owns a context.
pub trait Elsewhere: Send + std::fmt::Debug {
    /// Asks about an object by its handle.
    ///
    /// # Errors
    /// As [`crate::Emulator::answer`]; `EIO` if the owner is gone.
    fn ask(&self, question: Question, handle: u32) -> Result<[u64; 3], Errno>;
}

impl Context {
    /// A context that another process has open.
    pub(crate) fn imported(id: ContextId, device: usize, elsewhere: Box<dyn Elsewhere>) -> Self {
        Self { live: true, objects: Objects::default(), elsewhere: Some(elsewhere), ..Self::new(id, device) }
    }

    /// What this context knows, or its owner.
    pub(crate) fn answer<H: Host>(
        &self,
        device: &dyn Device<H>,
        question: Question,
        handle: u32,
    ) -> Result<[u64; 3], Errno> {
        if let Some(elsewhere) = &self.elsewhere {
            return elsewhere.ask(question, handle);
        }
        match question {
            Question::Context => {
                Ok([self.device as u64, device.facts(self.id).filter(|_| self.live).ok_or(Errno::OPNOTSUPP)?, 0])
            }
            Question::Pd => {
                let number = device.pd_number(self.objects.id(handle, Kind::Pd)?).ok_or(Errno::OPNOTSUPP)?;
                Ok([number.into(), 0, 0])
            }
            Question::Mr => {
                let (lkey, rkey, length) = device.query_mr(self.objects.id(handle, Kind::Mr)?).ok_or(Errno::INVAL)?;
                Ok([lkey.into(), rkey.into(), length])
            }
        }
    }

    /// Objects can be made and ended by the process that opened the device only.
    pub(super) fn check_imported<H: Host>(
        &self,
        device: &dyn Device<H>,
        call: &Call<'_, H>,
        request: &Request,
    ) -> Result<(), Errno> {
        let tells = matches!(
            request,
            Request::QueryContext
                | Request::QueryDevice
                | Request::QueryDeviceExtended
                | Request::QueryPort { .. }
                | Request::QueryGidTable { .. }
                | Request::QueryGidEntry { .. }
                | Request::AllocAsyncEvents
                | Request::QueryPd { .. }
                | Request::QueryMr { .. }
                | Request::Driver { .. }
        );
        if self.elsewhere.is_none() || tells {
            return Ok(());
        }
        let name = &device.spec().name;
        Err(call.refuse(
            Errno::OPNOTSUPP,
            format_args!("{name}: {} by a process that has imported the device is not emulated", request.name()),
        ))
    }
}
