//! SRv6: IPv6 whose destination is a segment identifier (SID), with the segment routing header (SRH, RFC 8754).
//!
//! A policy is a list of SIDs. Sent packets visit them in order (H.Encaps and H.Encaps.L2, RFC 8986 section 5), and the
//! last one decapsulates. Received packets have a SID of the gateway as their destination. Its behaviour is End.DT4,
//! End.DT6, End.DT46 or End.DX2 (section 4). The gateway is the last node of a path: packets with further segments are
//! dropped. Keyed hashes (HMAC TLV, RFC 8754 section 2.1.2) are neither sent nor verified.

use std::net::Ipv6Addr;

use wirepath_packet::drops::DropReason;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Key, List, Parsed, Required, Settings, WithDefault};
use wirepath_wire::build::{PayloadType, VariableFields};
use wirepath_wire::srh::{self, SID_LEN};
use wirepath_wire::{EtherType, IpProtocol, ipv6};

use super::{Carrier, HeaderTemplate, KindSettings, Payload, Sids, TunnelHeader, TunnelKind};
use crate::tunnel::underlay::is_host_address;

/// SRv6.
pub static KIND: TunnelKind = TunnelKind {
    name: "srv6",
    about: "SRv6 (RFC 8754, RFC 8986), over IPv6; the table `srv6` has the SIDs",
    id_name: "SID",
    ids: 0..=0,
    needs_id: false,
    carrier: Carrier::Srv6,
    payloads: &[Payload::Ethernet, Payload::Ip],
    header_len: 0,
    rule_tunnel: None,
    write,
    parse,
    length: |_| Some(0),
    plain: None,
    match_item: None,
    settings: Some(KindSettings { table: &SETTINGS, read }),
    sids: Some(|options| Policy::decode(options).map(|policy| policy.sids())),
    service: None,
};

/// Maximum number of SIDs in a segment routing header. With more, the outer headers would not fit the headroom of a
/// buffer.
const MAX_LISTED: usize = 7;

/// Behaviour of the gateway at its SID (RFC 8986 section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Decapsulates IPv4 packets and routes them.
    EndDt4,
    /// Decapsulates IPv6 packets and routes them.
    EndDt6,
    /// Decapsulates IPv4 and IPv6 packets and routes them.
    EndDt46,
    /// Decapsulates Ethernet frames.
    EndDx2,
}

impl Behaviour {
    const ALL: [Self; 4] = [Self::EndDt4, Self::EndDt6, Self::EndDt46, Self::EndDx2];

    /// Returns whether the behaviour takes packets with this payload.
    pub fn takes(self, payload: EtherType) -> bool {
        match self {
            Self::EndDt4 => payload == EtherType::IPV4,
            Self::EndDt6 => payload == EtherType::IPV6,
            Self::EndDt46 => payload == EtherType::IPV4 || payload == EtherType::IPV6,
            Self::EndDx2 => payload == EtherType::TRANSPARENT_ETHERNET,
        }
    }
}

const LOCAL_SID: Key<Required<Parsed<Ipv6Addr>>> = Key::parsed("local_sid", "an IPv6 address").required().about(
    "SID of the gateway: destination address of received packets. No other segment and no address of the underlay \
         is equal.",
);
const BEHAVIOUR: Key<Choice<Behaviour>> = Key::choice(
    "behaviour",
    &[
        ("end.dt46", Behaviour::EndDt46, "routes IPv4 and IPv6 packets"),
        ("end.dt4", Behaviour::EndDt4, "routes IPv4 packets and drops others"),
        ("end.dt6", Behaviour::EndDt6, "routes IPv6 packets and drops others"),
    ],
)
.absent("\"end.dt46\"; for payload = \"ethernet\" End.DX2, the only one")
.about("What the gateway does with packets to `local_sid`, for payload = \"ip\" (RFC 8986 section 4).");
const SEGS: Key<List<Parsed<Ipv6Addr>>> =
    Key::parsed("segs", "an IPv6 address").list().absent("an error: at least one SID is needed").about(
        "SIDs that sent packets visit, in this order, as in `ip route add ... encap seg6 ... segs`. The last one is \
         that of the remote. At most 7, with \"encaps_red\" at most 8.",
    );
const MODE: Key<WithDefault<Choice<bool>>> = Key::choice(
    "mode",
    &[
        ("encaps", false, "the segment routing header has all SIDs (H.Encaps, H.Encaps.L2)"),
        (
            "encaps_red",
            true,
            "the segment routing header lacks the first SID, and is missing if there is only one (H.Encaps.Red, \
             H.Encaps.L2.Red)",
        ),
    ],
)
.default_word("encaps")
.about("Form of sent packets (RFC 8986 section 5).");

/// Description of the table `srv6` in a table `[[segment]]`.
static SETTINGS: ConfigTable = ConfigTable {
    name: "srv6",
    about: "SIDs of the segment, for kind = \"srv6\".",
    absent: "an error for kind = \"srv6\"",
    keys: &[&LOCAL_SID, &BEHAVIOUR, &SEGS, &MODE],
    example: "[segment.srv6]\nlocal_sid = \"fc00:1::100\"\nsegs = [\"fc00:5::1\", \"fc00:2::100\"]\n",
    ..ConfigTable::EMPTY
};

/// Settings of a segment. Its encoded form are the options of [`TunnelKind::write`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct Policy {
    behaviour: Behaviour,
    reduced: bool,
    local: Ipv6Addr,
    /// At least one SID.
    path: Vec<Ipv6Addr>,
}

impl Policy {
    /// Returns two bytes, the local SID and the SIDs of the path.
    fn encode(&self) -> Box<[u8]> {
        let behaviour = Behaviour::ALL.iter().position(|it| *it == self.behaviour).unwrap_or_default() as u8;
        let sids = std::iter::once(&self.local).chain(&self.path);
        [behaviour, self.reduced.into()].into_iter().chain(sids.flat_map(Ipv6Addr::octets)).collect()
    }

    /// Reads the encoded form; `None` for a segment without settings, which has no tunnels.
    fn decode(options: &[u8]) -> Option<Self> {
        let (&[behaviour, reduced], sids) = options.split_first_chunk()?;
        let mut sids = sids.as_chunks::<SID_LEN>().0.iter().map(|sid| Ipv6Addr::from_octets(*sid));
        let behaviour = *Behaviour::ALL.get(usize::from(behaviour))?;
        let local = sids.next()?;
        let path: Vec<Ipv6Addr> = sids.collect();
        (!path.is_empty()).then_some(Self { behaviour, reduced: reduced != 0, local, path })
    }

    fn sids(&self) -> Sids {
        let first = self.path.first().copied().unwrap_or(Ipv6Addr::UNSPECIFIED);
        Sids { local: self.local, behaviour: self.behaviour, first }
    }

    /// Returns the SIDs in the segment routing header, in the order of the path.
    fn listed(&self) -> &[Ipv6Addr] {
        self.path.get(usize::from(self.reduced)..).unwrap_or_default()
    }
}

/// Reads the settings of a segment. Without the table there are no options.
fn read(segment: &Settings<'_>, payload: Payload) -> Result<Box<[u8]>, ConfigError> {
    if !segment.has(&SETTINGS) {
        return Ok(Box::default());
    }
    segment.read_table(&SETTINGS, |table| {
        let named = table.read(&BEHAVIOUR)?;
        let behaviour = match payload {
            Payload::Ip => named.unwrap_or(Behaviour::EndDt46),
            Payload::Ethernet => Behaviour::EndDx2,
        };
        if named.is_some() && payload == Payload::Ethernet {
            let message = "found in a segment with Ethernet frames, which has the behaviour End.DX2";
            table.record(table.error_in(&BEHAVIOUR, format!("{message}; expected payload = \"ip\"")));
        }
        let reduced = table.read(&MODE)?;
        let mut path = Vec::new();
        let listed = table.read(&SEGS)?;
        let local = table.read(&LOCAL_SID)?;
        if !is_host_address(local.into()) || local.is_unicast_link_local() {
            let message = format!("found {local}, expected a unicast address that is not link-local");
            table.record(table.error_in(&LOCAL_SID, message));
        }
        for sid in listed {
            if !is_host_address(sid.value.into()) || sid.value.is_unicast_link_local() {
                let message = format!("found {}, expected a unicast address that is not link-local", sid.value);
                table.record(sid.error(message));
            } else if sid.value == local {
                table.record(sid.error(format!("{local} is the local SID, expected SIDs of other nodes")));
            }
            path.push(sid.value);
        }
        let most = MAX_LISTED + usize::from(reduced);
        if path.len() > most {
            let message = format!("found {} SIDs, expected at most {most} with this mode", path.len());
            table.record(table.error_in(&SEGS, message));
            path.truncate(most);
        }
        if path.is_empty() {
            let missing = || table.error_in(&SEGS, "missing, expected at least the SID of the remote");
            return Err(table.misspelt(&SEGS).unwrap_or_else(missing));
        }
        Ok(Policy { behaviour, reduced, local, path }.encode())
    })
}

/// Returns the segment routing header. "Segments Left" is the index of the first SID in a list of all (RFC 8986 section
/// 5.1); the reduced list lacks that element (RFC 8754 section 4.1.1).
fn write(_: Option<u32>, payload: Payload, options: &[u8]) -> HeaderTemplate {
    let policy = Policy::decode(options);
    let listed = policy.as_ref().map(Policy::listed).unwrap_or_default();
    let header = srh::Repr {
        next_header: payload.protocol(),
        segments_left: policy.as_ref().map_or(0, |policy| policy.path.len().saturating_sub(1)) as u8,
        tag: 0,
        path: listed,
    };
    let mut bytes = vec![0; if listed.is_empty() { 0 } else { header.header_len() }];
    if !bytes.is_empty() {
        // There is room for the header.
        let _ = header.emit(&mut bytes);
    }
    let payload_type = (payload == Payload::Ip).then_some(match bytes.is_empty() {
        true => PayloadType::IpProtocol,
        false => PayloadType::NextHeader(0),
    });
    HeaderTemplate { bytes, variable: VariableFields { payload_type, ..VariableFields::default() } }
}

/// Reads the extension headers of a packet to a SID of the gateway. The type of the payload is the upper-layer header.
fn parse(protocol: IpProtocol, bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let mut extensions = ipv6::Extensions::new(protocol, bytes);
    for extension in extensions.by_ref() {
        let extension = extension.map_err(|_| DropReason::BadTunnelHeader)?;
        if extension.kind == IpProtocol::ROUTING {
            check_routing(extension.bytes)?;
        }
    }
    let payload = match extensions.next_header() {
        IpProtocol::IPV4 => EtherType::IPV4,
        IpProtocol::IPV6 => EtherType::IPV6,
        IpProtocol::ETHERNET => EtherType::TRANSPARENT_ETHERNET,
        _ => return Err(DropReason::SidUpperLayer),
    };
    Ok(TunnelHeader { id: None, len: bytes.len() - extensions.rest().len(), payload, has_checksum: false })
}

/// Checks a routing header. A node skips those of unknown types without segments left (RFC 8200 section 4.4). TLVs of a
/// segment routing header are skipped; only their lengths are checked (RFC 8754 section 2.1).
fn check_routing(bytes: &[u8]) -> Result<(), DropReason> {
    let &[_, _, kind, segments_left, ..] = bytes else { return Err(DropReason::BadTunnelHeader) };
    if kind != srh::ROUTING_TYPE {
        return if segments_left == 0 { Ok(()) } else { Err(DropReason::RoutingType) };
    }
    let header = srh::View::new(bytes).map_err(|_| DropReason::BadTunnelHeader)?;
    if header.tlvs().any(|tlv| tlv.is_err()) {
        return Err(DropReason::BadTunnelHeader);
    }
    // RFC 8986 sections 4.6 to 4.9, line S02: the behaviours are those of the last segment.
    if segments_left == 0 { Ok(()) } else { Err(DropReason::SegmentsLeft) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sid(n: u16) -> Ipv6Addr {
        Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, n)
    }

    fn policy(reduced: bool, count: u16) -> Policy {
        Policy { behaviour: Behaviour::EndDt46, reduced, local: sid(100), path: (1..=count).map(sid).collect() }
    }

    #[test]
    fn settings_survive_encoding() {
        for behaviour in Behaviour::ALL {
            let policy = Policy { behaviour, ..policy(true, 3) };
            assert_eq!(Policy::decode(&policy.encode()), Some(policy.clone()));
            let sids = KIND.sids.unwrap()(&policy.encode());
            assert_eq!(sids, Some(Sids { local: sid(100), behaviour, first: sid(1) }));
        }
        assert_eq!(Policy::decode(&[]), None);
    }

    /// RFC 8986 sections 5.1 and 5.2 with a path of three SIDs, and of one.
    #[test]
    fn headers_of_both_modes() {
        let header = |reduced, count, payload| write(None, payload, &policy(reduced, count).encode());
        for (payload, next) in [(Payload::Ip, 4), (Payload::Ethernet, 143)] {
            let all = header(false, 3, payload);
            assert_eq!(all.bytes[..8], [next, 6, 4, 2, 2, 0, 0, 0]);
            assert!(srh::View::new(&all.bytes).unwrap().segments().eq([sid(3), sid(2), sid(1)]));
            let reduced = header(true, 3, payload);
            assert_eq!(reduced.bytes[..8], [next, 4, 4, 2, 1, 0, 0, 0]);
            assert!(srh::View::new(&reduced.bytes).unwrap().segments().eq([sid(3), sid(2)]));
            assert_eq!(header(false, 1, payload).bytes[..8], [next, 2, 4, 0, 0, 0, 0, 0]);
            assert!(header(true, 1, payload).bytes.is_empty());
            assert_eq!(Carrier::Srv6.protocol(payload, &all.bytes), IpProtocol::ROUTING);
            assert_eq!(Carrier::Srv6.protocol(payload, &[]), IpProtocol(next));
        }
        let types = [3, 1].map(|count| header(true, count, Payload::Ip).variable.payload_type);
        assert_eq!(types, [Some(PayloadType::NextHeader(0)), Some(PayloadType::IpProtocol)]);
        assert_eq!(header(false, 3, Payload::Ethernet).variable.payload_type, None);
    }

    /// Returns a segment routing header with these values, one SID and these TLVs.
    fn srh(next: u8, units: u8, kind: u8, left: u8, last: u8, tlvs: &[u8]) -> Vec<u8> {
        [&[next, units, kind, left, last, 0, 0, 0][..], &sid(100).octets(), tlvs].concat()
    }

    #[test]
    fn routing_headers_are_judged() {
        let with = |bytes: Vec<u8>| parse(IpProtocol::ROUTING, &[&bytes[..], &[0x45; 20]].concat());
        let good = |len| Ok(TunnelHeader { id: None, len, payload: EtherType::IPV4, has_checksum: false });
        let bad = Err(DropReason::BadTunnelHeader);
        assert_eq!(with(srh(4, 2, 4, 0, 0, &[])), good(24));
        assert_eq!(with(srh(4, 2, 4, 1, 0, &[])), Err(DropReason::SegmentsLeft));
        assert_eq!(with(srh(4, 2, 4, 2, 0, &[])), bad, "more segments left than a reduced list has");
        assert_eq!(with(srh(4, 2, 4, 0, 1, &[])), bad, "a list longer than the header");
        assert_eq!(with(srh(4, 0, 4, 0, 0, &[])), bad, "a header without list");
        assert_eq!(with(srh(4, 200, 4, 0, 0, &[])), bad, "a header longer than the packet");
        // Padding and a keyed hash, which is not verified; a type that is not known; a length that is wrong.
        assert_eq!(with(srh(4, 3, 4, 0, 0, &[0, 4, 1, 0, 0, 0, 0, 0])), good(32));
        assert_eq!(with(srh(4, 3, 4, 0, 0, &[5, 6, 0, 0, 0, 0, 0, 0])), good(32));
        assert_eq!(with(srh(4, 3, 4, 0, 0, &[200, 6, 0, 0, 0, 0, 0, 0])), good(32));
        assert_eq!(with(srh(4, 3, 4, 0, 0, &[5, 7, 0, 0, 0, 0, 0, 0])), bad);
        assert_eq!(with(srh(4, 3, 4, 0, 0, &[4, 5, 0, 0, 0, 0, 0, 9])), bad, "a type without length");
        // RFC 8200 section 4.4.
        for kind in [0, 2, 3, 253] {
            assert_eq!(with(srh(4, 2, kind, 0, 7, &[])), good(24), "type {kind}");
            assert_eq!(with(srh(4, 2, kind, 1, 7, &[])), Err(DropReason::RoutingType), "type {kind}");
        }
        let two = [srh(43, 2, 4, 0, 0, &[]), srh(4, 2, 4, 0, 0, &[])].concat();
        assert_eq!(with(two), good(48));
        let two = [srh(43, 2, 4, 0, 0, &[]), srh(4, 2, 4, 1, 0, &[])].concat();
        assert_eq!(with(two), Err(DropReason::SegmentsLeft), "the second one counts too");
        let many = srh(43, 2, 4, 0, 0, &[]).repeat(9);
        assert_eq!(with(many), bad);
    }

    #[test]
    fn upper_layers_are_judged() {
        for (next, payload) in [(4, EtherType::IPV4), (41, EtherType::IPV6), (143, EtherType::TRANSPARENT_ETHERNET)] {
            let expected = |len| Ok(TunnelHeader { id: None, len, payload, has_checksum: false });
            assert_eq!(parse(IpProtocol(next), &[0; 20]), expected(0));
            assert_eq!(parse(IpProtocol::ROUTING, &srh(next, 2, 4, 0, 0, &[])), expected(24));
            let options = [next, 0, 1, 4, 0, 0, 0, 0];
            assert_eq!(parse(IpProtocol::DESTINATION_OPTIONS, &options), expected(8));
        }
        for next in [6, 17, 47, 58, 59, 255] {
            assert_eq!(parse(IpProtocol(next), &[0; 40]), Err(DropReason::SidUpperLayer));
            assert_eq!(parse(IpProtocol::ROUTING, &srh(next, 2, 4, 0, 0, &[])), Err(DropReason::SidUpperLayer));
        }
        for behaviour in Behaviour::ALL {
            let payloads = [EtherType::IPV4, EtherType::IPV6, EtherType::TRANSPARENT_ETHERNET];
            let taken = payloads.map(|payload| behaviour.takes(payload));
            let expected = match behaviour {
                Behaviour::EndDt4 => [true, false, false],
                Behaviour::EndDt6 => [false, true, false],
                Behaviour::EndDt46 => [true, true, false],
                Behaviour::EndDx2 => [false, false, true],
            };
            assert_eq!(taken, expected);
        }
    }
}
