// UNSAFETY: counts the references to a shared segment in its metadata.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::meta::Meta;
use super::meta::NO_SEGMENT;
use super::pool::{self, Pool};
use super::{Handle, MAX_PACKET, Packet};

/// Payload that several packets share, read-only and reference-counted. Each packet has a private first
/// segment in front of it.
///
/// Made by [`Packet::into_shared`] and appended to a header by [`Packet::append_shared`]. Its buffers are
/// freed with the last packet or `SharedSegment` that refers to it.
#[derive(Debug)]
pub struct SharedSegment {
    meta: NonNull<Meta>,
}

// SAFETY: a shared segment is read-only, and its reference count is atomic, so another thread may own a
// reference.
unsafe impl Send for SharedSegment {}
// SAFETY: a shared segment is read-only, and its reference count is atomic, so several threads may use one
// reference.
unsafe impl Sync for SharedSegment {}

/// Returns the reference count of a segment, which is 0 unless it is shared.
///
/// # Safety
/// The segment is alive during `'a`.
unsafe fn references<'a>(meta: NonNull<Meta>) -> &'a AtomicU16 {
    // SAFETY: the caller guarantees that the segment is alive during `'a`; the count is only accessed as an
    // atomic.
    unsafe { &(*meta.as_ptr()).references }
}

/// True if the segment is shared, and hence read-only.
///
/// # Safety
/// The segment is alive.
#[inline]
pub(super) unsafe fn is_shared(meta: NonNull<Meta>) -> bool {
    // SAFETY: the caller guarantees that the segment is alive.
    unsafe { references(meta) }.load(Ordering::Relaxed) != 0
}

/// Drops one reference if the segment is shared.
///
/// Returns true if other references remain: the caller must then leave the segment, and those behind it,
/// alone.
///
/// # Safety
/// The caller owns the segment, or one reference to it.
#[inline]
pub(super) unsafe fn drop_reference(meta: NonNull<Meta>) -> bool {
    // SAFETY: the caller owns the segment or a reference to it, so it is alive.
    let references = unsafe { references(meta) };
    if references.load(Ordering::Relaxed) == 0 {
        return false;
    }
    // As in `Arc`: `Release` orders the reads of this thread before the reuse, and the last owner acquires.
    if references.fetch_sub(1, Ordering::Release) > 1 {
        return true;
    }
    fence(Ordering::Acquire);
    false
}

impl Packet {
    /// Makes the packet shareable and read-only.
    pub fn into_shared(self) -> SharedSegment {
        let meta = self.into_meta();
        // SAFETY: the packet was the only owner of its first segment, so it is alive and no other thread
        // accesses it.
        unsafe { references(meta).store(1, Ordering::Relaxed) };
        SharedSegment { meta }
    }

    /// Appends the shared payload to the data of this packet.
    ///
    /// Fails and returns the packet if it is a chain, the result would exceed [`MAX_PACKET`], or the payload
    /// has 65 535 references.
    pub fn append_shared(mut self, payload: &SharedSegment) -> Result<Self, Self> {
        let len = self.len() + payload.len();
        if self.is_chain() || len > MAX_PACKET || !payload.add_reference() {
            return Err(self);
        }
        // The reference added above keeps the payload alive. It belongs to the packet from here on.
        self.set_next(payload.handle(), len as u32);
        Ok(self)
    }

    /// Creates another packet with the same bytes and metadata, which shares the payload with this one.
    ///
    /// The first `private` bytes are copied, or fewer if the first segment is shorter, so that both packets
    /// can change them. The bytes behind are shared and read-only from then on, in this packet too. A packet
    /// of one segment of at most `private` bytes is copied as a whole.
    ///
    /// Returns `None`, and changes nothing, in three cases: `pool` is exhausted, `private` exceeds the data
    /// room of a buffer, or the payload has 65 535 references.
    pub fn clone_shared(&mut self, private: usize, pool: &Pool) -> Option<Self> {
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
            // The segment is longer than `private` bytes, as compared above.
            let _ = rest.trim_front(private);
            let rest = rest.into_meta();
            // SAFETY: `rest` was the only owner of the segment, so it is alive. The chain owns it from here
            // on.
            let handle = unsafe { pool::handle_of(rest) };
            self.set_next(handle, len as u32);
        }
        copy.copy_metadata(self);
        let next = self.meta().next;
        if next != NO_SEGMENT {
            let handle = Handle::unpack(next);
            // SAFETY: the chain keeps its next segment alive. Either it is shared already, or only this
            // packet refers to it and no other thread sees the change.
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

impl SharedSegment {
    /// Bytes of the payload over all its segments.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        // SAFETY: `self` holds a reference, so the segment is alive and read-only.
        unsafe { (*self.meta.as_ptr()).packet_len as usize }
    }

    /// Number of packets and `SharedSegment`s that refer to the payload at the moment.
    #[cfg(test)]
    pub(crate) fn references(&self) -> usize {
        // SAFETY: `self` holds a reference, so the segment is alive.
        unsafe { references(self.meta) }.load(Ordering::Relaxed).into()
    }

    /// Iterates over the data of the payload's segments in order.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: `self` holds a reference, so the segments are alive and read-only while it is borrowed.
        unsafe { super::segments_from(Some(self.meta)) }
    }

    /// Handle of the first segment.
    pub fn handle(&self) -> Handle {
        // SAFETY: `self` holds a reference, so the segment is alive.
        unsafe { pool::handle_of(self.meta) }
    }

    fn add_reference(&self) -> bool {
        // SAFETY: `self` holds a reference, so the segment is alive.
        unsafe { references(self.meta) }
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1))
            .is_ok()
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: `self` owns one reference and is not used again; `release` frees the segments if it was the
        // last.
        unsafe { pool::release(self.meta) };
    }
}
