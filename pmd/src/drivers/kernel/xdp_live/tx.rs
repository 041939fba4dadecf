//! Transmit by live frames: packets are copied into memory of the program, and one system call sends a burst.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::program::{BYTES, END, FAILED, FIRST, HEADER, LONGEST, NEXT, SHORTEST, TAKEN, record};
use crate::drivers::kernel::common::bpf::{MappedValue, Program};
use crate::drivers::kernel::common::link_probe::LinkProbe;
use crate::drivers::kernel::common::namespace::Namespace;
use crate::drivers::sw_offload;
use crate::port::TxDriver;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet};

/// Time after which [`Sender::transmit`] sends a burst that is not full. A worker that has nothing else to do sends it
/// earlier.
const LATEST: Duration = Duration::from_millis(1);

/// Contents of a live frame before the program runs.
static TEMPLATE: [u8; LONGEST] = [0; LONGEST];

/// State that the queues share with the port.
#[derive(Debug)]
pub(super) struct Shared {
    /// Namespace of the interface. The kernel looks for it in that of the calling thread.
    pub(super) namespace: Namespace,
    pub(super) link_probe: LinkProbe,
    /// Frames that the interface refused and that no queue has counted yet.
    pub(super) refused: AtomicU64,
    /// The interface takes frames of XDP programs.
    pub(super) takes_frames: AtomicBool,
}

/// Transmit queue.
pub(super) struct Sender {
    program: Program,
    value: MappedValue,
    shared: Arc<Shared>,
    /// Length of the longest frame in bytes.
    max_frame: usize,
    /// Frames of a full burst.
    burst: u32,
    collected: Collected,
    counters: Arc<QueueCounters>,
}

/// Frames in the memory of the program.
#[derive(Debug)]
struct Collected {
    frames: u32,
    /// Offset behind the last record.
    end: usize,
    /// Length of the first frame. Live frames begin with it, so bursts of equal frames need no adjustment.
    live_len: usize,
    /// Time of the first frame.
    since: Option<Instant>,
}

impl Collected {
    const NONE: Self = Self { frames: 0, end: FIRST, live_len: 0, since: None };
}

impl Sender {
    pub(super) fn new(
        program: Program,
        value: MappedValue,
        shared: Arc<Shared>,
        (max_frame, burst): (usize, u32),
    ) -> Self {
        let max_frame = max_frame.min(LONGEST);
        Self { program, value, shared, max_frame, burst, collected: Collected::NONE, counters: Arc::default() }
    }

    /// Copies a packet behind the collected ones. Returns false if there is no room.
    #[inline]
    fn collect(&mut self, packet: &mut Packet) -> Result<bool, DropReason> {
        sw_offload::apply(packet)?;
        let len = packet.len();
        if len < SHORTEST {
            return Err(DropReason::TooShort);
        }
        if len > self.max_frame {
            return Err(DropReason::TooLong);
        }
        let Self { collected, value, burst, .. } = self;
        let (at, end) = (collected.end, collected.end + record(len));
        // The program demands room for a frame of any length.
        if collected.frames >= *burst || at > BYTES - HEADER - LONGEST {
            return Ok(false);
        }
        if collected.frames == 0 {
            collected.live_len = len;
            collected.since = Some(Instant::now());
        }
        let memory = &mut value.bytes()[at..end];
        let (header, data) = memory.split_at_mut(HEADER);
        let difference = len as i64 - collected.live_len as i64;
        header[..8].copy_from_slice(&(len as u64).to_ne_bytes());
        header[8..].copy_from_slice(&difference.to_ne_bytes());
        packet.copy_to(data);
        collected.frames += 1;
        collected.end = end;
        Ok(true)
    }

    fn word(&mut self, at: usize) -> u64 {
        self.value.bytes()[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }

    fn set_word(&mut self, at: usize, value: u64) {
        self.value.bytes()[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }

    /// Sends the collected frames. Some are left if the kernel has no memory for them.
    pub(super) fn flush(&mut self) {
        if self.collected.frames == 0 {
            return;
        }
        if !self.shared.link_probe.is_up() {
            let reason = if self.shared.link_probe.exists() { DropReason::LinkDown } else { DropReason::DeviceLost };
            return self.discard(reason);
        }
        if !self.shared.takes_frames.load(Ordering::Relaxed) {
            return self.discard(DropReason::LinkDown);
        }
        let shared = Arc::clone(&self.shared);
        let Ok(_inside) = shared.namespace.enter() else { return self.discard(DropReason::TxError) };
        self.set_word(END, self.collected.end as u64);
        if self.word(TAKEN) == 0 {
            self.set_word(NEXT, FIRST as u64);
        }
        loop {
            let taken = self.word(TAKEN);
            let left = u64::from(self.collected.frames).saturating_sub(taken) as u32;
            if left == 0 {
                break;
            }
            let frame = &TEMPLATE[..self.collected.live_len];
            let Err(error) = self.program.run_burst(frame, left, &mut self.value) else {
                if self.word(TAKEN) == taken {
                    // The call succeeds and the program takes nothing: another try would not end. It may have counted
                    // the frames that are left as failed.
                    let failed = self.word(FAILED).min(taken);
                    self.set_word(FAILED, failed);
                    return self.discard(DropReason::TxError);
                }
                continue;
            };
            match error.raw_os_error() {
                // A signal interrupts the call between two parts of the burst.
                Some(libc::EINTR) => {}
                Some(libc::ENOMEM | libc::EAGAIN) => return,
                _ => return self.discard(DropReason::TxError),
            }
        }
        let failed = self.word(FAILED);
        self.count_unsent(DropReason::TxError, failed);
        self.begin_burst();
    }

    /// Drops the collected frames that were not sent.
    pub(super) fn discard(&mut self, reason: DropReason) {
        let left = u64::from(self.collected.frames).saturating_sub(self.word(TAKEN)) + self.word(FAILED);
        self.count_unsent(reason, left);
        self.begin_burst();
    }

    /// Sends what is collected, for the last time.
    pub(super) fn finish(&mut self) {
        self.flush();
        self.discard(DropReason::Stopping);
    }

    fn begin_burst(&mut self) {
        self.collected = Collected::NONE;
        for at in [TAKEN, FAILED] {
            self.set_word(at, 0);
        }
    }

    /// Counts packets as dropped that count as sent. Their bytes are those of mean packets.
    fn count_unsent(&self, reason: DropReason, packets: u64) {
        if packets == 0 {
            return;
        }
        let counted = self.counters.packets.get();
        let packets = packets.min(counted);
        let bytes = u128::from(self.counters.bytes.get()) * u128::from(packets) / u128::from(counted.max(1));
        self.counters.count_unsent(reason, packets, bytes as u64);
    }

    /// Counts frames that the interface refused.
    #[inline]
    pub(super) fn count_refused(&self) {
        if self.shared.refused.load(Ordering::Relaxed) > 0 {
            let refused = self.shared.refused.swap(0, Ordering::Relaxed);
            self.count_unsent(DropReason::TxFull, refused);
        }
    }
}

impl TxDriver for Sender {
    fn transmit(&mut self, batch: &mut Batch) {
        self.count_refused();
        let (mut taken, mut accepted) = (0, 0u64);
        let (mut packets, mut bytes) = (0u64, 0u64);
        while let Some(packet) = batch.as_mut_slice().get_mut(taken) {
            match self.collect(packet) {
                Ok(true) => {
                    (packets, accepted) = (packets + 1, accepted + 1);
                    bytes += packet.len() as u64;
                    taken += 1;
                }
                Ok(false) => {
                    // What is flushed counts as sent.
                    self.counters.packets.add(std::mem::take(&mut packets));
                    self.counters.bytes.add(std::mem::take(&mut bytes));
                    self.flush();
                    if self.collected.frames > 0 {
                        break;
                    }
                }
                Err(reason) => {
                    self.counters.drops.add(reason, 1);
                    taken += 1;
                }
            }
        }
        self.counters.packets.add(packets);
        self.counters.bytes.add(bytes);
        batch.free_front(taken);
        if accepted > 0 {
            self.counters.bursts.add(1);
        } else {
            self.counters.empty.add(1);
        }
        let is_due = self.collected.since.is_some_and(|since| since.elapsed() >= LATEST);
        if self.collected.frames >= self.burst || is_due {
            self.flush();
        }
    }

    fn reclaim(&mut self) {
        self.flush();
        self.count_refused();
    }

    fn in_flight(&self) -> Option<u32> {
        Some(self.collected.frames)
    }

    fn count_lost(&mut self) {
        self.discard(DropReason::DeviceLost);
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
