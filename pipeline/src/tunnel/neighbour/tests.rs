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
    fn release(&mut self, now: Millis) -> Vec<NeighbourAction<u32>> {
        self.n.release_held(now, &mut self.done);
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
    assert_eq!(lab.observe(A, ANSWER, 1100), [NeighbourAction::Resolved(ip(2), A), NeighbourAction::Send(ip(2), 7)]);
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
    let asked = [NeighbourAction::Hold(ip(2)), NeighbourAction::Solicit(ip(2), None)];
    assert_eq!(std::mem::take(&mut lab.done), asked);
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
fn packets_are_held_until_the_neighbour_replies() {
    for (mac, outcome) in [(A, NeighbourAction::Release(ip(2))), (B, NeighbourAction::Resolved(ip(2), B))] {
        let mut lab = Lab::new();
        lab.want(0);
        lab.observe(A, ANSWER, 10);
        lab.n.hold(ip(2), &mut lab.done);
        lab.n.hold(ip(2), &mut lab.done);
        assert_eq!(std::mem::take(&mut lab.done), [NeighbourAction::Hold(ip(2))]);
        assert_eq!(lab.hold(1), []);
        assert_eq!(lab.release(5000), [], "the link is still lost");
        lab.n.revalidate(ip(2), 5000, &mut lab.done);
        assert_eq!(std::mem::take(&mut lab.done), [NeighbourAction::Solicit(ip(2), None)]);
        assert_eq!(lab.hold(2), []);
        assert_eq!(lab.release(5019), []);
        let sent = [NeighbourAction::Send(ip(2), 1), NeighbourAction::Send(ip(2), 2)];
        assert_eq!(lab.observe(mac, ANSWER, 5019), std::iter::once(outcome).chain(sent).collect::<Vec<_>>());
        assert_eq!((lab.hold(3), lab.release(6000)), (vec![NeighbourAction::Send(ip(2), 3)], vec![]));
    }
}

#[test]
fn held_packets_go_to_the_known_address_without_a_reply() {
    let mut lab = Lab::new();
    lab.want(0);
    lab.observe(A, ANSWER, 10);
    lab.n.revalidate(ip(2), 100, &mut lab.done);
    // The link flaps again, and the time starts again.
    lab.n.hold(ip(2), &mut lab.done);
    lab.n.revalidate(ip(2), 110, &mut lab.done);
    lab.done.clear();
    for packet in 0..64 {
        assert_eq!(lab.hold(packet), []);
    }
    assert_eq!(lab.hold(64), [NeighbourAction::Send(ip(2), 0)], "the oldest one");
    assert_eq!(lab.release(129), []);
    let released = lab.release(130);
    assert_eq!((released.len(), &released[0]), (65, &NeighbourAction::Release(ip(2))));
    assert_eq!(released[1], NeighbourAction::Send(ip(2), 1));
    // An entry that fails while the link is lost holds nothing.
    lab.n.hold(ip(2), &mut lab.done);
    assert_eq!(lab.hold(65), [NeighbourAction::Hold(ip(2))]);
    for at in [1110, 2110] {
        lab.tick(at);
    }
    assert_eq!(lab.tick(3110), [NeighbourAction::Drop(65), NeighbourAction::Unreachable(ip(2))]);
    assert_eq!(lab.hold(66), [NeighbourAction::Drop(66)]);
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
