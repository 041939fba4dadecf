//! The text of a configuration, and changes of single objects in it. Comments and the order of the text stay.

use std::fmt;

use serde_json::{Map, Value as Json};
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, TableLike, Value, value};
use wirepath_flow::{Ports, Rule};
use wirepath_packet::PortId;
use wirepath_pipeline::registry::{Argument, ArgumentKind, ObjectSpec, Operation};

/// A kind of object that stands in the configuration and can be changed alone while the program runs.
#[derive(Debug)]
pub struct ConfigObject {
    /// Its operations.
    pub spec: &'static ObjectSpec,
    /// Where its objects stand.
    pub place: Place,
}

/// Where the objects of a kind stand in the configuration.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// Tables `[[key]]`. The argument and key `name` names the table. A table without a name has that of `unnamed`.
    Tables {
        /// Key of the tables.
        key: &'static str,
        /// Returns the name of a table without the key `name`.
        unnamed: fn(&dyn TableLike) -> Option<String>,
    },
    /// The one table `[key]`.
    Table {
        /// Key of the table.
        key: &'static str,
    },
    /// Elements of a list of values in the parent. The argument has the value.
    Values {
        /// The parent.
        parent: Parent,
        /// Key of the list.
        key: &'static str,
        /// Name of the argument.
        argument: &'static str,
    },
    /// Elements of a list of tables in the parent.
    Elements {
        /// The parent.
        parent: Parent,
        /// Key of the list.
        key: &'static str,
        /// Keys that identify an element.
        identity: &'static [&'static str],
    },
}

/// The table in which a list of objects stands.
#[derive(Clone, Copy, Debug)]
pub enum Parent {
    /// The table `[key]`.
    Table(&'static str),
    /// The table `[[key]]` that the argument `argument` names.
    Named {
        /// Key of the tables.
        key: &'static str,
        /// Name of the argument.
        argument: &'static str,
        /// Returns the name of a table without the key `name`.
        unnamed: fn(&dyn TableLike) -> Option<String>,
    },
}

/// A change of one object.
#[derive(Clone, Debug)]
pub struct Edit {
    /// Kind of the object.
    pub object: &'static ConfigObject,
    /// Operation.
    pub operation: Operation,
    /// Arguments by name.
    pub arguments: Map<String, Json>,
}

/// Why a change is not possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EditError {
    /// The object to be added is there already.
    Exists(String),
    /// Another reason.
    Refused(String),
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Exists(text) | Self::Refused(text)) = self;
        f.write_str(text)
    }
}

impl From<String> for EditError {
    fn from(text: String) -> Self {
        Self::Refused(text)
    }
}

impl Edit {
    /// Returns whether both edits concern the same object.
    pub fn has_same_object(&self, other: &Self) -> bool {
        let same = |name: &&str| match (text_of(self.arguments.get(*name)), text_of(other.arguments.get(*name))) {
            (Some(one), Some(other)) => same_value(&one, &other),
            (one, other) => one == other,
        };
        std::ptr::eq(self.object, other.object) && self.object.place.identity().iter().all(same)
    }

    /// Returns whether the object of this edit stands in the object of another edit.
    pub fn is_within(&self, other: &Self) -> bool {
        let (Place::Values { parent, .. } | Place::Elements { parent, .. }) = self.object.place else { return false };
        match (parent, other.object.place) {
            (Parent::Named { key, argument, .. }, Place::Tables { key: other_key, .. }) => {
                key == other_key && text_of(self.arguments.get(argument)) == text_of(other.arguments.get("name"))
            }
            _ => false,
        }
    }

    /// Applies the change to a document. After an error the document may be half changed.
    ///
    /// # Errors
    /// The object does not exist, exists already, or an argument has the wrong form.
    pub fn apply(&self, document: &mut DocumentMut) -> Result<(), EditError> {
        let ports = port_names(document);
        let root = document.as_table_mut();
        let kind = self.object.spec.name;
        match self.object.place {
            Place::Tables { key, unnamed } => {
                let name = self.text("name")?;
                let at = position(root.get(key), |table| is_named(table, &name, unnamed));
                match (self.operation, at) {
                    (Operation::Add, Some(_)) => {
                        return Err(EditError::Exists(format!("the {kind} \"{name}\" exists already")));
                    }
                    (Operation::Add, None) => {
                        let mut table = Table::new();
                        self.write_arguments(&mut table, &[], &ports)?;
                        push_table(root, key, table)?;
                    }
                    (_, None) => return Err(none_named(root.get(key), kind, &name, unnamed)),
                    (Operation::Set, Some(at)) => {
                        let table = table_at(root.get_mut(key), at).ok_or_else(|| unusual(key))?;
                        self.write_arguments(table, &["name"], &ports)?;
                    }
                    (Operation::Remove, Some(at)) => remove_at(root, key, at),
                }
            }
            Place::Table { key } => {
                let item = root.entry(key).or_insert_with(|| Item::Table(Table::new()));
                let table = item.as_table_like_mut().ok_or_else(|| unusual(key))?;
                self.write_arguments(table, &[], &ports)?;
            }
            Place::Values { parent, key, argument } => {
                let text = self.text(argument)?;
                let parent = self.parent(root, parent)?;
                let list = values(parent, key).ok_or_else(|| unusual(key))?;
                let is_rule = self.argument(argument).is_some_and(|it| it.kind == ArgumentKind::Rule);
                let is_same = |it: &str| same_value(it, &text) || is_rule && same_rule(it, &text, &ports);
                let at = list.iter().position(|it| it.as_str().is_some_and(is_same));
                match (self.operation, at) {
                    (Operation::Add, Some(_)) => {
                        return Err(EditError::Exists(format!("the {kind} {text} exists already")));
                    }
                    (Operation::Remove, Some(at)) => _ = list.remove(at),
                    (Operation::Add, None) => list.push(text),
                    _ => return Err(format!("there is no {kind} {text}").into()),
                }
            }
            Place::Elements { parent, key, identity } => {
                // An empty text removes a key, so that it names an element without this key.
                let given = |key: &str| text_of(self.arguments.get(key)).filter(|text| !text.is_empty());
                let wanted: Vec<(&str, Option<String>)> = identity.iter().map(|key| (*key, given(key))).collect();
                let named: Vec<&str> = wanted.iter().filter_map(|(_, text)| text.as_deref()).collect();
                let named = named.join(" ");
                let parent_argument = match parent {
                    Parent::Named { argument, .. } => argument,
                    Parent::Table(_) => "",
                };
                let parent = self.parent(root, parent)?;
                let at = position(parent.get(key), |table| {
                    let same = |(key, text): &(&str, Option<String>)| match (toml_text(table.get(key)), text) {
                        (Some(there), Some(text)) => same_value(&there, text),
                        (None, None) => true,
                        _ => false,
                    };
                    wanted.iter().all(same)
                });
                match (self.operation, at) {
                    (Operation::Add, Some(_)) => {
                        return Err(EditError::Exists(format!("the {kind} {named} exists already")));
                    }
                    (Operation::Add, None) => {
                        let mut table = InlineTable::new();
                        self.write_arguments(&mut table, &[parent_argument], &ports)?;
                        push_inline(parent, key, table)?;
                    }
                    (_, None) => return Err(format!("there is no {kind} {named}").into()),
                    (Operation::Set, Some(at)) => {
                        let table = table_at(parent.get_mut(key), at).ok_or_else(|| unusual(key))?;
                        self.write_arguments(table, &[&[parent_argument], identity].concat(), &ports)?;
                    }
                    (Operation::Remove, Some(at)) => remove_at(parent, key, at),
                }
            }
        }
        Ok(())
    }

    /// Returns the descriptions of the arguments of this operation.
    fn described(&self) -> &'static [Argument] {
        let operations = self.object.spec.operations;
        let found = operations.iter().find(|(operation, _)| *operation == self.operation);
        found.map_or(&[][..], |(_, arguments)| arguments)
    }

    /// Returns the description of an argument.
    fn argument(&self, name: &str) -> Option<&'static Argument> {
        self.described().iter().find(|argument| argument.name == name)
    }

    /// Returns a text argument that the description requires. An empty text names no object.
    fn text(&self, name: &str) -> Result<String, EditError> {
        let text = text_of(self.arguments.get(name)).filter(|text| !text.is_empty());
        text.ok_or_else(|| format!("{name}: expected a text").into())
    }

    /// Returns the table in which the list of the object stands.
    fn parent<'d>(&self, root: &'d mut Table, parent: Parent) -> Result<&'d mut dyn TableLike, EditError> {
        match parent {
            Parent::Table(key) => {
                let item = root.entry(key).or_insert_with(|| Item::Table(Table::new()));
                item.as_table_like_mut().ok_or_else(|| unusual(key))
            }
            Parent::Named { key, argument, unnamed } => {
                let name = self.text(argument)?;
                match position(root.get(key), |table| is_named(table, &name, unnamed)) {
                    Some(at) => table_at(root.get_mut(key), at).ok_or_else(|| unusual(key)),
                    None => Err(none_named(root.get(key), argument, &name, unnamed)),
                }
            }
        }
    }

    /// Writes all arguments except some as keys of a table. An empty text removes the key, which then has its default.
    fn write_arguments(&self, table: &mut dyn TableLike, except: &[&str], ports: &[String]) -> Result<(), EditError> {
        for argument in self.described() {
            let Some(given) = self.arguments.get(argument.name).filter(|_| !except.contains(&argument.name)) else {
                continue;
            };
            if given.as_str() == Some("") {
                table.remove(argument.name);
                continue;
            }
            let new = argument_value(argument, given, ports)?;
            match table.get_mut(argument.name) {
                Some(Item::Value(old)) => {
                    let decor = old.decor().clone();
                    *old = new;
                    *old.decor_mut() = decor;
                }
                _ => _ = table.insert(argument.name, value(new)),
            }
        }
        Ok(())
    }
}

impl Place {
    /// Arguments that identify an object.
    fn identity(&self) -> Vec<&'static str> {
        let of_parent = |parent: &Parent| match parent {
            Parent::Table(_) => None,
            Parent::Named { argument, .. } => Some(*argument),
        };
        match self {
            Self::Tables { .. } => vec!["name"],
            Self::Table { .. } => Vec::new(),
            Self::Values { parent, argument, .. } => of_parent(parent).into_iter().chain([*argument]).collect(),
            Self::Elements { parent, identity, .. } => {
                of_parent(parent).into_iter().chain(identity.iter().copied()).collect()
            }
        }
    }
}

fn unusual(key: &str) -> EditError {
    format!("\"{key}\" is written in a form that cannot be changed").into()
}

/// Returns the text of an argument that is a text or a number.
fn text_of(argument: Option<&Json>) -> Option<String> {
    match argument? {
        Json::String(text) => Some(text.clone()),
        Json::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Returns the text of a value of the document that is a text or a number.
fn toml_text(item: Option<&Item>) -> Option<String> {
    let value = item?.as_value()?;
    value.as_str().map(str::to_owned).or_else(|| value.as_integer().map(|number| number.to_string()))
}

/// Returns whether two texts mean the same: equal texts, or addresses that are written in different ways.
fn same_value(one: &str, other: &str) -> bool {
    let ip = |text: &str| text.parse::<std::net::IpAddr>().ok();
    one == other || one.eq_ignore_ascii_case(other) && one.contains(':') || ip(one).is_some() && ip(one) == ip(other)
}

/// Returns whether two texts are those of the same flow rule.
fn same_rule(one: &str, other: &str, ports: &[String]) -> bool {
    let named = (0_u16..).map_while(PortId::checked);
    let names: Vec<(&str, PortId)> = ports.iter().map(String::as_str).zip(named).collect();
    let rule = |text: &str| Rule::parse(text, Ports(&names)).ok();
    rule(one).is_some_and(|one| rule(other) == Some(one))
}

/// Names of the tables `[[port]]`.
fn port_names(document: &DocumentMut) -> Vec<String> {
    let name = |table: &dyn TableLike| toml_text(table.get("name"));
    tables(document.get("port")).into_iter().filter_map(name).collect()
}

/// Returns the tables of a list, in either form.
fn tables(item: Option<&Item>) -> Vec<&dyn TableLike> {
    match item {
        Some(Item::ArrayOfTables(list)) => list.iter().map(|table| table as &dyn TableLike).collect(),
        Some(Item::Value(Value::Array(list))) => {
            list.iter().filter_map(Value::as_inline_table).map(|table| table as &dyn TableLike).collect()
        }
        _ => Vec::new(),
    }
}

fn position(item: Option<&Item>, matches: impl Fn(&dyn TableLike) -> bool) -> Option<usize> {
    tables(item).into_iter().position(matches)
}

fn table_at(item: Option<&mut Item>, at: usize) -> Option<&mut dyn TableLike> {
    match item? {
        Item::ArrayOfTables(list) => list.get_mut(at).map(|table| table as &mut dyn TableLike),
        Item::Value(Value::Array(list)) => {
            let mut tables = list.iter_mut().filter_map(Value::as_inline_table_mut);
            tables.nth(at).map(|table| table as &mut dyn TableLike)
        }
        _ => None,
    }
}

/// Removes a table from a list, and the list with its last one.
fn remove_at(parent: &mut dyn TableLike, key: &str, at: usize) {
    let empty = match parent.get_mut(key) {
        Some(Item::ArrayOfTables(list)) => {
            list.remove(at);
            list.is_empty()
        }
        Some(Item::Value(Value::Array(list))) => {
            list.remove(at);
            list.is_empty()
        }
        _ => false,
    };
    if empty {
        parent.remove(key);
    }
}

fn push_table(parent: &mut dyn TableLike, key: &str, table: Table) -> Result<(), EditError> {
    match parent.entry(key).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new())) {
        Item::ArrayOfTables(list) => list.push(table),
        Item::Value(Value::Array(list)) => list.push(table.into_inline_table()),
        _ => return Err(unusual(key)),
    }
    Ok(())
}

fn push_inline(parent: &mut dyn TableLike, key: &str, table: InlineTable) -> Result<(), EditError> {
    match parent.entry(key).or_insert_with(|| value(Array::new())) {
        Item::ArrayOfTables(list) => list.push(table.into_table()),
        Item::Value(Value::Array(list)) => list.push(table),
        _ => return Err(unusual(key)),
    }
    Ok(())
}

/// Returns the list with this key. A single value becomes a list.
fn values<'d>(parent: &'d mut dyn TableLike, key: &str) -> Option<&'d mut Array> {
    let item = parent.entry(key).or_insert_with(|| value(Array::new()));
    if item.is_str() {
        let mut single = std::mem::take(item).into_value().ok()?;
        single.decor_mut().clear();
        *item = value(Array::from_iter([single]));
    }
    item.as_array_mut()
}

fn is_named(table: &dyn TableLike, name: &str, unnamed: fn(&dyn TableLike) -> Option<String>) -> bool {
    toml_text(table.get("name")).or_else(|| unnamed(table)).is_some_and(|it| it == name)
}

fn none_named(item: Option<&Item>, kind: &str, name: &str, unnamed: fn(&dyn TableLike) -> Option<String>) -> EditError {
    let names = tables(item).into_iter().filter_map(|table| toml_text(table.get("name")).or_else(|| unnamed(table)));
    let names: Vec<String> = names.collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let near = wirepath_settings::nearest(name, &names).map(|near| format!("; did you mean \"{near}\"?"));
    format!("there is no {kind} \"{name}\"{}", near.unwrap_or_default()).into()
}

/// Converts an argument to a value of the document.
fn argument_value(argument: &Argument, given: &Json, ports: &[String]) -> Result<Value, EditError> {
    let name = argument.name;
    let refuse = |expected: &str| EditError::Refused(format!("{name}: found {given}, expected {expected}"));
    let number = |json: &Json| json.as_i64().or_else(|| json.as_str()?.parse().ok());
    match argument.kind {
        ArgumentKind::Text | ArgumentKind::Rule => given.as_str().map(Value::from).ok_or_else(|| refuse("a text")),
        ArgumentKind::Number => number(given).map(Value::from).ok_or_else(|| refuse("a number")),
        ArgumentKind::NumberOrText => number(given)
            .map(Value::from)
            .or_else(|| given.as_str().map(Value::from))
            .ok_or_else(|| refuse("a number or a text")),
        ArgumentKind::Flag => match given {
            Json::Bool(flag) => Ok(Value::from(*flag)),
            Json::String(text) if text == "true" => Ok(Value::from(true)),
            Json::String(text) if text == "false" => Ok(Value::from(false)),
            _ => Err(refuse("true or false")),
        },
        ArgumentKind::List => {
            let texts = list_of(given).ok_or_else(|| refuse("texts with commas between"))?;
            Ok(Value::Array(Array::from_iter(texts)))
        }
        ArgumentKind::Attachments => {
            let texts = list_of(given).ok_or_else(|| refuse("ports with commas between, such as lan,lan2.100"))?;
            let mut list = Array::new();
            for text in texts {
                let split = text.rsplit_once('.').and_then(|(port, vlan)| Some((port, vlan.parse::<u16>().ok()?)));
                let mut table = InlineTable::new();
                match split.filter(|_| !ports.contains(&text)) {
                    Some((port, vlan)) => {
                        table.insert("port", port.into());
                        table.insert("vlan", i64::from(vlan).into());
                    }
                    None => _ = table.insert("port", text.into()),
                }
                list.push(table);
            }
            Ok(Value::Array(list))
        }
        ArgumentKind::Toml => {
            let parsed = given.as_str().and_then(|text| text.parse::<Value>().ok());
            parsed.ok_or_else(|| refuse("a TOML value as in a configuration file"))
        }
    }
}

/// Returns the texts of a list, or of one text with commas between.
fn list_of(given: &Json) -> Option<Vec<String>> {
    match given {
        Json::String(text) => Some(text.split(',').map(|part| part.trim().to_owned()).collect()),
        Json::Array(list) => list.iter().map(|it| it.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}
