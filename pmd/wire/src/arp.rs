//! ARP for Ethernet and IPv4 (RFC 826).

use core::net::Ipv4Addr;

use crate::error::{BufferTooShort, ParseError};
use crate::ethernet::{EtherType, MacAddr};
use crate::field::{Field, header_mut, put};

code! {
    /// ARP opcode (IANA "arp-parameters").
    pub struct Operation(u16) 2 {
        REQUEST = 1 "request",
        REPLY = 2 "reply",
    }
}

/// Hardware type of Ethernet.
pub const HARDWARE_ETHERNET: u16 = 1;

header! {
    /// An ARP packet for Ethernet and IPv4. The constructor refuses other address formats.
    28 bytes, short: ArpTruncated {
        /// Hardware type, [`HARDWARE_ETHERNET`].
        [0; 2] hardware, set_hardware: u16;
        /// Protocol type, [`EtherType::IPV4`].
        [2; 2] protocol, set_protocol: EtherType;
        /// Hardware and protocol address lengths, 6 and 4.
        [4; 2] address_lengths, set_address_lengths: [u8; 2];
        /// Opcode.
        [6; 2] operation, set_operation: Operation;
        /// Sender's Ethernet address.
        [8; 6] sender_mac, set_sender_mac: MacAddr;
        /// Sender's IPv4 address; 0.0.0.0 in a probe (RFC 5227).
        [14; 4] sender_ip, set_sender_ip: Ipv4Addr;
        /// Target's Ethernet address; unused in a request.
        [18; 6] target_mac, set_target_mac: MacAddr;
        /// Target's IPv4 address.
        [24; 4] target_ip, set_target_ip: Ipv4Addr;
    }
}

const FORMAT: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// True if the address formats are Ethernet and IPv4.
#[inline]
pub(crate) fn is_known(header: &[u8; HEADER_LEN]) -> bool {
    header[..6] == FORMAT
}

fn split(header: &[u8; HEADER_LEN], _: usize) -> Result<(usize, usize), ParseError> {
    if !is_known(header) {
        return Err(ParseError::ArpBadFormat);
    }
    Ok((0, 0))
}

/// An ARP packet as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Opcode.
    pub operation: Operation,
    /// Sender's Ethernet address.
    pub sender_mac: MacAddr,
    /// Sender's IPv4 address.
    pub sender_ip: Ipv4Addr,
    /// Target's Ethernet address.
    pub target_mac: MacAddr,
    /// Target's IPv4 address.
    pub target_ip: Ipv4Addr,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr {
            operation: view.operation(),
            sender_mac: view.sender_mac(),
            sender_ip: view.sender_ip(),
            target_mac: view.target_mac(),
            target_ip: view.target_ip(),
        }
    }

    /// Writes the packet to the front of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        put::<0, 6, HEADER_LEN>(h, FORMAT);
        put::<6, 2, HEADER_LEN>(h, self.operation.write());
        put::<8, 6, HEADER_LEN>(h, self.sender_mac.write());
        put::<14, 4, HEADER_LEN>(h, self.sender_ip.write());
        put::<18, 6, HEADER_LEN>(h, self.target_mac.write());
        put::<24, 4, HEADER_LEN>(h, self.target_ip.write());
        Ok(HEADER_LEN)
    }
}
