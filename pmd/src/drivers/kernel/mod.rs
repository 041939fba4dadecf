//! What the drivers that sit on the kernel's network stack share.
//!
//! Everything is asked through sockets, never through `/sys/class/net`: a socket belongs to the network namespace of the thread that
//! made it, while that directory shows the namespace that it was mounted in.

pub(crate) mod bpf;
pub(crate) mod checksums;
pub(crate) mod control;
pub(crate) mod ethtool;
pub(crate) mod link;
pub(crate) mod netlink;
pub(crate) mod promiscuous;
pub(crate) mod routes;
pub(crate) mod vnet;
pub(crate) mod watch;
pub(crate) mod xdp_features;

use std::io;

use crate::port::PortError;

/// A failed system call as a port's error; a missing privilege gets its remedy.
pub(crate) fn system(driver: &'static str, device: &str, what: &'static str, source: io::Error) -> PortError {
    if matches!(source.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
        return privilege(driver, device, what, "CAP_NET_RAW and CAP_NET_ADMIN");
    }
    PortError::System { driver, device: device.to_owned(), what: what.to_owned(), source, hint: String::new() }
}

/// The error for a missing capability, with the command that grants it to this program.
pub(crate) fn privilege(driver: &'static str, device: &str, what: &'static str, needs: &'static str) -> PortError {
    let program = std::env::current_exe().map_or_else(|_| "PROGRAM".to_owned(), |path| path.display().to_string());
    PortError::Privilege {
        driver,
        device: device.to_owned(),
        what,
        needs,
        remedy: format!("run as root, or `setcap cap_net_raw,cap_net_admin,cap_bpf+ep {program}`"),
    }
}
