// UNSAFETY: maps a page that two processes share, and accesses it through atomics.
#![allow(unsafe_code)]

//! Liveness page: tells the importers of an object whether its owner has freed it.
//!
//! Imports of rdma-core do not check this: `mlx5dv_var_import` copies its input, and the importer is not informed
//! when the owner frees the object. A liveness page is a sealed page in shared memory. The owner writes to it when
//! the object is freed, and importers can only read it.

use std::ffi::c_void;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{Error, Result};

const PAGE_BYTES: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"wp-lease");
const LIVE: u32 = 1;
const ENDED: u32 = 2;
const OBJECT: &str = "the liveness page";

/// Layout of the page.
#[repr(C)]
struct Words {
    magic: AtomicU64,
    name: [AtomicU64; 2],
    state: AtomicU32,
}

struct Page(NonNull<c_void>);

// SAFETY: the mapping is owned, accessed only through atomics, and unmapped once.
unsafe impl Send for Page {}
// SAFETY: the mapping is accessed only through atomics.
unsafe impl Sync for Page {}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping of `PAGE_BYTES` bytes, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.0.as_ptr(), PAGE_BYTES) };
    }
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Page").field(&self.words().state).finish()
    }
}

impl Page {
    fn map(file: BorrowedFd<'_>, protection: ProtFlags) -> Result<Self> {
        // SAFETY: the kernel chooses the address of the new mapping, so it replaces no other mapping.
        let start = unsafe { mmap(std::ptr::null_mut(), PAGE_BYTES, protection, MapFlags::SHARED, file, 0) };
        let start = start.map_err(|errno| invalid(format!("it cannot be mapped: {errno}")))?;
        NonNull::new(start).map(Self).ok_or_else(|| invalid("it cannot be mapped".to_owned()))
    }

    fn words(&self) -> &Words {
        // SAFETY: the page is aligned, larger than `Words`, and mapped while `self` lives. `Words` consists of
        // atomics, for which all bytes are valid.
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

fn invalid(problem: String) -> Error {
    Error::InvalidImport { what: OBJECT, problem }
}

/// Owner's side of a liveness page. The object counts as live until [`Self::end`] or until this is dropped.
#[derive(Debug)]
pub struct Liveness {
    page: Page,
    file: OwnedFd,
}

impl Liveness {
    /// Creates a page with a random name that cannot be guessed.
    ///
    /// # Errors
    /// Memory or random numbers are not available.
    pub fn new() -> Result<Self> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Error::InvalidRequest(format!("cannot create a liveness page: {what}: {error}"))
        };
        let mut name = [0; 16];
        let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut name));
        read.map_err(|error| failed("/dev/urandom", &error))?;
        let file = memfd_create("wirepath-liveness", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| failed("memfd_create", &errno))?;
        ftruncate(&file, PAGE_BYTES as u64).map_err(|errno| failed("ftruncate", &errno))?;
        let page = Page::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
        let words = page.words();
        for (word, bytes) in words.name.iter().zip(name.chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Ordering::Relaxed);
        }
        words.magic.store(MAGIC, Ordering::Relaxed);
        words.state.store(LIVE, Ordering::Release);
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(|errno| failed("F_ADD_SEALS", &errno))?;
        // This mapping stays writable, later ones cannot write. Kernels before 5.1 do not have the seal; importers
        // are then trusted not to write.
        let _ = fcntl_add_seals(&file, SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        Ok(Self { page, file })
    }

    /// Returns the name. Exports of the object contain it.
    pub fn name(&self) -> [u8; 16] {
        self.page.name()
    }

    /// Returns the file descriptor for importers.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Marks the object as freed.
    pub fn end(&self) {
        self.page.words().state.store(ENDED, Ordering::Release);
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.end();
    }
}

/// Importer's side of a liveness page.
#[derive(Debug)]
pub struct LivenessView(Page);

impl LivenessView {
    /// Maps the page with this name from a file that the owner passed.
    ///
    /// # Errors
    /// The file is not a liveness page, could be truncated while it is mapped, or has another name.
    pub fn map(file: &OwnedFd, name: [u8; 16]) -> Result<Self> {
        let seals = fcntl_get_seals(file).map_err(|_| invalid("its file is not sealable memory".to_owned()))?;
        let bytes = fstat(file).map_or(0, |stat| stat.st_size);
        if !seals.contains(SealFlags::SHRINK) || bytes != PAGE_BYTES as i64 {
            return Err(invalid(format!("its file has {bytes} bytes and could be truncated")));
        }
        let page = Page::map(file.as_fd(), ProtFlags::READ)?;
        if page.words().magic.load(Ordering::Relaxed) != MAGIC || page.name() != name {
            return Err(invalid("it has another name".to_owned()));
        }
        Ok(Self(page))
    }

    /// Returns true while the owner has not freed the object.
    pub fn is_live(&self) -> bool {
        self.0.words().state.load(Ordering::Acquire) == LIVE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn importers_see_the_end_and_cannot_write_it() {
        let liveness = Liveness::new().unwrap();
        let file = liveness.file().try_clone_to_owned().unwrap();
        let view = LivenessView::map(&file, liveness.name()).unwrap();
        assert!(view.is_live());
        assert!(Page::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE).is_err(), "importers read only");
        assert!(ftruncate(&file, 0).is_err());
        let name = liveness.name();
        drop(liveness);
        assert!(!view.is_live());
        // Another name, another file and a file that could be truncated are rejected.
        assert!(LivenessView::map(&file, [0; 16]).is_err());
        let short = memfd_create("short", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&short, PAGE_BYTES as u64).unwrap();
        let error = LivenessView::map(&short, name).unwrap_err();
        assert!(error.to_string().contains("could be truncated"), "{error}");
        fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        assert!(LivenessView::map(&short, name).is_err(), "a page of zeros is not valid");
        assert!(LivenessView::map(&tempfile::tempfile().unwrap().into(), name).is_err());
    }
}
