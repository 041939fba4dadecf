use std::fmt;
use std::io::{self, Write};

use serde::Serialize;

use super::Failure;

/// Prints text on standard output. A reader that went away (`| head`) is no failure.
pub fn print(text: impl fmt::Display) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Failure::failed(format!("standard output: {e}"))),
        _ => Ok(()),
    }
}

/// Prints `value` as one JSON object on one line of standard output.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|e| Failure::failed(format!("JSON: {e}")))?;
    print(format_args!("{line}\n"))
}

/// Says that a configuration is in order, and how many of each thing it has: what `--check` prints.
pub fn print_check(counts: &[(&str, usize)], json: bool) -> Result<(), Failure> {
    if json {
        let mut object = serde_json::Map::new();
        object.insert("ok".to_owned(), true.into());
        object.extend(counts.iter().map(|(name, count)| ((*name).to_owned(), (*count).into())));
        return print_json(&object);
    }
    let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name}: {count}")).collect();
    print(format_args!("configuration is in order; {}\n", counts.join(", ")))
}

/// A number per second as people say it: `12.34 M`.
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

/// Columns of text, each as wide as its widest cell.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With these headings.
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self { rows: vec![headings.map(str::to_owned).to_vec()] }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|row| row.get(c)).map(|s| s.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line += &format!("{cell:width$}  ");
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
    }

    #[test]
    fn rates_have_two_digits_and_a_unit() {
        let text = |x| Rate(x).to_string();
        assert_eq!([text(7.0), text(1234.0), text(28.1e6), text(2e9)], ["7 ", "1.23 k", "28.10 M", "2.00 G"]);
    }
}
