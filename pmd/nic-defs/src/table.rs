//! Macros that define Rust types together with tables for the comparison with C headers.

/// Field of a structure, with the layout that a C compiler gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name in the C header.
    pub name: &'static str,
    /// Bytes from the start of the structure.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// Structure with its C name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Structure {
    /// Name in the C header, including the keyword `struct`.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// All fields in order.
    pub fields: &'static [Field],
}

/// Constant with its C name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Name in the C header.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
}

/// Defines the structures of one C header as `repr(C)` types without padding, and a table of them for the comparison.
macro_rules! structures {
    ($(#[$list_meta:meta])* $list:ident; $(
        $(#[$meta:meta])*
        struct $name:ident = $c:literal {
            $( $(#[$field_meta:meta])* $field:ident $(= $c_field:literal)? : $ty:ty, )*
        }
    )*) => {
        $(
            $(#[$meta])*
            #[derive(
                Clone, Copy, Debug, PartialEq, Eq,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            )]
            #[repr(C)]
            pub struct $name {
                $( $(#[$field_meta])* pub $field: $ty, )*
            }

            impl $name {
                /// Layout for the comparison with the C header.
                pub const STRUCTURE: $crate::Structure = $crate::Structure {
                    name: $c,
                    size: size_of::<Self>(),
                    fields: &[$( $crate::Field {
                        name: $crate::table::first!($($c_field,)? stringify!($field)),
                        offset: core::mem::offset_of!(Self, $field),
                        size: size_of::<$ty>(),
                    }, )*],
                };
            }
        )*

        $(#[$list_meta])*
        pub const $list: &[$crate::Structure] = &[$( $name::STRUCTURE, )*];
    };
}

/// Defines the constants of one C header, and a table of them for the comparison.
macro_rules! constants {
    ($(#[$list_meta:meta])* $list:ident; $( $(#[$meta:meta])* $name:ident: $ty:ty = $value:expr, $c:literal; )*) => {
        $( $(#[$meta])* #[doc = concat!("`", $c, "`")] pub const $name: $ty = $value; )*

        $(#[$list_meta])*
        pub const $list: &[$crate::Constant] = &[$( $crate::Constant { name: $c, value: $name as u64 }, )*];
    };
}

/// Defines a word of bit fields, with a getter and a builder method for each field.
macro_rules! bits {
    ($(
        $(#[$meta:meta])*
        struct $name:ident: $word:ty {
            $( $(#[$field_meta:meta])* $get:ident, $with:ident: $shift:literal, $width:literal; )*
        }
    )*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name(pub $word);

        impl $name {
            $(
                $(#[$field_meta])*
                #[inline]
                pub const fn $get(self) -> $word {
                    self.0 >> $shift & (<$word>::MAX >> (<$word>::BITS - $width))
                }

                #[doc = concat!("Returns the word with [`Self::", stringify!($get), "`] set.")]
                /// Bits of `value` that do not fit are discarded.
                #[inline]
                #[must_use]
                pub const fn $with(self, value: $word) -> Self {
                    let mask = <$word>::MAX >> (<$word>::BITS - $width);
                    Self(self.0 & !(mask << $shift) | (value & mask) << $shift)
                }
            )*
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name)) $( .field(stringify!($get), &self.$get()) )* .finish()
            }
        }
    )* };
}

macro_rules! first {
    ($first:expr $(, $rest:expr)*) => {
        $first
    };
}

pub(crate) use {bits, constants, first, structures};
