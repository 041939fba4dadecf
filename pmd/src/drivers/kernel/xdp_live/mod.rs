//! `xdp_live`: sends by live frames of XDP (`BPF_PROG_TEST_RUN` with `BPF_F_TEST_XDP_LIVE_FRAMES`, Linux 5.18), for
//! traffic generators. It receives as `af_packet` does.
//!
//! ```toml
//! [port.xdp_live]
//! burst = 1024
//! ```
//!
//! A transmit queue copies packets into memory that it shares with an XDP program. One system call then runs the
//! program once for each packet: the kernel takes a page, the program writes the packet into it and redirects it to the
//! interface (`ndo_xdp_xmit`). No socket buffer is allocated, and one call carries a burst. It blocks for a time that
//! is proportional to the burst.
//!
//! An interface takes such frames only if its driver can (it says so since Linux 6.3). An end of a veth cable can if
//! the other end has an XDP program or GRO.
//!
//! The kernel tells nobody which frames an interface refuses. Drivers count them, veth as `tx_dropped`; the port takes
//! its drops from there.

mod program;
mod tx;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tx::{Sender, Shared};

use super::af_packet;
use super::common::bpf::{GENERIC, HAS_FRAGS, LoadError, MappedValue, Program, ProgramKind, ProgramLink};
use super::common::link::Interface;
use super::common::link_probe::LinkProbe;
use super::common::namespace::Namespace;
use super::common::netlink::Netlink;
use super::common::xdp_features::{self, XdpFeatures};
use super::common::{check_mtu, privilege_error, system_error};
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::port::{
    Capabilities, Device, DeviceLink, DeviceStatistics, KernelPunt, Link, Offloads, PortConfig, PortError, PortEvent,
    PortSpec, Queues,
};
use wirepath_packet::drops::DropReason;
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{ConfigError, ConfigTable, Integer, Key, Settings, WithDefault};

const NAME: &str = "xdp_live";
/// An interface has room for one program. See [`LiveDevice::attach`].
const MAX_QUEUES: u16 = 1;
/// Ethernet header and one VLAN tag. The kernel refuses a live frame with more above the MTU (`xdp_ok_fwd_dev` in
/// net/core/filter.c).
const HEADERS: usize = 14 + 4;
/// Interval at which the port asks whether the interface takes frames.
const ASK: Duration = Duration::from_millis(250);
/// Operation that needs privileges.
const SENDING: &str = "sending live frames";

const BURST: Key<WithDefault<Integer<u32>>> = Key::integer("burst", 1..=16_384).unit("packets").default(512).about(
    "Packets that one system call sends at most. A call blocks its worker for about 20 us, and 0.2 us more for each \
         packet.",
);

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"xdp_live\".",
    absent: "every key has its default",
    keys: &[&BURST],
    example: "[port.xdp_live]\nburst = 1024\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct XdpLive;

/// Options of an `xdp_live` port.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    burst: u32,
}

impl Options {
    /// An interface, with bursts of the usual length.
    pub fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), burst: BURST.default_value() }
    }
}

impl Driver for XdpLive {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "live frames of XDP for traffic generators: sends fast to an interface; receives as af_packet"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::Interface
    }

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN | CapabilitySet::BPF
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn modes(&self) -> &'static [&'static str] {
        &["", "burst = 64"]
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected the name of a network interface"));
        };
        Ok(Box::new(Options { device: device.to_owned(), burst: settings.read(&BURST)? }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        let interfaces = Interface::all().unwrap_or_default();
        let offer = |interface: Interface| {
            let device = interface.name.clone();
            let usable = Options::new(&device).open_device().map(|_| "live frames of XDP".to_owned());
            Candidate { device, usable: usable.map_err(|error| error.to_string()) }
        };
        interfaces.into_iter().filter(|interface| !interface.loopback).map(offer).collect()
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(self.open_device()?))
    }
}

impl Options {
    fn open_device(self) -> Result<LiveDevice, PortError> {
        let interface = Interface::find(&self.device, NAME)?;
        // A missing privilege comes first: it is the same for all interfaces.
        try_program(&self.device, interface.index)?;
        let features = sending_features(&interface)?;
        let receiver: Box<dyn PortSpec> = Box::new(af_packet::Options::new(&self.device).cut_superframes());
        let receiver = receiver.open()?;
        let netlink = Netlink::route().map_err(|e| system_error(NAME, &self.device, "opening a netlink socket", e))?;
        Ok(LiveDevice {
            options: self,
            namespace: Namespace::current(),
            interface,
            features,
            receiver,
            netlink,
            running: None,
        })
    }
}

/// Returns the XDP features of an interface, or the reason why it takes no live frames. `None`: the kernel does not
/// report them.
fn sending_features(interface: &Interface) -> Result<Option<XdpFeatures>, PortError> {
    let features = xdp_features::query(interface.index);
    if features.is_none_or(|features| features.sends) {
        return Ok(features);
    }
    let reason = if interface.is_veth {
        "the other end of the cable takes no frames of XDP programs; switch GRO on there (`ethtool -K PEER gro on`), \
         or attach an XDP program to it"
    } else {
        "its driver sends no frames of XDP programs (ndo_xdp_xmit), or needs an XDP program on the interface for it; \
         use the driver af_xdp or af_packet"
    };
    Err(PortError::Refused { driver: NAME, device: interface.name.clone(), reason: reason.to_owned() })
}

/// Loads the program of a queue with its memory.
fn load(interface: u32) -> Result<(Program, MappedValue), LoadError> {
    let failed = |source| LoadError { source, report: String::new() };
    let value = MappedValue::new(program::BYTES as u32).map_err(failed)?;
    let code = program::assemble(value.raw_fd(), interface).map_err(|text| failed(io::Error::other(text)))?;
    Ok((Program::load(ProgramKind::Xdp, &code, program::NAME, HAS_FRAGS, 0)?, value))
}

/// Loads the program and runs it once without a packet, which shows whether the kernel can do what the port needs.
fn try_program(device: &str, interface: u32) -> Result<(), PortError> {
    let tried = load(interface)
        .map_err(io::Error::from)
        .and_then(|(program, mut value)| program.run_burst(&[0; program::SHORTEST], 1, &mut value));
    tried.map_err(|error| load_error(device, error))
}

fn load_error(device: &str, source: io::Error) -> PortError {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => privilege_error(NAME, device, SENDING, "CAP_BPF and CAP_NET_ADMIN"),
        _ => PortError::System {
            driver: NAME,
            device: device.to_owned(),
            what: "running an XDP program on live frames".to_owned(),
            source,
            hint: "; it needs Linux 5.18, use the driver af_xdp or af_packet".to_owned(),
        },
    }
}

struct LiveDevice {
    options: Options,
    namespace: Namespace,
    interface: Interface,
    /// `None`: the kernel does not report them.
    features: Option<XdpFeatures>,
    /// The half that receives, and watches the interface.
    receiver: Box<dyn Device>,
    netlink: Netlink,
    running: Option<Running>,
}

/// State of a started port, apart from its queues.
struct Running {
    shared: Arc<Shared>,
    _attached: Option<ProgramLink>,
    /// Frames that the interface had refused when they were last counted (`tx_dropped`).
    refused: u64,
    /// Time of the last question whether the interface takes frames.
    asked: Instant,
}

impl Running {
    /// Leaves the frames that the interface has refused to the queues.
    fn count_refused(&mut self, interface: &Interface) {
        let new = interface.dropped.tx.saturating_sub(self.refused);
        self.refused = interface.dropped.tx;
        self.shared.refused.fetch_add(new, Ordering::Relaxed);
    }

    /// Asks whether the interface still takes frames. The other end of a cable may change.
    fn ask(&mut self, interface: &Interface) {
        if self.asked.elapsed() < ASK {
            return;
        }
        self.asked = Instant::now();
        let takes_frames = xdp_features::query(interface.index).is_none_or(|features| features.sends);
        if self.shared.takes_frames.swap(takes_frames, Ordering::Relaxed) && !takes_frames {
            tracing::warn!(
                "interface {} takes no live frames any more: the other end has no XDP program and no GRO",
                interface.name
            );
        }
    }
}

impl LiveDevice {
    /// Starts the port on the interface that has the configured name now. `receiver` are its receive queues.
    fn start_sending(&mut self, config: &PortConfig, receiver: Queues) -> Result<Queues, PortError> {
        let failed = |what: &'static str| {
            let device = self.options.device.clone();
            move |source| system_error(NAME, &device, what, source)
        };
        let _inside = self.namespace.enter().map_err(failed("entering the namespace of the interface"))?;
        self.interface = Interface::find(&self.options.device, NAME)?;
        self.netlink = Netlink::route().map_err(failed("opening a netlink socket"))?;
        self.features = sending_features(&self.interface)?;
        check_mtu(NAME, &self.interface, config.mtu)?;
        let link_probe = LinkProbe::new(self.interface.index).map_err(failed("watching the interface"))?;
        let shared = Arc::new(Shared {
            namespace: Namespace::current(),
            link_probe,
            refused: AtomicU64::new(0),
            takes_frames: AtomicBool::new(true),
        });
        let limits = (usize::from(config.mtu) + HEADERS, self.options.burst);
        let mut queues = Queues { rx: receiver.rx, tx: Vec::new() };
        let mut attached = None;
        for _ in 0..config.tx_queues {
            let loaded = load(self.interface.index).map_err(|error| load_error(&self.options.device, error.into()));
            let (program, value) = loaded?;
            attached = Some(self.attach(&program)?);
            queues.tx.push(Box::new(Sender::new(program, value, Arc::clone(&shared), limits)));
        }
        let refused = self.interface.dropped.tx;
        self.running = Some(Running { shared, _attached: attached, refused, asked: Instant::now() });
        Ok(queues)
    }

    /// Attaches the program to the interface, where it passes all frames to the kernel.
    ///
    /// A call for a program that is attached nowhere changes the kernel's code before and after the run
    /// (`bpf_prog_change_xdp` in net/core/filter.c). It waits for all processors and takes 25 ms instead of 20 us.
    fn attach(&self, program: &Program) -> Result<ProgramLink, PortError> {
        program.link(self.interface.index, GENERIC).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => PortError::Refused {
                driver: NAME,
                device: self.options.device.clone(),
                reason: format!(
                    "an XDP program is attached to the interface; stop the program that did it, or `ip link set dev {} \
                     xdp off`",
                    self.interface.name
                ),
            },
            _ => load_error(&self.options.device, error),
        })
    }

    /// Stops the receiving half after an error of the sending one.
    fn start_both(
        &mut self,
        config: &PortConfig,
        start: fn(&mut dyn Device, &PortConfig) -> Result<Queues, PortError>,
    ) -> Result<Queues, PortError> {
        let received = start(&mut *self.receiver, &PortConfig { tx_queues: 0, ..config.clone() })?;
        let started = self.start_sending(config, received);
        if started.is_err() {
            let _ = self.receiver.stop(Queues::default());
        }
        started
    }

    /// Reads what the interface has refused.
    fn watch(&mut self) {
        if let Some(running) = &mut self.running
            && let Some(now) = self.interface.refresh(&mut self.netlink)
        {
            running.count_refused(&now);
            // The question is about the interface with this index in the namespace of the thread.
            if let Ok(_inside) = self.namespace.enter() {
                running.ask(&now);
            }
        }
    }
}

impl Device for LiveDevice {
    fn capabilities(&self) -> Capabilities {
        let receiver = self.receiver.capabilities();
        let mut notes = receiver.notes;
        notes.push(format!("frames end at {} bytes: a live frame is one page", program::LONGEST));
        if !self.interface.is_veth {
            notes.push("frames that the interface refuses count as sent unless its driver counts them".to_owned());
        }
        if self.features.is_none() {
            notes.push("the kernel does not report whether the interface takes live frames (Linux 6.3)".to_owned());
        }
        let mode = format!("live frames of XDP, bursts of {}; receives by {}", self.options.burst, receiver.mode);
        Capabilities {
            driver: NAME,
            mode,
            notes,
            max_tx_queues: MAX_QUEUES,
            max_mtu: (program::LONGEST - HEADERS) as u16,
            offloads: receiver.offloads.without(Offloads::TX_SEGMENT),
            can_bifurcate: false,
            kernel_punt: KernelPunt::No("a port for traffic generators passes no packets to the kernel"),
            ..receiver
        }
    }

    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        config.check(&self.capabilities())?;
        check_mtu(NAME, &self.interface, config.mtu)
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        self.start_both(config, |device, config| device.start(config))
    }

    fn can_return(&self) -> bool {
        true
    }

    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        self.start_both(config, |device, config| device.restart(config))
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        let senders: Vec<Box<Sender>> =
            queues.tx.into_iter().filter_map(|queue| queue.into_any().downcast().ok()).map(finished).collect();
        self.watch();
        senders.iter().for_each(|sender| sender.count_refused());
        self.running = None;
        self.receiver.stop(Queues { rx: queues.rx, tx: Vec::new() })
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }
}

/// Sends what the queue has collected.
fn finished(mut sender: Box<Sender>) -> Box<Sender> {
    sender.finish();
    sender
}

impl DeviceLink for LiveDevice {
    fn link(&mut self) -> Link {
        self.receiver.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        self.watch();
        self.receiver.events()
    }
}

impl DeviceStatistics for LiveDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.receiver.statistics().map_or_else(Vec::new, DeviceStatistics::extra_statistics)
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        self.receiver.statistics().map_or_else(Vec::new, DeviceStatistics::drops)
    }
}
