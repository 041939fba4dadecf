// UNSAFETY: packet(7) sockets: options and addresses are passed as bytes.
#![allow(unsafe_code)]

//! Packet sockets and their options.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use libc::{c_int, c_uint};
use wirepath_wire::EtherType;
use wirepath_wire::vlan::Tag;

use crate::drivers::kernel::common::bpf::Program;

/// Distribution of frames over the receive queues of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fanout {
    /// By a symmetric hash of addresses and ports: both directions of a flow use the same queue.
    Hash,
    /// By the CPU that received the frame.
    Cpu,
    /// By the device's receive queue.
    Queue,
}

/// Returns the VLAN tag that the kernel has taken out of a frame, by the status, the TCI and the TPID of the frame.
#[inline(always)]
pub(super) fn vlan_tag(status: u32, tci: u16, tpid: u16) -> Option<Tag> {
    let is_named = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    let tpid = if is_named { EtherType(tpid) } else { EtherType::VLAN };
    (status & libc::TP_STATUS_VLAN_VALID != 0).then_some(Tag { tpid, tci })
}

/// A raw packet socket. It receives nothing before [`Socket::bind`].
#[derive(Debug)]
pub(super) struct Socket {
    descriptor: OwnedFd,
    /// Counts since the socket was made. Two threads read those of the kernel, which each read resets.
    totals: Mutex<Statistics>,
    /// The receive ring was given up.
    is_without_ring: AtomicBool,
}

/// `struct tpacket_stats_v3`. Reading it resets the kernel's counters.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct KernelStatistics {
    packets: c_uint,
    drops: c_uint,
    freezes: c_uint,
}

/// Counts of a socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Statistics {
    /// Frames for the socket, including dropped ones.
    pub(super) packets: u64,
    /// Frames that the kernel dropped, mostly because the ring was full.
    pub(super) drops: u64,
    /// Number of times that the ring was frozen because it was full.
    pub(super) freezes: u64,
}

impl Statistics {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets + other.packets,
            drops: self.drops + other.drops,
            freezes: self.freezes + other.freezes,
        }
    }
}

impl Socket {
    pub(super) fn new() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2) takes no pointers. The returned descriptor is new, so nothing else owns it.
        unsafe {
            match libc::socket(libc::AF_PACKET, kind, 0) {
                -1 => Err(io::Error::last_os_error()),
                fd => {
                    let descriptor = OwnedFd::from_raw_fd(fd);
                    Ok(Self { descriptor, totals: Mutex::default(), is_without_ring: AtomicBool::new(false) })
                }
            }
        }
    }

    /// Makes a socket of another one, whose frames somebody else sends.
    #[cfg(any(test, fuzzing))]
    pub(super) fn of_descriptor(descriptor: OwnedFd) -> Self {
        Self { descriptor, totals: Mutex::default(), is_without_ring: AtomicBool::new(false) }
    }

    /// Sets an option of level `SOL_PACKET`.
    pub(super) fn set_option<T: Copy>(&self, option: c_int, value: &T) -> io::Result<()> {
        self.setsockopt(libc::SOL_PACKET, option, value)
    }

    fn setsockopt<T: Copy>(&self, level: c_int, option: c_int, value: &T) -> io::Result<()> {
        let (address, size) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        // SAFETY: `address` and `size` describe `value`, which outlives the call. The kernel only reads it
        // and checks the size.
        match unsafe { libc::setsockopt(self.descriptor.as_raw_fd(), level, option, address, size) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn getsockopt<T: Copy + Default>(&self, level: c_int, option: c_int) -> io::Result<T> {
        let mut value = T::default();
        let mut size = size_of::<T>() as libc::socklen_t;
        let address = std::ptr::from_mut(&mut value).cast();
        // SAFETY: `address` and `size` describe `value`, which outlives the call. Callers use integer types,
        // for which all bit patterns are valid.
        match unsafe { libc::getsockopt(self.descriptor.as_raw_fd(), level, option, address, &raw mut size) } {
            0 => Ok(value),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Binds to the interface. With `protocol` `ETH_P_ALL` the socket receives its frames; with 0 it only
    /// sends.
    pub(super) fn bind(&self, interface: u32, protocol: c_int) -> io::Result<()> {
        // SAFETY: `sockaddr_ll` consists of integers, for which zero bytes are valid.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (protocol as u16).to_be();
        address.sll_ifindex = interface as c_int;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: `address` is a `sockaddr_ll` of `size` bytes that outlives the call; the kernel only reads
        // it.
        match unsafe { libc::bind(self.descriptor.as_raw_fd(), (&raw const address).cast(), size) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sets the interface promiscuous until the socket is closed.
    pub(super) fn set_promiscuous(&self, interface: u32) -> io::Result<()> {
        let membership = libc::packet_mreq {
            mr_ifindex: interface as c_int,
            mr_type: libc::PACKET_MR_PROMISC as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set_option(libc::PACKET_ADD_MEMBERSHIP, &membership)
    }

    /// Creates a fan-out group, or joins the one with this id. Returns the id; the kernel chooses an unused
    /// one for a new group.
    pub(super) fn join_fanout(&self, how: Fanout, group: Option<u16>) -> io::Result<u16> {
        let kind = match how {
            Fanout::Hash => libc::PACKET_FANOUT_HASH,
            Fanout::Cpu => libc::PACKET_FANOUT_CPU,
            Fanout::Queue => libc::PACKET_FANOUT_QM,
        };
        // The group has its own hook, to which the socket's PACKET_IGNORE_OUTGOING does not apply.
        let mut flags = kind | libc::PACKET_FANOUT_FLAG_IGNORE_OUTGOING;
        if group.is_none() {
            flags |= libc::PACKET_FANOUT_FLAG_UNIQUEID;
        }
        self.set_option(libc::PACKET_FANOUT, &(u32::from(group.unwrap_or(0)) | flags << 16))?;
        match group {
            Some(group) => Ok(group),
            None => self.getsockopt::<u32>(libc::SOL_PACKET, libc::PACKET_FANOUT).map(|value| value as u16),
        }
    }

    /// Selects the frames that the socket receives.
    pub(super) fn attach_filter(&self, what: Filter) -> io::Result<()> {
        /// `BPF_LD | BPF_W | BPF_ABS`, `BPF_JMP | BPF_JEQ | BPF_K`, `BPF_RET | BPF_K` (linux/bpf_common.h).
        const LOAD: u16 = 0x20;
        const JUMP_EQUAL: u16 = 0x15;
        const RETURN: u16 = 0x06;
        const OTHER_HOST: u32 = libc::PACKET_OTHERHOST as u32;
        let packet_type = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut program = match what {
            Filter::RejectAll => vec![step(RETURN, 0, 0, 0)],
            Filter::AcceptAll => vec![step(RETURN, 0, 0, u32::MAX)],
            Filter::ThisHost => vec![
                step(LOAD, 0, 0, packet_type),
                step(JUMP_EQUAL, 0, 1, OTHER_HOST),
                step(RETURN, 0, 0, 0),
                step(RETURN, 0, 0, u32::MAX),
            ],
        };
        if what == Filter::AcceptAll {
            // No filter program is the cheapest.
            match self.setsockopt(libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0) {
                Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
                _ => return Ok(()),
            }
        }
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        self.setsockopt(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
    }

    /// Selects the frames that the socket receives by a program.
    pub(super) fn attach_program(&self, program: &Program) -> io::Result<()> {
        self.setsockopt(libc::SOL_SOCKET, libc::SO_ATTACH_BPF, &program.raw_fd())
    }

    /// Sets the bytes of sent frames that may be queued inside the kernel.
    pub(super) fn send_buffer(&self, bytes: c_int) -> io::Result<()> {
        // SO_SNDBUFFORCE may exceed net.core.wmem_max, but needs CAP_NET_ADMIN.
        self.setsockopt(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes)
            .or_else(|_| self.setsockopt(libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes))
    }

    /// Sets the bytes of received frames that may wait inside the kernel.
    pub(super) fn receive_buffer(&self, bytes: c_int) -> io::Result<()> {
        // SO_RCVBUFFORCE may exceed net.core.rmem_max, but needs CAP_NET_ADMIN.
        self.setsockopt(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes)
            .or_else(|_| self.setsockopt(libc::SOL_SOCKET, libc::SO_RCVBUF, &bytes))
    }

    /// Returns the counts since the socket was made.
    pub(super) fn statistics(&self) -> Statistics {
        let read = self.getsockopt(libc::SOL_PACKET, libc::PACKET_STATISTICS);
        let read: KernelStatistics = read.unwrap_or_default();
        let new = Statistics { packets: read.packets.into(), drops: read.drops.into(), freezes: read.freezes.into() };
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        *totals = totals.plus(new);
        *totals
    }

    /// Removes the receive ring, which must not be mapped. Frames wait in the socket from then on.
    pub(super) fn remove_ring(&self) -> io::Result<()> {
        let none = libc::tpacket_req { tp_block_size: 0, tp_block_nr: 0, tp_frame_size: 0, tp_frame_nr: 0 };
        self.set_option(libc::PACKET_RX_RING, &none)
    }

    /// Removes the receive ring because it does not work.
    pub(super) fn give_up_ring(&self) -> io::Result<()> {
        self.remove_ring()?;
        self.is_without_ring.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether the receive ring was given up.
    pub(super) fn is_without_ring(&self) -> bool {
        self.is_without_ring.load(Ordering::Relaxed)
    }

    /// Takes a pending error such as `ENETDOWN`. Otherwise poll(2) would report it for ever.
    pub(super) fn take_error(&self) -> Option<c_int> {
        self.getsockopt::<c_int>(libc::SOL_SOCKET, libc::SO_ERROR).ok().filter(|error| *error != 0)
    }
}

/// Frames that a socket receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    /// None, while the sockets of a port are set up one after the other.
    RejectAll,
    /// Frames to this host, and broadcast and multicast frames.
    ThisHost,
    /// All frames.
    AcceptAll,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
