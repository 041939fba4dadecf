//! The program `tunnel-gateway`: VXLAN between local segments and remote VTEPs.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use wirepath::Config;
use wirepath::capture::FileCapture;
use wirepath::cli::{self, Failure};
use wirepath::configuration::LiveConfiguration;
use wirepath::control_socket::ControlSocket;
use wirepath::rules::{ControlWithRules, RuleSettings};
use wirepath_apps::gateway::demo::{self, Demo, Peer};
use wirepath_apps::gateway::{
    Arguments, GatewayMonitor, Report, Setup, StateSettings, check_opened, check_tags, report_nic_tunnels, rule_parser,
    update_nic_tunnels, warn_of_lost_tags,
};
use wirepath_pipeline::observe::CaptureSpec;
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_pipeline::{ControlPlane, RunOptions, Runtime, Summary};
use wirepath_pmd::drivers::r#virtual::pcap::MAX_FRAME;
use wirepath_settings::Source;

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        run(&arguments)
    })
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let demonstration = arguments.run.config.is_none();
    let source = match &arguments.run.config {
        Some(path) => Source::load(path)?,
        None => Source::new("the demonstration", demo::CONFIG),
    };
    let mut setup = Setup::read(&source)?;
    arguments.common.configure_log(&setup.common.log);
    setup.common.check_rules()?;
    if !demonstration {
        setup.check_ports_used()?;
    }
    if let Some(scope) = arguments.run.check {
        return check(setup, scope, arguments.common.json);
    }
    let live = !arguments.common.json && !arguments.common.quiet;
    let stop = cli::Stop::on_signals()?;
    let options = RunOptions {
        duration: arguments.run.seconds.or(demonstration.then_some(Duration::from_secs(10))),
        stop: Some(stop.flag()),
        report_every: (live && cli::can_redraw()).then_some(Duration::from_secs(1)),
    };
    let (control, rules) = (setup.common.control.clone(), std::mem::take(&mut setup.common.rules));
    let state = setup.state.take();
    let privileges = setup.common.privileges.clone();
    privileges.before_open();
    let (mut runtime, config) = setup.open()?;
    if let Some(socket) = ControlSocket::open(&control, "tunnel-gateway", arguments.run.config.as_deref())? {
        runtime.set_management(Box::new(socket));
    }
    let _capture = arguments.capture_drops.as_deref().map(|path| capture_drops(path, &runtime, &config)).transpose()?;
    let workers = runtime.config().workers.len();
    let gateway = GatewayControl::new(&config, runtime.ports(), runtime.domain(), workers, 0);
    if demonstration && live {
        cli::show(
            "source -> gateway -> VXLAN -> a VTEP that sends everything back -> gateway -> sink; Ctrl-C ends it\n",
        );
    }
    let peer = runtime.port(demo::PEER).filter(|_| demonstration).map(|port| Peer::new(port.id, port.mac));
    let mut control = GatewayMonitor::new(gateway, peer, live, arguments.common.clone());
    control.start_state(state, runtime.ports())?;
    privileges.apply_to(&mut runtime, control.privileges(), arguments.run.config.as_deref());
    let from = (&source, arguments.run.config.as_deref());
    let (summary, control, rules) = run_gateway(runtime, &config, rules, control, from, &options)?;
    let report = format!("{rules}{}", Report(&control.gateway));
    cli::print_summary(&summary, report, arguments.common.json)?;
    if summary.failures.is_empty() { Ok(()) } else { Err(Failure::failed(summary.failures.join("; "))) }
}

/// Writes all dropped packets to a file.
fn capture_drops(path: &Path, runtime: &Runtime, config: &GatewayConfig) -> Result<FileCapture, Failure> {
    let file = FileCapture::create(path)?;
    let spec = CaptureSpec {
        segment: None,
        rx: false,
        tx: false,
        drops: true,
        reason: None,
        port: None,
        pattern: None,
        snap: MAX_FRAME,
        rate: None,
    };
    let reader = runtime.start_capture(spec, rule_parser(config)).map_err(Failure::failed)?;
    let ports: Vec<String> = runtime.ports().iter().map(|port| port.name.clone()).collect();
    FileCapture::start(path, file, reader, &ports)
}

/// Checks the configuration, and this machine if `scope` says so.
fn check(setup: Setup, scope: cli::CheckScope, json: bool) -> Result<(), Failure> {
    let Setup { common: Config { ports, runtime, rules, control, .. }, gateway, state } = setup;
    let (underlay, segments) = (&gateway.underlay, &gateway.segments);
    let remotes = segments.iter().map(|segment| segment.remotes.len()).sum();
    let counts = [("ports", ports.len()), ("segments", segments.len()), ("remotes", remotes)];
    let configured = ports.get(underlay.port).and_then(|port| port.mtu);
    let machine = match scope {
        cli::CheckScope::File => None,
        cli::CheckScope::Machine => Some(cli::check_machine(ports, runtime, |runtime| {
            check_opened(runtime.ports(), &gateway)?;
            rules.check_opened(runtime, rule_parser(&gateway))?;
            state.as_ref().map_or(Ok(()), StateSettings::check)?;
            ControlSocket::check(&control)
        })?),
    };
    let mtu = machine.as_ref().map_or(configured, |ports| ports.get(underlay.port).map(|port| port.mtu));
    let inner = |segment| mtu.map(|mtu| gateway.inner_mtu(segment, mtu));
    let inner: Vec<_> = segments.iter().map(|segment| (segment.name.clone(), inner(segment))).collect();
    cli::report_check(&counts, machine.as_deref(), &inner, json)
}

/// Runs the gateway from start to stop. Also returns the report of the flow rules.
fn run_gateway(
    mut runtime: Runtime,
    config: &GatewayConfig,
    rules: RuleSettings,
    mut control: GatewayMonitor,
    (source, path): (&Source, Option<&Path>),
    options: &RunOptions,
) -> Result<(Summary, GatewayMonitor, String), Failure> {
    let failed = Failure::failed;
    if let Some(peer) = control.peer.as_ref().map(Peer::port) {
        let mut running =
            runtime.start(|worker| Demo { gateway: control.gateway.stage(worker), peer }).map_err(failed)?;
        running.run(&mut control, options);
        return Ok((running.stop(&mut control), control, String::new()));
    }
    let control = ControlWithRules::begin(&mut runtime, rules, rule_parser(config), control)?;
    let mut control = LiveConfiguration::new(control, source, path);
    let rules = &mut control.control;
    rules.update_nics = Some(update_nic_tunnels);
    rules.before_list = Some(report_nic_tunnels);
    let mut running = runtime
        .start(|worker| {
            let gateway = rules.control.gateway.stage(worker);
            rules.stage(worker, gateway)
        })
        .map_err(failed)?;
    let checked = check_started_ports(running.plane(), config)
        .and_then(|()| control.control.started(running.plane()))
        .and_then(|()| control.control.control.start_exchange(running.plane()));
    if let Err(refused) = checked {
        running.stop(&mut control);
        return Err(refused);
    }
    running.run(&mut control, options);
    let summary = running.stop(&mut control);
    let rules = control.control;
    let report = rules.report();
    Ok((summary, rules.control, report))
}

/// Checks the ports again after their start, when their mode is final.
fn check_started_ports(plane: &ControlPlane, config: &GatewayConfig) -> Result<(), Failure> {
    check_tags(plane.ports(), config)?;
    warn_of_lost_tags(plane.ports(), config);
    Ok(())
}
