//! `mlx5`: queues of ConnectX and BlueField NICs, driven through libmlx5's direct verbs (mlx5dv(7)) in memory of ours.
//!
//! ```toml
//! [[port]]
//! driver = "mlx5"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mlx5_0")
//!
//! [port.mlx5]
//! port = 1                   # of an RDMA device, counted from 1
//! receive = "linear"         # or "striding": several buffers to a work request
//! compress = "auto"          # completions of several packets in one: "off", "hash", "checksum" or "stride"
//! multi_packet = true        # several packets in one send descriptor
//! inline = 0                 # bytes up to which a packet lies in its descriptor whole
//! min_inline = 18            # bytes that have to lie there, 0 or 18; found out, unless it is said
//! timestamps = false         # hardware timestamps on received packets
//! seconds_after_fatal = 15   # how long a device that reported a fatal error is waited for
//! ```
//!
//! The kernel keeps the port: its interface stays, and what no rule of ours takes still reaches it.
//!
//! A send queue is a ring of descriptors; of a burst only the last asks for a completion. A receive queue has all its work requests posted
//! all the time. Doorbell record and register are written once for each batch. What the device writes is believed as far as it can be true:
//! everything else ends the queue, which is then made anew while the program runs.

mod arrival;
mod cq;
mod device;
mod fault;
mod find;
mod hardware;
#[cfg(any(test, fuzzing))]
pub mod hostile;
mod offload;
mod rx;
mod steering;
#[cfg(test)]
mod tests;
mod tx;
mod wqe;

use std::time::Duration;

use device::Mlx5Device;
use fault::Fault;

use super::{Candidate, Driver};
use crate::port::{Device, Plan, PortError};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "mlx5";

type Exchange<R> = super::direct::exchange::Exchange<R, Fault>;

/// The driver.
#[derive(Debug)]
pub struct Mlx5;

/// What an `mlx5` port opens, and how it is to work.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    port: Option<u8>,
    patience: Duration,
    receive: Receive,
    compress: Compress,
    multi_packet: bool,
    inline: usize,
    min_inline: Option<usize>,
    timestamps: bool,
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
        Self {
            device: device.into(),
            port: None,
            patience: device::PATIENCE,
            receive: Receive::Linear,
            compress: Compress::Auto,
            multi_packet: true,
            inline: 0,
            min_inline: None,
            timestamps: false,
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
        let Some(device) = device else {
            return Err(
                settings.error("device: missing, expected a network interface or an RDMA device such as \"mlx5_0\"")
            );
        };
        let layouts = [("linear", Receive::Linear), ("striding", Receive::Striding)];
        let formats = [
            ("auto", Compress::Auto),
            ("off", Compress::Off),
            ("hash", Compress::Hash),
            ("checksum", Compress::Checksum),
            ("stride", Compress::Stride),
        ];
        let plain = Options::new(device);
        let options = Options {
            port: settings.integer("port", 1..=255)?,
            patience: settings.integer("seconds_after_fatal", 0..=3600)?.map_or(plain.patience, Duration::from_secs),
            receive: settings.choice("receive", &layouts)?.unwrap_or(plain.receive),
            compress: settings.choice("compress", &formats)?.unwrap_or(plain.compress),
            multi_packet: settings.get("multi_packet")?.unwrap_or(plain.multi_packet),
            inline: settings.integer("inline", 0..=wqe::MAX_INLINE as i64)?.unwrap_or(plain.inline),
            min_inline: settings.choice("min_inline", &[("0", 0), ("18", 18)])?,
            timestamps: settings.get("timestamps")?.unwrap_or(plain.timestamps),
            ..plain
        };
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
        // Without the libraries, or without devices, there is nothing to offer; `wirepath doctor` says why.
        let devices = find::devices("").unwrap_or_default();
        let offer = |name: String| {
            let usable = Mlx5Device::open(Options::new(&name)).map(|device| {
                let can = device.capabilities();
                format!("{}, {} queues, MTU {}; {}", can.mode, can.max_rx_queues, can.max_mtu, device.abilities())
            });
            Candidate { device: name, usable: usable.map_err(|error| error.to_string()) }
        };
        devices.into_iter().filter(find::may_be_mlx5).flat_map(|device| find::names(&device)).map(offer).collect()
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(Mlx5Device::open(*self)?))
    }
}
