//! Local addresses on their way to the kernel.
//!
//! An address is written as an entry of the bridge behind the port that stands for the local ports. The entry is
//! compared with the mirror first, so that nothing is written twice. New addresses of a segment have a rate limit, so
//! that a flood of forged ones does not reach the routing daemon. Moves and removals of advertised addresses have none.

use std::collections::{HashMap, HashSet};
use std::io;
use std::time::Duration;

use wirepath_pipeline::TokenBucket;
use wirepath_pmd::rtnetlink::Requests;
use wirepath_wire::MacAddr;

use super::mirror::Mirror;

/// New addresses of a segment per second, and at once.
const NEW_ADDRESSES: (u64, u128) = (1000, 2000);
/// Most writes of one turn.
const WRITES: usize = 512;
/// Minimum time between two log messages of a kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// VNI and Ethernet address.
type Address = (u32, MacAddr);

/// Writes to the tables of the kernel.
pub(super) trait Kernel {
    /// Puts an address behind a port of a bridge.
    fn put(&mut self, port: u32, mac: MacAddr) -> io::Result<()>;

    /// Removes an address behind a port of a bridge, unless it is not there.
    fn remove(&mut self, port: u32, mac: MacAddr) -> io::Result<()>;
}

impl Kernel for Requests {
    fn put(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
        self.put_address(port, mac)
    }

    fn remove(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
        self.remove_address(port, mac)
    }
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

/// New addresses of a segment that wait.
#[derive(Debug)]
struct Waiting {
    addresses: HashSet<MacAddr>,
    limit: TokenBucket,
    logged: Option<Duration>,
}

/// Addresses to write.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Addresses behind local ports.
    wanted: HashSet<Address>,
    /// Addresses that the kernel has from this program.
    written: HashSet<Address>,
    /// Changes of written addresses.
    urgent: HashSet<Address>,
    /// New addresses by VNI.
    fresh: HashMap<u32, Waiting>,
    pub(super) stats: WriterStats,
}

impl Writer {
    /// Takes an address that appeared at a local port or went from there.
    pub(super) fn change(&mut self, vni: u32, mac: MacAddr, present: bool) {
        let address = (vni, mac);
        let is_written = self.written.contains(&address);
        if present {
            self.wanted.insert(address);
        } else {
            self.wanted.remove(&address);
            if let Some(waiting) = self.fresh.get_mut(&vni) {
                waiting.addresses.remove(&mac);
            }
        }
        if is_written {
            self.urgent.insert(address);
        } else if present {
            self.add_fresh(address);
        }
    }

    /// Takes an address whose entry somebody else removed.
    pub(super) fn vanished(&mut self, vni: u32, mac: MacAddr) {
        let address = (vni, mac);
        if self.written.remove(&address) && self.wanted.contains(&address) {
            self.add_fresh(address);
        }
    }

    /// Takes an entry of a former run whose address was not learned again.
    pub(super) fn stale(&mut self, vni: u32, mac: MacAddr) {
        if !self.wanted.contains(&(vni, mac)) {
            self.written.insert((vni, mac));
            self.urgent.insert((vni, mac));
        }
    }

    /// Writes all addresses of a VNI again, whose port is new.
    pub(super) fn repeat(&mut self, vni: u32) {
        let of_vni: Vec<Address> = self.wanted.iter().filter(|address| address.0 == vni).copied().collect();
        self.written.retain(|address| address.0 != vni);
        of_vni.into_iter().for_each(|address| self.add_fresh(address));
    }

    /// Forgets all addresses of VNIs for which `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        self.wanted.retain(|address| keep(address.0));
        self.written.retain(|address| keep(address.0));
        self.urgent.retain(|address| keep(address.0));
        self.fresh.retain(|vni, _| keep(*vni));
    }

    fn add_fresh(&mut self, (vni, mac): Address) {
        let waiting = self.fresh.entry(vni).or_insert_with(|| Waiting {
            addresses: HashSet::new(),
            limit: TokenBucket::new(NEW_ADDRESSES.0, NEW_ADDRESSES.1),
            logged: None,
        });
        waiting.addresses.insert(mac);
    }

    /// Number of changes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.urgent.len() + self.fresh.values().map(|waiting| waiting.addresses.len()).sum::<usize>()
    }

    /// Number of written addresses of each VNI.
    pub(super) fn written(&self) -> HashMap<u32, usize> {
        let mut counts = HashMap::new();
        self.written.iter().for_each(|(vni, _)| *counts.entry(*vni).or_default() += 1);
        counts
    }

    /// Writes what waits, within the limits. `port` returns the port of a VNI that stands for its local ports. `now` is
    /// the time since the start. Returns the first error of this turn.
    pub(super) fn run(
        &mut self,
        kernel: &mut impl Kernel,
        mirror: &Mirror,
        port: impl Fn(u32) -> Option<u32>,
        now: Duration,
    ) -> io::Result<()> {
        let mut left = WRITES;
        let urgent: Vec<Address> = self.urgent.iter().take(left).copied().collect();
        for address in urgent {
            self.urgent.remove(&address);
            let Some(port) = port(address.0) else { continue };
            left -= 1;
            self.write(kernel, mirror, port, address)?;
        }
        let mut admitted: Vec<Address> = Vec::new();
        for (vni, waiting) in self.fresh.iter_mut().filter(|(_, waiting)| !waiting.addresses.is_empty()) {
            if port(*vni).is_none() {
                continue;
            }
            let mut limited = false;
            let of_vni: Vec<MacAddr> = (waiting.addresses.iter().take(left))
                .take_while(|_| {
                    limited = !waiting.limit.take(1, now.as_nanos() as u64);
                    !limited
                })
                .copied()
                .collect();
            left -= of_vni.len();
            for mac in of_vni {
                waiting.addresses.remove(&mac);
                admitted.push((*vni, mac));
            }
            if limited && waiting.logged.is_none_or(|at| now >= at + LOG_INTERVAL) {
                waiting.logged = Some(now);
                let (count, rate) = (waiting.addresses.len(), NEW_ADDRESSES.0);
                tracing::warn!(
                    "VNI {vni}: {count} new local addresses wait; at most {rate} per second go to the routing daemon"
                );
            }
        }
        let mut outcome = Ok(());
        for address in admitted {
            let Some(port) = port(address.0) else { continue };
            if outcome.is_err() {
                self.add_fresh(address);
                continue;
            }
            outcome = self.write(kernel, mirror, port, address);
        }
        outcome
    }

    /// Makes the entry of an address what it must be.
    fn write(&mut self, kernel: &mut impl Kernel, mirror: &Mirror, port: u32, address: Address) -> io::Result<()> {
        let (vni, mac) = address;
        let is_there = mirror.place(vni, mac).is_some_and(|place| place.port == port && place.external);
        let outcome = match (self.wanted.contains(&address), self.written.contains(&address)) {
            (true, _) if is_there => {
                self.written.insert(address);
                return Ok(());
            }
            (true, _) => kernel.put(port, mac).map(|()| {
                self.stats.written += 1;
                self.written.insert(address);
            }),
            // The mirror may not know the entry yet.
            (false, true) => kernel.remove(port, mac).map(|()| {
                self.stats.removed += 1;
                self.written.remove(&address);
            }),
            (false, false) => return Ok(()),
        };
        if outcome.is_err() {
            self.stats.refused += 1;
            self.urgent.insert(address);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use wirepath_pmd::rtnetlink::{BridgeEntry, Fdb, Link, LinkKind, Message, Vxlan};

    const PORT: u32 = 10;

    #[derive(Debug, Default)]
    struct Recorder {
        calls: Vec<(bool, MacAddr)>,
        refuses: bool,
    }

    impl Kernel for Recorder {
        fn put(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
            assert_eq!(port, PORT);
            if self.refuses {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.calls.push((true, mac));
            Ok(())
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
        let link = Link { index: 9, name: "vx".to_owned(), alias: None, master: Some(8), up: true, kind };
        mirror.apply(&Message::Link(link));
        mirror
    }

    fn entry(mac: MacAddr, port: u32) -> Message {
        Message::Fdb(Fdb::Bridge(BridgeEntry { removed: false, bridge: 8, port, mac, vlan: None, external: true }))
    }

    fn turn(writer: &mut Writer, kernel: &mut Recorder, mirror: &Mirror, milliseconds: u64) -> Vec<(bool, MacAddr)> {
        let now = Duration::from_millis(milliseconds);
        _ = writer.run(kernel, mirror, |vni| (vni == 1).then_some(PORT), now);
        std::mem::take(&mut kernel.calls)
    }

    #[test]
    fn an_entry_is_written_again_only_when_it_changes() {
        let (mut writer, mut kernel, mut mirror) = (Writer::default(), Recorder::default(), mirror());
        writer.change(1, mac(1), true);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 0), [(true, mac(1))]);
        mirror.apply(&entry(mac(1), PORT));
        writer.change(1, mac(1), true);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 1), []);
        // The address moved to a VTEP and back.
        mirror.apply(&entry(mac(1), 9));
        writer.change(1, mac(1), false);
        writer.change(1, mac(1), true);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 2), [(true, mac(1))]);
        writer.change(1, mac(1), false);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 3), [(false, mac(1))], "before the mirror knows the entry");
        writer.change(1, mac(1), false);
        writer.change(1, mac(2), true);
        writer.change(1, mac(2), false);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 4), [], "an address that came and went was never written");
        assert_eq!(writer.stats, WriterStats { written: 2, removed: 1, refused: 0 });
        writer.change(2, mac(1), true);
        assert_eq!((turn(&mut writer, &mut kernel, &mirror, 5), writer.waiting()), (vec![], 1), "no port yet");
        writer.retain(|vni| vni == 1);
        assert_eq!(writer.waiting(), 0);
    }

    #[test]
    fn a_flood_is_limited_and_known_addresses_overtake_it() {
        let (mut writer, mut kernel, mirror) = (Writer::default(), Recorder::default(), mirror());
        writer.change(1, mac(0), true);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 0).len(), 1);
        (1..20_000).for_each(|n| writer.change(1, mac(n), true));
        let burst = (0..10).map(|_| turn(&mut writer, &mut kernel, &mirror, 1).len()).sum::<usize>();
        assert_eq!(burst, 2000, "the burst less the first address, and what a millisecond adds");
        writer.change(1, mac(0), false);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 1), [(false, mac(0))]);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 101).len(), 100);
        (1..20_000).for_each(|n| writer.change(1, mac(n), false));
        let removed = (0..10).map(|_| turn(&mut writer, &mut kernel, &mirror, 102).len()).sum::<usize>();
        assert_eq!((removed, writer.waiting()), (2100, 0), "what was never written needs no removal");
    }

    #[test]
    fn refused_writes_are_repeated_and_lost_entries_restored() {
        let (mut writer, mut kernel, mut mirror) = (Writer::default(), Recorder::default(), mirror());
        kernel.refuses = true;
        writer.change(1, mac(1), true);
        writer.change(1, mac(2), true);
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
        writer.change(1, mac(5), true);
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 3), []);
        mirror.addresses_at(1, PORT).into_iter().for_each(|mac| writer.stale(1, mac));
        assert_eq!(turn(&mut writer, &mut kernel, &mirror, 4), [(false, mac(6))]);
        writer.repeat(1);
        let mut again = turn(&mut writer, &mut kernel, &mirror, 5);
        again.sort_unstable();
        assert_eq!(again, [(true, mac(1)), (true, mac(2))], "the mirror has the entry of the third one");
    }
}
