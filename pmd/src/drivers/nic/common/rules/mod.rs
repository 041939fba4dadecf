//! Flow rules in the device: the part that all backends share.
//!
//! The store keeps installed rules across the life of hardware objects. Targets of rules disappear when
//! receive queues are recreated, and everything disappears with the device. The store reinstalls the rules
//! afterwards, before the first packet can match them.
//!
//! A rule that does not change the destination of its packets ([`RuleDestination::Next`]) becomes several
//! entries in the device: one for each class of packets with its own RSS queue pair ([`rss_class`]). Each
//! level of rules uses as many device priorities as there are ranks of classes.

pub(crate) mod ibv;
pub(crate) mod match_fields;
mod rss_class;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wirepath_verbs::flow::FlowTarget;
use wirepath_verbs::{Cause, Error};

pub(crate) use self::rss_class::{CreateRssQp, DefaultRss, RssClass};
use crate::port::hardware::{
    HardwareCount, HardwareRule, HardwareRuleId, RefusalKind, RuleCapabilities, RuleDestination, RuleHardware,
    RuleRefusal,
};
use wirepath_flow::{Direction, FieldSet, covers};

/// A device entry of a rule.
#[derive(Debug)]
pub(crate) struct SteeringEntry {
    /// Complete field set of its packets.
    pub(crate) fields: FieldSet,
    /// Device priority.
    pub(crate) priority: u16,
    /// Target of rules that deliver to queues.
    pub(crate) target: Option<FlowTarget>,
}

/// An interface for installing rules in an open device.
pub(crate) trait Backend: Send {
    /// An installed rule. Dropping it removes the rule.
    type InstalledRule: Send;

    /// Checks that the device can match exactly this field set, for an entry of this rule. An error names the
    /// unsupported comparison.
    fn can_match(&self, rule: &HardwareRule, fields: &FieldSet) -> Result<(), String>;

    /// Installs a rule: all of its entries, or none.
    fn install(&mut self, rule: &HardwareRule, entries: &[SteeringEntry]) -> Result<Self::InstalledRule, RuleRefusal>;

    /// Returns the counters of a rule.
    fn count(&mut self, installed: &Self::InstalledRule) -> Option<HardwareCount>;

    /// Destroys shared objects that no rule uses any more.
    fn gc(&mut self) {}
}

struct RuleRecord<L> {
    rule: HardwareRule,
    /// `None` while the hardware that it needs does not exist.
    installed: Option<L>,
    /// Count before the last reinstallation, and total count when last read.
    base: HardwareCount,
    last: HardwareCount,
}

struct State<B: Backend> {
    caps: RuleCapabilities,
    // Declared in drop order: rules before the objects that they use.
    rules: BTreeMap<u64, RuleRecord<B::InstalledRule>>,
    backend: Option<B>,
    default_rss: Option<DefaultRss>,
    next: u64,
    epoch: u64,
    /// Number of [`DefaultRss`] values so far.
    rss_generation: u64,
}

/// Flow rules of a port.
pub(crate) struct Rules<B: Backend>(Arc<Mutex<State<B>>>);

fn lock<B: Backend>(state: &Mutex<State<B>>) -> MutexGuard<'_, State<B>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the rules of a direction installed.
pub(crate) struct RulesGuard<B: Backend> {
    state: Arc<Mutex<State<B>>>,
    /// The generation of [`DefaultRss`] that it stands for. `None`: the open device.
    default_rss: Option<u64>,
}

impl<B: Backend> Drop for RulesGuard<B> {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let all = self.default_rss.is_none();
        if !all && self.default_rss != Some(state.rss_generation) {
            return;
        }
        state.uninstall(Direction::Ingress);
        if all {
            state.uninstall(Direction::Egress);
        }
        state.default_rss = None;
        if all {
            state.backend = None;
        }
    }
}

impl<B: Backend> Rules<B> {
    /// Creates an empty store for a port with these capabilities.
    pub(crate) fn new(caps: RuleCapabilities) -> Self {
        let state = State {
            caps,
            rules: BTreeMap::new(),
            backend: None,
            default_rss: None,
            next: 1,
            epoch: 0,
            rss_generation: 0,
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Removes all rules.
    pub(crate) fn clear(&self) {
        lock(&self.0).rules.clear();
    }

    /// Starts with an open device: rules can be installed, and egress rules are reinstalled. Drop the guard
    /// before closing the device.
    pub(crate) fn open(&self, backend: B) -> RulesGuard<B> {
        let mut state = lock(&self.0);
        state.backend = Some(backend);
        state.reinstall(Direction::Egress);
        RulesGuard { state: Arc::clone(&self.0), default_rss: None }
    }

    /// Starts with new receive queues: ingress rules are reinstalled. Drop the guard before the queues.
    pub(crate) fn receive(&self, default_rss: DefaultRss) -> RulesGuard<B> {
        let mut state = lock(&self.0);
        state.default_rss = Some(default_rss);
        state.rss_generation += 1;
        state.reinstall(Direction::Ingress);
        RulesGuard { state: Arc::clone(&self.0), default_rss: Some(state.rss_generation) }
    }
}

impl<B: Backend> State<B> {
    /// Uninstalls all rules of a direction and keeps their counts.
    fn uninstall(&mut self, direction: Direction) {
        let installed =
            self.rules.iter().filter(|(_, entry)| entry.installed.is_some() && entry.rule.direction == direction);
        let installed: Vec<u64> = installed.map(|(id, _)| *id).collect();
        for id in installed {
            // The last chance to read the counter, unless the device is gone already.
            self.read_counter(HardwareRuleId(id));
            if let Some(entry) = self.rules.get_mut(&id) {
                entry.base = entry.last;
                entry.installed = None;
            }
        }
    }

    /// Reinstalls the rules of a direction, highest level first. If one is refused, the epoch changes and the
    /// owner must start over. At ingress none stays installed in that case: lower rules would match packets
    /// of the refused ones. At egress each rule matches its own packets only.
    fn reinstall(&mut self, direction: Direction) {
        // Rules of queues that no longer exist.
        self.uninstall(direction);
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
                Ok(installed) => {
                    if let Some(entry) = self.rules.get_mut(&id) {
                        entry.installed = Some(installed);
                    }
                }
                Err(refusal) => {
                    tracing::warn!("rules could not be reinstalled in the device: {refusal}");
                    refused = true;
                    if direction == Direction::Ingress {
                        self.uninstall(direction);
                        break;
                    }
                }
            }
        }
        self.epoch += u64::from(refused);
    }

    fn make(&mut self, rule: &HardwareRule) -> Result<B::InstalledRule, RuleRefusal> {
        let entries = self.steering_entries(rule)?;
        let backend = self.backend.as_mut().ok_or_else(device_away)?;
        backend.install(rule, &entries)
    }

    /// Returns the device entries of a rule.
    fn steering_entries(&mut self, rule: &HardwareRule) -> Result<Vec<SteeringEntry>, RuleRefusal> {
        let table = self.capabilities().table(rule.direction).map_or(0, |table| table.levels);
        if rule.level >= table {
            return Err(unsupported(format!("level {} of {table}", rule.level)));
        }
        let plain = |target| vec![(RssClass::ANY, target)];
        let (ranks, targets) = match (rule.direction, &rule.destination) {
            (Direction::Egress, RuleDestination::Next | RuleDestination::Drop) => (1, plain(None)),
            (Direction::Ingress, destination) => {
                let default_rss = self.default_rss.as_mut().ok_or_else(device_away)?;
                let targets = match destination {
                    RuleDestination::Next => {
                        default_rss.classes().iter().map(|(class, to)| (*class, Some(to.clone()))).collect()
                    }
                    RuleDestination::Queue(queue) => plain(Some(default_rss.queue(*queue)?)),
                    RuleDestination::Drop | RuleDestination::Kernel => plain(default_rss.any_target()),
                    RuleDestination::Rss(_) => return Err(unsupported("RSS with other queues than the port's")),
                };
                (default_rss.ranks(), targets)
            }
            (_, destination) => return Err(unsupported(format!("{:?} at egress", destination.kind()))),
        };
        let backend = self.backend.as_ref().ok_or_else(device_away)?;
        let mut entries: Vec<SteeringEntry> = Vec::new();
        for (class, target) in targets {
            for fields in class.of(rule).map_err(unsupported)? {
                // Packets of a class that the device cannot match are covered by the last class.
                if class != RssClass::ANY && backend.can_match(rule, &fields).is_err() {
                    continue;
                }
                // An earlier entry of the same rule takes these packets already.
                if !entries.iter().any(|steering_entry| covers(&steering_entry.fields, &fields)) {
                    let priority = rule.level * ranks + class.rank.min(ranks - 1);
                    entries.push(SteeringEntry { fields, priority, target: target.clone() });
                }
            }
        }
        // The pattern matches some packets, or the rule language would have rejected it.
        if entries.is_empty() { Err(unsupported("matching exactly these packets")) } else { Ok(entries) }
    }

    fn capabilities(&self) -> RuleCapabilities {
        let mut caps = self.caps.clone();
        if let (Some(table), Some(default_rss)) = (&mut caps.ingress, &self.default_rss) {
            table.levels = default_rss.levels();
            if table.levels == 0 {
                caps.ingress = None;
                caps.notes.push(
                    "no ingress rules: the port is not promiscuous, shares its interface with the kernel, or has too \
                     few priorities"
                        .to_owned(),
                );
            }
        }
        caps
    }

    fn read_counter(&mut self, id: HardwareRuleId) -> Option<HardwareCount> {
        let entry = self.rules.get_mut(&id.0).filter(|entry| entry.rule.count)?;
        if let (Some(backend), Some(installed)) = (&mut self.backend, &entry.installed)
            && let Some(now) = backend.count(installed)
        {
            let HardwareCount { packets, bytes } = entry.base;
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
        let installed = state.make(rule)?;
        let id = state.next;
        state.next += 1;
        let (base, last) = (HardwareCount::default(), HardwareCount::default());
        state.rules.insert(id, RuleRecord { rule: rule.clone(), installed: Some(installed), base, last });
        Ok(HardwareRuleId(id))
    }

    fn remove(&mut self, id: HardwareRuleId) -> Result<HardwareCount, RuleRefusal> {
        let mut state = lock(&self.0);
        // The counter is gone once the rule is removed.
        let last = state.read_counter(id).unwrap_or_default();
        state.rules.remove(&id.0);
        if let Some(backend) = &mut state.backend {
            backend.gc();
        }
        Ok(last)
    }

    fn count(&mut self, id: HardwareRuleId) -> Option<HardwareCount> {
        lock(&self.0).read_counter(id)
    }

    fn epoch(&self) -> u64 {
        lock(&self.0).epoch
    }
}

/// Returns the error for missing hardware.
fn device_away() -> RuleRefusal {
    RuleRefusal { kind: RefusalKind::DeviceLost, errno: None, reason: "the device is recovering or gone".to_owned() }
}

/// Returns the error for something that the device never supports.
pub(crate) fn unsupported(what: impl Into<String>) -> RuleRefusal {
    RuleRefusal {
        kind: RefusalKind::Unsupported,
        errno: None,
        reason: format!("the device does not support {}", what.into()),
    }
}

/// Converts an error of a verbs call, with its likely meaning for a rule (Linux:
/// drivers/infiniband/hw/mlx5/fs.c, drivers/infiniband/core/uverbs_cmd.c).
pub(crate) fn refused(error: &Error) -> RuleRefusal {
    let errno = error.errno();
    let gone = matches!(error, Error::Call(call) if call.cause == Cause::DeviceLost);
    let (kind, meaning) = match errno {
        _ if gone => (RefusalKind::DeviceLost, "the device is gone"),
        Some(libc::EPERM) => (RefusalKind::Refused, "rules of raw packets need CAP_NET_RAW"),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT) => {
            (RefusalKind::Unsupported, "kernel or firmware does not support this match or action")
        }
        Some(libc::EINVAL | libc::EREMOTEIO) => {
            (RefusalKind::Unsupported, "kernel or firmware does not support this combination of matches and actions")
        }
        Some(libc::ENOSPC) => (RefusalKind::Full, "the table or the counters are full"),
        Some(libc::ENOMEM) => (RefusalKind::Full, "out of memory, or the kernel does not support this priority"),
        Some(libc::EEXIST) => (RefusalKind::Refused, "the same match is installed with other actions"),
        Some(libc::EBUSY | libc::EAGAIN | libc::EINTR | libc::ETIMEDOUT) => (RefusalKind::Refused, "temporarily busy"),
        _ => (RefusalKind::Refused, "unknown cause"),
    };
    RuleRefusal { kind, errno, reason: format!("{error} ({meaning})") }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::port::hardware::{RuleBackend, TableCapabilities};
    use wirepath_flow::{Field, Item, ItemKind};

    /// A device with one counter for all rules, which refuses rules of the given level.
    struct Model(Arc<AtomicU64>, Option<u16>);

    impl Backend for Model {
        type InstalledRule = u64;

        fn can_match(&self, _: &HardwareRule, _: &FieldSet) -> Result<(), String> {
            Ok(())
        }

        fn install(&mut self, rule: &HardwareRule, _: &[SteeringEntry]) -> Result<u64, RuleRefusal> {
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
            destination: RuleDestination::Next,
            tag: None,
            count: true,
            require_integrity: false,
        }
    }

    #[test]
    fn counts_survive_recovery_and_refused_rules() {
        let egress = Some(TableCapabilities { levels: 2, ..TableCapabilities::default() });
        let mut rules =
            Rules::new(RuleCapabilities { egress, ..RuleCapabilities::none("model", "nic", RuleBackend::Dv) });
        let packets = Arc::new(AtomicU64::new(0));
        let more = |n| packets.fetch_add(n, Ordering::Relaxed);
        let guard = rules.open(Model(Arc::clone(&packets), None));
        let ids = [0, 1].map(|level| rules.install(&counted(level)).unwrap());
        // The counter was not read before the device goes.
        more(5);
        drop(guard);
        more(100);
        let counts = |rules: &mut Rules<Model>| ids.map(|id| rules.count(id).unwrap().packets);
        assert_eq!(counts(&mut rules), [5, 5]);
        let guard = rules.open(Model(Arc::clone(&packets), None));
        more(2);
        assert_eq!((counts(&mut rules), rules.epoch()), ([7, 7], 0));
        drop(guard);
        // One rule is refused. The other matches its own packets and stays installed.
        let _guard = rules.open(Model(Arc::clone(&packets), Some(0)));
        more(1);
        assert_eq!((counts(&mut rules), rules.epoch()), ([7, 8], 1));
        assert_eq!(ids.map(|id| rules.remove(id).unwrap().packets), [7, 8]);
    }
}
