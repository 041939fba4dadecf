//! Description of mlx5 queues for clients: the spans of their memory.

use serde::{Deserialize, Serialize};
use wirepath_verbs::mlx5::Mlx5;
use wirepath_verbs::{DestroyedFlag, Result};

use super::rx::RxQueueMemory;
use crate::drivers::nic::common::nic::SharedQueue;
use crate::drivers::nic::common::open_device::OpenDevice;
use crate::drivers::nic::common::shared_memory::RegionSpan;

/// Doorbell registers of a send queue: page offset in the device file, offset in the page, and bytes of a
/// BlueFlame buffer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registers {
    pub(super) at: u64,
    pub(super) register: usize,
    pub(super) blue_flame: usize,
}

/// Memory of a send queue.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TxQueueSpans {
    pub(super) ring: RegionSpan,
    pub(super) records: RegionSpan,
    pub(super) completions: RegionSpan,
    pub(super) completion_records: RegionSpan,
    pub(super) number: u32,
    pub(super) registers: Registers,
}

/// Memory of a receive queue.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RxQueueSpans {
    pub(super) ring: RegionSpan,
    pub(super) records: RegionSpan,
    pub(super) entries: u32,
    pub(super) stride: u32,
    pub(super) completions: RegionSpan,
    pub(super) completion_records: RegionSpan,
}

/// Shares a receive queue with a client.
pub(super) fn share_rx(
    opened: &OpenDevice<Mlx5>,
    queue: RxQueueMemory,
    destroyed: DestroyedFlag,
) -> Result<SharedQueue<RxQueueSpans>> {
    let at = RxQueueSpans {
        ring: opened.shared_span(&queue.ring)?,
        records: opened.shared_span(&queue.records)?,
        entries: queue.entries,
        stride: queue.stride,
        completions: opened.shared_span(&queue.completions)?,
        completion_records: opened.shared_span(&queue.completion_records)?,
    };
    Ok(SharedQueue { keep: Box::new(queue), destroyed, at })
}
