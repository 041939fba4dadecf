//! `tunnel-gateway`: VXLAN between local segments and remote VTEPs.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use wirepath_apps::cli::{self, Failure};
use wirepath_apps::gateway::demo::{self, Demo, Peer};
use wirepath_apps::gateway::{Capture, EXAMPLE, Report, Reporting, Setup, check_tags, leave_to_nic, warn_of_lost_tags};
use wirepath_apps::rules::{Hardware, RuleSettings, WithRules};
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_pipeline::{ControlPlane, PortInfo, RunOptions, Runtime, Summary};
use wirepath_pmd::port::Offloads;
use wirepath_pmd::settings::Source;
use wirepath_wire::Tunnels;

/// Joins local segments (a port, or a VLAN on a port) to VXLAN segments over IPv4 and IPv6.
///
/// Without --config a demonstration runs, which needs no privileges and no interfaces: a source of traffic, the gateway, and a remote
/// VTEP behind a cable in memory that sends every frame back. It stops after ten seconds, or as --seconds says.
///
/// With --config FILE the gateway runs on the ports of that file until it is stopped (Ctrl-C) or --seconds are over. It resolves its next
/// hops by ARP and neighbour discovery, answers for its addresses (which must not be configured in the kernel), learns who is behind
/// which remote, and replicates broadcast, multicast and unknown unicast to all remotes of a segment.
#[derive(Debug, Parser)]
#[command(name = "tunnel-gateway", version, after_long_help = after_help())]
struct Arguments {
    /// Configuration to run; see below for one to begin with
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the configuration and end: nothing is opened
    #[arg(long, requires = "config")]
    check: bool,

    /// Stop after this many seconds
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    seconds: Option<u64>,

    /// Write packets that are dropped to this pcapng file, each with its reason as comment
    #[arg(long, value_name = "FILE")]
    capture_drops: Option<PathBuf>,

    #[command(flatten)]
    common: cli::Common,
}

fn after_help() -> String {
    let indented: String = EXAMPLE.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "A configuration to begin with:\n\n{indented}\nFlow rules stand in front of the gateway and behind it ([[rule]] tables, or [rules] file = \"FILE\", which is read again \
         on SIGHUP):\n\n    [[rule]]\n    rule = \"ingress prio 1: port id wan / udp / vxlan vni 42 / ipv4 dst 10.1.255.0/24 => count, drop\"\n\n\
         Their words: `wirepath flow items`, `wirepath flow actions`. More under configs/ of the source tree, each key explained.\n\n\
         Exit codes: 0 success, 1 failure, 2 bad usage or configuration (nothing was started).\n\n\
         Examples:\n    tunnel-gateway                                  # the demonstration\n    \
         tunnel-gateway --config gateway.toml --check\n    \
         tunnel-gateway --config gateway.toml --seconds 60 --json"
    )
}

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        run(&arguments)
    })
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let demonstration = arguments.config.is_none();
    let source = match &arguments.config {
        Some(path) => Source::load(path)?,
        None => Source::new("the demonstration", demo::CONFIG),
    };
    let setup = Setup::read(&source)?;
    if !demonstration {
        setup.check_ports_used()?;
    }
    if arguments.check {
        let segments = &setup.gateway.segments;
        let remotes = segments.iter().map(|segment| segment.remotes.len()).sum();
        let counts = [("ports", setup.ports.len()), ("segments", segments.len()), ("remotes", remotes)];
        return cli::print_check(&counts, arguments.common.json);
    }
    let stop = cli::Stop::on_signals()?;
    let seconds = arguments.seconds.or(demonstration.then_some(10));
    let options = RunOptions {
        duration: seconds.map(Duration::from_secs),
        stop: Some(stop.flag()),
        report_every: Some(Duration::from_secs(1)),
    };
    let live = !arguments.common.json && !arguments.common.quiet;
    let (mut runtime, config, rules) = setup.open()?;
    let capture = arguments.capture_drops.as_deref().map(Capture::create).transpose()?;
    if capture.is_some() {
        runtime.capture_drops();
    }
    let workers = runtime.config().workers.len();
    let gateway = GatewayControl::new(&config, runtime.ports(), runtime.domain(), workers, 0);
    if demonstration && live {
        cli::print(
            "source -> gateway -> VXLAN -> a VTEP that sends everything back -> gateway -> sink; Ctrl-C ends it\n",
        )?;
    }
    let peer = runtime.port(demo::PEER).filter(|_| demonstration).map(|port| Peer::new(port.id, port.mac));
    let mut control = Reporting::new(gateway, peer, live);
    control.capture = capture;
    let (summary, control, rules) = carry(runtime, &config, rules, control, &options, live)?;
    if arguments.common.json {
        cli::print_json(&summary.to_json())?;
    } else {
        cli::print(format_args!("{summary}{rules}{}", Report(&control.gateway)))?;
    }
    if summary.failures.is_empty() { Ok(()) } else { Err(Failure::failed(summary.failures.join("; "))) }
}

/// From start to stop. Also gives what is to be printed of the flow rules.
fn carry(
    mut runtime: Runtime,
    config: &GatewayConfig,
    rules: RuleSettings,
    mut control: Reporting,
    options: &RunOptions,
    live: bool,
) -> Result<(Summary, Reporting, String), Failure> {
    let failed = Failure::failed;
    if let Some(peer) = control.peer.as_ref().map(Peer::port) {
        let mut running =
            runtime.start(|worker| Demo { gateway: control.gateway.stage(worker), peer }).map_err(failed)?;
        running.run(&mut control, options);
        return Ok((running.stop(&mut control), control, String::new()));
    }
    let marks = |port: &PortInfo| port.capabilities.offloads.contains(Offloads::RX_MARK);
    let nic = rules.hardware == Hardware::Auto && runtime.ports().get(config.underlay.port).is_some_and(marks);
    if rules.is_empty() && !nic {
        let mut running = runtime.start(|worker| control.gateway.stage(worker)).map_err(failed)?;
        if let Err(refused) = certain(running.plane(), config) {
            running.stop(&mut control);
            return Err(refused);
        }
        running.run(&mut control, options);
        return Ok((running.stop(&mut control), control, String::new()));
    }
    // Rules see VXLAN where the gateway's tunnels are.
    let tunnels = Tunnels::default().with_vxlan(Some(config.underlay.udp_port));
    let parser = wirepath_wire::Parser { tunnels, ..wirepath_wire::Parser::default() };
    let mut control = WithRules::begin(&mut runtime, rules, parser, control, live)?;
    control.leave_to_nics = Some(leave_to_nic);
    let mut running = runtime
        .start(|worker| {
            let gateway = control.control.gateway.stage(worker);
            control.stage(worker, gateway)
        })
        .map_err(failed)?;
    let checked = certain(running.plane(), config).and_then(|()| control.started(running.plane()));
    if let Err(refused) = checked {
        running.stop(&mut control);
        return Err(refused);
    }
    running.run(&mut control, options);
    let summary = running.stop(&mut control);
    let report = control.report();
    Ok((summary, control.control, report))
}

/// Looks at the ports once more: which mode a port is in is certain only when it is started.
fn certain(plane: &ControlPlane, config: &GatewayConfig) -> Result<(), Failure> {
    check_tags(plane.ports(), config)?;
    warn_of_lost_tags(plane.ports(), config);
    Ok(())
}
