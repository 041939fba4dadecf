//! Which memory the device can reach, and by which key.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use wirepath_memory::Region;

/// A registered region. Its addresses are those of this process.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    first: u64,
    bytes: u64,
    lkey: u32,
    _region: Arc<Region>,
}

impl Key {
    /// `region`, registered whole under `lkey`.
    pub(crate) fn new(region: &Arc<Region>, lkey: u32) -> Self {
        let first = region.base().as_ptr() as u64;
        Self { first, bytes: region.bytes() as u64, lkey, _region: Arc::clone(region) }
    }

    /// The key for an address, if it lies in the region.
    #[inline(always)]
    pub(crate) fn find(&self, address: u64) -> Option<u32> {
        (address.wrapping_sub(self.first) < self.bytes).then_some(self.lkey)
    }

    /// First address, bytes and key, for loops.
    #[inline(always)]
    pub(super) fn bounds(&self) -> (u64, u64, u32) {
        (self.first, self.bytes, self.lkey)
    }

    /// The key itself.
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }
}

/// The registered regions of a port: that of its pool, and others whose packets it may be asked to send.
pub(crate) struct Keys {
    home: Key,
    others: Vec<Key>,
    /// The registrations; ended with the last ring.
    _registrations: Box<dyn Any + Send + Sync>,
}

impl Keys {
    /// `registrations` is what is dropped when nobody needs the keys any more.
    pub(crate) fn new(home: Key, others: Vec<Key>, registrations: Box<dyn Any + Send + Sync>) -> Self {
        Self { home, others, _registrations: registrations }
    }

    /// The region of the port's pool.
    #[inline(always)]
    pub(crate) fn home(&self) -> &Key {
        &self.home
    }

    /// The key for an address; `None` if the device cannot reach it.
    pub(crate) fn find(&self, address: u64) -> Option<u32> {
        self.home.find(address).or_else(|| self.others.iter().find_map(|key| key.find(address)))
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("home", &self.home).field("others", &self.others).finish_non_exhaustive()
    }
}
