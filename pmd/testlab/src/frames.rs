// UNSAFETY: packet sockets, for which no safe crate is available.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// `PACKET_IGNORE_OUTGOING` (linux/if_packet.h), which `libc` lacks.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// Bytes of the longest frame from the kernel: a superframe.
const LONGEST: usize = 70_000;
const BUFFER: libc::c_int = 64 << 20;

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Bytes without the frame check sequence. A stripped VLAN tag is reinserted.
    pub bytes: Vec<u8>,
    /// True if the kernel left the transport checksum incomplete (`TP_STATUS_CSUMNOTREADY`).
    pub checksum_pending: bool,
}

/// Raw frames of an interface: a promiscuous packet socket (packet(7)) that does not see frames sent by this
/// machine.
#[derive(Debug)]
pub struct FramePort {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl FramePort {
    /// Opens an interface in the network namespace of the calling thread.
    pub fn open(interface: &str) -> io::Result<Self> {
        let name = CString::new(interface)?;
        let everything = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: `name` is a C string, and `address` and `member` are initialised structures of the types
        // and sizes that the calls expect. The descriptor of socket(2) is new, so nothing else owns it.
        unsafe {
            let index = libc::if_nametoindex(name.as_ptr());
            if index == 0 {
                return Err(io::Error::last_os_error());
            }
            // Protocol 0: nothing arrives before bind(2) selects the interface.
            let fd = check(libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0))?;
            let port = Self { socket: OwnedFd::from_raw_fd(fd), buffer: vec![0; LONGEST] };
            port.option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &BUFFER)?;
            port.option(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &BUFFER)?;
            port.option(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1)?;
            port.option(libc::SOL_PACKET, libc::PACKET_AUXDATA, &1)?;
            let mut member: libc::packet_mreq = zeroed();
            member.mr_ifindex = index as i32;
            member.mr_type = libc::PACKET_MR_PROMISC as u16;
            port.option(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &member)?;
            let mut address: libc::sockaddr_ll = zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = everything;
            address.sll_ifindex = index as i32;
            let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            check(libc::bind(fd, (&raw const address).cast(), size))?;
            Ok(port)
        }
    }

    fn option<T>(&self, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
        let size = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel reads `size` bytes of `value`, which outlives the call.
        check(unsafe { libc::setsockopt(self.socket.as_raw_fd(), level, name, (&raw const *value).cast(), size) })
            .map(drop)
    }

    /// Sends a frame. Waits while the kernel's queue is full.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        loop {
            // SAFETY: the kernel reads `frame.len()` bytes of `frame`, which outlives the call.
            let sent = unsafe { libc::send(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::ENOBUFS | libc::EAGAIN) => std::thread::sleep(Duration::from_micros(100)),
                Some(libc::EINTR) => {}
                _ => return Err(error),
            }
        }
    }

    /// Returns the next frame, or `None` if there is none within `limit`.
    pub fn receive(&mut self, limit: Duration) -> Option<Frame> {
        let mut ready = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let millis = limit.as_millis().min(i32::MAX as u128) as libc::c_int;
        // SAFETY: `ready` is one `pollfd` and outlives the call.
        if unsafe { libc::poll(&raw mut ready, 1, millis) } <= 0 {
            return None;
        }
        self.take()
    }

    /// Returns the next frame that `wanted` accepts and drops others. `None` if there is none within `limit`.
    pub fn receive_where(&mut self, limit: Duration, mut wanted: impl FnMut(&Frame) -> bool) -> Option<Frame> {
        let end = Instant::now() + limit;
        loop {
            let frame = self.receive(end.saturating_duration_since(Instant::now()));
            match frame {
                Some(frame) if wanted(&frame) => return Some(frame),
                Some(_) => {}
                None if Instant::now() >= end => return None,
                None => {}
            }
        }
    }

    /// Returns all queued frames without waiting.
    pub fn drain(&mut self) -> Vec<Frame> {
        std::iter::from_fn(|| self.take()).collect()
    }

    fn take(&mut self) -> Option<Frame> {
        // SAFETY: `msghdr` consists of integers and raw pointers, for which zero bytes are valid; so are they
        // for integers.
        let (mut message, mut control): (libc::msghdr, [u64; 16]) = unsafe { (zeroed(), zeroed()) };
        let mut part = libc::iovec { iov_base: self.buffer.as_mut_ptr().cast(), iov_len: self.buffer.len() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: every pointer in `message` is valid for its length and outlives the call.
        let got = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let mut bytes = self.buffer.get(..usize::try_from(got).ok()?)?.to_vec();
        let mut checksum_pending = false;
        // SAFETY: the kernel has filled `message`. The CMSG macros walk the control messages inside
        // `control`, and the data are read unaligned.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(&raw const message);
            while !at.is_null() {
                if ((*at).cmsg_level, (*at).cmsg_type) == (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
                    let aux: libc::tpacket_auxdata =
                        libc::CMSG_DATA(at).cast::<libc::tpacket_auxdata>().read_unaligned();
                    checksum_pending = aux.tp_status & libc::TP_STATUS_CSUMNOTREADY != 0;
                    if aux.tp_status & libc::TP_STATUS_VLAN_VALID != 0 && bytes.len() >= 12 {
                        let tag = if aux.tp_status & libc::TP_STATUS_VLAN_TPID_VALID != 0 {
                            aux.tp_vlan_tpid
                        } else {
                            0x8100
                        };
                        let inserted = [tag.to_be_bytes(), aux.tp_vlan_tci.to_be_bytes()].concat();
                        bytes.splice(12..12, inserted);
                    }
                }
                at = libc::CMSG_NXTHDR(&raw const message, at);
            }
        }
        Some(Frame { bytes, checksum_pending })
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
