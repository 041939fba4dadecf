//! A host of plain vectors, without a process around it: for tests, fuzzing and measurements of devices alone.
//!
//! ```
//! use wirepath_nic_emulator::vectors::{Bench, BASE};
//!
//! let bench = Bench::new("[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n");
//! bench.poke(BASE, &[1, 2, 3]);
//! assert_eq!(bench.peek(BASE, 3), [1, 2, 3]);
//! ```

mod connectx;

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::write;
use wirepath_settings::Source;
use zerocopy::IntoBytes;

pub use connectx::{Arrival, Connectx, RECEIVERS, SEND_BUFFER, Value};

use crate::device::{ContextId, Store};
use crate::host::{Host, Region, Wire, WireKind};
use crate::topology::Topology;
use crate::{Emulator, Log};

/// Address of the first byte of memory that there is.
pub const BASE: u64 = 0x10_0000;
/// Bytes of memory.
pub const SIZE: usize = 1 << 20;

/// The memory, and descriptors that were handed out.
#[derive(Clone, Debug)]
pub struct Vectors {
    bytes: Arc<Mutex<Vec<u8>>>,
    handed: Arc<Mutex<Vec<OwnedFd>>>,
}

/// Part of the memory.
#[derive(Clone, Debug)]
pub struct Part {
    bytes: Arc<Mutex<Vec<u8>>>,
    address: u64,
    length: u64,
    writable: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a range lies in the vector.
fn place(address: u64, length: u64) -> Option<std::ops::Range<usize>> {
    if length == 0 {
        // Nothing may lie anywhere.
        return Some(0..0);
    }
    let start = address.checked_sub(BASE)?;
    let end = start.checked_add(length).filter(|end| *end <= SIZE as u64)?;
    Some(start as usize..end as usize)
}

impl Default for Vectors {
    fn default() -> Self {
        Self { bytes: Arc::new(Mutex::new(vec![0; SIZE])), handed: Arc::default() }
    }
}

impl Host for Vectors {
    type Region = Part;

    fn pin(&self, address: u64, length: u64, writable: bool) -> Result<Part, Errno> {
        place(address, length).filter(|range| !range.is_empty()).ok_or(Errno::FAULT)?;
        Ok(Part { bytes: Arc::clone(&self.bytes), address, length, writable })
    }

    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno> {
        let range = place(address, to.len() as u64).ok_or(Errno::FAULT)?;
        to.copy_from_slice(&lock(&self.bytes)[range]);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Errno> {
        let range = place(address, from.len() as u64).ok_or(Errno::FAULT)?;
        lock(&self.bytes)[range].copy_from_slice(from);
        Ok(())
    }

    fn hand_out(&self, descriptor: OwnedFd) -> RawFd {
        let fd = descriptor.as_raw_fd();
        lock(&self.handed).push(descriptor);
        fd
    }

    fn open_wire(&self, _kind: WireKind, interface: &str) -> Result<Box<dyn Wire>, String> {
        Err(format!("there is no {interface} here"))
    }
}

impl Part {
    fn range(&self, offset: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let fits = offset <= self.length && length as u64 <= self.length - offset;
        fits.then(|| place(self.address + offset, length as u64)).flatten()
    }
}

impl Region for Part {
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

/// A plain command of the write form with its driver part, which expects a reply of so many bytes.
pub fn plain(command: u32, core: &[u8], driver: &[u8], reply: usize) -> Vec<u8> {
    let length = size_of::<write::CommandHeader>() + core.len() + driver.len();
    let header = write::CommandHeader { command, in_words: (length / 4) as u16, out_words: (reply / 4) as u16 };
    [header.as_bytes(), core, driver].concat()
}

/// An extended command of the write form with its driver part, which expects replies of so many bytes at an address.
pub fn extended(at: u64, command: u32, core: &[u8], driver: &[u8], reply: usize, driver_reply: usize) -> Vec<u8> {
    let mut core = core.to_vec();
    core.resize(core.len().next_multiple_of(8), 0);
    let words = |bytes: usize| bytes.div_ceil(8) as u16;
    let header = write::CommandHeader {
        command: command | write::EXTENDED,
        in_words: words(core.len()),
        out_words: words(reply),
    };
    let more = write::ExtendedHeader {
        response: at,
        provider_in_words: words(driver.len()),
        provider_out_words: words(driver_reply),
        cmd_hdr_reserved: 0,
    };
    [header.as_bytes(), more.as_bytes(), &core, driver].concat()
}

/// An emulator on vectors with its first device open.
#[derive(Debug)]
pub struct Bench {
    /// The emulator.
    pub emulator: Emulator<Vectors>,
    /// Descriptor of the first device.
    pub fd: RawFd,
    /// Its context.
    pub context: ContextId,
    host: Vectors,
    _file: OwnedFd,
}

impl Bench {
    /// With the devices of a topology text.
    ///
    /// # Panics
    /// If the topology is wrong or its links need more than vectors.
    pub fn new(topology: &str) -> Self {
        let topology = Topology::read(&Source::new("topology", topology)).unwrap_or_else(|error| panic!("{error}"));
        let host = Vectors::default();
        let emulator = Emulator::new(topology, host.clone(), Log::nowhere());
        let opened = emulator.open(0).expect("the first device opens");
        Self { emulator, fd: opened.file.as_raw_fd(), context: opened.context, host, _file: opened.file }
    }

    /// Writes memory; what lies outside is left out.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        let _ = self.host.write(address, bytes);
    }

    /// Reads memory; zeros from outside.
    pub fn peek(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let _ = self.host.read(address, &mut bytes);
        bytes
    }

    /// Sends a command of the write form, from the memory at `at`.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn write(&self, at: u64, command: &[u8]) -> Result<usize, Errno> {
        self.poke(at, command);
        self.emulator.write(self.fd, at, command.len())
    }

    /// Rings a doorbell.
    pub fn ring(&self, offset: usize, value: u64) {
        self.emulator.doorbell(self.context, Store { offset, size: 8, value });
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.emulator.close(self.fd);
    }
}
