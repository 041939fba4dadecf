//! The differences of two configurations, for people and programs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use serde_json::{Value as Json, json};
use toml_edit::{DocumentMut, Item, TableLike, Value};

/// A value that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Keys from the root. The elements of lists of tables have the name of the table.
    pub path: Vec<String>,
    /// Value before; `None`: it is new.
    pub before: Option<String>,
    /// Value after; `None`: it is gone.
    pub after: Option<String>,
}

impl Difference {
    /// Returns the keys with dots between.
    pub fn name(&self) -> String {
        self.path.join(".")
    }

    /// Returns the difference as a JSON object.
    pub fn to_json(&self) -> Json {
        json!({ "path": self.name(), "before": self.before, "after": self.after })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match (&self.before, &self.after) {
            (None, Some(after)) => write!(f, "+ {name} = {after}"),
            (Some(before), None) => write!(f, "- {name} = {before}"),
            (before, after) => write!(
                f,
                "~ {name} = {} -> {}",
                before.as_deref().unwrap_or_default(),
                after.as_deref().unwrap_or_default()
            ),
        }
    }
}

/// A value without its form in the text.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    Value(String),
    /// Values whose order has no meaning here.
    Set(Vec<String>),
    Table(BTreeMap<String, Node>),
}

/// Returns the differences between two configurations, in the order of their paths.
pub fn differences(before: &DocumentMut, after: &DocumentMut) -> Vec<Difference> {
    let mut found = Vec::new();
    let (before, after) = (table(before.as_table()), table(after.as_table()));
    compare(&mut Vec::new(), Some(&Node::Table(before)), Some(&Node::Table(after)), &mut found);
    found
}

fn table(table: &dyn TableLike) -> BTreeMap<String, Node> {
    table.iter().filter_map(|(key, item)| Some((key.to_owned(), node(item)?))).collect()
}

fn node(item: &Item) -> Option<Node> {
    Some(match item {
        Item::None => return None,
        Item::Value(value) => value_node(value),
        Item::Table(it) => Node::Table(table(it)),
        Item::ArrayOfTables(list) => Node::Table(named(list.iter().map(|it| table(it)))),
    })
}

fn value_node(value: &Value) -> Node {
    match value {
        Value::InlineTable(it) => Node::Table(table(it)),
        Value::Array(list) if !list.is_empty() && list.iter().all(Value::is_inline_table) => {
            Node::Table(named(list.iter().filter_map(Value::as_inline_table).map(|it| table(it))))
        }
        Value::Array(list) => Node::Set(list.iter().map(plain).collect()),
        other => Node::Value(plain(other)),
    }
}

/// Returns a value as text, without comments and blanks around it.
fn plain(value: &Value) -> String {
    let mut value = value.clone();
    value.decor_mut().clear();
    match value {
        // The form of a number or text in the file has no meaning.
        Value::Integer(it) => it.value().to_string(),
        Value::String(it) => Value::from(it.value().as_str()).to_string(),
        other => other.to_string(),
    }
}

/// Gives the tables of a list names: their `name`, or what identifies them otherwise.
fn named(list: impl Iterator<Item = BTreeMap<String, Node>>) -> BTreeMap<String, Node> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut tables = BTreeMap::new();
    for table in list {
        let text = |key: &str| match table.get(key) {
            Some(Node::Value(text)) => Some(text.trim_matches('"').to_owned()),
            _ => None,
        };
        let vlan = text("vlan").map(|vlan| format!(".{vlan}")).unwrap_or_default();
        let port = || text("port").map(|port| port + &vlan);
        let name = text("name").or_else(|| text("vni").map(|vni| format!("vni{vni}")));
        let name = name.or_else(|| text("mac")).or_else(port).or_else(|| text("rule")).unwrap_or_default();
        let n = seen.entry(name.clone()).or_default();
        *n += 1;
        tables.insert(if *n > 1 { format!("{name}#{n}") } else { name }, Node::Table(table));
    }
    tables
}

fn compare(path: &mut Vec<String>, before: Option<&Node>, after: Option<&Node>, found: &mut Vec<Difference>) {
    if before == after {
        return;
    }
    let empty = BTreeMap::new();
    let tables = match (before, after) {
        (Some(Node::Table(before)), Some(Node::Table(after))) => Some((before, after)),
        // What is new or gone is listed key by key.
        (None, Some(Node::Table(after))) if !after.is_empty() => Some((&empty, after)),
        (Some(Node::Table(before)), None) if !before.is_empty() => Some((before, &empty)),
        _ => None,
    };
    if let Some((before, after)) = tables {
        let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        for key in keys {
            path.push(key.clone());
            compare(path, before.get(key), after.get(key), found);
            path.pop();
        }
        return;
    }
    if let (Some(Node::Set(before)), Some(Node::Set(after))) = (before, after) {
        let (old_set, new_set): (HashSet<&String>, HashSet<&String>) =
            (before.iter().collect(), after.iter().collect());
        let gone = before.iter().filter(|it| !new_set.contains(it));
        let new = after.iter().filter(|it| !old_set.contains(it));
        let path = || path.clone();
        let count = found.len();
        found.extend(gone.map(|it| Difference { path: path(), before: Some(it.clone()), after: None }));
        found.extend(new.map(|it| Difference { path: path(), before: None, after: Some(it.clone()) }));
        if found.len() > count {
            return;
        }
    }
    let text = |node: &Node| match node {
        Node::Value(text) => text.clone(),
        Node::Set(list) => format!("[{}]", list.join(", ")),
        Node::Table(_) => "{}".to_owned(),
    };
    found.push(Difference { path: path.clone(), before: before.map(text), after: after.map(text) });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(before: &str, after: &str) -> Vec<String> {
        let parse = |text: &str| text.parse::<DocumentMut>().unwrap();
        differences(&parse(before), &parse(after)).iter().map(Difference::to_string).collect()
    }

    #[test]
    fn tables_are_compared_by_their_names() {
        let before =
            "[[segment]]\nname = 'a'\nvni = 1\nremotes = ['1.1.1.1', '2.2.2.2']\n[[segment]]\nname='b'\nvni = 2\n";
        let after = "[[segment]]\nname = 'b' # two\nvni = 0x2\nmtu = 1400\n[[segment]]\nname = 'a'\nvni = 1\n\
                     remotes = ['2.2.2.2', '3.3.3.3']\n[underlay]\nttl = 3\n";
        assert_eq!(
            of(before, after),
            [
                "- segment.a.remotes = \"1.1.1.1\"",
                "+ segment.a.remotes = \"3.3.3.3\"",
                "+ segment.b.mtu = 1400",
                "+ underlay.ttl = 3",
            ]
        );
        assert_eq!(of(before, before), [""; 0]);
        assert_eq!(of("a = 1", "a = 2"), ["~ a = 1 -> 2"]);
        assert_eq!(of("a = [1, 2]", "a = [2, 1]"), ["~ a = [1, 2] -> [2, 1]"], "the order");
        assert_eq!(of("a = []", ""), ["- a = []"]);
    }
}
