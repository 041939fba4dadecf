//! Neighbours: from the IP address of a next hop to its Ethernet address.
//!
//! One state machine for ARP and neighbour discovery, after RFC 4861 sections 7.2 and 7.3; the frames are made elsewhere
//! ([`super::underlay`]). It knows no clock and sends nothing: time comes in with every call, and what is to be done goes out as
//! [`Action`]s. Every entry is the next hop of a remote and therefore in use all the time, so a stale entry is always probed.
//!
//! ```text
//! want ──> Incomplete ──reply──> Reachable ──30 s──> Stale ──5 s──> Probe ──3 unanswered──> Incomplete
//!              │ 3 unanswered        ^──────────────reply─────────────┘
//!              v
//!           Failed ──pause──> Incomplete
//! ```
//!
//! Nobody on the wire can add an entry; what is heard only changes entries that were asked for.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use wirepath_wire::MacAddr;

/// Milliseconds since some fixed moment.
pub type Millis = u64;

/// How long and how often. The defaults are those of RFC 4861 section 10.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Between two questions.
    pub retransmit: Millis,
    /// Unanswered questions until an entry fails.
    pub attempts: u32,
    /// How long an answer holds.
    pub reachable: Millis,
    /// From stale to the first probe.
    pub delay: Millis,
    /// Shortest pause after a failure; doubles with each up to [`Self::longest_pause`].
    pub pause: Millis,
    /// Longest pause after failures.
    pub longest_pause: Millis,
    /// An address that just changed is not changed again by unasked messages for so long.
    pub lock: Millis,
    /// Packets kept for one unresolved neighbour.
    pub held: usize,
    /// Most entries.
    pub capacity: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            retransmit: 1_000,
            attempts: 3,
            reachable: 30_000,
            delay: 5_000,
            pause: 1_000,
            longest_pause: 30_000,
            lock: 1_000,
            held: 8,
            capacity: 4_096,
        }
    }
}

/// Where an entry stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Asked, no answer yet.
    Incomplete,
    /// Answered lately.
    Reachable,
    /// Known, but not confirmed lately.
    Stale,
    /// Known and being asked again.
    Probe,
    /// Did not answer; asked again after a pause.
    Failed,
}

impl State {
    /// Lower-case word for displays.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Incomplete => "incomplete",
            Self::Reachable => "reachable",
            Self::Stale => "stale",
            Self::Probe => "probe",
            Self::Failed => "failed",
        }
    }
}

/// What a message said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// "This address is at that Ethernet address": an ARP reply or a neighbour advertisement.
    Answer {
        /// It answers a question (sent to us alone; solicited flag).
        solicited: bool,
        /// It replaces what was known (always in ARP; override flag).
        overrides: bool,
    },
    /// A question whose asker named its own addresses.
    Question,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<P> {
    /// Ask for an address: everybody, or only the station that had it last.
    Ask(IpAddr, Option<MacAddr>),
    /// The address is at this Ethernet address now.
    Bound(IpAddr, MacAddr),
    /// The address is not to be reached.
    Lost(IpAddr),
    /// Send what was kept for this address.
    Release(IpAddr, P),
    /// Drop what was kept: no answer came.
    Refuse(P),
}

#[derive(Debug)]
struct Entry<P> {
    state: State,
    mac: Option<MacAddr>,
    /// When the state ends.
    until: Millis,
    /// Questions asked in this state.
    asked: u32,
    /// Failures in a row.
    failures: u32,
    changed: Millis,
    held: VecDeque<P>,
}

/// All neighbours, and the packets of type `P` that wait for them.
#[derive(Debug)]
pub struct Neighbours<P> {
    timing: Timing,
    entries: BTreeMap<IpAddr, Entry<P>>,
}

impl<P> Neighbours<P> {
    /// None yet.
    pub fn new(timing: Timing) -> Self {
        Self { timing, entries: BTreeMap::new() }
    }

    /// Starts to resolve an address and keeps it resolved from now on. `false` if the table is full.
    pub fn want(&mut self, ip: IpAddr, now: Millis, actions: &mut Vec<Action<P>>) -> bool {
        if self.entries.contains_key(&ip) {
            return true;
        }
        if self.entries.len() >= self.timing.capacity {
            return false;
        }
        let entry = Entry {
            state: State::Incomplete,
            mac: None,
            until: now + self.timing.retransmit,
            asked: 1,
            failures: 0,
            changed: now,
            held: VecDeque::new(),
        };
        self.entries.insert(ip, entry);
        actions.push(Action::Ask(ip, None));
        true
    }

    /// Forgets an address that no remote needs any more; gives back what waited for it.
    pub fn forget(&mut self, ip: IpAddr) -> impl Iterator<Item = P> + use<P> {
        self.entries.remove(&ip).into_iter().flat_map(|entry| entry.held)
    }

    /// Gives back everything that waits.
    pub fn release_all(&mut self) -> impl Iterator<Item = P> {
        self.entries.values_mut().flat_map(|entry| entry.held.drain(..))
    }

    /// The Ethernet address, if it is known.
    pub fn mac(&self, ip: IpAddr) -> Option<MacAddr> {
        self.entries.get(&ip)?.mac
    }

    /// All entries: address, state, Ethernet address.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, State, Option<MacAddr>)> {
        self.entries.iter().map(|(ip, entry)| (*ip, entry.state, entry.mac))
    }

    /// Keeps a packet until the address is known. Where too many wait, the oldest gives way (RFC 4861 section 7.2.2). Packets for
    /// an address that has failed, or that nobody wants, come back at once.
    pub fn hold(&mut self, ip: IpAddr, packet: P, actions: &mut Vec<Action<P>>) {
        let Some(entry) = self.entries.get_mut(&ip) else { return actions.push(Action::Refuse(packet)) };
        match (entry.state, entry.mac) {
            // It was resolved while the packet was on its way to us.
            (_, Some(_)) => actions.push(Action::Release(ip, packet)),
            (State::Failed, None) => actions.push(Action::Refuse(packet)),
            (_, None) => {
                if entry.held.len() >= self.timing.held {
                    actions.extend(entry.held.pop_front().map(Action::Refuse));
                }
                entry.held.push_back(packet);
            }
        }
    }

    /// A message of `ip` was heard: it said (or had as source) the Ethernet address `mac`. Addresses that were not asked for and
    /// Ethernet addresses of no single station change nothing. `true` if it concerned an entry.
    pub fn heard(
        &mut self,
        ip: IpAddr,
        mac: Option<MacAddr>,
        how: Heard,
        now: Millis,
        actions: &mut Vec<Action<P>>,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&ip) else { return false };
        if mac.is_some_and(|mac| !mac.is_unicast()) {
            return false;
        }
        let timing = &self.timing;
        let asked = matches!(entry.state, State::Incomplete | State::Probe);
        // An answer to a question that was not asked is worth no more than one that claims nothing.
        let (confirms, overrides) = match how {
            Heard::Answer { solicited, overrides } => (solicited && asked, overrides),
            Heard::Question => (false, true),
        };
        let changes = mac.is_some() && mac != entry.mac;
        match entry.mac {
            // RFC 4861 section 7.2.5: without an address there is nothing to learn.
            None if mac.is_none() => return true,
            None => {}
            Some(_) if changes && !overrides => {
                if entry.state == State::Reachable {
                    entry.become_stale(now, timing);
                }
                return true;
            }
            // Two stations that fight for an address must not make us flap at their pace.
            Some(_) if changes && !confirms && now < entry.changed + timing.lock => return true,
            Some(_) => {}
        }
        if changes {
            entry.mac = mac;
            entry.changed = now;
        }
        if confirms {
            entry.state = State::Reachable;
            entry.until = now + timing.reachable;
            entry.asked = 0;
            entry.failures = 0;
        } else if changes {
            entry.become_stale(now, timing);
        }
        if let (Some(mac), true) = (entry.mac, changes) {
            actions.push(Action::Bound(ip, mac));
        }
        actions.extend(entry.held.drain(..).map(|packet| Action::Release(ip, packet)));
        true
    }

    /// Lets time pass: asks, gives up, forgets. To be called a few times a second.
    pub fn tick(&mut self, now: Millis, actions: &mut Vec<Action<P>>) {
        for (&ip, entry) in &mut self.entries {
            if now >= entry.until {
                entry.expire(ip, now, &self.timing, actions);
            }
        }
    }
}

impl<P> Entry<P> {
    fn become_stale(&mut self, now: Millis, timing: &Timing) {
        self.state = State::Stale;
        self.until = now + timing.delay;
        self.asked = 0;
    }

    fn ask(&mut self, ip: IpAddr, state: State, now: Millis, timing: &Timing, actions: &mut Vec<Action<P>>) {
        self.state = state;
        self.asked += 1;
        self.until = now + timing.retransmit;
        actions.push(Action::Ask(ip, self.mac));
    }

    fn expire(&mut self, ip: IpAddr, now: Millis, timing: &Timing, actions: &mut Vec<Action<P>>) {
        match self.state {
            State::Reachable => self.become_stale(now, timing),
            State::Stale => self.ask(ip, State::Probe, now, timing, actions),
            State::Probe if self.asked < timing.attempts => self.ask(ip, State::Probe, now, timing, actions),
            State::Probe => {
                // The station that had the address is gone; another may have it (RFC 4861 section 7.3.3).
                self.mac = None;
                self.asked = 0;
                actions.push(Action::Lost(ip));
                self.ask(ip, State::Incomplete, now, timing, actions);
            }
            State::Incomplete if self.asked < timing.attempts => self.ask(ip, State::Incomplete, now, timing, actions),
            State::Incomplete => {
                let pause = timing.pause.saturating_mul(1 << self.failures.min(16)).min(timing.longest_pause);
                self.state = State::Failed;
                self.until = now + pause;
                self.failures += 1;
                self.asked = 0;
                actions.extend(self.held.drain(..).map(Action::Refuse));
                if self.failures == 1 {
                    actions.push(Action::Lost(ip));
                }
            }
            State::Failed => {
                self.asked = 0;
                self.ask(ip, State::Incomplete, now, timing, actions);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 0xa);
    const B: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 0xb);
    const ANSWER: Heard = Heard::Answer { solicited: true, overrides: true };
    const UNASKED: Heard = Heard::Answer { solicited: false, overrides: true };

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 9, 0, last])
    }

    struct Lab {
        n: Neighbours<u32>,
        done: Vec<Action<u32>>,
    }

    impl Lab {
        fn new() -> Self {
            Self { n: Neighbours::new(Timing::default()), done: Vec::new() }
        }
        fn want(&mut self, now: Millis) -> Vec<Action<u32>> {
            assert!(self.n.want(ip(2), now, &mut self.done));
            std::mem::take(&mut self.done)
        }
        fn tick(&mut self, now: Millis) -> Vec<Action<u32>> {
            self.n.tick(now, &mut self.done);
            std::mem::take(&mut self.done)
        }
        fn heard(&mut self, mac: MacAddr, how: Heard, now: Millis) -> Vec<Action<u32>> {
            self.n.heard(ip(2), Some(mac), how, now, &mut self.done);
            std::mem::take(&mut self.done)
        }
        fn hold(&mut self, packet: u32) -> Vec<Action<u32>> {
            self.n.hold(ip(2), packet, &mut self.done);
            std::mem::take(&mut self.done)
        }
        fn state(&self) -> State {
            self.n.iter().next().unwrap().1
        }
    }

    #[test]
    fn asked_answered_and_kept_fresh() {
        let mut lab = Lab::new();
        assert_eq!(lab.want(0), [Action::Ask(ip(2), None)]);
        assert_eq!(lab.want(1), [], "known already");
        assert_eq!(lab.hold(7), []);
        assert_eq!(lab.tick(999), []);
        assert_eq!(lab.tick(1000), [Action::Ask(ip(2), None)]);
        assert_eq!(lab.heard(A, ANSWER, 1100), [Action::Bound(ip(2), A), Action::Release(ip(2), 7)]);
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (State::Reachable, Some(A)));
        assert_eq!(lab.hold(8), [Action::Release(ip(2), 8)]);
        assert_eq!(lab.tick(31_100), []);
        assert_eq!(lab.state(), State::Stale);
        assert_eq!(lab.tick(36_100), [Action::Ask(ip(2), Some(A))]);
        assert_eq!(lab.state(), State::Probe);
        assert_eq!(lab.heard(A, ANSWER, 36_200), []);
        assert_eq!(lab.state(), State::Reachable);
    }

    #[test]
    fn silence_ends_in_failure_and_is_tried_again_more_and_more_slowly() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.hold(1);
        assert_eq!(lab.tick(1000), [Action::Ask(ip(2), None)]);
        assert_eq!(lab.tick(2000), [Action::Ask(ip(2), None)]);
        assert_eq!(lab.tick(3000), [Action::Refuse(1), Action::Lost(ip(2))]);
        assert_eq!(lab.hold(2), [Action::Refuse(2)], "not kept while failed");
        assert_eq!(lab.tick(3999), []);
        assert_eq!(lab.tick(4000), [Action::Ask(ip(2), None)]);
        lab.tick(5000);
        lab.tick(6000);
        assert_eq!(lab.tick(7000), []);
        assert_eq!((lab.state(), lab.tick(8999).len()), (State::Failed, 0));
        assert_eq!(lab.tick(9000), [Action::Ask(ip(2), None)]);
        assert_eq!(lab.heard(A, ANSWER, 9001), [Action::Bound(ip(2), A)]);
    }

    #[test]
    fn a_neighbour_that_goes_away_is_probed_then_asked_for_by_all() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.heard(A, ANSWER, 10);
        lab.tick(30_010);
        for at in [35_010, 36_010, 37_010] {
            assert_eq!(lab.tick(at), [Action::Ask(ip(2), Some(A))]);
        }
        assert_eq!(lab.tick(38_010), [Action::Lost(ip(2)), Action::Ask(ip(2), None)]);
        assert_eq!(lab.n.mac(ip(2)), None);
        assert_eq!(lab.heard(B, ANSWER, 38_020), [Action::Bound(ip(2), B)]);
    }

    #[test]
    fn the_oldest_of_too_many_gives_way() {
        let mut lab = Lab::new();
        lab.want(0);
        for packet in 0..8 {
            assert_eq!(lab.hold(packet), []);
        }
        assert_eq!(lab.hold(8), [Action::Refuse(0)]);
        let done = lab.heard(A, ANSWER, 5);
        assert_eq!(done.len(), 9);
        assert_eq!(done[1], Action::Release(ip(2), 1));
    }

    #[test]
    fn nobody_adds_an_entry_from_outside() {
        let mut lab = Lab::new();
        assert!(!lab.n.heard(ip(9), Some(A), ANSWER, 0, &mut lab.done));
        assert!(!lab.n.heard(ip(9), Some(A), Heard::Question, 0, &mut lab.done));
        assert_eq!(lab.n.iter().count(), 0);
        lab.n.hold(ip(9), 1, &mut lab.done);
        assert_eq!(lab.done, [Action::Refuse(1)]);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut n = Neighbours::<()>::new(Timing { capacity: 2, ..Timing::default() });
        let mut done = Vec::new();
        assert!(n.want(ip(1), 0, &mut done) && n.want(ip(2), 0, &mut done) && !n.want(ip(3), 0, &mut done));
        assert_eq!(n.iter().count(), 2);
    }

    #[test]
    fn unasked_changes_are_taken_once_verified_soon_and_cannot_flap() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.heard(A, ANSWER, 10);
        // A takeover is announced: believed, and probed after the delay.
        assert_eq!(lab.heard(B, UNASKED, 2000), [Action::Bound(ip(2), B)]);
        assert_eq!(lab.state(), State::Stale);
        // The old station protests at once: ignored for a second.
        assert_eq!(lab.heard(A, UNASKED, 2500), []);
        assert_eq!(lab.heard(A, Heard::Question, 2999), []);
        assert_eq!(lab.n.mac(ip(2)), Some(B));
        // A claim to be an answer counts for nothing while nothing was asked.
        assert_eq!(lab.heard(A, ANSWER, 2999), []);
        assert_eq!(lab.tick(7000), [Action::Ask(ip(2), Some(B))]);
    }

    #[test]
    fn rfc4861_section_7_2_5() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.heard(A, ANSWER, 10);
        // "If the Override flag is clear and the supplied link-layer address differs": reachable becomes stale, nothing else.
        assert_eq!(lab.heard(B, Heard::Answer { solicited: true, overrides: false }, 5000), []);
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (State::Stale, Some(A)));
        // An advertisement without an address confirms what is known, if it answers a probe.
        lab.tick(10_000);
        assert!(lab.n.heard(ip(2), None, ANSWER, 10_010, &mut lab.done));
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (State::Reachable, Some(A)));
    }

    #[test]
    fn group_addresses_are_no_stations() {
        let mut lab = Lab::new();
        lab.want(0);
        assert_eq!(lab.heard(MacAddr::BROADCAST, ANSWER, 10), []);
        assert_eq!(lab.heard(MacAddr::ZERO, ANSWER, 10), []);
        assert_eq!(lab.state(), State::Incomplete);
    }
}
