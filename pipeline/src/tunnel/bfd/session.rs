//! The state machine of one session in asynchronous mode (RFC 5880 section 6.8).
//!
//! It has no clock and sends nothing: each call passes the time, and [`Session::next_packet`] returns what is due.

use wirepath_packet::drops::DropReason;

use super::Micros;
use super::packet::{ControlPacket, Diagnostic, State};

/// Shortest transmit interval of a session that is not up (RFC 5880 section 6.8.3).
pub(super) const SLOW: Micros = 1_000_000;

/// Settings of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timers {
    /// Shortest interval between two sent packets.
    pub(super) transmit: Micros,
    /// Shortest interval between two received packets.
    pub(super) receive: Micros,
    /// Number of intervals without a packet after which the other end takes the session down.
    pub(super) multiplier: u8,
}

/// A poll sequence (RFC 5880 section 6.5), which announces new intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Poll {
    #[default]
    None,
    /// Packets have the bit P until the other end replies with F.
    Active,
    /// The intervals have changed again. Another sequence follows this one.
    ActiveThenAnother,
    /// One packet without P separates two sequences.
    Pause,
}

/// Counters of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SessionStats {
    pub(super) received: u64,
    pub(super) sent: u64,
    /// Changes to the state up, and from it.
    pub(super) ups: u64,
    pub(super) downs: u64,
}

/// One end of a session.
#[derive(Clone, Debug)]
pub(super) struct Session {
    timers: Timers,
    state: State,
    remote_state: State,
    diagnostic: Diagnostic,
    remote_diagnostic: Diagnostic,
    discriminator: u32,
    /// Discriminator of the other end; 0 if it is not known.
    remote_discriminator: u32,
    /// `bfd.RemoteMinRxInterval`.
    remote_receive: Micros,
    remote_transmit: Micros,
    remote_multiplier: u8,
    remote_demand: bool,
    /// The transmit interval in use. A longer one is in use after the poll sequence that announces it.
    transmit: Micros,
    /// The receive interval in use. A shorter one is in use after the poll sequence that announces it.
    receive: Micros,
    poll: Poll,
    owes_final: bool,
    last_sent: Option<Micros>,
    next_transmit: Micros,
    last_received: Option<Micros>,
    /// Time of the last change to or from the state up.
    changed_at: Micros,
    /// Ticks between which packets can leave.
    granularity: Micros,
    random: fastrand::Rng,
    pub(super) stats: SessionStats,
}

impl Session {
    /// Creates a session in the state down. `discriminator` is not zero and belongs to no other session. The caller
    /// calls [`Self::next_packet`] once in `granularity`.
    pub(super) fn new(timers: Timers, discriminator: u32, granularity: Micros, seed: u64, now: Micros) -> Self {
        Self {
            timers,
            state: State::Down,
            remote_state: State::Down,
            diagnostic: Diagnostic::NONE,
            remote_diagnostic: Diagnostic::NONE,
            discriminator,
            remote_discriminator: 0,
            remote_receive: 1,
            remote_transmit: 0,
            remote_multiplier: 0,
            remote_demand: false,
            transmit: timers.transmit.max(SLOW),
            receive: timers.receive,
            poll: Poll::None,
            owes_final: false,
            last_sent: None,
            next_transmit: now,
            last_received: None,
            changed_at: now,
            granularity,
            random: fastrand::Rng::with_seed(seed),
            stats: SessionStats::default(),
        }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn remote_state(&self) -> State {
        self.remote_state
    }

    /// Returns the local diagnostic and that of the other end.
    pub(super) fn diagnostics(&self) -> (Diagnostic, Diagnostic) {
        (self.diagnostic, self.remote_diagnostic)
    }

    /// Returns the local discriminator and that of the other end.
    pub(super) fn discriminators(&self) -> (u32, u32) {
        (self.discriminator, self.remote_discriminator)
    }

    /// Returns true if the session is down because the other end is administratively down.
    pub(super) fn is_remote_admin_down(&self) -> bool {
        self.state == State::Down && self.remote_state == State::AdminDown
    }

    /// Time of the last change to or from the state up.
    pub(super) fn changed_at(&self) -> Micros {
        self.changed_at
    }

    /// Returns the interval between sent packets, without jitter (RFC 5880 section 6.8.2).
    pub(super) fn transmit_interval(&self) -> Micros {
        self.transmit.max(self.remote_receive)
    }

    /// Returns the time without packets after which the session goes down (RFC 5880 section 6.8.4). Zero before the
    /// first packet.
    pub(super) fn detection_time(&self) -> Micros {
        Micros::from(self.remote_multiplier) * self.receive.max(self.remote_transmit)
    }

    /// Changes the settings. The session stays up: a poll sequence announces the intervals (RFC 5880 section 6.8.3).
    pub(super) fn set_timers(&mut self, timers: Timers, now: Micros) {
        let old = std::mem::replace(&mut self.timers, timers);
        if old == timers {
            return;
        }
        if (old.transmit, old.receive) != (timers.transmit, timers.receive) {
            self.begin_poll();
        }
        self.apply_timers(now);
    }

    /// Returns the transmit interval that packets announce.
    fn desired_transmit(&self) -> Micros {
        if self.state == State::Up { self.timers.transmit } else { self.timers.transmit.max(SLOW) }
    }

    fn begin_poll(&mut self) {
        self.poll = match self.poll {
            Poll::None => Poll::Active,
            Poll::Active | Poll::ActiveThenAnother => Poll::ActiveThenAnother,
            Poll::Pause => Poll::Pause,
        };
    }

    /// Takes the announced intervals in use, as far as a poll sequence does not have to end first.
    fn apply_timers(&mut self, now: Micros) {
        let may_relax = self.state != State::Up || self.poll == Poll::None;
        let transmit = self.desired_transmit();
        if may_relax || transmit < self.transmit {
            self.transmit = transmit;
        }
        if may_relax || self.timers.receive > self.receive {
            self.receive = self.timers.receive;
        }
        self.hasten(now);
    }

    /// Brings the next packet forward if a shorter interval applies now.
    fn hasten(&mut self, now: Micros) {
        if let Some(last) = self.last_sent {
            let due = (last + self.jittered()).max(now);
            self.next_transmit = self.next_transmit.min(due);
        }
    }

    /// Returns the transmit interval with jitter: 75 to 100 % of it, to 90 % with a multiplier of 1 (RFC 5880 section
    /// 6.8.7). The time until the next tick does not make it longer.
    fn jittered(&mut self) -> Micros {
        let interval = self.transmit_interval();
        let shortest = interval / 4 * 3;
        let longest = if self.timers.multiplier == 1 { interval / 10 * 9 } else { interval };
        let longest = longest.saturating_sub(self.granularity).max(shortest);
        self.random.u64(shortest..=longest)
    }

    fn set_state(&mut self, state: State, diagnostic: Diagnostic, now: Micros) {
        let old = std::mem::replace(&mut self.state, state);
        self.diagnostic = diagnostic;
        if old == state {
            return;
        }
        match (old, state) {
            (_, State::Up) => {
                self.stats.ups += 1;
                self.changed_at = now;
                // The interval is no longer the slow one.
                self.begin_poll();
            }
            (State::Up, _) => {
                self.stats.downs += 1;
                self.changed_at = now;
                self.poll = Poll::None;
            }
            _ => {}
        }
        self.apply_timers(now);
        // The other end learns a change at once (RFC 5880 section 6.8.7).
        self.next_transmit = now;
    }

    /// Takes a packet of the other end (RFC 5880 section 6.8.6). The caller has selected the session by the
    /// discriminator and has compared the addresses. A packet that waited while the caller was busy counts as in time.
    pub(super) fn receive(&mut self, packet: &ControlPacket, now: Micros) -> Result<(), DropReason> {
        if packet.your_discriminator != 0 && packet.your_discriminator != self.discriminator {
            return Err(DropReason::BfdNoSession);
        }
        let (old_interval, was_quiet) = (self.transmit_interval(), !self.is_periodic());
        self.stats.received += 1;
        self.remote_discriminator = packet.my_discriminator;
        self.remote_state = packet.state;
        self.remote_diagnostic = packet.diagnostic;
        self.remote_demand = packet.demand;
        self.remote_receive = packet.required_min_rx;
        self.remote_transmit = packet.desired_min_tx;
        self.remote_multiplier = packet.multiplier;
        if packet.is_final {
            self.end_poll(now);
        }
        if self.transmit_interval() < old_interval || was_quiet {
            self.hasten(now);
        }
        if self.state == State::AdminDown {
            return Ok(());
        }
        match (self.state, packet.state) {
            (State::Init | State::Up, State::AdminDown) | (State::Up, State::Down) => {
                self.set_state(State::Down, Diagnostic::NEIGHBOUR_DOWN, now);
            }
            (State::Down, State::Down) => self.set_state(State::Init, self.diagnostic, now),
            (State::Down, State::Init) | (State::Init, State::Init | State::Up) => {
                self.set_state(State::Up, Diagnostic::NONE, now);
            }
            _ => {}
        }
        self.owes_final |= packet.poll;
        self.last_received = Some(now);
        Ok(())
    }

    /// Ends the poll sequence that the other end has answered.
    fn end_poll(&mut self, now: Micros) {
        self.poll = match self.poll {
            Poll::Active => Poll::None,
            Poll::ActiveThenAnother => Poll::Pause,
            Poll::None | Poll::Pause => return,
        };
        self.apply_timers(now);
    }

    /// Takes the session down if the detection time has passed.
    pub(super) fn expire(&mut self, now: Micros) {
        let Some(last) = self.last_received else { return };
        if now < last + self.detection_time() {
            return;
        }
        self.last_received = None;
        // RFC 5880 section 6.8.1: the other end may have restarted.
        self.remote_discriminator = 0;
        (self.remote_receive, self.remote_demand) = (1, false);
        if matches!(self.state, State::Init | State::Up) {
            self.set_state(State::Down, Diagnostic::TIME_EXPIRED, now);
        }
        self.remote_state = State::Down;
    }

    /// Returns whether packets are due without a reason other than the interval (RFC 5880 section 6.8.7).
    fn is_periodic(&self) -> bool {
        let is_demanded =
            self.remote_demand && self.state == State::Up && self.remote_state == State::Up && self.poll == Poll::None;
        self.remote_receive != 0 && !is_demanded
    }

    /// Runs the timers, and returns a packet that is due. The caller calls again until there is none: at most one more.
    pub(super) fn next_packet(&mut self, now: Micros) -> Option<ControlPacket> {
        self.expire(now);
        if std::mem::take(&mut self.owes_final) {
            // A reply is no periodic packet, and does not poll itself (RFC 5880 section 6.5).
            self.stats.sent += 1;
            return Some(ControlPacket { is_final: true, poll: false, ..self.packet() });
        }
        if now < self.next_transmit || !self.is_periodic() {
            return None;
        }
        let packet = self.packet();
        self.stats.sent += 1;
        self.last_sent = Some(now);
        self.next_transmit = now + self.jittered();
        if self.poll == Poll::Pause {
            self.poll = Poll::Active;
        }
        Some(packet)
    }

    /// Ends the session, and returns the packet that tells the other end.
    pub(super) fn shut_down(&mut self, now: Micros) -> ControlPacket {
        self.set_state(State::AdminDown, Diagnostic::ADMIN_DOWN, now);
        self.stats.sent += 1;
        self.packet()
    }

    fn packet(&self) -> ControlPacket {
        ControlPacket {
            diagnostic: self.diagnostic,
            state: self.state,
            poll: matches!(self.poll, Poll::Active | Poll::ActiveThenAnother),
            is_final: false,
            demand: false,
            multiplier: self.timers.multiplier,
            my_discriminator: self.discriminator,
            your_discriminator: self.remote_discriminator,
            desired_min_tx: self.desired_transmit(),
            required_min_rx: self.timers.receive,
        }
    }
}

#[cfg(test)]
mod tests;
