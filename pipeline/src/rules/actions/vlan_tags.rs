//! Push and pop of VLAN tags, both in the frame and stripped.

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_wire::vlan::{self, TAG_LEN};
use wirepath_wire::{EtherType, Tag, ethernet};

use super::{Headers, update_tx_layers};

/// Maximum number of tags in a frame; see [`wirepath_wire::Parser`].
const MAX_TAGS: usize = 2;

/// Pushes a tag in front of the existing ones.
pub(super) fn push(packet: &mut Packet, headers: &mut Headers, tag: Tag) -> Result<(), DropReason> {
    let stripped = take_stripped_tag(packet);
    let within = count(packet.data());
    if within + usize::from(stripped.is_some()) >= MAX_TAGS {
        return Err(DropReason::TooManyHeaders);
    }
    if let Some(stripped) = stripped {
        write(packet, headers, stripped)?;
    }
    write(packet, headers, tag)?;
    update_tx_layers(packet, headers);
    Ok(())
}

/// Pops the outermost tag.
pub(super) fn pop(packet: &mut Packet, headers: &mut Headers) -> Result<(), DropReason> {
    if take_stripped_tag(packet).is_some() {
        return Ok(());
    }
    if vlan::pop(packet.data_mut()).is_none() || !packet.trim_front(TAG_LEN) {
        return Err(DropReason::RuleMismatch);
    }
    headers.retagged(-(TAG_LEN as i32));
    update_tx_layers(packet, headers);
    Ok(())
}

/// Inserts a stripped tag into the frame.
pub(super) fn write_stripped_tag(packet: &mut Packet, headers: &mut Headers) -> Result<(), DropReason> {
    match take_stripped_tag(packet) {
        Some(tag) => write(packet, headers, tag),
        None => Ok(()),
    }
}

/// Inserts a stripped tag into the frame of a packet that is not parsed.
pub(in crate::rules) fn insert_stripped_tag(packet: &mut Packet) -> Result<(), DropReason> {
    write_stripped_tag(packet, &mut Headers { outer: None, inner: None })
}

fn take_stripped_tag(packet: &mut Packet) -> Option<Tag> {
    let tci = packet.vlan()?;
    let tpid = if packet.flags().contains(Flags::VLAN_SERVICE) { EtherType::QINQ } else { EtherType::VLAN };
    packet.clear_vlan();
    Some(Tag { tpid, tci })
}

fn write(packet: &mut Packet, headers: &mut Headers, tag: Tag) -> Result<(), DropReason> {
    if packet.data().len() < ethernet::HEADER_LEN {
        return Err(DropReason::TooShort);
    }
    packet.prepend::<TAG_LEN>().ok_or(DropReason::NoHeadroom)?;
    // The frame has room for the tag, because its length was checked above.
    vlan::push(packet.data_mut(), tag);
    headers.retagged(TAG_LEN as i32);
    Ok(())
}

/// Counts the tags in a frame, up to [`MAX_TAGS`].
fn count(frame: &[u8]) -> usize {
    let tagged = |nth: &usize| {
        let tpid = frame.get(12 + nth * TAG_LEN..).and_then(|b| b.first_chunk());
        tpid.is_some_and(|tpid| EtherType(u16::from_be_bytes(*tpid)).is_vlan())
    };
    (0..MAX_TAGS).take_while(tagged).count()
}
