//! `tap`: a network interface of the kernel whose other end is the port, for traffic to and from this
//! machine.
//!
//! ```toml
//! [port.tap]
//! address = ["10.0.0.1/24", "fd00::1/64"]
//! ```
//!
//! Opening the port creates the interface. It is removed with the process, unless it existed before (`ip
//! tuntap add`). Starting the port sets its MTU and sets it up.
//!
//! Each queue is an open `/dev/net/tun`, with one system call for each frame: the kernel has no batched
//! interface. To make each call carry more, the kernel may leave checksums and segmentation undone in the
//! frames that it sends. The driver completes them (`kernel::vnet_hdr`), so that every received packet is
//! complete.
//!
//! With `superframes = "whole"` a superframe of TCP or UDP passes as one packet. Towards an interface of the kernel it
//! stays whole; on other ways it is segmented when it leaves, by the NIC or in software. Superframes in UDP
//! tunnels stay whole in both directions from Linux 6.17 on.

mod check;
mod device;
mod interface;
mod rx;
mod tx;

use std::io;
use std::sync::Arc;

use device::{FILE, Supported, TapQueue};
use interface::{InterfaceConfig, Prefix};
use rx::Receiver;
use tx::Sender;

use super::common::link::{Dropped, Interface};
use super::common::link_monitor::LinkMonitor;
use super::common::namespace::Namespace;
use super::common::netlink::Netlink;
use super::common::vnet_hdr::VnetOffload;
use super::common::{privilege_error, system_error};
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::port::{
    Capabilities, Device, DeviceLink, DeviceStatistics, KernelPunt, Link, MacAddr, Offloads, PortConfig, PortError,
    PortEvent, PortSpec, Queues,
};
use wirepath_packet::drops::DropReason;
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Key, List, Parsed, Settings, WithDefault};

const NAME: &str = "tap";
/// The kernel supports 256 queues (`MAX_TAP_QUEUES`); each takes 70 KB in this driver.
const MAX_QUEUES: u16 = 64;
/// Ethernet header and two VLAN tags.
const HEADERS: usize = 14 + 2 * 4;

/// Offloads of every TAP interface.
const OFFLOADS: Offloads = Offloads::RX_CHAINS.with(Offloads::TX_CHAINS).with(Offloads::TX_SEGMENT);

const ADDRESS: Key<List<Parsed<Prefix>>> =
    Key::parsed("address", "an address with a prefix length, such as \"10.0.0.1/24\"")
        .list()
        .absent("none")
        .about("Addresses of the kernel's interface.");
const MAC: Key<Parsed<MacAddr>> = Key::parsed("mac", "an Ethernet address, such as \"02:00:00:00:00:01\"")
    .absent("the kernel chooses one")
    .about("Ethernet address of the kernel's interface.");
const SUPERFRAMES: Key<WithDefault<Choice<bool>>> = Key::choice(
    "superframes",
    &[
        ("cut", false, "segments superframes as they are received"),
        ("whole", true, "receives a superframe as one packet, which is cut when it leaves, by the kernel if it can"),
    ],
)
.default_word("whole")
.about("Treatment of TCP and UDP superframes that the kernel sends.");

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"tap\".",
    absent: "every key has its default",
    keys: &[&ADDRESS, &MAC, &SUPERFRAMES],
    example: "[port.tap]\naddress = [\"10.0.0.1/24\", \"fd00::1/64\"]\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct Tap;

/// Options of a `tap` port.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    addresses: Vec<Prefix>,
    mac: Option<MacAddr>,
    keep_superframes: bool,
}

impl Options {
    /// An interface of this name. The kernel replaces `%d` by a number.
    pub fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), addresses: Vec::new(), mac: None, keep_superframes: SUPERFRAMES.default_value() }
    }
}

impl Driver for Tap {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "a network interface of the kernel whose other end is the port"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::CreatedInterface
    }

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_ADMIN
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected a name for the interface to create"));
        };
        if device.is_empty() || device.len() > 15 || device.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(settings.error(format!(
                "device: found \"{device}\", expected a name of 1 to 15 characters without spaces and slashes"
            )));
        }
        let addresses = settings.read(&ADDRESS)?;
        let mac = settings.read(&MAC)?;
        if mac.is_some_and(|mac| mac.0[0] & 1 != 0 || mac.0 == [0; 6]) {
            return Err(settings.error_in(&MAC, "not a unicast address"));
        }
        Ok(Box::new(Options {
            device: device.to_owned(),
            addresses: addresses.into_iter().map(|placed| placed.value).collect(),
            mac,
            keep_superframes: settings.read(&SUPERFRAMES)?,
        }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        let usable = match std::fs::File::options().read(true).write(true).open(FILE) {
            Ok(_) => Ok("creates an interface of this or any other name".to_owned()),
            Err(error) => Err(open_error("tap0", error).to_string()),
        };
        vec![Candidate { device: "tap0".to_owned(), usable }]
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn kernel_punt(&self) -> KernelPunt {
        KernelPunt::Loopback
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        // An interface that the port creates has no other owner, so the port creates it again if it is deleted.
        let created = matches!(Interface::find(&self.device, NAME), Err(PortError::NoDevice { .. }));
        let opened = Opened::new(&self.device, self.keep_superframes)?;
        Ok(Box::new(TapDevice {
            options: *self,
            namespace: Namespace::current(),
            created,
            opened,
            moved: false,
            queues: Vec::new(),
            dropped: Dropped::default(),
        }))
    }

    fn open_to_check(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(check::CheckedTap::new(*self)?))
    }
}

impl Options {
    /// Capabilities of every TAP interface with these options.
    fn capabilities(&self, multi_queue: bool) -> Capabilities {
        let max_queues = if multi_queue { MAX_QUEUES } else { 1 };
        Capabilities {
            max_rx_queues: max_queues,
            max_tx_queues: max_queues,
            offloads: match self.keep_superframes {
                true => OFFLOADS.with(Offloads::RX_SUPERFRAMES),
                false => OFFLOADS,
            },
            max_tx_segments: 1023,
            can_wait: true,
            kernel_punt: KernelPunt::Loopback,
            ..Capabilities::plain(NAME, &self.device)
        }
    }
}

/// An interface whose queues this process holds.
struct Opened {
    /// Keeps the interface while the port is stopped. In a single-queue device it is the only queue.
    standby_queue: Option<TapQueue>,
    multi_queue: bool,
    supported: Supported,
    interface: Interface,
    link_monitor: LinkMonitor,
    netlink: Netlink,
}

impl Opened {
    /// Opens the interface, and creates it if it does not exist.
    fn new(device: &str, whole: bool) -> Result<Self, PortError> {
        let (queue, name) = TapQueue::open(device).map_err(|e| open_error(device, e))?;
        let failed = |what| move |source| system_error(NAME, device, what, source);
        let interface = Interface::find(&name, NAME)?;
        let link_monitor = LinkMonitor::new(&interface).map_err(failed("watching the interface"))?;
        let netlink = Netlink::route().map_err(failed("opening a netlink socket"))?;
        let supported = queue.enable_offloads(whole).map_err(failed("TUNSETOFFLOAD"))?;
        let multi_queue = queue.is_multi_queue();
        if multi_queue {
            // This queue keeps the interface while the port is open. Only the queues of a started port
            // receive frames.
            queue.set_enabled(false).map_err(failed("TUNSETQUEUE"))?;
        }
        Ok(Self { standby_queue: Some(queue), multi_queue, supported, interface, link_monitor, netlink })
    }
}

fn open_error(device: &str, error: io::Error) -> PortError {
    let refused = |reason: String| PortError::Refused { driver: NAME, device: device.to_owned(), reason };
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => privilege_error(NAME, device, "creating a TAP interface", "CAP_NET_ADMIN"),
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            refused(format!("{FILE} does not exist; run `modprobe tun`, or give the container this device"))
        }
        Some(libc::EBUSY) => refused("another program uses the interface; stop it, or choose another name".to_owned()),
        Some(libc::EINVAL) => refused(format!(
            "an interface of this name exists, but it is not a TAP interface; `ip link del {device}`, or choose \
             another name"
        )),
        _ => system_error(NAME, device, "creating a TAP interface (TUNSETIFF)", error),
    }
}

fn ipv6_disabled(device: &str, interface: &str, source: io::Error) -> PortError {
    PortError::System {
        driver: NAME,
        device: device.to_owned(),
        what: "adding an IPv6 address to the interface, on which IPv6 is disabled".to_owned(),
        source,
        hint: format!("; `sysctl -w net.ipv6.conf.{interface}.disable_ipv6=0`"),
    }
}

struct TapDevice {
    options: Options,
    namespace: Namespace,
    /// The port created the interface.
    created: bool,
    opened: Opened,
    /// The interface is in another network namespace, where its queues still work.
    moved: bool,
    queues: Vec<Arc<TapQueue>>,
    /// Frames that lost interfaces dropped.
    dropped: Dropped,
}

impl TapDevice {
    fn system_error(&self, what: &'static str) -> impl FnOnce(io::Error) -> PortError + '_ {
        move |source| system_error(NAME, &self.options.device, what, source)
    }

    /// Address of the port. The kernel's interface is the other host on this wire, so this end has another one.
    fn address(&self) -> Option<MacAddr> {
        self.opened.interface.mac.map(|mac| {
            let mut here = mac;
            here.0[0] |= 2;
            here.0[5] ^= 1;
            here
        })
    }

    /// Watches the interface again if it is back in the namespace.
    fn find_moved(&mut self, events: &mut Vec<PortEvent>) {
        let Some(now) = Interface::by_name(&self.opened.interface.name, &mut self.opened.netlink) else { return };
        if now.mac != self.opened.interface.mac {
            return;
        }
        let watched = self.namespace.enter().and_then(|_inside| LinkMonitor::new(&now));
        if let Ok(mut link_monitor) = watched {
            events.push(PortEvent::Link(link_monitor.link()));
            (self.opened.link_monitor, self.opened.interface, self.moved) = (link_monitor, now, false);
        }
    }

    /// Number of frames that the kernel dropped on the way to the port.
    fn kernel_drops(&mut self) -> u64 {
        self.dropped.plus(self.opened.link_monitor.dropped()).tx
    }

    /// Sets the interface up and opens its queues.
    fn start_queues(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let _inside = self.namespace.enter().map_err(self.system_error("entering the namespace of the interface"))?;
        let setup = InterfaceConfig { mtu: config.mtu, depth: config.depth, mac: self.options.mac };
        let applied = setup.apply(&mut self.opened.netlink, self.opened.interface.index);
        applied.map_err(self.system_error("setting MTU and state of the interface"))?;
        for prefix in self.options.addresses.clone() {
            let added = prefix.add(&mut self.opened.netlink, self.opened.interface.index);
            added.map_err(|source| match source.raw_os_error() {
                // A missing privilege is not the cause: the privileges sufficed to create the interface.
                Some(libc::EACCES) if prefix.is_ipv6() => {
                    ipv6_disabled(&self.options.device, &self.opened.interface.name, source)
                }
                _ => system_error(NAME, &self.options.device, "adding an address to the interface", source),
            })?;
        }
        if let Some(now) = self.opened.interface.refresh(&mut self.opened.netlink) {
            self.opened.interface = now;
        }
        // The kernel spreads frames over all open queues, so exactly the polled queues are open.
        self.queues = self.open_queues(config.rx_queues.max(1))?;
        let mut queues = Queues::default();
        for index in 0..usize::from(config.rx_queues) {
            let queue = Arc::clone(&self.queues[index % self.queues.len()]);
            let offload = VnetOffload::new(config.pool.clone(), config.id, self.options.keep_superframes);
            queues.rx.push(Box::new(Receiver::new(queue, offload, self.opened.supported.header_len())));
        }
        for index in 0..usize::from(config.tx_queues) {
            let queue = Arc::clone(&self.queues[index % self.queues.len()]);
            let max_frame = usize::from(config.mtu) + HEADERS;
            queues.tx.push(Box::new(Sender::new(queue, max_frame, self.opened.supported)));
        }
        Ok(queues)
    }

    /// Opens the queues of a started port.
    fn open_queues(&mut self, count: u16) -> Result<Vec<Arc<TapQueue>>, PortError> {
        if !self.opened.multi_queue
            && let Some(queue) = self.opened.standby_queue.take()
        {
            return Ok(vec![Arc::new(queue)]);
        }
        let mut queues = Vec::new();
        for _ in 0..count {
            let (queue, _) =
                TapQueue::open(&self.opened.interface.name).map_err(|e| open_error(&self.options.device, e))?;
            queue.enable_offloads(self.options.keep_superframes).map_err(self.system_error("TUNSETOFFLOAD"))?;
            queues.push(Arc::new(queue));
        }
        Ok(queues)
    }
}

impl Device for TapDevice {
    fn capabilities(&self) -> Capabilities {
        let mut notes = Vec::new();
        if !self.opened.multi_queue {
            notes.push("one queue: the interface was created without `multi_queue`".to_owned());
        }
        if self.options.keep_superframes && !self.opened.supported.tunnel {
            notes.push(
                "superframes in UDP tunnels are cut by software (the kernel does it from Linux 6.17 on)".to_owned(),
            );
        }
        if !self.opened.supported.udp {
            notes.push("no UDP superframes from and to the kernel (needs Linux 6.2)".to_owned());
        }
        Capabilities {
            mode: format!(
                "TAP interface {}, one frame per call, superframes from the kernel{}",
                self.opened.interface.name,
                if self.options.keep_superframes { ", not segmented" } else { "" }
            ),
            notes,
            mac: self.address(),
            ..self.options.capabilities(self.opened.multi_queue)
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let queues = self.start_queues(config)?;
        self.dropped = Dropped::default();
        self.opened.link_monitor.forget_drops();
        Ok(queues)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        drop(queues);
        let mut queues = std::mem::take(&mut self.queues);
        if !self.opened.multi_queue {
            self.opened.standby_queue = queues.pop().and_then(|queue| Arc::try_unwrap(queue).ok());
        }
        Ok(())
    }

    fn can_return(&self) -> bool {
        true
    }

    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let _inside = self.namespace.enter().map_err(self.system_error("entering the namespace of the interface"))?;
        let name = self.opened.interface.name.clone();
        if !self.created {
            Interface::find(&name, NAME)?;
        }
        self.opened.standby_queue = None;
        let dropped = self.dropped.plus(self.opened.link_monitor.dropped());
        self.opened = Opened::new(&name, self.options.keep_superframes)?;
        self.dropped = dropped;
        self.start_queues(config)
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }
}

impl DeviceLink for TapDevice {
    fn link(&mut self) -> Link {
        // The link of an interface in another namespace cannot be read; transmits say whether it is up.
        if self.moved { Link::UP } else { self.opened.link_monitor.link() }
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let mut events = self.opened.link_monitor.events();
        let lost = events.pop_if(|event| matches!(event, PortEvent::Lost(_)));
        if lost.is_some() || self.moved {
            self.moved = self.queues.iter().any(|queue| queue.has_device());
            if !self.moved {
                let name = &self.opened.interface.name;
                events.push(lost.unwrap_or_else(|| PortEvent::Lost(format!("interface {name} was removed"))));
            } else if lost.is_some() {
                tracing::info!(
                    "interface {} left the network namespace; its port keeps it",
                    self.opened.interface.name
                );
            } else {
                self.find_moved(&mut events);
            }
        }
        for event in &mut events {
            if let PortEvent::Address(mac) = event {
                self.opened.interface.mac = Some(*mac);
                *mac = self.address().unwrap_or(*mac);
            }
        }
        events
    }
}

impl DeviceStatistics for TapDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        vec![("kernel_drops", self.kernel_drops())]
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        vec![(DropReason::RxFull, self.kernel_drops())]
    }
}
