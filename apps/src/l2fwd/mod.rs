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
//! Flow rules (`[[rule]]`, `[rules]`; [`wirepath::rules`]) run around the forwarding: ingress rules before it
//! and egress rules after it.

mod arguments;
mod bridge;
mod config;
mod pairs;

use std::path::Path;
use std::time::Duration;

pub use arguments::Arguments;
pub use bridge::{Bridge, BridgeControl};
pub use config::{Config, Mode};
pub use pairs::{Pairs, PairsControl};
use wirepath_pipeline::{Control, Rates, RunOptions, Runtime, RuntimeError, Summary};
use wirepath_settings::Source;
use wirepath_wire::Parser;

use wirepath::cli::{self, CheckedPort, Failure, Service};
use wirepath::configuration::{ChangedParts, ChangedRules, ConfigObject, Reconfigure};
use wirepath::control_socket::ControlSocket;
use wirepath::rules;

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

/// Runs until `options` end the run. `source` and `path` are text and file of the configuration. If `live` is true,
/// rates are shown on the terminal. Also returns the report of the flow rules.
///
/// # Errors
/// If the ports or the control socket cannot be opened, or the rules cannot be carried out.
pub fn run(
    config: Config,
    (source, path): (&Source, Option<&Path>),
    options: &RunOptions,
    live: bool,
    common: &cli::Common,
) -> Result<(Summary, String), Failure> {
    let Config { ports, runtime, mode, rules, control, log: _ } = config;
    let mut runtime = Runtime::open(ports, runtime)?;
    check_opened(&runtime, &mode)?;
    if let Some(socket) = ControlSocket::open(&control, "l2fwd", path)? {
        runtime.set_management(Box::new(socket));
    }
    match mode {
        Mode::Pairs { peers, rewrite_mac } => {
            let stage = Pairs::new(&peers, rewrite_mac.then(|| runtime.ports()));
            let control = Monitor::new(stage.control(), live, common);
            rules::run(runtime, rules, |_| stage.clone(), control, (source, path), options)
        }
        Mode::Bridge { ageing } => {
            let (bridge, control) = Bridge::new(runtime.domain(), runtime.ports(), ageing);
            let control = Monitor::new(control, live, common);
            rules::run(runtime, rules, |_| bridge.clone(), control, (source, path), options)
        }
    }
}

/// Checks the properties that only open ports have.
fn check_opened(runtime: &Runtime, mode: &Mode) -> Result<(), RuntimeError> {
    match mode {
        Mode::Pairs { peers, .. } => runtime.check_superframes(|from, to| peers.get(from.index()) == Some(&to)),
        Mode::Bridge { .. } => runtime.check_superframes(|_, _| true),
    }
}

/// Finds what [`run`] would refuse on this machine. Returns the ports.
pub fn check_machine(config: Config) -> Result<Vec<CheckedPort>, Failure> {
    let Config { ports, runtime, mode, rules, control, log: _ } = config;
    cli::check_machine(ports, runtime, |runtime| {
        check_opened(runtime, &mode)?;
        rules.check_opened(runtime, Parser::default())?;
        ControlSocket::check(&control)
    })
}

/// Interval between two reports.
pub const REPORT_EVERY: Duration = Duration::from_secs(1);

/// A control that also shows rates on a terminal and reports to the service manager.
struct Monitor<C> {
    control: C,
    live: bool,
    service: Service,
    /// Options that precede the table `[log]` of the configuration.
    common: cli::Common,
}

impl<C> Monitor<C> {
    fn new(control: C, live: bool, common: &cli::Common) -> Self {
        Self { control, live, service: Service::new(), common: common.clone() }
    }
}

impl<C: Control> Reconfigure for Monitor<C> {
    type Setup = Config;

    fn read(source: &Source) -> Result<Config, Failure> {
        let config = Config::read(source)?;
        config.rules.check(&config.ports)?;
        Ok(config)
    }

    fn config_objects() -> &'static [&'static ConfigObject] {
        &[]
    }

    fn can_change(path: &[String]) -> bool {
        path.first().is_some_and(|table| table == "log")
    }

    fn check(&mut self, config: &Config, plane: &mut wirepath_pipeline::ControlPlane) -> Result<(), Failure> {
        cli::check_same_ports(plane.ports(), &config.ports)
    }

    fn apply(
        &mut self,
        config: Config,
        parts: ChangedParts,
        _: &mut wirepath_pipeline::ControlPlane,
    ) -> Result<Vec<String>, Failure> {
        if parts.log {
            self.common.configure_log(&config.log);
        }
        Ok(Vec::new())
    }

    fn changed_rules(&self) -> Option<ChangedRules> {
        None
    }
}

impl<C: Control> Control for Monitor<C> {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut self.control)
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
            cli::show_live(&cli::rates_table(rates));
        }
    }

    fn stop(&mut self, plane: &mut wirepath_pipeline::ControlPlane) {
        self.service.stop();
        self.control.stop(plane);
    }
}
