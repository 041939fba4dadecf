// UNSAFETY: exposes the addresses of buffers, and zeroes them.
#![allow(unsafe_code)]

//! Buffers for the queues of devices: rings and doorbell records.

mod free_list;
mod mapping;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::free_list::FreeList;
use self::mapping::Mapping;
use crate::{Backing, RegionBuilder, RegionError};

/// Unit of allocation and alignment. The libraries of drivers request no alignment, and find the page of a
/// doorbell record by masking.
const PAGE: usize = 4096;

/// Usual size of a region: one huge page.
const REGION: usize = 2 << 20;

/// Error of the allocator.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// No memory for another region.
    #[error("no buffer of {bytes} bytes for {owner}: {source}")]
    Memory {
        /// Size requested.
        bytes: usize,
        /// Owner of the buffer.
        owner: String,
        /// Error of the mapping.
        source: RegionError,
    },
    /// The address to be freed is not a buffer in use.
    #[error("cannot free {address:#x}, which is not a buffer of this allocator")]
    Unknown {
        /// The address.
        address: usize,
    },
}

/// Location of a buffer, valid in other processes too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferLocation {
    /// Index of the region, as in [`BufferAllocator::regions`].
    pub region: usize,
    /// Offset in bytes from the start of the region.
    pub offset: usize,
    /// Size of the buffer in bytes, a multiple of the page size.
    pub bytes: usize,
}

/// Memory use of one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Name of the owner, as passed to [`charge_to`].
    pub owner: String,
    /// Number of buffers.
    pub buffers: usize,
    /// Bytes of these buffers, a multiple of the page size.
    pub bytes: usize,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes in {} buffers", self.owner, self.bytes, self.buffers)
    }
}

/// Region of an allocator.
#[derive(Debug)]
pub struct RegionReport {
    /// Kind of pages that back it.
    pub backing: Backing,
    /// Size in bytes.
    pub bytes: usize,
    /// The file behind the region, if the allocator is shared.
    pub descriptor: Option<OwnedFd>,
}

/// Options of an allocator: [`BufferAllocatorBuilder::default`], then [`BufferAllocatorBuilder::build`].
#[derive(Clone, Debug)]
pub struct BufferAllocatorBuilder {
    /// Options of its regions, without their size.
    region: RegionBuilder,
}

impl Default for BufferAllocatorBuilder {
    fn default() -> Self {
        Self { region: RegionBuilder::new(0) }
    }
}

impl BufferAllocatorBuilder {
    /// Sets the kind of pages, as [`RegionBuilder::huge_pages`] does.
    pub fn huge_pages(self, only: bool) -> Self {
        Self { region: self.region.huge_pages(only) }
    }

    /// Prefers memory of this NUMA node.
    pub fn numa_node(self, node: u32) -> Self {
        Self { region: self.region.numa_node(node) }
    }

    /// Backs the memory with memfds, which another process can map (see [`RegionReport::descriptor`]).
    pub fn shared(self) -> Self {
        Self { region: self.region.shared() }
    }

    /// Creates the allocator. It maps nothing before the first buffer.
    pub fn build(self) -> BufferAllocator {
        BufferAllocator { settings: self, state: Mutex::default() }
    }
}

/// Allocator of buffers for queues. It takes them from few regions.
///
/// Regions consist of huge pages from `hugepage-rs` if enough are free, else of normal pages with a request
/// for transparent huge pages. Those of a shared allocator are memfds of either kind. [`Self::regions`] tells
/// the result.
///
/// Buffers are zero, start on a page and have whole pages. Regions stay mapped until the allocator is
/// dropped. [`charge_to`] names the owner of the buffers for [`Self::usage`].
///
/// An allocator that is dropped while buffers are in use logs an error. It leaves their regions mapped, since a
/// device may still write to them.
pub struct BufferAllocator {
    settings: BufferAllocatorBuilder,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    regions: Vec<CarvedRegion>,
    live: BTreeMap<usize, Buffer>,
}

struct CarvedRegion {
    memory: Mapping,
    space: FreeList,
}

struct Buffer {
    location: BufferLocation,
    owner: String,
}

thread_local! {
    static OWNER: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Guard of an owner: until it is dropped, buffers that this thread allocates belong to that owner.
#[must_use = "buffers are charged to the owner only while this lives"]
#[derive(Debug)]
pub struct Charge {
    /// Owner that the thread had before.
    previous_owner: Option<String>,
    /// Makes the guard `!Send`, since the owner is a property of the thread.
    _not_send: std::marker::PhantomData<Rc<()>>,
}

/// Names the owner of the buffers that this thread allocates next, such as "port 0 receive queue 3".
///
/// The libraries that call the allocator do not pass the purpose of a buffer.
pub fn charge_to(owner: impl Into<String>) -> Charge {
    let previous_owner = OWNER.replace(Some(owner.into()));
    Charge { previous_owner, _not_send: std::marker::PhantomData }
}

impl Drop for Charge {
    fn drop(&mut self) {
        OWNER.set(self.previous_owner.take());
    }
}

impl BufferAllocator {
    /// Options of a new allocator.
    pub fn builder() -> BufferAllocatorBuilder {
        BufferAllocatorBuilder::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a buffer of at least `bytes` bytes; `None` for 0 bytes, which libraries do request.
    ///
    /// The buffer is valid until [`Self::free`]. One that is in use when the allocator is dropped stays
    /// valid.
    ///
    /// # Errors
    /// There is no memory.
    pub fn allocate(&self, bytes: usize) -> Result<Option<NonNull<u8>>, BufferError> {
        if bytes == 0 {
            return Ok(None);
        }
        let owner = OWNER.with_borrow(|owner| owner.clone().unwrap_or_else(|| "unnamed owner".to_owned()));
        let failed = |source| BufferError::Memory { bytes, owner: owner.clone(), source };
        let too_large = || RegionError::Map { bytes, source: std::io::ErrorKind::OutOfMemory.into() };
        let whole = bytes.checked_next_multiple_of(PAGE).ok_or_else(too_large).map_err(failed)?;
        let mut state = self.state();
        let found =
            state.regions.iter_mut().enumerate().find_map(|(index, carved)| Some((index, carved.space.take(whole)?)));
        let (region, taken) = match found {
            Some(found) => found,
            None => {
                let memory = Mapping::new(whole.max(REGION), &self.settings.region).map_err(failed)?;
                let mut space = FreeList::new(memory.bytes());
                let taken = space.take(whole).ok_or_else(too_large).map_err(failed)?;
                state.regions.push(CarvedRegion { memory, space });
                (state.regions.len() - 1, taken)
            }
        };
        // SAFETY: `taken.offset` lies inside the region.
        let start = unsafe { state.regions[region].memory.start().add(taken.offset) };
        if taken.recycled {
            // SAFETY: `whole` bytes from there are mapped, and no buffer in use overlaps them.
            unsafe { start.write_bytes(0, whole) };
        }
        let location = BufferLocation { region, offset: taken.offset, bytes: whole };
        state.live.insert(start.as_ptr() as usize, Buffer { location, owner });
        Ok(Some(start))
    }

    /// Frees a buffer. A null pointer is ignored, since libraries do pass it.
    ///
    /// # Errors
    /// The address is not a buffer in use; nothing changes.
    ///
    /// # Safety
    /// Neither the program nor a device accesses the buffer any more.
    pub unsafe fn free(&self, start: *mut u8) -> Result<(), BufferError> {
        if start.is_null() {
            return Ok(());
        }
        let mut state = self.state();
        let address = start as usize;
        let buffer = state.live.remove(&address).ok_or(BufferError::Unknown { address })?;
        let BufferLocation { region, offset, bytes } = buffer.location;
        state.regions[region].space.release(offset, bytes);
        Ok(())
    }

    /// Location of the buffer that starts at this address.
    pub fn location(&self, start: *const u8) -> Option<BufferLocation> {
        self.state().live.get(&(start as usize)).map(|buffer| buffer.location)
    }

    /// Memory use by owner, in order of the names. Empty if all buffers are free.
    pub fn usage(&self) -> Vec<Usage> {
        let mut owners: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for buffer in self.state().live.values() {
            let (buffers, bytes) = owners.entry(buffer.owner.clone()).or_default();
            *buffers += 1;
            *bytes += buffer.location.bytes;
        }
        owners.into_iter().map(|(owner, (buffers, bytes))| Usage { owner, buffers, bytes }).collect()
    }

    /// The regions mapped so far.
    ///
    /// # Errors
    /// A file descriptor cannot be duplicated.
    pub fn regions(&self) -> std::io::Result<Vec<RegionReport>> {
        let report = |carved: &CarvedRegion| {
            Ok(RegionReport {
                backing: carved.memory.backing(),
                bytes: carved.memory.bytes(),
                descriptor: carved.memory.descriptor().map(|file| file.try_clone_to_owned()).transpose()?,
            })
        };
        self.state().regions.iter().map(report).collect()
    }
}

impl Drop for BufferAllocator {
    fn drop(&mut self) {
        let usage = self.usage();
        if usage.is_empty() {
            return;
        }
        let list: Vec<String> = usage.iter().map(Usage::to_string).collect();
        tracing::error!("queue buffers were never freed, and their memory stays mapped: {}", list.join("; "));
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let used: Vec<usize> = state.live.values().map(|buffer| buffer.location.region).collect();
        for (index, carved) in state.regions.drain(..).enumerate() {
            if used.contains(&index) {
                std::mem::forget(carved.memory);
            }
        }
    }
}

impl fmt::Debug for BufferAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferAllocator")
            .field("settings", &self.settings)
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(start: NonNull<u8>, count: usize) -> &'static mut [u8] {
        // SAFETY: the tests access a buffer only while it is allocated, and through one slice at a time.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), count) }
    }

    #[test]
    fn buffers_are_zeroed_page_aligned_and_reused() {
        let free_before = mapping::free_huge_pages();
        let allocator = BufferAllocator::builder().build();
        let first = allocator.allocate(5000).unwrap().unwrap();
        let second = allocator.allocate(1).unwrap().unwrap();
        for start in [first, second] {
            assert_eq!(start.as_ptr() as usize % PAGE, 0);
        }
        assert!(bytes(first, 8192).iter().all(|byte| *byte == 0));
        bytes(first, 8192).fill(0xa5);
        bytes(second, PAGE).fill(0x5a);
        // SAFETY: the buffer is not used any more.
        unsafe { allocator.free(first.as_ptr()).unwrap() };
        let again = allocator.allocate(PAGE).unwrap().unwrap();
        assert_eq!(again, first);
        assert!(bytes(again, PAGE).iter().all(|byte| *byte == 0));
        assert!(bytes(second, PAGE).iter().all(|byte| *byte == 0x5a), "the other buffer has changed");
        for start in [again, second] {
            // SAFETY: the buffers are not used any more.
            unsafe { allocator.free(start.as_ptr()).unwrap() };
        }
        assert_eq!(allocator.usage(), []);
        let regions = allocator.regions().unwrap();
        assert_eq!(regions.len(), 1);
        // Other tests may have taken the last huge page meanwhile, but none adds one.
        assert!(regions[0].backing != Backing::HugePages || free_before > 0);
        assert!(regions[0].backing == Backing::HugePages || free_before < 8, "{free_before} huge pages are free");
    }

    #[test]
    fn requests_of_zero_bytes_get_no_buffer() {
        let allocator = BufferAllocator::builder().build();
        assert!(allocator.allocate(0).unwrap().is_none());
        // SAFETY: a null pointer is not a buffer.
        unsafe { allocator.free(std::ptr::null_mut()).unwrap() };
        assert!(allocator.regions().unwrap().is_empty());
        assert!(matches!(allocator.allocate(usize::MAX), Err(BufferError::Memory { .. })));
    }

    #[test]
    fn double_frees_and_foreign_addresses_are_refused() {
        let allocator = BufferAllocator::builder().huge_pages(false).build();
        let start = allocator.allocate(2 * PAGE).unwrap().unwrap().as_ptr();
        // SAFETY: the buffer is not used any more.
        unsafe {
            assert!(matches!(allocator.free(start.add(PAGE)), Err(BufferError::Unknown { .. })));
            allocator.free(start).unwrap();
            assert!(matches!(allocator.free(start), Err(BufferError::Unknown { .. })));
        }
    }

    #[test]
    fn usage_is_listed_by_owner() {
        let allocator = BufferAllocator::builder().build();
        let port = charge_to("port 0");
        let ring = {
            let _charge = charge_to("port 0 receive queue 3");
            allocator.allocate(3 * PAGE).unwrap().unwrap()
        };
        let other = allocator.allocate(1).unwrap().unwrap();
        drop(port);
        let unnamed = allocator.allocate(1).unwrap().unwrap();
        let usage = |owner: &str, bytes| Usage { owner: owner.to_owned(), buffers: 1, bytes };
        assert_eq!(
            allocator.usage(),
            [usage("port 0", PAGE), usage("port 0 receive queue 3", 3 * PAGE), usage("unnamed owner", PAGE)]
        );
        for start in [ring, other, unnamed] {
            // SAFETY: the buffers are not used any more.
            unsafe { allocator.free(start.as_ptr()).unwrap() };
        }
    }

    #[test]
    fn a_shared_buffer_can_be_read_through_its_file() {
        let allocator = BufferAllocator::builder().shared().huge_pages(false).build();
        let _first = allocator.allocate(PAGE).unwrap();
        let start = allocator.allocate(PAGE).unwrap().unwrap();
        bytes(start, 4).copy_from_slice(b"ring");
        let location = allocator.location(start.as_ptr()).unwrap();
        assert_eq!(location, BufferLocation { region: 0, offset: PAGE, bytes: PAGE });
        let region = allocator.regions().unwrap().remove(location.region);
        let file = std::fs::File::from(region.descriptor.unwrap());
        let mut seen = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, location.offset as u64).unwrap();
        assert_eq!(&seen, b"ring");
        // SAFETY: the buffers are not used any more.
        unsafe {
            allocator.free(start.as_ptr()).unwrap();
            allocator.free(_first.unwrap().as_ptr()).unwrap();
        }
    }

    #[test]
    fn large_buffers_get_a_region_of_their_own() {
        let allocator = BufferAllocator::builder().huge_pages(false).build();
        let small = allocator.allocate(PAGE).unwrap().unwrap();
        let large = allocator.allocate(REGION + 1).unwrap().unwrap();
        assert_eq!(allocator.location(large.as_ptr()).unwrap().region, 1);
        bytes(large, REGION + 1)[REGION] = 1;
        for start in [small, large] {
            // SAFETY: the buffers are not used any more.
            unsafe { allocator.free(start.as_ptr()).unwrap() };
        }
    }

    #[test]
    fn buffers_outlive_a_dropped_allocator() {
        let allocator = BufferAllocator::builder().build();
        let start = allocator.allocate(PAGE).unwrap().unwrap();
        drop(allocator);
        // A device that is still running may write there.
        bytes(start, PAGE).fill(1);
    }

    #[test]
    fn missing_huge_pages_name_the_remedy() {
        let allocator = BufferAllocator::builder().huge_pages(true).build();
        let error = allocator.allocate(1 << 45).unwrap_err().to_string();
        assert!(error.contains("sysctl vm.nr_hugepages="), "{error}");
    }
}
