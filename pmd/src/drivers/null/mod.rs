//! `null`: a source of frames and a sink, without any device. For measurements, demonstrations and tests.

mod frames;

use std::any::Any;
use std::sync::Arc;

pub use frames::{FrameSpec, Frames, Templates, TunnelSpec};

use super::Driver;
use crate::counters::QueueCounters;
use crate::drops::DropReason;
use crate::packet::{Batch, Blank, Packet, Pool};
use crate::port::{
    Capabilities, Device, Link, MacAddress, Offloads, Plan, PortConfig, PortError, PortEvent, Queues, ReceiveQueue,
    TransmitQueue,
};
use crate::settings::{ConfigError, Settings};

/// Packets that a source hands over in one burst.
const BURST: usize = 32;

/// The driver.
#[derive(Debug)]
pub struct Null;

/// What a `null` port does.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Frames that the port receives for ever; `None`: nothing is ever received.
    pub source: Option<Frames>,
    /// Stop after this many packets per queue.
    pub count: Option<u64>,
    /// Link-layer address that the port says it has.
    pub mac: Option<MacAddress>,
    /// Buffers in rotation per queue, as in the ring of a NIC; 0 takes each buffer from the pool when it is needed.
    pub ring: u32,
}

impl Driver for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn about(&self) -> &'static str {
        "source of generated frames and sink for everything sent; needs no device"
    }

    fn plan(&self, _: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        Ok(Box::new(Options {
            source: Frames::from_settings(settings)?,
            count: settings.integer("count", 1..=i64::MAX)?,
            mac: settings.parsed("mac", "a MAC address such as \"02:00:00:00:00:01\"")?,
            ring: settings.integer("ring", 0..=65_536)?.unwrap_or(0),
        }))
    }
}

impl Plan for Options {
    fn driver(&self) -> &'static str {
        "null"
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(NullDevice { options: *self }))
    }
}

struct NullDevice {
    options: Options,
}

impl Device for NullDevice {
    fn capabilities(&self) -> Capabilities {
        let mode = match &self.options.source {
            Some(frames) => format!("source of {frames}, sink"),
            None => "sink".to_owned(),
        };
        Capabilities {
            mode,
            mac: self.options.mac,
            max_rx_queues: 256,
            max_tx_queues: 256,
            offloads: Offloads::TX_CHAINS,
            max_tx_segments: u16::MAX,
            ..Capabilities::plain("null", "")
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let mut queues = Queues::default();
        for index in 0..config.rx_queues {
            queues.rx.push(match &self.options.source {
                Some(frames) => Box::new(Source::new(frames, &self.options, config, index)?),
                None => Box::new(Silence { counters: Arc::default() }),
            });
        }
        for _ in 0..config.tx_queues {
            queues.tx.push(Box::new(Sink { counters: Arc::default() }));
        }
        Ok(queues)
    }

    fn stop(&mut self, _: Queues) -> Result<(), PortError> {
        Ok(())
    }

    fn link(&mut self) -> Link {
        Link::UP
    }

    fn events(&mut self) -> Vec<PortEvent> {
        Vec::new()
    }
}

/// Receives nothing.
struct Silence {
    counters: Arc<QueueCounters>,
}

impl ReceiveQueue for Silence {
    fn receive(&mut self, _: &mut Batch) {
        self.counters.empty.add(1);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Receives generated frames.
struct Source {
    counters: Arc<QueueCounters>,
    pool: Pool,
    blank: Blank,
    frames: frames::Generator,
    left: u64,
    /// Buffers waiting for their turn, oldest at `next`; empty without a ring.
    ring: Vec<Packet>,
    next: usize,
}

impl Source {
    fn new(frames: &Frames, options: &Options, config: &PortConfig, index: u16) -> Result<Self, PortError> {
        let refused = |reason: String| PortError::Refused { driver: "null", device: String::new(), reason };
        let blank = frames.blank(&config.pool).in_port(config.id);
        let frames = frames.generator(index);
        let mut ring = Vec::with_capacity(options.ring as usize);
        while ring.len() < options.ring as usize {
            let mut batch = Batch::new();
            if config.pool.take_batch_like(options.ring as usize - ring.len(), &mut batch, &blank) == 0 {
                return Err(refused(format!(
                    "a ring of {} buffers, but pool '{}' has no more",
                    options.ring,
                    config.pool.name()
                )));
            }
            batch.drain_front(usize::MAX, |packet| ring.push(packet));
        }
        Ok(Self {
            counters: Arc::default(),
            pool: config.pool.clone(),
            blank,
            frames,
            left: options.count.unwrap_or(u64::MAX),
            ring,
            next: 0,
        })
    }
}

impl Source {
    /// Frees the frames, from the batch's position `start` on, for whose later segments there was no buffer; returns how many are left.
    #[cold]
    fn drop_short(&self, batch: &mut Batch, start: usize) -> usize {
        let (len, mut at) = (self.frames.len(), 0);
        batch.filter_map(|packet| {
            at += 1;
            (at <= start || packet.len() == len).then_some(packet)
        });
        batch.len() - start
    }
}

impl ReceiveQueue for Source {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let want = BURST.min(batch.space()).min(self.left.try_into().unwrap_or(BURST));
        let start = batch.len();
        let got = self.pool.take_batch_like(want, batch, &self.blank);
        let packets = &mut batch.as_mut_slice()[start..];
        if !self.ring.is_empty() {
            // As a NIC does: the filled buffer comes out of the ring and a fresh one takes its place.
            for packet in packets.iter_mut() {
                std::mem::swap(packet, &mut self.ring[self.next]);
                self.next += 1;
                if self.next == self.ring.len() {
                    self.next = 0;
                }
            }
        }
        let whole = self.frames.fill(packets, &self.pool);
        let got = if whole { got } else { self.drop_short(batch, start) };
        if got < want {
            self.counters.drops.add(DropReason::NoBuffer, (want - got) as u64);
        }
        self.left -= got as u64;
        self.counters.count_burst(got as u64, (got * self.frames.len()) as u64);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Accepts and frees everything.
struct Sink {
    counters: Arc<QueueCounters>,
}

impl TransmitQueue for Sink {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        self.counters.packets.add(batch.len() as u64);
        self.counters.bytes.add(batch.clear());
        self.counters.bursts.add(1);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::OpenPort;

    #[test]
    fn no_frame_is_handed_over_in_part() {
        let pool = Pool::new("small", 12).unwrap();
        let source = Some(FrameSpec { size: 9000, ..FrameSpec::default() }.build().unwrap());
        let port = OpenPort::open("n", Box::new(Options { source, ..Options::default() })).unwrap();
        let mut started = port.configure(PortConfig::new(0, pool.clone())).unwrap().start().unwrap();
        let mut batch = Batch::new();
        for _ in 0..3 {
            started.rx[0].receive(&mut batch);
            assert!(batch.iter().all(|packet| packet.len() == 9000));
            assert!(batch.len() <= 2, "twelve buffers, five for each frame");
            batch.clear();
        }
        let counters = started.rx[0].counters();
        assert!(counters.drops.get(DropReason::NoBuffer) > 0);
        assert_eq!(counters.bytes.get(), counters.packets.get() * 9000);
        started.port.stop(started.rx, started.tx).unwrap();
        assert_eq!(pool.outstanding(), 0);
    }
}
