//! The kernel side of uverbs: commands in both forms, handles, references and events.

mod events;
mod flows;
mod import;
mod ioctl_abi;
mod mlx5_steering_abi;
mod objects;
mod request;
mod specs;
mod write_abi;

use std::os::fd::RawFd;

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::{self as defs, ioctl, write};
use zerocopy::IntoBytes;

pub use import::{ContextOwner, ImportQuery};
pub use request::{CreateQp, CreateWq, Reply, Request};

use crate::attributes::Attributes;
use crate::device::{Call, ContextId, Device, Event, EventTarget, NewCq, NewQp, NewWq, VECTORS};
use crate::faults::{FaultKind, PendingFaults};
use crate::host::Host;
use crate::log::Log;
use events::Channel;
use objects::{ObjectKind, Objects};

/// Maximum length of a command in the write form.
const LONGEST: usize = 128 << 10;
/// Known access flags.
const ACCESSES: u32 = 0xff;

/// An open uverbs device.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) id: ContextId,
    pub(crate) device: usize,
    live: bool,
    objects: Objects,
    events: Option<(RawFd, Channel)>,
    /// Additional event descriptors, from importing processes. Port and device events go only to the first
    /// descriptor.
    later_events: Vec<(RawFd, Channel)>,
    channels: Vec<(RawFd, Channel)>,
    /// Connection to the process that has the context open, if it is imported here.
    remote_owner: Option<Box<dyn ContextOwner>>,
}

/// State outside the context that a command may use.
pub(crate) struct Kernel<'k, H: Host> {
    pub(crate) host: &'k H,
    pub(crate) log: &'k Log,
    pub(crate) faults: &'k mut PendingFaults,
    pub(crate) device: &'k mut dyn Device<H>,
    /// True if only the write form works.
    pub(crate) write_abi: bool,
    /// State of doorbells that were rung before the command.
    pub(crate) queued_doorbells: QueuedDoorbells,
}

/// State of a context's doorbells that are queued for its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuedDoorbells {
    /// No doorbell is queued.
    Empty,
    /// Doorbells are queued.
    Pending,
    /// Doorbells are queued, and the device must handle them before the command. The command has done nothing
    /// yet and is to be repeated. Stores reach a device in program order, and the command is the later
    /// operation.
    FlushFirst,
}

impl Context {
    pub(crate) fn new(id: ContextId, device: usize) -> Self {
        Self {
            id,
            device,
            live: false,
            objects: Objects::default(),
            events: None,
            later_events: Vec::new(),
            channels: Vec::new(),
            remote_owner: None,
        }
    }

    /// Handles `write(2)`; returns the number of bytes taken.
    pub(crate) fn write<H: Host>(
        &mut self,
        kernel: &mut Kernel<'_, H>,
        address: u64,
        length: usize,
    ) -> Result<usize, Errno> {
        if !(size_of::<write::CommandHeader>()..=LONGEST).contains(&length) {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![0; length];
        kernel.host.read(address, &mut bytes)?;
        let parts = write_abi::parts(&bytes)?;
        let driver_at = parts.core_at + parts.core;
        let request = write_abi::decode(parts.command, parts.extended, &bytes[parts.core_at..driver_at])?;
        let driver_in = &bytes[driver_at..driver_at + parts.driver];
        let (reply, driver_out) = self.run(kernel, &request, driver_in, parts.driver_out, None, false)?;
        let core = core_reply(&request, parts.extended, &reply);
        let size = core.len().min(parts.core_out);
        kernel.host.write(parts.response, &core[..size])?;
        let size = driver_out.len().min(parts.driver_out);
        let behind = parts.response.checked_add(parts.core_out as u64).ok_or(Errno::FAULT)?;
        kernel.host.write(behind, &driver_out[..size])?;
        Ok(length)
    }

    /// Handles `ioctl(2)`.
    pub(crate) fn ioctl<H: Host>(
        &mut self,
        kernel: &mut Kernel<'_, H>,
        request: u64,
        address: u64,
    ) -> Result<(), Errno> {
        if kernel.write_abi || request & 0xffff_ffff != ioctl::REQUEST {
            return Err(Errno::NOTTY);
        }
        let host = kernel.host;
        let mut attributes = Attributes::read(host, address)?;
        if attributes.driver() != kernel.device.driver() {
            return Err(Errno::INVAL);
        }
        if attributes.method() == (ioctl::OBJECT_DEVICE, ioctl::INVOKE_WRITE) {
            return self.write_over_ioctl(kernel, &mut attributes);
        }
        let request = ioctl_abi::decode(&attributes)?;
        let input = if attributes.has(ioctl::UHW_IN) && !matches!(request, Request::Driver { .. }) {
            attributes.bytes(ioctl::UHW_IN)?
        } else {
            Vec::new()
        };
        let room = attributes.room(output_id(&request));
        let (reply, output) = self.run(kernel, &request, &input, room, Some(&mut attributes), true)?;
        ioctl_abi::encode(&mut attributes, &request, &reply)?;
        if !output.is_empty() {
            attributes.put(output_id(&request), &output)?;
        }
        attributes.write_back()
    }

    fn write_over_ioctl<H: Host>(
        &mut self,
        kernel: &mut Kernel<'_, H>,
        attributes: &mut Attributes<'_, H>,
    ) -> Result<(), Errno> {
        attributes.check_known(&[ioctl::CORE_IN, ioctl::CORE_OUT, ioctl::WRITE_CMD, ioctl::UHW_IN, ioctl::UHW_OUT])?;
        let word = attributes.number(ioctl::WRITE_CMD)?.ok_or(Errno::INVAL)?;
        let command = (word & 0xff) as u32;
        let extended = word & u64::from(write::EXTENDED) != 0;
        let core = if attributes.has(ioctl::CORE_IN) { attributes.bytes(ioctl::CORE_IN)? } else { Vec::new() };
        if !extended && command == write::QUERY_DEVICE && !attributes.has(ioctl::CORE_OUT) {
            // The library sends this command to find out whether the form is supported; there is no space for
            // a reply.
            return Err(Errno::NOSPC);
        }
        let request = write_abi::decode(command, extended, &core)?;
        let input = if attributes.has(ioctl::UHW_IN) { attributes.bytes(ioctl::UHW_IN)? } else { Vec::new() };
        let room = attributes.room(ioctl::UHW_OUT);
        let (reply, output) = self.run(kernel, &request, &input, room, None, true)?;
        attributes.put(ioctl::CORE_OUT, &core_reply(&request, extended, &reply))?;
        if !output.is_empty() {
            attributes.put(ioctl::UHW_OUT, &output)?;
        }
        attributes.write_back()
    }

    fn run<H: Host>(
        &mut self,
        kernel: &mut Kernel<'_, H>,
        request: &Request,
        input: &[u8],
        room: usize,
        attributes: Option<&mut Attributes<'_, H>>,
        ioctl: bool,
    ) -> Result<(Reply, Vec<u8>), Errno> {
        let opens = matches!(request, Request::GetContext | Request::QueryContext);
        if !self.live && !opens {
            return Err(Errno::INVAL);
        }
        if kernel.device.is_dead(self.id) {
            return Err(Errno::IO);
        }
        if kernel.queued_doorbells == QueuedDoorbells::Pending && request.stops_queues() {
            kernel.queued_doorbells = QueuedDoorbells::FlushFirst;
            return Err(Errno::AGAIN);
        }
        let refused = kernel.faults.trigger(
            self.device,
            |what| matches!(what, FaultKind::FailCommand { command, .. } if command == request.name()),
        );
        if let Some(FaultKind::FailCommand { errno, .. }) = refused {
            kernel.log.line(format_args!(
                "{}: injected fault: {} refused: {errno}",
                kernel.device.spec().name,
                request.name()
            ));
            return Err(errno);
        }
        let (host, log) = (kernel.host, kernel.log);
        let mut call = Call { host, log, context: self.id, input, room, output: Vec::new(), quiet: false };
        let device = &mut *kernel.device;
        let reply = self.execute(device, &mut call, request, attributes, ioctl).inspect_err(|errno| {
            if !call.quiet {
                call.log.line(format_args!("{}: {} failed: {errno}", device.spec().name, request.name()));
            }
        })?;
        Ok((reply, call.output))
    }

    fn execute<H: Host>(
        &mut self,
        device: &mut dyn Device<H>,
        call: &mut Call<'_, H>,
        request: &Request,
        attributes: Option<&mut Attributes<'_, H>>,
        ioctl: bool,
    ) -> Result<Reply, Errno> {
        self.check_imported(device, call, request)?;
        let next = EventTarget { context: self.id, handle: self.objects.next() };
        self.objects.room()?;
        Ok(match request {
            Request::GetContext => {
                if self.live {
                    return Err(Errno::INVAL);
                }
                device.open(call)?;
                self.live = true;
                let async_fd = if ioctl { None } else { Some(self.async_events(call)?) };
                Reply::Context { async_fd, vectors: device.vectors() }
            }
            Request::QueryContext => {
                device.query_context(call)?;
                Reply::Context { async_fd: None, vectors: device.vectors() }
            }
            Request::QueryDevice => Reply::Device(Box::new(device.query())),
            Request::QueryDeviceExtended => {
                call.output = device.query_driver_part(call.room);
                Reply::Device(Box::new(device.query()))
            }
            Request::QueryPort { port } => Reply::Port(device.query_port(*port).ok_or(Errno::INVAL)?),
            Request::QueryGidTable { entry_size } => {
                if *entry_size < size_of::<ioctl::GidEntry>() as u64 {
                    return Err(Errno::INVAL);
                }
                Reply::GidTable(device.gids())
            }
            Request::QueryGidEntry { port, index } => {
                let found = device.gids().into_iter().find(|gid| gid.port_num == *port && gid.gid_index == *index);
                Reply::GidTable(vec![found.ok_or(Errno::NODATA)?])
            }
            Request::AllocAsyncEvents => Reply::Descriptor(self.async_events(call)?),
            Request::AllocPd => {
                let id = device.alloc_pd(call)?;
                Reply::Pd { pd: self.objects.add(ObjectKind::Pd, id, 0, None, vec![]) }
            }
            Request::QueryPd { pd } => {
                let [number, ..] = self.answer_import(device, ImportQuery::Pd, *pd)?;
                Reply::PdInfo { number: number as u32 }
            }
            Request::DeallocPd { pd } => {
                device.dealloc_pd(self.objects.remove(*pd, ObjectKind::Pd)?.id);
                Reply::Empty
            }
            Request::RegMr { pd, start, length, iova, access } => {
                let id = self.objects.id(*pd, ObjectKind::Pd).map_err(|_| Errno::INVAL)?;
                let (mr, key, rkey) = reg_mr(device, call, id, *start, *length, *iova, *access)?;
                let mr = self.objects.add(ObjectKind::Mr, mr, 0, None, vec![*pd]);
                Reply::Mr { mr, lkey: key, rkey }
            }
            Request::DeregMr { mr } => {
                device.dereg_mr(self.objects.remove(*mr, ObjectKind::Mr)?.id);
                Reply::Empty
            }
            Request::QueryMr { mr } => {
                let [lkey, rkey, length] = self.answer_import(device, ImportQuery::Mr, *mr)?;
                Reply::MrInfo { lkey: lkey as u32, rkey: rkey as u32, length }
            }
            Request::CreateCompChannel => {
                let (channel, theirs) = Channel::new()?;
                let fd = call.host.install_fd(theirs);
                self.channels.push((fd, channel));
                Reply::Descriptor(fd)
            }
            Request::CreateCq { user_handle, cqe, vector, channel, flags: _ } => {
                if *vector >= VECTORS || *cqe == 0 {
                    return Err(Errno::INVAL);
                }
                if channel.is_some_and(|fd| !self.channels.iter().any(|(known, _)| *known == fd)) {
                    return Err(Errno::INVAL);
                }
                let (id, entries) = device.create_cq(call, &NewCq { entries: *cqe, owner: next })?;
                Reply::Cq { cq: self.objects.add(ObjectKind::Cq, id, *user_handle, *channel, vec![]), cqe: entries }
            }
            Request::DestroyCq { cq } => {
                let object = self.objects.remove(*cq, ObjectKind::Cq)?;
                device.destroy_cq(object.id);
                self.event_counts(&object)
            }
            // User space arms completion queues by doorbell. The kernel's command is for queues of the
            // kernel.
            Request::ReqNotifyCq { .. } | Request::QueryQp { .. } => return Err(Errno::OPNOTSUPP),
            Request::CreateQp(qp) => self.create_qp(device, call, qp, next)?,
            Request::ModifyQp { qp, mask, state, port } => {
                let id = self.objects.id(*qp, ObjectKind::Qp)?;
                device.modify_qp(call, id, *mask, *state, *port)?;
                Reply::Empty
            }
            Request::DestroyQp { qp } => {
                let object = self.objects.remove(*qp, ObjectKind::Qp)?;
                device.destroy_qp(object.id);
                self.event_counts(&object)
            }
            Request::CreateWq(wq) => {
                if wq.kind != defs::WQT_RQ || wq.max_wr == 0 || wq.max_sge == 0 {
                    return Err(Errno::INVAL);
                }
                let pd = self.objects.id(wq.pd, ObjectKind::Pd)?;
                let cq = self.objects.id(wq.cq, ObjectKind::Cq)?;
                let new = NewWq { pd, cq, max_wr: wq.max_wr, max_sge: wq.max_sge, flags: wq.flags, owner: next };
                let (id, number) = device.create_wq(call, &new)?;
                let handle = self.objects.add(ObjectKind::Wq, id, wq.user_handle, None, vec![wq.pd, wq.cq]);
                Reply::Wq { wq: handle, max_wr: wq.max_wr, max_sge: wq.max_sge, number }
            }
            Request::ModifyWq { wq, mask, state, .. } => {
                let id = self.objects.id(*wq, ObjectKind::Wq)?;
                device.modify_wq(call, id, *mask, *state)?;
                Reply::Empty
            }
            Request::DestroyWq { wq } => {
                let object = self.objects.remove(*wq, ObjectKind::Wq)?;
                device.destroy_wq(object.id);
                self.event_counts(&object)
            }
            Request::CreateIndirectionTable { wqs } => {
                let ids: Result<Vec<_>, _> = wqs.iter().map(|wq| self.objects.id(*wq, ObjectKind::Wq)).collect();
                let id = device.create_table(call, &ids?)?;
                Reply::IndirectionTable {
                    table: self.objects.add(ObjectKind::Table, id, 0, None, wqs.clone()),
                    number: id,
                }
            }
            Request::DestroyIndirectionTable { table } => {
                device.destroy_table(self.objects.remove(*table, ObjectKind::Table)?.id);
                Reply::Empty
            }
            Request::Driver { .. } => {
                device.method(call, attributes.ok_or(Errno::PROTONOSUPPORT)?)?;
                Reply::Empty
            }
            _ => {
                let name = device.spec().name.clone();
                let Some(rules) = device.rules() else {
                    return Err(call.refuse(Errno::OPNOTSUPP, format_args!("{name}: this hardware has no flow rules")));
                };
                flows::execute(&mut self.objects, rules, call, &name, request)?
            }
        })
    }

    fn create_qp<H: Host>(
        &mut self,
        device: &mut dyn Device<H>,
        call: &mut Call<'_, H>,
        qp: &CreateQp,
        owner: EventTarget,
    ) -> Result<Reply, Errno> {
        let id = |handle: Option<u32>, kind| handle.map(|handle| self.objects.id(handle, kind)).transpose();
        let new = NewQp {
            pd: self.objects.id(qp.pd, ObjectKind::Pd)?,
            send_cq: id(qp.send_cq, ObjectKind::Cq)?,
            recv_cq: id(qp.recv_cq, ObjectKind::Cq)?,
            table: id(qp.table, ObjectKind::Table)?,
            kind: qp.kind,
            flags: qp.flags,
            cap: qp.cap,
            owner,
        };
        let (id, number, cap) = device.create_qp(call, &new)?;
        let needs = [Some(qp.pd), qp.send_cq, qp.recv_cq, qp.table].into_iter().flatten().collect();
        Ok(Reply::Qp { qp: self.objects.add(ObjectKind::Qp, id, qp.user_handle, None, needs), number, cap })
    }

    fn async_events<H: Host>(&mut self, call: &Call<'_, H>) -> Result<RawFd, Errno> {
        let (channel, theirs) = Channel::new()?;
        let fd = call.host.install_fd(theirs);
        if self.events.is_none() {
            self.events = Some((fd, channel));
        } else {
            self.later_events.push((fd, channel));
        }
        Ok(fd)
    }

    /// Returns the number of events of a destroyed object that the application has read. Unread events are
    /// removed.
    fn event_counts(&self, object: &objects::Object) -> Reply {
        let (mut completions, mut others) = object.sent;
        let channel = object.channel.and_then(|fd| self.channels.iter().find(|(known, _)| *known == fd));
        if completions > 0
            && let Some((_, channel)) = channel
        {
            completions -= channel.withdraw(object.user_handle, |_| true).min(completions);
        }
        if others > 0
            && let Some((_, events)) = &self.events
        {
            others -= events
                .withdraw(object.user_handle, |record| record.len() == size_of::<write::AsyncEvent>())
                .min(others);
        }
        Reply::EventCounts { completions, others }
    }

    /// Delivers an event to the application.
    pub(crate) fn deliver(&mut self, event: Event) {
        match event {
            Event::Completion(owner) => {
                let Some(object) = self.objects.get_mut(owner.handle) else { return };
                let Some(channel) = object.channel else { return };
                let record = write::CompletionEvent { cq_handle: object.user_handle };
                if let Some((_, channel)) = self.channels.iter().find(|(fd, _)| *fd == channel)
                    && channel.push(record.as_bytes())
                {
                    object.sent.0 += 1;
                }
            }
            Event::Object(owner, kind) => {
                let Some(object) = self.objects.get_mut(owner.handle) else { return };
                let record = write::AsyncEvent { element: object.user_handle, event_type: kind, reserved: 0 };
                if let Some((_, events)) = &self.events
                    && events.push(record.as_bytes())
                {
                    object.sent.1 += 1;
                }
            }
            Event::Port(port, kind) => self.notify_all(u64::from(port), kind),
            Event::Device(kind) => self.notify_all(0, kind),
        }
    }

    fn notify_all(&self, element: u64, kind: u32) {
        if let Some((_, events)) = &self.events {
            events.push(write::AsyncEvent { element, event_type: kind, reserved: 0 }.as_bytes());
        }
    }

    /// Handles the closing of an event descriptor; returns true if it belongs to this context.
    pub(crate) fn close_descriptor(&mut self, fd: RawFd) -> bool {
        if self.events.as_ref().is_some_and(|(known, _)| *known == fd) {
            self.events = None;
            return true;
        }
        if let Some(at) = self.later_events.iter().position(|(known, _)| *known == fd) {
            self.later_events.swap_remove(at);
            return true;
        }
        let Some(at) = self.channels.iter().position(|(known, _)| *known == fd) else { return false };
        // In the kernel the queues keep the channel alive by a reference, so they go on without a descriptor.
        if !self.objects.uses_channel(fd) {
            self.channels.swap_remove(at);
        }
        true
    }

    /// Destroys all objects when the file is closed; objects are destroyed before those that they use.
    pub(crate) fn destroy_all<H: Host>(&mut self, device: &mut dyn Device<H>) {
        // A reset has destroyed the objects already. Their numbers may belong to another context now.
        let objects = if device.is_dead(self.id) { Vec::new() } else { self.objects.drain() };
        for object in objects {
            match object.kind {
                ObjectKind::Pd => device.dealloc_pd(object.id),
                ObjectKind::Mr => device.dereg_mr(object.id),
                ObjectKind::Cq => device.destroy_cq(object.id),
                ObjectKind::Qp => device.destroy_qp(object.id),
                ObjectKind::Wq => device.destroy_wq(object.id),
                ObjectKind::Table => device.destroy_table(object.id),
                kind => {
                    if let Some(rules) = device.rules() {
                        flows::destroy(rules, kind, object.id);
                    }
                }
            }
        }
        if self.live {
            device.close(self.id);
        }
    }
}

impl Context {
    /// Creates a context that another process has open.
    pub(crate) fn imported(id: ContextId, device: usize, remote_owner: Box<dyn ContextOwner>) -> Self {
        Self { live: true, objects: Objects::default(), remote_owner: Some(remote_owner), ..Self::new(id, device) }
    }

    /// Answers a query, or forwards it to the owner of an imported context.
    pub(crate) fn answer_import<H: Host>(
        &self,
        device: &dyn Device<H>,
        query: ImportQuery,
        handle: u32,
    ) -> Result<[u64; 3], Errno> {
        if let Some(remote_owner) = &self.remote_owner {
            return remote_owner.ask(query, handle);
        }
        match query {
            ImportQuery::Context => Ok([
                self.device as u64,
                device.export_context(self.id).filter(|_| self.live).ok_or(Errno::OPNOTSUPP)?,
                0,
            ]),
            ImportQuery::Pd => {
                let number = device.pd_number(self.objects.id(handle, ObjectKind::Pd)?).ok_or(Errno::OPNOTSUPP)?;
                Ok([number.into(), 0, 0])
            }
            ImportQuery::Mr => {
                let (lkey, rkey, length) =
                    device.query_mr(self.objects.id(handle, ObjectKind::Mr)?).ok_or(Errno::INVAL)?;
                Ok([lkey.into(), rkey.into(), length])
            }
        }
    }

    /// Refuses commands on an imported context that create or destroy objects. Only the process that opened
    /// the device may do so.
    fn check_imported<H: Host>(
        &self,
        device: &dyn Device<H>,
        call: &Call<'_, H>,
        request: &Request,
    ) -> Result<(), Errno> {
        let allowed = matches!(
            request,
            Request::QueryContext
                | Request::QueryDevice
                | Request::QueryDeviceExtended
                | Request::QueryPort { .. }
                | Request::QueryGidTable { .. }
                | Request::QueryGidEntry { .. }
                | Request::AllocAsyncEvents
                | Request::QueryPd { .. }
                | Request::QueryMr { .. }
                | Request::Driver { .. }
        );
        if self.remote_owner.is_none() || allowed {
            return Ok(());
        }
        let name = &device.spec().name;
        Err(call.refuse(
            Errno::OPNOTSUPP,
            format_args!("{name}: {} on an imported context is not emulated", request.name()),
        ))
    }
}

fn core_reply(request: &Request, extended: bool, reply: &Reply) -> Vec<u8> {
    match request {
        Request::DestroyQp { .. } => write_abi::destroy_qp_reply(reply),
        _ => write_abi::encode(extended, reply),
    }
}

fn reg_mr<H: Host>(
    device: &mut dyn Device<H>,
    call: &mut Call<'_, H>,
    pd: u32,
    start: u64,
    length: u64,
    iova: u64,
    access: u32,
) -> Result<(u32, u32, u32), Errno> {
    let optional = (defs::ACCESS_OPTIONAL_LAST << 1).wrapping_sub(1) & !(defs::ACCESS_OPTIONAL_FIRST - 1);
    let remote = defs::ACCESS_REMOTE_WRITE | defs::ACCESS_REMOTE_ATOMIC;
    if access & !(ACCESSES | optional) != 0 {
        return Err(call.refuse(Errno::INVAL, format_args!("reg_mr: access {access:#x} has bits that are not defined")));
    }
    if access & remote != 0 && access & defs::ACCESS_LOCAL_WRITE == 0 {
        return Err(call.refuse(Errno::INVAL, "reg_mr: remote write access requires local write access"));
    }
    if length == 0 || start.checked_add(length).is_none() {
        return Err(call.refuse(Errno::INVAL, format_args!("reg_mr: invalid range of {length} bytes at {start:#x}")));
    }
    if start & 0xfff != iova & 0xfff {
        return Err(call.refuse(Errno::INVAL, "reg_mr: device address and process address differ within a page"));
    }
    let writable = access & (defs::ACCESS_LOCAL_WRITE | remote | defs::ACCESS_MW_BIND) != 0;
    let region = call.host.pin(start, length, writable).map_err(|errno| {
        call.refuse(
            errno,
            format_args!(
                "reg_mr: {length} bytes at {start:#x} are not all mapped{}",
                if writable { " for writing" } else { "" }
            ),
        )
    })?;
    device.reg_mr(call, pd, region, iova, access)
}

/// Returns the attribute that holds the driver part of a reply.
fn output_id(request: &Request) -> u16 {
    match request {
        Request::QueryContext => defs::mlx5::QUERY_CONTEXT_REPLY,
        _ => ioctl::UHW_OUT,
    }
}
