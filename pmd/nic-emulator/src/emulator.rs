//! All devices of a process behind one lock: the kernel's entry points, and the forwarding of frames.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::core_clock::monotonic;
use crate::device::{ContextId, Device, Env, Event, Mapping, Store};
use crate::faults::{self, Fault, FaultKind, PendingFaults};
use crate::host::Host;
use crate::links::{self, BURST, KernelPort, Link, LinkEnd, MAX_FRAME};
use crate::log::Log;
use crate::mana::Mana;
use crate::mlx5::Mlx5;
use crate::netlink::{self, DeviceInfo};
use crate::outbox::Outbox;
use crate::topology::{DeviceKind, Doorbells, Topology};
use crate::uverbs::{Context, ContextOwner, ImportQuery, Kernel, QueuedDoorbells};

/// Size in bytes of the doorbell pages, which are at the start of the file behind an open device.
pub const DOORBELL_BYTES: u64 = 128 << 10;
/// Size in bytes of the whole file. The part after the doorbell pages carries messages from other processes
/// to the owner.
pub const FILE_BYTES: u64 = DOORBELL_BYTES + (64 << 10);
/// Name of that file. Another process that receives its descriptor recognises it by this name.
pub const FILE_NAME: &str = "wirepath-uverbs";
/// Polls of the device thread before it releases the lock.
const POLLS_PER_LOCK: usize = 64;
/// Delay between a doorbell and the fetch of descriptors and data, in nanoseconds, for `fetch = "late"`.
const LATE_FETCH_NS: u64 = 200_000;
/// Maximum number of queued doorbells.
const MAX_QUEUED_DOORBELLS: usize = 1 << 12;
/// Number of lines of the log in [`Emulator::counters`].
const RECENT_LINES: usize = 32;

/// The emulated NICs of a process.
pub struct Emulator<H: Host> {
    host: H,
    topology: Topology,
    log: Log,
    machine: Mutex<Machine<H>>,
    /// Number of threads that wait for the lock. A busy device thread yields to them.
    waiting: AtomicUsize,
}

struct Machine<H: Host> {
    devices: Vec<Box<dyn Device<H>>>,
    /// Index of each device's first port among all ports.
    first_port: Vec<usize>,
    links: Vec<Link>,
    /// The kernel's interfaces of the ports; `None` for ports without one.
    kernel_ports: Vec<Option<KernelPort>>,
    linked: bool,
    contexts: HashMap<ContextId, Context>,
    files: HashMap<RawFd, ContextId>,
    /// Contexts by the inode number of their file, which identifies duplicates of a descriptor.
    inodes: HashMap<u64, ContextId>,
    sockets: HashMap<RawFd, VecDeque<Vec<u8>>>,
    next_context: ContextId,
    faults: PendingFaults,
    outbox: Outbox,
    events: Vec<Event>,
    /// Doorbells queued for the device thread, each with the time at which it is due.
    queued_doorbells: VecDeque<(u64, ContextId, Store)>,
    scratch: Vec<u8>,
    /// Packets of each port without a receive buffer, as last published.
    out_of_buffer: Vec<u64>,
}

impl<H: Host> fmt::Debug for Emulator<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emulator").field("topology", &self.topology).finish_non_exhaustive()
    }
}

/// An open device.
#[derive(Debug)]
pub struct OpenDevice {
    /// File of the device.
    pub file: OwnedFd,
    /// Context of the device.
    pub context: ContextId,
}

impl<H: Host> Emulator<H> {
    /// Creates the NICs of a topology. Links are opened together with the first device.
    pub fn new(topology: Topology, host: H, log: Log) -> Self {
        let mut devices: Vec<Box<dyn Device<H>>> = Vec::new();
        let mut first_port = Vec::new();
        let mut ports = 0;
        let scan = topology.doorbells == Doorbells::Scan;
        for spec in &topology.devices {
            first_port.push(ports);
            ports += spec.ports.len();
            devices.push(match spec.kind {
                DeviceKind::Mana => Box::new(Mana::new(spec.clone(), scan)),
                DeviceKind::Mlx5 => Box::new(Mlx5::new(spec.clone(), scan)),
            });
        }
        let mut machine = Machine {
            devices,
            first_port,
            links: Vec::new(),
            kernel_ports: Vec::new(),
            linked: false,
            contexts: HashMap::new(),
            files: HashMap::new(),
            inodes: HashMap::new(),
            sockets: HashMap::new(),
            next_context: 1,
            faults: PendingFaults::default(),
            outbox: Outbox::new(ports),
            events: Vec::new(),
            queued_doorbells: VecDeque::new(),
            scratch: vec![0; MAX_FRAME],
            out_of_buffer: vec![0; ports],
        };
        for fault in &topology.faults {
            machine.inject(fault.clone(), topology.doorbells, &log);
        }
        Self { host, topology, log, machine: Mutex::new(machine), waiting: AtomicUsize::new(0) }
    }

    /// Returns the topology that the emulator was created from.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Returns the host process.
    pub fn host(&self) -> &H {
        &self.host
    }

    fn lock(&self) -> MutexGuard<'_, Machine<H>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Returns the devices as RDMA netlink lists them.
    pub fn list(&self) -> Vec<DeviceInfo> {
        let machine = self.lock();
        let listed = |(minor, device): (usize, &dyn Device<H>)| DeviceInfo {
            name: device.spec().name.clone(),
            minor: minor as u32,
            ports: device.spec().ports.len() as u32,
            guid: u64::from_be_bytes(device.query().base.node_guid),
            driver: device.driver(),
            abi: device.abi(),
        };
        machine.devices.iter().map(AsRef::as_ref).enumerate().map(listed).collect()
    }

    /// Registers a netlink socket of the application.
    pub fn netlink_open(&self, fd: RawFd) {
        self.lock().sockets.insert(fd, VecDeque::new());
    }

    /// Handles a datagram that the application sends to a netlink socket.
    pub fn netlink_send(&self, fd: RawFd, datagram: &[u8]) {
        let replies = netlink::answer(&self.list(), datagram);
        if let Some(queue) = self.lock().sockets.get_mut(&fd) {
            queue.extend(replies);
        }
    }

    /// Returns the next datagram of a netlink socket; with `peek` it stays in the queue.
    ///
    /// # Errors
    /// `EAGAIN` if there is no datagram, `EBADF` if the socket is unknown.
    pub fn netlink_receive(&self, fd: RawFd, peek: bool) -> Result<Vec<u8>, Errno> {
        let mut machine = self.lock();
        let queue = machine.sockets.get_mut(&fd).ok_or(Errno::BADF)?;
        let datagram = if peek { queue.front().cloned() } else { queue.pop_front() };
        datagram.ok_or(Errno::AGAIN)
    }

    /// Opens a device by its minor number.
    ///
    /// # Errors
    /// `ENXIO` if there is no such device, `EIO` if its links cannot be opened (the log names the reason).
    pub fn open(&self, minor: u32) -> Result<OpenDevice, Errno> {
        let mut machine = self.lock();
        let device = minor as usize;
        if device >= machine.devices.len() {
            return Err(Errno::NXIO);
        }
        machine.open_links(&self.topology, &self.host).map_err(|why| {
            self.log.line(why);
            Errno::IO
        })?;
        let file = memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, FILE_BYTES)?;
        // The file is passed to other processes. Seals prevent truncation, which a device file does not allow
        // either.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let context = machine.next_context;
        machine.next_context += 1;
        machine.contexts.insert(context, Context::new(context, device));
        machine.files.insert(file.as_raw_fd(), context);
        machine.inodes.insert(fstat(&file)?.st_ino, context);
        Ok(OpenDevice { file, context })
    }

    /// Handles `ioctl(2)` on an open device.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn ioctl(&self, fd: RawFd, request: u64, address: u64) -> Result<(), Errno> {
        self.command(fd, |context, kernel| context.ioctl(kernel, request, address))
    }

    /// Handles `write(2)` on an open device; returns the number of bytes taken.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn write(&self, fd: RawFd, address: u64, length: usize) -> Result<usize, Errno> {
        self.command(fd, |context, kernel| context.write(kernel, address, length))
    }

    fn command<R>(
        &self,
        fd: RawFd,
        run: impl Fn(&mut Context, &mut Kernel<'_, H>) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let mut machine = self.lock();
        loop {
            let Machine { devices, contexts, files, faults, queued_doorbells, .. } = &mut *machine;
            let context = files.get(&fd).and_then(|context| contexts.get_mut(context)).ok_or(Errno::BADF)?;
            let id = context.id;
            let device = devices[context.device].as_mut();
            let waits = queued_doorbells.iter().any(|(_, of, _)| *of == id);
            let queued_doorbells = if waits { QueuedDoorbells::Pending } else { QueuedDoorbells::Empty };
            let (host, log, write_abi) = (&self.host, &self.log, self.topology.write_abi);
            let mut kernel = Kernel { host, log, faults, device, write_abi, queued_doorbells };
            let result = run(context, &mut kernel);
            if kernel.queued_doorbells != QueuedDoorbells::FlushFirst {
                return result;
            }
            machine.ring_queued_doorbells(self.topology.doorbells, &self.log, id);
        }
    }

    /// Handles `mmap(2)` on an open device; returns the context and what is mapped.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn map(&self, fd: RawFd, offset: u64, length: usize) -> Result<(ContextId, Mapping), Errno> {
        let mut machine = self.lock();
        let Machine { devices, contexts, files, .. } = &mut *machine;
        let context = files.get(&fd).and_then(|context| contexts.get(context)).ok_or(Errno::BADF)?;
        Ok((context.id, devices[context.device].map(&self.log, context.id, offset, length)?))
    }

    /// Registers a duplicate of a descriptor, made with `dup` or received from the own process. Returns true
    /// if it refers to an open device. The device then stays open until both descriptors are closed.
    pub fn register_duplicate(&self, fd: RawFd, inode: u64) -> bool {
        let mut machine = self.lock();
        let Some(context) = machine.inodes.get(&inode).copied() else { return false };
        machine.files.insert(fd, context);
        true
    }

    /// Imports the context of a device that another process has open and whose descriptor it has passed to
    /// this process. The properties of the context are requested from its owner.
    ///
    /// # Errors
    /// The errno of the owner if it does not answer; `ENXIO` or `EOPNOTSUPP` if it has another kind of
    /// device.
    pub fn import_context(
        &self,
        fd: RawFd,
        inode: u64,
        remote_owner: Box<dyn ContextOwner>,
    ) -> Result<ContextId, Errno> {
        let [minor, export_state, _] = remote_owner.ask(ImportQuery::Context, 0)?;
        let mut machine = self.lock();
        let id = machine.next_context;
        let device = usize::try_from(minor).ok().and_then(|minor| machine.devices.get_mut(minor)).ok_or(Errno::NXIO)?;
        device.import_context(id, export_state)?;
        machine.next_context += 1;
        machine.contexts.insert(id, Context::imported(id, minor as usize, remote_owner));
        machine.files.insert(fd, id);
        machine.inodes.insert(inode, id);
        Ok(id)
    }

    /// Answers a query of a process that has imported a context.
    ///
    /// # Errors
    /// `ENOENT` if there is no such context or object.
    pub fn answer_import(&self, context: ContextId, query: ImportQuery, handle: u32) -> Result<[u64; 3], Errno> {
        let machine = self.lock();
        let context = machine.contexts.get(&context).ok_or(Errno::NOENT)?;
        context.answer_import(machine.devices[context.device].as_ref(), query, handle)
    }

    /// Returns the minor number of an open device.
    pub fn minor(&self, fd: RawFd) -> Option<u32> {
        let machine = self.lock();
        machine.files.get(&fd).and_then(|context| machine.contexts.get(context)).map(|context| context.device as u32)
    }

    /// Handles `close(2)` of a descriptor that belongs to the emulator.
    pub fn close(&self, fd: RawFd) {
        let mut machine = self.lock();
        let Machine { devices, contexts, files, inodes, sockets, .. } = &mut *machine;
        if sockets.remove(&fd).is_some() {
            return;
        }
        if let Some(id) = files.remove(&fd) {
            // The context stays open while a duplicate of the descriptor is open.
            if !files.values().any(|other| *other == id)
                && let Some(mut context) = contexts.remove(&id)
            {
                inodes.retain(|_, other| *other != id);
                context.destroy_all(devices[context.device].as_mut());
            }
            return;
        }
        for context in contexts.values_mut() {
            if context.close_descriptor(fd) {
                return;
            }
        }
    }

    /// Handles a store to a doorbell page. Returns true if it was queued for [`Self::serve`], as the topology
    /// demands.
    pub fn doorbell(&self, context: ContextId, store: Store) -> bool {
        let mut machine = self.lock();
        if self.topology.doorbells == Doorbells::Queue || self.topology.fetch_late {
            let due = if self.topology.fetch_late { monotonic() + LATE_FETCH_NS } else { 0 };
            machine.queued_doorbells.push_back((due, context, store));
            // The queue is too long for the thread: handle the oldest doorbells here.
            while machine.queued_doorbells.len() > MAX_QUEUED_DOORBELLS {
                let Some((_, context, store)) = machine.queued_doorbells.pop_front() else { break };
                machine.ring_doorbell(self.topology.doorbells, &self.log, context, store);
            }
            return true;
        }
        machine.ring_doorbell(self.topology.doorbells, &self.log, context, store);
        self.publish_counters(&mut machine);
        false
    }

    /// Handles a store to a doorbell page by another process, at once in every mode.
    pub fn remote_doorbell(&self, context: ContextId, store: Store) {
        self.lock().ring_doorbell(self.topology.doorbells, &self.log, context, store);
    }

    /// Performs one round of the device thread: queued doorbells, queues in scan mode, frames from outside,
    /// generators. Returns true if there was any work.
    pub fn serve(&self) -> bool {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let mut busy = false;
        for _ in 0..POLLS_PER_LOCK {
            let turn = machine.poll_once(self.topology.doorbells, &self.log);
            busy |= turn;
            if !turn || self.waiting.load(Ordering::Relaxed) > 0 {
                break;
            }
        }
        self.publish_counters(&mut machine);
        busy
    }

    /// Writes counters that have changed to the generated tree.
    fn publish_counters(&self, machine: &mut Machine<H>) {
        for (at, device) in machine.devices.iter().enumerate() {
            for (port, number) in (machine.first_port[at]..).take(self.topology.devices[at].ports.len()).enumerate() {
                if let (Some(now), Some(last)) = (device.out_of_buffer(port), machine.out_of_buffer.get_mut(number))
                    && std::mem::replace(last, now) != now
                {
                    let name = &self.topology.devices[at].name;
                    self.host.publish(&crate::sysfs::out_of_buffer(name, port), &format!("{now}\n"));
                }
            }
        }
    }

    /// Returns the descriptors that become readable when [`Self::serve`] has work from outside.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let machine = self.lock();
        let kernel_ports = machine.kernel_ports.iter().flatten().map(KernelPort::descriptor);
        machine.links.iter().filter_map(Link::descriptor).chain(kernel_ports).collect()
    }

    /// Returns true if the device thread must poll because nothing wakes it.
    pub fn needs_polling(&self) -> bool {
        self.topology.doorbells != Doorbells::Trap
            || self.topology.fetch_late
            || self
                .topology
                .devices
                .iter()
                .flat_map(|device| &device.ports)
                .any(|port| port.link == crate::topology::LinkSpec::Generator)
    }

    /// Injects a fault.
    pub fn inject(&self, fault: Fault) {
        self.lock().inject(fault, self.topology.doorbells, &self.log);
    }

    /// Injects a fault that is written as in a topology file, without the line `[[fault]]`.
    ///
    /// # Errors
    /// A description of the wrong key or value.
    pub fn inject_toml(&self, text: &str) -> Result<(), wirepath_settings::ConfigError> {
        let source = wirepath_settings::Source::new("fault", text);
        let fault =
            source.parse()?.read_as(&faults::FAULT, |table| faults::read(table, &self.topology.fault_devices()))?;
        self.inject(fault);
        Ok(())
    }

    /// Returns the state and the counters of devices, ports, queues and links, the pending faults, and the latest
    /// lines of the log.
    pub fn counters(&self) -> serde_json::Value {
        let mut machine = self.lock();
        machine.gather_counts();
        let mut devices: Vec<_> = machine.devices.iter().map(|device| device.counters()).collect();
        for (at, device) in devices.iter_mut().enumerate() {
            let spec = &self.topology.devices[at];
            let opened = machine.contexts.values().filter(|context| context.device == at).count();
            device["kind"] = spec.kind.name().into();
            device["pci"] = spec.pci.as_str().into();
            device["contexts"] = opened.into();
            let first = machine.first_port[at];
            let Some(ports) = device["ports"].as_array_mut() else { continue };
            for (port, entry) in ports.iter_mut().enumerate() {
                let Some(link) = machine.links.get(first + port) else { continue };
                if let Some(Some(KernelPort { received, refused, sent, .. })) = machine.kernel_ports.get(first + port) {
                    entry["kernel"] = serde_json::json!({ "received": received, "refused": refused, "sent": sent });
                }
                let c = &link.counters;
                entry["link"] = serde_json::json!({
                    "to": spec.ports[port].link.to_string(),
                    "delivered": c.delivered, "lost": c.lost, "duplicated": c.duplicated,
                    "corrupted": c.corrupted, "reordered": c.reordered, "down": c.down,
                    "refused": c.refused, "arrived": c.arrived,
                });
            }
        }
        let fault = |fault: &Fault| {
            let device = &self.topology.devices[fault.device].name;
            serde_json::json!({
                "device": device, "fault": fault.kind.to_string(), "after": fault.after, "count": fault.count,
            })
        };
        let faults: Vec<_> = machine.faults.iter().map(fault).collect();
        let line = |(text, times): (String, u64)| serde_json::json!({ "line": text, "times": times });
        let log: Vec<_> = self.log.recent(RECENT_LINES).into_iter().map(line).collect();
        serde_json::json!({
            "devices": devices, "faults": faults, "faults_waiting": faults.len(),
            "log": log, "log_lines": self.log.lines(),
        })
    }
}

impl<H: Host> Machine<H> {
    /// Opens the links, if they are not open yet.
    fn open_links(&mut self, topology: &Topology, host: &H) -> Result<(), String> {
        if self.linked {
            return Ok(());
        }
        let down: Vec<bool> = self.links.iter().map(|link| !link.up).collect();
        let kernel_ports = KernelPort::open_all(topology, host)?;
        self.links = links::open(topology, host)?;
        self.kernel_ports = kernel_ports;
        for (at, link) in self.links.iter_mut().enumerate() {
            link.up = !down.get(at).copied().unwrap_or(false);
            if link.is_count_only() {
                self.outbox.set_count_only(at);
            }
            if let Some(Some(kernel)) = self.kernel_ports.get_mut(at).filter(|_| !link.up) {
                kernel.set_carrier(false);
            }
        }
        self.linked = true;
        Ok(())
    }

    /// Calls a function of a device, then delivers the frames that it sent and dispatches its events.
    fn run_device<R>(
        &mut self,
        doorbells: Doorbells,
        log: &Log,
        device: usize,
        run: impl FnOnce(&mut dyn Device<H>, &mut Env<'_>) -> R,
    ) -> R {
        let Self { devices, outbox, events, faults, kernel_ports, first_port, .. } = self;
        let first_port = first_port[device];
        let mut env = Env { log, events, outbox, faults, kernel_ports, device, first_port, doorbells };
        let result = run(devices[device].as_mut(), &mut env);
        if !self.outbox.frames().is_empty() {
            self.deliver(doorbells, log);
        }
        if !self.events.is_empty() {
            self.dispatch_events(device);
        }
        result
    }

    fn ring_doorbell(&mut self, doorbells: Doorbells, log: &Log, context: ContextId, store: Store) {
        let Some(device) = self.contexts.get(&context).map(|context| context.device) else { return };
        let mut more = self.run_device(doorbells, log, device, |device, env| device.doorbell(env, context, store));
        while more {
            more = self.run_device(doorbells, log, device, |device, env| device.work(env));
        }
        self.trigger_device_faults(doorbells, log);
    }

    /// Handles the queued doorbells of a context, even if they are not due yet.
    fn ring_queued_doorbells(&mut self, doorbells: Doorbells, log: &Log, context: ContextId) {
        let (its, others): (VecDeque<_>, _) =
            std::mem::take(&mut self.queued_doorbells).into_iter().partition(|(_, of, _)| *of == context);
        self.queued_doorbells = others;
        for (_, context, store) in its {
            self.ring_doorbell(doorbells, log, context, store);
        }
    }

    /// Forwards the frames of the outbox over their links.
    fn deliver(&mut self, doorbells: Doorbells, log: &Log) {
        let mut outbox = std::mem::take(&mut self.outbox);
        let Self { links, devices, first_port, faults, events, kernel_ports, .. } = self;
        let mut none = Outbox::default();
        let mut reached = [false; 64];
        // Consecutive frames of one port are delivered as one burst.
        for frames in outbox.frames().chunk_by(|one, other| one.port == other.port).flat_map(|run| run.chunks(BURST)) {
            let Some(link) = links.get_mut(frames[0].port) else { continue };
            let mut run: [&[u8]; BURST] = [&[]; BURST];
            run.iter_mut().zip(frames).for_each(|(bytes, frame)| *bytes = outbox.bytes(*frame));
            link.transmit(&run[..frames.len()], |end, frames| match end {
                LinkEnd::None => 0,
                LinkEnd::Sink | LinkEnd::Generator(_) => frames.len(),
                LinkEnd::Interface(interface) => frames.iter().filter(|frame| interface.send(frame)).count(),
                LinkEnd::Pcap(pcap) => frames.iter().filter(|frame| pcap.write(frame)).count(),
                LinkEnd::Port(port) => {
                    let device = device_of_port(first_port, *port);
                    reached[device % 64] = true;
                    let mut env = Env {
                        log,
                        events,
                        outbox: &mut none,
                        faults,
                        kernel_ports,
                        device,
                        first_port: first_port[device],
                        doorbells,
                    };
                    devices[device].receive(&mut env, *port - first_port[device], frames, false)
                }
            });
        }
        for device in (0..devices.len()).filter(|device| reached[device % 64]) {
            let (first_port, outbox) = (first_port[device], &mut none);
            let mut env = Env { log, events, outbox, faults, kernel_ports, device, first_port, doorbells };
            devices[device].flush(&mut env);
        }
        outbox.clear();
        self.outbox = outbox;
        if !self.events.is_empty() {
            // The events name their targets, so the index of the device is not used.
            self.dispatch_events(usize::MAX);
        }
    }

    /// Delivers events to the contexts that they concern.
    fn dispatch_events(&mut self, device: usize) {
        for event in std::mem::take(&mut self.events) {
            match event {
                Event::Completion(owner) | Event::Object(owner, _) => {
                    if let Some(context) = self.contexts.get_mut(&owner.context) {
                        context.deliver(event);
                    }
                }
                Event::Port(..) | Event::Device(_) => {
                    for context in self.contexts.values_mut().filter(|context| context.device == device) {
                        context.deliver(event);
                    }
                }
            }
        }
    }

    /// Performs one poll of the device thread.
    fn poll_once(&mut self, doorbells: Doorbells, log: &Log) -> bool {
        let mut busy = false;
        for _ in 0..64 {
            let Some((due, context, store)) = self.queued_doorbells.pop_front() else { break };
            if due > 0 && due > monotonic() {
                self.queued_doorbells.push_front((due, context, store));
                break;
            }
            self.ring_doorbell(doorbells, log, context, store);
            busy = true;
        }
        if doorbells == Doorbells::Scan {
            for device in 0..self.devices.len() {
                let before = self.outbox.frames().len();
                let more = self.run_device(doorbells, log, device, |device, env| {
                    let more = device.work(env);
                    more || env.outbox.frames().len() > before
                });
                busy |= more;
            }
        }
        busy |= self.receive_external(doorbells, log);
        self.trigger_device_faults(doorbells, log);
        busy
    }

    /// Sends what the kernel sends by its interface of a port. Returns true if there was any frame.
    fn send_for_kernel(&mut self, doorbells: Doorbells, log: &Log, port: usize) -> bool {
        let Self { kernel_ports, outbox, scratch, .. } = self;
        let Some(Some(kernel)) = kernel_ports.get_mut(port) else { return false };
        for _ in 0..BURST {
            let Some(length) = kernel.send(scratch) else { break };
            let Some(room) = outbox.room(length) else { break };
            room.copy_from_slice(&scratch[..length]);
            outbox.send(port, length);
        }
        let is_busy = !self.outbox.frames().is_empty();
        if is_busy {
            self.deliver(doorbells, log);
        }
        is_busy
    }

    /// Receives frames from network interfaces and generators.
    fn receive_external(&mut self, doorbells: Doorbells, log: &Log) -> bool {
        let mut busy = false;
        for port in 0..self.links.len() {
            busy |= self.send_for_kernel(doorbells, log, port);
            let Self { links, devices, first_port, faults, events, outbox, scratch, kernel_ports, .. } = self;
            let link = &mut links[port];
            let device = device_of_port(first_port, port);
            let first_port = first_port[device];
            let local = port - first_port;
            let mut env = Env { log, events, outbox, faults, kernel_ports, device, first_port, doorbells };
            let mut taken = 0;
            match &mut link.end {
                LinkEnd::Generator(generator) if link.up => {
                    taken = generator.generate(|frames| devices[device].receive(&mut env, local, frames, true));
                }
                LinkEnd::Interface(interface) => {
                    for _ in 0..64 {
                        let Some(length) = interface.receive(scratch) else { break };
                        taken += 1;
                        if link.up && devices[device].receive(&mut env, local, &[&scratch[..length]], false) == 0 {
                            link.counters.refused += 1;
                        }
                    }
                }
                _ => continue,
            }
            link.counters.arrived += taken as u64;
            busy |= taken > 0;
            // A queue may also have failed on a frame that it did not accept.
            if taken > 0 || matches!(link.end, LinkEnd::Generator(_)) {
                devices[device].flush(&mut env);
                if !self.events.is_empty() {
                    self.dispatch_events(device);
                }
            }
        }
        busy
    }

    /// Applies a fault at once if it does not depend on a later command, packet or doorbell; otherwise stores
    /// it.
    fn inject(&mut self, fault: Fault, doorbells: Doorbells, log: &Log) {
        let waits = matches!(
            fault.kind,
            FaultKind::FailCommand { .. } | FaultKind::CompletionError { .. } | FaultKind::CorruptCqe { .. }
        ) || fault.after > 0;
        if waits {
            self.faults.add(fault);
        } else {
            self.apply_fault(fault.device, &fault.kind, doorbells, log);
        }
    }

    fn apply_fault(&mut self, device: usize, what: &FaultKind, doorbells: Doorbells, log: &Log) {
        if let FaultKind::Link { port, up } = *what {
            let port = self.first_port[device] + usize::from(port) - 1;
            if let Some(link) = self.links.get_mut(port) {
                link.up = up;
            }
            if let Some(Some(kernel)) = self.kernel_ports.get_mut(port) {
                kernel.set_carrier(up);
            }
        }
        self.run_device(doorbells, log, device, |device, env| device.fault(env, what));
    }

    /// Triggers pending faults of ports and devices. Their `after` counts doorbells and polls of the device
    /// thread.
    fn trigger_device_faults(&mut self, doorbells: Doorbells, log: &Log) {
        if self.faults.is_empty() {
            return;
        }
        for device in 0..self.devices.len() {
            let of_device = |what: &FaultKind| {
                matches!(
                    what,
                    FaultKind::DeviceFatal
                        | FaultKind::Link { .. }
                        | FaultKind::PortHeld { .. }
                        | FaultKind::PortFreed { .. }
                )
            };
            if let Some(what) = self.faults.trigger(device, of_device) {
                self.apply_fault(device, &what, doorbells, log);
            }
        }
    }

    /// Adds the frames that were only counted to the counters of their links.
    fn gather_counts(&mut self) {
        for (port, link) in self.links.iter_mut().enumerate() {
            link.counters.delivered += self.outbox.take_counts(port).0;
        }
    }
}

/// Returns the index of the device that a port belongs to.
fn device_of_port(first_port: &[usize], port: usize) -> usize {
    first_port.iter().rposition(|first| *first <= port).unwrap_or(0)
}
