//! Interface between the life cycle of a port and a kind of NIC.

use std::any::Any;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use wirepath_memory::BufferAllocator;
use wirepath_packet::{MetaTemplate, Pool};
use wirepath_verbs::{Context, DestroyedFlag, Error, ObjectId, ProtectionDomain, Result};

use super::open_device::OpenDevice;
use super::probe::{ProbeSpec, RdmaPort};
use super::quarantine::Quarantine;
use super::queue_fault::QueueFault;
use super::rx_queue::{RssGroup, RxRing};
use super::tx_queue::TxRing;
use crate::port::{Bifurcation, Capabilities, PortConfig, RuleHardware};

/// A kind of NIC: its capabilities and the creation of its queues. It outlives resets of the device.
pub(crate) trait Nic: Sized + Send + 'static {
    /// How its devices are found.
    const PROBE: ProbeSpec;
    /// Settings of the driver beyond [`DeviceSelector`].
    type Options;
    /// Direct verbs of an open device.
    type Verbs: Send;
    /// Registered memory of a started port.
    type Memory: Send;
    /// A send queue.
    type Tx: TxRing;
    /// A receive queue.
    type Rx: RxRing;
    /// Memory of a shared receive queue.
    type RxQueueSpans: Serialize + DeserializeOwned + Send + 'static;

    /// Opens a device.
    fn open(device: &wirepath_verbs::Device) -> Result<Context> {
        device.open()
    }

    /// Returns the direct verbs of an open device. They allocate queue memory from `allocator`.
    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, port: u8) -> Result<Self::Verbs>;

    /// Queries the capabilities of the device. Fails early if queues cannot be created, for example for lack
    /// of a privilege.
    fn probe(options: Self::Options, opened: &OpenDevice<Self::Verbs>) -> Result<Self>;

    /// Returns the capabilities of the NIC; `plain` holds those that all NICs have.
    fn capabilities(&self, plain: Capabilities) -> Capabilities;

    /// Returns the number of packets that a send ring and a receive ring of a started port can hold.
    fn depths(&self, config: &PortConfig) -> [usize; 2];

    /// Registers the memory of the port's pool.
    fn register(&self, opened: &OpenDevice<Self::Verbs>, pool: &Pool) -> Result<Self::Memory>;

    /// Creates send queue `index`.
    fn create_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<NewRing<Self::Tx>>;

    /// Creates all receive queues, `shared` more for a client, and RSS over all of them. Packets arrive from
    /// here on.
    fn create_rx(&self, context: &QueueContext<'_, Self>, shared: usize) -> Result<NewRxQueues<Self>>;

    /// Creates `shared` receive queues for a client, in place of those shared before, and updates RSS to
    /// include them. The port's own receive queues continue to run. `None` if this is impossible: then all
    /// receive queues must be recreated.
    fn update_rss(
        &self,
        context: &QueueContext<'_, Self>,
        shared: usize,
    ) -> Option<Result<Vec<SharedQueue<Self::RxQueueSpans>>>> {
        let _ = (context, shared);
        None
    }

    /// Replaces the packets that the receive queues of a port with a [`Bifurcation`] take.
    fn set_bifurcation(&self, packets: &Bifurcation) -> Result<()> {
        let _ = packets;
        Err(Error::InvalidRequest("the device has no flow rules".to_owned()))
    }

    /// Restarts a broken receive queue in place. `None` if the hardware or the fault does not allow it.
    fn restart(&self, ring: Self::Rx, fault: QueueFault) -> Option<Self::Rx> {
        drop(ring);
        let _ = fault;
        None
    }

    /// Reads the clock of the receive timestamps ([`crate::port::Device::read_clock`]).
    fn read_clock(&self, opened: &OpenDevice<Self::Verbs>) -> Option<u64> {
        let _ = opened;
        None
    }

    /// Adapts the configuration of future queues to a fault.
    fn adapt_to_fault(&mut self, fault: QueueFault, queue: Direction);

    /// Discards state that depends on an earlier start of the port.
    fn reset_state(&mut self) {}

    /// Returns the flow rules in the device, if it has any.
    fn rules(&mut self) -> Option<&mut dyn RuleHardware> {
        None
    }
}

/// Direction of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Transmit,
    Receive,
}

/// Inputs for creating queues.
pub(crate) struct QueueContext<'a, N: Nic> {
    pub(crate) opened: &'a OpenDevice<N::Verbs>,
    pub(crate) rdma_port: &'a RdmaPort,
    pub(crate) memory: &'a N::Memory,
    pub(crate) config: &'a PortConfig,
    pub(crate) template: &'a MetaTemplate,
    pub(crate) quarantine: &'a Quarantine,
}

/// A new ring, and the ID of its queue in asynchronous events.
pub(crate) struct NewRing<R> {
    pub(crate) ring: R,
    pub(crate) id: ObjectId,
}

/// All receive queues of a port.
pub(crate) struct NewRxQueues<N: Nic> {
    pub(crate) rss_group: Arc<RssGroup>,
    pub(crate) queues: Vec<NewRing<N::Rx>>,
    /// Receive queues for a client.
    pub(crate) shared: Vec<SharedQueue<N::RxQueueSpans>>,
}

/// A hardware queue that a client uses: what keeps it alive, and its destroyed flag.
pub(crate) struct SharedQueue<A> {
    pub(crate) keep: Box<dyn Any + Send + Sync>,
    pub(crate) destroyed: DestroyedFlag,
    /// Memory of the queue.
    pub(crate) at: A,
}
