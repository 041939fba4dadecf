//! Receive queues.

use std::fmt;
use std::mem::swap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use wirepath_memory::DeviceMemory;
use wirepath_nic_defs::mlx5::RECORD_RECEIVE;
use wirepath_verbs::WorkQueue;

use super::arrival::{Arrival, Arrivals, Steps};
use super::cq::CompletionQueue;
use super::wqe::{Segments, pointer};
use crate::drivers::direct;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::receive::{self, AHEAD, PoolDry, Posted, Spread, Supply, buffers_for, give_back};
use crate::drivers::direct::registered::Sink;
use crate::drops::DropReason;
use crate::packet::{Batch, Blank, DATA_ROOM, HEADROOM, Packet, Pool};

/// Bytes of an Ethernet header.
const SHORTEST: u32 = direct::SHORTEST as u32;

/// Where a receive queue is, as `mlx5dv_init_obj` says.
#[derive(Debug)]
pub(super) struct ReceivePlace {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// Its doorbell records.
    pub(super) records: DeviceMemory,
    /// Work requests.
    pub(super) entries: u32,
    /// Bytes of one.
    pub(super) stride: u32,
    /// The completion queue, and its doorbell records.
    pub(super) completions: DeviceMemory,
    pub(super) completion_records: DeviceMemory,
}

/// How packets lie in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Layout {
    /// A work request for each packet: so many buffers, and behind them the sink.
    Linear {
        /// Buffers.
        buffers: usize,
    },
    /// A work request for 2^`log` strides, each of which is a buffer.
    Striding {
        /// Strides, logarithm.
        log: u32,
    },
}

impl Layout {
    /// Segments that a work request has to have room for.
    pub(super) const fn segments(self) -> u32 {
        match self {
            Self::Linear { buffers } => buffers as u32 + 1,
            Self::Striding { log } => 1 << log,
        }
    }

    /// Buffers of a work request.
    pub(super) const fn buffers(self) -> usize {
        match self {
            Self::Linear { buffers } => buffers,
            Self::Striding { log } => 1 << log,
        }
    }

    /// Segments in front of the first that points to a buffer.
    const fn lead(self) -> u32 {
        match self {
            Self::Linear { .. } => 0,
            Self::Striding { .. } => 1,
        }
    }
}

/// How a receive queue works.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReceiveMode {
    pub(super) layout: Layout,
    /// One of `MINI_FORMAT_*`, if completions may be compressed.
    pub(super) format: Option<u8>,
    /// From ticks to nanoseconds in 32.32 bits; 0: no timestamps.
    pub(super) tick: u64,
    /// Bytes of the longest frame.
    pub(super) longest: u32,
}

/// A receive queue. All its work requests are posted all the time: whoever takes a filled buffer out puts a fresh one in its place, or
/// leaves it where it is, so that slot and segment of a buffer never change.
pub(super) struct ReceiveRing {
    ring: Segments,
    records: DeviceMemory,
    completions: CompletionQueue,
    mode: ReceiveMode,
    /// Work requests, and segments from one to the next.
    entries: u32,
    distance: u32,
    /// What is added to an address of ours to make it the device's.
    shift: u64,
    arrivals: Arrivals,
    /// The hardware's object, to start it anew.
    queue: Option<WorkQueue>,
    posted: Posted,
}

impl fmt::Debug for ReceiveRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveRing").field("entries", &self.entries).field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl ReceiveRing {
    /// Posts buffers for all work requests, and tells the device. `None` if the sizes do not fit each other; `Err` if the pool runs dry.
    pub(super) fn new(
        spread: Arc<Spread>,
        keys: &Keys,
        sink: Sink,
        place: ReceivePlace,
        pool: &Pool,
        blank: &Blank,
        mode: ReceiveMode,
    ) -> Result<Option<Self>, PoolDry> {
        let layout = mode.layout;
        let (buffers, lead) = (layout.buffers(), layout.lead());
        let Some(completions) = CompletionQueue::new(&place.completions, &place.completion_records) else {
            return Ok(None);
        };
        let Some(ring) = Segments::new(&place.ring) else { return Ok(None) };
        let distance = place.stride / 16;
        let most = match layout {
            Layout::Linear { .. } => place.entries,
            Layout::Striding { log } => place.entries << log,
        };
        let fits = place.entries.is_power_of_two()
            && place.entries <= 1 << 15
            && u64::from(place.entries) * u64::from(distance) == u64::from(ring.count())
            && lead + layout.segments() <= distance
            && completions.count() >= most;
        if !fits {
            return Ok(None);
        }
        let (lkey, shift) = (keys.home().lkey(), keys.home().distance());
        let posted = Posted::take(place.entries as usize * buffers, pool, blank, spread)?;
        let steps = match layout {
            // What ends in the sink is told of and dropped.
            Layout::Linear { buffers } => Steps::Requests { bytes: (buffers * DATA_ROOM) as u32 + sink.bytes },
            Layout::Striding { log } => Steps::Strides { log },
        };
        for request in 0..place.entries {
            let first = request * distance;
            (0..distance).for_each(|i| ring.write(first + i, NOTHING));
            for i in 0..buffers as u32 {
                let packet = &posted[request as usize * buffers + i as usize];
                let address = (packet.data().as_ptr() as u64).wrapping_add(shift);
                ring.write(first + lead + i, pointer(address, lkey, DATA_ROOM as u32));
            }
            match layout {
                Layout::Linear { .. } => {
                    ring.write(first + buffers as u32, pointer(sink.address, sink.lkey, sink.bytes));
                }
                Layout::Striding { .. } => ring.write(first, [0, 0]),
            }
        }
        let this = Self {
            ring,
            records: place.records,
            completions,
            mode,
            entries: place.entries,
            distance,
            shift,
            arrivals: Arrivals::new(steps, most, mode.format, mode.tick),
            queue: None,
            posted,
        };
        this.publish(0);
        Ok(Some(this))
    }

    /// Tells which of the hardware's objects it is.
    pub(super) fn belongs_to(&mut self, queue: WorkQueue) {
        self.queue = Some(queue);
    }

    /// Starts a queue anew that the device has stopped: rules, tables and buffers stay. `None`: it is not possible.
    pub(super) fn revive(mut self) -> Option<Self> {
        let queue = self.queue.clone()?;
        // From here on the device writes neither buffers nor completions.
        queue
            .reset()
            .and_then(|()| {
                self.completions.skip();
                self.arrivals.restart();
                queue.start()
            })
            .map_err(|error| tracing::warn!("{error}"))
            .ok()?;
        // The library, which knows nothing of what was read, has written there.
        self.completions.clear();
        self.publish(0);
        Some(self)
    }

    /// The segment of a slot.
    #[inline(always)]
    fn segment(&self, slot: u32) -> u32 {
        match self.mode.layout {
            Layout::Linear { buffers: 1 } => slot * self.distance,
            Layout::Linear { buffers } => slot / buffers as u32 * self.distance + slot % buffers as u32,
            Layout::Striding { log } => (slot >> log) * self.distance + 1 + (slot & ((1 << log) - 1)),
        }
    }

    /// Tells the device that everything up to this step is posted once more.
    #[inline(always)]
    fn publish(&self, step: u32) {
        let request = match self.mode.layout {
            Layout::Linear { .. } => step,
            Layout::Striding { log } => step >> log,
        };
        let head = request.wrapping_add(self.entries) & 0xffff;
        self.records.store32_release(4 * RECORD_RECEIVE, head.to_be());
    }

    /// Hands over what is known and puts as many buffers in their place. Returns packets and bytes.
    fn hand_over(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64) {
        let n = self.arrivals.known().len();
        let start = batch.len();
        let got = supply.pool.take_batch_like(n, batch, supply.blank);
        let (mut used, mut bytes) = (0, 0);
        let (mask, per_step) = match self.mode.layout {
            Layout::Linear { buffers } => (self.entries - 1, buffers as u32),
            Layout::Striding { log } => ((self.entries << log) - 1, 1),
        };
        for i in 0..n {
            let arrival = self.arrivals.known()[i];
            let slot = (arrival.at & mask) * per_step;
            let free = if used < got { batch.as_mut_slice().get_mut(start + used) } else { None };
            let (true, Some(packet)) = (arrival.len.wrapping_sub(SHORTEST) <= self.mode.longest - SHORTEST, free)
            else {
                supply.drop_one(reason(arrival, self.mode.longest));
                continue;
            };
            self.exchange(slot, packet);
            if arrival.len as usize <= DATA_ROOM {
                arrival.describe(packet);
            } else if !self.chain(slot, packet, arrival, supply) {
                // As many bytes as there were buffers are of no use; its own buffer is a fresh one again.
                let _ = packet.set_data(HEADROOM, 0);
                supply.drop_one(reason(arrival, self.mode.longest));
                continue;
            }
            bytes += u64::from(arrival.len);
            used += 1;
        }
        if used < got {
            give_back(batch, got - used);
        }
        (used as u64, bytes)
    }

    /// Takes the buffer of a slot out and puts a fresh one in its place.
    #[inline(always)]
    fn exchange(&mut self, slot: u32, packet: &mut Packet) {
        let segment = self.segment(slot);
        let posted = &mut self.posted[slot as usize];
        swap(packet, posted);
        let address = (posted.data().as_ptr() as u64).wrapping_add(self.shift);
        self.ring.at(segment)[1].store(address.to_be(), Ordering::Relaxed);
    }

    /// Hangs the further buffers of a long packet on its first, which was taken out already; all or, if the pool has too few, none.
    #[inline(never)]
    fn chain(&mut self, slot: u32, first: &mut Packet, arrival: Arrival, supply: &Supply<'_>) -> bool {
        let wanted = buffers_for(arrival.len as usize);
        let mut fresh = Batch::new();
        if supply.pool.take_batch_like(wanted - 1, &mut fresh, supply.blank) < wanted - 1 {
            return false;
        }
        if !first.set_data(HEADROOM, DATA_ROOM) {
            return false;
        }
        let mut left = arrival.len as usize - DATA_ROOM;
        for i in 1..wanted as u32 {
            let Some(mut segment) = fresh.pop() else { return false };
            self.exchange(slot + i, &mut segment);
            let here = left.min(DATA_ROOM);
            left -= here;
            if !segment.set_data(HEADROOM, here) || first.append_segment(segment).is_err() {
                return false;
            }
        }
        arrival.note(first);
        true
    }
}

/// The end of a list of segments, in memory.
const NOTHING: [u64; 2] = pointer(0, wirepath_nic_defs::mlx5::INVALID_LKEY, 0);

impl ReceiveRing {
    /// Hands over packets of one buffer each as they are found. Returns packets and bytes, and whether there is more of another kind.
    #[inline(always)]
    fn run(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, bool) {
        // Values, not fields: as far as the compiler knows, what is written could change them.
        let (ring, distance, shift, slots) = (self.ring.view(), self.distance, self.shift, &mut *self.posted);
        let (mask, log, lead) = match self.mode.layout {
            Layout::Linear { buffers: 1 } => (self.entries - 1, 0, 0),
            Layout::Striding { log } => ((self.entries << log) - 1, log, 1),
            Layout::Linear { .. } => return (0, 0, true),
        };
        let (true, Some(hand)) = (self.arrivals.may_run(), supply.pool.hand(supply.blank)) else { return (0, 0, true) };
        let (in_request, start) = ((1u32 << log) - 1, batch.len());
        let (mut bytes, range) = (0, (SHORTEST, self.mode.longest.min(DATA_ROOM as u32)));
        let more = self.arrivals.run(&mut self.completions, batch, range, |step, what| {
            if let Some(later) = slots.get((step.wrapping_add(AHEAD) & mask) as usize) {
                later.prefetch_metadata();
                later.prefetch_data();
            }
            let slot = step & mask;
            let posted = slots.get_mut(slot as usize)?;
            let packet = hand.exchange(posted, what)?;
            let segment = (slot >> log) * distance + lead + (slot & in_request);
            let address = posted.fresh_address().wrapping_add(shift);
            ring.at(segment)[1].store(address.to_be(), Ordering::Relaxed);
            bytes += u64::from(what.len);
            Some(packet)
        });
        ((batch.len() - start) as u64, bytes, more)
    }

    /// Receives whatever there may be.
    #[inline(never)]
    fn receive_any(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let looked = self.arrivals.look(&mut self.completions, batch.space());
        let moved = if self.arrivals.known().is_empty() { (0, 0) } else { self.hand_over(batch, supply) };
        self.arrivals.clear();
        (moved.0, moved.1, looked.map(drop))
    }
}

impl receive::ReceiveRing for ReceiveRing {
    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let before = self.completions.position();
        let (mut packets, mut bytes, more) = self.run(batch, supply);
        let mut result = Ok(());
        if more {
            let (others, further, looked) = self.receive_any(batch, supply);
            (packets, bytes, result) = (packets + others, bytes + further, looked);
        }
        // Work requests that were filled are posted again, and entries that were read may be written.
        if packets > 0 || self.completions.position() != before {
            self.completions.publish();
            self.publish(self.arrivals.step());
        }
        (packets, bytes, result)
    }
}

/// Why a packet is dropped whose buffer stays posted.
#[cold]
fn reason(arrival: Arrival, longest: u32) -> DropReason {
    match arrival.len {
        0..SHORTEST => DropReason::TooShort,
        len if len > longest => DropReason::TooLong,
        _ => DropReason::NoBuffer,
    }
}
