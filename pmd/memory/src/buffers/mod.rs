// UNSAFETY: hands out addresses and zeroes the memory behind them.
#![allow(unsafe_code)]

//! Buffers for the queues of devices: rings, doorbell records.

mod mapping;
mod space;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::mapping::Mapping;
use self::space::Space;
use crate::{Backing, RegionError};

/// Unit of allocation and alignment: drivers' libraries name no alignment, and find the page of a doorbell record by masking.
const PAGE: usize = 4096;

/// Usual size of a region: one huge page.
const REGION: usize = 2 << 20;

/// Why there is no buffer.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// No memory for a further region.
    #[error("no buffer of {bytes} bytes for {owner}: {source}")]
    Memory {
        /// Asked for.
        bytes: usize,
        /// Whom it was for.
        owner: String,
        /// Why.
        source: RegionError,
    },
    /// An address was given back that is no buffer of this allocator, or is so no longer.
    #[error("{address:#x} was given back, which is no buffer of this allocator")]
    Unknown {
        /// The address.
        address: usize,
    },
}

/// Where a buffer lies, in terms that mean the same to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the region, as in [`BufferAllocator::regions`].
    pub region: usize,
    /// Bytes from the start of the region.
    pub offset: usize,
    /// Size of the buffer, whole pages.
    pub bytes: usize,
}

/// What one owner has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// As said to [`charge_to`].
    pub owner: String,
    /// Number of buffers.
    pub buffers: usize,
    /// Bytes, whole pages.
    pub bytes: usize,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes in {} buffers", self.owner, self.bytes, self.buffers)
    }
}

/// A region of an allocator.
#[derive(Debug)]
pub struct RegionReport {
    /// What holds it.
    pub backing: Backing,
    /// Size in bytes.
    pub bytes: usize,
    /// The file behind it, if the allocator is shared.
    pub descriptor: Option<OwnedFd>,
}

/// What to allocate from: [`BufferAllocatorBuilder::default`], then [`BufferAllocatorBuilder::build`].
#[derive(Clone, Debug, Default)]
pub struct BufferAllocatorBuilder {
    huge: Option<bool>,
    node: Option<u32>,
    shared: bool,
}

impl BufferAllocatorBuilder {
    /// `true`: huge pages or an error. `false`: normal pages. Otherwise huge pages as long as there are any.
    pub fn huge_pages(mut self, only: bool) -> Self {
        self.huge = Some(only);
        self
    }

    /// Prefer memory of this NUMA node.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Memory that another process can map: backed by memfds (see [`RegionReport::descriptor`]).
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// The allocator; nothing is mapped before the first buffer.
    pub fn build(self) -> BufferAllocator {
        BufferAllocator { settings: self, state: Mutex::default() }
    }
}

/// Cuts buffers for queues from few regions: of huge pages through `hugepage-rs` where enough are free, else of normal pages with
/// transparent huge pages asked for; shared ones from a memfd of either kind ([`Self::regions`] says what it became).
///
/// Buffers are zeroed, start on a page, and have whole pages. Regions stay until the allocator goes. Who uses how much is counted by the
/// owner that [`charge_to`] named. An allocator that goes while buffers are in use says so in the log and leaves their regions mapped: a
/// device may still write them.
pub struct BufferAllocator {
    settings: BufferAllocatorBuilder,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    regions: Vec<Cut>,
    live: BTreeMap<usize, Buffer>,
}

struct Cut {
    memory: Mapping,
    space: Space,
}

struct Buffer {
    place: Place,
    owner: String,
}

thread_local! {
    static OWNER: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Until it goes, buffers that this thread allocates belong to the owner it was made for.
#[must_use = "buffers are charged to the owner only while this lives"]
#[derive(Debug)]
pub struct Charge {
    before: Option<String>,
    /// Belongs to its thread.
    _not_send: std::marker::PhantomData<Rc<()>>,
}

/// Names the owner of the buffers that this thread allocates next, such as "port 0 receive queue 3": the libraries that call an allocator
/// back do not say for what.
pub fn charge_to(owner: impl Into<String>) -> Charge {
    let before = OWNER.replace(Some(owner.into()));
    Charge { before, _not_send: std::marker::PhantomData }
}

impl Drop for Charge {
    fn drop(&mut self) {
        OWNER.set(self.before.take());
    }
}

impl BufferAllocator {
    /// What to allocate from.
    pub fn builder() -> BufferAllocatorBuilder {
        BufferAllocatorBuilder::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of at least `bytes`; none for 0 bytes, which libraries do ask for.
    ///
    /// It stays until [`Self::free`], and is gone with the allocator unless it is in use then.
    ///
    /// # Errors
    /// There is no memory.
    pub fn allocate(&self, bytes: usize) -> Result<Option<NonNull<u8>>, BufferError> {
        if bytes == 0 {
            return Ok(None);
        }
        let owner = OWNER.with_borrow(|owner| owner.clone().unwrap_or_else(|| "nobody named".to_owned()));
        let failed = |source| BufferError::Memory { bytes, owner: owner.clone(), source };
        let too_large = || RegionError::Map { bytes, source: std::io::ErrorKind::OutOfMemory.into() };
        let whole = bytes.checked_next_multiple_of(PAGE).ok_or_else(too_large).map_err(failed)?;
        let mut state = self.state();
        let found = state.regions.iter_mut().enumerate().find_map(|(index, cut)| Some((index, cut.space.take(whole)?)));
        let (region, taken) = match found {
            Some(found) => found,
            None => {
                let BufferAllocatorBuilder { huge, node, shared } = self.settings;
                let memory = Mapping::new(whole.max(REGION), huge, node, shared).map_err(failed)?;
                let mut space = Space::new(memory.bytes());
                let taken = space.take(whole).ok_or_else(too_large).map_err(failed)?;
                state.regions.push(Cut { memory, space });
                (state.regions.len() - 1, taken)
            }
        };
        // SAFETY: the part lies in the region.
        let start = unsafe { state.regions[region].memory.start().add(taken.offset) };
        if taken.recycled {
            // SAFETY: `whole` bytes from there are mapped and nobody's.
            unsafe { start.write_bytes(0, whole) };
        }
        let place = Place { region, offset: taken.offset, bytes: whole };
        state.live.insert(start.as_ptr() as usize, Buffer { place, owner });
        Ok(Some(start))
    }

    /// Gives a buffer back; a null pointer is none, which libraries do give back.
    ///
    /// # Errors
    /// The address is no buffer in use; nothing happened.
    ///
    /// # Safety
    /// Nobody, no device either, accesses the buffer any more.
    pub unsafe fn free(&self, start: *mut u8) -> Result<(), BufferError> {
        if start.is_null() {
            return Ok(());
        }
        let mut state = self.state();
        let address = start as usize;
        let buffer = state.live.remove(&address).ok_or(BufferError::Unknown { address })?;
        let Place { region, offset, bytes } = buffer.place;
        state.regions[region].space.give_back(offset, bytes);
        Ok(())
    }

    /// Where the buffer lies that starts at this address.
    pub fn place(&self, start: *const u8) -> Option<Place> {
        self.state().live.get(&(start as usize)).map(|buffer| buffer.place)
    }

    /// Who uses how much, by name. Empty: every buffer has come back.
    pub fn usage(&self) -> Vec<Usage> {
        let mut owners: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for buffer in self.state().live.values() {
            let (buffers, bytes) = owners.entry(buffer.owner.clone()).or_default();
            *buffers += 1;
            *bytes += buffer.place.bytes;
        }
        owners.into_iter().map(|(owner, (buffers, bytes))| Usage { owner, buffers, bytes }).collect()
    }

    /// The regions so far.
    ///
    /// # Errors
    /// A descriptor could not be duplicated.
    pub fn regions(&self) -> std::io::Result<Vec<RegionReport>> {
        let report = |cut: &Cut| {
            Ok(RegionReport {
                backing: cut.memory.backing(),
                bytes: cut.memory.bytes(),
                descriptor: cut.memory.descriptor().map(|file| file.try_clone_to_owned()).transpose()?,
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
        tracing::error!("queue buffers were never given back, their memory stays mapped: {}", list.join("; "));
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let used: Vec<usize> = state.live.values().map(|buffer| buffer.place.region).collect();
        for (index, cut) in state.regions.drain(..).enumerate() {
            if used.contains(&index) {
                std::mem::forget(cut.memory);
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
        // SAFETY: the tests use a buffer only while it is theirs.
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
        // SAFETY: no longer used.
        unsafe { allocator.free(first.as_ptr()).unwrap() };
        let again = allocator.allocate(PAGE).unwrap().unwrap();
        assert_eq!(again, first);
        assert!(bytes(again, PAGE).iter().all(|byte| *byte == 0));
        assert!(bytes(second, PAGE).iter().all(|byte| *byte == 0x5a), "a neighbour was touched");
        for start in [again, second] {
            // SAFETY: no longer used.
            unsafe { allocator.free(start.as_ptr()).unwrap() };
        }
        assert_eq!(allocator.usage(), []);
        let regions = allocator.regions().unwrap();
        assert_eq!(regions.len(), 1);
        // Other tests may have taken the last page meanwhile, but nobody adds one.
        assert!(regions[0].backing != Backing::HugePages || free_before > 0);
        assert!(regions[0].backing == Backing::HugePages || free_before < 8, "{free_before} huge pages are free");
    }

    #[test]
    fn nothing_asked_for_is_nothing_given() {
        let allocator = BufferAllocator::builder().build();
        assert!(allocator.allocate(0).unwrap().is_none());
        // SAFETY: null is no buffer.
        unsafe { allocator.free(std::ptr::null_mut()).unwrap() };
        assert!(allocator.regions().unwrap().is_empty());
        assert!(matches!(allocator.allocate(usize::MAX), Err(BufferError::Memory { .. })));
    }

    #[test]
    fn what_is_given_back_twice_or_was_never_given_is_refused() {
        let allocator = BufferAllocator::builder().huge_pages(false).build();
        let start = allocator.allocate(2 * PAGE).unwrap().unwrap().as_ptr();
        // SAFETY: no longer used.
        unsafe {
            assert!(matches!(allocator.free(start.add(PAGE)), Err(BufferError::Unknown { .. })));
            allocator.free(start).unwrap();
            assert!(matches!(allocator.free(start), Err(BufferError::Unknown { .. })));
        }
    }

    #[test]
    fn the_account_says_which_queue_uses_what() {
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
            [usage("nobody named", PAGE), usage("port 0", PAGE), usage("port 0 receive queue 3", 3 * PAGE)]
        );
        for start in [ring, other, unnamed] {
            // SAFETY: no longer used.
            unsafe { allocator.free(start.as_ptr()).unwrap() };
        }
    }

    #[test]
    fn another_mapping_of_a_shared_buffer_shows_the_same_bytes() {
        let allocator = BufferAllocator::builder().shared().huge_pages(false).build();
        let _first = allocator.allocate(PAGE).unwrap();
        let start = allocator.allocate(PAGE).unwrap().unwrap();
        bytes(start, 4).copy_from_slice(b"ring");
        let place = allocator.place(start.as_ptr()).unwrap();
        assert_eq!(place, Place { region: 0, offset: PAGE, bytes: PAGE });
        let region = allocator.regions().unwrap().remove(place.region);
        let file = std::fs::File::from(region.descriptor.unwrap());
        let mut seen = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, place.offset as u64).unwrap();
        assert_eq!(&seen, b"ring");
        // SAFETY: no longer used.
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
        assert_eq!(allocator.place(large.as_ptr()).unwrap().region, 1);
        bytes(large, REGION + 1)[REGION] = 1;
        for start in [small, large] {
            // SAFETY: no longer used.
            unsafe { allocator.free(start.as_ptr()).unwrap() };
        }
    }

    #[test]
    fn buffers_outlive_an_allocator_that_went_too_early() {
        let allocator = BufferAllocator::builder().build();
        let start = allocator.allocate(PAGE).unwrap().unwrap();
        drop(allocator);
        // A device that was not told still writes there.
        bytes(start, PAGE).fill(1);
    }

    #[test]
    fn demanded_huge_pages_name_the_remedy() {
        let allocator = BufferAllocator::builder().huge_pages(true).build();
        let error = allocator.allocate(1 << 45).unwrap_err().to_string();
        assert!(error.contains("sysctl vm.nr_hugepages="), "{error}");
    }
}
