//! The configuration of a running program: reading it again, changing single objects, and saving it.
//!
//! The program keeps the text of its configuration. A change of an object (`wirepath add`, `set`, `remove`) edits that
//! text, and a reload replaces it by the file. The new text is read and checked as at the start. Its differences are
//! listed, and then all of them are applied or none. Reading takes place in another thread, one change after the other.
//!
//! After a reload, all that the file says is in force, and so is all that was added while the program ran. Objects that
//! were only changed or removed are as in the file. `wirepath config save` writes the text.

mod difference;
mod document;
mod ports;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

pub use difference::{Difference, differences};
pub use document::{ConfigObject, Edit, EditError, Parent, Place};
pub use ports::{ChangedPorts, PORT, PortNumbers};
use serde_json::{Value, json};
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, value};
use wirepath_flow::{Ports, Rule};
use wirepath_pipeline::registry::{Change, Changed, ObjectSpec, Operation, PendingChange};
use wirepath_pipeline::{Control, ControlPlane, NewPort};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::port::PortId;
use wirepath_settings::Source;

use crate::Config;
use crate::cli::{Failure, ReloadGuard, hangup_flag};

/// Changes that wait for the one in progress, at most.
const MAX_WAITING: usize = 64;
/// Texts of the configuration that wait, at most.
const MAX_TEXTS: usize = 8;
/// Differences in an answer or in the log, at most. The others are counted.
const MAX_LISTED: usize = 1000;

/// A program that can change to another configuration while it runs.
pub trait Reconfigure: Control {
    /// A configuration that was read and checked.
    type Setup: Send + 'static;

    /// Reads a configuration and checks all that needs no open port. Called in another thread. The ports have these
    /// numbers ([`Config::read_numbered`]).
    ///
    /// # Errors
    /// As at the start of the program.
    fn read(source: &Source, numbers: &PortNumbers) -> Result<Self::Setup, Failure>;

    /// Returns the tables of a configuration that all programs have.
    fn config(setup: &mut Self::Setup) -> &mut Config;

    /// Returns whether ports can be added and removed without a restart of the program.
    fn can_change_ports(&self) -> bool {
        false
    }

    /// Takes over the ports of the program, after some were added or removed. New ports are added before
    /// [`Self::apply`], and others are removed after it.
    ///
    /// # Errors
    /// The reason why the program cannot work with the new ports. They are removed again.
    fn set_ports(&mut self, plane: &mut ControlPlane) -> Result<(), Failure> {
        let _ = plane;
        Ok(())
    }

    /// Objects of the configuration that can be changed alone.
    fn config_objects() -> &'static [&'static ConfigObject];

    /// Returns whether the value at this path can differ without a restart of the program.
    fn can_change(&self, path: &[String]) -> bool;

    /// Finds why [`Self::apply`] would fail. Changes nothing. `ports` are the ports after the change.
    ///
    /// # Errors
    /// The reason.
    fn check(
        &mut self,
        setup: &Self::Setup,
        ports: &ChangedPorts,
        parts: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<(), Failure>;

    /// Takes over a configuration. Returns lines for the operator about changes that are no differences of the text.
    ///
    /// # Errors
    /// The reason why the old configuration stays in force.
    fn apply(
        &mut self,
        setup: Self::Setup,
        parts: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<Vec<String>, Failure>;

    /// Returns the flow rules in force, if they are not those of the configuration and its rule file.
    fn changed_rules(&self) -> Option<ChangedRules>;
}

/// Parts of a configuration that may have changed, besides those of the program.
#[derive(Clone, Copy, Debug)]
pub struct ChangedParts {
    /// The flow rules and their file. Otherwise the rules stay as they are.
    pub rules: bool,
    /// The table `[log]`.
    pub log: bool,
}

/// Flow rules that are not those of the configuration.
#[derive(Clone, Debug)]
pub struct ChangedRules {
    /// The rules in evaluation order.
    pub rules: Vec<Arc<Rule>>,
    /// Names of the ports.
    pub ports: Vec<String>,
}

/// A control whose configuration can be changed while the program runs.
#[derive(Debug)]
pub struct LiveConfiguration<C: Reconfigure> {
    /// The program's own control.
    pub control: C,
    path: Option<PathBuf>,
    /// Text of the configuration in force. It may be long, so it is copied and written in other threads.
    document: Arc<DocumentMut>,
    /// Objects that were added since the start, in this order.
    added: Vec<Edit>,
    /// Set by SIGHUP.
    hangup: Arc<AtomicBool>,
    waiting: VecDeque<Job>,
    reading: Option<Reading<C::Setup>>,
    /// A change that was made, and whose removed ports are being closed.
    closing: Option<(Job, Result<Value, String>)>,
}

/// A change that was asked for.
#[derive(Debug)]
struct Job {
    outcome: PendingChange,
    /// User that asks for it.
    origin: String,
    kind: JobKind,
    _guard: Option<ReloadGuard>,
}

#[derive(Clone, Debug)]
enum JobKind {
    Reload {
        dry_run: bool,
    },
    Edit(Edit),
    /// Writes the configuration in force as text.
    Write,
}

impl JobKind {
    fn is_text(&self) -> bool {
        matches!(self, Self::Write)
    }

    fn is_dry_run(&self) -> bool {
        matches!(self, Self::Reload { dry_run: true })
    }
}

/// The change whose configuration is being read.
#[derive(Debug)]
struct Reading<S> {
    job: Job,
    thread: JoinHandle<Result<Work<S>, String>>,
}

/// Result of the thread that works for a job.
#[derive(Debug)]
enum Work<S> {
    Read(Box<Read<S>>),
    /// The new ports of a configuration are open.
    Opened(Box<Read<S>>, Vec<NewPort>),
    /// The parts of a text.
    Written(Vec<String>),
}

/// A configuration that was read for a change.
#[derive(Debug)]
struct Read<S> {
    document: Arc<DocumentMut>,
    setup: S,
    differences: Vec<Difference>,
    added: Vec<Edit>,
    /// Lines that the operator must know besides.
    notes: Vec<String>,
    /// Ports that the program does not have, with their numbers.
    new_ports: Vec<(PortId, PortSettings)>,
    /// Names of the ports that the configuration does not have any more.
    removed_ports: Vec<String>,
}

impl<C: Reconfigure> LiveConfiguration<C> {
    /// Wraps the control of a program that was started with this configuration. `path` is its file, if it has one.
    pub fn new(control: C, source: &Source, path: Option<&Path>) -> Self {
        Self {
            control,
            path: path.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned())),
            // The program has read the text, so it is valid.
            document: Arc::new(source.text().parse().unwrap_or_default()),
            added: Vec::new(),
            hangup: hangup_flag(),
            waiting: VecDeque::new(),
            reading: None,
            closing: None,
        }
    }

    fn begin(&mut self, kind: JobKind, origin: &str, guard: Option<ReloadGuard>) -> Result<PendingChange, String> {
        self.drop_unwanted();
        let texts = self.waiting.iter().filter(|job| job.kind.is_text()).count();
        let (waiting, most) =
            if kind.is_text() { (texts, MAX_TEXTS) } else { (self.waiting.len() - texts, MAX_WAITING) };
        if waiting >= most {
            return Err(format!("{most} requests of this kind wait already; try again later"));
        }
        let outcome = PendingChange::new();
        let job = Job { outcome: outcome.clone(), origin: origin.to_owned(), kind, _guard: guard };
        self.waiting.push_back(job);
        Ok(outcome)
    }

    /// Removes the texts whose clients have gone.
    fn drop_unwanted(&mut self) {
        self.waiting.retain(|job| job.outcome.is_awaited() || !job.kind.is_text());
    }

    /// Moves the changes forward.
    fn work(&mut self, plane: &mut ControlPlane) {
        if self.hangup.swap(false, Ordering::Relaxed) {
            if self.path.is_none() {
                tracing::info!("SIGHUP: there is no configuration file to read again");
            } else if !self.waiting.iter().any(|job| job.origin == SIGHUP) {
                let guard = Some(ReloadGuard::new());
                if let Err(why) = self.begin(JobKind::Reload { dry_run: false }, SIGHUP, guard) {
                    tracing::error!("SIGHUP: {why}");
                }
            }
        }
        if let Some((job, result)) = self.closing.take_if(|_| !plane.is_changing_ports()) {
            self.end(&job, result);
        }
        self.drop_unwanted();
        if self.reading.is_none()
            && self.closing.is_none()
            && let Some(job) = self.waiting.pop_front()
        {
            let (kind, path) = (job.kind.clone(), self.path.clone());
            let (document, added) = (Arc::clone(&self.document), self.added.clone());
            let rules = if kind.is_text() { self.control.changed_rules() } else { None };
            let numbers = PortNumbers::of(plane);
            let read = move || match kind {
                JobKind::Write => Ok(Work::Written(write(&document, rules))),
                kind => Ok(Work::Read(Box::new(read::<C>(kind, path.as_deref(), &document, added, &numbers)?))),
            };
            self.spawn(job, read);
        }
        let Some(Reading { job, thread }) = self.reading.take_if(|reading| reading.thread.is_finished()) else {
            return;
        };
        let mut to_open = None;
        let read = thread.join().unwrap_or_else(|_| Err("the thread that reads the configuration panicked".to_owned()));
        let done = read.and_then(|done| match done {
            Work::Read(mut read) => {
                self.check_differences(&read, plane)?;
                if read.new_ports.is_empty() || job.kind.is_dry_run() {
                    return self.apply(&job, *read, Vec::new(), plane).map(Some);
                }
                let opener = plane.port_opener().ok_or("the ports of this program cannot change")?;
                let new = std::mem::take(&mut read.new_ports);
                let open = move || ports::open(&opener, new).map(|ports| Work::Opened(read, ports));
                to_open = Some(Box::new(open) as Box<dyn FnOnce() -> Result<Work<C::Setup>, String> + Send>);
                Ok(None)
            }
            Work::Opened(read, ports) => self.apply(&job, *read, ports, plane).map(Some),
            Work::Written(parts) => Ok(Some(parts.into())),
        });
        if let Some(open) = to_open {
            return self.spawn(job, open);
        }
        let result = done.map(Option::unwrap_or_default).map_err(|why| match (&job.kind, &self.path) {
            (JobKind::Edit(_), Some(path)) => without_positions(&why, &path.display().to_string()),
            _ => why,
        });
        if plane.is_changing_ports() {
            self.closing = Some((job, result));
        } else {
            self.end(&job, result);
        }
    }

    /// Lets another thread work for a job.
    fn spawn(&mut self, job: Job, work: impl FnOnce() -> Result<Work<C::Setup>, String> + Send + 'static) {
        match std::thread::Builder::new().name("wirepath-config".to_owned()).spawn(work) {
            Ok(thread) => self.reading = Some(Reading { job, thread }),
            Err(error) => self.end(&job, Err(crate::cli::no_thread(&error))),
        }
    }

    /// Refuses differences that need a restart of the program.
    fn check_differences(&self, read: &Read<C::Setup>, plane: &ControlPlane) -> Result<(), String> {
        let is_new = |name: &String| read.new_ports.iter().any(|(_, port)| port.name == *name);
        let can_change = |path: &[String]| match path {
            [port, name, ..] if port == "port" && self.control.can_change_ports() => {
                is_new(name) || read.removed_ports.contains(name)
            }
            path => self.control.can_change(path),
        };
        let differences = &read.differences;
        let fixed: Vec<String> =
            differences.iter().filter(|it| !can_change(&it.path)).map(Difference::to_string).collect();
        if !fixed.is_empty() {
            let shown = fixed.iter().take(MAX_SHOWN).map(|it| format!("\n  {it}")).collect::<String>();
            let more = fixed.len().saturating_sub(MAX_SHOWN);
            let more = if more > 0 { format!("\n  and {more} others") } else { String::new() };
            return Err(format!("nothing was changed, because this needs a restart of the program:{shown}{more}"));
        }
        // A device has one user at a time.
        let old = |name: &String| plane.port(name).map(|port| port.capabilities.device.as_str());
        for (_, new) in &read.new_ports {
            let used_by = |name: &&String| old(name).is_some_and(|device| new.device.as_deref() == Some(device));
            if let Some(old) = read.removed_ports.iter().find(used_by) {
                let (name, device) = (&new.name, new.device.as_deref().unwrap_or_default());
                return Err(format!(
                    "nothing was changed: port \"{old}\" uses {device} until it is removed; remove it first, and then \
                     add port \"{name}\""
                ));
            }
        }
        Ok(())
    }

    /// Adds the new ports.
    fn add_ports(&mut self, new: Vec<NewPort>, plane: &mut ControlPlane) -> Result<Vec<PortId>, String> {
        let mut added = Vec::new();
        let mut new = new.into_iter();
        while let Some(port) = new.next() {
            match plane.add_port(port) {
                Ok(id) => added.push(id),
                Err(error) => {
                    new.for_each(|port| plane.discard_port(port));
                    self.remove_ports(&added, plane);
                    return Err(error.to_string());
                }
            }
        }
        if !added.is_empty()
            && let Err(failure) = self.control.set_ports(plane)
        {
            self.remove_ports(&added, plane);
            return Err(failure.to_string());
        }
        Ok(added)
    }

    /// Removes ports to which nothing refers any more.
    fn remove_ports(&mut self, ports: &[PortId], plane: &mut ControlPlane) {
        if ports.is_empty() {
            return;
        }
        for port in ports {
            plane.remove_port(*port);
        }
        if let Err(failure) = self.control.set_ports(plane) {
            tracing::error!("after the removal of ports: {failure}");
        }
    }

    /// Applies a configuration that was read, unless it shall only be checked.
    fn apply(
        &mut self,
        job: &Job,
        read: Read<C::Setup>,
        new: Vec<NewPort>,
        plane: &mut ControlPlane,
    ) -> Result<Value, String> {
        let ports = ChangedPorts::new(plane, &new, &read.removed_ports);
        let Read { document, setup, differences, added, mut notes, new_ports, .. } = read;
        let dry_run = job.kind.is_dry_run();
        // Only a dry run leaves ports that are not open.
        notes.extend(new_ports.iter().map(|(_, PortSettings { name, .. })| {
            format!("port \"{name}\" was not opened, so errors of its device and driver are not known")
        }));
        let parts = ChangedParts {
            rules: matches!(job.kind, JobKind::Reload { .. }),
            log: differences.iter().any(|it| it.path.first().is_some_and(|table| table == "log")),
        };
        if let Err(failure) = self.control.check(&setup, &ports, parts, plane) {
            new.into_iter().for_each(|port| plane.discard_port(port));
            return Err(failure.to_string());
        }
        if !dry_run {
            let new = self.add_ports(new, plane)?;
            match self.control.apply(setup, parts, plane) {
                Ok(more) => notes.extend(more),
                Err(failure) => {
                    self.remove_ports(&new, plane);
                    return Err(failure.to_string());
                }
            }
            self.remove_ports(&ports.removed, plane);
            for difference in differences.iter().take(MAX_LISTED) {
                tracing::info!("configuration changed by {}: {difference}", job.origin);
            }
            (self.document, self.added) = (document, added);
        }
        for note in &notes {
            tracing::info!("{note}");
        }
        let listed: Vec<Value> = differences.iter().take(MAX_LISTED).map(Difference::to_json).collect();
        let omitted = differences.len() - listed.len();
        Ok(json!({ "applied": !dry_run, "differences": listed, "omitted": omitted, "notes": notes }))
    }

    /// Logs the outcome of a change, and passes it to the client.
    fn end(&mut self, job: &Job, result: Result<Value, String>) {
        match &result {
            _ if job.kind.is_text() => {}
            Err(why) => tracing::error!("{} by {}: {why}", job.kind, job.origin),
            Ok(_) => tracing::info!("{} by {} is done", job.kind, job.origin),
        }
        job.outcome.finish(result);
    }
}

/// The origin of changes by SIGHUP.
const SIGHUP: &str = "SIGHUP";
/// Differences in an error message, at most.
const MAX_SHOWN: usize = 20;

impl std::fmt::Display for JobKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reload { dry_run: false } => f.write_str("reload of the configuration"),
            Self::Reload { dry_run: true } => f.write_str("check of the changed configuration"),
            Self::Edit(edit) => write!(f, "{} of {}", edit.operation, edit.object.spec.name),
            Self::Write => f.write_str("text of the configuration"),
        }
    }
}

/// Makes the configuration that a change asks for, and reads it.
fn read<C: Reconfigure>(
    kind: JobKind,
    path: Option<&Path>,
    running: &DocumentMut,
    mut added: Vec<Edit>,
    numbers: &PortNumbers,
) -> Result<Read<C::Setup>, String> {
    let name = path.map_or_else(|| "the configuration".to_owned(), |path| path.display().to_string());
    let mut notes = Vec::new();
    let (document, mut setup) = match kind {
        JobKind::Reload { .. } => {
            let path = path.ok_or("there is no configuration file to read again")?;
            let source = Source::load_regular(path).map_err(|error| error.to_string())?;
            // Errors of the file have their position in it.
            let setup = C::read(&source, numbers).map_err(|failure| failure.to_string())?;
            let mut document: DocumentMut = source.text().parse().map_err(|error| format!("{name}: {error}"))?;
            let unchanged = added.is_empty();
            added.retain(|edit| {
                match edit.apply(&mut document) {
                    Ok(()) => {}
                    Err(EditError::Exists(_)) => return false,
                    Err(EditError::Refused(_)) if edit.operation == Operation::Remove => return false,
                    Err(EditError::Refused(why)) => {
                        let kind = edit.object.spec.name;
                        notes.push(format!("a {kind} that was added while the program ran is gone: {why}"));
                        return false;
                    }
                }
                true
            });
            if unchanged {
                (document, setup)
            } else {
                let setup = C::read(&Source::new(&name, document.to_string()), numbers).map_err(|failure| {
                    let why = without_positions(&failure.to_string(), &name);
                    format!("the file does not fit what was added while the program ran: {why}")
                })?;
                (document, setup)
            }
        }
        JobKind::Edit(edit) => {
            let mut document = running.clone();
            edit.apply(&mut document).map_err(|error| error.to_string())?;
            keep_added(&mut added, edit);
            // The rules stay as they are, so their file need not be read.
            let mut without_rules = document.clone();
            remove_rule_file(&mut without_rules);
            let setup = C::read(&Source::new(&name, without_rules.to_string()), numbers);
            (document, setup.map_err(|failure| failure.to_string())?)
        }
        JobKind::Write => return Err("nothing to read".to_owned()),
    };
    let differences = differences(running, &document);
    let config = C::config(&mut setup);
    let names = config.port_names().to_vec();
    let removed_ports = numbers.removed(&names);
    let number = |port: PortSettings| {
        let number = names.iter().position(|name| *name == port.name);
        (PortId::new(number.unwrap_or_default() as u16), port)
    };
    let new_ports = config.ports.extract_if(.., |port| !numbers.is_running(&port.name)).map(number).collect();
    let document = Arc::new(document);
    Ok(Read { document, setup, differences, added, notes, new_ports, removed_ports })
}

/// Bytes of a part of a text.
const TEXT_PART: usize = 16 << 10;

/// Returns the text of the configuration with the rules in force, in parts.
fn write(document: &DocumentMut, rules: Option<ChangedRules>) -> Vec<String> {
    let text = match rules {
        None => document.to_string(),
        Some(rules) => with_rules(document.clone(), &rules).to_string(),
    };
    let mut parts: Vec<String> = Vec::new();
    for line in text.split_inclusive('\n') {
        match parts.last_mut().filter(|part| part.len() < TEXT_PART) {
            Some(part) => part.push_str(line),
            None => parts.push(line.to_owned()),
        }
    }
    parts
}

/// Removes the file of rules. The text keeps or gets a table `[rules]`, even an empty one: it says that rules can be
/// added, and that ports may be there for rules alone.
fn remove_rule_file(document: &mut DocumentMut) {
    let item = document.entry("rules").or_insert_with(|| Item::Table(Table::new()));
    if let Some(table) = item.as_table_like_mut() {
        table.remove("file");
    }
    if let Some(table) = item.as_table_mut() {
        table.set_implicit(false);
        table.set_dotted(false);
    }
}

/// Replaces the rules of a configuration and its rule file.
fn with_rules(mut document: DocumentMut, changed: &ChangedRules) -> DocumentMut {
    document.remove("rule");
    remove_rule_file(&mut document);
    let names: Vec<(&str, PortId)> = changed.ports.iter().map(String::as_str).zip((0..).map(PortId::new)).collect();
    let mut list = ArrayOfTables::new();
    for rule in &changed.rules {
        let mut table = Table::new();
        table.insert("rule", value(rule.named(Ports(&names)).to_string()));
        list.push(table);
    }
    document.insert("rule", Item::ArrayOfTables(list));
    document
}

/// Removes positions in a file from error messages, because a change of an object has none.
fn without_positions(text: &str, file: &str) -> String {
    let line = |line: &str| {
        let parts = line.split_once(file).and_then(|(before, rest)| Some((before, rest.split_once(": ")?.1)));
        parts.map_or_else(|| line.to_owned(), |(before, message)| format!("{before}{message}"))
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Records an edit in the list of the edits that a reload repeats: additions, and later changes of what was added.
fn keep_added(added: &mut Vec<Edit>, edit: Edit) {
    let known = added.iter().position(|it| it.operation == Operation::Add && it.has_same_object(&edit));
    match (edit.operation, known) {
        (Operation::Remove, Some(_)) => added.retain(|it| !it.has_same_object(&edit) && !it.is_within(&edit)),
        (Operation::Set, Some(_)) => {
            // The new values replace those of an earlier change.
            let replaced = |it: &Edit| it.arguments.keys().all(|key| edit.arguments.contains_key(key));
            added.retain(|it| it.operation != Operation::Set || !it.has_same_object(&edit) || !replaced(it));
            added.push(edit);
        }
        (Operation::Add, _) => added.push(edit),
        // An object of the file is again as in the file after a reload.
        _ if added.iter().any(|it| it.operation == Operation::Add && edit.is_within(it)) => added.push(edit),
        _ => {}
    }
}

impl<C: Reconfigure> Control for LiveConfiguration<C> {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut self.control)
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.control.tick(plane);
        self.work(plane);
    }

    fn objects(&mut self) -> Vec<&'static ObjectSpec> {
        let own = C::config_objects().iter().map(|object| object.spec);
        self.control.objects().into_iter().chain(own).collect()
    }

    fn change(&mut self, change: &Change<'_>, plane: &mut ControlPlane) -> Result<Changed, String> {
        let Some(object) = C::config_objects().iter().find(|object| object.spec.name == change.object) else {
            return self.control.change(change, plane);
        };
        let edit = Edit { object, operation: change.operation, arguments: change.arguments.clone() };
        self.begin(JobKind::Edit(edit), change.origin, None).map(Changed::Pending)
    }

    fn reload(&mut self, dry_run: bool, origin: &str) -> Result<Changed, String> {
        if self.path.is_none() {
            return Err("this program was started without a configuration file".to_owned());
        }
        self.begin(JobKind::Reload { dry_run }, origin, None).map(Changed::Pending)
    }

    fn configuration(&mut self, origin: &str) -> Result<PendingChange, String> {
        self.begin(JobKind::Write, origin, None)
    }
}
