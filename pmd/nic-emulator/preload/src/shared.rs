//! Doorbell pages in other processes: a device's file can be handed over (`SCM_RIGHTS`), and mapped there.
//!
//! The file holds the doorbell pages, and behind them a ring of stores. A process under this library finds its page closed and puts its
//! stores into the ring, from which the owner's device thread takes them. A process without the library writes the page itself, which the
//! device thread looks at too: that loses doorbells if queues share a register, as polling always does.
//!
//! Behind the ring is a desk for questions: a process that imports a context (`ibv_import_device`) asks its owner there about objects.

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
use wirepath_nic_emulator::uverbs::{Elsewhere, Question};
use wirepath_nic_emulator::{DOORBELL_BYTES, FILE_BYTES, FILE_NAME};

use crate::process::{Kind, Nic, kind};
use crate::{next, traps};

/// Stores that fit into the ring.
const SLOTS: u32 = 1024;
/// Turns after which a slot is given up that a process has taken and not filled: it has died in between.
const PATIENCE: u32 = 1 << 20;
/// Where the size of a store lies beside its offset.
const SIZE_SHIFT: u32 = 20;
const _: () = assert!(DOORBELL_BYTES <= 1 << SIZE_SHIFT);
/// Where the desk for questions is.
const DESK: usize = DOORBELL_BYTES as usize + (32 << 10);

/// A ring of stores in the shared file: many producers in other processes, one consumer (D. Vyukov's bounded queue).
#[repr(C)]
pub(crate) struct Ring {
    /// Producers take numbers here.
    head: AtomicU32,
    /// The owner's position.
    tail: AtomicU32,
    stuck: AtomicU32,
    _rest: [u32; 13],
    slots: [Slot; SLOTS as usize],
}

#[repr(C)]
struct Slot {
    /// Number of the store that may be put here, or one more when it is there; counted from the slot's own number, so that an empty
    /// file is a valid ring.
    turn: AtomicU32,
    /// Offset, and size in the upper bits.
    place: AtomicU32,
    value: AtomicU64,
}

const _: () = assert!(DOORBELL_BYTES as usize + size_of::<Ring>() <= DESK);
const _: () = assert!(DESK + size_of::<Desk>() <= FILE_BYTES as usize);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("head", &self.head).field("tail", &self.tail).finish_non_exhaustive()
    }
}

impl Ring {
    /// Puts a store, waiting while the owner is behind.
    pub(crate) fn push(&self, store: Store) {
        let number = self.head.fetch_add(1, Ordering::Relaxed);
        let slot = &self.slots[(number % SLOTS) as usize];
        let turn = number / SLOTS * 2;
        // Bounded: an owner that has died takes nothing any more.
        for _ in 0..10_000_000u32 {
            if slot.turn.load(Ordering::Acquire) == turn {
                slot.place.store(store.offset as u32 | (store.size as u32) << SIZE_SHIFT, Ordering::Relaxed);
                slot.value.store(store.value, Ordering::Relaxed);
                slot.turn.store(turn + 1, Ordering::Release);
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Takes the next store.
    fn pop(&self) -> Option<Store> {
        let number = self.tail.load(Ordering::Relaxed);
        let slot = &self.slots[(number % SLOTS) as usize];
        let turn = number / SLOTS * 2;
        if slot.turn.load(Ordering::Acquire) != turn + 1 {
            if self.head.load(Ordering::Relaxed) != number && self.stuck.fetch_add(1, Ordering::Relaxed) > PATIENCE {
                self.stuck.store(0, Ordering::Relaxed);
                slot.turn.store(turn + 2, Ordering::Release);
                self.tail.store(number.wrapping_add(1), Ordering::Relaxed);
            }
            return None;
        }
        self.stuck.store(0, Ordering::Relaxed);
        let (place, value) = (slot.place.load(Ordering::Relaxed), slot.value.load(Ordering::Relaxed));
        slot.turn.store(turn + 2, Ordering::Release);
        self.tail.store(number.wrapping_add(1), Ordering::Relaxed);
        // Another process wrote this: the device checks what it means, and these are just numbers.
        let offset = place as usize % DOORBELL_BYTES as usize;
        Some(Store { offset, size: (place >> SIZE_SHIFT & 0xf) as usize, value })
    }
}

/// A place for one question at a time.
#[repr(C)]
struct Desk {
    /// The process that asks; 0 if nobody does.
    taken: AtomicU32,
    /// [`ASKED`] or [`ANSWERED`].
    state: AtomicU32,
    question: AtomicU32,
    handle: AtomicU32,
    errno: AtomicU32,
    _rest: u32,
    answer: [AtomicU64; 3],
}

const ASKED: u32 = 1;
const ANSWERED: u32 = 2;
/// How long a process waits for an answer, or for the desk.
const WAIT: Duration = Duration::from_secs(5);

impl Desk {
    /// Owner: answers what was asked.
    fn serve(&self, nic: &Nic, context: ContextId) {
        if self.state.load(Ordering::Acquire) != ASKED {
            return;
        }
        let answer = match Question::from_number(self.question.load(Ordering::Relaxed)) {
            Some(question) => nic.answer(context, question, self.handle.load(Ordering::Relaxed)),
            None => Err(Errno::INVAL),
        };
        let errno = answer.map_or_else(Errno::raw_os_error, |_| 0);
        self.errno.store(errno.cast_unsigned(), Ordering::Relaxed);
        for (to, word) in self.answer.iter().zip(answer.unwrap_or_default()) {
            to.store(word, Ordering::Relaxed);
        }
        self.state.store(ANSWERED, Ordering::Release);
    }

    /// Waits until something is so.
    fn wait(mut so: impl FnMut() -> bool) -> Result<(), Errno> {
        let start = Instant::now();
        while !so() {
            if start.elapsed() > WAIT {
                return Err(Errno::IO);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn ask(&self, question: Question, handle: u32) -> Result<[u64; 3], Errno> {
        let me = std::process::id();
        Self::wait(|| {
            let holder =
                self.taken.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|other| {
                    // A process that has died while it asked leaves the desk to the next.
                    // SAFETY: a plain call that does nothing.
                    let gone = unsafe { libc::kill(other.cast_signed(), 0) } != 0;
                    if gone && self.taken.compare_exchange(other, me, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                        0
                    } else {
                        other
                    }
                });
            holder == 0
        })?;
        self.question.store(question as u32, Ordering::Relaxed);
        self.handle.store(handle, Ordering::Relaxed);
        self.state.store(ASKED, Ordering::Release);
        let answered = Self::wait(|| self.state.load(Ordering::Acquire) == ANSWERED);
        let answer = std::array::from_fn(|at| self.answer[at].load(Ordering::Relaxed));
        let errno = self.errno.load(Ordering::Relaxed);
        self.state.store(0, Ordering::Relaxed);
        self.taken.store(0, Ordering::Release);
        answered?;
        if errno == 0 { Ok(answer) } else { Err(Errno::from_raw_os_error(errno.cast_signed())) }
    }
}

/// Ring and desk of a device's file.
///
/// # Safety
/// The whole file is mapped at `base`, and stays for as long as they are used.
unsafe fn parts<'f>(base: *mut u8) -> (&'f Ring, &'f Desk) {
    // SAFETY: inside the file and aligned; both are atomics, for which any bytes are valid.
    unsafe { (&*base.add(DOORBELL_BYTES as usize).cast::<Ring>(), &*base.add(DESK).cast::<Desk>()) }
}

/// Maps a whole file of another process, for good: a trap may be in its ring.
fn map_whole(fd: c_int) -> Option<*mut u8> {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of a file that is long enough.
    let base = unsafe { next::mmap(ptr::null_mut(), FILE_BYTES as usize, both, libc::MAP_SHARED, fd, 0) };
    (base != libc::MAP_FAILED).then_some(base.cast())
}

/// Most contexts of other processes that a process may import.
const MOST_FOREIGN: usize = 64;

/// The rings of contexts that were imported; without a lock, because traps look here.
static FOREIGN: [(AtomicU32, AtomicPtr<Ring>); MOST_FOREIGN] =
    [const { (AtomicU32::new(0), AtomicPtr::new(ptr::null_mut())) }; MOST_FOREIGN];

/// The way to the owner of an imported context.
#[derive(Debug)]
struct Owner(&'static Desk);

impl Elsewhere for Owner {
    fn ask(&self, question: Question, handle: u32) -> Result<[u64; 3], Errno> {
        self.0.ask(question, handle)
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("taken", &self.taken).finish_non_exhaustive()
    }
}

/// A device's file that another process has handed over becomes an imported context.
pub(crate) fn adopt_foreign(nic: &Nic, fd: RawFd, inode: u64) -> Result<(), Errno> {
    let base = map_whole(fd).ok_or(Errno::NOMEM)?;
    // SAFETY: mapped whole, and for good once it is adopted.
    let (ring, desk): (&'static Ring, &'static Desk) = unsafe { parts(base) };
    let context = nic.adopt_foreign(fd, inode, Box::new(Owner(desk))).inspect_err(|_| {
        // SAFETY: mapped above; nobody has it.
        unsafe { next::munmap(base.cast(), FILE_BYTES as usize) };
    })?;
    let free = FOREIGN
        .iter()
        .find(|(taken, _)| taken.compare_exchange(0, context, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    let (_, place) = free.ok_or(Errno::NOMEM)?;
    place.store(ptr::from_ref(ring).cast_mut(), Ordering::Release);
    Ok(())
}

/// Who gets the stores to the pages of an imported context.
pub(crate) fn owner_of(context: ContextId) -> Option<traps::Target> {
    let (_, ring) = FOREIGN.iter().find(|(of, _)| of.load(Ordering::Acquire) == context)?;
    // SAFETY: rings stay mapped as long as the process lives.
    unsafe { ring.load(Ordering::Acquire).as_ref() }.map(traps::Target::Other)
}

/// The owner's view of a context's file.
#[derive(Clone, Copy)]
struct View {
    context: ContextId,
    base: *mut u8,
    /// What the registers held when they were last looked at.
    seen: [u64; 3],
    /// The same for [`rang`].
    heard: [u64; 3],
}

impl View {
    fn registers(&self) -> [u64; 3] {
        // SAFETY: the mapping is long enough, aligned, and lives while the lock is held that guards the view.
        REGISTERS.map(|offset| unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }.load(Ordering::Acquire))
    }

    /// Carries out what other processes stored, some of it at a time; true if there was something.
    fn carry_out(&mut self, nic: &Nic) -> bool {
        let mut busy = false;
        // SAFETY: the mapping is long enough, aligned, and lives while the lock is held that guards the view.
        let (ring, _) = unsafe { parts(self.base) };
        for _ in 0..64 {
            let Some(store) = ring.pop() else { break };
            nic.doorbell_from_outside(self.context, store);
            busy = true;
        }
        // Who looks at queues needs no registers, and has often been quicker than what they tell.
        if nic.topology().doorbells == Doorbells::Scan {
            return busy;
        }
        let registers = self.registers();
        for ((offset, value), seen) in REGISTERS.into_iter().zip(registers).zip(&mut self.seen) {
            if std::mem::replace(seen, value) != value {
                nic.doorbell_from_outside(self.context, Store { offset, size: 8, value });
                busy = true;
            }
        }
        busy
    }
}

// SAFETY: shared memory with atomic accesses only; unmapped under the lock below.
unsafe impl Send for View {}

const REGISTERS: [usize; 3] = [DOORBELL_SQ, DOORBELL_RQ, DOORBELL_CQ];

/// Views by the owner's descriptor; nothing before the first.
type Views = Option<HashMap<RawFd, View>>;

static VIEWS: Mutex<Views> = Mutex::new(None);

thread_local! {
    /// The lock, held over a fork.
    static HELD: Cell<Option<MutexGuard<'static, Views>>> = const { Cell::new(None) };
}

/// Takes the lock before a fork.
pub(crate) fn hold() {
    HELD.set(Some(VIEWS.lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Gives it back after the fork, in parent and child.
pub(crate) fn let_go() {
    drop(HELD.take());
}

/// Maps a new context's file for its owner.
pub(crate) fn add(fd: RawFd, context: ContextId) -> Result<(), Errno> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of our file.
    let base = unsafe { next::mmap(ptr::null_mut(), FILE_BYTES as usize, protection, libc::MAP_SHARED, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(Errno::NOMEM);
    }
    let view = View { context, base: base.cast(), seen: [0; 3], heard: [0; 3] };
    VIEWS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(fd, view);
    Ok(())
}

/// The context is closed.
pub(crate) fn remove(fd: RawFd) {
    if let Some(view) =
        VIEWS.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|views| views.remove(&fd))
    {
        // SAFETY: mapped in `add`, and used under the lock only.
        unsafe { next::munmap(view.base.cast(), FILE_BYTES as usize) };
    }
}

/// Whether a register was written since this was asked last. Only a hint: registers are shared by queues, and the value may be the same.
pub(crate) fn rang() -> bool {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut rang = false;
    for view in views.iter_mut().flat_map(HashMap::values_mut) {
        let registers = view.registers();
        rang |= std::mem::replace(&mut view.heard, registers) != registers;
    }
    rang
}

/// Carries out what other processes stored; true if there was something.
pub(crate) fn serve(nic: &Nic) -> bool {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut busy = false;
    for view in views.iter_mut().flat_map(HashMap::values_mut) {
        // SAFETY: the mapping is long enough, aligned, and lives while the lock is held.
        let (_, desk) = unsafe { parts(view.base) };
        desk.serve(nic, view.context);
        busy |= view.carry_out(nic);
    }
    busy
}

/// Carries out what other processes have stored to the pages of a descriptor's context by now: its owner's next command comes behind that.
pub(crate) fn settle(nic: &Nic, fd: RawFd) {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(view) = views.as_mut().and_then(|views| views.get_mut(&fd)) else { return };
    // Bounded: they may go on for ever.
    for _ in 0..SLOTS {
        if !view.carry_out(nic) {
            break;
        }
    }
}

/// The file system's number of a device's file; `None` if the descriptor is of another.
pub(crate) fn inode(fd: RawFd) -> Option<u64> {
    // SAFETY: the descriptor was found to be open.
    is_ours(fd).then(|| fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()).flatten().map(|stat| stat.st_ino)
}

/// Whether a descriptor is a device's file, whole and for good: what is mapped of it cannot be taken away.
pub(crate) fn is_ours(fd: RawFd) -> bool {
    let mut link = [0u8; 64];
    let path = format!("/proc/self/fd/{fd}\0");
    // SAFETY: a path that ends in zero, and a buffer with its length.
    let length = unsafe { libc::readlink(path.as_ptr().cast(), link.as_mut_ptr().cast(), link.len()) };
    let Some(link) = usize::try_from(length).ok().and_then(|length| link.get(..length)) else { return false };
    if !link.strip_prefix(b"/memfd:").is_some_and(|rest| rest.starts_with(FILE_NAME.as_bytes())) {
        return false;
    }
    // SAFETY: the link above was that of an open descriptor, and this is the call that uses it.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
        && fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|bytes| bytes >= FILE_BYTES))
}

/// Maps a device's file that another process has handed over; `None` if the descriptor is nothing of the kind.
///
/// # Safety
/// As mmap(2).
pub(crate) unsafe fn map_foreign(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> Option<*mut c_void> {
    if length != DOORBELL_PAGE || protection & libc::PROT_WRITE == 0 || offset != 0 || !is_ours(fd) {
        return None;
    }
    // What the owner's topology says about doorbells holds here too: the variable that names it is the same.
    let scan = crate::process::nic().is_some_and(|nic| nic.topology().doorbells == Doorbells::Scan);
    // SAFETY: mappings of a file that is long enough.
    unsafe {
        if scan {
            return Some(next::mmap(address, length, protection, flags, fd, offset));
        }
        let page = next::mmap(address, length, libc::PROT_NONE, flags, fd, offset);
        if page != libc::MAP_FAILED
            && let Some(base) = map_whole(fd)
        {
            let (ring, _) = parts(base);
            traps::watch(page as usize, length, 0, traps::Target::Other(ring));
        }
        Some(page)
    }
}

/// Whether a message hands a device's file to another process.
///
/// # Safety
/// A valid message header, or null.
pub(crate) unsafe fn hands_over(message: *const msghdr) -> bool {
    if message.is_null() {
        return false;
    }
    // SAFETY: control messages of a valid header, walked by the macros made for that.
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
