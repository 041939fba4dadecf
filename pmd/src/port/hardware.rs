//! Flow rules in the NIC: what a port's rule hardware can do, and how rules get in and out.
//!
//! Drivers implement [`RuleHardware`] for what one device understands; which rule goes where, in which order and with which tag is the
//! hardware stage's to decide (`wirepath_pipeline::rules::hardware`). A driver never guesses: what it does not list in
//! [`RuleCapabilities`] is not asked of it, and what it lists must mean in the device **exactly** what it means in [`crate::flow`].
//!
//! Capabilities are data. They are written as JSON (`wirepath devices --rules`) and read again (`wirepath flow explain
//! --capabilities FILE`); every name in them is a word of the rule language, and unknown ones are refused.
//!
//! # The two tables
//! A device has a table for what comes in and one for what goes out; either may be missing.
//!
//! - **Ingress.** Packets meet the installed rules level by level. The first that fits runs, and no other. A packet that fits none goes
//!   where it would go without rules: to one of the port's receive queues, **without a tag**. The driver's own rules of reception lie
//!   behind all levels.
//! - **Egress.** The same for packets on their way to the wire; what fits no rule leaves as it is. `meta data` in a pattern is what a
//!   packet has as transmit metadata: its mark, where [`Flags::TX_METADATA`](crate::packet::offload::Flags::TX_METADATA) is set, else 0.
//!
//! # Order
//! The stage never has two rules on one level that a packet can both fit. It installs what is above before what is below, and removes
//! from below, so that at every moment what is installed is right as far as it goes: a driver just does one thing at a time.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::flow::{Action, Bits, Direction, Field, Item, ItemKind, ReformatKind, Rss, Rule};

/// Tags that are not used: 0 is what packets without a tag have, 0xffffff what some devices give to packets that no rule has tagged.
pub const RESERVED_TAGS: [u32; 2] = [0, 0xff_ffff];

/// Bits of the largest tag.
pub const TAG_BITS: u8 = 24;

/// How rules get into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleBackend {
    /// `ibv_create_flow`: matches, tags, drops and counts.
    Ibv,
    /// mlx5dv matchers and flows, with header rewriting and packet reformat.
    Dv,
}

impl RuleBackend {
    /// How it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ibv => "ibv_create_flow",
            Self::Dv => "mlx5dv",
        }
    }
}

/// What a port's rule hardware can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleCapabilities {
    /// The driver.
    pub driver: String,
    /// The device, as the driver calls it.
    pub device: String,
    /// How rules get in.
    pub backend: RuleBackend,
    /// Bits of the tag that a rule can put on a received packet, as its [mark](crate::packet::Packet::mark); 0: it cannot. At most
    /// [`TAG_BITS`].
    #[serde(deserialize_with = "tag_bits")]
    pub tag_bits: u8,
    /// For what comes in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<TableCapabilities>,
    /// For what goes out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<TableCapabilities>,
    /// What is not there although one might expect it, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// What the table of one direction can do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableCapabilities {
    /// Priorities that rules can have beside the driver's own.
    pub levels: u16,
    /// Most rules; `None`: the device says when it is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<u32>,
    /// Rules that count packets and bytes (of the frame as it comes to the rule, before its actions, without FCS); 0: none can.
    #[serde(default)]
    pub counters: u32,
    /// Where only some rules can count: which. [`Self::counters`] is 0 then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counting: Option<CountingCapabilities>,
    /// What can be compared.
    #[serde(default)]
    pub items: Vec<ItemCapability>,
    /// Patterns of packets that the device takes apart differently than the language does (fragments, say): whenever there are rules, the
    /// stage puts rules on top of all others that leave these packets to software.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aside: Vec<PatternText>,
    /// Rules can be [`HardwareRule::in_order`].
    #[serde(default)]
    pub tells_order: bool,
    /// What can be done.
    #[serde(default)]
    pub actions: ActionCapabilities,
}

/// The rules of a table that can count, where not all can: they change no packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CountingCapabilities {
    /// How many, as [`TableCapabilities::counters`].
    pub counters: u32,
    /// What they can compare, of what the table can.
    pub items: Vec<ItemCapability>,
    /// Where their packets can go.
    pub fates: Vec<FateKind>,
}

/// One item that patterns may have, and which of its fields.
///
/// Whoever lists an item promises that it fits exactly the packets that the item of the language fits and that also fit [`Self::implies`]
/// (and no pattern of [`TableCapabilities::aside`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "text::Item", into = "text::Item")]
pub struct ItemCapability {
    /// The item.
    pub kind: ItemKind,
    /// Of the stack inside a tunnel.
    pub inner: bool,
    /// How often in one stack, for VLAN tags and labels.
    pub most: u8,
    /// Fields that can be compared, and under which masks.
    pub fields: Vec<(Field, Masks)>,
    /// What the device's item demands beyond the language's: the rule must demand it too. `udp dst 4789` for a VXLAN header that is
    /// looked for on that port alone.
    pub implies: PatternText,
    /// One of these items must stand before it in the same stack, as far as the list is not empty.
    pub behind: Vec<ItemKind>,
}

/// Under which masks a field can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Masks {
    /// Any.
    Any,
    /// All bits or none.
    Exact,
    /// The first bits.
    Prefix,
    /// Any of these bits.
    Within(u128),
}

impl Masks {
    /// Whether a field of so many bits can be compared under this mask.
    pub fn allow(self, mask: u128, bits: u8) -> bool {
        let all = Bits::exact(0, bits).mask;
        match self {
            Self::Any => true,
            Self::Exact => mask == 0 || mask == all,
            Self::Prefix => (all & !mask).wrapping_add(1).is_power_of_two() || mask == 0,
            Self::Within(these) => mask & !these == 0,
        }
    }
}

/// What rules can do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActionCapabilities {
    /// Flow actions of one rule: all header writing together is one, a reformat is another. mlx5: 2.
    pub most: u8,
    /// Commands of all header writing of one rule: one for each `set` of up to 32 bits (an address has several) and each `dec-ttl`.
    pub commands: u16,
    /// Fields that `set` can write, as `item field`. Checksums are mended.
    pub set: FieldNames,
    /// Packets whose checksums are **not** mended when `set` writes an address, one IP item each (`ipv4 proto 136`): they are left to
    /// software.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmended: Vec<PatternText>,
    /// `dec-ttl`. That packets with a TTL of 0 or 1 stay away from it is the stage's business.
    pub dec_ttl: bool,
    /// `push-vlan`.
    pub push_vlan: bool,
    /// `pop-vlan`.
    pub pop_vlan: bool,
    /// Encapsulation and decapsulation.
    pub reformats: Vec<ReformatCapability>,
    /// Where packets can go.
    pub fates: Vec<FateKind>,
}

/// One kind of encapsulation or decapsulation that the table can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReformatCapability {
    /// Which of the four.
    #[serde(with = "text::reformat_kind")]
    pub kind: ReformatKind,
    /// Longest header in bytes.
    #[serde(default)]
    pub max_header: u16,
    /// Tunnels that it can put on or take off, by the item that names them; `"ip"`: IP directly in IP.
    pub tunnels: Vec<TunnelName>,
    /// Tunnels for which the device writes the UDP source port itself, from a hash of what is inside. For the others the port in the
    /// header goes out as it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fills_source_port: Vec<TunnelName>,
    /// Whether the key in a GRE header goes out as it is. A device that puts entropy into its low bits does not keep it.
    #[serde(default)]
    pub keeps_gre_key: bool,
    /// Whether the device computes the outer UDP checksum of a header that has one that is not 0.
    #[serde(default)]
    pub udp_checksum: bool,
    /// Whether what is taken off merges its ECN field into the inner header (RFC 6040). Where not, only packets with outer ECN 0 are
    /// given to it.
    #[serde(default)]
    pub merges_ecn: bool,
}

/// What a header stack ends in.
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
    /// A label stack.
    Mpls,
    /// IP directly in IP.
    Ip,
}

/// Where the packets of a rule in the device go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FateKind {
    /// [`RuleFate::Next`].
    Next,
    /// [`RuleFate::Queue`].
    Queue,
    /// [`RuleFate::Rss`]: the device's hash and table are those of the language.
    Rss,
    /// [`RuleFate::Drop`].
    Drop,
    /// [`RuleFate::Kernel`].
    Kernel,
}

/// Where the packets of a rule in the device go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleFate {
    /// Where they would go without rules: at ingress to a receive queue by the port's own spreading, of the packet as the rule has left
    /// it; at egress out of the port.
    Next,
    /// To this receive queue.
    Queue(u16),
    /// To one of several.
    Rss(Rss),
    /// Nowhere.
    Drop,
    /// Past the port, to the kernel's own network stack.
    Kernel,
}

impl RuleFate {
    /// Its name.
    pub fn kind(&self) -> FateKind {
        match self {
            Self::Next => FateKind::Next,
            Self::Queue(_) => FateKind::Queue,
            Self::Rss(_) => FateKind::Rss,
            Self::Drop => FateKind::Drop,
            Self::Kernel => FateKind::Kernel,
        }
    }
}

/// A rule as the device gets it. Everything in it is within the device's [`RuleCapabilities`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HardwareRule {
    /// Which table.
    pub direction: Direction,
    /// Below [`TableCapabilities::levels`]; the lower is asked first.
    pub level: u16,
    /// Headers that a packet must have: a pattern that [`Rule::new`] has checked.
    pub pattern: Vec<Item>,
    /// What is done to the packet, in this order: a decapsulation first, an encapsulation last, header writing between. Only
    /// [`Action::Reformat`], [`Action::Set`], [`Action::DecTtl`], [`Action::PushVlan`] and [`Action::PopVlan`].
    pub actions: Vec<Action>,
    /// Where it goes.
    pub fate: RuleFate,
    /// The mark that its packets have when they are received; ingress only, never one of [`RESERVED_TAGS`].
    pub tag: Option<u32>,
    /// Whether packets and bytes are to be counted.
    pub count: bool,
    /// Only packets whose outer IP and transport headers are in order, in length and checksum (a UDP checksum of zero is none). Only where
    /// [`TableCapabilities::tells_order`].
    pub in_order: bool,
}

/// The name of an installed rule, given by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HardwareRuleId(pub u64);

/// Why a device did not take or lose a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct RuleRefusal {
    /// What kind.
    pub kind: RefusalKind,
    /// What the kernel or the library answered, where it was asked.
    pub errno: Option<i32>,
    /// What was tried and what came of it, in words.
    pub reason: String,
}

/// Whether it is worth while to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// Not this rule, however often it is asked.
    Unsupported,
    /// No room now; when other rules are gone there may be.
    Full,
    /// Not now: the device or the kernel is busy or was told to refuse.
    Refused,
    /// The device is gone or being mended; all its rules are gone as well, and come again with [`RuleHardware::epoch`].
    Gone,
}

/// Packets and bytes that an installed rule has counted since it was installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct HardwareCount {
    /// Packets.
    pub packets: u64,
    /// Bytes of the frames as they came to the rule, without FCS.
    pub bytes: u64,
}

/// The rule hardware of one started port. All calls come from the control thread.
pub trait RuleHardware: Send {
    /// What it can do. May change when [`Self::epoch`] does.
    fn capabilities(&self) -> RuleCapabilities;

    /// Installs a rule. When this returns, packets that arrive from now on meet it; those that are already in a receive ring have not.
    fn install(&mut self, rule: &HardwareRule) -> Result<HardwareRuleId, RuleRefusal>;

    /// Takes a rule out and says what it has counted at last. When this returns, no packet that arrives from now on meets it; **packets
    /// with its tag may still lie in the receive rings**: the stage uses a tag again only when every ring has been drained since.
    /// A rule that cannot be removed is still there.
    fn remove(&mut self, id: HardwareRuleId) -> Result<HardwareCount, RuleRefusal>;

    /// What a rule with [`HardwareRule::count`] has counted.
    fn count(&mut self, id: HardwareRuleId) -> Option<HardwareCount>;

    /// Changes whenever the device has lost rules (it was mended, or came back): all are to be installed anew. Those of before are removed as
    /// ever, which says what they have counted.
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
    /// Of a device that cannot match anything.
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

    /// The table of a direction.
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
    /// How many rules can count.
    pub fn most_counters(&self) -> u32 {
        self.counting.as_ref().map_or(self.counters, |counting| counting.counters)
    }

    /// What is said of an item.
    pub fn item(&self, kind: ItemKind, inner: bool) -> Option<&ItemCapability> {
        self.items.iter().find(|item| item.kind == kind && item.inner == inner)
    }

    /// What is said of a kind of reformat.
    pub fn reformat(&self, kind: ReformatKind) -> Option<&ReformatCapability> {
        self.actions.reformats.iter().find(|it| it.kind == kind)
    }
}

impl ItemCapability {
    /// An item without fields, in the outer stack.
    pub fn new(kind: ItemKind) -> Self {
        Self { kind, inner: false, most: 1, fields: Vec::new(), implies: PatternText::default(), behind: Vec::new() }
    }

    /// The same in the inner stack.
    pub fn inside(mut self) -> Self {
        self.inner = true;
        self
    }

    /// With a field.
    pub fn with(mut self, field: Field, masks: Masks) -> Self {
        self.fields.push((field, masks));
        self
    }

    /// Masks of a field.
    pub fn field(&self, field: Field) -> Option<Masks> {
        self.fields.iter().find(|(known, _)| *known == field).map(|(_, masks)| *masks)
    }
}

/// A pattern that is written as in the rule language: `ipv4 frag yes`. Empty: fits every packet.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PatternText(Vec<Item>);

impl PatternText {
    /// The pattern.
    pub fn items(&self) -> &[Item] {
        &self.0
    }

    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<Item>> for PatternText {
    /// Of items that a rule can have.
    fn from(items: Vec<Item>) -> Self {
        Self(items)
    }
}

impl std::str::FromStr for PatternText {
    type Err = crate::flow::TextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let rule: Rule = format!("egress: {text} => count").parse()?;
        Ok(Self(rule.pattern().to_vec()))
    }
}

impl TryFrom<String> for PatternText {
    type Error = crate::flow::TextError;

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
        // It is one that a rule can have.
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
    /// Whether a field is among them.
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

/// How items, fields and masks are written.
mod text {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::{Field, ItemCapability, ItemKind, Masks, PatternText};

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct Item {
        item: String,
        #[serde(default = "one", skip_serializing_if = "is_one")]
        most: u8,
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
    fn is_one(most: &u8) -> bool {
        *most == 1
    }

    fn kind(name: &str) -> Result<ItemKind, String> {
        ItemKind::named(name).ok_or_else(|| format!("there is no item \"{name}\""))
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
            Ok(Self { kind, inner, most: text.most, fields, implies: text.implies, behind })
        }
    }

    impl From<ItemCapability> for Item {
        fn from(item: ItemCapability) -> Self {
            let inner = if item.inner { "inner " } else { "" };
            Self {
                item: format!("{inner}{}", item.kind.spec().name),
                most: item.most,
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
                    .ok_or_else(|| format!("\"{text}\" is none of any, exact, prefix and a mask such as 0xff"))
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

    /// `encap l2` and the like.
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
                serde::de::Error::custom(format!("\"{text}\" is none of decap l2, encap l2, decap l3, encap l3"))
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
                fates: vec![FateKind::Drop],
            }),
            items: vec![
                ItemCapability::new(ItemKind::Ipv4)
                    .with(Field::Ipv4Src, Masks::Prefix)
                    .with(Field::Ipv4Ecn, Masks::Within(3)),
                ItemCapability::new(ItemKind::Udp).with(Field::UdpDst, Masks::Any),
                vxlan,
                ItemCapability::new(ItemKind::Tcp).inside(),
            ],
            aside: vec!["ipv4 frag yes".parse().unwrap()],
            tells_order: true,
            actions: ActionCapabilities {
                most: 2,
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
                fates: vec![FateKind::Next, FateKind::Drop],
                ..ActionCapabilities::default()
            },
        };
        RuleCapabilities { tag_bits: 24, ingress: Some(ingress), ..RuleCapabilities::none("x", "y", RuleBackend::Dv) }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let text = serde_json::to_string_pretty(&example()).unwrap();
        assert_eq!(serde_json::from_str::<RuleCapabilities>(&text).unwrap(), example(), "{text}");
        for word in ["\"inner tcp\"", "\"udp dst 4789\"", "\"ipv4 frag yes\"", "\"decap l2\"", "\"eth dst\"", "\"0x3\""]
        {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn unknown_words_are_refused_by_name() {
        let text = serde_json::to_string(&example()).unwrap();
        for (word, by, expected) in [
            ("\"inner tcp\"", "\"inner tpc\"", "there is no item \"tpc\""),
            ("\"vni\":\"exact\"", "\"vin\":\"exact\"", "item \"vxlan\" has no field \"vin\""),
            ("\"exact\"", "\"exactly\"", "\"exactly\" is none of any, exact, prefix and a mask such as 0xff"),
            ("udp dst 4789", "udp dst 4789999", "a number from 0 to 65535"),
            ("\"decap l2\"", "\"decap l4\"", "\"decap l4\" is none of"),
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
    fn masks_allow_what_they_say() {
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
    fn tags_have_their_bounds() {
        let mut can = example();
        assert_eq!((can.max_tag(), can.table(Direction::Egress).is_none()), (0xff_ffff, true));
        can.tag_bits = 200;
        assert_eq!(can.max_tag(), 0xff_ffff);
        can.tag_bits = 0;
        assert_eq!(can.max_tag(), 0);
    }
}
