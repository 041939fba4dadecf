//! Syntax tree of a rule, common to the text, TOML and JSON formats, and its conversion to a [`Rule`].

use wirepath_wire::{EtherType, Tag};

use super::action::{ACTIONS, ActionSpec, number, queues, unhex, unscaled};
use super::masked_value::{Ports, join, ones};
use super::rule::is_implicitly_inner;
use super::{
    Action, Direction, ErrorLocation, Field, HashFields, ITEMS, Item, ItemKind, Limit, RateUnit, Reason, Reformat,
    ReformatKind, Rss, Rule,
};
use wirepath_packet::PortId;
use wirepath_settings::nearest;

/// A word and its location. The reader of the format maps the number to a position in its input.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) at: usize,
}

/// A key with its value and optional mask.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) key: Word,
    pub(super) value: Word,
    pub(super) mask: Option<Word>,
}

/// An item or an action.
#[derive(Clone, Debug)]
pub(super) struct AstNode {
    pub(super) name: Word,
    pub(super) inner: bool,
    pub(super) pairs: Vec<Pair>,
}

/// An unchecked rule, as written.
#[derive(Clone, Debug)]
pub(super) struct RuleAst {
    /// Location of the whole rule.
    pub(super) at: usize,
    pub(super) direction: Word,
    pub(super) priority: Option<Word>,
    pub(super) items: Vec<AstNode>,
    pub(super) actions: Vec<AstNode>,
}

/// An error at the word with this location.
#[derive(Clone, Debug)]
pub(super) struct WordError {
    pub(super) at: usize,
    pub(super) reason: Reason,
    pub(super) message: String,
}

pub(super) fn word_error<T>(at: usize, reason: Reason, message: impl Into<String>) -> Result<T, WordError> {
    Err(WordError { at, reason, message: message.into() })
}

/// Reports an unknown word, with the most similar known one.
pub(super) fn unknown<T>(word: &Word, what: &str, known: &[&str]) -> Result<T, WordError> {
    let text = &word.text;
    let message = match nearest(text, known) {
        Some(near) => format!("unknown {what} \"{text}\"; did you mean \"{near}\"?"),
        None if known.is_empty() => format!("unknown {what} \"{text}\"; there are none here"),
        None => format!("unknown {what} \"{text}\"; known here: {}", known.join(", ")),
    };
    word_error(word.at, Reason::UnknownWord, message)
}

impl RuleAst {
    /// Converts all words and checks the rule.
    pub(super) fn rule(&self, ports: Ports<'_>) -> Result<Rule, WordError> {
        let direction = direction(&self.direction)?;
        let priority = match &self.priority {
            None => 0,
            Some(word) => match number::<u32>(&word.text).filter(|_| !word.text.is_empty()) {
                Some(priority) => priority,
                None => {
                    let message = format!("found \"{}\", expected a priority from 0 to {}", word.text, u32::MAX);
                    return word_error(word.at, Reason::OutOfRange, message);
                }
            },
        };
        let mut pattern: Vec<Item> = Vec::new();
        for node in &self.items {
            let item = item(node, &pattern, ports)?;
            pattern.push(item);
        }
        let actions = self.actions.iter().map(|node| action(node, ports)).collect::<Result<Vec<_>, _>>()?;
        Rule::new(direction, priority, pattern, actions).map_err(|error| {
            let at = match error.at {
                ErrorLocation::Rule => self.at,
                ErrorLocation::Item(i) => self.items.get(i).map_or(self.at, |node| node.name.at),
                ErrorLocation::Field(i, field) => self.items.get(i).map_or(self.at, |node| {
                    node.pairs.iter().find(|p| p.key.text == field.name()).map_or(node.name.at, |pair| pair.value.at)
                }),
                ErrorLocation::Action(i) => self.actions.get(i).map_or(self.at, |node| node.name.at),
            };
            WordError { at, reason: error.reason, message: error.message }
        })
    }
}

fn direction(word: &Word) -> Result<Direction, WordError> {
    match word.text.as_str() {
        "ingress" => Ok(Direction::Ingress),
        "egress" => Ok(Direction::Egress),
        _ => unknown(word, "direction", &["ingress", "egress"]),
    }
}

/// Returns the item kind with this name.
pub(super) fn item_kind(word: &Word) -> Result<ItemKind, WordError> {
    match ItemKind::from_name(&word.text) {
        Some(kind) => Ok(kind),
        None if word.text.contains('/') && word.text.split('/').all(|w| ItemKind::from_name(w).is_some()) => {
            word_error(word.at, Reason::Syntax, "write blanks around the / between items")
        }
        None => unknown(word, "item", &ITEMS.iter().map(|spec| spec.name).collect::<Vec<_>>()),
    }
}

/// Returns the field with this name.
pub(super) fn item_field(kind: ItemKind, word: &Word) -> Result<Field, WordError> {
    let spec = kind.spec();
    match kind.field(&word.text) {
        Some(field) => Ok(field),
        None => {
            let names: Vec<&str> = spec.fields.iter().map(|field| field.name()).collect();
            unknown(word, &format!("field of {}", spec.name), &names)
        }
    }
}

fn item(node: &AstNode, before: &[Item], ports: Ports<'_>) -> Result<Item, WordError> {
    let kind = item_kind(&node.name)?;
    let mut item = Item::new(kind);
    item.inner = node.inner || is_implicitly_inner(before, kind);
    let mut seen: Vec<Field> = Vec::new();
    for pair in &node.pairs {
        let field = item_field(kind, &pair.key)?;
        if seen.contains(&field) {
            return word_error(pair.key.at, Reason::Twice, format!("{} is given twice", field.name()));
        }
        seen.push(field);
        let spec = field.spec();
        let mask = pair.mask.as_ref();
        let bits = spec.format.parse(spec.bits, &pair.value.text, mask.map(|word| word.text.as_str()), ports);
        let bits = bits.map_err(|error| WordError {
            at: mask.filter(|_| error.in_mask).map_or(pair.value.at, |word| word.at),
            reason: error.reason,
            message: error.message,
        })?;
        item = item.with(field, bits);
    }
    Ok(item)
}

/// Returns the table entry of the action with this name.
pub(super) fn action_spec(word: &Word) -> Result<&'static ActionSpec, WordError> {
    match ACTIONS.iter().find(|spec| spec.name == word.text) {
        Some(spec) => Ok(spec),
        None => unknown(word, "action", &ACTIONS.iter().map(|spec| spec.name).collect::<Vec<_>>()),
    }
}

/// Arguments of an action while it is converted.
struct Arguments<'a> {
    node: &'a AstNode,
    spec: &'static ActionSpec,
}

impl<'a> Arguments<'a> {
    fn new(node: &'a AstNode) -> Result<Self, WordError> {
        let spec = action_spec(&node.name)?;
        for (i, pair) in node.pairs.iter().enumerate() {
            let known = || spec.positional.iter().chain(spec.named).copied();
            if !known().any(|name| name == pair.key.text) {
                return unknown(&pair.key, &format!("word for {}", spec.name), &known().collect::<Vec<_>>());
            }
            if node.pairs[..i].iter().any(|other| other.key.text == pair.key.text) {
                return word_error(pair.key.at, Reason::Twice, format!("{} is given twice", pair.key.text));
            }
            if let Some(mask) = &pair.mask {
                return word_error(mask.at, Reason::Syntax, "actions take no masks");
            }
        }
        Ok(Self { node, spec })
    }

    fn get(&self, name: &str) -> Option<&'a Word> {
        self.node.pairs.iter().find(|pair| pair.key.text == name).map(|pair| &pair.value)
    }

    fn need(&self, name: &str) -> Result<&'a Word, WordError> {
        match self.get(name) {
            Some(word) => Ok(word),
            None => {
                let message = format!("\"{}\" needs {}; {}", self.spec.name, name, self.spec.about);
                word_error(self.node.name.at, Reason::Missing, message)
            }
        }
    }
}

fn bad<T>(word: &Word, expected: &str) -> Result<T, WordError> {
    word_error(word.at, Reason::BadValue, format!("found \"{}\", expected {expected}", word.text))
}

/// Parses a word as a complete value of a field.
fn field_value(field: Field, word: &Word, ports: Ports<'_>) -> Result<u128, WordError> {
    let spec = field.spec();
    match spec.format.parse(spec.bits, &word.text, None, ports) {
        Ok(bits) if bits.mask == ones(spec.bits) => Ok(bits.value),
        Ok(_) => bad(word, "a whole value, without a mask"),
        Err(error) => word_error(word.at, error.reason, error.message),
    }
}

fn port(word: &Word, ports: Ports<'_>) -> Result<PortId, WordError> {
    let number = field_value(Field::PortId, word, ports)?;
    PortId::checked(number)
        .map_or_else(|| word_error(word.at, Reason::OutOfRange, format!("port {number} is above {}", PortId::MAX)), Ok)
}

fn action(node: &AstNode, ports: Ports<'_>) -> Result<Action, WordError> {
    let arguments = Arguments::new(node)?;
    Ok(match arguments.spec.name {
        "queue" => {
            let word = arguments.need("id")?;
            match number(&word.text).filter(|_| !word.text.is_empty()) {
                Some(queue) => Action::Queue(queue),
                None => return bad(word, "a queue from 0 to 65535"),
            }
        }
        "rss" => Action::Rss(rss(&arguments)?),
        "drop" => Action::Drop,
        "kernel" => Action::Kernel,
        "count" => Action::Count,
        "dec-ttl" => Action::DecTtl,
        "pop-vlan" => Action::PopVlan,
        "redirect" => Action::Redirect(port(arguments.need("port")?, ports)?),
        "mirror" => Action::Mirror(port(arguments.need("port")?, ports)?),
        "mark" => Action::Mark(field_value(Field::MetaMark, arguments.need("value")?, ports)? as u32),
        "set" => {
            let kind = item_kind(arguments.need("item")?)?;
            let field = item_field(kind, arguments.need("field")?)?;
            Action::Set { field, value: field_value(field, arguments.need("value")?, ports)? }
        }
        "push-vlan" => {
            let value = |name, field, default| match arguments.get(name) {
                Some(word) => field_value(field, word, ports).map(|value| value as u16),
                None => Ok(default),
            };
            let vid = field_value(Field::VlanVid, arguments.need("vid")?, ports)? as u16;
            let (pcp, dei) = (value("pcp", Field::VlanPcp, 0)?, value("dei", Field::VlanDei, 0)?);
            let tpid = value("tpid", Field::VlanTpid, EtherType::VLAN.0)?;
            Action::PushVlan(Tag { tpid: EtherType(tpid), tci: pcp << 13 | dei << 12 | vid })
        }
        name @ ("decap" | "encap") => Action::Reformat(reformat(name, &arguments)?),
        _ => Action::Limit(limit(&arguments)?),
    })
}

fn rss(arguments: &Arguments<'_>) -> Result<Rss, WordError> {
    let word = arguments.need("queues")?;
    let Some(queues) = queues(&word.text) else {
        return bad(word, "up to 512 queues such as 0-3+6");
    };
    let on = match arguments.get("on") {
        None => HashFields::FIVE_TUPLE,
        Some(word) => {
            let names: Vec<&str> = HashFields::NAMES.iter().map(|(name, _)| *name).collect();
            let mut on = 0;
            for name in word.text.split('+') {
                match HashFields::NAMES.iter().find(|(known, _)| *known == name) {
                    Some((_, bit)) => on |= bit,
                    None => return unknown(&Word { text: name.to_owned(), at: word.at }, "field to hash", &names),
                }
            }
            HashFields(on)
        }
    };
    let key = match arguments.get("key") {
        None => None,
        Some(word) => match unhex(&word.text).and_then(|bytes| <[u8; 40]>::try_from(bytes).ok()) {
            Some(key) => Some(key),
            None => return bad(word, "a key of 80 hexadecimal digits"),
        },
    };
    Ok(Rss { queues, on, key })
}

fn reformat(name: &str, arguments: &Arguments<'_>) -> Result<Reformat, WordError> {
    let word = arguments.need("kind")?;
    let kind = match (name, word.text.as_str()) {
        ("decap", "l2") => ReformatKind::L2TunnelToL2,
        ("decap", "l3") => ReformatKind::L3TunnelToL2,
        ("encap", "l2") => ReformatKind::L2ToL2Tunnel,
        ("encap", "l3") => ReformatKind::L2ToL3Tunnel,
        _ => return unknown(word, &format!("kind of {name}"), &["l2", "l3"]),
    };
    let bytes = match (arguments.get("header"), kind) {
        (Some(word), _) => match unhex(&word.text) {
            Some(bytes) => bytes,
            None => return bad(word, "header bytes as pairs of hexadecimal digits"),
        },
        (None, ReformatKind::L2TunnelToL2) => Vec::new(),
        (None, _) => {
            arguments.need("header")?;
            Vec::new()
        }
    };
    let at = arguments.get("header").unwrap_or(word).at;
    Reformat::new(kind, &bytes).map_err(|error| WordError { at, reason: Reason::BadHeader, message: error.to_string() })
}

fn limit(arguments: &Arguments<'_>) -> Result<Limit, WordError> {
    let scaled = |word: &Word| match unscaled(&word.text).filter(|_| !word.text.is_empty()) {
        Some(value) => Ok(value),
        None => bad(word, "a number such as 1500 or 10M"),
    };
    let rate = scaled(arguments.need("rate")?)?;
    let word = arguments.need("unit")?;
    let unit = match word.text.as_str() {
        "pps" => RateUnit::Packets,
        "bps" => RateUnit::Bits,
        _ => return unknown(word, "unit", &["pps", "bps"]),
    };
    let burst = match (arguments.get("burst"), unit) {
        (Some(word), _) => scaled(word)?,
        (None, RateUnit::Packets) => (rate / 10).max(32),
        (None, RateUnit::Bits) => (rate / 80).max(9216),
    };
    Ok(Limit { rate, unit, burst })
}

/// Lists the argument names of an action, for error messages.
pub(super) fn argument_names(spec: &ActionSpec) -> String {
    join(spec.positional.iter().chain(spec.named).copied())
}
