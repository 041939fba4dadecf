//! Code shared by the drivers of kernel interfaces.
//!
//! All queries go through sockets, never through `/sys/class/net`. A socket belongs to the network namespace
//! of the thread that created it. The directory shows the namespace that it was mounted in.

pub(crate) mod assembler;
pub(crate) mod bpf;
pub(crate) mod checksums;
pub(crate) mod ethtool;
pub(crate) mod link;
pub(crate) mod link_monitor;
pub(crate) mod link_probe;
pub(crate) mod namespace;
pub(crate) mod netlink;
pub(crate) mod promiscuous;
pub(crate) mod routes;
pub(crate) mod vnet_hdr;
pub(crate) mod xdp_features;

use std::io;
use std::path::PathBuf;

use crate::port::PortError;

/// Returns the command that lets these programs open every kind of port without root. CAP_IPC_LOCK is for locked
/// memory above the limit, which AF_XDP and RDMA need.
pub fn setcap_command(programs: &[PathBuf]) -> String {
    const CAPABILITIES: &str = "cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep";
    let quoted = |path: &PathBuf| {
        let path = path.display().to_string();
        let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+".contains(c));
        if plain { path } else { format!("'{}'", path.replace('\'', "'\\''")) }
    };
    let each = programs.iter().map(|program| format!(" {CAPABILITIES} {}", quoted(program)));
    std::iter::once("setcap".to_owned()).chain(each).collect()
}

/// Converts a failed system call to a port error. A missing privilege gets the remedy in its text.
pub(crate) fn system_error(driver: &'static str, device: &str, what: &'static str, source: io::Error) -> PortError {
    if matches!(source.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
        return privilege_error(driver, device, what, "CAP_NET_RAW and CAP_NET_ADMIN");
    }
    PortError::System { driver, device: device.to_owned(), what: what.to_owned(), source, hint: String::new() }
}

/// Returns the error for a missing capability, with the command that grants it to this program.
pub(crate) fn privilege_error(
    driver: &'static str,
    device: &str,
    what: &'static str,
    needs: &'static str,
) -> PortError {
    let program = std::env::current_exe().unwrap_or_else(|_| "PROGRAM".into());
    PortError::Privilege {
        driver,
        device: device.to_owned(),
        what,
        needs,
        remedy: format!("run as root, or `{}`", setcap_command(&[program])),
    }
}
