//! Code shared by the drivers of kernel interfaces.
//!
//! All queries go through sockets, never through `/sys/class/net`. A socket belongs to the network namespace
//! of the thread that created it. The directory shows the namespace that it was mounted in.

#[cfg(feature = "kernel")]
pub(crate) mod assembler;
#[cfg(feature = "kernel")]
pub(crate) mod bifurcation;
#[cfg(feature = "kernel")]
pub(crate) mod bpf;
#[cfg(feature = "kernel")]
pub(crate) mod checksums;
#[cfg(feature = "kernel")]
pub(crate) mod datagrams;
pub(crate) mod ethtool;
#[cfg(feature = "kernel")]
pub(crate) mod frame_buffers;
pub(crate) mod link;
#[cfg(any(feature = "kernel", feature = "nic"))]
pub(crate) mod link_monitor;
#[cfg(feature = "kernel")]
pub(crate) mod link_probe;
#[cfg(feature = "kernel")]
pub(crate) mod mapping;
#[cfg(feature = "kernel")]
pub(crate) mod namespace;
pub(crate) mod netlink;
#[cfg(feature = "kernel")]
pub(crate) mod promiscuous;
pub(crate) mod routes;
#[cfg(feature = "kernel")]
pub(crate) mod vnet_hdr;
#[cfg(feature = "kernel")]
pub(crate) mod xdp_features;

use std::io;

pub(crate) use crate::drivers::privilege::privilege_error;
use crate::port::PortError;

/// Converts a failed system call to a port error. A missing privilege gets the remedy in its text.
pub(crate) fn system_error(driver: &'static str, device: &str, what: &'static str, source: io::Error) -> PortError {
    if matches!(source.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
        return privilege_error(driver, device, what, "CAP_NET_RAW and CAP_NET_ADMIN");
    }
    PortError::System { driver, device: device.to_owned(), what: what.to_owned(), source, hint: String::new() }
}

/// Refuses an MTU above that of the interface.
pub(crate) fn check_mtu(driver: &'static str, interface: &link::Interface, mtu: u16) -> Result<(), PortError> {
    if interface.mtu >= mtu.into() {
        return Ok(());
    }
    Err(PortError::Unsupported {
        driver,
        resource: "mtu",
        requested: mtu.into(),
        min: 68,
        max: interface.mtu.into(),
        hint: format!("; `ip link set dev {} mtu {mtu}`", interface.name),
    })
}
