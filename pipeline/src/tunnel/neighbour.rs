//! Neighbour table: maps the IP address of a next hop to its Ethernet address.
//!
//! One state machine serves ARP and neighbour discovery. It follows RFC 4861 sections 7.2 and 7.3.
//! [`super::underlay`] builds the frames. The state machine has no clock and sends nothing. Every call passes
//! the time, and the work to do is returned as [`NeighbourAction`]s. Every entry is the next hop of a remote
//! and thus always in use, so a stale entry is always probed.
//!
//! ```text
//! resolve ─> Incomplete ──reply──> Reachable ──30 s──> Stale ──5 s──> Probe ──3 + 3 unanswered──> Failed
//!              │ 3 unanswered        ^──────────────reply─────────────┘
//!              v
//!           Failed ──retry interval──> Incomplete
//! ```
//!
//! A probe is sent by unicast first and then by multicast, like with Linux's `mcast_resolicit`. The known
//! Ethernet address remains in use meanwhile, so that lost replies do not interrupt the traffic.
//!
//! Received messages never create entries; they only update entries that were requested with
//! [`Neighbours::resolve`].

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::ops::Bound;

use wirepath_wire::MacAddr;

/// Milliseconds since a fixed point in time.
pub type Millis = u64;

/// Timers and limits. The defaults are those of RFC 4861 section 10.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Interval between two solicitations.
    pub retransmit: Millis,
    /// Number of unanswered solicitations, by unicast and by multicast, after which an entry fails.
    pub attempts: u32,
    /// Time for which a reply keeps an entry reachable.
    pub reachable_time: Millis,
    /// Delay from stale to the first probe.
    pub first_probe_delay: Millis,
    /// Shortest interval between a failure and the next attempt. It doubles with each failure up to
    /// [`Self::max_retry_interval`].
    pub retry_interval: Millis,
    /// Longest interval between a failure and the next attempt.
    pub max_retry_interval: Millis,
    /// Time after a change during which requests of other hosts do not change the address again. It does not
    /// apply to announcements, as in Linux.
    pub locktime: Millis,
    /// Maximum number of solicitations of one call of [`Neighbours::tick`].
    pub solicitations_per_tick: usize,
    /// Maximum number of packets queued for an unresolved neighbour.
    pub queue_limit: usize,
    /// Maximum number of entries.
    pub capacity: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            retransmit: 1_000,
            attempts: 3,
            reachable_time: 30_000,
            first_probe_delay: 5_000,
            retry_interval: 1_000,
            max_retry_interval: 30_000,
            locktime: 1_000,
            solicitations_per_tick: 512,
            queue_limit: 8,
            capacity: 4_096,
        }
    }
}

/// State of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeighbourState {
    /// Solicited, no reply yet.
    Incomplete,
    /// Confirmed recently.
    Reachable,
    /// Known, but not confirmed recently.
    Stale,
    /// Known and solicited again.
    Probe,
    /// Did not reply. Solicited again after an interval.
    Failed,
}

impl NeighbourState {
    /// Returns the lower-case name for displays.
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

/// Content of a received ARP or neighbour discovery message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NdEvent {
    /// An ARP reply or a neighbour advertisement.
    Reply {
        /// True if the message replies to a solicitation (solicited flag; in ARP: sent to the gateway alone).
        solicited: bool,
        /// True if the address replaces a known one (override flag; always in ARP).
        overrides: bool,
    },
    /// A gratuitous ARP packet or an unsolicited neighbour advertisement with the override flag.
    Announcement,
    /// An ARP request or a neighbour solicitation that contains its sender's addresses.
    Request,
}

/// An action that the caller must execute.
#[derive(Debug, PartialEq, Eq)]
pub enum NeighbourAction<P> {
    /// Solicit an address, by multicast or by unicast to the Ethernet address that had it last.
    Solicit(IpAddr, Option<MacAddr>),
    /// The address has this Ethernet address now.
    Resolved(IpAddr, MacAddr),
    /// The address is unreachable.
    Unreachable(IpAddr),
    /// Send a packet that was queued for this address.
    Send(IpAddr, P),
    /// Drop a queued packet, because no reply came.
    Drop(P),
}

#[derive(Debug)]
struct Entry<P> {
    state: NeighbourState,
    mac: Option<MacAddr>,
    /// Time at which the state ends.
    deadline: Millis,
    /// Solicitations sent in this state.
    solicits: u32,
    /// True if solicitations go to all hosts although an Ethernet address is known.
    multicast: bool,
    /// Consecutive failures.
    failures: u32,
    changed: Millis,
    queue: VecDeque<P>,
}

/// The neighbour table, with the queued packets of type `P`.
#[derive(Debug)]
pub struct Neighbours<P> {
    timing: Timing,
    entries: BTreeMap<IpAddr, Entry<P>>,
    /// Entry after which the next [`Self::tick`] begins.
    cursor: Option<IpAddr>,
}

impl<P> Neighbours<P> {
    /// Creates an empty table.
    pub fn new(timing: Timing) -> Self {
        Self { timing, entries: BTreeMap::new(), cursor: None }
    }

    /// Starts to resolve an address and keeps it resolved. Returns `false` if the table is full.
    pub fn resolve(&mut self, ip: IpAddr, now: Millis, actions: &mut Vec<NeighbourAction<P>>) -> bool {
        if self.entries.contains_key(&ip) {
            return true;
        }
        if self.entries.len() >= self.timing.capacity {
            return false;
        }
        let entry = Entry {
            state: NeighbourState::Incomplete,
            mac: None,
            deadline: now + self.timing.retransmit,
            solicits: 1,
            multicast: false,
            failures: 0,
            changed: now,
            queue: VecDeque::new(),
        };
        self.entries.insert(ip, entry);
        actions.push(NeighbourAction::Solicit(ip, None));
        true
    }

    /// Solicits an address again by multicast, for example because the link was lost. A known Ethernet address
    /// remains in use until the reply. An address that is not in the table is not solicited.
    pub fn revalidate(&mut self, ip: IpAddr, now: Millis, actions: &mut Vec<NeighbourAction<P>>) {
        let Some(entry) = self.entries.get_mut(&ip) else { return };
        let state = if entry.mac.is_some() { NeighbourState::Probe } else { NeighbourState::Incomplete };
        (entry.multicast, entry.solicits, entry.failures) = (true, 0, 0);
        entry.solicit(ip, state, now, &self.timing, actions);
    }

    /// Removes an address that is no longer a next hop. Its queued packets are returned as drop actions.
    pub fn forget(&mut self, ip: IpAddr, actions: &mut Vec<NeighbourAction<P>>) {
        if let Some(entry) = self.entries.remove(&ip) {
            actions.extend(entry.queue.into_iter().map(NeighbourAction::Drop));
        }
    }

    /// Removes and returns all queued packets.
    pub fn drain_queues(&mut self) -> impl Iterator<Item = P> {
        self.entries.values_mut().flat_map(|entry| entry.queue.drain(..))
    }

    /// Returns the Ethernet address, if it is known.
    pub fn mac(&self, ip: IpAddr) -> Option<MacAddr> {
        self.entries.get(&ip)?.mac
    }

    /// Returns the state of an address, if it is in the table.
    pub fn state(&self, ip: IpAddr) -> Option<NeighbourState> {
        self.entries.get(&ip).map(|entry| entry.state)
    }

    /// Number of queued packets.
    pub fn waiting(&self) -> usize {
        self.entries.values().map(|entry| entry.queue.len()).sum()
    }

    /// Iterates over all entries: address, state and Ethernet address.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, NeighbourState, Option<MacAddr>)> {
        self.entries.iter().map(|(ip, entry)| (*ip, entry.state, entry.mac))
    }

    /// Queues a packet until the address is resolved. If the queue is full, the oldest packet is dropped (RFC
    /// 4861 section 7.2.2). Packets for an unknown or failed address are returned at once as drop actions.
    pub fn enqueue(&mut self, ip: IpAddr, packet: P, actions: &mut Vec<NeighbourAction<P>>) {
        let Some(entry) = self.entries.get_mut(&ip) else { return actions.push(NeighbourAction::Drop(packet)) };
        match (entry.state, entry.mac) {
            // The address was resolved while the packet was on its way to the control thread.
            (_, Some(_)) => actions.push(NeighbourAction::Send(ip, packet)),
            (NeighbourState::Failed, None) => actions.push(NeighbourAction::Drop(packet)),
            (_, None) => {
                if entry.queue.len() >= self.timing.queue_limit {
                    actions.extend(entry.queue.pop_front().map(NeighbourAction::Drop));
                }
                entry.queue.push_back(packet);
            }
        }
    }

    /// Processes a message from `ip` with the Ethernet address `mac`. Messages from addresses that are not in
    /// the table and Ethernet addresses that are not unicast change nothing. Returns `true` if the message
    /// concerned an entry.
    pub fn handle_event(
        &mut self,
        ip: IpAddr,
        mac: Option<MacAddr>,
        how: NdEvent,
        now: Millis,
        actions: &mut Vec<NeighbourAction<P>>,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&ip) else { return false };
        if mac.is_some_and(|mac| !mac.is_unicast()) {
            return false;
        }
        let timing = &self.timing;
        let asked = matches!(entry.state, NeighbourState::Incomplete | NeighbourState::Probe);
        // A reply without a matching solicitation counts as unsolicited.
        let (confirms, overrides) = match how {
            NdEvent::Reply { solicited, overrides } => (solicited && asked, overrides),
            NdEvent::Announcement | NdEvent::Request => (false, true),
        };
        let changes = mac.is_some() && mac != entry.mac;
        match entry.mac {
            // RFC 4861 section 7.2.5: a message without a link-layer address resolves nothing.
            None if mac.is_none() => return true,
            None => {}
            Some(_) if changes && !overrides => {
                if entry.state == NeighbourState::Reachable {
                    entry.become_stale(now, timing);
                }
                return true;
            }
            // Two hosts that claim the same address must not make the entry flap.
            Some(_)
                if changes && !confirms && how != NdEvent::Announcement && now < entry.changed + timing.locktime =>
            {
                return true;
            }
            Some(_) => {}
        }
        if changes {
            entry.mac = mac;
            entry.changed = now;
        }
        if confirms {
            entry.state = NeighbourState::Reachable;
            entry.deadline = now + timing.reachable_time;
            entry.solicits = 0;
            entry.multicast = false;
            entry.failures = 0;
        } else if changes {
            entry.become_stale(now, timing);
        }
        if let (Some(mac), true) = (entry.mac, changes) {
            actions.push(NeighbourAction::Resolved(ip, mac));
        }
        actions.extend(entry.queue.drain(..).map(|packet| NeighbourAction::Send(ip, packet)));
        true
    }

    /// Processes expired deadlines. Call this a few times per second.
    pub fn tick(&mut self, now: Millis, actions: &mut Vec<NeighbourAction<P>>) {
        let (begin, limit) = (actions.len(), self.timing.solicitations_per_tick);
        let mut due: Vec<IpAddr> = Vec::new();
        // The limit must not favour low addresses, so each call begins where the previous one ended.
        let after = self.cursor.map_or(Bound::Unbounded, Bound::Excluded);
        let before = self.cursor.map(|ip| self.entries.range(..=ip)).into_iter().flatten();
        due.extend(
            self.entries
                .range((after, Bound::Unbounded))
                .chain(before)
                .filter(|(_, e)| now >= e.deadline)
                .map(|(ip, _)| *ip),
        );
        for ip in due {
            if actions.len() - begin >= limit {
                break;
            }
            self.cursor = Some(ip);
            if let Some(entry) = self.entries.get_mut(&ip) {
                entry.expire(ip, now, &self.timing, actions);
            }
        }
    }
}

impl<P> Entry<P> {
    fn become_stale(&mut self, now: Millis, timing: &Timing) {
        self.state = NeighbourState::Stale;
        self.deadline = now + timing.first_probe_delay;
        self.solicits = 0;
        self.multicast = false;
    }

    fn solicit(
        &mut self,
        ip: IpAddr,
        state: NeighbourState,
        now: Millis,
        timing: &Timing,
        actions: &mut Vec<NeighbourAction<P>>,
    ) {
        self.state = state;
        self.solicits += 1;
        self.deadline = now + timing.retransmit;
        actions.push(NeighbourAction::Solicit(ip, self.mac.filter(|_| !self.multicast)));
    }

    fn expire(&mut self, ip: IpAddr, now: Millis, timing: &Timing, actions: &mut Vec<NeighbourAction<P>>) {
        match self.state {
            NeighbourState::Reachable => self.become_stale(now, timing),
            NeighbourState::Stale => self.solicit(ip, NeighbourState::Probe, now, timing, actions),
            NeighbourState::Probe if self.solicits < timing.attempts => {
                self.solicit(ip, NeighbourState::Probe, now, timing, actions);
            }
            NeighbourState::Probe if !self.multicast => {
                // The host with this address no longer replies. Another host may have it (RFC 4861 section
                // 7.3.3).
                (self.multicast, self.solicits) = (true, 0);
                self.solicit(ip, NeighbourState::Probe, now, timing, actions);
            }
            NeighbourState::Incomplete if self.solicits < timing.attempts => {
                self.solicit(ip, NeighbourState::Incomplete, now, timing, actions);
            }
            NeighbourState::Probe | NeighbourState::Incomplete => {
                self.mac = None;
                let interval =
                    timing.retry_interval.saturating_mul(1 << self.failures.min(16)).min(timing.max_retry_interval);
                self.state = NeighbourState::Failed;
                self.deadline = now + interval;
                self.failures += 1;
                self.solicits = 0;
                actions.extend(self.queue.drain(..).map(NeighbourAction::Drop));
                if self.failures == 1 {
                    actions.push(NeighbourAction::Unreachable(ip));
                }
            }
            NeighbourState::Failed => {
                self.solicits = 0;
                self.solicit(ip, NeighbourState::Incomplete, now, timing, actions);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 0xa);
    const B: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 0xb);
    const ANSWER: NdEvent = NdEvent::Reply { solicited: true, overrides: true };
    const UNASKED: NdEvent = NdEvent::Announcement;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 9, 0, last])
    }

    struct Lab {
        n: Neighbours<u32>,
        done: Vec<NeighbourAction<u32>>,
    }

    impl Lab {
        fn new() -> Self {
            Self { n: Neighbours::new(Timing::default()), done: Vec::new() }
        }
        fn want(&mut self, now: Millis) -> Vec<NeighbourAction<u32>> {
            assert!(self.n.resolve(ip(2), now, &mut self.done));
            std::mem::take(&mut self.done)
        }
        fn tick(&mut self, now: Millis) -> Vec<NeighbourAction<u32>> {
            self.n.tick(now, &mut self.done);
            std::mem::take(&mut self.done)
        }
        fn observe(&mut self, mac: MacAddr, how: NdEvent, now: Millis) -> Vec<NeighbourAction<u32>> {
            self.n.handle_event(ip(2), Some(mac), how, now, &mut self.done);
            std::mem::take(&mut self.done)
        }
        fn hold(&mut self, packet: u32) -> Vec<NeighbourAction<u32>> {
            self.n.enqueue(ip(2), packet, &mut self.done);
            std::mem::take(&mut self.done)
        }
        fn state(&self) -> NeighbourState {
            self.n.iter().next().unwrap().1
        }
    }

    #[test]
    fn resolved_neighbours_are_kept_reachable() {
        let mut lab = Lab::new();
        assert_eq!(lab.want(0), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(lab.want(1), [], "known already");
        assert_eq!(lab.hold(7), []);
        assert_eq!(lab.tick(999), []);
        assert_eq!(lab.tick(1000), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(
            lab.observe(A, ANSWER, 1100),
            [NeighbourAction::Resolved(ip(2), A), NeighbourAction::Send(ip(2), 7)]
        );
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (NeighbourState::Reachable, Some(A)));
        assert_eq!(lab.hold(8), [NeighbourAction::Send(ip(2), 8)]);
        assert_eq!(lab.tick(31_100), []);
        assert_eq!(lab.state(), NeighbourState::Stale);
        assert_eq!(lab.tick(36_100), [NeighbourAction::Solicit(ip(2), Some(A))]);
        assert_eq!(lab.state(), NeighbourState::Probe);
        assert_eq!(lab.observe(A, ANSWER, 36_200), []);
        assert_eq!(lab.state(), NeighbourState::Reachable);
    }

    #[test]
    fn unanswered_solicitations_fail_with_growing_backoff() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.hold(1);
        assert_eq!(lab.tick(1000), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(lab.tick(2000), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(lab.tick(3000), [NeighbourAction::Drop(1), NeighbourAction::Unreachable(ip(2))]);
        assert_eq!(lab.hold(2), [NeighbourAction::Drop(2)], "not kept while failed");
        assert_eq!(lab.tick(3999), []);
        assert_eq!(lab.tick(4000), [NeighbourAction::Solicit(ip(2), None)]);
        lab.tick(5000);
        lab.tick(6000);
        assert_eq!(lab.tick(7000), []);
        assert_eq!((lab.state(), lab.tick(8999).len()), (NeighbourState::Failed, 0));
        assert_eq!(lab.tick(9000), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(lab.observe(A, ANSWER, 9001), [NeighbourAction::Resolved(ip(2), A)]);
    }

    #[test]
    fn lost_neighbours_are_probed_then_solicited_by_multicast() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.observe(A, ANSWER, 10);
        lab.tick(30_010);
        for at in [35_010, 36_010, 37_010] {
            assert_eq!(lab.tick(at), [NeighbourAction::Solicit(ip(2), Some(A))]);
        }
        for at in [38_010, 39_010, 40_010] {
            assert_eq!(lab.tick(at), [NeighbourAction::Solicit(ip(2), None)]);
            assert_eq!((lab.state(), lab.n.mac(ip(2))), (NeighbourState::Probe, Some(A)), "still in use");
        }
        assert_eq!(lab.tick(41_010), [NeighbourAction::Unreachable(ip(2))]);
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (NeighbourState::Failed, None));
        lab.tick(42_010);
        assert_eq!(lab.observe(B, ANSWER, 42_020), [NeighbourAction::Resolved(ip(2), B)]);
    }

    #[test]
    fn a_full_queue_drops_the_oldest_packet() {
        let mut lab = Lab::new();
        lab.want(0);
        for packet in 0..8 {
            assert_eq!(lab.hold(packet), []);
        }
        assert_eq!(lab.hold(8), [NeighbourAction::Drop(0)]);
        let done = lab.observe(A, ANSWER, 5);
        assert_eq!(done.len(), 9);
        assert_eq!(done[1], NeighbourAction::Send(ip(2), 1));
    }

    #[test]
    fn messages_create_no_entries() {
        let mut lab = Lab::new();
        assert!(!lab.n.handle_event(ip(9), Some(A), ANSWER, 0, &mut lab.done));
        assert!(!lab.n.handle_event(ip(9), Some(A), NdEvent::Request, 0, &mut lab.done));
        assert_eq!(lab.n.iter().count(), 0);
        lab.n.enqueue(ip(9), 1, &mut lab.done);
        assert_eq!(lab.done, [NeighbourAction::Drop(1)]);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut n = Neighbours::<()>::new(Timing { capacity: 2, ..Timing::default() });
        let mut done = Vec::new();
        assert!(n.resolve(ip(1), 0, &mut done) && n.resolve(ip(2), 0, &mut done) && !n.resolve(ip(3), 0, &mut done));
        assert_eq!(n.iter().count(), 2);
    }

    #[test]
    fn unsolicited_changes_are_probed_and_cannot_flap() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.observe(A, ANSWER, 10);
        // A takeover is announced. It is accepted and probed after the delay.
        assert_eq!(lab.observe(B, UNASKED, 2000), [NeighbourAction::Resolved(ip(2), B)]);
        assert_eq!(lab.state(), NeighbourState::Stale);
        // A request of the old host is ignored for a second.
        assert_eq!(lab.observe(A, NdEvent::Request, 2999), []);
        assert_eq!(lab.n.mac(ip(2)), Some(B));
        // A solicited flag has no effect while nothing was solicited.
        assert_eq!(lab.observe(A, ANSWER, 2999), []);
        assert_eq!(lab.tick(7000), [NeighbourAction::Solicit(ip(2), Some(B))]);
        // An announcement counts at once, as in Linux.
        assert_eq!(lab.observe(A, UNASKED, 7001), [NeighbourAction::Resolved(ip(2), A)]);
        assert_eq!(lab.observe(B, UNASKED, 7002), [NeighbourAction::Resolved(ip(2), B)]);
    }

    #[test]
    fn revalidation_asks_all_hosts_and_keeps_the_address() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.observe(A, ANSWER, 10);
        lab.n.revalidate(ip(2), 100, &mut lab.done);
        assert_eq!(std::mem::take(&mut lab.done), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (NeighbourState::Probe, Some(A)));
        assert_eq!(lab.tick(1100), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(lab.observe(B, ANSWER, 1101), [NeighbourAction::Resolved(ip(2), B)]);
        assert_eq!(lab.state(), NeighbourState::Reachable);
        // A failed entry is solicited at once.
        for at in [31_101, 36_101, 37_101, 38_101, 39_101, 40_101, 41_101, 42_101] {
            lab.tick(at);
        }
        assert_eq!(lab.state(), NeighbourState::Failed);
        lab.n.revalidate(ip(2), 42_200, &mut lab.done);
        assert_eq!(std::mem::take(&mut lab.done), [NeighbourAction::Solicit(ip(2), None)]);
        lab.n.revalidate(ip(9), 42_200, &mut lab.done);
        assert_eq!(lab.done, [], "not a next hop");
    }

    #[test]
    fn a_tick_sends_a_limited_number_of_solicitations() {
        let timing = Timing { solicitations_per_tick: 10, ..Timing::default() };
        let mut n = Neighbours::<()>::new(timing);
        let mut done = Vec::new();
        for last in 0..25 {
            n.resolve(ip(last), 0, &mut done);
        }
        done.clear();
        let mut all = std::collections::BTreeSet::new();
        for count in [10, 10, 5, 0] {
            n.tick(1000, &mut done);
            assert_eq!(done.len(), count);
            all.extend(done.drain(..).map(|action| format!("{action:?}")));
        }
        assert_eq!(all.len(), 25);
    }

    #[test]
    fn rfc4861_section_7_2_5() {
        let mut lab = Lab::new();
        lab.want(0);
        lab.observe(A, ANSWER, 10);
        // "If the Override flag is clear and the supplied link-layer address differs": the state changes from
        // reachable to stale, and nothing else changes.
        assert_eq!(lab.observe(B, NdEvent::Reply { solicited: true, overrides: false }, 5000), []);
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (NeighbourState::Stale, Some(A)));
        // An advertisement without an address confirms the known address if it replies to a probe.
        lab.tick(10_000);
        assert!(lab.n.handle_event(ip(2), None, ANSWER, 10_010, &mut lab.done));
        assert_eq!((lab.state(), lab.n.mac(ip(2))), (NeighbourState::Reachable, Some(A)));
    }

    #[test]
    fn group_addresses_resolve_nothing() {
        let mut lab = Lab::new();
        lab.want(0);
        assert_eq!(lab.observe(MacAddr::BROADCAST, ANSWER, 10), []);
        assert_eq!(lab.observe(MacAddr::ZERO, ANSWER, 10), []);
        assert_eq!(lab.state(), NeighbourState::Incomplete);
    }
}
