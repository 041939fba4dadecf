//! Both ends of the lanes as queues of a port.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::cable::{End, Far, Lanes};
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
        }
    }

    /// A packet as if a device had written it: the sender's notes do not cross the cable.
    #[inline(always)]
    fn arrived(&self, packet: &mut Packet) {
        packet.set_flags(Flags::NONE);
        packet.set_verdicts(Verdicts::NONE);
        packet.set_layers(Layers::default());
        packet.set_app([0; 2]);
        packet.set_out_port(crate::port::NO_PORT);
        packet.set_in_port(self.port);
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
        let (mut packets, mut bytes) = (0, 0);
        while !batch.is_full() {
            let Some(mut packet) = lane.packets.pop() else { break };
            let len = packet.len();
            if len > self.longest {
                self.counters.drops.add(DropReason::TooLong, 1);
                continue;
            }
            self.arrived(&mut packet);
            // There is room: the loop looked.
            let _ = batch.push(packet);
            packets += 1;
            bytes += len as u64;
        }
        if packets == 0 {
            self.counters.empty.add(1);
            return;
        }
        self.counters.packets.add(packets);
        self.counters.bytes.add(bytes);
        self.counters.bursts.add(1);
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        let descriptor = self.lanes[self.index].sleep();
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
    far: Far,
    generation: u64,
}

impl Transmitter {
    pub(super) fn new(end: Arc<End>, index: u16, config: &PortConfig) -> Self {
        let generation = end.cable.generation();
        Self {
            counters: Arc::default(),
            far: end.far(),
            end,
            index: index.into(),
            longest: longest(config),
            generation,
        }
    }

    /// Looks at the cable if it changed. Takes a lock then, which happens when a side starts or stops, not per burst.
    #[inline(always)]
    fn refresh(&mut self) {
        let generation = self.end.cable.generation();
        if generation != self.generation {
            self.generation = generation;
            // Of lanes whose receiver stopped this may be the last owner: what was pushed too late is freed here.
            self.far = self.end.far();
        }
    }

    fn give_up(&self, batch: &mut Batch, reason: DropReason) {
        self.counters.drops.add(reason, batch.len() as u64);
        batch.clear();
    }
}

impl TransmitQueue for Transmitter {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        self.refresh();
        let lanes = match &self.far {
            Far::Lanes(lanes) if !lanes.is_empty() => lanes,
            Far::Cut => return self.give_up(batch, DropReason::DeviceLost),
            _ => return self.give_up(batch, DropReason::LinkDown),
        };
        let lane = &lanes[self.index % lanes.len()];
        let (mut packets, mut bytes, mut full) = (0, 0, false);
        batch.filter_map(|mut packet| {
            if full {
                return Some(packet);
            }
            if let Err(reason) = requests::fulfil(&mut packet) {
                self.counters.drops.add(reason, 1);
                return None;
            }
            let len = packet.len();
            if !(SHORTEST..=self.longest).contains(&len) {
                let reason = if len < SHORTEST { DropReason::TooShort } else { DropReason::TooLong };
                self.counters.drops.add(reason, 1);
                return None;
            }
            match lane.packets.push(packet) {
                Ok(()) => {
                    packets += 1;
                    bytes += len as u64;
                    None
                }
                Err(packet) => {
                    full = true;
                    Some(packet)
                }
            }
        });
        lane.published();
        if packets == 0 {
            self.counters.empty.add(1);
        } else {
            self.counters.packets.add(packets);
            self.counters.bytes.add(bytes);
            self.counters.bursts.add(1);
        }
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
