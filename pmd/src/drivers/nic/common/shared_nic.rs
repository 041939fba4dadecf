//! Interface of NICs whose queues can be shared with other processes ([`crate::ipc`]).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use wirepath_packet::{MetaTemplate, Pool};
use wirepath_verbs::mlx5::var::{ImportedVar, Var};
use wirepath_verbs::{Context, Result};

use super::mr_table::MrTable;
use super::nic::{Nic, QueueContext, SharedQueue};
use super::quarantine::QueueTeardown;
use super::rx_queue::{PoolExhausted, RssGroup};
use super::shared_memory::SharedRegions;
use crate::port::PortConfig;

/// Client state that the import of each receive queue uses.
pub(crate) struct RxImport<'a> {
    pub(crate) mrs: &'a MrTable,
    pub(crate) pool: &'a Pool,
    /// Initial metadata line of received packets.
    pub(crate) template: &'a MetaTemplate,
}

/// A NIC whose queues can be shared with other processes.
pub(crate) trait SharedNic: Nic {
    /// Parameters that all queues have in common.
    type Common: Serialize + DeserializeOwned;
    /// Spans of shared memory that hold a send queue.
    type TxQueueSpans: Serialize + DeserializeOwned;
    /// The imported device in the client.
    type ImportedDevice;

    /// Returns the parameters that all queues have in common.
    fn common(&self, memory: &Self::Memory, config: &PortConfig) -> Self::Common;

    /// Creates a send queue for a client.
    fn share_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<SharedQueue<Self::TxQueueSpans>>;

    /// Returns the local key (lkey) of the region that contains the packet buffers.
    fn lkey(memory: &Self::Memory) -> u32;

    /// Returns the uverbs handle of the memory region (MR) of the packet buffers, if a client can import it.
    fn mr_handle(memory: &Self::Memory) -> Option<u32>;

    /// Allocates a page of virtio doorbells (VAR) for a client, as mlx5dv_alloc_var(3) does.
    fn alloc_var(verbs: &Self::Verbs) -> Result<Var>;

    /// Imports a VAR from its exported form `bytes`. The file `lease` reports when the server ends the VAR.
    fn import_var(imported: &Self::ImportedDevice, bytes: &[u8], lease: &OwnedFd) -> Result<ImportedVar>;

    /// Imports the device from the file descriptor of its context. The context is returned if the provider can import
    /// it.
    fn import_device(cmd_fd: OwnedFd) -> Result<(Self::ImportedDevice, Option<Context>)>;

    /// Creates the ring of a shared send queue in the client. `None` if `spans` or `common` is invalid.
    fn import_tx(
        imported: &Self::ImportedDevice,
        common: &Self::Common,
        spans: &Self::TxQueueSpans,
        shared: &SharedRegions,
        mrs: &Arc<MrTable>,
        teardown: QueueTeardown,
    ) -> Result<Option<Self::Tx>>;

    /// Creates the ring of a shared receive queue in the client. `None` if `spans` or `common` is invalid.
    fn import_rx(
        imported: &Self::ImportedDevice,
        common: &Self::Common,
        spans: &Self::RxQueueSpans,
        shared: &SharedRegions,
        import: &RxImport<'_>,
        rss_group: Arc<RssGroup>,
    ) -> std::result::Result<Option<Self::Rx>, PoolExhausted>;

    /// Returns the MTU, or `None` if a parameter exceeds the driver's limits.
    fn checked_mtu(common: &Self::Common) -> Option<u16>;
}
