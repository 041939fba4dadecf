//! The reference for people.

use std::fmt::Write as _;

use wirepath_settings::{Form, KeySpec};

use super::{Listed, Missing, Reference, Selected, describe};

/// Columns of a line at most.
const WIDTH: usize = 96;

/// Returns the list of all tables with their keys.
pub fn overview(reference: &Reference) -> String {
    let mut text = String::new();
    for listed in &reference.tables {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &heading(reference, listed);
        let keys: Vec<&str> = listed.table.keys.iter().map(|key| key.name()).collect();
        if !keys.is_empty() {
            paragraph(&mut text, "  keys: ", &keys.join(", "));
        }
    }
    text
}

/// Returns the description of tables and keys.
pub fn details(reference: &Reference, selected: &[Selected<'_>]) -> String {
    let mut text = String::new();
    let mut shown: Option<&Listed> = None;
    for Selected { listed, key } in selected {
        if !shown.is_some_and(|shown| std::ptr::eq(shown, *listed)) {
            if shown.is_some() {
                text.push('\n');
            }
            text += &heading(reference, listed);
            if key.is_none() {
                about_table(&mut text, reference, listed);
            }
            shown = Some(*listed);
        }
        match key {
            Some(key) => about_key(&mut text, *key, key.name().len()),
            None => {
                let width = listed.table.keys.iter().map(|key| key.name().len()).max().unwrap_or_default();
                listed.table.keys.iter().for_each(|key| about_key(&mut text, *key, width));
                about_others(&mut text, listed);
            }
        }
    }
    text
}

fn heading(reference: &Reference, listed: &Listed) -> String {
    let mut text = listed.heading();
    if !reference.is_common(listed) {
        _ = write!(text, " of {}", listed.programs.join(", "));
    }
    text.push('\n');
    paragraph(&mut text, "  ", listed.table.about);
    text
}

fn about_table(text: &mut String, reference: &Reference, listed: &Listed) {
    if !listed.table.absent.is_empty() {
        paragraph(text, "  Without it: ", listed.table.absent);
    }
    if !listed.also.is_empty() {
        paragraph(text, "  Also written as: ", &listed.also.join(", "));
    }
    let inside: Vec<&str> = reference.inside(listed).map(|inner| inner.path.as_str()).collect();
    if !inside.is_empty() {
        paragraph(text, "  Tables inside: ", &inside.join(", "));
    }
}

fn about_key(text: &mut String, key: &dyn KeySpec, width: usize) {
    let name = key.name();
    let form = key.form();
    text.push('\n');
    paragraph(text, &format!("  {name:width$}  "), &describe(&form));
    let indent = " ".repeat(width + 4);
    paragraph(text, &indent, &Missing::of(key).to_string());
    if !key.when().is_empty() {
        paragraph(text, &indent, &format!("with: {}", key.when()));
    }
    paragraph(text, &indent, key.about());
    if let Form::Choice(words) = form {
        let widest = words.iter().map(|word| word.word.len() + 2).max().unwrap_or_default();
        for word in words {
            let quoted = format!("\"{}\"", word.word);
            let needs = key.needs(word.word).map_or_else(String::new, |line| format!(" (needs {line})"));
            paragraph(text, &format!("{indent}  {quoted:widest$}  "), &format!("{}{needs}", word.about));
        }
    }
}

fn about_others(text: &mut String, listed: &Listed) {
    if !listed.table.others.is_empty() {
        text.push('\n');
        paragraph(text, "  Further keys: ", listed.table.others);
    }
    if !listed.table.example.is_empty() {
        text.push_str("\n  Example:\n");
        listed.table.example.lines().for_each(|line| {
            let line = format!("    {line}");
            text.push_str(line.trim_end());
            text.push('\n');
        });
    }
}

/// Appends words in lines of at most [`WIDTH`] columns. The first line begins with `lead`, the others are indented by
/// its length.
fn paragraph(text: &mut String, lead: &str, words: &str) {
    let indent = lead.chars().count();
    let (mut line, mut is_empty) = (lead.to_owned(), true);
    for word in words.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            text.push_str(line.trim_end());
            text.push('\n');
            (line, is_empty) = (" ".repeat(indent), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    text.push_str(line.trim_end());
    text.push('\n');
}
