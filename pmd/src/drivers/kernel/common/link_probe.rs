// UNSAFETY: queries a network interface with ioctls on `struct ifreq` (netdevice(7)).
#![allow(unsafe_code)]

//! Interface queries that are cheap enough for the edge of a burst path. Netlink requests would take the
//! kernel's global RTNL lock.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// An interface in the network namespace of the creating thread. Later namespace changes of the thread do not
/// matter.
#[derive(Debug)]
pub(crate) struct LinkProbe {
    socket: OwnedFd,
    index: libc::c_int,
}

impl LinkProbe {
    /// A probe for the interface with this index.
    pub(crate) fn new(index: u32) -> io::Result<Self> {
        // SAFETY: socket(2) takes no pointers. The returned descriptor is new, so nothing else owns it.
        let socket = unsafe {
            match libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        Ok(Self { socket, index: index as libc::c_int })
    }

    /// Returns whether the interface is still in the namespace, under any name.
    pub(crate) fn exists(&self) -> bool {
        self.request().is_ok()
    }

    /// Returns whether frames can leave now: the interface is up and has carrier.
    pub(crate) fn is_up(&self) -> bool {
        let both = libc::IFF_UP | libc::IFF_RUNNING;
        // SAFETY: SIOCGIFFLAGS succeeded, so the kernel has initialised `ifru_flags`.
        self.query(libc::SIOCGIFFLAGS).is_ok_and(|reply| i32::from(unsafe { reply.ifr_ifru.ifru_flags }) & both == both)
    }

    /// Returns a request with the current name of the interface. Fails if the interface is gone.
    fn request(&self) -> io::Result<libc::ifreq> {
        // SAFETY: `ifreq` consists of integers and a union of plain data, for which zero bytes are valid.
        let mut request: libc::ifreq = unsafe { zeroed() };
        request.ifr_ifru.ifru_ifindex = self.index;
        self.call(libc::SIOCGIFNAME, &mut request)?;
        Ok(request)
    }

    fn query(&self, what: libc::c_ulong) -> io::Result<libc::ifreq> {
        let mut request = self.request()?;
        self.call(what, &mut request)?;
        Ok(request)
    }

    fn call(&self, what: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: every caller passes a request of netdevice(7), which reads and writes one `ifreq`.
        // `request` is one and outlives the call.
        match unsafe { libc::ioctl(self.socket.as_raw_fd(), what as _, std::ptr::from_mut(request)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::kernel::common::link::Interface;

    #[test]
    fn loopback_is_there_and_no_other_is() {
        let lo = Interface::find("lo", "test").unwrap();
        let control = LinkProbe::new(lo.index).unwrap();
        assert!(control.exists());
        assert_eq!(control.is_up(), lo.up && lo.running);
        let none = LinkProbe::new(i32::MAX as u32).unwrap();
        assert!(!none.exists() && !none.is_up());
    }
}
