//! Both ends of the lanes as queues of a port.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::cable::{End, Far, Lanes};
use super::ring::{Consumer, Producer};
use crate::counters::QueueCounters;
use crate::drivers::requests;
use crate::drops::DropReason;
use crate::packet::offload::{Flags, Verdicts};
use crate::packet::{Batch, Layers, Packet};
use crate::port::{PortConfig, PortId, ReceiveQueue, TransmitQueue};

/// Shortest frame: an Ethernet header.
const SHORTEST: usize = 14;

/// Longest frame of a port: Ethernet header and two VLAN tags around the MTU.
fn longest(config: &PortConfig) -> usize {
    usize::from(config.mtu) + SHORTEST + 8
}

pub(super) struct Receiver {
    counters: Arc<QueueCounters>,
    lanes: Arc<Lanes>,
    index: usize,
    port: PortId,
    longest: usize,
    asleep: bool,
    /// Rings of the queues that send here. Those whose sender is gone come first, and are emptied first: what a sender sends after a
    /// restart must not overtake what it sent before.
    rings: Vec<Ring>,
    /// The ring that is looked at first, so that one busy sender does not starve the others.
    first: usize,
}

struct Ring {
    packets: Consumer<Packet>,
    ending: bool,
}

impl Receiver {
    pub(super) fn new(lanes: Arc<Lanes>, index: u16, config: &PortConfig) -> Self {
        Self {
            counters: Arc::default(),
            lanes,
            index: index.into(),
            port: config.id,
            longest: longest(config),
            asleep: false,
            rings: Vec::new(),
            first: 0,
        }
    }

    #[cold]
    fn take_news(&mut self) {
        let news = self.lanes[self.index].take_news();
        self.rings.extend(news.into_iter().map(|packets| Ring { packets, ending: false }));
        // A sender closes its old ring before it makes a new one. Several may have come and gone since the last look.
        for ring in &mut self.rings {
            ring.ending |= ring.packets.is_closed();
        }
        self.rings.retain_mut(|ring| !(ring.ending && ring.packets.is_empty()));
        self.rings.sort_by_key(|ring| !ring.ending);
    }

    /// Where to begin this time.
    #[inline(always)]
    fn start(&mut self) -> usize {
        if self.rings.first().is_none_or(|ring| ring.ending) {
            self.retire();
            return 0;
        }
        self.first = if self.first + 1 < self.rings.len() { self.first + 1 } else { 0 };
        self.first
    }

    #[cold]
    fn retire(&mut self) {
        self.rings.retain_mut(|ring| !(ring.ending && ring.packets.is_empty()));
    }

    /// A packet as if a device had written it: the sender's notes do not cross the cable.
    #[inline(always)]
    fn arrived(port: PortId, packet: &mut Packet) {
        packet.set_flags(Flags::NONE);
        packet.set_verdicts(Verdicts::NONE);
        packet.set_layers(Layers::default());
        packet.set_app([0; 2]);
        packet.set_out_port(crate::port::NO_PORT);
        packet.set_in_port(port);
    }
}

impl ReceiveQueue for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let lane = &self.lanes[self.index];
        if self.asleep {
            self.asleep = false;
            lane.wake_up();
        }
        if lane.has_news() {
            self.take_news();
        }
        let (mut packets, mut bytes) = (0, 0);
        let start = self.start();
        let (before, from) = self.rings.split_at_mut(start);
        for ring in from.iter_mut().chain(before) {
            while !batch.is_full() {
                let Some(mut packet) = ring.packets.pop() else { break };
                let len = packet.len();
                if len > self.longest {
                    self.counters.drops.add(DropReason::TooLong, 1);
                    continue;
                }
                Self::arrived(self.port, &mut packet);
                // There is room: the loop looked.
                let _ = batch.push(packet);
                packets += 1;
                bytes += len as u64;
            }
            ring.packets.release();
        }
        self.counters.count_burst(packets, bytes);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        let rings = &mut self.rings;
        let descriptor = self.lanes[self.index].sleep(|| rings.iter_mut().any(|ring| !ring.packets.is_empty()));
        self.asleep = descriptor.is_some();
        descriptor
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(super) struct Transmitter {
    counters: Arc<QueueCounters>,
    end: Arc<End>,
    index: usize,
    longest: usize,
    way: Way,
    generation: u64,
}

/// What a transmit queue has at the other end.
enum Way {
    Open { lanes: Arc<Lanes>, lane: usize, ring: Producer<Packet> },
    Down,
    Cut,
}

impl Transmitter {
    pub(super) fn new(end: Arc<End>, index: u16, config: &PortConfig) -> Self {
        let generation = end.cable.generation();
        let (counters, index, longest) = (Arc::default(), index.into(), longest(config));
        let mut it = Self { counters, end, index, longest, way: Way::Down, generation };
        it.look();
        it
    }

    /// Looks at the cable if it changed.
    #[inline(always)]
    fn refresh(&mut self) {
        let generation = self.end.cable.generation();
        if generation != self.generation {
            self.generation = generation;
            self.look();
        }
    }

    /// Takes a lock and memory, which happens when a side starts or stops, not per burst.
    #[cold]
    fn look(&mut self) {
        // The old ring is closed before there is a new one. Of a ring whose receiver stopped this was the last owner: what was pushed
        // too late is freed here.
        self.way = Way::Down;
        self.way = match self.end.far() {
            Far::Lanes(lanes) if !lanes.is_empty() => {
                let lane = self.index % lanes.len();
                Way::Open { ring: lanes[lane].connect(), lanes, lane }
            }
            Far::Cut => Way::Cut,
            _ => Way::Down,
        };
    }

    fn give_up(&self, batch: &mut Batch, reason: DropReason) {
        self.counters.drops.add(reason, batch.len() as u64);
        batch.clear();
    }
}

/// Does what the packet asks for, and looks at its length; `Err`: it can never be sent.
#[inline(always)]
fn admit(packet: &mut Packet, longest: usize) -> Result<usize, DropReason> {
    requests::fulfil(packet)?;
    match packet.len() {
        len if len < SHORTEST => Err(DropReason::TooShort),
        len if len > longest => Err(DropReason::TooLong),
        len => Ok(len),
    }
}

impl TransmitQueue for Transmitter {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        self.refresh();
        let (lane, ring) = match &mut self.way {
            Way::Open { lanes, lane, ring } => (&lanes[*lane], ring),
            Way::Cut => return self.give_up(batch, DropReason::DeviceLost),
            Way::Down => return self.give_up(batch, DropReason::LinkDown),
        };
        let (mut packets, mut bytes) = (0, 0);
        let (counters, longest) = (&self.counters, self.longest);
        // Those that are dropped leave room for others: hence the loop.
        loop {
            let n = ring.room(batch.len() as u32).min(batch.len() as u32);
            if n == 0 {
                break;
            }
            batch.drain_front(n as usize, |mut packet| {
                let len = match admit(&mut packet, longest) {
                    Ok(len) => len,
                    Err(reason) => return counters.drops.add(reason, 1),
                };
                match ring.push(packet) {
                    Ok(()) => {
                        packets += 1;
                        bytes += len as u64;
                    }
                    // Not reached: there was room.
                    Err(_) => counters.drops.add(DropReason::TxFull, 1),
                }
            });
        }
        ring.publish();
        lane.published();
        self.counters.count_burst(packets, bytes);
        self.refresh();
    }

    fn reclaim(&mut self) {
        self.refresh();
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
