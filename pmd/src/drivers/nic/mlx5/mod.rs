//! `mlx5`: ConnectX and BlueField NICs, driven through libmlx5's direct verbs (mlx5dv(7)) on queues in memory
//! of this process.
//!
//! ```toml
//! [[port]]
//! driver = "mlx5"
//! device = "eth1"            # the kernel's interface, or the RDMA device ("mlx5_0")
//!
//! [port.mlx5]
//! rx_mode = "striding"
//! tx_timeout = 10
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
use super::common::probe::{DeviceSelector, TX_TIMEOUT};
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::ipc::{
    ATTACH, ATTACH_BUFFERS, ATTACH_RX_QUEUES, ATTACH_TX_QUEUES, AttachConfig, AttachError, AttachOffer, AttachedPort,
};
use crate::port::{Device, PortError, PortSpec};
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Integer, Key, Settings, WithDefault};

pub(crate) const NAME: &str = "mlx5";

const RX_MODE: Key<WithDefault<Choice<RxMode>>> = Key::choice(
    "rx_mode",
    &[
        ("linear", RxMode::Linear, "a work request for each packet"),
        ("striding", RxMode::Striding, "several buffers in a work request, which costs the device fewer reads"),
    ],
)
.default_word("linear")
.about("Layout of packets in receive buffers.");
const CQE_COMPRESSION: Key<WithDefault<Choice<CqeCompression>>> = Key::choice(
    "cqe_compression",
    &[
        ("auto", CqeCompression::Auto, "the best format that the device supports and the other keys allow"),
        ("off", CqeCompression::Off, "a completion for each packet"),
        ("hash", CqeCompression::Hash, "compressed completions with the RSS hash"),
        ("checksum", CqeCompression::Checksum, "compressed completions with the checksum"),
        ("stride", CqeCompression::Stride, "compressed completions of striding receive queues"),
    ],
)
.default_word("auto")
.needs(&[("stride", "rx_mode = \"striding\"")])
.about("Several packets in one completion of a receive queue. Compressed completions have no timestamps.");
const MULTI_PACKET: Key<WithDefault<Flag>> =
    Key::flag("multi_packet").default(true).about("Puts several packets into one send descriptor, if the device can.");
const TX_INLINE: Key<WithDefault<Integer<usize>>> = Key::integer("tx_inline", 0..=wqe::MAX_INLINE as i64)
    .unit("bytes")
    .default(0)
    .about("Packets of up to this length are copied into their send descriptor.");
const MIN_INLINE: Key<Choice<usize>> = Key::choice(
    "min_inline",
    &[("0", 0, "the device needs no header inline"), ("18", 18, "the Ethernet header and a VLAN tag are inline")],
)
.absent("detected")
.about("Bytes of a packet that must be in its send descriptor.");
const BLUE_FLAME: Key<WithDefault<Integer<usize>>> = Key::integer("blue_flame", 0..=wqe::MAX_BLUE_FLAME as i64)
    .unit("bytes, a multiple of 64")
    .default(64)
    .about("A burst of one descriptor up to this size uses BlueFlame: the device need not fetch the descriptor.");
const TUNNELS: Key<WithDefault<Flag>> = Key::flag("tunnels")
    .default(true)
    .about("Lets the device check and compute inner checksums of the tunnels that it knows, and segment TCP in them.");
const TIMESTAMPS: Key<WithDefault<Flag>> = Key::flag("timestamps").default(false).about(
    "Stores the time of reception by the NIC's clock with each packet. It excludes compressed completions. A port \
         whose clock cannot be read is refused.",
);
const RULES: Key<WithDefault<Choice<RuleBackendChoice>>> = Key::choice(
    "rules",
    &[
        ("auto", RuleBackendChoice::Auto, "mlx5dv, or ibv_create_flow if the device does not support it"),
        ("dv", RuleBackendChoice::Dv, "mlx5dv matchers and flows"),
        ("ibv", RuleBackendChoice::Ibv, "ibv_create_flow"),
        ("off", RuleBackendChoice::Off, "no flow rules in the device"),
    ],
)
.default_word("auto")
.about("Interface by which flow rules get into the device.");

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"mlx5\".",
    absent: "every key has its default",
    keys: &[
        &RX_MODE,
        &CQE_COMPRESSION,
        &MULTI_PACKET,
        &TX_INLINE,
        &MIN_INLINE,
        &BLUE_FLAME,
        &TUNNELS,
        &TIMESTAMPS,
        &RULES,
        &TX_TIMEOUT,
        &ATTACH,
        &ATTACH_TX_QUEUES,
        &ATTACH_RX_QUEUES,
        &ATTACH_BUFFERS,
    ],
    example: "[port.mlx5]\nrx_mode = \"striding\"\ntx_inline = 128\n",
    ..ConfigTable::EMPTY
};

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
            rx_mode: RX_MODE.default_value(),
            cqe_compression: CQE_COMPRESSION.default_value(),
            multi_packet: MULTI_PACKET.default_value(),
            tx_inline: TX_INLINE.default_value(),
            blue_flame: BLUE_FLAME.default_value(),
            tunnels: TUNNELS.default_value(),
            min_inline: None,
            timestamps: TIMESTAMPS.default_value(),
            rules: RULES.default_value(),
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

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_RAW | CapabilitySet::IPC_LOCK
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        for (old, new) in [("receive", "rx_mode"), ("compress", "cqe_compression"), ("inline", "tx_inline")] {
            settings.renamed(old, new)?;
        }
        let selector = DeviceSelector::read(device, "mlx5_0", settings)?;
        let options = Options {
            selector: DeviceSelector { attach: AttachConfig::read(settings)?, ..selector },
            rx_mode: settings.read(&RX_MODE)?,
            cqe_compression: settings.read(&CQE_COMPRESSION)?,
            multi_packet: settings.read(&MULTI_PACKET)?,
            tx_inline: settings.read(&TX_INLINE)?,
            blue_flame: settings.read(&BLUE_FLAME)?,
            min_inline: settings.read(&MIN_INLINE)?,
            tunnels: settings.read(&TUNNELS)?,
            timestamps: settings.read(&TIMESTAMPS)?,
            rules: settings.read(&RULES)?,
        };
        if !options.blue_flame.is_multiple_of(64) {
            return Err(settings.error_in(&BLUE_FLAME, "must be a multiple of 64 bytes, the size of a basic block"));
        }
        let strides = options.rx_mode == RxMode::Striding;
        match options.cqe_compression {
            CqeCompression::Stride if !strides => {
                Err(settings.error_in(&CQE_COMPRESSION, "\"stride\" needs rx_mode = \"striding\""))
            }
            CqeCompression::Hash | CqeCompression::Checksum if strides => {
                Err(settings.error_in(&CQE_COMPRESSION, "rx_mode = \"striding\" supports only \"stride\" and \"off\""))
            }
            CqeCompression::Hash | CqeCompression::Checksum | CqeCompression::Stride if options.timestamps => {
                Err(settings.error_in(&CQE_COMPRESSION, "compressed completions have no timestamps"))
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
