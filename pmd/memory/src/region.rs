// UNSAFETY: maps memory and exposes its address.
#![allow(unsafe_code)]
#![cfg_attr(miri, allow(dead_code, unused_imports))]

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

const HUGE_PAGE: usize = 2 << 20;

/// Kind of pages that back a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// 2 MiB pages reserved by the administrator (`vm.nr_hugepages`).
    HugePages,
    /// Normal pages with a request for transparent huge pages (`madvise(MADV_HUGEPAGE)`), which the kernel
    /// may or may not follow.
    TransparentHugePages,
    /// Normal pages.
    NormalPages,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HugePages => "2 MiB huge pages",
            Self::TransparentHugePages => "normal pages, transparent huge pages requested",
            Self::NormalPages => "normal pages",
        })
    }
}

/// Error of mapping a region.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The size is 0 bytes.
    #[error("a memory region cannot have 0 bytes")]
    Empty,
    /// Huge pages are required, and too few are free.
    #[error(
        "{pages} huge pages of 2 MiB are not free ({source}); \
         reserve them with `sysctl vm.nr_hugepages={pages}` or allow normal pages"
    )]
    HugePages {
        /// Number of pages of the region.
        pages: usize,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The file of another process may shrink while it is mapped.
    #[error("the memory file of another process may shrink; it must be a memfd with F_SEAL_SHRINK")]
    Unsealed,
    /// The kernel refused the mapping.
    #[error("cannot map {bytes} bytes of memory: {source}")]
    Map {
        /// Size in bytes.
        bytes: usize,
        /// Error of the kernel.
        source: std::io::Error,
    },
}

/// Options of a region: [`RegionBuilder::new`], then [`RegionBuilder::map`].
#[derive(Clone, Debug)]
pub struct RegionBuilder {
    pub(crate) bytes: usize,
    pub(crate) huge: Option<bool>,
    pub(crate) node: Option<u32>,
    pub(crate) shared: bool,
    pub(crate) without_thp: bool,
    pub(crate) unpopulated: bool,
}

impl RegionBuilder {
    /// A region of at least `bytes` bytes, of huge pages if enough are free, else of normal pages.
    pub fn new(bytes: usize) -> Self {
        Self { bytes, huge: None, node: None, shared: false, without_thp: false, unpopulated: false }
    }

    /// `true`: requires huge pages. `false`: never uses reserved huge pages.
    pub fn huge_pages(mut self, only: bool) -> Self {
        self.huge = Some(only);
        self
    }

    /// Prefers memory of this NUMA node (`mbind`, `MPOL_PREFERRED`). If the node is full, the region lies on
    /// another one.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Backs the region with a memfd, so that another process can map the same memory (see
    /// [`Region::descriptor`]).
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Requests no transparent huge pages if normal pages are used.
    ///
    /// Each page fault then zeroes 4 KiB instead of 2 MiB, which spreads the cost over the first writes.
    /// [`Region::advise_huge_pages`] can request them later.
    pub fn without_thp(mut self) -> Self {
        self.without_thp = true;
        self
    }

    /// Only reserves huge pages, and does not fill the region with them. This is for a check whether enough are free:
    /// a region that is used needs its pages from the start.
    pub fn unpopulated(mut self) -> Self {
        self.unpopulated = true;
        self
    }

    /// Maps the region. Its memory is zero.
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

    /// Allocates the region: Miri has no mappings with the properties that regions need.
    #[cfg(miri)]
    fn map_as(&self, bytes: usize, huge: bool) -> std::io::Result<Region> {
        if huge || self.shared {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        // SAFETY: the size is not 0.
        let start = unsafe { std::alloc::alloc_zeroed(allocation(bytes)) };
        let mapping = Mapping { start: start.cast(), bytes };
        Ok(Region { mapping, bytes, backing: Backing::NormalPages, file: None, _close_notifier: None })
    }

    #[cfg(not(miri))]
    fn map_as(&self, bytes: usize, huge: bool) -> std::io::Result<Region> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Normal pages: one huge page more than needed, so that the region can start on a 2 MiB boundary.
        // Otherwise transparent huge pages would miss both ends.
        //
        // MAP_POPULATE for reserved pages only: a reservation that is too small fails here, and not with
        // SIGBUS at the first access.
        let reserve = if huge || self.shared { bytes } else { bytes + HUGE_PAGE };
        let mut flags = if huge { MapFlags::HUGETLB | MapFlags::POPULATE } else { MapFlags::NORESERVE };
        if self.unpopulated {
            flags -= MapFlags::POPULATE;
        }
        let (start, file) = if self.shared {
            let kind = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
            let file = memfd_create("wirepath-region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind)?;
            ftruncate(&file, bytes as u64)?;
            // With these seals, no process that has the file can remove pages that another one has mapped.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            // With a memfd, HUGETLB is a property of the file and not of the mapping.
            flags -= MapFlags::HUGETLB;
            // SAFETY: the kernel chooses the address, so the new mapping replaces no other one.
            let start = unsafe { mmap(ptr::null_mut(), bytes, protection, flags | MapFlags::SHARED, &file, 0) }?;
            (start, Some(file))
        } else {
            // SAFETY: the kernel chooses the address, so the new mapping replaces no other one.
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
        } else if !self.without_thp && advise_huge(mapped.start, bytes) {
            Backing::TransparentHugePages
        } else {
            Backing::NormalPages
        };
        // A child process must not get copy-on-write copies of pages that a device writes (see
        // ibv_fork_init(3)).
        //
        // SAFETY: the advice only affects fork(2).
        let _ = unsafe { madvise(mapped.start, bytes, Advice::LinuxDontFork) };
        Ok(Region { mapping: mapped, bytes, backing, file, _close_notifier: None })
    }
}

#[cfg(miri)]
fn allocation(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes, HUGE_PAGE).expect("a size that was allocated")
}

struct Mapping {
    start: *mut c_void,
    bytes: usize,
}

impl Mapping {
    /// Unmaps the memory before the first 2 MiB boundary, and all but `bytes` bytes from there.
    fn trim_to_boundary(&mut self, bytes: usize) {
        let start = self.start as usize;
        let aligned = start.next_multiple_of(HUGE_PAGE);
        let (before, after) = (aligned - start, start + self.bytes - (aligned + bytes));
        // SAFETY: both parts belong to this mapping, and no other code has an address in them yet.
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
        // SAFETY: this value owns the mapping. Code that uses an address of a region keeps the region alive,
        // as `Region::base` demands.
        #[cfg(not(miri))]
        let _ = unsafe { munmap(self.start, self.bytes) };
        // SAFETY: `RegionBuilder::map_as` allocated it with this layout.
        #[cfg(miri)]
        unsafe {
            std::alloc::dealloc(self.start.cast(), allocation(self.bytes));
        }
    }
}

/// Mapped memory, zero at first.
///
/// The size is a multiple of 2 MiB unless the region was truncated. The start is a multiple of 2 MiB too,
/// unless the region is shared memory of normal pages.
pub struct Region {
    mapping: Mapping,
    bytes: usize,
    backing: Backing,
    file: Option<OwnedFd>,
    /// Closed after the memory is unmapped.
    _close_notifier: Option<OwnedFd>,
}

// SAFETY: a region is an address range that any thread may unmap; it gives out no references.
unsafe impl Send for Region {}
// SAFETY: methods that take `&self` only read fields and advise the kernel; the region gives out no
// references to its memory.
unsafe impl Sync for Region {}

impl Region {
    /// Address of the first byte. It is valid for [`Self::bytes`] bytes while the region lives; code that
    /// keeps the address must keep the region.
    pub fn base(&self) -> NonNull<u8> {
        NonNull::new(self.mapping.start.cast()).expect("mmap does not return null")
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Requests transparent huge pages in place of normal pages that exist already. The kernel thread
    /// khugepaged creates them later.
    pub fn advise_huge_pages(&self) {
        advise_huge(self.mapping.start, self.bytes);
    }

    /// Unmaps all but the first `bytes` bytes, rounded up to 4 KiB. Does nothing if the region has reserved
    /// huge pages or is not larger.
    ///
    /// # Safety
    /// No code uses an address behind the first `bytes` bytes from now on.
    pub unsafe fn truncate(&mut self, bytes: usize) {
        const PAGE: usize = 4096;
        let kept = bytes.max(1).next_multiple_of(PAGE);
        if self.backing == Backing::HugePages || kept >= self.bytes {
            return;
        }
        // SAFETY: this part belongs to the mapping, and the caller guarantees that no code uses it any more.
        if unsafe { munmap(self.mapping.start.byte_add(kept), self.bytes - kept) }.is_ok() {
            (self.bytes, self.mapping.bytes) = (kept, kept);
        }
    }

    /// Kind of pages that back the region.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Maps the whole memory of another process's shared region, from the file that it passed.
    ///
    /// # Errors
    /// The file cannot be mapped, or it may shrink while it is mapped.
    pub fn from_memfd(file: OwnedFd) -> Result<Self, RegionError> {
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
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other one.
        let start =
            unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }.map_err(failed(bytes))?;
        let mapping = Mapping { start, bytes };
        Ok(Self { mapping, bytes, backing: Backing::NormalPages, file: Some(file), _close_notifier: None })
    }

    /// Closes `file` after the region is unmapped: the process at the other end sees that its memory is not
    /// used here any more.
    pub fn close_on_unmap(mut self, file: OwnedFd) -> Self {
        self._close_notifier = Some(file);
        self
    }

    /// File of a shared region, to pass to another process.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("bytes", &self.bytes).field("backing", &self.backing).finish_non_exhaustive()
    }
}

/// Requests transparent huge pages; returns whether the kernel supports them.
fn advise_huge(start: *mut c_void, bytes: usize) -> bool {
    // SAFETY: the advice changes which pages back the memory, and not its content.
    unsafe { madvise(start, bytes, Advice::LinuxHugepage) }.is_ok()
}

pub(crate) fn prefer_node(start: *mut c_void, bytes: usize, node: u32) {
    const MPOL_PREFERRED: libc::c_long = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return };
    *word = 1 << (node % 64);
    // SAFETY: mbind(2) only reads the mask. Its size is given in bits, plus one as the kernel expects.
    unsafe {
        libc::syscall(libc::SYS_mbind, start, bytes, MPOL_PREFERRED, mask.as_ptr(), mask.len() * 64 + 1, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_and_read(region: &Region) {
        let last = region.bytes() - 1;
        // SAFETY: both addresses lie in the region, which no other code uses.
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
    fn a_truncated_region_stays_usable() {
        let mut region = RegionBuilder::new(3 << 20).huge_pages(false).without_thp().map().unwrap();
        assert_eq!(region.backing(), Backing::NormalPages);
        region.advise_huge_pages();
        write_and_read(&region);
        // SAFETY: no code keeps an address in the region.
        unsafe { region.truncate(5000) };
        assert_eq!(region.bytes(), 8192);
        // SAFETY: no code keeps an address in the region.
        unsafe { region.truncate(1 << 30) };
        assert_eq!(region.bytes(), 8192);
        // SAFETY: both addresses lie in the region, which no other code uses.
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
    fn a_region_from_a_memfd_is_the_same_memory() {
        let region = RegionBuilder::new(1).shared().huge_pages(false).map().unwrap();
        let other = Region::from_memfd(region.descriptor().unwrap().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(other.bytes(), region.bytes());
        // SAFETY: both addresses lie in the regions, which no other code uses.
        unsafe {
            region.base().as_ptr().add(77).write(7);
            assert_eq!(*other.base().as_ptr().add(77), 7);
        }
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Region::from_memfd(socket.into()).is_err());
        let loose = memfd_create("loose", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&loose, 1 << 21).unwrap();
        assert!(matches!(Region::from_memfd(loose), Err(RegionError::Unsealed)));
    }

    #[test]
    fn sizes_of_zero_and_usize_max_are_errors() {
        assert!(matches!(RegionBuilder::new(0).map(), Err(RegionError::Empty)));
        assert!(matches!(RegionBuilder::new(usize::MAX).map(), Err(RegionError::Map { .. })));
    }

    #[test]
    fn missing_huge_pages_name_the_remedy() {
        // No machine has so much memory, so this fails whatever is reserved.
        let error = RegionBuilder::new(1 << 46).huge_pages(true).map().unwrap_err();
        assert!(error.to_string().contains("sysctl vm.nr_hugepages="), "{error}");
    }
}
