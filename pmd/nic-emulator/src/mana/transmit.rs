//! Send queues of the MANA emulator. Descriptors are fetched and checked, and their packets are sent.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeHead, CqeTail, TxOffset, TxOob, TxOob1, TxOob2, TxOob3, WQE_UNIT, WqeFlags, WqeLast};

use super::queues::{Cq, PREFETCH_BYTES, Sq, WorkQueue};
use super::{Mana, Port};
use crate::device::Env;
use crate::faults::FaultKind;
use crate::frame::{self, ETHERNET, Network, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::MkeyTable;
use crate::segment;
use crate::topology::PortSpec;

/// Maximum number of scatter-gather entries of a WQE.
const MAX_SGES: usize = 31;
/// Maximum number of descriptors of one queue that are processed before the next queue.
const TX_BUDGET: u32 = 64;
/// Bytes of a frame that the MTU does not count: Ethernet header and one VLAN tag.
const L2_OVERHEAD: usize = ETHERNET + 4;
/// Bits of [`TxOob`] that request a checksum: IPv4 header, TCP and UDP.
const TX_OOB_CHECKSUMS: u32 = 0x70;

/// A scatter-gather entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sge {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) size: u32,
}

/// A decoded descriptor, of a send queue or of a receive queue.
#[derive(Debug, Default)]
pub(super) struct Wqe {
    pub(super) last: WqeLast,
    pub(super) flags: WqeFlags,
    /// Words of the client OOB (out-of-band data). Absent words are 0.
    pub(super) oob: [u32; 6],
    /// Scatter-gather entries, of which the first `sge_count` are valid.
    sges: [Sge; MAX_SGES],
    pub(super) sge_count: usize,
    /// Length in units of [`WQE_UNIT`] bytes.
    pub(super) units: u32,
}

impl Wqe {
    pub(super) fn sges(&self) -> &[Sge] {
        &self.sges[..self.sge_count]
    }

    /// Fetches the descriptor at the head of a queue; returns `Ok(false)` if there is none. A descriptor is posted
    /// when the doorbell covers it, or in scan mode when it is completely written. `max_bytes` is the maximum
    /// length of a descriptor.
    #[inline]
    pub(super) fn next<R: Region>(&mut self, work: &WorkQueue<R>, scan: bool, max_bytes: u32) -> Result<bool, String> {
        let posted = if scan { u32::MAX } else { work.posted() };
        if work.stopped || posted == 0 {
            return Ok(false);
        }
        let at = work.at(0);
        let header = work.ring.load_pair(at);
        if scan && header == 0 {
            return Ok(false);
        }
        let flags = WqeFlags((header >> 32) as u32);
        // Fast path: short OOB and one scatter-gather entry.
        if (flags.oob_words(), flags.sges()) == (defs::OOB_WORDS_SHORT, 1) {
            // The driver writes a descriptor from front to back, so it is complete if its last word is written.
            let key_and_size = work.ring.load_pair(at + 24);
            let [header_again, oob, address] = work.ring.load_pairs(at);
            if scan && (key_and_size >> 32 == 0 || address == 0 || header_again != header) {
                return Ok(false);
            }
            (self.last, self.flags) = (WqeLast(header as u32), flags);
            self.oob = [oob as u32, (oob >> 32) as u32, 0, 0, 0, 0];
            self.sges[0] = Sge { address, key: key_and_size as u32, size: (key_and_size >> 32) as u32 };
            (self.sge_count, self.units) = (1, 1);
            return Ok(true);
        }
        if scan && !is_written(work) {
            return Ok(false);
        }
        self.fetch(work, posted, max_bytes).map(|()| true)
    }

    /// Fetches a descriptor with any OOB length and any number of entries. It fails if the descriptor is longer than
    /// `posted` units or `max_bytes`.
    fn fetch<R: Region>(&mut self, work: &WorkQueue<R>, posted: u32, max_bytes: u32) -> Result<(), String> {
        let mut bytes = [0; WQE_UNIT as usize];
        if !work.ring.read(work.at(0), &mut bytes) {
            return Err("the memory of the ring ends before the descriptor".to_owned());
        }
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        self.last = WqeLast(word(0));
        self.flags = WqeFlags(word(4));
        self.units = 1;
        self.sge_count = 0;
        let oob = match self.flags.oob_words() {
            defs::OOB_WORDS_SHORT => defs::OOB_SHORT,
            defs::OOB_WORDS_LONG => defs::OOB_LONG,
            words => {
                return Err(format!(
                    "client OOB of {words} words; expected {} or {}",
                    defs::OOB_WORDS_SHORT,
                    defs::OOB_WORDS_LONG
                ));
            }
        };
        let sges = self.flags.sges();
        let units = defs::wqe_units(oob, sges);
        if units * WQE_UNIT > max_bytes {
            return Err(format!(
                "a descriptor with {sges} entries has {} bytes, the maximum is {max_bytes}",
                units * WQE_UNIT
            ));
        }
        if units > posted {
            return Err(format!("the descriptor has {units} units, but the doorbell posted {posted}"));
        }
        self.units = units;
        for (i, value) in self.oob.iter_mut().enumerate() {
            *value = if (i as u32) * 4 < oob { word(8 + 4 * i) } else { 0 };
        }
        self.sge_count = sges as usize;
        let mut at = defs::WQE_HEADER + oob;
        for sge in &mut self.sges[..self.sge_count] {
            let mut entry = [0; defs::SGE_BYTES as usize];
            // Entries wrap around at the end of the ring.
            let _ = work.ring.read(work.at(at), &mut entry);
            at += defs::SGE_BYTES;
            *sge = Sge {
                address: u64::from_le_bytes(entry[..8].try_into().expect("eight bytes")),
                key: u32::from_le_bytes(entry[8..12].try_into().expect("four bytes")),
                size: u32::from_le_bytes(entry[12..].try_into().expect("four bytes")),
            };
        }
        Ok(())
    }
}

/// Returns true if the driver has completely written the descriptor at the head, for scan mode without
/// doorbells. A descriptor is written from front to back, so this checks its last entry, and then the header
/// again.
fn is_written<R: Region>(work: &WorkQueue<R>) -> bool {
    let header = work.ring.load_pair(work.at(0));
    if header == 0 {
        return false;
    }
    let flags = WqeFlags((header >> 32) as u32);
    let oob = 4 * flags.oob_words();
    let sges = flags.sges().clamp(1, MAX_SGES as u32);
    let last = work.at(defs::WQE_HEADER + oob + defs::SGE_BYTES * (sges - 1));
    work.ring.load_pair(last) != 0
        && work.ring.load_pair(last + 8) >> 32 != 0
        && work.ring.load_pair(work.at(0)) == header
}

/// An error of a packet or descriptor.
struct TxError {
    /// CQE type of the completion.
    code: u32,
    /// Text for the log.
    reason: String,
    /// True if the error stops the queue.
    stops_queue: bool,
}

/// Returns the error of a packet that is dropped with this CQE type. The queue continues.
fn drop_packet(code: u32, reason: impl Into<String>) -> TxError {
    TxError { code, reason: reason.into(), stops_queue: false }
}

/// Returns an error that stops the queue.
fn stop_queue(reason: impl Into<String>) -> TxError {
    TxError { code: defs::CQE_TX_GDMA_ERR, reason: reason.into(), stops_queue: true }
}

impl<H: Host> Mana<H> {
    /// Processes the send queues in turn. Returns true if a queue may have more descriptors.
    pub(super) fn transmit(&mut self, env: &mut Env<'_>) -> bool {
        let count = self.sqs.len();
        let mut more = false;
        for i in 0..count {
            let id = ((self.next_sq + i) % count) as u32;
            let Self { sqs, cqs, keys, ports, wqe, spec, .. } = self;
            let Some(sq) = sqs.get_mut(id).filter(|sq| !sq.work.stopped) else { continue };
            let Some(cq) = cqs.get_mut(sq.cq) else { continue };
            let port = sq.port;
            let mut sender =
                Sender { sq, cq, keys, port: &mut ports[port], spec: &spec.ports[port], wqe, name: &spec.name };
            let mut budget = TX_BUDGET;
            let scan = Self::scans(env);
            while budget > 0 && !env.outbox.is_full() {
                let fetched = sender.wqe.next(&sender.sq.work, scan, defs::MAX_TX_WQE);
                if matches!(fetched, Ok(false)) {
                    break;
                }
                if budget == TX_BUDGET {
                    (1..PREFETCH_BYTES / 64).for_each(|line| sender.sq.work.prefetch_write(64 * line));
                }
                sender.sq.work.prefetch_write(PREFETCH_BYTES);
                sender.transmit_one(env, scan, fetched);
                budget -= 1;
            }
            cq.publish();
            if env.outbox.is_full() {
                self.next_sq = id as usize;
                return true;
            }
            more |= budget == 0;
        }
        if count > 0 {
            self.next_sq = (self.next_sq + 1) % count;
        }
        more
    }
}

/// Send queue with the state that its processing needs.
struct Sender<'s, R> {
    sq: &'s mut Sq<R>,
    cq: &'s mut Cq<R>,
    keys: &'s MkeyTable<R>,
    port: &'s mut Port,
    spec: &'s PortSpec,
    wqe: &'s mut Wqe,
    /// Name of the device, for the log.
    name: &'s str,
}

impl<R: Region> Sender<'_, R> {
    /// Sends the packet of a fetched descriptor, consumes the descriptor and completes it.
    #[inline]
    fn transmit_one(&mut self, env: &mut Env<'_>, scan: bool, fetched: Result<bool, String>) {
        let result = fetched.map_err(stop_queue).and_then(|_| self.send_packet(env));
        let head = self.sq.work.head;
        self.sq.work.consume(self.wqe.units, scan);
        match result {
            Ok(suppressed) => {
                if !suppressed {
                    self.complete(env, defs::CQE_TX_OKAY, head);
                }
            }
            Err(error) => self.fail(env, &error, head),
        }
    }

    /// Logs an error, stops the queue if required, and writes the error completion. `head` is the position of the
    /// descriptor in units.
    #[cold]
    fn fail(&mut self, env: &mut Env<'_>, error: &TxError, head: u32) {
        let stopped = if error.stops_queue { "; the queue stops" } else { "" };
        let offset = u64::from(head.wrapping_mul(WQE_UNIT) & (self.sq.work.bytes - 1));
        env.log
            .line(format_args!("{} sq {}: wqe at {offset:#x}: {}{stopped}", self.name, self.sq.number, error.reason));
        self.sq.errors += 1;
        self.sq.work.stopped |= error.stops_queue;
        self.complete(env, error.code, head);
    }

    /// Writes the completion with CQE type `code` for the descriptor at position `head` in units.
    #[inline]
    fn complete(&mut self, env: &mut Env<'_>, code: u32, head: u32) {
        let vendor = if code == defs::CQE_TX_OKAY { 0 } else { code };
        let cqe_head =
            CqeHead::default().with_cqe_type(code).with_client_type(defs::CLIENT_ETHERNET).with_vendor_error(vendor);
        let offset = TxOffset::default().with_wqe(head & (self.sq.work.bytes / WQE_UNIT - 1));
        let entry = [cqe_head.0.into(), offset.0.into(), 0, 0, 0, 0, 0, 0];
        let tail = CqeTail::default().with_queue(self.sq.number).with_is_sq(1);
        self.sq.completions += 1;
        if !env.faults.is_empty()
            && let Some(FaultKind::CorruptCqe { corruption, .. }) =
                env.faults.trigger(env.device, |what| matches!(what, FaultKind::CorruptCqe { transmit: true, .. }))
        {
            env.log.line(format_args!(
                "{} sq {}: injected fault: corrupt completion ({corruption})",
                self.name, self.sq.number
            ));
            self.cq.complete_corrupted(&entry, tail, corruption, env.events);
            return;
        }
        self.cq.complete(&entry, tail, env.events);
    }

    /// Checks and sends the packet of the descriptor. Returns true if the driver suppressed the completion.
    #[inline]
    fn send_packet(&mut self, env: &mut Env<'_>) -> Result<bool, TxError> {
        let wqe = &*self.wqe;
        let (oob, oob1) = (TxOob(wqe.oob[0]), TxOob1(wqe.oob[1]));
        let long = wqe.flags.oob_words() == defs::OOB_WORDS_LONG;
        self.check_oob(oob, oob1, long)?;
        let mut length = 0usize;
        for sge in wqe.sges() {
            length += sge.size as usize;
        }
        let lso = wqe.flags.oob_in_sgl() == 1;
        let tag_bytes = if long && TxOob2(wqe.oob[2]).inject_vlan() == 1 { 4 } else { 0 };
        if length < ETHERNET {
            return Err(drop_packet(
                defs::CQE_TX_HDR_PROCESSING_ERROR,
                format!("a packet of {length} bytes has no Ethernet header"),
            ));
        }
        if !lso && length > self.spec.mtu as usize + L2_OVERHEAD {
            return Err(drop_packet(
                defs::CQE_TX_MTU_DROP,
                format!("{length} bytes exceed the MTU of {}", self.spec.mtu),
            ));
        }
        if length > 65_535 + L2_OVERHEAD {
            return Err(stop_queue(format!("{length} bytes exceed the maximum packet length")));
        }
        if !env.faults.is_empty() {
            self.injected_error(env)?;
        }
        let unmodified = tag_bytes == 0 && !lso && oob.0 & TX_OOB_CHECKSUMS == 0 && !self.spec.source_check;
        let suppressed = oob.suppress_completion() == 1;
        let port = env.first_port + self.sq.port;
        if unmodified && env.outbox.count_only(port, length) {
            // The outbox only counts packets, so the data is not copied. The addresses are checked nevertheless.
            for (i, sge) in wqe.sges().iter().enumerate() {
                find_region(self.keys, sge, i, self.sq.work.pd)?;
            }
            self.count_sent(1, length);
            return Ok(suppressed);
        }
        let Some(room) = env.outbox.room(length + tag_bytes) else {
            return Err(stop_queue("the outbox is full"));
        };
        let mut at = tag_bytes;
        for (i, sge) in wqe.sges().iter().enumerate() {
            let (region, offset) = find_region(self.keys, sge, i, self.sq.work.pd)?;
            let size = sge.size as usize;
            let _ = region.read(offset, &mut room[at..at + size]);
            at += size;
        }
        if unmodified {
            env.outbox.send(port, length);
            self.count_sent(1, length);
            return Ok(suppressed);
        }
        if tag_bytes > 0 {
            let word = TxOob2(wqe.oob[2]);
            room.copy_within(4..16, 0);
            let tag = (word.pcp() << 13 | word.dei() << 12 | word.vlan_id()) as u16;
            room[12..14].copy_from_slice(&0x8100u16.to_be_bytes());
            room[14..16].copy_from_slice(&tag.to_be_bytes());
        }
        if self.spec.source_check && room[6..12] != self.spec.mac {
            return Err(drop_packet(
                defs::CQE_TX_SA_DROP,
                "the source MAC address is not that of the port (source_check)",
            ));
        }
        let total = length + tag_bytes;
        if lso {
            let sent = self.send_segments(env, total, tag_bytes, oob)?;
            self.count_sent(sent.0, sent.1);
        } else {
            compute_checksums(&mut room[..total], tag_bytes, oob, oob1)?;
            if !env.outbox.count_only(port, total) {
                env.outbox.send(port, total);
            }
            self.count_sent(1, total);
        }
        Ok(suppressed)
    }

    /// Adds sent packets to the counters of the queue and of the port.
    #[inline]
    fn count_sent(&mut self, packets: u64, bytes: usize) {
        self.sq.sent += packets;
        self.sq.sent_bytes += bytes as u64;
        self.port.counters.sent += packets;
        self.port.counters.sent_bytes += bytes as u64;
    }

    /// Returns the completion error that a fault injects for this packet, if any.
    #[cold]
    fn injected_error(&self, env: &mut Env<'_>) -> Result<(), TxError> {
        match env.faults.trigger(env.device, |what| matches!(what, FaultKind::CompletionError { transmit: true, .. })) {
            Some(FaultKind::CompletionError { code, .. }) => Err(TxError {
                code,
                reason: "injected fault: completion error".to_owned(),
                stops_queue: code == defs::CQE_TX_GDMA_ERR,
            }),
            _ => Ok(()),
        }
    }

    /// Checks the format and flags of the OOB, and that it names the completion queue, the send queue and the virtual
    /// port of this queue.
    #[inline]
    fn check_oob(&self, oob: TxOob, oob1: TxOob1, long: bool) -> Result<(), TxError> {
        let format = if long { defs::FORMAT_LONG } else { defs::FORMAT_SHORT };
        let invalid = |reason: String| Err(drop_packet(defs::CQE_TX_INVALID_OOB, reason));
        if oob.format() != format {
            return invalid(format!(
                "format {} does not match an OOB of {} words",
                oob.format(),
                self.wqe.flags.oob_words()
            ));
        }
        if oob.vcq() != self.sq.cq_number {
            return invalid(format!("the OOB names cq {}, but the queue has cq {}", oob.vcq(), self.sq.cq_number));
        }
        let frame = self.sq.number >> defs::VSQ_FRAME_SHIFT;
        if oob1.vsq_frame() != frame {
            return invalid(format!("VSQ frame {}, but the queue has {frame}", oob1.vsq_frame()));
        }
        if self.wqe.flags.sgl_direct() == 1 || self.wqe.flags.consume_credit() == 1 || self.wqe.flags.check_sn() == 1 {
            return invalid(format!("flags {:#x} are not valid for raw packets", self.wqe.flags.0));
        }
        if oob.is_outer_ipv4() == 1 && oob.is_outer_ipv6() == 1 {
            return invalid("is_outer_ipv4 and is_outer_ipv6 are both set".to_owned());
        }
        // A driver writes the virtual port in the long field (word 3), in the short field (word 1) or in both.
        let word3 = TxOob3(self.wqe.oob[3]);
        let vport = if long && word3.long_vport() != 0 { word3.long_vport() } else { oob1.vport() };
        if vport != self.port.vport {
            let why = format!("virtual port {vport}, but the queue has {}", self.port.vport);
            return Err(drop_packet(defs::CQE_TX_VPORT_IDX_OUT_OF_RANGE, why));
        }
        Ok(())
    }

    /// Splits the TCP packet in the outbox into segments (LSO) and sends them. Returns the number of segments and their
    /// total length in bytes. `total` is the length of the packet, with `tag_bytes` of an inserted VLAN tag.
    fn send_segments(
        &mut self,
        env: &mut Env<'_>,
        total: usize,
        tag_bytes: usize,
        oob: TxOob,
    ) -> Result<(u64, usize), TxError> {
        let port = env.first_port + self.sq.port;
        let packet = env.outbox.room(total).map(|room| room.to_vec()).unwrap_or_default();
        let wqe = &*self.wqe;
        let mss = wqe.flags.client_data_unit() as usize;
        if wqe.sge_count < 2 || mss == 0 {
            return Err(stop_queue(format!("segmentation (LSO) with {} entries and an MSS of {mss}", wqe.sge_count)));
        }
        let layers = segment::parse_oversized(&packet);
        if layers.protocol != TCP || oob.compute_tcp_csum() != 1 {
            return Err(drop_packet(
                defs::CQE_TX_HDR_PROCESSING_ERROR,
                "segmentation of a packet that is not TCP, or without TCP checksum",
            ));
        }
        let header = layers.l4 + usize::from(packet[layers.l4 + 12] >> 4) * 4;
        let first = wqe.sges()[0].size as usize;
        if first > defs::MAX_LSO_HEADER as usize || first + tag_bytes != header {
            return Err(stop_queue(format!(
                "the first entry has {first} bytes, but the headers of the packet have {}",
                header - tag_bytes
            )));
        }
        if header - layers.l3 + mss > self.spec.mtu as usize {
            return Err(drop_packet(
                defs::CQE_TX_MTU_DROP,
                format!("segments of {mss} bytes exceed the MTU {}", self.spec.mtu),
            ));
        }
        let (mut sent, mut bytes) = (0, 0);
        let cut = segment::segment_tcp(&packet, header, mss, |segment| {
            if let Some(room) = env.outbox.room(segment.len()) {
                room.copy_from_slice(segment);
                if !env.outbox.count_only(port, segment.len()) {
                    env.outbox.send(port, segment.len());
                }
                sent += 1;
                bytes += segment.len();
            }
        });
        cut.map_err(|why| drop_packet(defs::CQE_TX_HDR_PROCESSING_ERROR, why))?;
        Ok((sent, bytes))
    }
}

/// Returns the memory region of a scatter-gather entry and the offset in it. `i` is the number of the entry.
#[inline]
fn find_region<'k, R: Region>(keys: &'k MkeyTable<R>, sge: &Sge, i: usize, pd: u32) -> Result<(&'k R, u64), TxError> {
    keys.find(sge.key, sge.address, u64::from(sge.size), pd, false).map_err(|why| {
        stop_queue(format!("entry {i}: address {:#x}, {} bytes, key {:#x}: {why}", sge.address, sge.size, sge.key))
    })
}

/// Computes the checksums that the OOB requests. `tag_bytes` is the length of an inserted VLAN tag.
fn compute_checksums(frame: &mut [u8], tag_bytes: usize, oob: TxOob, oob1: TxOob1) -> Result<(), TxError> {
    if oob.0 & TX_OOB_CHECKSUMS == 0 {
        return Ok(());
    }
    let invalid = |reason: String| Err(drop_packet(defs::CQE_TX_HDR_PROCESSING_ERROR, reason));
    let layers = frame::parse(frame);
    let version = match (oob.is_outer_ipv4(), oob.is_outer_ipv6()) {
        (1, _) => Some(Network::V4),
        (_, 1) => Some(Network::V6),
        _ => None,
    };
    if version.is_none() || version != layers.network {
        return invalid(format!("the OOB requests checksums for {version:?}, but the packet is {:?}", layers.network));
    }
    if oob.compute_ip_csum() == 1 {
        if layers.network != Some(Network::V4) {
            return invalid("the OOB requests an IP header checksum for an IPv6 packet".to_owned());
        }
        let header = layers.l3..layers.l3 + usize::from(frame[layers.l3] & 0xf) * 4;
        let at = layers.l3 + 10;
        frame[at..at + 2].fill(0);
        let checksum = !frame::fold(frame::sum(&frame[header]));
        frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    let protocol = match (oob.compute_tcp_csum(), oob.compute_udp_csum()) {
        (0, 0) => return Ok(()),
        (1, 0) => TCP,
        (0, 1) => UDP,
        _ => return invalid("compute_tcp_csum and compute_udp_csum are both set".to_owned()),
    };
    if layers.protocol != protocol {
        return invalid(format!(
            "the OOB requests a checksum for protocol {protocol}, but the packet has {}",
            layers.protocol
        ));
    }
    // The transport offset may be 0 for UDP: DPDK's driver does not set it.
    let transport_offset = oob1.transport_offset() as usize;
    if transport_offset + tag_bytes != layers.l4 && (protocol == TCP || transport_offset != 0) {
        return invalid(format!(
            "the OOB names transport offset {transport_offset}, but the header is at {}",
            layers.l4 - tag_bytes
        ));
    }
    let Some(at) = layers.checksum_at() else { return Ok(()) };
    // The field contains the sum of the pseudo header. The device adds the rest, so a wrong start value gives
    // a wrong checksum.
    let checksum = match !frame::fold(frame::sum(&frame[layers.l4..layers.end])) {
        0 if protocol == UDP => 0xffff,
        sum => sum,
    };
    frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    Ok(())
}
