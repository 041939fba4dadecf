use wirepath_packet::PoolError;

/// Error of opening, configuring, starting or stopping a port. It tells what failed, why, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The configuration exceeds the capabilities of the device.
    #[error("driver {driver} supports {resource} from {min} to {max}, not {requested}")]
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
    #[error("no driver can open '{device}':{}", .tried.iter().map(|(_, why)| format!("\n  {why}")).collect::<String>())]
    NoDriver {
        /// Name of the device.
        device: String,
        /// Drivers that were tried, each with its error.
        tried: Vec<(&'static str, String)>,
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

impl PortError {
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
