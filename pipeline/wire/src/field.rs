//! How a header's table of fields becomes a view: constant offsets into an array whose length is known, so that an
//! access compiles to one load and cannot be out of bounds.

use core::net::{Ipv4Addr, Ipv6Addr};

/// A value that occupies `N` bytes on the wire, most significant byte first.
pub trait Field<const N: usize>: Copy {
    /// From wire bytes.
    fn read(bytes: [u8; N]) -> Self;
    /// To wire bytes.
    fn write(self) -> [u8; N];
}

macro_rules! number_fields {
    ($($ty:ty: $n:literal),*) => {$(
        impl Field<$n> for $ty {
            #[inline(always)]
            fn read(bytes: [u8; $n]) -> Self {
                <$ty>::from_be_bytes(bytes)
            }
            #[inline(always)]
            fn write(self) -> [u8; $n] {
                self.to_be_bytes()
            }
        }
    )*};
}
number_fields!(u8: 1, u16: 2, u32: 4, u64: 8);

impl<const N: usize> Field<N> for [u8; N] {
    #[inline(always)]
    fn read(bytes: [u8; N]) -> Self {
        bytes
    }
    #[inline(always)]
    fn write(self) -> [u8; N] {
        self
    }
}

impl Field<4> for Ipv4Addr {
    #[inline(always)]
    fn read(bytes: [u8; 4]) -> Self {
        Ipv4Addr::from_octets(bytes)
    }
    #[inline(always)]
    fn write(self) -> [u8; 4] {
        self.octets()
    }
}

impl Field<16> for Ipv6Addr {
    #[inline(always)]
    fn read(bytes: [u8; 16]) -> Self {
        Ipv6Addr::from_octets(bytes)
    }
    #[inline(always)]
    fn write(self) -> [u8; 16] {
        self.octets()
    }
}

/// The `N` bytes at `AT`; that they are inside is checked when this is compiled.
#[inline(always)]
pub(crate) fn get<const AT: usize, const N: usize, const LEN: usize>(bytes: &[u8; LEN]) -> [u8; N] {
    const { assert!(AT + N <= LEN) }
    let mut out = [0; N];
    out.copy_from_slice(&bytes[AT..AT + N]);
    out
}

/// Overwrites the `N` bytes at `AT`; that they are inside is checked when this is compiled.
#[inline(always)]
pub(crate) fn put<const AT: usize, const N: usize, const LEN: usize>(bytes: &mut [u8; LEN], value: [u8; N]) {
    const { assert!(AT + N <= LEN) }
    bytes[AT..AT + N].copy_from_slice(&value);
}

/// The 16-bit number at `AT`.
#[inline(always)]
pub(crate) fn be16<const AT: usize, const LEN: usize>(bytes: &[u8; LEN]) -> u16 {
    u16::from_be_bytes(get::<AT, 2, LEN>(bytes))
}

/// An open newtype over a code from the wire: `code! { /// doc pub struct Name(u16) { CONST = 1 "text", } }`.
macro_rules! code {
    ($(#[$doc:meta])* pub struct $name:ident($ty:ty) $n:literal { $($(#[$cdoc:meta])* $konst:ident = $value:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $ty);

        impl $name {
            $($(#[$cdoc])* #[doc = $text] pub const $konst: $name = $name($value);)*
        }

        impl $crate::field::Field<$n> for $name {
            #[inline(always)]
            fn read(bytes: [u8; $n]) -> Self {
                $name(<$ty>::from_be_bytes(bytes))
            }
            #[inline(always)]
            fn write(self) -> [u8; $n] {
                self.0.to_be_bytes()
            }
        }

        impl ::core::fmt::Display for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                match *self {
                    $($name::$konst => f.pad($text),)*
                    $name(other) => ::core::write!(f, "{other:#x}"),
                }
            }
        }

        impl ::core::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::write!(f, "{}({:#x})", ::core::stringify!($name), self.0)
            }
        }
    };
}

/// Declares `HEADER_LEN`, `View` and `ViewMut` of the module from a table of `[offset; bytes] getter, setter: Type`.
///
/// The module provides `fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError>`: given the
/// fixed part and how many bytes follow it, how many of those are options and how many payload. Bytes behind the payload
/// (padding) are not part of the view. `$short` is the error for a buffer shorter than the fixed part.
macro_rules! header {
    ($(#[$doc:meta])* $len:literal bytes, short: $short:ident { $($(#[$fdoc:meta])* [$at:literal; $n:literal] $get:ident, $set:ident: $ty:ty;)* }) => {
        /// Length of the fixed part of the header, bytes.
        pub const HEADER_LEN: usize = $len;

        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct View<'a> {
            header: &'a [u8; HEADER_LEN],
            options: &'a [u8],
            payload: &'a [u8],
        }

        #[allow(dead_code)]
        impl<'a> View<'a> {
            /// Lays the view over `bytes`, which start with the header.
            #[inline]
            pub fn new(bytes: &'a [u8]) -> Result<Self, $crate::ParseError> {
                let Some((header, rest)) = bytes.split_first_chunk() else {
                    return Err($crate::ParseError::$short);
                };
                let (options, payload) = split(header, rest.len())?;
                let (options, rest) = rest.split_at_checked(options).ok_or($crate::ParseError::$short)?;
                let payload = rest.get(..payload).ok_or($crate::ParseError::$short)?;
                Ok(View { header, options, payload })
            }

            /// The fixed part of the header.
            #[inline]
            pub fn header(&self) -> &'a [u8; HEADER_LEN] {
                self.header
            }

            /// Length of the header with its options, bytes.
            #[inline]
            pub fn header_len(&self) -> usize {
                HEADER_LEN + self.options.len()
            }

            /// What the header carries, without padding behind it.
            #[inline]
            pub fn payload(&self) -> &'a [u8] {
                self.payload
            }

            $($(#[$fdoc])*
            #[inline]
            pub fn $get(&self) -> $ty {
                $crate::field::Field::<$n>::read($crate::field::get::<$at, $n, HEADER_LEN>(self.header))
            })*
        }

        /// The same header, writable in place.
        #[derive(Debug)]
        pub struct ViewMut<'a> {
            header: &'a mut [u8; HEADER_LEN],
            options: &'a mut [u8],
            payload: &'a mut [u8],
        }

        #[allow(dead_code)]
        impl<'a> ViewMut<'a> {
            /// Lays the view over `bytes`, which start with a valid header. To write a new one use `Repr::emit`.
            #[inline]
            pub fn new(bytes: &'a mut [u8]) -> Result<Self, $crate::ParseError> {
                let Some((header, rest)) = bytes.split_first_chunk_mut() else {
                    return Err($crate::ParseError::$short);
                };
                let (options, payload) = split(header, rest.len())?;
                let (options, rest) = rest.split_at_mut_checked(options).ok_or($crate::ParseError::$short)?;
                let payload = rest.get_mut(..payload).ok_or($crate::ParseError::$short)?;
                Ok(ViewMut { header, options, payload })
            }

            /// The reading view of the same bytes.
            #[inline]
            pub fn view(&self) -> View<'_> {
                View { header: self.header, options: self.options, payload: self.payload }
            }

            /// What the header carries.
            #[inline]
            pub fn payload_mut(&mut self) -> &mut [u8] {
                self.payload
            }

            $(/// Overwrites the field of the getter's name.
            #[inline]
            pub fn $set(&mut self, value: $ty) {
                $crate::field::put::<$at, $n, HEADER_LEN>(self.header, $crate::field::Field::<$n>::write(value));
            })*
        }
    };
}

/// The first `N` bytes of `out`, or how many are missing.
#[inline(always)]
pub(crate) fn room<const N: usize>(out: &mut [u8]) -> Result<&mut [u8; N], crate::NoRoom> {
    let have = out.len();
    out.first_chunk_mut().ok_or(crate::NoRoom { need: N, have })
}
