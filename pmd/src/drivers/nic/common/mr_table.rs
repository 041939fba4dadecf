//! Memory regions that the device can access, with their lkeys.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use wirepath_memory::Region;

/// A registered region.
#[derive(Clone, Debug)]
pub(crate) struct RegisteredRegion {
    first: u64,
    bytes: u64,
    lkey: u32,
    /// Offset from an address of this process to the device's IOVA: 0 in the process that registered the
    /// region.
    iova_offset: u64,
    _region: Arc<Region>,
}

impl RegisteredRegion {
    /// Describes `region`, which this process registered whole under `lkey`.
    pub(crate) fn new(region: &Arc<Region>, lkey: u32) -> Self {
        Self::registered_at(region, lkey, region.base().as_ptr() as u64)
    }

    /// Describes `region`, which another process registered whole under `lkey` and maps at address `there`.
    pub(crate) fn registered_at(region: &Arc<Region>, lkey: u32, remote_base: u64) -> Self {
        let first = region.base().as_ptr() as u64;
        let iova_offset = remote_base.wrapping_sub(first);
        Self { first, bytes: region.bytes() as u64, lkey, iova_offset, _region: Arc::clone(region) }
    }

    /// Returns the lkey if the address lies in the region.
    #[inline(always)]
    pub(crate) fn find(&self, address: u64) -> Option<u32> {
        (address.wrapping_sub(self.first) < self.bytes).then_some(self.lkey)
    }

    /// Returns the lkey.
    #[inline(always)]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the offset from an address of this process to the device's IOVA.
    #[inline(always)]
    pub(crate) fn iova_offset(&self) -> u64 {
        self.iova_offset
    }
}

/// Registered regions of a port: the region of its pool, and others from which it may send packets.
pub(crate) struct MrTable {
    primary: RegisteredRegion,
    others: Vec<RegisteredRegion>,
    /// The registrations, which end with the last ring.
    _registrations: Box<dyn Any + Send + Sync>,
}

impl MrTable {
    /// Creates the table. `registrations` is dropped with it.
    pub(crate) fn new(
        primary: RegisteredRegion,
        others: Vec<RegisteredRegion>,
        registrations: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { primary, others, _registrations: registrations }
    }

    /// Returns the region of the port's pool.
    #[inline(always)]
    pub(crate) fn primary_mr(&self) -> &RegisteredRegion {
        &self.primary
    }

    /// Returns IOVA and lkey of an address. `None` if the device cannot access it.
    pub(crate) fn translate(&self, address: u64) -> Option<(u64, u32)> {
        let key = std::iter::once(&self.primary).chain(&self.others).find(|key| key.find(address).is_some())?;
        Some((address.wrapping_add(key.iova_offset), key.lkey))
    }
}

impl fmt::Debug for MrTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MrTable").field("home", &self.primary).field("others", &self.others).finish_non_exhaustive()
    }
}
