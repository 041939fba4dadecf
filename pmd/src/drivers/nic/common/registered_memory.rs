//! Memory of a port that its device can access.

use std::any::Any;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::RegionBuilder;
use wirepath_verbs::{Error, Result};

use super::mr_table::MrTable;
use super::open_device::OpenDevice;
use wirepath_packet::Pool;

/// Bytes of the sink: the size of the largest frame for which a kernel port can be configured.
const SINK: usize = 16 << 10;

/// Memory that receives the excess of too long frames. Without it, the device would stop the queue at such a
/// frame.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sink {
    pub(crate) address: u64,
    pub(crate) lkey: u32,
    pub(crate) bytes: u32,
}

/// Registered memory of a port: the region of its pool, and the sink.
pub(crate) struct RegisteredMemory {
    pub(crate) mrs: Arc<MrTable>,
    pub(crate) sink: Sink,
    /// Kernel handle of the registration of the pool's region.
    pub(crate) handle: u32,
    _dependents: Box<dyn Any + Send>,
}

impl RegisteredMemory {
    /// Registers the whole region of the pool and a new sink.
    pub(crate) fn new<V>(opened: &OpenDevice<V>, pool: &Pool) -> Result<Self> {
        let sink = RegionBuilder::new(SINK).huge_pages(false).map();
        let sink = Arc::new(sink.map_err(|error| Error::InvalidRequest(error.to_string()))?);
        let (sink_region, sink_registration) = opened.register(&sink)?;
        let (primary, registration) = opened.register(pool.region())?;
        let end = Sink { address: sink.base().as_ptr() as u64, lkey: sink_region.lkey(), bytes: SINK as u32 };
        let handle = registration.handle();
        let mrs = Arc::new(MrTable::new(primary, Vec::new(), Box::new((registration, sink_registration))));
        Ok(Self { mrs, sink: end, handle, _dependents: Box::new(()) })
    }

    /// Keeps `what` alive as long as the memory.
    pub(crate) fn keep_alive(self, what: impl Any + Send) -> Self {
        Self { _dependents: Box::new(what), ..self }
    }
}
