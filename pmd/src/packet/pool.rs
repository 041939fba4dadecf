// UNSAFETY: owns the buffers of a pool while no packet does, and finds a pool by the id in a packet's metadata.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::mem::size_of;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wirepath_memory::{Backing, Region, RegionBuilder, RegionError};

use super::batch::Batch;
use super::front::{POOL_SHIFT, WORD};
use super::meta::{FRESH, META, Meta, NO_SEGMENT, STRIDE};
use super::stack::Stack;
use super::{Handle, Packet};

/// Most pools of one process at one time.
pub const MAX_POOLS: usize = 64;
/// Most buffers of one pool: the index part of a [`Handle`].
pub const MAX_BUFFERS: u32 = (1 << 24) - 1;
/// Buffers that a thread keeps at hand. Four magazines: two may be taken or given back before the shared list is touched again.
const CACHE: usize = 4 * MAGAZINE;
/// Buffers that change between a thread and the shared list at once.
const MAGAZINE: usize = 128;

static POOLS: [AtomicPtr<Shared>; MAX_POOLS] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_POOLS];
/// Changes with every pool that takes an id, so that a thread notices a cache of a pool that is no more.
static GENERATIONS: [AtomicU32; MAX_POOLS] = [const { AtomicU32::new(0) }; MAX_POOLS];
/// Held while a pool comes or goes and while a thread's cache does; never on a burst path.
static REGISTRY: Mutex<()> = Mutex::new(());

fn registry() -> MutexGuard<'static, ()> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// All ids are taken.
    #[error("{MAX_POOLS} packet pools exist already; share one between ports")]
    TooManyPools,
    /// Zero, or more than a handle can number.
    #[error("a packet pool of {0} buffers was asked for; possible are 1 to {MAX_BUFFERS}")]
    BadSize(u64),
    /// The arena has no room left.
    #[error("pool '{name}' needs {wanted} buffers, but only {left} are left in its memory region")]
    ArenaFull {
        /// Name of the pool.
        name: String,
        /// Buffers asked for.
        wanted: u32,
        /// Buffers that would still fit.
        left: u32,
    },
    /// What another process says of its pool does not fit the region that it passed.
    #[error("another process lends packet buffers that are not in the {bytes} bytes of memory that it passed")]
    NotLent {
        /// Of the region.
        bytes: usize,
    },
    /// No memory.
    #[error(transparent)]
    Memory(#[from] RegionError),
}

/// The region of one NUMA node, from which that node's pools are cut. It is registered whole with each port that needs it.
#[derive(Debug)]
pub struct Arena {
    region: Arc<Region>,
    used: usize,
}

impl Arena {
    /// Maps a region with room for `buffers` buffers on `node` (`None`: wherever the kernel likes).
    pub fn new(buffers: u32, node: Option<u32>) -> Result<Self, PoolError> {
        let mut builder = RegionBuilder::new(Self::bytes(buffers)?);
        if let Some(node) = node {
            builder = builder.numa_node(node);
        }
        Ok(Self::in_region(builder.map()?))
    }

    /// Uses a region that was mapped before, for instance one with demanded huge pages or one that is shared.
    pub fn in_region(region: Region) -> Self {
        Self { region: Arc::new(region), used: 0 }
    }

    /// Bytes that `buffers` buffers take.
    pub fn bytes(buffers: u32) -> Result<usize, PoolError> {
        if buffers == 0 || buffers > MAX_BUFFERS {
            Err(PoolError::BadSize(buffers.into()))
        } else {
            Ok(buffers as usize * STRIDE)
        }
    }

    /// Cuts a pool of `buffers` buffers.
    pub fn pool(&mut self, name: &str, buffers: u32) -> Result<Pool, PoolError> {
        let bytes = Self::bytes(buffers)?;
        let left = self.region.bytes() - self.used;
        if bytes > left {
            return Err(PoolError::ArenaFull { name: name.to_owned(), wanted: buffers, left: (left / STRIDE) as u32 });
        }
        let pool = Pool::cut(name, Arc::clone(&self.region), self.used, buffers, None)?;
        self.used += bytes;
        Ok(pool)
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

/// A set of equal packet buffers.
///
/// Taking and giving back go through a cache of the calling thread and from there, in magazines, through a shared list without
/// locks; both may happen on any thread. When the last `Pool` handle is gone and the last packet has come back, the memory is freed as
/// soon as a thread that used a pool ends, or another pool comes or goes.
#[derive(Clone)]
pub struct Pool {
    handle: Arc<PoolHandle>,
}

struct PoolHandle {
    shared: NonNull<Shared>,
}

// SAFETY: `Shared` is Sync (all its state is atomic or behind a lock), and outlives every handle.
unsafe impl Send for PoolHandle {}
// SAFETY: as above.
unsafe impl Sync for PoolHandle {}

pub(super) struct Shared {
    id: u8,
    blank: Blank,
    generation: u32,
    name: String,
    base: NonNull<u8>,
    offset: usize,
    count: u32,
    /// Of these, the buffers that this process takes and gives back.
    own: u32,
    region: Arc<Region>,
    /// Magazines, each named by its first buffer.
    stack: Stack,
    /// Buffers in the stack, as a signed number. Added after a magazine is in, which is the last touch of who gives back, and subtracted
    /// after it is out, which may come first: for a moment too low, below zero even.
    stacked: AtomicU32,
    caches: Mutex<Vec<Box<Cache>>>,
    orphaned: AtomicU32,
}

/// The metadata line that fresh packets of one pool get, prepared once: what they have in common, such as the port they came in by,
/// is then written along with the reset. Made by [`Pool::blank`].
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Blank {
    /// A `Meta` as words: kept in memory and copied whole, since the compiler would otherwise store field by field.
    line: [u64; META / 8],
}

impl Blank {
    pub(super) const fn fresh(pool: u8) -> Self {
        // SAFETY: a `Meta` is 64 bytes without padding (checked by `size_of` and the sum of its fields), any bytes are valid words.
        Self { line: unsafe { std::mem::transmute::<Meta, [u64; META / 8]>(Meta::fresh(pool)) } }
    }

    fn meta(&mut self) -> &mut Meta {
        // SAFETY: the words were a `Meta`, at the start of a struct as aligned.
        unsafe { &mut *std::ptr::from_mut(self).cast() }
    }

    /// The line as words.
    #[inline(always)]
    pub(super) const fn line(&self) -> [u64; META / 8] {
        self.line
    }

    pub(super) fn pool(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (*std::ptr::from_ref(self).cast::<Meta>()).pool }
    }

    /// Packets of this input port.
    pub fn in_port(mut self, port: u16) -> Self {
        self.meta().in_port = port;
        self
    }

    /// Packets of `len` bytes behind the full headroom, whatever the buffers contain.
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

impl fmt::Debug for Blank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blank").field("pool", &self.pool()).finish_non_exhaustive()
    }
}

/// What one thread has at hand. Written by its thread only; others read `len`.
///
/// The line of a free buffer says what that of every buffer in a packet of one segment does: which pool it is of, that nothing hangs on it,
/// and that nobody shares it.
pub(super) struct Cache {
    len: AtomicU32,
    slots: [Cell<*mut Meta>; CACHE],
}

impl Cache {
    /// Buffers at hand: in the slots below.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed) as usize
    }

    /// Those from `len` on were taken.
    #[inline(always)]
    pub(super) fn set_len(&self, len: usize) {
        self.len.store(len as u32, Ordering::Release);
    }

    /// All slots.
    #[inline(always)]
    pub(super) fn slots(&self) -> *const Cell<*mut Meta> {
        self.slots.as_ptr()
    }

    /// A slot.
    ///
    /// # Safety
    /// There are as many.
    #[inline(always)]
    pub(super) unsafe fn slot(&self, at: usize) -> &Cell<*mut Meta> {
        debug_assert!(at < CACHE);
        // SAFETY: as promised.
        unsafe { self.slots.get_unchecked(at) }
    }
}

#[derive(Clone, Copy)]
struct Local {
    cache: *const Cache,
    generation: u32,
}

thread_local! {
    // No destructor, so that an access is a plain load.
    static LOCAL: [Cell<Local>; MAX_POOLS] =
        const { [const { Cell::new(Local { cache: ptr::null(), generation: 0 }) }; MAX_POOLS] };
    static RETURN_ON_EXIT: ReturnOnExit = const { ReturnOnExit };
}

/// Gives a thread's caches back when the thread ends.
struct ReturnOnExit;

impl Drop for ReturnOnExit {
    fn drop(&mut self) {
        let _registry = registry();
        LOCAL.with(|local| {
            for (id, entry) in local.iter().enumerate() {
                let Local { cache, generation } = entry.get();
                entry.set(Local { cache: ptr::null(), generation: 0 });
                let shared = POOLS[id].load(Ordering::Acquire);
                if cache.is_null() || shared.is_null() || GENERATIONS[id].load(Ordering::Relaxed) != generation {
                    continue;
                }
                // SAFETY: the generation is that of the living pool, which cannot go while the registry is locked.
                unsafe { (*shared).retire_cache(cache) };
            }
        });
        reclaim_orphans();
    }
}

impl Pool {
    /// A pool with a region of its own, on any node.
    pub fn new(name: &str, buffers: u32) -> Result<Self, PoolError> {
        Arena::new(buffers, None)?.pool(name, buffers)
    }

    /// The part of another process's pool that it lends ([`Self::lend`]): `count` buffers from `offset` of its region, of which those in
    /// `lent` are for this process. A buffer has the same index in both.
    ///
    /// # Errors
    /// There is no such pool in the region, or no such buffers in the pool.
    pub fn borrowed(
        name: &str,
        region: &Arc<Region>,
        offset: usize,
        count: u32,
        lent: &[Range<u32>],
    ) -> Result<Self, PoolError> {
        let bytes = Arena::bytes(count)?;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= region.bytes()) && offset.is_multiple_of(META);
        let mut end = 0;
        let ordered = lent.iter().all(|range| {
            let right = range.start >= end && range.start < range.end && range.end <= count;
            end = range.end;
            right
        });
        if !fits || !ordered || lent.is_empty() {
            return Err(PoolError::NotLent { bytes: region.bytes() });
        }
        let lent: Vec<u32> = lent.iter().cloned().flatten().collect();
        Self::cut(name, Arc::clone(region), offset, count, Some(&lent))
    }

    /// Takes `buffers` buffers out for another process, which maps the region and makes a pool of them ([`Self::borrowed`]); `None` if
    /// fewer are free.
    pub fn lend(&self, buffers: u32) -> Option<LentBuffers> {
        let mut packets = Vec::with_capacity(buffers as usize);
        while packets.len() < buffers as usize {
            packets.push(self.take()?);
        }
        let mut lent: Vec<u32> =
            packets.into_iter().map(|packet| self.shared().index(packet.into_meta().as_ptr())).collect();
        lent.sort_unstable();
        Some(LentBuffers { pool: self.clone(), indices: lent.into() })
    }

    fn cut(
        name: &str,
        region: Arc<Region>,
        offset: usize,
        count: u32,
        lent: Option<&[u32]>,
    ) -> Result<Self, PoolError> {
        let _registry = registry();
        reclaim_orphans();
        let id = POOLS.iter().position(|pool| pool.load(Ordering::Relaxed).is_null()).ok_or(PoolError::TooManyPools)?;
        let generation = GENERATIONS[id].load(Ordering::Relaxed).wrapping_add(1).max(1);
        // SAFETY: the arena has checked that `count` buffers fit behind `offset`.
        let base = unsafe { region.base().add(offset) };
        let shared = Box::new(Shared {
            id: id as u8,
            blank: Blank::fresh(id as u8),
            generation,
            name: name.to_owned(),
            base,
            offset,
            count,
            own: lent.map_or(count, |lent| lent.len() as u32),
            region,
            stack: Stack::new(count),
            stacked: AtomicU32::new(0),
            caches: Mutex::new(Vec::new()),
            orphaned: AtomicU32::new(0),
        });
        for first in (0..shared.own).step_by(MAGAZINE).rev() {
            let mut magazine = [ptr::null_mut(); MAGAZINE];
            let n = MAGAZINE.min((shared.own - first) as usize);
            for (at, slot) in (first..).zip(&mut magazine[..n]) {
                *slot = shared.buffer(lent.map_or(at, |lent| lent[at as usize]));
                // SAFETY: nobody else has an address of this buffer.
                unsafe { (*slot).write(Meta::fresh(id as u8)) };
            }
            shared.push_magazine(&magazine[..n]);
        }
        GENERATIONS[id].store(generation, Ordering::Relaxed);
        let shared = NonNull::from(Box::leak(shared));
        POOLS[id].store(shared.as_ptr(), Ordering::Release);
        Ok(Self { handle: Arc::new(PoolHandle { shared }) })
    }

    #[inline(always)]
    pub(super) fn shared(&self) -> &Shared {
        // SAFETY: lives as long as a handle.
        unsafe { self.handle.shared.as_ref() }
    }

    /// Name given when the pool was made.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// Id of the pool in this process: the upper part of its packets' [`Handle`]s.
    pub fn id(&self) -> u8 {
        self.shared().id
    }

    /// Number of buffers, free or not.
    pub fn capacity(&self) -> u32 {
        self.shared().own
    }

    /// Buffers of the pool in its region: more than [`Self::capacity`] if some are another process's.
    pub fn span(&self) -> u32 {
        self.shared().count
    }

    /// Number of free buffers, those in the caches of threads included. Exact when nobody takes or gives at the moment.
    pub fn available(&self) -> u32 {
        self.shared().available()
    }

    /// Buffers that are not free: in packets, or posted to devices.
    pub fn outstanding(&self) -> u32 {
        self.capacity().saturating_sub(self.available())
    }

    /// The region that holds the buffers.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared().region
    }

    /// What holds the buffers.
    pub fn backing(&self) -> Backing {
        self.shared().region.backing()
    }

    /// Offset in bytes of the first buffer in its region; buffer *i* starts `i *` [`STRIDE`] behind it.
    pub fn region_offset(&self) -> usize {
        self.shared().offset
    }

    /// An empty packet with the full headroom, or `None` if no buffer is free, or in a destructor of a thread-local while the thread
    /// ends.
    #[inline]
    pub fn take(&self) -> Option<Packet> {
        let cache = self.shared().local()?;
        // SAFETY: the cache is this thread's.
        unsafe {
            let len = cache.len.load(Ordering::Relaxed);
            let len = if len == 0 { self.shared().refill(cache) } else { len };
            let at = len.checked_sub(1)?;
            let meta = cache.slots.get_unchecked(at as usize).get();
            cache.len.store(at, Ordering::Release);
            ptr::copy_nonoverlapping((&raw const self.shared().blank.line).cast(), meta, 1);
            Some(Packet::from_meta(NonNull::new_unchecked(meta)))
        }
    }

    /// Appends up to `want` empty packets to `batch`, as many as are free and fit. Returns how many.
    #[inline]
    pub fn take_batch(&self, want: usize, batch: &mut Batch) -> usize {
        self.take_batch_like(want, batch, &self.shared().blank)
    }

    /// Metadata for fresh packets of this pool, to be refined for [`Self::take_batch_like`].
    pub fn blank(&self) -> Blank {
        self.shared().blank
    }

    /// [`Self::take_batch`] with prepared metadata.
    ///
    /// # Panics
    /// If `blank` was made by another pool.
    #[inline]
    pub fn take_batch_like(&self, want: usize, batch: &mut Batch, blank: &Blank) -> usize {
        let (shared, want) = (self.shared(), want.min(batch.space()));
        assert!(blank.pool() == shared.id);
        let Some(cache) = shared.local() else { return 0 };
        // SAFETY: the cache is this thread's; `want` slots below `len` hold free buffers, which the batch then owns; and the batch
        // has room for them.
        unsafe {
            let mut len = cache.len.load(Ordering::Relaxed) as usize;
            if len < want {
                len = shared.refill(cache) as usize;
            }
            let n = want.min(len);
            let from = cache.slots.as_ptr().add(len - n);
            batch.push_with(n, |i| {
                let meta = (*from.add(i)).get();
                ptr::copy_nonoverlapping((&raw const blank.line).cast(), meta, 1);
                Packet::from_meta(NonNull::new_unchecked(meta))
            });
            cache.len.store((len - n) as u32, Ordering::Release);
            n
        }
    }
}

/// Buffers of a pool that another process uses. Dropped, they are the pool's again: no device and no process may write there any more.
#[derive(Debug)]
pub struct LentBuffers {
    pool: Pool,
    /// In order.
    indices: Box<[u32]>,
}

impl LentBuffers {
    /// How many.
    pub fn count(&self) -> usize {
        self.indices.len()
    }

    /// Their indices in the pool.
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

impl Drop for LentBuffers {
    fn drop(&mut self) {
        let shared = self.pool.shared();
        for &index in &self.indices {
            let meta = shared.buffer(index);
            // SAFETY: taken out of the pool when they were lent, so this is their only owner here. What the other process left in the
            // metadata is not read.
            unsafe {
                meta.write(Meta::fresh(shared.id));
                put(NonNull::new_unchecked(meta));
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
        // SAFETY: the last handle goes now; the pool itself stays until `reclaim_orphans` finds all buffers back.
        unsafe { self.shared.as_ref() }.orphaned.store(1, Ordering::Relaxed);
        reclaim_orphans();
    }
}

/// Frees every pool without handles whose buffers have all come back. The registry must be locked.
fn reclaim_orphans() {
    for (id, slot) in POOLS.iter().enumerate() {
        let pool = slot.load(Ordering::Acquire);
        // SAFETY: pools go only in here, under the lock.
        let Some(shared) = (unsafe { pool.as_ref() }) else { continue };
        if shared.orphaned.load(Ordering::Relaxed) == 0 || shared.available() < shared.own {
            continue;
        }
        slot.store(ptr::null_mut(), Ordering::Release);
        GENERATIONS[id].store(shared.generation.wrapping_add(1), Ordering::Release);
        // SAFETY: no handle, so nobody can take; no packet, so nobody can give. The count of the last packet's cache or magazine
        // was the last thing that its thread touched (`Release` there, `Acquire` in `available`).
        drop(unsafe { Box::from_raw(pool) });
    }
}

impl Shared {
    fn buffer(&self, index: u32) -> *mut Meta {
        assert!(index < self.count, "buffer {index} of pool '{}', which has {}", self.name, self.count);
        // SAFETY: within the pool's part of the region.
        unsafe { self.base.as_ptr().add(index as usize * STRIDE).cast() }
    }

    fn index(&self, meta: *const Meta) -> u32 {
        ((meta as usize - self.base.as_ptr() as usize) / STRIDE) as u32
    }

    fn available(&self) -> u32 {
        // The shared list first. Without handles buffers only go from packets to caches to the list: one that goes there meanwhile is
        // missed and never counted twice, so that `reclaim_orphans` frees no pool with packets.
        let stacked = self.stacked.load(Ordering::Acquire) as i32;
        let caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let cached: u32 = caches.iter().map(|cache| cache.len.load(Ordering::Acquire)).sum();
        (i64::from(stacked) + i64::from(cached)).clamp(0, self.count.into()) as u32
    }

    /// This thread's cache of this pool; `None` in a thread that ends and has given its caches back already: its last packets may be
    /// freed by the destructors of thread-locals.
    #[inline(always)]
    pub(super) fn local(&self) -> Option<&Cache> {
        let local = LOCAL.with(|local| local[self.id as usize].get());
        if local.generation == self.generation {
            // SAFETY: the generation is that of the living pool, whose caches live until their thread or the pool ends.
            Some(unsafe { &*local.cache })
        } else {
            self.new_cache()
        }
    }

    #[cold]
    fn new_cache(&self) -> Option<&Cache> {
        RETURN_ON_EXIT.try_with(|_| ()).ok()?;
        let cache = Box::new(Cache { len: AtomicU32::new(0), slots: [const { Cell::new(ptr::null_mut()) }; CACHE] });
        let address = ptr::from_ref(&*cache);
        self.caches.lock().unwrap_or_else(PoisonError::into_inner).push(cache);
        LOCAL.with(|local| local[self.id as usize].set(Local { cache: address, generation: self.generation }));
        // SAFETY: as in `local`.
        Some(unsafe { &*address })
    }

    /// Gives everything in `cache` back and frees it.
    ///
    /// # Safety
    /// `cache` is this thread's cache of this pool, and not used afterwards.
    unsafe fn retire_cache(&self, cache: *const Cache) {
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = caches.iter().position(|c| ptr::eq(&raw const **c, cache)) else { return };
        let cache = caches.swap_remove(at);
        let len = cache.len.load(Ordering::Relaxed) as usize;
        let mut free = [ptr::null_mut(); CACHE];
        for (to, from) in free.iter_mut().zip(&cache.slots) {
            *to = from.get();
        }
        for magazine in free[..len].chunks(MAGAZINE) {
            self.push_magazine(magazine);
        }
    }

    /// Fetches magazines until two are there or no more are to be had; returns the new length.
    ///
    /// # Safety
    /// `cache` is this thread's.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn refill(&self, cache: *const Cache) -> u32 {
        // SAFETY: as promised by the caller.
        let cache = unsafe { &*cache };
        let mut len = cache.len.load(Ordering::Relaxed) as usize;
        while len < 2 * MAGAZINE {
            let Some(head) = self.stack.pop() else { break };
            // SAFETY: this thread took the magazine off the stack: the buffers in it are its own now, and what `push_magazine`
            // wrote is visible.
            let (n, rest) = unsafe { magazine_of(self.buffer(head)) };
            // SAFETY: as above; at most MAGAZINE - 1 entries, written by `push_magazine`.
            let rest = unsafe { std::slice::from_raw_parts(rest, n as usize - 1) };
            for (slot, index) in cache.slots[len..].iter().zip(rest.iter().chain([&head])) {
                slot.set(self.buffer(*index));
            }
            // The entries first, so that `available` never counts a buffer in two places; too few for a moment is harmless here,
            // since this thread holds a handle and the pool cannot go.
            self.stacked.fetch_sub(n, Ordering::AcqRel);
            len += n as usize;
        }
        cache.len.store(len as u32, Ordering::Release);
        len as u32
    }

    /// Gives two magazines of a full cache back; returns the new length.
    ///
    /// # Safety
    /// `cache` is this thread's.
    #[cold]
    #[inline(never)]
    unsafe fn spill(&self, cache: *const Cache) -> u32 {
        // SAFETY: as promised by the caller.
        let cache = unsafe { &*cache };
        let mut len = cache.len.load(Ordering::Relaxed) as usize;
        // The oldest ones: what was freed last is still in the processor's cache.
        let give = (2 * MAGAZINE).min(len);
        let mut free = [ptr::null_mut(); 2 * MAGAZINE];
        for (to, from) in free.iter_mut().zip(&cache.slots[..give]) {
            *to = from.get();
        }
        for at in give..len {
            cache.slots[at - give].set(cache.slots[at].get());
        }
        len -= give;
        cache.len.store(len as u32, Ordering::Release);
        for magazine in free[..give].chunks(MAGAZINE) {
            self.push_magazine(magazine);
        }
        len as u32
    }

    fn push_magazine(&self, buffers: &[*mut Meta]) {
        let Some((&head, rest)) = buffers.split_first() else { return };
        assert!(rest.len() < MAGAZINE);
        // SAFETY: the buffers are free and this thread's.
        unsafe {
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

/// Where the first buffer of a magazine keeps the count, in its data room.
///
/// # Safety
/// `meta` is the start of a free buffer.
unsafe fn count_of(meta: *mut Meta) -> *mut u32 {
    // SAFETY: inside the buffer, and aligned, since buffers are to 64.
    unsafe { meta.cast::<u8>().add(FRESH).cast() }
}

/// Count and list of the other buffers' indices of a magazine.
///
/// # Safety
/// `meta` is the start of a free buffer of this thread.
unsafe fn magazine_of(meta: *mut Meta) -> (u32, *mut u32) {
    const { assert!(FRESH + MAGAZINE * size_of::<u32>() <= STRIDE && FRESH.is_multiple_of(4) && META == 64) };
    // SAFETY: inside the buffer.
    unsafe {
        let count = count_of(meta);
        (count.read(), count.add(1))
    }
}

/// Metadata of the segment with this handle.
///
/// # Safety
/// The segment exists, so its pool does.
#[inline]
pub(super) unsafe fn resolve(handle: u32) -> NonNull<Meta> {
    let Handle { pool, index } = Handle::unpack(handle);
    // SAFETY: as promised.
    unsafe { NonNull::new_unchecked((*POOLS[pool as usize].load(Ordering::Acquire)).buffer(index)) }
}

/// Handle of a living segment.
///
/// # Safety
/// The segment is alive.
#[inline]
pub(super) unsafe fn handle_of(meta: NonNull<Meta>) -> Handle {
    // SAFETY: a living segment's pool exists.
    unsafe {
        let pool = (*meta.as_ptr()).pool;
        let shared = &*POOLS[pool as usize].load(Ordering::Acquire);
        Handle { pool, index: shared.index(meta.as_ptr()) }
    }
}

/// Region and offset of the first byte of a living segment's buffer.
///
/// # Safety
/// The segment is alive.
pub(super) unsafe fn region_of<'a>(meta: NonNull<Meta>) -> (&'a Arc<Region>, usize) {
    // SAFETY: a living segment's pool exists, and the reference does not outlive the segment (the callers bind it to a borrow).
    unsafe {
        let shared = &*POOLS[(*meta.as_ptr()).pool as usize].load(Ordering::Acquire);
        (&shared.region, meta.as_ptr() as usize - shared.region.base().as_ptr() as usize)
    }
}

/// Puts one segment into this thread's cache.
///
/// # Safety
/// The caller owns the segment, which nobody shares and nothing hangs on, and does not use it again.
#[inline]
unsafe fn put(meta: NonNull<Meta>) {
    // SAFETY: a living segment's pool exists; the cache is this thread's.
    unsafe {
        let shared = &*POOLS[(*meta.as_ptr()).pool as usize].load(Ordering::Acquire);
        let Some(cache) = shared.local() else { return shared.push_magazine(&[meta.as_ptr()]) };
        let mut len = cache.len.load(Ordering::Relaxed);
        if len as usize == CACHE {
            len = shared.spill(cache);
        }
        cache.slots.get_unchecked(len as usize).set(meta.as_ptr());
        cache.len.store(len + 1, Ordering::Release);
    }
}

/// Gives a packet's segments back.
///
/// # Safety
/// The caller owns the packet and does not use it again.
pub(super) unsafe fn release(meta: NonNull<Meta>) {
    let mut at = meta;
    loop {
        // SAFETY: `at` is the caller's, or was held by the segment before it.
        unsafe {
            if super::frozen::drop_reference(at) {
                return;
            }
            let next = (*at.as_ptr()).next;
            let following = (next != NO_SEGMENT).then(|| resolve(next));
            (*at.as_ptr()).next = NO_SEGMENT;
            put(at);
            match following {
                Some(following) => at = following,
                None => return,
            }
        }
    }
}

/// This thread's cache of a pool, with room for `more` buffers behind those that it holds, whose number it returns; `None` in a thread that ends.
///
/// # Safety
/// The caller owns a packet of the pool, so that it exists. `more` is at most a batch.
#[inline(always)]
unsafe fn cache_with_room<'a>(pool: u8, more: usize) -> Option<(&'a Cache, usize)> {
    debug_assert!(more <= super::batch::BATCH);
    // SAFETY: as promised; the cache is this thread's.
    unsafe {
        let shared = &*POOLS[pool as usize].load(Ordering::Acquire);
        let cache = shared.local()?;
        let len = cache.len.load(Ordering::Relaxed) as usize;
        let len = if len + more > CACHE { shared.spill(cache) as usize } else { len };
        debug_assert!(len + more <= CACHE);
        Some((cache, len))
    }
}

/// Gives a run of packets back and returns their bytes; the common case, single segments of one pool, costs a few instructions each.
///
/// # Safety
/// The caller owns the packets and does not use them again.
#[inline]
pub(super) unsafe fn release_all(packets: &[NonNull<Meta>]) -> u64 {
    let Some(first) = packets.first() else { return 0 };
    // SAFETY: the packets are the caller's, so their pools exist; the cache is this thread's, and has room for all of them.
    unsafe {
        let pool = (*first.as_ptr()).pool;
        let Some((cache, len)) = cache_with_room(pool, packets.len()) else { return release_each(packets) };
        let free = cache.slots.as_ptr().add(len);
        // What every packet's second word has, and what any has: without a branch for each.
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
            cache.len.store((len + packets.len()) as u32, Ordering::Release);
        } else {
            release_mixed(packets, cache, pool);
        }
        bytes
    }
}

/// [`release_all`] for a run with chains or packets of other pools than `pool`, whose cache has room.
///
/// # Safety
/// As there; the cache is this thread's.
#[cold]
#[inline(never)]
unsafe fn release_mixed(packets: &[NonNull<Meta>], cache: &Cache, pool: u8) {
    // SAFETY: as promised.
    unsafe {
        // The others are put aside: their release may hand this thread's cache on to others, after which the metadata of what lies in it
        // must not be looked at any more.
        let mut odd = [packets[0]; super::batch::BATCH];
        let (mut len, mut odd_len) = (cache.len(), 0);
        for meta in packets {
            let it = &*meta.as_ptr();
            if it.pool == pool && it.next == NO_SEGMENT {
                cache.slot(len).set(meta.as_ptr());
                len += 1;
            } else {
                odd[odd_len] = *meta;
                odd_len += 1;
            }
        }
        cache.set_len(len);
        for meta in &odd[..odd_len] {
            release(*meta);
        }
    }
}

/// [`release_all`] for packets of one segment of one pool, whose metadata need not be looked at.
///
/// # Safety
/// As there, and all packets are of one segment, and of this pool.
#[inline(always)]
pub(super) unsafe fn release_plain(packets: &[NonNull<Meta>], pool: u8) {
    if packets.is_empty() {
        return;
    }
    // SAFETY: the packets are the caller's, so their pool exists; the cache is this thread's, and has room for all of them.
    unsafe {
        let Some((cache, len)) = cache_with_room(pool, packets.len()) else {
            release_each(packets);
            return;
        };
        ptr::copy_nonoverlapping(packets.as_ptr().cast(), cache.slots.as_ptr().cast_mut().add(len), packets.len());
        cache.len.store((len + packets.len()) as u32, Ordering::Release);
    }
}

/// [`release_all`] in a thread without caches.
///
/// # Safety
/// As there.
#[cold]
unsafe fn release_each(packets: &[NonNull<Meta>]) -> u64 {
    let mut bytes = 0;
    for meta in packets {
        // SAFETY: as promised.
        unsafe {
            bytes += u64::from((*meta.as_ptr()).packet_len);
            release(*meta);
        }
    }
    bytes
}
