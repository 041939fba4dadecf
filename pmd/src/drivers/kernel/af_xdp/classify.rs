//! The rule classifier inside the XDP program. It parses the headers of a frame once and then compares rule
//! by rule.
//!
//! Each kind of header is copied to a fixed offset on the program's stack. A rule is then a list of
//! comparisons with constants at constant offsets. Frames that the packet parser would refuse, or that are
//! nested too deeply for this program, go to the socket. Software then applies the same rules to them.

use super::program::{TAG_CONTROL, TAG_PROTOCOL, load_counter};
use crate::drivers::kernel::common::assembler::Register::*;
use crate::drivers::kernel::common::assembler::{Assembler, Condition, Label, Width, be16, function, load_bytes};

/// Stack offset of the Ethernet header and two VLAN tags, as if all tags were in the frame: 22 bytes.
pub(super) const LINK: i16 = -40;
/// Stack offset of the fixed IP header, or of ARP.
pub(super) const NETWORK: i16 = -80;
/// Stack offset of the first bytes of the layer-4 header.
pub(super) const TRANSPORT: i16 = -104;
/// Stack offset of the parse results, see [`fact`].
const FACTS: i16 = -112;
/// Stack offset of an IPv6 extension header.
const EXTENSION: i16 = -120;
/// Stack offset of the end of the IP packet, as an offset in the frame.
const END: i16 = -128;
/// Stack offset of the frame length.
const LENGTH: i16 = -124;

/// Stack offsets of parse results that are not header fields.
pub(super) mod fact {
    use super::FACTS;

    /// EtherType behind the tags: two bytes in network order.
    pub(in super::super) const ETHERTYPE: i16 = FACTS;
    /// One bit for each VLAN tag.
    pub(in super::super) const TAGS: i16 = FACTS + 2;
    /// Network protocol, with the values of `wirepath_flow::network`.
    pub(in super::super) const NETWORK: i16 = FACTS + 3;
    /// Protocol of the layer-4 header, 0 if there is none.
    pub(in super::super) const TRANSPORT: i16 = FACTS + 4;
    /// Bit 0: a fragment; bit 1: not the first.
    pub(in super::super) const FRAGMENT: i16 = FACTS + 5;
    /// IPv6 extension headers, with the bits of `wirepath_flow::ext`.
    pub(in super::super) const EXTENSIONS: i16 = FACTS + 6;
    /// Protocol behind the IPv6 extension headers.
    pub(in super::super) const PROTOCOL: i16 = FACTS + 7;
}

/// Bytes on the stack that must equal values under masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MaskedCompare {
    /// Stack offset of the first byte.
    pub(super) at: i16,
    /// Masks and values.
    pub(super) bytes: Vec<(u8, u8)>,
}

/// A rule inside the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProgramRule {
    /// Comparisons that must all match.
    pub(super) compares: Vec<MaskedCompare>,
    /// Counter of a rule that passes the frame to the kernel; `None` if the frame goes to the socket.
    pub(super) to_kernel: Option<u32>,
}

/// Bytes of a counter of [`ProgramRule::to_kernel`]: packets, then bytes.
pub(super) const COUNTER_BYTES: u32 = 16;

/// Appends the classifier to a program. R6 holds the context. R9 is -4 if the frame's VLAN tag was stripped
/// (its protocol and value are on the stack), else 0.
///
/// Ends with a jump to one of the labels. `counters` is a map with [`COUNTER_BYTES`] for each counter.
pub(super) fn classify(a: &mut Assembler, entries: &[ProgramRule], counters: i32, to_socket: Label, to_kernel: Label) {
    let steps = Labels { to_socket, transport: a.label(), eval: a.label() };
    let (not_ipv4, not_ipv6) = (a.label(), a.label());
    clear_stack(a);
    link(a, to_socket);
    a.load(Width::Half, R4, R10, fact::ETHERTYPE);
    a.jump_if_32(R4, Condition::NotEqual, be16(0x0800), not_ipv4);
    steps.ipv4(a);
    a.bind(not_ipv4);
    a.jump_if_32(R4, Condition::NotEqual, be16(0x86dd), not_ipv6);
    steps.ipv6(a);
    a.bind(not_ipv6);
    a.jump_if_32(R4, Condition::NotEqual, be16(0x0806), steps.eval);
    steps.arp(a);
    a.bind(steps.transport);
    steps.transport(a);
    a.bind(steps.eval);
    for entry in entries {
        let no = a.label();
        entry.compares.iter().for_each(|it| compare(a, it, no));
        match entry.to_kernel {
            None => a.jump(to_socket),
            Some(counter) => {
                count(a, counters, counter);
                a.jump(to_kernel);
            }
        }
        if entry.compares.is_empty() {
            // This rule matches everything, so it is the last one. The verifier refuses unreachable
            // instructions.
            return;
        }
        a.bind(no);
    }
    a.jump(to_socket);
}

/// Initialises the part of the stack that the classifier uses, and stores the frame length.
fn clear_stack(a: &mut Assembler) {
    for at in (END..LINK + 24).step_by(8) {
        a.store_value(Width::Double, R10, at, 0);
    }
    a.copy(R1, R6);
    a.call(function::XDP_GET_BUFF_LEN);
    a.store(Width::Word, R10, LENGTH, R0);
    // The value is zero, but the verifier cannot know that. With a known constant it would walk all rules
    // once for each combination of facts.
    a.shift_right(R0, 32);
    a.store(Width::Double, R10, FACTS, R0);
}

/// Copies `bytes` bytes of the frame from offset R7 to the stack. Jumps to `fail` if the frame is shorter.
/// Clobbers R0 to R5.
fn load(a: &mut Assembler, to: i16, bytes: i32, fail: Label) {
    load_bytes(a, function::XDP_LOAD_BYTES, to, bytes, fail);
}

/// Stores a fact of one byte. Clobbers R5.
fn store_fact(a: &mut Assembler, at: i16, value: i32) {
    a.set(R5, value);
    a.store(Width::Byte, R10, at, R5);
}

fn is_tag(a: &mut Assembler, yes: Label) {
    a.jump_if_32(R4, Condition::Equal, be16(0x8100), yes);
    a.jump_if_32(R4, Condition::Equal, be16(0x88a8), yes);
}

/// Parses Ethernet and VLAN tags. Stores the EtherType and leaves R7 at layer 3.
fn link(a: &mut Assembler, to_socket: Label) {
    let [stripped, first, second, third, end] = [(); 5].map(|()| a.label());
    a.set(R7, 0);
    load(a, LINK, 12, to_socket);
    a.set(R7, 12);
    a.jump_if(R9, Condition::NotEqual, 0, stripped);
    load(a, LINK + 12, 2, to_socket);
    a.set(R7, 14);
    a.load(Width::Half, R4, R10, LINK + 12);
    is_tag(a, first);
    a.jump(end);
    a.bind(stripped);
    a.load(Width::Half, R4, R10, TAG_PROTOCOL);
    a.store(Width::Half, R10, LINK + 12, R4);
    a.load(Width::Half, R4, R10, TAG_CONTROL);
    a.network_order_16(R4);
    a.store(Width::Half, R10, LINK + 14, R4);
    load(a, LINK + 16, 2, to_socket);
    a.set(R7, 14);
    a.jump(second);
    a.bind(first);
    load(a, LINK + 14, 4, to_socket);
    a.set(R7, 18);
    a.bind(second);
    store_fact(a, fact::TAGS, 1);
    a.load(Width::Half, R4, R10, LINK + 16);
    is_tag(a, third);
    a.jump(end);
    a.bind(third);
    load(a, LINK + 18, 4, to_socket);
    a.add(R7, 4);
    store_fact(a, fact::TAGS, 3);
    a.load(Width::Half, R4, R10, LINK + 20);
    // A third tag: leave the frame to software.
    is_tag(a, to_socket);
    a.bind(end);
    a.store(Width::Half, R10, fact::ETHERTYPE, R4);
}

struct Labels {
    to_socket: Label,
    transport: Label,
    eval: Label,
}

const TCP: u32 = 6;
const UDP: u32 = 17;
const ESP: u32 = 50;

/// Maximum number of IPv6 extension headers, equal to that of the packet parser.
const MAX_EXTENSIONS: usize = wirepath_wire::ipv6::MAX_EXTENSIONS;

impl Labels {
    /// Parses IPv4 at R7. Continues with R8 = protocol and R7 behind the header, or with the rules.
    fn ipv4(&self, a: &mut Assembler) {
        let (later, whole) = (a.label(), a.label());
        load(a, NETWORK, 20, self.to_socket);
        a.load(Width::Byte, R4, R10, NETWORK);
        a.copy(R5, R4);
        a.shift_right(R5, 4);
        a.jump_if(R5, Condition::NotEqual, 4, self.to_socket);
        a.and(R4, 0x0f);
        a.shift_left(R4, 2);
        a.jump_if(R4, Condition::Less, 20, self.to_socket);
        a.load(Width::Half, R5, R10, NETWORK + 2);
        a.network_order_16(R5);
        a.jump_if_register(R4, Condition::Greater, R5, self.to_socket);
        self.store_packet_end(a);
        store_fact(a, fact::NETWORK, 4);
        a.load(Width::Byte, R8, R10, NETWORK + 9);
        a.load(Width::Half, R5, R10, NETWORK + 6);
        a.network_order_16(R5);
        a.copy(R3, R5);
        a.and(R3, 0x1fff);
        a.jump_if(R3, Condition::NotEqual, 0, later);
        a.and(R5, 0x2000);
        a.jump_if(R5, Condition::Equal, 0, whole);
        store_fact(a, fact::FRAGMENT, 1);
        a.bind(whole);
        a.add_register(R7, R4);
        a.jump(self.transport);
        a.bind(later);
        store_fact(a, fact::FRAGMENT, 3);
        a.jump(self.eval);
    }

    /// Stores the end of the packet at R7, whose length is in R5. The end must lie in the frame. Clobbers R3
    /// and R5.
    fn store_packet_end(&self, a: &mut Assembler) {
        a.add_register(R5, R7);
        a.load(Width::Word, R3, R10, LENGTH);
        a.jump_if_register(R5, Condition::Greater, R3, self.to_socket);
        a.store(Width::Word, R10, END, R5);
    }

    /// Parses IPv6 at R7. Continues like [`Self::ipv4`].
    fn ipv6(&self, a: &mut Assembler) {
        let (done, later) = (a.label(), a.label());
        load(a, NETWORK, 40, self.to_socket);
        a.load(Width::Byte, R4, R10, NETWORK);
        a.shift_right(R4, 4);
        a.jump_if(R4, Condition::NotEqual, 6, self.to_socket);
        a.load(Width::Half, R5, R10, NETWORK + 4);
        a.network_order_16(R5);
        a.add(R5, 40);
        self.store_packet_end(a);
        store_fact(a, fact::NETWORK, 6);
        a.load(Width::Byte, R8, R10, NETWORK + 6);
        a.add(R7, 40);
        for _ in 0..MAX_EXTENSIONS {
            self.extension(a, done, later);
        }
        for number in [0, 43, 44, 51, 60] {
            a.jump_if(R8, Condition::Equal, number, self.to_socket);
        }
        a.bind(done);
        a.store(Width::Byte, R10, fact::PROTOCOL, R8);
        a.jump(self.transport);
        a.bind(later);
        a.store(Width::Byte, R10, fact::PROTOCOL, R8);
        store_fact(a, fact::FRAGMENT, 3);
        a.jump(self.eval);
    }

    /// Parses one extension header if R8 is the number of one.
    fn extension(&self, a: &mut Assembler, done: Label, later: Label) {
        let [common, fragment, authentication, advance, next] = [(); 5].map(|()| a.label());
        // Hop-by-hop, routing and destination options, with the bits of `wirepath_flow::ext`.
        let plain = [(0, 1), (43, 2), (60, 8)].map(|(number, bit)| (number, bit, a.label()));
        for (number, _, label) in plain {
            a.jump_if(R8, Condition::Equal, number, label);
        }
        a.jump_if(R8, Condition::Equal, 44, fragment);
        a.jump_if(R8, Condition::Equal, 51, authentication);
        a.jump(done);
        for (_, bit, label) in plain {
            a.bind(label);
            mark_extension(a, bit);
            a.jump(common);
        }
        a.bind(common);
        self.load_extension(a);
        a.load(Width::Byte, R4, R10, EXTENSION + 1);
        a.shift_left(R4, 3);
        a.add(R4, 8);
        a.jump(advance);
        // RFC 4302 section 2.2: the length counts 4-byte units minus 2. The fixed part has 12 bytes.
        a.bind(authentication);
        mark_extension(a, 16);
        self.load_extension(a);
        a.load(Width::Byte, R4, R10, EXTENSION + 1);
        a.add(R4, 2);
        a.shift_left(R4, 2);
        a.jump_if(R4, Condition::Less, 12, self.to_socket);
        a.jump(advance);
        a.bind(fragment);
        a.load(Width::Byte, R3, R10, fact::EXTENSIONS);
        a.jump_if(R3, Condition::Bits, 4, self.to_socket);
        mark_extension(a, 4);
        self.load_extension(a);
        a.load(Width::Half, R5, R10, EXTENSION + 2);
        a.network_order_16(R5);
        a.load(Width::Byte, R8, R10, EXTENSION);
        a.add(R7, 8);
        a.copy(R3, R5);
        a.and(R3, 0xfff8);
        a.jump_if(R3, Condition::NotEqual, 0, later);
        a.and(R5, 1);
        a.jump_if(R5, Condition::Equal, 0, next);
        store_fact(a, fact::FRAGMENT, 1);
        a.jump(next);
        a.bind(advance);
        a.load(Width::Byte, R8, R10, EXTENSION);
        a.add_register(R7, R4);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R7, Condition::Greater, R3, self.to_socket);
        a.bind(next);
    }

    /// Loads the first 8 bytes of an extension header at R7.
    fn load_extension(&self, a: &mut Assembler) {
        self.check_length(a, 8);
        load(a, EXTENSION, 8, self.to_socket);
    }

    /// Jumps to the socket unless the packet has `bytes` bytes at R7. Clobbers R3 and R5.
    fn check_length(&self, a: &mut Assembler, bytes: i32) {
        a.copy(R5, R7);
        a.add(R5, bytes);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R5, Condition::Greater, R3, self.to_socket);
    }

    /// Parses ARP at R7, with Ethernet and IPv4 addresses (RFC 826).
    fn arp(&self, a: &mut Assembler) {
        load(a, NETWORK, 28, self.to_socket);
        for (at, word) in [(0, [0, 1, 8, 0]), (4, [6, 4, 0, 0])] {
            let width = if at == 0 { Width::Word } else { Width::Half };
            a.load(width, R4, R10, NETWORK + at);
            let value = if at == 0 { u32::from_ne_bytes(word) } else { be16(0x0604) };
            a.jump_if_32(R4, Condition::NotEqual, value, self.eval);
        }
        store_fact(a, fact::NETWORK, 1);
        a.jump(self.eval);
    }

    /// Parses the layer-4 header: R8 = protocol, R7 = offset of the header. Falls through to the rules.
    fn transport(&self, a: &mut Assembler) {
        let [tcp, udp, eight, noted] = [(); 4].map(|()| a.label());
        a.jump_if_32(R8, Condition::Equal, TCP, tcp);
        a.jump_if_32(R8, Condition::Equal, UDP, udp);
        a.jump_if_32(R8, Condition::Equal, ESP, eight);
        let not_icmp = a.label();
        a.load(Width::Byte, R4, R10, fact::NETWORK);
        let is_ipv6 = a.label();
        a.jump_if(R4, Condition::Equal, 6, is_ipv6);
        a.jump_if_32(R8, Condition::Equal, 1, eight);
        a.jump(not_icmp);
        a.bind(is_ipv6);
        a.jump_if_32(R8, Condition::Equal, 58, eight);
        a.bind(not_icmp);
        a.jump(self.eval);
        a.bind(tcp);
        self.check_length(a, 20);
        load(a, TRANSPORT, 20, self.to_socket);
        a.load(Width::Byte, R4, R10, TRANSPORT + 12);
        a.shift_right(R4, 4);
        a.shift_left(R4, 2);
        a.jump_if(R4, Condition::Less, 20, self.to_socket);
        a.add_register(R4, R7);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R4, Condition::Greater, R3, self.to_socket);
        a.jump(noted);
        a.bind(udp);
        self.check_length(a, 8);
        load(a, TRANSPORT, 8, self.to_socket);
        a.load(Width::Half, R4, R10, TRANSPORT + 4);
        a.network_order_16(R4);
        a.jump_if(R4, Condition::Less, 8, self.to_socket);
        // The first fragment of a datagram is shorter than the UDP length says.
        a.load(Width::Byte, R3, R10, fact::FRAGMENT);
        a.jump_if(R3, Condition::NotEqual, 0, noted);
        a.add_register(R4, R7);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R4, Condition::Greater, R3, self.to_socket);
        a.jump(noted);
        a.bind(eight);
        self.check_length(a, 8);
        load(a, TRANSPORT, 8, self.to_socket);
        a.bind(noted);
        a.store(Width::Byte, R10, fact::TRANSPORT, R8);
    }
}

/// Stores the presence of an IPv6 extension header. Clobbers R3.
fn mark_extension(a: &mut Assembler, bit: i32) {
    a.load(Width::Byte, R3, R10, fact::EXTENSIONS);
    a.or(R3, bit);
    a.store(Width::Byte, R10, fact::EXTENSIONS, R3);
}

/// Jumps to `no` unless all bytes match. Clobbers R4.
fn compare(a: &mut Assembler, it: &MaskedCompare, no: Label) {
    let mut at = 0;
    while at < it.bytes.len() {
        if it.bytes[at].0 == 0 {
            at += 1;
            continue;
        }
        let offset = it.at + at as i16;
        let left = it.bytes.len() - at;
        let (width, bytes) = match offset.rem_euclid(4) {
            0 if left >= 4 => (Width::Word, 4),
            0 | 2 if left >= 2 => (Width::Half, 2),
            _ => (Width::Byte, 1),
        };
        let word = |pick: fn(&(u8, u8)) -> u8| {
            let mut word = [0; 4];
            for (to, from) in word.iter_mut().zip(&it.bytes[at..at + bytes]) {
                *to = pick(from);
            }
            match bytes {
                4 => u32::from_ne_bytes(word),
                2 => u16::from_ne_bytes([word[0], word[1]]).into(),
                _ => word[0].into(),
            }
        };
        let (mask, value) = (word(|(mask, _)| *mask), word(|(_, value)| *value));
        a.load(width, R4, R10, offset);
        if mask != u32::MAX >> (32 - 8 * bytes) {
            a.and(R4, mask as i32);
        }
        a.jump_if_32(R4, Condition::NotEqual, value, no);
        at += bytes;
    }
}

/// Counts the frame. Clobbers R0 to R5.
fn count(a: &mut Assembler, map: i32, counter: u32) {
    let absent = a.label();
    load_counter(a, map, counter as i32, absent);
    a.set(R1, 1);
    a.atomic_add(R0, 0, R1);
    a.load(Width::Word, R1, R10, LENGTH);
    // Include the stripped VLAN tag.
    a.subtract_register(R1, R9);
    a.atomic_add(R0, 8, R1);
    a.bind(absent);
}
