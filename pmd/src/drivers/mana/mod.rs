//! `mana`: queues of the Microsoft Azure Network Adapter, driven through libmana's direct verbs (manadv(7)) in memory of ours.
//!
//! ```toml
//! [[port]]
//! driver = "mana"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mana_0")
//!
//! [port.mana]
//! seconds_after_fatal = 15   # how long a device that reported a fatal error is waited for
//! seconds_stalled = 5        # how long a transmit queue waits for a completion until it is made anew; 0: for ever
//! attach = "/run/gw.sock"    # other processes get queues of the port here (`wirepath attach`), `[pool] shared = true` with it
//! attach_tx_queues = 1       # most of one process
//! attach_rx_queues = 0
//! attach_buffers = 2048
//! ```
//!
//! The kernel must have let go of the port: `ip link set dev eth1 down`.
//!
//! A send queue is a ring of work requests, each described whole by the words that the device reads; of a burst only the last asks for a
//! completion. A receive queue has all its work requests posted all the time. One doorbell for each batch. What the device writes is
//! believed as far as it can be true: everything else ends the queue, which is then made anew while the program runs.
//!
//! A TCP packet that the device is to cut and that has more segments than a descriptor has entries (30; 64 KB in buffers of 2 KB have 33)
//! becomes two descriptors, the latter with headers of its own.
//!
//! An idle worker can sleep until packets come, where the kernel has an event queue for each completion vector; early ones have one vector and
//! nothing behind it. The queue is armed by its doorbell, as libmana does not know what was read of it.

mod cq;
#[cfg(any(test, fuzzing))]
pub mod hostile;
mod lent;
mod nic;
mod offload;
mod rx;
#[cfg(test)]
mod tests;
mod tx;
mod wqe;

use nic::ManaNic;

use super::direct::attach::{AttachError, Attached, Invitation, Offer};
use super::direct::device::{DirectDevice, Nic};
use super::direct::find::Which;
use super::{Candidate, Driver};
use crate::port::{Device, Plan, PortError};
use crate::settings::{ConfigError, Settings};

pub(super) const NAME: &str = "mana";

/// The driver.
#[derive(Debug)]
pub struct Mana;

/// Takes what another process lends of its port.
pub(crate) fn accept(invitation: Invitation) -> Result<Attached, AttachError> {
    invitation.take::<ManaNic>()
}

/// What a `mana` port opens.
#[derive(Clone, Debug)]
pub struct Options(Which);

impl Options {
    /// The port behind a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self(Which::new(device))
    }

    /// Offers the port to other processes ([`crate::attach`]).
    pub fn offer(mut self, offer: Offer) -> Self {
        self.0.attach = Some(offer);
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
        Ok(Box::new(Options(Which::read(device, "mana_0", settings)?)))
    }

    fn candidates(&self) -> Vec<Candidate> {
        ManaNic::WHO.candidates(|name| {
            let can = DirectDevice::<ManaNic>::open(Which::new(name), ())?.capabilities();
            Ok(format!(
                "{}, {} queues, MTU {}, checksums, VLAN, segmentation, RSS; {}",
                can.mode, can.max_rx_queues, can.max_mtu, can.notes[0]
            ))
        })
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(DirectDevice::<ManaNic>::open(self.0, ())?))
    }
}
