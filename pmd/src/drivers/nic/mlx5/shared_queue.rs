//! Sharing of mlx5 queues: the client imports the device and maps the page with the doorbell registers of the
//! queue.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::DeviceMemory;
use wirepath_verbs::mlx5::var::{ImportedVar, Var, VarKind};
use wirepath_verbs::mlx5::{Mlx5, PAGE_BYTES};
use wirepath_verbs::{Context, Result, Verbs};

use super::modes::MAX_MTU;
use super::nic::{MAX_DEPTH, Mlx5Nic, NewTxQueue};
use super::queue_spans::{Registers, RxQueueSpans, TxQueueSpans};
use super::rx::{Layout, RxConfig, RxQueueMemory, RxRing};
use super::tx::{self, TxConfig, TxQueueMemory, TxRing};
use super::wqe::{MAX_BLUE_FLAME, MAX_INLINE};
use crate::drivers::nic::common::max_frame_len;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::nic::{QueueContext, SharedQueue};
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::registered_memory::{RegisteredMemory, Sink};
use crate::drivers::nic::common::rx_queue::{PoolExhausted, RssGroup};
use crate::drivers::nic::common::shared_memory::{RegionSpan, SharedRegions};
use crate::drivers::nic::common::shared_nic::{RxImport, SharedNic};
use crate::port::PortConfig;
use wirepath_packet::MAX_PACKET;

/// Bytes of a pair of doorbell records.
const RECORDS: usize = 8;

/// Parameters that all queues have in common.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Common {
    mtu: u16,
    /// Packets of a send ring.
    depth: u32,
    send: TxConfig,
    receive: RxConfig,
    sink: Sink,
}

impl SharedNic for Mlx5Nic {
    type Common = Common;
    type TxQueueSpans = TxQueueSpans;
    type ImportedDevice = Mlx5;

    fn common(&self, memory: &RegisteredMemory, config: &PortConfig) -> Common {
        Common {
            mtu: config.mtu,
            depth: self.send_depth(config),
            send: self.modes.send,
            receive: self.modes.receive(config),
            sink: memory.sink,
        }
    }

    fn share_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<SharedQueue<TxQueueSpans>> {
        let owner = usize::from(context.config.tx_queues) + index;
        let NewTxQueue { queue_memory: queue, destroyed, registers, .. } = self.create_tx_queue(context, owner)?;
        let at = |memory: &DeviceMemory| context.opened.shared_span(memory);
        let at = TxQueueSpans {
            ring: at(&queue.ring)?,
            records: at(&queue.records)?,
            completions: at(&queue.completions)?,
            completion_records: at(&queue.completion_records)?,
            number: queue.number,
            registers,
        };
        Ok(SharedQueue { keep: Box::new(queue), destroyed, at })
    }

    fn lkey(memory: &RegisteredMemory) -> u32 {
        memory.mrs.primary_mr().lkey()
    }

    fn mr_handle(memory: &RegisteredMemory) -> Option<u32> {
        Some(memory.handle)
    }

    fn alloc_var(mlx5: &Mlx5) -> Result<Var> {
        // A page that cannot be exported is of no use.
        mlx5.check_var_export_support()?;
        Var::new(mlx5, VarKind::Virtio)
    }

    fn import_var(mlx5: &Mlx5, bytes: &[u8], lease: &OwnedFd) -> Result<ImportedVar> {
        ImportedVar::new(mlx5, bytes, lease)
    }

    fn import_device(cmd_fd: OwnedFd) -> Result<(Mlx5, Option<Context>)> {
        let context = Verbs::load()?.import_device(cmd_fd)?;
        Ok((Mlx5::from_context(&context)?, Some(context)))
    }

    fn import_tx(
        mlx5: &Mlx5,
        common: &Common,
        at: &TxQueueSpans,
        shared: &SharedRegions,
        mrs: &Arc<MrTable>,
        teardown: QueueTeardown,
    ) -> Result<Option<TxRing>> {
        let Registers { at: page, register, blue_flame } = at.registers;
        let within = register.is_multiple_of(8)
            && blue_flame.is_multiple_of(8)
            && register <= PAGE_BYTES
            && blue_flame <= PAGE_BYTES
            && register + 2 * blue_flame.max(8) <= PAGE_BYTES;
        let spans = [at.ring, at.records, at.completions, at.completion_records];
        let Some([ring, records, completions, completion_records]) = views(shared, spans) else { return Ok(None) };
        if !within || !common.is_sound() {
            return Ok(None);
        }
        let page = mlx5.map_registers(page)?;
        // The client does not know the other users of the registers and therefore writes no descriptors
        // there.
        let send = TxConfig { blue_flame: 0, ..common.send };
        let registers = tx::Registers::new(&page, register, blue_flame, Arc::new(()));
        let queue_memory =
            TxQueueMemory { ring, records, completions, completion_records, number: at.number, registers };
        Ok(TxRing::new(teardown, Arc::clone(mrs), queue_memory, send, common.depth))
    }

    fn import_rx(
        _: &Mlx5,
        common: &Common,
        at: &RxQueueSpans,
        shared: &SharedRegions,
        import: &RxImport<'_>,
        rss_group: Arc<RssGroup>,
    ) -> std::result::Result<Option<RxRing>, PoolExhausted> {
        let spans = [at.ring, at.records, at.completions, at.completion_records];
        let Some([ring, records, completions, completion_records]) = views(shared, spans) else { return Ok(None) };
        if !common.is_sound() {
            return Ok(None);
        }
        let (entries, stride) = (at.entries, at.stride);
        let queue_memory = RxQueueMemory { ring, records, entries, stride, completions, completion_records };
        RxRing::new(rss_group, import.mrs, common.sink, queue_memory, import.pool, import.template, common.receive)
    }

    fn checked_mtu(common: &Common) -> Option<u16> {
        common.is_sound().then_some(common.mtu)
    }
}

/// Returns views of a ring, its doorbell records, its completion queue, and the doorbell records of that.
fn views(shared: &SharedRegions, spans: [RegionSpan; 4]) -> Option<[DeviceMemory; 4]> {
    let [ring, records, completions, completion_records] = spans;
    Some([
        shared.view(ring, None)?,
        shared.view(records, Some(RECORDS))?,
        shared.view(completions, None)?,
        shared.view(completion_records, Some(RECORDS))?,
    ])
}

impl Common {
    /// Returns true if all values are within the driver's limits.
    fn is_sound(&self) -> bool {
        let Self { mtu, depth, send, receive, sink } = self;
        let layout = match receive.layout {
            Layout::Linear { buffers } => (1..=8).contains(&buffers),
            Layout::Striding { log } => log <= 8,
        };
        let inline = send.inline <= MAX_INLINE && (send.inline_minimum == 0 || send.inline_minimum == 18);
        (68..=MAX_MTU).contains(mtu)
            && (1..=MAX_DEPTH).contains(depth)
            && layout
            && inline
            && send.max_tso <= MAX_PACKET
            && send.blue_flame <= MAX_BLUE_FLAME
            && receive.longest as usize == max_frame_len(*mtu)
            && sink.bytes <= 1 << 20
    }
}
