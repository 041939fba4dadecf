//! A device that is open, and what is the same in all of them.

use std::sync::Arc;

use wirepath_memory::{BufferAllocator, DeviceMemory, Region};
use wirepath_verbs::{
    Access, AsyncEvents, Context, DeviceAttributes, Error, MemoryRegion, PortAttributes, ProtectionDomain, Result,
};

use super::attach::At;
use super::find::Found;
use super::keys::Key;

/// An open port. `V` is what speaks the direct verbs of its provider.
pub(crate) struct Opened<V> {
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    pub(crate) verbs: V,
    pub(crate) events: AsyncEvents,
    /// Memory of the queues.
    pub(crate) allocator: Arc<BufferAllocator>,
    /// Counted from 1.
    pub(crate) port: u8,
}

impl<V> Opened<V> {
    /// A device that was opened; claims nothing yet. `shared`: queue memory that another process can map. `verbs` has the provider take queue
    /// memory from the allocator.
    pub(crate) fn open(
        context: Context,
        found: &Found,
        shared: bool,
        verbs: impl FnOnce(&ProtectionDomain, Arc<BufferAllocator>, u8) -> Result<V>,
    ) -> Result<Self> {
        let mut builder = BufferAllocator::builder();
        if let Some(node) = found.device.numa_node() {
            builder = builder.numa_node(node);
        }
        let allocator = Arc::new(if shared { builder.shared() } else { builder }.build());
        let domain = ProtectionDomain::new(&context)?;
        let verbs = verbs(&domain, Arc::clone(&allocator), found.port)?;
        let events = context.events()?;
        Ok(Self { context, domain, verbs, events, allocator, port: found.port })
    }

    pub(crate) fn attributes(&self) -> Result<DeviceAttributes> {
        self.context.attributes()
    }

    pub(crate) fn port(&self) -> Result<PortAttributes> {
        self.context.port(self.port)
    }

    /// Registers a region whole.
    pub(crate) fn register(&self, region: &Arc<Region>) -> Result<(Key, MemoryRegion)> {
        let registration = MemoryRegion::register(&self.domain, region, Access::PACKETS)?;
        Ok((Key::new(region, registration.lkey()), registration))
    }

    /// Where memory of a queue lies, for another process. `None`: it is none of ours.
    pub(crate) fn at(&self, memory: &DeviceMemory) -> Option<At> {
        const PAGE: usize = 4096;
        let base = memory.base().as_ptr().cast_const();
        // Doorbell records lie within a page that several queues have.
        let within = if self.allocator.place(base).is_some() { 0 } else { base.addr() % PAGE };
        let place = self.allocator.place(base.wrapping_sub(within))?;
        let bytes = memory.bytes();
        (within + bytes <= place.bytes).then_some(At { region: place.region, offset: place.offset + within, bytes })
    }

    /// What a queue is called in messages, and in the account of queue memory.
    pub(crate) fn owner(&self, direction: &str, index: usize) -> String {
        format!("{} port {} {direction} queue {index}", self.context.device().name(), self.port)
    }
}

/// A library answered with rings that cannot be.
pub(crate) fn odd_ring(owner: &str) -> Error {
    Error::Request(format!("{owner}: the ring that the library made is not of the size that was asked for"))
}
