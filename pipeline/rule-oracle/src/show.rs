//! Text output of failures, to read and to replay.

use std::fmt::Write as _;

use wirepath_flow::Rule;

use crate::fields::PacketMetadata;
use crate::headers::{Headers, TunnelPorts};
use crate::reference::Outcome;

/// Returns bytes as hexadecimal digits, two each, as `text2pcap` and scapy's `bytes.fromhex` read them.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Parses bytes from hexadecimal digits.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> =
        text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0)).collect())
}

/// Formats a packet: its bytes, its metadata, and the headers that the reference parses.
pub fn packet(frame: &[u8], metadata: &PacketMetadata) -> String {
    let mut text = format!("packet  {}\n        {metadata:?}\n", hex(frame));
    for (level, stack) in Headers::of(frame, &TunnelPorts::default()).stacks.iter().enumerate() {
        let _ = writeln!(text, "stack {level} {stack:?}");
    }
    text
}

/// Formats an outcome.
pub fn outcome(outcome: &Outcome) -> String {
    let mut text = format!(
        "rule {:?}, {:?}, mark {}, counted {:?}\n",
        outcome.rule, outcome.verdict, outcome.mark, outcome.counted
    );
    for (port, copy) in &outcome.mirrors {
        let _ = writeln!(text, "        mirror {port}: {}", hex(&copy.bytes));
    }
    let _ = writeln!(text, "        frame {}", hex(&outcome.frame.bytes));
    text
}

/// Formats rules with their ids, one per line.
pub fn rules<'a>(rules: impl Iterator<Item = (u64, &'a Rule)>) -> String {
    rules.fold(String::new(), |mut text, (id, rule)| {
        let _ = writeln!(text, "rule {id:>3} {rule}");
        text
    })
}
