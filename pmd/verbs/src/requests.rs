// UNSAFETY: posts requests and polls completions through libibverbs.
#![allow(unsafe_code)]

//! Work requests and completions through libibverbs, for drivers that do not access queue memory directly.
//!
//! Requests are built in memory that is allocated once, so a burst does not allocate. Segments contain keys of
//! registered memory, as descriptors of direct verbs do. The device can access nothing else.

use std::ffi::c_int;
use std::ptr::null_mut;

use rdma_core_sys::verbs::*;

use crate::{CompletionQueue, Error, RawPacketQp, Result, WorkCompletion, WorkQueue};

/// Scatter-gather segment: a range of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Start address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Local key, see [`crate::MemoryRegion::lkey`].
    pub key: u32,
}

impl Segment {
    fn raw(self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.bytes, lkey: self.key }
    }
}

/// Error of posting several requests.
#[derive(Debug)]
pub struct PostError {
    /// Number of requests that the provider accepted before the failed one.
    pub accepted: usize,
    /// Error of the failed request.
    pub error: Error,
}

/// Headers and segment size of a packet that the device cuts (`IBV_WR_TSO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TsoRequest<'a> {
    /// All headers up to the payload. The device adapts them for each segment.
    pub headers: &'a [u8],
    /// Largest payload of a segment in bytes.
    pub mss: u16,
}

/// Send requests of one burst (ibv_post_send(3)).
pub struct SendRequests {
    requests: Box<[ibv_send_wr]>,
    segments: Box<[ibv_sge]>,
    /// Headers of TSO requests, `max_header` bytes for each request.
    headers: Box<[u8]>,
    max_header: usize,
    used: usize,
    used_segments: usize,
}

// SAFETY: the pointers inside are written before each use, and point into memory that `self` owns.
unsafe impl Send for SendRequests {}

impl std::fmt::Debug for SendRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendRequests").field("requests", &self.used).field("segments", &self.used_segments).finish()
    }
}

impl SendRequests {
    /// Creates a batch for up to `requests` requests of `segments` segments each.
    pub fn new(requests: usize, segments: usize) -> Self {
        Self {
            requests: vec![ibv_send_wr::zeroed(); requests].into(),
            segments: vec![ibv_sge::zeroed(); requests * segments].into(),
            headers: Box::default(),
            max_header: 0,
            used: 0,
            used_segments: 0,
        }
    }

    /// Adds room for TSO requests with up to `max_header` bytes of headers.
    pub fn with_tso(mut self, max_header: u16) -> Self {
        self.max_header = max_header.into();
        self.headers = vec![0; self.requests.len() * self.max_header].into();
        self
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Returns true if there are no requests.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Removes all requests.
    pub fn clear(&mut self) {
        (self.used, self.used_segments) = (0, 0);
    }

    /// Appends a send request for a packet of these segments, with `id` as `wr_id` of its completion. `checksums`
    /// offloads the checksums of the network and transport headers. Returns `false` if the batch is full.
    #[must_use]
    pub fn push(&mut self, id: u64, checksums: bool, segments: impl IntoIterator<Item = Segment>) -> bool {
        let Some(request) = self.add(id, segments) else { return false };
        request.opcode = IBV_WR_SEND;
        request.send_flags = if checksums { IBV_SEND_IP_CSUM } else { 0 };
        self.used += 1;
        true
    }

    /// Appends a request that the device cuts into TCP segments with their own lengths, sequence numbers and
    /// checksums. `segments` has the payload. Returns `false` if the batch is full, or the headers are longer than
    /// [`Self::with_tso`] allows.
    #[must_use]
    pub fn push_tso(&mut self, id: u64, tso: TsoRequest<'_>, segments: impl IntoIterator<Item = Segment>) -> bool {
        let headers = &mut self.headers[self.used * self.max_header..];
        let room = headers.get_mut(..tso.headers.len()).filter(|room| room.len() <= self.max_header);
        let Some(room) = room else { return false };
        room.copy_from_slice(tso.headers);
        let hdr = room.as_mut_ptr().cast();
        let Some(request) = self.add(id, segments) else { return false };
        request.opcode = IBV_WR_TSO;
        request.send_flags = IBV_SEND_IP_CSUM;
        request.operation.tso = ibv_send_wr_tso { hdr, hdr_sz: tso.headers.len() as u16, mss: tso.mss };
        self.used += 1;
        true
    }

    /// Fills in a request except for its operation. The caller counts it.
    fn add(&mut self, id: u64, segments: impl IntoIterator<Item = Segment>) -> Option<&mut ibv_send_wr> {
        let start = self.used_segments;
        let mut end = start;
        for segment in segments {
            *self.segments.get_mut(end)? = segment.raw();
            end += 1;
        }
        let request = self.requests.get_mut(self.used)?;
        request.wr_id = id;
        request.num_sge = (end - start) as c_int;
        self.used_segments = end;
        Some(request)
    }

    /// Posts all requests and clears the batch. Only the last request generates a completion.
    ///
    /// # Errors
    /// A request failed. The requests before it were accepted, and they generate no completion of their own.
    pub fn post(&mut self, pair: &RawPacketQp) -> std::result::Result<(), PostError> {
        let count = self.used;
        self.clear();
        let Some(last) = count.checked_sub(1) else { return Ok(()) };
        let segments = self.segments.as_mut_ptr();
        let requests = self.requests.as_mut_ptr();
        let mut segment = 0;
        for (i, request) in self.requests[..count].iter_mut().enumerate() {
            // SAFETY: `segment` counts the segments of earlier requests, and `push` wrote that many. `i + 1` is less
            // than `count`, the number of requests that `push` wrote.
            unsafe {
                request.sg_list = segments.add(segment);
                request.next = if i == last { null_mut() } else { requests.add(i + 1) };
            }
            segment += request.num_sge as usize;
        }
        self.requests[last].send_flags |= IBV_SEND_SIGNALED;
        let mut bad = null_mut();
        // SAFETY: the pair is alive. The chain of requests and their segment lists are in memory that `self` owns.
        let result = unsafe { ibv_post_send(pair.0.raw.as_ptr(), requests, &raw mut bad) };
        if result == 0 {
            return Ok(());
        }
        let accepted = position(bad, requests, count);
        Err(PostError { accepted, error: pair.0.domain.context.inner.error("ibv_post_send", result, None) })
    }
}

/// Returns the index of the failed request in an array, or 0 if the call does not report a valid one.
fn position<T>(bad: *mut T, first: *mut T, count: usize) -> usize {
    let index = bad.addr().wrapping_sub(first.addr()) / size_of::<T>();
    if bad.is_null() || index >= count { 0 } else { index }
}

/// Reusable receive requests of a work queue (ibv_post_wq_recv(3)).
pub struct ReceiveRequests {
    requests: Box<[ibv_recv_wr]>,
    segments: Box<[ibv_sge]>,
    each: usize,
}

// SAFETY: the pointers inside are written before each use, and point into memory that `self` owns.
unsafe impl Send for ReceiveRequests {}

impl std::fmt::Debug for ReceiveRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReceiveRequests").field("requests", &self.requests.len()).field("each", &self.each).finish()
    }
}

impl ReceiveRequests {
    /// Creates `requests` requests of `segments` segments each. The `wr_id` of a request is its index.
    pub fn new(requests: usize, segments: usize) -> Self {
        Self {
            requests: vec![ibv_recv_wr::zeroed(); requests].into(),
            segments: vec![ibv_sge::zeroed(); requests * segments].into(),
            each: segments,
        }
    }

    /// Sets a segment of a request.
    ///
    /// # Panics
    /// The request or the segment does not exist.
    #[inline]
    pub fn set(&mut self, request: usize, segment: usize, value: Segment) {
        assert!(segment < self.each);
        self.segments[request * self.each + segment] = value.raw();
    }

    /// Posts the requests with these indices, in this order. None of them may be outstanding.
    ///
    /// # Errors
    /// The provider rejected a request.
    ///
    /// # Panics
    /// A request does not exist.
    pub fn post(&mut self, queue: &WorkQueue, indices: &[u32]) -> Result<()> {
        let Some(first) = indices.first() else { return Ok(()) };
        assert!(indices.iter().all(|request| (*request as usize) < self.requests.len()));
        let (segments, requests) = (self.segments.as_mut_ptr(), self.requests.as_mut_ptr());
        for (i, index) in indices.iter().enumerate() {
            let next = indices.get(i + 1);
            let request = &mut self.requests[*index as usize];
            request.wr_id = u64::from(*index);
            request.num_sge = self.each as c_int;
            // SAFETY: the assertion above checked that all indices are below the number of requests. There are
            // `self.each` segments for each request.
            unsafe {
                request.sg_list = segments.add(*index as usize * self.each);
                request.next = next.map_or(null_mut(), |next| requests.add(*next as usize));
            }
        }
        let mut bad = null_mut();
        // SAFETY: the queue is alive. The chain of requests and their segment lists are in memory that `self` owns.
        let result = unsafe { ibv_post_wq_recv(queue.0.raw.as_ptr(), requests.add(*first as usize), &raw mut bad) };
        queue.0.domain.context.inner.check("ibv_post_wq_recv", result)
    }
}

/// Maximum number of completions in one poll.
const MAX_POLL: usize = 64;

/// Buffer for polled completions.
pub struct CompletionBatch(Box<[ibv_wc; MAX_POLL]>);

// SAFETY: the buffer is owned, and its fields are plain numbers.
unsafe impl Send for CompletionBatch {}

impl std::fmt::Debug for CompletionBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionBatch").finish_non_exhaustive()
    }
}

impl Default for CompletionBatch {
    fn default() -> Self {
        Self(Box::new([ibv_wc::zeroed(); MAX_POLL]))
    }
}

impl CompletionBatch {
    /// Polls up to `limit` and at most 64 completions of a queue.
    ///
    /// Do not use it for a queue whose memory a driver reads directly.
    ///
    /// # Errors
    /// The provider cannot poll, or the queue is in error.
    #[inline]
    pub fn poll(&mut self, queue: &CompletionQueue, limit: usize) -> Result<impl Iterator<Item = WorkCompletion>> {
        let wanted = limit.min(MAX_POLL);
        // SAFETY: the queue is alive, and the buffer has room for `wanted` completions.
        let taken = unsafe { ibv_poll_cq(queue.0.raw.as_ptr(), wanted as c_int, self.0.as_mut_ptr()) };
        match usize::try_from(taken) {
            Ok(taken) if taken <= wanted => Ok(self.0[..taken].iter().map(WorkCompletion::from_raw)),
            // Providers that cannot poll return a positive errno.
            Ok(_) => Err(queue.0.context.inner.error("ibv_poll_cq", taken, None)),
            Err(_) => Err(queue.0.context.inner.error("ibv_poll_cq", libc::EIO, None)),
        }
    }
}

/// Returns a description of a completion status (ibv_poll_cq(3), `enum ibv_wc_status`).
pub fn status_text(status: u32) -> &'static str {
    match status {
        IBV_WC_SUCCESS => "success",
        IBV_WC_LOC_LEN_ERR => "local length error",
        IBV_WC_LOC_QP_OP_ERR => "local queue pair operation error",
        IBV_WC_LOC_EEC_OP_ERR => "local end-to-end context operation error",
        IBV_WC_LOC_PROT_ERR => "local protection error",
        IBV_WC_WR_FLUSH_ERR => "flushed, because the queue had stopped",
        IBV_WC_MW_BIND_ERR => "memory window bind error",
        IBV_WC_BAD_RESP_ERR => "bad response",
        IBV_WC_LOC_ACCESS_ERR => "local access error",
        IBV_WC_REM_INV_REQ_ERR => "remote invalid request",
        IBV_WC_REM_ACCESS_ERR => "remote access error",
        IBV_WC_REM_OP_ERR => "remote operation error",
        IBV_WC_RETRY_EXC_ERR => "transport retries exceeded",
        IBV_WC_RNR_RETRY_EXC_ERR => "receiver-not-ready retries exceeded",
        IBV_WC_FATAL_ERR => "fatal error",
        IBV_WC_RESP_TIMEOUT_ERR => "no response in time",
        IBV_WC_GENERAL_ERR => "general error",
        _ => "unknown status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn push_fails_when_the_batch_is_full() {
        let piece = Segment { address: 1, bytes: 2, key: 3 };
        let mut list = SendRequests::new(2, 2);
        assert!(list.is_empty() && list.push(7, true, [piece; 3]));
        assert!(!list.push(8, false, [piece; 2]), "only one segment is left");
        assert!(list.push(8, false, [piece]) && !list.push(9, false, []));
        assert_eq!(list.len(), 2);
        list.clear();
        assert!(list.push(9, false, [piece; 4]));
    }

    #[test]
    fn each_tso_request_has_its_own_headers() {
        let piece = Segment { address: 1, bytes: 2, key: 3 };
        let mut list = SendRequests::new(3, 2).with_tso(4);
        assert!(!list.push_tso(1, TsoRequest { headers: &[0; 5], mss: 9 }, [piece]), "longer than the room");
        for first in [1u8, 2] {
            let headers = [first, 0, 0, 7];
            assert!(list.push_tso(first.into(), TsoRequest { headers: &headers, mss: 9 }, [piece]));
        }
        assert!(list.push(3, false, [piece]) && !list.push_tso(4, TsoRequest { headers: &[], mss: 9 }, [piece]));
        for (at, request) in list.requests[..2].iter().enumerate() {
            assert_eq!((request.opcode, request.send_flags), (IBV_WR_TSO, IBV_SEND_IP_CSUM));
            // SAFETY: `push_tso` wrote this member, and its headers are in memory of the list.
            let (tso, headers) = unsafe {
                let tso = request.operation.tso;
                (tso, std::slice::from_raw_parts(tso.hdr.cast::<u8>(), tso.hdr_sz.into()))
            };
            assert_eq!((tso.mss, headers), (9, &[at as u8 + 1, 0, 0, 7][..]));
        }
        assert_eq!(list.requests[2].opcode, IBV_WR_SEND);
        let mut plain = SendRequests::new(1, 1);
        assert!(!plain.push_tso(1, TsoRequest { headers: &[0], mss: 9 }, [piece]), "without room for headers");
    }

    #[test]
    fn failed_request_index_stays_inside_the_batch() {
        let mut requests = [0u64; 4];
        let first = requests.as_mut_ptr();
        assert_eq!(position(first.wrapping_add(3), first, 4), 3);
        for wrong in [null_mut(), first.wrapping_add(4), first.wrapping_sub(1)] {
            assert_eq!(position(wrong, first, 4), 0);
        }
    }
}
