//! GRE (RFC 2784, RFC 2890) with Ethernet frames or IP packets, as the devices "gretap" and "gre" of Linux.
//!
//! The identifier of a segment is the key; a segment without an identifier sends and takes packets without a key. A
//! checksum of a received packet is verified. Sequence numbers of received packets are not: RFC 2890 section 2.2 would
//! have packets dropped that overtook others, but the frames of a network need no order.

use wirepath_flow::{Field, Item, ItemKind, tunnel};
use wirepath_packet::drops::DropReason;
use wirepath_settings::{ConfigError, ConfigTable, Flag, Key, Settings, WithDefault};
use wirepath_wire::build::VariableFields;
use wirepath_wire::gre::{self, FLAG_CHECKSUM, FLAG_KEY, FLAG_SEQUENCE, MUST_BE_ZERO, VERSION};
use wirepath_wire::{EtherType, IpProtocol};

use super::{Carrier, HeaderTemplate, KindSettings, Payload, TunnelHeader, TunnelKind};

/// GRE with Ethernet frames.
pub static GRETAP: TunnelKind = TunnelKind {
    name: "gretap",
    about: "GRE with Ethernet frames (RFC 2784, RFC 2890); `vni` is the key",
    id_name: "key",
    ids: 0..=u32::MAX,
    needs_id: false,
    carrier: Carrier::Ip(IpProtocol::GRE),
    payloads: &[Payload::Ethernet],
    header_len: gre::HEADER_LEN,
    rule_tunnel: Some(tunnel::GRE),
    write,
    parse: |_, bytes| parse(bytes),
    length,
    plain: None,
    match_item: Some(match_item),
    settings: Some(KindSettings { table: &SETTINGS, read }),
    sids: None,
    service: None,
};

/// GRE with IP packets.
pub static GRE: TunnelKind = TunnelKind {
    name: "gre",
    about: "GRE with IP packets (RFC 2784, RFC 2890); `vni` is the key",
    id_name: "key",
    ids: 0..=u32::MAX,
    needs_id: false,
    carrier: Carrier::Ip(IpProtocol::GRE),
    payloads: &[Payload::Ip],
    header_len: gre::HEADER_LEN,
    rule_tunnel: Some(tunnel::GRE),
    write,
    parse: |_, bytes| parse(bytes),
    length,
    plain: None,
    match_item: Some(match_item),
    settings: Some(KindSettings { table: &SETTINGS, read }),
    sids: None,
    service: None,
};

const CHECKSUM: Key<WithDefault<Flag>> =
    Key::flag("checksum").default(false).about("Sends a checksum over GRE header and frame (RFC 2784).");
const SEQUENCE: Key<WithDefault<Flag>> = Key::flag("sequence")
    .default(false)
    .about("Sends sequence numbers (RFC 2890), which count for each remote. Use one worker: see the guide.");

/// Description of the table `gre` in a table `[[segment]]`.
static SETTINGS: ConfigTable = ConfigTable {
    name: "gre",
    about: "Optional fields of all sent GRE headers, as in `gre = { checksum = true }`.",
    absent: "none of them",
    keys: &[&CHECKSUM, &SEQUENCE],
    example: "[segment.gre]\nchecksum = true\n",
    ..ConfigTable::EMPTY
};

/// Returns the optional fields as one byte, the first one of a GRE header; no byte without them.
fn read(segment: &Settings<'_>, _: Payload) -> Result<Box<[u8]>, ConfigError> {
    segment.read_table(&SETTINGS, |table| {
        let checksum = if table.read(&CHECKSUM)? { FLAG_CHECKSUM } else { 0 };
        let sequence = if table.read(&SEQUENCE)? { FLAG_SEQUENCE } else { 0 };
        let [flags, _] = (checksum | sequence).to_be_bytes();
        Ok(if flags == 0 { Box::default() } else { Box::from([flags]) })
    })
}

/// The flags are exact: a NIC verifies no checksum.
fn match_item(id: Option<u32>, payload: EtherType) -> Item {
    let item = Item::new(ItemKind::Gre).exact(Field::GreProto, payload.0.into());
    match id {
        Some(key) => item.exact(Field::GreFlags, FLAG_KEY.into()).exact(Field::GreKey, key.into()),
        None => item.exact(Field::GreFlags, 0),
    }
}

fn write(id: Option<u32>, payload: Payload, options: &[u8]) -> HeaderTemplate {
    let optional = u16::from_be_bytes([options.first().copied().unwrap_or(0), 0]) & (FLAG_CHECKSUM | FLAG_SEQUENCE);
    let flags = optional | if id.is_some() { FLAG_KEY } else { 0 };
    let mut bytes = flags.to_be_bytes().to_vec();
    let (protocol, payload_type) = payload.ethertype(2);
    bytes.extend(protocol.0.to_be_bytes());
    let mut variable = VariableFields { payload_type, ..VariableFields::default() };
    if flags & FLAG_CHECKSUM != 0 {
        variable.checksum = Some(bytes.len() as u8);
        bytes.extend([0; 4]);
    }
    bytes.extend(id.iter().flat_map(|key| key.to_be_bytes()));
    if flags & FLAG_SEQUENCE != 0 {
        variable.sequence = Some(bytes.len() as u8);
        bytes.extend([0; 4]);
    }
    HeaderTemplate { bytes, variable }
}

/// Reads a header of any kind of GRE. The identifier is the key.
pub(super) fn parse(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let header: &[u8; gre::HEADER_LEN] = bytes.first_chunk().ok_or(DropReason::BadTunnelHeader)?;
    let flags = u16::from_be_bytes([header[0], header[1]]);
    // RFC 2784 section 2.3.1: "The Version Number field MUST contain the value zero."
    if flags & VERSION != 0 {
        return Err(DropReason::TunnelVersion);
    }
    // "A receiver MUST discard a packet where any of the bits 1-5 are non-zero, unless that receiver implements RFC
    // 1701" (section 2.3). RFC 2890 uses two of them. Bits 6 to 12 are ignored.
    if flags & MUST_BE_ZERO != 0 {
        return Err(DropReason::TunnelFlags);
    }
    let len = gre::HEADER_LEN + gre::options_len(flags);
    let header = bytes.get(..len).ok_or(DropReason::BadTunnelHeader)?;
    let word = |at: usize| header.get(at..)?.first_chunk().map(|word| u32::from_be_bytes(*word));
    let payload = EtherType(u16::from_be_bytes([header[2], header[3]]));
    let id = gre::key_offset(flags).and_then(word);
    Ok(TunnelHeader { id, len, payload, has_checksum: flags & FLAG_CHECKSUM != 0 })
}

/// Returns the length of a header; `None` for headers that do not define it (RFC 2784 section 2.3).
pub(super) fn length(bytes: &[u8]) -> Option<usize> {
    let flags = u16::from_be_bytes(*bytes.first_chunk()?);
    (flags & MUST_BE_ZERO == 0).then(|| gre::HEADER_LEN + gre::options_len(flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETHERNET: EtherType = EtherType::TRANSPARENT_ETHERNET;

    #[test]
    fn rfc2784_section_2_3() {
        let header = |flags: u16| [&flags.to_be_bytes()[..], &[0x65, 0x58, 1, 2, 3, 4]].concat();
        for bit in 1..16 {
            let flag = 0x8000 >> bit;
            let expected = match bit {
                // The key and the sequence number of RFC 2890.
                2 => Ok(TunnelHeader { id: Some(0x0102_0304), len: 8, payload: ETHERNET, has_checksum: false }),
                3 => Ok(TunnelHeader { id: None, len: 8, payload: ETHERNET, has_checksum: false }),
                1 | 4 | 5 => Err(DropReason::TunnelFlags),
                6..13 => Ok(TunnelHeader { id: None, len: 4, payload: ETHERNET, has_checksum: false }),
                _ => Err(DropReason::TunnelVersion),
            };
            assert_eq!(parse(&header(flag)), expected, "bit {bit}");
        }
        let expected = TunnelHeader { id: None, len: 8, payload: ETHERNET, has_checksum: true };
        assert_eq!(parse(&header(FLAG_CHECKSUM)), Ok(expected));
        assert_eq!(parse(&header(FLAG_CHECKSUM | FLAG_KEY)), Err(DropReason::BadTunnelHeader), "the key is missing");
    }

    #[test]
    fn optional_fields_are_in_the_order_of_rfc2890() {
        let bytes = |key, options: &[u8]| write(key, Payload::Ethernet, options).bytes;
        assert_eq!(bytes(None, &[]), [0, 0, 0x65, 0x58]);
        assert_eq!(bytes(Some(0x0a0b_0c0d), &[]), [0x20, 0, 0x65, 0x58, 10, 11, 12, 13]);
        let all = write(Some(0x0a0b_0c0d), Payload::Ethernet, &[0x90]);
        assert_eq!(all.bytes, [0xb0, 0, 0x65, 0x58, 0, 0, 0, 0, 10, 11, 12, 13, 0, 0, 0, 0]);
        assert_eq!((all.variable.checksum, all.variable.sequence), (Some(4), Some(12)));
        assert_eq!(write(None, Payload::Ethernet, &[0x10]).variable.sequence, Some(4));
        for options in [&[][..], &[0x80], &[0x10], &[0x90]] {
            for key in [None, Some(7)] {
                let header = parse(&bytes(key, options)).unwrap();
                assert_eq!((header.id, header.len), (key, bytes(key, options).len()));
                assert_eq!(header.has_checksum, options.first().is_some_and(|flags| flags & 0x80 != 0));
            }
        }
    }
}
