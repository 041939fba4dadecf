// UNSAFETY: registers memory with libibverbs.
#![allow(unsafe_code)]

//! Memory regions that a device may access.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::Region;

use crate::domain::DomainInner;
use crate::{Error, ImportedDomain, ProtectionDomain, Result};

/// Access rights of a device to registered memory. The device may always read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The device may write. Receive buffers need it.
    pub local_write: bool,
    /// PCIe writes may be reordered (`IBV_ACCESS_RELAXED_ORDERING`), which is faster on some machines. The flag is
    /// ignored if the library or the kernel does not support it.
    pub relaxed_ordering: bool,
}

impl Access {
    /// Access rights for packet buffers.
    pub const PACKETS: Self = Self { local_write: true, relaxed_ordering: false };
}

/// Region that is registered with a device. Descriptors contain its key. It keeps the region mapped.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    domain: Arc<DomainInner>,
    region: Arc<Region>,
    lkey: u32,
}

// SAFETY: `raw` is an owned pointer, libibverbs locks the state that it changes, and the fields read here never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: libibverbs locks the state that it changes, and the fields read here never change.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a whole region. Addresses in descriptors are virtual addresses of this process.
    ///
    /// # Errors
    /// The device cannot register the region, or the limit of locked memory is too low
    /// ([`crate::Cause::LockedMemory`]).
    pub fn register(domain: &ProtectionDomain, region: &Arc<Region>, access: Access) -> Result<Self> {
        let context = &domain.0.context.inner;
        let ibverbs = context.ibverbs();
        ibverbs.ibv_dereg_mr()?;
        let address = region.base().as_ptr().cast::<c_void>();
        let mut flags = 0;
        if access.local_write {
            flags |= IBV_ACCESS_LOCAL_WRITE;
        }
        // The macro `ibv_reg_mr` does the same. Optional flags need the newer function, which omits flags that the
        // kernel does not know.
        let raw = match ibverbs.ibv_reg_mr_iova2() {
            Ok(register) if access.relaxed_ordering => {
                let flags = flags | IBV_ACCESS_RELAXED_ORDERING;
                // SAFETY: the domain is alive. The region is mapped, and it is kept until it is deregistered.
                let raw =
                    unsafe { register(domain.0.raw.as_ptr(), address, region.bytes(), address.addr() as u64, flags) };
                context.check_created("ibv_reg_mr_iova2", raw, None)
            }
            _ => {
                let register = ibverbs.ibv_reg_mr()?;
                // SAFETY: the domain is alive. The region is mapped, and it is kept until it is deregistered.
                let raw = unsafe { register(domain.0.raw.as_ptr(), address, region.bytes(), flags.cast_signed()) };
                context.check_created("ibv_reg_mr", raw, None)
            }
        }?;
        // SAFETY: the registration was created above and is alive.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        Ok(Self { raw, domain: Arc::clone(&domain.0), region: Arc::clone(region), lkey })
    }

    /// Returns the local key for descriptors.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the kernel handle of the registration in this context. Another process imports the registration by it.
    pub fn handle(&self) -> u32 {
        // SAFETY: the registration is alive, and `handle` does not change after its creation.
        unsafe { (*self.raw.as_ptr()).handle }
    }

    /// Returns the region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the address for descriptors of `bytes` bytes at `offset` of the region.
    ///
    /// # Errors
    /// The bytes are not inside the region.
    pub fn address(&self, offset: usize, bytes: usize) -> Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.region.bytes() => Ok((self.region.base().as_ptr().addr() + offset) as u64),
            _ => Err(Error::InvalidRequest(format!(
                "{bytes} bytes at offset {offset} are not inside a region of {} bytes",
                self.region.bytes()
            ))),
        }
    }
}

/// Registration that another process owns (ibv_import_mr(3)). It refers to memory of that process, not of this one.
#[derive(Debug)]
pub struct ImportedRegion {
    raw: NonNull<ibv_mr>,
    domain: Arc<DomainInner>,
    lkey: u32,
    bytes: usize,
}

// SAFETY: `raw` is an owned pointer, and libibverbs locks the state that it changes.
unsafe impl Send for ImportedRegion {}
// SAFETY: libibverbs locks the state that it changes, and the fields read here never change.
unsafe impl Sync for ImportedRegion {}

impl ImportedRegion {
    /// Imports the registration with the kernel handle `handle` ([`MemoryRegion::handle`]).
    ///
    /// # Errors
    /// The handle is unknown, or the provider cannot import.
    pub fn new(domain: &ImportedDomain, handle: u32) -> Result<Self> {
        let context = &domain.0.context.inner;
        let import = context.ibverbs().ibv_import_mr()?;
        context.ibverbs().ibv_unimport_mr()?;
        // SAFETY: the imported domain is alive, and the kernel checks the handle.
        let raw = context.check_created("ibv_import_mr", unsafe { import(domain.0.raw.as_ptr(), handle) }, None)?;
        // SAFETY: the import succeeded, so the structure is valid.
        let (lkey, bytes) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).length) };
        Ok(Self { raw, domain: Arc::clone(&domain.0), lkey, bytes })
    }

    /// Returns the local key for descriptors.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the number of registered bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ImportedRegion {
    fn drop(&mut self) {
        let unimport = self.domain.context.inner.ibverbs().ibv_unimport_mr();
        // SAFETY: the registration was imported once and is unimported once. The kernel object stays with its owner.
        match unimport.map(|unimport| unsafe { unimport(self.raw.as_ptr()) }) {
            Ok(()) => {}
            Err(missing) => tracing::error!("{missing}"),
        }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: the registration is alive and is destroyed once.
        let result = context.ibverbs().ibv_dereg_mr().map(|dereg| unsafe { dereg(self.raw.as_ptr()) });
        context.check_destroyed("ibv_dereg_mr", result, || Some(Box::new(Arc::clone(&self.region))));
    }
}
