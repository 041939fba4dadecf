//! Tags on their way back: packets that carry them may lie in receive rings, and workers may look at them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wirepath_pmd::port::PortId;
use wirepath_pmd::port::hardware::HardwareRuleId;

use super::super::RuleTable;
use super::super::table::Token;
use super::tags::Space;
use super::{Devices, Ring};
use crate::epoch::Domain;

/// Nanoseconds after which packets that a device had to send are gone from it, and those on their way into a receive ring are in it.
const SETTLED: u64 = 1_000_000_000;

/// Tags of one port that are taken back at one time.
pub(super) struct Batch {
    port: PortId,
    /// With the record that is kept for packets that carry the tag.
    tags: Vec<(u32, Option<u32>)>,
    /// Rules at egress that leave the device only now: packets that wait to be sent name them.
    ids: Vec<HardwareRuleId>,
    since: u64,
    rings: Vec<Ring>,
    /// The rings are drained; set when no worker looks any more.
    over: Option<Arc<AtomicBool>>,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tags of port {}", self.tags.len(), self.port)
    }
}

impl Batch {
    /// Without tags yet. `rings` is what the receive rings of the port have counted.
    pub(super) fn new(port: PortId, rings: Vec<Ring>, now: u64) -> Self {
        Self { port, tags: Vec::new(), ids: Vec::new(), since: now, rings, over: None }
    }

    /// With a tag, and rules that leave the device when it is free.
    pub(super) fn push(&mut self, tag: u32, record: Option<u32>, ids: Vec<HardwareRuleId>) {
        self.tags.push((tag, record));
        self.ids.extend(ids);
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Drains(Vec<Batch>);

impl Drains {
    pub(super) fn push(&mut self, batch: Batch) {
        if !batch.tags.is_empty() {
            self.0.push(batch);
        }
    }

    /// Tags that wait.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|batch| batch.tags.len()).sum()
    }

    /// Takes back what no packet can carry any more. Rules that a device does not give back are given to `stuck`.
    pub(super) fn turn(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        (space, domain): (&mut Space, &Domain),
        mut stuck: impl FnMut(PortId, HardwareRuleId),
        now: u64,
    ) {
        let mut known: Vec<(PortId, Vec<Ring>)> = Vec::new();
        self.0.retain_mut(|it| {
            let Some(over) = &it.over else {
                let at = known.iter().position(|(port, _)| *port == it.port).unwrap_or_else(|| {
                    known.push((it.port, devices.receive_rings(it.port)));
                    known.len() - 1
                });
                let drained = known[at].1.iter().zip(&it.rings).all(|(ring, then)| ring.drained_since(*then));
                if drained && now >= it.since + SETTLED {
                    let over = Arc::new(AtomicBool::new(false));
                    domain.retire(Box::new(Token(Arc::clone(&over))));
                    it.over = Some(over);
                }
                return true;
            };
            if !over.load(Ordering::Acquire) {
                return true;
            }
            if let Some(device) = devices.rule_hardware(it.port) {
                for id in it.ids.drain(..).rev() {
                    if device.remove(id).is_err() {
                        stuck(it.port, id);
                    }
                }
            }
            for (tag, record) in it.tags.drain(..) {
                space.give_back(tag);
                record.into_iter().for_each(|record| table.release(record));
            }
            false
        });
    }
}
