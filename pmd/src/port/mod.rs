//! Ports and their queues.
//!
//! ```text
//! PortSpec (checked settings) --open--> OpenPort --configure--> ConfiguredPort --start--> Port + RxQueues + TxQueues
//!                                                                     ^---------------stop--------------'
//! ```
//!
//! Each step consumes the value of the one before, so that a wrong order does not compile. Queues are `Send`
//! but not `Sync`: one worker owns each. A port describes itself and its mode as data ([`Capabilities`]).

mod bifurcation;
mod capabilities;
mod error;
pub mod faults;
mod gso;
#[cfg_attr(not(feature = "nic"), allow(dead_code, reason = "ports that are not NICs use a part"))]
mod handoff;
pub mod hardware;
mod kernel;
mod queue;
mod reattach;

use std::fmt;
use std::sync::Arc;

pub use bifurcation::Bifurcation;
pub use capabilities::{Capabilities, Link, LinkState, MacAddr, Offloads, VlanTags};
pub use error::{PortError, TriedDriver};
pub(crate) use handoff::RingHandoff;
pub use hardware::RuleHardware;
pub use kernel::{KernelPunt, KernelRule};
pub use queue::{RxDriver, RxQueue, TunnelTso, TxDriver, TxQueue, bytes_of};
pub use wirepath_packet::PortId;

use gso::{NewGso, SoftwareGso};
use reattach::{Presence, QueueSlot};
use wirepath_flow::Rule;
use wirepath_packet::Pool;
use wirepath_packet::counters::{QueueCounters, QueueStats};
use wirepath_packet::drops::DropReason;
use wirepath_privileges::CapabilitySet;

use crate::drivers;

/// Checked settings of a port: driver and device. Made by [`crate::drivers::plan`] or from the options of a
/// driver.
pub trait PortSpec: fmt::Debug + Send {
    /// Name of the driver.
    fn driver(&self) -> &'static str;
    /// Opens the device.
    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError>;

    /// Opens the device for a check: reports what [`Self::open`] would refuse, and changes nothing on the machine. The
    /// device answers questions and cannot be started. Drivers whose `open` changes something implement it.
    fn open_to_check(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        self.open()
    }

    /// Capabilities without which [`Self::open`] and the start of the port fail.
    fn privileges(&self) -> CapabilitySet {
        drivers::privileges(self.driver())
    }

    /// Expected path of packets to the kernel's network stack, before the device is opened.
    fn kernel_punt(&self) -> KernelPunt {
        KernelPunt::No(NO_KERNEL)
    }

    /// True if the device may have hardware for flow rules ([`Device::rule_hardware`]), before it is opened.
    fn may_offload_rules(&self) -> bool {
        false
    }

    /// Returns the same settings for another device, if they tell how rules are installed in its hardware;
    /// else `None`.
    fn rule_spec_for(&self, driver: &str, device: &str) -> Option<Box<dyn PortSpec>> {
        let _ = (driver, device);
        None
    }

    /// Expected answer to [`PuntToKernel::set_rules`], before the device is opened.
    fn kernel_rules(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        let _ = (rules, port);
        Vec::new()
    }
}

/// Reason of ports that are not connected to a kernel.
const NO_KERNEL: &str = "the port is not connected to a kernel's network stack";

/// Reason of ports that take all packets of their device or none.
const NO_BIFURCATION: &str = "the driver cannot leave a part of the packets with the kernel (flow bifurcation); \
     af_packet, af_xdp, mlx5 and verbs can";

/// One opened device, as a driver implements it. Programs use [`OpenPort`] and what follows instead.
///
/// Every device has a link ([`DeviceLink`]). Statistics beyond the queues' own, flow rules in hardware and packets for
/// the kernel are optional; a device that has one returns it here.
pub trait Device: DeviceLink + Send {
    /// Capabilities and mode of the device. The mode is final after [`Self::start`].
    fn capabilities(&self) -> Capabilities;

    /// Checks a configuration against the capabilities, before the start.
    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        config.check(&self.capabilities())
    }

    /// Creates the queues and starts to receive and transmit. `config` is within the capabilities.
    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError>;

    /// Stops the flow and takes the queues back. Packets inside the device return to their pools. Packets that the
    /// device has received and nobody has polled may be lost.
    fn stop(&mut self, queues: Queues) -> Result<(), PortError>;

    /// Returns whether the device may be started again after [`PortEvent::Lost`].
    fn can_return(&self) -> bool {
        false
    }

    /// Starts the device again after [`PortEvent::Lost`] and [`Self::stop`], with its rules and settings. The control
    /// thread calls this a few times a second until the device is there; [`PortError::NoDevice`] means that it is not.
    /// Must not wait.
    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        self.start(config)
    }

    /// Replaces [`PortConfig::bifurcation`] of a started device.
    ///
    /// # Errors
    /// If the device cannot, or was started without one. The old selection is in force then.
    fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> Result<(), PortError> {
        let _ = bifurcation;
        let Capabilities { driver, device, .. } = self.capabilities();
        Err(PortError::Refused { driver, device, reason: NO_BIFURCATION.to_owned() })
    }

    /// Capabilities that [`Self::restart`], other changes and the stop need.
    fn privileges(&self) -> CapabilitySet {
        drivers::privileges(self.capabilities().driver)
    }

    /// Reads the clock of the receive timestamps ([`Offloads::RX_TIMESTAMP`]), in nanoseconds as packets have them. The
    /// call takes about a microsecond, without a system call. A caller that reads a clock of its own before and after
    /// it knows how both are related. `None` if the device has no clock that can be read, or is lost.
    fn read_clock(&mut self) -> Option<u64> {
        None
    }

    /// Statistics beyond those of the queues.
    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        None
    }

    /// Hardware for flow rules. The answer is certain only after [`Self::start`].
    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        None
    }

    /// Rules with the action `kernel` that the device decides, and frames for the kernel's receive path.
    fn punt_to_kernel(&mut self) -> Option<&mut dyn PuntToKernel> {
        None
    }
}

/// The link of a device and its events.
pub trait DeviceLink {
    /// Reads the state of the link.
    fn link(&mut self) -> Link;

    /// Returns the events since the last call. Cheap enough for a few calls a second.
    fn events(&mut self) -> Vec<PortEvent>;
}

/// Statistics of a device beyond those of its queues.
pub trait DeviceStatistics {
    /// Names and values, such as the packets that the kernel dropped before the driver saw them.
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)>;

    /// Packets that the device or the kernel dropped before a receive queue saw them, by reason.
    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        Vec::new()
    }

    /// Reasons of such drops that can occur and that nobody counts: their number is unknown, not 0.
    fn uncounted_drops(&self) -> Vec<DropReason> {
        Vec::new()
    }
}

/// A device that passes packets to the kernel before they reach the port.
pub trait PuntToKernel {
    /// Replaces the rules of the device, given in the order in which they are matched. Called before [`Device::start`]
    /// or while the device runs.
    ///
    /// The device may decide some rules before their packets reach the port ([`KernelPunt::XdpPass`]). A packet meets
    /// the old rules or the new ones, never a mixture. The answer has one entry for each ingress rule of the port
    /// `port` with the action `kernel`. After an error the old rules are in force.
    fn set_rules(&mut self, rules: &[Rule], port: PortId) -> Result<Vec<KernelRule>, PortError>;

    /// Packets and bytes of a rule that the device decides.
    fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)>;

    /// Puts a frame into the kernel's receive path, as if the interface had just received it. The device supports it
    /// where [`KernelPunt::XdpPass`] says so.
    fn inject(&mut self, frame: &[u8]) -> std::io::Result<()>;
}

/// Queues of a started device.
#[derive(Default)]
pub struct Queues {
    /// Receive queues.
    pub rx: Vec<Box<dyn RxDriver>>,
    /// Transmit queues.
    pub tx: Vec<Box<dyn TxDriver>>,
}

/// Configuration of a port.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Port number in the metadata of its packets.
    pub id: PortId,
    /// Number of receive queues, at most [`Capabilities::max_rx_queues`].
    pub rx_queues: u16,
    /// Number of transmit queues, at most [`Capabilities::max_tx_queues`].
    pub tx_queues: u16,
    /// Entries of each ring, if the device has rings. A driver may round it up.
    pub depth: u32,
    /// Largest layer-3 packet in bytes. A frame has 14 bytes more, and 4 for each VLAN tag.
    pub mtu: u16,
    /// True to receive frames to all destination addresses.
    pub promiscuous: bool,
    /// True to join received TCP packets and UDP datagrams to superframes ([`wirepath_packet::gro`]), those of one
    /// burst.
    pub gro: bool,
    /// Packets that the port takes from the interface; `None`: all. Ports with a selection are never promiscuous.
    pub bifurcation: Option<Bifurcation>,
    /// Pool of the received packets.
    pub pool: Pool,
}

impl PortConfig {
    /// One queue per direction, 1024 entries, MTU 1500, promiscuous mode.
    pub fn new(id: PortId, pool: Pool) -> Self {
        let (rx_queues, tx_queues, depth, mtu) = (1, 1, 1024, 1500);
        Self { id, rx_queues, tx_queues, depth, mtu, promiscuous: true, gro: false, bifurcation: None, pool }
    }

    /// Adds the capabilities that a port has by its configuration.
    fn add_to(&self, device: Capabilities) -> Capabilities {
        let added = if self.gro { Offloads::RX_SUPERFRAMES } else { Offloads::NONE };
        Capabilities { offloads: device.offloads.with(added), ..device }
    }

    /// Checks the configuration against the capabilities of a device.
    pub fn check(&self, limits: &Capabilities) -> Result<(), PortError> {
        let check = |resource: &'static str, requested: u64, range: std::ops::RangeInclusive<u64>| {
            if range.contains(&requested) {
                Ok(())
            } else {
                Err(PortError::Unsupported {
                    driver: limits.driver,
                    resource,
                    requested,
                    min: *range.start(),
                    max: *range.end(),
                    hint: String::new(),
                })
            }
        };
        if self.bifurcation.is_some() && !limits.can_bifurcate {
            return Err(PortError::Refused {
                driver: limits.driver,
                device: limits.device.clone(),
                reason: NO_BIFURCATION.to_owned(),
            });
        }
        check("receive queues", self.rx_queues.into(), 0..=limits.max_rx_queues.into())?;
        check("transmit queues", self.tx_queues.into(), 0..=limits.max_tx_queues.into())?;
        check("mtu", self.mtu.into(), 68..=limits.max_mtu.into())?;
        check("depth", self.depth.into(), 1..=limits.max_depth.into())
    }
}

/// Event of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortEvent {
    /// The link state changed.
    Link(Link),
    /// The device is gone or failed permanently; the text names it. Its queues transfer no more packets.
    /// Other ports continue. If the device can return, the port waits for it ([`Port::is_away`]).
    Lost(String),
    /// The lost device is back, and the queues transfer packets again.
    Returned,
    /// The link-layer address changed.
    Address(MacAddr),
    /// The MTU of the interface changed, in bytes. The port keeps its configuration.
    Mtu(u32),
    /// A finite source, such as a file, is exhausted. The port still transmits.
    Finished,
}

/// Opened device.
pub struct OpenPort {
    name: String,
    device: Box<dyn Device>,
}

/// Configured port, which can be started.
pub struct ConfiguredPort {
    name: String,
    device: Box<dyn Device>,
    config: PortConfig,
    software_gso: bool,
}

/// Started port without its queues, which workers own.
pub struct Port {
    name: String,
    device: Box<dyn Device>,
    config: PortConfig,
    software_gso: bool,
    presence: Presence,
    rx: Vec<QueueSlot<Box<dyn RxDriver>>>,
    tx: Vec<QueueSlot<Box<dyn TxDriver>>>,
    /// Places for software segmentation, one for each transmit queue.
    new_gso: Vec<Arc<NewGso>>,
}

/// Result of [`ConfiguredPort::start`].
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
    /// Opens a device; `name` is the name of the port in messages.
    pub fn open(name: impl Into<String>, spec: Box<dyn PortSpec>) -> Result<Self, PortError> {
        Ok(Self { name: name.into(), device: spec.open()? })
    }

    /// Opens a device for a check, see [`PortSpec::open_to_check`]. The port must not be started.
    pub fn open_to_check(name: impl Into<String>, spec: Box<dyn PortSpec>) -> Result<Self, PortError> {
        Ok(Self { name: name.into(), device: spec.open_to_check()? })
    }

    /// Capabilities of the device.
    pub fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    /// Rule hardware, if the device knows it before the start: see [`Device::rule_hardware`].
    pub fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    /// Checks the configuration against the capabilities.
    pub fn configure(mut self, config: PortConfig) -> Result<ConfiguredPort, PortError> {
        self.device.check(&config)?;
        Ok(ConfiguredPort { name: self.name, device: self.device, config, software_gso: false })
    }
}

impl ConfiguredPort {
    /// Capabilities of the device, and those that the configuration adds.
    pub fn capabilities(&self) -> Capabilities {
        self.config.add_to(self.device.capabilities())
    }

    /// Segments superframes in software that the device does not segment. For ports to which packets of a port
    /// with [`Offloads::RX_SUPERFRAMES`] may go.
    pub fn segment_superframes(&mut self) {
        self.software_gso = true;
    }

    /// Starts the port and splits it into its queues.
    pub fn start(mut self) -> Result<StartedPort, PortError> {
        let queues = self.device.start(&self.config)?;
        let (id, name) = (self.config.id, &self.name);
        let rx_queue = |(i, driver)| {
            let queue = RxQueue::new(driver, id, i as u16, name);
            if self.config.gro { queue.with_gro() } else { queue }
        };
        let rx: Vec<RxQueue> = queues.rx.into_iter().enumerate().map(rx_queue).collect();
        let pool = self.software_gso.then_some(&self.config.pool);
        let device_segments = self.device.capabilities().offloads.contains(Offloads::TX_SEGMENT);
        let tx_queue = |(i, driver)| {
            let queue = TxQueue::new(driver, id, i as u16, name);
            if let Some(pool) = pool { queue.with_software_gso(pool, device_segments) } else { queue }
        };
        let tx: Vec<TxQueue> = queues.tx.into_iter().enumerate().map(tx_queue).collect();
        let port = Port {
            presence: Presence::Present,
            rx: rx.iter().map(|q| slot(q.counters(), q.handoff())).collect(),
            tx: tx.iter().map(|q| slot(q.counters(), q.handoff())).collect(),
            new_gso: tx.iter().map(|queue| Arc::clone(queue.new_gso())).collect(),
            name: self.name,
            device: self.device,
            config: self.config,
            software_gso: self.software_gso,
        };
        Ok(StartedPort { port, rx, tx })
    }

    /// The configuration.
    pub fn config(&self) -> &PortConfig {
        &self.config
    }

    /// Tells the device the rules, see [`PuntToKernel::set_rules`].
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<Vec<KernelRule>, PortError> {
        self.device.punt_to_kernel().map_or(Ok(Vec::new()), |device| device.set_rules(rules, self.config.id))
    }

    /// Rule hardware, see [`Device::rule_hardware`].
    pub fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
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

    /// Capabilities that the process must keep for this port: see [`Device::privileges`].
    pub fn privileges(&self) -> CapabilitySet {
        self.device.privileges()
    }

    /// Capabilities of the device and those that the configuration adds, and the mode that the port runs in.
    pub fn capabilities(&self) -> Capabilities {
        self.config.add_to(self.device.capabilities())
    }

    /// Does what [`ConfiguredPort::segment_superframes`] does, while workers use the queues. They cut the superframes
    /// of all messages that are sent to them after this call.
    pub fn segment_superframes(&mut self) {
        if std::mem::replace(&mut self.software_gso, true) {
            return;
        }
        let device_segments = self.device.capabilities().offloads.contains(Offloads::TX_SEGMENT);
        for queue in &self.new_gso {
            queue.leave(SoftwareGso::new(self.config.pool.clone(), device_segments));
        }
    }

    /// Reads the link state.
    pub fn link(&mut self) -> Link {
        self.device.link()
    }

    /// Statistics of each receive queue since the start.
    pub fn rx_statistics(&self) -> Vec<QueueStats> {
        self.rx.iter().map(|slot| slot.counters.snapshot()).collect()
    }

    /// Counters of the receive queues and of the transmit queues. They outlive the port.
    pub fn queue_counters(&self) -> [Vec<Arc<QueueCounters>>; 2] {
        [
            self.rx.iter().map(|slot| Arc::clone(&slot.counters)).collect(),
            self.tx.iter().map(|slot| Arc::clone(&slot.counters)).collect(),
        ]
    }

    /// Statistics of each transmit queue since the start.
    pub fn tx_statistics(&self) -> Vec<QueueStats> {
        self.tx.iter().map(|slot| slot.counters.snapshot()).collect()
    }

    /// Tells the device the rules, see [`PuntToKernel::set_rules`].
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<Vec<KernelRule>, PortError> {
        self.device.punt_to_kernel().map_or(Ok(Vec::new()), |device| device.set_rules(rules, self.config.id))
    }

    /// Replaces the packets that the port takes, see [`Device::set_bifurcation`]. A lost device has them when it
    /// returns.
    ///
    /// # Errors
    /// If the device refuses them. It has the old ones until it is lost and returns.
    pub fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> Result<(), PortError> {
        self.config.bifurcation = Some(bifurcation.clone());
        self.device.set_bifurcation(bifurcation)
    }

    /// Packets and bytes of a rule that the device applies.
    pub fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)> {
        self.device.punt_to_kernel()?.rule_counters(rule)
    }

    /// Rule hardware, see [`Device::rule_hardware`].
    pub fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    /// Puts a frame into the kernel's receive path, see [`PuntToKernel::inject`].
    pub fn inject(&mut self, frame: &[u8]) -> std::io::Result<()> {
        match self.device.punt_to_kernel() {
            Some(device) => device.inject(frame),
            None => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// Reads the clock of the receive timestamps, see [`Device::read_clock`].
    pub fn read_clock(&mut self) -> Option<u64> {
        self.device.read_clock()
    }

    /// Further statistics of the device by name, see [`DeviceStatistics::extra_statistics`].
    pub fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.device.statistics().map_or_else(Vec::new, DeviceStatistics::extra_statistics)
    }

    /// Packets that never reached a receive queue, see [`DeviceStatistics::drops`]. Reasons that did not occur are
    /// left out.
    pub fn device_drops(&mut self) -> Vec<(DropReason, u64)> {
        let mut drops = self.device.statistics().map_or_else(Vec::new, DeviceStatistics::drops);
        drops.retain(|(_, n)| *n > 0);
        drops
    }

    /// Reasons of drops before the receive queues whose number is unknown, see [`DeviceStatistics::uncounted_drops`].
    pub fn uncounted_drops(&mut self) -> Vec<DropReason> {
        self.device.statistics().map_or_else(Vec::new, |statistics| statistics.uncounted_drops())
    }

    /// Stops the port. Workers must return all of its queues before.
    pub fn stop(mut self, rx: Vec<RxQueue>, tx: Vec<TxQueue>) -> Result<ConfiguredPort, PortError> {
        let id = self.config.id;
        let foreign = rx.iter().any(|q| q.port() != id) || tx.iter().any(|q| q.port() != id);
        if foreign || rx.len() != self.rx.len() || tx.len() != self.tx.len() {
            return Err(PortError::QueuesMissing { port: self.name });
        }
        let (mut queues, running) = self.take_queues();
        queues.rx.extend(rx.into_iter().filter_map(RxQueue::into_inner));
        queues.tx.extend(tx.into_iter().filter_map(TxQueue::into_inner));
        if running {
            self.device.stop(queues)?;
        }
        let Self { name, device, config, software_gso, .. } = self;
        Ok(ConfiguredPort { name, device, config, software_gso })
    }
}

fn slot<Q>(counters: &Arc<QueueCounters>, handoff: &Arc<RingHandoff<Q, ()>>) -> QueueSlot<Q> {
    QueueSlot { counters: Arc::clone(counters), handoff: Arc::clone(handoff) }
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
