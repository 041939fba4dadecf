//! The program `l2fwd`: joins ports in pairs or bridges all ports.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use wirepath::cli::{self, Failure};
use wirepath_apps::l2fwd::{self, Arguments, Config, DEMONSTRATION, REPORT_EVERY};
use wirepath_pipeline::RunOptions;
use wirepath_settings::Source;

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        arguments.common.start_logging();
        let source = match &arguments.run.config {
            Some(path) => Source::load(path)?,
            None => Source::new("demonstration", DEMONSTRATION),
        };
        let config = Config::read(&source)?;
        arguments.common.configure_log(&config.log);
        config.rules.check(&config.ports)?;
        if let Some(scope) = arguments.run.check {
            let counts = [("ports", config.ports.len())];
            let machine = match scope {
                cli::CheckScope::File => None,
                cli::CheckScope::Machine => Some(l2fwd::check_machine(config)?),
            };
            return cli::report_check(&counts, machine.as_deref(), &[], arguments.common.json);
        }
        let live = !arguments.common.json && !arguments.common.quiet;
        if arguments.run.config.is_none() && live {
            cli::show(
                "Demonstration: frames between two generated ports. --config FILE forwards between real ports; \
                 see --help.\n",
            );
        }
        let default = arguments.run.config.is_none().then_some(Duration::from_secs(10));
        let options = RunOptions {
            duration: arguments.run.seconds.or(default),
            stop: Some(cli::Stop::on_signals()?.flag()),
            report_every: (live && cli::can_redraw()).then_some(REPORT_EVERY),
        };
        let (summary, rules) =
            l2fwd::run(config, (&source, arguments.run.config.as_deref()), &options, live, &arguments.common)?;
        cli::print_summary(&summary, rules, arguments.common.json)?;
        match summary.failures.first() {
            Some(failure) => Err(Failure::failed(failure)),
            None => Ok(()),
        }
    })
}
