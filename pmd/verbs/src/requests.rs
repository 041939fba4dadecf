// UNSAFETY: posts requests and polls completions through libibverbs.
#![allow(unsafe_code)]

//! Requests and completions as any provider takes and tells them, for drivers that look into no queue's memory.
//!
//! Requests are built in memory that is made once, so that a burst allocates nothing. What they point to is named by keys of registered
//! memory, as in the descriptors of direct verbs: the device reaches nothing else.

use std::ffi::c_int;
use std::ptr::null_mut;

use rdma_core_sys::verbs::*;

use crate::{CompletionQueue, Error, RawPacketQp, Result, WorkCompletion, WorkQueue};

/// A piece of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// Its length.
    pub bytes: u32,
    /// [`crate::MemoryRegion::lkey`].
    pub key: u32,
}

impl Segment {
    fn raw(self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.bytes, lkey: self.key }
    }
}

/// Requests were refused: how many before were accepted, and why the next was not.
#[derive(Debug)]
pub struct Refused {
    /// Requests that the provider took.
    pub accepted: usize,
    /// Why it did not take the next.
    pub error: Error,
}

/// The requests of one burst to a queue pair (ibv_post_send(3)).
pub struct SendRequests {
    requests: Box<[ibv_send_wr]>,
    segments: Box<[ibv_sge]>,
    used: usize,
    used_segments: usize,
}

// SAFETY: the pointers inside are written before each use, and point into what is owned here.
unsafe impl Send for SendRequests {}

impl std::fmt::Debug for SendRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendRequests").field("requests", &self.used).field("segments", &self.used_segments).finish()
    }
}

impl SendRequests {
    /// Room for `requests` of `segments` each.
    pub fn new(requests: usize, segments: usize) -> Self {
        Self {
            requests: vec![ibv_send_wr::zeroed(); requests].into(),
            segments: vec![ibv_sge::zeroed(); requests * segments].into(),
            used: 0,
            used_segments: 0,
        }
    }

    /// Requests in it.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Forgets all requests.
    pub fn clear(&mut self) {
        (self.used, self.used_segments) = (0, 0);
    }

    /// Appends a packet of these pieces, which completes as `name` if it is asked to; `checksums`: of the network and transport headers
    /// are the device's work. `false`: there is no room.
    #[must_use]
    pub fn push(&mut self, name: u64, checksums: bool, pieces: impl IntoIterator<Item = Segment>) -> bool {
        let start = self.used_segments;
        let mut end = start;
        for piece in pieces {
            let Some(segment) = self.segments.get_mut(end) else { return false };
            *segment = piece.raw();
            end += 1;
        }
        let Some(request) = self.requests.get_mut(self.used) else { return false };
        request.wr_id = name;
        request.opcode = IBV_WR_SEND;
        request.num_sge = (end - start) as c_int;
        request.send_flags = if checksums { IBV_SEND_IP_CSUM } else { 0 };
        self.used += 1;
        self.used_segments = end;
        true
    }

    /// Hands all requests to the device, the last asking for a completion, and forgets them.
    ///
    /// # Errors
    /// One of them was refused; those before it were accepted and will not tell of it by themselves.
    pub fn post(&mut self, pair: &RawPacketQp) -> std::result::Result<(), Refused> {
        let count = self.used;
        self.clear();
        let Some(last) = count.checked_sub(1) else { return Ok(()) };
        let segments = self.segments.as_mut_ptr();
        let requests = self.requests.as_mut_ptr();
        let mut segment = 0;
        for (i, request) in self.requests[..count].iter_mut().enumerate() {
            // SAFETY: as many as were written lie there, and `count` requests.
            unsafe {
                request.sg_list = segments.add(segment);
                request.next = if i == last { null_mut() } else { requests.add(i + 1) };
            }
            segment += request.num_sge as usize;
        }
        self.requests[last].send_flags |= IBV_SEND_SIGNALED;
        let mut bad = null_mut();
        // SAFETY: a living pair; a chain of requests whose lists lie in memory that is owned here.
        let result = unsafe { ibv_post_send(pair.0.raw.as_ptr(), requests, &raw mut bad) };
        if result == 0 {
            return Ok(());
        }
        let accepted = position(bad, requests, count);
        Err(Refused { accepted, error: pair.0.domain.context.inner.error("ibv_post_send", result, None) })
    }
}

/// Which request of an array a call stopped at; the first if it does not say.
fn position<T>(bad: *mut T, first: *mut T, count: usize) -> usize {
    let distance = bad.addr().wrapping_sub(first.addr()) / size_of::<T>();
    if bad.is_null() || distance >= count { 0 } else { distance }
}

/// The requests of a receive queue, posted again and again (ibv_post_wq_recv(3)).
pub struct ReceiveRequests {
    requests: Box<[ibv_recv_wr]>,
    segments: Box<[ibv_sge]>,
    each: usize,
}

// SAFETY: as of `SendRequests`.
unsafe impl Send for ReceiveRequests {}

impl std::fmt::Debug for ReceiveRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReceiveRequests").field("requests", &self.requests.len()).field("each", &self.each).finish()
    }
}

impl ReceiveRequests {
    /// So many requests, named from 0 on, of `segments` each.
    pub fn new(requests: usize, segments: usize) -> Self {
        Self {
            requests: vec![ibv_recv_wr::zeroed(); requests].into(),
            segments: vec![ibv_sge::zeroed(); requests * segments].into(),
            each: segments,
        }
    }

    /// Sets where a segment of a request lies.
    ///
    /// # Panics
    /// If there is no such request or segment.
    #[inline]
    pub fn set(&mut self, request: usize, segment: usize, place: Segment) {
        assert!(segment < self.each);
        self.segments[request * self.each + segment] = place.raw();
    }

    /// Posts these requests, in this order; none of them may be posted already.
    ///
    /// # Errors
    /// The provider refused one of them.
    ///
    /// # Panics
    /// If there is no such request.
    pub fn post(&mut self, queue: &WorkQueue, which: &[u32]) -> Result<()> {
        let Some(first) = which.first() else { return Ok(()) };
        assert!(which.iter().all(|request| (*request as usize) < self.requests.len()));
        let (segments, requests) = (self.segments.as_mut_ptr(), self.requests.as_mut_ptr());
        for (i, name) in which.iter().enumerate() {
            let next = which.get(i + 1);
            let request = &mut self.requests[*name as usize];
            request.wr_id = u64::from(*name);
            request.num_sge = self.each as c_int;
            // SAFETY: looked at above; as many segments for each request lie there.
            unsafe {
                request.sg_list = segments.add(*name as usize * self.each);
                request.next = next.map_or(null_mut(), |next| requests.add(*next as usize));
            }
        }
        let mut bad = null_mut();
        // SAFETY: a living queue; a chain of requests whose lists lie in memory that is owned here.
        let result = unsafe { ibv_post_wq_recv(queue.0.raw.as_ptr(), requests.add(*first as usize), &raw mut bad) };
        queue.0.domain.context.inner.done("ibv_post_wq_recv", result)
    }
}

/// Most completions that are taken in one call.
const MOST: usize = 64;

/// Room for completions.
pub struct Completions(Box<[ibv_wc; MOST]>);

// SAFETY: plain numbers.
unsafe impl Send for Completions {}

impl std::fmt::Debug for Completions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}

impl Default for Completions {
    fn default() -> Self {
        Self(Box::new([ibv_wc::zeroed(); MOST]))
    }
}

impl Completions {
    /// Takes up to `most` completions, 64 at most, out of a queue.
    ///
    /// # Errors
    /// The provider cannot, or the queue is broken.
    #[inline]
    pub fn poll(&mut self, queue: &CompletionQueue, most: usize) -> Result<impl Iterator<Item = WorkCompletion>> {
        let wanted = most.min(MOST);
        // SAFETY: a living queue, and room for what is wanted.
        let taken = unsafe { ibv_poll_cq(queue.0.raw.as_ptr(), wanted as c_int, self.0.as_mut_ptr()) };
        match usize::try_from(taken) {
            Ok(taken) if taken <= wanted => Ok(self.0[..taken].iter().map(WorkCompletion::of)),
            // Providers that cannot poll return the errno as it is.
            Ok(_) => Err(queue.0.context.inner.error("ibv_poll_cq", taken, None)),
            Err(_) => Err(queue.0.context.inner.error("ibv_poll_cq", libc::EIO, None)),
        }
    }
}

/// What a completion's status means (ibv_poll_cq(3), `enum ibv_wc_status`).
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
        _ => "an error without a name",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_end_where_the_room_does() {
        let piece = Segment { address: 1, bytes: 2, key: 3 };
        let mut list = SendRequests::new(2, 2);
        assert!(list.is_empty() && list.push(7, true, [piece; 3]));
        assert!(!list.push(8, false, [piece; 2]), "one segment is left");
        assert!(list.push(8, false, [piece]) && !list.push(9, false, []));
        assert_eq!(list.len(), 2);
        list.clear();
        assert!(list.push(9, false, [piece; 4]));
    }

    #[test]
    fn a_request_that_was_refused_is_found_only_among_its_own() {
        let mut requests = [0u64; 4];
        let first = requests.as_mut_ptr();
        assert_eq!(position(first.wrapping_add(3), first, 4), 3);
        for wrong in [null_mut(), first.wrapping_add(4), first.wrapping_sub(1)] {
            assert_eq!(position(wrong, first, 4), 0);
        }
    }
}
