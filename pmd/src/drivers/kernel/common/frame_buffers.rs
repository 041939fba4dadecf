//! Packet buffers into which the kernel writes a frame of any length, up to a superframe.

use wirepath_packet::{DATA_ROOM, HEADROOM, Packet, Pool};

/// Bytes of a buffer without headroom.
const WHOLE: usize = HEADROOM + DATA_ROOM;
/// Buffers behind the first one. Together they hold a superframe of 64 KiB with headers and tags.
const TAIL: usize = 29;
const _: () = assert!(DATA_ROOM + TAIL * WHOLE > (64 << 10) + 64);
/// Buffers of a frame.
pub(crate) const BUFFERS: usize = 1 + TAIL;

/// Buffers for one frame. Those that a frame does not fill serve for the next one.
#[derive(Default)]
pub(crate) struct FrameBuffers {
    head: Option<Packet>,
    /// In reverse order.
    tail: Vec<Packet>,
}

impl FrameBuffers {
    pub(crate) fn new() -> Self {
        Self { head: None, tail: Vec::with_capacity(TAIL) }
    }

    /// Takes the missing buffers from the pool. Returns `false` if it has not enough, and gives all buffers back then:
    /// queues that share a small pool would otherwise wait for buffers that each of them keeps.
    #[inline]
    pub(crate) fn fill(&mut self, pool: &Pool) -> bool {
        let is_filled = self.take_missing(pool);
        if !is_filled {
            self.clear();
        }
        is_filled
    }

    /// Gives all buffers back to the pool.
    pub(crate) fn clear(&mut self) {
        self.head = None;
        self.tail.clear();
    }

    #[inline]
    fn take_missing(&mut self, pool: &Pool) -> bool {
        if self.head.is_none() {
            self.head = pool.take();
        }
        while self.tail.len() < TAIL {
            let Some(mut buffer) = pool.take() else { return false };
            let is_set = buffer.set_data(0, WHOLE);
            debug_assert!(is_set, "the buffer has as many bytes");
            self.tail.push(buffer);
        }
        match &mut self.head {
            Some(head) => head.set_data(HEADROOM, DATA_ROOM),
            None => false,
        }
    }

    /// Returns the bytes of the buffers in order.
    #[inline]
    pub(crate) fn parts(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.head.iter_mut().chain(self.tail.iter_mut().rev()).map(Packet::data_mut)
    }

    /// Returns the packet of the first `len` bytes. `None` if the buffers have fewer.
    #[inline]
    pub(crate) fn take(&mut self, len: usize) -> Option<Packet> {
        let rest = len.saturating_sub(DATA_ROOM);
        let used = rest.div_ceil(WHOLE);
        let unused = self.tail.len().checked_sub(used)?;
        let mut head = self.head.take()?;
        head.truncate(len);
        let mut last = rest.wrapping_sub(used.wrapping_sub(1).wrapping_mul(WHOLE));
        // From the last buffer to the first, so that each is appended to a packet of one buffer.
        let mut behind: Option<Packet> = None;
        for mut buffer in self.tail.drain(unused..) {
            buffer.truncate(std::mem::replace(&mut last, WHOLE));
            if let Some(behind) = behind.take() {
                buffer.append_segment(behind).ok()?;
            }
            behind = Some(buffer);
        }
        if let Some(behind) = behind {
            head.append_segment(behind).ok()?;
        }
        Some(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_all_lengths_keep_their_bytes() {
        let pool = Pool::new("frames", 128).unwrap();
        let mut buffers = FrameBuffers::new();
        for len in [0, 1, 60, DATA_ROOM, DATA_ROOM + 1, DATA_ROOM + WHOLE, DATA_ROOM + WHOLE + 1, 9000, 65_600] {
            assert!(buffers.fill(&pool));
            let mut at = 0;
            for part in buffers.parts() {
                part.iter_mut().for_each(|byte| {
                    *byte = at as u8 ^ (at >> 8) as u8;
                    at += 1;
                });
            }
            assert!(at > (64 << 10) + 64);
            let packet = buffers.take(len).unwrap();
            assert_eq!(packet.len(), len);
            let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == at as u8 ^ (at >> 8) as u8), "{len} bytes");
            assert_eq!(bytes.len(), len);
        }
        assert!(buffers.fill(&pool));
        assert!(buffers.take(100_000).is_none());
        drop(buffers);
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn an_exhausted_pool_is_reported() {
        let pool = Pool::new("frames", 8).unwrap();
        let mut buffers = FrameBuffers::new();
        assert!(!buffers.fill(&pool));
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn queues_of_a_small_pool_do_not_wait_for_each_other() {
        let pool = Pool::new("frames", BUFFERS as u32 + 10).unwrap();
        let (mut one, mut other) = (FrameBuffers::new(), FrameBuffers::new());
        for _ in 0..3 {
            assert!(one.fill(&pool));
            assert!(!other.fill(&pool), "the first one has them");
            assert_eq!(one.take(60).unwrap().len(), 60);
        }
        drop(one);
        assert!(other.fill(&pool));
        drop(other);
        assert_eq!(pool.outstanding(), 0);
    }
}
