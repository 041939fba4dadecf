//! Flow specs of `ibv_create_flow` as plain data, and their encoding.
//!
//! This module makes no calls and follows no pointers. [`encode`] writes the input of libibverbs: `struct
//! ibv_flow_attr` followed by the specs (infiniband/verbs.h). [`kernel_command`] writes the command that libibverbs
//! sends to the kernel (`CREATE_FLOW`, rdma/ib_user_verbs.h).
//!
//! Fields are in host byte order in the Rust types and big-endian in the encoding. Type, size and tag are in host
//! byte order in both. Specs follow each other without padding, so specs with a pointer may be at offsets that are
//! not a multiple of 8.

use thiserror::Error;

/// `IBV_FLOW_SPEC_INNER`: flag of a spec type for the headers inside the tunnel.
pub const INNER: u32 = 0x100;
/// Maximum number of specs in a flow (kernel limit).
pub const MAX_SPECS: usize = 10;
/// Size of `struct ibv_flow_attr` in bytes.
pub const ATTR_LEN: usize = 20;
/// `IBV_FLOW_ATTR_FLAGS_DONT_TRAP`: rules of lower priority receive the packet as well.
pub const DONT_TRAP: u32 = 1 << 1;
/// `IBV_FLOW_ATTR_FLAGS_EGRESS`: the flow applies to sent packets.
pub const EGRESS: u32 = 1 << 2;

/// Type of a flow (`enum ibv_flow_attr_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowType(pub u32);

impl FlowType {
    /// Packets that match the specs.
    pub const NORMAL: Self = Self(0);
    /// All packets that match no other flow.
    pub const ALL_DEFAULT: Self = Self(1);
    /// Multicast packets that match no other flow.
    pub const MC_DEFAULT: Self = Self(2);
    /// Copies of all packets that the port sends and receives.
    pub const SNIFFER: Self = Self(3);
}

/// `struct ibv_flow_attr` without the fields that follow from the specs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowAttr {
    /// Type of the flow.
    pub flow_type: FlowType,
    /// Priority. A lower number takes precedence.
    pub priority: u16,
    /// Port of the device, counted from 1.
    pub port: u8,
    /// Flags: [`DONT_TRAP`], [`EGRESS`].
    pub flags: u32,
}

/// Type of a filter field. `number` interprets its bytes as big-endian.
trait FilterValue: Copy {
    const LEN: usize;
    fn number(self) -> u128;
    fn from_number(number: u128) -> Self;
}

macro_rules! filter_values {
    ($($ty:ty)*) => {$(
        impl FilterValue for $ty {
            const LEN: usize = size_of::<$ty>();
            fn number(self) -> u128 {
                self.into()
            }
            fn from_number(number: u128) -> Self {
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
    fn from_number(number: u128) -> Self {
        let bytes = number.to_be_bytes();
        std::array::from_fn(|i| bytes[16 - N + i])
    }
}

fn put<T: FilterValue>(out: &mut [u8], at: usize, value: T) {
    out[at..at + T::LEN].copy_from_slice(&value.number().to_be_bytes()[16 - T::LEN..]);
}

fn get<T: FilterValue>(bytes: &[u8], at: usize) -> T {
    T::from_number(bytes[at..at + T::LEN].iter().fold(0, |number, byte| number << 8 | u128::from(*byte)))
}

/// Layout of a spec type. Kernel filters always start at offset 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecLayout {
    /// Type without [`INNER`].
    pub kind: u32,
    /// Size in bytes.
    pub size: usize,
    /// Byte offset of the values.
    pub value: usize,
    /// Byte offset of the masks.
    pub mask: usize,
    /// Size of the values in bytes. The masks have the same size.
    pub filter: usize,
    /// Type in the kernel command.
    pub kernel_kind: u32,
    /// True if the spec may apply to the headers inside the tunnel.
    pub inner: bool,
}

/// Field of a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecField {
    /// Field name in infiniband/verbs.h.
    pub name: &'static str,
    /// Number of bits.
    pub bits: u8,
    /// Value, compared where the mask is 1.
    pub value: u128,
    /// Mask; 1 for each bit that is compared.
    pub mask: u128,
}

macro_rules! specs {
    ($($(#[$doc:meta])* $variant:ident $filter:ident $kind:literal (kernel $kernel_kind:literal): $size:literal bytes,
        value $value:literal, mask $mask:literal, filter $len:literal, inner $inner:literal {
        $($(#[$fdoc:meta])* $field:ident: $ty:ty, at $at:literal;)*
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
            pub struct $filter {
                $($(#[$fdoc])* pub $field: $ty,)*
            }

            impl $filter {
                /// Returns the spec of outer headers that compares these values where `mask` is 1.
                pub const fn with_mask(self, mask: Self) -> Spec {
                    Spec::$variant { inner: false, value: self, mask }
                }

                /// Returns the spec that only requires the header to be present.
                pub fn any() -> Spec {
                    Self::default().with_mask(Self::default())
                }

                fn put(&self, out: &mut [u8], at: usize) {
                    $(put(out, at + $at, self.$field);)*
                }

                fn get(bytes: &[u8], at: usize) -> Self {
                    Self { $($field: get(bytes, at + $at),)* }
                }
            }
        )*

        /// Flow spec.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Spec {
            $(
                $(#[$doc])*
                $variant {
                    /// True if the spec applies to the headers inside the tunnel.
                    inner: bool,
                    /// Values, compared where the mask is 1.
                    value: $filter,
                    /// Mask; 1 for each bit that is compared.
                    mask: $filter,
                },
            )*
            /// `ibv_flow_spec_action_tag`: tag for the packet, below 2^24.
            Tag(u32),
            /// `ibv_flow_spec_action_drop`: drops the packet.
            Drop,
            /// `ibv_flow_spec_action_handle`: address of an `ibv_flow_action`, or its handle in the kernel command.
            Handle(u64),
            /// `ibv_flow_spec_counter_action`: address of an `ibv_counters`, or its handle in the kernel command.
            Count(u64),
        }

        /// Layouts of all spec types with filters.
        pub const LAYOUTS: &[SpecLayout] = &[$(SpecLayout {
            kind: $kind,
            size: $size,
            value: $value,
            mask: $mask,
            filter: $len,
            kernel_kind: $kernel_kind,
            inner: $inner,
        },)*];

        impl Spec {
            fn layout(&self) -> Option<&'static SpecLayout> {
                let kind = match self {
                    $(Self::$variant { .. } => $kind,)*
                    _ => return None,
                };
                LAYOUTS.iter().find(|layout| layout.kind == kind)
            }

            /// Returns true if the spec applies to the headers inside the tunnel.
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

            /// Returns the fields.
            pub fn fields(&self) -> Vec<SpecField> {
                match self {
                    $(Self::$variant { value, mask, .. } => vec![$(SpecField {
                        name: stringify!($field),
                        bits: <$ty as FilterValue>::LEN as u8 * 8,
                        value: value.$field.number(),
                        mask: mask.$field.number(),
                    },)*],)*
                    _ => Vec::new(),
                }
            }

            /// Adds bits to the comparison of the field `name`. Returns false if the spec has no such field.
            pub fn add_match(&mut self, name: &str, more_value: u128, more_mask: u128) -> bool {
                match self {
                    $(Self::$variant { value, mask, .. } => {
                        $(if name == stringify!($field) {
                            value.$field = <$ty>::from_number(value.$field.number() | more_value);
                            mask.$field = <$ty>::from_number(mask.$field.number() | more_mask);
                            return true;
                        })*
                        false
                    })*
                    _ => false,
                }
            }

            /// Returns a spec of type `kind` (without [`INNER`]) that compares no bits, or `None` for types without
            /// filters.
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
    /// Ethernet header (`ibv_flow_spec_eth`).
    Eth EthFilter 0x20 (kernel 0x20): 40 bytes, value 6, mask 22, filter 16, inner true {
        /// Destination address.
        dst_mac: [u8; 6], at 0;
        /// Source address.
        src_mac: [u8; 6], at 6;
        /// EtherType after the last VLAN tag.
        ether_type: u16, at 12;
        /// Priority (3 bits), CFI (1) and VLAN ID (12) of the tag.
        vlan_tag: u16, at 14;
    }
    /// IPv4 addresses (`ibv_flow_spec_ipv4`).
    Ipv4 Ipv4Filter 0x30 (kernel 0x30): 24 bytes, value 8, mask 16, filter 8, inner true {
        /// Source address.
        src_ip: u32, at 0;
        /// Destination address.
        dst_ip: u32, at 4;
    }
    /// IPv6 header (`ibv_flow_spec_ipv6`).
    Ipv6 Ipv6Filter 0x31 (kernel 0x31): 88 bytes, value 8, mask 48, filter 40, inner true {
        /// Source address.
        src_ip: [u8; 16], at 0;
        /// Destination address.
        dst_ip: [u8; 16], at 16;
        /// Flow label, in the low 20 bits.
        flow_label: u32, at 32;
        /// Next header.
        next_hdr: u8, at 36;
        /// DSCP (6 bits) and ECN (2).
        traffic_class: u8, at 37;
        /// Hop limit.
        hop_limit: u8, at 38;
    }
    /// IPv4 header (`ibv_flow_spec_ipv4_ext`).
    Ipv4Ext Ipv4ExtFilter 0x32 (kernel 0x30): 32 bytes, value 8, mask 20, filter 12, inner true {
        /// Source address.
        src_ip: u32, at 0;
        /// Destination address.
        dst_ip: u32, at 4;
        /// Protocol.
        proto: u8, at 8;
        /// DSCP (6 bits) and ECN (2).
        tos: u8, at 9;
        /// Time to live.
        ttl: u8, at 10;
        /// Flags; 2: don't fragment, 4: more fragments (`enum ib_ipv4_flags`).
        flags: u8, at 11;
    }
    /// ESP header (`ibv_flow_spec_esp`).
    Esp EspFilter 0x34 (kernel 0x34): 24 bytes, value 8, mask 16, filter 8, inner true {
        /// Security parameters index.
        spi: u32, at 0;
        /// Sequence number.
        seq: u32, at 4;
    }
    /// TCP ports (`ibv_flow_spec_tcp_udp`).
    Tcp TcpFilter 0x40 (kernel 0x40): 16 bytes, value 6, mask 10, filter 4, inner true {
        /// Destination port.
        dst_port: u16, at 0;
        /// Source port.
        src_port: u16, at 2;
    }
    /// UDP ports (`ibv_flow_spec_tcp_udp`).
    Udp UdpFilter 0x41 (kernel 0x41): 16 bytes, value 6, mask 10, filter 4, inner true {
        /// Destination port.
        dst_port: u16, at 0;
        /// Source port.
        src_port: u16, at 2;
    }
    /// VXLAN header (`ibv_flow_spec_tunnel`).
    Vxlan TunnelFilter 0x50 (kernel 0x50): 16 bytes, value 8, mask 12, filter 4, inner false {
        /// VNI in the low 24 bits.
        tunnel_id: u32, at 0;
    }
    /// GRE header (`ibv_flow_spec_gre`).
    Gre GreFilter 0x51 (kernel 0x51): 24 bytes, value 8, mask 16, filter 8, inner false {
        /// Flags and version.
        c_ks_res0_ver: u16, at 0;
        /// EtherType of the payload.
        protocol: u16, at 2;
        /// Key.
        key: u32, at 4;
    }
    /// MPLS label stack entry (`ibv_flow_spec_mpls`).
    Mpls MplsFilter 0x60 (kernel 0x60): 16 bytes, value 8, mask 12, filter 4, inner true {
        /// Label (20 bits), traffic class (3), bottom of stack (1) and time to live (8).
        label: u32, at 0;
    }
}

/// Spec type `IBV_FLOW_SPEC_ETH`.
pub const ETH: u32 = 0x20;
/// Spec type `IBV_FLOW_SPEC_IPV4`.
pub const IPV4: u32 = 0x30;
/// Spec type `IBV_FLOW_SPEC_IPV6`.
pub const IPV6: u32 = 0x31;
/// Spec type `IBV_FLOW_SPEC_IPV4_EXT`.
pub const IPV4_EXT: u32 = 0x32;
/// Spec type `IBV_FLOW_SPEC_ESP`.
pub const ESP: u32 = 0x34;
/// Spec type `IBV_FLOW_SPEC_TCP`.
pub const TCP: u32 = 0x40;
/// Spec type `IBV_FLOW_SPEC_UDP`.
pub const UDP: u32 = 0x41;
/// Spec type `IBV_FLOW_SPEC_VXLAN_TUNNEL`.
pub const VXLAN: u32 = 0x50;
/// Spec type `IBV_FLOW_SPEC_GRE`.
pub const GRE: u32 = 0x51;
/// Spec type `IBV_FLOW_SPEC_MPLS`.
pub const MPLS: u32 = 0x60;

/// Spec type `IBV_FLOW_SPEC_ACTION_TAG`.
pub const TAG: u32 = 0x1000;
/// Spec type `IBV_FLOW_SPEC_ACTION_DROP`.
pub const DROP: u32 = 0x1001;
/// Spec type `IBV_FLOW_SPEC_ACTION_HANDLE`.
pub const HANDLE: u32 = 0x1002;
/// Spec type `IBV_FLOW_SPEC_ACTION_COUNT`.
pub const COUNT: u32 = 0x1003;

impl Spec {
    /// Returns the type, including [`INNER`].
    pub fn kind(&self) -> u32 {
        match (self, self.layout()) {
            (_, Some(layout)) => layout.kind | if self.is_inner() { INNER } else { 0 },
            (Self::Tag(_), _) => TAG,
            (Self::Drop, _) => DROP,
            (Self::Handle(_), _) => HANDLE,
            _ => COUNT,
        }
    }

    /// Returns the size in bytes for libibverbs.
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

/// Encodes a `struct ibv_flow_attr` followed by its specs, as input of `ibv_create_flow`.
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

/// Encodes the core of the kernel's `CREATE_FLOW` command: 24 bytes followed by the kernel's format of the specs.
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

/// Error of [`decode`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// There are fewer bytes than a header needs or its size field says.
    #[error("the bytes end inside the structure at offset {0}")]
    Truncated(usize),
    /// `comp_mask` is not 0.
    #[error("comp_mask is {0:#x}, not 0")]
    CompMask(u32),
    /// There are more specs than the kernel supports.
    #[error("{0} specs; the maximum is {MAX_SPECS}")]
    TooMany(u8),
    /// The type of a spec is unknown.
    #[error("spec type {kind:#x} at offset {offset} is not known")]
    Kind {
        /// Offset of the spec.
        offset: usize,
        /// Type of the spec.
        kind: u32,
    },
    /// The size does not match the type of the spec.
    #[error("spec type {kind:#x} at offset {offset} has the wrong size {size}")]
    Size {
        /// Offset of the spec.
        offset: usize,
        /// Type of the spec.
        kind: u32,
        /// Size of the spec.
        size: u16,
    },
    /// Bytes follow the last spec.
    #[error("{0} bytes follow the last spec")]
    LeftOver(usize),
}

/// Decodes the output of [`encode`]. Accepts any bytes and checks all sizes, which libibverbs does not.
///
/// # Errors
/// The bytes are not a valid flow.
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
