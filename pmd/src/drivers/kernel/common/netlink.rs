//! The subset of netlink that drivers need: requests, replies, notifications and attributes. Format:
//! `linux/netlink.h`, RFC 3549.

use std::io;
use std::os::fd::OwnedFd;
#[cfg(feature = "kernel")]
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::netlink::{self, SocketAddrNetlink};
#[cfg(feature = "kernel")]
use rustix::net::sockopt;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `NLM_F_ACK`.
const ACK: u16 = 4;
/// `NLM_F_DUMP`: returns all objects of a kind.
pub(crate) const DUMP: u16 = 0x300;
/// `NLM_F_DUMP_INTR`: the objects changed during the dump, so that it may be inconsistent.
const DUMP_INTERRUPTED: u16 = 0x10;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER: usize = 16;

/// Length of `struct ifinfomsg`.
pub(crate) const IFINFOMSG: usize = 16;

/// A netlink socket in the network namespace of the thread that created it.
#[derive(Debug)]
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a `NETLINK_ROUTE` socket.
    pub(crate) fn route() -> io::Result<Self> {
        Self::open(None, 0)
    }

    /// Opens a `NETLINK_ROUTE` socket that receives multicast groups (`RTMGRP_*`).
    pub(crate) fn route_groups(groups: u32) -> io::Result<Self> {
        Self::open(None, groups)
    }

    /// Opens a `NETLINK_GENERIC` socket.
    pub(crate) fn generic() -> io::Result<Self> {
        Self::open(Some(netlink::GENERIC), 0)
    }

    fn open(protocol: Option<Protocol>, groups: u32) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        // The kernel sends dumps in messages of at most 32 KiB.
        Ok(Self { socket, sequence: 0, buffer: vec![0; 1 << 16] })
    }

    /// Sets the size of the receive buffer in bytes. Without `CAP_NET_ADMIN` the limit `net.core.rmem_max` applies.
    #[cfg(feature = "kernel")]
    pub(crate) fn set_receive_buffer(&mut self, bytes: usize) -> io::Result<()> {
        match sockopt::set_socket_recv_buffer_size_force(&self.socket, bytes) {
            Err(rustix::io::Errno::PERM) => Ok(sockopt::set_socket_recv_buffer_size(&self.socket, bytes)?),
            set => Ok(set?),
        }
    }

    /// Returns the socket, to wait for notifications.
    #[cfg(feature = "kernel")]
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a request and passes the type and body of each reply to `each`, until the kernel ends the reply.
    /// Returns the error that the kernel reports.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.exchange(kind, flags, body, |message| each(message.kind, message.body))
    }

    /// Requests all objects of a kind. Returns whether the dump is consistent: false if the objects changed meanwhile.
    #[cfg(feature = "kernel")]
    pub(crate) fn dump(&mut self, kind: u16, body: &[u8], mut each: impl FnMut(u16, &[u8])) -> io::Result<bool> {
        let mut interrupted = false;
        self.exchange(kind, DUMP, body, |message| {
            interrupted |= message.flags & DUMP_INTERRUPTED != 0;
            if message.kind != NLMSG_DONE {
                each(message.kind, message.body);
            }
        })?;
        Ok(!interrupted)
    }

    /// Sends a request and passes the replies to `each`, with the message that ends a dump.
    fn exchange(&mut self, kind: u16, flags: u16, body: &[u8], mut each: impl FnMut(&Message<'_>)) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&(flags | REQUEST | ACK).to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&0u32.to_ne_bytes());
        message.extend_from_slice(body);
        send(&self.socket, &message, SendFlags::empty())?;
        loop {
            let (_, got) = recv(&self.socket, &mut self.buffer[..], RecvFlags::TRUNC)?;
            if got > self.buffer.len() {
                return Err(io::Error::other("a netlink reply is longer than 64 KiB"));
            }
            for message in Messages(&self.buffer[..got]) {
                if message.sequence != self.sequence {
                    continue;
                }
                match message.kind {
                    NLMSG_DONE => {
                        // The body is the error that ended the dump early, or the number of bytes.
                        if let Some(error) = read_i32(message.body, 0).filter(|error| *error < 0) {
                            return Err(io::Error::from_raw_os_error(error.saturating_neg()));
                        }
                        each(&message);
                        return Ok(());
                    }
                    NLMSG_ERROR => {
                        return match read_i32(message.body, 0) {
                            Some(0) => Ok(()),
                            Some(error) => Err(io::Error::from_raw_os_error(error.saturating_neg())),
                            None => Err(io::ErrorKind::InvalidData.into()),
                        };
                    }
                    _ => each(&message),
                }
            }
        }
    }

    /// Passes each queued notification to `each`, without blocking. `ENOBUFS` means that the kernel dropped
    /// notifications.
    pub(crate) fn notifications(&mut self, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        while self.notifications_up_to(usize::MAX, &mut each)? {}
        Ok(())
    }

    /// Passes the notifications of at most `limit` datagrams to `each`, as [`Self::notifications`] does. Returns
    /// whether the limit was reached.
    pub(crate) fn notifications_up_to(&mut self, limit: usize, mut each: impl FnMut(u16, &[u8])) -> io::Result<bool> {
        for _ in 0..limit {
            match recv(&self.socket, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                Ok((got, _)) => Messages(&self.buffer[..got]).for_each(|message| each(message.kind, message.body)),
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

struct Message<'b> {
    kind: u16,
    #[cfg_attr(not(feature = "kernel"), allow(dead_code, reason = "only dumps of tables use it"))]
    flags: u16,
    sequence: u32,
    body: &'b [u8],
}

/// Iterates over the messages of a datagram. Ends at the first malformed one.
struct Messages<'b>(&'b [u8]);

impl<'b> Iterator for Messages<'b> {
    type Item = Message<'b>;

    fn next(&mut self) -> Option<Message<'b>> {
        let bytes = self.0;
        let len = read_u32(bytes, 0)? as usize;
        let body = bytes.get(HEADER..len)?;
        self.0 = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind: read_u16(bytes, 4)?, flags: read_u16(bytes, 6)?, sequence: read_u32(bytes, 8)?, body })
    }
}

/// Iterates over attributes (`struct nlattr`, `struct rtattr`) as type and value. Ends at the first malformed
/// one.
#[derive(Clone, Copy)]
pub(crate) struct Attributes<'b>(pub(crate) &'b [u8]);

impl<'b> Iterator for Attributes<'b> {
    type Item = (u16, &'b [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.0;
        let len = usize::from(read_u16(bytes, 0)?);
        let value = bytes.get(4..len)?;
        self.0 = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        // The two highest bits are flags: nested attribute, network byte order.
        Some((read_u16(bytes, 2)? & 0x3fff, value))
    }
}

impl<'b> Attributes<'b> {
    /// Returns the attributes behind a header of `header` bytes.
    pub(crate) fn after_header(body: &'b [u8], header: usize) -> Self {
        Self(body.get(header..).unwrap_or_default())
    }

    /// Returns the value of the first attribute of this type.
    pub(crate) fn find(mut self, kind: u16) -> Option<&'b [u8]> {
        Iterator::find(&mut self, |(k, _)| *k == kind).map(|(_, value)| value)
    }
}

/// Appends an attribute.
pub(crate) fn put(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    to.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    to.extend_from_slice(&kind.to_ne_bytes());
    to.extend_from_slice(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// Returns a `struct ifinfomsg` for an interface. The kernel sets those bits of `flags` that are set in
/// `change`.
pub(crate) fn ifinfomsg(index: u32, flags: u32, change: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    for word in [index, flags, change] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}

pub(crate) fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(crate) fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn read_i32(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Returns a string attribute up to its zero byte.
pub(crate) fn read_string(value: &[u8]) -> String {
    let end = value.iter().position(|&b| b == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_a_round_trip_and_end_at_nonsense() {
        let mut bytes = Vec::new();
        put(&mut bytes, 3, b"eth0\0");
        put(&mut bytes, 4, &1500u32.to_ne_bytes());
        assert_eq!(read_string(Attributes(&bytes).find(3).unwrap()), "eth0");
        assert_eq!(read_u32(Attributes(&bytes).find(4).unwrap(), 0), Some(1500));
        for cut in 0..bytes.len() {
            Attributes(&bytes[..cut]).for_each(drop);
        }
        // A length of zero would loop for ever; a length beyond the buffer would read out of bounds.
        for len in [0u16, 3, 200] {
            bytes[..2].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(Attributes(&bytes).count(), 0);
        }
    }
}
