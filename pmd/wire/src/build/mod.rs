//! Packets that a gateway originates: outer headers, neighbour requests and replies, ICMP.
//!
//! Frames are not padded to the 60 bytes of Ethernet (IEEE 802.3 clause 4.2.3.3). Ports pad them if their
//! medium needs it.

mod encap;
mod icmp;
mod neighbour;
mod short;

pub use encap::{
    EncapError, EncapFields, MAX_ENCAP_LEN, OuterChecksum, OuterConfig, OuterHeaders, PLAIN_LEN, PayloadType,
    Transport, VariableFields, VxlanConfig,
};
pub use icmp::{IcmpError, NoReply, echo_reply, icmp_error, max_icmp_error_len};
pub use neighbour::{
    ARP_FRAME_LEN, NDP_FRAME_LEN, arp_reply, arp_request, neighbor_advertisement, neighbor_solicitation,
};
pub use short::ShortFields;
