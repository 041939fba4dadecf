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
    /// The domain that a parent domain stands on.
    base: Option<Arc<DomainInner>>,
    /// The port that a MANA parent domain stands for.
    pub(crate) port: Option<u8>,
    /// Of another process, which ends it.
    imported: bool,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for DomainInner {}
// SAFETY: as above.
unsafe impl Sync for DomainInner {}

impl Drop for DomainInner {
    fn drop(&mut self) {
        let context = &self.context.inner;
        if self.imported {
            // SAFETY: imported once; regions that were imported into it kept it.
            match context.ibverbs().ibv_unimport_pd().map(|unimport| unsafe { unimport(self.raw.as_ptr()) }) {
                Ok(()) => {}
                Err(missing) => tracing::error!("{missing}"),
            }
            return;
        }
        // SAFETY: nothing that was made from the domain is left, it would keep this alive.
        let result = context.ibverbs().ibv_dealloc_pd().map(|dealloc| unsafe { dealloc(self.raw.as_ptr()) });
        context.destroyed("ibv_dealloc_pd", result, || None);
    }
}

mod sealed {
    pub trait Sealed {
        fn inner(&self) -> &std::sync::Arc<super::DomainInner>;
    }
}
pub(crate) use sealed::Sealed;

/// A [`ProtectionDomain`] or a [`ParentDomain`]: what queues are made in.
pub trait Domain: Sealed {}

/// Memory and queues that may work together (ibv_alloc_pd(3)).
#[derive(Clone, Debug)]
pub struct ProtectionDomain(pub(crate) Arc<DomainInner>);

/// A protection domain with something attached for the provider (ibv_alloc_parent_domain(3)): on MANA the port, see
/// [`crate::mana::Mana::parent_domain`].
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
    /// A new domain.
    ///
    /// # Errors
    /// The device refused.
    pub fn new(context: &Context) -> Result<Self> {
        let inner = &context.inner;
        let alloc = inner.ibverbs().ibv_alloc_pd()?;
        inner.ibverbs().ibv_dealloc_pd()?;
        // SAFETY: an open context.
        let raw = inner.created("ibv_alloc_pd", unsafe { alloc(inner.raw.as_ptr()) }, None)?;
        Ok(Self(Arc::new(DomainInner { raw, context: context.clone(), base: None, port: None, imported: false })))
    }

    /// The kernel's name of the domain in this context, by which another process imports it.
    pub fn handle(&self) -> u32 {
        // SAFETY: a living domain; set when it was made.
        unsafe { (*self.0.raw.as_ptr()).handle }
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.0.context
    }
}

/// A protection domain of another process, which keeps it: what is registered there can be looked up here, and nothing be made.
#[derive(Clone, Debug)]
pub struct ImportedDomain(pub(crate) Arc<DomainInner>);

impl ImportedDomain {
    /// The domain that the process which opened the device calls `handle` ([`ProtectionDomain::handle`]; ibv_import_pd(3)).
    ///
    /// # Errors
    /// There is no such domain, or the provider cannot import.
    pub fn new(context: &Context, handle: u32) -> Result<Self> {
        let inner = &context.inner;
        let import = inner.ibverbs().ibv_import_pd()?;
        inner.ibverbs().ibv_unimport_pd()?;
        // SAFETY: an open context.
        let raw = inner.created("ibv_import_pd", unsafe { import(inner.raw.as_ptr(), handle) }, None)?;
        Ok(Self(Arc::new(DomainInner { raw, context: context.clone(), base: None, port: None, imported: true })))
    }
}

impl ParentDomain {
    /// A parent domain over `base` with a word for the provider.
    pub(crate) fn with_word(base: &ProtectionDomain, word: usize, port: Option<u8>) -> Result<Self> {
        let context = &base.0.context;
        let mut attr = ibv_parent_domain_init_attr {
            pd: base.0.raw.as_ptr(),
            // Nothing else: libmana refuses other bits.
            comp_mask: IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
            pd_context: std::ptr::without_provenance_mut::<c_void>(word),
            ..ibv_parent_domain_init_attr::zeroed()
        };
        // SAFETY: an open context and a domain of it.
        let raw = unsafe { ibv_alloc_parent_domain(context.inner.raw.as_ptr(), &raw mut attr) };
        let raw = context.inner.created("ibv_alloc_parent_domain", raw, port)?;
        Ok(Self(Arc::new(DomainInner {
            raw,
            context: context.clone(),
            base: Some(Arc::clone(&base.0)),
            port,
            imported: false,
        })))
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The domain underneath.
    pub fn base(&self) -> ProtectionDomain {
        ProtectionDomain(Arc::clone(self.0.base.as_ref().expect("a parent domain is made over one")))
    }
}
