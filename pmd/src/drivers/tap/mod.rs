//! `tap`: a network interface of the kernel's whose other end is the port, for traffic to and from this machine itself.
//!
//! ```toml
//! [port.tap]
//! address = ["10.0.0.1/24", "fd00::1/64"]   # of the kernel's interface; none by default
//! mac = "02:00:00:00:00:01"                 # of the kernel's interface; the kernel chooses by default
//! superframes = "cut"                       # or "whole": TCP superframes go on as they are
//! ```
//!
//! The interface is made when the port is opened, and goes with the program unless it was made before (`ip tuntap add`). Starting the
//! port sets its MTU and switches it on. Each queue is one open `/dev/net/tun`, read and written one frame a call: the kernel offers
//! nothing better. So that those calls carry much, the kernel may leave checksums and segmentation of what it sends to us; it is all
//! finished here (`kernel::vnet`), and no packet leaves a port unfinished. `superframes = "whole"` is for ports whose NIC cuts them
//! (`TX_SEGMENT`): a superframe then crosses the program as one packet. A port that cannot cut drops it and counts it.

mod device;
mod interface;
mod rx;
mod tx;

use std::io;
use std::sync::Arc;

use device::{FILE, Queue};
use interface::{Prefix, Setup};
use rx::Receiver;
use tx::Sender;

use super::kernel::link::Interface;
use super::kernel::netlink::Netlink;
use super::kernel::vnet::Finisher;
use super::kernel::watch::Watch;
use super::kernel::{privilege, system};
use super::{Candidate, Driver};
use crate::port::{
    Capabilities, Device, Link, MacAddress, Offloads, Plan, PortConfig, PortError, PortEvent, Queues, ToKernel,
};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "tap";
/// `MAX_TAP_QUEUES` in the kernel is 256; each takes 70 KB here.
const MAX_QUEUES: u16 = 64;
/// Ethernet header and two tags.
const HEADERS: usize = 14 + 2 * 4;

/// The driver.
#[derive(Debug)]
pub struct Tap;

/// What a `tap` port opens.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    addresses: Vec<Prefix>,
    mac: Option<MacAddress>,
    whole: bool,
}

impl Options {
    /// An interface of this name; `%d` in it stands for a number of the kernel's choice.
    pub fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), addresses: Vec::new(), mac: None, whole: false }
    }
}

impl Driver for Tap {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "an interface of the kernel's with the port at its other end"
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected a name for the interface to be made"));
        };
        if device.is_empty() || device.len() > 15 || device.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(settings.error(format!(
                "device: found \"{device}\", expected a name of 1 to 15 characters without blanks and slashes"
            )));
        }
        let addresses = settings.list("address", "an address with a prefix length, such as \"10.0.0.1/24\"")?;
        let mac: Option<MacAddress> = settings.parsed("mac", "an Ethernet address, such as \"02:00:00:00:00:01\"")?;
        if mac.is_some_and(|mac| mac.0[0] & 1 != 0 || mac.0 == [0; 6]) {
            return Err(settings.error_in("mac", "not the address of one station"));
        }
        Ok(Box::new(Options {
            device: device.to_owned(),
            addresses: addresses.into_iter().map(|placed| placed.value).collect(),
            mac,
            whole: settings.choice("superframes", &[("cut", false), ("whole", true)])?.unwrap_or(false),
        }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        let usable = match std::fs::File::options().read(true).write(true).open(FILE) {
            Ok(_) => Ok("makes an interface of this or any other name".to_owned()),
            Err(error) => Err(open_error("tap0", error).to_string()),
        };
        vec![Candidate { device: "tap0".to_owned(), usable }]
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn to_kernel(&self) -> ToKernel {
        ToKernel::Back
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        let (queue, name) = Queue::open(&self.device).map_err(|e| open_error(&self.device, e))?;
        let failed = |what| {
            let device = self.device.clone();
            move |source| system(NAME, &device, what, source)
        };
        let interface = Interface::find(&name, NAME)?;
        let watch = Watch::new(&interface).map_err(failed("watching the interface"))?;
        let netlink = Netlink::route().map_err(failed("opening a netlink socket"))?;
        let udp = queue.take_offloads().map_err(failed("TUNSETOFFLOAD"))?;
        let several = queue.is_one_of_several();
        if several {
            // It holds the interface as long as the port is open; frames are for the queues of a started port.
            queue.switch(false).map_err(failed("TUNSETQUEUE"))?;
        }
        Ok(Box::new(TapDevice {
            options: *self,
            holder: Some(queue),
            several,
            udp,
            interface,
            watch,
            netlink,
            queues: Vec::new(),
            dropped_before: 0,
        }))
    }
}

fn open_error(device: &str, error: io::Error) -> PortError {
    let refused = |reason: String| PortError::Refused { driver: NAME, device: device.to_owned(), reason };
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => privilege(NAME, device, "making a TAP interface", "CAP_NET_ADMIN"),
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            refused(format!("{FILE} is not there; `modprobe tun`, or give the container this device"))
        }
        Some(libc::EBUSY) => refused("another program has the interface; stop it, or choose another name".to_owned()),
        Some(libc::EINVAL) => refused(format!(
            "there is an interface of this name, but it is no TAP interface; `ip link del {device}`, or choose another name"
        )),
        _ => system(NAME, device, "making a TAP interface (TUNSETIFF)", error),
    }
}

struct TapDevice {
    options: Options,
    /// Keeps the interface while the port is not started. Of a device for one queue it is that queue.
    holder: Option<Queue>,
    several: bool,
    /// Whether UDP superframes may come.
    udp: bool,
    interface: Interface,
    watch: Watch,
    netlink: Netlink,
    queues: Vec<Arc<Queue>>,
    dropped_before: u64,
}

impl TapDevice {
    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> PortError + '_ {
        move |source| system(NAME, &self.options.device, what, source)
    }

    /// Opens the queues of a started port.
    fn open_queues(&mut self, count: u16) -> Result<Vec<Arc<Queue>>, PortError> {
        if !self.several
            && let Some(queue) = self.holder.take()
        {
            return Ok(vec![Arc::new(queue)]);
        }
        let mut queues = Vec::new();
        for _ in 0..count {
            let (queue, _) = Queue::open(&self.interface.name).map_err(|e| open_error(&self.options.device, e))?;
            queue.take_offloads().map_err(self.failed("TUNSETOFFLOAD"))?;
            queues.push(Arc::new(queue));
        }
        Ok(queues)
    }
}

impl Device for TapDevice {
    fn capabilities(&self) -> Capabilities {
        let most = if self.several { MAX_QUEUES } else { 1 };
        let mut notes = Vec::new();
        if !self.several {
            notes.push("one queue: the interface was made without `multi_queue`".to_owned());
        }
        if !self.udp {
            notes.push("no UDP superframes from the kernel (Linux 6.2)".to_owned());
        }
        Capabilities {
            mode: format!(
                "TAP interface {}, one frame a call, superframes from the kernel{}",
                self.interface.name,
                if self.options.whole { ", TCP ones left whole" } else { "" }
            ),
            notes,
            // The kernel's interface is the other station of this wire; this end gets an address of its own.
            mac: self.interface.mac.map(|mac| {
                let mut here = mac;
                here.0[0] |= 2;
                here.0[5] ^= 1;
                here
            }),
            max_rx_queues: most,
            max_tx_queues: most,
            offloads: Offloads::RX_CHAINS.with(Offloads::TX_CHAINS),
            max_tx_segments: 1023,
            can_wait: true,
            to_kernel: ToKernel::Back,
            ..Capabilities::plain(NAME, &self.options.device)
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let setup = Setup { mtu: config.mtu, depth: config.depth, mac: self.options.mac };
        let applied = setup.apply(&mut self.netlink, self.interface.index);
        applied.map_err(self.failed("setting MTU and state of the interface"))?;
        for prefix in self.options.addresses.clone() {
            let added = prefix.add(&mut self.netlink, self.interface.index);
            added.map_err(|source| match source.raw_os_error() {
                // Not for want of a privilege: those sufficed to make the interface.
                Some(libc::EACCES) if prefix.is_ipv6() => PortError::System {
                    driver: NAME,
                    device: self.options.device.clone(),
                    what: "giving an IPv6 address to the interface, which has IPv6 switched off".to_owned(),
                    source,
                    hint: format!("; `sysctl -w net.ipv6.conf.{}.disable_ipv6=0`", self.interface.name),
                },
                _ => system(NAME, &self.options.device, "giving an address to the interface", source),
            })?;
        }
        if let Some(now) = self.interface.again(&mut self.netlink) {
            self.interface = now;
        }
        self.dropped_before = interface::dropped(&mut self.netlink, self.interface.index);
        // The kernel spreads frames over all queues that are open: there must be as many as are polled.
        self.queues = self.open_queues(config.rx_queues.max(1))?;
        let mut queues = Queues::default();
        for index in 0..usize::from(config.rx_queues) {
            let queue = Arc::clone(&self.queues[index % self.queues.len()]);
            let finisher = Finisher::new(config.pool.clone(), config.id).whole(self.options.whole);
            queues.rx.push(Box::new(Receiver::new(queue, finisher)));
        }
        for index in 0..usize::from(config.tx_queues) {
            let queue = Arc::clone(&self.queues[index % self.queues.len()]);
            queues.tx.push(Box::new(Sender::new(queue, usize::from(config.mtu) + HEADERS)));
        }
        Ok(queues)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        drop(queues);
        let mut queues = std::mem::take(&mut self.queues);
        if !self.several {
            self.holder = queues.pop().and_then(|queue| Arc::try_unwrap(queue).ok());
        }
        Ok(())
    }

    fn link(&mut self) -> Link {
        self.watch.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        self.watch.events()
    }

    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let dropped = interface::dropped(&mut self.netlink, self.interface.index);
        vec![("kernel_drops", dropped.saturating_sub(self.dropped_before))]
    }
}
