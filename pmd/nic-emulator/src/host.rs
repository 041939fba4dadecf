//! What the emulator needs of the process that it lives in. `preload/` has the real one; tests have one of plain vectors.

use std::os::fd::{OwnedFd, RawFd};

use rustix::io::Errno;

/// The process around the emulator: its memory, its descriptors, the network of its machine.
pub trait Host: Send + Sync + 'static {
    /// Pinned memory of the application.
    type Region: Region;

    /// Pins memory, as the kernel does for a device: all of it must be mapped, and writable if the device may write.
    ///
    /// # Errors
    /// `EFAULT` if it is not.
    fn pin(&self, address: u64, length: u64, writable: bool) -> Result<Self::Region, Errno>;

    /// Copies from memory that the application names in a command.
    ///
    /// # Errors
    /// `EFAULT` if it is not mapped.
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno>;

    /// Copies to memory that the application names in a command.
    ///
    /// # Errors
    /// `EFAULT` if it is not mapped or not writable.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), Errno>;

    /// Gives the application a descriptor, whose closing it will report to [`crate::Emulator::close`].
    fn hand_out(&self, descriptor: OwnedFd) -> RawFd;

    /// A network device of this machine as the far end of a link.
    ///
    /// # Errors
    /// In words, with what would help.
    fn open_wire(&self, kind: WireKind, interface: &str) -> Result<Box<dyn Wire>, String>;
}

/// Memory that stays where it is while the device may use it. Every access is checked against its length, so nothing that a driver
/// writes into a descriptor leads outside.
pub trait Region: Clone + Send + 'static {
    /// First address, as the application knows it.
    fn address(&self) -> u64;

    /// Bytes.
    fn length(&self) -> u64;

    /// Copies out; false, and nothing done, if that is not all inside.
    #[must_use]
    fn read(&self, offset: u64, to: &mut [u8]) -> bool;

    /// Copies in; false, and nothing done, if that is not all inside or the region was pinned for reading.
    #[must_use]
    fn write(&self, offset: u64, from: &[u8]) -> bool;

    /// An aligned word, ordered before what is read later (acquire); 0 if it is not inside.
    fn load(&self, offset: u64) -> u32;

    /// Two aligned words at once, as [`Self::load`].
    fn load_pair(&self, offset: u64) -> u64;

    /// Pairs of words one behind the other, in this order, each as [`Self::load_pair`].
    #[inline]
    fn load_pairs<const N: usize>(&self, offset: u64) -> [u64; N] {
        std::array::from_fn(|i| self.load_pair(offset + 8 * i as u64))
    }

    /// An aligned word, ordered after what was written earlier (release). Nothing happens if it is not inside.
    fn store(&self, offset: u64, value: u32);

    /// Two aligned words at once, as [`Self::store`].
    fn store_pair(&self, offset: u64, value: u64);

    /// Eight pairs of words, the last of which is ordered after the others.
    #[inline]
    fn store_line(&self, offset: u64, pairs: &[u64; 8]) {
        for (at, pair) in (offset..).step_by(8).zip(pairs) {
            self.store_pair(at, *pair);
        }
    }

    /// The device is done with the line at `offset`, which another processor will write next: it may leave this one's caches. Changes nothing.
    #[inline]
    fn release(&self, offset: u64) {
        let _ = offset;
    }

    /// The device will soon read the line at `offset`. Changes nothing.
    #[inline]
    fn ask(&self, offset: u64) {
        let _ = offset;
    }

    /// The device will soon write to the line at `offset`: time to take it away from another processor. Changes nothing.
    #[inline]
    fn expect(&self, offset: u64) {
        let _ = offset;
    }
}

/// Kinds of network devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireKind {
    /// A TAP device; made if it is not there.
    Tap,
    /// Any interface, by a packet socket: the end of a veth pair.
    Packet,
}

/// The far end of a link, outside the process.
pub trait Wire: Send {
    /// Sends a frame; false if it was not taken.
    fn send(&mut self, frame: &[u8]) -> bool;

    /// Takes the next frame that waits, if one does: its length.
    fn receive(&mut self, frame: &mut [u8]) -> Option<usize>;

    /// What becomes readable when a frame waits.
    fn descriptor(&self) -> RawFd;
}
