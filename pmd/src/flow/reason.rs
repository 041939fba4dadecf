//! Why a rule is refused: one table gives the value, its name and the text.

use std::fmt;

macro_rules! reasons {
    ($($variant:ident, $name:literal, $text:literal;)*) => {
        /// Why a rule is refused. The names are stable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Reason { $(#[doc = $text] $variant,)* }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Short name: lower case, words joined by `_`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// One line for people.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

reasons! {
    // How it is written.
    Syntax, "syntax", "the text does not follow the grammar";
    UnknownWord, "unknown_word", "a word that the language does not know";
    Missing, "missing", "something that must be there is not";
    Twice, "twice", "the same thing is said twice";
    BadValue, "bad_value", "a value is not written as its field's values are";
    OutOfRange, "out_of_range", "a value does not fit its field";
    ValueOutsideMask, "value_outside_mask", "a value has bits that its mask leaves out";
    MaskOutsideField, "mask_outside_field", "a mask has bits that its field does not have";
    WrongField, "wrong_field", "a field of another item";
    UnknownPort, "unknown_port", "no port has this name";
    // What it says about packets.
    ImpossibleStack, "impossible_stack", "no packet has its headers in this order";
    TooDeep, "too_deep", "more tunnels inside each other than are looked into";
    TooMany, "too_many", "more headers of one kind than are looked at";
    Contradiction, "contradiction", "no packet can have all of these values";
    // What it does.
    NoAction, "no_action", "a rule without an action";
    SecondFate, "second_fate", "two actions that each decide where the packet goes";
    AfterFate, "after_fate", "an action behind the one that decides where the packet goes never runs";
    WrongDirection, "wrong_direction", "the action does not exist in this direction";
    NoSuchHeader, "no_such_header", "the pattern does not say that the packet has the header that the action needs";
    NotSettable, "not_settable", "the field cannot be set";
    Order, "order", "the actions cannot run in this order";
    BadHeader, "bad_header", "the header bytes do not parse as what the action needs";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Which part of a rule an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The rule as a whole.
    Rule,
    /// The item with this place in the pattern.
    Item(usize),
    /// A field of the item with this place in the pattern.
    Field(usize, super::Field),
    /// The action with this place in the list.
    Action(usize),
}

/// A rule that means nothing, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// Which kind of error.
    pub reason: Reason,
    /// Where.
    pub at: At,
    /// What was found and what would be right.
    pub message: String,
}

impl RuleError {
    pub(super) fn new(reason: Reason, at: At, message: impl Into<String>) -> Self {
        Self { reason, at, message: message.into() }
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            At::Rule => write!(f, "{}", self.message),
            At::Item(i) => write!(f, "item {}: {}", i + 1, self.message),
            At::Field(i, field) => write!(f, "item {}, {}: {}", i + 1, field.name(), self.message),
            At::Action(i) => write!(f, "action {}: {}", i + 1, self.message),
        }
    }
}

impl std::error::Error for RuleError {}
