//! Commands of the mlx5 driver for flow rules and firmware objects, in the ioctl form. Source: Linux
//! `drivers/infiniband/hw/mlx5/{fs.c,devx.c}`.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5 as device;
use wirepath_nic_defs::uverbs::{ioctl, mlx5 as abi};

use super::request::{Reply, Request};
use crate::attributes::Attributes;
use crate::host::Host;
use crate::rules::{NewMatchedFlow, NewMatcher};

/// Maximum number of flow actions of a rule.
const MOST_ACTIONS: usize = 2;
/// Flag of a matcher for sent packets (`IB_FLOW_ATTR_FLAGS_EGRESS`).
const EGRESS: u64 = 4;

fn known(object: u16, method: u16) -> Option<&'static [u16]> {
    use abi::*;
    Some(match (object, method) {
        (OBJECT_FLOW_MATCHER, MATCHER_CREATE) => &[
            MATCHER_HANDLE,
            MATCHER_MASK,
            MATCHER_FLOW_TYPE,
            MATCHER_CRITERIA,
            MATCHER_FLAGS,
            MATCHER_TABLE,
            MATCHER_PORT,
        ],
        (OBJECT_FLOW_MATCHER, MATCHER_DESTROY) => &[MATCHER_DESTROY_HANDLE],
        (ioctl::OBJECT_FLOW, FLOW_CREATE) => &[
            FLOW_HANDLE,
            FLOW_VALUE,
            FLOW_DEST_QP,
            FLOW_DEST_DEVX,
            FLOW_MATCHER,
            FLOW_ACTIONS,
            FLOW_TAG,
            FLOW_COUNTERS,
            FLOW_COUNTERS_OFFSET,
            FLOW_FLAGS,
        ],
        (ioctl::OBJECT_FLOW, FLOW_REMOVE) => &[FLOW_HANDLE],
        (ioctl::OBJECT_FLOW_ACTION, ACTION_MODIFY_HEADER) => {
            &[MODIFY_HEADER_HANDLE, MODIFY_HEADER_COMMANDS, MODIFY_HEADER_TABLE]
        }
        (ioctl::OBJECT_FLOW_ACTION, ACTION_REFORMAT) => {
            &[REFORMAT_HANDLE, REFORMAT_TYPE, REFORMAT_TABLE, REFORMAT_DATA]
        }
        (OBJECT_DEVX_OBJ, DEVX_OBJ_CREATE | DEVX_OBJ_MODIFY | DEVX_OBJ_QUERY) => {
            &[DEVX_OBJ_HANDLE, DEVX_OBJ_IN, DEVX_OBJ_OUT]
        }
        (OBJECT_DEVX_OBJ, DEVX_OBJ_DESTROY) => &[DEVX_OBJ_HANDLE],
        _ => return None,
    })
}

/// Decodes a command; returns `None` if it does not belong to this module.
///
/// # Errors
/// The errno that the kernel returns.
pub(super) fn decode<H: Host>(attributes: &Attributes<'_, H>) -> Result<Option<Request>, Errno> {
    use abi::*;
    let (object, method) = attributes.method();
    let Some(known) = known(object, method) else { return Ok(None) };
    attributes.check_known(known)?;
    let handle = |id| attributes.handle(id).ok_or(Errno::INVAL);
    let table = |id| -> Result<u8, Errno> {
        let table = attributes.number(id)?.ok_or(Errno::INVAL)?;
        u8::try_from(table).ok().filter(|table| *table <= TABLE_RDMA_TX).ok_or(Errno::INVAL)
    };
    Ok(Some(match (object, method) {
        (OBJECT_FLOW_MATCHER, MATCHER_CREATE) => Request::CreateMatcher(matcher(attributes)?),
        (OBJECT_FLOW_MATCHER, _) => Request::DestroyMatcher { matcher: handle(MATCHER_DESTROY_HANDLE)? },
        (ioctl::OBJECT_FLOW, FLOW_CREATE) => Request::CreateMatchedFlow(flow(attributes)?),
        (ioctl::OBJECT_FLOW, _) => Request::DestroyFlow { flow: handle(FLOW_HANDLE)? },
        (ioctl::OBJECT_FLOW_ACTION, ACTION_MODIFY_HEADER) => {
            let commands = attributes.bytes(MODIFY_HEADER_COMMANDS)?;
            if commands.is_empty() || !commands.len().is_multiple_of(8) {
                return Err(Errno::INVAL);
            }
            Request::CreateModifyHeader { table: table(MODIFY_HEADER_TABLE)?, commands }
        }
        (ioctl::OBJECT_FLOW_ACTION, _) => {
            let kind = attributes.number(REFORMAT_TYPE)?.ok_or(Errno::INVAL)?;
            let data = attributes.has(REFORMAT_DATA).then(|| attributes.bytes(REFORMAT_DATA)).transpose()?;
            if data.as_ref().is_some_and(Vec::is_empty) {
                return Err(Errno::INVAL);
            }
            Request::CreateReformat {
                kind: u8::try_from(kind).map_err(|_| Errno::INVAL)?,
                table: table(REFORMAT_TABLE)?,
                data,
            }
        }
        (_, DEVX_OBJ_CREATE) => Request::CreateFirmwareObject {
            command: attributes.bytes(DEVX_OBJ_IN)?,
            room: attributes.room(DEVX_OBJ_OUT),
        },
        (_, DEVX_OBJ_MODIFY) => Request::ModifyFirmwareObject {
            object: handle(DEVX_OBJ_HANDLE)?,
            command: attributes.bytes(DEVX_OBJ_IN)?,
            room: attributes.room(DEVX_OBJ_OUT),
        },
        (_, DEVX_OBJ_QUERY) => Request::QueryFirmwareObject {
            object: handle(DEVX_OBJ_HANDLE)?,
            command: attributes.bytes(DEVX_OBJ_IN)?,
            room: attributes.room(DEVX_OBJ_OUT),
        },
        _ => Request::DestroyFirmwareObject { object: handle(DEVX_OBJ_HANDLE)? },
    }))
}

/// Returns match parameters: at least one byte, at most the full size.
fn parameters<H: Host>(attributes: &Attributes<'_, H>, id: u16) -> Result<Vec<u8>, Errno> {
    let bytes = attributes.bytes(id)?;
    if (1..=device::MATCH_BYTES).contains(&bytes.len()) { Ok(bytes) } else { Err(Errno::INVAL) }
}

fn matcher<H: Host>(attributes: &Attributes<'_, H>) -> Result<NewMatcher, Errno> {
    use abi::*;
    let (kind, payload) = attributes.choice(MATCHER_FLOW_TYPE).ok_or(Errno::INVAL)?;
    // Table and flags are the newer and the older form of the same information.
    let table = match (attributes.number(MATCHER_TABLE)?, attributes.number(MATCHER_FLAGS)?) {
        (Some(_), Some(_)) => return Err(Errno::INVAL),
        (Some(table), None) if table <= u64::from(TABLE_RDMA_TX) => table as u8,
        (None, Some(EGRESS)) => TABLE_NIC_TX,
        (None, None | Some(0)) => TABLE_NIC_RX,
        _ => return Err(Errno::INVAL),
    };
    let criteria = attributes.number(MATCHER_CRITERIA)?.ok_or(Errno::INVAL)?;
    Ok(NewMatcher {
        mask: parameters(attributes, MATCHER_MASK)?,
        kind,
        priority: payload,
        criteria: u8::try_from(criteria).map_err(|_| Errno::INVAL)?,
        table,
        port: u8::try_from(attributes.number(MATCHER_PORT)?.unwrap_or(1)).map_err(|_| Errno::INVAL)?,
    })
}

fn flow<H: Host>(attributes: &Attributes<'_, H>) -> Result<NewMatchedFlow, Errno> {
    use abi::*;
    let counter = match attributes.handles(FLOW_COUNTERS)?.as_slice() {
        [] => None,
        [counter] => {
            let offset = attributes.number(FLOW_COUNTERS_OFFSET)?.unwrap_or(0);
            Some((*counter, u32::try_from(offset).map_err(|_| Errno::INVAL)?))
        }
        _ => return Err(Errno::INVAL),
    };
    let actions = attributes.handles(FLOW_ACTIONS)?;
    let flags = attributes.number(FLOW_FLAGS)?.unwrap_or(0);
    if actions.len() > MOST_ACTIONS || flags & !u64::from(FLOW_DEFAULT_MISS | FLOW_DROP) != 0 {
        return Err(Errno::INVAL);
    }
    let tag = attributes.number(FLOW_TAG)?;
    Ok(NewMatchedFlow {
        matcher: attributes.handle(FLOW_MATCHER).ok_or(Errno::INVAL)?,
        value: parameters(attributes, FLOW_VALUE)?,
        qp: attributes.handle(FLOW_DEST_QP),
        interface: attributes.handle(FLOW_DEST_DEVX),
        actions,
        tag: tag.map(|tag| u32::try_from(tag).map_err(|_| Errno::INVAL)).transpose()?,
        counter,
        flags: flags as u32,
    })
}

/// Writes a reply, if it belongs to this module.
///
/// # Errors
/// `EFAULT` if memory is not mapped.
pub(super) fn encode<H: Host>(attributes: &mut Attributes<'_, H>, reply: &Reply) -> Result<(), Errno> {
    use abi::*;
    match reply {
        // The first driver attribute of all these commands is the handle of the new object.
        Reply::Object { handle } | Reply::Flow { flow: handle } => {
            attributes.put_handle(MATCHER_HANDLE, u64::from(*handle));
            Ok(())
        }
        Reply::Firmware { object, answer } => {
            if let Some(object) = object {
                attributes.put_handle(DEVX_OBJ_HANDLE, u64::from(*object));
            }
            attributes.put(DEVX_OBJ_OUT, answer)
        }
        _ => Ok(()),
    }
}
