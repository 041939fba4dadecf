//! Which RDMA device and port a name means.

use wirepath_verbs::{Device, Provider, Verbs};

use crate::port::{MacAddress, PortError};

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
        let interface = device.interfaces().into_iter().find(|interface| interface.port == port);
        Self { device: device.clone(), port, mac: interface.map(|interface| MacAddress::from(interface.mac)) }
    }
}

/// Finds the port that belongs to a network interface, or port `port` (1 if not said) of an RDMA device; `mlx5_0/2` is port 2 of
/// `mlx5_0`, as rdma-link(8) writes it.
pub(crate) fn find(who: &Who, name: &str, port: Option<u8>) -> Result<Found, PortError> {
    let devices = devices(who, name)?;
    for device in &devices {
        if device.name() == name {
            return Ok(Found::new(device, port.unwrap_or(1)));
        }
        if let Some((_, number)) = name.split_once('/').filter(|(of, _)| *of == device.name()) {
            let number = number.parse().ok().filter(|number| *number > 0).ok_or_else(|| PortError::NoDevice {
                driver: who.driver,
                device: name.to_owned(),
                hint: format!("the ports of {} are written {}/1 and so on", device.name(), device.name()),
            })?;
            return Ok(Found::new(device, number));
        }
        if let Some(interface) = device.interfaces().into_iter().find(|interface| interface.name == name) {
            return Ok(Found::new(device, interface.port));
        }
    }
    let names: Vec<String> = devices.iter().map(describe).collect();
    let hint = match names.as_slice() {
        [] => format!(
            "there is no RDMA device; is the kernel's driver loaded (`modprobe {}`, Linux {})?",
            who.module, who.since
        ),
        names => format!("no RDMA device of that name or behind that interface; there are {}", names.join(", ")),
    };
    Err(PortError::NoDevice { driver: who.driver, device: name.to_owned(), hint })
}

/// All RDMA devices, of whatever kind.
pub(crate) fn devices(who: &Who, name: &str) -> Result<Vec<Device>, PortError> {
    Verbs::load().and_then(|verbs| verbs.devices()).map_err(|error| refused(who, name, error))
}

/// An error of a verbs call, which says what is in the way and what removes it.
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn refused(who: &Who, name: &str, error: wirepath_verbs::Error) -> PortError {
    PortError::Refused { driver: who.driver, device: name.to_owned(), reason: error.to_string() }
}

fn describe(device: &Device) -> String {
    let interfaces: Vec<_> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if interfaces.is_empty() { device.name() } else { format!("{} ({})", device.name(), interfaces.join(", ")) }
}

/// Whether the device can be one for the driver: by its name, as the kernel's driver gives it, or by its provider.
pub(crate) fn may_be(who: &Who, device: &Device) -> bool {
    device.name().starts_with(who.prefix) || device.open().is_ok_and(|context| context.provider() == who.provider)
}

/// What to write as `device` for each port: the interface, or the name of the RDMA device.
pub(crate) fn names(device: &Device) -> Vec<String> {
    let mut names: Vec<String> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if names.is_empty() {
        names.push(device.name());
    }
    names
}
