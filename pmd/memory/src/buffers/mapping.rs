// UNSAFETY: owns memory from an allocator of another crate.
#![allow(unsafe_code)]

//! What buffers are cut from: huge pages through `hugepage-rs`, or a [`Region`].

use std::alloc::Layout;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

use crate::{Backing, Region, RegionBuilder, RegionError};

/// Memory to cut, zeroed at first, page-aligned.
#[derive(Debug)]
pub(super) enum Mapping {
    Huge(HugePages),
    Region(Region),
}

impl Mapping {
    /// At least `bytes`. `huge`: as for [`RegionBuilder::huge_pages`].
    pub(super) fn new(bytes: usize, huge: Option<bool>, node: Option<u32>, shared: bool) -> Result<Self, RegionError> {
        let mut region = RegionBuilder::new(bytes);
        if let Some(node) = node {
            region = region.numa_node(node);
        }
        if shared {
            // hugepage-rs maps private memory only: a memfd has to come from elsewhere.
            if let Some(only) = huge {
                region = region.huge_pages(only);
            }
            return region.shared().map().map(Self::Region);
        }
        if huge != Some(false) {
            match HugePages::new(bytes) {
                Some(pages) => {
                    if let Some(node) = node {
                        crate::region::prefer_node(pages.start.as_ptr().cast(), pages.layout.size(), node);
                    }
                    return Ok(Self::Huge(pages));
                }
                // For the words of the error.
                None if huge == Some(true) => return region.huge_pages(true).map().map(Self::Region),
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

// SAFETY: an address range that nobody else owns.
unsafe impl Send for HugePages {}
// SAFETY: it hands out no references.
unsafe impl Sync for HugePages {}

impl HugePages {
    /// `None` where the kernel has no huge pages, or too few are free.
    fn new(bytes: usize) -> Option<Self> {
        // The crate panics if /proc/meminfo names no page size, and maps whole pages for every request: look first, and ask for
        // whole pages.
        let pages = FreeHugePages::of(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
        let bytes = bytes.checked_next_multiple_of(pages.page_bytes)?;
        if bytes / pages.page_bytes > pages.count {
            return None;
        }
        let layout = Layout::from_size_align(bytes, pages.page_bytes).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { hugepage_rs::alloc(layout) })?;
        // As for a Region: a child process must not get copies of pages that a device writes.
        // SAFETY: only affects fork.
        let _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxDontFork) };
        Some(Self { start, layout })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; users of addresses inside keep the allocator alive (its contract).
        unsafe { hugepage_rs::dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// What /proc/meminfo says about huge pages of the default size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FreeHugePages {
    page_bytes: usize,
    /// Neither in use nor promised to somebody.
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

/// Pages of the default size that are free now.
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
    fn promised_pages_are_not_free() {
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
