use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Attach, Cable, MemoryDevice, Options, Receiver, Transmitter};
use crate::counters::QueueStats;
use crate::packet::{Batch, Packet, Pool};
use crate::port::{Device, Link, Plan, PortConfig, PortError, PortEvent, ReceiveQueue, TransmitQueue};

/// One end of a cable in the hands of the program: the peer of an application's port, without being a worker. For tests and tools.
pub struct Endpoint {
    device: MemoryDevice,
    pool: Pool,
    rx: Vec<Lane>,
    tx: Vec<Transmitter>,
}

/// A receive queue and what was taken from it ahead.
struct Lane {
    queue: Receiver,
    ahead: std::vec::IntoIter<Packet>,
}

impl Endpoint {
    /// Makes a cable: this end, started with `config`, and the plan of the port at the other end.
    pub fn new(options: &Options, config: &PortConfig) -> Result<(Self, Box<dyn Plan>), PortError> {
        let cable = Cable::new(&options.name);
        let near = Self::start(Attach::To(Arc::clone(&cable)), config)?;
        Ok((near, Box::new(Attach::To(cable))))
    }

    /// Takes a free end of the cable that configurations call `device`.
    pub fn named(device: &str, config: &PortConfig) -> Result<Self, PortError> {
        Self::start(Attach::Named(device.to_owned()), config)
    }

    fn start(attach: Attach, config: &PortConfig) -> Result<Self, PortError> {
        let mut device = attach.attach()?;
        let (rx, tx) = device.start_queues(config)?;
        let rx = rx.into_iter().map(|queue| Lane { queue, ahead: Vec::new().into_iter() }).collect();
        Ok(Self { device, pool: config.pool.clone(), rx, tx })
    }

    /// Sends a packet by the first queue; gives it back if the other side's lane is full. Dropped and counted, as with every port, if
    /// the link is down.
    pub fn send(&mut self, packet: Packet) -> Result<(), Packet> {
        self.send_by(0, packet)
    }

    /// Sends a packet by a queue.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn send_by(&mut self, queue: usize, packet: Packet) -> Result<(), Packet> {
        let mut batch = Batch::new();
        batch.push(packet)?;
        self.tx[queue].transmit(&mut batch);
        batch.pop().map_or(Ok(()), Err)
    }

    /// Sends from the front of a batch by a queue, and leaves what did not fit.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn send_batch(&mut self, queue: usize, batch: &mut Batch) {
        self.tx[queue].transmit(batch);
    }

    /// Sends a frame by the first queue in buffers of the endpoint's pool; `false` if the pool is dry or the lane is full.
    #[must_use]
    pub fn send_bytes(&mut self, frame: &[u8]) -> bool {
        let Some(mut packet) = self.pool.take() else { return false };
        packet.extend_from_slice(frame, &self.pool) && self.send(packet).is_ok()
    }

    /// The next packet of any queue, if there is one.
    pub fn receive(&mut self) -> Option<Packet> {
        (0..self.rx.len()).find_map(|queue| self.receive_from(queue))
    }

    /// The next packet of a queue, if there is one.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn receive_from(&mut self, queue: usize) -> Option<Packet> {
        let lane = &mut self.rx[queue];
        lane.ahead.next().or_else(|| {
            let (mut batch, mut packets) = (Batch::new(), Vec::new());
            lane.queue.receive(&mut batch);
            batch.drain_front(batch.len(), |packet| packets.push(packet));
            lane.ahead = packets.into_iter();
            lane.ahead.next()
        })
    }

    /// Bytes of the next packet, if there is one.
    pub fn receive_bytes(&mut self) -> Option<Vec<u8>> {
        self.receive().map(|packet| packet.segments().flatten().copied().collect())
    }

    /// Waits for the next packet, at most this long.
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

    /// The pool that [`Self::send_bytes`] takes buffers from.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Looks at the link.
    pub fn link(&mut self) -> Link {
        self.device.link()
    }

    /// What happened since the last call.
    pub fn events(&mut self) -> Vec<PortEvent> {
        self.device.events()
    }

    /// Switches the link off, for both sides, or on again.
    pub fn set_link(&mut self, up: bool) {
        self.device.end.cable.set_link(up);
    }

    /// Cuts the cable: to the port at the other end its device is gone for good. What it received before can still be polled.
    pub fn cut(&mut self) {
        self.device.end.cable.cut();
    }

    /// What all receive queues did.
    pub fn received(&self) -> QueueStats {
        sum(self.rx.iter().map(|lane| lane.queue.counters().snapshot()))
    }

    /// What all transmit queues did.
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
