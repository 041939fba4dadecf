// UNSAFETY: maps a page that two processes share, and looks at it through atomics.
#![allow(unsafe_code)]

//! How the process that owns something tells those that use it that it is gone.
//!
//! rdma-core's imports ask nobody: `mlx5dv_var_import` copies what it is given, and an importer learns in no way that the owner has freed
//! the object. A lease is a sealed page in shared memory: its owner writes that it has ended, others can only read.

use std::ffi::c_void;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{Error, Result};

const BYTES: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"wp-lease");
const LIVE: u32 = 1;
const ENDED: u32 = 2;
const WHAT: &str = "the lease";

/// The page.
#[repr(C)]
struct Words {
    magic: AtomicU64,
    name: [AtomicU64; 2],
    state: AtomicU32,
}

struct Page(NonNull<c_void>);

// SAFETY: an address range, accessed through atomics, unmapped once.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody has a reference into it.
        let _ = unsafe { munmap(self.0.as_ptr(), BYTES) };
    }
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Page").field(&self.words().state).finish()
    }
}

impl Page {
    fn map(file: BorrowedFd<'_>, protection: ProtFlags) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0) };
        let start = start.map_err(|errno| foreign(format!("it cannot be mapped: {errno}")))?;
        NonNull::new(start).map(Self).ok_or_else(|| foreign("it cannot be mapped".to_owned()))
    }

    fn words(&self) -> &Words {
        // SAFETY: a page, long enough and aligned, mapped while self lives; atomics, for which any bytes are valid.
        unsafe { self.0.cast::<Words>().as_ref() }
    }

    fn name(&self) -> [u8; 16] {
        let mut name = [0; 16];
        for (to, word) in name.chunks_exact_mut(8).zip(&self.words().name) {
            to.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        name
    }
}

fn foreign(problem: String) -> Error {
    Error::Foreign { what: WHAT, problem }
}

/// The owner's end: it lasts until [`Self::end`], or until it is dropped.
#[derive(Debug)]
pub struct Lease {
    page: Page,
    file: OwnedFd,
}

impl Lease {
    /// A new lease under a name that nobody guesses.
    ///
    /// # Errors
    /// No memory, or no random numbers.
    pub fn new() -> Result<Self> {
        let failed = |what: &str, error: &dyn std::fmt::Display| Error::Request(format!("no lease: {what}: {error}"));
        let mut name = [0; 16];
        let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut name));
        read.map_err(|error| failed("/dev/urandom", &error))?;
        let file = memfd_create("wirepath-lease", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| failed("memfd_create", &errno))?;
        ftruncate(&file, BYTES as u64).map_err(|errno| failed("ftruncate", &errno))?;
        let page = Page::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
        let words = page.words();
        for (word, bytes) in words.name.iter().zip(name.chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Ordering::Relaxed);
        }
        words.magic.store(MAGIC, Ordering::Relaxed);
        words.state.store(LIVE, Ordering::Release);
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(|errno| failed("F_ADD_SEALS", &errno))?;
        // This mapping may write, later ones may not. Kernels before 5.1 do not know it, and importers are then trusted not to.
        let _ = fcntl_add_seals(&file, SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        Ok(Self { page, file })
    }

    /// Its name, which what is lent carries along.
    pub fn name(&self) -> [u8; 16] {
        self.page.name()
    }

    /// The file that others get.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Tells everybody that what was lent is gone.
    pub fn end(&self) {
        self.page.words().state.store(ENDED, Ordering::Release);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end();
    }
}

/// The other processes' end.
#[derive(Debug)]
pub struct LeaseView(Page);

impl LeaseView {
    /// Looks at the lease of that name in the file that was passed here.
    ///
    /// # Errors
    /// It is no such file, or could be cut under us; it is another lease.
    pub fn attach(file: &OwnedFd, name: [u8; 16]) -> Result<Self> {
        let seals =
            fcntl_get_seals(file).map_err(|_| foreign("its file is no memory that can be sealed".to_owned()))?;
        let bytes = fstat(file).map_or(0, |stat| stat.st_size);
        if !seals.contains(SealFlags::SHRINK) || bytes != BYTES as i64 {
            return Err(foreign(format!("its file has {bytes} bytes and could be cut")));
        }
        let page = Page::map(file.as_fd(), ProtFlags::READ)?;
        if page.words().magic.load(Ordering::Relaxed) != MAGIC || page.name() != name {
            return Err(foreign("it is not the one of this name".to_owned()));
        }
        Ok(Self(page))
    }

    /// Whether the owner keeps what it lent.
    pub fn is_live(&self) -> bool {
        self.0.words().state.load(Ordering::Acquire) == LIVE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_seen_and_nobody_else_can_write_it() {
        let lease = Lease::new().unwrap();
        let file = lease.file().try_clone_to_owned().unwrap();
        let view = LeaseView::attach(&file, lease.name()).unwrap();
        assert!(view.is_live());
        assert!(Page::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE).is_err(), "importers read only");
        assert!(ftruncate(&file, 0).is_err());
        let name = lease.name();
        drop(lease);
        assert!(!view.is_live());
        // Another name, another file, a file that could be cut.
        assert!(LeaseView::attach(&file, [0; 16]).is_err());
        let short = memfd_create("short", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&short, BYTES as u64).unwrap();
        let error = LeaseView::attach(&short, name).unwrap_err();
        assert!(error.to_string().contains("could be cut"), "{error}");
        fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        assert!(LeaseView::attach(&short, name).is_err(), "zeros are no lease");
        assert!(LeaseView::attach(&tempfile::tempfile().unwrap().into(), name).is_err());
    }
}
