//! IPv4 and IPv6.

use core::net::{Ipv4Addr, Ipv6Addr};

use super::{Edit, HeadersMut, NO_CHECKSUM, Update, fields};
use crate::field::{get, put};
use crate::ip::IpProtocol;
use crate::parse::L3Type;
use crate::{ipv4, ipv6};

/// IPv4 header.
#[derive(Debug)]
pub struct Ipv4Mut<'a> {
    edit: Edit<'a, { ipv4::HEADER_LEN }, 10>,
}

impl Ipv4Mut<'_> {
    fields! {
        /// DSCP (6 bits) and ECN (2 bits).
        [1; 1] traffic_class, set_traffic_class: u8, false;
        /// Identification, equal in all fragments of a packet.
        [4; 2] ident, set_ident: u16, false;
        /// Time to live, hops.
        [8; 1] ttl, set_ttl: u8, false;
        /// Source address.
        [12; 4] src, set_src: Ipv4Addr, true;
        /// Destination address.
        [16; 4] dst, set_dst: Ipv4Addr, true;
    }

    /// Returns the protocol of the payload.
    #[inline]
    pub fn protocol(&self) -> IpProtocol {
        self.edit.get::<9, 1, IpProtocol>()
    }

    /// Returns the length of header and payload, bytes.
    #[inline]
    pub fn total_len(&self) -> u16 {
        self.edit.get::<2, 2, u16>()
    }

    /// Returns the "don't fragment" flag.
    #[inline]
    pub fn dont_fragment(&self) -> bool {
        self.edit.get::<6, 2, u16>() & ipv4::DONT_FRAGMENT != 0
    }

    /// Changes the "don't fragment" flag.
    #[inline]
    pub fn set_dont_fragment(&mut self, on: bool) {
        let rest = self.edit.get::<6, 2, u16>() & !ipv4::DONT_FRAGMENT;
        self.edit.set::<6, 2, u16>(if on { rest | ipv4::DONT_FRAGMENT } else { rest }, false);
    }

    /// Subtracts one hop. Returns false and changes nothing if the packet must not be forwarded any more
    /// (RFC 1812 section 5.3.1).
    #[inline]
    pub fn decrement_ttl(&mut self) -> bool {
        let ttl = self.ttl();
        if ttl > 1 {
            self.set_ttl(ttl - 1);
        }
        ttl > 1
    }

    /// Swaps source and destination. Checksums do not change.
    #[inline]
    pub fn swap_addresses(&mut self) {
        let both = u64::from_ne_bytes(get::<12, 8, { ipv4::HEADER_LEN }>(self.edit.header));
        put::<12, 8, { ipv4::HEADER_LEN }>(self.edit.header, both.rotate_left(32).to_ne_bytes());
    }
}

/// IPv6 header.
#[derive(Debug)]
pub struct Ipv6Mut<'a> {
    edit: Edit<'a, { ipv6::HEADER_LEN }, NO_CHECKSUM>,
    /// Addresses that the pseudo header does not contain.
    hidden: ipv6::HiddenAddresses,
}

impl Ipv6Mut<'_> {
    fields! {
        /// Hop limit.
        [7; 1] hop_limit, set_hop_limit: u8, false;
    }

    /// Source address.
    #[inline]
    pub fn src(&self) -> Ipv6Addr {
        self.edit.get::<8, 16, Ipv6Addr>()
    }

    /// Changes the source address, and the checksums.
    #[inline]
    pub fn set_src(&mut self, value: Ipv6Addr) {
        self.edit.set::<8, 16, Ipv6Addr>(value, !self.hidden.src);
    }

    /// Destination address.
    #[inline]
    pub fn dst(&self) -> Ipv6Addr {
        self.edit.get::<24, 16, Ipv6Addr>()
    }

    /// Changes the destination address, and the checksums. A routing header with segments left keeps its final
    /// destination (RFC 8200 section 8.1).
    #[inline]
    pub fn set_dst(&mut self, value: Ipv6Addr) {
        self.edit.set::<24, 16, Ipv6Addr>(value, !self.hidden.dst);
    }

    /// Returns DSCP (6 bits) and ECN (2 bits).
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        (self.edit.get::<0, 2, u16>() >> 4) as u8
    }

    /// Changes DSCP and ECN.
    #[inline]
    pub fn set_traffic_class(&mut self, value: u8) {
        let rest = self.edit.get::<0, 2, u16>() & !0x0ff0;
        self.edit.set::<0, 2, u16>(rest | u16::from(value) << 4, false);
    }

    /// Returns the flow label, 20 bits.
    #[inline]
    pub fn flow_label(&self) -> u32 {
        self.edit.get::<0, 4, u32>() & 0xf_ffff
    }

    /// Changes the flow label. Bits above the lowest 20 are ignored.
    #[inline]
    pub fn set_flow_label(&mut self, value: u32) {
        let rest = self.edit.get::<0, 4, u32>() & !0xf_ffff;
        self.edit.set::<0, 4, u32>(rest | value & 0xf_ffff, false);
    }

    /// Subtracts one hop. Returns false and changes nothing if the packet must not be forwarded any more
    /// (RFC 8200 section 3).
    #[inline]
    pub fn decrement_hop_limit(&mut self) -> bool {
        let hops = self.hop_limit();
        if hops > 1 {
            self.set_hop_limit(hops - 1);
        }
        hops > 1
    }

    /// Swaps source and destination. Checksums do not change, unless an extension header replaces one of the
    /// addresses in the pseudo header.
    #[inline]
    pub fn swap_addresses(&mut self) {
        let (src, dst) = (self.src(), self.dst());
        if self.hidden.src || self.hidden.dst {
            self.set_src(dst);
            self.set_dst(src);
        } else {
            put::<8, 16, { ipv6::HEADER_LEN }>(self.edit.header, dst.octets());
            put::<24, 16, { ipv6::HEADER_LEN }>(self.edit.header, src.octets());
        }
    }
}

/// Header of either IP version, with the fields that both have.
#[derive(Debug)]
pub enum IpMut<'a> {
    /// IPv4.
    V4(Ipv4Mut<'a>),
    /// IPv6.
    V6(Ipv6Mut<'a>),
}

impl IpMut<'_> {
    /// Swaps source and destination.
    #[inline]
    pub fn swap_addresses(&mut self) {
        match self {
            IpMut::V4(ip) => ip.swap_addresses(),
            IpMut::V6(ip) => ip.swap_addresses(),
        }
    }

    /// Returns the time to live or hop limit, hops.
    #[inline]
    pub fn hop_limit(&self) -> u8 {
        match self {
            IpMut::V4(ip) => ip.ttl(),
            IpMut::V6(ip) => ip.hop_limit(),
        }
    }

    /// Subtracts one hop. Returns false and changes nothing if the packet must not be forwarded any more.
    #[inline]
    pub fn decrement_hop_limit(&mut self) -> bool {
        match self {
            IpMut::V4(ip) => ip.decrement_ttl(),
            IpMut::V6(ip) => ip.decrement_hop_limit(),
        }
    }

    /// Returns DSCP (6 bits) and ECN (2 bits).
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        match self {
            IpMut::V4(ip) => ip.traffic_class(),
            IpMut::V6(ip) => ip.traffic_class(),
        }
    }

    /// Changes DSCP and ECN.
    #[inline]
    pub fn set_traffic_class(&mut self, value: u8) {
        match self {
            IpMut::V4(ip) => ip.set_traffic_class(value),
            IpMut::V6(ip) => ip.set_traffic_class(value),
        }
    }
}

impl HeadersMut<'_> {
    /// Returns the IPv4 header.
    #[inline]
    pub fn ipv4(&mut self) -> Option<Ipv4Mut<'_>> {
        if self.layers.l3_type() != L3Type::Ipv4 {
            return None;
        }
        let at = self.layers.l3();
        let l4 = self.pseudo_checksum(at + ipv4::HEADER_LEN)?;
        Some(Ipv4Mut { edit: Edit { l4, ..self.edit(at, Update::Plain)? } })
    }

    /// Returns the IPv6 header.
    #[inline]
    pub fn ipv6(&mut self) -> Option<Ipv6Mut<'_>> {
        if self.layers.l3_type() != L3Type::Ipv6 {
            return None;
        }
        let hidden = self.layers.hidden_addresses(self.frame);
        let at = self.layers.l3();
        let l4 = self.pseudo_checksum(at + ipv6::HEADER_LEN)?;
        Some(Ipv6Mut { edit: Edit { l4, ..self.edit(at, Update::Plain)? }, hidden })
    }

    /// Returns the IP header of either version.
    #[inline]
    pub fn ip(&mut self) -> Option<IpMut<'_>> {
        match self.layers.l3_type() {
            L3Type::Ipv4 => self.ipv4().map(IpMut::V4),
            _ => self.ipv6().map(IpMut::V6),
        }
    }
}
