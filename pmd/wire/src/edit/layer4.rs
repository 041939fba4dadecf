//! UDP, TCP and ICMP.

use super::{Edit, HeadersMut, Update, fields};
use crate::field::{get, put};
use crate::parse::L4Type;
use crate::{icmpv4, icmpv6, tcp, udp};

/// UDP header.
#[derive(Debug)]
pub struct UdpMut<'a> {
    edit: Edit<'a, { udp::HEADER_LEN }, 6>,
}

impl UdpMut<'_> {
    fields! {
        /// Source port.
        [0; 2] src_port, set_src_port: u16, false;
        /// Destination port.
        [2; 2] dst_port, set_dst_port: u16, false;
    }

    /// Returns the length of header and payload, bytes.
    #[inline]
    pub fn length(&self) -> u16 {
        self.edit.get::<4, 2, u16>()
    }

    /// Returns false if the sender left the checksum out.
    #[inline]
    pub fn has_checksum(&self) -> bool {
        self.edit.get::<6, 2, u16>() != 0
    }

    /// Swaps source and destination port. Checksums do not change.
    #[inline]
    pub fn swap_ports(&mut self) {
        swap_ports(self.edit.header);
    }
}

/// TCP header.
#[derive(Debug)]
pub struct TcpMut<'a> {
    edit: Edit<'a, { tcp::HEADER_LEN }, 16>,
}

impl TcpMut<'_> {
    fields! {
        /// Source port.
        [0; 2] src_port, set_src_port: u16, false;
        /// Destination port.
        [2; 2] dst_port, set_dst_port: u16, false;
        /// Sequence number.
        [4; 4] seq, set_seq: u32, false;
        /// Acknowledgment number.
        [8; 4] ack, set_ack: u32, false;
        /// The [`flags`](tcp::flags).
        [13; 1] flags, set_flags: u8, false;
        /// Window.
        [14; 2] window, set_window: u16, false;
        /// Urgent pointer.
        [18; 2] urgent, set_urgent: u16, false;
    }

    /// Swaps source and destination port. Checksums do not change.
    #[inline]
    pub fn swap_ports(&mut self) {
        swap_ports(self.edit.header);
    }
}

/// Swaps the ports, which are the first two words of the header.
#[inline(always)]
fn swap_ports<const LEN: usize>(header: &mut [u8; LEN]) {
    let ports = u32::from_ne_bytes(get::<0, 4, LEN>(header));
    put::<0, 4, LEN>(header, ports.rotate_left(16).to_ne_bytes());
}

/// Header of an ICMP message.
#[derive(Debug)]
pub struct Icmpv4Mut<'a> {
    edit: Edit<'a, { icmpv4::HEADER_LEN }, 2>,
}

impl Icmpv4Mut<'_> {
    fields! {
        /// Message type.
        [0; 1] kind, set_kind: icmpv4::Type, false;
        /// Code within the type.
        [1; 1] code, set_code: u8, false;
        /// Depends on the type: identifier and sequence number, or unused and next-hop MTU.
        [4; 4] rest, set_rest: u32, false;
    }
}

/// Header of an ICMPv6 message.
#[derive(Debug)]
pub struct Icmpv6Mut<'a> {
    edit: Edit<'a, { icmpv6::HEADER_LEN }, 2>,
}

impl Icmpv6Mut<'_> {
    fields! {
        /// Message type.
        [0; 1] kind, set_kind: icmpv6::Type, false;
        /// Code within the type.
        [1; 1] code, set_code: u8, false;
    }
}

impl HeadersMut<'_> {
    /// Returns the UDP header. Later fragments have none.
    #[inline]
    pub fn udp(&mut self) -> Option<UdpMut<'_>> {
        Some(UdpMut { edit: self.layer4(L4Type::Udp, Update::Udp)? })
    }

    /// Returns the TCP header. Later fragments have none.
    #[inline]
    pub fn tcp(&mut self) -> Option<TcpMut<'_>> {
        Some(TcpMut { edit: self.layer4(L4Type::Tcp, Update::Plain)? })
    }

    /// Returns the header of an ICMP message.
    #[inline]
    pub fn icmpv4(&mut self) -> Option<Icmpv4Mut<'_>> {
        Some(Icmpv4Mut { edit: self.layer4(L4Type::Icmpv4, Update::NonZero)? })
    }

    /// Returns the header of an ICMPv6 message.
    #[inline]
    pub fn icmpv6(&mut self) -> Option<Icmpv6Mut<'_>> {
        Some(Icmpv6Mut { edit: self.layer4(L4Type::Icmpv6, Update::Plain)? })
    }

    #[inline(always)]
    fn layer4<const LEN: usize, const OWN: usize>(
        &mut self,
        kind: L4Type,
        update: Update,
    ) -> Option<Edit<'_, LEN, OWN>> {
        if self.layers.l4_type() != kind {
            return None;
        }
        let own = self.l4_update(update);
        self.edit(self.layers.l4(), own)
    }
}
