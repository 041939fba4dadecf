// UNSAFETY: owns memory from an allocator of another crate.
#![allow(unsafe_code)]

//! Memory behind buffers: huge pages from `hugepage-rs`, or a [`Region`].

use std::alloc::Layout;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

use crate::{Backing, Region, RegionBuilder, RegionError};

/// Memory that buffers are taken from, zero at first and page-aligned.
#[derive(Debug)]
pub(super) enum Mapping {
    Huge(HugePages),
    Region(Region),
}

impl Mapping {
    /// Maps at least `bytes` bytes with these options.
    pub(super) fn new(bytes: usize, options: &RegionBuilder) -> Result<Self, RegionError> {
        let region = RegionBuilder { bytes, ..options.clone() };
        // hugepage-rs maps private memory only, so a memfd needs a region.
        if region.shared {
            return region.map().map(Self::Region);
        }
        if region.huge != Some(false) {
            match HugePages::new(bytes) {
                Some(pages) => {
                    if let Some(node) = region.node {
                        crate::region::prefer_node(pages.start.as_ptr().cast(), pages.layout.size(), node);
                    }
                    return Ok(Self::Huge(pages));
                }
                // For the error message of the region.
                None if region.huge == Some(true) => return region.map().map(Self::Region),
                None => {}
            }
        }
        region.huge_pages(false).map().map(Self::Region)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        match self {
            Self::Huge(pages) => pages.start,
            Self::Region(region) => region.base(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Huge(pages) => pages.layout.size(),
            Self::Region(region) => region.bytes(),
        }
    }

    pub(super) fn backing(&self) -> Backing {
        match self {
            Self::Huge(_) => Backing::HugePages,
            Self::Region(region) => region.backing(),
        }
    }

    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Huge(_) => None,
            Self::Region(region) => region.descriptor(),
        }
    }
}

/// Huge pages of the machine's default size, from `hugepage-rs`.
#[derive(Debug)]
pub(super) struct HugePages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: this value owns the address range, and any thread may free it.
unsafe impl Send for HugePages {}
// SAFETY: a shared reference gives out the address only, no references to the memory.
unsafe impl Sync for HugePages {}

impl HugePages {
    /// Allocates huge pages; `None` if the kernel has none, or too few are free.
    fn new(bytes: usize) -> Option<Self> {
        // The crate panics if /proc/meminfo names no page size, and maps whole pages for every request. So
        // read the file first, and request whole pages.
        let pages = FreeHugePages::of(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
        let bytes = bytes.checked_next_multiple_of(pages.page_bytes)?;
        if bytes / pages.page_bytes > pages.count {
            return None;
        }
        let layout = Layout::from_size_align(bytes, pages.page_bytes).ok()?;
        // SAFETY: the size of the layout is not zero.
        let start = NonNull::new(unsafe { hugepage_rs::alloc(layout) })?;
        // A child process must not get copy-on-write copies of pages that a device writes (see
        // ibv_fork_init(3)).
        //
        // SAFETY: the advice only affects fork(2).
        let _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxDontFork) };
        Some(Self { start, layout })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout. Users of its addresses keep the allocator alive,
        // as its documentation demands.
        unsafe { hugepage_rs::dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Huge pages of the default size, from /proc/meminfo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FreeHugePages {
    page_bytes: usize,
    /// Pages that are neither in use nor reserved by a process.
    count: usize,
}

impl FreeHugePages {
    fn of(meminfo: &str) -> Option<Self> {
        let value = |name: &str| {
            let rest = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            let mut words = rest.split_whitespace();
            let number: usize = words.next()?.parse().ok()?;
            match words.next() {
                None => Some(number),
                Some("kB") => number.checked_mul(1024),
                Some(_) => None,
            }
        };
        let page_bytes = value("Hugepagesize").filter(|bytes| bytes.is_power_of_two())?;
        let count = value("HugePages_Free")?.saturating_sub(value("HugePages_Rsvd")?);
        Some(Self { page_bytes, count })
    }
}

/// Number of free huge pages of the default size.
#[cfg(test)]
pub(super) fn free_huge_pages() -> usize {
    std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| FreeHugePages::of(&text))
        .map_or(0, |pages| pages.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_pages_are_not_free() {
        let meminfo = "MemFree: 5 kB\nHugePages_Total:      8\nHugePages_Free:       6\nHugePages_Rsvd:       4\n\
            HugePages_Surp:       0\nHugepagesize:       2048 kB\nHugetlb: 0 kB\n";
        assert_eq!(FreeHugePages::of(meminfo), Some(FreeHugePages { page_bytes: 2 << 20, count: 2 }));
    }

    #[test]
    fn a_kernel_without_huge_pages_has_none() {
        for meminfo in [
            "",
            "MemTotal: 1 kB\n",
            "HugePages_Free: 1\nHugePages_Rsvd: 0\n",
            "Hugepagesize: 0 kB\nHugePages_Free: 1\nHugePages_Rsvd: 0\n",
            "Hugepagesize: 2048 MB\nHugePages_Free: 1\nHugePages_Rsvd: 0\n",
            "Hugepagesize: 99999999999999999999 kB\nHugePages_Free: 1\nHugePages_Rsvd: 0\n",
        ] {
            assert_eq!(FreeHugePages::of(meminfo), None, "{meminfo}");
        }
    }
}
