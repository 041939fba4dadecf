// UNSAFETY: packet(7) sockets: options and addresses are passed as bytes.
#![allow(unsafe_code)]

//! Packet sockets and their options.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, c_uint};

/// How frames are spread over the receive queues of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fanout {
    /// By a hash of addresses and ports, the same in both directions: a flow stays on its queue.
    Hash,
    /// By the CPU that received the frame.
    Cpu,
    /// By the receive queue of the device.
    Queue,
}

/// A raw packet socket that belongs to no protocol yet: nothing arrives before [`Socket::bind`].
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

/// `struct tpacket_stats_v3`. Reading it sets the kernel's counts to zero.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Statistics {
    /// Frames for the socket, the dropped ones included.
    pub(super) packets: c_uint,
    /// Frames that found no room.
    pub(super) drops: c_uint,
    /// How often the ring came to a standstill.
    pub(super) freezes: c_uint,
}

impl Socket {
    pub(super) fn new() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes no pointers; the descriptor is fresh.
        unsafe {
            match libc::socket(libc::AF_PACKET, kind, 0) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    /// An option of packet sockets.
    pub(super) fn set<T: Copy>(&self, option: c_int, value: &T) -> io::Result<()> {
        self.set_at(libc::SOL_PACKET, option, value)
    }

    fn set_at<T: Copy>(&self, level: c_int, option: c_int, value: &T) -> io::Result<()> {
        let (address, size) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        // SAFETY: the kernel reads the value and checks its size.
        match unsafe { libc::setsockopt(self.0.as_raw_fd(), level, option, address, size) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn get_at<T: Copy + Default>(&self, level: c_int, option: c_int) -> io::Result<T> {
        let mut value = T::default();
        let mut size = size_of::<T>() as libc::socklen_t;
        let address = std::ptr::from_mut(&mut value).cast();
        // SAFETY: the kernel writes at most `size` bytes; callers pass plain integers.
        match unsafe { libc::getsockopt(self.0.as_raw_fd(), level, option, address, &raw mut size) } {
            0 => Ok(value),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Joins the interface; with `protocol` `ETH_P_ALL` its frames begin to arrive, with 0 the socket only sends.
    pub(super) fn bind(&self, interface: u32, protocol: c_int) -> io::Result<()> {
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (protocol as u16).to_be();
        address.sll_ifindex = interface as c_int;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads the address.
        match unsafe { libc::bind(self.0.as_raw_fd(), (&raw const address).cast(), size) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Asks the interface to take frames for other stations too, for as long as the socket lives.
    pub(super) fn promiscuous(&self, interface: u32) -> io::Result<()> {
        let membership = libc::packet_mreq {
            mr_ifindex: interface as c_int,
            mr_type: libc::PACKET_MR_PROMISC as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set(libc::PACKET_ADD_MEMBERSHIP, &membership)
    }

    /// Opens a fan-out group, or joins the one with this id; returns the id. The kernel finds an id that nobody uses.
    pub(super) fn fan_out(&self, how: Fanout, group: Option<u16>) -> io::Result<u16> {
        let kind = match how {
            Fanout::Hash => libc::PACKET_FANOUT_HASH,
            Fanout::Cpu => libc::PACKET_FANOUT_CPU,
            Fanout::Queue => libc::PACKET_FANOUT_QM,
        };
        // The group has a hook of its own, for which the socket's PACKET_IGNORE_OUTGOING does not count.
        let mut flags = kind | libc::PACKET_FANOUT_FLAG_IGNORE_OUTGOING;
        if group.is_none() {
            flags |= libc::PACKET_FANOUT_FLAG_UNIQUEID;
        }
        self.set(libc::PACKET_FANOUT, &(u32::from(group.unwrap_or(0)) | flags << 16))?;
        match group {
            Some(group) => Ok(group),
            None => self.get_at::<u32>(libc::SOL_PACKET, libc::PACKET_FANOUT).map(|value| value as u16),
        }
    }

    /// Which frames the socket takes.
    pub(super) fn filter(&self, what: Filter) -> io::Result<()> {
        /// `BPF_LD | BPF_W | BPF_ABS`, `BPF_JMP | BPF_JEQ | BPF_K`, `BPF_RET | BPF_K` (linux/bpf_common.h).
        const LOAD: u16 = 0x20;
        const JUMP_EQUAL: u16 = 0x15;
        const RETURN: u16 = 0x06;
        const OTHER_HOST: u32 = libc::PACKET_OTHERHOST as u32;
        let packet_type = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut program = match what {
            Filter::Nothing => vec![step(RETURN, 0, 0, 0)],
            Filter::Everything => vec![step(RETURN, 0, 0, u32::MAX)],
            Filter::Own => vec![
                step(LOAD, 0, 0, packet_type),
                step(JUMP_EQUAL, 0, 1, OTHER_HOST),
                step(RETURN, 0, 0, 0),
                step(RETURN, 0, 0, u32::MAX),
            ],
        };
        if what == Filter::Everything {
            // No program at all is the cheapest.
            match self.set_at(libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0) {
                Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
                _ => return Ok(()),
            }
        }
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        self.set_at(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
    }

    /// Bytes of frames that may wait inside the kernel after they were sent.
    pub(super) fn send_buffer(&self, bytes: c_int) -> io::Result<()> {
        // FORCE may exceed net.core.wmem_max, but needs CAP_NET_ADMIN.
        self.set_at(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes)
            .or_else(|_| self.set_at(libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes))
    }

    /// What the kernel counted since the last call.
    pub(super) fn statistics(&self) -> io::Result<Statistics> {
        self.get_at(libc::SOL_PACKET, libc::PACKET_STATISTICS)
    }

    /// Takes a pending error such as `ENETDOWN` off the socket: poll(2) would report it for ever.
    pub(super) fn clear_error(&self) {
        let _ = self.get_at::<c_int>(libc::SOL_SOCKET, libc::SO_ERROR);
    }
}

/// Which frames a socket takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    /// None: while the sockets of a port are set up one after the other.
    Nothing,
    /// Those for this host, and broadcast and multicast ones.
    Own,
    /// All.
    Everything,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
