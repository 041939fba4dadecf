//! Receive queues.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell, Slots};
use wirepath_nic_defs::mlx5::RECORD_RECEIVE;
use wirepath_verbs::WorkQueue;

use super::arrival::{Arrival, Arrivals, Steps};
use super::cq::CompletionQueue;
use super::run::{Places, Run, post};
use super::wqe::{Segment, Segments, pointer};
use crate::drivers::direct;
use crate::drivers::direct::bell::Bell;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::receive::{self, PoolDry, Posted, Spread, Supply, buffers_for, take_out};
use crate::drivers::direct::registered::Sink;
use crate::drops::DropReason;
use crate::packet::{Batch, Blank, DATA_ROOM, Hand, Lengths, Packet, Pool};

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

/// How a worker that sleeps is woken.
#[derive(Debug)]
pub(super) struct Waker {
    pub(super) bell: Bell,
    /// Number of the completion queue.
    pub(super) number: u32,
    /// Register that arms completion queues.
    pub(super) doorbell: Doorbell,
    /// What it announced, counted for ever.
    pub(super) announced: u32,
}

/// How packets lie in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Layout {
    /// A work request for each packet: so many buffers, and behind them the sink, if there is room.
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
    /// Buffers of a work request, each of which is a segment.
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

/// The ring by work requests.
enum Requests {
    /// A buffer each, and nothing else: they are the segments.
    Bare,
    /// A buffer and the sink each.
    Drained(Slots<[AtomicU64; 4]>),
    /// Of several buffers.
    Long,
}

/// A receive queue. All its work requests are posted all the time: whoever takes a filled buffer out puts a fresh one in its place, or
/// leaves it where it is, so that slot and segment of a buffer never change.
pub(super) struct ReceiveRing {
    ring: Segments,
    requests: Requests,
    records: DeviceMemory,
    completions: CompletionQueue,
    mode: ReceiveMode,
    /// Lengths of packets in one buffer.
    lengths: Lengths,
    /// Work requests, and segments from one to the next.
    entries: u32,
    distance: u32,
    /// What is added to an address of ours to make it the device's.
    shift: u64,
    arrivals: Arrivals,
    /// Key of the buffers, and what lies behind them.
    lkey: u32,
    sink: Option<Sink>,
    /// Looks in a row at which nothing was there.
    idle: u32,
    /// Where an entry is missing before one that is there, and since when.
    torn: Option<(u32, Instant)>,
    /// The hardware's object, to start it anew.
    queue: Option<WorkQueue>,
    waker: Option<Waker>,
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
            && u64::from(lead) + buffers as u64 <= u64::from(distance)
            && completions.count() >= most;
        if !fits {
            return Ok(None);
        }
        let (lkey, shift) = (keys.home().lkey(), keys.home().distance());
        let posted = Posted::take(place.entries as usize * buffers, pool, blank, spread)?;
        let sink = Some(sink).filter(|_| distance as usize > buffers);
        let steps = match layout {
            // What ends in the sink is told of and dropped.
            Layout::Linear { buffers } => {
                Steps::Requests { bytes: (buffers * DATA_ROOM) as u32 + sink.map_or(0, |sink| sink.bytes) }
            }
            Layout::Striding { log } => Steps::Strides { log },
        };
        let requests = match (layout, distance) {
            (Layout::Linear { buffers: 1 }, 1) => Requests::Bare,
            (Layout::Linear { buffers: 1 }, 2) => Slots::new(&place.ring).map_or(Requests::Long, Requests::Drained),
            _ => Requests::Long,
        };
        let this = Self {
            requests,
            ring,
            records: place.records,
            completions,
            mode,
            lengths: Lengths::new(SHORTEST, mode.longest),
            entries: place.entries,
            distance,
            shift,
            arrivals: Arrivals::new(steps, most, mode.format, mode.tick),
            lkey,
            sink,
            idle: 0,
            torn: None,
            queue: None,
            waker: None,
            posted,
        };
        this.describe();
        this.publish(0);
        Ok(Some(this))
    }

    /// Writes all work requests.
    fn describe(&self) {
        let Self { ring, mode: ReceiveMode { layout, .. }, distance, shift, lkey, sink, posted, .. } = self;
        let (buffers, lead) = (layout.buffers(), layout.lead());
        for request in 0..self.entries {
            let first = request * distance;
            (0..*distance).for_each(|i| ring.write(first + i, NOTHING));
            for i in 0..buffers as u32 {
                let packet = &posted[request as usize * buffers + i as usize];
                let address = packet.fresh_address().wrapping_add(*shift);
                ring.write(first + lead + i, pointer(address, *lkey, DATA_ROOM as u32));
            }
            match layout {
                Layout::Linear { .. } => {
                    if let Some(Sink { address, lkey, bytes }) = *sink {
                        ring.write(first + buffers as u32, pointer(address, lkey, bytes));
                    }
                }
                Layout::Striding { .. } => ring.write(first, [0, 0]),
            }
        }
    }

    /// Tells which of the hardware's objects it is, and how its worker can be woken.
    pub(super) fn belongs_to(&mut self, queue: WorkQueue, waker: Option<Waker>) {
        (self.queue, self.waker) = (Some(queue), waker);
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
                // Whatever stopped it may have been written there by somebody else.
                self.describe();
                queue.start()
            })
            .map_err(|error| tracing::warn!("{error}"))
            .ok()?;
        // The library, which knows nothing of what was read, has written there.
        self.completions.clear();
        self.publish(0);
        Some(self)
    }

    /// The place of the buffer of a slot.
    fn place(&self, slot: u32) -> &Segment {
        self.ring.at(match self.mode.layout {
            Layout::Linear { buffers } => slot / buffers as u32 * self.distance + slot % buffers as u32,
            Layout::Striding { log } => (slot >> log) * self.distance + 1 + (slot & ((1 << log) - 1)),
        })
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

    /// Nothing has come for long: tells the device once more what it knows, and looks whether something was missed. A process that queues are
    /// lent to may have written there: a device that believes in nothing posted brings nothing, for ever, and says nothing.
    #[cold]
    fn remind(&mut self) -> Result<(), Fault> {
        self.completions.publish();
        self.publish(self.arrivals.step());
        let position = self.completions.position();
        if !self.completions.is_torn() {
            self.torn = None;
            return Ok(());
        }
        // For some time: a device may fill what is behind first.
        let since = self.torn.filter(|(there, _)| *there == position).map_or_else(Instant::now, |(_, since)| since);
        self.torn = Some((position, since));
        if since.elapsed() < TORN { Ok(()) } else { Err(Fault::OwnerOutOfTurn) }
    }

    /// Hands over what is known and puts as many buffers in their place. Returns packets and bytes.
    fn hand_over(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64) {
        let hand = supply.pool.hand(supply.blank);
        let (mut packets, mut bytes) = (0, 0);
        for i in 0..self.arrivals.known().len() {
            let arrival = self.arrivals.known()[i];
            let is_one = arrival.len.wrapping_sub(SHORTEST) <= self.mode.longest - SHORTEST;
            let taken = hand.as_ref().filter(|_| is_one).and_then(|hand| self.take(hand, arrival));
            let Some(mut packet) = taken else {
                supply.drop_one(reason(arrival, self.mode.longest));
                continue;
            };
            arrival.note(&mut packet);
            // There is room: no more were looked for.
            drop(batch.push(packet));
            packets += 1;
            bytes += u64::from(arrival.len);
        }
        (packets, bytes)
    }

    /// Takes the buffers of a packet out and puts fresh ones in their place.
    fn take(&mut self, hand: &Hand<'_>, arrival: Arrival) -> Option<Packet> {
        let (mask, per_step) = match self.mode.layout {
            Layout::Linear { buffers } => (self.entries - 1, buffers as u32),
            Layout::Striding { log } => ((self.entries << log) - 1, 1),
        };
        let slot = (arrival.at & mask) * per_step;
        let packet = take_out(hand, &mut self.posted[slot as usize..], arrival.len)?;
        for i in slot..slot + buffers_for(arrival.len as usize) as u32 {
            post(self.place(i), self.posted[i as usize].fresh_address().wrapping_add(self.shift));
        }
        Some(packet)
    }

    /// Hands over packets of one buffer each as they are found. Returns their bytes, and whether there is more of another kind.
    #[inline(always)]
    fn run(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, bool) {
        let Self { ring, requests, completions, arrivals, mode, distance, shift, lengths, posted, .. } = self;
        let Some(hand) = supply.pool.hand(supply.blank) else { return (0, true) };
        let (shift, posted) = (*shift, &mut posted[..]);
        let mut burst = hand.burst(batch, *lengths);
        let more = match (mode.layout, requests) {
            (Layout::Linear { .. }, Requests::Bare) => {
                let places = Places { ring: ring.view(), log: 0, distance: 1, lead: 0 };
                Run { places, completions, arrivals, posted, shift }.go::<false>(&mut burst)
            }
            (Layout::Linear { .. }, Requests::Drained(requests)) => {
                let places = Places { ring: requests.view(), log: 0, distance: 1, lead: 0 };
                Run { places, completions, arrivals, posted, shift }.go::<false>(&mut burst)
            }
            (Layout::Striding { log }, _) => {
                let places = Places { ring: ring.view(), log, distance: *distance, lead: mode.layout.lead() };
                Run { places, completions, arrivals, posted, shift }.go::<true>(&mut burst)
            }
            _ => true,
        };
        (burst.bytes(), more)
    }

    /// Work requests that were filled are posted again, and entries that were read may be written.
    #[inline(always)]
    fn give_back(&mut self) {
        self.completions.publish();
        self.publish(self.arrivals.step());
        self.idle = 0;
    }

    /// Goes on behind packets and bytes that were received since the completion queue was at `before`: with `more`, whatever there may be.
    #[inline(never)]
    fn receive_more(
        &mut self,
        batch: &mut Batch,
        supply: &Supply<'_>,
        (mut packets, mut bytes, before): (u64, u64, u32),
        more: bool,
    ) -> (u64, u64, Result<(), Fault>) {
        let mut result = Ok(());
        if more {
            result = self.arrivals.look(&mut self.completions, batch.space()).map(drop);
            let moved = if self.arrivals.known().is_empty() { (0, 0) } else { self.hand_over(batch, supply) };
            self.arrivals.clear();
            (packets, bytes) = (packets + moved.0, bytes + moved.1);
        }
        if packets > 0 || self.completions.position() != before {
            self.give_back();
        } else if self.idle >= REMINDED {
            self.idle = 0;
            result = result.and(self.remind());
        }
        (packets, bytes, result)
    }
}

/// Looks at an empty queue after which the device is told once more what is posted.
const REMINDED: u32 = 1 << 12;

/// How long an entry may be missing before one that is there.
const TORN: Duration = Duration::from_secs(1);

/// The end of a list of segments, in memory.
const NOTHING: [u64; 2] = pointer(0, wirepath_nic_defs::mlx5::INVALID_LKEY, 0);

impl receive::ReceiveRing for ReceiveRing {
    #[inline(always)]
    fn is_idle(&mut self) -> bool {
        if self.arrivals.session.is_some() || self.completions.look().is_some() {
            return false;
        }
        self.idle += 1;
        self.idle < REMINDED
    }

    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let (before, start) = (self.completions.position(), batch.len());
        let (bytes, more) = self.run(batch, supply);
        let packets = (batch.len() - start) as u64;
        if packets == 0 || more {
            return self.receive_more(batch, supply, (packets, bytes, before), more);
        }
        self.give_back();
        (packets, bytes, Ok(()))
    }

    fn wait(&mut self) -> Option<BorrowedFd<'_>> {
        let Waker { bell, number, doorbell, announced } = self.waker.as_mut()?;
        *announced = announced.wrapping_add(bell.answer()?);
        doorbell.ring(self.completions.arm(*announced, *number));
        // What came before it was asked, it need not announce.
        let is_empty = self.arrivals.session.is_none() && self.completions.look().is_none();
        is_empty.then(|| bell.descriptor())
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
