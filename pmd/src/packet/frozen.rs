// UNSAFETY: counts the references to a shared segment in its metadata.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::meta::Meta;
use super::meta::NO_SEGMENT;
use super::pool::{self, Pool};
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

    /// Another packet with the same bytes and metadata. Both have their first `private` bytes (or a little less, if the first segment
    /// ends before) for themselves; what lies behind is shared and read-only from now on, in this packet too. `None`, and no change,
    /// if `pool` is empty, `private` is longer than the data of a buffer, or 65 535 packets share the payload.
    ///
    /// A packet of one segment of at most `private` bytes is copied.
    pub fn share(&mut self, private: usize, pool: &Pool) -> Option<Self> {
        let mut copy = pool.take()?;
        let here = self.data().len();
        if here <= private {
            copy.append(here)?.copy_from_slice(self.data());
        } else {
            let mut head = pool.take()?;
            head.append(private)?.copy_from_slice(&self.data()[..private]);
            copy.append(private)?.copy_from_slice(&self.data()[..private]);
            head.copy_metadata(self);
            let len = self.len();
            let mut rest = std::mem::replace(self, head);
            // Shorter than its data, as was looked at.
            let _ = rest.trim_front(private);
            let rest = rest.into_meta();
            // SAFETY: alive, and owned by the chain from here on.
            let handle = unsafe { pool::handle_of(rest) };
            self.set_next(handle, len as u32);
        }
        copy.copy_metadata(self);
        let next = self.meta().next;
        if next != NO_SEGMENT {
            let handle = Handle::unpack(next);
            // SAFETY: the chain keeps its next segment alive. It is shared already, or this packet's alone, so that nobody else sees
            // it become shared.
            let references = unsafe { references(pool::resolve(next)) };
            if references.load(Ordering::Relaxed) == 0 {
                references.store(1, Ordering::Relaxed);
            }
            references.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1)).ok()?;
            copy.set_next(handle, self.len() as u32);
        }
        Some(copy)
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
