//! Decapsulation: `decap l2` and `decap l3`.

use wirepath_flow::{FieldSet, HeaderType, Key, Reformat, tunnel};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Packet, Pool};
use wirepath_wire::{HeaderOffsets, L3Type, L4Type, Parsed, Parser, ethernet, udp};

use super::{Headers, OUTER_CHECKSUMS, pull_up_writable, trim_end, update_tx_layers};
use crate::tunnel::{ecn, kinds};

/// Bytes that are made contiguous before the inner headers are searched, and again in the decapsulated
/// packet.
const HEADERS: usize = 256;

/// A `decap` action.
#[derive(Debug)]
pub(super) struct Decap {
    /// New Ethernet header, and the IP version that it announces; `None` for `decap l2`.
    header: Option<(Box<[u8]>, u8)>,
    /// Value of [`HeaderType::Tunnel`] of matching packets.
    tunnel: u8,
}

impl Decap {
    pub(super) fn new(reformat: &Reformat, set: &FieldSet) -> Self {
        let version = reformat.carried_version();
        Self {
            header: version.map(|version| (reformat.bytes().into(), version)),
            tunnel: set.get(Key::header_type(0, HeaderType::Tunnel)).map_or(tunnel::NONE, |bits| bits.value as u8),
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(self) + self.header.as_ref().map_or(0, |(bytes, _)| bytes.len())
    }

    pub(super) fn run(
        &self,
        packet: &mut Packet,
        headers: &mut Headers,
        parsed: &Parsed,
        pool: Option<&Pool>,
    ) -> Result<(), DropReason> {
        let outer = headers.outer.ok_or(DropReason::RuleMismatch)?;
        if outer.is_fragment() {
            return Err(DropReason::OuterFragment);
        }
        let checksum_status = packet.checksum_status();
        if checksum_status.contains(ChecksumStatus::OUTER_L3_BAD) {
            return Err(DropReason::BadChecksum);
        }
        if checksum_status.contains(ChecksumStatus::OUTER_L4_BAD) {
            return Err(DropReason::BadL4Checksum);
        }
        if headers.inner.is_none() && packet.is_chain() {
            pull_up_writable(packet, packet.len().min(HEADERS), pool)?;
        }
        let class = traffic_class(packet.data(), &outer);
        match &self.header {
            None => self.to_frame(packet, headers, &outer, pool)?,
            Some((header, version)) => to_packet(packet, headers, parsed, header, *version, pool)?,
        }
        if packet.is_chain() {
            // Best effort: code that needs contiguous headers checks for them.
            packet.pull_up(packet.len().min(HEADERS));
        }
        let least = self.header.as_ref().map_or(ethernet::HEADER_LEN, |(header, _)| header.len());
        if packet.data().len() < least {
            return Err(DropReason::Truncated);
        }
        // The NIC's checksum status is about the inner headers only if it parsed the tunnel.
        let looked = ChecksumStatus::OUTER_L3_GOOD.with(ChecksumStatus::OUTER_L4_GOOD);
        packet.set_checksum_status(if checksum_status.intersects(looked) {
            checksum_status.without(looked)
        } else {
            ChecksumStatus::NONE
        });
        packet.set_flags(packet.flags().without(OUTER_CHECKSUMS).without(Flags::LATER_FRAGMENT));
        packet.clear_vlan();
        update_tx_layers(packet, headers);
        if merge_ecn(class, packet.data_mut(), headers.outer.as_ref()) { Ok(()) } else { Err(DropReason::BadEcn) }
    }

    /// Leaves the inner Ethernet frame, whose contents need not be parsable.
    fn to_frame(
        &self,
        packet: &mut Packet,
        headers: &mut Headers,
        outer: &HeaderOffsets,
        pool: Option<&Pool>,
    ) -> Result<(), DropReason> {
        let frame = packet.data();
        // The UDP datagram may end before the IP packet.
        let end = outer.udp_end(frame).unwrap_or(outer.end());
        let start = match headers.inner {
            Some(inner) if inner.l3() < inner.l2() + ethernet::HEADER_LEN => return Err(DropReason::RuleMismatch),
            Some(inner) => inner.l2(),
            None => self.inner_start(frame, outer).ok_or(DropReason::BadTunnelHeader)?,
        };
        if end < start + ethernet::HEADER_LEN {
            return Err(DropReason::TooShort);
        }
        trim_end(packet, end, pool)?;
        if !packet.trim_front(start) {
            return Err(DropReason::Truncated);
        }
        headers.outer = headers.inner.take().and_then(|inner| inner.moved(-i32::try_from(start).ok()?));
        Ok(())
    }

    /// Returns the offset of the tunnel payload if the parser did not find the inner headers.
    #[cold]
    fn inner_start(&self, frame: &[u8], outer: &HeaderOffsets) -> Option<usize> {
        let (l4, udp) = (outer.l4(), outer.l4_type() == L4Type::Udp);
        match self.tunnel {
            tunnel::VXLAN_GPE if udp => Some(l4 + 16),
            // A label stack does not identify its payload. IP in IP carries no frame.
            kind => {
                let start = if udp { l4 + udp::HEADER_LEN } else { l4 };
                kinds::payload_offset(kind, frame.get(start..)?).map(|len| start + len)
            }
        }
    }
}

/// Leaves the inner IP packet behind a new Ethernet header.
fn to_packet(
    packet: &mut Packet,
    headers: &mut Headers,
    parsed: &Parsed,
    header: &[u8],
    version: u8,
    pool: Option<&Pool>,
) -> Result<(), DropReason> {
    let Some(inner) = headers.inner.take() else {
        return Err(parsed.tunnel_error().map_or(DropReason::RuleMismatch, DropReason::from));
    };
    if inner.l3_type() != if version == 4 { L3Type::Ipv4 } else { L3Type::Ipv6 } {
        return Err(DropReason::RuleMismatch);
    }
    trim_end(packet, inner.end(), pool)?;
    // The removed headers are longer than the new one: they contain at least an Ethernet and an IP header.
    let start = inner.l3().checked_sub(header.len()).ok_or(DropReason::RuleMismatch)?;
    if !packet.trim_front(start) {
        return Err(DropReason::Truncated);
    }
    packet.data_mut().get_mut(..header.len()).ok_or(DropReason::Truncated)?.copy_from_slice(header);
    headers.outer = if inner.has_ethernet() {
        // The label stack carried a whole frame, whose Ethernet header and tags are removed. So the packet is
        // parsed again.
        let parser = Parser { verify_ipv4: false, ..Parser::default() };
        parser.parse_stack(packet.data(), 0, packet.len()).ok()
    } else {
        i32::try_from(start).ok().and_then(|start| inner.moved(-start))
    };
    Ok(())
}

/// Merges the outer congestion mark into the inner IP header (RFC 6040 section 4.2). Returns false if the
/// packet must be dropped.
#[inline]
fn merge_ecn(class: u8, frame: &mut [u8], layers: Option<&HeaderOffsets>) -> bool {
    // An outer Not-ECT or ECT(0) changes nothing. ECT(1) and CE have the lowest bit set.
    if class & 1 == 0 { true } else { merge_mark(class, frame, layers) }
}

#[cold]
fn merge_mark(class: u8, frame: &mut [u8], layers: Option<&HeaderOffsets>) -> bool {
    match layers.filter(|layers| layers.is_ip()) {
        Some(layers) => match frame.get_mut(layers.l3()..) {
            Some(packet) => ecn::apply_to_packet(class, packet),
            None => true,
        },
        // The packet is not parsed. Its headers may be in another buffer, or only its addresses may be valid.
        None => ecn::apply(class, frame),
    }
}

/// Returns DSCP and ECN of a stack's IP header; 0 without one.
fn traffic_class(frame: &[u8], layers: &HeaderOffsets) -> u8 {
    match (layers.ipv4_header(frame), layers.ipv6_header(frame)) {
        (Some(h), _) => h[1],
        (_, Some(h)) => h[0] << 4 | h[1] >> 4,
        _ => 0,
    }
}
