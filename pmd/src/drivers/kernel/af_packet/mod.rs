//! `af_packet`: packet sockets of the kernel (packet(7)), for any Ethernet-like interface on any kernel.
//!
//! ```toml
//! [port.af_packet]
//! exclusive = false
//! ```
//!
//! Each receive queue is a socket with a ring, joined with the others in a fan-out group. Each transmit queue is a
//! socket that only sends. Sockets pass a `virtio_net_hdr` with each frame, which states what the kernel left undone.
//! The driver completes it: checksums, segmentation and VLAN tags (`kernel::vnet_hdr`).
//!
//! The ring is a `TPACKET_V2` ring for short frames, and recvmmsg(2) writes longer ones directly into packet buffers
//! (`rx`). With `superframes = "cut"` superframes are cut there.
//!
//! A packet socket only taps frames: the kernel would also process them, answer for its addresses and
//! forward. In `exclusive` mode a program at the interface's tc ingress hook, behind the tap, drops the
//! frames. The BPF link that holds it belongs to this process.
//!
//! A port with a [`Bifurcation`] takes only some frames, by a filter of its sockets. The program at the hook drops the
//! same frames, and the kernel processes all others.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod messages;
mod rx;
mod slots;
mod socket;
mod tunnel_gso;
mod tx;

use std::io;
use std::sync::Arc;

use rx::Receiver;
use slots::{SLOT, SlotRing};
use socket::{Fanout, Filter, Socket, Statistics};
use tx::{Sender, Sockets};

use super::common::assembler::{Assembler, Register};
use super::common::bifurcation;
use super::common::bpf::{Program, ProgramKind, ProgramLink};
use super::common::ethtool::{self, Segmentation};
use super::common::link::{Dropped, Interface};
use super::common::link_monitor::LinkMonitor;
use super::common::link_probe::LinkProbe;
use super::common::namespace::Namespace;
use super::common::routes::carries_default_route;
use super::common::vnet_hdr::VnetOffload;
use super::common::{check_mtu, privilege_error, system_error};
use crate::drivers::{Candidate, DeviceKind, Driver};
use crate::port::{
    Bifurcation, Capabilities, Device, DeviceLink, DeviceStatistics, KernelPunt, Link, Offloads, PortConfig, PortError,
    PortEvent, PortSpec, Queues,
};
use wirepath_packet::drops::DropReason;
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Key, Settings, WithDefault};

const NAME: &str = "af_packet";
/// Ethernet header and two VLAN tags.
const HEADERS: usize = 14 + 2 * 4;
/// A ring takes 8 MiB by default; a configuration with more queues than this is a mistake.
const MAX_QUEUES: u16 = 64;

/// Receive socket of a queue with its ring, if the kernel has not refused it.
type BoundReceiver = (Arc<Socket>, Option<SlotRing>);

/// Offloads of every interface.
const OFFLOADS: Offloads = Offloads::RX_CHAINS.with(Offloads::TX_CHAINS);

const EXCLUSIVE: Key<WithDefault<Flag>> = Key::flag("exclusive")
    .default(true)
    .about("Keeps the kernel from processing the frames too (Linux 6.6). With false, the kernel gets a copy of each.");
const FANOUT: Key<WithDefault<Choice<Fanout>>> = Key::choice(
    "fanout",
    &[
        ("hash", Fanout::Hash, "by a symmetric hash of addresses and ports"),
        ("cpu", Fanout::Cpu, "by the CPU that received the frame"),
        ("queue", Fanout::Queue, "by the device's receive queue"),
    ],
)
.default_word("hash")
.about("Distribution of frames over the receive queues of the port.");

const SUPERFRAMES: Key<WithDefault<Choice<bool>>> = Key::choice(
    "superframes",
    &[
        ("cut", false, "segments superframes as they are received"),
        ("whole", true, "receives a superframe as one packet, which is cut when it leaves, by the kernel if it can"),
    ],
)
.default_word("whole")
.about("Treatment of TCP and UDP superframes: those of local senders, and those that the kernel joined (GRO).");

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"af_packet\".",
    absent: "every key has its default",
    keys: &[&EXCLUSIVE, &FANOUT, &SUPERFRAMES],
    example: "[port.af_packet]\nexclusive = false\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct AfPacket;

/// Options of an `af_packet` port.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    exclusive: bool,
    fanout: Fanout,
    keep_superframes: bool,
}

impl Options {
    /// Exclusive use of `device`, with frames spread over queues by flow.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            exclusive: EXCLUSIVE.default_value(),
            fanout: FANOUT.default_value(),
            keep_superframes: SUPERFRAMES.default_value(),
        }
    }

    /// Sets whether the kernel is kept from processing the frames.
    pub fn exclusive(mut self, exclusive: bool) -> Self {
        self.exclusive = exclusive;
        self
    }

    /// Segments superframes as they are received.
    pub(in crate::drivers::kernel) fn cut_superframes(self) -> Self {
        Self { keep_superframes: false, ..self }
    }
}

impl Driver for AfPacket {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "packet sockets with receive rings, on any Ethernet interface"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::Interface
    }

    fn in_auto(&self) -> bool {
        true
    }

    /// An XDP program on one end of a cable keeps the other end from sending superframes (`veth_xdp_set` in
    /// drivers/net/veth.c). The kernel also copies each frame once more.
    fn is_first_on_veth(&self) -> bool {
        true
    }

    fn modes(&self) -> &'static [&'static str] {
        &["", "superframes = 'cut'", "exclusive = false"]
    }

    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN | CapabilitySet::BPF
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected the name of a network interface"));
        };
        Ok(Box::new(Options {
            device: device.to_owned(),
            exclusive: settings.read(&EXCLUSIVE)?,
            fanout: settings.read(&FANOUT)?,
            keep_superframes: settings.read(&SUPERFRAMES)?,
        }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        let interfaces = Interface::all().unwrap_or_default();
        let offer = |interface: Interface| {
            let device = interface.name.clone();
            let usable = match Options::new(&device).open_device() {
                Ok(_) if carries_default_route(interface.index).unwrap_or(false) => {
                    Ok("TPACKET_V2, sendmmsg; carries a default route: auto uses it only with force".to_owned())
                }
                Ok(_) => Ok("TPACKET_V2, sendmmsg".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            Candidate { device, usable }
        };
        interfaces.into_iter().filter(|interface| !interface.loopback).map(offer).collect()
    }
}

impl Options {
    fn open_device(self) -> Result<AfPacketDevice, PortError> {
        let interface = Interface::find(&self.device, NAME)?;
        // Fails early if the privilege is missing.
        Socket::new().map_err(|e| raw_socket_error(&self.device, e))?;
        if interface.mac.is_none() {
            return Err(PortError::Refused {
                driver: NAME,
                device: self.device,
                reason: "its frames have no Ethernet header".to_owned(),
            });
        }
        if self.exclusive {
            let loaded = load_drop_program(None);
            loaded.map_or_else(|error| drop_program_error(&self.device, error).map(drop), |_| Ok(()))?;
        }
        let (link_probe, link_monitor) = watch_interface(&interface)?;
        let segmentation = segmentation(&interface);
        Ok(AfPacketDevice {
            options: self,
            namespace: Namespace::current(),
            interface,
            link_probe,
            link_monitor,
            segmentation,
            running: None,
            former: Statistics::default(),
            lost_interfaces: Dropped::default(),
        })
    }
}

/// Opens the link probe and the link monitor of an interface.
fn watch_interface(interface: &Interface) -> Result<(Arc<LinkProbe>, LinkMonitor), PortError> {
    let watching = |e| system_error(NAME, &interface.name, "watching the interface", e);
    let link_monitor = LinkMonitor::new(interface).map_err(watching)?;
    Ok((Arc::new(LinkProbe::new(interface.index).map_err(watching)?), link_monitor))
}

/// Returns which superframes outside tunnels can be sent through the interface ([`tx`]). The kernel segments all of
/// them where no queueing discipline has to be bypassed.
fn segmentation(interface: &Interface) -> Segmentation {
    if interface.is_noqueue {
        return Segmentation { ipv4: true, ipv6: true, ecn: true, udp: true };
    }
    ethtool::segmentation(&interface.name).unwrap_or_default()
}

/// Loads the program that drops the frames behind the tap: all, or those that the port takes.
fn load_drop_program(bifurcation: Option<&Bifurcation>) -> io::Result<Program> {
    /// `TCX_DROP` and `TCX_NEXT` (linux/bpf.h).
    const DROP: i32 = 2;
    const NEXT: i32 = -1;
    const PROGRAM: &str = "wirepath_drop";
    if let Some(bifurcation) = bifurcation {
        return bifurcation::load_program(ProgramKind::TcxIngress, PROGRAM, bifurcation, [DROP, NEXT]);
    }
    let mut assembler = Assembler::default();
    assembler.set(Register::R0, DROP);
    assembler.exit();
    let code = assembler.finish().unwrap_or_default();
    Ok(Program::load(ProgramKind::TcxIngress, &code, PROGRAM, 0, 0)?)
}

/// Loads the filter of a socket for the frames that the port takes.
fn load_filter(bifurcation: &Bifurcation) -> io::Result<Program> {
    // The result is the number of bytes that the socket gets.
    bifurcation::load_program(ProgramKind::SocketFilter, "wirepath_filter", bifurcation, [i32::MAX, 0])
}

/// Returns why the port is not exclusive: the kernel does not support it. A missing privilege is an error.
fn drop_program_error(device: &str, error: io::Error) -> Result<String, PortError> {
    if error.raw_os_error() == Some(libc::EPERM) {
        let what = "keeping the kernel from the frames (exclusive = true)";
        return Err(privilege_error(NAME, device, what, "CAP_BPF and CAP_NET_ADMIN"));
    }
    Ok(format!("the kernel also processes the frames: attaching a program at tc ingress (Linux 6.6) failed: {error}"))
}

fn raw_socket_error(device: &str, error: io::Error) -> PortError {
    match error.raw_os_error() {
        Some(libc::EPERM) => privilege_error(NAME, device, "opening a packet socket", "CAP_NET_RAW"),
        _ => system_error(NAME, device, "opening a packet socket", error),
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn kernel_punt(&self) -> KernelPunt {
        to_kernel(self.exclusive)
    }

    fn privileges(&self) -> CapabilitySet {
        privileges(self.exclusive)
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(self.open_device()?))
    }
}

/// Returns the capabilities of a port with programs at its interface or without.
fn privileges(has_programs: bool) -> CapabilitySet {
    if has_programs { AfPacket.privileges() } else { CapabilitySet::NET_RAW }
}

/// Returns how the port passes frames to the kernel.
fn to_kernel(exclusive: bool) -> KernelPunt {
    match exclusive {
        true => KernelPunt::No(
            "the port is exclusive, so the kernel gets none of its frames; with exclusive = false in \
             [port.af_packet] it gets all",
        ),
        false => KernelPunt::Copy,
    }
}

struct AfPacketDevice {
    options: Options,
    namespace: Namespace,
    interface: Interface,
    link_probe: Arc<LinkProbe>,
    link_monitor: LinkMonitor,
    /// Superframes outside tunnels that the device or the kernel segments.
    segmentation: Segmentation,
    running: Option<Running>,
    /// Counts of the sockets before those that run.
    former: Statistics,
    /// Frames that lost interfaces dropped.
    lost_interfaces: Dropped,
}

/// State of a started port, apart from its queues.
struct Running {
    receivers: Vec<Arc<Socket>>,
    /// BPF link of the drop program; the kernel gets no frames while it is open.
    exclusive: Option<ProgramLink>,
    /// The port takes only some frames, and the drop program drops these.
    is_bifurcated: bool,
    /// BPF link of the program for superframes in tunnels.
    tunnels: Option<ProgramLink>,
    notes: Vec<String>,
    /// Size of the rings.
    rings: String,
}

impl AfPacketDevice {
    fn system_error(&self, what: &'static str) -> impl FnOnce(io::Error) -> PortError + '_ {
        move |source| system_error(NAME, &self.options.device, what, source)
    }

    /// Attaches the drop program behind the tap. Returns the reason if the kernel does not support it.
    fn attach_drop_program(&self, bifurcation: Option<&Bifurcation>) -> Result<Result<ProgramLink, String>, PortError> {
        match load_drop_program(bifurcation).and_then(|program| program.link(self.interface.index, 0)) {
            Ok(link) => Ok(Ok(link)),
            Err(error) => drop_program_error(&self.options.device, error).map(Err),
        }
    }

    /// Makes the ring of a receive queue, if the kernel does not refuse it.
    fn ring(
        &self,
        config: &PortConfig,
        socket: &Socket,
        notes: &mut Vec<String>,
    ) -> Result<Option<SlotRing>, PortError> {
        let on: libc::c_int = 1;
        socket.set_option(libc::PACKET_AUXDATA, &on).map_err(self.system_error("PACKET_AUXDATA"))?;
        let bytes = (config.depth as usize).saturating_mul(4096).clamp(32 << 20, 256 << 20);
        let sized = socket.receive_buffer(bytes as libc::c_int);
        sized.map_err(self.system_error("setting the receive buffer size"))?;
        let ring = SlotRing::new(socket, config.depth);
        if let Err(error) = &ring {
            let note = format!("each received frame costs a system call, because there is no receive ring: {error}");
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        Ok(ring.ok())
    }

    fn receivers(&self, config: &PortConfig, notes: &mut Vec<String>) -> Result<Vec<BoundReceiver>, PortError> {
        let index = self.interface.index;
        let mut receivers = Vec::new();
        for _ in 0..config.rx_queues {
            let socket = Socket::new().map_err(|e| raw_socket_error(&self.options.device, e))?;
            let on: libc::c_int = 1;
            socket
                .set_option(libc::PACKET_IGNORE_OUTGOING, &on)
                .map_err(self.system_error("PACKET_IGNORE_OUTGOING (Linux 4.20)"))?;
            socket.set_option(libc::PACKET_VNET_HDR, &on).map_err(self.system_error("PACKET_VNET_HDR"))?;
            let ring = self.ring(config, &socket, notes)?;
            // Reject all frames until all sockets are in the group; otherwise each socket would receive every
            // frame.
            socket.attach_filter(Filter::RejectAll).map_err(self.system_error("attaching a filter"))?;
            receivers.push((Arc::new(socket), ring));
        }
        let mut group = None;
        for (socket, _) in &receivers {
            if config.promiscuous && config.bifurcation.is_none() {
                socket.set_promiscuous(index).map_err(self.system_error("enabling promiscuous mode"))?;
            }
            socket.bind(index, libc::ETH_P_ALL).map_err(self.system_error("binding to the interface"))?;
            if receivers.len() > 1 {
                let joined = socket.join_fanout(self.options.fanout, group);
                group = Some(joined.map_err(self.system_error("joining the fan-out group (PACKET_FANOUT)"))?);
            }
        }
        Ok(receivers)
    }

    /// Makes a transmit queue. `has_program`: the kernel takes superframes in tunnels ([`tunnel_gso`]).
    fn sender(&self, config: &PortConfig, has_program: bool) -> Result<Sender, PortError> {
        let socket = Socket::new().map_err(|e| raw_socket_error(&self.options.device, e))?;
        let on: libc::c_int = 1;
        socket.set_option(libc::PACKET_QDISC_BYPASS, &on).map_err(self.system_error("PACKET_QDISC_BYPASS"))?;
        // The kernel charges about this much for a full-size frame with its buffer and metadata. The default
        // holds fewer than 300 frames.
        let bytes = (config.depth as usize).saturating_mul(4096).clamp(1 << 20, 256 << 20);
        let superframes = self.interface.is_noqueue.then(Socket::new).transpose();
        let superframes = superframes.map_err(|e| raw_socket_error(&self.options.device, e))?;
        for socket in superframes.iter().chain([&socket]) {
            socket.send_buffer(bytes as libc::c_int).map_err(self.system_error("setting the send buffer size"))?;
            socket.bind(self.interface.index, 0).map_err(self.system_error("binding to the interface"))?;
            socket.set_option(libc::PACKET_VNET_HDR, &on).map_err(self.system_error("PACKET_VNET_HDR"))?;
        }
        let max_frame = usize::from(config.mtu) + HEADERS;
        let (segmentation, gso_limits) = (self.segmentation, self.interface.gso_limits);
        let sockets = Sockets { plain: socket, superframes, has_program, segmentation, gso_limits };
        Ok(Sender::new(sockets, Arc::clone(&self.link_probe), max_frame))
    }

    /// Starts the port on the interface that has the configured name now.
    fn start_on_interface(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let _inside = self.namespace.enter().map_err(self.system_error("entering the namespace of the interface"))?;
        self.interface = Interface::find(&self.options.device, NAME)?;
        let dropped = self.link_monitor.dropped();
        (self.link_probe, self.link_monitor) = watch_interface(&self.interface)?;
        self.lost_interfaces = self.lost_interfaces.plus(dropped);
        self.segmentation = segmentation(&self.interface);
        check_mtu(NAME, &self.interface, config.mtu)?;
        let mut notes = Vec::new();
        let receivers = self.receivers(config, &mut notes)?;
        let exclusive = match self.options.exclusive {
            true => match self.attach_drop_program(config.bifurcation.as_ref())? {
                Ok(link) => Some(link),
                Err(reason) if config.bifurcation.is_some() => {
                    return Err(PortError::Refused { driver: NAME, device: self.options.device.clone(), reason });
                }
                Err(why) => {
                    notes.push(why);
                    None
                }
            },
            false => {
                notes.push("the kernel also processes the frames (exclusive = false)".to_owned());
                None
            }
        };
        // Other queueing disciplines might change the order of frames, and hardware without this kind of segmentation
        // gains nothing.
        let may_attach = self.interface.is_veth && self.interface.is_noqueue;
        let tunnels = match may_attach.then(|| tunnel_gso::attach(&self.interface)).transpose() {
            Ok(link) => link,
            Err(error) => {
                notes.push(format!(
                    "superframes in UDP tunnels become datagrams, which costs the receiver more, and those in other \
                     tunnels are cut by software: attaching a program at tc egress (Linux 6.6) failed: {error}"
                ));
                None
            }
        };
        let mut queues = Queues::default();
        for _ in 0..config.tx_queues {
            queues.tx.push(Box::new(self.sender(config, tunnels.is_some())?));
        }
        let take = if config.promiscuous { Filter::AcceptAll } else { Filter::ThisHost };
        let filter = config.bifurcation.as_ref().map(load_filter).transpose();
        let filter = filter.map_err(self.system_error("loading a filter"))?;
        for (socket, _) in &receivers {
            let attached = filter.as_ref().map_or_else(|| socket.attach_filter(take), |it| socket.attach_program(it));
            attached.map_err(self.system_error("attaching a filter"))?;
        }
        let running = receivers.iter().map(|(socket, _)| Arc::clone(socket)).collect();
        let mut rings = String::new();
        for (socket, ring) in receivers {
            let offload = VnetOffload::new(config.pool.clone(), config.id, self.options.keep_superframes);
            if let Some(ring) = &ring {
                rings = format!(", {} slots of {SLOT} bytes", ring.slots());
            }
            queues.rx.push(Box::new(Receiver::new(socket, ring, offload)));
        }
        let is_bifurcated = config.bifurcation.is_some();
        self.former = self.total_statistics();
        self.running = Some(Running { receivers: running, exclusive, is_bifurcated, tunnels, notes, rings });
        Ok(queues)
    }

    /// Returns the counts of former sockets and of those that run.
    fn total_statistics(&self) -> Statistics {
        let running = self.running.iter().flat_map(|running| &running.receivers);
        running.map(|socket| socket.statistics()).fold(self.former, Statistics::plus)
    }
}

impl Device for AfPacketDevice {
    fn capabilities(&self) -> Capabilities {
        let whole = self.options.keep_superframes;
        let has_ring = self.running.as_ref().is_none_or(|running| !running.rings.is_empty());
        let receive = if has_ring { "TPACKET_V2 receive ring, recvmmsg for long frames" } else { "recvmmsg" };
        let superframes = if whole { "stay whole" } else { "are cut" };
        let mut mode = format!("{receive}, superframes {superframes}, sendmmsg, qdisc bypass");
        let mut notes = Vec::new();
        if let Some(running) = &self.running {
            mode += &running.rings;
            mode += match (&running.exclusive, running.is_bifurcated) {
                (Some(_), true) => ", tunnel packets only",
                (Some(_), false) => ", exclusive",
                (None, _) => ", shared with the kernel",
            };
            notes.clone_from(&running.notes);
            let without = running.receivers.iter().filter(|socket| socket.is_without_ring()).count();
            if without > 0 {
                notes.push(format!(
                    "{without} receive queues gave their ring up, because a fault of the kernel stopped it at a \
                     superframe, such as one of SCTP; each of their frames costs a system call"
                ));
            }
        }
        Capabilities {
            mode,
            notes,
            mac: self.interface.mac,
            mtu: Some(self.interface.mtu),
            max_rx_queues: MAX_QUEUES,
            max_tx_queues: MAX_QUEUES,
            offloads: {
                let received = if whole { Offloads::RX_SUPERFRAMES } else { Offloads::NONE };
                let sent = if self.segmentation.ipv4 { Offloads::TX_SEGMENT } else { Offloads::NONE };
                OFFLOADS.with(received).with(sent)
            },
            max_tx_segments: 1024,
            numa_node: self.interface.numa_node(),
            can_wait: true,
            can_bifurcate: true,
            kernel_punt: to_kernel(self.running.as_ref().map_or(self.options.exclusive, |it| it.exclusive.is_some())),
            ..Capabilities::plain(NAME, &self.options.device)
        }
    }

    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        config.check(&self.capabilities())?;
        if config.bifurcation.is_some() && !self.options.exclusive {
            return Err(PortError::Refused {
                driver: NAME,
                device: self.options.device.clone(),
                reason: "exclusive = false gives the kernel the packets too that the port takes for itself; remove it"
                    .to_owned(),
            });
        }
        check_mtu(NAME, &self.interface, config.mtu)
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let queues = self.start_on_interface(config)?;
        (self.former, self.lost_interfaces) = Default::default();
        Ok(queues)
    }

    fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> Result<(), PortError> {
        let Some(running) = &self.running else { return Ok(()) };
        let Some(link) = running.exclusive.as_ref().filter(|_| running.is_bifurcated) else {
            return Err(PortError::Refused {
                driver: NAME,
                device: self.options.device.clone(),
                reason: "the port was started to take all packets".to_owned(),
            });
        };
        let change =
            |error| system_error(NAME, &self.options.device, "changing the packets that the port takes", error);
        let program = load_drop_program(Some(bifurcation)).map_err(change)?;
        let filter = load_filter(bifurcation).map_err(change)?;
        program.replace(link).map_err(change)?;
        running.receivers.iter().try_for_each(|socket| socket.attach_program(&filter)).map_err(change)
    }

    fn privileges(&self) -> CapabilitySet {
        privileges(self.options.exclusive || self.running.as_ref().is_some_and(|it| it.tunnels.is_some()))
    }

    fn can_return(&self) -> bool {
        true
    }

    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        self.start_on_interface(config)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        self.former = self.total_statistics();
        // Close the sockets first: the kernel gets its frames back when no socket takes them.
        drop(queues);
        self.running = None;
        Ok(())
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }
}

impl DeviceLink for AfPacketDevice {
    fn link(&mut self) -> Link {
        self.link_monitor.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let events = self.link_monitor.events();
        for event in &events {
            if let PortEvent::Address(mac) = event {
                self.interface.mac = Some(*mac);
            }
        }
        events
    }
}

impl DeviceStatistics for AfPacketDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let total = self.total_statistics();
        vec![("kernel_packets", total.packets), ("kernel_drops", total.drops), ("kernel_ring_freezes", total.freezes)]
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        let mut drops = vec![(DropReason::RxFull, self.total_statistics().drops)];
        if self.running.as_ref().is_none_or(|it| it.exclusive.is_some() && !it.is_bifurcated) {
            // Without the program behind the tap, the kernel also counts frames that the port got and that no
            // protocol of the kernel wants.
            let interface = self.lost_interfaces.plus(self.link_monitor.dropped());
            drops.push((DropReason::InterfaceDrop, interface.rx));
        }
        drops
    }
}
