//! MPLS label stacks (RFC 3032; traffic class RFC 5462), in UDP (RFC 7510) and in GRE (RFC 4023).

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};

/// UDP destination port (RFC 7510 section 3).
pub const PORT: u16 = 6635;
/// Maximum number of entries of a label stack.
pub const MAX_ENTRIES: usize = 16;

header! {
    /// One label stack entry. Everything after it is payload, including further entries.
    4 bytes, short: MplsTruncated {
        /// Label (20 bits), traffic class (3 bits), bottom of stack (1 bit), time to live (8 bits).
        [0; 4] word, set_word: u32;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

impl View<'_> {
    /// Returns the entry as a value.
    pub fn entry(&self) -> Repr {
        Repr::parse(self)
    }
}

/// A label stack entry as a value (RFC 3032 section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Label; only its low 20 bits are written. 0 to 15 are reserved.
    pub label: u32,
    /// Traffic class, 3 bits.
    pub traffic_class: u8,
    /// Bottom of stack: this is the last entry.
    pub bottom: bool,
    /// Time to live, hops.
    pub ttl: u8,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        let word = view.word();
        Repr { label: word >> 12, traffic_class: (word >> 9 & 7) as u8, bottom: word & 0x100 != 0, ttl: word as u8 }
    }

    /// Writes the entry to the front of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let class = u32::from(self.traffic_class & 7) << 9;
        let word = (self.label & 0xf_ffff) << 12 | class | u32::from(self.bottom) << 8 | u32::from(self.ttl);
        put::<0, 4, HEADER_LEN>(header_mut(out)?, word.write());
        Ok(HEADER_LEN)
    }
}

/// Iterator over the entries of a label stack, from top to bottom, at most [`MAX_ENTRIES`]. An error is the
/// last item.
#[derive(Clone, Copy, Debug)]
pub struct Entries<'a> {
    rest: &'a [u8],
    left: usize,
    done: bool,
}

impl<'a> Entries<'a> {
    /// Iterates over the entries at the front of `bytes`.
    pub fn of(bytes: &'a [u8]) -> Entries<'a> {
        Entries { rest: bytes, left: MAX_ENTRIES, done: false }
    }

    /// Returns the bytes after the consumed entries.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl Iterator for Entries<'_> {
    type Item = Result<Repr, ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let entry = match (self.left, View::new(self.rest)) {
            (0, _) => Err(ParseError::MplsTooDeep),
            (_, view) => view.map(|view| (view.entry(), view.payload())),
        };
        self.left = self.left.saturating_sub(1);
        self.done = !matches!(entry, Ok((Repr { bottom: false, .. }, _)));
        Some(entry.map(|(entry, rest)| {
            self.rest = rest;
            entry
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn rfc3032_figure_1() {
        let entry = Repr { label: 0x1_2345, traffic_class: 5, bottom: true, ttl: 64 };
        let mut out = [0xa5; 5];
        assert_eq!(entry.emit(&mut out), Ok(4));
        assert_eq!(out, [0x12, 0x34, 0x5b, 64, 0xa5]);
        assert_eq!(View::new(&out).unwrap().entry(), entry);
        assert_eq!(entry.emit(&mut out[..3]), Err(BufferTooShort { need: 4, have: 3 }));
    }

    #[test]
    fn label_stacks_end_at_the_bottom_bit() {
        let mut bytes = [0u8; 80];
        bytes[10] = 1;
        let mut entries = Entries::of(&bytes);
        assert_eq!(entries.by_ref().map(|e| e.unwrap().bottom).collect::<Vec<_>>(), [false, false, true]);
        assert_eq!(entries.rest().len(), 68);
        assert_eq!(Entries::of(&bytes[..11]).last(), Some(Err(ParseError::MplsTruncated)));
        bytes[10] = 0;
        assert_eq!(Entries::of(&bytes).count(), MAX_ENTRIES + 1);
        assert_eq!(Entries::of(&bytes).last(), Some(Err(ParseError::MplsTooDeep)));
    }
}
