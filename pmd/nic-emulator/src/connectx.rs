//! ConnectX generations and the capabilities of their flow rules. A test can restrict each capability in the
//! topology, by the keys of [`STEERING`].

use std::str::FromStr;

use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Integer, Key, List, Parsed, Settings};

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
        self.priorities = table.read(&PRIORITIES)?.unwrap_or(self.priorities);
        self.table_entries = table.read(&TABLE_ENTRIES)?.unwrap_or(self.table_entries);
        self.encap_bytes = table.read(&ENCAP_BYTES)?.unwrap_or(self.encap_bytes);
        self.modify_actions = table.read(&MODIFY_ACTIONS)?.unwrap_or(self.modify_actions);
        self.counters = table.read(&COUNTERS)?.unwrap_or(self.counters);
        self.firmware = table.read(&DEVX)?.unwrap_or(self.firmware);
        self.sniffer = table.read(&SNIFFER)?.unwrap_or(self.sniffer);
        self.entropy = table.read(&ENTROPY)?.unwrap_or(self.entropy);
        self.integrity = table.read(&INTEGRITY)?.unwrap_or(self.integrity);
        self.bug = table.read(&WRONG)?;
        if let Some(reformats) = bits(table, &REFORMATS)? {
            self.reformats = reformats;
        }
        if let Some(parts) = bits(table, &MATCH_PARTS)? {
            self.match_parts = parts;
        }
        Ok(())
    }
}

const PRIORITIES: Key<Integer<u16>> =
    Key::integer("priorities", 1..=32).absent("16").about("Number of priorities that a program may use.");
const TABLE_ENTRIES: Key<Integer<u32>> = Key::integer("table_entries", 1..=1 << 24)
    .unit("rules")
    .absent("65536")
    .about("Size of a rule table. There is one for each priority and direction.");
const ENCAP_BYTES: Key<Integer<u32>> = Key::integer("encap_bytes", 0..=1024)
    .unit("bytes")
    .absent("128")
    .about("Longest header that a rule may add to a packet.");
const MODIFY_ACTIONS: Key<Integer<u32>> = Key::integer("modify_actions", 0..=255)
    .absent("16 of a connectx-5, 32 of a connectx-6dx")
    .about("Number of header fields that one rule may set, add to or copy.");
const COUNTERS: Key<Integer<u32>> =
    Key::integer("counters", 0..=1 << 24).absent("1048576").about("Number of flow counters.");
const DEVX: Key<Flag> = Key::flag("devx")
    .absent("true")
    .about("Whether programs may send firmware commands (DevX): queues, transport interfaces and counters.");
const SNIFFER: Key<Flag> =
    Key::flag("sniffer").absent("true").about("Whether there are sniffer rules, which get a copy of each packet.");
const ENTROPY: Key<Flag> = Key::flag("entropy").absent("true").about(
    "Whether the device writes a hash of the inner packet into added headers: the UDP source port, or the low byte of \
     a GRE key.",
);
const INTEGRITY: Key<Flag> = Key::flag("integrity")
    .absent("false of a connectx-5, true of a connectx-6dx")
    .about("Whether rules can match the integrity bits, which say that checksums and lengths are good.");
const WRONG: Key<Choice<SteeringBug>> = Key::choice(
    "wrong",
    &[
        ("mask", SteeringBug::Mask, "the last bit of a mask is not compared"),
        ("order", SteeringBug::Order, "priorities whose numbers differ by four are exchanged"),
        ("tag", SteeringBug::Tag, "the last bit of a tag is inverted"),
        ("checksum", SteeringBug::Checksum, "a changed header has a wrong IPv4 checksum"),
        ("length", SteeringBug::Length, "an added header has a wrong IPv4 length"),
    ],
)
.absent("the device is right")
.about("A deliberate error of the device, which a test of rules must find.");
/// Kinds of packet reformat, indexed by number.
const REFORMATS: Key<List<Parsed<Reformat>>> =
    Key::parsed("reformats", "one of l2-tunnel-to-l2, l2-to-l2-tunnel, l3-tunnel-to-l2, l2-to-l3-tunnel")
        .list()
        .absent("all four")
        .about("Tunnel headers that rules can remove (to-l2) and add (l2-to).");
/// Parts of match parameters, indexed by number.
const MATCH_PARTS: Key<List<Parsed<MatchPart>>> =
    Key::parsed("match_parts", "one of outer, misc, inner, misc2, misc3, misc4, misc5")
        .list()
        .absent("outer, misc, inner, misc2 and misc3; a connectx-6dx also has misc5")
        .about(
            "Groups of match parameters that the device compares (`match_criteria_enable` of the firmware interface).",
        );

/// Table of a device's capabilities.
pub(crate) static STEERING: ConfigTable = ConfigTable {
    name: "steering",
    about: "Capabilities of a ConnectX for flow rules, where they differ from those of its class.",
    absent: "the capabilities of the class",
    keys: &[
        &PRIORITIES,
        &TABLE_ENTRIES,
        &MATCH_PARTS,
        &REFORMATS,
        &ENCAP_BYTES,
        &MODIFY_ACTIONS,
        &COUNTERS,
        &DEVX,
        &SNIFFER,
        &ENTROPY,
        &INTEGRITY,
        &WRONG,
    ],
    example: "[device.steering]\nencap_bytes = 64\nreformats = [\"l2-tunnel-to-l2\"]\n",
    ..ConfigTable::EMPTY
};

/// Defines a number that a word stands for: its index in the list.
macro_rules! indexes {
    ($($name:ident [$($word:literal)*])*) => { $(
        struct $name(u8);

        impl FromStr for $name {
            type Err = ();

            fn from_str(text: &str) -> std::result::Result<Self, ()> {
                let words: &[&str] = &[$($word),*];
                words.iter().position(|word| *word == text).map(|at| Self(at as u8)).ok_or(())
            }
        }

        impl From<$name> for u8 {
            fn from(it: $name) -> u8 {
                it.0
            }
        }
    )* };
}
indexes! {
    Reformat ["l2-tunnel-to-l2" "l2-to-l2-tunnel" "l3-tunnel-to-l2" "l2-to-l3-tunnel"]
    MatchPart ["outer" "misc" "inner" "misc2" "misc3" "misc4" "misc5"]
}

/// Reads a list of words as bits, one for each index. `None`: the key is missing.
fn bits<T: FromStr + Into<u8>>(table: &Settings<'_>, key: &Key<List<Parsed<T>>>) -> Result<Option<u8>> {
    let read = table.read(key)?;
    Ok(table.has(key).then(|| read.into_iter().fold(0, |bits, it| bits | 1 << it.value.into())))
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
