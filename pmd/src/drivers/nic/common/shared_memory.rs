// UNSAFETY: creates views of memory that another process describes, after checking that they lie inside the
// mapped regions.
#![allow(unsafe_code)]

//! Queue memory that two processes share.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Region};

/// A span within a region of queue memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegionSpan {
    pub(crate) region: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// Regions of queue memory received from the server.
pub(crate) struct SharedRegions {
    pub(crate) regions: Vec<Arc<Region>>,
}

impl SharedRegions {
    /// Returns a view of `at`, if it lies inside a received region. `bytes`: the size it must have, if known.
    pub(crate) fn view(&self, at: RegionSpan, bytes: Option<usize>) -> Option<DeviceMemory> {
        let region = self.regions.get(at.region)?;
        let end = at.offset.checked_add(at.bytes)?;
        let fits = end <= region.bytes() && at.offset.is_multiple_of(8) && at.bytes >= 8;
        if !fits || bytes.is_some_and(|bytes| bytes != at.bytes) {
            return None;
        }
        // SAFETY: the checks above place the view inside the region. The view holds the region, so the
        // mapping stays, and its sealed file cannot shrink. This process accesses queue memory only through
        // such views.
        Some(unsafe { DeviceMemory::new(region.base().add(at.offset), at.bytes, Arc::clone(region) as _) })
    }
}
