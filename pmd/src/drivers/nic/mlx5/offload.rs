//! Translation of a packet's offload requests for mlx5. The device finds headers itself and computes complete
//! checksums, regardless of the content of the fields.
//!
//! The device computes one layer-4 checksum of a packet, the outer or the inner one (linux commit 6d6727dddc7f
//! "net/mlx5e: Block offload of outer header csum for UDP tunnels"). Linux and DPDK request the inner one in tunnels,
//! and never both (drivers/net/ethernet/mellanox/mlx5/core/en_tx.c, `mlx5e_txwqe_build_eseg_csum`;
//! drivers/net/mlx5/mlx5_rxtx.c, `mlx5_set_cksum_table`). This driver does the same. It computes a requested outer
//! checksum from the headers.
//!
//! The device segments TCP in tunnels too. It finds the inner headers of VXLAN and GRE itself, if its capabilities
//! name them. For all other tunnels the descriptor has the offsets of the headers (software parser). Linux passes them
//! for GENEVE (drivers/net/ethernet/mellanox/mlx5/core/en_accel/en_accel.h, `mlx5e_tx_tunnel_accel`). DPDK passes them
//! for generic tunnels over UDP and IP (drivers/net/mlx5/mlx5_tx.h, `txq_mbuf_to_swp`).
//!
//! The device writes the lengths, identifications and header checksums of both IP headers, and the length of the outer
//! UDP header. An outer UDP checksum stays as it is in each segment, and is right if all segments have the same length.
//! Linux relies on that (its commit 64050cdad098, and Documentation/networking/segmentation-offloads.rst about partial
//! segmentation).

use wirepath_nic_defs::mlx5::{
    ETH_L3_CSUM, ETH_L3_INNER_CSUM, ETH_L4_CSUM, ETH_L4_INNER_CSUM, SWP_INNER_IPV6, SWP_OUTER_IPV6, SWP_OUTER_UDP,
};
use wirepath_nic_defs::uverbs::mlx5::{TUNNEL_GENEVE, TUNNEL_GRE, TUNNEL_VXLAN};

use super::tx::TxConfig;
use super::wqe::{SwParser, TxOffloads};
use crate::drivers::nic::common::tso::{self, Tso};
use crate::drivers::sw_offload::{self, INNER_CHECKSUMS, OUTER_CHECKSUMS};
use crate::port::TunnelTso;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{HeaderLengths, Packet, PtypeL3, PtypeL4};

/// Requests that a packet can have.
pub(super) const REQUESTS: Flags = sw_offload::REQUESTS.with(Flags::TX_METADATA);
/// Most header bytes of a TSO packet: DPDK's limit (drivers/net/mlx5/mlx5_defs.h, `MLX5_MAX_TSO_HEADER`). Tagged
/// Ethernet in VXLAN over IPv6, with IPv6 and 44 bytes of TCP options inside, has as many.
pub(super) const MAX_TSO_HEADER: usize = 192;
const TCP: u8 = 6;
const UDP: u8 = 17;
const GRE: u8 = 47;
const IPV4_IN_IP: u8 = 4;
const IPV6_IN_IP: u8 = 41;
const VXLAN_PORT: u16 = 4789;
const GENEVE_PORT: u16 = 6081;

/// Reads the packet's requests. With inline headers the descriptor has no field for a VLAN tag, which is then
/// inserted into the packet. `Err`: the packet can never be sent.
pub(super) fn tx_offloads(packet: &mut Packet, config: &TxConfig) -> Result<TxOffloads, DropReason> {
    let (inline, tunnels) = (config.inline_minimum > 0, config.tunnels);
    let flags = packet.flags();
    let metadata = if flags.contains(Flags::TX_METADATA) { packet.mark().unwrap_or(0) } else { 0 };
    if flags.contains(Flags::TX_SEGMENT) {
        return Ok(TxOffloads { metadata, ..segmentation(packet, config)? });
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
    Ok(TxOffloads { checksums, tag, metadata, ..TxOffloads::default() })
}

/// Returns the flags of the requested checksums that the device computes, and computes the others. `None` if the device
/// would not find the headers.
fn checksums(packet: &mut Packet, flags: Flags, tunnels: u32) -> Option<u8> {
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
    let outer_l3 = bit(Flags::TX_OUTER_L3_CHECKSUM, ETH_L3_CSUM);
    let inner = bit(Flags::TX_L3_CHECKSUM, ETH_L3_INNER_CSUM) | bit(Flags::TX_L4_CHECKSUM, ETH_L4_INNER_CSUM);
    if !flags.contains(Flags::TX_OUTER_L4_CHECKSUM) {
        return Some(outer_l3 | inner);
    }
    match inner {
        0 => Some(outer_l3 | ETH_L4_CSUM),
        // The outer checksum covers the inner one of IPv4. No source says that the device computes that one first.
        ETH_L3_INNER_CSUM => None,
        _ => {
            sw_offload::fill_outer_udp(packet)?;
            Some(outer_l3 | inner)
        }
    }
}

/// Returns true if the device parses the packet's tunnel and finds the inner headers.
fn looks_into(frame: &[u8], layers: &HeaderLengths, tunnels: u32) -> bool {
    let Some((protocol, l4)) = ip_payload(frame, layers.outer_l2_len.into(), layers.outer_l3()) else { return false };
    let has = |tunnel: u32| tunnels & tunnel != 0;
    match (protocol, frame.get(l4 + 2..l4 + 4)) {
        (GRE, Some(kind)) => has(TUNNEL_GRE) && names_inner_headers(kind),
        (UDP, Some(port)) => match u16::from_be_bytes([port[0], port[1]]) {
            VXLAN_PORT => has(TUNNEL_VXLAN),
            GENEVE_PORT => has(TUNNEL_GENEVE),
            _ => false,
        },
        _ => false,
    }
}

/// Returns whether the device finds inner headers behind a GRE header with this type: it is that of Ethernet frames or
/// IP packets. MPLS behind GRE is a capability of its own (`MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_CW_MPLS_OVER_GRE`).
fn names_inner_headers(kind: &[u8]) -> bool {
    matches!(kind, [0x65, 0x58] | [0x08, 0x00] | [0x86, 0xdd])
}

/// Returns the protocol of the IP header at `l3`, and the offset of its payload. The device does not skip extension
/// headers.
fn ip_payload(frame: &[u8], l3: usize, version: PtypeL3) -> Option<(u8, usize)> {
    let ip = frame.get(l3..)?;
    match version {
        PtypeL3::Ipv4 => Some((*ip.get(9)?, l3 + usize::from(ip.first()? & 0xf) * 4)),
        PtypeL3::Ipv6 => Some((*ip.get(6)?, l3 + 40)),
        PtypeL3::Other => None,
    }
}

/// Returns how the device segments a superframe in a tunnel, whose header lengths are set. `longest`: bytes of the
/// longest frame.
pub(super) fn tunnel_tso(packet: &Packet, config: &TxConfig, longest: usize) -> TunnelTso {
    let Some((offloads, has_checksum)) = tunnel_segmentation(packet, config) else { return TunnelTso::No };
    let tso = offloads.segment.unwrap_or(Tso { mss: 0, header: 0 });
    // The tag is not in the packet yet.
    let header = usize::from(tso.header) + if packet.vlan().is_some() { 4 } else { 0 };
    let fits = header <= MAX_TSO_HEADER
        && header + usize::from(tso.mss) <= longest
        && packet.len() - usize::from(tso.header) <= config.max_tso;
    match fits {
        false => TunnelTso::No,
        true if has_checksum || packet.flags().contains(Flags::TX_OUTER_L4_CHECKSUM) => TunnelTso::EqualSegments,
        true => TunnelTso::Whole,
    }
}

/// Prepares TCP segmentation in a tunnel, and returns whether the outer header has a UDP checksum. `None` if the device
/// cannot do it.
fn tunnel_segmentation(packet: &Packet, config: &TxConfig) -> Option<(TxOffloads, bool)> {
    let (frame, layers, mss) = (packet.data(), packet.header_lengths(), packet.mss());
    let (outer_l3, tunnel_end) = (usize::from(layers.outer_l2_len), usize::from(layers.outer_len));
    let inner_l3 = tunnel_end + usize::from(layers.l2_len);
    let inner_l4 = inner_l3 + usize::from(layers.l3_len);
    let header = inner_l4 + usize::from(layers.l4_len);
    let half = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
    let (protocol, outer_l4) = ip_payload(frame, outer_l3, layers.outer_l3())?;
    let ethertype = if layers.l3() == PtypeL3::Ipv4 { 0x0800 } else { 0x86dd };
    let sound = ip_payload(frame, inner_l3, layers.l3())? == (TCP, inner_l4)
        && layers.l4() == PtypeL4::Tcp
        && layers.l4_len >= 20
        && outer_l4 <= tunnel_end
        // The device does not skip MPLS labels in front of the IP header.
        && (layers.l2_len == 0 || half(inner_l3 - 2)? == ethertype)
        && mss > 0
        && header <= MAX_TSO_HEADER.min(frame.len())
        && header < packet.len();
    if !sound {
        return None;
    }
    let has_checksum = protocol == UDP && half(outer_l4 + 6)? != 0;
    let is_parsed = match protocol {
        // Linux gives VXLAN to the device if it carries Ethernet frames (include/net/vxlan.h, `vxlan_features_check`).
        UDP => config.tunnels & TUNNEL_VXLAN != 0 && half(outer_l4 + 2)? == VXLAN_PORT && layers.l2_len >= 14,
        // Each segment would need a checksum or a sequence number of its own.
        GRE if half(outer_l4)? & 0x9000 != 0 => return None,
        GRE => config.tunnels & TUNNEL_GRE != 0 && names_inner_headers(frame.get(outer_l4 + 2..outer_l4 + 4)?),
        IPV4_IN_IP | IPV6_IN_IP => false,
        _ => return None,
    };
    let sw_parser = if is_parsed {
        SwParser::default()
    } else if config.sw_parser {
        let outer_udp = if protocol == UDP { outer_l4 } else { 0 };
        let offsets = [outer_udp, outer_l3, inner_l4, inner_l3];
        if offsets.iter().any(|at| at % 2 != 0) {
            return None;
        }
        let flag = |condition, flag| if condition { flag } else { 0 };
        SwParser {
            // They are at most [`MAX_TSO_HEADER`].
            offsets: offsets.map(|at| (at / 2) as u8),
            flags: flag(layers.outer_l3() == PtypeL3::Ipv6, SWP_OUTER_IPV6)
                | flag(protocol == UDP, SWP_OUTER_UDP)
                | flag(layers.l3() == PtypeL3::Ipv6, SWP_INNER_IPV6),
        }
    } else {
        return None;
    };
    let checksums = ETH_L3_CSUM | ETH_L3_INNER_CSUM | ETH_L4_INNER_CSUM;
    let segment = Some(Tso { mss, header: header as u16 });
    Some((TxOffloads { checksums, segment, sw_parser, ..TxOffloads::default() }, has_checksum))
}

/// Prepares TCP segmentation, also in tunnels.
fn segmentation(packet: &mut Packet, config: &TxConfig) -> Result<TxOffloads, DropReason> {
    let refused = DropReason::KernelOffload;
    // Headers are inline, which leaves no field for a tag in the descriptor.
    tso::insert_tag(packet)?;
    if packet.header_lengths().outer_len != 0 {
        let (offloads, has_checksum) = tunnel_segmentation(packet, config).ok_or(refused)?;
        // The checksum must be that of each segment.
        let are_equal = |tso: Tso| (packet.len() - usize::from(tso.header)).is_multiple_of(tso.mss.into());
        let is_wrong = packet.flags().contains(Flags::TX_OUTER_L4_CHECKSUM)
            || has_checksum && !offloads.segment.is_some_and(are_equal);
        return if is_wrong { Err(refused) } else { Ok(offloads) };
    }
    let segment = Some(tso::plain(packet, MAX_TSO_HEADER)?);
    Ok(TxOffloads { checksums: ETH_L3_CSUM | ETH_L4_CSUM, segment, ..TxOffloads::default() })
}
