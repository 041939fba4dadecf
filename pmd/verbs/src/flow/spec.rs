//! The flow specs of `ibv_create_flow` as plain data, and their bytes.
//!
//! No call is made here and no pointer followed: [`encode`] writes what libibverbs reads (`struct ibv_flow_attr` and the specs
//! behind it, infiniband/verbs.h), [`kernel_command`] what the kernel gets from libibverbs (`CREATE_FLOW`,
//! rdma/ib_user_verbs.h). Numbers are in host order in the structures and big-endian in the bytes; type, size and tag are in
//! the byte order of the machine. Specs are bytes one behind the other, not a C structure: those with a pointer in them lie at
//! offsets that are no multiple of 8.

use thiserror::Error;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecLayout {
    /// Its type without [`INNER`].
    pub kind: u32,
    /// Bytes.
    pub size: usize,
    /// Where the values start.
    pub value: usize,
    /// Where the masks start.
    pub mask: usize,
    /// Bytes of each of them.
    pub filter: usize,
    /// Its type for the kernel.
    pub kernel_kind: u32,
    /// Whether there is one for the headers inside the tunnel.
    pub inner: bool,
}

/// A field of a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecField {
    /// Its name in infiniband/verbs.h.
    pub name: &'static str,
    /// Bits.
    pub bits: u8,
    /// What it must be, where the mask is 1.
    pub value: u128,
    /// 1 where bits must be equal.
    pub mask: u128,
}

macro_rules! specs {
    ($($(#[$doc:meta])* $variant:ident $filter:ident $kind:literal (kernel $kernel_kind:literal): $size:literal bytes, value $value:literal,
        mask $mask:literal, filter $len:literal, inner $inner:literal {
        $($(#[$fdoc:meta])* $field:ident: $ty:ty, at $at:literal;)*
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
            pub struct $filter {
                $($(#[$fdoc])* pub $field: $ty,)*
            }

            impl $filter {
                /// The spec of outer headers with these values where `mask` is 1.
                pub const fn under(self, mask: Self) -> Spec {
                    Spec::$variant { inner: false, value: self, mask }
                }

                /// The spec that only wants the header to be there.
                pub fn any() -> Spec {
                    Self::default().under(Self::default())
                }

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

        /// All kinds of specs with filters.
        pub const LAYOUTS: &[SpecLayout] = &[$(SpecLayout {
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

            /// Its fields.
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

            /// Compares more bits of the field of this name; false if the spec has no such field.
            pub fn compare(&mut self, name: &str, more_value: u128, more_mask: u128) -> bool {
                match self {
                    $(Self::$variant { value, mask, .. } => {
                        $(if name == stringify!($field) {
                            value.$field = <$ty>::of(value.$field.number() | more_value);
                            mask.$field = <$ty>::of(mask.$field.number() | more_mask);
                            return true;
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
    Eth EthFilter 0x20 (kernel 0x20): 40 bytes, value 6, mask 22, filter 16, inner true {
        /// Destination address.
        dst_mac: [u8; 6], at 0;
        /// Source address.
        src_mac: [u8; 6], at 6;
        /// EtherType behind the last tag.
        ether_type: u16, at 12;
        /// Priority (3), CFI (1), VLAN id (12) of the tag.
        vlan_tag: u16, at 14;
    }
    /// `ibv_flow_spec_ipv4`.
    Ipv4 Ipv4Filter 0x30 (kernel 0x30): 24 bytes, value 8, mask 16, filter 8, inner true {
        /// Source address.
        src_ip: u32, at 0;
        /// Destination address.
        dst_ip: u32, at 4;
    }
    /// `ibv_flow_spec_ipv6`.
    Ipv6 Ipv6Filter 0x31 (kernel 0x31): 88 bytes, value 8, mask 48, filter 40, inner true {
        /// Source address.
        src_ip: [u8; 16], at 0;
        /// Destination address.
        dst_ip: [u8; 16], at 16;
        /// Flow label, low 20 bits.
        flow_label: u32, at 32;
        /// Next header.
        next_hdr: u8, at 36;
        /// DSCP (6) and ECN (2).
        traffic_class: u8, at 37;
        /// Hop limit.
        hop_limit: u8, at 38;
    }
    /// `ibv_flow_spec_ipv4_ext`.
    Ipv4Ext Ipv4ExtFilter 0x32 (kernel 0x30): 32 bytes, value 8, mask 20, filter 12, inner true {
        /// Source address.
        src_ip: u32, at 0;
        /// Destination address.
        dst_ip: u32, at 4;
        /// Protocol.
        proto: u8, at 8;
        /// DSCP (6) and ECN (2).
        tos: u8, at 9;
        /// Time to live.
        ttl: u8, at 10;
        /// 2: don't fragment, 4: more fragments (`enum ib_ipv4_flags`).
        flags: u8, at 11;
    }
    /// `ibv_flow_spec_esp`.
    Esp EspFilter 0x34 (kernel 0x34): 24 bytes, value 8, mask 16, filter 8, inner true {
        /// Security parameters index.
        spi: u32, at 0;
        /// Sequence number.
        seq: u32, at 4;
    }
    /// `ibv_flow_spec_tcp_udp` for TCP.
    Tcp TcpFilter 0x40 (kernel 0x40): 16 bytes, value 6, mask 10, filter 4, inner true {
        /// Destination port.
        dst_port: u16, at 0;
        /// Source port.
        src_port: u16, at 2;
    }
    /// `ibv_flow_spec_tcp_udp` for UDP.
    Udp UdpFilter 0x41 (kernel 0x41): 16 bytes, value 6, mask 10, filter 4, inner true {
        /// Destination port.
        dst_port: u16, at 0;
        /// Source port.
        src_port: u16, at 2;
    }
    /// `ibv_flow_spec_tunnel`: VXLAN.
    Vxlan TunnelFilter 0x50 (kernel 0x50): 16 bytes, value 8, mask 12, filter 4, inner false {
        /// VNI in the low 24 bits.
        tunnel_id: u32, at 0;
    }
    /// `ibv_flow_spec_gre`.
    Gre GreFilter 0x51 (kernel 0x51): 24 bytes, value 8, mask 16, filter 8, inner false {
        /// Flags and version.
        c_ks_res0_ver: u16, at 0;
        /// EtherType of the payload.
        protocol: u16, at 2;
        /// Key.
        key: u32, at 4;
    }
    /// `ibv_flow_spec_mpls`.
    Mpls MplsFilter 0x60 (kernel 0x60): 16 bytes, value 8, mask 12, filter 4, inner true {
        /// Label (20), traffic class (3), bottom of stack (1), time to live (8).
        label: u32, at 0;
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

/// `IBV_FLOW_SPEC_ACTION_TAG`.
pub const TAG: u32 = 0x1000;
/// `IBV_FLOW_SPEC_ACTION_DROP`.
pub const DROP: u32 = 0x1001;
/// `IBV_FLOW_SPEC_ACTION_HANDLE`.
pub const HANDLE: u32 = 0x1002;
/// `IBV_FLOW_SPEC_ACTION_COUNT`.
pub const COUNT: u32 = 0x1003;

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
