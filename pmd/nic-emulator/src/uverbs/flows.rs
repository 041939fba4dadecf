//! Commands about flow rules: handles, references, and the checks that the kernel makes for every driver.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs as defs;

use super::objects::{Kind, Objects};
use super::request::{Reply, Request};
use super::specs;
use crate::device::{Call, ObjectId};
use crate::host::Host;
use crate::rules::{FlowRules, NewFlow, NewMatchedFlow};

/// First flag that no kernel knows.
const UNKNOWN_FLAGS: u32 = 1 << 3;

/// An object is gone.
pub(super) fn destroy<H: Host>(rules: &mut dyn FlowRules<H>, kind: Kind, id: ObjectId) {
    match kind {
        Kind::Flow => rules.destroy_flow(id),
        Kind::Matcher => rules.destroy_matcher(id),
        Kind::FlowAction => rules.destroy_action(id),
        Kind::Counters => rules.destroy_counters(id),
        Kind::FirmwareObject => rules.destroy_firmware_object(id),
        Kind::Pd | Kind::Mr | Kind::Cq | Kind::Qp | Kind::Wq | Kind::Table => {}
    }
}

/// Carries out a command.
pub(super) fn execute<H: Host>(
    objects: &mut Objects,
    rules: &mut dyn FlowRules<H>,
    call: &mut Call<'_, H>,
    name: &str,
    request: &Request,
) -> Result<Reply, Errno> {
    let mut gone = |objects: &mut Objects, handle: u32, kind| -> Result<Reply, Errno> {
        let object = objects.remove(handle, kind)?;
        destroy(rules, kind, object.id);
        Ok(Reply::Empty)
    };
    match request {
        Request::DestroyFlow { flow } => return gone(objects, *flow, Kind::Flow),
        Request::DestroyMatcher { matcher } => return gone(objects, *matcher, Kind::Matcher),
        Request::DestroyFlowAction { action } => return gone(objects, *action, Kind::FlowAction),
        Request::DestroyCounters { counters } => return gone(objects, *counters, Kind::Counters),
        Request::DestroyFirmwareObject { object } => return gone(objects, *object, Kind::FirmwareObject),
        _ => {}
    }
    let add = |objects: &mut Objects, kind, id, needs| objects.add(kind, id, 0, None, needs);
    Ok(match request {
        Request::CreateFlow { qp, attribute, specs } => {
            let mut needs = vec![*qp];
            let flow = verbs_flow(objects, &mut needs, *qp, attribute, specs)
                .map_err(|(errno, why)| call.refuse(errno, format_args!("{name}: rule: {why}")))?;
            let id = rules.create_flow(call, &flow)?;
            Reply::Flow { flow: add(objects, Kind::Flow, id, needs) }
        }
        Request::CreateMatchedFlow(flow) => {
            let (flow, needs) = resolve(objects, flow)?;
            let id = rules.create_matched_flow(call, &flow)?;
            Reply::Flow { flow: add(objects, Kind::Flow, id, needs) }
        }
        Request::CreateMatcher(matcher) => {
            let id = rules.create_matcher(call, matcher)?;
            Reply::Object { handle: add(objects, Kind::Matcher, id, vec![]) }
        }
        Request::CreateModifyHeader { table, commands } => {
            let id = rules.create_modify_header(call, *table, commands)?;
            Reply::Object { handle: add(objects, Kind::FlowAction, id, vec![]) }
        }
        Request::CreateReformat { kind, table, data } => {
            let id = rules.create_reformat(call, *kind, *table, data.as_deref())?;
            Reply::Object { handle: add(objects, Kind::FlowAction, id, vec![]) }
        }
        Request::CreateCounters => {
            let id = rules.create_counters(call)?;
            Reply::Object { handle: add(objects, Kind::Counters, id, vec![]) }
        }
        Request::ReadCounters { counters, count } => {
            let id = objects.id(*counters, Kind::Counters)?;
            // Nothing counts before a rule does.
            if !objects.is_used(*counters) {
                return Err(call.refuse(Errno::INVAL, format_args!("{name}: counters that no rule uses are read")));
            }
            let mut values = vec![0; *count];
            rules.read_counters(call, id, &mut values)?;
            Reply::Counters(values)
        }
        Request::CreateFirmwareObject { command, room } => {
            if !rules.has_firmware_objects(call.context) {
                return Err(call.refuse(
                    Errno::INVAL,
                    format_args!("{name}: the device was not opened for commands to its firmware"),
                ));
            }
            let (id, answer) = rules.create_firmware_object(call, command, *room)?;
            Reply::Firmware { object: Some(add(objects, Kind::FirmwareObject, id, vec![])), answer }
        }
        Request::QueryFirmwareObject { object, command, room } => {
            let id = objects.id(*object, Kind::FirmwareObject)?;
            Reply::Firmware { object: None, answer: rules.query_firmware_object(call, id, command, *room)? }
        }
        _ => return Err(Errno::OPNOTSUPP),
    })
}

/// The checks of `ib_uverbs_ex_create_flow`.
fn verbs_flow(
    objects: &Objects,
    needs: &mut Vec<u32>,
    qp: u32,
    attribute: &[u8; 16],
    bytes: &[u8],
) -> Result<NewFlow, specs::Wrong> {
    let word = |at: usize| u32::from_ne_bytes(attribute[at..at + 4].try_into().expect("four bytes"));
    let (kind, priority, count, port, flags) =
        (word(0), u16::from_ne_bytes([attribute[6], attribute[7]]), attribute[8], attribute[11], word(12));
    let invalid = |why: String| Err((Errno::INVAL, why));
    if flags >= UNKNOWN_FLAGS {
        return invalid(format!("flags {flags:#x}"));
    }
    if flags & defs::FLOW_DONT_TRAP != 0 && matches!(kind, defs::FLOW_ALL_DEFAULT | defs::FLOW_MC_DEFAULT) {
        return invalid("a default rule that does not keep its packets".to_owned());
    }
    if count > specs::MOST || attribute[9..11] != [0, 0] {
        return invalid(format!("{count} specs; at most {}", specs::MOST));
    }
    let Ok(id) = objects.id(qp, Kind::Qp) else { return invalid(format!("handle {qp} is no queue pair")) };
    let specs = specs::read(bytes, count, objects, needs)?;
    Ok(NewFlow { qp: id, kind, priority, port, flags, specs })
}

/// Handles made the device's numbers, and which they were.
fn resolve(objects: &Objects, flow: &NewMatchedFlow) -> Result<(NewMatchedFlow, Vec<u32>), Errno> {
    let mut needs = vec![flow.matcher];
    let mut id = |handle: u32, kind| {
        needs.push(handle);
        objects.id(handle, kind)
    };
    let resolved = NewMatchedFlow {
        qp: flow.qp.map(|qp| id(qp, Kind::Qp)).transpose()?,
        actions: flow.actions.iter().map(|action| id(*action, Kind::FlowAction)).collect::<Result<_, _>>()?,
        counter: flow
            .counter
            .map(|(counter, offset)| Ok::<_, Errno>((id(counter, Kind::FirmwareObject)?, offset)))
            .transpose()?,
        matcher: objects.id(flow.matcher, Kind::Matcher)?,
        value: flow.value.clone(),
        ..*flow
    };
    Ok((resolved, needs))
}
