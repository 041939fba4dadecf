use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use wirepath_pipeline::rules::{Place, RuleControl, RuleControlError, RuleId, RuleLimits, Ruled, Standing};
use wirepath_pipeline::{Control, ControlPlane, Learn, Punt, Rates, RunOptions, Runtime, Stage, Summary, WorkerInfo};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::{Ports, Rule};
use wirepath_pmd::packet::Packet;
use wirepath_pmd::port::{PortEvent, PortId};
use wirepath_pmd::settings::{self, Source};
use wirepath_wire::Parser;

use super::config::{Hardware, RuleSettings};
use super::socket::{Request, Server};
use crate::cli::{Failure, Rate, Table, print};

/// Rules that are shown in a live display.
const SHOWN: usize = 20;

/// The control of a program with flow rules around its stages: keeps the rules, takes those of a file anew on SIGHUP, and tells what
/// they counted.
#[derive(Debug)]
pub struct WithRules<C> {
    /// The program's own.
    pub control: C,
    /// What the program itself leaves to NICs: called on every tick.
    pub leave_to_nics: Option<fn(&mut C, &mut RuleControl, &mut ControlPlane)>,
    rules: RuleControl,
    settings: RuleSettings,
    /// Where each rule in force came from.
    origins: HashMap<RuleId, Origin>,
    names: Vec<String>,
    live: bool,
    reload: Arc<AtomicBool>,
    /// As looked at last, and when that was.
    latest: Vec<Standing>,
    looked: u64,
    /// Where they ran at the end.
    at_last: Vec<Vec<Value>>,
    socket: Option<Server>,
    /// Packets of each rule, as shown last.
    shown: HashMap<RuleId, u64>,
    shown_at: f64,
}

/// Where a rule came from. In the list they stand in this order.
#[derive(Clone, Debug)]
struct Origin {
    by: By,
    place: settings::Place,
}

/// By what a rule came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The configuration itself.
    Configuration,
    /// Its file of rules: read again on SIGHUP.
    File,
    /// The socket.
    Socket,
}

/// Nanoseconds between two looks at the counters.
const LOOK: u64 = 500_000_000;

impl<C: Control> WithRules<C> {
    /// Checks the rules against the ports and puts them in force, before anything is started.
    pub fn begin(
        runtime: &mut Runtime,
        settings: RuleSettings,
        parser: Parser,
        control: C,
        live: bool,
    ) -> Result<Self, Failure> {
        let reload = Arc::new(AtomicBool::new(false));
        if settings.file.is_some() {
            signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&reload))
                .map_err(|e| Failure::failed(format!("cannot handle SIGHUP: {e}")))?;
        }
        let rules = RuleControl::new(runtime, parser, RuleLimits::default());
        let names = runtime.ports().iter().map(|port| port.name.clone()).collect();
        let mut it = Self {
            control,
            leave_to_nics: None,
            rules,
            settings,
            origins: HashMap::new(),
            names,
            live,
            reload,
            latest: Vec::new(),
            looked: 0,
            at_last: Vec::new(),
            socket: None,
            shown: HashMap::new(),
            shown_at: 0.0,
        };
        let (own, entries) = (it.settings.own, std::mem::take(&mut it.settings.entries));
        let by = |number| if number < own { By::Configuration } else { By::File };
        let entries = entries.into_iter().zip(0..);
        let (origins, list): (Vec<Origin>, Vec<Rule>) =
            entries.map(|(entry, number)| (Origin { by: by(number), place: entry.place }, entry.rule)).unzip();
        it.rules.begin(runtime, &list).map_err(|error| failure(error, |number| origins.get(number)))?;
        it.keep(origins);
        it.socket = it.settings.socket.as_deref().map(Server::open).transpose()?;
        Ok(it)
    }

    /// Notes where the rules in force came from, in the order of the list.
    fn keep(&mut self, origins: Vec<Origin>) {
        self.origins = self.rules.rules().map(|(id, _)| id).zip(origins).collect();
    }

    /// Where the rule at a place of the list came from.
    fn origin(&self, number: usize) -> Option<&Origin> {
        self.rules.rules().nth(number).and_then(|(id, _)| self.origins.get(&id))
    }

    /// The rules around the stage of a worker.
    pub fn stage<S>(&mut self, worker: &WorkerInfo, stage: S) -> Ruled<S> {
        self.rules.stage(worker, stage)
    }

    /// To be called once the ports run, and their modes are certain.
    pub fn started(&mut self, plane: &mut ControlPlane) -> Result<(), Failure> {
        let done = self.rules.started(plane);
        done.map_err(|error| failure(error, |number| self.origin(number)))?;
        if self.settings.hardware == Hardware::Auto {
            self.rules.use_hardware(plane, 0..self.names.len() as PortId);
        }
        self.rules.rules().for_each(|(id, rule)| self.log(id, rule));
        Ok(())
    }

    /// Says where a rule runs that does not simply run in the workers.
    fn log(&self, id: RuleId, rule: &Rule) {
        for (port, placement) in self.rules.placement(id) {
            let (name, word) = (&self.names[usize::from(port)], placement.word());
            let why = placement.why().map(|why| format!(" ({why})")).unwrap_or_default();
            tracing::info!("port {name}: {word}{why}: {rule}");
        }
        for (port, place) in self.rules.placed(id).ports {
            let name = &self.names[usize::from(port)];
            match place {
                Place::Software => {}
                Place::Xdp => tracing::info!("port {name}: decided in the XDP program: {rule}"),
                Place::Injected(why) => {
                    tracing::info!(
                        "port {name}: decided in software, packets are given to the kernel one by one ({why}): {rule}"
                    );
                }
            }
        }
    }

    /// Reads the file of rules again. What is wrong with it is logged, and the rules stay as they are.
    fn reload(&mut self, plane: &mut ControlPlane) {
        match self.try_reload(plane) {
            Ok(count) => tracing::info!("rules were read again: {count} are in force"),
            Err(failure) => tracing::error!("rules stay as they were: {failure}"),
        }
    }

    fn try_reload(&mut self, plane: &mut ControlPlane) -> Result<usize, Failure> {
        let file = self.settings.read_file(&names(&self.names))?;
        let (rules, origins) = (&self.rules, &self.origins);
        let by = |by: By| {
            let stay = rules.rules().filter_map(|(id, rule)| {
                let origin = origins.get(&id).filter(|origin| origin.by == by)?;
                Some((origin.clone(), Rule::clone(rule)))
            });
            stay.collect::<Vec<_>>()
        };
        let file = file.into_iter().map(|it| (Origin { by: By::File, place: it.place }, it.rule)).collect::<Vec<_>>();
        let all = [by(By::Configuration), file, by(By::Socket)].into_iter().flatten();
        let (origins, list): (Vec<Origin>, Vec<Rule>) = all.unzip();
        self.rules.replace(plane, &list).map_err(|error| failure(error, |number| origins.get(number)))?;
        self.keep(origins);
        self.rules.rules().for_each(|(id, rule)| self.log(id, rule));
        Ok(list.len())
    }

    /// Answers a request that came by the socket.
    fn answer(&mut self, plane: &mut ControlPlane, request: Request) -> Result<Value, String> {
        match request {
            Request::List => {
                self.look(plane);
                let rule = |it: &Standing| {
                    json!({
                        "id": it.id.number(),
                        "rule": it.rule.to_string(),
                        "packets": it.counters.packets,
                        "bytes": it.counters.bytes,
                        "ports": self.places(it.id),
                    })
                };
                let rules: Vec<Value> = self.latest.iter().map(rule).collect();
                Ok(json!({ "ok": true, "rules": rules }))
            }
            Request::Add(text) => {
                let rule = Rule::parse(&text, Ports(&names(&self.names))).map_err(|error| error.to_string())?;
                let origin = Origin { by: By::Socket, place: Source::new("the socket", text).place(0, "") };
                let told = rule.clone();
                let id = self.rules.add(plane, rule).map_err(|error| {
                    let of = |number| self.origin(number).or(Some(&origin));
                    failure(error, of).to_string()
                })?;
                self.origins.insert(id, origin);
                self.log(id, &told);
                Ok(json!({ "ok": true, "id": id.number() }))
            }
            Request::Remove(number) => {
                let id = RuleId::of_number(number);
                self.rules.remove(plane, id).map_err(|error| {
                    // Told of the list without it.
                    let mut stay = self.rules.rules().map(|(id, _)| id).filter(|it| *it != id);
                    failure(error, |number| self.origins.get(&stay.nth(number)?)).to_string()
                })?;
                // One of the configuration itself is not read again; one of its file is, on SIGHUP.
                self.origins.remove(&id);
                Ok(json!({ "ok": true }))
            }
        }
    }

    /// Where a rule runs, for each port: in a word, and what stands in the way of the NIC where there is one.
    fn places(&self, id: RuleId) -> Vec<Value> {
        let in_nics = self.rules.placement(id);
        let place = |(port, place): &(PortId, Place)| {
            let name = &self.names[usize::from(*port)];
            match in_nics.iter().find(|(other, _)| other == port) {
                Some((_, nic)) => {
                    json!({ "port": name, "where": nic.word(), "why": nic.why() })
                }
                None => json!({ "port": name, "where": word(place) }),
            }
        };
        self.rules.placed(id).ports.iter().map(place).collect()
    }

    /// What the rules did, as a table for the end; nothing where there are none.
    pub fn report(&self) -> String {
        if self.latest.is_empty() {
            return String::new();
        }
        let mut table = Table::new(["PACKETS", "BYTES", "RULE"]);
        for it in &self.latest {
            table.row([it.counters.packets.to_string(), it.counters.bytes.to_string(), it.rule.to_string()]);
        }
        table.to_string()
    }

    fn look(&mut self, plane: &mut ControlPlane) {
        self.looked = plane.now();
        self.latest = self.rules.standing(Some(plane));
    }

    fn show(&mut self, elapsed: f64) {
        let time = (elapsed - self.shown_at).max(1e-9);
        let mut text = String::new();
        let mut more = 0;
        for it in &self.latest {
            let before = self.shown.get(&it.id).copied().unwrap_or(0);
            let new = it.counters.packets.saturating_sub(before);
            if new == 0 {
                continue;
            }
            if text.lines().count() == SHOWN {
                more += 1;
                continue;
            }
            text += &format!("         {}pps  {}\n", Rate(new as f64 / time), it.rule);
        }
        if more > 0 {
            text += &format!("         and {more} rules more\n");
        }
        self.shown = self.latest.iter().map(|it| (it.id, it.counters.packets)).collect();
        self.shown_at = elapsed;
        // Nobody reads: that is no reason to stop forwarding.
        let _ = print(text);
    }
}

fn names(names: &[String]) -> Vec<(&str, PortId)> {
    names.iter().map(String::as_str).zip(0..).collect()
}

/// A rule that is refused, at its place; `of` says where the rules of the list came from.
fn failure<'o>(error: RuleControlError, of: impl FnOnce(usize) -> Option<&'o Origin>) -> Failure {
    match error {
        RuleControlError::Refused(refused) => match of(refused.rule) {
            Some(origin) => origin.place.error(refused.reason).into(),
            None => Failure::usage(refused.reason),
        },
        other => Failure::failed(other),
    }
}

impl<C: Control> Control for WithRules<C> {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        if let Some(punt) = self.rules.punt(punt, plane) {
            self.control.punt(punt, plane);
        }
    }

    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        self.control.learn(learn, plane);
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.control.tick(plane);
        let now = plane.now();
        self.rules.tick(plane);
        if let Some(leave) = self.leave_to_nics.filter(|_| self.settings.hardware == Hardware::Auto) {
            leave(&mut self.control, &mut self.rules, plane);
        }
        if self.reload.swap(false, Ordering::Relaxed) {
            self.reload(plane);
        }
        if let Some(mut socket) = self.socket.take() {
            socket.serve(|request| self.answer(plane, request));
            self.socket = Some(socket);
        }
        // An answer to a question may have looked just now.
        if self.live && now.saturating_sub(self.looked) > LOOK {
            self.look(plane);
        }
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        self.control.port_event(port, event, plane);
    }

    fn rates(&mut self, rates: &Rates) {
        self.control.rates(rates);
        if self.live {
            self.show(rates.elapsed.as_secs_f64());
        }
    }

    fn refused(&mut self, packet: Packet, reason: DropReason) {
        self.control.refused(packet, reason);
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        self.control.stop(plane);
        self.look(plane);
        self.at_last = self.latest.iter().map(|it| self.places(it.id)).collect();
        self.rules.leave_hardware(plane);
    }

    /// The program's own, and `rules`: each with its text, where it runs, `packets` and `bytes`.
    fn summary(&mut self) -> Option<Value> {
        let rule = |(it, ports): (&Standing, &Vec<Value>)| {
            json!({
                "rule": it.rule.to_string(),
                "packets": it.counters.packets,
                "bytes": it.counters.bytes,
                "ports": ports,
            })
        };
        let rules: Vec<Value> = self.latest.iter().zip(&self.at_last).map(rule).collect();
        let mut object = match self.control.summary() {
            Some(Value::Object(object)) => object,
            Some(other) => [("own".to_owned(), other)].into_iter().collect(),
            None => serde_json::Map::new(),
        };
        object.insert("rules".to_owned(), rules.into());
        Some(Value::Object(object))
    }
}

/// Where a rule runs, in a word.
pub fn word(place: &Place) -> &'static str {
    match place {
        Place::Software => "software",
        Place::Xdp => "xdp",
        Place::Injected(_) => "injected",
    }
}

/// The whole life of a program with rules, if there are any: from opened ports to the summary, and what is to be printed of the rules.
pub fn run<S: Stage + 'static, C: Control>(
    mut runtime: Runtime,
    settings: RuleSettings,
    mut make: impl FnMut(&WorkerInfo) -> S,
    mut control: C,
    options: &RunOptions,
    live: bool,
) -> Result<(Summary, String), Failure> {
    if settings.is_empty() {
        let summary = runtime.run(make, &mut control, options).map_err(Failure::failed)?;
        return Ok((summary, String::new()));
    }
    let mut control = WithRules::begin(&mut runtime, settings, Parser::default(), control, live)?;
    let mut running = runtime.start(|worker| control.rules.stage(worker, make(worker))).map_err(Failure::failed)?;
    if let Err(refused) = control.started(running.plane()) {
        running.stop(&mut control);
        return Err(refused);
    }
    running.run(&mut control, options);
    let summary = running.stop(&mut control);
    Ok((summary, control.report()))
}
