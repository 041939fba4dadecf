//! Frames on their way from a device to its links.

/// Bytes that wait at most; a longest segmented packet fits into what is left when the outbox says that it is full.
const ROOM: usize = 1 << 20;
/// What may be added at once: 64 KiB cut into segments with headers of their own.
const LARGEST: usize = 256 << 10;
/// Frames before the outbox says that it is full.
const FRAMES: usize = 64;

/// A frame in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Port among all ports.
    pub port: usize,
    start: usize,
    length: usize,
}

/// Frames that devices have sent and that are not yet delivered.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    used: usize,
    frames: Vec<Frame>,
    /// Ports whose link only counts, so that nobody needs to fetch the data: packets and bytes.
    deaf: Vec<Option<(u64, u64)>>,
}

impl Outbox {
    /// For so many ports.
    pub fn new(ports: usize) -> Self {
        Self { bytes: vec![0; ROOM], used: 0, frames: Vec::with_capacity(FRAMES), deaf: vec![None; ports] }
    }

    /// The link of this port only counts.
    pub fn deafen(&mut self, port: usize) {
        self.deaf[port] = Some((0, 0));
    }

    /// Counts a frame if the port's link only counts; false if the frame itself is wanted.
    #[inline]
    pub fn count_only(&mut self, port: usize, length: usize) -> bool {
        match self.deaf.get_mut(port) {
            Some(Some((packets, bytes))) => {
                *packets += 1;
                *bytes += length as u64;
                true
            }
            _ => false,
        }
    }

    /// What was only counted since the last time: packets and bytes.
    pub fn take_counts(&mut self, port: usize) -> (u64, u64) {
        self.deaf.get_mut(port).and_then(Option::as_mut).map_or((0, 0), std::mem::take)
    }

    /// No more frames before a delivery.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.frames.len() >= FRAMES || self.used + LARGEST > self.bytes.len()
    }

    /// Room for a frame to be filled and then sent; `None` if it is too long.
    #[inline]
    pub fn room(&mut self, length: usize) -> Option<&mut [u8]> {
        self.bytes.get_mut(self.used..self.used + length)
    }

    /// Sends the first `length` bytes of what [`Self::room`] gave.
    #[inline]
    pub fn send(&mut self, port: usize, length: usize) {
        self.frames.push(Frame { port, start: self.used, length });
        // Frames start on lines of their own.
        self.used += length.next_multiple_of(64);
    }

    /// The frames that wait.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Bytes of a frame.
    pub fn bytes(&self, frame: Frame) -> &[u8] {
        &self.bytes[frame.start..frame.start + frame.length]
    }

    /// Forgets all frames.
    pub fn clear(&mut self) {
        self.frames.clear();
        self.used = 0;
    }
}
