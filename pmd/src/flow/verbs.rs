//! The flow specs of `ibv_create_flow` as plain data: their bytes, and their translation to rules and back.
//!
//! No call is made here and no pointer followed: [`encode`] writes what libibverbs reads (`struct ibv_flow_attr` and the specs
//! behind it, infiniband/verbs.h), [`kernel_command`] what the kernel gets from libibverbs (`CREATE_FLOW`,
//! rdma/ib_user_verbs.h). Numbers are in host order in the structures and big-endian in the bytes; type, size and tag are in
//! the byte order of the machine.
//!
//! # Translation
//! [`to_verbs`] gives the specs that say what a rule says, or the item, field or action that specs have no words for.
//! [`from_verbs`] is the way back; `IPV4_EXT` whose protocol, TOS, TTL and flags are not compared comes back as `IPV4`, value
//! bits outside a mask as 0, and specs in the order of headers: nothing of what they mean is lost.
//! Two things a driver must know: the VXLAN spec implies no UDP port, and a VLAN in the ETH spec implies a C-VLAN tag.

use thiserror::Error;

use super::bits::ones;
use super::{Action, Bits, Direction, Field, Item, ItemKind, Rule, RuleError};

/// `IBV_FLOW_SPEC_INNER`: ORed to the type of a spec for the headers inside the tunnel.
pub const INNER: u32 = 0x100;
/// Most specs of a flow (kernel).
pub const MAX_SPECS: usize = 10;
/// Bytes of `struct ibv_flow_attr`.
pub const ATTR_LEN: usize = 20;
/// `IBV_FLOW_ATTR_FLAGS_DONT_TRAP`: the packet also goes to rules of lower priority.
pub const DONT_TRAP: u32 = 1 << 1;
/// `IBV_FLOW_ATTR_FLAGS_EGRESS`.
pub const EGRESS: u32 = 1 << 2;

/// Priority of the rule that stands for `MC_DEFAULT`: behind all that `NORMAL` flows can have.
pub const MC_DEFAULT_PRIORITY: u32 = 0x1_0000;
/// Priority of the rule that stands for `ALL_DEFAULT`.
pub const ALL_DEFAULT_PRIORITY: u32 = 0x1_0001;

/// `enum ibv_flow_attr_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowType(pub u32);

impl FlowType {
    /// What the specs say.
    pub const NORMAL: Self = Self(0);
    /// All that no other flow takes.
    pub const ALL_DEFAULT: Self = Self(1);
    /// All multicast that no other flow takes.
    pub const MC_DEFAULT: Self = Self(2);
    /// Copies of all that the port sends and receives.
    pub const SNIFFER: Self = Self(3);
}

/// `struct ibv_flow_attr` without what its specs determine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowAttr {
    /// Kind of flow.
    pub flow_type: FlowType,
    /// The lower number wins.
    pub priority: u16,
    /// Port of the device, from 1.
    pub port: u8,
    /// [`DONT_TRAP`], [`EGRESS`].
    pub flags: u32,
}

/// A value that filters have: `number` is what its bytes say, most significant first.
trait FilterValue: Copy {
    const LEN: usize;
    fn number(self) -> u128;
    fn of(number: u128) -> Self;
}

macro_rules! filter_values {
    ($($ty:ty)*) => {$(
        impl FilterValue for $ty {
            const LEN: usize = size_of::<$ty>();
            fn number(self) -> u128 {
                self.into()
            }
            fn of(number: u128) -> Self {
                number as $ty
            }
        }
    )*};
}
filter_values!(u8 u16 u32);

impl<const N: usize> FilterValue for [u8; N] {
    const LEN: usize = N;
    fn number(self) -> u128 {
        self.iter().fold(0, |number, byte| number << 8 | u128::from(*byte))
    }
    fn of(number: u128) -> Self {
        let bytes = number.to_be_bytes();
        std::array::from_fn(|i| bytes[16 - N + i])
    }
}

fn put<T: FilterValue>(out: &mut [u8], at: usize, value: T) {
    out[at..at + T::LEN].copy_from_slice(&value.number().to_be_bytes()[16 - T::LEN..]);
}

fn get<T: FilterValue>(bytes: &[u8], at: usize) -> T {
    T::of(bytes[at..at + T::LEN].iter().fold(0, |number, byte| number << 8 | u128::from(*byte)))
}

/// Where the bytes of a kind of spec lie. The kernel's filters always start at 8.
struct SpecLayout {
    kind: u32,
    size: usize,
    value: usize,
    mask: usize,
    filter: usize,
    kernel_kind: u32,
    inner: bool,
}

/// Part of a filter's field: which field of ours, and how far left it stands.
type Part = (Field, u8);

macro_rules! specs {
    ($($(#[$doc:meta])* $variant:ident $filter:ident $kind:literal (kernel $kernel_kind:literal): $size:literal bytes, value $value:literal,
        mask $mask:literal, filter $len:literal, item $item:ident, inner $inner:literal {
        $($(#[$fdoc:meta])* $field:ident: $ty:ty, at $at:literal = [$($part:ident << $shift:literal),*];)*
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
            pub struct $filter {
                $($(#[$fdoc])* pub $field: $ty,)*
            }

            impl $filter {
                fn put(&self, out: &mut [u8], at: usize) {
                    $(put(out, at + $at, self.$field);)*
                }

                fn get(bytes: &[u8], at: usize) -> Self {
                    Self { $($field: get(bytes, at + $at),)* }
                }
            }
        )*

        /// A flow spec.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Spec {
            $(
                $(#[$doc])*
                $variant {
                    /// Of the headers inside the tunnel.
                    inner: bool,
                    /// What the fields must be, where the mask is 1.
                    value: $filter,
                    /// 1 where bits must be equal.
                    mask: $filter,
                },
            )*
            /// `ibv_flow_spec_action_tag`: a mark, below 2^24.
            Tag(u32),
            /// `ibv_flow_spec_action_drop`.
            Drop,
            /// `ibv_flow_spec_action_handle`: the address of an `ibv_flow_action`, in the kernel command its handle.
            Handle(u64),
            /// `ibv_flow_spec_counter_action`: the address of an `ibv_counters`, in the kernel command its handle.
            Count(u64),
        }

        const LAYOUTS: &[SpecLayout] = &[$(SpecLayout {
            kind: $kind, size: $size, value: $value, mask: $mask, filter: $len, kernel_kind: $kernel_kind, inner: $inner,
        },)*];

        impl Spec {
            fn layout(&self) -> Option<&'static SpecLayout> {
                let kind = match self {
                    $(Self::$variant { .. } => $kind,)*
                    _ => return None,
                };
                LAYOUTS.iter().find(|layout| layout.kind == kind)
            }

            /// Whether it is about the headers inside the tunnel.
            pub fn is_inner(&self) -> bool {
                match self {
                    $(Self::$variant { inner, .. } => *inner,)*
                    _ => false,
                }
            }

            fn put_filters(&self, out: &mut [u8], value_at: usize, mask_at: usize) {
                match self {
                    $(Self::$variant { value, mask, .. } => {
                        value.put(out, value_at);
                        mask.put(out, mask_at);
                    })*
                    _ => {}
                }
            }

            fn get_filters(layout: &SpecLayout, inner: bool, bytes: &[u8]) -> Option<Self> {
                match layout.kind {
                    $($kind => Some(Self::$variant {
                        inner,
                        value: $filter::get(bytes, layout.value),
                        mask: $filter::get(bytes, layout.mask),
                    }),)*
                    _ => None,
                }
            }

            /// The item that it is about.
            fn item_kind(&self) -> Option<ItemKind> {
                match self {
                    $(Self::$variant { .. } => Some(ItemKind::$item),)*
                    _ => None,
                }
            }

            /// Its fields: name, parts, bits, value, mask.
            fn fields(&self) -> Vec<(&'static str, &'static [Part], u8, Bits)> {
                match self {
                    $(Self::$variant { value, mask, .. } => vec![$((
                        stringify!($field),
                        &[$((Field::$part, $shift)),*],
                        <$ty as FilterValue>::LEN as u8 * 8,
                        Bits { value: value.$field.number(), mask: mask.$field.number() },
                    ),)*],)*
                    _ => Vec::new(),
                }
            }

            /// Adds what is compared of one of our fields; false if the spec has no such field.
            fn add(&mut self, field: Field, bits: Bits) -> bool {
                match self {
                    $(Self::$variant { value, mask, .. } => {
                        $(for &(part, shift) in &[$((Field::$part, $shift as u8)),*] as &[Part] {
                            if part == field {
                                value.$field = <$ty>::of(value.$field.number() | bits.value << shift);
                                mask.$field = <$ty>::of(mask.$field.number() | bits.mask << shift);
                                return true;
                            }
                        })*
                        false
                    })*
                    _ => false,
                }
            }

            /// A spec that compares nothing yet, by its type without [`INNER`]; `None` for types without filters.
            pub fn empty(kind: u32, inner: bool) -> Option<Self> {
                match kind {
                    $($kind => Some(Self::$variant { inner, value: $filter::default(), mask: $filter::default() }),)*
                    _ => None,
                }
            }
        }
    };
}

specs! {
    /// `ibv_flow_spec_eth`.
    Eth EthFilter 0x20 (kernel 0x20): 40 bytes, value 6, mask 22, filter 16, item Eth, inner true {
        /// Destination address.
        dst_mac: [u8; 6], at 0 = [EthDst << 0];
        /// Source address.
        src_mac: [u8; 6], at 6 = [EthSrc << 0];
        /// EtherType behind the last tag.
        ether_type: u16, at 12 = [EthType << 0];
        /// Priority (3), CFI (1), VLAN id (12) of the tag.
        vlan_tag: u16, at 14 = [VlanPcp << 13, VlanDei << 12, VlanVid << 0];
    }
    /// `ibv_flow_spec_ipv4`.
    Ipv4 Ipv4Filter 0x30 (kernel 0x30): 24 bytes, value 8, mask 16, filter 8, item Ipv4, inner true {
        /// Source address.
        src_ip: u32, at 0 = [Ipv4Src << 0];
        /// Destination address.
        dst_ip: u32, at 4 = [Ipv4Dst << 0];
    }
    /// `ibv_flow_spec_ipv6`.
    Ipv6 Ipv6Filter 0x31 (kernel 0x31): 88 bytes, value 8, mask 48, filter 40, item Ipv6, inner true {
        /// Source address.
        src_ip: [u8; 16], at 0 = [Ipv6Src << 0];
        /// Destination address.
        dst_ip: [u8; 16], at 16 = [Ipv6Dst << 0];
        /// Flow label, low 20 bits.
        flow_label: u32, at 32 = [Ipv6Flow << 0];
        /// Next header.
        next_hdr: u8, at 36 = [Ipv6Next << 0];
        /// DSCP (6) and ECN (2).
        traffic_class: u8, at 37 = [Ipv6Dscp << 2, Ipv6Ecn << 0];
        /// Hop limit.
        hop_limit: u8, at 38 = [Ipv6Hops << 0];
    }
    /// `ibv_flow_spec_ipv4_ext`.
    Ipv4Ext Ipv4ExtFilter 0x32 (kernel 0x30): 32 bytes, value 8, mask 20, filter 12, item Ipv4, inner true {
        /// Source address.
        src_ip: u32, at 0 = [Ipv4Src << 0];
        /// Destination address.
        dst_ip: u32, at 4 = [Ipv4Dst << 0];
        /// Protocol.
        proto: u8, at 8 = [Ipv4Proto << 0];
        /// DSCP (6) and ECN (2).
        tos: u8, at 9 = [Ipv4Dscp << 2, Ipv4Ecn << 0];
        /// Time to live.
        ttl: u8, at 10 = [Ipv4Ttl << 0];
        /// 2: don't fragment, 4: more fragments (`enum ib_ipv4_flags`).
        flags: u8, at 11 = [Ipv4Df << 1, Ipv4Mf << 2];
    }
    /// `ibv_flow_spec_esp`.
    Esp EspFilter 0x34 (kernel 0x34): 24 bytes, value 8, mask 16, filter 8, item Esp, inner true {
        /// Security parameters index.
        spi: u32, at 0 = [EspSpi << 0];
        /// Sequence number.
        seq: u32, at 4 = [EspSeq << 0];
    }
    /// `ibv_flow_spec_tcp_udp` for TCP.
    Tcp TcpFilter 0x40 (kernel 0x40): 16 bytes, value 6, mask 10, filter 4, item Tcp, inner true {
        /// Destination port.
        dst_port: u16, at 0 = [TcpDst << 0];
        /// Source port.
        src_port: u16, at 2 = [TcpSrc << 0];
    }
    /// `ibv_flow_spec_tcp_udp` for UDP.
    Udp UdpFilter 0x41 (kernel 0x41): 16 bytes, value 6, mask 10, filter 4, item Udp, inner true {
        /// Destination port.
        dst_port: u16, at 0 = [UdpDst << 0];
        /// Source port.
        src_port: u16, at 2 = [UdpSrc << 0];
    }
    /// `ibv_flow_spec_tunnel`: VXLAN.
    Vxlan TunnelFilter 0x50 (kernel 0x50): 16 bytes, value 8, mask 12, filter 4, item Vxlan, inner false {
        /// VNI in the low 24 bits.
        tunnel_id: u32, at 0 = [VxlanVni << 0];
    }
    /// `ibv_flow_spec_gre`.
    Gre GreFilter 0x51 (kernel 0x51): 24 bytes, value 8, mask 16, filter 8, item Gre, inner false {
        /// Flags and version.
        c_ks_res0_ver: u16, at 0 = [GreFlags << 0];
        /// EtherType of the payload.
        protocol: u16, at 2 = [GreProto << 0];
        /// Key.
        key: u32, at 4 = [GreKey << 0];
    }
    /// `ibv_flow_spec_mpls`.
    Mpls MplsFilter 0x60 (kernel 0x60): 16 bytes, value 8, mask 12, filter 4, item Mpls, inner true {
        /// Label (20), traffic class (3), bottom of stack (1), time to live (8).
        label: u32, at 0 = [MplsLabel << 12, MplsTc << 9, MplsBos << 8, MplsTtl << 0];
    }
}

/// `IBV_FLOW_SPEC_ETH`.
pub const ETH: u32 = 0x20;
/// `IBV_FLOW_SPEC_IPV4`.
pub const IPV4: u32 = 0x30;
/// `IBV_FLOW_SPEC_IPV6`.
pub const IPV6: u32 = 0x31;
/// `IBV_FLOW_SPEC_IPV4_EXT`.
pub const IPV4_EXT: u32 = 0x32;
/// `IBV_FLOW_SPEC_ESP`.
pub const ESP: u32 = 0x34;
/// `IBV_FLOW_SPEC_TCP`.
pub const TCP: u32 = 0x40;
/// `IBV_FLOW_SPEC_UDP`.
pub const UDP: u32 = 0x41;
/// `IBV_FLOW_SPEC_VXLAN_TUNNEL`.
pub const VXLAN: u32 = 0x50;
/// `IBV_FLOW_SPEC_GRE`.
pub const GRE: u32 = 0x51;
/// `IBV_FLOW_SPEC_MPLS`.
pub const MPLS: u32 = 0x60;

/// What only the long IPv4 spec compares.
const IPV4_EXT_ONLY: &[Field] =
    &[Field::Ipv4Proto, Field::Ipv4Dscp, Field::Ipv4Ecn, Field::Ipv4Ttl, Field::Ipv4Df, Field::Ipv4Mf];

const TAG: u32 = 0x1000;
const DROP: u32 = 0x1001;
const HANDLE: u32 = 0x1002;
const COUNT: u32 = 0x1003;

impl Spec {
    /// Its type, with [`INNER`].
    pub fn kind(&self) -> u32 {
        match (self, self.layout()) {
            (_, Some(layout)) => layout.kind | if self.is_inner() { INNER } else { 0 },
            (Self::Tag(_), _) => TAG,
            (Self::Drop, _) => DROP,
            (Self::Handle(_), _) => HANDLE,
            _ => COUNT,
        }
    }

    /// Bytes that it takes for libibverbs.
    pub fn size(&self) -> usize {
        match self {
            Self::Tag(_) => 12,
            Self::Drop => 8,
            Self::Handle(_) | Self::Count(_) => 16,
            filtered => filtered.layout().map_or(0, |layout| layout.size),
        }
    }

    fn append(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.kind().to_ne_bytes());
        out.extend_from_slice(&(self.size() as u16).to_ne_bytes());
        out.resize(start + self.size(), 0);
        let bytes = &mut out[start..];
        match self {
            Self::Tag(tag) => bytes[8..12].copy_from_slice(&tag.to_ne_bytes()),
            Self::Handle(pointer) | Self::Count(pointer) => bytes[8..16].copy_from_slice(&pointer.to_ne_bytes()),
            filtered => {
                if let Some(layout) = filtered.layout() {
                    filtered.put_filters(bytes, layout.value, layout.mask);
                }
            }
        }
    }

    fn append_kernel(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let (kind, size) = match self.layout() {
            Some(layout) => (layout.kernel_kind | self.kind() & INNER, 8 + 2 * layout.filter),
            None => (self.kind(), if *self == Self::Drop { 8 } else { 16 }),
        };
        out.extend_from_slice(&kind.to_ne_bytes());
        out.extend_from_slice(&(size as u16).to_ne_bytes());
        out.resize(start + size, 0);
        let bytes = &mut out[start..];
        match self {
            Self::Tag(tag) => bytes[8..12].copy_from_slice(&tag.to_ne_bytes()),
            Self::Handle(handle) | Self::Count(handle) => bytes[8..12].copy_from_slice(&(*handle as u32).to_ne_bytes()),
            filtered => {
                if let Some(layout) = filtered.layout() {
                    filtered.put_filters(bytes, 8, 8 + layout.filter);
                }
            }
        }
    }
}

/// `struct ibv_flow_attr` with its specs behind it, as `ibv_create_flow` takes them.
pub fn encode(attr: &FlowAttr, specs: &[Spec]) -> Vec<u8> {
    let size = ATTR_LEN + specs.iter().map(Spec::size).sum::<usize>();
    let mut out = Vec::with_capacity(size);
    out.extend_from_slice(&0u32.to_ne_bytes());
    out.extend_from_slice(&attr.flow_type.0.to_ne_bytes());
    out.extend_from_slice(&(size as u16).to_ne_bytes());
    out.extend_from_slice(&attr.priority.to_ne_bytes());
    out.extend_from_slice(&[specs.len() as u8, attr.port, 0, 0]);
    out.extend_from_slice(&attr.flags.to_ne_bytes());
    specs.iter().for_each(|spec| spec.append(&mut out));
    out
}

/// The core of the kernel's `CREATE_FLOW` command: 24 bytes and the kernel's own form of the specs.
pub fn kernel_command(attr: &FlowAttr, specs: &[Spec], qp_handle: u32) -> Vec<u8> {
    let mut body = Vec::new();
    specs.iter().for_each(|spec| spec.append_kernel(&mut body));
    let mut out = Vec::with_capacity(24 + body.len());
    out.extend_from_slice(&0u32.to_ne_bytes());
    out.extend_from_slice(&qp_handle.to_ne_bytes());
    out.extend_from_slice(&attr.flow_type.0.to_ne_bytes());
    out.extend_from_slice(&(body.len() as u16).to_ne_bytes());
    out.extend_from_slice(&attr.priority.to_ne_bytes());
    out.extend_from_slice(&[specs.len() as u8, 0, 0, attr.port]);
    out.extend_from_slice(&attr.flags.to_ne_bytes());
    out.extend_from_slice(&body);
    out
}

/// Bytes that are no flow.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Fewer bytes than a header or the size in it says.
    #[error("the bytes end inside the structure at offset {0}")]
    Truncated(usize),
    /// `comp_mask` must be 0.
    #[error("comp_mask is {0:#x}, not 0")]
    CompMask(u32),
    /// More specs than the kernel takes.
    #[error("{0} specs; there are at most {MAX_SPECS}")]
    TooMany(u8),
    /// A type that is not known.
    #[error("spec type {kind:#x} at offset {offset} is not known")]
    Kind {
        /// Where the spec begins.
        offset: usize,
        /// Its type.
        kind: u32,
    },
    /// A size that the type does not have.
    #[error("spec type {kind:#x} at offset {offset} has size {size}")]
    Size {
        /// Where the spec begins.
        offset: usize,
        /// Its type.
        kind: u32,
        /// Its size.
        size: u16,
    },
    /// Bytes behind the last spec.
    #[error("{0} bytes are left behind the last spec")]
    LeftOver(usize),
}

/// Reads what [`encode`] writes. Safe on any bytes; the sizes in them are checked, which libibverbs does not do.
pub fn decode(bytes: &[u8]) -> Result<(FlowAttr, Vec<Spec>), DecodeError> {
    let head: &[u8; ATTR_LEN] = bytes.first_chunk().ok_or(DecodeError::Truncated(0))?;
    let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if word(0) != 0 {
        return Err(DecodeError::CompMask(word(0)));
    }
    let attr = FlowAttr {
        flow_type: FlowType(word(4)),
        priority: u16::from_ne_bytes([head[10], head[11]]),
        port: head[13],
        flags: word(16),
    };
    let count = head[12];
    if usize::from(count) > MAX_SPECS {
        return Err(DecodeError::TooMany(count));
    }
    let (mut specs, mut offset) = (Vec::new(), ATTR_LEN);
    for _ in 0..count {
        let head: &[u8; 6] = bytes.get(offset..).and_then(|b| b.first_chunk()).ok_or(DecodeError::Truncated(offset))?;
        let kind = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
        let size = u16::from_ne_bytes([head[4], head[5]]);
        let layout = LAYOUTS.iter().find(|l| l.kind == kind & !INNER && (kind & INNER == 0 || l.inner));
        let expected = match (kind, layout) {
            (_, Some(layout)) => layout.size,
            (TAG, _) => 12,
            (DROP, _) => 8,
            (HANDLE | COUNT, _) => 16,
            _ => return Err(DecodeError::Kind { offset, kind }),
        };
        if usize::from(size) != expected {
            return Err(DecodeError::Size { offset, kind, size });
        }
        let spec = bytes.get(offset..offset + expected).ok_or(DecodeError::Truncated(offset))?;
        let pointer = || spec.get(8..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_ne_bytes(*b));
        specs.push(match (kind, layout) {
            (_, Some(layout)) => {
                let read = Spec::get_filters(layout, kind & INNER != 0, spec);
                read.ok_or(DecodeError::Kind { offset, kind })?
            }
            (TAG, _) => Spec::Tag(u32::from_ne_bytes([spec[8], spec[9], spec[10], spec[11]])),
            (DROP, _) => Spec::Drop,
            (HANDLE, _) => Spec::Handle(pointer()),
            _ => Spec::Count(pointer()),
        });
        offset += expected;
    }
    match bytes.len() - offset {
        0 => Ok((attr, specs)),
        left => Err(DecodeError::LeftOver(left)),
    }
}

/// Why a rule has no words in flow specs, or a flow none in rules.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Untranslatable {
    /// No spec is about this item (in this stack).
    #[error("item {}: no flow spec is about {what}", .index + 1)]
    Item {
        /// Place in the pattern.
        index: usize,
        /// The item, as it is written.
        what: String,
    },
    /// The item's spec does not have this field.
    #[error("item {}: the flow spec has no field for {what}", .index + 1)]
    Field {
        /// Place in the pattern.
        index: usize,
        /// Item and field, as they are written.
        what: String,
    },
    /// A VLAN item without fields: in the ETH spec a mask of 0 demands no tag.
    #[error("item {}: a flow spec demands a VLAN tag only by a mask on it", .index + 1)]
    BareVlan {
        /// Place in the pattern.
        index: usize,
    },
    /// No spec does this.
    #[error("action {}: no flow spec does {what}", .index + 1)]
    Action {
        /// Place among the actions.
        index: usize,
        /// The action's name.
        what: &'static str,
    },
    /// Priorities of flows have 16 bits.
    #[error("priority {0} is above 65535")]
    Priority(u32),
    /// More specs than the kernel takes.
    #[error("{0} specs; there are at most {MAX_SPECS}")]
    TooMany(usize),
    /// Copies of all traffic.
    #[error("flow type {0} has no rule: it does not say which packets go where")]
    FlowType(u32),
    /// A flag without a meaning in rules.
    #[error("flow flags {0:#x}: a rule that matches is the last to run, there is no DONT_TRAP")]
    Flags(u32),
    /// A mask on bits that mean nothing.
    #[error("the mask of {field} in spec {} has bits {bits:#x} that no field of rules has", .index + 1)]
    MaskBits {
        /// Place among the specs.
        index: usize,
        /// Field of the spec.
        field: &'static str,
        /// The bits.
        bits: u128,
    },
    /// A flow action whose meaning the caller does not know.
    #[error("spec {}: the meaning of this flow action is not in the spec", .index + 1)]
    UnknownHandle {
        /// Place among the specs.
        index: usize,
    },
    /// The specs contradict each other or stand for no stack of headers.
    #[error("the specs make no rule: {0}")]
    Rule(#[from] RuleError),
}

/// A rule in flow specs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The flow.
    pub attr: FlowAttr,
    /// Its specs. Where an object is needed first, [`Spec::Handle`] and [`Spec::Count`] hold 0.
    pub specs: Vec<Spec>,
    /// What objects to make, and in which specs to put their addresses.
    pub objects: Vec<(usize, Action)>,
    /// Where packets go: the queue pair is not part of the specs. `None` with `drop`, and where the rule has no fate.
    pub destination: Option<Action>,
}

/// All multicast.
fn multicast() -> Vec<Item> {
    let group = 1 << 40;
    vec![Item::new(ItemKind::Eth).with(Field::EthDst, Bits { value: group, mask: group })]
}

/// The specs that say what a rule says, on a port of a device.
pub fn to_verbs(rule: &Rule, port: u8) -> Result<Translation, Untranslatable> {
    let pattern = rule.pattern();
    let (flow_type, priority, pattern) = match (rule.priority(), rule.direction()) {
        (MC_DEFAULT_PRIORITY, Direction::Ingress) if pattern == multicast() => (FlowType::MC_DEFAULT, 0, &[][..]),
        (ALL_DEFAULT_PRIORITY, Direction::Ingress) if pattern.is_empty() => (FlowType::ALL_DEFAULT, 0, &[][..]),
        (priority, _) => {
            let priority = u16::try_from(priority).map_err(|_| Untranslatable::Priority(priority))?;
            (FlowType::NORMAL, priority, pattern)
        }
    };
    let mut specs: Vec<Spec> = Vec::new();
    for (index, item) in pattern.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|i| pattern.get(i)).filter(|b| b.inner == item.inner);
        let again = before.is_some_and(|before| before.kind == item.kind);
        let kind = match item.kind {
            ItemKind::Eth => ETH,
            ItemKind::Vlan if !again && item.fields().is_empty() => return Err(Untranslatable::BareVlan { index }),
            ItemKind::Vlan if !again => ETH,
            ItemKind::Ipv4 if item.fields().iter().any(|(field, _)| IPV4_EXT_ONLY.contains(field)) => IPV4_EXT,
            ItemKind::Ipv4 => IPV4,
            ItemKind::Ipv6 => IPV6,
            ItemKind::Esp => ESP,
            ItemKind::Tcp => TCP,
            ItemKind::Udp => UDP,
            ItemKind::Mpls if !again => MPLS,
            ItemKind::Vxlan if !item.inner => VXLAN,
            ItemKind::Gre if !item.inner => GRE,
            _ => 0,
        };
        // A VLAN tag belongs to the Ethernet spec that is there.
        let tag = item.kind == ItemKind::Vlan && before.is_some_and(|before| before.kind == ItemKind::Eth);
        let spec = if tag { specs.pop() } else { Spec::empty(kind, item.inner) };
        let Some(mut spec) = spec else {
            let inner = if item.inner { "inner " } else { "" };
            let second = if again { "a second " } else { "" };
            return Err(Untranslatable::Item { index, what: format!("{second}{inner}{}", item.kind.spec().name) });
        };
        for &(field, bits) in item.fields() {
            if !spec.add(field, bits) {
                let what = format!("{} {}", item.kind.spec().name, field.name());
                return Err(Untranslatable::Field { index, what });
            }
        }
        specs.push(spec);
    }
    let (mut objects, mut destination) = (Vec::new(), None);
    for (index, action) in rule.actions().iter().enumerate() {
        match action {
            Action::Queue(_) | Action::Rss(_) => destination = Some(action.clone()),
            Action::Drop => specs.push(Spec::Drop),
            Action::Mark(mark) => specs.push(Spec::Tag(*mark)),
            Action::Count => {
                objects.push((specs.len(), action.clone()));
                specs.push(Spec::Count(0));
            }
            Action::Set { .. } | Action::DecTtl | Action::PushVlan(_) | Action::PopVlan | Action::Reformat(_) => {
                objects.push((specs.len(), action.clone()));
                specs.push(Spec::Handle(0));
            }
            other => return Err(Untranslatable::Action { index, what: other.spec().name }),
        }
    }
    if specs.len() > MAX_SPECS {
        return Err(Untranslatable::TooMany(specs.len()));
    }
    let flags = if rule.direction() == Direction::Egress { EGRESS } else { 0 };
    Ok(Translation { attr: FlowAttr { flow_type, priority, port, flags }, specs, objects, destination })
}

/// The rule that says what a flow says. `object` tells what the flow action of the
/// [`Spec::Handle`] with this place does; `destination` is
/// where the flow's queue pair delivers to, unless the specs drop.
pub fn from_verbs(
    attr: &FlowAttr,
    specs: &[Spec],
    destination: Option<Action>,
    mut object: impl FnMut(usize) -> Option<Action>,
) -> Result<Rule, Untranslatable> {
    if attr.flags & !EGRESS != 0 {
        return Err(Untranslatable::Flags(attr.flags & !EGRESS));
    }
    let direction = if attr.flags & EGRESS != 0 { Direction::Egress } else { Direction::Ingress };
    let mut headers: Vec<(u8, Item)> = Vec::new();
    let (priority, defaults) = match attr.flow_type {
        FlowType::NORMAL => (attr.priority.into(), Vec::new()),
        FlowType::MC_DEFAULT => (MC_DEFAULT_PRIORITY, multicast()),
        FlowType::ALL_DEFAULT => (ALL_DEFAULT_PRIORITY, Vec::new()),
        FlowType(other) => return Err(Untranslatable::FlowType(other)),
    };
    headers.extend(defaults.into_iter().map(|item| (1, item)));
    let mut actions = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        match spec {
            Spec::Tag(tag) => actions.push(Action::Mark(*tag)),
            Spec::Drop => actions.push(Action::Drop),
            Spec::Count(_) => actions.push(Action::Count),
            Spec::Handle(_) => actions.push(object(index).ok_or(Untranslatable::UnknownHandle { index })?),
            spec => {
                // The place of MPLS is that behind the spec before it; all others may stand in any order.
                let before = index.checked_sub(1).map(|i| &specs[i]);
                headers_of(index, spec, before, &mut headers)?;
            }
        }
    }
    headers.sort_by_key(|(order, item)| (item.inner, *order));
    // A flow drops or delivers; what else it does comes before.
    if let Some(at) = actions.iter().position(|action| *action == Action::Drop) {
        let drop = actions.remove(at);
        actions.push(drop);
    } else {
        actions.extend(destination);
    }
    let pattern = headers.into_iter().map(|(_, item)| item).collect();
    Ok(Rule::new(direction, priority, pattern, actions)?)
}

/// The items that a spec is about: one, or Ethernet and a VLAN tag.
fn headers_of(
    index: usize,
    spec: &Spec,
    before: Option<&Spec>,
    headers: &mut Vec<(u8, Item)>,
) -> Result<(), Untranslatable> {
    let Some(kind) = spec.item_kind() else { return Ok(()) };
    let order = match (kind, before) {
        (ItemKind::Mpls, Some(Spec::Udp { inner, .. } | Spec::Gre { inner, .. })) if *inner == spec.is_inner() => 6,
        (ItemKind::Mpls, _) => 3,
        _ => kind.spec().layer as u8,
    };
    let make = |kind| if spec.is_inner() { Item::new(kind).inside() } else { Item::new(kind) };
    let mut item = make(kind);
    let mut tag: Option<Item> = None;
    for (name, parts, bits, all) in spec.fields() {
        let known = parts.iter().fold(0, |known, &(field, shift)| known | ones(field.spec().bits) << shift);
        let strange = all.mask & ones(bits) & !known;
        if strange != 0 {
            return Err(Untranslatable::MaskBits { index, field: name, bits: strange });
        }
        for &(field, shift) in parts {
            let mask = all.mask >> shift & ones(field.spec().bits);
            if mask == 0 {
                continue;
            }
            let part = Bits { value: all.value >> shift & mask, mask };
            if field.spec().item == kind {
                item = item.with(field, part);
            } else {
                tag = Some(tag.unwrap_or_else(|| make(field.spec().item)).with(field, part));
            }
        }
    }
    headers.push((order, item));
    headers.extend(tag.map(|tag| (2, tag)));
    Ok(())
}

#[cfg(test)]
mod tests;
