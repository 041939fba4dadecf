//! Forwarding tables, which the control thread writes and the workers read without locks.
//!
//! [`Fdb`] maps a segment and an address to a destination. It consists of one [`HashTable`] at a time behind
//! an epoch pointer. The control thread holds the [`FdbWriter`], which learns, ages and limits the entries.

mod fdb;
mod hash;
mod hash_table;

use wirepath_wire::MacAddr;

pub use fdb::{Fdb, FdbEntry, FdbLimits, FdbWriter, LearnLimits, Learned};
pub(crate) use hash::{hash_pair, prefetch_at};
pub use hash::{hash_u64, prefetch};
pub use hash_table::{Entry, HashTable, NO_DESTINATION};

/// Key of a forwarding entry: the segment in the upper 16 bits and the Ethernet address in the lower 48,
/// first octet highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(u64);

impl Key {
    /// Creates the key of `mac` in `segment`.
    #[inline(always)]
    pub const fn new(segment: u16, mac: MacAddr) -> Self {
        Self((segment as u64) << 48 | mac.to_u64())
    }

    /// Returns the key as a number.
    #[inline(always)]
    pub const fn to_u64(self) -> u64 {
        self.0
    }

    /// Creates a key from its number.
    #[inline(always)]
    pub const fn from_u64(key: u64) -> Self {
        Self(key)
    }

    /// Segment.
    #[inline(always)]
    pub const fn segment(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Address.
    #[inline(always)]
    pub const fn mac(self) -> MacAddr {
        MacAddr::from_u64(self.0)
    }

    /// Returns whether the address is unicast: not zero and without the group bit.
    #[inline(always)]
    pub const fn is_unicast(self) -> bool {
        self.0 & (1 << 40) == 0 && self.0 & 0xffff_ffff_ffff != 0
    }

    /// Hash of the key, for tables and for load balancing.
    #[inline(always)]
    pub fn hash(self) -> u32 {
        hash_u64(self.0)
    }
}
