//! `mlx5`: ConnectX and BlueField NICs, driven through libmlx5's direct verbs (mlx5dv(7)) on queues in memory
//! of this process.
//!
//! ```toml
//! [[port]]
//! driver = "mlx5"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mlx5_0")
//!
//! [port.mlx5]
//! rx_mode = "linear"         # or "striding": several buffers in a work request
//! cqe_compression = "auto"   # several packets in one completion: "off", "hash", "checksum" or "stride"
//! multi_packet = true        # several packets in one send descriptor
//! tx_inline = 0              # packets up to this many bytes are copied into their descriptor
//! min_inline = "18"          # bytes that must be inline, "0" or "18"; detected if absent
//! blue_flame = 64            # a burst of one descriptor up to this size uses BlueFlame: 0 to 256, multiple of 64
//! tunnels = true             # inner checksums of supported tunnels, in both directions
//! timestamps = false         # hardware timestamps on received packets
//! rules = "auto"             # interface for flow rules: "dv" (mlx5dv), "ibv" (ibv_create_flow), "off"
//! tx_timeout = 5             # seconds without a completion after which a transmit queue is recreated, and the
//!                            # second time in a row the device is opened again; 0: never
//! attach = "/run/gw.sock"    # socket for other processes (`wirepath attach`); needs `[pool] shared = true`
//! attach_tx_queues = 1       # most of one process
//! attach_rx_queues = 0
//! attach_buffers = 2048
//! ```
//!
//! Compressed completions use the session layout. Newer devices have an enhanced layout, in which every entry
//! has its own owner bits. It is enabled by a bit of the CQ context that only firmware commands can set (DPDK
//! does so by DevX). Neither `mlx5dv_create_cq` nor the kernel's own command offers it.
//!
//! The kernel keeps the port. Its interface remains, and frames that no rule of this driver matches still
//! reach it.
//!
//! A send queue is a ring of descriptors; only the last one of a burst requests a completion. BlueFlame helps
//! if a packet is sent alone: the device need not fetch the descriptor, which is a PCIe round trip of some
//! hundred nanoseconds. Write-combining memory sends 64 bytes in one piece, as it does 8. In a burst of
//! several descriptors the device fetches the others anyway, and longer descriptors cost processor time for
//! each line. With `tx_inline` the packet travels along. A register without a BlueFlame buffer, or one that
//! several queues share, is used as a plain doorbell.
//!
//! All work requests of a receive queue are always posted. A sink follows the buffers of each request and
//! takes the excess of long frames. It is omitted if the MTU of the kernel's interface allows no longer
//! frames: the device then fetches one segment less per packet, and reports an oversized frame as an error.
//! Doorbell record and register are written once per batch.
//!
//! Completions are validated. An invalid one breaks the queue, which is recreated at run time. An idle worker
//! can sleep until packets arrive: it arms its completion queues itself, because libmlx5 does not know which
//! entries were read.

mod cq;
mod cqe;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod modes;
mod nic;
mod offload;
mod queue_spans;
mod rules;
mod rx;
mod rx_fast;
mod shared_queue;
#[cfg(test)]
mod tests;
mod tx;
mod wqe;

use nic::Mlx5Nic;
use rules::RuleBackendChoice;

use super::common::device::NicDevice;
use super::common::nic::Nic;
use super::common::probe::DeviceSelector;
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::ipc::{AttachConfig, AttachError, AttachOffer, AttachedPort};
use crate::port::{Device, PortError, PortSpec};
use wirepath_settings::{ConfigError, Settings};

pub(crate) const NAME: &str = "mlx5";

/// Settings that select each receive mode and each transmit mode, see [`Driver::modes`].
pub const MODES: &[&str] = &[
    "cqe_compression = 'off'",
    "cqe_compression = 'hash'\nmulti_packet = false",
    "cqe_compression = 'checksum'\ntx_inline = 300",
    "rx_mode = 'striding'\ncqe_compression = 'off'\nmin_inline = '18'",
    "rx_mode = 'striding'\ncqe_compression = 'stride'",
];

/// The driver.
#[derive(Debug)]
pub struct Mlx5;

/// Maps the queues that a server of `attach` offers.
pub(crate) fn accept(offer: AttachOffer) -> Result<AttachedPort, AttachError> {
    offer.take::<Mlx5Nic>()
}

/// Settings of an `mlx5` port.
#[derive(Clone, Debug)]
pub struct Options {
    selector: DeviceSelector,
    rx_mode: RxMode,
    cqe_compression: CqeCompression,
    multi_packet: bool,
    tx_inline: usize,
    blue_flame: usize,
    tunnels: bool,
    min_inline: Option<usize>,
    timestamps: bool,
    rules: RuleBackendChoice,
}

/// Layout of packets in receive buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RxMode {
    Linear,
    Striding,
}

/// Compression of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CqeCompression {
    /// The best format that the device supports and the other settings allow.
    Auto,
    Off,
    Hash,
    Checksum,
    Stride,
}

impl Options {
    /// Selects the port of a network interface, or port 1 of an RDMA device.
    pub fn new(device: impl Into<String>) -> Self {
        Self::of(DeviceSelector::new(device))
    }

    /// Offers the port to other processes ([`crate::ipc`]).
    pub fn offer(mut self, offer: AttachConfig) -> Self {
        self.selector.attach = Some(offer);
        self
    }

    fn of(selector: DeviceSelector) -> Self {
        Self {
            selector,
            rx_mode: RxMode::Linear,
            cqe_compression: CqeCompression::Auto,
            multi_packet: true,
            tx_inline: 0,
            blue_flame: 64,
            tunnels: true,
            min_inline: None,
            timestamps: false,
            rules: RuleBackendChoice::Auto,
        }
    }
}

impl Driver for Mlx5 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "NVIDIA ConnectX and BlueField, by direct verbs on queues in own memory"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::RdmaPort
    }

    fn in_auto(&self) -> bool {
        true
    }

    fn may_have_rule_hardware(&self) -> bool {
        true
    }

    fn modes(&self) -> &'static [&'static str] {
        MODES
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let layouts = [("linear", RxMode::Linear), ("striding", RxMode::Striding)];
        let offloads = [
            ("auto", RuleBackendChoice::Auto),
            ("dv", RuleBackendChoice::Dv),
            ("ibv", RuleBackendChoice::Ibv),
            ("off", RuleBackendChoice::Off),
        ];
        let formats = [
            ("auto", CqeCompression::Auto),
            ("off", CqeCompression::Off),
            ("hash", CqeCompression::Hash),
            ("checksum", CqeCompression::Checksum),
            ("stride", CqeCompression::Stride),
        ];
        for (old, new) in [("receive", "rx_mode"), ("compress", "cqe_compression"), ("inline", "tx_inline")] {
            settings.renamed(old, new)?;
        }
        let plain = Options::of(DeviceSelector::read(device, "mlx5_0", settings)?);
        let options = Options {
            rx_mode: settings.choice("rx_mode", &layouts)?.unwrap_or(plain.rx_mode),
            cqe_compression: settings.choice("cqe_compression", &formats)?.unwrap_or(plain.cqe_compression),
            multi_packet: settings.get("multi_packet")?.unwrap_or(plain.multi_packet),
            tx_inline: settings.integer("tx_inline", 0..=wqe::MAX_INLINE as i64)?.unwrap_or(plain.tx_inline),
            blue_flame: settings.integer("blue_flame", 0..=wqe::MAX_BLUE_FLAME as i64)?.unwrap_or(plain.blue_flame),
            min_inline: settings.choice("min_inline", &[("0", 0), ("18", 18)])?,
            tunnels: settings.get("tunnels")?.unwrap_or(plain.tunnels),
            timestamps: settings.get("timestamps")?.unwrap_or(plain.timestamps),
            rules: settings.choice("rules", &offloads)?.unwrap_or(plain.rules),
            ..plain
        };
        if !options.blue_flame.is_multiple_of(64) {
            return Err(settings.error_in("blue_flame", "must be a multiple of 64 bytes, the size of a basic block"));
        }
        let strides = options.rx_mode == RxMode::Striding;
        match options.cqe_compression {
            CqeCompression::Stride if !strides => {
                Err(settings.error_in("cqe_compression", "\"stride\" needs rx_mode = \"striding\""))
            }
            CqeCompression::Hash | CqeCompression::Checksum if strides => {
                Err(settings.error_in("cqe_compression", "rx_mode = \"striding\" supports only \"stride\" and \"off\""))
            }
            CqeCompression::Hash | CqeCompression::Checksum | CqeCompression::Stride if options.timestamps => {
                Err(settings.error_in("cqe_compression", "compressed completions have no timestamps"))
            }
            _ => Ok(Box::new(options)),
        }
    }

    fn candidates(&self) -> Vec<Candidate> {
        Mlx5Nic::PROBE.candidates(|name| {
            let device = Options::new(name).open()?;
            let caps = device.capabilities();
            let abilities = device.nic().abilities();
            Ok(format!("{}, {} queues, MTU {}; {abilities}", caps.mode, caps.max_rx_queues, caps.max_mtu))
        })
    }
}

impl Options {
    fn open(self) -> Result<NicDevice<Mlx5Nic>, PortError> {
        NicDevice::open(self.selector.clone(), self)
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
        self.rules != RuleBackendChoice::Off
    }

    fn rule_spec_for(&self, driver: &str, device: &str) -> Option<Box<dyn PortSpec>> {
        let options = || Self { rules: self.rules, ..Self::new(device) };
        (driver == NAME).then(|| Box::new(options()) as Box<dyn PortSpec>)
    }
}
