//! Frames as a kernel hands them over beside a `struct virtio_net_hdr` (linux/virtio_net.h): with a checksum left to a device, or as a
//! superframe that a device was to cut, and with a VLAN tag beside the frame. What a port receives is finished here, or passed on to a
//! device that does it.

use wirepath_wire::segment::Segmenter;
use wirepath_wire::vlan::{TAG_LEN, Tag};
use wirepath_wire::{L4, Parser, Tunnels, checksum};

use crate::counters::QueueCounters;
use crate::drops::DropReason;
use crate::packet::offload::Flags;
use crate::packet::{Batch, Layers, Packet, Pool};
use crate::port::PortId;

/// Bytes of the header, in the byte order of the machine (`vio_le()` of a packet socket, the default of a TAP device).
pub(crate) const HEADER: usize = 10;

/// Addresses and EtherType.
const ETHERNET: usize = 14;

const NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
/// Marks TCP with ECN, which changes nothing in how segments are made (RFC 3168 section 6.1.2 is kept always).
const GSO_ECN: u8 = 0x80;

/// `checksum` in `struct sctphdr`: a CRC, which the header does not tell from a checksum.
const SCTP_CHECKSUM: u16 = 8;

/// The header beside a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    flags: u8,
    gso_type: u8,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

impl Header {
    #[inline(always)]
    pub(crate) fn read(bytes: &[u8; HEADER]) -> Self {
        let &[flags, gso_type, _, _, s0, s1, c0, c1, o0, o1] = bytes;
        Self {
            flags,
            gso_type,
            gso_size: u16::from_ne_bytes([s0, s1]),
            csum_start: u16::from_ne_bytes([c0, c1]),
            csum_offset: u16::from_ne_bytes([o0, o1]),
        }
    }

    /// Whether the frame is complete as it is.
    #[inline(always)]
    fn is_complete(self) -> bool {
        self.flags & NEEDS_CSUM == 0 && self.gso_type == GSO_NONE
    }
}

/// Makes packets of what the kernel hands over, for one receive queue.
pub(crate) struct Finisher {
    pool: Pool,
    port: PortId,
    /// Frames of the current superframe that were made before the batch was full.
    made: usize,
    /// TCP superframes are not cut here.
    whole: bool,
}

impl Finisher {
    pub(crate) fn new(pool: Pool, port: PortId) -> Self {
        Self { pool, port, made: 0, whole: false }
    }

    /// Whether TCP superframes are passed on whole, for a device to cut, where they can be.
    pub(crate) fn whole(self, whole: bool) -> Self {
        Self { whole, ..self }
    }

    /// Gives up a superframe of which only a part was delivered.
    pub(crate) fn abandon(&mut self) {
        self.made = 0;
    }

    /// Appends the packets that `frame` comes to, or drops and counts it. `false` if the batch is full and more of the same frame is to
    /// come: call again with it.
    #[inline(always)]
    pub(crate) fn accept(
        &mut self,
        frame: &[u8],
        header: Header,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) -> bool {
        if batch.is_full() {
            return false;
        }
        if frame.len() < ETHERNET {
            counters.drops.add(DropReason::TooShort, 1);
            return true;
        }
        if !header.is_complete() {
            return self.unfinished(frame, header, tag, batch, counters);
        }
        match self.copy(frame, tag) {
            Ok(packet) => {
                let _ = batch.push(packet);
            }
            Err(reason) => counters.drops.add(reason, 1),
        }
        true
    }

    /// Copies a frame into a packet, its tag put back.
    #[inline(always)]
    fn copy(&self, frame: &[u8], tag: Option<Tag>) -> Result<Packet, DropReason> {
        let mut packet = self.pool.take().ok_or(DropReason::NoBuffer)?;
        packet.set_in_port(self.port);
        if frame.len() <= packet.tailroom() {
            packet.append(frame.len()).ok_or(DropReason::TooLong)?.copy_from_slice(frame);
        } else if !packet.extend_from_slice(frame, &self.pool) {
            return Err(if frame.len() > crate::packet::MAX_PACKET {
                DropReason::TooLong
            } else {
                DropReason::NoBuffer
            });
        }
        if let Some(tag) = tag {
            insert_tag(&mut packet, tag)?;
        }
        Ok(packet)
    }

    #[cold]
    #[inline(never)]
    fn unfinished(
        &mut self,
        frame: &[u8],
        header: Header,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) -> bool {
        if header.gso_type != GSO_NONE {
            if self.whole
                && tag.is_none()
                && let Some(layers) = layers_to_cut(frame, header)
            {
                match self.copy(frame, None) {
                    Ok(mut packet) => {
                        packet.set_layers(layers);
                        packet.set_mss(header.gso_size);
                        packet.set_flags(CUT);
                        let _ = batch.push(packet);
                    }
                    Err(reason) => counters.drops.add(reason, 1),
                }
                return true;
            }
            return self.cut(frame, header, tag, batch, counters);
        }
        match self.complete(frame, header, tag) {
            Ok(packet) => {
                counters.completed_checksums.add(1);
                let _ = batch.push(packet);
            }
            Err(reason) => counters.drops.add(reason, 1),
        }
        true
    }

    /// Completes the one checksum that was left open. It is the innermost: Linux sums an outer UDP datagram as if what it carries were
    /// complete (Documentation/networking/checksum-offloads.rst, "LCO").
    fn complete(&self, frame: &[u8], header: Header, tag: Option<Tag>) -> Result<Packet, DropReason> {
        let start = usize::from(header.csum_start);
        let at = start + usize::from(header.csum_offset);
        let covered = frame.get(start..).ok_or(DropReason::KernelOffload)?;
        if header.csum_offset == SCTP_CHECKSUM || at + 2 > frame.len() {
            return Err(DropReason::KernelOffload);
        }
        // The field holds the pseudo header's sum. Zero would mean "no checksum" in UDP, and 0xffff is the same number elsewhere.
        let value = checksum::sum(covered).udp_checksum();
        // The tag goes in afterwards, so that offsets count as the kernel counts them.
        let mut packet = self.copy(frame, None)?;
        let field = packet.data_mut().get_mut(at..at + 2).ok_or(DropReason::KernelOffload)?;
        field.copy_from_slice(&value.to_be_bytes());
        if let Some(tag) = tag {
            insert_tag(&mut packet, tag)?;
        }
        Ok(packet)
    }

    /// Cuts a superframe, going on where the last batch was full.
    fn cut(
        &mut self,
        frame: &[u8],
        header: Header,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) -> bool {
        let Some(mut segments) = segmenter(frame, header) else {
            counters.drops.add(DropReason::KernelOffload, 1);
            return true;
        };
        segments.skip(self.made);
        while segments.remaining() > 0 {
            if batch.is_full() {
                return false;
            }
            match self.one(&mut segments, frame, tag) {
                Ok(packet) => {
                    let _ = batch.push(packet);
                }
                Err(reason) => {
                    counters.drops.add(reason, 1);
                    segments.skip(1);
                }
            }
            self.made += 1;
        }
        self.made = 0;
        counters.segmented.add(1);
        true
    }

    /// The next frame of a superframe. Its position moves on only if that succeeds, but where the pool ran dry halfway.
    fn one(&self, segments: &mut Segmenter<'_>, frame: &[u8], tag: Option<Tag>) -> Result<Packet, DropReason> {
        let mut packet = self.pool.take().ok_or(DropReason::NoBuffer)?;
        packet.set_in_port(self.port);
        let headers = packet.append(segments.header_len()).ok_or(DropReason::KernelOffload)?;
        let mut at = segments.clone();
        let segment = match at.next_into(headers, frame) {
            Some(Ok(segment)) => segment,
            _ => return Err(DropReason::KernelOffload),
        };
        let payload = frame.get(segment.payload).ok_or(DropReason::KernelOffload)?;
        if !packet.extend_from_slice(payload, &self.pool) {
            return Err(DropReason::NoBuffer);
        }
        if let Some(tag) = tag {
            insert_tag(&mut packet, tag)?;
        }
        *segments = at;
        Ok(packet)
    }
}

/// What is asked of the device that cuts.
const CUT: Flags = Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM);

/// Where the headers of a superframe are that every NIC could cut: TCP outside any tunnel, to be marked with ECN on none of its segments.
fn layers_to_cut(frame: &[u8], header: Header) -> Option<Layers> {
    if !matches!(header.gso_type, GSO_TCPV4 | GSO_TCPV6) || header.flags & NEEDS_CSUM == 0 || header.gso_size == 0 {
        return None;
    }
    let parsed = Parser { verify_ipv4: false, ..Parser::default() }.parse(frame).ok()?;
    let outer = parsed.outer();
    let is_plain = parsed.inner().is_none() && outer.l4_kind() == L4::Tcp;
    let is_there = outer.l4() == usize::from(header.csum_start) && outer.payload() < frame.len();
    let layers = Layers::from(&parsed);
    // All zero if a length is out of range.
    (is_plain && is_there && layers.l4_len > 0).then_some(layers)
}

/// What cuts this superframe, if it is of a kind that can be cut.
fn segmenter(frame: &[u8], header: Header) -> Option<Segmenter<'_>> {
    if !matches!(header.gso_type & !GSO_ECN, GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4) {
        return None;
    }
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let mut parsed = parser.parse(frame).ok()?;
    let l4 = match header.flags & NEEDS_CSUM {
        0 => parsed.innermost().l4(),
        _ => header.csum_start.into(),
    };
    // A tunnel on a port of its own: the header says that there is something to cut inside.
    if parsed.inner().is_none() && parsed.outer().l4_kind() == L4::Udp && l4 > parsed.outer().l4() {
        let port = parsed.outer().udp(frame)?.dst_port();
        parsed = Parser { tunnels: Tunnels::NONE.with_vxlan(Some(port)), ..parser }.parse(frame).ok()?;
    }
    Segmenter::new(frame, &parsed, l4, header.gso_size).ok()
}

/// Puts a tag behind the addresses.
#[inline]
fn insert_tag(packet: &mut Packet, tag: Tag) -> Result<(), DropReason> {
    const ADDRESSES: usize = 12;
    if packet.data().len() < ADDRESSES || packet.prepend_slice(TAG_LEN).is_none() {
        return Err(DropReason::NoHeadroom);
    }
    let data = packet.data_mut();
    data.copy_within(TAG_LEN..TAG_LEN + ADDRESSES, 0);
    data[ADDRESSES..ADDRESSES + TAG_LEN].copy_from_slice(&tag.bytes());
    Ok(())
}
