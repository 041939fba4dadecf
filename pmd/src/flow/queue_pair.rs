//! Tunnel headers of NICs that encapsulate RDMA packets by queue pair, not frames by flow ([`wirepath_verbs::hbl`]).
//!
//! The header is described as for the reformat kinds, by the same bytes ([`Reformat`]). Such a NIC writes Ethernet and IPv4 by itself: of
//! the outer stack it takes the source address, the UDP port or IP protocol, and what follows.

use std::net::Ipv4Addr;

use wirepath_verbs::hbl::{EncapKind, EncapProblem, Encapsulation};
use wirepath_wire::{IpProtocol, ipv4, udp};

use super::reformat::{Reformat, ReformatKind};

/// Why a reformat is none that a queue pair can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoQueuePairEncap {
    /// Headers come off.
    #[error("a queue pair's packets are encapsulated; what arrives is stripped by the port")]
    Decap,
    /// Only IPv4 carries it.
    #[error("the outer header is not IPv4 without options and VLAN tags, which is all that these NICs write")]
    NotPlainIpv4,
    /// The header itself.
    #[error(transparent)]
    Header(#[from] EncapProblem),
}

/// The encapsulation of a queue pair that puts the same tunnel header on packets as `reformat` does.
///
/// # Errors
/// The NIC has no such header.
pub fn queue_pair_encap(reformat: &Reformat) -> Result<Encapsulation, NoQueuePairEncap> {
    if !matches!(reformat.kind(), ReformatKind::L2ToL2Tunnel | ReformatKind::L2ToL3Tunnel) {
        return Err(NoQueuePairEncap::Decap);
    }
    let layout = reformat.layout().ok_or(NoQueuePairEncap::Decap)?;
    let (bytes, l3, l4) = (reformat.bytes(), usize::from(layout.l3), usize::from(layout.l4));
    // The stack was checked when the reformat was made; lengths in it mean nothing.
    let Some((outer, rest)) = bytes.get(l3..).and_then(|bytes| bytes.split_first_chunk::<{ ipv4::HEADER_LEN }>())
    else {
        return Err(NoQueuePairEncap::NotPlainIpv4);
    };
    if layout.ip_version != 4 || layout.tags > 0 || l4 - l3 != ipv4::HEADER_LEN {
        return Err(NoQueuePairEncap::NotPlainIpv4);
    }
    let source = Ipv4Addr::new(outer[12], outer[13], outer[14], outer[15]);
    let (kind, header) = match rest.split_first_chunk::<{ udp::HEADER_LEN }>() {
        Some((port, rest)) if outer[9] == IpProtocol::UDP.0 => {
            (EncapKind::OverUdp { destination_port: u16::from_be_bytes([port[2], port[3]]) }, rest)
        }
        _ => (EncapKind::OverIpv4 { protocol: outer[9] }, rest),
    };
    Ok(Encapsulation::new(source, kind, header)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outer(protocol: u8, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        let length = (20 + rest.len()) as u16;
        bytes.extend([0x45, 0]);
        bytes.extend(length.to_be_bytes());
        bytes.extend([0, 0, 0x40, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn the_same_header_bytes_describe_both() {
        // GENEVE with options of 24 bytes: 32, which is what a Gaudi 2 takes.
        let mut geneve = vec![0x30, 0, 0x17, 0xc1, 0, 40, 0, 0, 6, 0, 0x65, 0x58, 0, 0, 42, 0];
        geneve.extend([1, 2, 3, 5]);
        geneve.extend([7; 20]);
        let reformat = Reformat::new(ReformatKind::L2ToL2Tunnel, &outer(17, &geneve)).unwrap();
        let encap = queue_pair_encap(&reformat).unwrap();
        assert_eq!(encap.source(), Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(encap.kind(), EncapKind::OverUdp { destination_port: 6081 });
        assert_eq!((encap.header(), encap.overhead()), (&geneve[8..], 40));
        // GRE lies on IP.
        let gre = [0x20, 0, 0x65, 0x58, 0, 0, 1, 0];
        let reformat = Reformat::new(ReformatKind::L2ToL2Tunnel, &outer(47, &gre)).unwrap();
        let encap = queue_pair_encap(&reformat).unwrap();
        assert_eq!((encap.kind(), encap.header()), (EncapKind::OverIpv4 { protocol: 47 }, &gre[..]));
        // Headers that come off are the port's.
        let reformat = Reformat::new(ReformatKind::L2TunnelToL2, &[]).unwrap();
        assert_eq!(queue_pair_encap(&reformat), Err(NoQueuePairEncap::Decap));
    }
}
