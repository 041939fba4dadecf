//! Live rates and the final report of a gateway.

use std::time::Duration;

use wirepath_pipeline::registry::{Page, TableSpec};
use wirepath_pipeline::tunnel::counters::SegmentStats;
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_pipeline::{Control, ControlPlane, PortInfo, Punt, Rates};
use wirepath_pmd::port::{PortEvent, PortId};
use wirepath_wire::Parser;

use super::demo::Peer;
use super::evpn::{self, Evpn};
use super::kernel_underlay::{self, KernelUnderlay};
use super::state::{self, StateFile, StateSettings};
use super::{NicTunnels, rule_parser};
use wirepath::cli::{self, Failure, Rate, Service, Table};
use wirepath::privileges::{RefusalLog, check_kept, linux::CapabilitySet};

/// Time between two ticks while nothing happens.
const REST: Duration = Duration::from_millis(30);

/// Control handler of a gateway. It forwards all events to [`GatewayControl`], shows rates and reports to the service
/// manager.
#[derive(Debug)]
pub struct GatewayMonitor {
    /// Control handler of the gateway without output.
    pub gateway: GatewayControl,
    /// Simulated remote VTEP of the demonstration. It receives the punts of its own port.
    pub peer: Option<Peer>,
    /// If true, rates are shown on the terminal.
    pub live: bool,
    /// Options that precede the table `[log]` of the configuration.
    pub common: cli::Common,
    /// State of the tunnel offload to the NIC of the underlay.
    pub offload: NicTunnels,
    /// Exchange with the kernel's tables, if a segment needs it.
    evpn: Option<Evpn>,
    /// File for what is learned, if it is configured.
    state: Option<StateFile>,
    /// Exchange with the kernel about next hops, if it has the addresses of the underlay.
    underlay: Option<KernelUnderlay>,
    service: Service,
    refusals: RefusalLog,
    /// Statistics of the segments at the previous output of rates.
    last_stats: Vec<SegmentStats>,
    /// Time of the previous output of rates, in seconds since the start.
    last_elapsed: f64,
}

impl GatewayMonitor {
    /// Creates the control handler of a gateway.
    pub fn new(gateway: GatewayControl, peer: Option<Peer>, live: bool, common: cli::Common) -> Self {
        Self {
            gateway,
            peer,
            live,
            common,
            offload: NicTunnels::default(),
            evpn: None,
            state: None,
            underlay: None,
            service: Service::new(),
            refusals: RefusalLog::default(),
            last_stats: Vec::new(),
            last_elapsed: 0.0,
        }
    }

    /// Begins the exchange with the kernel's tables if a segment or the underlay needs it. The ports are started: the
    /// kernel gets no tunnel packets any more.
    ///
    /// # Errors
    /// If the kernel refuses a socket or a device.
    pub fn start_exchange(&mut self, plane: &ControlPlane) -> Result<(), Failure> {
        let config = self.gateway.config();
        if let Some(port) = plane.ports().get(config.underlay.port).filter(|_| kernel_underlay::is_needed(config)) {
            self.underlay = Some(KernelUnderlay::start(port.capabilities.interface(), plane.waker())?);
        }
        let segments = evpn::segments(self.gateway.config(), self.gateway.mac());
        if !segments.is_empty() {
            self.evpn = Some(Evpn::start(segments, plane.waker())?);
        }
        Ok(())
    }

    /// Exchanges changes with the kernel's tables.
    fn exchange(&mut self, plane: &mut ControlPlane) {
        if let Some(evpn) = &mut self.evpn {
            evpn.tick(&mut self.gateway, plane);
        }
        if let Some(underlay) = &mut self.underlay
            && let Some(port) = plane.ports().get(self.gateway.config().underlay.port)
        {
            let device = port.capabilities.interface().to_owned();
            underlay.tick(&device, &mut self.gateway, plane);
        }
    }

    /// Restores what a former process has learned, and begins to keep it in the file, if there are settings. Call this
    /// before the workers start.
    ///
    /// # Errors
    /// If the folder of the file cannot be written.
    pub fn start_state(&mut self, settings: Option<StateSettings>, ports: &[PortInfo]) -> Result<(), Failure> {
        if let Some(settings) = settings {
            self.state = Some(StateFile::start(settings, &mut self.gateway, ports)?);
        }
        Ok(())
    }

    /// Returns the capabilities that the exchange with the kernel's tables needs.
    pub fn privileges(&self) -> CapabilitySet {
        exchange_privileges(self.gateway.config())
    }

    /// Checks that the exchange could begin for a changed configuration.
    ///
    /// # Errors
    /// If the program has given up the capability for it.
    pub(super) fn check_exchange(&self, config: &GatewayConfig) -> Result<(), Failure> {
        check_kept("control = \"kernel\"", exchange_privileges(config), "tap")
    }

    /// Begins or continues the exchange for the segments of a changed configuration, without waiting for the kernel.
    ///
    /// # Errors
    /// If there is no room for a thread.
    pub(super) fn update_evpn(&mut self, plane: &ControlPlane) -> Result<(), Failure> {
        let segments = evpn::segments(self.gateway.config(), self.gateway.mac());
        match &mut self.evpn {
            Some(evpn) => evpn.set_segments(segments),
            None if segments.is_empty() => {}
            None => self.evpn = Some(Evpn::begin(segments, plane.waker())?.0),
        }
        Ok(())
    }

    /// Returns the table of the rates of the segments, averaged since the previous call.
    fn segment_rates(&mut self, elapsed: f64) -> String {
        let now: Vec<SegmentStats> =
            (0..self.gateway.config().segments.len()).map(|i| self.gateway.segment_stats(i)).collect();
        let seconds = (elapsed - self.last_elapsed).max(1e-9);
        let id_name = self.gateway.config().underlay.kind.id_name;
        let headings = ["INTO TUNNELS pps", "OUT OF TUNNELS pps", "FLOODED pps", "LEARNED"];
        let columns = ["SEGMENT", id_name].map(|name| (name.to_owned(), false));
        let mut table = Table::with_columns(columns.into_iter().chain(headings.map(|name| (name.to_owned(), true))));
        for (i, (segment, stats)) in self.gateway.config().segments.iter().zip(&now).enumerate() {
            let old = self.last_stats.get(i).copied().unwrap_or_default();
            let rate =
                |new: u64, old: u64| Rate(new.saturating_sub(old) as f64 / seconds).to_string().trim_end().to_owned();
            table.push([
                segment.name.clone(),
                segment.vni.map_or_else(|| "-".to_owned(), |vni| vni.to_string()),
                rate(stats.overlay_tx.0, old.overlay_tx.0),
                rate(stats.overlay_rx.0, old.overlay_rx.0),
                rate(stats.flooded, old.flooded),
                self.gateway.learn_stats(i).learned.to_string(),
            ]);
        }
        self.last_stats = now;
        self.last_elapsed = elapsed;
        table.to_string()
    }
}

/// Returns the capabilities that the exchange with the kernel's tables needs. It begins when the program has given up
/// all others.
fn exchange_privileges(config: &GatewayConfig) -> CapabilitySet {
    let is_needed = kernel_underlay::is_needed(config) || evpn::is_needed(config);
    if is_needed { CapabilitySet::NET_ADMIN } else { CapabilitySet::empty() }
}

/// Text of the final report of a gateway: a table of the segments and one of the next hops.
#[derive(Debug)]
pub struct Report<'g>(pub &'g GatewayControl);

impl std::fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new([
            "SEGMENT",
            self.0.config().underlay.kind.id_name,
            "FROM LOCAL",
            "INTO TUNNELS",
            "OUT OF TUNNELS",
            "TO LOCAL",
            "FLOODED",
            "UNKNOWN",
            "TOO BIG",
            "LEARNED",
            "MOVED",
            "AGED",
        ]);
        for (i, segment) in self.0.config().segments.iter().enumerate() {
            let (s, l) = (self.0.segment_stats(i), self.0.learn_stats(i));
            table.row([
                segment.name.clone(),
                segment.vni.map_or_else(|| "-".to_owned(), |vni| vni.to_string()),
                s.local_rx.0.to_string(),
                s.overlay_tx.0.to_string(),
                s.overlay_rx.0.to_string(),
                s.local_tx.0.to_string(),
                s.flooded.to_string(),
                s.unknown_unicast.to_string(),
                s.too_big.to_string(),
                l.learned.to_string(),
                l.moved.to_string(),
                l.aged.to_string(),
            ]);
        }
        write!(f, "{table}")?;
        let mut neighbours = Table::new(["NEXT HOP", "STATE", "ADDRESS"]);
        for (ip, state, mac) in self.0.neighbours() {
            let mac = mac.map_or_else(|| "-".to_owned(), |mac| mac.to_string());
            neighbours.row([ip.to_string(), state.name().to_owned(), mac]);
        }
        write!(f, "{neighbours}")
    }
}

impl Control for GatewayMonitor {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut self.gateway)
    }

    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        match &mut self.peer {
            Some(peer) if punt.packet.in_port() == Some(peer.port()) => peer.answer(punt.packet, plane),
            _ => self.gateway.punt(punt, plane),
        }
    }

    fn tables(&mut self) -> Vec<&'static TableSpec> {
        let own = vec![&kernel_underlay::TABLE, &state::TABLE];
        [self.gateway.tables(), evpn::TABLES.to_vec(), own].concat()
    }

    fn list(&mut self, table: &'static TableSpec, page: &mut Page<'_>, plane: &mut ControlPlane) {
        if table.name == state::TABLE.name {
            return page.extend(&self.state, |state| state.row());
        }
        if table.name == kernel_underlay::TABLE.name {
            page.extend(self.underlay.iter().flat_map(KernelUnderlay::rows), |row| row);
            return;
        }
        if !evpn::TABLES.iter().any(|own| own.name == table.name) {
            return self.gateway.list(table, page, plane);
        }
        if let Some(evpn) = &self.evpn {
            page.extend(evpn.rows(table, &self.gateway), |row| row);
        }
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.gateway.tick(plane);
        self.exchange(plane);
        if let Some(state) = &mut self.state {
            state.tick(&mut self.gateway, plane);
        }
        self.service.tick(plane);
        self.refusals.tick();
    }

    fn tick_interval(&mut self) -> Duration {
        let waits = self.evpn.as_ref().is_some_and(Evpn::has_changes);
        if self.gateway.is_at_rest() && !waits { REST } else { Duration::ZERO }
    }

    fn woken(&mut self, plane: &mut ControlPlane) {
        self.exchange(plane);
    }

    fn parser(&mut self) -> Parser {
        rule_parser(self.gateway.config())
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        self.service.port_event(port, event);
        self.gateway.port_event(port, event, plane);
    }

    fn rates(&mut self, rates: &Rates) {
        if self.live {
            let segments = self.segment_rates(rates.elapsed.as_secs_f64());
            cli::show_live(&(cli::rates_table(rates) + &segments));
        }
    }

    fn before_stop(&mut self, plane: &mut ControlPlane) {
        if let Some(evpn) = &mut self.evpn {
            evpn.stop();
        }
        if let Some(state) = &mut self.state {
            state.finish(&mut self.gateway, plane);
        }
        self.gateway.before_stop(plane);
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        // Waits until the devices are removed.
        self.evpn = None;
        // Waits until the file is written.
        self.state = None;
        self.service.stop();
        self.gateway.stop(plane);
        self.refusals.finish();
    }
}
