//! What tests and fuzzers of all rings need.

// UNSAFETY: memory for rings is handed out by address.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use wirepath_memory::DeviceMemory;

use super::keys::{Key, Keys};
use crate::packet::Pool;

/// Memory as a device shares it.
pub(crate) fn memory(bytes: usize) -> DeviceMemory {
    let buffer: Arc<[AtomicU64]> = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: the buffer is kept, aligned to 8, and only reached through views.
    unsafe { DeviceMemory::new(NonNull::from(&buffer[0]).cast(), bytes, Arc::new(buffer)) }
}

/// The pool's region under a key.
pub(crate) fn keys(pool: &Pool, lkey: u32) -> Arc<Keys> {
    Arc::new(Keys::new(Key::new(pool.region(), lkey), Vec::new(), Box::new(())))
}
