//! Two sessions on a simulated link with a simulated clock.

use super::*;

const MS: Micros = 1000;
const TICK: Micros = 10 * MS;
const FAST: Timers = Timers { transmit: 300 * MS, receive: 300 * MS, multiplier: 3 };

/// A packet on the link: time of arrival, number of the receiver, packet.
type Flight = (Micros, usize, ControlPacket);

/// Two ends and the packets between them.
struct Link {
    ends: [Session; 2],
    /// Packets that each end sent, with their times.
    sent: [Vec<(Micros, ControlPacket)>; 2],
    flights: Vec<Flight>,
    now: Micros,
    /// Parts of a thousand packets to each end that are lost.
    loss: [u32; 2],
    /// Longest delay of a packet. Packets overtake each other.
    delay: Micros,
    random: fastrand::Rng,
}

fn session(timers: Timers, discriminator: u32, now: Micros) -> Session {
    Session::new(timers, discriminator, TICK, discriminator.into(), now)
}

impl Link {
    fn new(a: Timers, b: Timers) -> Self {
        Self {
            ends: [session(a, 11, 0), session(b, 22, 0)],
            sent: [Vec::new(), Vec::new()],
            flights: Vec::new(),
            now: 0,
            loss: [0; 2],
            delay: MS,
            random: fastrand::Rng::with_seed(5),
        }
    }

    fn run(&mut self, time: Micros) {
        let end = self.now + time;
        while self.now < end {
            self.now += TICK;
            let now = self.now;
            let (mut due, later) = std::mem::take(&mut self.flights).into_iter().partition(|it: &Flight| it.0 <= now);
            self.flights = later;
            due.sort_by_key(|it: &Flight| it.0);
            for (_, to, packet) in due {
                // A receiver that has restarted has another discriminator, and refuses the packet.
                let _ = self.ends[to].receive(&packet, now);
            }
            for from in 0..2 {
                let mut count = 0;
                while let Some(packet) = self.ends[from].next_packet(now) {
                    count += 1;
                    assert!(count <= 2, "a reply and a periodic packet");
                    self.sent[from].push((now, packet));
                    if self.random.u32(0..1000) >= self.loss[1 - from] {
                        self.flights.push((now + self.random.u64(0..=self.delay), 1 - from, packet));
                    }
                }
            }
        }
    }

    fn states(&self) -> [State; 2] {
        [self.ends[0].state(), self.ends[1].state()]
    }

    /// Intervals between the periodic packets that an end sent since a time.
    fn intervals(&self, end: usize, since: Micros) -> Vec<Micros> {
        let periodic = self.sent[end].iter().filter(|(at, packet)| *at >= since && !packet.is_final);
        let times: Vec<Micros> = periodic.map(|(at, _)| *at).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

const UP: [State; 2] = [State::Up; 2];

#[test]
fn both_ends_come_up_and_take_the_negotiated_intervals() {
    let slow = Timers { transmit: 700 * MS, receive: 100 * MS, multiplier: 5 };
    let mut link = Link::new(FAST, slow);
    link.run(3000 * MS);
    assert_eq!(link.states(), UP);
    link.run(2000 * MS);
    // RFC 5880 section 6.8.2: the larger of what one end desires to send and the other requires to receive.
    assert_eq!(link.ends[0].transmit_interval(), 300 * MS);
    assert_eq!(link.ends[1].transmit_interval(), 700 * MS);
    assert_eq!(link.ends[0].detection_time(), 5 * 700 * MS);
    assert_eq!(link.ends[1].detection_time(), 3 * 300 * MS);
    let from = link.now;
    link.run(60_000 * MS);
    for (end, interval) in [(0, 300 * MS), (1, 700 * MS)] {
        let all = link.intervals(end, from);
        assert!(all.len() > 80, "{}", all.len());
        let bounds = interval / 4 * 3..=interval;
        assert!(all.iter().all(|it| bounds.contains(it)), "{all:?}");
        let spread = all.iter().max().unwrap() - all.iter().min().unwrap();
        assert!(spread > interval / 8, "jitter: {spread}");
    }
    assert_eq!(link.states(), UP);
    assert_eq!((link.ends[0].stats.ups, link.ends[0].stats.downs), (1, 0));
}

#[test]
fn a_multiplier_of_one_leaves_a_tenth_of_the_interval() {
    let one = Timers { multiplier: 1, ..FAST };
    let mut link = Link::new(one, FAST);
    link.run(3000 * MS);
    let from = link.now;
    link.run(30_000 * MS);
    let all = link.intervals(0, from);
    assert!(all.len() > 80 && all.iter().all(|it| (225 * MS..=270 * MS).contains(it)), "{all:?}");
    assert_eq!((link.states(), link.ends[1].stats.downs), (UP, 0));
}

#[test]
fn packets_are_slow_until_the_session_is_up() {
    let mut link = Link::new(FAST, FAST);
    link.loss = [1000; 2];
    link.run(60_000 * MS);
    assert_eq!(link.states(), [State::Down; 2]);
    let all = link.intervals(0, 0);
    assert!(all.len() >= 59 && all.iter().all(|it| (750 * MS..=1000 * MS).contains(it)), "{all:?}");
    assert!(link.sent[0].iter().all(|(_, packet)| packet.desired_min_tx == SLOW && packet.your_discriminator == 0));
    // Then it comes up at once.
    link.loss = [0; 2];
    link.run(2100 * MS);
    assert_eq!(link.states(), UP);
}

#[test]
fn a_silent_end_is_down_after_the_detection_time() {
    let mut link = Link::new(FAST, FAST);
    link.run(5000 * MS);
    assert_eq!(link.states(), UP);
    // Only packets to the first end are lost. It tells the other one.
    link.loss = [1000, 0];
    link.run(600 * MS);
    assert_eq!(link.states(), UP, "two intervals are not enough");
    link.run(320 * MS);
    assert_eq!(link.states(), [State::Down; 2]);
    assert_eq!(link.ends[0].diagnostics(), (Diagnostic::TIME_EXPIRED, Diagnostic::NONE));
    assert_eq!(link.ends[1].diagnostics(), (Diagnostic::NEIGHBOUR_DOWN, Diagnostic::TIME_EXPIRED));
    assert_eq!(link.ends[0].discriminators(), (11, 0), "the discriminator of a silent end is forgotten");
    link.loss = [0; 2];
    link.run(3000 * MS);
    assert_eq!((link.states(), link.ends[0].stats.ups, link.ends[0].stats.downs), (UP, 2, 1));
}

#[test]
fn a_session_survives_loss_and_reordering() {
    let mut link = Link::new(Timers { multiplier: 10, ..FAST }, Timers { multiplier: 10, ..FAST });
    (link.loss, link.delay) = ([200; 2], 700 * MS);
    link.run(30_000 * MS);
    assert_eq!(link.states(), UP);
    let before = link.ends.clone().map(|end| end.stats.downs);
    link.run(600_000 * MS);
    assert_eq!(link.states(), UP);
    assert_eq!(
        link.ends.clone().map(|end| end.stats.downs),
        before,
        "ten packets of 20 % in a row are one in 10 million"
    );
}

#[test]
fn an_end_that_restarts_brings_the_session_up_again() {
    let mut link = Link::new(FAST, FAST);
    link.run(5000 * MS);
    link.ends[1] = session(FAST, 33, link.now);
    link.flights.clear();
    link.run(4000 * MS);
    assert_eq!(link.states(), UP);
    assert_eq!(link.ends[0].discriminators(), (11, 33));
    // RFC 5880 section 6.8.6: the first end went down because the other one said that it is.
    assert_eq!((link.ends[0].stats.downs, link.ends[0].stats.ups), (1, 2));
}

#[test]
fn packets_with_a_wrong_discriminator_change_nothing() {
    let mut link = Link::new(FAST, FAST);
    link.run(5000 * MS);
    let before = link.ends[0].clone();
    let (_, mut forged) = *link.sent[1].last().unwrap();
    (forged.your_discriminator, forged.state) = (12, State::Down);
    assert_eq!(link.ends[0].receive(&forged, link.now), Err(DropReason::BfdNoSession));
    assert_eq!(format!("{before:?}"), format!("{:?}", link.ends[0]));
}

#[test]
fn a_clean_stop_is_told_at_once() {
    let mut link = Link::new(FAST, FAST);
    link.run(5000 * MS);
    let last = link.ends[1].shut_down(link.now);
    assert_eq!((last.state, last.diagnostic, last.your_discriminator), (State::AdminDown, Diagnostic::ADMIN_DOWN, 11));
    assert_eq!(link.ends[0].receive(&last, link.now), Ok(()));
    assert_eq!(link.ends[0].state(), State::Down);
    assert!(link.ends[0].is_remote_admin_down());
    assert_eq!(link.ends[0].diagnostics(), (Diagnostic::NEIGHBOUR_DOWN, Diagnostic::ADMIN_DOWN));
    // An end that is administratively down stays so whatever it receives.
    link.run(5000 * MS);
    assert_eq!(link.states(), [State::Down, State::AdminDown]);
}

#[test]
fn changed_intervals_are_announced_by_a_poll_sequence() {
    let mut link = Link::new(FAST, FAST);
    link.run(5000 * MS);
    assert!(!link.sent[0].last().unwrap().1.poll, "the first poll sequence has ended");
    // Longer intervals: the old transmit interval is in use until the other end knows (RFC 5880 section 6.8.3).
    link.loss = [1000, 0];
    let from = link.now;
    link.ends[0].set_timers(Timers { transmit: 1000 * MS, receive: 500 * MS, multiplier: 3 }, link.now);
    assert_eq!(link.ends[0].transmit_interval(), 300 * MS);
    assert_eq!(link.ends[0].detection_time(), 3 * 500 * MS, "a longer receive interval applies at once");
    link.run(400 * MS);
    let polls =
        link.sent[0].iter().filter(|(at, packet)| *at > from && packet.poll && packet.desired_min_tx == 1000 * MS);
    assert!(polls.count() >= 1);
    assert_eq!(link.ends[0].transmit_interval(), 300 * MS);
    link.loss = [0; 2];
    link.run(1000 * MS);
    assert!(link.sent[1].iter().any(|(at, packet)| *at > from && packet.is_final && !packet.poll));
    assert_eq!(link.ends[0].transmit_interval(), 1000 * MS);
    assert_eq!(link.ends[1].detection_time(), 3 * 1000 * MS);
    assert_eq!(link.ends[1].transmit_interval(), 500 * MS);
    link.run(4000 * MS);
    assert!(link.intervals(0, link.now - 4000 * MS).iter().all(|it| *it >= 750 * MS));
    // Shorter ones: the transmit interval applies at once, the receive interval after the poll sequence.
    link.ends[0].set_timers(Timers { transmit: 100 * MS, receive: 100 * MS, multiplier: 3 }, link.now);
    assert_eq!(link.ends[0].transmit_interval(), 300 * MS, "the other end does not take more");
    assert_eq!(link.ends[0].detection_time(), 3 * 500 * MS);
    link.run(2000 * MS);
    assert_eq!(link.ends[0].detection_time(), 3 * 300 * MS);
    assert_eq!((link.states(), link.ends[0].stats.downs, link.ends[1].stats.downs), (UP, 0, 0));
}

#[test]
fn a_packet_without_the_bit_separates_poll_sequences() {
    let mut link = Link::new(FAST, FAST);
    link.run(5000 * MS);
    let from = link.now;
    link.ends[0].set_timers(Timers { transmit: 400 * MS, ..FAST }, link.now);
    link.run(TICK);
    link.ends[0].set_timers(Timers { transmit: 500 * MS, ..FAST }, link.now);
    link.run(5000 * MS);
    let polls: Vec<bool> = link.sent[0]
        .iter()
        .filter(|(at, packet)| *at > from && !packet.is_final)
        .map(|(_, packet)| packet.poll)
        .collect();
    let mut runs = polls.clone();
    runs.dedup();
    assert!(runs == [true, false, true, false] || runs == [false, true, false, true, false], "{polls:?}");
    assert_eq!(link.ends[0].transmit_interval(), 500 * MS);
}

#[test]
fn demand_mode_ends_periodic_packets() {
    for (demand, required_min_rx) in [(true, 300 * MS), (false, 0)] {
        let mut link = Link::new(FAST, FAST);
        link.run(5000 * MS);
        let packet = ControlPacket { demand, required_min_rx, ..link.sent[1].last().unwrap().1 };
        let count = link.ends[0].stats.sent;
        for _ in 0..20 {
            link.now += 100 * MS;
            link.ends[0].receive(&packet, link.now).unwrap();
            assert_eq!(link.ends[0].next_packet(link.now), None);
        }
        // A poll is answered all the same.
        link.ends[0].receive(&ControlPacket { poll: true, ..packet }, link.now).unwrap();
        assert!(link.ends[0].next_packet(link.now).is_some_and(|reply| reply.is_final));
        assert_eq!((link.ends[0].state(), link.ends[0].stats.sent), (State::Up, count + 1));
        // Changed intervals are announced, twice if they change again before the reply.
        if demand {
            let now = link.now;
            link.ends[0].set_timers(Timers { transmit: 400 * MS, ..FAST }, now);
            let mut polls = Vec::new();
            for step in 1..40 {
                let now = now + step * 500 * MS;
                if step == 2 {
                    link.ends[0].set_timers(Timers { transmit: 500 * MS, ..FAST }, now);
                }
                if let Some(sent) = link.ends[0].next_packet(now) {
                    polls.push((sent.poll, sent.desired_min_tx));
                    link.ends[0].receive(&ControlPacket { is_final: sent.poll && step > 2, ..packet }, now).unwrap();
                }
                link.ends[0].receive(&packet, now).unwrap();
                link.now = now;
            }
            assert_eq!(polls.last(), Some(&(true, 500 * MS)), "{polls:?}");
            assert!(polls.contains(&(false, 500 * MS)) && polls.len() < 8, "{polls:?}");
        }
        // The end wants packets again.
        link.ends[0].receive(&ControlPacket { demand: false, required_min_rx: 300 * MS, ..packet }, link.now).unwrap();
        assert!(link.ends[0].next_packet(link.now).is_some());
    }
}

#[test]
fn random_packets_keep_the_limits_of_what_is_sent() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut end = session(FAST, 7, 0);
        let (mut now, mut polls, mut changes) = (0, 0, 0);
        for _ in 0..2000 {
            now += random.u64(0..50 * MS);
            let mut bytes: [u8; super::super::packet::LEN] = std::array::from_fn(|_| random.u8(..));
            (bytes[0], bytes[3]) = (1 << 5 | bytes[0] & 0x1f, 24);
            bytes[1] &= !0b101;
            if random.bool() {
                bytes[8..12].copy_from_slice(&7u32.to_be_bytes());
            }
            let before = end.state();
            if let Ok(packet) = ControlPacket::parse(&bytes)
                && end.receive(&packet, now).is_ok()
            {
                polls += u64::from(packet.poll);
            }
            let mut count = 0;
            while let Some(packet) = end.next_packet(now) {
                count += 1;
                assert!(!(packet.poll && packet.is_final));
                assert_eq!((packet.my_discriminator, packet.required_min_rx), (7, 300 * MS));
                assert_eq!(packet.desired_min_tx, if packet.state == State::Up { 300 * MS } else { SLOW });
            }
            assert!(count <= 2);
            changes += u64::from(end.state() != before);
        }
        let most = polls + 2 * changes + now / (225 * MS) + 2;
        assert!(end.stats.sent <= most, "seed {seed}: {} packets, expected at most {most}", end.stats.sent);
    }
}
