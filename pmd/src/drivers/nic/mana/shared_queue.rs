//! Sharing of MANA queues: the client maps the doorbell page from the device file. Everything else is memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{DOORBELL_RQ, DOORBELL_SQ};
use wirepath_verbs::mlx5::var::{ImportedVar, Var};
use wirepath_verbs::{Context, Error, Result};

use super::cq::Positions;
use super::nic::{self, MAX_MTU, ManaNic, ManaVerbs, NewQueue, create_tx_queue};
use super::queue_spans::{RxQueueSpans, TxQueueSpans};
use super::rx::{RxQueueMemory, RxRing};
use super::tx::{TxQueueMemory, TxRing};
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::nic::{QueueContext, SharedQueue};
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::rx_queue::{PoolExhausted, RssGroup};
use crate::drivers::nic::common::shared_memory::SharedRegions;
use crate::drivers::nic::common::shared_nic::{RxImport, SharedNic};
use crate::port::PortConfig;

/// Parameters that all queues have in common.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Common {
    mtu: u16,
}

/// Returns the error for VARs, which MANA does not have.
fn no_var() -> Error {
    Error::InvalidRequest("MANA has no VAR".to_owned())
}

impl SharedNic for ManaNic {
    type Common = Common;
    type TxQueueSpans = TxQueueSpans;
    type ImportedDevice = DeviceMemory;

    fn common(&self, _: &Arc<MrTable>, config: &PortConfig) -> Common {
        Common { mtu: config.mtu }
    }

    fn share_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<SharedQueue<TxQueueSpans>> {
        let owner = usize::from(context.config.tx_queues) + index;
        let NewQueue { memory: queue_memory, destroyed, .. } =
            create_tx_queue(context.opened, owner, self.send_depth(context.config))?;
        let ring = context.opened.shared_span(&queue_memory.ring)?;
        let completions = context.opened.shared_span(&queue_memory.completions)?;
        let at =
            TxQueueSpans { ring, completions, sq: queue_memory.sq, cq: queue_memory.cq, vport: queue_memory.vport };
        Ok(SharedQueue { keep: Box::new(queue_memory), destroyed, at })
    }

    fn lkey(memory: &Arc<MrTable>) -> u32 {
        memory.primary_mr().lkey()
    }

    fn mr_handle(_: &Arc<MrTable>) -> Option<u32> {
        // libmana cannot import objects.
        None
    }

    fn alloc_var(_: &ManaVerbs) -> Result<Var> {
        Err(no_var())
    }

    fn import_var(_: &DeviceMemory, _: &[u8], _: &OwnedFd) -> Result<ImportedVar> {
        Err(no_var())
    }

    fn import_device(cmd_fd: OwnedFd) -> Result<(DeviceMemory, Option<Context>)> {
        Ok((wirepath_verbs::mana::map_doorbells(cmd_fd.as_fd())?, None))
    }

    fn import_tx(
        page: &DeviceMemory,
        _: &Common,
        at: &TxQueueSpans,
        shared: &SharedRegions,
        mrs: &Arc<MrTable>,
        teardown: QueueTeardown,
    ) -> Result<Option<TxRing>> {
        let (Some(ring), Some(completions)) = (shared.view(at.ring, None), shared.view(at.completions, None)) else {
            return Ok(None);
        };
        let doorbell = Doorbell::new(page, DOORBELL_SQ);
        let queue_memory = TxQueueMemory { ring, completions, sq: at.sq, cq: at.cq, vport: at.vport, doorbell };
        Ok(TxRing::new(teardown, Arc::clone(mrs), queue_memory, Positions::UNKNOWN))
    }

    fn import_rx(
        page: &DeviceMemory,
        common: &Common,
        at: &RxQueueSpans,
        shared: &SharedRegions,
        import: &RxImport<'_>,
        rss_group: Arc<RssGroup>,
    ) -> std::result::Result<Option<RxRing>, PoolExhausted> {
        let (Some(ring), Some(completions)) = (shared.view(at.ring, None), shared.view(at.completions, None)) else {
            return Ok(None);
        };
        let doorbell = Doorbell::new(page, DOORBELL_RQ);
        let queue_memory = RxQueueMemory { ring, completions, rq: at.rq, doorbell };
        let buffers = nic::buffers(common.mtu);
        RxRing::new(rss_group, import.mrs, queue_memory, import.pool, import.template, buffers, Positions::UNKNOWN)
    }

    fn checked_mtu(common: &Common) -> Option<u16> {
        (68..=MAX_MTU).contains(&common.mtu).then_some(common.mtu)
    }
}
