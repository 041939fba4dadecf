//! Flow rules in the NIC: capabilities of a port's rule hardware, and installation of rules.
//!
//! Drivers implement [`RuleHardware`] for the device. The hardware stage (`wirepath_pipeline::rules`) decides
//! which rules to install, in which order and with which tags. It uses only features that a driver lists in
//! [`RuleCapabilities`]. A listed feature must have **exactly** the meaning that it has in [`wirepath_flow`].
//!
//! Capabilities are data. `wirepath devices --rules` writes them as JSON, and `wirepath flow explain
//! --capabilities FILE` reads them. All names in them are words of the rule language; unknown names are
//! refused.
//!
//! # The two tables
//! A device has an ingress table and an egress table. Either may be missing.
//!
//! - **Ingress.** The device compares packets with the installed rules level by level, and applies the first
//!   rule that matches. A packet without a matching rule takes the default path: to one of the port's receive
//!   queues, **without a tag**. The default reception rules of the driver lie behind all levels.
//! - **Egress.** The same for packets on their way to the wire. A packet without a matching rule leaves
//!   unchanged. `meta data` in a pattern is the transmit metadata of a packet: its mark if
//!   [`Flags::TX_METADATA`](wirepath_packet::offload::Flags::TX_METADATA) is set, else 0.
//!
//! # Order
//! The stage never installs two rules on one level that can match the same packet. It installs rules from the
//! first level to the last, and removes them in reverse. The installed part is thus correct at every moment,
//! and a driver applies one change at a time.

use std::fmt;

use serde::{Deserialize, Serialize};

use wirepath_flow::{Action, Direction, Field, Item, ItemKind, MaskedValue, ReformatKind, Rss, Rule};

/// Reserved tags. Untagged packets have 0; some devices give 0xffffff to packets that no rule has tagged.
pub const RESERVED_TAGS: [u32; 2] = [0, 0xff_ffff];

/// Bits of the largest tag.
pub const TAG_BITS: u8 = 24;

/// Interface for the installation of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleBackend {
    /// `ibv_create_flow`: matching, tags, drops and counters.
    Ibv,
    /// mlx5dv matchers and flows: with header rewriting and packet reformat.
    Dv,
}

impl RuleBackend {
    /// Name of the interface.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ibv => "ibv_create_flow",
            Self::Dv => "mlx5dv",
        }
    }
}

/// Capabilities of a port's rule hardware.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleCapabilities {
    /// Name of the driver.
    pub driver: String,
    /// Name of the device, as used by the driver.
    pub device: String,
    /// Interface for the installation of rules.
    pub backend: RuleBackend,
    /// Bits of the tag that a rule can set as [mark](wirepath_packet::Packet::mark) of received packets, at
    /// most [`TAG_BITS`]. 0: no tags.
    #[serde(deserialize_with = "tag_bits")]
    pub tag_bits: u8,
    /// Ingress table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<TableCapabilities>,
    /// Egress table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<TableCapabilities>,
    /// Missing features that a user may expect, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Capabilities of the table of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableCapabilities {
    /// Number of priorities for rules, without those of the driver's own rules.
    pub levels: u16,
    /// Largest number of rules; `None`: the device reports when it is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<u32>,
    /// Largest number of rules that count packets and bytes. Bytes are those of the frame before the actions
    /// of the rule, without FCS. 0: none.
    #[serde(default)]
    pub counters: u32,
    /// Capabilities of rules that can count, if not all can. [`Self::counters`] is 0 then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counting: Option<CountingCapabilities>,
    /// Items that patterns may have.
    #[serde(default)]
    pub items: Vec<ItemCapability>,
    /// Patterns of packets that the device parses differently from the rule language, such as fragments.
    ///
    /// While rules are installed, the stage installs rules above all others that leave these packets to
    /// software.
    #[serde(rename = "aside", default, skip_serializing_if = "Vec::is_empty")]
    pub excluded_patterns: Vec<PatternText>,
    /// True if rules can have [`HardwareRule::require_integrity`].
    #[serde(rename = "tells_order", default)]
    pub can_match_integrity: bool,
    /// Actions that rules may have.
    #[serde(default)]
    pub actions: ActionCapabilities,
}

/// Capabilities of rules that can count, if not all can. Such rules change no packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CountingCapabilities {
    /// Number of such rules, as [`TableCapabilities::counters`].
    pub counters: u32,
    /// Items that their patterns may have, a subset of those of the table.
    pub items: Vec<ItemCapability>,
    /// Destinations of their packets.
    #[serde(rename = "fates")]
    pub destinations: Vec<DestinationKind>,
}

/// Item that patterns may have, with the fields that can be matched.
///
/// The item must match exactly the packets that the item of the rule language matches, except for two conditions.
/// The packets must also match [`Self::implies`], and none of [`TableCapabilities::excluded_patterns`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "text::Item", into = "text::Item")]
pub struct ItemCapability {
    /// Kind of the item.
    pub kind: ItemKind,
    /// True for an item of the headers inside a tunnel.
    pub inner: bool,
    /// Maximum number of such items in one header stack, for VLAN tags and labels.
    pub max_count: u8,
    /// Fields that can be matched, with the valid masks.
    pub fields: Vec<(Field, Masks)>,
    /// Conditions that the item of the device has besides those of the rule language. The rule must have them
    /// too.
    ///
    /// Example: `udp dst 4789` for a VXLAN header that the device parses on that port only.
    pub implies: PatternText,
    /// Items of which one must stand before this one in the same header stack. Empty: no condition.
    pub behind: Vec<ItemKind>,
}

/// Masks that are valid for a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Masks {
    /// Any mask.
    Any,
    /// All bits or none.
    Exact,
    /// A prefix of the bits.
    Prefix,
    /// Any subset of these bits.
    Within(u128),
}

impl Masks {
    /// True if `mask` is valid for a field of `bits` bits.
    pub fn allow(self, mask: u128, bits: u8) -> bool {
        let all = MaskedValue::exact(0, bits).mask;
        match self {
            Self::Any => true,
            Self::Exact => mask == 0 || mask == all,
            Self::Prefix => (all & !mask).wrapping_add(1).is_power_of_two() || mask == 0,
            Self::Within(these) => mask & !these == 0,
        }
    }
}

/// Actions that rules may have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActionCapabilities {
    /// Maximum number of flow actions of a rule. All header writes together are one action, a reformat is
    /// another. mlx5: 2.
    #[serde(rename = "most")]
    pub max_actions: u8,
    /// Maximum number of header writes of a rule: one for each `set` of up to 32 bits (several for an
    /// address) and each `dec-ttl`.
    pub commands: u16,
    /// Fields that `set` can write, as `item field`. The device updates checksums.
    pub set: FieldNames,
    /// Packets whose checksums the device does **not** update when `set` writes an address, as one IP item
    /// each (`ipv4 proto 136`). They are left to software.
    #[serde(rename = "unmended", skip_serializing_if = "Vec::is_empty")]
    pub stale_checksums: Vec<PatternText>,
    /// `dec-ttl`. The stage keeps packets with a TTL of 0 or 1 away from such rules.
    pub dec_ttl: bool,
    /// `push-vlan`.
    pub push_vlan: bool,
    /// `pop-vlan`.
    pub pop_vlan: bool,
    /// Encapsulation and decapsulation.
    pub reformats: Vec<ReformatCapability>,
    /// Destinations of packets.
    #[serde(rename = "fates")]
    pub destinations: Vec<DestinationKind>,
}

/// Kind of encapsulation or decapsulation that the table supports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReformatCapability {
    /// One of the four kinds.
    #[serde(with = "text::reformat_kind")]
    pub kind: ReformatKind,
    /// Longest header in bytes.
    #[serde(default)]
    pub max_header: u16,
    /// Supported tunnels, by the item that names them; `"ip"`: IP directly in IP.
    pub tunnels: Vec<TunnelName>,
    /// Tunnels for which the device computes the UDP source port from a hash of the inner headers. For other
    /// tunnels, the port in the given header is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fills_source_port: Vec<TunnelName>,
    /// True if the key in a GRE header is sent unchanged. Some devices write entropy to its low bits.
    #[serde(default)]
    pub keeps_gre_key: bool,
    /// True if the device computes the outer UDP checksum of a header whose checksum is not 0.
    #[serde(default)]
    pub udp_checksum: bool,
    /// True if decapsulation merges the ECN field into the inner header (RFC 6040). Otherwise such rules get
    /// only packets with outer ECN 0.
    #[serde(default)]
    pub merges_ecn: bool,
}

/// Tunnel, named by the last header of its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TunnelName {
    /// VXLAN.
    Vxlan,
    /// VXLAN-GPE.
    VxlanGpe,
    /// GENEVE.
    Geneve,
    /// GRE.
    Gre,
    /// MPLS label stack.
    Mpls,
    /// IP directly in IP.
    Ip,
}

/// Kind of a [`RuleDestination`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DestinationKind {
    /// [`RuleDestination::Next`].
    Next,
    /// [`RuleDestination::Queue`].
    Queue,
    /// [`RuleDestination::Rss`]: hash and indirection table are those of the rule language.
    Rss,
    /// [`RuleDestination::Drop`].
    Drop,
    /// [`RuleDestination::Kernel`].
    Kernel,
}

/// Destination of the packets of a rule in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleDestination {
    /// Default path. Ingress: a receive queue by the port's default RSS, computed on the packet as the rule
    /// has changed it. Egress: the wire.
    Next,
    /// This receive queue.
    Queue(u16),
    /// One of several receive queues.
    Rss(Rss),
    /// None: the packet is dropped.
    Drop,
    /// The kernel's network stack, bypassing the port.
    Kernel,
}

impl RuleDestination {
    /// Kind of the destination.
    pub fn kind(&self) -> DestinationKind {
        match self {
            Self::Next => DestinationKind::Next,
            Self::Queue(_) => DestinationKind::Queue,
            Self::Rss(_) => DestinationKind::Rss,
            Self::Drop => DestinationKind::Drop,
            Self::Kernel => DestinationKind::Kernel,
        }
    }
}

/// Rule for the device. It is within the device's [`RuleCapabilities`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HardwareRule {
    /// Table of the rule.
    pub direction: Direction,
    /// Level of the rule, below [`TableCapabilities::levels`]. Lower levels are evaluated first.
    pub level: u16,
    /// Headers that a packet must have: a pattern that [`Rule::new`] has checked.
    pub pattern: Vec<Item>,
    /// Changes of the packet, in order: decapsulation first, encapsulation last, header writes between.
    ///
    /// Possible actions are [`Action::Reformat`], [`Action::Set`], [`Action::DecTtl`], [`Action::PushVlan`]
    /// and [`Action::PopVlan`].
    pub actions: Vec<Action>,
    /// Destination of the packets.
    pub destination: RuleDestination,
    /// Mark of the received packets; ingress only, never one of [`RESERVED_TAGS`].
    pub tag: Option<u32>,
    /// True if the rule counts packets and bytes.
    pub count: bool,
    /// True if only packets with valid outer IP and transport headers match: correct lengths and checksums. A
    /// zero UDP checksum counts as correct.
    ///
    /// It requires [`TableCapabilities::can_match_integrity`].
    pub require_integrity: bool,
}

/// Identifier of an installed rule, assigned by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HardwareRuleId(pub u64);

/// Error of the installation or removal of a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct RuleRefusal {
    /// Kind of the error.
    pub kind: RefusalKind,
    /// Error code of the kernel or library, if there is one.
    pub errno: Option<i32>,
    /// Description: what failed, and why.
    pub reason: String,
}

/// Kind of a refusal, which tells whether a retry makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// The device does not support this rule. A retry fails too.
    Unsupported,
    /// The table is full. A retry may succeed after the removal of other rules.
    Full,
    /// The device or the kernel is busy or refuses rules at the moment.
    Refused,
    /// The device is gone or in recovery, and so are all its rules. [`RuleHardware::epoch`] changes when
    /// rules can be installed again.
    DeviceLost,
}

/// Packets and bytes that a rule has counted since its installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct HardwareCount {
    /// Packets.
    pub packets: u64,
    /// Bytes of the frames before the actions of the rule, without FCS.
    pub bytes: u64,
}

/// Rule hardware of a started port. All calls come from the control thread.
pub trait RuleHardware: Send {
    /// Capabilities. They may change together with [`Self::epoch`].
    fn capabilities(&self) -> RuleCapabilities;

    /// Installs a rule. It applies to packets that arrive after the return, and not to those that are already
    /// in a receive ring.
    fn install(&mut self, rule: &HardwareRule) -> Result<HardwareRuleId, RuleRefusal>;

    /// Removes a rule and returns its final counters. It does not apply to packets that arrive after the
    /// return.
    ///
    /// **Packets with its tag may still be in the receive rings.** The stage uses a tag again only after
    /// every ring has been drained. If the removal fails, the rule stays installed.
    fn remove(&mut self, id: HardwareRuleId) -> Result<HardwareCount, RuleRefusal>;

    /// Counters of a rule with [`HardwareRule::count`].
    fn count(&mut self, id: HardwareRuleId) -> Option<HardwareCount>;

    /// Number that changes when the device has lost its rules, in recovery or because it was away. All rules
    /// must then be installed again.
    ///
    /// Rules of the previous epoch are removed as usual, which returns their counters.
    fn epoch(&self) -> u64 {
        0
    }
}

fn tag_bits<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    match u8::deserialize(deserializer)? {
        bits if bits <= TAG_BITS => Ok(bits),
        bits => Err(serde::de::Error::custom(format!("`tag_bits` is {bits}, at most {TAG_BITS} are possible"))),
    }
}

impl RuleCapabilities {
    /// Capabilities of a device that cannot match anything.
    pub fn none(driver: impl Into<String>, device: impl Into<String>, backend: RuleBackend) -> Self {
        Self {
            driver: driver.into(),
            device: device.into(),
            backend,
            tag_bits: 0,
            ingress: None,
            egress: None,
            notes: Vec::new(),
        }
    }

    /// Table of a direction.
    pub fn table(&self, direction: Direction) -> Option<&TableCapabilities> {
        match direction {
            Direction::Ingress => self.ingress.as_ref(),
            Direction::Egress => self.egress.as_ref(),
        }
    }

    /// Largest tag.
    pub fn max_tag(&self) -> u32 {
        (1 << self.tag_bits.min(TAG_BITS)) - 1
    }
}

impl TableCapabilities {
    /// Largest number of rules that can count.
    pub fn most_counters(&self) -> u32 {
        self.counting.as_ref().map_or(self.counters, |counting| counting.counters)
    }

    /// Capability for an item.
    pub fn item(&self, kind: ItemKind, inner: bool) -> Option<&ItemCapability> {
        self.items.iter().find(|item| item.kind == kind && item.inner == inner)
    }

    /// Capability for a kind of reformat.
    pub fn reformat(&self, kind: ReformatKind) -> Option<&ReformatCapability> {
        self.actions.reformats.iter().find(|it| it.kind == kind)
    }
}

impl ItemCapability {
    /// An item without fields, in the outer headers.
    pub fn new(kind: ItemKind) -> Self {
        Self {
            kind,
            inner: false,
            max_count: 1,
            fields: Vec::new(),
            implies: PatternText::default(),
            behind: Vec::new(),
        }
    }

    /// Returns the same item in the inner headers.
    pub fn as_inner(mut self) -> Self {
        self.inner = true;
        self
    }

    /// Adds a field.
    pub fn with(mut self, field: Field, masks: Masks) -> Self {
        self.fields.push((field, masks));
        self
    }

    /// Masks of a field.
    pub fn field(&self, field: Field) -> Option<Masks> {
        self.fields.iter().find(|(known, _)| *known == field).map(|(_, masks)| *masks)
    }
}

/// Pattern in the syntax of the rule language: `ipv4 frag yes`. Empty: matches every packet.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PatternText(Vec<Item>);

impl PatternText {
    /// Items of the pattern.
    pub fn items(&self) -> &[Item] {
        &self.0
    }

    /// True if the pattern is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<Item>> for PatternText {
    /// Makes a pattern of items that a rule can have.
    fn from(items: Vec<Item>) -> Self {
        Self(items)
    }
}

impl std::str::FromStr for PatternText {
    type Err = wirepath_flow::TextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let rule: Rule = format!("egress: {text} => count").parse()?;
        Ok(Self(rule.pattern().to_vec()))
    }
}

impl TryFrom<String> for PatternText {
    type Error = wirepath_flow::TextError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PatternText> for String {
    fn from(pattern: PatternText) -> Self {
        if pattern.is_empty() { Self::new() } else { pattern.to_string() }
    }
}

impl fmt::Display for PatternText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A rule with this pattern is valid, since the constructors have checked the items.
        let rule = Rule::new(Direction::Egress, 0, self.0.clone(), vec![Action::Count]);
        let text = rule.map(|rule| rule.to_string()).unwrap_or_default();
        let pattern = text.split_once(": ").map_or("", |(_, rest)| rest);
        f.write_str(pattern.strip_suffix(" => count").unwrap_or(pattern))
    }
}

/// Names of fields with their items: `ipv4 ttl`.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct FieldNames(pub Vec<Field>);

impl FieldNames {
    /// True if the list has the field.
    pub fn contains(&self, field: Field) -> bool {
        self.0.contains(&field)
    }
}

impl TryFrom<Vec<String>> for FieldNames {
    type Error = String;

    fn try_from(names: Vec<String>) -> Result<Self, String> {
        names.iter().map(|name| text::field(name)).collect::<Result<_, _>>().map(Self)
    }
}

impl From<FieldNames> for Vec<String> {
    fn from(names: FieldNames) -> Self {
        let name = |field: Field| format!("{} {}", field.spec().item.spec().name, field.name());
        names.0.into_iter().map(name).collect()
    }
}

/// Serialisation of items, fields and masks.
mod text {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::{Field, ItemCapability, ItemKind, Masks, PatternText};

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct Item {
        item: String,
        #[serde(rename = "most", default = "one", skip_serializing_if = "is_one")]
        max_count: u8,
        #[serde(default)]
        fields: BTreeMap<String, String>,
        #[serde(default, skip_serializing_if = "PatternText::is_empty")]
        implies: PatternText,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        behind: Vec<String>,
    }

    fn one() -> u8 {
        1
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
    fn is_one(count: &u8) -> bool {
        *count == 1
    }

    fn kind(name: &str) -> Result<ItemKind, String> {
        ItemKind::from_name(name).ok_or_else(|| format!("there is no item \"{name}\""))
    }

    pub(super) fn field(name: &str) -> Result<Field, String> {
        let (item, field) = name.split_once(' ').ok_or_else(|| format!("\"{name}\" is not an item and a field"))?;
        kind(item)?.field(field).ok_or_else(|| format!("item \"{item}\" has no field \"{field}\""))
    }

    impl TryFrom<Item> for ItemCapability {
        type Error = String;

        fn try_from(text: Item) -> Result<Self, String> {
            let (inner, name) = match text.item.strip_prefix("inner ") {
                Some(name) => (true, name),
                None => (false, text.item.as_str()),
            };
            let kind = kind(name)?;
            let mut fields = Vec::new();
            for (field, masks) in &text.fields {
                let field = kind.field(field).ok_or_else(|| format!("item \"{name}\" has no field \"{field}\""))?;
                fields.push((field, self::masks(masks)?));
            }
            fields.sort_by_key(|(field, _)| *field);
            let behind = text.behind.iter().map(|name| self::kind(name)).collect::<Result<_, _>>()?;
            Ok(Self { kind, inner, max_count: text.max_count, fields, implies: text.implies, behind })
        }
    }

    impl From<ItemCapability> for Item {
        fn from(item: ItemCapability) -> Self {
            let inner = if item.inner { "inner " } else { "" };
            Self {
                item: format!("{inner}{}", item.kind.spec().name),
                max_count: item.max_count,
                fields: item.fields.iter().map(|(field, masks)| (field.name().to_owned(), words(*masks))).collect(),
                implies: item.implies,
                behind: item.behind.iter().map(|kind| kind.spec().name.to_owned()).collect(),
            }
        }
    }

    fn masks(text: &str) -> Result<Masks, String> {
        match text {
            "any" => Ok(Masks::Any),
            "exact" => Ok(Masks::Exact),
            "prefix" => Ok(Masks::Prefix),
            _ => {
                let bits = text.strip_prefix("0x").and_then(|digits| u128::from_str_radix(digits, 16).ok());
                bits.map(Masks::Within)
                    .ok_or_else(|| format!("\"{text}\" is not one of any, exact, prefix, or a mask such as 0xff"))
            }
        }
    }

    fn words(masks: Masks) -> String {
        match masks {
            Masks::Any => "any".to_owned(),
            Masks::Exact => "exact".to_owned(),
            Masks::Prefix => "prefix".to_owned(),
            Masks::Within(bits) => format!("{bits:#x}"),
        }
    }

    /// Serialisation of reformat kinds, such as `encap l2`.
    pub(super) mod reformat_kind {
        use serde::{Deserialize, Deserializer, Serializer};

        use super::super::ReformatKind::{self, L2ToL2Tunnel, L2ToL3Tunnel, L2TunnelToL2, L3TunnelToL2};

        fn words(kind: ReformatKind) -> String {
            let (action, word) = kind.words();
            format!("{action} {word}")
        }

        pub(in super::super) fn serialize<S: Serializer>(kind: &ReformatKind, to: S) -> Result<S::Ok, S::Error> {
            to.serialize_str(&words(*kind))
        }

        pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ReformatKind, D::Error> {
            let text = String::deserialize(from)?;
            let all = [L2TunnelToL2, L2ToL2Tunnel, L3TunnelToL2, L2ToL3Tunnel];
            all.into_iter().find(|kind| words(*kind) == text).ok_or_else(|| {
                serde::de::Error::custom(format!("\"{text}\" is not one of decap l2, encap l2, decap l3, encap l3"))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> RuleCapabilities {
        let mut vxlan = ItemCapability::new(ItemKind::Vxlan).with(Field::VxlanVni, Masks::Exact);
        vxlan.implies = "udp dst 4789".parse().unwrap();
        vxlan.behind = vec![ItemKind::Udp];
        let ingress = TableCapabilities {
            levels: 12,
            rules: Some(1000),
            counters: 0,
            counting: Some(CountingCapabilities {
                counters: 10,
                items: vec![ItemCapability::new(ItemKind::Tcp)],
                destinations: vec![DestinationKind::Drop],
            }),
            items: vec![
                ItemCapability::new(ItemKind::Ipv4)
                    .with(Field::Ipv4Src, Masks::Prefix)
                    .with(Field::Ipv4Ecn, Masks::Within(3)),
                ItemCapability::new(ItemKind::Udp).with(Field::UdpDst, Masks::Any),
                vxlan,
                ItemCapability::new(ItemKind::Tcp).as_inner(),
            ],
            excluded_patterns: vec!["ipv4 frag yes".parse().unwrap()],
            can_match_integrity: true,
            actions: ActionCapabilities {
                max_actions: 2,
                commands: 8,
                set: FieldNames(vec![Field::EthDst, Field::Ipv4Ttl]),
                dec_ttl: true,
                reformats: vec![ReformatCapability {
                    kind: ReformatKind::L2TunnelToL2,
                    max_header: 0,
                    tunnels: vec![TunnelName::Vxlan],
                    fills_source_port: Vec::new(),
                    keeps_gre_key: false,
                    udp_checksum: false,
                    merges_ecn: false,
                }],
                destinations: vec![DestinationKind::Next, DestinationKind::Drop],
                ..ActionCapabilities::default()
            },
        };
        RuleCapabilities { tag_bits: 24, ingress: Some(ingress), ..RuleCapabilities::none("x", "y", RuleBackend::Dv) }
    }

    #[test]
    fn capabilities_round_trip_as_json() {
        let text = serde_json::to_string_pretty(&example()).unwrap();
        assert_eq!(serde_json::from_str::<RuleCapabilities>(&text).unwrap(), example(), "{text}");
        for word in ["\"inner tcp\"", "\"udp dst 4789\"", "\"ipv4 frag yes\"", "\"decap l2\"", "\"eth dst\"", "\"0x3\""]
        {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn errors_name_the_unknown_word() {
        let text = serde_json::to_string(&example()).unwrap();
        for (word, by, expected) in [
            ("\"inner tcp\"", "\"inner tpc\"", "there is no item \"tpc\""),
            ("\"vni\":\"exact\"", "\"vin\":\"exact\"", "item \"vxlan\" has no field \"vin\""),
            ("\"exact\"", "\"exactly\"", "\"exactly\" is not one of any, exact, prefix, or a mask such as 0xff"),
            ("udp dst 4789", "udp dst 4789999", "a number from 0 to 65535"),
            ("\"decap l2\"", "\"decap l4\"", "\"decap l4\" is not one of"),
            ("\"eth dst\"", "\"eth dist\"", "item \"eth\" has no field \"dist\""),
            ("\"tag_bits\"", "\"tag_bit\"", "unknown field `tag_bit`"),
            ("\"tag_bits\":24", "\"tag_bits\":25", "`tag_bits` is 25, at most 24 are possible"),
        ] {
            assert!(text.contains(word), "{word} in {text}");
            let error = serde_json::from_str::<RuleCapabilities>(&text.replacen(word, by, 1)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn masks_accept_their_bits() {
        for (masks, mask, allowed) in [
            (Masks::Any, 0x5a, true),
            (Masks::Exact, 0xff, true),
            (Masks::Exact, 0xfe, false),
            (Masks::Exact, 0, true),
            (Masks::Prefix, 0xf0, true),
            (Masks::Prefix, 0xff, true),
            (Masks::Prefix, 0x0f, false),
            (Masks::Prefix, 0, true),
            (Masks::Within(0x3c), 0x18, true),
            (Masks::Within(0x3c), 0x40, false),
        ] {
            assert_eq!(masks.allow(mask, 8), allowed, "{masks:?} {mask:#x}");
        }
        assert!(Masks::Prefix.allow(u128::MAX, 128) && Masks::Prefix.allow(u128::MAX << 8, 128));
        assert!(!Masks::Prefix.allow(1, 128));
    }

    #[test]
    fn tags_have_at_most_24_bits() {
        let mut capabilities = example();
        assert_eq!((capabilities.max_tag(), capabilities.table(Direction::Egress).is_none()), (0xff_ffff, true));
        capabilities.tag_bits = 200;
        assert_eq!(capabilities.max_tag(), 0xff_ffff);
        capabilities.tag_bits = 0;
        assert_eq!(capabilities.max_tag(), 0);
    }
}
