//! Commands of the ioctl form: decodes requests from attributes, and encodes replies.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::{DRIVER_MLX5, ioctl as abi, mlx5};
use zerocopy::IntoBytes;

use super::mlx5_steering_abi;
use super::request::{CreateQp, CreateWq, Reply, Request};
use crate::attributes::Attributes;
use crate::host::Host;

/// First number of driver-specific objects and methods.
const CORE_NAMES: u16 = 0x1000;

fn known(object: u16, method: u16) -> Option<&'static [u16]> {
    use abi::*;
    Some(match (object, method) {
        (OBJECT_DEVICE, QUERY_PORT) => &[QUERY_PORT_PORT_NUM, QUERY_PORT_RESP],
        (OBJECT_DEVICE, GET_CONTEXT) => &[GET_CONTEXT_NUM_COMP_VECTORS, GET_CONTEXT_CORE_SUPPORT, UHW_IN, UHW_OUT],
        (OBJECT_DEVICE, QUERY_CONTEXT) => &[GET_CONTEXT_NUM_COMP_VECTORS, GET_CONTEXT_CORE_SUPPORT, 0x1000],
        (OBJECT_DEVICE, QUERY_GID_TABLE) => &[0, 1, 2, 3],
        (OBJECT_DEVICE, QUERY_GID_ENTRY) => &[0, 1, 2, 3],
        (OBJECT_ASYNC_EVENT, ASYNC_EVENT_ALLOC) => &[ASYNC_EVENT_FD],
        (OBJECT_PD, PD_DESTROY) | (OBJECT_MR, MR_DESTROY) => &[0],
        (OBJECT_PD, mlx5::PD_QUERY) => &[mlx5::PD_QUERY_HANDLE, mlx5::PD_QUERY_PDN],
        (OBJECT_MR, QUERY_MR) => &[0, 1, 2, 3, 4],
        (OBJECT_CQ, CQ_CREATE) => &[0, 1, 2, 3, 4, 5, 6, 7, UHW_IN, UHW_OUT],
        (OBJECT_CQ, CQ_DESTROY) | (OBJECT_QP, QP_DESTROY) | (OBJECT_WQ, WQ_DESTROY) => &[0, 1],
        (OBJECT_QP, QP_CREATE) => &[0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, UHW_IN, UHW_OUT],
        (OBJECT_WQ, WQ_CREATE) => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, UHW_IN, UHW_OUT],
        (OBJECT_RWQ_IND_TBL, RWQ_IND_TBL_DESTROY) | (OBJECT_FLOW, FLOW_DESTROY) => &[0],
        (OBJECT_FLOW_ACTION, FLOW_ACTION_DESTROY) => &[0],
        (OBJECT_COUNTERS, COUNTERS_CREATE | COUNTERS_DESTROY) => &[0],
        (OBJECT_COUNTERS, COUNTERS_READ) => &[READ_COUNTERS_HANDLE, READ_COUNTERS_BUFFER, READ_COUNTERS_FLAGS],
        _ => return None,
    })
}

/// Decodes a command other than [`abi::INVOKE_WRITE`].
///
/// # Errors
/// `EPROTONOSUPPORT` for unknown methods and attributes; `EINVAL` for invalid values; `EFAULT` if memory is
/// not mapped.
pub(super) fn decode<H: Host>(attributes: &Attributes<'_, H>) -> Result<Request, Errno> {
    use abi::*;
    let (object, method) = attributes.method();
    if attributes.driver() == DRIVER_MLX5
        && let Some(request) = mlx5_steering_abi::decode(attributes)?
    {
        return Ok(request);
    }
    let Some(known) = known(object, method) else {
        // Objects and methods of drivers have separate numbers.
        let foreign = object >= CORE_NAMES || method >= CORE_NAMES;
        return if foreign { Ok(Request::Driver { object, method }) } else { Err(Errno::PROTONOSUPPORT) };
    };
    attributes.check_known(known)?;
    let handle = |id| attributes.handle(id).ok_or(Errno::INVAL);
    let number = |id| attributes.number(id)?.ok_or(Errno::INVAL);
    let small = |id| -> Result<u32, Errno> { u32::try_from(number(id)?).map_err(|_| Errno::INVAL) };
    let flags =
        |id| -> Result<u32, Errno> { u32::try_from(attributes.number(id)?.unwrap_or(0)).map_err(|_| Errno::INVAL) };
    Ok(match (object, method) {
        (OBJECT_DEVICE, QUERY_PORT) => Request::QueryPort { port: attributes.value::<u8>(QUERY_PORT_PORT_NUM)? },
        (OBJECT_DEVICE, GET_CONTEXT) => Request::GetContext,
        (OBJECT_DEVICE, QUERY_CONTEXT) => Request::QueryContext,
        (OBJECT_DEVICE, QUERY_GID_TABLE) => Request::QueryGidTable { entry_size: number(GID_TABLE_ENTRY_SIZE)? },
        (OBJECT_DEVICE, QUERY_GID_ENTRY) => {
            Request::QueryGidEntry { port: small(GID_ENTRY_PORT)?, index: small(GID_ENTRY_INDEX)? }
        }
        (OBJECT_ASYNC_EVENT, _) => Request::AllocAsyncEvents,
        (OBJECT_PD, mlx5::PD_QUERY) => Request::QueryPd { pd: handle(mlx5::PD_QUERY_HANDLE)? },
        (OBJECT_PD, _) => Request::DeallocPd { pd: handle(DESTROY_HANDLE)? },
        (OBJECT_MR, MR_DESTROY) => Request::DeregMr { mr: handle(DESTROY_HANDLE)? },
        (OBJECT_MR, _) => Request::QueryMr { mr: handle(0)? },
        (OBJECT_CQ, CQ_CREATE) => Request::CreateCq {
            user_handle: number(CREATE_CQ_USER_HANDLE)?,
            cqe: small(CREATE_CQ_CQE)?,
            vector: small(CREATE_CQ_COMP_VECTOR)?,
            channel: attributes.handle(CREATE_CQ_COMP_CHANNEL).map(|fd| fd as i32),
            flags: flags(CREATE_CQ_FLAGS)?,
        },
        (OBJECT_CQ, _) => Request::DestroyCq { cq: handle(DESTROY_HANDLE)? },
        (OBJECT_QP, QP_CREATE) => {
            let cap = attributes.value::<abi::QpCap>(CREATE_QP_CAP)?;
            Request::CreateQp(CreateQp {
                user_handle: number(CREATE_QP_USER_HANDLE)?,
                pd: handle(CREATE_QP_PD)?,
                send_cq: attributes.handle(CREATE_QP_SEND_CQ),
                recv_cq: attributes.handle(CREATE_QP_RECV_CQ),
                table: attributes.handle(CREATE_QP_IND_TABLE),
                kind: small(CREATE_QP_TYPE)?,
                flags: flags(CREATE_QP_FLAGS)?,
                cap: crate::device::QpCap {
                    max_send_wr: cap.max_send_wr,
                    max_recv_wr: cap.max_recv_wr,
                    max_send_sge: cap.max_send_sge,
                    max_recv_sge: cap.max_recv_sge,
                    max_inline: cap.max_inline_data,
                },
            })
        }
        (OBJECT_QP, _) => Request::DestroyQp { qp: handle(DESTROY_HANDLE)? },
        (OBJECT_WQ, WQ_CREATE) => Request::CreateWq(CreateWq {
            user_handle: number(CREATE_WQ_USER_HANDLE)?,
            pd: handle(CREATE_WQ_PD)?,
            cq: handle(CREATE_WQ_CQ)?,
            kind: small(CREATE_WQ_TYPE)?,
            max_wr: small(CREATE_WQ_MAX_WR)?,
            max_sge: small(CREATE_WQ_MAX_SGE)?,
            flags: flags(CREATE_WQ_FLAGS)?,
        }),
        (OBJECT_WQ, _) => Request::DestroyWq { wq: handle(DESTROY_HANDLE)? },
        (OBJECT_RWQ_IND_TBL, _) => Request::DestroyIndirectionTable { table: handle(DESTROY_HANDLE)? },
        (OBJECT_FLOW, _) => Request::DestroyFlow { flow: handle(DESTROY_HANDLE)? },
        (OBJECT_FLOW_ACTION, _) => Request::DestroyFlowAction { action: handle(DESTROY_HANDLE)? },
        (OBJECT_COUNTERS, COUNTERS_CREATE) => Request::CreateCounters,
        (OBJECT_COUNTERS, COUNTERS_READ) => Request::ReadCounters {
            counters: handle(READ_COUNTERS_HANDLE)?,
            count: attributes.room(READ_COUNTERS_BUFFER) / size_of::<u64>(),
        },
        (OBJECT_COUNTERS, _) => Request::DestroyCounters { counters: handle(DESTROY_HANDLE)? },
        _ => return Err(Errno::PROTONOSUPPORT),
    })
}

/// Writes a reply to the output attributes.
///
/// # Errors
/// `EFAULT` if memory is not mapped.
pub(super) fn encode<H: Host>(
    attributes: &mut Attributes<'_, H>,
    request: &Request,
    reply: &Reply,
) -> Result<(), Errno> {
    use abi::*;
    match (request, reply) {
        (Request::CreateCounters, Reply::Object { handle }) => {
            attributes.put_handle(CREATE_COUNTERS_HANDLE, u64::from(*handle));
            Ok(())
        }
        (_, Reply::Counters(values)) => attributes.put(READ_COUNTERS_BUFFER, values.as_bytes()),
        (_, Reply::Context { vectors, .. }) => {
            attributes.put(GET_CONTEXT_NUM_COMP_VECTORS, vectors.as_bytes())?;
            let support = wirepath_nic_defs::uverbs::CORE_SUPPORT_OPTIONAL_MR_ACCESS;
            attributes.put(GET_CONTEXT_CORE_SUPPORT, support.as_bytes())
        }
        (_, Reply::Port(port)) => attributes.put(QUERY_PORT_RESP, port.as_bytes()),
        (Request::QueryGidEntry { .. }, Reply::GidTable(entries)) => match entries.first() {
            Some(entry) => attributes.put(GID_ENTRY_RESP, entry.as_bytes()),
            None => Err(Errno::INVAL),
        },
        (_, Reply::GidTable(entries)) => {
            attributes.put(GID_TABLE_RESP_ENTRIES, entries.as_bytes())?;
            attributes.put(GID_TABLE_RESP_NUM, (entries.len() as u64).as_bytes())
        }
        (_, Reply::Descriptor(fd)) => {
            attributes.put_handle(ASYNC_EVENT_FD, *fd as u64);
            Ok(())
        }
        (_, Reply::PdInfo { number }) => attributes.put(mlx5::PD_QUERY_PDN, number.as_bytes()),
        (_, Reply::MrInfo { lkey, rkey, length }) => {
            attributes.put(QUERY_MR_RESP_LKEY, lkey.as_bytes())?;
            attributes.put(QUERY_MR_RESP_RKEY, rkey.as_bytes())?;
            attributes.put(QUERY_MR_RESP_LENGTH, length.as_bytes())
        }
        (_, Reply::Cq { cq, cqe }) => {
            attributes.put_handle(CREATE_CQ_HANDLE, u64::from(*cq));
            attributes.put(CREATE_CQ_RESP_CQE, cqe.as_bytes())
        }
        (Request::DestroyCq { .. }, Reply::EventCounts { completions, others }) => {
            attributes.put(DESTROY_CQ_RESP, [*completions, *others].as_bytes())
        }
        (Request::DestroyQp { .. } | Request::DestroyWq { .. }, Reply::EventCounts { others, .. }) => {
            attributes.put(DESTROY_QP_RESP, others.as_bytes())
        }
        (_, Reply::Qp { qp, number, cap }) => {
            attributes.put_handle(CREATE_QP_HANDLE, u64::from(*qp));
            let cap = abi::QpCap {
                max_send_wr: cap.max_send_wr,
                max_recv_wr: cap.max_recv_wr,
                max_send_sge: cap.max_send_sge,
                max_recv_sge: cap.max_recv_sge,
                max_inline_data: cap.max_inline,
            };
            attributes.put(CREATE_QP_RESP_CAP, cap.as_bytes())?;
            attributes.put(CREATE_QP_RESP_QP_NUM, number.as_bytes())
        }
        (_, Reply::Wq { wq, max_wr, max_sge, number }) => {
            attributes.put_handle(CREATE_WQ_HANDLE, u64::from(*wq));
            attributes.put(CREATE_WQ_RESP_MAX_WR, max_wr.as_bytes())?;
            attributes.put(CREATE_WQ_RESP_MAX_SGE, max_sge.as_bytes())?;
            attributes.put(CREATE_WQ_RESP_WQ_NUM, number.as_bytes())
        }
        // Other replies are driver-specific, or exist in the write form only, or are empty.
        _ => mlx5_steering_abi::encode(attributes, reply),
    }
}
