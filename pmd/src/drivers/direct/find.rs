//! Which RDMA device and port a name means.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wirepath_verbs::{Device, Interface, LIBRARY_DIRECTORY_VARIABLE, Provider, Search, Verbs};

use super::attach::Offer;
use crate::drivers::Candidate;
use crate::port::{MacAddress, PortError};
use crate::settings::{ConfigError, Settings};

/// The driver that looks.
#[derive(Debug)]
pub(crate) struct Who {
    /// Its name.
    pub(crate) driver: &'static str,
    /// The kernel's module of its devices, and since which version there is one.
    pub(crate) module: &'static str,
    pub(crate) since: &'static str,
    /// What the names of its devices begin with.
    pub(crate) prefix: &'static str,
    /// Whose direct verbs it speaks.
    pub(crate) provider: Provider,
}

/// A port of an RDMA device.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// The device.
    pub(crate) device: Device,
    /// Port, counted from 1.
    pub(crate) port: u8,
    /// Address of the kernel's interface on the port, if sysfs tells of one.
    pub(crate) mac: Option<MacAddress>,
}

impl Found {
    fn new(device: &Device, port: u8) -> Self {
        let found = Self { device: device.clone(), port, mac: None };
        let mac = found.interface().map(|interface| MacAddress::from(interface.mac));
        Self { mac, ..found }
    }

    /// The kernel's interface on the port, as it is set now, if sysfs tells of one.
    fn interface(&self) -> Option<Interface> {
        self.device.interfaces().into_iter().find(|interface| interface.port == self.port)
    }

    /// The MTU of the kernel's interface on the port, as it is set now.
    pub(crate) fn mtu(&self) -> Option<u32> {
        self.interface()?.mtu
    }
}

impl Who {
    /// Finds the port that belongs to a network interface, or the first one of an RDMA device; `mlx5_0/2` is port 2 of `mlx5_0`, as
    /// rdma-link(8) writes it.
    pub(crate) fn find(&self, which: &Which) -> Result<Found, PortError> {
        let devices = self.devices(&which.device)?;
        for device in &devices {
            if device.name() == which.device {
                return Ok(Found::new(device, 1));
            }
            if let Some((_, number)) = which.device.split_once('/').filter(|(of, _)| *of == device.name()) {
                let number = number.parse().ok().filter(|number| *number > 0).ok_or_else(|| PortError::NoDevice {
                    driver: self.driver,
                    device: which.device.clone(),
                    hint: format!("the ports of {} are written {}/1 and so on", device.name(), device.name()),
                })?;
                return Ok(Found::new(device, number));
            }
            if let Some(interface) = device.interfaces().into_iter().find(|interface| interface.name == which.device) {
                return Ok(Found::new(device, interface.port));
            }
        }
        let names: Vec<String> = devices.iter().map(describe).collect();
        let hint = match names.as_slice() {
            [] => format!(
                "there is no RDMA device; is the kernel's driver loaded (`modprobe {}`, Linux {})?",
                self.module, self.since
            ),
            names => format!("no RDMA device of that name or behind that interface; there are {}", names.join(", ")),
        };
        // libibverbs shows devices of providers that it could load, and says nothing of others.
        let hint = self.missing_library().unwrap_or(hint);
        Err(PortError::NoDevice { driver: self.driver, device: which.device.clone(), hint })
    }

    /// What to do about the provider's library, if it is not there.
    fn missing_library(&self) -> Option<String> {
        let library = self.provider.to_string();
        let is_there = Verbs::load().ok()?.libraries().iter().any(|loaded| loaded.name == library);
        if is_there || self.provider == Provider::Other {
            return None;
        }
        Some(match Search::from_environment() {
            Search::Directory(directory) => format!(
                "{library} is not in {}, which {LIBRARY_DIRECTORY_VARIABLE} names: it must have all RDMA libraries of one rdma-core release",
                directory.display()
            ),
            Search::System => format!(
                "{library} is not there, without which nobody sees such a device; install it (Debian: apt-get install ibverbs-providers, of \
                 rdma-core 44 or later)"
            ),
        })
    }

    /// All RDMA devices, of whatever kind.
    fn devices(&self, name: &str) -> Result<Vec<Device>, PortError> {
        Verbs::load().and_then(|verbs| verbs.devices()).map_err(|error| self.refused(name, error))
    }

    /// An error of a verbs call, which says what is in the way and what removes it.
    #[allow(clippy::needless_pass_by_value)]
    pub(crate) fn refused(&self, name: &str, error: wirepath_verbs::Error) -> PortError {
        PortError::Refused { driver: self.driver, device: name.to_owned(), reason: error.to_string() }
    }

    /// Whether the device can be one for the driver: by its name, as the kernel's driver gives it, or by its provider.
    fn may_be(&self, device: &Device) -> bool {
        device.name().starts_with(self.prefix) || device.open().is_ok_and(|context| context.provider() == self.provider)
    }

    /// The ports that the driver could open; `describe` opens one and says what it can do.
    pub(crate) fn candidates(&self, describe: impl Fn(&str) -> Result<String, PortError>) -> Vec<Candidate> {
        // Without the libraries, or without devices, there is nothing to offer; `wirepath doctor` says why.
        let devices = self.devices("").unwrap_or_default();
        let names = devices.into_iter().filter(|device| self.may_be(device)).flat_map(|device| names(&device));
        names.map(|name| Candidate { usable: describe(&name).map_err(|error| error.reason()), device: name }).collect()
    }
}

/// The right to a port of an RDMA device within this process. The kernel would say that somebody else holds it.
#[derive(Debug)]
pub(crate) struct Claim(String, u8);

static CLAIMED: Mutex<Vec<(String, u8)>> = Mutex::new(Vec::new());

fn claimed() -> MutexGuard<'static, Vec<(String, u8)>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// `None` if the process has the port already.
    pub(crate) fn new(found: &Found) -> Option<Self> {
        let (device, port) = (found.device.name(), found.port);
        let mut claimed = claimed();
        if claimed.iter().any(|(other, number)| *other == device && *number == port) {
            return None;
        }
        claimed.push((device.clone(), port));
        Some(Self(device, port))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        claimed().retain(|(device, port)| *device != self.0 || *port != self.1);
    }
}

/// How long a device is waited for after a fatal error, unless the configuration says otherwise.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long a transmit queue may be without a completion, unless the configuration says otherwise (linux: net/sched/sch_generic.c).
const STALL: Duration = Duration::from_secs(5);

/// Which port a driver opens, and how long it waits for it.
#[derive(Clone, Debug)]
pub(crate) struct Which {
    /// A network interface, or an RDMA device, whose second port is `DEVICE/2`.
    pub(crate) device: String,
    /// For a device that reported a fatal error.
    pub(crate) patience: Duration,
    /// For a completion, while packets are on their way and the link is up; zero: for ever.
    pub(crate) stall: Duration,
    /// What other processes are offered.
    pub(crate) attach: Option<Offer>,
}

impl Which {
    pub(crate) fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), patience: PATIENCE, stall: STALL, attach: None }
    }

    /// From the keys that the drivers have in common; `example` of an RDMA device.
    pub(crate) fn read(device: Option<&str>, example: &str, settings: &Settings<'_>) -> Result<Self, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error(format!(
                "device: missing, expected a network interface or an RDMA device such as \"{example}\""
            )));
        };
        let plain = Self::new(device);
        Ok(Self {
            patience: settings.integer("seconds_after_fatal", 0..=3600)?.map_or(plain.patience, Duration::from_secs),
            stall: settings.integer("seconds_stalled", 0..=3600)?.map_or(plain.stall, Duration::from_secs),
            attach: Offer::read(settings)?,
            ..plain
        })
    }
}

/// The RDMA devices of this machine; none without the libraries.
pub(crate) fn known() -> Vec<Device> {
    Verbs::load().and_then(|verbs| verbs.devices()).unwrap_or_default()
}

/// As people are told of a device.
pub(crate) fn describe(device: &Device) -> String {
    let interfaces: Vec<_> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if interfaces.is_empty() { device.name() } else { format!("{} ({})", device.name(), interfaces.join(", ")) }
}

/// What to write as `device` for each port: the interface, or the name of the RDMA device.
fn names(device: &Device) -> Vec<String> {
    let mut names: Vec<String> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if names.is_empty() {
        names.push(device.name());
    }
    names
}
