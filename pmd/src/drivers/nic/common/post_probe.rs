//! Questions that only the provider library answers, when a request is posted.

use std::iter;

use wirepath_verbs::{Error, QueuePairState, RawPacketQp, Result, Segment, SendRequests, TsoRequest};

/// Bytes of memory for frames.
const FRAME: usize = 64;

/// Posts a frame of `bytes` bytes, at most 64, on an unused queue pair. Returns the error of the library, if it
/// refuses the request. The queue pair is in the error state afterwards, in which it sends nothing.
pub(crate) fn refusal(pair: &RawPacketQp, port: u8, bytes: u32, checksums: bool) -> Result<Option<Error>> {
    post(pair, port, bytes, |requests, _, segment| requests.push(0, checksums, iter::once(segment)))
}

/// Posts a packet for TCP segmentation like [`refusal`], with 54 bytes of headers. The queue pair must have room for
/// them.
pub(crate) fn tso_refusal(pair: &RawPacketQp, port: u8) -> Result<Option<Error>> {
    post(pair, port, FRAME as u32, |requests, frame, segment| {
        requests.push_tso(0, TsoRequest { headers: &frame[..54], mss: 1 }, iter::once(segment))
    })
}

fn post(
    pair: &RawPacketQp,
    port: u8,
    bytes: u32,
    push: impl FnOnce(&mut SendRequests, &[u8; FRAME], Segment) -> bool,
) -> Result<Option<Error>> {
    // Through the ready-to-send state, in which libraries determine what may be posted.
    pair.start(port)?;
    pair.set_state(QueuePairState::Error, port)?;
    let frame = [0u8; FRAME];
    debug_assert!(bytes as usize <= FRAME);
    let mut requests = SendRequests::new(1, 1).with_tso(FRAME as u16);
    let segment = Segment { address: frame.as_ptr() as u64, bytes, key: 0 };
    let pushed = push(&mut requests, &frame, segment);
    debug_assert!(pushed, "there is room for one");
    Ok(requests.post(pair).err().map(|refused| refused.error))
}
