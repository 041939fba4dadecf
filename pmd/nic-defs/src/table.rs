//! Tables from which both the Rust types and the comparison with C headers follow.

/// One field of a structure, as a C compiler would see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name in the C header.
    pub name: &'static str,
    /// Bytes from the start of the structure.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// A structure with the name that it has in C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Structure {
    /// Name in the C header, with `struct` in front where C wants it.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Every field, in order.
    pub fields: &'static [Field],
}

/// A number with the name that it has in C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Name in the C header.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
}

/// Structures of one C header, as `repr(C)` types without padding, and a table of them for the comparison.
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
                /// The structure as the C header has it.
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

/// Numbers of one C header, and a table of them for the comparison.
macro_rules! constants {
    ($(#[$list_meta:meta])* $list:ident; $( $(#[$meta:meta])* $name:ident: $ty:ty = $value:expr, $c:literal; )*) => {
        $( $(#[$meta])* #[doc = concat!("`", $c, "`")] pub const $name: $ty = $value; )*

        $(#[$list_meta])*
        pub const $list: &[$crate::Constant] = &[$( $crate::Constant { name: $c, value: $name as u64 }, )*];
    };
}

/// A word made of bit fields: for each field a getter and a builder.
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

                #[doc = concat!("The word with [`Self::", stringify!($get), "`] set; bits of `value` that do not fit are cut off.")]
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
