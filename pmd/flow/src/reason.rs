//! Reasons for refusing a rule: one table gives the value, its name and the text.

use std::fmt;

macro_rules! reasons {
    ($($variant:ident, $name:literal, $text:literal;)*) => {
        /// Reasons for refusing a rule. The names are stable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Reason { $(#[doc = $text] $variant,)* }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the short name: lower case, words joined by `_`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns a one-line description.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

reasons! {
    // Syntax.
    Syntax, "syntax", "the text does not follow the grammar";
    UnknownWord, "unknown_word", "a word is unknown";
    Missing, "missing", "a required word is missing";
    Twice, "twice", "a word is given twice";
    BadValue, "bad_value", "a value has the wrong format for its field";
    OutOfRange, "out_of_range", "a value does not fit its field";
    ValueOutsideMask, "value_outside_mask", "a value has bits outside its mask";
    MaskOutsideField, "mask_outside_field", "a mask has bits outside its field";
    WrongField, "wrong_field", "a field belongs to another item";
    UnknownPort, "unknown_port", "no port has this name";
    // Pattern.
    ImpossibleStack, "impossible_stack", "no packet has its headers in this order";
    TooDeep, "too_deep", "more nested tunnels than are parsed";
    TooMany, "too_many", "more headers of one kind than are parsed";
    Contradiction, "contradiction", "no packet can have all of these values";
    // Actions.
    NoAction, "no_action", "the rule has no action";
    SecondTerminating, "second_fate", "the rule has two terminating actions";
    AfterTerminating, "after_fate", "an action after a terminating action never runs";
    WrongDirection, "wrong_direction", "the action does not exist in this direction";
    NoSuchHeader, "no_such_header", "the pattern does not require the header that the action needs";
    NotSettable, "not_settable", "the field cannot be set";
    Order, "order", "the actions cannot run in this order";
    BadHeader, "bad_header", "the header bytes are invalid for the action";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Part of a rule that an error refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorLocation {
    /// The whole rule.
    Rule,
    /// The item with this index in the pattern.
    Item(usize),
    /// A field of the item with this index in the pattern.
    Field(usize, super::Field),
    /// The action with this index in the list.
    Action(usize),
}

/// Error of an invalid rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// Kind of the error.
    pub reason: Reason,
    /// Location in the rule.
    pub at: ErrorLocation,
    /// Found and expected values.
    pub message: String,
}

impl RuleError {
    pub(super) fn new(reason: Reason, at: ErrorLocation, message: impl Into<String>) -> Self {
        Self { reason, at, message: message.into() }
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            ErrorLocation::Rule => write!(f, "{}", self.message),
            ErrorLocation::Item(i) => write!(f, "item {}: {}", i + 1, self.message),
            ErrorLocation::Field(i, field) => write!(f, "item {}, {}: {}", i + 1, field.name(), self.message),
            ErrorLocation::Action(i) => write!(f, "action {}: {}", i + 1, self.message),
        }
    }
}

impl std::error::Error for RuleError {}
