//! The outbox: frames on their way from a device to its links.

/// Capacity in bytes. The longest packet to be segmented fits into what is left when the outbox reports that
/// it is full.
const ROOM: usize = 1 << 20;
/// Maximum number of bytes that are added at once: 64 KiB cut into segments with their own headers.
const LARGEST: usize = 256 << 10;
/// Number of frames at which the outbox reports that it is full.
const FRAMES: usize = 64;

/// A frame in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Index of the port among all ports.
    pub port: usize,
    start: usize,
    length: usize,
}

/// Frames that devices have sent and that are not delivered yet.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    used: usize,
    frames: Vec<Frame>,
    /// Packets and bytes of ports whose link only counts; `None` for other ports. The data of counted frames
    /// is not fetched.
    count_only_ports: Vec<Option<(u64, u64)>>,
}

impl Outbox {
    /// Creates an outbox for a number of ports.
    pub fn new(ports: usize) -> Self {
        Self { bytes: vec![0; ROOM], used: 0, frames: Vec::with_capacity(FRAMES), count_only_ports: vec![None; ports] }
    }

    /// Marks a port whose link only counts frames.
    pub fn set_count_only(&mut self, port: usize) {
        self.count_only_ports[port] = Some((0, 0));
    }

    /// Counts a frame if the port's link only counts. Returns false if the frame itself must be sent.
    #[inline]
    pub fn count_only(&mut self, port: usize, length: usize) -> bool {
        match self.count_only_ports.get_mut(port) {
            Some(Some((packets, bytes))) => {
                *packets += 1;
                *bytes += length as u64;
                true
            }
            _ => false,
        }
    }

    /// Returns and clears the packets and bytes that were only counted.
    pub fn take_counts(&mut self, port: usize) -> (u64, u64) {
        self.count_only_ports.get_mut(port).and_then(Option::as_mut).map_or((0, 0), std::mem::take)
    }

    /// Returns true if frames must be delivered before more are added.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.frames.len() >= FRAMES || self.used + LARGEST > self.bytes.len()
    }

    /// Returns space for a frame of `length` bytes, to be filled and then sent; `None` if it is too long.
    #[inline]
    pub fn room(&mut self, length: usize) -> Option<&mut [u8]> {
        self.bytes.get_mut(self.used..self.used + length)
    }

    /// Sends the first `length` bytes of the space that [`Self::room`] returned.
    #[inline]
    pub fn send(&mut self, port: usize, length: usize) {
        self.frames.push(Frame { port, start: self.used, length });
        // Frames start on cache-line boundaries.
        self.used += length.next_multiple_of(64);
    }

    /// Returns the frames that wait for delivery.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Returns the bytes of a frame.
    pub fn bytes(&self, frame: Frame) -> &[u8] {
        &self.bytes[frame.start..frame.start + frame.length]
    }

    /// Removes all frames.
    pub fn clear(&mut self) {
        self.frames.clear();
        self.used = 0;
    }
}
