//! Completes layer-4 checksums that a kernel left to hardware.
//!
//! A frame that a local socket sent over veth, TAP or a bridge has `ip_summed == CHECKSUM_PARTIAL`: its TCP or UDP checksum
//! field holds the pseudo header's sum only. AF_XDP and AF_PACKET without vnet headers hand it over like that, and what
//! such a frame is encapsulated into carries it out of the machine, where everybody drops it.

use crate::checksum::{self, State, Sum, Transport};
use crate::field::get;
use crate::ip::IpProtocol;
use crate::parse::{L3, L4, Layers, Parsed};

/// Where the checksum of a stack's layer 4 is, and what it covers.
#[derive(Clone, Copy, Debug)]
pub struct Coverage {
    /// Which header it is.
    pub transport: Transport,
    /// Start of the header.
    pub start: usize,
    /// End of what is covered.
    pub end: usize,
    /// Sum of the pseudo header.
    pub pseudo: Sum,
}

impl Coverage {
    /// `None` for fragments, for layer 4 without a checksum over a pseudo header, and if `head` is not what was parsed.
    ///
    /// With a routing header that has segments left the pseudo header is another (RFC 8200 section 8.1): such a packet's
    /// checksum appears to be wrong.
    #[inline]
    pub fn of(head: &[u8], layers: &Layers) -> Option<Coverage> {
        if layers.is_fragment() {
            return None;
        }
        let start = layers.l4();
        let (transport, end) = match layers.l4_kind() {
            L4::Tcp => (Transport::Tcp, layers.end()),
            L4::Udp => (Transport::Udp, layers.udp_end(head)?),
            L4::Icmpv6 => (Transport::Icmpv6, layers.end()),
            _ => return None,
        };
        let pseudo = pseudo(head, layers, transport.protocol(), end.checked_sub(start)?)?;
        Some(Coverage { transport, start, end, pseudo })
    }

    /// Sum of a whole frame of `total` bytes, of which `head` is the first buffer, without looking at the payload, given
    /// that this checksum is right: all that it covers then adds up to the complement of the pseudo header's sum (Linux
    /// calls this local checksum offload). For the outer UDP checksum over a frame that was just completed or verified.
    ///
    /// `None` if that cannot be said: an absent checksum, or bytes behind what is covered in other buffers.
    pub fn frame_sum(&self, head: &[u8], total: usize) -> Option<Sum> {
        let segment = head.get(self.start..)?;
        if self.transport == Transport::Udp && self.transport.field(segment)? == 0 {
            return None;
        }
        let covered = Sum::ZERO.word(self.pseudo.checksum());
        let sum = checksum::sum(head.get(..self.start)?).and_at(self.start, covered);
        if self.end == total {
            return Some(sum);
        }
        let behind = head.get(self.end..total)?;
        Some(sum.and_at(self.end, checksum::sum(behind)))
    }

    /// What the checksum field holds, in a frame that lies in one buffer.
    pub fn state(&self, frame: &[u8]) -> State {
        match frame.get(self.start..self.end) {
            Some(segment) => self.transport.state(segment, self.pseudo),
            None => State::Bad,
        }
    }
}

/// Sum of the pseudo header of a stack, for a layer 4 of `len` bytes.
#[inline]
pub fn pseudo(head: &[u8], layers: &Layers, protocol: IpProtocol, len: usize) -> Option<Sum> {
    let addresses = match layers.l3_kind() {
        L3::Ipv4 => checksum::sum(&get::<12, 8, 20>(layers.ipv4_header(head)?)),
        L3::Ipv6 => checksum::sum(&get::<8, 32, 40>(layers.ipv6_header(head)?)),
        _ => return None,
    };
    Some(addresses.word32(u32::try_from(len).ok()?).word(u16::from(protocol.0)))
}

/// Which checksums were completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// That of the frame's own stack.
    pub outer: bool,
    /// That of the stack inside the tunnel.
    pub inner: bool,
}

impl Completed {
    /// Whether any was.
    pub fn any(self) -> bool {
        self.outer || self.inner
    }
}

/// Completes whatever the sender left to hardware in a frame that lies in one buffer. Right, absent and wrong checksums
/// are left as they are.
pub fn complete(frame: &mut [u8], parsed: &Parsed) -> Completed {
    // Inner first: Linux sums the outer datagram as if the inner checksum were complete ("local checksum offload").
    let inner = parsed.inner().is_some_and(|layers| complete_layers(frame, layers, || Sum::ZERO));
    let outer = complete_layers(frame, parsed.outer(), || Sum::ZERO);
    Completed { outer, inner }
}

/// Completes the checksum of one stack. `head` is the packet's first buffer; `tail` gives the sum of what it lacks up to
/// [`Layers::end`], summed from its own start, and is called only if the checksum seems to be incomplete.
///
/// True if the checksum was completed.
#[inline]
pub fn complete_layers(head: &mut [u8], layers: &Layers, tail: impl FnOnce() -> Sum) -> bool {
    let Some(cover) = Coverage::of(head, layers) else { return false };
    let end = cover.end.min(head.len());
    let Some(segment) = head.get_mut(cover.start..end) else { return false };
    match cover.transport.field(segment) {
        Some(0) if cover.transport == Transport::Udp => return false,
        Some(field) if checksum::holds_pseudo_only(field, cover.pseudo) => {}
        _ => return false,
    }
    let mut total = checksum::sum(segment);
    if cover.end > end {
        total = total.and_at(segment.len(), tail());
    }
    // A right checksum may happen to look incomplete.
    if cover.pseudo.and(total).is_valid() {
        return false;
    }
    // The field holds the pseudo header's sum, so `total` has it already.
    cover.transport.set_field(segment, cover.transport.encode(total))
}
