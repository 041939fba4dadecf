// UNSAFETY: a TAP device is set up by ioctls on `/dev/net/tun` (Documentation/networking/tuntap.rst).
#![allow(unsafe_code)]

//! One queue of a TAP device: an open `/dev/net/tun`.

use std::ffi::CStr;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, open};

/// The file behind all TAP devices.
pub(super) const FILE: &str = "/dev/net/tun";

/// Frames come and go with a `virtio_net_hdr`, without a protocol header of TUN's own.
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// What the kernel may leave to us: checksums, TCP segmentation with or without ECN.
const OFFLOADS: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// UDP segmentation (Linux 6.2).
const UDP_OFFLOADS: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// A queue: each read is a frame from the kernel, each write one to it.
#[derive(Debug)]
pub(super) struct Queue {
    file: OwnedFd,
    several: bool,
}

impl Queue {
    /// Opens a queue of the device `name`, which is made if it is not there; returns the name it really has (`%d` in it stands for a
    /// number of the kernel's choice). A device that was made by others for one queue only is taken as it is.
    pub(super) fn open(name: &str) -> io::Result<(Self, String)> {
        let file = open(FILE, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
        match attach(file.as_fd(), name, FLAGS | libc::IFF_MULTI_QUEUE) {
            Ok(name) => Ok((Self { file, several: true }, name)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let name = attach(file.as_fd(), name, FLAGS)?;
                Ok((Self { file, several: false }, name))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the device can have more queues.
    pub(super) fn is_one_of_several(&self) -> bool {
        self.several
    }

    /// Tells the kernel what it may leave undone in frames for us. Returns whether UDP segmentation is among it.
    pub(super) fn take_offloads(&self) -> io::Result<bool> {
        let set = |what: libc::c_uint| {
            // SAFETY: the argument is the value itself.
            match unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(what)) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        if set(OFFLOADS | UDP_OFFLOADS).is_ok() {
            return Ok(true);
        }
        set(OFFLOADS).map(|()| false)
    }

    /// Lets the kernel put frames into this queue, or no more. A device all of whose queues are switched off stays.
    pub(super) fn switch(&self, on: bool) -> io::Result<()> {
        // SAFETY: all zero is a valid `ifreq`.
        let mut request: libc::ifreq = unsafe { zeroed() };
        request.ifr_ifru.ifru_flags = if on { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE } as i16;
        // SAFETY: TUNSETQUEUE reads the flags of an `ifreq`.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &raw mut request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn attach(file: BorrowedFd<'_>, name: &str, flags: libc::c_int) -> io::Result<String> {
    // SAFETY: all zero is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { zeroed() };
    if name.len() >= request.ifr_name.len() || name.as_bytes().contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: TUNSETIFF reads name and flags of an `ifreq` and writes the name.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel ends names with a zero inside the array.
    Ok(unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) }.to_string_lossy().into_owned())
}
