//! Actions of rules, and the table of their written form.

use std::fmt;

use wirepath_wire::{EtherType, Tag};

use super::masked_value::{MaskedValue, ones};
use super::{Field, Reformat};
use wirepath_packet::PortId;

/// An action on each packet that matches the rule. Actions run in their order in the rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// Terminating: delivers to this receive queue of the port.
    Queue(u16),
    /// Terminating: delivers to one of several receive queues, by hash.
    Rss(Rss),
    /// Terminating: drops the packet.
    Drop,
    /// Terminating: passes the packet to the kernel's network stack.
    Kernel,
    /// Terminating: sends the packet out of this port.
    Redirect(PortId),
    /// Sends a copy of the packet, as it is at this point, out of this port.
    Mirror(PortId),
    /// Counts packets and bytes of this rule.
    Count,
    /// Sets the mark of the packet, a number of 24 bits.
    Mark(u32),
    /// Sets a field of the outermost header of its kind, and updates checksums.
    Set {
        /// A settable field.
        field: Field,
        /// Its new value.
        value: u128,
    },
    /// Decrements the TTL or hop limit of the outermost IP header. Packets whose TTL expires are dropped and
    /// counted.
    DecTtl,
    /// Pushes a VLAN tag in front of the tags that the packet has.
    PushVlan(Tag),
    /// Pops the outermost VLAN tag.
    PopVlan,
    /// Encapsulation or decapsulation.
    Reformat(Reformat),
    /// Drops packets above a rate, and counts them.
    Limit(Limit),
}

/// Receive-side scaling: distribution over receive queues by hash.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rss {
    /// Indirection table: queue numbers, which may repeat.
    pub queues: Vec<u16>,
    /// Hashed fields.
    pub on: HashFields,
    /// Toeplitz key; `None` selects the key of the port.
    pub key: Option<[u8; 40]>,
}

/// Maximum number of entries of [`Rss::queues`].
pub const MAX_RSS_QUEUES: usize = 512;

/// Bit set of the fields that a receive hash covers.
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
    /// Hash the inner headers instead of the outer ones.
    pub const INNER: u8 = 32;
    /// Addresses and ports; the default.
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
    /// Unit of `rate`.
    pub unit: RateUnit,
    /// Bucket size: packets for `Packets`, bytes for `Bits`. Above 0.
    pub burst: u64,
}

/// Unit of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RateUnit {
    /// Packets per second.
    Packets,
    /// Bits per second. Frames count without FCS.
    Bits,
}

impl Action {
    /// True for actions that decide the packet's destination. A rule has at most one, as its last action.
    ///
    /// Without one, a matching packet continues as if the rule had only changed it: at ingress to the next
    /// stage, at egress out of the port.
    pub fn is_terminating(&self) -> bool {
        matches!(self, Self::Queue(_) | Self::Rss(_) | Self::Drop | Self::Kernel | Self::Redirect(_))
    }

    /// Returns the entry in [`ACTIONS`].
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

    /// Returns the arguments in their written form, in the order of the table.
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
                let text = spec.format.print(spec.bits, MaskedValue { value: *value, mask: ones(spec.bits) });
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

/// Table entry of an action.
#[derive(Debug)]
pub struct ActionSpec {
    /// Written name.
    pub name: &'static str,
    /// Arguments directly after the name, in this order.
    pub positional: &'static [&'static str],
    /// Arguments that are written with their names, in any order.
    pub named: &'static [&'static str],
    /// Description of the action and its arguments.
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
    "queue" ("id") () "terminating: delivers to a receive queue of the port (0 to 65535)";
    "rss" () ("queues" "on" "key") "terminating: delivers to one of several queues (0-3+6), by a hash. \
        \"on\" names the hashed fields: src, dst, sport, dport, spi, joined by + (default: src+dst+sport+dport). \
        With \"inner\" among them, those of the inner headers are hashed. \
        The key has 80 hexadecimal digits; the default is the key of the port";
    "drop" () () "terminating: drops the packet";
    "kernel" () () "terminating: passes the packet to the kernel's network stack";
    "redirect" ("port") () "terminating: sends the packet out of another port";
    "mirror" ("port") () "sends a copy out of another port";
    "count" () () "counts packets and bytes";
    "mark" ("value") () "sets the mark of the packet (0 to 16777215)";
    "set" ("item" "field" "value") () "sets a field of the outermost header of its kind and updates checksums";
    "dec-ttl" () () "decrements the TTL or hop limit of the outermost IP header; drops the packet if it expires";
    "push-vlan" () ("vid" "pcp" "dei" "tpid") "pushes a VLAN tag; pcp and dei default to 0, tpid to 0x8100";
    "pop-vlan" () () "removes the outermost VLAN tag";
    "decap" ("kind" "header") () "l2: removes the tunnel around an Ethernet frame; l3: removes the tunnel around an \
        IP packet and adds this Ethernet header (14 or 18 bytes, hexadecimal)";
    "encap" ("kind" "header") () "l2: adds these headers (Ethernet to tunnel, hexadecimal); l3: replaces the \
        Ethernet header by them";
    "limit" ("rate" "unit") ("burst") "drops packets above this rate (pps or bps, suffixes k, M, G); burst in packets \
        or bytes, by default a tenth of a second at the rate";
}

/// Returns the table of actions as readable text.
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

/// Decodes pairs of hexadecimal digits.
pub(super) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("0x").unwrap_or(text).as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
    digits.chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

/// Formats queue numbers as runs of ascending numbers: `0-3+7`.
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

/// Parses the format of [`queues_text`].
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

/// Parses digits without a sign.
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

/// Parses the format of [`scaled`].
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
    fn queue_lists_and_scaled_numbers() {
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
