use serde_json::Value;
use wirepath_pipeline::tunnel::GatewayControl;
use wirepath_pipeline::tunnel::counters::SegmentStats;
use wirepath_pipeline::{Control, ControlPlane, Learn, Punt, Rates};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::Packet;
use wirepath_pmd::port::{PortEvent, PortId};

use super::Offload;
use super::capture::Capture;
use super::demo::Peer;
use crate::cli::{self, Rate, Table};

/// The gateway's control, and what is shown of it meanwhile.
#[derive(Debug)]
pub struct Reporting {
    /// The gateway.
    pub gateway: GatewayControl,
    /// The other end of the demonstration.
    pub peer: Option<Peer>,
    /// Show rates.
    pub live: bool,
    /// Where dropped packets are written.
    pub capture: Option<Capture>,
    /// What the NIC of the underlay does.
    pub offload: Offload,
    before: Vec<SegmentStats>,
    at: f64,
}

impl Reporting {
    /// Shows the rates of a gateway if it is to be `live`.
    pub fn new(gateway: GatewayControl, peer: Option<Peer>, live: bool) -> Self {
        Self { gateway, peer, live, capture: None, offload: Offload::default(), before: Vec::new(), at: 0.0 }
    }

    fn segments(&mut self, elapsed: f64) -> String {
        let now: Vec<SegmentStats> =
            (0..self.gateway.config().segments.len()).map(|i| self.gateway.segment_stats(i)).collect();
        let time = (elapsed - self.at).max(1e-9);
        let mut text = String::new();
        for (i, (segment, stats)) in self.gateway.config().segments.iter().zip(&now).enumerate() {
            let old = self.before.get(i).copied().unwrap_or_default();
            let rate = |new: u64, old: u64| Rate(new.saturating_sub(old) as f64 / time);
            text += &format!(
                "         segment {} (VNI {}): into tunnels {}pps, out of tunnels {}pps, flooded {}pps, {} addresses learned\n",
                segment.name,
                segment.vni,
                rate(stats.overlay_tx.0, old.overlay_tx.0),
                rate(stats.overlay_rx.0, old.overlay_rx.0),
                rate(stats.flooded, old.flooded),
                self.gateway.learn_stats(i).learned,
            );
        }
        self.before = now;
        self.at = elapsed;
        text
    }
}

/// The segments of a gateway as a table, for the end.
#[derive(Debug)]
pub struct Report<'g>(pub &'g GatewayControl);

impl std::fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new([
            "SEGMENT",
            "VNI",
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
                segment.vni.to_string(),
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

impl Control for Reporting {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        match &mut self.peer {
            Some(peer) if punt.packet.in_port() == peer.port() => peer.answer(punt.packet, plane),
            _ => self.gateway.punt(punt, plane),
        }
    }

    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        self.gateway.learn(learn, plane);
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.gateway.tick(plane);
        if let Some(capture) = &mut self.capture {
            capture.flush();
        }
    }

    fn refused(&mut self, packet: Packet, reason: DropReason) {
        if let Some(capture) = &mut self.capture {
            capture.write(&packet, reason);
        }
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        self.gateway.port_event(port, event, plane);
    }

    fn rates(&mut self, rates: &Rates) {
        if self.live {
            let segments = self.segments(rates.elapsed.as_secs_f64());
            // A closed standard output ends the display, not the gateway.
            let _ = cli::print(format_args!("{rates}\n{segments}"));
        }
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        self.gateway.stop(plane);
    }

    fn summary(&mut self) -> Option<Value> {
        self.gateway.summary()
    }
}
