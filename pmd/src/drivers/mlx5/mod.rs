//! `mlx5`: queues of ConnectX and BlueField NICs, driven through libmlx5's direct verbs (mlx5dv(7)) in memory of ours.
//!
//! ```toml
//! [[port]]
//! driver = "mlx5"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mlx5_0")
//!
//! [port.mlx5]
//! receive = "linear"         # or "striding": several buffers to a work request
//! compress = "auto"          # completions of several packets in one: "off", "hash", "checksum" or "stride"
//! multi_packet = true        # several packets in one send descriptor
//! inline = 0                 # bytes up to which a packet lies in its descriptor whole
//! min_inline = 18            # bytes that have to lie there, 0 or 18; found out, unless it is said
//! blue_flame = 64            # bytes up to which the only descriptor of a burst is written to the register whole: 0, or up to 4 times 64
//! tunnels = true             # the device looks into tunnels that it knows: inner checksums, both ways
//! timestamps = false         # hardware timestamps on received packets
//! rules = "auto"             # how flow rules get into the device: "dv" (mlx5dv), "ibv" (ibv_create_flow), "off"
//! seconds_after_fatal = 15   # how long a device that reported a fatal error is waited for
//! seconds_stalled = 5        # how long a transmit queue waits for a completion until it is made anew; 0: for ever
//! attach = "/run/gw.sock"    # other processes get queues of the port here (`wirepath attach`), `[pool] shared = true` with it
//! attach_tx_queues = 1       # most of one process
//! attach_rx_queues = 0
//! attach_buffers = 2048
//! ```
//!
//! Compressed completions are in the layout of sessions. The enhanced one of newer devices, whose entries each say which pass they are of, is
//! a bit of the queue's context that only firmware commands set (DPDK does, by DevX): neither `mlx5dv_create_cq` nor the kernel's own command
//! has a place for it.
//!
//! The kernel keeps the port: its interface stays, and what no rule of ours takes still reaches it.
//!
//! A send queue is a ring of descriptors; of a burst only the last asks for a completion. BlueFlame pays where a packet is sent alone: the
//! device need not fetch the descriptor, a round trip over PCIe of some hundred nanoseconds, and write-combining memory sends 64 bytes in one
//! piece as it does 8. Of a burst of several descriptors the device fetches the others anyway, and longer ones take processor time for each
//! line; with `inline` the packet travels along. A register without a buffer, or that several queues share, is only told. A receive queue has all its work requests posted
//! all the time. Behind the buffers of a request lies a sink for what is too long, unless the MTU of the kernel's interface is such that nothing
//! longer comes: the device then has a segment less to fetch, and tells of a frame that came all the same as of an error. Doorbell record and register are written once for each batch. What the device writes is believed as far as it can be true:
//! everything else ends the queue, which is then made anew while the program runs. An idle worker can sleep until packets come: it arms its
//! completion queues by itself, since libmlx5 does not know what was read of them.

mod arrival;
mod cq;
#[cfg(any(test, fuzzing))]
pub mod hostile;
mod lent;
mod modes;
mod nic;
mod offload;
mod rules;
mod run;
mod rx;
#[cfg(test)]
mod tests;
mod tx;
mod wqe;

use nic::Mlx5Nic;
use rules::Wish;

use super::direct::attach::{AttachError, Attached, Invitation, Offer};
use super::direct::device::{DirectDevice, Nic};
use super::direct::find::Which;
use super::{Candidate, Driver};
use crate::port::{Device, Plan, PortError};
use crate::settings::{ConfigError, Settings};

pub(super) const NAME: &str = "mlx5";

/// The driver.
#[derive(Debug)]
pub struct Mlx5;

/// Takes what another process lends of its port.
pub(crate) fn accept(invitation: Invitation) -> Result<Attached, AttachError> {
    invitation.take::<Mlx5Nic>()
}

/// What an `mlx5` port opens, and how it is to work.
#[derive(Clone, Debug)]
pub struct Options {
    which: Which,
    receive: Receive,
    compress: Compress,
    multi_packet: bool,
    inline: usize,
    blue_flame: usize,
    tunnels: bool,
    min_inline: Option<usize>,
    timestamps: bool,
    rules: Wish,
}

/// How packets lie in receive buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receive {
    Linear,
    Striding,
}

/// How completions are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compress {
    /// As the device can, and as fits the rest.
    Auto,
    Off,
    Hash,
    Checksum,
    Stride,
}

impl Options {
    /// The port behind a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self::of(Which::new(device))
    }

    /// Offers the port to other processes ([`crate::attach`]).
    pub fn offer(mut self, offer: Offer) -> Self {
        self.which.attach = Some(offer);
        self
    }

    fn of(which: Which) -> Self {
        Self {
            which,
            receive: Receive::Linear,
            compress: Compress::Auto,
            multi_packet: true,
            inline: 0,
            blue_flame: 64,
            tunnels: true,
            min_inline: None,
            timestamps: false,
            rules: Wish::Auto,
        }
    }
}

impl Driver for Mlx5 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "NVIDIA ConnectX and BlueField, by direct verbs on queues of ours"
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let layouts = [("linear", Receive::Linear), ("striding", Receive::Striding)];
        let wishes = [("auto", Wish::Auto), ("dv", Wish::Dv), ("ibv", Wish::Ibv), ("off", Wish::Off)];
        let formats = [
            ("auto", Compress::Auto),
            ("off", Compress::Off),
            ("hash", Compress::Hash),
            ("checksum", Compress::Checksum),
            ("stride", Compress::Stride),
        ];
        let plain = Options::of(Which::read(device, "mlx5_0", settings)?);
        let options = Options {
            receive: settings.choice("receive", &layouts)?.unwrap_or(plain.receive),
            compress: settings.choice("compress", &formats)?.unwrap_or(plain.compress),
            multi_packet: settings.get("multi_packet")?.unwrap_or(plain.multi_packet),
            inline: settings.integer("inline", 0..=wqe::MAX_INLINE as i64)?.unwrap_or(plain.inline),
            blue_flame: settings.integer("blue_flame", 0..=wqe::MAX_BLUE_FLAME as i64)?.unwrap_or(plain.blue_flame),
            min_inline: settings.choice("min_inline", &[("0", 0), ("18", 18)])?,
            tunnels: settings.get("tunnels")?.unwrap_or(plain.tunnels),
            timestamps: settings.get("timestamps")?.unwrap_or(plain.timestamps),
            rules: settings.choice("rules", &wishes)?.unwrap_or(plain.rules),
            ..plain
        };
        if !options.blue_flame.is_multiple_of(64) {
            return Err(settings.error_in("blue_flame", "descriptors take a multiple of 64 bytes"));
        }
        let strides = options.receive == Receive::Striding;
        match options.compress {
            Compress::Stride if !strides => {
                Err(settings.error_in("compress", "\"stride\" is for receive = \"striding\""))
            }
            Compress::Hash | Compress::Checksum if strides => {
                Err(settings.error_in("compress", "receive = \"striding\" has \"stride\" or \"off\" only"))
            }
            Compress::Hash | Compress::Checksum | Compress::Stride if options.timestamps => {
                Err(settings.error_in("compress", "compressed completions have no timestamps"))
            }
            _ => Ok(Box::new(options)),
        }
    }

    fn candidates(&self) -> Vec<Candidate> {
        Mlx5Nic::WHO.candidates(|name| {
            let device = Options::new(name).open()?;
            let can = device.capabilities();
            let abilities = device.nic().abilities();
            Ok(format!("{}, {} queues, MTU {}; {abilities}", can.mode, can.max_rx_queues, can.max_mtu))
        })
    }
}

impl Options {
    fn open(self) -> Result<DirectDevice<Mlx5Nic>, PortError> {
        DirectDevice::open(self.which.clone(), self)
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
        self.rules != Wish::Off
    }

    fn for_rules_of(&self, driver: &str, device: &str) -> Option<Box<dyn Plan>> {
        let options = || Self { rules: self.rules, ..Self::new(device) };
        (driver == NAME).then(|| Box::new(options()) as Box<dyn Plan>)
    }
}
