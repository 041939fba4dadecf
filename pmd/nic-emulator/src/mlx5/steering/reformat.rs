//! Packet reformat: adds or removes headers.
//!
//! An encapsulation header is copied literally, except fields that depend on the packet: lengths of IP and
//! UDP, and the IPv4 header checksum. The device also writes entropy into the source port of UDP tunnels and
//! the low byte of a GRE key.
//!
//! Sources of kinds, tables and lengths: Linux `drivers/infiniband/hw/mlx5/fs.c`,
//! `drivers/net/ethernet/mellanox/mlx5/core/cmd.c`. Sources of the fields that the device writes: Linux
//! `drivers/net/ethernet/mellanox/mlx5/core/lib/port_tun.c`, DPDK `drivers/net/mlx5/mlx5_flow_dv.c`.

use rustix::io::Errno;
use wirepath_nic_defs::uverbs::mlx5 as abi;

use super::headers::{self, GRE, Headers, TCP, UDP};
use crate::frame;
use crate::topology::SteeringSpec;

/// Lengths of the Ethernet header that is added to the payload of an L3 tunnel: without and with a VLAN tag.
const LINK_BYTES: [usize; 2] = [14, 18];

/// Error: the reformat is not applicable to the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotApplicable;

/// Packet reformat actions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reformat {
    /// Removes the outer headers in front of an inner Ethernet frame.
    L2TunnelToL2,
    /// Adds outer headers.
    L2ToL2Tunnel(Vec<u8>),
    /// Replaces the outer headers in front of an inner IP packet by an Ethernet header.
    L3TunnelToL2(Vec<u8>),
    /// Replaces the Ethernet header by outer headers.
    L2ToL3Tunnel(Vec<u8>),
}

impl Reformat {
    /// Creates a reformat action, with the checks of kernel and firmware.
    pub(super) fn new(kind: u8, table: u8, data: Option<&[u8]>, spec: &SteeringSpec) -> Result<Self, (Errno, String)> {
        let wanted = match kind {
            abi::REFORMAT_L2_TUNNEL_TO_L2 | abi::REFORMAT_L3_TUNNEL_TO_L2 => abi::TABLE_NIC_RX,
            abi::REFORMAT_L2_TO_L2_TUNNEL | abi::REFORMAT_L2_TO_L3_TUNNEL => abi::TABLE_NIC_TX,
            kind => return Err((Errno::INVAL, format!("unknown reformat kind {kind}"))),
        };
        if table != wanted || spec.reformats & 1 << kind == 0 {
            let able = if spec.reformats & 1 << kind == 0 {
                "which the device does not support"
            } else {
                "which is of the other direction"
            };
            return Err((Errno::OPNOTSUPP, format!("reformat of kind {kind} in table {table}, {able}")));
        }
        if kind == abi::REFORMAT_L2_TUNNEL_TO_L2 {
            return Ok(Self::L2TunnelToL2);
        }
        let data = data.ok_or_else(|| (Errno::NOENT, format!("reformat of kind {kind} without data")))?;
        if data.len() > spec.encap_bytes as usize {
            let why = format!("a header of {} bytes; the device has room for {}", data.len(), spec.encap_bytes);
            return Err((Errno::INVAL, why));
        }
        let data = data.to_vec();
        match kind {
            abi::REFORMAT_L3_TUNNEL_TO_L2 if LINK_BYTES.contains(&data.len()) => Ok(Self::L3TunnelToL2(data)),
            abi::REFORMAT_L3_TUNNEL_TO_L2 => {
                Err((Errno::INVAL, format!("a link header of {} bytes; 14 or 18", data.len())))
            }
            abi::REFORMAT_L2_TO_L2_TUNNEL => Ok(Self::L2ToL2Tunnel(data)),
            _ => Ok(Self::L2ToL3Tunnel(data)),
        }
    }

    pub(super) fn is_decap(&self) -> bool {
        matches!(self, Self::L2TunnelToL2 | Self::L3TunnelToL2(_))
    }

    /// Applies the action to a packet.
    pub(super) fn apply(&self, packet: &mut Vec<u8>, entropy: bool) -> Result<(), NotApplicable> {
        let headers = &headers::parse(packet);
        match self {
            Self::L2TunnelToL2 => {
                let start = headers.inner.and_then(|inner| inner.l2).ok_or(NotApplicable)?;
                packet.truncate(headers.outer.end);
                packet.drain(..start);
            }
            Self::L3TunnelToL2(link) => {
                let inner =
                    headers.inner.filter(|inner| inner.l2.is_none() && inner.version != 0).ok_or(NotApplicable)?;
                packet.truncate(inner.end);
                packet.splice(..inner.l3, link.iter().copied());
            }
            Self::L2ToL2Tunnel(outer) => encapsulate(packet, 0, outer, headers, entropy),
            Self::L2ToL3Tunnel(outer) => {
                let start = Some(headers.outer.l3).filter(|_| headers.outer.version != 0).ok_or(NotApplicable)?;
                packet.truncate(headers.outer.end);
                encapsulate(packet, start, outer, headers, entropy);
            }
        }
        Ok(())
    }
}

/// Replaces the first `start` bytes by outer headers, and sets the fields that depend on the packet.
fn encapsulate(packet: &mut Vec<u8>, start: usize, outer: &[u8], headers: &Headers, entropy: bool) {
    let flow = entropy.then(|| flow_of(packet, headers));
    packet.splice(..start, outer.iter().copied());
    // Truncated headers and headers other than IP stay unchanged.
    let Some((version, l3)) = ip_of(outer) else { return };
    let length = packet.len() - l3;
    let (protocol, l4) = if version == 4 {
        let header = l3 + usize::from(outer[l3] & 15) * 4;
        packet[l3 + 2..l3 + 4].copy_from_slice(&(length as u16).to_be_bytes());
        if let Some(header) = packet.get_mut(l3..header.max(l3 + 20)) {
            header[10..12].fill(0);
            let checksum = !frame::fold(frame::sum(header));
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        (outer[l3 + 9], header)
    } else {
        packet[l3 + 4..l3 + 6].copy_from_slice(&((length - 40) as u16).to_be_bytes());
        (outer[l3 + 6], l3 + 40)
    };
    match protocol {
        UDP if l4 + 8 <= outer.len() => {
            let length = packet.len() - l4;
            packet[l4 + 4..l4 + 6].copy_from_slice(&(length as u16).to_be_bytes());
            if let Some(flow) = flow {
                // The range of private ports.
                packet[l4..l4 + 2].copy_from_slice(&(0xc000 | flow as u16 & 0x3fff).to_be_bytes());
            }
        }
        GRE if l4 + 8 <= outer.len() && outer[l4] & 0xa0 == 0x20 => {
            if let Some(flow) = flow {
                packet[l4 + 7] = flow as u8;
            }
        }
        _ => {}
    }
}

/// Returns version and offset of the IP header in outer headers.
fn ip_of(outer: &[u8]) -> Option<(u8, usize)> {
    let mut at = 12;
    for _ in 0..2 {
        if let Some(0x8100 | 0x88a8) = headers::half(outer, at) {
            at += 4;
        }
    }
    match headers::half(outer, at)? {
        0x0800 if outer.len() >= at + 22 => Some((4, at + 2)),
        0x86dd if outer.len() >= at + 42 => Some((6, at + 2)),
        _ => None,
    }
}

/// Returns a hash that is equal for all packets of a flow.
fn flow_of(packet: &[u8], headers: &Headers) -> u32 {
    let level = &headers.outer;
    let addresses = match level.version {
        4 => &packet[level.l3 + 12..level.l3 + 20],
        6 => &packet[level.l3 + 8..level.l3 + 40],
        _ => &packet[..packet.len().min(12)],
    };
    let ports =
        if level.transport && matches!(level.protocol, TCP | UDP) { &packet[level.l4..level.l4 + 4] } else { &[] };
    // FNV-1a. The function of the real device is not public, and any hash is possible.
    let hash = addresses
        .iter()
        .chain(ports)
        .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    hash ^ hash >> 16
}
