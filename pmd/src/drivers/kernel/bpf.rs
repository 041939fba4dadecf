// UNSAFETY: bpf(2) takes its arguments as a union that holds addresses.
#![allow(unsafe_code)]

//! As much of bpf(2) as drivers need: instructions by name, loading a program, attaching it by a link.
//!
//! A link belongs to its file descriptor: it goes when the process does, however that ends.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// One instruction (`struct bpf_insn`; RFC 9669 section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    code: u8,
    /// Destination register in the low four bits, source register above.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    /// Any instruction.
    pub(crate) const fn new(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Self {
        Self { code, registers: dst | src << 4, offset, immediate }
    }

    /// `dst = immediate` (64 bits).
    pub(crate) const fn mov(dst: u8, immediate: i32) -> Self {
        Self::new(0xb7, dst, 0, 0, immediate)
    }

    /// Returns `r0`.
    pub(crate) const fn exit() -> Self {
        Self::new(0x95, 0, 0, 0, 0)
    }
}

/// `enum bpf_prog_type` (linux/bpf.h).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramType(u32);

impl ProgramType {
    pub(crate) const SCHED_CLS: Self = Self(3);
}

/// `enum bpf_attach_type` (linux/bpf.h).
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttachType(u32);

impl AttachType {
    /// Linux 6.6.
    pub(crate) const TCX_INGRESS: Self = Self(46);
}

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;

/// `union bpf_attr`, the members of `BPF_PROG_LOAD` up to `expected_attach_type`.
#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// `union bpf_attr`, the members of `BPF_LINK_CREATE` for TCX.
#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative_fd: u32,
    padding: u32,
    expected_revision: u64,
}

/// Calls bpf(2), for commands that return a descriptor.
///
/// # Safety
/// `attributes` is the command's part of `union bpf_attr`, and the addresses in it are valid for what the command does with them.
unsafe fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: as promised; the kernel takes members behind `size` as zero.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as _) })
}

/// Loads a program. A refusal by the verifier carries the verifier's words.
pub(crate) fn load(
    name: &str,
    kind: ProgramType,
    attach: AttachType,
    instructions: &[Instruction],
) -> io::Result<OwnedFd> {
    let mut attributes = Load {
        prog_type: kind.0,
        insn_cnt: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        expected_attach_type: attach.0,
        ..Load::default()
    };
    for (to, from) in attributes.prog_name[..15].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: instructions and licence are read while the borrow lasts.
    let refused = match unsafe { bpf(BPF_PROG_LOAD, &mut attributes) } {
        Ok(program) => return Ok(program),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => return Err(error),
        Err(error) => error,
    };
    let mut log = vec![0u8; 64 << 10];
    attributes.log_level = 1;
    attributes.log_size = log.len() as u32;
    attributes.log_buf = log.as_mut_ptr() as u64;
    // SAFETY: as above, and the log may be written up to its size.
    match unsafe { bpf(BPF_PROG_LOAD, &mut attributes) } {
        Ok(program) => Ok(program),
        Err(_) => {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let text = String::from_utf8_lossy(&log[..end]);
            Err(io::Error::new(refused.kind(), format!("{refused}: {}", text.trim())))
        }
    }
}

/// Attaches a program to an interface; it stays as long as the link that comes back.
pub(crate) fn link(program: BorrowedFd<'_>, interface: u32, attach: AttachType) -> io::Result<OwnedFd> {
    let mut attributes = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        target_ifindex: interface,
        attach_type: attach.0,
        ..LinkCreate::default()
    };
    // SAFETY: no addresses in it.
    unsafe { bpf(BPF_LINK_CREATE, &mut attributes) }
}
