// UNSAFETY: bpf(2) has no safe wrapper; its attributes are a union that is laid out by hand here.
#![allow(unsafe_code)]

//! The few commands of bpf(2) that the driver needs. Attributes: `union bpf_attr` in `linux/bpf.h`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP_ELEM: libc::c_int = 1;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const PROG_TEST_RUN: libc::c_int = 10;
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const LINK_CREATE: libc::c_int = 28;
const LINK_UPDATE: libc::c_int = 29;
const LINK_GET_FD_BY_ID: libc::c_int = 30;
const LINK_GET_NEXT_ID: libc::c_int = 31;
const LINK_DETACH: libc::c_int = 34;

const PROG_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
const LINK_TYPE_XDP: u32 = 6;

/// `BPF_MAP_TYPE_ARRAY`.
pub(super) const MAP_ARRAY: u32 = 2;
/// `BPF_MAP_TYPE_XSKMAP`.
pub(super) const MAP_XSK: u32 = 17;

/// `BPF_F_XDP_HAS_FRAGS`: the program takes frames of several buffers.
pub(super) const HAS_FRAGS: u32 = 1 << 5;
/// `BPF_F_XDP_DEV_BOUND_ONLY`: the program may read the device's metadata.
pub(super) const DEVICE_BOUND: u32 = 1 << 6;

/// `BPF_F_TEST_XDP_LIVE_FRAMES` (Linux 5.18): what the program says is done with the frame.
const LIVE_FRAMES: u32 = 1 << 1;

/// `XDP_FLAGS_SKB_MODE`: generic XDP.
pub(super) const GENERIC: u32 = 1 << 1;
/// `XDP_FLAGS_DRV_MODE`: native XDP.
pub(super) const NATIVE: u32 = 1 << 2;

/// The attribute of a command, as 32-bit words at the offsets that `union bpf_attr` has.
#[repr(C, align(8))]
struct Attribute([u32; 36]);

impl Attribute {
    fn new(words: &[(usize, u32)]) -> Self {
        let mut attribute = Self([0; 36]);
        for &(at, word) in words {
            attribute.0[at] = word;
        }
        attribute
    }

    /// A 64-bit field (a pointer) at word `at`.
    fn pointer<T: ?Sized>(mut self, at: usize, to: *const T) -> Self {
        let address = to.cast::<u8>() as usize as u64;
        let words: [u32; 2] = [address as u32, (address >> 32) as u32];
        let words = if cfg!(target_endian = "little") { words } else { [words[1], words[0]] };
        self.0[at..at + 2].copy_from_slice(&words);
        self
    }

    /// # Safety
    /// Every pointer in the attribute is valid for what the command reads and writes through it.
    unsafe fn call(&mut self, command: libc::c_int, bytes: usize) -> io::Result<i32> {
        debug_assert!(bytes <= size_of::<Self>());
        // SAFETY: the kernel reads and writes at most `bytes` of the attribute, and through its pointers as promised.
        let rc = unsafe { libc::syscall(libc::SYS_bpf, command, (&raw mut *self), bytes) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
    }

    /// # Safety
    /// As [`Self::call`], and the command returns a new descriptor.
    unsafe fn open(&mut self, command: libc::c_int, bytes: usize) -> io::Result<OwnedFd> {
        // SAFETY: as promised.
        unsafe { Ok(OwnedFd::from_raw_fd(self.call(command, bytes)?)) }
    }
}

/// A map with 4-byte keys.
#[derive(Debug)]
pub(super) struct Map {
    descriptor: OwnedFd,
}

impl Map {
    /// Makes a map of `kind` with values of `value_bytes`.
    pub(super) fn new(kind: u32, value_bytes: u32, entries: u32) -> io::Result<Self> {
        let mut attribute = Attribute::new(&[(0, kind), (1, 4), (2, value_bytes), (3, entries)]);
        // SAFETY: no pointers.
        Ok(Self { descriptor: unsafe { attribute.open(MAP_CREATE, 72) }? })
    }

    /// Puts a descriptor into a map of descriptors.
    pub(super) fn set(&self, key: u32, value: BorrowedFd<'_>) -> io::Result<()> {
        let value = value.as_raw_fd() as u32;
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, &raw const value);
        // SAFETY: key and value are 4 bytes, which is what a map of descriptors has.
        unsafe { attribute.call(MAP_UPDATE_ELEM, 32) }.map(drop)
    }

    /// Reads an 8-byte value.
    pub(super) fn get(&self, key: u32) -> io::Result<u64> {
        let mut value = 0u64;
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, &raw mut value);
        // SAFETY: used with maps whose values have 8 bytes only.
        unsafe { attribute.call(MAP_LOOKUP_ELEM, 32) }?;
        Ok(value)
    }

    /// Reads a value of two 8-byte words.
    pub(super) fn get_pair(&self, key: u32) -> io::Result<[u64; 2]> {
        let mut value = [0u64; 2];
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, value.as_mut_ptr());
        // SAFETY: used with maps whose values have 16 bytes only.
        unsafe { attribute.call(MAP_LOOKUP_ELEM, 32) }?;
        Ok(value)
    }

    /// Writes a value of two 8-byte words.
    pub(super) fn set_pair(&self, key: u32, value: [u64; 2]) -> io::Result<()> {
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, value.as_ptr());
        // SAFETY: used with maps whose values have 16 bytes only.
        unsafe { attribute.call(MAP_UPDATE_ELEM, 32) }.map(drop)
    }

    fn element(&self) -> Attribute {
        Attribute::new(&[(0, self.number() as u32)])
    }

    /// Number of the descriptor, for the program that refers to the map.
    pub(super) fn number(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }
}

/// A loaded program.
#[derive(Debug)]
pub(super) struct Program {
    descriptor: OwnedFd,
}

/// Why a program was not loaded.
#[derive(Debug)]
pub(super) struct LoadError {
    pub(super) source: io::Error,
    /// Last lines of the verifier's report.
    pub(super) report: String,
}

impl Program {
    /// Loads an XDP program. `device` is the interface that it is bound to if `flags` has [`DEVICE_BOUND`].
    pub(super) fn load(code: &[[u8; 8]], name: &str, flags: u32, device: u32) -> Result<Self, LoadError> {
        // GPL-compatible, as the kernel's functions demand of programs that call them; the words are from its list.
        let license = c"Dual MIT/GPL";
        let bound = if flags & DEVICE_BOUND != 0 { device } else { 0 };
        let mut attribute = Attribute::new(&[(0, PROG_TYPE_XDP), (1, code.len() as u32), (11, flags), (16, bound)])
            .pointer(2, code.as_ptr())
            .pointer(4, license.as_ptr());
        attribute.0[17] = ATTACH_TYPE_XDP;
        let mut name_bytes = [0u8; 16];
        let n = name.len().min(15);
        name_bytes[..n].copy_from_slice(&name.as_bytes()[..n]);
        for (word, bytes) in attribute.0[12..16].iter_mut().zip(name_bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        // SAFETY: instructions and licence live through the call; the counts are right.
        let first = match unsafe { attribute.open(PROG_LOAD, 72) } {
            Ok(descriptor) => return Ok(Self { descriptor }),
            Err(error) => error,
        };
        // Once more with a report, for the error only: the verifier writes much.
        let mut log = vec![0u8; 1 << 20];
        attribute.0[6] = 1;
        attribute.0[7] = log.len() as u32;
        let mut attribute = attribute.pointer(8, log.as_mut_ptr());
        // SAFETY: as above, and the log has the size given.
        match unsafe { attribute.open(PROG_LOAD, 72) } {
            Ok(descriptor) => Ok(Self { descriptor }),
            Err(_) => {
                let end = log.iter().position(|&b| b == 0).unwrap_or(0);
                let text = String::from_utf8_lossy(&log[..end]);
                let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("processed ")).collect();
                let report = lines[lines.len().saturating_sub(3)..].join("; ");
                Err(LoadError { source: first, report })
            }
        }
    }

    /// Attaches the program with a link: it stays attached for as long as the link's descriptor is open in any process.
    pub(super) fn link(&self, interface: u32, mode: u32) -> io::Result<OwnedFd> {
        let program = self.number() as u32;
        let mut attribute = Attribute::new(&[(0, program), (1, interface), (2, ATTACH_TYPE_XDP), (3, mode)]);
        // SAFETY: no pointers.
        unsafe { attribute.open(LINK_CREATE, 32) }
    }

    /// Takes the place of the program that a link holds, between two frames.
    pub(super) fn replace(&self, link: &OwnedFd) -> io::Result<()> {
        let mut attribute = Attribute::new(&[(0, link.as_raw_fd() as u32), (1, self.number() as u32)]);
        // SAFETY: no pointers.
        unsafe { attribute.call(LINK_UPDATE, 16) }.map(drop)
    }

    /// Runs the program on a frame as if an interface had received it, and does with the frame what the program says.
    pub(super) fn run_live(&self, frame: &[u8], interface: u32) -> io::Result<()> {
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context = [0u32, frame.len() as u32, 0, interface, 0, 0];
        let mut attribute = Attribute::new(&[(0, self.number() as u32), (2, frame.len() as u32), (8, 1)])
            .pointer(4, frame.as_ptr())
            .pointer(12, context.as_ptr());
        attribute.0[10] = size_of_val(&context) as u32;
        attribute.0[16] = LIVE_FRAMES;
        attribute.0[18] = 1;
        // SAFETY: frame and context are read while the borrows last; there is no output.
        unsafe { attribute.call(PROG_TEST_RUN, 80) }.map(drop)
    }

    /// Runs the program on a frame for its answer alone.
    #[cfg(test)]
    pub(super) fn run(&self, frame: &[u8]) -> io::Result<u32> {
        let mut attribute =
            Attribute::new(&[(0, self.number() as u32), (2, frame.len() as u32), (8, 1)]).pointer(4, frame.as_ptr());
        // SAFETY: the frame is read while the borrow lasts; there is no output but the answer, in the second word.
        unsafe { attribute.call(PROG_TEST_RUN, 80) }?;
        Ok(attribute.0[1])
    }

    /// Number of the descriptor, to attach by netlink.
    pub(super) fn number(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }
}

/// Name of a program of the kernel.
pub(super) fn program_name(id: u32) -> io::Result<String> {
    let mut attribute = Attribute::new(&[(0, id)]);
    // SAFETY: no pointers.
    let program = unsafe { attribute.open(PROG_GET_FD_BY_ID, 12) }?;
    // struct bpf_prog_info: the name is 16 bytes at offset 64.
    let mut info = [0u64; 16];
    object_info(&program, &mut info)?;
    let bytes: Vec<u8> = info[8..10].iter().flat_map(|word| word.to_ne_bytes()).take_while(|&b| b != 0).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn object_info(object: &OwnedFd, info: &mut [u64; 16]) -> io::Result<()> {
    let bytes = size_of_val(info) as u32;
    let mut attribute = Attribute::new(&[(0, object.as_raw_fd() as u32), (1, bytes)]).pointer(2, info.as_mut_ptr());
    // SAFETY: the kernel writes at most the length given.
    unsafe { attribute.call(OBJ_GET_INFO_BY_FD, 16) }.map(drop)
}

/// Detaches whatever link has put a program on the interface; `false` if there is none.
pub(super) fn detach_links(interface: u32) -> io::Result<bool> {
    let (mut id, mut any) = (0, false);
    loop {
        let mut attribute = Attribute::new(&[(0, id)]);
        // SAFETY: no pointers; the next id comes back in the second word.
        match unsafe { attribute.call(LINK_GET_NEXT_ID, 12) } {
            Ok(_) => id = attribute.0[1],
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(any),
            Err(error) => return Err(error),
        }
        // SAFETY: no pointers. A link that has gone meanwhile is none of ours to detach.
        let Ok(link) = (unsafe { Attribute::new(&[(0, id)]).open(LINK_GET_FD_BY_ID, 12) }) else { continue };
        // struct bpf_link_info: type, id, program; then, for XDP, the interface at offset 16.
        let mut info = [0u64; 16];
        object_info(&link, &mut info)?;
        let (kind, on) = (first_word(info[0]), first_word(info[2]));
        if kind == LINK_TYPE_XDP && on == interface {
            // SAFETY: no pointers.
            unsafe { Attribute::new(&[(0, link.as_raw_fd() as u32)]).call(LINK_DETACH, 4) }?;
            any = true;
        }
    }
}

/// The 32 bits at the lower address.
fn first_word(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}
