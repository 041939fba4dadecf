//! Rules in the device, for ports with queues of ours: what is the same however they get in.
//!
//! The store keeps what was installed, and how: rules come and go with the hardware that they need. What they deliver to goes when the
//! receive queues are made anew, everything goes with the device; when it is there again, the rules are put back, before the first
//! packet of theirs.
//!
//! A rule whose packets go where they would go without it ([`RuleFate::Next`]) becomes several in the device: one for each class of
//! packets that the port spreads in a way of its own ([`spread`]). Each level of the rules is as many of the device's priorities as there
//! are ranks of classes.

pub(crate) mod demand;
pub(crate) mod ibv;
mod spread;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wirepath_verbs::flow::FlowTarget;
use wirepath_verbs::{Cause, Error};

pub(crate) use self::spread::{Class, Reception};
use crate::flow::{Direction, FieldSet, covers};
use crate::port::hardware::{
    HardwareCount, HardwareRule, HardwareRuleId, RefusalKind, RuleCapabilities, RuleFate, RuleHardware, RuleRefusal,
};

/// One of the entries that a rule becomes in the device.
#[derive(Debug)]
pub(crate) struct Place {
    /// What its packets are, closed.
    pub(crate) fields: FieldSet,
    /// Priority of the device.
    pub(crate) priority: u16,
    /// Where they go, of rules that deliver to queues.
    pub(crate) target: Option<FlowTarget>,
}

/// A way for rules to get into an open device.
pub(crate) trait Backend: Send {
    /// A rule in the device; dropping it takes it out.
    type Live: Send;

    /// Whether the device can tell the packets of this list from others, for a place of this rule; an error says what it would have to do.
    fn tells(&self, rule: &HardwareRule, fields: &FieldSet) -> Result<(), String>;

    /// Puts a rule in, all of its places or none.
    fn install(&mut self, rule: &HardwareRule, places: &[Place]) -> Result<Self::Live, RuleRefusal>;

    /// What a rule has counted.
    fn count(&mut self, live: &Self::Live) -> Option<HardwareCount>;

    /// Forgets what no rule needs any more.
    fn tidy(&mut self) {}
}

struct Entry<L> {
    rule: HardwareRule,
    /// `None` while the hardware that it needs is away.
    live: Option<L>,
    /// What was counted before it was put back the last time, and in all when it was last looked at.
    before: HardwareCount,
    last: HardwareCount,
}

struct State<B: Backend> {
    can: RuleCapabilities,
    // In this order: rules go before what they were made from.
    rules: BTreeMap<u64, Entry<B::Live>>,
    backend: Option<B>,
    reception: Option<Reception>,
    next: u64,
    epoch: u64,
    /// Receptions that there have been.
    receptions: u64,
}

/// The rules of a port.
pub(crate) struct Rules<B: Backend>(Arc<Mutex<State<B>>>);

fn lock<B: Backend>(state: &Mutex<State<B>>) -> MutexGuard<'_, State<B>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As long as this is there, rules of a direction can be in the device.
pub(crate) struct Held<B: Backend> {
    state: Arc<Mutex<State<B>>>,
    /// Which reception it stands for; `None`: the open device.
    reception: Option<u64>,
}

impl<B: Backend> Drop for Held<B> {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let all = self.reception.is_none();
        if !all && self.reception != Some(state.receptions) {
            return;
        }
        state.take_out(Direction::Ingress);
        if all {
            state.take_out(Direction::Egress);
        }
        state.reception = None;
        if all {
            state.backend = None;
        }
    }
}

impl<B: Backend> Rules<B> {
    /// Of a port whose device can do this.
    pub(crate) fn new(can: RuleCapabilities) -> Self {
        let state =
            State { can, rules: BTreeMap::new(), backend: None, reception: None, next: 1, epoch: 0, receptions: 0 };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Forgets all rules.
    pub(crate) fn clear(&self) {
        lock(&self.0).rules.clear();
    }

    /// The device is open: rules can be put in, those of egress come back at once. To be dropped before the device is closed.
    pub(crate) fn open(&self, backend: B) -> Held<B> {
        let mut state = lock(&self.0);
        state.backend = Some(backend);
        state.put_back(Direction::Egress);
        Held { state: Arc::clone(&self.0), reception: None }
    }

    /// There is something to deliver to: rules of ingress come back. To be dropped before the queues.
    pub(crate) fn receive(&self, reception: Reception) -> Held<B> {
        let mut state = lock(&self.0);
        state.reception = Some(reception);
        state.receptions += 1;
        state.put_back(Direction::Ingress);
        Held { state: Arc::clone(&self.0), reception: Some(state.receptions) }
    }
}

impl<B: Backend> State<B> {
    /// Has no rule of a direction in the device any more. What they have counted stays.
    fn take_out(&mut self, direction: Direction) {
        let live = self.rules.iter().filter(|(_, entry)| entry.live.is_some() && entry.rule.direction == direction);
        let live: Vec<u64> = live.map(|(id, _)| *id).collect();
        for id in live {
            // The last time that it can be asked, unless the device is gone already.
            self.look(HardwareRuleId(id));
            if let Some(entry) = self.rules.get_mut(&id) {
                entry.before = entry.last;
                entry.live = None;
            }
        }
    }

    /// Puts the rules of a direction back, those that are asked first before the others. If one is refused, its owner has to begin anew.
    /// At reception none is there then, because those below would have the packets of those that are not; at transmission each has
    /// packets of its own.
    fn put_back(&mut self, direction: Direction) {
        // Of queues that nobody receives from any more.
        self.take_out(direction);
        let mut refused = false;
        let mut wanted: Vec<(u16, u64)> = self
            .rules
            .iter()
            .filter(|(_, e)| e.rule.direction == direction)
            .map(|(id, e)| (e.rule.level, *id))
            .collect();
        wanted.sort_unstable();
        for (_, id) in wanted {
            let Some(rule) = self.rules.get(&id).map(|entry| entry.rule.clone()) else { continue };
            match self.make(&rule) {
                Ok(live) => {
                    if let Some(entry) = self.rules.get_mut(&id) {
                        entry.live = Some(live);
                    }
                }
                Err(refusal) => {
                    tracing::warn!("rules do not come back into the device: {refusal}");
                    refused = true;
                    if direction == Direction::Ingress {
                        self.take_out(direction);
                        break;
                    }
                }
            }
        }
        self.epoch += u64::from(refused);
    }

    fn make(&mut self, rule: &HardwareRule) -> Result<B::Live, RuleRefusal> {
        let places = self.places(rule)?;
        let backend = self.backend.as_mut().ok_or_else(gone)?;
        backend.install(rule, &places)
    }

    /// What a rule becomes in the device.
    fn places(&mut self, rule: &HardwareRule) -> Result<Vec<Place>, RuleRefusal> {
        let table = self.capabilities().table(rule.direction).map_or(0, |table| table.levels);
        if rule.level >= table {
            return Err(unsupported(format!("level {} of {table}", rule.level)));
        }
        let plain = |target| vec![(Class::ANY, target)];
        let (ranks, targets) = match (rule.direction, &rule.fate) {
            (Direction::Egress, RuleFate::Next | RuleFate::Drop) => (1, plain(None)),
            (Direction::Ingress, fate) => {
                let reception = self.reception.as_mut().ok_or_else(gone)?;
                let targets = match fate {
                    RuleFate::Next => {
                        reception.classes().iter().map(|(class, to)| (*class, Some(to.clone()))).collect()
                    }
                    RuleFate::Queue(queue) => plain(Some(reception.queue(*queue)?)),
                    RuleFate::Drop | RuleFate::Kernel => plain(reception.anywhere()),
                    RuleFate::Rss(_) => return Err(unsupported("a spreading of its own")),
                };
                (reception.ranks(), targets)
            }
            (_, fate) => return Err(unsupported(format!("{:?} at egress", fate.kind()))),
        };
        let backend = self.backend.as_ref().ok_or_else(gone)?;
        let mut places: Vec<Place> = Vec::new();
        for (class, target) in targets {
            for fields in class.of(rule).map_err(unsupported)? {
                // A class that the device cannot tell goes where everything else goes.
                if class != Class::ANY && backend.tells(rule, &fields).is_err() {
                    continue;
                }
                // Nothing comes so far that an earlier entry of the same rule takes.
                if !places.iter().any(|place| covers(&place.fields, &fields)) {
                    let priority = rule.level * ranks + class.rank.min(ranks - 1);
                    places.push(Place { fields, priority, target: target.clone() });
                }
            }
        }
        // There are such packets, or the rule would mean nothing.
        if places.is_empty() { Err(unsupported("telling these packets from others")) } else { Ok(places) }
    }

    fn capabilities(&self) -> RuleCapabilities {
        let mut can = self.can.clone();
        if let (Some(table), Some(reception)) = (&mut can.ingress, &self.reception) {
            table.levels = reception.levels();
            if table.levels == 0 {
                can.ingress = None;
                can.notes.push(
                    "no rules for what is received: the port is not promiscuous, or the device has too few priorities"
                        .to_owned(),
                );
            }
        }
        can
    }

    fn look(&mut self, id: HardwareRuleId) -> Option<HardwareCount> {
        let entry = self.rules.get_mut(&id.0).filter(|entry| entry.rule.count)?;
        if let (Some(backend), Some(live)) = (&mut self.backend, &entry.live)
            && let Some(now) = backend.count(live)
        {
            let HardwareCount { packets, bytes } = entry.before;
            entry.last = HardwareCount { packets: packets + now.packets, bytes: bytes + now.bytes };
        }
        Some(entry.last)
    }
}

impl<B: Backend> RuleHardware for Rules<B> {
    fn capabilities(&self) -> RuleCapabilities {
        lock(&self.0).capabilities()
    }

    fn install(&mut self, rule: &HardwareRule) -> Result<HardwareRuleId, RuleRefusal> {
        let mut state = lock(&self.0);
        let live = state.make(rule)?;
        let id = state.next;
        state.next += 1;
        let (before, last) = (HardwareCount::default(), HardwareCount::default());
        state.rules.insert(id, Entry { rule: rule.clone(), live: Some(live), before, last });
        Ok(HardwareRuleId(id))
    }

    fn remove(&mut self, id: HardwareRuleId) -> Result<HardwareCount, RuleRefusal> {
        let mut state = lock(&self.0);
        // Once more after it is gone, there is nothing to ask.
        let last = state.look(id).unwrap_or_default();
        state.rules.remove(&id.0);
        if let Some(backend) = &mut state.backend {
            backend.tidy();
        }
        Ok(last)
    }

    fn count(&mut self, id: HardwareRuleId) -> Option<HardwareCount> {
        lock(&self.0).look(id)
    }

    fn epoch(&self) -> u64 {
        lock(&self.0).epoch
    }
}

/// The hardware is away.
fn gone() -> RuleRefusal {
    RuleRefusal { kind: RefusalKind::Gone, errno: None, reason: "the device is being mended, or is gone".to_owned() }
}

/// What the device never does.
pub(crate) fn unsupported(what: impl Into<String>) -> RuleRefusal {
    RuleRefusal { kind: RefusalKind::Unsupported, errno: None, reason: format!("the device cannot do {}", what.into()) }
}

/// What became of a call, and what that likely means for a rule (Linux: drivers/infiniband/hw/mlx5/fs.c,
/// drivers/infiniband/core/uverbs_cmd.c).
pub(crate) fn refused(error: &Error) -> RuleRefusal {
    let errno = error.errno();
    let gone = matches!(error, Error::Call(call) if call.cause == Cause::DeviceGone);
    let (kind, meaning) = match errno {
        _ if gone => (RefusalKind::Gone, "the device is gone"),
        Some(libc::EPERM) => (RefusalKind::Refused, "rules of raw packets need CAP_NET_RAW"),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT) => {
            (RefusalKind::Unsupported, "the kernel or the firmware has no such match or action")
        }
        Some(libc::EINVAL | libc::EREMOTEIO) => (
            RefusalKind::Unsupported,
            "the kernel or the firmware does not take this combination of matches and actions",
        ),
        Some(libc::ENOSPC) => (RefusalKind::Full, "the table or the counters are full"),
        Some(libc::ENOMEM) => (RefusalKind::Full, "no memory, or a priority that this kernel does not have"),
        Some(libc::EEXIST) => (RefusalKind::Refused, "somebody has installed the same match with other actions"),
        Some(libc::EBUSY | libc::EAGAIN | libc::EINTR | libc::ETIMEDOUT) => (RefusalKind::Refused, "busy for now"),
        _ => (RefusalKind::Refused, "nothing more is known"),
    };
    RuleRefusal { kind, errno, reason: format!("{error} ({meaning})") }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::flow::{Field, Item, ItemKind};
    use crate::port::hardware::{RuleBackend, TableCapabilities};

    /// What the device counts for each of its rules, and the level of those that it refuses.
    struct Model(Arc<AtomicU64>, Option<u16>);

    impl Backend for Model {
        type Live = u64;

        fn tells(&self, _: &HardwareRule, _: &FieldSet) -> Result<(), String> {
            Ok(())
        }

        fn install(&mut self, rule: &HardwareRule, _: &[Place]) -> Result<u64, RuleRefusal> {
            if Some(rule.level) == self.1 { Err(unsupported("this")) } else { Ok(self.0.load(Ordering::Relaxed)) }
        }

        fn count(&mut self, since: &u64) -> Option<HardwareCount> {
            Some(HardwareCount { packets: self.0.load(Ordering::Relaxed) - since, bytes: 0 })
        }
    }

    fn counted(level: u16) -> HardwareRule {
        HardwareRule {
            direction: Direction::Egress,
            level,
            pattern: vec![Item::new(ItemKind::Meta).exact(Field::MetaData, level.into())],
            actions: Vec::new(),
            fate: RuleFate::Next,
            tag: None,
            count: true,
            in_order: false,
        }
    }

    #[test]
    fn what_was_counted_is_kept_while_the_device_is_away_and_when_it_takes_rules_no_more() {
        let egress = Some(TableCapabilities { levels: 2, ..TableCapabilities::default() });
        let mut rules =
            Rules::new(RuleCapabilities { egress, ..RuleCapabilities::none("model", "nic", RuleBackend::Dv) });
        let packets = Arc::new(AtomicU64::new(0));
        let more = |n| packets.fetch_add(n, Ordering::Relaxed);
        let held = rules.open(Model(Arc::clone(&packets), None));
        let ids = [0, 1].map(|level| rules.install(&counted(level)).unwrap());
        // Nobody has looked when it goes.
        more(5);
        drop(held);
        more(100);
        let tell = |rules: &mut Rules<Model>| ids.map(|id| rules.count(id).unwrap().packets);
        assert_eq!(tell(&mut rules), [5, 5]);
        let held = rules.open(Model(Arc::clone(&packets), None));
        more(2);
        assert_eq!((tell(&mut rules), rules.epoch()), ([7, 7], 0));
        drop(held);
        // One is refused: the other has its own packets, and is there until its owner has heard.
        let _held = rules.open(Model(Arc::clone(&packets), Some(0)));
        more(1);
        assert_eq!((tell(&mut rules), rules.epoch()), ([7, 8], 1));
        assert_eq!(ids.map(|id| rules.remove(id).unwrap().packets), [7, 8]);
    }
}
