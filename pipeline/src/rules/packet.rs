use wirepath_pmd::flow::{Direction, Outside};
use wirepath_pmd::packet::Packet;

/// What the items `port` and `meta` see of a packet: the port that it came in by (ingress) or goes out by (egress), its mark, and as
/// data the low half of the first of the application's words ([`Packet::app`]).
pub fn outside(packet: &Packet, direction: Direction) -> Outside {
    let port = if direction == Direction::Ingress { packet.in_port() } else { packet.out_port() };
    Outside { port, mark: packet.mark().unwrap_or(0) & 0xff_ffff, data: packet.app()[0] as u32 }
}
