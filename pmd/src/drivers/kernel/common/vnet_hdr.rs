//! Frames that the kernel delivers with a `struct virtio_net_hdr` (linux/virtio_net.h).
//!
//! Such a frame may have an incomplete checksum, may be a superframe (GSO), and may have its VLAN tag beside
//! the frame. The port completes it here, or passes a superframe on to a device that segments it.

use wirepath_wire::segment::Segmenter;
use wirepath_wire::vlan::{TAG_LEN, Tag};
use wirepath_wire::{L4Type, Parser, Tunnels, checksum};

use wirepath_packet::PortId;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Batch, HeaderLengths, Packet, Pool};

/// Bytes of the header. Its byte order is that of the machine: `vio_le()` of a packet socket, the default of
/// a TAP device.
pub(crate) const HEADER: usize = 10;

/// Bytes of an Ethernet header: addresses and EtherType.
const ETHERNET: usize = 14;

const NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
/// Marks TCP with ECN. Segmentation does not depend on it, since RFC 3168 section 6.1.2 is always followed.
const GSO_ECN: u8 = 0x80;

/// Offset of `checksum` in `struct sctphdr`. It is a CRC, which the virtio header cannot distinguish from a
/// checksum.
const SCTP_CHECKSUM: u16 = 8;

/// The virtio header of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VirtioNetHdr {
    flags: u8,
    gso_type: u8,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

impl VirtioNetHdr {
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

    /// Returns whether the frame needs neither a checksum nor segmentation.
    #[inline(always)]
    fn is_complete(self) -> bool {
        self.flags & NEEDS_CSUM == 0 && self.gso_type == GSO_NONE
    }
}

/// Converts frames from the kernel to packets, for one receive queue.
pub(crate) struct VnetOffload {
    pool: Pool,
    port: PortId,
    /// Segments of the current superframe that were delivered in earlier batches.
    segments_done: usize,
    /// True if TCP superframes are passed on unsegmented.
    keep_superframes: bool,
}

impl VnetOffload {
    pub(crate) fn new(pool: Pool, port: PortId) -> Self {
        Self { pool, port, segments_done: 0, keep_superframes: false }
    }

    /// Sets whether TCP superframes are passed on whole for a device to segment, where possible.
    pub(crate) fn keep_superframes(self, keep_superframes: bool) -> Self {
        Self { keep_superframes, ..self }
    }

    /// Abandons a superframe that was delivered in part.
    pub(crate) fn reset(&mut self) {
        self.segments_done = 0;
    }

    /// Appends the packets that `frame` yields, or drops and counts it. Returns `false` if the batch is full
    /// and the same frame has more segments; the caller then passes the frame again.
    #[inline(always)]
    pub(crate) fn receive_frame(
        &mut self,
        frame: &[u8],
        header: VirtioNetHdr,
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
            return self.receive_partial(frame, header, tag, batch, counters);
        }
        match self.copy_frame(frame, tag) {
            Ok(packet) => {
                let _ = batch.push(packet);
            }
            Err(reason) => counters.drops.add(reason, 1),
        }
        true
    }

    /// Copies a frame into a packet and reinserts its VLAN tag.
    #[inline(always)]
    fn copy_frame(&self, frame: &[u8], tag: Option<Tag>) -> Result<Packet, DropReason> {
        let mut packet = self.pool.take().ok_or(DropReason::NoBuffer)?;
        packet.set_in_port(self.port);
        if frame.len() <= packet.tailroom() {
            packet.append(frame.len()).ok_or(DropReason::TooLong)?.copy_from_slice(frame);
        } else if !packet.extend_from_slice(frame, &self.pool) {
            return Err(if frame.len() > wirepath_packet::MAX_PACKET {
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
    fn receive_partial(
        &mut self,
        frame: &[u8],
        header: VirtioNetHdr,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) -> bool {
        if header.gso_type != GSO_NONE {
            if self.keep_superframes
                && tag.is_none()
                && let Some(layers) = tso_layers(frame, header)
            {
                match self.copy_frame(frame, None) {
                    Ok(mut packet) => {
                        packet.set_header_lengths(layers);
                        packet.set_mss(header.gso_size);
                        packet.set_flags(TSO_FLAGS);
                        let _ = batch.push(packet);
                    }
                    Err(reason) => counters.drops.add(reason, 1),
                }
                return true;
            }
            return self.segment(frame, header, tag, batch, counters);
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

    /// Completes the checksum that was left open. It is the innermost one: Linux computes an outer UDP
    /// checksum as if the payload were complete (Documentation/networking/checksum-offloads.rst, "LCO").
    fn complete(&self, frame: &[u8], header: VirtioNetHdr, tag: Option<Tag>) -> Result<Packet, DropReason> {
        let start = usize::from(header.csum_start);
        let at = start + usize::from(header.csum_offset);
        let covered = frame.get(start..).ok_or(DropReason::KernelOffload)?;
        if header.csum_offset == SCTP_CHECKSUM || at + 2 > frame.len() {
            return Err(DropReason::KernelOffload);
        }
        // The field holds the sum of the pseudo header. In UDP, zero would mean "no checksum"; 0xffff is an
        // equal value for other protocols.
        let value = checksum::sum(covered).udp_checksum();
        // The tag is inserted last, because the kernel's offsets do not count it.
        let mut packet = self.copy_frame(frame, None)?;
        let field = packet.data_mut().get_mut(at..at + 2).ok_or(DropReason::KernelOffload)?;
        field.copy_from_slice(&value.to_be_bytes());
        if let Some(tag) = tag {
            insert_tag(&mut packet, tag)?;
        }
        Ok(packet)
    }

    /// Segments a superframe, from the segment at which the last batch was full.
    fn segment(
        &mut self,
        frame: &[u8],
        header: VirtioNetHdr,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) -> bool {
        let Some(mut segments) = segmenter(frame, header) else {
            counters.drops.add(DropReason::KernelOffload, 1);
            return true;
        };
        segments.skip(self.segments_done);
        while segments.remaining() > 0 {
            if batch.is_full() {
                return false;
            }
            match self.next_segment(&mut segments, frame, tag) {
                Ok(packet) => {
                    let _ = batch.push(packet);
                }
                Err(reason) => {
                    counters.drops.add(reason, 1);
                    segments.skip(1);
                }
            }
            self.segments_done += 1;
        }
        self.segments_done = 0;
        counters.segmented.add(1);
        true
    }

    /// Returns the next segment of a superframe. `segments` advances only on success, not when the pool runs
    /// out of buffers.
    fn next_segment(&self, segments: &mut Segmenter<'_>, frame: &[u8], tag: Option<Tag>) -> Result<Packet, DropReason> {
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

/// Offload flags for a device that segments TCP.
const TSO_FLAGS: Flags = Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM);

/// Returns the header lengths of a superframe that every NIC can segment. It must be TCP outside any tunnel,
/// without ECN marking.
fn tso_layers(frame: &[u8], header: VirtioNetHdr) -> Option<HeaderLengths> {
    if !matches!(header.gso_type, GSO_TCPV4 | GSO_TCPV6) || header.flags & NEEDS_CSUM == 0 || header.gso_size == 0 {
        return None;
    }
    let parsed = Parser { verify_ipv4: false, ..Parser::default() }.parse(frame).ok()?;
    let outer = parsed.outer();
    let is_plain = parsed.inner().is_none() && outer.l4_type() == L4Type::Tcp;
    let is_there = outer.l4() == usize::from(header.csum_start) && outer.payload() < frame.len();
    let layers = HeaderLengths::from(&parsed);
    // The lengths are all zero if one is out of range.
    (is_plain && is_there && layers.l4_len > 0).then_some(layers)
}

/// Returns a segmenter for the superframe, or `None` if its kind is not supported.
fn segmenter(frame: &[u8], header: VirtioNetHdr) -> Option<Segmenter<'_>> {
    if !matches!(header.gso_type & !GSO_ECN, GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4) {
        return None;
    }
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let mut parsed = parser.parse(frame).ok()?;
    let l4 = match header.flags & NEEDS_CSUM {
        0 => parsed.innermost().l4(),
        _ => header.csum_start.into(),
    };
    // A tunnel on a non-standard UDP port: the virtio header shows that a TCP or UDP header inside is to be
    // segmented.
    if parsed.inner().is_none() && parsed.outer().l4_type() == L4Type::Udp && l4 > parsed.outer().l4() {
        let port = parsed.outer().udp(frame)?.dst_port();
        parsed = Parser { tunnels: Tunnels::NONE.with_vxlan(Some(port)), ..parser }.parse(frame).ok()?;
    }
    Segmenter::new(frame, &parsed, l4, header.gso_size).ok()
}

/// Inserts a tag behind the Ethernet addresses.
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
