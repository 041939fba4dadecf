//! MPLS over UDP (RFC 7510) and over GRE (RFC 4023), with Ethernet frames or IP packets.
//!
//! The identifier of a segment is its label, the same in both directions. A label stack does not name its payload: the
//! segment of the label does (`Service`). Ethernet frames form a pseudowire (RFC 4448), by default with a control
//! word (RFC 4385, RFC 8469). IP packets follow the label, and their first four bits are the version (RFC 4928
//! section 2).
//!
//! The label's TTL and that of the packet inside are independent (pipe model, RFC 3443 section 3). The traffic class is
//! 0 in sent labels and ignored in received ones. There is no DTLS (RFC 7510 section 6).

use std::ops::RangeInclusive;

use wirepath_packet::drops::DropReason;
use wirepath_settings::{ConfigError, ConfigTable, Flag, Key, Settings, WithDefault};
use wirepath_wire::build::{PayloadType, VariableFields};
use wirepath_wire::mpls::{self, Entries, Repr};
use wirepath_wire::{EtherType, IpProtocol, gre};

use super::{Carrier, HeaderTemplate, KindSettings, Payload, TunnelHeader, TunnelKind};

/// MPLS over UDP.
pub static UDP: TunnelKind = TunnelKind {
    name: "mpls-udp",
    about: "MPLS over UDP (RFC 7510); `vni` is the label",
    id_name: "label",
    ids: LABELS,
    needs_id: true,
    carrier: Carrier::Udp(mpls::PORT),
    payloads: &[Payload::Ethernet, Payload::Ip],
    header_len: mpls::HEADER_LEN,
    rule_tunnel: None,
    write: |label, payload, options| write(&[], label, payload, options),
    parse: |_, bytes| parse_stack(bytes),
    length: stack_length,
    plain: None,
    match_item: None,
    settings: Some(KindSettings { table: &SETTINGS, read }),
    sids: None,
    service: Some(Service::new),
};

/// MPLS over GRE.
pub static GRE: TunnelKind = TunnelKind {
    name: "mpls-gre",
    about: "MPLS over GRE (RFC 4023); `vni` is the label",
    id_name: "label",
    ids: LABELS,
    needs_id: true,
    carrier: Carrier::Ip(IpProtocol::GRE),
    payloads: &[Payload::Ethernet, Payload::Ip],
    header_len: gre::HEADER_LEN + mpls::HEADER_LEN,
    rule_tunnel: None,
    write: |label, payload, options| write(&GRE_HEADER, label, payload, options),
    parse: |_, bytes| parse_gre(bytes),
    length: |bytes| {
        let start = super::gre::length(bytes)?;
        Some(start + stack_length(bytes.get(start..)?)?)
    },
    plain: None,
    match_item: None,
    settings: Some(KindSettings { table: &SETTINGS, read }),
    sids: None,
    service: Some(Service::new),
};

/// Labels of segments. Those below are for special purposes (RFC 3032 section 2.1, RFC 7274).
const LABELS: RangeInclusive<u32> = 16..=0xf_ffff;
/// Labels that may precede that of a segment: explicit null of IPv4 and IPv6 (RFC 3032 section 2.1, RFC 4182).
const EXPLICIT_NULL: [u32; 2] = [0, 2];
/// TTL of sent labels.
const TTL: u8 = 64;
/// GRE header without optional fields, for labels that the receiver has assigned.
const GRE_HEADER: [u8; gre::HEADER_LEN] = [0, 0, 0x88, 0x47];
/// Length of the control word (RFC 4385 section 3).
const CONTROL_WORD_LEN: usize = 4;

const CONTROL_WORD: Key<WithDefault<Flag>> = Key::flag("control_word")
    .default(true)
    .about("Sends and expects a control word in front of Ethernet frames (RFC 4448 section 4.6). Both ends are alike.");

/// Description of the table `mpls` in a table `[[segment]]`.
static SETTINGS: ConfigTable = ConfigTable {
    name: "mpls",
    about: "Form of pseudowires, for kind = \"mpls-udp\" and \"mpls-gre\" with Ethernet frames.",
    absent: "with control word",
    keys: &[&CONTROL_WORD],
    example: "[segment.mpls]\ncontrol_word = false\n",
    ..ConfigTable::EMPTY
};

/// Returns one byte, which is 0 without control word; no byte with it.
fn read(segment: &Settings<'_>, payload: Payload) -> Result<Box<[u8]>, ConfigError> {
    segment.read_table(&SETTINGS, |table| {
        let has_control_word = table.read(&CONTROL_WORD)?;
        if payload == Payload::Ip && table.has(CONTROL_WORD.name()) {
            let message = "found in a segment with IP packets, expected in one with Ethernet frames";
            table.record(table.error_in(&CONTROL_WORD, message));
        }
        Ok(if has_control_word { Box::default() } else { Box::from([0]) })
    })
}

/// Service of a label: what follows it in the packets of its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    payload: Payload,
    has_control_word: bool,
}

impl Service {
    /// Returns the service of a segment with this payload and options.
    fn new(payload: Payload, options: &[u8]) -> Self {
        Self { payload, has_control_word: payload == Payload::Ethernet && options.first() != Some(&0) }
    }

    /// Completes a header whose label stack has been read. `bytes` begin with the header.
    pub(crate) fn complete(self, header: TunnelHeader, bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
        let inner = bytes.get(header.len..).unwrap_or_default();
        match self.payload {
            Payload::Ethernet => {
                let word = if self.has_control_word { check_control_word(inner)? } else { 0 };
                Ok(TunnelHeader { len: header.len + word, payload: EtherType::TRANSPARENT_ETHERNET, ..header })
            }
            Payload::Ip => match inner.first().map(|byte| byte >> 4) {
                Some(4) => Ok(TunnelHeader { payload: EtherType::IPV4, ..header }),
                Some(6) => Ok(TunnelHeader { payload: EtherType::IPV6, ..header }),
                Some(_) => Err(DropReason::BadVersion),
                None => Err(DropReason::Truncated),
            },
        }
    }
}

/// Checks a control word and returns its length. The sequence number is ignored: the frames of a network need no order.
fn check_control_word(bytes: &[u8]) -> Result<usize, DropReason> {
    let word: &[u8; CONTROL_WORD_LEN] = bytes.first_chunk().ok_or(DropReason::BadTunnelHeader)?;
    match word[0] >> 4 {
        0 => Ok(CONTROL_WORD_LEN),
        // The associated channel header (RFC 4385 section 5).
        1 => Err(DropReason::TunnelControl),
        _ => Err(DropReason::ControlWord),
    }
}

/// Writes the label of a segment behind `front`, and a control word if the segment has one.
fn write(front: &[u8], label: Option<u32>, payload: Payload, options: &[u8]) -> HeaderTemplate {
    let entry = Repr { label: label.unwrap_or_default(), traffic_class: 0, bottom: true, ttl: TTL };
    let mut bytes = [front, &[0; mpls::HEADER_LEN]].concat();
    // There is room for the entry.
    let _ = entry.emit(bytes.get_mut(front.len()..).unwrap_or_default());
    if Service::new(payload, options).has_control_word {
        bytes.extend([0; CONTROL_WORD_LEN]);
    }
    let payload_type = (payload == Payload::Ip).then_some(PayloadType::InnerVersion);
    HeaderTemplate { bytes, variable: VariableFields { payload_type, ..VariableFields::default() } }
}

/// Reads a label stack: the label of a segment, perhaps below an explicit null. The type of the payload is MPLS.
fn parse_stack(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let mut entries = Entries::of(bytes);
    let mut entry = next_entry(&mut entries)?;
    if EXPLICIT_NULL.contains(&entry.label) && !entry.bottom {
        entry = next_entry(&mut entries)?;
    }
    if !LABELS.contains(&entry.label) {
        return Err(DropReason::ReservedLabel);
    }
    if !entry.bottom {
        return Err(DropReason::LabelStack);
    }
    let len = bytes.len() - entries.rest().len();
    Ok(TunnelHeader { id: Some(entry.label), len, payload: EtherType::MPLS, has_checksum: false })
}

/// Removes an entry. "If the outgoing TTL of a labeled packet is 0, then the labeled packet MUST NOT be further
/// forwarded; nor may the label stack be stripped off and the packet forwarded as an unlabeled packet." It is one less
/// than the incoming TTL (RFC 3032 section 2.4.2).
fn next_entry(entries: &mut Entries<'_>) -> Result<Repr, DropReason> {
    let entry = entries.next().and_then(Result::ok).ok_or(DropReason::BadTunnelHeader)?;
    if entry.ttl <= 1 { Err(DropReason::LabelTtl) } else { Ok(entry) }
}

/// Reads a GRE header and the label stack behind it. Packets of other kinds of GRE have no label. Labels with the
/// EtherType [`EtherType::MPLS_UPSTREAM`] are no labels of the gateway: the sender has assigned them (RFC 5332).
fn parse_gre(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let header = super::gre::parse(bytes)?;
    if header.payload != EtherType::MPLS {
        return Ok(header);
    }
    // No segment has a key.
    if header.id.is_some() {
        return Err(DropReason::TunnelFlags);
    }
    let stack = parse_stack(bytes.get(header.len..).unwrap_or_default())?;
    Ok(TunnelHeader { len: header.len + stack.len, has_checksum: header.has_checksum, ..stack })
}

/// Returns the length of a label stack; `None` if it does not end.
fn stack_length(bytes: &[u8]) -> Option<usize> {
    let mut entries = Entries::of(bytes);
    let last = entries.by_ref().last()?;
    last.is_ok().then(|| bytes.len() - entries.rest().len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: Service = Service { payload: Payload::Ethernet, has_control_word: true };
    const BARE_FRAMES: Service = Service { payload: Payload::Ethernet, has_control_word: false };
    const PACKETS: Service = Service { payload: Payload::Ip, has_control_word: false };

    /// Returns label stack entries of label, bottom of stack and TTL.
    fn stack(entries: &[(u32, bool, u8)]) -> Vec<u8> {
        let entry = |&(label, bottom, ttl): &(u32, bool, u8)| {
            let mut bytes = [0; mpls::HEADER_LEN];
            Repr { label, traffic_class: 5, bottom, ttl }.emit(&mut bytes).unwrap();
            bytes
        };
        entries.iter().flat_map(entry).collect()
    }

    fn found(id: u32, len: usize) -> Result<TunnelHeader, DropReason> {
        Ok(TunnelHeader { id: Some(id), len, payload: EtherType::MPLS, has_checksum: false })
    }

    #[test]
    fn stacks_are_judged() {
        for label in [16, 42, 0xf_ffff] {
            assert_eq!(parse_stack(&stack(&[(label, true, 64)])), found(label, 4));
            for null in [0, 2] {
                assert_eq!(parse_stack(&stack(&[(null, false, 64), (label, true, 2)])), found(label, 8));
            }
        }
        for (entries, reason) in [
            (&[(42, false, 64), (43, true, 64)][..], DropReason::LabelStack),
            (&[(42, false, 64)], DropReason::LabelStack),
            (&[(0, false, 64), (42, false, 64), (43, true, 64)], DropReason::LabelStack),
            (&[(0, false, 64)], DropReason::BadTunnelHeader),
            (&[(0, true, 64)], DropReason::ReservedLabel),
            (&[(0, false, 64), (2, false, 64), (42, true, 64)], DropReason::ReservedLabel),
            (&[(42, true, 0)], DropReason::LabelTtl),
            (&[(42, true, 1)], DropReason::LabelTtl),
            (&[(0, false, 1), (42, true, 64)], DropReason::LabelTtl),
            (&[(0, false, 64), (42, true, 1)], DropReason::LabelTtl),
        ] {
            assert_eq!(parse_stack(&stack(entries)), Err(reason), "{entries:?}");
        }
        for label in (1..16).filter(|label| *label != 2) {
            for bottom in [false, true] {
                let entries = [(label, bottom, 64), (42, true, 64)];
                assert_eq!(parse_stack(&stack(&entries)), Err(DropReason::ReservedLabel), "{label}");
            }
        }
        for cut in 0..4 {
            assert_eq!(parse_stack(&stack(&[(42, true, 64)])[..cut]), Err(DropReason::BadTunnelHeader));
        }
    }

    /// GRE with optional fields; packets of other kinds; labels of the sender.
    #[test]
    fn gre_headers_are_judged() {
        let with = |gre: &[u8]| parse_gre(&[gre, &stack(&[(42, true, 64)])].concat());
        assert_eq!(with(&[0, 0, 0x88, 0x47]), found(42, 8));
        assert_eq!(with(&[0x10, 0, 0x88, 0x47, 0, 0, 0, 1]), found(42, 12));
        let checked = with(&[0x80, 0, 0x88, 0x47, 0, 0, 0, 0]);
        assert_eq!(checked, found(42, 12).map(|header| TunnelHeader { has_checksum: true, ..header }));
        assert_eq!(with(&[0x20, 0, 0x88, 0x47, 0, 0, 0, 1]), Err(DropReason::TunnelFlags));
        assert_eq!(with(&[0, 1, 0x88, 0x47]), Err(DropReason::TunnelVersion));
        for protocol in [[0x88, 0x48], [0x08, 0x00], [0x65, 0x58]] {
            let header = with(&[0, 0, protocol[0], protocol[1]]).unwrap();
            assert!(!GRE.takes(header.payload), "{protocol:?}");
        }
    }

    #[test]
    fn payloads_are_judged() {
        let complete = |service: Service, inner: &[u8]| {
            let bytes = [&stack(&[(42, true, 64)]), inner].concat();
            let header = service.complete(parse_stack(&bytes).unwrap(), &bytes)?;
            Ok((header.payload, header.len))
        };
        let ethernet = EtherType::TRANSPARENT_ETHERNET;
        assert_eq!(complete(FRAMES, &[0, 0, 0, 0, 2, 2]), Ok((ethernet, 8)));
        // Reserved bits and the sequence number.
        assert_eq!(complete(FRAMES, &[0x0f, 0xff, 0xff, 0xff, 2, 2]), Ok((ethernet, 8)));
        assert_eq!(complete(FRAMES, &[0x10, 0, 0, 0x21, 0x45, 0]), Err(DropReason::TunnelControl));
        for nibble in 2..16 {
            assert_eq!(complete(FRAMES, &[nibble << 4, 0, 0, 0]), Err(DropReason::ControlWord));
        }
        assert_eq!(complete(FRAMES, &[0, 0, 0]), Err(DropReason::BadTunnelHeader));
        assert_eq!(complete(BARE_FRAMES, &[0x16, 2]), Ok((ethernet, 4)));
        assert_eq!(complete(PACKETS, &[0x45]), Ok((EtherType::IPV4, 4)));
        assert_eq!(complete(PACKETS, &[0x60]), Ok((EtherType::IPV6, 4)));
        assert_eq!(complete(PACKETS, &[]), Err(DropReason::Truncated));
        for nibble in (0..16).filter(|nibble| ![4, 6].contains(nibble)) {
            assert_eq!(complete(PACKETS, &[nibble << 4]), Err(DropReason::BadVersion));
        }
    }

    #[test]
    fn own_headers_are_read() {
        for kind in [&UDP, &GRE] {
            for (payload, options, len) in
                [(Payload::Ethernet, &[][..], 8), (Payload::Ethernet, &[0], 4), (Payload::Ip, &[], 4)]
            {
                let header = (kind.write)(Some(0xabcde), payload, options);
                assert_eq!(header.bytes.len(), kind.header_len - 4 + len, "{}", kind.name);
                let inner = if payload == Payload::Ip { 0x45 } else { 0x02 };
                let bytes = [&header.bytes[..], &[inner; 20]].concat();
                let parsed = (kind.parse)(IpProtocol::UDP, &bytes).unwrap();
                assert_eq!((parsed.id, parsed.payload), (Some(0xabcde), EtherType::MPLS));
                assert!(kind.takes(parsed.payload));
                assert_eq!((kind.length)(&bytes), Some(kind.header_len));
                let complete = Service::new(payload, options).complete(parsed, &bytes).unwrap();
                assert_eq!((complete.len, Payload::of(complete.payload)), (header.bytes.len(), Some(payload)));
            }
        }
        assert_eq!(stack_length(&stack(&[(42, false, 64), (43, false, 64)])), None);
    }
}
