// UNSAFETY: counts the references to a shared segment in its metadata.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::meta::Meta;
use super::pool;
use super::{Handle, MAX_PACKET, Packet};

/// A payload that several packets share: read-only, counted. Each packet has a private segment of its own in front of it.
///
/// Made by [`Packet::freeze`]; put behind a header by [`Packet::attach`]. Its buffers come back to their pool when the last packet
/// and the last `Frozen` are gone.
#[derive(Debug)]
pub struct Frozen {
    meta: NonNull<Meta>,
}

// SAFETY: the segment is read-only for as long as it is shared, and the count is atomic.
unsafe impl Send for Frozen {}
// SAFETY: as above.
unsafe impl Sync for Frozen {}

/// The counter of a segment; 0 in a segment that is not shared.
///
/// # Safety
/// The segment is alive for `'a`.
unsafe fn references<'a>(meta: NonNull<Meta>) -> &'a AtomicU16 {
    // SAFETY: as promised.
    unsafe { &(*meta.as_ptr()).references }
}

/// Whether the segment is shared, and so read-only.
///
/// # Safety
/// The segment is alive.
#[inline]
pub(super) unsafe fn is_shared(meta: NonNull<Meta>) -> bool {
    // SAFETY: as promised.
    unsafe { references(meta) }.load(Ordering::Relaxed) != 0
}

/// Drops one reference if the segment is shared; `true` if others remain, so that the caller must leave it (and what follows it) alone.
///
/// # Safety
/// The caller owns the segment, or one reference to it.
#[inline]
pub(super) unsafe fn drop_reference(meta: NonNull<Meta>) -> bool {
    // SAFETY: as promised.
    let references = unsafe { references(meta) };
    if references.load(Ordering::Relaxed) == 0 {
        return false;
    }
    // As in Arc: Release, so that our reads lie before the reuse; the last one acquires.
    if references.fetch_sub(1, Ordering::Release) > 1 {
        return true;
    }
    fence(Ordering::Acquire);
    false
}

impl Packet {
    /// Makes the packet's data shareable and read-only.
    pub fn freeze(self) -> Frozen {
        let meta = self.into_meta();
        // SAFETY: a packet's first segment is its own: nobody else sees it yet.
        unsafe { references(meta).store(1, Ordering::Relaxed) };
        Frozen { meta }
    }

    /// Puts the shared payload behind this packet's data. Fails, giving the header back, if the packet has more than one segment
    /// already, if the whole would exceed [`MAX_PACKET`], or if 65 535 packets share the payload.
    pub fn attach(mut self, payload: &Frozen) -> Result<Self, Self> {
        let len = self.len() + payload.len();
        if self.is_chain() || len > MAX_PACKET || !payload.add_reference() {
            return Err(self);
        }
        // The reference just added keeps the payload's segments alive; it passes to the packet.
        self.set_next(payload.handle(), len as u32);
        Ok(self)
    }
}

impl Frozen {
    /// Bytes of the payload over all its segments.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        // SAFETY: alive while we hold a reference, and read-only.
        unsafe { (*self.meta.as_ptr()).packet_len as usize }
    }

    /// How many packets and `Frozen`s share the payload at the moment.
    pub fn references(&self) -> usize {
        // SAFETY: alive while we hold a reference.
        unsafe { references(self.meta) }.load(Ordering::Relaxed).into()
    }

    /// The payload's segments in order.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: alive and read-only while we hold a reference.
        unsafe { super::segments_from(Some(self.meta)) }
    }

    /// Identity of the first segment.
    pub fn handle(&self) -> Handle {
        // SAFETY: alive while we hold a reference.
        unsafe { pool::handle_of(self.meta) }
    }

    fn add_reference(&self) -> bool {
        // SAFETY: alive while we hold a reference.
        unsafe { references(self.meta) }
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1))
            .is_ok()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: our reference ends here; `release` looks at the count.
        unsafe { pool::release(self.meta) };
    }
}
