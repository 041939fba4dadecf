//! `af_packet`: packet sockets of the kernel (packet(7)), for any Ethernet-like interface on any kernel.
//!
//! ```toml
//! [port.af_packet]
//! exclusive = true     # keep the kernel from processing the frames too (Linux 6.6)
//! fanout = "hash"      # how frames are spread over several queues: "hash", "cpu" or "queue"
//! ```
//!
//! Each receive queue is a socket with a `TPACKET_V3` ring, joined to the others by a fan-out group; each transmit queue is a socket
//! that only sends. The sockets carry a `virtio_net_hdr` with each frame, so that what the kernel left undone is known exactly and is
//! finished: checksums completed, superframes cut, VLAN tags put back (`kernel::vnet`).
//!
//! A packet socket only taps: the kernel would process every frame as well, answer for addresses, forward. In `exclusive` mode a program
//! at the interface's tc ingress, behind the tap, drops what the sockets have seen. It hangs on a link that belongs to this process.

mod ring;
mod rx;
mod socket;
mod tx;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ring::{BLOCK, Ring, blocks_for};
use rx::Receiver;
use socket::{Fanout, Filter, Socket};
use tx::Sender;

use super::kernel::bpf::{self, AttachType, Instruction, ProgramType};
use super::kernel::control::Control;
use super::kernel::link::Interface;
use super::kernel::routes::carries_default_route;
use super::kernel::vnet::Finisher;
use super::kernel::watch::Watch;
use super::kernel::{privilege, system};
use super::{Candidate, Driver};
use crate::port::{Capabilities, Device, Link, Offloads, Plan, PortConfig, PortError, PortEvent, Queues, ToKernel};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "af_packet";
/// Rings take 8 MiB each by default; more queues than this are a mistake.
const MAX_QUEUES: u16 = 64;

/// The driver.
#[derive(Debug)]
pub struct AfPacket;

/// What an `af_packet` port opens, and how.
#[derive(Clone, Debug)]
pub struct Options {
    device: String,
    exclusive: bool,
    fanout: Fanout,
}

impl Options {
    /// Takes frames of `device` away from the kernel, and spreads them over queues by flow.
    pub fn new(device: impl Into<String>) -> Self {
        Self { device: device.into(), exclusive: true, fanout: Fanout::Hash }
    }

    /// Whether the kernel is kept from processing the frames too.
    pub fn exclusive(mut self, exclusive: bool) -> Self {
        self.exclusive = exclusive;
        self
    }
}

impl Driver for AfPacket {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "packet sockets with TPACKET_V3 rings, on any Ethernet interface"
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected the name of a network interface"));
        };
        let fanouts = [("hash", Fanout::Hash), ("cpu", Fanout::Cpu), ("queue", Fanout::Queue)];
        Ok(Box::new(Options {
            device: device.to_owned(),
            exclusive: settings.get("exclusive")?.unwrap_or(true),
            fanout: settings.choice("fanout", &fanouts)?.unwrap_or(Fanout::Hash),
        }))
    }

    fn candidates(&self) -> Vec<Candidate> {
        let interfaces = Interface::all().unwrap_or_default();
        let offer = |interface: Interface| {
            let device = interface.name.clone();
            let usable = match Options::new(&device).opened() {
                Ok(_) if carries_default_route(interface.index).unwrap_or(false) => {
                    Ok("TPACKET_V3, sendmmsg; carries a default route: auto takes it only with force".to_owned())
                }
                Ok(_) => Ok("TPACKET_V3, sendmmsg".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            Candidate { device, usable }
        };
        interfaces.into_iter().filter(|interface| !interface.loopback).map(offer).collect()
    }
}

impl Options {
    fn opened(self) -> Result<AfPacketDevice, PortError> {
        let interface = Interface::find(&self.device, NAME)?;
        // Says now whether the privilege is there.
        Socket::new().map_err(|e| raw_socket_error(&self.device, e))?;
        if interface.mac.is_none() {
            return Err(PortError::Refused {
                driver: NAME,
                device: self.device,
                reason: "its frames have no Ethernet header".to_owned(),
            });
        }
        let (control, watch) = follow(&interface)?;
        Ok(AfPacketDevice { options: self, interface, control, watch, running: None, totals: Totals::default() })
    }
}

/// What looks after the interface while the port runs.
fn follow(interface: &Interface) -> Result<(Arc<Control>, Watch), PortError> {
    let watching = |e| system(NAME, &interface.name, "watching the interface", e);
    let watch = Watch::new(interface).map_err(watching)?;
    Ok((Arc::new(Control::new(interface.index).map_err(watching)?), watch))
}

fn raw_socket_error(device: &str, error: io::Error) -> PortError {
    match error.raw_os_error() {
        Some(libc::EPERM) => privilege(NAME, device, "opening a packet socket", "CAP_NET_RAW"),
        _ => system(NAME, device, "opening a packet socket", error),
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn to_kernel(&self) -> ToKernel {
        to_kernel(self.exclusive)
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(self.opened()?))
    }
}

/// Whether the kernel has the frames too.
fn to_kernel(exclusive: bool) -> ToKernel {
    match exclusive {
        true => ToKernel::No(
            "its frames are kept from the kernel; with exclusive = false in [port.af_packet] the kernel has them all",
        ),
        false => ToKernel::Beside,
    }
}

struct AfPacketDevice {
    options: Options,
    interface: Interface,
    control: Arc<Control>,
    watch: Watch,
    running: Option<Running>,
    totals: Totals,
}

/// What a started port holds beside its queues.
struct Running {
    receivers: Vec<Arc<Socket>>,
    /// Keeps the kernel from the frames as long as it is open.
    exclusive: Option<OwnedFd>,
    notes: Vec<String>,
    blocks: usize,
}

#[derive(Default)]
struct Totals {
    packets: u64,
    drops: u64,
    freezes: u64,
}

impl AfPacketDevice {
    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> PortError + '_ {
        move |source| system(NAME, &self.options.device, what, source)
    }

    fn refused(&self, reason: String) -> PortError {
        PortError::Refused { driver: NAME, device: self.options.device.clone(), reason }
    }

    /// The drop program behind the tap, or the reason why there is none.
    fn keep_kernel_out(&self) -> Result<Result<OwnedFd, String>, PortError> {
        /// `TCX_DROP` (linux/bpf.h).
        const DROP: i32 = 2;
        let program = [Instruction::mov(0, DROP), Instruction::exit()];
        let attach = AttachType::TCX_INGRESS;
        let link = bpf::load("wirepath_drop", ProgramType::SCHED_CLS, attach, &program)
            .and_then(|program| bpf::link(program.as_fd(), self.interface.index, attach));
        match link {
            Ok(link) => Ok(Ok(link)),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                let what = "keeping the kernel from the frames (exclusive = true)";
                Err(privilege(NAME, &self.options.device, what, "CAP_BPF and CAP_NET_ADMIN"))
            }
            Err(error) => Ok(Err(format!(
                "the kernel also processes the frames: attaching a program at tc ingress (Linux 6.6) failed: {error}"
            ))),
        }
    }

    fn receivers(&self, config: &PortConfig, blocks: usize) -> Result<Vec<(Arc<Socket>, Ring)>, PortError> {
        let index = self.interface.index;
        let mut receivers = Vec::new();
        for _ in 0..config.rx_queues {
            let socket = Socket::new().map_err(|e| raw_socket_error(&self.options.device, e))?;
            let on: libc::c_int = 1;
            socket
                .set(libc::PACKET_IGNORE_OUTGOING, &on)
                .map_err(self.failed("PACKET_IGNORE_OUTGOING (Linux 4.20)"))?;
            socket.set(libc::PACKET_VNET_HDR, &on).map_err(self.failed("PACKET_VNET_HDR"))?;
            let ring = Ring::new(&socket, blocks).map_err(|source| PortError::System {
                driver: NAME,
                device: self.options.device.clone(),
                what: format!("a receive ring of {} KiB", (blocks * BLOCK) >> 10),
                source,
                hint: "; a smaller `depth` needs less memory".to_owned(),
            })?;
            // Until all sockets are in the group each would get every frame.
            socket.filter(Filter::Nothing).map_err(self.failed("attaching a filter"))?;
            receivers.push((Arc::new(socket), ring));
        }
        let mut group = None;
        for (socket, _) in &receivers {
            if config.promiscuous {
                socket.promiscuous(index).map_err(self.failed("asking for promiscuous mode"))?;
            }
            socket.bind(index, libc::ETH_P_ALL).map_err(self.failed("binding to the interface"))?;
            if receivers.len() > 1 {
                let joined = socket.fan_out(self.options.fanout, group);
                group = Some(joined.map_err(self.failed("joining the fan-out group (PACKET_FANOUT)"))?);
            }
        }
        Ok(receivers)
    }

    fn sender(&self, config: &PortConfig) -> Result<Sender, PortError> {
        let socket = Socket::new().map_err(|e| raw_socket_error(&self.options.device, e))?;
        let on: libc::c_int = 1;
        socket.set(libc::PACKET_QDISC_BYPASS, &on).map_err(self.failed("PACKET_QDISC_BYPASS"))?;
        // What the kernel charges for a frame of full size, buffer and bookkeeping; the default holds fewer than 300.
        let bytes = (config.depth as usize).saturating_mul(4096).clamp(1 << 20, 256 << 20);
        socket.send_buffer(bytes as libc::c_int).map_err(self.failed("asking for a send buffer"))?;
        socket.bind(self.interface.index, 0).map_err(self.failed("binding to the interface"))?;
        Ok(Sender::new(socket, Arc::clone(&self.control)))
    }

    fn count(&mut self) {
        let Some(running) = &self.running else { return };
        for socket in &running.receivers {
            if let Ok(counted) = socket.statistics() {
                self.totals.packets += u64::from(counted.packets);
                self.totals.drops += u64::from(counted.drops);
                self.totals.freezes += u64::from(counted.freezes);
            }
        }
    }
}

impl Device for AfPacketDevice {
    fn capabilities(&self) -> Capabilities {
        let mut mode = "TPACKET_V3 receive ring, sendmmsg, qdisc bypass".to_owned();
        let mut notes = Vec::new();
        if let Some(running) = &self.running {
            mode += &format!(", {} blocks of {} KiB", running.blocks, BLOCK >> 10);
            mode += if running.exclusive.is_some() { ", exclusive" } else { ", shared with the kernel" };
            notes.clone_from(&running.notes);
        }
        Capabilities {
            mode,
            notes,
            mac: self.interface.mac,
            max_rx_queues: MAX_QUEUES,
            max_tx_queues: MAX_QUEUES,
            offloads: Offloads::RX_CHAINS.with(Offloads::TX_CHAINS),
            max_tx_segments: 1024,
            numa_node: self.interface.numa_node(),
            can_wait: true,
            to_kernel: to_kernel(self.running.as_ref().map_or(self.options.exclusive, |it| it.exclusive.is_some())),
            ..Capabilities::plain(NAME, &self.options.device)
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        // It may be another one of the same name by now.
        self.interface = Interface::find(&self.options.device, NAME)?;
        (self.control, self.watch) = follow(&self.interface)?;
        if self.interface.mtu < config.mtu.into() {
            let (has, wants, device) = (self.interface.mtu, config.mtu, &self.interface.name);
            return Err(self.refused(format!(
                "the interface has MTU {has}, the port wants {wants}; `ip link set dev {device} mtu {wants}`"
            )));
        }
        let blocks = blocks_for(config.depth);
        let receivers = self.receivers(config, blocks)?;
        let mut notes = Vec::new();
        let exclusive = match self.options.exclusive {
            true => match self.keep_kernel_out()? {
                Ok(link) => Some(link),
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
        let mut queues = Queues::default();
        for _ in 0..config.tx_queues {
            queues.tx.push(Box::new(self.sender(config)?));
        }
        let take = if config.promiscuous { Filter::Everything } else { Filter::Own };
        for (socket, _) in &receivers {
            socket.filter(take).map_err(self.failed("attaching a filter"))?;
        }
        let running = receivers.iter().map(|(socket, _)| Arc::clone(socket)).collect();
        for (socket, ring) in receivers {
            let finisher = Finisher::new(config.pool.clone(), config.id);
            queues.rx.push(Box::new(Receiver::new(socket, ring, finisher)));
        }
        self.totals = Totals::default();
        self.running = Some(Running { receivers: running, exclusive, notes, blocks });
        Ok(queues)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        self.count();
        // The sockets first: the kernel gets its frames back when nobody takes them any more.
        drop(queues);
        self.running = None;
        Ok(())
    }

    fn link(&mut self) -> Link {
        self.watch.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        self.watch.events()
    }

    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.count();
        vec![
            ("kernel_packets", self.totals.packets),
            ("kernel_drops", self.totals.drops),
            ("kernel_ring_freezes", self.totals.freezes),
        ]
    }
}
