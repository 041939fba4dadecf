//! Commands of the write form, from `write(2)` or wrapped in an ioctl.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::write as abi;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::request::{CreateQp, CreateWq, Reply, Request};
use crate::device::QpCap;

/// The parts of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) command: u32,
    pub(super) extended: bool,
    /// Address of the reply; 0 if the command has none.
    pub(super) response: u64,
    /// Length of the core part, which starts at `core_at`.
    pub(super) core: usize,
    pub(super) core_at: usize,
    /// Length of the driver part, which follows the core part.
    pub(super) driver: usize,
    /// Capacities for the core reply and the driver's reply.
    pub(super) core_out: usize,
    pub(super) driver_out: usize,
}

fn prefix<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(bytes).map_err(|_| Errno::INVAL)
}

/// Returns the lengths of the core structure of a plain command and of its reply. The command itself does not
/// contain them.
fn plain_sizes(command: u32) -> Option<(usize, usize)> {
    Some(match command {
        abi::GET_CONTEXT => (size_of::<abi::GetContext>(), size_of::<abi::GetContextReply>()),
        abi::QUERY_DEVICE => (size_of::<abi::QueryDevice>(), size_of::<abi::QueryDeviceReply>()),
        abi::QUERY_PORT => (size_of::<abi::QueryPort>(), size_of::<abi::QueryPortReply>()),
        abi::ALLOC_PD => (size_of::<abi::AllocPd>(), size_of::<abi::AllocPdReply>()),
        abi::DEALLOC_PD => (size_of::<abi::DeallocPd>(), 0),
        abi::REG_MR => (size_of::<abi::RegMr>(), size_of::<abi::RegMrReply>()),
        abi::DEREG_MR => (size_of::<abi::DeregMr>(), 0),
        abi::CREATE_COMP_CHANNEL => (size_of::<abi::CreateCompChannel>(), size_of::<abi::CreateCompChannelReply>()),
        abi::CREATE_CQ => (size_of::<abi::CreateCq>(), size_of::<abi::CreateCqReply>()),
        abi::DESTROY_CQ => (size_of::<abi::DestroyCq>(), size_of::<abi::DestroyCqReply>()),
        abi::REQ_NOTIFY_CQ => (8, 0),
        abi::CREATE_QP => (size_of::<abi::CreateQp>(), size_of::<abi::CreateQpReply>()),
        abi::QUERY_QP => (16, 128),
        abi::MODIFY_QP => (size_of::<abi::ModifyQp>(), 0),
        abi::DESTROY_QP => (size_of::<abi::DestroyQp>(), size_of::<abi::DestroyQpReply>()),
        _ => return None,
    })
}

/// Decodes the headers of a `write(2)`.
///
/// # Errors
/// `EINVAL` for contradictory lengths; `EOPNOTSUPP` for unknown commands.
pub(super) fn parts(bytes: &[u8]) -> Result<Parts, Errno> {
    let (header, rest) = prefix::<abi::CommandHeader>(bytes)?;
    let head = size_of::<abi::CommandHeader>();
    if header.command & abi::EXTENDED != 0 {
        let (extended, _) = prefix::<abi::ExtendedHeader>(rest)?;
        let core_at = head + size_of::<abi::ExtendedHeader>();
        let (core, driver) = (usize::from(header.in_words) * 8, usize::from(extended.provider_in_words) * 8);
        let (core_out, driver_out) = (usize::from(header.out_words) * 8, usize::from(extended.provider_out_words) * 8);
        if core_at + core + driver != bytes.len() || extended.cmd_hdr_reserved != 0 {
            return Err(Errno::INVAL);
        }
        if extended.response == 0 && core_out + driver_out > 0 {
            return Err(Errno::INVAL);
        }
        let command = header.command & 0xff;
        return Ok(Parts {
            command,
            extended: true,
            response: extended.response,
            core,
            core_at,
            driver,
            core_out,
            driver_out,
        });
    }
    if usize::from(header.in_words) * 4 != bytes.len() || header.command > 0xff {
        return Err(Errno::INVAL);
    }
    let (core, reply) = plain_sizes(header.command).ok_or(Errno::OPNOTSUPP)?;
    let out = usize::from(header.out_words) * 4;
    if bytes.len() < head + core {
        return Err(Errno::INVAL);
    }
    if out < reply {
        return Err(Errno::NOSPC);
    }
    // The first field of a command with a reply is the address of the reply.
    let response = if reply > 0 { prefix::<u64>(rest)?.0 } else { 0 };
    Ok(Parts {
        command: header.command,
        extended: false,
        response,
        core,
        core_at: head,
        driver: bytes.len() - head - core,
        core_out: reply,
        driver_out: out - reply,
    })
}

/// Decodes the core structure of a command.
///
/// # Errors
/// `EINVAL` for truncated structures; `EOPNOTSUPP` for unknown commands.
pub(super) fn decode(command: u32, extended: bool, core: &[u8]) -> Result<Request, Errno> {
    if extended {
        return decode_extended(command, core);
    }
    Ok(match command {
        abi::GET_CONTEXT => Request::GetContext,
        abi::QUERY_DEVICE => Request::QueryDevice,
        abi::QUERY_PORT => Request::QueryPort { port: prefix::<abi::QueryPort>(core)?.0.port_num },
        abi::ALLOC_PD => Request::AllocPd,
        abi::DEALLOC_PD => Request::DeallocPd { pd: prefix::<abi::DeallocPd>(core)?.0.pd_handle },
        abi::REG_MR => {
            let (mr, _) = prefix::<abi::RegMr>(core)?;
            Request::RegMr {
                pd: mr.pd_handle,
                start: mr.start,
                length: mr.length,
                iova: mr.hca_va,
                access: mr.access_flags,
            }
        }
        abi::DEREG_MR => Request::DeregMr { mr: prefix::<abi::DeregMr>(core)?.0.mr_handle },
        abi::CREATE_COMP_CHANNEL => Request::CreateCompChannel,
        abi::CREATE_CQ => {
            let (cq, _) = prefix::<abi::CreateCq>(core)?;
            let channel = (cq.comp_channel >= 0).then_some(cq.comp_channel);
            Request::CreateCq { user_handle: cq.user_handle, cqe: cq.cqe, vector: cq.comp_vector, channel, flags: 0 }
        }
        abi::DESTROY_CQ => Request::DestroyCq { cq: prefix::<abi::DestroyCq>(core)?.0.cq_handle },
        abi::REQ_NOTIFY_CQ => Request::ReqNotifyCq { cq: prefix::<u32>(core)?.0 },
        abi::CREATE_QP => {
            let (qp, _) = prefix::<abi::CreateQp>(core)?;
            if qp.is_srq != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            Request::CreateQp(CreateQp {
                user_handle: qp.user_handle,
                pd: qp.pd_handle,
                send_cq: Some(qp.send_cq_handle),
                recv_cq: Some(qp.recv_cq_handle),
                table: None,
                kind: u32::from(qp.qp_type),
                flags: 0,
                cap: QpCap {
                    max_send_wr: qp.max_send_wr,
                    max_recv_wr: qp.max_recv_wr,
                    max_send_sge: qp.max_send_sge,
                    max_recv_sge: qp.max_recv_sge,
                    max_inline: qp.max_inline_data,
                },
            })
        }
        abi::QUERY_QP => Request::QueryQp { qp: prefix::<[u32; 4]>(core)?.0[2] },
        abi::MODIFY_QP => modify_qp(core)?,
        abi::DESTROY_QP => Request::DestroyQp { qp: prefix::<abi::DestroyQp>(core)?.0.qp_handle },
        _ => return Err(Errno::OPNOTSUPP),
    })
}

fn modify_qp(core: &[u8]) -> Result<Request, Errno> {
    let (qp, _) = prefix::<abi::ModifyQp>(core)?;
    Ok(Request::ModifyQp { qp: qp.qp_handle, mask: qp.attr_mask, state: qp.qp_state, port: qp.port_num })
}

fn decode_extended(command: u32, core: &[u8]) -> Result<Request, Errno> {
    Ok(match command {
        abi::QUERY_DEVICE => {
            let (query, _) = prefix::<abi::ExtendedQueryDevice>(core)?;
            if query.comp_mask != 0 || query.reserved != 0 {
                return Err(Errno::INVAL);
            }
            Request::QueryDeviceExtended
        }
        abi::CREATE_CQ => {
            let (cq, _) = prefix::<abi::ExtendedCreateCq>(core)?;
            if cq.comp_mask != 0 || cq.reserved != 0 {
                return Err(Errno::INVAL);
            }
            let channel = (cq.comp_channel >= 0).then_some(cq.comp_channel);
            Request::CreateCq {
                user_handle: cq.user_handle,
                cqe: cq.cqe,
                vector: cq.comp_vector,
                channel,
                flags: cq.flags,
            }
        }
        abi::CREATE_QP => {
            let (qp, _) = prefix::<abi::ExtendedCreateQp>(core)?;
            if qp.is_srq != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            if qp.comp_mask & !abi::CREATE_QP_MASK_IND_TABLE != 0 || qp.reserved != 0 {
                return Err(Errno::INVAL);
            }
            let table = (qp.comp_mask & abi::CREATE_QP_MASK_IND_TABLE != 0).then_some(qp.rwq_ind_tbl_handle);
            let cq = |handle| table.is_none().then_some(handle);
            Request::CreateQp(CreateQp {
                user_handle: qp.user_handle,
                pd: qp.pd_handle,
                send_cq: cq(qp.send_cq_handle),
                recv_cq: cq(qp.recv_cq_handle),
                table,
                kind: u32::from(qp.qp_type),
                flags: qp.create_flags,
                cap: QpCap {
                    max_send_wr: qp.max_send_wr,
                    max_recv_wr: qp.max_recv_wr,
                    max_send_sge: qp.max_send_sge,
                    max_recv_sge: qp.max_recv_sge,
                    max_inline: qp.max_inline_data,
                },
            })
        }
        abi::MODIFY_QP => modify_qp(core)?,
        abi::CREATE_FLOW => {
            let (flow, specs) = prefix::<abi::CreateFlow>(core)?;
            if flow.comp_mask != 0 {
                return Err(Errno::INVAL);
            }
            let size = usize::from(u16::from_le_bytes([flow.flow_attr[4], flow.flow_attr[5]]));
            let specs = specs.get(..size).ok_or(Errno::INVAL)?;
            Request::CreateFlow { qp: flow.qp_handle, attribute: flow.flow_attr, specs: specs.to_vec() }
        }
        abi::DESTROY_FLOW => Request::DestroyFlow { flow: prefix::<abi::DestroyFlow>(core)?.0.flow_handle },
        abi::CREATE_WQ => {
            let (wq, _) = prefix::<abi::CreateWq>(core)?;
            if wq.comp_mask != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            Request::CreateWq(CreateWq {
                user_handle: wq.user_handle,
                pd: wq.pd_handle,
                cq: wq.cq_handle,
                kind: wq.wq_type,
                max_wr: wq.max_wr,
                max_sge: wq.max_sge,
                flags: wq.create_flags,
            })
        }
        abi::MODIFY_WQ => {
            let (wq, _) = prefix::<abi::ModifyWq>(core)?;
            Request::ModifyWq {
                wq: wq.wq_handle,
                mask: wq.attr_mask,
                state: wq.wq_state,
                current: wq.curr_wq_state,
                flags: wq.flags,
                flags_mask: wq.flags_mask,
            }
        }
        abi::DESTROY_WQ => Request::DestroyWq { wq: prefix::<abi::DestroyWq>(core)?.0.wq_handle },
        abi::CREATE_RWQ_IND_TBL => {
            let (table, handles) = prefix::<abi::CreateIndirectionTable>(core)?;
            if table.comp_mask != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            if table.log_ind_tbl_size > abi::MAX_LOG_IND_TBL_SIZE {
                return Err(Errno::INVAL);
            }
            let bytes = handles.get(..4 << table.log_ind_tbl_size).ok_or(Errno::INVAL)?;
            let wqs = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            Request::CreateIndirectionTable { wqs }
        }
        abi::DESTROY_RWQ_IND_TBL => {
            Request::DestroyIndirectionTable { table: prefix::<abi::DestroyIndirectionTable>(core)?.0.ind_tbl_handle }
        }
        _ => return Err(Errno::OPNOTSUPP),
    })
}

/// Encodes the core structure of a reply.
pub(super) fn encode(extended: bool, reply: &Reply) -> Vec<u8> {
    match reply {
        // These replies are empty, or exist in the ioctl form only.
        Reply::Empty | Reply::GidTable(_) | Reply::Object { .. } | Reply::Counters(_) | Reply::Firmware { .. } => {
            Vec::new()
        }
        Reply::Context { async_fd, vectors } => {
            abi::GetContextReply { async_fd: async_fd.unwrap_or(-1) as u32, num_comp_vectors: *vectors }
                .as_bytes()
                .to_vec()
        }
        Reply::Device(device) if extended => device.as_bytes().to_vec(),
        Reply::Device(device) => device.base.as_bytes().to_vec(),
        Reply::Port(port) => port.legacy_resp.as_bytes().to_vec(),
        Reply::Descriptor(fd) => fd.as_bytes().to_vec(),
        Reply::Pd { pd } => pd.as_bytes().to_vec(),
        Reply::Mr { mr, lkey, rkey } => {
            abi::RegMrReply { mr_handle: *mr, lkey: *lkey, rkey: *rkey }.as_bytes().to_vec()
        }
        Reply::PdInfo { number } => number.as_bytes().to_vec(),
        Reply::MrInfo { lkey, rkey, .. } => [*lkey, *rkey].as_bytes().to_vec(),
        Reply::Cq { cq, cqe } => {
            let base = abi::CreateCqReply { cq_handle: *cq, cqe: *cqe };
            let length = size_of::<abi::ExtendedCreateCqReply>() as u32;
            if extended {
                abi::ExtendedCreateCqReply { base, comp_mask: 0, response_length: length }.as_bytes().to_vec()
            } else {
                base.as_bytes().to_vec()
            }
        }
        Reply::EventCounts { completions, others } => match extended {
            // Work queues are destroyed by an extended command, completion queues and queue pairs by plain
            // ones.
            true => {
                let length = size_of::<abi::DestroyWqReply>() as u32;
                let reply = abi::DestroyWqReply {
                    comp_mask: 0,
                    response_length: length,
                    events_reported: *others,
                    reserved: 0,
                };
                reply.as_bytes().to_vec()
            }
            false => [*completions, *others].as_bytes().to_vec(),
        },
        Reply::Qp { qp, number, cap } => {
            let base = abi::CreateQpReply {
                qp_handle: *qp,
                qpn: *number,
                max_send_wr: cap.max_send_wr,
                max_recv_wr: cap.max_recv_wr,
                max_send_sge: cap.max_send_sge,
                max_recv_sge: cap.max_recv_sge,
                max_inline_data: cap.max_inline,
                reserved: 0,
            };
            let length = size_of::<abi::ExtendedCreateQpReply>() as u32;
            if extended {
                abi::ExtendedCreateQpReply { base, comp_mask: 0, response_length: length }.as_bytes().to_vec()
            } else {
                base.as_bytes().to_vec()
            }
        }
        Reply::Wq { wq, max_wr, max_sge, number } => {
            let length = size_of::<abi::CreateWqReply>() as u32;
            let reply = abi::CreateWqReply {
                comp_mask: 0,
                response_length: length,
                wq_handle: *wq,
                max_wr: *max_wr,
                max_sge: *max_sge,
                wqn: *number,
            };
            reply.as_bytes().to_vec()
        }
        Reply::IndirectionTable { table, number } => {
            let length = size_of::<abi::CreateIndirectionTableReply>() as u32;
            let reply = abi::CreateIndirectionTableReply {
                comp_mask: 0,
                response_length: length,
                ind_tbl_handle: *table,
                ind_tbl_num: *number,
            };
            reply.as_bytes().to_vec()
        }
        Reply::Flow { flow } => abi::CreateFlowReply { comp_mask: 0, flow_handle: *flow }.as_bytes().to_vec(),
    }
}

/// Encodes the reply of a destroyed queue pair: it has one event count, while that of a completion queue has
/// two.
pub(super) fn destroy_qp_reply(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::EventCounts { others, .. } => abi::DestroyQpReply { events_reported: *others }.as_bytes().to_vec(),
        _ => Vec::new(),
    }
}
