//! Questions that only the provider library answers, when a request is posted.

use std::iter;

use wirepath_verbs::{Error, QueuePairState, RawPacketQp, Result, Segment, SendRequests};

/// Posts a frame of `bytes` bytes, at most 64, on an unused queue pair. Returns the error of the library, if it
/// refuses the request. The queue pair is in the error state afterwards, in which it sends nothing.
pub(crate) fn refusal(pair: &RawPacketQp, port: u8, bytes: u32, checksums: bool) -> Result<Option<Error>> {
    // Through the ready-to-send state, in which libraries determine what may be posted.
    pair.start(port)?;
    pair.set_state(QueuePairState::Error, port)?;
    let frame = [0u8; 64];
    debug_assert!(bytes as usize <= frame.len());
    let mut requests = SendRequests::new(1, 1);
    let segment = Segment { address: frame.as_ptr() as u64, bytes, key: 0 };
    let pushed = requests.push(0, checksums, iter::once(segment));
    debug_assert!(pushed, "there is room for one");
    Ok(requests.post(pair).err().map(|refused| refused.error))
}
