//! Header views from field tables. Fields have constant offsets in an array of known length: an access
//! compiles to one load and cannot be out of bounds.

use core::net::{Ipv4Addr, Ipv6Addr};

/// A value of `N` bytes on the wire, most significant byte first.
pub trait Field<const N: usize>: Copy {
    /// Converts from wire bytes.
    fn read(bytes: [u8; N]) -> Self;
    /// Converts to wire bytes.
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

/// Returns the `N` bytes at `AT`. The bounds are checked at compile time.
#[inline(always)]
pub(crate) fn get<const AT: usize, const N: usize, const LEN: usize>(bytes: &[u8; LEN]) -> [u8; N] {
    const { assert!(AT + N <= LEN) }
    let mut out = [0; N];
    out.copy_from_slice(&bytes[AT..AT + N]);
    out
}

/// Overwrites the `N` bytes at `AT`. The bounds are checked at compile time.
#[inline(always)]
pub(crate) fn put<const AT: usize, const N: usize, const LEN: usize>(bytes: &mut [u8; LEN], value: [u8; N]) {
    const { assert!(AT + N <= LEN) }
    bytes[AT..AT + N].copy_from_slice(&value);
}

/// Returns the 16-bit number at `AT`.
#[inline(always)]
pub(crate) fn be16<const AT: usize, const LEN: usize>(bytes: &[u8; LEN]) -> u16 {
    u16::from_be_bytes(get::<AT, 2, LEN>(bytes))
}

/// Declares an open newtype for a code from the wire:
/// `code! { /// doc pub struct Name(u16) 2 { CONST = 1 "text", } }`. The number is the size in bytes.
macro_rules! code {
    ($(#[$doc:meta])* pub struct $name:ident($ty:ty) $n:literal {
        $($(#[$cdoc:meta])* $konst:ident = $value:literal $text:literal,)*
    }) => {
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

/// Declares `HEADER_LEN`, `View` and `ViewMut` of a module from a table of `[offset; bytes] getter, setter:
/// Type`.
///
/// The module provides `fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize),
/// ParseError>`. It gets the fixed part and the number of bytes after it, and returns the lengths of options
/// and payload. Bytes after the payload (padding) are not part of the view. `$short` is the error for a
/// buffer that is shorter than the fixed part.
macro_rules! header {
    ($(#[$doc:meta])* $len:literal bytes, short: $short:ident {
        $($(#[$fdoc:meta])* [$at:literal; $n:literal] $get:ident, $set:ident: $ty:ty;)*
    }) => {
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
            /// Creates the view of `bytes`, which start with the header.
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

            /// Returns the fixed part of the header.
            #[inline]
            pub fn header(&self) -> &'a [u8; HEADER_LEN] {
                self.header
            }

            /// Returns the length of the header with its options, bytes.
            #[inline]
            pub fn header_len(&self) -> usize {
                HEADER_LEN + self.options.len()
            }

            /// Returns the payload, without the padding after it.
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

        /// A writable view of the header.
        #[derive(Debug)]
        pub struct ViewMut<'a> {
            header: &'a mut [u8; HEADER_LEN],
            options: &'a mut [u8],
            payload: &'a mut [u8],
        }

        #[allow(dead_code)]
        impl<'a> ViewMut<'a> {
            /// Creates the view of `bytes`, which start with a valid header. Use `Repr::emit` to write a new
            /// header.
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

            /// Returns a read-only view of the same bytes.
            #[inline]
            pub fn view(&self) -> View<'_> {
                View { header: self.header, options: self.options, payload: self.payload }
            }

            /// Returns the payload.
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

/// Returns the first `N` bytes of `out`.
#[inline(always)]
pub(crate) fn header_mut<const N: usize>(out: &mut [u8]) -> Result<&mut [u8; N], crate::BufferTooShort> {
    let have = out.len();
    out.first_chunk_mut().ok_or(crate::BufferTooShort { need: N, have })
}

/// Takes the next option of an IPv4 or TCP header: kind and value. Skips padding and ends at "end of options".
///
/// An option that exceeds the header gives `error`, which is the last item.
pub(crate) fn next_option<'a>(
    options: &mut &'a [u8],
    error: crate::ParseError,
) -> Option<Result<(u8, &'a [u8]), crate::ParseError>> {
    loop {
        let (&kind, rest) = options.split_first()?;
        match kind {
            0 => {
                *options = &[];
                return None;
            }
            1 => *options = rest,
            _ => {
                let value = rest.first().and_then(|&len| rest.get(1..usize::from(len).checked_sub(1)?));
                *options = value.and_then(|v| rest.get(1 + v.len()..)).unwrap_or(&[]);
                return Some(value.map(|v| (kind, v)).ok_or(error));
            }
        }
    }
}
