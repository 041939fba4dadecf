//! Which memory the device can reach, and by which key.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use wirepath_memory::Region;

/// A registered region.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    first: u64,
    bytes: u64,
    lkey: u32,
    /// What is added to an address of ours to make it the device's: 0 in the process that registered the region.
    distance: u64,
    _region: Arc<Region>,
}

impl Key {
    /// `region`, registered whole under `lkey`.
    pub(crate) fn new(region: &Arc<Region>, lkey: u32) -> Self {
        Self::registered_at(region, lkey, region.base().as_ptr() as u64)
    }

    /// `region`, which a process registered whole under `lkey` that has it at address `there`.
    pub(crate) fn registered_at(region: &Arc<Region>, lkey: u32, there: u64) -> Self {
        let first = region.base().as_ptr() as u64;
        let distance = there.wrapping_sub(first);
        Self { first, bytes: region.bytes() as u64, lkey, distance, _region: Arc::clone(region) }
    }

    /// The key for an address, if it lies in the region.
    #[inline(always)]
    pub(crate) fn find(&self, address: u64) -> Option<u32> {
        (address.wrapping_sub(self.first) < self.bytes).then_some(self.lkey)
    }

    /// The key itself.
    #[inline(always)]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// What is added to an address of ours to make it the device's.
    #[inline(always)]
    pub(crate) fn distance(&self) -> u64 {
        self.distance
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

    /// Address as the device knows it, and key; `None` if the device cannot reach it.
    pub(crate) fn reach(&self, address: u64) -> Option<(u64, u32)> {
        let key = std::iter::once(&self.home).chain(&self.others).find(|key| key.find(address).is_some())?;
        Some((address.wrapping_add(key.distance), key.lkey))
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("home", &self.home).field("others", &self.others).finish_non_exhaustive()
    }
}
