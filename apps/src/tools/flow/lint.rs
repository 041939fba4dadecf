use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use serde::Serialize;
use wirepath_flow::{Action, Direction, Field, FieldSet, Key, Rule};

use super::input::PortNames;
use wirepath::rules::Entry;

/// A warning about a valid rule that is probably a mistake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Index of the rule in the list, from 0.
    pub rule: usize,
    /// Kind of warning: `shadowed`, `duplicate`, `never`, `port` or `queue`.
    pub kind: &'static str,
    /// Text for the user.
    pub message: String,
}

/// Finds rules that never run, and ports and queues that do not exist.
///
/// A rule is reported as never running only if a single other rule takes all its packets.
pub fn warnings(entries: &[Entry], ports: &PortNames) -> Vec<Warning> {
    let mut found = Vec::new();
    for direction in [Direction::Ingress, Direction::Egress] {
        let mut order: Vec<usize> = (0..entries.len()).filter(|&i| entries[i].rule.direction() == direction).collect();
        order.sort_by_key(|&i| entries[i].rule.priority());
        let mut earlier = EarlierRules::default();
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
        found.extend(unmatchable(&entry.rule, &marks).map(|message| Warning { rule: i, kind: "never", message }));
        missing_ports(i, &entry.rule, ports, &mut found);
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

/// Returns the position of another rule, relative to rule `i`.
fn line_of(entries: &[Entry], i: usize, other: usize) -> String {
    let (here, there) = (&entries[i].span, &entries[other].span);
    let line = there.position().0;
    if here.file() == there.file() { format!("line {line}") } else { format!("{}:{line}", there.file()) }
}

/// Returns the reason why no packet can match a rule although its pattern is possible.
fn unmatchable(rule: &Rule, marks: &[u32]) -> Option<String> {
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

fn missing_ports(i: usize, rule: &Rule, ports: &PortNames, found: &mut Vec<Warning>) {
    if ports.ports.is_empty() {
        return;
    }
    let count = ports.ports.len();
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
            port(id.number().into());
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
    let Some(&max_queue) = queues.iter().max() else { return };
    for (id, (name, has)) in ports.ports.iter().enumerate() {
        let fits = own.is_none_or(|own| own == id as u128);
        if let Some(has) = has.filter(|&has| fits && max_queue >= has) {
            let message = format!("port \"{name}\" has no queue {max_queue}; it has {has} (queues = {has})");
            found.push(Warning { rule: i, kind: "queue", message });
        }
    }
}

/// Earlier rules, grouped by their keys and masks. One hash table per group keeps the search fast for long
/// lists.
#[derive(Default)]
struct EarlierRules {
    /// Groups in the order of their first rule.
    groups: Vec<Group>,
    /// Index of each group.
    indices: HashMap<Shape, usize>,
    /// For each shape that was asked about: the groups that can cover it, of the first groups.
    covering: HashMap<Shape, (Vec<usize>, usize)>,
    /// Number of compared shapes and of looked-up values.
    #[cfg(test)]
    steps: usize,
}

/// Rules of one shape.
struct Group {
    shape: Shape,
    /// The first rule with each list of values.
    rules: HashMap<Vec<u128>, usize>,
}

/// Keys and masks of a group.
type Shape = Vec<(Key, u128)>;

fn shape(set: &FieldSet) -> Shape {
    set.list().iter().map(|(key, bits)| (*key, bits.mask)).collect()
}

impl EarlierRules {
    fn add(&mut self, set: &FieldSet, rule: usize) {
        let values = set.list().iter().map(|(_, bits)| bits.value).collect();
        let group = match self.indices.entry(shape(set)) {
            Slot::Occupied(slot) => *slot.get(),
            Slot::Vacant(slot) => {
                self.groups.push(Group { shape: slot.key().clone(), rules: HashMap::new() });
                *slot.insert(self.groups.len() - 1)
            }
        };
        self.groups[group].rules.entry(values).or_insert(rule);
    }

    /// Returns a rule that matches every packet that this set matches.
    fn covering(&mut self, set: &FieldSet) -> Option<usize> {
        // Each pair of shapes is compared once. Then only groups that compare no other bits are searched.
        let (covering, seen) = self.covering.entry(shape(set)).or_default();
        for (index, group) in self.groups.iter().enumerate().skip(*seen) {
            let covers = |&(key, mask): &(Key, u128)| set.get(key).is_some_and(|bits| bits.mask & mask == mask);
            if group.shape.iter().all(covers) {
                covering.push(index);
            }
        }
        #[cfg(test)]
        {
            self.steps += self.groups.len() - *seen + covering.len();
        }
        *seen = self.groups.len();
        covering.iter().find_map(|index| {
            let group = &self.groups[*index];
            let project = |&(key, mask): &(Key, u128)| set.get(key).map(|bits| bits.value & mask);
            let values: Vec<u128> = group.shape.iter().map(project).collect::<Option<_>>()?;
            group.rules.get(&values).copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use wirepath_flow::Ports;
    use wirepath_flow::rule_file::read_all;
    use wirepath_settings::Source;

    use super::*;

    fn lint(text: &str) -> Vec<(usize, &'static str)> {
        let source = Source::new("a.rules", text);
        let rules = read_all(&source, Ports::default()).unwrap();
        let entries: Vec<Entry> = rules.into_iter().map(|(span, rule)| Entry { span, rule }).collect();
        let ports = PortNames { ports: vec![("lan".to_owned(), Some(2)), ("wan".to_owned(), None)] };
        warnings(&entries, &ports).into_iter().map(|warning| (warning.rule, warning.kind)).collect()
    }

    #[test]
    fn rules_that_never_run() {
        assert_eq!(
            lint("ingress prio 1: ipv4 dst 10.0.0.0/8 => drop\ningress prio 2: ipv4 dst 10.1.0.0/16 / udp => count\n"),
            [(1, "shadowed")]
        );
        // The narrower rule comes first, so both run.
        assert!(
            lint("ingress prio 2: ipv4 dst 10.0.0.0/8 => drop\ningress prio 1: ipv4 dst 10.1.0.0/16 => count\n")
                .is_empty()
        );
        assert_eq!(lint("ingress: any => count\ningress: any => drop\negress: any => drop\n"), [(1, "duplicate")]);
        assert_eq!(lint("ingress: ipv4 => drop\ningress: eth type 0x0800 / ipv4 => drop\n"), [(1, "duplicate")]);
        let halves = "ingress: ipv4 dst 10.0.0.0/9 => drop\ningress: ipv4 dst 10.128.0.0/9 => drop\n";
        assert!(lint(&format!("{halves}ingress: ipv4 dst 10.0.0.0/8 => drop")).is_empty());
    }

    #[test]
    fn rules_that_no_packet_fits() {
        assert_eq!(lint("ingress: meta mark 7 => drop"), [(0, "never")]);
        assert_eq!(lint("egress: meta mark 7 => drop"), [(0, "never")]);
        assert!(lint("ingress: ipv4 => mark 7\negress: meta mark 7 => drop\negress: meta mark 0 => count").is_empty());
        assert_eq!(lint("ingress: meta data 0x7 => drop"), [(0, "never")]);
    }

    #[test]
    fn ports_and_queues_that_do_not_exist() {
        assert_eq!(lint("ingress: port id 2 => drop\ningress: ipv4 => redirect 7"), [(0, "port"), (1, "port")]);
        assert_eq!(
            lint("ingress: port id 0 => queue 2\ningress: port id 1 => queue 2\ningress: any => rss queues 0-2"),
            [(0, "queue"), (2, "queue")]
        );
    }

    #[test]
    fn covering_is_what_flow_says() {
        // The tables give the same result as comparing every pair.
        use wirepath_flow::covers;
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
        let mut earlier = EarlierRules::default();
        let mut hits = 0;
        for (i, rule) in rules.iter().enumerate() {
            let naive = rules[..i].iter().any(|other| covers(&other.fields(), &rule.fields()));
            assert_eq!(earlier.covering(&rule.fields()).is_some(), naive, "{rule}");
            hits += usize::from(naive);
            earlier.add(&rule.fields(), i);
        }
        assert!(hits > 3 && hits < rules.len(), "{hits}");
    }

    /// Steps of the search among `count` rules with prefixes of mixed lengths, as many as a list may have masks.
    fn steps(count: u32) -> usize {
        let mut earlier = EarlierRules::default();
        for n in 0..count {
            let (source, destination) = (8 + n % 11, 8 + n / 11 % 11);
            let address = |length| Ipv4Addr::from(n.wrapping_mul(2_654_435_761) & (u32::MAX << (32 - length)));
            let (from, to) = (address(source), address(destination));
            let rule = format!("ingress: ipv4 src {from}/{source} dst {to}/{destination} => drop");
            let rule: Rule = rule.parse().unwrap();
            earlier.covering(&rule.fields());
            earlier.add(&rule.fields(), n as usize);
        }
        earlier.steps
    }

    #[test]
    fn the_search_grows_with_the_number_of_rules() {
        let (few, many) = (steps(2_000), steps(16_000));
        // At most the groups that can cover a rule are searched: on average a quarter of 121.
        assert!(many < 9 * few && many < 16_000 * 40, "{few} {many}");
    }
}
