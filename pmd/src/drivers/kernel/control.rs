// UNSAFETY: asks the kernel about a network interface with ioctls on `struct ifreq` (netdevice(7)).
#![allow(unsafe_code)]

//! Questions about an interface that are cheap enough for the edge of a burst path: netlink takes the kernel's one big network lock.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// An interface of the network namespace in which this was made, whatever namespace the thread is in later.
#[derive(Debug)]
pub(crate) struct Control {
    socket: OwnedFd,
    index: libc::c_int,
}

impl Control {
    /// For the interface with this number.
    pub(crate) fn new(index: u32) -> io::Result<Self> {
        // SAFETY: takes no pointers; the descriptor is fresh.
        let socket = unsafe {
            match libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        Ok(Self { socket, index: index as libc::c_int })
    }

    /// Whether the interface is still in the namespace, by whatever name.
    pub(crate) fn exists(&self) -> bool {
        self.request().is_ok()
    }

    /// Whether frames can leave at the moment: switched on, and with carrier.
    pub(crate) fn is_up(&self) -> bool {
        let both = libc::IFF_UP | libc::IFF_RUNNING;
        // SAFETY: the kernel filled in the flags.
        self.ask(libc::SIOCGIFFLAGS).is_ok_and(|reply| i32::from(unsafe { reply.ifr_ifru.ifru_flags }) & both == both)
    }

    /// A request with the name that the interface has now: an error if it is gone.
    fn request(&self) -> io::Result<libc::ifreq> {
        // SAFETY: all zero is a valid `ifreq`.
        let mut request: libc::ifreq = unsafe { zeroed() };
        request.ifr_ifru.ifru_ifindex = self.index;
        self.call(libc::SIOCGIFNAME, &mut request)?;
        Ok(request)
    }

    fn ask(&self, what: libc::c_ulong) -> io::Result<libc::ifreq> {
        let mut request = self.request()?;
        self.call(what, &mut request)?;
        Ok(request)
    }

    fn call(&self, what: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: every caller passes one of netdevice(7)'s requests, which read and write an `ifreq`.
        match unsafe { libc::ioctl(self.socket.as_raw_fd(), what as _, std::ptr::from_mut(request)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::kernel::link::Interface;

    #[test]
    fn loopback_is_there_and_no_other_is() {
        let lo = Interface::find("lo", "test").unwrap();
        let control = Control::new(lo.index).unwrap();
        assert!(control.exists());
        assert_eq!(control.is_up(), lo.up && lo.running);
        let none = Control::new(i32::MAX as u32).unwrap();
        assert!(!none.exists() && !none.is_up());
    }
}
