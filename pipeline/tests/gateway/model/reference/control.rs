//! The control thread of the reference: learned addresses and remotes, time, and changes of the configuration.

use std::collections::HashMap;

use super::super::config::{
    Config, FREEZE_TIME, MOVE_WINDOW, Member, NETWORKS, Place, SLOTS, Target, far_router, host,
};
use super::super::wire::US;
use super::{Entry, Key, LearnedRemote, Model, Moves, Stats, TUNNEL_PEER};

/// Seconds after which a learned remote without addresses is removed, and one that never got a frame.
const IDLE_TIME: u32 = 60;
const PROVISIONAL_TIME: u32 = 300;

impl Model {
    /// Processes what the workers have reported, and the passed time.
    pub(crate) fn control(&mut self) {
        let returned = std::mem::take(&mut self.returned);
        for (slot, remote, _) in &returned {
            let second = self.second;
            let new = LearnedRemote { since: second, idle_since: second, contacted: false };
            self.learned.entry((*slot, *remote)).or_insert(new);
        }
        let mut refused = self.take_unresolved();
        self.learn_reported();
        refused.extend(self.solicit());
        self.learn_bindings();
        self.tick();
        for (slot, remote, payload) in returned {
            self.inner(slot, remote, &payload);
        }
        self.refuse_unanswered(refused);
        self.host_routes.extend(std::mem::take(&mut self.new_host_routes));
        let resolved = &self.resolved;
        let sent: Vec<_> = self.waiting.extract_if(.., |(address, ..)| resolved.contains(address)).collect();
        sent.into_iter().for_each(|(_, slot, frame)| self.route(slot, &frame));
        self.learn_reported();
    }

    fn learn_reported(&mut self) {
        for (key, place) in std::mem::take(&mut self.reports) {
            self.learn(key, place);
        }
    }

    fn learned_in(&self, slot: usize, select: impl Fn(&Entry) -> bool) -> usize {
        self.fdb.iter().filter(|((of, _), entry)| *of == slot && entry.seen.is_some() && select(entry)).count()
    }

    fn learn(&mut self, key: Key, place: Place) {
        let (slot, second) = (key.0, self.second);
        let segment = self.segment(slot);
        let limit = match place {
            Place::Port(at) => self.port(slot, at).limit,
            _ => segment.remote_limit,
        };
        let is_full = limit.is_some_and(|limit| self.learned_in(slot, |entry| entry.place == place) >= limit);
        let segment_is_full = segment.limit.is_some_and(|limit| self.learned_in(slot, |_| true) >= limit);
        let limit_of_moves = segment.moves;
        match self.fdb.get(&key).copied() {
            Some(Entry { seen: None, .. }) => {}
            Some(entry) if entry.place == place => {
                self.fdb.insert(key, Entry { place, seen: Some(second) });
            }
            Some(entry) => {
                if self.is_sticky(slot, entry.place) || self.is_frozen(key) || is_full {
                    return;
                }
                self.fdb.insert(key, Entry { place, seen: Some(second) });
                self.stats[slot].moved += 1;
                self.left(slot, entry.place);
                if limit_of_moves > 0 {
                    self.count_move(key, limit_of_moves);
                }
            }
            None if is_full || segment_is_full => {}
            None => {
                self.fdb.insert(key, Entry { place, seen: Some(second) });
                self.stats[slot].learned += 1;
            }
        }
    }

    /// Notes that an address left a remote, which may be a learned one.
    fn left(&mut self, slot: usize, place: Place) {
        let second = self.second;
        if let Place::Remote(remote) = place
            && let Some(learned) = self.learned.get_mut(&(slot, remote))
        {
            learned.idle_since = second;
        }
    }

    fn count_move(&mut self, key: Key, limit: u32) {
        let new = Moves { count: 0, until: self.second + MOVE_WINDOW, frozen: false };
        let moves = self.moves.entry(key).or_insert(new);
        if moves.frozen || self.second >= moves.until {
            *moves = new;
        }
        moves.count += 1;
        if moves.count >= limit {
            (moves.frozen, moves.until) = (true, self.second + FREEZE_TIME);
        }
    }

    fn tick(&mut self) {
        let second = self.second;
        if std::mem::replace(&mut self.aged_at, second) == second {
            return;
        }
        let is_old = |key: &Key, entry: &Entry| {
            let ageing = self.segment(key.0).ageing;
            ageing > 0 && entry.seen.is_some_and(|seen| second >= seen + ageing)
        };
        let old: Vec<(Key, Entry)> =
            self.fdb.iter().filter(|(key, entry)| is_old(key, entry)).map(|(key, it)| (*key, *it)).collect();
        for (key, entry) in old {
            self.fdb.remove(&key);
            self.stats[key.0].aged += 1;
            self.left(key.0, entry.place);
        }
        self.age_bindings();
        self.moves.retain(|_, moves| second < moves.until);
        let is_unused = |(slot, remote): (usize, u8), it: &LearnedRemote| {
            let is_idle = self.learned_in(slot, |entry| entry.place == Place::Remote(remote)) == 0;
            is_idle && second - it.idle_since >= IDLE_TIME || !it.contacted && second - it.since >= PROVISIONAL_TIME
        };
        let unused: Vec<(usize, u8)> =
            self.learned.iter().filter(|(at, it)| is_unused(**at, it)).map(|(at, _)| *at).collect();
        unused.into_iter().for_each(|(slot, remote)| self.remove_learned(slot, remote));
    }

    fn remove_learned(&mut self, slot: usize, remote: u8) {
        self.learned.remove(&(slot, remote));
        self.forget(|of, place| of == slot && place == Place::Remote(remote));
    }

    /// Removes learned entries.
    fn forget(&mut self, select: impl Fn(usize, Place) -> bool) {
        self.fdb.retain(|(slot, _), entry| entry.seen.is_none() || !select(*slot, entry.place));
    }

    /// Removes what was learned at a port whose link is lost.
    pub(crate) fn link_down(&mut self, port: u16) {
        self.forget(|_, place| matches!(place, Place::Port((at, _)) if at == port));
    }

    fn statics(&self) -> HashMap<Key, Place> {
        let mut statics = HashMap::new();
        for (slot, segment) in self.config.segments.iter().enumerate() {
            let Some(segment) = segment else { continue };
            statics.extend(segment.statics.iter().map(|(number, place)| ((slot, host(*number)), *place)));
            if SLOTS[slot].network.is_some() {
                statics.insert((slot, US), Place::Router);
            }
            if SLOTS[slot].kind.carries_ip() {
                statics.insert((slot, TUNNEL_PEER), Place::Remote(segment.remotes[0]));
            }
        }
        for target in (0..NETWORKS.len()).filter_map(|number| self.config.route(0, number)) {
            let members = match target {
                Target::Router(remote) => vec![Member::Router(remote)],
                Target::Group(mask) => self.config.members(0, mask),
                _ => Vec::new(),
            };
            for member in members {
                if let Member::Router(remote) = member {
                    statics.insert((0, far_router(remote)), Place::Remote(remote));
                }
            }
        }
        statics
    }

    /// Takes another configuration.
    pub(crate) fn reload(&mut self, config: Config) {
        let (old_statics, old) = (self.statics(), std::mem::replace(&mut self.config, config));
        for slot in 0..SLOTS.len() {
            let Some(segment) = self.config.segments[slot].clone() else {
                self.fdb.retain(|(of, _), _| *of != slot);
                self.moves.retain(|(of, _), _| *of != slot);
                self.learned.retain(|(of, _), _| *of != slot);
                continue;
            };
            let Some(before) = &old.segments[slot] else {
                self.stats[slot] = Stats::default();
                continue;
            };
            let is_gone = |place: Place| before.has(place) && !segment.has(place);
            self.forget(|of, place| of == slot && is_gone(place));
            let learned: Vec<u8> = self.learned.keys().filter(|(of, _)| *of == slot).map(|(_, it)| *it).collect();
            for remote in learned {
                if segment.remotes.contains(&remote) {
                    self.learned.remove(&(slot, remote));
                } else if !segment.accept_unknown {
                    self.remove_learned(slot, remote);
                }
            }
        }
        let vrf = |config: &Config, slot: usize| config.segments[slot].as_ref().map(|it| it.vrf);
        let config = &self.config;
        let stays = |slot: usize| vrf(config, slot).is_some() && vrf(config, slot) == vrf(&old, slot);
        self.silent.retain(|(slot, _), _| stays(*slot));
        self.host_routes.retain(|(slot, _)| stays(*slot));
        let storm = |config: &Config, slot: usize| config.segments[slot].as_ref().map(|it| it.storm);
        self.buckets
            .retain(|(slot, _), _| storm(config, *slot).is_some() && storm(config, *slot) == storm(&old, *slot));
        self.replace_groups(&old);
        self.replace_static_bindings();
        let statics = self.statics();
        for key in old_statics.keys().filter(|key| !statics.contains_key(key)) {
            self.fdb.remove(key);
        }
        for (key, place) in statics {
            if old_statics.get(&key) == Some(&place) {
                continue;
            }
            if let Some(Entry { seen: Some(_), place }) = self.fdb.insert(key, Entry { place, seen: None }) {
                self.left(key.0, place);
            }
        }
    }
}
