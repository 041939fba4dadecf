//! All devices of a process behind one lock: the kernel's entry points, and the machinery that moves frames.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::device::{ContextId, Device, Env, Event, Store};
use crate::fabric::{self, End, LONGEST, Link, TOGETHER};
use crate::faults::{self, Fault, Orders, What};
use crate::host::Host;
use crate::log::Log;
use crate::mana::Mana;
use crate::mlx5::Mlx5;
use crate::netlink::{self, Listed};
use crate::topology::{DeviceKind, Doorbells, Topology};
use crate::uverbs::{Bells, Context, Elsewhere, Kernel, Question};
use crate::wire::Outbox;

/// Bytes of the doorbell pages, which the file behind an open device begins with.
pub const DOORBELL_BYTES: u64 = 128 << 10;
/// Bytes of the whole file: behind the doorbell pages is what other processes that the file is handed to leave for its owner.
pub const FILE_BYTES: u64 = DOORBELL_BYTES + (64 << 10);
/// Name of that file, by which other processes that are handed one know it.
pub const FILE_NAME: &str = "wirepath-uverbs";
/// Turns before others get at the lock.
const TURNS: usize = 64;
/// Nanoseconds after a doorbell before a device that fetches late looks at descriptors and data.
const LATE: u64 = 200_000;
/// Doorbells that wait for a thread.
const WAITING: usize = 1 << 12;

/// The NICs of a process.
pub struct Emulator<H: Host> {
    host: H,
    topology: Topology,
    log: Log,
    machine: Mutex<Machine<H>>,
    /// Threads that want the lock: a busy device thread steps aside for them.
    waiting: AtomicUsize,
}

struct Machine<H: Host> {
    devices: Vec<Box<dyn Device<H>>>,
    /// First port of each device among all ports.
    first_port: Vec<usize>,
    links: Vec<Link>,
    linked: bool,
    contexts: HashMap<ContextId, Context>,
    files: HashMap<RawFd, ContextId>,
    /// Contexts by the file system's number of their file, by which a duplicate of a descriptor is known.
    inodes: HashMap<u64, ContextId>,
    sockets: HashMap<RawFd, VecDeque<Vec<u8>>>,
    next_context: ContextId,
    orders: Orders,
    outbox: Outbox,
    events: Vec<Event>,
    /// Doorbells that wait for the thread, with the time from which they may be served.
    bells: VecDeque<(u64, ContextId, Store)>,
    scratch: Vec<u8>,
}

impl<H: Host> fmt::Debug for Emulator<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emulator").field("topology", &self.topology).finish_non_exhaustive()
    }
}

/// An open device.
#[derive(Debug)]
pub struct Opened {
    /// Its file.
    pub file: OwnedFd,
    /// Its context.
    pub context: ContextId,
}

impl<H: Host> Emulator<H> {
    /// The NICs of a topology; links are opened with the first device.
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
            linked: false,
            contexts: HashMap::new(),
            files: HashMap::new(),
            inodes: HashMap::new(),
            sockets: HashMap::new(),
            next_context: 1,
            orders: Orders::default(),
            outbox: Outbox::new(ports),
            events: Vec::new(),
            bells: VecDeque::new(),
            scratch: vec![0; LONGEST],
        };
        for fault in &topology.faults {
            machine.order(fault.clone(), topology.doorbells, &log);
        }
        Self { host, topology, log, machine: Mutex::new(machine), waiting: AtomicUsize::new(0) }
    }

    /// What it was made from.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Where refusals go.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The process around it.
    pub fn host(&self) -> &H {
        &self.host
    }

    fn lock(&self) -> MutexGuard<'_, Machine<H>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Devices as netlink lists them.
    pub fn list(&self) -> Vec<Listed> {
        let machine = self.lock();
        let listed = |(minor, device): (usize, &dyn Device<H>)| Listed {
            name: device.spec().name.clone(),
            minor: minor as u32,
            ports: device.spec().ports.len() as u32,
            guid: u64::from_be_bytes(device.query().base.node_guid),
            driver: device.driver(),
            abi: device.abi(),
        };
        machine.devices.iter().map(AsRef::as_ref).enumerate().map(listed).collect()
    }

    /// A netlink socket of the application.
    pub fn netlink_open(&self, fd: RawFd) {
        self.lock().sockets.insert(fd, VecDeque::new());
    }

    /// The application sends on it.
    pub fn netlink_send(&self, fd: RawFd, datagram: &[u8]) {
        let replies = netlink::answer(&self.list(), datagram);
        if let Some(queue) = self.lock().sockets.get_mut(&fd) {
            queue.extend(replies);
        }
    }

    /// The application reads the next datagram, which stays if it only peeks. `EAGAIN` if there is none.
    ///
    /// # Errors
    /// See there.
    pub fn netlink_receive(&self, fd: RawFd, peek: bool) -> Result<Vec<u8>, Errno> {
        let mut machine = self.lock();
        let queue = machine.sockets.get_mut(&fd).ok_or(Errno::BADF)?;
        let datagram = if peek { queue.front().cloned() } else { queue.pop_front() };
        datagram.ok_or(Errno::AGAIN)
    }

    /// Opens a device by its minor number.
    ///
    /// # Errors
    /// `ENXIO` if there is none, `EIO` if its links cannot be opened (the log says why).
    pub fn open(&self, minor: u32) -> Result<Opened, Errno> {
        let mut machine = self.lock();
        let device = minor as usize;
        if device >= machine.devices.len() {
            return Err(Errno::NXIO);
        }
        machine.plug(&self.topology, &self.host).map_err(|why| {
            self.log.line(why);
            Errno::IO
        })?;
        let file = memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, FILE_BYTES)?;
        // It is handed to other processes, and a device file cannot be cut either.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let context = machine.next_context;
        machine.next_context += 1;
        machine.contexts.insert(context, Context::new(context, device));
        machine.files.insert(file.as_raw_fd(), context);
        machine.inodes.insert(fstat(&file)?.st_ino, context);
        Ok(Opened { file, context })
    }

    /// `ioctl(2)` on an open device.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn ioctl(&self, fd: RawFd, request: u64, address: u64) -> Result<(), Errno> {
        self.command(fd, |context, kernel| context.ioctl(kernel, request, address))
    }

    /// `write(2)` on an open device: bytes taken.
    ///
    /// # Errors
    /// As the kernel's.
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
            let Machine { devices, contexts, files, orders, bells, .. } = &mut *machine;
            let context = files.get(&fd).and_then(|context| contexts.get_mut(context)).ok_or(Errno::BADF)?;
            let id = context.id;
            let device = devices[context.device].as_mut();
            let waits = bells.iter().any(|(_, of, _)| *of == id);
            let bells = if waits { Bells::Waiting } else { Bells::Seen };
            let (host, log, write_abi) = (&self.host, &self.log, self.topology.write_abi);
            let mut kernel = Kernel { host, log, orders, device, write_abi, bells };
            let result = run(context, &mut kernel);
            if kernel.bells != Bells::First {
                return result;
            }
            machine.ring_waiting(self.topology.doorbells, &self.log, id);
        }
    }

    /// `mmap(2)` on an open device: the context, and the offset in its file.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn map(&self, fd: RawFd, offset: u64, length: usize) -> Result<(ContextId, u64), Errno> {
        let mut machine = self.lock();
        let Machine { devices, contexts, files, .. } = &mut *machine;
        let context = files.get(&fd).and_then(|context| contexts.get(context)).ok_or(Errno::BADF)?;
        Ok((context.id, devices[context.device].map(&self.log, context.id, offset, length)?))
    }

    /// A descriptor that this process has made of another one, by `dup` or by sending it to itself: true if it is of an open device,
    /// which from now on is open until both are closed.
    pub fn adopt(&self, fd: RawFd, inode: u64) -> bool {
        let mut machine = self.lock();
        let Some(context) = machine.inodes.get(&inode).copied() else { return false };
        machine.files.insert(fd, context);
        true
    }

    /// A descriptor of a device that another process has open and has handed over: from now on it is open here too, as far as programs
    /// can import it. What it is like is asked of its owner.
    ///
    /// # Errors
    /// The owner does not answer, or has another kind of device.
    pub fn adopt_foreign(&self, fd: RawFd, inode: u64, elsewhere: Box<dyn Elsewhere>) -> Result<ContextId, Errno> {
        let [minor, facts, _] = elsewhere.ask(Question::Context, 0)?;
        let mut machine = self.lock();
        let id = machine.next_context;
        let device = usize::try_from(minor).ok().and_then(|minor| machine.devices.get_mut(minor)).ok_or(Errno::NXIO)?;
        device.adopt(id, facts)?;
        machine.next_context += 1;
        machine.contexts.insert(id, Context::imported(id, minor as usize, elsewhere));
        machine.files.insert(fd, id);
        machine.inodes.insert(inode, id);
        Ok(id)
    }

    /// Answers a process that has imported a context.
    ///
    /// # Errors
    /// `ENOENT`: there is no such object.
    pub fn answer(&self, context: ContextId, question: Question, handle: u32) -> Result<[u64; 3], Errno> {
        let machine = self.lock();
        let context = machine.contexts.get(&context).ok_or(Errno::NOENT)?;
        context.answer(machine.devices[context.device].as_ref(), question, handle)
    }

    /// Minor number of an open device.
    pub fn minor(&self, fd: RawFd) -> Option<u32> {
        let machine = self.lock();
        machine.files.get(&fd).and_then(|context| machine.contexts.get(context)).map(|context| context.device as u32)
    }

    /// The application closes a descriptor that it has from here.
    pub fn close(&self, fd: RawFd) {
        let mut machine = self.lock();
        let Machine { devices, contexts, files, inodes, sockets, .. } = &mut *machine;
        if sockets.remove(&fd).is_some() {
            return;
        }
        if let Some(id) = files.remove(&fd) {
            // A duplicate keeps it open.
            if !files.values().any(|other| *other == id)
                && let Some(mut context) = contexts.remove(&id)
            {
                inodes.retain(|_, other| *other != id);
                context.end(devices[context.device].as_mut());
            }
            return;
        }
        for context in contexts.values_mut() {
            if context.close_descriptor(fd) {
                return;
            }
        }
    }

    /// A store to a doorbell page: carried out at once, or handed to [`Self::serve`] (true), whichever the topology wants.
    pub fn doorbell(&self, context: ContextId, store: Store) -> bool {
        let mut machine = self.lock();
        if self.topology.doorbells == Doorbells::Queue || self.topology.fetch_late {
            let due = if self.topology.fetch_late { crate::clock() + LATE } else { 0 };
            machine.bells.push_back((due, context, store));
            // Too many for the thread: the store takes the time of what waits.
            while machine.bells.len() > WAITING {
                let Some((_, context, store)) = machine.bells.pop_front() else { break };
                machine.ring(self.topology.doorbells, &self.log, context, store);
            }
            return true;
        }
        machine.ring(self.topology.doorbells, &self.log, context, store);
        false
    }

    /// A store to a doorbell page by another process: always carried out.
    pub fn doorbell_from_outside(&self, context: ContextId, store: Store) {
        self.lock().ring(self.topology.doorbells, &self.log, context, store);
    }

    /// What the device thread does, again and again: doorbells that wait, queues in scan mode, frames from outside, generators.
    /// True if something was done.
    pub fn serve(&self) -> bool {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let mut busy = false;
        for _ in 0..TURNS {
            let turn = machine.turn(self.topology.doorbells, &self.log);
            busy |= turn;
            if !turn || self.waiting.load(Ordering::Relaxed) > 0 {
                break;
            }
        }
        busy
    }

    /// Descriptors that become readable when [`Self::serve`] has work from outside.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.lock().links.iter().filter_map(Link::descriptor).collect()
    }

    /// Whether the device thread must look without being woken.
    pub fn must_spin(&self) -> bool {
        self.topology.doorbells != Doorbells::Trap
            || self.topology.fetch_late
            || self
                .topology
                .devices
                .iter()
                .flat_map(|device| &device.ports)
                .any(|port| port.link == crate::topology::LinkSpec::Generator)
    }

    /// Orders a fault.
    pub fn order(&self, fault: Fault) {
        self.lock().order(fault, self.topology.doorbells, &self.log);
    }

    /// Orders a fault that is written as in a topology file, without its `[[fault]]`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn order_text(&self, text: &str) -> Result<(), wirepath_settings::ConfigError> {
        let source = wirepath_settings::Source::new("fault", text);
        let document = source.parse()?;
        let settings = document.settings();
        let fault = faults::read(&settings, &self.topology)?;
        settings.finish()?;
        self.order(fault);
        Ok(())
    }

    /// Counters of devices and links.
    pub fn counters(&self) -> serde_json::Value {
        let mut machine = self.lock();
        machine.gather_counts();
        let mut devices: Vec<_> = machine.devices.iter().map(|device| device.counters()).collect();
        for (at, device) in devices.iter_mut().enumerate() {
            let first = machine.first_port[at];
            let Some(ports) = device["ports"].as_array_mut() else { continue };
            for (port, entry) in ports.iter_mut().enumerate() {
                let Some(link) = machine.links.get(first + port) else { continue };
                let c = &link.counters;
                entry["link"] = serde_json::json!({
                    "delivered": c.delivered, "lost": c.lost, "duplicated": c.duplicated, "corrupted": c.corrupted, "reordered": c.reordered,
                    "down": c.down, "refused": c.refused, "arrived": c.arrived,
                });
            }
        }
        serde_json::json!({
            "devices": devices, "log_lines": self.log.lines(), "faults_waiting": machine.orders.waiting(),
        })
    }
}

impl<H: Host> Machine<H> {
    /// Opens the links, once.
    fn plug(&mut self, topology: &Topology, host: &H) -> Result<(), String> {
        if self.linked {
            return Ok(());
        }
        let down: Vec<bool> = self.links.iter().map(|link| !link.up).collect();
        self.links = fabric::open(topology, host)?;
        for (at, link) in self.links.iter_mut().enumerate() {
            link.up = !down.get(at).copied().unwrap_or(false);
            if link.only_counts() {
                self.outbox.deafen(at);
            }
        }
        self.linked = true;
        Ok(())
    }

    /// Runs part of a device, then delivers what it sent and passes on its events.
    fn with<R>(
        &mut self,
        doorbells: Doorbells,
        log: &Log,
        device: usize,
        run: impl FnOnce(&mut dyn Device<H>, &mut Env<'_>) -> R,
    ) -> R {
        let Self { devices, outbox, events, orders, first_port, .. } = self;
        let mut env = Env { log, events, outbox, orders, device, first_port: first_port[device], doorbells };
        let result = run(devices[device].as_mut(), &mut env);
        if !self.outbox.frames().is_empty() {
            self.deliver(doorbells, log);
        }
        if !self.events.is_empty() {
            self.tell(device);
        }
        result
    }

    fn ring(&mut self, doorbells: Doorbells, log: &Log, context: ContextId, store: Store) {
        let Some(device) = self.contexts.get(&context).map(|context| context.device) else { return };
        let mut more = self.with(doorbells, log, device, |device, env| device.doorbell(env, context, store));
        while more {
            more = self.with(doorbells, log, device, |device, env| device.work(env));
        }
        self.strike_devices(doorbells, log);
    }

    /// Carries out the stores of a context that wait, whenever they are due.
    fn ring_waiting(&mut self, doorbells: Doorbells, log: &Log, context: ContextId) {
        let (its, others): (VecDeque<_>, _) =
            std::mem::take(&mut self.bells).into_iter().partition(|(_, of, _)| *of == context);
        self.bells = others;
        for (_, context, store) in its {
            self.ring(doorbells, log, context, store);
        }
    }

    /// Frames of the outbox go over their links.
    fn deliver(&mut self, doorbells: Doorbells, log: &Log) {
        let mut outbox = std::mem::take(&mut self.outbox);
        let Self { links, devices, first_port, orders, events, .. } = self;
        let mut none = Outbox::default();
        let mut reached = [false; 64];
        // Those that leave by one port arrive together.
        for frames in outbox.frames().chunk_by(|one, other| one.port == other.port).flat_map(|run| run.chunks(TOGETHER))
        {
            let Some(link) = links.get_mut(frames[0].port) else { continue };
            let mut run: [&[u8]; TOGETHER] = [&[]; TOGETHER];
            run.iter_mut().zip(frames).for_each(|(bytes, frame)| *bytes = outbox.bytes(*frame));
            link.carry(&run[..frames.len()], |end, frames| match end {
                End::None => 0,
                End::Sink | End::Generator(_) => frames.len(),
                End::Wire(wire) => frames.iter().filter(|frame| wire.send(frame)).count(),
                End::Pcap(pcap) => frames.iter().filter(|frame| pcap.write(frame)).count(),
                End::Port(port) => {
                    let device = owner(first_port, *port);
                    reached[device % 64] = true;
                    let mut env = Env {
                        log,
                        events,
                        outbox: &mut none,
                        orders,
                        device,
                        first_port: first_port[device],
                        doorbells,
                    };
                    devices[device].receive(&mut env, *port - first_port[device], frames, false)
                }
            });
        }
        for device in (0..devices.len()).filter(|device| reached[device % 64]) {
            let mut env =
                Env { log, events, outbox: &mut none, orders, device, first_port: first_port[device], doorbells };
            devices[device].flush(&mut env);
        }
        outbox.clear();
        self.outbox = outbox;
        if !self.events.is_empty() {
            // Events name their owners, so it does not matter which device they came from.
            self.tell(usize::MAX);
        }
    }

    /// Events go to the contexts that they concern.
    fn tell(&mut self, device: usize) {
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

    /// One turn of the device thread.
    fn turn(&mut self, doorbells: Doorbells, log: &Log) -> bool {
        let mut busy = false;
        for _ in 0..64 {
            let Some((due, context, store)) = self.bells.pop_front() else { break };
            if due > 0 && due > crate::clock() {
                self.bells.push_front((due, context, store));
                break;
            }
            self.ring(doorbells, log, context, store);
            busy = true;
        }
        if doorbells == Doorbells::Scan {
            for device in 0..self.devices.len() {
                let before = self.outbox.frames().len();
                let more = self.with(doorbells, log, device, |device, env| {
                    let more = device.work(env);
                    more || env.outbox.frames().len() > before
                });
                busy |= more;
            }
        }
        busy |= self.arrivals(doorbells, log);
        self.strike_devices(doorbells, log);
        busy
    }

    /// Frames from wires and generators.
    fn arrivals(&mut self, doorbells: Doorbells, log: &Log) -> bool {
        let mut busy = false;
        for port in 0..self.links.len() {
            let Self { links, devices, first_port, orders, events, outbox, scratch, .. } = self;
            let link = &mut links[port];
            let device = owner(first_port, port);
            let local = port - first_port[device];
            let mut env = Env { log, events, outbox, orders, device, first_port: first_port[device], doorbells };
            let mut taken = 0;
            match &mut link.end {
                End::Generator(generator) if link.up => {
                    taken = generator.offer(|frames| devices[device].receive(&mut env, local, frames, true));
                }
                End::Wire(wire) => {
                    for _ in 0..64 {
                        let Some(length) = wire.receive(scratch) else { break };
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
            // A queue may also have failed by a frame that it did not take.
            if taken > 0 || matches!(link.end, End::Generator(_)) {
                devices[device].flush(&mut env);
                if !self.events.is_empty() {
                    self.tell(device);
                }
            }
        }
        busy
    }

    /// A fault that waits for nothing happens now; others lie in wait.
    fn order(&mut self, fault: Fault, doorbells: Doorbells, log: &Log) {
        let waits = matches!(fault.what, What::Refuse { .. } | What::CompletionError { .. } | What::Hostile { .. })
            || fault.after > 0;
        if waits {
            self.orders.add(fault);
        } else {
            self.happen(fault.device, &fault.what, doorbells, log);
        }
    }

    fn happen(&mut self, device: usize, what: &What, doorbells: Doorbells, log: &Log) {
        if let What::Link { port, up } = *what
            && let Some(link) = self.links.get_mut(self.first_port[device] + usize::from(port) - 1)
        {
            link.up = up;
        }
        self.with(doorbells, log, device, |device, env| device.fault(env, what));
    }

    /// Faults of ports and devices that wait for turns: `after` counts doorbells, or turns of the device thread.
    fn strike_devices(&mut self, doorbells: Doorbells, log: &Log) {
        if self.orders.is_empty() {
            return;
        }
        for device in 0..self.devices.len() {
            let of_device = |what: &What| {
                matches!(what, What::DeviceFatal | What::Link { .. } | What::PortHeld { .. } | What::PortFreed { .. })
            };
            if let Some(what) = self.orders.strike(device, of_device) {
                self.happen(device, &what, doorbells, log);
            }
        }
    }

    /// Frames that were only counted, for the links' counters.
    fn gather_counts(&mut self) {
        for (port, link) in self.links.iter_mut().enumerate() {
            link.counters.delivered += self.outbox.take_counts(port).0;
        }
    }
}

/// The device that a port belongs to.
fn owner(first_port: &[usize], port: usize) -> usize {
    first_port.iter().rposition(|first| *first <= port).unwrap_or(0)
}
