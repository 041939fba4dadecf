//! Reference of the configuration, from the descriptions that the readers use.
//!
//! A [`Reference`] lists the tables of one or several programs. [`text`] shows them to people, [`markdown`] makes a
//! page of a guide, and [`Reference::to_json`] serves programs.

mod json;
pub mod markdown;
pub mod text;

use std::fmt;

use wirepath_settings::{ConfigTable, Form, KeySpec, Written, nearest};

/// Tables of programs, each listed once.
#[derive(Debug)]
pub struct Reference {
    /// The tables, in the order of the programs.
    pub tables: Vec<Listed>,
    programs: usize,
}

/// A table of a [`Reference`].
#[derive(Clone, Debug)]
pub struct Listed {
    /// Full name, such as `port.af_xdp`.
    pub path: String,
    /// Other full names of the same table.
    pub also: Vec<String>,
    /// Names of the programs that have the table.
    pub programs: Vec<&'static str>,
    /// The description.
    pub table: &'static ConfigTable,
}

/// Part of a [`Reference`]: a table with all keys or with one.
#[derive(Clone, Copy)]
pub struct Selected<'r> {
    /// The table.
    pub listed: &'r Listed,
    /// The key; `None`: all keys.
    pub key: Option<&'static dyn KeySpec>,
}

impl Reference {
    /// Lists the tables of programs, which [`ConfigTable::tables`] of each description returns.
    pub fn new(programs: &[(&'static str, &'static ConfigTable)]) -> Self {
        let mut tables: Vec<Listed> = Vec::new();
        for (program, top) in programs {
            if !top.keys.is_empty() {
                tables.push(Listed { path: String::new(), also: Vec::new(), programs: vec![*program], table: top });
            }
            for (path, table) in top.all_tables() {
                let Some(at) = tables.iter().position(|listed| std::ptr::eq(listed.table, table)) else {
                    tables.push(Listed { path, also: Vec::new(), programs: vec![*program], table });
                    continue;
                };
                if tables[at].add(path, program) {
                    // The usual name decides the place in the order.
                    let listed = tables.remove(at);
                    tables.push(listed);
                }
            }
        }
        Self { tables, programs: programs.len() }
    }

    /// Finds tables and keys by a name: a table (`workers`, `port.af_xdp`, `af_xdp`), a key of a table
    /// (`port.mtu`), or a key of any table (`mtu`). Indexes, as error messages have them, are left out of account.
    ///
    /// # Errors
    /// If there is no such name. The message suggests the nearest one.
    pub fn find(&self, name: &str) -> Result<Vec<Selected<'_>>, String> {
        let name = without_indexes(name);
        let mut found: Vec<Selected<'_>> = Vec::new();
        for listed in &self.tables {
            let paths = || listed.paths();
            if paths().any(|path| path == name) || listed.table.name == name {
                found.push(Selected { listed, key: None });
            }
            for key in listed.table.keys {
                let is_full =
                    |path: &str| name.strip_prefix(path).and_then(|n| n.strip_prefix('.')) == Some(key.name());
                let short = name.strip_prefix(listed.table.name).and_then(|rest| rest.strip_prefix('.'));
                if key.name() == name || short == Some(key.name()) || paths().any(is_full) {
                    found.push(Selected { listed, key: Some(*key) });
                }
            }
        }
        if found.is_empty() { Err(self.unknown(&name)) } else { Ok(found) }
    }

    fn unknown(&self, name: &str) -> String {
        let mut names: Vec<String> = Vec::new();
        for listed in &self.tables {
            let keys = listed.table.keys.iter().map(|key| key.name());
            names.extend([listed.path.clone(), listed.table.name.to_owned()]);
            names.extend(keys.flat_map(|key| [key.to_owned(), format!("{}.{key}", listed.path)]));
            names.retain(|name| !name.is_empty() && !name.starts_with('.'));
        }
        let known: Vec<&str> = names.iter().map(String::as_str).collect();
        // The table of a name with a dot may be right, and its key misspelt.
        let near = nearest(name, &known);
        let hint = near.map_or_else(String::new, |near| format!("; did you mean \"{near}\"?"));
        format!("no table or key is called \"{}\"{hint}", name.chars().take(60).collect::<String>())
    }

    /// True if all programs have the table.
    fn is_common(&self, listed: &Listed) -> bool {
        listed.programs.len() == self.programs
    }

    /// The tables directly inside a table.
    fn inside<'r>(&'r self, outer: &'r Listed) -> impl Iterator<Item = &'r Listed> {
        let inner = (outer.table.tables)();
        inner.into_iter().filter_map(|table| self.tables.iter().find(|listed| std::ptr::eq(listed.table, table)))
    }
}

/// Removes the indexes from the name of a key: `port[0].mtu` is `port.mtu`.
fn without_indexes(name: &str) -> String {
    let mut inside = false;
    let mut kept = String::new();
    for c in name.trim().chars() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            c if !inside || !c.is_ascii_digit() => kept.push(c),
            _ => {}
        }
    }
    kept
}

impl Listed {
    /// Adds another name or another program. Returns true if that name is the usual one from now on.
    fn add(&mut self, path: String, program: &'static str) -> bool {
        if !self.programs.contains(&program) {
            self.programs.push(program);
        }
        if path == self.path || self.also.contains(&path) {
            return false;
        }
        let depth = |path: &str| path.matches('.').count();
        // The name with the fewest parts is the usual one.
        let is_usual = depth(&path) < depth(&self.path);
        self.also.push(if is_usual { std::mem::replace(&mut self.path, path) } else { path });
        is_usual
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.path.as_str()).chain(self.also.iter().map(String::as_str))
    }

    /// The heading of the table as a configuration has it; a text for the keys outside of tables.
    pub fn heading(&self) -> String {
        match self.table.written {
            Written::Once if self.path.is_empty() => "Keys before the first table".to_owned(),
            Written::Once => format!("[{}]", self.path),
            Written::Repeated => format!("[[{}]]", self.path),
            Written::InlineList => format!("{} = [{{ ... }}, ...]", self.path),
        }
    }
}

/// Describes the values of a key.
pub fn describe(form: &Form) -> String {
    let with_unit = |text: String, unit: &str| if unit.is_empty() { text } else { format!("{text}, in {unit}") };
    match form {
        Form::Flag => "true or false".to_owned(),
        Form::Text(what) => format!("string: {what}"),
        Form::Integer { min, max, octal: true, .. } => format!("integer from 0o{min:o} to 0o{max:o}"),
        Form::Integer { min, max: i64::MAX, unit, .. } => with_unit(format!("integer from {min} on"), unit),
        Form::Integer { min, max, unit, .. } => with_unit(format!("integer from {min} to {max}"), unit),
        Form::Number { min, max, unit } => with_unit(format!("number from {min} to {max}"), unit),
        Form::Choice(words) => {
            let words: Vec<String> = words.iter().map(|word| format!("\"{}\"", word.word)).collect();
            match words.split_last() {
                Some((last, [])) => last.clone(),
                Some((last, first)) => format!("{} or {last}", first.join(", ")),
                None => String::new(),
            }
        }
        Form::Other(what) => (*what).to_owned(),
        Form::List(item) => format!("list, or one value: {}", describe(item)),
        Form::Lists(item) => format!("list of lists: {}", describe(item)),
    }
}

/// Meaning of a missing key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The key must be there.
    Required,
    /// The same as this TOML value.
    Default(String),
    /// As the text says.
    Means(&'static str),
}

impl Missing {
    /// Returns the meaning of a missing key.
    pub fn of(key: &dyn KeySpec) -> Self {
        match key.default() {
            _ if key.is_required() => Self::Required,
            Some(default) => Self::Default(default),
            None => Self::Means(key.absent()),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Required => f.write_str("required"),
            Self::Default(value) => write!(f, "default: {value}"),
            Self::Means(meaning) => write!(f, "if left out: {meaning}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use wirepath_settings::{Integer, Key, WithDefault};

    use super::*;

    const SIZE: Key<WithDefault<Integer<u8>>> = Key::integer("size", 1..=9).unit("bytes").default(3).about("Size.");
    static INNER: ConfigTable = ConfigTable { name: "inner", keys: &[&SIZE], ..ConfigTable::EMPTY };
    static OUTER: ConfigTable =
        ConfigTable { name: "outer", keys: &[&SIZE], tables: || vec![&INNER], ..ConfigTable::EMPTY };
    static TOP: ConfigTable = ConfigTable { tables: || vec![&OUTER, &INNER], ..ConfigTable::EMPTY };

    fn found(name: &str) -> Result<Vec<String>, String> {
        let reference = Reference::new(&[("program", &TOP)]);
        let found = reference.find(name)?;
        Ok(found
            .iter()
            .map(|it| match it.key {
                Some(key) => format!("{}.{}", it.listed.path, key.name()),
                None => it.listed.path.clone(),
            })
            .collect())
    }

    #[test]
    fn names_of_tables_and_keys_are_found() {
        assert_eq!(found("outer").unwrap(), ["outer"]);
        assert_eq!(found("outer.inner").unwrap(), ["inner"]);
        assert_eq!(found("size").unwrap(), ["outer.size", "inner.size"]);
        assert_eq!(found("outer[3].size").unwrap(), ["outer.size"]);
        assert_eq!(found("outer.inner.size").unwrap(), ["inner.size"]);
        assert_eq!(found("siez").unwrap_err(), "no table or key is called \"siez\"; did you mean \"size\"?");
        assert_eq!(
            found("outer.siez").unwrap_err(),
            "no table or key is called \"outer.siez\"; did you mean \"outer.size\"?"
        );
        assert_eq!(found("xyz").unwrap_err(), "no table or key is called \"xyz\"");
    }

    #[test]
    fn values_and_defaults_are_described() {
        assert_eq!(describe(&KeySpec::form(&SIZE)), "integer from 1 to 9, in bytes");
        assert_eq!(Missing::of(&SIZE).to_string(), "default: 3");
    }
}
