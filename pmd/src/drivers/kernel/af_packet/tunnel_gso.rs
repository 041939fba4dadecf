//! Superframes in tunnels, which the kernel takes whole with the help of a program at the tc egress hook.
//!
//! A packet socket has no form for a superframe in a tunnel: a `virtio_net_hdr` describes one TCP or UDP header, and
//! the kernel would take all before it for one IP header. The socket sends such a frame with a mark ([`mark`]), which
//! tells the length and the kind of the tunnel's headers. The program removes these headers and puts them back as
//! headers of a tunnel (`bpf_skb_adjust_room`), so that the kernel knows both stacks. After that the frame is the same
//! as one of the kernel's own tunnel devices.
//!
//! The hook lies behind the queueing discipline's lock and needs sockets without `PACKET_QDISC_BYPASS`. It is used only
//! on interfaces without a queueing discipline, where frames of both kinds of sockets keep their order.

use std::io;

use wirepath_packet::Packet;
use wirepath_packet::superframe::udp_header;
use wirepath_wire::{IpProtocol, L3Type, L4Type, Parsed, Tunnel, gre};

use crate::drivers::kernel::common::assembler::{Assembler, Condition, Register, Width, function};
use crate::drivers::kernel::common::bpf::{Program, ProgramKind, ProgramLink};
use crate::drivers::kernel::common::link::Interface;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Most bytes of headers between the outer Ethernet header and the inner IP header. The program has room for them.
const MAX_HEADERS: usize = 192;
/// Least bytes of these headers: those of IPv4.
const MIN_HEADERS: usize = 20;

/// Upper bits of each mark. The program removes the mark.
const MAGIC: u32 = 0x2bb8;
/// Position of these bits.
const MAGIC_SHIFT: i32 = 17;
/// Position of the length of the headers in bytes. Eight bits hold it.
const LENGTH_SHIFT: i32 = 9;
/// The other bits are the flags of the helper `bpf_skb_adjust_room` (linux/bpf.h).
const ENCAP_IPV4: u32 = 1 << 1;
const ENCAP_IPV6: u32 = 1 << 2;
const ENCAP_GRE: u32 = 1 << 3;
const ENCAP_UDP: u32 = 1 << 4;
const ENCAP_ETHERNET: u32 = 1 << 6;
const DECAP_IPV4: u32 = 1 << 7;
const DECAP_IPV6: u32 = 1 << 8;

/// Loads the program and attaches it to the interface.
pub(super) fn attach(interface: &Interface) -> io::Result<ProgramLink> {
    let code = code().map_err(io::Error::other)?;
    Program::load(ProgramKind::TcxEgress, &code, "wirepath_tunnel", 0, 0)?.link(interface.index, 0)
}

/// Returns the mark with which the program changes this superframe; `None` if it cannot.
///
/// It cannot if a VLAN tag is in front, or if the outer IP header has options. The kernel has no flag for outer
/// checksums that programs can set, and none for Ethernet directly in IP (`bpf_skb_net_grow` in net/core/filter.c).
pub(super) fn mark(packet: &Packet, parsed: &Parsed) -> Option<u32> {
    let (outer, inner) = (parsed.outer(), parsed.inner()?);
    let (ip, encap) = match outer.l3_type() {
        L3Type::Ipv4 => (20, ENCAP_IPV4),
        L3Type::Ipv6 => (40, ENCAP_IPV6),
        _ => return None,
    };
    let decap = match inner.l3_type() {
        L3Type::Ipv4 => DECAP_IPV4,
        L3Type::Ipv6 => DECAP_IPV6,
        _ => return None,
    };
    let kind = match (parsed.tunnel_of(0), outer.l4_type()) {
        (Tunnel::Vxlan | Tunnel::VxlanGpe | Tunnel::Geneve, L4Type::Udp) => {
            udp_header(packet.data(), outer).filter(|udp| udp[6..] == [0; 2])?;
            ENCAP_UDP
        }
        (Tunnel::Gre, L4Type::Gre) if !parsed.has_tunnel_labels(0) => {
            let flags = u16::from_be_bytes(*packet.data().get(outer.l4()..)?.first_chunk()?);
            // The kernel repeats the header as it is.
            if flags & (gre::FLAG_CHECKSUM | gre::FLAG_SEQUENCE) != 0 {
                return None;
            }
            ENCAP_GRE
        }
        (Tunnel::Ip, _) if matches!(outer.protocol(), IpProtocol::IPV4 | IpProtocol::IPV6) => 0,
        _ => return None,
    };
    // A segment routing header may be between IP headers (`ipv6_gso_pull_exthdrs` in net/ipv6/ip6_offload.c). The
    // others have their place behind the IP header.
    let has_options = outer.l4() != outer.l3() + ip && (kind != 0 || encap == ENCAP_IPV4);
    let ethernet = if inner.has_ethernet() { ENCAP_ETHERNET } else { 0 };
    let is_simple = matches!(inner.l4_type(), L4Type::Tcp | L4Type::Udp)
        && outer.l3() == ETHERNET
        && !has_options
        && inner.l3() - inner.l2() == if inner.has_ethernet() { ETHERNET } else { 0 }
        && packet.vlan().is_none();
    let len = inner.l3() - outer.l3();
    let flags = encap | kind | ethernet | decap;
    (is_simple && len <= MAX_HEADERS).then_some(MAGIC << MAGIC_SHIFT | (len as u32) << LENGTH_SHIFT | flags)
}

/// Returns the program.
fn code() -> Result<Vec<[u8; 8]>, &'static str> {
    /// Offset of the mark in `struct __sk_buff` (linux/bpf.h).
    const SKB_MARK: i16 = 8;
    // Numbers of helpers.
    const STORE_BYTES: i32 = 9;
    const ADJUST_ROOM: i32 = 50;
    /// Flag of the helper `bpf_skb_adjust_room`: the segment size stays.
    const FIXED_GSO: i32 = 1;
    /// Mode of the helper: the room is behind the Ethernet header.
    const BEHIND_ETHERNET: i32 = 1;
    /// Position of the length of the inner Ethernet header in the flags of the helper.
    const ENCAP_L2_SHIFT: i32 = 56;
    const DECAP: u32 = DECAP_IPV4 | DECAP_IPV6;
    const ENCAP: u32 = ENCAP_IPV4 | ENCAP_IPV6 | ENCAP_GRE | ENCAP_UDP | ENCAP_ETHERNET;
    /// `TCX_NEXT` and `TCX_DROP`.
    const NEXT: i32 = -1;
    const DROP: i32 = 2;
    /// The outer headers behind Ethernet are on the stack.
    const STACK: i32 = -(MAX_HEADERS as i32);
    use Register::{R0, R1, R2, R3, R4, R5, R6, R7, R8, R10};

    let mut a = Assembler::default();
    let (other, drop, no_ethernet) = (a.label(), a.label(), a.label());
    a.copy(R6, R1);
    a.load(Width::Word, R7, R6, SKB_MARK);
    a.copy(R0, R7);
    a.shift_right(R0, MAGIC_SHIFT);
    a.jump_if(R0, Condition::NotEqual, MAGIC as i32, other);
    a.copy(R8, R7);
    a.shift_right(R8, LENGTH_SHIFT);
    a.and(R8, 0xff);
    // Marks of another length are those of other programs.
    a.jump_if(R8, Condition::Less, MIN_HEADERS as i32, other);
    a.jump_if(R8, Condition::Greater, MAX_HEADERS as i32, other);
    a.set(R0, 0);
    a.store(Width::Word, R6, SKB_MARK, R0);
    // The kernel demands it before a call that writes a part.
    for at in (STACK..0).step_by(8) {
        a.store_value(Width::Double, R10, at as i16, 0);
    }
    a.copy(R1, R6);
    a.set(R2, ETHERNET as i32);
    a.copy(R3, R10);
    a.add(R3, STACK);
    a.copy(R4, R8);
    a.call(function::SKB_LOAD_BYTES);
    a.jump_if(R0, Condition::NotEqual, 0, drop);
    a.copy(R1, R6);
    a.set(R2, 0);
    a.subtract_register(R2, R8);
    a.set(R3, BEHIND_ETHERNET);
    a.copy(R4, R7);
    a.and(R4, DECAP as i32);
    a.or(R4, FIXED_GSO);
    a.call(ADJUST_ROOM);
    a.jump_if(R0, Condition::NotEqual, 0, drop);
    a.copy(R1, R6);
    a.copy(R2, R8);
    a.set(R3, BEHIND_ETHERNET);
    a.set(R4, 0);
    a.copy(R0, R7);
    a.and(R0, ENCAP_ETHERNET as i32);
    a.jump_if(R0, Condition::Equal, 0, no_ethernet);
    a.set(R4, ETHERNET as i32);
    a.shift_left(R4, ENCAP_L2_SHIFT);
    a.bind(no_ethernet);
    a.and(R7, ENCAP as i32);
    a.add_register(R4, R7);
    a.or(R4, FIXED_GSO);
    a.call(ADJUST_ROOM);
    a.jump_if(R0, Condition::NotEqual, 0, drop);
    a.copy(R1, R6);
    a.set(R2, ETHERNET as i32);
    a.copy(R3, R10);
    a.add(R3, STACK);
    a.copy(R4, R8);
    a.set(R5, 0);
    a.call(STORE_BYTES);
    a.jump_if(R0, Condition::NotEqual, 0, drop);
    a.jump(other);
    a.bind(drop);
    // The sender gets an error.
    a.set(R0, DROP);
    a.exit();
    a.bind(other);
    a.set(R0, NEXT);
    a.exit();
    a.finish()
}
