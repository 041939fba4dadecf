//! Mirror tables: one table per header yields the Rust types, their layouts, and the C program that checks
//! them.

/// Mirrored items of one header.
#[derive(Debug)]
pub struct Table {
    /// Header name in `#include`, such as `infiniband/verbs.h`.
    pub header: &'static str,
    /// First rdma-core version with the header; `u32::MAX` if no distribution has it.
    pub since: u32,
    /// Structs and unions.
    pub types: &'static [TypeLayout],
    /// Enumerators and macros.
    pub constants: &'static [Constant],
}

/// Layout of a struct or union.
#[derive(Debug)]
pub struct TypeLayout {
    /// Type in C; `__typeof__(...)` for types without a name.
    pub c_name: &'static str,
    /// First rdma-core version with the type; 0 for all supported versions.
    pub since: u32,
    /// Size, bytes.
    pub size: usize,
    /// Alignment, bytes.
    pub align: usize,
    /// Fields in the order of the header.
    pub fields: &'static [Field],
}

/// A field of a struct or union.
#[derive(Debug)]
pub struct Field {
    /// Field in C, possibly a path such as `qp_type.xrc.remote_srqn`.
    pub c_name: &'static str,
    /// First rdma-core version with the field; 0 for all supported versions.
    pub since: u32,
    /// Offset from the start of the type, bytes.
    pub offset: usize,
    /// Size, bytes.
    pub size: usize,
}

/// An enumerator or a macro.
#[derive(Debug)]
pub struct Constant {
    /// Name in C.
    pub name: &'static str,
    /// First rdma-core version with the constant; 0 for all supported versions.
    pub since: u32,
    /// Value as the C type `long long`.
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

/// Declares C types: `NAME as "C name" since VERSION { field as "C field" since VERSION: type, ... }`.
///
/// `as` gives the name in C if it differs. `since` marks what rdma-core 44 does not have. All field types are
/// integers, pointers, optional functions, or mirrored types and arrays of these. Zero is a valid value of
/// each.
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
                /// Returns the type with all bytes zero.
                pub const fn zeroed() -> Self {
                    // SAFETY: every field is an integer, a pointer, an optional function, or an array or struct
                    // of these, so all-zero bytes are valid.
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
                /// Returns the type with all bytes zero.
                pub const fn zeroed() -> Self {
                    // SAFETY: every field is an integer, a pointer, an optional function, or an array or struct
                    // of these, so all-zero bytes are valid.
                    unsafe { core::mem::MaybeUninit::zeroed().assume_init() }
                }
            }
        )*
        $($($(#[$cm])* pub const $c: $ct = $cv;)*)*

        /// Mirror table of this module.
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
