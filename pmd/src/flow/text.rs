//! The text form.
//!
//! ```text
//! rule    = direction [ "prio" number ] ":" pattern "=>" action { "," action }
//! pattern = "any" | item { "/" item }
//! item    = [ "inner" ] name { field value [ "mask" value ] }
//! action  = name { argument }
//! ```
//!
//! Words are separated by blanks; `/` between items stands alone.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::bits::Ports;
use super::tree::{Fault, Node, Pair, Tree, Word, action_spec, argument_names, fault};
use super::{Reason, Rule};

/// What is wrong with the text of a rule, and with which word of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextError {
    /// Which kind of error.
    pub reason: Reason,
    /// What was found and what would be right.
    pub message: String,
    /// Bytes of the text that the error is about; empty at the end where something is missing.
    pub span: Range<usize>,
    /// Column of the first of them, in characters, from 1.
    pub column: usize,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: {}", self.column, self.message)
    }
}

impl std::error::Error for TextError {}

impl TextError {
    /// The text with the word underlined, for terminals: two lines. `text` is what was parsed, on one line.
    pub fn underlined(&self, text: &str) -> String {
        let length = text.get(self.span.clone()).map_or(1, |word| word.chars().count().max(1));
        format!("{text}\n{}{}", " ".repeat(self.column - 1), "^".repeat(length))
    }
}

/// Longest text of a rule, bytes.
pub const MAX_TEXT: usize = 16 << 10;

impl FromStr for Rule {
    type Err = TextError;
    fn from_str(text: &str) -> Result<Self, TextError> {
        Rule::parse(text, Ports::default())
    }
}

impl Rule {
    /// Reads a rule whose ports may be called by name.
    pub fn parse(text: &str, ports: Ports<'_>) -> Result<Self, TextError> {
        let mut parser = Parser::new(text);
        let whole = parser.words.len();
        parser.spans.push(0..text.len());
        parser.tree(whole).and_then(|tree| tree.rule(ports)).map_err(|Fault { at, reason, message }| {
            let span = parser.spans.get(at).cloned().unwrap_or(0..text.len());
            let column = text.get(..span.start).map_or(1, |before| before.chars().count() + 1);
            TextError { reason, message, span, column }
        })
    }
}

struct Parser {
    /// The words; the number of each is its place in `spans`.
    words: Vec<String>,
    spans: Vec<Range<usize>>,
    next: usize,
    too_long: bool,
}

/// Characters that are words of their own.
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
        // The colon behind direction and priority needs no blank before it; addresses keep theirs.
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

    /// The next word, unless it is one of the symbols or there is none.
    fn word(&mut self, expected: &str) -> Result<Word, Fault> {
        match self.peek() {
            Some(text) if !is_symbol(text) => {
                let word = Word { text: text.to_owned(), at: self.next };
                self.next += 1;
                Ok(word)
            }
            _ => self.wrong(Reason::Missing, expected),
        }
    }

    fn at_symbol(&self) -> bool {
        self.peek().is_none_or(is_symbol)
    }

    fn wrong<T>(&mut self, reason: Reason, expected: &str) -> Result<T, Fault> {
        let at = self.next.min(self.words.len());
        match self.peek() {
            Some(found) => fault(at, reason, format!("found \"{found}\", expected {expected}")),
            None => {
                let end = self.spans.last().map_or(0, |whole| whole.end);
                self.spans.push(end..end);
                fault(self.spans.len() - 1, reason, format!("the text ends here, expected {expected}"))
            }
        }
    }

    fn symbol(&mut self, symbol: &str, expected: &str) -> Result<(), Fault> {
        if self.peek() == Some(symbol) {
            self.next += 1;
            return Ok(());
        }
        self.wrong(Reason::Syntax, expected)
    }

    fn tree(&mut self, whole: usize) -> Result<Tree, Fault> {
        if self.too_long {
            return fault(whole, Reason::Syntax, format!("a rule has at most {MAX_TEXT} bytes"));
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
            return self.wrong(Reason::Syntax, "\",\" and an action, or the end");
        }
        Ok(Tree { at: whole, direction, priority, items, actions })
    }

    fn item(&mut self) -> Result<Node, Fault> {
        let inner = self.peek() == Some("inner");
        if inner {
            self.next += 1;
        }
        let name = self.word("an item such as \"ipv4\", or \"any\"")?;
        // So that an unknown item is told before its fields are.
        super::tree::item_kind(&name)?;
        let mut pairs = Vec::new();
        while !self.at_symbol() {
            let key = self.word("a field")?;
            let value = match self.word(&format!("a value for {}", key.text)) {
                Ok(value) => value,
                Err(missing) => {
                    // What is no field needs no value.
                    let kind = super::tree::item_kind(&name)?;
                    super::tree::item_field(kind, &key)?;
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
        Ok(Node { name, inner, pairs })
    }

    fn action(&mut self) -> Result<Node, Fault> {
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
                return fault(key.at, Reason::UnknownWord, message);
            }
            let value = self.word(&format!("a value for {}", key.text))?;
            pairs.push(Pair { key, value, mask: None });
        }
        Ok(Node { name, inner: false, pairs })
    }
}

fn is_symbol(word: &str) -> bool {
    ["/", ",", ":", ARROW].contains(&word)
}
