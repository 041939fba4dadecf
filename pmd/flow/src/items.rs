//! Items of patterns and their fields. One table serves parsing, printing, checking, engines, drivers and
//! documentation.
//!
//! A new item needs one entry of [`items!`], and one arm in the frame parser if software is to match it.

use super::masked_value::{Format, MaskedValue};

/// Position of an item among the headers of its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// Packet metadata, which is not part of the packet.
    Metadata,
    /// Ethernet.
    Link,
    /// VLAN tags.
    Tag,
    /// MPLS label stack entries: after the VLAN tags, after UDP or after GRE.
    Label,
    /// ARP and IP.
    Network,
    /// Protocols over IP.
    Transport,
    /// Tunnels over UDP.
    Tunnel,
}

/// A layer of a header stack, whose type the parser determines in addition to the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeaderType {
    /// 1 if the stack starts with an Ethernet header. The outermost stack always does.
    Link,
    /// Positions of MPLS labels; see [`mpls`].
    Mpls,
    /// Layer-3 type; see [`network`].
    Network,
    /// Layer-4 type: the IP protocol number of a parsed header; 0 for later fragments and for protocols that
    /// are not parsed.
    Transport,
    /// Tunnel at the end of the stack; see [`tunnel`].
    Tunnel,
}

/// Values of [`HeaderType::Network`].
pub mod network {
    /// No layer-3 header that is parsed.
    pub const NONE: u8 = 0;
    /// ARP for Ethernet and IPv4.
    pub const ARP: u8 = 1;
    /// IPv4.
    pub const IPV4: u8 = 4;
    /// IPv6.
    pub const IPV6: u8 = 6;
}

/// Values of [`HeaderType::Tunnel`].
pub mod tunnel {
    /// No tunnel that is parsed. IP in IP has no header of its own; its protocol field identifies it.
    pub const NONE: u8 = 0;
    /// VXLAN, on the UDP ports that the parser is configured with.
    pub const VXLAN: u8 = 1;
    /// VXLAN-GPE.
    pub const VXLAN_GPE: u8 = 2;
    /// GENEVE.
    pub const GENEVE: u8 = 3;
    /// GRE.
    pub const GRE: u8 = 4;
}

/// Bits of [`HeaderType::Mpls`].
pub mod mpls {
    /// A label stack after Ethernet and its tags.
    pub const AFTER_ETHERNET: u8 = 1;
    /// A label stack after UDP (RFC 7510).
    pub const AFTER_UDP: u8 = 2;
    /// A label stack after GRE (RFC 4023).
    pub const AFTER_GRE: u8 = 4;
}

const TCP_FLAGS: Format = Format::Flags(&[
    ("fin", 1),
    ("syn", 2),
    ("rst", 4),
    ("psh", 8),
    ("ack", 16),
    ("urg", 32),
    ("ece", 64),
    ("cwr", 128),
    ("ns", 256),
]);
const GRE_FLAGS: Format = Format::Flags(&[("csum", 0x8000), ("key", 0x2000), ("seq", 0x1000)]);
const EXTENSIONS: Format = Format::Flags(&[
    ("hop-by-hop", ext::HOP_BY_HOP),
    ("routing", ext::ROUTING),
    ("fragment", ext::FRAGMENT),
    ("destination", ext::DESTINATION),
    ("ah", ext::AH),
]);
const FRAGMENT: Format =
    Format::Choice(&[("no", 0, 3), ("yes", 1, 1), ("first", 1, 3), ("later", 3, 3), ("not-later", 0, 2)]);
const TAGS: Format = Format::Choice(&[("none", 0, 3), ("one", 1, 3), ("two", 3, 3), ("any", 1, 1)]);

/// Bits of [`Field::Ipv6Ext`].
pub mod ext {
    /// Hop-by-hop options.
    pub const HOP_BY_HOP: u128 = 1;
    /// Routing header.
    pub const ROUTING: u128 = 2;
    /// Fragment header.
    pub const FRAGMENT: u128 = 4;
    /// Destination options.
    pub const DESTINATION: u128 = 8;
    /// Authentication header.
    pub const AH: u128 = 16;
}

/// Table entry of an item.
#[derive(Debug)]
pub struct ItemSpec {
    /// The item.
    pub kind: ItemKind,
    /// Written name.
    pub name: &'static str,
    /// Description.
    pub about: &'static str,
    /// Position in the stack.
    pub layer: Layer,
    /// Maximum number of occurrences in one stack.
    pub max_count: u8,
    /// Header types that a matching packet has.
    pub header_types: &'static [(HeaderType, u8)],
    /// Its fields.
    pub fields: &'static [Field],
}

/// Table entry of a field.
#[derive(Debug)]
pub struct FieldSpec {
    /// The field.
    pub field: Field,
    /// Item that the field belongs to.
    pub item: ItemKind,
    /// Written name.
    pub name: &'static str,
    /// Size in bits.
    pub bits: u8,
    /// Bit offset from the start of the header, most significant bit first. `None` if the value is not a bit
    /// string of the header.
    pub offset: Option<u16>,
    /// Written form of values.
    pub format: Format,
    /// True if the action `set` can change it.
    pub settable: bool,
    /// Description.
    pub about: &'static str,
}

macro_rules! items {
    ($($kind:ident $name:literal $about:literal, $layer:ident x $max_count:literal, [$($fact:ident = $code:expr),*] {
        $($field:ident $fname:literal $bits:literal bits $(at $offset:literal)?,
            $format:expr, $fabout:literal $($set:ident)?;)*
    })*) => {
        /// Kind of an item: a header type or packet metadata.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum ItemKind { $(#[doc = $about] $kind,)* }

        /// A field that patterns can compare.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Field { $($(#[doc = concat!("`", $name, " ", $fname, "`, ", $bits, " bits: ", $fabout)] $field,)*)* }

        /// All items, in the order of [`ItemKind`].
        pub static ITEMS: &[ItemSpec] = &[$(ItemSpec {
            kind: ItemKind::$kind,
            name: $name,
            about: $about,
            layer: Layer::$layer,
            max_count: $max_count,
            header_types: &[$((HeaderType::$fact, $code)),*],
            fields: &[$(Field::$field),*],
        },)*];

        /// All fields, in the order of [`Field`].
        pub static FIELDS: &[FieldSpec] = &[$($(FieldSpec {
            field: Field::$field,
            item: ItemKind::$kind,
            name: $fname,
            bits: $bits,
            offset: items!(@offset $($offset)?),
            format: $format,
            settable: items!(@set $($set)?),
            about: $fabout,
        },)*)*];
    };
    (@offset) => { None };
    (@offset $offset:literal) => { Some($offset) };
    (@set) => { false };
    (@set set) => { true };
}

items! {
    Port "port" "port of the packet: the receiving one at ingress, the sending one at egress",
        Metadata x 1, [] {
        PortId "id" 16 bits, Format::Port, "port id";
    }
    Meta "meta" "metadata of the packet, set by earlier rules or by the application", Metadata x 1, [] {
        MetaMark "mark" 24 bits, Format::Number, "mark that a rule has set";
        MetaData "data" 32 bits, Format::Hex, "data that the application has set, for rules at egress";
    }
    Eth "eth" "Ethernet header (IEEE 802.3)", Link x 1, [Link = 1] {
        EthDst "dst" 48 bits at 0, Format::Mac, "destination address" set;
        EthSrc "src" 48 bits at 48, Format::Mac, "source address" set;
        EthType "type" 16 bits, Format::Hex, "EtherType after all VLAN tags";
        EthTags "tags" 2 bits, TAGS, "number of VLAN tags";
    }
    Vlan "vlan" "VLAN tag (IEEE 802.1Q, 802.1ad), outermost first", Tag x 2, [Link = 1] {
        VlanVid "vid" 12 bits at 4, Format::Number, "VLAN id" set;
        VlanPcp "pcp" 3 bits at 0, Format::Number, "priority" set;
        VlanDei "dei" 1 bits at 3, Format::Number, "drop eligible" set;
        VlanTpid "tpid" 16 bits, Format::Hex, "EtherType that announces this tag";
    }
    Mpls "mpls" "MPLS label stack entry (RFC 3032), top first; patterns never skip it", Label x 4, [] {
        MplsLabel "label" 20 bits at 0, Format::Number, "label";
        MplsTc "tc" 3 bits at 20, Format::Number, "traffic class";
        MplsBos "bos" 1 bits at 23, Format::Number, "bottom of stack";
        MplsTtl "ttl" 8 bits at 24, Format::Number, "time to live";
    }
    Arp "arp" "ARP for Ethernet and IPv4 (RFC 826)", Network x 1, [Link = 1, Network = network::ARP] {
        ArpOp "op" 16 bits at 48, Format::Number, "operation: 1 request, 2 reply";
        ArpSha "sha" 48 bits at 64, Format::Mac, "sender's Ethernet address";
        ArpSpa "spa" 32 bits at 112, Format::Ipv4, "sender's IPv4 address";
        ArpTha "tha" 48 bits at 144, Format::Mac, "target's Ethernet address";
        ArpTpa "tpa" 32 bits at 192, Format::Ipv4, "target's IPv4 address";
    }
    Ipv4 "ipv4" "IPv4 header (RFC 791)", Network x 1, [Network = network::IPV4] {
        Ipv4Src "src" 32 bits at 96, Format::Ipv4, "source address" set;
        Ipv4Dst "dst" 32 bits at 128, Format::Ipv4, "destination address" set;
        Ipv4Proto "proto" 8 bits at 72, Format::Number, "protocol";
        Ipv4Dscp "dscp" 6 bits at 8, Format::Number, "differentiated services code point" set;
        Ipv4Ecn "ecn" 2 bits at 14, Format::Number, "ECN field";
        Ipv4Ttl "ttl" 8 bits at 64, Format::Number, "time to live" set;
        Ipv4Ihl "ihl" 4 bits at 4, Format::Number, "header length, 32-bit words; above 5 with options";
        Ipv4Id "id" 16 bits at 32, Format::Hex, "identification";
        Ipv4Df "df" 1 bits at 49, Format::Number, "don't fragment";
        Ipv4Mf "mf" 1 bits at 50, Format::Number, "more fragments";
        Ipv4Offset "offset" 13 bits at 51, Format::Number, "fragment offset, 8 bytes each";
        Ipv4Frag "frag" 2 bits, FRAGMENT, "fragment state";
    }
    Ipv6 "ipv6" "IPv6 header and its extension headers (RFC 8200)", Network x 1, [Network = network::IPV6] {
        Ipv6Src "src" 128 bits at 64, Format::Ipv6, "source address" set;
        Ipv6Dst "dst" 128 bits at 192, Format::Ipv6, "destination address" set;
        Ipv6Next "next" 8 bits at 48, Format::Number, "next header field of the fixed header";
        Ipv6Proto "proto" 8 bits, Format::Number, "protocol after the extension headers";
        Ipv6Dscp "dscp" 6 bits at 4, Format::Number, "differentiated services code point" set;
        Ipv6Ecn "ecn" 2 bits at 10, Format::Number, "ECN field";
        Ipv6Flow "flow" 20 bits at 12, Format::Hex, "flow label";
        Ipv6Hops "hops" 8 bits at 56, Format::Number, "hop limit" set;
        Ipv6Ext "ext" 5 bits, EXTENSIONS, "extension headers of the packet";
        Ipv6Frag "frag" 2 bits, FRAGMENT, "fragment state";
    }
    Tcp "tcp" "TCP header (RFC 9293); not in later fragments", Transport x 1, [Transport = 6] {
        TcpSrc "src" 16 bits at 0, Format::Number, "source port" set;
        TcpDst "dst" 16 bits at 16, Format::Number, "destination port" set;
        TcpSeq "seq" 32 bits at 32, Format::Number, "sequence number";
        TcpAck "ack" 32 bits at 64, Format::Number, "acknowledgement number";
        TcpFlags "flags" 9 bits at 103, TCP_FLAGS, "control bits";
        TcpWindow "window" 16 bits at 112, Format::Number, "window";
    }
    Udp "udp" "UDP header (RFC 768); not in later fragments", Transport x 1, [Transport = 17] {
        UdpSrc "src" 16 bits at 0, Format::Number, "source port" set;
        UdpDst "dst" 16 bits at 16, Format::Number, "destination port" set;
    }
    Icmp "icmp" "ICMP in IPv4 (RFC 792)", Transport x 1, [Network = network::IPV4, Transport = 1] {
        IcmpType "type" 8 bits at 0, Format::Number, "type";
        IcmpCode "code" 8 bits at 8, Format::Number, "code";
        IcmpId "id" 16 bits at 32, Format::Number, "identifier of an echo";
        IcmpSeq "seq" 16 bits at 48, Format::Number, "sequence number of an echo";
    }
    Icmpv6 "icmpv6" "ICMPv6 (RFC 4443)", Transport x 1, [Network = network::IPV6, Transport = 58] {
        Icmpv6Type "type" 8 bits at 0, Format::Number, "type";
        Icmpv6Code "code" 8 bits at 8, Format::Number, "code";
        Icmpv6Id "id" 16 bits at 32, Format::Number, "identifier of an echo; 0 in a message too short for one";
        Icmpv6Seq "seq" 16 bits at 48, Format::Number, "sequence number of an echo; 0 in a message too short for one";
    }
    Esp "esp" "ESP header (RFC 4303); the payload is encrypted", Transport x 1, [Transport = 50] {
        EspSpi "spi" 32 bits at 0, Format::Hex, "security parameters index";
        EspSeq "seq" 32 bits at 32, Format::Number, "sequence number";
    }
    Gre "gre" "GRE header (RFC 2784, RFC 2890); with NVGRE the key is VSID (24 bits) and flow id", Transport x 1,
        [Transport = 47, Tunnel = tunnel::GRE] {
        GreFlags "flags" 16 bits at 0, GRE_FLAGS, "flags and version";
        GreProto "proto" 16 bits at 16, Format::Hex, "EtherType of the payload; 0x6558 is Ethernet";
        GreKey "key" 32 bits, Format::Number, "key; requires a header with a key";
    }
    Vxlan "vxlan" "VXLAN header (RFC 7348)", Tunnel x 1, [Transport = 17, Tunnel = tunnel::VXLAN] {
        VxlanFlags "flags" 8 bits at 0, Format::Hex, "flags";
        VxlanVni "vni" 24 bits at 32, Format::Number, "network identifier";
    }
    VxlanGpe "vxlan-gpe" "VXLAN-GPE header (draft-ietf-nvo3-vxlan-gpe)", Tunnel x 1,
        [Transport = 17, Tunnel = tunnel::VXLAN_GPE] {
        GpeFlags "flags" 8 bits at 0, Format::Hex, "flags";
        GpeNext "next" 8 bits at 24, Format::Number, "payload type: 1 IPv4, 2 IPv6, 3 Ethernet";
        GpeVni "vni" 24 bits at 32, Format::Number, "network identifier";
    }
    Geneve "geneve" "GENEVE header (RFC 8926)", Tunnel x 1, [Transport = 17, Tunnel = tunnel::GENEVE] {
        GeneveVni "vni" 24 bits at 32, Format::Number, "network identifier";
        GeneveProto "proto" 16 bits at 16, Format::Hex, "EtherType of the payload; 0x6558 is Ethernet";
        GeneveOptLen "optlen" 6 bits at 2, Format::Number, "length of the options, 4 bytes each";
        GeneveOam "oam" 1 bits at 8, Format::Number, "control packet";
        GeneveCritical "critical" 1 bits at 9, Format::Number, "critical options are present";
    }
}

impl ItemKind {
    /// Returns the entry in [`ITEMS`].
    pub fn spec(self) -> &'static ItemSpec {
        &ITEMS[self as usize]
    }

    /// Returns the item with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        ITEMS.iter().find(|spec| spec.name == name).map(|spec| spec.kind)
    }

    /// Returns the field of this item with this name.
    pub fn field(self, name: &str) -> Option<Field> {
        self.spec().fields.iter().copied().find(|field| field.spec().name == name)
    }
}

impl Field {
    /// Returns the entry in [`FIELDS`].
    pub fn spec(self) -> &'static FieldSpec {
        &FIELDS[self as usize]
    }

    /// Returns the written name within the item.
    pub fn name(self) -> &'static str {
        self.spec().name
    }
}

/// A header that a pattern requires, with the required field values.
///
/// An item without fields requires only that the header is present. Fields that are not named are not
/// compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    /// Kind of the item.
    pub kind: ItemKind,
    /// True if the header belongs to the inner stack.
    pub inner: bool,
    fields: Vec<(Field, MaskedValue)>,
}

impl Item {
    /// Creates an item of the outer stack without fields.
    pub fn new(kind: ItemKind) -> Self {
        Self { kind, inner: false, fields: Vec::new() }
    }

    /// Moves the item to the inner stack.
    pub fn as_inner(mut self) -> Self {
        self.inner = true;
        self
    }

    /// Sets the comparison of a field. A mask of 0 removes it.
    pub fn with(mut self, field: Field, bits: MaskedValue) -> Self {
        match self.fields.binary_search_by_key(&field, |(f, _)| *f) {
            Ok(i) if bits.mask == 0 => drop(self.fields.remove(i)),
            Ok(i) => self.fields[i].1 = bits,
            Err(_) if bits.mask == 0 && bits.value == 0 => {}
            Err(i) => self.fields.insert(i, (field, bits)),
        }
        self
    }

    /// Requires that all bits of a field equal `value`.
    pub fn exact(self, field: Field, value: u128) -> Self {
        self.with(field, MaskedValue::exact(value, field.spec().bits))
    }

    /// Returns the compared fields, in the order of [`Field`].
    pub fn fields(&self) -> &[(Field, MaskedValue)] {
        &self.fields
    }

    /// Returns the masked value of a field.
    pub fn get(&self, field: Field) -> Option<MaskedValue> {
        self.fields.iter().find(|(f, _)| *f == field).map(|(_, bits)| *bits)
    }
}

/// Returns the tables of items and fields as readable text.
pub fn items_reference() -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for item in ITEMS {
        let limit = if item.max_count > 1 { format!("; up to {}", item.max_count) } else { String::new() };
        let _ = writeln!(text, "{}: {}{limit}", item.name, item.about);
        for field in item.fields {
            let spec = field.spec();
            let set = if spec.settable { "; can be set" } else { "" };
            let _ = writeln!(
                text,
                "    {:<9} {:>3} bits  {}: {}{set}",
                spec.name,
                spec.bits,
                spec.about,
                spec.format.expected(spec.bits)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_consistent() {
        for (i, item) in ITEMS.iter().enumerate() {
            assert_eq!(item.kind as usize, i);
            assert_eq!(ItemKind::from_name(item.name), Some(item.kind));
            for field in item.fields {
                assert_eq!(field.spec().item, item.kind, "{field:?}");
                assert_eq!(item.kind.field(field.name()), Some(*field), "{field:?}");
            }
        }
        for (i, spec) in FIELDS.iter().enumerate() {
            assert_eq!(spec.field as usize, i);
            assert!(spec.bits <= 128 && spec.bits > 0);
            // "mask" and "inner" are keywords of the grammar.
            assert!(!["mask", "inner"].contains(&spec.name));
        }
    }

    #[test]
    fn fields_of_a_header_do_not_overlap() {
        for item in ITEMS {
            let mut taken = std::collections::HashSet::new();
            for spec in item.fields.iter().map(|f| f.spec()) {
                let Some(at) = spec.offset else { continue };
                for bit in at..at + u16::from(spec.bits) {
                    assert!(taken.insert(bit), "{} {}: bit {bit}", item.name, spec.name);
                }
            }
        }
    }
}
