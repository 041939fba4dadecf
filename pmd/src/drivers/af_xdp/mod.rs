//! `af_xdp`: AF_XDP sockets, by system calls and shared rings of our own.
//!
//! | File | What it is |
//! |---|---|
//! | `ring` | the four rings of a socket as types |
//! | `posted`, `flight`, `chunks` | what the kernel holds, so that nothing it hands back is believed unchecked |
//! | `socket` | sockets, the registered memory, the modes |
//! | `receive`, `transmit` | the burst paths |
//! | `assembler`, `program`, `matches`, `btf` | the XDP program |
//! | `rules`, `classify` | flow rules that it decides |
//! | `bpf`, `attach` | loading and attaching it |
//! | `device` | start and stop |

mod assembler;
mod attach;
mod bpf;
mod btf;
mod chunks;
mod classify;
mod device;
mod flight;
#[cfg(test)]
mod judge;
mod matches;
mod posted;
mod program;
mod receive;
mod ring;
mod rules;
mod socket;
mod transmit;

pub use matches::KernelMatch;

use super::kernel::link::Interface;
use super::{Candidate, Driver};
use crate::flow::Rule;
use crate::port::{Device, KernelRule, Plan, PortError, PortId, ToKernel};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "af_xdp";

/// The driver.
#[derive(Debug)]
pub struct AfXdp;

/// Which XDP the program is attached as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Native where the interface can, else generic.
    #[default]
    Auto,
    /// In the interface's driver, or not at all.
    Native,
    /// In the kernel's receive path, for any interface.
    Generic,
}

/// How an AF_XDP port is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interface.
    pub device: String,
    /// Native or generic XDP.
    pub mode: Mode,
    /// Let the NIC write into packets, where it can.
    pub zero_copy: bool,
    /// Frames of more than one buffer (XDP fragments), where the kernel can.
    pub fragments: bool,
    /// Register the packet pool itself as UMEM; without, frames are copied between the pool and a UMEM of aligned chunks.
    pub pool_as_umem: bool,
    /// Take the interface from an XDP program of somebody else.
    pub force: bool,
    /// Poll the NIC from the worker (`SO_PREFER_BUSY_POLL`) instead of from its interrupt.
    pub busy_poll: bool,
    /// Attach the XDP program by link, so that it goes with the process however it ends; without, by netlink, as on kernels before
    /// 5.9.
    pub attach_by_link: bool,
    /// Frames that go on to the kernel. All others are ours.
    pub kernel: Vec<KernelMatch>,
}

impl Options {
    /// Defaults for an interface: whatever is fastest, nothing for the kernel.
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

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let device =
            device.ok_or_else(|| settings.error("device: missing, expected the name of a network interface"))?;
        let defaults = Options::new(device);
        let modes = [("auto", Mode::Auto), ("native", Mode::Native), ("generic", Mode::Generic)];
        let nothing = settings.get::<String>("kernel").ok().flatten().is_some_and(|text| text == "nothing");
        let kernel = if nothing { Vec::new() } else { settings.list::<KernelMatch>("kernel", matches::EXPECTED)? };
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

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(device::AfXdpDevice::open(*self)?))
    }

    fn to_kernel(&self) -> ToKernel {
        device::to_kernel(self.mode != Mode::Generic)
    }

    fn decide(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        rules::decide(rules, port).rules
    }
}
