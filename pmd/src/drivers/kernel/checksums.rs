//! Completes checksums that the kernel of a local sender left to hardware that is not there.

use wirepath_wire::checksum::Sum;
use wirepath_wire::finish;
use wirepath_wire::{Layers, Parser, checksum};

use crate::packet::Packet;

/// Completes the TCP and UDP checksums of the packet, those inside a tunnel too, if they hold the pseudo header's sum only. `Some` if
/// any was completed; a packet with right, wrong or absent checksums stays as it is, so that a second call changes nothing.
#[inline]
pub(crate) fn complete(packet: &mut Packet) -> Option<()> {
    let parsed = Parser::default().parse_chain(packet.data(), packet.len()).ok()?;
    // Inner first: Linux sums the outer datagram as if the inner checksum were complete.
    let inner = parsed.inner().is_some_and(|layers| complete_layers(packet, layers));
    let outer = complete_layers(packet, parsed.outer());
    (inner || outer).then_some(())
}

fn complete_layers(packet: &mut Packet, layers: &Layers) -> bool {
    let head_len = packet.data().len();
    if !packet.is_chain() {
        return finish::complete_layers(packet.data_mut(), layers, || Sum::ZERO);
    }
    // What lies behind the first segment, up to the end of the layer. Needed only if the checksum is incomplete, but the closure
    // cannot borrow the packet whose head is written; chains are few.
    let mut left = layers.end().saturating_sub(head_len);
    let (mut tail, mut at) = (Sum::ZERO, 0);
    for segment in packet.segments().skip(1) {
        let part = &segment[..segment.len().min(left)];
        tail = tail.and_at(at, checksum::sum(part));
        at += part.len();
        left -= part.len();
    }
    finish::complete_layers(packet.data_mut(), layers, || tail)
}
