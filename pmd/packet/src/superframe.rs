//! Superframes: TCP packets longer than the MTU, or UDP datagrams of a flow, which the last device on the way segments
//! (GSO).
//!
//! A superframe has [`Flags::TX_SEGMENT`] and a segment size ([`Packet::mss`]). Its TCP or UDP checksum holds only the
//! sum of the pseudo header, as in a `virtio_net_hdr` frame; an absent UDP checksum stays zero. Tunnel headers in
//! front of it have the lengths of the whole superframe. [`Cutter`] does in software what the device would do, for all
//! headers.
//!
//! The innermost headers are those that are segmented. A superframe of UDP begins with the payload of its first
//! datagram, which must not be taken for a tunnel. So ports do not join datagrams that [`may_carry_tunnel`], and cut
//! such superframes of the kernel as they receive them.

#![deny(unsafe_code)]

use wirepath_wire::checksum::{self, Sum};
use wirepath_wire::segment::{SegmentError, Segmenter};
use wirepath_wire::{EtherType, HeaderOffsets, L4Type, Parsed, Parser, Tunnel, Tunnels, vxlan, vxlan_gpe};

use crate::drops::DropReason;
use crate::offload::Flags;
use crate::{Packet, Pool};

/// Requests that segmentation in software settles.
const SETTLED: Flags = Flags::TX_SEGMENT
    .with(Flags::TX_L3_CHECKSUM)
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM);

/// Offset of the flags in the TCP header (RFC 9293 section 3.1).
const TCP_FLAGS: usize = 13;

/// Parses the headers of a packet whose innermost TCP header, or UDP header at `l4`, is to be segmented.
///
/// `l4` is the offset of the layer-4 header, if the caller knows it. VXLAN and GENEVE are recognised on every UDP
/// port: the request to segment shows that a tunnel is there. Returns `None` if the packet has no such header.
pub fn parse(packet: &Packet, l4: Option<usize>) -> Option<Parsed> {
    let (head, len) = (packet.data(), packet.len());
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let parsed = parser.parse_chain(head, len).ok()?;
    let outer = parsed.outer();
    let is_inside = l4.is_none_or(|l4| l4 > outer.l4());
    if parsed.inner().is_none() && outer.l4_type() == L4Type::Udp && is_inside {
        let udp = udp_header(head, outer)?;
        let port = Some(u16::from_be_bytes([udp[2], udp[3]]));
        // Bytes 2 and 3 are the EtherType of the payload in GENEVE (RFC 8926 section 3.4), and zero in VXLAN
        // (RFC 7348 section 5). In VXLAN-GPE, byte 3 is a small number (draft-ietf-nvo3-vxlan-gpe section 3).
        let ethertype = head.get(outer.l4() + 8 + 2..)?.first_chunk().copied().map(u16::from_be_bytes);
        let tunnels = match ethertype? {
            0 => Tunnels::NONE.with_vxlan(port),
            1..=255 => Tunnels::NONE.with_vxlan_gpe(port),
            _ => Tunnels::NONE.with_geneve(port),
        };
        return Parser { tunnels, ..parser }.parse_chain(head, len).ok();
    }
    Some(parsed)
}

/// Returns the outer or inner UDP header in the first buffer of a packet, whose payload may lie in further ones.
pub fn udp_header<'a>(head: &'a [u8], layers: &HeaderOffsets) -> Option<&'a [u8; 8]> {
    head.get(layers.l4()..).filter(|_| layers.l4_type() == L4Type::Udp)?.first_chunk()
}

/// Returns whether [`parse`] might read the payload of a UDP datagram as a tunnel: because of its port, or of the bytes
/// by which tunnels on other ports are recognised. Superframes of such datagrams do not exist. `layers` are the
/// innermost headers that were parsed.
pub fn may_carry_tunnel(head: &[u8], layers: &HeaderOffsets) -> bool {
    let Some(udp) = udp_header(head, layers) else { return false };
    let payload: Option<&[u8; 4]> = head.get(layers.payload()..).and_then(|payload| payload.first_chunk());
    // Further bytes of a short first datagram are those of the next one.
    let Some(&[first, _, high, low]) = payload else { return true };
    let is_tunnel = match u16::from_be_bytes([high, low]) {
        0 => first & vxlan::FLAG_VNI != 0,
        next @ 1..=255 => {
            use vxlan_gpe::NextProtocol;
            let is_carried =
                matches!(NextProtocol(next as u8), NextProtocol::IPV4 | NextProtocol::IPV6 | NextProtocol::ETHERNET);
            is_carried && first & (vxlan_gpe::FLAGS_VERSION | vxlan_gpe::FLAG_NEXT) == vxlan_gpe::FLAG_NEXT
        }
        ethertype => {
            let is_carried =
                matches!(EtherType(ethertype), EtherType::TRANSPARENT_ETHERNET | EtherType::IPV4 | EtherType::IPV6);
            // The first two bits are the version.
            is_carried && first >> 6 == 0
        }
    };
    is_tunnel || Tunnels::ALL.on_port(u16::from_be_bytes([udp[2], udp[3]])) != Tunnel::None
}

/// Returns the flags of a TCP header in the first buffer of a packet, whose payload may lie in further ones.
pub fn tcp_flags(packet: &Packet, layers: &HeaderOffsets) -> Option<u8> {
    packet.data().get(layers.l4() + TCP_FLAGS).filter(|_| layers.l4_type() == L4Type::Tcp).copied()
}

/// Returns the length in bytes of the longest frame that a device makes of the packet. For a packet that is no
/// superframe that is its own length.
#[inline]
pub fn longest_frame(packet: &Packet) -> usize {
    if packet.flags().contains(Flags::TX_SEGMENT) { longest_segment(packet) } else { packet.len() }
}

#[cold]
fn longest_segment(packet: &Packet) -> usize {
    match parse(packet, None) {
        Some(parsed) => packet.len().min(parsed.innermost().payload() + usize::from(packet.mss())),
        None => packet.len(),
    }
}

/// Returns whether a superframe is in a tunnel. Ports segment inside one tunnel only.
pub fn has_tunnel(packet: &Packet) -> bool {
    parse(packet, None).is_none_or(|parsed| parsed.inner().is_some())
}

/// Returns whether a superframe consists of UDP datagrams outside tunnels. An endpoint whose tunnel ports are not those
/// of [`Tunnels::ALL`] cuts such superframes before it reads the datagrams.
pub fn has_plain_datagrams(packet: &Packet) -> bool {
    parse(packet, None).is_some_and(|parsed| parsed.inner().is_none() && parsed.outer().l4_type() == L4Type::Udp)
}

/// Cuts one packet into frames, one at a time.
#[derive(Debug)]
pub struct Cutter {
    packet: Packet,
    parsed: Parsed,
    l4: usize,
    next: usize,
    count: usize,
}

impl Cutter {
    /// Prepares to cut `packet` at its innermost TCP or UDP header, or at the layer-4 header at offset `l4`.
    ///
    /// Returns the packet and the reason of its drop if it cannot be cut.
    pub fn new(packet: Packet, l4: Option<usize>) -> Result<Self, (Packet, DropReason)> {
        let Some(parsed) = parse(&packet, l4) else { return Err((packet, DropReason::KernelOffload)) };
        let l4 = l4.unwrap_or_else(|| parsed.innermost().l4());
        match Segmenter::new(packet.data(), &parsed, l4, packet.mss()) {
            Ok(segments) => {
                let count = segments.remaining();
                Ok(Self { packet, parsed, l4, next: 0, count })
            }
            Err(SegmentError::TooLong) => Err((packet, DropReason::TooLong)),
            Err(_) => Err((packet, DropReason::KernelOffload)),
        }
    }

    /// Number of frames that are left.
    pub fn remaining(&self) -> usize {
        self.count - self.next
    }

    /// Returns the next frame, in buffers of `pool`, with the metadata of the packet. `Err` gives the reason why
    /// this frame is lost; the one behind it is next. `None` after the last frame.
    pub fn next_frame(&mut self, pool: &Pool) -> Option<Result<Packet, DropReason>> {
        if self.next == self.count {
            return None;
        }
        let made = self.make(pool, self.next);
        self.next += 1;
        Some(made)
    }

    /// Splits the superframe for a device that leaves the outer UDP checksum as it is, see `TunnelTso` of the ports.
    ///
    /// Returns a superframe whose frames have the same length, with the outer UDP checksum of each of them. The last
    /// frame comes separately if it is shorter. As in a partially segmented packet of Linux, the lengths in the IP
    /// headers are those of a frame. Returns the cutter if there is no free buffer, or if the payload is shared.
    pub fn split(mut self, pool: &Pool) -> Result<(Packet, Option<Packet>), Self> {
        match self.try_split(pool) {
            Some(last) => Ok((self.packet, last)),
            None => Err(self),
        }
    }

    fn try_split(&mut self, pool: &Pool) -> Option<Option<Packet>> {
        let first = self.make(pool, 0).ok()?;
        let last = self.segments(self.count - 1).ok()?.next_payload()?;
        let is_shorter = last.len() < usize::from(self.packet.mss());
        let tail = if is_shorter { Some(self.make(pool, self.count - 1).ok()?) } else { None };
        let header = first.data().get(..self.parsed.innermost().payload())?;
        let flags_at = self.l4 + TCP_FLAGS;
        let flags = *self.packet.data().get(..header.len())?.get(flags_at)?;
        if !self.packet.truncate(if is_shorter { last.start } else { last.end }) {
            return None;
        }
        let head = self.packet.data_mut();
        head[..header.len()].copy_from_slice(header);
        if tail.is_none() {
            // The device leaves FIN and PSH in its last frame only.
            head[flags_at] = flags;
        }
        self.packet.set_flags(self.packet.flags().without(Flags::TX_OUTER_L4_CHECKSUM));
        Some(tail)
    }

    /// Returns the segments from the one with this number on.
    fn segments(&self, number: usize) -> Result<Segmenter<'_>, DropReason> {
        let segments = Segmenter::new(self.packet.data(), &self.parsed, self.l4, self.packet.mss());
        let mut segments = segments.map_err(|_| DropReason::KernelOffload)?;
        segments.skip(number);
        Ok(segments)
    }

    fn make(&self, pool: &Pool, number: usize) -> Result<Packet, DropReason> {
        let mut segments = self.segments(number)?;
        let payload = segments.next_payload().ok_or(DropReason::KernelOffload)?;
        let header_len = segments.header_len();
        let mut frame = pool.take().ok_or(DropReason::NoBuffer)?;
        frame.append(header_len).ok_or(DropReason::KernelOffload)?;
        let mut left = payload.len();
        for part in parts_from(&self.packet, payload.start) {
            let part = &part[..part.len().min(left)];
            if !frame.extend_from_slice(part, pool) {
                return Err(DropReason::NoBuffer);
            }
            left -= part.len();
            if left == 0 {
                break;
            }
        }
        let (mut sum, mut at) = (Sum::ZERO, 0);
        for part in parts_from(&frame, header_len) {
            sum = sum.and_at(at, checksum::sum(part));
            at += part.len();
        }
        match segments.next_with(frame.data_mut(), |_| sum) {
            Some(Ok(_)) if left == 0 => {}
            _ => return Err(DropReason::KernelOffload),
        }
        frame.copy_metadata(&self.packet);
        frame.set_flags(self.packet.flags().without(SETTLED));
        frame.set_mss(0);
        Ok(frame)
    }
}

/// Iterates over the bytes of a packet from an offset on.
pub fn parts_from(packet: &Packet, offset: usize) -> impl Iterator<Item = &[u8]> {
    let mut skip = offset;
    packet.segments().filter_map(move |segment| {
        let part = segment.get(skip..);
        skip = skip.saturating_sub(segment.len());
        part.filter(|part| !part.is_empty())
    })
}
