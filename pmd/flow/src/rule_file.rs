//! Rule files in any of the three formats.
//!
//! ```text
//! # Text: a rule starts at the start of a line. Lines that start with a blank continue it.
//! ingress prio 10: port id wan / ipv4 dst 10.0.0.0/8
//!     => count, drop                       # a comment extends to the end of its line
//! ```
//!
//! TOML: `[[rule]]` tables, in a separate file or in a configuration. JSON: an array of rules, or an object
//! with such an array under `"rules"`. A rule is an object or a string in the text format.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use super::masked_value::Ports;
use super::{Rule, list_from_settings};
use wirepath_settings::{ConfigError, Source, Span};

/// A rule of a file, or the error in it.
#[derive(Debug)]
pub struct FileRule {
    /// Start of the rule in the file.
    pub span: Span,
    /// The rule, or its error.
    pub rule: Result<Rule, ConfigError>,
}

/// Format of a rule file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// Text, one rule per line.
    Text,
    /// `[[rule]]` tables.
    Toml,
    /// An array of objects.
    Json,
}

impl FileFormat {
    /// Detects the format by the extension of the file name, else by the first characters.
    pub fn of(source: &Source) -> Self {
        match Path::new(source.name()).extension().and_then(|extension| extension.to_str()) {
            Some("toml") => return Self::Toml,
            Some("json") => return Self::Json,
            Some("rules" | "txt") => return Self::Text,
            _ => {}
        }
        let lines = source.text().lines().map(str::trim);
        let text = lines.clone().find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
        let array = text.strip_prefix('[').is_some_and(|rest| {
            let next = rest.trim_start().chars().next();
            // A JSON array continues on the next line or with `{` or `"`. A TOML table is `[name]` or
            // `[[name]]`.
            next.is_none_or(|c| "{\"]".contains(c))
        });
        let first = text.split(|c: char| c.is_whitespace() || c == ':' || c == '=').next().unwrap_or_default();
        if text.starts_with('{') || array {
            Self::Json
        } else if text.starts_with('[')
            || (!["ingress", "egress"].contains(&first) && text.replace("=>", "").contains('='))
        {
            Self::Toml
        } else {
            Self::Text
        }
    }
}

/// Reads the rules of a file. Invalid rules are entries of the list. `Err` is returned only if the file as a
/// whole is invalid.
///
/// A TOML file may contain only `[[rule]]` tables. [`list_from_settings`] reads the rules of a configuration.
pub fn read(source: &Source, form: FileFormat, ports: Ports<'_>) -> Result<Vec<FileRule>, ConfigError> {
    match form {
        FileFormat::Text => Ok(text(source, ports)),
        FileFormat::Json => json(source, ports),
        FileFormat::Toml => {
            let document = source.parse()?;
            let top = document.settings();
            let rules = list_from_settings(&top, ports)?;
            top.finish()?;
            Ok(rules)
        }
    }
}

/// Reads the rules of a file. The error has those of all invalid rules.
pub fn read_all(source: &Source, ports: Ports<'_>) -> Result<Vec<(Span, Rule)>, ConfigError> {
    let listed = read(source, FileFormat::of(source), ports)?;
    let (mut rules, mut errors) = (Vec::with_capacity(listed.len()), Vec::new());
    for FileRule { span, rule } in listed {
        match rule {
            Ok(rule) => rules.push((span, rule)),
            Err(error) => errors.extend(error.split().0),
        }
    }
    ConfigError::combined(errors).map_or(Ok(rules), Err)
}

fn text(source: &Source, ports: Ports<'_>) -> Vec<FileRule> {
    // Blanks replace comments, so that every byte keeps its offset.
    let mut blanked = String::with_capacity(source.text().len());
    for line in source.text().split_inclusive('\n') {
        let end = line.find('#').unwrap_or(line.len());
        blanked.push_str(&line[..end]);
        blanked.extend(line[end..].bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
    }
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut at = 0;
    for line in blanked.split_inclusive('\n') {
        let range = at..at + line.trim_end().len();
        at += line.len();
        if range.is_empty() {
            continue;
        }
        match ranges.last_mut() {
            Some(last) if line.starts_with([' ', '\t']) => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    let listed = |range: Range<usize>| {
        let start = range.start;
        let rule = Rule::parse(&blanked[range], ports);
        let rule = rule.map_err(|error| source.span(start + error.span.start, "").error(error.message));
        FileRule { span: source.span(start, ""), rule }
    };
    ranges.into_iter().map(listed).collect()
}

/// Other keys that a JSON report with rules may have.
const IGNORED: [&str; 5] = ["ok", "file", "ports", "errors", "warnings"];

fn json(source: &Source, ports: Ports<'_>) -> Result<Vec<FileRule>, ConfigError> {
    let value: Value = serde_json::from_str(source.text()).map_err(|error| {
        let message = error.to_string();
        // Drop the position in the text of serde_json: the error has its own.
        let message = message.split(" at line ").next().unwrap_or_default();
        let mut refused = source.span(0, "").error(message);
        refused.position = Some((error.line().max(1), error.column().max(1)));
        refused
    })?;
    let refuse = |path: &str, message: &str| Err(source.span(offset_of(source.text(), path), path).error(message));
    let (list, prefix) = match &value {
        Value::Array(list) => (list, ""),
        Value::Object(object) => {
            if let Some(key) = object.keys().find(|key| *key != "rules" && !IGNORED.contains(&key.as_str())) {
                return refuse(key, "unknown key; expected \"rules\" with an array of rules");
            }
            match object.get("rules") {
                Some(Value::Array(list)) => (list, "rules"),
                Some(_) => return refuse("rules", "expected an array of rules"),
                None => return refuse("", "expected an array of rules, or an object with one under \"rules\""),
            }
        }
        _ => return refuse("", "expected an array of rules, or an object with one under \"rules\""),
    };
    let offsets = offsets(source.text());
    let offset = |path: &str| offsets.iter().find(|(known, _)| known == path).map_or(0, |(_, offset)| *offset);
    let listed = |(i, value): (usize, &Value)| {
        let path = format!("{prefix}[{i}]");
        let span = source.span(offset(&path), path.clone());
        let rule = match value {
            Value::String(text) => Rule::parse(text, ports).map_err(|error| {
                let start = offset(&path);
                let raw = source.text().get(start + 1..).unwrap_or_default();
                let plain = raw.starts_with(text.as_str());
                let at = if plain { start + 1 + error.span.start } else { start };
                source.span(at, path.clone()).error(error.message)
            }),
            value => Rule::from_json(value, ports).map_err(|error| {
                let whole = match error.path.as_str() {
                    "" => path.clone(),
                    inside => format!("{path}.{inside}"),
                };
                source.span(offset(&whole), whole.clone()).error(error.message)
            }),
        };
        FileRule { span, rule }
    };
    Ok(list.iter().enumerate().map(listed).collect())
}

fn offset_of(text: &str, path: &str) -> usize {
    offsets(text).into_iter().find(|(known, _)| known == path).map_or(0, |(_, offset)| offset)
}

/// Returns the offset of each value of a well-formed JSON text, by its path.
fn offsets(text: &str) -> Vec<(String, usize)> {
    let mut scanner = Scanner { text, at: 0, found: Vec::new() };
    scanner.value(String::new());
    scanner.found
}

struct Scanner<'t> {
    text: &'t str,
    at: usize,
    found: Vec<(String, usize)>,
}

impl Scanner<'_> {
    fn peek(&mut self) -> Option<u8> {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.text.as_bytes().get(self.at).copied()
    }

    /// Moves past the string that starts here, and returns its decoded text.
    fn string(&mut self) -> String {
        let start = self.at;
        self.at += 1;
        let mut escaped = false;
        for &byte in &self.text.as_bytes()[self.at.min(self.text.len())..] {
            self.at += 1;
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => break,
                _ => {}
            }
        }
        serde_json::from_str(&self.text[start..self.at]).unwrap_or_default()
    }

    /// Records a value and its contents. The recursion is bounded: `serde_json` has read the text, and it
    /// stops at 128 levels.
    fn value(&mut self, path: String) {
        let first = self.peek();
        self.found.push((path.clone(), self.at));
        match first {
            Some(b'"') => drop(self.string()),
            Some(open @ (b'{' | b'[')) => {
                self.at += 1;
                let mut index = 0;
                loop {
                    match self.peek() {
                        None => return,
                        Some(b'}' | b']') => {
                            self.at += 1;
                            return;
                        }
                        Some(b',') => self.at += 1,
                        Some(b'"') if open == b'{' => {
                            let key = self.string();
                            if self.peek() == Some(b':') {
                                self.at += 1;
                            }
                            let inside = if path.is_empty() { key } else { format!("{path}.{key}") };
                            self.value(inside);
                        }
                        Some(_) => {
                            self.value(format!("{path}[{index}]"));
                            index += 1;
                        }
                    }
                }
            }
            Some(_) => {
                let rest = &self.text.as_bytes()[self.at..];
                let word = rest.iter().take_while(|byte| !b",]} \t\r\n".contains(byte)).count();
                self.at += word.max(1);
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(name: &str, text: &str) -> Vec<Result<String, String>> {
        let source = Source::new(name, text);
        let rules = read(&source, FileFormat::of(&source), Ports(&[("lan", wirepath_packet::PortId::new(1))])).unwrap();
        let show = |listed: FileRule| listed.rule.map(|rule| rule.to_string()).map_err(|error| error.to_string());
        rules.into_iter().map(show).collect()
    }

    #[test]
    fn text_has_comments_and_continued_lines() {
        let text =
            "# first\ningress: port id lan / ipv4 # any\n  => drop\n\n\tegress: any => count\negress: any => cont\n";
        let text = text.replace("\n\tegress", "\negress");
        assert_eq!(
            read_text("a.rules", &text),
            [
                Ok("ingress prio 0: port id 1 / ipv4 => drop".to_owned()),
                Ok("egress prio 0: any => count".to_owned()),
                Err("a.rules:6:16: unknown action \"cont\"; did you mean \"count\"?".to_owned()),
            ]
        );
        assert!(read_text("a.rules", "# nothing\n\n").is_empty());
        // A comment does not move the text after it.
        assert_eq!(
            read_text("-", "ingress: ipv4 # é\n dst 10.0.0.300 => drop"),
            [Err("-:2:6: found \"10.0.0.300\", expected an IPv4 address or prefix such as 10.0.0.0/8".to_owned())]
        );
    }

    #[test]
    fn all_formats_give_the_same_rules_and_positions() {
        let toml =
            "[[rule]]\nrule = \"ingress prio 1: udp dst 53 => drop\"\n[[rule]]\nrule = 'ingress: udp dst 5x => drop'\n";
        let json = "[\n \"ingress prio 1: udp dst 53 => drop\",\n \
                    {\"direction\": \"ingress\", \"pattern\": [{\"item\": \"udp\", \"dst\": \"5x\"}],\n\
                    \"actions\": [{\"action\": \"drop\"}]},\n \"ingress: udp dst 5x => drop\"]";
        let good = "ingress prio 1: udp dst 53 => drop".to_owned();
        let wrong = "found \"5x\", expected a number from 0 to 65535";
        assert_eq!(read_text("-", toml), [Ok(good.clone()), Err(format!("-:4:26: rule[1].rule: {wrong}"))]);
        assert_eq!(
            read_text("-", json),
            [
                Ok(good.clone()),
                Err(format!("-:3:62: [1].pattern[0].dst: {wrong}")),
                Err(format!("-:5:20: [2]: {wrong}"))
            ]
        );
        let wrapped = format!("{{\"ok\": true, \"rules\": {json}}}");
        let rules = read_text("x.json", &wrapped);
        assert_eq!((rules.len(), &rules[0]), (3, &Ok(good)));
    }

    #[test]
    fn file_formats_are_detected() {
        let form = |text: &str| FileFormat::of(&Source::new("-", text));
        assert_eq!(form("# x\ningress: any => drop"), FileFormat::Text);
        assert_eq!(form("ingress prio 1:any=>drop"), FileFormat::Text);
        assert_eq!(form("ingres: any => drop"), FileFormat::Text, "an arrow is no assignment");
        assert_eq!(form("[[rule]]\n"), FileFormat::Toml);
        assert_eq!(form("[workers]\n"), FileFormat::Toml);
        assert_eq!(form("buffers = 1\n"), FileFormat::Toml);
        assert_eq!(form("[\n\"ingress\"]"), FileFormat::Json);
        assert_eq!(form("[ {"), FileFormat::Json);
        assert_eq!(form("{\n"), FileFormat::Json);
        assert_eq!(form(""), FileFormat::Text);
        assert_eq!(FileFormat::of(&Source::new("a.toml", "{")), FileFormat::Toml);
    }

    #[test]
    fn invalid_json_is_refused_with_its_position() {
        let error = |text: &str| {
            read(&Source::new("r.json", text), FileFormat::Json, Ports::default()).unwrap_err().to_string()
        };
        assert_eq!(error("[\n1,]"), "r.json:2:3: trailing comma");
        assert_eq!(error("{\"rule\": 1}"), "r.json:1:10: rule: unknown key; expected \"rules\" with an array of rules");
        assert!(error("5").contains("expected an array of rules"));
        assert!(error("{}").contains("\"rules\""));
        assert_eq!(error("{\"rules\": 7}"), "r.json:1:11: rules: expected an array of rules");
    }

    #[test]
    fn offsets_of_invalid_json_terminate() {
        for text in ["", "[", "{\"a\"", "{\"a\":", "\"\\", "[1 2", "{1", "}", "[\"\\u12\"]", "{\"é\": [\"ü\"]}"] {
            let _ = offsets(text);
        }
    }
}
