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
//! Packets for a known Ethernet address are held while the link is lost, because another host may get the IP
//! address meanwhile. They are held until the neighbour replies, but at most for [`Timing::hold_time`] after the
//! return of the link.
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
    /// Longest time for which packets to a known Ethernet address are held after the link returned.
    pub hold_time: Millis,
    /// Maximum number of packets held for a known Ethernet address. The oldest one above it is sent there.
    pub held_limit: usize,
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
            hold_time: 20,
            held_limit: 64,
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
    /// Pass packets for this resolved address to [`Neighbours::enqueue`] instead of sending them.
    Hold(IpAddr),
    /// Send packets for this address to the known Ethernet address again.
    Release(IpAddr),
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
    /// Time until which packets are held although the Ethernet address is known.
    held_until: Option<Millis>,
    queue: VecDeque<P>,
}

/// The neighbour table, with the queued packets of type `P`.
#[derive(Debug)]
pub struct Neighbours<P> {
    timing: Timing,
    entries: BTreeMap<IpAddr, Entry<P>>,
    /// Entry after which the next [`Self::tick`] begins.
    cursor: Option<IpAddr>,
    /// Ends of [`Timing::hold_time`], in order.
    holds: VecDeque<(Millis, IpAddr)>,
}

impl<P> Neighbours<P> {
    /// Creates an empty table.
    pub fn new(timing: Timing) -> Self {
        Self { timing, entries: BTreeMap::new(), cursor: None, holds: VecDeque::new() }
    }

    /// Changes [`Timing::capacity`]. Addresses that are in the table stay.
    pub fn set_capacity(&mut self, capacity: usize) {
        self.timing.capacity = capacity;
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
            held_until: None,
            queue: VecDeque::new(),
        };
        self.entries.insert(ip, entry);
        actions.push(NeighbourAction::Solicit(ip, None));
        true
    }

    /// Holds the packets for an address whose Ethernet address is known, because the link is lost. They wait for
    /// [`Self::revalidate`].
    pub fn hold(&mut self, ip: IpAddr, actions: &mut Vec<NeighbourAction<P>>) {
        if let Some(entry) = self.entries.get_mut(&ip) {
            entry.hold(ip, Millis::MAX, actions);
        }
    }

    /// Solicits an address again by multicast, because the link has returned. Packets for a known Ethernet address
    /// are held until the reply, but not longer than [`Timing::hold_time`]. An address that is not in the table is
    /// not solicited.
    pub fn revalidate(&mut self, ip: IpAddr, now: Millis, actions: &mut Vec<NeighbourAction<P>>) {
        let Some(entry) = self.entries.get_mut(&ip) else { return };
        let until = now + self.timing.hold_time;
        entry.hold(ip, until, actions);
        let state = if entry.mac.is_some() { NeighbourState::Probe } else { NeighbourState::Incomplete };
        if entry.mac.is_some() {
            self.holds.push_back((until, ip));
        }
        (entry.multicast, entry.solicits, entry.failures) = (true, 0, 0);
        entry.solicit(ip, state, now, &self.timing, actions);
    }

    /// Releases packets that were held for [`Timing::hold_time`]. Call this every few milliseconds.
    pub fn release_held(&mut self, now: Millis, actions: &mut Vec<NeighbourAction<P>>) {
        while let Some((until, ip)) = self.holds.pop_front_if(|(until, _)| *until <= now) {
            if let Some(entry) = self.entries.get_mut(&ip).filter(|entry| entry.held_until == Some(until)) {
                entry.release(ip, actions);
            }
        }
    }

    /// Removes an address that is no longer a next hop. Its queued packets are returned as drop actions.
    pub fn forget(&mut self, ip: IpAddr, actions: &mut Vec<NeighbourAction<P>>) {
        if let Some(entry) = self.entries.remove(&ip) {
            actions.extend(entry.queue.into_iter().map(NeighbourAction::Drop));
        }
    }

    /// Returns whether packets for an address are held although its Ethernet address is known.
    pub fn is_held(&self, ip: IpAddr) -> bool {
        self.entries.get(&ip).is_some_and(|entry| entry.held_until.is_some())
    }

    /// Returns some queued packets for an address as drop actions.
    pub fn discard(&mut self, ip: IpAddr, select: impl Fn(&P) -> bool, actions: &mut Vec<NeighbourAction<P>>) {
        let Some(entry) = self.entries.get_mut(&ip) else { return };
        let (gone, stay): (VecDeque<P>, VecDeque<P>) = std::mem::take(&mut entry.queue).into_iter().partition(select);
        entry.queue = stay;
        actions.extend(gone.into_iter().map(NeighbourAction::Drop));
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

    /// Returns whether a neighbour has not answered all its solicitations, and has no Ethernet address. One that is
    /// asked for the first time has not failed.
    pub fn has_failed(&self, ip: IpAddr) -> bool {
        self.entries.get(&ip).is_some_and(|entry| entry.failures > 0 && entry.mac.is_none())
    }

    /// Number of queued packets.
    pub fn waiting(&self) -> usize {
        self.entries.values().map(|entry| entry.queue.len()).sum()
    }

    /// Iterates over all entries: address, state and Ethernet address.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, NeighbourState, Option<MacAddr>)> {
        self.entries.iter().map(|(ip, entry)| (*ip, entry.state, entry.mac))
    }

    /// Queues a packet until the address is resolved or released. If the queue is full, the oldest packet is
    /// dropped (RFC 4861 section 7.2.2), or sent to the known Ethernet address. Packets for an unknown or failed
    /// address are returned at once as drop actions.
    pub fn enqueue(&mut self, ip: IpAddr, packet: P, actions: &mut Vec<NeighbourAction<P>>) {
        let Some(entry) = self.entries.get_mut(&ip) else { return actions.push(NeighbourAction::Drop(packet)) };
        match (entry.state, entry.mac) {
            (_, Some(_)) if entry.held_until.is_some() => {
                if entry.queue.len() >= self.timing.held_limit {
                    actions.extend(entry.queue.pop_front().map(|packet| NeighbourAction::Send(ip, packet)));
                }
                entry.queue.push_back(packet);
            }
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
            entry.held_until = None;
            actions.push(NeighbourAction::Resolved(ip, mac));
        }
        entry.release(ip, actions);
        true
    }

    /// Sets the state of an address that is in the table, for a table without timers of its own.
    pub fn set(
        &mut self,
        ip: IpAddr,
        state: NeighbourState,
        mac: Option<MacAddr>,
        actions: &mut Vec<NeighbourAction<P>>,
    ) {
        let Some(entry) = self.entries.get_mut(&ip) else { return };
        let changes = entry.mac != mac;
        let fails = state == NeighbourState::Failed && entry.state != NeighbourState::Failed;
        (entry.state, entry.mac) = (state, mac);
        match mac {
            Some(mac) => {
                actions.extend(changes.then_some(NeighbourAction::Resolved(ip, mac)));
                entry.release(ip, actions);
            }
            None => {
                if state == NeighbourState::Failed {
                    actions.extend(entry.queue.drain(..).map(NeighbourAction::Drop));
                }
                actions.extend((changes || fails).then_some(NeighbourAction::Unreachable(ip)));
            }
        }
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
    /// Holds packets if the Ethernet address is known. Otherwise they wait anyway.
    fn hold(&mut self, ip: IpAddr, until: Millis, actions: &mut Vec<NeighbourAction<P>>) {
        if self.mac.is_some() && self.held_until.replace(until).is_none() {
            actions.push(NeighbourAction::Hold(ip));
        }
    }

    /// Sends the queued packets.
    fn release(&mut self, ip: IpAddr, actions: &mut Vec<NeighbourAction<P>>) {
        if self.held_until.take().is_some() {
            actions.push(NeighbourAction::Release(ip));
        }
        actions.extend(self.queue.drain(..).map(|packet| NeighbourAction::Send(ip, packet)));
    }

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
                (self.mac, self.held_until) = (None, None);
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
mod tests;
