//! Completes checksums that a local sender's kernel left to a device that does not exist.

use wirepath_wire::checksum::Sum;
use wirepath_wire::checksum_offload;
use wirepath_wire::{HeaderOffsets, Parser, checksum};

use wirepath_packet::Packet;

/// Completes TCP and UDP checksums of the packet that hold only the sum of the pseudo header, also inside a
/// tunnel.
///
/// Returns `Some` if any checksum was completed. Packets with correct, wrong or absent checksums stay
/// unchanged, so a second call changes nothing.
#[inline]
pub(crate) fn complete(packet: &mut Packet) -> Option<()> {
    let parsed = Parser::default().parse_chain(packet.data(), packet.len()).ok()?;
    // Inner checksum first: Linux computes the outer sum as if the inner checksum were complete.
    let inner = parsed.inner().is_some_and(|layers| complete_stack(packet, layers));
    let outer = complete_stack(packet, parsed.outer());
    (inner || outer).then_some(())
}

fn complete_stack(packet: &mut Packet, layers: &HeaderOffsets) -> bool {
    let head_len = packet.data().len();
    if !packet.is_chain() {
        return checksum_offload::complete_stack(packet.data_mut(), layers, || Sum::ZERO);
    }
    // Sum of the bytes behind the first segment, up to the end of the layer. It is computed always, although
    // only incomplete checksums need it: the closure cannot borrow the packet while its head is written.
    // Chains are rare.
    let mut left = layers.end().saturating_sub(head_len);
    let (mut tail, mut at) = (Sum::ZERO, 0);
    for segment in packet.segments().skip(1) {
        let part = &segment[..segment.len().min(left)];
        tail = tail.and_at(at, checksum::sum(part));
        at += part.len();
        left -= part.len();
    }
    checksum_offload::complete_stack(packet.data_mut(), layers, || tail)
}
