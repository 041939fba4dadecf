//! What a packet asks of the transmitting device, in the device's terms.
//!
//! Work on plain packets goes to the hardware, work on tunnel packets is done here (`drivers::requests`): the device can do inner
//! checksums, but neither rdma-core nor DPDK use that, so that nobody could say whether it does.

use wirepath_nic_defs::mana::TxOob;

use super::wqe::{Lso, Wishes};
use crate::drivers::requests;
use crate::drops::DropReason;
use crate::packet::offload::Flags;
use crate::packet::{L3, L4, Layers, Packet};

/// Requests that a packet can make.
pub(super) const REQUESTS: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM)
    .with(Flags::VLAN)
    .with(Flags::TX_SEGMENT);
const OUTER: Flags = Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM);
const CHECKSUMS: Flags = Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM);
/// Largest offset of a transport header in the out-of-band part.
const MAX_TRANSPORT_OFFSET: usize = (1 << 10) - 1;

/// Reads the packet's requests, and makes its headers ready for the device. `Err`: the packet can never be sent.
pub(super) fn wishes(packet: &mut Packet) -> Result<Wishes, DropReason> {
    let flags = packet.flags();
    let layers = packet.layers();
    if flags.contains(Flags::TX_SEGMENT) {
        return segmentation(packet, layers);
    }
    let service = flags.contains(Flags::VLAN.with(Flags::VLAN_SERVICE));
    let tunnel = flags.intersects(OUTER) || (flags.intersects(CHECKSUMS) && layers.outer_len > 0);
    if service || tunnel {
        requests::fulfil(packet)?;
        return Ok(Wishes::default());
    }
    let tag = packet.vlan();
    if !flags.intersects(CHECKSUMS) {
        return Ok(Wishes { tag, ..Wishes::default() });
    }
    match checksums(packet, layers, flags) {
        Some(wishes) => Ok(Wishes { tag, ..wishes }),
        // Whoever asked did not say where the headers are, or they lie in several segments: looked up and done here, the tag included.
        None => requests::fulfil(packet).map(|()| Wishes::default()),
    }
}

fn checksums(packet: &mut Packet, layers: Layers, flags: Flags) -> Option<Wishes> {
    let mut bits = kind(layers)?;
    let l3 = usize::from(layers.l2_len);
    if flags.contains(Flags::TX_L3_CHECKSUM) && layers.l3() == L3::Ipv4 {
        // What lies in the field would be summed up with the rest.
        packet.data_mut().get_mut(l3 + 10..l3 + 12)?.fill(0);
        bits = bits.with_compute_ip_csum(1);
    }
    let mut transport_offset = 0;
    if flags.contains(Flags::TX_L4_CHECKSUM) {
        let l4 = l3 + usize::from(layers.l3_len);
        let (header, with) = match layers.l4() {
            L4::Tcp => (20, bits.with_compute_tcp_csum(1)),
            L4::Udp => (8, bits.with_compute_udp_csum(1)),
            L4::Other => return None,
        };
        if l4 > MAX_TRANSPORT_OFFSET || layers.l3_len == 0 || l4 + header > packet.data().len() {
            return None;
        }
        (bits, transport_offset) = (with, l4 as u32);
    }
    Some(Wishes { checksums: bits, transport_offset, ..Wishes::default() })
}

fn kind(layers: Layers) -> Option<TxOob> {
    match layers.l3() {
        L3::Ipv4 => Some(TxOob::default().with_is_outer_ipv4(1)),
        L3::Ipv6 => Some(TxOob::default().with_is_outer_ipv6(1)),
        L3::Other => None,
    }
}

/// A TCP packet that the device cuts. As the kernel's driver does it, the IP length is zero and the checksum field holds the sum of the
/// pseudo header without a length: the device puts in those of each segment.
fn segmentation(packet: &mut Packet, layers: Layers) -> Result<Wishes, DropReason> {
    let refused = DropReason::KernelOffload;
    let (l3, l4) = (usize::from(layers.l2_len), usize::from(layers.l2_len) + usize::from(layers.l3_len));
    let header = l4 + usize::from(layers.l4_len);
    let mss = packet.mss();
    let tag = packet.vlan();
    let sound = layers.outer_len == 0
        && layers.l4() == L4::Tcp
        && layers.l4_len >= 20
        && (1..1 << 14).contains(&mss)
        && header <= u8::MAX.into()
        && header < packet.len()
        && header <= packet.data().len()
        && !packet.flags().contains(Flags::VLAN.with(Flags::VLAN_SERVICE));
    let bits = kind(layers).filter(|_| sound).ok_or(refused)?;
    let frame = packet.data_mut();
    let (bits, addresses) = if layers.l3() == L3::Ipv4 {
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
    Ok(Wishes {
        checksums: bits.with_compute_tcp_csum(1),
        transport_offset: l4 as u32,
        tag,
        segment: Some(Lso { mss, header: header as u8 }),
    })
}

/// Flags of a TCP header: which of them only the first segment of a packet keeps, and which only the last.
const FLAGS: usize = 13;
const ONLY_FIRST: u8 = 0x80; // CWR
const ONLY_LAST: u8 = 0x01 | 0x08; // FIN, PSH

/// Makes a copy of a packet's headers those of its latter part, behind `segments` segments that carry `payload` bytes.
pub(super) fn make_latter(headers: &mut [u8], layers: Layers, segments: usize, payload: usize) {
    let (l3, l4) = (usize::from(layers.l2_len), usize::from(layers.l2_len) + usize::from(layers.l3_len));
    if layers.l3() == L3::Ipv4
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

/// Makes a packet's headers those of its former part.
pub(super) fn make_former(frame: &mut [u8], layers: Layers) {
    let flags = usize::from(layers.l2_len) + usize::from(layers.l3_len) + FLAGS;
    if let Some(flags) = frame.get_mut(flags) {
        *flags &= !ONLY_LAST;
    }
}
