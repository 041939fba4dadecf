use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use serde::Serialize;
use wirepath_pmd::flow::{Action, Direction, Field, FieldSet, Key, Rule};

use super::input::Origin;
use crate::rules::Entry;

/// Something that is allowed, but most likely not meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Place of the rule in the list, from 0.
    pub rule: usize,
    /// Which kind: `shadowed`, `duplicate`, `never`, `port` or `queue`.
    pub kind: &'static str,
    /// For people.
    pub message: String,
}

/// Looks for rules that never run and for ports and queues that do not exist.
///
/// That a rule never runs is said only if one other rule alone takes all its packets.
pub fn warnings(entries: &[Entry], origin: &Origin) -> Vec<Warning> {
    let mut found = Vec::new();
    for direction in [Direction::Ingress, Direction::Egress] {
        let mut order: Vec<usize> = (0..entries.len()).filter(|&i| entries[i].rule.direction() == direction).collect();
        order.sort_by_key(|&i| entries[i].rule.priority());
        let mut earlier = Earlier::default();
        for i in order {
            let set = entries[i].rule.fields();
            if let Some(first) = earlier.covering(&set) {
                found.push(covered(entries, i, first));
            }
            earlier.add(&set, i);
        }
    }
    let marks: Vec<u32> = entries
        .iter()
        .filter(|entry| entry.rule.direction() == Direction::Ingress)
        .flat_map(|entry| entry.rule.actions())
        .filter_map(|action| if let Action::Mark(mark) = action { Some(*mark) } else { None })
        .collect();
    for (i, entry) in entries.iter().enumerate() {
        found.extend(never(&entry.rule, &marks).map(|message| Warning { rule: i, kind: "never", message }));
        absent(i, &entry.rule, origin, &mut found);
    }
    found.sort_by_key(|warning| warning.rule);
    found
}

fn covered(entries: &[Entry], i: usize, first: usize) -> Warning {
    let (rule, other) = (&entries[i].rule, &entries[first].rule);
    let line = line_of(entries, i, first);
    let why = if other.priority() == rule.priority() { "added earlier" } else { "with a lower number" };
    if other.fields() == rule.fields() {
        let what = if other.actions() == rule.actions() { "says the same" } else { "has the same pattern" };
        let message = format!("never runs: the rule in {line}, {why}, {what}");
        return Warning { rule: i, kind: "duplicate", message };
    }
    let message = format!("never runs: the rule in {line}, {why}, fits all its packets");
    Warning { rule: i, kind: "shadowed", message }
}

/// Where another rule stands, as seen from rule `i`.
fn line_of(entries: &[Entry], i: usize, other: usize) -> String {
    let (here, there) = (&entries[i].place, &entries[other].place);
    let line = there.position().0;
    if here.file() == there.file() { format!("line {line}") } else { format!("{}:{line}", there.file()) }
}

/// Why no packet can fit a rule although its pattern is possible.
fn never(rule: &Rule, marks: &[u32]) -> Option<String> {
    let set = rule.fields();
    let mark = set.get(Key::field(0, Field::MetaMark));
    match rule.direction() {
        Direction::Ingress => {
            if mark.is_some_and(|bits| bits.value != 0) {
                return Some("no packet fits: marks are set by ingress rules, of which only one runs".to_owned());
            }
            set.get(Key::field(0, Field::MetaData))
                .filter(|bits| bits.value != 0)
                .map(|_| "no packet fits: an application sets meta data after the ingress rules".to_owned())
        }
        Direction::Egress => {
            let mark = mark.filter(|bits| bits.value != 0)?;
            let any = marks.iter().any(|&set| mark.matches(set.into()));
            (!any).then(|| "no packet fits: no ingress rule marks packets so".to_owned())
        }
    }
}

fn absent(i: usize, rule: &Rule, origin: &Origin, found: &mut Vec<Warning>) {
    if origin.ports.is_empty() {
        return;
    }
    let count = origin.ports.len();
    let mut port = |id: u128| {
        if id >= count as u128 {
            let message = format!("there is no port {id}; the ports are numbered 0 to {}", count - 1);
            found.push(Warning { rule: i, kind: "port", message });
        }
    };
    let set = rule.fields();
    let own = set.get(Key::field(0, Field::PortId)).filter(|bits| bits.mask == 0xffff).map(|bits| bits.value);
    own.into_iter().for_each(&mut port);
    for action in rule.actions() {
        if let Action::Redirect(id) | Action::Mirror(id) = action {
            port((*id).into());
        }
    }
    let queues: Vec<u16> = rule
        .actions()
        .iter()
        .flat_map(|action| match action {
            Action::Queue(queue) => vec![*queue],
            Action::Rss(rss) => rss.queues.clone(),
            _ => Vec::new(),
        })
        .collect();
    let Some(&most) = queues.iter().max() else { return };
    for (id, (name, has)) in origin.ports.iter().enumerate() {
        let fits = own.is_none_or(|own| own == id as u128);
        if let Some(has) = has.filter(|&has| fits && most >= has) {
            let message = format!("port \"{name}\" has no queue {most}; it has {has} (queues = {has})");
            found.push(Warning { rule: i, kind: "queue", message });
        }
    }
}

/// Earlier rules by what they look at: one table for each set of keys and masks, so that a long list is looked through in time.
#[derive(Default)]
struct Earlier {
    /// The first rule with each list of values.
    tables: HashMap<Shape, HashMap<Vec<u128>, usize>>,
    /// In the order of their first rule.
    shapes: Vec<Shape>,
}

/// Keys and masks.
type Shape = Vec<(Key, u128)>;

impl Earlier {
    fn add(&mut self, set: &FieldSet, rule: usize) {
        let shape: Shape = set.list().iter().map(|(key, bits)| (*key, bits.mask)).collect();
        let values = set.list().iter().map(|(_, bits)| bits.value).collect();
        let table = match self.tables.entry(shape) {
            Slot::Occupied(slot) => slot.into_mut(),
            Slot::Vacant(slot) => {
                self.shapes.push(slot.key().clone());
                slot.insert(HashMap::new())
            }
        };
        table.entry(values).or_insert(rule);
    }

    /// A rule that fits every packet that this set fits.
    fn covering(&self, set: &FieldSet) -> Option<usize> {
        self.shapes.iter().find_map(|shape| {
            let project = |&(key, mask): &(Key, u128)| {
                set.get(key).filter(|bits| bits.mask & mask == mask).map(|bits| bits.value & mask)
            };
            let values: Vec<u128> = shape.iter().map(project).collect::<Option<_>>()?;
            self.tables.get(shape)?.get(&values).copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use wirepath_pmd::flow::Ports;
    use wirepath_pmd::flow::list::read_all;
    use wirepath_pmd::settings::Source;

    use super::*;

    fn said(text: &str) -> Vec<(usize, &'static str)> {
        let source = Source::new("a.rules", text);
        let rules = read_all(&source, Ports::default()).unwrap();
        let entries: Vec<Entry> = rules.into_iter().map(|(place, rule)| Entry { place, rule }).collect();
        let origin = Origin { ports: vec![("lan".to_owned(), Some(2)), ("wan".to_owned(), None)] };
        warnings(&entries, &origin).into_iter().map(|warning| (warning.rule, warning.kind)).collect()
    }

    #[test]
    fn rules_that_never_run() {
        assert_eq!(
            said("ingress prio 1: ipv4 dst 10.0.0.0/8 => drop\ningress prio 2: ipv4 dst 10.1.0.0/16 / udp => count\n"),
            [(1, "shadowed")]
        );
        // The narrower one first: both run.
        assert!(
            said("ingress prio 2: ipv4 dst 10.0.0.0/8 => drop\ningress prio 1: ipv4 dst 10.1.0.0/16 => count\n")
                .is_empty()
        );
        assert_eq!(said("ingress: any => count\ningress: any => drop\negress: any => drop\n"), [(1, "duplicate")]);
        assert_eq!(said("ingress: ipv4 => drop\ningress: eth type 0x0800 / ipv4 => drop\n"), [(1, "duplicate")]);
        assert!(said("ingress: ipv4 dst 10.0.0.0/9 => drop\ningress: ipv4 dst 10.128.0.0/9 => drop\ningress: ipv4 dst 10.0.0.0/8 => drop").is_empty());
    }

    #[test]
    fn rules_that_no_packet_fits() {
        assert_eq!(said("ingress: meta mark 7 => drop"), [(0, "never")]);
        assert_eq!(said("egress: meta mark 7 => drop"), [(0, "never")]);
        assert!(said("ingress: ipv4 => mark 7\negress: meta mark 7 => drop\negress: meta mark 0 => count").is_empty());
        assert_eq!(said("ingress: meta data 0x7 => drop"), [(0, "never")]);
    }

    #[test]
    fn ports_and_queues_that_do_not_exist() {
        assert_eq!(said("ingress: port id 2 => drop\ningress: ipv4 => redirect 7"), [(0, "port"), (1, "port")]);
        assert_eq!(
            said("ingress: port id 0 => queue 2\ningress: port id 1 => queue 2\ningress: any => rss queues 0-2"),
            [(0, "queue"), (2, "queue")]
        );
    }

    #[test]
    fn covering_is_what_flow_says() {
        // The tables give what looking at every pair gives.
        use wirepath_pmd::flow::covers;
        let mut rules: Vec<Rule> = Vec::new();
        for a in 0..4 {
            for (i, pattern) in [
                format!("ipv4 dst 10.{a}.0.0/16"),
                format!("ipv4 src 10.{a}.0.0/16 / udp dst {a}"),
                format!("udp src {a}"),
                format!("ipv4 dst 10.{a}.1.0/24 / udp src {a} dst {a}"),
                "ipv4".to_owned(),
            ]
            .iter()
            .enumerate()
            {
                rules.push(format!("ingress prio {}: {pattern} => drop", (i * 7 + a) % 11).parse().unwrap());
            }
        }
        rules.sort_by_key(Rule::priority);
        let mut earlier = Earlier::default();
        let mut hits = 0;
        for (i, rule) in rules.iter().enumerate() {
            let naive = rules[..i].iter().any(|other| covers(&other.fields(), &rule.fields()));
            assert_eq!(earlier.covering(&rule.fields()).is_some(), naive, "{rule}");
            hits += usize::from(naive);
            earlier.add(&rule.fields(), i);
        }
        assert!(hits > 3 && hits < rules.len(), "{hits}");
    }
}
