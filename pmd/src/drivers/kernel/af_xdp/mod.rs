//! `af_xdp`: AF_XDP sockets, on system calls and mapped rings without a library.
//!
//! | File | Content |
//! |---|---|
//! | `ring` | the four rings of a socket as types |
//! | `posted_buffers`, `tx_in_flight`, `umem_chunks` | buffers that the kernel owns, to check its addresses |
//! | `socket` | sockets, UMEM registration, modes |
//! | `rx`, `tx` | the burst paths |
//! | `program`, `kernel_match`, `btf` | the XDP program |
//! | `rules`, `classify` | flow rules inside the XDP program |
//! | `attach` | loading and attaching the program |
//! | `device` | start and stop |

mod attach;
#[cfg(test)]
mod bpf_tests;
mod btf;
mod classify;
mod device;
mod kernel_match;
mod posted_buffers;
mod program;
mod ring;
mod rules;
mod rx;
mod socket;
mod tx;
mod tx_in_flight;
mod umem_chunks;

pub use kernel_match::KernelMatch;

use super::common::link::Interface;
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::port::{Device, KernelPunt, KernelRule, PortError, PortId, PortSpec};
use wirepath_flow::Rule;
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Key, List, Parsed, Settings, WithDefault};

const NAME: &str = "af_xdp";

const MODE: Key<WithDefault<Choice<Mode>>> = Key::choice(
    "mode",
    &[
        ("auto", Mode::Auto, "native if the interface supports it, else generic"),
        ("native", Mode::Native, "in the network driver"),
        ("generic", Mode::Generic, "in the kernel's receive path, for any interface"),
    ],
)
.default_word("auto")
.about("XDP mode in which the program is attached.");
const ZERO_COPY: Key<WithDefault<Flag>> =
    Key::flag("zero_copy").default(true).about("Uses zero-copy where the NIC supports it.");
const FRAGMENTS: Key<WithDefault<Flag>> = Key::flag("fragments")
    .default(true)
    .about("Supports frames of several buffers (XDP fragments) where the kernel does (Linux 6.6).");
const POOL_AS_UMEM: Key<WithDefault<Flag>> = Key::flag("pool_as_umem").default(true).about(
    "Registers the packet memory with the socket, which saves a copy of each frame. With false, frames are copied \
         between it and a memory of aligned chunks. Choose false if the driver of the NIC offers zero-copy only with \
         aligned chunks. A kernel that refuses unaligned ones has the same effect, and the log says so.",
);
const FORCE: Key<WithDefault<Flag>> =
    Key::flag("force").default(false).about("Removes an XDP program of another owner from the interface.");
const BUSY_POLL: Key<WithDefault<Flag>> = Key::flag("busy_poll")
    .default(false)
    .about("Polls the NIC from the worker (SO_PREFER_BUSY_POLL) instead of from its interrupt.");
const ATTACH_BY_LINK: Key<WithDefault<Flag>> = Key::flag("attach_by_link").default(true).about(
    "Attaches the program by a BPF link, which ends with the process. Otherwise by netlink, as before Linux 5.9.",
);
const KERNEL: Key<List<Parsed<KernelMatch>>> = Key::parsed("kernel", kernel_match::EXPECTED)
    .list()
    .same_as("\"nothing\"")
    .about("Frames that are passed to the kernel. All others go to the port.");

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"af_xdp\".",
    absent: "every key has its default",
    keys: &[&MODE, &ZERO_COPY, &FRAGMENTS, &POOL_AS_UMEM, &FORCE, &BUSY_POLL, &ATTACH_BY_LINK, &KERNEL],
    example: "[port.af_xdp]\nmode = \"native\"\nkernel = [\"arp\", \"tcp port 22\"]\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct AfXdp;

/// XDP mode in which the program is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Native if the interface supports it, else generic.
    #[default]
    Auto,
    /// In the network driver only.
    Native,
    /// In the kernel's receive path, for any interface (`XDP_FLAGS_SKB_MODE`).
    Generic,
}

/// Options of an `af_xdp` port.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interface name.
    pub device: String,
    /// Native or generic XDP.
    pub mode: Mode,
    /// Use zero-copy where the NIC supports it.
    pub zero_copy: bool,
    /// Support frames of several buffers (XDP fragments) where the kernel does.
    pub fragments: bool,
    /// Register the packet pool as UMEM. Otherwise frames are copied between the pool and a UMEM of aligned
    /// chunks.
    pub pool_as_umem: bool,
    /// Remove a foreign XDP program from the interface.
    pub force: bool,
    /// Poll the NIC from the worker (`SO_PREFER_BUSY_POLL`) instead of from its interrupt.
    pub busy_poll: bool,
    /// Attach the XDP program by a BPF link, which the kernel removes with the process. Otherwise by netlink,
    /// as on kernels before 5.9.
    pub attach_by_link: bool,
    /// Frames that are passed to the kernel. All others go to the port.
    pub kernel: Vec<KernelMatch>,
}

impl Options {
    /// Default options for an interface: the fastest supported mode, and no frames for the kernel.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            mode: MODE.default_value(),
            zero_copy: ZERO_COPY.default_value(),
            fragments: FRAGMENTS.default_value(),
            pool_as_umem: POOL_AS_UMEM.default_value(),
            force: FORCE.default_value(),
            busy_poll: BUSY_POLL.default_value(),
            attach_by_link: ATTACH_BY_LINK.default_value(),
            kernel: Vec::new(),
        }
    }
}

impl Driver for AfXdp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "kernel interface through AF_XDP sockets: zero-copy where the NIC can, else one copy by the kernel"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::Interface
    }

    fn in_auto(&self) -> bool {
        true
    }

    fn modes(&self) -> &'static [&'static str] {
        &["", "zero_copy = false", "fragments = false", "mode = 'generic'"]
    }

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN | CapabilitySet::BPF | CapabilitySet::IPC_LOCK
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let device =
            device.ok_or_else(|| settings.error("device: missing, expected the name of a network interface"))?;
        let nothing = settings.is::<String>(&KERNEL) && settings.get::<String>(&KERNEL)?.as_deref() == Some("nothing");
        let kernel = if nothing { Vec::new() } else { settings.read(&KERNEL)? };
        Ok(Box::new(Options {
            device: device.to_owned(),
            mode: settings.read(&MODE)?,
            zero_copy: settings.read(&ZERO_COPY)?,
            fragments: settings.read(&FRAGMENTS)?,
            pool_as_umem: settings.read(&POOL_AS_UMEM)?,
            force: settings.read(&FORCE)?,
            busy_poll: settings.read(&BUSY_POLL)?,
            attach_by_link: settings.read(&ATTACH_BY_LINK)?,
            kernel: kernel.into_iter().map(|placed| placed.value).collect(),
        }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        let interfaces = Interface::all().unwrap_or_default();
        interfaces.into_iter().filter(|interface| !interface.loopback).map(device::candidate).collect()
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(device::AfXdpDevice::open(*self)?))
    }

    fn kernel_punt(&self) -> KernelPunt {
        device::to_kernel(self.mode != Mode::Generic)
    }

    fn kernel_rules(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        rules::compile(rules, port).rules
    }
}
