//! `mana`: Microsoft Azure Network Adapter, driven through libmana's direct verbs (manadv(7)) on queues in
//! memory of this process.
//!
//! ```toml
//! [[port]]
//! driver = "mana"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mana_0")
//!
//! [port.mana]
//! tx_timeout = 5
//! ```
//!
//! The kernel must have released the port: `ip link set dev eth1 down`.
//!
//! A send queue is a ring of work requests in the device's own format; only the last one of a burst requests
//! a completion. All work requests of a receive queue are always posted. The doorbell is rung once per batch.
//! Completions are validated. An invalid one breaks the queue, which is recreated at run time.
//!
//! A TSO packet may have more segments than a descriptor has entries: a descriptor has 30, and 64 KB in
//! buffers of 2 KB take 33. Such a packet is split into two descriptors, and the second gets its own headers.
//!
//! An idle worker can sleep until packets arrive, if the kernel has an event queue for each completion
//! vector. Early kernels have one vector without an event queue. The queue is armed by its doorbell, because
//! libmana does not know which entries were read.

mod cq;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod nic;
mod offload;
mod queue_spans;
mod rx;
mod shared_queue;
#[cfg(test)]
mod tests;
mod tx;
mod wqe;

use nic::ManaNic;

use super::common::device::NicDevice;
use super::common::nic::Nic;
use super::common::probe::{DeviceSelector, TX_TIMEOUT};
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::ipc::{
    ATTACH, ATTACH_BUFFERS, ATTACH_RX_QUEUES, ATTACH_TX_QUEUES, AttachConfig, AttachError, AttachOffer, AttachedPort,
};
use crate::port::{Device, PortError, PortSpec};
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{ConfigError, ConfigTable, Settings};

pub(crate) const NAME: &str = "mana";

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"mana\".",
    absent: "every key has its default",
    keys: &[&TX_TIMEOUT, &ATTACH, &ATTACH_TX_QUEUES, &ATTACH_RX_QUEUES, &ATTACH_BUFFERS],
    example: "[port.mana]\nattach = \"/run/wirepath/gw.sock\"\nattach_tx_queues = 2\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct Mana;

/// Maps the queues that a server of `attach` offers.
pub(crate) fn accept(offer: AttachOffer) -> Result<AttachedPort, AttachError> {
    offer.take::<ManaNic>()
}

/// Settings of a `mana` port.
#[derive(Clone, Debug)]
pub struct Options(DeviceSelector);

impl Options {
    /// Selects the port of a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self(DeviceSelector::new(device))
    }

    /// Offers the port to other processes ([`crate::ipc`]).
    pub fn offer(mut self, offer: AttachConfig) -> Self {
        self.0.attach = Some(offer);
        self
    }
}

impl Driver for Mana {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "Microsoft Azure Network Adapter, by direct verbs on queues in own memory"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::RdmaPort
    }

    fn in_auto(&self) -> bool {
        true
    }

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_RAW | CapabilitySet::IPC_LOCK
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let selector = DeviceSelector::read(device, "mana_0", settings)?;
        Ok(Box::new(Options(DeviceSelector { attach: AttachConfig::read(settings)?, ..selector })))
    }

    fn candidates(&self) -> Vec<Candidate> {
        ManaNic::PROBE.candidates(|name| {
            let caps = NicDevice::<ManaNic>::open(DeviceSelector::new(name), ())?.capabilities();
            Ok(format!(
                "{}, {} queues, MTU {}, checksums, VLAN, segmentation, RSS; {}",
                caps.mode, caps.max_rx_queues, caps.max_mtu, caps.notes[0]
            ))
        })
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(NicDevice::<ManaNic>::open(self.0, ())?))
    }
}
