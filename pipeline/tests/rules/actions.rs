//! Rule actions compared with scapy, which makes each packet before and after the actions. Tshark checks the
//! results.

use wirepath_flow::{Action, HeaderEnd, ReformatKind, Rule};
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool};
use wirepath_pipeline::rules::actions::Toeplitz;
use wirepath_pipeline::rules::{Environment, Outcome, Program};
use wirepath_testlab::{Requirement, oracle, require};
use wirepath_wire::Parser;

struct TestEnvironment(Pool, Toeplitz);

impl Environment for TestEnvironment {
    fn now(&self) -> u64 {
        0
    }
    fn pool(&self) -> Option<&Pool> {
        Some(&self.0)
    }
    fn toeplitz(&self) -> &Toeplitz {
        &self.1
    }
    fn count(&mut self, _: usize) {}
    fn mirror(&mut self, _: PortId, _: Packet) {}
    fn mirror_failed(&mut self, _: DropReason) {}
}

/// Returns the frame in one buffer, in two buffers, and with everything behind its first `head` bytes shared.
fn shapes(pool: &Pool, frame: &[u8], head: usize) -> [Packet; 3] {
    let packet = |bytes: &[u8]| {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(bytes, pool));
        packet
    };
    let (front, rest) = frame.split_at(head);
    let mut chain = packet(front);
    chain.append_segment(packet(rest)).unwrap();
    [packet(frame), chain, packet(front).append_shared(&packet(rest).into_shared()).unwrap()]
}

/// Returns true for an absent UDP checksum over IPv6, which RFC 6935 allows and tshark is configured to
/// reject.
fn absent_over_ipv6(frame: &[u8]) -> bool {
    let ports = 14 + 40;
    frame[12..14] == [0x86, 0xdd] && frame[20] == 17 && frame[ports + 6..ports + 8] == [0, 0]
}

/// Returns true for a label stack payload. Tshark guesses it and takes some Ethernet addresses for a control
/// word.
fn guessed(rule: &Rule) -> bool {
    let into_labels = |action: &Action| match action {
        Action::Reformat(it) => {
            it.kind() == ReformatKind::L2ToL2Tunnel && it.layout().is_some_and(|layout| layout.end == HeaderEnd::Mpls)
        }
        _ => false,
    };
    rule.actions().iter().any(into_labels)
}

#[test]
fn results_equal_those_of_scapy() {
    require!(Requirement::Program("tshark"), Requirement::Scapy);
    let none: [&[u8]; 0] = [];
    let said = oracle::scapy(&none, include_str!("actions.py"));
    assert_eq!(said.lines.len() * 2, said.frames.len());
    assert!(said.lines.len() > 2000, "{} cases", said.lines.len());
    let mut env = TestEnvironment(Pool::new("actions", 64).unwrap(), Toeplitz::default());
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (mut wrong, mut made) = (Vec::new(), Vec::new());
    for (text, pair) in said.lines.iter().zip(said.frames.chunks_exact(2)) {
        let rule: Rule = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        let program = Program::compile(&rule);
        let parser = Parser::default();
        let head = parser.parse(&pair[0]).unwrap_or_else(|e| panic!("{text}: {e}")).innermost().payload();
        for (shape, mut packet) in shapes(&env.0, &pair[0], head).into_iter().enumerate() {
            let parsed = parser.parse_chain(packet.data(), packet.len()).unwrap_or_else(|e| panic!("{text}: {e}"));
            let outcome = program.run(&mut packet, &parsed, &mut env);
            let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
            if outcome != Outcome::Next || bytes != pair[1] {
                wrong.push(format!("{text}, shape {shape}: {outcome:?}\n{}\nis not\n{}", hex(&bytes), hex(&pair[1])));
            } else if shape == 0 && !absent_over_ipv6(&bytes) && !guessed(&rule) {
                made.push(bytes);
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), said.lines.len(), wrong[..wrong.len().min(20)].join("\n"));
    assert_eq!(env.0.available(), env.0.capacity());
    oracle::assert_clean(&made);
}
