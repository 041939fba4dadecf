//! The number of a port.

use std::fmt;
use std::num::NonZero;

/// Number of a port: an index that the application gives, in the order of its configuration.
///
/// `Option<PortId>` is two bytes wide and `None` is zero, so that metadata needs no reserved number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PortId(NonZero<u16>);

impl PortId {
    /// Largest number that a port can have.
    pub const MAX: u16 = u16::MAX - 1;

    /// The port with this number.
    ///
    /// # Panics
    /// If the number is above [`Self::MAX`].
    #[inline(always)]
    pub const fn new(number: u16) -> Self {
        match NonZero::new(number.wrapping_add(1)) {
            Some(stored) => Self(stored),
            None => panic!("port numbers end at 65534"),
        }
    }

    /// The port with this number, or `None` if the number is above [`Self::MAX`].
    #[inline(always)]
    pub fn checked(number: impl TryInto<u16>) -> Option<Self> {
        number.try_into().ok().filter(|number| *number <= Self::MAX).map(Self::new)
    }

    /// The number.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        self.0.get() - 1
    }

    /// The other port of a pair: 0 and 1, 2 and 3, and so on.
    ///
    /// # Panics
    /// If the number is [`Self::MAX`], whose pair has no number.
    #[inline(always)]
    pub const fn paired(self) -> Self {
        Self::new(self.number() ^ 1)
    }

    /// The number, as an index of a list of ports.
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.number() as usize
    }
}

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

impl fmt::Debug for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PortId({})", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_and_none_is_zero() {
        for number in [0, 1, 255, PortId::MAX] {
            assert_eq!(PortId::new(number).number(), number);
            assert_eq!(PortId::checked(u64::from(number)), Some(PortId::new(number)));
        }
        assert_eq!(PortId::checked(u16::MAX), None);
        assert_eq!(PortId::checked(1u128 << 64), None);
        assert_eq!(size_of::<Option<PortId>>(), 2);
    }
}
