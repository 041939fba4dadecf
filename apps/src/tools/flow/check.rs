use std::fmt::Write as _;
use std::io::Write as _;

use serde_json::{Value, json};
use wirepath_pmd::settings::{ConfigError, Source};

use super::CheckArguments;
use super::input::{self, Input};
use super::lint::{Warning, warnings};
use crate::cli::{Failure, print, print_json};
use crate::rules::Entry;

pub(super) fn run(arguments: &CheckArguments, json: bool) -> Result<(), Failure> {
    let Input { sources, entries, errors, origin, .. } = input::read(&arguments.input)?;
    let warnings = warnings(&entries, &origin);
    let ok = errors.is_empty() && (warnings.is_empty() || !arguments.strict);
    if json {
        print_json(&report(&sources[0], &entries, &errors, &warnings, ok))?;
    } else {
        let mut text = String::new();
        for error in &errors {
            let _ = writeln!(text, "{}", shown(&sources, error, "error"));
        }
        for warning in &warnings {
            let error = entries[warning.rule].place.error(&warning.message);
            let _ = writeln!(text, "{}", shown(&sources, &error, "warning"));
        }
        // Nobody is left to hear that standard error is closed.
        let _ = std::io::stderr().write_all(text.as_bytes());
        let mut rules = String::new();
        for Entry { rule, .. } in &entries {
            let _ = if arguments.toml {
                writeln!(rules, "[[rule]]\nrule = \"{rule}\"\n")
            } else {
                writeln!(rules, "{rule}")
            };
        }
        print(rules)?;
    }
    match (ok, errors.len()) {
        (true, _) => Ok(()),
        (false, 0) => Err(Failure::usage(format!("{} warnings, and --strict takes them for errors", warnings.len()))),
        (false, n) => {
            let more = format!("{n} of {} rules are wrong", n + entries.len());
            Err(Failure::usage(if n == 1 { format!("1 error; {} rules are in order", entries.len()) } else { more }))
        }
    }
}

/// Says what is wrong with rules that something else than [`run`] wants to use.
pub(super) fn complain(input: &Input) -> Result<(), Failure> {
    let text: String = input.errors.iter().map(|error| shown(&input.sources, error, "error") + "\n").collect();
    // Nobody is left to hear that standard error is closed.
    let _ = std::io::stderr().write_all(text.as_bytes());
    match input.errors.len() {
        0 => Ok(()),
        1 => Err(Failure::usage("1 error")),
        n => Err(Failure::usage(format!("{n} errors"))),
    }
}

/// A complaint with the line that it is about, the word underlined.
pub(super) fn shown(sources: &[Source], error: &ConfigError, level: &str) -> String {
    let mut text = format!("{level}: {error}");
    let Some((line, column)) = error.position else { return text };
    let Some(source) = sources.iter().find(|source| source.name() == error.file) else { return text };
    let Some(found) = source.text().lines().nth(line - 1) else { return text };
    // What cannot be shown keeps its width.
    let found: String = found.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let rest = found.chars().skip(column - 1);
    let word = rest.take_while(|c| !c.is_whitespace() && !",\"'".contains(*c)).count().max(1);
    // Of a long line, the part around the word.
    let start = if column > 100 { column - 40 } else { 1 };
    let part: String = found.chars().skip(start - 1).take(160).collect();
    let carets = "^".repeat(word.min(80));
    let _ = write!(text, "\n  {part}\n  {}{carets}", " ".repeat(column - start));
    text
}

fn report(source: &Source, entries: &[Entry], errors: &[ConfigError], warnings: &[Warning], ok: bool) -> Value {
    let errors: Vec<Value> = errors
        .iter()
        .map(|error| {
            let (line, column) = error.position.unzip();
            json!({ "line": line, "column": column, "key": error.key, "message": error.message })
        })
        .collect();
    let warnings: Vec<Value> = warnings
        .iter()
        .map(|warning| {
            let line = entries[warning.rule].place.position().0;
            json!({ "line": line, "rule": warning.rule, "kind": warning.kind, "message": warning.message })
        })
        .collect();
    let rules: Vec<Value> = entries.iter().map(|entry| entry.rule.to_json()).collect();
    json!({ "ok": ok, "file": source.name(), "rules": rules, "errors": errors, "warnings": warnings })
}
