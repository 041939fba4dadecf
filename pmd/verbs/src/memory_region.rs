// UNSAFETY: registers memory with libibverbs.
#![allow(unsafe_code)]

//! Memory that a device may access.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::Region;

use crate::domain::DomainInner;
use crate::{Error, ImportedDomain, ProtectionDomain, Result};

/// What the device may do with registered memory, besides reading it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Write: needed for receive buffers.
    pub local_write: bool,
    /// Writes may overtake each other on the bus (`IBV_ACCESS_RELAXED_ORDERING`): faster on some machines; left out where the library or
    /// the kernel does not know it.
    pub relaxed_ordering: bool,
}

impl Access {
    /// For packet buffers.
    pub const PACKETS: Self = Self { local_write: true, relaxed_ordering: false };
}

/// A region registered with a device: the key goes into descriptors. It keeps the region mapped.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    domain: Arc<DomainInner>,
    region: Arc<Region>,
    lkey: u32,
}

// SAFETY: libibverbs locks what it changes; what is read here never changes.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a whole region. Addresses in descriptors are those of this process.
    ///
    /// # Errors
    /// The device refused; too little may be locked ([`crate::Cause::LockedMemory`]).
    pub fn register(domain: &ProtectionDomain, region: &Arc<Region>, access: Access) -> Result<Self> {
        let context = &domain.0.context.inner;
        let ibverbs = context.ibverbs();
        ibverbs.ibv_dereg_mr()?;
        let address = region.base().as_ptr().cast::<c_void>();
        let mut flags = 0;
        if access.local_write {
            flags |= IBV_ACCESS_LOCAL_WRITE;
        }
        // What the macro `ibv_reg_mr` does: optional flags need the newer function, which leaves out what the kernel does not know.
        let raw = match ibverbs.ibv_reg_mr_iova2() {
            Ok(register) if access.relaxed_ordering => {
                let flags = flags | IBV_ACCESS_RELAXED_ORDERING;
                // SAFETY: the region is mapped, and kept until it is no longer registered.
                let raw =
                    unsafe { register(domain.0.raw.as_ptr(), address, region.bytes(), address.addr() as u64, flags) };
                context.created("ibv_reg_mr_iova2", raw, None)
            }
            _ => {
                let register = ibverbs.ibv_reg_mr()?;
                // SAFETY: as above.
                let raw = unsafe { register(domain.0.raw.as_ptr(), address, region.bytes(), flags.cast_signed()) };
                context.created("ibv_reg_mr", raw, None)
            }
        }?;
        // SAFETY: just made.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        Ok(Self { raw, domain: Arc::clone(&domain.0), region: Arc::clone(region), lkey })
    }

    /// The key that descriptors name the memory by.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The kernel's name of the registration in this context, by which another process imports it.
    pub fn handle(&self) -> u32 {
        // SAFETY: a living registration; set when it was made.
        unsafe { (*self.raw.as_ptr()).handle }
    }

    /// The memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Address of `bytes` bytes at `offset` of the region, as descriptors want it.
    ///
    /// # Errors
    /// They are not inside.
    pub fn address(&self, offset: usize, bytes: usize) -> Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.region.bytes() => Ok((self.region.base().as_ptr().addr() + offset) as u64),
            _ => Err(Error::Request(format!(
                "{bytes} bytes at offset {offset} are not inside a region of {} bytes",
                self.region.bytes()
            ))),
        }
    }
}

/// A registration of another process, which keeps it (ibv_import_mr(3)): what the kernel says of it. It names no memory of this process.
#[derive(Debug)]
pub struct ImportedRegion {
    raw: NonNull<ibv_mr>,
    domain: Arc<DomainInner>,
    lkey: u32,
    bytes: usize,
}

// SAFETY: as for `MemoryRegion`.
unsafe impl Send for ImportedRegion {}
// SAFETY: as above.
unsafe impl Sync for ImportedRegion {}

impl ImportedRegion {
    /// The registration that the process which opened the device calls `handle` ([`MemoryRegion::handle`]).
    ///
    /// # Errors
    /// There is no such registration, or the provider cannot import.
    pub fn new(domain: &ImportedDomain, handle: u32) -> Result<Self> {
        let context = &domain.0.context.inner;
        let import = context.ibverbs().ibv_import_mr()?;
        context.ibverbs().ibv_unimport_mr()?;
        // SAFETY: an imported domain.
        let raw = context.created("ibv_import_mr", unsafe { import(domain.0.raw.as_ptr(), handle) }, None)?;
        // SAFETY: just made.
        let (lkey, bytes) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).length) };
        Ok(Self { raw, domain: Arc::clone(&domain.0), lkey, bytes })
    }

    /// The key that descriptors name the memory by.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Bytes that are registered.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ImportedRegion {
    fn drop(&mut self) {
        let unimport = self.domain.context.inner.ibverbs().ibv_unimport_mr();
        // SAFETY: imported once; the kernel's object stays with its owner.
        match unimport.map(|unimport| unsafe { unimport(self.raw.as_ptr()) }) {
            Ok(()) => {}
            Err(missing) => tracing::error!("{missing}"),
        }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: made by a registration, dropped once.
        let result = context.ibverbs().ibv_dereg_mr().map(|dereg| unsafe { dereg(self.raw.as_ptr()) });
        context.destroyed("ibv_dereg_mr", result, || Some(Box::new(Arc::clone(&self.region))));
    }
}
