//! Segments whose remotes come from the kernel's tables, which a routing daemon such as FRR writes by EVPN (RFC 7432,
//! RFC 8365).
//!
//! ```text
//! FRR <─> kernel <─> thread: mirror, writer <─> control thread: forwarding database of the workers
//! ```
//!
//! A thread of its own exchanges netlink messages with the kernel, so the control thread never waits for it. Both
//! exchange changes, of which a later one replaces an earlier one of the same item. So what waits is bounded by the
//! tables, however fast they change.

mod devices;
mod hosts;
mod mirror;
mod routes;
#[cfg(any(test, fuzzing))]
#[cfg_attr(not(fuzzing), expect(unreachable_pub, reason = "the fuzz target calls it"))]
pub mod sequences;
mod thread;
mod writer;

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::Instant;

use wirepath_pipeline::registry::{Column, Row, TableSpec, Unit};
use wirepath_pipeline::tunnel::config::{GatewayConfig, SegmentControl};
use wirepath_pipeline::tunnel::router::config::DEFAULT_VRF;
use wirepath_pipeline::tunnel::{ExternalChanges, GatewayControl};
use wirepath_pipeline::{ControlPlane, ControlWaker};
use wirepath_wire::MacAddr;

use wirepath::cli::Failure;

use super::exchange::{Lag, Outbox, lock};
pub use devices::DEVICE_ALIAS;
use devices::EvpnRouter;
pub(super) use devices::EvpnSegment;
use thread::{Orders, Shared, Thread};

/// Most changes in each direction that one tick takes.
const CHANGES: usize = 4096;

/// The tables of this module.
pub(super) const TABLES: [&TableSpec; 2] = [&SEGMENTS, &SYNC];

static SEGMENTS: TableSpec = TableSpec {
    name: "evpn",
    about: "Segments whose remotes come from the kernel's tables",
    metric: Some("evpn"),
    columns: &[
        Column::key("segment", "Name of the segment"),
        Column::key("vni", "VNI"),
        Column::attribute("vxlan", "VXLAN device by which the routing daemon sees the segment"),
        Column::attribute("bridge", "Bridge of that device"),
        Column::attribute("access", "Port of the bridge that stands for the local ports"),
        Column::attribute("state", "ready, or what is missing: vxlan, bridge or access"),
        Column::gauge("flood", Unit::None, "VTEPs in the flood list of the kernel"),
        Column::gauge("macs", Unit::None, "Addresses behind VTEPs in the kernel"),
        Column::gauge("neighbours", Unit::None, "IP addresses behind VTEPs in the kernel"),
        Column::gauge("routes", Unit::None, "Routes to routers behind VTEPs in the kernel"),
        Column::gauge("remotes", Unit::None, "VTEPs that the gateway uses"),
        Column::gauge("advertised", Unit::None, "Addresses of local ports that the kernel has from the gateway"),
        Column::gauge("advertised_ips", Unit::None, "IP addresses of local hosts that the kernel has from the gateway"),
    ],
};

static SYNC: TableSpec = TableSpec {
    name: "evpn_sync",
    about: "Exchange with the kernel's tables",
    metric: Some("evpn_sync"),
    columns: &[
        Column::counter("messages", Unit::None, "Messages of the kernel"),
        Column::counter("malformed", Unit::None, "Messages that could not be read"),
        Column::counter("unsupported", Unit::None, "Entries with another VNI than their device, which are not used"),
        Column::counter("overflows", Unit::None, "Times that the kernel dropped messages (ENOBUFS)"),
        Column::counter("dumps", Unit::None, "Dumps of the tables that were complete"),
        Column::counter("interrupted", Unit::None, "Dumps that changes interrupted, and that were repeated"),
        Column::counter("written", Unit::None, "Local addresses written"),
        Column::counter("removed", Unit::None, "Local addresses removed"),
        Column::counter("written_ips", Unit::None, "IP addresses of local hosts written"),
        Column::counter("removed_ips", Unit::None, "IP addresses of local hosts removed"),
        Column::counter("write_errors", Unit::None, "Writes that the kernel refused"),
        Column::counter("refused", Unit::None, "Addresses for which there was no room, or that are static"),
        Column::counter("applied", Unit::None, "Changes applied to the forwarding tables"),
        Column::counter("refused_routes", Unit::None, "Routes for which there was no room"),
        Column::gauge("nexthops", Unit::None, "Nexthop objects of forwarding databases in the kernel"),
        Column::gauge("pending", Unit::None, "Changes that wait for the forwarding tables"),
        Column::gauge("waiting", Unit::None, "Local addresses and IP addresses that wait to be written"),
        Column::gauge("lag_us", Unit::None, "Microseconds from the message to the forwarding tables, last change"),
        Column::gauge("max_lag_us", Unit::None, "The longest of these times since the start"),
    ],
};

/// Returns whether a segment takes its remotes from the kernel.
pub(super) fn is_needed(config: &GatewayConfig) -> bool {
    config.segments.iter().any(|segment| segment.control == SegmentControl::Kernel)
}

/// Returns the segments whose remotes come from the kernel. `mac` is the Ethernet address of the underlay port.
pub(super) fn segments(config: &GatewayConfig, mac: MacAddr) -> Vec<EvpnSegment> {
    let of_kernel = config.segments.iter().filter(|segment| segment.control == SegmentControl::Kernel);
    let segment = |it: &wirepath_pipeline::tunnel::config::SegmentConfig| {
        // Daemons advertise IPv4 VTEPs if there are both.
        let local = it.locals.iter().find(|local| local.is_ipv4()).or(it.locals.first()).copied();
        let udp_port = config.underlay.port_of(it.kind).unwrap_or_default();
        let router = it.router.as_ref().map(|router| EvpnRouter {
            mac: router.mac.unwrap_or(mac),
            vrf: config.routing.vrfs.get(router.vrf).map(|vrf| vrf.name.clone()).filter(|name| name != DEFAULT_VRF),
            addresses: router.addresses.iter().map(|prefix| (prefix.address, prefix.len)).collect(),
        });
        Some(EvpnSegment { name: it.name.clone(), vni: it.vni?, local, udp_port, ageing: it.ageing, router })
    };
    of_kernel.filter_map(segment).collect()
}

fn refused(error: io::Error) -> Failure {
    Failure::failed(format!("control = \"kernel\": {error}"))
}

/// The control thread's end of the exchange with the kernel.
pub(super) struct Evpn {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    segments: Vec<EvpnSegment>,
    /// Ethernet address of the underlay port, which is also that of routers without one of their own.
    mac: MacAddr,
    /// Changes that the control thread took and did not apply yet.
    pending: ExternalChanges,
    /// Time of the oldest message behind [`Self::pending`].
    since: Option<Instant>,
    applied: u64,
    lag: Lag,
}

impl std::fmt::Debug for Evpn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Evpn").field("segments", &self.segments).finish_non_exhaustive()
    }
}

impl Evpn {
    /// Makes the devices of these segments and starts the exchange, in the network namespace of the calling thread.
    /// Waits until the devices exist.
    ///
    /// # Errors
    /// If the kernel refuses a socket or a device.
    pub(super) fn start(segments: Vec<EvpnSegment>, control: ControlWaker) -> Result<Self, Failure> {
        let (evpn, ready) = Self::begin(segments, control)?;
        match ready.recv() {
            Ok(Ok(())) => Ok(evpn),
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(Failure::failed("the thread of control = \"kernel\" ended at its start")),
        }
    }

    /// Starts the exchange without waiting. The receiver gets the outcome of the first attempt; the thread repeats it.
    ///
    /// # Errors
    /// If there is no room for a thread.
    pub(super) fn begin(
        segments: Vec<EvpnSegment>,
        control: ControlWaker,
    ) -> Result<(Self, Receiver<io::Result<()>>), Failure> {
        let orders = Orders { segments: Some(segments.clone()), ..Orders::default() };
        let shared = Shared::new(orders, control).map_err(refused)?;
        let (sender, ready) = mpsc::channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("evpn".to_owned())
            .spawn(move || match Thread::new(of_thread) {
                Ok(mut thread) => {
                    let prepared = thread.prepare();
                    _ = sender.send(prepared);
                    thread.run();
                }
                Err(error) => {
                    tracing::error!("control = \"kernel\": {error}");
                    _ = sender.send(Err(error));
                }
            })
            .map_err(refused)?;
        let evpn = Self {
            shared,
            thread: Some(thread),
            segments,
            mac: MacAddr::ZERO,
            pending: ExternalChanges::default(),
            since: None,
            applied: 0,
            lag: Lag::default(),
        };
        Ok((evpn, ready))
    }

    /// Takes the segments of a changed configuration.
    pub(super) fn set_segments(&mut self, segments: Vec<EvpnSegment>) {
        if segments == self.segments {
            return;
        }
        // The gateway has forgotten all about these. If one returns, it needs everything again.
        let stay: HashSet<u32> = segments.iter().map(|segment| segment.vni).collect();
        let removed = self.segments.iter().map(|segment| segment.vni).filter(|vni| !stay.contains(vni));
        self.shared.order(|orders| {
            orders.removed.extend(removed);
            orders.segments = Some(segments.clone());
        });
        self.pending.retain(|vni| stay.contains(&vni));
        self.segments = segments;
    }

    /// Exchanges changes with the thread.
    pub(super) fn tick(&mut self, gateway: &mut GatewayControl, plane: &ControlPlane) {
        if self.mac != gateway.mac() {
            self.mac = gateway.mac();
            self.set_segments(segments(gateway.config(), self.mac));
        }
        if self.pending.is_empty() {
            Outbox { changes: self.pending, since: self.since } = self.shared.take_changes();
        }
        let changes = self.pending.take(CHANGES);
        if changes.is_empty() {
            gateway.update_external_remotes(plane.ports(), plane.seconds());
        } else {
            self.applied += changes.len() as u64;
            gateway.apply_external(changes, plane.ports(), plane.seconds());
            if let Some(since) = self.since.filter(|_| self.pending.is_empty()) {
                self.lag.record(since);
            }
        }
        let local = gateway.take_local_changes(CHANGES);
        let bindings = gateway.take_local_bindings(CHANGES);
        if !local.is_empty() || !bindings.is_empty() {
            let local = local.into_iter().map(|it| ((it.vni, it.mac), it.present));
            let bindings = bindings.into_iter().map(|it| ((it.vni, it.ip), it.host));
            self.shared.order(|orders| {
                orders.local.extend(local);
                orders.bindings.extend(bindings);
            });
        }
    }

    /// Returns whether changes wait for the next tick.
    pub(super) fn has_changes(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Makes the thread remove the devices that the gateway made, and stop.
    pub(super) fn stop(&mut self) {
        self.shared.order(|orders| orders.stop = true);
    }

    /// Waits until the thread has stopped.
    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of control = \"kernel\" panicked");
        }
    }

    /// Returns the rows of one of [`TABLES`].
    pub(super) fn rows(&self, table: &TableSpec, gateway: &GatewayControl) -> Vec<Row> {
        let status = lock(&self.shared.status);
        if table.name == SYNC.name {
            let stats = gateway.external_stats();
            let [lag_us, max_lag_us] = self.lag.columns();
            let [macs, addresses] = status.writers;
            return vec![vec![
                status.mirror.messages.into(),
                status.malformed.into(),
                status.mirror.unsupported.into(),
                status.overflows.into(),
                status.dumps.into(),
                status.interrupted.into(),
                macs.written.into(),
                macs.removed.into(),
                addresses.written.into(),
                addresses.removed.into(),
                (macs.refused + addresses.refused).into(),
                (status.mirror.refused + stats.refused_macs + stats.refused_groups as u64).into(),
                self.applied.into(),
                stats.refused_routes.into(),
                status.nexthops.into(),
                (self.pending.len() + lock(&self.shared.outbox).changes.len()).into(),
                status.waiting.into(),
                lag_us,
                max_lag_us,
            ]];
        }
        let row = |segment: &EvpnSegment| {
            let it = status.segments.get(&segment.vni).cloned().unwrap_or_default();
            vec![
                segment.name.clone().into(),
                segment.vni.into(),
                it.vxlan.clone().into(),
                it.bridge.clone().into(),
                it.access.clone().into(),
                it.state().into(),
                it.counts.flood.into(),
                it.counts.macs.into(),
                it.counts.bindings.into(),
                it.counts.routes.into(),
                gateway.external_counts(segment.vni).0.into(),
                it.advertised[0].into(),
                it.advertised[1].into(),
            ]
        };
        self.segments.iter().map(row).collect()
    }
}

impl Drop for Evpn {
    fn drop(&mut self) {
        self.stop();
        self.join();
    }
}
