//! ConnectX generations and the capabilities of their flow rules. A test can restrict each capability in the
//! topology.
//!
//! ```toml
//! class = "connectx-6dx"                # connectx-5
//! steering = { priorities = 16, table_entries = 65536, encap_bytes = 128, modify_actions = 32, counters = 1048576,
//!              match_parts = ["outer", "misc", "inner", "misc2", "misc3", "misc5"],
//!              reformats = ["l2-tunnel-to-l2", "l2-to-l2-tunnel", "l3-tunnel-to-l2", "l2-to-l3-tunnel"],
//!              devx = true, sniffer = true, entropy = true, integrity = true }
//! ```
//!
//! The key `wrong` makes the device misbehave: `"mask"`, `"order"`, `"tag"`, `"checksum"` or `"length"`
//! ([`SteeringBug`]).
//! ([`SteeringBug`]).

use wirepath_settings::{ConfigError, Settings};

type Result<T> = std::result::Result<T, ConfigError>;

/// ConnectX generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// ConnectX-5.
    ConnectX5,
    /// ConnectX-6 Dx.
    ConnectX6Dx,
}

impl Class {
    /// Configuration values.
    pub(crate) const NAMES: &[(&str, Self)] = &[("connectx-5", Self::ConnectX5), ("connectx-6dx", Self::ConnectX6Dx)];

    /// Returns the PCI device number.
    pub fn part(self) -> u32 {
        match self {
            Self::ConnectX5 => 0x1017,
            Self::ConnectX6Dx => 0x101d,
        }
    }

    /// Returns the major version of the firmware.
    pub fn firmware(self) -> u16 {
        match self {
            Self::ConnectX5 => 16,
            Self::ConnectX6Dx => 22,
        }
    }
}

/// Capabilities of the flow rules of a ConnectX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteeringSpec {
    /// Number of priorities that a program may use.
    pub priorities: u16,
    /// Rules per table; there is one table for each priority and direction.
    pub table_entries: u32,
    /// Parts of the match parameters that the device compares, as bits of `match_criteria_enable`.
    pub match_parts: u8,
    /// True if the device compares the integrity bits of the layers.
    pub integrity: bool,
    /// Supported kinds of packet reformat, one bit each.
    pub reformats: u8,
    /// Maximum length of an encapsulation header, in bytes.
    pub encap_bytes: u32,
    /// Maximum number of header modifications per rule.
    pub modify_actions: u32,
    /// Number of flow counters.
    pub counters: u32,
    /// True if programs may use firmware commands (DevX). Queues, transport interfaces and counters are emulated.
    pub firmware: bool,
    /// True if sniffer rules are supported, which receive a copy of every packet.
    pub sniffer: bool,
    /// True if the device writes entropy into encapsulation headers: the UDP source port, or the low byte of
    /// a GRE key.
    pub entropy: bool,
    /// Deliberate bug, for tests of the tests.
    pub bug: Option<SteeringBug>,
}

/// A deliberate bug of the device. A comparison test must detect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteeringBug {
    /// The last bit of a mask is not compared.
    Mask,
    /// Priorities whose numbers differ by four are exchanged.
    Order,
    /// The last bit of a tag is inverted.
    Tag,
    /// A header modification leaves a wrong IPv4 header checksum.
    Checksum,
    /// An encapsulation header has a wrong IPv4 length.
    Length,
}

impl SteeringSpec {
    /// Returns the capabilities of an unrestricted ConnectX.
    pub(crate) fn of(class: Class) -> Self {
        Self {
            priorities: 16,
            table_entries: 1 << 16,
            // Tunnel header words and integrity bits exist from ConnectX-6 Dx on.
            match_parts: if class == Class::ConnectX5 { 0x1f } else { 0x5f },
            integrity: class != Class::ConnectX5,
            reformats: 0x0f,
            encap_bytes: 128,
            modify_actions: if class == Class::ConnectX5 { 16 } else { 32 },
            counters: 1 << 20,
            firmware: true,
            sniffer: true,
            entropy: true,
            bug: None,
        }
    }

    /// Overrides capabilities with the keys of a table `steering`.
    pub(crate) fn read(&mut self, table: &Settings<'_>) -> Result<()> {
        self.priorities = table.integer("priorities", 1..=32)?.unwrap_or(self.priorities);
        self.table_entries = table.integer("table_entries", 1..=1 << 24)?.unwrap_or(self.table_entries);
        self.encap_bytes = table.integer("encap_bytes", 0..=1024)?.unwrap_or(self.encap_bytes);
        self.modify_actions = table.integer("modify_actions", 0..=255)?.unwrap_or(self.modify_actions);
        self.counters = table.integer("counters", 0..=1 << 24)?.unwrap_or(self.counters);
        self.firmware = table.get("devx")?.unwrap_or(self.firmware);
        self.sniffer = table.get("sniffer")?.unwrap_or(self.sniffer);
        self.entropy = table.get("entropy")?.unwrap_or(self.entropy);
        self.integrity = table.get("integrity")?.unwrap_or(self.integrity);
        self.bug = table.choice("wrong", BUGS)?;
        if table.has("reformats") {
            self.reformats = bits(table, "reformats", REFORMATS)?;
        }
        if table.has("match_parts") {
            self.match_parts = bits(table, "match_parts", MATCH_PARTS)?;
        }
        Ok(())
    }
}

/// Configuration values of `wrong`.
const BUGS: &[(&str, SteeringBug)] = &[
    ("mask", SteeringBug::Mask),
    ("order", SteeringBug::Order),
    ("tag", SteeringBug::Tag),
    ("checksum", SteeringBug::Checksum),
    ("length", SteeringBug::Length),
];

/// Configuration values of packet reformats, indexed by kind.
const REFORMATS: &[&str] = &["l2-tunnel-to-l2", "l2-to-l2-tunnel", "l3-tunnel-to-l2", "l2-to-l3-tunnel"];

/// Configuration values of the parts of match parameters, indexed by part.
const MATCH_PARTS: &[&str] = &["outer", "misc", "inner", "misc2", "misc3", "misc4", "misc5"];

/// Reads a list of words as bits; the bit number is the index in `words`.
fn bits(table: &Settings<'_>, key: &'static str, words: &[&str]) -> Result<u8> {
    let mut bits = 0;
    for word in table.list::<String>(key, "a list of words")? {
        match words.iter().position(|known| **known == *word.value) {
            Some(at) => bits |= 1 << at,
            None => {
                return Err(
                    table.error_in(key, format!("found '{}', expected one of {}", word.value, words.join(", ")))
                );
            }
        }
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use wirepath_settings::Source;

    use super::*;
    use crate::topology::Topology;

    fn read(keys: &str) -> Result<SteeringSpec> {
        let text = format!("[[device]]\nkind = 'mlx5'\n{keys}\n[[device.port]]\n");
        Topology::read(&Source::new("t.toml", &*text)).map(|topology| topology.devices[0].mlx5.steering)
    }

    #[test]
    fn topology_keys_restrict_class_capabilities() {
        assert_eq!(read("").unwrap(), SteeringSpec::of(Class::ConnectX6Dx));
        assert_eq!(read("class = 'connectx-5'").unwrap().modify_actions, 16);
        let spec =
            read("steering = { reformats = ['l3-tunnel-to-l2'], match_parts = ['outer', 'misc2'], devx = true }")
                .unwrap();
        assert_eq!((spec.reformats, spec.match_parts, spec.firmware), (0b100, 0b1001, true));
        assert_eq!(read("steering = { reformats = [] }").unwrap().reformats, 0);
        let message = |keys: &str| read(keys).unwrap_err().to_string();
        assert!(
            message("steering = { match_parts = ['outr'] }")
                .contains("found 'outr', expected one of outer, misc, inner")
        );
        assert!(message("steering = { priorites = 3 }").contains("did you mean \"priorities\"?"));
        assert!(message("class = 'connectx-4'").contains("connectx-5"));
    }
}
