// UNSAFETY: calls libibverbs and reads the context that it hands out.
#![allow(unsafe_code)]

//! An open device.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rdma_core_sys::verbs::{ibv_context, ibv_device, provider_operations};
use rdma_core_sys::{Ibverbs, MissingSymbol, RdmaCore};
use rustix::fs::OFlags;

use crate::allocator::Installed;
use crate::error::{CallError, Situation, diagnose};
use crate::{AsyncEvents, Cause, Device, DeviceAttributes, Error, PortAttributes, Result, attributes};

/// Whose direct verbs work on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Provider {
    /// libmana.
    Mana,
    /// libmlx5.
    Mlx5,
    /// libhbl.
    Hbl,
    /// Any other: plain verbs only.
    Other,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mana => "libmana",
            Self::Mlx5 => "libmlx5",
            Self::Hbl => "libhbl",
            Self::Other => "another provider",
        })
    }
}

/// Names a queue in events; never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(u64);

impl ObjectId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// As the user context of a verbs object.
    pub(crate) fn to_context(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    pub(crate) fn of_context(context: *mut c_void) -> Self {
        Self(context.addr() as u64)
    }
}

/// The errno of this thread.
pub(crate) fn last_errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// An open device. Clones are the same one; it is closed when the last of them, and of all objects made from it, is gone.
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) inner: Arc<ContextInner>,
}

pub(crate) struct ContextInner {
    pub(crate) raw: NonNull<ibv_context>,
    pub(crate) libraries: &'static RdmaCore,
    device: Device,
    provider: Provider,
    /// It takes commands of the device (mlx5: DevX).
    pub(crate) commands: AtomicBool,
    pub(crate) events_taken: AtomicBool,
    // After `raw` was closed: until then the device may write there.
    pub(crate) allocator: OnceLock<Box<Installed>>,
    orphans: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
}

// SAFETY: libibverbs and its providers lock their state; the context may be used and closed on any thread (ibv_open_device(3)).
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl ContextInner {
    pub(crate) fn ibverbs(&self) -> &'static Ibverbs {
        self.libraries.ibverbs()
    }

    pub(crate) fn device_name(&self) -> String {
        self.device.name()
    }

    fn situation(&self, port: Option<u8>) -> Situation {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
        let interfaces =
            self.device.interfaces().into_iter().filter(|interface| port.is_none_or(|port| interface.port == port));
        Situation {
            mana: self.provider == Provider::Mana,
            interfaces: interfaces.map(|interface| interface.name).collect(),
            device_file: self.device.file(),
            locked_limit: limit.current,
        }
    }

    /// The error of a call that failed with this errno.
    pub(crate) fn error(&self, call: &'static str, errno: c_int, port: Option<u8>) -> Error {
        let cause = diagnose(call, errno, &self.situation(port));
        let name = self.device.name();
        let subject = port.map_or_else(|| name.clone(), |port| format!("{name} port {port}"));
        CallError { call, subject, errno, cause }.into()
    }

    /// The object that a call returned; a null pointer is an error told by errno.
    pub(crate) fn created<T>(&self, call: &'static str, object: *mut T, port: Option<u8>) -> Result<NonNull<T>> {
        // At once: anything else may change errno.
        let errno = last_errno();
        NonNull::new(object).ok_or_else(|| self.error(call, errno, port))
    }

    /// The verdict of a call that returns an errno, or -1 and sets it.
    pub(crate) fn done(&self, call: &'static str, result: c_int) -> Result<()> {
        match result {
            0 => Ok(()),
            errno if errno > 0 => Err(self.error(call, errno, None)),
            _ => Err(self.error(call, last_errno(), None)),
        }
    }

    /// Says what became of a destruction; `false` if the device may still use the object. `memory` is kept until the context is closed,
    /// unless the destruction succeeded. A device that was reset or removed uses none of its objects any more.
    pub(crate) fn destroyed(
        &self,
        call: &'static str,
        result: std::result::Result<c_int, MissingSymbol>,
        memory: impl FnOnce() -> Option<Box<dyn Any + Send + Sync>>,
    ) -> bool {
        let verdict = result.map_err(Error::from).and_then(|result| self.done(call, result));
        let Err(error) = verdict else { return true };
        tracing::error!("{error}; it stays until the device is closed");
        if let Some(memory) = memory() {
            self.orphans.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
        matches!(error, Error::Call(CallError { cause: Cause::DeviceGone, .. }))
    }

    /// Queues of MANA lie in memory of an allocator, which has to be there before; without one libmana would make completion queues of
    /// another kind.
    pub(crate) fn ready_for_queues(&self) -> Result<()> {
        if self.provider == Provider::Mana && self.allocator.get().is_none() {
            let device = self.device.name();
            return Err(Error::Request(format!(
                "{device} needs an allocator of queue memory before queues (mana::Mana::set_allocator)"
            )));
        }
        Ok(())
    }

    /// Answers that a driver must not believe.
    pub(crate) fn nonsense(&self, call: &'static str, problem: impl Into<String>) -> Error {
        Error::Answer { call, device: self.device.name(), problem: problem.into() }
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        let result = self.ibverbs().ibv_close_device().map(|close| {
            // SAFETY: opened by ibv_open_device; everything made from it kept this alive, and is gone.
            unsafe { close(self.raw.as_ptr()) }
        });
        if !matches!(result, Ok(0)) {
            tracing::error!("{} could not be closed: {result:?}", self.device.name());
        }
    }
}

impl fmt::Debug for ContextInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Refuses an object of another context: the provider's library would look into the wrong structures.
    pub(crate) fn same_as(&self, found: &Self) -> Result<()> {
        if Arc::ptr_eq(&self.inner, &found.inner) {
            return Ok(());
        }
        let (found, wanted) = (found.inner.device_name(), self.inner.device_name());
        Err(Error::Request(format!("that is an object of {found}, not of {wanted}")))
    }

    pub(crate) fn open(device: &Device) -> Result<Self> {
        let open = device.verbs().libraries.ibverbs().ibv_open_device()?;
        // SAFETY: a device of a living list.
        Self::open_by(device, "ibv_open_device", |raw| unsafe { open(raw) })
    }

    /// A context that `open`, the function `call`, makes of the device.
    pub(crate) fn open_by(
        device: &Device,
        call: &'static str,
        open: impl FnOnce(*mut ibv_device) -> *mut ibv_context,
    ) -> Result<Self> {
        let libraries = device.verbs().libraries;
        // What closes it must be there before it is open.
        libraries.ibverbs().ibv_close_device()?;
        let raw = open(device.raw().as_ptr());
        let errno = last_errno();
        let Some(raw) = NonNull::new(raw) else {
            let situation = Situation { device_file: device.file(), ..Situation::default() };
            let cause = diagnose(call, errno, &situation);
            return Err(CallError { call, subject: device.name(), errno, cause }.into());
        };
        let inner = ContextInner {
            raw,
            libraries,
            device: device.clone(),
            provider: provider_of(libraries, raw),
            commands: AtomicBool::new(false),
            events_taken: AtomicBool::new(false),
            allocator: OnceLock::new(),
            orphans: Mutex::default(),
        };
        let context = Self { inner: Arc::new(inner) };
        // Events are polled, never waited for in the library.
        set_nonblocking(context.async_descriptor())
            .map_err(|errno| context.inner.error("fcntl", errno.raw_os_error(), None))?;
        Ok(context)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Whose direct verbs work on it.
    pub fn provider(&self) -> Provider {
        self.inner.provider
    }

    /// What the device can do.
    ///
    /// # Errors
    /// The query failed.
    pub fn attributes(&self) -> Result<DeviceAttributes> {
        attributes::of_device(&self.inner)
    }

    /// State of a port, counted from 1.
    ///
    /// # Errors
    /// There is no such port, or the query failed.
    pub fn port(&self, port: u8) -> Result<PortAttributes> {
        attributes::of_port(&self.inner, port)
    }

    /// The stream of what happens to the device: there is one for a context.
    ///
    /// # Errors
    /// Somebody has it already.
    pub fn events(&self) -> Result<AsyncEvents> {
        AsyncEvents::take(self)
    }

    /// The open device file. Passed to another process it maps pages of registers there (see [`crate::mana::map_doorbells`]); every
    /// duplicate keeps the kernel's side of the context, and its queues, alive.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open while the context is.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw.as_ptr()).cmd_fd) }
    }

    pub(crate) fn async_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open while the context is.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw.as_ptr()).async_fd) }
    }

    /// Number of completion vectors (interrupts).
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: set at opening, never changed.
        let number = unsafe { (*self.inner.raw.as_ptr()).num_comp_vectors };
        u32::try_from(number).unwrap_or(0)
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor()
    }
}

/// Makes reads from a descriptor return instead of waiting.
pub(crate) fn set_nonblocking(descriptor: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(descriptor)?;
    rustix::fs::fcntl_setfl(descriptor, flags | OFlags::NONBLOCK)
}

/// Whose context it is, by whose code does its work: direct verbs look into private structures without asking.
fn provider_of(libraries: &RdmaCore, context: NonNull<ibv_context>) -> Provider {
    let candidates = [
        (Provider::Mana, libraries.mana().ok().map(|mana| mana.library())),
        (Provider::Mlx5, libraries.mlx5().ok().map(|mlx5| mlx5.library())),
        (Provider::Hbl, libraries.hbl().ok().map(|hbl| hbl.library())),
    ];
    // SAFETY: an open context.
    let operations: Vec<*const ()> = unsafe { provider_operations(context.as_ptr()) }.collect();
    let owns = |library: &rdma_core_sys::Library| operations.iter().any(|operation| library.contains(*operation));
    candidates
        .into_iter()
        .find(|(_, library)| library.is_some_and(owns))
        .map_or(Provider::Other, |(provider, _)| provider)
}
