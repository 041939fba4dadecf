//! A packet program from its arguments to its summary.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches};
use serde_json::Value;
use wirepath_pipeline::{Control, ControlPlane, Rates, RunOptions, Runtime, Stage, Summary, WorkerInfo};
use wirepath_pmd::port::{PortEvent, PortId};
use wirepath_privileges::CapabilitySet;
use wirepath_settings::Source;
use wirepath_wire::Parser;

use crate::cli::{self, CheckScope, Failure, Service, Stop};
use crate::config::{AppSettings, Config};
use crate::configuration::{ChangedParts, ChangedPorts, ChangedRules, ConfigObject, PortNumbers, Reconfigure};
use crate::control_socket::ControlSocket;
use crate::privileges::RefusalLog;
use crate::rules::{self, RuleSettings};

/// Options of a packet program. A program with more options flattens them into its own:
///
/// ```
/// #[derive(clap::Parser)]
/// struct Arguments {
///     #[command(flatten)]
///     app: wirepath::AppArguments,
///     /// Packets per second that may pass
///     #[arg(long, default_value_t = 1000)]
///     rate: u64,
/// }
/// ```
#[derive(Clone, Debug, Default, clap::Args)]
pub struct AppArguments {
    /// Configuration and length of the run.
    #[command(flatten)]
    pub run: cli::RunArguments,
    /// Options of every program.
    #[command(flatten)]
    pub common: cli::Common,
}

/// Result of building a program on its opened ports: a function that makes the stages of a worker, and the control.
pub type Built<M, C> = Result<(M, C), Failure>;

/// Length of a demonstration.
const DEMONSTRATION: Duration = Duration::from_secs(10);
/// Interval between two displays of rates.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// A packet program whose configuration is read. [`Self::run`] opens the ports and the control socket, and runs the
/// stages between the flow rules of the configuration. It shows rates on a terminal, carries out reloads, reports to
/// systemd, stops on signals, and prints the summary.
///
/// [`Self::with_stop`] and [`Self::without_output`] run it inside another program, such as a test:
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
/// # use std::time::{Duration, Instant};
///
/// use wirepath::prelude::*;
///
/// const PORT: &str = "[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\ncount = 100\n\
///     [control]\nsocket = 'off'\n";
///
/// let stop = Arc::new(AtomicBool::new(false));
/// let flag = Arc::clone(&stop);
/// let total = Arc::new(AtomicU64::new(0));
/// let shared = Arc::clone(&total);
/// let program = std::thread::spawn(move || {
///     let app = App::<()>::start("reflect", &AppArguments::default(), PORT)?.with_stop(flag).without_output();
///     app.run_stages(move |_worker| {
///         let total = Arc::clone(&shared);
///         move |context: &mut Context<'_>, batch: &mut Batch| {
///             total.fetch_add(batch.len() as u64, Ordering::Relaxed);
///             if let Some(port) = context.in_port() {
///                 context.send_batch(port, batch);
///             }
///         }
///     })
/// });
/// # let deadline = Instant::now() + Duration::from_secs(10);
/// # while total.load(Ordering::Relaxed) < 100 && Instant::now() < deadline {
/// #     std::thread::sleep(Duration::from_millis(1));
/// # }
/// // ... here a test sends packets, gives commands and reads tables ...
/// stop.store(true, Ordering::Relaxed);
/// let summary = program.join().unwrap()?.expect("a run, not --check");
/// assert_eq!((summary.rx().packets, summary.tx().packets), (100, 100));
/// assert_eq!(summary.balance().in_flight(), 0);
/// assert!(summary.drops().is_empty());
/// # Ok::<(), Failure>(())
/// ```
///
/// `T` are the program's own tables of the configuration.
#[derive(Debug)]
pub struct App<T = ()> {
    /// The tables that every program has.
    pub config: Config,
    /// The program's own tables.
    pub own: T,
    name: &'static str,
    arguments: AppArguments,
    /// Flag that ends the run instead of signals.
    stop: Option<Arc<AtomicBool>>,
    /// If false, nothing is printed on standard output.
    prints: bool,
}

impl<T: AppSettings> App<T> {
    /// Reads the command line and the configuration. `about` says in a sentence what the program does.
    /// `demonstration` is the configuration without `--config`; empty if the program needs a file.
    ///
    /// The process ends here after `--help`, `--version` or a wrong option.
    ///
    /// # Errors
    /// If the configuration has mistakes. All are reported at once.
    pub fn from_args(name: &'static str, about: &'static str, demonstration: &str) -> Result<Self, Failure> {
        let command = Command::new(name).about(about).term_width(cli::HELP_WIDTH);
        let matches = AppArguments::augment_args(command).get_matches();
        let arguments = AppArguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        Self::start(name, &arguments, demonstration)
    }

    /// Does the same as [`Self::from_args`] for options that are read already.
    ///
    /// # Errors
    /// If the configuration has mistakes. All are reported at once.
    pub fn start(name: &'static str, arguments: &AppArguments, demonstration: &str) -> Result<Self, Failure> {
        arguments.common.start_logging();
        let (config, own) = match &arguments.run.config {
            Some(path) => Config::load_with(path)?,
            None if demonstration.is_empty() => {
                return Err(Failure::usage("--config FILE is missing; see --help"));
            }
            None => Config::parse_with(&Source::new("demonstration", demonstration))?,
        };
        arguments.common.configure_log(&config.log);
        Ok(Self { config, own, name, arguments: arguments.clone(), stop: None, prints: true })
    }

    /// Ends the run within about ten milliseconds of the flag being set. The run then does not handle SIGINT and
    /// SIGTERM.
    #[must_use]
    pub fn with_stop(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Prints neither rates nor the summary on standard output. The log still goes to standard error.
    #[must_use]
    pub fn without_output(self) -> Self {
        Self { prints: false, ..self }
    }

    /// Returns whether rates and notes may be shown on standard output.
    fn is_live(&self) -> bool {
        self.prints && !self.arguments.common.json && !self.arguments.common.quiet
    }

    /// Runs the program with stages alone. `make` is called once for each worker.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_stages<S: Stage + 'static>(
        self,
        make: impl FnMut(&WorkerInfo) -> S,
    ) -> Result<Option<Summary>, Failure> {
        self.run(|_, _| Ok((make, ())))
    }

    /// Runs the program until a signal, `--seconds`, the flag of [`Self::with_stop`] or [`ControlPlane::stop`] ends it.
    /// `build` makes the stages of each worker and the control from the opened ports and the program's own tables.
    ///
    /// Returns the summary that it has printed: ports, workers, drops, counters and the balance of all packets. With
    /// `--check` it only reports whether the program could start, and returns `None`.
    ///
    /// # Errors
    /// If the ports or the control socket cannot be opened, the rules cannot be carried out, or a port or worker
    /// failed.
    pub fn run<S, C, M>(
        self,
        build: impl FnOnce(&mut Runtime, &mut T) -> Built<M, C>,
    ) -> Result<Option<Summary>, Failure>
    where
        S: Stage + 'static,
        C: Control,
        M: FnMut(&WorkerInfo) -> S,
    {
        self.run_with(build, None)
    }

    /// Runs the program like [`Self::run`]. A reload that changes the top-level tables `tables` of the configuration
    /// calls `apply` with the program's new tables. [`AppSettings::read`] has checked them, so `apply` cannot refuse
    /// them.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_changeable<S, C, M>(
        self,
        build: impl FnOnce(&mut Runtime, &mut T) -> Built<M, C>,
        tables: &'static [&'static str],
        apply: impl FnMut(&mut C, T, &mut ControlPlane) + 'static,
    ) -> Result<Option<Summary>, Failure>
    where
        S: Stage + 'static,
        C: Control,
        M: FnMut(&WorkerInfo) -> S,
    {
        self.run_with(build, Some(OwnChanges { tables, apply: Box::new(apply) }))
    }

    fn run_with<S, C, M>(
        mut self,
        build: impl FnOnce(&mut Runtime, &mut T) -> Built<M, C>,
        changes: Option<OwnChanges<C, T>>,
    ) -> Result<Option<Summary>, Failure>
    where
        S: Stage + 'static,
        C: Control,
        M: FnMut(&WorkerInfo) -> S,
    {
        if let Some(scope) = self.arguments.run.check {
            return self.check(scope).map(|()| None);
        }
        let (live, demonstration) = (self.is_live(), self.config.path().is_none());
        // Inside another program, the privileges of the process are that program's.
        let privileges = self.stop.is_none().then(|| self.config.privileges.clone());
        if let Some(privileges) = &privileges {
            privileges.before_open();
        }
        let options = RunOptions {
            duration: self.arguments.run.seconds.or(demonstration.then_some(DEMONSTRATION)),
            stop: Some(self.stop.take().map_or_else(|| Stop::on_signals().map(|stop| stop.flag()), Ok)?),
            report_every: (live && cli::can_redraw()).then_some(REPORT_EVERY),
        };
        let (source, path) = (self.config.source().clone(), self.config.path().map(ToOwned::to_owned));
        let (rules, settings) = (std::mem::take(&mut self.config.rules), std::mem::take(&mut self.config.control));
        let mut runtime = self.config.open()?;
        self.own.check_opened(&runtime)?;
        if let Some(socket) = ControlSocket::open(&settings, self.name, path.as_deref())? {
            runtime.set_management(Box::new(socket));
        }
        if let Some(privileges) = privileges {
            privileges.apply_to(&mut runtime, CapabilitySet::empty(), path.as_deref());
        }
        if demonstration && live {
            cli::show("Demonstration; --config FILE uses real ports. See --help.\n");
        }
        let (make, control) = build(&mut runtime, &mut self.own)?;
        let control = AppControl {
            control,
            live,
            service: Service::new(),
            refusals: RefusalLog::default(),
            common: self.arguments.common.clone(),
            changes,
        };
        let (summary, report) = rules::run(runtime, rules, make, control, (&source, path.as_deref()), &options)?;
        if self.prints {
            let figures = summary.app.as_ref().map(app_figures).unwrap_or_default();
            cli::print_summary(&summary, report + &figures, self.arguments.common.json)?;
        }
        // Failures of the run are the program's.
        if summary.failures.is_empty() { Ok(Some(summary)) } else { Err(Failure::failed(summary.failures.join("; "))) }
    }

    /// Reports what a start would refuse.
    fn check(self, scope: CheckScope) -> Result<(), Failure> {
        let Config { ports, runtime, rules, control, .. } = self.config;
        let counts = [("ports", ports.len())];
        let machine = match scope {
            CheckScope::File => None,
            CheckScope::Machine => Some(cli::check_machine(ports, runtime, |runtime| {
                self.own.check_opened(runtime)?;
                rules.check_opened(runtime, Parser::default())?;
                ControlSocket::check(&control)
            })?),
        };
        cli::report_check(&counts, machine.as_deref(), &[], self.arguments.common.json)
    }
}

/// Returns the numbers and words of [`Control::summary`] as text, one on each line. `--json` has all of it.
fn app_figures(app: &Value) -> String {
    let figures = app.as_object().into_iter().flatten().filter(|(_, value)| !value.is_object() && !value.is_array());
    figures.map(|(name, value)| format!("  {name}: {value}\n")).collect()
}

/// Changes of the program's own tables while it runs.
struct OwnChanges<C, T> {
    tables: &'static [&'static str],
    apply: Box<Apply<C, T>>,
}

type Apply<C, T> = dyn FnMut(&mut C, T, &mut ControlPlane);

impl<C, T> fmt::Debug for OwnChanges<C, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnChanges").field("tables", &self.tables).finish_non_exhaustive()
    }
}

/// A control that also shows rates on a terminal, reports to the service manager, and takes over changed settings.
#[derive(Debug)]
struct AppControl<C, T> {
    control: C,
    live: bool,
    service: Service,
    refusals: RefusalLog,
    /// Options that precede the table `[log]` of the configuration.
    common: cli::Common,
    changes: Option<OwnChanges<C, T>>,
}

/// A configuration that was read for a change.
struct NewSettings<T> {
    config: Config,
    own: T,
}

impl<T> AsRef<RuleSettings> for NewSettings<T> {
    fn as_ref(&self) -> &RuleSettings {
        &self.config.rules
    }
}

impl<C: Control, T: AppSettings> Reconfigure for AppControl<C, T> {
    type Setup = NewSettings<T>;

    fn read(source: &Source, numbers: &PortNumbers) -> Result<NewSettings<T>, Failure> {
        Config::parse_numbered(source, numbers).map(|(config, own)| NewSettings { config, own })
    }

    fn config(setup: &mut NewSettings<T>) -> &mut Config {
        &mut setup.config
    }

    fn config_objects() -> &'static [&'static ConfigObject] {
        &[]
    }

    fn can_change(&self, path: &[String]) -> bool {
        let Some(table) = path.first() else { return false };
        let own = self.changes.as_ref().map_or(&[][..], |changes| changes.tables);
        table == "log" || own.contains(&table.as_str())
    }

    fn check(
        &mut self,
        setup: &NewSettings<T>,
        _: &ChangedPorts,
        _: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<(), Failure> {
        cli::check_same_ports(plane.ports(), &setup.config.ports)
    }

    fn apply(
        &mut self,
        setup: NewSettings<T>,
        parts: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<Vec<String>, Failure> {
        if let Some(changes) = &mut self.changes {
            (changes.apply)(&mut self.control, setup.own, plane);
        }
        if parts.log {
            self.common.configure_log(&setup.config.log);
        }
        Ok(Vec::new())
    }

    fn changed_rules(&self) -> Option<ChangedRules> {
        None
    }
}

impl<C: Control, T> Control for AppControl<C, T> {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut self.control)
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.control.tick(plane);
        self.service.tick(plane);
        self.refusals.tick();
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        self.service.port_event(port, event);
        self.control.port_event(port, event, plane);
    }

    fn rates(&mut self, rates: &Rates) {
        if self.live {
            cli::show_live(&cli::rates_table(rates));
        }
        self.control.rates(rates);
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        self.service.stop();
        self.control.stop(plane);
        self.refusals.finish();
    }
}
