//! Objects of the device: the checks and replies of the kernel's `mana_ib`.

use std::collections::hash_map::Entry;

use rustix::io::Errno;
use wirepath_nic_defs::mana::{CQE_BYTES, DOORBELL_PAGE};
use wirepath_nic_defs::uverbs::{self, ioctl, mana as abi, write};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::queues::{Cq, PendingCqe, Rq, Sq, WorkQueue};
use super::{MAX_RECV_SGE, MAX_SEND_SGE, Mana, Qp, Rss, TABLE};
use crate::device::QpCap;
use crate::device::{Call, ContextId, Device, Env, Event, Mapping, NewCq, NewQp, NewWq, ObjectId, Store, set_link};
use crate::faults::FaultKind;
use crate::frame::Toeplitz;
use crate::host::{Host, Region};
use crate::identity;
use crate::log::Log;
use crate::slots::CachePadded;
use crate::topology::DeviceSpec;

/// PCI vendor number of Microsoft.
const VENDOR: u32 = 0x1414;
/// Number of the Ethernet function; the RDMA function is 3.
const PART: u32 = 2;
const MOST: u32 = 1000;
const PAGE: u64 = 4096;

fn driver_part<T: FromBytes + KnownLayout + Immutable>(input: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(input).map(|(part, _)| part).map_err(|_| Errno::INVAL)
}

impl<H: Host> Mana<H> {
    /// Pins a ring, which the kernel passes to the device as whole pages.
    fn pin_ring(&self, call: &Call<'_, H>, what: &str, address: u64, bytes: u32) -> Result<H::Region, Errno> {
        let name = self.name();
        let bytes = u64::from(bytes);
        if !address.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) || !bytes.is_power_of_two() {
            let why = format_args!(
                "{name}: {what} ring of {bytes} bytes at {address:#x}: it must be page-aligned, its size a power of two"
            )
            .to_string();
            return Err(call.refuse(Errno::INVAL, why));
        }
        call.host.pin(address, bytes, true).map_err(|errno| {
            call.refuse(errno, format_args!("{name}: {what} ring at {address:#x} is not completely mapped writable"))
        })
    }

    fn port_index(&self, call: &Call<'_, H>, port: u32) -> Result<usize, Errno> {
        let count = self.ports.len();
        match (port as usize).checked_sub(1).filter(|at| *at < count) {
            Some(at) => Ok(at),
            None => Err(call.refuse(
                Errno::INVAL,
                format_args!("{}: port {port} does not exist; ports are 1 to {count}", self.name()),
            )),
        }
    }

    /// Assigns a completion queue to a new queue, and returns its number. A completion queue can serve only
    /// one queue in its lifetime.
    fn assign_cq(&mut self, call: &Call<'_, H>, cq: ObjectId) -> Result<u32, Errno> {
        let name = self.spec.name.clone();
        let entry = self.cqs.get_mut(cq).ok_or(Errno::INVAL)?;
        if entry.used {
            return Err(call.refuse(
                Errno::INVAL,
                format_args!("{name}: the completion queue has served another queue already; each queue needs its own"),
            ));
        }
        let number = self.cq_numbers.alloc().ok_or(Errno::NOSPC)?;
        entry.used = true;
        entry.number = Some(number);
        self.by_cq.insert(number, cq);
        Ok(number)
    }

    fn release_cq(&mut self, cq: ObjectId) {
        if let Some(number) = self.cqs.get_mut(cq).and_then(|cq| cq.number.take()) {
            self.by_cq.remove(&number);
            self.cq_numbers.free(number);
        }
    }

    fn create_send_qp(&mut self, call: &mut Call<'_, H>, qp: &NewQp) -> Result<(ObjectId, u32, QpCap), Errno> {
        let (Some(send_cq), Some(_)) = (qp.send_cq, qp.recv_cq) else {
            return Err(
                call.refuse(Errno::INVAL, format_args!("{}: a raw queue pair without completion queue", self.name()))
            );
        };
        let part: abi::CreateQp = driver_part(call.input)?;
        let limit = self.spec.max_queue;
        if qp.cap.max_send_wr > limit || qp.cap.max_send_wr == 0 || qp.cap.max_send_sge > MAX_SEND_SGE {
            let why = format!(
                "{}: {} send requests with {} entries each; at most {limit} with {MAX_SEND_SGE}",
                self.name(),
                qp.cap.max_send_wr,
                qp.cap.max_send_sge
            );
            return Err(call.refuse(Errno::INVAL, why));
        }
        let at = self.port_index(call, part.port)?;
        if let Some(errno) = self.ports[at].kernel_errno {
            return Err(call.refuse(
                errno,
                format_args!("{}: port {} is held by the kernel's own driver", self.name(), part.port),
            ));
        }
        if self.ports[at].claim.is_some_and(|(pd, _)| pd != qp.pd) {
            let why = format!("{}: port {} is used by another protection domain", self.name(), part.port);
            return Err(call.refuse(Errno::BUSY, why));
        }
        let ring = self.pin_ring(call, "send", part.sq_buf_addr, part.sq_buf_size)?;
        let number = self.sq_numbers.alloc().ok_or(Errno::NOSPC)?;
        let cq_number = self.assign_cq(call, send_cq).inspect_err(|_| self.sq_numbers.free(number))?;
        let sq = self.sqs.add(Sq {
            number,
            work: WorkQueue::new(ring, part.sq_buf_size, call.context, qp.pd),
            cq: send_cq,
            cq_number,
            port: at,
            sent: 0,
            sent_bytes: 0,
            errors: 0,
            completions: 0,
        });
        self.by_sq.insert(number, sq);
        let users = self.ports[at].claim.map_or(0, |(_, users)| users);
        self.ports[at].claim = Some((qp.pd, users + 1));
        let reply =
            abi::CreateQpReply { sqid: number, cqid: cq_number, tx_vp_offset: self.ports[at].vport, reserved: 0 };
        call.output = reply.as_bytes().to_vec();
        let id = self.qps.add(Qp::Send { pd: qp.pd, port: at, sq, cq: send_cq });
        Ok((id, number, qp.cap))
    }

    fn create_rss_qp(
        &mut self,
        call: &mut Call<'_, H>,
        qp: &NewQp,
        table: ObjectId,
    ) -> Result<(ObjectId, u32, QpCap), Errno> {
        let part: abi::CreateRssQp = driver_part(call.input)?;
        let name = self.spec.name.clone();
        if part.rx_hash_function != abi::HASH_TOEPLITZ || part.rx_hash_key_len as usize != abi::KEY_BYTES {
            let why = format!(
                "{name}: unsupported hash function {} with a key of {} bytes",
                part.rx_hash_function, part.rx_hash_key_len
            );
            return Err(call.refuse(Errno::INVAL, why));
        }
        let at = self.port_index(call, part.port)?;
        if let Some(errno) = self.ports[at].kernel_errno {
            return Err(
                call.refuse(errno, format_args!("{name}: port {} is held by the kernel's own driver", part.port))
            );
        }
        let wqs = self.tables.get(table).ok_or(Errno::INVAL)?.clone();
        // A work queue belongs to one RSS queue pair, which creates it and its completion queue in the
        // device.
        for (i, wq) in wqs.iter().enumerate() {
            let rq = self.rqs.get(*wq).ok_or(Errno::INVAL)?;
            if rq.users > 0 {
                return Err(call.refuse(
                    Errno::INVAL,
                    format_args!("{name}: entry {i}: the work queue belongs to another queue pair"),
                ));
            }
        }
        let mut reply = abi::RssReply::new_zeroed();
        let mut made: Vec<ObjectId> = Vec::new();
        for (i, wq) in wqs.iter().enumerate() {
            if !made.contains(wq) {
                let cq = self.rqs.get(*wq).ok_or(Errno::INVAL)?.cq;
                let number = self.assign_cq(call, cq).and_then(|_| self.rq_numbers.alloc().ok_or(Errno::NOSPC));
                let number = match number {
                    Ok(number) => number,
                    Err(errno) => {
                        for wq in made {
                            self.release_wq(wq);
                        }
                        return Err(errno);
                    }
                };
                self.by_rq.insert(number, *wq);
                if let Some(rq) = self.rqs.get_mut(*wq) {
                    rq.number = Some(number);
                    rq.users = 1;
                }
                made.push(*wq);
            }
            let rq = self.rqs.get(*wq).ok_or(Errno::INVAL)?;
            let cqid = self.cqs.get(rq.cq).and_then(|cq| cq.number).unwrap_or_default();
            reply.entries[i] = abi::RssEntry { cqid, wqid: rq.number.unwrap_or_default() };
        }
        reply.num_entries = wqs.len() as u64;
        call.output = reply.as_bytes().to_vec();
        let rss = Rss {
            port: at,
            table: std::array::from_fn(|i| wqs[i % wqs.len()]),
            single_queue: wqs.first().copied().filter(|first| wqs.iter().all(|wq| wq == first)),
            hash: Toeplitz::new(&part.rx_hash_key),
            fields: part.rx_hash_fields_mask,
        };
        let id = self.qps.add(Qp::Rss(Box::new(CachePadded(rss))));
        if self.ports[at].steering.replace(id).is_some() {
            call.log.line(format_args!("{name}: port {}: a second RSS queue pair replaces the first", part.port));
        }
        Ok((id, 0xff_ffff, qp.cap))
    }

    /// Removes a work queue of an RSS queue pair from the device.
    fn release_wq(&mut self, wq: ObjectId) {
        let Some(rq) = self.rqs.get_mut(wq) else { return };
        rq.users = 0;
        let cq = rq.cq;
        if let Some(number) = rq.number.take() {
            self.by_rq.remove(&number);
            self.rq_numbers.free(number);
        }
        self.release_cq(cq);
    }
}

impl<H: Host> Device<H> for Mana<H> {
    fn driver(&self) -> u32 {
        uverbs::DRIVER_MANA
    }

    fn vectors(&self) -> u32 {
        self.vectors
    }

    fn abi(&self) -> u64 {
        abi::ABI_VERSION
    }

    fn spec(&self) -> &DeviceSpec {
        &self.spec
    }

    fn query(&self) -> write::ExtendedQueryDeviceReply {
        let mut reply = identity::device_reply(&self.spec, VENDOR, PART, MOST);
        reply.base.max_mr_size = u64::MAX >> 1;
        reply.base.page_size_cap = 0x0000_0000_001f_f000;
        reply.base.device_cap_flags = uverbs::DEVICE_RC_RNR_NAK_GEN as u32;
        reply.base.max_sge = MAX_SEND_SGE;
        reply.base.max_cqe = self.spec.max_queue;
        reply.device_cap_flags_ex = u64::from(reply.base.device_cap_flags);
        reply.raw_packet_caps = uverbs::RAW_PACKET_CAP_IP_CSUM;
        reply
    }

    fn query_port(&self, port: u8) -> Option<ioctl::QueryPortReply> {
        let at = usize::from(port).checked_sub(1)?;
        let (spec, state) = (self.spec.ports.get(at)?, self.ports.get(at)?);
        Some(identity::port_reply(spec.mtu, state.up, 0x0100_0000))
    }

    fn open(&mut self, call: &mut Call<'_, H>) -> Result<(), Errno> {
        match self.contexts.entry(call.context) {
            Entry::Vacant(entry) => {
                entry.insert(false);
                Ok(())
            }
            Entry::Occupied(_) => Err(Errno::INVAL),
        }
    }

    fn close(&mut self, context: ContextId) {
        self.contexts.remove(&context);
    }

    fn map(&mut self, log: &Log, _context: ContextId, offset: u64, length: usize) -> Result<Mapping, Errno> {
        if offset != 0 || length != DOORBELL_PAGE {
            log.line(format_args!(
                "{}: mmap of {length} bytes at {offset:#x}; the doorbell page is {DOORBELL_PAGE} bytes at 0",
                self.name()
            ));
            return Err(Errno::INVAL);
        }
        Ok(Mapping::Doorbells(0))
    }

    fn alloc_pd(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno> {
        Ok(self.pds.add(call.context))
    }

    fn dealloc_pd(&mut self, pd: ObjectId) {
        self.pds.remove(pd);
    }

    fn reg_mr(
        &mut self,
        call: &mut Call<'_, H>,
        pd: ObjectId,
        region: H::Region,
        iova: u64,
        access: u32,
    ) -> Result<(ObjectId, u32, u32), Errno> {
        let allowed = uverbs::ACCESS_LOCAL_WRITE
            | uverbs::ACCESS_REMOTE_WRITE
            | uverbs::ACCESS_REMOTE_READ
            | uverbs::ACCESS_REMOTE_ATOMIC
            | uverbs::ACCESS_ZERO_BASED;
        if access & !allowed & (uverbs::ACCESS_OPTIONAL_FIRST - 1) != 0 {
            return Err(
                call.refuse(Errno::INVAL, format_args!("{}: unsupported access flags {access:#x}", self.name()))
            );
        }
        let (id, key) = self.keys.add(region, iova, pd, access);
        Ok((id, key, key))
    }

    fn query_mr(&self, mr: ObjectId) -> Option<(u32, u32, u64)> {
        self.keys.key_and_length(mr).map(|(key, length)| (key, key, length))
    }

    fn dereg_mr(&mut self, mr: ObjectId) {
        self.keys.remove(mr);
    }

    fn create_cq(&mut self, call: &mut Call<'_, H>, cq: &NewCq) -> Result<(ObjectId, u32), Errno> {
        // Older libraries send only the address.
        if call.input.len() < 8 {
            return Err(Errno::INVAL);
        }
        let mut part = abi::CreateCq::new_zeroed();
        let size = call.input.len().min(size_of::<abi::CreateCq>());
        part.as_mut_bytes()[..size].copy_from_slice(&call.input[..size]);
        if part.flags & abi::CREATE_RNIC_CQ != 0 {
            return Err(call.refuse(
                Errno::OPNOTSUPP,
                format_args!("{}: queues of the RDMA function are not emulated", self.name()),
            ));
        }
        if cq.entries > self.spec.max_queue {
            let why = format!("{}: {} completion entries; at most {}", self.name(), cq.entries, self.spec.max_queue);
            return Err(call.refuse(Errno::INVAL, why));
        }
        let bytes = (cq.entries * CQE_BYTES).next_power_of_two().max(PAGE as u32);
        let ring = self.pin_ring(call, "completion", part.buf_addr, bytes)?;
        if call.room > 0 {
            call.output = abi::CreateCqReply { cqid: u32::MAX, reserved: 0 }.as_bytes().to_vec();
        }
        Ok((self.cqs.add(Cq::new(ring, cq.entries, cq.owner)), cq.entries))
    }

    fn destroy_cq(&mut self, cq: ObjectId) {
        self.release_cq(cq);
        self.cqs.remove(cq);
    }

    fn create_qp(&mut self, call: &mut Call<'_, H>, qp: &NewQp) -> Result<(ObjectId, u32, QpCap), Errno> {
        qp.check_raw_packet(call, self.name())?;
        match qp.table {
            Some(table) => self.create_rss_qp(call, qp, table),
            None => self.create_send_qp(call, qp),
        }
    }

    fn modify_qp(
        &mut self,
        call: &mut Call<'_, H>,
        _qp: ObjectId,
        _mask: u32,
        _state: u8,
        _port: u8,
    ) -> Result<(), Errno> {
        Err(call.refuse(Errno::OPNOTSUPP, format_args!("{}: raw queue pairs have no states", self.name())))
    }

    fn destroy_qp(&mut self, qp: ObjectId) {
        match self.qps.remove(qp) {
            Some(Qp::Send { pd, port, sq, cq }) => {
                if let Some(sq) = self.sqs.remove(sq) {
                    self.by_sq.remove(&sq.number);
                    self.sq_numbers.free(sq.number);
                }
                self.release_cq(cq);
                let claim = &mut self.ports[port].claim;
                *claim = claim.filter(|(by, users)| *by == pd && *users > 1).map(|(by, users)| (by, users - 1));
            }
            Some(Qp::Rss(rss)) => {
                for wq in rss.table {
                    self.release_wq(wq);
                }
                let steering = &mut self.ports[rss.port].steering;
                if *steering == Some(qp) {
                    *steering = None;
                }
            }
            None => {}
        }
    }

    fn create_wq(&mut self, call: &mut Call<'_, H>, wq: &NewWq) -> Result<(ObjectId, u32), Errno> {
        let part: abi::CreateWq = driver_part(call.input)?;
        if wq.max_wr > self.spec.max_queue || wq.max_sge > MAX_RECV_SGE {
            let why = format!(
                "{}: {} receive requests with {} entries each; at most {} with {MAX_RECV_SGE}",
                self.name(),
                wq.max_wr,
                wq.max_sge,
                self.spec.max_queue
            );
            return Err(call.refuse(Errno::INVAL, why));
        }
        if wq.flags != 0 {
            return Err(call.refuse(
                Errno::OPNOTSUPP,
                format_args!("{}: unsupported work queue flags {:#x}", self.name(), wq.flags),
            ));
        }
        let ring = self.pin_ring(call, "receive", part.wq_buf_addr, part.wq_buf_size)?;
        let id = self.rqs.add(Rq {
            number: None,
            work: WorkQueue::new(ring, part.wq_buf_size, call.context, wq.pd),
            cq: wq.cq,
            owner: wq.owner,
            max_sge: wq.max_sge,
            users: 0,
            pending: PendingCqe::default(),
            received: 0,
            received_bytes: 0,
            no_buffer: 0,
            truncated: 0,
            errors: 0,
        });
        Ok((id, 0))
    }

    fn modify_wq(&mut self, call: &mut Call<'_, H>, _wq: ObjectId, _mask: u32, _state: u32) -> Result<(), Errno> {
        Err(call.refuse(Errno::OPNOTSUPP, format_args!("{}: work queues have no states", self.name())))
    }

    fn destroy_wq(&mut self, wq: ObjectId) {
        self.release_wq(wq);
        self.rqs.remove(wq);
    }

    fn create_table(&mut self, call: &mut Call<'_, H>, wqs: &[ObjectId]) -> Result<ObjectId, Errno> {
        if wqs.len() > TABLE {
            let why = format!("{}: an indirection table of {} entries; at most {TABLE}", self.name(), wqs.len());
            return Err(call.refuse(Errno::INVAL, why));
        }
        Ok(self.tables.add(wqs.to_vec()))
    }

    fn destroy_table(&mut self, table: ObjectId) {
        self.tables.remove(table);
    }

    fn doorbell(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) -> bool {
        if self.contexts.get(&context) != Some(&false) {
            return false;
        }
        Mana::ring(self, env, context, store);
        Mana::transmit(self, env)
    }

    fn work(&mut self, env: &mut Env<'_>) -> bool {
        Mana::transmit(self, env)
    }

    fn receive(&mut self, env: &mut Env<'_>, port: usize, frames: &[&[u8]], lossless: bool) -> usize {
        self.receive_frames(env, port, frames, lossless)
    }

    fn flush(&mut self, env: &mut Env<'_>) {
        self.end_burst(env);
    }

    fn fault(&mut self, env: &mut Env<'_>, kind: &FaultKind) {
        let at = |port: u8| usize::from(port) - 1;
        match *kind {
            FaultKind::PortHeld { port, errno } => self.ports[at(port)].kernel_errno = Some(errno),
            FaultKind::PortFreed { port } => self.ports[at(port)].kernel_errno = None,
            FaultKind::Link { port, up } => set_link(&mut self.ports[at(port)].up, port, up, env.events),
            FaultKind::DeviceFatal => {
                self.reset();
                env.events.push(Event::Device(uverbs::EVENT_DEVICE_FATAL));
            }
            FaultKind::FailCommand { .. } | FaultKind::CompletionError { .. } | FaultKind::CorruptCqe { .. } => return,
        }
        env.log.line(format_args!("{}: injected fault: {kind}", self.spec.name));
    }

    fn is_dead(&self, context: ContextId) -> bool {
        self.contexts.get(&context) == Some(&true)
    }

    fn counters(&self) -> serde_json::Value {
        let sqs: Vec<_> = self
            .sqs
            .iter()
            .map(|(_, sq)| {
                serde_json::json!({
                    "number": sq.number, "port": sq.port + 1, "packets": sq.sent, "bytes": sq.sent_bytes,
                    "errors": sq.errors, "completions": sq.completions, "doorbells": sq.work.doorbells,
                    "stopped": sq.work.stopped,
                })
            })
            .collect();
        let rqs: Vec<_> = self
            .rqs
            .iter()
            .map(|(_, rq)| {
                serde_json::json!({
                    "number": rq.number, "packets": rq.received, "bytes": rq.received_bytes,
                    "no_buffer": rq.no_buffer, "truncated": rq.truncated, "errors": rq.errors,
                    "doorbells": rq.work.doorbells,
                    "stopped": rq.work.stopped,
                })
            })
            .collect();
        let ports: Vec<_> = self
            .ports
            .iter()
            .enumerate()
            .map(|(at, port)| {
                let c = &port.counters;
                serde_json::json!({
                    "port": at + 1, "up": port.up, "received": c.received, "received_bytes": c.received_bytes,
                    "sent": c.sent, "sent_bytes": c.sent_bytes, "other_address": c.other_address,
                    "no_steering": c.no_steering, "no_buffer": c.no_buffer,
                })
            })
            .collect();
        serde_json::json!({
            "name": self.spec.name, "ports": ports, "send_queues": sqs, "receive_queues": rqs, "resets": self.resets,
            "stray_doorbells": self.stray_doorbells,
            "completions": self.cqs.iter().map(|(_, cq)| cq.produced).sum::<u64>(),
            "rings_bytes": self.sqs.iter().map(|(_, sq)| sq.work.ring.length()).sum::<u64>()
                + self.rqs.iter().map(|(_, rq)| rq.work.ring.length()).sum::<u64>(),
        })
    }
}
