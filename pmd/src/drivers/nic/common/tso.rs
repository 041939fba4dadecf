//! TCP segmentation (TSO) by devices that take all headers of a packet apart from its payload. The device writes
//! lengths, identification, sequence numbers and checksums of each segment.

use crate::drivers::sw_offload;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, PtypeL3, PtypeL4, superframe};

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
    insert_tag(packet)?;
    plain(packet, max_header)
}

/// Returns whether a device with these limits takes a plain superframe whole. The limits are bytes of headers with a
/// VLAN tag, and bytes of payload. Superframes in tunnels have other limits.
pub(crate) fn fits(packet: &Packet, max_header: usize, max_payload: usize) -> bool {
    let tag = if packet.vlan().is_some() { 4 } else { 0 };
    superframe::parse(packet, None).is_some_and(|parsed| {
        let header = parsed.outer().payload();
        parsed.inner().is_some() || header + tag <= max_header && packet.len().saturating_sub(header) <= max_payload
    })
}

/// Inserts a VLAN tag in the metadata, and corrects the lengths of the headers.
pub(crate) fn insert_tag(packet: &mut Packet) -> Result<(), DropReason> {
    let Some(tci) = packet.vlan() else { return Ok(()) };
    let service = packet.flags().contains(Flags::VLAN_SERVICE);
    sw_offload::insert_vlan_tag(packet, tci, service)?;
    packet.clear_vlan();
    let longer = |len: u8| len.checked_add(4).ok_or(DropReason::KernelOffload);
    let mut layers = packet.header_lengths();
    if layers.outer_len == 0 {
        layers.l2_len = longer(layers.l2_len)?;
    } else {
        (layers.outer_l2_len, layers.outer_len) = (longer(layers.outer_l2_len)?, longer(layers.outer_len)?);
    }
    packet.set_header_lengths(layers);
    Ok(())
}

/// Returns the parameters for a packet that is in no tunnel and has no tag in the metadata. Its headers are in the
/// first buffer then.
pub(crate) fn plain(packet: &mut Packet, max_header: usize) -> Result<Tso, DropReason> {
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
        return Err(DropReason::KernelOffload);
    }
    Ok(Tso { mss, header: header as u16 })
}
