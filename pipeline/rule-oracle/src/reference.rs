//! The reference engine: a linear search over all rules for every packet.

use wirepath_flow::{Action, Direction, Limit, RateUnit, Rule};

use crate::fields::PacketMetadata;
use crate::headers::{Headers, TunnelPorts};
use crate::pattern_match::fits;
use crate::rewrite::Frame;
use crate::rss;

/// An error that can be planted in the reference, to show that a comparison finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names describe the faults.
pub enum Fault {
    #[default]
    None,
    // Errors of matching.
    MaskBit,
    WrongLevel,
    LabelsSkipped,
    HeadersInLaterFragments,
    HighNumberFirst,
    LastAddedFirst,
    EgressAtIngress,
    DisorderAccepted,
    // Errors of actions.
    HeaderChecksumForgotten,
    Layer4ChecksumForgotten,
    NoChecksumMadeOne,
    NextHopInChecksum,
    DscpTakesEcn,
    HopsToNone,
    TagPushedInside,
    PaddingKept,
    EcnForgotten,
    OuterLength,
    MirrorSeesTheEnd,
    ActionsBackwards,
    MarkLost,
    CountsWhatArrived,
    RssForgetsThePorts,
    BurstAndOne,
}

impl Fault {
    /// All faults except `None`.
    pub const ALL: [Self; 24] = [
        Self::MaskBit,
        Self::WrongLevel,
        Self::LabelsSkipped,
        Self::HeadersInLaterFragments,
        Self::HighNumberFirst,
        Self::LastAddedFirst,
        Self::EgressAtIngress,
        Self::DisorderAccepted,
        Self::HeaderChecksumForgotten,
        Self::Layer4ChecksumForgotten,
        Self::NoChecksumMadeOne,
        Self::NextHopInChecksum,
        Self::DscpTakesEcn,
        Self::HopsToNone,
        Self::TagPushedInside,
        Self::PaddingKept,
        Self::EcnForgotten,
        Self::OuterLength,
        Self::MirrorSeesTheEnd,
        Self::ActionsBackwards,
        Self::MarkLost,
        Self::CountsWhatArrived,
        Self::RssForgetsThePorts,
        Self::BurstAndOne,
    ];
}

/// Reason why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropCause {
    /// Action `drop`.
    RuleDrop,
    /// Action `dec-ttl`: no hop is left.
    NoHopsLeft,
    /// Action `limit`.
    RateLimited,
    /// Action `decap`: the path was congested and the sender does not support ECN (RFC 6040 section 4.2).
    Congestion,
    /// Action `decap`: the tunnel does not carry what its header says.
    NothingInside,
    /// Action `decap`: the tunnel packet is a fragment.
    OuterFragment,
    /// Action `push-vlan`: the frame would get a third tag.
    ThirdTag,
    /// Before any rule: the outer headers of the frame are malformed.
    Malformed,
}

/// Destination of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet continues as without a rule.
    Pass,
    /// This receive queue.
    Queue(u16),
    /// None: the packet is dropped.
    Dropped(DropCause),
    /// The kernel.
    Kernel,
    /// This port.
    Redirect(u16),
}

/// Result for one packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The rule that it matched.
    pub rule: Option<RuleId>,
    /// Mirror copies with their ports, in order.
    pub mirrors: Vec<(u16, Frame)>,
    /// Destination of the packet.
    pub verdict: Verdict,
    /// The packet after all actions, or at the time when it was dropped.
    pub frame: Frame,
    /// Mark of the packet after all actions.
    pub mark: u32,
    /// Bytes that the action `count` counted, if the rule has one.
    pub counted: Option<u64>,
}

/// Id of a rule in a reference, in order of addition.
pub type RuleId = u64;

/// Counters of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets that reached `count`.
    pub packets: u64,
    /// Bytes of these packets at that time.
    pub bytes: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    id: RuleId,
    rule: Rule,
    count: Count,
    bucket: Bucket,
}

/// A token bucket with exact arithmetic, in billionths of a packet or bit.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    tokens: Option<u128>,
    last: u64,
}

const BILLION: u128 = 1_000_000_000;

impl Bucket {
    /// Returns true if a packet of this length passes at time `now` in nanoseconds. The bucket is full at the
    /// start.
    fn passes(&mut self, limit: Limit, bytes: usize, now: u64, fault: Fault) -> bool {
        let unit = match limit.unit {
            RateUnit::Packets => 1,
            RateUnit::Bits => 8,
        };
        let more = if fault == Fault::BurstAndOne { 1 } else { 0 };
        let room = (u128::from(limit.burst) + more) * unit * BILLION;
        let new = u128::from(limit.rate) * u128::from(now.saturating_sub(self.last));
        let tokens = self.tokens.map_or(room, |tokens| (tokens + new).min(room));
        let cost = match limit.unit {
            RateUnit::Packets => BILLION,
            RateUnit::Bits => bytes as u128 * 8 * BILLION,
        };
        let pass = cost <= tokens;
        self.tokens = Some(if pass { tokens - cost } else { tokens });
        self.last = now;
        pass
    }
}

/// The rules of the reference, in order of addition.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    entries: Vec<Entry>,
    next: RuleId,
    /// UDP ports of tunnels.
    pub ports: TunnelPorts,
    /// Toeplitz key for rules without a key.
    pub rss_key: Vec<u8>,
    /// The planted error.
    pub fault: Fault,
}

impl Reference {
    /// Creates a reference with these rules.
    pub fn new(rules: &[Rule]) -> Self {
        let mut reference = Self::default();
        for rule in rules {
            reference.add(rule.clone());
        }
        reference
    }

    /// Plants an error.
    pub fn with(mut self, fault: Fault) -> Self {
        self.fault = fault;
        self
    }

    /// Adds a rule after all others.
    pub fn add(&mut self, rule: Rule) -> RuleId {
        let id = self.next;
        self.next += 1;
        self.entries.push(Entry { id, rule, count: Count::default(), bucket: Bucket::default() });
        id
    }

    /// Removes a rule. Returns false if it does not exist.
    pub fn remove(&mut self, id: RuleId) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.id != id);
        self.entries.len() < before
    }

    /// Replaces a rule. The id is kept. The place in the order is kept if the priority is equal.
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> bool {
        let Some(at) = self.entries.iter().position(|entry| entry.id == id) else { return false };
        let mut entry = self.entries.remove(at);
        let last = if entry.rule.priority() == rule.priority() { at } else { self.entries.len() };
        entry.rule = rule;
        entry.bucket = Bucket::default();
        self.entries.insert(last, entry);
        true
    }

    /// Returns the rules with their ids, in order of addition.
    pub fn rules(&self) -> impl Iterator<Item = (RuleId, &Rule)> {
        self.entries.iter().map(|entry| (entry.id, &entry.rule))
    }

    /// Returns a rule.
    pub fn rule(&self, id: RuleId) -> Option<&Rule> {
        self.rules().find(|(i, _)| *i == id).map(|(_, rule)| rule)
    }

    /// Returns the counters of a rule.
    pub fn count(&self, id: RuleId) -> Option<Count> {
        self.entries.iter().find(|entry| entry.id == id).map(|entry| entry.count)
    }

    /// Returns the rule that a packet matches: the lowest priority number, then the earliest addition.
    pub fn classify(&self, direction: Direction, frame: &[u8], metadata: &PacketMetadata) -> Option<RuleId> {
        let headers = Headers::of(frame, &self.ports);
        if headers.stacks[0].malformed.is_some() {
            return None;
        }
        self.best(direction, frame, &headers, metadata).map(|at| self.entries[at].id)
    }

    fn best(&self, direction: Direction, frame: &[u8], headers: &Headers, metadata: &PacketMetadata) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (at, entry) in self.entries.iter().enumerate() {
            let rule = &entry.rule;
            let asked = rule.direction() == direction || self.fault == Fault::EgressAtIngress;
            if !asked || !fits(rule.pattern(), frame, headers, metadata, self.fault) {
                continue;
            }
            let wins = best.is_none_or(|best| {
                let other = self.entries[best].rule.priority();
                match self.fault {
                    Fault::HighNumberFirst => rule.priority() > other,
                    Fault::LastAddedFirst => rule.priority() <= other,
                    _ => rule.priority() < other,
                }
            });
            if wins {
                best = Some(at);
            }
        }
        best
    }

    /// Runs the rules on a packet that arrives at time `now` in nanoseconds.
    pub fn run(&mut self, direction: Direction, frame: &[u8], metadata: &PacketMetadata, now: u64) -> Outcome {
        let headers = Headers::of(frame, &self.ports);
        if headers.stacks[0].malformed.is_some() && self.fault != Fault::DisorderAccepted {
            let (verdict, frame) = (Verdict::Dropped(DropCause::Malformed), Frame::new(frame));
            return Outcome { rule: None, mirrors: vec![], verdict, frame, mark: metadata.mark, counted: None };
        }
        let Some(at) = self.best(direction, frame, &headers, metadata) else {
            let frame = Frame::new(frame);
            return Outcome {
                rule: None,
                mirrors: vec![],
                verdict: Verdict::Pass,
                frame,
                mark: metadata.mark,
                counted: None,
            };
        };
        let (fault, ports, rss_key) = (self.fault, self.ports.clone(), self.rss_key.clone());
        let entry = &mut self.entries[at];
        let mut outcome = Outcome {
            rule: Some(entry.id),
            mirrors: Vec::new(),
            verdict: Verdict::Pass,
            frame: Frame::new(frame),
            mark: metadata.mark,
            counted: None,
        };
        let mut actions: Vec<&Action> = entry.rule.actions().iter().collect();
        if fault == Fault::ActionsBackwards {
            actions.reverse();
        }
        for action in actions {
            let mut going = Ok(());
            let out = &mut outcome.frame;
            match action {
                Action::Queue(queue) => outcome.verdict = Verdict::Queue(*queue),
                Action::Rss(rss) => outcome.verdict = Verdict::Queue(rss::queue(rss, &rss_key, out, &ports, fault)),
                Action::Drop => going = Err(DropCause::RuleDrop),
                Action::Kernel => outcome.verdict = Verdict::Kernel,
                Action::Redirect(port) => outcome.verdict = Verdict::Redirect(port.number()),
                Action::Mirror(port) => outcome.mirrors.push((port.number(), out.clone())),
                Action::Count => {
                    let bytes = if fault == Fault::CountsWhatArrived { frame.len() } else { out.bytes.len() } as u64;
                    outcome.counted = Some(bytes);
                    entry.count.packets += 1;
                    entry.count.bytes += bytes;
                }
                Action::Mark(_) if fault == Fault::MarkLost => {}
                Action::Mark(mark) => outcome.mark = *mark,
                Action::Set { field, value } => out.set(*field, *value, &ports, fault),
                Action::DecTtl => going = out.dec_ttl(&ports, fault),
                Action::PushVlan(tag) => going = out.push_vlan(*tag, &ports, fault),
                Action::PopVlan => out.pop_vlan(),
                Action::Reformat(reformat) => going = out.reformat(reformat, &ports, fault),
                Action::Limit(limit) => {
                    if !entry.bucket.passes(*limit, out.bytes.len(), now, fault) {
                        going = Err(DropCause::RateLimited);
                    }
                }
                other => panic!("an action that the reference does not know: {other}"),
            }
            if let Err(cause) = going {
                outcome.verdict = Verdict::Dropped(cause);
                break;
            }
        }
        if fault == Fault::MirrorSeesTheEnd {
            for (_, copy) in &mut outcome.mirrors {
                *copy = outcome.frame.clone();
            }
        }
        outcome
    }
}
