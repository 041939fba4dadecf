//! Faults on order: what a device or the kernel would do on a bad day, at a chosen moment.
//!
//! | `kind` | keys | what happens |
//! |---|---|---|
//! | `refuse` | `command`, `errno` | the kernel refuses the command |
//! | `port-held` | `port`, `errno` (`EBUSY`, `ENODEV`) | the kernel's own driver holds the port |
//! | `port-freed` | `port` | it lets go |
//! | `port-down`, `port-up` | `port` | link event |
//! | `device-fatal` | | the device is reset: every queue stops, every command fails with `EIO` until the device is opened anew |
//! | `completion-error` | `code`, `queue` | a transmit completion has this type (MANA) or syndrome (mlx5); the packet is not sent. On mlx5 also one of a receive queue (`rx`), which stops |
//! | `hostile` | `queue` (`tx`, `rx`), `what` | a completion that no honest device writes, or `nothing` where one is due |
//!
//! All take `device` (which may be left out if there is only one), `after` (how many commands, packets or completions of the kind pass first) and
//! `count` (how often, 1 if not said).

use std::fmt;

use rustix::io::Errno;
use wirepath_settings::{ConfigError, Settings};

use crate::topology::Topology;

/// An ordered fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What happens.
    pub what: What,
    /// To which device.
    pub device: usize,
    /// How many pass first.
    pub after: u64,
    /// How often it happens.
    pub count: u64,
}

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// The kernel refuses a command.
    Refuse {
        /// As [`crate::uverbs::Request::name`] has it.
        command: String,
        /// With this error.
        errno: Errno,
    },
    /// The kernel's own driver holds the port.
    PortHeld {
        /// From 1.
        port: u8,
        /// What commands that need the port fail with.
        errno: Errno,
    },
    /// The kernel's own driver lets go.
    PortFreed {
        /// From 1.
        port: u8,
    },
    /// Link event.
    Link {
        /// From 1.
        port: u8,
        /// Up or down.
        up: bool,
    },
    /// The device is reset.
    DeviceFatal,
    /// A completion that says error.
    CompletionError {
        /// Of a send queue.
        transmit: bool,
        /// Type of the completion.
        code: u32,
    },
    /// A completion that no honest device writes.
    Hostile {
        /// Of a send queue.
        transmit: bool,
        /// How it lies.
        lie: Lie,
    },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refuse { command, errno } => write!(f, "{command} refused: {errno}"),
            Self::PortHeld { port, errno } => write!(f, "port {port} held by the kernel's driver: {errno}"),
            Self::PortFreed { port } => write!(f, "port {port} given free by the kernel's driver"),
            Self::Link { port, up } => write!(f, "port {port} {}", if *up { "up" } else { "down" }),
            Self::DeviceFatal => f.write_str("device reset"),
            Self::CompletionError { code, .. } => write!(f, "completion error {code}"),
            Self::Hostile { transmit, lie } => {
                write!(f, "hostile {} completion ({lie})", if *transmit { "transmit" } else { "receive" })
            }
        }
    }
}

/// How a hostile completion lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Owner bits of a pass that is far away.
    Owner,
    /// A queue that does not exist.
    Queue,
    /// The other kind of queue.
    Kind,
    /// A length beyond the buffer.
    Length,
    /// Length zero.
    Empty,
    /// The same completion twice.
    Twice,
    /// A type that was never defined.
    Type,
    /// A position in the ring that is not there.
    Position,
    /// None is written, although one is due.
    Nothing,
}

/// Words for [`Lie`].
pub const LIES: &[(&str, Lie)] = &[
    ("owner", Lie::Owner),
    ("queue", Lie::Queue),
    ("kind", Lie::Kind),
    ("length", Lie::Length),
    ("empty", Lie::Empty),
    ("twice", Lie::Twice),
    ("type", Lie::Type),
    ("position", Lie::Position),
    ("nothing", Lie::Nothing),
];

impl fmt::Display for Lie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(LIES.iter().find(|(_, lie)| lie == self).map_or("?", |(word, _)| word))
    }
}

/// Words for the direction of a queue: whether it sends.
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

/// Reads a table `[[fault]]`.
///
/// # Errors
/// File, line, key and what would be right.
pub fn read(table: &Settings<'_>, topology: &Topology) -> Result<Fault, ConfigError> {
    let names: Vec<(&str, usize)> = topology.devices.iter().enumerate().map(|(i, d)| (d.name.as_str(), i)).collect();
    let device = match table.choice("device", &names)? {
        Some(device) => device,
        None if names.len() > 1 => {
            let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
            return Err(table.error_in("device", format!("missing; there are {}", names.join(", "))));
        }
        None => 0,
    };
    let ports = topology.devices.get(device).map_or(1, |device| device.ports.len());
    let port = || -> Result<u8, ConfigError> { Ok(table.integer("port", 1..=ports as i64)?.unwrap_or(1)) };
    let errno = |default| -> Result<Errno, ConfigError> { Ok(table.choice("errno", ERRNOS)?.unwrap_or(default)) };
    let kinds =
        ["refuse", "port-held", "port-freed", "port-down", "port-up", "device-fatal", "completion-error", "hostile"];
    let choices: Vec<(&str, &str)> = kinds.iter().map(|kind| (*kind, *kind)).collect();
    let kind =
        table.choice("kind", &choices)?.ok_or_else(|| table.error_in("kind", "missing, expected a kind of fault"))?;
    let what = match kind {
        "refuse" => {
            let commands: Vec<(&str, &str)> = crate::uverbs::COMMANDS.iter().map(|name| (*name, *name)).collect();
            let command = table.choice("command", &commands)?;
            let command = command
                .ok_or_else(|| table.error_in("command", "missing, expected a command such as \"create_qp\""))?;
            What::Refuse { command: command.to_owned(), errno: errno(Errno::NOMEM)? }
        }
        "port-held" => What::PortHeld { port: port()?, errno: errno(Errno::BUSY)? },
        "port-freed" => What::PortFreed { port: port()? },
        "port-down" => What::Link { port: port()?, up: false },
        "port-up" => What::Link { port: port()?, up: true },
        "device-fatal" => What::DeviceFatal,
        "completion-error" => What::CompletionError {
            transmit: table.choice("queue", QUEUES)?.unwrap_or(true),
            code: table.integer("code", 1..=63)?.unwrap_or(42),
        },
        _ => What::Hostile {
            transmit: table.choice("queue", QUEUES)?.unwrap_or(false),
            lie: table
                .choice("what", LIES)?
                .ok_or_else(|| table.error_in("what", "missing, expected how it lies, such as \"owner\""))?,
        },
    };
    let after = table.integer("after", 0..=i64::MAX)?.unwrap_or(0);
    Ok(Fault { what, device, after, count: table.integer("count", 1..=i64::MAX)?.unwrap_or(1) })
}

/// What is still to happen.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    orders: Vec<Fault>,
}

impl Orders {
    /// Adds an order.
    pub fn add(&mut self, fault: Fault) {
        self.orders.push(fault);
    }

    /// Whether there is nothing to do: cheap, for burst paths.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    /// Orders that have not struck as often as they are to.
    pub fn waiting(&self) -> usize {
        self.orders.len()
    }

    /// Something came by that `concerns` the fault: whether it strikes now.
    pub fn strike(&mut self, device: usize, concerns: impl Fn(&What) -> bool) -> Option<What> {
        let at = self.orders.iter_mut().position(|order| {
            if order.device != device || !concerns(&order.what) {
                return false;
            }
            if order.after > 0 {
                order.after -= 1;
                return false;
            }
            true
        })?;
        let order = &mut self.orders[at];
        order.count -= 1;
        if order.count == 0 { Some(self.orders.remove(at).what) } else { Some(order.what.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_waits_strikes_and_is_gone() {
        let mut orders = Orders::default();
        orders.add(Fault { what: What::DeviceFatal, device: 1, after: 2, count: 2 });
        let strike = |orders: &mut Orders, device| orders.strike(device, |what| *what == What::DeviceFatal).is_some();
        assert!(!strike(&mut orders, 0), "another device");
        let seen: Vec<bool> = (0..6).map(|_| strike(&mut orders, 1)).collect();
        assert_eq!(seen, [false, false, true, true, false, false]);
        assert!(orders.is_empty());
    }
}
