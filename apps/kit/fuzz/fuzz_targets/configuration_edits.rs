//! Fuzzes changes of single objects in the text of a configuration.
//!
//! The input is a configuration, a line of `%`, and a change on each further line: an operation, a kind of object and
//! its arguments as a JSON object. A change is refused with a message, or the document is still valid TOML.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};
use toml_edit::{DocumentMut, TableLike};
use wirepath::configuration::{ConfigObject, Difference, Edit, EditError, Parent, Place, differences};
use wirepath_pipeline::registry::{Argument, ArgumentKind, ObjectSpec, Operation};

const NAME: Argument = Argument::required("name", ArgumentKind::Text, "name");
const TABLE: Argument = Argument::required("table", ArgumentKind::Text, "name of the table");
const VALUES: &[Argument] = &[
    NAME,
    Argument::optional("number", ArgumentKind::Number, "number"),
    Argument::optional("either", ArgumentKind::NumberOrText, "number or text"),
    Argument::optional("flag", ArgumentKind::Flag, "flag"),
    Argument::optional("list", ArgumentKind::List, "list"),
    Argument::optional("ports", ArgumentKind::Attachments, "ports"),
];
const ELEMENT: &[Argument] = &[
    TABLE,
    Argument::required("port", ArgumentKind::Text, "port"),
    Argument::optional("vlan", ArgumentKind::Number, "VLAN ID"),
    Argument::optional("text", ArgumentKind::Text, "text"),
];
const ADDRESS: &[Argument] = &[Argument::required("address", ArgumentKind::Text, "address")];

fn unnamed(table: &dyn TableLike) -> Option<String> {
    table.get("id")?.as_integer().map(|id| format!("id{id}"))
}

const IN_TABLE: Parent = Parent::Named { key: "t", argument: "table", unnamed };

static OBJECTS: [ConfigObject; 4] = [
    ConfigObject {
        spec: &ObjectSpec {
            name: "table",
            about: "",
            operations: &[(Operation::Add, VALUES), (Operation::Set, VALUES), (Operation::Remove, &[NAME])],
        },
        place: Place::Tables { key: "t", unnamed },
    },
    ConfigObject {
        spec: &ObjectSpec { name: "settings", about: "", operations: &[(Operation::Set, VALUES)] },
        place: Place::Table { key: "s" },
    },
    ConfigObject {
        spec: &ObjectSpec {
            name: "address",
            about: "",
            operations: &[(Operation::Add, ADDRESS), (Operation::Remove, ADDRESS)],
        },
        place: Place::Values { parent: Parent::Table("s"), key: "addresses", argument: "address" },
    },
    ConfigObject {
        spec: &ObjectSpec {
            name: "element",
            about: "",
            operations: &[(Operation::Add, ELEMENT), (Operation::Set, ELEMENT), (Operation::Remove, ELEMENT)],
        },
        place: Place::Elements { parent: IN_TABLE, key: "e", identity: &["port", "vlan"] },
    },
];

/// Reads a change; `None` if the line has another form.
fn edit(line: &str) -> Option<Edit> {
    let mut words = line.splitn(3, ' ');
    let operation = match words.next()? {
        "add" => Operation::Add,
        "set" => Operation::Set,
        "remove" => Operation::Remove,
        _ => return None,
    };
    let object = words.next()?;
    let object = OBJECTS.iter().find(|it| it.spec.name == object)?;
    object.spec.operations.iter().find(|(it, _)| *it == operation)?;
    let Ok(Value::Object(arguments)) = serde_json::from_str::<Value>(words.next()?) else { return None };
    Some(Edit { object, operation, arguments })
}

/// Returns the document as it is after it was written and read.
fn reread(document: &DocumentMut) -> DocumentMut {
    let text = document.to_string();
    text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Some((text, edits)) = text.split_once("\n%\n") else { return };
    let Ok(mut document) = text.parse::<DocumentMut>() else { return };
    for edit in edits.lines().filter_map(edit).take(8) {
        let mut changed = document.clone();
        match edit.apply(&mut changed) {
            Ok(()) => {}
            // A document may be half changed after an error; programs drop it.
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        }
        let written = reread(&changed);
        assert_eq!(differences(&changed, &written), [], "the text differs from the document");
        if edit.operation == Operation::Add {
            let again = edit.apply(&mut written.clone());
            assert!(matches!(again, Err(EditError::Exists(_))), "added twice: {again:?}");
            let remove = Edit { operation: Operation::Remove, arguments: identity(&edit), ..edit };
            let mut removed = written.clone();
            remove.apply(&mut removed).expect("an added object can be removed");
            let left = differences(&document, &reread(&removed));
            // An array that had no element leaves with the last one.
            let lost = |it: &Difference| it.after.is_none() && it.before.as_ref().is_some_and(|it| it != "[]");
            assert!(!left.iter().any(lost), "{left:?}");
        }
        document = written;
    }
});

/// Returns the arguments that name the object of a change.
fn identity(edit: &Edit) -> Map<String, Value> {
    let names = ["name", "table", "address", "port", "vlan"];
    edit.arguments
        .iter()
        .filter(|(name, _)| names.contains(&name.as_str()))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}
