//! Draining of tags: packets in receive rings may still carry them, and workers may still use them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wirepath_packet::PortId;
use wirepath_pmd::port::hardware::HardwareRuleId;

use super::tag_allocator::TagAllocator;
use super::{Devices, RingCounters};
use crate::epoch::Domain;
use crate::rules::RuleTable;
use crate::rules::control::table::QuiescenceToken;

/// Nanoseconds after which a device has sent its pending packets and delivered received ones to a ring.
const SETTLE_TIME: u64 = 1_000_000_000;

/// Tags of one port that are freed together.
pub(super) struct DrainBatch {
    port: PortId,
    /// Tags, with the record that is pinned for packets that carry the tag.
    tags: Vec<(u32, Option<u32>)>,
    /// Egress rules that are removed from the device only now, because packets that wait to be sent refer to
    /// them.
    ids: Vec<HardwareRuleId>,
    since: u64,
    rings: Vec<RingCounters>,
    /// Set when the rings are drained. The flag becomes true when no worker uses the tags any more.
    quiesced: Option<Arc<AtomicBool>>,
}

impl fmt::Debug for DrainBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tags of port {}", self.tags.len(), self.port)
    }
}

impl DrainBatch {
    /// Creates an empty batch. `rings` is the present state of the receive rings of the port.
    pub(super) fn new(port: PortId, rings: Vec<RingCounters>, now: u64) -> Self {
        Self { port, tags: Vec::new(), ids: Vec::new(), since: now, rings, quiesced: None }
    }

    /// Adds a tag, and the hardware rules to remove when it is free.
    pub(super) fn push(&mut self, tag: u32, record: Option<u32>, ids: Vec<HardwareRuleId>) {
        self.tags.push((tag, record));
        self.ids.extend(ids);
    }
}

/// All batches that wait.
#[derive(Debug, Default)]
pub(super) struct DrainQueue(Vec<DrainBatch>);

impl DrainQueue {
    pub(super) fn push(&mut self, batch: DrainBatch) {
        if !batch.tags.is_empty() {
            self.0.push(batch);
        }
    }

    /// Returns the number of waiting tags.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|batch| batch.tags.len()).sum()
    }

    /// Frees the tags that no packet can carry any more. Rules that a device fails to remove are passed to
    /// `stuck`.
    pub(super) fn poll(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        (tag_allocator, domain): (&mut TagAllocator, &Domain),
        mut stuck: impl FnMut(PortId, HardwareRuleId),
        now: u64,
    ) {
        let mut known: Vec<(PortId, Vec<RingCounters>)> = Vec::new();
        self.0.retain_mut(|it| {
            let Some(quiesced) = &it.quiesced else {
                let at = known.iter().position(|(port, _)| *port == it.port).unwrap_or_else(|| {
                    known.push((it.port, devices.receive_rings(it.port)));
                    known.len() - 1
                });
                let drained = known[at].1.iter().zip(&it.rings).all(|(ring, then)| ring.drained_since(*then));
                if drained && now >= it.since + SETTLE_TIME {
                    let quiesced = Arc::new(AtomicBool::new(false));
                    domain.retire(Box::new(QuiescenceToken(Arc::clone(&quiesced))));
                    it.quiesced = Some(quiesced);
                }
                return true;
            };
            if !quiesced.load(Ordering::Acquire) {
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
                tag_allocator.free(tag);
                record.into_iter().for_each(|record| table.unpin_record(record));
            }
            false
        });
    }
}
