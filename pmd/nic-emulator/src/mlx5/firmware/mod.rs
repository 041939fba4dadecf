//! Firmware commands of programs (DevX): the checks of `mlx5_ib`, and what the firmware does. Source: Linux
//! `drivers/infiniband/hw/mlx5/devx.c`, DPDK `drivers/common/mlx5/{mlx5_devx_cmds.c,mlx5_prm.h}`.
//!
//! A queue that a firmware command creates is the same object as one that a verb creates.

mod interfaces;

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{self as defs, CQE_BYTES, Command, CommandField, SEND_BLOCK};
use wirepath_nic_defs::uverbs::mlx5 as abi;
use zerocopy::{FromBytes, IntoBytes};

use super::completion::Cq;
use super::queues::{Layout, Rq, Sq, State};
use super::{MAX_TABLE, Mlx5, Qp};
use crate::StampFormat;
use crate::attributes::Attributes;
use crate::call::{Call, ContextId, EventTarget, ObjectId};
use crate::device::Device;
use crate::host::Host;
use crate::rules::FirmwareObjects;
use crate::topology::MinInline;

/// Handle in the event target of queues that no verb has created: their events reach no program.
const NO_HANDLE: u32 = u32::MAX;
/// Transport domain of the queues that verbs create.
const KERNEL_DOMAIN: u32 = 1;
/// Alignment of rings in registered memory: `page_offset` of a queue counts 64ths of a page of 4096 bytes (Linux
/// `drivers/infiniband/hw/mlx5/mem.c`, `mlx5_ib_get_buf_offset`). DPDK lays the rings of all send queues one after the
/// other in one memory (`drivers/net/mlx5/mlx5_trigger.c`), at multiples of 64 bytes.
const RING_ALIGNMENT: u64 = 64;
/// Maximum number of registered memories.
const MAX_UMEMS: usize = 1 << 16;

/// A firmware object.
#[derive(Debug)]
pub(super) struct Object {
    context: ContextId,
    /// Number in commands.
    number: u32,
    kind: Kind,
}

/// Kinds of firmware objects, with the number of the emulated object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    FlowCounters(ObjectId),
    Cq(ObjectId),
    Sq(ObjectId),
    Rq(ObjectId),
    Rqt {
        table: ObjectId,
        /// Maximum number of entries.
        max: usize,
    },
    Tir {
        qp: ObjectId,
        /// Table of receive queues. `None` for a single queue.
        table: Option<ObjectId>,
    },
    Tis,
    TransportDomain,
    QueueCounter,
}

/// Memory for queues.
#[derive(Debug)]
pub(super) struct Umem {
    pub(super) context: ContextId,
    address: u64,
    bytes: u64,
}

/// A reason to refuse a command.
type Refusal = String;

fn get(field: CommandField, command: &[u8]) -> u32 {
    field.get(command) as u32
}

fn get64(field: CommandField, command: &[u8]) -> u64 {
    field.get(command) as u64
}

/// Returns the output of a command that creates an object.
fn created(field: CommandField, number: u32) -> Vec<u8> {
    let mut answer = vec![0; defs::CREATE_OUT_BYTES];
    field.set(&mut answer, u128::from(number));
    answer
}

impl<H: Host> Mlx5<H> {
    /// Refuses a command, as the kernel does if the firmware reports a bad parameter.
    fn bad<T>(&self, call: &Call<'_, H>, opcode: u16, why: impl Into<Refusal>) -> Result<T, Errno> {
        let why = why.into();
        Err(call.refuse(Errno::INVAL, format_args!("{}: firmware command {opcode:#x}: {why}", self.name())))
    }

    /// Handles a general command.
    pub(super) fn general_command(
        &self,
        call: &mut Call<'_, H>,
        attributes: &mut Attributes<'_, H>,
    ) -> Result<(), Errno> {
        let input = attributes.bytes(abi::DEVX_OTHER_IN)?;
        let Ok((command, _)) = Command::read_from_prefix(&input) else { return Err(Errno::INVAL) };
        // The kernel needs a user object of the firmware, in the name of which it sends commands.
        if !self.spec.mlx5.steering.firmware {
            // Libraries and drivers work without.
            return Err(call.decline(Errno::OPNOTSUPP));
        }
        let answer = match command.opcode.get() {
            defs::QUERY_HCA_CAP => self.capabilities(command.modifier.get()),
            _ => None,
        };
        match answer {
            Some(answer) => attributes.put(abi::DEVX_OTHER_OUT, &answer),
            None => self.bad(call, command.opcode.get(), format!("modifier {:#x}", command.modifier)),
        }
    }

    /// Returns the output of `QUERY_HCA_CAP`. `None` for an unknown group.
    fn capabilities(&self, modifier: u16) -> Option<Vec<u8>> {
        use defs::{ethernet_capability as ethernet, flow_table_capability as table, general_capability as general};
        let mlx5 = &self.spec.mlx5;
        let mut output = vec![0; defs::QUERY_HCA_CAP_OUT_BYTES];
        let group = &mut output[defs::CAPABILITIES_OFFSET..];
        let mut set = |field: CommandField, value: u32| field.set(group, u128::from(value));
        // Maximum and current values are the same.
        match modifier >> 1 {
            defs::CAPABILITIES_GENERAL => {
                set(general::NIC_FLOW_TABLE, 1);
                set(general::ETH_NET_OFFLOADS, 1);
                let format = match mlx5.timestamps {
                    StampFormat::FreeRunning => defs::TIMESTAMPS_FREE_RUNNING,
                    StampFormat::RealTime => defs::TIMESTAMPS_REAL_TIME,
                };
                set(general::RQ_TS_FORMAT, format);
            }
            defs::CAPABILITIES_ETHERNET => {
                set(ethernet::CSUM_CAP, 1);
                set(ethernet::VLAN_CAP, 1);
                set(ethernet::WQE_VLAN_INSERT, 1);
                set(ethernet::MAX_LSO_CAP, mlx5.max_tso.checked_ilog2().unwrap_or(0));
                set(ethernet::MULTI_PKT_SEND_WQE, mlx5.multi_packet.into());
                set(ethernet::ENHANCED_MULTI_PKT_SEND_WQE, mlx5.multi_packet.into());
                let inline = match mlx5.min_inline {
                    MinInline::L2 => defs::INLINE_MODE_L2,
                    MinInline::None | MinInline::UnreportedL2 => defs::INLINE_MODE_NOT_REQUIRED,
                };
                set(ethernet::WQE_INLINE_MODE, inline.into());
                set(ethernet::RSS_IND_TBL_CAP, MAX_TABLE.ilog2());
                for field in [
                    ethernet::TUNNEL_STATELESS_GRE,
                    ethernet::TUNNEL_STATELESS_VXLAN,
                    ethernet::TUNNEL_STATELESS_GENEVE_RX,
                ] {
                    set(field, mlx5.tunnels.into());
                }
                for field in [ethernet::SWP, ethernet::SWP_CSUM, ethernet::SWP_LSO] {
                    set(field, mlx5.sw_parser.into());
                }
            }
            defs::CAPABILITIES_NIC_FLOW_TABLE => {
                set(table::MAX_ENCAP_HEADER, mlx5.steering.encap_bytes.min(0x3ff));
                set(table::RX_MODIFY_ACTIONS, mlx5.steering.modify_actions);
                set(table::TX_MODIFY_ACTIONS, mlx5.steering.modify_actions);
            }
            // The device has neither.
            defs::CAPABILITIES_ATOMIC | defs::CAPABILITIES_DEVICE_MEMORY => {}
            _ => return None,
        }
        Some(output)
    }

    /// Returns the number of the event queue of a completion vector.
    pub(super) fn query_eqn(&self, call: &Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        let vector = attributes.number(abi::DEVX_QUERY_EQN_VECTOR)?.ok_or(Errno::INVAL)?;
        if vector >= u64::from(self.vectors()) {
            return Err(call.refuse(Errno::INVAL, format_args!("{}: completion vector {vector}", self.name())));
        }
        // Event queue 0 is for asynchronous events.
        attributes.put(abi::DEVX_QUERY_EQN_NUMBER, (vector as u32 + 1).as_bytes())
    }

    /// Registers memory for queues.
    pub(super) fn reg_umem(&mut self, call: &Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        if !self.has_firmware_objects(call.context) {
            return Err(Errno::INVAL);
        }
        let address = attributes.number(abi::UMEM_REG_ADDRESS)?.ok_or(Errno::INVAL)?;
        let bytes = attributes.number(abi::UMEM_REG_LENGTH)?.ok_or(Errno::INVAL)?;
        if self.umems.len() >= MAX_UMEMS {
            return Err(Errno::NOMEM);
        }
        // Fails if it is not mapped.
        call.host.pin(address, bytes, true)?;
        let number = (1..).find(|number| !self.umems.contains_key(number)).ok_or(Errno::NOMEM)?;
        self.umems.insert(number, Umem { context: call.context, address, bytes });
        attributes.put_handle(abi::UMEM_REG_HANDLE, number.into());
        attributes.put(abi::UMEM_REG_NUMBER, number.as_bytes())
    }

    /// Deregisters memory for queues.
    pub(super) fn dereg_umem(&mut self, call: &Call<'_, H>, attributes: &Attributes<'_, H>) -> Result<(), Errno> {
        let number = attributes.handle(abi::UMEM_DEREG_HANDLE).ok_or(Errno::INVAL)?;
        match self.umems.get(&number) {
            Some(umem) if umem.context == call.context => {
                self.umems.remove(&number);
                Ok(())
            }
            _ => Err(Errno::NOENT),
        }
    }

    /// Returns the address of `bytes` bytes at an offset of registered memory.
    fn umem_address(&self, context: ContextId, umem: u32, offset: u64, bytes: u64) -> Result<u64, Refusal> {
        let found = self.umems.get(&umem).filter(|umem| umem.context == context);
        let memory = found.ok_or_else(|| format!("memory {umem} does not exist"))?;
        let end = offset.checked_add(bytes).filter(|end| *end <= memory.bytes);
        end.and_then(|_| memory.address.checked_add(offset))
            .ok_or_else(|| format!("{bytes} bytes at {offset:#x} of a memory of {}", memory.bytes))
    }

    /// Returns the completion queue with this number.
    fn cq_of(&self, context: ContextId, number: u32) -> Result<ObjectId, Refusal> {
        let id = self.by_cq.get(&number).copied();
        id.filter(|id| self.cqs.get(*id).is_some_and(|cq| cq.owner.context == context))
            .ok_or_else(|| format!("completion queue {number:#x} does not exist"))
    }

    /// Returns the receive queue with this number.
    fn rq_of(&self, context: ContextId, number: u32) -> Result<ObjectId, Refusal> {
        let found = self.rqs.iter().find(|(_, rq)| rq.number == number && rq.owner.context == context);
        found.map(|(id, _)| id).ok_or_else(|| format!("receive queue {number:#x} does not exist"))
    }

    /// Returns the protection domain with this number.
    fn pd_of(&self, context: ContextId, number: u32) -> Result<ObjectId, Refusal> {
        let id = number.checked_sub(1).filter(|id| self.pds.get(*id) == Some(&context));
        id.ok_or_else(|| format!("protection domain {number} does not exist"))
    }

    fn object_number(&self, context: ContextId, number: u32, is: impl Fn(Kind) -> bool) -> Option<Kind> {
        let all = self.firmware_objects.iter();
        let mut own = all.filter(|(_, object)| object.context == context && object.number == number);
        own.find(|(_, object)| is(object.kind)).map(|(_, object)| object.kind)
    }

    /// Returns the flow counters of an object.
    pub(super) fn counter_bulk(&self, object: ObjectId) -> Option<ObjectId> {
        match self.firmware_objects.get(object)?.kind {
            Kind::FlowCounters(bulk) => Some(bulk),
            _ => None,
        }
    }

    /// Returns the queue pair of a transport interface for received packets.
    pub(super) fn receive_interface(&self, object: ObjectId) -> Option<ObjectId> {
        match self.firmware_objects.get(object)?.kind {
            Kind::Tir { qp, .. } => Some(qp),
            _ => None,
        }
    }

    fn number(&mut self) -> Result<u32, Refusal> {
        self.queue_numbers.alloc().ok_or_else(|| "no more numbers".to_owned())
    }

    fn create_cq_object(&mut self, call: &Call<'_, H>, command: &[u8]) -> Result<(Kind, u32), Refusal> {
        use defs::create_cq as field;
        let (log_entries, size) = (get(field::LOG_ENTRIES, command), get(field::CQE_SIZE, command));
        if command.len() < field::BYTES || log_entries > 22 || size != 0 {
            return Err(format!("2^{log_entries} completions of size {size}"));
        }
        let compress = match (get(field::COMPRESS, command), get(field::MINI_FORMAT, command)) {
            (0, _) => None,
            _ if !self.spec.mlx5.compression => return Err("the device does not compress completions".to_owned()),
            (_, 0) => Some(defs::MINI_FORMAT_HASH),
            (_, 1) => Some(defs::MINI_FORMAT_CSUM),
            (_, 3) => Some(defs::MINI_FORMAT_CSUM_STRIDE),
            (_, format) => return Err(format!("format {format} of compressed completions")),
        };
        let bytes = (CQE_BYTES as u64) << log_entries;
        let (umem, offset) = (get(field::RING_UMEM, command), get64(field::RING_OFFSET, command));
        let ring = self.umem_address(call.context, umem, offset, bytes)?;
        let (umem, offset) = (get(field::RECORD_UMEM, command), get64(field::RECORD_OFFSET, command));
        let record = self.umem_address(call.context, umem, offset, 8)?;
        let ring = self.queue_ring(call, "completion ring", ring, bytes)?;
        let record = self.record(call, record).map_err(|errno| errno.to_string())?;
        let number = self.cq_numbers.alloc().ok_or_else(|| "no more numbers".to_owned())?;
        let owner = EventTarget { context: call.context, handle: NO_HANDLE };
        let id = self.cqs.add(Cq::new(number, ring, record, log_entries, compress, owner, self.scan));
        self.by_cq.insert(number, id);
        Ok((Kind::Cq(id), number))
    }

    /// Returns a ring in registered memory.
    fn queue_ring(&self, call: &Call<'_, H>, what: &str, address: u64, bytes: u64) -> Result<H::Region, Refusal> {
        if !address.is_multiple_of(RING_ALIGNMENT) {
            return Err(format!("{what} at {address:#x} is not aligned to {RING_ALIGNMENT} bytes"));
        }
        self.pin(call, what, address, bytes).map_err(|errno| errno.to_string())
    }

    /// Returns ring and doorbell records of a work queue with `bytes` bytes, and its protection domain.
    fn work_queue_memory(
        &self,
        call: &Call<'_, H>,
        command: &[u8],
        what: &str,
        bytes: u64,
    ) -> Result<(H::Region, H::Region, ObjectId), Refusal> {
        use defs::create_wq as field;
        let (umem, offset) = (get(field::RING_UMEM, command), get64(field::RING_OFFSET, command));
        let ring = self.umem_address(call.context, umem, offset, bytes)?;
        let (umem, offset) = (get(field::RECORD_UMEM, command), get64(field::RECORD_OFFSET, command));
        let record = self.umem_address(call.context, umem, offset, 8)?;
        let pd = self.pd_of(call.context, get(field::PD, command))?;
        let ring = self.queue_ring(call, what, ring, bytes)?;
        let record = self.record(call, record).map_err(|errno| errno.to_string())?;
        Ok((ring, record, pd))
    }

    fn create_sq_object(&mut self, call: &Call<'_, H>, command: &[u8]) -> Result<(Kind, u32), Refusal> {
        use defs::{create_sq as field, create_wq as wq};
        let (log_blocks, kind) = (get(wq::LOG_ENTRIES, command), get(wq::TYPE, command));
        let (log_stride, state) = (get(wq::LOG_STRIDE, command), get(field::STATE, command));
        let most = self.spec.max_queue.ilog2();
        if command.len() < field::BYTES
            || kind != u32::from(wq::TYPE_CYCLIC)
            || log_blocks > most
            || log_stride != SEND_BLOCK.ilog2()
            || state != u32::from(defs::QUEUE_RST)
        {
            return Err(format!("a send ring of type {kind}, 2^{log_blocks} blocks of 2^{log_stride}, state {state}"));
        }
        let tis = get(field::TIS, command);
        if self.object_number(call.context, tis, |kind| kind == Kind::Tis).is_none() {
            return Err(format!("transport interface {tis:#x} does not exist"));
        }
        let cq = self.cq_of(call.context, get(field::CQ, command))?;
        let bytes = u64::from(SEND_BLOCK) << log_blocks;
        let (ring, record, pd) = self.work_queue_memory(call, command, "send ring", bytes)?;
        let number = self.number()?;
        let owner = EventTarget { context: call.context, handle: NO_HANDLE };
        let user_index = get(field::USER_INDEX, command);
        let sq = Sq::new(number, user_index, (ring, 1 << log_blocks), record, cq, call.context, pd, owner);
        let id = self.sqs.add(sq);
        self.by_sq.insert(number, id);
        Ok((Kind::Sq(id), number))
    }

    fn create_rq_object(&mut self, call: &Call<'_, H>, command: &[u8]) -> Result<(Kind, u32), Refusal> {
        use defs::{create_rq as field, create_wq as wq};
        let (log_entries, log_entry) = (get(wq::LOG_ENTRIES, command), get(wq::LOG_STRIDE, command));
        let (state, memory) = (get(field::STATE, command), get(field::MEMORY_TYPE, command));
        if command.len() < field::BYTES
            || log_entries > self.spec.max_queue.ilog2()
            || !(4..=9).contains(&log_entry)
            || state != u32::from(defs::QUEUE_RST)
            || memory != 0
            || get(field::SCATTER_FCS, command) != 0
        {
            return Err(format!(
                "a receive ring of 2^{log_entries} entries of 2^{log_entry} bytes, state {state}, memory {memory}"
            ));
        }
        let layout = match get(wq::TYPE, command) {
            kind if kind == u32::from(wq::TYPE_CYCLIC) => Layout::Linear,
            kind if kind == u32::from(wq::TYPE_CYCLIC_STRIDING) && self.spec.mlx5.striding => {
                // The value counts from 9, in two's complement of four bits.
                let log_strides = get(wq::LOG_STRIDES, command).wrapping_add(8) % 16 + 1;
                let log_bytes = get(wq::LOG_STRIDE_BYTES, command) + 6;
                if log_strides < 3 || get(wq::TWO_BYTE_SHIFT, command) != 0 {
                    return Err(format!("2^{log_strides} strides of 2^{log_bytes} bytes"));
                }
                Layout::Striding { log_bytes, log_strides }
            }
            kind => return Err(format!("a receive ring of type {kind}")),
        };
        let cq = self.cq_of(call.context, get(field::CQ, command))?;
        let bytes = 1 << (log_entries + log_entry);
        let (ring, record, pd) = self.work_queue_memory(call, command, "receive ring", bytes)?;
        let number = self.number()?;
        let owner = EventTarget { context: call.context, handle: NO_HANDLE };
        let (index, strip) = (get(field::USER_INDEX, command), get(field::VLAN_STRIP_DISABLE, command) == 0);
        let ring = (ring, 1 << log_entries, log_entry);
        let id = self.rqs.add(Rq::new(number, index, ring, record, layout, strip, cq, pd, owner));
        Ok((Kind::Rq(id), number))
    }
}

impl<H: Host> FirmwareObjects<H> for Mlx5<H> {
    fn create_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        command: &[u8],
        room: usize,
    ) -> Result<(ObjectId, Vec<u8>), Errno> {
        let Ok((header, _)) = Command::read_from_prefix(command) else { return Err(Errno::INVAL) };
        let (opcode, context) = (header.opcode.get(), call.context);
        if opcode == defs::ALLOC_FLOW_COUNTER {
            let (bulk, answer) = self.alloc_bulk(command, room).or_else(|wrong| self.wrong(call, wrong))?;
            let kind = Kind::FlowCounters(bulk);
            return Ok((self.firmware_objects.add(Object { context, number: bulk, kind }), answer));
        }
        if room < defs::CREATE_OUT_BYTES {
            return self.bad(call, opcode, format!("{room} bytes for the output"));
        }
        let made = match opcode {
            defs::CREATE_CQ => self.create_cq_object(call, command),
            defs::CREATE_SQ => self.create_sq_object(call, command),
            defs::CREATE_RQ => self.create_rq_object(call, command),
            defs::CREATE_RQT => self.create_rqt_object(call, command),
            defs::CREATE_TIR => self.create_tir_object(call, command),
            defs::CREATE_TIS => self.number().map(|number| (Kind::Tis, number)),
            defs::ALLOC_TRANSPORT_DOMAIN => self.number().map(|number| (Kind::TransportDomain, number)),
            defs::ALLOC_Q_COUNTER => {
                let taken = |number| self.object_number(context, number, |kind| kind == Kind::QueueCounter).is_some();
                let number = (1..0x100).find(|number| !taken(*number));
                number.map(|number| (Kind::QueueCounter, number)).ok_or_else(|| "no more counters".to_owned())
            }
            _ => Err("not emulated".to_owned()),
        };
        let (kind, number) = match made {
            Ok(made) => made,
            Err(why) => return self.bad(call, opcode, why),
        };
        let field = if kind == Kind::QueueCounter { defs::ALLOCATED_Q_COUNTER } else { defs::CREATED_NUMBER };
        Ok((self.firmware_objects.add(Object { context, number, kind }), created(field, number)))
    }

    fn query_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        object: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno> {
        let Ok((header, _)) = Command::read_from_prefix(command) else { return Err(Errno::INVAL) };
        let kind = self.firmware_objects.get(object).map(|object| object.kind);
        match (kind, header.opcode.get()) {
            (Some(Kind::FlowCounters(bulk)), _) => {
                self.query_bulk(bulk, command, room).or_else(|wrong| self.wrong(call, wrong))
            }
            (Some(Kind::QueueCounter), defs::QUERY_Q_COUNTER) => {
                let own = self.rqs.iter().filter(|(_, rq)| rq.owner.context == call.context);
                let lost: u64 = own.map(|(_, rq)| rq.no_buffer).sum();
                let mut answer = vec![0; defs::QUERY_Q_COUNTER_OUT_BYTES];
                defs::OUT_OF_BUFFER.set(&mut answer, u128::from(lost));
                Ok(answer)
            }
            (_, opcode) => self.bad(call, opcode, "not a query of this object"),
        }
    }

    /// Answers queries of the transport interface of a send queue.
    fn query_queue_pair(
        &mut self,
        call: &mut Call<'_, H>,
        qp: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno> {
        let Ok((header, _)) = Command::read_from_prefix(command) else { return Err(Errno::INVAL) };
        let sq = match self.qps.get(qp) {
            Some(Qp::Send(sq)) => self.sqs.get(*sq),
            _ => None,
        };
        let number = get(defs::QUERIED_NUMBER, command);
        if header.opcode.get() != defs::QUERY_TIS || sq.is_none_or(|sq| sq.number != number) {
            return self.bad(call, header.opcode.get(), "not a query of this queue pair");
        }
        let mut answer = vec![0; defs::QUERY_TIS_OUT_BYTES.min(room)];
        defs::QUERIED_TRANSPORT_DOMAIN.set(&mut answer, u128::from(KERNEL_DOMAIN));
        Ok(answer)
    }

    fn modify_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        object: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno> {
        use defs::modify_queue as field;
        let Ok((header, _)) = Command::read_from_prefix(command) else { return Err(Errno::INVAL) };
        let opcode = header.opcode.get();
        let Some(&Object { number, kind, .. }) = self.firmware_objects.get(object) else { return Err(Errno::NOENT) };
        // The commands for all kinds of objects have at least this length, and the number at the same place.
        if command.len() < field::BYTES || get(field::NUMBER, command) != number {
            return self.bad(call, opcode, format!("a command of {} bytes for object {number:#x}", command.len()));
        }
        let state = get(field::STATE, command) as u8;
        match (kind, opcode) {
            (Kind::Sq(id), defs::MODIFY_SQ) => {
                let Some(sq) = self.sqs.get_mut(id) else { return Err(Errno::NOENT) };
                let next = match (sq.state, state) {
                    (State::Reset | State::Ready, defs::QUEUE_RDY) => State::Ready,
                    (_, defs::QUEUE_ERR) => State::Error,
                    (State::Reset | State::Error, defs::QUEUE_RST) => State::Reset,
                    (now, state) => {
                        return self.bad(call, opcode, format!("cannot change from {now:?} to state {state}"));
                    }
                };
                if next == State::Reset {
                    sq.reset();
                }
                sq.state = next;
            }
            (Kind::Rq(id), defs::MODIFY_RQ) => {
                // States of work queues in verbs have the same numbers, but for the error state.
                let verbs = if state == defs::QUEUE_ERR { 2 } else { u32::from(state) };
                self.modify_wq(call, id, 1, verbs)?;
            }
            (Kind::Rqt { table, max }, defs::MODIFY_RQT) => {
                if let Err(why) = self.modify_rqt(call.context, (table, max), command) {
                    return self.bad(call, opcode, why);
                }
            }
            (Kind::Tir { qp, table }, defs::MODIFY_TIR) => {
                let table = match self.modify_tir(call.context, (qp, table), command) {
                    Ok(table) => table,
                    Err(why) => return self.bad(call, opcode, why),
                };
                if let Some(object) = self.firmware_objects.get_mut(object) {
                    object.kind = Kind::Tir { qp, table };
                }
            }
            _ => return self.bad(call, opcode, "not emulated for this object"),
        }
        Ok(vec![0; defs::CREATE_OUT_BYTES.min(room)])
    }

    fn firmware_object_is_free(&self, call: &Call<'_, H>, object: ObjectId) -> Result<(), Errno> {
        let used = match self.firmware_objects.get(object).map(|object| object.kind) {
            Some(Kind::Cq(id)) => {
                self.sqs.iter().any(|(_, sq)| sq.cq == id) || self.rqs.iter().any(|(_, rq)| rq.cq == id)
            }
            Some(Kind::Rq(id)) => {
                let in_rss = |qp: &Qp| matches!(qp, Qp::Rss(rss) if rss.table.contains(&id));
                self.tables.iter().any(|(_, table)| table.contains(&id)) || self.qps.iter().any(|(_, qp)| in_rss(qp))
            }
            Some(Kind::Rqt { table: id, .. }) => {
                let uses = |kind| matches!(kind, Kind::Tir { table, .. } if table == Some(id));
                self.firmware_objects.iter().any(|(_, object)| uses(object.kind))
            }
            _ => false,
        };
        if used {
            let why = format_args!("{}: an object that others use is destroyed", self.name());
            return Err(call.refuse(Errno::INVAL, why));
        }
        Ok(())
    }

    fn destroy_firmware_object(&mut self, object: ObjectId) {
        let Some(Object { number, kind, .. }) = self.firmware_objects.remove(object) else { return };
        match kind {
            Kind::FlowCounters(bulk) => self.free_bulk(bulk),
            Kind::Cq(id) => self.destroy_cq(id),
            Kind::Sq(id) => self.remove_sq(id),
            Kind::Rq(id) => self.destroy_wq(id),
            Kind::Rqt { table, .. } => {
                self.destroy_table(table);
                self.queue_numbers.free(number);
            }
            Kind::Tir { qp, .. } => self.destroy_qp(qp),
            Kind::Tis | Kind::TransportDomain => self.queue_numbers.free(number),
            Kind::QueueCounter => {}
        }
    }

    fn has_firmware_objects(&self, context: ContextId) -> bool {
        self.contexts.get(&context).is_some_and(|context| context.firmware)
    }
}
