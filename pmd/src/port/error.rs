use std::fmt::Write;

use wirepath_packet::PoolError;

use crate::drivers::LEFT_OUT;

/// Error of opening, configuring, starting or stopping a port. It tells what failed, why, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The configuration exceeds the capabilities of the device.
    #[error("driver {driver} supports {resource} from {min} to {max}, not {requested}{hint}")]
    Unsupported {
        /// Name of the driver.
        driver: &'static str,
        /// Requested resource: `receive queues`, `transmit queues`, `mtu` or `depth`.
        resource: &'static str,
        /// Requested value.
        requested: u64,
        /// Smallest valid value.
        min: u64,
        /// Largest valid value.
        max: u64,
        /// Advice, as `"; do this"`, or empty.
        hint: String,
    },
    /// The device does not exist.
    #[error("{driver}: no device '{device}': {hint}")]
    NoDevice {
        /// Name of the driver.
        driver: &'static str,
        /// Name of the device.
        device: String,
        /// Way to find the right name.
        hint: String,
    },
    /// A privilege is missing.
    #[error("{driver}: {device}: {what} needs {needs}; {remedy}")]
    Privilege {
        /// Name of the driver.
        driver: &'static str,
        /// Name of the device.
        device: String,
        /// Operation that failed.
        what: &'static str,
        /// Missing capability or permission.
        needs: &'static str,
        /// Command that grants it.
        remedy: String,
    },
    /// The program had a privilege and gave it up after its start.
    #[error(
        "{driver}: {device}: the program gave up {capabilities} after its start; name the driver in the key \"keep\" \
         of [privileges], and start the program again"
    )]
    GivenUp {
        /// Name of the driver.
        driver: &'static str,
        /// Name of the device.
        device: String,
        /// Names of the capabilities.
        capabilities: String,
    },
    /// A system call failed.
    #[error("{driver}: {device}: {what}: {source}{hint}")]
    System {
        /// Name of the driver.
        driver: &'static str,
        /// Name of the device.
        device: String,
        /// Operation that failed.
        what: String,
        /// Error of the kernel.
        source: std::io::Error,
        /// Advice, as `"; do this"`, or empty.
        hint: String,
    },
    /// The driver cannot use the device in this configuration.
    #[error("{driver}: {device}: {reason}")]
    Refused {
        /// Name of the driver.
        driver: &'static str,
        /// Name of the device.
        device: String,
        /// Reason, and a configuration that works.
        reason: String,
    },
    /// Driver `auto` found no driver for the device.
    #[error("no driver can open '{device}':{}", list_tried(.tried))]
    NoDriver {
        /// Name of the device.
        device: String,
        /// Drivers that were tried, each with its error.
        tried: Vec<TriedDriver>,
    },
    /// A port was stopped without all of its queues.
    #[error("port '{port}' can be stopped only with all of its queues")]
    QueuesMissing {
        /// Name of the port.
        port: String,
    },
    /// The packet pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Driver that `auto` tried without success.
#[derive(Clone, Debug)]
pub struct TriedDriver {
    /// Name of the driver.
    pub driver: &'static str,
    /// Error of the driver.
    pub error: String,
    /// True if the device is of another kind than those of the driver, as an interface without an RDMA device is.
    pub is_foreign: bool,
    /// True if only a privilege is missing.
    pub is_privilege: bool,
}

/// Lists the errors of drivers, one on each line. The most likely cause comes first: the error of a driver whose kind
/// of device this is.
fn list_tried(tried: &[TriedDriver]) -> String {
    let mut text = String::new();
    for TriedDriver { error, .. } in tried.iter().filter(|tried| !tried.is_foreign) {
        // An error may have several lines itself.
        let _ = write!(text, "\n  {}", error.replace('\n', "\n  "));
    }
    let foreign: Vec<&str> = tried.iter().filter(|tried| tried.is_foreign).map(|tried| tried.driver).collect();
    if !foreign.is_empty() {
        let _ = write!(text, "\n  {}: the device is no port of a NIC of this driver", foreign.join(", "));
    }
    for driver in LEFT_OUT.iter().filter(|driver| driver.in_auto) {
        let _ = write!(text, "\n  {driver}");
    }
    text
}

impl PortError {
    /// True if only a privilege is missing.
    pub fn is_privilege(&self) -> bool {
        match self {
            Self::Privilege { .. } | Self::GivenUp { .. } => true,
            Self::NoDriver { tried, .. } => {
                let mut own = tried.iter().filter(|tried| !tried.is_foreign).peekable();
                own.peek().is_some() && own.all(|tried| tried.is_privilege)
            }
            _ => false,
        }
    }

    /// Key of a port's table that caused the error.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Unsupported { resource: "mtu", .. } => "mtu",
            Self::Unsupported { resource: "depth", .. } => "depth",
            Self::Unsupported { .. } => "queues",
            _ => "device",
        }
    }

    /// The error without driver and device, for messages that name them already.
    pub fn reason(&self) -> String {
        match self {
            Self::NoDevice { hint: reason, .. } | Self::Refused { reason, .. } => reason.clone(),
            other => other.to_string(),
        }
    }
}
