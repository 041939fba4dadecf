//! Ports and their queues.
//!
//! ```text
//! plan (checked settings) --open--> OpenPort --configure--> ConfiguredPort --start--> Port + RxQueues + TxQueues
//!                                                                 ^---------------stop--------------'
//! ```
//!
//! Each step consumes the one before, so that a forbidden order does not compile. Queues are `Send` but not `Sync`: one worker owns
//! each. A port describes itself as data ([`Capabilities`]), the mode it really got included.

mod capabilities;
mod error;
pub mod hardware;
mod kernel;
mod queue;

use std::fmt;
use std::sync::Arc;

pub use capabilities::{Capabilities, Link, LinkState, MacAddress, Offloads, VlanTags};
pub use error::PortError;
pub use hardware::RuleHardware;
pub use kernel::{KernelRule, ToKernel};
pub use queue::{ReceiveQueue, RxQueue, TransmitQueue, TxQueue, bytes_of};

use crate::counters::{QueueCounters, QueueStats};
use crate::flow::Rule;
use crate::packet::Pool;

/// Number that the application gave a port; packets carry it as input and output port.
pub type PortId = u16;

/// Output port of a packet for which nobody has decided one yet.
pub const NO_PORT: PortId = PortId::MAX;

/// Checked settings of a port: a driver and what it shall open. Made by [`crate::drivers::plan`] or by a driver's own options.
pub trait Plan: fmt::Debug + Send {
    /// Name of the driver.
    fn driver(&self) -> &'static str;
    /// Opens the device.
    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError>;

    /// How packets will get to the kernel's network stack, as far as that is known before anything is opened.
    fn to_kernel(&self) -> ToKernel {
        ToKernel::No(NO_KERNEL)
    }

    /// Whether the device may have hardware for flow rules ([`Device::rule_hardware`]), as far as that is known before anything is opened.
    fn rules_in_hardware(&self) -> bool {
        false
    }

    /// The same settings for another device of a driver, as far as they say how rules get into its hardware; `None`: they say nothing.
    fn for_rules_of(&self, driver: &str, device: &str) -> Option<Box<dyn Plan>> {
        let _ = (driver, device);
        None
    }

    /// What the device will answer to [`Device::set_rules`], as far as that is known before anything is opened.
    fn decide(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        let _ = (rules, port);
        Vec::new()
    }
}

/// Of ports that have nothing to do with a kernel.
const NO_KERNEL: &str = "no network stack of a kernel is behind it";

/// What a driver implements for one opened device. Programs use [`OpenPort`] and what follows instead.
pub trait Device: Send {
    /// What the device can do, and the mode it is in. After [`Self::start`]: the mode it really got.
    fn capabilities(&self) -> Capabilities;

    /// Makes the queues and lets packets flow. `config` lies within the capabilities.
    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError>;

    /// Stops the flow and takes the queues back. Packets inside the device return to their pools; those already received by the
    /// device but not yet polled may be lost.
    fn stop(&mut self, queues: Queues) -> Result<(), PortError>;

    /// Looks at the link.
    fn link(&mut self) -> Link;

    /// What happened since the last call. Cheap enough to be called a few times a second.
    fn events(&mut self) -> Vec<PortEvent>;

    /// Tells the device all rules, in the order in which they are asked, before [`Self::start`] or while it runs; those told earlier
    /// are forgotten. It may decide some before their packets reach the port ([`ToKernel::InFront`]): packets meet the old rules or the
    /// new ones, never a mixture. Answers for every ingress rule of the port, which has the number `port`, with the action `kernel`;
    /// after an error the old rules are in force.
    fn set_rules(&mut self, rules: &[Rule], port: PortId) -> Result<Vec<KernelRule>, PortError> {
        let _ = (rules, port);
        Ok(Vec::new())
    }

    /// Packets and bytes of a rule that the device decides.
    fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)> {
        let _ = rule;
        None
    }

    /// The rule hardware of the device, where it has some. Certain only once the device is started.
    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        None
    }

    /// Puts a frame into the kernel's receive path as if the interface had just received it, where [`ToKernel::InFront`] says so.
    fn inject(&mut self, frame: &[u8]) -> std::io::Result<()> {
        let _ = frame;
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Figures beyond the queues' own, such as what the kernel dropped before the driver saw it: name and value.
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// The queues of a started device.
#[derive(Default)]
pub struct Queues {
    /// Receive queues.
    pub rx: Vec<Box<dyn ReceiveQueue>>,
    /// Transmit queues.
    pub tx: Vec<Box<dyn TransmitQueue>>,
}

/// How a port shall be set up.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Number that packets of this port carry.
    pub id: PortId,
    /// Receive queues, at most what the capabilities say.
    pub rx_queues: u16,
    /// Transmit queues, at most what the capabilities say.
    pub tx_queues: u16,
    /// Entries of each ring, where the device has rings; rounded up to what it can do.
    pub depth: u32,
    /// Largest layer-3 packet in bytes; frames have 14 bytes more, and 4 for each VLAN tag.
    pub mtu: u16,
    /// Receive frames for other stations too.
    pub promiscuous: bool,
    /// Where received packets get their buffers.
    pub pool: Pool,
}

impl PortConfig {
    /// One queue each way, 1024 entries, MTU 1500, promiscuous.
    pub fn new(id: PortId, pool: Pool) -> Self {
        Self { id, rx_queues: 1, tx_queues: 1, depth: 1024, mtu: 1500, promiscuous: true, pool }
    }
}

/// Something that happened to a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortEvent {
    /// The link came up or went down.
    Link(Link),
    /// The device is gone or failed for good; the text names it. Its queues move nothing any more; other ports go on.
    Lost(String),
    /// A source with an end, such as a file, has been received whole. The port goes on transmitting.
    Finished,
}

/// A device that was opened.
pub struct OpenPort {
    name: String,
    device: Box<dyn Device>,
}

/// A port that can be started.
pub struct ConfiguredPort {
    name: String,
    device: Box<dyn Device>,
    config: PortConfig,
}

/// A started port without its queues, which workers own.
pub struct Port {
    name: String,
    device: Box<dyn Device>,
    config: PortConfig,
    rx: Vec<Arc<QueueCounters>>,
    tx: Vec<Arc<QueueCounters>>,
}

/// What [`ConfiguredPort::start`] gives.
#[derive(Debug)]
pub struct StartedPort {
    /// The port.
    pub port: Port,
    /// Receive queues, in order.
    pub rx: Vec<RxQueue>,
    /// Transmit queues, in order.
    pub tx: Vec<TxQueue>,
}

impl OpenPort {
    /// Opens what is planned; `name` is how messages will call the port.
    pub fn open(name: impl Into<String>, plan: Box<dyn Plan>) -> Result<Self, PortError> {
        Ok(Self { name: name.into(), device: plan.open()? })
    }

    /// What the device can do.
    pub fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    /// The rule hardware, where the device knows it before it is started: see [`Device::rule_hardware`].
    pub fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    /// Checks the configuration against the capabilities.
    pub fn configure(self, config: PortConfig) -> Result<ConfiguredPort, PortError> {
        let can = self.device.capabilities();
        let refuse = |what: &'static str, asked: u64, range: std::ops::RangeInclusive<u64>| {
            if range.contains(&asked) {
                Ok(())
            } else {
                Err(PortError::Unsupported {
                    driver: can.driver,
                    what,
                    asked,
                    least: *range.start(),
                    most: *range.end(),
                })
            }
        };
        refuse("receive queues", config.rx_queues.into(), 0..=can.max_rx_queues.into())?;
        refuse("transmit queues", config.tx_queues.into(), 0..=can.max_tx_queues.into())?;
        refuse("mtu", config.mtu.into(), 68..=can.max_mtu.into())?;
        refuse("depth", config.depth.into(), 1..=can.max_depth.into())?;
        Ok(ConfiguredPort { name: self.name, device: self.device, config })
    }
}

impl ConfiguredPort {
    /// What the device can do.
    pub fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    /// Starts the port and splits it into its queues.
    pub fn start(mut self) -> Result<StartedPort, PortError> {
        let queues = self.device.start(&self.config)?;
        let (id, name) = (self.config.id, &self.name);
        let rx: Vec<RxQueue> =
            queues.rx.into_iter().enumerate().map(|(i, q)| RxQueue::new(q, id, i as u16, name)).collect();
        let tx: Vec<TxQueue> =
            queues.tx.into_iter().enumerate().map(|(i, q)| TxQueue::new(q, id, i as u16, name)).collect();
        let port = Port {
            rx: rx.iter().map(|q| Arc::clone(q.counters())).collect(),
            tx: tx.iter().map(|q| Arc::clone(q.counters())).collect(),
            name: self.name,
            device: self.device,
            config: self.config,
        };
        Ok(StartedPort { port, rx, tx })
    }

    /// The configuration.
    pub fn config(&self) -> &PortConfig {
        &self.config
    }

    /// Tells the device the rules, see [`Device::set_rules`].
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<Vec<KernelRule>, PortError> {
        self.device.set_rules(rules, self.config.id)
    }

    /// The rule hardware, see [`Device::rule_hardware`].
    pub fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    /// Back to a port that can be configured anew.
    pub fn reconfigure(self) -> OpenPort {
        OpenPort { name: self.name, device: self.device }
    }
}

impl Port {
    /// Name given when the port was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of the port.
    pub fn id(&self) -> PortId {
        self.config.id
    }

    /// The configuration.
    pub fn config(&self) -> &PortConfig {
        &self.config
    }

    /// What the device can do, and the mode it really got.
    pub fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    /// Looks at the link.
    pub fn link(&mut self) -> Link {
        self.device.link()
    }

    /// What happened since the last call.
    pub fn events(&mut self) -> Vec<PortEvent> {
        self.device.events()
    }

    /// What each receive queue did since the start.
    pub fn rx_statistics(&self) -> Vec<QueueStats> {
        self.rx.iter().map(|c| c.snapshot()).collect()
    }

    /// What each transmit queue did since the start.
    pub fn tx_statistics(&self) -> Vec<QueueStats> {
        self.tx.iter().map(|c| c.snapshot()).collect()
    }

    /// Tells the device the rules, see [`Device::set_rules`].
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<Vec<KernelRule>, PortError> {
        self.device.set_rules(rules, self.config.id)
    }

    /// Packets and bytes of a rule that the device decides.
    pub fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)> {
        self.device.rule_counters(rule)
    }

    /// The rule hardware, see [`Device::rule_hardware`].
    pub fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    /// Puts a frame into the kernel's receive path, see [`Device::inject`].
    pub fn inject(&mut self, frame: &[u8]) -> std::io::Result<()> {
        self.device.inject(frame)
    }

    /// Figures of the device beyond the queues' own.
    pub fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.device.extra_statistics()
    }

    /// Stops the port. All its queues must come back from their workers.
    pub fn stop(mut self, rx: Vec<RxQueue>, tx: Vec<TxQueue>) -> Result<ConfiguredPort, PortError> {
        let id = self.config.id;
        let foreign = rx.iter().any(|q| q.port() != id) || tx.iter().any(|q| q.port() != id);
        if foreign || rx.len() != self.rx.len() || tx.len() != self.tx.len() {
            return Err(PortError::QueuesMissing { port: self.name });
        }
        let queues = Queues {
            rx: rx.into_iter().map(RxQueue::into_inner).collect(),
            tx: tx.into_iter().map(TxQueue::into_inner).collect(),
        };
        self.device.stop(queues)?;
        Ok(ConfiguredPort { name: self.name, device: self.device, config: self.config })
    }
}

macro_rules! debug_as_name {
    ($($port:ty)*) => { $(
        impl fmt::Debug for $port {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($port)).field("name", &self.name).finish_non_exhaustive()
            }
        }
    )* };
}
debug_as_name!(OpenPort ConfiguredPort Port);
