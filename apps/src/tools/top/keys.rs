//! Keys of a terminal without line editing.
//!
//! The reader of `crossterm` is not used: it never returns from a terminal that was closed, or in the middle of an
//! escape sequence.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits for keys and returns them; no keys after `limit` or a signal, `None` if the terminal was closed.
pub(super) fn read(limit: Duration) -> Option<Vec<KeyEvent>> {
    let stdin = io::stdin();
    let timeout = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    let mut fds = [PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)];
    match poll(&mut fds, Some(&timeout)) {
        Ok(0) | Err(Errno::INTR) => return Some(Vec::new()),
        Ok(_) => {}
        Err(_) => return None,
    }
    let mut bytes = [0; 1024];
    match rustix::io::read(stdin.as_fd(), &mut bytes) {
        Ok(0) => None,
        Ok(n) => Some(keys(&bytes[..n])),
        Err(Errno::INTR | Errno::AGAIN) => Some(Vec::new()),
        Err(_) => None,
    }
}

/// Returns the keys that a terminal sends as these bytes (ECMA-48 and the sequences of xterm). Unknown sequences are
/// no keys.
fn keys(mut bytes: &[u8]) -> Vec<KeyEvent> {
    let mut keys = Vec::new();
    while let [first, rest @ ..] = bytes {
        let (code, left) = match (first, rest) {
            (0x1b, [b'[' | b'O', sequence @ ..]) => {
                let end = sequence.iter().position(|byte| (0x40..=0x7e).contains(byte)).unwrap_or(sequence.len());
                let (sequence, left) = sequence.split_at((end + 1).min(sequence.len()));
                (special(sequence), left)
            }
            (0x1b, _) => (Some(KeyCode::Esc), rest),
            (b'\r' | b'\n', _) => (Some(KeyCode::Enter), rest),
            (b'\t', _) => (Some(KeyCode::Tab), rest),
            (0x7f | 0x08, _) => (Some(KeyCode::Backspace), rest),
            (control @ 0x01..=0x1a, _) => {
                keys.push(KeyEvent::new(KeyCode::Char((control | 0x60).into()), KeyModifiers::CONTROL));
                (None, rest)
            }
            _ => {
                let length = match first {
                    0xf0.. => 4,
                    0xe0.. => 3,
                    0xc0.. => 2,
                    _ => 1,
                };
                let (text, left) = bytes.split_at(length.min(bytes.len()));
                let c = std::str::from_utf8(text).ok().and_then(|text| text.chars().next());
                (c.filter(|c| !c.is_control()).map(KeyCode::Char), left)
            }
        };
        keys.extend(code.map(|code| KeyEvent::new(code, KeyModifiers::NONE)));
        bytes = left;
    }
    keys
}

fn special(sequence: &[u8]) -> Option<KeyCode> {
    Some(match sequence {
        b"A" => KeyCode::Up,
        b"B" => KeyCode::Down,
        b"H" | b"1~" | b"7~" => KeyCode::Home,
        b"F" | b"4~" | b"8~" => KeyCode::End,
        b"5~" => KeyCode::PageUp,
        b"6~" => KeyCode::PageDown,
        b"Z" => KeyCode::BackTab,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_keys() {
        let codes = |bytes: &[u8]| keys(bytes).into_iter().map(|key| key.code).collect::<Vec<_>>();
        let text = |c| KeyCode::Char(c);
        assert_eq!(codes(b"q/\xc3\xa4\r"), [text('q'), text('/'), text('\u{e4}'), KeyCode::Enter]);
        assert_eq!(
            codes(b"\x1b[A\x1bOB\x1b[5~\x1b[Z\t"),
            [KeyCode::Up, KeyCode::Down, KeyCode::PageUp, KeyCode::BackTab, KeyCode::Tab]
        );
        assert_eq!(codes(b"\x1b"), [KeyCode::Esc]);
        assert_eq!(codes(b"\x7f\x1b[1;5Cx"), [KeyCode::Backspace, text('x')]);
        assert_eq!(keys(b"\x03"), [KeyEvent::new(text('c'), KeyModifiers::CONTROL)]);
        // What no terminal sends is no key, and never more than one for each byte.
        for seed in 0..2000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let bytes: Vec<u8> = (0..random.usize(..40)).map(|_| random.u8(..)).collect();
            assert!(keys(&bytes).len() <= bytes.len(), "seed {seed}");
        }
        assert!(codes(b"\xff\xc3").is_empty());
        assert!(codes(b"\x1b[12").is_empty());
    }
}
