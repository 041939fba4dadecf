//! Receive queues.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use wirepath_verbs::{CompletionBatch, CompletionQueue, Error, ReceiveRequests, Segment, WorkCompletion, WorkQueue};

use crate::drivers::nic::common::ETHERNET_HEADER;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::registered_memory::Sink;
use crate::drivers::nic::common::rx_queue::{self, PostedBuffers, RssGroup, RxResources, buffers_for};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::ChecksumStatus;
use wirepath_packet::{BATCH, Batch, DATA_ROOM, MetaTemplate, Packet, Pool};

/// `IBV_WC_IP_CSUM_OK`: the checksums of the network and transport headers are good.
const CHECKSUMS_RIGHT: u32 = 1 << 2;

/// Configuration of a receive ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct RxConfig {
    /// Buffers of a request. The sink follows them.
    pub(super) buffers: usize,
    /// Bytes of the longest frame.
    pub(super) longest: u32,
    /// lkey of the buffers.
    pub(super) lkey: u32,
    pub(super) sink: Sink,
}

/// A receive ring. All its requests are always posted: received buffers are either swapped for free ones, or
/// stay in place.
pub(super) struct RxRing {
    queue: WorkQueue,
    completions: CompletionQueue,
    room: CompletionBatch,
    requests: ReceiveRequests,
    /// The request that completes next. Requests complete in the order of posting, which never changes.
    next: u32,
    depth: u32,
    /// Requests to repost.
    to_repost: Vec<u32>,
    mode: RxConfig,
    posted: PostedBuffers,
}

impl fmt::Debug for RxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxRing").field("queue", &self.queue).field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl RxRing {
    /// Posts buffers for `depth` requests, a power of two.
    pub(super) fn new(
        rss_group: Arc<RssGroup>,
        queue: WorkQueue,
        completions: CompletionQueue,
        pool: &Pool,
        template: &MetaTemplate,
        depth: u32,
        mode: RxConfig,
    ) -> Result<Self, Error> {
        let count = depth as usize;
        let posted = PostedBuffers::allocate(count * mode.buffers, pool, template, rss_group);
        let posted = posted.map_err(|dry| Error::InvalidRequest(dry.to_string()))?;
        let mut requests = ReceiveRequests::new(count, mode.buffers + 1);
        let Sink { address, lkey, bytes } = mode.sink;
        for request in 0..count {
            for (i, packet) in posted[request * mode.buffers..][..mode.buffers].iter().enumerate() {
                requests.set(request, i, segment(packet, mode.lkey));
            }
            requests.set(request, mode.buffers, Segment { address, bytes, key: lkey });
        }
        requests.post(&queue, &(0..depth).collect::<Vec<_>>())?;
        let (room, to_repost) = (CompletionBatch::default(), Vec::with_capacity(BATCH));
        Ok(Self { queue, completions, room, requests, next: 0, depth, to_repost, mode, posted })
    }
}

/// Returns the segment of a free buffer.
fn segment(packet: &Packet, key: u32) -> Segment {
    Segment { address: packet.default_data_address(), bytes: DATA_ROOM as u32, key }
}

/// Validates a completion. Returns the bytes of its packet.
fn check(reported: &WorkCompletion, next: u32, max_bytes: u32) -> Result<u32, QueueFault> {
    if reported.status != 0 {
        return Err(QueueFault::ErrorStatus { status: reported.status, vendor: reported.vendor_error });
    }
    if reported.request != u64::from(next) {
        return Err(QueueFault::OutOfOrder);
    }
    if reported.bytes.wrapping_sub(1) >= max_bytes {
        return Err(QueueFault::BadLength);
    }
    Ok(reported.bytes)
}

/// Swaps the received buffers of a request for free ones; all or none.
fn swap_request(
    request: usize,
    bytes: u32,
    mode: &RxConfig,
    posted: &mut PostedBuffers,
    requests: &mut ReceiveRequests,
    resources: &RxResources<'_>,
) -> Result<Packet, DropReason> {
    let len = bytes as usize;
    if len < ETHERNET_HEADER {
        return Err(DropReason::TooShort);
    }
    if bytes > mode.longest {
        return Err(DropReason::TooLong);
    }
    let slots = &mut posted[request * mode.buffers..][..mode.buffers];
    let cache = resources.cache_handle().ok_or(DropReason::NoBuffer)?;
    let whole = rx_queue::swap_received(&cache, slots, bytes).ok_or(DropReason::NoBuffer)?;
    for (i, packet) in slots[..buffers_for(len)].iter().enumerate() {
        requests.set(request, i, segment(packet, mode.lkey));
    }
    Ok(whole)
}

impl rx_queue::RxRing for RxRing {
    fn receive(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64, Result<(), QueueFault>) {
        let Self { queue, completions, room, requests, next, depth, to_repost, mode, posted } = self;
        let max_bytes = (mode.buffers * DATA_ROOM) as u32 + mode.sink.bytes;
        let (mut packets, mut bytes, mut result) = (0, 0, Ok(()));
        let polled = match room.poll(completions, batch.space()) {
            Ok(polled) => polled,
            Err(error) => {
                tracing::debug!("{error}");
                return (0, 0, Err(QueueFault::ProviderFailed { call: "ibv_poll_cq" }));
            }
        };
        for reported in polled {
            let len = match check(&reported, *next, max_bytes) {
                Ok(len) => len,
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            };
            let request = *next;
            to_repost.push(request);
            // The depth is a power of two.
            *next = (request + 1) & (*depth - 1);
            match swap_request(request as usize, len, mode, posted, requests, resources) {
                Ok(mut packet) => {
                    if reported.flags & CHECKSUMS_RIGHT != 0 {
                        packet.set_checksum_status(ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD));
                    }
                    packets += 1;
                    bytes += u64::from(len);
                    // There is room: no more completions were polled.
                    drop(batch.push(packet));
                }
                Err(reason) => resources.count_drop(reason),
            }
        }
        if let Err(error) = requests.post(queue, to_repost) {
            tracing::debug!("{error}");
            result = Err(QueueFault::ProviderFailed { call: "ibv_post_wq_recv" });
        }
        to_repost.clear();
        (packets, bytes, result)
    }

    fn arm_interrupt(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_out_of_order_are_faults() {
        let reported = WorkCompletion { request: 0, bytes: 60, ..WorkCompletion::default() };
        assert_eq!(check(&reported, 0, 2048), Ok(60));
        for (request, bytes, status, fault) in [
            (1, 60, 0, QueueFault::OutOfOrder),
            (2, 60, 0, QueueFault::OutOfOrder),
            (u64::MAX, 60, 0, QueueFault::OutOfOrder),
            (0, 0, 0, QueueFault::BadLength),
            (0, 2049, 0, QueueFault::BadLength),
            (9, 0, 5, QueueFault::ErrorStatus { status: 5, vendor: 0 }),
        ] {
            let reported = WorkCompletion { request, bytes, status, ..reported };
            assert_eq!(check(&reported, 0, 2048), Err(fault));
        }
    }
}
