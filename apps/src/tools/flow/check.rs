use std::fmt::Write as _;

use serde_json::{Value, json};
use wirepath_flow::Ports;
use wirepath_settings::{ConfigError, Source};

use super::CheckArguments;
use super::input::{self, Input, PortNames};
use super::lint::{Warning, warnings};
use wirepath::cli::{Failure, print, print_error, print_json};
use wirepath::rules::Entry;

pub(super) fn run(arguments: &CheckArguments, json: bool) -> Result<(), Failure> {
    let mut input = input::read(&arguments.input)?;
    input.refuse_on_ports()?;
    let Input { sources, entries, errors, ports, .. } = input;
    let warnings = warnings(&entries, &ports);
    let ok = errors.is_empty() && (warnings.is_empty() || !arguments.strict);
    if json {
        print_json(&report((&sources[0], &ports), &entries, &errors, &warnings, ok))?;
    } else {
        let mut text = String::new();
        for error in &errors {
            let _ = writeln!(text, "{}", format_error(&sources, error, "error"));
        }
        for warning in &warnings {
            let error = entries[warning.rule].span.error(&warning.message);
            let _ = writeln!(text, "{}", format_error(&sources, &error, "warning"));
        }
        print_error(&text);
        let mut rules = String::new();
        let names = ports.names();
        for Entry { rule, .. } in &entries {
            let rule = rule.named(Ports(&names));
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
            Err(Failure::usage(if n == 1 { format!("1 error; {} rules are valid", entries.len()) } else { more }))
        }
    }
}

/// Prints the errors of an input and fails if there are any.
pub(super) fn report_errors(input: &Input) -> Result<(), Failure> {
    let text: String = input.errors.iter().map(|error| format_error(&input.sources, error, "error") + "\n").collect();
    print_error(&text);
    match input.errors.len() {
        0 => Ok(()),
        1 => Err(Failure::usage("1 error")),
        n => Err(Failure::usage(format!("{n} errors"))),
    }
}

/// Formats an error with its source line and the word underlined.
pub(super) fn format_error(sources: &[Source], error: &ConfigError, level: &str) -> String {
    let mut text = format!("{level}: {error}");
    let Some((line, column)) = error.position else { return text };
    let Some(source) = sources.iter().find(|source| source.name() == error.file) else { return text };
    let Some(found) = source.line(line) else { return text };
    // Control characters become blanks of the same width.
    let found: String = found.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let rest = found.chars().skip(column - 1);
    let word = rest.take_while(|c| !c.is_whitespace() && !",\"'".contains(*c)).count().max(1);
    // A long line is cut to the part around the word.
    let start = if column > 100 { column - 40 } else { 1 };
    let part: String = found.chars().skip(start - 1).take(160).collect();
    let carets = "^".repeat(word.min(80));
    let _ = write!(text, "\n  {part}\n  {}{carets}", " ".repeat(column - start));
    text
}

fn report(
    (source, ports): (&Source, &PortNames),
    entries: &[Entry],
    errors: &[ConfigError],
    warnings: &[Warning],
    ok: bool,
) -> Value {
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
            let line = entries[warning.rule].span.position().0;
            json!({ "line": line, "rule": warning.rule, "kind": warning.kind, "message": warning.message })
        })
        .collect();
    let rules: Vec<Value> = entries.iter().map(|entry| entry.rule.to_json()).collect();
    // The rules name ports by their numbers, which are indices of this list.
    let ports: Vec<&str> = ports.ports.iter().map(|(name, _)| name.as_str()).collect();
    json!({
        "ok": ok, "file": source.name(), "ports": ports, "rules": rules, "errors": errors, "warnings": warnings
    })
}
