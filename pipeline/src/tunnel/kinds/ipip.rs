//! IP in IP: IPv4 in IPv4 (RFC 2003), IPv6 in IPv4 (RFC 4213), IPv4 and IPv6 in IPv6 (RFC 2473).
//!
//! There is no tunnel header. The protocol number of the outer header, 4 or 41, is the type of the payload. A tunnel
//! encapsulation limit in the outer IPv6 header (RFC 2473 section 4.1.1) is not sent, and skipped in received packets.

use wirepath_packet::drops::DropReason;
use wirepath_wire::EtherType;
use wirepath_wire::build::{PayloadType, VariableFields};

use super::{Carrier, HeaderTemplate, Payload, TunnelHeader, TunnelKind};

/// IP in IP.
pub static KIND: TunnelKind = TunnelKind {
    name: "ipip",
    about: "IP in IP (RFC 2003, RFC 4213, RFC 2473)",
    id_name: "identifier",
    ids: 0..=0,
    needs_id: false,
    carrier: Carrier::IpInIp,
    payloads: &[Payload::Ip],
    header_len: 0,
    rule_tunnel: None,
    write: |_, _, _| HeaderTemplate {
        bytes: Vec::new(),
        variable: VariableFields { payload_type: Some(PayloadType::IpProtocol), ..VariableFields::default() },
    },
    parse: |_, bytes| parse(bytes),
    length: |_| Some(0),
    plain: None,
    match_item: None,
    settings: None,
    sids: None,
    service: None,
};

/// Returns the payload by the version of the inner header. The caller compares it with the protocol number.
fn parse(bytes: &[u8]) -> Result<TunnelHeader, DropReason> {
    let payload = match bytes.first().map(|byte| byte >> 4) {
        Some(4) => EtherType::IPV4,
        Some(6) => EtherType::IPV6,
        Some(_) => return Err(DropReason::BadVersion),
        None => return Err(DropReason::BadTunnelHeader),
    };
    Ok(TunnelHeader { id: None, len: 0, payload, has_checksum: false })
}
