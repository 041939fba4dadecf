//! Support for tests against the reference: packets, an environment for programs, and the comparison of
//! outcomes.

use wirepath_flow::Direction;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool};
use wirepath_pipeline::rules::actions::DEFAULT_RSS_KEY;
use wirepath_pipeline::rules::{Environment, Outcome, Toeplitz};
use wirepath_rule_oracle as lab;
use wirepath_rule_oracle::{DropCause, PacketMetadata, Verdict, compare, show};
use wirepath_wire::ParseError;

/// Reads a number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// A packet and its expected outcome.
pub(crate) struct Case {
    pub(crate) direction: Direction,
    pub(crate) frame: Vec<u8>,
    pub(crate) metadata: PacketMetadata,
    pub(crate) expected: lab::Outcome,
    /// Source port of the added outer header, which must be equal for all packets of a flow.
    pub(crate) entropy: Option<u16>,
}

impl Case {
    pub(crate) fn new(direction: Direction, frame: Vec<u8>, metadata: PacketMetadata, expected: lab::Outcome) -> Self {
        Self { direction, frame, metadata, expected, entropy: None }
    }
}

/// [`Environment`] that records the effects of programs.
pub(crate) struct TestEnvironment {
    pub(crate) pool: Pool,
    pub(crate) now: u64,
    pub(crate) toeplitz: Toeplitz,
    pub(crate) counted: Option<u64>,
    pub(crate) mirrors: Vec<(u16, Packet)>,
}

impl TestEnvironment {
    pub(crate) fn new() -> Self {
        let pool = Pool::new("rules", 1024).expect("memory");
        Self { pool, now: 1, toeplitz: Toeplitz::new(&DEFAULT_RSS_KEY), counted: None, mirrors: Vec::new() }
    }

    /// Makes a packet of these bytes, in two segments if `split` is given.
    pub(crate) fn packet(&self, case: &Case, split: Option<usize>) -> Packet {
        let take = |bytes: &[u8]| {
            let mut packet = self.pool.take().expect("a buffer");
            packet.append(bytes.len()).expect("room").copy_from_slice(bytes);
            packet
        };
        let (head, tail) = case.frame.split_at(split.unwrap_or(case.frame.len()));
        let mut packet = take(head);
        if !tail.is_empty() {
            packet.append_segment(take(tail)).unwrap_or_else(|_| panic!("a second segment"));
        }
        match case.direction {
            Direction::Ingress => packet.set_in_port(PortId::checked(case.metadata.port)),
            Direction::Egress => packet.set_out_port(PortId::checked(case.metadata.port)),
        }
        if case.metadata.mark != 0 {
            packet.set_mark(case.metadata.mark);
        }
        packet.set_app([case.metadata.data.into(), 0]);
        packet
    }
}

impl Environment for TestEnvironment {
    fn now(&self) -> u64 {
        self.now
    }

    fn pool(&self) -> Option<&Pool> {
        Some(&self.pool)
    }

    fn toeplitz(&self) -> &Toeplitz {
        &self.toeplitz
    }

    fn count(&mut self, bytes: usize) {
        assert!(self.counted.replace(bytes as u64).is_none(), "counted twice");
    }

    fn mirror(&mut self, port: PortId, copy: Packet) {
        self.mirrors.push((port.number(), copy));
    }

    fn mirror_failed(&mut self, reason: DropReason) {
        panic!("a copy was lost: {reason:?}");
    }
}

fn bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes = vec![0; packet.len()];
    packet.copy_to(&mut bytes);
    bytes
}

/// Returns true if this drop reason is right for the cause.
fn is_reason(reason: DropReason, cause: DropCause) -> bool {
    match cause {
        DropCause::RuleDrop => reason == DropReason::RuleDrop,
        DropCause::NoHopsLeft => reason == DropReason::HopLimit,
        DropCause::RateLimited => reason == DropReason::MeterExceeded,
        DropCause::Congestion => reason == DropReason::BadEcn,
        // The reason may be the parser's error in the inner headers.
        DropCause::NothingInside => {
            reason == DropReason::RuleMismatch || ParseError::ALL.iter().any(|&error| DropReason::from(error) == reason)
        }
        DropCause::OuterFragment => reason == DropReason::OuterFragment,
        DropCause::ThirdTag => reason == DropReason::TooManyHeaders,
        DropCause::Malformed => false,
    }
}

/// Compares an outcome with the expected one.
pub(crate) fn check(
    case: &mut Case,
    outcome: Outcome,
    packet: &Packet,
    world: &mut TestEnvironment,
) -> Result<(), String> {
    let expected = &case.expected;
    let right = match (&expected.verdict, outcome) {
        (Verdict::Pass, Outcome::Next) | (Verdict::Kernel, Outcome::Kernel) => true,
        (Verdict::Queue(a), Outcome::Queue(b)) => *a == b,
        (Verdict::Redirect(a), Outcome::Redirect(b)) => *a == b.number(),
        (Verdict::Dropped(cause), Outcome::Drop(reason)) => is_reason(reason, *cause),
        _ => false,
    };
    if !right {
        return Err(format!("it became {outcome:?}, not {:?}", expected.verdict));
    }
    let counted = world.counted.take();
    if counted != expected.counted {
        return Err(format!("counted {counted:?}, not {:?}", expected.counted));
    }
    let mirrors = std::mem::take(&mut world.mirrors);
    if mirrors.len() != expected.mirrors.len() {
        return Err(format!("{} copies, not {}", mirrors.len(), expected.mirrors.len()));
    }
    for (n, ((port, copy), (want_port, want))) in mirrors.iter().zip(&expected.mirrors).enumerate() {
        if port != want_port {
            return Err(format!("copy {n} went to {port}, not to {want_port}"));
        }
        let copy = bytes(copy);
        compare::same(want, &copy).map_err(|e| format!("copy {n}: {e}\n  is    {}", show::hex(&copy)))?;
    }
    if matches!(expected.verdict, Verdict::Dropped(_)) {
        return Ok(());
    }
    let mark = packet.mark().unwrap_or(0);
    if mark != expected.mark {
        return Err(format!("marked {mark}, not {}", expected.mark));
    }
    let frame = bytes(packet);
    compare::same(&expected.frame, &frame).map_err(|e| format!("{e}\n  is    {}", show::hex(&frame)))?;
    if let Some(udp) = expected
        .frame
        .outer_headers
        .filter(|outer_headers| outer_headers.any_port)
        .and_then(|outer_headers| outer_headers.udp)
    {
        let port = u16::from_be_bytes([frame[udp], frame[udp + 1]]);
        if *case.entropy.get_or_insert(port) != port {
            return Err(format!("source port {port}, but {:?} before", case.entropy));
        }
    }
    Ok(())
}
