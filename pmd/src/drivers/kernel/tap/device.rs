// UNSAFETY: a TAP device is set up by ioctls on `/dev/net/tun` (Documentation/networking/tuntap.rst).
#![allow(unsafe_code)]

//! One queue of a TAP device: an open `/dev/net/tun`.

use std::ffi::CStr;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, open};

use crate::drivers::kernel::common::vnet_hdr;

/// Device file of all TAP devices.
pub(super) const FILE: &str = "/dev/net/tun";

/// Frames have a `virtio_net_hdr`, but no protocol header of TUN.
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// Offloads that the kernel may leave to the port: checksums, and TCP segmentation with or without ECN.
const OFFLOADS: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// UDP segmentation (Linux 6.2).
const UDP_OFFLOADS: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// Segmentation inside UDP tunnels, with outer checksums: `TUN_F_UDP_TUNNEL_GSO` and `TUN_F_UDP_TUNNEL_GSO_CSUM`
/// of linux/if_tun.h (Linux 6.17).
const TUNNEL_OFFLOADS: libc::c_uint = 0x080 | 0x100;

/// Offloads that the kernel supports beyond those that every kernel has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Supported {
    /// UDP segmentation.
    pub(super) udp: bool,
    /// Segmentation inside UDP tunnels. The virtio header is a longer one.
    pub(super) tunnel: bool,
}

impl Supported {
    /// Returns the bytes of the virtio header.
    pub(super) fn header_len(self) -> usize {
        if self.tunnel { vnet_hdr::TUNNEL_HEADER } else { vnet_hdr::HEADER }
    }
}

/// A queue. Each read returns a frame from the kernel, each write passes one to it.
#[derive(Debug)]
pub(super) struct TapQueue {
    file: OwnedFd,
    multi_queue: bool,
}

impl TapQueue {
    /// Opens a queue of the device `name` and creates the device if it does not exist. Returns the actual
    /// name: the kernel replaces `%d` by a number. An existing single-queue device is used as such.
    pub(super) fn open(name: &str) -> io::Result<(Self, String)> {
        let file = open(FILE, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        match attach(file.as_fd(), name, FLAGS | libc::IFF_MULTI_QUEUE) {
            Ok(name) => Ok((Self { file, multi_queue: true }, name)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let name = attach(file.as_fd(), name, FLAGS)?;
                Ok((Self { file, multi_queue: false }, name))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns whether the device supports several queues.
    pub(super) fn is_multi_queue(&self) -> bool {
        self.multi_queue
    }

    /// Enables the offloads, with those of tunnels if `tunnel` is set. Returns those that the kernel supports.
    pub(super) fn enable_offloads(&self, tunnel: bool) -> io::Result<Supported> {
        let set = |what: libc::c_uint| {
            // SAFETY: TUNSETOFFLOAD takes its argument by value.
            match unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(what)) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        if tunnel {
            // The offloads need the longer header.
            self.set_header_len(vnet_hdr::TUNNEL_HEADER)?;
            if set(OFFLOADS | UDP_OFFLOADS | TUNNEL_OFFLOADS).is_ok() {
                return Ok(Supported { udp: true, tunnel: true });
            }
        }
        let udp = set(OFFLOADS | UDP_OFFLOADS).is_ok();
        if !udp {
            set(OFFLOADS)?;
        }
        self.set_header_len(vnet_hdr::HEADER)?;
        Ok(Supported { udp, tunnel: false })
    }

    /// Sets the length of the virtio header of the device.
    fn set_header_len(&self, len: usize) -> io::Result<()> {
        let len = len as libc::c_int;
        // SAFETY: TUNSETVNETHDRSZ reads one integer, which outlives the call.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns whether the queue still belongs to a device. The device may be in another network namespace.
    pub(super) fn has_device(&self) -> bool {
        // SAFETY: `ifreq` consists of integers and a union of plain data, for which zero bytes are valid.
        let mut request: libc::ifreq = unsafe { zeroed() };
        // SAFETY: TUNGETIFF writes the name and flags of one `ifreq`. `request` is one and outlives the call.
        unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNGETIFF, &raw mut request) == 0 }
    }

    /// Attaches or detaches the queue. A device with detached queues only continues to exist.
    pub(super) fn set_enabled(&self, on: bool) -> io::Result<()> {
        // SAFETY: `ifreq` consists of integers and a union of plain data, for which zero bytes are valid.
        let mut request: libc::ifreq = unsafe { zeroed() };
        request.ifr_ifru.ifru_flags = if on { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE } as i16;
        // SAFETY: TUNSETQUEUE reads the flags of one `ifreq`. `request` is one and outlives the call.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &raw mut request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for TapQueue {
    /// Detaches the queue. A child process holds a copy of the descriptor until its exec(2), and the queue stays open
    /// so long. The kernel would go on to send frames to it.
    fn drop(&mut self) {
        if self.multi_queue {
            let _ = self.set_enabled(false);
        }
    }
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn attach(file: BorrowedFd<'_>, name: &str, flags: libc::c_int) -> io::Result<String> {
    // SAFETY: `ifreq` consists of integers and a union of plain data, for which zero bytes are valid.
    let mut request: libc::ifreq = unsafe { zeroed() };
    if name.len() >= request.ifr_name.len() || name.as_bytes().contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: TUNSETIFF reads the name and flags of one `ifreq` and writes its name. `request` is one and
    // outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel terminates the name with a zero byte inside the array.
    Ok(unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) }.to_string_lossy().into_owned())
}
