//! Translation of a packet's offload requests for mlx5. The device finds headers itself and computes complete
//! checksums, regardless of the content of the fields.

use wirepath_nic_defs::mlx5::{ETH_L3_CSUM, ETH_L3_INNER_CSUM, ETH_L4_CSUM, ETH_L4_INNER_CSUM};
use wirepath_nic_defs::uverbs::mlx5::{TUNNEL_GENEVE, TUNNEL_GRE, TUNNEL_VXLAN};

use super::wqe::TxOffloads;
use crate::drivers::nic::common::tso;
use crate::drivers::sw_offload::{self, INNER_CHECKSUMS, OUTER_CHECKSUMS};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{HeaderLengths, Packet, PtypeL3, PtypeL4};

/// Requests that a packet can have.
pub(super) const REQUESTS: Flags = sw_offload::REQUESTS.with(Flags::TX_METADATA);
/// Most header bytes of a TSO packet: Ethernet with two tags, IP and TCP with all options.
pub(super) const MAX_TSO_HEADER: usize = 14 + 8 + 60 + 60;
const UDP: u8 = 17;
const GRE: u8 = 47;
const VXLAN_PORT: u16 = 4789;
const GENEVE_PORT: u16 = 6081;

/// Reads the packet's requests. `inline`: headers are inline, so that the descriptor has no field for a VLAN
/// tag, which is then inserted into the packet. `tunnels`: tunnel types that the device parses. `Err`: the
/// packet can never be sent.
pub(super) fn tx_offloads(packet: &mut Packet, inline: bool, tunnels: u32) -> Result<TxOffloads, DropReason> {
    let flags = packet.flags();
    let metadata = if flags.contains(Flags::TX_METADATA) { packet.mark().unwrap_or(0) } else { 0 };
    if flags.contains(Flags::TX_SEGMENT) {
        // Headers are inline, which leaves no field for a tag in the descriptor.
        let segment = Some(tso::prepare(packet, MAX_TSO_HEADER)?);
        return Ok(TxOffloads { checksums: ETH_L3_CSUM | ETH_L4_CSUM, metadata, segment, tag: None });
    }
    let checksums = if flags.intersects(OUTER_CHECKSUMS.with(INNER_CHECKSUMS)) {
        checksums(packet, flags, tunnels)
    } else {
        Some(0)
    };
    let Some(checksums) = checksums else {
        // The device would not find these headers: all requests are carried out in software, including the
        // tag.
        sw_offload::apply(packet)?;
        return Ok(TxOffloads { metadata, ..TxOffloads::default() });
    };
    let mut tag = packet.vlan();
    if let Some(tci) = tag
        && (inline || flags.contains(Flags::VLAN_SERVICE))
    {
        sw_offload::insert_vlan_tag(packet, tci, flags.contains(Flags::VLAN_SERVICE))?;
        packet.clear_vlan();
        tag = None;
    }
    Ok(TxOffloads { checksums, tag, metadata, segment: None })
}

/// Returns the flags of the requested checksums. `None` if the device would not find the headers.
fn checksums(packet: &Packet, flags: Flags, tunnels: u32) -> Option<u8> {
    let layers = packet.header_lengths();
    let bit = |flag, bit: u8| if flags.contains(flag) { bit } else { 0 };
    if layers.outer_len == 0 {
        // The packet does not say where its headers are, so that the device may not find them.
        if layers.l3() == PtypeL3::Other || (flags.contains(Flags::TX_L4_CHECKSUM) && layers.l4() == PtypeL4::Other) {
            return None;
        }
        return Some(bit(Flags::TX_L3_CHECKSUM, ETH_L3_CSUM) | bit(Flags::TX_L4_CHECKSUM, ETH_L4_CSUM));
    }
    if !looks_into(packet.data(), &layers, tunnels) || layers.l3() == PtypeL3::Other {
        return None;
    }
    Some(
        bit(Flags::TX_L3_CHECKSUM, ETH_L3_INNER_CSUM)
            | bit(Flags::TX_L4_CHECKSUM, ETH_L4_INNER_CSUM)
            | bit(Flags::TX_OUTER_L3_CHECKSUM, ETH_L3_CSUM)
            | bit(Flags::TX_OUTER_L4_CHECKSUM, ETH_L4_CSUM),
    )
}

/// Returns true if the device parses the packet's tunnel and finds the inner headers.
fn looks_into(frame: &[u8], layers: &HeaderLengths, tunnels: u32) -> bool {
    let outer = usize::from(layers.outer_l2_len);
    let Some(ip) = frame.get(outer..) else { return false };
    let (protocol, header) = match layers.outer_l3() {
        PtypeL3::Ipv4 => (ip.get(9), ip.first().map_or(0, |first| usize::from(first & 0xf) * 4)),
        // The device does not skip extension headers.
        PtypeL3::Ipv6 => (ip.get(6), 40),
        PtypeL3::Other => return false,
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
