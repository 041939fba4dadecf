//! Entries of local hosts on their way to the kernel.
//!
//! An Ethernet address is written as an entry of the bridge behind the port that stands for the local ports. An IP
//! address is written as a neighbour of the bridge. Entries are compared with the mirror first, so that nothing is
//! written twice.
//! New addresses of a segment have a rate limit, so that a flood of forged ones does not reach the routing daemon.
//! Moves and removals of advertised addresses have none.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::io;
use std::time::Duration;

use wirepath_pipeline::TokenBucket;

/// New addresses of a segment per second, and at once.
const NEW_ADDRESSES: (u64, u128) = (1000, 2000);
/// Most writes of one turn.
pub(super) const WRITES: usize = 512;
/// Minimum time between two log messages of a kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A table of the kernel with one kind of entries, each a key and a value.
pub(super) trait Kernel<K, V> {
    /// Name of the entries for the log.
    const NAME: &str;

    /// Writes an entry of a device. Returns false if the device cannot have it.
    fn put(&mut self, device: u32, key: K, value: V) -> io::Result<bool>;

    /// Removes an entry of a device, unless it is not there.
    fn remove(&mut self, device: u32, key: K) -> io::Result<()>;
}

/// Knowledge of the mirror about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry<V> {
    /// Nothing.
    Unknown,
    /// It is there, with this value.
    Own(V),
    /// Another program has replaced it.
    Foreign,
}

/// Numbers of writes since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WriterStats {
    /// Entries written.
    pub(super) written: u64,
    /// Entries removed.
    pub(super) removed: u64,
    /// Writes that the kernel refused.
    pub(super) refused: u64,
}

/// New entries of a segment that wait.
#[derive(Debug)]
struct Waiting<K> {
    keys: HashSet<K>,
    limit: TokenBucket,
    logged: Option<Duration>,
}

/// Entries to write, by VNI and key.
#[derive(Debug)]
pub(super) struct Writer<K, V> {
    /// Entries of hosts behind local ports.
    wanted: HashMap<(u32, K), V>,
    /// Entries that the kernel has from this program.
    written: HashSet<(u32, K)>,
    /// Changes of written entries.
    urgent: HashSet<(u32, K)>,
    /// New entries by VNI.
    fresh: HashMap<u32, Waiting<K>>,
    /// Wanted entries that their device could not have.
    impossible: HashSet<(u32, K)>,
    pub(super) stats: WriterStats,
}

impl<K, V> Default for Writer<K, V> {
    fn default() -> Self {
        Self {
            wanted: HashMap::new(),
            written: HashSet::new(),
            urgent: HashSet::new(),
            fresh: HashMap::new(),
            impossible: HashSet::new(),
            stats: WriterStats::default(),
        }
    }
}

impl<K: Copy + Eq + Hash, V: Copy + Eq> Writer<K, V> {
    /// Takes an entry that is wanted with a value, or not any more.
    pub(super) fn change(&mut self, vni: u32, key: K, value: Option<V>) {
        let entry = (vni, key);
        match value {
            Some(value) => _ = self.wanted.insert(entry, value),
            None => {
                self.wanted.remove(&entry);
                if let Some(waiting) = self.fresh.get_mut(&vni) {
                    waiting.keys.remove(&key);
                }
                self.impossible.remove(&entry);
            }
        }
        if self.written.contains(&entry) {
            self.urgent.insert(entry);
        } else if value.is_some() {
            self.add_fresh(entry);
        }
    }

    /// Returns whether an entry is wanted.
    pub(super) fn is_wanted(&self, vni: u32, key: K) -> bool {
        self.wanted.contains_key(&(vni, key))
    }

    /// Takes an entry that somebody else removed.
    pub(super) fn vanished(&mut self, vni: u32, key: K) {
        let entry = (vni, key);
        if self.written.remove(&entry) && self.wanted.contains_key(&entry) {
            self.add_fresh(entry);
        }
    }

    /// Takes an entry that another program replaced. It is written again when it changes.
    pub(super) fn replaced(&mut self, vni: u32, key: K) {
        self.written.remove(&(vni, key));
    }

    /// Takes an entry of a former run that is not known again.
    pub(super) fn stale(&mut self, vni: u32, key: K) {
        if !self.wanted.contains_key(&(vni, key)) {
            self.written.insert((vni, key));
            self.urgent.insert((vni, key));
        }
    }

    /// Writes all entries of a VNI again, whose device is new.
    pub(super) fn repeat(&mut self, vni: u32) {
        let of_vni: Vec<(u32, K)> = self.wanted.keys().filter(|entry| entry.0 == vni).copied().collect();
        self.written.retain(|entry| entry.0 != vni);
        self.impossible.retain(|entry| entry.0 != vni);
        of_vni.into_iter().for_each(|entry| self.add_fresh(entry));
    }

    /// Forgets all entries of VNIs for which `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        self.wanted.retain(|entry, _| keep(entry.0));
        self.written.retain(|entry| keep(entry.0));
        self.urgent.retain(|entry| keep(entry.0));
        self.fresh.retain(|vni, _| keep(*vni));
        self.impossible.retain(|entry| keep(entry.0));
    }

    /// Tries the entries of a VNI again that its device could not have.
    pub(super) fn retry(&mut self, vni: u32) {
        let again: Vec<(u32, K)> = self.impossible.extract_if(|entry| entry.0 == vni).collect();
        again.into_iter().for_each(|entry| self.add_fresh(entry));
    }

    fn add_fresh(&mut self, (vni, key): (u32, K)) {
        let waiting = self.fresh.entry(vni).or_insert_with(|| Waiting {
            keys: HashSet::new(),
            limit: TokenBucket::new(NEW_ADDRESSES.0, NEW_ADDRESSES.1),
            logged: None,
        });
        waiting.keys.insert(key);
    }

    /// Number of changes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.urgent.len() + self.fresh.values().map(|waiting| waiting.keys.len()).sum::<usize>()
    }

    /// Number of written entries of each VNI.
    pub(super) fn written(&self) -> HashMap<u32, usize> {
        let mut counts = HashMap::new();
        self.written.iter().for_each(|(vni, _)| *counts.entry(*vni).or_default() += 1);
        counts
    }

    /// Writes what waits, at most `left` entries and within the limits. `known` returns what the mirror knows about an
    /// entry of a device, and `device` the device of a VNI for the entries. `now` is the time since the start. Returns
    /// the first error of this turn.
    pub(super) fn run<T: Kernel<K, V>>(
        &mut self,
        kernel: &mut T,
        mut left: usize,
        known: impl Fn(u32, u32, K) -> Entry<V>,
        device: impl Fn(u32) -> Option<u32>,
        now: Duration,
    ) -> io::Result<()> {
        let urgent: Vec<(u32, K)> = self.urgent.iter().take(left).copied().collect();
        for entry in urgent {
            // A change waits for its device.
            let Some(device) = device(entry.0) else { continue };
            self.urgent.remove(&entry);
            left -= 1;
            self.write(kernel, &known, device, entry)?;
        }
        let mut admitted: Vec<(u32, K)> = Vec::new();
        for (vni, waiting) in self.fresh.iter_mut().filter(|(_, waiting)| !waiting.keys.is_empty()) {
            if device(*vni).is_none() {
                continue;
            }
            let mut limited = false;
            let of_vni: Vec<K> = (waiting.keys.iter().take(left))
                .take_while(|_| {
                    limited = !waiting.limit.take(1, now.as_nanos() as u64);
                    !limited
                })
                .copied()
                .collect();
            left -= of_vni.len();
            for key in of_vni {
                waiting.keys.remove(&key);
                admitted.push((*vni, key));
            }
            if limited && waiting.logged.is_none_or(|at| now >= at + LOG_INTERVAL) {
                waiting.logged = Some(now);
                let (count, rate, name) = (waiting.keys.len(), NEW_ADDRESSES.0, T::NAME);
                tracing::warn!(
                    "VNI {vni}: {count} new {name} wait; at most {rate} per second go to the routing daemon"
                );
            }
        }
        let mut outcome = Ok(());
        for entry in admitted {
            let Some(device) = device(entry.0) else { continue };
            if outcome.is_err() {
                self.add_fresh(entry);
                continue;
            }
            outcome = self.write(kernel, &known, device, entry);
        }
        outcome
    }

    /// Makes an entry of a device what it must be.
    fn write<T: Kernel<K, V>>(
        &mut self,
        kernel: &mut T,
        known: impl Fn(u32, u32, K) -> Entry<V>,
        device: u32,
        entry: (u32, K),
    ) -> io::Result<()> {
        let (vni, key) = entry;
        let known = known(vni, device, key);
        let outcome = match (self.wanted.get(&entry), self.written.contains(&entry)) {
            (Some(value), _) if known == Entry::Own(*value) => {
                self.written.insert(entry);
                self.impossible.remove(&entry);
                return Ok(());
            }
            (Some(value), _) => kernel.put(device, key, *value).map(|is_possible| {
                if is_possible {
                    self.stats.written += 1;
                    self.written.insert(entry);
                    self.impossible.remove(&entry);
                } else {
                    self.stats.refused += 1;
                    self.impossible.insert(entry);
                }
            }),
            (None, true) if known == Entry::Foreign => {
                self.written.remove(&entry);
                return Ok(());
            }
            // The mirror may not know the entry yet.
            (None, true) => kernel.remove(device, key).map(|()| {
                self.stats.removed += 1;
                self.written.remove(&entry);
            }),
            (None, false) => return Ok(()),
        };
        if outcome.is_err() {
            self.stats.refused += 1;
            self.urgent.insert(entry);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use wirepath_pmd::rtnetlink::{BridgeEntry, Fdb, Link, LinkKind, Message, Vxlan};
    use wirepath_wire::MacAddr;

    use crate::gateway::evpn::hosts::known_mac;
    use crate::gateway::evpn::mirror::Mirror;

    const PORT: u32 = 10;

    #[derive(Debug, Default)]
    struct Recorder {
        calls: Vec<(bool, MacAddr)>,
        refuses: bool,
    }

    impl Kernel<MacAddr, ()> for Recorder {
        const NAME: &str = "addresses";

        fn put(&mut self, port: u32, mac: MacAddr, (): ()) -> io::Result<bool> {
            assert_eq!(port, PORT);
            if self.refuses {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.calls.push((true, mac));
            Ok(true)
        }

        fn remove(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
            assert_eq!(port, PORT);
            self.calls.push((false, mac));
            Ok(())
        }
    }

    fn mac(n: u32) -> MacAddr {
        MacAddr::from_u64(0x0200_0000_0000 | u64::from(n))
    }

    fn mirror() -> Mirror {
        let mut mirror = Mirror::default();
        mirror.watch(&HashSet::from([1, 2]));
        let kind = LinkKind::Vxlan(Vxlan { vni: 1, local: None, port: 4789, learning: false });
        let link = Link { index: 9, name: "vx".to_owned(), alias: None, mac: None, master: Some(8), up: true, kind };
        mirror.apply(&Message::Link(link));
        mirror
    }

    fn entry(mac: MacAddr, port: u32) -> Message {
        Message::Fdb(Fdb::Bridge(BridgeEntry { removed: false, bridge: 8, port, mac, vlan: None, external: true }))
    }

    fn turn(
        writer: &mut Writer<MacAddr, ()>,
        kernel: &mut Recorder,
        mirror: &Mirror,
        milliseconds: u64,
    ) -> Vec<(bool, MacAddr)> {
        let now = Duration::from_millis(milliseconds);
        let known = |vni, port, mac| known_mac(mirror, vni, port, mac);
        _ = writer.run(kernel, WRITES, known, |vni| (vni == 1).then_some(PORT), now);
        std::mem::take(&mut kernel.calls)
    }

    #[test]
    fn an_entry_is_written_again_only_when_it_changes() {
        let (mut writer, mut kernel, mut mirror) = (Writer::default(), Recorder::default(), mirror());
        writer.change(1, mac(1), Some(()));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 0), [(true, mac(1))]);
        mirror.apply(&entry(mac(1), PORT));
        writer.change(1, mac(1), Some(()));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 1), []);
        // The address moved to a VTEP and back.
        mirror.apply(&entry(mac(1), 9));
        writer.change(1, mac(1), None);
        writer.change(1, mac(1), Some(()));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 2), [(true, mac(1))]);
        writer.change(1, mac(1), None);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 3), [(false, mac(1))], "before the mirror knows the entry");
        writer.change(1, mac(1), None);
        writer.change(1, mac(2), Some(()));
        writer.change(1, mac(2), None);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 4), [], "an address that came and went was never written");
        assert_eq!(writer.stats, WriterStats { written: 2, removed: 1, refused: 0 });
        writer.change(2, mac(1), Some(()));
        assert_eq!((turn(&mut writer, &mut kernel, &mirror, 5), writer.waiting()), (vec![], 1), "no port yet");
        writer.retain(|vni| vni == 1);
        assert_eq!(writer.waiting(), 0);
    }

    #[test]
    fn a_flood_is_limited_and_known_addresses_overtake_it() {
        let (mut writer, mut kernel, mirror) = (Writer::default(), Recorder::default(), mirror());
        writer.change(1, mac(0), Some(()));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 0).len(), 1);
        (1..20_000).for_each(|n| writer.change(1, mac(n), Some(())));
        let burst = (0..10).map(|_| turn(&mut writer, &mut kernel, &mirror, 1).len()).sum::<usize>();
        assert_eq!(burst, 2000, "the burst less the first address, and what a millisecond adds");
        writer.change(1, mac(0), None);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 1), [(false, mac(0))]);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 101).len(), 100);
        (1..20_000).for_each(|n| writer.change(1, mac(n), None));
        let removed = (0..10).map(|_| turn(&mut writer, &mut kernel, &mirror, 102).len()).sum::<usize>();
        assert_eq!((removed, writer.waiting()), (2100, 0), "what was never written needs no removal");
    }

    #[test]
    fn refused_writes_are_repeated_and_lost_entries_restored() {
        let (mut writer, mut kernel, mut mirror) = (Writer::default(), Recorder::default(), mirror());
        kernel.refuses = true;
        writer.change(1, mac(1), Some(()));
        writer.change(1, mac(2), Some(()));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 0), []);
        assert_eq!((writer.stats.refused, writer.waiting()), (1, 2));
        kernel.refuses = false;
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 1).len(), 2);
        writer.vanished(1, mac(1));
        writer.vanished(1, mac(7));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 2), [(true, mac(1))]);
        // Entries of a former run: one host is back, the other is not.
        mirror.apply(&entry(mac(5), PORT));
        mirror.apply(&entry(mac(6), PORT));
        writer.change(1, mac(5), Some(()));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 3), []);
        mirror.addresses_at(1, PORT).into_iter().for_each(|mac| writer.stale(1, mac));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 4), [(false, mac(6))]);
        writer.repeat(1);
        let mut again = turn(&mut writer, &mut kernel, &mirror, 5);
        again.sort_unstable();
        assert_eq!(again, [(true, mac(1)), (true, mac(2))], "the mirror has the entry of the third one");
    }
}
