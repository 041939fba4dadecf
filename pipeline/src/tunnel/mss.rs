//! Limits the maximum segment size (MSS) of TCP connections through tunnels.
//!
//! Each end of a TCP connection announces in its first segment how much it takes (RFC 9293 section 3.7.1). A tunnel
//! takes less than a local network, and path MTU discovery fails where ICMP is filtered. So the gateway lowers what
//! hosts announce, in both directions. Only the first segments of connections leave the fast path.

use std::fmt::Write as _;

use wirepath_packet::Packet;
use wirepath_packet::offload::Flags;
use wirepath_settings::{Flag, Key, WithDefault};
use wirepath_wire::{EtherType, IpProtocol, L3Type, L4Type, Parser, ipv4, ipv6, tcp};

use super::headers::ETHERNET_LEN;
use super::report::STAGE;
use super::stage::{StageState, View};
use super::tables::Remote;
use crate::Context;

/// Offset of the flags in a TCP header.
const FLAGS: usize = 13;

/// Key `clamp_mss` of a segment.
pub(super) const CLAMP_MSS: Key<WithDefault<Flag>> = Key::flag("clamp_mss")
    .default(false)
    .about("Lowers the MSS of TCP connections through the tunnels to what these take, in both directions.");

/// Returns a bit for each packet whose frame at `at` may begin a TCP connection.
pub(super) fn find_handshakes(packets: &[Packet], at: usize) -> u64 {
    packets.iter().enumerate().fold(0, |found, (i, packet)| {
        let frame = packet.data().get(at..).unwrap_or_default();
        found | u64::from(may_be_handshake(frame)) << i
    })
}

fn may_be_handshake(frame: &[u8]) -> bool {
    let Some(header) = frame.first_chunk::<{ ETHERNET_LEN + 20 }>() else { return true };
    let (protocol, l4) = match EtherType(u16::from_be_bytes([header[12], header[13]])) {
        EtherType::IPV4 => (header[23], ETHERNET_LEN + usize::from(header[14] & 15) * 4),
        EtherType::IPV6 => (header[20], ETHERNET_LEN + ipv6::HEADER_LEN),
        _ => return false,
    };
    match IpProtocol(protocol) {
        IpProtocol::TCP => frame.get(l4 + FLAGS).is_none_or(|flags| flags & tcp::flags::SYN != 0),
        // TCP may follow extension headers of IPv6: the slow path decides.
        next => ipv6::is_extension(next),
    }
}

impl View<'_> {
    /// Lowers the MSS in a frame to or from a remote to what the tunnel takes, if its segment has `clamp_mss`.
    pub(super) fn limit_mss(
        &self,
        state: &StageState,
        context: &mut Context<'_>,
        packet: &mut Packet,
        remote: &Remote,
    ) {
        let segment = self.layout.segments.get(usize::from(remote.segment));
        let Some(segment) = segment.filter(|segment| segment.clamp_mss) else { return };
        let mtu = segment.mtu.map_or(usize::MAX, usize::from);
        if clamp(packet, &state.parser, remote.max_frame, mtu) {
            context.trace(STAGE, |text| text.write_str("the MSS is lowered"));
            if let Some(c) = self.layout.counters(remote.segment, state.worker) {
                c.mss_clamped.add(1);
            }
        }
    }
}

/// Lowers the MSS of a frame that begins a TCP connection. No frame of the connection is longer than `max_frame` then,
/// and no IP packet longer than `mtu`. Returns whether the frame was changed.
fn clamp(packet: &mut Packet, parser: &Parser, max_frame: usize, mtu: usize) -> bool {
    let len = packet.len();
    let Ok(layers) = parser.parse_stack(packet.data(), 0, len) else { return false };
    if layers.l4_type() != L4Type::Tcp || layers.is_fragment() {
        return false;
    }
    let header = match layers.l3_type() {
        L3Type::Ipv4 => ipv4::HEADER_LEN,
        L3Type::Ipv6 => ipv6::HEADER_LEN,
        _ => return false,
    };
    // The MSS does not count options (RFC 6691).
    let most = max_frame.saturating_sub(layers.l3()).min(mtu).saturating_sub(header + tcp::HEADER_LEN);
    let most = u16::try_from(most).unwrap_or(u16::MAX);
    // Without this flag the checksum is complete.
    let is_complete = !packet.flags().contains(Flags::TX_L4_CHECKSUM);
    packet.data_mut().get_mut(layers.l4()..).is_some_and(|segment| tcp::lower_mss(segment, most, is_complete))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_first_segments_are_handshakes() {
        let frame = |ethertype: u16, protocol: u8, words: u8, flags: u8| {
            let mut frame = vec![0; 14 + usize::from(words) * 4 + 20];
            frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
            let (version, at) = if ethertype == 0x800 { (0x40 | words, 23) } else { (0x60, 20) };
            (frame[14], frame[at]) = (version, protocol);
            let l4 = 14 + usize::from(words) * 4;
            frame[l4 + FLAGS] = flags;
            frame
        };
        for (ethertype, words) in [(0x800, 5), (0x800, 8), (0x86dd, 10)] {
            assert!(may_be_handshake(&frame(ethertype, 6, words, tcp::flags::SYN)));
            assert!(may_be_handshake(&frame(ethertype, 6, words, tcp::flags::SYN | tcp::flags::ACK)));
            assert!(!may_be_handshake(&frame(ethertype, 6, words, tcp::flags::ACK)));
            assert!(!may_be_handshake(&frame(ethertype, 17, words, tcp::flags::SYN)));
        }
        assert!(may_be_handshake(&frame(0x86dd, 60, 10, 0)));
        assert!(!may_be_handshake(&frame(0x806, 6, 5, tcp::flags::SYN)));
        assert!(may_be_handshake(&[0; 20]), "the slow path decides");
    }
}
