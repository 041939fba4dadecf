//! Generations of ConnectX, and what their rules can do: data, so that a test can take something away.
//!
//! ```toml
//! class = "connectx-6dx"                # connectx-5
//! steering = { priorities = 16, table_entries = 65536, match_parts = ["outer", "misc", "inner", "misc2", "misc3", "misc5"],
//!              reformats = ["l2-tunnel-to-l2", "l2-to-l2-tunnel", "l3-tunnel-to-l2", "l2-to-l3-tunnel"], encap_bytes = 128,
//!              modify_actions = 32, counters = 1048576, devx = false, sniffer = true, entropy = true, integrity = true }
//! ```
//!
//! `wrong` plants an error: `"mask"`, `"order"`, `"tag"`, `"checksum"` or `"length"` ([`Wrong`]).

use wirepath_settings::{ConfigError, Settings};

type Result<T> = std::result::Result<T, ConfigError>;

/// Generations of ConnectX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// ConnectX-5.
    ConnectX5,
    /// ConnectX-6 Dx.
    ConnectX6Dx,
}

impl Class {
    /// As the topology has them.
    pub(crate) const NAMES: &[(&str, Self)] = &[("connectx-5", Self::ConnectX5), ("connectx-6dx", Self::ConnectX6Dx)];

    /// PCI device number.
    pub fn part(self) -> u32 {
        match self {
            Self::ConnectX5 => 0x1017,
            Self::ConnectX6Dx => 0x101d,
        }
    }

    /// Major number of its firmware.
    pub fn firmware(self) -> u16 {
        match self {
            Self::ConnectX5 => 16,
            Self::ConnectX6Dx => 22,
        }
    }
}

/// What the rules of a ConnectX can do, so that a test can take something away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteeringSpec {
    /// Priorities that a program may name.
    pub priorities: u16,
    /// Rules of a table: there is one for each priority and direction.
    pub table_entries: u32,
    /// Parts of the match parameters that are compared, as `match_criteria_enable` names them.
    pub match_parts: u8,
    /// Whether the bits are compared that say which layers are in order.
    pub integrity: bool,
    /// Kinds of packet reformat, a bit for each.
    pub reformats: u8,
    /// Longest header that is put on.
    pub encap_bytes: u32,
    /// Header modifications of a rule.
    pub modify_actions: u32,
    /// Flow counters.
    pub counters: u32,
    /// Programs may make firmware objects (DevX), of which there are flow counters.
    pub firmware: bool,
    /// Rules that have a copy of everything.
    pub sniffer: bool,
    /// The device writes entropy into the headers that it puts on: UDP source port, low byte of a GRE key.
    pub entropy: bool,
    /// An error.
    pub wrong: Option<Wrong>,
}

/// An error in what a device does, so that a comparison can show that it would find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// The last bit of a mask is not compared.
    Mask,
    /// Priorities that are four apart change places.
    Order,
    /// The last bit of a tag is turned over.
    Tag,
    /// A header modification leaves a wrong IPv4 header checksum.
    Checksum,
    /// A header that is put on has a wrong IPv4 length.
    Length,
}

impl SteeringSpec {
    /// Of a ConnectX as it is sold.
    pub(crate) fn of(class: Class) -> Self {
        Self {
            priorities: 16,
            table_entries: 1 << 16,
            // Words of tunnel headers and the order of layers: from ConnectX-6 Dx on.
            match_parts: if class == Class::ConnectX5 { 0x1f } else { 0x5f },
            integrity: class != Class::ConnectX5,
            reformats: 0x0f,
            encap_bytes: 128,
            modify_actions: if class == Class::ConnectX5 { 16 } else { 32 },
            counters: 1 << 20,
            firmware: false,
            sniffer: true,
            entropy: true,
            wrong: None,
        }
    }

    /// Takes over what a table `steering` says.
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
        self.wrong = table.choice("wrong", WRONG)?;
        if table.has("reformats") {
            self.reformats = bits(table, "reformats", REFORMATS)?;
        }
        if table.has("match_parts") {
            self.match_parts = bits(table, "match_parts", MATCH_PARTS)?;
        }
        Ok(())
    }
}

/// Names of errors.
const WRONG: &[(&str, Wrong)] = &[
    ("mask", Wrong::Mask),
    ("order", Wrong::Order),
    ("tag", Wrong::Tag),
    ("checksum", Wrong::Checksum),
    ("length", Wrong::Length),
];

/// Names of the kinds of packet reformat, by number.
const REFORMATS: &[&str] = &["l2-tunnel-to-l2", "l2-to-l2-tunnel", "l3-tunnel-to-l2", "l2-to-l3-tunnel"];

/// Names of the parts of match parameters, in their order.
const MATCH_PARTS: &[&str] = &["outer", "misc", "inner", "misc2", "misc3", "misc4", "misc5"];

/// A list of words, as bits by their place among `words`.
fn bits(table: &Settings<'_>, key: &'static str, words: &[&str]) -> Result<u8> {
    let mut bits = 0;
    for word in table.list::<String>(key, "a list of words")? {
        match words.iter().position(|known| **known == *word.value) {
            Some(at) => bits |= 1 << at,
            None => {
                return Err(table.error_in(key, format!("found '{}', expected of {}", word.value, words.join(", "))));
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
    fn a_device_can_what_its_class_can_but_for_what_is_taken_away() {
        assert_eq!(read("").unwrap(), SteeringSpec::of(Class::ConnectX6Dx));
        assert_eq!(read("class = 'connectx-5'").unwrap().modify_actions, 16);
        let spec =
            read("steering = { reformats = ['l3-tunnel-to-l2'], match_parts = ['outer', 'misc2'], devx = true }")
                .unwrap();
        assert_eq!((spec.reformats, spec.match_parts, spec.firmware), (0b100, 0b1001, true));
        assert_eq!(read("steering = { reformats = [] }").unwrap().reformats, 0);
        let message = |keys: &str| read(keys).unwrap_err().to_string();
        assert!(
            message("steering = { match_parts = ['outr'] }").contains("found 'outr', expected of outer, misc, inner")
        );
        assert!(message("steering = { priorites = 3 }").contains("did you mean \"priorities\"?"));
        assert!(message("class = 'connectx-4'").contains("connectx-5"));
    }
}
