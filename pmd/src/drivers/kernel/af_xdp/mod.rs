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
use wirepath_settings::{ConfigError, Settings};

const NAME: &str = "af_xdp";

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
            mode: Mode::Auto,
            zero_copy: true,
            fragments: true,
            pool_as_umem: true,
            force: false,
            busy_poll: false,
            attach_by_link: true,
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

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let device =
            device.ok_or_else(|| settings.error("device: missing, expected the name of a network interface"))?;
        let defaults = Options::new(device);
        let modes = [("auto", Mode::Auto), ("native", Mode::Native), ("generic", Mode::Generic)];
        let nothing =
            settings.is::<String>("kernel") && settings.get::<String>("kernel")?.as_deref() == Some("nothing");
        let kernel =
            if nothing { Vec::new() } else { settings.list::<KernelMatch>("kernel", kernel_match::EXPECTED)? };
        Ok(Box::new(Options {
            mode: settings.choice("mode", &modes)?.unwrap_or_default(),
            zero_copy: settings.get("zero_copy")?.unwrap_or(defaults.zero_copy),
            fragments: settings.get("fragments")?.unwrap_or(defaults.fragments),
            pool_as_umem: settings.get("pool_as_umem")?.unwrap_or(defaults.pool_as_umem),
            force: settings.get("force")?.unwrap_or(defaults.force),
            busy_poll: settings.get("busy_poll")?.unwrap_or(defaults.busy_poll),
            attach_by_link: settings.get("attach_by_link")?.unwrap_or(defaults.attach_by_link),
            kernel: kernel.into_iter().map(|placed| placed.value).collect(),
            ..defaults
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
