//! Text format.
//!
//! ```text
//! rule    = direction [ "prio" number ] ":" pattern "=>" action { "," action }
//! pattern = "any" | item { "/" item }
//! item    = [ "inner" ] name { field value [ "mask" value ] }
//! action  = name { argument }
//! ```
//!
//! Blanks separate words. Each `/` between items needs blanks around it.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::ast::{AstNode, Pair, RuleAst, Word, WordError, action_spec, argument_names, word_error};
use super::masked_value::Ports;
use super::{Direction, Reason, Rule};

/// Error in the text of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextError {
    /// Kind of the error.
    pub reason: Reason,
    /// Found and expected words.
    pub message: String,
    /// Byte range of the wrong word; empty at the end of the text if a word is missing.
    pub span: Range<usize>,
    /// Column of its first character, counted in characters from 1.
    pub column: usize,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: {}", self.column, self.message)
    }
}

impl std::error::Error for TextError {}

impl TextError {}

/// Maximum length of the text of a rule, bytes.
pub const MAX_TEXT: usize = 16 << 10;

impl FromStr for Rule {
    type Err = TextError;
    fn from_str(text: &str) -> Result<Self, TextError> {
        Rule::parse(text, Ports::default())
    }
}

impl Rule {
    /// Parses a rule. It may use the port names in `ports`.
    pub fn parse(text: &str, ports: Ports<'_>) -> Result<Self, TextError> {
        let mut parser = Parser::new(text);
        let whole = parser.words.len();
        parser.spans.push(0..text.len());
        parser.rule_ast(whole).and_then(|tree| tree.rule(ports)).map_err(|WordError { at, reason, message }| {
            let span = parser.spans.get(at).cloned().unwrap_or(0..text.len());
            let column = text.get(..span.start).map_or(1, |before| before.chars().count() + 1);
            TextError { reason, message, span, column }
        })
    }
}

impl Rule {
    /// Parses a pattern alone: the text between `:` and `=>` of a rule. Returns a rule with this pattern and the
    /// action `drop`, for code that only asks which packets match. Errors have their place in `pattern`.
    pub fn of_pattern(direction: Direction, pattern: &str, ports: Ports<'_>) -> Result<Self, TextError> {
        let head = format!("{}: ", direction.name());
        Self::parse(&format!("{head}{pattern} {ARROW} drop"), ports).map_err(|error| {
            let inside = |at: usize| at.saturating_sub(head.len()).min(pattern.len());
            let span = inside(error.span.start)..inside(error.span.end);
            let at_end = format!("found \"{ARROW}\"");
            let message = match error.span.start >= head.len() + pattern.len() {
                true => error.message.replacen(&at_end, "the pattern ends here", 1),
                false => error.message,
            };
            let column = pattern.get(..span.start).map_or(1, |before| before.chars().count() + 1);
            TextError { reason: error.reason, message, span, column }
        })
    }
}

struct Parser {
    /// Words of the text. The index of a word is also its index in `spans`.
    words: Vec<String>,
    spans: Vec<Range<usize>>,
    next: usize,
    too_long: bool,
}

/// The symbol between pattern and actions.
const ARROW: &str = "=>";

impl Parser {
    fn new(text: &str) -> Self {
        let mut parser = Parser { words: Vec::new(), spans: Vec::new(), next: 0, too_long: text.len() > MAX_TEXT };
        if parser.too_long {
            return parser;
        }
        let mut start = None;
        let mut skip = 0;
        for (i, c) in text.char_indices() {
            if i < skip {
                continue;
            }
            let symbol = match c {
                ',' => 1,
                _ if text[i..].starts_with(ARROW) => ARROW.len(),
                _ => 0,
            };
            if symbol > 0 || c.is_whitespace() {
                if let Some(from) = start.take() {
                    parser.push(text, from..i);
                }
            } else {
                start.get_or_insert(i);
            }
            if symbol > 0 {
                parser.push(text, i..i + symbol);
                skip = i + symbol;
            }
        }
        if let Some(from) = start {
            parser.push(text, from..text.len());
        }
        parser
    }

    fn push(&mut self, text: &str, span: Range<usize>) {
        // The colon after direction and priority needs no blank before it. Colons in addresses stay part of
        // their word.
        let word = &text[span.clone()];
        let head = self.words.len() < 3 && !self.words.iter().any(|word| word == ":");
        if head && word.len() > 1 && word.ends_with(':') {
            let colon = span.end - 1;
            self.push(text, span.start..colon);
            self.push(text, colon..span.end);
            return;
        }
        self.words.push(word.to_owned());
        self.spans.push(span);
    }

    fn peek(&self) -> Option<&str> {
        self.words.get(self.next).map(String::as_str)
    }

    /// Takes the next word; an error if it is a symbol or missing.
    fn word(&mut self, expected: &str) -> Result<Word, WordError> {
        match self.peek() {
            Some(text) if !is_symbol(text) => {
                let word = Word { text: text.to_owned(), at: self.next };
                self.next += 1;
                Ok(word)
            }
            _ => self.unexpected(Reason::Missing, expected),
        }
    }

    fn at_symbol(&self) -> bool {
        self.peek().is_none_or(is_symbol)
    }

    fn unexpected<T>(&mut self, reason: Reason, expected: &str) -> Result<T, WordError> {
        let at = self.next.min(self.words.len());
        match self.peek() {
            Some(found) => word_error(at, reason, format!("found \"{found}\", expected {expected}")),
            None => {
                let end = self.spans.last().map_or(0, |whole| whole.end);
                self.spans.push(end..end);
                word_error(self.spans.len() - 1, reason, format!("the text ends here, expected {expected}"))
            }
        }
    }

    fn symbol(&mut self, symbol: &str, expected: &str) -> Result<(), WordError> {
        if self.peek() == Some(symbol) {
            self.next += 1;
            return Ok(());
        }
        self.unexpected(Reason::Syntax, expected)
    }

    fn rule_ast(&mut self, whole: usize) -> Result<RuleAst, WordError> {
        if self.too_long {
            return word_error(whole, Reason::Syntax, format!("a rule has at most {MAX_TEXT} bytes"));
        }
        let direction = self.word("\"ingress\" or \"egress\"")?;
        let mut priority = None;
        if self.peek() == Some("prio") {
            self.next += 1;
            priority = Some(self.word("a priority")?);
        }
        self.symbol(":", "\"prio\" and a number, or \":\" and the pattern")?;
        let mut items = Vec::new();
        if self.peek() == Some("any") {
            self.next += 1;
        } else {
            items.push(self.item()?);
            while self.peek() == Some("/") {
                self.next += 1;
                items.push(self.item()?);
            }
        }
        self.symbol(ARROW, "\"/\" and an item, or \"=>\" and actions")?;
        let mut actions = vec![self.action()?];
        while self.peek() == Some(",") {
            self.next += 1;
            actions.push(self.action()?);
        }
        if self.next < self.words.len() {
            return self.unexpected(Reason::Syntax, "\",\" and an action, or the end");
        }
        Ok(RuleAst { at: whole, direction, priority, items, actions })
    }

    fn item(&mut self) -> Result<AstNode, WordError> {
        let inner = self.peek() == Some("inner");
        if inner {
            self.next += 1;
        }
        let name = self.word("an item such as \"ipv4\", or \"any\"")?;
        // Reports an unknown item before its fields.
        super::ast::item_kind(&name)?;
        let mut pairs = Vec::new();
        while !self.at_symbol() {
            let key = self.word("a field")?;
            let value = match self.word(&format!("a value for {}", key.text)) {
                Ok(value) => value,
                Err(missing) => {
                    // Reports an unknown field before a missing value.
                    let kind = super::ast::item_kind(&name)?;
                    super::ast::item_field(kind, &key)?;
                    return Err(missing);
                }
            };
            let mut mask = None;
            if self.peek() == Some("mask") {
                self.next += 1;
                mask = Some(self.word("a mask")?);
            }
            pairs.push(Pair { key, value, mask });
        }
        Ok(AstNode { name, inner, pairs })
    }

    fn action(&mut self) -> Result<AstNode, WordError> {
        let name = self.word("an action such as \"queue 0\" or \"drop\"")?;
        let spec = action_spec(&name)?;
        let mut pairs = Vec::new();
        for key in spec.positional {
            let named = self.peek().is_some_and(|word| spec.named.contains(&word));
            if self.at_symbol() || named {
                break;
            }
            let value = self.word(key)?;
            pairs.push(Pair { key: Word { text: (*key).to_owned(), at: value.at }, value, mask: None });
        }
        while !self.at_symbol() {
            let key = self.word("a word")?;
            if !spec.named.contains(&key.text.as_str()) {
                let message = match argument_names(spec) {
                    none if none.is_empty() => format!("\"{}\" takes no \"{}\"", spec.name, key.text),
                    names => format!("\"{}\" takes no \"{}\" here; it takes {names}", spec.name, key.text),
                };
                return word_error(key.at, Reason::UnknownWord, message);
            }
            let value = self.word(&format!("a value for {}", key.text))?;
            pairs.push(Pair { key, value, mask: None });
        }
        Ok(AstNode { name, inner: false, pairs })
    }
}

fn is_symbol(word: &str) -> bool {
    ["/", ",", ":", ARROW].contains(&word)
}
