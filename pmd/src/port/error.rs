use crate::packet::PoolError;

/// Why a port could not be opened, set up, started or stopped: what was tried, what came of it, and the way out.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The configuration asks for more than the device has.
    #[error("driver {driver} offers {least} to {most} {what}, {asked} asked for")]
    Unsupported {
        /// Name of the driver.
        driver: &'static str,
        /// What was asked for: `receive queues`, `transmit queues`, `mtu` or `depth`.
        what: &'static str,
        /// How much.
        asked: u64,
        /// Least possible.
        least: u64,
        /// Most possible.
        most: u64,
    },
    /// There is no such device.
    #[error("{driver}: no device '{device}': {hint}")]
    NoDevice {
        /// Name of the driver.
        driver: &'static str,
        /// What was looked for.
        device: String,
        /// How to find the right one.
        hint: String,
    },
    /// A privilege is missing.
    #[error("{driver}: {device}: {what} needs {needs}; {remedy}")]
    Privilege {
        /// Name of the driver.
        driver: &'static str,
        /// The device.
        device: String,
        /// What was tried.
        what: &'static str,
        /// Missing capability or right.
        needs: &'static str,
        /// The command that mends it.
        remedy: String,
    },
    /// A system call failed.
    #[error("{driver}: {device}: {what}: {source}{hint}")]
    System {
        /// Name of the driver.
        driver: &'static str,
        /// The device.
        device: String,
        /// What was tried.
        what: String,
        /// What the kernel answered.
        source: std::io::Error,
        /// What to do about it, as `"; do this"`, or empty.
        hint: String,
    },
    /// The device cannot be used this way.
    #[error("{driver}: {device}: {reason}")]
    Refused {
        /// Name of the driver.
        driver: &'static str,
        /// The device.
        device: String,
        /// Why, and what would work.
        reason: String,
    },
    /// No driver of `auto` could take the device.
    #[error("no driver can open '{device}':{}", .tried.iter().map(|(_, why)| format!("\n  {why}")).collect::<String>())]
    NoDriver {
        /// The device.
        device: String,
        /// Each driver that was tried and why it failed.
        tried: Vec<(&'static str, String)>,
    },
    /// A stop without all the queues.
    #[error("port '{port}' can be stopped only with all of its own queues")]
    QueuesMissing {
        /// Name of the port.
        port: String,
    },
    /// No buffers.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl PortError {
    /// The key of a port's table that asks for what was refused.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Unsupported { what: "mtu", .. } => "mtu",
            Self::Unsupported { what: "depth", .. } => "depth",
            Self::Unsupported { .. } => "queues",
            _ => "device",
        }
    }

    /// Without driver and device in front, for who says them already.
    pub fn reason(&self) -> String {
        match self {
            Self::NoDevice { hint: reason, .. } | Self::Refused { reason, .. } => reason.clone(),
            other => other.to_string(),
        }
    }
}
