//! GENEVE (RFC 8926) with Ethernet frames or IP packets.
//!
//! The gateway knows no option. It skips options that are not critical, and drops packets with a critical one.

use std::str::FromStr;

use wirepath_flow::{Field, Item, ItemKind, tunnel};
use wirepath_packet::drops::DropReason;
use wirepath_settings::{ConfigError, ConfigTable, Integer, Key, Parsed, Required, Settings, Written};
use wirepath_wire::build::VariableFields;
use wirepath_wire::geneve::{FLAG_CONTROL, OptionTlv, Options, Repr};
use wirepath_wire::{EtherType, Vni, geneve};

use super::{Carrier, HeaderTemplate, KindSettings, Payload, PlainHeader, TunnelHeader, TunnelKind};

/// GENEVE.
pub static KIND: TunnelKind = TunnelKind {
    name: "geneve",
    about: "GENEVE (RFC 8926)",
    id_name: "VNI",
    ids: 0..=Vni::MAX,
    needs_id: true,
    carrier: Carrier::Udp(geneve::PORT),
    payloads: &[Payload::Ethernet, Payload::Ip],
    header_len: geneve::HEADER_LEN,
    rule_tunnel: Some(tunnel::GENEVE),
    write,
    parse: |_, bytes| parse(bytes),
    length: |header| Some(geneve::HEADER_LEN + usize::from(header.first()? & 0x3f) * 4),
    // Version 0, no options, no control packet, no critical options, Ethernet. Reserved bits are ignored.
    plain: Some(PlainHeader { mask: 0xffc0_ffff_0000_0000, value: 0x0000_6558_0000_0000 }),
    // A NIC does not look into options. Without them, the C flag announces nothing.
    match_item: Some(|id, payload| {
        Item::new(ItemKind::Geneve)
            .exact(Field::GeneveVni, id.unwrap_or(0).into())
            .exact(Field::GeneveProto, payload.0.into())
            .exact(Field::GeneveOptLen, 0)
            .exact(Field::GeneveOam, 0)
    }),
    settings: Some(KindSettings { table: &OPTIONS, read }),
    sids: None,
    service: None,
};

/// Bit of an option's type that marks a critical option (section 3.5).
const CRITICAL: u8 = 0x80;
/// Maximum length of configured options in bytes. It keeps the outer headers within the length of flow rules.
const MAX_OPTIONS: usize = 96;

const CLASS: Key<Required<Integer<u16>>> =
    Key::integer("class", 0..=0xffff).required().about("Class of the option: the namespace of its type.");
const TYPE: Key<Required<Integer<u8>>> =
    Key::integer("type", 0..=0xff).required().about("Type within the class. From 128 on, the option is critical.");
const DATA: Key<Parsed<Hex>> = Key::parsed("data", "hexadecimal digits, such as \"0a0b0c0d\"")
    .absent("an option without data")
    .about("Value of the option: a multiple of 4 bytes, at most 92.");

/// Description of the list `geneve_options` in a table `[[segment]]`.
static OPTIONS: ConfigTable = ConfigTable {
    name: "geneve_options",
    written: Written::InlineList,
    about: "Options of all sent packets, for kind = \"geneve\"; at most 96 bytes, of which 4 for each option's header.",
    absent: "none",
    keys: &[&CLASS, &TYPE, &DATA],
    example: "geneve_options = [{ class = 0x0102, type = 1, data = \"0a0b0c0d\" }]\n",
    ..ConfigTable::EMPTY
};

/// Bytes in hexadecimal digits.
struct Hex(Vec<u8>);

impl FromStr for Hex {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if !text.is_ascii() || !text.len().is_multiple_of(2) {
            return Err(());
        }
        let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
        (0..text.len()).step_by(2).map(byte).collect::<Option<_>>().map(Self).ok_or(())
    }
}

fn read(segment: &Settings<'_>, _: Payload) -> Result<Box<[u8]>, ConfigError> {
    let mut options = Vec::new();
    segment.read_tables(&OPTIONS, |table| {
        let data = table.read(&DATA)?.map_or(Vec::new(), |data| data.0);
        let option = OptionTlv { class: table.read(&CLASS)?, kind: table.read(&TYPE)?, value: &data };
        if !data.len().is_multiple_of(4) {
            let message = format!("found {} bytes, expected a multiple of 4", data.len());
            return Err(table.error_in(&DATA, message));
        }
        let mut room = [0; geneve::OPTION_HEADER_LEN + 124];
        let len = option.emit(&mut room).unwrap_or(room.len());
        options.extend_from_slice(room.get(..len).unwrap_or(&room));
        if options.len() > MAX_OPTIONS || len != geneve::OPTION_HEADER_LEN + data.len() {
            let message = format!("found options of {} bytes, expected at most {MAX_OPTIONS}", options.len());
            return Err(table.error(message));
        }
        Ok(())
    })?;
    Ok(options.into())
}

/// If an option is critical, the C flag is set (section 3.5).
fn write(id: Option<u32>, payload: Payload, options: &[u8]) -> HeaderTemplate {
    let critical = Options::of(options).flatten().any(|option| option.kind & CRITICAL != 0);
    let (protocol, payload_type) = payload.ethertype(2);
    let header = Repr {
        vni: Vni::from_low_bits(id.unwrap_or(0)),
        protocol,
        options_len: options.len() as u8,
        control: false,
        critical,
    };
    let mut bytes = vec![0; geneve::HEADER_LEN];
    // There is room for the header.
    let _ = header.emit(&mut bytes);
    bytes.extend_from_slice(options);
    HeaderTemplate { bytes, variable: VariableFields { payload_type, ..VariableFields::default() } }
}

fn parse(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let header: &[u8; geneve::HEADER_LEN] = bytes.first_chunk().ok_or(DropReason::BadTunnelHeader)?;
    // "Packets received by a tunnel endpoint with an unknown version MUST be dropped" (section 3.4).
    if header[0] >> 6 != 0 {
        return Err(DropReason::TunnelVersion);
    }
    let len = geneve::HEADER_LEN + usize::from(header[0] & 0x3f) * 4;
    let options = bytes.get(geneve::HEADER_LEN..len).ok_or(DropReason::BadTunnelHeader)?;
    // "The endpoint MUST NOT forward the payload" of a control packet (section 3.4).
    if header[1] & FLAG_CONTROL != 0 {
        return Err(DropReason::TunnelControl);
    }
    // The list is searched even without the C flag, which announces critical options.
    for option in Options::of(options) {
        let option = option.map_err(|_| DropReason::BadTunnelHeader)?;
        // "If the receiving tunnel endpoint does not recognize the option and this bit is set, then the packet MUST be
        // dropped" (section 3.5).
        if option.kind & CRITICAL != 0 {
            return Err(DropReason::CriticalOption);
        }
    }
    let id = Some(u32::from_be_bytes([0, header[4], header[5], header[6]]));
    let payload = EtherType(u16::from_be_bytes([header[2], header[3]]));
    Ok(TunnelHeader { id, len, payload, has_checksum: false })
}

#[cfg(test)]
mod tests {
    use wirepath_wire::geneve::FLAG_CRITICAL;

    use super::*;

    fn header(first: u8, flags: u8, options: &[u8]) -> Vec<u8> {
        let mut bytes = vec![first | (options.len() / 4) as u8, flags, 0x65, 0x58, 0x12, 0x34, 0x56, 0x99];
        bytes.extend(options);
        bytes
    }

    #[test]
    fn rfc8926_section_3_4() {
        let payload = EtherType::TRANSPARENT_ETHERNET;
        let expected = |len| Ok(TunnelHeader { id: Some(0x12_3456), len, payload, has_checksum: false });
        assert_eq!(parse(&header(0, 0x3f, &[])), expected(8), "reserved bits are ignored");
        assert_eq!(parse(&header(0, 0, &[1, 2, 3, 0, 1, 2, 0x7f, 0xe1, 9, 9, 9, 9])), expected(20));
        for version in 1..4 {
            assert_eq!(parse(&header(version << 6, 0, &[])), Err(DropReason::TunnelVersion));
        }
        assert_eq!(parse(&header(0, FLAG_CONTROL, &[])), Err(DropReason::TunnelControl));
        assert_eq!(parse(&header(1, 0, &[])), Err(DropReason::BadTunnelHeader), "options behind the packet's end");
        assert_eq!(parse(&header(0, FLAG_CRITICAL, &[1, 2, 3, 0])), expected(12), "no option is critical");
    }

    #[test]
    fn rfc8926_section_3_5() {
        for flags in [0, FLAG_CRITICAL] {
            assert_eq!(parse(&header(0, flags, &[1, 2, 0x80, 0])), Err(DropReason::CriticalOption));
            let second = [1, 2, 3, 1, 0, 0, 0, 0, 1, 2, 0x83, 0];
            assert_eq!(parse(&header(0, flags, &second)), Err(DropReason::CriticalOption));
        }
        assert_eq!(parse(&header(0, 0, &[1, 2, 3, 1])), Err(DropReason::BadTunnelHeader), "an option without its data");
        let start = |options| write(Some(1), Payload::Ethernet, options).bytes[..2].to_vec();
        assert_eq!(start(&[1, 2, 3, 0]), [1, 0]);
        assert_eq!(start(&[1, 2, 0x83, 0]), [1, FLAG_CRITICAL]);
    }
}
