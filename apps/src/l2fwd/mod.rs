//! The program `l2fwd`: joins ports in pairs or bridges all ports.
//!
//! Configuration in addition to `[[port]]`, `[workers]` and `[pool]`:
//!
//! ```toml
//! [l2fwd]
//! mode = "pairs"              # or "bridge"
//! pairs = [["east", "west"]]  # mode "pairs"; default: the ports two by two, in order
//! rewrite_mac = false         # mode "pairs": frames leave with the port's address as source
//! ageing = 300                # mode "bridge": seconds until an address that was not seen is forgotten; 0: never
//! ```
//!
//! Flow rules (`[[rule]]`, `[rules]`; [`crate::rules`]) run around the forwarding: ingress rules before it
//! and egress rules after it.

mod arguments;
mod bridge;
mod config;
mod pairs;

use std::time::Duration;

pub use arguments::Arguments;
pub use bridge::{Bridge, BridgeControl};
pub use config::{Config, Mode};
pub use pairs::Pairs;
use wirepath_pipeline::{Control, Rates, RunOptions, Runtime, Summary};

use crate::cli::{Failure, Service, show};
use crate::rules;

/// Configuration of the built-in demonstration: two ports that generate frames and discard the frames that
/// they send.
pub const DEMONSTRATION: &str = r#"
[[port]]
name = "east"
driver = "null"
[port.null]
source = "udp4"
flows = 1000

[[port]]
name = "west"
driver = "null"
[port.null]
source = "udp4"
flows = 1000

[l2fwd]
mode = "pairs"
rewrite_mac = true
"#;

/// Runs until `options` end the run. If `live` is true, rates go to standard output. Also returns the report
/// of the flow rules.
pub fn run(config: Config, options: &RunOptions, live: bool) -> Result<(Summary, String), Failure> {
    let Config { ports, runtime, mode, rules, log: _ } = config;
    let runtime = Runtime::open(ports, runtime)?;
    match &mode {
        Mode::Pairs { peers, .. } => runtime.check_superframes(|from, to| peers.get(from.index()) == Some(&to))?,
        Mode::Bridge { .. } => runtime.check_superframes(|_, _| true)?,
    }
    match mode {
        Mode::Pairs { peers, rewrite_mac } => {
            let stage = Pairs::new(&peers, rewrite_mac.then(|| runtime.ports()));
            rules::run(runtime, rules, |_| stage.clone(), Monitor::new((), live), options, live)
        }
        Mode::Bridge { ageing } => {
            let (bridge, control) = Bridge::new(runtime.domain(), runtime.ports(), ageing);
            rules::run(runtime, rules, |_| bridge.clone(), Monitor::new(control, live), options, live)
        }
    }
}

/// Interval between two reports.
pub const REPORT_EVERY: Duration = Duration::from_secs(1);

/// A control that also prints rates and reports to the service manager.
struct Monitor<C> {
    control: C,
    live: bool,
    service: Service,
}

impl<C> Monitor<C> {
    fn new(control: C, live: bool) -> Self {
        Self { control, live, service: Service::new() }
    }
}

impl<C: Control> Control for Monitor<C> {
    fn punt(&mut self, punt: wirepath_pipeline::Punt, plane: &mut wirepath_pipeline::ControlPlane) {
        self.control.punt(punt, plane);
    }

    fn learn(&mut self, learn: wirepath_pipeline::Learn, plane: &mut wirepath_pipeline::ControlPlane) {
        self.control.learn(learn, plane);
    }

    fn tick(&mut self, plane: &mut wirepath_pipeline::ControlPlane) {
        self.control.tick(plane);
        self.service.tick(plane);
    }

    fn port_event(
        &mut self,
        port: wirepath_pmd::port::PortId,
        event: &wirepath_pmd::port::PortEvent,
        plane: &mut wirepath_pipeline::ControlPlane,
    ) {
        self.service.port_event(port, event);
        self.control.port_event(port, event, plane);
    }

    fn rates(&mut self, rates: &Rates) {
        if self.live {
            show(format_args!("{rates}\n"));
        }
    }

    fn stop(&mut self, plane: &mut wirepath_pipeline::ControlPlane) {
        self.service.stop();
        self.control.stop(plane);
    }

    fn summary(&mut self) -> Option<serde_json::Value> {
        self.control.summary()
    }
}
