//! The thread that exchanges netlink messages with the kernel.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wirepath_pipeline::TokenBucket;
use wirepath_pipeline::tunnel::ExternalChanges;
use wirepath_pmd::rtnetlink::{Malformed, Message, Received, Requests, Subscription, Table};
use wirepath_wire::MacAddr;

use super::devices::{self, EvpnSegment, Names};
use super::hosts::Hosts;
use super::mirror::{Counts, Devices, Host, Mirror, MirrorStats};
use super::writer::WriterStats;
use crate::gateway::exchange::{self, lock};

/// Receive buffer of the notifications, in bytes: about 150 000 messages.
const RECEIVE_BUFFER: usize = 64 << 20;
/// Most datagrams that one turn receives.
const DATAGRAMS: usize = 4096;
/// Time between two turns while local addresses wait.
const BUSY: Duration = Duration::from_millis(10);
/// Time between two turns otherwise, and between two checks of the devices.
const IDLE: Duration = Duration::from_secs(1);
/// Minimum time between two updates of the status.
const STATUS_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time between two dumps. After each interrupted one it doubles, up to [`IDLE`].
const DUMP_INTERVAL: Duration = Duration::from_millis(50);
/// Repairs of bridges that somebody else changes: one in each of this many seconds, and as many at once.
const REPAIRS: (u64, u128) = (30, 20);
/// Time after which entries of a former run are removed, in a segment whose addresses do not age.
const STALE_AFTER: u32 = 300;

/// Orders of the control thread.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// New list of the segments.
    pub(super) segments: Option<Vec<EvpnSegment>>,
    /// VNIs of removed segments. Some of them may have returned since.
    pub(super) removed: HashSet<u32>,
    /// Addresses that appeared at local ports (true), or went.
    pub(super) local: HashMap<(u32, MacAddr), bool>,
    /// Hosts of IP addresses whose messages passed; `None`: not known any more.
    pub(super) bindings: HashMap<(u32, IpAddr), Option<Host>>,
    pub(super) stop: bool,
}

/// A segment for operators.
#[derive(Clone, Debug, Default)]
pub(super) struct SegmentStatus {
    pub(super) vxlan: Option<String>,
    pub(super) bridge: Option<String>,
    pub(super) access: Option<String>,
    pub(super) counts: Counts,
    /// Ethernet and IP addresses of local hosts that the kernel has.
    pub(super) advertised: [usize; 2],
}

impl SegmentStatus {
    pub(super) fn state(&self) -> &'static str {
        match (&self.vxlan, &self.bridge, &self.access) {
            (None, ..) => "vxlan",
            (_, None, _) => "bridge",
            (.., None) => "access",
            _ => "ready",
        }
    }
}

/// Figures for operators.
#[derive(Debug, Default)]
pub(super) struct Status {
    pub(super) segments: HashMap<u32, SegmentStatus>,
    pub(super) mirror: MirrorStats,
    /// Writes of Ethernet and of IP addresses.
    pub(super) writers: [WriterStats; 2],
    pub(super) malformed: u64,
    pub(super) overflows: u64,
    pub(super) dumps: u64,
    pub(super) interrupted: u64,
    pub(super) nexthops: usize,
    pub(super) waiting: usize,
}

/// State of both threads.
pub(super) type Shared = exchange::Shared<Orders, ExternalChanges, Status>;

/// The state of the thread.
pub(super) struct Thread {
    shared: Arc<Shared>,
    subscription: Subscription,
    /// True if a segment has a router, which needs the kernel's routes.
    has_routers: bool,
    /// True if the devices are as the segments need them.
    is_configured: bool,
    /// Warnings of the last configuration.
    warnings: HashSet<String>,
    /// Limit of the repairs, in seconds.
    repairs: TokenBucket,
    /// Time until which no bridge is repaired, after too many repairs.
    repairs_from: Instant,
    requests: Requests,
    mirror: Mirror,
    hosts: Hosts,
    segments: HashMap<u32, EvpnSegment>,
    /// Port for local addresses, by VNI.
    access: HashMap<u32, u32>,
    /// Bridge for IP addresses of local hosts, by VNI.
    bridges: HashMap<u32, u32>,
    /// Time when the entries of a former run are removed, by VNI.
    sweeps: HashMap<u32, Instant>,
    start: Instant,
    malformed: u64,
    overflows: u64,
    dumps: u64,
    interrupted: u64,
    /// Time of the next dump, if one is due.
    dump_at: Option<Instant>,
    dump_pause: Duration,
    checked: Instant,
    /// Time until which no writes are tried, after an error.
    writes_from: Instant,
    status_at: Instant,
    is_degraded: bool,
}

impl Thread {
    /// Opens the sockets.
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self {
            shared,
            subscription: Subscription::new(RECEIVE_BUFFER)?,
            has_routers: false,
            is_configured: false,
            warnings: HashSet::new(),
            repairs: TokenBucket::new(1, u128::from(REPAIRS.0) * REPAIRS.1),
            repairs_from: now,
            requests: Requests::new()?,
            mirror: Mirror::default(),
            hosts: Hosts::default(),
            segments: HashMap::new(),
            access: HashMap::new(),
            bridges: HashMap::new(),
            sweeps: HashMap::new(),
            start: now,
            malformed: 0,
            overflows: 0,
            dumps: 0,
            interrupted: 0,
            dump_at: Some(now),
            dump_pause: DUMP_INTERVAL,
            checked: now,
            writes_from: now,
            status_at: now,
            is_degraded: false,
        })
    }

    /// Makes the devices and reads the tables.
    pub(super) fn prepare(&mut self) -> io::Result<()> {
        let segments = lock(&self.shared.orders).segments.take();
        self.set_segments(segments.unwrap_or_default())?;
        self.dump()?;
        self.find_ports();
        self.publish(self.start);
        self.report();
        Ok(())
    }

    /// Runs until the control thread orders the end.
    pub(super) fn run(mut self) {
        loop {
            self.wait();
            let now = Instant::now();
            let orders = self.shared.take_orders();
            if orders.stop {
                break;
            }
            if !orders.removed.is_empty() {
                let stay = |vni: &u32| !orders.removed.contains(vni);
                let returned: HashSet<u32> = orders.segments.iter().flatten().map(|segment| segment.vni).collect();
                let gone: Vec<u32> = orders.removed.difference(&returned).copied().collect();
                if let Err(error) = self.remove_neighbours(&gone) {
                    self.complain(&error);
                }
                self.mirror.watch(&self.segments.keys().copied().filter(stay).collect());
                self.mirror.changes.retain(|vni| stay(&vni));
                lock(&self.shared.outbox).changes.retain(|vni| stay(&vni));
                self.hosts.retain(|vni| stay(&vni));
                self.access.retain(|vni, _| stay(vni));
                self.bridges.retain(|vni, _| stay(vni));
            }
            if let Some(segments) = orders.segments
                && let Err(error) = self.set_segments(segments)
            {
                self.complain(&error);
            }
            for ((vni, mac), present) in orders.local {
                if self.segments.contains_key(&vni) {
                    self.hosts.change_mac(vni, mac, present);
                }
            }
            for ((vni, address), host) in orders.bindings {
                if self.segments.contains_key(&vni) {
                    self.hosts.change_binding(vni, address, host);
                }
            }
            self.turn(now);
        }
        let vnis: Vec<u32> = self.segments.keys().copied().collect();
        let removed = self.remove_neighbours(&vnis).and_then(|()| devices::remove(&mut self.requests, vnis));
        if let Err(error) = removed {
            tracing::error!("{error}");
        }
    }

    /// Waits for a message of the kernel, an order or the next timer.
    fn wait(&self) {
        let mut time = (self.checked + IDLE).saturating_duration_since(Instant::now());
        if self.hosts.waiting() > 0 {
            time = time.min(BUSY);
        }
        if let Some(dump_at) = self.dump_at {
            time = time.min(dump_at.saturating_duration_since(Instant::now()));
        }
        self.shared.wait(&self.subscription, time);
    }

    fn turn(&mut self, now: Instant) {
        if let Err(error) = self.receive() {
            self.complain(&error);
        }
        if self.dump_at.is_some_and(|at| now >= at)
            && let Err(error) = self.dump()
        {
            self.complain(&error);
        }
        if now >= self.checked + IDLE {
            self.checked = now;
            if let Err(error) = self.check_devices(now) {
                self.complain(&error);
            }
            self.sweep(now);
        }
        self.find_ports();
        self.publish(now);
        let Self { hosts, mirror, access, .. } = self;
        hosts.follow(mirror, |vni| access.get(&vni).copied());
        if now >= self.writes_from {
            let Self { hosts, requests, mirror, access, start, .. } = self;
            let written = hosts.run(requests, mirror, |vni| access.get(&vni).copied(), now - *start);
            if let Err(error) = written {
                self.writes_from = now + IDLE;
                self.complain(&io::Error::new(error.kind(), format!("write a local address: {error}")));
            }
        }
        if now >= self.status_at {
            self.status_at = now + STATUS_INTERVAL;
            self.report();
        }
    }

    /// Logs an error once, until everything works again.
    fn complain(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_degraded, true) {
            tracing::error!("control = \"kernel\": {error}; it is tried again");
        }
    }

    fn set_segments(&mut self, segments: Vec<EvpnSegment>) -> io::Result<()> {
        let new: HashMap<u32, EvpnSegment> = segments.iter().map(|segment| (segment.vni, segment.clone())).collect();
        let old = std::mem::replace(&mut self.segments, new);
        let vnis: HashSet<u32> = self.segments.keys().copied().collect();
        self.hosts.retain(|vni| vnis.contains(&vni));
        self.access.retain(|vni, _| vnis.contains(vni));
        self.bridges.retain(|vni, _| vnis.contains(vni));
        self.sweeps.retain(|vni, _| vnis.contains(vni));
        let removed = old.into_keys().filter(|vni| !vnis.contains(vni));
        self.is_configured = false;
        self.mirror.watch(&vnis);
        devices::remove(&mut self.requests, removed)?;
        self.configure().map(|_| ())
    }

    /// Subscribes to what the segments need, and makes their devices as they must be. Returns whether bridges were not.
    fn configure(&mut self) -> io::Result<bool> {
        if !self.has_routers && self.segments.values().any(|segment| segment.router.is_some()) {
            // Messages that wait at the former subscription are older than the dump that follows.
            self.subscription = Subscription::with_routes(RECEIVE_BUFFER)?;
            self.dump_at = Some(Instant::now());
            self.mirror.lost_messages();
            self.has_routers = true;
        }
        let segments: Vec<EvpnSegment> = self.segments.values().cloned().collect();
        let restarted = std::mem::take(&mut self.mirror.bridges_restarted);
        let ensured = devices::ensure(&mut self.requests, &segments, &mut self.warnings, &restarted);
        if ensured.is_err() {
            self.mirror.bridges_restarted.extend(restarted);
        }
        let ensured = ensured?;
        self.is_configured = ensured.is_complete;
        Ok(ensured.has_changed)
    }

    /// Removes IP addresses of local hosts from bridges of somebody else. They leave together with the port for local
    /// addresses, which goes with the gateway's own VXLAN device.
    fn remove_neighbours(&mut self, vnis: &[u32]) -> io::Result<()> {
        for vni in vnis {
            let Some(Devices { vxlan, bridge: Some(bridge) }) = self.mirror.devices(*vni) else { continue };
            let is_own = |index| self.mirror.link(index).is_some_and(devices::is_own);
            if is_own(vxlan) && !is_own(bridge) {
                for address in self.mirror.own_neighbours(*vni) {
                    self.requests.remove_neighbour(bridge, address)?;
                }
            }
        }
        Ok(())
    }

    /// Makes and configures devices that somebody else removed or changed.
    fn check_devices(&mut self, now: Instant) -> io::Result<()> {
        let is_ready = |vni: &u32| self.mirror.devices(*vni).is_some_and(|devices| devices.bridge.is_some());
        let are_ready = self.segments.keys().all(|vni| is_ready(vni) && self.access.contains_key(vni));
        // A bridge that was down or in another VRF has lost addresses.
        let must_repair = self.mirror.bridges_changed && now >= self.repairs_from;
        self.mirror.bridges_changed &= !must_repair;
        self.is_configured &= are_ready && !must_repair && !self.lacks_vrf();
        if !self.is_configured && self.configure()? && must_repair {
            self.limit_repairs(now);
        }
        if std::mem::take(&mut self.is_degraded) {
            tracing::info!("control = \"kernel\" works again");
        }
        Ok(())
    }

    /// Takes a repair of bridges, after which the next one may have to wait.
    fn limit_repairs(&mut self, now: Instant) {
        if !self.repairs.take(REPAIRS.0, now.duration_since(self.start).as_nanos() as u64) {
            tracing::warn!(
                "somebody changes the bridges of segments again and again; the next repair is in {} seconds",
                REPAIRS.0
            );
            self.repairs_from = now + Duration::from_secs(REPAIRS.0);
        }
    }

    /// Returns whether a bridge that the gateway made is not in the VRF device of its segment.
    fn lacks_vrf(&self) -> bool {
        let vrf = |segment: &EvpnSegment| segment.router.as_ref().and_then(|router| router.vrf.clone());
        let of_vrfs: Vec<(u32, String)> = self.segments.iter().filter_map(|(vni, it)| Some((*vni, vrf(it)?))).collect();
        if of_vrfs.is_empty() {
            return false;
        }
        let by_name: HashMap<&str, u32> = self.mirror.links().map(|link| (link.name.as_str(), link.index)).collect();
        of_vrfs.iter().any(|(vni, vrf)| {
            let bridge = self.mirror.devices(*vni).and_then(|devices| self.mirror.link(devices.bridge?));
            let bridge = bridge.filter(|bridge| devices::is_bridge_of(bridge, *vni));
            by_name.get(vrf.as_str()).is_some_and(|device| bridge.is_some_and(|it| it.master != Some(*device)))
        })
    }

    /// Receives the waiting messages.
    fn receive(&mut self) -> io::Result<()> {
        let Self { subscription, mirror, malformed, .. } = self;
        let mut limit = DATAGRAMS;
        let mut lost = false;
        loop {
            let received = subscription.receive(limit, read_into(mirror, malformed))?;
            match received {
                Received::Lost => {
                    // What waits is older than the next dump. The kernel reports the next loss only after the queue
                    // was empty.
                    self.overflows += 1;
                    mirror.lost_messages();
                    (lost, limit) = (true, usize::MAX);
                }
                Received::More if lost => {}
                Received::All | Received::More => break,
            }
        }
        if lost {
            let at = Instant::now() + self.dump_pause;
            self.dump_at = Some(self.dump_at.map_or(at, |due| due.min(at)));
        }
        Ok(())
    }

    /// Reads all tables and applies the difference.
    fn dump(&mut self) -> io::Result<()> {
        // Until the dump was complete, another one is due.
        self.dump_at = Some(Instant::now() + self.dump_pause);
        self.receive_all()?;
        self.mirror.begin();
        let mut complete = true;
        let routes = self.has_routers.then_some(Table::Routes);
        for table in [Table::Links, Table::Nexthops, Table::Fdb, Table::Neighbours].into_iter().chain(routes) {
            let Self { requests, mirror, malformed, .. } = self;
            complete &= requests.dump(table, read_into(mirror, malformed))?;
        }
        if complete {
            self.mirror.finish();
            self.dumps += 1;
            (self.dump_at, self.dump_pause) = (None, DUMP_INTERVAL);
        } else {
            self.interrupted += 1;
            self.dump_pause = (2 * self.dump_pause).min(IDLE);
        }
        Ok(())
    }

    /// Receives messages until none waits, so that none is older than a dump that follows.
    fn receive_all(&mut self) -> io::Result<()> {
        let Self { subscription, mirror, malformed, overflows, .. } = self;
        loop {
            let received = subscription.receive(usize::MAX, read_into(mirror, malformed))?;
            match received {
                Received::All => return Ok(()),
                Received::Lost => {
                    *overflows += 1;
                    mirror.lost_messages();
                }
                Received::More => {}
            }
        }
    }

    /// Finds the ports for local addresses, and writes the addresses of new ones.
    fn find_ports(&mut self) {
        for vni in self.segments.keys() {
            let bridge = self.mirror.devices(*vni).and_then(|devices| devices.bridge);
            let before = match bridge {
                Some(bridge) => self.bridges.insert(*vni, bridge),
                None => self.bridges.remove(vni),
            };
            if before != bridge {
                self.hosts.repeat_addresses(*vni);
            }
        }
        let complete = self.access.len() == self.segments.len();
        let is_there = |(vni, index): (&u32, &u32)| {
            let bridge = self.mirror.devices(*vni).and_then(|devices| devices.bridge);
            bridge.is_some() && self.mirror.link(*index).is_some_and(|link| link.master == bridge)
        };
        if complete && self.access.iter().all(is_there) {
            return;
        }
        let by_name: HashMap<&str, u32> = self.mirror.links().map(|link| (link.name.as_str(), link.index)).collect();
        let mut found: HashMap<u32, u32> = HashMap::new();
        for vni in self.segments.keys() {
            let index = by_name.get(Names::new(*vni).access.as_str()).copied();
            found.extend(index.filter(|index| is_there((vni, index))).map(|index| (*vni, index)));
        }
        let now = Instant::now();
        for (vni, index) in &found {
            if self.access.get(vni) != Some(index) {
                self.hosts.repeat_macs(*vni);
                let ageing = self.segments.get(vni).map_or(0, |segment| segment.ageing);
                let ageing = if ageing == 0 { STALE_AFTER } else { ageing };
                self.sweeps.insert(*vni, now + Duration::from_secs(ageing.into()));
            }
        }
        self.access = found;
    }

    /// Removes entries of a former run whose addresses were not learned again within the ageing time.
    fn sweep(&mut self, now: Instant) {
        let due: Vec<u32> = self.sweeps.iter().filter(|(_, at)| now >= **at).map(|(vni, _)| *vni).collect();
        for vni in due {
            self.sweeps.remove(&vni);
            if let Some(port) = self.access.get(&vni) {
                self.hosts.sweep(&self.mirror, vni, *port);
            }
        }
    }

    /// Passes the changes to the control thread. `since` is the time of their messages.
    fn publish(&mut self, since: Instant) {
        if !self.mirror.changes.is_empty() {
            let changes = std::mem::take(&mut self.mirror.changes);
            self.shared.publish(since, |waiting| waiting.merge(changes));
        }
    }

    /// Updates the figures for operators.
    fn report(&self) {
        let written = self.hosts.written();
        let name = |index: u32| self.mirror.link(index).map(|link| link.name.clone());
        let segment = |vni: u32| {
            let devices = self.mirror.devices(vni);
            SegmentStatus {
                vxlan: devices.and_then(|devices| name(devices.vxlan)),
                bridge: devices.and_then(|devices| name(devices.bridge?)),
                access: self.access.get(&vni).and_then(|index| name(*index)),
                counts: self.mirror.counts(vni),
                advertised: std::array::from_fn(|kind| written[kind].get(&vni).copied().unwrap_or(0)),
            }
        };
        let segments = self.segments.keys().map(|vni| (*vni, segment(*vni))).collect();
        *lock(&self.shared.status) = Status {
            segments,
            mirror: self.mirror.stats,
            writers: self.hosts.stats(),
            malformed: self.malformed,
            overflows: self.overflows,
            dumps: self.dumps,
            interrupted: self.interrupted,
            nexthops: self.mirror.nexthops(),
            waiting: self.hosts.waiting(),
        };
    }
}

/// Returns what takes messages of the kernel.
fn read_into(mirror: &mut Mirror, malformed: &mut u64) -> impl FnMut(Result<Message, Malformed>) {
    |message| match message {
        Ok(message) => mirror.apply(&message),
        Err(Malformed) => *malformed += 1,
    }
}
