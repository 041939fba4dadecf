//! Errors of the control path: the failed call, its errno, the likely cause and the remedy.

use std::fmt;

use rdma_core_sys::{LoadError, MissingSymbol};

use crate::Provider;

/// Result of the calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An RDMA library or one of its functions is missing.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The arguments are not valid for any device.
    #[error("{0}")]
    InvalidRequest(String),
    /// The library or the device returned values that are not valid.
    #[error("{call} on {device} returned invalid values: {problem}")]
    InvalidAnswer {
        /// Function that returned them.
        call: &'static str,
        /// Name of the device.
        device: String,
        /// Description of the problem.
        problem: String,
    },
    /// Data or a file from another process is not valid.
    #[error("{what} of another process cannot be used: {problem}")]
    InvalidImport {
        /// Object, such as "the exported VAR".
        what: &'static str,
        /// Description of the problem.
        problem: String,
    },
    /// The process that owns the object has freed it.
    #[error("{what} no longer exists: the process that owns it has freed it")]
    FreedByOwner {
        /// Object, such as "the imported VAR".
        what: &'static str,
    },
    /// The device has another provider than the caller requested.
    #[error("{device} is driven by {found}, not by {wanted}")]
    Provider {
        /// Name of the device.
        device: String,
        /// Provider of the device.
        found: Provider,
        /// Requested provider.
        wanted: Provider,
    },
}

impl From<MissingSymbol> for Error {
    fn from(missing: MissingSymbol) -> Self {
        Self::Library(missing.into())
    }
}

impl Error {
    /// Returns the errno if a call failed with one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Call(error) => Some(error.errno),
            _ => None,
        }
    }
}

/// Failed verbs call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// Function, such as `ibv_create_qp`.
    pub call: &'static str,
    /// Device and port of the call.
    pub subject: String,
    /// errno of the call.
    pub errno: i32,
    /// Likely cause.
    pub cause: Cause,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = std::io::Error::from_raw_os_error(self.errno).to_string();
        let text = text.split(" (os error").next().unwrap_or_default();
        match errno_name(self.errno) {
            Some(name) => write!(f, "{} on {} failed: {name}, {text}", self.call, self.subject)?,
            None => write!(f, "{} on {} failed: errno {}, {text}", self.call, self.subject, self.errno)?,
        }
        match &self.cause {
            Cause::Unknown => Ok(()),
            cause => write!(f, "; {cause}"),
        }
    }
}

impl std::error::Error for CallError {}

/// Likely cause of a failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The process lacks a capability (capabilities(7)), such as `CAP_NET_RAW`.
    Capability(&'static str),
    /// The kernel's network interface uses the port (manadv(7)).
    PortBusy {
        /// Interfaces of the port, as found in sysfs.
        interfaces: Vec<String>,
    },
    /// The limit of locked memory is too low.
    LockedMemory {
        /// `RLIMIT_MEMLOCK` in bytes. `None` if it is unlimited, so that memory itself is exhausted.
        limit: Option<u64>,
    },
    /// The device file is missing or cannot be opened.
    DeviceFile {
        /// Path, such as `/dev/infiniband/uverbs0`.
        path: String,
    },
    /// The device was removed or reset. All objects of its context are invalid.
    DeviceLost,
    /// The provider or the kernel driver does not support the operation.
    NotSupported,
    /// The device or its driver has no more objects of this kind.
    Exhausted,
    /// The device does not support the arguments.
    InvalidArgument,
    /// Another object still uses the object.
    InUse,
    /// Only the errno is known.
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capability(name) => {
                write!(f, "it needs the capability {name} in the user namespace of the device")
            }
            Self::PortBusy { interfaces } if interfaces.is_empty() => f.write_str(
                "the kernel's network interface holds the port; take it down: ip link set dev INTERFACE down",
            ),
            Self::PortBusy { interfaces } => {
                write!(f, "the kernel's network interface {} holds the port; free it:", interfaces.join(" or "))?;
                let mut separator = " ";
                for interface in interfaces {
                    write!(f, "{separator}ip link set dev {interface} down")?;
                    separator = "; ";
                }
                Ok(())
            }
            Self::LockedMemory { limit: Some(limit) } => write!(
                f,
                "at most {limit} bytes may be locked (RLIMIT_MEMLOCK); raise it (ulimit -l unlimited, or \
                 LimitMEMLOCK=infinity of a service) or grant CAP_IPC_LOCK"
            ),
            Self::LockedMemory { limit: None } => {
                f.write_str("there is too little memory to lock, or the device cannot register more")
            }
            Self::DeviceFile { path } => write!(
                f,
                "{path} is missing or cannot be opened: load the kernel module ib_uverbs, and run as root \
                 or as a member of the group that owns the file"
            ),
            Self::DeviceLost => {
                f.write_str("the device was reset or removed; close all of its objects and open it again")
            }
            Self::NotSupported => f.write_str("the device, its kernel driver or its library does not support this"),
            Self::Exhausted => {
                f.write_str("the device or the kernel has no more objects of this kind, or too little memory")
            }
            Self::InvalidArgument => f.write_str("the device does not support this size, flag or combination"),
            Self::InUse => f.write_str("another object still uses it"),
            Self::Unknown => f.write_str("the cause is not known"),
        }
    }
}

/// State of the system that [`diagnose`] uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallContext {
    /// True for a MANA device.
    pub(crate) mana: bool,
    /// Network interfaces of the port.
    pub(crate) interfaces: Vec<String>,
    /// Path of the device file.
    pub(crate) device_file: String,
    /// `RLIMIT_MEMLOCK` in bytes; `None` if unlimited.
    pub(crate) locked_limit: Option<u64>,
}

/// Returns the likely cause of `call` failing with `errno`.
pub(crate) fn diagnose(call: &str, errno: i32, call_context: &CallContext) -> Cause {
    let opens = call.ends_with("_open_device");
    let destroys = call.contains("destroy") || call.contains("dealloc") || call.contains("dereg");
    match errno {
        libc::EACCES | libc::ENOENT | libc::EPERM if opens => {
            Cause::DeviceFile { path: call_context.device_file.clone() }
        }
        // The kernel checks CAP_NET_RAW first when raw packet queue pairs and flows are created.
        libc::EPERM => Cause::Capability("CAP_NET_RAW"),
        libc::EBUSY if destroys => Cause::InUse,
        // Released RDMA drivers of MANA return ENODEV, later ones EBUSY.
        libc::EBUSY | libc::ENODEV if call_context.mana && call.starts_with("ibv_create_qp") => {
            Cause::PortBusy { interfaces: call_context.interfaces.clone() }
        }
        libc::EBUSY => Cause::InUse,
        libc::ENOMEM | libc::EAGAIN if call.starts_with("ibv_reg_mr") => {
            Cause::LockedMemory { limit: call_context.locked_limit }
        }
        libc::EIO | libc::ENODEV | libc::ENXIO => Cause::DeviceLost,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => Cause::NotSupported,
        libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE => Cause::Exhausted,
        libc::EINVAL => Cause::InvalidArgument,
        _ => Cause::Unknown,
    }
}

fn errno_name(errno: i32) -> Option<&'static str> {
    macro_rules! names {
        ($($name:ident)*) => {
            match errno {
                $(libc::$name => Some(stringify!($name)),)*
                _ => None,
            }
        };
    }
    names!(EPERM ENOENT EINTR EIO ENXIO EBADF EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST ENODEV EINVAL ENFILE EMFILE
        ENOTTY ENOSPC EPIPE ERANGE ENOSYS EPROTO EOVERFLOW EPROTONOSUPPORT EOPNOTSUPP ETIMEDOUT ECONNABORTED ESTALE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mana() -> CallContext {
        CallContext {
            mana: true,
            interfaces: vec!["eth1".to_owned()],
            device_file: "/dev/infiniband/uverbs0".to_owned(),
            locked_limit: Some(8 << 20),
        }
    }

    fn text(call: &'static str, errno: i32, call_context: &CallContext) -> String {
        let cause = diagnose(call, errno, call_context);
        CallError { call, subject: "mana_0 port 1".to_owned(), errno, cause }.to_string()
    }

    #[test]
    fn busy_port_error_names_the_command_that_frees_it() {
        for (errno, name) in [(libc::EBUSY, "EBUSY, Device or resource busy"), (libc::ENODEV, "ENODEV, No such device")]
        {
            assert_eq!(
                text("ibv_create_qp", errno, &mana()),
                format!(
                    "ibv_create_qp on mana_0 port 1 failed: {name}; the kernel's network interface eth1 holds the \
                     port; free it: ip link set dev eth1 down"
                )
            );
        }
        let unnamed = text("ibv_create_qp_ex", libc::EBUSY, &CallContext { interfaces: Vec::new(), ..mana() });
        assert!(unnamed.ends_with("ip link set dev INTERFACE down"), "{unnamed}");
        // Other providers do not have this restriction.
        let other = CallContext { mana: false, ..mana() };
        assert_eq!(diagnose("ibv_create_qp", libc::EBUSY, &other), Cause::InUse);
        assert_eq!(diagnose("ibv_create_qp", libc::ENODEV, &other), Cause::DeviceLost);
        // The restriction does not apply to destroying a queue pair.
        assert_eq!(diagnose("ibv_destroy_qp", libc::EBUSY, &mana()), Cause::InUse);
    }

    #[test]
    fn a_missing_capability_is_named() {
        let text = text("ibv_create_qp", libc::EPERM, &mana());
        assert!(text.contains("EPERM, Operation not permitted; it needs the capability CAP_NET_RAW"), "{text}");
        assert!(matches!(diagnose("ibv_open_device", libc::EPERM, &mana()), Cause::DeviceFile { .. }));
    }

    #[test]
    fn locked_memory_limit_is_reported() {
        let text = text("ibv_reg_mr", libc::ENOMEM, &mana());
        assert!(text.contains("at most 8388608 bytes may be locked (RLIMIT_MEMLOCK)"), "{text}");
        assert_eq!(diagnose("ibv_create_cq", libc::ENOMEM, &mana()), Cause::Exhausted);
    }

    #[test]
    fn errno_without_a_known_cause_is_reported_alone() {
        assert_eq!(
            text("ibv_query_qp", libc::ESTALE, &mana()),
            "ibv_query_qp on mana_0 port 1 failed: ESTALE, Stale file handle"
        );
        assert!(text("ibv_query_qp", 4095, &mana()).contains("errno 4095"));
    }
}
