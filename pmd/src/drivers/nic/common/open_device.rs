//! An open device, with the objects that all drivers need.

use std::sync::Arc;

use wirepath_memory::{BufferAllocator, DeviceMemory, Region};
use wirepath_verbs::{
    Access, AsyncEvents, Context, DeviceAttributes, Error, MemoryRegion, PortAttributes, ProtectionDomain, Result,
};

use super::mr_table::RegisteredRegion;
use super::probe::RdmaPort;
use super::shared_memory::RegionSpan;

/// An open port. `V` holds the direct verbs of its provider.
pub(crate) struct OpenDevice<V> {
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    pub(crate) verbs: V,
    pub(crate) events: AsyncEvents,
    /// Allocator of queue memory.
    pub(crate) allocator: Arc<BufferAllocator>,
    /// Port number, counted from 1.
    pub(crate) port: u8,
}

impl<V> OpenDevice<V> {
    /// Prepares an open device; nothing is claimed yet. `shared`: queue memory can be mapped by other
    /// processes. `verbs` makes the provider allocate queue memory from the allocator.
    pub(crate) fn open(
        context: Context,
        rdma_port: &RdmaPort,
        shared: bool,
        verbs: impl FnOnce(&ProtectionDomain, Arc<BufferAllocator>, u8) -> Result<V>,
    ) -> Result<Self> {
        let mut builder = BufferAllocator::builder();
        if let Some(node) = rdma_port.device.numa_node() {
            builder = builder.numa_node(node);
        }
        let allocator = Arc::new(if shared { builder.shared() } else { builder }.build());
        let domain = ProtectionDomain::new(&context)?;
        let verbs = verbs(&domain, Arc::clone(&allocator), rdma_port.port)?;
        let events = context.events()?;
        Ok(Self { context, domain, verbs, events, allocator, port: rdma_port.port })
    }

    pub(crate) fn attributes(&self) -> Result<DeviceAttributes> {
        self.context.attributes()
    }

    pub(crate) fn port(&self) -> Result<PortAttributes> {
        self.context.port(self.port)
    }

    /// Registers a whole region.
    pub(crate) fn register(&self, region: &Arc<Region>) -> Result<(RegisteredRegion, MemoryRegion)> {
        let registration = MemoryRegion::register(&self.domain, region, Access::PACKETS)?;
        Ok((RegisteredRegion::new(region, registration.lkey()), registration))
    }

    /// Returns the span of queue memory, for a client.
    pub(crate) fn shared_span(&self, memory: &DeviceMemory) -> Result<RegionSpan> {
        self.region_span(memory).ok_or_else(|| ring_size_mismatch("a shared queue"))
    }

    /// Returns the span of queue memory. `None` if the allocator does not own it.
    fn region_span(&self, memory: &DeviceMemory) -> Option<RegionSpan> {
        const PAGE: usize = 4096;
        let base = memory.base().as_ptr().cast_const();
        // Doorbell records share a page with those of other queues.
        let within = if self.allocator.location(base).is_some() { 0 } else { base.addr() % PAGE };
        let location = self.allocator.location(base.wrapping_sub(within))?;
        let bytes = memory.bytes();
        (within + bytes <= location.bytes).then_some(RegionSpan {
            region: location.region,
            offset: location.offset + within,
            bytes,
        })
    }

    /// Returns the name of a queue for messages and for the accounting of queue memory.
    pub(crate) fn owner(&self, direction: &str, index: usize) -> String {
        format!("{} port {} {direction} queue {index}", self.context.device().name(), self.port)
    }
}

/// Returns the error for rings of an unexpected size.
pub(crate) fn ring_size_mismatch(owner: &str) -> Error {
    Error::InvalidRequest(format!("{owner}: the library created a ring of another size than requested"))
}
