//! `null`: a frame source and sink without a device, for measurements, demonstrations and tests.

mod frames;

use std::any::Any;
use std::sync::Arc;

pub use frames::{Content, FrameSpec, Frames, Templates};

use crate::drivers::Driver;
use crate::port::{
    Capabilities, Device, DeviceLink, Link, MacAddr, Offloads, PortConfig, PortError, PortEvent, PortSpec, Queues,
    RxDriver, TxDriver,
};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, MetaTemplate, Packet, Pool};
use wirepath_settings::{ConfigError, ConfigTable, Integer, Key, Parsed, Settings, WithDefault};

/// Packets that a source delivers in one burst.
const BURST: usize = 32;

const COUNT: Key<Integer<u64>> = Key::integer("count", 1..=i64::MAX)
    .unit("packets per queue")
    .absent("no limit")
    .about("Packets after which the source ends.");
const MAC: Key<Parsed<MacAddr>> = Key::parsed("mac", "a MAC address such as \"02:00:00:00:00:01\"")
    .absent("none")
    .about("Link-layer address that the port reports.");
const RING: Key<WithDefault<Integer<u32>>> = Key::integer("ring", 0..=65_536)
    .default(0)
    .about("Buffers that each queue rotates, as the ring of a NIC does. With 0, each buffer comes from the pool.");

static TABLE: ConfigTable = ConfigTable {
    name: "null",
    about: "Settings of driver = \"null\": the frames that the port generates.",
    absent: "the port receives nothing and discards what is sent",
    keys: &[
        &frames::SOURCE,
        &frames::SIZE,
        &frames::FLOWS,
        &frames::VLAN,
        &frames::SOURCE_MAC,
        &frames::DESTINATION_MAC,
        &COUNT,
        &MAC,
        &RING,
    ],
    tables: || vec![&frames::VXLAN],
    example: "[port.null]\nsource = \"udp4\"\nsize = 64\nflows = 1000\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct Null;

/// Options of a `null` port.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Frames that the port receives for ever; `None` if it receives nothing.
    pub source: Option<Frames>,
    /// Stop after this many packets per queue.
    pub count: Option<u64>,
    /// Link-layer address that the port reports.
    pub mac: Option<MacAddr>,
    /// Buffers that each queue rotates, as the ring of a NIC does. With 0, each buffer is taken from the pool
    /// when needed.
    pub ring: u32,
}

impl Driver for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn about(&self) -> &'static str {
        "source of generated frames and sink for everything sent; needs no device"
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, _: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        Ok(Box::new(Options {
            source: Frames::from_settings(settings)?,
            count: settings.read(&COUNT)?,
            mac: settings.read(&MAC)?,
            ring: settings.read(&RING)?,
        }))
    }
}

impl PortSpec for Options {
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
                None => Box::new(EmptySource { counters: Arc::default() }),
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
}

impl DeviceLink for NullDevice {
    fn link(&mut self) -> Link {
        Link::UP
    }

    fn events(&mut self) -> Vec<PortEvent> {
        Vec::new()
    }
}

/// Receives nothing.
struct EmptySource {
    counters: Arc<QueueCounters>,
}

impl RxDriver for EmptySource {
    fn receive(&mut self, _: &mut Batch) {
        self.counters.empty.add(1);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Receives generated frames.
struct Source {
    counters: Arc<QueueCounters>,
    pool: Pool,
    template: MetaTemplate,
    frames: frames::Generator,
    left: u64,
    /// Buffers in rotation, the oldest at `next`. Empty without a ring.
    ring: Vec<Packet>,
    next: usize,
}

impl Source {
    fn new(frames: &Frames, options: &Options, config: &PortConfig, index: u16) -> Result<Self, PortError> {
        let refused = |reason: String| PortError::Refused { driver: "null", device: String::new(), reason };
        let template = frames.template(&config.pool).in_port(config.id);
        let frames = frames.generator(index);
        let mut ring = Vec::with_capacity(options.ring as usize);
        while ring.len() < options.ring as usize {
            let mut batch = Batch::new();
            if config.pool.take_batch_from_template(options.ring as usize - ring.len(), &mut batch, &template) == 0 {
                return Err(refused(format!(
                    "a ring needs {} buffers, but pool '{}' has too few",
                    options.ring,
                    config.pool.name()
                )));
            }
            batch.drain_front(usize::MAX, |packet| ring.push(packet));
        }
        Ok(Self {
            counters: Arc::default(),
            pool: config.pool.clone(),
            template,
            frames,
            left: options.count.unwrap_or(u64::MAX),
            ring,
            next: 0,
        })
    }
}

impl Source {
    /// Frees frames, from position `start` of the batch on, that lack segments because no buffer was free.
    /// Returns how many are left.
    #[cold]
    fn drop_incomplete(&self, batch: &mut Batch, start: usize) -> usize {
        let (len, mut at) = (self.frames.len(), 0);
        batch.filter_map(|packet| {
            at += 1;
            (at <= start || packet.len() == len).then_some(packet)
        });
        batch.len() - start
    }
}

impl RxDriver for Source {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let want = BURST.min(batch.space()).min(self.left.try_into().unwrap_or(BURST));
        let start = batch.len();
        let got = self.pool.take_batch_from_template(want, batch, &self.template);
        let packets = &mut batch.as_mut_slice()[start..];
        if !self.ring.is_empty() {
            // As a NIC does: the filled buffer leaves the ring and a free one takes its slot.
            for packet in packets.iter_mut() {
                std::mem::swap(packet, &mut self.ring[self.next]);
                self.next += 1;
                if self.next == self.ring.len() {
                    self.next = 0;
                }
            }
        }
        let whole = self.frames.fill(packets, &self.pool);
        let got = if whole { got } else { self.drop_incomplete(batch, start) };
        if got < want {
            self.counters.drops.add(DropReason::NoBuffer, (want - got) as u64);
        }
        self.left -= got as u64;
        self.counters.count_burst(got as u64, (got * self.frames.len()) as u64);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Accepts and frees everything.
struct Sink {
    counters: Arc<QueueCounters>,
}

impl TxDriver for Sink {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        self.counters.packets.add(batch.len() as u64);
        self.counters.bytes.add(batch.clear());
        self.counters.bursts.add(1);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use wirepath_packet::PortId;

    use super::*;
    use crate::port::OpenPort;

    #[test]
    fn incomplete_frames_are_not_delivered() {
        let pool = Pool::new("small", 12).unwrap();
        let source = Some(FrameSpec { size: 9000, ..FrameSpec::default() }.build().unwrap());
        let port = OpenPort::open("n", Box::new(Options { source, ..Options::default() })).unwrap();
        let mut started = port.configure(PortConfig::new(PortId::new(0), pool.clone())).unwrap().start().unwrap();
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
