//! The reference as a page of a guide.

use std::fmt::Write as _;

use wirepath_settings::{Form, KeySpec};

use super::{Listed, Missing, Reference, describe};

/// Returns a page with all tables. `title` is its heading, `file` says what the tables are in, and `command` writes the
/// page.
pub fn page(reference: &Reference, title: &str, file: &str, command: &str) -> String {
    let mut page = format!(
        "# {title}\n\n\
         This page describes every table and key of {file}. Do not edit it: this command writes it.\n\n\
         ```bash\n{command}\n```\n\n\
         It is a file in TOML. Unknown keys and wrong values are errors, and one run reports all of \
         them.\n\
         A key that is left out has the value in the column \"Default\", or the meaning that it states.\n\n\
         | Table | Content |\n|---|---|\n"
    );
    for listed in &reference.tables {
        let (heading, about) = (listed.heading(), cell(listed.table.about));
        _ = writeln!(page, "| [`{heading}`](#{}) | {about} |", anchor(&heading));
    }
    reference.tables.iter().for_each(|listed| section(&mut page, reference, listed));
    page
}

/// The anchor that common renderers of Markdown give to a heading of code.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_ascii_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn section(page: &mut String, reference: &Reference, listed: &Listed) {
    let table = listed.table;
    _ = writeln!(page, "\n## `{}`\n", listed.heading());
    lines(page, "", table.about);
    let mut notes = Vec::new();
    if !reference.is_common(listed) {
        notes.push(format!("Program: {}.", listed.programs.join(", ")));
    }
    if !table.absent.is_empty() {
        notes.push(format!("Without the table: {}.", table.absent));
    }
    if !listed.also.is_empty() {
        notes.push(format!("Also as `{}`.", listed.also.join("`, `")));
    }
    let inside: Vec<String> = reference.inside(listed).map(|inner| format!("`{}`", inner.path)).collect();
    if !inside.is_empty() {
        notes.push(format!("Tables inside: {}.", inside.join(", ")));
    }
    if !table.others.is_empty() {
        notes.push(format!("Further keys: {}.", table.others));
    }
    if !notes.is_empty() {
        page.push('\n');
        notes.iter().for_each(|note| lines(page, "- ", note));
    }
    if !table.keys.is_empty() {
        page.push_str("\n| Key | Value | Default | Meaning |\n|---|---|---|---|\n");
        table.keys.iter().for_each(|key| row(page, *key));
    }
    if !table.example.is_empty() {
        _ = writeln!(page, "\n```toml\n{}\n```", table.example.trim_end());
    }
}

/// Appends a paragraph in lines of at most 120 columns.
fn lines(page: &mut String, lead: &str, words: &str) {
    let mut line = lead.to_owned();
    for word in words.split(' ') {
        if line.len() > lead.len() && line.chars().count() + 1 + word.chars().count() > 120 {
            _ = writeln!(page, "{line}");
            line = " ".repeat(lead.len());
        }
        if line.len() > lead.len() {
            line.push(' ');
        }
        line += word;
    }
    _ = writeln!(page, "{line}");
}

fn row(page: &mut String, key: &dyn KeySpec) {
    let form = key.form();
    let mut meaning = key.about().to_owned();
    if !key.when().is_empty() {
        _ = write!(meaning, " With `{}`.", key.when());
    }
    if let Form::Choice(words) = &form {
        for word in words {
            let needs = key.needs(word.word).map_or_else(String::new, |line| format!(" (needs `{line}`)"));
            _ = write!(meaning, "<br>`\"{}\"`: {}{needs}", word.word, word.about);
        }
    }
    let default = match Missing::of(key) {
        Missing::Required => "required".to_owned(),
        Missing::Default(value) => format!("`{value}`"),
        Missing::Means(meaning) => meaning.to_owned(),
    };
    let (value, default, meaning) = (cell(&describe(&form)), cell(&default), cell(&meaning));
    _ = writeln!(page, "| `{}` | {value} | {default} | {meaning} |", key.name());
}

/// Text in the cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
