use serde_json::{Value, json};
use wirepath_settings::{Form, KeySpec, Written};

use super::{Listed, Reference, Selected};

impl Reference {
    /// The reference as JSON.
    ///
    /// `tables` is a list of objects with `table` (full name), `also`, `written` ("once", "repeated" or "inline list"),
    /// `programs`, `about`, `absent`, `others`, `example` and `keys`. A key has `name`, `about`, `type`, `required`,
    /// `default` (a TOML value or null), `absent`, `when`, and what its type needs: `min`, `max`, `unit`, `choices`,
    /// `items`.
    pub fn to_json(&self, selected: &[Selected<'_>]) -> Value {
        let mut tables: Vec<(&Listed, Vec<&dyn KeySpec>)> = Vec::new();
        for Selected { listed, key } in selected {
            let keys = key.map_or_else(|| listed.table.keys.to_vec(), |key| vec![key]);
            match tables.iter_mut().find(|(known, _)| std::ptr::eq(*known, *listed)) {
                Some((_, known)) => known.extend(keys),
                None => tables.push((listed, keys.into_iter().map(|key| key as &dyn KeySpec).collect())),
            }
        }
        let tables: Vec<Value> = tables.iter().map(|(listed, keys)| table(listed, keys)).collect();
        json!({ "tables": tables })
    }
}

fn table(listed: &Listed, keys: &[&dyn KeySpec]) -> Value {
    let written = match listed.table.written {
        Written::Once => "once",
        Written::Repeated => "repeated",
        Written::InlineList => "inline list",
    };
    json!({
        "table": listed.path,
        "also": listed.also,
        "written": written,
        "programs": listed.programs,
        "about": listed.table.about,
        "absent": listed.table.absent,
        "others": listed.table.others,
        "example": listed.table.example,
        "keys": keys.iter().map(|key| self::key(*key)).collect::<Vec<_>>(),
    })
}

fn key(key: &dyn KeySpec) -> Value {
    let mut object = form(&key.form());
    let rest = json!({
        "name": key.name(),
        "about": key.about(),
        "required": key.is_required(),
        "default": key.default(),
        "absent": key.absent(),
        "when": key.when(),
    });
    if let (Value::Object(object), Value::Object(rest)) = (&mut object, rest) {
        object.extend(rest);
    }
    object
}

fn form(form: &Form) -> Value {
    match form {
        Form::Flag => json!({ "type": "boolean" }),
        Form::Text(what) => json!({ "type": "string", "meaning": what }),
        Form::Integer { min, max, unit, octal } => {
            json!({ "type": "integer", "min": min, "max": max, "unit": unit, "octal": octal })
        }
        Form::Number { min, max, unit } => json!({ "type": "number", "min": min, "max": max, "unit": unit }),
        Form::Choice(words) => {
            let words: Vec<Value> = words.iter().map(|it| json!({ "value": it.word, "about": it.about })).collect();
            json!({ "type": "choice", "choices": words })
        }
        Form::Other(what) => json!({ "type": "other", "meaning": what }),
        Form::List(item) => json!({ "type": "list", "items": self::form(item) }),
        Form::Lists(item) => json!({ "type": "list of lists", "items": self::form(item) }),
    }
}
