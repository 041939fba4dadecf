//! Translation of a packet's offload requests for MANA.
//!
//! Requests of plain packets go to the hardware. Those of tunnel packets are carried out in software
//! (`drivers::sw_offload`). The device supports inner checksums, but neither rdma-core nor DPDK uses them, so
//! that this support is untested.

use wirepath_nic_defs::mana::TxOob;

use super::wqe::{Lso, TxOffloads};
use crate::drivers::nic::common::tso;
use crate::drivers::sw_offload::{self, INNER_CHECKSUMS, OUTER_CHECKSUMS};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{HeaderLengths, Packet, PtypeL3, PtypeL4};

/// Most header bytes of a TSO packet.
const MAX_TSO_HEADER: usize = u8::MAX as usize;
/// Most bytes of a TSO packet.
pub(super) const MAX_TSO: usize = 1 << 16;
/// Bits of the segment size in the out-of-band part.
const MSS_BITS: u32 = 14;
/// Largest offset of a transport header in the out-of-band part.
const MAX_TRANSPORT_OFFSET: usize = (1 << 10) - 1;

/// Reads the packet's requests, and prepares its headers for the device. `Err`: the packet can never be sent.
pub(super) fn tx_offloads(packet: &mut Packet) -> Result<TxOffloads, DropReason> {
    let flags = packet.flags();
    let layers = packet.header_lengths();
    if flags.contains(Flags::TX_SEGMENT) {
        return segmentation(packet, layers);
    }
    let service = flags.contains(Flags::VLAN.with(Flags::VLAN_SERVICE));
    let tunnel = flags.intersects(OUTER_CHECKSUMS) || (flags.intersects(INNER_CHECKSUMS) && layers.outer_len > 0);
    if service || tunnel {
        sw_offload::apply(packet)?;
        return Ok(TxOffloads::default());
    }
    let tag = packet.vlan();
    if !flags.intersects(INNER_CHECKSUMS) {
        return Ok(TxOffloads { tag, ..TxOffloads::default() });
    }
    match checksums(packet, layers, flags) {
        Some(offloads) => Ok(TxOffloads { tag, ..offloads }),
        // The packet does not say where its headers are, or they span segments: all requests are carried out
        // in software, including the tag.
        None => sw_offload::apply(packet).map(|()| TxOffloads::default()),
    }
}

fn checksums(packet: &mut Packet, layers: HeaderLengths, flags: Flags) -> Option<TxOffloads> {
    let mut bits = kind(layers)?;
    let l3 = usize::from(layers.l2_len);
    if flags.contains(Flags::TX_L3_CHECKSUM) && layers.l3() == PtypeL3::Ipv4 {
        // The device would add the old value of the field to the sum.
        packet.data_mut().get_mut(l3 + 10..l3 + 12)?.fill(0);
        bits = bits.with_compute_ip_csum(1);
    }
    let mut transport_offset = 0;
    if flags.contains(Flags::TX_L4_CHECKSUM) {
        let l4 = l3 + usize::from(layers.l3_len);
        let (header, with) = match layers.l4() {
            PtypeL4::Tcp => (20, bits.with_compute_tcp_csum(1)),
            PtypeL4::Udp => (8, bits.with_compute_udp_csum(1)),
            PtypeL4::Other => return None,
        };
        if l4 > MAX_TRANSPORT_OFFSET || layers.l3_len == 0 || l4 + header > packet.data().len() {
            return None;
        }
        (bits, transport_offset) = (with, l4 as u32);
    }
    Some(TxOffloads { checksums: bits, transport_offset, ..TxOffloads::default() })
}

fn kind(layers: HeaderLengths) -> Option<TxOob> {
    match layers.l3() {
        PtypeL3::Ipv4 => Some(TxOob::default().with_is_outer_ipv4(1)),
        PtypeL3::Ipv6 => Some(TxOob::default().with_is_outer_ipv6(1)),
        PtypeL3::Other => None,
    }
}

/// Returns whether the device segments a superframe, if it is plain TCP.
pub(super) fn takes_superframe(packet: &Packet) -> bool {
    packet.len() <= MAX_TSO
        && packet.mss() < 1 << MSS_BITS
        && !packet.flags().contains(Flags::VLAN.with(Flags::VLAN_SERVICE))
        && tso::fits(packet, MAX_TSO_HEADER, MAX_TSO)
}

/// Prepares TCP segmentation, as the kernel's driver does: the IP length is zero, and the checksum field
/// holds the sum of the pseudo-header without a length. The device adds the length of each segment.
fn segmentation(packet: &mut Packet, layers: HeaderLengths) -> Result<TxOffloads, DropReason> {
    let refused = DropReason::KernelOffload;
    let (l3, l4) = (usize::from(layers.l2_len), usize::from(layers.l2_len) + usize::from(layers.l3_len));
    let header = l4 + usize::from(layers.l4_len);
    let mss = packet.mss();
    let tag = packet.vlan();
    let sound = layers.outer_len == 0
        && layers.l4() == PtypeL4::Tcp
        && layers.l4_len >= 20
        && (1..1 << MSS_BITS).contains(&mss)
        && header <= MAX_TSO_HEADER
        && header < packet.len()
        && header <= packet.data().len()
        && !packet.flags().contains(Flags::VLAN.with(Flags::VLAN_SERVICE));
    let bits = kind(layers).filter(|_| sound).ok_or(refused)?;
    let frame = packet.data_mut();
    let (bits, addresses) = if layers.l3() == PtypeL3::Ipv4 {
        let ip = frame.get_mut(l3..l4).filter(|ip| ip.len() >= 20).ok_or(refused)?;
        ip[2..4].fill(0);
        ip[10..12].fill(0);
        (bits.with_compute_ip_csum(1), l3 + 12..l3 + 20)
    } else {
        let ip = frame.get_mut(l3..l4).filter(|ip| ip.len() >= 40).ok_or(refused)?;
        ip[4..6].fill(0);
        (bits, l3 + 8..l3 + 40)
    };
    let pseudo = wirepath_wire::checksum::sum(&frame[addresses]).word(6).fold();
    frame[l4 + 16..l4 + 18].copy_from_slice(&pseudo.to_be_bytes());
    Ok(TxOffloads {
        checksums: bits.with_compute_tcp_csum(1),
        transport_offset: l4 as u32,
        tag,
        segment: Some(Lso { mss, header: header as u8 }),
    })
}

/// Offset of the TCP flags. The first segment alone keeps CWR; the last one alone keeps FIN and PSH.
const FLAGS: usize = 13;
const ONLY_FIRST: u8 = 0x80; // CWR
const ONLY_LAST: u8 = 0x01 | 0x08; // FIN, PSH

/// Turns a copy of a packet's headers into those of its second part, which follows `segments` segments with
/// `payload` bytes.
pub(super) fn make_latter(headers: &mut [u8], layers: HeaderLengths, segments: usize, payload: usize) {
    let (l3, l4) = (usize::from(layers.l2_len), usize::from(layers.l2_len) + usize::from(layers.l3_len));
    if layers.l3() == PtypeL3::Ipv4
        && let Some(id) = headers.get_mut(l3 + 4..).and_then(|id| id.first_chunk_mut::<2>())
    {
        *id = u16::from_be_bytes(*id).wrapping_add(segments as u16).to_be_bytes();
    }
    if let Some(tcp) = headers.get_mut(l4..).and_then(|tcp| tcp.first_chunk_mut::<20>()) {
        if let Some(sequence) = tcp[4..].first_chunk_mut::<4>() {
            *sequence = u32::from_be_bytes(*sequence).wrapping_add(payload as u32).to_be_bytes();
        }
        tcp[FLAGS] &= !ONLY_FIRST;
    }
}

/// Turns a packet's headers into those of its first part.
pub(super) fn make_former(frame: &mut [u8], layers: HeaderLengths) {
    let flags = usize::from(layers.l2_len) + usize::from(layers.l3_len) + FLAGS;
    if let Some(flags) = frame.get_mut(flags) {
        *flags &= !ONLY_LAST;
    }
}
