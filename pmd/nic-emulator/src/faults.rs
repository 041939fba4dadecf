//! Fault injection: failures of a device or of the kernel at a chosen moment. [`FAULT`] describes the keys.
//!
//! With `completion-error` the packet of a transmit completion is not sent. On mlx5 `queue = "rx"` is possible too, and
//! stops the queue.

use std::fmt;

use rustix::io::Errno;
use wirepath_settings::{
    Choice, ConfigError, ConfigTable, Integer, Key, Parsed, Required, Settings, WithDefault, Written,
};

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
    /// The timestamp is wrong.
    Timestamp,
    /// No completion is written although one is due.
    Missing,
}

/// Configuration values of [`CqeCorruption`], each with its meaning.
pub const CQE_CORRUPTIONS: &[(&str, CqeCorruption, &str)] = &[
    ("owner", CqeCorruption::Owner, "the owner bits belong to a distant pass of the ring"),
    ("queue", CqeCorruption::Queue, "it names a queue that does not exist"),
    ("kind", CqeCorruption::Kind, "it names the other kind of queue"),
    ("length", CqeCorruption::Length, "its length exceeds the buffer"),
    ("empty", CqeCorruption::ZeroLength, "its length is zero"),
    ("twice", CqeCorruption::Duplicate, "it is written twice"),
    ("type", CqeCorruption::Type, "its type is undefined"),
    ("position", CqeCorruption::Position, "it names a position that the ring does not have"),
    ("checksum", CqeCorruption::Checksum, "it calls correct checksums wrong, and wrong ones correct"),
    ("time", CqeCorruption::Timestamp, "its timestamp is wrong; that of a `mana` has none"),
    ("nothing", CqeCorruption::Missing, "it is not written although it is due"),
];

impl fmt::Display for CqeCorruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CQE_CORRUPTIONS.iter().find(|(_, corruption, _)| corruption == self).map_or("?", |(word, ..)| word))
    }
}

const KIND: Key<Required<Choice<&str>>> = Key::choice(
    "kind",
    &[
        ("refuse", "refuse", "the kernel refuses a command"),
        ("port-held", "port-held", "the kernel's own driver holds the port"),
        ("port-freed", "port-freed", "the kernel's own driver releases the port"),
        ("port-down", "port-down", "the link goes down"),
        ("port-up", "port-up", "the link comes up"),
        ("device-fatal", "device-fatal", "the device is reset; commands fail with EIO until it is opened again"),
        ("completion-error", "completion-error", "a completion reports an error, and its packet is not sent"),
        ("hostile", "hostile", "a completion is corrupt, or missing"),
    ],
)
.required()
.needs(&[("refuse", "command = \"create_qp\""), ("hostile", "what = \"owner\"")])
.about("What happens.");
/// Read as one of the devices of the topology.
const DEVICE: Key<Parsed<String>> = Key::parsed("device", "the name of a device of the topology")
    .absent("the only device; an error if there are several")
    .about("Device that has the fault.");
const AFTER: Key<WithDefault<Integer<u64>>> = Key::integer("after", 0..=i64::MAX)
    .default(0)
    .about("Number of such commands, packets or completions that pass before the fault.");
const COUNT: Key<WithDefault<Integer<u64>>> =
    Key::integer("count", 1..=i64::MAX).default(1).about("How often the fault happens.");
const PORT: Key<WithDefault<Integer<u8>>> = Key::integer("port", 1..=8)
    .default(1)
    .when("kind = \"port-down\"")
    .about("Port of the device, for the kinds that begin with `port`.");
/// Read as one of [`COMMANDS`].
const COMMAND: Key<Parsed<String>> =
    Key::parsed("command", "a command such as \"create_qp\"; a wrong word lists all of them")
        .absent("an error")
        .when("kind = \"refuse\"")
        .about("Command of the kernel interface that is refused.");
const ERRNO: Key<Choice<Errno>> = Key::choice(
    "errno",
    &[
        ("EPERM", Errno::PERM, "operation not permitted"),
        ("EIO", Errno::IO, "input/output error"),
        ("EAGAIN", Errno::AGAIN, "try again"),
        ("ENOMEM", Errno::NOMEM, "out of memory"),
        ("EACCES", Errno::ACCESS, "permission denied"),
        ("EFAULT", Errno::FAULT, "bad address"),
        ("EBUSY", Errno::BUSY, "device busy"),
        ("ENODEV", Errno::NODEV, "no such device"),
        ("EINVAL", Errno::INVAL, "invalid argument"),
        ("ENOSPC", Errno::NOSPC, "no space"),
        ("EOPNOTSUPP", Errno::OPNOTSUPP, "not supported"),
        ("ETIMEDOUT", Errno::TIMEDOUT, "timed out"),
    ],
)
.absent("ENOMEM of `refuse`, EBUSY of `port-held`")
.when("kind = \"port-held\"")
.about("Error of the kernel, for `refuse` and `port-held`. A held port returns EBUSY or ENODEV.");
const QUEUE: Key<Choice<bool>> = Key::choice(
    "queue",
    &[("tx", true, "completions of sent packets"), ("rx", false, "completions of received packets")],
)
.absent("\"tx\" of `completion-error`, \"rx\" of `hostile`")
.when("kind = \"completion-error\"")
.about("Completions that the fault concerns, for `completion-error` and `hostile`.");
const CODE: Key<WithDefault<Integer<u32>>> = Key::integer("code", 1..=63)
    .default(42)
    .when("kind = \"completion-error\"")
    .about("Type of the completion (MANA) or its syndrome (mlx5).");
const WHAT: Key<Choice<CqeCorruption>> = Key::choice("what", CQE_CORRUPTIONS)
    .absent("an error")
    .when("kind = \"hostile\"")
    .about("How the completion is corrupt.");

/// Table of a fault.
pub static FAULT: ConfigTable = ConfigTable {
    name: "fault",
    written: Written::Repeated,
    about: "A fault that waits for its moment from the start. `wirepath emulate --command` injects others later.",
    absent: "no fault",
    keys: &[&KIND, &DEVICE, &AFTER, &COUNT, &PORT, &COMMAND, &ERRNO, &QUEUE, &CODE, &WHAT],
    // Each kind has keys of its own.
    alternatives: true,
    example: "[[fault]]\nkind = \"refuse\"\ncommand = \"create_qp\"\nerrno = \"ENOMEM\"\nafter = 2\n",
    ..ConfigTable::EMPTY
};

/// Reads a table that [`FAULT`] describes; `devices` are the names and the numbers of ports of the devices.
///
/// # Errors
/// File, line, key and the accepted values.
pub fn read(table: &Settings<'_>, devices: &[(&str, usize)]) -> Result<Fault, ConfigError> {
    let names: Vec<(&str, usize)> = devices.iter().enumerate().map(|(i, (name, _))| (*name, i)).collect();
    let device = match table.choice(DEVICE.name(), &names)? {
        Some(device) => device,
        None if names.len() > 1 => {
            let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
            return Err(table.error_in(&DEVICE, format!("missing; the devices are {}", names.join(", "))));
        }
        None => 0,
    };
    let ports = devices.get(device).map_or(1, |(_, ports)| *ports);
    let port = || -> Result<u8, ConfigError> {
        let port = table.read(&PORT)?;
        if usize::from(port) > ports {
            return Err(table.error_in(&PORT, format!("found {port}, expected an integer from 1 to {ports}")));
        }
        Ok(port)
    };
    let errno = |default| -> Result<Errno, ConfigError> { Ok(table.read(&ERRNO)?.unwrap_or(default)) };
    let what = match table.read(&KIND)? {
        "refuse" => {
            let commands: Vec<(&str, &str)> = COMMANDS.iter().map(|name| (*name, *name)).collect();
            let command = table.choice(COMMAND.name(), &commands)?;
            let command =
                command.ok_or_else(|| table.error_in(&COMMAND, "missing, expected a command such as \"create_qp\""))?;
            FaultKind::FailCommand { command: command.to_owned(), errno: errno(Errno::NOMEM)? }
        }
        "port-held" => FaultKind::PortHeld { port: port()?, errno: errno(Errno::BUSY)? },
        "port-freed" => FaultKind::PortFreed { port: port()? },
        "port-down" => FaultKind::Link { port: port()?, up: false },
        "port-up" => FaultKind::Link { port: port()?, up: true },
        "device-fatal" => FaultKind::DeviceFatal,
        "completion-error" => {
            FaultKind::CompletionError { transmit: table.read(&QUEUE)?.unwrap_or(true), code: table.read(&CODE)? }
        }
        _ => FaultKind::CorruptCqe {
            transmit: table.read(&QUEUE)?.unwrap_or(false),
            corruption: table
                .read(&WHAT)?
                .ok_or_else(|| table.error_in(&WHAT, "missing, expected a kind of corruption such as \"owner\""))?,
        },
    };
    Ok(Fault { kind: what, device, after: table.read(&AFTER)?, count: table.read(&COUNT)? })
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
