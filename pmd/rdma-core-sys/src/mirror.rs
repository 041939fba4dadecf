//! The one table per header from which Rust types, their layouts and the C program that checks them all come.

/// What is mirrored from one header.
#[derive(Debug)]
pub struct Table {
    /// The header as it is included, such as `infiniband/verbs.h`.
    pub header: &'static str,
    /// rdma-core version without whose header nothing here can be compared; `u32::MAX`: no distribution has the header.
    pub since: u32,
    /// Structs and unions.
    pub types: &'static [TypeLayout],
    /// Enumerators and macros.
    pub constants: &'static [Constant],
}

/// Layout of a struct or union.
#[derive(Debug)]
pub struct TypeLayout {
    /// The type in C; `__typeof__(...)` for types that have no name there.
    pub c_name: &'static str,
    /// First rdma-core version whose header has it; 0: all that are supported.
    pub since: u32,
    /// Bytes.
    pub size: usize,
    /// Bytes.
    pub align: usize,
    /// In the order of the header.
    pub fields: &'static [Field],
}

/// A field of a struct or union.
#[derive(Debug)]
pub struct Field {
    /// The field in C, possibly a path such as `qp_type.xrc.remote_srqn`.
    pub c_name: &'static str,
    /// First rdma-core version whose header has it; 0: all that are supported.
    pub since: u32,
    /// Bytes from the start of the type.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// An enumerator or a macro.
#[derive(Debug)]
pub struct Constant {
    /// Its name in C.
    pub name: &'static str,
    /// First rdma-core version whose header has it; 0: all that are supported.
    pub since: u32,
    /// The value as C's `long long`.
    pub value: i64,
}

macro_rules! or_given {
    ($default:expr) => {
        $default
    };
    ($default:expr, $given:literal) => {
        $given
    };
}

/// `NAME as "C name" since VERSION { field as "C field" since VERSION: type, ... }`; `as` where C calls it otherwise, `since` where
/// rdma-core 44 does not have it. All types are plain: integers, pointers and optional functions, for which zero is a value.
macro_rules! mirror {
    (
        header $header:literal $(since $hs:literal)? as $table:ident;
        structs {
            $($(#[$sm:meta])* $s:ident $(as $sc:literal)? $(since $ss:literal)? {
                $($(#[$sfm:meta])* $sf:ident $(as $sfc:literal)? $(since $sfs:literal)? : $sft:ty),* $(,)?
            })*
        }
        unions {
            $($(#[$um:meta])* $u:ident $(as $uc:literal)? $(since $us:literal)? {
                $($(#[$ufm:meta])* $uf:ident $(as $ufc:literal)? : $uft:ty),* $(,)?
            })*
        }
        constants {
            $($ct:ty { $($(#[$cm:meta])* $c:ident $(since $cs:literal)? = $cv:expr),* $(,)? })*
        }
    ) => {
        $(
            $(#[$sm])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $s { $($(#[$sfm])* pub $sf: $sft),* }

            impl $s {
                /// All bytes zero.
                pub const fn zeroed() -> Self {
                    // SAFETY: only plain types are mirrored, see `mirror!`.
                    unsafe { core::mem::MaybeUninit::zeroed().assume_init() }
                }
            }

            impl Default for $s {
                fn default() -> Self {
                    Self::zeroed()
                }
            }
        )*
        $(
            $(#[$um])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub union $u { $($(#[$ufm])* pub $uf: $uft),* }

            impl $u {
                /// All bytes zero.
                pub const fn zeroed() -> Self {
                    // SAFETY: only plain types are mirrored, see `mirror!`.
                    unsafe { core::mem::MaybeUninit::zeroed().assume_init() }
                }
            }
        )*
        $($($(#[$cm])* pub const $c: $ct = $cv;)*)*

        /// What this module mirrors.
        pub(crate) static $table: $crate::Table = $crate::Table {
            header: $header,
            since: or_given!(0 $(, $hs)?),
            types: &[
                $($crate::TypeLayout {
                    c_name: or_given!(concat!("struct ", stringify!($s)) $(, $sc)?),
                    since: or_given!(0 $(, $ss)?),
                    size: size_of::<$s>(),
                    align: align_of::<$s>(),
                    fields: &[$($crate::Field {
                        c_name: or_given!(stringify!($sf) $(, $sfc)?),
                        since: or_given!(0 $(, $sfs)?),
                        offset: core::mem::offset_of!($s, $sf),
                        size: size_of::<$sft>(),
                    }),*],
                },)*
                $($crate::TypeLayout {
                    c_name: or_given!(concat!("union ", stringify!($u)) $(, $uc)?),
                    since: or_given!(0 $(, $us)?),
                    size: size_of::<$u>(),
                    align: align_of::<$u>(),
                    fields: &[$($crate::Field {
                        c_name: or_given!(stringify!($uf) $(, $ufc)?),
                        since: 0,
                        offset: core::mem::offset_of!($u, $uf),
                        size: size_of::<$uft>(),
                    }),*],
                },)*
            ],
            constants: &[
                $($($crate::Constant {
                    name: stringify!($c),
                    since: or_given!(0 $(, $cs)?),
                    value: $c as i64,
                },)*)*
            ],
        };
    };
}
