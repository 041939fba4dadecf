//! Completes layer-4 checksums that a kernel left to hardware.
//!
//! A frame that a local socket sent over veth, TAP or a bridge has `ip_summed == CHECKSUM_PARTIAL`: its TCP
//! or UDP checksum field holds only the sum of the pseudo header. AF_XDP, and AF_PACKET without vnet headers,
//! deliver such frames unchanged. If such a frame is encapsulated and sent, every receiver drops it.

use crate::checksum::{self, State, Sum, Transport};
use crate::field::get;
use crate::ip::IpProtocol;
use crate::parse::{HeaderOffsets, L3Type, L4Type, Parsed};

/// Position and coverage of a stack's layer-4 checksum.
#[derive(Clone, Copy, Debug)]
pub struct ChecksumSpan {
    /// Layer-4 protocol.
    pub transport: Transport,
    /// Start of the layer-4 header.
    pub start: usize,
    /// End of the covered bytes.
    pub end: usize,
    /// Sum of the pseudo header.
    pub pseudo: Sum,
}

impl ChecksumSpan {
    /// Returns the checksum position of a stack. `None` for fragments, for protocols without a pseudo header,
    /// and if `head` is not the parsed packet.
    ///
    /// The pseudo header differs if a routing header has segments left (RFC 8200 section 8.1): the checksum
    /// of such a packet appears wrong.
    #[inline]
    pub fn of(head: &[u8], layers: &HeaderOffsets) -> Option<ChecksumSpan> {
        if layers.is_fragment() {
            return None;
        }
        let start = layers.l4();
        let (transport, end) = match layers.l4_type() {
            L4Type::Tcp => (Transport::Tcp, layers.end()),
            L4Type::Udp => (Transport::Udp, layers.udp_end(head)?),
            L4Type::Icmpv6 => (Transport::Icmpv6, layers.end()),
            _ => return None,
        };
        let pseudo = pseudo(head, layers, transport.protocol(), end.checked_sub(start)?)?;
        Some(ChecksumSpan { transport, start, end, pseudo })
    }

    /// Returns the state of the checksum field of a frame in one buffer.
    pub fn state(&self, frame: &[u8]) -> State {
        match frame.get(self.start..self.end) {
            Some(segment) => self.transport.state(segment, self.pseudo),
            None => State::Bad,
        }
    }
}

/// Returns the sum of the pseudo header of a stack whose layer 4 is `len` bytes long.
#[inline]
pub fn pseudo(head: &[u8], layers: &HeaderOffsets, protocol: IpProtocol, len: usize) -> Option<Sum> {
    let addresses = match layers.l3_type() {
        L3Type::Ipv4 => checksum::sum(&get::<12, 8, 20>(layers.ipv4_header(head)?)),
        L3Type::Ipv6 => checksum::sum(&get::<8, 32, 40>(layers.ipv6_header(head)?)),
        _ => return None,
    };
    Some(addresses.word32(u32::try_from(len).ok()?).word(u16::from(protocol.0)))
}

/// The checksums that were completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// The outer checksum was completed.
    pub outer: bool,
    /// The inner checksum was completed.
    pub inner: bool,
}

impl Completed {
    /// True if at least one checksum was completed.
    pub fn any(self) -> bool {
        self.outer || self.inner
    }
}

/// Completes all partial checksums of a frame in one buffer. Right, absent and wrong checksums stay
/// unchanged.
pub fn complete(frame: &mut [u8], parsed: &Parsed) -> Completed {
    // Inner first: Linux sums the outer datagram as if the inner checksum were complete (local checksum
    // offload).
    let inner = parsed.inner().is_some_and(|layers| complete_stack(frame, layers, || Sum::ZERO));
    let outer = complete_stack(frame, parsed.outer(), || Sum::ZERO);
    Completed { outer, inner }
}

/// Completes the checksum of one stack. `head` is the first buffer of the packet.
///
/// `tail` returns the sum of the bytes after `head` up to [`HeaderOffsets::end`], as if they started at an
/// even offset. It is called only if the checksum looks partial.
///
/// Returns true if the checksum was completed.
#[inline]
pub fn complete_stack(head: &mut [u8], layers: &HeaderOffsets, tail: impl FnOnce() -> Sum) -> bool {
    let Some(cover) = ChecksumSpan::of(head, layers) else { return false };
    let end = cover.end.min(head.len());
    let Some(segment) = head.get_mut(cover.start..end) else { return false };
    match cover.transport.field(segment) {
        Some(0) if cover.transport == Transport::Udp => return false,
        Some(field) if checksum::is_pseudo_header_sum(field, cover.pseudo) => {}
        _ => return false,
    }
    let mut total = checksum::sum(segment);
    if cover.end > end {
        total = total.and_at(segment.len(), tail());
    }
    // A right checksum can look partial.
    if cover.pseudo.and(total).is_valid() {
        return false;
    }
    // `total` includes the field, which holds the sum of the pseudo header.
    cover.transport.set_field(segment, cover.transport.encode(total))
}
