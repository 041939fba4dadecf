//! Which RDMA device and port a name means.

use wirepath_verbs::{Device, Provider, Verbs};

use super::NAME;
use crate::port::{MacAddress, PortError};

/// A port of an RDMA device.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// The device.
    pub(super) device: Device,
    /// Port, counted from 1.
    pub(super) port: u8,
    /// Address of the kernel's interface on the port, if sysfs tells of one.
    pub(super) mac: Option<MacAddress>,
}

impl Found {
    fn new(device: &Device, port: u8) -> Self {
        let interface = device.interfaces().into_iter().find(|interface| interface.port == port);
        Self { device: device.clone(), port, mac: interface.map(|interface| MacAddress::from(interface.mac)) }
    }
}

/// Finds the port that belongs to a network interface, or port `port` (1 if not said) of an RDMA device.
pub(super) fn find(name: &str, port: Option<u8>) -> Result<Found, PortError> {
    let devices = devices(name)?;
    for device in &devices {
        if device.name() == name {
            return Ok(Found::new(device, port.unwrap_or(1)));
        }
        if let Some(interface) = device.interfaces().into_iter().find(|interface| interface.name == name) {
            return Ok(Found::new(device, interface.port));
        }
    }
    let names: Vec<String> = devices.iter().map(describe).collect();
    let hint = match names.as_slice() {
        [] => "there is no RDMA device; is the kernel's driver loaded (`modprobe mana_ib`, Linux 6.2)?".to_owned(),
        names => format!("no RDMA device of that name or behind that interface; there are {}", names.join(", ")),
    };
    Err(PortError::NoDevice { driver: NAME, device: name.to_owned(), hint })
}

/// All RDMA devices, of whatever kind.
pub(super) fn devices(name: &str) -> Result<Vec<Device>, PortError> {
    Verbs::load().and_then(|verbs| verbs.devices()).map_err(|error| refused(name, error))
}

/// An error of a verbs call, which says what is in the way and what removes it.
#[allow(clippy::needless_pass_by_value)]
pub(super) fn refused(name: &str, error: wirepath_verbs::Error) -> PortError {
    PortError::Refused { driver: NAME, device: name.to_owned(), reason: error.to_string() }
}

fn describe(device: &Device) -> String {
    let interfaces: Vec<_> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if interfaces.is_empty() { device.name() } else { format!("{} ({})", device.name(), interfaces.join(", ")) }
}

/// Whether the device can be a MANA: by its name, which the kernel's driver gives (`mana_0`), or by its provider.
pub(super) fn may_be_mana(device: &Device) -> bool {
    device.name().starts_with("mana") || device.open().is_ok_and(|context| context.provider() == Provider::Mana)
}

/// What to write as `device` for each port: the interface, or the name of the RDMA device.
pub(super) fn names(device: &Device) -> Vec<String> {
    let mut names: Vec<String> = device.interfaces().into_iter().map(|interface| interface.name).collect();
    if names.is_empty() {
        names.push(device.name());
    }
    names
}
