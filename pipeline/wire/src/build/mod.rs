//! Packets that a gateway makes: outer headers, neighbour requests and answers, ICMP.
//!
//! Nothing here pads to the 60 bytes that Ethernet asks for (IEEE 802.3 clause 4.2.3.3): ports do, if their medium needs it.

mod encap;
mod icmp;
mod neighbour;

pub use encap::{EncapError, MAX_ENCAP_LEN, OuterChecksum, PLAIN_LEN, Patch, VxlanConfig, VxlanEncap};
pub use icmp::{NoAnswer, echo_reply, too_big, too_big_room};
pub use neighbour::{
    ARP_FRAME_LEN, NDP_FRAME_LEN, arp_reply, arp_request, neighbor_advertisement, neighbor_solicitation,
};
