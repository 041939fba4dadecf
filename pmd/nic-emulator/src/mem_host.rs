//! A host whose application memory is a byte vector, for tests, fuzzing and measurements of single devices.
//!
//! ```
//! use wirepath_nic_emulator::mem_host::{EmulatorHarness, BASE};
//!
//! let harness = EmulatorHarness::new("[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n");
//! harness.poke(BASE, &[1, 2, 3]);
//! assert_eq!(harness.peek(BASE, 3), [1, 2, 3]);
//! ```

mod connectx;

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::write;
use wirepath_settings::Source;
use zerocopy::IntoBytes;

pub use connectx::{AttributeValue, Connectx, RECEIVERS, ReceivedPacket, SEND_BUFFER};

use crate::device::{ContextId, Store};
use crate::host::{Host, Interface, InterfaceKind, Region};
use crate::topology::Topology;
use crate::{Emulator, Log};

/// Address of the first byte of memory.
pub const BASE: u64 = 0x10_0000;
/// Size of the memory in bytes.
pub const SIZE: usize = 1 << 20;

/// Host with a byte vector as application memory. It keeps the file descriptors of the application open.
#[derive(Clone, Debug)]
pub struct MemHost {
    bytes: Arc<Mutex<Vec<u8>>>,
    open_files: Arc<Mutex<Vec<OwnedFd>>>,
}

/// A pinned part of the memory.
#[derive(Clone, Debug)]
pub struct MemRegion {
    bytes: Arc<Mutex<Vec<u8>>>,
    address: u64,
    length: u64,
    writable: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the range of the vector for a range of addresses. `None` if it is outside the memory.
fn range_of(address: u64, length: u64) -> Option<std::ops::Range<usize>> {
    if length == 0 {
        // An empty range is valid at any address.
        return Some(0..0);
    }
    let start = address.checked_sub(BASE)?;
    let end = start.checked_add(length).filter(|end| *end <= SIZE as u64)?;
    Some(start as usize..end as usize)
}

impl Default for MemHost {
    fn default() -> Self {
        Self { bytes: Arc::new(Mutex::new(vec![0; SIZE])), open_files: Arc::default() }
    }
}

impl Host for MemHost {
    type Region = MemRegion;

    fn pin(&self, address: u64, length: u64, writable: bool) -> Result<MemRegion, Errno> {
        range_of(address, length).filter(|range| !range.is_empty()).ok_or(Errno::FAULT)?;
        Ok(MemRegion { bytes: Arc::clone(&self.bytes), address, length, writable })
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno> {
        let range = range_of(address, to.len() as u64).ok_or(Errno::FAULT)?;
        to.copy_from_slice(&lock(&self.bytes)[range]);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Errno> {
        let range = range_of(address, from.len() as u64).ok_or(Errno::FAULT)?;
        lock(&self.bytes)[range].copy_from_slice(from);
        Ok(())
    }

    fn install_fd(&self, descriptor: OwnedFd) -> RawFd {
        let fd = descriptor.as_raw_fd();
        lock(&self.open_files).push(descriptor);
        fd
    }

    fn open_interface(&self, _kind: InterfaceKind, interface: &str) -> Result<Box<dyn Interface>, String> {
        Err(format!("the memory host has no network interface {interface}"))
    }
}

impl MemRegion {
    fn range(&self, offset: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let fits = offset <= self.length && length as u64 <= self.length - offset;
        fits.then(|| range_of(self.address + offset, length as u64)).flatten()
    }
}

impl Region for MemRegion {
    fn address(&self) -> u64 {
        self.address
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(range) = self.range(offset, to.len()) else { return false };
        to.copy_from_slice(&lock(&self.bytes)[range]);
        true
    }

    fn write(&self, offset: u64, from: &[u8]) -> bool {
        let Some(range) = self.range(offset, from.len()).filter(|_| self.writable) else { return false };
        lock(&self.bytes)[range].copy_from_slice(from);
        true
    }

    fn load(&self, offset: u64) -> u32 {
        let mut word = [0; 4];
        let _ = self.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    fn load_pair(&self, offset: u64) -> u64 {
        let mut words = [0; 8];
        let _ = self.read(offset, &mut words);
        u64::from_le_bytes(words)
    }

    fn store(&self, offset: u64, value: u32) {
        let _ = self.write(offset, &value.to_le_bytes());
    }

    fn store_pair(&self, offset: u64, value: u64) {
        let _ = self.write(offset, &value.to_le_bytes());
    }
}

/// Builds a command of the write(2) interface with its driver part. The reply has `reply` bytes.
pub fn write_command(command: u32, core: &[u8], driver: &[u8], reply: usize) -> Vec<u8> {
    let length = size_of::<write::CommandHeader>() + core.len() + driver.len();
    let header = write::CommandHeader { command, in_words: (length / 4) as u16, out_words: (reply / 4) as u16 };
    [header.as_bytes(), core, driver].concat()
}

/// Builds an extended command of the write(2) interface with its driver part. The replies, of `reply` and
/// `driver_reply` bytes, are written to the address `response`.
pub fn extended_write_command(
    response: u64,
    command: u32,
    core: &[u8],
    driver: &[u8],
    reply: usize,
    driver_reply: usize,
) -> Vec<u8> {
    let mut core = core.to_vec();
    core.resize(core.len().next_multiple_of(8), 0);
    let words = |bytes: usize| bytes.div_ceil(8) as u16;
    let header = write::CommandHeader {
        command: command | write::EXTENDED,
        in_words: words(core.len()),
        out_words: words(reply),
    };
    let extended = write::ExtendedHeader {
        response,
        provider_in_words: words(driver.len()),
        provider_out_words: words(driver_reply),
        cmd_hdr_reserved: 0,
    };
    [header.as_bytes(), extended.as_bytes(), &core, driver].concat()
}

/// An emulator with a [`MemHost`] and its first device open.
#[derive(Debug)]
pub struct EmulatorHarness {
    /// The emulator.
    pub emulator: Emulator<MemHost>,
    /// File descriptor of the first device.
    pub fd: RawFd,
    /// Context of the first device.
    pub context: ContextId,
    host: MemHost,
    _file: OwnedFd,
}

impl EmulatorHarness {
    /// Creates the devices of a topology text and opens the first one.
    ///
    /// # Panics
    /// If the topology is invalid, or if a link needs a network interface.
    pub fn new(topology: &str) -> Self {
        let topology = Topology::read(&Source::new("topology", topology)).unwrap_or_else(|error| panic!("{error}"));
        let host = MemHost::default();
        let emulator = Emulator::new(topology, host.clone(), Log::discard());
        let opened = emulator.open(0).expect("the first device opens");
        Self { emulator, fd: opened.file.as_raw_fd(), context: opened.context, host, _file: opened.file }
    }

    /// Writes to memory; does nothing if the range is outside.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        let _ = self.host.write(address, bytes);
    }

    /// Reads from memory; returns zeros if the range is outside.
    pub fn peek(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let _ = self.host.read(address, &mut bytes);
        bytes
    }

    /// Copies a command to the address `at` and executes it, as write(2) on the device file does.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn write(&self, at: u64, command: &[u8]) -> Result<usize, Errno> {
        self.poke(at, command);
        self.emulator.write(self.fd, at, command.len())
    }

    /// Writes `value` to the doorbell at `offset` of the doorbell page.
    pub fn ring_doorbell(&self, offset: usize, value: u64) {
        self.emulator.doorbell(self.context, Store { offset, size: 8, value });
    }
}

impl Drop for EmulatorHarness {
    fn drop(&mut self) {
        self.emulator.close(self.fd);
    }
}
