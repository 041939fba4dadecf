use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::PortId;
use super::gso::{NewGso, SoftwareGso};
use super::handoff::RingHandoff;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::gro::Gro;
use wirepath_packet::{Batch, Packet, Pool};

/// Receive queue, as implemented by a driver. Programs use [`RxQueue`].
pub trait RxDriver: Send {
    /// Appends received packets to `batch` in order of arrival, as many as are available and fit; never
    /// blocks.
    ///
    /// The driver sets the input port of each packet, and counts delivered and dropped packets in
    /// `counters()`.
    fn receive(&mut self, batch: &mut Batch);

    /// Returns the number of packets that [`Self::receive`] would find, if the driver can tell it without a system
    /// call. With devices that put several packets into a completion, it is the least number.
    fn waiting(&mut self) -> Option<u32> {
        None
    }

    /// Counters of the queue, which is their only writer.
    fn counters(&self) -> &Arc<QueueCounters>;

    /// Counts in these counters from now on. A queue that replaces another one continues its counters.
    fn set_counters(&mut self, counters: Arc<QueueCounters>);

    /// Prepares for sleep and returns a descriptor that becomes readable (`POLLIN`) when packets arrive.
    ///
    /// `None`: the queue cannot wait, or already has packets.
    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the concrete queue, for [`super::Device::stop`] of the driver.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// How a device segments a superframe in a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelTso {
    /// Not at all.
    No,
    /// Whole, with all headers.
    Whole,
    /// With all headers except for the outer UDP checksum, which stays as it is. It is right if all segments have the
    /// same length, because the sum of the bytes behind it is then the same (linux:
    /// Documentation/networking/checksum-offloads.rst, "LCO").
    EqualSegments,
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

    /// Returns the number of packets that the device accepted and whose sending the driver has not seen yet, if it can
    /// tell.
    fn in_flight(&self) -> Option<u32> {
        None
    }

    /// Returns whether the queue sends this packet, which has [`wirepath_packet::offload::Flags::TX_SEGMENT`], and
    /// segments it or has it segmented. The port segments all others in software. `None`: a device with
    /// [`super::Offloads::TX_SEGMENT`] segments plain TCP, and TCP in tunnels as [`Self::tunnel_tso`] says.
    fn segments(&self, packet: &Packet) -> Option<bool> {
        let _ = packet;
        None
    }

    /// Returns how the device segments this TCP superframe, which is in a tunnel and has its header lengths set.
    fn tunnel_tso(&self, packet: &Packet) -> TunnelTso {
        let _ = packet;
        TunnelTso::No
    }

    /// Counts the packets that the device accepted and will never send, because it is gone.
    fn count_lost(&mut self) {}

    /// Counters of the queue, which is their only writer.
    fn counters(&self) -> &Arc<QueueCounters>;

    /// Counts in these counters from now on. A queue that replaces another one continues its counters.
    fn set_counters(&mut self, counters: Arc<QueueCounters>);

    /// Returns the concrete queue, for [`super::Device::stop`] of the driver.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// Handoff of the queues of a driver, whose device may be lost and return ([`super::Port::events`]).
pub(super) type RxHandoff = RingHandoff<Box<dyn RxDriver>, ()>;
/// The same for transmit queues.
pub(super) type TxHandoff = RingHandoff<Box<dyn TxDriver>, ()>;

/// Receive queue of a started port, owned by one worker.
pub struct RxQueue {
    /// `None` while the device is lost.
    inner: Option<Box<dyn RxDriver>>,
    /// Present if packets are joined.
    gro: Option<Box<Gro>>,
    handoff: Arc<RxHandoff>,
    counters: Arc<QueueCounters>,
    port: PortId,
    index: u16,
    name: String,
}

/// Transmit queue of a started port, owned by one worker.
pub struct TxQueue {
    /// `None` while the device is lost.
    inner: Option<Box<dyn TxDriver>>,
    /// Present if superframes may reach the queue.
    gso: Option<Box<SoftwareGso>>,
    /// Where the control thread leaves it for a queue that works without.
    new_gso: Arc<NewGso>,
    handoff: Arc<TxHandoff>,
    counters: Arc<QueueCounters>,
    port: PortId,
    index: u16,
    name: String,
}

impl RxQueue {
    pub(crate) fn new(inner: Box<dyn RxDriver>, port: PortId, index: u16, name: &str) -> Self {
        let counters = Arc::clone(inner.counters());
        let handoff = Arc::new(RingHandoff::new());
        Self { inner: Some(inner), gro: None, handoff, counters, port, index, name: name.to_owned() }
    }

    /// Joins the TCP packets and UDP datagrams of each burst.
    pub(super) fn with_gro(self) -> Self {
        Self { gro: Some(Box::default()), ..self }
    }

    /// Appends received packets to `batch`, as many as are available and fit; returns their number. Never
    /// blocks.
    #[inline]
    pub fn receive(&mut self, batch: &mut Batch) -> usize {
        let before = batch.len();
        if self.handoff.needs_poll() {
            self.poll_handoff(batch);
        }
        match &mut self.inner {
            Some(inner) => inner.receive(batch),
            None => self.counters.empty.add(1),
        }
        if let Some(gro) = &mut self.gro {
            self.counters.joined.add(gro.join(batch, before) as u64);
        }
        batch.len() - before
    }

    /// Returns the queue of a lost device when it is empty, or takes that of the returned device.
    #[cold]
    fn poll_handoff(&mut self, batch: &mut Batch) {
        if let Some(inner) = &mut self.inner {
            let before = batch.len();
            inner.receive(batch);
            if batch.len() > before || batch.is_full() {
                return;
            }
        }
        self.handoff.poll(&mut self.inner);
    }

    /// Returns the number of packets that wait in the queue; see [`RxDriver::waiting`].
    pub fn waiting(&mut self) -> Option<u32> {
        self.inner.as_mut()?.waiting()
    }

    /// Copies [`Self::waiting`] to the counters.
    pub fn sample(&mut self) {
        let waiting = self.waiting();
        self.counters.waiting.set(waiting);
    }

    /// Prepares for sleep; see [`RxDriver::wait_descriptor`].
    pub fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        self.inner.as_mut()?.wait_descriptor()
    }

    /// Returns true while the device is lost: no packets arrive, and [`Self::wait_descriptor`] returns `None`.
    pub fn is_away(&self) -> bool {
        self.inner.is_none()
    }

    pub(super) fn handoff(&self) -> &Arc<RxHandoff> {
        &self.handoff
    }

    pub(super) fn into_inner(self) -> Option<Box<dyn RxDriver>> {
        self.inner
    }
}

impl TxQueue {
    pub(crate) fn new(inner: Box<dyn TxDriver>, port: PortId, index: u16, name: &str) -> Self {
        let counters = Arc::clone(inner.counters());
        let handoff = Arc::new(RingHandoff::new());
        let new_gso = Arc::default();
        Self { inner: Some(inner), gso: None, new_gso, handoff, counters, port, index, name: name.to_owned() }
    }

    /// Segments superframes that the driver does not segment, in buffers of `pool`.
    /// `device_segments`: the device segments TCP outside tunnels.
    pub(super) fn with_software_gso(self, pool: &Pool, device_segments: bool) -> Self {
        Self { gso: Some(Box::new(SoftwareGso::new(pool.clone(), device_segments))), ..self }
    }

    /// Returns the place where [`Self::sync`] finds software segmentation that is added later.
    pub(super) fn new_gso(&self) -> &Arc<NewGso> {
        &self.new_gso
    }

    /// Transmits packets from the front of `batch` and leaves those that the device does not accept now.
    /// Returns the number of packets taken. Never blocks. While the device is lost, all packets are dropped
    /// and counted as `device_lost`.
    #[inline]
    pub fn transmit(&mut self, batch: &mut Batch) -> usize {
        let before = batch.len();
        if before > 0 {
            self.sync();
            match (&mut self.inner, &mut self.gso) {
                (Some(inner), None) => inner.transmit(batch),
                (Some(inner), Some(gso)) => gso.transmit(&mut **inner, batch),
                (None, _) => {
                    self.counters.drops.add(DropReason::DeviceLost, before as u64);
                    batch.clear();
                }
            }
        }
        before - batch.len()
    }

    /// Frees transmitted packets; see [`TxDriver::reclaim`].
    #[inline]
    pub fn reclaim(&mut self) {
        self.sync();
        match (&mut self.inner, &mut self.gso) {
            (Some(inner), None) => inner.reclaim(),
            (Some(inner), Some(gso)) => gso.reclaim(&mut **inner),
            (None, _) => {}
        }
    }

    /// Gives the queue of a lost device back, or takes that of the returned device. [`Self::transmit`] and
    /// [`Self::reclaim`] do it too; a queue that is not in use must be synchronized, or its port cannot return.
    #[inline]
    pub fn sync(&mut self) {
        if self.new_gso.is_waiting() {
            self.gso = self.new_gso.take().or_else(|| self.gso.take());
        }
        if self.handoff.needs_poll() {
            self.poll_handoff();
        }
    }

    #[cold]
    fn poll_handoff(&mut self) {
        if let Some(inner) = &mut self.inner {
            inner.count_lost();
        }
        self.drop_held(DropReason::DeviceLost);
        self.handoff.poll(&mut self.inner);
    }

    /// Returns the number of packets that the device still holds; see [`TxDriver::in_flight`].
    pub fn in_flight(&self) -> Option<u32> {
        let held = self.gso.as_ref().map_or(0, |gso| gso.held() as u32);
        match self.inner.as_ref()?.in_flight() {
            None if held == 0 => None,
            in_flight => Some(in_flight.unwrap_or(0) + held),
        }
    }

    /// Drops the frames of superframes that the driver has not accepted.
    fn drop_held(&mut self, reason: DropReason) {
        if let Some(gso) = &mut self.gso {
            let n = gso.clear();
            self.counters.drops.add(reason, n as u64);
        }
    }

    /// Copies [`Self::in_flight`] to the counters.
    pub fn sample(&self) {
        self.counters.waiting.set(self.in_flight());
    }

    /// Counts packets that the caller dropped on this queue.
    pub fn count_drops(&self, reason: DropReason, n: usize) {
        self.counters.drops.add(reason, n as u64);
    }

    pub(super) fn handoff(&self) -> &Arc<TxHandoff> {
        &self.handoff
    }

    pub(super) fn into_inner(mut self) -> Option<Box<dyn TxDriver>> {
        self.drop_held(DropReason::Stopping);
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
