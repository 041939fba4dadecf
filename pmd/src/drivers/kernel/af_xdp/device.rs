//! Opening, starting and stopping a port.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use wirepath_memory::RegionBuilder;
use wirepath_memory::ring::RingSize;

use super::attach::{self, AttachRequest, AttachedProgram, CounterMaps};
use super::classify::ProgramRule;
use super::posted_buffers::PostedBuffers;
use super::rules::{self, CompiledRules, CounterSlots};
use super::rx::{PendingOffloads, Receiver, RxBuffers, SocketRx};
use super::socket::{
    self, BindConfig, BindFeatures, BoundSocket, MIN_FRAME, PortState, QUEUE_RELEASE_TIMEOUT, SetupError, Socket, Umem,
};
use super::tx::{MAX_SEGMENTS, Sender, TxFrames};
use super::tx_in_flight::TxInFlight;
use super::umem_chunks::{CHUNK, UmemChunks};
use super::{Mode, NAME, Options, program};
use crate::drivers::Candidate;
use crate::drivers::kernel::common::assembler::{Assembler, Register};
use crate::drivers::kernel::common::bpf::{Program, ProgramKind};
use crate::drivers::kernel::common::link::{Dropped, Interface};
use crate::drivers::kernel::common::link_monitor::LinkMonitor;
use crate::drivers::kernel::common::namespace::{Entered, Namespace};
use crate::drivers::kernel::common::promiscuous::Promiscuous;
use crate::drivers::kernel::common::routes::carries_default_route;
use crate::drivers::kernel::common::xdp_features::{self, XdpFeatures};
use crate::drivers::kernel::common::{self, ethtool, netlink::Netlink};
use crate::port::{
    Bifurcation, Capabilities, Device, DeviceLink, DeviceStatistics, KernelPunt, KernelRule, Link, Offloads,
    PortConfig, PortError, PortEvent, PortId, PuntToKernel, Queues, VlanTags,
};
use wirepath_flow::Rule;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BUFFER_BYTES, DATA_ROOM, STRIDE};

/// Bytes of an Ethernet header with two VLAN tags.
const HEADERS: u32 = 22;
/// Headroom that XDP reserves in every chunk.
const XDP_HEADROOM: usize = 256;
/// Time that a stop waits for packets in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

pub(super) struct AfXdpDevice {
    options: Options,
    namespace: Namespace,
    interface: Interface,
    link_monitor: LinkMonitor,
    /// Socket for requests in the namespace of the interface.
    netlink: Netlink,
    running: Option<Running>,
    /// Notes of the last start.
    notes: Vec<String>,
    /// Rules of the last `set_rules`.
    installed_rules: Vec<Rule>,
    counters: CounterSlots,
    /// Rules in the attached program.
    entries: Vec<ProgramRule>,
    /// Frames that the port takes; `None`: all.
    bifurcation: Option<Bifurcation>,
    /// Program that injects frames; loaded at the first injection.
    injector: Option<Program>,
    /// Statistics of the sockets before the last restart.
    past: Vec<(&'static str, u64)>,
    /// Frames that lost interfaces dropped.
    dropped: Dropped,
    /// Frames for which the kernel had no buffer, as it counted them, and those of them for which the pool had none.
    without_buffer: (u64, u64),
    /// Counters of the program before the last restart, which the next program continues.
    maps: Option<CounterMaps>,
}

struct Running {
    /// True if the program accepts frames of several buffers.
    fragments: bool,
    // Dropped first: once the program is detached, frames stay with the kernel.
    attached: AttachedProgram,
    _promiscuous: Option<Promiscuous>,
    sockets: Vec<Arc<Socket>>,
    shared: Arc<PortState>,
    native: bool,
    got: BindFeatures,
    pool_is_umem: bool,
    vlan_tags: VlanTags,
}

/// Returns the expected mode of an interface, without changing it.
pub(super) fn candidate(interface: Interface) -> Candidate {
    let features = xdp_features::query(interface.index);
    let kept = if carries_default_route(interface.index).unwrap_or(false) {
        "; carries a default route: auto uses it only with force"
    } else {
        ""
    };
    let usable = match (interface.mac, interface.xdp, try_socket(&interface.name)) {
        (None, ..) => Err("not an Ethernet interface".to_owned()),
        (_, _, Err(error)) => Err(error.to_string()),
        (_, Some(xdp), _) => Err(occupied_message(&attach::program_name_of(xdp), xdp.program)),
        _ => Ok(match features {
            Some(XdpFeatures { native: true, zero_copy: true, .. }) => "native XDP, zero-copy (untested)".to_owned(),
            Some(XdpFeatures { native: true, .. }) => "native XDP, copy".to_owned(),
            Some(_) => "generic XDP, copy".to_owned(),
            None => "native or generic XDP (not reported by the kernel)".to_owned(),
        } + kept),
    };
    Candidate { device: interface.name, usable }
}

/// Returns whether this process may open AF_XDP sockets.
fn try_socket(device: &str) -> Result<(), PortError> {
    rustix::net::socket_with(
        rustix::net::AddressFamily::XDP,
        rustix::net::SocketType::RAW,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|e| common::system_error(NAME, device, "opening an AF_XDP socket", e.into()))?;
    Ok(())
}

/// Returns an error if this process may not load XDP programs. Other failures are left to the start.
fn try_program(device: &str) -> Result<(), PortError> {
    /// `XDP_PASS` (linux/bpf.h).
    const PASS: i32 = 2;
    let mut assembler = Assembler::default();
    assembler.set(Register::R0, PASS);
    assembler.exit();
    let code = assembler.finish().unwrap_or_default();
    match Program::load(ProgramKind::Xdp, &code, "wirepath_try", 0, 0) {
        Err(error) if matches!(error.source.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            Err(privilege_error(device))
        }
        _ => Ok(()),
    }
}

fn privilege_error(device: &str) -> PortError {
    common::privilege_error(NAME, device, "AF_XDP", "CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF")
}

fn occupied_message(name: &str, id: u32) -> String {
    format!("foreign XDP program '{name}' (id {id}) is attached to the interface")
}

impl AfXdpDevice {
    pub(super) fn open(options: Options) -> Result<Self, PortError> {
        let interface = Interface::find(&options.device, NAME)?;
        let refuse = |reason: String| PortError::Refused { driver: NAME, device: options.device.clone(), reason };
        if interface.mac.is_none() {
            return Err(refuse("is not an Ethernet interface".into()));
        }
        if let Some(xdp) = interface.xdp
            && !options.force
            && attach::program_name_of(xdp) != program::NAME
        {
            return Err(refuse(self::foreign_program_message(
                &options.device,
                &attach::program_name_of(xdp),
                xdp.program,
            )));
        }
        let system = |source| common::system_error(NAME, &options.device, "opening a netlink socket", source);
        let (link_monitor, netlink) =
            (LinkMonitor::new(&interface).map_err(system)?, Netlink::route().map_err(system)?);
        // Checked now, so that a missing privilege is reported before any change and `auto` can try another
        // driver.
        try_socket(&options.device)?;
        try_program(&options.device)?;
        Ok(Self {
            options,
            namespace: Namespace::current(),
            interface,
            link_monitor,
            netlink,
            running: None,
            notes: Vec::new(),
            installed_rules: Vec::new(),
            counters: CounterSlots::default(),
            entries: Vec::new(),
            bifurcation: None,
            injector: None,
            past: Vec::new(),
            dropped: Dropped::default(),
            without_buffer: (0, 0),
            maps: None,
        })
    }

    fn refuse(&self, reason: impl Into<String>) -> PortError {
        PortError::Refused { driver: NAME, device: self.options.device.clone(), reason: reason.into() }
    }

    fn system(&self, failed: SetupError) -> PortError {
        let device = self.options.device.clone();
        let hint = match failed.source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                return privilege_error(&device);
            }
            Some(libc::ENOBUFS | libc::ENOMEM) => {
                "; raise the limit of locked memory: `ulimit -l unlimited`".to_owned()
            }
            Some(libc::EBUSY) => {
                "; another AF_XDP socket holds the queue: stop the program that uses it (`ss --xdp`)".into()
            }
            _ => String::new(),
        };
        PortError::System { driver: NAME, device, what: failed.what, source: failed.source, hint }
    }

    /// Checks that the interface can be used, and sets it up if it is down.
    fn check_interface(&mut self, config: &PortConfig, notes: &mut Vec<String>) -> Result<(), PortError> {
        let name = &self.options.device;
        let Some(interface) = self.interface.refresh(&mut self.netlink) else {
            return Err(PortError::NoDevice { driver: NAME, device: name.clone(), hint: "it was removed".into() });
        };
        self.interface = interface;
        common::check_mtu(NAME, &self.interface, config.mtu)?;
        if !self.interface.up {
            self.interface.set_up().map_err(|e| common::system_error(NAME, name, "setting the interface up", e))?;
            notes.push("the interface was down and has been set up".into());
        }
        Ok(())
    }

    /// Removes a leftover program of an earlier run. A foreign program is removed or refused, as `force`
    /// says.
    ///
    /// The sockets are bound by now. A live program of our name cannot exist, since its sockets would hold
    /// the queues.
    fn remove_existing_program(&mut self, notes: &mut Vec<String>) -> Result<(), PortError> {
        let Some(xdp) = self.interface.refresh(&mut self.netlink).and_then(|interface| interface.xdp) else {
            return Ok(());
        };
        let (index, name) = (self.interface.index, attach::program_name_of(xdp));
        if name == program::NAME && attach::detach_leftover(index, xdp).is_ok() {
            notes.push("removed the XDP program of an earlier run".into());
            return Ok(());
        }
        if !self.options.force {
            return Err(self.refuse(foreign_program_message(&self.options.device, &name, xdp.program)));
        }
        attach::detach_any(index, xdp)
            .map_err(|e| common::system_error(NAME, &self.options.device, "detaching an XDP program", e))?;
        notes.push(format!("XDP program '{name}' (id {}) was removed, because force is set", xdp.program));
        Ok(())
    }

    /// Returns the sizes of the transmit and receive rings, and the number of buffers that each socket posts.
    fn sizes(&self, config: &PortConfig, sockets: u32, notes: &mut Vec<String>) -> (RingSize, RingSize, u32) {
        let transmit = RingSize::at_least(config.depth.clamp(64, 1 << 16)).expect("within limits");
        // A frame may take several buffers. The port leaves three quarters of the pool to other users.
        let per_frame = (u32::from(config.mtu) + HEADERS).div_ceil(DATA_ROOM as u32);
        let wanted = transmit.entries() * per_frame;
        let max_posted = (config.pool.capacity() / 4 / sockets).max(1);
        if max_posted < transmit.entries() && self.options.pool_as_umem {
            notes.push(format!(
                "{max_posted} buffers are posted on each of {sockets} sockets, not {wanted}: pool '{}' has {}",
                config.pool.name(),
                config.pool.capacity()
            ));
        }
        let posted = wanted.min(max_posted);
        (transmit, RingSize::at_least(posted.clamp(64, 1 << 16)).expect("within limits"), posted)
    }

    /// Opens the sockets with the pool's memory as UMEM, or with a separate region where the kernel refuses
    /// that.
    fn open_sockets(
        &self,
        config: &PortConfig,
        queues: u32,
        bind_config: BindConfig,
        shared: &Arc<PortState>,
        notes: &mut Vec<String>,
    ) -> Result<(Vec<BoundSocket>, BindFeatures, Umem), PortError> {
        let index = self.interface.index;
        let in_strides = config.pool.region_offset().is_multiple_of(STRIDE);
        if self.options.pool_as_umem && in_strides {
            let memory = Umem::Pool(Arc::clone(config.pool.region()));
            match socket::bind_queues(index, queues, &memory, bind_config, shared) {
                Ok((bound, got)) => return Ok((bound, got, memory)),
                Err(failed)
                    if failed.what.starts_with("registering") && failed.source.raw_os_error() == Some(libc::EINVAL) =>
                {
                    notes.push(format!(
                        "the kernel refuses chunks of {BUFFER_BYTES} bytes (unaligned chunks, Linux 5.4): frames are \
                         copied between the pool and a UMEM of {CHUNK}-byte chunks"
                    ));
                }
                Err(failed) => return Err(self.system(failed)),
            }
        } else {
            notes.push(format!("frames are copied between the pool and a UMEM of {CHUNK}-byte chunks, as configured"));
        }
        let chunks = (bind_config.receive.entries() + bind_config.transmit.entries()) as usize * queues as usize;
        let refused = |e| common::system_error(NAME, &self.options.device, "mapping a UMEM", std::io::Error::other(e));
        let memory = Umem::Separate(Arc::new(RegionBuilder::new(chunks * CHUNK).map().map_err(refused)?));
        let (bound, got) =
            socket::bind_queues(index, queues, &memory, bind_config, shared).map_err(|failed| self.system(failed))?;
        Ok((bound, got, memory))
    }

    /// Opens the sockets and attaches the program in one XDP mode.
    fn try_mode(
        &mut self,
        config: &PortConfig,
        native: bool,
        release_timeout: Duration,
        shared: &Arc<PortState>,
        notes: &mut Vec<String>,
    ) -> Result<(Vec<BoundSocket>, BindFeatures, Umem, AttachedProgram, u32), PortError> {
        let queues = self.interface.queues_in_use().0;
        let (transmit, receive, posted) = self.sizes(config, queues, notes);
        let bind_config = BindConfig {
            zero_copy: native && self.options.zero_copy,
            fragments: self.options.fragments,
            transmit,
            receive,
            busy_poll: self.options.busy_poll,
            release_timeout,
        };
        let (bound, got, memory) = self.open_sockets(config, queues, bind_config, shared, notes)?;
        let room = buffer_room(matches!(memory, Umem::Pool(_)));
        if !got.fragments && u32::from(config.mtu) + HEADERS > room as u32 {
            return Err(self.refuse(format!(
                "an MTU of {} needs frames of several buffers (XDP fragments, Linux 6.6), which are {}; the \
                 largest MTU without is {}",
                config.mtu,
                if self.options.fragments { "not supported here" } else { "disabled" },
                room as u32 - HEADERS
            )));
        }
        self.remove_existing_program(notes)?;
        let mut decided = rules::compile(&self.installed_rules, config.id);
        let new_slots = self.counters.assign(&self.installed_rules, &mut decided);
        if let Some(maps) = &self.maps {
            let cleared = new_slots.iter().try_for_each(|&number| maps.clear_rule_counter(number));
            cleared.map_err(|failed| self.system(failed))?;
        }
        let request = self.attach_request(native, got.fragments, &decided);
        let attached = attach::attach(request, &bound, self.maps.clone()).map_err(|failed| self.system(failed))?;
        self.entries = decided.entries;
        Ok((bound, got, memory, attached, posted))
    }

    /// Returns the parameters of the program.
    fn attach_request<'a>(&'a self, native: bool, fragments: bool, decided: &'a CompiledRules) -> AttachRequest<'a> {
        let features = xdp_features::query(self.interface.index);
        AttachRequest {
            interface: self.interface.index,
            native,
            fragments,
            vlan_tag: features.is_some_and(|features| features.vlan_tag),
            link: self.options.attach_by_link,
            kernel: &self.options.kernel,
            bifurcation: self.bifurcation.as_ref(),
            rules: &decided.entries,
        }
    }

    /// Returns whether stripped VLAN tags are restored or lost.
    fn vlan_tags(&self, attached: &AttachedProgram, notes: &mut Vec<String>) -> VlanTags {
        if attached.vlan_tag {
            return VlanTags::Kept;
        }
        let device = &self.options.device;
        if self.interface.parent.is_some() {
            if ethtool::strips_vlan_tags(device).is_ok_and(|strips| !strips) {
                return VlanTags::Kept;
            }
            notes.push(format!(
                "VLAN tags that the NIC strips are lost here; `ethtool -K {device} rxvlan off` leaves them in the frame"
            ));
        } else {
            notes.push(
                "VLAN tags that a local sender leaves to hardware are lost here; `ethtool -K PEER txvlan off` at \
                 the other end of the cable puts them into the frame"
                    .into(),
            );
        }
        VlanTags::Lost
    }

    /// Returns the likely result of [`Self::vlan_tags`] before the program is attached.
    fn expected_vlan_tags(&self) -> VlanTags {
        let asked = self.options.mode != Mode::Generic
            && xdp_features::query(self.interface.index).is_some_and(|features| features.vlan_tag)
            && attach::vlan_tag_function().is_some();
        let left = || ethtool::strips_vlan_tags(&self.options.device).is_ok_and(|strips| !strips);
        if asked || (self.interface.parent.is_some() && left()) { VlanTags::Kept } else { VlanTags::Lost }
    }

    /// Returns the sums of the kernel's counters over all sockets since the start of the port.
    fn socket_statistics(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.past.clone();
        let sockets = self.running.iter().flat_map(|running| &running.sockets);
        for (name, value) in sockets.filter_map(|socket| socket.statistics()).flatten() {
            match all.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sum)) => *sum += value,
                None => all.push((name, value)),
            }
        }
        all
    }

    fn enter_namespace(&self) -> Result<Entered, PortError> {
        let entered = self.namespace.enter();
        entered
            .map_err(|e| common::system_error(NAME, &self.options.device, "entering the namespace of the interface", e))
    }

    /// Starts the port on the known interface. Waits at most `release_timeout` for a queue that another socket
    /// holds.
    fn start_on_interface(&mut self, config: &PortConfig, release_timeout: Duration) -> Result<Queues, PortError> {
        let _inside = self.enter_namespace()?;
        let mut notes = Vec::new();
        self.bifurcation.clone_from(&config.bifurcation);
        self.check_interface(config, &mut notes)?;
        let shared = Arc::new(PortState::default());
        shared.frame_limit.store(frame_limit(self.interface.mtu), Ordering::Relaxed);
        let (native, (bound, got, memory, attached, posted)) = match self.options.mode {
            Mode::Native => (true, self.try_mode(config, true, release_timeout, &shared, &mut notes)?),
            Mode::Generic => (false, self.try_mode(config, false, release_timeout, &shared, &mut notes)?),
            Mode::Auto => {
                let mut native_notes = notes.clone();
                match self.try_mode(config, true, release_timeout, &shared, &mut native_notes) {
                    Ok(it) => {
                        notes = native_notes;
                        (true, it)
                    }
                    // Native and generic mode differ only in the attachment.
                    Err(PortError::System { what, source, .. }) if what.starts_with("attaching") => {
                        if self.interface.parent.is_none() {
                            return Err(self.refuse(format!(
                                "{what} failed ({source}), and generic XDP on a virtual interface loses VLAN tags \
                                 and drops superframes of local senders: use driver = \"af_packet\", or set mode = \
                                 \"generic\" if that is acceptable"
                            )));
                        }
                        notes.push(format!("generic XDP, since {what} failed: {source}"));
                        (false, self.try_mode(config, false, release_timeout, &shared, &mut notes)?)
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        notes.extend(attached.note().map(str::to_owned));
        if !native && self.interface.parent.is_none() {
            notes.push(
                "superframes of a local sender are dropped (kernel_offload); `ethtool -K PEER tso off gso off` at \
                 the other end of the cable prevents them"
                    .into(),
            );
        }
        let vlan_tags = self.vlan_tags(&attached, &mut notes);
        let is_promiscuous = config.promiscuous && config.bifurcation.is_none();
        let promiscuous = is_promiscuous
            .then(|| Promiscuous::on(self.interface.index))
            .transpose()
            .map_err(|e| common::system_error(NAME, &self.options.device, "promiscuous mode", e))?;
        let sockets = bound.iter().map(|b| Arc::clone(&b.socket)).collect();
        let queues = self.queues(config, bound, &memory, got, native, posted)?;
        self.notes = notes;
        self.running = Some(Running {
            fragments: got.fragments,
            attached,
            _promiscuous: promiscuous,
            sockets,
            shared,
            native,
            got,
            pool_is_umem: matches!(memory, Umem::Pool(_)),
            vlan_tags,
        });
        Ok(queues)
    }

    /// Creates the queues of the port from the bound sockets.
    fn queues(
        &self,
        config: &PortConfig,
        bound: Vec<BoundSocket>,
        memory: &Umem,
        got: BindFeatures,
        native: bool,
        posted: u32,
    ) -> Result<Queues, PortError> {
        let mut channels: Vec<Vec<SocketRx>> = (0..config.rx_queues).map(|_| Vec::new()).collect();
        let mut queues = Queues::default();
        let mut first_chunk = 0;
        for (i, BoundSocket { receive, transmit, socket }) in bound.into_iter().enumerate() {
            let (for_rx, for_tx) = (receive.fill.entries(), transmit.tx.entries());
            let buffers = match memory {
                Umem::Pool(region) => RxBuffers::Pool(Some(PostedBuffers::new(region))),
                Umem::Separate(region) => RxBuffers::Separate(UmemChunks::new(region, first_chunk, for_rx)),
            };
            if i < config.tx_queues.into() {
                let frames = match memory {
                    Umem::Pool(region) => TxFrames::Pool(Some(TxInFlight::new(PostedBuffers::new(region), for_tx))),
                    Umem::Separate(region) => TxFrames::Separate(UmemChunks::new(region, first_chunk + for_rx, for_tx)),
                };
                let (socket, pool) = (Arc::clone(&socket), config.pool.clone());
                let queue = Sender::new(socket, transmit, frames, pool, got.fragments, got.need_wakeup);
                queues.tx.push(Box::new(queue));
            }
            first_chunk += for_rx + for_tx;
            if config.rx_queues > 0 {
                // All queues of the interface are served. If it has more than configured, several share a
                // receive queue.
                let channel = SocketRx::new(socket, receive, buffers, posted, got.need_wakeup);
                channels[i % usize::from(config.rx_queues)].push(channel);
            }
        }
        let pending_offloads = PendingOffloads {
            checksums: !native || self.interface.may_have_partial_checksums(),
            superframes: !native && self.interface.parent.is_none(),
        };
        for channels in channels {
            let queue =
                Receiver::new(channels, config.pool.clone(), config.id, pending_offloads, self.options.busy_poll)
                    .map_err(|e| common::system_error(NAME, &self.options.device, "creating an epoll instance", e))?;
            if queue.posted() == 0 {
                let pool = config.pool.name();
                return Err(self.refuse(format!("pool '{pool}' has no free buffers for receiving; make it larger")));
            }
            queues.rx.push(Box::new(queue));
        }
        Ok(queues)
    }
}

/// Returns the length of the longest untagged frame in bytes.
fn frame_limit(mtu: u32) -> u64 {
    u64::from(mtu) + MIN_FRAME as u64
}

/// Returns the bytes of a frame that the kernel puts into one buffer.
const fn buffer_room(pool_is_umem: bool) -> usize {
    if pool_is_umem { DATA_ROOM } else { CHUNK - XDP_HEADROOM }
}

/// Returns how the port passes frames to the kernel. Generic XDP would process an injected frame again.
pub(super) fn to_kernel(native: bool) -> KernelPunt {
    if native { KernelPunt::XdpPass } else { KernelPunt::XdpPassOnly("frames cannot be injected past generic XDP") }
}

fn foreign_program_message(device: &str, name: &str, id: u32) -> String {
    format!("{}; remove it with `ip link set dev {device} xdp off`, or set force = true", occupied_message(name, id))
}

impl Device for AfXdpDevice {
    fn capabilities(&self) -> Capabilities {
        let (rx, tx) = self.interface.queues_in_use();
        let fragments = self.running.as_ref().map_or(self.options.fragments, |it| it.got.fragments);
        let mut notes = self.notes.clone();
        let (mode, vlan_tags) = match &self.running {
            None => ("not started".to_owned(), self.expected_vlan_tags()),
            Some(it) => {
                let mut words = vec![if it.native { "native XDP" } else { "generic XDP" }];
                words.push(if it.got.zero_copy { "zero-copy" } else { "copy" });
                words.extend(it.got.fragments.then_some("fragments"));
                words.extend(it.got.need_wakeup.then_some("need-wakeup"));
                words.extend(self.options.busy_poll.then_some("busy-poll"));
                words.extend((!it.pool_is_umem).then_some("separate UMEM"));
                words.extend(self.bifurcation.is_some().then_some("tunnel packets only"));
                (words.join(", "), it.vlan_tags)
            }
        };
        if self.running.as_ref().is_some_and(|it| it.got.zero_copy) {
            notes.push("zero-copy is untested: no test machine had a NIC that supports it".into());
        }
        let mut offloads = Offloads::NONE;
        if fragments {
            offloads = offloads.with(Offloads::RX_CHAINS);
            if self.options.pool_as_umem {
                offloads = offloads.with(Offloads::TX_CHAINS);
            }
        }
        Capabilities {
            mode,
            notes,
            mac: self.interface.mac,
            mtu: Some(self.interface.mtu),
            max_rx_queues: rx.try_into().unwrap_or(u16::MAX),
            max_tx_queues: rx.min(tx).try_into().unwrap_or(u16::MAX),
            max_mtu: if fragments {
                9216 - 14
            } else {
                (buffer_room(self.options.pool_as_umem) as u32 - HEADERS) as u16
            },
            offloads,
            max_tx_segments: if offloads.contains(Offloads::TX_CHAINS) { MAX_SEGMENTS as u16 } else { 1 },
            numa_node: self.interface.numa_node(),
            can_wait: true,
            vlan_tags,
            can_bifurcate: true,
            kernel_punt: to_kernel(self.running.as_ref().map_or(self.options.mode != Mode::Generic, |it| it.native)),
            ..Capabilities::plain(NAME, &self.options.device)
        }
    }

    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        let (wanted, device) = (config.rx_queues.max(config.tx_queues), &self.options.device);
        config.check(&self.capabilities()).map_err(|error| match error {
            // Each socket is bound to a queue of the interface.
            PortError::Unsupported { driver, resource, requested, min, max, .. } if resource.ends_with("queues") => {
                let hint = format!("; {device} may have more after `ethtool -L {device} combined {wanted}`");
                PortError::Unsupported { driver, resource, requested, min, max, hint }
            }
            other => other,
        })?;
        common::check_mtu(NAME, &self.interface, config.mtu)
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        (self.past, self.maps, self.dropped) = (Vec::new(), None, Dropped::default());
        self.without_buffer = (0, 0);
        self.link_monitor.forget_drops();
        self.start_on_interface(config, QUEUE_RELEASE_TIMEOUT)
    }

    fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> Result<(), PortError> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        if self.bifurcation.is_none() {
            self.running = Some(running);
            return Err(self.refuse("the port was started to take all packets"));
        }
        let before = self.bifurcation.replace(bifurcation.clone());
        let decided = CompiledRules { entries: self.entries.clone(), ..CompiledRules::default() };
        let request = self.attach_request(running.native, running.fragments, &decided);
        let replaced = running.attached.replace(&request);
        self.running = Some(running);
        replaced.map_err(|failed| {
            self.bifurcation = before;
            self.system(failed)
        })
    }

    fn can_return(&self) -> bool {
        true
    }

    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let found = {
            let _inside = self.enter_namespace()?;
            let found = Interface::find(&self.options.device, NAME)?;
            let watching = |source| common::system_error(NAME, &self.options.device, "watching the interface", source);
            let link_monitor = LinkMonitor::new(&found).map_err(watching)?;
            self.dropped = self.dropped.plus(self.link_monitor.dropped());
            self.link_monitor = link_monitor;
            found
        };
        self.interface = found;
        // The program that injects frames belongs to the old interface.
        self.injector = None;
        self.start_on_interface(config, Duration::ZERO)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        // Detach the program first, so that new frames stay with the kernel. Then drain packets in flight,
        // and free sockets and buffers last.
        self.past = self.socket_statistics();
        let running = self.running.take();
        let lost =
            running.as_ref().is_some_and(|it| it.shared.lost.load(Ordering::Relaxed)) || self.link_monitor.is_lost();
        self.maps = running.as_ref().map(|it| it.attached.counter_maps());
        drop(running);
        let mut transmit: Vec<_> =
            queues.tx.into_iter().filter_map(|queue| queue.into_any().downcast::<Sender>().ok()).collect();
        let end = Instant::now() + DRAIN_TIMEOUT;
        while !lost && transmit.iter().any(|queue| !queue.is_idle()) && Instant::now() < end {
            transmit.iter_mut().for_each(|queue| crate::port::TxDriver::reclaim(&mut **queue));
            std::thread::sleep(Duration::from_micros(200));
        }
        transmit.iter_mut().for_each(|queue| queue.count_unsent(DropReason::Stopping));
        Ok(())
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }

    fn punt_to_kernel(&mut self) -> Option<&mut dyn PuntToKernel> {
        Some(self)
    }
}

impl DeviceLink for AfXdpDevice {
    fn link(&mut self) -> Link {
        self.link_monitor.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let mut events = self.link_monitor.events();
        for event in &events {
            if let PortEvent::Address(mac) = event {
                self.interface.mac = Some(*mac);
            }
        }
        if let Some(running) = &self.running {
            // The MTU may change while the port runs.
            running.shared.frame_limit.store(frame_limit(self.link_monitor.mtu()), Ordering::Relaxed);
            if self.link_monitor.is_lost() {
                running.shared.lost.store(true, Ordering::Relaxed);
            } else if running.shared.lost.load(Ordering::Relaxed) {
                events.extend(self.link_monitor.mark_lost("was removed"));
            }
        }
        events
    }
}

impl DeviceStatistics for AfXdpDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let mut all = self.socket_statistics();
        match (&self.running, &self.maps) {
            (Some(running), _) => all.extend(running.attached.counter_maps().counters()),
            (None, Some(maps)) => all.extend(maps.counters()),
            (None, None) => {}
        }
        all
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        let statistics = self.extra_statistics();
        let value = |name| statistics.iter().find(|(other, _)| *other == name).map_or(0, |(_, value)| *value);
        // In copy mode the kernel counts each frame for which it has no buffer as dropped. In zero-copy mode the
        // interface counts them. Empty slots of the fill ring say nothing about frames.
        let (without_buffer, ring_full) = (value("xdp_rx_dropped"), value("xdp_rx_ring_full"));
        // The fill ring is empty because the pool was, or because the worker has not received the frames before.
        let pool_was_empty =
            self.running.as_ref().is_some_and(|it| it.shared.pool_was_empty.swap(false, Ordering::Relaxed));
        let new = without_buffer.saturating_sub(self.without_buffer.0);
        self.without_buffer.0 = without_buffer;
        self.without_buffer.1 += if pool_was_empty { new } else { 0 };
        let no_buffer = self.without_buffer.1.min(without_buffer);
        let rx_full = ring_full + without_buffer - no_buffer;
        let mut interface = self.dropped.plus(self.link_monitor.dropped()).rx;
        if self.bifurcation.is_some() {
            // Most of the interface's frames are the kernel's.
            interface = 0;
        }
        if self.interface.parent.is_none() && self.running.as_ref().is_none_or(|it| it.native) {
            // A virtual interface (veth) also counts frames that native XDP could not put into a socket.
            interface = interface.saturating_sub(no_buffer + rx_full);
        }
        vec![
            (DropReason::NoBuffer, no_buffer),
            (DropReason::RxFull, rx_full),
            (DropReason::NoHeadroom, value("xdp_tag_not_restored")),
            (DropReason::InterfaceDrop, interface),
        ]
    }
}

impl PuntToKernel for AfXdpDevice {
    fn set_rules(&mut self, rules: &[Rule], port: PortId) -> Result<Vec<KernelRule>, PortError> {
        let mut decided = rules::compile(rules, port);
        // Taken out, so that `self` can be borrowed meanwhile.
        if let Some(mut running) = self.running.take() {
            let before = self.counters.clone();
            let new_slots = self.counters.assign(rules, &mut decided);
            if decided.entries == self.entries {
                // Most changes do not affect the program.
                self.running = Some(running);
                self.installed_rules = rules.to_vec();
                return Ok(decided.rules);
            }
            let request = self.attach_request(running.native, running.fragments, &decided);
            let cleared = new_slots.iter().try_for_each(|&number| running.attached.clear_rule_counter(number));
            let replaced = cleared.and_then(|()| running.attached.replace(&request));
            self.running = Some(running);
            if let Err(failed) = replaced {
                self.counters = before;
                return Err(self.system(failed));
            }
            self.entries = std::mem::take(&mut decided.entries);
        }
        self.installed_rules = rules.to_vec();
        Ok(decided.rules)
    }

    fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)> {
        let slot = self.counters.slot_of(rule)?;
        match &self.running {
            Some(running) => running.attached.rule_counter(slot),
            None => self.maps.as_ref()?.rule_counter(slot),
        }
    }

    fn inject(&mut self, frame: &[u8]) -> std::io::Result<()> {
        if self.running.as_ref().is_none_or(|it| !it.native) {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        if self.injector.is_none() {
            let injector = attach::load_injector(self.interface.index);
            self.injector =
                Some(injector.map_err(|failed| std::io::Error::other(format!("{}: {}", failed.what, failed.source)))?);
        }
        match &self.injector {
            Some(injector) => injector.run_live(frame, self.interface.index),
            None => Ok(()),
        }
    }
}
