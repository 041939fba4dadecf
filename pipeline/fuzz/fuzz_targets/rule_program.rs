//! Fuzzes rule actions with arbitrary bytes. Nothing may panic, no buffer may be lost, and right checksums
//! must stay right.
//!
//! The first byte selects the rule. The second one selects the memory layout and the metadata of the packet.
//! The rest is the packet. The rule need not match: actions drop packets that lack their header.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, Pool, PortId};
use wirepath_pipeline::rules::{Environment, Outcome, Program, Toeplitz};
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::{HeaderOffsets, L3Type, Parser};

/// Ethernet, IPv4, UDP with entropy and checksum, VXLAN 42.
const VXLAN4: &str =
    "02000000000b02000000000a0800450000001234000040110000c0a80001c0a80002000012b50000ffff0800000000002a00";
/// Ethernet, IPv6, UDP with checksum, VXLAN-GPE with IPv4.
const GPE6: &str = "02000000000b02000000000a86dd60000000000011\
40fd000000000000000000000000000001fd000000000000000000000000000002000012b60000ffff0c00000100002a00";

const RULES: &[&str] = &[
    "any => set eth dst 02:00:00:00:00:09, push-vlan vid 1, push-vlan vid 2 tpid 0x88a8, rss queues 0-3",
    "vlan / vlan => set vlan vid 9, pop-vlan, set vlan pcp 3, pop-vlan",
    "ipv4 / udp => set ipv4 src 1.2.3.4, dec-ttl, set udp src 7, mirror 3, set ipv4 dscp 5",
    "ipv4 / tcp => set ipv4 dst 1.2.3.4, set tcp dst 7, dec-ttl",
    "ipv6 / udp => mirror 3, set ipv6 src fd00::7, set udp src 7, dec-ttl",
    "ipv6 / tcp => set ipv6 dst fd00::7, set ipv6 dscp 5, set ipv6 hops 3, mirror 1",
    "ipv6 / icmpv6 => set ipv6 src fd00::5, rss queues 0-7 on src+dst",
    "ipv4 => set ipv4 src 10.0.0.9, limit 1G pps, count, mark 3",
    "vxlan => mirror 4, decap l2, push-vlan vid 4, mirror 5, rss queues 0-3 on inner+src+sport",
    "vxlan-gpe next 3 => decap l2",
    "geneve proto 0x6558 => decap l2",
    "gre proto 0x6558 => decap l2, set eth src 02:00:00:00:00:01",
    "udp / mpls / eth => decap l2",
    "mpls / eth => decap l2, mirror 3",
    "gre proto 0x0800 => mirror 4, decap l3 0200000000020200000000010800, push-vlan vid 3",
    "ipv4 proto 41 => decap l3 0200000000020200000000018100000786dd, pop-vlan",
    "any => mirror 1, encap l2 VXLAN4, mirror 2, rss queues 0-3 on src+sport",
    "ipv4 => set ipv4 ttl 9, encap l3 GPE6, rss queues 0-3 on inner+src",
    "vxlan => decap l2, encap l2 VXLAN4",
];

struct Lab {
    programs: Vec<Program>,
    pool: Pool,
    toeplitz: Toeplitz,
}

impl Environment for Lab {
    fn now(&self) -> u64 {
        1
    }
    fn pool(&self) -> Option<&Pool> {
        Some(&self.pool)
    }
    fn toeplitz(&self) -> &Toeplitz {
        &self.toeplitz
    }
    fn count(&mut self, _: usize) {}
    fn mirror(&mut self, _: PortId, copy: Packet) {
        assert_eq!(copy.len(), copy.segments().map(<[u8]>::len).sum::<usize>());
    }
    fn mirror_failed(&mut self, _: DropReason) {
        panic!("there are buffers enough");
    }
}

fn lab() -> Lab {
    let program = |text: &&str| {
        let text = text.replace("VXLAN4", VXLAN4).replace("GPE6", GPE6);
        let rule = format!("ingress prio 1: {text}").parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        Program::compile(&rule)
    };
    let pool = Pool::new("fuzz", 256).expect("memory");
    Lab { programs: RULES.iter().map(program).collect(), pool, toeplitz: Toeplitz::default() }
}

/// Makes a packet of these bytes: whole, or in two segments, of which the second may be shared.
fn packet(bytes: &[u8], cut: usize, shared: bool, pool: &Pool) -> Option<Packet> {
    let part = |bytes: &[u8]| {
        let mut packet = pool.take()?;
        packet.extend_from_slice(bytes, pool).then_some(packet)
    };
    let Some((front, rest)) = bytes.split_at_checked(cut).filter(|(front, rest)| !front.is_empty() && !rest.is_empty())
    else {
        return part(bytes);
    };
    let (mut packet, rest) = (part(front)?, part(rest)?);
    if shared {
        return packet.append_shared(&rest.into_shared()).ok();
    }
    packet.append_segment(rest).ok()?;
    Some(packet)
}

/// Returns whether the checksum of a stack is right, or `None` if this cannot be said.
fn sound(frame: &[u8], layers: &HeaderOffsets) -> Option<bool> {
    // Addresses that a routing header replaces are not checked here.
    if layers.l3_type() == L3Type::Ipv6 && layers.has_ip_options() {
        return None;
    }
    let cover = ChecksumSpan::of(frame, layers)?;
    Some(cover.transport.verify(frame.get(cover.start..cover.end)?, cover.pseudo))
}

thread_local! {
    static LAB: RefCell<Lab> = RefCell::new(lab());
}

fuzz_target!(|data: &[u8]| {
    let [rule, how, bytes @ ..] = data else { return };
    LAB.with_borrow_mut(|lab| {
        let cut = if how & 1 == 0 { 0 } else { 14 + usize::from(how >> 3) * 5 };
        let Some(mut packet) = packet(bytes, cut, how & 2 != 0, &lab.pool) else { return };
        if how & 4 != 0 {
            packet.set_vlan(7);
        }
        if *how == 0xf8 {
            packet.set_flags(Flags::TX_L4_CHECKSUM.with(Flags::TX_L3_CHECKSUM));
        }
        let parser = Parser::default();
        let Ok(parsed) = parser.parse_chain(packet.data(), packet.len()) else { return };
        let right = |layers: Option<&HeaderOffsets>| layers.is_none_or(|layers| sound(bytes, layers) != Some(false));
        let programs = std::mem::take(&mut lab.programs);
        let which = usize::from(*rule) % programs.len();
        // A decapsulated packet with malformed inner headers was not checked.
        let unseen = RULES[which].contains("decap") && parsed.inner().is_none();
        let came_right = right(Some(parsed.outer())) && right(parsed.inner()) && !unseen;
        let outcome = programs[which].run(&mut packet, &parsed, lab);
        lab.programs = programs;
        let out: Vec<u8> = packet.segments().flatten().copied().collect();
        assert_eq!(out.len(), packet.len());
        if !matches!(outcome, Outcome::Drop(_)) && came_right && *how != 0xf8 {
            match parser.parse(&out) {
                Ok(parsed) => assert_ne!(sound(&out, parsed.outer()), Some(false), "{outcome:?}"),
                Err(error) => assert!(parsed.tunnel_error().is_some(), "{error}"),
            }
        }
        drop(packet);
        assert_eq!(lab.pool.available(), lab.pool.capacity());
    });
});
