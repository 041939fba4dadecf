//! `mana`: queues of the Microsoft Azure Network Adapter, driven through libmana's direct verbs (manadv(7)) in memory of ours.
//!
//! ```toml
//! [[port]]
//! driver = "mana"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mana_0")
//!
//! [port.mana]
//! port = 1                   # of an RDMA device, counted from 1
//! seconds_after_fatal = 15   # how long a device that reported a fatal error is waited for
//! ```
//!
//! The kernel must have let go of the port: `ip link set dev eth1 down`.
//!
//! A send queue is a ring of work requests, each described whole by the words that the device reads; of a burst only the last asks for a
//! completion. A receive queue has all its work requests posted all the time. One doorbell for each batch. What the device writes is
//! believed as far as it can be true: everything else ends the queue, which is then made anew while the program runs.

mod cq;
mod device;
mod fault;
mod find;
mod hardware;
#[cfg(any(test, fuzzing))]
pub mod hostile;
mod offload;
mod rx;
mod second;
#[cfg(test)]
mod tests;
mod tx;
mod wqe;

use std::time::Duration;

use device::ManaDevice;
pub use second::{Borrowed, Lender, Shape};

use super::direct::keys;
use super::{Candidate, Driver};
use crate::port::{Device, Plan, PortError};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "mana";

mod exchange {
    pub(super) type Exchange<R> = crate::drivers::direct::exchange::Exchange<R, super::fault::Fault>;
}

/// The driver.
#[derive(Debug)]
pub struct Mana;

/// What a `mana` port opens.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    port: Option<u8>,
    patience: Duration,
    shared: bool,
}

impl Options {
    /// The port behind a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), port: None, patience: device::PATIENCE, shared: false }
    }

    /// Another port of the RDMA device, counted from 1.
    pub fn port(mut self, port: u8) -> Self {
        self.port = Some(port);
        self
    }
}

impl Driver for Mana {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "Microsoft Azure Network Adapter, by direct verbs on queues of ours"
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let Some(device) = device else {
            return Err(
                settings.error("device: missing, expected a network interface or an RDMA device such as \"mana_0\"")
            );
        };
        let seconds = settings.integer("seconds_after_fatal", 0..=3600)?;
        Ok(Box::new(Options {
            port: settings.integer("port", 1..=255)?,
            patience: seconds.map_or(device::PATIENCE, Duration::from_secs),
            ..Options::new(device)
        }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        // Without the libraries, or without devices, there is nothing to offer; `wirepath doctor` says why.
        let devices = find::devices("").unwrap_or_default();
        let offer = |name: String| {
            let usable = ManaDevice::open(Options::new(&name)).map(|device| {
                let can = device.capabilities();
                format!(
                    "{}, {} queues, MTU {}, checksums, VLAN, segmentation, RSS; {}",
                    can.mode, can.max_rx_queues, can.max_mtu, can.notes[0]
                )
            });
            Candidate { device: name, usable: usable.map_err(|error| error.to_string()) }
        };
        devices.into_iter().filter(find::may_be_mana).flat_map(|device| find::names(&device)).map(offer).collect()
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(ManaDevice::open(*self)?))
    }
}
