//! Tables of receive queues (RQT), and transport interfaces for received packets (TIR).

use wirepath_nic_defs::mlx5 as defs;
use wirepath_nic_defs::uverbs::{self, mlx5 as abi};

use super::{Kind, Refusal, get, get64};
use crate::call::{Call, ContextId, ObjectId};
use crate::frame::Toeplitz;
use crate::host::Host;
use crate::mlx5::{MAX_TABLE, Mlx5, Qp};

/// Returns the hashed fields of a selector, as `IBV_RX_HASH_*`.
fn hash_fields(selector: u32) -> u64 {
    use defs::hash_selector as bit;
    let (v6, udp) = (selector & bit::IPV6 != 0, selector & bit::UDP != 0);
    let pick = |is_second: bool, first: u64, second: u64| if is_second { second } else { first };
    let all = [
        (bit::SRC_IP, pick(v6, uverbs::RX_HASH_SRC_IPV4, uverbs::RX_HASH_SRC_IPV6)),
        (bit::DST_IP, pick(v6, uverbs::RX_HASH_DST_IPV4, uverbs::RX_HASH_DST_IPV6)),
        (bit::SRC_PORT, pick(udp, uverbs::RX_HASH_SRC_PORT_TCP, uverbs::RX_HASH_SRC_PORT_UDP)),
        (bit::DST_PORT, pick(udp, uverbs::RX_HASH_DST_PORT_TCP, uverbs::RX_HASH_DST_PORT_UDP)),
        (bit::SPI, abi::RX_HASH_IPSEC_SPI),
    ];
    all.iter().filter(|(bit, _)| selector & bit != 0).fold(0, |fields, (_, field)| fields | field)
}

/// Returns the hash of a transport interface and the hashed fields, `IBV_RX_HASH_*`.
fn hash_of(command: &[u8], tunnels: bool) -> Result<(Option<Toeplitz>, u64), Refusal> {
    use defs::create_tir as field;
    let (outer, inner) = (get(field::OUTER, command), get(field::INNER, command));
    let fields = match hash_fields(inner) {
        0 => hash_fields(outer),
        inner => inner | abi::RX_HASH_INNER,
    };
    if fields & abi::RX_HASH_INNER != 0 && !tunnels {
        return Err("a hash of inner headers without tunnel offloads".to_owned());
    }
    let function = get(field::HASH_FUNCTION, command);
    if fields != 0 && function != u32::from(field::HASH_TOEPLITZ) {
        return Err(format!("hash function {function}"));
    }
    let key = command[field::KEY..].first_chunk::<40>().ok_or_else(|| "no key".to_owned())?;
    Ok(((fields != 0).then(|| Toeplitz::new(key)), fields))
}

impl<H: Host> Mlx5<H> {
    pub(super) fn create_rqt_object(&mut self, call: &Call<'_, H>, command: &[u8]) -> Result<(Kind, u32), Refusal> {
        use defs::create_rqt as field;
        let queues = self.listed_queues(call.context, command, MAX_TABLE)?;
        let max = queues.len().max(get(field::MAX_ENTRIES, command) as usize).min(MAX_TABLE);
        let number = self.number()?;
        Ok((Kind::Rqt { table: self.tables.add(queues), max }, number))
    }

    /// Returns the queues in a command that creates or changes a table of at most `max` entries.
    fn listed_queues(&self, context: ContextId, command: &[u8], max: usize) -> Result<Vec<ObjectId>, Refusal> {
        use defs::create_rqt as field;
        if command.len() < field::LIST {
            return Err(format!("a command of {} bytes", command.len()));
        }
        let count = get(field::ENTRIES, command) as usize;
        let list = command[field::LIST..].get(..4 * count);
        let (true, Some(list)) = (count.is_power_of_two() && count <= max, list) else {
            return Err(format!("a table of {count} entries, at most {max}, in a command of {} bytes", command.len()));
        };
        let numbers = list.as_chunks::<4>().0.iter().map(|word| u32::from_be_bytes(*word) & 0xff_ffff);
        numbers.map(|number| self.rq_of(context, number)).collect()
    }

    /// Changes the queues of a table, also for the interfaces that use it.
    pub(super) fn modify_rqt(
        &mut self,
        context: ContextId,
        (table, max): (ObjectId, usize),
        command: &[u8],
    ) -> Result<(), Refusal> {
        use defs::modify_rqt as field;
        let mask = get64(field::MASK, command);
        if mask != field::QUEUES {
            return Err(format!("change {mask:#x} of a table"));
        }
        let queues = self.listed_queues(context, command, max)?;
        for (_, object) in self.firmware_objects.iter() {
            if let Kind::Tir { qp, table: Some(used) } = object.kind
                && used == table
                && let Some(Qp::Rss(rss)) = self.qps.get_mut(qp)
            {
                rss.set_table(queues.clone());
            }
        }
        if let Some(table) = self.tables.get_mut(table) {
            *table = queues;
        }
        Ok(())
    }

    /// Returns the table with this number, and its queues.
    fn table_of(&self, context: ContextId, number: u32) -> Result<(ObjectId, Vec<ObjectId>), Refusal> {
        let found = self.object_number(context, number, |kind| matches!(kind, Kind::Rqt { .. }));
        let Some(Kind::Rqt { table, .. }) = found else { return Err(format!("table {number:#x} does not exist")) };
        let queues = self.tables.get(table).ok_or_else(|| "the table is gone".to_owned())?;
        Ok((table, queues.clone()))
    }

    pub(super) fn create_tir_object(&mut self, call: &Call<'_, H>, command: &[u8]) -> Result<(Kind, u32), Refusal> {
        use defs::create_tir as field;
        if command.len() < field::BYTES {
            return Err(format!("a command of {} bytes", command.len()));
        }
        let tunnels = get(field::TUNNELS, command) != 0;
        let (table, queues, hash, fields) = match get(field::DISPATCH, command) {
            0 => (None, vec![self.rq_of(call.context, get(field::RQ, command))?], None, 0),
            1 => {
                let (table, queues) = self.table_of(call.context, get(field::TABLE, command))?;
                let (hash, fields) = hash_of(command, tunnels)?;
                (Some(table), queues, hash, fields)
            }
            other => return Err(format!("dispatch type {other}")),
        };
        let number = self.number()?;
        Ok((Kind::Tir { qp: self.add_rss(number, queues, hash, fields, tunnels), table }, number))
    }

    /// Changes table and hash of a transport interface; returns its table.
    pub(super) fn modify_tir(
        &mut self,
        context: ContextId,
        (qp, table): (ObjectId, Option<ObjectId>),
        command: &[u8],
    ) -> Result<Option<ObjectId>, Refusal> {
        use defs::modify_tir as field;
        let mask = get64(field::MASK, command);
        if mask & !(field::TABLE | field::HASH | field::SELF_LOOPBACK) != 0 {
            return Err(format!("change {mask:#x} of a transport interface"));
        }
        if table.is_none() && mask & (field::TABLE | field::HASH) != 0 {
            return Err("a table or a hash for a single queue".to_owned());
        }
        let Some(Qp::Rss(rss)) = self.qps.get(qp) else { return Err("the interface is gone".to_owned()) };
        let hash = (mask & field::HASH != 0).then(|| hash_of(command, rss.tunnels)).transpose()?;
        let replaced = (mask & field::TABLE != 0)
            .then(|| self.table_of(context, get(defs::create_tir::TABLE, command)))
            .transpose()?;
        let Some(Qp::Rss(rss)) = self.qps.get_mut(qp) else { return Err("the interface is gone".to_owned()) };
        if let Some((hash, fields)) = hash {
            rss.set_hash(hash, fields);
        }
        match replaced {
            Some((table, queues)) => {
                rss.set_table(queues);
                Ok(Some(table))
            }
            None => Ok(table),
        }
    }
}
