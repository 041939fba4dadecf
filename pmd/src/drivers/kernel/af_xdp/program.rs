//! The XDP program. It decides for each frame whether the kernel or the AF_XDP socket gets it.

use std::net::IpAddr;

use super::classify::{self, ProgramRule};
use super::kernel_match::KernelMatch;
use crate::drivers::kernel::common::assembler::Register::*;
use crate::drivers::kernel::common::assembler::{Assembler, Condition, Label, Register, Width, be16, function};
use crate::drivers::kernel::common::bifurcation::{self, LaterFragments};
use crate::port::Bifurcation;

/// Program name. It distinguishes leftovers of earlier runs from foreign programs.
pub(super) const NAME: &str = "wirepath_xdp";

/// Counters of the program, by key of its counter map.
pub(super) const COUNTERS: [&str; 2] = ["xdp_passed_to_kernel", "xdp_tag_not_restored"];
const PASSED: i32 = 0;
const TAG_NOT_RESTORED: i32 = 1;

pub(super) const XDP_DROP: i32 = 1;
pub(super) const XDP_PASS: i32 = 2;

// BPF_FUNC_*
const XDP_ADJUST_HEAD: i32 = 44;
const REDIRECT_MAP: i32 = 51;

// struct xdp_md
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const RX_QUEUE: i16 = 16;

// Offsets in the stack frame.
pub(super) const TAG_PROTOCOL: i16 = -8;
pub(super) const TAG_CONTROL: i16 = -6;
const KEY: i16 = -12;

/// Inputs of the assembler.
#[derive(Debug)]
pub(super) struct Inputs<'a> {
    /// Map of sockets by receive queue.
    pub(super) sockets: i32,
    /// Map of counters.
    pub(super) counters: i32,
    /// BTF id of `bpf_xdp_metadata_rx_vlan_tag`, if the program may call it.
    pub(super) vlan_tag: Option<u32>,
    /// Frames that are passed to the kernel.
    pub(super) kernel: &'a [KernelMatch],
    /// Frames that the port takes; `None`: all that are not passed to the kernel.
    pub(super) bifurcation: Option<&'a Bifurcation>,
    /// Later fragments among them.
    pub(super) later_fragments: LaterFragments,
    /// Rules for all other frames, in order.
    pub(super) rules: &'a [ProgramRule],
    /// Map of the rule counters.
    pub(super) rule_counters: i32,
    /// XDP action for frames of a queue without a socket.
    pub(super) no_socket_action: i32,
}

/// Assembles the program.
///
/// R6 always holds the context. R9 is -4 for a frame whose VLAN tag was stripped, else 0. The program
/// reinserts a stripped tag behind the addresses before the socket gets the frame. Later stages therefore
/// never mistake it for an untagged frame.
pub(super) fn assemble(inputs: &Inputs<'_>) -> Result<Vec<[u8; 8]>, &'static str> {
    let mut a = Assembler::default();
    let (decide, to_socket, to_kernel, whole, lost) = (a.label(), a.label(), a.label(), a.label(), a.label());
    a.copy(R6, R1);
    a.set(R9, 0);
    if let Some(function) = inputs.vlan_tag {
        let untagged = a.label();
        a.store_value(Width::Double, R10, TAG_PROTOCOL, 0);
        a.copy(R1, R6);
        a.copy(R2, R10);
        a.add(R2, TAG_PROTOCOL.into());
        a.copy(R3, R10);
        a.add(R3, TAG_CONTROL.into());
        a.call_kernel(function as i32);
        // 0 means that there is a tag; otherwise the result is -ENODATA.
        a.jump_if_32(R0, Condition::NotEqual, 0, untagged);
        a.set(R9, -4);
        a.jump(if inputs.bifurcation.is_some() { to_kernel } else { decide });
        a.bind(untagged);
    }
    for it in inputs.kernel {
        match_frame(&mut a, it, to_kernel);
    }
    if let Some(bifurcation) = inputs.bifurcation {
        bifurcation::select(&mut a, bifurcation, function::XDP_LOAD_BYTES, inputs.later_fragments, [decide, to_kernel]);
    }
    a.bind(decide);
    if !inputs.rules.is_empty() {
        if inputs.vlan_tag.is_none() {
            // The slot is never read, but the verifier does not know that R9 is 0.
            a.store_value(Width::Double, R10, TAG_PROTOCOL, 0);
        }
        classify::classify(&mut a, inputs.rules, inputs.rule_counters, to_socket, to_kernel);
    }
    a.bind(to_socket);
    if inputs.vlan_tag.is_some() {
        a.jump_if(R9, Condition::Equal, 0, whole);
        restore_tag(&mut a, whole, lost);
    }
    a.bind(whole);
    a.load_map(R1, inputs.sockets);
    a.load(Width::Word, R2, R6, RX_QUEUE);
    a.set(R3, inputs.no_socket_action);
    a.call(REDIRECT_MAP);
    a.exit();
    let has_bifurcation = inputs.bifurcation.is_some();
    if has_bifurcation || !inputs.kernel.is_empty() || inputs.rules.iter().any(|entry| entry.to_kernel.is_some()) {
        a.bind(to_kernel);
        count(&mut a, inputs.counters, PASSED);
        a.set(R0, XDP_PASS);
        a.exit();
    }
    if inputs.vlan_tag.is_some() {
        a.bind(lost);
        count(&mut a, inputs.counters, TAG_NOT_RESTORED);
        a.set(R0, XDP_DROP);
        a.exit();
    }
    a.finish()
}

/// Moves the addresses forward by four bytes and writes the tag behind them.
fn restore_tag(a: &mut Assembler, done: Label, failed: Label) {
    a.copy(R1, R6);
    a.set(R2, -4);
    a.call(XDP_ADJUST_HEAD);
    a.jump_if(R0, Condition::NotEqual, 0, failed);
    a.load(Width::Word, R1, R6, DATA);
    a.load(Width::Word, R2, R6, DATA_END);
    a.copy(R3, R1);
    a.add(R3, 18);
    a.jump_if_register(R3, Condition::Greater, R2, failed);
    for at in [0, 4, 8] {
        a.load(Width::Word, R3, R1, at + 4);
        a.store(Width::Word, R1, at, R3);
    }
    a.load(Width::Half, R3, R10, TAG_PROTOCOL);
    a.store(Width::Half, R1, 12, R3);
    a.load(Width::Half, R3, R10, TAG_CONTROL);
    a.network_order_16(R3);
    a.store(Width::Half, R1, 14, R3);
    a.jump(done);
}

/// Loads the address of a counter into R0. Jumps to `absent` if the map has no such key. Clobbers R0 to R5.
pub(super) fn load_counter(a: &mut Assembler, map: i32, key: i32, absent: Label) {
    a.store_value(Width::Word, R10, KEY, key);
    a.load_map(R1, map);
    a.copy(R2, R10);
    a.add(R2, KEY.into());
    a.call(function::MAP_LOOKUP_ELEM);
    a.jump_if(R0, Condition::Equal, 0, absent);
}

/// Increments a counter. Clobbers R0 to R5.
fn count(a: &mut Assembler, map: i32, key: i32) {
    let absent = a.label();
    load_counter(a, map, key, absent);
    a.set(R1, 1);
    a.atomic_add(R0, 0, R1);
    a.bind(absent);
}

/// Jumps to `fits` if the frame matches.
fn match_frame(a: &mut Assembler, it: &KernelMatch, fits: Label) {
    let is_ip = it.protocol.is_some() || it.destination.is_some();
    if !is_ip {
        let Some(ethertype) = it.ethertype else { return };
        let no = a.label();
        frame(a, 14, no);
        a.load(Width::Half, R4, R2, 12);
        a.jump_if_32(R4, Condition::Equal, be16(ethertype), fits);
        a.bind(no);
        return;
    }
    if it.ethertype != Some(0x86dd) && !matches!(it.destination, Some(IpAddr::V6(_))) {
        match_ipv4(a, it, fits);
    }
    if it.ethertype != Some(0x0800) && !matches!(it.destination, Some(IpAddr::V4(_))) {
        match_ipv6(a, it, fits);
    }
}

/// Sets R2 to the start and R3 to the end of the frame. Jumps to `short` unless the first buffer has at least
/// `bytes` bytes.
fn frame(a: &mut Assembler, bytes: i32, short: Label) {
    a.load(Width::Word, R2, R6, DATA);
    a.load(Width::Word, R3, R6, DATA_END);
    a.copy(R5, R2);
    a.add(R5, bytes);
    a.jump_if_register(R5, Condition::Greater, R3, short);
}

fn match_ipv4(a: &mut Assembler, it: &KernelMatch, fits: Label) {
    let no = a.label();
    frame(a, 34, no);
    a.load(Width::Half, R4, R2, 12);
    a.jump_if_32(R4, Condition::NotEqual, be16(0x0800), no);
    if let Some(protocol) = it.protocol {
        a.load(Width::Byte, R4, R2, 23);
        a.jump_if_32(R4, Condition::NotEqual, protocol.into(), no);
    }
    if let Some(IpAddr::V4(destination)) = it.destination {
        a.load(Width::Word, R4, R2, 30);
        a.jump_if_32(R4, Condition::NotEqual, u32::from_ne_bytes(destination.octets()), no);
    }
    if let Some(port) = it.destination_port {
        // Later fragments have no ports.
        a.load(Width::Half, R4, R2, 20);
        a.jump_if_32(R4, Condition::Bits, be16(0x1fff), no);
        a.load(Width::Byte, R4, R2, 14);
        a.and(R4, 0x0f);
        a.shift_left(R4, 2);
        a.add(R2, 14);
        a.add_register(R2, R4);
        match_port(a, R2, port, no);
    }
    a.jump(fits);
    a.bind(no);
}

fn match_ipv6(a: &mut Assembler, it: &KernelMatch, fits: Label) {
    let no = a.label();
    frame(a, 54, no);
    a.load(Width::Half, R4, R2, 12);
    a.jump_if_32(R4, Condition::NotEqual, be16(0x86dd), no);
    if let Some(protocol) = it.protocol {
        a.load(Width::Byte, R4, R2, 20);
        a.jump_if_32(R4, Condition::NotEqual, protocol.into(), no);
    }
    if let Some(IpAddr::V6(destination)) = it.destination {
        for (at, word) in destination.octets().chunks_exact(4).enumerate() {
            a.load(Width::Word, R4, R2, 38 + 4 * at as i16);
            let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
            a.jump_if_32(R4, Condition::NotEqual, word, no);
        }
    }
    if let Some(port) = it.destination_port {
        a.add(R2, 54);
        match_port(a, R2, port, no);
    }
    a.jump(fits);
    a.bind(no);
}

/// Compares the destination port. `header` points to the transport header, R3 to the end of the frame.
fn match_port(a: &mut Assembler, header: Register, port: u16, no: Label) {
    a.copy(R5, header);
    a.add(R5, 4);
    a.jump_if_register(R5, Condition::Greater, R3, no);
    a.load(Width::Half, R4, header, 2);
    a.jump_if_32(R4, Condition::NotEqual, be16(port), no);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_assembles() {
        let kernel =
            ["arp", "icmpv6", "tcp port 22", "udp port 546 to fd00::1", "to 192.0.2.1"].map(|t| t.parse().unwrap());
        for vlan_tag in [None, Some(77)] {
            for n in 0..=kernel.len() {
                let inputs = Inputs {
                    sockets: 3,
                    counters: 4,
                    vlan_tag,
                    kernel: &kernel[..n],
                    bifurcation: None,
                    later_fragments: LaterFragments::None,
                    rules: &[],
                    rule_counters: 5,
                    no_socket_action: XDP_PASS,
                };
                assert!(assemble(&inputs).unwrap().len() > 5);
            }
        }
    }
}
