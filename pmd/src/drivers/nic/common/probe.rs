//! Lookup of RDMA devices and ports by name.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wirepath_verbs::{CallError, Cause, Device, Interface, LIBRARY_DIRECTORY_VARIABLE, Provider, Search, Verbs};

use crate::drivers::Candidate;
use crate::drivers::privilege::privilege_error;
use crate::ipc::AttachConfig;
use crate::port::{MacAddr, PortError};
use wirepath_settings::{ConfigError, Integer, Key, Settings, WithDefault};

/// How a driver finds its devices.
#[derive(Debug)]
pub(crate) struct ProbeSpec {
    /// Name of the driver.
    pub(crate) driver: &'static str,
    /// Kernel module of the devices, and the first Linux version that has it.
    pub(crate) module: &'static str,
    pub(crate) since: &'static str,
    /// Prefix of the names of its RDMA devices.
    pub(crate) prefix: &'static str,
    /// Provider whose direct verbs the driver uses.
    pub(crate) provider: Provider,
}

/// A port of an RDMA device.
#[derive(Clone, Debug)]
pub(crate) struct RdmaPort {
    /// The device.
    pub(crate) device: Device,
    /// Port number, counted from 1.
    pub(crate) port: u8,
    /// MAC address of the kernel's interface on the port, if sysfs shows one.
    pub(crate) mac: Option<MacAddr>,
    /// Interface by which the port was selected. Others may be on the same port, such as representors.
    selected: Option<String>,
}

impl RdmaPort {
    fn new(device: &Device, port: u8, selected: Option<String>) -> Self {
        let rdma_port = Self { device: device.clone(), port, mac: None, selected };
        let mac = rdma_port.interface().map(|interface| MacAddr::from(interface.mac));
        Self { mac, ..rdma_port }
    }

    /// Returns the kernel's interface on the port in its present state, if sysfs shows one.
    pub(crate) fn interface(&self) -> Option<Interface> {
        let interfaces = self.device.interfaces().into_iter().filter(|interface| interface.port == self.port);
        interfaces.min_by_key(|interface| Some(&interface.name) != self.selected.as_ref())
    }

    /// Returns the present MTU of the kernel's interface on the port.
    pub(crate) fn mtu(&self) -> Option<u32> {
        self.interface()?.mtu
    }
}

impl ProbeSpec {
    /// Finds the port of a network interface, or a port of an RDMA device. `mlx5_0` means its first port and
    /// `mlx5_0/2` its port 2, as rdma-link(8) writes it.
    pub(crate) fn find(&self, selector: &DeviceSelector) -> Result<RdmaPort, PortError> {
        let devices = self.devices(&selector.device)?;
        for device in &devices {
            if device.name() == selector.device {
                return Ok(RdmaPort::new(device, 1, None));
            }
            if let Some((_, number)) = selector.device.split_once('/').filter(|(of, _)| *of == device.name()) {
                let number = number.parse().ok().filter(|number| *number > 0).ok_or_else(|| PortError::NoDevice {
                    driver: self.driver,
                    device: selector.device.clone(),
                    hint: format!("write the ports of {} as {}/1 and so on", device.name(), device.name()),
                })?;
                return Ok(RdmaPort::new(device, number, None));
            }
            if let Some(interface) = device.interfaces().into_iter().find(|interface| interface.name == selector.device)
            {
                return Ok(RdmaPort::new(device, interface.port, Some(interface.name)));
            }
        }
        let names: Vec<String> = devices.iter().map(describe).collect();
        let hint = match names.as_slice() {
            [] => format!(
                "there is no RDMA device; is the kernel driver loaded (`modprobe {}`, since Linux {})?",
                self.module, self.since
            ),
            names => format!("no RDMA device has this name or interface; available: {}", names.join(", ")),
        };
        // libibverbs lists only devices of providers that it could load, and does not report the others.
        let hint = self.missing_library().unwrap_or(hint);
        Err(PortError::NoDevice { driver: self.driver, device: selector.device.clone(), hint })
    }

    /// Returns what to do about the provider's library, if it is missing.
    fn missing_library(&self) -> Option<String> {
        let library = self.provider.to_string();
        let is_there = Verbs::load().ok()?.libraries().iter().any(|loaded| loaded.name == library);
        if is_there || self.provider == Provider::Other {
            return None;
        }
        Some(match Search::from_environment() {
            Search::Directory(directory) => format!(
                "{library} is missing in {}; {LIBRARY_DIRECTORY_VARIABLE} must name a directory with all RDMA \
                 libraries of one rdma-core release",
                directory.display()
            ),
            Search::System => format!(
                "{library} is missing and is needed to see such devices; install rdma-core 44 or later (Debian: \
                 apt-get install ibverbs-providers)"
            ),
        })
    }

    /// Returns all RDMA devices, of any provider.
    fn devices(&self, name: &str) -> Result<Vec<Device>, PortError> {
        Verbs::load().and_then(|verbs| verbs.devices()).map_err(|error| self.refused(name, error))
    }

    /// Turns an error of a verbs call, which names the cause, into an error of the port.
    #[allow(clippy::needless_pass_by_value)]
    pub(crate) fn refused(&self, name: &str, error: wirepath_verbs::Error) -> PortError {
        if let wirepath_verbs::Error::Call(CallError { call, cause: Cause::Capability(needs), .. }) = error {
            return privilege_error(self.driver, name, call, needs);
        }
        PortError::Refused { driver: self.driver, device: name.to_owned(), reason: error.to_string() }
    }

    /// Returns true if the driver may support the device: by the name that the kernel driver assigns, or by
    /// its provider.
    fn may_support(&self, device: &Device) -> bool {
        device.name().starts_with(self.prefix) || device.open().is_ok_and(|context| context.provider() == self.provider)
    }

    /// Returns the ports that the driver could open. `describe` opens one and describes its capabilities.
    pub(crate) fn candidates(&self, describe: impl Fn(&str) -> Result<String, PortError>) -> Vec<Candidate> {
        // Without libraries or devices the list is empty; `wirepath doctor` reports the reason.
        let devices = self.devices("").unwrap_or_default();
        let names = devices.into_iter().filter(|device| self.may_support(device)).flat_map(|device| names(&device));
        names.map(|name| Candidate { usable: describe(&name).map_err(|error| error.reason()), device: name }).collect()
    }
}

/// Exclusive use of an RDMA port within this process. Without it, the kernel would report that another user
/// holds the port.
#[derive(Debug)]
pub(crate) struct Claim(String, u8);

static CLAIMED: Mutex<Vec<(String, u8)>> = Mutex::new(Vec::new());

fn claimed() -> MutexGuard<'static, Vec<(String, u8)>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// Claims the port. `None` if this process already uses it.
    pub(crate) fn new(rdma_port: &RdmaPort) -> Option<Self> {
        let (device, port) = (rdma_port.device.name(), rdma_port.port);
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

/// Default time that a transmit queue may spend without a completion: the kernel's watchdog timeout (linux:
/// net/sched/sch_generic.c).
const DEFAULT_TX_TIMEOUT: u64 = 5;

/// The key `tx_timeout`, which all NIC drivers have.
pub(crate) const TX_TIMEOUT: Key<WithDefault<Integer<u64>>> =
    Key::integer("tx_timeout", 0..=3600).unit("seconds").default(DEFAULT_TX_TIMEOUT).about(
        "Time without a completion after which a transmit queue is recreated. The second time in a row, the device is \
         opened again. 0: never.",
    );

/// The port that a driver opens, and its timeouts.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSelector {
    /// A network interface or an RDMA device. `DEVICE/2` is the second port of a device.
    pub(crate) device: String,
    /// Longest time without a completion while packets are in flight and the link is up. Zero: no limit.
    pub(crate) tx_timeout: Duration,
    /// Offer to clients, if any.
    pub(crate) attach: Option<AttachConfig>,
}

impl DeviceSelector {
    pub(crate) fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), tx_timeout: Duration::from_secs(DEFAULT_TX_TIMEOUT), attach: None }
    }

    /// Reads the keys that all NIC drivers share. `example` names an RDMA device for error messages.
    pub(crate) fn read(device: Option<&str>, example: &str, settings: &Settings<'_>) -> Result<Self, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error(format!(
                "device: missing, expected a network interface or an RDMA device such as \"{example}\""
            )));
        };
        settings.renamed("seconds_stalled", "tx_timeout")?;
        settings.renamed("seconds_after_fatal", "[[port]] loss_timeout")?;
        let plain = Self::new(device);
        Ok(Self { tx_timeout: Duration::from_secs(settings.read(&TX_TIMEOUT)?), ..plain })
    }
}

/// Returns the RDMA devices of this machine; none without the libraries.
pub(crate) fn list_devices() -> Vec<Device> {
    Verbs::load().and_then(|verbs| verbs.devices()).unwrap_or_default()
}

/// Describes a device by its name and interfaces.
pub(crate) fn describe(device: &Device) -> String {
    let interfaces: Vec<_> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if interfaces.is_empty() { device.name() } else { format!("{} ({})", device.name(), interfaces.join(", ")) }
}

/// Returns the `device` setting of each port: the interface, or the name of the RDMA device.
fn names(device: &Device) -> Vec<String> {
    let mut names: Vec<String> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if names.is_empty() {
        names.push(device.name());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_capability_has_the_remedy_of_all_drivers() {
        let cause = Cause::Capability("CAP_NET_RAW");
        let call = CallError { call: "ibv_create_qp", subject: "mlx5_0 port 1".to_owned(), errno: libc::EPERM, cause };
        let probe =
            ProbeSpec { driver: "mlx5", module: "mlx5_ib", since: "3.13", prefix: "mlx5", provider: Provider::Mlx5 };
        let error = probe.refused("eth1", call.into());
        assert!(error.is_privilege(), "{error}");
        let remedy = crate::drivers::privilege::remedy();
        assert!(remedy.contains("setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep /"), "{remedy}");
        assert_eq!(error.to_string(), format!("mlx5: eth1: ibv_create_qp needs CAP_NET_RAW; {remedy}"));
    }
}
