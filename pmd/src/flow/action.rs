//! What rules do with packets, and the table of how actions are written.

use std::fmt;

use wirepath_wire::{EtherType, Tag};

use super::bits::{Bits, ones};
use super::{Field, Reformat};
use crate::port::PortId;

/// Something that a rule does with each packet that it matches. Actions run in the order in which they stand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// Fate: to this receive queue of the port.
    Queue(u16),
    /// Fate: to one of several receive queues.
    Rss(Rss),
    /// Fate: nowhere.
    Drop,
    /// Fate: to the kernel's own network stack.
    Kernel,
    /// Fate: out of this port.
    Redirect(PortId),
    /// A copy of the packet as it is now goes out of this port.
    Mirror(PortId),
    /// Packets and bytes of this rule are counted.
    Count,
    /// The packet is marked with this number of 24 bits.
    Mark(u32),
    /// A field of the outermost header of its kind is set; checksums are kept right.
    Set {
        /// A settable field.
        field: Field,
        /// Its new value.
        value: u128,
    },
    /// The outermost IP header loses a hop; a packet that has none left is dropped, and that is counted.
    DecTtl,
    /// A VLAN tag is put on, outside of those that are there.
    PushVlan(Tag),
    /// The outermost VLAN tag is taken off.
    PopVlan,
    /// Encapsulation or decapsulation.
    Reformat(Reformat),
    /// Packets beyond a rate are dropped, and that is counted.
    Limit(Limit),
}

/// Spreading over receive queues.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rss {
    /// The queues, in the order of the indirection table; a queue may stand there more than once.
    pub queues: Vec<u16>,
    /// What is hashed.
    pub on: HashFields,
    /// Toeplitz key; the port's own if `None`.
    pub key: Option<[u8; 40]>,
}

/// Most entries of [`Rss::queues`].
pub const MAX_RSS_QUEUES: usize = 512;

/// Bits: what a receive hash covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HashFields(pub u8);

impl HashFields {
    /// Source IP address.
    pub const SRC: u8 = 1;
    /// Destination IP address.
    pub const DST: u8 = 2;
    /// TCP or UDP source port.
    pub const SRC_PORT: u8 = 4;
    /// TCP or UDP destination port.
    pub const DST_PORT: u8 = 8;
    /// Security parameters index of ESP.
    pub const SPI: u8 = 16;
    /// Of the inner headers instead of the outer ones.
    pub const INNER: u8 = 32;
    /// Addresses and ports, the default.
    pub const FIVE_TUPLE: Self = Self(Self::SRC | Self::DST | Self::SRC_PORT | Self::DST_PORT);

    pub(super) const NAMES: [(&'static str, u8); 6] = [
        ("src", Self::SRC),
        ("dst", Self::DST),
        ("sport", Self::SRC_PORT),
        ("dport", Self::DST_PORT),
        ("spi", Self::SPI),
        ("inner", Self::INNER),
    ];
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Limit {
    /// Units per second, above 0.
    pub rate: u64,
    /// Of what.
    pub unit: RateUnit,
    /// How much may come at once: packets for `Packets`, bytes for `Bits`. Above 0.
    pub burst: u64,
}

/// What a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RateUnit {
    /// Packets per second.
    Packets,
    /// Bits per second of frames without FCS.
    Bits,
}

impl Action {
    /// Whether it decides where the packet goes. A rule has at most one such action, the last; a packet that a rule without one
    /// has matched goes on as if the rule had only changed it: at ingress to the next stage, at egress out of the port.
    pub fn is_fate(&self) -> bool {
        matches!(self, Self::Queue(_) | Self::Rss(_) | Self::Drop | Self::Kernel | Self::Redirect(_))
    }

    /// Its entry in the table.
    pub fn spec(&self) -> &'static ActionSpec {
        let name = match self {
            Self::Queue(_) => "queue",
            Self::Rss(_) => "rss",
            Self::Drop => "drop",
            Self::Kernel => "kernel",
            Self::Redirect(_) => "redirect",
            Self::Mirror(_) => "mirror",
            Self::Count => "count",
            Self::Mark(_) => "mark",
            Self::Set { .. } => "set",
            Self::DecTtl => "dec-ttl",
            Self::PushVlan(_) => "push-vlan",
            Self::PopVlan => "pop-vlan",
            Self::Reformat(reformat) => reformat.kind().words().0,
            Self::Limit(_) => "limit",
        };
        ACTIONS.iter().find(|spec| spec.name == name).unwrap_or(&ACTIONS[0])
    }

    /// Its arguments as they are written, in the order of the table.
    pub(super) fn arguments(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Queue(queue) => vec![("id", queue.to_string())],
            Self::Rss(rss) => {
                let names = HashFields::NAMES.iter().filter(|(_, bit)| rss.on.0 & bit != 0).map(|(name, _)| *name);
                let mut words = vec![("queues", queues_text(&rss.queues)), ("on", names.collect::<Vec<_>>().join("+"))];
                if let Some(key) = &rss.key {
                    words.push(("key", hex(key)));
                }
                words
            }
            Self::Redirect(port) | Self::Mirror(port) => vec![("port", port.to_string())],
            Self::Mark(mark) => vec![("value", mark.to_string())],
            Self::Set { field, value } => {
                let spec = field.spec();
                let text = spec.format.print(spec.bits, Bits { value: *value, mask: ones(spec.bits) });
                vec![("item", spec.item.spec().name.to_owned()), ("field", spec.name.to_owned()), ("value", text)]
            }
            Self::PushVlan(tag) => {
                let mut words = vec![("vid", tag.id().to_string())];
                if tag.pcp() != 0 {
                    words.push(("pcp", tag.pcp().to_string()));
                }
                if tag.dei() {
                    words.push(("dei", "1".to_owned()));
                }
                if tag.tpid != EtherType::VLAN {
                    words.push(("tpid", format!("{:#06x}", tag.tpid.0)));
                }
                words
            }
            Self::Reformat(reformat) => {
                let mut words = vec![("kind", reformat.kind().words().1.to_owned())];
                if !reformat.bytes().is_empty() {
                    words.push(("header", reformat.hex()));
                }
                words
            }
            Self::Limit(limit) => {
                let unit = match limit.unit {
                    RateUnit::Packets => "pps",
                    RateUnit::Bits => "bps",
                };
                vec![("rate", scaled(limit.rate)), ("unit", unit.to_owned()), ("burst", scaled(limit.burst))]
            }
            Self::Drop | Self::Kernel | Self::Count | Self::DecTtl | Self::PopVlan => Vec::new(),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = self.spec();
        f.write_str(spec.name)?;
        for (key, word) in self.arguments() {
            if !spec.positional.contains(&key) {
                write!(f, " {key}")?;
            }
            write!(f, " {word}")?;
        }
        Ok(())
    }
}

/// One action of the language.
#[derive(Debug)]
pub struct ActionSpec {
    /// How it is written.
    pub name: &'static str,
    /// Arguments that stand behind the name, in this order.
    pub positional: &'static [&'static str],
    /// Arguments that are written with their name, in any order.
    pub named: &'static [&'static str],
    /// What it does and what the arguments look like.
    pub about: &'static str,
}

macro_rules! actions {
    ($($name:literal ($($positional:literal)*) ($($named:literal)*) $about:literal;)*) => {
        /// All actions.
        pub static ACTIONS: &[ActionSpec] = &[$(ActionSpec {
            name: $name, positional: &[$($positional),*], named: &[$($named),*], about: $about,
        },)*];
    };
}

actions! {
    "queue" ("id") () "fate: to a receive queue of the port (0 to 65535)";
    "rss" () ("queues" "on" "key") "fate: over several queues (0-3+6), by a hash on src, dst, sport, dport, spi (joined by +; the default is src+dst+sport+dport) of the outer or, with inner, the inner headers, with a key of 80 hexadecimal digits or the port's own";
    "drop" () () "fate: nowhere";
    "kernel" () () "fate: to the kernel's own network stack";
    "redirect" ("port") () "fate: out of another port";
    "mirror" ("port") () "a copy goes out of another port";
    "count" () () "packets and bytes are counted";
    "mark" ("value") () "the packet is marked (0 to 16777215)";
    "set" ("item" "field" "value") () "a field of the outermost header of its kind is set, checksums are kept right";
    "dec-ttl" () () "the outermost IP header loses a hop; with none left the packet is dropped";
    "push-vlan" () ("vid" "pcp" "dei" "tpid") "a VLAN tag is put on; pcp and dei are 0 and tpid 0x8100 unless given";
    "pop-vlan" () () "the outermost VLAN tag is taken off";
    "decap" ("kind" "header") () "l2: the inner Ethernet frame comes out of its tunnel; l3: the inner IP packet does, and gets this Ethernet header (14 or 18 bytes, hexadecimal)";
    "encap" ("kind" "header") () "l2: these headers (Ethernet to tunnel, hexadecimal) are put in front; l3: they replace the Ethernet header";
    "limit" ("rate" "unit") ("burst") "packets beyond this rate (pps or bps, suffixes k, M, G) are dropped; burst in packets or bytes, by default what a tenth of a second brings";
}

/// The table of actions as text for people.
pub fn actions_reference() -> String {
    use fmt::Write as _;
    let mut text = String::new();
    for spec in ACTIONS {
        let mut usage = spec.name.to_owned();
        for word in spec.positional {
            let _ = write!(usage, " {}", word.to_uppercase());
        }
        for word in spec.named {
            let _ = write!(usage, " [{word} {}]", word.to_uppercase());
        }
        let _ = writeln!(text, "{usage}: {}", spec.about);
    }
    text
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes from hexadecimal digits, two each.
pub(super) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("0x").unwrap_or(text).as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
    digits.chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

/// `0-3+7`: runs of ascending numbers.
fn queues_text(queues: &[u16]) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for &queue in queues {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(queue) => *last = queue,
            _ => runs.push((queue, queue)),
        }
    }
    let run = |(a, b): &(u16, u16)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(run).collect::<Vec<_>>().join("+")
}

/// Reads what [`queues_text`] writes.
pub(super) fn queues(text: &str) -> Option<Vec<u16>> {
    let mut queues = Vec::new();
    for run in text.split('+') {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        let (first, last): (u16, u16) = (number(first)?, number(last)?);
        if first > last || queues.len() + usize::from(last - first) >= MAX_RSS_QUEUES {
            return None;
        }
        queues.extend(first..=last);
    }
    Some(queues)
}

/// Digits only: no sign.
pub(super) fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

const SUFFIXES: [(&str, u64); 3] = [("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];

fn scaled(value: u64) -> String {
    match SUFFIXES.iter().find(|(_, unit)| value > 0 && value.is_multiple_of(*unit)) {
        Some((suffix, unit)) => format!("{}{suffix}", value / unit),
        None => value.to_string(),
    }
}

/// Reads what [`scaled`] writes.
pub(super) fn unscaled(text: &str) -> Option<u64> {
    let suffix = SUFFIXES.iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)));
    match suffix {
        Some((digits, unit)) => number::<u64>(digits).filter(|_| !digits.is_empty())?.checked_mul(*unit),
        None => number(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_numbers() {
        for text in ["0-3+7", "5", "3+2+1", "0-1+0-1", "65535"] {
            assert_eq!(queues_text(&queues(text).unwrap()), text);
        }
        for bad in ["", "3-1", "0-", "+", "0-600", "65536", "a"] {
            assert_eq!(queues(bad), None, "{bad}");
        }
        for text in ["1", "10k", "1500", "25G", "18446744073709551615"] {
            assert_eq!(scaled(unscaled(text).unwrap()), text);
        }
        for bad in ["", "k", "-1", "+1", "18446744073709551615k"] {
            assert_eq!(unscaled(bad), None, "{bad}");
        }
        assert_eq!(unhex("0xA5ff"), Some(vec![0xa5, 0xff]));
        assert_eq!((unhex("a"), unhex("+1")), (None, None));
    }
}
