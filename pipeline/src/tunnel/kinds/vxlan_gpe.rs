//! VXLAN-GPE (draft-ietf-nvo3-vxlan-gpe-13) with Ethernet frames or IP packets.

use wirepath_flow::{Field, Item, ItemKind};
use wirepath_packet::drops::DropReason;
use wirepath_wire::build::{PayloadType, VariableFields};
use wirepath_wire::vxlan_gpe::{FLAG_NEXT, FLAG_OAM, FLAG_VNI, FLAGS_VERSION, HEADER_LEN, NextProtocol, PORT, Repr};
use wirepath_wire::{EtherType, Vni};

use super::{Carrier, HeaderTemplate, Payload, PlainHeader, TunnelHeader, TunnelKind};

/// VXLAN-GPE.
pub static KIND: TunnelKind = TunnelKind {
    name: "vxlan-gpe",
    about: "VXLAN-GPE (draft-ietf-nvo3-vxlan-gpe)",
    id_name: "VNI",
    ids: 0..=Vni::MAX,
    needs_id: true,
    carrier: Carrier::Udp(PORT),
    payloads: &[Payload::Ethernet, Payload::Ip],
    header_len: HEADER_LEN,
    rule_tunnel: None,
    write,
    parse: |_, bytes| parse(bytes),
    length: |_| Some(HEADER_LEN),
    // Version 0, VNI and next protocol, no control packet; an Ethernet frame.
    plain: Some(PlainHeader { mask: 0x3d00_00ff_0000_0000, value: 0x0c00_0003_0000_0000 }),
    match_item: Some(|id, payload| {
        let next = match payload {
            EtherType::IPV4 => NextProtocol::IPV4,
            EtherType::IPV6 => NextProtocol::IPV6,
            _ => NextProtocol::ETHERNET,
        };
        Item::new(ItemKind::VxlanGpe)
            .exact(Field::GpeFlags, (FLAG_VNI | FLAG_NEXT).into())
            .exact(Field::GpeNext, next.0.into())
            .exact(Field::GpeVni, id.unwrap_or(0).into())
    }),
    settings: None,
    sids: None,
    service: None,
};

/// Offset of the field "Next Protocol".
const NEXT: u8 = 3;

fn write(id: Option<u32>, payload: Payload, _: &[u8]) -> HeaderTemplate {
    let (next, payload_type) = match payload {
        Payload::Ethernet => (NextProtocol::ETHERNET, None),
        // The template writes the field for each packet.
        Payload::Ip => (NextProtocol(0), Some(PayloadType::NextProtocol(NEXT))),
    };
    let header = Repr { vni: Some(Vni::from_low_bits(id.unwrap_or(0))), next: Some(next), oam: false };
    let mut bytes = vec![0; HEADER_LEN];
    // There is room for the header.
    let _ = header.emit(&mut bytes);
    HeaderTemplate { bytes, variable: VariableFields { payload_type, ..VariableFields::default() } }
}

/// Reads a header. VNI and next protocol must be present (section 3.1).
fn parse(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let header: &[u8; HEADER_LEN] = bytes.first_chunk().ok_or(DropReason::BadTunnelHeader)?;
    let flags = header[0];
    // "If a receiver does not support the version indicated it MUST drop the packet."
    if flags & FLAGS_VERSION != 0 {
        return Err(DropReason::TunnelVersion);
    }
    // "When the O bit is set to 1, the packet is an OAM packet and OAM processing MUST occur." The gateway has none.
    if flags & FLAG_OAM != 0 {
        return Err(DropReason::TunnelControl);
    }
    if flags & (FLAG_VNI | FLAG_NEXT) != FLAG_VNI | FLAG_NEXT {
        return Err(DropReason::TunnelFlags);
    }
    let payload = match NextProtocol(header[usize::from(NEXT)]) {
        NextProtocol::IPV4 => EtherType::IPV4,
        NextProtocol::IPV6 => EtherType::IPV6,
        NextProtocol::ETHERNET => EtherType::TRANSPARENT_ETHERNET,
        _ => return Err(DropReason::TunnelPayload),
    };
    let id = Some(u32::from_be_bytes([0, header[4], header[5], header[6]]));
    Ok(TunnelHeader { id, len: HEADER_LEN, payload, has_checksum: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draft_section_3_1() {
        let header = |flags: u8, next: u8| [flags, 0xff, 0xff, next, 0x12, 0x34, 0x56, 0x78];
        let good = |payload| Ok(TunnelHeader { id: Some(0x12_3456), len: 8, payload, has_checksum: false });
        for (next, payload) in [(1, EtherType::IPV4), (2, EtherType::IPV6), (3, EtherType::TRANSPARENT_ETHERNET)] {
            assert_eq!(parse(&header(0x0c, next)), good(payload));
            // The B flag and reserved bits are ignored.
            assert_eq!(parse(&header(0xce, next)), good(payload));
        }
        for version in 1..4 {
            assert_eq!(parse(&header(0x0c | version << 4, 3)), Err(DropReason::TunnelVersion));
        }
        assert_eq!(parse(&header(0x0d, 3)), Err(DropReason::TunnelControl));
        assert_eq!(parse(&header(0x08, 3)), Err(DropReason::TunnelFlags), "without next protocol");
        assert_eq!(parse(&header(0x04, 3)), Err(DropReason::TunnelFlags), "without VNI");
        for next in [0, 4, 5, 6, 255] {
            assert_eq!(parse(&header(0x0c, next)), Err(DropReason::TunnelPayload), "{next}");
        }
        assert_eq!(write(Some(42), Payload::Ethernet, &[]).bytes, [0x0c, 0, 0, 3, 0, 0, 42, 0]);
        assert_eq!(write(Some(42), Payload::Ip, &[]).bytes, [0x0c, 0, 0, 0, 0, 0, 42, 0]);
    }
}
