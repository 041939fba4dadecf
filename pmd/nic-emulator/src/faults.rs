//! Fault injection: failures of a device or of the kernel at a chosen moment.
//!
//! | `kind` | keys | effect |
//! |---|---|---|
//! | `refuse` | `command`, `errno` | the kernel refuses the command |
//! | `port-held` | `port`, `errno` (`EBUSY`, `ENODEV`) | the kernel's own driver holds the port |
//! | `port-freed` | `port` | the kernel's own driver releases the port |
//! | `port-down`, `port-up` | `port` | link event |
//! | `device-fatal` | | device reset: queues stop, commands fail with `EIO` until the device is reopened |
//! | `completion-error` | `code`, `queue` | a completion has this type (MANA) or syndrome (mlx5), see below |
//! | `hostile` | `queue` (`tx`, `rx`), `what` | a corrupt completion, or none (`nothing`) where one is due |
//!
//! With `completion-error` the packet of a transmit completion is not sent. On mlx5 `queue = "rx"` is
//! possible too, and stops the queue.
//!
//! Every fault takes `device`, `after` and `count`. `device` may be omitted if there is only one. `after` is
//! the number of commands, packets or completions of the kind that pass first. `count` is the number of times
//! that the fault happens, by default 1.

use std::fmt;

use rustix::io::Errno;
use wirepath_settings::{ConfigError, Settings};

/// Names of commands, for injected faults.
pub const COMMANDS: &[&str] = &[
    "get_context",
    "query_context",
    "query_device",
    "query_port",
    "query_gid",
    "async_event",
    "alloc_pd",
    "dealloc_pd",
    "reg_mr",
    "dereg_mr",
    "query_mr",
    "query_pd",
    "create_comp_channel",
    "create_cq",
    "destroy_cq",
    "req_notify_cq",
    "create_qp",
    "modify_qp",
    "query_qp",
    "destroy_qp",
    "create_wq",
    "modify_wq",
    "destroy_wq",
    "create_rwq_ind_table",
    "destroy_rwq_ind_table",
    "create_flow",
    "destroy_flow",
    "create_matcher",
    "destroy_matcher",
    "create_flow_action",
    "destroy_flow_action",
    "create_counters",
    "read_counters",
    "destroy_counters",
    "create_firmware_object",
    "query_firmware_object",
    "modify_firmware_object",
    "destroy_firmware_object",
    "driver",
];

/// An injected fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Index of the device.
    pub device: usize,
    /// Number of matching occurrences that pass before the fault happens.
    pub after: u64,
    /// Number of times that the fault happens.
    pub count: u64,
}

/// Kinds of faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The kernel refuses a command.
    FailCommand {
        /// Name of the command, as returned by [`crate::uverbs::Request::name`].
        command: String,
        /// Error that the command returns.
        errno: Errno,
    },
    /// The kernel's own driver holds the port.
    PortHeld {
        /// Port number, from 1.
        port: u8,
        /// Error of commands that need the port.
        errno: Errno,
    },
    /// The kernel's own driver releases the port.
    PortFreed {
        /// Port number, from 1.
        port: u8,
    },
    /// The link goes up or down.
    Link {
        /// Port number, from 1.
        port: u8,
        /// True for up, false for down.
        up: bool,
    },
    /// The device is reset.
    DeviceFatal,
    /// A completion reports an error.
    CompletionError {
        /// True for a send queue, false for a receive queue.
        transmit: bool,
        /// Completion type (MANA) or syndrome (mlx5).
        code: u32,
    },
    /// A completion is corrupt, as no correct device writes it.
    CorruptCqe {
        /// True for a send queue, false for a receive queue.
        transmit: bool,
        /// Kind of corruption.
        corruption: CqeCorruption,
    },
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FailCommand { command, errno } => write!(f, "{command} refused: {errno}"),
            Self::PortHeld { port, errno } => write!(f, "port {port} held by the kernel's driver: {errno}"),
            Self::PortFreed { port } => write!(f, "port {port} released by the kernel's driver"),
            Self::Link { port, up } => write!(f, "port {port} {}", if *up { "up" } else { "down" }),
            Self::DeviceFatal => f.write_str("device reset"),
            Self::CompletionError { code, .. } => write!(f, "completion error {code}"),
            Self::CorruptCqe { transmit, corruption } => {
                write!(f, "corrupt {} completion ({corruption})", if *transmit { "transmit" } else { "receive" })
            }
        }
    }
}

/// Kinds of corruption of a completion entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqeCorruption {
    /// The owner bits belong to a distant pass of the ring.
    Owner,
    /// The queue does not exist.
    Queue,
    /// The entry names the other kind of queue.
    Kind,
    /// The length exceeds the buffer.
    Length,
    /// The length is zero.
    ZeroLength,
    /// The completion is written twice.
    Duplicate,
    /// The completion type is undefined.
    Type,
    /// The position in the ring does not exist.
    Position,
    /// A receive completion calls correct checksums wrong, and wrong ones correct.
    Checksum,
    /// No completion is written although one is due.
    Missing,
}

/// Configuration values of [`CqeCorruption`].
pub const CQE_CORRUPTIONS: &[(&str, CqeCorruption)] = &[
    ("owner", CqeCorruption::Owner),
    ("queue", CqeCorruption::Queue),
    ("kind", CqeCorruption::Kind),
    ("length", CqeCorruption::Length),
    ("empty", CqeCorruption::ZeroLength),
    ("twice", CqeCorruption::Duplicate),
    ("type", CqeCorruption::Type),
    ("position", CqeCorruption::Position),
    ("checksum", CqeCorruption::Checksum),
    ("nothing", CqeCorruption::Missing),
];

impl fmt::Display for CqeCorruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CQE_CORRUPTIONS.iter().find(|(_, corruption)| corruption == self).map_or("?", |(word, _)| word))
    }
}

/// Configuration values of `queue`; true for a send queue.
const QUEUES: &[(&str, bool)] = &[("tx", true), ("rx", false)];

const ERRNOS: &[(&str, Errno)] = &[
    ("EPERM", Errno::PERM),
    ("EIO", Errno::IO),
    ("EAGAIN", Errno::AGAIN),
    ("ENOMEM", Errno::NOMEM),
    ("EACCES", Errno::ACCESS),
    ("EFAULT", Errno::FAULT),
    ("EBUSY", Errno::BUSY),
    ("ENODEV", Errno::NODEV),
    ("EINVAL", Errno::INVAL),
    ("ENOSPC", Errno::NOSPC),
    ("EOPNOTSUPP", Errno::OPNOTSUPP),
    ("ETIMEDOUT", Errno::TIMEDOUT),
];

/// Reads a table `[[fault]]`; `devices` are the names and the numbers of ports of the devices.
///
/// # Errors
/// File, line, key and the accepted values.
pub fn read(table: &Settings<'_>, devices: &[(&str, usize)]) -> Result<Fault, ConfigError> {
    let names: Vec<(&str, usize)> = devices.iter().enumerate().map(|(i, (name, _))| (*name, i)).collect();
    let device = match table.choice("device", &names)? {
        Some(device) => device,
        None if names.len() > 1 => {
            let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
            return Err(table.error_in("device", format!("missing; the devices are {}", names.join(", "))));
        }
        None => 0,
    };
    let ports = devices.get(device).map_or(1, |(_, ports)| *ports);
    let port = || -> Result<u8, ConfigError> { Ok(table.integer("port", 1..=ports as i64)?.unwrap_or(1)) };
    let errno = |default| -> Result<Errno, ConfigError> { Ok(table.choice("errno", ERRNOS)?.unwrap_or(default)) };
    let kinds =
        ["refuse", "port-held", "port-freed", "port-down", "port-up", "device-fatal", "completion-error", "hostile"];
    let choices: Vec<(&str, &str)> = kinds.iter().map(|kind| (*kind, *kind)).collect();
    let kind =
        table.choice("kind", &choices)?.ok_or_else(|| table.error_in("kind", "missing, expected a kind of fault"))?;
    let what = match kind {
        "refuse" => {
            let commands: Vec<(&str, &str)> = COMMANDS.iter().map(|name| (*name, *name)).collect();
            let command = table.choice("command", &commands)?;
            let command = command
                .ok_or_else(|| table.error_in("command", "missing, expected a command such as \"create_qp\""))?;
            FaultKind::FailCommand { command: command.to_owned(), errno: errno(Errno::NOMEM)? }
        }
        "port-held" => FaultKind::PortHeld { port: port()?, errno: errno(Errno::BUSY)? },
        "port-freed" => FaultKind::PortFreed { port: port()? },
        "port-down" => FaultKind::Link { port: port()?, up: false },
        "port-up" => FaultKind::Link { port: port()?, up: true },
        "device-fatal" => FaultKind::DeviceFatal,
        "completion-error" => FaultKind::CompletionError {
            transmit: table.choice("queue", QUEUES)?.unwrap_or(true),
            code: table.integer("code", 1..=63)?.unwrap_or(42),
        },
        _ => FaultKind::CorruptCqe {
            transmit: table.choice("queue", QUEUES)?.unwrap_or(false),
            corruption: table
                .choice("what", CQE_CORRUPTIONS)?
                .ok_or_else(|| table.error_in("what", "missing, expected a kind of corruption such as \"owner\""))?,
        },
    };
    let after = table.integer("after", 0..=i64::MAX)?.unwrap_or(0);
    Ok(Fault { kind: what, device, after, count: table.integer("count", 1..=i64::MAX)?.unwrap_or(1) })
}

/// Faults that are injected and have not happened as often as requested.
#[derive(Clone, Debug, Default)]
pub struct PendingFaults {
    faults: Vec<Fault>,
}

impl PendingFaults {
    /// Adds a fault.
    pub fn add(&mut self, fault: Fault) {
        self.faults.push(fault);
    }

    /// Returns true if no fault is pending. Cheap enough for burst paths.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// Returns the pending faults in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter()
    }

    /// Counts an occurrence that `concerns` accepts, and returns the kind of the pending fault of the device
    /// that is due now.
    pub fn trigger(&mut self, device: usize, concerns: impl Fn(&FaultKind) -> bool) -> Option<FaultKind> {
        let at = self.faults.iter_mut().position(|order| {
            if order.device != device || !concerns(&order.kind) {
                return false;
            }
            if order.after > 0 {
                order.after -= 1;
                return false;
            }
            true
        })?;
        let order = &mut self.faults[at];
        order.count -= 1;
        if order.count == 0 { Some(self.faults.remove(at).kind) } else { Some(order.kind.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_waits_happens_and_ends() {
        let mut faults = PendingFaults::default();
        faults.add(Fault { kind: FaultKind::DeviceFatal, device: 1, after: 2, count: 2 });
        let trigger = |faults: &mut PendingFaults, device| {
            faults.trigger(device, |what| *what == FaultKind::DeviceFatal).is_some()
        };
        assert!(!trigger(&mut faults, 0), "another device");
        let seen: Vec<bool> = (0..6).map(|_| trigger(&mut faults, 1)).collect();
        assert_eq!(seen, [false, false, true, true, false, false]);
        assert!(faults.is_empty());
    }
}
