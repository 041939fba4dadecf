//! The reference: a list of rules that is walked from the first to the last for every packet.

use wirepath_pmd::flow::{Action, Direction, Limit, RateUnit, Rule};

use crate::fields::Noted;
use crate::fit::fits;
use crate::headers::{Headers, TunnelPorts};
use crate::rewrite::Frame;
use crate::rss;

/// An error that can be planted, so that a comparison can show that it would find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names say it.
pub enum Fault {
    #[default]
    None,
    // Which rule.
    MaskBit,
    WrongLevel,
    LabelsSkipped,
    HeadersInLaterFragments,
    HighNumberFirst,
    LastAddedFirst,
    EgressAtIngress,
    DisorderAccepted,
    // What is done.
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
    /// All that are errors.
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

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// `drop`.
    Ruled,
    /// `dec-ttl` on the last hop.
    NoHopsLeft,
    /// `limit`.
    RateLimited,
    /// `decap`: the way was congested and the sender does not understand it (RFC 6040 section 4.2).
    Congestion,
    /// `decap`: there is a tunnel, but not in it what it says that it carries.
    NothingInside,
    /// `decap`: a tunnel packet in pieces.
    OuterFragment,
    /// `push-vlan`: a third tag.
    ThirdTag,
    /// Before any rule: the frame's own headers are in disorder.
    Malformed,
}

/// Where a packet goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// To whatever comes next.
    On,
    /// To this receive queue.
    Queue(u16),
    /// Nowhere.
    Dropped(Cause),
    /// To the kernel.
    Kernel,
    /// Out of this port.
    Redirect(u16),
}

/// What becomes of one packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The rule that it hit.
    pub rule: Option<RuleId>,
    /// Copies that went out of ports, in their order.
    pub mirrors: Vec<(u16, Frame)>,
    /// Where it goes.
    pub fate: Fate,
    /// The packet as it leaves; as it was when dropped, if it was.
    pub frame: Frame,
    /// Its mark afterwards.
    pub mark: u32,
    /// Bytes that the rule's counter grew by, if it counts.
    pub counted: Option<u64>,
}

/// Names a rule of a reference, in the order in which rules were added.
pub type RuleId = u64;

/// What a rule counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets that it decided about.
    pub packets: u64,
    /// Their bytes, as they were when they came to `count`.
    pub bytes: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    id: RuleId,
    rule: Rule,
    count: Count,
    bucket: Bucket,
}

/// A token bucket in exact numbers: billionths of a packet or bit.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    tokens: Option<u128>,
    last: u64,
}

const BILLION: u128 = 1_000_000_000;

impl Bucket {
    /// Whether a packet of this length passes at this time in nanoseconds. The bucket is full at first.
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

/// Rules in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    entries: Vec<Entry>,
    next: RuleId,
    /// Where tunnels are looked for.
    pub ports: TunnelPorts,
    /// Toeplitz key of rules that have none.
    pub rss_key: Vec<u8>,
    /// The planted error.
    pub fault: Fault,
}

impl Reference {
    /// Adds these in their order.
    pub fn new(rules: &[Rule]) -> Self {
        let mut reference = Self::default();
        for rule in rules {
            reference.add(rule.clone());
        }
        reference
    }

    /// The same with an error in it.
    pub fn with(mut self, fault: Fault) -> Self {
        self.fault = fault;
        self
    }

    /// Adds a rule behind all others.
    pub fn add(&mut self, rule: Rule) -> RuleId {
        let id = self.next;
        self.next += 1;
        self.entries.push(Entry { id, rule, count: Count::default(), bucket: Bucket::default() });
        id
    }

    /// Takes a rule out; `false` if it is not there.
    pub fn remove(&mut self, id: RuleId) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.id != id);
        self.entries.len() < before
    }

    /// Puts a rule in the place of another: its name stays, and its place in the order if the priority does.
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> bool {
        let Some(at) = self.entries.iter().position(|entry| entry.id == id) else { return false };
        let mut entry = self.entries.remove(at);
        let last = if entry.rule.priority() == rule.priority() { at } else { self.entries.len() };
        entry.rule = rule;
        entry.bucket = Bucket::default();
        self.entries.insert(last, entry);
        true
    }

    /// The rules with their names, in the order in which they were added.
    pub fn rules(&self) -> impl Iterator<Item = (RuleId, &Rule)> {
        self.entries.iter().map(|entry| (entry.id, &entry.rule))
    }

    /// A rule.
    pub fn rule(&self, id: RuleId) -> Option<&Rule> {
        self.rules().find(|(i, _)| *i == id).map(|(_, rule)| rule)
    }

    /// What a rule counted.
    pub fn count(&self, id: RuleId) -> Option<Count> {
        self.entries.iter().find(|entry| entry.id == id).map(|entry| entry.count)
    }

    /// The rule that a packet hits: the lowest priority number, then the first added.
    pub fn classify(&self, direction: Direction, frame: &[u8], noted: &Noted) -> Option<RuleId> {
        let headers = Headers::of(frame, &self.ports);
        if headers.stacks[0].broken.is_some() {
            return None;
        }
        self.best(direction, frame, &headers, noted).map(|at| self.entries[at].id)
    }

    fn best(&self, direction: Direction, frame: &[u8], headers: &Headers, noted: &Noted) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (at, entry) in self.entries.iter().enumerate() {
            let rule = &entry.rule;
            let asked = rule.direction() == direction || self.fault == Fault::EgressAtIngress;
            if !asked || !fits(rule.pattern(), frame, headers, noted, self.fault) {
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

    /// What becomes of a packet that comes at this time, in nanoseconds.
    pub fn run(&mut self, direction: Direction, frame: &[u8], noted: &Noted, now: u64) -> Outcome {
        let headers = Headers::of(frame, &self.ports);
        if headers.stacks[0].broken.is_some() && self.fault != Fault::DisorderAccepted {
            let (fate, frame) = (Fate::Dropped(Cause::Malformed), Frame::new(frame));
            return Outcome { rule: None, mirrors: vec![], fate, frame, mark: noted.mark, counted: None };
        }
        let Some(at) = self.best(direction, frame, &headers, noted) else {
            let frame = Frame::new(frame);
            return Outcome { rule: None, mirrors: vec![], fate: Fate::On, frame, mark: noted.mark, counted: None };
        };
        let (fault, ports, rss_key) = (self.fault, self.ports.clone(), self.rss_key.clone());
        let entry = &mut self.entries[at];
        let mut outcome = Outcome {
            rule: Some(entry.id),
            mirrors: Vec::new(),
            fate: Fate::On,
            frame: Frame::new(frame),
            mark: noted.mark,
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
                Action::Queue(queue) => outcome.fate = Fate::Queue(*queue),
                Action::Rss(rss) => outcome.fate = Fate::Queue(rss::queue(rss, &rss_key, out, &ports, fault)),
                Action::Drop => going = Err(Cause::Ruled),
                Action::Kernel => outcome.fate = Fate::Kernel,
                Action::Redirect(port) => outcome.fate = Fate::Redirect(*port),
                Action::Mirror(port) => outcome.mirrors.push((*port, out.clone())),
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
                        going = Err(Cause::RateLimited);
                    }
                }
                other => panic!("an action that the reference does not know: {other}"),
            }
            if let Err(cause) = going {
                outcome.fate = Fate::Dropped(cause);
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
