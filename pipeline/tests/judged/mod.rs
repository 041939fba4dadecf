//! What the tests against the reference share: a packet of its bytes, an environment for programs, and the comparison of outcomes.

use wirepath_pipeline::rules::program::DEFAULT_RSS_KEY;
use wirepath_pipeline::rules::{Environment, Outcome, Toeplitz};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::Direction;
use wirepath_pmd::packet::{Packet, Pool};
use wirepath_rulelab as lab;
use wirepath_rulelab::{Cause, Fate, Noted, compare, show};
use wirepath_wire::ParseError;

/// A number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// A packet, and what must become of it.
pub(crate) struct Case {
    pub(crate) direction: Direction,
    pub(crate) frame: Vec<u8>,
    pub(crate) noted: Noted,
    pub(crate) expected: lab::Outcome,
    /// Source port of the outer header that it got: the same for every packet of a flow.
    pub(crate) entropy: Option<u16>,
}

impl Case {
    pub(crate) fn new(direction: Direction, frame: Vec<u8>, noted: Noted, expected: lab::Outcome) -> Self {
        Self { direction, frame, noted, expected, entropy: None }
    }
}

/// What programs run in.
pub(crate) struct World {
    pub(crate) pool: Pool,
    pub(crate) now: u64,
    pub(crate) toeplitz: Toeplitz,
    pub(crate) counted: Option<u64>,
    pub(crate) mirrors: Vec<(u16, Packet)>,
}

impl World {
    pub(crate) fn new() -> Self {
        let pool = Pool::new("rules", 1024).expect("memory");
        Self { pool, now: 1, toeplitz: Toeplitz::new(&DEFAULT_RSS_KEY), counted: None, mirrors: Vec::new() }
    }

    /// A packet with these bytes, in two segments if `split` says where.
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
            Direction::Ingress => packet.set_in_port(case.noted.port),
            Direction::Egress => packet.set_out_port(case.noted.port),
        }
        if case.noted.mark != 0 {
            packet.set_mark(case.noted.mark);
        }
        packet.set_app([case.noted.data.into(), 0]);
        packet
    }
}

impl Environment for World {
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

    fn mirror(&mut self, port: u16, copy: Packet) {
        self.mirrors.push((port, copy));
    }

    fn lost_copy(&mut self, reason: DropReason) {
        panic!("a copy was lost: {reason:?}");
    }
}

fn bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes = vec![0; packet.len()];
    packet.copy_to(&mut bytes);
    bytes
}

/// Whether a packet dropped for this cause is rightly counted under this reason.
fn is_reason(reason: DropReason, cause: Cause) -> bool {
    match cause {
        Cause::Ruled => reason == DropReason::Ruled,
        Cause::NoHopsLeft => reason == DropReason::HopLimit,
        Cause::RateLimited => reason == DropReason::OverRate,
        Cause::Congestion => reason == DropReason::BadEcn,
        // What the parser found wrong in the tunnel is told, if that is what is wrong.
        Cause::NothingInside => {
            reason == DropReason::RuleMismatch || ParseError::ALL.iter().any(|&error| DropReason::from(error) == reason)
        }
        Cause::OuterFragment => reason == DropReason::OuterFragment,
        Cause::ThirdTag => reason == DropReason::TooManyHeaders,
        Cause::Malformed => false,
    }
}

/// What differs, if something does.
pub(crate) fn check(case: &mut Case, outcome: Outcome, packet: &Packet, world: &mut World) -> Result<(), String> {
    let expected = &case.expected;
    let right = match (&expected.fate, outcome) {
        (Fate::On, Outcome::Next) | (Fate::Kernel, Outcome::Kernel) => true,
        (Fate::Queue(a), Outcome::Queue(b)) | (Fate::Redirect(a), Outcome::Redirect(b)) => *a == b,
        (Fate::Dropped(cause), Outcome::Drop(reason)) => is_reason(reason, *cause),
        _ => false,
    };
    if !right {
        return Err(format!("it became {outcome:?}, not {:?}", expected.fate));
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
    if matches!(expected.fate, Fate::Dropped(_)) {
        return Ok(());
    }
    let mark = packet.mark().unwrap_or(0);
    if mark != expected.mark {
        return Err(format!("marked {mark}, not {}", expected.mark));
    }
    let frame = bytes(packet);
    compare::same(&expected.frame, &frame).map_err(|e| format!("{e}\n  is    {}", show::hex(&frame)))?;
    if let Some(udp) = expected.frame.put_on.filter(|put_on| put_on.any_port).and_then(|put_on| put_on.udp) {
        let port = u16::from_be_bytes([frame[udp], frame[udp + 1]]);
        if *case.entropy.get_or_insert(port) != port {
            return Err(format!("source port {port}, but {:?} before", case.entropy));
        }
    }
    Ok(())
}
