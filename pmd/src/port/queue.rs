use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::PortId;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet};

/// Receive queue, as implemented by a driver. Programs use [`RxQueue`].
pub trait RxDriver: Send {
    /// Appends received packets to `batch` in order of arrival, as many as are available and fit; never
    /// blocks.
    ///
    /// The driver sets the input port of each packet, and counts delivered and dropped packets in
    /// `counters()`.
    fn receive(&mut self, batch: &mut Batch);

    /// Counters of the queue, which is their only writer.
    fn counters(&self) -> &Arc<QueueCounters>;

    /// Prepares for sleep and returns a descriptor that becomes readable (`POLLIN`) when packets arrive.
    ///
    /// `None`: the queue cannot wait, or already has packets.
    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the concrete queue, for [`super::Device::stop`] of the driver.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// Transmit queue, as implemented by a driver. Programs use [`TxQueue`].
pub trait TxDriver: Send {
    /// Takes packets from the front of `batch` in order, as many as the device accepts now, and leaves the
    /// others; never blocks.
    ///
    /// Packets that cannot be transmitted at all, such as those that are too long, are taken, dropped and
    /// counted. The driver counts in `counters()`.
    fn transmit(&mut self, batch: &mut Batch);

    /// Frees transmitted packets, and wakes the device if packets wait for it. Called when the worker has
    /// nothing to send.
    fn reclaim(&mut self) {}

    /// Counters of the queue, which is their only writer.
    fn counters(&self) -> &Arc<QueueCounters>;

    /// Returns the concrete queue, for [`super::Device::stop`] of the driver.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// Receive queue of a started port, owned by one worker.
pub struct RxQueue {
    inner: Box<dyn RxDriver>,
    counters: Arc<QueueCounters>,
    port: PortId,
    index: u16,
    name: String,
}

/// Transmit queue of a started port, owned by one worker.
pub struct TxQueue {
    inner: Box<dyn TxDriver>,
    counters: Arc<QueueCounters>,
    port: PortId,
    index: u16,
    name: String,
}

impl RxQueue {
    pub(crate) fn new(inner: Box<dyn RxDriver>, port: PortId, index: u16, name: &str) -> Self {
        Self { counters: Arc::clone(inner.counters()), inner, port, index, name: name.to_owned() }
    }

    /// Appends received packets to `batch`, as many as are available and fit; returns their number. Never
    /// blocks.
    #[inline]
    pub fn receive(&mut self, batch: &mut Batch) -> usize {
        let before = batch.len();
        self.inner.receive(batch);
        batch.len() - before
    }

    /// Prepares for sleep; see [`RxDriver::wait_descriptor`].
    pub fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_descriptor()
    }

    pub(super) fn into_inner(self) -> Box<dyn RxDriver> {
        self.inner
    }
}

impl TxQueue {
    pub(crate) fn new(inner: Box<dyn TxDriver>, port: PortId, index: u16, name: &str) -> Self {
        Self { counters: Arc::clone(inner.counters()), inner, port, index, name: name.to_owned() }
    }

    /// Transmits packets from the front of `batch` and leaves those that the device does not accept now.
    /// Returns the number of packets taken. Never blocks.
    #[inline]
    pub fn transmit(&mut self, batch: &mut Batch) -> usize {
        let before = batch.len();
        if before > 0 {
            self.inner.transmit(batch);
        }
        before - batch.len()
    }

    /// Frees transmitted packets; see [`TxDriver::reclaim`].
    #[inline]
    pub fn reclaim(&mut self) {
        self.inner.reclaim();
    }

    /// Counts packets that the caller dropped on this queue.
    pub fn count_drops(&self, reason: DropReason, n: usize) {
        self.counters.drops.add(reason, n as u64);
    }

    pub(super) fn into_inner(self) -> Box<dyn TxDriver> {
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

            /// Counters of the queue, readable from any thread.
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

/// Sum of the lengths of packets in bytes, for counters.
#[inline(always)]
pub fn bytes_of(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| packet.len() as u64).sum()
}
