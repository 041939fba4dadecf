//! Interface of the emulator to the process that it runs in. `preload/` implements it for a real process,
//! [`crate::mem_host`] for tests.

use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;

use rustix::io::Errno;

/// The process around the emulator: its memory, its descriptors and the network of its machine.
pub trait Host: Send + Sync + 'static {
    /// Pinned memory of the application.
    type Region: Region;

    /// Pins memory, as the kernel does for a device.
    ///
    /// # Errors
    /// `EFAULT` unless the whole range is mapped, and writable if `writable` is set.
    fn pin(&self, address: u64, length: u64, writable: bool) -> Result<Self::Region, Errno>;

    /// Copies from memory that the application names in a command.
    ///
    /// # Errors
    /// `EFAULT` if the range is not mapped.
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno>;

    /// Copies to memory that the application names in a command.
    ///
    /// # Errors
    /// `EFAULT` if the range is not mapped or not writable.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), Errno>;

    /// Gives a file descriptor to the application, and returns its number there. The host reports its closing to
    /// [`crate::Emulator::close`].
    fn install_fd(&self, descriptor: OwnedFd) -> RawFd;

    /// Opens a network interface of this machine as the far end of a link, or as the kernel's interface of a port.
    ///
    /// # Errors
    /// A message that names the cause and a remedy.
    fn open_interface(&self, kind: InterfaceKind, interface: &str) -> Result<Box<dyn Interface>, String>;

    /// Replaces the content of a file of the generated tree ([`crate::sysfs`]), whose path is relative to its root.
    /// Hosts without such a tree ignore it.
    fn publish(&self, file: &Path, text: &str) {
        let _ = (file, text);
    }
}

/// Memory that stays mapped while the device may use it. Every access is checked against its length, so no
/// address in a descriptor leads outside.
pub trait Region: Clone + Send + 'static {
    /// Returns the first address in the application's address space.
    fn address(&self) -> u64;

    /// Returns the length in bytes.
    fn length(&self) -> u64;

    /// Copies from the region. Returns false, and copies nothing, if the range is not inside the region.
    #[must_use]
    fn read(&self, offset: u64, to: &mut [u8]) -> bool;

    /// Copies to the region. Returns false, and copies nothing, if the range is not inside the region or the
    /// region was pinned read-only.
    #[must_use]
    fn write(&self, offset: u64, from: &[u8]) -> bool;

    /// Loads an aligned 32-bit word with acquire ordering; returns 0 if it is not inside the region.
    fn load(&self, offset: u64) -> u32;

    /// Loads two aligned words at once, with acquire ordering; returns 0 if they are not inside the region.
    fn load_pair(&self, offset: u64) -> u64;

    /// Loads `N` consecutive pairs of words in ascending order, each as [`Self::load_pair`] does.
    #[inline]
    fn load_pairs<const N: usize>(&self, offset: u64) -> [u64; N] {
        std::array::from_fn(|i| self.load_pair(offset + 8 * i as u64))
    }

    /// Stores an aligned 32-bit word with release ordering. Does nothing if it is not inside the region.
    fn store(&self, offset: u64, value: u32);

    /// Stores two aligned words at once, with release ordering. Does nothing if they are not inside the
    /// region.
    fn store_pair(&self, offset: u64, value: u64);

    /// Stores eight pairs of words. The last pair is ordered after the others.
    #[inline]
    fn store_line(&self, offset: u64, pairs: &[u64; 8]) {
        for (at, pair) in (offset..).step_by(8).zip(pairs) {
            self.store_pair(at, *pair);
        }
    }

    /// Hint: the device is done with the cache line at `offset`, and another processor writes it next. The
    /// line may leave this processor's caches.
    #[inline]
    fn demote(&self, offset: u64) {
        let _ = offset;
    }

    /// Hint: the device reads the cache line at `offset` soon.
    #[inline]
    fn prefetch(&self, offset: u64) {
        let _ = offset;
    }

    /// Hint: the device writes the cache line at `offset` soon, so this processor should obtain ownership of
    /// it.
    #[inline]
    fn prefetch_write(&self, offset: u64) {
        let _ = offset;
    }
}

/// Kinds of network interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterfaceKind {
    /// A TAP interface; it is created if it does not exist.
    Tap,
    /// Any interface through a packet socket, for example one end of a veth pair.
    Packet,
    /// A TAP interface with this address and MTU, as the kernel's interface of a port.
    Kernel {
        /// MAC address.
        mac: [u8; 6],
        /// MTU in bytes.
        mtu: u32,
    },
}

/// A network interface of this machine.
pub trait Interface: Send {
    /// Sends a frame; returns false if the interface did not accept it.
    fn send(&mut self, frame: &[u8]) -> bool;

    /// Receives the next frame and returns its length; `None` if there is none.
    fn receive(&mut self, frame: &mut [u8]) -> Option<usize>;

    /// Returns the descriptor that becomes readable when a frame arrives.
    fn descriptor(&self) -> RawFd;

    /// Gives an interface of [`InterfaceKind::Kernel`] a carrier, or takes it away. Others keep theirs.
    fn set_carrier(&mut self, up: bool) {
        _ = up;
    }
}
