// UNSAFETY: functions that C calls back, with an address that we gave it.
#![allow(unsafe_code)]

//! Memory of ours for the queues that a provider's library makes.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::manadv::manadv_ctx_allocators;
use rdma_core_sys::mlx5dv::mlx5dv_ctx_allocators;
use wirepath_memory::BufferAllocator;

use crate::context::ContextInner;
use crate::{Error, Result};

/// Gives memory to queues. [`BufferAllocator`] is the usual one.
pub trait QueueAllocator: Send + Sync {
    /// `bytes` (never 0) zeroed bytes that start on a page, or `None`. They stay until they are freed.
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Takes memory back.
    ///
    /// # Safety
    /// It came from [`Self::allocate`], and nobody, no device either, accesses it any more.
    unsafe fn free(&self, start: NonNull<u8>);

    /// Size of the memory in use that starts there; `None`: there is none.
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
        // SAFETY: the caller's contract.
        if let Err(error) = unsafe { BufferAllocator::free(self, start.as_ptr()) } {
            tracing::error!("{error}");
        }
    }

    fn size(&self, start: NonNull<u8>) -> Option<usize> {
        self.place(start.as_ptr()).map(|place| place.bytes)
    }
}

/// An allocator that a library calls back: at this address until the context is closed.
pub(crate) struct Installed {
    allocator: Arc<dyn QueueAllocator>,
}

impl Installed {
    pub(crate) fn size(&self, start: NonNull<u8>) -> Option<usize> {
        self.allocator.size(start)
    }
}

unsafe extern "C" fn allocate(bytes: usize, data: *mut c_void) -> *mut c_void {
    // Libraries ask for nothing, and are content with a null pointer.
    if bytes == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: `data` is an `Installed` that lives as long as the context.
    let installed = unsafe { &*data.cast::<Installed>() };
    // C cannot be unwound through.
    let outcome = catch_unwind(AssertUnwindSafe(|| installed.allocator.allocate(bytes)));
    outcome
        .unwrap_or_else(|_| {
            tracing::error!("the allocator of queue memory panicked");
            None
        })
        .map_or(std::ptr::null_mut(), |start| start.as_ptr().cast())
}

unsafe extern "C" fn free(pointer: *mut c_void, data: *mut c_void) {
    // libmana and libmlx5 both do.
    let Some(start) = NonNull::new(pointer.cast::<u8>()) else { return };
    // SAFETY: `data` is an `Installed` that lives as long as the context.
    let installed = unsafe { &*data.cast::<Installed>() };
    // SAFETY: a library frees what it was given, after it destroyed the queue.
    if catch_unwind(AssertUnwindSafe(|| unsafe { installed.allocator.free(start) })).is_err() {
        tracing::error!("the allocator of queue memory panicked");
    }
}

impl ContextInner {
    /// Hands the allocator to the provider through `install`. Once: a library frees with the allocator that it has then.
    pub(crate) fn install_allocator(
        &self,
        allocator: Arc<dyn QueueAllocator>,
        install: impl FnOnce(&mut manadv_ctx_allocators) -> Result<()>,
    ) -> Result<()> {
        let mut fresh = false;
        let installed = self.allocator.get_or_init(|| {
            fresh = true;
            Box::new(Installed { allocator })
        });
        if !fresh {
            return Err(Error::Request(format!("{} has an allocator of queue memory already", self.device_name())));
        }
        let data = (&raw const **installed).cast_mut().cast();
        install(&mut manadv_ctx_allocators { alloc: Some(allocate), free: Some(free), data })
    }
}

// libmlx5 takes the same three words.
const _: () = assert!(
    size_of::<manadv_ctx_allocators>() == size_of::<mlx5dv_ctx_allocators>()
        && std::mem::offset_of!(manadv_ctx_allocators, data) == std::mem::offset_of!(mlx5dv_ctx_allocators, data)
);

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(allocator: Arc<dyn QueueAllocator>) -> Box<Installed> {
        Box::new(Installed { allocator })
    }

    #[test]
    fn c_gets_zeroed_pages_and_gives_them_back() {
        let buffers = Arc::new(BufferAllocator::builder().huge_pages(false).build());
        let installed = installed(Arc::clone(&buffers) as Arc<dyn QueueAllocator>);
        let data = (&raw const *installed).cast_mut().cast();
        // SAFETY: `data` is an `Installed`, as the library would have it.
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
    fn nothing_and_null_are_harmless() {
        struct Never;
        impl QueueAllocator for Never {
            fn allocate(&self, _: usize) -> Option<NonNull<u8>> {
                panic!("asked")
            }
            unsafe fn free(&self, _: NonNull<u8>) {
                panic!("asked")
            }
            fn size(&self, _: NonNull<u8>) -> Option<usize> {
                None
            }
        }
        let installed = installed(Arc::new(Never));
        let data = (&raw const *installed).cast_mut().cast();
        // SAFETY: `data` is an `Installed`; the pointer that is freed is never accessed.
        unsafe {
            assert!(allocate(0, data).is_null());
            free(std::ptr::null_mut(), data);
            // A panic ends here, not in C.
            assert!(allocate(1, data).is_null());
            free(std::ptr::without_provenance_mut(4096), data);
        }
    }
}
