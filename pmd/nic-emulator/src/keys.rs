//! Memory regions, indexed by memory key.

use wirepath_nic_defs::uverbs::{ACCESS_LOCAL_WRITE, ACCESS_ZERO_BASED};

use crate::host::Region;
use crate::slots::CachePadded;

/// A registered memory region.
#[derive(Clone, Debug)]
pub struct Mr<R> {
    /// Pinned memory.
    pub region: R,
    /// Address by which descriptors refer to the start of the region.
    pub iova: u64,
    /// Protection domain, as the device's number.
    pub pd: u32,
    /// Access flags, `ACCESS_*`.
    pub access: u32,
    key: u32,
}

/// All memory regions of a device.
#[derive(Debug)]
pub struct MkeyTable<R> {
    slots: Vec<CachePadded<Option<Mr<R>>>>,
    generation: u32,
}

/// Reasons why an address cannot be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// No memory region has this key.
    Key,
    /// The memory region belongs to another protection domain.
    Domain,
    /// The range is not inside the memory region.
    Range {
        /// First address of the region.
        start: u64,
        /// Length of the region in bytes.
        length: u64,
    },
    /// The memory region is not registered for local writes.
    Access,
}

impl std::fmt::Display for KeyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Key => f.write_str("no memory region has this key"),
            Self::Domain => f.write_str("the memory region is of another protection domain"),
            Self::Range { start, length } => write!(f, "outside its memory region {start:#x}, {length} bytes"),
            Self::Access => f.write_str("the memory region was not registered for local writes"),
        }
    }
}

impl<R: Region> Default for MkeyTable<R> {
    fn default() -> Self {
        // Key 0 is never assigned.
        Self { slots: vec![CachePadded(None)], generation: 0 }
    }
}

impl<R: Region> MkeyTable<R> {
    /// Registers a memory region; returns its slot and its key. Keys contain a generation number, so that a
    /// stale key is detected.
    pub fn add(&mut self, region: R, iova: u64, pd: u32, access: u32) -> (u32, u32) {
        let iova = if access & ACCESS_ZERO_BASED != 0 { 0 } else { iova };
        let slot = self.slots.iter().skip(1).position(|slot| slot.0.is_none()).map_or(self.slots.len(), |at| at + 1);
        self.generation = (self.generation + 1) & 0xff;
        let key = (slot as u32) << 8 | self.generation;
        let mr = CachePadded(Some(Mr { region, iova, pd, access, key }));
        if slot == self.slots.len() {
            self.slots.push(mr);
        } else {
            self.slots[slot] = mr;
        }
        (slot as u32, key)
    }

    /// Removes the memory region of a slot.
    pub fn remove(&mut self, slot: u32) {
        if let Some(mr) = self.slots.get_mut(slot as usize) {
            mr.0 = None;
        }
    }

    /// Returns key and length of the memory region of a slot.
    pub fn key_and_length(&self, slot: u32) -> Option<(u32, u64)> {
        let mr = self.slots.get(slot as usize)?.0.as_ref()?;
        Some((mr.key, mr.region.length()))
    }

    /// Returns the memory of `key` and the offset of `address` in it, if `length` bytes may be accessed.
    ///
    /// # Errors
    /// The reason why the access is not allowed.
    #[inline]
    pub fn find(&self, key: u32, address: u64, length: u64, pd: u32, write: bool) -> Result<(&R, u64), KeyError> {
        let mr = self
            .slots
            .get((key >> 8) as usize)
            .and_then(|slot| slot.0.as_ref())
            .filter(|mr| mr.key == key)
            .ok_or(KeyError::Key)?;
        if mr.pd != pd {
            return Err(KeyError::Domain);
        }
        let size = mr.region.length();
        let offset = address.wrapping_sub(mr.iova);
        if offset > size || length > size - offset {
            return Err(KeyError::Range { start: mr.iova, length: size });
        }
        if write && mr.access & ACCESS_LOCAL_WRITE == 0 {
            return Err(KeyError::Access);
        }
        Ok((&mr.region, offset))
    }
}
