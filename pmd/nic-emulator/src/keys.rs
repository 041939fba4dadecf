//! Memory regions by key.

use wirepath_nic_defs::uverbs::ACCESS_LOCAL_WRITE;

use crate::host::Region;
use crate::slab::Apart;

/// A registered memory region.
#[derive(Clone, Debug)]
pub struct Mr<R> {
    /// The memory.
    pub region: R,
    /// Address that descriptors use for its start.
    pub iova: u64,
    /// Protection domain, as the device numbers it.
    pub pd: u32,
    /// `ACCESS_*`.
    pub access: u32,
    key: u32,
}

/// All regions of a device.
#[derive(Debug)]
pub struct Keys<R> {
    slots: Vec<Apart<Option<Mr<R>>>>,
    generation: u32,
}

/// Why an address cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No region has the key.
    Key,
    /// Region of another protection domain.
    Domain,
    /// Not all inside the region.
    Range {
        /// Where the region begins.
        start: u64,
        /// Its bytes.
        length: u64,
    },
    /// The region may only be read.
    Access,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Key => f.write_str("no memory region has this key"),
            Self::Domain => f.write_str("the memory region is of another protection domain"),
            Self::Range { start, length } => write!(f, "outside its memory region {start:#x}, {length} bytes"),
            Self::Access => f.write_str("the memory region was not registered for local writes"),
        }
    }
}

impl<R: Region> Default for Keys<R> {
    fn default() -> Self {
        // Key 0 is never given.
        Self { slots: vec![Apart(None)], generation: 0 }
    }
}

impl<R: Region> Keys<R> {
    /// Registers; the slot (a device's name for it) and the key. Keys carry a generation, so that a stale one is found out.
    pub fn add(&mut self, region: R, iova: u64, pd: u32, access: u32) -> (u32, u32) {
        let slot = self.slots.iter().skip(1).position(|slot| slot.0.is_none()).map_or(self.slots.len(), |at| at + 1);
        self.generation = (self.generation + 1) & 0xff;
        let key = (slot as u32) << 8 | self.generation;
        let mr = Apart(Some(Mr { region, iova, pd, access, key }));
        if slot == self.slots.len() {
            self.slots.push(mr);
        } else {
            self.slots[slot] = mr;
        }
        (slot as u32, key)
    }

    /// Forgets a slot.
    pub fn remove(&mut self, slot: u32) {
        if let Some(mr) = self.slots.get_mut(slot as usize) {
            mr.0 = None;
        }
    }

    /// Key and length of a slot.
    pub fn describe(&self, slot: u32) -> Option<(u32, u64)> {
        let mr = self.slots.get(slot as usize)?.0.as_ref()?;
        Some((mr.key, mr.region.length()))
    }

    /// The memory behind `key`, and the offset of `address` in it, if `length` bytes may be used.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn find(&self, key: u32, address: u64, length: u64, pd: u32, write: bool) -> Result<(&R, u64), Refusal> {
        let mr = self
            .slots
            .get((key >> 8) as usize)
            .and_then(|slot| slot.0.as_ref())
            .filter(|mr| mr.key == key)
            .ok_or(Refusal::Key)?;
        if mr.pd != pd {
            return Err(Refusal::Domain);
        }
        let size = mr.region.length();
        let offset = address.wrapping_sub(mr.iova);
        if offset > size || length > size - offset {
            return Err(Refusal::Range { start: mr.iova, length: size });
        }
        if write && mr.access & ACCESS_LOCAL_WRITE == 0 {
            return Err(Refusal::Access);
        }
        Ok((&mr.region, offset))
    }
}
