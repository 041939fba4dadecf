use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};

use crate::{Control, ControlPlane};

/// Operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Creates the object.
    Add,
    /// Changes properties of the object.
    Set,
    /// Removes the object.
    Remove,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 3] = [Self::Add, Self::Set, Self::Remove];

    /// Name of the operation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Set => "set",
            Self::Remove => "remove",
        }
    }

    /// Returns the operation with this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Description of a kind of object that can be changed while the program runs.
#[derive(Debug)]
pub struct ObjectSpec {
    /// Name: a noun in singular.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Possible operations with their arguments.
    pub operations: &'static [(Operation, &'static [Argument])],
}

/// Argument of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Name: lower-case words joined by `_`.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Form of the argument.
    pub kind: ArgumentKind,
    /// True if the operation needs the argument.
    pub required: bool,
}

/// Form of an argument. Each form can be given as a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentKind {
    /// A text.
    Text,
    /// A whole number.
    Number,
    /// A whole number, or one of certain texts.
    NumberOrText,
    /// `true` or `false`.
    Flag,
    /// A list of texts, or one text with commas between them.
    List,
    /// A list of ports as in [`Self::List`], each with `.VLAN` if it has one.
    Attachments,
    /// The text of a flow rule.
    Rule,
    /// A value as the text of a configuration file has it, such as `{ checksum = true }`.
    Toml,
}

impl ArgumentKind {
    /// Name of the form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Number => "number",
            Self::NumberOrText => "number or text",
            Self::Flag => "true or false",
            Self::List => "list",
            Self::Attachments => "list of ports",
            Self::Rule => "flow rule",
            Self::Toml => "TOML value",
        }
    }
}

impl Argument {
    /// An argument that the operation needs.
    pub const fn required(name: &'static str, kind: ArgumentKind, about: &'static str) -> Self {
        Self { name, about, kind, required: true }
    }

    /// An argument that may be left out.
    pub const fn optional(name: &'static str, kind: ArgumentKind, about: &'static str) -> Self {
        Self { name, about, kind, required: false }
    }
}

impl ObjectSpec {
    /// Checks that the object has the operation and its arguments.
    pub(super) fn check(&self, change: &Change<'_>) -> Result<(), String> {
        let name = self.name;
        let Some((_, arguments)) = self.operations.iter().find(|(operation, _)| *operation == change.operation) else {
            let possible: Vec<&str> = self.operations.iter().map(|(operation, _)| operation.name()).collect();
            return Err(format!("{name}: \"{}\" is not possible, only {}", change.operation, possible.join(", ")));
        };
        check_arguments(name, arguments, change.arguments)
    }

    /// Returns which operations change a part of the object that an unknown argument names, if the part is an object
    /// itself. `objects` are all kinds of objects.
    pub(super) fn part(&self, change: &Change<'_>, objects: &[&ObjectSpec]) -> Option<String> {
        let arguments =
            |of: &'static [(Operation, &'static [Argument])]| of.iter().flat_map(|(_, arguments)| *arguments);
        let is_known = |name: &&String| arguments(self.operations).any(|it| it.name == name.as_str());
        let unknown = change.arguments.keys().find(|name| !is_known(name))?;
        let own = self.name;
        let is_part = |other: &&&ObjectSpec| {
            let names = [unknown.clone(), format!("{own}_{unknown}")];
            let is_named = names.iter().any(|name| name == other.name || name.strip_suffix('s') == Some(other.name));
            is_named && arguments(other.operations).any(|it| it.required && it.name == own)
        };
        let part = objects.iter().find(is_part)?;
        let operations = part.operations.iter().map(|(operation, _)| format!("\"{operation} {}\"", part.name));
        let operations: Vec<_> = operations.collect();
        Some(format!("{own}: {unknown:?} is changed by {}", operations.join(", ")))
    }
}

/// Checks that the given arguments are possible ones and none lacks. `name` is that of the object or command.
pub(super) fn check_arguments(name: &str, arguments: &[Argument], given: &Map<String, Value>) -> Result<(), String> {
    let names: Vec<&str> = arguments.iter().map(|argument| argument.name).collect();
    if let Some(unknown) = given.keys().find(|given| !names.contains(&given.as_str())) {
        return Err(match wirepath_settings::nearest(unknown, &names) {
            Some(near) => format!("{name}: unknown argument {unknown:?}; did you mean \"{near}\"?"),
            None if names.is_empty() => format!("{name}: unknown argument {unknown:?}; there are none"),
            None => format!("{name}: unknown argument {unknown:?}; expected {}", names.join(", ")),
        });
    }
    let missing = arguments.iter().find(|it| it.required && !given.contains_key(it.name));
    missing.map_or(Ok(()), |it| Err(format!("{name}: the argument \"{}\" is missing: {}", it.name, it.about)))
}

/// Returns a text argument.
pub(super) fn text<'a>(arguments: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>, String> {
    match arguments.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("{name}: found {other}, expected a text")),
    }
}

/// Returns a number argument, which may also be given as text.
pub(super) fn number(arguments: &Map<String, Value>, name: &str) -> Result<Option<u64>, String> {
    let Some(value) = arguments.get(name) else { return Ok(None) };
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.map(Some).ok_or_else(|| format!("{name}: found {value}, expected a number"))
}

/// Outcome of a change that was not refused at once.
#[derive(Clone, Debug)]
pub enum Changed {
    /// The change is carried out. The value says what the operator must know about the object, such as its number.
    Done(Value),
    /// The change takes a while.
    Pending(PendingChange),
}

/// A change that takes a while. Its clones share the outcome, and the last one frees it.
#[derive(Clone, Debug, Default)]
pub struct PendingChange(Arc<Mutex<Option<Result<Value, String>>>>);

impl PendingChange {
    /// Creates a change that is not carried out yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stores the outcome.
    pub fn finish(&self, outcome: Result<Value, String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }

    /// Takes the outcome, if the change is carried out or refused.
    pub fn take(&self) -> Option<Result<Value, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns whether there is another clone, which may take the outcome.
    pub fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl From<Value> for Changed {
    fn from(value: Value) -> Self {
        Self::Done(value)
    }
}

/// A change that an operator asks for.
#[derive(Debug)]
pub struct Change<'a> {
    /// Operation.
    pub operation: Operation,
    /// Name of the kind of object.
    pub object: &'a str,
    /// Arguments by name.
    pub arguments: &'a Map<String, Value>,
    /// User and process that ask for the change, for the log.
    pub origin: &'a str,
}

impl Change<'_> {
    /// Returns a text argument; `Ok(None)` if it is absent.
    ///
    /// # Errors
    /// If the argument is not a text.
    pub fn text(&self, name: &str) -> Result<Option<&str>, String> {
        text(self.arguments, name)
    }

    /// Returns a number argument, which may also be given as text; `Ok(None)` if it is absent.
    ///
    /// # Errors
    /// If the argument is not a whole number from 0 on.
    pub fn number(&self, name: &str) -> Result<Option<u64>, String> {
        number(self.arguments, name)
    }

    /// The reason why an object without a [`ObjectSpec`] cannot be changed.
    pub fn unknown(&self) -> String {
        let remedy =
            if self.object == "rule" { "; an empty table [rules] in its configuration allows rules" } else { "" };
        format!("this program has no \"{}\" that can be changed while it runs{remedy}", self.object)
    }
}

/// Serves operators of a running program on the control thread, for example by a socket.
pub trait Management: Send {
    /// Serves for a bounded time. Returns false if nothing happened. The runtime calls this about every ten
    /// milliseconds, and sooner if [`Self::descriptor`] is readable.
    fn serve(&mut self, control: &mut dyn Control, plane: &mut ControlPlane) -> bool;

    /// Returns a descriptor that is readable while an operator waits. The runtime bounds the share of its time that
    /// it spends there, so the descriptor may be readable for ever.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OBJECT: ObjectSpec = ObjectSpec {
        name: "rule",
        about: "",
        operations: &[
            (Operation::Add, &[Argument::required("rule", ArgumentKind::Text, "text of the rule")]),
            (Operation::Remove, &[Argument::required("id", ArgumentKind::Number, "number of the rule")]),
        ],
    };

    #[test]
    fn changes_are_checked_against_the_description() {
        let check = |operation, arguments: Value| {
            let arguments = arguments.as_object().unwrap();
            OBJECT.check(&Change { operation, object: "rule", arguments, origin: "test" })
        };
        assert_eq!(check(Operation::Add, json!({ "rule": "any => drop" })), Ok(()));
        let error = |operation, arguments| check(operation, arguments).unwrap_err();
        assert_eq!(error(Operation::Set, json!({})), "rule: \"set\" is not possible, only add, remove");
        assert_eq!(error(Operation::Remove, json!({})), "rule: the argument \"id\" is missing: number of the rule");
        assert_eq!(
            error(Operation::Add, json!({ "rul": 1 })),
            "rule: unknown argument \"rul\"; did you mean \"rule\"?"
        );
    }

    #[test]
    fn arguments_have_types() {
        let arguments = json!({ "id": "7", "n": 8, "x": -1, "text": "a" });
        let arguments = arguments.as_object().unwrap();
        let change = Change { operation: Operation::Add, object: "x", arguments, origin: "test" };
        assert_eq!((change.number("id"), change.number("n")), (Ok(Some(7)), Ok(Some(8))));
        assert_eq!(change.number("none"), Ok(None));
        assert!(change.number("x").is_err() && change.number("text").is_err() && change.text("n").is_err());
        assert_eq!(change.text("text"), Ok(Some("a")));
    }
}
