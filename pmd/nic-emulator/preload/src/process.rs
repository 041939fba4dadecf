//! The emulator of this process, the kinds of its descriptors, and the process as the emulator sees it.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use rustix::io::Errno;
use wirepath_nic_emulator::Emulator;
use wirepath_nic_emulator::host::{Host, Interface, InterfaceKind};

use crate::memory::Pinned;
use crate::{interfaces, memory};

/// The emulator of this process.
pub(crate) type Nic = Emulator<Process>;

/// The host process, as the emulator sees it.
#[derive(Debug)]
pub(crate) struct Process;

/// Descriptors from this number on never belong to the emulator.
const DESCRIPTORS: usize = 1 << 16;

/// Kinds of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A descriptor that the emulator does not own.
    Foreign = 0,
    /// An open device.
    Device = 1,
    /// An RDMA netlink socket.
    Netlink = 2,
    /// A descriptor from which events are read.
    Events = 3,
}

static KINDS: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(0) }; DESCRIPTORS];
static NIC: AtomicPtr<Nic> = AtomicPtr::new(ptr::null_mut());

/// Returns the kind of a descriptor. This is a single load, because calls on other descriptors pass here too.
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

/// Records the kind of a descriptor.
pub(crate) fn set_kind(fd: RawFd, kind: Kind) {
    if let Some(entry) = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd)) {
        entry.store(kind as u8, Ordering::Relaxed);
    }
}

/// Returns the emulator if it was created.
pub(crate) fn existing() -> Option<&'static Nic> {
    // SAFETY: the pointer is null or comes from `Box::into_raw`, and the emulator is never freed.
    unsafe { NIC.load(Ordering::Acquire).as_ref() }
}

/// Records the emulator, and returns it.
pub(crate) fn set_nic(nic: Nic) -> Option<&'static Nic> {
    NIC.store(Box::into_raw(Box::new(nic)), Ordering::Release);
    existing()
}

/// Forgets the emulator and all descriptors, in a child after `fork`. It only stores.
pub(crate) fn reset_after_fork() {
    NIC.store(ptr::null_mut(), Ordering::Release);
    for kind in &KINDS {
        kind.store(0, Ordering::Relaxed);
    }
}

impl Host for Process {
    type Region = Pinned;

    fn publish(&self, file: &Path, text: &str) {
        // Files that are mounted over /sys cannot be written and keep their first value.
        if let Some(root) = std::env::var_os("SYSFS_PATH") {
            let _ = std::fs::write(Path::new(&root).join(file), text);
        }
    }

    fn pin(&self, address: u64, length: u64, writable: bool) -> Result<Pinned, Errno> {
        Pinned::new(address, length, writable)
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno> {
        memory::copy_in(address, to)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Errno> {
        memory::copy_out(address, from)
    }

    fn install_fd(&self, descriptor: OwnedFd) -> RawFd {
        let fd = descriptor.into_raw_fd();
        set_kind(fd, Kind::Events);
        fd
    }

    fn open_interface(&self, kind: InterfaceKind, interface: &str) -> Result<Box<dyn Interface>, String> {
        match kind {
            InterfaceKind::Tap => interfaces::tap(interface),
            InterfaceKind::Packet => interfaces::packet(interface),
            InterfaceKind::Kernel { mac, mtu } => interfaces::kernel(interface, mac, mtu),
        }
    }
}
