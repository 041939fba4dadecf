// UNSAFETY: owns the buffers of a pool while no packet does, and finds a pool by the id in a packet's
// metadata.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::mem::size_of;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wirepath_memory::{Backing, Region, RegionBuilder, RegionError};

use super::PortId;
use super::batch::Batch;
use super::meta::{BUFFER_BYTES, DATA_START, META, Meta, NO_SEGMENT, STRIDE};
use super::stack::Stack;
use super::tx_burst::{POOL_SHIFT, WORD};
use super::{Handle, Packet, red_zones};

/// Largest number of pools that exist in a process at one time.
pub const MAX_POOLS: usize = 64;
/// Largest number of buffers of one pool. It fits into the index of a [`Handle`].
pub const MAX_BUFFERS: u32 = (1 << 24) - 1;
/// Buffers in a thread's cache: four magazines. Two magazines can be taken or freed before the shared list is
/// used again.
const CACHE_SIZE: usize = 4 * MAGAZINE_SIZE;
/// Buffers that move between a thread's cache and the shared list in one step.
const MAGAZINE_SIZE: usize = 128;
/// Bytes of a magazine's list, at the start of the data room of its first buffer.
pub(super) const MAGAZINE_BYTES: usize = MAGAZINE_SIZE * size_of::<u32>();

static POOLS: [AtomicPtr<PoolState>; MAX_POOLS] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_POOLS];
/// Generation of each pool id. It changes with every pool that gets the id, so that a thread detects a cache
/// of a pool that is gone.
static GENERATIONS: [AtomicU32; MAX_POOLS] = [const { AtomicU32::new(0) }; MAX_POOLS];
/// Held while a pool or a thread's cache is created or freed; never on a burst path.
static REGISTRY: Mutex<()> = Mutex::new(());

fn registry() -> MutexGuard<'static, ()> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error of the creation of a pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// All pool ids are in use.
    #[error("{MAX_POOLS} packet pools exist already; share a pool between ports")]
    TooManyPools,
    /// The number of buffers is zero or exceeds [`MAX_BUFFERS`].
    #[error("a packet pool cannot have {0} buffers; use 1 to {MAX_BUFFERS}")]
    BadSize(u64),
    /// The arena has no room for the pool.
    #[error("pool '{name}' needs {wanted} buffers, but its memory region has room for {left} only")]
    ArenaFull {
        /// Name of the pool.
        name: String,
        /// Buffers requested.
        wanted: u32,
        /// Buffers that still fit.
        left: u32,
    },
    /// The lease of another process does not fit the region that it passed.
    #[error("another process leases packet buffers that are not in the {bytes} bytes of memory that it passed")]
    InvalidLease {
        /// Bytes of the region.
        bytes: usize,
    },
    /// The region could not be mapped.
    #[error(transparent)]
    Memory(#[from] RegionError),
}

/// Memory region of one NUMA node, from which the pools of that node are allocated.
///
/// Ports register the region as a whole.
#[derive(Debug)]
pub struct Arena {
    region: Arc<Region>,
    used: usize,
}

impl Arena {
    /// Maps a region with room for `buffers` buffers on NUMA node `node`, or on any node if it is `None`.
    pub fn new(buffers: u32, node: Option<u32>) -> Result<Self, PoolError> {
        let mut builder = RegionBuilder::new(Self::bytes(buffers)?);
        if let Some(node) = node {
            builder = builder.numa_node(node);
        }
        Ok(Self::in_region(builder.map()?))
    }

    /// Uses a region that is mapped already, for instance a shared one or one that requires huge pages.
    pub fn in_region(region: Region) -> Self {
        Self { region: Arc::new(region), used: 0 }
    }

    /// Bytes of memory for `buffers` buffers.
    pub fn bytes(buffers: u32) -> Result<usize, PoolError> {
        if buffers == 0 || buffers > MAX_BUFFERS {
            Err(PoolError::BadSize(buffers.into()))
        } else {
            Ok(buffers as usize * STRIDE)
        }
    }

    /// Allocates a pool of `buffers` buffers.
    pub fn pool(&mut self, name: &str, buffers: u32) -> Result<Pool, PoolError> {
        let bytes = Self::bytes(buffers)?;
        let left = self.region.bytes() - self.used;
        if bytes > left {
            return Err(PoolError::ArenaFull { name: name.to_owned(), wanted: buffers, left: (left / STRIDE) as u32 });
        }
        let pool = Pool::create(name, Arc::clone(&self.region), self.used, buffers, None)?;
        self.used += bytes;
        Ok(pool)
    }

    /// The memory region of the arena.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

/// Pool of packet buffers of equal size.
///
/// A thread takes buffers from and frees them to its own cache. Caches exchange magazines of buffers with a
/// lock-free shared list. Buffers may be taken on one thread and freed on another.
///
/// A pool is freed after its last `Pool` and its last packet are dropped. The memory goes when the next
/// thread with a cache ends, or when the next pool is created or dropped.
#[derive(Clone)]
pub struct Pool {
    handle: Arc<PoolHandle>,
}

struct PoolHandle {
    shared: NonNull<PoolState>,
}

// SAFETY: the state of `PoolState` is atomic or behind a lock, so it may be shared between threads, and it
// outlives every handle.
unsafe impl Send for PoolHandle {}
// SAFETY: the state of `PoolState` is atomic or behind a lock, so it may be used from several threads at
// once.
unsafe impl Sync for PoolHandle {}

pub(super) struct PoolState {
    id: u8,
    template: MetaTemplate,
    generation: u32,
    name: String,
    base: NonNull<u8>,
    offset: usize,
    count: u32,
    /// Buffers that this process takes and frees. Fewer than `count` in a pool made of a lease.
    owned: u32,
    region: Arc<Region>,
    /// Shared list of magazines, each named by the index of its first buffer.
    stack: Stack,
    /// Buffers in the shared list, as a signed number in two's complement.
    ///
    /// A thread adds to it after it has pushed a magazine, which is its last access to these buffers. It
    /// subtracts after it has popped one. The subtraction may come before the addition, so the value can be
    /// too low, even negative, for a moment.
    stacked: AtomicU32,
    /// Caches of threads, which the pool owns. Not `Box`: a box that moves invalidates the addresses that threads have.
    caches: Mutex<Vec<NonNull<Cache>>>,
    orphaned: AtomicU32,
}

/// Metadata line of new packets of a pool, with common fields such as the input port filled in.
///
/// It replaces the line of an empty packet at no extra cost. Made by [`Pool::meta_template`].
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct MetaTemplate {
    /// A `Meta` as words. It stays in memory and is copied as a whole; the compiler would otherwise store
    /// field by field.
    line: [u64; META / 8],
}

impl MetaTemplate {
    pub(super) const fn new(pool: u8) -> Self {
        // SAFETY: `Meta` has 64 bytes without padding: its size is asserted and equals the sum of its fields.
        // Any bytes are valid words.
        Self { line: unsafe { std::mem::transmute::<Meta, [u64; META / 8]>(Meta::empty(pool)) } }
    }

    fn meta(&mut self) -> &mut Meta {
        // SAFETY: `line` holds a `Meta`, and it lies at the start of a struct that is aligned to 64.
        unsafe { &mut *std::ptr::from_mut(self).cast() }
    }

    /// The metadata line as words.
    #[inline(always)]
    pub(super) const fn line(&self) -> [u64; META / 8] {
        self.line
    }

    pub(super) fn pool(&self) -> u8 {
        // SAFETY: `line` holds a `Meta`, and it lies at the start of a struct that is aligned to 64.
        unsafe { (*std::ptr::from_ref(self).cast::<Meta>()).pool }
    }

    /// Sets the input port of the packets.
    pub fn in_port(mut self, port: PortId) -> Self {
        self.meta().in_port = Some(port);
        self
    }

    /// Sets the data to `len` bytes behind the full headroom; the content is whatever the buffers contain.
    ///
    /// # Panics
    /// If `len` exceeds [`super::DATA_ROOM`].
    pub fn len(mut self, len: usize) -> Self {
        assert!(len <= super::DATA_ROOM);
        self.meta().data_len = len as u16;
        self.meta().packet_len = len as u32;
        self
    }
}

impl fmt::Debug for MetaTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetaTemplate").field("pool", &self.pool()).finish_non_exhaustive()
    }
}

/// Free buffers of one thread. Only the thread writes it; others read `len`.
///
/// The metadata line of a free buffer names its pool, has no next segment and no references.
pub(super) struct Cache {
    len: AtomicU32,
    slots: [Cell<*mut Meta>; CACHE_SIZE],
}

impl Cache {
    /// Number of free buffers. They are in the slots below it.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed) as usize
    }

    /// Shortens the cache to `len` buffers; the caller owns those behind.
    #[inline(always)]
    pub(super) fn set_len(&self, len: usize) {
        self.len.store(len as u32, Ordering::Release);
    }

    /// Address of the first slot.
    #[inline(always)]
    pub(super) fn slots(&self) -> *const Cell<*mut Meta> {
        self.slots.as_ptr()
    }

    /// Returns a slot.
    ///
    /// # Safety
    /// `at` is below the number of slots.
    #[inline(always)]
    pub(super) unsafe fn slot(&self, at: usize) -> &Cell<*mut Meta> {
        debug_assert!(at < CACHE_SIZE);
        // SAFETY: the caller guarantees that `at` is in bounds.
        unsafe { self.slots.get_unchecked(at) }
    }
}

#[derive(Clone, Copy)]
struct ThreadCache {
    cache: *const Cache,
    generation: u32,
}

thread_local! {
    // A type without destructor, so that an access is a plain load.
    static THREAD_CACHES: [Cell<ThreadCache>; MAX_POOLS] =
        const { [const { Cell::new(ThreadCache { cache: ptr::null(), generation: 0 }) }; MAX_POOLS] };
    static RETURN_ON_EXIT: ReturnOnExit = const { ReturnOnExit };
}

/// Returns the caches of a thread to their pools when the thread ends.
struct ReturnOnExit;

impl Drop for ReturnOnExit {
    fn drop(&mut self) {
        let _registry = registry();
        THREAD_CACHES.with(|local| {
            for (id, entry) in local.iter().enumerate() {
                let ThreadCache { cache, generation } = entry.get();
                entry.set(ThreadCache { cache: ptr::null(), generation: 0 });
                let shared = POOLS[id].load(Ordering::Acquire);
                if cache.is_null() || shared.is_null() || GENERATIONS[id].load(Ordering::Relaxed) != generation {
                    continue;
                }
                // SAFETY: the generations are equal, so the cache belongs to the pool that exists now. The
                // pool cannot be freed while the registry is locked.
                unsafe { (*shared).retire_cache(cache) };
            }
        });
        reclaim_orphans();
    }
}

impl Pool {
    /// Creates a pool in a region of its own, on any NUMA node.
    pub fn new(name: &str, buffers: u32) -> Result<Self, PoolError> {
        Arena::new(buffers, None)?.pool(name, buffers)
    }

    /// Creates a pool of the buffers that another process leases ([`Self::lease`]).
    ///
    /// The pool of the other process has `count` buffers from `offset` of the region on. `leased` are the
    /// indices of the leased buffers. A buffer has the same index in both processes.
    ///
    /// # Errors
    /// The region has no such pool, the ranges are not ascending or exceed the pool, or no pool can be
    /// created.
    pub fn from_lease(
        name: &str,
        region: &Arc<Region>,
        offset: usize,
        count: u32,
        leased: &[Range<u32>],
    ) -> Result<Self, PoolError> {
        let bytes = Arena::bytes(count)?;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= region.bytes()) && offset.is_multiple_of(META);
        let mut end = 0;
        let ordered = leased.iter().all(|range| {
            let right = range.start >= end && range.start < range.end && range.end <= count;
            end = range.end;
            right
        });
        if !fits || !ordered || leased.is_empty() {
            return Err(PoolError::InvalidLease { bytes: region.bytes() });
        }
        let leased: Vec<u32> = leased.iter().cloned().flatten().collect();
        Self::create(name, Arc::clone(region), offset, count, Some(&leased))
    }

    /// Takes `buffers` buffers out of the pool for another process; `None` if fewer are free.
    ///
    /// The other process maps the region and creates a pool of them ([`Self::from_lease`]).
    pub fn lease(&self, buffers: u32) -> Option<LeasedBuffers> {
        let mut packets = Vec::with_capacity(buffers as usize);
        while packets.len() < buffers as usize {
            packets.push(self.take()?);
        }
        let mut leased: Vec<u32> =
            packets.into_iter().map(|packet| self.shared().index(packet.into_meta().as_ptr())).collect();
        leased.sort_unstable();
        Some(LeasedBuffers { pool: self.clone(), indices: leased.into() })
    }

    fn create(
        name: &str,
        region: Arc<Region>,
        offset: usize,
        count: u32,
        leased: Option<&[u32]>,
    ) -> Result<Self, PoolError> {
        let _registry = registry();
        reclaim_orphans();
        let id = POOLS.iter().position(|pool| pool.load(Ordering::Relaxed).is_null()).ok_or(PoolError::TooManyPools)?;
        let generation = GENERATIONS[id].load(Ordering::Relaxed).wrapping_add(1).max(1);
        // SAFETY: the callers have checked that `count` buffers fit into the region behind `offset`.
        let base = unsafe { region.base().add(offset) };
        let shared = Box::new(PoolState {
            id: id as u8,
            template: MetaTemplate::new(id as u8),
            generation,
            name: name.to_owned(),
            base,
            offset,
            count,
            owned: leased.map_or(count, |leased| leased.len() as u32),
            region,
            stack: Stack::new(count),
            stacked: AtomicU32::new(0),
            caches: Mutex::new(Vec::new()),
            orphaned: AtomicU32::new(0),
        });
        for first in (0..shared.owned).step_by(MAGAZINE_SIZE).rev() {
            let mut magazine = [ptr::null_mut(); MAGAZINE_SIZE];
            let n = MAGAZINE_SIZE.min((shared.owned - first) as usize);
            for (at, slot) in (first..).zip(&mut magazine[..n]) {
                *slot = shared.buffer(leased.map_or(at, |leased| leased[at as usize]));
                // SAFETY: the buffer lies in the region, and no other code has its address yet.
                unsafe {
                    (*slot).write(Meta::empty(id as u8));
                    red_zones::created(*slot);
                    red_zones::freed(*slot);
                }
            }
            shared.push_magazine(&magazine[..n]);
        }
        GENERATIONS[id].store(generation, Ordering::Relaxed);
        let shared = NonNull::from(Box::leak(shared));
        POOLS[id].store(shared.as_ptr(), Ordering::Release);
        Ok(Self { handle: Arc::new(PoolHandle { shared }) })
    }

    #[inline(always)]
    pub(super) fn shared(&self) -> &PoolState {
        // SAFETY: the pool state is freed only after the last handle is dropped.
        unsafe { self.handle.shared.as_ref() }
    }

    /// Name of the pool.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// Id of the pool in this process: the upper part of its packets' [`Handle`]s.
    pub fn id(&self) -> u8 {
        self.shared().id
    }

    /// Number of buffers, free or not.
    pub fn capacity(&self) -> u32 {
        self.shared().owned
    }

    /// Number of buffers of the pool in its region. It exceeds [`Self::capacity`] if another process uses
    /// some of them.
    pub fn region_buffers(&self) -> u32 {
        self.shared().count
    }

    /// Number of free buffers, including those in the caches of threads. It is exact while no thread takes or
    /// frees buffers.
    pub fn available(&self) -> u32 {
        self.shared().available()
    }

    /// Number of buffers that are not free: in packets, or posted to devices.
    pub fn outstanding(&self) -> u32 {
        self.capacity().saturating_sub(self.available())
    }

    /// The memory region that holds the buffers.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared().region
    }

    /// Kind of memory that backs the region.
    pub fn backing(&self) -> Backing {
        self.shared().region.backing()
    }

    /// Offset in bytes of the first buffer in the region. Buffer *i* starts `i *` [`STRIDE`] bytes behind it.
    pub fn region_offset(&self) -> usize {
        self.shared().offset
    }

    /// Takes an empty packet with the full headroom; `None` if no buffer is free.
    ///
    /// It is `None` too in a destructor of a thread-local variable, after the thread has returned its caches.
    #[inline]
    pub fn take(&self) -> Option<Packet> {
        let cache = self.shared().thread_cache()?;
        // SAFETY: the cache belongs to this thread. A slot below `len` holds a free buffer, and the shortened
        // cache does not own it any more.
        unsafe {
            let len = cache.len.load(Ordering::Relaxed);
            let len = if len == 0 { self.shared().refill(cache) } else { len };
            let at = len.checked_sub(1)?;
            let meta = cache.slots.get_unchecked(at as usize).get();
            cache.len.store(at, Ordering::Release);
            red_zones::taken(meta);
            ptr::copy_nonoverlapping((&raw const self.shared().template.line).cast(), meta, 1);
            Some(Packet::from_meta(NonNull::new_unchecked(meta)))
        }
    }

    /// Appends up to `want` empty packets to `batch`, as many as are free and fit. Returns their number.
    #[inline]
    pub fn take_batch(&self, want: usize, batch: &mut Batch) -> usize {
        self.take_batch_from_template(want, batch, &self.shared().template)
    }

    /// Metadata line of empty packets of this pool, for [`Self::take_batch_from_template`].
    pub fn meta_template(&self) -> MetaTemplate {
        self.shared().template
    }

    /// Does the same as [`Self::take_batch`] with a prepared metadata line.
    ///
    /// # Panics
    /// If `template` was made by another pool.
    #[inline]
    pub fn take_batch_from_template(&self, want: usize, batch: &mut Batch, template: &MetaTemplate) -> usize {
        let (shared, want) = (self.shared(), want.min(batch.space()));
        assert!(template.pool() == shared.id);
        let Some(cache) = shared.thread_cache() else { return 0 };
        // SAFETY: the cache belongs to this thread. The `n` slots below `len` hold free buffers, and the
        // shortened cache does not own them any more. `want` is at most the free space of the batch.
        unsafe {
            let mut len = cache.len.load(Ordering::Relaxed) as usize;
            if len < want {
                len = shared.refill(cache) as usize;
            }
            let n = want.min(len);
            let from = cache.slots.as_ptr().add(len - n);
            batch.push_with(n, |i| {
                let meta = (*from.add(i)).get();
                red_zones::taken(meta);
                ptr::copy_nonoverlapping((&raw const template.line).cast(), meta, 1);
                Packet::from_meta(NonNull::new_unchecked(meta))
            });
            cache.len.store((len - n) as u32, Ordering::Release);
            n
        }
    }
}

/// Buffers of a pool that another process uses.
///
/// Dropping it returns the buffers to the pool. Until then, the other process and its devices may write to
/// them; afterwards they must not.
#[derive(Debug)]
pub struct LeasedBuffers {
    pool: Pool,
    /// Indices of the buffers, in ascending order.
    indices: Box<[u32]>,
}

impl LeasedBuffers {
    /// Number of buffers.
    pub fn count(&self) -> usize {
        self.indices.len()
    }

    /// Indices of the buffers in the pool, as ascending ranges.
    pub fn ranges(&self) -> Vec<Range<u32>> {
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for &index in &self.indices {
            match ranges.last_mut() {
                Some(range) if range.end == index => range.end += 1,
                _ => ranges.push(index..index + 1),
            }
        }
        ranges
    }
}

impl Drop for LeasedBuffers {
    fn drop(&mut self) {
        let shared = self.pool.shared();
        for &index in &self.indices {
            let meta = shared.buffer(index);
            // SAFETY: the buffers were taken out of the pool, so `self` is their only owner. The metadata
            // line is written whole; what the other process left in it is not read.
            unsafe {
                meta.write(Meta::empty(shared.id));
                free_segment(NonNull::new_unchecked(meta));
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.name())
            .field("capacity", &self.capacity())
            .field("available", &self.available())
            .finish_non_exhaustive()
    }
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        let _registry = registry();
        // SAFETY: the state stays until `reclaim_orphans` finds the pool orphaned and all its buffers free.
        unsafe { self.shared.as_ref() }.orphaned.store(1, Ordering::Relaxed);
        reclaim_orphans();
    }
}

/// Frees every pool without handles whose buffers are all free. The caller holds the lock of the registry.
fn reclaim_orphans() {
    for (id, slot) in POOLS.iter().enumerate() {
        let pool = slot.load(Ordering::Acquire);
        // SAFETY: pools are freed only in this function, and the caller holds the lock of the registry.
        let Some(shared) = (unsafe { pool.as_ref() }) else { continue };
        if shared.orphaned.load(Ordering::Relaxed) == 0 || shared.available() < shared.owned {
            continue;
        }
        slot.store(ptr::null_mut(), Ordering::Release);
        // SAFETY: the pool owns the region, which has `count` buffers from `base` on.
        unsafe { red_zones::destroyed(shared.base.as_ptr(), shared.count as usize * STRIDE) };
        GENERATIONS[id].store(shared.generation.wrapping_add(1), Ordering::Release);
        // SAFETY: without handles no thread can take a buffer, and without packets none can free one. The
        // counts of caches and shared list were the last accesses of the other threads: they store with
        // `Release`, and `available` loads with `Acquire`.
        drop(unsafe { Box::from_raw(pool) });
    }
}

impl Drop for PoolState {
    fn drop(&mut self) {
        for cache in self.caches.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: `new_cache` made it of a box. Threads compare the generation of the pool before they use it.
            drop(unsafe { Box::from_raw(cache.as_ptr()) });
        }
    }
}

impl PoolState {
    fn buffer(&self, index: u32) -> *mut Meta {
        assert!(index < self.count, "buffer {index} of pool '{}', which has {}", self.name, self.count);
        // SAFETY: `index` is below `count`, and the region holds `count` buffers from `base` on.
        unsafe { self.base.as_ptr().add(index as usize * STRIDE).cast() }
    }

    fn index(&self, meta: *const Meta) -> u32 {
        ((meta as usize - self.base.as_ptr() as usize) / STRIDE) as u32
    }

    fn available(&self) -> u32 {
        // The shared list is counted first. Without handles, buffers move only from packets to caches and
        // from caches to the shared list. A buffer that moves meanwhile is missed, never counted twice, so
        // `reclaim_orphans` frees no pool with packets.
        let stacked = self.stacked.load(Ordering::Acquire) as i32;
        let caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caches in the list exist; one is freed only after it is taken out, with the lock held.
        let cached: u32 = caches.iter().map(|cache| unsafe { cache.as_ref() }.len.load(Ordering::Acquire)).sum();
        (i64::from(stacked) + i64::from(cached)).clamp(0, self.count.into()) as u32
    }

    /// Returns this thread's cache of the pool; `None` in a thread that has returned its caches because it
    /// ends.
    ///
    /// Destructors of thread-local variables may still free packets in such a thread.
    #[inline(always)]
    pub(super) fn thread_cache(&self) -> Option<&Cache> {
        let local = THREAD_CACHES.with(|local| local[self.id as usize].get());
        if local.generation == self.generation {
            // SAFETY: the generations are equal, so the cache belongs to this pool. Caches live until their
            // thread or the pool ends.
            Some(unsafe { &*local.cache })
        } else {
            self.new_cache()
        }
    }

    #[cold]
    fn new_cache(&self) -> Option<&Cache> {
        RETURN_ON_EXIT.try_with(|_| ()).ok()?;
        let cache =
            Box::new(Cache { len: AtomicU32::new(0), slots: [const { Cell::new(ptr::null_mut()) }; CACHE_SIZE] });
        let cache = NonNull::from(Box::leak(cache));
        self.caches.lock().unwrap_or_else(PoisonError::into_inner).push(cache);
        let local = ThreadCache { cache: cache.as_ptr(), generation: self.generation };
        THREAD_CACHES.with(|caches| caches[self.id as usize].set(local));
        // SAFETY: the pool owns the cache until this thread or the pool ends.
        Some(unsafe { cache.as_ref() })
    }

    /// Returns all buffers of `cache` to the shared list and frees the cache.
    ///
    /// # Safety
    /// `cache` is this thread's cache of this pool, and it is not used afterwards.
    unsafe fn retire_cache(&self, cache: *const Cache) {
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = caches.iter().position(|it| ptr::eq(it.as_ptr(), cache)) else { return };
        // SAFETY: `new_cache` made it of a box, and the caller does not use it afterwards. No other thread reads `len`
        // any more: the lock is held, and the list does not have it.
        let cache = unsafe { Box::from_raw(caches.swap_remove(at).as_ptr()) };
        let len = cache.len.load(Ordering::Relaxed) as usize;
        let mut free = [ptr::null_mut(); CACHE_SIZE];
        for (to, from) in free.iter_mut().zip(&cache.slots) {
            *to = from.get();
        }
        for magazine in free[..len].chunks(MAGAZINE_SIZE) {
            self.push_magazine(magazine);
        }
    }

    /// Fetches magazines from the shared list until the cache has two, or the list is empty. Returns the new
    /// length.
    ///
    /// # Safety
    /// `cache` belongs to this thread.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn refill(&self, cache: *const Cache) -> u32 {
        // SAFETY: the caller guarantees that `cache` belongs to this thread, so it is alive and no other
        // thread writes it.
        let cache = unsafe { &*cache };
        let mut len = cache.len.load(Ordering::Relaxed) as usize;
        while len < 2 * MAGAZINE_SIZE {
            let Some(head) = self.stack.pop() else { break };
            // SAFETY: this thread popped the magazine, so it owns its buffers. The pop acquires what
            // `push_magazine` wrote.
            let (n, rest) = unsafe { magazine_of(self.buffer(head)) };
            // SAFETY: `push_magazine` wrote `n - 1` entries behind the count, which lie in the first buffer
            // of the magazine; this thread owns it.
            let rest = unsafe { std::slice::from_raw_parts(rest, n as usize - 1) };
            for (slot, index) in cache.slots[len..].iter().zip(rest.iter().chain([&head])) {
                slot.set(self.buffer(*index));
            }
            // SAFETY: this thread owns the buffers of the magazine, and the list is read.
            unsafe { red_zones::list(self.buffer(head), false) };
            // The count is lowered first, so that `available` never counts a buffer in two places. A count
            // that is too low for a moment does no harm: this thread holds a handle, so the pool cannot be
            // freed.
            self.stacked.fetch_sub(n, Ordering::AcqRel);
            len += n as usize;
        }
        cache.len.store(len as u32, Ordering::Release);
        len as u32
    }

    /// Moves two magazines of a full cache to the shared list; returns the new length.
    ///
    /// # Safety
    /// `cache` belongs to this thread.
    #[cold]
    #[inline(never)]
    unsafe fn spill(&self, cache: *const Cache) -> u32 {
        // SAFETY: the caller guarantees that `cache` belongs to this thread, so it is alive and no other
        // thread writes it.
        let cache = unsafe { &*cache };
        let mut len = cache.len.load(Ordering::Relaxed) as usize;
        // The oldest buffers go: those freed last are still in the processor's cache.
        let give = (2 * MAGAZINE_SIZE).min(len);
        let mut free = [ptr::null_mut(); 2 * MAGAZINE_SIZE];
        for (to, from) in free.iter_mut().zip(&cache.slots[..give]) {
            *to = from.get();
        }
        for at in give..len {
            cache.slots[at - give].set(cache.slots[at].get());
        }
        len -= give;
        cache.len.store(len as u32, Ordering::Release);
        for magazine in free[..give].chunks(MAGAZINE_SIZE) {
            self.push_magazine(magazine);
        }
        len as u32
    }

    fn push_magazine(&self, buffers: &[*mut Meta]) {
        let Some((&head, rest)) = buffers.split_first() else { return };
        assert!(rest.len() < MAGAZINE_SIZE);
        // SAFETY: the buffers are free and owned by this thread; the list fits behind the count, since a
        // magazine has at most `MAGAZINE_SIZE` buffers.
        unsafe {
            red_zones::list(head, true);
            let (_, list) = magazine_of(head);
            count_of(head).write(buffers.len() as u32);
            for (i, &buffer) in rest.iter().enumerate() {
                list.add(i).write(self.index(buffer));
            }
        }
        self.stack.push(self.index(head));
        self.stacked.fetch_add(buffers.len() as u32, Ordering::Release);
    }
}

/// Address of the number of buffers in a magazine: in the data room of its first buffer.
///
/// # Safety
/// `meta` is the start of a free buffer.
unsafe fn count_of(meta: *mut Meta) -> *mut u32 {
    // SAFETY: the offset lies inside the buffer. The address is aligned, since buffers are aligned to 64.
    unsafe { meta.cast::<u8>().add(DATA_START).cast() }
}

/// Number of buffers in a magazine, and the list of the indices of all but the first.
///
/// # Safety
/// `meta` is the start of a free buffer that this thread owns.
unsafe fn magazine_of(meta: *mut Meta) -> (u32, *mut u32) {
    const {
        assert!(DATA_START + MAGAZINE_BYTES <= BUFFER_BYTES);
        assert!(DATA_START.is_multiple_of(4) && META == 64);
    }
    // SAFETY: the caller guarantees a free buffer of this thread; the count lies inside it.
    unsafe {
        let count = count_of(meta);
        (count.read(), count.add(1))
    }
}

/// Resolves a handle to the metadata line of its segment.
///
/// # Safety
/// The segment is alive, so its pool exists.
#[inline]
pub(super) unsafe fn resolve(handle: u32) -> NonNull<Meta> {
    let Handle { pool, index } = Handle::unpack(handle);
    // SAFETY: the caller guarantees that the segment is alive, so the pool with its id exists.
    unsafe { NonNull::new_unchecked((*POOLS[pool as usize].load(Ordering::Acquire)).buffer(index)) }
}

/// Returns the handle of a segment.
///
/// # Safety
/// The segment is alive.
#[inline]
pub(super) unsafe fn handle_of(meta: NonNull<Meta>) -> Handle {
    // SAFETY: the caller guarantees that the segment is alive, so its metadata can be read and its pool
    // exists.
    unsafe {
        let pool = (*meta.as_ptr()).pool;
        let shared = &*POOLS[pool as usize].load(Ordering::Acquire);
        Handle { pool, index: shared.index(meta.as_ptr()) }
    }
}

/// Returns the region of a segment, and the offset of the first byte of its buffer there.
///
/// # Safety
/// The segment is alive during `'a`.
pub(super) unsafe fn region_of<'a>(meta: NonNull<Meta>) -> (&'a Arc<Region>, usize) {
    // SAFETY: the caller guarantees that the segment is alive during `'a`, so its pool, which owns the
    // region, exists as long.
    unsafe {
        let shared = &*POOLS[(*meta.as_ptr()).pool as usize].load(Ordering::Acquire);
        (&shared.region, meta.as_ptr() as usize - shared.region.base().as_ptr() as usize)
    }
}

/// Puts one segment into this thread's cache.
///
/// # Safety
/// The caller owns the segment and does not use it again. It has no next segment and no references.
#[inline]
unsafe fn free_segment(meta: NonNull<Meta>) {
    // SAFETY: the caller owns the segment, so it is alive and its pool exists. The cache belongs to this
    // thread, and `spill` makes room in a full one.
    unsafe {
        let shared = &*POOLS[(*meta.as_ptr()).pool as usize].load(Ordering::Acquire);
        red_zones::freed(meta.as_ptr());
        let Some(cache) = shared.thread_cache() else { return shared.push_magazine(&[meta.as_ptr()]) };
        let mut len = cache.len.load(Ordering::Relaxed);
        if len as usize == CACHE_SIZE {
            len = shared.spill(cache);
        }
        cache.slots.get_unchecked(len as usize).set(meta.as_ptr());
        cache.len.store(len + 1, Ordering::Release);
    }
}

/// Frees the segments of a packet.
///
/// # Safety
/// The caller owns the packet and does not use it again.
pub(super) unsafe fn release(meta: NonNull<Meta>) {
    let mut at = meta;
    loop {
        // SAFETY: the caller owns the first segment, and each segment owns its next one or a reference to it.
        // A segment that still has references is left alone.
        unsafe {
            if super::shared_segment::drop_reference(at) {
                return;
            }
            let next = (*at.as_ptr()).next;
            let following = (next != NO_SEGMENT).then(|| resolve(next));
            (*at.as_ptr()).next = NO_SEGMENT;
            free_segment(at);
            match following {
                Some(following) => at = following,
                None => return,
            }
        }
    }
}

/// Returns this thread's cache of a pool, with room for `more` further buffers, and its length.
///
/// `None` in a thread that has returned its caches because it ends.
///
/// # Safety
/// The caller owns a packet of the pool, and `more` is at most the size of a batch.
#[inline(always)]
unsafe fn cache_with_room<'a>(pool: u8, more: usize) -> Option<(&'a Cache, usize)> {
    debug_assert!(more <= super::batch::BATCH);
    // SAFETY: the caller owns a packet of the pool, so the pool exists. The cache belongs to this thread.
    unsafe {
        let shared = &*POOLS[pool as usize].load(Ordering::Acquire);
        let cache = shared.thread_cache()?;
        let len = cache.len.load(Ordering::Relaxed) as usize;
        let len = if len + more > CACHE_SIZE { shared.spill(cache) as usize } else { len };
        debug_assert!(len + more <= CACHE_SIZE);
        Some((cache, len))
    }
}

/// Frees packets; returns the sum of their lengths in bytes.
///
/// In the common case all packets have one segment and belong to one pool. Each then costs a few
/// instructions.
///
/// # Safety
/// The caller owns the packets and does not use them again. They are at most a batch.
#[inline]
pub(super) unsafe fn release_all(packets: &[NonNull<Meta>]) -> u64 {
    let Some(first) = packets.first() else { return 0 };
    // SAFETY: the caller owns the packets, so their metadata can be read and their pools exist. The cache
    // belongs to this thread and has room for all of them.
    unsafe {
        let pool = (*first.as_ptr()).pool;
        let Some((cache, len)) = cache_with_room(pool, packets.len()) else { return release_each(packets) };
        let free = cache.slots.as_ptr().add(len);
        // AND and OR of the second words of all packets: one test at the end replaces a branch for each
        // packet.
        let (mut all, mut any, mut bytes) = (u64::MAX, 0, 0);
        let mut give = |i: usize, meta: NonNull<Meta>| {
            let word = meta.as_ptr().cast::<u64>().add(WORD).read();
            (all, any) = (all & word, any | word);
            bytes += u64::from((*meta.as_ptr()).packet_len);
            (*free.add(i)).set(meta.as_ptr());
        };
        let (eights, rest) = packets.as_chunks::<8>();
        for (i, eight) in eights.iter().enumerate() {
            eight.iter().enumerate().for_each(|(j, meta)| give(8 * i + j, *meta));
        }
        rest.iter().zip(8 * eights.len()..).for_each(|(meta, i)| give(i, *meta));
        let pools = [all, any].map(|word| (word >> POOL_SHIFT) as u8);
        if all as u32 == NO_SEGMENT && pools == [pool; 2] {
            packets.iter().for_each(|meta| red_zones::freed(meta.as_ptr()));
            cache.len.store((len + packets.len()) as u32, Ordering::Release);
        } else {
            release_mixed(packets, cache, pool);
        }
        bytes
    }
}

/// Does the same as [`release_all`] for packets of which some are chains or belong to other pools than
/// `pool`.
///
/// # Safety
/// As for [`release_all`]. The cache belongs to this thread and has room for all packets.
#[cold]
#[inline(never)]
unsafe fn release_mixed(packets: &[NonNull<Meta>], cache: &Cache, pool: u8) {
    // SAFETY: the caller owns the packets, so their metadata can be read; the cache has room for all of them,
    // and a batch fits into `others`.
    unsafe {
        // Chains and packets of other pools are freed last. Their release may spill this thread's cache to
        // other threads, and then the metadata of buffers from the cache must not be read any more.
        let mut others = [packets[0]; super::batch::BATCH];
        let (mut len, mut others_len) = (cache.len(), 0);
        for meta in packets {
            let it = &*meta.as_ptr();
            if it.pool == pool && it.next == NO_SEGMENT {
                red_zones::freed(meta.as_ptr());
                cache.slot(len).set(meta.as_ptr());
                len += 1;
            } else {
                others[others_len] = *meta;
                others_len += 1;
            }
        }
        cache.set_len(len);
        for meta in &others[..others_len] {
            release(*meta);
        }
    }
}

/// Does the same as [`release_all`] without reading the metadata of the packets.
///
/// # Safety
/// As for [`release_all`]. All packets have one segment and belong to `pool`.
#[inline(always)]
pub(super) unsafe fn release_single_segments(packets: &[NonNull<Meta>], pool: u8) {
    if packets.is_empty() {
        return;
    }
    // SAFETY: the caller owns the packets, so their pool exists. The cache belongs to this thread and has
    // room for all of them.
    unsafe {
        let Some((cache, len)) = cache_with_room(pool, packets.len()) else {
            release_each(packets);
            return;
        };
        packets.iter().for_each(|meta| red_zones::freed(meta.as_ptr()));
        ptr::copy_nonoverlapping(packets.as_ptr().cast(), cache.slots.as_ptr().cast_mut().add(len), packets.len());
        cache.len.store((len + packets.len()) as u32, Ordering::Release);
    }
}

/// Does the same as [`release_all`] in a thread that has returned its caches.
///
/// # Safety
/// As for [`release_all`].
#[cold]
unsafe fn release_each(packets: &[NonNull<Meta>]) -> u64 {
    let mut bytes = 0;
    for meta in packets {
        // SAFETY: the caller owns the packets and does not use them again.
        unsafe {
            bytes += u64::from((*meta.as_ptr()).packet_len);
            release(*meta);
        }
    }
    bytes
}
