//! Changes header fields of a parsed frame and keeps all checksums right.
//!
//! [`Parsed::outer_mut`] and [`Parsed::inner_mut`] lay a [`HeadersMut`] over the bytes of a frame. It gives
//! access to each header that the parser found: [`HeadersMut::ethernet`], [`HeadersMut::ipv4`],
//! [`HeadersMut::udp`] and so on. A setter updates every checksum that covers its field (RFC 1624): the one
//! of the IPv4 header, the one of layer 4 with its pseudo header, and in a tunnel the outer UDP or GRE
//! checksum. An absent UDP checksum stays absent. The cost does not depend on the length of the packet.
//!
//! The views of the protocol modules, such as [`ipv4::ViewMut`](crate::ipv4::ViewMut), change bytes only.
//!
//! ```
//! use wirepath_wire::{HeadersMut, ParseError, parse};
//!
//! /// Sends a packet to another UDP port of another host. `None` if it is not UDP over IPv4.
//! fn redirect(mut headers: HeadersMut<'_>) -> Option<()> {
//!     let mut ip = headers.ipv4()?;
//!     ip.set_dst([192, 0, 2, 7].into());
//!     headers.udp()?.set_dst_port(5353);
//!     Some(())
//! }
//!
//! fn run(frame: &mut [u8]) -> Result<bool, ParseError> {
//!     let parsed = parse(frame)?;
//!     Ok(redirect(parsed.outer_mut(frame)).is_some())
//! }
//! assert_eq!(run(&mut [0; 14]), Ok(false));
//! ```
//!
//! A parse result that belongs to another frame does no harm beyond that frame: a header that does not lie in
//! the bytes is `None`. The parse result itself does not change. [`HeaderOffsets::tag`] and [`Parsed::vni`]
//! keep the values that the parser found.
//!
//! An authentication header (RFC 4302) covers the addresses too. It cannot be updated without its key.

mod ip;
mod layer4;
mod link;

pub use ip::{IpMut, Ipv4Mut, Ipv6Mut};
pub use layer4::{Icmpv4Mut, Icmpv6Mut, TcpMut, UdpMut};
pub use link::{ArpMut, EthernetMut, VlanMut};

use crate::checksum::{self, Sum, Transport};
use crate::field::{get, put};
use crate::ip::IpProtocol;
use crate::parse::{HeaderOffsets, L4Type, Parsed, Tunnel};
use crate::vxlan::{self, Vni};
use crate::{gre, udp};

/// Offset of the checksum in the headers of UDP-Lite (RFC 3828 section 3.1) and DCCP (RFC 4340 section 5.1).
const UDP_LITE_OR_DCCP_CHECKSUM: usize = 6;

/// Declares getters and setters of a header from a table `[offset; bytes] getter, setter: Type, pseudo;`.
///
/// `pseudo` is true if the pseudo header of layer 4 contains the field.
macro_rules! fields {
    ($($(#[$doc:meta])* [$at:literal; $n:literal] $get:ident, $set:ident: $ty:ty, $pseudo:literal;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $get(&self) -> $ty {
            self.edit.get::<$at, $n, $ty>()
        }

        /// Changes the field of the getter's name, and the checksums.
        #[inline]
        pub fn $set(&mut self, value: $ty) {
            self.edit.set::<$at, $n, $ty>(value, $pseudo);
        }
    )*};
}
use fields;

/// Rule by which a checksum field follows a change of the covered bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Update {
    /// RFC 1624 equation 3.
    Plain,
    /// The same, but zero is written as all ones, which is equally valid. UDP-Lite forbids zero (RFC 3828
    /// section 3.1). The covered bytes of an ICMP message may all be zero, and then zero would be wrong.
    NonZero,
    /// As [`Update::NonZero`], but a field that is zero stays zero: no checksum (RFC 768).
    Udp,
    /// The field holds the sum of the pseudo header, and a device adds the rest.
    PseudoSum,
}

impl Update {
    /// Changes `field` after a change of the covered bytes. Returns the change of the field in the packet that is
    /// finally sent.
    #[inline(always)]
    fn apply(self, field: &mut [u8; 2], change: Sum) -> Sum {
        let old = u16::from_be_bytes(*field);
        if self == Update::Udp && old == 0 {
            return Sum::ZERO;
        }
        let new = match self {
            Update::PseudoSum => Sum::ZERO.word(old).and(change).fold(),
            Update::Plain => Sum::ZERO.word(!old).and(change).checksum(),
            Update::NonZero | Update::Udp => Sum::ZERO.word(!old).and(change).udp_checksum(),
        };
        *field = new.to_be_bytes();
        // The device complements the sum.
        if self == Update::PseudoSum { Sum::ZERO.word(old).word(!new) } else { Sum::ZERO.word(!old).word(new) }
    }
}

/// A checksum field outside of the changed header.
#[derive(Debug)]
struct Covering<'a> {
    field: &'a mut [u8; 2],
    update: Update,
}

/// Marks a header without a checksum of its own.
const NO_CHECKSUM: usize = usize::MAX;

/// The bytes of a header and the checksums that cover it. `OWN` is the offset of the header's own checksum, or
/// [`NO_CHECKSUM`].
#[derive(Debug)]
struct Edit<'a, const LEN: usize, const OWN: usize> {
    header: &'a mut [u8; LEN],
    own: Update,
    /// Offset of the layer-4 checksum in `rest`, for the fields of its pseudo header.
    l4: Option<(usize, Update)>,
    /// The bytes after the header.
    rest: &'a mut [u8],
    /// Checksum of the tunnel around the frame.
    tunnel: Option<Covering<'a>>,
}

impl<const LEN: usize, const OWN: usize> Edit<'_, LEN, OWN> {
    #[inline(always)]
    fn get<const AT: usize, const N: usize, T: crate::field::Field<N>>(&self) -> T {
        T::read(get::<AT, N, LEN>(self.header))
    }

    /// Changes a field. `pseudo`: the pseudo header of layer 4 contains it.
    #[inline(always)]
    fn set<const AT: usize, const N: usize, T: crate::field::Field<N>>(&mut self, value: T, pseudo: bool) {
        // Sums are made of whole words. All headers have an even length and start at an even offset.
        let words = const { AT & !1..(AT + N).next_multiple_of(2) };
        let before = *self.header;
        put::<AT, N, LEN>(self.header, value.write());
        let change = checksum::change(&before[words.clone()], &self.header[words]);
        let mut all = change;
        if OWN != NO_CHECKSUM
            && let Some(field) = self.header.get_mut(OWN..).and_then(|h| h.first_chunk_mut())
        {
            // The device's checksum will make up for a change of its own header.
            let own = if self.own == Update::PseudoSum { Sum::ZERO } else { all.and(self.own.apply(field, change)) };
            all = own;
        }
        // The parser has found the field, so that it can be absent only in the bytes of another frame.
        if pseudo
            && let Some((at, update)) = self.l4
            && let Some(field) = self.rest.get_mut(at..).and_then(|rest| rest.first_chunk_mut())
        {
            all = all.and(update.apply(field, change));
        }
        if let Some(tunnel) = &mut self.tunnel {
            tunnel.update.apply(tunnel.field, all);
        }
    }
}

/// The layer-4 checksum fields that hold only the sum of the pseudo header, because a device computes the rest
/// when it sends the packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingChecksums {
    /// The outer field.
    pub outer: bool,
    /// The inner field.
    pub inner: bool,
}

/// The headers of one stack of a parsed frame, which can be changed. See the [module](self).
#[derive(Debug)]
pub struct HeadersMut<'a> {
    frame: &'a mut [u8],
    layers: &'a HeaderOffsets,
    /// Tunnel at the end of this stack.
    tunnel: Tunnel,
    /// Offset of the checksum of the tunnel that carries this stack.
    carrier: Option<(usize, Update)>,
    /// The layer-4 field holds only the sum of the pseudo header.
    pending: bool,
}

impl Parsed {
    /// Gives access to the headers of the outer stack. `frame` is the parsed frame, or its first buffer.
    #[inline]
    pub fn outer_mut<'a>(&'a self, frame: &'a mut [u8]) -> HeadersMut<'a> {
        self.outer_mut_with(frame, PendingChecksums::default())
    }

    /// Gives access to the headers of the inner stack, if there is one. `frame` is the parsed frame from its
    /// start, or its first buffer.
    #[inline]
    pub fn inner_mut<'a>(&'a self, frame: &'a mut [u8]) -> Option<HeadersMut<'a>> {
        self.inner_mut_with(frame, PendingChecksums::default())
    }

    /// As [`Self::outer_mut`], for a frame some of whose checksums a device computes.
    #[inline]
    pub fn outer_mut_with<'a>(&'a self, frame: &'a mut [u8], pending: PendingChecksums) -> HeadersMut<'a> {
        HeadersMut { frame, layers: self.outer(), tunnel: self.tunnel_of(0), carrier: None, pending: pending.outer }
    }

    /// As [`Self::inner_mut`], for a frame some of whose checksums a device computes.
    #[inline]
    pub fn inner_mut_with<'a>(&'a self, frame: &'a mut [u8], pending: PendingChecksums) -> Option<HeadersMut<'a>> {
        let outer = self.outer();
        let carrier = match outer.l4_type() {
            // A device sums the inner packet too.
            L4Type::Udp if pending.outer => None,
            L4Type::Udp => Some((outer.l4() + Transport::Udp.checksum_offset(), Update::Udp)),
            L4Type::Gre => {
                let flags = u16::from_be_bytes(*frame.get(outer.l4()..)?.first_chunk()?);
                (flags & gre::FLAG_CHECKSUM != 0).then_some((outer.l4() + gre::HEADER_LEN, Update::Plain))
            }
            _ => None,
        };
        Some(HeadersMut { frame, layers: self.inner()?, tunnel: self.tunnel_of(1), carrier, pending: pending.inner })
    }
}

impl HeadersMut<'_> {
    /// Returns the offsets of the headers.
    #[inline]
    pub fn layers(&self) -> &HeaderOffsets {
        self.layers
    }

    /// Returns the header at `at` and the bytes after it.
    #[inline(always)]
    fn edit<const LEN: usize, const OWN: usize>(&mut self, at: usize, own: Update) -> Option<Edit<'_, LEN, OWN>> {
        // One comparison covers the header and all before it.
        let (front, rest) = self.frame.split_at_mut_checked(at + LEN)?;
        let (before, header) = front.split_last_chunk_mut()?;
        let tunnel = match self.carrier {
            None => None,
            Some((at, update)) => Some(Covering { field: before.get_mut(at..)?.first_chunk_mut()?, update }),
        };
        Some(Edit { header, own, l4: None, rest, tunnel })
    }

    /// Returns how the layer-4 checksum follows changes, if it has the rule `update` in a complete packet.
    #[inline(always)]
    fn l4_update(&self, update: Update) -> Update {
        if self.pending { Update::PseudoSum } else { update }
    }

    /// Returns the offset of the layer-4 checksum that covers the IP addresses, from `start`. The inner `None` means
    /// that the packet has no such checksum, the outer one that it lies in another buffer.
    #[inline(always)]
    fn pseudo_checksum(&self, start: usize) -> Option<Option<(usize, Update)>> {
        let (at, update) = match self.layers.l4_type() {
            L4Type::Tcp => (Transport::Tcp.checksum_offset(), Update::Plain),
            L4Type::Udp => (Transport::Udp.checksum_offset(), Update::Udp),
            L4Type::Icmpv6 => (Transport::Icmpv6.checksum_offset(), Update::Plain),
            L4Type::Other => {
                let update = match self.layers.protocol() {
                    IpProtocol::UDP_LITE => Update::NonZero,
                    IpProtocol::DCCP => Update::Plain,
                    _ => return Some(None),
                };
                // The parser has not checked that these headers are complete.
                let end = self.layers.l4() + UDP_LITE_OR_DCCP_CHECKSUM + 2;
                if end > self.layers.end() {
                    return Some(None);
                }
                if end > self.frame.len() {
                    return None;
                }
                (UDP_LITE_OR_DCCP_CHECKSUM, update)
            }
            _ => return Some(None),
        };
        Some(Some(((self.layers.l4() + at).wrapping_sub(start), self.l4_update(update))))
    }

    /// Changes the VNI of the VXLAN, VXLAN-GPE or GENEVE header at the end of this stack. Returns false if
    /// there is none.
    pub fn set_vni(&mut self, vni: Vni) -> bool {
        self.change_vni(vni).is_some()
    }

    fn change_vni(&mut self, vni: Vni) -> Option<()> {
        if self.layers.l4_type() != L4Type::Udp {
            return None;
        }
        let (pending, tunnel) = (self.pending, self.tunnel);
        let udp: Edit<'_, { udp::HEADER_LEN }, NO_CHECKSUM> = self.edit(self.layers.l4(), Update::Udp)?;
        let (_, field) = udp.header.split_last_chunk_mut()?;
        let shim = udp.rest.first_chunk_mut::<{ vxlan::HEADER_LEN }>()?;
        match tunnel {
            Tunnel::Vxlan | Tunnel::VxlanGpe if shim[0] & vxlan::FLAG_VNI != 0 => {}
            Tunnel::Geneve => {}
            _ => return None,
        }
        let old = *shim;
        let [_, a, b, c] = vni.get().to_be_bytes();
        put::<4, 3, { vxlan::HEADER_LEN }>(shim, [a, b, c]);
        let change = checksum::change(&old, shim);
        let change = if pending { Sum::ZERO } else { change.and(Update::Udp.apply(field, change)) };
        if let Some(carrier) = udp.tunnel {
            carrier.update.apply(carrier.field, change);
        }
        Some(())
    }
}
