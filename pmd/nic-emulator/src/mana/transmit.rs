//! Send queues: descriptors are fetched, checked and carried out.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeHead, CqeTail, TxOffset, TxOob, TxOob1, TxOob2, TxOob3, WQE_UNIT, WqeFlags, WqeLast};

use super::queues::{AHEAD, Cq, Sq, Work};
use super::{Mana, Port};
use crate::device::Env;
use crate::faults::What;
use crate::frame::{self, ETHERNET, Network, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::Keys;
use crate::segment;
use crate::topology::PortSpec;

/// Most scatter-gather entries that fit into a WQE.
const MOST_SGES: usize = 31;
/// Descriptors of one queue before the next has its turn.
const TURN: u32 = 64;
/// Longest frame with its VLAN tag, beyond the MTU.
const OVERHEAD: usize = ETHERNET + 4;

/// A scatter-gather entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sge {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) size: u32,
}

/// A descriptor, taken apart.
#[derive(Debug, Default)]
pub(super) struct Wqe {
    pub(super) last: WqeLast,
    pub(super) flags: WqeFlags,
    pub(super) oob: [u32; 6],
    sges: [Sge; MOST_SGES],
    pub(super) count: usize,
    pub(super) units: u32,
}

impl Wqe {
    pub(super) fn sges(&self) -> &[Sge] {
        &self.sges[..self.count]
    }

    /// Fetches the descriptor at the head of a queue: of those that doorbells have posted, or in scan mode of those that the driver has
    /// finished. `Ok(false)`: there is none.
    #[inline]
    pub(super) fn next<R: Region>(&mut self, work: &Work<R>, scan: bool, longest: u32) -> Result<bool, String> {
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
        // As most of them are.
        if (flags.oob_words(), flags.sges()) == (defs::OOB_WORDS_SHORT, 1) {
            // It is written front to back: what is there when its end is there is all of it.
            let what = work.ring.load_pair(at + 24);
            let [again, oob, address] = work.ring.load_pairs(at);
            if scan && (what >> 32 == 0 || address == 0 || again != header) {
                return Ok(false);
            }
            (self.last, self.flags) = (WqeLast(header as u32), flags);
            self.oob = [oob as u32, (oob >> 32) as u32, 0, 0, 0, 0];
            self.sges[0] = Sge { address, key: what as u32, size: (what >> 32) as u32 };
            (self.count, self.units) = (1, 1);
            return Ok(true);
        }
        if scan && !written(work) {
            return Ok(false);
        }
        self.fetch(work, posted, longest).map(|()| true)
    }

    /// The same for any kind of it. `posted` units may belong to it.
    fn fetch<R: Region>(&mut self, work: &Work<R>, posted: u32, longest: u32) -> Result<(), String> {
        let mut bytes = [0; WQE_UNIT as usize];
        if !work.ring.read(work.at(0), &mut bytes) {
            return Err("the ring is smaller than it should be".to_owned());
        }
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        self.last = WqeLast(word(0));
        self.flags = WqeFlags(word(4));
        self.units = 1;
        self.count = 0;
        let oob = match self.flags.oob_words() {
            defs::OOB_WORDS_SHORT => defs::OOB_SHORT,
            defs::OOB_WORDS_LONG => defs::OOB_LONG,
            words => {
                return Err(format!(
                    "client OOB of {words} words; there are {} and {}",
                    defs::OOB_WORDS_SHORT,
                    defs::OOB_WORDS_LONG
                ));
            }
        };
        let sges = self.flags.sges();
        let units = defs::wqe_units(oob, sges);
        if units * WQE_UNIT > longest {
            return Err(format!("{sges} entries make {} bytes; a descriptor has at most {longest}", units * WQE_UNIT));
        }
        if units > posted {
            return Err(format!("{units} units long, and the doorbell posted {posted}"));
        }
        self.units = units;
        for (i, value) in self.oob.iter_mut().enumerate() {
            *value = if (i as u32) * 4 < oob { word(8 + 4 * i) } else { 0 };
        }
        self.count = sges as usize;
        let mut at = defs::WQE_HEADER + oob;
        for sge in &mut self.sges[..self.count] {
            let mut entry = [0; defs::SGE_BYTES as usize];
            // Entries may lie beyond the end of the ring, and then go on at its start.
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

/// Whether the driver has finished the descriptor at the head: for the scan mode, which has no doorbell to tell. A descriptor is
/// written front to back, so its last entry is looked at, and then its header again.
fn written<R: Region>(work: &Work<R>) -> bool {
    let header = work.ring.load_pair(work.at(0));
    if header == 0 {
        return false;
    }
    let flags = WqeFlags((header >> 32) as u32);
    let oob = 4 * flags.oob_words();
    let sges = flags.sges().clamp(1, MOST_SGES as u32);
    let last = work.at(defs::WQE_HEADER + oob + defs::SGE_BYTES * (sges - 1));
    work.ring.load_pair(last) != 0
        && work.ring.load_pair(last + 8) >> 32 != 0
        && work.ring.load_pair(work.at(0)) == header
}

/// What goes wrong with a packet.
struct Failure {
    code: u32,
    why: String,
    /// The queue stops.
    stop: bool,
}

fn drop_packet(code: u32, why: impl Into<String>) -> Failure {
    Failure { code, why: why.into(), stop: false }
}

fn stop_queue(why: impl Into<String>) -> Failure {
    Failure { code: defs::CQE_TX_GDMA_ERR, why: why.into(), stop: true }
}

impl<H: Host> Mana<H> {
    /// Serves the send queues in turn. True if there is more.
    pub(super) fn transmit(&mut self, env: &mut Env<'_>) -> bool {
        let count = self.sqs.len();
        let mut more = false;
        for i in 0..count {
            let id = ((self.turn + i) % count) as u32;
            let Self { sqs, cqs, keys, ports, wqe, spec, .. } = self;
            let Some(sq) = sqs.get_mut(id).filter(|sq| !sq.work.stopped) else { continue };
            let Some(cq) = cqs.get_mut(sq.cq) else { continue };
            let port = sq.port;
            let mut sender =
                Sender { sq, cq, keys, port: &mut ports[port], spec: &spec.ports[port], wqe, name: &spec.name };
            let mut budget = TURN;
            let scan = Self::scans(env);
            while budget > 0 && !env.outbox.is_full() {
                let fetched = sender.wqe.next(&sender.sq.work, scan, defs::MAX_TX_WQE);
                if matches!(fetched, Ok(false)) {
                    break;
                }
                if budget == TURN {
                    (1..AHEAD / 64).for_each(|line| sender.sq.work.expect(64 * line));
                }
                sender.sq.work.expect(AHEAD);
                sender.one(env, scan, fetched);
                budget -= 1;
            }
            cq.publish();
            if env.outbox.is_full() {
                self.turn = id as usize;
                return true;
            }
            more |= budget == 0;
        }
        if count > 0 {
            self.turn = (self.turn + 1) % count;
        }
        more
    }
}

/// A send queue at work.
struct Sender<'s, R> {
    sq: &'s mut Sq<R>,
    cq: &'s mut Cq<R>,
    keys: &'s Keys<R>,
    port: &'s mut Port,
    spec: &'s PortSpec,
    wqe: &'s mut Wqe,
    name: &'s str,
}

impl<R: Region> Sender<'_, R> {
    #[inline]
    fn one(&mut self, env: &mut Env<'_>, scan: bool, fetched: Result<bool, String>) {
        let result = fetched.map_err(stop_queue).and_then(|_| self.packet(env));
        let at = self.sq.work.head;
        self.sq.work.consume(self.wqe.units, scan);
        match result {
            Ok(suppressed) => {
                if !suppressed {
                    self.complete(env, defs::CQE_TX_OKAY, at);
                }
            }
            Err(failure) => self.fail(env, &failure, at),
        }
    }

    #[cold]
    fn fail(&mut self, env: &mut Env<'_>, failure: &Failure, at: u32) {
        let stopped = if failure.stop { "; the queue stops" } else { "" };
        let offset = u64::from(at.wrapping_mul(WQE_UNIT) & (self.sq.work.bytes - 1));
        env.log.line(format_args!("{} sq {}: wqe at {offset:#x}: {}{stopped}", self.name, self.sq.number, failure.why));
        self.sq.errors += 1;
        self.sq.work.stopped |= failure.stop;
        self.complete(env, failure.code, at);
    }

    #[inline]
    fn complete(&mut self, env: &mut Env<'_>, code: u32, at: u32) {
        let vendor = if code == defs::CQE_TX_OKAY { 0 } else { code };
        let head =
            CqeHead::default().with_cqe_type(code).with_client_type(defs::CLIENT_ETHERNET).with_vendor_error(vendor);
        let offset = TxOffset::default().with_wqe(at & (self.sq.work.bytes / WQE_UNIT - 1));
        let entry = [head.0.into(), offset.0.into(), 0, 0, 0, 0, 0, 0];
        let tail = CqeTail::default().with_queue(self.sq.number).with_is_sq(1);
        self.sq.completions += 1;
        if !env.orders.is_empty()
            && let Some(What::Hostile { lie, .. }) =
                env.orders.strike(env.device, |what| matches!(what, What::Hostile { transmit: true, .. }))
        {
            env.log.line(format_args!("{} sq {}: hostile completion as ordered: {lie}", self.name, self.sq.number));
            self.cq.lie(&entry, tail, lie, env.events);
            return;
        }
        self.cq.complete(&entry, tail, env.events);
    }

    /// Checks and sends the packet of the descriptor. True if no completion is wanted.
    #[inline]
    fn packet(&mut self, env: &mut Env<'_>) -> Result<bool, Failure> {
        let wqe = &*self.wqe;
        let (oob, oob1) = (TxOob(wqe.oob[0]), TxOob1(wqe.oob[1]));
        let long = wqe.flags.oob_words() == defs::OOB_WORDS_LONG;
        self.check_oob(oob, oob1, long)?;
        let mut length = 0usize;
        for sge in wqe.sges() {
            length += sge.size as usize;
        }
        let segmented = wqe.flags.oob_in_sgl() == 1;
        let inserted = if long && TxOob2(wqe.oob[2]).inject_vlan() == 1 { 4 } else { 0 };
        if length < ETHERNET {
            return Err(drop_packet(
                defs::CQE_TX_HDR_PROCESSING_ERROR,
                format!("a packet of {length} bytes has no Ethernet header"),
            ));
        }
        if !segmented && length > self.spec.mtu as usize + OVERHEAD {
            return Err(drop_packet(
                defs::CQE_TX_MTU_DROP,
                format!("{length} bytes, and the MTU is {}", self.spec.mtu),
            ));
        }
        if length > 65_535 + OVERHEAD {
            return Err(stop_queue(format!("{length} bytes are more than a packet can have")));
        }
        if !env.orders.is_empty() {
            self.order(env)?;
        }
        let plain = inserted == 0 && !segmented && oob.0 & 0x70 == 0 && !self.spec.source_check;
        let suppressed = oob.suppress_completion() == 1;
        let port = env.first_port + self.sq.port;
        if plain && env.outbox.count_only(port, length) {
            // Nobody wants the data; that it could be fetched is checked all the same.
            for (i, sge) in wqe.sges().iter().enumerate() {
                find(self.keys, sge, i, self.sq.work.pd)?;
            }
            self.count(1, length);
            return Ok(suppressed);
        }
        let Some(room) = env.outbox.room(length + inserted) else {
            return Err(stop_queue("no room"));
        };
        let mut at = inserted;
        for (i, sge) in wqe.sges().iter().enumerate() {
            let (region, offset) = find(self.keys, sge, i, self.sq.work.pd)?;
            let size = sge.size as usize;
            let _ = region.read(offset, &mut room[at..at + size]);
            at += size;
        }
        if plain {
            env.outbox.send(port, length);
            self.count(1, length);
            return Ok(suppressed);
        }
        if inserted > 0 {
            let word = TxOob2(wqe.oob[2]);
            room.copy_within(4..16, 0);
            let tag = (word.pcp() << 13 | word.dei() << 12 | word.vlan_id()) as u16;
            room[12..14].copy_from_slice(&0x8100u16.to_be_bytes());
            room[14..16].copy_from_slice(&tag.to_be_bytes());
        }
        if self.spec.source_check && room[6..12] != self.spec.mac {
            return Err(drop_packet(defs::CQE_TX_SA_DROP, "the source address is not the port's, which checks it"));
        }
        let total = length + inserted;
        if segmented {
            let sent = self.segment(env, total, inserted, oob)?;
            self.count(sent.0, sent.1);
        } else {
            offload(&mut room[..total], inserted, oob, oob1)?;
            if !env.outbox.count_only(port, total) {
                env.outbox.send(port, total);
            }
            self.count(1, total);
        }
        Ok(suppressed)
    }

    #[inline]
    fn count(&mut self, packets: u64, bytes: usize) {
        self.sq.sent += packets;
        self.sq.sent_bytes += bytes as u64;
        self.port.counters.sent += packets;
        self.port.counters.sent_bytes += bytes as u64;
    }

    #[cold]
    fn order(&self, env: &mut Env<'_>) -> Result<(), Failure> {
        match env.orders.strike(env.device, |what| matches!(what, What::CompletionError { transmit: true, .. })) {
            Some(What::CompletionError { code, .. }) => Err(Failure {
                code,
                why: "completion error as ordered".to_owned(),
                stop: code == defs::CQE_TX_GDMA_ERR,
            }),
            _ => Ok(()),
        }
    }

    /// The descriptor must name the queue that it is in.
    #[inline]
    fn check_oob(&self, oob: TxOob, oob1: TxOob1, long: bool) -> Result<(), Failure> {
        let format = if long { defs::FORMAT_LONG } else { defs::FORMAT_SHORT };
        let invalid = |why: String| Err(drop_packet(defs::CQE_TX_INVALID_OOB, why));
        if oob.format() != format {
            return invalid(format!("format {} in an OOB of {} words", oob.format(), self.wqe.flags.oob_words()));
        }
        if oob.vcq() != self.sq.cq_number {
            return invalid(format!("completions to cq {}, and the queue has cq {}", oob.vcq(), self.sq.cq_number));
        }
        let frame = self.sq.number >> defs::VSQ_FRAME_SHIFT;
        if oob1.vsq_frame() != frame {
            return invalid(format!("VSQ frame {}, and the queue's is {frame}", oob1.vsq_frame()));
        }
        if self.wqe.flags.sgl_direct() == 1 || self.wqe.flags.consume_credit() == 1 || self.wqe.flags.check_sn() == 1 {
            return invalid(format!("flags {:#x} that raw packets do not have", self.wqe.flags.0));
        }
        if oob.is_outer_ipv4() == 1 && oob.is_outer_ipv6() == 1 {
            return invalid("both IPv4 and IPv6".to_owned());
        }
        // Some drivers write the long form's number, some only the short one.
        let word3 = TxOob3(self.wqe.oob[3]);
        let named = if long && word3.long_vport() != 0 { word3.long_vport() } else { oob1.vport() };
        if named != self.port.vport {
            let why = format!("virtual port {named}, and the queue's is {}", self.port.vport);
            return Err(drop_packet(defs::CQE_TX_VPORT_IDX_OUT_OF_RANGE, why));
        }
        Ok(())
    }

    /// Cuts a large TCP packet, which lies in the outbox's room, into segments: how many, and their bytes.
    fn segment(
        &mut self,
        env: &mut Env<'_>,
        total: usize,
        inserted: usize,
        oob: TxOob,
    ) -> Result<(u64, usize), Failure> {
        let port = env.first_port + self.sq.port;
        let packet = env.outbox.room(total).map(|room| room.to_vec()).unwrap_or_default();
        let wqe = &*self.wqe;
        let mss = wqe.flags.client_data_unit() as usize;
        if wqe.count < 2 || mss == 0 {
            return Err(stop_queue(format!("segmentation with {} entries and a segment size of {mss}", wqe.count)));
        }
        let layers = segment::layers_of_large(&packet);
        if layers.protocol != TCP || oob.compute_tcp_csum() != 1 {
            return Err(drop_packet(
                defs::CQE_TX_HDR_PROCESSING_ERROR,
                "segmentation of what is not TCP, or without its checksum",
            ));
        }
        let header = layers.l4 + usize::from(packet[layers.l4 + 12] >> 4) * 4;
        let first = wqe.sges()[0].size as usize;
        if first > defs::MAX_LSO_HEADER as usize || first + inserted != header {
            return Err(stop_queue(format!(
                "the first entry has {first} bytes, and the headers have {}",
                header - inserted
            )));
        }
        if header - layers.l3 + mss > self.spec.mtu as usize {
            return Err(drop_packet(
                defs::CQE_TX_MTU_DROP,
                format!("segments of {mss} bytes exceed the MTU {}", self.spec.mtu),
            ));
        }
        let (mut sent, mut bytes) = (0, 0);
        let cut = segment::cut(&packet, header, mss, |segment| {
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

#[inline]
fn find<'k, R: Region>(keys: &'k Keys<R>, sge: &Sge, i: usize, pd: u32) -> Result<(&'k R, u64), Failure> {
    keys.find(sge.key, sge.address, u64::from(sge.size), pd, false).map_err(|why| {
        stop_queue(format!("entry {i}: address {:#x}, {} bytes, key {:#x}: {why}", sge.address, sge.size, sge.key))
    })
}

/// Checksums that the driver left to the device.
fn offload(room: &mut [u8], inserted: usize, oob: TxOob, oob1: TxOob1) -> Result<(), Failure> {
    if oob.0 & 0x70 == 0 {
        return Ok(());
    }
    let wrong = |why: String| Err(drop_packet(defs::CQE_TX_HDR_PROCESSING_ERROR, why));
    let layers = frame::parse(room);
    let said = match (oob.is_outer_ipv4(), oob.is_outer_ipv6()) {
        (1, _) => Some(Network::V4),
        (_, 1) => Some(Network::V6),
        _ => None,
    };
    if said.is_none() || said != layers.network {
        return wrong(format!("checksums of {said:?}, and the packet is {:?}", layers.network));
    }
    if oob.compute_ip_csum() == 1 {
        if layers.network != Some(Network::V4) {
            return wrong("a header checksum for IPv6".to_owned());
        }
        let header = layers.l3..layers.l3 + usize::from(room[layers.l3] & 0xf) * 4;
        let at = layers.l3 + 10;
        room[at..at + 2].fill(0);
        let checksum = !frame::fold(frame::sum(&room[header]));
        room[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    let wanted = match (oob.compute_tcp_csum(), oob.compute_udp_csum()) {
        (0, 0) => return Ok(()),
        (1, 0) => TCP,
        (0, 1) => UDP,
        _ => return wrong("both TCP and UDP".to_owned()),
    };
    if layers.protocol != wanted {
        return wrong(format!("a checksum for protocol {wanted}, and the packet has {}", layers.protocol));
    }
    // UDP's offset may be left out: DPDK's driver does.
    let said = oob1.transport_offset() as usize;
    if said + inserted != layers.l4 && (wanted == TCP || said != 0) {
        return wrong(format!("transport header at {said}, and it is at {}", layers.l4 - inserted));
    }
    let Some(at) = layers.checksum_at() else { return Ok(()) };
    // The field holds the sum of the pseudo header: the device adds the rest, and what was wrong before stays wrong.
    let checksum = match !frame::fold(frame::sum(&room[layers.l4..layers.end])) {
        0 if wanted == UDP => 0xffff,
        sum => sum,
    };
    room[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    Ok(())
}
