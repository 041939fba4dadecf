//! Doorbell pages in other processes: a device's file can be handed over (`SCM_RIGHTS`), and mapped there.
//!
//! The file holds the doorbell page, and behind it a ring of stores. A process under this library finds its page closed and puts its
//! stores into the ring, from which the owner's device thread takes them. A process without the library writes the page itself, which the
//! device thread looks at too: that loses doorbells if queues share a register, as polling always does.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{msghdr, off_t, size_t};
use rustix::io::Errno;
use wirepath_nic_defs::mana::{DOORBELL_CQ, DOORBELL_PAGE, DOORBELL_RQ, DOORBELL_SQ};
use wirepath_nic_emulator::device::{ContextId, Store};
use wirepath_nic_emulator::{FILE_BYTES, FILE_NAME};

use crate::process::{Kind, Nic, kind};
use crate::{next, traps};

/// Stores that fit into the ring.
const SLOTS: u32 = 1024;
/// Turns after which a slot is given up that a process has taken and not filled: it has died in between.
const PATIENCE: u32 = 1 << 20;

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

const _: () = assert!(DOORBELL_PAGE + size_of::<Ring>() <= FILE_BYTES as usize);

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
                slot.place.store(store.offset as u32 | (store.size as u32) << 16, Ordering::Relaxed);
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
        Some(Store { offset: (place & 0xffff) as usize % DOORBELL_PAGE, size: (place >> 16 & 0xf) as usize, value })
    }
}

/// The owner's view of a context's file.
#[derive(Clone, Copy)]
struct View {
    context: ContextId,
    base: *mut u8,
    /// What the registers held when they were last looked at.
    seen: [u64; 3],
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
    let view = View { context, base: base.cast(), seen: [0; 3] };
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

/// Carries out what other processes stored; true if there was something.
pub(crate) fn serve(nic: &Nic) -> bool {
    let mut views = VIEWS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut busy = false;
    for view in views.iter_mut().flat_map(HashMap::values_mut) {
        // SAFETY: the mapping is long enough, aligned, and lives while the lock is held.
        let ring = unsafe { &*view.base.add(DOORBELL_PAGE).cast::<Ring>() };
        for _ in 0..64 {
            let Some(store) = ring.pop() else { break };
            nic.doorbell_from_outside(view.context, store);
            busy = true;
        }
        for (offset, seen) in REGISTERS.into_iter().zip(&mut view.seen) {
            // SAFETY: as above.
            let value = unsafe { AtomicU64::from_ptr(view.base.add(offset).cast()) }.load(Ordering::Acquire);
            if std::mem::replace(seen, value) != value {
                nic.doorbell_from_outside(view.context, Store { offset, size: 8, value });
                busy = true;
            }
        }
    }
    busy
}

/// Whether a descriptor is a device's file.
pub(crate) fn is_ours(fd: RawFd) -> bool {
    let mut link = [0u8; 64];
    let path = format!("/proc/self/fd/{fd}\0");
    // SAFETY: a path that ends in zero, and a buffer with its length.
    let length = unsafe { libc::readlink(path.as_ptr().cast(), link.as_mut_ptr().cast(), link.len()) };
    let Some(link) = usize::try_from(length).ok().and_then(|length| link.get(..length)) else { return false };
    link.strip_prefix(b"/memfd:").is_some_and(|rest| rest.starts_with(FILE_NAME.as_bytes()))
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
    let scan = crate::process::nic()
        .is_some_and(|nic| nic.topology().doorbells == wirepath_nic_emulator::topology::Doorbells::Scan);
    let both = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: mappings of a file that is long enough.
    unsafe {
        if scan {
            return Some(next::mmap(address, length, protection, flags, fd, offset));
        }
        let base = next::mmap(ptr::null_mut(), FILE_BYTES as usize, both, libc::MAP_SHARED, fd, 0);
        let page = next::mmap(address, length, libc::PROT_NONE, flags, fd, offset);
        if base != libc::MAP_FAILED && page != libc::MAP_FAILED {
            // The ring stays mapped as long as the process lives: a trap may be in it.
            let ring = &*base.cast::<u8>().add(DOORBELL_PAGE).cast::<Ring>();
            traps::watch(page as usize, length, traps::Target::Other(ring));
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
