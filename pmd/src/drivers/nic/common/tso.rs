//! TCP segmentation (TSO) by devices that take all headers of a packet apart from its payload. The device writes
//! lengths, identification, sequence numbers and checksums of each segment.

use crate::drivers::sw_offload;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, PtypeL3, PtypeL4};

/// Parameters of TCP segmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tso {
    /// Most payload bytes of a segment.
    pub(crate) mss: u16,
    /// Bytes of all headers, which are in the first buffer.
    pub(crate) header: u16,
}

/// Prepares a packet with [`Flags::TX_SEGMENT`] for a device that takes up to `max_header` bytes of headers. A VLAN tag
/// in the metadata is inserted. `Err`: the device cannot segment the packet.
pub(crate) fn prepare(packet: &mut Packet, max_header: usize) -> Result<Tso, DropReason> {
    let refused = DropReason::KernelOffload;
    if let Some(tci) = packet.vlan() {
        let service = packet.flags().contains(Flags::VLAN_SERVICE);
        sw_offload::insert_vlan_tag(packet, tci, service)?;
        packet.clear_vlan();
        let mut layers = packet.header_lengths();
        layers.l2_len += 4;
        packet.set_header_lengths(layers);
    }
    let layers = packet.header_lengths();
    let header = usize::from(layers.l2_len) + usize::from(layers.l3_len) + usize::from(layers.l4_len);
    let mss = packet.mss();
    let sound = layers.outer_len == 0
        && layers.l3() != PtypeL3::Other
        && layers.l4() == PtypeL4::Tcp
        && layers.l2_len >= 14
        && layers.l3_len >= 20
        && layers.l4_len >= 20
        && mss > 0
        && header <= max_header
        && header < packet.len();
    if !sound || (packet.data().len() < header && !packet.pull_up(header)) {
        return Err(refused);
    }
    Ok(Tso { mss, header: header as u16 })
}
