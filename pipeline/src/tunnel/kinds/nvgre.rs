//! NVGRE (RFC 7637): GRE whose key has a virtual subnet identifier (VSID) and a byte of entropy (FlowID).

use wirepath_flow::{Field, Item, ItemKind, MaskedValue, tunnel};
use wirepath_packet::drops::DropReason;
use wirepath_wire::build::VariableFields;
use wirepath_wire::gre::{FLAG_CHECKSUM, FLAG_KEY, FLAG_SEQUENCE};
use wirepath_wire::{EtherType, IpProtocol, Vni};

use super::{Carrier, HeaderTemplate, Payload, TunnelHeader, TunnelKind, gre};

/// Length of the header: GRE with a key.
const HEADER_LEN: usize = 8;
/// Offset of the FlowID.
const FLOW_ID: u8 = 7;

/// NVGRE.
pub static KIND: TunnelKind = TunnelKind {
    name: "nvgre",
    about: "NVGRE (RFC 7637); `vni` is the virtual subnet identifier",
    id_name: "VSID",
    ids: 0..=Vni::MAX,
    needs_id: true,
    carrier: Carrier::Ip(IpProtocol::GRE),
    payloads: &[Payload::Ethernet],
    header_len: HEADER_LEN,
    rule_tunnel: Some(tunnel::GRE),
    write,
    parse: |_, bytes| parse(bytes),
    length: gre::length,
    plain: None,
    // The FlowID may have any value.
    match_item: Some(|id, payload| {
        let key = MaskedValue { value: u128::from(id.unwrap_or(0)) << 8, mask: 0xffff_ff00 };
        let item = Item::new(ItemKind::Gre).exact(Field::GreFlags, FLAG_KEY.into());
        item.exact(Field::GreProto, payload.0.into()).with(Field::GreKey, key)
    }),
    settings: None,
    sids: None,
    service: None,
};

fn write(id: Option<u32>, payload: Payload, _: &[u8]) -> HeaderTemplate {
    let mut bytes = FLAG_KEY.to_be_bytes().to_vec();
    bytes.extend(payload.ethertype(2).0.0.to_be_bytes());
    bytes.extend((id.unwrap_or(0) << 8).to_be_bytes());
    HeaderTemplate { bytes, variable: VariableFields { flow_id: Some(FLOW_ID), ..VariableFields::default() } }
}

/// Reads a header. Ethernet frames need a key, and "the C (Checksum Present) and S (Sequence Number Present) bits
/// in the GRE header MUST be zero" (section 3.2).
fn parse(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let header = gre::parse(bytes)?;
    let flags = bytes.first_chunk().map_or(0, |flags| u16::from_be_bytes(*flags));
    if header.payload == EtherType::TRANSPARENT_ETHERNET
        && flags & (FLAG_KEY | FLAG_CHECKSUM | FLAG_SEQUENCE) != FLAG_KEY
    {
        return Err(DropReason::TunnelFlags);
    }
    Ok(TunnelHeader { id: header.id.map(|key| key >> 8), ..header })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc7637_section_3_2() {
        let header = |flags: u8| [flags, 0, 0x65, 0x58, 0x12, 0x34, 0x56, 0x78, 0, 0, 0, 0, 0, 0, 0, 0];
        let payload = EtherType::TRANSPARENT_ETHERNET;
        let expected = TunnelHeader { id: Some(0x12_3456), len: 8, payload, has_checksum: false };
        assert_eq!(parse(&header(0x20)), Ok(expected));
        for flags in [0, 0x80, 0x10, 0xa0, 0x30, 0xb0, 0x60] {
            assert_eq!(parse(&header(flags)), Err(DropReason::TunnelFlags), "{flags:#x}");
        }
        let own = write(Some(0x12_3456), Payload::Ethernet, &[]);
        assert_eq!(own.bytes, [0x20, 0, 0x65, 0x58, 0x12, 0x34, 0x56, 0]);
        assert_eq!(own.variable.flow_id, Some(FLOW_ID));
    }
}
