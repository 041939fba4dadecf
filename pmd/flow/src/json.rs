//! JSON format: an object of `direction`, `priority`, `pattern` and `actions`. Items are objects of `item`
//! and fields. Actions are objects of `action` and arguments. Values are numbers, or strings as in the text
//! format.

use std::fmt;

use serde_json::{Map, Value, json};

use super::ast::{AstNode, Pair, RuleAst, Word, WordError, word_error};
use super::masked_value::{Ports, ones};
use super::{Action, Format, Item, MaskedValue, Reason, Rule};

/// Error in the JSON format of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Kind of the error.
    pub reason: Reason,
    /// Path of the value, such as `pattern[1].dst`; empty for the rule as a whole.
    pub path: String,
    /// Found and expected values.
    pub message: String,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { write!(f, "{}", self.message) } else { write!(f, "{}: {}", self.path, self.message) }
    }
}

impl std::error::Error for JsonError {}

impl Rule {
    /// Converts to JSON. [`Rule::from_json`] reads back the same rule.
    pub fn to_json(&self) -> Value {
        json!({
            "direction": self.direction().name(),
            "priority": self.priority(),
            "pattern": self.pattern().iter().map(item).collect::<Vec<_>>(),
            "actions": self.actions().iter().map(action).collect::<Vec<_>>(),
        })
    }

    /// Converts from JSON. A string is read as the text format.
    pub fn from_json(value: &Value, ports: Ports<'_>) -> Result<Rule, JsonError> {
        if let Value::String(text) = value {
            return Rule::parse(text, ports).map_err(|error| JsonError {
                reason: error.reason,
                path: String::new(),
                message: error.to_string(),
            });
        }
        let mut reader = Reader { paths: vec![String::new()] };
        reader.rule_ast(value).and_then(|tree| tree.rule(ports)).map_err(|WordError { at, reason, message }| {
            JsonError { reason, path: reader.paths.get(at).cloned().unwrap_or_default(), message }
        })
    }
}

/// Converts decimal numbers to JSON numbers, everything else to strings.
fn plain(format: Option<Format>, text: String) -> Value {
    let decimal = matches!(format, None | Some(Format::Number | Format::Port));
    match text.parse::<u64>() {
        Ok(number) if decimal && number.to_string() == text => number.into(),
        _ => text.into(),
    }
}

fn item(item: &Item) -> Value {
    let mut object = Map::new();
    object.insert("item".to_owned(), item.kind.spec().name.into());
    if item.inner {
        object.insert("inner".to_owned(), true.into());
    }
    for &(field, bits) in item.fields() {
        let spec = field.spec();
        let whole = bits == MaskedValue::exact(bits.value, spec.bits) && bits.mask == ones(spec.bits);
        let text = spec.format.print(spec.bits, bits);
        object.insert(spec.name.to_owned(), plain(Some(spec.format).filter(|_| whole), text));
    }
    Value::Object(object)
}

fn action(action: &Action) -> Value {
    let mut object = Map::new();
    object.insert("action".to_owned(), action.spec().name.into());
    for (key, word) in action.arguments() {
        object.insert(key.to_owned(), plain(None, word));
    }
    Value::Object(object)
}

struct Reader {
    paths: Vec<String>,
}

impl Reader {
    fn record_path(&mut self, path: String) -> usize {
        self.paths.push(path);
        self.paths.len() - 1
    }

    fn rule_ast(&mut self, value: &Value) -> Result<RuleAst, WordError> {
        let Value::Object(object) = value else {
            return word_error(
                0,
                Reason::Syntax,
                "expected an object of direction, priority, pattern and actions, or text",
            );
        };
        const KEYS: [&str; 4] = ["direction", "priority", "pattern", "actions"];
        if let Some(key) = object.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let at = self.record_path(key.clone());
            return super::ast::unknown(&Word { text: key.clone(), at }, "key", &KEYS);
        }
        let Some(direction) = object.get("direction") else {
            return word_error(0, Reason::Missing, "direction is missing, expected \"ingress\" or \"egress\"");
        };
        let direction = self.word(direction, "direction".to_owned())?;
        let priority = object.get("priority").map(|p| self.word(p, "priority".to_owned())).transpose()?;
        let items = self.nodes(object, "pattern", "item")?;
        let actions = self.nodes(object, "actions", "action")?;
        Ok(RuleAst { at: 0, direction, priority, items, actions })
    }

    fn nodes(&mut self, object: &Map<String, Value>, key: &str, name: &str) -> Result<Vec<AstNode>, WordError> {
        let list = match object.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(_) => {
                let at = self.record_path(key.to_owned());
                return word_error(at, Reason::Syntax, format!("expected an array of objects with \"{name}\""));
            }
        };
        list.iter().enumerate().map(|(i, node)| self.node(node, format!("{key}[{i}]"), name)).collect()
    }

    fn node(&mut self, value: &Value, path: String, name: &str) -> Result<AstNode, WordError> {
        let at = self.record_path(path.clone());
        let Value::Object(object) = value else {
            return word_error(at, Reason::Syntax, format!("expected an object with \"{name}\""));
        };
        let Some(named) = object.get(name) else {
            return word_error(at, Reason::Missing, format!("\"{name}\" is missing"));
        };
        let mut node = AstNode { name: self.word(named, format!("{path}.{name}"))?, inner: false, pairs: Vec::new() };
        for (key, value) in object.iter().filter(|(key, _)| *key != name) {
            let path = format!("{path}.{key}");
            if let ("item", "inner", Value::Bool(inner)) = (name, key.as_str(), value) {
                node.inner = *inner;
                continue;
            }
            let value = self.word(value, path)?;
            let key = Word { text: key.clone(), at: value.at };
            node.pairs.push(pair(key, value, name == "item"));
        }
        Ok(node)
    }

    fn word(&mut self, value: &Value, path: String) -> Result<Word, WordError> {
        let at = self.record_path(path);
        let one = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        let text = match value {
            Value::Array(list) => list.iter().map(one).collect::<Option<Vec<_>>>().map(|list| list.join("+")),
            other => one(other),
        };
        match text {
            Some(text) => Ok(Word { text, at }),
            None => word_error(
                at,
                Reason::BadValue,
                format!("found {value}, expected a number, a string or a list of them"),
            ),
        }
    }
}

/// Splits a value with its mask (`VALUE mask MASK`) in one string.
pub(super) fn pair(key: Word, value: Word, masks: bool) -> Pair {
    match value.text.split_once(" mask ").filter(|_| masks) {
        Some((text, mask)) => {
            let mask = Word { text: mask.trim().to_owned(), at: value.at };
            Pair { key, value: Word { text: text.trim().to_owned(), at: value.at }, mask: Some(mask) }
        }
        None => Pair { key, value, mask: None },
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::random::RuleGenerator;
    use super::*;

    #[test]
    fn json_round_trip_of_random_rules() {
        for seed in 0..10_000 {
            let rule = RuleGenerator::new(seed).rule();
            let text = serde_json::to_string(&rule.to_json()).unwrap();
            let read = Rule::from_json(&serde_json::from_str(&text).unwrap(), Ports::default());
            assert_eq!(read.as_ref(), Ok(&rule), "seed {seed}: {rule}\n{text}");
        }
    }

    #[test]
    fn json_format_of_a_rule() {
        let text = "ingress prio 10: eth / ipv4 dst 10.0.0.0/8 ttl 3 mask 7 / udp dst 4789 / vxlan vni 42 \
                    => decap l2, mark 7, limit 10M pps burst 5";
        let rule: Rule = text.parse().unwrap();
        let expected = json!({
            "direction": "ingress",
            "priority": 10,
            "pattern": [
                {"item": "eth"},
                {"item": "ipv4", "dst": "10.0.0.0/8", "ttl": "0x3 mask 0x7"},
                {"item": "udp", "dst": 4789},
                {"item": "vxlan", "vni": 42},
            ],
            "actions": [
                {"action": "decap", "kind": "l2"},
                {"action": "mark", "value": 7},
                {"action": "limit", "rate": "10M", "unit": "pps", "burst": 5},
            ],
        });
        assert_eq!(rule.to_json(), expected);
        assert_eq!(Rule::from_json(&expected, Ports::default()), Ok(rule.clone()));
        assert_eq!(Rule::from_json(&text.into(), Ports::default()), Ok(rule));
    }

    #[test]
    fn errors_have_a_path() {
        let error = |value: Value| Rule::from_json(&value, Ports::default()).unwrap_err();
        let rule =
            |pattern: Value, actions: Value| json!({"direction": "ingress", "pattern": pattern, "actions": actions});
        let drop = || json!([{"action": "drop"}]);
        let cases = [
            (error(json!(5)), "", Reason::Syntax),
            (error(json!({"direction": "ingres"})), "direction", Reason::UnknownWord),
            (error(json!({"direction": "ingress", "action": []})), "action", Reason::UnknownWord),
            (error(rule(json!([]), json!([]))), "", Reason::NoAction),
            (error(rule(json!(["eth"]), drop())), "pattern[0]", Reason::Syntax),
            (
                error(rule(json!([{"item": "eth"}, {"item": "ipv4", "dst": "10.0.0.1/8"}]), drop())),
                "pattern[1].dst",
                Reason::ValueOutsideMask,
            ),
            (error(rule(json!([{"item": "ipv4", "ttl": -1}]), drop())), "pattern[0].ttl", Reason::BadValue),
            (error(rule(json!([{"item": "ipv4", "ttl": 1.5}]), drop())), "pattern[0].ttl", Reason::BadValue),
            (error(rule(json!([{"item": "ipv4", "ttl": {}}]), drop())), "pattern[0].ttl", Reason::BadValue),
            (error(rule(json!([{"item": "ipv4", "tttl": 1}]), drop())), "pattern[0].tttl", Reason::UnknownWord),
            (error(rule(json!([]), json!([{"action": "queue"}]))), "actions[0].action", Reason::Missing),
            (error(rule(json!([]), json!([{"id": 1}]))), "actions[0]", Reason::Missing),
            (
                error(rule(json!([{"item": "tcp"}, {"item": "vxlan"}]), drop())),
                "pattern[1].item",
                Reason::Contradiction,
            ),
            (error(json!("ingress: ipv5 => drop")), "", Reason::UnknownWord),
        ];
        for (error, path, reason) in cases {
            assert_eq!((error.path.as_str(), error.reason), (path, reason), "{error}");
        }
    }
}
