//! Doorbells of other processes: the file of a device can be passed to another process (`SCM_RIGHTS`) and
//! mapped there.
//!
//! The file contains the doorbell pages, followed by a ring of stores. In a process under this library the
//! page is protected, and its stores are put into the ring. The device thread of the owner takes them from
//! there. A process without the library writes to the page itself, which the device thread polls too. Polling
//! loses doorbells if queues share a register.
//!
//! A mailbox for queries follows the ring. A process that imports a context (`ibv_import_device`) queries the
//! owner there about objects.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{msghdr, off_t, size_t};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use wirepath_nic_defs::mana::{DOORBELL_CQ, DOORBELL_PAGE, DOORBELL_RQ, DOORBELL_SQ};
use wirepath_nic_emulator::device::{ContextId, Store};
use wirepath_nic_emulator::topology::Doorbells;
use wirepath_nic_emulator::uverbs::{ContextOwner, ImportQuery};
use wirepath_nic_emulator::{DOORBELL_BYTES, FILE_BYTES, FILE_NAME};

use crate::process::{Kind, Nic, kind};
use crate::ring::{Ring, SLOTS};
use crate::{next_symbol, traps};

/// Offset of the query mailbox in the file.
const MAILBOX_OFFSET: usize = DOORBELL_BYTES as usize + (32 << 10);

const _: () = assert!(DOORBELL_BYTES as usize + size_of::<Ring>() <= MAILBOX_OFFSET);
const _: () = assert!(MAILBOX_OFFSET + size_of::<QueryMailbox>() <= FILE_BYTES as usize);

/// A mailbox for one query at a time.
#[repr(C)]
struct QueryMailbox {
    /// Process id of the querying process; 0 if the mailbox is free.
    taken: AtomicU32,
    /// State: [`REQUESTED`], [`ANSWERED`] or 0.
    state: AtomicU32,
    query: AtomicU32,
    handle: AtomicU32,
    errno: AtomicU32,
    _rest: u32,
    answer: [AtomicU64; 3],
}

const REQUESTED: u32 = 1;
const ANSWERED: u32 = 2;
/// Timeout for an answer, and for access to the mailbox.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl QueryMailbox {
    /// Answers a pending query, in the owner of the context.
    fn serve(&self, nic: &Nic, context: ContextId) {
        if self.state.load(Ordering::Acquire) != REQUESTED {
            return;
        }
        let answer = match ImportQuery::from_number(self.query.load(Ordering::Relaxed)) {
            Some(query) => nic.answer_import(context, query, self.handle.load(Ordering::Relaxed)),
            None => Err(Errno::INVAL),
        };
        let errno = answer.map_or_else(Errno::raw_os_error, |_| 0);
        self.errno.store(errno.cast_unsigned(), Ordering::Relaxed);
        for (to, word) in self.answer.iter().zip(answer.unwrap_or_default()) {
            to.store(word, Ordering::Relaxed);
        }
        self.state.store(ANSWERED, Ordering::Release);
    }

    /// Waits until a condition is true; fails with `EIO` after a timeout.
    fn wait(mut so: impl FnMut() -> bool) -> Result<(), Errno> {
        let start = Instant::now();
        while !so() {
            if start.elapsed() > ANSWER_TIMEOUT {
                return Err(Errno::IO);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn ask(&self, query: ImportQuery, handle: u32) -> Result<[u64; 3], Errno> {
        let me = std::process::id();
        Self::wait(|| {
            let holder =
                self.taken.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|other| {
                    // A process that died during a query leaves the mailbox to the next one. SAFETY: signal 0
                    // is not delivered; the call has no pointer arguments.
                    let dead = unsafe { libc::kill(other.cast_signed(), 0) } != 0;
                    if dead && self.taken.compare_exchange(other, me, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                        0
                    } else {
                        other
                    }
                });
            holder == 0
        })?;
        self.query.store(query as u32, Ordering::Relaxed);
        self.handle.store(handle, Ordering::Relaxed);
        self.state.store(REQUESTED, Ordering::Release);
        let answered = Self::wait(|| self.state.load(Ordering::Acquire) == ANSWERED);
        let answer = std::array::from_fn(|at| self.answer[at].load(Ordering::Relaxed));
        let errno = self.errno.load(Ordering::Relaxed);
        self.state.store(0, Ordering::Relaxed);
        self.taken.store(0, Ordering::Release);
        answered?;
        if errno == 0 { Ok(answer) } else { Err(Errno::from_raw_os_error(errno.cast_signed())) }
    }
}

/// Returns ring and mailbox of a device's file.
///
/// # Safety
/// `base` must be the start of a mapping of the whole file that is readable and writable, and stays mapped
/// during `'f`.
unsafe fn parts<'f>(base: *mut u8) -> (&'f Ring, &'f QueryMailbox) {
    // SAFETY: the caller guarantees a mapping of the whole file during `'f`. Both structures are inside the
    // file by the assertions above, and aligned. They consist of atomics, for which all bytes are valid.
    unsafe { (&*base.add(DOORBELL_BYTES as usize).cast::<Ring>(), &*base.add(MAILBOX_OFFSET).cast::<QueryMailbox>()) }
}

/// Maps the whole file of another process permanently, because a trap handler may use its ring at any time.
fn map_whole(fd: c_int) -> Option<*mut u8> {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call creates a new mapping at an address that the kernel chooses.
    let base = unsafe { next_symbol::mmap(ptr::null_mut(), FILE_BYTES as usize, both, libc::MAP_SHARED, fd, 0) };
    (base != libc::MAP_FAILED).then_some(base.cast())
}

/// Maximum number of contexts of other processes that a process may import.
const MAX_IMPORTED: usize = 64;

/// Rings of imported contexts by context. They are accessed without a lock, because the trap handler reads
/// them.
static IMPORTED_RINGS: [(AtomicU32, AtomicPtr<Ring>); MAX_IMPORTED] =
    [const { (AtomicU32::new(0), AtomicPtr::new(ptr::null_mut())) }; MAX_IMPORTED];

/// Connection to the owner of an imported context.
#[derive(Debug)]
struct RemoteOwner(&'static QueryMailbox);

impl ContextOwner for RemoteOwner {
    fn ask(&self, query: ImportQuery, handle: u32) -> Result<[u64; 3], Errno> {
        self.0.ask(query, handle)
    }
}

impl std::fmt::Debug for QueryMailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueryMailbox").field("taken", &self.taken).finish_non_exhaustive()
    }
}

/// Imports a context from the device file of another process.
pub(crate) fn import_context(nic: &Nic, fd: RawFd, inode: u64) -> Result<(), Errno> {
    let base = map_whole(fd).ok_or(Errno::NOMEM)?;
    // SAFETY: the whole file is mapped, and stays mapped unless the import fails below, when the references
    // are dropped.
    let (ring, mailbox): (&'static Ring, &'static QueryMailbox) = unsafe { parts(base) };
    let context = nic.import_context(fd, inode, Box::new(RemoteOwner(mailbox))).inspect_err(|_| {
        // SAFETY: the range was mapped above, and the failed import keeps no reference to it.
        unsafe { next_symbol::munmap(base.cast(), FILE_BYTES as usize) };
    })?;
    let free = IMPORTED_RINGS
        .iter()
        .find(|(taken, _)| taken.compare_exchange(0, context, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    let (_, slot) = free.ok_or(Errno::NOMEM)?;
    slot.store(ptr::from_ref(ring).cast_mut(), Ordering::Release);
    Ok(())
}

/// Returns the target of doorbell stores to an imported context.
pub(crate) fn doorbell_target(context: ContextId) -> Option<traps::Target> {
    let (_, ring) = IMPORTED_RINGS.iter().find(|(of, _)| of.load(Ordering::Acquire) == context)?;
    // SAFETY: the pointer is null or refers to a ring that stays mapped as long as the process lives.
    unsafe { ring.load(Ordering::Acquire).as_ref() }.map(traps::Target::Remote)
}

/// The owner's mapping of a context's file.
#[derive(Clone, Copy)]
struct ContextView {
    context: ContextId,
    base: *mut u8,
    /// Register values at the last poll of [`Self::apply_stores`].
    last_applied: [u64; 3],
    /// Register values at the last call of [`doorbell_changed`].
    last_polled: [u64; 3],
}

impl ContextView {
    fn registers(&self) -> [u64; 3] {
        // SAFETY: the registers are inside the mapping and aligned to 8 bytes. The mapping lives as long as
        // the view, which the lock guards.
        REGISTERS.map(|offset| unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }.load(Ordering::Acquire))
    }

    /// Applies a limited number of stores of other processes; returns true if there were any.
    fn apply_stores(&mut self, nic: &Nic) -> bool {
        let mut busy = false;
        // SAFETY: the whole file is mapped at `base`, and the mapping lives as long as the view, which the
        // lock guards.
        let (ring, _) = unsafe { parts(self.base) };
        for _ in 0..64 {
            let Some(store) = ring.pop() else { break };
            nic.remote_doorbell(self.context, store);
            busy = true;
        }
        // In scan mode the queues are polled, so registers are not needed. Their values are often older than
        // the queues.
        if nic.topology().doorbells == Doorbells::Scan {
            return busy;
        }
        let registers = self.registers();
        for ((offset, value), last) in REGISTERS.into_iter().zip(registers).zip(&mut self.last_applied) {
            if std::mem::replace(last, value) != value {
                nic.remote_doorbell(self.context, Store { offset, size: 8, value });
                busy = true;
            }
        }
        busy
    }
}

// SAFETY: the pointer refers to shared memory that is only accessed by atomics, and is unmapped under the
// lock below.
unsafe impl Send for ContextView {}

const REGISTERS: [usize; 3] = [DOORBELL_SQ, DOORBELL_RQ, DOORBELL_CQ];

/// Mappings by the owner's descriptor; `None` before the first one.
type Views = Option<HashMap<RawFd, ContextView>>;

static VIEWS: Mutex<Views> = Mutex::new(None);

thread_local! {
    /// The lock guard, while a fork is in progress.
    static FORK_GUARD: Cell<Option<MutexGuard<'static, Views>>> = const { Cell::new(None) };
}

/// Takes the lock before a fork.
pub(crate) fn lock_for_fork() {
    FORK_GUARD.set(Some(VIEWS.lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Releases the lock after a fork, in parent and child.
pub(crate) fn unlock_after_fork() {
    drop(FORK_GUARD.take());
}

/// Maps the file of a new context for its owner.
pub(crate) fn add(fd: RawFd, context: ContextId) -> Result<(), Errno> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call creates a new mapping of the context's own file, at an address that the kernel
    // chooses.
    let base = unsafe { next_symbol::mmap(ptr::null_mut(), FILE_BYTES as usize, protection, libc::MAP_SHARED, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(Errno::NOMEM);
    }
    let view = ContextView { context, base: base.cast(), last_applied: [0; 3], last_polled: [0; 3] };
    VIEWS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(fd, view);
    Ok(())
}

/// Unmaps the file of a context that is closed.
pub(crate) fn remove(fd: RawFd) {
    if let Some(view) =
        VIEWS.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|views| views.remove(&fd))
    {
        // SAFETY: the range was mapped in `add`. It is used only under the lock, and the view was removed
        // from the map.
        unsafe { next_symbol::munmap(view.base.cast(), FILE_BYTES as usize) };
    }
}

/// Returns true if a register has changed since the last call. This is only a hint: queues share registers,
/// and the new value may be equal.
pub(crate) fn doorbell_changed() -> bool {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut rang = false;
    for view in views.iter_mut().flat_map(HashMap::values_mut) {
        let registers = view.registers();
        rang |= std::mem::replace(&mut view.last_polled, registers) != registers;
    }
    rang
}

/// Applies stores and answers queries of other processes; returns true if there were any stores.
pub(crate) fn serve(nic: &Nic) -> bool {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut busy = false;
    for view in views.iter_mut().flat_map(HashMap::values_mut) {
        // SAFETY: the whole file is mapped at `base`, and the mapping lives while the lock is held.
        let (_, mailbox) = unsafe { parts(view.base) };
        mailbox.serve(nic, view.context);
        busy |= view.apply_stores(nic);
    }
    busy
}

/// Applies all stores of other processes to the pages of a context, because the owner's next command comes
/// after them.
pub(crate) fn drain(nic: &Nic, fd: RawFd) {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(view) = views.as_mut().and_then(|views| views.get_mut(&fd)) else { return };
    // The loop is bounded, because other processes may store for ever.
    for _ in 0..SLOTS {
        if !view.apply_stores(nic) {
            break;
        }
    }
}

/// Returns the inode number of a device file; `None` if the descriptor is another file.
pub(crate) fn inode(fd: RawFd) -> Option<u64> {
    // SAFETY: `is_device_file` has found the descriptor to be open, and it is used only during this call.
    is_device_file(fd).then(|| fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()).flatten().map(|stat| stat.st_ino)
}

/// Returns true if a descriptor is a device file of full size that cannot shrink, so that its mappings stay
/// valid.
pub(crate) fn is_device_file(fd: RawFd) -> bool {
    let mut link = [0u8; 64];
    let path = format!("/proc/self/fd/{fd}\0");
    // SAFETY: the path ends in NUL, and the buffer is valid for writes of its length.
    let length = unsafe { libc::readlink(path.as_ptr().cast(), link.as_mut_ptr().cast(), link.len()) };
    let Some(link) = usize::try_from(length).ok().and_then(|length| link.get(..length)) else { return false };
    if !link.strip_prefix(b"/memfd:").is_some_and(|rest| rest.starts_with(FILE_NAME.as_bytes())) {
        return false;
    }
    // SAFETY: the link above belongs to an open descriptor, which is used only during this function.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
        && fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|bytes| bytes >= FILE_BYTES))
}

/// Maps a page of a device file that another process has passed; returns `None` if the descriptor is another
/// file. `scan` returns true if doorbells are not to trap, and is called only for a device file.
///
/// # Safety
/// The caller must guarantee what mmap(2) requires; with `MAP_FIXED` that the range may be replaced.
pub(crate) unsafe fn map_remote_page(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
    scan: impl FnOnce() -> bool,
) -> Option<*mut c_void> {
    if length != DOORBELL_PAGE || protection & libc::PROT_WRITE == 0 || offset != 0 || !is_device_file(fd) {
        return None;
    }
    // SAFETY: the caller guarantees what mmap(2) requires. The file has the full size and cannot shrink, and
    // `map_whole` maps it permanently.
    unsafe {
        if scan() {
            return Some(next_symbol::mmap(address, length, protection, flags, fd, offset));
        }
        let page = next_symbol::mmap(address, length, libc::PROT_NONE, flags, fd, offset);
        if page != libc::MAP_FAILED
            && let Some(base) = map_whole(fd)
        {
            let (ring, _) = parts(base);
            traps::watch(page as usize, length, 0, traps::Target::Remote(ring));
        }
        Some(page)
    }
}

/// Returns true if a message passes a device file to another process.
///
/// # Safety
/// `message` must be null or a valid message header.
pub(crate) unsafe fn passes_device_fd(message: *const msghdr) -> bool {
    if message.is_null() {
        return false;
    }
    // SAFETY: the caller guarantees a valid message header. The CMSG macros stay inside its control buffer,
    // and descriptors are read unaligned inside the length of the control message.
    unsafe {
        let mut control = libc::CMSG_FIRSTHDR(message);
        while !control.is_null() {
            if ((*control).cmsg_level, (*control).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (*control).cmsg_len - libc::CMSG_LEN(0) as usize;
                for i in 0..bytes / size_of::<c_int>() {
                    let fd = libc::CMSG_DATA(control).cast::<c_int>().add(i).read_unaligned();
                    if kind(fd) == Kind::Device {
                        return true;
                    }
                }
            }
            control = libc::CMSG_NXTHDR(message, control);
        }
    }
    false
}
