//! `verbs`: raw-packet queues of any RDMA NIC, through libibverbs alone (ibv_post_send(3), ibv_poll_cq(3)).
//!
//! ```toml
//! [[port]]
//! driver = "verbs"
//! device = "mlx4_0"          # the RDMA device ("mlx4_0/2": its port 2), or the kernel's interface
//!
//! [port.verbs]
//! checksums = false
//! ```
//!
//! For NICs without a driver of their own. The provider needs raw-packet queue pairs, receive work queues
//! with indirection tables, and `ibv_create_flow`. A driver of its own is faster and has more features: this
//! one does not access queue memory, spends a call and a translation on each packet, and gets only the
//! metadata in `ibv_wc`.
//!
//! VLAN tags stay in received frames, because plain completions have no field for them. They have none for
//! timestamps either: both need an extended queue (`ibv_create_cq_ex`), which this driver does not use.
//! libibverbs does not support the RSS hash.
//!
//! The device segments TCP (`IBV_WR_TSO`) if it and the provider can, which only libmlx5 does. Its send rings have at
//! most the entries that fit with requests for superframes.
//!
//! The driver refuses mlx5 devices whose kernel reports CQE version 0: libmlx5 then finds no completions of
//! receive work queues. `driver = "mlx5"` reads such completions.
//!
//! Completions are validated as far as possible: a provider may count requests instead of reading the request
//! from the completion. `driver = "auto"` does not select this driver, because it is untested with other
//! providers.

pub mod flow_specs;
mod nic;
mod ring_end;
mod rx;
mod tx;

use nic::VerbsNic;

use super::common::device::NicDevice;
use super::common::nic::Nic;
use super::common::probe::{DeviceSelector, TX_TIMEOUT};
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::port::{Device, PortError, PortSpec};
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{ConfigError, ConfigTable, Flag, Key, Settings, WithDefault};

const NAME: &str = "verbs";

const CHECKSUMS: Key<WithDefault<Flag>> =
    Key::flag("checksums").default(true).about("Lets the device compute and check checksums, if it can.");

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"verbs\".",
    absent: "every key has its default",
    keys: &[&CHECKSUMS, &TX_TIMEOUT],
    example: "[port.verbs]\nchecksums = false\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct Verbs;

/// Settings of a `verbs` port.
#[derive(Clone, Debug)]
pub struct Options {
    selector: DeviceSelector,
    checksums: bool,
}

impl Options {
    /// Selects the port of a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self { selector: DeviceSelector::new(device), checksums: CHECKSUMS.default_value() }
    }

    fn open(self) -> Result<NicDevice<VerbsNic>, PortError> {
        NicDevice::open(self.selector.clone(), self)
    }
}

impl Driver for Verbs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "any other RDMA NIC with raw-packet queues, through libibverbs alone"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::RdmaPort
    }

    fn may_have_rule_hardware(&self) -> bool {
        true
    }

    fn modes(&self) -> &'static [&'static str] {
        &["", "checksums = false"]
    }

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_RAW | CapabilitySet::IPC_LOCK
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let selector = DeviceSelector::read(device, "mlx4_0", settings)?;
        let why = "the \"verbs\" driver cannot share queues with other processes; use \"mlx5\" or \"mana\"";
        settings.unsupported("attach", why)?;
        let checksums = settings.read(&CHECKSUMS)?;
        Ok(Box::new(Options { selector, checksums }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        VerbsNic::PROBE.candidates(|name| {
            let caps = Options::new(name).open()?.capabilities();
            Ok(format!("{}, {} queues, MTU {}", caps.mode, caps.max_rx_queues, caps.max_mtu))
        })
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(Self::open(*self)?))
    }

    fn may_offload_rules(&self) -> bool {
        true
    }
}
