//! Flow-rule commands: handles, references, and the checks that the kernel performs for every driver.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs as defs;

use super::objects::{ObjectKind, Objects};
use super::request::{Reply, Request};
use super::specs;
use crate::device::{Call, ObjectId};
use crate::host::Host;
use crate::rules::{FlowRules, NewFlow, NewMatchedFlow};

/// Lowest flag that no kernel knows.
const UNKNOWN_FLAGS: u32 = 1 << 3;

/// Destroys an object of the flow-rule interface.
pub(super) fn destroy<H: Host>(rules: &mut dyn FlowRules<H>, kind: ObjectKind, id: ObjectId) {
    match kind {
        ObjectKind::Flow => rules.destroy_flow(id),
        ObjectKind::Matcher => rules.destroy_matcher(id),
        ObjectKind::FlowAction => rules.destroy_action(id),
        ObjectKind::Counters => rules.destroy_counters(id),
        ObjectKind::FirmwareObject => rules.destroy_firmware_object(id),
        ObjectKind::Pd | ObjectKind::Mr | ObjectKind::Cq | ObjectKind::Qp | ObjectKind::Wq | ObjectKind::Table => {}
    }
}

/// Executes a flow-rule command.
pub(super) fn execute<H: Host>(
    objects: &mut Objects,
    rules: &mut dyn FlowRules<H>,
    call: &mut Call<'_, H>,
    name: &str,
    request: &Request,
) -> Result<Reply, Errno> {
    let mut destroy_object = |objects: &mut Objects, handle: u32, kind| -> Result<Reply, Errno> {
        let object = objects.remove(handle, kind)?;
        destroy(rules, kind, object.id);
        Ok(Reply::Empty)
    };
    match request {
        Request::DestroyFlow { flow } => return destroy_object(objects, *flow, ObjectKind::Flow),
        Request::DestroyMatcher { matcher } => return destroy_object(objects, *matcher, ObjectKind::Matcher),
        Request::DestroyFlowAction { action } => return destroy_object(objects, *action, ObjectKind::FlowAction),
        Request::DestroyCounters { counters } => return destroy_object(objects, *counters, ObjectKind::Counters),
        Request::DestroyFirmwareObject { object } => {
            rules.firmware_object_is_free(call, objects.id(*object, ObjectKind::FirmwareObject)?)?;
            let mut destroy_object = |objects: &mut Objects, handle: u32, kind| -> Result<Reply, Errno> {
                let object = objects.remove(handle, kind)?;
                destroy(rules, kind, object.id);
                Ok(Reply::Empty)
            };
            return destroy_object(objects, *object, ObjectKind::FirmwareObject);
        }
        _ => {}
    }
    let add = |objects: &mut Objects, kind, id, needs| objects.add(kind, id, 0, None, needs);
    Ok(match request {
        Request::CreateFlow { qp, attribute, specs } => {
            let mut needs = vec![*qp];
            let flow = verbs_flow(objects, &mut needs, *qp, attribute, specs)
                .map_err(|(errno, why)| call.refuse(errno, format_args!("{name}: rule: {why}")))?;
            let id = rules.create_flow(call, &flow)?;
            Reply::Flow { flow: add(objects, ObjectKind::Flow, id, needs) }
        }
        Request::CreateMatchedFlow(flow) => {
            let (flow, needs) = resolve(objects, flow)?;
            let id = rules.create_matched_flow(call, &flow)?;
            Reply::Flow { flow: add(objects, ObjectKind::Flow, id, needs) }
        }
        Request::CreateMatcher(matcher) => {
            let id = rules.create_matcher(call, matcher)?;
            Reply::Object { handle: add(objects, ObjectKind::Matcher, id, vec![]) }
        }
        Request::CreateModifyHeader { table, commands } => {
            let id = rules.create_modify_header(call, *table, commands)?;
            Reply::Object { handle: add(objects, ObjectKind::FlowAction, id, vec![]) }
        }
        Request::CreateReformat { kind, table, data } => {
            let id = rules.create_reformat(call, *kind, *table, data.as_deref())?;
            Reply::Object { handle: add(objects, ObjectKind::FlowAction, id, vec![]) }
        }
        Request::CreateCounters => {
            let id = rules.create_counters(call)?;
            Reply::Object { handle: add(objects, ObjectKind::Counters, id, vec![]) }
        }
        Request::ReadCounters { counters, count } => {
            let id = objects.id(*counters, ObjectKind::Counters)?;
            // Counters count only when a rule uses them.
            if !objects.is_used(*counters) {
                return Err(call.refuse(Errno::INVAL, format_args!("{name}: read of counters that no rule uses")));
            }
            let mut values = vec![0; *count];
            rules.read_counters(call, id, &mut values)?;
            Reply::Counters(values)
        }
        Request::CreateFirmwareObject { command, room } => {
            if !rules.has_firmware_objects(call.context) {
                return Err(
                    call.refuse(Errno::INVAL, format_args!("{name}: the device was not opened for firmware commands"))
                );
            }
            let (id, answer) = rules.create_firmware_object(call, command, *room)?;
            Reply::Firmware { object: Some(add(objects, ObjectKind::FirmwareObject, id, vec![])), answer }
        }
        Request::QueryFirmwareObject { object, command, room } => {
            // The kernel passes queries of objects of verbs on, too.
            let answer = match objects.id(*object, ObjectKind::Qp) {
                Ok(qp) => rules.query_queue_pair(call, qp, command, *room)?,
                Err(_) => {
                    let id = objects.id(*object, ObjectKind::FirmwareObject)?;
                    rules.query_firmware_object(call, id, command, *room)?
                }
            };
            Reply::Firmware { object: None, answer }
        }
        Request::ModifyFirmwareObject { object, command, room } => {
            let id = objects.id(*object, ObjectKind::FirmwareObject)?;
            Reply::Firmware { object: None, answer: rules.modify_firmware_object(call, id, command, *room)? }
        }
        _ => return Err(Errno::OPNOTSUPP),
    })
}

/// Decodes a rule with the checks of `ib_uverbs_ex_create_flow`.
fn verbs_flow(
    objects: &Objects,
    needs: &mut Vec<u32>,
    qp: u32,
    attribute: &[u8; 16],
    bytes: &[u8],
) -> Result<NewFlow, specs::RuleError> {
    let word = |at: usize| u32::from_ne_bytes(attribute[at..at + 4].try_into().expect("four bytes"));
    let (kind, priority, count, port, flags) =
        (word(0), u16::from_ne_bytes([attribute[6], attribute[7]]), attribute[8], attribute[11], word(12));
    let invalid = |why: String| Err((Errno::INVAL, why));
    if flags >= UNKNOWN_FLAGS {
        return invalid(format!("unsupported flags {flags:#x}"));
    }
    if flags & defs::FLOW_DONT_TRAP != 0 && matches!(kind, defs::FLOW_ALL_DEFAULT | defs::FLOW_MC_DEFAULT) {
        return invalid("a default rule with FLOW_DONT_TRAP".to_owned());
    }
    if count > specs::MOST || attribute[9..11] != [0, 0] {
        return invalid(format!("{count} specs; at most {}", specs::MOST));
    }
    let Ok(id) = objects.id(qp, ObjectKind::Qp) else { return invalid(format!("handle {qp} is not a queue pair")) };
    let specs = specs::read(bytes, count, objects, needs)?;
    Ok(NewFlow { qp: id, kind, priority, port, flags, specs })
}

/// Replaces handles by the device's numbers; also returns the handles that were used.
fn resolve(objects: &Objects, flow: &NewMatchedFlow) -> Result<(NewMatchedFlow, Vec<u32>), Errno> {
    let mut needs = vec![flow.matcher];
    let mut id = |handle: u32, kind| {
        needs.push(handle);
        objects.id(handle, kind)
    };
    let resolved = NewMatchedFlow {
        qp: flow.qp.map(|qp| id(qp, ObjectKind::Qp)).transpose()?,
        interface: flow.interface.map(|object| id(object, ObjectKind::FirmwareObject)).transpose()?,
        actions: flow.actions.iter().map(|action| id(*action, ObjectKind::FlowAction)).collect::<Result<_, _>>()?,
        counter: flow
            .counter
            .map(|(counter, offset)| Ok::<_, Errno>((id(counter, ObjectKind::FirmwareObject)?, offset)))
            .transpose()?,
        matcher: objects.id(flow.matcher, ObjectKind::Matcher)?,
        value: flow.value.clone(),
        ..*flow
    };
    Ok((resolved, needs))
}
