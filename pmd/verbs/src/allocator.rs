// UNSAFETY: defines functions that C calls back with a pointer that this module registered.
#![allow(unsafe_code)]

//! Allocators for the memory of queues that a provider's library creates.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::manadv::manadv_ctx_allocators;
use rdma_core_sys::mlx5dv::mlx5dv_ctx_allocators;
use wirepath_memory::{BufferAllocator, DeviceMemory};

use crate::context::ContextInner;
use crate::{Error, Result};

/// Reference that keeps the queue of a memory view alive.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// Allocator of queue memory. [`BufferAllocator`] is the usual implementation.
pub trait QueueAllocator: Send + Sync {
    /// Allocates `bytes` (never 0) zeroed bytes, aligned to a page. They stay mapped until [`Self::free`].
    /// Returns `None` if there is no memory.
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees memory.
    ///
    /// # Safety
    /// The caller guarantees that [`Self::allocate`] returned `start` and that it is freed once. Neither the program
    /// nor a device accesses the memory any more.
    unsafe fn free(&self, start: NonNull<u8>);

    /// Returns the size in bytes of the allocated memory that starts at `start`, or `None` if there is none.
    fn size(&self, start: NonNull<u8>) -> Option<usize>;
}

impl QueueAllocator for BufferAllocator {
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        BufferAllocator::allocate(self, bytes).unwrap_or_else(|error| {
            tracing::error!("{error}");
            None
        })
    }

    unsafe fn free(&self, start: NonNull<u8>) {
        // SAFETY: the caller guarantees that `start` was allocated here and that nothing accesses the memory any more.
        if let Err(error) = unsafe { BufferAllocator::free(self, start.as_ptr()) } {
            tracing::error!("{error}");
        }
    }

    fn size(&self, start: NonNull<u8>) -> Option<usize> {
        self.location(start.as_ptr()).map(|location| location.bytes)
    }
}

/// Allocator that a library calls back. Its address is stable until the context is closed.
pub(crate) struct InstalledAllocator {
    allocator: Arc<dyn QueueAllocator>,
}

impl InstalledAllocator {
    pub(crate) fn size(&self, start: NonNull<u8>) -> Option<usize> {
        self.allocator.size(start)
    }
}

unsafe extern "C" fn allocate(bytes: usize, data: *mut c_void) -> *mut c_void {
    // Libraries request 0 bytes at times, and accept a null pointer.
    if bytes == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: the library passes the `data` that `install_allocator` registered: an `InstalledAllocator` that lives
    // as long as the context.
    let installed = unsafe { &*data.cast::<InstalledAllocator>() };
    // A panic must not unwind through C.
    let outcome = catch_unwind(AssertUnwindSafe(|| installed.allocator.allocate(bytes)));
    outcome
        .unwrap_or_else(|_| {
            tracing::error!("the allocator of queue memory panicked");
            None
        })
        .map_or(std::ptr::null_mut(), |start| start.as_ptr().cast())
}

unsafe extern "C" fn free(pointer: *mut c_void, data: *mut c_void) {
    // libmana and libmlx5 both free null pointers.
    let Some(start) = NonNull::new(pointer.cast::<u8>()) else { return };
    // SAFETY: the library passes the `data` that `install_allocator` registered: an `InstalledAllocator` that lives
    // as long as the context.
    let installed = unsafe { &*data.cast::<InstalledAllocator>() };
    // SAFETY: a library frees only memory that it got from `allocate`, once, after it destroyed the queue that used it.
    if catch_unwind(AssertUnwindSafe(|| unsafe { installed.allocator.free(start) })).is_err() {
        tracing::error!("the allocator of queue memory panicked");
    }
}

impl ContextInner {
    /// Registers the allocator with the provider through `install`. This is possible once, because a library frees
    /// memory with the allocator that is registered at that time.
    pub(crate) fn install_allocator(
        &self,
        allocator: Arc<dyn QueueAllocator>,
        install: impl FnOnce(&mut manadv_ctx_allocators) -> Result<()>,
    ) -> Result<()> {
        let mut inserted = false;
        let installed = self.allocator.get_or_init(|| {
            inserted = true;
            Box::new(InstalledAllocator { allocator })
        });
        if !inserted {
            return Err(Error::InvalidRequest(format!(
                "{} already has an allocator of queue memory",
                self.device_name()
            )));
        }
        let data = (&raw const **installed).cast_mut().cast();
        install(&mut manadv_ctx_allocators { alloc: Some(allocate), free: Some(free), data })
    }
}

impl ContextInner {
    /// Returns a view of the ring of a queue, after checking that the installed allocator allocated this much at
    /// `start`. `call` and `what` name the call and the queue in errors.
    ///
    /// # Safety
    /// The caller guarantees that `keep` keeps the queue alive that uses the memory at `start`. The provider frees
    /// the memory only when it destroys the queue.
    pub(crate) unsafe fn ring_memory(
        &self,
        call: &'static str,
        what: &str,
        start: *mut c_void,
        bytes: usize,
        keep: &KeepAlive,
    ) -> Result<DeviceMemory> {
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(self.invalid_answer(call, format!("a {what} without memory")));
        };
        let allocated = self.allocator.get().and_then(|installed| installed.size(start)).unwrap_or(0);
        if bytes == 0 || bytes > allocated {
            return Err(self.invalid_answer(call, format!("a {what} of {bytes} bytes in memory of {allocated} bytes")));
        }
        // SAFETY: the installed allocator has allocated at least `bytes` bytes at `start`. They are freed when the
        // queue is destroyed, and the caller guarantees that `keep` keeps the queue alive.
        Ok(unsafe { DeviceMemory::new(start, bytes, Arc::clone(keep)) })
    }
}

// libmlx5 takes a structure with the same three fields.
const _: () = assert!(
    size_of::<manadv_ctx_allocators>() == size_of::<mlx5dv_ctx_allocators>()
        && std::mem::offset_of!(manadv_ctx_allocators, data) == std::mem::offset_of!(mlx5dv_ctx_allocators, data)
);

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(allocator: Arc<dyn QueueAllocator>) -> Box<InstalledAllocator> {
        Box::new(InstalledAllocator { allocator })
    }

    #[test]
    fn callbacks_allocate_zeroed_pages_and_free_them() {
        let buffers = Arc::new(BufferAllocator::builder().huge_pages(false).build());
        let installed = installed(Arc::clone(&buffers) as Arc<dyn QueueAllocator>);
        let data = (&raw const *installed).cast_mut().cast();
        // SAFETY: `data` points to a living `InstalledAllocator`, and `start` is freed once, as a library does.
        unsafe {
            let start = allocate(100, data);
            assert!(!start.is_null() && start.addr().is_multiple_of(4096));
            assert_eq!(start.cast::<[u8; 4096]>().read(), [0; 4096]);
            assert_eq!(installed.size(NonNull::new(start.cast()).unwrap()), Some(4096));
            free(start, data);
        }
        assert!(buffers.usage().is_empty());
    }

    #[test]
    fn zero_size_null_and_panics_are_harmless() {
        struct Never;
        impl QueueAllocator for Never {
            fn allocate(&self, _: usize) -> Option<NonNull<u8>> {
                panic!("called")
            }
            unsafe fn free(&self, _: NonNull<u8>) {
                panic!("called")
            }
            fn size(&self, _: NonNull<u8>) -> Option<usize> {
                None
            }
        }
        let installed = installed(Arc::new(Never));
        let data = (&raw const *installed).cast_mut().cast();
        // SAFETY: `data` points to a living `InstalledAllocator`, and its methods never access the pointer.
        unsafe {
            assert!(allocate(0, data).is_null());
            free(std::ptr::null_mut(), data);
            // The callbacks catch panics.
            assert!(allocate(1, data).is_null());
            free(std::ptr::without_provenance_mut(4096), data);
        }
    }
}
