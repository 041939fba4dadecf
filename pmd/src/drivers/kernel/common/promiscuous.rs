// UNSAFETY: PACKET_ADD_MEMBERSHIP takes a structure that only libc declares.
#![allow(unsafe_code)]

//! Promiscuous mode that ends with the process.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Keeps an interface promiscuous until it is dropped. The kernel counts these memberships per socket and
/// removes them with the socket. A killed process therefore leaves no interface promiscuous (packet(7)).
#[derive(Debug)]
pub(crate) struct Promiscuous {
    _socket: OwnedFd,
}

impl Promiscuous {
    /// Makes the interface promiscuous.
    pub(crate) fn on(interface: u32) -> io::Result<Self> {
        // Protocol 0: the socket receives no frames itself.
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        let request = libc::packet_mreq {
            mr_ifindex: interface as libc::c_int,
            mr_type: libc::PACKET_MR_PROMISC as libc::c_ushort,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        // SAFETY: the kernel reads one `packet_mreq`. `request` is one, its size is passed, and it outlives
        // the call.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const request).cast(),
                size_of_val(&request) as libc::socklen_t,
            )
        };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { _socket: socket }) }
    }
}
