//! Lengths of headers, VLAN tags and checksums of packets.

use wirepath_packet::Packet;
use wirepath_wire::{EtherType, checksum, ipv6, vlan};

/// Length of an Ethernet header in bytes.
pub(super) const ETHERNET_LEN: usize = 14;
/// Length of a VLAN tag in bytes.
pub(super) const VLAN_TAG_LEN: usize = 4;

/// Length of the longest quote of a packet in an ICMP error (RFC 4443 section 2.4 (c)), with Ethernet and two tags.
const MAX_QUOTE: usize = ETHERNET_LEN + 2 * VLAN_TAG_LEN + ipv6::MIN_MTU;

/// Room for the start of a packet of several segments.
pub(super) struct QuoteRoom([u8; MAX_QUOTE]);

impl QuoteRoom {
    pub(super) fn new() -> Self {
        Self([0; MAX_QUOTE])
    }

    /// Returns what an ICMP error can quote of a packet, and the headers in front of it.
    pub(super) fn quote<'p>(&'p mut self, packet: &'p Packet) -> &'p [u8] {
        if !packet.is_chain() {
            return packet.data();
        }
        let len = packet.copy_to(&mut self.0);
        &self.0[..len]
    }
}

/// Removes the outermost 802.1Q tag from the metadata or the frame. Returns `None` if there is no such tag.
#[inline]
pub(super) fn pop_vlan_tag(packet: &mut Packet) -> Option<u16> {
    if let Some(tci) = packet.vlan() {
        packet.clear_vlan();
        return Some(tci & 0xfff);
    }
    let tagged = packet.data().get(12..14).is_some_and(|bytes| *bytes == EtherType::VLAN.0.to_be_bytes());
    if !tagged {
        return None;
    }
    let tag = vlan::pop(packet.data_mut())?;
    let _ = packet.trim_front(VLAN_TAG_LEN);
    Some(tag.id())
}

/// Checksum over all segments of a packet.
pub(super) fn packet_checksum(packet: &Packet) -> checksum::Sum {
    checksum_of(packet, 0, packet.len()).unwrap_or(checksum::Sum::ZERO)
}

/// Checksum over the bytes from `start` to `end`, which may be in several segments. Returns `None` if the packet ends
/// before.
pub(super) fn checksum_of(packet: &Packet, start: usize, end: usize) -> Option<checksum::Sum> {
    if let Some(bytes) = packet.data().get(start..end) {
        return Some(checksum::sum(bytes));
    }
    let (mut skip, mut left, mut at) = (start, end.checked_sub(start)?, 0);
    let mut sum = checksum::Sum::ZERO;
    for segment in packet.segments() {
        let here = segment.get(skip.min(segment.len())..).unwrap_or(&[]);
        skip = skip.saturating_sub(segment.len());
        let here = here.get(..left.min(here.len())).unwrap_or(&[]);
        sum = sum.and_at(at, checksum::sum(here));
        at += here.len();
        left -= here.len();
    }
    (left == 0).then_some(sum)
}
