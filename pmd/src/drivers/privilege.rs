//! Missing privileges: the one text of their remedy, for all drivers and tools.

use std::path::PathBuf;

use wirepath_privileges::{CapabilitySet, capability_names, given_up};

use super::DRIVERS;
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

/// Returns the remedy for a missing capability of this program, as a part of a sentence.
pub(crate) fn remedy() -> String {
    let given_up = given_up();
    if !given_up.is_empty() {
        return format!(
            "the program gave up {} after its start; name the driver in the key \"keep\" of [privileges], and start it \
             again",
            capability_names(given_up & of_all_drivers())
        );
    }
    let program = std::env::current_exe().unwrap_or_else(|_| "PROGRAM".into());
    format!("run as root, or `{}`", setcap_command(&[program]))
}

/// Returns the capabilities that any driver needs.
fn of_all_drivers() -> CapabilitySet {
    DRIVERS.iter().fold(CapabilitySet::empty(), |all, driver| all | driver.privileges())
}

/// Returns an error if the program has given up one of these capabilities.
pub(super) fn check(driver: &'static str, device: &str, needed: CapabilitySet) -> Result<(), PortError> {
    let missing = needed & given_up();
    if missing.is_empty() {
        return Ok(());
    }
    Err(PortError::GivenUp { driver, device: device.to_owned(), capabilities: capability_names(missing) })
}

/// Returns the error for a missing capability, with the command that grants it to this program.
pub(crate) fn privilege_error(
    driver: &'static str,
    device: &str,
    what: &'static str,
    needs: &'static str,
) -> PortError {
    PortError::Privilege { driver, device: device.to_owned(), what, needs, remedy: remedy() }
}
