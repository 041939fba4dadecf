use std::borrow::Cow;
use std::fmt;

use serde::Serialize;
use wirepath_pipeline::Summary;

use super::{Failure, live, lost_lines, outbox};

/// Escapes control characters for output on a terminal. Names and reasons come from files, devices and other
/// programs, so their control characters must not reach the terminal. Line ends stay.
pub(super) fn sanitized(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.escape_default().to_string())
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_control) {
        return text.into();
    }
    text.chars().map(|c| if is_control(c) { escape(c) } else { c.to_string() }).collect::<String>().into()
}

/// Prints text on standard output with control characters escaped. A closed pipe (`| head`) is not an error.
pub fn print(text: impl fmt::Display) -> Result<(), Failure> {
    print_raw(&sanitized(&text.to_string()))
}

fn print_raw(text: &str) -> Result<(), Failure> {
    live::end();
    outbox::STDOUT.deliver(text.into()).map_err(|e| Failure::failed(format!("standard output: {e}")))
}

/// Writes a control sequence to a terminal.
pub fn print_control(sequence: &str) -> Result<(), Failure> {
    print_raw(sequence)
}

/// Shows text on standard output with control characters escaped, without waiting. If standard output cannot
/// take the text, its lines are lost and counted. It serves displays of running programs.
pub fn show(text: impl fmt::Display) {
    outbox::STDOUT.offer(sanitized(&text.to_string()).as_bytes());
}

/// Prints text on standard error, for messages that belong to a result.
pub fn print_error(text: &str) {
    live::end();
    // An error is ignored: if standard error is closed, the message cannot be delivered.
    let _ = outbox::STDERR.deliver(text.into());
}

/// Prints the summary of a run, followed by the program's own report. With `json`, the summary alone is one
/// JSON object, with `lost_lines`: the number of lines that could not be written before.
pub fn print_summary(summary: &Summary, report: impl fmt::Display, json: bool) -> Result<(), Failure> {
    live::end();
    // Lines that wait now are written or lost before they are counted.
    let _ = outbox::STDERR.flush();
    let _ = outbox::STDOUT.flush();
    let lost = lost_lines();
    if json {
        let mut object = summary.to_json();
        object["lost_lines"] = lost.into();
        return print_json(&object);
    }
    let lost = if lost > 0 { format!("  {lost} lines of output could not be written\n") } else { String::new() };
    print(format_args!("{summary}{lost}{report}"))
}

/// Prints `value` as one JSON object on one line of standard output.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|e| Failure::failed(format!("JSON: {e}")))?;
    print_raw(&json_line(&line))
}

/// Completes a line of JSON, which escapes most control characters, but not DEL and those above it.
pub(super) fn json_line(json: &str) -> String {
    escaped(json, |c| format!("\\u{:04x}", u32::from(c))).into_owned() + "\n"
}

/// A rate per second with a unit prefix, such as `12.34 M`.
#[derive(Clone, Copy, Debug)]
pub struct Rate(pub f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (divisor, unit) = match self.0.abs() {
            x if x < 1e3 => return write!(f, "{:.0} ", self.0),
            x if x < 1e6 => (1e3, "k"),
            x if x < 1e9 => (1e6, "M"),
            _ => (1e9, "G"),
        };
        write!(f, "{:.2} {unit}", self.0 / divisor)
    }
}

/// A table of text columns, each as wide as its widest cell.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// True for columns whose cells are aligned to the right.
    right: Vec<bool>,
}

impl Table {
    /// Creates a table with these headings.
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self::with_columns(headings.map(|heading| (heading.to_owned(), false)))
    }

    /// Creates a table with these headings, each with whether its cells are aligned to the right.
    pub fn with_columns(columns: impl IntoIterator<Item = (String, bool)>) -> Self {
        let (headings, right) = columns.into_iter().unzip();
        Self { rows: vec![headings], right }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.push(cells);
    }

    /// Adds a row.
    pub fn push(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|row| row.get(c)).map(|s| s.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                line += &if *right { format!("{cell:>width$}  ") } else { format!("{cell:width$}  ") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_and_end_without_blanks() {
        let mut table = Table::new(["A", "B"]);
        table.row(["long cell".into(), "x".into()]);
        assert_eq!(table.to_string(), "A          B\nlong cell  x\n");
        let mut table = Table::with_columns([("A".to_owned(), true), ("B".to_owned(), false)]);
        table.push(["12345".to_owned(), "x".to_owned()]);
        assert_eq!(table.to_string(), "    A  B\n12345  x\n");
    }

    #[test]
    fn control_characters_are_shown() {
        assert_eq!(sanitized("a\x1b]0;title\x07\u{9b}31m\r\nb\tc"), "a\\u{1b}]0;title\\u{7}\\u{9b}31m\\r\nb\tc");
        assert!(matches!(sanitized("plain, with ä\n"), Cow::Borrowed(_)));
        let line = json_line("{\"x\":\"\u{9b}\"}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).unwrap()["x"], "\u{9b}");
    }

    #[test]
    fn rates_have_two_digits_and_a_unit() {
        let text = |x| Rate(x).to_string();
        assert_eq!([text(7.0), text(1234.0), text(28.1e6), text(2e9)], ["7 ", "1.23 k", "28.10 M", "2.00 G"]);
    }
}
