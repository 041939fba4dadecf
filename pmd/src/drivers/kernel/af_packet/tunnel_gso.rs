//! TCP superframes in UDP tunnels, which the kernel takes whole with the help of a program at the tc egress hook.
//!
//! A packet socket has no form for a superframe in a tunnel: a `virtio_net_hdr` describes one TCP header, and the
//! kernel would take all before it for one IP header. The socket sends such a frame with a mark. The program removes
//! the outer headers and puts them back as headers of a tunnel (`bpf_skb_adjust_room`), so that the kernel knows both
//! stacks. After that the frame is the same as one of the kernel's own vxlan device.
//!
//! The hook lies behind the queueing discipline's lock and needs [`Socket`]s without `PACKET_QDISC_BYPASS`. It is used
//! only on interfaces without a queueing discipline, where frames of both kinds of sockets keep their order.

use std::io;

use wirepath_packet::Packet;
use wirepath_packet::superframe::udp_header;
use wirepath_wire::{L3Type, L4Type, Parsed};

use super::socket::Socket;
use crate::drivers::kernel::common::assembler::{Assembler, Condition, Register, Width};
use crate::drivers::kernel::common::bpf::{Program, ProgramKind, ProgramLink};
use crate::drivers::kernel::common::link::Interface;

/// Mark of the frames that the program changes. It removes the mark.
const MARK: u32 = 0x5770_7467;
/// Bytes of an Ethernet header.
const ETHERNET: i32 = 14;
/// Bytes of UDP, of VXLAN or of GENEVE without options, and of the inner Ethernet header.
const BEHIND_IP: i32 = 8 + 8 + ETHERNET;

/// Loads the program and attaches it to the interface.
pub(super) fn attach(interface: &Interface) -> io::Result<ProgramLink> {
    let code = code().map_err(io::Error::other)?;
    Program::load(ProgramKind::TcxEgress, &code, "wirepath_tunnel", 0, 0)?.link(interface.index, 0)
}

/// Opens a socket for frames that the program changes.
pub(super) fn socket() -> io::Result<Socket> {
    let socket = Socket::new()?;
    socket.mark(MARK)?;
    Ok(socket)
}

/// Returns whether the program can change this superframe: no VLAN tag in front, no options, and no outer checksum,
/// for which the kernel has no flag that programs can set.
pub(super) fn fits(packet: &Packet, parsed: &Parsed) -> bool {
    let (outer, Some(inner)) = (parsed.outer(), parsed.inner()) else { return false };
    let ip = match outer.l3_type() {
        L3Type::Ipv4 => 20,
        L3Type::Ipv6 => 40,
        _ => return false,
    };
    inner.l4_type() == L4Type::Tcp
        && matches!(inner.l3_type(), L3Type::Ipv4 | L3Type::Ipv6)
        && outer.l3() == ETHERNET as usize
        && outer.l4() == outer.l3() + ip
        && inner.l3() == outer.l4() + BEHIND_IP as usize
        && packet.vlan().is_none()
        && udp_header(packet.data(), outer).is_some_and(|udp| udp[6..] == [0; 2])
}

/// Returns the program.
fn code() -> Result<Vec<[u8; 8]>, &'static str> {
    // Offsets in `struct __sk_buff` (linux/bpf.h).
    const SKB_MARK: i16 = 8;
    const SKB_PROTOCOL: i16 = 16;
    // Numbers of helpers.
    const STORE_BYTES: i32 = 9;
    const LOAD_BYTES: i32 = 26;
    const ADJUST_ROOM: i32 = 50;
    // Flags of the helper `bpf_skb_adjust_room`, and the mode for room behind the Ethernet header.
    const FIXED_GSO: i32 = 1;
    const ENCAP_IPV4: i32 = 1 << 1;
    const ENCAP_IPV6: i32 = 1 << 2;
    const ENCAP_UDP: i32 = 1 << 4;
    const ENCAP_ETHERNET: i32 = 1 << 6;
    const DECAP_IPV4: i32 = 1 << 7;
    const DECAP_IPV6: i32 = 1 << 8;
    const BEHIND_ETHERNET: i32 = 1;
    /// Position of the length of the inner Ethernet header in the flags.
    const ENCAP_L2_SHIFT: i32 = 56;
    /// `TCX_NEXT` and `TCX_DROP`.
    const NEXT: i32 = -1;
    const DROP: i32 = 2;
    use Register::{R0, R1, R2, R3, R4, R5, R6, R7, R10};

    let ethertype = |value: u16| i32::from(value.to_be());
    let mut a = Assembler::default();
    let (other, drop) = (a.label(), a.label());
    a.copy(R6, R1);
    a.load(Width::Word, R0, R6, SKB_MARK);
    a.jump_if_32(R0, Condition::NotEqual, MARK, other);
    a.set(R0, 0);
    a.store(Width::Word, R6, SKB_MARK, R0);
    a.load(Width::Word, R7, R6, SKB_PROTOCOL);
    for (kind, ip, encap) in [(0x0800, 20, ENCAP_IPV4), (0x86dd, 40, ENCAP_IPV6)] {
        let len = ip + BEHIND_IP;
        // The outer headers behind Ethernet are on the stack.
        let stack = -((len + 7) & !7);
        let (end, remove) = (a.label(), a.label());
        a.jump_if(R7, Condition::NotEqual, ethertype(kind), end);
        a.copy(R1, R6);
        a.set(R2, ETHERNET);
        a.copy(R3, R10);
        a.add(R3, stack);
        a.set(R4, len);
        a.call(LOAD_BYTES);
        a.jump_if(R0, Condition::NotEqual, 0, drop);
        // The last two bytes are the inner EtherType.
        a.load(Width::Half, R0, R10, (stack + len - 2) as i16);
        a.set(R4, FIXED_GSO | DECAP_IPV4);
        a.jump_if(R0, Condition::Equal, ethertype(0x0800), remove);
        a.jump_if(R0, Condition::NotEqual, ethertype(0x86dd), drop);
        a.set(R4, FIXED_GSO | DECAP_IPV6);
        a.bind(remove);
        a.copy(R1, R6);
        a.set(R2, -len);
        a.set(R3, BEHIND_ETHERNET);
        a.call(ADJUST_ROOM);
        a.jump_if(R0, Condition::NotEqual, 0, drop);
        a.copy(R1, R6);
        a.set(R2, len);
        a.set(R3, BEHIND_ETHERNET);
        a.set(R4, ETHERNET);
        a.shift_left(R4, ENCAP_L2_SHIFT);
        a.or(R4, FIXED_GSO | encap | ENCAP_UDP | ENCAP_ETHERNET);
        a.call(ADJUST_ROOM);
        a.jump_if(R0, Condition::NotEqual, 0, drop);
        a.copy(R1, R6);
        a.set(R2, ETHERNET);
        a.copy(R3, R10);
        a.add(R3, stack);
        a.set(R4, len);
        a.set(R5, 0);
        a.call(STORE_BYTES);
        a.jump_if(R0, Condition::NotEqual, 0, drop);
        a.jump(other);
        a.bind(end);
    }
    a.bind(drop);
    // The sender gets an error.
    a.set(R0, DROP);
    a.exit();
    a.bind(other);
    a.set(R0, NEXT);
    a.exit();
    a.finish()
}
