// UNSAFETY: maps memory and hands out its address.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

const HUGE_PAGE: usize = 2 << 20;

/// What really holds a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// 2 MiB pages reserved by the administrator (`vm.nr_hugepages`).
    HugePages,
    /// Normal pages for which transparent huge pages were asked (`madvise(MADV_HUGEPAGE)`); the kernel may or may not have obliged.
    TransparentHugePages,
    /// Normal pages.
    NormalPages,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HugePages => "2 MiB huge pages",
            Self::TransparentHugePages => "normal pages, transparent huge pages asked for",
            Self::NormalPages => "normal pages",
        })
    }
}

/// Why a region could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A region needs at least one byte.
    #[error("a memory region of 0 bytes was asked for")]
    Empty,
    /// Huge pages were demanded and there are too few.
    #[error(
        "{pages} huge pages of 2 MiB are not free ({source}); reserve them with `sysctl vm.nr_hugepages={pages}` or allow normal pages"
    )]
    HugePages {
        /// How many pages the region needs.
        pages: usize,
        /// What the kernel answered.
        source: std::io::Error,
    },
    /// The file of another process could lose pages that are mapped here.
    #[error("the memory that another process passed is no file that keeps its size (a memfd with F_SEAL_SHRINK)")]
    Unsealed,
    /// The kernel refused the mapping.
    #[error("cannot map {bytes} bytes of memory: {source}")]
    Map {
        /// Size asked for.
        bytes: usize,
        /// What the kernel answered.
        source: std::io::Error,
    },
}

/// What to map: [`RegionBuilder::new`], then [`RegionBuilder::map`].
#[derive(Clone, Debug)]
pub struct RegionBuilder {
    bytes: usize,
    huge: Option<bool>,
    node: Option<u32>,
    shared: bool,
    gradual: bool,
}

impl RegionBuilder {
    /// A region of at least `bytes`; huge pages if there are any, else normal pages.
    pub fn new(bytes: usize) -> Self {
        Self { bytes, huge: None, node: None, shared: false, gradual: false }
    }

    /// `true`: huge pages or an error. `false`: never ask for reserved huge pages.
    pub fn huge_pages(mut self, only: bool) -> Self {
        self.huge = Some(only);
        self
    }

    /// Prefer memory of this NUMA node (`mbind`, `MPOL_PREFERRED`): a wish, since a full node is better than no region.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Back the region with a memfd, so that another process can map the same memory (see [`Region::descriptor`]).
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Where normal pages are taken, asks for no transparent huge pages: the first write to each 4 KiB costs as much as zeros for these,
    /// and nobody waits for 2 MiB of them. See [`Region::ask_for_huge_pages`] for later.
    pub fn gradual(mut self) -> Self {
        self.gradual = true;
        self
    }

    /// Maps the region; it is zeroed.
    pub fn map(self) -> Result<Region, RegionError> {
        if self.bytes == 0 {
            return Err(RegionError::Empty);
        }
        let too_large = || RegionError::Map { bytes: self.bytes, source: std::io::ErrorKind::OutOfMemory.into() };
        let bytes = self.bytes.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_large)?;
        if self.huge != Some(false) {
            match self.map_as(bytes, true) {
                Ok(region) => return Ok(region),
                Err(source) if self.huge == Some(true) => {
                    return Err(RegionError::HugePages { pages: bytes / HUGE_PAGE, source });
                }
                Err(_) => {}
            }
        }
        self.map_as(bytes, false).map_err(|source| RegionError::Map { bytes, source })
    }

    fn map_as(&self, bytes: usize, huge: bool) -> std::io::Result<Region> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Normal pages: one huge page more than needed, so that the region can start on a 2 MiB boundary; without that, transparent
        // huge pages would miss both ends. MAP_POPULATE on reserved pages only: a too small reservation then fails here and not
        // with SIGBUS at the first touch.
        let reserve = if huge || self.shared { bytes } else { bytes + HUGE_PAGE };
        let mut flags = if huge { MapFlags::HUGETLB | MapFlags::POPULATE } else { MapFlags::NORESERVE };
        let (start, file) = if self.shared {
            let kind = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
            let file = memfd_create("wirepath-region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind)?;
            ftruncate(&file, bytes as u64)?;
            // Nobody who gets the file can take pages away under those who have mapped them.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            // HUGETLB belongs to the memfd here, not to the mapping.
            flags -= MapFlags::HUGETLB;
            // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
            let start = unsafe { mmap(ptr::null_mut(), bytes, protection, flags | MapFlags::SHARED, &file, 0) }?;
            (start, Some(file))
        } else {
            // SAFETY: as above.
            let start = unsafe { mmap_anonymous(ptr::null_mut(), reserve, protection, flags | MapFlags::PRIVATE) }?;
            (start, None)
        };
        let mut mapped = Mapping { start, bytes: reserve };
        if reserve > bytes {
            mapped.trim_to_boundary(bytes);
        }
        if let Some(node) = self.node {
            prefer_node(mapped.start, bytes, node);
        }
        let backing = if huge {
            Backing::HugePages
        } else if !self.gradual && advise_huge(mapped.start, bytes) {
            Backing::TransparentHugePages
        } else {
            Backing::NormalPages
        };
        // A child process must not get copy-on-write copies of pages that a device writes (see ibv_fork_init(3)).
        // SAFETY: only affects fork.
        let _ = unsafe { madvise(mapped.start, bytes, Advice::LinuxDontFork) };
        Ok(Region { mapping: mapped, bytes, backing, file, _behind: None })
    }
}

struct Mapping {
    start: *mut c_void,
    bytes: usize,
}

impl Mapping {
    /// Gives back what lies before the first 2 MiB boundary and behind `bytes` from there.
    fn trim_to_boundary(&mut self, bytes: usize) {
        let start = self.start as usize;
        let aligned = start.next_multiple_of(HUGE_PAGE);
        let (before, after) = (aligned - start, start + self.bytes - (aligned + bytes));
        // SAFETY: both parts are ours, and nobody has an address into them yet.
        unsafe {
            if before > 0 {
                let _ = munmap(self.start, before);
            }
            self.start = self.start.byte_add(before);
            if after > 0 {
                let _ = munmap(self.start.byte_add(bytes), after);
            }
        }
        self.bytes = bytes;
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; whoever holds an address into it also holds the region alive (contract of `Region::base`).
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}

/// A mapped piece of memory, zeroed at first. Its size is a multiple of 2 MiB unless it was cut short, and it starts on such a boundary
/// unless it is shared normal memory.
pub struct Region {
    mapping: Mapping,
    bytes: usize,
    backing: Backing,
    file: Option<OwnedFd>,
    /// Dropped once nothing is mapped any more.
    _behind: Option<OwnedFd>,
}

// SAFETY: the region is an address range; it synchronises nothing and hands out no references.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// First byte. Valid for [`Self::bytes`] bytes for as long as the region lives: who keeps the address keeps the region.
    pub fn base(&self) -> NonNull<u8> {
        NonNull::new(self.mapping.start.cast()).expect("mmap does not return null")
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Asks for transparent huge pages in the place of normal ones that are there already: the kernel's own thread makes them when it
    /// has time (khugepaged).
    pub fn ask_for_huge_pages(&self) {
        advise_huge(self.mapping.start, self.bytes);
    }

    /// Gives back all but the first `bytes`, up to the next boundary of 4 KiB; does nothing to reserved huge pages and to regions that
    /// are no larger.
    ///
    /// # Safety
    /// Nobody may use an address behind `bytes` from now on.
    pub unsafe fn truncate(&mut self, bytes: usize) {
        const PAGE: usize = 4096;
        let kept = bytes.max(1).next_multiple_of(PAGE);
        if self.backing == Backing::HugePages || kept >= self.bytes {
            return;
        }
        // SAFETY: this part of the mapping is ours, and by contract nobody's else.
        if unsafe { munmap(self.mapping.start.byte_add(kept), self.bytes - kept) }.is_ok() {
            (self.bytes, self.mapping.bytes) = (kept, kept);
        }
    }

    /// What holds the region.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Maps the memory of another process's shared region, whole, from the file that was passed here.
    ///
    /// # Errors
    /// It is no file that can be mapped, or one that could be cut while it is.
    pub fn attach(file: OwnedFd) -> Result<Self, RegionError> {
        let failed = |bytes| move |source: rustix::io::Errno| RegionError::Map { bytes, source: source.into() };
        let bytes = usize::try_from(rustix::fs::fstat(&file).map_err(failed(0))?.st_size).unwrap_or(0);
        if bytes == 0 {
            return Err(RegionError::Empty);
        }
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed {
            return Err(RegionError::Unsealed);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let start =
            unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }.map_err(failed(bytes))?;
        let mapping = Mapping { start, bytes };
        Ok(Self { mapping, bytes, backing: Backing::NormalPages, file: Some(file), _behind: None })
    }

    /// With a file that is closed once the region is gone: by that another process sees that its memory is not used here any more.
    pub fn until_closed(mut self, file: OwnedFd) -> Self {
        self._behind = Some(file);
        self
    }

    /// The file behind a shared region, to be passed to another process.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("bytes", &self.bytes).field("backing", &self.backing).finish_non_exhaustive()
    }
}

/// Asks for transparent huge pages; whether the kernel knows what that is.
fn advise_huge(start: *mut c_void, bytes: usize) -> bool {
    // SAFETY: the advice changes how the pages are provided, not what they contain.
    unsafe { madvise(start, bytes, Advice::LinuxHugepage) }.is_ok()
}

pub(crate) fn prefer_node(start: *mut c_void, bytes: usize, node: u32) {
    const MPOL_PREFERRED: libc::c_long = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return };
    *word = 1 << (node % 64);
    // SAFETY: mbind(2) reads the mask, whose size in bits (plus one, as the kernel wants it) is given.
    unsafe {
        libc::syscall(libc::SYS_mbind, start, bytes, MPOL_PREFERRED, mask.as_ptr(), mask.len() * 64 + 1, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_and_read(region: &Region) {
        let last = region.bytes() - 1;
        // SAFETY: both addresses lie in the region, which nobody else uses.
        unsafe {
            let base = region.base().as_ptr();
            assert_eq!(*base.add(last), 0);
            base.write(1);
            base.add(last).write(2);
            assert_eq!((*base, *base.add(last)), (1, 2));
        }
    }

    #[test]
    fn maps_zeroed_memory_on_a_2_mib_boundary() {
        for node in [None, Some(0)] {
            let mut builder = RegionBuilder::new(3 << 20);
            builder.node = node;
            let region = builder.map().unwrap();
            assert_eq!(region.bytes(), 4 << 20);
            assert_eq!(region.base().as_ptr() as usize % HUGE_PAGE, 0);
            write_and_read(&region);
        }
    }

    #[test]
    fn a_region_is_cut_short_and_stays_usable() {
        let mut region = RegionBuilder::new(3 << 20).huge_pages(false).gradual().map().unwrap();
        assert_eq!(region.backing(), Backing::NormalPages);
        region.ask_for_huge_pages();
        write_and_read(&region);
        // SAFETY: nobody keeps an address.
        unsafe { region.truncate(5000) };
        assert_eq!(region.bytes(), 8192);
        // SAFETY: as above.
        unsafe { region.truncate(1 << 30) };
        assert_eq!(region.bytes(), 8192);
        // SAFETY: both lie in the region, which nobody else uses.
        unsafe {
            let base = region.base().as_ptr();
            assert_eq!(*base, 1);
            base.add(8191).write(3);
        }
    }

    #[test]
    fn a_shared_region_has_a_descriptor() {
        let region = RegionBuilder::new(1).shared().huge_pages(false).map().unwrap();
        assert!(region.descriptor().is_some());
        write_and_read(&region);
    }

    #[test]
    fn an_attached_region_is_the_same_memory() {
        let region = RegionBuilder::new(1).shared().huge_pages(false).map().unwrap();
        let other = Region::attach(region.descriptor().unwrap().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(other.bytes(), region.bytes());
        // SAFETY: both addresses lie in the regions, which nobody else uses.
        unsafe {
            region.base().as_ptr().add(77).write(7);
            assert_eq!(*other.base().as_ptr().add(77), 7);
        }
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Region::attach(socket.into()).is_err());
        let loose = memfd_create("loose", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&loose, 1 << 21).unwrap();
        assert!(matches!(Region::attach(loose), Err(RegionError::Unsealed)));
    }

    #[test]
    fn nothing_and_everything_are_errors() {
        assert!(matches!(RegionBuilder::new(0).map(), Err(RegionError::Empty)));
        assert!(matches!(RegionBuilder::new(usize::MAX).map(), Err(RegionError::Map { .. })));
    }

    #[test]
    fn demanded_huge_pages_name_the_remedy() {
        // More than any machine has: must fail, whatever is reserved here.
        let error = RegionBuilder::new(1 << 46).huge_pages(true).map().unwrap_err();
        assert!(error.to_string().contains("sysctl vm.nr_hugepages="), "{error}");
    }
}
