//! Parsing of receive completions: one entry for each packet, or several packets in a compressed session.
//!
//! A session consists of a title entry, which holds for all of its packets, and arrays of eight bytes for
//! each packet. The first array is in the entry after the title, the others in every eighth entry, counted
//! from the title. Entries of a session that hold no array keep their old content. Therefore all entries of a
//! session must be invalidated.

use std::sync::atomic::Ordering;

use wirepath_nic_defs::mlx5::{
    CQE_RESPONDER_ERROR, CQE_RESPONDER_SEND, CqeFlags, FORMAT_COMPRESSED, FORMAT_NONE, L3_IPV4, L4_TCP, L4_TCP_ACK,
    L4_TCP_EMPTY_ACK, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH, SYNDROME_LOCAL_LENGTH, StrideCount,
};

use super::cq::{CompletionQueue, Entry, Tail, kind};
use crate::drivers::nic::common::queue_fault::QueueFault;
use wirepath_packet::offload::ChecksumStatus;
use wirepath_packet::{BATCH, DATA_ROOM, Packet};

pub(super) const PLAIN: u8 = kind(CQE_RESPONDER_SEND, FORMAT_NONE);
pub(super) const TITLE: u8 = kind(CQE_RESPONDER_SEND, FORMAT_COMPRESSED);

/// A received packet, as described by a completion.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ParsedCqe {
    /// Length in bytes.
    pub(super) len: u32,
    /// First step, free-running: work request or stride.
    pub(super) at: u32,
    /// [`CqeFlags`] in the high half, the stripped VLAN tag in the low half.
    pub(super) flags_and_vlan: u32,
    pub(super) hash: u32,
    /// Flow tag. 0: none.
    tag: u32,
    /// True if `hash` is valid.
    pub(super) hashed: bool,
    /// Timestamp in nanoseconds. 0: none.
    timestamp: u64,
}

impl ParsedCqe {
    /// Reads an entry, without length and timestamp.
    #[inline(always)]
    pub(super) fn of(entry: Entry<'_>, tail: Tail) -> Self {
        Self {
            len: 0,
            at: 0,
            flags_and_vlan: entry.flags_and_vlan(),
            hash: entry.hash(),
            tag: tail.low24(),
            hashed: entry.is_hashed(),
            timestamp: 0,
        }
    }

    /// Reads a title for the packets of its session, without their length. `hashes`: true if the mini CQEs
    /// contain hashes.
    pub(super) fn of_title(entry: Entry<'_>, tail: Tail, hashes: bool) -> Self {
        let mut title = Self::of(entry, tail);
        // The title's own hash belongs to one packet only.
        title.hashed &= hashes;
        title
    }

    /// Reads an entry with its timestamp. `tick`: nanoseconds of a clock tick, in 32.32 bits. 0: no
    /// timestamps.
    #[inline(always)]
    pub(super) fn at_time(entry: Entry<'_>, tail: Tail, tick: u64) -> Self {
        let mut cqe = Self::of(entry, tail);
        if tick != 0 {
            cqe.timestamp = nanoseconds(entry.time(), tick);
        }
        cqe
    }

    /// Writes the metadata into the packet.
    #[inline(never)]
    pub(super) fn note(&self, packet: &mut Packet) {
        packet.set_checksum_status(checksum_status(self.flags_and_vlan));
        if self.hashed {
            packet.set_rss_hash(self.hash);
        }
        if self.tag != 0 {
            packet.set_mark(self.tag);
        }
        if CqeFlags((self.flags_and_vlan >> 16) as u16).vlan_stripped() != 0 {
            packet.set_vlan(self.flags_and_vlan as u16);
        }
        if self.timestamp != 0 {
            packet.set_timestamp(self.timestamp);
        }
    }
}

/// Returns the nanoseconds of a time of the device's clock, modulo 2^64. `tick`: nanoseconds of a tick, in 32.32 bits.
#[inline(always)]
pub(super) fn nanoseconds(ticks: u64, tick: u64) -> u64 {
    ((u128::from(ticks) * u128::from(tick)) >> 32) as u64
}

/// Flags of metadata that few packets have: a stripped VLAN tag.
pub(super) const RARE: u32 = (CqeFlags(0).with_vlan_stripped(1).0 as u32) << 16;

/// Checksum status for each value of [`CqeFlags`], without the reserved flags.
///
/// A checksum is bad if the device recognises the header and does not report it as good. UDP is an exception:
/// its checksum may be absent, which the device does not distinguish. Behind a bad IPv4 header and in
/// fragments the device checks no transport checksum.
static VERDICTS: [ChecksumStatus; 1 << FLAGS_BITS] = {
    let mut table = [ChecksumStatus::NONE; 1 << FLAGS_BITS];
    let mut at = 0;
    while at < table.len() {
        let flags = CqeFlags(at as u16);
        let network = match (flags.l3_ok(), flags.l3_type()) {
            (1, _) => ChecksumStatus::L3_GOOD,
            (_, L3_IPV4) => ChecksumStatus::L3_BAD,
            _ => ChecksumStatus::NONE,
        };
        let transport = match (flags.l4_ok(), flags.l4_type()) {
            (1, _) => ChecksumStatus::L4_GOOD,
            (_, L4_TCP | L4_TCP_EMPTY_ACK | L4_TCP_ACK) if flags.l3_ok() == 1 && flags.fragment() == 0 => {
                ChecksumStatus::L4_BAD
            }
            _ => ChecksumStatus::NONE,
        };
        table[at] = network.with(transport);
        at += 1;
    }
    table
};
const FLAGS_BITS: u32 = CqeFlags(0).with_l4_ok(1).0.ilog2() + 1;

/// Returns the checksum status for flags and VLAN tag of an entry.
#[inline(always)]
pub(super) fn checksum_status(flags_and_vlan: u32) -> ChecksumStatus {
    VERDICTS[(flags_and_vlan >> 16) as usize % VERDICTS.len()]
}

/// Returns the fault of an entry that is neither a packet nor a title.
#[cold]
fn no_packet(entry: Entry<'_>, tail: Tail) -> QueueFault {
    if tail.opcode() == CQE_RESPONDER_ERROR { entry.failure(tail) } else { QueueFault::UnknownType }
}

/// Unit in which packets consume the buffers of a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steps {
    /// One work request for each packet.
    Requests {
        /// Bytes of a work request.
        bytes: u32,
    },
    /// Strides of [`DATA_ROOM`] bytes, 2^`log` in each work request.
    Strides {
        /// Log2 of the strides of a work request.
        log: u32,
    },
}

/// A partly read session. Its title is the next entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    /// Number of all packets, and of those read.
    pub(super) count: u32,
    pub(super) read: u32,
}

/// Parser of completions, with the packets that were not delivered yet.
pub(super) struct CqeParser {
    list: Box<[ParsedCqe; BATCH]>,
    pending_len: usize,
    steps: Steps,
    /// Steps of the whole ring.
    all: u32,
    /// Format of compressed completions (`MINI_FORMAT_*`), if enabled.
    pub(super) format: Option<u8>,
    pub(super) session: Option<Session>,
    /// Step of the next completion, and of the first packet that was not delivered.
    parsed_step: u32,
    delivered_step: u32,
    /// Nanoseconds of a clock tick, in 32.32 bits. 0: no timestamps.
    pub(super) tick: u64,
}

impl CqeParser {
    /// Creates a parser for a ring of `all` steps. The completion queue has at least as many entries.
    pub(super) fn new(steps: Steps, all: u32, format: Option<u8>, tick: u64) -> Self {
        let list = Box::new([ParsedCqe::default(); BATCH]);
        Self { list, pending_len: 0, steps, all, format, session: None, parsed_step: 0, delivered_step: 0, tick }
    }

    /// Restarts at the first step of the ring.
    pub(super) fn restart(&mut self) {
        (self.pending_len, self.session, self.parsed_step, self.delivered_step) = (0, None, 0, 0);
    }

    /// Returns the packets that were not delivered yet.
    #[inline(always)]
    pub(super) fn pending(&self) -> &[ParsedCqe] {
        &self.list[..self.pending_len]
    }

    /// Ends a session whose packets were all read.
    #[inline(always)]
    pub(super) fn end_session(&mut self, completions: &mut CompletionQueue, count: u32) {
        self.session = None;
        completions.invalidate(count);
        completions.advance(count);
    }

    /// Returns the step of the next completion.
    #[inline(always)]
    pub(super) fn step(&self) -> u32 {
        self.parsed_step
    }

    /// Records that all packets up to this step were delivered directly. No packet may be pending.
    #[inline(always)]
    pub(super) fn advance_to(&mut self, step: u32) {
        debug_assert!(self.pending_len == 0);
        (self.parsed_step, self.delivered_step) = (step, step);
    }

    /// Records that all pending packets were delivered. Returns the current step.
    #[inline(always)]
    pub(super) fn clear(&mut self) -> u32 {
        self.pending_len = 0;
        self.delivered_step = self.parsed_step;
        self.parsed_step
    }

    /// Parses completions until `room` packets are pending. Returns true if there was any.
    #[inline(never)]
    pub(super) fn parse(&mut self, completions: &mut CompletionQueue, room: usize) -> Result<bool, QueueFault> {
        let room = room.min(BATCH);
        let (mut progress, mut result) = (false, Ok(()));
        // The bound keeps a device that writes endlessly from blocking the worker.
        for _ in 0..completions.count() {
            if self.pending_len >= room {
                break;
            }
            if self.session.is_some() {
                result = self.continue_session(completions, room);
                progress = true;
                if result.is_err() {
                    break;
                }
                continue;
            }
            let Some((entry, tail)) = completions.peek() else { break };
            progress = true;
            if tail.kind() == PLAIN {
                let cqe = ParsedCqe::at_time(entry, tail, self.tick);
                let bytes = entry.byte_count();
                let request = entry.request();
                result = self.add(cqe, bytes, tail.position(), request);
                if result.is_err() {
                    break;
                }
                completions.advance(1);
            } else {
                match self.begin(entry, tail) {
                    Ok(session) => self.session = Some(session),
                    Err(fault) => {
                        result = self.length_error(fault);
                        if result.is_err() {
                            break;
                        }
                        completions.advance(1);
                    }
                }
            }
        }
        if progress && self.session.is_none() {
            completions.publish();
        }
        result.map(|()| progress)
    }

    /// Handles an error completion. A frame that does not fit in its work request consumes it and is reported
    /// as an error; the queue continues (linux: drivers/net/ethernet/mellanox/mlx5/core/en/health.h,
    /// `cqe_syndrome_needs_recover`; dpdk: drivers/net/mlx5/mlx5_rx.c, `mlx5_rx_err_handle`). Every other
    /// error stops the queue.
    #[cold]
    fn length_error(&mut self, fault: QueueFault) -> Result<(), QueueFault> {
        match fault {
            QueueFault::ErrorCqe { syndrome: SYNDROME_LOCAL_LENGTH, position, .. } if self.is_linear() => {
                self.check_position(position)?;
                self.note(ParsedCqe { len: u32::MAX, at: self.parsed_step, ..ParsedCqe::default() });
                self.parsed_step = self.parsed_step.wrapping_add(1);
                Ok(())
            }
            fault => Err(fault),
        }
    }

    /// Checks that the position is the next work request.
    #[inline(always)]
    fn check_position(&self, position: u16) -> Result<(), QueueFault> {
        // Another work request, or one that was not reposted yet.
        if position != self.parsed_step as u16 || self.parsed_step.wrapping_sub(self.delivered_step) >= self.all {
            return Err(QueueFault::OutOfOrder);
        }
        Ok(())
    }

    /// Appends a pending packet. The caller has checked that there is room.
    #[inline(always)]
    fn note(&mut self, cqe: ParsedCqe) {
        if let Some(slot) = self.list.get_mut(self.pending_len) {
            *slot = cqe;
            self.pending_len += 1;
        }
    }

    /// Appends a packet, after checking that its position is the next one.
    #[inline(always)]
    fn add(&mut self, mut cqe: ParsedCqe, bytes: u32, position: u16, request: u16) -> Result<(), QueueFault> {
        cqe.at = self.parsed_step;
        match self.steps {
            Steps::Requests { bytes: max_bytes } => {
                self.check_position(position)?;
                if bytes.wrapping_sub(1) >= max_bytes {
                    return Err(QueueFault::BadLength);
                }
                cqe.len = bytes;
                self.parsed_step = self.parsed_step.wrapping_add(1);
            }
            Steps::Strides { log } => {
                let count = StrideCount(bytes);
                let mask = (1 << log) - 1;
                if u32::from(position) != self.parsed_step & mask || request != (self.parsed_step >> log) as u16 {
                    return Err(QueueFault::OutOfOrder);
                }
                let (strides, len) = (count.strides(), count.length());
                // A packet never extends beyond its work request.
                if strides.wrapping_sub(1) > mask - (self.parsed_step & mask) {
                    return Err(QueueFault::BadLength);
                }
                self.parsed_step = self.parsed_step.wrapping_add(strides);
                // More strides than were posted.
                if self.parsed_step.wrapping_sub(self.delivered_step) > self.all {
                    return Err(QueueFault::OutOfOrder);
                }
                if count.filler() != 0 {
                    // Skipped strides, whose buffers stay in place.
                    return Ok(());
                }
                if len == 0 || len.div_ceil(DATA_ROOM as u32) != strides {
                    return Err(QueueFault::BadLength);
                }
                cqe.len = len;
            }
        }
        self.note(cqe);
        Ok(())
    }

    /// Begins the session of a title entry.
    #[inline(always)]
    pub(super) fn begin(&self, entry: Entry<'_>, tail: Tail) -> Result<Session, QueueFault> {
        let Some(format) = self.format.filter(|_| tail.kind() == TITLE) else { return Err(no_packet(entry, tail)) };
        let count = entry.byte_count();
        // A session of one packet would have its array in a foreign entry. A session cannot have more packets
        // than the ring has buffers.
        if count < 2 || count > self.all {
            return Err(QueueFault::BadSession);
        }
        if format != MINI_FORMAT_CSUM_STRIDE && self.is_linear() && tail.position() != self.parsed_step as u16 {
            return Err(QueueFault::OutOfOrder);
        }
        Ok(Session { count, read: 0 })
    }

    fn is_linear(&self) -> bool {
        matches!(self.steps, Steps::Requests { .. })
    }

    /// Continues the session whose title is the next entry.
    #[inline(never)]
    fn continue_session(&mut self, completions: &mut CompletionQueue, room: usize) -> Result<(), QueueFault> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let Session { count, read } = *session;
        let (entry, tail) = Entry::reread(completions.title());
        let (title, request) =
            (ParsedCqe::of_title(entry, tail, self.format == Some(MINI_FORMAT_HASH)), entry.request());
        let now = (count - read).min((room - self.pending_len) as u32);
        session.read += now;
        let done = session.read == count;
        let format = self.format;
        for i in read..read + now {
            let mini = u64::from_be(completions.minis().from(i)[0].load(Ordering::Relaxed));
            let (reported, bytes) = ((mini >> 32) as u32, mini as u32);
            let mut cqe = title;
            // The work request advances by one with each packet. A mini CQE of strides contains the stride in
            // the hash's place.
            let mut position = self.parsed_step as u16;
            match format {
                Some(MINI_FORMAT_HASH) => cqe.hash = reported,
                Some(MINI_FORMAT_CSUM_STRIDE) => position = reported as u16,
                _ => {}
            }
            self.add(cqe, bytes, position, request)?;
        }
        if done {
            self.end_session(completions, count);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use wirepath_nic_defs::mlx5::{L3_IPV6, L4_UDP};

    use super::*;

    #[test]
    fn checksums_are_bad_only_if_the_device_checked_them() {
        let plain = CqeFlags(0).with_l2_ok(1);
        let tcp = plain.with_l3_type(L3_IPV4).with_l4_type(L4_TCP);
        let udp = tcp.with_l4_type(L4_UDP);
        let both = ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD);
        for (flags, wanted) in [
            (tcp.with_l3_ok(1).with_l4_ok(1), both),
            (udp.with_l3_ok(1).with_l4_ok(1), both),
            (tcp.with_l3_ok(1), ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_BAD)),
            (tcp.with_l3_ok(1).with_l4_type(L4_TCP_ACK), ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_BAD)),
            (tcp.with_l3_ok(1).with_fragment(1), ChecksumStatus::L3_GOOD),
            (tcp, ChecksumStatus::L3_BAD),
            (udp.with_l3_ok(1), ChecksumStatus::L3_GOOD),
            (udp, ChecksumStatus::L3_BAD),
            (plain.with_l3_type(L3_IPV6), ChecksumStatus::NONE),
            (plain, ChecksumStatus::NONE),
        ] {
            assert_eq!(checksum_status(u32::from(flags.0) << 16 | 0xffff), wanted, "{flags:?}");
        }
    }
}
