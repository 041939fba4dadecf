//! Send queues: descriptors are fetched, checked and executed.

use wirepath_nic_defs::mlx5::{
    self as defs, CQE_BYTES, ControlDs, ControlOpcode, CqeOwner, ETH_BYTES, ETH_INLINE_DATA, ETH_INLINE_OFFSET,
    SEGMENT, SEGMENTS_PER_BLOCK,
};
use wirepath_nic_defs::uverbs::EVENT_QP_FATAL;

use super::completion::{Cq, Entry};
use super::queues::{Sq, State};
use super::steering::{Steering, TxVerdict};
use super::{MAX_SEND_WQE, Mlx5, Port};
use crate::core_clock::CoreClock;
use crate::device::{Env, Event};
use crate::faults::FaultKind;
use crate::frame::{self, ETHERNET, HeaderOffsets, Network, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::MkeyTable;
use crate::segment::TunnelHeaders;
use crate::topology::{DeviceSpec, MinInline};
use crate::{segment, tunnel};

/// Number of descriptors of one queue that are processed before the next queue.
const TX_BUDGET: u32 = 64;
/// Maximum frame length with VLAN tags, beyond the MTU.
const OVERHEAD: usize = ETHERNET + 8;
/// Maximum length of a packet to be segmented.
const LARGEST: usize = (1 << 18) + 256;
/// Maximum number of packets of a multi-packet descriptor.
const MAX_PACKETS: u32 = 60;

/// Syndrome and reason of an invalid descriptor.
type Failure = (u8, String);

fn malformed(why: impl Into<String>) -> Failure {
    (defs::SYNDROME_LOCAL_QP_OPERATION, why.into())
}

fn wrong_length(why: impl Into<String>) -> Failure {
    (defs::SYNDROME_LOCAL_LENGTH, why.into())
}

impl<H: Host> Mlx5<H> {
    /// Processes the send queues in turn; returns true if work is left.
    pub(super) fn transmit(&mut self, env: &mut Env<'_>) -> bool {
        let count = self.sqs.len();
        let mut more = false;
        for i in 0..count {
            let id = ((self.next_sq + i) % count) as u32;
            let scan = Self::scans(env);
            let Self { sqs, cqs, keys, ports, spec, steering, wqe, clock, .. } = self;
            let Some(sq) = sqs.get_mut(id) else { continue };
            let Some(cq) = cqs.get_mut(sq.cq) else { continue };
            if !scan && !sq.rung {
                continue;
            }
            sq.read_record();
            if sq.state == State::Error {
                flush(sq, cq, env);
                cq.publish(env.events);
                continue;
            }
            if sq.state != State::Ready || cq.is_overrun() {
                continue;
            }
            let posted = sq.posted();
            if posted > sq.blocks {
                env.log.line(format_args!(
                    "{} sq {:#x}: {posted} blocks posted, but the ring has {}: backwards, or an overrun",
                    spec.name, sq.number, sq.blocks
                ));
                sq.wrong_doorbells += 1;
                fail(sq, cq, env, defs::SYNDROME_LOCAL_QP_OPERATION, 0, defs::OPCODE_NOP);
                cq.publish(env.events);
                continue;
            }
            let port = sq.port;
            let mut sender =
                Sender { sq, cq, keys, port: &mut ports[port], spec, steering, clock: *clock, metadata: 0 };
            let mut budget = TX_BUDGET;
            let mut full = false;
            while budget > 0 && sender.sq.state == State::Ready && sender.sq.has_more() {
                full = env.outbox.is_full();
                if full {
                    break;
                }
                sender.transmit_one(env, wqe);
                budget -= 1;
            }
            sender.cq.publish(env.events);
            if full {
                self.next_sq = id as usize;
                return true;
            }
            if budget == 0 {
                more = true;
            } else {
                sender.sq.rung = false;
            }
        }
        if count > 0 {
            self.next_sq = (self.next_sq + 1) % count;
        }
        more
    }

    /// Delivers copies of sent frames to sniffer rules.
    pub(super) fn deliver_to_sniffers(&mut self, env: &mut Env<'_>) {
        let sniffed = self.steering.take_sniffed();
        for (port, frame, to) in &sniffed {
            for qp in to {
                self.deliver_one(env, *port, *qp, frame, (0, 0), false);
            }
        }
        if !sniffed.is_empty() {
            self.end_burst(env);
        }
    }
}

/// Completes the descriptors of a queue in the error state as flushed.
fn flush<R: Region>(sq: &mut Sq<R>, cq: &mut Cq<R>, env: &mut Env<'_>) {
    while sq.posted() > 0 && sq.posted() <= sq.blocks && !cq.is_overrun() {
        let mut head = [0; 8];
        sq.fetch(&mut head);
        let blocks = blocks_of(&head);
        complete_error(sq, cq, env, defs::SYNDROME_FLUSHED, head[3]);
        sq.head = sq.head.wrapping_add(blocks.min(sq.posted()) as u16);
    }
    sq.rung = false;
}

fn blocks_of(head: &[u8; 8]) -> u32 {
    let ds = ControlDs(u32::from_be_bytes(head[4..8].try_into().expect("four bytes")));
    ds.segments().div_ceil(SEGMENTS_PER_BLOCK).max(1)
}

fn complete_error<R: Region>(sq: &mut Sq<R>, cq: &mut Cq<R>, env: &mut Env<'_>, syndrome: u8, opcode: u8) {
    let mut entry: Entry = [0; CQE_BYTES];
    entry[0x20..0x24].copy_from_slice(&(sq.user_index & 0xff_ffff).to_be_bytes());
    entry[0x36] = 0x68;
    entry[0x37] = syndrome;
    entry[0x38..0x3c].copy_from_slice(&(u32::from(opcode) << 24 | sq.number).to_be_bytes());
    entry[0x3c..0x3e].copy_from_slice(&sq.head.to_be_bytes());
    sq.completions += 1;
    cq.complete(&entry, CqeOwner::default().with_opcode(defs::CQE_REQUEST_ERROR), env.events);
}

/// Stops the queue: the descriptor at the head completes with the syndrome, the following ones as flushed.
fn fail<R: Region>(sq: &mut Sq<R>, cq: &mut Cq<R>, env: &mut Env<'_>, syndrome: u8, blocks: u32, opcode: u8) {
    sq.errors += 1;
    complete_error(sq, cq, env, syndrome, opcode);
    sq.head = sq.head.wrapping_add(blocks as u16);
    sq.state = State::Error;
    env.events.push(Event::Object(sq.owner, EVENT_QP_FATAL));
    flush(sq, cq, env);
}

/// State for processing one send queue.
struct Sender<'s, R> {
    sq: &'s mut Sq<R>,
    cq: &'s mut Cq<R>,
    keys: &'s MkeyTable<R>,
    port: &'s mut Port,
    spec: &'s DeviceSpec,
    steering: &'s mut Steering,
    clock: CoreClock,
    /// Metadata of the current descriptor, for flow rules.
    metadata: u32,
}

/// A decoded descriptor.
struct Descriptor<'d> {
    opcode: u8,
    flags: u8,
    mss: u16,
    metadata: u32,
    /// Everything behind the control segment.
    bytes: &'d [u8],
}

/// Inline header, VLAN tag to be inserted, and data segments.
type Ethernet<'d> = (&'d [u8], Option<u16>, &'d [u8]);

impl<R: Region> Sender<'_, R> {
    #[inline]
    fn transmit_one(&mut self, env: &mut Env<'_>, bytes: &mut [u8; MAX_SEND_WQE as usize]) {
        self.sq.fetch(&mut bytes[..defs::SEND_BLOCK as usize]);
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let (first, second) = (ControlOpcode(word(0)), ControlDs(word(4)));
        let complete = bytes[11] & 0x0c;
        let opcode = first.opcode() as u8;
        let segments = second.segments();
        let blocks = segments.div_ceil(SEGMENTS_PER_BLOCK).max(1);
        let size = (segments * SEGMENT) as usize;
        let result = self.check(first, second).and_then(|()| {
            if blocks > 1 {
                self.sq.fetch(&mut bytes[..size]);
            }
            let descriptor = Descriptor {
                opcode,
                flags: bytes[0x14],
                mss: u16::from_be_bytes([bytes[0x16], bytes[0x17]]),
                metadata: u32::from_be_bytes([bytes[0x18], bytes[0x19], bytes[0x1a], bytes[0x1b]]),
                bytes: &bytes[defs::CONTROL_BYTES..size],
            };
            self.run(env, &descriptor)
        });
        self.sq.descriptors += 1;
        match result {
            Ok(()) => {
                self.sq.unsignaled += blocks;
                if complete == defs::CONTROL_COMPLETE || complete == 0x0c {
                    self.complete(env, opcode);
                } else if self.sq.unsignaled > self.sq.blocks {
                    self.sq.wrong_doorbells += 1;
                    self.sq.unsignaled = 0;
                    env.log.line(format_args!(
                        "{} sq {:#x}: a whole ring without a signaled completion",
                        self.spec.name, self.sq.number
                    ));
                }
                self.sq.head = self.sq.head.wrapping_add(blocks as u16);
            }
            Err((syndrome, why)) => {
                env.log.line(format_args!(
                    "{} sq {:#x}: descriptor {:#x}: {why}; the queue is in error",
                    self.spec.name, self.sq.number, self.sq.head
                ));
                fail(self.sq, self.cq, env, syndrome, blocks.min(self.sq.posted()), opcode);
            }
        }
    }

    fn check(&self, first: ControlOpcode, second: ControlDs) -> Result<(), Failure> {
        if first.index() != u32::from(self.sq.head) {
            return Err(malformed(format!("its index is {:#x}, but it is at {:#x}", first.index(), self.sq.head)));
        }
        if second.queue() != self.sq.number {
            return Err(malformed(format!("it names queue {:#x}", second.queue())));
        }
        let segments = second.segments();
        if segments == 0 || second.0 & 0xc0 != 0 || segments * SEGMENT > u32::from(MAX_SEND_WQE) {
            return Err(malformed(format!("{segments} segments; expected 1 to {}", u32::from(MAX_SEND_WQE) / SEGMENT)));
        }
        let blocks = segments.div_ceil(SEGMENTS_PER_BLOCK);
        if blocks > self.sq.posted() {
            return Err(malformed(format!("{blocks} blocks long, but the record posted {}", self.sq.posted())));
        }
        Ok(())
    }

    #[inline]
    fn complete(&mut self, env: &mut Env<'_>, opcode: u8) {
        let mut entry: Entry = [0; CQE_BYTES];
        entry[0x20..0x24].copy_from_slice(&(self.sq.user_index & 0xff_ffff).to_be_bytes());
        entry[0x30..0x38].copy_from_slice(&self.clock.stamp(self.spec.mlx5.timestamps).to_be_bytes());
        entry[0x38..0x3c].copy_from_slice(&(u32::from(opcode) << 24 | self.sq.number).to_be_bytes());
        entry[0x3c..0x3e].copy_from_slice(&self.sq.head.to_be_bytes());
        let owner = CqeOwner::default().with_opcode(defs::CQE_REQUEST);
        self.sq.completions += 1;
        self.sq.unsignaled = 0;
        if !env.faults.is_empty()
            && let Some(FaultKind::CorruptCqe { corruption, .. }) =
                env.faults.trigger(env.device, |what| matches!(what, FaultKind::CorruptCqe { transmit: true, .. }))
        {
            env.log.line(format_args!(
                "{} sq {:#x}: injected fault: corrupt completion ({corruption})",
                self.spec.name, self.sq.number
            ));
            self.cq.complete_corrupted(&entry, owner, corruption, env.events);
            return;
        }
        self.cq.complete(&entry, owner, env.events);
        // Drivers request few completions and wait for them to free ring space, so each one is published at
        // once.
        self.cq.publish(env.events);
    }

    #[inline]
    fn run(&mut self, env: &mut Env<'_>, descriptor: &Descriptor<'_>) -> Result<(), Failure> {
        if !env.faults.is_empty()
            && let Some(FaultKind::CompletionError { code, .. }) =
                env.faults.trigger(env.device, |what| matches!(what, FaultKind::CompletionError { transmit: true, .. }))
        {
            return Err((code as u8, "injected fault: completion error".to_owned()));
        }
        self.metadata = descriptor.metadata;
        match descriptor.opcode {
            defs::OPCODE_NOP => Ok(()),
            defs::OPCODE_SEND => self.send(env, descriptor),
            defs::OPCODE_TSO => self.segment(env, descriptor),
            defs::OPCODE_ENHANCED_MPW if self.spec.mlx5.multi_packet => self.multi_packet(env, descriptor),
            opcode => Err(malformed(format!("opcode {opcode:#x}"))),
        }
    }

    /// Returns inline header and VLAN tag of the Ethernet segment, and the data segments.
    fn ethernet<'d>(&self, bytes: &'d [u8]) -> Result<Ethernet<'d>, Failure> {
        let Some(word) = bytes.get(ETH_INLINE_OFFSET..ETH_BYTES) else {
            return Err(malformed("no Ethernet segment"));
        };
        let word = u32::from_be_bytes(word.try_into().expect("four bytes"));
        if word & defs::ETH_INSERT_VLAN != 0 {
            return Ok((&[], Some(word as u16), &bytes[ETH_BYTES..]));
        }
        let length = (word >> 16) as usize;
        let end = (ETH_INLINE_DATA + length).next_multiple_of(SEGMENT as usize).max(ETH_BYTES);
        let header = bytes.get(ETH_INLINE_DATA..ETH_INLINE_DATA + length).filter(|_| end <= bytes.len());
        let header = header
            .ok_or_else(|| wrong_length(format!("an inline header of {length} bytes reaches beyond the descriptor")))?;
        Ok((header, None, &bytes[end..]))
    }

    /// Copies the data segments of a descriptor to `room` at offset `at`; returns the end offset.
    fn gather(&self, segments: &[u8], room: &mut [u8], mut at: usize) -> Result<usize, Failure> {
        let mut rest = segments;
        while !rest.is_empty() {
            let head: &[u8; 4] = rest.first_chunk().ok_or_else(|| malformed("a truncated data segment"))?;
            let count = u32::from_be_bytes(*head);
            if count & defs::INLINE_SEGMENT != 0 {
                let length = (count & !defs::INLINE_SEGMENT) as usize;
                let data = rest.get(4..4 + length);
                let data =
                    data.ok_or_else(|| wrong_length(format!("{length} inline bytes reach beyond the descriptor")))?;
                let to = room
                    .get_mut(at..at + length)
                    .ok_or_else(|| wrong_length("a packet that exceeds the limit of the port"))?;
                to.copy_from_slice(data);
                at += length;
                rest = rest.get((4 + length).next_multiple_of(SEGMENT as usize)..).unwrap_or_default();
                continue;
            }
            let segment: &[u8; defs::DATA_BYTES] =
                rest.first_chunk().ok_or_else(|| malformed("a truncated data segment"))?;
            at += self.fetch_segment(segment, room, at)?;
            rest = &rest[defs::DATA_BYTES..];
        }
        Ok(at)
    }

    #[inline]
    fn fetch_segment(&self, segment: &[u8; defs::DATA_BYTES], room: &mut [u8], at: usize) -> Result<usize, Failure> {
        let size = u32::from_be_bytes(segment[..4].try_into().expect("four bytes")) as usize;
        let key = u32::from_be_bytes(segment[4..8].try_into().expect("four bytes"));
        let address = u64::from_be_bytes(segment[8..].try_into().expect("eight bytes"));
        let (region, offset) = self.keys.find(key, address, size as u64, self.sq.pd, false).map_err(|why| {
            (defs::SYNDROME_LOCAL_PROTECTION, format!("address {address:#x}, {size} bytes, key {key:#x}: {why}"))
        })?;
        let to =
            room.get_mut(at..at + size).ok_or_else(|| wrong_length("a packet that exceeds the limit of the port"))?;
        let _ = region.read(offset, to);
        Ok(size)
    }

    fn limit(&self) -> usize {
        self.spec.ports[self.sq.port].mtu as usize + OVERHEAD
    }

    /// Sends one packet.
    fn send(&mut self, env: &mut Env<'_>, descriptor: &Descriptor<'_>) -> Result<(), Failure> {
        let (header, vlan, segments) = self.ethernet(descriptor.bytes)?;
        if self.spec.mlx5.min_inline != MinInline::None && header.len() < defs::ETH_L2_INLINE {
            return Err(malformed(format!(
                "{} bytes of inline header; the device requires {}",
                header.len(),
                defs::ETH_L2_INLINE
            )));
        }
        let limit = self.limit();
        let inserted = if vlan.is_some() { 4 } else { 0 };
        let port = env.first_port + self.sq.port;
        let Some(room) = env.outbox.room(limit + 4) else { return Err(wrong_length("the outbox is full")) };
        room[inserted..inserted + header.len().min(limit)].copy_from_slice(&header[..header.len().min(limit)]);
        let end = self.gather(segments, room, inserted + header.len())?;
        let length = end - inserted;
        if length < ETHERNET || length > limit {
            return Err(wrong_length(format!("a packet of {length} bytes; expected {ETHERNET} to {limit}")));
        }
        if let Some(tag) = vlan {
            room.copy_within(4..16, 0);
            room[12..14].copy_from_slice(&0x8100u16.to_be_bytes());
            room[14..16].copy_from_slice(&tag.to_be_bytes());
        }
        checksums(&mut room[..end], descriptor.flags);
        self.out(env, port, end);
        Ok(())
    }

    /// Sends the packet that is in the outbox space.
    #[inline]
    fn out(&mut self, env: &mut Env<'_>, port: usize, mut length: usize) {
        if self.steering.has_egress_rules(self.sq.port) {
            let Some(passed) = self.pass(env, length) else { return };
            length = passed;
        }
        if !env.outbox.count_only(port, length) {
            env.outbox.send(port, length);
        }
        self.sq.sent += 1;
        self.sq.sent_bytes += length as u64;
        self.port.counters.sent += 1;
        self.port.counters.sent_bytes += length as u64;
    }

    /// Applies flow rules to a sent frame; returns its new length, or `None` if it is dropped.
    #[inline(never)]
    fn pass(&mut self, env: &mut Env<'_>, length: usize) -> Option<usize> {
        let room = env.outbox.room(length)?;
        match self.steering.transmit(self.sq.port, room, self.sq.number, self.metadata) {
            TxVerdict::Unchanged => Some(length),
            TxVerdict::Drop => {
                self.port.counters.sent_ruled_out += 1;
                None
            }
            TxVerdict::Changed => {
                let packet = &self.steering.sent;
                // The length limit includes encapsulation headers.
                if packet.len() > self.limit() {
                    self.port.counters.too_long += 1;
                    return None;
                }
                env.outbox.room(packet.len())?.copy_from_slice(packet);
                Some(packet.len())
            }
        }
    }

    /// Sends the packets of a multi-packet descriptor.
    fn multi_packet(&mut self, env: &mut Env<'_>, descriptor: &Descriptor<'_>) -> Result<(), Failure> {
        let (header, vlan, mut rest) = self.ethernet(descriptor.bytes)?;
        if !header.is_empty() || vlan.is_some() || self.spec.mlx5.min_inline != MinInline::None {
            return Err(malformed("inline header or VLAN tag in a multi-packet descriptor"));
        }
        if rest.is_empty() {
            return Err(malformed("a multi-packet descriptor without packets"));
        }
        let limit = self.limit();
        let port = env.first_port + self.sq.port;
        let mut packets = 0;
        while !rest.is_empty() {
            packets += 1;
            if packets > MAX_PACKETS {
                return Err(malformed("too many packets"));
            }
            let Some(room) = env.outbox.room(limit) else { return Err(wrong_length("the outbox is full")) };
            let inline = rest[0] & 0x80 != 0;
            let size = if inline {
                let length = (u32::from_be_bytes(rest[..4].try_into().expect("segments have 16 bytes"))
                    & !defs::INLINE_SEGMENT) as usize;
                (4 + length).next_multiple_of(SEGMENT as usize)
            } else {
                defs::DATA_BYTES
            };
            let segment =
                rest.get(..size).ok_or_else(|| wrong_length("an inline packet reaches beyond the descriptor"))?;
            let length = self.gather(segment, room, 0)?;
            if length < ETHERNET {
                return Err(wrong_length(format!("a packet of {length} bytes; expected {ETHERNET} to {limit}")));
            }
            checksums(&mut room[..length], descriptor.flags);
            self.out(env, port, length);
            rest = &rest[size..];
        }
        Ok(())
    }

    /// Returns the headers of a packet in a tunnel, which the device segments. Two sources know them: the device's own
    /// parser, and the offsets in the descriptor (software parser).
    fn tunnel_headers(&self, header: &[u8], descriptor: &Descriptor<'_>) -> Result<TunnelHeaders, Failure> {
        let offsets: [usize; 4] = std::array::from_fn(|i| 2 * usize::from(descriptor.bytes[i]));
        let outer = segment::parse_oversized(header);
        if outer.network.is_none() {
            return Err(malformed("segmentation in a tunnel without an outer IP header"));
        }
        let parsed = tunnel::inner_l3(header, &outer).filter(|_| self.spec.mlx5.tunnels);
        let l3 = match (parsed, offsets) {
            (None, [0, 0, 0, 0]) => {
                return Err(malformed("inner headers that the device does not find, and no offsets of headers"));
            }
            (Some(l3), [0, 0, 0, 0]) => l3,
            (_, [.., l3]) => l3,
        };
        let inner = segment::headers_at(header, l3);
        let tunnel = TunnelHeaders { outer, inner };
        if offsets != [0; 4] {
            if !self.spec.mlx5.sw_parser {
                return Err(malformed("offsets of headers, which the device does not take"));
            }
            if parsed.is_some_and(|parsed| parsed != l3) {
                return Err(malformed(format!("an inner L3 offset of {l3}; the header is at {}", parsed.unwrap_or(0))));
            }
            check_offsets(&tunnel, offsets, descriptor.bytes[5]).map_err(malformed)?;
        }
        check_flags(&tunnel, descriptor.flags).map_err(malformed)?;
        Ok(tunnel)
    }

    /// Segments a large TCP packet and sends the segments.
    fn segment(&mut self, env: &mut Env<'_>, descriptor: &Descriptor<'_>) -> Result<(), Failure> {
        let (header, vlan, segments) = self.ethernet(descriptor.bytes)?;
        let mss = usize::from(descriptor.mss);
        if vlan.is_some() || header.len() < ETHERNET + 40 || mss == 0 {
            return Err(wrong_length(format!(
                "segmentation with {} bytes of header inline and segments of {mss}",
                header.len()
            )));
        }
        if header.len() + mss > self.limit() {
            return Err(wrong_length(format!(
                "segments of {mss} bytes behind {} of header; the port takes {}",
                header.len(),
                self.limit()
            )));
        }
        let is_inner = descriptor.flags & (defs::ETH_L3_INNER_CSUM | defs::ETH_L4_INNER_CSUM) != 0;
        let tunnel = is_inner.then(|| self.tunnel_headers(header, descriptor)).transpose()?;
        let mut packet = vec![0; LARGEST];
        packet[..header.len()].copy_from_slice(header);
        let length = self.gather(segments, &mut packet, header.len())?;
        let (payload, limit) = (length - header.len(), self.spec.mlx5.max_tso);
        if payload > limit as usize {
            return Err(wrong_length(format!("segmentation of {payload} bytes; the device takes {limit}")));
        }
        let port = env.first_port + self.sq.port;
        let take = |segment: &[u8]| {
            if let Some(room) = env.outbox.room(segment.len()) {
                room[..segment.len()].copy_from_slice(segment);
                self.out(env, port, segment.len());
            }
        };
        let (packet, end) = (&packet[..length], header.len());
        let cut = match &tunnel {
            Some(tunnel) => segment::segment_in_tunnel(packet, tunnel, end, mss, take),
            None => segment::segment_tcp(packet, end, mss, take),
        };
        cut.map_err(wrong_length)?;
        self.sq.segmented += 1;
        self.sq.segmented_in_tunnels += u64::from(tunnel.is_some());
        Ok(())
    }
}

/// Checks the fields of the software parser (DPDK: drivers/net/mlx5/mlx5_tx.h, `txq_mbuf_to_swp`).
fn check_offsets(tunnel: &TunnelHeaders, offsets: [usize; 4], flags: u8) -> Result<(), String> {
    let TunnelHeaders { outer, inner } = tunnel;
    let [outer_l4, outer_l3, inner_l4, _] = offsets;
    let has = |flag: u8| flags & flag != 0;
    let is_ipv6 = |layers: &HeaderOffsets| layers.network == Some(Network::V6);
    let outer_udp = outer.protocol == UDP;
    let wanted_l4 = if outer_udp { outer.l4 } else { 0 };
    if outer_l3 != outer.l3 {
        return Err(format!("an outer L3 offset of {outer_l3}; the header is at {}", outer.l3));
    }
    // Linux gives the offset of each protocol, DPDK only that of UDP.
    if outer_l4 != wanted_l4 && outer_l4 != outer.l4 {
        return Err(format!("an outer L4 offset of {outer_l4}; the header is at {}", outer.l4));
    }
    if inner.network.is_none() || inner.l3 < outer.l4 || inner.protocol != TCP {
        return Err(format!("an inner L3 offset of {}, where no IP header with TCP is", inner.l3));
    }
    if inner_l4 != inner.l4 {
        return Err(format!("an inner L4 offset of {inner_l4}; the header is at {}", inner.l4));
    }
    let wanted = [
        (defs::SWP_OUTER_IPV6, is_ipv6(outer), "outer IPv6"),
        (defs::SWP_OUTER_UDP, outer_udp, "outer UDP"),
        (defs::SWP_INNER_IPV6, is_ipv6(inner), "inner IPv6"),
        (defs::SWP_INNER_UDP, false, "inner UDP"),
    ];
    match wanted.iter().find(|(flag, is, _)| has(*flag) != *is) {
        Some((_, is, name)) => Err(format!("a flag of headers is wrong: {name} is {is}")),
        None => Ok(()),
    }
}

/// Checks that each checksum that segmentation in a tunnel changes is requested. The device computes one layer-4
/// checksum of a packet (linux commit 6d6727dddc7f).
fn check_flags(tunnel: &TunnelHeaders, flags: u8) -> Result<(), String> {
    let TunnelHeaders { outer, inner } = tunnel;
    let wanted = [
        (defs::ETH_L4_INNER_CSUM, true, "inner L4"),
        (defs::ETH_L3_INNER_CSUM, inner.network == Some(Network::V4), "inner L3"),
        (defs::ETH_L3_CSUM, outer.network == Some(Network::V4), "outer L3"),
    ];
    if let Some((.., name)) = wanted.iter().find(|(flag, is_needed, _)| *is_needed && flags & flag == 0) {
        return Err(format!("segmentation in a tunnel without the flag of the {name} checksum"));
    }
    if flags & defs::ETH_L4_CSUM != 0 {
        return Err("segmentation in a tunnel with the flags of two L4 checksums".to_owned());
    }
    Ok(())
}

/// Computes the checksums that the driver offloads to the device. The old content of the fields is ignored. The device
/// computes one layer-4 checksum of a packet, the inner one if both are requested (linux commit 6d6727dddc7f).
#[inline]
fn checksums(packet: &mut [u8], flags: u8) {
    const ALL: u8 = defs::ETH_L3_CSUM | defs::ETH_L4_CSUM | defs::ETH_L3_INNER_CSUM | defs::ETH_L4_INNER_CSUM;
    if flags & ALL == 0 {
        return;
    }
    let layers = frame::parse(packet);
    let mut outer_l4 = flags & defs::ETH_L4_CSUM != 0;
    if flags & (defs::ETH_L3_INNER_CSUM | defs::ETH_L4_INNER_CSUM) != 0
        && let Some(l3) = tunnel::inner_l3(packet, &layers)
    {
        let inner = frame::parse_ip(&packet[..layers.end.min(packet.len())], l3);
        let inner_l4 = flags & defs::ETH_L4_INNER_CSUM != 0;
        fill(packet, &inner, flags & defs::ETH_L3_INNER_CSUM != 0, inner_l4);
        outer_l4 &= !inner_l4;
    }
    fill(packet, &layers, flags & defs::ETH_L3_CSUM != 0, outer_l4);
}

fn fill(packet: &mut [u8], layers: &frame::HeaderOffsets, l3: bool, l4: bool) {
    if l3 && layers.network == Some(Network::V4) {
        let header = layers.l3..layers.l3 + usize::from(packet[layers.l3] & 0xf) * 4;
        let at = layers.l3 + 10;
        packet[at..at + 2].fill(0);
        let checksum = !frame::fold(frame::sum(&packet[header]));
        packet[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    if l4
        && matches!(layers.protocol, TCP | UDP)
        && let Some(at) = layers.checksum_at()
    {
        packet[at..at + 2].fill(0);
        let total = layers.pseudo_header(packet, layers.end - layers.l4) + frame::sum(&packet[layers.l4..layers.end]);
        let checksum = match !frame::fold(total) {
            0 if layers.protocol == UDP => 0xffff,
            checksum => checksum,
        };
        packet[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}
