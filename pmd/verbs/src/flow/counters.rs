// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Counters of flow rules.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;

use crate::{Context, Error, Result};

/// Unit of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CounterKind {
    /// Packets.
    Packets,
    /// Bytes of the packets.
    Bytes,
}

#[derive(Debug)]
pub(crate) struct CountersInner {
    pub(crate) raw: NonNull<ibv_counters>,
    pub(crate) context: Context,
    number: usize,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for CountersInner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for CountersInner {}

impl Drop for CountersInner {
    fn drop(&mut self) {
        // SAFETY: the counters are alive and are destroyed once. Flow rules keep them alive, so none is left.
        let result = unsafe { ibv_destroy_counters(self.raw.as_ptr()) };
        self.context.inner.check_destroyed("ibv_destroy_counters", Ok(result), || None);
    }
}

/// Counters for rules of `ibv_create_flow` ([`super::Flow::count`], ibv_create_counters(3)). Clones refer to the same
/// counters.
#[derive(Clone, Debug)]
pub struct Counters(pub(crate) Arc<CountersInner>);

impl Counters {
    /// Creates counters of these kinds, in this order. They are attached before a flow uses them, as mlx5 requires.
    ///
    /// # Errors
    /// The device does not support the counters.
    pub fn new(context: &Context, kinds: &[CounterKind]) -> Result<Self> {
        let inner = &context.inner;
        let mut attr = ibv_counters_init_attr::zeroed();
        // SAFETY: the context is open, and `attr` is valid during the call.
        let raw = unsafe { ibv_create_counters(inner.raw.as_ptr(), &raw mut attr) };
        let raw = inner.check_created("ibv_create_counters", raw, None)?;
        let counters = Self(Arc::new(CountersInner { raw, context: context.clone(), number: kinds.len() }));
        for (index, counted) in (0..).zip(kinds) {
            let mut attach = ibv_counter_attach_attr {
                counter_desc: match counted {
                    CounterKind::Packets => IBV_COUNTER_PACKETS,
                    CounterKind::Bytes => IBV_COUNTER_BYTES,
                },
                index,
                ..ibv_counter_attach_attr::zeroed()
            };
            // SAFETY: the counters are alive. A null flow attaches them to all flows that use them later.
            let result = unsafe { ibv_attach_counters_point_flow(raw.as_ptr(), &raw mut attach, std::ptr::null_mut()) };
            inner.check("ibv_attach_counters_point_flow", result)?;
        }
        Ok(counters)
    }

    /// Reads the values, in the order of creation. mlx5 cannot read counters that no flow uses yet.
    ///
    /// # Errors
    /// The device cannot read the counters.
    pub fn read(&self) -> Result<Vec<u64>> {
        let number = u32::try_from(self.0.number).map_err(|_| Error::InvalidRequest("too many counters".to_owned()))?;
        let mut values = vec![0u64; self.0.number];
        // SAFETY: the counters are alive, and `values` has room for `number` values.
        let result = unsafe { ibv_read_counters(self.0.raw.as_ptr(), values.as_mut_ptr(), number, 0) };
        self.0.context.inner.check("ibv_read_counters", result)?;
        Ok(values)
    }
}
