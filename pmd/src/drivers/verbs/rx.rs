//! Receive queues.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use wirepath_verbs::{CompletionQueue, Completions, Error, ReceiveRequests, Segment, WorkCompletion, WorkQueue};

use crate::drivers::direct::SHORTEST;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::receive::{self, Posted, Spread, Supply, buffers_for};
use crate::drivers::direct::registered::Sink;
use crate::drops::DropReason;
use crate::packet::offload::Verdicts;
use crate::packet::{BATCH, Batch, Blank, DATA_ROOM, Packet, Pool};

/// `IBV_WC_IP_CSUM_OK`: checksums of the network and transport headers are right.
const CHECKSUMS_RIGHT: u32 = 1 << 2;

/// How a receive queue works.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceiveMode {
    /// Buffers of a request; behind them lies the sink.
    pub(super) buffers: usize,
    /// Bytes of the longest frame.
    pub(super) longest: u32,
    /// Key of the buffers.
    pub(super) lkey: u32,
    pub(super) sink: Sink,
}

/// A receive queue. All its requests are posted all the time: whoever takes filled buffers out puts fresh ones in their place, or leaves them
/// where they are.
pub(super) struct ReceiveRing {
    queue: WorkQueue,
    completions: CompletionQueue,
    room: Completions,
    requests: ReceiveRequests,
    /// The request that completes next: those of a receive queue do so in the order in which they were posted, which is always the same.
    next: u32,
    depth: u32,
    /// Requests to be posted anew.
    again: Vec<u32>,
    mode: ReceiveMode,
    posted: Posted,
}

impl fmt::Debug for ReceiveRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveRing").field("queue", &self.queue).field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl ReceiveRing {
    /// Posts buffers for `depth` requests, a power of two.
    pub(super) fn new(
        spread: Arc<Spread>,
        queue: WorkQueue,
        completions: CompletionQueue,
        pool: &Pool,
        blank: &Blank,
        depth: u32,
        mode: ReceiveMode,
    ) -> Result<Self, Error> {
        let count = depth as usize;
        let posted = Posted::take(count * mode.buffers, pool, blank, spread);
        let posted = posted.map_err(|dry| Error::Request(dry.to_string()))?;
        let mut requests = ReceiveRequests::new(count, mode.buffers + 1);
        let Sink { address, lkey, bytes } = mode.sink;
        for request in 0..count {
            for (i, packet) in posted[request * mode.buffers..][..mode.buffers].iter().enumerate() {
                requests.set(request, i, place(packet, mode.lkey));
            }
            requests.set(request, mode.buffers, Segment { address, bytes, key: lkey });
        }
        requests.post(&queue, &(0..depth).collect::<Vec<_>>())?;
        let (room, again) = (Completions::default(), Vec::with_capacity(BATCH));
        Ok(Self { queue, completions, room, requests, next: 0, depth, again, mode, posted })
    }
}

/// Where a fresh buffer's data goes.
fn place(packet: &Packet, key: u32) -> Segment {
    Segment { address: packet.fresh_address(), bytes: DATA_ROOM as u32, key }
}

/// Bytes of the packet that a completion tells of, if it can be true.
fn check(said: &WorkCompletion, next: u32, most: u32) -> Result<u32, Fault> {
    if said.status != 0 {
        return Err(Fault::Failed { status: said.status, vendor: said.vendor_error });
    }
    if said.request != u64::from(next) {
        return Err(Fault::OutOfOrder);
    }
    if said.bytes.wrapping_sub(1) >= most {
        return Err(Fault::BadLength);
    }
    Ok(said.bytes)
}

/// Takes the filled buffers of a request out and puts fresh ones in their place; all or none.
fn take_out(
    request: usize,
    bytes: u32,
    mode: &ReceiveMode,
    posted: &mut Posted,
    requests: &mut ReceiveRequests,
    supply: &Supply<'_>,
) -> Result<Packet, DropReason> {
    let len = bytes as usize;
    if len < SHORTEST {
        return Err(DropReason::TooShort);
    }
    if bytes > mode.longest {
        return Err(DropReason::TooLong);
    }
    let slots = &mut posted[request * mode.buffers..][..mode.buffers];
    let hand = supply.pool.hand(supply.blank).ok_or(DropReason::NoBuffer)?;
    let whole = receive::take_out(&hand, slots, bytes).ok_or(DropReason::NoBuffer)?;
    for (i, packet) in slots[..buffers_for(len)].iter().enumerate() {
        requests.set(request, i, place(packet, mode.lkey));
    }
    Ok(whole)
}

impl receive::ReceiveRing for ReceiveRing {
    fn receive(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let Self { queue, completions, room, requests, next, depth, again, mode, posted } = self;
        let most = (mode.buffers * DATA_ROOM) as u32 + mode.sink.bytes;
        let (mut packets, mut bytes, mut result) = (0, 0, Ok(()));
        let told = match room.poll(completions, batch.space()) {
            Ok(told) => told,
            Err(error) => {
                tracing::warn!("{error}");
                return (0, 0, Err(Fault::Library));
            }
        };
        for said in told {
            let len = match check(&said, *next, most) {
                Ok(len) => len,
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            };
            let request = *next;
            again.push(request);
            // A power of two.
            *next = (request + 1) & (*depth - 1);
            match take_out(request as usize, len, mode, posted, requests, supply) {
                Ok(mut packet) => {
                    if said.flags & CHECKSUMS_RIGHT != 0 {
                        packet.set_verdicts(Verdicts::L3_GOOD.with(Verdicts::L4_GOOD));
                    }
                    packets += 1;
                    bytes += u64::from(len);
                    // There is room: no more were taken.
                    drop(batch.push(packet));
                }
                Err(reason) => supply.drop_one(reason),
            }
        }
        if let Err(error) = requests.post(queue, again) {
            tracing::warn!("{error}");
            result = Err(Fault::Library);
        }
        again.clear();
        (packets, bytes, result)
    }

    fn wait(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_completions_of_the_request_whose_turn_it_is_are_believed() {
        let said = WorkCompletion { request: 0, bytes: 60, ..WorkCompletion::default() };
        assert_eq!(check(&said, 0, 2048), Ok(60));
        for (request, bytes, status, fault) in [
            (1, 60, 0, Fault::OutOfOrder),
            (2, 60, 0, Fault::OutOfOrder),
            (u64::MAX, 60, 0, Fault::OutOfOrder),
            (0, 0, 0, Fault::BadLength),
            (0, 2049, 0, Fault::BadLength),
            (9, 0, 5, Fault::Failed { status: 5, vendor: 0 }),
        ] {
            let said = WorkCompletion { request, bytes, status, ..said };
            assert_eq!(check(&said, 0, 2048), Err(fault));
        }
    }
}
