//! Flow-rule commands: the checks of `mlx5_ib` and the firmware in their order, and the resulting table
//! entries.

use std::sync::Arc;

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{self as device, header};
use wirepath_nic_defs::uverbs::{self as defs, mlx5 as abi};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::super::{Mlx5, Qp};
use super::key::Key;
use super::{
    Action, Counter, Counters, DEFAULT_PRIORITY, FlowAction, GROUP_PRIORITY, NewEntry, Program, Reformat, Rule, specs,
};
use crate::device::{Call, ObjectId};
use crate::host::Host;
use crate::rules::{FlowRules, NewFlow, NewMatchedFlow, NewMatcher};

/// The only type of matcher that can have rules.
const FLOW_TYPE_NORMAL: u8 = 0;
/// Number of counters per unit of a bulk.
const BULK: usize = 128;
/// Distance between the first numbers of two bulks of flow counters.
const BULK_NUMBERS: u32 = 1 << 15;
/// Bit of a query that clears the counters.
const QUERY_CLEAR: u32 = 1 << 31;
/// Bit of a query that writes the answer to memory.
const QUERY_TO_MEMORY: u32 = 1 << 30;
/// Maximum number of entries in the description of a counter set.
const MOST_DESCRIBED: u32 = 8191;

type RuleError = (Errno, String);

fn invalid<T>(why: impl Into<String>) -> Result<T, RuleError> {
    Err((Errno::INVAL, why.into()))
}

/// Returns mask and value of a default rule: the multicast bit of the destination address is set or clear.
fn group_match(group: bool) -> (Key, Key) {
    let mut parameters = [[0; device::MATCH_BYTES]; 2];
    let bit = 1u128 << 40;
    header::DST_MAC.set(&mut parameters[0], bit);
    header::DST_MAC.set(&mut parameters[1], if group { bit } else { 0 });
    let [mask, value] = parameters.map(|parameters| Key::from_parameters(&parameters).expect("the outer headers"));
    (mask, value)
}

/// Returns true if the kernel treats a rule of direct verbs as a multicast rule. A mask over a whole IPv4
/// address is none.
fn is_group(criteria: u8, mask: &Key, value: &Key) -> bool {
    let both = |test: &dyn Fn(&[u8]) -> bool| test(mask.bytes()) && test(value.bytes());
    criteria & device::CRITERIA_OUTER != 0
        && (both(&|bytes| header::DST_MAC.get(bytes) >> 40 & 1 == 1)
            || both(&|bytes| header::DST_IPV4.get(bytes) >> 28 == 14))
}

impl<H: Host> Mlx5<H> {
    pub(in super::super) fn wrong<T>(&self, call: &Call<'_, H>, (errno, why): RuleError) -> Result<T, Errno> {
        Err(call.refuse(errno, format_args!("{}: rule: {why}", self.spec.name)))
    }

    /// Returns true if frames can be delivered to a queue pair.
    fn receives(&self, qp: ObjectId) -> bool {
        matches!(self.qps.get(qp), Some(Qp::Rss(_)))
    }

    /// Combines the flow actions of a rule.
    fn actions(&self, table: u8, ids: &[ObjectId]) -> Result<Action, RuleError> {
        let mut all = Action::default();
        for id in ids {
            let (again, of) = match self.steering.actions.get(*id) {
                Some(FlowAction::Modify(program)) => (all.modify.replace(Arc::clone(program)).is_some(), program.table),
                Some(FlowAction::Reformat(reformat)) => {
                    let of = if reformat.is_decap() { abi::TABLE_NIC_RX } else { abi::TABLE_NIC_TX };
                    (all.reformat.replace(Arc::clone(reformat)).is_some(), of)
                }
                None => return invalid("an unknown flow action"),
            };
            if again {
                return invalid("two flow actions of the same kind");
            }
            if of != table {
                return invalid(format!("a flow action of table {of} in table {table}"));
            }
        }
        Ok(all)
    }

    /// Reads the description of a rule's counter set (`mlx5_ib_flow_counters_set_data`).
    fn describe(&mut self, call: &Call<'_, H>, id: ObjectId) -> Result<Arc<Counter>, RuleError> {
        let input = call.input;
        let (head, rest) = abi::CreateFlow::read_from_prefix(input)
            .map_err(|_| (Errno::OPNOTSUPP, "counters without a description".to_owned()))?;
        let mut described = Vec::new();
        if head.ncounters_data == 1 {
            let Ok((list, _)) = abi::FlowCounters::read_from_prefix(rest) else {
                return invalid("a truncated description of counters");
            };
            if list.ncounters > MOST_DESCRIBED {
                return invalid(format!("{} counters in a set", list.ncounters));
            }
            let mut bytes = vec![0; list.ncounters as usize * size_of::<abi::FlowCounter>()];
            call.host.read(list.counters_data, &mut bytes).map_err(|errno| (errno, "counters".to_owned()))?;
            for chunk in bytes.chunks_exact(size_of::<abi::FlowCounter>()) {
                let counter = abi::FlowCounter::read_from_bytes(chunk).unwrap_or(abi::FlowCounter::new_zeroed());
                if counter.description > abi::COUNTER_BYTES || counter.index > MOST_DESCRIBED {
                    return invalid(format!(
                        "counter {} of a set has description {}",
                        counter.index, counter.description
                    ));
                }
                described.push((counter.description == abi::COUNTER_BYTES, counter.index as usize));
            }
        }
        let Some(counters) = self.steering.counters.get_mut(id) else { return invalid("an unknown set of counters") };
        match (described.is_empty(), counters.described.is_empty()) {
            (true, true) => return invalid("a set of counters without a description"),
            (false, false) => return invalid("a set of counters that another rule has described already"),
            (false, true) => counters.described = described,
            (true, false) => {}
        }
        Ok(Arc::clone(&counters.counter))
    }

    /// Creates a rule with the checks of `mlx5_ib_create_flow`.
    fn verbs_flow(&mut self, call: &Call<'_, H>, flow: &NewFlow) -> Result<ObjectId, RuleError> {
        if let Ok((head, _)) = abi::CreateFlow::read_from_prefix(call.input)
            && head.ncounters_data > 1
        {
            return invalid(format!("descriptions of {} sets of counters; at most one", head.ncounters_data));
        }
        if flow.priority >= self.steering.spec.priorities {
            let why = format!("priority {}; at most {}", flow.priority, self.steering.spec.priorities - 1);
            return Err((Errno::NOMEM, why));
        }
        let Some(port) = usize::from(flow.port).checked_sub(1).filter(|at| *at < self.ports.len()) else {
            return invalid(format!("port {} does not exist", flow.port));
        };
        if flow.flags & !(defs::FLOW_DONT_TRAP | defs::FLOW_EGRESS) != 0 {
            return invalid(format!("unsupported flags {:#x}", flow.flags));
        }
        let egress = flow.flags & defs::FLOW_EGRESS != 0;
        let default = matches!(flow.kind, defs::FLOW_ALL_DEFAULT | defs::FLOW_MC_DEFAULT);
        if egress && default {
            return invalid("a default rule for sent packets");
        }
        let mut rule = Rule { port, egress, ..Rule::default() };
        match flow.kind {
            defs::FLOW_NORMAL => {}
            defs::FLOW_SNIFFER if !self.steering.spec.sniffer => {
                return Err((Errno::OPNOTSUPP, "the device does not support sniffer rules".to_owned()));
            }
            defs::FLOW_SNIFFER | defs::FLOW_ALL_DEFAULT | defs::FLOW_MC_DEFAULT => {
                // The kernel ignores the specs of these rules.
                if !self.receives(flow.qp) {
                    return invalid("the queue pair cannot receive packets");
                }
                if flow.kind == defs::FLOW_SNIFFER {
                    let id = self.steering.rules.add(rule);
                    self.steering.ports[port].sniffers.push((id, flow.qp));
                    return Ok(id);
                }
                let id = self.steering.rules.add(rule);
                for group in [true, false] {
                    if group || flow.kind == defs::FLOW_ALL_DEFAULT {
                        let (mask, value) = group_match(group);
                        let entry = NewEntry {
                            port,
                            egress,
                            priority: DEFAULT_PRIORITY,
                            criteria: mask.criteria(),
                            mask,
                            value,
                            action: Action::default(),
                            qp: Some(flow.qp),
                            counter: None,
                        };
                        self.insert_entry(id, entry)?;
                    }
                }
                return Ok(id);
            }
            kind => return Err((Errno::OPNOTSUPP, format!("unsupported type {kind}"))),
        }
        let read = specs::read(&flow.specs)?;
        let table = if egress { abi::TABLE_NIC_TX } else { abi::TABLE_NIC_RX };
        let keeps = flow.flags & defs::FLOW_DONT_TRAP == 0;
        let mut action = Action { drop: read.drop, tag: read.tag, ..self.actions(table, &read.actions)? };
        action.next_priority = !keeps && !action.drop;
        if !egress && !read.drop && !self.receives(flow.qp) {
            return invalid("the queue pair cannot receive packets");
        }
        let counter = read.counters.map(|counters| self.describe(call, counters)).transpose()?;
        rule.counters = read.counters;
        if let Some(counters) = read.counters.and_then(|counters| self.steering.counters.get_mut(counters)) {
            counters.rules += 1;
        }
        let id = self.steering.rules.add(rule);
        let entry = NewEntry {
            port,
            egress,
            // A rule with `FLOW_DONT_TRAP` comes directly before the other rules of its priority.
            priority: if read.group && keeps { GROUP_PRIORITY } else { flow.priority as u8 * 2 + u8::from(keeps) },
            criteria: read.mask.criteria(),
            mask: read.mask,
            value: read.value,
            action,
            qp: (!egress && !read.drop).then_some(flow.qp),
            counter,
        };
        self.insert_entry(id, entry)?;
        Ok(id)
    }

    /// Adds an entry to a rule; on failure the rule is removed.
    fn insert_entry(&mut self, id: ObjectId, entry: NewEntry) -> Result<(), RuleError> {
        match self.steering.insert_entry(id, entry) {
            Ok(entry_ref) => {
                if let Some(rule) = self.steering.rules.get_mut(id) {
                    rule.entries.push(entry_ref);
                }
                Ok(())
            }
            Err(wrong) => {
                self.steering.remove_rule(id);
                Err(wrong)
            }
        }
    }

    /// Creates a rule with the checks of `MLX5_IB_METHOD_CREATE_FLOW`.
    fn matched_flow(&mut self, flow: &NewMatchedFlow) -> Result<ObjectId, RuleError> {
        let Some(matcher) = self.steering.matchers.get(flow.matcher).cloned() else {
            return invalid("an unknown matcher");
        };
        let drop = flow.flags & abi::FLOW_DROP != 0;
        let miss = flow.flags & abi::FLOW_DEFAULT_MISS != 0;
        if drop && miss {
            return invalid("both drop and default miss");
        }
        let interface = match flow.interface.map(|object| self.receive_interface(object)) {
            None => None,
            Some(Some(qp)) => Some(qp),
            Some(None) => return invalid("the destination is no transport interface for received packets"),
        };
        let destinations =
            usize::from(flow.qp.is_some()) + usize::from(interface.is_some()) + usize::from(drop || miss);
        let destination = flow.qp.or(interface);
        match matcher.table {
            abi::TABLE_NIC_RX if destinations != 1 => {
                return invalid(format!("{destinations} destinations; a receive rule has one"));
            }
            abi::TABLE_NIC_TX if destination.is_some() => return invalid("a transmit rule cannot have a queue pair"),
            abi::TABLE_FDB if !drop => return invalid("the embedded switch has no queue pairs"),
            abi::TABLE_RDMA_RX if destination.is_none() => return invalid("a rule for RDMA needs a queue pair"),
            _ => {}
        }
        if destination.is_some_and(|qp| !self.receives(qp)) {
            return invalid("the queue pair cannot receive packets");
        }
        let counter = match flow.counter {
            None => None,
            Some((object, offset)) => {
                let bulk = self.counter_bulk(object).and_then(|bulk| self.steering.bulks.get(bulk));
                match bulk.and_then(|bulk| bulk.get(offset as usize)) {
                    Some(counter) => Some(Arc::clone(counter)),
                    None => return invalid(format!("counter {offset} is outside its bulk")),
                }
            }
        };
        if let Some(tag) = flow.tag.filter(|tag| *tag >= 1 << 24) {
            return invalid(format!("tag {tag:#x} has more than 24 bits"));
        }
        if matcher.kind != FLOW_TYPE_NORMAL {
            return Err((Errno::OPNOTSUPP, format!("matchers of type {} have no rules", matcher.kind)));
        }
        if matcher.priority >= self.steering.spec.priorities {
            let why = format!("priority {}; at most {}", matcher.priority, self.steering.spec.priorities - 1);
            return Err((Errno::NOMEM, why));
        }
        let Some(port) = usize::from(matcher.port).checked_sub(1).filter(|at| *at < self.ports.len()) else {
            return invalid(format!("port {} does not exist", matcher.port));
        };
        if matcher.table == abi::TABLE_FDB {
            return Err((Errno::OPNOTSUPP, "the embedded switch is disabled".to_owned()));
        }
        let action = self.actions(matcher.table, &flow.actions)?;
        let action = Action { drop, next_space: miss, tag: flow.tag, ..action };
        let egress = matcher.table == abi::TABLE_NIC_TX;
        let id = self.steering.rules.add(Rule { port, egress, ..Rule::default() });
        if matches!(matcher.table, abi::TABLE_RDMA_RX | abi::TABLE_RDMA_TX) {
            // Raw Ethernet carries no RDMA packets, so the rule never matches.
            return Ok(id);
        }
        let (Some(mask), Some(value)) = (Key::from_parameters(&matcher.mask), Key::from_parameters(&flow.value)) else {
            self.steering.remove_rule(id);
            return invalid("a match behind the parts that the device knows");
        };
        let priority =
            if is_group(matcher.criteria, &mask, &value) { GROUP_PRIORITY } else { matcher.priority as u8 * 2 + 1 };
        let qp = destination;
        self.insert_entry(
            id,
            NewEntry { port, egress, priority, mask, criteria: matcher.criteria, value, action, qp, counter },
        )?;
        Ok(id)
    }

    /// Returns an error unless flow actions can be created for a table.
    fn table_with_actions(&self, table: u8) -> Result<(), RuleError> {
        match table {
            abi::TABLE_NIC_RX | abi::TABLE_NIC_TX => Ok(()),
            table => Err((Errno::OPNOTSUPP, format!("table {table} does not support flow actions"))),
        }
    }

    fn counters_in_use(&self) -> usize {
        let bulks: usize = self.steering.bulks.iter().map(|(_, bulk)| bulk.len()).sum();
        self.steering.counters.iter().count() + bulks
    }

    fn room_for_counters(&self, count: usize) -> Result<(), RuleError> {
        let max = self.steering.spec.counters as usize;
        if self.counters_in_use() + count <= max {
            Ok(())
        } else {
            Err((Errno::AGAIN, format!("{count} more counters; the device has {max}")))
        }
    }

    pub(in super::super) fn alloc_bulk(
        &mut self,
        command: &[u8],
        room: usize,
    ) -> Result<(ObjectId, Vec<u8>), RuleError> {
        let Ok((alloc, _)) = device::AllocFlowCounterIn::read_from_prefix(command) else {
            return invalid(format!("a firmware command of only {} bytes", command.len()));
        };
        if alloc.command.opcode.get() != device::ALLOC_FLOW_COUNTER {
            return invalid(format!("firmware command {:#x} does not create a flow counter", alloc.command.opcode));
        }
        if alloc.bulk.count_ones() > 1 || room < size_of::<device::AllocFlowCounterOut>() {
            return invalid(format!("a bulk of {:#x}, and {room} bytes for the answer", alloc.bulk));
        }
        let count = (usize::from(alloc.bulk) * BULK).max(1);
        self.room_for_counters(count)?;
        let id = self.steering.bulks.add((0..count).map(|_| Arc::default()).collect());
        let mut answer = device::AllocFlowCounterOut::new_zeroed();
        answer.id = ((id + 1) * BULK_NUMBERS).into();
        Ok((id, answer.as_bytes().to_vec()))
    }

    pub(in super::super) fn free_bulk(&mut self, bulk: ObjectId) {
        self.steering.bulks.remove(bulk);
    }

    pub(in super::super) fn query_bulk(
        &self,
        object: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, RuleError> {
        let Ok((query, _)) = device::QueryFlowCounterIn::read_from_prefix(command) else {
            return invalid(format!("a firmware command of only {} bytes", command.len()));
        };
        let flags = query.flags.get();
        let first = (object + 1) * BULK_NUMBERS;
        let bulk = self.steering.bulks.get(object).ok_or_else(|| (Errno::NOENT, "unknown counter".to_owned()))?;
        let at = query.id.get().checked_sub(first).map_or(usize::MAX, |at| at as usize);
        let count = ((flags & !(QUERY_CLEAR | QUERY_TO_MEMORY)) as usize).max(1);
        if query.command.opcode.get() != device::QUERY_FLOW_COUNTER || flags & QUERY_TO_MEMORY != 0 {
            return invalid(format!("firmware command {:#x}, flags {flags:#x}", query.command.opcode));
        }
        let Some(counters) = bulk.get(at..).and_then(|rest| rest.get(..count)) else {
            return invalid(format!("{count} counters from number {:#x}", query.id));
        };
        let head = size_of::<device::QueryFlowCounterOut>() - 16;
        if room < head + 16 * count {
            return invalid(format!("{room} bytes for {count} counters"));
        }
        let mut answer = vec![0; head];
        for counter in counters {
            let (packets, bytes) = counter.read();
            answer.extend_from_slice(&packets.to_be_bytes());
            answer.extend_from_slice(&bytes.to_be_bytes());
            if flags & QUERY_CLEAR != 0 {
                counter.clear();
            }
        }
        Ok(answer)
    }
}

impl<H: Host> FlowRules<H> for Mlx5<H> {
    fn create_flow(&mut self, call: &mut Call<'_, H>, flow: &NewFlow) -> Result<ObjectId, Errno> {
        self.verbs_flow(call, flow).or_else(|wrong| self.wrong(call, wrong))
    }

    fn create_matched_flow(&mut self, call: &mut Call<'_, H>, flow: &NewMatchedFlow) -> Result<ObjectId, Errno> {
        self.matched_flow(flow).or_else(|wrong| self.wrong(call, wrong))
    }

    fn destroy_flow(&mut self, flow: ObjectId) {
        self.steering.remove_rule(flow);
    }

    fn create_matcher(&mut self, _call: &mut Call<'_, H>, matcher: &NewMatcher) -> Result<ObjectId, Errno> {
        // The kernel does not check matchers; it checks their rules.
        Ok(self.steering.matchers.add(matcher.clone()))
    }

    fn destroy_matcher(&mut self, matcher: ObjectId) {
        self.steering.matchers.remove(matcher);
    }

    fn create_modify_header(&mut self, call: &mut Call<'_, H>, table: u8, commands: &[u8]) -> Result<ObjectId, Errno> {
        let (count, max) = (commands.len() / 8, self.steering.spec.modify_actions as usize);
        let made = if count > max {
            Err((Errno::OPNOTSUPP, format!("{count} header modifications; the device has {max} in a rule")))
        } else {
            self.table_with_actions(table).and_then(|()| Program::read(commands, table))
        };
        match made {
            Ok(program) => Ok(self.steering.actions.add(FlowAction::Modify(Arc::new(program)))),
            Err(wrong) => self.wrong(call, wrong),
        }
    }

    fn create_reformat(
        &mut self,
        call: &mut Call<'_, H>,
        kind: u8,
        table: u8,
        data: Option<&[u8]>,
    ) -> Result<ObjectId, Errno> {
        match Reformat::new(kind, table, data, &self.steering.spec) {
            Ok(reformat) => Ok(self.steering.actions.add(FlowAction::Reformat(Arc::new(reformat)))),
            Err(wrong) => self.wrong(call, wrong),
        }
    }

    fn destroy_action(&mut self, action: ObjectId) {
        self.steering.actions.remove(action);
    }

    fn create_counters(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno> {
        match self.room_for_counters(1) {
            Ok(()) => Ok(self.steering.counters.add(Counters::default())),
            Err(wrong) => self.wrong(call, wrong),
        }
    }

    fn read_counters(&mut self, call: &mut Call<'_, H>, counters: ObjectId, values: &mut [u64]) -> Result<(), Errno> {
        let Some(set) = self.steering.counters.get(counters) else { return Err(Errno::NOENT) };
        let (packets, bytes) = set.counter.read();
        if let Some((_, at)) = set.described.iter().find(|(_, at)| *at >= values.len()) {
            let wrong = (Errno::INVAL, format!("counter {at} of a set, but space for {}", values.len()));
            return self.wrong(call, wrong);
        }
        for (is_bytes, at) in &set.described {
            values[*at] += if *is_bytes { bytes } else { packets };
        }
        Ok(())
    }

    fn destroy_counters(&mut self, counters: ObjectId) {
        self.steering.counters.remove(counters);
    }
}
