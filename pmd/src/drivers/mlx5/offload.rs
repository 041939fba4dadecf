//! What a packet asks of the transmitting device, in the device's terms. The device finds headers by itself, and computes checksums
//! whole, whatever the fields hold.

use wirepath_nic_defs::mlx5::{ETH_L3_CSUM, ETH_L3_INNER_CSUM, ETH_L4_CSUM, ETH_L4_INNER_CSUM};
use wirepath_nic_defs::uverbs::mlx5::{TUNNEL_GENEVE, TUNNEL_GRE, TUNNEL_VXLAN};

use super::wqe::{Tso, Wishes};
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
    .with(Flags::TX_SEGMENT)
    .with(Flags::TX_METADATA);
const OUTER: Flags = Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM);
const CHECKSUMS: Flags = Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM);
/// Most header bytes of a packet that is cut: Ethernet with two tags, IP and TCP with all options.
pub(super) const MAX_TSO_HEADER: usize = 14 + 8 + 60 + 60;
const UDP: u8 = 17;
const GRE: u8 = 47;
const VXLAN_PORT: u16 = 4789;
const GENEVE_PORT: u16 = 6081;

/// Reads the packet's requests. `inline`: headers have to lie in the descriptor, so that it has no place for a tag; the tag is then written
/// into the packet. `tunnels`: those that the device looks into. `Err`: the packet can never be sent.
pub(super) fn wishes(packet: &mut Packet, inline: bool, tunnels: u32) -> Result<Wishes, DropReason> {
    let flags = packet.flags();
    let metadata = if flags.contains(Flags::TX_METADATA) { packet.mark().unwrap_or(0) } else { 0 };
    if flags.contains(Flags::TX_SEGMENT) {
        return Ok(Wishes { metadata, ..segmentation(packet)? });
    }
    let checksums = if flags.intersects(OUTER.with(CHECKSUMS)) { checksums(packet, flags, tunnels) } else { Some(0) };
    let Some(checksums) = checksums else {
        // Headers that the device would not find: looked up and done here, the tag included.
        requests::fulfil(packet)?;
        return Ok(Wishes { metadata, ..Wishes::default() });
    };
    let mut tag = packet.vlan();
    if let Some(tci) = tag
        && (inline || flags.contains(Flags::VLAN_SERVICE))
    {
        requests::insert_tag(packet, tci, flags.contains(Flags::VLAN_SERVICE))?;
        packet.clear_vlan();
        tag = None;
    }
    Ok(Wishes { checksums, tag, metadata, segment: None })
}

/// The bits for the checksums that are asked for; `None` if the device would not find what they cover.
fn checksums(packet: &Packet, flags: Flags, tunnels: u32) -> Option<u8> {
    let layers = packet.layers();
    let bit = |flag, bit: u8| if flags.contains(flag) { bit } else { 0 };
    if layers.outer_len == 0 {
        // Who asked did not say where the headers are, so that nobody knows whether the device finds them.
        if layers.l3() == L3::Other || (flags.contains(Flags::TX_L4_CHECKSUM) && layers.l4() == L4::Other) {
            return None;
        }
        return Some(bit(Flags::TX_L3_CHECKSUM, ETH_L3_CSUM) | bit(Flags::TX_L4_CHECKSUM, ETH_L4_CSUM));
    }
    if !looks_into(packet.data(), &layers, tunnels) || layers.l3() == L3::Other {
        return None;
    }
    Some(
        bit(Flags::TX_L3_CHECKSUM, ETH_L3_INNER_CSUM)
            | bit(Flags::TX_L4_CHECKSUM, ETH_L4_INNER_CSUM)
            | bit(Flags::TX_OUTER_L3_CHECKSUM, ETH_L3_CSUM)
            | bit(Flags::TX_OUTER_L4_CHECKSUM, ETH_L4_CSUM),
    )
}

/// Whether the device knows the tunnel that the packet goes through, and so where the inner headers are.
fn looks_into(frame: &[u8], layers: &Layers, tunnels: u32) -> bool {
    let outer = usize::from(layers.outer_l2_len);
    let Some(ip) = frame.get(outer..) else { return false };
    let (protocol, header) = match layers.outer_l3() {
        L3::Ipv4 => (ip.get(9), ip.first().map_or(0, |first| usize::from(first & 0xf) * 4)),
        // Extension headers are not looked through.
        L3::Ipv6 => (ip.get(6), 40),
        L3::Other => return false,
    };
    let has = |tunnel: u32| tunnels & tunnel != 0;
    match (protocol, ip.get(header + 2..header + 4)) {
        (Some(&GRE), _) => has(TUNNEL_GRE),
        (Some(&UDP), Some(port)) => match u16::from_be_bytes([port[0], port[1]]) {
            VXLAN_PORT => has(TUNNEL_VXLAN),
            GENEVE_PORT => has(TUNNEL_GENEVE),
            _ => false,
        },
        _ => false,
    }
}

/// A TCP packet that the device cuts: it writes lengths, identification, sequence numbers and checksums of each segment.
fn segmentation(packet: &mut Packet) -> Result<Wishes, DropReason> {
    let refused = DropReason::KernelOffload;
    if let Some(tci) = packet.vlan() {
        // Headers lie in the descriptor, which leaves no place for the tag.
        let service = packet.flags().contains(Flags::VLAN_SERVICE);
        requests::insert_tag(packet, tci, service)?;
        packet.clear_vlan();
        let mut layers = packet.layers();
        layers.l2_len += 4;
        packet.set_layers(layers);
    }
    let layers = packet.layers();
    let header = usize::from(layers.l2_len) + usize::from(layers.l3_len) + usize::from(layers.l4_len);
    let mss = packet.mss();
    let sound = layers.outer_len == 0
        && layers.l3() != L3::Other
        && layers.l4() == L4::Tcp
        && layers.l2_len >= 14
        && layers.l3_len >= 20
        && layers.l4_len >= 20
        && mss > 0
        && header <= MAX_TSO_HEADER
        && header < packet.len();
    if !sound || (packet.data().len() < header && !packet.pull_up(header)) {
        return Err(refused);
    }
    let tso = Tso { mss, header: header as u16 };
    Ok(Wishes { checksums: ETH_L3_CSUM | ETH_L4_CSUM, segment: Some(tso), ..Wishes::default() })
}
