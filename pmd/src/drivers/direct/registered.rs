//! The memory of a port that its device can reach.

use std::any::Any;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::RegionBuilder;
use wirepath_verbs::{Error, Result};

use super::keys::Keys;
use super::opened::Opened;
use crate::packet::Pool;

/// Bytes of the sink: as much as the largest frame, for which a port of the kernel can be configured.
const SINK: usize = 16 << 10;

/// Memory that frames too long for the port end in: without it, the device would stop the queue for one.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sink {
    pub(crate) address: u64,
    pub(crate) lkey: u32,
    pub(crate) bytes: u32,
}

/// The registered memory of a port: that of its pool, and a sink.
pub(crate) struct Registered {
    pub(crate) keys: Arc<Keys>,
    pub(crate) sink: Sink,
    /// The kernel's name of the registration of the pool's region.
    pub(crate) handle: u32,
    _with: Box<dyn Any + Send>,
}

impl Registered {
    /// Registers the pool's region whole, and a new sink.
    pub(crate) fn new<V>(opened: &Opened<V>, pool: &Pool) -> Result<Self> {
        let sink = RegionBuilder::new(SINK).huge_pages(false).map();
        let sink = Arc::new(sink.map_err(|error| Error::Request(error.to_string()))?);
        let (drain, drained) = opened.register(&sink)?;
        let (home, registration) = opened.register(pool.region())?;
        let end = Sink { address: sink.base().as_ptr() as u64, lkey: drain.lkey(), bytes: SINK as u32 };
        let handle = registration.handle();
        let keys = Arc::new(Keys::new(home, Vec::new(), Box::new((registration, drained))));
        Ok(Self { keys, sink: end, handle, _with: Box::new(()) })
    }

    /// With something that is there exactly as long.
    pub(crate) fn with(self, what: impl Any + Send) -> Self {
        Self { _with: Box::new(what), ..self }
    }
}
