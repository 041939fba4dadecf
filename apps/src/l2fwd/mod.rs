//! `l2fwd`: the smallest honest program. Joins ports in pairs, or bridges them all.
//!
//! Configuration beside `[[port]]`, `[workers]` and `[pool]`:
//!
//! ```toml
//! [l2fwd]
//! mode = "pairs"              # or "bridge"
//! pairs = [["east", "west"]]  # mode "pairs"; default: the ports two by two, in order
//! rewrite_mac = false         # mode "pairs": frames leave with the port's address as source
//! ageing = 300                # mode "bridge": seconds until an address that was not seen is forgotten; 0: never
//! ```
//!
//! Flow rules (`[[rule]]`, `[rules]`; [`crate::rules`]) stand around that: ingress before, egress behind.

mod bridge;
mod config;
mod pairs;

use std::time::Duration;

pub use bridge::{Bridge, BridgeControl};
pub use config::{Config, Mode};
pub use pairs::Pairs;
use wirepath_pipeline::{Control, Rates, RunOptions, Runtime, Summary};

use crate::cli::{Failure, print};
use crate::rules;

/// The built-in demonstration: two ports that generate frames and swallow what is sent to them.
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

/// Runs until `options` say stop. `live`: rates go to standard output. Also gives what is to be printed of the flow rules.
pub fn run(config: Config, options: &RunOptions, live: bool) -> Result<(Summary, String), Failure> {
    let Config { ports, runtime, mode, rules } = config;
    let runtime = Runtime::open(ports, runtime)?;
    match mode {
        Mode::Pairs { peers, rewrite_mac } => {
            let stage = Pairs::new(&peers, rewrite_mac.then(|| runtime.ports()));
            rules::run(runtime, rules, |_| stage.clone(), Live { control: (), live }, options, live)
        }
        Mode::Bridge { ageing } => {
            let (bridge, control) = Bridge::new(runtime.domain(), runtime.ports(), ageing);
            rules::run(runtime, rules, |_| bridge.clone(), Live { control, live }, options, live)
        }
    }
}

/// Time between two reports.
pub const REPORT_EVERY: Duration = Duration::from_secs(1);

/// A control that prints rates besides.
struct Live<C> {
    control: C,
    live: bool,
}

impl<C: Control> Control for Live<C> {
    fn punt(&mut self, punt: wirepath_pipeline::Punt, plane: &mut wirepath_pipeline::ControlPlane) {
        self.control.punt(punt, plane);
    }

    fn learn(&mut self, learn: wirepath_pipeline::Learn, plane: &mut wirepath_pipeline::ControlPlane) {
        self.control.learn(learn, plane);
    }

    fn tick(&mut self, plane: &mut wirepath_pipeline::ControlPlane) {
        self.control.tick(plane);
    }

    fn port_event(
        &mut self,
        port: wirepath_pmd::port::PortId,
        event: &wirepath_pmd::port::PortEvent,
        plane: &mut wirepath_pipeline::ControlPlane,
    ) {
        self.control.port_event(port, event, plane);
    }

    fn rates(&mut self, rates: &Rates) {
        if self.live {
            // Nobody reads: that is no reason to stop forwarding.
            let _ = print(format_args!("{rates}\n"));
        }
    }

    fn summary(&mut self) -> Option<serde_json::Value> {
        self.control.summary()
    }
}
