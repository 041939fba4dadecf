//! Names and texts that an application registers for itself: drop reasons and counters.

#![deny(unsafe_code)]

use thiserror::Error;

/// Longest name in bytes.
pub const MAX_NAME: usize = 48;
/// Longest text in bytes.
pub const MAX_TEXT: usize = 200;

/// Error of a registration. `what` is the kind of thing, such as `drop reason`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// The name has other characters than the names of displays and metrics may have, or is too long.
    #[error("{what} {name}: a name has 1 to {MAX_NAME} lower-case letters, digits and \"_\", and begins with a letter")]
    Name {
        /// Kind of thing.
        what: &'static str,
        /// Beginning of the name, quoted and escaped.
        name: String,
    },
    /// The text is empty, too long, or has control characters.
    #[error("{what} \"{name}\": its text needs 1 to {MAX_TEXT} bytes in one line, without control characters")]
    Text {
        /// Kind of thing.
        what: &'static str,
        /// Name.
        name: String,
    },
    /// The name belongs to another thing of this kind.
    #[error("the {what} \"{name}\" exists already: \"{about}\"")]
    Taken {
        /// Kind of thing.
        what: &'static str,
        /// Name.
        name: String,
        /// Text of the other thing.
        about: String,
    },
    /// There are as many as there can be.
    #[error("{what} \"{name}\": a program can register at most {most}")]
    TooMany {
        /// Kind of thing.
        what: &'static str,
        /// Name.
        name: String,
        /// Maximum number.
        most: usize,
    },
}

/// Checks a name, which becomes a key in JSON, a part of the name of a metric and a word in displays.
///
/// # Errors
/// [`RegisterError::Name`] if it does not begin with a lower-case letter, has other characters than lower-case letters,
/// digits and `_`, or has more than [`MAX_NAME`] bytes.
pub fn check_name(what: &'static str, name: &str) -> Result<(), RegisterError> {
    let word = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    let begins = name.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    if begins && name.len() <= MAX_NAME && name.bytes().all(word) {
        return Ok(());
    }
    let shown: String = name.chars().take(MAX_NAME).collect();
    Err(RegisterError::Name { what, name: format!("{shown:?}") })
}

/// Checks the text for operators.
///
/// # Errors
/// [`RegisterError::Text`] if it is empty, has control characters, or has more than [`MAX_TEXT`] bytes.
pub fn check_text(what: &'static str, name: &str, text: &str) -> Result<(), RegisterError> {
    // The separators of lines and paragraphs, and the marks that change the direction of what follows.
    let hidden = |c: char| matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.trim().is_empty() && text.len() <= MAX_TEXT && !text.chars().any(|c| c.is_control() || hidden(c)) {
        return Ok(());
    }
    Err(RegisterError::Text { what, name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_and_texts_are_refused() {
        let long = "a".repeat(MAX_NAME + 1);
        let hostile = ["", "1st", "_a", "Upper", "a b", "a-b", "a\"b", "a\nb", "a\u{1b}[2J", "\u{e9}t\u{e9}", &long];
        for name in hostile {
            let error = check_name("counter", name).unwrap_err().to_string();
            assert!(!error.contains(['\n', '\u{1b}']) && error.len() < 300, "{error}");
            assert!(error.starts_with("counter \"") && error.contains("lower-case letters"), "{error}");
        }
        assert_eq!(check_name("counter", &"a".repeat(MAX_NAME)), Ok(()));
        assert_eq!(check_name("counter", "packets_2_b"), Ok(()));

        let long = "a".repeat(MAX_TEXT + 1);
        for text in ["", "  ", "a\nb", "a\u{1b}[2J", "a\u{202e}b", "a\u{85}b", &long] {
            let error = check_text("counter", "x", text).unwrap_err().to_string();
            assert!(error.starts_with("counter \"x\": its text"), "{error}");
        }
        assert_eq!(check_text("counter", "x", "a \"quoted\" text \u{e9}"), Ok(()));
    }
}
