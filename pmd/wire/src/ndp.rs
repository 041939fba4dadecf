//! Neighbour discovery: solicitation and advertisement (RFC 4861 sections 4.3, 4.4, 4.6.1, 7.1).

use core::net::Ipv6Addr;

use crate::error::{BufferTooShort, ParseError};
use crate::ethernet::MacAddr;
use crate::icmpv6::Type;
use crate::{icmpv6, ipv6};

/// Option: source link-layer address.
pub const OPTION_SOURCE: u8 = 1;
/// Option: target link-layer address.
pub const OPTION_TARGET: u8 = 2;
/// Hop limit of neighbour discovery. A message that arrives with it was not forwarded (RFC 4861 section 7.1).
pub const HOP_LIMIT: u8 = 255;
/// Flag of an advertisement: the sender is a router.
pub const FLAG_ROUTER: u8 = 0x80;
/// Flag of an advertisement: it answers a solicitation.
pub const FLAG_SOLICITED: u8 = 0x40;
/// Flag of an advertisement: it replaces the receiver's cache entry.
pub const FLAG_OVERRIDE: u8 = 0x20;

/// Length of a message without options, bytes.
const FIXED_LEN: usize = 24;
/// Length of an Ethernet address option, bytes.
const OPTION_LEN: usize = 8;

/// A solicitation or an advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repr {
    /// Solicitation: "Who has `target`?"
    Solicitation {
        /// The requested address.
        target: Ipv6Addr,
        /// Ethernet address of the sender; `None` in duplicate address detection.
        source: Option<MacAddr>,
    },
    /// Advertisement: "`target` is at `address`."
    Advertisement {
        /// The advertised address.
        target: Ipv6Addr,
        /// [`FLAG_ROUTER`], [`FLAG_SOLICITED`], [`FLAG_OVERRIDE`].
        flags: u8,
        /// Ethernet address of the target.
        address: Option<MacAddr>,
    },
}

impl Repr {
    /// Parses the message in an IPv6 packet without extension headers, with the checks of RFC 4861 section
    /// 7.1.
    ///
    /// `Ok(None)` if it is another ICMPv6 message.
    pub fn parse(ip: &ipv6::View<'_>) -> Result<Option<Repr>, ParseError> {
        let message = icmpv6::View::new(ip.payload())?;
        let kind = message.kind();
        if kind != Type::NEIGHBOR_SOLICITATION && kind != Type::NEIGHBOR_ADVERTISEMENT {
            return Ok(None);
        }
        if !message.checksum_is_valid(ip.src(), ip.dst()) {
            return Err(ParseError::Icmpv6BadChecksum);
        }
        let body: &[u8; FIXED_LEN - icmpv6::HEADER_LEN] =
            message.payload().first_chunk().ok_or(ParseError::NdpInvalid)?;
        let target = Ipv6Addr::from_octets(crate::field::get::<4, 16, 20>(body));
        if ip.hop_limit() != HOP_LIMIT || message.code() != 0 || target.is_multicast() {
            return Err(ParseError::NdpInvalid);
        }
        let options = message.payload().get(body.len()..).unwrap_or(&[]);
        if kind == Type::NEIGHBOR_SOLICITATION {
            let source = option(options, OPTION_SOURCE)?;
            let detection = ip.src().is_unspecified();
            if detection && (source.is_some() || !is_solicited_node(ip.dst())) {
                return Err(ParseError::NdpInvalid);
            }
            return Ok(Some(Repr::Solicitation { target, source }));
        }
        let flags = body[0] & (FLAG_ROUTER | FLAG_SOLICITED | FLAG_OVERRIDE);
        if ip.dst().is_multicast() && flags & FLAG_SOLICITED != 0 {
            return Err(ParseError::NdpInvalid);
        }
        Ok(Some(Repr::Advertisement { target, flags, address: option(options, OPTION_TARGET)? }))
    }

    /// Returns the length of the message, bytes.
    pub fn message_len(&self) -> usize {
        let (Repr::Solicitation { source: mac, .. } | Repr::Advertisement { address: mac, .. }) = self;
        FIXED_LEN + if mac.is_some() { OPTION_LEN } else { 0 }
    }

    /// Writes the message with its checksum for these addresses to the front of `out`, and returns its
    /// length.
    pub fn emit(&self, out: &mut [u8], src: Ipv6Addr, dst: Ipv6Addr) -> Result<usize, BufferTooShort> {
        let (need, have) = (self.message_len(), out.len());
        let message = out.get_mut(..need).ok_or(BufferTooShort { need, have })?;
        let (kind, flags, target, option, mac) = match *self {
            Repr::Solicitation { target, source } => (Type::NEIGHBOR_SOLICITATION, 0, target, OPTION_SOURCE, source),
            Repr::Advertisement { target, flags, address } => {
                (Type::NEIGHBOR_ADVERTISEMENT, flags, target, OPTION_TARGET, address)
            }
        };
        let (fixed, rest) = message.split_first_chunk_mut::<FIXED_LEN>().ok_or(BufferTooShort { need, have })?;
        crate::field::put::<4, 4, FIXED_LEN>(fixed, [flags, 0, 0, 0]);
        crate::field::put::<8, 16, FIXED_LEN>(fixed, target.octets());
        if let (Some(MacAddr([a, b, c, d, e, f])), Some(field)) = (mac, rest.first_chunk_mut()) {
            *field = [option, 1, a, b, c, d, e, f];
        }
        icmpv6::Repr { kind, code: 0 }.emit(message, src, dst)?;
        Ok(need)
    }
}

/// True if an address is in ff02::1:ff00:0/104.
fn is_solicited_node(address: Ipv6Addr) -> bool {
    ipv6::solicited_node(address) == address
}

/// Returns the Ethernet address in the first option of this kind. An option of length zero is an error (RFC
/// 4861 section 7.1).
fn option(mut options: &[u8], kind: u8) -> Result<Option<MacAddr>, ParseError> {
    let mut found = None;
    while let [k, units, ..] = *options {
        let (option, rest) = options.split_at_checked(usize::from(units) * 8).ok_or(ParseError::NdpInvalid)?;
        if option.is_empty() {
            return Err(ParseError::NdpInvalid);
        }
        if let (&[_, 1, a, b, c, d, e, f], true) = (option, k == kind && found.is_none()) {
            found = Some(MacAddr([a, b, c, d, e, f]));
        }
        options = rest;
    }
    if options.is_empty() { Ok(found) } else { Err(ParseError::NdpInvalid) }
}
