//! Configuration files: TOML, read key by key, with errors that name file, line, key, what was found and what would be right.
//!
//! A reader asks a [`Settings`] table for the keys it knows and ends with [`Settings::finish`], which refuses the others and names
//! the nearest known key. Nothing is started before the whole file has been read.

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// What is wrong with a configuration, and where.
#[derive(Debug)]
pub struct ConfigError {
    /// File name as given, or a word for text that came from elsewhere.
    pub file: String,
    /// Line and column, from 1; `None` if the file could not be read at all.
    pub position: Option<(usize, usize)>,
    /// Full key, such as `port[1].mtu`; empty for errors of syntax.
    pub key: String,
    /// What was found and what would be right.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", OneLine(&self.file))?;
        if let Some((line, column)) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", OneLine(&self.key))?;
        }
        write!(f, ": {}", OneLine(&self.message))
    }
}

/// Text that quotes a file: control characters, which could break the line or steer a terminal, are shown as escapes.
struct OneLine<'t>(&'t str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { fmt::Write::write_char(f, c)? }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// Bytes of the longest configuration.
const MAX_TEXT: usize = 16 << 20;

/// The text of a configuration and its name. Cheap to clone.
#[derive(Clone)]
pub struct Source {
    file: Arc<str>,
    text: Arc<str>,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("file", &self.file).finish_non_exhaustive()
    }
}

/// A parsed [`Source`].
#[derive(Debug)]
pub struct Document<'s> {
    source: &'s Source,
    root: Spanned<DeTable<'s>>,
}

/// One table of a document, being read.
#[derive(Debug)]
pub struct Settings<'d> {
    source: &'d Source,
    table: &'d DeTable<'d>,
    span: Range<usize>,
    path: String,
    asked: RefCell<Vec<&'static str>>,
}

type Result<T> = std::result::Result<T, ConfigError>;

impl Source {
    /// Text that came from elsewhere than a file.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { file: name.into().into(), text: text.into().into() }
    }

    /// Reads a file of at most 16 MiB.
    pub fn load(path: &Path) -> Result<Self> {
        let file = path.display().to_string();
        let refuse = |message: String| ConfigError { file: file.clone(), position: None, key: String::new(), message };
        // Not by its length: a pipe and a device have none.
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_TEXT as u64 + 1).read_to_end(&mut text))
            .map_err(|e| refuse(format!("cannot read this configuration: {e}")))?;
        if text.len() > MAX_TEXT {
            return Err(refuse("a configuration has at most 16 MiB, this one has more".to_owned()));
        }
        let text = String::from_utf8(text).map_err(|e| refuse(format!("cannot read this configuration: {e}")))?;
        Ok(Self::new(file, text))
    }

    /// Checks the syntax.
    pub fn parse(&self) -> Result<Document<'_>> {
        // The parser recurses; what people write nests a few levels deep.
        let root = DeTable::parse(&self.text).map_err(|e| ConfigError {
            file: self.file.to_string(),
            position: e.span().map(|span| self.position(span.start)),
            key: String::new(),
            message: e.message().trim().replace('\n', ", "),
        })?;
        Ok(Document { source: self, root })
    }

    /// Name of the file, or the word given for text from elsewhere.
    pub fn name(&self) -> &str {
        &self.file
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The place of a byte, for errors in texts that are not TOML; `key` as in [`ConfigError::key`].
    pub fn place(&self, offset: usize, key: impl Into<String>) -> Place {
        Place { source: self.clone(), offset, key: key.into() }
    }

    fn position(&self, offset: usize) -> (usize, usize) {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        let line = before.iter().filter(|&&b| b == b'\n').count() + 1;
        (line, String::from_utf8_lossy(&before[line_start..]).chars().count() + 1)
    }
}

impl<'s> Document<'s> {
    /// The top table.
    pub fn settings(&self) -> Settings<'_> {
        Settings {
            source: self.source,
            table: self.root.get_ref(),
            span: self.root.span(),
            path: String::new(),
            asked: RefCell::default(),
        }
    }
}

/// A value that a key can have.
pub trait FromValue: Sized {
    /// What would be right, for the error.
    const EXPECTED: &'static str;
    /// `None` if the value is of another kind.
    fn from_value(value: &DeValue<'_>) -> Option<Self>;
}

impl FromValue for bool {
    const EXPECTED: &'static str = "true or false";
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        value.as_bool()
    }
}

impl FromValue for String {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }
}

impl FromValue for i64 {
    const EXPECTED: &'static str = "an integer";
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        match value {
            DeValue::Integer(i) => Self::from_str_radix(i.as_str(), i.radix()).ok(),
            _ => None,
        }
    }
}

impl FromValue for f64 {
    const EXPECTED: &'static str = "a number";
    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        match value {
            DeValue::Float(x) => x.as_str().parse().ok(),
            other => i64::from_value(other).map(|i| i as Self),
        }
    }
}

/// A value with the place where it stands, for checks that need the whole configuration.
#[derive(Clone, Debug)]
pub struct Placed<T> {
    /// The value.
    pub value: T,
    place: Place,
}

/// A place in a configuration, for later errors.
#[derive(Clone, Debug)]
pub struct Place {
    source: Source,
    /// In bytes. Line and column are counted when there is an error: a long list has many places.
    offset: usize,
    key: String,
}

impl Place {
    /// An error at this place.
    pub fn error(&self, message: impl Into<String>) -> ConfigError {
        ConfigError {
            file: self.source.file.to_string(),
            position: Some(self.source.position(self.offset)),
            key: self.key.clone(),
            message: message.into(),
        }
    }
}

impl Place {
    /// Name of the file, as in [`ConfigError::file`].
    pub fn file(&self) -> &str {
        &self.source.file
    }

    /// Line and column, from 1.
    pub fn position(&self) -> (usize, usize) {
        self.source.position(self.offset)
    }
}

impl<T> Placed<T> {
    /// An error at the value's place.
    pub fn error(&self, message: impl Into<String>) -> ConfigError {
        self.place.error(message)
    }
}

impl<'d> Settings<'d> {
    fn value(&self, key: &'static str) -> Option<&'d Spanned<DeValue<'d>>> {
        self.asked.borrow_mut().push(key);
        self.table.iter().find(|(name, _)| name.get_ref().as_ref() == key).map(|(_, value)| value)
    }

    fn full_key(&self, key: &str) -> String {
        match (self.path.as_str(), key) {
            ("", key) => key.to_owned(),
            (path, "") => path.to_owned(),
            (path, key) => format!("{path}.{key}"),
        }
    }

    fn error_at(&self, span: &Range<usize>, key: &str, message: String) -> ConfigError {
        ConfigError {
            file: self.source.file.to_string(),
            position: Some(self.source.position(span.start)),
            key: self.full_key(key),
            message,
        }
    }

    /// An error about the table as a whole.
    pub fn error(&self, message: impl Into<String>) -> ConfigError {
        self.error_at(&self.span, "", message.into())
    }

    /// An error about the value of a key (or about the table, where the key is missing).
    pub fn error_in(&self, key: &'static str, message: impl Into<String>) -> ConfigError {
        let span = self.value(key).map_or(self.span.clone(), Spanned::span);
        self.error_at(&span, key, message.into())
    }

    /// Where a key's value (or, if it is missing, the table) stands.
    pub fn place(&self, key: &'static str) -> Place {
        let span = self.value(key).map_or(self.span.clone(), Spanned::span);
        self.place_at(span.start, key)
    }

    /// Where byte `offset` of a key's string stands, if the string is written without escapes before it; else where the string does.
    pub fn place_within(&self, key: &'static str, offset: usize) -> Place {
        let span = self.value(key).map_or(self.span.clone(), Spanned::span);
        let raw = self.source.text.get(span.clone()).unwrap_or_default();
        let long = raw.len() >= 6 && (raw.starts_with("\"\"\"") || raw.starts_with("'''"));
        // A long string may begin behind a line break that is no part of it (TOML 1.0, "String").
        let opening: usize = match raw.get(3..) {
            Some(rest) if long && rest.starts_with("\r\n") => 5,
            Some(rest) if long && rest.starts_with('\n') => 4,
            _ if long => 3,
            _ => 1,
        };
        let before = raw.get(opening..opening.saturating_add(offset));
        let plain = before.is_some_and(|before| raw.starts_with('\'') || !before.contains('\\'));
        self.place_at(if plain { span.start + opening + offset } else { span.start }, key)
    }

    fn place_at(&self, offset: usize, key: &str) -> Place {
        Place { source: self.source.clone(), offset, key: self.full_key(key) }
    }

    /// Full name of the table, such as `port[0]`; empty for the top.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether the key is there.
    pub fn has(&self, key: &'static str) -> bool {
        self.value(key).is_some()
    }

    /// The value of a key, if it is there.
    pub fn get<T: FromValue>(&self, key: &'static str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value.get_ref()) {
            Some(read) => Ok(Some(read)),
            None => Err(self.wrong(value, key, T::EXPECTED)),
        }
    }

    fn wrong(&self, value: &Spanned<DeValue<'_>>, key: &str, expected: &str) -> ConfigError {
        let text = self.source.text.get(value.span()).unwrap_or_default();
        let found = excerpt(text).replace('\n', " ");
        self.error_at(&value.span(), key, format!("found {found}, expected {expected}"))
    }

    /// The value of a key that must be there.
    pub fn required<T: FromValue>(&self, key: &'static str) -> Result<T> {
        self.get(key)?.ok_or_else(|| self.missing(key, T::EXPECTED))
    }

    /// An error for a key of this table that was never asked for and looks like `key`, if there is one.
    pub fn misspelt(&self, key: &str) -> Option<ConfigError> {
        let asked = self.asked.borrow();
        let slip = self.table.keys().find(|name| {
            let name = name.get_ref().as_ref();
            !asked.contains(&name) && nearest(name, &[key]).is_some()
        })?;
        Some(self.error_at(&slip.span(), slip.get_ref(), format!("unknown key; did you mean \"{key}\"?")))
    }

    fn missing(&self, key: &str, expected: &str) -> ConfigError {
        if let Some(slip) = self.misspelt(key) {
            return slip;
        }
        self.error_at(&self.span, key, format!("missing, expected {expected}"))
    }

    /// An integer within `range`, if the key is there.
    pub fn integer<T: TryFrom<i64>>(&self, key: &'static str, range: RangeInclusive<i64>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let read = i64::from_value(value.get_ref()).filter(|i| range.contains(i)).and_then(|i| T::try_from(i).ok());
        match read {
            Some(read) => Ok(Some(read)),
            None => Err(self.wrong(value, key, &format!("an integer from {} to {}", range.start(), range.end()))),
        }
    }

    /// A string that parses as `T`, if the key is there; `expected` says what it should look like.
    pub fn parsed<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.get_ref().as_str().and_then(|s| s.parse().ok()) {
            Some(read) => Ok(Some(read)),
            None => Err(self.wrong(value, key, expected)),
        }
    }

    /// [`Self::parsed`] for a key that must be there.
    pub fn required_parsed<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<T> {
        self.parsed(key, expected)?.ok_or_else(|| self.missing(key, expected))
    }

    /// One of several words, if the key is there.
    pub fn choice<T: Clone>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        if let Some((_, choice)) = choices.iter().find(|(word, _)| value.get_ref().as_str() == Some(word)) {
            return Ok(Some(choice.clone()));
        }
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let mut expected = format!("one of \"{}\"", words.join("\", \""));
        if let Some(near) = value.get_ref().as_str().and_then(|found| nearest(found, &words)) {
            expected += &format!(" (did you mean \"{near}\"?)");
        }
        Err(self.wrong(value, key, &expected))
    }

    /// A list of strings that parse as `T`; a single string counts as a list of one. Empty if the key is missing.
    pub fn list<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<Vec<Placed<T>>> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let items: Vec<_> = value.get_ref().as_array().map_or_else(|| vec![value], |array| array.iter().collect());
        items
            .into_iter()
            .enumerate()
            .map(|(i, item)| match item.get_ref().as_str().and_then(|s| s.parse().ok()) {
                Some(value) => Ok(Placed { value, place: self.place_at(item.span().start, &format!("{key}[{i}]")) }),
                None => Err(self.wrong(item, &format!("{key}[{i}]"), expected)),
            })
            .collect()
    }

    /// A list of integers within `range`; a single integer counts as a list of one. Empty if the key is missing.
    pub fn integers<T: TryFrom<i64>>(&self, key: &'static str, range: RangeInclusive<i64>) -> Result<Vec<Placed<T>>> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let items: Vec<_> = value.get_ref().as_array().map_or_else(|| vec![value], |array| array.iter().collect());
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        items
            .into_iter()
            .enumerate()
            .map(|(i, item)| {
                let key = format!("{key}[{i}]");
                let read =
                    i64::from_value(item.get_ref()).filter(|n| range.contains(n)).and_then(|n| T::try_from(n).ok());
                let value = read.ok_or_else(|| self.wrong(item, &key, &expected))?;
                Ok(Placed { value, place: self.place_at(item.span().start, &key) })
            })
            .collect()
    }

    /// A list of lists of strings that parse as `T`. Empty if the key is missing.
    pub fn lists<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<Vec<Vec<Placed<T>>>> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let Some(rows) = value.get_ref().as_array() else { return Err(self.wrong(value, key, expected)) };
        let cell = |key: String, item: &Spanned<DeValue<'_>>| {
            let read = item.get_ref().as_str().and_then(|s| s.parse().ok());
            let value = read.ok_or_else(|| self.wrong(item, &key, expected))?;
            Ok(Placed { value, place: self.place_at(item.span().start, &key) })
        };
        let row = |(i, row): (usize, &Spanned<DeValue<'_>>)| {
            let key = format!("{key}[{i}]");
            let items = row.get_ref().as_array().ok_or_else(|| self.wrong(row, &key, expected))?;
            items.iter().enumerate().map(|(j, item)| cell(format!("{key}[{j}]"), item)).collect()
        };
        rows.iter().enumerate().map(row).collect()
    }

    /// The table under a key, if it is there.
    pub fn table(&self, key: &'static str) -> Result<Option<Settings<'d>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.get_ref() {
            DeValue::Table(table) => Ok(Some(self.nested(table, value.span(), key))),
            _ => Err(self.wrong(value, key, "a table")),
        }
    }

    /// The tables under a key (`[[key]]`, or an array of inline tables). Empty if it is missing.
    pub fn tables(&self, key: &'static str) -> Result<Vec<Settings<'d>>> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.wrong(value, key, &format!("tables, each written as [[{}]]", self.full_key(key))));
        };
        array
            .iter()
            .enumerate()
            .map(|(i, item)| match item.get_ref() {
                DeValue::Table(table) => Ok(self.nested(table, item.span(), &format!("{key}[{i}]"))),
                _ => Err(self.wrong(item, &format!("{key}[{i}]"), "a table")),
            })
            .collect()
    }

    /// An empty table in place of one that is not there: every key takes its default, and errors point at this table.
    pub fn empty(&self, key: &str) -> Settings<'d> {
        static EMPTY: std::sync::LazyLock<DeTable<'static>> = std::sync::LazyLock::new(DeTable::new);
        self.nested(&EMPTY, self.span.clone(), key)
    }

    fn nested(&self, table: &'d DeTable<'d>, span: Range<usize>, key: &str) -> Self {
        Settings { source: self.source, table, span, path: self.full_key(key), asked: RefCell::default() }
    }

    /// Ends the reading of this table: keys that were never asked for are refused, with the nearest known one.
    pub fn finish(self) -> Result<()> {
        self.check_keys()
    }

    /// As [`Self::finish`], for keys that were asked for so far: a slip in a key is the likelier cause of one that is missing.
    pub fn check_keys(&self) -> Result<()> {
        let asked = self.asked.borrow();
        for name in self.table.keys() {
            let key = name.get_ref().as_ref();
            if asked.contains(&key) {
                continue;
            }
            let mut known: Vec<&str> = asked.clone();
            known.sort_unstable();
            known.dedup();
            let message = match nearest(key, &known) {
                Some(near) => format!("unknown key; did you mean \"{near}\"?"),
                None if known.is_empty() => "unknown key; this table has none".to_owned(),
                None => format!("unknown key; known here: {}", known.join(", ")),
            };
            return Err(self.error_at(&name.span(), &excerpt(key), message));
        }
        Ok(())
    }
}

/// The beginning of a text that may be long.
fn excerpt(text: &str) -> String {
    let mut start: String = text.chars().take(60).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}

/// The word most like `found`, if any is near enough to be a slip.
pub fn nearest<'w>(found: &str, words: &[&'w str]) -> Option<&'w str> {
    // The comparison takes time and memory by the product of the lengths.
    if found.len() > 256 {
        return None;
    }
    let distance = |word: &str| strsim::damerau_levenshtein(&found.to_lowercase(), word);
    let near = words.iter().copied().min_by_key(|word| distance(word))?;
    (distance(near) <= 1 + near.len() / 4).then_some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str, read: impl FnOnce(&Settings<'_>) -> Result<()>) -> String {
        let source = Source::new("c.toml", text);
        let document = source.parse().unwrap();
        let settings = document.settings();
        read(&settings).and_then(|()| settings.finish()).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_file_line_key_and_remedy() {
        let text = "[[port]]\nmtu = 70000\n";
        let message = error(text, |s| {
            let port = s.tables("port")?.remove(0);
            port.integer::<u16>("mtu", 68..=9216).map(drop)
        });
        assert_eq!(message, "c.toml:2:7: port[0].mtu: found 70000, expected an integer from 68 to 9216");
    }

    #[test]
    fn a_place_within_a_string() {
        let place = |text: &str, offset| {
            let source = Source::new("c.toml", text);
            let document = source.parse().unwrap();
            document.settings().place_within("a", offset).position()
        };
        assert_eq!(place("a = \"one two\"", 4), (1, 10));
        assert_eq!(place("a = 'one two'", 4), (1, 10));
        assert_eq!(place("a = '''\none\ntwo'''", 4), (3, 1));
        assert_eq!(place("a = \"\"\"one two\"\"\"", 4), (1, 12));
        assert_eq!(place("a = \"\\tone two\"", 5), (1, 5), "escaped: the string");
        assert_eq!(place("a = \"one\"", 99), (1, 5), "beyond: the string");
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        let message = error("devise = 'eth0'\n", |s| s.get::<String>("device").map(drop));
        assert_eq!(message, "c.toml:1:1: devise: unknown key; did you mean \"device\"?");
        let message = error("x = 1\n", |s| s.get::<String>("device").map(drop));
        assert_eq!(message, "c.toml:1:1: x: unknown key; known here: device");
    }

    #[test]
    fn values_of_the_wrong_kind_and_missing_ones() {
        assert!(error("a = 'x'\n", |s| s.get::<bool>("a").map(drop)).ends_with("a: found 'x', expected true or false"));
        assert!(error("", |s| s.required::<String>("name").map(drop)).ends_with("name: missing, expected a string"));
        let choices = [("busy", 0), ("adaptive", 1)];
        assert!(error("i = 'adaptiv'", |s| s.choice("i", &choices).map(drop)).contains("did you mean \"adaptive\"?"));
        let message = error("a = ['1', 'x']", |s| s.list::<u8>("a", "a number").map(drop));
        assert_eq!(message, "c.toml:1:11: a[1]: found 'x', expected a number");
    }

    #[test]
    fn lists_of_integers() {
        let source = Source::new("c", "a = [0, 3]\nb = 7\n");
        let document = source.parse().unwrap();
        let read =
            |key| document.settings().integers::<u16>(key, 0..=9).unwrap().iter().map(|p| p.value).collect::<Vec<_>>();
        assert_eq!((read("a"), read("b"), read("c")), (vec![0, 3], vec![7], vec![]));
        let message = error("a = [1, 10]", |s| s.integers::<u16>("a", 0..=9).map(drop));
        assert_eq!(message, "c.toml:1:9: a[1]: found 10, expected an integer from 0 to 9");
    }

    #[test]
    fn what_is_quoted_stays_on_its_line() {
        let message = error("\"a\\n\\u001b[2J\" = 1\n", |s| s.get::<String>("device").map(drop));
        assert_eq!(message, "c.toml:1:1: a\\n\\u{1b}[2J: unknown key; known here: device");
    }

    #[test]
    fn syntax_errors_have_a_line() {
        let error = Source::new("c.toml", "a = 1\nb = = 2\n").parse().unwrap_err();
        assert_eq!(error.position.unwrap().0, 2);
    }

    #[test]
    fn integers_of_any_radix_and_floats() {
        let source = Source::new("c", "a = 0x1F\nb = -3\nc = 1_000\nd = 1.5\n");
        let document = source.parse().unwrap();
        let s = document.settings();
        assert_eq!(s.integer::<u16>("a", 0..=100).unwrap(), Some(31));
        assert_eq!(s.integer::<i8>("b", -5..=5).unwrap(), Some(-3));
        assert_eq!(s.get::<i64>("c").unwrap(), Some(1000));
        assert_eq!((s.get::<f64>("d").unwrap(), s.get::<f64>("b").unwrap()), (Some(1.5), Some(-3.0)));
        s.finish().unwrap();
    }

    #[test]
    fn hostile_texts_end_in_an_error_soon() {
        // In a thread with the default stack, as a library may be called from one.
        std::thread::spawn(|| {
            let deep = |open: &str, close: &str| format!("a = {}1{}", open.repeat(100_000), close.repeat(100_000));
            let nested = "{ a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a = ".repeat(70) + "1" + &"}".repeat(70);
            for text in [
                deep("[", "]"),
                deep("{ a = ", " }"),
                "[".repeat(1 << 20),
                format!("{}a = 1", "a.".repeat(1 << 20)),
                format!("[{}a]", "a.".repeat(1 << 20)),
                format!("a = {nested}"),
                "a = 1\n[a".to_owned(),
                "\u{feff}\0".to_owned(),
            ] {
                if let Ok(document) = Source::new("c", text).parse() {
                    assert!(document.settings().finish().is_err());
                }
            }
        })
        .join()
        .unwrap();
        let message = error(&format!("{} = 1", "k".repeat(1 << 20)), |s| s.get::<bool>("device").map(drop));
        assert!(message.len() < 1000, "{} bytes", message.len());
        let message = error(&format!("i = '{}'", "k".repeat(1 << 20)), |s| s.choice("i", &[("busy", 0)]).map(drop));
        assert!(message.len() < 1000, "{} bytes", message.len());
    }

    #[test]
    fn a_file_without_end_is_refused() {
        let error = Source::load(Path::new("/dev/zero")).unwrap_err();
        assert!(error.message.contains("16 MiB"), "{error}");
    }

    #[test]
    fn long_lists_are_read_in_linear_time() {
        let n = 400_000;
        let items = "1, ".repeat(n);
        for text in [format!("a = [{items}]\n"), format!("a = [{}]\n", items.replace(' ', "\n"))] {
            let source = Source::new("c", text);
            let document = source.parse().unwrap();
            let list = document.settings().integers::<u8>("a", 0..=9).unwrap();
            assert_eq!(list.len(), n);
            list[n - 1].error("last");
        }
    }
}
