// UNSAFETY: the bpf(2) system call.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::Namespace;

/// Puts an interface behind a VLAN: everything it sends is tagged, only frames with that tag come in, without it. Two small programs
/// at the interface's traffic-control hooks (TCX, Linux 6.6), so that no 8021q module is needed. The tag travels in packet
/// metadata, as the kernel's own VLAN devices would send it over a veth. Ends when dropped.
#[derive(Debug)]
pub struct VlanTagger {
    _links: [OwnedFd; 2],
}

// bpf(2): commands, program types and attachment points of linux/bpf.h.
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
const TCX_PASS: i32 = 0;
const TCX_DROP: i32 = 2;

/// One instruction: opcode, registers (source in the upper half), jump or memory offset, immediate.
const fn op(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> u64 {
    code as u64 | ((src << 4 | dst) as u64) << 8 | (offset as u16 as u64) << 16 | (immediate as u32 as u64) << 32
}

const fn load_context(dst: u8, offset: i16) -> u64 {
    op(0x61, dst, 1, offset, 0)
}
const fn set(dst: u8, immediate: i32) -> u64 {
    op(0xb7, dst, 0, 0, immediate)
}
const fn call(helper: i32) -> u64 {
    op(0x85, 0, 0, 0, helper)
}
const EXIT: u64 = op(0x95, 0, 0, 0, 0);

impl VlanTagger {
    /// Starts to tag on an interface. Needs root and Linux 6.6.
    #[track_caller]
    pub fn new(namespace: &Namespace, interface: &str, vlan: u16) -> Self {
        let vlan = i32::from(vlan);
        let push = [
            set(2, i32::from(0x8100u16.to_be())),
            set(3, vlan),
            call(18), // bpf_skb_vlan_push
            set(0, TCX_PASS),
            EXIT,
        ];
        let pop = [
            load_context(2, 20),      // __sk_buff.vlan_present
            op(0x15, 2, 0, 6, 0),     // if 0, drop
            load_context(2, 24),      // __sk_buff.vlan_tci
            op(0x57, 2, 0, 0, 0xfff), // the VLAN id of it
            op(0x55, 2, 0, 3, vlan),  // if not ours, drop
            call(19),                 // bpf_skb_vlan_pop
            set(0, TCX_PASS),
            EXIT,
            set(0, TCX_DROP),
            EXIT,
        ];
        let links = namespace.inside(|| {
            [attach(interface, &push, BPF_TCX_EGRESS), attach(interface, &pop, BPF_TCX_INGRESS)]
                .map(|link| link.unwrap_or_else(|error| panic!("VLAN program on {interface}: {error}")))
        });
        Self { _links: links }
    }
}

#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    program_type: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    padding: u32,
    revision: u64,
}

fn attach(interface: &str, code: &[u64], at: u32) -> io::Result<OwnedFd> {
    let name = CString::new(interface)?;
    let license = c"Dual MIT/GPL";
    let mut log = vec![0u8; 16 << 10];
    let load = ProgramLoad {
        program_type: BPF_PROG_TYPE_SCHED_CLS,
        instructions: code.len() as u32,
        code: code.as_ptr().addr() as u64,
        license: license.as_ptr().addr() as u64,
        log_level: 1,
        log_size: log.len() as u32,
        log: log.as_mut_ptr().expose_provenance() as u64,
        expected_attach_type: at,
        ..Default::default()
    };
    let program = bpf(BPF_PROG_LOAD, &load).map_err(|error| {
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
        io::Error::other(format!("{error}: {}", String::from_utf8_lossy(&log[..end])))
    })?;
    // SAFETY: a C string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    bpf(
        BPF_LINK_CREATE,
        &LinkCreate { program: program.as_raw_fd() as u32, interface: index, attach_type: at, ..Default::default() },
    )
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads the attributes, which are laid out as `union bpf_attr`, and the memory that they point to, which
    // outlives the call; it returns a new descriptor.
    unsafe {
        let result = libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>());
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(result as libc::c_int)) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Lab, Need};

    #[test]
    fn tags_out_and_takes_only_its_own_in() {
        crate::require!(all Need::LAB, Need::Kernel(6, 6));
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
        // A packet socket looks in front of the program, so what comes in is judged by what the host answers.
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
            b.receive_where(wait, |f| f.bytes.get(12..18) == Some(&[0x81, 0, 0, 100, 8, 6])).expect("an answer");
        assert_eq!(reply.bytes[..6], [2, 0, 0, 0, 0, 7], "only the request with the right tag is answered");
    }
}
