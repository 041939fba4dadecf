// UNSAFETY: calls libibverbs and reads the context structure that it returns.
#![allow(unsafe_code)]

//! Context: an open device.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rdma_core_sys::verbs::{
    IBV_VALUES_MASK_RAW_CLOCK, ibv_context, ibv_device, ibv_query_rt_values_ex, ibv_values_ex, provider_operations,
};
use rdma_core_sys::{Ibverbs, MissingSymbol, RdmaCore};
use rustix::fs::OFlags;

use crate::allocator::InstalledAllocator;
use crate::error::{CallContext, CallError, diagnose};
use crate::{AsyncEvents, Cause, Device, DeviceAttributes, Error, PortAttributes, Result, attributes};

/// Provider library of a device. It determines the direct verbs that work on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Provider {
    /// libmana.
    Mana,
    /// libmlx5.
    Mlx5,
    /// libhbl.
    Hbl,
    /// Another library: plain verbs only.
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

/// ID of a queue in events, unique within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(u64);

impl ObjectId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the ID as the user context of a verbs object.
    pub(crate) fn to_context(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    pub(crate) fn from_context(context: *mut c_void) -> Self {
        Self(context.addr() as u64)
    }
}

/// Returns the errno of this thread.
pub(crate) fn last_errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Open device. Clones refer to the same context.
///
/// The context is closed when the last clone and the last object created from it are dropped.
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) inner: Arc<ContextInner>,
}

pub(crate) struct ContextInner {
    pub(crate) raw: NonNull<ibv_context>,
    pub(crate) libraries: &'static RdmaCore,
    device: Device,
    provider: Provider,
    /// True if the context accepts firmware commands (mlx5: DevX).
    pub(crate) devx: AtomicBool,
    pub(crate) events_claimed: AtomicBool,
    // Dropped after `raw` is closed: until then, the device may write to this memory.
    pub(crate) allocator: OnceLock<Box<InstalledAllocator>>,
    leaked: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
}

// SAFETY: libibverbs and its providers lock their state. A context may be used and closed on any thread
// (ibv_open_device(3)).
unsafe impl Send for ContextInner {}
// SAFETY: libibverbs and its providers lock their state, so calls may come from several threads.
unsafe impl Sync for ContextInner {}

impl ContextInner {
    pub(crate) fn ibverbs(&self) -> &'static Ibverbs {
        self.libraries.ibverbs()
    }

    pub(crate) fn device_name(&self) -> String {
        self.device.name()
    }

    fn call_context(&self, port: Option<u8>) -> CallContext {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
        let interfaces =
            self.device.interfaces().into_iter().filter(|interface| port.is_none_or(|port| interface.port == port));
        CallContext {
            mana: self.provider == Provider::Mana,
            interfaces: interfaces.map(|interface| interface.name).collect(),
            device_file: self.device.device_file(),
            locked_limit: limit.current,
        }
    }

    /// Returns the error of a call that failed with `errno`.
    pub(crate) fn error(&self, call: &'static str, errno: c_int, port: Option<u8>) -> Error {
        let cause = diagnose(call, errno, &self.call_context(port));
        let name = self.device.name();
        let subject = port.map_or_else(|| name.clone(), |port| format!("{name} port {port}"));
        CallError { call, subject, errno, cause }.into()
    }

    /// Checks the object that a call returned. A null pointer is an error, and errno holds the reason.
    pub(crate) fn check_created<T>(&self, call: &'static str, object: *mut T, port: Option<u8>) -> Result<NonNull<T>> {
        // This comes first, because any other call may change errno.
        let errno = last_errno();
        NonNull::new(object).ok_or_else(|| self.error(call, errno, port))
    }

    /// Checks the result of a call that returns 0, an errno, or -1 with errno set.
    pub(crate) fn check(&self, call: &'static str, result: c_int) -> Result<()> {
        match result {
            0 => Ok(()),
            errno if errno > 0 => Err(self.error(call, errno, None)),
            _ => Err(self.error(call, last_errno(), None)),
        }
    }

    /// Checks the result of a destruction. Returns `false` if the device may still use the object.
    ///
    /// A failure is logged, and `memory` is kept until the context is closed. A device that was reset or removed uses
    /// none of its objects any more, so its failure returns `true`.
    pub(crate) fn check_destroyed(
        &self,
        call: &'static str,
        result: std::result::Result<c_int, MissingSymbol>,
        memory: impl FnOnce() -> Option<Box<dyn Any + Send + Sync>>,
    ) -> bool {
        let outcome = result.map_err(Error::from).and_then(|result| self.check(call, result));
        let Err(error) = outcome else { return true };
        tracing::error!("{error}; the object remains until the device is closed");
        if let Some(memory) = memory() {
            self.leaked.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
        matches!(error, Error::Call(CallError { cause: Cause::DeviceLost, .. }))
    }

    /// Checks that a MANA context has an allocator of queue memory. Without one, libmana would create completion
    /// queues of another kind.
    pub(crate) fn check_queue_allocator(&self) -> Result<()> {
        if self.provider == Provider::Mana && self.allocator.get().is_none() {
            let device = self.device.name();
            return Err(Error::InvalidRequest(format!(
                "{device} needs an allocator of queue memory before queues are created (mana::Mana::set_allocator)"
            )));
        }
        Ok(())
    }

    /// Returns the error for an answer of a library that is not valid.
    pub(crate) fn invalid_answer(&self, call: &'static str, problem: impl Into<String>) -> Error {
        Error::InvalidAnswer { call, device: self.device.name(), problem: problem.into() }
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        let result = self.ibverbs().ibv_close_device().map(|close| {
            // SAFETY: the context is open and closed once. Every object created from it keeps it alive, so none is
            // left.
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
    /// Rejects an object of another context: the provider's library would read the wrong structures.
    pub(crate) fn check_same_context(&self, found: &Self) -> Result<()> {
        if Arc::ptr_eq(&self.inner, &found.inner) {
            return Ok(());
        }
        let (found, wanted) = (found.inner.device_name(), self.inner.device_name());
        Err(Error::InvalidRequest(format!("the object belongs to {found}, not to {wanted}")))
    }

    pub(crate) fn open(device: &Device) -> Result<Self> {
        let open = device.verbs().libraries.ibverbs().ibv_open_device()?;
        // SAFETY: the device is alive, because `device` keeps its list.
        Self::open_with(device, "ibv_open_device", |raw| unsafe { open(raw) })
    }

    /// Opens the device with `open`. `call` names the function in errors.
    pub(crate) fn open_with(
        device: &Device,
        call: &'static str,
        open: impl FnOnce(*mut ibv_device) -> *mut ibv_context,
    ) -> Result<Self> {
        let libraries = device.verbs().libraries;
        // The function that closes the context must exist before the context is open.
        libraries.ibverbs().ibv_close_device()?;
        let raw = open(device.raw().as_ptr());
        let errno = last_errno();
        let Some(raw) = NonNull::new(raw) else {
            let call_context = CallContext { device_file: device.device_file(), ..CallContext::default() };
            let cause = diagnose(call, errno, &call_context);
            return Err(CallError { call, subject: device.name(), errno, cause }.into());
        };
        let inner = ContextInner {
            raw,
            libraries,
            device: device.clone(),
            provider: provider_of(libraries, raw),
            devx: AtomicBool::new(false),
            events_claimed: AtomicBool::new(false),
            allocator: OnceLock::new(),
            leaked: Mutex::default(),
        };
        let context = Self { inner: Arc::new(inner) };
        // Events are polled; no call blocks in the library.
        set_nonblocking(context.async_descriptor())
            .map_err(|errno| context.inner.error("fcntl", errno.raw_os_error(), None))?;
        Ok(context)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Returns the provider library of the device.
    pub fn provider(&self) -> Provider {
        self.inner.provider
    }

    /// Queries the capabilities and limits of the device.
    ///
    /// # Errors
    /// The query failed.
    pub fn attributes(&self) -> Result<DeviceAttributes> {
        attributes::query_device(&self.inner)
    }

    /// Reads the device's free-running clock, in ticks (`ibv_query_rt_values_ex`). Completions have timestamps of this
    /// clock. [`DeviceAttributes::clock_khz`] is its frequency. libmlx5 reads a mapped page, without a system call.
    ///
    /// # Errors
    /// The provider cannot read the clock, or the kernel does not map it.
    pub fn read_clock(&self) -> Result<u64> {
        const CALL: &str = "ibv_query_rt_values_ex";
        let mut values = ibv_values_ex { comp_mask: IBV_VALUES_MASK_RAW_CLOCK, ..ibv_values_ex::zeroed() };
        // SAFETY: the context is open, and `values` is valid for the structure that the call reads and writes.
        let result = unsafe { ibv_query_rt_values_ex(self.inner.raw.as_ptr(), &raw mut values) };
        self.inner.check(CALL, result)?;
        if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK == 0 {
            return Err(self.inner.invalid_answer(CALL, "no clock"));
        }
        // libmlx5 puts the 64 bits of the counter there, and leaves the seconds 0.
        Ok(values.raw_clock.tv_nsec.cast_unsigned())
    }

    /// Queries a port, counted from 1.
    ///
    /// # Errors
    /// The port does not exist, or the query failed.
    pub fn port(&self, port: u8) -> Result<PortAttributes> {
        attributes::query_port(&self.inner, port)
    }

    /// Returns the reader of asynchronous events. A context has one reader at a time.
    ///
    /// # Errors
    /// The context already has a reader.
    pub fn events(&self) -> Result<AsyncEvents> {
        AsyncEvents::claim(self)
    }

    /// Returns the file descriptor of the device file.
    ///
    /// Another process that receives it can map register pages (see [`crate::mana::map_doorbells`]). Every duplicate
    /// keeps the kernel's context and its queues alive.
    pub fn cmd_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is alive while `self` is borrowed, and `cmd_fd` is open until it is closed.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw.as_ptr()).cmd_fd) }
    }

    pub(crate) fn async_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is alive while `self` is borrowed, and `async_fd` is open until it is closed.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw.as_ptr()).async_fd) }
    }

    /// Returns the number of completion vectors (interrupts).
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is alive, and `num_comp_vectors` does not change after it is opened.
        let number = unsafe { (*self.inner.raw.as_ptr()).num_comp_vectors };
        u32::try_from(number).unwrap_or(0)
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.cmd_fd()
    }
}

/// Sets `O_NONBLOCK` on a file descriptor.
pub(crate) fn set_nonblocking(descriptor: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(descriptor)?;
    rustix::fs::fcntl_setfl(descriptor, flags | OFlags::NONBLOCK)
}

/// Returns the provider of a context: the library that contains the functions of its operations table.
///
/// Direct verbs access private structures of the provider without a check, so the provider must be certain.
fn provider_of(libraries: &RdmaCore, context: NonNull<ibv_context>) -> Provider {
    let candidates = [
        (Provider::Mana, libraries.mana().ok().map(|mana| mana.library())),
        (Provider::Mlx5, libraries.mlx5().ok().map(|mlx5| mlx5.library())),
        (Provider::Hbl, libraries.hbl().ok().map(|hbl| hbl.library())),
    ];
    // SAFETY: the context is open, so its operations table is valid.
    let operations: Vec<*const ()> = unsafe { provider_operations(context.as_ptr()) }.collect();
    let owns = |library: &rdma_core_sys::Library| operations.iter().any(|operation| library.contains(*operation));
    candidates
        .into_iter()
        .find(|(_, library)| library.is_some_and(owns))
        .map_or(Provider::Other, |(provider, _)| provider)
}
