//! The program `l2fwd`: joins ports in pairs or bridges all ports.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use wirepath_apps::cli::{self, Failure};
use wirepath_apps::l2fwd::{self, Config, DEMONSTRATION, REPORT_EVERY};
use wirepath_pipeline::RunOptions;
use wirepath_settings::Source;

/// Forwards Ethernet frames between ports.
///
/// Without --config a demonstration runs for ten seconds: two ports generate frames and discard the frames
/// that they send. It needs no privileges.
#[derive(Debug, Parser)]
#[command(name = "l2fwd", version, term_width = cli::HELP_WIDTH, after_help = AFTER_HELP)]
struct Arguments {
    /// Configuration file (TOML); see below
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the configuration, and whether this machine has what it asks for, without starting anything
    ///
    /// --check=file checks the configuration only, for use on another machine. Errors and the exit
    /// code are those of the start.
    #[arg(
        long, requires = "config", value_name = "SCOPE", num_args = 0..=1, require_equals = true,
        default_missing_value = "machine"
    )]
    check: Option<cli::CheckScope>,

    /// Stop after this time [default: 10 in the demonstration, otherwise never]
    #[arg(short, long, value_name = "N", value_parser = cli::seconds)]
    seconds: Option<Duration>,

    #[command(flatten)]
    common: cli::Common,
}

const AFTER_HELP: &str = r#"Example configuration:
  [[port]]
  name = "left"             # its name in the rest of the file
  driver = "auto"           # or af_xdp, af_packet, tap, pcap, memory, null; see `wirepath devices`
  device = "eth1"

  [[port]]
  name = "right"
  device = "eth2"

  [l2fwd]
  mode = "pairs"            # or "bridge": learns addresses, joins all ports
  pairs = [["left", "right"]]
  rewrite_mac = false       # pairs: frames get the port's address as source
  # ageing = 300            # bridge: seconds until an address is forgotten

  [[rule]]                  # any number; see `wirepath flow items` and `wirepath flow actions`
  rule = "ingress prio 10: port id left / ipv4 dst 10.0.0.0/8 / tcp dst 23 => count, drop"

  [rules]
  file = "acl.rules"        # more rules, one per line; reloaded on SIGHUP

  [workers]
  cores = [1]               # one worker pinned to each core; default: one, not pinned
  idle = "adaptive"         # or "busy"

More examples are in configs/l2fwd-*.toml. SIGINT or SIGTERM stops cleanly.
Exit code: 0 success, 1 failure, 2 invalid usage or configuration."#;

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        let source = match &arguments.config {
            Some(path) => Source::load(path)?,
            None => Source::new("demonstration", DEMONSTRATION),
        };
        let config = Config::read(&source)?;
        config.rules.check(&config.ports)?;
        if let Some(scope) = arguments.check {
            let counts = [("ports", config.ports.len())];
            let machine = match scope {
                cli::CheckScope::File => None,
                cli::CheckScope::Machine => Some(l2fwd::check_machine(config)?),
            };
            return cli::report_check(&counts, machine.as_deref(), &[], arguments.common.json);
        }
        let live = !arguments.common.json && !arguments.common.quiet;
        if arguments.config.is_none() && live {
            cli::show(
                "Demonstration: frames between two generated ports. --config FILE forwards between real ports; \
                 see --help.\n",
            );
        }
        let default = arguments.config.is_none().then_some(Duration::from_secs(10));
        let options = RunOptions {
            duration: arguments.seconds.or(default),
            stop: Some(cli::Stop::on_signals()?.flag()),
            report_every: (live && cli::can_redraw()).then_some(REPORT_EVERY),
        };
        let (summary, rules) = l2fwd::run(config, arguments.config.as_deref(), &options, live)?;
        cli::print_summary(&summary, rules, arguments.common.json)?;
        match summary.failures.first() {
            Some(failure) => Err(Failure::failed(failure)),
            None => Ok(()),
        }
    })
}
