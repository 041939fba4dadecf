//! Keys and tables described as data. A reader asks for a value by its description.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::str::FromStr;

use toml::Spanned;

use super::{DeValue, FromValue, Located, Result, Settings, nearest};

/// Description of a key: name, form of the value, meaning if it is missing, and purpose.
///
/// A key is a constant. [`Settings::read`] reads its value, so the range that the reader accepts is the range that the
/// description states. The kind `K` decides the type of the value:
///
/// | Kind | Made by | [`Settings::read`] gives |
/// |---|---|---|
/// | [`Flag`], [`Text`], [`Value<T>`](Value) | [`Key::flag`], [`Key::text`], [`Key::value`] | `Option` |
/// | [`Integer<T>`](Integer), [`Number`] | [`Key::integer`], [`Key::number`] | `Option` |
/// | [`Choice<T>`](Choice) | [`Key::choice`], [`Key::choice_of`] | `Option` |
/// | [`Parsed<T>`](Parsed) | [`Key::parsed`] | `Option` |
/// | [`WithDefault`] | [`Key::default`], [`Key::default_word`] | the value or the default |
/// | [`Required`] | [`Key::required`] | the value, or an error if the key is missing |
/// | [`List`], [`Lists`] | [`Key::list`], [`Key::lists`] | a list, empty if the key is missing |
#[derive(Clone, Copy)]
pub struct Key<K> {
    name: &'static str,
    kind: K,
    about: &'static str,
    absent: &'static str,
    same_as: Option<&'static str>,
    when: &'static str,
    needs: &'static [(&'static str, &'static str)],
}

/// Form of a value, for displays.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// `true` or `false`.
    Flag,
    /// A string; the text says what it stands for.
    Text(&'static str),
    /// An integer within a range.
    Integer {
        /// Smallest value.
        min: i64,
        /// Largest value.
        max: i64,
        /// Unit; empty if the value has none.
        unit: &'static str,
        /// True if people write the value in octal, as file modes.
        octal: bool,
    },
    /// A number within a range.
    Number {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
        /// Unit; empty if the value has none.
        unit: &'static str,
    },
    /// One of these words.
    Choice(Vec<Word>),
    /// A value of another form, which the text describes.
    Other(&'static str),
    /// A list of values of this form. A single value is a list of one.
    List(Box<Form>),
    /// A list of lists of values of this form.
    Lists(Box<Form>),
}

/// Word that a key takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The word as written in a configuration.
    pub word: &'static str,
    /// Effect of the word.
    pub about: &'static str,
}

/// Description of a key without its types, for displays and tests.
pub trait KeySpec: Sync {
    /// Name of the key.
    fn name(&self) -> &'static str;
    /// Purpose, in one or two sentences.
    fn about(&self) -> &'static str;
    /// Form of the value.
    fn form(&self) -> Form;
    /// Default as a TOML value: leaving out the key is the same as writing this value.
    fn default(&self) -> Option<String>;
    /// Meaning of a missing key that has no default value; empty if the key is required or has a default.
    fn absent(&self) -> &'static str;
    /// True if the key must be there.
    fn is_required(&self) -> bool;
    /// Line of TOML without which the key has no effect or is refused; empty if there is none.
    fn when(&self) -> &'static str;
    /// Line of TOML that a word of this key requires besides.
    fn needs(&self, word: &str) -> Option<&'static str>;
}

/// Kind of value of a key: how it is read and described.
pub trait Kind: Copy + Sync {
    /// Result of the reading.
    type Output;
    /// Reads the value of the key `name` of a table. Errors of values are recorded in the document.
    ///
    /// # Errors
    /// If the key must be there and has no valid value.
    fn read(&self, table: &Settings<'_>, name: &'static str) -> Result<Self::Output>;
    /// Form of the value.
    fn form(&self) -> Form;
    /// Default as a TOML value.
    fn default(&self) -> Option<String> {
        None
    }
    /// True if the key must be there.
    const REQUIRED: bool = false;
}

/// Kind of a single value.
pub trait Scalar: Copy + Sync {
    /// Type of the value.
    type Value;
    /// Default in a constant.
    type Default: Copy + Sync;
    /// Converts a value; `None` if it is not valid.
    fn convert(&self, value: &DeValue<'_>) -> Option<Self::Value>;
    /// Description of valid values, for errors. `found` is the value that is not valid, if there is one.
    fn expected(&self, found: Option<&DeValue<'_>>) -> String;
    /// Form of the value.
    fn form(&self) -> Form;
    /// The default as a value.
    fn default_value(&self, default: Self::Default) -> Self::Value;
    /// The default as a TOML value.
    fn default_text(&self, default: Self::Default) -> String;
}

/// Kind of `true` or `false`.
#[derive(Clone, Copy, Debug)]
pub struct Flag;

/// Kind of a string, with what it stands for.
#[derive(Clone, Copy, Debug)]
pub struct Text(&'static str);

/// Kind of a value that an own type reads, by [`FromValue`].
pub struct Value<T>(PhantomData<fn() -> T>);

/// Kind of an integer within a range.
pub struct Integer<T> {
    min: i64,
    max: i64,
    unit: &'static str,
    octal: bool,
    value: PhantomData<fn() -> T>,
}

/// Kind of a number within a range.
#[derive(Clone, Copy, Debug)]
pub struct Number {
    min: f64,
    max: f64,
    unit: &'static str,
}

/// Kind of a word from a list.
pub struct Choice<T: 'static>(Choices<T>);

/// Words of a [`Choice`], each with its value and effect.
enum Choices<T: 'static> {
    Constant(&'static [(&'static str, T, &'static str)]),
    Computed(fn() -> Vec<(&'static str, T, &'static str)>),
}

/// Kind of a string that parses as `T`.
pub struct Parsed<T> {
    expected: &'static str,
    value: PhantomData<fn() -> T>,
}

/// Kind of a key that has a default value.
#[derive(Clone, Copy, Debug)]
pub struct WithDefault<K: Scalar> {
    kind: K,
    value: K::Default,
}

/// Kind of a key that must be there.
#[derive(Clone, Copy, Debug)]
pub struct Required<K>(K);

/// Kind of a list. A single value is a list of one.
#[derive(Clone, Copy, Debug)]
pub struct List<K>(K);

/// Kind of a list of lists.
#[derive(Clone, Copy, Debug)]
pub struct Lists<K>(K);

/// Implements `Copy`, which a derive would restrict to `T: Copy`.
macro_rules! copy {
    ($($kind:ident)*) => { $(
        impl<T> Clone for $kind<T> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $kind<T> {}
        impl<T> fmt::Debug for $kind<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($kind)).finish_non_exhaustive()
            }
        }
    )* };
}
copy!(Value Integer Choice Choices Parsed);

impl<K> Key<K> {
    const fn new(name: &'static str, kind: K) -> Self {
        Self { name, kind, about: "", absent: "", same_as: None, when: "", needs: &[] }
    }

    /// Adds the purpose, in one or two sentences.
    #[must_use]
    pub const fn about(mut self, about: &'static str) -> Self {
        self.about = about;
        self
    }

    /// Adds the meaning of a missing key, for a key without a default value.
    #[must_use]
    pub const fn absent(mut self, absent: &'static str) -> Self {
        self.absent = absent;
        self
    }

    /// Adds the TOML value that means the same as a missing key. The reader itself supplies it.
    #[must_use]
    pub const fn same_as(mut self, value: &'static str) -> Self {
        self.same_as = Some(value);
        self
    }

    /// Adds a line of TOML without which the key has no effect or is refused, such as `idle = "sleep"`.
    #[must_use]
    pub const fn when(mut self, line: &'static str) -> Self {
        self.when = line;
        self
    }

    /// Adds lines of TOML that words of this key require, each with its word.
    #[must_use]
    pub const fn needs(mut self, needs: &'static [(&'static str, &'static str)]) -> Self {
        self.needs = needs;
        self
    }

    /// Name of the key.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl<K: Copy> Key<K> {
    const fn with_kind<N>(self, kind: N) -> Key<N> {
        let Self { name, about, absent, same_as, when, needs, .. } = self;
        Key { name, kind, about, absent, same_as, when, needs }
    }

    /// Makes the key mandatory.
    #[must_use]
    pub const fn required(self) -> Key<Required<K>> {
        self.with_kind(Required(self.kind))
    }

    /// Lets the key take a list of such values. A single value is a list of one.
    #[must_use]
    pub const fn list(self) -> Key<List<K>> {
        self.with_kind(List(self.kind))
    }

    /// Lets the key take a list of lists of such values.
    #[must_use]
    pub const fn lists(self) -> Key<Lists<K>> {
        self.with_kind(Lists(self.kind))
    }
}

impl<K: Scalar> Key<K> {
    /// Sets the value that a missing key stands for.
    #[must_use]
    pub const fn default(self, value: K::Default) -> Key<WithDefault<K>> {
        self.with_kind(WithDefault { kind: self.kind, value })
    }
}

impl<K: Scalar> Key<WithDefault<K>> {
    /// Value that a missing key stands for.
    pub fn default_value(&self) -> K::Value {
        self.kind.kind.default_value(self.kind.value)
    }
}

impl Key<Flag> {
    /// A key that is `true` or `false`.
    pub const fn flag(name: &'static str) -> Self {
        Self::new(name, Flag)
    }
}

impl Key<Text> {
    /// A key with a string; `what` says what it stands for, such as "path of a file".
    pub const fn text(name: &'static str, what: &'static str) -> Self {
        Self::new(name, Text(what))
    }
}

impl<T: FromValue> Key<Value<T>> {
    /// A key with a value of an own type, which [`FromValue::EXPECTED`] describes.
    pub const fn value(name: &'static str) -> Self {
        Self::new(name, Value(PhantomData))
    }
}

impl<T> Key<Integer<T>> {
    /// A key with an integer of this range.
    pub const fn integer(name: &'static str, range: RangeInclusive<i64>) -> Self {
        let (min, max) = (*range.start(), *range.end());
        Self::new(name, Integer { min, max, unit: "", octal: false, value: PhantomData })
    }

    /// Adds the unit, in the plural: "seconds".
    #[must_use]
    pub const fn unit(mut self, unit: &'static str) -> Self {
        self.kind.unit = unit;
        self
    }

    /// Lets displays write the integer in octal.
    #[must_use]
    pub const fn octal(mut self) -> Self {
        self.kind.octal = true;
        self
    }
}

impl Key<Number> {
    /// A key with a number of this range.
    pub const fn number(name: &'static str, min: f64, max: f64) -> Self {
        Self::new(name, Number { min, max, unit: "" })
    }

    /// Adds the unit, in the plural.
    #[must_use]
    pub const fn unit(mut self, unit: &'static str) -> Self {
        self.kind.unit = unit;
        self
    }
}

impl<T> Key<Choice<T>> {
    /// A key with one of these words, each with its value and its effect.
    pub const fn choice(name: &'static str, choices: &'static [(&'static str, T, &'static str)]) -> Self {
        Self::new(name, Choice(Choices::Constant(choices)))
    }

    /// A key with one of the words that a function returns.
    pub const fn choice_of(name: &'static str, choices: fn() -> Vec<(&'static str, T, &'static str)>) -> Self {
        Self::new(name, Choice(Choices::Computed(choices)))
    }

    /// Sets the word that a missing key stands for.
    ///
    /// # Panics
    /// If it is not one of the words of [`Key::choice`]. In a constant, this stops the compilation.
    #[must_use]
    pub const fn default_word(self, word: &str) -> Key<WithDefault<Choice<T>>>
    where
        T: Clone + Sync,
    {
        let Choices::Constant(choices) = self.kind.0 else { panic!("the words are not constant") };
        let mut index = 0;
        while !is_equal(choices[index].0.as_bytes(), word.as_bytes()) {
            index += 1;
        }
        self.with_kind(WithDefault { kind: self.kind, value: index })
    }
}

/// Compares texts in a constant.
const fn is_equal(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

impl<T: FromStr> Key<Parsed<T>> {
    /// A key with a string that parses as `T`; `expected` describes valid strings.
    pub const fn parsed(name: &'static str, expected: &'static str) -> Self {
        Self::new(name, Parsed { expected, value: PhantomData })
    }
}

impl Scalar for Flag {
    type Value = bool;
    type Default = bool;

    fn convert(&self, value: &DeValue<'_>) -> Option<bool> {
        bool::from_value(value)
    }

    fn expected(&self, _: Option<&DeValue<'_>>) -> String {
        bool::EXPECTED.to_owned()
    }

    fn form(&self) -> Form {
        Form::Flag
    }

    fn default_value(&self, default: bool) -> bool {
        default
    }

    fn default_text(&self, default: bool) -> String {
        default.to_string()
    }
}

impl Scalar for Text {
    type Value = String;
    type Default = &'static str;

    fn convert(&self, value: &DeValue<'_>) -> Option<String> {
        String::from_value(value)
    }

    fn expected(&self, _: Option<&DeValue<'_>>) -> String {
        String::EXPECTED.to_owned()
    }

    fn form(&self) -> Form {
        Form::Text(self.0)
    }

    fn default_value(&self, default: &'static str) -> String {
        default.to_owned()
    }

    fn default_text(&self, default: &'static str) -> String {
        quoted(default)
    }
}

impl<T: FromValue> Scalar for Value<T> {
    type Value = T;
    /// A default of an own type is not a constant: see [`Key::same_as`].
    type Default = Never;

    fn convert(&self, value: &DeValue<'_>) -> Option<T> {
        T::from_value(value)
    }

    fn expected(&self, _: Option<&DeValue<'_>>) -> String {
        T::EXPECTED.to_owned()
    }

    fn form(&self) -> Form {
        Form::Other(T::EXPECTED)
    }

    fn default_value(&self, default: Never) -> T {
        match default {}
    }

    fn default_text(&self, default: Never) -> String {
        match default {}
    }
}

/// A string as a TOML value.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

impl<T: TryFrom<i64> + Copy + Sync + fmt::Display> Scalar for Integer<T> {
    type Value = T;
    type Default = T;

    fn convert(&self, value: &DeValue<'_>) -> Option<T> {
        let value = i64::from_value(value).filter(|value| (self.min..=self.max).contains(value))?;
        T::try_from(value).ok()
    }

    fn expected(&self, _: Option<&DeValue<'_>>) -> String {
        format!("an integer from {} to {}", self.min, self.max)
    }

    fn form(&self) -> Form {
        Form::Integer { min: self.min, max: self.max, unit: self.unit, octal: self.octal }
    }

    fn default_value(&self, default: T) -> T {
        default
    }

    fn default_text(&self, default: T) -> String {
        let text = default.to_string();
        match text.parse::<u64>() {
            Ok(value) if self.octal => format!("0o{value:o}"),
            _ => text,
        }
    }
}

impl Scalar for Number {
    type Value = f64;
    type Default = f64;

    fn convert(&self, value: &DeValue<'_>) -> Option<f64> {
        f64::from_value(value).filter(|value| (self.min..=self.max).contains(value))
    }

    fn expected(&self, _: Option<&DeValue<'_>>) -> String {
        format!("a number from {} to {}", self.min, self.max)
    }

    fn form(&self) -> Form {
        Form::Number { min: self.min, max: self.max, unit: self.unit }
    }

    fn default_value(&self, default: f64) -> f64 {
        default
    }

    fn default_text(&self, default: f64) -> String {
        format!("{default:?}")
    }
}

impl<T: Clone> Choice<T> {
    fn with<R>(&self, use_choices: impl FnOnce(&[(&'static str, T, &'static str)]) -> R) -> R {
        match self.0 {
            Choices::Constant(choices) => use_choices(choices),
            Choices::Computed(choices) => use_choices(&choices()),
        }
    }
}

impl<T: Clone + Sync> Scalar for Choice<T> {
    type Value = T;
    /// Index of the word.
    type Default = usize;

    fn convert(&self, value: &DeValue<'_>) -> Option<T> {
        let found = value.as_str()?;
        self.with(|choices| choices.iter().find(|(word, ..)| *word == found).map(|(_, value, _)| value.clone()))
    }

    fn expected(&self, found: Option<&DeValue<'_>>) -> String {
        let words: Vec<&str> = self.with(|choices| choices.iter().map(|(word, ..)| *word).collect());
        let mut expected = format!("one of \"{}\"", words.join("\", \""));
        if let Some(near) = found.and_then(DeValue::as_str).and_then(|found| nearest(found, &words)) {
            expected += &format!(" (did you mean \"{near}\"?)");
        }
        expected
    }

    fn form(&self) -> Form {
        Form::Choice(self.with(|choices| choices.iter().map(|(word, _, about)| Word { word, about }).collect()))
    }

    fn default_value(&self, default: usize) -> T {
        self.with(|choices| choices[default].1.clone())
    }

    fn default_text(&self, default: usize) -> String {
        self.with(|choices| quoted(choices[default].0))
    }
}

impl<T: FromStr> Scalar for Parsed<T> {
    type Value = T;
    /// The default as a valid string is not a constant: see [`Key::same_as`].
    type Default = Never;

    fn convert(&self, value: &DeValue<'_>) -> Option<T> {
        value.as_str()?.parse().ok()
    }

    fn expected(&self, _: Option<&DeValue<'_>>) -> String {
        self.expected.to_owned()
    }

    fn form(&self) -> Form {
        Form::Other(self.expected)
    }

    fn default_value(&self, default: Never) -> T {
        match default {}
    }

    fn default_text(&self, default: Never) -> String {
        match default {}
    }
}

/// Type without values, for kinds that have no default.
#[derive(Clone, Copy, Debug)]
pub enum Never {}

/// Reads a value by a kind, or records the error. `name` may be that of an element of a list.
fn read_item<K: Scalar>(
    kind: &K,
    table: &Settings<'_>,
    name: &str,
    value: &Spanned<DeValue<'_>>,
) -> Option<Located<K::Value>> {
    let read = kind.convert(value.get_ref());
    if read.is_none() {
        table.record(table.wrong(value, name, &kind.expected(Some(value.get_ref()))));
    }
    Some(Located { value: read?, span: table.span_at(value.span().start, name) })
}

fn read_scalar<K: Scalar>(kind: &K, table: &Settings<'_>, name: &'static str) -> Option<K::Value> {
    let value = table.value(name)?;
    read_item(kind, table, name, value).map(|located| located.value)
}

impl<K: Scalar> Kind for K {
    type Output = Option<K::Value>;

    fn read(&self, table: &Settings<'_>, name: &'static str) -> Result<Self::Output> {
        Ok(read_scalar(self, table, name))
    }

    fn form(&self) -> Form {
        Scalar::form(self)
    }
}

impl<K: Scalar> Kind for WithDefault<K> {
    type Output = K::Value;

    fn read(&self, table: &Settings<'_>, name: &'static str) -> Result<K::Value> {
        let read = read_scalar(&self.kind, table, name);
        Ok(read.unwrap_or_else(|| self.kind.default_value(self.value)))
    }

    fn form(&self) -> Form {
        self.kind.form()
    }

    fn default(&self) -> Option<String> {
        Some(self.kind.default_text(self.value))
    }
}

impl<K: Scalar> Kind for Required<K> {
    type Output = K::Value;
    const REQUIRED: bool = true;

    fn read(&self, table: &Settings<'_>, name: &'static str) -> Result<K::Value> {
        read_scalar(&self.0, table, name).ok_or_else(|| table.missing(name, &self.0.expected(None)))
    }

    fn form(&self) -> Form {
        self.0.form()
    }
}

impl<K: Scalar> Kind for List<K> {
    type Output = Vec<Located<K::Value>>;

    fn read(&self, table: &Settings<'_>, name: &'static str) -> Result<Self::Output> {
        let items = table.elements(name);
        Ok(items.filter_map(|(name, item)| read_item(&self.0, table, &name, item)).collect())
    }

    fn form(&self) -> Form {
        Form::List(Box::new(self.0.form()))
    }
}

impl<K: Scalar> Kind for Lists<K> {
    type Output = Vec<Vec<Located<K::Value>>>;

    fn read(&self, table: &Settings<'_>, name: &'static str) -> Result<Self::Output> {
        let expected = self.0.expected(None);
        let Some(value) = table.value(name) else { return Ok(Vec::new()) };
        let Some(rows) = value.get_ref().as_array() else {
            table.record(table.wrong(value, name, &expected));
            return Ok(Vec::new());
        };
        let row = |(i, row): (usize, &Spanned<DeValue<'_>>)| {
            let name = format!("{name}[{i}]");
            let Some(items) = row.get_ref().as_array() else {
                table.record(table.wrong(row, &name, &expected));
                return None;
            };
            let cell = |(j, item)| read_item(&self.0, table, &format!("{name}[{j}]"), item);
            Some(items.iter().enumerate().filter_map(cell).collect())
        };
        Ok(rows.iter().enumerate().filter_map(row).collect())
    }

    fn form(&self) -> Form {
        Form::Lists(Box::new(self.0.form()))
    }
}

impl<K: Kind> Key<K> {
    pub(super) fn read(&self, table: &Settings<'_>) -> Result<K::Output> {
        self.kind.read(table, self.name)
    }

    /// True if the other description is this one.
    pub(super) fn is_same(&self, other: &dyn KeySpec) -> bool {
        self.name == other.name() && self.about == other.about() && self.kind.form() == other.form()
    }
}

impl<K: Kind> KeySpec for Key<K> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn form(&self) -> Form {
        self.kind.form()
    }

    fn default(&self) -> Option<String> {
        self.same_as.map(str::to_owned).or_else(|| self.kind.default())
    }

    fn absent(&self) -> &'static str {
        self.absent
    }

    fn is_required(&self) -> bool {
        K::REQUIRED
    }

    fn when(&self) -> &'static str {
        self.when
    }

    fn needs(&self, word: &str) -> Option<&'static str> {
        self.needs.iter().find(|(known, _)| *known == word).map(|(_, line)| *line)
    }
}

impl<K: Kind> fmt::Debug for Key<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("name", &self.name).field("form", &self.kind.form()).finish_non_exhaustive()
    }
}

/// Description of a table of a configuration.
///
/// A reader gets the table by its description ([`Settings::read_table`] and [`Settings::read_tables`]). It asks for the
/// described keys and for no others. In builds with debug assertions, any other reader panics.
#[derive(Clone, Copy)]
pub struct ConfigTable {
    /// Name, without those of the tables around it; empty for the top-level table of a program.
    pub name: &'static str,
    /// How often the table can be there, and how it is written.
    pub written: Written,
    /// Purpose, in one or two sentences.
    pub about: &'static str,
    /// Meaning of a missing table.
    pub absent: &'static str,
    /// Keys, in the order of displays.
    pub keys: &'static [&'static dyn KeySpec],
    /// Returns the tables inside this one.
    pub tables: fn() -> Vec<&'static ConfigTable>,
    /// True if keys exclude each other, so that no reader asks for all of them.
    pub alternatives: bool,
    /// Description of keys that have no [`KeySpec`], because another key decides which there are; empty if there are
    /// none.
    pub others: &'static str,
    /// Example in TOML, with the heading of the table.
    pub example: &'static str,
}

/// How a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Once: `[name]`.
    Once,
    /// Any number of times: `[[name]]`.
    Repeated,
    /// As a list of inline tables: `name = [{ ... }, { ... }]`.
    InlineList,
}

impl ConfigTable {
    /// A table without keys, for `..ConfigTable::EMPTY`.
    pub const EMPTY: Self = Self {
        name: "",
        written: Written::Once,
        about: "",
        absent: "",
        keys: &[],
        tables: Vec::new,
        alternatives: false,
        others: "",
        example: "",
    };

    /// The description of a key of this table.
    pub fn key(&self, name: &str) -> Option<&'static dyn KeySpec> {
        self.keys.iter().copied().find(|key| key.name() == name)
    }

    /// The description of a table inside this one.
    pub fn table(&self, name: &str) -> Option<&'static Self> {
        (self.tables)().into_iter().find(|table| table.name == name)
    }

    /// True if a reader may ask for a key of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        !self.others.is_empty() || self.key(name).is_some() || self.table(name).is_some()
    }

    /// All tables inside this one at any depth, in order, each with its full name such as `port.af_xdp`. A table that
    /// several tables have inside is listed for each.
    pub fn all_tables(&'static self) -> Vec<(String, &'static Self)> {
        let mut all = Vec::new();
        for table in (self.tables)() {
            let inside = table.all_tables();
            all.push((table.name.to_owned(), table));
            all.extend(inside.into_iter().map(|(path, inner)| (format!("{}.{path}", table.name), inner)));
        }
        all
    }
}

impl fmt::Debug for ConfigTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&str> = self.keys.iter().map(|key| key.name()).collect();
        f.debug_struct("ConfigTable").field("name", &self.name).field("keys", &keys).finish_non_exhaustive()
    }
}

/// Name of a key or table: a description, or the name itself.
pub trait KeyName {
    /// The name.
    fn key_name(self) -> &'static str;
}

impl KeyName for &'static str {
    fn key_name(self) -> &'static str {
        self
    }
}

impl<K> KeyName for &Key<K> {
    fn key_name(self) -> &'static str {
        self.name
    }
}

impl KeyName for &ConfigTable {
    fn key_name(self) -> &'static str {
        self.name
    }
}
