// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Counters of flow rules.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;

use crate::{Context, Error, Result};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counted {
    /// Packets.
    Packets,
    /// Bytes of them.
    Bytes,
}

#[derive(Debug)]
pub(crate) struct CountersInner {
    pub(crate) raw: NonNull<ibv_counters>,
    pub(crate) context: Context,
    number: usize,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for CountersInner {}
// SAFETY: as above.
unsafe impl Sync for CountersInner {}

impl Drop for CountersInner {
    fn drop(&mut self) {
        // SAFETY: made by a creation, dropped once; flows kept it alive.
        let result = unsafe { ibv_destroy_counters(self.raw.as_ptr()) };
        self.context.inner.destroyed("ibv_destroy_counters", Ok(result), || None);
    }
}

/// Counters that a flow of `ibv_create_flow` counts in ([`super::Flow::count`], ibv_create_counters(3)). Clones are the same ones.
#[derive(Clone, Debug)]
pub struct Counters(pub(crate) Arc<CountersInner>);

impl Counters {
    /// Counters of `what`, in this order; attached before any flow has them, as mlx5 wants it.
    ///
    /// # Errors
    /// The device has no such counters.
    pub fn new(context: &Context, what: &[Counted]) -> Result<Self> {
        let inner = &context.inner;
        let mut attr = ibv_counters_init_attr::zeroed();
        // SAFETY: an open context.
        let raw = unsafe { ibv_create_counters(inner.raw.as_ptr(), &raw mut attr) };
        let raw = inner.created("ibv_create_counters", raw, None)?;
        let counters = Self(Arc::new(CountersInner { raw, context: context.clone(), number: what.len() }));
        for (index, counted) in (0..).zip(what) {
            let mut attach = ibv_counter_attach_attr {
                counter_desc: match counted {
                    Counted::Packets => IBV_COUNTER_PACKETS,
                    Counted::Bytes => IBV_COUNTER_BYTES,
                },
                index,
                ..ibv_counter_attach_attr::zeroed()
            };
            // SAFETY: living counters; no flow: whatever flow comes to have them.
            let result = unsafe { ibv_attach_counters_point_flow(raw.as_ptr(), &raw mut attach, std::ptr::null_mut()) };
            inner.done("ibv_attach_counters_point_flow", result)?;
        }
        Ok(counters)
    }

    /// What they stand at, in the order of creation. Counters of no flow yet cannot be read on mlx5.
    ///
    /// # Errors
    /// The device refused.
    pub fn read(&self) -> Result<Vec<u64>> {
        let number = u32::try_from(self.0.number).map_err(|_| Error::Request("too many counters".to_owned()))?;
        let mut values = vec![0u64; self.0.number];
        // SAFETY: living counters, room for as many values as are asked for.
        let result = unsafe { ibv_read_counters(self.0.raw.as_ptr(), values.as_mut_ptr(), number, 0) };
        self.0.context.inner.done("ibv_read_counters", result)?;
        Ok(values)
    }
}
