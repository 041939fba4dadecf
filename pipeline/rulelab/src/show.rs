//! Failures as people can read and replay them.

use std::fmt::Write as _;

use wirepath_pmd::flow::Rule;

use crate::fields::Noted;
use crate::headers::{Headers, TunnelPorts};
use crate::reference::Outcome;

/// Bytes as hexadecimal digits, two each: what `text2pcap` and scapy's `bytes.fromhex` read.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes from hexadecimal digits.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> =
        text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0)).collect())
}

/// A packet, as it came and as the reference reads it.
pub fn packet(frame: &[u8], noted: &Noted) -> String {
    let mut text = format!("packet  {}\n        {noted:?}\n", hex(frame));
    for (level, stack) in Headers::of(frame, &TunnelPorts::default()).stacks.iter().enumerate() {
        let _ = writeln!(text, "stack {level} {stack:?}");
    }
    text
}

/// An outcome.
pub fn outcome(outcome: &Outcome) -> String {
    let mut text =
        format!("rule {:?}, {:?}, mark {}, counted {:?}\n", outcome.rule, outcome.fate, outcome.mark, outcome.counted);
    for (port, copy) in &outcome.mirrors {
        let _ = writeln!(text, "        mirror {port}: {}", hex(&copy.bytes));
    }
    let _ = writeln!(text, "        frame {}", hex(&outcome.frame.bytes));
    text
}

/// Rules, one a line, with their numbers.
pub fn rules<'a>(rules: impl Iterator<Item = (u64, &'a Rule)>) -> String {
    rules.fold(String::new(), |mut text, (id, rule)| {
        let _ = writeln!(text, "rule {id:>3} {rule}");
        text
    })
}
