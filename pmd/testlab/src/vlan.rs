// UNSAFETY: the bpf(2) system call.
#![allow(unsafe_code)]

//! A VLAN on an interface of a test, by BPF programs.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::Namespace;

/// Puts an interface into a VLAN. Sent frames are tagged. Received frames with this tag are untagged, and all others
/// are dropped.
///
/// Two BPF programs at the tc hooks of the interface (TCX, Linux 6.6) do this, so the 8021q module is not
/// needed. The tag is in the packet metadata (`vlan_tci`), like that of the kernel's VLAN devices on a veth. Dropping
/// this value detaches the programs.
#[derive(Debug)]
pub struct VlanTagger {
    links: [OwnedFd; 2],
}

// Commands, program types, attach types, return codes and helper functions of bpf(2) (linux/bpf.h).
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_DETACH: libc::c_long = 34;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
const TCX_PASS: i32 = 0;
const TCX_DROP: i32 = 2;
const BPF_FUNC_SKB_VLAN_PUSH: i32 = 18;
const BPF_FUNC_SKB_VLAN_POP: i32 = 19;
/// Offset of `__sk_buff.vlan_present`.
const SKB_VLAN_PRESENT: i16 = 20;
/// Offset of `__sk_buff.vlan_tci`.
const SKB_VLAN_TCI: i16 = 24;

/// Encodes a BPF instruction (RFC 9669 section 3). `offset` is a memory offset, or the number of instructions to skip.
const fn instruction(opcode: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> u64 {
    opcode as u64 | ((src << 4 | dst) as u64) << 8 | (offset as u16 as u64) << 16 | (immediate as u32 as u64) << 32
}

/// Loads a 32-bit field of the context (`struct __sk_buff`, register 1).
const fn load_skb_field(dst: u8, offset: i16) -> u64 {
    instruction(0x61, dst, 1, offset, 0)
}
/// Sets a register to a constant.
const fn set_register(dst: u8, immediate: i32) -> u64 {
    instruction(0xb7, dst, 0, 0, immediate)
}
/// Calls a helper function of the kernel.
const fn call_helper(helper: i32) -> u64 {
    instruction(0x85, 0, 0, 0, helper)
}
const EXIT: u64 = instruction(0x95, 0, 0, 0, 0);

impl VlanTagger {
    /// Attaches the programs to an interface. Needs root and Linux 6.6.
    #[track_caller]
    pub fn new(namespace: &Namespace, interface: &str, vlan: u16) -> Self {
        let vlan = i32::from(vlan);
        let push = [
            set_register(2, i32::from(0x8100u16.to_be())),
            set_register(3, vlan),
            call_helper(BPF_FUNC_SKB_VLAN_PUSH),
            set_register(0, TCX_PASS),
            EXIT,
        ];
        let pop = [
            load_skb_field(2, SKB_VLAN_PRESENT),
            instruction(0x15, 2, 0, 6, 0), // if it is 0, skip to TCX_DROP
            load_skb_field(2, SKB_VLAN_TCI),
            instruction(0x57, 2, 0, 0, 0xfff), // bits of the VLAN ID
            instruction(0x55, 2, 0, 3, vlan),  // if it is another VLAN, skip to TCX_DROP
            call_helper(BPF_FUNC_SKB_VLAN_POP),
            set_register(0, TCX_PASS),
            EXIT,
            set_register(0, TCX_DROP),
            EXIT,
        ];
        let links = namespace.inside(|| {
            [attach(interface, &push, BPF_TCX_EGRESS), attach(interface, &pop, BPF_TCX_INGRESS)]
                .map(|link| link.unwrap_or_else(|error| panic!("VLAN program on {interface}: {error}")))
        });
        Self { links }
    }
}

impl Drop for VlanTagger {
    /// Detaches the programs. A child process of another test may hold copies of the descriptors until its exec(2).
    fn drop(&mut self) {
        for link in &self.links {
            let attributes = [link.as_raw_fd() as u32, 0];
            // SAFETY: the attributes are the start of `union bpf_attr`, without pointers, and outlive the call.
            let result = unsafe {
                libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, &raw const attributes, size_of_val(&attributes))
            };
            assert!(result == 0 || std::thread::panicking(), "detaching: {}", io::Error::last_os_error());
        }
    }
}

/// Start of `union bpf_attr` for [`BPF_PROG_LOAD`], with the kernel's field names.
#[repr(C)]
#[derive(Default)]
struct ProgLoadAttr {
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

/// Start of `union bpf_attr` for [`BPF_LINK_CREATE`] of a TCX program, with the kernel's field names.
#[repr(C)]
#[derive(Default)]
struct LinkCreateAttr {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative_fd: u32,
    padding: u32,
    expected_revision: u64,
}

/// Loads a program and attaches it to an interface. The program stays attached while the returned link is open.
fn attach(interface: &str, instructions: &[u64], attach_type: u32) -> io::Result<OwnedFd> {
    let name = CString::new(interface)?;
    let license = c"Dual MIT/GPL";
    let mut log = vec![0u8; 16 << 10];
    let load = ProgLoadAttr {
        prog_type: BPF_PROG_TYPE_SCHED_CLS,
        insn_cnt: instructions.len() as u32,
        insns: instructions.as_ptr().addr() as u64,
        license: license.as_ptr().addr() as u64,
        log_level: 1,
        log_size: log.len() as u32,
        log_buf: log.as_mut_ptr().expose_provenance() as u64,
        expected_attach_type: attach_type,
        ..Default::default()
    };
    let program = bpf(BPF_PROG_LOAD, &load).map_err(|error| {
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
        io::Error::other(format!("{error}: {}", String::from_utf8_lossy(&log[..end])))
    })?;
    // SAFETY: `name` is a C string that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    bpf(
        BPF_LINK_CREATE,
        &LinkCreateAttr {
            prog_fd: program.as_raw_fd() as u32,
            target_ifindex: index,
            attach_type,
            ..Default::default()
        },
    )
}

/// Calls bpf(2). Returns the file descriptor that the command creates. `T` must be laid out as `union bpf_attr`.
fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the attributes are laid out as `union bpf_attr`. The memory that they point to outlives the
    // call, and the commands return a new file descriptor.
    unsafe {
        let result = libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>());
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(result as libc::c_int)) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Lab, Requirement};

    #[test]
    fn sent_frames_are_tagged_and_other_tags_dropped() {
        crate::require!(all Requirement::LAB, Requirement::Kernel(6, 6));
        let lab = Lab::new("vlan");
        let (host, trunk) = (lab.namespace("host"), lab.namespace("trunk"));
        lab.veth((&host, "eth0"), (&trunk, "eth0"));
        let _tagger = VlanTagger::new(&host, "eth0", 100);
        let (a, mut b) = (host.frames("eth0"), trunk.frames("eth0"));
        let frame =
            |tag: &[u8], last: u8| [&[0xff; 6], &[2, 0, 0, 0, 0, 1][..], tag, &[0x88, 0xb5], &[last; 50]].concat();
        let wait = Duration::from_secs(5);
        a.send(&frame(&[], 1)).unwrap();
        assert_eq!(b.receive(wait).unwrap().bytes, frame(&[0x81, 0, 0, 100], 1), "tagged on the way out");
        // A packet socket sees frames before the program does. The reply of the host shows which frames
        // passed.
        host.ip("addr add 192.0.2.1/24 dev eth0");
        let request = |tag: &[u8], sender: u8| {
            let arp =
                [&[0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, sender, 192, 0, 2, sender][..], &[0; 6], &[192, 0, 2, 1]]
                    .concat();
            [&[0xff; 6], &[2, 0, 0, 0, 0, sender][..], tag, &[8, 6], &arp, &[0; 18]].concat()
        };
        let _ = b.drain();
        b.send(&request(&[], 5)).unwrap();
        b.send(&request(&[0x81, 0, 0, 101], 6)).unwrap();
        b.send(&request(&[0x81, 0, 0, 100], 7)).unwrap();
        let reply =
            b.receive_where(wait, |f| f.bytes.get(12..18) == Some(&[0x81, 0, 0, 100, 8, 6])).expect("an ARP reply");
        assert_eq!(reply.bytes[..6], [2, 0, 0, 0, 0, 7], "only the request with the right tag is answered");
    }
}
