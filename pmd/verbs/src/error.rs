//! Errors of the control path: what was called, what came of it, what is in the way and what removes it.

use std::fmt;

use rdma_core_sys::{LoadError, MissingSymbol};

use crate::Provider;

/// Result of the calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something did not work.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The RDMA libraries, one of them, or a function is not there.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The request cannot be fulfilled by any device.
    #[error("{0}")]
    Request(String),
    /// The library or the device answered what cannot be.
    #[error("{call} on {device} answered nonsense: {problem}")]
    Answer {
        /// The function.
        call: &'static str,
        /// Whose answer.
        device: String,
        /// What is wrong with it.
        problem: String,
    },
    /// What another process handed over cannot be what it should be.
    #[error("{what} of another process cannot be used: {problem}")]
    Foreign {
        /// Such as "the exported VAR".
        what: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The process that owns it has freed it.
    #[error("{what} is no more: the process that owns it has freed it")]
    Ended {
        /// Such as "the imported VAR".
        what: &'static str,
    },
    /// The device belongs to another provider than was asked for.
    #[error("{device} is driven by {found}, not by {wanted}")]
    Provider {
        /// Its name.
        device: String,
        /// Whose it is.
        found: Provider,
        /// Whose it should be.
        wanted: Provider,
    },
}

impl From<MissingSymbol> for Error {
    fn from(missing: MissingSymbol) -> Self {
        Self::Library(missing.into())
    }
}

impl Error {
    /// The errno, if a call failed with one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Call(error) => Some(error.errno),
            _ => None,
        }
    }
}

/// A verbs call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The function, such as `ibv_create_qp`.
    pub call: &'static str,
    /// On what: device, port.
    pub subject: String,
    /// The errno.
    pub errno: i32,
    /// What is likely in the way.
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

/// What is likely in the way of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// A capability (capabilities(7)) is missing, such as `CAP_NET_RAW`.
    Capability(&'static str),
    /// The kernel's network interface holds the port (manadv(7)).
    PortHeld {
        /// The interfaces of the port, as far as sysfs tells.
        interfaces: Vec<String>,
    },
    /// The limit of locked memory.
    LockedMemory {
        /// `RLIMIT_MEMLOCK` in bytes; `None`: unlimited, so that memory itself is short.
        limit: Option<u64>,
    },
    /// The device file is not there, or may not be opened.
    DeviceFile {
        /// Such as `/dev/infiniband/uverbs0`.
        path: String,
    },
    /// The device was taken away or reset: everything of its context is void.
    DeviceGone,
    /// The provider, or the kernel's driver, does not do this.
    NotSupported,
    /// The device, or its driver, has no more of these.
    Exhausted,
    /// The device takes no such request.
    Refused,
    /// Something else still uses it.
    InUse,
    /// Nothing is known beyond the errno.
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capability(name) => write!(
                f,
                "it needs the capability {name} in the user namespace of the device: run as root, or grant it to the program \
                 (setcap {}+ep PROGRAM)",
                name.to_lowercase()
            ),
            Self::PortHeld { interfaces } if interfaces.is_empty() => f.write_str(
                "the kernel's network interface holds the port; take it down: ip link set dev INTERFACE down",
            ),
            Self::PortHeld { interfaces } => {
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
                "at most {limit} bytes may be locked (RLIMIT_MEMLOCK); raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity of a \
                 service) or grant CAP_IPC_LOCK"
            ),
            Self::LockedMemory { limit: None } => {
                f.write_str("there is too little memory to lock, or the device has no room for more")
            }
            Self::DeviceFile { path } => write!(
                f,
                "{path} is not there or may not be opened: load the kernel module ib_uverbs, and run as root or as a member of the group \
                 that owns the file"
            ),
            Self::DeviceGone => {
                f.write_str("the device was reset or removed; close everything of it and open it again")
            }
            Self::NotSupported => f.write_str("the device, its kernel driver or its library does not support this"),
            Self::Exhausted => f.write_str("the device or the kernel has no more of these, or too little memory"),
            Self::Refused => {
                f.write_str("the device takes no such request: a size, flag or combination that it does not know")
            }
            Self::InUse => f.write_str("something else still uses it"),
            Self::Unknown => f.write_str("nothing more is known"),
        }
    }
}

/// What a diagnosis looks at.
#[derive(Clone, Debug, Default)]
pub(crate) struct Situation {
    pub(crate) mana: bool,
    pub(crate) interfaces: Vec<String>,
    pub(crate) device_file: String,
    /// `RLIMIT_MEMLOCK`.
    pub(crate) locked_limit: Option<u64>,
}

/// What is likely in the way when `call` fails with `errno`.
pub(crate) fn diagnose(call: &str, errno: i32, situation: &Situation) -> Cause {
    let opens = call.ends_with("_open_device");
    let destroys = call.contains("destroy") || call.contains("dealloc") || call.contains("dereg");
    match errno {
        libc::EACCES | libc::ENOENT | libc::EPERM if opens => Cause::DeviceFile { path: situation.device_file.clone() },
        // Creating raw packet queue pairs and flows; the kernel looks for it before anything else.
        libc::EPERM => Cause::Capability("CAP_NET_RAW"),
        libc::EBUSY if destroys => Cause::InUse,
        // Released RDMA drivers of MANA say ENODEV, later ones EBUSY.
        libc::EBUSY | libc::ENODEV if situation.mana && call.starts_with("ibv_create_qp") => {
            Cause::PortHeld { interfaces: situation.interfaces.clone() }
        }
        libc::EBUSY => Cause::InUse,
        libc::ENOMEM | libc::EAGAIN if call.starts_with("ibv_reg_mr") => {
            Cause::LockedMemory { limit: situation.locked_limit }
        }
        libc::EIO | libc::ENODEV | libc::ENXIO => Cause::DeviceGone,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => Cause::NotSupported,
        libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE => Cause::Exhausted,
        libc::EINVAL => Cause::Refused,
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
    names!(EPERM ENOENT EINTR EIO ENXIO EBADF EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST ENODEV EINVAL ENFILE EMFILE ENOTTY ENOSPC EPIPE
        ERANGE ENOSYS EPROTO EOVERFLOW EPROTONOSUPPORT EOPNOTSUPP ETIMEDOUT ECONNABORTED ESTALE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mana() -> Situation {
        Situation {
            mana: true,
            interfaces: vec!["eth1".to_owned()],
            device_file: "/dev/infiniband/uverbs0".to_owned(),
            locked_limit: Some(8 << 20),
        }
    }

    fn text(call: &'static str, errno: i32, situation: &Situation) -> String {
        let cause = diagnose(call, errno, situation);
        CallError { call, subject: "mana_0 port 1".to_owned(), errno, cause }.to_string()
    }

    #[test]
    fn a_port_that_the_kernel_holds_comes_with_the_command_that_frees_it() {
        for (errno, name) in [(libc::EBUSY, "EBUSY, Device or resource busy"), (libc::ENODEV, "ENODEV, No such device")]
        {
            assert_eq!(
                text("ibv_create_qp", errno, &mana()),
                format!(
                    "ibv_create_qp on mana_0 port 1 failed: {name}; the kernel's network interface eth1 holds the port; free it: \
                     ip link set dev eth1 down"
                )
            );
        }
        let unnamed = text("ibv_create_qp_ex", libc::EBUSY, &Situation { interfaces: Vec::new(), ..mana() });
        assert!(unnamed.ends_with("ip link set dev INTERFACE down"), "{unnamed}");
        // Other providers have no such rule.
        let other = Situation { mana: false, ..mana() };
        assert_eq!(diagnose("ibv_create_qp", libc::EBUSY, &other), Cause::InUse);
        assert_eq!(diagnose("ibv_create_qp", libc::ENODEV, &other), Cause::DeviceGone);
        // Nor has the destruction.
        assert_eq!(diagnose("ibv_destroy_qp", libc::EBUSY, &mana()), Cause::InUse);
    }

    #[test]
    fn a_missing_capability_is_named() {
        let text = text("ibv_create_qp", libc::EPERM, &mana());
        assert!(text.contains("EPERM, Operation not permitted; it needs the capability CAP_NET_RAW"), "{text}");
        assert!(text.contains("setcap cap_net_raw+ep"), "{text}");
        assert!(matches!(diagnose("ibv_open_device", libc::EPERM, &mana()), Cause::DeviceFile { .. }));
    }

    #[test]
    fn the_limit_of_locked_memory_is_told() {
        let text = text("ibv_reg_mr", libc::ENOMEM, &mana());
        assert!(text.contains("at most 8388608 bytes may be locked (RLIMIT_MEMLOCK)"), "{text}");
        assert_eq!(diagnose("ibv_create_cq", libc::ENOMEM, &mana()), Cause::Exhausted);
    }

    #[test]
    fn an_errno_without_a_story_stays_plain() {
        assert_eq!(
            text("ibv_query_qp", libc::ESTALE, &mana()),
            "ibv_query_qp on mana_0 port 1 failed: ESTALE, Stale file handle"
        );
        assert!(text("ibv_query_qp", 4095, &mana()).contains("errno 4095"));
    }
}
