use std::collections::{HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use wirepath_flow::{Ports, Rule};
use wirepath_pipeline::registry::{
    Argument, ArgumentKind, Change, Changed, Column, ObjectSpec, Operation, Page, Row, TableSpec, Unit,
};
use wirepath_pipeline::rules::{
    ActiveRule, ListEntry, RuleControl, RuleControlError, RuleId, RuleLimits, RuleLocation, RuleStage, RuleTableError,
};
use wirepath_pipeline::{Control, ControlPlane, Punt, RunOptions, Runtime, Stage, Summary, WorkerInfo};
use wirepath_pmd::port::PortId;
use wirepath_settings::{Source, Span};
use wirepath_wire::Parser;

use super::config::{Entry, Hardware, RuleSettings, names_port};
use crate::Config;
use crate::cli::{Failure, Table};
use crate::configuration::{
    ChangedParts, ChangedPorts, ChangedRules, ConfigObject, LiveConfiguration, PortNumbers, Reconfigure,
};

/// The control of a program with flow rules around its stages. It manages the rules and reports the rule counters.
#[derive(Debug)]
pub struct ControlWithRules<C> {
    /// The program's own control.
    pub control: C,
    /// Called on every tick to update what the program itself offloads to NICs.
    pub update_nics: Option<fn(&mut C, &mut RuleControl, &mut ControlPlane)>,
    /// Called before a table of the program is listed, if NICs may have rules.
    pub before_list: Option<fn(&mut C, &RuleControl, &'static TableSpec, &ControlPlane)>,
    rules: RuleControl,
    settings: RuleSettings,
    /// Number of rules of the configuration and its file, as they were read.
    listed: usize,
    /// Origin of each active rule.
    origins: HashMap<RuleId, Origin>,
    names: Vec<String>,
    /// Active rules with their counters, after the stop.
    latest: Vec<ActiveRule>,
    /// Where the rules ran at the end.
    final_placements: Vec<Vec<Value>>,
}

/// Origin of a rule. The rule list is ordered by origin.
#[derive(Clone, Debug)]
struct Origin {
    by: OriginKind,
    span: Span,
}

/// Kinds of origins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OriginKind {
    /// The configuration itself.
    Configuration,
    /// The rule file, which is read again with the configuration.
    File,
    /// A change of the running program.
    Change,
}

impl OriginKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::File => "file",
            Self::Change => "change",
        }
    }
}

/// The program's own control while the rules are changed.
struct WithoutRules<'a, C>(&'a mut C);

impl<C: Control> Control for WithoutRules<'_, C> {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut *self.0)
    }

    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        if let Some(punt) = RuleControl::punt(punt, plane) {
            self.0.punt(punt, plane);
        }
    }
}

/// Rules in an error message, at most.
const MAX_SHOWN: usize = 20;
/// Rules that [`ControlWithRules::replace`] handles between two looks at the queues of the control thread.
const RULES_OF_A_STEP: usize = 256;
/// Nanoseconds between two ticks of the program's own control during a long change.
const TICK_INTERVAL: u64 = 10_000_000;

impl<C: Control> ControlWithRules<C> {
    /// Checks the rules against the ports and activates them, before anything is started.
    pub fn begin(runtime: &mut Runtime, settings: RuleSettings, parser: Parser, control: C) -> Result<Self, Failure> {
        let rules = RuleControl::new(runtime, parser, RuleLimits::default());
        let names = runtime.ports().iter().map(|port| port.name.clone()).collect();
        let mut it = Self {
            control,
            update_nics: None,
            before_list: None,
            rules,
            settings,
            listed: 0,
            origins: HashMap::new(),
            names,
            latest: Vec::new(),
            final_placements: Vec::new(),
        };
        let (own, entries) = (it.settings.config_count, std::mem::take(&mut it.settings.entries));
        it.listed = entries.len();
        let by = |number| if number < own { OriginKind::Configuration } else { OriginKind::File };
        let entries = entries.into_iter().zip(0..);
        let (origins, list): (Vec<Origin>, Vec<Rule>) =
            entries.map(|(entry, number)| (Origin { by: by(number), span: entry.span }, entry.rule)).unzip();
        let refused = |error| failure(error, |number| origins.get(number).map(|origin| &origin.span));
        it.rules.begin(runtime, &list).map_err(refused)?;
        it.keep(origins);
        Ok(it)
    }

    /// Does the work of the control thread that must not wait for the end of a long change. Returns `false` if the
    /// program is to stop.
    fn serve(control: &mut C, served_at: &mut u64, plane: &mut ControlPlane) -> bool {
        plane.serve(&mut WithoutRules(&mut *control));
        let now = plane.now();
        if now.saturating_sub(*served_at) >= TICK_INTERVAL {
            *served_at = now;
            control.tick(plane);
        }
        !plane.is_stopping()
    }

    /// Stores the origins of the active rules, in list order.
    fn keep(&mut self, origins: Vec<Origin>) {
        self.origins = self.rules.rules().map(|(id, _)| id).zip(origins).collect();
    }

    /// Returns the origin of the rule with this index in the list.
    fn origin(&self, number: usize) -> Option<&Origin> {
        self.rules.rules().nth(number).and_then(|(id, _)| self.origins.get(&id))
    }

    /// Wraps the stage of a worker with the rules.
    pub fn stage<S>(&mut self, worker: &WorkerInfo, stage: S) -> RuleStage<S> {
        self.rules.stage(worker, stage)
    }

    /// Must be called after the ports have started, when their modes are final.
    pub fn started(&mut self, plane: &mut ControlPlane) -> Result<(), Failure> {
        let done = self.rules.started(plane);
        done.map_err(|error| failure(error, |number| self.origin(number).map(|origin| &origin.span)))?;
        if self.settings.hardware == Hardware::Auto {
            self.rules.enable_hardware(plane, (0..self.names.len() as u16).map(PortId::new));
        }
        self.rules.rules().for_each(|(id, rule)| self.log(id, rule));
        Ok(())
    }

    /// Logs where a rule runs, unless it simply runs in the workers.
    fn log(&self, id: RuleId, rule: &Rule) {
        let names = names(&self.names);
        for (port, placement) in self.rules.placement(id) {
            let (name, word) = (&self.names[port.index()], placement.name());
            let why = placement.why().map(|why| format!(" ({why})")).unwrap_or_default();
            tracing::info!("port {name}: {word}{why}: {}", rule.named(Ports(&names)));
        }
        for (port, location) in self.rules.locations(id).ports {
            let name = &self.names[port.index()];
            match location {
                RuleLocation::Software => {}
                RuleLocation::Xdp => {
                    tracing::info!("port {name}: decided in the XDP program: {}", rule.named(Ports(&names)));
                }
                RuleLocation::Injected(why) => {
                    tracing::info!(
                        "port {name}: decided in software, packets are given to the kernel one by one ({why}): {}",
                        rule.named(Ports(&names))
                    );
                }
            }
        }
    }

    /// Replaces the rules of the configuration and its file. Rules that stay keep their ids, and so do those that were
    /// added while the program runs.
    fn replace(&mut self, plane: &mut ControlPlane, new: &RuleSettings) -> Result<usize, Failure> {
        let mut served_at = plane.now();
        let control = &mut self.control;
        // Called for each rule.
        let mut steps = 0;
        let mut step = |control: &mut C, plane: &mut ControlPlane| {
            steps += 1;
            if usize::is_multiple_of(steps, RULES_OF_A_STEP) && !Self::serve(control, &mut served_at, plane) {
                return Err(Failure::failed(RuleTableError::GivenUp));
            }
            Ok(())
        };
        // Rules that were added while the program runs come last, so that they stay in their places if they can.
        let mut before: HashMap<&Rule, VecDeque<RuleId>> = HashMap::new();
        let mut changes = Vec::new();
        for (id, rule) in self.rules.rules() {
            step(control, plane)?;
            match self.origins.get(&id).map(|origin| origin.by) {
                Some(OriginKind::Configuration | OriginKind::File) => before.entry(rule).or_default().push_back(id),
                Some(OriginKind::Change) => changes.push((id, rule)),
                None => {}
            }
        }
        for (id, rule) in &changes {
            before.entry(rule).or_default().push_back(*id);
        }
        let mut entries = Vec::with_capacity(new.entries.len() + changes.len());
        let mut taken = HashSet::new();
        for (number, Entry { span, rule }) in new.entries.iter().enumerate() {
            step(control, plane)?;
            let same = before.get_mut(rule).and_then(VecDeque::pop_front);
            taken.extend(same);
            let entry = same.map_or_else(|| ListEntry::New(rule.clone()), ListEntry::Keep);
            let by = if number < new.config_count { OriginKind::Configuration } else { OriginKind::File };
            entries.push((Origin { by, span: span.clone() }, entry));
        }
        for (id, _) in changes.iter().filter(|(id, _)| !taken.contains(id)) {
            entries.extend(self.origins.get(id).map(|origin| (origin.clone(), ListEntry::Keep(*id))));
        }
        let (origins, list): (Vec<Origin>, Vec<ListEntry>) = entries.into_iter().unzip();
        let is_new: Vec<bool> = list.iter().map(|entry| matches!(entry, ListEntry::New(_))).collect();
        let mut meanwhile = |plane: &mut ControlPlane| Self::serve(control, &mut served_at, plane);
        let ids = self.rules.rearrange_in_parts(plane, list, &mut meanwhile);
        let ids = ids.map_err(|error| failure(error, |number| origins.get(number).map(|origin| &origin.span)))?;
        // The rules are in force, so the rest is done even if the program is to stop.
        let mut of_rules = HashMap::with_capacity(ids.len());
        for (number, ((id, origin), is_new)) in ids.iter().zip(origins).zip(is_new).enumerate() {
            if number.is_multiple_of(RULES_OF_A_STEP) {
                Self::serve(&mut self.control, &mut served_at, plane);
            }
            of_rules.insert(*id, origin);
            if let Some(rule) = self.rules.rule(*id).filter(|_| is_new) {
                self.log(*id, rule);
            }
        }
        self.origins = of_rules;
        self.listed = new.entries.len();
        Ok(ids.len())
    }

    /// Refuses to remove a port that rules name. With `replaced`, only rules that were added while the program runs
    /// count, because the others are replaced.
    fn check_unused(&self, port: PortId, replaced: bool) -> Result<(), Failure> {
        let name = self.names.get(port.index()).map_or("?", String::as_str);
        if self.rules.uses_hardware(port) {
            return Err(Failure::usage(format!(
                "port \"{name}\" cannot be removed while the program runs, because its NIC holds flow rules; set \
                 hardware = \"off\" in [rules] and restart the program"
            )));
        }
        let stays =
            |id: &RuleId| !replaced || self.origins.get(id).is_some_and(|origin| origin.by == OriginKind::Change);
        let using = self.rules.rules().filter(|(id, rule)| stays(id) && names_port(rule, port));
        let names = names(&self.names);
        let using: Vec<String> =
            using.map(|(id, rule)| format!("\n  rule {id}: {}", rule.named(Ports(&names)))).collect();
        if using.is_empty() {
            return Ok(());
        }
        let shown = using.iter().take(MAX_SHOWN).map(String::as_str).collect::<String>();
        let more = using.len().saturating_sub(MAX_SHOWN);
        let more = if more > 0 { format!("\n  and {more} others") } else { String::new() };
        Err(Failure::usage(format!("port \"{name}\" cannot be removed, because flow rules name it:{shown}{more}")))
    }

    /// Adds a rule behind those of its priority, and returns its number.
    fn add(&mut self, plane: &mut ControlPlane, text: &str, by: &str) -> Result<Value, String> {
        let rule = Rule::parse(text, Ports(&names(&self.names))).map_err(|error| error.to_string())?;
        let origin = Origin { by: OriginKind::Change, span: Source::new("the new rule", text).span(0, "") };
        let added = rule.clone();
        let id = self.rules.add(plane, rule).map_err(|error| {
            let of = |number| Some(&self.origin(number).unwrap_or(&origin).span);
            failure(error, of).to_string()
        })?;
        tracing::info!("rule {id} added by {by}: {}", added.named(Ports(&names(&self.names))));
        self.origins.insert(id, origin);
        self.log(id, &added);
        Ok(json!({ "id": id.number() }))
    }

    /// Removes a rule.
    fn remove(&mut self, plane: &mut ControlPlane, number: u64, by: &str) -> Result<Value, String> {
        let id = RuleId::of_number(number);
        let removed = self.rules.rule(id).cloned();
        self.rules.remove(plane, id).map_err(|error| {
            // The error refers to the list without the removed rule.
            let mut stay = self.rules.rules().map(|(id, _)| id).filter(|it| *it != id);
            failure(error, |number| self.origins.get(&stay.nth(number)?).map(|origin| &origin.span)).to_string()
        })?;
        let removed = removed.map(|rule| rule.named(Ports(&names(&self.names))).to_string()).unwrap_or_default();
        tracing::info!("rule {id} removed by {by}: {removed}");
        // A rule of the configuration or its file is there again after a reload.
        self.origins.remove(&id);
        Ok(json!({}))
    }

    /// Returns the row of a rule; `None` if it was removed since the listing began.
    fn row(&mut self, plane: &mut ControlPlane, id: RuleId, asked: &mut HashSet<Arc<Rule>>) -> Option<Row> {
        let it = self.rules.active_rule(id, Some(plane), asked)?;
        let ports = self.placements_json(id);
        let mut places: Vec<&str> = ports.iter().filter_map(|port| port["where"].as_str()).collect();
        places.sort_unstable();
        places.dedup();
        Some(vec![
            id.number().into(),
            it.rule.named(Ports(&names(&self.names))).to_string().into(),
            it.counters.packets.into(),
            it.counters.bytes.into(),
            places.join(" ").into(),
            self.origins.get(&id).map(|origin| origin.by.name()).into(),
            ports.into(),
        ])
    }

    /// Returns for each port where a rule runs, and the reason if the NIC does not run it.
    fn placements_json(&self, id: RuleId) -> Vec<Value> {
        let in_nics = self.rules.placement(id);
        let location = |(port, location): &(PortId, RuleLocation)| {
            let name = &self.names[port.index()];
            match in_nics.iter().find(|(other, _)| other == port) {
                Some((_, nic)) => {
                    json!({ "port": name, "where": nic.name(), "why": nic.why() })
                }
                None => json!({ "port": name, "where": location_name(location) }),
            }
        };
        self.rules.locations(id).ports.iter().map(location).collect()
    }

    /// Returns the final table of rule counters; empty if there are no rules.
    pub fn report(&self) -> String {
        if self.latest.is_empty() {
            return String::new();
        }
        let mut table = Table::new(["PACKETS", "BYTES", "RULE"]);
        let names = names(&self.names);
        for it in &self.latest {
            let rule = it.rule.named(Ports(&names)).to_string();
            table.row([it.counters.packets.to_string(), it.counters.bytes.to_string(), rule]);
        }
        table.to_string()
    }
}

/// Rules that a listing still lacks.
#[derive(Debug)]
struct RestOfList {
    ids: Vec<RuleId>,
    /// Rules that the ports were asked about.
    asked: HashSet<Arc<Rule>>,
}

static RULES: TableSpec = TableSpec {
    name: "rules",
    about: "Flow rules in evaluation order",
    metric: Some("rule"),
    columns: &[
        Column::key("id", "Number of the rule"),
        Column::key("rule", "The rule as text"),
        Column::counter("packets", Unit::Packets, "Packets that the rule matched"),
        Column::counter("bytes", Unit::Bytes, "Bytes of those packets"),
        Column::attribute("where", "Where the rule runs: hardware, split, xdp, injected, software"),
        Column::attribute("origin", "configuration, file: the file of [rules]; change: added while the program runs"),
        Column::attribute("ports", "Where the rule runs on each port, and why it does not run in the NIC"),
    ],
};

static RULE: ObjectSpec = ObjectSpec {
    name: "rule",
    about: "A flow rule",
    operations: &[
        (
            Operation::Add,
            &[Argument::required("rule", ArgumentKind::Text, "the rule as text, with the names of the ports")],
        ),
        (Operation::Remove, &[Argument::required("id", ArgumentKind::Number, "the number of the rule")]),
    ],
};

impl RuleSettings {
    /// Finds what [`ControlWithRules::begin`] would refuse on these ports of a check.
    pub fn check_opened(&self, runtime: &mut Runtime, parser: Parser) -> Result<(), Failure> {
        let list: Vec<Rule> = self.entries.iter().map(|entry| entry.rule.clone()).collect();
        let mut rules = RuleControl::new(runtime, parser, RuleLimits::default());
        let begun = rules.begin(runtime, &list);
        begun.map_err(|error| failure(error, |number| self.entries.get(number).map(|entry| &entry.span)))
    }
}

fn names(names: &[String]) -> Vec<(&str, PortId)> {
    names.iter().map(String::as_str).zip((0..).map(PortId::new)).collect()
}

/// Converts a rule error to a failure at the rule's position. `of` returns the position of a rule in the list.
fn failure<'o>(error: RuleControlError, of: impl FnOnce(usize) -> Option<&'o Span>) -> Failure {
    match error {
        RuleControlError::Refused(refused) => match of(refused.rule) {
            Some(span) => span.error(refused.reason).into(),
            None => Failure::usage(refused.reason),
        },
        other => Failure::failed(other),
    }
}

impl<C: Control> Control for ControlWithRules<C> {
    fn inner(&mut self) -> Option<&mut dyn Control> {
        Some(&mut self.control)
    }

    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        WithoutRules(&mut self.control).punt(punt, plane);
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.control.tick(plane);
        self.rules.tick(plane);
        if let Some(leave) = self.update_nics.filter(|_| self.settings.hardware == Hardware::Auto) {
            leave(&mut self.control, &mut self.rules, plane);
        }
    }

    fn tables(&mut self) -> Vec<&'static TableSpec> {
        [vec![&RULES], self.control.tables()].concat()
    }

    fn list(&mut self, table: &'static TableSpec, page: &mut Page<'_>, plane: &mut ControlPlane) {
        if table.name != RULES.name {
            if let Some(prepare) = self.before_list.filter(|_| self.settings.hardware == Hardware::Auto) {
                prepare(&mut self.control, &self.rules, table, plane);
            }
            return self.control.list(table, page, plane);
        }
        let mut rest = page.take_state().unwrap_or_else(|| RestOfList {
            ids: self.rules.rules().map(|(id, _)| id).collect(),
            asked: HashSet::new(),
        });
        let from = page.cursor() as usize;
        let ids = rest.ids.iter().enumerate().skip(from).map(|(position, id)| (position as u64, *id));
        page.extend_from(ids, |id| self.row(plane, id, &mut rest.asked));
        page.keep_state(rest);
    }

    fn objects(&mut self) -> Vec<&'static ObjectSpec> {
        [vec![&RULE], self.control.objects()].concat()
    }

    fn change(&mut self, change: &Change<'_>, plane: &mut ControlPlane) -> Result<Changed, String> {
        if change.object != RULE.name {
            return self.control.change(change, plane);
        }
        let done = match change.operation {
            Operation::Add => self.add(plane, change.text("rule")?.unwrap_or_default(), change.origin),
            _ => self.remove(plane, change.number("id")?.unwrap_or_default(), change.origin),
        };
        done.map(Changed::Done)
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        self.control.stop(plane);
        self.latest = self.rules.active_rules(Some(plane));
        self.final_placements = self.latest.iter().map(|it| self.placements_json(it.id)).collect();
        self.rules.disable_hardware(plane);
    }

    /// Adds `rules` to the program's own summary: for each rule `rule` (with port numbers), `text` (with port names),
    /// where it runs, `packets` and `bytes`.
    fn summary(&mut self) -> Option<Value> {
        let names = names(&self.names);
        let rule = |(it, ports): (&ActiveRule, &Vec<Value>)| {
            json!({
                "rule": it.rule.to_string(),
                "text": it.rule.named(Ports(&names)).to_string(),
                "packets": it.counters.packets,
                "bytes": it.counters.bytes,
                "ports": ports,
            })
        };
        let rules: Vec<Value> = self.latest.iter().zip(&self.final_placements).map(rule).collect();
        let mut object = match self.control.summary() {
            Some(Value::Object(object)) => object,
            Some(other) => [("own".to_owned(), other)].into_iter().collect(),
            None => serde_json::Map::new(),
        };
        object.insert("rules".to_owned(), rules.into());
        Some(Value::Object(object))
    }
}

impl<C: Reconfigure> Reconfigure for ControlWithRules<C>
where
    C::Setup: AsRef<RuleSettings>,
{
    type Setup = C::Setup;

    fn read(source: &Source, numbers: &PortNumbers) -> Result<C::Setup, Failure> {
        C::read(source, numbers)
    }

    fn config(setup: &mut C::Setup) -> &mut Config {
        C::config(setup)
    }

    fn can_change_ports(&self) -> bool {
        self.control.can_change_ports()
    }

    fn set_ports(&mut self, plane: &mut ControlPlane) -> Result<(), Failure> {
        self.names = plane.ports().iter().map(|port| port.name.clone()).collect();
        let done = self.rules.set_ports(plane);
        done.map_err(|error| failure(error, |number| self.origin(number).map(|origin| &origin.span)))?;
        self.control.set_ports(plane)
    }

    fn config_objects() -> &'static [&'static ConfigObject] {
        C::config_objects()
    }

    fn can_change(&self, path: &[String]) -> bool {
        match path {
            [rule, ..] if rule == "rule" => true,
            [rules, key, ..] if rules == "rules" && key == "file" => true,
            // An empty table.
            [rules] if rules == "rules" => true,
            path => self.control.can_change(path),
        }
    }

    fn check(
        &mut self,
        setup: &C::Setup,
        ports: &ChangedPorts,
        parts: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<(), Failure> {
        for port in &ports.removed {
            self.check_unused(*port, parts.rules)?;
        }
        self.control.check(setup, ports, parts, plane)
    }

    fn apply(
        &mut self,
        setup: C::Setup,
        parts: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<Vec<String>, Failure> {
        let mut notes = Vec::new();
        if parts.rules {
            let before: Vec<RuleId> = self.rules.rules().map(|(id, _)| id).collect();
            let count = self.replace(plane, setup.as_ref())?;
            tracing::info!("the rules were reloaded: {count} are active");
            let kept: HashSet<RuleId> = before.iter().copied().collect();
            let new = self.rules.rules().filter(|(id, _)| !kept.contains(id)).count();
            let gone = before.len() + new - count;
            if new + gone > 0 {
                notes.push(format!("flow rules: {new} new, {gone} removed"));
            } else if !self.rules.rules().map(|(id, _)| id).eq(before) {
                notes.push("flow rules: another order".to_owned());
            }
        }
        notes.extend(self.control.apply(setup, parts, plane)?);
        Ok(notes)
    }

    fn changed_rules(&self) -> Option<ChangedRules> {
        let added = self.origins.values().filter(|origin| origin.by == OriginKind::Change).count();
        if added == 0 && self.origins.len() == self.listed {
            return None;
        }
        let rules = self.rules.rules().map(|(_, rule)| Arc::clone(rule)).collect();
        Some(ChangedRules { rules, ports: self.names.clone() })
    }
}

/// Returns the name of a location where a rule runs.
pub fn location_name(location: &RuleLocation) -> &'static str {
    match location {
        RuleLocation::Software => "software",
        RuleLocation::Xdp => "xdp",
        RuleLocation::Injected(_) => "injected",
    }
}

/// Runs a program with its rules, if there are any, from opened ports to the summary. `configuration` is its source and
/// file. Also returns the report of the rules.
pub fn run<S: Stage + 'static, C: Reconfigure>(
    mut runtime: Runtime,
    settings: RuleSettings,
    mut make: impl FnMut(&WorkerInfo) -> S,
    control: C,
    configuration: (&Source, Option<&Path>),
    options: &RunOptions,
) -> Result<(Summary, String), Failure>
where
    C::Setup: AsRef<RuleSettings>,
{
    let (source, path) = configuration;
    if settings.is_empty() {
        let mut control = LiveConfiguration::new(control, source, path);
        let summary = runtime.run(make, &mut control, options).map_err(Failure::failed)?;
        return Ok((summary, String::new()));
    }
    let control = ControlWithRules::begin(&mut runtime, settings, Parser::default(), control)?;
    let mut control = LiveConfiguration::new(control, source, path);
    let rules = &mut control.control.rules;
    let mut running = runtime.start(|worker| rules.stage(worker, make(worker))).map_err(Failure::failed)?;
    if let Err(refused) = control.control.started(running.plane()) {
        running.stop(&mut control);
        return Err(refused);
    }
    running.run(&mut control, options);
    let summary = running.stop(&mut control);
    Ok((summary, control.control.report()))
}
