//! Ethernet, VLAN tags and ARP.

use core::net::Ipv4Addr;

use super::{Edit, HeadersMut, NO_CHECKSUM, Update, fields};
use crate::arp::{self, Operation};
use crate::ethernet::{self, EtherType, MacAddr};
use crate::parse::L3Type;
use crate::vlan;

/// Ethernet header.
#[derive(Debug)]
pub struct EthernetMut<'a> {
    edit: Edit<'a, { ethernet::HEADER_LEN }, NO_CHECKSUM>,
}

impl EthernetMut<'_> {
    fields! {
        /// Destination address.
        [0; 6] dst, set_dst: MacAddr, false;
        /// Source address.
        [6; 6] src, set_src: MacAddr, false;
    }

    /// Returns the EtherType after the addresses, which is that of the first VLAN tag if there is one.
    #[inline]
    pub fn ethertype(&self) -> EtherType {
        self.edit.get::<12, 2, EtherType>()
    }

    /// Swaps destination and source. Checksums do not change.
    #[inline]
    pub fn swap_addresses(&mut self) {
        ethernet::swap_addresses(self.edit.header);
    }
}

/// VLAN tag.
#[derive(Debug)]
pub struct VlanMut<'a> {
    /// TCI and the EtherType after it.
    edit: Edit<'a, { vlan::HEADER_LEN }, NO_CHECKSUM>,
}

impl VlanMut<'_> {
    fields! {
        /// Priority (3 bits), drop eligible (1 bit), VLAN id (12 bits).
        [0; 2] tci, set_tci: u16, false;
    }

    /// Returns the VLAN id, 0 to 4095.
    #[inline]
    pub fn id(&self) -> u16 {
        self.tci() & 0xfff
    }

    /// Changes the VLAN id. Bits above the lowest twelve are ignored.
    #[inline]
    pub fn set_id(&mut self, id: u16) {
        self.set_tci(self.tci() & 0xf000 | id & 0xfff);
    }

    /// Returns the priority code point, 0 to 7.
    #[inline]
    pub fn pcp(&self) -> u8 {
        (self.tci() >> 13) as u8
    }

    /// Changes the priority code point. Bits above the lowest three are ignored.
    #[inline]
    pub fn set_pcp(&mut self, pcp: u8) {
        self.set_tci(self.tci() & 0x1fff | u16::from(pcp) << 13);
    }
}

/// ARP packet for Ethernet and IPv4.
#[derive(Debug)]
pub struct ArpMut<'a> {
    edit: Edit<'a, { arp::HEADER_LEN }, NO_CHECKSUM>,
}

impl ArpMut<'_> {
    fields! {
        /// Opcode.
        [6; 2] operation, set_operation: Operation, false;
        /// Sender's Ethernet address.
        [8; 6] sender_mac, set_sender_mac: MacAddr, false;
        /// Sender's IPv4 address; 0.0.0.0 in a probe (RFC 5227).
        [14; 4] sender_ip, set_sender_ip: Ipv4Addr, false;
        /// Target's Ethernet address; unused in a request.
        [18; 6] target_mac, set_target_mac: MacAddr, false;
        /// Target's IPv4 address.
        [24; 4] target_ip, set_target_ip: Ipv4Addr, false;
    }
}

impl HeadersMut<'_> {
    /// Returns the Ethernet header. `None` if the stack starts with IP.
    #[inline]
    pub fn ethernet(&mut self) -> Option<EthernetMut<'_>> {
        if !self.layers.has_ethernet() {
            return None;
        }
        Some(EthernetMut { edit: self.edit(self.layers.l2(), Update::Plain)? })
    }

    /// Returns a VLAN tag. Index 0 is the outermost. A tag that a device stripped is in the metadata of the
    /// packet instead.
    #[inline]
    pub fn vlan(&mut self, index: usize) -> Option<VlanMut<'_>> {
        if index >= self.layers.tag_count() {
            return None;
        }
        let at = self.layers.l2() + ethernet::HEADER_LEN + index * vlan::TAG_LEN;
        Some(VlanMut { edit: self.edit(at, Update::Plain)? })
    }

    /// Returns the ARP packet.
    #[inline]
    pub fn arp(&mut self) -> Option<ArpMut<'_>> {
        if self.layers.l3_type() != L3Type::Arp {
            return None;
        }
        Some(ArpMut { edit: self.edit(self.layers.l3(), Update::Plain)? })
    }
}
