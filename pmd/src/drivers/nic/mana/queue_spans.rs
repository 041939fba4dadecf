//! Description of MANA queues for clients: the spans of their memory.

use serde::{Deserialize, Serialize};
use wirepath_verbs::{DestroyedFlag, Result};

use super::rx::RxQueueMemory;
use crate::drivers::nic::common::nic::SharedQueue;
use crate::drivers::nic::common::open_device::OpenDevice;
use crate::drivers::nic::common::shared_memory::RegionSpan;

/// Memory of a send queue.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TxQueueSpans {
    pub(super) ring: RegionSpan,
    pub(super) completions: RegionSpan,
    pub(super) sq: u32,
    pub(super) cq: u32,
    pub(super) vport: u32,
}

/// Memory of a receive queue.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RxQueueSpans {
    pub(super) ring: RegionSpan,
    pub(super) completions: RegionSpan,
    pub(super) rq: u32,
}

/// Shares a receive queue with a client.
pub(super) fn share_rx<V>(
    opened: &OpenDevice<V>,
    queue: RxQueueMemory,
    destroyed: DestroyedFlag,
) -> Result<SharedQueue<RxQueueSpans>> {
    let at = RxQueueSpans {
        ring: opened.shared_span(&queue.ring)?,
        completions: opened.shared_span(&queue.completions)?,
        rq: queue.rq,
    };
    Ok(SharedQueue { keep: Box::new(queue), destroyed, at })
}
