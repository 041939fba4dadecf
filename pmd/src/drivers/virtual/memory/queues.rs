//! The ends of the lanes as queues of a port.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::cable::{CableEnd, Lanes, PeerState};
use super::spsc_ring::{Consumer, Producer};
use crate::drivers::sw_offload;
use crate::port::{PortConfig, PortId, RxDriver, TxDriver};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Batch, HeaderLengths, Packet};

/// Length of the shortest frame: an Ethernet header.
const SHORTEST: usize = 14;

/// Returns the length of the longest frame: MTU, Ethernet header and two VLAN tags.
fn longest(config: &PortConfig) -> usize {
    usize::from(config.mtu) + SHORTEST + 8
}

pub(super) struct Receiver {
    counters: Arc<QueueCounters>,
    lanes: Arc<Lanes>,
    index: usize,
    port: PortId,
    longest: usize,
    sleeping: bool,
    /// Rings of the queues that send to this queue. Rings of stopped senders come first and are emptied
    /// first: packets that a sender sends after a restart must not overtake earlier ones.
    rings: Vec<Ring>,
    /// Index of the ring that is polled first, so that a busy sender does not starve the others.
    first: usize,
}

struct Ring {
    packets: Consumer<Packet>,
    closed: bool,
}

impl Receiver {
    pub(super) fn new(lanes: Arc<Lanes>, index: u16, config: &PortConfig) -> Self {
        Self {
            counters: Arc::default(),
            lanes,
            index: index.into(),
            port: config.id,
            longest: longest(config),
            sleeping: false,
            rings: Vec::new(),
            first: 0,
        }
    }

    #[cold]
    fn add_new_rings(&mut self) {
        let new_rings = self.lanes[self.index].take_new_rings();
        self.rings.extend(new_rings.into_iter().map(|packets| Ring { packets, closed: false }));
        // A sender closes its old ring before it creates a new one. Several rings may have been created and
        // closed since the last call.
        for ring in &mut self.rings {
            ring.closed |= ring.packets.is_closed();
        }
        self.rings.retain_mut(|ring| !(ring.closed && ring.packets.is_empty()));
        self.rings.sort_by_key(|ring| !ring.closed);
    }

    /// Returns the index of the ring to start with.
    #[inline(always)]
    fn start(&mut self) -> usize {
        if self.rings.first().is_none_or(|ring| ring.closed) {
            self.remove_drained();
            return 0;
        }
        self.first = if self.first + 1 < self.rings.len() { self.first + 1 } else { 0 };
        self.first
    }

    #[cold]
    fn remove_drained(&mut self) {
        self.rings.retain_mut(|ring| !(ring.closed && ring.packets.is_empty()));
    }

    /// Sets the metadata as a device would. The sender's metadata is not passed on.
    #[inline(always)]
    fn reset_metadata(port: PortId, packet: &mut Packet) {
        packet.set_flags(Flags::NONE);
        packet.set_checksum_status(ChecksumStatus::NONE);
        packet.set_header_lengths(HeaderLengths::default());
        packet.set_app([0; 2]);
        packet.set_out_port(None);
        packet.set_in_port(port);
    }
}

impl RxDriver for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let lane = &self.lanes[self.index];
        if self.sleeping {
            self.sleeping = false;
            lane.end_sleep();
        }
        if lane.has_new_rings() {
            self.add_new_rings();
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
                Self::reset_metadata(self.port, &mut packet);
                // The loop checked that the batch has space.
                let _ = batch.push(packet);
                packets += 1;
                bytes += len as u64;
            }
            ring.packets.release();
        }
        self.counters.count_burst(packets, bytes);
    }

    fn waiting(&mut self) -> Option<u32> {
        Some(self.rings.iter_mut().fold(0, |sum, ring| sum.saturating_add(ring.packets.len())))
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        let rings = &mut self.rings;
        let descriptor = self.lanes[self.index].prepare_sleep(|| rings.iter_mut().any(|ring| !ring.packets.is_empty()));
        self.sleeping = descriptor.is_some();
        descriptor
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(super) struct Sender {
    counters: Arc<QueueCounters>,
    end: Arc<CableEnd>,
    index: usize,
    longest: usize,
    peer: PeerLink,
    generation: u64,
}

/// Connection of a transmit queue to the other end.
enum PeerLink {
    Open { lanes: Arc<Lanes>, lane: usize, ring: Producer<Packet> },
    Down,
    Cut,
}

impl Sender {
    pub(super) fn new(end: Arc<CableEnd>, index: u16, config: &PortConfig) -> Self {
        let generation = end.cable.generation();
        let (counters, index, longest) = (Arc::default(), index.into(), longest(config));
        let mut it = Self { counters, end, index, longest, peer: PeerLink::Down, generation };
        it.reconnect();
        it
    }

    /// Reconnects if the cable has changed.
    #[inline(always)]
    fn refresh(&mut self) {
        let generation = self.end.cable.generation();
        if generation != self.generation {
            self.generation = generation;
            self.reconnect();
        }
    }

    /// Takes a lock and allocates. This happens only when a side starts or stops, not in each burst.
    #[cold]
    fn reconnect(&mut self) {
        // Close the old ring before a new one exists. If its receiver has stopped, this was the last owner:
        // packets that were pushed too late are freed here.
        self.peer = PeerLink::Down;
        self.peer = match self.end.peer_state() {
            PeerState::Receiving(lanes) if !lanes.is_empty() => {
                let lane = self.index % lanes.len();
                PeerLink::Open { ring: lanes[lane].connect(), lanes, lane }
            }
            PeerState::Cut => PeerLink::Cut,
            _ => PeerLink::Down,
        };
    }

    fn drop_all(&self, batch: &mut Batch, reason: DropReason) {
        self.counters.drops.add(reason, batch.len() as u64);
        batch.clear();
    }
}

/// Applies the requested offloads and checks the length. An error means that the packet can never be sent.
#[inline(always)]
fn prepare(packet: &mut Packet, longest: usize) -> Result<usize, DropReason> {
    sw_offload::apply(packet)?;
    match packet.len() {
        len if len < SHORTEST => Err(DropReason::TooShort),
        len if len > longest => Err(DropReason::TooLong),
        len => Ok(len),
    }
}

impl TxDriver for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        self.refresh();
        let (lane, ring) = match &mut self.peer {
            PeerLink::Open { lanes, lane, ring } => (&lanes[*lane], ring),
            PeerLink::Cut => return self.drop_all(batch, DropReason::DeviceLost),
            PeerLink::Down => return self.drop_all(batch, DropReason::LinkDown),
        };
        let (mut packets, mut bytes) = (0, 0);
        let (counters, longest) = (&self.counters, self.longest);
        // Dropped packets leave space for others, so the loop continues.
        loop {
            let n = ring.room(batch.len() as u32).min(batch.len() as u32);
            if n == 0 {
                break;
            }
            batch.drain_front(n as usize, |mut packet| {
                let len = match prepare(&mut packet, longest) {
                    Ok(len) => len,
                    Err(reason) => return counters.drops.add(reason, 1),
                };
                match ring.push(packet) {
                    Ok(()) => {
                        packets += 1;
                        bytes += len as u64;
                    }
                    // Unreachable: the ring had space.
                    Err(_) => counters.drops.add(DropReason::TxFull, 1),
                }
            });
        }
        ring.publish();
        lane.wake_if_sleeping();
        self.counters.count_burst(packets, bytes);
        self.refresh();
    }

    fn reclaim(&mut self) {
        self.refresh();
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
