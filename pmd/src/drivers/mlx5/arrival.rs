//! What completions say of received packets, entry by entry or several in one compressed session.
//!
//! A session is a title entry, which holds for all of its packets, and arrays of eight bytes for each packet: the first array in the entry
//! behind the title, the others where every eighth entry from the title on would be. Entries of the session that no array was written to
//! keep what they held, so that all of them have to be made nobody's.

use std::sync::atomic::Ordering;

use wirepath_nic_defs::mlx5::{
    CQE_RESPONDER_ERROR, CQE_RESPONDER_SEND, CqeFlags, FORMAT_COMPRESSED, FORMAT_NONE, L3_IPV4, L4_TCP, L4_TCP_ACK,
    L4_TCP_EMPTY_ACK, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH, SYNDROME_LOCAL_LENGTH, StrideCount,
};

use super::cq::{CompletionQueue, Entry, Tail, kind};
use crate::drivers::direct::fault::Fault;
use crate::packet::offload::Verdicts;
use crate::packet::{BATCH, DATA_ROOM, Packet};

pub(super) const PLAIN: u8 = kind(CQE_RESPONDER_SEND, FORMAT_NONE);
pub(super) const TITLE: u8 = kind(CQE_RESPONDER_SEND, FORMAT_COMPRESSED);

/// A packet of which a completion told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrival {
    /// Bytes.
    pub(super) len: u32,
    /// Step that it begins at: work request or stride, counted for ever.
    pub(super) at: u32,
    /// [`CqeFlags`], and below them the VLAN tag that was taken off.
    pub(super) described: u32,
    pub(super) hash: u32,
    /// Flow tag; 0: none.
    tag: u32,
    /// Whether `hash` is one.
    pub(super) hashed: bool,
    /// In nanoseconds; 0: none.
    timestamp: u64,
}

impl Arrival {
    /// What an entry tells, but for length and timestamp.
    #[inline(always)]
    pub(super) fn of(entry: Entry<'_>, tail: Tail) -> Self {
        Self {
            len: 0,
            at: 0,
            described: entry.described(),
            hash: entry.hash(),
            tag: tail.low24(),
            hashed: entry.is_hashed(),
            timestamp: 0,
        }
    }

    /// What a title tells of the packets of its session, but for their length and, if minis tell them, `hashes`.
    pub(super) fn of_title(entry: Entry<'_>, tail: Tail, hashes: bool) -> Self {
        let mut title = Self::of(entry, tail);
        // The title's hash is that of its own packet.
        title.hashed &= hashes;
        title
    }

    /// Of `entry`, whose clock's ticks take `tick` nanoseconds in 32.32 bits; 0: no timestamps.
    #[inline(always)]
    pub(super) fn at_time(entry: Entry<'_>, tail: Tail, tick: u64) -> Self {
        let mut arrival = Self::of(entry, tail);
        if tick != 0 {
            arrival.timestamp = ((u128::from(entry.time()) * u128::from(tick)) >> 32) as u64;
        }
        arrival
    }

    /// Notes what the device found out in the packet.
    #[inline(never)]
    pub(super) fn note(&self, packet: &mut Packet) {
        packet.set_verdicts(verdicts(self.described));
        if self.hashed {
            packet.set_rss_hash(self.hash);
        }
        if self.tag != 0 {
            packet.set_mark(self.tag);
        }
        if CqeFlags((self.described >> 16) as u16).vlan_stripped() != 0 {
            packet.set_vlan(self.described as u16);
        }
        if self.timestamp != 0 {
            packet.set_timestamp(self.timestamp);
        }
    }
}

/// A VLAN tag was taken off.
pub(super) const RARE: u32 = (CqeFlags(0).with_vlan_stripped(1).0 as u32) << 16;

/// What the device says of checksums, by the [`CqeFlags`] without the reserved ones.
///
/// A checksum of a header that the device knows, and does not call right, is wrong. But for UDP: there may be none, which it does not tell
/// apart; and behind a wrong IPv4 header or in fragments it looks at none.
static VERDICTS: [Verdicts; 1 << FLAGS_BITS] = {
    let mut table = [Verdicts::NONE; 1 << FLAGS_BITS];
    let mut at = 0;
    while at < table.len() {
        let flags = CqeFlags(at as u16);
        let network = match (flags.l3_ok(), flags.l3_type()) {
            (1, _) => Verdicts::L3_GOOD,
            (_, L3_IPV4) => Verdicts::L3_BAD,
            _ => Verdicts::NONE,
        };
        let transport = match (flags.l4_ok(), flags.l4_type()) {
            (1, _) => Verdicts::L4_GOOD,
            (_, L4_TCP | L4_TCP_EMPTY_ACK | L4_TCP_ACK) if flags.l3_ok() == 1 && flags.fragment() == 0 => {
                Verdicts::L4_BAD
            }
            _ => Verdicts::NONE,
        };
        table[at] = network.with(transport);
        at += 1;
    }
    table
};
const FLAGS_BITS: u32 = CqeFlags(0).with_l4_ok(1).0.ilog2() + 1;

/// The same by flags and what lies below them.
#[inline(always)]
pub(super) fn verdicts(described: u32) -> Verdicts {
    VERDICTS[(described >> 16) as usize % VERDICTS.len()]
}

/// What is wrong with an entry that is neither of a packet nor of a session.
#[cold]
fn no_packet(entry: Entry<'_>, tail: Tail) -> Fault {
    if tail.opcode() == CQE_RESPONDER_ERROR { entry.failure(tail) } else { Fault::UnknownType }
}

/// How packets lie in a receive queue, as far as completions go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steps {
    /// A work request for each packet, of so many bytes.
    Requests {
        /// Most bytes of a packet.
        bytes: u32,
    },
    /// Strides of [`DATA_ROOM`] bytes, 2^`log` to a work request.
    Strides {
        /// Strides of a work request, logarithm.
        log: u32,
    },
}

/// A session with packets still to come. Its title is the next entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    /// Packets in all, and those read.
    pub(super) count: u32,
    pub(super) read: u32,
}

/// What the device told of and was not handed over yet.
pub(super) struct Arrivals {
    list: Box<[Arrival; BATCH]>,
    known: usize,
    steps: Steps,
    /// Steps of the whole ring.
    all: u32,
    /// One of `MINI_FORMAT_*`, if completions may be compressed.
    pub(super) format: Option<u8>,
    pub(super) session: Option<Session>,
    /// Step of the next completion, and of the first that was not handed over.
    seen: u32,
    cleared: u32,
    /// From ticks to nanoseconds in 32.32 bits; 0: no timestamps.
    pub(super) tick: u64,
}

impl Arrivals {
    /// For a ring of `all` steps, of which there are as many in the completion queue at least.
    pub(super) fn new(steps: Steps, all: u32, format: Option<u8>, tick: u64) -> Self {
        let list = Box::new([Arrival::default(); BATCH]);
        Self { list, known: 0, steps, all, format, session: None, seen: 0, cleared: 0, tick }
    }

    /// The ring starts anew from its first step.
    pub(super) fn restart(&mut self) {
        (self.known, self.session, self.seen, self.cleared) = (0, None, 0, 0);
    }

    /// What is known.
    #[inline(always)]
    pub(super) fn known(&self) -> &[Arrival] {
        &self.list[..self.known]
    }

    /// All packets of a session are read.
    #[inline(always)]
    pub(super) fn end_session(&mut self, completions: &mut CompletionQueue, count: u32) {
        self.session = None;
        completions.invalidate(count);
        completions.advance(count);
    }

    /// Step of the next completion.
    #[inline(always)]
    pub(super) fn step(&self) -> u32 {
        self.seen
    }

    /// Packets up to this step were handed over as they were found: nothing else is known.
    #[inline(always)]
    pub(super) fn passed(&mut self, step: u32) {
        debug_assert!(self.known == 0);
        (self.seen, self.cleared) = (step, step);
    }

    /// All that is known was handed over; returns the step that the ring stands at.
    #[inline(always)]
    pub(super) fn clear(&mut self) -> u32 {
        self.known = 0;
        self.cleared = self.seen;
        self.seen
    }

    /// Takes note of what the device tells of, until `room` packets are known. Whether there was anything.
    #[inline(never)]
    pub(super) fn look(&mut self, completions: &mut CompletionQueue, room: usize) -> Result<bool, Fault> {
        let room = room.min(BATCH);
        let (mut progress, mut result) = (false, Ok(()));
        // A device that writes without an end must not keep the worker here.
        for _ in 0..completions.count() {
            if self.known >= room {
                break;
            }
            if self.session.is_some() {
                result = self.go_on(completions, room);
                progress = true;
                if result.is_err() {
                    break;
                }
                continue;
            }
            let Some((entry, tail)) = completions.look() else { break };
            progress = true;
            if tail.kind() == PLAIN {
                let arrival = Arrival::at_time(entry, tail, self.tick);
                let bytes = entry.byte_count();
                let request = entry.request();
                result = self.add(arrival, bytes, tail.position(), request);
                if result.is_err() {
                    break;
                }
                completions.advance(1);
            } else {
                match self.begin(entry, tail) {
                    Ok(session) => self.session = Some(session),
                    Err(fault) => {
                        result = self.missed(fault);
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

    /// A frame that found no room in its work request takes that with it, and is told of as an error; the queue goes on (linux:
    /// drivers/net/ethernet/mellanox/mlx5/core/en/health.h, `cqe_syndrome_needs_recover`; dpdk: drivers/net/mlx5/mlx5_rx.c,
    /// `mlx5_rx_err_handle`). Whatever else stopped the queue is an error here too.
    #[cold]
    fn missed(&mut self, fault: Fault) -> Result<(), Fault> {
        match fault {
            Fault::Refused { syndrome: SYNDROME_LOCAL_LENGTH, position, .. } if self.is_linear() => {
                self.is_next(position)?;
                self.note(Arrival { len: u32::MAX, at: self.seen, ..Arrival::default() });
                self.seen = self.seen.wrapping_add(1);
                Ok(())
            }
            fault => Err(fault),
        }
    }

    /// Whether it is the turn of the work request at this position.
    #[inline(always)]
    fn is_next(&self, position: u16) -> Result<(), Fault> {
        // Another than the one whose turn it is, or one that was not posted again yet.
        if position != self.seen as u16 || self.seen.wrapping_sub(self.cleared) >= self.all {
            return Err(Fault::OutOfOrder);
        }
        Ok(())
    }

    /// There is room: the caller looked.
    #[inline(always)]
    fn note(&mut self, arrival: Arrival) {
        if let Some(slot) = self.list.get_mut(self.known) {
            *slot = arrival;
            self.known += 1;
        }
    }

    /// Takes in one packet, if it is the one whose turn it is.
    #[inline(always)]
    fn add(&mut self, mut arrival: Arrival, bytes: u32, position: u16, request: u16) -> Result<(), Fault> {
        arrival.at = self.seen;
        match self.steps {
            Steps::Requests { bytes: most } => {
                self.is_next(position)?;
                if bytes.wrapping_sub(1) >= most {
                    return Err(Fault::BadLength);
                }
                arrival.len = bytes;
                self.seen = self.seen.wrapping_add(1);
            }
            Steps::Strides { log } => {
                let count = StrideCount(bytes);
                let mask = (1 << log) - 1;
                if u32::from(position) != self.seen & mask || request != (self.seen >> log) as u16 {
                    return Err(Fault::OutOfOrder);
                }
                let (strides, len) = (count.strides(), count.length());
                // A packet ends in the work request that it begins in.
                if strides.wrapping_sub(1) > mask - (self.seen & mask) {
                    return Err(Fault::BadLength);
                }
                self.seen = self.seen.wrapping_add(strides);
                // More than was posted.
                if self.seen.wrapping_sub(self.cleared) > self.all {
                    return Err(Fault::OutOfOrder);
                }
                if count.filler() != 0 {
                    // Strides that are passed over: their buffers stay where they are.
                    return Ok(());
                }
                if len == 0 || len.div_ceil(DATA_ROOM as u32) != strides {
                    return Err(Fault::BadLength);
                }
                arrival.len = len;
            }
        }
        self.note(arrival);
        Ok(())
    }

    /// The session that an entry begins that is not of one packet.
    #[inline(always)]
    pub(super) fn begin(&self, entry: Entry<'_>, tail: Tail) -> Result<Session, Fault> {
        let Some(format) = self.format.filter(|_| tail.kind() == TITLE) else { return Err(no_packet(entry, tail)) };
        let count = entry.byte_count();
        // One packet would have its array in an entry that is not the session's; more than there are buffers cannot have come.
        if count < 2 || count > self.all {
            return Err(Fault::BadSession);
        }
        if format != MINI_FORMAT_CSUM_STRIDE && self.is_linear() && tail.position() != self.seen as u16 {
            return Err(Fault::OutOfOrder);
        }
        Ok(Session { count, read: 0 })
    }

    fn is_linear(&self) -> bool {
        matches!(self.steps, Steps::Requests { .. })
    }

    /// Goes on with the session, whose title is the next entry of the queue.
    #[inline(never)]
    fn go_on(&mut self, completions: &mut CompletionQueue, room: usize) -> Result<(), Fault> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let Session { count, read } = *session;
        let (entry, tail) = Entry::again(completions.title());
        let (title, request) = (Arrival::of_title(entry, tail, self.format == Some(MINI_FORMAT_HASH)), entry.request());
        let now = (count - read).min((room - self.known) as u32);
        session.read += now;
        let done = session.read == count;
        let format = self.format;
        for i in read..read + now {
            let mini = u64::from_be(completions.minis().from(i)[0].load(Ordering::Relaxed));
            let (said, bytes) = ((mini >> 32) as u32, mini as u32);
            let mut arrival = title;
            // Work requests go up by one with each packet; strides are told where they are not.
            let mut position = self.seen as u16;
            match format {
                Some(MINI_FORMAT_HASH) => arrival.hash = said,
                Some(MINI_FORMAT_CSUM_STRIDE) => position = said as u16,
                _ => {}
            }
            self.add(arrival, bytes, position, request)?;
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
    fn wrong_is_only_what_the_device_must_have_looked_at() {
        let plain = CqeFlags(0).with_l2_ok(1);
        let tcp = plain.with_l3_type(L3_IPV4).with_l4_type(L4_TCP);
        let udp = tcp.with_l4_type(L4_UDP);
        let both = Verdicts::L3_GOOD.with(Verdicts::L4_GOOD);
        for (flags, wanted) in [
            (tcp.with_l3_ok(1).with_l4_ok(1), both),
            (udp.with_l3_ok(1).with_l4_ok(1), both),
            (tcp.with_l3_ok(1), Verdicts::L3_GOOD.with(Verdicts::L4_BAD)),
            (tcp.with_l3_ok(1).with_l4_type(L4_TCP_ACK), Verdicts::L3_GOOD.with(Verdicts::L4_BAD)),
            (tcp.with_l3_ok(1).with_fragment(1), Verdicts::L3_GOOD),
            (tcp, Verdicts::L3_BAD),
            (udp.with_l3_ok(1), Verdicts::L3_GOOD),
            (udp, Verdicts::L3_BAD),
            (plain.with_l3_type(L3_IPV6), Verdicts::NONE),
            (plain, Verdicts::NONE),
        ] {
            assert_eq!(verdicts(u32::from(flags.0) << 16 | 0xffff), wanted, "{flags:?}");
        }
    }
}
