use std::net::IpAddr;
use std::path::Path;

use serde_json::{Value, json};
use wirepath_pipeline::PortInfo;
use wirepath_pipeline::rules::hardware::{self, Placement};
use wirepath_pipeline::rules::{Place, check_on, in_order, place_rule};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::flow::{Direction, Rule};
use wirepath_pmd::packet::Pool;
use wirepath_pmd::port::hardware::RuleCapabilities;
use wirepath_pmd::port::{Capabilities, KernelRule};
use wirepath_pmd::settings::Source;
use wirepath_wire::{MacAddr, Tunnels};

use super::input::{self, Input, Program};
use super::{ExplainArguments, check::complain};
use crate::cli::{Failure, print, print_json};
use crate::rules::{Entry, Hardware, OwnRule, gateway_rules, word};
use crate::tools::devices::ask;

/// The rule hardware that ports are taken to have.
enum Nic<'a> {
    /// Of this device, `DRIVER:DEVICE`: asked for each port, as its settings say.
    Here(&'a str),
    /// One that has said this before.
    Recorded(Box<RuleCapabilities>),
}

impl Nic<'_> {
    fn driver(&self) -> &str {
        match self {
            Self::Here(name) => name.split_once(':').map_or(name, |(driver, _)| driver),
            Self::Recorded(can) => &can.driver,
        }
    }

    fn can(&self, port: &PortSettings) -> Result<RuleCapabilities, Failure> {
        match self {
            Self::Here(name) => ask(name, Some(&*port.plan)),
            Self::Recorded(can) => Ok(RuleCapabilities::clone(can)),
        }
    }
}

/// Where one rule runs on one port.
struct Row {
    /// Number of the port, by which rules name it.
    id: u16,
    port: String,
    driver: &'static str,
    place: Result<Place, String>,
    /// In the NIC, or partly: in which word.
    nic: Option<&'static str>,
    /// What kept it from running nearer to the wire.
    why: String,
}

pub(super) fn run(arguments: &ExplainArguments, json: bool) -> Result<(), Failure> {
    let nic = match (&arguments.port, &arguments.capabilities) {
        (Some(name), _) => Some(Nic::Here(name)),
        (_, Some(file)) => Some(Nic::Recorded(Box::new(recorded(file)?))),
        _ => None,
    };
    let input = input::read(&arguments.config.input())?;
    complain(&input)?;
    let Input { entries, program, .. } = input;
    let Some(program) = program else {
        return Err(Failure::usage("rules alone run nowhere: give a configuration with the ports they are for"));
    };
    let (ports, own) = match &program {
        Program::L2fwd(config) => (&config.ports, Vec::new()),
        Program::Gateway(setup) => {
            // Addresses that only opened ports and resolved next hops know.
            let unknown = |_: IpAddr| (MacAddr([2, 0, 0, 0, 0, 0]), MacAddr([2, 0, 0, 0, 0, 0xff]));
            (&setup.ports, gateway_rules(&setup.gateway, &unknown).map_err(Failure::failed)?)
        }
    };
    let mut rows = rows(&entries, ports, program.hardware())?;
    let mut own_rows: Vec<Option<Placement>> = own.iter().map(|_| None).collect();
    if let Some(nic) = nic.filter(|_| program.hardware() == Hardware::Auto) {
        let tunnels = match &program {
            Program::L2fwd(_) => Tunnels::default(),
            Program::Gateway(setup) => Tunnels::default().with_vxlan(Some(setup.gateway.underlay.udp_port)),
        };
        own_rows = in_hardware(&mut rows, &nic, ports, tunnels, (&entries, &own))?;
    }
    let refused = rows.iter().flatten().filter(|row| row.place.is_err()).count();
    if json {
        print_json(&report(&entries, &rows, (&own, &own_rows), refused == 0))?;
    } else {
        print(text(&entries, &rows, (&own, &own_rows)))?;
    }
    match refused {
        0 => Ok(()),
        n => Err(Failure::usage(format!("{n} times a rule cannot be honoured; the program would not start"))),
    }
}

/// Ports that are not opened, as far as their plans tell.
fn on_paper(ports: &[PortSettings]) -> Result<Vec<PortInfo>, Failure> {
    let pool = Pool::new("paper", 64)?;
    let info = |(id, port): (u16, &PortSettings)| {
        let plain = Capabilities::plain(port.plan.driver(), port.device.clone().unwrap_or_default());
        PortInfo {
            queues: port.queues,
            capabilities: Capabilities { to_kernel: port.plan.to_kernel(), ..plain },
            ..PortInfo::on_paper(id, &port.name, None, port.mtu, &pool)
        }
    };
    Ok((0..).zip(ports).map(info).collect())
}

fn rows(entries: &[Entry], settings: &[PortSettings], hardware: Hardware) -> Result<Vec<Vec<Row>>, Failure> {
    let ports = on_paper(settings)?;
    let rules: Vec<Rule> = entries.iter().map(|entry| entry.rule.clone()).collect();
    let answer = |sorted: &[Rule]| -> Result<Vec<Vec<KernelRule>>, Failure> {
        Ok((0..).zip(settings).map(|(id, port)| port.plan.decide(sorted, id)).collect())
    };
    let decided = in_order(&rules, answer)?;
    let rows = |(number, rule): (usize, &Rule)| {
        let row = |(port, place): (u16, Result<Place, String>)| {
            let info = &ports[usize::from(port)];
            let place = check_on(rule, &ports, port).map_or(place, Err);
            let driver = info.capabilities.driver;
            let why = why(rule, &settings[usize::from(port)], hardware, &place);
            Row { id: port, port: info.name.clone(), driver, why, place, nic: None }
        };
        place_rule(rule, number, &ports, &decided).into_iter().map(row).collect()
    };
    Ok(rules.iter().enumerate().map(rows).collect())
}

/// What stood in the way of running nearer to the wire.
fn why(rule: &Rule, port: &PortSettings, hardware: Hardware, place: &Result<Place, String>) -> String {
    let driver = port.plan.driver();
    match place {
        Err(why) => why.clone(),
        Ok(Place::Injected(why)) => format!("packets are given to the kernel one by one: {why}"),
        Ok(Place::Xdp) => "before packets reach the port".to_owned(),
        Ok(Place::Software) => match rule.nic_bar() {
            Some((_, bar)) => bar.text().to_owned(),
            None if !port.plan.rules_in_hardware() => format!("driver {driver} puts no rules into a NIC here"),
            None if hardware == Hardware::Off => "hardware = \"off\" leaves everything to the workers".to_owned(),
            None => {
                "the NIC takes over what it can once the program runs; --port and --capabilities tell what".to_owned()
            }
        },
    }
}

/// What a recorded device can do.
fn recorded(file: &Path) -> Result<RuleCapabilities, Failure> {
    let source = Source::load(file)?;
    serde_json::from_str(source.text()).map_err(|error| {
        let text = "not what `wirepath devices --rules` prints of a NIC";
        Failure::usage(format!("{}: {text}: {error}", file.display()))
    })
}

/// Puts into the rows what rule hardware like this would take over, on the ports that could be such; what of the gateway's own tunnels
/// it would.
fn in_hardware(
    rows: &mut [Vec<Row>],
    nic: &Nic<'_>,
    ports: &[PortSettings],
    tunnels: Tunnels,
    (entries, own): (&[Entry], &[OwnRule]),
) -> Result<Vec<Option<Placement>>, Failure> {
    let rules: Vec<Rule> =
        entries.iter().map(|entry| &entry.rule).chain(own.iter().map(|own| &own.rule)).cloned().collect();
    let could_be =
        |port: &PortSettings| port.plan.rules_in_hardware() && [nic.driver(), "auto"].contains(&port.plan.driver());
    let all = !ports.iter().any(could_be);
    let mut own_rows = vec![None; own.len()];
    for (id, port) in (0..).zip(ports).filter(|(_, port)| all || could_be(port)) {
        let placements = hardware::on_paper(&nic.can(port)?, id, tunnels, &rules);
        for (number, placement) in placements.into_iter().enumerate() {
            let Some(placement) = placement else { continue };
            let Some(rows) = rows.get_mut(number) else {
                own_rows[number - entries.len()] = Some(placement);
                continue;
            };
            let Some(row) = rows.iter_mut().find(|row| row.port == port.name && row.place.is_ok()) else { continue };
            row.nic = Some(placement.word());
            row.why = placement.why().unwrap_or_else(|| "in the NIC".to_owned());
        }
    }
    Ok(own_rows)
}

fn place_word(row: &Row) -> &'static str {
    row.nic.unwrap_or_else(|| row.place.as_ref().map_or("refused", word))
}

/// A table: under each rule its ports, in columns.
fn text(entries: &[Entry], rows: &[Vec<Row>], (own, own_rows): (&[OwnRule], &[Option<Placement>])) -> String {
    let longest = |title: &str, word: fn(&Row) -> &str| {
        rows.iter().flatten().map(|row| word(row).len()).max().unwrap_or(0).max(title.len())
    };
    let widths = [longest("PORT", |row| &row.port), longest("DRIVER", |row| row.driver), longest("WHERE", place_word)];
    let line = |id: &str, [port, driver, place]: [&str; 3], why: &str| {
        let [a, b, c] = widths;
        format!("      {id:>3}  {port:a$}  {driver:b$}  {place:c$}  {why}\n")
    };
    let mut text = String::new();
    if !entries.is_empty() {
        text += &line("ID", ["PORT", "DRIVER", "WHERE"], "WHY").replacen("    ", "RULE", 1);
    }
    for (number, (entry, rows)) in entries.iter().zip(rows).enumerate() {
        text += &format!("{number:>4}  {}\n", entry.rule);
        for row in rows {
            text += &line(&row.id.to_string(), [&row.port, row.driver, place_word(row)], &row.why);
        }
    }
    if entries.is_empty() {
        text += "no rules\n";
    }
    if !own.is_empty() {
        text += "\nThe gateway's own tunnels as rules (done by its stages; 02:00:00:00:00:00 and :ff stand for addresses that are known \
                 once it runs):\n";
        for (it, placement) in own.iter().zip(own_rows) {
            let way = if it.rule.direction() == Direction::Ingress { "from" } else { "to" };
            text += &format!("  segment {} {way} {}, number {}\n    {}\n", it.segment, it.remote, it.tag, it.rule);
            if let Some(placement) = placement {
                let why = placement.why().map(|why| format!(": {why}")).unwrap_or_default();
                text += &format!("    {}{why}\n", placement.word());
            }
        }
    }
    text
}

fn report(
    entries: &[Entry],
    rows: &[Vec<Row>],
    (own, own_rows): (&[OwnRule], &[Option<Placement>]),
    ok: bool,
) -> Value {
    let rules: Vec<Value> = entries
        .iter()
        .zip(rows)
        .map(|(entry, rows)| {
            let ports: Vec<Value> = rows
                .iter()
                .map(|row| json!({ "id": row.id, "port": row.port, "driver": row.driver, "where": place_word(row), "why": row.why }))
                .collect();
            let line = entry.place.position().0;
            json!({ "rule": entry.rule.to_string(), "file": entry.place.file(), "line": line, "ports": ports })
        })
        .collect();
    let own: Vec<Value> = own
        .iter()
        .zip(own_rows)
        .map(|(it, placement)| {
            json!({
                "segment": it.segment,
                "remote": it.remote.to_string(),
                "number": it.tag,
                "rule": it.rule.to_string(),
                "where": placement.as_ref().map_or("gateway", Placement::word),
                "why": placement.as_ref().and_then(Placement::why),
            })
        })
        .collect();
    json!({ "ok": ok, "rules": rules, "gateway": own })
}
