//! The part of the XDP program that decides rules: looks at a frame's headers once, then asks rule by rule.
//!
//! Headers are copied to the program's stack, each kind to its own place, so that a rule is a list of comparisons with constants at
//! constant places. What the parser of packets would refuse, and what is too deep for this program, goes to the socket, where software
//! decides it by the same rules.

use super::assembler::Register::*;
use super::assembler::{Assembler, Condition, Label, Width};
use super::program::{KEY, TAG_CONTROL, TAG_PROTOCOL, half};

// BPF_FUNC_*, Linux 5.18.
const GET_BUFF_LEN: i32 = 188;
const LOAD_BYTES: i32 = 189;
const MAP_LOOKUP_ELEM: i32 = 1;

/// Ethernet header and two VLAN tags, as if all tags were in the frame: 22 bytes.
pub(super) const LINK: i16 = -40;
/// The fixed IP header, or ARP.
pub(super) const NETWORK: i16 = -80;
/// The first bytes of the layer-4 header.
pub(super) const TRANSPORT: i16 = -104;
/// What was found out, see [`fact`].
const FACTS: i16 = -112;
/// An IPv6 extension header.
const EXTENSION: i16 = -120;
/// End of the IP packet, offset in the frame.
const END: i16 = -128;
/// Length of the frame.
const LENGTH: i16 = -124;

/// Places on the stack of what is no field of a header.
pub(super) mod fact {
    use super::FACTS;

    /// EtherType behind the tags, two bytes as on the wire.
    pub(in super::super) const ETHERTYPE: i16 = FACTS;
    /// A bit for each VLAN tag.
    pub(in super::super) const TAGS: i16 = FACTS + 2;
    /// As `flow::network`.
    pub(in super::super) const NETWORK: i16 = FACTS + 3;
    /// Protocol of the layer-4 header, 0 if there is none.
    pub(in super::super) const TRANSPORT: i16 = FACTS + 4;
    /// Bit 0: a fragment; bit 1: not the first.
    pub(in super::super) const FRAGMENT: i16 = FACTS + 5;
    /// Bits of `flow::ext`.
    pub(in super::super) const EXTENSIONS: i16 = FACTS + 6;
    /// Protocol behind the IPv6 extension headers.
    pub(in super::super) const PROTOCOL: i16 = FACTS + 7;
}

/// Bytes on the stack that must have a value under a mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Compare {
    /// Place of the first.
    pub(super) at: i16,
    /// Masks and values.
    pub(super) bytes: Vec<(u8, u8)>,
}

/// One rule of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// All must hold.
    pub(super) compares: Vec<Compare>,
    /// The frame goes to the kernel, and this counter has it; else to the socket.
    pub(super) to_kernel: Option<u32>,
}

/// Bytes of a counter of [`Entry::to_kernel`]: packets, then bytes.
pub(super) const COUNTER_BYTES: u32 = 16;

/// Appends the program part. R6 is the context; R9 is -4 if the frame has a VLAN tag beside it (its protocol and value are on the stack),
/// else 0. Jumps to one of the labels; `counters` is the map with [`COUNTER_BYTES`] for each counter.
pub(super) fn classify(a: &mut Assembler, entries: &[Entry], counters: i32, to_socket: Label, to_kernel: Label) {
    let steps = Steps { to_socket, transport: a.label(), eval: a.label() };
    let (not_ipv4, not_ipv6) = (a.label(), a.label());
    clear(a);
    link(a, to_socket);
    a.load(Width::Half, R4, R10, fact::ETHERTYPE);
    a.jump_if_32(R4, Condition::NotEqual, half(0x0800), not_ipv4);
    steps.ipv4(a);
    a.place(not_ipv4);
    a.jump_if_32(R4, Condition::NotEqual, half(0x86dd), not_ipv6);
    steps.ipv6(a);
    a.place(not_ipv6);
    a.jump_if_32(R4, Condition::NotEqual, half(0x0806), steps.eval);
    steps.arp(a);
    a.place(steps.transport);
    steps.transport(a);
    a.place(steps.eval);
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
            // The last one. The verifier refuses instructions that nothing comes to.
            return;
        }
        a.place(no);
    }
    a.jump(to_socket);
}

/// Writes the whole frame of the stack that this part uses, and the length of the frame.
fn clear(a: &mut Assembler) {
    for at in (END..LINK + 24).step_by(8) {
        a.store_value(Width::Double, R10, at, 0);
    }
    a.copy(R1, R6);
    a.call(GET_BUFF_LEN);
    a.store(Width::Word, R10, LENGTH, R0);
    // Zero, but the verifier cannot know: it would look through the rules once for each constant that it knows of the facts.
    a.shift_right(R0, 32);
    a.store(Width::Double, R10, FACTS, R0);
}

/// Copies `bytes` of the frame from offset R7 to the stack; jumps to `fail` if it ends before. R0 to R5 are lost.
fn load(a: &mut Assembler, to: i16, bytes: i32, fail: Label) {
    a.copy(R1, R6);
    a.copy(R2, R7);
    a.copy(R3, R10);
    a.add(R3, to.into());
    a.set(R4, bytes);
    a.call(LOAD_BYTES);
    a.jump_if(R0, Condition::NotEqual, 0, fail);
}

/// Notes a fact of one byte. R5 is lost.
fn note(a: &mut Assembler, at: i16, value: i32) {
    a.set(R5, value);
    a.store(Width::Byte, R10, at, R5);
}

fn is_tag(a: &mut Assembler, yes: Label) {
    a.jump_if_32(R4, Condition::Equal, half(0x8100), yes);
    a.jump_if_32(R4, Condition::Equal, half(0x88a8), yes);
}

/// Ethernet and tags. Ends with the EtherType noted and R7 at layer 3.
fn link(a: &mut Assembler, to_socket: Label) {
    let [beside, first, second, third, end] = [(); 5].map(|()| a.label());
    a.set(R7, 0);
    load(a, LINK, 12, to_socket);
    a.set(R7, 12);
    a.jump_if(R9, Condition::NotEqual, 0, beside);
    load(a, LINK + 12, 2, to_socket);
    a.set(R7, 14);
    a.load(Width::Half, R4, R10, LINK + 12);
    is_tag(a, first);
    a.jump(end);
    a.place(beside);
    a.load(Width::Half, R4, R10, TAG_PROTOCOL);
    a.store(Width::Half, R10, LINK + 12, R4);
    a.load(Width::Half, R4, R10, TAG_CONTROL);
    a.network_order_16(R4);
    a.store(Width::Half, R10, LINK + 14, R4);
    load(a, LINK + 16, 2, to_socket);
    a.set(R7, 14);
    a.jump(second);
    a.place(first);
    load(a, LINK + 14, 4, to_socket);
    a.set(R7, 18);
    a.place(second);
    note(a, fact::TAGS, 1);
    a.load(Width::Half, R4, R10, LINK + 16);
    is_tag(a, third);
    a.jump(end);
    a.place(third);
    load(a, LINK + 18, 4, to_socket);
    a.add(R7, 4);
    note(a, fact::TAGS, 3);
    a.load(Width::Half, R4, R10, LINK + 20);
    // More tags than are followed.
    is_tag(a, to_socket);
    a.place(end);
    a.store(Width::Half, R10, fact::ETHERTYPE, R4);
}

struct Steps {
    to_socket: Label,
    transport: Label,
    eval: Label,
}

const TCP: u32 = 6;
const UDP: u32 = 17;
const ESP: u32 = 50;

/// Most IPv6 extension headers that are followed, as the parser of packets does.
const MAX_EXTENSIONS: usize = wirepath_wire::ipv6::MAX_EXTENSIONS;

impl Steps {
    /// IPv4 at R7. Goes on with R8 = protocol and R7 behind the header, or to the rules.
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
        self.end(a);
        note(a, fact::NETWORK, 4);
        a.load(Width::Byte, R8, R10, NETWORK + 9);
        a.load(Width::Half, R5, R10, NETWORK + 6);
        a.network_order_16(R5);
        a.copy(R3, R5);
        a.and(R3, 0x1fff);
        a.jump_if(R3, Condition::NotEqual, 0, later);
        a.and(R5, 0x2000);
        a.jump_if(R5, Condition::Equal, 0, whole);
        note(a, fact::FRAGMENT, 1);
        a.place(whole);
        a.add_register(R7, R4);
        a.jump(self.transport);
        a.place(later);
        note(a, fact::FRAGMENT, 3);
        a.jump(self.eval);
    }

    /// R5 = length of the packet at R7: notes its end, which must lie in the frame. R3 and R5 are lost.
    fn end(&self, a: &mut Assembler) {
        a.add_register(R5, R7);
        a.load(Width::Word, R3, R10, LENGTH);
        a.jump_if_register(R5, Condition::Greater, R3, self.to_socket);
        a.store(Width::Word, R10, END, R5);
    }

    /// IPv6 at R7. Goes on as [`Self::ipv4`].
    fn ipv6(&self, a: &mut Assembler) {
        let (done, later) = (a.label(), a.label());
        load(a, NETWORK, 40, self.to_socket);
        a.load(Width::Byte, R4, R10, NETWORK);
        a.shift_right(R4, 4);
        a.jump_if(R4, Condition::NotEqual, 6, self.to_socket);
        a.load(Width::Half, R5, R10, NETWORK + 4);
        a.network_order_16(R5);
        a.add(R5, 40);
        self.end(a);
        note(a, fact::NETWORK, 6);
        a.load(Width::Byte, R8, R10, NETWORK + 6);
        a.add(R7, 40);
        for _ in 0..MAX_EXTENSIONS {
            self.extension(a, done, later);
        }
        for number in [0, 43, 44, 51, 60] {
            a.jump_if(R8, Condition::Equal, number, self.to_socket);
        }
        a.place(done);
        a.store(Width::Byte, R10, fact::PROTOCOL, R8);
        a.jump(self.transport);
        a.place(later);
        a.store(Width::Byte, R10, fact::PROTOCOL, R8);
        note(a, fact::FRAGMENT, 3);
        a.jump(self.eval);
    }

    /// One extension header, if R8 is one.
    fn extension(&self, a: &mut Assembler, done: Label, later: Label) {
        let [common, fragment, authentication, advance, next] = [(); 5].map(|()| a.label());
        // hop-by-hop, routing, destination options: `flow::ext`.
        let plain = [(0, 1), (43, 2), (60, 8)].map(|(number, bit)| (number, bit, a.label()));
        for (number, _, label) in plain {
            a.jump_if(R8, Condition::Equal, number, label);
        }
        a.jump_if(R8, Condition::Equal, 44, fragment);
        a.jump_if(R8, Condition::Equal, 51, authentication);
        a.jump(done);
        for (_, bit, label) in plain {
            a.place(label);
            present(a, bit);
            a.jump(common);
        }
        a.place(common);
        self.fixed(a);
        a.load(Width::Byte, R4, R10, EXTENSION + 1);
        a.shift_left(R4, 3);
        a.add(R4, 8);
        a.jump(advance);
        // RFC 4302 section 2.2: 4 bytes each beyond the first 8; the fixed part is 12.
        a.place(authentication);
        present(a, 16);
        self.fixed(a);
        a.load(Width::Byte, R4, R10, EXTENSION + 1);
        a.add(R4, 2);
        a.shift_left(R4, 2);
        a.jump_if(R4, Condition::Less, 12, self.to_socket);
        a.jump(advance);
        a.place(fragment);
        a.load(Width::Byte, R3, R10, fact::EXTENSIONS);
        a.jump_if(R3, Condition::Bits, 4, self.to_socket);
        present(a, 4);
        self.fixed(a);
        a.load(Width::Half, R5, R10, EXTENSION + 2);
        a.network_order_16(R5);
        a.load(Width::Byte, R8, R10, EXTENSION);
        a.add(R7, 8);
        a.copy(R3, R5);
        a.and(R3, 0xfff8);
        a.jump_if(R3, Condition::NotEqual, 0, later);
        a.and(R5, 1);
        a.jump_if(R5, Condition::Equal, 0, next);
        note(a, fact::FRAGMENT, 1);
        a.jump(next);
        a.place(advance);
        a.load(Width::Byte, R8, R10, EXTENSION);
        a.add_register(R7, R4);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R7, Condition::Greater, R3, self.to_socket);
        a.place(next);
    }

    /// The first 8 bytes of an extension header at R7.
    fn fixed(&self, a: &mut Assembler) {
        self.within(a, 8);
        load(a, EXTENSION, 8, self.to_socket);
    }

    /// The packet has so many bytes at R7. R3 and R5 are lost.
    fn within(&self, a: &mut Assembler, bytes: i32) {
        a.copy(R5, R7);
        a.add(R5, bytes);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R5, Condition::Greater, R3, self.to_socket);
    }

    /// ARP at R7, of Ethernet and IPv4 addresses (RFC 826).
    fn arp(&self, a: &mut Assembler) {
        load(a, NETWORK, 28, self.to_socket);
        for (at, word) in [(0, [0, 1, 8, 0]), (4, [6, 4, 0, 0])] {
            let width = if at == 0 { Width::Word } else { Width::Half };
            a.load(width, R4, R10, NETWORK + at);
            let value = if at == 0 { u32::from_ne_bytes(word) } else { half(0x0604) };
            a.jump_if_32(R4, Condition::NotEqual, value, self.eval);
        }
        note(a, fact::NETWORK, 1);
        a.jump(self.eval);
    }

    /// R8 = protocol, R7 = place of its header. Falls through to the rules.
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
        a.place(is_ipv6);
        a.jump_if_32(R8, Condition::Equal, 58, eight);
        a.place(not_icmp);
        a.jump(self.eval);
        a.place(tcp);
        self.within(a, 20);
        load(a, TRANSPORT, 20, self.to_socket);
        a.load(Width::Byte, R4, R10, TRANSPORT + 12);
        a.shift_right(R4, 4);
        a.shift_left(R4, 2);
        a.jump_if(R4, Condition::Less, 20, self.to_socket);
        a.add_register(R4, R7);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R4, Condition::Greater, R3, self.to_socket);
        a.jump(noted);
        a.place(udp);
        self.within(a, 8);
        load(a, TRANSPORT, 8, self.to_socket);
        a.load(Width::Half, R4, R10, TRANSPORT + 4);
        a.network_order_16(R4);
        a.jump_if(R4, Condition::Less, 8, self.to_socket);
        // The first piece of a datagram is shorter than the datagram.
        a.load(Width::Byte, R3, R10, fact::FRAGMENT);
        a.jump_if(R3, Condition::NotEqual, 0, noted);
        a.add_register(R4, R7);
        a.load(Width::Word, R3, R10, END);
        a.jump_if_register(R4, Condition::Greater, R3, self.to_socket);
        a.jump(noted);
        a.place(eight);
        self.within(a, 8);
        load(a, TRANSPORT, 8, self.to_socket);
        a.place(noted);
        a.store(Width::Byte, R10, fact::TRANSPORT, R8);
    }
}

/// Notes an IPv6 extension header. R3 is lost.
fn present(a: &mut Assembler, bit: i32) {
    a.load(Width::Byte, R3, R10, fact::EXTENSIONS);
    a.or(R3, bit);
    a.store(Width::Byte, R10, fact::EXTENSIONS, R3);
}

/// Jumps to `no` unless the bytes are as they must be. R4 is lost.
fn compare(a: &mut Assembler, it: &Compare, no: Label) {
    let mut at = 0;
    while at < it.bytes.len() {
        if it.bytes[at].0 == 0 {
            at += 1;
            continue;
        }
        let place = it.at + at as i16;
        let left = it.bytes.len() - at;
        let (width, bytes) = match place.rem_euclid(4) {
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
        a.load(width, R4, R10, place);
        if mask != u32::MAX >> (32 - 8 * bytes) {
            a.and(R4, mask as i32);
        }
        a.jump_if_32(R4, Condition::NotEqual, value, no);
        at += bytes;
    }
}

/// Counts the frame. Ends with anything in R0 to R5.
fn count(a: &mut Assembler, map: i32, counter: u32) {
    let absent = a.label();
    a.store_value(Width::Word, R10, KEY, counter as i32);
    a.load_map(R1, map);
    a.copy(R2, R10);
    a.add(R2, KEY.into());
    a.call(MAP_LOOKUP_ELEM);
    a.jump_if(R0, Condition::Equal, 0, absent);
    a.set(R1, 1);
    a.atomic_add(R0, 0, R1);
    a.load(Width::Word, R1, R10, LENGTH);
    // With the tag that is not in the frame.
    a.subtract_register(R1, R9);
    a.atomic_add(R0, 8, R1);
    a.place(absent);
}
