//! The items of patterns and their fields: one table that parsing, printing, checking, engines, drivers and documentation use.
//!
//! A new item is one entry of [`items!`] (and, if software is to match it, one arm in the frame parser).

use super::bits::{Bits, Format};

/// Where an item stands among the headers of its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// About the packet, not in it.
    Outside,
    /// Ethernet.
    Link,
    /// VLAN tags.
    Tag,
    /// MPLS label stack entries: behind the tags, behind UDP or behind GRE.
    Label,
    /// ARP and IP.
    Network,
    /// What IP carries.
    Transport,
    /// Tunnels in UDP.
    Tunnel,
}

/// Something that a packet's parser finds out about one header stack, beside the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fact {
    /// 1 if the stack begins with an Ethernet header. The outermost always does.
    Link,
    /// Which MPLS entries there are, see [`mpls`].
    Mpls,
    /// What layer 3 is: the value of [`network`].
    Network,
    /// Which layer-4 header is there: its IP protocol number, 0 if none (later fragments) or one that is not looked into.
    Transport,
    /// Which tunnel ends the stack, see [`tunnel`].
    Tunnel,
}

/// Values of [`Fact::Network`].
pub mod network {
    /// Nothing that is looked into.
    pub const NONE: u8 = 0;
    /// ARP for Ethernet and IPv4.
    pub const ARP: u8 = 1;
    /// IPv4.
    pub const IPV4: u8 = 4;
    /// IPv6.
    pub const IPV6: u8 = 6;
}

/// Values of [`Fact::Tunnel`].
pub mod tunnel {
    /// No tunnel that is looked into. IP in IP has no header of its own: it shows in the protocol field.
    pub const NONE: u8 = 0;
    /// VXLAN, on the UDP ports that the port's parser is told.
    pub const VXLAN: u8 = 1;
    /// VXLAN-GPE.
    pub const VXLAN_GPE: u8 = 2;
    /// GENEVE.
    pub const GENEVE: u8 = 3;
    /// GRE.
    pub const GRE: u8 = 4;
}

/// Bits of [`Fact::Mpls`].
pub mod mpls {
    /// A label stack behind Ethernet and its tags.
    pub const BEHIND_LINK: u8 = 1;
    /// A label stack behind UDP (RFC 7510).
    pub const BEHIND_UDP: u8 = 2;
    /// A label stack behind GRE (RFC 4023).
    pub const BEHIND_GRE: u8 = 4;
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

/// One item of the language.
#[derive(Debug)]
pub struct ItemSpec {
    /// The item.
    pub kind: ItemKind,
    /// How it is written.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Where it stands.
    pub layer: Layer,
    /// How many of it one stack has at most.
    pub most: u8,
    /// What is known of a packet's stack that has it.
    pub facts: &'static [(Fact, u8)],
    /// Its fields.
    pub fields: &'static [Field],
}

/// One field of an item.
#[derive(Debug)]
pub struct FieldSpec {
    /// The field.
    pub field: Field,
    /// Its item.
    pub item: ItemKind,
    /// How it is written.
    pub name: &'static str,
    /// Its length.
    pub bits: u8,
    /// Bit offset from the start of its header, most significant bit first; `None` for what is no bit string of the header.
    pub offset: Option<u16>,
    /// How values are written.
    pub format: Format,
    /// Whether `set` can change it.
    pub settable: bool,
    /// What it is.
    pub about: &'static str,
}

macro_rules! items {
    ($($kind:ident $name:literal $about:literal, $layer:ident x $most:literal, [$($fact:ident = $code:expr),*] {
        $($field:ident $fname:literal $bits:literal bits $(at $offset:literal)?, $format:expr, $fabout:literal $($set:ident)?;)*
    })*) => {
        /// What an item of a pattern is about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum ItemKind { $(#[doc = $about] $kind,)* }

        /// A field that items compare.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Field { $($(#[doc = concat!("`", $name, " ", $fname, "`, ", $bits, " bits: ", $fabout)] $field,)*)* }

        /// All items, in the order of [`ItemKind`].
        pub static ITEMS: &[ItemSpec] = &[$(ItemSpec {
            kind: ItemKind::$kind,
            name: $name,
            about: $about,
            layer: Layer::$layer,
            most: $most,
            facts: &[$((Fact::$fact, $code)),*],
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
    Port "port" "the port: of an ingress rule where the packet came in, of an egress rule where it goes out", Outside x 1, [] {
        PortId "id" 16 bits, Format::Port, "which port";
    }
    Meta "meta" "what earlier rules or the application noted about the packet", Outside x 1, [] {
        MetaMark "mark" 24 bits, Format::Number, "the mark that a rule has set";
        MetaData "data" 32 bits, Format::Hex, "data that the application has set, for rules at egress";
    }
    Eth "eth" "Ethernet header (IEEE 802.3)", Link x 1, [Link = 1] {
        EthDst "dst" 48 bits at 0, Format::Mac, "destination address" set;
        EthSrc "src" 48 bits at 48, Format::Mac, "source address" set;
        EthType "type" 16 bits, Format::Hex, "EtherType behind all VLAN tags";
        EthTags "tags" 2 bits, TAGS, "how many VLAN tags the frame has";
    }
    Vlan "vlan" "VLAN tag (IEEE 802.1Q, 802.1ad), the outermost first", Tag x 2, [Link = 1] {
        VlanVid "vid" 12 bits at 4, Format::Number, "VLAN id" set;
        VlanPcp "pcp" 3 bits at 0, Format::Number, "priority" set;
        VlanDei "dei" 1 bits at 3, Format::Number, "drop eligible" set;
        VlanTpid "tpid" 16 bits, Format::Hex, "the EtherType that announces this tag";
    }
    Mpls "mpls" "MPLS label stack entry (RFC 3032), the top first; never skipped by patterns that do not name it", Label x 4, [] {
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
        Ipv4Frag "frag" 2 bits, FRAGMENT, "whether it is a fragment, and which";
    }
    Ipv6 "ipv6" "IPv6 header and its extension headers (RFC 8200)", Network x 1, [Network = network::IPV6] {
        Ipv6Src "src" 128 bits at 64, Format::Ipv6, "source address" set;
        Ipv6Dst "dst" 128 bits at 192, Format::Ipv6, "destination address" set;
        Ipv6Next "next" 8 bits at 48, Format::Number, "next header, as it stands in the fixed header";
        Ipv6Proto "proto" 8 bits, Format::Number, "protocol behind the extension headers";
        Ipv6Dscp "dscp" 6 bits at 4, Format::Number, "differentiated services code point" set;
        Ipv6Ecn "ecn" 2 bits at 10, Format::Number, "ECN field";
        Ipv6Flow "flow" 20 bits at 12, Format::Hex, "flow label";
        Ipv6Hops "hops" 8 bits at 56, Format::Number, "hop limit" set;
        Ipv6Ext "ext" 5 bits, EXTENSIONS, "which extension headers there are";
        Ipv6Frag "frag" 2 bits, FRAGMENT, "whether it is a fragment, and which";
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
    Esp "esp" "ESP header (RFC 4303); what follows is encrypted", Transport x 1, [Transport = 50] {
        EspSpi "spi" 32 bits at 0, Format::Hex, "security parameters index";
        EspSeq "seq" 32 bits at 32, Format::Number, "sequence number";
    }
    Gre "gre" "GRE header (RFC 2784, RFC 2890); with NVGRE the key is VSID (24 bits) and flow id", Transport x 1,
        [Transport = 47, Tunnel = tunnel::GRE] {
        GreFlags "flags" 16 bits at 0, GRE_FLAGS, "flags and version";
        GreProto "proto" 16 bits at 16, Format::Hex, "EtherType of what it carries; 0x6558 is Ethernet";
        GreKey "key" 32 bits, Format::Number, "key; says that there is one";
    }
    Vxlan "vxlan" "VXLAN header (RFC 7348)", Tunnel x 1, [Transport = 17, Tunnel = tunnel::VXLAN] {
        VxlanFlags "flags" 8 bits at 0, Format::Hex, "flags";
        VxlanVni "vni" 24 bits at 32, Format::Number, "network identifier";
    }
    VxlanGpe "vxlan-gpe" "VXLAN-GPE header (draft-ietf-nvo3-vxlan-gpe)", Tunnel x 1, [Transport = 17, Tunnel = tunnel::VXLAN_GPE] {
        GpeFlags "flags" 8 bits at 0, Format::Hex, "flags";
        GpeNext "next" 8 bits at 24, Format::Number, "what it carries: 1 IPv4, 2 IPv6, 3 Ethernet";
        GpeVni "vni" 24 bits at 32, Format::Number, "network identifier";
    }
    Geneve "geneve" "GENEVE header (RFC 8926)", Tunnel x 1, [Transport = 17, Tunnel = tunnel::GENEVE] {
        GeneveVni "vni" 24 bits at 32, Format::Number, "network identifier";
        GeneveProto "proto" 16 bits at 16, Format::Hex, "EtherType of what it carries; 0x6558 is Ethernet";
        GeneveOptLen "optlen" 6 bits at 2, Format::Number, "length of the options, 4 bytes each";
        GeneveOam "oam" 1 bits at 8, Format::Number, "control packet";
        GeneveCritical "critical" 1 bits at 9, Format::Number, "there are critical options";
    }
}

impl ItemKind {
    /// Its entry in the table.
    pub fn spec(self) -> &'static ItemSpec {
        &ITEMS[self as usize]
    }

    /// The item with this name.
    pub fn named(name: &str) -> Option<Self> {
        ITEMS.iter().find(|spec| spec.name == name).map(|spec| spec.kind)
    }

    /// The field of this item with this name.
    pub fn field(self, name: &str) -> Option<Field> {
        self.spec().fields.iter().copied().find(|field| field.spec().name == name)
    }
}

impl Field {
    /// Its entry in the table.
    pub fn spec(self) -> &'static FieldSpec {
        &FIELDS[self as usize]
    }

    /// Its name within its item.
    pub fn name(self) -> &'static str {
        self.spec().name
    }
}

/// A header that a pattern demands, and what its fields must be.
///
/// It says that the header is there; without fields, no more than that. What a pattern leaves out is not looked at.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    /// What it is about.
    pub kind: ItemKind,
    /// Whether it belongs to the stack inside the tunnel.
    pub inner: bool,
    fields: Vec<(Field, Bits)>,
}

impl Item {
    /// In the outer stack, without fields.
    pub fn new(kind: ItemKind) -> Self {
        Self { kind, inner: false, fields: Vec::new() }
    }

    /// The same in the inner stack.
    pub fn inside(mut self) -> Self {
        self.inner = true;
        self
    }

    /// With a field compared; replaces what was said about that field, and forgets it where the mask is 0.
    pub fn with(mut self, field: Field, bits: Bits) -> Self {
        match self.fields.binary_search_by_key(&field, |(f, _)| *f) {
            Ok(i) if bits.mask == 0 => drop(self.fields.remove(i)),
            Ok(i) => self.fields[i].1 = bits,
            Err(_) if bits.mask == 0 && bits.value == 0 => {}
            Err(i) => self.fields.insert(i, (field, bits)),
        }
        self
    }

    /// With all bits of a field equal to `value`.
    pub fn exact(self, field: Field, value: u128) -> Self {
        self.with(field, Bits::exact(value, field.spec().bits))
    }

    /// What is compared, in the order of [`Field`].
    pub fn fields(&self) -> &[(Field, Bits)] {
        &self.fields
    }

    /// What a field is compared with.
    pub fn get(&self, field: Field) -> Option<Bits> {
        self.fields.iter().find(|(f, _)| *f == field).map(|(_, bits)| *bits)
    }
}

/// The tables of items and fields as text for people.
pub fn items_reference() -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for item in ITEMS {
        let most = if item.most > 1 { format!("; up to {}", item.most) } else { String::new() };
        let _ = writeln!(text, "{}: {}{most}", item.name, item.about);
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
            assert_eq!(ItemKind::named(item.name), Some(item.kind));
            for field in item.fields {
                assert_eq!(field.spec().item, item.kind, "{field:?}");
                assert_eq!(item.kind.field(field.name()), Some(*field), "{field:?}");
            }
        }
        for (i, spec) in FIELDS.iter().enumerate() {
            assert_eq!(spec.field as usize, i);
            assert!(spec.bits <= 128 && spec.bits > 0);
            // "mask" and "inner" are words of the grammar.
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
