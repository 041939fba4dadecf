use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Cable, CableSpec, MemoryDevice, Options, Receiver, Sender};
use crate::port::{DeviceLink, Link, PortConfig, PortError, PortEvent, PortSpec, RxDriver, TxDriver};
use wirepath_packet::counters::QueueStats;
use wirepath_packet::{Batch, Packet, Pool};

/// One end of a cable that a program uses directly, without a worker: the peer of an application's port. For
/// tests and tools.
pub struct Endpoint {
    device: MemoryDevice,
    pool: Pool,
    rx: Vec<Lane>,
    tx: Vec<Sender>,
}

/// A receive queue and packets that were taken from it in advance.
struct Lane {
    queue: Receiver,
    prefetched: std::vec::IntoIter<Packet>,
}

impl Endpoint {
    /// Creates a cable. Returns this end, started with `config`, and the specification of the port at the
    /// other end.
    pub fn new(options: &Options, config: &PortConfig) -> Result<(Self, Box<dyn PortSpec>), PortError> {
        let cable = Cable::new(&options.name);
        let near = Self::start(CableSpec::Shared(Arc::clone(&cable)), config)?;
        Ok((near, Box::new(CableSpec::Shared(cable))))
    }

    /// Claims a free end of the cable that configurations call `device`.
    pub fn named(device: &str, config: &PortConfig) -> Result<Self, PortError> {
        Self::start(CableSpec::Named(device.to_owned()), config)
    }

    fn start(spec: CableSpec, config: &PortConfig) -> Result<Self, PortError> {
        let mut device = spec.claim()?;
        let (rx, tx) = device.start_queues(config)?;
        let rx = rx.into_iter().map(|queue| Lane { queue, prefetched: Vec::new().into_iter() }).collect();
        Ok(Self { device, pool: config.pool.clone(), rx, tx })
    }

    /// Sends a packet on the first queue. Returns the packet as the error if the lane of the other side is
    /// full. While the link is down the packet is dropped and counted, as by every port.
    pub fn send(&mut self, packet: Packet) -> Result<(), Packet> {
        self.send_on(0, packet)
    }

    /// Sends a packet on a queue.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn send_on(&mut self, queue: usize, packet: Packet) -> Result<(), Packet> {
        let mut batch = Batch::new();
        batch.push(packet)?;
        self.tx[queue].transmit(&mut batch);
        batch.pop().map_or(Ok(()), Err)
    }

    /// Sends packets from the front of a batch on a queue. Packets that do not fit stay in the batch.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn send_batch(&mut self, queue: usize, batch: &mut Batch) {
        self.tx[queue].transmit(batch);
    }

    /// Sends a frame on the first queue, in buffers of the endpoint's pool. Returns `false` if the pool is
    /// empty or the lane is full.
    #[must_use]
    pub fn send_bytes(&mut self, frame: &[u8]) -> bool {
        let Some(mut packet) = self.pool.take() else { return false };
        packet.extend_from_slice(frame, &self.pool) && self.send(packet).is_ok()
    }

    /// Returns the next packet of any queue.
    pub fn receive(&mut self) -> Option<Packet> {
        (0..self.rx.len()).find_map(|queue| self.receive_from(queue))
    }

    /// Returns the next packet of a queue.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn receive_from(&mut self, queue: usize) -> Option<Packet> {
        let lane = &mut self.rx[queue];
        lane.prefetched.next().or_else(|| {
            let (mut batch, mut packets) = (Batch::new(), Vec::new());
            lane.queue.receive(&mut batch);
            batch.drain_front(batch.len(), |packet| packets.push(packet));
            lane.prefetched = packets.into_iter();
            lane.prefetched.next()
        })
    }

    /// Returns the bytes of the next packet.
    pub fn receive_bytes(&mut self) -> Option<Vec<u8>> {
        self.receive().map(|packet| packet.segments().flatten().copied().collect())
    }

    /// Waits for the next packet, at most for this time.
    pub fn receive_within(&mut self, patience: Duration) -> Option<Packet> {
        let end = Instant::now() + patience;
        loop {
            if let Some(packet) = self.receive() {
                return Some(packet);
            }
            if Instant::now() >= end {
                return None;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Returns the pool that [`Self::send_bytes`] uses.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the state of the link.
    pub fn link(&mut self) -> Link {
        self.device.link()
    }

    /// Returns the events since the last call.
    pub fn events(&mut self) -> Vec<PortEvent> {
        self.device.events()
    }

    /// Sets the link down or up, for both sides.
    pub fn set_link(&mut self, up: bool) {
        self.device.end.cable.set_link(up);
    }

    /// Cuts the cable. The port at the other end loses its device; packets that it received before can still
    /// be polled.
    pub fn cut(&mut self) {
        self.device.end.cable.cut();
    }

    /// Returns the sum of the counters of all receive queues.
    pub fn received(&self) -> QueueStats {
        sum(self.rx.iter().map(|lane| lane.queue.counters().snapshot()))
    }

    /// Returns the sum of the counters of all transmit queues.
    pub fn sent(&self) -> QueueStats {
        sum(self.tx.iter().map(|queue| queue.counters().snapshot()))
    }
}

fn sum(parts: impl Iterator<Item = QueueStats>) -> QueueStats {
    parts.fold(QueueStats::default(), |mut sum, part| {
        sum.add(&part);
        sum
    })
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("end", &self.device.end).finish_non_exhaustive()
    }
}
