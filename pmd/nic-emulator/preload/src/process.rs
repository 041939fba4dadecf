//! The emulator of this process: made when first needed, gone in children after `fork`.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use wirepath_nic_emulator::host::{Host, Wire, WireKind};
use wirepath_nic_emulator::launch;
use wirepath_nic_emulator::topology::{Doorbells, Topology};
use wirepath_nic_emulator::{Emulator, Log};

use crate::memory::Pinned;
use crate::{memory, shared, thread, traps, wires};

/// The emulator of this process.
pub(crate) type Nic = Emulator<Process>;

/// What the emulator reaches the process by.
#[derive(Debug)]
pub(crate) struct Process;

/// Descriptors beyond this are not the emulator's.
const DESCRIPTORS: usize = 1 << 16;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// None of ours.
    Foreign = 0,
    /// An open device.
    Device = 1,
    /// An RDMA netlink socket.
    Netlink = 2,
    /// Events are read from it.
    Events = 3,
}

static KINDS: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(0) }; DESCRIPTORS];
static NIC: AtomicPtr<Nic> = AtomicPtr::new(ptr::null_mut());
/// Nothing to emulate: there is no topology, or it is wrong.
static OFF: AtomicBool = AtomicBool::new(false);
static MAKING: Mutex<()> = Mutex::new(());

/// What a descriptor is: one load, for calls that have nothing to do with NICs.
#[inline]
pub(crate) fn kind(fd: c_int) -> Kind {
    let kind = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd)).map_or(0, |kind| kind.load(Ordering::Relaxed));
    match kind {
        1 => Kind::Device,
        2 => Kind::Netlink,
        3 => Kind::Events,
        _ => Kind::Foreign,
    }
}

/// Notes what a descriptor is.
pub(crate) fn mark(fd: RawFd, kind: Kind) {
    if let Some(entry) = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd)) {
        entry.store(kind as u8, Ordering::Relaxed);
    }
}

/// The emulator, if it has been made.
pub(crate) fn existing() -> Option<&'static Nic> {
    // SAFETY: once made it is never freed.
    unsafe { NIC.load(Ordering::Acquire).as_ref() }
}

/// The emulator, made now if this is the first time; `None` if there is nothing to emulate.
pub(crate) fn nic() -> Option<&'static Nic> {
    if let Some(nic) = existing() {
        return Some(nic);
    }
    if OFF.load(Ordering::Relaxed) {
        return None;
    }
    let _guard = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(nic) = existing() {
        return Some(nic);
    }
    let made = catch_unwind(AssertUnwindSafe(make)).unwrap_or(None);
    match made {
        Some(nic) => {
            NIC.store(Box::into_raw(Box::new(nic)), Ordering::Release);
            existing()
        }
        None => {
            OFF.store(true, Ordering::Relaxed);
            None
        }
    }
}

fn make() -> Option<Nic> {
    let path = std::env::var_os(launch::TOPOLOGY).filter(|path| !path.is_empty())?;
    let complain = |error: &dyn std::fmt::Display| eprintln!("wirepath-nic: {error}; there are no emulated NICs");
    let mut topology = Topology::load(Path::new(&path)).inspect_err(|error| complain(error)).ok()?;
    match std::env::var(launch::DOORBELLS).as_deref() {
        Ok("trap") => topology.doorbells = Doorbells::Trap,
        Ok("queue") => topology.doorbells = Doorbells::Queue,
        Ok("scan") => topology.doorbells = Doorbells::Scan,
        Ok(other) => complain(&format_args!("{} is {other:?}, not trap, queue or scan", launch::DOORBELLS)),
        Err(_) => {}
    }
    match std::env::var(launch::ABI).as_deref() {
        Ok(form @ ("write" | "ioctl")) => topology.write_abi = form == "write",
        Ok(other) => complain(&format_args!("{} is {other:?}, not ioctl or write", launch::ABI)),
        Err(_) => {}
    }
    let log = match &topology.log {
        Some(path) => {
            Log::file(path).inspect_err(|error| complain(&format_args!("{}: {error}", path.display()))).ok()?
        }
        None => Log::stderr(),
    };
    // SAFETY: plain registrations of functions that live as long as the process.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
        libc::atexit(at_exit);
    }
    Some(Emulator::new(topology, Process, log))
}

/// What a child needs must not be locked by a thread that it does not have.
extern "C" fn before_fork() {
    shared::hold();
}

extern "C" fn after_fork() {
    shared::let_go();
}

/// A child begins anew. Beyond plain stores nothing is safe here: other threads of the parent may have held any lock.
extern "C" fn in_child() {
    shared::let_go();
    NIC.store(ptr::null_mut(), Ordering::Release);
    for kind in &KINDS {
        kind.store(0, Ordering::Relaxed);
    }
    traps::forget();
    thread::forget();
}

extern "C" fn at_exit() {
    let Some(nic) = existing() else { return };
    let Some(path) = nic.topology().stats.as_ref().filter(|_| thread::started()) else { return };
    let written = catch_unwind(AssertUnwindSafe(|| std::fs::write(path, format!("{:#}\n", nic.counters()))));
    if !matches!(written, Ok(Ok(()))) {
        nic.log().line(format_args!("cannot write counters to {}", path.display()));
    }
}

impl Host for Process {
    type Region = Pinned;

    fn pin(&self, address: u64, length: u64, writable: bool) -> Result<Pinned, Errno> {
        Pinned::new(address, length, writable)
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno> {
        memory::copy_in(address, to)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Errno> {
        memory::copy_out(address, from)
    }

    fn hand_out(&self, descriptor: OwnedFd) -> RawFd {
        let fd = descriptor.into_raw_fd();
        mark(fd, Kind::Events);
        fd
    }

    fn open_wire(&self, kind: WireKind, interface: &str) -> Result<Box<dyn Wire>, String> {
        match kind {
            WireKind::Tap => wires::tap(interface),
            WireKind::Packet => wires::packet(interface),
        }
    }
}
