use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use wirepath_pipeline::rules::hardware::Placement;
use wirepath_pipeline::rules::{Place, Placed, RuleControl, RuleControlError, RuleLimits, Ruled, Standing};
use wirepath_pipeline::{Control, ControlPlane, Learn, Punt, Rates, RunOptions, Runtime, Stage, Summary, WorkerInfo};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::{Ports, Rule};
use wirepath_pmd::packet::Packet;
use wirepath_pmd::port::{PortEvent, PortId};
use wirepath_pmd::settings::{ConfigError, Source};
use wirepath_wire::Parser;

use super::config::{Entry, Hardware, RuleSettings};
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
    names: Vec<String>,
    placed: Vec<Placed>,
    /// Where each rule runs on ports with rule hardware.
    in_nics: Vec<Vec<(PortId, Placement)>>,
    live: bool,
    reload: Arc<AtomicBool>,
    /// As looked at last, and when that was.
    latest: Vec<Standing>,
    looked: u64,
    /// Rules that came by the socket; they stand behind the others.
    added: Vec<Entry>,
    socket: Option<Server>,
    /// What was shown last.
    shown: Vec<u64>,
    shown_at: f64,
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
            names,
            placed: Vec::new(),
            in_nics: Vec::new(),
            live,
            reload,
            latest: Vec::new(),
            looked: 0,
            added: Vec::new(),
            socket: None,
            shown: Vec::new(),
            shown_at: 0.0,
        };
        let list = it.list();
        it.placed = it.rules.begin(runtime, &list).map_err(|error| failure(&it.settings.entries, error))?;
        it.socket = it.settings.socket.as_deref().map(Server::open).transpose()?;
        Ok(it)
    }

    fn list(&self) -> Vec<Rule> {
        self.settings.entries.iter().map(|entry| entry.rule.clone()).collect()
    }

    /// The rules around the stage of a worker.
    pub fn stage<S>(&mut self, worker: &WorkerInfo, stage: S) -> Ruled<S> {
        self.rules.stage(worker, stage)
    }

    /// To be called once the ports run, and their modes are certain.
    pub fn started(&mut self, plane: &mut ControlPlane) -> Result<(), Failure> {
        self.placed = self.rules.started(plane).map_err(|error| failure(&self.settings.entries, error))?;
        if self.settings.hardware == Hardware::Auto {
            self.rules.use_hardware(plane, 0..self.names.len() as PortId);
        }
        self.log();
        Ok(())
    }

    /// Says where rules run that do not simply run in the workers.
    fn log(&mut self) {
        self.in_nics = self.rules.placements();
        for (entry, placements) in self.settings.entries.iter().chain(&self.added).zip(&self.in_nics) {
            for (port, placement) in placements {
                let (name, word) = (&self.names[usize::from(*port)], placement.word());
                let why = placement.obstacle().map(|why| format!(" ({why})")).unwrap_or_default();
                tracing::info!("port {name}: {word}{why}: {}", entry.rule);
            }
        }
        for (entry, placed) in self.settings.entries.iter().chain(&self.added).zip(&self.placed) {
            for (port, place) in &placed.ports {
                let name = &self.names[usize::from(*port)];
                match place {
                    Place::Software => {}
                    Place::Xdp => tracing::info!("port {name}: decided in the XDP program: {}", entry.rule),
                    Place::Injected(why) => {
                        tracing::info!(
                            "port {name}: decided in software, packets are given to the kernel one by one ({why}): {}",
                            entry.rule
                        );
                    }
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
        let mut entries: Vec<Entry> = self.settings.entries[..self.settings.own].to_vec();
        entries.extend(self.settings.read_file(&names(&self.names))?);
        let own = entries.len();
        entries.extend(self.added.iter().cloned());
        self.put(plane, entries, own)
    }

    /// Puts other rules in force, of which the first `own` are those of the configuration and its file.
    fn put(&mut self, plane: &mut ControlPlane, mut entries: Vec<Entry>, own: usize) -> Result<usize, Failure> {
        let list: Vec<Rule> = entries.iter().map(|entry| entry.rule.clone()).collect();
        self.placed = self.rules.replace(plane, &list).map_err(|error| failure(&entries, error))?;
        self.added = entries.split_off(own);
        self.settings.entries = entries;
        self.log();
        Ok(list.len())
    }

    /// Answers a request that came by the socket.
    fn answer(&mut self, plane: &mut ControlPlane, request: Request) -> Result<Value, String> {
        let all = |it: &Self| it.settings.entries.iter().chain(&it.added).cloned().collect::<Vec<_>>();
        let own = self.settings.entries.len();
        match request {
            Request::List => {
                self.look(plane);
                // A NIC may have refused rules since, or taken them.
                self.in_nics = self.rules.placements();
                let rule = |(i, it): (usize, &Standing)| {
                    let (packets, bytes) = (it.counters.packets, it.counters.bytes);
                    let ports = self.places(i);
                    json!({
                        "id": it.id.number(),
                        "rule": it.rule.to_string(),
                        "packets": packets,
                        "bytes": bytes,
                        "ports": ports,
                    })
                };
                let rules: Vec<Value> = self.latest.iter().enumerate().map(rule).collect();
                Ok(json!({ "ok": true, "rules": rules }))
            }
            Request::Add(text) => {
                let rule = Rule::parse(&text, Ports(&names(&self.names))).map_err(|error| error.to_string())?;
                let mut entries = all(self);
                entries.push(Entry { place: Source::new("the socket", text).place(0, ""), rule });
                self.put(plane, entries, own).map_err(|failure| failure.to_string())?;
                let id = self.rules.standing(None).last().map(|it| it.id.number());
                Ok(json!({ "ok": true, "id": id }))
            }
            Request::Remove(id) => {
                let place = self.rules.standing(None).iter().position(|it| it.id.number() == id);
                let place = place.ok_or_else(|| format!("there is no rule {id}"))?;
                let mut entries = all(self);
                entries.remove(place);
                // One of the configuration itself is not read again; one of its file is, on SIGHUP.
                if place < self.settings.own {
                    self.settings.own -= 1;
                }
                self.put(plane, entries, own - usize::from(place < own)).map_err(|failure| failure.to_string())?;
                Ok(json!({ "ok": true }))
            }
        }
    }

    /// Where a rule runs, for each port: in a word, and what stands in the way of the NIC where there is one.
    fn places(&self, number: usize) -> Vec<Value> {
        let Some(placed) = self.placed.get(number) else { return Vec::new() };
        let in_nic =
            |port: &PortId| self.in_nics.get(number)?.iter().find(|(other, _)| other == port).map(|(_, it)| it);
        let place = |(port, place): &(PortId, Place)| {
            let name = &self.names[usize::from(*port)];
            match in_nic(port) {
                Some(nic) => {
                    let why = nic.obstacle().map(ToString::to_string);
                    json!({ "port": name, "where": nic.word(), "why": why })
                }
                None => json!({ "port": name, "where": word(place) }),
            }
        };
        placed.ports.iter().map(place).collect()
    }

    /// What the rules did, as a table for the end.
    pub fn report(&self) -> String {
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
        for (i, it) in self.latest.iter().enumerate() {
            let before = self.shown.get(i).copied().unwrap_or(0);
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
        self.shown = self.latest.iter().map(|it| it.counters.packets).collect();
        self.shown_at = elapsed;
        // Nobody reads: that is no reason to stop forwarding.
        let _ = print(text);
    }
}

fn names(names: &[String]) -> Vec<(&str, PortId)> {
    names.iter().map(String::as_str).zip(0..).collect()
}

/// A rule that is refused, at its place.
fn failure(entries: &[Entry], error: RuleControlError) -> Failure {
    match error {
        RuleControlError::Refused(refused) => {
            let at = |entry: &Entry| -> ConfigError { entry.place.error(refused.reason.clone()) };
            entries.get(refused.rule).map_or_else(|| Failure::usage(&refused.reason), |entry| at(entry).into())
        }
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
        self.in_nics = self.rules.placements();
        self.rules.leave_hardware(plane);
    }

    /// The program's own, and `rules`: each with its text, where it runs, `packets` and `bytes`.
    fn summary(&mut self) -> Option<Value> {
        let rules: Vec<Value> = self
            .latest
            .iter()
            .enumerate()
            .map(|(i, it)| {
                json!({
                    "rule": it.rule.to_string(),
                    "packets": it.counters.packets,
                    "bytes": it.counters.bytes,
                    "ports": self.places(i),
                })
            })
            .collect();
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
