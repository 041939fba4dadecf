//! VLAN tags on and off, in the frame and beside it.

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::Packet;
use wirepath_pmd::packet::offload::Flags;
use wirepath_wire::vlan::{self, TAG_LEN};
use wirepath_wire::{EtherType, Tag, ethernet};

use super::{Headers, note_layers};

/// Tags of a frame that are followed; see [`wirepath_wire::Parser`].
const MOST: usize = 2;

/// Puts a tag on, outside of those that are there.
pub(super) fn push(packet: &mut Packet, headers: &mut Headers, tag: Tag) -> Result<(), DropReason> {
    let beside = take_beside(packet);
    let within = count(packet.data());
    if within + usize::from(beside.is_some()) >= MOST {
        return Err(DropReason::TooManyHeaders);
    }
    if let Some(beside) = beside {
        write(packet, headers, beside)?;
    }
    write(packet, headers, tag)?;
    note_layers(packet, headers);
    Ok(())
}

/// Takes the outermost tag off.
pub(super) fn pop(packet: &mut Packet, headers: &mut Headers) -> Result<(), DropReason> {
    if take_beside(packet).is_some() {
        return Ok(());
    }
    if vlan::pop(packet.data_mut()).is_none() || !packet.trim_front(TAG_LEN) {
        return Err(DropReason::RuleMismatch);
    }
    headers.retagged(-(TAG_LEN as i32));
    note_layers(packet, headers);
    Ok(())
}

/// Writes a tag that the device left beside the frame into it.
pub(super) fn write_beside(packet: &mut Packet, headers: &mut Headers) -> Result<(), DropReason> {
    match take_beside(packet) {
        Some(tag) => write(packet, headers, tag),
        None => Ok(()),
    }
}

/// The same for a packet of whose headers nothing is known yet.
pub(in crate::rules) fn tag_into_frame(packet: &mut Packet) -> Result<(), DropReason> {
    write_beside(packet, &mut Headers { outer: None, inner: None })
}

fn take_beside(packet: &mut Packet) -> Option<Tag> {
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
    // Long enough, as was looked at.
    vlan::push(packet.data_mut(), tag);
    headers.retagged(TAG_LEN as i32);
    Ok(())
}

/// Tags in a frame, counted up to [`MOST`].
fn count(frame: &[u8]) -> usize {
    let tagged = |nth: &usize| {
        let tpid = frame.get(12 + nth * TAG_LEN..).and_then(|b| b.first_chunk());
        tpid.is_some_and(|tpid| EtherType(u16::from_be_bytes(*tpid)).is_vlan())
    };
    (0..MOST).take_while(tagged).count()
}
