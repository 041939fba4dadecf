//! Configuration files in TOML, read key by key.
//!
//! Errors name file, line, key, the value found and the values that are valid. A reader asks a [`Settings`]
//! table for the keys that it knows. When it ends, all other keys are refused, with the nearest known key as a
//! suggestion ([`Settings::complete`]). Programs read the whole file before they start anything.
//!
//! A key is described once, as a [`Key`], and a table as a [`ConfigTable`]. [`Settings::read`] takes the description.
//! The documentation of a key and its reader can therefore not differ. An application describes its own table in the
//! same way:
//!
//! ```
//! use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Integer, Key, Settings, Source, WithDefault};
//!
//! #[derive(Clone, Copy, Debug, PartialEq)]
//! enum Overload {
//!     Drop,
//!     Pass,
//! }
//!
//! const LIMIT: Key<WithDefault<Integer<u32>>> = Key::integer("limit", 1..=1_000_000)
//!     .unit("packets per second")
//!     .default(1000)
//!     .about("Rate of each source address.");
//! const OVERLOAD: Key<WithDefault<Choice<Overload>>> = Key::choice(
//!     "overload",
//!     &[("drop", Overload::Drop, "drops the packet"), ("pass", Overload::Pass, "counts it and lets it pass")],
//! )
//! .default_word("drop")
//! .about("Treatment of packets above the limit.");
//! const LOG: Key<WithDefault<Flag>> = Key::flag("log").default(false).about("Logs the first packet of a source.");
//!
//! static LIMITER: ConfigTable = ConfigTable {
//!     name: "limiter",
//!     about: "Limits the packets of each source.",
//!     keys: &[&LIMIT, &OVERLOAD, &LOG],
//!     example: "[limiter]\nlimit = 50000\n",
//!     ..ConfigTable::EMPTY
//! };
//!
//! fn read(top: &Settings<'_>) -> Result<(u32, Overload, bool), ConfigError> {
//!     top.read_table(&LIMITER, |table| Ok((table.read(&LIMIT)?, table.read(&OVERLOAD)?, table.read(&LOG)?)))
//! }
//!
//! let example = Source::new("example.toml", LIMITER.example);
//! assert_eq!(example.parse()?.read(read)?, (50_000, Overload::Drop, false));
//! let wrong = Source::new("wrong.toml", "[limiter]\nlimit = 0\n");
//! let error = wrong.parse()?.read(read).unwrap_err().to_string();
//! assert_eq!(error, "wrong.toml:2:9: limiter.limit: found 0, expected an integer from 1 to 1000000");
//! assert_eq!(LIMITER.keys[0].default().as_deref(), Some("1000"));
//! # Ok::<(), ConfigError>(())
//! ```
//!
//! One run reports all errors of a file. A wrong value is recorded in the [`Document`] and reads as if the key were
//! missing, so the reader goes on. [`Settings::finish`] fails if anything was recorded for its table, and
//! [`Document::read`] returns all recorded errors as one.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use toml::Spanned;
use toml::de::DeTable;

mod key;

pub use key::{
    Choice, ConfigTable, Flag, Form, Integer, Key, KeyName, KeySpec, Kind, List, Lists, Never, Number, Parsed,
    Required, Scalar, Text, Value, WithDefault, Word, Written,
};
/// Value of a key, for [`FromValue`].
pub use toml::de::DeValue;

/// Error in a configuration, with its position. It may carry further errors of the same configuration.
#[derive(Clone, Debug)]
pub struct ConfigError {
    /// File name as given, or the name of a text from elsewhere.
    pub file: String,
    /// Line and column, from 1; `None` if the file cannot be read at all.
    pub position: Option<(usize, usize)>,
    /// Full key, such as `port[1].mtu`; empty for syntax errors.
    pub key: String,
    /// Description: the value found, and the values that are valid.
    pub message: String,
    /// True if the document has recorded the error.
    recorded: bool,
    /// The errors after this one.
    rest: Option<Box<Rest>>,
}

/// Errors after the first one.
#[derive(Clone, Debug)]
struct Rest {
    errors: Vec<ConfigError>,
    omitted: usize,
}

/// Maximum number of errors that a document records. The others are counted.
const MAX_ERRORS: usize = 20;

impl ConfigError {
    fn new(file: &str, position: Option<(usize, usize)>, key: String, message: String) -> Self {
        Self { file: file.to_owned(), position, key, message, recorded: false, rest: None }
    }

    /// Replaces the description.
    #[must_use]
    pub fn with_message(self, message: impl Into<String>) -> Self {
        Self { message: message.into(), ..self }
    }

    /// Combines errors of one configuration into one error, in the order of their positions.
    pub fn combined(errors: Vec<Self>) -> Option<Self> {
        Self::combine(errors, 0)
    }

    fn combine(mut errors: Vec<Self>, omitted: usize) -> Option<Self> {
        errors.sort_by_key(|error| error.position);
        let omitted = omitted + errors.len().saturating_sub(MAX_ERRORS);
        errors.truncate(MAX_ERRORS);
        let mut errors = errors.into_iter();
        let first = errors.next()?;
        let errors: Vec<Self> = errors.collect();
        let rest = (!errors.is_empty() || omitted > 0).then(|| Box::new(Rest { errors, omitted }));
        Some(Self { rest, ..first })
    }

    /// Splits the error into single errors and the number of errors that were only counted.
    pub fn split(mut self) -> (Vec<Self>, usize) {
        let rest = self.rest.take();
        let (errors, omitted) = rest.map_or((Vec::new(), 0), |rest| (rest.errors, rest.omitted));
        (std::iter::once(self).chain(errors).collect(), omitted)
    }

    /// True if this error follows from `other`: the same key or the list of which `other` is an element.
    fn follows_from(&self, other: &Self) -> bool {
        if self.file != other.file || self.key.is_empty() {
            // A text that is not TOML has no keys.
            return self.file == other.file && self.key == other.key && self.position == other.position;
        }
        other.key.strip_prefix(&self.key).is_some_and(|rest| rest.is_empty() || rest.starts_with('['))
    }
}

/// Errors of a document.
#[derive(Debug, Default)]
struct Errors {
    recorded: RefCell<Vec<ConfigError>>,
    omitted: Cell<usize>,
}

impl Errors {
    /// Records an error and returns it. If it follows from a recorded one, that one is returned.
    fn record(&self, mut error: ConfigError) -> ConfigError {
        if error.recorded {
            return error;
        }
        if error.rest.is_some() {
            let (errors, omitted) = error.clone().split();
            self.omitted.set(self.omitted.get() + omitted);
            for single in errors {
                self.record(single);
            }
            error.recorded = true;
            return error;
        }
        if let Some(cause) = self.cause(&error) {
            return cause;
        }
        error.recorded = true;
        let mut recorded = self.recorded.borrow_mut();
        if recorded.len() < MAX_ERRORS {
            recorded.push(error.clone());
        } else {
            self.omitted.set(self.omitted.get() + 1);
        }
        error
    }

    /// Returns the recorded error from which this one follows.
    fn cause(&self, error: &ConfigError) -> Option<ConfigError> {
        self.recorded.borrow().iter().find(|other| error.follows_from(other)).cloned()
    }

    /// Takes all errors as one, which another document may record. `error` is the answer if there is none.
    fn take(&self, error: ConfigError) -> ConfigError {
        let mut errors = self.recorded.take();
        for error in &mut errors {
            error.recorded = false;
        }
        ConfigError::combine(errors, self.omitted.take()).unwrap_or(error)
    }

    /// Returns the errors of the table `path` as one; for the top-level table, all errors.
    fn of(&self, path: &str) -> Option<ConfigError> {
        let below = |error: &&ConfigError| {
            let rest = error.key.strip_prefix(path);
            path.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let recorded = self.recorded.borrow();
        let errors: Vec<ConfigError> = recorded.iter().filter(below).cloned().collect();
        // Errors that were only counted may belong to the table.
        let errors = if errors.is_empty() && self.omitted.get() > 0 { recorded.clone() } else { errors };
        ConfigError::combine(errors, if path.is_empty() { self.omitted.get() } else { 0 })
    }
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
        write!(f, ": {}", OneLine(&self.message))?;
        let Some(rest) = &self.rest else { return Ok(()) };
        for error in &rest.errors {
            write!(f, "\n{error}")?;
        }
        if rest.omitted > 0 {
            write!(f, "\nand {} more errors", rest.omitted)?;
        }
        Ok(())
    }
}

/// Quotation of a text on one line. Control characters could end the line or control a terminal, so they are
/// shown as escapes.
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

/// Largest size of a configuration in bytes.
const MAX_TEXT: usize = 16 << 20;

/// Text of a configuration and its name. Cheap to clone.
#[derive(Clone)]
pub struct Source {
    file: Arc<str>,
    text: Arc<str>,
    /// Line and column before each [`CHECKPOINT`]th byte, from 0. A file with many errors needs many positions.
    checkpoints: Arc<OnceLock<Vec<(usize, usize)>>>,
}

/// Bytes between two entries of [`Source::checkpoints`].
const CHECKPOINT: usize = 1024;

/// Counts lines and columns over `bytes`, from this line and column on.
fn count(bytes: &[u8], from: (usize, usize)) -> (usize, usize) {
    bytes.iter().fold(from, |(line, column), byte| match byte {
        b'\n' => (line + 1, 0),
        // A continuation byte of UTF-8 begins no character.
        0x80..0xc0 => (line, column),
        _ => (line, column + 1),
    })
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Parsed [`Source`].
#[derive(Debug)]
pub struct Document<'s> {
    source: &'s Source,
    root: Spanned<DeTable<'s>>,
    errors: Rc<Errors>,
}

/// Table of a document that is being read.
#[derive(Debug)]
pub struct Settings<'d> {
    source: &'d Source,
    errors: Rc<Errors>,
    table: &'d DeTable<'d>,
    span: Range<usize>,
    path: String,
    /// Description of the table, if it has one.
    spec: Option<&'static ConfigTable>,
    requested: RefCell<Vec<&'static str>>,
}

type Result<T> = std::result::Result<T, ConfigError>;

impl Source {
    /// A text that does not come from a file.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { file: name.into().into(), text: text.into().into(), checkpoints: Arc::default() }
    }

    /// Reads a file of at most 16 MiB. A pipe is read until its writers close it.
    pub fn load(path: &Path) -> Result<Self> {
        Self::load_from(path, File::open(path))
    }

    /// Reads a regular file of at most 16 MiB. A pipe or a device, which could have the caller wait, is an error.
    pub fn load_regular(path: &Path) -> Result<Self> {
        // O_NONBLOCK: opening a pipe does not wait for a writer (open(2)). It has no effect on regular files.
        const O_NONBLOCK: i32 = 0o4000;
        let open = || {
            let file = File::options().read(true).custom_flags(O_NONBLOCK).open(path)?;
            match file.metadata()?.is_file() {
                true => Ok(file),
                false => Err(std::io::Error::other("expected a regular file")),
            }
        };
        Self::load_from(path, open())
    }

    fn load_from(path: &Path, file: std::io::Result<File>) -> Result<Self> {
        let name = path.display().to_string();
        let refuse = |message: String| ConfigError::new(&name, None, String::new(), message);
        // The length of the file is not asked for, since a pipe and a device have none.
        let mut text = Vec::new();
        file.and_then(|file| file.take(MAX_TEXT as u64 + 1).read_to_end(&mut text))
            .map_err(|e| refuse(format!("cannot read this configuration: {e}")))?;
        if text.len() > MAX_TEXT {
            return Err(refuse("a configuration may have at most 16 MiB, and this one is larger".to_owned()));
        }
        let text = String::from_utf8(text).map_err(|e| refuse(format!("cannot read this configuration: {e}")))?;
        Ok(Self::new(name, text))
    }

    /// Parses the text as TOML.
    pub fn parse(&self) -> Result<Document<'_>> {
        // The parser is recursive, and limits the depth itself. Real configurations nest a few levels deep.
        let root = DeTable::parse(&self.text).map_err(|e| {
            let position = e.span().map(|span| self.position(span.start));
            ConfigError::new(&self.file, position, String::new(), e.message().trim().replace('\n', ", "))
        })?;
        Ok(Document { source: self, root, errors: Rc::default() })
    }

    /// Name of the file, or the name given for a text from elsewhere.
    pub fn name(&self) -> &str {
        &self.file
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Position of a byte, for errors in texts that are not TOML; `key` as in [`ConfigError::key`].
    pub fn span(&self, offset: usize, key: impl Into<String>) -> Span {
        Span { source: self.clone(), offset, key: key.into() }
    }

    /// Line with this number, from 1, without its line end.
    pub fn line(&self, number: usize) -> Option<&str> {
        let index = number.checked_sub(1)?;
        // The last checkpoint at or before the start of the line.
        let chunk = self.checkpoints().partition_point(|at| *at <= (index, 0)).checked_sub(1)?;
        let (mut line, mut start) = (self.checkpoints()[chunk].0, chunk * CHECKPOINT);
        while line < index {
            start += self.text.as_bytes()[start..].iter().position(|byte| *byte == b'\n')? + 1;
            line += 1;
        }
        self.text[start..].lines().next()
    }

    fn checkpoints(&self) -> &[(usize, usize)] {
        self.checkpoints.get_or_init(|| {
            let chunks = self.text.as_bytes().chunks(CHECKPOINT);
            chunks.scan((0, 0), |at, chunk| Some(std::mem::replace(at, count(chunk, *at)))).collect()
        })
    }

    fn position(&self, offset: usize) -> (usize, usize) {
        let bytes = &self.text.as_bytes()[..offset.min(self.text.len())];
        let chunk = (bytes.len() / CHECKPOINT).min(self.checkpoints().len().saturating_sub(1));
        let from = self.checkpoints().get(chunk).copied().unwrap_or_default();
        let (line, column) = count(&bytes[chunk * CHECKPOINT..], from);
        (line + 1, column + 1)
    }
}

impl<'s> Document<'s> {
    /// The top-level table.
    pub fn settings(&self) -> Settings<'_> {
        Settings {
            source: self.source,
            errors: Rc::clone(&self.errors),
            table: self.root.get_ref(),
            span: self.root.span(),
            path: String::new(),
            spec: None,
            requested: RefCell::default(),
        }
    }

    /// Reads the top-level table with `read`. An error carries all errors of the document.
    pub fn read<T>(&self, read: impl FnOnce(&Settings<'_>) -> Result<T>) -> Result<T> {
        self.settings().complete(read).map_err(|error| self.errors.take(error))
    }

    /// Does the same as [`Self::read`] for a program whose tables `spec` lists. `read` asks for all of them and for no
    /// others.
    pub fn read_as<T>(&self, spec: &'static ConfigTable, read: impl FnOnce(&Settings<'_>) -> Result<T>) -> Result<T> {
        self.settings().described(spec).complete(read).map_err(|error| self.errors.take(error))
    }
}

/// Type of a value that a key can have.
pub trait FromValue: Sized {
    /// Description of valid values, for errors.
    const EXPECTED: &'static str;
    /// Converts a value; `None` if it has another type.
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

/// Value with its position, for checks that need the whole configuration.
#[derive(Clone, Debug)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    span: Span,
}

/// Position in a configuration, for later errors.
#[derive(Clone, Debug)]
pub struct Span {
    source: Source,
    /// Offset in bytes. Line and column are computed for an error only, since a long list has many positions.
    offset: usize,
    key: String,
}

impl fmt::Display for Span {
    /// Writes file, line, column and key, as errors do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column) = self.position();
        write!(f, "{}:{line}:{column}", OneLine(&self.source.file))?;
        if self.key.is_empty() { Ok(()) } else { write!(f, ": {}", OneLine(&self.key)) }
    }
}

impl Span {
    /// Creates an error at this position.
    pub fn error(&self, message: impl Into<String>) -> ConfigError {
        ConfigError::new(&self.source.file, Some(self.source.position(self.offset)), self.key.clone(), message.into())
    }

    /// Name of the file, as in [`ConfigError::file`].
    pub fn file(&self) -> &str {
        &self.source.file
    }

    /// Line and column, from 1.
    pub fn position(&self) -> (usize, usize) {
        self.source.position(self.offset)
    }
}

impl<T> Located<T> {
    /// Position of the value.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Creates an error at the position of the value.
    pub fn error(&self, message: impl Into<String>) -> ConfigError {
        self.span.error(message)
    }
}

impl<'d> Settings<'d> {
    fn value(&self, key: &'static str) -> Option<&'d Spanned<DeValue<'d>>> {
        debug_assert!(
            self.spec.is_none_or(|spec| spec.has(key)),
            "the description of the table [{}] has no key \"{key}\"",
            self.path
        );
        self.requested.borrow_mut().push(key);
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
        ConfigError::new(&self.source.file, Some(self.source.position(span.start)), self.full_key(key), message)
    }

    /// Creates an error about the whole table.
    pub fn error(&self, message: impl Into<String>) -> ConfigError {
        self.error_at(&self.span, "", message.into())
    }

    /// Creates an error about the value of a key, or about the table if the key is missing. If an error of that key is
    /// recorded, that one is returned, because the key reads as missing then.
    pub fn error_in(&self, key: impl KeyName, message: impl Into<String>) -> ConfigError {
        let key = key.key_name();
        let span = self.value(key).map_or(self.span.clone(), Spanned::span);
        let error = self.error_at(&span, key, message.into());
        self.errors.cause(&error).unwrap_or(error)
    }

    /// True if an error of the key or of an element of its list is recorded.
    pub fn has_error(&self, key: impl KeyName) -> bool {
        self.errors.cause(&self.error_at(&self.span, key.key_name(), String::new())).is_some()
    }

    /// Position of a key's value, or of the table if the key is missing.
    pub fn span(&self, key: impl KeyName) -> Span {
        let key = key.key_name();
        let span = self.value(key).map_or(self.span.clone(), Spanned::span);
        self.span_at(span.start, key)
    }

    /// Position of byte `offset` of a key's string.
    ///
    /// If an escape precedes that byte in the file, it is the position of the string.
    pub fn span_within(&self, key: impl KeyName, offset: usize) -> Span {
        let key = key.key_name();
        let span = self.value(key).map_or(self.span.clone(), Spanned::span);
        let raw = self.source.text.get(span.clone()).unwrap_or_default();
        let long = raw.len() >= 6 && (raw.starts_with("\"\"\"") || raw.starts_with("'''"));
        // A multi-line string may begin with a line break that is not part of its value (TOML 1.0, "String").
        let opening: usize = match raw.get(3..) {
            Some(rest) if long && rest.starts_with("\r\n") => 5,
            Some(rest) if long && rest.starts_with('\n') => 4,
            _ if long => 3,
            _ => 1,
        };
        let before = raw.get(opening..opening.saturating_add(offset));
        let plain = before.is_some_and(|before| raw.starts_with('\'') || !before.contains('\\'));
        self.span_at(if plain { span.start + opening + offset } else { span.start }, key)
    }

    fn span_at(&self, offset: usize, key: &str) -> Span {
        Span { source: self.source.clone(), offset, key: self.full_key(key) }
    }

    /// Full name of the table, such as `port[0]`; empty for the top-level table.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// True if the table has the key.
    pub fn has(&self, key: impl KeyName) -> bool {
        self.value(key.key_name()).is_some()
    }

    /// True if the table has the key with a value of the type `T`. For keys that take values of several types.
    pub fn is<T: FromValue>(&self, key: impl KeyName) -> bool {
        self.value(key.key_name()).is_some_and(|value| T::from_value(value.get_ref()).is_some())
    }

    /// Records an error that does not keep the reader from going on.
    pub fn record(&self, error: ConfigError) {
        self.errors.record(error);
    }

    /// Records the error of a result, so that the reader can go on and return it later.
    pub fn collect<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.errors.record(error))
    }

    /// Value of a key, or `None` if it is missing or wrong.
    pub fn get<T: FromValue>(&self, key: impl KeyName) -> Result<Option<T>> {
        let key = key.key_name();
        let Some(value) = self.value(key) else { return Ok(None) };
        let read = T::from_value(value.get_ref());
        if read.is_none() {
            self.record(self.wrong(value, key, T::EXPECTED));
        }
        Ok(read)
    }

    fn wrong(&self, value: &Spanned<DeValue<'_>>, key: &str, expected: &str) -> ConfigError {
        let text = self.source.text.get(value.span()).unwrap_or_default();
        let found = excerpt(text).replace('\n', " ");
        self.error_at(&value.span(), key, format!("found {found}, expected {expected}"))
    }

    /// Value of a key that is mandatory. The error of a missing or wrong value is recorded.
    ///
    /// A reader should ask for all other keys before it returns the error, so that their errors are found too.
    pub fn required<T: FromValue>(&self, key: &'static str) -> Result<T> {
        self.get(key)?.ok_or_else(|| self.missing(key, T::EXPECTED))
    }

    /// Does the same as [`Self::integer`] for a key that is mandatory.
    pub fn required_integer<T: TryFrom<i64>>(&self, key: &'static str, range: RangeInclusive<i64>) -> Result<T> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.integer(key, range)?.ok_or_else(|| self.missing(key, &expected))
    }

    /// Creates an error for a key of this table that was not requested and resembles `key`, if there is one.
    pub fn misspelt(&self, key: impl KeyName) -> Option<ConfigError> {
        self.misspelt_key(key.key_name())
    }

    fn misspelt_key(&self, key: &str) -> Option<ConfigError> {
        let requested = self.requested.borrow();
        let slip = self.table.keys().find(|name| {
            let name = name.get_ref().as_ref();
            !requested.contains(&name) && !self.is_described(name) && nearest(name, &[key]).is_some()
        })?;
        Some(self.error_at(&slip.span(), &excerpt(slip.get_ref()), format!("unknown key; did you mean \"{key}\"?")))
    }

    fn missing(&self, key: &str, expected: &str) -> ConfigError {
        if let Some((_, value)) = self.table.iter().find(|(name, _)| name.get_ref().as_ref() == key) {
            // The wrong value is recorded already.
            return ConfigError { recorded: true, ..self.wrong(value, key, expected) };
        }
        let missing = || self.error_at(&self.span, key, format!("missing, expected {expected}"));
        self.errors.record(self.misspelt_key(key).unwrap_or_else(missing))
    }

    /// Integer within `range`, or `None` if the key is missing or wrong.
    pub fn integer<T: TryFrom<i64>>(&self, key: &'static str, range: RangeInclusive<i64>) -> Result<Option<T>> {
        Ok(self.value(key).and_then(|value| self.integer_within(key, value, &range)))
    }

    /// String that parses as `T`, or `None` if the key is missing or wrong; `expected` describes valid strings.
    pub fn parsed<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        Ok(self.parsed_item(key, value, expected).map(|item| item.value))
    }

    /// Does the same as [`Self::parsed`] for a key that is mandatory.
    pub fn required_parsed<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<T> {
        self.parsed(key, expected)?.ok_or_else(|| self.missing(key, expected))
    }

    /// One of several words, or `None` if the key is missing or wrong.
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
        self.record(self.wrong(value, key, &expected));
        Ok(None)
    }

    /// Elements of a list with their keys. A single value is a list of one.
    fn elements(&self, key: &'static str) -> impl Iterator<Item = (String, &'d Spanned<DeValue<'d>>)> {
        let values = self.value(key).map_or_else(Vec::new, |value| match value.get_ref().as_array() {
            Some(array) => array.iter().collect(),
            None => vec![value],
        });
        values.into_iter().enumerate().map(move |(i, value)| (format!("{key}[{i}]"), value))
    }

    /// List of strings that parse as `T`, without the wrong ones. A single string is a list of one. Empty if the key
    /// is missing.
    pub fn list<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<Vec<Located<T>>> {
        let read = self.elements(key);
        Ok(read.filter_map(|(key, item)| self.parsed_item(&key, item, expected)).collect())
    }

    fn parsed_item<T: FromStr>(&self, key: &str, item: &Spanned<DeValue<'_>>, expected: &str) -> Option<Located<T>> {
        let value = item.get_ref().as_str().and_then(|s| s.parse().ok());
        if value.is_none() {
            self.record(self.wrong(item, key, expected));
        }
        Some(Located { value: value?, span: self.span_at(item.span().start, key) })
    }

    /// List of integers within `range`, without the wrong ones. A single integer is a list of one. Empty if the key is
    /// missing.
    pub fn integers<T: TryFrom<i64>>(&self, key: &'static str, range: RangeInclusive<i64>) -> Result<Vec<Located<T>>> {
        let read = |(key, item): (String, &Spanned<DeValue<'_>>)| {
            let value = self.integer_within(&key, item, &range)?;
            Some(Located { value, span: self.span_at(item.span().start, &key) })
        };
        Ok(self.elements(key).filter_map(read).collect())
    }

    fn integer_within<T: TryFrom<i64>>(
        &self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        range: &RangeInclusive<i64>,
    ) -> Option<T> {
        let read = i64::from_value(value.get_ref()).filter(|i| range.contains(i)).and_then(|i| T::try_from(i).ok());
        if read.is_none() {
            let expected = format!("an integer from {} to {}", range.start(), range.end());
            self.record(self.wrong(value, key, &expected));
        }
        read
    }

    /// List of lists of strings that parse as `T`, without the wrong ones. Empty if the key is missing.
    pub fn lists<T: FromStr>(&self, key: &'static str, expected: &str) -> Result<Vec<Vec<Located<T>>>> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let Some(rows) = value.get_ref().as_array() else {
            self.record(self.wrong(value, key, expected));
            return Ok(Vec::new());
        };
        let row = |(i, row): (usize, &Spanned<DeValue<'_>>)| {
            let key = format!("{key}[{i}]");
            let Some(items) = row.get_ref().as_array() else {
                self.record(self.wrong(row, &key, expected));
                return None;
            };
            let cell = |(j, item)| self.parsed_item(&format!("{key}[{j}]"), item, expected);
            Some(items.iter().enumerate().filter_map(cell).collect())
        };
        Ok(rows.iter().enumerate().filter_map(row).collect())
    }

    /// Reads each table of a key with `read` and finishes it. The reading goes on after a wrong table.
    pub fn each<T>(&self, key: &'static str, mut read: impl FnMut(&Settings<'d>) -> Result<T>) -> Result<Vec<T>> {
        let (mut all, mut failed) = (Vec::new(), None);
        for table in self.tables(key)? {
            match table.complete(&mut read) {
                Ok(value) => all.push(value),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(all), Err)
    }

    /// Reads this table like [`Self::complete`], but returns all its errors as one and records none in the document.
    pub fn separately<T>(self, read: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let table = Self { errors: Rc::default(), ..self };
        table.complete(read).map_err(|error| table.errors.take(error))
    }

    /// Reads this table with `read` and finishes it, see [`Self::finish`]. If `read` fails, the keys that it did not
    /// ask for are refused only if they resemble one that it asked for.
    pub fn complete<T>(&self, read: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        match read(self) {
            Ok(value) => {
                let value = self.check_keys().map(|()| value)?;
                self.assert_all_requested();
                Ok(value)
            }
            Err(error) => {
                let error = self.errors.record(error);
                self.refuse_keys(true);
                Err(error)
            }
        }
    }

    /// Table of a key, or `None` if the key is missing.
    pub fn table(&self, key: &'static str) -> Result<Option<Settings<'d>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.get_ref() {
            DeValue::Table(table) => Ok(Some(self.nested(table, value.span(), key))),
            _ => Err(self.errors.record(self.wrong(value, key, "a table"))),
        }
    }

    /// Table of a key that is mandatory. The error of a missing table names it, or the key that resembles it, and is
    /// recorded.
    ///
    /// ```
    /// # use wirepath_settings::Source;
    /// let source = Source::new("c.toml", "[limter]\nrate = 7\n");
    /// let document = source.parse()?;
    /// let error = document.settings().required_table("limiter").unwrap_err();
    /// assert_eq!(error.to_string(), "c.toml:1:2: limter: unknown key; did you mean \"limiter\"?");
    /// # Ok::<(), wirepath_settings::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// If the table is missing, or the key is no table.
    pub fn required_table(&self, key: &'static str) -> Result<Settings<'d>> {
        self.table(key)?.ok_or_else(|| self.missing(key, &format!("the table [{}]", self.full_key(key))))
    }

    /// Does the same as [`Self::required_table`] for the table that `spec` describes.
    ///
    /// # Errors
    /// If the table is missing, or the key is no table.
    pub fn required_subtable(&self, spec: &'static ConfigTable) -> Result<Settings<'d>> {
        Ok(self.required_table(spec.name)?.described(spec))
    }

    /// Tables of a key (`[[key]]`, or an array of inline tables). Empty if the key is missing.
    pub fn tables(&self, key: &'static str) -> Result<Vec<Settings<'d>>> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let DeValue::Array(array) = value.get_ref() else {
            let expected = format!("tables, each written as [[{}]]", self.full_key(key));
            return Err(self.errors.record(self.wrong(value, key, &expected)));
        };
        array
            .iter()
            .enumerate()
            .map(|(i, item)| match item.get_ref() {
                DeValue::Table(table) => Ok(self.nested(table, item.span(), &format!("{key}[{i}]"))),
                _ => Err(self.errors.record(self.wrong(item, &format!("{key}[{i}]"), "a table"))),
            })
            .collect()
    }

    /// Empty table in place of a missing one. Every key has its default, and errors point at this table.
    pub fn empty(&self, key: &str) -> Settings<'d> {
        static EMPTY: std::sync::LazyLock<DeTable<'static>> = std::sync::LazyLock::new(DeTable::new);
        self.nested(&EMPTY, self.span.clone(), key)
    }

    fn nested(&self, table: &'d DeTable<'d>, span: Range<usize>, key: &str) -> Self {
        let (source, errors, path) = (self.source, Rc::clone(&self.errors), self.full_key(key));
        Settings { source, errors, table, span, path, spec: None, requested: RefCell::default() }
    }

    /// Value of a key, by its description. See [`Key`] for the type of the result.
    ///
    /// A wrong value is recorded in the document and reads as if the key were missing.
    ///
    /// # Errors
    /// If the key is required and has no valid value. A reader should ask for all other keys before it returns the
    /// error, so that their errors are found too.
    pub fn read<K: Kind>(&self, key: &Key<K>) -> Result<K::Output> {
        debug_assert!(
            self.spec.is_some_and(|spec| spec.key(key.name()).is_some_and(|known| key.is_same(known))),
            "the description of the table [{}] does not have the key \"{}\" as the reader has it",
            self.path,
            key.name()
        );
        key.read(self)
    }

    /// This table with a description, by which a reader can ask for its keys.
    #[must_use]
    pub fn described(self, spec: &'static ConfigTable) -> Self {
        Settings { spec: Some(spec), ..self }
    }

    /// The table that `spec` describes, or `None` if it is missing.
    pub fn subtable(&self, spec: &'static ConfigTable) -> Result<Option<Settings<'d>>> {
        Ok(self.table(spec.name)?.map(|table| table.described(spec)))
    }

    /// The tables that `spec` describes. Empty if there are none.
    pub fn subtables(&self, spec: &'static ConfigTable) -> Result<Vec<Settings<'d>>> {
        let described = |table: Settings<'d>| table.described(spec);
        Ok(self.tables(spec.name)?.into_iter().map(described).collect())
    }

    /// The table that `spec` describes. A missing one is empty: every key has its default, and errors point at this
    /// table.
    pub fn subtable_or_empty(&self, spec: &'static ConfigTable) -> Result<Settings<'d>> {
        let empty = || self.empty(spec.name).described(spec);
        Ok(self.subtable(spec)?.unwrap_or_else(empty))
    }

    /// Reads the table that `spec` describes with `read` and finishes it. A missing table reads as an empty one.
    pub fn read_table<T>(
        &self,
        spec: &'static ConfigTable,
        read: impl FnOnce(&Settings<'d>) -> Result<T>,
    ) -> Result<T> {
        self.subtable_or_empty(spec)?.complete(read)
    }

    /// Reads each table that `spec` describes with `read` and finishes it. The reading goes on after a wrong table.
    pub fn read_tables<T>(
        &self,
        spec: &'static ConfigTable,
        mut read: impl FnMut(&Settings<'d>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let (mut all, mut failed) = (Vec::new(), None);
        for table in self.subtables(spec)? {
            match table.complete(&mut read) {
                Ok(value) => all.push(value),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(all), Err)
    }

    /// True if the table's description has the key. A table inside may belong to something that the reader has not
    /// chosen.
    fn is_described(&self, key: &str) -> bool {
        self.spec.is_some_and(|spec| spec.key(key).is_some())
    }

    /// Checks that the reader has asked for each described key, and for each table of a program.
    fn assert_all_requested(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let Some(spec) = self.spec.filter(|spec| !spec.alternatives) else { return };
        let requested = self.requested.borrow();
        let tables = if spec.name.is_empty() { (spec.tables)() } else { Vec::new() };
        let described = spec.keys.iter().map(|key| key.name()).chain(tables.iter().map(|table| table.name));
        for name in described {
            assert!(requested.contains(&name), "no reader asks for the key \"{name}\" of the table [{}]", self.path);
        }
    }

    /// Refuses the former name of a key. The error points at that key and names the new one.
    pub fn renamed(&self, old: &'static str, new: &'static str) -> Result<()> {
        match self.table.iter().find(|(name, _)| name.get_ref().as_ref() == old) {
            Some((key, _)) => {
                let message = format!("this key is now called \"{new}\"");
                Err(self.errors.record(self.error_at(&key.span(), old, message)))
            }
            None => Ok(()),
        }
    }

    /// Refuses a key that another table has now. The error points at the key and names its new place.
    pub fn moved(&self, old: &'static str, table: &str, new: &str) -> Result<()> {
        match self.table.iter().find(|(name, _)| name.get_ref().as_ref() == old) {
            Some((key, _)) => {
                let message = format!("this key is now \"{new}\" in the table [{table}]");
                Err(self.errors.record(self.error_at(&key.span(), old, message)))
            }
            None => Ok(()),
        }
    }

    /// Refuses a key that this table does not have for a reason worth an explanation. The error points at the value.
    pub fn unsupported(&self, key: &'static str, why: &str) -> Result<()> {
        match self.table.iter().find(|(name, _)| name.get_ref().as_ref() == key) {
            Some((_, value)) => Err(self.errors.record(self.error_at(&value.span(), key, why.to_owned()))),
            None => Ok(()),
        }
    }

    /// Ends the reading of this table: refuses keys that were never requested, and suggests the nearest known one.
    ///
    /// Fails with all errors of the table and of the tables in it.
    pub fn finish(self) -> Result<()> {
        self.check_keys()
    }

    /// Does the same as [`Self::finish`] for the keys requested so far. A misspelt key is the likely cause of
    /// a missing one.
    pub fn check_keys(&self) -> Result<()> {
        self.refuse_keys(false);
        self.errors.of(&self.path).map_or(Ok(()), Err)
    }

    /// Records an error for each key that was never requested; with `misspelt`, only for those that resemble a
    /// requested key.
    fn refuse_keys(&self, misspelt: bool) {
        let requested = self.requested.borrow();
        let mut known: Vec<&str> = requested.clone();
        known.sort_unstable();
        known.dedup();
        let has = |key: &str| self.table.keys().any(|name| name.get_ref().as_ref() == key);
        let missing: Vec<&str> = known.iter().copied().filter(|key| !has(key)).collect();
        for name in self.table.keys() {
            let key = name.get_ref().as_ref();
            if known.binary_search(&key).is_ok() || misspelt && self.is_described(key) {
                continue;
            }
            let message = match nearest(key, &missing).or_else(|| nearest(key, &known)) {
                Some(near) => format!("unknown key; did you mean \"{near}\"?"),
                None if misspelt => continue,
                None if known.is_empty() => "unknown key; this table has none".to_owned(),
                None => format!("unknown key; known here: {}", known.join(", ")),
            };
            self.record(self.error_at(&name.span(), &excerpt(key), message));
        }
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

/// The word that is most similar to `found`, if it is similar enough for a typing error.
pub fn nearest<'w>(found: &str, words: &[&'w str]) -> Option<&'w str> {
    // The comparison takes time and memory in proportion to the product of the lengths.
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
    fn lines_and_positions_agree_in_long_texts() {
        // Lines of every length around a checkpoint, with characters of several bytes.
        let lines: Vec<String> = (0..400).map(|n| "aä€".repeat(n % 37) + &"x".repeat(n % 5)).collect();
        for end in ["", "\n"] {
            let text = lines.join("\n") + end;
            let source = Source::new("t", text.as_str());
            let mut start = 0;
            for (index, line) in lines.iter().enumerate() {
                assert_eq!(source.line(index + 1), Some(line.as_str()));
                assert_eq!(source.position(start), (index + 1, 1));
                assert_eq!(source.position(start + line.len()), (index + 1, line.chars().count() + 1));
                start += line.len() + 1;
            }
            assert_eq!((source.line(0), source.line(lines.len() + 1)), (None, None));
        }
        assert_eq!(Source::new("t", "").line(1), None);
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
    fn a_span_within_a_string() {
        let span = |text: &str, offset| {
            let source = Source::new("c.toml", text);
            let document = source.parse().unwrap();
            document.settings().span_within("a", offset).position()
        };
        assert_eq!(span("a = \"one two\"", 4), (1, 10));
        assert_eq!(span("a = 'one two'", 4), (1, 10));
        assert_eq!(span("a = '''\none\ntwo'''", 4), (3, 1));
        assert_eq!(span("a = \"\"\"one two\"\"\"", 4), (1, 12));
        assert_eq!(span("a = \"\\tone two\"", 5), (1, 5), "behind an escape");
        assert_eq!(span("a = \"one\"", 99), (1, 5), "behind the string");
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        let message = error("devise = 'eth0'\n", |s| s.get::<String>("device").map(drop));
        assert_eq!(message, "c.toml:1:1: devise: unknown key; did you mean \"device\"?");
        let message = error("x = 1\n", |s| s.get::<String>("device").map(drop));
        assert_eq!(message, "c.toml:1:1: x: unknown key; known here: device");
    }

    #[test]
    fn wrong_types_and_missing_keys_are_refused() {
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

    /// Reads a list of tables, as programs do.
    fn read_all(text: &str) -> Vec<String> {
        let source = Source::new("c.toml", text);
        let document = source.parse().unwrap();
        let read = |table: &Settings<'_>| {
            let mtu = table.integer::<u16>("mtu", 68..=9216)?;
            let cores = table.integers::<u8>("cores", 0..=9)?;
            let vni = table.required_integer::<u32>("vni", 0..=99)?;
            Ok((mtu, cores.len(), vni))
        };
        let result = document.read(|top| {
            let tables = top.each("t", read);
            let n = top.integer::<u8>("n", 0..=9);
            top.check_keys()?;
            Ok((tables?, n?))
        });
        result.unwrap_err().to_string().lines().map(str::to_owned).collect()
    }

    #[test]
    fn all_errors_of_a_document_are_returned() {
        let text = "m = 1\nn = 10\n[[t]]\nvnii = 42\nmtu = 1\n\
                    [[t]]\nvni = 1\nmtus = 1\ncores = [1, 'x', 10]\n[[t]]\nxyz = 1\n";
        assert_eq!(
            read_all(text),
            [
                "c.toml:1:1: m: unknown key; did you mean \"n\"?",
                "c.toml:2:5: n: found 10, expected an integer from 0 to 9",
                "c.toml:4:1: t[0].vnii: unknown key; did you mean \"vni\"?",
                "c.toml:5:7: t[0].mtu: found 1, expected an integer from 68 to 9216",
                "c.toml:8:1: t[1].mtus: unknown key; did you mean \"mtu\"?",
                "c.toml:9:13: t[1].cores[1]: found 'x', expected an integer from 0 to 9",
                "c.toml:9:18: t[1].cores[2]: found 10, expected an integer from 0 to 9",
                "c.toml:10:1: t[2].vni: missing, expected an integer from 0 to 99",
            ]
        );
    }

    #[test]
    fn many_errors_are_counted() {
        let text = format!("n = 1\n{}", "[[t]]\nvni = 100\n".repeat(25));
        let errors = read_all(&text);
        assert_eq!(
            (errors.len(), errors[19].as_str()),
            (21, "c.toml:41:7: t[19].vni: found 100, expected an integer from 0 to 99")
        );
        assert_eq!(errors[20], "and 5 more errors");
        let keys: String = (0..1000).map(|i| format!("unknown{i} = 1\n")).collect();
        let errors = read_all(&keys);
        assert_eq!((errors.len(), errors[20].as_str()), (21, "and 980 more errors"));
        let list = format!("n = 1\n[[t]]\nvni = 1\ncores = [{}]\n", "99, ".repeat(500_000));
        assert_eq!(read_all(&list)[20], "and 499980 more errors");
    }

    #[test]
    fn quotations_stay_on_one_line() {
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
    fn malformed_texts_are_refused_quickly() {
        // A thread has the default stack, which a library must expect.
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

    const SPEED: Key<WithDefault<Integer<u8>>> = Key::integer("speed", 1..=9).default(3).about("Speed.");
    const MODE: Key<Text> = Key::text("mode", "a word").about("Mode.");
    static ENGINE: ConfigTable = ConfigTable { name: "engine", keys: &[&SPEED, &MODE], ..ConfigTable::EMPTY };

    /// Reads the table [`ENGINE`] of a text.
    fn read_engine<T>(text: &str, read: impl FnOnce(&Settings<'_>) -> Result<T>) -> Result<T> {
        let source = Source::new("c.toml", text);
        let document = source.parse().unwrap();
        document.read(|top| top.read_table(&ENGINE, read))
    }

    #[test]
    fn described_keys_have_defaults_and_ranges() {
        let read = |text: &str| read_engine(text, |table| Ok((table.read(&SPEED)?, table.read(&MODE)?)));
        assert_eq!(read("").unwrap(), (3, None));
        assert_eq!(read("[engine]\nspeed = 9\nmode = 'x'").unwrap(), (9, Some("x".to_owned())));
        let error = read("[engine]\nspeed = 10\nmod = 'x'").unwrap_err().to_string();
        let expected = "c.toml:2:9: engine.speed: found 10, expected an integer from 1 to 9\n\
                        c.toml:3:1: engine.mod: unknown key; did you mean \"mode\"?";
        assert_eq!(error, expected);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic = "does not have the key \"wheels\""]
    fn a_reader_without_a_description_fails() {
        const WHEELS: Key<Flag> = Key::flag("wheels");
        let _ = read_engine("", |table| table.read(&WHEELS));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic = "does not have the key \"speed\" as the reader has it"]
    fn a_reader_with_another_range_fails() {
        const OTHER: Key<WithDefault<Integer<u8>>> = Key::integer("speed", 1..=10).default(3).about("Speed.");
        let _ = read_engine("", |table| table.read(&OTHER));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic = "no reader asks for the key \"mode\" of the table [engine]"]
    fn a_description_without_a_reader_fails() {
        let _ = read_engine("", |table| table.read(&SPEED));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic = "has no key \"gearbox\""]
    fn a_table_without_a_description_fails() {
        static GEARBOX: ConfigTable = ConfigTable { name: "gearbox", ..ConfigTable::EMPTY };
        let _ = read_engine("", |table| table.read_table(&GEARBOX, |_| Ok(())));
    }

    #[test]
    fn the_former_name_of_a_key_names_the_new_one() {
        let message = error("receive = 1", |s| s.renamed("receive", "rx_mode"));
        assert!(message.contains("this key is now called \"rx_mode\""), "{message}");
    }

    #[test]
    fn an_endless_file_is_refused() {
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
