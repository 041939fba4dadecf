// UNSAFETY: bpf(2) has no safe wrapper; its attributes are a union that is laid out by hand here.
#![allow(unsafe_code)]

//! The commands of bpf(2) that drivers need. Attributes: `union bpf_attr` in `linux/bpf.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::mapping::Mapping;

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

const LINK_TYPE_XDP: u32 = 6;

/// `BPF_MAP_TYPE_ARRAY`.
pub(crate) const MAP_ARRAY: u32 = 2;
/// `BPF_MAP_TYPE_LRU_HASH`: a new entry replaces one that was not used for long.
pub(crate) const MAP_LRU_HASH: u32 = 9;
/// `BPF_MAP_TYPE_XSKMAP`.
pub(crate) const MAP_XSK: u32 = 17;

/// `BPF_F_XDP_HAS_FRAGS`: the program accepts frames of several buffers.
pub(crate) const HAS_FRAGS: u32 = 1 << 5;
/// `BPF_F_XDP_DEV_BOUND_ONLY`: the program may read the device's metadata.
pub(crate) const DEVICE_BOUND: u32 = 1 << 6;

/// `BPF_F_MMAPABLE` (Linux 5.5): a process can map the values of an array into its memory.
const MMAPABLE: u32 = 1 << 10;

/// `BPF_F_TEST_XDP_LIVE_FRAMES` (Linux 5.18): the kernel executes the program's action on the frame.
const LIVE_FRAMES: u32 = 1 << 1;

/// Live frames that the kernel makes at once, and pages that the pool of a call keeps. Frames that receivers still hold
/// at the end of a call come back to its pool. The kernel frees it up to a second later (`page_pool_release_retry` in
/// net/core/page_pool.c). With the usual 64, slow receivers make that gigabytes.
const LIVE_BATCH: u32 = 16;

/// `XDP_FLAGS_SKB_MODE`: generic XDP.
pub(crate) const GENERIC: u32 = 1 << 1;
/// `XDP_FLAGS_DRV_MODE`: native XDP.
pub(crate) const NATIVE: u32 = 1 << 2;

/// Attributes of a command, as 32-bit words at the offsets of `union bpf_attr`.
#[repr(C, align(8))]
struct BpfAttr([u32; 36]);

impl BpfAttr {
    fn new(words: &[(usize, u32)]) -> Self {
        let mut attribute = Self([0; 36]);
        for &(at, word) in words {
            attribute.0[at] = word;
        }
        attribute
    }

    /// Sets a pointer (64 bits) at word `at`.
    fn pointer<T: ?Sized>(mut self, at: usize, to: *const T) -> Self {
        let address = to.cast::<u8>() as usize as u64;
        let words: [u32; 2] = [address as u32, (address >> 32) as u32];
        let words = if cfg!(target_endian = "little") { words } else { [words[1], words[0]] };
        self.0[at..at + 2].copy_from_slice(&words);
        self
    }

    /// Calls bpf(2).
    ///
    /// # Safety
    /// The caller guarantees that every pointer in the attributes is valid for the reads and writes that
    /// `command` makes through it.
    unsafe fn call(&mut self, command: libc::c_int, bytes: usize) -> io::Result<i32> {
        debug_assert!(bytes <= size_of::<Self>());
        // SAFETY: the kernel accesses at most `bytes` of the attributes. The caller guarantees that the
        // pointers in them are valid for `command`.
        let rc = unsafe { libc::syscall(libc::SYS_bpf, command, (&raw mut *self), bytes) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
    }

    /// Calls bpf(2) with a command that returns a new descriptor.
    ///
    /// # Safety
    /// The caller guarantees the same as for [`Self::call`], and that `command` returns a new descriptor.
    unsafe fn open(&mut self, command: libc::c_int, bytes: usize) -> io::Result<OwnedFd> {
        // SAFETY: the caller guarantees valid pointers and that the command returns a new descriptor, which
        // nothing else owns.
        unsafe { Ok(OwnedFd::from_raw_fd(self.call(command, bytes)?)) }
    }
}

/// A BPF map, with 4-byte keys unless programs alone use it.
#[derive(Debug)]
pub(crate) struct Map {
    descriptor: OwnedFd,
}

impl Map {
    /// Creates a map of `kind` with values of `value_bytes` bytes.
    pub(crate) fn new(kind: u32, value_bytes: u32, entries: u32) -> io::Result<Self> {
        Self::with_keys(kind, 4, value_bytes, entries)
    }

    /// Creates a map of `kind` with keys of `key_bytes` bytes, which only programs use.
    pub(crate) fn with_keys(kind: u32, key_bytes: u32, value_bytes: u32, entries: u32) -> io::Result<Self> {
        let mut attribute = BpfAttr::new(&[(0, kind), (1, key_bytes), (2, value_bytes), (3, entries)]);
        // SAFETY: the attributes hold no pointers, and BPF_MAP_CREATE returns a new descriptor.
        Ok(Self { descriptor: unsafe { attribute.open(MAP_CREATE, 72) }? })
    }

    /// Stores a descriptor in a map of descriptors.
    pub(crate) fn set(&self, key: u32, value: BorrowedFd<'_>) -> io::Result<()> {
        let value = value.as_raw_fd() as u32;
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, &raw const value);
        // SAFETY: the kernel reads the key and the value; both have 4 bytes, as maps of descriptors require,
        // and outlive the call.
        unsafe { attribute.call(MAP_UPDATE_ELEM, 32) }.map(drop)
    }

    /// Reads an 8-byte value.
    pub(crate) fn get(&self, key: u32) -> io::Result<u64> {
        let mut value = 0u64;
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, &raw mut value);
        // SAFETY: the kernel reads the 4-byte key and writes 8 bytes: callers use this only for maps with
        // values of 8 bytes.
        unsafe { attribute.call(MAP_LOOKUP_ELEM, 32) }?;
        Ok(value)
    }

    /// Reads a value of two 8-byte words.
    pub(crate) fn get_pair(&self, key: u32) -> io::Result<[u64; 2]> {
        let mut value = [0u64; 2];
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, value.as_mut_ptr());
        // SAFETY: the kernel reads the 4-byte key and writes 16 bytes: callers use this only for maps with
        // values of 16 bytes.
        unsafe { attribute.call(MAP_LOOKUP_ELEM, 32) }?;
        Ok(value)
    }

    /// Writes a value of two 8-byte words.
    pub(crate) fn set_pair(&self, key: u32, value: [u64; 2]) -> io::Result<()> {
        let mut attribute = self.element().pointer(2, &raw const key).pointer(4, value.as_ptr());
        // SAFETY: the kernel reads the 4-byte key and 16 bytes: callers use this only for maps with values of
        // 16 bytes.
        unsafe { attribute.call(MAP_UPDATE_ELEM, 32) }.map(drop)
    }

    fn element(&self) -> BpfAttr {
        BpfAttr::new(&[(0, self.raw_fd() as u32)])
    }

    /// Returns the raw descriptor, for programs that refer to the map.
    pub(crate) fn raw_fd(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }
}

/// An array map of one value, which is mapped into the memory of this process. Programs access it by its address
/// ([`super::assembler::Assembler::load_value`]).
#[derive(Debug)]
pub(crate) struct MappedValue {
    map: Map,
    memory: Mapping,
}

impl MappedValue {
    /// Creates a value of `bytes` bytes, a multiple of 8 and of the page size.
    pub(crate) fn new(bytes: u32) -> io::Result<Self> {
        let mut attribute = BpfAttr::new(&[(0, MAP_ARRAY), (1, 4), (2, bytes), (3, 1), (4, MMAPABLE)]);
        // SAFETY: the attributes hold no pointers, and BPF_MAP_CREATE returns a new descriptor.
        let map = Map { descriptor: unsafe { attribute.open(MAP_CREATE, 72) }? };
        let memory = Mapping::new(map.descriptor.as_fd(), 0, bytes as usize, false)?;
        Ok(Self { map, memory })
    }

    /// Returns the value. A program may access it only within a call of [`Program::run_burst`], for which the caller
    /// gives up the borrow.
    #[inline]
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length and lives as long as `self`, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start().as_ptr(), self.memory.len()) }
    }

    /// Returns the raw descriptor, for programs that refer to the map.
    pub(crate) fn raw_fd(&self) -> i32 {
        self.map.raw_fd()
    }
}

/// Kind of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProgramKind {
    /// Runs in the receive path of a network driver.
    Xdp,
    /// Runs at the tc ingress hook (TCX, Linux 6.6).
    TcxIngress,
    /// Runs at the tc egress hook (TCX, Linux 6.6).
    TcxEgress,
    /// Filters the frames of a socket.
    SocketFilter,
}

impl ProgramKind {
    /// Returns the values of `enum bpf_prog_type` and `enum bpf_attach_type`.
    fn types(self) -> (u32, u32) {
        match self {
            Self::Xdp => (6, 37),
            Self::TcxIngress => (3, 46),
            Self::TcxEgress => (3, 47),
            // The attach type is not used.
            Self::SocketFilter => (1, 0),
        }
    }
}

/// A loaded program.
#[derive(Debug)]
pub(crate) struct Program {
    descriptor: OwnedFd,
    kind: ProgramKind,
}

/// Failure to load a program.
#[derive(Debug)]
pub(crate) struct LoadError {
    pub(crate) source: io::Error,
    /// Last lines of the verifier's log.
    pub(crate) report: String,
}

impl From<LoadError> for io::Error {
    fn from(error: LoadError) -> Self {
        match error.report.as_str() {
            "" => error.source,
            report => Self::new(error.source.kind(), format!("{}: {report}", error.source)),
        }
    }
}

/// Bytes of the kernel's `struct bpf_prog` before the instructions, at least and at most. Linux 6.18 has 96.
const PROGRAM_HEADER: [usize; 2] = [48, 192];
/// Size of a page. The kernel allocates whole pages for a program.
const PAGE: usize = 4096;
/// `r0 = 0`.
const SET_R0: [u8; 8] = [0xb7, 0, 0, 0, 0, 0, 0, 0];
/// `if r0 == 0 goto`, with a distance of 0.
const JUMP_IF_R0_IS_0: [u8; 8] = [0x15, 0, 0, 0, 0, 0, 0, 0];

/// Returns the most instructions that the verifier adds to one with this operation code.
fn growth(operation: u8) -> usize {
    match operation {
        // A call: inlined lookups in maps are the longest.
        0x85 => 32,
        // A load: fields of the context.
        0x61 | 0x69 | 0x71 | 0x79 => 4,
        _ => 0,
    }
}

/// Returns a program with the same effect, which the verifier does not need to move.
///
/// The verifier replaces calls and loads by several instructions each, and moves a program that outgrows its pages. The
/// device to which it is bound keeps the old address (`bpf_prog_realloc` and `offload->prog` in Linux 6.18). If the
/// device is removed before the program is freed, the kernel then accesses freed memory.
///
/// Instructions in front that no path reaches make room: the verifier removes them first.
fn with_room(code: &[[u8; 8]]) -> Vec<[u8; 8]> {
    let pages = |instructions: usize, header: usize| (8 * instructions + header).div_ceil(PAGE);
    let [least, most] = PROGRAM_HEADER;
    let grown = 2 + code.iter().map(|instruction| 1 + growth(instruction[0])).sum::<usize>();
    let needed = pages(grown, most);
    let mut unreached = 0;
    while pages(code.len() + unreached, least) < needed {
        unreached += 1;
    }
    // Programs of more than 32 000 instructions do not exist here.
    let Some(offset) = i16::try_from(unreached).ok().filter(|offset| *offset > 0) else { return code.to_vec() };
    let mut jump = JUMP_IF_R0_IS_0;
    jump[2..4].copy_from_slice(&offset.to_le_bytes());
    let mut all = vec![SET_R0, jump];
    all.resize(2 + unreached, SET_R0);
    all.extend_from_slice(code);
    all
}

impl Program {
    /// Loads a program. With [`DEVICE_BOUND`] in `flags` it is bound to the interface `device`.
    pub(crate) fn load(
        kind: ProgramKind,
        code: &[[u8; 8]],
        name: &str,
        flags: u32,
        device: u32,
    ) -> Result<Self, LoadError> {
        let (program_type, attach_type) = kind.types();
        let with_room = (flags & DEVICE_BOUND != 0).then(|| with_room(code));
        let code = with_room.as_deref().unwrap_or(code);
        // Kernel functions (kfuncs) may be called only by programs with a GPL-compatible licence. The kernel
        // knows this string.
        let license = c"Dual MIT/GPL";
        let bound = if flags & DEVICE_BOUND != 0 { device } else { 0 };
        let mut attribute = BpfAttr::new(&[(0, program_type), (1, code.len() as u32), (11, flags), (16, bound)])
            .pointer(2, code.as_ptr())
            .pointer(4, license.as_ptr());
        attribute.0[17] = attach_type;
        let mut name_bytes = [0u8; 16];
        let n = name.len().min(15);
        name_bytes[..n].copy_from_slice(&name.as_bytes()[..n]);
        for (word, bytes) in attribute.0[12..16].iter_mut().zip(name_bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        // SAFETY: instructions and licence outlive the call, and the counts match their lengths.
        let first = match unsafe { attribute.open(PROG_LOAD, 72) } {
            Ok(descriptor) => return Ok(Self { descriptor, kind }),
            Err(error) => error,
        };
        // Load again with a log for the error text. The verifier writes much, so the first attempt has none.
        let mut log = vec![0u8; 1 << 20];
        attribute.0[6] = 1;
        attribute.0[7] = log.len() as u32;
        let mut attribute = attribute.pointer(8, log.as_mut_ptr());
        // SAFETY: instructions, licence and log outlive the call, and the counts match their lengths.
        match unsafe { attribute.open(PROG_LOAD, 72) } {
            Ok(descriptor) => Ok(Self { descriptor, kind }),
            Err(_) => {
                let end = log.iter().position(|&b| b == 0).unwrap_or(0);
                let text = String::from_utf8_lossy(&log[..end]);
                let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("processed ")).collect();
                let report = lines[lines.len().saturating_sub(3)..].join("; ");
                Err(LoadError { source: first, report })
            }
        }
    }

    /// Attaches the program by a BPF link, until the link is dropped or the process ends.
    pub(crate) fn link(&self, interface: u32, flags: u32) -> io::Result<ProgramLink> {
        let program = self.raw_fd() as u32;
        let mut attribute = BpfAttr::new(&[(0, program), (1, interface), (2, self.kind.types().1), (3, flags)]);
        // SAFETY: the attributes hold no pointers, and BPF_LINK_CREATE returns a new descriptor.
        unsafe { attribute.open(LINK_CREATE, 32) }.map(ProgramLink)
    }

    /// Replaces the program that a link holds, atomically between two frames.
    pub(crate) fn replace(&self, link: &ProgramLink) -> io::Result<()> {
        let mut attribute = BpfAttr::new(&[(0, link.0.as_raw_fd() as u32), (1, self.raw_fd() as u32)]);
        // SAFETY: the attributes hold no pointers.
        unsafe { attribute.call(LINK_UPDATE, 16) }.map(drop)
    }

    /// Runs the program on a frame as if an interface had received it, and executes its action.
    pub(crate) fn run_live(&self, frame: &[u8], interface: u32) -> io::Result<()> {
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context = [0u32, frame.len() as u32, 0, interface, 0, 0];
        let mut attribute = BpfAttr::new(&[(0, self.raw_fd() as u32), (2, frame.len() as u32), (8, 1)])
            .pointer(4, frame.as_ptr())
            .pointer(12, context.as_ptr());
        attribute.0[10] = size_of_val(&context) as u32;
        attribute.0[16] = LIVE_FRAMES;
        attribute.0[18] = 1;
        // SAFETY: the kernel reads the frame and the context, which outlive the call with the lengths given.
        // The command writes no output.
        unsafe { attribute.call(PROG_TEST_RUN, 80) }.map(drop)
    }

    /// Runs the program on `frames` copies of a frame, and executes its action on each. The frames seem to come from
    /// the loopback interface of the calling thread's network namespace. `value` is what the program reads and writes.
    ///
    /// # Errors
    /// The program may have run on some of the frames: `EINTR` after a signal, `ENOMEM` without free pages.
    pub(crate) fn run_burst(&self, frame: &[u8], frames: u32, value: &mut MappedValue) -> io::Result<()> {
        let mut attribute =
            BpfAttr::new(&[(0, self.raw_fd() as u32), (2, frame.len() as u32), (8, frames), (16, LIVE_FRAMES)])
                .pointer(4, frame.as_ptr());
        attribute.0[18] = LIVE_BATCH;
        let _exclusive = value.bytes();
        // SAFETY: the kernel reads the frame, which outlives the call with the length given. The program accesses the
        // mapped value, which is borrowed mutably. The command writes no output.
        unsafe { attribute.call(PROG_TEST_RUN, 80) }.map(drop)
    }

    /// Runs the program on a frame and returns its action without executing it.
    #[cfg(test)]
    pub(crate) fn test_run(&self, frame: &[u8]) -> io::Result<u32> {
        let mut attribute =
            BpfAttr::new(&[(0, self.raw_fd() as u32), (2, frame.len() as u32), (8, 1)]).pointer(4, frame.as_ptr());
        // SAFETY: the kernel reads the frame, which outlives the call with the length given. The action is
        // written into the attributes.
        unsafe { attribute.call(PROG_TEST_RUN, 80) }?;
        Ok(attribute.0[1])
    }

    /// Returns the raw descriptor, to attach by netlink.
    pub(crate) fn raw_fd(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }
}

/// Returns the name of a program in the kernel.
pub(crate) fn program_name(id: u32) -> io::Result<String> {
    let mut attribute = BpfAttr::new(&[(0, id)]);
    // SAFETY: the attributes hold no pointers, and BPF_PROG_GET_FD_BY_ID returns a new descriptor.
    let program = unsafe { attribute.open(PROG_GET_FD_BY_ID, 12) }?;
    // struct bpf_prog_info: the name is 16 bytes at offset 64.
    let mut info = [0u64; 16];
    object_info(&program, &mut info)?;
    let bytes: Vec<u8> = info[8..10].iter().flat_map(|word| word.to_ne_bytes()).take_while(|&b| b != 0).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn object_info(object: &OwnedFd, info: &mut [u64; 16]) -> io::Result<()> {
    let bytes = size_of_val(info) as u32;
    let mut attribute = BpfAttr::new(&[(0, object.as_raw_fd() as u32), (1, bytes)]).pointer(2, info.as_mut_ptr());
    // SAFETY: the kernel writes at most `bytes` bytes, the size of `info`.
    unsafe { attribute.call(OBJ_GET_INFO_BY_FD, 16) }.map(drop)
}

/// BPF link that holds a program on an interface. Dropping it detaches the program.
#[derive(Debug)]
pub(crate) struct ProgramLink(OwnedFd);

impl Drop for ProgramLink {
    fn drop(&mut self) {
        // Closing the descriptor would not detach the program at once if this program is starting another one:
        // the child holds a copy of each descriptor between fork and exec. Linux before 5.9 has no
        // BPF_LINK_DETACH; there the last close detaches.
        let _ = detach_link(&self.0);
    }
}

/// Detaches the program that a link holds.
fn detach_link(link: &OwnedFd) -> io::Result<()> {
    // SAFETY: the attributes hold no pointers.
    unsafe { BpfAttr::new(&[(0, link.as_raw_fd() as u32)]).call(LINK_DETACH, 4) }.map(drop)
}

/// Detaches the program with this id that a link holds on the interface. Returns `false` if there is none.
///
/// Links of all network namespaces are listed, and interfaces of several namespaces have the same index. The id of the
/// program tells them apart.
pub(crate) fn detach_links(interface: u32, program: u32) -> io::Result<bool> {
    let (mut id, mut any) = (0, false);
    loop {
        let mut attribute = BpfAttr::new(&[(0, id)]);
        // SAFETY: the attributes hold no pointers. The kernel returns the next id in their second word.
        match unsafe { attribute.call(LINK_GET_NEXT_ID, 12) } {
            Ok(_) => id = attribute.0[1],
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(any),
            Err(error) => return Err(error),
        }
        // SAFETY: the attributes hold no pointers, and the command returns a new descriptor. A link that is
        // gone by now is skipped.
        let Ok(link) = (unsafe { BpfAttr::new(&[(0, id)]).open(LINK_GET_FD_BY_ID, 12) }) else { continue };
        // struct bpf_link_info: type, id, program; then, for XDP, the interface at offset 16.
        let mut info = [0u64; 16];
        object_info(&link, &mut info)?;
        let (kind, of, on) = (first_word(info[0]), first_word(info[1]), first_word(info[2]));
        if kind == LINK_TYPE_XDP && on == interface && of == program {
            detach_link(&link)?;
            any = true;
        }
    }
}

/// Returns the 32 bits at the lower address.
fn first_word(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use wirepath_testlab::{Lab, Requirement, require};

    use super::*;
    use crate::drivers::kernel::common::assembler::{Assembler, Register, Width};
    use crate::drivers::kernel::common::link::Interface;

    /// Loads the receive queue from `struct xdp_md`, of which the verifier makes two instructions.
    const QUEUE: i16 = 16;

    fn assemble(instructions: usize, loads: usize) -> Vec<[u8; 8]> {
        let mut a = Assembler::default();
        (0..loads).for_each(|_| a.load(Width::Word, Register::R2, Register::R1, QUEUE));
        (0..instructions - loads - 1).for_each(|_| a.set(Register::R0, 2));
        a.exit();
        a.finish().unwrap()
    }

    /// Returns the pages that the kernel has for a program.
    fn pages(program: &Program) -> usize {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", program.raw_fd())).unwrap();
        let bytes = text.lines().find_map(|line| line.strip_prefix("memlock:")).expect("the size of a program");
        bytes.trim().parse::<usize>().unwrap() / PAGE
    }

    #[test]
    fn a_bound_program_keeps_its_memory() {
        require!(all Requirement::LAB, Requirement::Kernel(6, 3));
        let lab = Lab::new("bound");
        let (here, there) = (lab.namespace("here"), lab.namespace("there"));
        lab.veth((&here, "eth0"), (&there, "eth0"));
        here.inside(|| {
            let index = Interface::find("eth0", "test").unwrap().index;
            let load = |code: &[[u8; 8]], flags| Program::load(ProgramKind::Xdp, code, "room", flags, index).unwrap();
            let mut moved = 0;
            // The end of the first page is at 500 instructions in Linux 6.18.
            for instructions in 470..530 {
                let code = assemble(instructions, 20);
                let unbound = pages(&load(&code, 0));
                let allocated = pages(&load(&assemble(instructions, 0), 0));
                moved += usize::from(unbound != allocated);
                // As many instructions that do not grow show how many pages were allocated.
                let room = pages(&load(&assemble(with_room(&code).len(), 0), 0));
                assert_eq!(pages(&load(&code, DEVICE_BOUND)), room, "{instructions} instructions");
            }
            assert!(moved > 10, "programs without room were moved: {moved}");
        });
    }

    #[test]
    fn only_programs_near_the_end_of_a_page_get_room() {
        for instructions in 21..2000 {
            let (code, roomy) = (assemble(instructions, 20), with_room(&assemble(instructions, 20)));
            assert!(roomy.ends_with(&code));
            let bytes = 8 * (instructions + 20 * 4 + 2);
            let is_near =
                (bytes + PROGRAM_HEADER[1]).div_ceil(PAGE) > (8 * instructions + PROGRAM_HEADER[0]).div_ceil(PAGE);
            assert_eq!(roomy.len() > code.len(), is_near, "{instructions}");
            let last = 8 * (roomy.len() - 2) + PROGRAM_HEADER[0];
            assert!(!is_near || last.div_ceil(PAGE) == (bytes + PROGRAM_HEADER[1]).div_ceil(PAGE));
        }
    }
}
