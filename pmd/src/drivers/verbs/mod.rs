//! `verbs`: raw-packet queues of any RDMA NIC, through libibverbs alone (ibv_post_send(3), ibv_poll_cq(3)).
//!
//! ```toml
//! [[port]]
//! driver = "verbs"
//! device = "mlx4_0"          # the RDMA device, or the kernel's interface
//!
//! [port.verbs]
//! port = 1                   # of an RDMA device, counted from 1
//! checksums = true           # let the device compute them, if it can
//! seconds_after_fatal = 15   # how long a device that reported a fatal error is waited for
//! seconds_stalled = 5        # how long a transmit queue waits for a completion until it is made anew; 0: for ever
//! ```
//!
//! For NICs without a driver of their own here: its provider needs raw-packet queue pairs, receive work queues with indirection tables and
//! `ibv_create_flow`. Where there is another driver, that one is faster and can do more: this one looks into no queue's memory, pays for
//! a call and a translation for each packet, and knows of a packet what `ibv_wc` tells. VLAN tags stay in received frames, because plain
//! completions have no place for them; nor have they for timestamps (both take an extended queue, `ibv_create_cq_ex`, which is not used here) or
//! for the hash, of which libibverbs knows nothing. Large TCP packets are not cut (`IBV_WR_TSO` is not used). What the provider says of a completion is believed as far as the driver can tell: which request it is
//! about, the provider may have counted instead of read. `driver = "auto"` does not try it, since nobody has seen what other providers make of it.

mod nic;
mod rx;
mod tx;

use nic::VerbsNic;

use super::direct::device::{DirectDevice, Nic};
use super::direct::find::Which;
use super::{Candidate, Driver};
use crate::port::{Device, Plan, PortError};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "verbs";

/// The driver.
#[derive(Debug)]
pub struct Verbs;

/// What a `verbs` port opens, and how it is to work.
#[derive(Clone, Debug)]
pub struct Options {
    which: Which,
    checksums: bool,
}

impl Options {
    /// The port behind a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self { which: Which::new(device), checksums: true }
    }

    fn open(self) -> Result<DirectDevice<VerbsNic>, PortError> {
        DirectDevice::open(self.which.clone(), self)
    }
}

impl Driver for Verbs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "any other RDMA NIC with raw-packet queues, through libibverbs alone"
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let which = Which::read(device, "mlx4_0", settings)?;
        if which.attach.is_some() {
            let why = "queues of plain verbs cannot be in another process; \"mlx5\" and \"mana\" can offer theirs";
            return Err(settings.error_in("attach", why));
        }
        let checksums = settings.get("checksums")?.unwrap_or(true);
        Ok(Box::new(Options { which, checksums }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        VerbsNic::WHO.candidates(|name| {
            let can = Options::new(name).open()?.capabilities();
            Ok(format!("{}, {} queues, MTU {}", can.mode, can.max_rx_queues, can.max_mtu))
        })
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(Self::open(*self)?))
    }

    fn rules_in_hardware(&self) -> bool {
        true
    }
}
