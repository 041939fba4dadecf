//! Which RDMA device and port a name means.

use wirepath_verbs::{Device, Error, Provider};

use super::NAME;
use crate::drivers::direct::find::{self, Who};
pub(super) use crate::drivers::direct::find::{Found, names};
use crate::port::PortError;

const WHO: Who = Who { driver: NAME, module: "mana_ib", since: "6.2", prefix: "mana", provider: Provider::Mana };

/// Finds the port that belongs to a network interface, or port `port` (1 if not said) of an RDMA device.
pub(super) fn find(name: &str, port: Option<u8>) -> Result<Found, PortError> {
    find::find(&WHO, name, port)
}

/// All RDMA devices, of whatever kind.
pub(super) fn devices(name: &str) -> Result<Vec<Device>, PortError> {
    find::devices(&WHO, name)
}

/// An error of a verbs call, which says what is in the way and what removes it.
pub(super) fn refused(name: &str, error: Error) -> PortError {
    find::refused(&WHO, name, error)
}

/// Whether the device can be a MANA.
pub(super) fn may_be_mana(device: &Device) -> bool {
    find::may_be(&WHO, device)
}
