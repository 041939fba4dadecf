//! Compares the program's decisions with the rule semantics. The kernel itself runs the program
//! (`BPF_PROG_TEST_RUN`).

use wirepath_packet::PortId;
use wirepath_testlab::{Requirement, require};
use wirepath_wire::Parser;

use super::classify::COUNTER_BYTES;
use super::program::{self, Inputs, XDP_DROP, XDP_PASS};
use super::rules::{self, CompiledRules, CounterSlots};
use crate::drivers::kernel::common::bifurcation::tests::{frames, selection};
use crate::drivers::kernel::common::bifurcation::{LaterFragments, new_fragment_map};
use crate::drivers::kernel::common::bpf::{self, Map, Program, ProgramKind};
use crate::port::Bifurcation;
use wirepath_flow::{Action, Direction, Field, FieldSet, HeaderType, Key, KeyKind, Metadata, Rule, packet_value};
use wirepath_rule_oracle::{Rng, generate};

const PORT: u16 = 1;

/// A loaded program without sockets.
struct Loaded {
    program: Program,
    counters: Map,
    decided: CompiledRules,
    _maps: [Map; 2],
}

fn load(rules: &[Rule]) -> Loaded {
    load_for(rules, None)
}

fn load_for(rules: &[Rule], bifurcation: Option<&Bifurcation>) -> Loaded {
    let mut decided = rules::compile(rules, PortId::new(PORT));
    CounterSlots::default().assign(rules, &mut decided);
    let fragments = bifurcation.and_then(|it| new_fragment_map(it).unwrap());
    let sockets = Map::new(bpf::MAP_XSK, 4, 1).unwrap();
    let passed = Map::new(bpf::MAP_ARRAY, 8, 2).unwrap();
    let counters = Map::new(bpf::MAP_ARRAY, COUNTER_BYTES, rules::COUNTERS).unwrap();
    let code = program::assemble(&Inputs {
        sockets: sockets.raw_fd(),
        counters: passed.raw_fd(),
        vlan_tag: None,
        kernel: &[],
        bifurcation,
        later_fragments: LaterFragments::known(fragments.as_ref()),
        rules: &decided.entries,
        rule_counters: counters.raw_fd(),
        // Makes the decision visible in the returned action.
        no_socket_action: XDP_DROP,
    })
    .unwrap();
    let program = Program::load(ProgramKind::Xdp, &code, program::NAME, 0, 0).unwrap_or_else(|error| {
        let text: Vec<String> = rules.iter().map(Rule::to_string).collect();
        panic!("{}: {}\n{}", error.source, error.report, text.join("\n"))
    });
    Loaded { program, counters, decided, _maps: [sockets, passed] }
}

/// Returns whether the rules pass a frame to the kernel and the program decides that rule. `None` if the
/// parser refuses the frame.
fn expected(rules: &[Rule], sets: &[FieldSet], decided: &CompiledRules, frame: &[u8]) -> Option<bool> {
    // Only software verifies checksums.
    let parsed = Parser { verify_ipv4: false, ..Parser::default() }.parse(frame).ok()?;
    let metadata = Metadata { port: PORT, ..Metadata::default() };
    let found = (0..rules.len()).find(|&i| {
        rules[i].direction() == Direction::Ingress && sets[i].matches(|key| packet_value(&parsed, frame, metadata, key))
    });
    Some(found.is_some_and(|rule| decided.rules.iter().any(|it| it.rule == rule && it.decided.is_ok())))
}

/// Returns a frame with random headers that match `set` as far as possible.
fn frame(random: &mut Rng, set: &FieldSet) -> Vec<u8> {
    let wanted = |fact| set.get(Key::header_type(0, fact)).map(|bits| bits.value as u8);
    let mut frame: Vec<u8> = (0..12).map(|_| random.next() as u8).collect();
    let tags = set
        .get(Key::field(0, Field::EthTags))
        .map_or(random.below(5).saturating_sub(2), |bits| bits.value.count_ones().into());
    for _ in 0..tags {
        frame.extend([0x81, 0, random.next() as u8, random.next() as u8]);
    }
    let transport = wanted(HeaderType::Transport);
    let network = match (wanted(HeaderType::Network), transport) {
        (Some(network), _) => network,
        (None, Some(58)) => 6,
        (None, Some(_)) => random.pick(&[4, 6]),
        _ => random.pick(&[0, 1, 4, 4, 6, 6]),
    };
    let protocol = transport.filter(|&it| it != 0).unwrap_or_else(|| random.pick(&[1, 6, 17, 47, 50, 58, 99, 6, 17]));
    let mut l4: Vec<u8> =
        (0..20 + random.below(40)).map(|_| random.next() as u8 & random.pick(&[0, 1, 0xff])).collect();
    match protocol {
        6 => l4[12] = 0x50,
        17 => {
            let length = l4.len() as u16;
            l4[4..6].copy_from_slice(&length.to_be_bytes());
        }
        47 => l4[..4].copy_from_slice(&[0, 0, 8, 0]),
        _ => {}
    }
    let fragment = if random.one_in(4) { random.pick(&[0x2000u16, 0x2003, 0x0007, 0x4000]) } else { 0 };
    match network {
        4 => {
            let options = if random.one_in(3) { 4 * random.below(11) as usize } else { 0 };
            frame.extend([0x08, 0x00, 0x45 + (options / 4) as u8, random.next() as u8]);
            // Fragments before the last have a multiple of 8 bytes.
            l4.truncate(l4.len() / 8 * 8);
            frame.extend(((20 + options + l4.len()) as u16).to_be_bytes());
            frame.extend([random.next() as u8, 7]);
            frame.extend(fragment.to_be_bytes());
            frame.extend([random.next() as u8, protocol, 0, 0]);
            frame.extend((0..8).map(|_| random.next() as u8));
            frame.extend(std::iter::repeat_n(1, options));
            frame.extend(&l4);
        }
        6 => {
            l4.truncate(l4.len() / 8 * 8);
            let mut body: Vec<u8> = Vec::new();
            let mut kinds = Vec::new();
            if random.one_in(2) {
                for kind in [0u8, 60, 43, 44, 51] {
                    if random.one_in(3) {
                        kinds.push(kind);
                    }
                }
            }
            for (i, &kind) in kinds.iter().enumerate() {
                let next = kinds.get(i + 1).copied().unwrap_or(protocol);
                match kind {
                    44 => {
                        let word = (fragment & 0x1fff) << 3 | u16::from(fragment & 0x2000 != 0);
                        body.extend([next, 0]);
                        body.extend(word.to_be_bytes());
                        body.extend([0, 0, 0, 9]);
                    }
                    51 => body.extend([next, 4].into_iter().chain(std::iter::repeat_n(0, 22))),
                    43 => body.extend([next, 0, 9, 0, 0, 0, 0, 0]),
                    // A single option fills the header.
                    _ => body.extend([next, 0, 1, 4, 0, 0, 0, 0]),
                }
            }
            body.extend(&l4);
            frame.extend([0x86, 0xdd, 0x60 | random.next() as u8 & 15, random.next() as u8, 0, 0]);
            frame.extend((body.len() as u16).to_be_bytes());
            frame.extend([kinds.first().copied().unwrap_or(protocol), random.next() as u8]);
            frame.extend((0..32).map(|_| random.next() as u8));
            frame.extend(body);
        }
        1 => {
            frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, random.below(3) as u8]);
            frame.extend((0..20).map(|_| random.next() as u8));
        }
        _ => {
            frame.extend(random.pick(&[0x88ccu16, 0x8847, 0x9000, 60]).to_be_bytes());
            frame.extend((0..40).map(|_| random.next() as u8));
        }
    }
    frame.resize(frame.len().max(64), 0);
    fill_fields(&mut frame, set);
    match random.below(12) {
        0 => frame.truncate(14 + random.below(frame.len() as u64 - 14) as usize),
        1 => {
            let at = random.below(frame.len() as u64) as usize;
            frame[at] ^= 1 << random.below(8);
        }
        _ => {}
    }
    frame
}

/// Writes the field values that a set requires into the existing headers.
fn fill_fields(frame: &mut [u8], set: &FieldSet) {
    let Ok(parsed) = (Parser { verify_ipv4: false, ..Parser::default() }).parse(frame) else { return };
    let layers = parsed.outer();
    for &(key, bits) in set.list() {
        use wirepath_flow::ItemKind::*;
        let KeyKind::Field(field) = key.kind else { continue };
        let spec = field.spec();
        let start = match spec.item {
            Eth => 0,
            Vlan => 14 + 4 * usize::from(key.nth),
            Arp | Ipv4 | Ipv6 => layers.l3(),
            Tcp | Udp | Icmp | Icmpv6 | Esp => layers.l4(),
            _ => continue,
        };
        let keeps = [Field::Ipv4Ihl, Field::Ipv4Proto, Field::Ipv6Next].contains(&field);
        let Some(offset) = spec.offset.filter(|_| key.level == 0 && !keeps) else { continue };
        for bit in 0..u16::from(spec.bits) {
            let from = u32::from(spec.bits) - 1 - u32::from(bit);
            let at = usize::from(offset + bit);
            let Some(byte) = frame.get_mut(start + at / 8) else { break };
            if bits.mask >> from & 1 == 1 {
                let mask = 0x80 >> (at % 8);
                *byte = *byte & !mask | if bits.value >> from & 1 == 1 { mask } else { 0 };
            }
        }
    }
}

/// Returns random rules, most of which the program can express.
fn random_rules(random: &mut Rng) -> Vec<Rule> {
    let mut rules = Vec::new();
    while rules.len() < 1 + random.below(12) as usize {
        let rule = generate::rule(random, &[]);
        let known = rules::compile_pattern(&rule.fields()).is_ok();
        if !known && !random.one_in(40) {
            continue;
        }
        let actions = match random.below(3) {
            0 => vec![Action::Count, Action::Kernel],
            1 => vec![Action::Kernel],
            _ => vec![Action::Drop],
        };
        let direction = if random.one_in(10) { Direction::Egress } else { Direction::Ingress };
        rules.extend(Rule::new(direction, rules.len() as u32, rule.pattern().to_vec(), actions));
    }
    rules
}

#[test]
fn program_decisions_match_the_rules() {
    require!(Requirement::Root, Requirement::Kernel(5, 18));
    let (mut kernel, mut socket, mut decided) = (0, 0, 0);
    for seed in 0..400 {
        let mut random = Rng::new(seed);
        let rules = random_rules(&mut random);
        let sets: Vec<FieldSet> = rules.iter().map(Rule::fields).collect();
        let loaded = load(&rules);
        decided += loaded.decided.counted.len();
        let (mut packets, mut bytes) = (0, 0);
        for n in 0..60 {
            let wanted = random.below(sets.len() as u64) as usize;
            let frame = frame(&mut random, &sets[wanted]);
            let verdict = loaded.program.test_run(&frame).unwrap();
            assert!([XDP_DROP as u32, XDP_PASS as u32].contains(&verdict));
            let passed = verdict == XDP_PASS as u32;
            if passed {
                packets += 1;
                bytes += frame.len() as u64;
            }
            let Some(expected) = expected(&rules, &sets, &loaded.decided, &frame) else { continue };
            let text: Vec<String> = rules.iter().map(Rule::to_string).collect();
            assert_eq!(passed, expected, "seed {seed}, frame {n}: {frame:02x?}\n{}", text.join("\n"));
            if passed { kernel += 1 } else { socket += 1 }
        }
        let sum = (0..rules::COUNTERS).map(|number| loaded.counters.get_pair(number).unwrap());
        let sum = sum.fold([0, 0], |sum, pair| [sum[0] + pair[0], sum[1] + pair[1]]);
        assert_eq!(sum, [packets, bytes], "seed {seed}");
    }
    assert!(
        kernel > 2000 && socket > 2000 && decided > 300,
        "{kernel} to the kernel, {socket} to the socket, {decided} rules"
    );
}

#[test]
fn the_largest_program_is_accepted() {
    require!(Requirement::Root, Requirement::Kernel(5, 18));
    let rules: Vec<Rule> = (0..256)
        .map(|n| {
            let pattern = format!(
                "eth src 02:00:00:00:00:01 / vlan vid {n} / ipv6 src fd00::1 dst fd00::{n:x} / \
                 tcp dst {n} flags syn+!ack"
            );
            format!("ingress prio {n}: {pattern} => kernel").parse().unwrap()
        })
        .collect();
    let loaded = load(&rules);
    assert_eq!(loaded.decided.counted.len(), 256);
    assert_eq!(loaded.program.test_run(&[0; 64]).unwrap(), XDP_DROP as u32);
}

/// The port takes the packets of its selection, and rules decide about these alone.
#[test]
fn the_port_takes_tunnel_packets_only() {
    require!(Requirement::Root, Requirement::Kernel(5, 18), Requirement::Scapy);
    let frames = frames();
    let rules: Vec<Rule> = vec!["ingress: ipv4 dst 10.9.0.5 => kernel".parse().unwrap()];
    for (rules, later_fragments) in [(&[][..], false), (&[], true), (&rules, true)] {
        let selection = selection(later_fragments);
        let loaded = load_for(rules, Some(&selection));
        for (verdict, frame) in &frames {
            let by_rule = !rules.is_empty() && frame.get(30..34) == Some(&[10, 9, 0, 5]);
            let taken = !by_rule && (*verdict == 1 || *verdict == 2 && later_fragments);
            let found = loaded.program.test_run(frame).unwrap();
            assert_eq!(found == XDP_DROP as u32, taken, "{later_fragments}: {frame:02x?}");
        }
    }
}
