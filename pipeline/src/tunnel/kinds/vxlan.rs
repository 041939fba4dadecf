//! VXLAN (RFC 7348).

use wirepath_flow::{Field, Item, ItemKind, tunnel};
use wirepath_packet::drops::DropReason;
use wirepath_wire::{EtherType, Vni, vxlan};

use super::{Carrier, Payload, PlainHeader, TunnelHeader, TunnelKind};

/// VXLAN.
pub static KIND: TunnelKind = TunnelKind {
    name: "vxlan",
    about: "VXLAN (RFC 7348)",
    id_name: "VNI",
    ids: 0..=Vni::MAX,
    needs_id: true,
    carrier: Carrier::Udp(vxlan::PORT),
    payloads: &[Payload::Ethernet],
    header_len: vxlan::HEADER_LEN,
    rule_tunnel: Some(tunnel::VXLAN),
    write: |id, _, _| {
        let mut header = vec![vxlan::FLAG_VNI, 0, 0, 0];
        header.extend((id.unwrap_or(0) << 8).to_be_bytes());
        header.into()
    },
    parse: |_, bytes| parse(bytes),
    length: |_| Some(vxlan::HEADER_LEN),
    plain: Some(PlainHeader { mask: (vxlan::FLAG_VNI as u64) << 56, value: (vxlan::FLAG_VNI as u64) << 56 }),
    match_item: Some(|id, _| Item::new(ItemKind::Vxlan).exact(Field::VxlanVni, id.unwrap_or(0).into())),
    settings: None,
    sids: None,
    service: None,
};

/// The I flag must be set; all reserved bits are ignored (section 5).
fn parse(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let header: &[u8; vxlan::HEADER_LEN] = bytes.first_chunk().ok_or(DropReason::BadTunnelHeader)?;
    if header[0] & vxlan::FLAG_VNI == 0 {
        return Err(DropReason::BadTunnelHeader);
    }
    let id = Some(u32::from_be_bytes([0, header[4], header[5], header[6]]));
    let payload = EtherType::TRANSPARENT_ETHERNET;
    Ok(TunnelHeader { id, len: vxlan::HEADER_LEN, payload, has_checksum: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc7348_section_5() {
        let header = |flags| [flags, 1, 2, 3, 0x12, 0x34, 0x56, 0x78];
        let payload = EtherType::TRANSPARENT_ETHERNET;
        let expected = TunnelHeader { id: Some(0x12_3456), len: 8, payload, has_checksum: false };
        assert_eq!(parse(&header(0xff)), Ok(expected), "reserved bits are ignored");
        assert_eq!(parse(&header(0xf7)), Err(DropReason::BadTunnelHeader), "without a valid VNI");
    }
}
