use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::PortId;
use crate::counters::QueueCounters;
use crate::drops::DropReason;
use crate::packet::{Batch, Packet};

/// What a driver implements for one receive queue. Programs use [`RxQueue`].
pub trait ReceiveQueue: Send {
    /// Appends received packets to `batch`, in order of arrival, as many as are there and fit; never blocks. Each packet's input port
    /// is set. The driver adds to `counters()` what it hands over and what it drops.
    fn receive(&mut self, batch: &mut Batch);

    /// The queue's counters, of which the queue is the only writer.
    fn counters(&self) -> &Arc<QueueCounters>;

    /// Prepares for sleep and returns a descriptor that becomes readable (`POLLIN`) when packets are there; `None` if the queue
    /// cannot wait, or has packets already.
    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// For the driver's own [`super::Device::stop`]: the concrete queue.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// What a driver implements for one transmit queue. Programs use [`TxQueue`].
pub trait TransmitQueue: Send {
    /// Takes packets from the front of `batch`, in order, as many as the device accepts now, and leaves the rest; never blocks. What
    /// can never be sent (too long, say) is taken, dropped and counted. The driver adds to `counters()`.
    fn transmit(&mut self, batch: &mut Batch);

    /// Frees what the device has sent, and wakes the device if packets still wait for it. Called when the worker has nothing to send.
    fn reclaim(&mut self) {}

    /// The queue's counters, of which the queue is the only writer.
    fn counters(&self) -> &Arc<QueueCounters>;

    /// For the driver's own [`super::Device::stop`]: the concrete queue.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// A receive queue of a started port, owned by one worker.
pub struct RxQueue {
    inner: Box<dyn ReceiveQueue>,
    counters: Arc<QueueCounters>,
    port: PortId,
    index: u16,
    name: String,
}

/// A transmit queue of a started port, owned by one worker.
pub struct TxQueue {
    inner: Box<dyn TransmitQueue>,
    counters: Arc<QueueCounters>,
    port: PortId,
    index: u16,
    name: String,
}

impl RxQueue {
    pub(crate) fn new(inner: Box<dyn ReceiveQueue>, port: PortId, index: u16, name: &str) -> Self {
        Self { counters: Arc::clone(inner.counters()), inner, port, index, name: name.to_owned() }
    }

    /// Appends received packets to `batch`, as many as are there and fit; returns how many. Never blocks.
    #[inline]
    pub fn receive(&mut self, batch: &mut Batch) -> usize {
        let before = batch.len();
        self.inner.receive(batch);
        batch.len() - before
    }

    /// Prepares for sleep; see [`ReceiveQueue::wait_descriptor`].
    pub fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_descriptor()
    }

    pub(super) fn into_inner(self) -> Box<dyn ReceiveQueue> {
        self.inner
    }
}

impl TxQueue {
    pub(crate) fn new(inner: Box<dyn TransmitQueue>, port: PortId, index: u16, name: &str) -> Self {
        Self { counters: Arc::clone(inner.counters()), inner, port, index, name: name.to_owned() }
    }

    /// Sends packets from the front of `batch`; returns how many it took, and leaves the rest to the caller. Never blocks.
    #[inline]
    pub fn transmit(&mut self, batch: &mut Batch) -> usize {
        let before = batch.len();
        if before > 0 {
            self.inner.transmit(batch);
        }
        before - batch.len()
    }

    /// Frees what the device has sent; see [`TransmitQueue::reclaim`].
    #[inline]
    pub fn reclaim(&mut self) {
        self.inner.reclaim();
    }

    /// Counts packets that the caller gave up on this queue.
    pub fn count_drops(&self, reason: DropReason, n: usize) {
        self.counters.drops.add(reason, n as u64);
    }

    pub(super) fn into_inner(self) -> Box<dyn TransmitQueue> {
        self.inner
    }
}

macro_rules! identity {
    ($($queue:ident)*) => { $(
        impl $queue {
            /// Number of the port.
            #[inline(always)]
            pub fn port(&self) -> PortId {
                self.port
            }

            /// Index among the port's queues of this direction.
            pub fn index(&self) -> u16 {
                self.index
            }

            /// Name of the port.
            pub fn port_name(&self) -> &str {
                &self.name
            }

            /// What the queue did; readable from any thread.
            #[inline(always)]
            pub fn counters(&self) -> &Arc<QueueCounters> {
                &self.counters
            }
        }

        impl fmt::Debug for $queue {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({} #{})", stringify!($queue), self.name, self.index)
            }
        }
    )* };
}
identity!(RxQueue TxQueue);

/// Bytes of the packets of a slice, for counters.
#[inline(always)]
pub fn bytes_of(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| packet.len() as u64).sum()
}
