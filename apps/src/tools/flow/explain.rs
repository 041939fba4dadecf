use std::net::IpAddr;
use std::path::Path;
use wirepath_packet::PortId;

use serde_json::{Value, json};
use wirepath_flow::{Direction, Field, Key, Ports, Rule};
use wirepath_pipeline::PortInfo;
use wirepath_pipeline::rules::offload::{self, Obstacle, Placement};
use wirepath_pipeline::rules::{RuleLocation, check_on, locate_rule};
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::port::hardware::RuleCapabilities;
use wirepath_settings::Source;
use wirepath_wire::{MacAddr, Tunnels};

use super::input::{self, Input, Program};
use super::{ExplainArguments, check::report_errors};
use crate::gateway::{GatewayRule, gateway_rules};
use crate::tools::devices::query_rules;
use wirepath::cli::{Failure, print, print_json};
use wirepath::rules::{Entry, Hardware, UnopenedPorts, location_name};

/// The rule hardware that the ports are assumed to have.
enum Nic<'a> {
    /// A device of this machine, `DRIVER:DEVICE`. It is queried for each port with the port's settings.
    Local(&'a str),
    /// Capabilities recorded from a device.
    Recorded(Box<RuleCapabilities>),
}

impl Nic<'_> {
    fn driver(&self) -> &str {
        match self {
            Self::Local(name) => name.split_once(':').map_or(name, |(driver, _)| driver),
            Self::Recorded(capabilities) => &capabilities.driver,
        }
    }

    fn capabilities(&self, port: &PortSettings) -> Result<RuleCapabilities, Failure> {
        match self {
            Self::Local(name) => query_rules(name, Some(&*port.plan)),
            Self::Recorded(capabilities) => Ok(RuleCapabilities::clone(capabilities)),
        }
    }
}

/// The gateway's own forwarding.
struct Forwarding {
    /// Tunnels.
    rules: Vec<GatewayRule>,
    /// Where each of them runs, if it is known.
    placements: Vec<Option<Placement>>,
    /// VRF and destination of each static route.
    routes: Vec<(String, String)>,
}

/// Where a rule runs on a port.
struct Row {
    /// Number of the port, as used in rules.
    id: u16,
    port: String,
    driver: &'static str,
    location: Result<RuleLocation, String>,
    /// Name of the NIC placement if the rule runs in the NIC, wholly or in part.
    nic: Option<&'static str>,
    /// Reason why the rule does not run closer to the wire.
    why: String,
}

pub(super) fn run(arguments: &ExplainArguments, json: bool) -> Result<(), Failure> {
    let nic = match (&arguments.port, &arguments.capabilities) {
        (Some(name), _) => Some(Nic::Local(name)),
        (_, Some(file)) => Some(Nic::Recorded(Box::new(recorded(file)?))),
        _ => None,
    };
    let input = input::read(&arguments.config.input())?;
    report_errors(&input)?;
    let Input { entries, program, ports: names, .. } = input;
    let names = names.names();
    let Some(program) = program else {
        return Err(Failure::usage("rules alone run nowhere: give a configuration with the ports they are for"));
    };
    let (ports, own) = match &program {
        Program::L2fwd(program) => (&program.0.ports, Vec::new()),
        Program::Gateway(setup) => {
            // Placeholders for addresses that only opened ports and resolved next hops have.
            let unknown = |_: IpAddr| (MacAddr([2, 0, 0, 0, 0, 0]), MacAddr([2, 0, 0, 0, 0, 0xff]));
            (&setup.common.ports, gateway_rules(&setup.gateway, &unknown))
        }
    };
    let mut rows = rows(&entries, ports, program.hardware())?;
    let mut own_rows: Vec<Option<Placement>> = own.iter().map(without_nic).collect();
    if let Some(nic) = nic.filter(|_| program.hardware() == Hardware::Auto) {
        let tunnels = match &program {
            Program::L2fwd(_) => Tunnels::default(),
            Program::Gateway(setup) => setup.gateway.underlay.rule_tunnels(),
        };
        own_rows = in_hardware(&mut rows, &nic, (ports, Ports(&names)), tunnels, (&entries, &own))?;
    }
    let refused = rows.iter().flatten().filter(|row| row.location.is_err()).count();
    let routes = match &program {
        Program::L2fwd(_) => Vec::new(),
        Program::Gateway(setup) => routes(&setup.gateway),
    };
    let own = Forwarding { rules: own, placements: own_rows, routes };
    if json {
        print_json(&report(&entries, Ports(&names), &rows, &own, refused == 0))?;
    } else {
        print(text(&entries, Ports(&names), &rows, &own))?;
    }
    match refused {
        0 => Ok(()),
        n => Err(Failure::usage(format!("{n} refusals of rules on ports; the program would not start"))),
    }
}

fn rows(entries: &[Entry], settings: &[PortSettings], hardware: Hardware) -> Result<Vec<Vec<Row>>, Failure> {
    let rules: Vec<Rule> = entries.iter().map(|entry| entry.rule.clone()).collect();
    let unopened = UnopenedPorts::ask(settings, &rules)?;
    let UnopenedPorts { ports, decided } = &unopened;
    let rows = |((number, rule), judged): ((usize, &Rule), Result<_, String>)| {
        let row = |(port, location): (PortId, Result<RuleLocation, String>)| {
            let info = &ports[port.index()];
            let location = check_on(rule, ports, port).map_or(location, Err);
            (port, info, location)
        };
        let mut rows: Vec<_> = locate_rule(rule, number, ports, decided).into_iter().map(row).collect();
        // A limit of the list concerns all ports.
        if let Err(why) = judged
            && rows.iter().all(|(.., location)| location.is_ok())
        {
            rows.iter_mut().for_each(|(.., location)| *location = Err(why.clone()));
        }
        let row = |(port, info, location): (PortId, &PortInfo, Result<RuleLocation, String>)| {
            let driver = info.capabilities.driver;
            let why = why(rule, &settings[port.index()], hardware, &location);
            Row { id: port.number(), port: info.name.clone(), driver, why, location, nic: None }
        };
        rows.into_iter().map(row).collect()
    };
    Ok(rules.iter().enumerate().zip(unopened.judge(&rules)).map(rows).collect())
}

/// Returns the reason why a rule does not run closer to the wire.
fn why(rule: &Rule, port: &PortSettings, hardware: Hardware, location: &Result<RuleLocation, String>) -> String {
    let driver = port.plan.driver();
    match location {
        Err(why) => why.clone(),
        Ok(RuleLocation::Injected(why)) => format!("packets are given to the kernel one by one: {why}"),
        Ok(RuleLocation::Xdp) => "before packets reach the port".to_owned(),
        Ok(RuleLocation::Software) => match rule.software_only() {
            Some((_, bar)) => bar.text().to_owned(),
            None if !port.plan.may_offload_rules() => format!("driver {driver} puts no rules into a NIC here"),
            None if hardware == Hardware::Off => "hardware = \"off\" leaves everything to the workers".to_owned(),
            None => "the NIC runs the rules that it supports once the program runs; --port and --capabilities show \
                which"
                .to_owned(),
        },
    }
}

/// Returns where a part of the gateway's forwarding runs, as far as no NIC matters.
fn without_nic(own: &GatewayRule) -> Option<Placement> {
    let why = own.rule.as_ref().err()?;
    let name = if own.direction == Direction::Ingress { "decap" } else { "encap" };
    Some(Placement::Software(Obstacle { what: name.to_owned(), why: why.clone() }))
}

/// Reason why workers route.
const ROUTES: &str = "workers look up routes, rewrite MAC addresses and decrement the TTL; a NIC has no table of the \
                      neighbours, and sends no packet of one port through another";

/// Returns VRF and destination of each static route.
fn routes(gateway: &GatewayConfig) -> Vec<(String, String)> {
    let routing = &gateway.routing;
    let name = |vrf: usize| routing.vrfs.get(vrf).map_or_else(String::new, |vrf| vrf.name.clone());
    routing.routes.iter().map(|route| (name(route.vrf), route.to.to_string())).collect()
}

/// Reads the recorded capabilities of a device.
fn recorded(file: &Path) -> Result<RuleCapabilities, Failure> {
    let source = Source::load_regular(file)?;
    serde_json::from_str(source.text()).map_err(|error| {
        let text = "not what `wirepath devices --rules` prints of a NIC";
        Failure::usage(format!("{}: {text}: {error}", file.display()))
    })
}

/// Adds to the rows the placement of each rule in this rule hardware, for the ports that may have it. Returns
/// the placements of the gateway's own tunnels.
fn in_hardware(
    rows: &mut [Vec<Row>],
    nic: &Nic<'_>,
    (ports, names): (&[PortSettings], Ports<'_>),
    tunnels: Tunnels,
    (entries, own): (&[Entry], &[GatewayRule]),
) -> Result<Vec<Option<Placement>>, Failure> {
    // Decapsulations are implicit rules. Encapsulations are no rules of a NIC, because workers choose the remote.
    let decaps = || own.iter().enumerate().filter(|(_, own)| own.direction == Direction::Ingress && own.rule.is_ok());
    let rules: Vec<Rule> =
        entries.iter().map(|entry| &entry.rule).chain(decaps().flat_map(|(_, own)| &own.rule)).cloned().collect();
    let places: Vec<usize> = decaps().map(|(place, _)| place).collect();
    let could_be =
        |port: &PortSettings| port.plan.may_offload_rules() && [nic.driver(), "auto"].contains(&port.plan.driver());
    let all = !ports.iter().any(could_be);
    let mut own_rows: Vec<Option<Placement>> = own.iter().map(without_nic).collect();
    for (id, port) in (0..).zip(ports).filter(|(_, port)| all || could_be(port)) {
        let can = nic.capabilities(port)?;
        let rules = (&*rules, places.len());
        let placements = offload::predict_placements(&can, PortId::new(id), tunnels, rules, names);
        for (number, placement) in placements.into_iter().enumerate() {
            let Some(placement) = placement else { continue };
            let Some(rows) = rows.get_mut(number) else {
                let row = places.get(number - entries.len()).and_then(|place| own_rows.get_mut(*place));
                row.into_iter().for_each(|row| *row = Some(placement.clone()));
                continue;
            };
            let Some(row) = rows.iter_mut().find(|row| row.port == port.name && row.location.is_ok()) else { continue };
            row.nic = Some(placement.name());
            row.why = placement.why().unwrap_or_else(|| "in the NIC".to_owned());
        }
        let port = PortId::new(id);
        let watcher = entries.iter().find(|entry| watches(&entry.rule, port));
        for (own, row) in own.iter().zip(&mut own_rows) {
            let (Some(encap), Ok(rule)) = (&own.encap, &own.rule) else { continue };
            if watches(rule, port) {
                let placed = match watcher {
                    Some(entry) => Err(Obstacle {
                        what: "encap".to_owned(),
                        why: format!("an egress rule sees packets as they leave: {}", entry.rule.named(names)),
                    }),
                    None => offload::predict_encap(&can, port, encap),
                };
                *row = Some(placed.map_or_else(Placement::Software, |()| Placement::Hardware(None)));
            }
        }
    }
    Ok(own_rows)
}

/// Returns whether a rule may see packets that leave by this port. Workers encapsulate these packets for it.
fn watches(rule: &Rule, port: PortId) -> bool {
    let ports = rule.fields().get(Key::field(0, Field::PortId));
    rule.direction() == Direction::Egress && ports.is_none_or(|ports| ports.matches(port.number().into()))
}

fn location_word(row: &Row) -> &'static str {
    row.nic.unwrap_or_else(|| row.location.as_ref().map_or("refused", location_name))
}

/// Formats the result as a table with the ports of each rule below it.
fn text(entries: &[Entry], names: Ports<'_>, rows: &[Vec<Row>], own: &Forwarding) -> String {
    let longest = |title: &str, word: fn(&Row) -> &str| {
        rows.iter().flatten().map(|row| word(row).len()).max().unwrap_or(0).max(title.len())
    };
    let widths =
        [longest("PORT", |row| &row.port), longest("DRIVER", |row| row.driver), longest("WHERE", location_word)];
    let line = |[port, driver, location]: [&str; 3], why: &str| {
        let [a, b, c] = widths;
        format!("      {port:a$}  {driver:b$}  {location:c$}  {why}\n")
    };
    let mut text = String::new();
    if !entries.is_empty() {
        text += &line(["PORT", "DRIVER", "WHERE"], "WHY").replacen("    ", "RULE", 1);
    }
    for (number, (entry, rows)) in entries.iter().zip(rows).enumerate() {
        text += &format!("{number:>4}  {}\n", entry.rule.named(names));
        for row in rows {
            text += &line([&row.port, row.driver, location_word(row)], &row.why);
        }
    }
    if entries.is_empty() {
        text += "no rules\n";
    }
    if !own.rules.is_empty() {
        text += "\nThe gateway's own tunnels as rules (run by its stage; 02:00:00:00:00:00 and :ff are placeholders \
                 for addresses that are known at run time):\n";
        for (it, placement) in own.rules.iter().zip(&own.placements) {
            let direction = if it.direction == Direction::Ingress { "from" } else { "to" };
            text += &format!("  segment {} {direction} {}, number {}\n", it.segment, it.remote, it.tag);
            if let Ok(rule) = &it.rule {
                text += &format!("    {}\n", rule.named(names));
            }
            if let Some(placement) = placement {
                let why = placement.why().map(|why| format!(": {why}")).unwrap_or_default();
                text += &format!("    {}{why}\n", placement.name());
            }
        }
    }
    if !own.routes.is_empty() {
        text += &format!("\nRoutes (software: {ROUTES}):\n");
        for (vrf, to) in &own.routes {
            text += &format!("  vrf {vrf} {to}\n");
        }
    }
    text
}

fn report(entries: &[Entry], names: Ports<'_>, rows: &[Vec<Row>], own: &Forwarding, ok: bool) -> Value {
    let rules: Vec<Value> = entries
        .iter()
        .zip(rows)
        .map(|(entry, rows)| {
            let ports: Vec<Value> = rows
                .iter()
                .map(|row| {
                    let location = location_word(row);
                    json!({ "id": row.id, "port": row.port, "driver": row.driver, "where": location, "why": row.why })
                })
                .collect();
            let line = entry.span.position().0;
            json!({
                "rule": entry.rule.to_string(),
                "text": entry.rule.named(names).to_string(),
                "file": entry.span.file(),
                "line": line,
                "ports": ports,
            })
        })
        .collect();
    let tunnels: Vec<Value> = own
        .rules
        .iter()
        .zip(&own.placements)
        .map(|(it, placement)| {
            json!({
                "segment": it.segment,
                "remote": it.remote.to_string(),
                "number": it.tag,
                "direction": it.direction.name(),
                "rule": it.rule.as_ref().ok().map(Rule::to_string),
                "text": it.rule.as_ref().ok().map(|rule| rule.named(names).to_string()),
                "where": placement.as_ref().map_or("gateway", Placement::name),
                "why": placement.as_ref().and_then(Placement::why),
            })
        })
        .collect();
    let route = |(vrf, to): &(String, String)| json!({ "vrf": vrf, "to": to, "where": "software", "why": ROUTES });
    let routes: Vec<Value> = own.routes.iter().map(route).collect();
    json!({ "ok": ok, "rules": rules, "gateway": tunnels, "routes": routes })
}
