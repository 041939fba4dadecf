// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Protection domains.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;

use crate::{Context, Result};

#[derive(Debug)]
pub struct DomainInner {
    pub(crate) raw: NonNull<ibv_pd>,
    pub(crate) context: Context,
    /// Protection domain of a parent domain.
    base: Option<Arc<DomainInner>>,
    /// Port of a MANA parent domain.
    pub(crate) port: Option<u8>,
    /// True if another process owns the domain and frees it.
    imported: bool,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state of the domain that they change.
unsafe impl Send for DomainInner {}
// SAFETY: libibverbs and the providers lock the state of the domain that they change.
unsafe impl Sync for DomainInner {}

impl Drop for DomainInner {
    fn drop(&mut self) {
        let context = &self.context.inner;
        if self.imported {
            // SAFETY: the domain was imported once and is unimported once. Regions imported into it keep it alive, so
            // none is left.
            match context.ibverbs().ibv_unimport_pd().map(|unimport| unsafe { unimport(self.raw.as_ptr()) }) {
                Ok(()) => {}
                Err(missing) => tracing::error!("{missing}"),
            }
            return;
        }
        // SAFETY: the domain is alive and freed once. Every object created in it keeps it alive, so none is left.
        let result = context.ibverbs().ibv_dealloc_pd().map(|dealloc| unsafe { dealloc(self.raw.as_ptr()) });
        context.check_destroyed("ibv_dealloc_pd", result, || None);
    }
}

mod sealed {
    pub trait Sealed {
        fn inner(&self) -> &std::sync::Arc<super::DomainInner>;
    }
}
pub(crate) use sealed::Sealed;

/// Domain in which queues are created: a [`ProtectionDomain`] or a [`ParentDomain`].
pub trait Domain: Sealed {}

/// Protection domain: queues in it can access memory regions in it (ibv_alloc_pd(3)).
#[derive(Clone, Debug)]
pub struct ProtectionDomain(pub(crate) Arc<DomainInner>);

/// Parent domain: a protection domain with data for the provider (ibv_alloc_parent_domain(3)).
///
/// On MANA the data is the port, see [`crate::mana::Mana::parent_domain`].
#[derive(Clone, Debug)]
pub struct ParentDomain(pub(crate) Arc<DomainInner>);

impl Sealed for ProtectionDomain {
    fn inner(&self) -> &Arc<DomainInner> {
        &self.0
    }
}

impl Sealed for ParentDomain {
    fn inner(&self) -> &Arc<DomainInner> {
        &self.0
    }
}

impl Domain for ProtectionDomain {}
impl Domain for ParentDomain {}

impl ProtectionDomain {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// The device cannot allocate a domain.
    pub fn new(context: &Context) -> Result<Self> {
        let inner = &context.inner;
        let alloc = inner.ibverbs().ibv_alloc_pd()?;
        inner.ibverbs().ibv_dealloc_pd()?;
        // SAFETY: the context is open.
        let raw = inner.check_created("ibv_alloc_pd", unsafe { alloc(inner.raw.as_ptr()) }, None)?;
        Ok(Self(Arc::new(DomainInner { raw, context: context.clone(), base: None, port: None, imported: false })))
    }

    /// Returns the kernel handle of the domain in this context. Another process imports the domain by it.
    pub fn handle(&self) -> u32 {
        // SAFETY: the domain is alive, and `handle` does not change after its creation.
        unsafe { (*self.0.raw.as_ptr()).handle }
    }

    /// Returns the context of the domain.
    pub fn context(&self) -> &Context {
        &self.0.context
    }
}

/// Protection domain that another process owns. Memory regions in it can be imported, but no objects can be created
/// in it.
#[derive(Clone, Debug)]
pub struct ImportedDomain(pub(crate) Arc<DomainInner>);

impl ImportedDomain {
    /// Imports the domain with the kernel handle `handle` ([`ProtectionDomain::handle`], ibv_import_pd(3)).
    ///
    /// # Errors
    /// The handle is unknown, or the provider cannot import.
    pub fn new(context: &Context, handle: u32) -> Result<Self> {
        let inner = &context.inner;
        let import = inner.ibverbs().ibv_import_pd()?;
        inner.ibverbs().ibv_unimport_pd()?;
        // SAFETY: the context is open, and the kernel checks the handle.
        let raw = inner.check_created("ibv_import_pd", unsafe { import(inner.raw.as_ptr(), handle) }, None)?;
        Ok(Self(Arc::new(DomainInner { raw, context: context.clone(), base: None, port: None, imported: true })))
    }
}

impl ParentDomain {
    /// Allocates a parent domain of `base` with `word` as the provider's context (`pd_context`).
    pub(crate) fn with_pd_context(base: &ProtectionDomain, word: usize, port: Option<u8>) -> Result<Self> {
        let context = &base.0.context;
        let mut attr = ibv_parent_domain_init_attr {
            pd: base.0.raw.as_ptr(),
            // libmana rejects other bits.
            comp_mask: IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
            pd_context: std::ptr::without_provenance_mut::<c_void>(word),
            ..ibv_parent_domain_init_attr::zeroed()
        };
        // SAFETY: the context is open, and `attr` contains a living domain of it.
        let raw = unsafe { ibv_alloc_parent_domain(context.inner.raw.as_ptr(), &raw mut attr) };
        let raw = context.inner.check_created("ibv_alloc_parent_domain", raw, port)?;
        Ok(Self(Arc::new(DomainInner {
            raw,
            context: context.clone(),
            base: Some(Arc::clone(&base.0)),
            port,
            imported: false,
        })))
    }

    /// Returns the context of the domain.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Returns the protection domain of the parent domain.
    pub fn base(&self) -> ProtectionDomain {
        ProtectionDomain(Arc::clone(self.0.base.as_ref().expect("a parent domain has a protection domain")))
    }
}
